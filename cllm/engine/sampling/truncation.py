"""The truncations and temperatures, one by one, on the logits of one row or of its short list.

Each works in place: a token that is cut gets -inf. Among equal logits the one at the earlier place is the likelier. At least one token
stays. Source of the definitions: llama.cpp, src/llama-sampler.cpp, with min_keep 1.
"""

from __future__ import annotations

import math
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Numbers: TypeAlias = npt.NDArray[Any]  # float32 (a row) or float64 (a short list)

_N_SORTED: Final = 4096  # up to here sorting is cheaper than counting into bins
_N_BINS: Final = 4096
_BINS_PER_UNIT: Final = 64.0  # so the bins reach to 64 nats, where no mass is left
_COLUMN_HEIGHT: Final = 64
_N_FITTED: Final = 100  # llama.cpp's m: to how many tokens mirostat fits Zipf's exponent


def weights_of(logits: Numbers, temperature: float) -> tuple[Numbers, Numbers]:
    """Return the logits over the temperature, 0 for the likeliest, and their exponentials."""
    heated = logits - logits.max()
    if temperature != 1:
        heated /= heated.dtype.type(temperature)
    return heated, np.exp(heated)


def cut(logits: Numbers, keep: npt.NDArray[np.bool_]) -> None:
    """Cut all but `keep`: by arithmetic, since assigning under an irregular mask takes ten times as long."""
    penalty = keep.astype(logits.dtype)
    np.reciprocal(penalty, out=penalty)  # 1 or inf
    np.subtract(1, penalty, out=penalty)
    logits += penalty


def top_n_sigma(logits: Numbers, n: float) -> None:
    """Keep what is at most `n` standard deviations below the likeliest (Tang et al. 2024, arXiv:2411.07641)."""
    finite = logits if logits.min() > -np.inf else logits[logits > -np.inf]
    cut(logits, logits >= logits.max() - n * float(finite.std(dtype=np.float64)))


def top_k(logits: Numbers, k: int) -> None:
    """Keep the `k` likeliest."""
    if k >= len(logits):
        return
    limit = kth_largest(logits, k)
    n_above = np.count_nonzero(logits > limit)
    surplus = np.flatnonzero(logits == limit)[k - n_above :]
    cut(logits, logits >= limit)
    logits[surplus] = -np.inf


def kth_largest(logits: Numbers, k: int) -> float:
    """Return the `k`-th largest logit. The k-th largest of column maxima bounds it, so that little is left to partition."""
    n_columns = len(logits) // _COLUMN_HEIGHT
    if n_columns < k:
        return float(np.partition(logits, len(logits) - k)[len(logits) - k])
    maxima = logits[: n_columns * _COLUMN_HEIGHT].reshape(_COLUMN_HEIGHT, n_columns).max(axis=0)
    bound = np.partition(maxima, n_columns - k)[n_columns - k]
    above = logits[logits > bound]
    return float(bound if len(above) < k else np.partition(above, len(above) - k)[len(above) - k])


def typical_p(logits: Numbers, p: float, temperature: float) -> None:
    """Keep the tokens whose surprise is nearest to the entropy, until their mass exceeds `p` (Meister et al. 2022, arXiv:2202.00666)."""
    heated, weights = weights_of(logits, temperature)
    total = float(weights.sum(dtype=np.float64))
    oddity = np.abs(heated - _mean(heated, weights, total))  # surprise and entropy both have log(total) in them
    cut(logits, _first(oddity, weights, math.nextafter(p * total, math.inf)))


def top_p(logits: Numbers, p: float, temperature: float) -> None:
    """Keep a token if those before it have less than the mass `p` together (Holtzman et al. 2020, arXiv:1904.09751)."""
    heated, weights = weights_of(logits, temperature)
    cut(logits, _first(np.negative(heated, out=heated), weights, p * float(weights.sum(dtype=np.float64))))


def _mean(heated: Numbers, weights: Numbers, total: float) -> float:
    return float((weights * np.maximum(heated, -1e4)).sum(dtype=np.float64)) / total  # of a cut token 0 * -1e4, not 0 * -inf


