"""Steps that begin by themselves when the one before is computed: who comes, leaves or fails meanwhile is met as between any two."""

from __future__ import annotations

import contextvars
import math
import time
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import trio

from cllm.backend import Batch
from cllm.engine import stepping
from cllm.engine.events import Event
from cllm.errors import StepFailed, Unavailable
from cllm.serve.loop import Loop
from cllm.serve.steploop import N_AHEAD_MAX, StepLoop
from cllm.serve.streams import EventStream
from cllm.testing.engine import RunningEngine
from cllm.testing.fake import FakeModel
from tests.serve.conftest import TEST_S, answers, make_spec, read_all, serving, text_alone, until

PATIENCE_S, LONG_S = 0.2, 5.0  # with a step behind which one may be planned, and with one behind which one surely is


@pytest.fixture(autouse=True)
def _short_or_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps in which something is waited for are long, and others take no time."""
    monkeypatch.setattr(stepping, "AHEAD_S_LEAST", 0.0)
    monkeypatch.setattr(stepping, "AHEAD_S_MAX", math.inf)


@attrs.define
class Watched:
    """A model in whose steps something may happen when the next one is planned; it notes the rows of each, and whether one was planned."""

    meanwhile: dict[int, Callable[[], object]] = attrs.field(factory=dict)  # by the step's number, in the Trio thread
    fails: frozenset[int] = frozenset()
    sure: frozenset[int] = attrs.field(default=frozenset(), converter=frozenset)  # steps behind which one is planned while they run
    rows: list[int] = attrs.field(factory=list)
    is_ahead: list[bool] = attrs.field(factory=list)  # whether the next one was planned in it
    running: RunningEngine | None = None
    token: trio.lowlevel.TrioToken | None = None

    def before_step(self, batch: Batch) -> None:
        number = len(self.rows)
        self.rows.append(batch.n_rows)
        assert self.running is not None
        loop, give_up_at = self.running.loop, time.monotonic() + (LONG_S if number in self.sure else PATIENCE_S)
        while not (is_ahead := _is_planned_behind(loop, batch)) and time.monotonic() < give_up_at:
            time.sleep(0.001)
        self.is_ahead.append(is_ahead)
        if number in self.meanwhile:
            trio.from_thread.run_sync(self.meanwhile[number], trio_token=self.token)
        if number in self.fails:
            raise StepFailed("as it was told")

    async def serve(self, *prompts: str, n: int = 12, model: FakeModel | None = None) -> list[str]:
        """What so many get at once."""
        async with serving(self.model() if model is None else model) as running:
            self.running, self.token = running, trio.lowlevel.current_trio_token()
            given = await answers(running, *(make_spec(prompt, n) for prompt in prompts))
            await running.loop.wait_idle()
            running.scheduler.check()
            return [answer.text for answer in given]

    def model(self, **options: object) -> FakeModel:
        return FakeModel(before_step=self.before_step, **options)  # type: ignore[arg-type]


def _is_planned_behind(loop: Loop, batch: Batch) -> bool:
    """Whether the step after this one is to begin by itself. From the models' thread."""
    assert isinstance(loop, StepLoop)
    following = loop._following
    return following is not None and following.ahead.before.batch is batch


async def test_steps_of_answers_follow_on_each_other_and_every_few_are_planned_between_two() -> None:
    n = N_AHEAD_MAX + 6
    watched = Watched(sure=set(range(n)) - {0, N_AHEAD_MAX + 1, n - 1})
    assert await watched.serve("once upon", n=n) == [text_alone("once upon", n)]
    # The first computes the prompt; to the last there is nothing after, and the one before it is seen to be followed by the last.
    assert watched.is_ahead == [False, *[True] * N_AHEAD_MAX, False, True, True, True, False]


async def test_what_a_step_brings_is_told_while_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, told, put = Watched(sure=range(2, 9)), [], EventStream.put
    seen: list[int] = []

    def put_and_note(stream: EventStream, event: Event) -> None:
        told.append(event)
        put(stream, event)

    monkeypatch.setattr(EventStream, "put", put_and_note)
    watched.meanwhile.update({number: lambda: seen.append(len(told)) for number in (2, 5, 8)})
    await watched.serve("once upon")
    assert all(watched.is_ahead[2:9])
    assert seen == [2, 5, 8]


async def test_several_get_what_each_gets_alone() -> None:
    watched = Watched()
    assert await watched.serve("once", "upon", n=12) == [text_alone("once", 12), text_alone("upon", 12)]
    assert sum(watched.is_ahead) >= 8


async def test_who_comes_while_a_step_runs_is_in_the_next_one() -> None:
    watched, late = Watched(sure={4}), []

    def come() -> None:
        assert watched.running is not None
        late.append(watched.running.engine.open([make_spec("late", 3)]))

    watched.meanwhile[4] = come
    async with serving(watched.model()) as running:
        watched.running, watched.token = running, trio.lowlevel.current_trio_token()
        (first,) = await answers(running, make_spec("once", 12))
        (second,) = await read_all(late[0])
    assert (first.text, second.text) == (text_alone("once", 12), text_alone("late", 3))
    assert watched.is_ahead[4], "another step would have been next"
    assert watched.rows[4:6] == [1, 1 + len("late")]


