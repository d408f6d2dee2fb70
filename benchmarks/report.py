"""Markdown, plots and README's tables of the results that are kept: `python -m benchmarks report`.

The text needs nothing but the results, so that a test can say when it is out of date; the plots need matplotlib.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from benchmarks import results
from benchmarks.reporting import found, glance
from benchmarks.reporting.forms import GLANCE_PLOT, SERVED, Run, of_kind, table
from benchmarks.reporting.ladder import FLOOR, ladder, ladders, served_enough, surest
from benchmarks.reporting.others import kills, passes, promises, verified
from benchmarks.reporting.peers import beside_others, comparison, comparisons, with_sizes_alone
from benchmarks.reporting.readme import with_table
from benchmarks.reporting.stack import stack
from benchmarks.reporting.words import (
    GLANCE,
    GLANCE_BY_SETTING,
    INTRODUCTION,
    KILLS,
    LADDER,
    MACHINES,
    PASSES,
    PEERS,
    PROMISES,
    STACK,
    VERIFY,
)
from cllm.bench.target import BenchFailed

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "benchmarks" / "report.md"
README: Final = ROOT / "README.md"
TITLES: Final = {  # of the page's sections, in their order, by what kind of runs each shows
    "ladder": "What each layer costs, on a model",
    "passes": "What a pass of the model takes",
    "stack": "What the layers could carry, on a fake model",
    "kills": "When the model's process is killed",
    "promises": "What scheduling must come to",
    "peers": "Beside other servers",
    "verify": "How near another backend comes to llama.cpp",
}
GLANCE_TITLE: Final = "At a glance"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks report", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="the folder of the results")
    parser.add_argument("--page", type=Path, default=PAGE, help="the page; plots go beside it")
    parser.add_argument("--readme", type=Path, default=README, help="whose table is renewed")
    parser.add_argument("--no-plots", action="store_true", help="text alone, without matplotlib")
    asked = parser.parse_args(arguments)
    runs = results.read_all(asked.results)
    if not runs:
        parser.error(f"--results: there is none in {asked.results}")
    if not asked.readme.is_file():
        parser.error(f"--readme: there is no file {asked.readme}")
    try:  # the text comes last, since plots may fail
        told, renewed = page(runs), with_table(asked.readme.read_text("utf-8"), runs)
        asked.page.parent.mkdir(parents=True, exist_ok=True)
        if not asked.no_plots:
            from benchmarks.reporting.plots import draw

            draw(runs, asked.page.parent)
        asked.page.write_text(told, "utf-8")
        asked.readme.write_text(renewed, "utf-8")
    except (ValueError, OSError, BenchFailed) as error:
        parser.error(str(error))
    print(f"{len(runs)} results: {asked.page.name} and the table in {asked.readme.name} are written")


def page(runs: Sequence[Run]) -> str:
    """The report."""
    parts = [INTRODUCTION, *([MACHINES] if all(finding.holds_of(runs) for finding in found.FOUND) else [])]
    parts += _at_a_glance(runs)
    libraries, runs = _libraries_apart(runs)
    parts += [f"Libraries, where a run has them and names no other version: {libraries}.\n"] if libraries else []
    rungs, compared = found.in_order(runs, "ladder"), beside_others(runs)
    parts += _section("ladder", LADDER, runs, ladders(rungs), rungs, ladder)
    parts += _section("passes", PASSES, runs, (), of_kind(runs, "passes"), passes)
    parts += _section("stack", STACK, runs, (), of_kind(runs, "stack"), stack)
    parts += _section("kills", KILLS, runs, kills(of_kind(runs, "kills")))
    parts += _section("promises", PROMISES, runs, promises(of_kind(runs, "promises")))
    parts += _section("peers", PEERS, runs, comparisons(compared), compared, comparison)
    parts += _section("verify", VERIFY, runs, verified(of_kind(runs, "verify")))
    if not runs:
        parts.append("No results are kept yet.\n")
    return "\n".join(parts)


def _at_a_glance(runs: Sequence[Run]) -> list[str]:
    """What the rest comes to: what is kept of bare llama.cpp's speed, and who is faster at what."""
    served = [f"- {line}" for title, rung in surest(found.in_order(runs, "ladder")) if (line := served_enough(title, rung))]
    rows = glance.by_figure(with_sizes_alone(runs))
    which = f"Streamed over HTTP ({SERVED}) beside a bare loop of llama_decode ({FLOOR}), the run with the most starts for each concurrency"
    told = [f"{which}:\n", "".join(served)] if served else []
    if rows:
        told += [f"{GLANCE}\n", table(("", "cLLM is better at", "worse at", "not told apart at"), rows)]
        told.append(f"![what serving costs, and who is faster]({GLANCE_PLOT})\n")
        told += [f"{GLANCE_BY_SETTING}\n", table(glance.BY_SETTING_HEAD, glance.by_setting(with_sizes_alone(runs)))]
    return [f"## {GLANCE_TITLE}\n", *told] if told else []


def _libraries_apart(runs: Sequence[Run]) -> tuple[str, list[Run]]:
    """The libraries that most runs have, to be told once, and the runs with what else they have."""
    counts: dict[str, Counter[str]] = {}
    for run in runs:
        for name, version in run["machine"]["libraries"].items():
            counts.setdefault(name, Counter())[version] += 1
    usual = {name: versions.most_common(1)[0][0] for name, versions in counts.items()}
    others = [{name: one for name, one in run["machine"]["libraries"].items() if one != usual[name]} for run in runs]
    rest = [{**run, "machine": {**run["machine"], "libraries": own}} for run, own in zip(runs, others, strict=True)]
    return ", ".join(f"{name} {version}" for name, version in usual.items()), rest


def _section(
    kind: str, text: str, runs: Sequence[Run], of_all: Iterable[str], shown: Sequence[Run] = (), one: Callable[[Run], str] | None = None
) -> list[str]:
    """How it is measured, what was found of all of these runs, what is told of all, and each under what was found of it."""
    bodies = [*of_all]
    for title, finding, some in found.groups(shown, runs, kind):
        bodies += [f"### {title}\n"] * bool(title) + [finding] * bool(finding)
        level = "####" if title else "###"
        bodies += [f"{level} {run['name']}\n\n{one(run)}" for run in some if one is not None]
    return [f"## {TITLES[kind]}\n", text, *found.of_all(runs, kind), *bodies] if bodies else []