def _first(ranks: Numbers, weights: Numbers, mass: float) -> npt.NDArray[np.bool_]:
    """Tell which tokens have less than `mass` before them in the order of `ranks`, which begin near 0; the first one always."""
    keep = np.zeros(len(ranks), np.bool_)
    places, before = np.arange(len(ranks)), 0.0
    if len(ranks) > _N_SORTED:  # only the bin where the mass is reached needs sorting
        bins = np.minimum(ranks * ranks.dtype.type(_BINS_PER_UNIT), ranks.dtype.type(_N_BINS - 1)).astype(np.int32)
        masses = np.cumsum(np.bincount(bins, weights, _N_BINS))
        last = min(int(np.count_nonzero(masses < mass)), _N_BINS - 1)
        keep = bins < last
        places, before = np.flatnonzero(bins == last), float(masses[last - 1]) if last else 0.0
    places = places[np.argsort(ranks[places], kind="stable")]
    mass_before = before + np.cumsum(weights[places], dtype=np.float64) - weights[places]
    keep[places[mass_before < mass]] = True
    if before == 0:
        keep[places[:1]] = True
    return keep


def min_p(logits: Numbers, p: float, temperature: float) -> None:
    """Keep what is at least `p` times as likely as the likeliest."""
    cut(logits, logits >= logits.max() + temperature * math.log(min(p, 1.0)))


def xtc(logits: Numbers, threshold: float, temperature: float) -> None:
    """Cut all but the last of the tokens that reach the probability `threshold` (exclude top choices)."""
    _, weights = weights_of(logits, temperature)
    likely = np.flatnonzero((weights >= threshold * float(weights.sum(dtype=np.float64))) & (logits > -np.inf))
    if len(likely) > 1:
        last = likely[logits[likely] == logits[likely].min()][-1]
        logits[likely[likely != last]] = -np.inf


def dynamic_temperature(logits: Numbers, temperature: float, spread: float, exponent: float) -> float:
    """Return the temperature between ``temperature -+ spread`` for the entropy over its maximum."""
    n = int(np.count_nonzero(logits > -np.inf))
    if n == 1:
        return temperature
    heated, weights = weights_of(logits, 1.0)
    total = float(weights.sum(dtype=np.float64))
    entropy = max(0.0, math.log(total) - _mean(heated, weights, total))
    low, high = max(0.0, temperature - spread), temperature + spread
    return low + (high - low) * math.pow(entropy / math.log(n), exponent)


def mirostat_1(logits: Numbers, mu: float, temperature: float) -> None:
    """Keep as many as Zipf's law allows for a surprise of `mu` bits (Basu et al. 2020, arXiv:2007.14966)."""
    heated = _largest(logits, _N_FITTED) / temperature
    if len(heated) < 2:
        return
    ranks = np.arange(1, len(heated))
    t = np.log((ranks + 1) / ranks)
    s = float(t @ (heated[:-1] - heated[1:])) / float(t @ t)
    epsilon = s - 1
    surprise = 2.0 ** min(mu, 64.0)
    x = surprise * epsilon / (1 - len(logits) ** -epsilon) if abs(epsilon) > 1e-9 else surprise / math.log(len(logits))
    # A flat distribution has s = 0: all or one, as the limit says. Where `mu` has become so low that x is 0, it is one.
    log_n = math.log(x) / max(s, 1e-9) if x > 0 else -math.inf
    top_k(logits, max(1, int(math.exp(min(log_n, math.log(len(logits)) + 1e-9)))))


def _largest(logits: Numbers, n: int) -> npt.NDArray[np.float64]:
    """Return the `n` largest logits above -inf, or all, falling."""
    n = min(n, len(logits))
    limit = kth_largest(logits, n)
    above = np.sort(logits[logits > limit].astype(np.float64))[::-1]
    tied = n - len(above) if limit > -np.inf else 0
    return np.concatenate([above, np.full(tied, limit)])


def mirostat_2(logits: Numbers, mu: float, temperature: float) -> None:
    """Keep what surprises by at most `mu` bits."""
    heated, weights = weights_of(logits, temperature)
    limit = math.log(float(weights.sum(dtype=np.float64))) - mu * math.log(2)
    cut(logits, heated >= min(limit, 0.0))