async def test_who_leaves_while_a_step_runs_is_not_in_the_next_one() -> None:
    watched = Watched(sure={4})
    async with serving(watched.model()) as running:
        watched.running, watched.token = running, trio.lowlevel.current_trio_token()
        with running.engine.open([make_spec("one who leaves", 100)]):
            (leaving,) = (view.seq_id for view in running.engine.sequences())
            watched.meanwhile[4] = lambda: running.loop.cancel(leaving)
            (answer,) = await answers(running, make_spec("once", 12))
            await running.loop.wait_idle()
    assert answer.text == text_alone("once", 12)
    assert watched.is_ahead[4]
    assert watched.rows[4:6] == [2, 1]


@pytest.mark.parametrize("number", [4, 5])
async def test_a_step_that_fails_with_one_planned_behind_it_costs_nobody_a_token(number: int) -> None:
    watched = Watched(fails=frozenset({number}), sure={number - 1, number})
    assert await watched.serve("once", "upon") == [text_alone("once", 12), text_alone("upon", 12)]
    assert watched.is_ahead[number - 1 : number + 1] == [True, True]


async def test_when_all_are_ended_the_step_that_was_planned_is_not_done() -> None:
    watched = Watched(sure={4})
    async with serving(watched.model()) as running:
        watched.running, watched.token = running, trio.lowlevel.current_trio_token()
        watched.meanwhile[4] = lambda: running.loop.end_all(Unavailable("the server is shutting down", retry_after_s=5.0))
        (answer,) = await answers(running, make_spec("once", 12))
        assert isinstance(answer.error, Unavailable)
        await until(lambda: not running.loop.thread.is_busy)
    assert watched.is_ahead[4]
    assert len(watched.rows) == 5


async def test_when_others_want_the_thread_no_step_goes_before_theirs() -> None:
    watched, order = Watched(sure={2, 3, 5, 6}), []
    async with serving(watched.model()) as running:
        watched.running, watched.token = running, trio.lowlevel.current_trio_token()
        thread = running.loop.thread
        watched.meanwhile[3] = lambda: thread.begin(lambda: order.append(len(watched.rows)), contextvars.copy_context())
        await answers(running, make_spec("once", 12))
    assert watched.is_ahead[2:7] == [True, True, False, True, True]
    assert order == [5], "behind the one that was planned when they came"


async def test_a_step_in_which_nobody_is_left_is_aborted_where_the_model_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its only member ended by a string, which was read when it had begun."""
    text = text_alone("once", 12)
    watched = Watched(sure={6})
    model = watched.model(can_abort=True, step_s=lambda batch: 10 * TEST_S if len(watched.rows) == 8 else 0.0)
    spec = make_spec("once", 12)
    spec = attrs.evolve(spec, stopping=attrs.evolve(spec.stopping, stop=(text[4:7],)))
    async with serving(model) as running:
        watched.running, watched.token = running, trio.lowlevel.current_trio_token()
        apply = running.scheduler.apply

        def apply_when_the_next_has_begun(*arguments: Any) -> list[Event]:
            give_up_at = time.monotonic() + LONG_S
            while len(watched.rows) == 7 and time.monotonic() < give_up_at:
                time.sleep(0.001)
            return apply(*arguments)

        monkeypatch.setattr(running.scheduler, "apply", apply_when_the_next_has_begun)
        (answer,) = await answers(running, spec)
        await running.loop.wait_idle()
    assert answer.text == text[:4]
    assert (len(watched.rows), model.n_aborts) == (8, 1)


@pytest.mark.parametrize("where", ["_metrics.step", "scheduler.apply", "_deliver_owed"])
async def test_a_mistake_of_ours_in_what_a_step_brings_leaves_no_thread_waiting(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    watched = Watched(sure={3, 4})

    def fail_once(*_arguments: object) -> None:
        if len(watched.rows) >= 4:
            monkeypatch.setattr(owner, name, original)
            if where == "_deliver_owed":  # the step after the next one has begun by then
                time.sleep(PATIENCE_S / 2)
            raise ZeroDivisionError
        return original(*_arguments)

    with pytest.RaisesGroup(pytest.RaisesExc(ZeroDivisionError), flatten_subgroups=True):
        async with serving(watched.model()) as running:
            watched.running, watched.token = running, trio.lowlevel.current_trio_token()
            *path, name = where.split(".")
            owner = running.loop
            for part in path:
                owner = getattr(owner, part)
            original = getattr(owner, name)
            monkeypatch.setattr(owner, name, fail_once)
            (answer,) = await answers(running, make_spec("once", 12))
            assert isinstance(answer.error, Unavailable)
