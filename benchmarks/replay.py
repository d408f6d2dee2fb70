"""Two stages of the ladder that tell what a served step costs by its batches from what it costs by what runs beside it.

Of a served stage the calls into llama.cpp are noted; `replay` makes them again in a bare loop (`benchmarks.calls`), in a process that does
nothing else then, on a context that has had all calls before them too, so that the cells lie as they lay. That context has the weights that
the bare loop has: models differ from load to load, and these two do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs

from benchmarks.calls import Call, make, steps_of
from benchmarks.layers import REPLAY
from benchmarks.serving import CountedServer
from benchmarks.stages import Bench, Ran, Stage, Work, in_thread


@attrs.frozen
class Pass:
    """The calls of a served pass, and those since the one before it: of other stages on the same server, and of rests between passes."""

    before: Sequence[Call]
    calls: Sequence[Call]


@attrs.define(eq=False)
class RecordedStage:
    """A stage on a server, whose passes wait for `ReplayStage`."""

    stage: Stage
    server: CountedServer
    passes: deque[Pass] = attrs.field(factory=deque)

    @property
    def name(self) -> str:
        """The stage's own."""
        return self.stage.name

    @property
    def adds(self) -> str:
        """The stage's own."""
        return self.stage.adds

    def run(self, work: Work) -> Ran:
        """Run a pass."""
        before = self.server.calls()
        ran = self.stage.run(work)
        self.passes.append(Pass(before, self.server.calls()))
        return ran


@contextmanager
def second_context(model: Any) -> Iterator[Any]:
    """Another context on a `LlamaModel`'s weights, as its own was made."""
    contexts = attrs.evolve(model._native.contexts, handle=None)
    try:
        yield contexts.make(model._laid_out).handle
    finally:
        contexts.free()


@attrs.define(eq=False)
class ReplayStage:
    """The calls of the earliest recorded pass that was not made again yet.

    The first turn may have this stage before what it makes again: then that is served for it, untimed, and the turn's own pass is left for
    the next turn. So either may come first in a turn, as with the other stages.
    """

    bench: Bench
    context: Any  # beside the model's own, whose slots the other stages clear
    served: RecordedStage
    name: str = REPLAY
    adds: str = "no layer: the very calls that sse's server made of llama.cpp, in native's bare loop"

    def run(self, work: Work) -> Ran:
        """Run a pass. Raises: ValueError, where the server restored what nobody recorded."""
        import llama_cpp

        batch = llama_cpp.llama_batch_init(self.bench.model.n_rows_max, 0, 1)
        try:
            if not self.served.passes:
                self.served.run(work)
            recorded = self.served.passes.popleft()
            in_thread(self._made(recorded.before, batch))
            return self.bench.timed_as_it_is(self._made(recorded.calls, batch))
        finally:
            llama_cpp.llama_batch_free(batch)

    def _made(self, calls: Sequence[Call], batch: Any) -> Callable[[], int]:
        return partial(make, steps_of(calls), self.context, batch)
