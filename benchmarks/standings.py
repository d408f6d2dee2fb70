"""The settings of peers as results keep them: which is the best at a figure, and the pairs of several runs as those of one.

A page is one of `sides` in `data` of a result of `benchmarks.peers`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import attrs

from benchmarks.contenders import LLAMA_SERVER_ALIKE
from benchmarks.figures import FIGURES, FIGURES_BY_NAME, Compared, Figure, compare

Page: TypeAlias = dict[str, Any]
Run: TypeAlias = dict[str, Any]

BOTH: Final = ("ours", "theirs")
N_PAIRS_FULL: Final = 10  # of a comparison that is complete: who got more in a later run does not push out those who have these
OURS: Final = "cllm"  # as a peer: with other options, beside itself
ALIKE_SETTINGS: Final = (  # of runs whose pairs may stand together; the others say how many pairs of whom were asked for
    "model", "workload", "rate", "sampling", "n_pairs_start", "warms_up", "n_slots", "n_cells", "n_threads", "goal", "ours",
    "late_apart",
)  # fmt: skip
ALIKE_MACHINE: Final = ("processor", "instructions", "n_cores")
ALIKE_LIBRARIES: Final = ("llama-cpp-python",)  # that compute
ALIKE_LIBRARIES_OPENVINO: Final = ("openvino", "openvino-genai")  # where ours does with these


def key_of(side: Page) -> tuple[str, str]:
    """Whose page it is."""
    return side["peer"], side["setting"]


def title_of(side: Page) -> str:
    """Peer and setting as one text."""
    return f"{side['peer']} ({side['setting']})"


def readings(side: Page, figure: str) -> tuple[dict[str, list[float | None]], list[int]]:
    """What counts of a figure, ours and theirs, and by which start each was measured: every pair, or of a figure that grows the first one
    of each start, since some have one pass and others two. Of older results nobody knows the starts: they may be of one.
    """
    values: dict[str, list[float | None]] = side["figures"].get(figure) or {who: [] for who in BOTH}
    starts = side.get("starts") or [0] * len(values["ours"])
    if not FIGURES_BY_NAME[figure].grows or not values["ours"]:
        return values, starts[: len(values["ours"])]
    first = sorted({start: place for place, start in reversed(list(enumerate(starts)))}.values())
    return {who: [values[who][place] for place in first] for who in BOTH}, [starts[place] for place in first]


def median_of(side: Page, figure: str, who: str) -> float | None:
    """The median of what counts of a figure; None where nothing has it."""
    known = [value for value in readings(side, figure)[0][who] if value is not None]
    return statistics.median(known) if known else None


def compared_by(side: Page, figure: str) -> Compared | None:
    """The figure of ours over theirs; None where no pair has it."""
    values, starts = readings(side, figure)
    return compare(values["ours"], values["theirs"], starts) if values["ours"] else None


def n_wrong(side: Page, whose: str) -> int:
    """Requests that were not answered, or not with as many tokens as were asked, over all pairs."""
    return max(int(side["n_failed"][whose]), int(side["n_inexact"][whose]))


def n_short(side: Page, whose: str) -> int:
    """Requests that were answered, but not with as many tokens as were asked, or to a part of their prompt."""
    return n_wrong(side, whose) - int(side["n_failed"][whose])


def n_spoiling(side: Page, figure: Figure, whose: str) -> int:
    """Requests for which a figure says nothing of whoever has them: who says less is quicker by it, in whatever is counted, and who leaves
    some unanswered is quicker with the others, where those do not count, and done sooner with all. That last is held against ours alone:
    who stands beside it is not left out for being over soon.
    """
    counts_them = figure.counts_failures and not (figure.is_by_time and whose == "ours")
    return n_short(side, whose) if counts_them else n_wrong(side, whose)


def best_side(sides: Iterable[Page], figure: Figure) -> Page | None:
    """The side that makes the most of a figure, beside us, of those of which it says something."""
    judged = [side for side in sides if not n_spoiling(side, figure, "theirs")]
    ratios = [(found.ratio, side) for side in judged if (found := compared_by(side, figure.name)) is not None]
    if not ratios:
        return None
    return (min if figure.is_higher_better else max)(ratios, key=lambda one: one[0])[1]


def of_others(sides: Sequence[Page]) -> list[Page]:
    """Those of other servers; all, where ours stands beside itself alone."""
    return [side for side in sides if side["peer"] != OURS] or list(sides)


def promising(sides: Sequence[Page]) -> set[tuple[str, str]]:
    """Those that are best at something; of settings that are the same, the one with the most pairs, which hold for all of them."""
    best = {configuration_of(side) for figure in FIGURES if (side := best_side(sides, figure)) is not None}
    alike = [[side for side in sides if configuration_of(side) == one] for one in best]
    return {key_of(max(each, key=lambda side: int(side["n_pairs"]))) for each in alike}


def best_rows(sides: Sequence[Page]) -> list[dict[str, Any]]:
    """Every figure of ours beside the setting that is best at it, of those that have all pairs.

    Who is worse than any of them for sure is worse than the best: where that is not told beside the best one itself, which may vary, or
    where one with fewer pairs shows it, the row is beside the best of those that ours is worse than. And nothing is won where one that
    ended with fewer pairs leads the best, unless it is won beside that one, too: who went on was chosen by these pairs, and the luck of the
    first is not that of the next.
    """
    complete, _ = by_pairs(sides)
    return [_row(complete, sides, figure) for figure in FIGURES if best_side(complete, figure) is not None]


def n_full(sides: Sequence[Page]) -> int:
    """How many pairs are all: as many as any of them has, `N_PAIRS_FULL` at most."""
    return min(N_PAIRS_FULL, max((side["n_pairs"] for side in sides), default=0))


def by_pairs(sides: Sequence[Page]) -> tuple[list[Page], list[Page]]:
    """Those that have all pairs, or more, and those that have fewer, but for one that is the same as one that has all."""
    full = n_full(sides)
    complete = [side for side in sides if side["n_pairs"] >= full]
    known = {configuration_of(side) for side in complete}
    return complete, [side for side in sides if side["n_pairs"] < full and configuration_of(side) not in known]


def configuration_of(side: Page) -> tuple[str, str]:
    """Peer and setting, by one of its names."""
    peer, setting = key_of(side)
    return (peer, LLAMA_SERVER_ALIKE[0]) if peer == "llama-server" and setting in LLAMA_SERVER_ALIKE else (peer, setting)


def is_led(sides: Sequence[Page], name: str) -> bool:
    """Whether one of those that have fewer pairs makes more of the figure of that name, beside us, than the best of those that have all."""
    return _leader(sides, FIGURES_BY_NAME[name]) is not None


def _leader(sides: Sequence[Page], figure: Figure) -> Page | None:
    """The one of those that have fewer pairs that makes the most of a figure, if it is more than the best of those that have all."""
    complete, fewer = by_pairs(sides)
    best, other = best_side(complete, figure), best_side(fewer, figure)
    return other if other is not None and best_side([*([best] if best is not None else []), other], figure) is other else None


def _row(complete: Sequence[Page], sides: Sequence[Page], figure: Figure) -> dict[str, Any]:
    best = best_side(complete, figure)
    assert best is not None, "it was compared"
    row = _row_beside(best, figure)
    if row["verdict"] != "loss":
        compared = [side for side in sides if compared_by(side, figure.name) is not None]
        worse = best_side([side for side in compared if _row_beside(side, figure)["verdict"] == "loss"], figure)
        if worse is not None:
            return _row_beside(worse, figure)
    leader = _leader(sides, figure) if row["verdict"] == "win" else None
    return row if leader is None or _row_beside(leader, figure)["verdict"] == "win" else {**row, "verdict": "unclear"}


def _row_beside(side: Page, figure: Figure) -> dict[str, Any]:
    found = compared_by(side, figure.name)
    assert found is not None, "it was compared"
    return {
        "figure": figure.name,
        "is_higher_better": figure.is_higher_better,
        "peer": side["peer"],
        "setting": side["setting"],
        **{who: median_of(side, figure.name, who) for who in BOTH},
        **attrs.asdict(found),
        "n_better": found.n_better(figure),
        "verdict": found.verdict(figure, n_spoiling=n_spoiling(side, figure, "ours")),
    }


# --- pairs of several runs -----------------------------------------------------------------------------------------------


def unlike(kept: Run, run: Run) -> list[str]:
    """What two runs differ in so that their pairs cannot stand together: names of settings, of facts of the machine, of peers.

    A revision of ours that is another does not hinder: what is kept says how many pairs were measured of which.
    """
    names = [name for name in ALIKE_SETTINGS if _plain(kept["settings"].get(name)) != _plain(run["settings"].get(name))]
    machines = kept["machine"], run["machine"]
    names += [name for name in ALIKE_MACHINE if len({machine.get(name) for machine in machines}) > 1]
    is_openvino = "openvino" in json.dumps(run["settings"].get("ours"))
    libraries = (*ALIKE_LIBRARIES, *(ALIKE_LIBRARIES_OPENVINO if is_openvino else ()))
    names += [name for name in libraries if len({machine["libraries"].get(name) for machine in machines}) > 1]
    versions = kept["data"].get("versions", {})
    names += [peer for peer, version in run["data"]["versions"].items() if versions.get(peer, version) != version]
    return names


def _plain(value: Any) -> Any:
    """As it is when it was written and read: with lists for tuples, and numbers of as many digits."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.6g}"))


