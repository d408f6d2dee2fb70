"""Forms the batch of a step: a row for each decoding sequence, and prompts' rows as far as the row budget goes."""

from __future__ import annotations

from cllm.backend import Batch
from cllm.engine.events import Event
from cllm.engine.plan import Move, Plan
from cllm.engine.scoring import ScoringRows
from cllm.engine.sequence import Phase, Sequence


class BatchFormer:
    """Fills the columns of one batch anew for every step."""

    def __init__(self, *, n_rows_max: int, row_budget: int, rows_by_slot: bool) -> None:
        self._batch = Batch(n_rows_max)
        self._n_rows_aim = min(row_budget, n_rows_max)
        self._rows_by_slot = rows_by_slot

    def form(self, running: list[Sequence], moves: list[Move], events: list[Event]) -> Plan:
        """Return the step of `running`, who stand in order of service and hold the cells of their rows, after `moves`."""
        decoding = [sequence for sequence in running if sequence.phase is Phase.DECODE]
        if self._rows_by_slot:
            decoding.sort(key=_slot)
        self._add_decoding(decoding)
        prefilling: list[tuple[Sequence, int]] = []
        scoring = ScoringRows()
        outputs = decoding
        if len(running) > len(decoding):
            outputs = decoding.copy()
            self._add_prefill(running, prefilling, outputs, scoring)
        samplers = [sequence.sampler for sequence in outputs]
        return Plan(moves, self._batch, decoding, prefilling, outputs, samplers, events, scoring.scorings)

    def _add_decoding(self, decoding: list[Sequence]) -> None:
        batch = self._batch
        batch.n_rows = batch.n_outputs = n_rows = len(decoding)
        if n_rows:
            batch.tokens[:n_rows] = [sequence.tokens[-1] for sequence in decoding]
            batch.positions[:n_rows] = [sequence.n_computed for sequence in decoding]
            batch.slots[:n_rows] = [sequence.slot for sequence in decoding]
            batch.outputs[:n_rows] = 1

    def _add_prefill(
        self, running: list[Sequence], prefilling: list[tuple[Sequence, int]], outputs: list[Sequence], scoring: ScoringRows
    ) -> None:
        """Fill the batch up to the row budget with prompts' rows; one row proceeds even when decoding uses the whole budget."""
        n_room = max(self._n_rows_aim - self._batch.n_rows, 1)
        for sequence in running:
            if sequence.phase is not Phase.PREFILL:
                continue
            n_owed = len(sequence.tokens) - sequence.n_computed
            n_rows = scoring.cut(sequence, min(n_owed, n_room))
            if not n_rows:
                continue
            self._add_rows(sequence, n_rows, wants_output=n_rows == n_owed)
            if sequence.n_unscored:
                self._score_rows(sequence, n_rows, scoring)
            prefilling.append((sequence, n_rows))
            if n_rows == n_owed:
                outputs.append(sequence)
                self._batch.n_outputs += 1
            n_room -= n_rows
            if not n_room:
                return

    def _score_rows(self, sequence: Sequence, n_rows: int, scoring: ScoringRows) -> None:
        """Make outputs of those of the last `n_rows` rows that are to be scored."""
        batch = self._batch
        scored = scoring.add(sequence, n_rows, first=batch.n_outputs)
        start = batch.n_rows - n_rows
        batch.outputs[start + scored.start : start + scored.stop] = 1
        batch.n_outputs += len(scored)

    def _add_rows(self, sequence: Sequence, n_rows: int, *, wants_output: bool) -> None:
        batch = self._batch
        start, end, pos = batch.n_rows, batch.n_rows + n_rows, sequence.n_computed
        batch.tokens[start:end] = sequence.tokens[pos : pos + n_rows]
        batch.positions[start:end] = range(pos, pos + n_rows)
        batch.slots[start:end] = sequence.slot
        batch.outputs[start:end] = 0
        batch.outputs[end - 1] = wants_output
        batch.n_rows = end


def _slot(sequence: Sequence) -> int:
    return sequence.slot
