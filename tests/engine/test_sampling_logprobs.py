"""Logprobs are the model's own: before penalties, bias, mask and temperature."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.engine.sampling.logprobs import score
from cllm.engine.sampling.params import SamplingParams
from cllm.engine.sampling.step import Sampler, sample


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    exact = logits.astype(np.float64) - logits.max()
    return exact - np.log(np.exp(exact).sum())


def sampler(n_logprobs: int | None, params: SamplingParams | None = None, seed: int = 0) -> Sampler:
    return Sampler(params or SamplingParams(), seed=seed, tokens=[1, 2], n_prompt=1, n_logprobs=n_logprobs)


@settings(deadline=None)
@given(st.sampled_from([1, 10, 100, 3000]), st.integers(0, 20), st.booleans(), st.integers(0, 1000))
def test_logprobs_are_those_of_a_full_sort(n_vocab: int, n_logprobs: int, with_ties: bool, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 3, n_vocab).astype(np.float32)
    if with_ties:
        logits = np.round(logits)
    expected = log_softmax(logits)
    sampled = sample(logits[None].copy(), [sampler(n_logprobs, seed=seed)])
    assert sampled.logprobs is not None
    (entry,) = sampled.logprobs
    assert entry is not None
    assert entry.token == sampled.tokens[0]
    assert entry.logprob == pytest.approx(expected[entry.token], abs=1e-5)
    order = np.lexsort((np.arange(n_vocab), -logits))[:n_logprobs]
    assert [token for token, _ in entry.top] == order.tolist()
    assert [logprob for _, logprob in entry.top] == pytest.approx(expected[order].tolist(), abs=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(repeat_penalty=1.5, presence_penalty=2.0, temperature=0.5),
        SamplingParams(logit_bias=((3, 50.0),)),
        SamplingParams(temperature=0, logit_bias=((3, 50.0),)),
        SamplingParams(top_p=0.3),
        SamplingParams(top_k=3),
        SamplingParams(top_n_sigma=0.5),
    ],
)
def test_what_changes_the_draw_does_not_change_the_logprobs(params: SamplingParams) -> None:
    logits = np.random.default_rng(4).normal(0, 2, (1, 500)).astype(np.float32)
    expected = log_softmax(logits[0])
    sampled = sample(logits, [sampler(5, params)])
    assert sampled.logprobs is not None
    (entry,) = sampled.logprobs
    assert entry is not None
    assert entry.logprob == pytest.approx(expected[entry.token], abs=1e-5)
    assert [token for token, _ in entry.top] == np.argsort(-expected)[:5].tolist()


def test_rows_that_did_not_ask_have_none_and_without_any_there_is_no_list() -> None:
    logits = np.zeros((4, 100), np.float32)
    logits[3, 2] = np.nan
    samplers = [sampler(None), sampler(0), sampler(2), sampler(2)]
    sampled = sample(logits.copy(), samplers)
    assert sampled.logprobs is not None
    assert [entry and len(entry.top) for entry in sampled.logprobs] == [None, 0, 2, None]
    assert sample(logits[:1].copy(), samplers[:1]).logprobs is None


def test_forbidden_tokens_are_not_among_the_likeliest() -> None:
    logits = np.full((1, 100), -np.inf, np.float32)
    logits[0, [4, 7]] = 1
    sampled = sample(logits, [sampler(5)])
    assert sampled.logprobs is not None
    (entry,) = sampled.logprobs
    assert entry is not None
    assert entry.top == [(4, pytest.approx(-math.log(2))), (7, pytest.approx(-math.log(2)))]


@pytest.mark.parametrize("n_top", [0, 3])
def test_given_tokens_are_scored_as_drawn_ones(n_top: int) -> None:
    logits = np.random.default_rng(5).normal(0, 3, (11, 600)).astype(np.float32)
    targets = list(range(0, 110, 10))
    scores = score(logits, targets, n_top)
    assert scores is not None
    for row, target, one in zip(logits, targets, scores, strict=True):
        expected = log_softmax(row)
        assert (one.token, len(one.top)) == (target, n_top)
        assert one.logprob == pytest.approx(expected[target], abs=1e-5)
        assert [token for token, _ in one.top] == np.argsort(-row)[:n_top].tolist()
        assert one.rank == 1 + np.argsort(-row).tolist().index(target)


def test_a_token_that_the_model_rules_out_has_no_likelihood_and_what_is_no_number_no_score() -> None:
    logits = np.zeros((2, 10), np.float32)
    logits[1, 4] = -np.inf
    scores = score(logits, [4, 4], 0)
    assert scores is not None
    assert scores[1].logprob == -math.inf
    logits[0, 7] = np.nan
    assert score(logits, [4, 4], 0) is None
