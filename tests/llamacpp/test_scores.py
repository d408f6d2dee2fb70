"""A prompt's logprobs, computed in small pieces beside others' steps, are those of its rows computed alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cllm.backend import KvLayout
from cllm.engine.batch.compute import compute
from cllm.engine.events import Delta, TokenLogprob
from cllm.engine.limits import Limits
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.testing.tiny import ARCHITECTURES
from tests.clock import tick


def expected_scores(logits: Any, prompt: list[int]) -> list[float]:
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact - exact.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True)) + exact.max(axis=1, keepdims=True)
    return [float(row[token]) for row, token in zip(exact, prompt[1:], strict=False)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("row_budget", [7, 64])
def test_a_prompt_is_scored_beside_others_as_alone(load: Any, drive: Any, some_tokens: Any, architecture: str, row_budget: int) -> None:
    prompt = some_tokens(1, 50)
    alone = drive(load(architecture)).feed({0: prompt}, outputs="all")
    model = load(architecture)
    limits = Limits(
        n_cells=model.n_cells,
        n_slots=model.n_slots,
        n_ctx=256,
        n_rows_max=model.n_rows_max,
        row_budget=row_budget,
        n_live_max=8,
        n_waiting_max=8,
        apart=model.capabilities.kv_layout is KvLayout.STREAMS,
    )
    scheduler = StepScheduler(limits, model.vocabulary)
    greedy = {"sampling": SamplingParams(temperature=0), "stopping": StopParams(max_tokens=12, ignore_eos=True)}
    for seed in (2, 3):
        scheduler.submit(SequenceSpec(prompt=some_tokens(seed, 20), **greedy), 0.0)
    scored = scheduler.submit(SequenceSpec(prompt=prompt, n_prompt_logprobs=2, **greedy), 0.0)
    scores: list[TokenLogprob] = []
    while (plan := scheduler.plan(0.0)) is not None:
        for event in scheduler.apply(plan, compute(model, plan, tick), 0.0):
            if isinstance(event, Delta) and event.seq_id == scored:
                scores += event.prompt_logprobs or []
    assert [one.token for one in scores] == prompt[1:]
    assert [one.logprob for one in scores] == pytest.approx(expected_scores(alone, prompt), abs=2e-3)
    for row, one in zip(alone, scores, strict=False):
        assert one.top[0][0] == int(row.argmax())
