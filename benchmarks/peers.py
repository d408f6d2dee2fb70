"""Other servers beside ours, on the same model file, threads, slots and cells, turn by turn.

    python -m benchmarks peers --llama-server PATH [--workloads seed-40x8,mixed-small] [--pairs 10] [--model FILE] [--backend NAME]

Each setting of a peer first gets a few pairs; those that are the best at anything go on to all of them. A pair is a pass of ours and one of
theirs, one after the other, with the same fresh requests; which goes first alternates. After every few pairs both servers are started anew
(while settings are screened, after each), since passes of one start have much in common; the first pass of a start does not count (with
`--no-warm-up` it does, after a few small requests), for no server is as it will be in service: ours finds out how its cells had better lie,
others have nothing yet in their caches. What is compared is the ratio within a pair, so that the machine's own speed cancels out, and every
figure of ours stands against the setting that is best at that figure. A run that is told to end (SIGTERM, Ctrl-C) ends after the pair that
it is in, and keeps what it has; one that is told to `--add` goes on from what an earlier one has kept, so that ten pairs of a long workload
can be those of several evenings.

`data` of a result:

    {"sides": [{"peer", "setting", "n_pairs", "starts", "takes_ids", "figures": {NAME: {"ours": [...], "theirs": [...]}},
                "passes": {"ours": [{...}], "theirs"}, "n_failed", "curves", "idle_cpu_share", "idle_cpu_share_ours"}],
     "best": [{"figure", "is_higher_better", "peer", "setting", "ours", "theirs", "ratio", "low", "high", "n_pairs", "verdict"}],
     "not_found": [...], "broken": {...}, "versions": {PEER: what it says of itself},
     "unfinished": ["PEER (SETTING)" that would have got more pairs, had the run not been told to end],
     "runs": [{"date", "revision", "seed", "n_pairs": {"PEER (SETTING)": how many of the pairs}}]}  the runs whose pairs these are
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks import results
from benchmarks.arguments import loads, model_path, positive, result_name, seconds
from benchmarks.contenders import Contender, House, cllm_serve, find_contenders, versions
from benchmarks.figures import FIGURES
from benchmarks.generator import Generator, GeneratorDied, Order
from benchmarks.models import QUANTIZATIONS, model_file
from benchmarks.server import Server
from benchmarks.standings import Page, Run, best_rows, joined, key_of, of_others, promising, run_entry, unlike
from cllm.bench.metrics import CLIENT_SHARE_MAX, Goal
from cllm.bench.target import Client, Dialect, Target
from cllm.bench.workloads import OVERLOAD_FACTORS, SAMPLINGS, WORKLOADS, Workload, with_load

QUANTIZATION_OF: Final = {"seed-160x5": "Q8_0"}  # as the first cLLM had it
WITHOUT_PARALLEL: Final = "without --parallel"  # as a result has it among the options of ours
N_SCREEN: Final = 2
N_PAIRS_START: Final = 2
SEED_STEP: Final = 7919
N_PASSES_CAPACITY: Final = 3
ENDS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # after the pair under way: servers would go on beside what comes next
FAULTS: Final = (RuntimeError, OSError, subprocess.SubprocessError)  # of a server that cannot be measured
CURVE_KEYS: Final = ("ttft_s", "itl_s", "e2e_s")
PASS_KEYS: Final = (  # of a pass, what no figure has
    "wall_s", "n_requests", "n_failed", "failures", "n_prompt", "n_cached", "n_generated", "goodput_share", "server_cpu_s", "client_cpu_s",
    "counted_by", "is_late_alone",
)  # fmt: skip


@attrs.define(kw_only=True)
class Side:
    """A peer's setting, and what was measured of it and of us beside it."""

    contender: Contender
    ours: list[dict[str, Any]] = attrs.field(factory=list)  # summaries, a pair at the same place in both
    theirs: list[dict[str, Any]] = attrs.field(factory=list)
    curves: dict[str, list[dict[str, list[float]]]] = attrs.field(factory=lambda: {"ours": [], "theirs": []})
    idle_cpu_shares: dict[str, list[float]] = attrs.field(factory=lambda: {"ours": [], "theirs": []})  # while the other was measured
    starts: list[int] = attrs.field(factory=list)  # of each pair, by which start of the two servers
    takes_ids: bool = True  # or both were sent words
    kept: Page | None = None  # pairs of earlier runs
    fault: str = ""

    @property
    def n_pairs(self) -> int:
        """The pairs of this run and of those before it."""
        return len(self.ours) + (self.kept["n_pairs"] if self.kept else 0)

    def page(self) -> Page | None:
        """What is kept of it; None when nothing was measured."""
        if not self.ours:
            return self.kept
        return joined(self.kept, _side_page(self)) if self.kept else _side_page(self)


