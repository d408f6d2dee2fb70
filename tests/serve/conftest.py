"""Requests, readers and steps for tests of the shell around the scheduler."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, TypeAlias, TypeVar

import attrs
import outcome
import pytest
import trio
from structlog.testing import capture_logs

from cllm.backend import StepModel
from cllm.config import Settings
from cllm.engine.batch.compute import compute
from cllm.engine.events import Delta, Event, Failed, Finished
from cllm.engine.limits import Limits
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.errors import call_foreign
from cllm.serve import loading, steploop
from cllm.serve.disktier import DiskTier
from cllm.serve.modelthread import ModelThread
from cllm.serve.streams import EventStream
from cllm.serve.worker.embedder import WorkerEmbedder
from cllm.serve.worker.model import WorkerModel
from cllm.serve.worker.streams import WorkerStreams
from cllm.testing.engine import RunningEngine, running_engine
from cllm.testing.fake import FakeModel
from tests.clock import tick

T = TypeVar("T")
TEST_S = 120.0  # ends a test that hangs; a machine that is busy with something else takes its time
HANG_S = 2.0  # for workers that are made to hang; one that a busy machine keeps from answering is replaced, and nobody is the worse for it


def make_spec(prompt: str = "once upon a time", n_tokens: int | None = 8, **fields: Any) -> SequenceSpec:
    """A greedy sequence of `n_tokens`; further fields are SequenceSpec's."""
    fields = {"sampling": SamplingParams(temperature=0), "stopping": StopParams(max_tokens=n_tokens), **fields}
    return SequenceSpec(prompt=list(prompt.encode()), **fields)


@cache
def text_alone(prompt: str, n_tokens: int) -> str:
    """What `make_spec(prompt, n_tokens)` gives on a model of its own."""
    model = FakeModel()
    limits = Limits(n_cells=4096, n_slots=1, n_ctx=4096, n_rows_max=512, row_budget=512, n_live_max=1, n_waiting_max=1)
    scheduler = StepScheduler(limits, model.vocabulary)
    scheduler.submit(make_spec(prompt, n_tokens), 0.0)
    answer = Answer()
    while (plan := scheduler.plan(0.0)) is not None:
        for event in plan.events + scheduler.apply(plan, compute(model, plan, tick), 0.0):
            answer.add(event)
    return answer.text


@attrs.define
class Answer:
    """What was read of one sequence."""

    text: str = ""
    tokens: list[int] = attrs.field(factory=list)
    ends: list[Finished | Failed] = attrs.field(factory=list)

    def add(self, event: Event) -> None:
        assert not self.ends, f"{event} after the terminal event"
        if not isinstance(event, Failed):
            self.text += event.text
        if isinstance(event, Delta):
            self.tokens += event.tokens
        else:
            self.ends.append(event)

    @property
    def end(self) -> Finished | Failed:
        """The terminal event, of which there must be exactly one."""
        (end,) = self.ends
        return end

    @property
    def finished(self) -> Finished:
        assert isinstance(self.end, Finished), self.end
        return self.end

    @property
    def error(self) -> Any:
        assert isinstance(self.end, Failed), self.end
        return self.end.error


async def read_all(stream: EventStream) -> list[Answer]:
    """Read a request to its end; an answer for each sequence."""
    answers: dict[int, Answer] = {}
    with stream:
        async for events in stream:
            for index, event in events:
                answers.setdefault(index, Answer()).add(event)
    assert sorted(answers) == list(range(len(answers)))
    return [answers[index] for index in range(len(answers))]


async def answers(running: RunningEngine, *specs: SequenceSpec) -> list[Answer]:
    """What requests of one sequence each get, all at once."""
    given: dict[int, Answer] = {}

    async def read(i: int, spec: SequenceSpec) -> None:
        (given[i],) = await read_all(running.engine.open([spec]))

    async with trio.open_nursery() as nursery:
        for i, spec in enumerate(specs):
            nursery.start_soon(read, i, spec)
    return [given[i] for i in range(len(specs))]


