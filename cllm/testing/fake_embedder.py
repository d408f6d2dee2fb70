"""An embedder without weights, for tests of what stands above the seam: a row's vector is a function of all tokens up to it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from cllm.backend import Batch, ModelInfo, ModelSpec, Pooling, Vectors, Vocabulary
from cllm.errors import StepFailed
from cllm.testing.fake import N_TOKENS_LEAST, TURN, FakeVocabulary

N_EMBD = 8
N_VECTORS = 509  # prime: the hash of a prefix picks one of so many
HASH_FACTOR, HASH_MASK = 6364136223846793005, (1 << 64) - 1
N_TOKENS_MOST = 512  # of one input
N_CELLS_BESIDE = 512  # beside those of the longest input


class FakeEmbedder:
    """An `Embedder`; a mistake about slots or positions changes the vectors, and what the contract forbids is refused.

    `step_s(batch)` gives the seconds that a step pretends to take; `before_step` may raise, to make a step fail.
    """

    def __init__(
        self,
        *,
        pooling: Pooling = Pooling.MEAN,
        can_split: bool = True,
        n_tokens_max: int = N_TOKENS_MOST,
        n_cells: int = N_TOKENS_MOST + N_CELLS_BESIDE,
        n_slots: int = 16,
        n_rows_max: int = 512,
        step_s: Callable[[Batch], float] | None = None,
        before_step: Callable[[Batch], None] | None = None,
    ) -> None:
        self.vocabulary: Vocabulary = FakeVocabulary()
        self.pooling = pooling
        self.n_embd = 1 if pooling is Pooling.RANK else N_EMBD
        self.info = ModelInfo(
            name="fake embedder", architecture="fake", n_params=0, size_bytes=0, n_ctx_train=n_tokens_max, n_embd=self.n_embd
        )
        self.n_tokens_max = n_tokens_max
        self.n_cells = n_cells
        self.n_slots = n_slots
        self.n_rows_max = n_rows_max
        self.can_split = can_split
        self.n_steps = 0
        self.n_rows_most = 0  # of a step so far
        self.is_closed = False
        self._step_s = step_s
        self._before_step = before_step
        self._slots: list[list[int]] = [[] for _ in range(n_slots)]  # the hash of each prefix
        table = np.random.default_rng(20241120).normal(0.0, 1.0, (N_VECTORS, self.n_embd))
        self._table: Vectors = (1 / (1 + np.exp(-table)) if pooling is Pooling.RANK else table).astype(np.float32)

    def step(self, batch: Batch) -> Vectors:
        """See `Embedder.step`."""
        if self._before_step is not None:
            self._before_step(batch)
        n = batch.n_rows
        self._check(batch)
        self.n_steps += 1
        self.n_rows_most = max(self.n_rows_most, n)
        out = np.empty((n, self.n_embd), np.float32)
        for i, (token, slot) in enumerate(zip(batch.tokens[:n].tolist(), batch.slots[:n].tolist(), strict=True)):
            hashes = self._slots[slot]
            last = hashes[-1] if hashes else 1
            hashes.append(((last ^ (token + 1)) * HASH_FACTOR + 1) & HASH_MASK)
            out[i] = self._table[hashes[-1] % N_VECTORS]
        if self._step_s is not None:
            time.sleep(self._step_s(batch))
        return out

    def drop(self, slot: int) -> None:
        """See `Embedder.drop`."""
        self._slots[slot].clear()

    def pair(self, query: str, document: str) -> list[int]:
        """See `Embedder.pair`."""
        assert self.pooling is Pooling.RANK
        return [*query.encode(), TURN, *document.encode()]

    def close(self) -> None:
        """See `Embedder.close`."""
        self.is_closed = True

    # --- for tests ----------------------------------------------------------------------------------------------------

    @property
    def n_cells_used(self) -> int:
        """Tokens that slots hold."""
        return sum(map(len, self._slots))

    # --- how it works -------------------------------------------------------------------------------------------------

    def _check(self, batch: Batch) -> None:
        n = batch.n_rows
        if not 0 < n <= self.n_rows_max:
            raise StepFailed(f"a step has 1 to {self.n_rows_max} rows, not {n}")
        if batch.tokens[:n].min() < 0 or batch.tokens[:n].max() >= N_TOKENS_LEAST:
            raise StepFailed("a token is not one of the vocabulary's")
        if self.n_cells_used + n > self.n_cells:
            raise StepFailed("more tokens than cells")
        lengths = {slot: len(self._slots[slot]) for slot in set(batch.slots[:n].tolist())}
        if not self.can_split and any(lengths.values()):
            raise StepFailed("an input came in pieces")
        for slot, position in zip(batch.slots[:n].tolist(), batch.positions[:n].tolist(), strict=True):
            if position != lengths[slot] or position >= self.n_tokens_max:
                raise StepFailed(f"slot {slot} goes on at {lengths[slot]}, not at {position}")
            lengths[slot] += 1


def embedder_of(spec: ModelSpec, *, before_step: Callable[[Batch], None] | None = None) -> FakeEmbedder:
    """Give what a spec asks for, as `Embeds` and `LoadsEmbedders` say."""
    n_tokens_max = min(spec.n_cells or N_TOKENS_MOST, N_TOKENS_MOST)
    return FakeEmbedder(
        pooling=spec.pooling or Pooling.MEAN,
        n_tokens_max=n_tokens_max,
        n_cells=n_tokens_max + N_CELLS_BESIDE,
        n_rows_max=min(spec.n_rows_max, n_tokens_max),
        before_step=before_step,
    )
