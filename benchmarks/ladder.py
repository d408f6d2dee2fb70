"""What each layer costs over the one below, on a real model: python -m benchmarks ladder

The stages (`benchmarks.stages`) run the same requests turn by turn, each turn in a random order and every second one in that of the last
backwards, so that the machine's own drift meets all of them alike. For each start, model and server are loaded anew, since starts differ by
more than turns of one do; what warms up then is a whole answer of each sequence. A stage's ratio is to the bare loop of the same turn. The
last two are no layers above the others: what `isolated` costs is told beside `loop`, and `replay`, beside `native`, tells how much of what
`sse` loses is due to the batches that it computes. Every pass is counted at the entry points of its layers
(`benchmarks.layers`), and one that did not pass through them ends the run.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks import results, stages
from benchmarks.arguments import model_path, numbers, positive, result_name
from benchmarks.layers import REPLAY, Counter
from benchmarks.models import QUANTIZATIONS, model_file
from benchmarks.replay import RecordedStage, ReplayStage, second_context
from benchmarks.serving import CountedServer
from benchmarks.stages import Ran, Stage, Work, run_checked
from benchmarks.workload import GREEDY, PLAIN, USUAL, Ask, Sampling, seed_workload
from cllm.bench.workloads import id_range
from cllm.config import Settings
from cllm.serve.loading import load
from cllm.serve.logs import configure_logging

SAMPLINGS: Final = {"greedy": (GREEDY,), "all": (GREEDY, PLAIN, USUAL), "plain": (PLAIN,), "usual": (USUAL,)}
STAGES: Final = ("native", "backend", "sampling", "engine", "loop", "app", "http", "sse", "client", "isolated", REPLAY)
BESIDE: Final = {"isolated": "loop", REPLAY: "native"}  # which stage another one is compared with, where that is not the one below
REPLAYED: Final = "sse"  # whose calls `replay` makes again
SERVED: Final = frozenset({"http", "sse", "client"})  # by a server of their own
COMPUTED: Final = ("native", "sampling")  # layers that compute what a step is for
WARM_UP: Final = -1  # in the place of a turn's number
BESIDE_THOSE: Final = "rest"  # of a step, which is in no layer that is timed


@attrs.define(kw_only=True)
class Measured:
    """One stage's turns."""

    number: int
    stage: Stage
    passes: list[Ran] = attrs.field(factory=list)

    @property
    def tokens_per_s(self) -> list[float]:
        """Turn by turn."""
        return [ran.n_tokens / ran.wall_s for ran in self.passes]

    def page(self, floor: Measured, below: Measured | None) -> dict[str, Any]:
        """The stage's figures, as results keep them."""
        ratios = [own / bare for own, bare in zip(self.tokens_per_s, floor.tokens_per_s, strict=True)]
        page: dict[str, Any] = {
            "number": self.number,
            "name": self.stage.name,
            "adds": self.stage.adds,
            "tokens_per_s": self.tokens_per_s,
            "n_steps": [ran.n_steps for ran in self.passes],
            "ratios": ratios,
            "ratio": spread(ratios),
            "counts": {gate: count for gate, count in self.passes[-1].counts.items() if count},
        }
        page |= self._cores()
        page["spent_us_per_step"] = {part: statistics.median(costs) for part, costs in self._spent().items()}
        if below is not None:
            per_token, per_step = _costs(self.passes, below.passes, "n_tokens"), _costs(self.passes, below.passes, "n_steps")
            page |= {"us_per_token": statistics.median(per_token), "us_per_token_spread": spread(per_token)}
            page |= {"us_per_step": statistics.median(per_step), "us_per_step_spread": spread(per_step)}
            page["more_us_per_step"] = self.more_than(below)
            if self.stage.name in BESIDE:
                page["beside"] = below.stage.name
        return page

    def more_than(self, other: Measured) -> dict[str, dict[str, float]]:
        """Microseconds of a step over another stage's, by part: the spread over the turns."""
        own_us, other_us = self._spent(), other._spent()
        return {
            part: spread([own - less for own, less in zip(values, other_us[part], strict=True)])
            for part, values in own_us.items()
            if part in other_us
        }

    def _spent(self) -> dict[str, list[float]]:
        """Microseconds of a step, turn by turn, that its calls into the layers below took, and what is left beside them."""
        parts: dict[str, list[float]] = {}
        for ran in self.passes:
            if not any(ran.seconds[layer] for layer in COMPUTED):  # in another process
                continue
            us = 1e6 / ran.n_steps
            for layer, seconds in ran.seconds.items():
                parts.setdefault(layer, []).append(seconds * us)
            parts.setdefault(BESIDE_THOSE, []).append((ran.wall_s - sum(ran.seconds.values())) * us)
        return parts

    def _cores(self) -> dict[str, float]:
        """What of a step the threads that compute waited for a core, and what others spent, microseconds, as far as it is known."""
        cores = [(ran.cores, 1e6 / ran.n_steps) for ran in self.passes if ran.cores is not None and ran.n_steps]
        clients = [1e6 * ran.client_cpu_s / ran.n_steps for ran in self.passes if ran.client_cpu_s is not None and ran.n_steps]
        page = {}
        if cores:
            page["waiting_us_per_step"] = statistics.median(one.waiting_s * us for one, us in cores)
            page["others_us_per_step"] = statistics.median(one.others_s * us for one, us in cores)
        if clients:
            page["client_us_per_step"] = statistics.median(clients)
        return page


