"""`cllm bench`: one workload against a server that runs."""

from __future__ import annotations

import datetime
import json
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import attrs
import trio
from rich.console import Console

import cllm
from cllm.bench import process
from cllm.bench.answers import Pass, ttfts_s
from cllm.bench.dialect import find_dialect
from cllm.bench.load import Progress, closed_loop, open_loop
from cllm.bench.machine import machine
from cllm.bench.metrics import Goal, Summary, arrived_per_s, curve, summarize
from cllm.bench.outputs import check_output
from cllm.bench.show import print_table, shown
from cllm.bench.target import BenchFailed, Client, Dialect, Endpoint, Target, parse_url
from cllm.bench.workloads import N_VOCAB_UNKNOWN, OVERLOAD_FACTORS, SAMPLINGS, WORKLOADS, Workload, with_load
from cllm.config import is_loopback
from cllm.descriptors import allow_descriptors
from cllm.errors import SettingsError

OK, FAILED = 0, 1
KILLED = 128  # and the signal's number, as a shell reports it


@attrs.frozen(kw_only=True)
class Order:
    """What was asked for."""

    target: Target
    workload: Workload
    endpoint: Endpoint
    model: str
    rate: float | None
    seed: int
    sampling: str
    is_stream: bool
    goal: Goal
    json_path: str | None
    plot_path: str | None


@attrs.frozen
class Measured:
    """One pass of the command, and what it is called."""

    title: str
    done: Pass
    summary: Summary
    has_late: bool  # the last answer is the late request's


def make_order(
    url: str,
    *,
    workload: str,
    concurrency: int | None,
    n_requests: int | None,
    rate: float | None,
    endpoint: Endpoint,
    api_key: str | None,
    local_key: str | None = None,
    model: str | None,
    seed: int,
    sampling: str,
    is_stream: bool,
    goal: Goal,
    json_path: str | None,
    plot_path: str | None,
) -> Order:
    """Check what was asked for together; `local_key` is for a server on this machine alone. Raises: SettingsError."""
    recipe = WORKLOADS[workload]
    for name, value in (("concurrency", concurrency), ("requests", n_requests)):
        if value is not None and value < 1:
            raise SettingsError(f"--{name}: must be at least 1, not {value}")
    for name, number in (("rate", rate), ("goodput-ttft-s", goal.ttft_s), ("goodput-itl-s", goal.itl_s)):
        if number is not None and not 0 < number < float("inf"):
            raise SettingsError(f"--{name}: must be more than 0, not {number}")
    if rate is not None and concurrency is not None:
        raise SettingsError("--rate: requests arrive by the clock, so there is no --concurrency")
    if rate is not None and (recipe.n_turns > 1 or recipe.n_prompt_late):
        raise SettingsError(f"--rate: the requests of {workload} wait for each other")
    if recipe.n_prompt_late and not is_stream:
        raise SettingsError(f"--no-stream: {workload} is about streams")
    try:
        target = parse_url(url)
    except ValueError as error:
        raise SettingsError(f"URL: {error}") from error
    if api_key is None and is_loopback(target.host):
        api_key = local_key
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise SettingsError("--api-key: must be of printable ASCII characters")
    try:
        loaded = with_load(recipe, concurrency=concurrency, n_requests=n_requests)
    except ValueError as error:
        raise SettingsError(f"--concurrency: {error}") from error
    for name, path in (("json", json_path), ("plot", plot_path)):
        check_output(name, path)
    return Order(
        target=attrs.evolve(target, api_key=api_key or ""),
        workload=loaded,
        endpoint=endpoint,
        model=model or "",
        rate=rate,
        seed=seed,
        sampling=sampling,
        is_stream=is_stream,
        goal=goal,
        json_path=json_path,
        plot_path=plot_path,
    )


def run(order: Order) -> int:
    """Measure and show; return the process's exit code. Raises: BenchFailed."""
    if order.plot_path:
        from cllm.bench import plot

        plot.check(order.plot_path)  # the time to say so is before the measurement
    allow_descriptors()
    interruption = Interruption()
    dialect, measured = trio.run(_measure, order, interruption)
    if interruption.number is not None and not measured:
        return KILLED + interruption.number
    # Where the JSON goes to standard output, the table does not.
    print_table([(one.title, one.summary) for one in measured], Console(stderr=order.json_path == "-"))
    for line in _warnings(_client(order, dialect)):
        Console(stderr=True, soft_wrap=True).print(line, markup=False, highlight=False)
    if order.json_path:
        _write_json(order, dialect, measured)
    if order.plot_path:
        from cllm.bench.plot import plot_latency

        plot_latency({one.title: curves(one.done, has_late=one.has_late) for one in measured}, order.plot_path, order.workload.name)
    if interruption.number is not None:
        return KILLED + interruption.number
    answered = sum(one.summary.n_requests - one.summary.n_failed for one in measured)
    if not answered:
        failures = sum((Counter(one.summary.failures) for one in measured), Counter[str]())
        raise BenchFailed(f"no request was answered: {failures.most_common(1)[0][0]}")
    return OK


def _warnings(client: Client) -> list[str]:
    """What was asked otherwise than in the table's words, since the server takes it in no other way."""
    dialect, lines = client.dialect, []
    if client.endpoint == "chat" or not dialect.takes_ids:
        lines.append("prompts are words: how many tokens they are is about, and not exactly, what was asked")
    if not dialect.takes_extras:
        lines.append("ignore_eos is not taken: an answer may end before it has as many tokens as were asked")
    if left_out := client.sampling_left_out:
        lines.append(f"not taken: {', '.join(left_out)}: tokens are drawn by the server's own values of these")
    if client.draws and not dialect.takes_seed:
        lines.append("seed is not taken: another run draws other tokens")
    return lines


