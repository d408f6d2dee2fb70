"""What stands in the place of servers, of the load generator, and of what was measured of a setting."""

from __future__ import annotations

from typing import Any

from benchmarks.generator import Order
from benchmarks.standings import Page
from cllm.bench.target import Dialect


class Orders:
    """In the place of a generator: notes what it is to run, as (port, requests, rate, seed)."""

    def __init__(self) -> None:
        self.orders: list[tuple[int, int, float | None, int]] = []
        self.refused: set[tuple[str, ...]] = set()

    def dialect(self, port: int, n_vocab: int = 0, sampling: str = "greedy") -> Dialect:
        return Dialect(n_vocab=n_vocab, refused=("min_p",) if port == 2 and sampling == "usual" else ())

    def run(self, order: Order) -> dict[str, Any]:
        self.orders.append((order.port, order.workload.n_requests, order.rate, order.seed))
        self.refused.add(order.dialect.refused)
        summary = {"wall_s": 1.0, "tokens_per_s": 1.0, "n_failed": 0, "client_cpu_share": 0.0}
        return {"summary": summary, "curves": {}}


class Up:
    """In the place of a server that is up."""

    n_vocab = 1000

    def __init__(self, port: int) -> None:
        self.port = port

    def cpu_s(self) -> float:
        return 0.0

    def rss_peak_mb(self) -> float:
        return 0.0


def side_page(n_pairs: int, speed: float = 2.0) -> Page:
    """What is kept of a setting beside which ours has `speed` times the tokens/s."""
    counts = {name: {"ours": 0, "theirs": 0} for name in ("n_failed", "n_inexact", "n_cached")}
    shares = dict.fromkeys(("client_cpu_share_max", "idle_cpu_share", "idle_cpu_share_ours"), 0.0)
    figures = {"tokens/s": {"ours": [speed * (10.0 + i) for i in range(n_pairs)], "theirs": [10.0 + i for i in range(n_pairs)]}}
    passes = {"ours": n_pairs * [{}], "theirs": n_pairs * [{}]}
    curves: dict[str, dict[str, list[float]]] = {"ours": {}, "theirs": {}}
    places = {"peer": "llama-server", "setting": "-no-kvu", "n_pairs": n_pairs, "starts": list(range(n_pairs))}
    return {**places, "figures": figures, "passes": passes, "curves": curves, **counts, **shares}
