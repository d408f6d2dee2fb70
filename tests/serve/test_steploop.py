"""The step loop: every request is answered once, whoever leaves, fails or dawdles, and an idle loop does nothing."""

from __future__ import annotations

import random
import threading
from collections.abc import MutableMapping
from typing import Any

import numpy as np
import pytest
import trio
import trio.testing

from cllm.backend import Batch, KvLayout, Logits
from cllm.config import Settings
from cllm.engine.batch.plan import Plan
from cllm.engine.events import Delta, Failed, Finished, FinishReason
from cllm.engine.memory.prices import Prices
from cllm.engine.sampling.params import SamplingParams
from cllm.engine.stepping import StepScheduler
from cllm.errors import Aborted, ContextExceeded, DeadlineExceeded, GenerationFailed, ModelDied, NoRoom, StepFailed, Unavailable
from cllm.serve import steploop
from cllm.serve.streams import N_BYTES_DELTA, EventStream
from cllm.testing.engine import RunningEngine, running_engine
from cllm.testing.fake import FakeModel
from cllm.testing.mortal import Panic
from tests.serve.conftest import TEST_S, Answer, Steps, answers, make_spec, read_all, serving, text_alone, until

PROMPTS = ["once upon a time", "the sea", "a", "seven long winters and seven short summers went by", "lorem ipsum dolor"]


async def all_given_back(running: RunningEngine, model: FakeModel) -> None:
    """Wait until nothing is under way; then nobody may hold anything, in the books or in the model, but what is cached."""
    await running.loop.wait_idle()
    running.scheduler.check()
    cells = running.scheduler.cells
    assert (cells.n_held, cells.n_free_slots) == (0, cells.n_slots - running.scheduler.memory.n_cached_slots)
    await until(
        lambda: model.n_cells_used == cells.n_cached
    )  # the last drops are still to be done, maybe in a thread; `serving` bounds the wait


class Readers:
    """Reads many requests at once; `answers` by their names."""

    def __init__(self, running: RunningEngine, nursery: trio.Nursery) -> None:
        self.answers: dict[str, list[Answer]] = {}
        self._running = running
        self._nursery = nursery

    def ask(self, name: str, *specs: Any) -> None:
        self._nursery.start_soon(self._read, name, self._running.engine.open(list(specs)))

    async def _read(self, name: str, stream: EventStream) -> None:
        self.answers[name] = await read_all(stream)


# --- the usual course -------------------------------------------------------------------------------------------------


async def test_requests_at_once_give_what_each_gives_alone(steps: Steps) -> None:
    model = FakeModel()
    async with serving(model, Settings(row_budget=7)) as running:
        async with trio.open_nursery() as nursery:
            readers = Readers(running, nursery)
            for i, prompt in enumerate(PROMPTS * 3):
                readers.ask(f"{prompt} {i}", make_spec(prompt, 5 + i))
        await all_given_back(running, model)
    for i, prompt in enumerate(PROMPTS * 3):
        (answer,) = readers.answers[f"{prompt} {i}"]
        assert answer.text == text_alone(prompt, 5 + i)
        assert answer.finished.reason is FinishReason.LENGTH
        assert len(answer.tokens) == 5 + i


async def test_with_real_threads_it_is_the_same() -> None:
    model = FakeModel()
    async with serving(model) as running:
        async with trio.open_nursery() as nursery:
            readers = Readers(running, nursery)
            for prompt in PROMPTS:
                readers.ask(prompt, make_spec(prompt, 20))
        await all_given_back(running, model)
    assert {prompt: answers[0].text for prompt, answers in readers.answers.items()} == {p: text_alone(p, 20) for p in PROMPTS}


async def test_a_request_of_several_sequences_is_one_stream(steps: Steps) -> None:
    async with serving(FakeModel()) as running:
        answers = await read_all(running.engine.open([make_spec(prompt, 6) for prompt in PROMPTS]))
    assert [answer.text for answer in answers] == [text_alone(prompt, 6) for prompt in PROMPTS]


async def test_who_comes_during_a_step_is_in_the_next_one_and_leaves_before_those_that_go_on(steps: Steps) -> None:
    model = FakeModel()
    ended: list[str] = []

    async def ask(running: RunningEngine, name: str, n_tokens: int) -> None:
        await read_all(running.engine.open([make_spec(name, n_tokens)]))
        ended.append(name)

    async with serving(model) as running:
        steps.hold()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, running, "long", 30)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask, running, "short", 3)
            await trio.testing.wait_all_tasks_blocked()
            assert steps.n_begun == 1
            steps.go_on()
    assert ended == ["short", "long"]
    assert model.n_steps == 30, "the short one had no steps of its own"


