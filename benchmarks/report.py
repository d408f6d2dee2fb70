"""Markdown, plots and README's tables of the results that are kept: `python -m benchmarks report`.

The text needs nothing but the results, so that a test can say when it is out of date; the plots need matplotlib.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs

from benchmarks import glance, results
from benchmarks.contenders import LLAMA_SERVER_SETTINGS
from benchmarks.figures import FIGURES_BY_NAME, N_STARTS_LEAST, Compared, compare
from benchmarks.layers import BORDER
from benchmarks.standings import Page, best_rows, compared_by, key_of, median_of, n_wrong, title_of
from benchmarks.words import (
    FOUND,
    GLANCE,
    INTRODUCTION,
    KILLS,
    LADDER,
    MACHINES,
    MENDED,
    PASSES,
    PEERS,
    PROMISES,
    REASONS,
    STACK,
    VERIFY,
    WRITTEN_OF,
)
from cllm.bench.metrics import CLIENT_SHARE_MAX
from cllm.bench.target import BenchFailed
from cllm.bench.workloads import WORKLOADS, Workload

Run: TypeAlias = dict[str, Any]

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "benchmarks" / "report.md"
README: Final = ROOT / "README.md"
BEGIN: Final = "<!-- benchmarks: written by `python -m benchmarks report` -->"
END: Final = "<!-- benchmarks: end -->"

TITLES: Final = {  # of the page's sections, in their order, by what kind of runs each shows
    "ladder": "What each layer costs, on a model",
    "passes": "What a pass of the model takes",
    "stack": "What the layers could carry, on a fake model",
    "kills": "When the model's process is killed",
    "promises": "What scheduling must come to",
    "peers": "Beside other servers",
    "verify": "How near another backend comes to llama.cpp",
}
MAIN_TIMES: Final = (
    "first text p50, ms", "first text p90, ms", "first text p99, ms",
    "between texts p50, ms", "between texts p90, ms", "between texts p99, ms",
)  # fmt: skip
MAIN_FIGURES: Final[tuple[str, ...]] = ("tokens/s", *MAIN_TIMES)
MAIN_OVERLOAD_FIGURES: Final[tuple[str, ...]] = ("good requests/s", *MAIN_TIMES)
LATE_FIGURE: Final = "first text of the late one, ms"  # of the prompt that everything else is measured beside
SIDE_FIGURES: Final = (
    "tokens/s", "good requests/s", "first text p50, ms", "first text p99, ms", "between texts p50, ms", "between texts p99, ms",
    "whole answer p99, ms", "longest wait of the others, ms", LATE_FIGURE, "server CPU per token, ms", "server peak memory, MiB",
)  # fmt: skip
THEIR_DEFAULT: Final = "as it comes"
OTHER_ENGINES_FIGURES: Final = ("tokens/s", "between texts p99, ms", "server peak memory, MiB")
PROMISED: Final = {  # beside the setting that is best at a figure, by workload,
    "seed-40x8": {"tokens/s": 1.05},
    "mixed": {"tokens/s": 1.05, "between texts p99, ms": 0.75},
    "mixed-small": {"tokens/s": 1.05, "between texts p99, ms": 0.75},
    "shared-prefix": {"tokens/s": 2.0, "first text p90, ms": 0.25},
}
PROMISED_DEFAULT: Final = {"mixed": {"between texts p99, ms": 0.25}, "mixed-small": {"between texts p99, ms": 0.25}}  # and beside this one
GLANCE_TITLE: Final = "At a glance"
GLANCE_PLOT: Final = "beside-others.svg"
BESIDE_HEAD: Final = (
    "workload", "figure", "cLLM", "the other", "cLLM over it (95 %)", "", "which, the best of how many settings",
    "pairs in which cLLM is better",
)  # fmt: skip
N_FUNCTIONS: Final = 10  # of a profile
FLOOR: Final = "native"  # the first stage, without which there is no ratio to llama.cpp alone
SERVED: Final = "sse"  # the stage that a user meets
SERVED_LEAST: Final = 0.95  # of the first stage, with so many at a time:
SERVED_AT: Final = 8
CARRIED: Final = "instant"  # the fake model on which the stack must carry, to users,
CARRIED_LEAST: Final = 20_000.0  # tokens/s, with so many streams:
CARRIED_AT: Final = 64
STEPS_LEAST: Final = 475  # of the fakes of a fast device, with as many streams

IDLE_SHARE_MAX: Final = 0.02  # of a core, that a server may take while another is measured
UNKNOWN: Final = "-"
LOSS_TOLD: Final = 0.01  # of the stage below, or of its step outside llama.cpp; what costs more is told with what it is spent on
LESS_ABOVE: Final = 0.9  # of a stage's time beside the layers that are timed, that one with more layers may have had
COMPUTED: Final = "native"  # the part of a step that is in llama.cpp
PARTS: Final = {"native": "in llama.cpp", "sampling": "in drawing", "engine": "in the scheduler", "rest": "beside these"}


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
            from benchmarks.plots import draw

            draw(runs, asked.page.parent)
        asked.page.write_text(told, "utf-8")
        asked.readme.write_text(renewed, "utf-8")
    except (ValueError, OSError, BenchFailed) as error:
        parser.error(str(error))
    print(f"{len(runs)} results: {asked.page.name} and the table in {asked.readme.name} are written")


# --- the page ----------------------------------------------------------------------------------------------------------


def page(runs: Sequence[Run]) -> str:
    """The report."""
    parts = [INTRODUCTION, *([MACHINES] if all(is_written_of(of_kind(runs, kind), kind) for kind in FOUND) else [])]
    parts += _at_a_glance(runs)
    libraries, runs = _libraries_apart(runs)
    parts += [f"Libraries, where a run has them and names no other version: {libraries}.\n"] if libraries else []
    parts += _section("ladder", LADDER, _all_ladders(of_kind(runs, "ladder")), runs)
    parts += _section("passes", PASSES, map(_passes, of_kind(runs, "passes")), runs)
    parts += _section("stack", STACK, (_stack(run) for run in of_kind(runs, "stack")), runs)
    parts += _section("kills", KILLS, _kills(of_kind(runs, "kills")), runs)
    parts += _section("promises", PROMISES, _promises(of_kind(runs, "promises")), runs)
    parts += _section("peers", PEERS, _all_peers(beside_others(runs)), runs)
    parts += _section("verify", VERIFY, _verified(of_kind(runs, "verify")), runs)
    if not runs:
        parts.append("No results are kept yet.\n")
    return "\n".join(parts)


def of_kind(runs: Sequence[Run], kind: str) -> list[Run]:
    """The runs of one kind."""
    return [run for run in runs if run["kind"] == kind]


def is_written_of(runs: Sequence[Run], kind: str) -> bool:
    """Whether these are the very runs of that kind that what was found is told of."""
    measured = {f"{kind}-{run['name']}": f"{run['date']} {run['machine'].get('revision')}" for run in runs}
    return measured == {name: when for name, when in WRITTEN_OF.items() if name.startswith(f"{kind}-")}


def _at_a_glance(runs: Sequence[Run]) -> list[str]:
    """What the rest comes to: what is kept of bare llama.cpp's speed, and who is faster at what."""
    rungs = [(_with_requests(run, rung), rung) for run in of_kind(runs, "ladder") for rung in run["data"]["rungs"]]
    served = [f"- {line}" for title, rung in rungs if (line := _served_enough(title, rung))]
    rows = glance.by_figure(as_it_comes(runs))
    told = [f"Streamed over HTTP ({SERVED}) beside a bare loop of llama_decode ({FLOOR}):\n", "".join(served)] if served else []
    if rows:
        told += [f"{GLANCE}\n", table(("", "cLLM is better at", "worse at", "not told apart at"), rows)]
        told.append(f"![who is faster]({GLANCE_PLOT})\n")
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


