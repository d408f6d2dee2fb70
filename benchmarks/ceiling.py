"""What the layers above a model can carry: tokens/s, requests/s and CPU time on fake models that cost nothing: python -m benchmarks stack

Three fakes: `instant`, greedy on a small vocabulary, shows the price of a token in each layer; `gpu` takes 2 ms for 64 rows and gives 152k
logits a row, of which top_p 0.95 draws: what a fast device would meet; `gpu-draws` draws in these 2 ms, so that no logits leave it. The
server has a process of its own, and so has the client. CPU time is what counts: it does not depend on what else the machine does, as
tokens/s do.

A profile of the server's Trio thread says which functions a token's time goes to, and the server's metrics how a step is made up.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks import results, stages
from benchmarks.arguments import numbers, positive, result_name
from benchmarks.instant import DrawingModel, InstantModel
from benchmarks.ladder import spread, tell
from benchmarks.layers import Counter
from benchmarks.serving import CountedServer
from benchmarks.stages import Ran, Stage, Work, run_checked
from benchmarks.whereabouts import Phases, profile_page, reading_ms
from benchmarks.workload import GREEDY, Sampling, seed_workload
from cllm.config import Settings
from cllm.serve.logs import configure_logging

STREAMS: Final = (1, 8, 64, 256)
N_GENERATED: Final = 200
TOP_P: Final = Sampling(name="top_p 0.95", fields=(("temperature", 1.0), ("top_p", 0.95)))
N_PROMPT: Final = 32
N_SHORT, N_TOKENS_LEAST = 4, 1000  # requests of so few tokens come in such numbers that a pass takes a while
N_STREAMS_MAX: Final = 256
OPTIONS: Final = ["--parallel", str(N_STREAMS_MAX)]
WATCHED: Final = "sse"  # whose steps are taken apart
PROFILED: Final = 64  # streams, where they are among those that are measured

# Which layers each stage must pass through; the fakes have nothing of llama.cpp's.
ENGINE: Final = ("sampling", "engine")
LOOP: Final = (*ENGINE, "loop")
HTTP: Final = (*LOOP, "app", "http")
LAYERS_OF: Final = {
    "sampling": ("sampling",),
    "engine": ENGINE,
    "loop": LOOP,
    "app": (*LOOP, "app"),
    "http": HTTP,
    "sse": (*HTTP, "sse"),
    "client": (*HTTP, "sse", "client"),
}


@attrs.frozen(kw_only=True)
class Fake:
    """A model that is no model, and how its tokens are drawn."""

    name: str
    n_tokens: int
    step_s: float
    n_rows: int
    sampling: Sampling
    draws: bool = False  # by itself, so that no logits are given

    @property
    def fields(self) -> dict[str, Any]:
        """What `InstantBackend` takes."""
        return {"n_tokens": self.n_tokens, "step_s": self.step_s, "n_rows": self.n_rows, "draws": self.draws}

    def make(self) -> InstantModel:
        """Make one."""
        make = DrawingModel if self.draws else InstantModel
        return make(n_tokens=self.n_tokens, step_s=self.step_s, n_rows=self.n_rows)

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """Which layers each stage must pass through."""
        return {name: tuple(one for one in layers if not (self.draws and one == "sampling")) for name, layers in LAYERS_OF.items()}


FAKES: Final = {
    "instant": Fake(name="instant", n_tokens=512, step_s=0.0, n_rows=256, sampling=GREEDY),
    "gpu": Fake(name="gpu", n_tokens=151_936, step_s=0.002, n_rows=256, sampling=TOP_P),
    "gpu-draws": Fake(name="gpu-draws", n_tokens=151_936, step_s=0.002, n_rows=256, sampling=TOP_P, draws=True),
}


@attrs.define(kw_only=True)
class Measured:
    """One stage's turns."""

    stage: Stage
    passes: list[Ran] = attrs.field(factory=list)

    @property
    def cpu_us_per_token(self) -> list[float]:
        """Of the process that serves, turn by turn."""
        return [_cpu_s(ran) / ran.n_tokens * 1e6 for ran in self.passes]

    def page(self, number: int, below: Measured | None) -> dict[str, Any]:
        """The stage's figures, as results keep them; a stage's cost is over that of the one below, in CPU time."""
        tokens_per_s = [ran.n_tokens / ran.wall_s for ran in self.passes]
        cpu_us = statistics.median(self.cpu_us_per_token)
        n_per_step = statistics.median(ran.n_tokens / ran.n_steps for ran in self.passes)
        over_us = cpu_us - (statistics.median(below.cpu_us_per_token) if below else 0.0)
        page = {
            "number": number,
            "name": self.stage.name,
            "adds": self.stage.adds,
            "tokens_per_s": tokens_per_s,
            "steps_per_s": statistics.median(ran.n_steps / ran.wall_s for ran in self.passes),
            "cpu_us_per_token": spread(self.cpu_us_per_token),
            "cpu_share": statistics.median(_cpu_s(ran) / ran.wall_s for ran in self.passes),
            "us_per_token": over_us,
            "us_per_step": over_us * n_per_step,
        }
        if self.passes[0].client_cpu_s is not None:
            page["client_cpu_share"] = statistics.median((ran.client_cpu_s or 0.0) / ran.wall_s for ran in self.passes)
        return page


