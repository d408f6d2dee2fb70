"""The model's own log-probabilities: of the unmodified logits, before any penalty or temperature."""

from __future__ import annotations

import attrs
import numpy as np

from cllm.backend import Logits
from cllm.engine.events import TokenLogprob
from cllm.engine.truncation import Candidates


@attrs.define(eq=False)
class RawLogits:
    """What is kept of a row for its logprobs: the row itself, its normaliser and its likeliest tokens."""

    logits: Logits
    log_sum: float
    top: list[tuple[int, float]]

    @classmethod
    def of(cls, logits: Logits, n_top: int) -> RawLogits:
        """Read a row whose logits are finite or -inf."""
        highest = float(logits.max())
        log_sum = highest + float(np.log(np.exp(logits - np.float32(highest)).sum()))
        top = Candidates.of(logits).first(n_top) if n_top else None
        pairs = [] if top is None else list(zip(top.ids.tolist(), (top.logits - log_sum).tolist(), strict=True))
        return cls(logits, log_sum, pairs)

    def of_token(self, token: int) -> TokenLogprob:
        """Return the logprob of the drawn `token`, with the likeliest ones beside it."""
        return TokenLogprob(token, float(self.logits[token]) - self.log_sum, self.top)
