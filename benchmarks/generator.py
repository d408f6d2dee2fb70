"""The load generator in a process of its own: its garbage and its threads are not the benchmark's, and it stays warm between passes."""

from __future__ import annotations

import json
import subprocess
import sys
from types import TracebackType
from typing import Any, Self

import attrs
import msgspec
import trio

from cllm.bench.command import curves
from cllm.bench.dialect import find_dialect
from cllm.bench.load import closed_loop, open_loop
from cllm.bench.metrics import Goal, summarize
from cllm.bench.target import BenchFailed, Client, Dialect, Endpoint, Target
from cllm.bench.workloads import SAMPLINGS, Workload


@attrs.frozen(kw_only=True)
class Order:
    """One pass."""

    port: int
    workload: Workload
    n_vocab: int
    seed: int
    dialect: Dialect
    sampling: str = "greedy"
    endpoint: Endpoint = "completions"
    is_stream: bool = True
    rate: float | None = None  # requests a second; None: each client waits for its answer
    goal: Goal = attrs.field(factory=Goal)


@attrs.frozen(kw_only=True)
class Find:
    """The question what a server takes."""

    port: int
    endpoint: Endpoint
    n_vocab: int
    sampling: str


class GeneratorFailed(RuntimeError):
    """The generator could not carry out an order."""


class GeneratorDied(Exception):
    """The generator's process has ended in the middle of an order, which is nobody's fault that is measured."""


class Generator:
    """The process, and orders to it, one at a time."""

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._process:  # its end closes the pipes, which ends it
            if error is not None:  # nobody waits for the pass that it is in
                self._process.terminate()

    def _start(self) -> None:
        """In a session of its own: a run that is told to end, by a signal to its group, ends after the pair that it is in."""
        command = [sys.executable, "-m", "benchmarks.generator"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def dialect(self, port: int, endpoint: Endpoint = "completions", n_vocab: int = 0, sampling: str = "greedy") -> Dialect:
        """Find out what a server takes. Raises: GeneratorFailed · GeneratorDied."""
        found = self._ask("find", Find(port=port, endpoint=endpoint, n_vocab=n_vocab, sampling=sampling))
        return msgspec.convert(found, Dialect)

    def run(self, order: Order) -> dict[str, Any]:
        """Carry out a pass; return its `summary` and `curves`. Raises: GeneratorFailed · GeneratorDied."""
        return self._ask("run", order)

    def _ask(self, kind: str, order: Order | Find) -> dict[str, Any]:
        if self._process.poll() is not None:  # what it was doing is lost, and what comes is not
            with self._process:
                self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({kind: attrs.asdict(order)}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):
            raise GeneratorDied("the load generator has died")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise GeneratorFailed(answer["error"])
        return answer


def main() -> None:
    """Serve the benchmark that started this process: a JSON line in, a JSON line out."""
    for line in sys.stdin:
        (kind, fields), *_ = json.loads(line).items()
        try:
            if kind == "find":
                answer = attrs.asdict(trio.run(_find, msgspec.convert(fields, Find)))
            else:
                answer = trio.run(_run, msgspec.convert(fields, Order))
        except BenchFailed as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


async def _find(find: Find) -> Dialect:
    return await find_dialect(
        Target(host="127.0.0.1", port=find.port), endpoint=find.endpoint, n_vocab=find.n_vocab, sampling=SAMPLINGS[find.sampling]
    )


async def _run(order: Order) -> dict[str, Any]:
    client = Client(
        target=Target(host="127.0.0.1", port=order.port),
        dialect=order.dialect,
        endpoint=order.endpoint,
        sampling=SAMPLINGS[order.sampling],
        is_stream=order.is_stream,
        seed=order.seed,
    )
    work = order.workload.make(order.n_vocab, order.seed)
    if order.rate is None:
        done = await closed_loop(client, work, order.workload.concurrency)
    else:
        done = await open_loop(client, work, order.rate, seed=order.seed)
    has_late = bool(work.late)
    return {"summary": summarize(done, order.goal, has_late=has_late).page(), "curves": curves(done, has_late=has_late)}


if __name__ == "__main__":
    main()
