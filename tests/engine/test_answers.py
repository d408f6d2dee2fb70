"""What an answer that is read means to the steps after it: a budget that ends reasoning, a call that ends the answer."""

from __future__ import annotations

from cllm.engine.batch.plan import StepOutput
from cllm.engine.events import Delta, Event, Finished, FinishReason
from cllm.engine.limits import Limits
from cllm.engine.sampling.params import StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.testing.fake import FakeVocabulary
from cllm.text.answers import AnswerFormat
from cllm.text.call_formats import HERMES
from cllm.text.grammar import Grammar, Grammars, GrammarSource, Kind
from cllm.text.parts import written
from cllm.text.reasoning import TAGS
from cllm.text.tools import Tool

LIMITS = Limits(n_cells=1000, n_slots=8, n_ctx=500, n_rows_max=64, row_budget=64, n_live_max=8, n_waiting_max=10)
CALL = '<tool_call>{"name": "add"}</tool_call>'


def answer(
    form: AnswerFormat,
    drawn: str,
    *stop: str,
    grammar: Grammar | None = None,
    max_tokens: int | None = None,
    stop_tokens: frozenset[int] = frozenset(),
) -> list[Event]:
    """The events of a sequence that draws the bytes of `drawn`, save where its sampler is forced; then it ends its turn."""
    scheduler = StepScheduler(LIMITS, FakeVocabulary())
    stopping = StopParams(stop=stop, max_tokens=max_tokens, stop_token_ids=stop_tokens)
    scheduler.submit(SequenceSpec(prompt=[1], answer=form, stopping=stopping, grammar=grammar), 0.0)
    tokens = [*drawn.encode(), 257]
    events: list[Event] = []
    while (plan := scheduler.plan(0.0)) is not None:
        if not plan.is_step or not plan.outputs:
            break
        forced = plan.samplers[0]._forced
        events += scheduler.apply(plan, StepOutput([forced[0] if forced else tokens.pop(0)], [], None), 0.0)
        scheduler.check()
        if isinstance(events[-1], Finished):
            break
    return events


def told(events: list[Event]) -> str:
    return "".join([written(e.parts) if e.parts else e.text for e in events if isinstance(e, Delta | Finished)])


def end(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def test_reasoning_that_has_had_its_tokens_is_closed() -> None:
    form = AnswerFormat(tags=TAGS[0], opened=True, n_reasoning_max=5, closing=tuple(b"\n</think>\n\n"))
    events = answer(form, "0123456789")
    assert told(events) == "0123456789"
    assert [e.text for e in events if isinstance(e, Delta) and e.text] == list("56789")
    assert end(events).usage.n_reasoning == len("01234\n</think>")


def test_what_closes_reasoning_is_no_part_of_what_a_grammar_holds() -> None:
    form = AnswerFormat(tags=TAGS[0], opened=True, n_reasoning_max=5, closing=tuple(b"\n</think>\n\n"))
    grammar = Grammars(FakeVocabulary()).compile(GrammarSource(Kind.REGEX, "ab"))
    events = answer(form, "01234ab", grammar=grammar)
    assert told(events) == "01234ab"
    assert end(events).reason is FinishReason.STOP


def test_a_stop_token_that_closes_reasoning_by_force_ends_nothing_and_one_that_is_drawn_does() -> None:
    form = AnswerFormat(tags=TAGS[0], opened=True, n_reasoning_max=5, closing=tuple(b"\n</think>\n\n"))
    grammar = Grammars(FakeVocabulary()).compile(GrammarSource(Kind.REGEX, "ab"))
    newline = frozenset(b"\n")
    assert told(answer(form, "01234ab", grammar=grammar, stop_tokens=newline)) == "01234ab"
    events = answer(form, "01234ab\ncd", stop_tokens=newline)
    assert (told(events), end(events).stop_reason) == ("01234ab", ord("\n"))


def test_reasoning_that_ends_in_time_is_left_alone() -> None:
    form = AnswerFormat(tags=TAGS[0], opened=True, n_reasoning_max=50, closing=tuple(b"\n</think>\n\n"))
    events = answer(form, "ab</think>cd")
    assert told(events) == "abcd"
    assert end(events).reason is FinishReason.STOP


def test_an_answer_that_calls_tools_says_so_at_its_end() -> None:
    form = AnswerFormat(calls=HERMES, tools=(Tool("add"),))
    assert end(answer(form, CALL)).reason is FinishReason.TOOL_CALLS
    assert end(answer(form, "no call")).reason is FinishReason.STOP


def test_where_one_call_is_wanted_the_answer_is_over_with_it() -> None:
    for single, n_calls in ((True, 1), (False, 2)):
        form = AnswerFormat(calls=HERMES, tools=(Tool("add"),), single=single)
        events = answer(form, CALL + CALL)
        assert told(events) == "add{}" * n_calls
        assert end(events).reason is FinishReason.TOOL_CALLS


def test_a_stop_string_that_is_found_in_what_was_held_back_is_why_the_answer_ended() -> None:
    form = AnswerFormat(calls=HERMES, tools=(Tool("add"),))
    cut = answer(form, 'so <tool_call>{"STOP": 1', "STOP")
    assert told(cut) == 'so <tool_call>{"'
    assert (end(cut).reason, end(cut).stop_reason) == (FinishReason.STOP, "STOP")
    for max_tokens in (17, 22):  # what might still have become a call says nothing, before the stop string and behind it
        unfinished = answer(form, 'so <tool_call>{"STOP": 1', "STOP", max_tokens=max_tokens)
        assert (end(unfinished).reason, end(unfinished).stop_reason) == (FinishReason.LENGTH, None)


def test_a_stop_string_after_a_call_ends_the_answer_with_the_call() -> None:
    events = answer(AnswerFormat(calls=HERMES, tools=(Tool("add"),)), CALL + "and so on", "so")
    assert told(events) == "add{}and "
    assert (end(events).reason, end(events).stop_reason) == (FinishReason.TOOL_CALLS, "so")
