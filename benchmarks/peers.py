"""Other servers beside ours, on the same model file, threads, slots and cells, turn by turn.

    python -m benchmarks peers --llama-server PATH [--workloads seed-40x8,mixed-small] [--pairs 10] [--model FILE] [--backend NAME]

Each setting of a peer first gets a few pairs; those that are the best at anything go on to all of them. A pair is a pass of ours and one of
theirs, one after the other, with the same fresh requests; which goes first alternates. After every few pairs both servers are started anew
(while settings are screened, after each), since passes of one start have much in common; the first pass of a start does not count (with
`--no-warm-up` it does, after a few small requests), for no server is as it will be in service: ours finds out how its cells had better lie,
others have nothing yet in their caches. What is compared is the ratio within a pair, so that the machine's own speed cancels out, and every
figure of ours stands against the setting that is best at that figure. What was measured is written after each start, in the place of what
is kept under that name, unless it adds to that. A run that is told to end (SIGTERM, Ctrl-C) ends after the pair that it is in; one that is
told to `--add` goes on from what an earlier one has kept, so that ten pairs of a long workload can be those of several evenings.

`data` of a result:

    {"sides": [{"peer", "setting", "n_pairs", "starts", "takes_ids", "figures": {NAME: {"ours": [...], "theirs": [...]}},
                "passes": {"ours": [{...}], "theirs"}, "n_failed", "curves", "idle_cpu_share", "idle_cpu_share_ours"}],
     "best": [{"figure", "is_higher_better", "peer", "setting", "ours", "theirs", "ratio", "low", "high", "n_pairs", "verdict"}],
     "not_found": [...], "broken": {...}, "versions": {PEER: what it says of itself},
     "unfinished": ["PEER (SETTING)" that would have got more pairs, had the run gone on],
     "runs": [{"date", "revision", "seed", "n_pairs": {"PEER (SETTING)": how many of the pairs}}]}  the runs whose pairs these are
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks import results
from benchmarks.arguments import loads, model_path, positive, result_name, seconds
from benchmarks.contenders import Contender, House, cllm_serve, find_contenders, versions
from benchmarks.generator import Generator, GeneratorDied, Order
from benchmarks.matches import FAULTS, SEED_STEP, Measured, OursFailed, Plan, run_plan, told
from benchmarks.models import QUANTIZATIONS, model_file
from benchmarks.standings import N_PAIRS_FULL, Run, run_entry, unlike
from cllm.bench.metrics import Goal
from cllm.bench.workloads import OVERLOAD_FACTORS, SAMPLINGS, WORKLOADS, Workload, with_load

QUANTIZATION_OF: Final = {"seed-160x5": "Q8_0"}  # as the first cLLM had it
WITHOUT_PARALLEL: Final = "without --parallel"  # as a result has it among the options of ours
N_SCREEN: Final = 2
N_PAIRS_START: Final = 2
N_PASSES_CAPACITY: Final = 3
ENDS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # after the pair under way: servers would go on beside what comes next


# --- the command line --------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks peers", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=model_path, help="a GGUF file (default: the qwen3-0.6b shape, made on demand)")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, help="of the model that is made (default: Q4_K_M; Q8_0 for seed-160x5)")
    known = ", ".join(WORKLOADS)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help=f"names with commas between, of {known} (default: all)")
    parser.add_argument("--pairs", type=positive, default=N_PAIRS_FULL)
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
    """A comparison at one rate, and its result, which is written after each start: hours are not lost with whatever ends them."""
    plan, house = comparison.plan, comparison.house
    kept = _kept_run(asked, plan, house.model)
    before = kept["data"]["sides"] if kept else []
    plan = attrs.evolve(plan, seed=_fresh_seed(plan.seed, [run["seed"] for run in kept["data"]["runs"]] if kept else []))
    name, settings = _name(asked, plan, house.model), _settings(asked, plan, house)

    def write(data: Measured) -> Path | None:
        whole = _with_kept(kept, data, comparison.facts, ours, plan.seed)
        return results.write("peers", name, settings, whole, asked.results) if whole else None

    data = run_plan(plan, ours, comparison.contenders, write, lambda: bool(asked.ends), before)
    path = write(data)
    if path is None:
        is_complete = bool(before) and not data["broken"] and not asked.ends
        asked.missing += [] if is_complete else [plan.name]
        said = "all pairs are there already" if is_complete else "nothing was measured"
        print(f"{plan.name}: {said}, and nothing is written", flush=True)
        return
    _print_best(data)
    print(f"written: {path.name}", flush=True)


def _with_kept(kept: Run | None, data: Measured, facts: dict[str, Any], ours: Contender, seed: int) -> Measured | None:
    """`data` of the result: what was measured, with what is kept of earlier runs and was not measured again; None where nothing is new."""
    added = run_entry(results.today(), results.revision(), seed, data["sides"], kept["data"]["sides"] if kept else [])
    if not added["n_pairs"]:
        return None
    if kept is None:
        return {**data, **facts, "runs": [added]}
    # Ours is there, or nothing would have been added, and so is who has pairs.
    was_broken = {title: fault for title, fault in kept["data"].get("broken", {}).items() if title not in (ours.title, *added["n_pairs"])}
    was_unfinished = {title for title in kept["data"].get("unfinished", ()) if title not in added["n_pairs"]}
    unfinished = sorted(was_unfinished.union(data.get("unfinished", ())))
    measured = tuple({side["peer"] for side in data["sides"]})
    return {
        **{key: value for key, value in data.items() if key != "unfinished"},
        "broken": {**was_broken, **data["broken"]},
        **({"unfinished": unfinished} if unfinished else {}),
        "versions": {**kept["data"].get("versions", {}), **facts["versions"]},
        # As llama-cpp-python's server, which is named so.
        "not_found": [name for name in facts["not_found"] if not name.startswith(measured)],
        "runs": [*kept["data"]["runs"], added],
    }


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
        raise OursFailed(told(error)) from error
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