def _section(kind: str, text: str, bodies: Iterable[str], runs: Sequence[Run]) -> list[str]:
    shown = list(bodies)
    found = [FOUND[kind]] if kind in FOUND and is_written_of(of_kind(runs, kind), kind) else []
    return [f"## {TITLES[kind]}\n", text, *found, *shown] if shown else []


def _all_ladders(runs: Sequence[Run]) -> list[str]:
    """Every stage's ratio to the first in one table, and whether what users meet is fast enough; then each ladder by itself."""
    rungs = [(f"{_with_requests(run, rung)}; {_when(run)}", rung) for run in runs for rung in run["data"]["rungs"]]
    stages = sorted((stage for _, rung in rungs for stage in rung["stages"]), key=lambda stage: int(stage["number"]))
    names = dict.fromkeys(stage["name"] for stage in stages)
    ratios = [{stage["name"]: _ratios(stage.get("ratios")) for stage in rung["stages"]} for _, rung in rungs]
    rows = [(name, *(one.get(name, "") for one in ratios)) for name in names]
    if not rungs:
        return []
    added = dict.fromkeys(names, "") | {stage["name"]: stage["adds"] for _, rung in rungs for stage in rung["stages"] if stage.get("adds")}
    ratios_of_all = table(("", "adds", *(f"ratio to the first: {title}" for title, _ in rungs)), [(n, added[n], *r) for n, *r in rows])
    layers = table(("", "what it spends time on", "what was done about it"), [(n, REASONS[n], MENDED[n]) for n in names if n in REASONS])
    return [ratios_of_all, layers, *map(_ladder, runs)]


def _of_served(rung: Run, figure: str) -> float | None:
    """The median of a figure of the stage that users meet, where it was measured."""
    return next((statistics.median(stage[figure]) for stage in rung["stages"] if stage["name"] == SERVED), None)


