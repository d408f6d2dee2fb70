"""The report on single calls, kills, bounds of scheduling and other backends' distributions: a table or two for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.reporting.forms import UNKNOWN, Run, circumstances, number, over_turns, table, when

NEAR: Final = 0.05  # of a bound, by which a single run says little


def passes(run: Run) -> str:
    """What each call took, in each memory."""
    found = run["data"]["shapes"]
    memories = list(found[0]["ms"])
    rows = [(shape["name"], str(shape["n_rows"]), *(over_turns(shape["ms"][name]) for name in memories)) for shape in found]
    return "\n".join([circumstances(run), table(("", "rows", *(f"{name}, ms" for name in memories)), rows)])


def kills(runs: Sequence[Run]) -> list[str]:
    rows = []
    unkilled = [_same_unkilled(run["data"]) for run in runs]
    tells = any(told != UNKNOWN for told in unkilled)
    for run, told in zip(runs, unkilled, strict=True):
        data = run["data"]
        n, pause = data["n_streams"], data["pause_s"]
        complete, same = f"{data['n_complete']} of {n}", (f"{data['n_same']} of {n}", *[told] * tells)
        rows.append((run["name"], str(data["n_rounds"]), complete, *same, number(pause["median"]), number(pause["max"])))
    same_head = ("with the same text", *["the same with nothing killed"] * tells)
    head = ("model", "kills", "streams complete", *same_head, "pause, median s", "pause, most s")
    return [table(head, rows), *(f"{run['name']}: {circumstances(run)}" for run in runs)] if runs else []


def _same_unkilled(data: Run) -> str:
    """How many texts stay the same where only the company is another, of which older runs know nothing."""
    return f"{data['n_same_unkilled']} of {data['n_streams_unkilled']}" if "n_same_unkilled" in data else UNKNOWN


def promises(runs: Sequence[Run]) -> list[str]:
    rows = []
    for run in runs:
        for one in run["data"]["promises"]:
            bound = f"{'at least' if one['is_least'] else 'at most'} {number(one['bound'])}"
            rows.append((run["name"], one["workload"], one["figure"], number(one["value"]), bound, _held(one), when(run)))
    head = ("part", "workload", "figure", "measured", "promised", "", "when")
    told = [text for run in runs for text in _bounded(run["data"]["details"])]
    loads = [text for run in runs if run["data"]["details"].get("capacity_per_s") for text in _loads(run)]
    return [table(head, rows), *told, *loads, *(f"{run['name']}: {circumstances(run)}" for run in runs)] if runs else []


def _held(promise: Run) -> str:
    """Whether it was kept, in the one run that there is of each: what is near its bound may be on its other side the next time."""
    near = promise["bound"] and abs(promise["value"] / promise["bound"] - 1) <= NEAR and promise["value"] != promise["bound"]
    return ("kept" if promise["is_kept"] else "missed") + (", narrowly" if near else "")


def _bounded(details: Run) -> list[str]:
    """What bounds the figures of those among whom a long prompt comes, and of a quiet key beside one that floods."""
    if turns := details.get("turns"):
        alone, beside = (
            ("usual gap, s", "p99", "longest", "before the prompt came"),
            ("beside it", "p99", "longest", "its first text after"),
        )
        head = ("turn, cells in", *alone, *beside)
        names = ("usual_s", "usual_p99_s", "usual_max_s", "before_s", "beside_p50_s", "beside_p99_s", "longest_s", "late_ttft_s")
        rows = [(f"{i}, {turn['cells']}", *(number(turn[name]) for name in names)) for i, turn in enumerate(turns, 1)]
        return ["Gaps of those among whom a long prompt comes:\n", table(head, rows)]
    if "ttft_beside_s" in details:
        head = ("seconds", "p50", "p90", "p99", "most")
        parts = {"a step, from outside": "step_s", "first text, alone": "ttft_alone_s", "first text, beside the flood": "ttft_beside_s"}
        rows = [(name, *(number(details[part][one]) for one in ("p50", "p90", "p99", "max"))) for name, part in parts.items()]
        return ["A quiet key beside one that floods:\n", table(head, rows)]
    return []


def _loads(run: Run) -> list[str]:
    """What became of requests at each load."""
    details = run["data"]["details"]
    rows = [
        (
            f"{one['factor']:g}",
            *(number(one[name]) for name in ("rate", "goodput_per_s", "requests_per_s", "tokens_per_s")),
            number(one["ttft_s"]["p90"]),
            number(one["itl_s"]["p99"]),
        )
        for one in details["passes"]
    ]
    goal = f"good: first text within {details['goal']['ttft_s']:g} s, then {details['goal']['itl_s']:g} s a token"
    head = (
        "times the capacity",
        "requests/s that come",
        "good ones/s",
        "answered/s",
        "tokens/s",
        "first text p90, s",
        "between texts p99, s",
    )
    return [f"{run['name']}: what becomes of requests at each load ({goal}).\n", table(head, rows)]


def verified(runs: Sequence[Run]) -> list[str]:
    rows = [
        (run["settings"]["model"]["file"], run["data"]["backend"], row["options"], number(row["mean"]), number(row["max"]), share, n_rows)
        for run in runs
        for row in run["data"]["rows"]
        for share, n_rows in [(f"{row['top1_agreement']:.1%}", str(row["n_rows"]))]
    ]
    head = ("model", "backend", "its options", "KL divergence, mean", "most", "same token", "rows")
    return [table(head, rows), *(f"{run['name']}: {circumstances(run)}" for run in runs)] if runs else []
