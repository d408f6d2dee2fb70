"""Writes rows into the columns of a batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cllm.backend import Batch
from cllm.engine.batch.scoring import ScoringRows
from cllm.engine.sequence import Sequence


class Columns:
    """Those of one batch, which are written anew for every step."""

    def __init__(self, n_rows_max: int) -> None:
        self.batch = Batch(n_rows_max)

    def begin(self, decoding: Seq[Sequence]) -> None:
        """Begin a step with the last token of each, of which all are outputs."""
        batch = self.batch
        batch.n_rows = batch.n_outputs = n_rows = len(decoding)
        if n_rows:
            batch.tokens[:n_rows] = [sequence.tokens[-1] for sequence in decoding]
            batch.positions[:n_rows] = [sequence.n_computed for sequence in decoding]
            batch.slots[:n_rows] = [sequence.slot for sequence in decoding]
            batch.outputs[:n_rows] = 1

    def go_on(self, before: Batch) -> None:
        """Begin a step with the rows of another's batch, whose outputs are one position on; their tokens are not known yet."""
        batch, n_rows = self.batch, before.n_rows
        batch.n_rows, batch.n_outputs = n_rows, before.n_outputs
        batch.tokens[:n_rows] = 0
        batch.slots[:n_rows] = before.slots[:n_rows]
        batch.outputs[:n_rows] = before.outputs[:n_rows]
        batch.positions[:n_rows] = before.positions[:n_rows] + before.outputs[:n_rows]

    def add(self, sequence: Sequence, n_rows: int, scoring: ScoringRows, *, wants_output: bool) -> None:
        """Add the next `n_rows` of a prompt: the last may be an output, and those are that are to be scored."""
        self._write(sequence, n_rows, wants_output=wants_output)
        if sequence.n_unscored:
            self._score(sequence, n_rows, scoring)
        self.batch.n_outputs += wants_output

    def _write(self, sequence: Sequence, n_rows: int, *, wants_output: bool) -> None:
        batch = self.batch
        start, end, pos = batch.n_rows, batch.n_rows + n_rows, sequence.n_computed
        batch.n_rows = end
        if n_rows == 1:  # there may be many of these, and a slice takes five times as long
            batch.tokens[start], batch.positions[start] = sequence.tokens[pos], pos
            batch.slots[start], batch.outputs[start] = sequence.slot, wants_output
            return
        batch.tokens[start:end] = sequence.tokens[pos : pos + n_rows]
        batch.positions[start:end] = range(pos, pos + n_rows)
        batch.slots[start:end] = sequence.slot
        batch.outputs[start:end] = 0
        batch.outputs[end - 1] = wants_output

    def _score(self, sequence: Sequence, n_rows: int, scoring: ScoringRows) -> None:
        batch = self.batch
        scored = scoring.add(sequence, n_rows, first=batch.n_outputs)
        start = batch.n_rows - n_rows
        batch.outputs[start + scored.start : start + scored.stop] = 1
        batch.n_outputs += len(scored)

    def add_one_each(self, sequences: Seq[Sequence]) -> None:
        """Add the next row of each prompt, none of which is an output."""
        batch, start = self.batch, self.batch.n_rows
        end = batch.n_rows = start + len(sequences)
        batch.tokens[start:end] = [sequence.tokens[sequence.n_computed] for sequence in sequences]
        batch.positions[start:end] = [sequence.n_computed for sequence in sequences]
        batch.slots[start:end] = [sequence.slot for sequence in sequences]
        batch.outputs[start:end] = 0

    def fill(self, fillers: Seq[tuple[int, int]]) -> None:
        """Add a row for each slot and position, of any token, and no output."""
        batch = self.batch
        start, end = batch.n_rows, batch.n_rows + len(fillers)
        batch.slots[start:end], batch.positions[start:end] = zip(*fillers, strict=True)
        batch.tokens[start:end] = 0
        batch.outputs[start:end] = 0
        batch.n_rows = end

    def sort_by_slot(self) -> None:
        """Order the rows by slot, each slot's as they are."""
        batch, n_rows = self.batch, self.batch.n_rows
        rank = batch.slots[:n_rows].argsort(kind="stable")
        for column in (batch.tokens, batch.positions, batch.slots, batch.outputs):
            column[:n_rows] = column[rank]
