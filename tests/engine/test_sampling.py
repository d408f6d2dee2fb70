"""Drawing, held against a plain reference: float64, a full sort, noise by Python's own integers."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.config import Settings
from cllm.engine.batch import compute as computing
from cllm.engine.sampling.noise import coin, grid_of, row_key
from cllm.engine.sampling.params import SamplingParams, SamplingProfile
from cllm.engine.sampling.step import Sampler, Workspace, sample
from cllm.engine.sequence import SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.serve.loading import limits_of
from cllm.testing.fake import FakeModel
from tests.clock import tick

Floats = npt.NDArray[np.float64]
MASK = (1 << 64) - 1
GOLDEN_KEYS = [5197578548964807871, 15916886550466581944, 12035550249420947055, 4775990606404247777]
GOLDEN_TOKENS = [[797, 260, 990, 224], [434, 99, 367, 585]]
GOLDEN = 0x9E3779B97F4A7C15


# --- the reference ----------------------------------------------------------------------------------------------------


def mix(h: int) -> int:
    h = ((h ^ (h >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    h = ((h ^ (h >> 27)) * 0x94D049BB133111EB) & MASK
    return h ^ (h >> 31)


def key_of(seed: int, index: int) -> int:
    return mix((mix((seed + GOLDEN) & MASK) + index * GOLDEN) & MASK)


def hashed(key: int, counter: int) -> int:
    return mix((key + (counter + 1) * GOLDEN) & MASK)


def exponential(h: int) -> float:
    return -math.log(((h >> 12) + 0.5) / 2**52)


def time_of(key: int, token: int, n_vocab: int) -> float:
    n_columns = max(1, n_vocab // 64)
    column = token % n_columns
    height = len(range(column, n_vocab, n_columns))
    first = exponential(hashed(key, 2**32 + column)) / height
    is_first = token // n_columns == ((hashed(key, 2 * 2**32 + column) >> 32) * height) >> 32
    return first if is_first else first + exponential(hashed(key, token))


def likeliest_first(logits: Floats) -> list[int]:
    return sorted((i for i in range(len(logits)) if logits[i] > -math.inf), key=lambda i: (-logits[i], i))


def weights(logits: Floats, order: list[int], temperature: float) -> Floats:
    return np.exp((logits[order] - logits[order[0]]) / temperature)


def keep_top_p(logits: Floats, order: list[int], p: float, temperature: float) -> list[int]:
    w = weights(logits, order, temperature)
    return [token for rank, token in enumerate(order) if rank == 0 or w[:rank].sum() < p * w.sum()]


def keep_min_p(logits: Floats, order: list[int], p: float, temperature: float) -> list[int]:
    return [token for token in order if token == order[0] or logits[token] >= logits[order[0]] + temperature * math.log(p)]


def keep_typical(logits: Floats, order: list[int], p: float, temperature: float) -> list[int]:
    w = weights(logits, order, temperature)
    probs = w / w.sum()
    surprise = -np.log(np.maximum(probs, 1e-300))
    entropy = (probs * surprise).sum()
    by_oddity = sorted(range(len(order)), key=lambda rank: (abs(surprise[rank] - entropy), rank))
    kept, mass = [], 0.0
    for rank in by_oddity:
        kept.append(rank)
        mass += probs[rank]
        if mass > p:
            break
    return [order[rank] for rank in sorted(kept)]


def keep_xtc(logits: Floats, order: list[int], threshold: float, temperature: float) -> list[int]:
    w = weights(logits, order, temperature)
    n_likely = int((w / w.sum() >= threshold).sum())
    return order[max(n_likely - 1, 0) :]


def survivors(logits: Floats, params: SamplingParams, xtc_coin: float) -> list[int]:
    order = likeliest_first(logits)
    t = params.temperature if params.profile is SamplingProfile.OPENAI else 1.0
    if params.top_n_sigma > 0:
        limit = logits[order[0]] - params.top_n_sigma * logits[order].std()
        order = [token for token in order if logits[token] >= limit]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.typical_p < 1:
        order = keep_typical(logits, order, params.typical_p, t)
    if params.top_p < 1:
        order = keep_top_p(logits, order, params.top_p, t)
    if params.min_p > 0:
        order = keep_min_p(logits, order, params.min_p, t)
    if params.xtc_probability > 0 and xtc_coin <= params.xtc_probability:
        order = keep_xtc(logits, order, params.xtc_threshold, t)
    return order


def reference(logits: npt.NDArray[np.float32], params: SamplingParams, seed: int, index: int) -> int:
    exact = logits.astype(np.float64)
    if params.temperature == 0:
        return likeliest_first(exact)[0]
    key = key_of(seed, index)
    order = survivors(exact, params, ((hashed(key, 3 * 2**32) >> 12) + 0.5) / 2**52)
    return max(order, key=lambda i: (exact[i] - exact.max()) / params.temperature - math.log(time_of(key, i, len(logits))))


# --- what is drawn ----------------------------------------------------------------------------------------------------


def sampler(params: SamplingParams, *, seed: int = 0, index: int = 0, **options: object) -> Sampler:
    return Sampler(params, seed=seed, tokens=[0] * index, n_prompt=index, **options)  # type: ignore[arg-type]


def drawn(logits: npt.NDArray[np.float32], params: SamplingParams, seed: int, index: int) -> int:
    """Alone and beside another row, which are ways of their own."""
    alone = sample(logits[None].copy(), [sampler(params, seed=seed, index=index)])
    beside = sample(np.stack([logits[::-1], logits]), [sampler(params, seed=seed + 1), sampler(params, seed=seed, index=index)])
    assert alone.invalid == beside.invalid == []
    assert alone.tokens[0] == beside.tokens[1]
    return alone.tokens[0]


@st.composite
def rows(draw: st.DrawFn) -> npt.NDArray[np.float32]:
    """Rows of many sizes and shapes: flat, peaked, with ties, with tokens that are forbidden."""
    n_vocab = draw(st.sampled_from([1, 2, 5, 63, 64, 65, 127, 128, 300, 777]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = rng.normal(draw(st.sampled_from([0.0, 15.0, -200.0])), draw(st.sampled_from([0.0, 0.3, 2.0, 8.0])), n_vocab)
    if draw(st.booleans()):
        logits = np.round(logits)
    if draw(st.booleans()):
        logits[rng.integers(n_vocab)] += 12
    if draw(st.booleans()):
        forbidden = rng.random(n_vocab) < draw(st.sampled_from([0.1, 0.9, 0.99]))
        logits[forbidden & (np.arange(n_vocab) != rng.integers(n_vocab))] = -np.inf
    return logits.astype(np.float32)


common_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.2, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 290, 2000]),
    top_p=st.sampled_from([1.0, 1.0, 0.951, 0.503, 0.011, 0.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.053, 0.31, 1.0]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 1.01]),
    profile=st.sampled_from(SamplingProfile),
)
seeds = st.integers(0, 2**64 - 1)


@settings(deadline=None, max_examples=250)
@given(rows(), common_params, seeds, st.integers(0, 100))
def test_the_common_truncations_draw_what_a_full_sort_draws(
    logits: npt.NDArray[np.float32], params: SamplingParams, seed: int, index: int
) -> None:
    assert drawn(logits, params, seed, index) == reference(logits, params, seed, index)


@settings(deadline=None, max_examples=150)
@given(rows(), common_params, seeds, st.sampled_from([1.0, 0.902, 0.203]), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_rarer_truncations_draw_what_a_full_sort_draws(
    logits: npt.NDArray[np.float32], params: SamplingParams, seed: int, typical_p: float, xtc_probability: float
) -> None:
    params = attrs.evolve(params, typical_p=typical_p, xtc_probability=xtc_probability, xtc_threshold=0.0831)
    assert drawn(logits, params, seed, 3) == reference(logits, params, seed, 3)


def by_full_race(logits: npt.NDArray[np.float32], params: SamplingParams, key: int, order: npt.NDArray[np.int64]) -> int:
    times = grid_of(len(logits)).times(np.array([key], np.uint64), order)
    return int(order[np.argmax(logits[order].astype(np.float64) / params.temperature - np.log(times))])


@pytest.mark.parametrize("scale", [1.0, 2.5, 5.0])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.6), SamplingParams(top_p=0.95), SamplingParams(top_p=0.3)]
)
def test_a_large_vocabulary_draws_what_a_full_race_draws(scale: float, params: SamplingParams) -> None:
    rng = np.random.default_rng(7)
    for seed in range(6):
        logits = rng.normal(0, scale, 151_936).astype(np.float32)
        order = np.argsort(-logits, kind="stable")
        w = np.exp((logits[order].astype(np.float64) - logits.max()) / params.temperature)
        nucleus = order[: 1 + np.count_nonzero(np.cumsum(w)[:-1] < params.top_p * w.sum())]
        assert drawn(logits, params, seed, 9) == by_full_race(logits, params, row_key(seed, 9), nucleus)


def frequencies(logits: list[float], params: SamplingParams, n: int) -> npt.NDArray[np.int64]:
    batch = np.tile(np.array(logits, np.float32), (n, 1))
    tokens = sample(batch, [sampler(params, seed=seed, index=5) for seed in range(n)]).tokens
    return np.bincount(tokens, minlength=len(logits))


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(top_k=7, temperature=0.7), SamplingParams(top_p=0.79), SamplingParams(typical_p=0.99)],
    ids=["whole", "shortlist", "nucleus", "chain"],
)
def test_tokens_come_as_often_as_their_probability_says(params: SamplingParams) -> None:
    logits = np.log(np.array([20, 1, 10, 5, 5, 30, 2, 8, 12, 7], np.float64))
    order = survivors(logits, params, 1.0)
    expected = np.zeros(len(logits))
    expected[order] = weights(logits, order, params.temperature)
    expected *= 4000 / expected.sum()
    observed = frequencies(logits.tolist(), params, 4000)
    assert not observed[expected == 0].any()
    chi_squared = ((observed - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert chi_squared < 27.9  # 0.1 % of chi squared with 9 degrees of freedom; the seeds are fixed


def test_tokens_at_successive_places_are_independent() -> None:
    logits = np.zeros((900, 3), np.float32)
    first, second = (
        np.array(sample(logits.copy(), [sampler(SamplingParams(), seed=s, index=i) for s in range(900)]).tokens) for i in (4, 5)
    )
    table = np.zeros((3, 3))
    np.add.at(table, (first, second), 1)
    assert ((table - 100) ** 2 / 100).sum() < 26.1  # 0.1 %, 8 degrees of freedom


# --- what the choice depends on ---------------------------------------------------------------------------------------

MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
    SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.9, min_p=0.05, profile=SamplingProfile.LLAMA),
    SamplingParams(typical_p=0.8),
    SamplingParams(mirostat=2),
    SamplingParams(top_k=12, xtc_probability=0.5),
    SamplingParams(repeat_penalty=1.2, presence_penalty=0.3),
    SamplingParams(top_n_sigma=1.0),
    SamplingParams(dynatemp_range=0.4),
]


def mixed_samplers() -> list[Sampler]:
    return [sampler(MIXED[i % len(MIXED)], seed=i, index=i) for i in range(22)]


def test_a_rows_token_does_not_depend_on_the_other_rows() -> None:
    logits = np.random.default_rng(3).normal(0, 2, (22, 3000)).astype(np.float32)
    together = sample(logits.copy(), mixed_samplers()).tokens
    alone = [sample(logits[i : i + 1].copy(), [s]).tokens[0] for i, s in enumerate(mixed_samplers())]
    order = np.random.default_rng(4).permutation(22)
    samplers = mixed_samplers()
    shuffled = sample(logits[order], [samplers[i] for i in order]).tokens
    assert together == alone
    assert [together[i] for i in order] == shuffled


def test_a_row_that_is_not_numbers_affects_only_itself() -> None:
    logits = np.random.default_rng(3).normal(0, 2, (22, 3000)).astype(np.float32)
    whole = sample(logits.copy(), mixed_samplers())
    bad = [0, 1, 2, 3, 5, 6, 8, 9, 13]
    values = [np.nan, np.inf, np.nan]
    broken = logits.copy()
    for i, row in enumerate(bad):
        broken[row, 17] = values[i % 3]
    broken[20] = -np.inf
    sampled = sample(broken, mixed_samplers())
    assert sampled.invalid == [*bad, 20]
    assert [t for i, t in enumerate(sampled.tokens) if i not in sampled.invalid] == [
        t for i, t in enumerate(whole.tokens) if i not in sampled.invalid
    ]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_greedy_rows_that_are_not_numbers_are_told(value: float) -> None:
    logits = np.zeros((3, 100), np.float32)
    logits[1] = value
    sampled = sample(logits, [sampler(SamplingParams(temperature=0)) for _ in range(3)])
    assert sampled.invalid == [1]
    assert (sampled.tokens[0], sampled.tokens[2]) == (0, 0)


def test_a_seed_gives_the_same_tokens_for_ever() -> None:
    logits = np.random.default_rng(11).integers(-40, 40, (4, 1000)).astype(np.float32) / 16
    tokens = [sample(logits.copy(), [sampler(SamplingParams(), seed=s, index=i) for s in (0, 1, 2**63, 2**64 - 1)]).tokens for i in (0, 7)]
    assert tokens == GOLDEN_TOKENS


def test_the_noise_is_what_it_was() -> None:
    places = [(0, 0), (1, 0), (0, 1), (2**64 - 1, 4096)]
    assert [row_key(*place) for place in places] == GOLDEN_KEYS == [key_of(*place) for place in places]
    assert coin(row_key(5, 6)) == ((hashed(key_of(5, 6), 3 * 2**32) >> 12) + 0.5) / 2**52


def test_slightly_different_logits_mostly_give_the_same_token() -> None:
    rng = np.random.default_rng(12)
    logits = rng.normal(0, 2, (200, 2000)).astype(np.float32)
    nearly = logits + rng.normal(0, 0.01, logits.shape).astype(np.float32)
    samplers = [sampler(SamplingParams(), seed=s) for s in range(200)]
    same = np.array(sample(logits, samplers).tokens) == np.array(sample(nearly, samplers).tokens)
    assert same.mean() > 0.97


def test_a_workspace_serves_vocabularies_of_any_size() -> None:
    work = Workspace()
    for n_vocab in (1000, 50, 3000):
        logits = np.random.default_rng(1).normal(0, 1, (2, n_vocab)).astype(np.float32)
        samplers = [sampler(SamplingParams(top_p=0.5), seed=s) for s in range(2)]
        assert sample(logits.copy(), samplers, work).tokens == sample(logits.copy(), samplers).tokens


def test_rows_split_over_threads_draw_the_same() -> None:
    logits = np.random.default_rng(3).normal(0, 2, (22, 3000)).astype(np.float32)
    whole = sample(logits.copy(), mixed_samplers()).tokens
    samplers, split = mixed_samplers(), logits.copy()
    with ThreadPoolExecutor(2) as pool:
        halves = pool.map(lambda part: sample(split[part], samplers[part], Workspace()).tokens, [slice(0, 9), slice(9, 22)])
        assert [token for half in halves for token in half] == whole


def test_no_rows_give_no_tokens() -> None:
    sampled = sample(np.zeros((0, 10), np.float32), [])
    assert (sampled.tokens, sampled.invalid, sampled.logprobs) == ([], [], None)


def test_greedy_takes_the_lowest_of_equal_tokens_also_beside_other_rows() -> None:
    logits = np.zeros((2, 500), np.float32)
    logits[:, [77, 300]] = 4
    samplers = [sampler(SamplingParams(temperature=0)), sampler(SamplingParams())]
    assert sample(logits.copy(), samplers).tokens[0] == 77
    assert sample(logits[:1].copy(), samplers[:1]).tokens == [77]


# --- temperature and mirostat -----------------------------------------------------------------------------------------


def test_dynamic_temperature_is_low_where_the_model_is_sure_and_high_where_it_is_not() -> None:
    params = SamplingParams(temperature=1.0, dynatemp_range=0.9)
    sure, unsure = [6.0] + [0.0] * 9, [0.1] + [0.0] * 9
    plain = SamplingParams()
    assert frequencies(sure, params, 500)[0] > frequencies(sure, plain, 500)[0]
    assert frequencies(unsure, params, 500)[0] == pytest.approx(frequencies(unsure, SamplingParams(temperature=1.9), 500)[0], abs=3)


@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_steers_the_surprise_towards_tau(version: int) -> None:
    params = SamplingParams(mirostat=version, mirostat_tau=3.0, mirostat_eta=0.1)
    rng = np.random.default_rng(5)
    s = sampler(params)
    surprises = []
    for _ in range(400):
        logits = (-1.1 * np.log(np.arange(1, 1001))[rng.permutation(1000)]).astype(np.float32)
        before = s.mu
        token = sample(logits[None].copy(), [s]).tokens[0]
        surprises.append(3.0 + (before - s.mu) / 0.1)
        s.tokens.append(token)
        s.observe(token)
    assert np.mean(surprises[100:]) == pytest.approx(3.0, abs=0.35)


def test_mirostats_mu_does_not_move_with_a_step_that_fails_after_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was drawn is drawn again, and is to be what it would have been."""
    model = FakeModel()
    scheduler = StepScheduler(limits_of(model, Settings(parallel=4)), model.vocabulary)
    scheduler.submit(SequenceSpec(prompt=[40, 41, 42], sampling=SamplingParams(mirostat=2), seed=1), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    (drawing,) = plan.samplers
    before, draw = drawing.mu, computing.sample

    def fail(*given: Any) -> None:
        draw(*given)
        raise MemoryError

    monkeypatch.setattr(computing, "sample", fail)
    with pytest.raises(MemoryError):
        computing.compute(model, plan, tick)
    assert drawing.mu == before


def test_mirostats_mu_can_be_carried_over() -> None:
    logits = np.random.default_rng(5).normal(0, 2, (1, 500)).astype(np.float32)
    first, second = sampler(SamplingParams(mirostat=2)), sampler(SamplingParams(mirostat=2))
    sample(logits.copy(), [first])
    assert first.mu != second.mu
    second.mu = first.mu
    sample(logits.copy(), [first])
    sample(logits.copy(), [second])
    assert first.mu == second.mu
