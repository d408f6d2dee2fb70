"""The one function that touches the model: memory moves, forward pass, sampling. It runs where the model lives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cllm.backend import Logits, StepModel
from cllm.engine.logprobs import score
from cllm.engine.plan import Drop, Move, Plan, Share, StepOutput, Trim
from cllm.engine.sampling import sample


def compute(model: StepModel, plan: Plan, clock: Callable[[], float]) -> StepOutput:
    """Do the plan's step; blocks. `clock` gives seconds, for the output's times.

    Raises: what the model's calls raise (cllm/backend.py). When `NoRoom` comes, the moves are done and the rows are not.
    """
    started_at = clock()
    for move in plan.moves:
        do_move(model, move)
        plan.n_moves_done += 1
    if not plan.n_rows:
        return StepOutput([], [], None, model_s=clock() - started_at)
    logits = model.step(plan.batch)
    computed_at = clock()
    model_s = computed_at - started_at
    scores = [score(logits[one.rows], one.targets, one.sequence.spec.n_prompt_logprobs or 0) for one in plan.scorings]
    if not plan.outputs:
        return StepOutput([], [], None, scores, model_s=model_s, sample_s=clock() - computed_at)
    sampled = sample(_drawn(logits, plan) if plan.scorings else logits, plan.samplers)
    return StepOutput(sampled.tokens, sampled.invalid, sampled.logprobs, scores, model_s=model_s, sample_s=clock() - computed_at)


def _drawn(logits: Logits, plan: Plan) -> Logits:
    """The rows that tokens are drawn from, copied: beside them stand rows that are scored."""
    keep = np.ones(len(logits), np.bool_)
    for one in plan.scorings:
        keep[one.rows] = False
    drawn: Logits = logits[keep]
    return drawn


def do_move(model: StepModel, move: Move) -> None:
    """Do one memory move; it is done wholly or not at all. Raises: what the model's calls raise."""
    match move:
        case Drop(slot):
            model.drop(slot)
        case Trim(slot, n_keep):
            model.trim(slot, n_keep)
        case Share(slot, source, n_tokens):
            model.share(source, slot, n_tokens)
