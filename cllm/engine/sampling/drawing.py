"""Which of a step's tokens the model draws itself, and how these and what is drawn here become one."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import attrs
import numpy as np

from cllm.backend import Draw, Drawn, DrawsTokens, StepModel
from cllm.engine.batch.plan import Scored, StepWork
from cllm.engine.sampling.sampler import Sampler
from cllm.engine.sampling.step import Sampled, keys_of


@attrs.frozen(eq=False)
class Division:
    """What a model that draws is asked for, and what is left to do with its logits."""

    draws: Seq[Draw | None]  # of the samplers
    samplers: Seq[Sampler]  # whose tokens are drawn here
    scorings: Seq[Scored]  # with the rows that they have among the logits that come

    @classmethod
    def of(cls, plan: StepWork) -> Division | None:
        """Divide a step's outputs; None: all that there are need their logits."""
        draws = [sampler.draw_by_model() for sampler in plan.samplers]
        if not any(draws):
            return None
        samplers = [sampler for sampler, draw in zip(plan.samplers, draws, strict=True) if draw is None]
        return cls(draws, samplers, _moved_up(plan, draws) if plan.scorings else ())

    def step(self, model: DrawsTokens, plan: StepWork) -> Drawn:
        """Do the step. Raises: as the model's `step`."""
        draws, keys = self.draws, keys_of(plan.samplers, None if plan.unsettled is None else plan.unsettled.n_tokens)
        if plan.scorings:
            n_outputs, places = plan.batch.n_outputs, _places_of_samplers(plan)
            all_draws: list[Draw | None] = [None] * n_outputs
            for place, draw in zip(places, draws, strict=True):
                all_draws[place] = draw
            draws, own, keys = all_draws, keys, np.zeros(n_outputs, np.uint64)
            keys[places] = own
        return model.step_and_draw(plan.batch, draws, keys)

    def join(self, drawn: Drawn, here: Sampled) -> Sampled:
        """Return what was drawn there and here, in the order of the samplers."""
        by_model = [place for place, draw in enumerate(self.draws) if draw is not None]
        here_too = [place for place, draw in enumerate(self.draws) if draw is None]
        tokens = [0] * len(self.draws)
        for place, token in zip(by_model + here_too, drawn.tokens.tolist() + here.tokens, strict=True):
            tokens[place] = token
        invalid = [by_model[i] for i in np.flatnonzero(~drawn.valid).tolist()] + [here_too[i] for i in here.invalid]
        if here.logprobs is None:
            return Sampled(tokens, invalid, None)
        logprobs = dict(zip(here_too, here.logprobs, strict=True))
        return Sampled(tokens, invalid, [logprobs.get(place) for place in range(len(tokens))])


def divide(model: StepModel, plan: StepWork) -> tuple[DrawsTokens, Division] | None:
    """Return the model as one that draws, with its part of the step, if it has one."""
    if not (plan.samplers and hasattr(model, "step_and_draw") and isinstance(model, DrawsTokens)):  # the latter's no takes 5 us
        return None
    division = Division.of(plan)
    return None if division is None else (model, division)


def _places_of_samplers(plan: StepWork) -> list[int]:
    """The samplers' places among all outputs."""
    free = np.ones(plan.batch.n_outputs, np.bool_)
    for one in plan.scorings:
        free[one.rows] = False
    places: list[int] = np.flatnonzero(free).tolist()
    return places


def _moved_up(plan: StepWork, draws: Seq[Draw | None]) -> list[Scored]:
    """The scorings in logits from which the outputs that the model draws from are gone."""
    gone = np.array([place for place, draw in zip(_places_of_samplers(plan), draws, strict=True) if draw is not None])
    return [Scored(one.first - int(np.count_nonzero(gone < one.first)), one.targets, one.n_top) for one in plan.scorings]
