"""The stages of the ladder: each runs the same requests through one layer more than the one before.

Stages `native` to `app` run in this process on one loaded model, so that they share the context and its parameters; `http`, `sse` and
`client` run against `cllm serve` in a process of its own, as a user has it, and this process is the client. `isolated` is no layer above
these: it is `loop` once more, with the model in a process of its own. Nor is `replay` (`benchmarks.replay`). Only one of the processes
computes at a time.

In the first three the batches are fixed in advance, with every sequence's tokens; from `engine` on the model's own tokens are fed back,
as many of them.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

import attrs
import numpy as np
import numpy.typing as npt
import trio

from benchmarks import closed_loop
from benchmarks.layers import BORDER, LAYERS, REPLAY, Bypassed, Counter, Counts, Seconds, check, difference
from benchmarks.serving import CountedServer
from benchmarks.workload import Ask, Sampling
from cllm.api.app import create_app
from cllm.backend import Batch, StepModel
from cllm.bench import process
from cllm.config import Settings
from cllm.engine.batch.compute import compute, do_move
from cllm.engine.batch.plan import Move, Plan, Save, StepOutput, StepWork
from cllm.engine.cost.model import CostModel
from cllm.engine.events import Delta, Event, Finished
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sampling.step import Sampler
from cllm.engine.sequence import SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.serve.engine import Engine
from cllm.serve.http.http1 import SEND_NOW
from cllm.serve.loading import limits_of
from cllm.serve.streams import EventStream
from cllm.testing.engine import running_engine
from cllm.threadtimes import Threads, ThreadTimes

PATH: Final = "/v1/completions"
STEP_ACROSS: Final = "cllm.serve.worker.model.WorkerModel.compute"
N_STREAMED: Final = 16  # tokens of an answer that is looked at
N_PIECES_UNSTREAMED: Final = 3  # in which it may come that is no stream: its head, its body, and the end of that
KNOWN_TO_OPENAI: Final = ("prompt", "max_tokens", "seed", "temperature", "top_p", "stream", "stream_options")

Ints = npt.NDArray[np.int32]
T = TypeVar("T")


@attrs.frozen(kw_only=True)
class Work:
    """One pass's requests."""

    asks: Sequence[Ask]
    concurrency: int
    sampling: Sampling
    seed: int
    ignore_eos: bool = True  # a model that never ends by itself spares its rows the barring of end tokens

    @property
    def n_tokens(self) -> int:
        """Tokens to generate."""
        return sum(ask.n_generated for ask in self.asks)

    @property
    def n_steps_least(self) -> int:
        """Fewer steps cannot do: a step gives each sequence at most one token."""
        return max(math.ceil(self.n_tokens / self.concurrency), max(ask.n_generated for ask in self.asks))

    def specs(self) -> list[SequenceSpec]:
        """The requests as the engine takes them."""
        fields: dict[str, Any] = dict(self.sampling.fields)
        return [
            SequenceSpec(
                prompt=ask.prompt,
                sampling=SamplingParams(**fields),
                stopping=StopParams(max_tokens=ask.n_generated, ignore_eos=self.ignore_eos),
                seed=self.seed + i,
            )
            for i, ask in enumerate(self.asks)
        ]

    def bodies(self, *, stream: bool) -> list[bytes]:
        """The requests as HTTP takes them."""
        return [json.dumps(self.fields(i, stream=stream)).encode() for i in range(len(self.asks))]

    def fields(self, number: int, *, stream: bool) -> dict[str, Any]:
        """One request's members."""
        ask = self.asks[number]
        fields = {"prompt": list(ask.prompt), "max_tokens": ask.n_generated, "seed": self.seed + number, **dict(self.sampling.fields)}
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return {**fields, "stream": True, "stream_options": {"include_usage": True}} if stream else fields

    def needed(self, counts: Counts) -> Counts:
        """What a pass's counts must reach at each gate."""
        n_steps = max(self.n_steps_least, counts.get("llama_cpp.llama_decode", 0), counts.get(STEP_ACROSS, 0))
        # A step with parts of prompts alone draws nothing.
        return {"step": n_steps, "draw": self.n_steps_least, "request": len(self.asks), "token": self.n_tokens, "any": 0}