def _served_enough(title: str, rung: Run) -> str:
    """What the stage that users meet keeps of the first, whether that was one, and whether it is as much as was promised, if it was."""
    floor, stage = rung["stages"][0], next((stage for stage in rung["stages"] if stage["name"] == SERVED), None)
    if stage is None or floor["name"] != FLOOR:
        return ""
    ratios = stage["ratios"]
    median = statistics.median(ratios)
    compared = _by_start(rung, stage, floor)
    promised = f", promised is at least {SERVED_LEAST:g}: {_verdict(median, compared)}" if rung.get("concurrency") == SERVED_AT else ""
    share = _share(stage)
    within = "" if share == UNKNOWN else f" Of its steps' time, {share} is in llama.cpp{_less_waiting(stage, floor)}."
    faster = [one["name"] for one in rung["stages"][1:] if len(one["ratios"]) > 1 and min(one["ratios"]) > 1]
    doubt = f" {' and '.join(faster)} had more than the first in every turn: it was not the floor there." if faster else ""
    starts = f", of {compared.n_starts} {'start' if compared.n_starts == 1 else 'starts'}"
    by_median = f"{median:.3f} by the median ({min(ratios):.3f} to {max(ratios):.3f} in {len(ratios)} turns{starts})"
    told = f"{by_median}, to {_mean_of_first(compared)} by the mean"
    return f"{title}: {SERVED} comes to {told}{promised}.{within}{doubt}\n"


def _mean_of_first(compared: Compared) -> str:
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


def _by_start(rung: Run, stage: Run, below: Run) -> Compared:
    """The tokens/s of one stage over another's; of earlier runs all turns were of one start."""
    speeds = stage["tokens_per_s"], below["tokens_per_s"]
    compared = compare(*speeds, rung.get("starts") or [0] * len(speeds[0]))
    assert compared is not None, "every stage gave tokens"
    return compared


def _has_starts(compared: Compared) -> bool:
    """Whether there were enough starts to say something of the next."""
    return compared.n_starts is None or compared.n_starts >= N_STARTS_LEAST


def _share(stage: Run) -> str:
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


def _ladder(run: Run) -> str:
    parts = [f"### {run['name']}\n", _circumstances(run)]
    for rung in run["data"]["rungs"]:
        parts += [f"{rung_title(rung)}:\n", _stages(rung["stages"]), f"![{rung_title(rung)}]({plot_of(run, rung_slug(rung))})\n"]
        if rung.get("not_found"):
            parts.append(f"Left out, since their packages were not installed: {', '.join(rung['not_found'])}.\n")
        if told := [
            line + _less_above(stage, rung["stages"]) for below, stage in _with_below(rung["stages"]) if (line := _loss(rung, stage, below))
        ]:
            parts.append("\n".join(told) + "\n")
    return "\n".join(parts)


def _with_below(stages: Sequence[Run]) -> list[tuple[Run, Run]]:
    """Each stage but the floor, after the one that it is compared with; without that one, what stands beside the others has none."""
    by_name = {stage["name"]: stage for stage in stages}
    pairs = [(below, stage) for below, stage in itertools.pairwise(stages) if stage["name"] != BORDER or "beside" in stage]
    return [(by_name.get(stage.get("beside"), below), stage) for below, stage in pairs]


def _loss(rung: Run, stage: Run, below: Run) -> str:
    """What is told of a stage that costs more than a little. Its own is what is outside llama.cpp, which computes the same for all."""
    losses = [1 - own / less for own, less in zip(stage["tokens_per_s"], below["tokens_per_s"], strict=True)]
    more, spent = stage.get("more_us_per_step", {}), below.get("spent_us_per_step", {})
    own_share = sum(spread["median"] for part, spread in more.items() if part != COMPUTED) / sum(spent.values()) if more and spent else None
    if statistics.median(losses) <= LOSS_TOLD and (own_share is None or own_share <= LOSS_TOLD):
        of_first = 1 - statistics.median(stage["ratios"])
        return "" if of_first <= LOSS_TOLD or "beside" in stage else _lost_below(rung, stage, of_first)
    least, most = _percent(min(losses)), _percent(max(losses))
    loss = statistics.median(losses)
    lost = f"- {stage['name']}, {_percent(abs(loss))} {'off' if loss >= 0 else 'more than'} {below['name']} (off: {least} to {most})"
    compared = _by_start(rung, stage, below)
    if compared.low is not None and compared.low < 1 < (compared.high or 0.0):
        lost += f", which these turns do not tell from none: {compared.low:.3f} to {compared.high:.3f} of it with 95 %"
    steps = tuple(round(statistics.median(one["n_steps"])) for one in (stage, below) if one.get("n_steps"))
    if len(set(steps)) == 2:
        late = ", since clients come back a step late" if steps[0] > steps[1] else ""
        lost += f", in {steps[0]} steps instead of {steps[1]}{late}"
    took = ", ".join(
        f"{number(spread['median'])} ({number(spread['min'])} to {number(spread['max'])}) us {PARTS[part]}" for part, spread in more.items()
    )
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


def _lost_below(rung: Run, stage: Run, of_first: float) -> str:
    """Of a stage that has lost to the first what others before it did."""
    first = rung["stages"][0]["name"]
    return f"- {stage['name']}, {_percent(of_first)} off {first}, not more than {_percent(LOSS_TOLD)} of it off the stage above: see there."


