"""The floor: a bare loop of `llama_decode` over batches that were fixed in advance, without sampling, scheduling or a server.

It uses llama.cpp directly and nothing of cLLM but the scheduler, once, to learn which batches a perfect shell would run.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

import attrs
import llama_cpp
import numpy as np
import numpy.typing as npt

from benchmarks.workload import Ask
from cllm.engine.batch.plan import Drop, Move, Save, Share, StepOutput, Trim
from cllm.engine.limits import Limits
from cllm.engine.sampling.params import StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.testing.fake import FakeVocabulary
from cllm_llamacpp import amx

Ints = npt.NDArray[np.int32]

N_BATCH: Final = 2048  # rows of one call at most

_SILENT = llama_cpp.llama_log_callback(lambda level, text, data: None)  # kept: llama.cpp calls it as long as it lives


@attrs.frozen(eq=False)
class FixedBatch:
    """The columns of one step, and the memory moves before it."""

    moves: tuple[Move, ...]
    tokens: Ints
    positions: Ints
    slots: Ints
    outputs: npt.NDArray[np.int8]


def fixed_batches(asks: list[Ask], concurrency: int, *, n_cells: int, n_ctx: int, row_budget: int) -> list[FixedBatch]:
    """The batches of a closed loop whose clients and shell take no time at all."""
    limits = Limits(
        n_cells=n_cells, n_slots=256, n_ctx=n_ctx, n_rows_max=2048, row_budget=row_budget, n_live_max=concurrency, n_waiting_max=len(asks)
    )
    scheduler = StepScheduler(limits, FakeVocabulary(200_000))
    specs = iter([SequenceSpec(prompt=ask.prompt, stopping=StopParams(max_tokens=ask.n_generated, ignore_eos=True)) for ask in asks])
    for _ in range(concurrency):
        scheduler.submit(next(specs), 0.0)
    return list(_steps(scheduler, specs))


def _steps(scheduler: StepScheduler, specs: Iterator[SequenceSpec]) -> Iterator[FixedBatch]:
    while (plan := scheduler.plan(0.0)) is not None:
        batch, n = plan.batch, plan.n_rows
        if n:
            columns = (batch.tokens[:n].copy(), batch.positions[:n].copy(), batch.slots[:n].copy(), batch.outputs[:n].copy())
            yield FixedBatch(tuple(move for move in plan.moves if not isinstance(move, Save)), *columns)
        events = scheduler.apply(plan, StepOutput([1000 + i for i in range(len(plan.outputs))], [], None), 0.0)
        for event in events:
            if hasattr(event, "reason") and (spec := next(specs, None)) is not None:
                scheduler.submit(spec, 0.0)


def load(path: str) -> Any:
    """A llama.cpp model on the CPU, with its weights as the backend has them. Raises: RuntimeError, when it cannot be read."""
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = 0
    params.use_extra_bufts = amx.is_sound(llama_cpp)
    model = llama_cpp.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise RuntimeError(f"llama.cpp did not read {path}")
    return model


def new_context(model: Any, *, n_cells: int, n_sequences: int, n_threads: int, is_pool: bool) -> Any:
    """A context whose sequences share one memory (`is_pool`), or have as much each of their own. Raises: RuntimeError."""
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_cells, N_BATCH, 512, n_sequences
    params.n_threads = params.n_threads_batch = n_threads
    params.kv_unified = is_pool
    context = llama_cpp.llama_init_from_model(model, params)
    if not context:
        raise RuntimeError(f"llama.cpp made no context of {n_cells} cells for {n_sequences} sequences")
    return context


class BareLoop:
    """A llama.cpp context and the loop over it."""

    def __init__(self, path: str, *, n_cells: int, n_threads: int) -> None:
        llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
        self._context = new_context(load(path), n_cells=n_cells, n_sequences=256, n_threads=n_threads, is_pool=True)
        self._batch = llama_cpp.llama_batch_init(N_BATCH, 0, 1)

    def run(self, batches: list[FixedBatch]) -> float:
        """Decode them all; return the seconds it took."""
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, True)
        began = time.perf_counter()
        for fixed in batches:
            for move in fixed.moves:
                do_move(memory, move)
            fill(self._batch, fixed)
            code = llama_cpp.llama_decode(self._context, self._batch)
            if code:
                raise RuntimeError(f"llama_decode gave {code}")
        return time.perf_counter() - began


def do_move(memory: Any, move: Move) -> None:
    """A memory move in llama.cpp's own terms."""
    match move:
        case Drop(slot):
            llama_cpp.llama_memory_seq_rm(memory, slot, -1, -1)
        case Trim(slot, n_keep):
            llama_cpp.llama_memory_seq_rm(memory, slot, n_keep, -1)
        case Share(slot, source, n_tokens):
            llama_cpp.llama_memory_seq_cp(memory, source, slot, 0, n_tokens)
        case _:
            raise RuntimeError(f"{type(move).__name__} is no move of a floor: its requests fit the cells, and nothing is kept elsewhere")


def fill(batch: Any, fixed: FixedBatch) -> None:
    """Write the columns into a llama_batch."""
    n = batch.n_tokens = len(fixed.tokens)
    ctypes.memmove(batch.token, fixed.tokens.ctypes.data, 4 * n)
    ctypes.memmove(batch.pos, fixed.positions.ctypes.data, 4 * n)
    ctypes.memmove(batch.logits, fixed.outputs.ctypes.data, n)
    for i, slot in enumerate(fixed.slots.tolist()):
        batch.n_seq_id[i] = 1
        batch.seq_id[i][0] = slot


def main() -> None:
    """Serve passes to the benchmark that started this process: a JSON line in, a JSON line out."""
    path, n_cells, n_threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    loop = BareLoop(path, n_cells=n_cells, n_threads=n_threads)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        asks = [Ask(prompt=tuple(prompt), n_generated=order["n_generated"]) for prompt in order["prompts"]]
        batches = fixed_batches(asks, order["concurrency"], n_cells=n_cells, n_ctx=min(n_cells, 4096), row_budget=order["row_budget"])
        print(json.dumps({"wall_s": loop.run(batches), "n_steps": len(batches)}), flush=True)


if __name__ == "__main__":
    main()
