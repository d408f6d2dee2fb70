"""A model in a process of its own, over HTTP: who kills it every time is told, and nobody else learns of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import trio

from cllm.backend import ModelSpec
from cllm.serve.worker import life as workerlife
from cllm.serve.worker.model import WorkerBackend, WorkerModel
from cllm.testing import mortal
from tests.api.conftest import Answer, Api, Serve

HANG_S = 60.0
PROMPTS = ("once", "the sea", "seven long winters", "a")
DEADLY = [65, mortal.KILL, 66]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerModel]:
    monkeypatch.setattr(workerlife, "PAUSE_S", 0.0)
    loaded = WorkerBackend(mortal.make_backend(), "cllm.testing.mortal:make_backend", HANG_S).load(ModelSpec(path=""), lambda share: True)
    assert isinstance(loaded, WorkerModel)
    yield loaded
    loaded.close()


async def ask_all(api: Api, *prompts: str | list[int], stream: bool) -> list[Answer]:
    """Complete all at once, half of them greedy and half seeded."""
    given: dict[int, Answer] = {}

    async def ask(i: int, prompt: str | list[int]) -> None:
        given[i] = await api.complete(prompt, max_tokens=30, temperature=i % 2, seed=i, stream=stream)

    async with trio.open_nursery() as nursery:
        for i, prompt in enumerate(prompts):
            nursery.start_soon(ask, i, prompt)
    return [given[i] for i in range(len(prompts))]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_kills_the_worker_every_time_gets_a_500_and_takes_no_other_with_it(
    serve: Serve, model: WorkerModel, stream: bool
) -> None:
    async with serve() as api:
        undisturbed = [answer.text() for answer in await ask_all(api, *PROMPTS, stream=stream)]
    async with serve(model) as api:
        first = model.pid
        *others, deadly = await ask_all(api, *PROMPTS, DEADLY, stream=stream)
        assert (deadly.status, deadly.error["type"]) == (500, "server_error")
        assert [answer.text() for answer in others] == undisturbed
        assert model.pid != first
        await api.idle()


async def test_the_next_request_is_answered_as_if_nothing_had_happened(serve: Serve, model: WorkerModel) -> None:
    async with serve(model) as api:
        before = await api.complete("once", max_tokens=20, temperature=0)
        assert (await api.complete(DEADLY, max_tokens=20)).status == 500
        assert (await api.complete("once", max_tokens=20, temperature=0)).text() == before.text()
        assert (await api.get("/health")).status == 200
