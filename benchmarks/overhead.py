"""What the engine and Trio add to a model's step: measured on a fake model, without HTTP.

    python -m benchmarks.overhead

For each number of sequences: the wall and CPU time of a step through plan, worker thread, greedy sampling, apply and delivery, on a
model that takes no time, so that nothing overlaps. The aim is at most 150 us a step plus 10 us a sequence.
"""

from __future__ import annotations

import json
import random
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import trio

from benchmarks.instant import InstantModel
from cllm.config import Settings
from cllm.engine.batch.compute import compute
from cllm.engine.events import Delta
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.serve.loading import limits_of
from cllm.serve.streams import EventStream
from cllm.testing.engine import running_engine

N_SEQUENCES = (1, 8, 64, 256)
N_TOKENS = 300
N_VOCABULARY = 512
N_SEQUENCES_A_PROMPT, N_KEYS = 4, 4
N_PROMPT_SHORT, N_PROMPT_WAITING, N_PROMPT_LONG = 3, 200, 4000
AIM_STEP_US, AIM_SEQUENCE_US = 150.0, 10.0
N_CELLS_PART = 8192
HOST_POOL_N_BYTES = 1 << 30
MEMORIES: Final[dict[str, Callable[[int], dict[str, Any]]]] = {  # by how their cells lie, the limits for so many sequences
    "a pool": lambda n: {"can_share": True, "can_save": True, "can_save_part": True, "host_pool_n_bytes": HOST_POOL_N_BYTES},
    "parts": lambda n: {
        "n_slots": n,
        "n_cells": n * N_CELLS_PART,
        "apart": True,
        "copies_slots": True,
        "can_save": True,
        "host_pool_n_bytes": HOST_POOL_N_BYTES,
    },
}


def _spec(seed: int, prompt: Sequence[int] = (65, 66, 67), n_tokens: int = N_TOKENS) -> SequenceSpec:
    return SequenceSpec(
        prompt=prompt, sampling=SamplingParams(temperature=0), stopping=StopParams(max_tokens=n_tokens, ignore_eos=True), seed=seed
    )


def pure_us(n_sequences: int, memory: str = "a pool") -> tuple[float, float]:
    """Return plan and apply, us a step in which so many generate, without Trio. `memory` is one of `MEMORIES`."""
    model = InstantModel(n_tokens=N_VOCABULARY)
    scheduler = _scheduler(model, memory, n_sequences)
    for seed in range(n_sequences):
        scheduler.submit(_spec(seed), 0.0)
    return _timed(model, scheduler)


def mixed_us(n_sequences: int, memory: str = "a pool") -> tuple[float, float]:
    """The same where a quarter of them are long prompts of several keys, computed piece by piece, and as many more wait."""
    model = InstantModel(n_tokens=N_VOCABULARY)
    scheduler = _scheduler(model, memory, n_sequences)
    n_prompts, draw = n_sequences // N_SEQUENCES_A_PROMPT, random.Random(1)
    lengths = [N_PROMPT_SHORT] * (n_sequences - n_prompts) + [N_PROMPT_LONG] * n_prompts + [N_PROMPT_WAITING] * n_sequences
    for seed, n in enumerate(lengths):
        spec = _spec(seed, [draw.randrange(N_VOCABULARY) for _ in range(n)], n_tokens=N_PROMPT_LONG)
        scheduler.submit(attrs.evolve(spec, key=f"key{seed % N_KEYS}"), 0.0)
    n_decoding = 0
    while n_decoding < n_sequences - n_prompts:
        plan = scheduler.plan(0.0)
        assert plan is not None
        n_decoding = len(plan.decoding)
        scheduler.apply(plan, compute(model, plan, time.perf_counter), 0.0)
    measured = _timed(model, scheduler, n_steps=N_TOKENS)
    assert scheduler.n_waiting == n_sequences, "prompts were computed all the time"
    return measured


def _scheduler(model: InstantModel, memory: str, n_sequences: int) -> StepScheduler:
    """For places as many as there are sequences, of a model that can do what llama.cpp can on a CPU, as far as it concerns a plan."""
    limits = limits_of(model, Settings(parallel=n_sequences))
    return StepScheduler(attrs.evolve(limits, **MEMORIES[memory](n_sequences)), model.vocabulary)


