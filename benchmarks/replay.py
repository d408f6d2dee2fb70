"""Two stages of the ladder that tell what a served step costs by its batches from what it costs by what runs beside it.

`recorded` is a served stage whose calls into llama.cpp are noted; `replay` makes them again in a bare loop (`benchmarks.calls`), in a
process that does nothing else then, on a context that has had all calls before them too, so that the cells lie as they lay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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
    n_tokens: int


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
        self.passes.append(Pass(before, self.server.calls(), ran.n_tokens))
        return ran


@attrs.define(eq=False)
class ReplayStage:
    """The calls of the earliest recorded pass of the same size that was not made again yet.

    The first turn may have this stage before what it makes again: then that is served for it, untimed, and the turn's own pass is left for
    the next turn. So either may come first in a turn, as with the other stages.
    """

    bench: Bench  # of its own: the others clear its slots
    served: RecordedStage
    name: str = REPLAY
    adds: str = "no layer: the very calls that sse's server made of llama.cpp, in native's bare loop"

    def run(self, work: Work) -> Ran:
        """Run a pass. Raises: ValueError, where the server restored what nobody recorded."""
        import llama_cpp

        batch = llama_cpp.llama_batch_init(self.bench.model.n_rows_max, 0, 1)
        try:
            while True:
                if not self.served.passes:
                    self.served.run(work)
                recorded = self.served.passes.popleft()
                in_thread(self._made(recorded.before, batch))
                made = self._made(recorded.calls, batch)
                if recorded.n_tokens == work.n_tokens:
                    return self.bench.timed_as_it_is(made)
                in_thread(made)  # the warm-up's
        finally:
            llama_cpp.llama_batch_free(batch)

    def _made(self, calls: Sequence[Call], batch: Any) -> Callable[[], int]:
        return partial(make, steps_of(calls), self.bench.model._context, batch)