def _less_above(stage: Run, stages: Sequence[Run]) -> str:
    """Whether a stage that has all of this one's layers and more spends less beside those that are timed: then it is not these layers."""
    if "beside" in stage or (own_us := stage.get("spent_us_per_step", {}).get("rest")) is None:
        return ""
    above = [one for one in stages if one["number"] > stage["number"] and "beside" not in one]
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


def _passes(run: Run) -> str:
    """What each call took, in each memory."""
    found = run["data"]["shapes"]
    memories = list(found[0]["ms"])
    rows = [(shape["name"], str(shape["n_rows"]), *(_over_turns(shape["ms"][name]) for name in memories)) for shape in found]
    return "\n".join([f"### {run['name']}\n", _circumstances(run), table(("", "rows", *(f"{name}, ms" for name in memories)), rows)])


def _over_turns(values: Sequence[float]) -> str:
    """The median, the least and the most."""
    return f"{number(statistics.median(values))} ({number(min(values))} to {number(max(values))})"


def _stack(run: Run) -> str:
    parts = [f"### {run['name']}\n", _circumstances(run)]
    for rung in run["data"]["rungs"]:
        parts += [f"{rung_title(rung)}:\n", _carried(rung["stages"]), _served(rung)]
        parts += [_client_of_stage(stage) for stage in rung["stages"] if "client_cpu_share" in stage]
        if rung.get("streams") == CARRIED_AT:
            parts.append(_carried_enough(rung) if run["settings"].get("fake", run["name"]) == CARRIED else _stepped_enough(rung))
        parts.append(f"![{rung_title(rung)}]({plot_of(run, rung_slug(rung))})\n")
    if run["data"].get("profile"):
        parts += _profile(run["data"])
    return "\n".join(parts)


def _client_of_stage(stage: Run) -> str:
    share = stage["client_cpu_share"]
    busy = ": it may be what limits these figures" if share > CLIENT_SHARE_MAX else ""
    return f"The client of {stage['name']} took {share:.0%} of a core{busy}.\n"


def _carried(stages: Sequence[Run]) -> str:
    rows = [
        (
            str(stage["number"]),
            stage["name"],
            _over_turns(stage["tokens_per_s"]),
            number(stage.get("steps_per_s")),
            number(stage.get("cpu_us_per_token", {}).get("median")),
            number(stage.get("us_per_token")),
            number(stage.get("us_per_step")),
        )
        for stage in stages
    ]
    return table(("", "stage", "tokens/s", "steps/s", "CPU us a token", "over the one above", "CPU us a step, over it"), rows)


def _carried_enough(rung: Run) -> str:
    """Whether the stage that users meet carries as many tokens as it must."""
    carried = _of_served(rung, "tokens_per_s")
    if carried is None:
        return ""
    verdict = "kept" if carried >= CARRIED_LEAST else "missed"
    return f"{SERVED} carries {number(carried)} tokens/s, promised are at least {number(CARRIED_LEAST)}: {verdict}.\n"


def _stepped_enough(rung: Run) -> str:
    """Whether a fast device would be kept busy."""
    stepped = next((stage.get("steps_per_s") for stage in rung["stages"] if stage["name"] == SERVED), None)
    if stepped is None:
        return ""
    return f"{SERVED} makes {number(stepped)} steps/s, the aim is {STEPS_LEAST}: {'kept' if stepped >= STEPS_LEAST else 'missed'}.\n"


def _served(rung: Run) -> str:
    lines = []
    if step := rung.get("step"):
        model, sample, rest = (number(step[name]) for name in ("model_ms", "sample_ms", "rest_ms"))
        lines.append(f"A step of the last stage: {model} ms in the model, {sample} ms in sampling, {rest} ms between steps.")
    if requests := rung.get("requests_per_s"):
        cost = number(rung["cpu_us_per_request"]["median"])
        lines.append(f"Requests of one token, in one piece: {number(requests['median'])} a second, {cost} us of CPU time each.")
    return "\n".join(lines) + "\n"


def _profile(data: Run) -> list[str]:
    page = data["profile"]
    rows = [(part, number(us)) for part, us in page["us_by_part"].items()]
    functions = [(f"`{one['name']}`", number(one["us"]), number(one["calls"])) for one in page["functions"][:N_FUNCTIONS]]
    told = f"The server's Trio thread at {page['streams']} streams, under a profiler, which slows calls down"
    reading = f"To read the logits of a full step once, straight on, takes {number(data['reading_ms'])} ms here.\n"
    own = ("function", "us a token, its own", "calls a token")
    return [f"{told}:\n", table(("", "us a token"), rows), table(own, functions), reading]


def rung_title(rung: Run) -> str:
    """What a rung was measured at."""
    at = f"{rung['concurrency']} at a time" if "concurrency" in rung else f"{rung['streams']} streams"
    return f"{at}, {rung['sampling']}" if "sampling" in rung else at


def _with_requests(run: Run, rung: Run) -> str:
    """What a ladder's rung was measured at, and how much of the workload a turn had."""
    n = run["settings"].get("requests")
    return ", ".join([run["name"], *([f"{n} requests a turn"] if n else []), rung_title(rung)])


def rung_slug(rung: Run) -> str:
    """The title as part of a file's name."""
    return "".join(letter if letter.isalnum() else "-" for letter in rung_title(rung))


