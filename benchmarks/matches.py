"""A comparison as it is played: pairs of passes of ours and of each setting of the other servers, until the best have all of them.

Each setting first gets a few pairs; those that are the best at anything go on to all. Both servers are started anew after every few pairs,
and what is measured is handed out after each of these starts, so that whatever ends a run of hours takes the last minutes alone.
"""

from __future__ import annotations

import itertools
import re
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final, TypeAlias

import attrs

from benchmarks.contenders import Contender
from benchmarks.figures import FIGURES
from benchmarks.generator import Generator, GeneratorDied, Order
from benchmarks.server import Server
from benchmarks.standings import Page, best_rows, joined, key_of, of_others, promising
from cllm.bench.metrics import CLIENT_SHARE_MAX, Goal
from cllm.bench.target import Client, Dialect, Target
from cllm.bench.workloads import SAMPLINGS, Workload

Measured: TypeAlias = dict[str, Any]  # `data` of a result, but for what is known of the peers without measuring

SEED_STEP: Final = 7919
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
            raise OursFailed(told(error)) from error
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
    plan: Plan,
    ours: Contender,
    contenders: Sequence[Contender],
    keep: Callable[[Measured], object],
    is_ended: Callable[[], bool] = _never,
    kept: Sequence[Page] = (),
) -> Measured:
    """Measure all contenders; return all of it, or what there is after the pair in which `is_ended` became true.

    What there is goes to `keep` after each start of the servers. What is `kept` of earlier runs counts: pairs are added to it.
    """
    pages = {key_of(side): side for side in kept}
    sides = [Side(contender=contender, kept=pages.pop((contender.peer, contender.setting), None)) for contender in contenders]
    others = list(pages.values())
    seeds = itertools.count(plan.seed, SEED_STEP)
    fault = ""

    def keep_so_far() -> None:
        keep(page(sides, others) | _left(sides, others, plan))

    with Generator() as generator:
        play = partial(_play, plan, generator, ours, seeds=seeds, is_ended=is_ended, keep=keep_so_far)
        try:
            for side in sides:
                play(side, n_to=min(plan.n_screen, plan.n_pairs))
            for side in _promising(sides, others):
                play(side, n_to=plan.n_pairs)
        except OursFailed as error:
            fault = str(error)
            print(f"  ours: {fault}", flush=True)
    done = page(sides, others) | (_left(sides, others, plan) if is_ended() or fault else {})
    return {**done, "broken": {**done["broken"], ours.title: fault}} if fault else done


def _play(
    plan: Plan,
    generator: Generator,
    ours: Contender,
    side: Side,
    *,
    seeds: Iterator[int],
    n_to: int,
    is_ended: Callable[[], bool],
    keep: Callable[[], None],
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
                raise OursFailed(told(error)) from error
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
                    raise OursFailed(told(error)) from error
                n_deaths += 1
                print(f"  {told(error)}, and goes on with a new start", flush=True)
            except FAULTS as error:  # one peer that cannot be measured does not end the run
                side.fault = told(error)
                print(f"  {side.fault}", flush=True)
        keep()


def _mark_cut(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Who read fewer tokens of the same texts, but for one at each one's beginning, has cut them: nothing of that is exact."""
    if not (one["n_failed"] or other["n_failed"]):
        for fewer, more in ((one, other), (other, one)):
            if 0 < fewer["n_prompt"] < more["n_prompt"] - fewer["n_requests"]:  # 0: it tells none
                fewer["n_inexact"] = fewer["n_requests"]


def told(error: Exception) -> str:
    """What results say of a fault: they name no folders."""
    return re.sub(r"\S*/", "", " ".join(str(error).split()))[-300:]


def _promising(sides: Sequence[Side], others: Iterable[Page] = ()) -> list[Side]:
    """The sides that are best at something, of all that was measured."""
    best = promising([*filter(None, (side.page() for side in sides)), *others])
    return [side for side in sides if (side.contender.peer, side.contender.setting) in best]


def _left(sides: Sequence[Side], others: Iterable[Page], plan: Plan) -> dict[str, list[str]]:
    """Who would get more pairs if the run went on; nothing where all are there."""
    is_screened = all(side.n_pairs >= min(plan.n_screen, plan.n_pairs) or side.fault for side in sides)
    going = _promising(sides, others) if is_screened else sides
    unfinished = [side.contender.title for side in going if side.n_pairs < plan.n_pairs and not side.fault]
    return {"unfinished": unfinished} if unfinished else {}


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
