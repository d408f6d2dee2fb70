"""The report's plots: all at a glance, the ladder as a waterfall, the stack's prices, peers as grouped bars, latency as distributions.

Needs matplotlib.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks.figures import FIGURES_BY_NAME
from benchmarks.reporting.forms import GLANCE_PLOT, SERVED, Run, number, of_kind, plot_of, rung_slug, rung_title
from benchmarks.reporting.found import in_order
from benchmarks.reporting.glance import FIGURES, GROUPS, SPEED, Counts, Standing, counted_by_setting, standings
from benchmarks.reporting.ladder import BESIDE_OTHERS, FLOOR, PARTS, by_start, served_of, surest
from benchmarks.reporting.peers import LATE_FIGURE, best_figures, with_sizes_alone
from benchmarks.standings import BOTH, median_of, n_wrong
from cllm.bench.plot import plot_latency, pyplot, save

BARS: Final = ("tokens/s", "first text p90, ms", "between texts p99, ms", "whole answer p99, ms")
MS_MOST: Final = 10_000.0  # more is told in seconds: longer numbers run into each other
OURS, LOSS, GAIN, OTHERS = "#2a6f97", "#c1554b", "#5a9367", "#a9b4c2"
PARTS_COLORS: Final = {"sampling": "#d9a441", "engine": "#7b6ca8", "rest": OURS}
VERDICT_COLORS: Final = {"win": GAIN, "loss": LOSS, "unclear": OTHERS}
VERDICTS_TOLD: Final = ("cLLM is better", "cLLM is worse", "not told apart")
PANELS: Final = 4  # beside each other
AT_A_GLANCE: Final = (SPEED, *(name for name in FIGURES if name != LATE_FIGURE))
LATENCIES: Final = ("first text", "between texts", "whole answer")  # how the figures begin that are of a time which is drawn
LATE_AMONG: Final = "first text p50, ms"  # where a late prompt's first text stands, in a line of its own
BESIDE: Final[dict[str, Any]] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "frameon": False, "fontsize": 8}
TIMES_MOST: Final = 8.0  # better or worse, that is drawn; the number says how far beyond it lies


def draw(runs: Sequence[Run], folder: Path) -> None:
    """Draw everything that the page shows."""
    for kind, draw_rung in (("ladder", draw_waterfall), ("stack", draw_prices)):
        for run in of_kind(runs, kind):
            for rung in run["data"]["rungs"]:
                draw_rung(rung, str(folder / plot_of(run, rung_slug(rung))), f"{run['name']}: {rung_title(rung)}")
    for run in of_kind(runs, "peers"):
        if run["data"]["best"]:
            draw_bars(run["data"]["sides"], str(folder / plot_of(run, "bars")), run["name"])
            plot_latency(_latency_sides(run), str(folder / plot_of(run, "latency")), run["name"])
    if found := standings(with_sizes_alone(runs)):
        alone = counted_by_setting(with_sizes_alone(runs))
        draw_glance([rung for _, rung in surest(in_order(runs, "ladder"))], found, alone, str(folder / GLANCE_PLOT))


def draw_glance(rungs: Sequence[Run], found: Sequence[Standing], by_setting: Counts, path: str) -> None:
    """What serving costs beside bare llama.cpp, of these rungs, over who is faster at what, over how often beside each setting by itself.

    As wide as a page shows without making its words too small to read.
    """
    served = [rung for rung in rungs if rung["stages"][0]["name"] == FLOOR and served_of(rung) is not None]
    found = [one if one.figure != LATE_FIGURE else attrs.evolve(one, run=f"{one.run}, the long one", figure=LATE_AMONG) for one in found]
    names = list(dict.fromkeys(one.run for one in found))
    shown = [name for name in AT_A_GLANCE if any(one.figure == name for one in found)]
    n_lines = -(-len(shown) // PANELS)
    parts: list[tuple[float, Callable[[Any], None]]] = [
        (0.8 + 0.3 * len(served), lambda part: _draw_served(served, part)),
        (0.7 + n_lines * (0.6 + 0.19 * len(names)), lambda part: _draw_standings(found, names, shown, part)),
        (1 + 0.24 * len(by_setting), lambda part: _draw_by_setting(by_setting, part)),
    ]
    parts = [part for part, some in zip(parts, (served, found, by_setting), strict=True) if some]
    heights = [height for height, _ in parts]
    whole = pyplot().figure(figsize=(10, sum(heights)), layout="constrained")
    for (_, draw_part), part in zip(parts, whole.subfigures(len(parts), 1, height_ratios=heights, squeeze=False)[:, 0], strict=True):
        draw_part(part)
    save(whole, path)


def _draw_served(rungs: Sequence[Run], part: Any) -> None:
    """What is left of bare llama.cpp's tokens/s, with the interval, and what a step takes outside llama.cpp, by its parts."""
    left, right = part.subplots(1, 2)
    left.axvline(1.0, color="black", linewidth=0.8)
    at_ms: dict[int, float] = {}
    for place, rung in enumerate(rungs):
        floor, served = rung["stages"][0], served_of(rung)
        assert served is not None
        compared = by_start(rung, served, floor)
        ends = [compared.ratio if end is None else end for end in (compared.low, compared.high)]
        left.plot(ends, [place, place], color=OURS, linewidth=1.6)
        left.plot([compared.ratio], [place], marker="o", markersize=4, color=OURS)
        left.annotate(f"{compared.ratio:.3f}", (0.99, place), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7)
        for name, color in PARTS_COLORS.items():
            ms = served.get("spent_us_per_step", {}).get(name, 0.0) / 1000
            right.barh(place, ms, left=at_ms.get(place, 0.0), color=color, height=0.6)
            at_ms[place] = at_ms.get(place, 0.0) + ms
        whole_ms = sum(served.get("spent_us_per_step", {}).values()) / 1000
        if whole_ms:
            right.annotate(f" {at_ms[place]:.1f} of {whole_ms:.0f} ms", (at_ms[place], place), va="center", fontsize=7)
    for axis in (left, right):
        axis.set_yticks(range(len(rungs)), [rung_title(rung) for rung in rungs])
        axis.set_ylim(len(rungs) - 0.5, -0.7)
        axis.grid(visible=True, axis="y", alpha=0.3)
    left.margins(x=0.25)
    right.margins(x=0.4)  # for the words beside a bar
    left.set_title(f"{SERVED} over {FLOOR}: what streaming over HTTP leaves\nof bare llama.cpp's tokens/s (95 %)", fontsize=8)
    right.set_title("What a step takes outside llama.cpp,\nms, of all that it takes", fontsize=8)
    handles = [pyplot().Rectangle((0, 0), 1, 1, color=color) for color in PARTS_COLORS.values()]
    right.legend(handles, [PARTS[name] for name in PARTS_COLORS], **BESIDE)