def plot_of(run: Run, part: str) -> str:
    """The file of a plot."""
    return f"{run['kind']}-{run['name']}-{part}.svg"


def _stages(stages: Sequence[Run]) -> str:
    rows = [
        (
            str(stage["number"]),
            f"{stage['name']}, over {stage['beside']}" if stage.get("beside") else stage["name"],
            _over_turns(stage["tokens_per_s"]),
            *(_with_spread(stage, f"us_per_{unit}") for unit in ("token", "step")),
            number(stage.get("spent_us_per_step", {}).get("native")),
            _share(stage),
            *(number(stage.get(f"{what}_us_per_step")) for what in ("waiting", "others", "client")),
            _ratios(stage.get("ratios")),
        )
        for stage in stages
    ]
    over = ("us a token over the one above", "us a step over it")
    step = ("us of a step in llama.cpp", "share of the step", "us without a core", "us of CPU that serves", "us of CPU of the client")
    return table(("", "stage", "tokens/s", *over, *step, "ratio to the first"), rows)


def _with_spread(stage: Run, name: str) -> str:
    spread = stage.get(f"{name}_spread")
    return number(stage.get(name)) + (f" ({number(spread['min'])} to {number(spread['max'])})" if spread else "")


def _ratios(ratios: Sequence[float] | None) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if ratios else ""


def _kills(runs: Sequence[Run]) -> list[str]:
    rows = []
    for run in runs:
        data = run["data"]
        n, pause = data["n_streams"], data["pause_s"]
        complete, same = f"{data['n_complete']} of {n}", f"{data['n_same']} of {n}"
        rows.append((run["name"], str(data["n_rounds"]), complete, same, number(pause["median"]), number(pause["max"])))
    head = ("model", "kills", "streams complete", "with the same text", "pause, median s", "pause, most s")
    return [table(head, rows), *(f"{run['name']}: {_circumstances(run)}" for run in runs)] if runs else []


def _promises(runs: Sequence[Run]) -> list[str]:
    rows = []
    for run in runs:
        for one in run["data"]["promises"]:
            bound = f"{'at least' if one['is_least'] else 'at most'} {number(one['bound'])}"
            rows.append((run["name"], one["workload"], one["figure"], number(one["value"]), bound, "kept" if one["is_kept"] else "missed"))
    head = ("part", "workload", "figure", "measured", "promised", "")
    told = [text for run in runs for text in _bounded(run["data"]["details"])]
    loads = [text for run in runs if run["data"]["details"].get("capacity_per_s") for text in _loads(run)]
    return [table(head, rows), *told, *loads, *(f"{run['name']}: {_circumstances(run)}" for run in runs)] if runs else []


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


def _verified(runs: Sequence[Run]) -> list[str]:
    rows = [
        (run["settings"]["model"]["file"], run["data"]["backend"], row["options"], number(row["mean"]), number(row["max"]), share, n_rows)
        for run in runs
        for row in run["data"]["rows"]
        for share, n_rows in [(f"{row['top1_agreement']:.1%}", str(row["n_rows"]))]
    ]
    head = ("model", "backend", "its options", "KL divergence, mean", "most", "same token", "rows")
    return [table(head, rows), *(f"{run['name']}: {_circumstances(run)}" for run in runs)] if runs else []


def as_it_comes(runs: Sequence[Run]) -> list[Run]:
    """The comparisons of `cllm serve` without options of its own."""
    return [run for run in of_kind(runs, "peers") if not run["settings"].get("ours")]


def beside_others(runs: Sequence[Run]) -> list[Run]:
    """The comparisons with other servers: `cllm serve` as it comes first, then with options, as another backend."""
    return sorted(of_kind(runs, "peers"), key=lambda run: bool(run["settings"].get("ours")))


def _all_peers(runs: Sequence[Run]) -> list[str]:
    """The main figures of all of them in one table, wins and losses alike; then each by itself."""
    rows = [row for run in runs for row in _main_rows(run, _main_figures(run))]
    if not rows:
        return [_peers(run) for run in runs]
    as_it_comes, others = ([run for run in runs if bool(run["settings"].get("ours")) is with_options] for with_options in (False, True))
    parts = (("as it comes", as_it_comes), ("With options, as another backend", others))
    counts = [f"{what}: {_verdicts(some)}" for what, some in parts if some]
    return [
        f"The main figures of all ({'. '.join(counts)}). What follows has the others, and every setting.\n",
        table(BESIDE_HEAD, rows),
        *_promised_beside(as_it_comes),
        *map(_peers, runs),
    ]


def _verdicts(runs: Sequence[Run]) -> str:
    """How many of the main figures were won and lost; the others say much of the same, as requests/s beside tokens/s."""
    verdicts = Counter(row["verdict"] for run in runs for row in _best(run) if row["figure"] in _main_figures(run))
    return ", ".join(f"{name} {n}" for name, n in sorted(verdicts.items(), reverse=True))