@asynccontextmanager
async def serving(model: StepModel, settings: Settings | None = None, disk: DiskTier | None = None) -> AsyncIterator[RunningEngine]:
    """Run an engine, and end a test that hangs."""
    with trio.fail_after(TEST_S):
        async with running_engine(model, settings, disk=disk) as running:
            yield running


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what a thread does."""
    while not condition():  # noqa: ASYNC110 - it sets no event of Trio's
        await trio.sleep(0.001)


# --- workers ----------------------------------------------------------------------------------------------------------


Worker: TypeAlias = WorkerModel | WorkerStreams | WorkerEmbedder


def kill(worker: Worker, number: signal.Signals = signal.SIGKILL) -> int:
    """Send the worker's process a signal; return its process id."""
    assert worker.pid is not None
    os.kill(worker.pid, number)
    return worker.pid


async def until_replaced(worker: Worker, pid: int) -> None:
    """Wait until another process has taken the place of `pid`."""
    await until(lambda: worker.pid not in (pid, None))


async def kill_twice(worker: Worker) -> None:
    """Kill the worker, and the next one before anybody can have seen that it is there. The loop must have begun."""
    life, n_noticed = worker.life, 0
    notice, revive = life.on_death, life.revive

    def on_death() -> None:
        nonlocal n_noticed
        notice()
        n_noticed += 1

    def revive_and_kill() -> None:
        life.revive = revive  # type: ignore[method-assign]
        revive()
        kill(worker)
        while n_noticed < 2:
            time.sleep(0.001)

    life.on_death, life.revive = on_death, revive_and_kill  # type: ignore[method-assign]
    kill(worker)
    await until(lambda: n_noticed == 2)


async def kill_again_and_again(running: RunningEngine, worker: Worker, *counts: int, within_s: float = 0.0) -> None:
    """Kill the worker when so many tokens have come in all, each time another process, at a random moment `within_s` of that.

    In between every stream gets on: one with which the worker dies twice at the same token is to blame for it.
    """

    def generated() -> dict[int, int]:
        return {view.seq_id: view.n_generated for view in running.engine.sequences()}

    def all_got_on() -> bool:
        now = generated()
        return all(seq_id not in now or now[seq_id] > n for seq_id, n in before.items())

    before: dict[int, int] = {}
    rng = random.Random(11)
    for n_tokens in counts:
        await until(lambda n=n_tokens: running.scheduler.totals.n_generated >= n and all_got_on())  # type: ignore[misc]
        if within_s:
            await trio.sleep(rng.random() * within_s)
        await until_replaced(worker, kill(worker))
        before = generated()


# --- steps ------------------------------------------------------------------------------------------------------------


class Steps:
    """Stands for the worker thread: what is sent there runs in the Trio thread, at once or when the test says so.

    As with a thread, a call that has begun cannot be cancelled; its result comes back, and the cancel is met afterwards. What it raises
    is an Exception.
    """

    def __init__(self) -> None:
        self.n_begun = 0
        self.call_s = 0.0  # how long a call takes, for tests with a clock of their own
        self._go = trio.Event()
        self._go.set()
        self._computes_first = False

    def hold(self, *, computed: bool = False) -> None:
        """Let the next call begin and not end; `computed`: it has done its work, and only its end is held."""
        self._go = trio.Event()
        self._computes_first = computed

    def go_on(self) -> None:
        """Let calls end."""
        self._go.set()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        self.n_begun += 1
        done = outcome.capture(call_foreign, function, *args) if self._computes_first else None
        with trio.CancelScope(shield=True):
            await self._go.wait()
            if self.call_s:
                await trio.sleep(self.call_s)
        return call_foreign(function, *args) if done is None else done.unwrap()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """No threads; the test may hold a step, and knows when it begins: at once, whoever else may come."""
    steps = Steps()
    monkeypatch.setattr(steploop, "SILENCE_S_MOST", 0.0)

    async def run(_thread: ModelThread, function: Callable[..., T], *args: Any) -> T:
        return await steps.run(function, *args)

    async def serve(thread: ModelThread) -> None:
        thread._ended.set()

    monkeypatch.setattr(ModelThread, "run", run)
    monkeypatch.setattr(ModelThread, "_serve", serve)
    return steps


@pytest.fixture(autouse=True)
def _measures_by_itself() -> None:
    """A process remembers what it measured, and a test nothing of those before it."""
    loading._measured_here.clear()


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    """What was logged; not printed, since structlog draws every traceback at length as long as nobody has configured it."""
    with capture_logs() as logged:
        yield logged
