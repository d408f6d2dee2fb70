"""README's tables of the results."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from benchmarks.reporting.forms import SERVED, UNKNOWN, Run, number, of_kind, ratios_told, run_title, table, when, with_requests
from benchmarks.reporting.ladder import FLOOR, by_start, mean_of_first, share_told
from benchmarks.reporting.peers import beside_others, best_figures, main_figures, n_settings, ratio_told
from cllm.bench.workloads import WORKLOADS, Workload

BEGIN: Final = "<!-- benchmarks: written by `python -m benchmarks report` -->"
END: Final = "<!-- benchmarks: end -->"
OTHER_ENGINES_FIGURES: Final = ("between texts p99, ms", "server peak memory, MiB")  # beside the first of all


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
    ladder = [row for run in of_kind(runs, "ladder") for row in _readme_ladder(run)]
    if ladder:
        parts.append(
            table(
                (
                    "",
                    "bare llama.cpp, tokens/s",
                    "streamed over HTTP",
                    "ratio, median of the turns (least to most)",
                    "mean (95 %)",
                    "of its steps' time in llama.cpp",
                    "turns",
                    "when",
                ),
                ladder,
            )
        )
    parts.extend(_readme_peers(beside_others(runs)))
    if parts:
        parts.append(f"What each workload sends, as token ids, with new prompts in each pass:\n\n{_workloads()}")
    return "\n".join(parts) or "No run of the ladder on a real model and no comparison with other servers is kept yet.\n"


def _workloads() -> str:
    """What each workload sends."""
    rows = [(one.name, str(one.n_requests), _arriving(one), _prompts(one), _sizes(one.n_generated)) for one in WORKLOADS.values()]
    return table(("workload", "requests, if a row names no other", "at a time", "tokens of a prompt", "tokens of an answer"), rows)


def _arriving(workload: Workload) -> str:
    if workload.is_open:
        return "at random times, at half, one, two and four times what can be served"
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


def _readme_ladder(run: Run) -> list[tuple[str, ...]]:
    rows = []
    for rung in run["data"]["rungs"]:
        by_name = {stage["name"]: stage for stage in rung["stages"]}
        if SERVED in by_name and rung["stages"][0]["name"] == FLOOR:
            floor, served = rung["stages"][0], by_name[SERVED]
            speeds = [number(statistics.median(stage["tokens_per_s"])) for stage in (floor, served)]
            turns, mean = str(len(served["ratios"])), mean_of_first(by_start(rung, served, floor)).replace(" with 95 %", "")
            rows.append((with_requests(run, rung), *speeds, ratios_told(served["ratios"]), mean, share_told(served), turns, when(run)))
    return rows


def _readme_peers(runs: Sequence[Run]) -> list[str]:
    """A line for each comparison, in a table for those of which the same figures count."""
    lines: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for run in runs:
        wanted = main_figures(run)
        if run["settings"].get("ours"):  # of another engine the rest is on the page
            wanted = (wanted[0], *OTHER_ENGINES_FIGURES)
        rows = {row["figure"]: row for row in best_figures(run)}
        if wanted[0] not in rows:  # answers were not exact, so that tokens cannot be compared: good ones can
            wanted = ("good requests/s", *wanted[1:])
        if (first := rows.get(wanted[0])) is not None:
            ratios = (_told(row) if (row := rows.get(name)) else UNKNOWN for name in wanted)
            among = _among(run["data"])
            pairs = f"{first['n_pairs']} ({first['n_starts'] or UNKNOWN})"
            line = (run_title(run), number(first["ours"]), number(first["theirs"]), *ratios, among, pairs, when(run))
            lines.setdefault(wanted, []).append(line)
    return [table(_readme_head(wanted), some) for wanted, some in lines.items()]


def _told(row: Run) -> str:
    """A ratio, and who is better; where the interval does not say so, in how many of the pairs ours was."""
    return f"{ratio_told(row)} " + (
        f"better in {row['n_better']} of {row['n_pairs']}" if row["verdict"] == "unclear" else str(row["verdict"])
    )


def _among(data: Run) -> str:
    """Beside whom: the setting by its name, if it is the only one."""
    if len(data["sides"]) == 1:
        return f"{data['sides'][0]['peer']} {data['sides'][0]['setting']}"
    peers = dict.fromkeys(side["peer"] for side in data["sides"])
    return f"{', '.join(peers)}: the best of {n_settings(data)}"


def _readme_head(wanted: tuple[str, ...]) -> tuple[str, ...]:
    first, *_ = wanted
    ratios = (f"ratio of {name.removesuffix(', ms')} (95 %)" for name in wanted)
    return ("workload", f"cLLM, {first}", f"the other, {first}", *ratios, "beside", "pairs (starts)", "when")
