"""Which rows of a step are scored: those of prompts whose tokens' logprobs are wanted, a few at a time."""

from __future__ import annotations

from cllm.engine.batch.plan import Scoring
from cllm.engine.sequence import Sequence

N_ROWS_MAX = 32  # of one step: each is an output, for which a model keeps 600 KB with a vocabulary of 152k, and which costs it a head


class ScoringRows:
    """What one step scores. A prompt's rows end where the room does, since a row that was computed unscored would not come again."""

    def __init__(self) -> None:
        self.scorings: list[Scoring] = []
        self._n_left = N_ROWS_MAX

    def cut(self, sequence: Sequence, n_rows: int) -> int:
        """Return how many of the next `n_rows` rows of `sequence` this step may have."""
        n_unscored = sequence.n_unscored
        if n_unscored <= self._n_left:
            return n_rows
        return min(n_rows, sequence.n_scored - sequence.n_computed + self._n_left)

    def add(self, sequence: Sequence, n_rows: int, first: int) -> range:
        """Take note of the next `n_rows` rows of `sequence`; return which of them are scored, as outputs from the `first` on."""
        start = sequence.n_scored - sequence.n_computed
        n = min(sequence.n_unscored, n_rows - start)
        if n <= 0:
            return range(0)
        self._n_left -= n
        targets = sequence.tokens[sequence.n_scored + 1 : sequence.n_scored + 1 + n]
        self.scorings.append(Scoring(first, targets, sequence.spec.n_prompt_logprobs or 0, sequence))
        return range(start, start + n)
