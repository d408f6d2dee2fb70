"""Vectors of a model in a process of its own: they are what they are here, and its death costs nobody his but who brought it about."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import trio

from cllm.backend import ModelSpec, Pooling, Vectors
from cllm.config import Settings
from cllm.errors import GenerationFailed, LoadFailed
from cllm.serve.worker.embedder import WorkerEmbedder
from cllm.serve.worker.model import WorkerBackend, WorkerModel
from cllm.testing import fake_streams, mortal
from cllm.testing.engine import RunningEngine, running_engine
from cllm.testing.fake import FakeModel
from cllm.testing.fake_embedder import N_TOKENS_MOST, FakeEmbedder
from tests.serve.conftest import HANG_S, TEST_S, kill, kill_twice, make_spec, read_all, text_alone, until, until_replaced

INPUTS = [list(range(32 + i, 32 + i + n)) for i, n in enumerate((3, 40, 1, 12))]
LONG = [97 + i % 20 for i in range(400)]


def load(hang_s: float = TEST_S, pooling: Pooling = Pooling.MEAN, n_cells: int | None = None) -> WorkerEmbedder:
    backend = WorkerBackend(mortal.make_backend(), "cllm.testing.mortal:make_backend", hang_s)
    embedder = backend.load_embedder(ModelSpec(path="", pooling=pooling, n_cells=n_cells), lambda share: True)
    assert isinstance(embedder, WorkerEmbedder)
    return embedder


@pytest.fixture
def embedder() -> Iterator[WorkerEmbedder]:
    loaded = load()
    yield loaded
    loaded.close()


async def vectors(running: RunningEngine, inputs: Sequence[Sequence[int]]) -> Vectors:
    return await running.engine.embeddings.loop.vectors(inputs)


async def expected(inputs: Sequence[Sequence[int]]) -> Vectors:
    """What a model in this process gives."""
    async with running_engine(FakeModel(), embedder=FakeEmbedder()) as running:
        return await vectors(running, inputs)


async def test_vectors_are_those_of_a_model_in_this_process(embedder: WorkerEmbedder) -> None:
    with trio.fail_after(TEST_S):
        async with running_engine(FakeModel(), embedder=embedder) as running:
            assert np.array_equal(await vectors(running, INPUTS), await expected(INPUTS))


async def test_a_query_and_a_document_become_tokens_there() -> None:
    judge = load(pooling=Pooling.RANK)
    try:
        assert judge.pair("a", "b" * 5000) == FakeEmbedder(pooling=Pooling.RANK).pair("a", "b" * 5000)
    finally:
        judge.close()


async def test_inputs_start_over_when_the_worker_is_killed_and_answers_go_on_beside_it(embedder: WorkerEmbedder) -> None:
    many = [LONG] * 20
    with trio.fail_after(TEST_S):
        async with (
            running_engine(FakeModel(), Settings(embedding_slice_ms=1), embedder=embedder) as running,
            trio.open_nursery() as nursery,
        ):
            given: list[Vectors] = []

            async def ask() -> None:
                given.append(await vectors(running, many))

            scheduler = running.engine.embeddings.loop.scheduler
            nursery.start_soon(ask)
            for n_more in (500, 2500):  # inputs in between, or the one that is under way at both deaths were to blame
                n_tokens = scheduler.n_tokens + n_more
                await until(lambda n=n_tokens: scheduler.n_tokens >= n)  # type: ignore[misc]
                await until_replaced(embedder, kill(embedder))
            (answer,) = await read_all(running.engine.open([make_spec("the sea", 20)]))
    assert answer.text == text_alone("the sea", 20)
    assert np.array_equal(given[0], await expected(many))


async def test_a_death_while_nobody_asks_is_mended_before_anybody_does(embedder: WorkerEmbedder) -> None:
    with trio.fail_after(TEST_S):
        async with running_engine(FakeModel(), embedder=embedder) as running:
            await vectors(running, INPUTS)
            await until_replaced(embedder, kill(embedder))
            assert np.array_equal(await vectors(running, INPUTS), await expected(INPUTS))


@pytest.mark.parametrize(("n_cells", "n_tokens_max"), [(None, N_TOKENS_MOST), (100, 100), (8192, N_TOKENS_MOST)])
async def test_the_next_one_is_asked_for_inputs_as_long_as_those_of_the_first(n_cells: int | None, n_tokens_max: int) -> None:
    """Not for as many cells as it has, which are beside the longest input's: it would take longer ones, and be another model."""
    embedder = load(n_cells=n_cells)
    try:
        assert embedder.n_tokens_max == n_tokens_max < embedder.n_cells
        with trio.fail_after(TEST_S):
            async with running_engine(FakeModel(), embedder=embedder) as running:
                await until_replaced(embedder, kill(embedder))
                assert np.array_equal(await vectors(running, INPUTS), await expected(INPUTS))
    finally:
        embedder.close()


async def test_a_worker_that_dies_as_soon_as_it_is_there_is_replaced_though_nobody_asks(embedder: WorkerEmbedder) -> None:
    with trio.fail_after(TEST_S):
        async with running_engine(FakeModel(), embedder=embedder) as running:
            await vectors(running, INPUTS)
            await kill_twice(embedder)
            await until(lambda: not embedder.life.is_dead)


@pytest.mark.parametrize("poison", [mortal.KILL, mortal.ABORT])
async def test_an_input_that_kills_the_worker_every_time_gets_an_error_and_takes_no_other_with_it(
    embedder: WorkerEmbedder, poison: int
) -> None:
    with trio.fail_after(TEST_S):
        async with running_engine(FakeModel(), embedder=embedder) as running, trio.open_nursery() as nursery:
            given: list[Vectors] = []

            async def ask() -> None:
                given.append(await vectors(running, INPUTS))

            nursery.start_soon(ask)
            with pytest.raises(GenerationFailed) as caught:
                await vectors(running, [[65, poison, 66]])
            assert caught.value.status == 500
    assert np.array_equal(given[0], await expected(INPUTS))


async def test_a_worker_that_hangs_is_ended_and_replaced() -> None:
    embedder = load(hang_s=HANG_S)
    try:
        with trio.fail_after(TEST_S):
            async with running_engine(FakeModel(), embedder=embedder) as running:
                kill(embedder, signal.SIGSTOP)
                assert np.array_equal(await vectors(running, INPUTS), await expected(INPUTS))
    finally:
        embedder.close()


def test_a_served_models_own_vectors_come_of_its_file_in_another_process() -> None:
    backend = WorkerBackend(mortal.make_backend(), "cllm.testing.mortal:make_backend", TEST_S)
    model = backend.load(ModelSpec(path=""), lambda share: True)
    assert isinstance(model, WorkerModel)
    embedder = model.make_embedder(ModelSpec(path="another"))
    try:
        assert isinstance(embedder, WorkerEmbedder)
        assert embedder.pid not in (model.pid, None)
    finally:
        embedder.close()
        model.close()


def test_a_model_without_vectors_says_so() -> None:
    backend = WorkerBackend(fake_streams.make_backend(), "cllm.testing.fake_streams:make_backend", TEST_S)
    with pytest.raises(LoadFailed, match="loads no embedding models"):
        backend.load_embedder(ModelSpec(path=""), lambda share: True)
