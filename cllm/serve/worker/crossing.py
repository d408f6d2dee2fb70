"""A step on its way between two processes: the engine's work as messages, and what came of it, on both sides.

Grammars stay with the engine: the masks of a step cross instead, so that a worker needs to compile nothing. A worker keeps the samplers of
the sequences that were in its last step; one that it does not know is opened anew, from its parameters and tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import attrs
import numpy as np

from cllm import errors
from cllm.backend import Batch, StepModel, StreamBeat, StreamEnd, StreamEvent, StreamText, StreamToken, Vocabulary
from cllm.engine.batch.compute import compute
from cllm.engine.batch.plan import Drop, Move, Plan, Restore, Restored, Save, Scored, Share, StepOutput, StepWork, Trim
from cllm.engine.memory.hostpool import Piece
from cllm.engine.memory.pieces import Chain
from cllm.engine.sampling.dry import TokenSet
from cllm.engine.sampling.sampler import Sampler, make_sampler
from cllm.engine.sequence import Sequence
from cllm.serve.worker import frames

_NO_KEY = ("", "")
N_BYTES_CROSSING = 1 << 20  # of states, from which on their crossing is what a step takes beside the worker's own work

# --- the engine's side -------------------------------------------------------------------------------------------------


class Crossing:
    """Knows what the worker's samplers have seen. One for each life of a worker."""

    def __init__(self) -> None:
        self._n_seen: dict[int, int] = {}  # tokens, by sequence

    def step_of(self, plan: Plan, number: int) -> frames.Step:
        """Return the message for `plan`; it is taken for sent."""
        drawings = [self._drawing(*pair) for pair in zip(plan.outputs, plan.samplers, strict=True)]
        if drawings:
            self._n_seen = {sequence.seq_id: len(sequence.tokens) for sequence in plan.outputs}
        return frames.Step(
            number=number,
            moves=[_moving(move) for move in plan.moves],
            columns=columns_of(plan.batch),
            drawings=drawings,
            scorings=[frames.Scored(one.first, one.targets, one.n_top) for one in plan.scorings],
            fillers=list(plan.fillers),
        )

    def _drawing(self, sequence: Sequence, sampler: Sampler) -> frames.Drawing:
        n_seen = self._n_seen.get(sequence.seq_id)
        waits = sampler.grammar_waits
        return frames.Drawing(
            seq_id=sequence.seq_id,
            tokens=np.array(sequence.tokens[n_seen or 0 :], np.int32).tobytes(),
            opening=_opening(sequence, sampler) if n_seen is None else None,
            due=sampler.due,
            mask=None if sampler.grammar is None or waits else sampler.grammar.mask().tobytes(),
            grammar_waits=waits,
        )

    def take(self, plan: Plan, stepped: frames.Stepped, *, seconds: float) -> StepOutput:
        """Note in `plan` what became of it, after so many seconds; return what it drew. Raises: what the step raised."""
        own_s = stepped.moves_s + stepped.model_s + stepped.sample_s
        _take_moved(plan, stepped.moved, 0.0 if stepped.failure is not None else max(seconds - own_s, 0.0))
        if stepped.failure is not None:
            self._n_seen.clear()  # how far the worker came with its samplers is not worth finding out
            raise error_of(stepped.failure)
        if stepped.mus is not None:
            for sampler, mu in zip(plan.samplers, stepped.mus, strict=True):
                sampler.mu = mu
        return StepOutput(
            stepped.tokens,
            stepped.invalid,
            stepped.logprobs,
            stepped.scores,
            model_s=stepped.model_s,
            moves_s=stepped.moves_s,
            sample_s=stepped.sample_s,
        )


def columns_of(batch: Batch) -> frames.Columns:
    """The rows of a batch, as they cross."""
    n = batch.n_rows
    columns = (batch.tokens, batch.positions, batch.slots, batch.outputs)
    return frames.Columns(n, batch.n_outputs, *(column[:n].tobytes() for column in columns))


def _opening(sequence: Sequence, sampler: Sampler) -> frames.Opening:
    return frames.Opening(
        sampling=sampler.params,
        stopping=sequence.spec.stopping,
        seed=sampler.seed,
        n_logprobs=sampler.n_logprobs,
        n_prompt=sampler.n_prompt,
        mu=sampler.mu,
        dry_breakers=None if sequence.spec.dry_breakers is None else sequence.spec.dry_breakers.bits,
    )


def _moving(move: Move) -> frames.Moving:
    match move:
        case Drop(slot):
            return frames.Moving("Drop", slot)
        case Trim(slot, n_keep):
            return frames.Moving("Trim", slot, n_keep)
        case Share(slot, source, n_tokens):
            return frames.Moving("Share", slot, source, n_tokens)
        case Save(slot, start):
            return frames.Moving("Save", slot, start, len(move.tokens))
        case Restore(slot, chain):
            pieces = tuple((piece.start, len(piece.tokens), _that_fits(piece.state) or b"") for piece in chain.pieces)
            return frames.Moving("Restore", slot, chain.end, chain.start, pieces)