def _cpu_s(ran: Ran) -> float:
    assert ran.server_cpu_s is not None
    return ran.server_cpu_s


def work_of(fake: Fake, n_streams: int, n_generated: int, seed: int, n_least: int = N_TOKENS_LEAST) -> Work:
    """Two rounds of requests, or more where they are short. The fakes never end by themselves, so nothing has to be barred for it."""
    n_requests = max(2 * n_streams, n_least // n_generated if n_generated <= N_SHORT else 8)
    asks = seed_workload(n_requests, n_prompt=N_PROMPT, n_generated=n_generated, n_vocab=fake.n_tokens, seed=seed)
    return Work(asks=asks, concurrency=n_streams, sampling=fake.sampling, seed=seed, ignore_eos=False)


# --- a run -------------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one fake; return `data` of the result (`benchmarks.results`). Raises: Bypassed when a stage went round a layer."""
    fake = FAKES[arguments.fake]
    configure_logging(Settings(log_level="warning"))
    model = fake.make()
    bench = stages.Bench(model, Settings(parallel=256), Counter())
    rungs = []
    with CountedServer(None, OPTIONS, instant=fake.fields) as server:
        for n_streams in arguments.streams:
            measured = [Measured(stage=stage) for stage in _stages(fake, bench, server)]
            one_piece, phases = stages.http_stage(server), Phases(server.port)
            requests: list[Ran] = []
            for turn in range(-1, arguments.turns):
                _turn(arguments, fake, measured, phases, n_streams, turn)
                seed = _seed(n_streams, arguments.turns + 1 + turn)  # after those of all turns of the stages
                ran = run_checked(one_piece, work_of(fake, n_streams, 1, seed, arguments.least), fake.layers["http"])
                requests += [ran] if turn >= 0 else []
            rungs.append({"streams": n_streams, "stages": pages_of(measured), "step": phases.page(), **requests_page(requests)})
            show(fake, rungs[-1])
    page = profile(arguments)
    show_profile(page)
    return {"rungs": rungs, "profile": page, "reading_ms": reading_ms(model.logits[:PROFILED])}


def _stages(fake: Fake, bench: stages.Bench, server: CountedServer) -> list[Stage]:
    """Each adds a layer to the one before. Who draws by himself has no drawing of ours to be measured apart."""
    found: list[Stage] = [] if fake.draws else [stages.SamplingStage(bench)]
    found += [stages.EngineStage(bench), stages.LoopStage(bench), stages.AppStage(bench, stream=False)]
    found += [stages.http_stage(server), stages.sse_stage(server)]
    if importlib.util.find_spec("openai") is not None:
        found.append(stages.ClientStage(server, Counter(("client",))))
    return found


def _seed(n_streams: int, turn: int) -> int:
    """Of requests that are new to the server, which has those of all rungs before."""
    return 100_000 * n_streams + 1000 * (turn + 2)


def _turn(arguments: argparse.Namespace, fake: Fake, measured: list[Measured], phases: Phases, n_streams: int, turn: int) -> None:
    n_generated = arguments.generated if turn >= 0 else 4
    for place, one in enumerate(measured):  # some have the same server, which is to find nothing computed
        work = work_of(fake, n_streams, n_generated, _seed(n_streams, turn) + place, arguments.least)
        run = partial(run_checked, one.stage, work, fake.layers[one.stage.name])
        ran = phases.watch(run) if turn >= 0 and one.stage.name == WATCHED else run()
        if turn >= 0:
            one.passes.append(ran)
            tell(f"{fake.name} {n_streams:3} streams, turn {turn} {one.stage.name:7} {ran.n_tokens / ran.wall_s:9.0f} tokens/s")


def pages_of(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """The stages' figures from the floor up, with each turn's ratio to the floor of the same turn."""
    pages = [one.page(i, measured[i - 1] if i else None) for i, one in enumerate(measured)]
    for page in pages:
        page["ratios"] = [own / floor for own, floor in zip(page["tokens_per_s"], pages[0]["tokens_per_s"], strict=True)]
    return pages


def requests_page(passes: Sequence[Ran]) -> dict[str, Any]:
    """What requests of one token, answered in one piece, cost."""
    return {
        "requests_per_s": spread([ran.n_tokens / ran.wall_s for ran in passes]),
        "cpu_us_per_request": spread([_cpu_s(ran) / ran.n_tokens * 1e6 for ran in passes]),
    }


def show(fake: Fake, rung: dict[str, Any]) -> None:
    """Print a table."""
    print(f"\n{fake.name}, {fake.sampling.name}, {rung['streams']} streams; CPU time of the serving process, medians\n")
    print(f"{'stage':9} {'tokens/s':>9} {'steps/s':>8} {'CPU us/token':>13} {'over below':>11} {'CPU share':>10}  client's")
    for page in rung["stages"]:
        client = f"{page['client_cpu_share']:.0%}" if "client_cpu_share" in page else ""
        print(
            f"{page['name']:9} {statistics.median(page['tokens_per_s']):9.0f} {page['steps_per_s']:8.0f} "
            f"{page['cpu_us_per_token']['median']:13.1f} {page['us_per_token']:11.1f} {page['cpu_share']:10.0%}  {client}"
        )
    requests, cost = rung["requests_per_s"]["median"], rung["cpu_us_per_request"]["median"]
    step = rung["step"]
    print(f"a step of {WATCHED}: model {step['model_ms']:.2f} ms, sampling {step['sample_ms']:.2f}, between steps {step['rest_ms']:.2f}")
    print(f"requests of one token, in one piece: {requests:.0f} a second, {cost:.0f} us CPU each", flush=True)


# --- where the time goes -----------------------------------------------------------------------------------------------


def profile(arguments: argparse.Namespace) -> dict[str, Any]:
    """The costs of a token by layer and by function, in the server's Trio thread, at one of the numbers of streams."""
    fake = FAKES[arguments.fake]
    n_streams = PROFILED if PROFILED in arguments.streams else max(arguments.streams)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile"
        with CountedServer(None, OPTIONS, instant=fake.fields, profile=path) as server:
            work = work_of(fake, n_streams, arguments.generated, seed=1)
            ran = stages.sse_stage(server).run(work)
        return {"streams": n_streams, "tokens_per_s": ran.n_tokens / ran.wall_s, **profile_page(path, ran.n_tokens)}


def show_profile(page: dict[str, Any]) -> None:
    """Print it."""
    print(f"\n{page['streams']} streams: {page['tokens_per_s']:.0f} tokens/s under the profiler, which slows calls down\n")
    for part, us in page["us_by_part"].items():
        print(f"{us:8.2f} us/token  {part}")
    print()
    for one in page["functions"]:
        print(f"{one['us']:8.2f} us/token  {one['calls']:6.2f} calls/token  {one['name']}")


# --- the command -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a run."""
    parser.add_argument("--fake", default="all", choices=["all", *sorted(FAKES)], help="the model; each has a result of its own")
    parser.add_argument("--streams", type=numbers, default=None, help="as in 1,8,64,256")
    parser.add_argument("--generated", type=positive, default=N_GENERATED, help="tokens of each answer")
    parser.add_argument("--least", type=positive, default=N_TOKENS_LEAST, help="tokens of a pass of requests of a few tokens")
    parser.add_argument("--turns", type=positive, default=3)
    parser.add_argument("--name", type=result_name, help="of the result of one fake (default: the fake's, and what is not as usual)")
    parser.add_argument("--results", type=Path, default=results.FOLDER, help="the folder of the results")
    parser.add_argument("--profile", action="store_true", help="print where the time goes at 64 streams, or the most; keep no result")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print tables, keep the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser)
    asked = parser.parse_args(arguments)
    if asked.streams is None:
        asked.streams = [64] if asked.profile else list(STREAMS)
    if max(asked.streams) > N_STREAMS_MAX:
        parser.error(f"--streams: the server is started for {N_STREAMS_MAX} at once")
    if asked.name and asked.fake == "all":
        parser.error("--name: results of all fakes have their names; say which --fake it is")
    for fake in sorted(FAKES) if asked.fake == "all" else [asked.fake]:
        _measure(argparse.Namespace(**{**vars(asked), "fake": fake}))


def usual_name(asked: argparse.Namespace) -> str:
    """What a result is called, so that one of other streams or shorter answers does not take the place of the whole one."""
    streams = [] if asked.streams == list(STREAMS) else ["streams", *map(str, asked.streams)]
    generated = [] if asked.generated == N_GENERATED else [f"{asked.generated}-tokens"]
    return "-".join([asked.fake, *streams, *generated])


def _measure(asked: argparse.Namespace) -> None:
    if asked.profile:
        show_profile(profile(asked))
        return
    told = {key: value for key, value in vars(asked).items() if key != "results"}
    path = results.write("stack", asked.name or usual_name(asked), {**told, **FAKES[asked.fake].fields}, run(asked), asked.results)
    print(f"\nkept in {path.name}", file=sys.stderr)


if __name__ == "__main__":
    main()
