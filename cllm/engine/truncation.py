"""The truncations, one by one, over candidates in order of likelihood: the plain path that every sampling method fits.

Source of the definitions: llama.cpp, src/llama-sampler.cpp, with min_keep 1. The order of tokens is total: a higher logit first, among
equal ones the lower id.
"""

from __future__ import annotations

import math

import attrs
import numpy as np
import numpy.typing as npt

from cllm.backend import Logits
from cllm.engine.noise import Floats, Ids

_MIROSTAT_N_FITTED = 100  # llama.cpp's m: how many candidates Zipf's exponent is fitted to


def order_keys(logits: Logits, ids: Ids) -> npt.NDArray[np.uint64]:
    """Return keys whose ascending order is the order of the tokens; `ids` broadcasts over the last axis of `logits`."""
    bits = (logits + np.float32(0)).view(np.uint32)  # adding 0 makes -0 into 0: they are equal logits
    descending = np.where(bits >> np.uint32(31), bits, bits ^ np.uint32(0x7FFFFFFF))
    keys = descending.astype(np.uint64) << np.uint64(32)
    keys |= ids.astype(np.uint64)
    return keys


def ids_of_keys(keys: npt.NDArray[np.uint64]) -> Ids:
    """Return the token ids that `order_keys` put into the keys."""
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


@attrs.frozen(eq=False)
class Candidates:
    """Tokens that may still be drawn, the likeliest first."""

    ids: Ids
    logits: Floats

    @classmethod
    def of(cls, logits: Logits, ids: Ids | None = None) -> Candidates:
        """Return the tokens of a row (those in `ids`, or all) whose logits are above -inf, in order."""
        if ids is None:
            ids = np.arange(len(logits))
        ids = ids[logits[ids] > -np.inf]
        ids = ids_of_keys(np.sort(order_keys(logits[ids], ids)))
        return cls(ids, logits[ids].astype(np.float64))

    def __len__(self) -> int:
        return len(self.ids)

    def first(self, n: int) -> Candidates:
        """Return the `n` likeliest, at least one."""
        n = max(n, 1)
        return Candidates(self.ids[:n], self.logits[:n])

    def kept(self, keep: npt.NDArray[np.bool_] | Ids | slice) -> Candidates:
        """Return those selected by `keep`."""
        return Candidates(self.ids[keep], self.logits[keep])

    def probs(self) -> Floats:
        """Return their probabilities, which sum to 1."""
        p: Floats = np.exp(self.logits - self.logits[0])
        p /= p.sum()
        return p


def typical_p(c: Candidates, p: float) -> Candidates:
    """Keep the tokens whose surprise is nearest to the entropy, until their mass exceeds `p` (Meister et al. 2022, arXiv:2202.00666)."""
    probs = c.probs()
    surprise = -np.log(np.maximum(probs, np.finfo(np.float64).tiny))
    order = np.argsort(np.abs(surprise - probs @ surprise), kind="stable")
    n = np.count_nonzero(np.cumsum(probs[order])[:-1] <= p) + 1
    return c.kept(np.sort(order[:n]))


def top_p(c: Candidates, p: float) -> Candidates:
    """Keep a token if those before it have less than the mass `p` together."""
    mass = np.cumsum(np.exp(c.logits - c.logits[0]))
    return c.first(1 + int(np.count_nonzero(mass[:-1] < p * mass[-1])))


def min_p(c: Candidates, p: float) -> Candidates:
    """Keep what is at least `p` times as likely as the likeliest."""
    return c.first(int(np.count_nonzero(c.logits >= c.logits[0] + math.log(p))))


def xtc(c: Candidates, threshold: float) -> Candidates:
    """Drop all but the last of the tokens that reach `threshold` (exclude top choices)."""
    n_likely = int(np.count_nonzero(c.probs() >= threshold))
    return c.kept(slice(max(n_likely - 1, 0), None))


def dynamic_temperature(c: Candidates, temperature: float, spread: float, exponent: float) -> float:
    """Return the temperature between ``temperature -+ spread`` for the candidates' entropy over its maximum."""
    if len(c) == 1:
        return temperature
    probs = c.probs()
    entropy = max(0.0, -float(probs @ np.log(np.maximum(probs, np.finfo(np.float64).tiny))))
    low, high = max(0.0, temperature - spread), temperature + spread
    return low + (high - low) * math.pow(entropy / math.log(len(c)), exponent)


def mirostat_1(c: Candidates, mu: float, n_vocab: int) -> Candidates:
    """Keep as many as Zipf's law allows for a surprise of `mu` bits (Basu et al. 2020, arXiv:2007.14966)."""
    p = c.probs()[:_MIROSTAT_N_FITTED]
    if len(p) < 2:
        return c
    ranks = np.arange(1, len(p))
    t = np.log((ranks + 1) / ranks)
    s = float(t @ np.log(p[:-1] / np.maximum(p[1:], np.finfo(np.float64).tiny))) / float(t @ t)
    epsilon = s - 1
    surprise = 2.0 ** min(mu, 64.0)
    x = surprise * epsilon / (1 - n_vocab**-epsilon) if abs(epsilon) > 1e-9 else surprise / math.log(n_vocab)
    log_n = math.log(x) / max(s, 1e-9)  # a flat distribution has s = 0: all or one, as the limit says
    return c.first(int(math.exp(min(log_n, math.log(len(c)) + 1e-9))))


def mirostat_2(c: Candidates, mu: float) -> Candidates:
    """Keep what surprises by at most `mu` bits."""
    return c.first(int(np.count_nonzero(-np.log2(np.maximum(c.probs(), np.finfo(np.float64).tiny)) <= mu)))
