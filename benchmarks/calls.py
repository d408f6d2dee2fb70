"""What a server asks of llama.cpp, recorded, and asked again by a bare loop with nothing else beside it.

A served step has other batches than the floor: clients come back when they have read an answer's end, and the cells of earlier requests
lie in the pool. The same calls in a bare loop, on a context that had all calls before them too, cost what these batches cost by themselves;
what the server's own took beyond that is not theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import numpy as np

from benchmarks import native
from benchmarks.native import FixedBatch

MEMORY: Final = ("llama_memory_seq_rm", "llama_memory_seq_cp")  # the moves that are recorded, besides llama_decode
RESTORE: Final = "llama_state_seq_set_data"  # the one that cannot be made again: what it restores is not recorded

Call = list[Any]  # the function's name and its arguments, but for the context or its memory; of a batch its columns


class Recorder:
    """Stands before the functions of llama.cpp that compute or move cells, and notes their calls."""

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def install(self, lib: Any) -> None:
        """Take the functions' places in the module `lib`."""
        lib.llama_decode = self._decode(lib.llama_decode)
        for name in (*MEMORY, RESTORE):
            setattr(lib, name, self._noted(name, getattr(lib, name)))

    def take(self) -> list[Call]:
        """The calls since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def _decode(self, original: Callable[..., int]) -> Callable[..., int]:
        def call(context: Any, batch: Any) -> int:
            code = original(context, batch)
            if code == 0:  # a batch that was refused has changed nothing
                n = batch.n_tokens
                slots = [batch.seq_id[i][0] for i in range(n)]
                self._calls.append(["llama_decode", batch.token[:n], batch.pos[:n], slots, batch.logits[:n]])
            return code

        return call

    def _noted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(where: Any, *arguments: Any) -> Any:
            self._calls.append([name, *(arguments if name in MEMORY else ())])
            return original(where, *arguments)

        return call


@attrs.frozen
class MemoryMove:
    """A call that moves cells."""

    function: str
    arguments: tuple[int, ...]


def steps_of(calls: Sequence[Call]) -> list[FixedBatch | MemoryMove]:
    """The calls as a bare loop takes them. Raises: ValueError, when there is one among them that cannot be made again."""
    steps: list[FixedBatch | MemoryMove] = []
    for name, *arguments in calls:
        if name == "llama_decode":
            tokens, positions, slots = (np.array(column, np.int32) for column in arguments[:3])
            steps.append(FixedBatch((), tokens, positions, slots, np.array(arguments[3], np.int8)))
        elif name in MEMORY:
            steps.append(MemoryMove(name, tuple(arguments)))
        else:
            raise ValueError(f"{name} cannot be made again: what it restored was not recorded")
    return steps


def make(steps: Sequence[FixedBatch | MemoryMove], context: Any, batch: Any) -> int:
    """Make the calls on a context, through a llama_batch; return how many outputs they had. Raises: RuntimeError."""
    import llama_cpp

    memory = llama_cpp.llama_get_memory(context)
    n_outputs = 0
    for step in steps:
        if isinstance(step, MemoryMove):
            getattr(llama_cpp, step.function)(memory, *step.arguments)
            continue
        native.fill(batch, step)
        if code := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode gave {code}")
        llama_cpp.llama_synchronize(context)
        n_outputs += int(step.outputs.sum())
    return n_outputs
