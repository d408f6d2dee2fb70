"""What scheduling must come to, whatever else a server is compared with: python -m benchmarks promises

Each part puts load on `cllm serve` over HTTP and holds one figure against a bound that needs no other server:

    chat-turns   rows of prompts that were computed, against the text that is new; as many conversations as slots, and four times as many
    over-commit  four times the cells that there are: every request completes, with the text that it has alone
    overload     good requests a second while 0.5 to 4 times as many come as can be served (`cllm.bench.metrics.Goal`)
    two-keys     the time to the first text of a key that asks now and then, alone and while another one floods
    long         the longest gap of seven that generate when a long prompt comes
    planner      the pure planner's time for 64 sequences, on a model that takes no time

Beside them it is told how far the cost model's predictions were off, whose curve is measured anew at each start. A result is
`promises-PART.json`, whose `data` is

    {"promises": [{"workload", "figure", "value", "bound", "is_least", "is_kept"}], "details": {...}}

where `is_least` says that the bound is the least that is good, otherwise the most.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs
import trio

from benchmarks import kills, overhead, results
from benchmarks.arguments import model_path, result_name
from benchmarks.models import model_file
from benchmarks.server import ServerProcess
from cllm.bench.answers import Answer, Pass
from cllm.bench.load import closed_loop, open_loop
from cllm.bench.metrics import Goal, percentile, spread, summarize
from cllm.bench.target import Client, Dialect, Target
from cllm.bench.workloads import OVERLOAD_FACTORS, USUAL, WORKLOADS, Workload, with_load

Data: TypeAlias = dict[str, Any]

GOODPUT_LEAST: Final = 0.9  # at four times what can be served, of the best at any load
STEPS_MOST: Final = 2.0  # that the quiet key may wait longer than alone
GAP_MOST: Final = 3.0  # of the usual gaps
ERROR_MOST: Final = 0.10  # of a step's predicted time, the median
PLAN_MOST_US: Final = 100.0
N_CELLS_PART: Final = 256  # llama.cpp rounds a slot's part of the cells up to so many
QUIET, FLOOD = "quiet", "flood"  # keys
N_OVER: Final = 4  # times as many cells are wanted as there are
N_OVER_PROMPT, N_OVER_GENERATED = 32, 96
N_OVERLOAD_CELLS: Final = 16_384
N_ASKS: Final = 4000  # of a closed loop that is cut: more than are ever sent
SPARE: Final = 1.3  # times as many requests as come on average in the time of a pass


@attrs.frozen(kw_only=True)
class Sizes:
    """How much of everything."""

    n_conversations: tuple[int, ...] = (8, 32)
    n_slots: int = 8
    settled_s: float = 15.0  # of a load, before it counts
    counted_s: float = 60.0  # in 30 the most overloaded pass had seven good answers, where one more or less is a tenth of the promise
    cleared_s: float = 1.0  # between two loads, for the server to notice that the clients of the first have gone
    n_crowd: int = 16  # at once, while the capacity is measured
    n_quiet: int = 150  # enough that one wait does not decide what one in a hundred exceeds
    n_flooding: int = 64  # requests of the key that floods that are under way
    think_s: float = 0.3
    n_turns: int = 3  # of `long`
    n_prompt_late: int = 4096
    n_over_requests: int = 32
    n_planned: int = 64


@attrs.frozen(kw_only=True)
class Asked:
    """What a part is told."""

    model: Path
    n_threads: int
    seed: int
    sizes: Sizes


@attrs.frozen(kw_only=True)
class Promise:
    """One figure and its bound."""

    workload: str
    figure: str
    value: float
    bound: float
    is_least: bool = False

    def page(self) -> Data:
        """As results keep it."""
        is_kept = self.value >= self.bound if self.is_least else self.value <= self.bound
        return {**attrs.asdict(self), "is_kept": is_kept}


@attrs.frozen
class Part:
    """What a part came to."""

    promises: list[Promise]
    details: Data

    def page(self) -> Data:
        """`data` of the result."""
        return {"promises": [promise.page() for promise in self.promises], "details": self.details}


# --- a server ----------------------------------------------------------------------------------------------------------


@attrs.define
class Served:
    """Ours, and how it is asked."""

    port: int
    key: str  # that may ask for what only keys are told
    n_vocab: int = 0
    errors: list[float] = attrs.field(factory=list)  # of the cost model: the median over the last steps, after each pass

    def client(self, seed: int, key: str = "") -> Client:
        """How the requests of one pass are written."""
        target = Target(host="127.0.0.1", port=self.port, api_key=key or self.key)
        return Client(target=target, dialect=Dialect(n_vocab=self.n_vocab), sampling=USUAL, seed=seed)

    def get(self, path: str) -> str:
        """A page."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", headers={"Authorization": f"Bearer {self.key}"})
        with urllib.request.urlopen(request, timeout=10) as response:
            return str(response.read().decode())

    def metric(self, name: str) -> float:
        """A number of `/metrics`. Raises: LookupError where there is no such."""
        found = re.search(rf"^{name} (\S+)$", self.get("/metrics"), re.MULTILINE)
        if found is None:
            raise LookupError(f"/metrics tells no {name}")
        return float(found[1])

    def note_error(self) -> None:
        """Keep how far off the cost model is now."""
        self.errors.append(self.metric("cllm_step_prediction_error_median"))

    def promise(self, workload: str, where: str = "") -> Promise:
        """That it is not far off."""
        return Promise(workload=workload, figure=f"cost model: median error{where}", value=statistics.median(self.errors), bound=ERROR_MOST)