def _timed(model: InstantModel, scheduler: StepScheduler, n_steps: int | None = None) -> tuple[float, float]:
    """Return the medians of plan and apply over so many steps, or all that there are to make."""
    plan_s, apply_s = [], []
    while n_steps is None or len(plan_s) < n_steps:
        began = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned = time.perf_counter()
        if plan is None:
            break
        output = compute(model, plan, time.perf_counter)
        computed = time.perf_counter()
        scheduler.apply(plan, output, 0.0)
        plan_s.append(planned - began)
        apply_s.append(time.perf_counter() - computed)
    return statistics.median(plan_s) * 1e6, statistics.median(apply_s) * 1e6


async def loop_us(n_sequences: int) -> tuple[float, float]:
    """Return the wall time of a step of a model that takes no time, and the CPU time that goes into it; us. Greedy sampling is in both."""
    model = InstantModel(n_tokens=N_VOCABULARY)
    async with running_engine(model, Settings(parallel=256)) as running:
        streams = [running.engine.open([_spec(seed)]) for seed in range(n_sequences)]
        began, cpu_began = time.perf_counter(), time.process_time()
        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(_read, stream)
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return wall_s / model.n_steps * 1e6, cpu_s / model.n_steps * 1e6


async def _read(stream: EventStream) -> None:
    """Read as the server does: deltas are taken where the engine leaves them, and the task wakes for the first and the last."""
    n_tokens = 0

    def take(index: int, delta: Delta) -> bool:
        nonlocal n_tokens
        n_tokens += len(delta.tokens)
        return True

    with stream:
        async for events in stream:
            n_tokens += sum(len(event.tokens) for _, event in events if isinstance(event, Delta))
            stream.sink = take
    assert n_tokens == N_TOKENS, n_tokens


async def idle_cpu_share() -> float:
    """Return the share of a core that an idle engine takes."""
    async with running_engine(InstantModel(n_tokens=N_VOCABULARY)) as running:
        stream = running.engine.open([_spec(0)])
        await _read(stream)
        began, cpu_began = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        await trio.sleep(3)
        cpu = resource.getrusage(resource.RUSAGE_SELF)
        used = cpu.ru_utime + cpu.ru_stime - cpu_began.ru_utime - cpu_began.ru_stime
        return used / (time.perf_counter() - began)


async def bare_hop_us() -> float:
    """Return what Trio's way to a thread and back takes by itself; it is in every step, and some machines are slow to wake a core."""
    times = []
    for _ in range(2000):
        began = time.perf_counter()
        await trio.to_thread.run_sync(int)
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    """Measure, print a table, end with one line of JSON."""
    rows = []
    print(f"{'sequences':>9} {'plan us':>8} {'apply us':>9} {'loop us':>8} {'CPU us':>8} {'aim us':>8}")
    for n in N_SEQUENCES:
        plan_us, apply_us = pure_us(n)
        turns = [trio.run(loop_us, n) for _ in range(5)]
        wall_us, cpu_us = statistics.median(t[0] for t in turns), statistics.median(t[1] for t in turns)
        aim_us = AIM_STEP_US + AIM_SEQUENCE_US * n
        rows.append({"sequences": n, "plan_us": plan_us, "apply_us": apply_us, "loop_us": wall_us, "cpu_us": cpu_us, "aim_us": aim_us})
        print(f"{n:9} {plan_us:8.1f} {apply_us:9.1f} {wall_us:8.1f} {cpu_us:8.1f} {aim_us:8.1f}")
    hop_us = trio.run(bare_hop_us)
    print(f"a bare hop to a thread and back: {hop_us:.1f} us")
    idle = trio.run(idle_cpu_share)
    print(f"idle: {idle:.4%} of a core")
    print(json.dumps({"benchmark": "overhead", "rows": rows, "bare_hop_us": hop_us, "idle_cpu_share": idle}))


if __name__ == "__main__":
    main()
