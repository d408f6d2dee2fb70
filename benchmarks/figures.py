"""The figures that servers are compared by, and how far a ratio can be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

Summary: TypeAlias = dict[str, Any]  # `cllm.bench.metrics.Summary.page`

SHARE: Final = 0.95
T_95: Final = (  # Student's t that 95 % lie within, by degrees of freedom from 1
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
    2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
N_STARTS_LEAST: Final = 3  # of the servers, before one is called better: two may agree by luck, and say little of the next
N_RESAMPLES: Final = 10_000
N_RESAMPLED_LEAST: Final = 6  # pairs of which drawing again tells more than the least and the most of them
RATIO_MAX: Final = 1000.0  # for what is much to nothing


@attrs.frozen
class Figure:
    """One number of a pass."""

    name: str
    is_higher_better: bool
    of: Callable[[Summary], float | None]
    counts_failures: bool = False  # a request that is not answered makes it worse
    is_by_time: bool = False  # of the whole pass, which is over sooner where some are refused: ours wins nothing by that
    grows: bool = False  # from pass to pass of a start: its first one counts, which every start has


@attrs.frozen
class Compared:
    """Ours over theirs, the mean over the pairs, and where it lies with 95 % confidence; `RATIO_MAX` at most."""

    ratio: float
    low: float | None  # None with `high`: the pairs are too few to say
    high: float | None
    n_pairs: int
    n_above: int  # pairs in which ours is the higher,
    n_below: int  # and the lower
    n_starts: int | None = None  # of the servers, which the pairs are of; None: each pair counts as one

    def verdict(self, figure: Figure, *, n_spoiling: int = 0) -> str:
        """Who is better; unclear where the interval has 1 in it, or there is none, as of a single pair, or the servers were started
        fewer than `N_STARTS_LEAST` times.

        Nor is anything won where ours has requests, `n_spoiling` of them, for which the figure says nothing of it: it is quicker by them.
        What it loses in spite of that is lost.
        """
        if self.low is None or self.high is None or self.low <= 1 <= self.high:
            return "unclear"
        if self.n_starts is not None and self.n_starts < N_STARTS_LEAST:
            return "unclear"
        if (self.ratio > 1) != figure.is_higher_better:
            return "loss"
        return "unclear" if n_spoiling else "win"

    def n_better(self, figure: Figure) -> int:
        """The pairs in which ours is better."""
        return self.n_above if figure.is_higher_better else self.n_below


def compare(
    ours: Sequence[float | None], theirs: Sequence[float | None], starts: Sequence[int] | None = None, *, seed: int = 0
) -> Compared | None:
    """Compare pair by pair: the geometric mean of the ratios, or, where a figure is 0 in some pass, the ratio of the sums.

    None where no pair has the figure on both sides, or all that there is are noughts. The interval is Student's on the logarithms of the
    ratios, which is honest of few pairs: of three that vary as much it is more than three times as wide as of ten. `starts` says by which
    start of the servers each pair was measured, if that is known; if there were several, what counts is each one's mean, since passes of
    one start have much in common. Where there are noughts each start counts with its sums; if some are noughts still, or there is one
    start, the interval is a bootstrap's over the starts, or the pairs of the one (percentiles; Efron and Tibshirani, An Introduction to the
    Bootstrap, 13.3), which takes more of them.
    """
    numbers = starts if starts and len(set(starts)) > 1 else range(len(ours))
    found = [(a, b, start) for a, b, start in zip(ours, theirs, numbers, strict=True) if a is not None and b is not None]
    pairs = np.array([(a, b) for a, b, _ in found])
    if not pairs.any():
        return None
    counts = len(pairs), int((pairs[:, 0] > pairs[:, 1]).sum()), int((pairs[:, 0] < pairs[:, 1]).sum())
    found_starts = [start for _, _, start in found]
    n_starts = len({start for a, b, start in zip(ours, theirs, starts, strict=True) if a is not None and b is not None}) if starts else None
    if not pairs.all() and numbers is starts:
        pairs, found_starts = _sums(pairs, found_starts)
    if pairs.all():
        return Compared(*_students(pairs, found_starts), *counts, n_starts)
    return Compared(float(_mean_ratio(pairs[None])[0]), *(_resampled(pairs, seed) or (None, None)), *counts, n_starts)


def _sums(pairs: npt.NDArray[np.float64], starts: Sequence[int]) -> tuple[npt.NDArray[np.float64], list[int]]:
    """The pairs of each start as one, and the starts."""
    each = sorted(set(starts))
    return np.array([pairs[np.array(starts) == start].sum(axis=0) for start in each]), each


def _students(pairs: npt.NDArray[np.float64], starts: Sequence[int]) -> tuple[float, float | None, float | None]:
    """The mean ratio, each start counting once, and where it lies; None of a single one."""
    by_start: dict[int, list[float]] = {}
    for start, (ours, theirs) in zip(starts, pairs, strict=True):
        by_start.setdefault(start, []).append(math.log(ours / theirs))
    n = len(by_start)
    logs = np.array([np.mean(values) for values in by_start.values()])
    middle = min(float(logs.mean()), math.log(RATIO_MAX))
    if n < 2:
        return math.exp(middle), None, None
    half = T_95[min(n - 1, len(T_95)) - 1] * float(logs.std(ddof=1)) / math.sqrt(n)
    low, high = (math.exp(min(end, math.log(RATIO_MAX))) for end in (middle - half, middle + half))
    return math.exp(middle), low, high


def _resampled(pairs: npt.NDArray[np.float64], seed: int) -> tuple[float, float] | None:
    if len(pairs) < N_RESAMPLED_LEAST:
        return None
    drawn = pairs[np.random.default_rng(seed).integers(0, len(pairs), (N_RESAMPLES, len(pairs)))]
    ratios = _mean_ratio(drawn)
    ratios[np.isnan(ratios)] = 1.0  # who has nothing is like who has nothing: left out, two pairs of six would be a sure win
    low, high = np.quantile(ratios, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return float(low), float(high)


def _mean_ratio(pairs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The mean ratio of each sample of (ours, theirs), of shape (n_samples, n_pairs, 2); NaN of a sample that has noughts only."""
    if pairs.all():
        means: npt.NDArray[np.float64] = np.exp(np.log(pairs[..., 0] / pairs[..., 1]).mean(axis=1))
        return means
    ours, theirs = pairs.sum(axis=1).T
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.minimum(ours / theirs, RATIO_MAX)


