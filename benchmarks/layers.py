"""The layers of the stack, and counters at the entry points of each, by which a measurement shows that it went through them.

An earlier ladder measured stages that went round the layers they were named after. Here every pass is counted: a stage must have called
each of its layers as often as its tokens, steps and requests need, and none of the layers above.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import attrs

Number = TypeVar("Number", int, float)


class Bypassed(Exception):
    """A stage did not pass through its layers, or passed through others; one line."""


@attrs.frozen
class Gate:
    """An entry point of a layer, how often a pass must come by, and what one call weighs."""

    layer: str
    module: str
    name: str  # of a function, or Class.method
    per: str  # "step", "draw" (a step in which somebody gets a token), "request" or "token": at least one call for each; "any": no need
    weigh: Callable[..., int] = lambda *_arguments: 1
    is_timed: bool = False  # what its calls take is told too, beside those of the layers below; none of these calls another


def _once_in_worker(*_arguments: Any) -> int:
    """Only a call from a worker thread proves a hop."""
    return int(threading.current_thread() is not threading.main_thread())


def _with_rows(_model: Any, plan: Any, *_arguments: Any) -> int:
    """A plan of memory moves alone is no step."""
    return int(plan.n_rows > 0)


GATES: Final = (
    Gate("native", "llama_cpp", "llama_decode", "step", is_timed=True),
    Gate("backend", "cllm_llamacpp.model", "LlamaModel.step", "step"),
    Gate("sampling", "cllm.engine.batch.compute", "sample", "draw", is_timed=True),
    Gate("engine", "cllm.engine.stepping", "StepScheduler.plan", "any", is_timed=True),  # between two steps
    Gate("engine", "cllm.engine.stepping", "StepScheduler.plan_ahead", "any", is_timed=True),  # or while one runs
    Gate("engine", "cllm.engine.stepping", "StepScheduler._expect", "step"),  # in either
    Gate("engine", "cllm.engine.stepping", "StepScheduler.apply", "step", is_timed=True),
    Gate("loop", "cllm.serve.steploop", "StepLoop._settle", "step"),
    Gate("loop", "cllm.serve.steploop", "StepLoop._compute", "step", _once_in_worker),
    Gate("loop", "cllm.serve.streams", "EventStream.put", "token"),
    Gate("app", "cllm.api.wire", "decode", "request"),
    Gate("app", "cllm.api.openai.completions", "answer", "request"),
    Gate("http", "cllm.serve.http.http1", "Http1._begin", "request"),
    Gate("http", "cllm.serve.http.connection", "Connection._take", "request"),
    Gate("sse", "cllm.api.sse", "SseBody._chunk", "request"),
    Gate("sse", "cllm.api.openai.completions", "CompletionStream.delta", "token"),
    Gate("client", "openai.resources.completions", "AsyncCompletions.create", "request"),
    Gate("isolated", "cllm.serve.worker.model", "WorkerModel.compute", "step", _with_rows),
    Gate("isolated", "cllm.serve.worker.frames", "Channel.send", "step"),
    Gate("isolated", "cllm.serve.worker.frames", "Channel.receive", "step"),
)
BORDER: Final = "isolated"  # between two processes: what is below the engine is on its other side, and so are the gates of that
REPLAY: Final = "replay"  # no layer: the calls that a served stage made of llama.cpp, in a bare loop (`benchmarks.replay`)
LAYERS: Final = tuple(dict.fromkeys(gate.layer for gate in GATES if gate.layer != BORDER))  # from the bottom up

TIMED: Final = tuple(dict.fromkeys(gate.layer for gate in GATES if gate.is_timed))

Counts = dict[str, int]
Seconds = dict[str, float]  # by layer, of those that are timed


def key_of(gate: Gate) -> str:
    """The gate's name in a count."""
    return f"{gate.module}.{gate.name}"


