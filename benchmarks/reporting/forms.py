"""How the report writes what every part of it has: tables, numbers, names of runs, and what a run was measured with."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

Run: TypeAlias = dict[str, Any]
GLANCE_PLOT: Final = "at-a-glance.svg"
SERVED: Final = "sse"  # the stage that a user meets
UNKNOWN: Final = "-"


def of_kind(runs: Sequence[Run], kind: str) -> list[Run]:
    """The runs of one kind."""
    return [run for run in runs if run["kind"] == kind]


def over_turns(values: Sequence[float]) -> str:
    """The median, the least and the most."""
    return f"{number(statistics.median(values))} ({number(min(values))} to {number(max(values))})"


def rung_title(rung: Run) -> str:
    """What a rung was measured at."""
    at = f"{rung['concurrency']} at a time" if "concurrency" in rung else _streams(rung["streams"])
    return f"{at}, {rung['sampling']}" if "sampling" in rung else at


def _streams(n: int) -> str:
    return f"{n} stream" if n == 1 else f"{n} streams"


def with_requests(run: Run, rung: Run) -> str:
    """What a ladder's rung was measured at, and how much of the workload a turn had."""
    n = run["settings"].get("requests")
    return ", ".join([run["name"], *([f"{n} requests a turn"] if n else []), rung_title(rung)])


def rung_slug(rung: Run) -> str:
    """The title as part of a file's name."""
    return "".join(letter if letter.isalnum() else "-" for letter in rung_title(rung))


def plot_of(run: Run, part: str) -> str:
    """The file of a plot."""
    return f"{run['kind']}-{run['name']}-{part}.svg"


def ratios_told(ratios: Sequence[float] | None) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if ratios else ""


def run_title(run: Run) -> str:
    """A run's name, and how many requests a pass of it has."""
    workload = run["settings"].get("workload", {})
    return f"{run['name']}, {n_requests_told(workload)}" if workload.get("n_requests") else run["name"]


def n_requests_told(workload: Run) -> str:
    """What a pass of a workload has."""
    n = workload["n_requests"]
    if workload.get("n_turns", 1) > 1:
        return f"{n} conversations of {workload['n_turns']} turns"
    return f"{n} requests and a long one" if workload.get("n_prompt_late") else f"{n} requests"


def circumstances(run: Run) -> str:
    machine, settings = run["machine"], run["settings"]
    libraries = ", ".join(f"{name} {version}" for name, version in machine["libraries"].items())
    others = f"; {libraries}" if libraries else ""
    each_run_has = ("only", "seed") if len(run["data"].get("runs", ())) > 1 else ()
    told = {name: value for name, value in settings.items() if value not in (None, "", [], {}) and name not in each_run_has}
    facts = ", ".join(f"{name} {_fact(value)}" for name, value in told.items())
    last = f"The last of {len(run['data']['runs'])} runs, which are told below: " if each_run_has else ""
    return (
        f"{last}{run['date']}, revision {machine['revision']}, {_processor(machine)}, {machine['n_cores']} cores, "
        f"{machine['memory_gib']} GiB, {machine['kernel']}, Python {machine['python']}{others}. Settings: {facts}.\n"
    )


def _processor(machine: Run) -> str:
    """What computed; of earlier runs the instructions are not kept."""
    return f"{machine['processor']} ({machine['instructions']})" if machine.get("instructions") else str(machine["processor"])


def _fact(value: Any) -> str:
    if isinstance(value, dict) and "n_requests" in value:
        return f"{value['name']} ({n_requests_told(value)}, {value['concurrency']} at a time)"
    if isinstance(value, dict):
        return str(value.get("file") or value.get("name") or " ".join(f"{name} {one}" for name, one in value.items()))
    if isinstance(value, list):
        return " ".join(_fact(one) for one in value)
    return number(value) if isinstance(value, float) else str(value)


def when(run: Run) -> str:
    """The day, or the first and the last one, and the widest instructions of the processor, of which earlier runs have not kept any."""
    days = sorted({run["date"], *(one["date"] for one in run["data"].get("runs", ()))})
    instructions = run["machine"].get("instructions", "")
    widest = next((name for name, word in (("AMX", "amx"), ("AVX-512", "avx512"), ("AVX2", "avx2")) if word in instructions), "")
    return ", ".join(filter(None, (" to ".join(dict.fromkeys((days[0], days[-1]))), widest)))


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines) + "\n"


def number(value: float | None) -> str:
    """Three digits, or all before the point."""
    if value is None:
        return UNKNOWN
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