async def test_events_of_a_step_are_delivered_while_the_next_one_runs() -> None:
    second, go_on = threading.Event(), threading.Event()

    def hold(_batch: Batch) -> None:
        if model.n_steps == 1:  # those before this one
            second.set()
            go_on.wait(TEST_S)

    model = FakeModel(before_step=hold)
    async with serving(model) as running:
        with running.engine.open([make_spec("x", 10)]) as stream:
            try:
                await until(second.is_set)
                with trio.fail_after(TEST_S / 2):
                    events = await anext(stream)
            finally:
                go_on.set()
    assert [type(event) for _, event in events] == [Delta]


async def test_256_streams_at_once_end_without_an_error() -> None:
    model = FakeModel(n_cells=16384)
    prompts = [f"number {i}" for i in range(256)]
    async with serving(model, Settings(parallel=256)) as running:
        async with trio.open_nursery() as nursery:
            readers = Readers(running, nursery)
            for prompt in prompts:
                readers.ask(prompt, make_spec(prompt, 24))
        await all_given_back(running, model)
    assert {prompt: answers[0].finished.reason for prompt, answers in readers.answers.items()} == dict.fromkeys(
        prompts, FinishReason.LENGTH
    )
    for prompt in prompts[::40]:
        assert readers.answers[prompt][0].text == text_alone(prompt, 24)


async def test_a_stop_that_comes_while_cells_are_laid_out_is_heard(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    due, ended = [KvLayout.STREAMS], trio.Event()

    async def lay_out(self: steploop.StepLoop, _layout: KvLayout) -> None:
        await trio.lowlevel.checkpoint()
        self.stop()

    monkeypatch.setattr(StepScheduler, "layout_due", lambda _scheduler: due.pop() if due else None)
    monkeypatch.setattr(steploop.StepLoop, "_lay_out", lay_out)
    monkeypatch.setattr(steploop.StepLoop, "end_all", lambda _loop, _error: ended.set())
    async with running_engine(FakeModel()):
        with trio.fail_after(TEST_S):
            await ended.wait()


# --- who comes at the same moment -------------------------------------------------------------------------------------

PROMPT_SHORT, PROMPT_LONG = "s" * 64, "l" * 400  # of which a step takes 0.23 and 1.4 s by the usual prices, and two hundredths of that
SILENCE_S = 0.006
UNMEASURED = Settings(calibrate="off", row_budget=2048, parallel=64, prefix_cache=False)


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch, steps: Steps) -> None:
    """As it is where no test needs to know when a step begins."""
    monkeypatch.setattr(steploop, "SILENCE_S_MOST", SILENCE_S)


async def ask_at(running: RunningEngine, clock: trio.testing.MockClock, nursery: trio.Nursery, after_s: float, prompt: str) -> None:
    await trio.testing.wait_all_tasks_blocked()
    clock.jump(after_s)
    await trio.testing.wait_all_tasks_blocked()
    nursery.start_soon(read_all, running.engine.open([make_spec(prompt, 2)]))
    await trio.testing.wait_all_tasks_blocked()


@pytest.mark.usefixtures("silence")
@pytest.mark.parametrize(("gap_s", "n_prompts"), [(0.5 * SILENCE_S, 3), (1.1 * SILENCE_S, 1)])
async def test_who_comes_soon_after_another_into_an_idle_loop_is_in_its_first_step(
    steps: Steps, mock_clock: trio.testing.MockClock, gap_s: float, n_prompts: int
) -> None:
    rows: list[int] = []
    model = FakeModel(before_step=lambda batch: rows.append(batch.n_rows))
    async with running_engine(model, UNMEASURED) as running, trio.open_nursery() as nursery:
        for _ in range(3):
            await ask_at(running, mock_clock, nursery, gap_s, PROMPT_LONG)
        mock_clock.jump(SILENCE_S)
        await trio.testing.wait_all_tasks_blocked()
    assert rows[0] == n_prompts * len(PROMPT_LONG)


@pytest.mark.usefixtures("silence")
async def test_they_are_not_waited_for_longer_than_a_bound_however_many_come(steps: Steps, mock_clock: trio.testing.MockClock) -> None:
    async with running_engine(FakeModel(n_cells=32768), UNMEASURED) as running, trio.open_nursery() as nursery:
        n_begun, n_asked = steps.n_begun, 0
        while steps.n_begun == n_begun:
            await ask_at(running, mock_clock, nursery, 0.5 * SILENCE_S, PROMPT_LONG)
            n_asked += 1
    assert steploop.COMPANIONS_S <= n_asked * 0.5 * SILENCE_S < steploop.COMPANIONS_S + SILENCE_S


