"""The report's plots: the ladder as a waterfall, peers as grouped bars, latency as distributions. Needs matplotlib."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.figures import FIGURES_BY_NAME
from benchmarks.layers import BORDER
from benchmarks.report import Run, number, of_kind, plot_of, rung_slug, rung_title
from benchmarks.standings import BOTH, median_of, n_wrong
from cllm.bench.plot import plot_latency, pyplot, save

BARS: Final = ("tokens/s", "first text p90, ms", "between texts p99, ms", "whole answer p99, ms")
MS_MOST: Final = 10_000.0  # more is told in seconds: longer numbers run into each other
OURS, LOSS, GAIN, OTHERS = "#2a6f97", "#c1554b", "#5a9367", "#a9b4c2"


def draw(runs: Sequence[Run], folder: Path) -> None:
    """Draw everything that the page shows."""
    for run in [*of_kind(runs, "ladder"), *of_kind(runs, "stack")]:
        for rung in run["data"]["rungs"]:
            draw_waterfall(rung, str(folder / plot_of(run, rung_slug(rung))))
    for run in of_kind(runs, "peers"):
        if run["data"]["best"]:
            draw_bars(run["data"]["sides"], str(folder / plot_of(run, "bars")), run["name"])
            plot_latency(_latency_sides(run), str(folder / plot_of(run, "latency")), run["name"])


def draw_waterfall(rung: Run, path: str) -> None:
    """From the floor down, what each stage takes off, in percent of the floor; the line is the least and the most of the turns."""
    figure, axis = pyplot().subplots(figsize=(8, 3.2))
    before, at = 100.0, {}
    for place, stage in enumerate(rung["stages"]):
        ratios = [100 * ratio for ratio in stage["ratios"]]
        now = at[stage["name"]] = statistics.median(ratios)
        # What stands beside the others has lost to none of them unless it says to which: its bar then shows the floor's rest.
        before = at.get(stage.get("beside"), 100.0 if stage["name"] == BORDER else before)
        if place == 0:
            axis.bar(place, now, color=OURS)
        else:
            axis.bar(place, now - before, bottom=before, color=LOSS if now < before else GAIN)
            axis.plot([place - 0.4, place + 0.4], [now, now], color="black", linewidth=1)
        axis.vlines(place, min(ratios), max(ratios), color="black", linewidth=0.8)
        axis.annotate(f"{now:.1f}", (place, max(now, before, *ratios)), ha="center", va="bottom", fontsize=8)
        before = now
    lows = [100 * min(stage["ratios"]) for stage in rung["stages"]]
    axis.set_ylim(max(0.0, min(lows) - 5), 100 * max(max(stage["ratios"]) for stage in rung["stages"]) + 4)
    axis.set_xticks(range(len(rung["stages"])), [f"{stage['number']} {stage['name']}" for stage in rung["stages"]], rotation=20)
    axis.set_ylabel("% of the first stage's tokens/s")
    axis.set_title(rung_title(rung))
    save(figure, path)


def draw_bars(sides: Sequence[Run], path: str, title: str) -> None:
    """A figure in each panel, and in it two bars for each setting, medians of the same pairs: ours, and theirs below. There is no bar for
    what is not known, nor beside answers that were not as asked but for what counts those.
    """
    figure, axes = pyplot().subplots(1, len(BARS), figsize=(11, 1.4 + 0.6 * len(sides)), sharey=True)
    for name, axis in zip(BARS, axes, strict=True):
        known = {whose: _medians(sides, name, whose) for whose in BOTH}
        most = max((value for values in known.values() for value in values.values()), default=0.0)
        scale = 1000.0 if name.endswith(", ms") and most >= MS_MOST else 1.0
        for whose, label, color, shift in (("ours", "cLLM", OURS, -0.2), ("theirs", "the other", OTHERS, 0.2)):
            heights = [value / scale for value in known[whose].values()]
            bars = axis.barh([place + shift for place in known[whose]], heights, height=0.38, color=color, label=label)
            axis.bar_label(bars, fmt=number, fontsize=7, padding=2)
        axis.set_xlabel(name if scale == 1.0 else name.replace(", ms", ", s"))
        axis.margins(x=0.3)
        axis.locator_params(axis="x", nbins=4)
        axis.grid(visible=True, axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(sides)), [f"{side['peer']} {side['setting']}, {side['n_pairs']} pairs" for side in sides])
    axes[0].invert_yaxis()
    axes[-1].legend(loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False)
    figure.suptitle(title)
    save(figure, path)


def _medians(sides: Sequence[Run], figure: str, whose: str) -> dict[int, float]:
    """The medians of a figure that can be compared, by the sides' places."""
    is_told = [FIGURES_BY_NAME[figure].counts_failures or not n_wrong(side, "theirs") for side in sides]
    found = {place: median_of(side, figure, whose) for place, side in enumerate(sides) if is_told[place]}
    return {place: value for place, value in found.items() if value is not None}


def _latency_sides(run: Run) -> dict[str, dict[str, list[float]]]:
    """The settings that are the best at some latency, or all if none is compared by it, and ours beside each, in the same minutes."""
    best = {(row["peer"], row["setting"]) for row in run["data"]["best"] if row["figure"].endswith("ms")}
    found = {}
    for side in run["data"]["sides"]:
        if not best or (side["peer"], side["setting"]) in best:
            found[f"cLLM beside {side['peer']} {side['setting']}"] = side["curves"]["ours"]
            found[f"{side['peer']} {side['setting']}"] = side["curves"]["theirs"]
    return found