def _promised_beside(runs: Sequence[Run]) -> list[str]:
    """The ratios that were promised, and whether they were kept."""
    rows = [row for run in runs for row in _promised_of(run)]
    head = ("workload", "figure", "beside", "ratio", "promised", "")
    return ["What was promised of these:\n", table(head, rows)] if rows else []


def _promised_of(run: Run) -> Iterator[tuple[str, ...]]:
    workload, sides = run["settings"].get("workload", {}).get("name"), run["data"]["sides"]
    own = PROMISED_DEFAULT.get(workload, {})
    default = f"{sides[0]['peer']} {THEIR_DEFAULT}"
    if own and all(side["setting"] != THEIR_DEFAULT for side in sides):
        yield from ((_title(run), name, default, UNKNOWN, f"at most {bound:g}", "not measured") for name, bound in own.items())
    if not own or len(sides) > 1 or sides[0]["setting"] != THEIR_DEFAULT:  # a default alone is not the best of their settings
        best = f"the best of {_n_settings(run['data'])}" if len(sides) > 1 else "the only setting measured"
        rows = {row["figure"]: row for row in _best(run)}
        yield from (_held(run, name, best, rows[name], bound) for name, bound in PROMISED.get(workload, {}).items() if name in rows)
    for side in sides:
        for figure, bound in own.items() if side["setting"] == THEIR_DEFAULT else ():
            if compared := compared_by(side, figure):
                row = {**attrs.asdict(compared), "n_failed": n_wrong(side, "ours")}
                yield _held(run, figure, f"{side['peer']} {THEIR_DEFAULT}", row, bound)


def _n_settings(data: Run) -> str:
    """How many settings a best one was found among: those that have all pairs; and who was left out before."""
    sides = data["sides"]
    n_pairs = [side["n_pairs"] for side in sides]
    n_complete = sum(n == max(n_pairs) for n in n_pairs)
    n_left = len(sides) - n_complete
    complete = f"{n_complete} setting" if n_complete == 1 else f"{n_complete} settings"
    ended = ", when the run was ended" if {title_of(side) for side in sides} & set(data.get("unfinished", ())) else ""
    return complete + (f", {n_left} more having had {min(n_pairs)} of {max(n_pairs)} pairs{ended}" if n_left else "")


def _held(run: Run, figure: str, beside: str, row: Run, bound: float) -> tuple[str, ...]:
    """A row of what was promised; who left requests unanswered has kept nothing by being quick with the others."""
    is_least = FIGURES_BY_NAME[figure].is_higher_better
    is_kept = row["ratio"] >= bound if is_least else row["ratio"] <= bound
    has_starts = row["n_starts"] is None or row["n_starts"] >= N_STARTS_LEAST
    is_sure = has_starts and row["low"] is not None and not row["low"] < bound < row["high"]
    verdict = f"{'kept' if is_kept else 'missed'}{'' if is_sure else ', by the mean alone'}"
    if row.get("n_failed") and not FIGURES_BY_NAME[figure].counts_failures:
        verdict = f"unclear: {row['n_failed']} requests of ours were not answered as asked"
    return _title(run), figure, beside, _ratio(row), f"at {'least' if is_least else 'most'} {bound:g}", verdict


def _main_figures(run: Run) -> tuple[str, ...]:
    if run["settings"].get("rate"):
        return MAIN_OVERLOAD_FIGURES
    has_late = run["settings"].get("workload", {}).get("n_prompt_late")
    return (*MAIN_FIGURES, LATE_FIGURE) if has_late else MAIN_FIGURES


def _main_rows(run: Run, wanted: Sequence[str]) -> list[tuple[str, ...]]:
    rows = {row["figure"]: row for row in _best(run)}
    return [(_title(run), name, *_best_cells(rows[name], run)) for name in wanted if name in rows]


def _title(run: Run) -> str:
    """A run's name, and how many requests a pass of it has."""
    workload = run["settings"].get("workload", {})
    return f"{run['name']}, {_requests(workload)}" if workload.get("n_requests") else run["name"]


def _requests(workload: Run) -> str:
    """What a pass of a workload has."""
    n = workload["n_requests"]
    if workload.get("n_turns", 1) > 1:
        return f"{n} conversations of {workload['n_turns']} turns"
    return f"{n} requests and a long one" if workload.get("n_prompt_late") else f"{n} requests"


def _best(run: Run) -> list[Run]:
    """The figures of ours beside the setting that is best at each: by the pairs that are kept, not by what was said when they were made."""
    data = run["data"]
    sides = {key_of(side): side for side in data["sides"]}
    rows = best_rows(data["sides"], unfinished=data.get("unfinished", ()))
    return [{**row, "n_failed": n_wrong(sides[row["peer"], row["setting"]], "ours")} for row in rows]