@attrs.frozen(kw_only=True)
class Plan:
    """What is measured: a workload at a rate, if it is one, in so many pairs."""

    name: str
    workload: Workload
    rate: float | None
    n_pairs: int
    n_screen: int
    n_pairs_start: int  # after which the servers are started anew
    warms_up: bool  # by a whole pass; else by a few requests
    seed: int
    sampling: str
    goal: Goal


class OursFailed(Exception):
    """Our own server cannot be measured; what is measured of it already is kept."""


class Match:
    """Ours and one peer's server, both up, and pairs of passes."""

    def __init__(self, plan: Plan, generator: Generator, ours: Server, theirs: Server, side: Side, seeds: Iterator[int]) -> None:
        self._plan, self._generator, self._side, self._seeds = plan, generator, side, seeds
        self._servers = {"ours": ours, "theirs": theirs}
        self._start = side.starts[-1] + 1 if side.starts else 0
        self._n_starts_before = self._start + (len(set(side.kept["starts"])) if side.kept else 0)  # of this run, and of those it adds to
        try:
            self._n_vocab = ours.n_vocab
            dialect = generator.dialect(ours.port, n_vocab=self._n_vocab, sampling=plan.sampling)
        except FAULTS as error:
            raise OursFailed(_told(error)) from error
        # Both get what the peer takes: text, where it takes no token ids, and no sampling field that it does not.
        dialects = {"ours": dialect, "theirs": generator.dialect(theirs.port, n_vocab=self._n_vocab, sampling=plan.sampling)}
        takes_ids = side.takes_ids = all(dialect.takes_ids for dialect in dialects.values())
        refused = tuple(dict.fromkeys(name for dialect in dialects.values() for name in self._left_out(dialect)))
        # Nobody gets a seed: some draw otherwise with one, and more slowly, and which tokens are drawn changes nothing here.
        alike = {"takes_ids": takes_ids, "refused": refused, "takes_seed": False}
        self._dialects = {name: attrs.evolve(dialect, **alike) for name, dialect in dialects.items()}

    def _left_out(self, dialect: Dialect) -> list[str]:
        client = Client(target=Target(host="", port=0), dialect=dialect, sampling=SAMPLINGS[self._plan.sampling])
        return client.sampling_left_out

    def warm_up(self) -> None:
        """What does not count: a pass, or a few requests, since the first step of a server allocates and maps."""
        n = self._plan.workload.concurrency
        small = Workload(name="warm-up", n_requests=n, concurrency=n, n_prompt=(8, 16), n_generated=(4, 4))
        seed = next(self._seeds)
        for name in self._servers:
            order = attrs.evolve(self._order(name, seed), rate=None)
            self._generator.run(order if self._plan.warms_up else attrs.evolve(order, workload=small))

    def pair(self, number: int) -> None:
        """One pass each with the same requests, which are new; who begins alternates, within a start and from one start to the next."""
        n_in_start = self._side.starts.count(self._start)
        names = ("ours", "theirs") if (self._n_starts_before + n_in_start) % 2 == 0 else ("theirs", "ours")
        seed = next(self._seeds)
        done = {name: self._pass(name, seed) for name in names}
        if not self._side.takes_ids:
            _mark_cut(done["ours"]["summary"], done["theirs"]["summary"])
        self._side.ours.append(done["ours"]["summary"])
        self._side.theirs.append(done["theirs"]["summary"])
        self._side.starts.append(self._start)
        for name, one in done.items():
            self._side.curves[name].append(one["curves"])
        self._tell(number)

    def _pass(self, name: str, seed: int) -> dict[str, Any]:
        server = self._servers[name]
        other = self._servers["theirs" if name == "ours" else "ours"]
        cpu_s, other_cpu_s = server.cpu_s(), other.cpu_s()
        done = self._generator.run(self._order(name, seed))
        summary = done["summary"]
        summary["server_cpu_s"] = server.cpu_s() - cpu_s
        summary["server_rss_peak_mb"] = server.rss_peak_mb()
        idle = "theirs" if name == "ours" else "ours"  # or should have been
        self._side.idle_cpu_shares[idle].append((other.cpu_s() - other_cpu_s) / summary["wall_s"])
        return done

    def _order(self, name: str, seed: int) -> Order:
        return Order(
            port=self._servers[name].port,
            workload=self._plan.workload,
            n_vocab=self._n_vocab,
            seed=seed,
            dialect=self._dialects[name],
            sampling=self._plan.sampling,
            rate=self._plan.rate,
            goal=self._plan.goal,
        )

    def _tell(self, number: int) -> None:
        ours, theirs = self._side.ours[-1], self._side.theirs[-1]
        failed = f"  failed: {ours['n_failed']} / {theirs['n_failed']}" if ours["n_failed"] or theirs["n_failed"] else ""
        share = max(ours["client_cpu_share"], theirs["client_cpu_share"])
        busy = ": it may be what limits these figures" if share > CLIENT_SHARE_MAX else ""
        alone = "  the late request came when the others had ended" if any(one.get("is_late_alone") for one in (ours, theirs)) else ""
        print(
            f"  pair {number}: ours {ours['tokens_per_s']:7.1f}  theirs {theirs['tokens_per_s']:7.1f} tokens/s  "
            f"ratio {ours['tokens_per_s'] / max(theirs['tokens_per_s'], 1e-9):.3f}  client CPU {share:.0%}{busy}{failed}{alone}",
            flush=True,
        )


