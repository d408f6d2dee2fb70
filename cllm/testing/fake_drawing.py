"""A fake model that draws tokens by itself, as one on a device may: plainly, by sorting all tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cllm.backend import Batch, Draw, Drawn, Logits
from cllm.testing.fake import FakeModel


class DrawingFakeModel(FakeModel):
    """A `FakeModel` that is a `DrawsTokens` too. It counts what it has drawn."""

    n_drawn = 0

    def step_and_draw(self, batch: Batch, draws: Sequence[Draw | None], keys: npt.NDArray[np.uint64]) -> Drawn:
        """See `DrawsTokens.step_and_draw`."""
        logits = self.step(batch)
        asked = [(row, draw, int(key)) for row, draw, key in zip(logits, draws, keys, strict=True) if draw is not None]
        valid = np.array([bool(np.isfinite(row.max())) for row, _, _ in asked], np.bool_)
        tokens = [draw_one(row, draw, key) if ok else 0 for (row, draw, key), ok in zip(asked, valid, strict=True)]
        self.n_drawn += len(tokens)
        return Drawn(np.array(tokens, np.int32), valid, logits[[draw is None for draw in draws]])


def draw_one(logits: Logits, draw: Draw, key: int) -> int:
    """Draw a token as `Draw` says, with a generator that the key seeds."""
    ids = np.argsort(-logits, kind="stable")[: draw.top_k or None]
    rest = logits[ids].astype(np.float64) - float(logits.max())
    weights = np.exp(rest / draw.truncation_temperature)
    before = np.cumsum(weights) - weights
    keep = (before < draw.top_p * weights.sum()) & (weights >= draw.min_p) & (weights > 0)
    keep[0] = True
    noise = np.random.default_rng(key).gumbel(size=len(ids))
    return int(ids[keep][np.argmax(rest[keep] / draw.temperature + noise[keep])])