def _that_fits(state: bytes | None) -> bytes | None:
    """A state that a message can hold, if it is one."""
    return None if state is None or len(state) > frames.N_BYTES_VALUE_MAX else state


def _take_moved(plan: Plan, moved: frames.Moved, crossing_s: float) -> None:
    """The step took `crossing_s` beside what the worker did: where states crossed, that is theirs, and most of what moving them costs."""
    plan.n_moves_done = moved.n_done
    restores = [move for move in plan.moves if isinstance(move, Restore)]
    n_bytes_saved = [len(state or b"") for state, _ in moved.saved]
    n_bytes_restored = [sum(len(piece.state or b"") for piece in restore.chain.pieces) for restore in restores]
    n_bytes = sum(n_bytes_saved) + sum(n_bytes_restored)
    byte_s = crossing_s / n_bytes if n_bytes >= N_BYTES_CROSSING else 0.0
    saves = [move for move in plan.moves if isinstance(move, Save)]
    for save, (state, seconds), n in zip(saves, moved.saved, n_bytes_saved, strict=False):
        plan.saved.append((save, state, seconds + n * byte_s))
    for restore, (n_tokens, n_moved, seconds, unfit), n in zip(restores, moved.restored, n_bytes_restored, strict=False):
        piece = None if unfit is None else restore.chain.pieces[unfit]
        plan.restored.append(Restored(restore, n_tokens, n_moved, seconds + n * byte_s, piece))


# --- the worker's side -------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Bench:
    """Where the worker does steps: the model, a batch with columns that stay where they are, and the samplers of the last step."""

    model: StepModel
    vocabulary: Vocabulary
    batch: Batch
    samplers: dict[int, Sampler] = attrs.field(factory=dict)
    work: StepWork | None = None  # of the step under way, which another thread may give up

    def step(self, step: frames.Step, clock: Callable[[], float], check: Callable[[], None]) -> frames.Stepped:
        """Do a step; `check` may raise before it begins."""
        work = self.work = self._work(step)
        try:
            check()
            output = errors.call_foreign(compute, self.model, work, clock)
        except Exception as error:
            return _stepped(StepOutput([], [], None), work, failed(error))
        finally:
            self.work = None
        return _stepped(output, work, None)

    def _work(self, step: frames.Step) -> StepWork:
        if step.drawings:
            self.samplers = {drawing.seq_id: self._sampler(drawing) for drawing in step.drawings}
        return StepWork(
            moves=[_move(moving) for moving in step.moves],
            batch=fill(self.batch, step.columns),
            samplers=[self.samplers[drawing.seq_id] for drawing in step.drawings],
            scorings=[Scored(one.first, one.targets, one.n_top) for one in step.scorings],
            fillers=step.fillers,
        )

    def _sampler(self, drawing: frames.Drawing) -> Sampler:
        tokens: list[int] = np.frombuffer(drawing.tokens, np.int32).tolist()
        if drawing.opening is None:
            sampler = self.samplers[drawing.seq_id]
            for token in tokens:
                sampler.tokens.append(token)
                sampler.observe(token)
        else:
            sampler = _opened(drawing.opening, tokens, self.vocabulary)
        mask = None if drawing.mask is None else np.frombuffer(drawing.mask, np.uint32)
        sampler.be_told(due=drawing.due, mask=mask, grammar_waits=drawing.grammar_waits)
        return sampler


def fill(batch: Batch, columns: frames.Columns) -> Batch:
    """Write the rows into the batch; return it."""
    n = columns.n_rows
    batch.n_rows, batch.n_outputs = n, columns.n_outputs
    batch.tokens[:n] = np.frombuffer(columns.tokens, np.int32)
    batch.positions[:n] = np.frombuffer(columns.positions, np.int32)
    batch.slots[:n] = np.frombuffer(columns.slots, np.int32)
    batch.outputs[:n] = np.frombuffer(columns.outputs, np.int8)
    return batch


def _opened(opening: frames.Opening, tokens: list[int], vocabulary: Vocabulary) -> Sampler:
    sampler = make_sampler(
        opening.sampling,
        opening.stopping,
        vocabulary,
        seed=opening.seed,
        tokens=tokens,
        n_prompt=opening.n_prompt,
        n_logprobs=opening.n_logprobs,
        dry_breakers=None if opening.dry_breakers is None else TokenSet(opening.dry_breakers),
    )
    sampler.mu = opening.mu
    return sampler


def _move(moving: frames.Moving) -> Move:
    match moving.name:
        case "Drop":
            return Drop(moving.slot)
        case "Trim":
            return Trim(moving.slot, moving.number)
        case "Share":
            return Share(moving.slot, moving.number, moving.n_tokens)
        case "Save":
            return Save(moving.slot, moving.number, _NO_KEY, [0] * moving.n_tokens)
        case _:
            pieces = tuple(Piece(_NO_KEY, [0] * end, start, state) for start, end, state in moving.pieces)
            return Restore(moving.slot, Chain(moving.n_tokens, moving.number, pieces))


