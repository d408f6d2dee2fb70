"""README's tables of the results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from benchmarks.figures import FIGURES_BY_NAME
from benchmarks.reporting.forms import SERVED, UNKNOWN, Run, number, run_title, table, when, with_requests
from benchmarks.reporting.found import in_order
from benchmarks.reporting.glance import BY_SETTING_HEAD, FIGURES, GOOD, SPEED, Standing, by_setting, standing_of, standings
from benchmarks.reporting.ladder import FLOOR, by_start, mean_of_first, share_told
from benchmarks.reporting.peers import LATE_FIGURE, beside_others, best_figures, main_figures, with_sizes_alone
from benchmarks.standings import by_pairs, key_of, of_others
from cllm.bench.workloads import WORKLOADS, Workload

BEGIN: Final = "<!-- benchmarks: written by `python -m benchmarks report` -->"
END: Final = "<!-- benchmarks: end -->"
LADDER_HEAD: Final = (
    "", "bare llama.cpp, tokens/s", "streamed, tokens/s", "ratio, median", "mean (95 %)", "of a step in llama.cpp", "turns", "when",
)  # fmt: skip
COLUMNS: Final = tuple(name for name in FIGURES if name != LATE_FIGURE)
PEERS_HEAD: Final = (
    "workload", "cLLM / the other", SPEED, *(name.partition(",")[0] for name in COLUMNS), "beside", "pairs (starts)", "when",
)  # fmt: skip
MARKS: Final = {"win": "**", "loss": "*"}
WARMTH: Final = {True: "warm", False: "cold"}  # by whether a whole pass that does not count went first


def with_table(text: str, runs: Sequence[Run]) -> str:
    """README with what stands between the markers made new. Raises: ValueError, when they are not there."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("README has no markers for the table of benchmarks")
    return f"{before}{BEGIN}\n\n{readme_table(runs)}\n{END}{after}"


def readme_table(runs: Sequence[Run]) -> str:
    """The figures that README quotes."""
    parts = []
    ladder = [row for run in in_order(runs, "ladder") for row in _ladder_rows(run)]
    if ladder:
        parts.append(f"Streamed over HTTP beside a bare loop of `llama_decode`:\n\n{table(LADDER_HEAD, ladder)}")
    peers = [row for run in beside_others(runs) if (row := _peers_row(run)) is not None]
    if peers:
        parts.append(f"Beside other servers, how many times better cLLM is:\n\n{table(PEERS_HEAD, peers)}")
        alone = table(BY_SETTING_HEAD, by_setting(with_sizes_alone(runs)))
        parts.append(f"Beside each of their settings by itself, at how many of these figures cLLM is better, or worse:\n\n{alone}")
    if parts:
        parts.append(f"What each workload sends, as token ids, with new prompts in each pass:\n\n{_workloads()}")
    return "\n".join(parts) or "No run of the ladder on a real model and no comparison with other servers is kept yet.\n"


def _workloads() -> str:
    """What each workload sends."""
    rows = [(one.name, str(one.n_requests), _arriving(one), _prompts(one), _sizes(one.n_generated)) for one in WORKLOADS.values()]
    return table(("workload", "requests, if a row names no other", "at a time", "tokens of a prompt", "tokens of an answer"), rows)


def _arriving(workload: Workload) -> str:
    if workload.is_open:
        return "at random times, at half, one, two and four times what as many came to eight at a time, cold"
    late = ", and one more when all of them are being answered" if workload.n_prompt_late else ""
    return f"{workload.concurrency}{late}"


def _prompts(workload: Workload) -> str:
    own = _sizes(workload.n_prompt)
    if workload.n_prefix:
        return f"the same {workload.n_prefix}, then {own}"
    if workload.n_turns > 1:
        return f"{own} more than the last turn and its answer, in {workload.n_turns} turns"
    late = f"; of the late one {workload.n_prompt_late}, whose answer has {workload.n_generated_late}" if workload.n_prompt_late else ""
    return f"{own}{late}"


def _sizes(bounds: tuple[int, int]) -> str:
    least, most = bounds
    return str(most) if least == most else f"{least} to {most}"


def _ladder_rows(run: Run) -> list[tuple[str, ...]]:
    rows = []
    for rung in run["data"]["rungs"]:
        by_name = {stage["name"]: stage for stage in rung["stages"]}
        if SERVED in by_name and rung["stages"][0]["name"] == FLOOR:
            floor, served = rung["stages"][0], by_name[SERVED]
            speeds = [number(statistics.median(stage["tokens_per_s"])) for stage in (floor, served)]
            mean = mean_of_first(by_start(rung, served, floor)).replace(" with 95 %", "")
            ratio = f"{statistics.median(served['ratios']):.3f}"
            rows.append((with_requests(run, rung), *speeds, ratio, mean, share_told(served), str(len(served["ratios"])), when(run)))
    return rows


def _peers_row(run: Run) -> tuple[str, ...] | None:
    """A comparison by its main figures; None where answers are not such that they could be compared."""
    found = {one.figure: one for one in standings([run])}
    rows = {row["figure"]: row for row in best_figures(run)}
    name = main_figures(run)[0]
    if name not in rows:  # answers were not exact, so that tokens cannot be compared: good ones can
        name = GOOD
    if name not in rows:
        return None
    row, speed = rows[name], found.get(SPEED) or standing_of(rows[name], run["name"], SPEED)
    title = run_title(run) + (f" (its first text: {_cell(found[LATE_FIGURE], 0)})" if LATE_FIGURE in found else "")
    most = max(one.n_pairs for one in (speed, *found.values()))
    cells = (_cell(one, most) for one in (speed, *map(found.get, COLUMNS)))
    side = next(side for side in run["data"]["sides"] if key_of(side) == (row["peer"], row["setting"]))
    pairs = f"{row['n_pairs']} ({row['n_starts'] if side.get('starts') else UNKNOWN})"
    return title, f"{number(row['ours'])} / {number(row['theirs'])}", *cells, _beside(run), pairs, _when_and_how_warm(run)


def _cell(one: Standing | None, n_pairs: int) -> str:
    """How many times better ours is: bold where it is told to be, slanted where it is told to be worse; and by how many pairs, if fewer."""
    if one is None:
        return UNKNOWN
    grows = one.figure in FIGURES_BY_NAME and FIGURES_BY_NAME[one.figure].grows  # of which each start has one
    fewer = f" ({one.n_pairs} pairs)" if one.n_pairs < n_pairs and not grows else ""
    return f"{MARKS.get(one.verdict, '')}{one.times_better:.2f}{MARKS.get(one.verdict, '')}{fewer}"


def _when_and_how_warm(run: Run) -> str:
    """The day and the instructions, and whether the first pass of a start counts, which the oldest runs do not say."""
    return ", ".join(filter(None, (when(run), WARMTH.get(run["settings"].get("warms_up")))))


def _beside(run: Run) -> str:
    """Whom: the setting by its name, if it is the only one."""
    sides = of_others(run["data"]["sides"])
    if len(sides) == 1:
        return f"{sides[0]['peer']} {sides[0]['setting']}"
    peers = ", ".join(dict.fromkeys(side["peer"] for side in sides))
    n_fewer = len(by_pairs(sides)[1])
    return f"{peers}, {len(sides)} settings" + (f", {n_fewer} of them in fewer pairs" if n_fewer else "")
