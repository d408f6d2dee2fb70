"""llama.cpp in a process of its own, killed at any moment: every answer is the one that it would have been."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import trio

from cllm import demo
from cllm.backend import FlashAttention, KvLayout, ModelSpec
from cllm.config import Settings
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.errors import LoadFailed
from cllm.registry import factory_of, load_backend
from cllm.serve.worker.model import WorkerBackend, WorkerModel
from cllm.testing.engine import RunningEngine, running_engine
from tests.endtoend.conftest import LoadModel
from tests.endtoend.running import alone
from tests.serve.conftest import kill_again_and_again

TEST_S = 240.0
N_STREAMS, N_TOKENS = 8, 120
N_CELLS = 4096
WORDS = ("What is cLLM?", "Count from 3 to 30.", "Repeat: der Fluß fließt, 你好", "Tell me what a batch is. " * 6)


def load_isolated(path: Path) -> WorkerModel:
    """`load_exact_model`, in a process of its own."""
    spec = ModelSpec(
        path=str(path),
        n_cells=N_CELLS,
        n_live=32,
        kv_layout=KvLayout.UNIFIED,
        cache_type_k="f32",
        cache_type_v="f32",
        flash_attention=FlashAttention.OFF,
        n_threads=1,
    )
    model = WorkerBackend(load_backend("llama-cpu"), factory_of("llama-cpu"), hang_s=TEST_S).load(spec, lambda share: True)
    assert isinstance(model, WorkerModel)
    return model


@pytest.mark.parametrize("n_kills", [3, pytest.param(20, marks=pytest.mark.slow)])
async def test_eight_streams_are_what_they_are_undisturbed_however_often_the_worker_is_killed(
    load_exact: LoadModel, exact_file: Path, n_kills: int
) -> None:
    here = load_exact(N_CELLS)
    specs = [
        SequenceSpec(
            prompt=here.vocabulary.tokenize(WORDS[i % len(WORDS)], add_special=True, parse_special=False),
            sampling=SamplingParams(temperature=float(i % 2), top_p=0.95 if i % 4 == 1 else 1.0),
            stopping=StopParams(max_tokens=N_TOKENS, ignore_eos=True),
            seed=i,
        )
        for i in range(N_STREAMS)
    ]
    expected = [alone(here, spec).text for spec in specs]
    model = load_isolated(exact_file)
    try:
        with trio.fail_after(TEST_S):
            async with running_engine(model, Settings(row_budget=64)) as running:
                texts = [""] * N_STREAMS
                async with trio.open_nursery() as nursery:
                    for i, spec in enumerate(specs):
                        nursery.start_soon(read, running, spec, texts, i)
                    counts = [N_STREAMS * N_TOKENS * i // (n_kills + 1) for i in range(n_kills)]
                    nursery.start_soon(partial(kill_again_and_again, running, model, *counts, within_s=0.005))
                assert running.scheduler.totals.n_failed == 0
    finally:
        model.close()
    assert texts == expected


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 25))])
def test_a_damaged_file_is_refused_or_loaded_and_never_ends_this_process(tmp_path: Path, seed: int) -> None:
    rng, path = random.Random(seed), tmp_path / "damaged.gguf"
    data = bytearray(demo.path().read_bytes())
    for _ in range(8):
        data[rng.randrange(4096 if seed % 2 else len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data[: rng.randrange(len(data))] if seed % 3 == 0 else data)
    assert len(complaint_of(path).splitlines()) <= 1


def complaint_of(path: Path) -> str:
    """Why a file cannot be loaded; empty when it can."""
    backend = WorkerBackend(load_backend("llama-cpu"), factory_of("llama-cpu"), TEST_S)
    try:
        backend.load(ModelSpec(path=str(path), n_cells=256, n_threads=1), lambda share: True).close()
    except LoadFailed as error:
        return str(error)
    return ""


async def read(running: RunningEngine, spec: SequenceSpec, texts: list[str], i: int) -> None:
    with running.engine.open([spec]) as stream:
        async for events in stream:
            for _, event in events:
                texts[i] += getattr(event, "text", "")