def run_entry(date: str, revision: str, seed: int, sides: Iterable[Page], before: Iterable[Page] = ()) -> dict[str, Any]:
    """One of `runs`: what a run has added to the pairs that were there."""
    had = {key_of(side): side["n_pairs"] for side in before}
    added = {title_of(side): n for side in sides if (n := side["n_pairs"] - had.get(key_of(side), 0))}
    return {"date": date, "revision": revision, "seed": seed, "n_pairs": added}


def joined(first: Page, then: Page) -> Page:
    """The pairs of one setting from two runs. Curves, which are medians of each run's, become their mean, a pair counting as a pair; of the
    shares of a core it is the larger.
    """
    n_first, n_then = first["n_pairs"], then["n_pairs"]
    next_start = max(first["starts"], default=-1) + 1
    names = [name for name in then["figures"] if name in first["figures"]]
    return {
        **then,
        "n_pairs": n_first + n_then,
        "starts": [*first["starts"], *(next_start + start for start in then["starts"])],
        "figures": {name: {who: [*first["figures"][name][who], *then["figures"][name][who]] for who in BOTH} for name in names},
        "passes": {who: [*first["passes"][who], *then["passes"][who]] for who in BOTH},
        **{count: {who: first[count][who] + then[count][who] for who in BOTH} for count in ("n_failed", "n_inexact", "n_cached")},
        **{share: max(first[share], then[share]) for share in ("client_cpu_share_max", "idle_cpu_share", "idle_cpu_share_ours")},
        "curves": {
            who: {name: _mean_curve(first["curves"][who][name], curve, n_first, n_then) for name, curve in curves.items()}
            for who, curves in then["curves"].items()
        },
    }


def _mean_curve(first: Sequence[float], then: Sequence[float], n_first: int, n_then: int) -> list[float]:
    if not first or not then:
        return list(first or then)
    return [(n_first * a + n_then * b) / (n_first + n_then) for a, b in zip(first, then, strict=True)]
