"""The report on ladders: what each layer costs, and whether what users meet keeps enough of bare llama.cpp."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Final

from benchmarks.figures import N_STARTS_LEAST, Compared, compare
from benchmarks.layers import BORDER, REPLAY
from benchmarks.reporting.forms import (
    SERVED,
    UNKNOWN,
    Run,
    circumstances,
    number,
    over_turns,
    plot_of,
    ratios_told,
    rung_slug,
    rung_title,
    table,
    when,
    with_requests,
)
from benchmarks.reporting.words import MENDED, REASONS

FLOOR: Final = "native"  # the first stage, without which there is no ratio to llama.cpp alone
SERVED_LEAST: Final = 0.95  # of the first stage, with so many at a time:
SERVED_AT: Final = 8
LOSS_TOLD: Final = 0.01  # of the stage below, or of its step outside llama.cpp; what costs more is told with what it is spent on
BESIDE_OTHERS: Final = (BORDER, REPLAY)  # no layers above those before them
LESS_ABOVE: Final = 0.9  # of a stage's time beside the layers that are timed, that one with more layers may have had
COMPUTED: Final = "native"  # the part of a step that is in llama.cpp
PARTS: Final = {"native": "in llama.cpp", "sampling": "in drawing", "engine": "in the scheduler", "rest": "beside these"}


def ladders(runs: Sequence[Run]) -> list[str]:
    """Every stage's ratio to the first in one table, and what was done about what each layer costs in another."""
    rungs = [(f"{with_requests(run, rung)}; {when(run)}", rung) for run in runs for rung in run["data"]["rungs"]]
    stages = sorted((stage for _, rung in rungs for stage in rung["stages"]), key=lambda stage: int(stage["number"]))
    names = dict.fromkeys(stage["name"] for stage in stages)
    ratios = [{stage["name"]: ratios_told(stage.get("ratios")) for stage in rung["stages"]} for _, rung in rungs]
    rows = [(name, *(one.get(name, "") for one in ratios)) for name in names]
    if not rungs:
        return []
    added = dict.fromkeys(names, "") | {stage["name"]: stage["adds"] for _, rung in rungs for stage in rung["stages"] if stage.get("adds")}
    ratios_of_all = table(("", "adds", *(f"ratio to the first: {title}" for title, _ in rungs)), [(n, added[n], *r) for n, *r in rows])
    layers = table(("", "what it spends time on", "what was done about it"), [(n, REASONS[n], MENDED[n]) for n in names if n in REASONS])
    return [ratios_of_all, layers]


def surest(runs: Sequence[Run]) -> list[tuple[str, Run]]:
    """Of each concurrency of a ladder the run that says most, with its title: each machine has its own."""
    found_at: dict[int, list[tuple[int, str, Run]]] = {}
    for run in runs:
        for rung in run["data"]["rungs"]:
            floor, served = rung["stages"][0], served_of(rung)
            n_starts = by_start(rung, served, floor).n_starts or 1 if served else 0
            found_at.setdefault(rung["concurrency"], []).append((n_starts, with_requests(run, rung), rung))
    return [max(each, key=lambda one: one[0])[1:] for _, each in sorted(found_at.items())]


def served_of(rung: Run) -> Run | None:
    """The stage that users meet, if it was measured."""
    return next((stage for stage in rung["stages"] if stage["name"] == SERVED), None)


def served_enough(title: str, rung: Run) -> str:
    """What the stage that users meet keeps of the first, whether that was one, and whether it is as much as was promised, if it was."""
    floor, stage = rung["stages"][0], served_of(rung)
    if stage is None or floor["name"] != FLOOR:
        return ""
    ratios = stage["ratios"]
    median = statistics.median(ratios)
    compared = by_start(rung, stage, floor)
    promised = f", promised is at least {SERVED_LEAST:g}: {_verdict(median, compared)}" if rung.get("concurrency") == SERVED_AT else ""
    share = share_told(stage)
    within = "" if share == UNKNOWN else f" Of its steps' time, {share} is in llama.cpp{_less_waiting(stage, floor)}."
    faster = [one["name"] for one in rung["stages"][1:] if len(one["ratios"]) > 1 and min(one["ratios"]) > 1]
    doubt = f" {' and '.join(faster)} had more than the first in every turn: it was not the floor there." if faster else ""
    starts = f", of {compared.n_starts} {'start' if compared.n_starts == 1 else 'starts'}"
    by_median = f"{median:.3f} by the median ({min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} turns{starts})"
    told = f"{by_median}, to {mean_of_first(compared)} by the mean"
    return f"{title}: {SERVED} comes to {told}{promised}.{within}{doubt}\n"


def mean_of_first(compared: Compared) -> str:
    """The mean ratio, with its interval where there were enough starts for one."""
    is_told = compared.low is not None and _has_starts(compared)
    return f"{compared.ratio:.3f}" + (f" ({compared.low:.3f} to {compared.high:.3f} with 95 %)" if is_told else "")


