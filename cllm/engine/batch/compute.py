"""The one function that touches the model: memory moves, forward pass, sampling. It runs where the model lives."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeAlias

import numpy as np

from cllm.backend import Embedder, Logits, StepModel
from cllm.engine.batch.plan import Drop, Move, Restore, Restored, Save, Scored, Share, StepOutput, StepWork, Trim
from cllm.engine.events import TokenLogprob
from cllm.engine.sampling.drawing import divide
from cllm.engine.sampling.logprobs import score
from cllm.engine.sampling.params import SamplingParams
from cllm.engine.sampling.step import Sampled, Sampler, sample
from cllm.errors import Aborted, ModelDied, NoRoom, StepFailed, call_foreign, in_one_line

Scores: TypeAlias = list[TokenLogprob] | None

NOBODY: frozenset[int] = frozenset()
NOBODYS = Sampler(SamplingParams(temperature=0), seed=0, tokens=[], n_prompt=0)  # for a row that nobody wants


def compute(model: StepModel, plan: StepWork, clock: Callable[[], float]) -> StepOutput:
    """Do the plan's step; blocks. `clock` gives seconds, for the output's times.

    Raises: what the model's calls raise (cllm/backend.py) · Aborted when it was given up meanwhile · ModelDied for a slot that cannot be
    emptied. When Aborted or NoRoom comes, no row is computed, and of the moves those that `plan.n_moves_done` counts are done.
    """
    began_at = clock()
    for move in plan.moves:
        do_move(model, plan, move, clock)
        plan.n_moves_done += 1
    moves_s = clock() - began_at
    if not plan.n_rows:
        return StepOutput([], [], None, moves_s=moves_s)
    if plan.is_given_up:  # an abort that came during the moves had nothing to stop
        raise Aborted("nobody waits for this step")
    mus = [(sampler, sampler.mu) for sampler in plan.samplers if sampler.params.mirostat]
    try:
        try:
            output = _step(model, plan, clock, moves_s)
        finally:
            for slot, n_keep in plan.fillers:
                take_back(model, slot, n_keep)
    except BaseException:  # what was drawn is drawn again
        for sampler, mu in mus:
            sampler.mu = mu
        raise
    plan.drawn = None if output.invalid or (plan.unsettled is not None and plan.unsettled.overrun) else output.tokens
    return output


def take_back(model: StepModel, slot: int, n_keep: int) -> None:
    """Cut off what a filler left, if it came to that."""
    if n_keep:
        model.trim(slot, n_keep)
    else:
        empty(model, slot)


def _step(model: StepModel, plan: StepWork, clock: Callable[[], float], moves_s: float) -> StepOutput:
    """The rows, and what is drawn from them."""
    began_at = clock()
    if (divided := divide(model, plan)) is not None:
        drawing_model, division = divided
        # Before the step before is settled the model draws all tokens or none (`StepScheduler.plan_ahead`): none is drawn here unsettled.
        assert plan.unsettled is None or not division.samplers
        drawn = division.step(drawing_model, plan)
        _check(drawn.logits, len(division.samplers) + sum(len(one.targets) for one in division.scorings))
        drawing_at = computed_at = clock()
        sampled, scores = _sample(drawn.logits, division.samplers, division.scorings)
        sampled = division.join(drawn, sampled)
    else:
        logits = model.step(plan.batch)
        _check(logits, plan.batch.n_outputs)
        drawing_at = computed_at = clock()
        samplers, overrun = plan.samplers, NOBODY
        if plan.unsettled is not None:  # what came of the tokens before decides how the next are drawn
            plan.unsettled.is_settled.wait()
            drawing_at, overrun = clock(), plan.unsettled.overrun
        if overrun:  # to leave their rows out would be to copy all others
            samplers = [NOBODYS if place in overrun else sampler for place, sampler in enumerate(samplers)]
        sampled, scores = _sample(logits, samplers, plan.scorings)
        if overrun:
            sampled.invalid = [place for place in sampled.invalid if place not in overrun]
    return StepOutput(
        sampled.tokens,
        sampled.invalid,
        sampled.logprobs,
        scores,
        model_s=computed_at - began_at,
        moves_s=moves_s,
        sample_s=clock() - drawing_at,
    )


def _check(logits: Logits, n_outputs: int) -> None:
    """Every row is somebody's next token: one that is missing must not be told as a drawn one. Raises: StepFailed."""
    if len(logits) != n_outputs:
        raise StepFailed(f"{len(logits)} rows of logits for {n_outputs} outputs")


def _sample(logits: Logits, samplers: Seq[Sampler], scorings: Seq[Scored]) -> tuple[Sampled, list[Scores]]:
    """Draw from the rows that are not scored, and score the others."""
    scores = [score(logits[one.rows], one.targets, one.n_top) for one in scorings]
    if not samplers:
        return Sampled([], [], None), scores
    return sample(_unscored(logits, scorings) if scorings else logits, samplers), scores


def _unscored(logits: Logits, scorings: Seq[Scored]) -> Logits:
    """The rows that tokens are drawn from, copied: beside them stand rows that are scored."""
    keep = np.ones(len(logits), np.bool_)
    for one in scorings:
        keep[one.rows] = False
    drawn: Logits = logits[keep]
    return drawn


def do_move(model: StepModel, plan: StepWork, move: Move, clock: Callable[[], float]) -> None:
    """Do one memory move; it is done wholly or not at all. What is saved and restored is noted in the plan.

    Raises: what the model's calls raise. A save or a restore that fails raises nothing: it costs no more than its use.
    """
    match move:
        case Drop(slot):
            empty(model, slot)
        case Trim(slot, n_keep):
            model.trim(slot, n_keep)
        case Share(slot, source, n_tokens):
            model.share(source, slot, n_tokens)
        case Save():
            started_at = clock()
            plan.saved.append((move, _save(model, move), clock() - started_at))
        case Restore():
            plan.restored.append(_restore(model, move, clock))


def empty(model: StepModel | Embedder, slot: int) -> None:
    """Empty a slot, which is always possible: who cannot would be asked again for ever, and nobody could have the slot.

    Raises: ModelDied.
    """
    try:
        call_foreign(model.drop, slot)
    except ModelDied:
        raise
    except Exception as error:
        raise ModelDied(f"slot {slot} could not be emptied: {in_one_line(error)}") from error


def _save(model: StepModel, move: Save) -> bytes | None:
    place = (move.slot, move.start) if move.start else (move.slot,)
    try:
        return call_foreign(model.save, *place)
    except ModelDied:
        raise
    except Exception:  # it is counted
        return None


def _restore(model: StepModel, move: Restore, clock: Callable[[], float]) -> Restored:
    """Restore one piece after the other, cutting each where the next begins; those after one that fails are of no use."""
    started_at, n_tokens, n_moved, unfit = clock(), move.chain.start, 0, None
    for piece, end in move.chain.cuts():
        try:
            call_foreign(model.restore, move.slot, piece.state)
        except ModelDied:
            raise
        except (NoRoom, MemoryError):  # not the state's fault
            break
        except Exception:  # another model's, or damaged
            unfit = piece
            break
        if end < len(piece.tokens):
            model.trim(move.slot, end)
        n_moved += piece.n_cells
        n_tokens = end
    return Restored(move, n_tokens, n_moved, clock() - started_at, unfit)