@attrs.frozen(kw_only=True)
class Cores:
    """How the threads of a stage's process shared the machine's cores in one pass, seconds."""

    waiting_s: (
        float  # that each thread that computes could have run and had no core, the mean of them: all of them wait for the one that does
    )
    others_s: float  # CPU time of all other threads: what serves

    @classmethod
    def between(cls, before: Threads, after: Threads, n_computing: int) -> Cores | None:
        """Those that compute are known by what they used."""
        none = ThreadTimes(0.0, 0.0)
        spent = [
            ThreadTimes(times.cpu_s - before.get(thread, none).cpu_s, times.waiting_s - before.get(thread, none).waiting_s)
            for thread, times in after.items()
        ]
        spent.sort(key=lambda times: times.cpu_s, reverse=True)
        if len(spent) < n_computing:
            return None
        waiting_s = sum(times.waiting_s for times in spent[:n_computing]) / n_computing
        return cls(waiting_s=waiting_s, others_s=sum(times.cpu_s for times in spent[n_computing:]))


@attrs.frozen(kw_only=True)
class Ran:
    """What one pass of one stage gave."""

    wall_s: float
    n_steps: int
    n_tokens: int
    counts: Counts
    seconds: Seconds  # of the calls into the layers that are timed, in the process whose steps are counted
    server_cpu_s: float | None = None  # CPU times where the stage's process does nothing but serve
    client_cpu_s: float | None = None
    cores: Cores | None = None  # where the kernel tells


class Stage(Protocol):
    """A way to run a pass."""

    name: str
    adds: str  # in words

    def run(self, work: Work) -> Ran:
        """Run a pass."""


def layers_of(name: str) -> tuple[str, ...]:
    """The layers that the stage of that name must pass through. Streaming and its client stand on what comes before."""
    if name == REPLAY:
        return (LAYERS[0],)
    return ("engine", "loop", BORDER) if name == BORDER else LAYERS[: LAYERS.index(name) + 1]


def run_checked(stage: Stage, work: Work, layers: tuple[str, ...] | None = None) -> Ran:
    """Run a pass and refuse it unless it went through its layers and no others, and gave every token. Raises: Bypassed · RuntimeError."""
    ran = stage.run(work)
    check(stage.name, layers_of(stage.name) if layers is None else layers, ran.counts, work.needed(ran.counts))
    if ran.n_tokens != work.n_tokens:
        raise RuntimeError(f"stage {stage.name} gave {ran.n_tokens} tokens, asked for were {work.n_tokens}")
    return ran


# --- batches that are fixed in advance ---------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class FixedBatch:
    """The columns of one step, the memory moves before it, and whose each output is."""

    moves: tuple[Move, ...]
    tokens: Ints
    positions: Ints
    slots: Ints
    outputs: npt.NDArray[np.int8]
    owners: tuple[int, ...]  # requests by number

    def fill(self, batch: Batch) -> None:
        """Write the columns."""
        n = batch.n_rows = len(self.tokens)
        batch.n_outputs = len(self.owners)
        batch.tokens[:n], batch.positions[:n], batch.slots[:n], batch.outputs[:n] = self.tokens, self.positions, self.slots, self.outputs


def fixed_batches(
    model: StepModel, settings: Settings, work: Work, generated: Sequence[Sequence[int]], cost: CostModel | None = None
) -> list[FixedBatch]:
    """The batches of a closed loop whose clients and shell take no time, in which request i draws the tokens `generated[i]`."""
    batches: list[FixedBatch] = []

    def output_of(plan: Plan) -> StepOutput:
        owners = tuple(sequence.spec.seed - work.seed for sequence in plan.outputs)
        drawn = [generated[owner][sequence.n_generated] for owner, sequence in zip(owners, plan.outputs, strict=True)]
        batch, n = plan.batch, plan.n_rows
        if n:
            columns = (batch.tokens[:n].copy(), batch.positions[:n].copy(), batch.slots[:n].copy(), batch.outputs[:n].copy())
            batches.append(FixedBatch(native_moves(plan.moves), *columns, owners))
        return StepOutput(drawn, [], None)

    _closed_loop(StepScheduler(limits_of(model, settings), model.vocabulary, cost), work, output_of)
    return batches


def native_moves(moves: Sequence[Move]) -> tuple[Move, ...]:
    """The moves without which the rows could not be computed; what is saved for later is the engine's own cost."""
    return tuple(move for move in moves if not isinstance(move, Save))


