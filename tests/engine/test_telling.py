"""The queue before a model that reads and tells text: nothing is lost count of, whatever it tells and whenever it stops."""

from __future__ import annotations

import pytest

from cllm.backend import StreamCall, StreamChat, StreamEnd, StreamForm, StreamText, StreamUsage
from cllm.engine.events import Delta, Failed, Finished, FinishReason
from cllm.engine.limits import Limits
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.engine.telling import TextScheduler, text_request_of
from cllm.errors import DeadlineExceeded, GenerationFailed, InvalidRequest, NotHeeded
from cllm.text.unread import NoVocabulary, UnreadPrompt

LIMITS = Limits(n_cells=44, n_slots=4, n_ctx=10, n_rows_max=4, row_budget=None, n_live_max=4, n_waiting_max=8)


@pytest.fixture
def scheduler() -> TextScheduler:
    return TextScheduler(LIMITS, NoVocabulary(), frozenset({"temperature", "json_schema"}))


def begun(scheduler: TextScheduler, said: str | StreamChat = "x" * 20, **fields: object) -> int:
    seq_id = scheduler.submit(SequenceSpec(prompt=UnreadPrompt.of(said, 20, LIMITS.n_ctx), **fields), now=0.0)  # type: ignore[arg-type]
    scheduler.turn(0.0)
    scheduler.check()
    return seq_id


def test_a_sequence_may_be_longer_than_its_cells(scheduler: TextScheduler) -> None:
    """How much fits is the model's business: here the cells are a formality."""
    seq_id = begun(scheduler)
    for i in range(50):
        (event,) = scheduler.take_text(StreamText(seq_id, "ab"), now=i)
        assert isinstance(event, Delta)
        scheduler.check()
    (end,) = scheduler.take_end(StreamEnd(seq_id, is_cut=True, usage=StreamUsage(n_prompt=7, n_generated=48)), now=51.0)
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.n_prompt, end.usage.n_generated) == (FinishReason.LENGTH, 7, 48)
    scheduler.check()
    assert scheduler.cells.n_free == LIMITS.n_cells


def test_without_a_usage_the_count_is_a_guess(scheduler: TextScheduler) -> None:
    seq_id = begun(scheduler)
    scheduler.take_text(StreamText(seq_id, "ab", n_tokens=3), now=1.0)
    (end,) = scheduler.take_end(StreamEnd(seq_id), now=2.0)
    assert isinstance(end, Finished)
    assert (end.usage.n_prompt, end.usage.n_generated) == (5, 3)


def test_what_was_told_is_counted_and_no_count_ever_falls(scheduler: TextScheduler) -> None:
    def counted() -> tuple[int, int, int, int]:
        totals = scheduler.totals
        return totals.n_prompt_tokens, totals.n_generated, totals.n_prefill_rows, scheduler.memory.totals.n_prompt_tokens_saved

    def answered(usage: StreamUsage | None, *, says: bool = True) -> tuple[int, int, int, int]:
        seq_id = begun(scheduler)
        before = counted()
        if says:
            scheduler.take_text(StreamText(seq_id, "ab", n_tokens=3), now=1.0)
        assert all(a >= b for a, b in zip(counted(), before, strict=True))
        before = counted()
        scheduler.take_end(StreamEnd(seq_id, usage=usage), now=2.0)
        assert all(a >= b for a, b in zip(counted(), before, strict=True))
        return counted()

    assert answered(StreamUsage(n_prompt=180, n_generated=80, n_cached=160)) == (180, 80, 20, 160)
    assert answered(StreamUsage(n_prompt=2, n_generated=1, n_cached=0)) == (185, 83, 25, 160), "more was guessed: 5, 3 and 5"
    assert answered(StreamUsage(n_prompt=8, n_generated=4, n_cached=0)) == (190, 85, 30, 160), "all that was told, together"
    assert answered(None) == (195, 88, 35, 160)
    assert answered(StreamUsage(n_prompt=10, n_generated=1, n_cached=4), says=False) == (205, 89, 41, 164)


def test_a_stop_string_between_two_pieces_ends_it_and_the_model_is_told(scheduler: TextScheduler) -> None:
    seq_id = begun(scheduler, stopping=StopParams(stop=("END",)))
    (first,) = scheduler.take_text(StreamText(seq_id, "ab E"), now=1.0)
    assert isinstance(first, Delta)
    assert first.text == "ab "
    _, end = scheduler.take_text(StreamText(seq_id, "ND and more"), now=2.0)
    assert isinstance(end, Finished)
    assert (end.reason, end.stop_reason, end.text) == (FinishReason.STOP, "END", "")
    assert scheduler.turn(3.0).stopped == [seq_id]
    assert scheduler.take_text(StreamText(seq_id, "late"), now=4.0) == scheduler.take_end(StreamEnd(seq_id), now=4.0) == []
    scheduler.check()


def test_what_was_held_back_comes_with_the_end(scheduler: TextScheduler) -> None:
    seq_id = begun(scheduler, stopping=StopParams(stop=("END",)))
    scheduler.take_text(StreamText(seq_id, "ab E"), now=1.0)
    (end,) = scheduler.take_end(StreamEnd(seq_id), now=2.0)
    assert isinstance(end, Finished)
    assert end.text == "E"