@pytest.mark.usefixtures("silence")
async def test_where_more_came_the_last_time_a_longer_silence_is_borne(steps: Steps, mock_clock: trio.testing.MockClock) -> None:
    async with running_engine(FakeModel(), UNMEASURED) as running:
        n_begun = []
        for n_prompts in (1, 2, 1):
            async with trio.open_nursery() as nursery:
                for number in range(n_prompts):
                    await ask_at(running, mock_clock, nursery, 0.001, f"{number}{PROMPT_SHORT}")
                n_before = steps.n_begun
                mock_clock.jump(0.005)  # more than two hundredths of its step
                await trio.testing.wait_all_tasks_blocked()
                n_begun.append(steps.n_begun - n_before)
                mock_clock.jump(steploop.COMPANIONS_S)
            await trio.testing.wait_all_tasks_blocked()
    assert [n > 0 for n in n_begun] == [True, False, False]


# --- nothing to do ----------------------------------------------------------------------------------------------------


async def test_an_idle_loop_does_no_work(steps: Steps, mock_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    n_plans = 0
    plan = StepScheduler.plan

    def counted(self: StepScheduler, now: float) -> Plan | None:
        nonlocal n_plans
        n_plans += 1
        return plan(self, now)

    monkeypatch.setattr(StepScheduler, "plan", counted)
    async with running_engine(FakeModel()) as running:
        await read_all(running.engine.open([make_spec()]))
        await trio.testing.wait_all_tasks_blocked()
        n_before, n_steps = n_plans, steps.n_begun
        for _ in range(10):
            mock_clock.jump(3600.0)
            await trio.testing.wait_all_tasks_blocked()
        assert (n_plans, steps.n_begun) == (n_before, n_steps)
        assert trio.lowlevel.current_statistics().seconds_to_next_deadline == float("inf")
        assert (await read_all(running.engine.open([make_spec()])))[0].finished


async def test_everybody_who_waits_for_the_loop_to_be_idle_is_told(steps: Steps) -> None:
    async with serving(FakeModel()) as running, trio.open_nursery() as nursery:
        nursery.start_soon(read_all, running.engine.open([make_spec()]))
        for _ in range(3):
            nursery.start_soon(running.loop.wait_idle)


# --- leaving ----------------------------------------------------------------------------------------------------------


class CancelAt(trio.abc.Instrument):
    """Cancels a task's scope before the task's n-th step, that is at its n-th checkpoint."""

    def __init__(self, n: int) -> None:
        self.scope = trio.CancelScope()
        self.task: trio.lowlevel.Task | None = None
        self._n_left = n

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if task is self.task:
            self._n_left -= 1
            if self._n_left == 0:
                self.scope.cancel()


async def read_until_cancelled(cancel: CancelAt, running: RunningEngine) -> bool:
    cancel.task = trio.lowlevel.current_task()
    with cancel.scope:
        await trio.lowlevel.checkpoint()
        with running.engine.open([make_spec("the one that leaves", 6), make_spec("and another", 9)]) as stream:
            async for _events in stream:
                await trio.lowlevel.checkpoint()  # as sending does
        await trio.lowlevel.checkpoint()
    return cancel.scope.cancelled_caught


async def leave_at(cancel: CancelAt) -> bool:
    model = FakeModel()
    left = False

    async def read(running: RunningEngine) -> None:
        nonlocal left
        left = await read_until_cancelled(cancel, running)

    async with serving(model, Settings(row_budget=4)) as running:
        async with trio.open_nursery() as nursery:
            readers = Readers(running, nursery)
            nursery.start_soon(read, running)
            readers.ask("canary", make_spec("the canary", 12))
        await all_given_back(running, model)
    assert readers.answers["canary"][0].text == text_alone("the canary", 12)
    return left


@pytest.mark.usefixtures("steps")
def test_a_reader_cancelled_at_any_of_its_checkpoints_leaves_no_cell_held_and_no_other_stream_changed() -> None:
    n = 1
    while True:
        cancel = CancelAt(n)
        if not trio.run(leave_at, cancel, instruments=[cancel]):
            break
        n += 1
    assert n > 10, "it has so many checkpoints at least"


async def test_who_leaves_while_waiting_in_the_queue_is_never_computed(steps: Steps) -> None:
    model = FakeModel()
    async with serving(model, Settings(parallel=1)) as running:
        with running.engine.open([make_spec("first", 4)]) as first:
            steps.hold()
            await trio.testing.wait_all_tasks_blocked()
            with running.engine.open([make_spec("second", 4)]):
                await trio.testing.wait_all_tasks_blocked()
            steps.go_on()
            await read_all(first)
        await all_given_back(running, model)
        totals = running.scheduler.totals
        assert (totals.n_cancelled, totals.n_prompt_tokens) == (1, len("first"))


async def test_who_leaves_while_waiting_does_not_count_in_the_queue_until_the_step_of_others_has_ended(steps: Steps) -> None:
    async with serving(FakeModel(), Settings(parallel=1)) as running:
        with running.engine.open([make_spec("first", 4)]) as first:
            steps.hold()
            await trio.testing.wait_all_tasks_blocked()
            with running.engine.open([make_spec("second", 4), make_spec("third", 4)]) as both:
                await trio.testing.wait_all_tasks_blocked()
                assert running.scheduler.n_waiting == 2
                both.cancel()
                assert running.scheduler.n_waiting == 0
                running.scheduler.check()
                assert [one.ends[0].reason for one in await read_all(both)] == [FinishReason.CANCELLED] * 2  # type: ignore[union-attr]
            steps.go_on()
            assert (await read_all(first))[0].text == text_alone("first", 4)


@pytest.mark.parametrize("comes_first", [False, True])
async def test_whose_time_is_over_while_a_step_of_others_runs_is_told_so_then(
    steps: Steps, slow_clock: trio.testing.MockClock, *, comes_first: bool
) -> None:
    async with serving(FakeModel(), Settings(parallel=1)) as running:
        with running.engine.open([make_spec("first", 4)]) as first:
            if not comes_first:
                steps.hold()
                await trio.testing.wait_all_tasks_blocked()
            with running.engine.open([make_spec("second", 4, timeout_s=2.0)]) as second:
                if comes_first:
                    steps.hold()
                await trio.testing.wait_all_tasks_blocked()
                for _ in range(4):
                    slow_clock.jump(1.0)
                    await trio.testing.wait_all_tasks_blocked()
                (late,) = await read_all(second)
                assert isinstance(late.ends[0], Failed)
                assert isinstance(late.ends[0].error, DeadlineExceeded)
            steps.go_on()
            assert (await read_all(first))[0].text == text_alone("first", 4)


async def test_when_all_are_ended_the_step_under_way_is_given_up_where_the_model_can() -> None:
    begun = threading.Event()
    model = FakeModel(can_abort=True, step_s=lambda _: 10 * TEST_S, before_step=lambda _: begun.set())
    async with serving(model) as running:
        with running.engine.open([make_spec("a prompt as long as a book", None)]) as stream:
            await trio.to_thread.run_sync(begun.wait)
            running.loop.end_all(Unavailable("the server is shutting down", retry_after_s=5.0))
            (answer,) = await read_all(stream)
            assert isinstance(answer.ends[0], Failed)
        await all_given_back(running, model)
        assert model.n_steps == 1


async def test_others_that_compute_in_the_thread_are_neighbours_until_a_step_goes_by_without_them() -> None:
    seen: list[bool] = []
    model = FakeModel(before_step=lambda _: seen.append(running.scheduler.has_neighbours))
    async with serving(model) as running:
        thread = running.loop.thread
        for n_others in (0, 1, 0):
            seen.clear()
            with thread.shared(), running.engine.open([make_spec("one", 30)]) as stream:
                await anext(stream)
                thread.n_taken += n_others
                await read_all(stream)
            assert (len(seen), seen.count(True)) == (30, n_others)


async def test_a_step_that_nobody_waits_for_any_more_is_aborted_where_the_model_can() -> None:
    begun = threading.Event()
    model = FakeModel(can_abort=True, step_s=lambda _: 10 * TEST_S, before_step=lambda _: begun.set())
    async with serving(model) as running:
        with running.engine.open([make_spec("a prompt as long as a book", None), make_spec("and another", None)]):
            await trio.to_thread.run_sync(begun.wait)
        await all_given_back(running, model)
        assert (running.scheduler.totals.n_cancelled, model.n_steps) == (2, 1)


@pytest.mark.parametrize("error", [RuntimeError("no such step"), Panic("no such step")])
async def test_a_step_that_cannot_be_aborted_after_all_goes_on_to_its_end(steps: Steps, error: BaseException) -> None:
    class Stubborn(FakeModel):
        def abort(self) -> None:
            raise error

    async with serving(Stubborn(can_abort=True)) as running:
        steps.hold()
        with running.engine.open([make_spec("one who leaves", 3)]):
            await trio.testing.wait_all_tasks_blocked()
        steps.go_on()
        with running.engine.open([make_spec("one who comes", 3)]) as comes:
            assert (await read_all(comes))[0].text == text_alone("one who comes", 3)


async def test_a_step_that_somebody_else_waits_for_is_not_aborted(steps: Steps) -> None:
    model = FakeModel(can_abort=True)
    async with serving(model) as running:
        steps.hold()
        with running.engine.open([make_spec("one who stays", 3)]) as stays:
            with running.engine.open([make_spec("one who leaves", 3)]):
                await trio.testing.wait_all_tasks_blocked()
            steps.go_on()
            assert (await read_all(stays))[0].text == text_alone("one who stays", 3)
        assert model.n_aborts == 0


@pytest.mark.parametrize("is_known", [True, False])  # before the first one leaves
async def test_a_prompt_that_others_go_on_from_is_not_aborted(steps: Steps, is_known: bool) -> None:
    model = FakeModel(can_abort=True)
    prefix = "a beginning that both have, long enough to be waited for, "
    async with serving(model) as running:
        steps.hold()
        with running.engine.open([make_spec(prefix + "one", 3)]) as leaves:
            await trio.testing.wait_all_tasks_blocked()
            with running.engine.open([make_spec(prefix + "two", 3)]) as stays:
                if is_known:
                    await trio.testing.wait_all_tasks_blocked()
                leaves.cancel()
                steps.go_on()
                assert (await read_all(stays))[0].text == text_alone(prefix + "two", 3)
        assert model.n_aborts == 0
        assert running.scheduler.totals.n_prefill_rows == len(prefix + "one") + len("two")


async def test_a_prompt_of_which_those_who_wait_can_use_nothing_is_aborted(steps: Steps) -> None:
    model = FakeModel(can_abort=True)
    prefix = "a beginning that both have, long enough to be waited for, "
    async with serving(model) as running:
        steps.hold()
        with running.engine.open([make_spec(prefix + "one", 3)]) as leaves:
            await trio.testing.wait_all_tasks_blocked()
            with running.engine.open([make_spec(prefix + "two", 3, cache_prompt=False)]) as stays:
                leaves.cancel()
                steps.go_on()
                assert (await read_all(stays))[0].text == text_alone(prefix + "two", 3)
        assert model.n_aborts == 1


async def test_a_step_that_nobody_waits_for_when_its_thread_begins_is_not_computed(steps: Steps) -> None:
    model = FakeModel()
    async with serving(model) as running:
        steps.hold()
        with running.engine.open([make_spec()]):
            await trio.testing.wait_all_tasks_blocked()
        steps.go_on()
        await all_given_back(running, model)
        assert model.n_steps == 0


async def test_who_leaves_during_a_step_frees_its_cells_before_the_next(steps: Steps) -> None:
    model = FakeModel()
    async with serving(model, Settings(prefix_cache=False)) as running:
        with running.engine.open([make_spec("one who leaves", None)]) as stream:
            await anext(stream)
            steps.hold()
            await trio.testing.wait_all_tasks_blocked()
            n_begun = steps.n_begun
        steps.go_on()
        await trio.testing.wait_all_tasks_blocked()
        assert steps.n_begun == n_begun + 1, "one call more, which drops the slot"
        await all_given_back(running, model)


async def test_when_200_leave_at_once_everything_is_free(steps: Steps) -> None:
    model = FakeModel(n_cells=8192)
    async with serving(model, Settings(parallel=256)) as running:
        streams = [running.engine.open([make_spec(f"client {i}", None)]) for i in range(200)]
        await anext(streams[0])
        for stream in streams:
            stream.cancel()
        await all_given_back(running, model)
        assert running.scheduler.totals.n_cancelled == 200


# --- readers that do not read -----------------------------------------------------------------------------------------


async def test_a_reader_too_far_behind_is_ended_and_the_others_never_wait_for_it(steps: Steps) -> None:
    model = FakeModel()
    async with serving(model, Settings(stream_buffer_kb=1)) as running:
        slow = running.engine.open([make_spec("slow", 500)])
        answers = await read_all(running.engine.open([make_spec("quick", 200)]))
        assert answers[0].text == text_alone("quick", 200)
        n_deltas = 1024 // (N_BYTES_DELTA + 4)
        await all_given_back(running, model)
        (late,) = await read_all(slow)
        assert late.error.code == "stream_overflow"
        assert len(late.tokens) == n_deltas
        assert late.text == text_alone("slow", 500)[: len(late.text)]
        assert running.scheduler.totals.n_generated < 200 + 3 * n_deltas, "it was not computed to its end"


# --- all or none ------------------------------------------------------------------------------------------------------


async def test_of_a_request_with_one_sequence_too_long_nothing_is_computed(steps: Steps) -> None:
    model = FakeModel(n_cells=40)
    async with serving(model) as running:
        with pytest.raises(ContextExceeded):
            running.engine.open([make_spec("fits", 4), make_spec("fits too", 4), make_spec("x" * 40, 4)])
        await trio.testing.wait_all_tasks_blocked()
        await all_given_back(running, model)
        assert model.n_steps == 0
        assert running.scheduler.n_sequences == 0
        assert (await read_all(running.engine.open([make_spec("fits", 4)])))[0].text == text_alone("fits", 4)


async def test_a_request_that_the_queue_cannot_take_whole_is_refused_whole(steps: Steps) -> None:
    async with serving(FakeModel(), Settings(queue_size=3, parallel=1)) as running:
        steps.hold()
        first = running.engine.open([make_spec("running", 3)])
        await trio.testing.wait_all_tasks_blocked()
        waiting = running.engine.open([make_spec("waiting", 3)])
        with pytest.raises(Unavailable) as caught:
            running.engine.open([make_spec()] * 3)
        assert caught.value.code == "queue_full"
        assert caught.value.retry_after_s >= 1
        assert running.scheduler.n_sequences == 2
        also = running.engine.open([make_spec()] * 2)
        steps.go_on()
        for stream in (first, waiting, also):
            assert all(answer.finished for answer in await read_all(stream))


# --- failing steps ----------------------------------------------------------------------------------------------------


class Faulty(FakeModel):
    """Raises, or computes NaN, at random: forced return codes, a mistake in Python, logits that are not numbers."""

    ERRORS = (NoRoom("forced"), StepFailed("forced"), Aborted("forced"), RuntimeError("a mistake in the backend"), MemoryError())

    def __init__(self, seed: int, p_error: float, p_nan: float, **options: Any) -> None:
        super().__init__(before_step=self._maybe_raise, **options)
        self.n_nan = 0
        self._random = random.Random(seed)
        self._p_error = p_error
        self._p_nan = p_nan

    def _maybe_raise(self, _batch: Batch) -> None:
        if self._random.random() < self._p_error:
            raise self._random.choice(self.ERRORS)

    def step(self, batch: Batch) -> Logits:
        logits = super().step(batch)
        for row in logits:
            if self._random.random() < self._p_nan:
                row[self._random.randrange(len(row))] = np.nan
                self.n_nan += 1
        return logits


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_steps_do_every_request_gets_one_end_and_who_finishes_has_its_own_text(steps: Steps, seed: int) -> None:
    rng = random.Random(seed)
    model = Faulty(seed, p_error=0.05, p_nan=0.004, n_cells=rng.choice([120, 4096]))
    asked = {f"{prompt} {i}": rng.randint(1, 25) for i, prompt in enumerate(PROMPTS * 4)}
    async with serving(model, Settings(row_budget=rng.choice([3, 16, 512]), parallel=8)) as running:
        async with trio.open_nursery() as nursery:
            readers = Readers(running, nursery)
            for prompt, n_tokens in asked.items():
                readers.ask(prompt, make_spec(prompt, n_tokens))
                if rng.random() < 0.5:
                    await trio.lowlevel.checkpoint()
        await all_given_back(running, model)
        assert len(readers.answers) == len(asked)
        answers = {prompt: answer for prompt, (answer,) in readers.answers.items()}
        for prompt, answer in answers.items():
            if isinstance(answer.end, Finished):
                assert answer.text == text_alone(prompt, asked[prompt])
            else:
                assert isinstance(answer.error, GenerationFailed)
        assert sum(isinstance(answer.end, Finished) for answer in answers.values()) > len(asked) // 2
        n_invalid = sum(isinstance(answer.end, Failed) and answer.error.code == "invalid_logits" for answer in answers.values())
        assert f"cllm_invalid_logits_total {float(n_invalid)}" in running.engine.metrics.text().decode()


async def test_logits_that_are_no_numbers_end_their_own_sequence_alone(steps: Steps) -> None:
    class Spoilt(FakeModel):
        def step(self, batch: Batch) -> Logits:
            logits = super().step(batch)
            rows = np.flatnonzero(batch.outputs[: batch.n_rows])
            for i, row in enumerate(rows):
                if bytes(self.slot_tokens(int(batch.slots[row]))).startswith(b"bad") and batch.positions[row] == 9:
                    logits[i] = np.nan
            return logits

    model = Spoilt()
    async with serving(model) as running:
        async with trio.open_nursery() as nursery:
            readers = Readers(running, nursery)
            for prompt in ("good", "bad one", "also good"):
                readers.ask(prompt, make_spec(prompt, 12))
        await all_given_back(running, model)
        assert b"cllm_invalid_logits_total 1.0" in running.engine.metrics.text()
    (bad,) = readers.answers["bad one"]
    assert bad.error.code == "invalid_logits"
    assert bad.text == text_alone("bad one", 12)[: len(bad.text)]
    assert len(bad.tokens) == 3
    for prompt in ("good", "also good"):
        assert readers.answers[prompt][0].text == text_alone(prompt, 12)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("poison"), StepFailed("poison"), Panic("poison"), Aborted("poison")],
    ids=["python", "named", "no exception", "an abort that nobody asked for"],
)
async def test_a_sequence_on_which_every_step_fails_is_told_apart_and_the_others_finish(
    steps: Steps, error: BaseException, logged: list[MutableMapping[str, Any]]
) -> None:
    model = FakeModel()

    def refuse_poison(batch: Batch) -> None:
        slots = set(batch.slots[: batch.n_rows].tolist())
        if any(0 in [*model.slot_tokens(slot), *batch.tokens[: batch.n_rows].tolist()] for slot in slots):
            raise error

    model.before_step = refuse_poison
    async with serving(model) as running:
        async with trio.open_nursery() as nursery:
            readers = Readers(running, nursery)
            for i, prompt in enumerate(PROMPTS):
                readers.ask(prompt, make_spec(prompt, 15))
                if i == 2:
                    readers.ask("poison", make_spec("poi\0son", 15))
        await all_given_back(running, model)
    poisoned = readers.answers["poison"][0].error
    assert poisoned.code == "step_failed"
    assert error in (poisoned.__cause__, poisoned.__cause__.__cause__)
    assert "step.failed" in {one["event"] for one in logged}, "the operator is told, whatever it was"
    for prompt in PROMPTS:
        assert readers.answers[prompt][0].text == text_alone(prompt, 15)