def _closed_loop(scheduler: StepScheduler, work: Work, output_of: Callable[[Plan], StepOutput]) -> int:
    """Keep `concurrency` sequences under way until all have ended; return how many tokens they got."""
    specs = iter(work.specs())
    for _ in range(work.concurrency):
        _submit_next(scheduler, specs)
    n_tokens = 0
    while (plan := scheduler.plan(0.0)) is not None:
        for event in plan.events + scheduler.apply(plan, output_of(plan), 0.0):
            if isinstance(event, Delta):
                n_tokens += len(event.tokens)
            else:
                _submit_next(scheduler, specs)
    return n_tokens


def _submit_next(scheduler: StepScheduler, specs: Iterator[SequenceSpec]) -> None:
    if (spec := next(specs, None)) is not None:
        scheduler.submit(spec, 0.0)


def drawn_in_advance(work: Work, n_vocab: int) -> list[list[int]]:
    """Tokens for the stages that do not feed back what the model says."""
    rng = np.random.default_rng(work.seed)
    return [rng.integers(n_vocab // 4, n_vocab // 2, ask.n_generated).tolist() for ask in work.asks]


# --- stages in this process --------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class Bench:
    """A loaded model, and the settings that decide what the scheduler may deal out of it.

    `cost` is what was measured of its steps as it was loaded, by which a served stage plans, too; None: a guess, for models made up.
    """

    model: Any  # a StepModel; the bare loop reaches behind the protocol for llama.cpp's context
    settings: Settings
    counter: Counter
    cost: CostModel | None = None

    def clear(self) -> None:
        """Free all slots."""
        for slot in range(self.model.n_slots):
            self.model.drop(slot)

    def fixed(self, work: Work) -> list[FixedBatch]:
        """The pass's batches."""
        return fixed_batches(self.model, self.settings, work, drawn_in_advance(work, self.model.vocabulary.n_tokens), self.cost)

    def timed(self, run: Callable[[], int]) -> Ran:
        """Run a pass that returns its number of tokens, with all slots free before and after it."""

        def cleared() -> Ran:
            self.clear()
            try:
                return self._timed(run)
            finally:
                self.clear()

        return in_thread(cleared)

    def timed_as_it_is(self, run: Callable[[], int]) -> Ran:
        """The same, with the slots as they are."""
        return in_thread(lambda: self._timed(run))

    def _timed(self, run: Callable[[], int]) -> Ran:
        with self.counter.counting():
            before, threads_before = self.counter.reading(), process.threads(os.getpid())
            began, cpu_began = time.perf_counter(), time.process_time()
            n_tokens = run()
            wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
            (counts, seconds), cores = self.counter.since(before), self.cores_since(threads_before)
        n_steps = n_steps_of(counts)
        return Ran(wall_s=wall_s, n_steps=n_steps, n_tokens=n_tokens, counts=counts, seconds=seconds, server_cpu_s=cpu_s, cores=cores)

    def cores_since(self, before: Threads) -> Cores | None:
        """How this process and its children used the cores."""
        return Cores.between(before, process.threads(os.getpid()), self.settings.threads or 1)


def in_thread(run: Callable[[], T]) -> T:
    """Run it in a thread that ends with it.

    The served stages compute in a thread of their own. Had this one computed before and lived on, llama.cpp's OpenMP runtime would
    count its threads too, find more than there are cores, and sleep at every barrier: a step would take a fifth longer.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()


def n_steps_of(counts: Counts) -> int:
    """Steps, by the lowest layer that the pass had."""
    keys = ("llama_cpp.llama_decode", "cllm.engine.batch.compute.sample", STEP_ACROSS, "cllm.engine.stepping.StepScheduler.apply")
    return next((counts[key] for key in keys if counts.get(key)), 0)


@attrs.define(eq=False)
class NativeStage:
    """llama_decode in a bare loop, on the very context that the other stages use."""

    bench: Bench
    name: str = "native"
    adds: str = "a bare loop of llama_decode, tokens fixed in advance, no sampling"

    def run(self, work: Work) -> Ran:
        """Run a pass."""
        import llama_cpp

        from benchmarks import native

        batches = self.bench.fixed(work)
        context: Any = self.bench.model._context
        memory = llama_cpp.llama_get_memory(context)
        batch = llama_cpp.llama_batch_init(self.bench.model.n_rows_max, 0, 1)

        def decode_all() -> int:
            for fixed in batches:
                for move in fixed.moves:
                    native.do_move(memory, move)
                native.fill(batch, fixed)
                if code := llama_cpp.llama_decode(context, batch):
                    raise RuntimeError(f"llama_decode gave {code}")
                llama_cpp.llama_synchronize(context)
            return sum(len(fixed.owners) for fixed in batches)

        try:
            return self.bench.timed(decode_all)
        finally:
            llama_cpp.llama_memory_clear(memory, True)
            llama_cpp.llama_batch_free(batch)


@attrs.define(eq=False)
class BackendStage:
    """The model behind the seam."""

    bench: Bench
    name: str = "backend"
    adds: str = "StepModel.step() over the same batches"

    def run(self, work: Work) -> Ran:
        """Run a pass."""
        batches, model = self.bench.fixed(work), self.bench.model
        batch = Batch(model.n_rows_max)
        idle = _work((), batch, [])

        def step_all() -> int:
            for fixed in batches:
                for move in fixed.moves:
                    do_move(model, idle, move, time.perf_counter)
                fixed.fill(batch)
                model.step(batch)
            return sum(len(fixed.owners) for fixed in batches)

        return self.bench.timed(step_all)


def _work(moves: Sequence[Move], batch: Batch, samplers: list[Sampler]) -> StepWork:
    return StepWork(moves=list(moves), batch=batch, samplers=samplers)


@attrs.define(eq=False)
class SamplingStage:
    """The engine's `compute`, over the same batches; what it draws is thrown away."""

    bench: Bench
    name: str = "sampling"
    adds: str = "compute(): the step and a draw for each output"

    def run(self, work: Work) -> Ran:
        """Run a pass."""
        model = self.bench.model
        generated = drawn_in_advance(work, model.vocabulary.n_tokens)
        batches = fixed_batches(model, self.bench.settings, work, generated, self.bench.cost)
        samplers = self._samplers(work)
        drawn = [iter(tokens) for tokens in generated]
        batch = Batch(model.n_rows_max)

        def compute_all() -> int:
            n_tokens = 0
            for fixed in batches:
                fixed.fill(batch)
                plan = _work(fixed.moves, batch, [samplers[owner] for owner in fixed.owners])
                n_tokens += len(compute(model, plan, time.perf_counter).tokens)
                for owner in fixed.owners:
                    samplers[owner].tokens.append(next(drawn[owner]))
            return n_tokens

        return self.bench.timed(compute_all)

    def _samplers(self, work: Work) -> list[Sampler]:
        end_tokens = self.bench.model.vocabulary.end_tokens
        return [
            Sampler(
                spec.sampling,
                seed=spec.seed,
                tokens=list(spec.prompt),
                n_prompt=len(spec.prompt),
                end_tokens=end_tokens,
                ignore_eos=spec.stopping.ignore_eos,
            )
            for spec in work.specs()
        ]


@attrs.define(eq=False)
class EngineStage:
    """The scheduler round it, in this thread."""

    bench: Bench
    name: str = "engine"
    adds: str = "the scheduler's plan() and apply(), synchronous; the model's tokens are fed back"

    def run(self, work: Work) -> Ran:
        """Run a pass."""
        model = self.bench.model
        scheduler = StepScheduler(limits_of(model, self.bench.settings), model.vocabulary, self.bench.cost)
        return self.bench.timed(lambda: _closed_loop(scheduler, work, lambda plan: compute(model, plan, time.perf_counter)))


@attrs.define(eq=False)
class LoopStage:
    """Trio, the worker thread, and tasks that read streams."""

    bench: Bench
    name: str = "loop"
    adds: str = "Trio: the step loop, its worker thread, streams read by tasks"

    def run(self, work: Work) -> Ran:
        """Run a pass."""
        return trio.run(self._run, work)

    async def _run(self, work: Work) -> Ran:
        self.bench.clear()
        async with running_engine(self.bench.model, self.bench.settings, cost=self.bench.cost) as running:
            return await timed_in_trio(self.bench, work, lambda: self._read_all(running.engine, work))

    async def _read_all(self, engine: Engine, work: Work) -> int:
        specs = iter(work.specs())
        n_tokens = 0

        async def read_one_after_another() -> None:
            nonlocal n_tokens
            for spec in specs:
                with engine.open([spec]) as stream:
                    n_read = await _count_tokens(stream)  # first: `+=` takes the old value before it waits
                n_tokens += n_read

        async with trio.open_nursery() as nursery:
            for _ in range(work.concurrency):
                nursery.start_soon(read_one_after_another)
        return n_tokens


def isolated_stage(bench: Bench) -> LoopStage:
    """The same on a bench whose model is in a process of its own, so that this one computes nothing."""
    return LoopStage(bench, name=BORDER, adds="the loop, with the model in a process of its own (--isolate)")


async def _count_tokens(stream: EventStream) -> int:
    """Read a stream as the API does: a sink takes the deltas while the task waits."""
    n_tokens = 0

    def take(_index: int, delta: Delta) -> bool:
        nonlocal n_tokens
        n_tokens += len(delta.tokens)
        return True

    stream.sink = take
    async for events in stream:
        for _, event in events:
            n_tokens += _n_tokens(event)
    return n_tokens


def _n_tokens(event: Event) -> int:
    if isinstance(event, Delta):
        return len(event.tokens)
    if not isinstance(event, Finished):
        raise event.error
    return 0


async def timed_in_trio(bench: Bench, work: Work, run: Callable[[], Any]) -> Ran:
    """As `Bench.timed`, inside Trio, while the step loop idles before and after."""
    with bench.counter.counting():
        before, threads_before = bench.counter.reading(), process.threads(os.getpid())
        began, cpu_began = time.perf_counter(), time.process_time()
        n_tokens = await run()
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
        (counts, seconds), cores = bench.counter.since(before), bench.cores_since(threads_before)
    n_steps = n_steps_of(counts)
    return Ran(wall_s=wall_s, n_steps=n_steps, n_tokens=n_tokens, counts=counts, seconds=seconds, server_cpu_s=cpu_s, cores=cores)


@attrs.define(eq=False)
class AppStage:
    """The HTTP application, called in memory: JSON in, JSON out, or a stream where asked for."""

    bench: Bench
    name: str = "app"
    adds: str = "the API's handler through ASGI in memory, JSON in and out, no socket"
    stream: bool = False

    def run(self, work: Work) -> Ran:
        """Run a pass."""
        return trio.run(self._run, work)

    async def _run(self, work: Work) -> Ran:
        bodies, answers = work.bodies(stream=self.stream), [b""] * len(work.asks)
        self.bench.clear()
        async with running_engine(self.bench.model, self.bench.settings, cost=self.bench.cost) as running:
            app: Any = create_app(running.engine, self.bench.settings)
            ran = await timed_in_trio(self.bench, work, lambda: self._ask_all(app, bodies, answers, work.concurrency))
        return attrs.evolve(ran, n_tokens=sum(closed_loop.usage_of(answer)["completion_tokens"] for answer in answers))

    async def _ask_all(self, app: Any, bodies: list[bytes], answers: list[bytes], concurrency: int) -> int:
        numbers = iter(range(len(bodies)))

        async def ask_one_after_another() -> None:
            for number in numbers:
                answers[number] = await call(app, bodies[number])

        async with trio.open_nursery() as nursery:
            for _ in range(concurrency):
                nursery.start_soon(ask_one_after_another)
        return 0


async def call(app: Any, body: bytes) -> bytes:
    """Ask an ASGI application; return the answer as it would stand on the wire, its head shortened to the status."""
    received, parts = [{"type": "http.request", "body": body, "more_body": False}], []
    left = trio.Event()

    async def receive() -> dict[str, Any]:
        if received:
            return received.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            parts.append(b"HTTP/1.1 %d\r\n\r\n" % message["status"])
            return
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            left.set()

    def send_now(data: bytes) -> bool:
        parts.append(data)
        return True

    await app(_scope(len(body), {SEND_NOW: send_now}), receive, send)
    return b"".join(parts)


def _scope(n_bytes: int, extensions: dict[str, Any]) -> dict[str, Any]:
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"%d" % n_bytes)]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": PATH,
        "raw_path": PATH.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "extensions": extensions,
        "state": {},
    }


