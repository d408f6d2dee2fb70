"""The one function that touches the model: memory moves, forward pass, sampling. It runs where the model lives."""

from __future__ import annotations

from collections.abc import Callable

from cllm.backend import StepModel
from cllm.engine.plan import Move, Plan, StepOutput
from cllm.engine.sampling import sample


def compute(model: StepModel, plan: Plan, clock: Callable[[], float]) -> StepOutput:
    """Do the plan's step; blocks. `clock` gives seconds, for the output's times.

    Raises: what the model's calls raise (cllm/backend.py). When `NoRoom` comes, the moves are done and the rows are not.
    """
    started_at = clock()
    for move in plan.moves:
        _do(model, move)
    if not plan.n_rows:
        return StepOutput([], [], None, model_s=clock() - started_at)
    logits = model.step(plan.batch)
    computed_at = clock()
    if not plan.outputs:
        return StepOutput([], [], None, model_s=computed_at - started_at)
    sampled = sample(logits, plan.samplers)
    return StepOutput(sampled.tokens, sampled.invalid, sampled.logprobs, model_s=computed_at - started_at, sample_s=clock() - computed_at)


def _do(model: StepModel, move: Move) -> None:
    model.drop(move.slot)
