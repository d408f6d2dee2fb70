"""What clients see when the model's process is killed in the middle of their answers: python -m benchmarks kills

In each round, eight streams (half of them greedy, half seeded) are under way on `cllm serve --isolate`, over HTTP, and its worker gets a
SIGKILL at a random moment of them. Every stream must come to its end all the same, and where arithmetic does not depend on what else is
computed, with the text that it has undisturbed. Where it does depend on that, another text may be the company's doing and not the kill's:
so the same requests are also made with nobody killed, fewer at a time. The default is the demo model in such settings (F32 weights and
cells, no flash attention); `--model` takes any file as it is.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from benchmarks import results
from benchmarks.arguments import model_path, positive, result_name
from benchmarks.server import ServerProcess
from cllm import demo
from cllm.bench.events import EventReader
from cllm.bench.load import Connections
from cllm.bench.process import children
from cllm.bench.target import Target

PATH: Final = "/v1/completions"
N_STREAMS: Final = 8
COMPANIES: Final = (1, 2, 4)  # streams at a time, where nothing is killed
EXACT: Final = ("--cache-type-k", "f32", "--cache-type-v", "f32", "--flash-attn", "off")
PROMPTS: Final = (
    "What is cLLM?",
    "Count from 3 to 30.",
    "Repeat: der Fluß fließt, 你好",
    "Tell me what a batch is. " * 6,
)
SHARE_KILLED: Final = 0.95  # of how long the streams take undisturbed: up to then one may be killed
N_TRIES: Final = 5  # of a round whose kill came too late
ROUND_S: Final = 300.0
WORKER: Final = b"cllm.serve.worker.start"


@attrs.define
class Streamed:
    """What came of one request. Times are those of `time.perf_counter`."""

    text: str = ""
    n_tokens: int = 0
    finish_reason: str = ""
    arrivals: list[float] = attrs.field(factory=list)  # of pieces of text
    ended_at: float = 0.0

    def take(self, page: dict[str, Any]) -> None:
        """Take one event."""
        if page.get("error"):
            raise RuntimeError(f"a stream ended with an error: {page['error']}")
        if usage := page.get("usage"):
            self.n_tokens = usage["completion_tokens"]
        for choice in page.get("choices", []):
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if choice.get("text"):
                self.text += choice["text"]
                self.arrivals.append(time.perf_counter())


@attrs.frozen(kw_only=True)
class Round:
    """Eight streams, and when their worker died."""

    streams: list[Streamed]
    killed_at: float
    expected: Sequence[Streamed]
    n_generated: int

    @property
    def n_under_way(self) -> int:
        """Streams that had not ended when the worker was killed."""
        return sum(one.ended_at > self.killed_at for one in self.streams)

    def page(self) -> dict[str, Any]:
        """The figures of it, as results keep them."""
        return {
            "n_under_way": self.n_under_way,
            "n_pieces_before": sum(at < self.killed_at for one in self.streams for at in one.arrivals),
            "n_complete": sum((one.finish_reason, one.n_tokens) == ("length", self.n_generated) for one in self.streams),
            "n_same": n_same_texts(self.streams, self.expected),
            "pause_s": max(self._pause_s(one) for one in self.streams),
        }

    def _pause_s(self, one: Streamed) -> float:
        """The longest time without text from the kill on; what was sent before it may still come after it."""
        times = [self.killed_at, *(at for at in one.arrivals if at > self.killed_at)]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def n_same_texts(streams: Sequence[Streamed], expected: Sequence[Streamed]) -> int:
    """How many say what they are expected to."""
    return sum(one.text == other.text for one, other in zip(streams, expected, strict=True))


# --- the streams -------------------------------------------------------------------------------------------------------


def requests(target: Target, n_generated: int, salt: str) -> list[bytes]:
    """The streams' requests; by the salt, no round finds what another one computed."""
    made = []
    for i in range(N_STREAMS):
        fields = {
            "prompt": PROMPTS[i // 2 % len(PROMPTS)],
            "max_tokens": n_generated,
            "seed": i,
            "temperature": float(i % 2),
            "top_p": 0.95,
        }
        more = {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "cache_salt": salt}
        body = json.dumps({**fields, **more}).encode()
        made.append(target.head("POST", PATH, len(body)) + body)
    return made


async def streams_of(target: Target, asked: Sequence[bytes], beside: Callable[[], Awaitable[None]] | None = None) -> list[Streamed]:
    """All at once, and a task beside them. Raises: what a stream that does not come to its end leads to."""
    streams = [Streamed() for _ in asked]
    with trio.fail_after(ROUND_S):
        async with trio.open_nursery() as nursery:
            for request, into in zip(asked, streams, strict=True):
                nursery.start_soon(_read, target, request, into)
            if beside is not None:
                nursery.start_soon(beside)
    return streams


async def _read(target: Target, request: bytes, into: Streamed) -> None:
    events, connections = EventReader(), Connections(target)

    def take(piece: bytes) -> None:
        for data in events.feed(piece):
            if data != b"[DONE]":
                into.take(json.loads(data))

    reader = await connections.fetch(request, take)
    into.ended_at = time.perf_counter()
    await connections.close()
    if reader.status != 200:
        raise RuntimeError(f"a request was answered with {reader.status}")


def worker_of(server_pid: int) -> int:
    """The process in which the model is. Raises: LookupError when there is none."""
    for pid in children(server_pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if WORKER in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    raise LookupError("the server has no worker")


# --- a run -------------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Do all rounds; return `data` of the result (`benchmarks.results`). Raises: RuntimeError for a stream without an end."""
    sizes = ["--ctx-size", str(arguments.ctx_size), "--threads", str(arguments.threads)]
    with _model(arguments.model) as (model, options), ServerProcess(str(model), ["--isolate", *sizes, *options]) as server:
        return trio.run(_rounds, arguments, server)


@contextmanager
def _model(named: str | None) -> Iterator[tuple[Path, Sequence[str]]]:
    """The file, and the settings that belong to it."""
    if named is not None:
        yield Path(named), ()
        return
    with exact_model() as (path, options):
        yield path, options


@contextmanager
def exact_model() -> Iterator[tuple[Path, Sequence[str]]]:
    """The demo model, and settings in which its arithmetic does not depend on what else is computed."""
    from cllm.testing.tiny import expand_to_f32

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "demo-f32.gguf"
        expand_to_f32(demo.path(), path)
        yield path, EXACT


async def _rounds(arguments: argparse.Namespace, server: ServerProcess) -> dict[str, Any]:
    rng, target = random.Random(arguments.seed), Target(host="127.0.0.1", port=server.port)
    await streams_of(target, requests(target, arguments.generated, "warm-up"))
    began = time.perf_counter()
    expected = await streams_of(target, requests(target, arguments.generated, "undisturbed"))
    undisturbed_s = time.perf_counter() - began
    unkilled = await _unkilled(target, arguments.generated, expected)
    pages = []
    for number in range(arguments.rounds):
        done = await _round(arguments, server, target, expected, f"round {number}", rng, SHARE_KILLED * undisturbed_s)
        pages.append(done.page())
        facts = "  ".join(f"{name} {value:.3g}" for name, value in pages[-1].items())
        print(f"round {number:3}  {facts}", file=sys.stderr, flush=True)
    return data_of(pages, undisturbed_s, unkilled)


async def _unkilled(target: Target, n_generated: int, expected: Sequence[Streamed]) -> dict[str, int]:
    """The same streams in smaller companies: how many of how many have the same text where that alone changes."""
    n_same = 0
    for n in COMPANIES:
        asked = requests(target, n_generated, f"{n} at a time")
        for i in range(0, N_STREAMS, n):
            n_same += n_same_texts(await streams_of(target, asked[i : i + n]), expected[i : i + n])
    return {"n_streams_unkilled": N_STREAMS * len(COMPANIES), "n_same_unkilled": n_same}


async def _round(
    arguments: argparse.Namespace, server: ServerProcess, target: Target, expected: Sequence[Streamed], salt: str, rng: Any, within_s: float
) -> Round:
    killed_at = 0.0

    async def kill() -> None:
        nonlocal killed_at
        await trio.sleep(rng.random() * within_s)
        os.kill(worker_of(server.pid), signal.SIGKILL)
        killed_at = time.perf_counter()

    for attempt in range(N_TRIES):
        streams = await streams_of(target, requests(target, arguments.generated, f"{salt}, {attempt}"), kill)
        done = Round(streams=streams, killed_at=killed_at, expected=expected, n_generated=arguments.generated)
        if done.n_under_way:
            return done
        await streams_of(target, requests(target, 1, f"{salt}, after {attempt}"))  # ends when there is a worker again, to be killed
    raise RuntimeError(f"{N_TRIES} times the streams had ended before their worker was to be killed")


def data_of(pages: Sequence[dict[str, Any]], undisturbed_s: float, unkilled: Mapping[str, int]) -> dict[str, Any]:
    """All rounds together, and what became of streams without any."""
    pauses = [page["pause_s"] for page in pages]
    return {
        "n_rounds": len(pages),
        "n_streams": N_STREAMS * len(pages),
        **{name: sum(page[name] for page in pages) for name in ("n_under_way", "n_complete", "n_same")},
        **unkilled,
        "undisturbed_s": undisturbed_s,
        "pause_s": {"median": statistics.median(pauses), "max": max(pauses)},
        "rounds": list(pages),
    }


def show(data: dict[str, Any]) -> None:
    """Print what came of it."""
    n, pause = data["n_streams"], data["pause_s"]
    print(f"{data['n_rounds']} kills of a worker with {data['n_under_way']} streams under way in all:")
    print(f"{data['n_complete']} of {n} complete, {data['n_same']} of {n} with the text that they have undisturbed")
    print(f"{data['n_same_unkilled']} of {data['n_streams_unkilled']} with it where nothing was killed and fewer ran at a time")
    print(f"no text for {pause['median']:.2f} s after a kill, {pause['max']:.2f} s at most")


# --- the command -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of a run."""
    parser.add_argument("--model", type=model_path, help="a GGUF file, as it comes (default: the demo model with F32 weights and cells)")
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--generated", type=positive, default=120, help="tokens of each answer")
    parser.add_argument("--ctx-size", type=positive, default=4096)
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--name", type=result_name, help="of the result (default: exact, or the file's)")


def main(arguments: Sequence[str] | None = None) -> None:
    """Kill, tell, keep the result; exit code 1 unless every stream is complete, and of the exact model the same."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks kills", description=__doc__.splitlines()[0] if __doc__ else None)
    add_arguments(parser)
    asked = parser.parse_args(arguments)
    data = run(asked)
    show(data)
    name = asked.name or ("exact" if asked.model is None else Path(asked.model).stem)
    model = {"name": "demo, F32"} if asked.model is None else results.model_facts(Path(asked.model))
    print(f"kept in {results.write('kills', name, {**vars(asked), 'model': model, 'name': name}, data).name}")
    is_good = data["n_complete"] == data["n_streams"] and (asked.model is not None or data["n_same"] == data["n_streams"])
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
