"""Decides what each step of an embedder carries, and makes the inputs' vectors of their rows'.

Pure and synchronous, as the scheduler. Keys take turns by what they were served and a key's jobs input by input, so that a long list does
not keep a single text waiting; a step is bounded in rows, so that generation, which steps in between, does not wait long either.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from cllm.backend import Batch, Embedder, Int32s, Pooling, Vectors
from cllm.engine.batch.compute import empty
from cllm.engine.embedding.turns import Turns
from cllm.engine.waiting.fairness import Accounts
from cllm.errors import ContextExceeded, GenerationFailed, InvalidRequest, RequestError, StepFailed

Sums = npt.NDArray[np.float64]

N_DEATHS_MAX: Final = 2  # with one input alone in the step: the first may have had another cause
N_BYTES_TOKEN: Final = 4  # as requests bring them
N_BYTES_INPUT: Final = 256  # that an input takes besides its tokens and its vector, as measured


Tokens: TypeAlias = Seq[int] | Int32s


class InputTooLong(ContextExceeded):
    """An input has more tokens than the model takes; `place` says which of them, from 0."""

    def __init__(self, n_tokens: int, n_max: int, place: int, *, counted: bool = True) -> None:
        super().__init__(n_tokens, n_max)
        self.place = place
        self.message = f"an input has {'' if counted else 'at least '}{n_tokens} tokens, and the model takes {n_max} at most"


class InputEmpty(InvalidRequest):
    """An input has no tokens; `place` says which of them, from 0."""

    def __init__(self, place: int) -> None:
        super().__init__("a text without tokens has no vector")
        self.place = place


@attrs.define(eq=False)
class Job:
    """The inputs of one request, and what is known of their vectors."""

    key: str
    vectors: Vectors  # (inputs, n_embd), not normalised
    n_bytes: int  # that it keeps until it is answered: its inputs, and their vectors, which take their memory as they are filled in
    n_left: int  # inputs without a vector
    n_tokens_left: int  # of these
    error: RequestError | None = None
    cancelled: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is owed any more."""
        return self.n_left == 0 or self.error is not None or self.cancelled


def n_tokens_max_of(embedder: Embedder) -> int:
    """Tokens of one input that an embedder can be given: by what it says, by its cells, and by a step's rows where it wants all in one."""
    n_tokens_max = min(embedder.n_tokens_max, embedder.n_cells)
    return n_tokens_max if embedder.can_split else min(n_tokens_max, embedder.n_rows_max)


@attrs.define(eq=False)
class Input:
    """One text on its way: tokens [0, n_computed) are computed, in `slot` once there are any."""

    job: Job
    place: int  # among its job's inputs
    tokens: Tokens
    slot: int = 0
    n_computed: int = 0
    pooled: Sums | None = None  # the sum of the rows for MEAN, else the row that counts
    alone: bool = False  # a step that it was part of failed: it is tried by itself
    n_deaths: int = 0  # of the model, in a step that had nothing else


@attrs.define(eq=False)
class EmbedPlan:
    """One step of an embedder."""

    drops: list[int]  # slots to be freed before its rows
    batch: Batch
    parts: list[tuple[Input, int]]  # (input, rows), in the batch's order