def test_an_answer_with_a_call_ends_for_it(scheduler: TextScheduler) -> None:
    seq_id = begun(scheduler)
    scheduler.take_text(StreamText(seq_id, reasoning="hm", n_tokens=2), now=1.0)
    scheduler.take_text(StreamText(seq_id, calls=(StreamCall(0, "look", "{}"),)), now=1.0)
    (end,) = scheduler.take_end(StreamEnd(seq_id), now=2.0)
    assert isinstance(end, Finished)
    assert (end.reason, end.usage.n_reasoning) == (FinishReason.TOOL_CALLS, 2)


def test_a_first_text_that_comes_too_late_is_a_504(scheduler: TextScheduler) -> None:
    seq_id = begun(scheduler, timeout_s=1.0)
    (event,) = scheduler.take_text(StreamText(seq_id, "ab"), now=1.5)
    assert isinstance(event, Failed)
    assert isinstance(event.error, DeadlineExceeded)
    scheduler.check()


def test_what_was_told_before_its_tokens_are_counted_has_begun(scheduler: TextScheduler) -> None:
    late, begun_there = begun(scheduler, timeout_s=1.0), begun(scheduler)
    for seq_id in (late, begun_there):
        scheduler.take_text(StreamText(seq_id, "The answer is", n_tokens=0), now=0.5)
    (end,) = scheduler.turn(1.5).events
    assert isinstance(end, Finished)
    assert (end.reason, end.stop_reason) == (FinishReason.LENGTH, "timeout")
    (failed,) = scheduler.take_death(2.0)
    assert isinstance(failed, Failed), "another model would begin it once more"
    assert failed.seq_id == begun_there
    scheduler.check()


def test_a_key_has_what_was_counted_for_it_in_the_end_and_its_numbers_never_fall(scheduler: TextScheduler) -> None:
    seq_id = begun(scheduler, key="a")
    scheduler.take_text(StreamText(seq_id, "one two three", n_tokens=3), now=0.5)
    (account,) = [account for account in scheduler.accounts if account.key == "a"]
    guessed = account.n_prompt_tokens
    scheduler.take_end(StreamEnd(seq_id, usage=StreamUsage(n_prompt=guessed + 5, n_generated=2)), now=1.0)
    assert (account.n_prompt_tokens, account.n_generated) == (guessed + 5, 3)
    seq_id = begun(scheduler, key="a")
    scheduler.take_text(StreamText(seq_id, "one two", n_tokens=2), now=1.5)
    assert account.n_generated == 4, "one was counted too many before"


def test_an_event_with_nothing_in_it_begins_nothing(scheduler: TextScheduler) -> None:
    seq_id = begun(scheduler)
    assert scheduler.take_text(StreamText(seq_id, n_tokens=0), now=0.5) == []
    assert scheduler.take_death(1.0) == [], "nobody heard anything yet"
    assert [sequence.seq_id for sequence in scheduler.turn(1.0).started] == [seq_id]
    scheduler.check()


def test_an_error_is_a_500_and_a_refusal_is_itself(scheduler: TextScheduler) -> None:
    refusal = InvalidRequest("top_p: no", param="top_p")
    first, second = begun(scheduler), begun(scheduler)
    events = scheduler.take_end(StreamEnd(first, "the line is cut"), 1.0) + scheduler.take_end(StreamEnd(second, refusal=refusal), 1.0)
    failed = [event.error for event in events if isinstance(event, Failed)]
    assert isinstance(failed[0], GenerationFailed)
    assert failed[1] is refusal


@pytest.mark.parametrize(
    ("said", "fields", "param"),
    [
        ("a", {"sampling": SamplingParams(top_k=4)}, "top_k"),
        ("a", {"form": StreamForm("regex", "a+")}, "regex"),
        ("a", {"stopping": StopParams(ignore_eos=True)}, "ignore_eos"),
        (StreamChat(messages=(), template_variables={"a": 1}), {}, "chat_template_kwargs"),
        (StreamChat(messages=(), parallel_tool_calls=False), {}, "parallel_tool_calls"),
    ],
)
def test_what_the_model_would_ignore_is_refused(
    scheduler: TextScheduler, said: str | StreamChat, fields: dict[str, object], param: str
) -> None:
    with pytest.raises(NotHeeded) as raised:
        begun(scheduler, said, **fields)
    assert raised.value.param == param
    assert scheduler.n_sequences == 0


def test_token_ids_are_refused_where_the_model_does_not_take_them(scheduler: TextScheduler) -> None:
    with pytest.raises(NotHeeded, match="prompt"):
        scheduler.submit(SequenceSpec(prompt=[1, 2]), 0.0)


def test_the_model_is_asked_for_what_the_request_asked_for() -> None:
    scheduler = TextScheduler(LIMITS, NoVocabulary(), frozenset({"json_schema", "n_tokens_min"}))
    form = StreamForm("json_schema", "{}")
    scheduler.submit(
        SequenceSpec(prompt=UnreadPrompt.of("once", 4, 10), form=form, stopping=StopParams(max_tokens=3, min_tokens=2, stop=("x",))), 0.0
    )
    (sequence,) = scheduler.turn(0.0).started
    request = text_request_of(sequence)
    assert (request.text, request.prompt, request.n_tokens_max, request.stop, request.form) == ("once", (), 3, ("x",), form)
    assert request.n_tokens_min == 2
