"""A client that leaves during a long prompt: llama.cpp's step is aborted, and all that it held is free again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio

from cllm.backend import Batch, Logits
from cllm.config import Settings
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.errors import Aborted
from cllm.testing.engine import running_engine
from tests.endtoend.conftest import LoadModel

TEST_S = 120.0
N_PROMPT = 900  # one step
N_TRIES = 50  # a step may end before a busy machine comes to say that nobody waits for it


class Watched:
    """A model's `step`: whether it runs, and how often it was aborted while it ran. One that is never begun does not count."""

    def __init__(self, step: Callable[[Batch], Logits]) -> None:
        self._step = step
        self.is_running = False
        self.n_aborted = 0

    def __call__(self, batch: Batch) -> Logits:
        self.is_running = True
        try:
            return self._step(batch)
        except Aborted:
            self.n_aborted += 1
            raise
        finally:
            self.is_running = False


@pytest.mark.parametrize("n_before", [0, 3])
async def test_leaving_during_a_prompt_ends_its_step_and_others_are_answered_as_ever(
    load_exact: LoadModel, n_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_exact(2048)
    watched = Watched(model.step)
    monkeypatch.setattr(model, "step", watched)
    settings = Settings(row_budget=1024, prefix_cache=False)
    spec = SequenceSpec(prompt=[65 + i % 26 for i in range(N_PROMPT)], sampling=SamplingParams(temperature=0.0))
    short = SequenceSpec(prompt=[65, 66, 67], sampling=SamplingParams(temperature=0.0), stopping=StopParams(max_tokens=4))
    with trio.fail_after(TEST_S):
        async with running_engine(model, settings) as running:
            before = [await answer(running.engine.open([short])) for _ in range(n_before)]
            for _ in range(N_TRIES):
                n_rows = running.scheduler.totals.n_prefill_rows
                with running.engine.open([spec]) as stream:
                    while not watched.is_running and running.scheduler.totals.n_prefill_rows == n_rows:  # noqa: ASYNC110 - no event for it
                        await trio.sleep(0.001)
                    stream.cancel()
                await running.loop.wait_idle()
                assert running.scheduler.cells.n_held == 0
                if watched.n_aborted:
                    assert running.scheduler.totals.n_prefill_rows == n_rows
                    break
            else:
                pytest.fail("every step went to its end")
            after = await answer(running.engine.open([short]))
            assert len(after) == 4
            assert all(tokens == after for tokens in before)


async def answer(stream: object) -> list[int]:
    tokens: list[int] = []
    async for events in stream:  # type: ignore[attr-defined]
        for _, event in events:
            tokens += getattr(event, "tokens", [])
    return tokens