async def test_failures_that_pass_never_add_up_to_a_culprit(steps: Steps) -> None:
    """A long answer, alone on the server, on a backend that now and then fails."""
    n_calls = 0

    def fail(_batch: Batch) -> None:
        nonlocal n_calls
        n_calls += 1
        if n_calls % 20 == 0:
            raise RuntimeError("it happens")

    model = FakeModel(before_step=fail)
    async with serving(model) as running:
        (answer,) = await read_all(running.engine.open([make_spec("alone", 100)]))
        assert answer.text == text_alone("alone", 100)
        assert answer.finished.usage.n_preempted == 5
        await all_given_back(running, model)


async def test_after_a_step_that_failed_for_good_the_loop_serves_the_next_request(steps: Steps) -> None:
    def fail(_batch: Batch) -> None:
        raise RuntimeError("always")

    model = FakeModel(before_step=fail)
    async with serving(model) as running:
        (answer,) = await read_all(running.engine.open([make_spec()]))
        assert answer.error.code == "step_failed"
        model.before_step = None
        (answer,) = await read_all(running.engine.open([make_spec()]))
        assert answer.text == text_alone("once upon a time", 8)
        await all_given_back(running, model)


class Forgetful(FakeModel):
    """Leaves out the last row of its logits, once."""

    n_left_out = 0

    def step(self, batch: Batch) -> Logits:
        """See `StepModel.step`."""
        logits = super().step(batch)
        if batch.n_outputs < 2 or self.n_left_out:
            return logits
        self.n_left_out = 1
        return logits[:-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_row_of_logits_that_is_missing_is_a_failed_step_and_nobodys_token(steps: Steps, temperature: float) -> None:
    fields = {"sampling": SamplingParams(temperature=temperature), "seed": 7}
    specs = [make_spec(prompt, 15, **fields) for prompt in PROMPTS]
    async with serving(FakeModel()) as running:
        expected = [answer.text for answer in await answers(running, *specs)]
    model = Forgetful()
    async with serving(model) as running:
        given = await answers(running, *specs)
        await all_given_back(running, model)
    assert model.n_left_out == 1
    assert [answer.text for answer in given] == expected


async def test_a_prompt_for_which_there_is_no_memory_costs_its_request_alone(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel()
    async with serving(model) as running:
        with monkeypatch.context() as patch:
            patch.setattr(running.scheduler.memory, "n_known", _no_memory)
            with pytest.raises(MemoryError):
                running.engine.open([make_spec()])
        assert running.scheduler.n_sequences == 0
        (answer,) = await answers(running, make_spec())
        await all_given_back(running, model)
    assert answer.text == text_alone("once upon a time", 8)


def _no_memory(_sequence: object) -> int:
    raise MemoryError


# --- the end of the engine --------------------------------------------------------------------------------------------


async def test_a_mistake_of_ours_in_delivering_ends_the_engine_and_not_trio(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are delivered between tasks, where an exception would be Trio's own end."""

    mistakes = [KeyError("our own mistake")]

    def fail(*_: object) -> None:
        if mistakes:
            raise mistakes.pop()

    answers: list[Answer] = []

    async def be_there() -> None:
        async with serving(FakeModel()) as running:
            streams = [running.engine.open([make_spec("ends first", 2)]), running.engine.open([make_spec("goes on", 50)])]
            monkeypatch.setattr(running.engine.metrics, "end", fail)
            with trio.CancelScope(shield=True):
                for stream in streams:
                    answers.extend(await read_all(stream))

    with pytest.RaisesGroup(pytest.RaisesExc(KeyError, match="our own mistake"), flatten_subgroups=True):
        await be_there()
    assert answers[0].text == text_alone("ends first", 2)
    assert answers[1].error.code == "stopped"


@pytest.mark.parametrize("where", ["the model", "the scheduler"])
async def test_when_the_engine_dies_every_stream_gets_an_error_event_and_the_death_is_raised(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    n_steps = 0

    def die(*_: object) -> None:
        nonlocal n_steps
        n_steps += 1
        if n_steps == 4:
            raise ModelDied("the device is gone") if where == "the model" else AssertionError("our own mistake")

    model = FakeModel(before_step=die if where == "the model" else None)
    if where == "the scheduler":
        apply = StepScheduler.apply
        monkeypatch.setattr(StepScheduler, "apply", lambda *args: die() or apply(*args))  # type: ignore[func-returns-value]
    answers: list[Answer] = []

    async def be_there() -> None:
        async with serving(model, Settings(parallel=2)) as running:
            streams = [running.engine.open([make_spec(prompt, 20)]) for prompt in PROMPTS]
            with trio.CancelScope(shield=True):
                for stream in streams:
                    answers.extend(await read_all(stream))

    with pytest.RaisesGroup(ModelDied if where == "the model" else AssertionError, flatten_subgroups=True):
        await be_there()
    assert len(answers) == len(PROMPTS)
    for answer in answers:
        assert isinstance(answer.error, Unavailable)
        assert answer.error.code == "stopped"
    assert [len(answer.tokens) for answer in answers] == [3, 3, 0, 0, 0]


@pytest.mark.parametrize("error", [RuntimeError("the driver hangs"), NoRoom("the driver hangs"), Panic("the driver hangs")])
async def test_a_slot_that_cannot_be_emptied_is_the_models_death_and_not_tried_for_ever(steps: Steps, error: BaseException) -> None:
    n_drops = 0

    def drop(_slot: int) -> None:
        nonlocal n_drops
        n_drops += 1
        raise error

    async def be_there() -> None:
        model = FakeModel()
        async with serving(model, Settings(prefix_cache=False)) as running:
            await read_all(running.engine.open([make_spec("before it came to that")]))
            await all_given_back(running, model)
            model.drop = drop  # type: ignore[method-assign]
            with running.engine.open([make_spec()]):
                await trio.sleep_forever()

    died = pytest.RaisesExc(ModelDied, match=r"^slot \d+ could not be emptied: .*: the driver hangs$")
    with pytest.RaisesGroup(died, flatten_subgroups=True):
        await be_there()
    assert n_drops == 1


@pytest.mark.parametrize("error", [RuntimeError("no"), Panic("no")])
async def test_a_state_that_cannot_be_saved_costs_no_more_than_its_use(steps: Steps, error: BaseException) -> None:
    n_saves = 0

    def save(_slot: int, _start: int = 0) -> bytes:
        nonlocal n_saves
        n_saves += 1
        raise error

    model = FakeModel(n_cells=256)
    model.save = save  # type: ignore[method-assign]
    async with serving(model, Settings(row_budget=64)) as running:
        memory = running.scheduler.memory
        assert memory.offload is not None
        memory.offload.prices = Prices()  # of a larger model, for which a move is always worth it
        await read_all(running.engine.open([make_spec("once upon a time " * 8)]))
        memory.retire_oldest()
        (answer,) = await read_all(running.engine.open([make_spec("the sea")]))
        assert answer.text == text_alone("the sea", 8)
        assert memory.offload.pool.totals.n_failures == n_saves > 0


async def test_a_model_that_can_only_compute_and_drop_serves_everybody_also_when_cells_run_out() -> None:
    """The page for authors promises it: no cut, no copy, no saved state; what that costs is computed again."""
    model = FakeModel(n_cells=64, n_slots=4, can_trim=False, can_save=False)
    texts: list[str] = []

    async def ask(running: RunningEngine) -> None:
        (answer,) = await read_all(running.engine.open([make_spec(n_tokens=30)]))
        texts.append(answer.text)

    async with serving(model) as running, trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(ask, running)
    assert texts == [text_alone("once upon a time", 30)] * 6
    assert running.scheduler.totals.n_preempted > 0
