"""What single calls of llama_decode take, by what is in them: python -m benchmarks passes

Neither cLLM nor a server is in the way, so that this is the price list which whoever schedules has to buy from. Each call is made on
sequences that have cells already, in memory where every sequence has cells apart (`apart`) and in one that all share (`pool`).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import attrs
import llama_cpp
import numpy as np

from benchmarks import results
from benchmarks.arguments import model_path, positive, result_name
from benchmarks.models import QUANTIZATIONS, model_file
from benchmarks.native import N_BATCH, FixedBatch, fill, load, new_context
from cllm.bench.workloads import id_range
from cllm_llamacpp.library import open_library

MEMORIES: Final = {"apart": False, "pool": True}  # name, and whether llama.cpp's memory is unified
N_SEQUENCES_MAX: Final = 256  # of llama.cpp
N_TILE: Final = 16  # rows that kernels take together
N_SPARE: Final = 128  # cells of a sequence beyond those it holds between calls: no shape has more rows of one prompt


@attrs.frozen(kw_only=True)
class Shape:
    """The rows of one call, in the order of their sequences."""

    n_generating: int  # sequences with one row, whose output is wanted
    n_gaps: int = 0  # sequences without rows among those
    n_single: int = 0  # further sequences with one row of a prompt, no output
    n_prompt: int = 0  # rows of one prompt more

    @property
    def name(self) -> str:
        """What is told of it."""
        parts = [f"{self.n_generating} generate" + (", gaps between them" if self.n_gaps else "")] if self.n_generating else []
        parts += [f"a row of each of {self.n_single} prompts"] if self.n_single else []
        parts += [f"{self.n_prompt} rows of a prompt"] if self.n_prompt else []
        return " + ".join(parts)

    @property
    def n_rows(self) -> int:
        """Of the call."""
        return self.n_generating + self.n_single + self.n_prompt

    @property
    def n_sequences(self) -> int:
        """Sequences that it needs, those without rows too."""
        return self.n_generating + self.n_gaps + self.n_single + bool(self.n_prompt)


def shapes(n_sequences: int) -> list[Shape]:
    """What is asked of `n_sequences`: all generate, or all but one, or two thirds; prompts in pieces; and both together."""
    few = max(1, n_sequences * 5 // 8)
    rest = n_sequences - few
    others = n_sequences - 1
    n_tile = N_TILE - others % N_TILE  # rows that fill a tile beside those others
    counts = sorted({1, max(1, n_sequences // 2), few, max(1, others), n_sequences})
    found = [Shape(n_generating=n) for n in counts]
    found += [Shape(n_generating=few, n_gaps=min(rest, few - 1))] if rest and few > 1 else []
    found += [Shape(n_generating=0, n_prompt=n) for n in (16, 34, 64, 128)]
    found += [Shape(n_generating=few, n_prompt=n) for n in (16, 34, 64) if rest]
    found += [Shape(n_generating=others, n_prompt=n) for n in (n_tile, n_tile + N_TILE, 4 * N_TILE) if others > few]
    found += [Shape(n_generating=few, n_single=rest - 1, n_prompt=n) for n in (0, 34, 64) if rest > 1]
    return found


def batch_of(shape: Shape, n_held: int, n_vocab: int, draw: random.Random) -> FixedBatch:
    """The columns of one call on sequences that hold `n_held` cells each; gaps are spread among those who generate."""
    n_around = shape.n_generating + shape.n_gaps
    gaps = {(2 * i + 1) * n_around // (2 * shape.n_gaps) for i in range(shape.n_gaps)}
    rows = [(slot, n_held, True) for slot in range(n_around) if slot not in gaps]
    rows += [(n_around + i, n_held, False) for i in range(shape.n_single)]
    rows += [(n_around + shape.n_single, n_held + i, False) for i in range(shape.n_prompt)]
    slots, positions, outputs = zip(*rows, strict=True)
    tokens = [draw.randrange(*id_range(n_vocab)) for _ in rows]
    return FixedBatch((), np.array(tokens, np.int32), np.array(positions, np.int32), np.array(slots, np.int32), np.array(outputs, np.int8))


class Memory:
    """A context whose sequences hold some cells each, and calls on it that leave them so."""

    def __init__(self, model: Any, *, n_sequences: int, n_held: int, n_threads: int, is_pool: bool) -> None:
        self._n_held = n_held
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        n_cells = n_sequences * (n_held + N_SPARE)
        self._context = new_context(model, n_cells=n_cells, n_sequences=n_sequences, n_threads=n_threads, is_pool=is_pool)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(max(n_held, N_SPARE + n_sequences), 0, 1)
        draw = random.Random(0)
        for slot in range(n_sequences):
            shape = Shape(n_generating=0, n_prompt=n_held)
            self._decode(attrs.evolve(batch_of(shape, 0, self.n_vocab, draw), slots=np.full(n_held, slot, np.int32)))

    def time(self, fixed: FixedBatch) -> float:
        """Seconds of one call."""
        began = time.perf_counter()
        self._decode(fixed)
        seconds = time.perf_counter() - began
        for slot in set(fixed.slots.tolist()):
            llama_cpp.llama_memory_seq_rm(self._memory, slot, self._n_held, -1)
        return seconds

    def close(self) -> None:
        """Give the memory back."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)

    def _decode(self, fixed: FixedBatch) -> None:
        fill(self._batch, fixed)
        if code := llama_cpp.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode gave {code}")
        llama_cpp.llama_synchronize(self._context)