def _verdict(median: float, compared: Compared) -> str:
    """Whether what is served is enough of the first: unclear where median and mean differ in that."""
    by_median, by_mean = ("kept" if ratio >= SERVED_LEAST else "missed" for ratio in (median, compared.ratio))
    if by_median != by_mean:
        return f"unclear, {by_median} by the median and {by_mean} by the mean"
    is_sure = _has_starts(compared) and compared.low is not None and not compared.low < SERVED_LEAST < (compared.high or 0.0)
    return by_median if is_sure else f"{by_median}, but not for sure"


def by_start(rung: Run, stage: Run, below: Run) -> Compared:
    """The tokens/s of one stage over another's; of earlier runs all turns were of one start."""
    speeds = stage["tokens_per_s"], below["tokens_per_s"]
    compared = compare(*speeds, rung.get("starts") or [0] * len(speeds[0]))
    assert compared is not None, "every stage gave tokens"
    return compared


def _has_starts(compared: Compared) -> bool:
    """Whether there were enough starts to say something of the next."""
    return compared.n_starts is None or compared.n_starts >= N_STARTS_LEAST


def share_told(stage: Run) -> str:
    """What of a step is in llama.cpp's call, which the machine's own swings do not change."""
    spent = stage.get("spent_us_per_step")
    return f"{spent['native'] / sum(spent.values()):.3f}" if spent and "native" in spent else UNKNOWN


def _less_waiting(stage: Run, floor: Run) -> str:
    """The same, if what its threads waited for a core more than the first's had all been the stage's doing."""
    us = [one.get("waiting_us_per_step") for one in (stage, floor)]
    if None in us:
        return ""
    spent = stage["spent_us_per_step"]
    share = (spent[COMPUTED] - max(us[0] - us[1], 0.0)) / sum(spent.values())
    return f", and {share:.3f} without what threads waited there for a core more than in {floor['name']}"


def ladder(run: Run) -> str:
    """One of them: every stage at each concurrency, and what is lost where."""
    parts = [circumstances(run)]
    for rung in run["data"]["rungs"]:
        parts += [f"{rung_title(rung)}:\n", _stages(rung["stages"]), f"![{rung_title(rung)}]({plot_of(run, rung_slug(rung))})\n"]
        if rung.get("not_found"):
            parts.append(f"Left out, since their packages were not installed: {', '.join(rung['not_found'])}.\n")
        if told := [
            line + _less_above(stage, rung["stages"]) for below, stage in _with_below(rung["stages"]) if (line := _loss(rung, stage, below))
        ]:
            parts.append("\n".join(told) + "\n")
        parts += _replayed(rung)
    return "\n".join(parts)


