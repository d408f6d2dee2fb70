"""The queue before a model that schedules itself, and has a vocabulary."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from cllm.backend import StreamEnd, StreamForm, StreamToken
from cllm.engine.events import Failed, Finished
from cllm.engine.limits import Limits
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.engine.streaming import StreamScheduler, request_of
from cllm.errors import NotHeeded
from cllm.testing.fake import FakeModel
from cllm.text.transcript import Transcript

LIMITS = Limits(n_cells=44, n_slots=4, n_ctx=10, n_rows_max=4, row_budget=None, n_live_max=4, n_waiting_max=8)
REGEX = StreamForm("regex", "a+")


@pytest.fixture
def scheduler() -> StreamScheduler:
    return StreamScheduler(LIMITS, FakeModel(n_cells=44, n_slots=4).vocabulary, frozenset({"regex"}))


def submitted(scheduler: StreamScheduler, form: StreamForm | None) -> int:
    return scheduler.submit(SequenceSpec(prompt=[65, 66], form=form, stopping=StopParams(max_tokens=5)), now=0.0)


def test_a_form_is_part_of_what_the_model_is_asked_for(scheduler: StreamScheduler) -> None:
    submitted(scheduler, REGEX)
    (sequence,) = scheduler.turn(0.0).started
    assert request_of(sequence, FakeModel().vocabulary).form is REGEX


@pytest.mark.parametrize(
    ("form", "param"), [(StreamForm("choice", '["a"]'), "choice"), (StreamForm("json_schema", "{}", "format"), "format")]
)
def test_a_form_of_a_kind_that_it_does_not_heed_is_refused_by_its_field(scheduler: StreamScheduler, form: StreamForm, param: str) -> None:
    with pytest.raises(NotHeeded) as raised:
        submitted(scheduler, form)
    assert raised.value.param == param


def test_after_a_death_an_answer_goes_on_unless_it_had_begun_to_fill_in_a_form(scheduler: StreamScheduler) -> None:
    """Another model would begin the form anew, in the middle of what was told."""
    free, begun, waiting = (submitted(scheduler, form) for form in (None, REGEX, REGEX))
    scheduler.turn(0.0)
    for seq_id in (free, begun):
        scheduler.take(StreamToken(seq_id, 66), 0.0)
    failed = [event.seq_id for event in scheduler.take_death(0.0) if isinstance(event, Failed)]
    assert failed == [begun]
    assert [sequence.seq_id for sequence in scheduler.turn(0.0).started] == [free, waiting]


UNSHARED = [("cache_salt", "mine"), ("cache_prompt", False)]


@pytest.mark.parametrize(("field", "value"), UNSHARED)
def test_who_wants_to_share_nothing_is_refused_where_the_model_shares_all_the_same(
    scheduler: StreamScheduler, field: str, value: str | bool
) -> None:
    fields: dict[str, Any] = {field: value}
    with pytest.raises(NotHeeded) as raised:
        scheduler.submit(SequenceSpec(prompt=[65, 66], **fields), now=0.0)
    assert raised.value.param == field


@pytest.mark.parametrize(("field", "value"), UNSHARED)
def test_a_model_that_keeps_requests_apart_is_told_how(field: str, value: str | bool) -> None:
    model, fields = FakeModel(n_cells=44, n_slots=4), {field: value}
    scheduler = StreamScheduler(LIMITS, model.vocabulary, frozenset({field}))
    scheduler.submit(SequenceSpec(prompt=[65, 66], stopping=StopParams(max_tokens=5), **fields), now=0.0)  # type: ignore[arg-type]
    (sequence,) = scheduler.turn(0.0).started
    assert getattr(request_of(sequence, model.vocabulary), field) == value


def test_a_window_for_repeats_is_heeded_or_refused_and_one_that_nobody_named_is_the_models_own() -> None:
    model = FakeModel(n_cells=44, n_slots=4)
    stopping = StopParams(max_tokens=5)
    for heeds, n_last, is_taken in (
        ({"repeat_penalty"}, None, True),
        ({"repeat_penalty"}, 64, False),
        ({"repeat_penalty", "repeat_last_n"}, 64, True),
    ):
        scheduler = StreamScheduler(LIMITS, model.vocabulary, frozenset(heeds))
        spec = SequenceSpec(prompt=[65], sampling=SamplingParams(repeat_penalty=1.1, repeat_last_n=n_last), stopping=stopping)
        if not is_taken:
            with pytest.raises(NotHeeded) as raised:
                scheduler.submit(spec, now=0.0)
            assert raised.value.param == "repeat_last_n"
            continue
        scheduler.submit(spec, now=0.0)
        (sequence,) = scheduler.turn(0.0).started
        assert request_of(sequence, model.vocabulary).repeat_last_n == n_last


def test_a_window_without_a_penalty_asks_for_nothing(scheduler: StreamScheduler) -> None:
    scheduler.submit(SequenceSpec(prompt=[65, 66], sampling=SamplingParams(repeat_last_n=8), stopping=StopParams(max_tokens=5)), now=0.0)
    assert len(scheduler.turn(0.0).started) == 1


def test_who_comes_with_others_is_let_in_with_them_since_the_model_makes_its_steps_by_itself() -> None:
    limits = attrs.evolve(LIMITS, itl_max_s=0.25)
    scheduler = StreamScheduler(limits, FakeModel(n_cells=44, n_slots=4).vocabulary, frozenset())
    seq_ids = [submitted(scheduler, None) for _ in range(4)]
    assert [sequence.seq_id for sequence in scheduler.turn(0.0).started] == seq_ids


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_a_token_that_the_vocabulary_does_not_have_fails_its_sequence_alone(scheduler: StreamScheduler, token: int) -> None:
    wrong, right = submitted(scheduler, None), submitted(scheduler, None)
    scheduler.turn(0.0)
    (failed,) = scheduler.take(StreamToken(wrong, token), 0.0)
    assert isinstance(failed, Failed)
    assert str(token) in failed.error.message
    (told,) = scheduler.take(StreamToken(right, 66), 0.0)
    assert told.seq_id == right
    assert scheduler.turn(0.0).stopped == [wrong]
    scheduler.check()


@pytest.mark.parametrize("where", ["push", "finish"])
def test_an_answer_that_cannot_be_read_costs_nobody_else_anything(
    scheduler: StreamScheduler, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    unread, other = submitted(scheduler, None), submitted(scheduler, None)
    bad = next(sequence.transcript for sequence in scheduler.turn(0.0).started if sequence.seq_id == unread)
    method = getattr(Transcript, where)

    def trip(self: Transcript, *arguments: Any, **options: Any) -> Any:
        if self is bad:
            raise OverflowError("on purpose")
        return method(self, *arguments, **options)

    monkeypatch.setattr(Transcript, where, trip)
    events = [event for seq_id in (unread, other) for event in scheduler.take(StreamToken(seq_id, 66), 0.0)]
    events += [event for seq_id in (unread, other) for event in scheduler.take_end(StreamEnd(seq_id), 0.0)]
    (failed,) = [event for event in events if isinstance(event, Failed)]
    assert (failed.seq_id, failed.error.code) == (unread, "answer_unread")
    assert isinstance(failed.error.__cause__, OverflowError)
    assert [event.seq_id for event in events if isinstance(event, Finished)] == [other]
    scheduler.check()