def _peers(run: Run) -> str:
    data = run["data"]
    parts = [f"### {run['name']}\n", _circumstances(run)]
    if data["best"]:
        rows = [(row["figure"], *_best_cells(row, run)) for row in _best(run)]
        parts.append(table(BESIDE_HEAD[1:], rows))
        parts.append(f"![{run['name']}: figures]({plot_of(run, 'bars')})\n\n![{run['name']}: latency]({plot_of(run, 'latency')})\n")
    if len(data["sides"]) > 1 or any(n_wrong(side, "theirs") for side in data["sides"]):
        parts.append("All settings, medians of theirs, and of ours beside each, and what that is for us:\n")
        parts.append(_sides(data["sides"]))
    else:
        parts += map(_alone, data["sides"])
    parts += [_busy_client(side) for side in data["sides"] if side["client_cpu_share_max"] > CLIENT_SHARE_MAX]
    parts += [line for side in data["sides"] if (line := _busy_while_idle(side))]
    parts += [_unanswered(side) for side in data["sides"] if n_wrong(side, "theirs")]
    parts += _runs(run)
    measured = {title_of(side) for side in data["sides"]}
    for title, fault in data.get("broken", {}).items():
        parts.append(f"{'Ended early' if title in measured else 'Not measured'}: {title}: {fault}\n")
    if data.get("unfinished"):
        parts.append(f"The run was ended before all pairs were made: {', '.join(data['unfinished'])}.\n")
    if left_out := _left_out(data):
        parts.append(f"Settings that were not asked for: {', '.join(left_out)}.\n")
    if data.get("versions"):
        parts.append(f"What was beside us: {'; '.join(f'{peer}, {version}' for peer, version in data['versions'].items())}.\n")
    if data.get("not_found"):
        parts.append(f"Not found on this machine: {', '.join(data['not_found'])}.\n")
    return "\n".join(parts)


def _runs(run: Run) -> list[str]:
    """Whose pairs these are, where they are not those of one run."""
    runs = run["data"].get("runs", ())  # of one run, which the circumstances tell, where older results do not say
    if len(runs) < 2:
        return []
    told = [
        f"- {one['date']}, revision {one['revision']}: {', '.join(f'{n} beside {title}' for title, n in one['n_pairs'].items())}"
        for one in runs
    ]
    return ["The pairs are those of several runs, each with seeds of its own:\n", "\n".join(told) + "\n"]


def _left_out(data: Run) -> list[str]:
    """The settings of llama-server that a run was not to measure: the best of the others is the best of those that it did."""
    settings = {side["setting"] for side in data["sides"] if side["peer"] == "llama-server"}
    if not settings:
        return []
    tried = settings | {title.partition("(")[2].removesuffix(")") for title in data.get("broken", {})}
    return [name for name in LLAMA_SERVER_SETTINGS if name not in tried]


def _best_cells(row: Run, run: Run) -> tuple[str, ...]:
    among = f"of {_n_settings(run['data'])}" if len(run["data"]["sides"]) > 1 else "alone"
    which = f"{row['peer']} {row['setting']}, {among}"
    return number(row["ours"]), number(row["theirs"]), _ratio(row), row["verdict"], which, f"{row['n_better']} of {row['n_pairs']}"


def _ratio(row: Run) -> str:
    return f"{row['ratio']:.3f}" if row["low"] is None else f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"


def _sides(sides: Sequence[Run]) -> str:
    names = [name for name in SIDE_FIGURES if any(median_of(side, name, "theirs") is not None for side in sides)]
    rows = []
    for side in sides:
        cells = [_side_cell(side, name) for name in names]
        failed = f"{side['n_failed']['theirs']} / {side['n_failed']['ours']}"
        inexact = f"{side['n_inexact']['theirs']} / {side['n_inexact']['ours']}"
        client = f"{side['client_cpu_share_max']:.0%}"
        rows.append((f"{side['peer']} {side['setting']}", str(side["n_pairs"]), *cells, failed, inexact, client))
    return table(("theirs / ours", "pairs", *names, "failed", "not exactly as many tokens", "client CPU, most"), rows)


def _side_cell(side: Run, name: str) -> str:
    """A figure of both; the verdict, unless requests of theirs were not answered as asked: fewer or shorter ones are answered faster."""
    compared = compared_by(side, name)
    is_told = compared is not None and not n_wrong(side, "theirs")
    verdict = f" {compared.verdict(FIGURES_BY_NAME[name], n_failed=n_wrong(side, 'ours'))}" if compared and is_told else ""
    return f"{number(median_of(side, name, 'theirs'))} / {number(median_of(side, name, 'ours'))}{verdict}"


def _alone(side: Page) -> str:
    """Of the only setting, whose figures have a table already, what is not in that."""
    failed, inexact = (" / ".join(str(side[name][whose]) for whose in ("theirs", "ours")) for name in ("n_failed", "n_inexact"))
    share = f"{side['client_cpu_share_max']:.0%}"
    return f"Theirs / ours: failed {failed}, not exactly as many tokens {inexact}. The client took {share} of a core at most.\n"


def _busy_client(side: Run) -> str:
    share = f"{side['client_cpu_share_max']:.0%}"
    return f"Beside {side['peer']} {side['setting']} the client took up to {share} of a core: it may be what limits these figures.\n"


