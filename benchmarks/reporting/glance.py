"""Who is faster at what, over all comparisons: what the report begins with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

import attrs

from benchmarks.contenders import LLAMA_SERVER_SETTINGS
from benchmarks.figures import FIGURES_BY_NAME
from benchmarks.standings import best_rows, by_pairs, is_led, of_others, title_of

Run: TypeAlias = dict[str, Any]

TOKENS, GOOD = "tokens/s", "good requests/s"  # a run's speed, and an overload's
FIGURES: Final = (
    "first text p50, ms", "first text p90, ms", "first text p99, ms", "first text of the late one, ms",
    "between texts p50, ms", "between texts p90, ms", "between texts p99, ms", "server peak memory, MiB",
)  # fmt: skip
SPEED: Final = "tokens/s, or good requests/s of overloads"
IN_PART: Final = "*"  # after the name of a run in which settings of the other server have fewer pairs than they should, or none
VERDICTS: Final = ("win", "loss", "unclear")


@attrs.frozen
class Standing:
    """How one figure of one run stands. `times_better` is ours over theirs, or theirs over ours where less is better, with its interval."""

    run: str
    figure: str
    verdict: str
    times_better: float
    low: float | None
    high: float | None


def standings(runs: Sequence[Run]) -> list[Standing]:
    """Every figure that is told of here, of every run, beside the setting that is best at it."""
    return [standing for run in runs for standing in _of_run(run)]


def by_figure(runs: Sequence[Run]) -> list[tuple[str, str, str, str]]:
    """A row for each figure: the runs that it was won in, lost in, and those that do not tell, each with how many times better ours is."""
    found = standings(runs)
    names = dict.fromkeys((SPEED, *FIGURES))
    rows = []
    for name in names:
        cells = (", ".join(_told(one) for one in found if (one.figure, one.verdict) == (name, verdict)) for verdict in VERDICTS)
        won, lost, unclear = cells
        rows.append((name.removesuffix(", ms").removesuffix(", MiB"), won, lost, unclear))
    return [row for row in rows if any(row[1:])]


def _told(one: Standing) -> str:
    return f"{one.run} {one.times_better:.2f}"


def _of_run(run: Run) -> Iterator[Standing]:
    rows = {row["figure"]: row for row in best_rows(of_others(run["data"]["sides"]))}
    speed = _speed_of(run)
    name = f"{run['name']}{IN_PART}" if is_in_part(run) else run["name"]
    for figure in (speed, *FIGURES):
        if row := rows.get(figure):
            yield standing_of(row, name, SPEED if figure == speed else figure)


def _speed_of(run: Run) -> str:
    return GOOD if run["settings"].get("rate") else TOKENS  # where tokens cannot be compared, good ones say little of speed


def is_in_part(run: Run) -> bool:
    """Whether settings of llama-server were not tried, would have got more pairs, or lead in the fewer that they have at what is told."""
    sides = of_others(run["data"]["sides"])
    tried = {side["setting"] for side in sides if side["peer"] == "llama-server"}
    if not tried:
        return False
    unfinished = {title_of(side) for side in by_pairs(sides)[1]} & set(run["data"].get("unfinished", ()))
    return not tried >= set(LLAMA_SERVER_SETTINGS) or bool(unfinished) or any(is_led(sides, name) for name in (_speed_of(run), *FIGURES))


def standing_of(row: Run, name: str, figure: str) -> Standing:
    """How the figure of a row stands, under the names by which it is told."""
    ends = (row["ratio"], row["low"], row["high"])
    if not FIGURES_BY_NAME[row["figure"]].is_higher_better:
        middle, low, high = (None if end is None else 1 / max(end, 1e-9) for end in (ends[0], ends[2], ends[1]))
    else:
        middle, low, high = ends
    return Standing(name, figure, row["verdict"], middle or 0.0, low, high)