def _with_below(stages: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Each stage but the floor, after the one that it is compared with; without that one, what stands beside the others has none."""
    by_name = {stage["name"]: stage for stage in stages}
    layers = [stage for stage in stages if stage["name"] != REPLAY]  # which tells of another's loss
    pairs = [(below, stage) for below, stage in itertools.pairwise(layers) if stage["name"] != BORDER or "beside" in stage]
    return [(by_name.get(stage.get("beside"), below), stage) for below, stage in pairs]


def _loss(rung: Run, stage: Run, below: Run) -> str:
    """What is told of a stage that costs more than a little. Its own is what is outside llama.cpp, which computes the same rows for all."""
    losses = [1 - own / less for own, less in zip(stage["tokens_per_s"], below["tokens_per_s"], strict=True)]
    more, spent = stage.get("more_us_per_step", {}), below.get("spent_us_per_step", {})
    own_share = sum(spread["median"] for part, spread in more.items() if part != COMPUTED) / sum(spent.values()) if more and spent else None
    if statistics.median(losses) <= LOSS_TOLD and (own_share is None or own_share <= LOSS_TOLD):
        of_first = 1 - statistics.median(stage["ratios"])
        return "" if of_first <= LOSS_TOLD or "beside" in stage else _lost_below(rung, stage, of_first)
    least, most = _percent(min(losses)), _percent(max(losses))
    loss = statistics.median(losses)
    lost = f"- {stage['name']}, {_percent(abs(loss))} {'off' if loss >= 0 else 'more than'} {below['name']} (off: {least} to {most})"
    compared = by_start(rung, stage, below)
    if compared.low is not None and compared.low < 1 < (compared.high or 0.0):
        lost += f", which these turns do not tell from none: {compared.low:.3f} to {compared.high:.3f} of it with 95 %"
    steps = tuple(round(statistics.median(one["n_steps"])) for one in (stage, below) if one.get("n_steps"))
    if len(set(steps)) == 2:
        late = ", since clients come back a step late" if steps[0] > steps[1] else ""
        lost += f", in {steps[0]} steps instead of {steps[1]}{late}"
    took = ", ".join(f"{_spread_told(spread)} us {PARTS[part]}" for part, spread in more.items())
    where = f" A step took more: {took}." if took else ""
    if own_share is not None:
        lost += f"; outside llama.cpp a step took {_percent(abs(own_share))} {'more' if own_share >= 0 else 'less'}"
        if own_share <= LOSS_TOLD:
            return f"{lost}: the rest is in llama.cpp's own calls{_waiting(stage, below)}.{where}"
    if "beside" in stage and own_share is None:  # its model's calls are in another process, where nobody times them
        return f"{lost}; its own part of that is not told apart. What it adds: {REASONS[stage['name']]}. Done: {MENDED[stage['name']]}."
    between = list(REASONS)[below["number"] : stage["number"]]
    if len(between) > 1 and "beside" not in stage:
        return f"{lost}: all that lies between, {', '.join(between)}.{where} What was done about each is told of it by itself."
    return f"{lost}: {REASONS[stage['name']]}.{where} Done about it: {MENDED[stage['name']]}."


def _replayed(rung: Run) -> list[str]:
    """How much of what a served stage loses to the first is its batches, and how much what runs beside them."""
    by_name = {stage["name"]: stage for stage in rung["stages"]}
    if not {FLOOR, SERVED, REPLAY} <= set(by_name):
        return []
    floor, served, replay = (by_name[name] for name in (FLOOR, SERVED, REPLAY))
    more = served["more_us_per_step_than_replay"]
    parts = ", ".join(f"{_spread_told(spread)} us {PARTS[part]}" for part, spread in more.items())
    return [
        f"The calls into llama.cpp that the server of {SERVED} made, made again by a bare loop with nothing beside it ({REPLAY}), had "
        f"{_share_of(FLOOR, by_start(rung, replay, floor))}: that tells what its batches cost. {SERVED} had "
        f"{_share_of(REPLAY, by_start(rung, served, replay))}: that tells what runs between and beside them. A step took more there: "
        f"{parts}.\n"
    ]


def _share_of(other: str, compared: Compared) -> str:
    """The mean ratio, and whether it can be told from 1."""
    is_told = compared.low is not None and _has_starts(compared) and not compared.low < 1 < (compared.high or 0.0)
    return f"{mean_of_first(compared)} of {other}'s tokens/s by the mean" + ("" if is_told else ", which is not told from 1")


def _spread_told(spread: Run) -> str:
    return f"{number(spread['median'])} ({number(spread['min'])} to {number(spread['max'])})"


def _lost_below(rung: Run, stage: Run, of_first: float) -> str:
    """Of a stage that has lost to the first what others before it did."""
    first = rung["stages"][0]["name"]
    return f"- {stage['name']}, {_percent(of_first)} off {first}, not more than {_percent(LOSS_TOLD)} of it off the stage above: see there."


def _less_above(stage: Run, stages: Sequence[Run]) -> str:
    """Whether a stage that has all of this one's layers and more spends less beside those that are timed: then it is not these layers."""
    if "beside" in stage or (own_us := stage.get("spent_us_per_step", {}).get("rest")) is None:
        return ""
    above = [one for one in stages if one["number"] > stage["number"] and one["name"] not in BESIDE_OTHERS]
    known = [(one["spent_us_per_step"]["rest"], one["name"]) for one in above if "rest" in one.get("spent_us_per_step", {})]
    if not known or min(known)[0] >= LESS_ABOVE * own_us:
        return ""
    least_us, name = min(known)
    return (
        f" But {name}, which has all of this and more, took {number(least_us)} us of a step beside llama.cpp, drawing and the scheduler, "
        f"where it took {number(own_us)} here: so much of it is not this layer's."
    )


def _waiting(stage: Run, below: Run) -> str:
    """How long threads had no core, if that was counted in both: it is one thing that makes a call longer."""
    us = [one.get("waiting_us_per_step") for one in (stage, below)]
    if None in us:
        return ""
    return f"; in a step threads were without a core for {number(us[0])} us, and for {number(us[1])} in {below['name']}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _stages(stages: Sequence[Run]) -> str:
    rows = [
        (
            str(stage["number"]),
            f"{stage['name']}, over {stage['beside']}" if stage.get("beside") else stage["name"],
            over_turns(stage["tokens_per_s"]),
            *(_with_spread(stage, f"us_per_{unit}") for unit in ("token", "step")),
            number(stage.get("spent_us_per_step", {}).get("native")),
            share_told(stage),
            *(number(stage.get(f"{what}_us_per_step")) for what in ("waiting", "others", "client")),
            ratios_told(stage.get("ratios")),
        )
        for stage in stages
    ]
    over = ("us a token over the one above", "us a step over it")
    step = ("us of a step in llama.cpp", "share of the step", "us without a core", "us of CPU that serves", "us of CPU of the client")
    return table(("", "stage", "tokens/s", *over, *step, "ratio to the first"), rows)


def _with_spread(stage: Run, name: str) -> str:
    spread = stage.get(f"{name}_spread")
    return number(stage.get(name)) + (f" ({number(spread['min'])} to {number(spread['max'])})" if spread else "")
