"""POST /benchmark: requests of our own through the real scheduler, beside whatever else runs, and what they measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import attrs
import msgspec
import trio
from msgspec import Meta
from quart import g

from cllm.api import prompts, wire
from cllm.api.context import Context
from cllm.api.sampling_fields import priority_of
from cllm.engine.events import Delta, Failed, Finished
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.errors import NotPermitted, QuotaExceeded, RequestError

PROMPT = "Tell me a story about a lighthouse keeper and the sea."


class BenchmarkRequest(msgspec.Struct):
    """The body."""

    requests: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    concurrency: Annotated[int, Meta(ge=1, le=256)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    prompt: str | None = None


decoder = msgspec.json.Decoder(BenchmarkRequest)


@attrs.frozen
class Measured:
    """One request's; seconds."""

    total_s: float
    first_token_s: float
    n_tokens: int


async def run(context: Context) -> dict[str, Any]:
    """Carry out the benchmark that the current request asks for. Raises: NotPermitted · RequestError, what the first request failed
    with where none was answered, or a key may not have so many under way.
    """
    if not context.settings.enable_benchmark:
        raise NotPermitted("the operator has not enabled this; --enable-benchmark does")
    body = await wire.read(decoder)
    n_requests, n_concurrent, max_tokens = body.requests or 40, body.concurrency or 8, body.max_tokens or 50
    model = await context.served()
    context.engine.check_accepting()
    prompts.check_fits(model, body.prompt or PROMPT)
    tokens = await prompts.text_prompt(context, body.prompt or PROMPT)
    stopping = StopParams(max_tokens=max_tokens, ignore_eos=True)
    specs = [
        SequenceSpec(
            prompt=tokens,
            sampling=SamplingParams(temperature=0.0),
            stopping=stopping,
            key=g.key,
            priority=priority_of(None, g.priority_least),
            request_id=g.request_id,
        )
        for _ in range(n_requests)
    ]
    started_at = trio.current_time()
    measured = await _run_all(context, specs, n_concurrent)
    report = _report(measured, trio.current_time() - started_at)
    return {"requests": n_requests, "concurrency": n_concurrent, "max_tokens": max_tokens, "prompt_tokens": len(tokens), **report}


async def _run_all(context: Context, specs: list[SequenceSpec], n_concurrent: int) -> list[Measured]:
    measured: list[Measured] = []
    failed: list[RequestError] = []
    waiting = iter(specs)

    async def one_after_another() -> None:
        for spec in waiting:
            try:
                measured.append(await _measure(context, spec))
            except QuotaExceeded as error:  # so it would be with the next, at once
                failed[:0] = [error]
                nursery.cancel_scope.cancel()
                return
            except RequestError as error:  # counted as the difference to what was asked for
                failed.append(error)
                await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        for _ in range(min(n_concurrent, len(specs))):
            nursery.start_soon(one_after_another)
    if failed and (not measured or isinstance(failed[0], QuotaExceeded)):
        raise failed[0]
    return measured


async def _measure(context: Context, spec: SequenceSpec) -> Measured:
    started_at = trio.current_time()
    first_at: float | None = None
    n_tokens = 0
    with context.engine.open([spec]) as stream:
        async for events in stream:
            for _, event in events:
                if isinstance(event, Delta) and first_at is None:
                    first_at = trio.current_time()
                elif isinstance(event, Finished):
                    n_tokens = event.usage.n_generated
                elif isinstance(event, Failed):
                    raise event.error
    ended_at = trio.current_time()
    return Measured(ended_at - started_at, (first_at or ended_at) - started_at, n_tokens)


def _report(measured: Sequence[Measured], total_s: float) -> dict[str, Any]:
    n_tokens = sum(one.n_tokens for one in measured)
    return {
        "completed": len(measured),
        "generated_tokens": n_tokens,
        "total_time": round(total_s, 6),
        "tokens_per_second": round(n_tokens / total_s, 3) if total_s > 0 else 0.0,
        "response_time": _spread([one.total_s for one in measured]),
        "time_to_first_token": _spread([one.first_token_s for one in measured]),
    }


def _spread(seconds: list[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ordered = sorted(seconds)

    def at(share: float) -> float:  # nearest rank
        return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]

    figures = {"min": ordered[0], "max": ordered[-1], "mean": sum(ordered) / len(ordered), "p50": at(0.5), "p99": at(0.99)}
    return {name: round(value, 6) for name, value in figures.items()}