def _never() -> bool:
    return False


def run_plan(
    plan: Plan, ours: Contender, contenders: Sequence[Contender], is_ended: Callable[[], bool] = _never, kept: Sequence[Page] = ()
) -> dict[str, Any]:
    """Measure all contenders; return `data` of the result: all of it, or what there is after the pair in which `is_ended` became true.

    What is `kept` of earlier runs counts: pairs are added to it.
    """
    pages = {key_of(side): side for side in kept}
    sides = [Side(contender=contender, kept=pages.pop((contender.peer, contender.setting), None)) for contender in contenders]
    seeds = itertools.count(plan.seed, SEED_STEP)
    fault = ""
    with Generator() as generator:
        try:
            for side in sides:
                _play(plan, generator, ours, side, seeds, n_to=min(plan.n_screen, plan.n_pairs), is_ended=is_ended)
            for side in _promising(sides, pages.values()):
                _play(plan, generator, ours, side, seeds, n_to=plan.n_pairs, is_ended=is_ended)
        except OursFailed as error:
            fault = str(error)
            print(f"  ours: {fault}", flush=True)
    done = page(sides, pages.values())
    if is_ended() and (unfinished := _unfinished(sides, pages.values(), plan.n_screen, plan.n_pairs)):
        done["unfinished"] = unfinished
    return {**done, "broken": {**done["broken"], ours.title: fault}} if fault else done