@attrs.define
class Interruption:
    """A signal that ends the measurement: what was answered by then is shown. A second one does not wait for that."""

    number: int | None = None
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)  # of the pass under way

    async def listen(self) -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as numbers:
            async for number in numbers:
                if self.number is not None:
                    raise KeyboardInterrupt
                self.number = number
                self.scope.cancel()


async def _measure(order: Order, interruption: Interruption) -> tuple[Dialect, list[Measured]]:
    dialect = await find_dialect(
        order.target, endpoint=order.endpoint, model=order.model, sampling=SAMPLINGS[order.sampling], is_stream=order.is_stream
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(interruption.listen)
        measured = await _passes(order, _client(order, dialect), interruption)
        nursery.cancel_scope.cancel()
    return dialect, measured


def _client(order: Order, dialect: Dialect) -> Client:
    return Client(
        target=order.target,
        dialect=dialect,
        endpoint=order.endpoint,
        sampling=SAMPLINGS[order.sampling],
        is_stream=order.is_stream,
        seed=order.seed,
    )


async def _passes(order: Order, client: Client, interruption: Interruption) -> list[Measured]:
    """All of them, or as far as it comes: the last one may be cut short, and then has what was known by then."""
    measured: list[Measured] = []

    async def add(title: str, number: int, rate: float | None) -> None:
        if interruption.number is None:
            one = await _pass(order, client, title, number, rate, interruption)
            measured.extend([] if one is None else [one])

    if order.rate is not None:
        await add(f"{order.rate:g} requests/s", 0, order.rate)
        return measured
    await add("capacity" if order.workload.is_open else order.workload.name, 0, None)
    capacity = measured[0].summary.requests_per_s if measured and order.workload.is_open else 0.0
    for number, factor in enumerate(OVERLOAD_FACTORS if capacity else (), 1):
        await add(f"{factor:g} x", number, factor * capacity)
    return measured


async def _pass(order: Order, client: Client, title: str, number: int, rate: float | None, interruption: Interruption) -> Measured | None:
    """One pass; None when it was cut before anything was known of any answer."""
    seed = order.seed + 1_000_003 * number  # a pass that repeats another's prompts would find them cached
    work = order.workload.make(client.dialect.n_vocab or N_VOCAB_UNKNOWN, seed)
    pid = process.listening_pid(order.target.port) if is_loopback(order.target.host) else None
    cpu_s = process.cpu_s(pid) if pid else None
    progress = Progress()
    async with shown(title, progress):
        if rate is None:
            done = await closed_loop(client, work, order.workload.concurrency, progress, scope=interruption.scope)
        else:
            done = await open_loop(client, work, rate, seed=seed, progress=progress, scope=interruption.scope)
    interruption.scope, is_cut = trio.CancelScope(), interruption.number is not None
    has_late = bool(work.late) and bool(done.answers[-1].ended_at)
    whole, n_under_way = done, None
    if is_cut:
        title, (done, n_under_way) = f"{title}, cut short", whole.cut(order.goal.ttft_s)
    if not done.answers:
        return None
    cpu_after_s = process.cpu_s(pid) if pid else None
    spent_s = cpu_after_s - cpu_s if cpu_after_s is not None and cpu_s is not None else None
    rss_mb = process.rss_peak_mb(pid) if pid else None
    summary = attrs.evolve(
        summarize(done, order.goal, server_cpu_s=spent_s, rss_peak_mb=rss_mb, has_late=has_late),
        n_generated=sum(answer.n_generated for answer in whole.answers),
        tokens_per_s=whole.tokens_per_s,  # those of answers under way were computed and sent, too
        n_under_way=n_under_way,
        server_process=process.name_of(pid) if pid else None,
        rate=rate,
        arrived_per_s=arrived_per_s(done) if rate is not None else None,
    )
    return Measured(title, done, summary, has_late)


def curves(done: Pass, *, has_late: bool = False) -> dict[str, list[float]]:
    """The distributions of a pass's times; the late request's are not among those of whole requests, as in `summarize`."""
    answered = [answer for answer in done.answers if not answer.is_failed]
    late = done.answers[-1] if has_late else None
    return {
        "ttft_s": curve(ttfts_s(answer for answer in answered if answer is not late)),
        "itl_s": curve([gap for answer in answered for gap in answer.gaps_s]),
        "e2e_s": curve([answer.e2e_s for answer in answered if answer is not late]),
    }


def _write_json(order: Order, dialect: Dialect, measured: list[Measured]) -> None:
    page = {
        "version": cllm.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine(),  # of the client; the server's, too, where it has a process here
        "settings": _settings(order, dialect),
        "passes": [_page(one) for one in measured],
    }
    text = json.dumps(page, indent=2) + "\n"
    if order.json_path == "-":
        sys.stdout.write(text)
        return
    try:
        Path(str(order.json_path)).write_text(text, "utf-8")
    except OSError as error:
        raise BenchFailed(f"cannot write {order.json_path}: {error.strerror}") from error


def _settings(order: Order, dialect: Dialect) -> dict[str, Any]:
    return {
        "workload": attrs.asdict(order.workload),
        "endpoint": order.endpoint,
        "model": order.model,
        "rate": order.rate,
        "seed": order.seed,
        "sampling": order.sampling,
        "stream": order.is_stream,
        "dialect": attrs.asdict(dialect),  # what was really asked
    }


def _page(one: Measured) -> dict[str, Any]:
    return {"name": one.title, **one.summary.page(), "requests": [attrs.asdict(answer) for answer in one.done.answers]}