def run(asked: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Make every call `asked.calls` times, all of them in every round in an order of its own; return `data` of the result."""
    open_library()  # so that llama.cpp's log goes where the backend's goes, for whoever else uses it in this process
    opened = load(str(model))
    sizes = {"n_sequences": asked.sequences, "n_held": asked.cells, "n_threads": asked.threads}
    memories = {name: Memory(opened, **sizes, is_pool=is_pool) for name, is_pool in MEMORIES.items()}
    draw = random.Random(asked.seed)
    found = shapes(asked.sequences)
    times: dict[tuple[Shape, str], list[float]] = {(shape, name): [] for shape in found for name in memories}
    for i in range(asked.calls + 1):
        for shape, name in draw.sample(list(times), len(times)):
            seconds = memories[name].time(batch_of(shape, asked.cells, memories[name].n_vocab, draw))
            if i:  # the first round warms up
                times[shape, name].append(seconds)
    for memory in memories.values():
        memory.close()
    llama_cpp.llama_model_free(opened)
    return {"shapes": [_told(shape, {name: times[shape, name] for name in memories}) for shape in found]}


def _told(shape: Shape, times: dict[str, list[float]]) -> dict[str, Any]:
    """Milliseconds of each call, by memory."""
    ms = {name: [1e3 * one for one in seconds] for name, seconds in times.items()}
    return {"name": shape.name, "n_rows": shape.n_rows, "n_generating": shape.n_generating, "ms": ms}


def show(data: dict[str, Any]) -> Iterator[str]:
    """Lines of a table: medians."""
    yield f"{'':64}{'rows':>6}" + "".join(f"{f'{name}, ms':>12}" for name in MEMORIES)
    for shape in data["shapes"]:
        yield f"{shape['name']:64}{shape['n_rows']:6}" + "".join(f"{statistics.median(shape['ms'][name]):12.1f}" for name in MEMORIES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a run."""
    parser.add_argument("--model", type=model_path, help="a GGUF file (default: the qwen3-0.6b shape, made on demand)")
    parser.add_argument("--quantization", default="Q4_K_M", choices=QUANTIZATIONS, help="of the model that is made")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--cells", type=int, default=120, help="that each sequence holds")
    parser.add_argument("--calls", type=int, default=9, help="of each shape")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--label", type=result_name, help="goes into the name of the result")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="the folder of the results")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, tell, keep the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks passes", description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser)
    asked = parser.parse_args(arguments)
    if not 1 <= asked.cells <= N_BATCH or not 1 <= asked.sequences <= N_SEQUENCES_MAX or asked.calls < 1:
        parser.error(f"--cells from 1 to {N_BATCH}, --sequences from 1 to {N_SEQUENCES_MAX}, --calls 1 and more")
    model = asked.model or model_file("qwen3-0.6b", asked.quantization)
    data = run(asked, model)
    print("\n".join(show(data)))
    settings = {
        "model": results.model_facts(model),
        "sequences": asked.sequences,
        "cells_each": asked.cells,
        "calls": asked.calls,
        "threads": asked.threads,
    }
    name = "-".join([f"{asked.sequences}-sequences", *([asked.label] if asked.label else [])])
    print(f"written: {results.write('passes', name, settings, data, asked.results).name}")


if __name__ == "__main__":
    main()