def _stepped(output: StepOutput, work: StepWork, failure: frames.Failed | None) -> frames.Stepped:
    return frames.Stepped(
        moved=frames.Moved(
            work.n_moves_done,
            [(_that_fits(state), seconds) for _, state, seconds in work.saved],
            [(one.n_tokens, one.n_moved, one.seconds, _place(one.move.chain.pieces, one.unfit)) for one in work.restored],
        ),
        failure=failure,
        tokens=output.tokens,
        invalid=output.invalid,
        logprobs=output.logprobs,
        scores=output.scores,
        mus=_mus(work.samplers) if output.tokens else None,
        model_s=output.model_s,
        moves_s=output.moves_s,
        sample_s=output.sample_s,
    )


def _place(pieces: tuple[Piece, ...], piece: Piece | None) -> int | None:
    return None if piece is None else pieces.index(piece)


def _mus(samplers: Iterable[Sampler]) -> list[float] | None:
    samplers = list(samplers)
    return [sampler.mu for sampler in samplers] if any(sampler.params.mirostat for sampler in samplers) else None


# --- errors ------------------------------------------------------------------------------------------------------------


def failed(error: Exception) -> frames.Failed:
    """An exception as a message."""
    if isinstance(error, errors.BackendError):
        return frames.Failed(_known_name(error), str(error))
    return frames.Failed("StepFailed", f"{type(error).__name__}: {error}")


def _known_name(error: Exception) -> str:
    """The nearest of the contract's classes that it is: of a plugin's own subclass the other side knows nothing."""
    known: type = next(kind for kind in type(error).__mro__ if getattr(errors, kind.__name__, None) is kind)
    return known.__name__


def error_of(failure: frames.Failed) -> errors.BackendError:
    """The exception that a message tells of."""
    kind = getattr(errors, failure.error, None)
    if isinstance(kind, type) and issubclass(kind, errors.BackendError):
        return kind(failure.message)
    return errors.StepFailed(failure.message)


# --- what a model that schedules itself tells ----------------------------------------------------------------------------


@attrs.frozen
class WrongEvent:
    """What stands for an event that could not cross."""

    seq_id: int | None
    kind: str
    why: str


def encoded_event(event: StreamEvent) -> bytes:
    """The message for an event, encoded; for one that has a wrong field, one that says so: the sequence that it is of ends by it."""
    try:
        return frames.encoded_told(_told_of(event))
    except Exception as error:  # of a plugin's making
        return frames.encoded(frames.WrongTold(seq_id_of(event), type(event).__name__, errors.in_one_line(error)))


def check_end(end: StreamEnd) -> None:
    """Raise what a field is wrong by, of an end that does not cross, before the sequence that waits for it is given up for it."""
    frames.encoded_told(_end_told(end, seq_id=0))


def seq_id_of(event: object) -> int | None:
    """Of which sequence an event is, whatever it is: an array's number is one, too."""
    try:
        seq_id = int(operator.index(event.seq_id))  # type: ignore[attr-defined]
    except Exception:  # of a plugin's making
        return None
    return seq_id if 0 <= seq_id <= frames.INT64_MAX else None


def _told_of(event: StreamEvent) -> frames.Told:
    if isinstance(event, StreamToken):
        return frames.TokenTold(event)
    if isinstance(event, StreamText):
        return frames.TextTold(event)
    if isinstance(event, StreamBeat):
        return frames.BeatTold()
    return _end_told(event, event.seq_id)


def _end_told(end: StreamEnd, seq_id: int) -> frames.EndTold:
    if not isinstance(end.refusal, errors.RequestError | None):
        raise TypeError("its refusal is no RequestError")
    refused = None if end.refusal is None else _refused(end.refusal)
    return frames.EndTold(seq_id, end.error, refused, end.is_cut, end.stop_reason, end.usage)


def _refused(refusal: errors.RequestError) -> frames.Refused:
    return frames.Refused(
        error=_known_name(refusal),
        message=refusal.message,
        param=refusal.param,
        code=refusal.code,
        extra=refusal.extra,
        retry_after_s=getattr(refusal, "retry_after_s", None),
    )


def event_of(told: frames.FromWorker) -> StreamEvent | WrongEvent:
    """The event of a message."""
    match told:
        case frames.TokenTold(event) | frames.TextTold(event):
            return event
        case frames.BeatTold():
            return StreamBeat()
        case frames.WrongTold(seq_id, kind, why):
            return WrongEvent(seq_id, kind, why)
        case frames.EndTold(seq_id, error, refused):
            refusal = None if refused is None else _refusal(refused)
            return StreamEnd(seq_id, error, refusal, told.is_cut, told.stop_reason, told.usage)
    raise AssertionError(told)


def _refusal(refused: frames.Refused) -> errors.RequestError:
    kind: type[errors.RequestError] = getattr(errors, refused.error, errors.GenerationFailed)
    refusal = kind.__new__(kind)  # some are made of more than a message, and all have what one is made of
    errors.RequestError.__init__(refusal, refused.message, param=refused.param, code=refused.code, **refused.extra)
    if refused.retry_after_s is not None:
        refusal.retry_after_s = refused.retry_after_s  # type: ignore[attr-defined]
    return refusal
