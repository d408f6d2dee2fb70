"""Who is faster at what, over all comparisons: what the report begins with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import attrs

from benchmarks.contenders import LLAMA_SERVER_ALIKE, LLAMA_SERVER_SETTINGS
from benchmarks.figures import FIGURES_BY_NAME
from benchmarks.standings import Page, best_rows, by_pairs, is_led, of_others, title_of

Run: TypeAlias = dict[str, Any]
Counts: TypeAlias = list[tuple[str, int, dict[str, Counter[str]]]]  # a setting, how many runs it is in, and verdicts by group of figures

TOKENS, GOOD = "tokens/s", "good requests/s"  # a run's speed, and an overload's
FIGURES: Final = (
    "first text p50, ms", "first text p90, ms", "first text p99, ms", "first text of the late one, ms",
    "between texts p50, ms", "between texts p90, ms", "between texts p99, ms", "server peak memory, MiB",
)  # fmt: skip
SPEED: Final = "tokens/s, or good requests/s of overloads"
IN_PART: Final = "*"  # after the name of a run in which settings of the other server have fewer pairs than they should, or none
VERDICTS: Final = ("win", "loss", "unclear")
GROUPS: Final = {  # of figures, where each would be too many
    SPEED: (SPEED,),
    "first texts": tuple(name for name in FIGURES if name.startswith("first text")),
    "between texts": tuple(name for name in FIGURES if name.startswith("between texts")),
    "server peak memory": tuple(name for name in FIGURES if name.startswith("server peak memory")),
}
GROUP_OF: Final = {figure: group for group, figures in GROUPS.items() for figure in figures}
BY_SETTING_HEAD: Final = ("better / worse / not told apart, beside", "runs", *GROUPS)


@attrs.frozen
class Standing:
    """How one figure of one run stands. `times_better` is ours over theirs, or theirs over ours where less is better, with its interval
    over `n_pairs`.
    """

    run: str
    figure: str
    verdict: str
    times_better: float
    low: float | None
    high: float | None
    n_pairs: int


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


def by_setting(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """A row of words for each of `counted_by_setting`."""
    return [
        (title, str(n_runs), *(" / ".join(str(counts[group][verdict]) for verdict in VERDICTS) for group in GROUPS))
        for title, n_runs, counts in counted_by_setting(runs)
    ]


def counted_by_setting(runs: Sequence[Run]) -> Counts:
    """Of each setting of others by itself, of those that have all of a run's pairs: at how many figures ours is better and worse.

    Who has chosen a setting has all that it is, not what is best at each figure of any.
    """
    found: dict[str, list[list[Standing]]] = {}
    for run in runs:
        for side in by_pairs(of_others(run["data"]["sides"]))[0]:
            found.setdefault(title_of(side), []).append(list(_beside([side], run)))
    return [(title, len(each), _counted(one for some in each for one in some)) for title, each in sorted(found.items())]


def _counted(some: Iterable[Standing]) -> dict[str, Counter[str]]:
    counts: dict[str, Counter[str]] = {group: Counter() for group in GROUPS}
    for one in some:
        counts[GROUP_OF[one.figure]][one.verdict] += 1
    return counts


def _told(one: Standing) -> str:
    return f"{one.run} {one.times_better:.2f}"


def _of_run(run: Run) -> Iterator[Standing]:
    return _beside(of_others(run["data"]["sides"]), run)


def _beside(sides: Sequence[Page], run: Run) -> Iterator[Standing]:
    """The figures of a run beside the best of these of its sides."""
    rows = {row["figure"]: row for row in best_rows(sides)}
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
    tried |= set(LLAMA_SERVER_ALIKE) if tried & set(LLAMA_SERVER_ALIKE) else set()
    unfinished = {title_of(side) for side in by_pairs(sides)[1]} & set(run["data"].get("unfinished", ()))
    return not tried >= set(LLAMA_SERVER_SETTINGS) or bool(unfinished) or any(is_led(sides, name) for name in (_speed_of(run), *FIGURES))


def standing_of(row: Run, name: str, figure: str) -> Standing:
    """How the figure of a row stands, under the names by which it is told."""
    ends = (row["ratio"], row["low"], row["high"])
    if not FIGURES_BY_NAME[row["figure"]].is_higher_better:
        middle, low, high = (None if end is None else 1 / max(end, 1e-9) for end in (ends[0], ends[2], ends[1]))
    else:
        middle, low, high = ends
    return Standing(name, figure, row["verdict"], middle or 0.0, low, high, row["n_pairs"])