def _costs(passes: Sequence[Ran], below: Sequence[Ran], per: str) -> list[float]:
    """Microseconds over the stage below, turn by turn, for each token or step."""
    return [(own.wall_s / getattr(own, per) - less.wall_s / getattr(less, per)) * 1e6 for own, less in zip(passes, below, strict=True)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


# --- the stages --------------------------------------------------------------------------------------------------------


@contextmanager
def open_stages(model: Path, options: list[str], settings: Settings, names: Sequence[str]) -> Iterator[tuple[int, list[Stage]]]:
    """Load the model here, start a server on it, and give the vocabulary's size and the stages by number; names say which."""
    with ExitStack() as opened:
        bench = opened.enter_context(_open_bench(settings))
        n_vocab = bench.model.vocabulary.n_tokens
        inner: list[Callable[[], Stage]] = [
            lambda: stages.NativeStage(bench),
            lambda: stages.BackendStage(bench),
            lambda: stages.SamplingStage(bench),
            lambda: stages.EngineStage(bench),
            lambda: stages.LoopStage(bench),
            lambda: stages.AppStage(bench),
        ]
        chosen: list[Stage] = [make() for make, name in zip(inner, STAGES, strict=False) if name in names]
        if "isolated" in names:
            chosen.append(stages.isolated_stage(opened.enter_context(_open_bench(attrs.evolve(settings, isolate=True)))))
        if SERVED & set(names):
            server = opened.enter_context(CountedServer(str(model), options, records_calls=REPLAY in names))
            n = settings.threads or 1
            chosen += [stages.http_stage(server, n), stages.sse_stage(server, n), stages.ClientStage(server, Counter(("client",)), n)]
            if REPLAY in names:
                server.calls()  # of its load, which has left no cells
                chosen[-2] = recorded = RecordedStage(chosen[-2], server)
                chosen.append(ReplayStage(bench, opened.enter_context(second_context(bench.model)), recorded))
        yield n_vocab, sorted((stage for stage in chosen if stage.name in names), key=lambda stage: STAGES.index(stage.name))


@contextmanager
def _open_bench(settings: Settings) -> Iterator[stages.Bench]:
    with ThreadPoolExecutor(1) as thread:  # which ends before a stage's own computes: see `Bench.timed`
        loaded = thread.submit(load, settings, lambda _share: True).result()
    try:
        yield stages.Bench(loaded.step_model, settings, Counter(), loaded.cost)
    finally:
        loaded.close()


def found(names: Sequence[str]) -> list[str]:
    """The stages that can be measured here: the last one needs a package that nothing else does."""
    return [name for name in names if name != "client" or importlib.util.find_spec("openai") is not None]


def work_of(asks: Sequence[Ask], number: int, n_vocab: int, **fields: Any) -> Work:
    """The requests of a turn for one stage. `number` tells them from others': each prompt begins with another pair of tokens, so that none
    is the beginning of one that was computed before.
    """
    low, high = id_range(n_vocab)
    numbers = range(number, number + len(STAGES) * len(asks), len(STAGES))
    begins = [(low + one % (high - low), low + one // (high - low) % (high - low)) for one in numbers]
    told = [attrs.evolve(ask, prompt=(*begin, *ask.prompt[2:])[: len(ask.prompt)]) for begin, ask in zip(begins, asks, strict=True)]
    return Work(asks=told, **fields)


# --- a run -------------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace, keep: Callable[[dict[str, Any]], object] = lambda _data: None) -> dict[str, Any]:
    """Measure; return `data` of the result (`benchmarks.results`). After each rung `keep` gets what there is, so that a fault or a Ctrl-C
    in the next, an hour later, costs that one only. Raises: Bypassed when a stage went round a layer.
    """
    configure_logging(Settings(log_level="warning"))
    names = found(arguments.stages)
    missing = [name for name in arguments.stages if name not in names]
    for name in missing:
        tell(f"stage {name}: its package is not installed, so it is left out")
    rungs: list[dict[str, Any]] = []
    serials = itertools.count()
    for concurrency in arguments.concurrency:
        for sampling in SAMPLINGS[arguments.sampling]:
            measured, starts = _measured(arguments, names, concurrency, sampling, serials)
            rung = {"concurrency": concurrency, "sampling": sampling.name, "stages": pages_of(measured), "starts": starts}
            rungs.append({**rung, "not_found": missing})
            show(rungs[-1])
            keep({"rungs": [*rungs]})
    return {"rungs": rungs}


def _measured(
    arguments: argparse.Namespace, names: Sequence[str], concurrency: int, sampling: Sampling, serials: Iterator[int]
) -> tuple[list[Measured], list[int]]:
    """All turns of a rung, and by which start of model and server each was measured."""
    measured: list[Measured] = []
    starts: list[int] = []
    while len(starts) < arguments.turns:
        with open_stages(Path(arguments.model), *_sizes(arguments), names) as (n_vocab, chosen):
            measured = measured or [Measured(number=STAGES.index(stage.name), stage=stage) for stage in chosen]
            for one, stage in zip(measured, chosen, strict=True):
                one.stage = stage
            _turn(arguments, measured, n_vocab, concurrency, sampling, WARM_UP, next(serials))
            start, n_left = len(set(starts)), arguments.turns - len(starts)
            for _ in range(min(arguments.turns_a_start, n_left)):
                _turn(arguments, measured, n_vocab, concurrency, sampling, len(starts), next(serials))
                starts.append(start)
    return measured, starts


def _sizes(arguments: argparse.Namespace) -> tuple[list[str], Settings]:
    """The same for all stages, as options of a server and as settings.

    Nothing is kept on the host. What has served for a while has seen that nobody asks for it and keeps nothing either; a scheduler that is
    made for one pass has not.
    """
    fields: dict[str, Any] = {name: getattr(arguments, name) for name in ("ctx_size", "threads", "row_budget", "kv")}
    fields["parallel"] = max(arguments.concurrency)  # named, so that a served stage lets no fewer run at once for the sake of short gaps
    fields["host_cache_mb"] = 0
    options = [part for name, value in fields.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return options, Settings(str(arguments.model), **fields)


def _turn(
    arguments: argparse.Namespace, measured: list[Measured], n_vocab: int, concurrency: int, sampling: Sampling, turn: int, serial: int
) -> None:
    """One pass of each stage. `serial` counts all turns of the run: each has prompts of its own, which no server has cached."""
    seed = arguments.seed + 10_000 * serial
    n_requests = concurrency if turn == WARM_UP else arguments.requests
    asks = seed_workload(n_requests, n_prompt=arguments.prompt, n_generated=arguments.generated, n_vocab=n_vocab, seed=seed)
    for one in in_turn(measured, arguments.seed, turn):
        number = one.number + len(STAGES) * len(asks) * serial
        ran = run_checked(one.stage, work_of(asks, number, n_vocab, concurrency=concurrency, sampling=sampling, seed=seed))
        if turn != WARM_UP:
            one.passes.append(ran)
            tell(f"concurrency {concurrency:3} {sampling.name:16} turn {turn} {one.stage.name:9} {one.tokens_per_s[-1]:9.1f} tokens/s")


def in_turn(measured: Sequence[Measured], seed: int, turn: int) -> list[Measured]:
    """The stages in a random order, and in every second turn in the last one's backwards: then a drift of the machine meets all alike.

    What warms up comes in the ladder's own order, so that what makes another stage's calls again has none of them left.
    """
    if turn == WARM_UP:
        return list(measured)
    order = random.Random(f"order {seed} {turn // 2}").sample(measured, len(measured))
    return order[::-1] if turn % 2 else order


def pages_of(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """The stages' figures from the floor up, each over the one below or the one that it stands beside, if that was measured."""
    by_name = {one.stage.name: one for one in measured}
    before = [None, *measured[:-1]]
    pages = [
        one.page(measured[0], by_name.get(BESIDE[one.stage.name]) if one.stage.name in BESIDE else below)
        for one, below in zip(measured, before, strict=True)
    ]
    if REPLAY in by_name:
        page = next(page for page in pages if page["name"] == REPLAYED)
        page["more_us_per_step_than_replay"] = by_name[REPLAYED].more_than(by_name[REPLAY])
    return pages


def tell(line: str) -> None:
    """Say how far the run is."""
    print(line, file=sys.stderr, flush=True)


def show(rung: dict[str, Any]) -> None:
    """Print a table."""
    print(f"\nconcurrency {rung['concurrency']}, {rung['sampling']}: each stage over the one below, medians; ratio to the first stage\n")
    print(f"{'stage':11} {'tokens/s':>9} {'us/token':>9} {'us/step':>9} {'steps':>6}  {'ratio':>6} {'least':>6} {'most':>6}")
    for page in rung["stages"]:
        speed, n_steps, ratio = statistics.median(page["tokens_per_s"]), statistics.median(page["n_steps"]), page["ratio"]
        costs = f"{page['us_per_token']:9.1f} {page['us_per_step']:9.1f}" if "us_per_token" in page else " " * 19
        beside = f"  over {page['beside']}" if "beside" in page else ""
        print(
            f"{page['number']:<2} {page['name']:8} {speed:9.1f} {costs} {n_steps:6.0f}  "
            f"{ratio['median']:6.3f} {ratio['min']:6.3f} {ratio['max']:6.3f}{beside}",
            flush=True,
        )


# --- the command -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a ladder."""
    parser.add_argument("--model", type=model_path, help="a GGUF file (default: the qwen3-0.6b shape, made on demand)")
    parser.add_argument("--quantization", default="Q4_K_M", choices=QUANTIZATIONS, help="of the default model")
    parser.add_argument("--concurrency", type=numbers, default=[1, 8, 16], help="as in 1,8,16")
    parser.add_argument("--sampling", default="greedy", choices=sorted(SAMPLINGS), help="plain: temperature 1; usual: 0.8 / 0.95 / 40")
    parser.add_argument("--turns", type=positive, default=4, help="an even number meets a drift of the machine best")
    parser.add_argument("--turns-a-start", type=positive, default=1, help="after which model and server are loaded anew")
    parser.add_argument("--requests", type=positive, default=40)
    parser.add_argument("--prompt", type=positive, default=32, help="tokens of each prompt")
    parser.add_argument("--generated", type=positive, default=50, help="tokens of each answer")
    parser.add_argument("--stages", type=stage_names, default=list(STAGES), help="as in native,engine,sse; the first is the floor")
    parser.add_argument("--ctx-size", type=positive, default=4096)
    parser.add_argument("--row-budget", type=positive, default=512)
    parser.add_argument("--kv", choices=["unified", "streams"], default="unified", help="the layout, which is to be the same at all stages")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", type=result_name, help="of the result (default: seed-40x8, and what is not as usual)")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="the folder of the results")


TOLD_IN_NAME: Final[dict[str, Callable[[Any], str]]] = {  # options that make another ladder, and how its name says so
    "concurrency": lambda numbers: f"c{'-'.join(map(str, numbers))}",
    "sampling": str,
    "stages": "-".join,
    "threads": "{}-threads".format,
    "kv": str,
    "ctx_size": "{}-cells".format,
    "row_budget": "{}-rows".format,
}


def stage_names(text: str) -> list[str]:
    """Stages in the order of the ladder."""
    names = text.split(",")
    if unknown := sorted(set(names) - set(STAGES)):
        raise argparse.ArgumentTypeError(f"no stage {unknown[0]}; there are {', '.join(STAGES)}")
    return [name for name in STAGES if name in names]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print tables, keep the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser)
    asked = parser.parse_args(arguments)
    if max(asked.concurrency) > asked.requests:
        parser.error(f"--requests: {max(asked.concurrency)} at a time are more than {asked.requests}")
    most = max(asked.concurrency) * (asked.prompt + asked.generated)
    if most > asked.ctx_size:
        parser.error(f"--ctx-size: {max(asked.concurrency)} sequences of {asked.prompt} and {asked.generated} tokens take {most} cells")
    if REPLAY in asked.stages and not {BESIDE[REPLAY], REPLAYED} <= set(asked.stages):
        parser.error(f"--stages: {REPLAY} makes the calls of {REPLAYED} again beside {BESIDE[REPLAY]}, which have to be among them")
    if not found(asked.stages):
        parser.error(f"--stages: {', '.join(asked.stages)} needs a package that is not installed")
    name = asked.name or usual_name(asked)
    asked.model = str(asked.model or model_file("qwen3-0.6b", asked.quantization))
    told = {key: value for key, value in vars(asked).items() if key != "results"}
    settings = {**told, "name": name, "model": results.model_facts(Path(asked.model))}
    unfinished = f"{name}-unfinished"  # in the place of nothing that is whole
    data = run(asked, lambda data: results.write("ladder", unfinished, {**settings, "name": unfinished}, data, asked.results))
    path = results.write("ladder", name, settings, data, asked.results)
    results.remove("ladder", unfinished, asked.results)
    print(f"\nkept in {path.name}")


def usual_name(asked: argparse.Namespace) -> str:
    """What a result is called, so that one of another model, or of another load, stages or settings, does not take its place."""
    model = asked.model.stem if asked.model else "" if asked.quantization == "Q4_K_M" else asked.quantization
    load = asked.requests, asked.prompt, asked.generated
    usual = argparse.ArgumentParser()
    add_arguments(usual)
    other = [told(getattr(asked, key)) for key, told in TOLD_IN_NAME.items() if getattr(asked, key) != usual.get_default(key)]
    return "-".join(filter(None, ("seed-40x8" if load == (40, 32, 50) else "{}-requests-of-{}-and-{}".format(*load), model, *other)))


if __name__ == "__main__":
    main()