def _busy_while_idle(side: Run) -> str:
    """A server that computes while the other is measured takes from it what it should have."""
    shares = {"theirs": side.get("idle_cpu_share", 0.0), "ours": side.get("idle_cpu_share_ours", 0.0)}
    busy = [f"{whose} took {share:.1%}" for whose, share in shares.items() if share > IDLE_SHARE_MAX]
    return f"Beside {side['peer']} {side['setting']}, while the other was measured, {' and '.join(busy)} of a core.\n" if busy else ""


def _unanswered(side: Run) -> str:
    n = side["n_failed"]["theirs"]
    n_short = n_wrong(side, "theirs") - n
    told = [f"left {n} requests unanswered"] if n else []
    told += [f"answered {n_short} requests with other than as many tokens as were asked"] if n_short else []
    return f"{side['peer']} {side['setting']} {' and '.join(told)}: only what counts those is compared.\n"


def _circumstances(run: Run) -> str:
    machine, settings = run["machine"], run["settings"]
    libraries = ", ".join(f"{name} {version}" for name, version in machine["libraries"].items())
    others = f"; {libraries}" if libraries else ""
    facts = ", ".join(f"{name} {_fact(value)}" for name, value in settings.items() if value not in (None, "", [], {}))
    return (
        f"{run['date']}, revision {machine['revision']}, {_processor(machine)}, {machine['n_cores']} cores, "
        f"{machine['memory_gib']} GiB, {machine['kernel']}, Python {machine['python']}{others}. Settings: {facts}.\n"
    )


def _processor(machine: Run) -> str:
    """What computed; of earlier runs the instructions are not kept."""
    return f"{machine['processor']} ({machine['instructions']})" if machine.get("instructions") else str(machine["processor"])


def _fact(value: Any) -> str:
    if isinstance(value, dict) and "n_requests" in value:
        return f"{value['name']} ({_requests(value)}, {value['concurrency']} at a time)"
    if isinstance(value, dict):
        return str(value.get("file") or value.get("name") or " ".join(f"{name} {one}" for name, one in value.items()))
    if isinstance(value, list):
        return " ".join(_fact(one) for one in value)
    return number(value) if isinstance(value, float) else str(value)


# --- README's tables ---------------------------------------------------------------------------------------------------


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
            turns, mean = str(len(served["ratios"])), _mean_of_first(_by_start(rung, served, floor)).replace(" with 95 %", "")
            rows.append((_with_requests(run, rung), *speeds, _ratios(served["ratios"]), mean, _share(served), turns, _when(run)))
    return rows


def _readme_peers(runs: Sequence[Run]) -> list[str]:
    """A line for each comparison, in a table for those of which the same figures count."""
    lines: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for run in runs:
        wanted = _main_figures(run)
        if run["settings"].get("ours"):  # of another engine the rest is on the page
            wanted = OTHER_ENGINES_FIGURES
        rows = {row["figure"]: row for row in _best(run)}
        if wanted[0] not in rows:  # answers were not exact, so that tokens cannot be compared: good ones can
            wanted = ("good requests/s", *wanted[1:])
        if (first := rows.get(wanted[0])) is not None:
            ratios = (_told(row) if (row := rows.get(name)) else UNKNOWN for name in wanted)
            among = _among(run["data"])
            pairs = f"{first['n_pairs']} ({first['n_starts'] or UNKNOWN})"
            line = (_title(run), number(first["ours"]), number(first["theirs"]), *ratios, among, pairs, _when(run))
            lines.setdefault(wanted, []).append(line)
    return [table(_readme_head(wanted), some) for wanted, some in lines.items()]


def _told(row: Run) -> str:
    """A ratio, and who is better; where the interval does not say so, in how many of the pairs ours was."""
    return f"{_ratio(row)} " + (f"better in {row['n_better']} of {row['n_pairs']}" if row["verdict"] == "unclear" else str(row["verdict"]))


def _among(data: Run) -> str:
    """Beside whom: the setting by its name, if it is the only one."""
    if len(data["sides"]) == 1:
        return f"{data['sides'][0]['peer']} {data['sides'][0]['setting']}"
    peers = dict.fromkeys(side["peer"] for side in data["sides"])
    return f"{', '.join(peers)}: the best of {_n_settings(data)}"


def _readme_head(wanted: tuple[str, ...]) -> tuple[str, ...]:
    first, *_ = wanted
    ratios = (f"ratio of {name.removesuffix(', ms')} (95 %)" for name in wanted)
    return ("workload", f"cLLM, {first}", f"the other, {first}", *ratios, "beside", "pairs (starts)", "when")


def _when(run: Run) -> str:
    """The day, the revisions of cLLM, and the widest instructions of the processor, of which earlier runs have not kept any."""
    machine = run["machine"]
    revisions = dict.fromkeys([one["revision"] for one in run["data"].get("runs", ())] or [machine["revision"]])
    instructions = machine.get("instructions", "")
    widest = next((name for name, word in (("AMX", "amx"), ("AVX-512", "avx512"), ("AVX2", "avx2")) if word in instructions), UNKNOWN)
    return f"{run['date']}, {' and '.join(revisions)}, {widest}"


# --- forms -------------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines) + "\n"


def number(value: float | None) -> str:
    """Three digits, or all before the point."""
    if value is None:
        return UNKNOWN
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