def _play(
    plan: Plan, generator: Generator, ours: Contender, side: Side, seeds: Iterator[int], *, n_to: int, is_ended: Callable[[], bool]
) -> None:
    if side.fault or side.n_pairs >= n_to or is_ended():
        return
    print(f"{plan.name}: ours and {side.contender.title}", flush=True)
    n_deaths = 0
    while side.n_pairs < n_to and not side.fault and not is_ended():
        with ExitStack() as opened:
            try:
                mine = opened.enter_context(ours.server())
            except FAULTS as error:
                raise OursFailed(_told(error)) from error
            try:
                with side.contender.server() as theirs:
                    match = Match(plan, generator, mine, theirs, side, seeds)
                    match.warm_up()
                    # Starts differ more than pairs of one start: who is screened has a start for each pair.
                    n_in_start = 1 if n_to <= plan.n_screen else plan.n_pairs_start
                    for number in range(side.n_pairs, min(side.n_pairs + n_in_start, n_to)):
                        if not is_ended():
                            match.pair(number)
            except GeneratorDied as error:  # which says nothing of them: the pairs that are left get a start of their own, once
                if n_deaths:
                    raise OursFailed(_told(error)) from error
                n_deaths += 1
                print(f"  {_told(error)}, and goes on with a new start", flush=True)
            except FAULTS as error:  # one peer that cannot be measured does not end the run
                side.fault = _told(error)
                print(f"  {side.fault}", flush=True)


