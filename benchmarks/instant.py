"""A model that costs next to nothing, so that what remains is the price of the stack: what a fast GPU would meet."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from cllm.backend import (
    CONTRACT_VERSION,
    Batch,
    Capabilities,
    Draw,
    Drawn,
    KvLayout,
    Logits,
    ModelInfo,
    ModelSpec,
    OnProgress,
    Probe,
    StepModel,
    Vocabulary,
)
from cllm.testing.fake import FakeVocabulary

N_ROWS_PREPARED: Final = 256
N_OUTPUTS_STEP: Final = 64  # that `step_s` is the time of; as many more take it again
N_LIKELY: Final = 100  # tokens that stand above the bulk, as in a trained model's logits
SPREAD: Final = 0.5
N_DRAWN: Final = 16  # tokens that a fake which draws chooses from


class WordVocabulary(FakeVocabulary):
    """As the fake model's, but every token is a short word: each gives a chunk of a stream."""

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """The word."""
        if not 0 <= token < self.n_tokens:
            raise IndexError(token)
        return b" w%d" % token


class InstantModel:
    """A `StepModel` that gives prepared logits without copying them and waits out the rest of its step's time without the GIL.

    That is `step_s` seconds for each 64 outputs that were begun, and once where there are none.

    Sampling writes into the logits: it bars tokens and takes those off the race that fell outside a nucleus. That leaves them valid, and at
    a few tokens a step of millions their shape as well.
    """

    def __init__(self, *, n_tokens: int = 512, step_s: float = 0.0, n_rows: int = N_ROWS_PREPARED) -> None:
        self.vocabulary: Vocabulary = WordVocabulary(n_tokens)
        self.info = ModelInfo(name="instant", architecture="instant", n_params=0, size_bytes=0, n_ctx_train=8192, n_embd=0)
        self.capabilities = Capabilities(can_share=False, can_trim=True, can_save=False, can_abort=False, kv_layout=KvLayout.UNIFIED)
        self.n_cells = self.n_cells_slot = 1 << 20
        self.n_slots = 256
        self.n_rows_max = 2048
        self.n_steps = 0
        self._step_s = step_s
        self.logits = prepared_logits(n_rows, n_tokens)

    def step(self, batch: Batch) -> Logits:
        """See `StepModel.step`."""
        self.n_steps += 1
        if self._step_s:
            _wait_until(time.perf_counter() + self._step_s * max(1, -(-batch.n_outputs // N_OUTPUTS_STEP)))
        return self.logits[: batch.n_outputs]

    def share(self, source: int, target: int, n_tokens: int) -> None:
        """Nothing is kept."""

    def trim(self, slot: int, n_keep: int) -> None:
        """Nothing is kept."""

    def drop(self, slot: int) -> None:
        """Nothing is kept."""

    def save(self, slot: int) -> bytes:
        """Nothing is kept."""
        return b""

    def restore(self, slot: int, state: bytes) -> None:
        """Nothing is kept."""

    def abort(self) -> None:
        """Steps are over too soon for it."""

    def close(self) -> None:
        """Nothing to give back."""


class DrawingModel(InstantModel):
    """The same, drawing tokens as one on a device may, in its own time: the likeliest of what it prepared, or one near it by the key."""

    def __init__(self, *, n_tokens: int = 512, step_s: float = 0.0, n_rows: int = N_ROWS_PREPARED) -> None:
        super().__init__(n_tokens=n_tokens, step_s=step_s, n_rows=n_rows)
        self._likely = np.argpartition(self.logits, -N_DRAWN, axis=1)[:, -N_DRAWN:].astype(np.int32)

    def step_and_draw(self, batch: Batch, draws: Sequence[Draw | None], keys: npt.NDArray[np.uint64]) -> Drawn:
        """See `DrawsTokens.step_and_draw`. What it draws from is a few tokens of each row, whatever the draw says."""
        logits = self.step(batch)
        rows = np.array([i for i, draw in enumerate(draws) if draw is not None])
        left = [i for i, draw in enumerate(draws) if draw is None]
        tokens = self._likely[rows, (keys[rows] % np.uint64(N_DRAWN)).astype(np.int64)]
        return Drawn(tokens, np.ones(len(rows), np.bool_), logits[left])


def prepared_logits(n_rows: int, n_tokens: int) -> Logits:
    """Logits as a trained model's: a bulk, and likely tokens above it whose likelihood falls with their rank. No end of turn."""
    rng = np.random.default_rng(20250101)
    logits = rng.standard_normal((n_rows, n_tokens), np.float32)
    logits *= 2
    n_likely = min(N_LIKELY, n_tokens // 4)
    falling = 20 - rng.uniform(1, 2.5, (n_rows, 1)) * np.log(np.arange(1, n_likely + 1)) + rng.normal(0, SPREAD, (n_rows, n_likely))
    for row, likely in zip(logits, falling, strict=True):
        row[rng.choice(n_tokens, n_likely, replace=False)] = likely
    logits[:, 256:259] = -30.0
    return logits


def _wait_until(end: float) -> None:
    """Sleep, which gives the GIL away, and overshoot by little: the kernel wakes a sleeper some 60 us late."""
    rest = end - time.perf_counter() - 60e-6
    if rest > 0:
        time.sleep(rest)


class InstantBackend:
    """A backend that gives an `InstantModel`, or one that draws."""

    contract_version = CONTRACT_VERSION

    def __init__(self, *, n_tokens: int = 512, step_s: float = 0.0, n_rows: int = N_ROWS_PREPARED, draws: bool = False) -> None:
        self._fields = {"n_tokens": n_tokens, "n_rows": n_rows}
        self._step_s = step_s
        self._class = DrawingModel if draws else InstantModel

    def probe(self) -> Probe:
        """Always available."""
        return Probe(available=True)

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
        """Give the model. See `Backend.load`."""
        on_progress(1.0)
        return self._class(step_s=self._step_s, **self._fields)