def _draw_standings(found: Sequence[Standing], names: Sequence[str], shown: Sequence[str], part: Any) -> None:
    """How many times better ours is, a panel for each figure and a line for each run, with the interval; right of 1 is better."""
    axes = part.subplots(-(-len(shown) // PANELS), min(PANELS, len(shown)), sharey=True, squeeze=False)
    for name, axis in itertools.zip_longest(shown, axes.flat):
        if name is None:
            axis.set_visible(False)
            continue
        some = [one for one in found if one.figure == name]
        axis.axvline(1.0, color="black", linewidth=0.8)
        for one in some:
            place, color = names.index(one.run), VERDICT_COLORS[one.verdict]
            low, middle, high = (min(max(end, 1 / TIMES_MOST), TIMES_MOST) for end in _ends(one))
            axis.plot([low, high], [place, place], color=color, linewidth=1.6)
            axis.plot([middle], [place], marker="o", markersize=4, color=color)
            axis.annotate(f"{one.times_better:.2f}", (0.99, place), xycoords=("axes fraction", "data"), ha="right", va="center", fontsize=7)
        axis.set_xscale("log", base=2)
        axis.set_xlim(1 / TIMES_MOST, TIMES_MOST * 5)
        axis.set_xticks([1 / 4, 1 / 2, 1, 2, 4, 8], ["¼", "½", "1", "2", "4", "8"])
        axis.set_title(name.removesuffix(" of overloads").replace(", or ", "\nor "), fontsize=8)
        axis.grid(visible=True, axis="y", alpha=0.3)
    axes[0][0].set_yticks(range(len(names)), names)
    axes[0][0].set_ylim(len(names) - 0.4, -0.6)
    handles = [pyplot().Line2D([], [], marker="o", color=color) for color in VERDICT_COLORS.values()]
    part.legend(handles, VERDICTS_TOLD, loc="outside lower center", ncols=3, frameon=False)
    part.suptitle("How many times better cLLM is than the other server's best setting for each figure (95 %)", fontsize=10)


def _draw_by_setting(rows: Counts, part: Any) -> None:
    """At how many figures ours is better, worse or not told apart, beside each setting by itself: a panel for each group of figures."""
    axes = part.subplots(1, len(GROUPS), sharey=True, squeeze=False)[0]
    for group, axis in zip(GROUPS, axes, strict=True):
        for place, (_, _, counts) in enumerate(rows):
            before = 0
            for verdict, color in VERDICT_COLORS.items():
                if count := counts[group][verdict]:
                    axis.barh(place, count, left=before, color=color, height=0.7)
                    axis.annotate(str(count), (before + count / 2, place), ha="center", va="center", fontsize=7)
                    before += count
        axis.set_title(group.removesuffix(" of overloads").replace(", or ", "\nor "), fontsize=8)
        axis.set_xticks([])
    axes[0].set_yticks(range(len(rows)), [f"{title}, {n_runs} {'runs' if n_runs > 1 else 'run'}" for title, n_runs, _ in rows])
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    part.suptitle("Beside each setting by itself, at how many figures", fontsize=10)


def _ends(one: Standing) -> tuple[float, float, float]:
    middle = one.times_better
    return (middle if one.low is None else one.low), middle, (middle if one.high is None else one.high)


def draw_waterfall(rung: Run, path: str, title: str) -> None:
    """What each stage takes off the floor's tokens/s, and, where the parts of a step were timed, what a step costs outside llama.cpp."""
    has_parts = any(stage.get("spent_us_per_step") for stage in rung["stages"])
    figure, axes = pyplot().subplots(1 + has_parts, 1, figsize=(8, 5.6 if has_parts else 3.2), squeeze=False, sharex=True)
    _draw_ratios(rung["stages"], axes[0][0])
    if has_parts:
        _draw_costs(rung["stages"], axes[1][0])
    axes[-1][0].set_xticks(range(len(rung["stages"])), [f"{stage['number']} {stage['name']}" for stage in rung["stages"]], rotation=20)
    axes[0][0].set_title(title)
    save(figure, path)


def draw_prices(rung: Run, path: str, title: str) -> None:
    """What a token takes of the serving process's CPU time up to each stage, and what that adds; lines go over the turns."""
    figure, axes = pyplot().subplots(1, 1, figsize=(8, 3.2), squeeze=False)
    axis, before, most = axes[0][0], 0.0, 0.0
    for place, stage in enumerate(rung["stages"]):
        us = stage["cpu_us_per_token"]
        now, least, greatest = us["median"], us["min"], us["max"]
        axis.bar(place, now - before, bottom=before, color=LOSS if now > before else GAIN)
        axis.plot([place - 0.4, place + 0.4], [now, now], color="black", linewidth=1)
        axis.vlines(place, least, greatest, color="black", linewidth=0.8)
        axis.annotate(f"{now:.3g} ({now - before:+.2g})", (place, max(now, before, greatest)), ha="center", va="bottom", fontsize=8)
        before, most = now, max(most, now, greatest)
    axis.set_ylim(0.0, 1.14 * most)
    axis.set_ylabel("CPU us a token")
    axis.set_xticks(range(len(rung["stages"])), [f"{stage['number']} {stage['name']}" for stage in rung["stages"]], rotation=20)
    axis.set_title(title)
    handles = [pyplot().Rectangle((0, 0), 1, 1, color=color) for color in (LOSS, GAIN)]
    names = ("more than the stage before", "less than it")
    axis.legend([*handles, pyplot().Line2D([], [], color="black", linewidth=0.8)], [*names, "turns, least to most"], **BESIDE)
    save(figure, path)


def _draw_ratios(stages: Sequence[Run], axis: Any) -> None:
    """From the floor down, what each stage takes off, in percent of the floor, by medians; lines go from the least to the most turn."""
    before, at = 100.0, {}
    for place, stage in enumerate(stages):
        ratios = [100 * ratio for ratio in stage["ratios"]]
        now = at[stage["name"]] = statistics.median(ratios)
        # What stands beside the others has lost to none of them unless it says to which: its bar then shows the floor's rest.
        before = at.get(stage.get("beside"), 100.0 if stage["name"] in BESIDE_OTHERS else before)
        if place == 0:
            axis.bar(place, now, color=OURS)
        else:
            axis.bar(place, now - before, bottom=before, color=LOSS if now < before else GAIN)
            axis.plot([place - 0.4, place + 0.4], [now, now], color="black", linewidth=1)
        axis.vlines(place, min(ratios), max(ratios), color="black", linewidth=0.8)
        axis.annotate(f"{now:.1f}", (place, max(now, before, *ratios)), ha="center", va="bottom", fontsize=8)
        before = now
    axis.set_ylim(0.0, 100 * max(max(stage["ratios"]) for stage in stages) + 14)
    axis.set_ylabel(f"tokens/s, % of {stages[0]['name']}")
    names = (f"what is left of {stages[0]['name']}", "less than the stage before", "more than it")
    handles = [pyplot().Rectangle((0, 0), 1, 1, color=color) for color in (OURS, LOSS, GAIN)]
    axis.legend([*handles, pyplot().Line2D([], [], color="black", linewidth=0.8)], [*names, "turns, least to most"], **BESIDE)


def _draw_costs(stages: Sequence[Run], axis: Any) -> None:
    """What a step spends outside llama.cpp in each stage, by its parts: this is what layers cost, whatever the machine's speed was."""
    for place, stage in enumerate(stages):
        at_ms, spent = 0.0, stage.get("spent_us_per_step", {})
        for part, color in PARTS_COLORS.items():
            ms = spent.get(part, 0.0) / 1000
            axis.bar(place, ms, bottom=at_ms, color=color)
            at_ms += ms
        told = f"{at_ms:.2f}\n{100_000 * at_ms / sum(spent.values()):.1f} %" if spent else "not\ntimed"
        axis.annotate(told, (place, at_ms), ha="center", va="bottom", fontsize=8)
    axis.margins(y=0.25)
    axis.set_ylabel("outside llama.cpp, ms\nand share of a step")
    names = [PARTS[part] for part in PARTS_COLORS]
    axis.legend([pyplot().Rectangle((0, 0), 1, 1, color=color) for color in PARTS_COLORS.values()], names, **BESIDE)


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
    is_told = [FIGURES_BY_NAME[figure].counts_failures or not any(n_wrong(side, one) for one in BOTH) for side in sides]
    found = {place: median_of(side, figure, whose) for place, side in enumerate(sides) if is_told[place]}
    return {place: value for place, value in found.items() if value is not None}


def _latency_sides(run: Run) -> dict[str, dict[str, list[float]]]:
    """The settings that are the best at some latency, or all if none is compared by it, and ours beside each, in the same minutes."""
    best = {(row["peer"], row["setting"]) for row in best_figures(run) if row["figure"].startswith(LATENCIES)}
    found = {}
    for side in run["data"]["sides"]:
        if not best or (side["peer"], side["setting"]) in best:
            found[f"cLLM beside {side['peer']} {side['setting']}"] = side["curves"]["ours"]
            found[f"{side['peer']} {side['setting']}"] = side["curves"]["theirs"]
    return found