# --- stages with a server of their own ---------------------------------------------------------------------------------


@attrs.define(eq=False)
class HttpStage:
    """Over loopback, with the cheapest client there is."""

    server: CountedServer
    stream: bool
    name: str
    adds: str
    n_threads: int = 1  # that compute

    def run(self, work: Work) -> Ran:
        """Run a pass."""
        requests = [closed_loop.post(PATH, body) for body in work.bodies(stream=self.stream)]
        before, threads_before = self.server.reading(), process.threads(self.server.pid())
        loop = closed_loop.run(self.server.port, requests, work.concurrency)
        after, threads_after = self.server.reading(), process.threads(self.server.pid())
        counts = difference(after.counts, before.counts)
        n_tokens = sum(closed_loop.usage_of(answer)["completion_tokens"] for answer in loop.answers)
        if self.stream:
            refuse_unstreamed(self.name, loop.n_reads, work)
        return Ran(
            wall_s=loop.wall_s,
            n_steps=n_steps_of(counts),
            n_tokens=n_tokens,
            counts=counts,
            seconds=difference(after.seconds, before.seconds),
            server_cpu_s=after.cpu_s - before.cpu_s,
            client_cpu_s=loop.client_cpu_s,
            cores=Cores.between(threads_before, threads_after, self.n_threads),
        )


