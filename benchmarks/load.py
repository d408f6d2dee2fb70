"""The load generator of `cllm bench`, for benchmarks that have their requests at hand."""

from __future__ import annotations

from collections.abc import Sequence

from cllm.bench import load
from cllm.bench.answers import Answer, Pass
from cllm.bench.target import Client, Target
from cllm.bench.workloads import Ask, Sampling, Work

__all__ = ["Answer", "Pass", "closed_loop"]


async def closed_loop(port: int, asks: Sequence[Ask], concurrency: int, sampling: Sampling, *, seed: int, is_stream: bool = True) -> Pass:
    """Send the requests to a server on this machine, `concurrency` at a time, each on a connection that is kept."""
    client = Client(target=Target(host="127.0.0.1", port=port), sampling=sampling, is_stream=is_stream, seed=seed)
    return await load.closed_loop(client, Work(tuple((ask,) for ask in asks)), concurrency)