def _mark_cut(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Who read fewer tokens of the same texts, but for one at each one's beginning, has cut them: nothing of that is exact."""
    if not (one["n_failed"] or other["n_failed"]):
        for fewer, more in ((one, other), (other, one)):
            if 0 < fewer["n_prompt"] < more["n_prompt"] - fewer["n_requests"]:  # 0: it tells none
                fewer["n_inexact"] = fewer["n_requests"]


def _told(error: Exception) -> str:
    """What results say of a fault: they name no folders."""
    return re.sub(r"\S*/", "", " ".join(str(error).split()))[-300:]


def _promising(sides: Sequence[Side], others: Iterable[Page] = ()) -> list[Side]:
    """The sides that are best at something, of all that was measured."""
    best = promising([*filter(None, (side.page() for side in sides)), *others])
    return [side for side in sides if (side.contender.peer, side.contender.setting) in best]


def _unfinished(sides: Sequence[Side], others: Iterable[Page], n_screen: int, n_pairs: int) -> list[str]:
    """Who would have got more pairs, had the run not been told to end."""
    is_screened = all(side.n_pairs >= min(n_screen, n_pairs) or side.fault for side in sides)
    going = _promising(sides, others) if is_screened else sides
    return [side.contender.title for side in going if side.n_pairs < n_pairs and not side.fault]


def page(sides: Sequence[Side], others: Iterable[Page] = ()) -> dict[str, Any]:
    """What is kept of the sides, and the best of them for each figure; `others` were measured in earlier runs alone."""
    pages = [*filter(None, (side.page() for side in sides)), *others]
    return {
        "sides": pages,
        "best": best_rows(of_others(pages)),
        "broken": {side.contender.title: side.fault for side in sides if side.fault},
    }


def _side_page(side: Side) -> dict[str, Any]:
    figures = {figure.name: {"ours": [*map(figure.of, side.ours)], "theirs": [*map(figure.of, side.theirs)]} for figure in FIGURES}
    return {
        "peer": side.contender.peer,
        "setting": side.contender.setting,
        "n_pairs": len(side.ours),
        "starts": side.starts,
        "takes_ids": side.takes_ids,
        "figures": figures,
        "passes": {name: [_kept(one) for one in passes] for name, passes in (("ours", side.ours), ("theirs", side.theirs))},
        "n_failed": {"ours": sum(s["n_failed"] for s in side.ours), "theirs": sum(s["n_failed"] for s in side.theirs)},
        "n_inexact": {"ours": sum(s["n_inexact"] for s in side.ours), "theirs": sum(s["n_inexact"] for s in side.theirs)},
        "n_cached": {"ours": sum(s["n_cached"] or 0 for s in side.ours), "theirs": sum(s["n_cached"] or 0 for s in side.theirs)},
        "client_cpu_share_max": max(summary["client_cpu_share"] for summary in side.ours + side.theirs),
        "idle_cpu_share": statistics.median(side.idle_cpu_shares["theirs"]),
        "idle_cpu_share_ours": statistics.median(side.idle_cpu_shares["ours"]),
        "curves": {name: _mean_curves(passes) for name, passes in side.curves.items()},
    }


def _kept(summary: dict[str, Any]) -> dict[str, Any]:
    return {key: summary[key] for key in PASS_KEYS}


def _mean_curves(passes: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """The median pass at each percentile."""
    found = {}
    for key in CURVE_KEYS:
        curves = [one[key] for one in passes if one[key]]
        found[key] = [statistics.median(values) for values in zip(*curves, strict=True)] if curves else []
    return found


# --- the command line --------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=model_path, help="a GGUF file (default: the qwen3-0.6b shape, made on demand)")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the model that is made (default: Q4_K_M; Q8_0 for seed-160x5)")
    known = ", ".join(WORKLOADS)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help=f"names with commas between, of {known} (default: all)")
    parser.add_argument("--pairs", type=positive, default=10)
    parser.add_argument("--screen", type=positive, default=N_SCREEN, help="pairs after which only the best settings go on")
    parser.add_argument("--pairs-a-start", type=positive, default=N_PAIRS_START, help="after which both servers are started anew")
    parser.add_argument("--no-warm-up", action="store_true", help="begin each start with a few requests, not with a whole pass")
    parser.add_argument("--concurrency", type=positive, help="default: the workload's")
    parser.add_argument("--requests", type=positive, help="default: the workload's")
    parser.add_argument(
        "--loads",
        type=loads,
        default=OVERLOAD_FACTORS,
        help="of overload: how many times what ours can serve comes, with commas between (default: 0.5,1,2,4)",
    )
    parser.add_argument("--sampling", choices=sorted(SAMPLINGS), default="usual")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--slots", type=positive, help="default: as many as requests at once")
    parser.add_argument("--cells", type=positive, help="KV cells of all slots together (default: what the workload needs)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--goodput-ttft-s", type=seconds, default=Goal().ttft_s)
    parser.add_argument("--goodput-itl-s", type=seconds, default=Goal().itl_s)
    parser.add_argument("--llama-server", default="llama-server", help="the program (default: on PATH)")
    parser.add_argument("--llama-cpp-python", default=sys.executable, help="a Python that has llama_cpp.server (default: this one)")
    parser.add_argument("--ollama", default="ollama", help="the program (default: on PATH)")
    parser.add_argument("--vllm", default="vllm", help="the program (default: on PATH)")
    parser.add_argument("--only", default="", help="only settings whose name has one of these words, with commas between")
    parser.add_argument("--backend", default="", help="of ours, as openvino where that plugin is installed (default: as it comes)")
    parser.add_argument("--ours", action="append", default=[], help="an option for `cllm serve`, as in --ours=--kv=unified; repeatable")
    parser.add_argument(
        "--without-parallel", action="store_true", help="`cllm serve` is not told how many run at once, so that it heeds its --itl-max-ms"
    )
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        help="ours with other options as one more peer, as in --beside='--kv unified'; with '' to see how much equal servers differ",
    )
    parser.add_argument(
        "--add", action="store_true", help="add to the pairs of the result of the same name, up to --pairs, instead of taking its place"
    )
    parser.add_argument("--label", type=result_name, help="goes into the names of the results")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="the folder of the results")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure each workload; write a result for each."""
    asked = parser().parse_args(arguments)
    asked.ends, asked.missing = [], []
    comparisons = [_comparison(asked, workload) for workload in _workloads(asked)]
    numbers = [number for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN]  # as nohup has it
    before = {number: signal.signal(number, lambda number, _frame: _end(asked.ends, number)) for number in numbers}
    try:
        for comparison in comparisons:
            _run_comparison(asked, comparison)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked.missing:
        raise SystemExit(f"not measured: {', '.join(asked.missing)}")


def _end(ends: list[int], number: int) -> None:
    """After the pair that is under way; a second Ctrl-C does not wait for that."""
    if number == signal.SIGINT and number in ends:
        raise KeyboardInterrupt
    ends.append(number)
    print("ends after this pair", flush=True)


def _workloads(asked: argparse.Namespace) -> list[Workload]:
    """What is to be measured."""
    found = []
    for name in asked.workloads.split(","):
        if name not in WORKLOADS:
            raise SystemExit(f"no workload {name}; there are {', '.join(WORKLOADS)}")
        try:
            found.append(with_load(WORKLOADS[name], concurrency=asked.concurrency, n_requests=asked.requests))
        except ValueError as error:
            raise SystemExit(str(error)) from error
    return found


@attrs.frozen(kw_only=True)
class Comparison:
    """A workload, and who is measured on it."""

    plan: Plan
    house: House
    contenders: list[Contender]
    facts: dict[str, Any]  # for `data`: what was not found, and the versions of what was


def _comparison(asked: argparse.Namespace, workload: Workload) -> Comparison:
    """All that can be known to be wrong with a comparison is, before the first takes its hours."""
    model = asked.model or model_file("qwen3-0.6b", asked.quantization or QUANTIZATION_OF.get(workload.name, "Q4_K_M"))
    house = house_for(asked, model, workload)
    contenders, not_found = find_contenders(asked, house)
    if not contenders:
        raise SystemExit("there is no other server to measure: name one by its flag, as --llama-server PATH")
    plan = Plan(
        name=workload.name,
        workload=workload,
        rate=None,
        n_pairs=asked.pairs,
        n_screen=asked.screen,
        n_pairs_start=asked.pairs_a_start,
        warms_up=not asked.no_warm_up,
        seed=asked.seed,
        sampling=asked.sampling,
        goal=Goal(asked.goodput_ttft_s, asked.goodput_itl_s),
    )
    facts = {"not_found": not_found, "versions": versions(contenders)}
    for one in _loads(plan, asked.loads).values():
        _refuse_unlike(asked, attrs.evolve(one, rate=_kept_rate(asked, one, model)), house, facts)
    return Comparison(plan=plan, house=house, contenders=contenders, facts=facts)


def _refuse_unlike(asked: argparse.Namespace, plan: Plan, house: House, facts: dict[str, Any]) -> None:
    kept = _kept_run(asked, plan, house.model)
    names = unlike(kept, {"settings": _settings(asked, plan, house), "machine": results.machine(), "data": facts}) if kept else []
    if kept and names:
        raise SystemExit(f"--add: the pairs of {kept['kind']}-{kept['name']}.json were measured otherwise: {', '.join(names)}")


def _run_comparison(asked: argparse.Namespace, comparison: Comparison) -> None:
    for line in comparison.facts["not_found"]:
        print(f"not found: {line}", flush=True)
    ours = cllm_serve(comparison.house, ours_options(asked), says_parallel=not asked.without_parallel)
    if asked.ends:
        return
    try:
        plans = _at_rates(asked, comparison.plan, ours, comparison.house.model)
    except OursFailed as error:
        print(f"  ours: {error}\n{comparison.plan.name}: nothing was measured, and nothing is written", flush=True)
        asked.missing.append(comparison.plan.name)
        return
    for plan in plans:
        if asked.ends:
            return
        _run_one(asked, attrs.evolve(comparison, plan=plan), ours)


def _run_one(asked: argparse.Namespace, comparison: Comparison, ours: Contender) -> None:
    """A comparison at one rate, and its result."""
    plan, house, facts = comparison.plan, comparison.house, comparison.facts
    kept = _kept_run(asked, plan, house.model)
    runs = kept["data"]["runs"] if kept else []
    before = kept["data"]["sides"] if kept else []
    plan = attrs.evolve(plan, seed=_fresh_seed(plan.seed, [run["seed"] for run in runs]))
    data = run_plan(plan, ours, comparison.contenders, lambda: bool(asked.ends), before)
    added = run_entry(results.today(), results.revision(), plan.seed, data["sides"], before)
    if not added["n_pairs"]:
        is_complete = bool(before) and not data["broken"] and not asked.ends
        asked.missing += [] if is_complete else [plan.name]
        said = "all pairs are there already" if is_complete else "nothing was measured"
        print(f"{plan.name}: {said}, and nothing is written", flush=True)
        return
    if kept:
        # Ours is there, or nothing would have been added, and so is who has pairs.
        was_broken = {
            title: fault for title, fault in kept["data"].get("broken", {}).items() if title not in (ours.title, *added["n_pairs"])
        }
        measured = tuple({side["peer"] for side in data["sides"]})
        data["broken"] = {**was_broken, **data["broken"]}
        if unfinished := {
            *data.pop("unfinished", ()),
            *(title for title in kept["data"].get("unfinished", ()) if title not in added["n_pairs"]),
        }:
            data["unfinished"] = sorted(unfinished)
        facts = {
            "versions": {**kept["data"].get("versions", {}), **facts["versions"]},
            # As llama-cpp-python's server, which is named so.
            "not_found": [name for name in facts["not_found"] if not name.startswith(measured)],
        }
    name = _name(asked, plan, house.model)
    path = results.write("peers", name, _settings(asked, plan, house), {**data, **facts, "runs": [*runs, added]}, asked.results)
    _print_best(data)
    print(f"written: {path.name}", flush=True)


def _kept_run(asked: argparse.Namespace, plan: Plan, model: Path) -> Run | None:
    """The result that is added to, if there is to be and is one."""
    return results.read("peers", _name(asked, plan, model), asked.results) if asked.add else None


def _kept_rate(asked: argparse.Namespace, plan: Plan, model: Path) -> float | None:
    """The rate of the result that is added to: pairs stand together at one rate only."""
    kept = _kept_run(asked, plan, model)
    return kept["settings"]["rate"] if kept else None


def _fresh_seed(seed: int, used: Sequence[int]) -> int:
    """A seed whose requests no earlier run has made, whose seeds are as many steps apart."""
    return next(number for number in itertools.count(seed) if number % SEED_STEP not in {one % SEED_STEP for one in used})


def _name(asked: argparse.Namespace, plan: Plan, model: Path) -> str:
    """What the result is called."""
    concurrency = f"c{plan.workload.concurrency}" if asked.concurrency else ""
    return "-".join(filter(None, (plan.name, concurrency, asked.backend, _unusual_model(asked, model), asked.label)))


def _unusual_model(asked: argparse.Namespace, model: Path) -> str:
    """What a result is called besides, so that one of another model does not take its place."""
    return model.stem if asked.model else asked.quantization or ""


def ours_options(asked: argparse.Namespace) -> list[str]:
    """What `cllm serve` is told besides the sizes."""
    backend = [f"--backend={asked.backend}"] if asked.backend else []
    return [*backend, *asked.ours]


def house_for(asked: argparse.Namespace, model: Path, workload: Workload) -> House:
    """The sizes that all servers get, so that a slot with a share of its own has room for the longest request. llama.cpp rounds a share up
    to 256 cells, so that it is rounded for all.
    """
    n_slots = asked.slots or workload.concurrency + bool(workload.n_prompt_late)
    share = max(-(-workload.cells() // n_slots), workload.n_longest())
    n_cells = asked.cells or n_slots * 256 * -(-share // 256)
    return House(model=model, n_slots=n_slots, n_cells=n_cells, n_threads=asked.threads)


def _loads(plan: Plan, factors: Sequence[float] = OVERLOAD_FACTORS) -> dict[float, Plan]:
    """The plan, or for an open loop one for each part of our capacity, by that part."""
    if not plan.workload.is_open:
        return {1.0: plan}
    return {factor: attrs.evolve(plan, name=f"{plan.name}-{factor:g}x") for factor in factors}


def _at_rates(asked: argparse.Namespace, plan: Plan, ours: Contender, model: Path) -> list[Plan]:
    """The plan at each load; all servers get the same rates. Raises: OursFailed."""
    if not plan.workload.is_open:
        return [plan]
    kept = {factor: rate for factor, one in _loads(plan).items() if (rate := _kept_rate(asked, one, model)) is not None}
    capacity = statistics.median(rate / factor for factor, rate in kept.items()) if kept else _capacity(plan, ours, asked.ends)
    return [attrs.evolve(one, rate=kept.get(factor, factor * capacity)) for factor, one in _loads(plan, asked.loads).items()]


def _capacity(plan: Plan, ours: Contender, ends: Sequence[int]) -> float:
    """Requests a second that ours answers when as many are always there as run at once; of one pass at least, once the run is to end.

    Raises: OursFailed.
    """
    found: list[float] = []
    try:
        with Generator() as generator, ours.server() as server:
            order = Order(
                port=server.port,
                workload=plan.workload,
                n_vocab=server.n_vocab,
                seed=plan.seed,
                dialect=generator.dialect(server.port, sampling=plan.sampling),
                sampling=plan.sampling,
            )
            while len(found) < N_PASSES_CAPACITY and not (found and ends):
                found.append(generator.run(attrs.evolve(order, seed=plan.seed + len(found)))["summary"]["requests_per_s"])
    except (*FAULTS, GeneratorDied) as error:
        raise OursFailed(_told(error)) from error
    capacity = float(statistics.median(found))
    if not capacity:
        raise OursFailed("it answers no request, so that there is no rate to send them at")
    print(f"capacity: {capacity:.2f} requests/s", flush=True)
    return capacity


def _settings(asked: argparse.Namespace, plan: Plan, house: House) -> dict[str, Any]:
    return {
        "model": results.model_facts(house.model),
        "workload": attrs.asdict(plan.workload),
        "rate": plan.rate,
        "sampling": plan.sampling,
        "n_pairs": plan.n_pairs,
        "n_screen": plan.n_screen,
        "n_pairs_start": plan.n_pairs_start,
        "warms_up": plan.warms_up,
        "only": asked.only,
        "seed": plan.seed,
        "n_slots": house.n_slots,
        "n_cells": house.n_cells,
        "n_threads": house.n_threads,
        "goal": attrs.asdict(plan.goal),
        "ours": [*([WITHOUT_PARALLEL] if asked.without_parallel else []), *ours_options(asked)],
        "late_apart": True if plan.workload.n_prompt_late else None,  # its whole answer is not among the others'; once it was
    }


def _interval(row: dict[str, Any]) -> str:
    return "-" if row["low"] is None else f"{row['low']:.3f} to {row['high']:.3f}"


def _print_best(data: dict[str, Any]) -> None:
    print(f"\n{'figure':28} {'ours':>9} {'theirs':>9} {'ratio':>7}  95 %             best of them")
    for row in data["best"]:
        print(
            f"{row['figure']:28} {row['ours']:9.3g} {row['theirs']:9.3g} {row['ratio']:7.3f}  {_interval(row):14}  "
            f"{row['verdict']:5}  {row['peer']} {row['setting']}"
        )


if __name__ == "__main__":
    main()