def refuse_unstreamed(stage: str, n_pieces: Sequence[int], work: Work) -> None:
    """Refuse answers that were encoded as streams and sent when they were complete: pieces that come together are read as one.

    Some may have come so: a client that is busy with others reads late. Raises: Bypassed.
    """
    long = [n for n, ask in zip(n_pieces, work.asks, strict=True) if ask.n_generated >= N_STREAMED]
    if long and max(long) <= N_PIECES_UNSTREAMED:
        raise Bypassed(f"stage {stage} does not stream: no answer came in more than {max(long)} pieces")


def http_stage(server: CountedServer, n_threads: int = 1) -> HttpStage:
    """Answers in one piece."""
    adds = "cllm serve in a process of its own, on loopback, answers in one piece"
    return HttpStage(server=server, stream=False, name="http", adds=adds, n_threads=n_threads)


def sse_stage(server: CountedServer, n_threads: int = 1) -> HttpStage:
    """Streamed answers."""
    return HttpStage(server=server, stream=True, name="sse", adds="streaming: an event for each token", n_threads=n_threads)


@attrs.define(eq=False)
class ClientStage:
    """The official client, streaming."""

    server: CountedServer
    counter: Counter  # of this process, where the client's gate is
    n_threads: int = 1
    name: str = "client"
    adds: str = "the official openai package as the client"

    def run(self, work: Work) -> Ran:
        """Run a pass."""
        import asyncio

        before, threads_before = self.server.reading(), process.threads(self.server.pid())
        own_before = self.counter.reading()
        with self.counter.counting():
            n_tokens, wall_s, cpu_s = asyncio.run(self._ask_all(work))
        after, threads_after = self.server.reading(), process.threads(self.server.pid())
        own, _ = self.counter.since(own_before)
        counts = {key: count + own[key] for key, count in difference(after.counts, before.counts).items()}
        return Ran(
            wall_s=wall_s,
            n_steps=n_steps_of(counts),
            n_tokens=n_tokens,
            counts=counts,
            seconds=difference(after.seconds, before.seconds),
            server_cpu_s=after.cpu_s - before.cpu_s,
            client_cpu_s=cpu_s,
            cores=Cores.between(threads_before, threads_after, self.n_threads),
        )

    async def _ask_all(self, work: Work) -> tuple[int, float, float]:
        """The tokens, and the seconds and CPU seconds that they took once there was a client."""
        import asyncio

        import openai  # type: ignore[import-not-found,unused-ignore]  # not among what the project needs

        numbers = iter(range(len(work.asks)))
        n_tokens = 0
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{self.server.port}/v1", api_key="none", max_retries=0) as client:

            async def ask_one_after_another() -> None:
                nonlocal n_tokens
                for number in numbers:
                    n_read = await self._ask(client, work.fields(number, stream=True))
                    n_tokens += n_read

            began, cpu_began = time.perf_counter(), time.process_time()
            await asyncio.gather(*(ask_one_after_another() for _ in range(work.concurrency)))
            return n_tokens, time.perf_counter() - began, time.process_time() - cpu_began

    async def _ask(self, client: Any, fields: dict[str, Any]) -> int:
        known = {name: fields.pop(name) for name in KNOWN_TO_OPENAI if name in fields}
        chunks = await client.completions.create(model="", extra_body=fields, **known)
        n_tokens = 0
        async for chunk in chunks:
            if chunk.usage is not None:
                n_tokens = chunk.usage.completion_tokens
        return n_tokens