@contextmanager
def serving(asked: Asked, *options: str, key: str = "") -> Iterator[Served]:
    """`cllm serve` as it comes, but for `options`; what steps cost is measured anew."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = ["--threads", str(asked.n_threads), "--calibration-dir", folder]
        with ServerProcess(str(asked.model), [*fixed, *options]) as server:
            served = Served(server.port, key)
            (model, *_) = json.loads(served.get("/v1/models"))["data"]
            served.n_vocab = int(model["meta"]["n_vocab"])
            warm_up = Workload(name="warm-up", n_requests=4, concurrency=4, n_prompt=(8, 16), n_generated=(4, 4))
            trio.run(closed_loop, served.client(0), warm_up.make(served.n_vocab, asked.seed - 1), 4)
            yield served


def sized(n_slots: int, n_cells: int) -> tuple[str, ...]:
    """So many slots, and cells of which each has an equal round part."""
    part = -(-n_cells // n_slots)
    return "--parallel", str(n_slots), "--ctx-size", str(n_slots * N_CELLS_PART * -(-part // N_CELLS_PART))


def told(line: str) -> None:
    """Tell who watches."""
    print(f"  {line}", file=sys.stderr, flush=True)


# --- conversations -----------------------------------------------------------------------------------------------------


def chat_turns(asked: Asked) -> Part:
    """Conversations whose turns begin with all that was said before."""
    sizes, usual = asked.sizes, WORKLOADS["chat-turns"]
    promises: list[Promise] = []
    passes: list[Data] = []
    with serving(asked, *sized(sizes.n_slots, with_load(usual, concurrency=sizes.n_slots).cells())) as served:
        for number, n in enumerate(sizes.n_conversations):
            work = with_load(usual, concurrency=n).make(served.n_vocab, asked.seed + number)
            n_before = served.metric("cllm_prefill_rows_total")
            done = trio.run(closed_loop, served.client(asked.seed + number), work, n)
            done.check(work.asks)
            n_computed = served.metric("cllm_prefill_rows_total") - n_before
            n_new = sum(len(chain[-1].prompt) for chain in work.chains)  # each turn's prompt begins with the last one's
            served.note_error()
            what = f"chat-turns, {n} in {sizes.n_slots} slots"
            promises.append(Promise(workload=what, figure="rows of prompts computed, of new text", value=n_computed / n_new, bound=1.0))
            one = {"n_conversations": n, "n_rows_computed": n_computed, "n_tokens_new": n_new, "tokens_per_s": done.tokens_per_s}
            passes.append({**one, "n_prompt": sum(len(ask.prompt) for ask in work.asks), "ttft_s": attrs.asdict(spread(done.ttfts_s))})
            told(f"{what}: {n_computed:.0f} rows of prompts for {n_new} new tokens, {done.tokens_per_s:.1f} tokens/s")
        promises.append(served.promise("chat-turns"))
    return Part(promises, {"passes": passes, "prediction_errors": served.errors})


# --- too few cells -----------------------------------------------------------------------------------------------------


def over_commit(asked: Asked) -> Part:
    """Requests that want four times the cells, on the demo model in settings in which texts can be compared."""
    n, n_prompt, n_generated = asked.sizes.n_over_requests, N_OVER_PROMPT, N_OVER_GENERATED
    n_cells = n * (n_prompt + n_generated) // N_OVER
    with kills.exact_model() as (model, options):
        exact = attrs.evolve(asked, model=model)
        with serving(exact, *options, "--parallel", str(n), "--ctx-size", str(n_cells)) as served:
            n_preempted = -served.metric("cllm_preemptions_total")
            together, alone = trio.run(_over_commit, served, n)
            n_preempted += served.metric("cllm_preemptions_total")
    n_complete = sum((one.finish_reason, one.n_tokens) == ("length", n_generated) for one in together)
    n_same = sum(one.text == other.text for one, other in zip(together, alone, strict=True))
    told(f"over-commit: {n_complete} complete, {n_same} as alone, of {n}; {n_preempted:.0f} preemptions")
    promises = [
        Promise(workload="over-commit, 4 times the cells", figure=figure, value=value / n, bound=1.0, is_least=True)
        for figure, value in (("requests complete", n_complete), ("texts as alone", n_same))
    ]
    sizes = {"n_requests": n, "n_cells": n_cells, "n_cells_wanted": n * (n_prompt + n_generated)}
    return Part(promises, {**sizes, "n_complete": n_complete, "n_same": n_same, "n_preempted": n_preempted})


async def _over_commit(served: Served, n: int) -> tuple[list[kills.Streamed], list[kills.Streamed]]:
    """Everybody's stream in company, then alone; every other one is greedy."""
    work = Workload(name="over-commit", n_requests=n, concurrency=n, n_prompt=(N_OVER_PROMPT,) * 2, n_generated=(N_OVER_GENERATED,) * 2)
    target, asks = served.client(0).target, work.make(served.n_vocab, 1).asks

    def requests(salt: str) -> list[bytes]:  # by the salt, nobody finds what another computed
        more = {"max_tokens": N_OVER_GENERATED, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        bodies = [{"prompt": ask.prompt, "temperature": float(i % 2), "seed": i, "cache_salt": salt, **more} for i, ask in enumerate(asks)]
        coded = [json.dumps(body).encode() for body in bodies]
        return [target.head("POST", kills.PATH, len(body)) + body for body in coded]

    together = await kills.streams_of(target, requests("together"))
    alone = [one for request in requests("alone") for one in await kills.streams_of(target, [request])]
    return together, alone


# --- overload ----------------------------------------------------------------------------------------------------------


def overload(asked: Asked) -> Part:
    """More requests than can be served, for as long as it takes to see what becomes of it; what has not ended then is given up."""
    goal = Goal()
    passes: list[Data] = []
    with serving(asked, "--ctx-size", str(N_OVERLOAD_CELLS)) as served:
        capacity = within(trio.run(_crowd, served, asked), asked, goal)["requests_per_s"]
        told(f"capacity: {capacity:.2f} requests/s")
        for number, factor in enumerate(OVERLOAD_FACTORS, 1):
            time.sleep(asked.sizes.cleared_s)
            done = trio.run(_overload, served, asked, number, factor * capacity)
            served.note_error()
            figures = within(done, asked, goal)
            passes.append({"factor": factor, "rate": factor * capacity, **figures})
            told(f"{factor:g} x: {figures['goodput_per_s']:.2f} good of {figures['requests_per_s']:.2f} requests/s")
    best = max(one["goodput_per_s"] for one in passes)
    ratio = passes[-1]["goodput_per_s"] / best if best else 0.0
    what = f"overload, {OVERLOAD_FACTORS[-1]:g} times what can be served"
    promise = Promise(workload=what, figure="good requests, of the best at any load", value=ratio, bound=GOODPUT_LEAST, is_least=True)
    details = {"capacity_per_s": capacity, "goal": attrs.asdict(goal), "passes": passes, "prediction_errors": served.errors}
    return Part([promise, served.promise("overload")], details)


def within(done: Pass, asked: Asked, goal: Goal) -> Data:
    """The figures of what ended while a load counted."""
    start_s, counted_s = asked.sizes.settled_s, asked.sizes.counted_s
    answers = [answer for answer in done.answers if start_s <= answer.ended_at < start_s + counted_s]
    page = summarize(attrs.evolve(done, wall_s=counted_s, answers=answers), goal).page()
    return {name: page[name] for name in ("requests_per_s", "goodput_per_s", "tokens_per_s", "n_failed", "failures", "ttft_s", "itl_s")}


async def _crowd(served: Served, asked: Asked) -> Pass:
    """As many requests as keep the model busy."""
    sizes = asked.sizes
    work = with_load(WORKLOADS["overload"], n_requests=N_ASKS).make(served.n_vocab, asked.seed)
    scope = trio.CancelScope(deadline=trio.current_time() + sizes.settled_s + sizes.counted_s)
    return await closed_loop(served.client(asked.seed), work, sizes.n_crowd, scope=scope)


async def _overload(served: Served, asked: Asked, number: int, rate: float) -> Pass:
    whole_s = asked.sizes.settled_s + asked.sizes.counted_s
    seed = asked.seed + number
    work = with_load(WORKLOADS["overload"], n_requests=int(SPARE * rate * whole_s) + 1).make(served.n_vocab, seed)
    scope = trio.CancelScope(deadline=trio.current_time() + whole_s)
    return await open_loop(served.client(seed * N_ASKS), work, rate, seed=seed, scope=scope)


# --- two keys ----------------------------------------------------------------------------------------------------------


def two_keys(asked: Asked) -> Part:
    """A key that asks now and then, alone and beside one that floods."""
    keys = [option for key in (QUIET, FLOOD) for option in ("--api-key", key)]
    with serving(asked, "--ctx-size", str(N_OVERLOAD_CELLS), *keys, key=QUIET) as served:
        alone = trio.run(_quiet, served, asked, 1)
        told(f"alone: {_line(alone.ttfts_s)}")
        time.sleep(asked.sizes.cleared_s)
        beside, flood = trio.run(_beside_flood, served, asked)
        served.note_error()
    gaps_s = gaps_since(asked.sizes.settled_s, flood)  # whoever runs gets a token with every step
    steps = spread(gaps_s)
    told(f"beside: {_line(beside.ttfts_s)}; steps: {_line(gaps_s)}")
    ttfts = {"alone": spread(alone.ttfts_s), "beside": spread(beside.ttfts_s)}
    assert ttfts["alone"].p99, "nobody asked alone"
    assert ttfts["beside"].p99, "nobody asked beside the flood"
    assert steps.p50, "the flood showed no steps"
    assert steps.p99
    more_s = ttfts["beside"].p99 - ttfts["alone"].p99
    what = f"two keys, one with {asked.sizes.n_flooding} requests under way"
    promises = [
        Promise(
            workload=what, figure=f"p99 of the quiet key's first text over that alone, in {name}", value=more_s / step_s, bound=STEPS_MOST
        )
        for name, step_s in (("steps (median)", steps.p50), ("long steps (p99)", steps.p99))
    ]
    details = {"step_s": attrs.asdict(steps), "n_quiet": len(beside.answers), "n_flood_gaps": len(gaps_s)}
    details |= {f"ttft_{name}_s": attrs.asdict(ttft) for name, ttft in ttfts.items()}
    return Part([*promises, served.promise("two keys")], {**details, "prediction_errors": served.errors})


async def _quiet(served: Served, asked: Asked, number: int) -> Pass:
    quiet = Workload(name=QUIET, n_requests=asked.sizes.n_quiet, concurrency=1, n_prompt=(32, 32), n_generated=(8, 8))
    seed = asked.seed + number
    done = await closed_loop(served.client(seed, QUIET), quiet.make(served.n_vocab, seed), 1, think_s=asked.sizes.think_s)
    done.check(quiet.make(served.n_vocab, seed).asks)
    return done


async def _beside_flood(served: Served, asked: Asked) -> tuple[Pass, Pass]:
    """The quiet key's requests once the flood has settled, and the flood's, which shows its steps before it is given up."""
    scope, passes = trio.CancelScope(), {}
    work = with_load(WORKLOADS["overload"], n_requests=N_ASKS).make(served.n_vocab, asked.seed + 3)

    async def flood() -> None:
        passes[FLOOD] = await closed_loop(served.client(asked.seed + 3, FLOOD), work, asked.sizes.n_flooding, scope=scope)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(flood)
        await trio.sleep(asked.sizes.settled_s)
        began_at = trio.current_time()
        passes[QUIET] = await _quiet(served, asked, 2)
        await trio.sleep_until(began_at + asked.sizes.counted_s)  # few quiet requests may be answered before the flood has its first texts
        scope.cancel()
    return passes[QUIET], passes[FLOOD]


def gaps_since(at: float, done: Pass) -> list[float]:
    """The times between two texts that began no sooner, of answers that were given up in the end, too, seconds."""
    pairs = (pair for answer in done.answers for pair in itertools.pairwise(answer.chunks_at))
    return [b - a for a, b in pairs if a >= at]


def _line(seconds: Sequence[float]) -> str:
    one = spread(seconds)
    return "  ".join(f"{name} {1000 * value:.0f} ms" for name in ("p50", "p90", "p99", "max") if (value := getattr(one, name)) is not None)


# --- a long prompt among short ones ------------------------------------------------------------------------------------


def long_among_short(asked: Asked) -> Part:
    """Seven that generate, alone and with a long prompt that comes then: in a pool of cells, and in parts that hold the prompt."""
    workload = attrs.evolve(WORKLOADS["long-among-short"], n_prompt_late=asked.sizes.n_prompt_late)
    n_slots = workload.concurrency + 1
    layouts = {"a pool": ("unified", workload.cells()), "parts": ("streams", n_slots * workload.n_longest())}
    turns: list[Data] = []
    promises: list[Promise] = []
    for layout, (kv, n_cells) in layouts.items():
        with serving(asked, *sized(n_slots, n_cells), "--kv", kv) as served:
            some = [_long_turn(asked, served, workload, asked.seed + 2 * number) for number in range(asked.sizes.n_turns)]
        for what, name in (("longest gap of the others", "longest_s"), ("gap that one in a hundred exceeds", "beside_p99_s")):
            value = max(turn[name] / turn["usual_s"] for turn in some)
            figure = f"{what}, in usual steps, cells in {layout}"
            promises.append(Promise(workload="long-among-short", figure=figure, value=value, bound=GAP_MOST))
        promises.append(served.promise("long-among-short", f", cells in {layout}"))
        turns += [{"cells": layout, **turn} for turn in some]
    return Part(promises, {"turns": turns})


def _long_turn(asked: Asked, served: Served, workload: Workload, seed: int) -> Data:
    passes = []
    for i, n_late in enumerate((0, workload.n_prompt_late)):  # from seeds of their own, so that neither finds the other's prompts
        work = attrs.evolve(workload, n_prompt_late=n_late).make(served.n_vocab, seed + i)
        done = trio.run(closed_loop, served.client(seed + i), work, workload.concurrency)
        done.check(work.asks)
        served.note_error()
        passes.append(done)
    turn = turn_of(*passes)
    told("  ".join(f"{name} {value:.3g}" for name, value in turn.items()))
    return turn


def turn_of(alone: Pass, done: Pass) -> Data:
    """The gaps of those who generate, in seconds.

    Usual ones are all that they have `alone`, where their texts become as long as with the long prompt, and their steps with them. In
    `done` they begin or end while it is computed.
    """
    *others, late = done.answers
    assert late.ttft_s is not None, "every answer of the fake has text"
    first_at = late.sent_at + late.ttft_s
    usual = [b - a for a, b in _gaps(alone.answers)]
    beside = [b - a for a, b in _gaps(others) if b > late.sent_at and a < first_at]
    return {
        "usual_s": statistics.median(usual),
        "usual_p99_s": percentile(sorted(usual), 0.99),
        "usual_max_s": max(usual),  # what the machine makes of a step that nothing disturbs
        "before_s": statistics.median(b - a for a, b in _gaps(others) if b <= late.sent_at),  # while their texts are short
        "beside_p50_s": statistics.median(beside),
        "beside_p99_s": percentile(sorted(beside), 0.99),
        "longest_s": max(beside),
        "late_ttft_s": late.ttft_s,
    }


def _gaps(answers: Sequence[Answer]) -> list[tuple[float, float]]:
    return [pair for answer in answers for pair in zip(answer.chunks_at, answer.chunks_at[1:], strict=False)]


# --- the planner -------------------------------------------------------------------------------------------------------


def planner(asked: Asked) -> Part:
    """`StepScheduler.plan` alone, and what settles a step: of sequences that all generate, and with prompts and others waiting."""
    n = asked.sizes.n_planned
    n_prompts = n // overhead.N_SEQUENCES_A_PROMPT
    steps = {
        f"us to plan a step of {n} sequences": ("", overhead.pure_us),
        f"us to plan a step of {n - n_prompts} that generate and {n_prompts} prompts, while {n} wait": ("_mixed", overhead.mixed_us),
    }
    promises, details = [], {}
    for (step, (kind, measure)), memory in itertools.product(steps.items(), overhead.MEMORIES):
        figure, suffix = f"{step}, cells in {memory}", f"{kind}_{memory.split()[-1]}"
        turns = [measure(n, memory) for _ in range(asked.sizes.n_turns)]
        plan_us, apply_us = (statistics.median(values) for values in zip(*turns, strict=True))
        told(f"planner: {plan_us:.1f} {figure}, {apply_us:.1f} to settle it")
        promises.append(Promise(workload="planner", figure=figure, value=plan_us, bound=PLAN_MOST_US))
        details |= {f"plan{suffix}_us": [plan for plan, _ in turns], f"apply{suffix}_us": [apply for _, apply in turns]}
    return Part(promises, details)


# --- the command -------------------------------------------------------------------------------------------------------

PARTS: Final[dict[str, Callable[[Asked], Part]]] = {
    "chat-turns": chat_turns,
    "over-commit": over_commit,
    "overload": overload,
    "two-keys": two_keys,
    "long": long_among_short,
    "planner": planner,
}
OWN_MODEL: Final = {"over-commit": {"name": "demo, F32"}, "planner": {"name": "a fake one"}}  # whatever model is asked for


def run(name: str, asked: Asked, folder: Path, label: str | None = None) -> Data:
    """Do one part, keep its result, and return its `data`."""
    print(f"{name}:", file=sys.stderr, flush=True)
    data = PARTS[name](asked).page()
    settings = {"model": OWN_MODEL.get(name) or results.model_facts(asked.model), "n_threads": asked.n_threads, "seed": asked.seed}
    results.write("promises", "-".join(filter(None, (name, label))), {**settings, "sizes": attrs.asdict(asked.sizes)}, data, folder)
    return data


def main(arguments: Sequence[str] | None = None) -> None:
    """Do the parts that are asked for, and tell what is kept of what was promised."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks promises", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=model_path, help="a GGUF file (default: the qwen3-0.6b shape in Q4_K_M, made on demand)")
    known = ", ".join(PARTS)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"names with commas between, of {known} (default: all)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--label", type=result_name, help="goes into the names of the results")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="the folder of the results")
    told_to = parser.parse_args(arguments)
    names = told_to.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise SystemExit(f"no part {unknown[0]}; there are {', '.join(PARTS)}")
    model = told_to.model or model_file("qwen3-0.6b", "Q4_K_M")
    asked = Asked(model=model, n_threads=told_to.threads, seed=told_to.seed, sizes=Sizes())
    for name in names:
        for promise in run(name, asked, told_to.results, told_to.label)["promises"]:
            bound = f"at {'least' if promise['is_least'] else 'most'} {promise['bound']:g}"
            print(
                f"{'kept' if promise['is_kept'] else 'MISSED':6} {promise['workload']}: {promise['figure']} {promise['value']:.3g}, {bound}"
            )


if __name__ == "__main__":
    main()