def _plain(key: str) -> Callable[[Summary], float | None]:
    return lambda summary: summary[key]


def _spread(key: str, part: str) -> Callable[[Summary], float | None]:
    return lambda summary: None if summary[key][part] is None else 1000 * summary[key][part]


def _cpu_per_token(summary: Summary) -> float | None:
    """None also where less CPU time is known after a pass than before: what had spent it has died, and nobody tells of it any more."""
    cpu_s, n = summary["server_cpu_s"], summary["n_generated"]
    return 1000 * cpu_s / n if cpu_s is not None and cpu_s > 0 and n else None


def _ms(key: str) -> Callable[[Summary], float | None]:
    return lambda summary: None if summary[key] is None else 1000 * summary[key]


FIGURES: Final = (
    Figure("tokens/s", True, _plain("tokens_per_s")),
    Figure("requests/s", True, _plain("requests_per_s")),
    Figure("good requests/s", True, _plain("goodput_per_s"), counts_failures=True, is_by_time=True),
    Figure("good requests, share", True, _plain("goodput_share"), counts_failures=True),
    *(
        Figure(f"{name} {part}, ms", False, _spread(key, part))
        for name, key in (("first text", "ttft_s"), ("between texts", "itl_s"), ("whole answer", "e2e_s"))
        for part in ("p50", "p90", "p99", "max")
    ),
    Figure("longest wait of the others, ms", False, _ms("late_gap_max_s")),
    Figure("first text of the late one, ms", False, _ms("late_ttft_s")),
    Figure("whole answer of the late one, ms", False, _ms("late_e2e_s")),
    Figure("server CPU per token, ms", False, _cpu_per_token),
    Figure("server peak memory, MiB", False, _plain("server_rss_peak_mb"), grows=True),
)
FIGURES_BY_NAME: Final = {figure.name: figure for figure in FIGURES}