class EmbedScheduler:
    """The inputs under way and waiting. One caller; every method returns at once."""

    def __init__(self, embedder: Embedder, accounts: Accounts | None = None) -> None:
        self.n_tokens = 0  # computed, since the start
        self.n_inputs = 0  # that got their vectors
        self._n_embd = embedder.n_embd
        self._pooling = embedder.pooling
        self._can_split = embedder.can_split
        self.n_tokens_max = n_tokens_max_of(embedder)
        self._n_rows_max = embedder.n_rows_max
        self._batch = Batch(embedder.n_rows_max)
        self._waiting: Turns[Input] = Turns(Accounts() if accounts is None else accounts)
        self._begun: list[Input] = []  # hold a slot
        self._free_slots = list(range(embedder.n_slots))[::-1]
        self._n_cells_free = embedder.n_cells
        self._drops: list[int] = []

    @property
    def n_waiting(self) -> int:
        """Inputs that no step has begun with."""
        return len(self._waiting)

    def submit(self, inputs: Seq[Tokens], key: str = "") -> Job:
        """Queue the inputs of a request, of which there is one at least.

        Raises: InputTooLong · InputEmpty; nothing is queued then.
        """
        for place, tokens in enumerate(inputs):
            if not len(tokens):  # of an array nobody says whether it is true
                raise InputEmpty(place)
            if len(tokens) > self.n_tokens_max:
                raise InputTooLong(len(tokens), self.n_tokens_max, place)
        n, n_tokens = len(inputs), sum(map(len, inputs))
        vectors = np.zeros((n, self._n_embd), np.float32)
        job = Job(key, vectors, vectors.nbytes + N_BYTES_TOKEN * n_tokens + N_BYTES_INPUT * n, n, n_tokens)
        self._waiting.add(key, [Input(job, place, tokens) for place, tokens in enumerate(inputs)])
        return job

    def cancel(self, job: Job) -> None:
        """Give a job up; the next `plan` frees what it holds."""
        job.cancelled = True

    def end_all(self, error: RequestError) -> list[Job]:
        """End every job with `error`; return them."""
        jobs = list(dict.fromkeys([one.job for one in (*self._begun, *self._waiting)]))
        for job in jobs:
            job.error = job.error or error
        return jobs

    def plan(self, n_rows: int) -> EmbedPlan | None:
        """Form a step of about `n_rows` rows; more where a single input cannot be split. None when nothing waits.

        Begun inputs go first, the one with the least left before the others; a long one leaves half of the room to one that could begin.
        """
        self._sweep()
        batch, n_room = self._batch, min(n_rows, self._n_rows_max)
        batch.n_rows = 0
        parts: list[tuple[Input, int]] = []
        for one in sorted(self._begun, key=_n_left):
            if n_room > 0:
                n_room -= self._add(one, -(-n_room // 2) if not one.alone and self._could_begin() else n_room, parts)
        while n_room > 0 and not (parts and parts[0][0].alone) and (newcomer := self._next(n_room, is_first=not parts)) is not None:
            n_room -= self._add(newcomer, n_room, parts)
        if not parts:
            return None
        batch.n_outputs = batch.n_rows
        batch.outputs[: batch.n_rows] = 1
        drops, self._drops = self._drops, []
        return EmbedPlan(drops, batch, parts)

    def apply(self, plan: EmbedPlan, pooled: Seq[Sums]) -> list[Job]:
        """Settle a step that went well, with `pool`'s vectors of its parts; return the jobs that it ended."""
        over: list[Job] = []
        for (one, n_rows), vector in zip(plan.parts, pooled, strict=True):
            self.n_tokens += n_rows
            one.n_computed += n_rows
            one.pooled = self._merged(one.pooled, vector)
            if one.n_computed == len(one.tokens):
                self._free(one)
                self._finish(one, over)
        return over

    def apply_failure(self, plan: EmbedPlan, error: Exception) -> list[Job]:
        """Settle a step that raised: its inputs start over, one by one; the one that fails alone ends its job. Return those ended."""
        members = [one for one, _ in plan.parts]
        # It may have failed before it came to them, and to drop an empty slot is harmless.
        self._drops = list(dict.fromkeys([*plan.drops, *self._drops]))
        for one in members:
            self._free(one)
        if len(members) == 1 and not members[0].job.is_over:
            return [self._fail(members[0].job, error)]
        for one in reversed(members):
            self._waiting.put_back(attrs.evolve(one, n_computed=0, pooled=None, alone=True))
        return []

    def apply_death(self, plan: EmbedPlan | None, error: Exception) -> list[Job]:
        """The model died, in the step of `plan` or between two, and another one with empty slots takes its place; return the jobs ended.

        Everything that was begun starts over. Those with whom it died are tried one by one; with whom it dies alone again, its job ends.
        """
        members = [] if plan is None else [one for one, _ in plan.parts]
        begun, over = list(self._begun), []
        for one in begun:
            self._free(one)
        for one in reversed(begun):
            is_member, is_alone = one in members, len(members) == 1
            again = attrs.evolve(
                one, n_computed=0, pooled=None, alone=one.alone or is_member, n_deaths=one.n_deaths + (is_member and is_alone)
            )
            if again.n_deaths < N_DEATHS_MAX or one.job.is_over:
                self._waiting.put_back(again)
            else:
                over.append(self._fail(one.job, error))
        return over

    # --- how it works -------------------------------------------------------------------------------------------------

    @staticmethod
    def _fail(job: Job, error: Exception) -> Job:
        job.error = GenerationFailed("the model failed on this input", code="step_failed")
        job.error.__cause__ = error
        return job

    def _sweep(self) -> None:
        for one in [one for one in self._begun if one.job.is_over]:
            self._free(one)
        self._waiting.keep(lambda one: not one.job.is_over)

    def _could_begin(self) -> bool:
        """Whether the next input in turn has room in memory, and may be in a step beside others."""
        one = self._waiting.first()
        return one is not None and bool(self._free_slots) and not one.alone and len(one.tokens) <= self._n_cells_free

    def _next(self, n_room: int, *, is_first: bool) -> Input | None:
        """Begin with the next input in turn, if it has room in the step and in memory."""
        one = self._waiting.first()
        if one is None or not self._free_slots:
            return None
        n_tokens = len(one.tokens)
        fits = is_first or (not one.alone and (self._can_split or n_tokens <= n_room))
        if not fits or n_tokens > self._n_cells_free:
            return None
        self._waiting.take(n_tokens)
        one.slot = self._free_slots.pop()
        self._n_cells_free -= n_tokens
        self._begun.append(one)
        return one

    def _add(self, one: Input, n_room: int, parts: list[tuple[Input, int]]) -> int:
        n_owed = _n_left(one)
        n_rows = min(n_owed, n_room) if self._can_split else n_owed
        batch, start = self._batch, self._batch.n_rows
        end = start + n_rows
        batch.tokens[start:end] = one.tokens[one.n_computed : one.n_computed + n_rows]
        batch.positions[start:end] = range(one.n_computed, one.n_computed + n_rows)
        batch.slots[start:end] = one.slot
        batch.n_rows = end
        parts.append((one, n_rows))
        return n_rows

    def _merged(self, before: Sums | None, vector: Sums) -> Sums:
        if before is None:
            return vector
        if self._pooling is Pooling.MEAN:
            return before + vector
        return before if self._pooling is Pooling.CLS else vector

    def _finish(self, one: Input, over: list[Job]) -> None:
        job = one.job
        if job.is_over:
            return
        assert one.pooled is not None
        vector = one.pooled / len(one.tokens) if self._pooling is Pooling.MEAN else one.pooled
        if not np.isfinite(vector).all():
            job.error = GenerationFailed("the model's vector is not made of numbers", code="invalid_vector")
        else:
            job.vectors[one.place] = vector
            job.n_left -= 1
            job.n_tokens_left -= len(one.tokens)
            self.n_inputs += 1
        if job.is_over:
            over.append(job)

    def _free(self, one: Input) -> None:
        self._begun.remove(one)
        self._free_slots.append(one.slot)
        self._drops.append(one.slot)
        self._n_cells_free += len(one.tokens)


def _n_left(one: Input) -> int:
    return len(one.tokens) - one.n_computed


def compute(embedder: Embedder, plan: EmbedPlan) -> list[Sums]:
    """Do a step, and pool the vectors of each part's rows; blocks.

    Raises: what the embedder's calls raise · StepFailed for vectors of another shape · ModelDied for a slot that cannot be emptied.
    """
    for slot in plan.drops:
        empty(embedder, slot)
    vectors = embedder.step(plan.batch)
    if len(vectors) != plan.batch.n_rows:  # of fewer, somebody's would be made of others'
        raise StepFailed(f"{len(vectors)} vectors for {plan.batch.n_rows} rows")
    if vectors.shape[1:] != (embedder.n_embd,):
        raise StepFailed(f"vectors of the shape {vectors.shape[1:]}, not of {embedder.n_embd} numbers")
    return pool(vectors, [n_rows for _, n_rows in plan.parts], embedder.pooling)


def pool(vectors: Vectors, n_rows: Seq[int], pooling: Pooling) -> list[Sums]:
    """Return what each run of rows comes to: its sum for MEAN, its first for CLS, else its last."""
    pooled, start = [], 0
    for n in n_rows:
        rows = vectors[start : start + n]
        if pooling is Pooling.MEAN:
            pooled.append(rows.sum(axis=0, dtype=np.float64))
        else:
            pooled.append(rows[0 if pooling is Pooling.CLS else -1].astype(np.float64))
        start += n
    return pooled
