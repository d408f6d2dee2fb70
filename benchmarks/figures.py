"""The figures that servers are compared by, and how far a ratio can be trusted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import attrs
import numpy as np

Summary: TypeAlias = dict[str, Any]  # `cllm.bench.metrics.Summary.page`

N_RESAMPLES: Final = 10_000
SHARE: Final = 0.95


@attrs.frozen
class Figure:
    """One number of a pass."""

    name: str
    is_higher_better: bool
    of: Callable[[Summary], float | None]


@attrs.frozen
class Compared:
    """Ours over theirs: the geometric mean over the pairs, and where it lies with 95 % confidence."""

    ratio: float
    low: float
    high: float
    n_pairs: int

    def verdict(self, figure: Figure) -> str:
        """Who is better; nobody, where the interval has 1 in it; of a single pair, which has no interval, nothing is said."""
        if self.n_pairs < 2:
            return "unsure"
        if self.low <= 1 <= self.high:
            return "even"
        return "win" if (self.ratio > 1) == figure.is_higher_better else "loss"


def compare(ours: Sequence[float | None], theirs: Sequence[float | None], *, seed: int = 0) -> Compared | None:
    """Compare pair by pair; None where no pair has the figure on both sides.

    The interval is a bootstrap's over the pairs (percentiles; Efron and Tibshirani, An Introduction to the Bootstrap, 13.3).
    """
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a and b]
    if not pairs:
        return None
    logs = np.log([a / b for a, b in pairs])
    rng = np.random.default_rng(seed)
    means = logs[rng.integers(0, len(logs), (N_RESAMPLES, len(logs)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return Compared(float(np.exp(logs.mean())), float(np.exp(low)), float(np.exp(high)), len(pairs))


def _plain(key: str) -> Callable[[Summary], float | None]:
    return lambda summary: summary[key]


def _spread(key: str, part: str) -> Callable[[Summary], float | None]:
    return lambda summary: None if summary[key][part] is None else 1000 * summary[key][part]


def _cpu_per_token(summary: Summary) -> float | None:
    cpu_s, n = summary["server_cpu_s"], summary["n_generated"]
    return 1000 * cpu_s / n if cpu_s and n else None


def _ms(key: str) -> Callable[[Summary], float | None]:
    return lambda summary: None if summary[key] is None else 1000 * summary[key]


FIGURES: Final = (
    Figure("tokens/s", True, _plain("tokens_per_s")),
    Figure("requests/s", True, _plain("requests_per_s")),
    Figure("good requests/s", True, _plain("goodput_per_s")),
    *(
        Figure(f"{name} {part}, ms", False, _spread(key, part))
        for name, key in (("first text", "ttft_s"), ("between texts", "itl_s"), ("whole answer", "e2e_s"))
        for part in ("p50", "p90", "p99", "max")
    ),
    Figure("longest wait of the others, ms", False, _ms("late_gap_max_s")),
    Figure("first text of the late one, ms", False, _ms("late_ttft_s")),
    Figure("server CPU per token, ms", False, _cpu_per_token),
    Figure("server peak memory, MiB", False, _plain("server_rss_peak_mb")),
)
