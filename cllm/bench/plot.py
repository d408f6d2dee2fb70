"""Latency as distributions, in SVG; needs matplotlib, the extra `bench`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from cllm.bench.target import BenchFailed

TITLES = {"ttft_s": "to the first text", "itl_s": "between texts", "e2e_s": "whole answer"}

SHORTEST_GAP_MS = 1.0  # that is drawn: texts that came in one piece have none between them

Curves = Mapping[str, Sequence[float]]  # by the keys of TITLES: evenly spaced percentiles, seconds


def pyplot() -> Any:
    """Return matplotlib.pyplot, which draws into files alone. Raises: BenchFailed, when it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise BenchFailed("plots need matplotlib: pip install 'cllm[bench]'") from error
    matplotlib.use("svg")
    # Equal figures give equal files: no date, no random ids, and text stays text.
    matplotlib.rcParams.update({"svg.hashsalt": "cllm", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot

    return matplotlib.pyplot


def check(path: str) -> None:
    """What can be known to be wrong with a plot before there is anything to draw. Raises: BenchFailed."""
    if os.path.splitext(path)[1].lower() not in ("", ".svg"):
        raise BenchFailed(f"--plot: {path}: plots are drawn as SVG, so name it .svg")
    pyplot()


def save(figure: Any, path: str) -> None:
    """Write the SVG. Raises: BenchFailed."""
    try:
        figure.savefig(path, format="svg", metadata={"Date": None}, bbox_inches="tight")
    except OSError as error:
        raise BenchFailed(f"cannot write {path}: {error.strerror}") from error
    pyplot().close(figure)


def plot_latency(sides: Mapping[str, Curves], path: str, title: str = "") -> None:
    """Draw how many requests, or gaps, took at most how long: a line for each side."""
    figure, axes = pyplot().subplots(1, len(TITLES), figsize=(10, 3), sharey=True)
    for (key, name), axis in zip(TITLES.items(), axes, strict=True):
        for side, curves in sides.items():
            values = curves.get(key) or ()
            shares = [100 * i / max(len(values) - 1, 1) for i in range(len(values))]
            axis.plot([1000 * value for value in values], shares, label=side)
        axis.set_xlabel(f"{name}, ms")
        if key == "itl_s":  # most of a token's gaps are alike, and the longest a hundred times as long
            axis.set_xscale("log")
            each = [curves.get(key) or () for curves in sides.values()]
            shortest = [next((1000 * value for value in values[len(values) // 10 :] if value > 0), SHORTEST_GAP_MS) for values in each]
            axis.set_xlim(left=min(SHORTEST_GAP_MS, *shortest))  # of most gaps the body is to be seen
        else:
            axis.set_xlim(left=0)
            axis.locator_params(axis="x", nbins=5)
        axis.grid(visible=True, alpha=0.3)
    axes[0].set_ylabel("at most so long, %")
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)
    figure.suptitle(title)
    save(figure, path)
