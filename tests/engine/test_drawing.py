"""Tokens that the model draws and tokens that are drawn here: each request gets its own, whoever is beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from cllm.backend import Batch, Draw, Drawn, DrawsTokens
from cllm.engine.batch.compute import compute
from cllm.engine.batch.plan import Scored, StepOutput, StepWork
from cllm.engine.sampling.params import SamplingParams, SamplingProfile
from cllm.engine.sampling.step import Sampler, keys_of, sample
from cllm.errors import StepFailed
from cllm.testing.fake import END_OF_TURN, FakeModel
from cllm.testing.fake_drawing import DrawingFakeModel, draw_one
from tests.clock import tick

PROMPTS = (b"one", b"another", b"a third", b"the last")


def sampler(params: SamplingParams, seed: int = 0, **more: object) -> Sampler:
    return Sampler(params, seed=seed, tokens=[1, 2, 3], n_prompt=3, **more)  # type: ignore[arg-type]


def work_of(samplers: list[Sampler], scored: int | None = None) -> StepWork:
    """A prompt for each sampler, each in a slot of its own; all rows of one more, the `scored`-th, are scored instead."""
    batch = Batch(256)
    scorings = []
    for slot, prompt in enumerate(PROMPTS[: len(samplers) + (scored is not None)]):
        for position, token in enumerate(prompt):
            i = batch.n_rows
            batch.tokens[i], batch.positions[i], batch.slots[i] = token, position, slot
            batch.outputs[i] = slot == scored or position == len(prompt) - 1
            batch.n_rows += 1
        if slot == scored:
            scorings.append(Scored(batch.n_outputs, list(prompt), n_top=1))
        batch.n_outputs += len(prompt) if slot == scored else 1
    return StepWork(moves=[], batch=batch, samplers=samplers, scorings=scorings)


def done(model: FakeModel, work: StepWork) -> StepOutput:
    return compute(model, work, tick)


def test_a_model_that_draws_draws_what_needs_nothing_but_a_draw() -> None:
    model = DrawingFakeModel()
    assert isinstance(model, DrawsTokens)
    output = done(model, work_of([sampler(SamplingParams(temperature=0)), sampler(SamplingParams(top_k=5, top_p=0.9))]))
    assert model.n_drawn == 2
    assert output.tokens[0] == done(FakeModel(), work_of([sampler(SamplingParams(temperature=0))])).tokens[0]


@pytest.mark.parametrize(
    "needy",
    [
        sampler(SamplingParams(repeat_penalty=1.2)),
        sampler(SamplingParams(logit_bias=((5, 1.0),))),
        sampler(SamplingParams(typical_p=0.5)),
        sampler(SamplingParams(top_n_sigma=1.0)),
        sampler(SamplingParams(mirostat=2)),
        sampler(SamplingParams(), n_logprobs=2),
        sampler(SamplingParams(), min_tokens=4, end_tokens=frozenset({END_OF_TURN})),
        sampler(SamplingParams(), ignore_eos=True, end_tokens=frozenset({END_OF_TURN})),
    ],
)
def test_what_needs_logits_is_drawn_from_them_beside_what_the_model_draws(needy: Sampler) -> None:
    model = DrawingFakeModel()
    work = work_of([sampler(SamplingParams(), seed=1), needy, sampler(SamplingParams(), seed=2)])
    output = done(model, work)
    plain = done(FakeModel(), work_of([sampler(SamplingParams()), needy, sampler(SamplingParams())]))
    assert model.n_drawn == 2
    assert output.tokens[1] == plain.tokens[1]
    assert (output.logprobs is None) == (needy.n_logprobs is None)
    if output.logprobs is not None and plain.logprobs is not None:
        assert repr(output.logprobs) == repr([None, plain.logprobs[1], None])


def test_a_model_that_draws_owes_the_logits_of_all_others() -> None:
    class Forgetful(DrawingFakeModel):
        def step_and_draw(self, batch: Batch, draws: Sequence[Draw | None], keys: npt.NDArray[np.uint64]) -> Drawn:
            drawn = super().step_and_draw(batch, draws, keys)
            return Drawn(drawn.tokens, drawn.valid, drawn.logits[:-1])

    needy = sampler(SamplingParams(repeat_penalty=1.2))
    with pytest.raises(StepFailed, match=r"^0 rows of logits for 1 outputs$"):
        done(Forgetful(), work_of([sampler(SamplingParams()), needy]))


def test_a_forced_token_comes_whatever_the_model_would_draw() -> None:
    forced = sampler(SamplingParams())
    forced.force([7])
    model = DrawingFakeModel()
    assert done(model, work_of([sampler(SamplingParams()), forced])).tokens[1] == 7
    assert model.n_drawn == 1


@pytest.mark.parametrize("scored", [0, 1, 2])
@pytest.mark.parametrize("n_logprobs", [None, 1])
def test_prompts_are_scored_beside_tokens_that_the_model_draws(scored: int, n_logprobs: int | None) -> None:
    def samplers() -> list[Sampler]:
        return [sampler(SamplingParams(temperature=0)), sampler(SamplingParams(temperature=0), n_logprobs=n_logprobs)]

    output, plain = done(DrawingFakeModel(), work_of(samplers(), scored)), done(FakeModel(), work_of(samplers(), scored))
    assert repr(output.scores) == repr(plain.scores)
    assert output.tokens == plain.tokens
    assert [repr(one) for one in output.logprobs or []] == [repr(one) for one in plain.logprobs or []]


def test_the_draw_says_what_the_parameters_say() -> None:
    params = SamplingParams(temperature=0.5, top_k=40, top_p=0.9, min_p=0.1)
    assert sampler(params).draw_by_model() == Draw(temperature=0.5, truncation_temperature=0.5, top_k=40, top_p=0.9, min_p=0.1)
    llama = SamplingParams(temperature=0.5, profile=SamplingProfile.LLAMA)
    assert sampler(llama).draw_by_model() == Draw(temperature=0.5, truncation_temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


@pytest.mark.slow
def test_what_the_model_draws_is_distributed_as_what_is_drawn_here() -> None:
    params = SamplingParams(temperature=0.7, top_k=6, top_p=0.9)
    logits = np.random.default_rng(3).normal(0, 2, 50).astype(np.float32)
    n = 4000
    here, there = np.zeros(50), np.zeros(50)
    for seed in range(n):
        one = sampler(params, seed=seed)
        here[sample(logits[None].copy(), [one]).tokens[0]] += 1
        draw = one.draw_by_model()
        assert draw is not None
        there[draw_one(logits, draw, one.key)] += 1
    assert set(np.flatnonzero(here)) == set(np.flatnonzero(there))
    assert np.abs(here - there).max() < 5 * np.sqrt(n / 2)


class InvalidSecond(DrawingFakeModel):
    def step_and_draw(self, batch: Batch, draws: Sequence[Draw | None], keys: npt.NDArray[np.uint64]) -> Drawn:
        drawn = super().step_and_draw(batch, draws, keys)
        drawn.valid[1] = False
        return drawn


def test_outputs_whose_logits_were_not_numbers_are_told_by_their_place() -> None:
    samplers = [sampler(SamplingParams(), n_logprobs=1), sampler(SamplingParams()), sampler(SamplingParams())]
    assert done(InvalidSecond(), work_of(samplers)).invalid == [2]


def test_keys_are_those_of_the_tokens_one_by_one() -> None:
    for n in (1, 40):
        samplers = [Sampler(SamplingParams(), seed=seed * 7**20, tokens=[1] * (seed + 2), n_prompt=1) for seed in range(n)]
        assert keys_of(samplers).tolist() == [sampler.key for sampler in samplers]