class _Watch:
    """How long a layer's calls took that were made one after the other, whichever threads look."""

    def __init__(self) -> None:
        self._seconds_began: tuple[float, float | None] = (0.0, None)  # of those that ended, and when the one began that runs

    def begin(self, now: float) -> None:
        self._seconds_began = self._seconds_began[0], now

    def end(self, seconds: float) -> None:
        """The one that runs has ended, and took so long."""
        self._seconds_began = self._seconds_began[0] + seconds, None

    def at(self, now: float) -> float:
        """Seconds of all calls so far, with what has passed of one that runs."""
        seconds, began = self._seconds_began
        return seconds if began is None else seconds + now - began


class Counter:
    """Counts the calls at the gates that exist in this process, and times some."""

    def __init__(self, layers: tuple[str, ...] = (*LAYERS, BORDER)) -> None:
        self.counts: Counts = {key_of(gate): 0 for gate in GATES}
        self._watches = {layer: _Watch() for layer in TIMED}
        self._gates = [gate for gate in GATES if gate.layer in layers]
        self._originals: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Put a counter in the place of each entry point. A gate whose package is not installed counts nothing.

        Raises: AttributeError when the code has changed and a gate with it.
        """
        for gate in self._gates:
            try:
                owner: Any = importlib.import_module(gate.module)
            except ModuleNotFoundError:
                continue
            *path, name = gate.name.split(".")
            for part in path:
                owner = getattr(owner, part)
            original = getattr(owner, name)
            self._originals.append((owner, name, original))
            call = _counted(self.counts, key_of(gate), gate.weigh, original)
            setattr(owner, name, self._timed(gate.layer, call) if gate.is_timed else call)

    def remove(self) -> None:
        """Put the entry points back."""
        while self._originals:
            owner, name, original = self._originals.pop()
            setattr(owner, name, original)

    def reading(self) -> tuple[Counts, Seconds]:
        """Where the counts and times stand."""
        return dict(self.counts), self.seconds

    def since(self, before: tuple[Counts, Seconds]) -> tuple[Counts, Seconds]:
        """The calls since a reading, and what those that are timed took."""
        return difference(self.counts, before[0]), difference(self.seconds, before[1])

    @property
    def seconds(self) -> Seconds:
        """Of the layers that are timed, each without what passed while one below it ran: they add up to no more than the time there was."""
        now = time.perf_counter()
        return {layer: watch.at(now) for layer, watch in self._watches.items()}

    def _timed(self, layer: str, original: Callable[..., Any]) -> Callable[..., Any]:
        own, below = self._watches[layer], [self._watches[one] for one in TIMED[: TIMED.index(layer)]]

        def passed(now: float) -> float:
            return now - sum([watch.at(now) for watch in below])

        def call(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            before = passed(began)
            own.begin(began)
            try:
                return original(*arguments, **options)
            finally:
                own.end(max(passed(time.perf_counter()) - before, 0.0))

        return call

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Install for a while."""
        self.install()
        try:
            yield
        finally:
            self.remove()


def _counted(counts: Counts, key: str, weigh: Callable[..., int], original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        counts[key] += weigh(*arguments)
        return original(*arguments, **options)

    return call


def difference(after: Mapping[str, Number], before: Mapping[str, Number]) -> dict[str, Number]:
    """The calls between two readings, or their seconds."""
    return {key: value - before[key] if key in before else value for key, value in after.items()}


def check(stage: str, layers: tuple[str, ...], counts: Mapping[str, int], needed: Mapping[str, int]) -> None:
    """Refuse a pass that did not come by each gate of its layers, or came by one of another layer.

    `needed` gives what a gate's `per` stands for in this pass. Raises: Bypassed.
    """
    for gate in GATES:
        n_calls, n_needed = counts.get(key_of(gate), 0), needed[gate.per]
        if gate.layer in layers and n_calls < n_needed:
            raise Bypassed(f"stage {stage} went round its layer {gate.layer}: {n_calls} calls of {key_of(gate)}, {n_needed} needed")
        if gate.layer not in layers and n_calls:
            raise Bypassed(f"stage {stage} went through {gate.layer}, which is not part of it: {n_calls} calls of {key_of(gate)}")
