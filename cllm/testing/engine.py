"""An engine on a model of the test's own, without loading, files or HTTP: for tests of what stands on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import attrs
import trio

from cllm.backend import Embedder, KvLayout, StepModel
from cllm.config import Settings
from cllm.engine.cost.model import CostModel
from cllm.engine.scheduler import Scheduler
from cllm.serve.disktier import DiskTier
from cllm.serve.embedders import OFF, embeddings_of, loaded_embedder
from cllm.serve.engine import Embeddings, Engine
from cllm.serve.lifecycle import make_loop
from cllm.serve.loading import limits_of, served_model
from cllm.serve.loop import Loop
from cllm.serve.metrics import Metrics
from cllm.serve.modelthread import open_model_thread


@attrs.define(eq=False)
class RunningEngine:
    """What `running_engine` gives."""

    engine: Engine
    loop: Loop
    scheduler: Scheduler
    ended: trio.Event  # the loop has returned: it was told to stop, and nothing was left


@asynccontextmanager
async def running_engine(
    model: StepModel,
    settings: Settings | None = None,
    *,
    watchdog_s: float = 60.0,
    embedder: Embedder | None = None,
    disk: DiskTier | None = None,
    cost: CostModel | None = None,
    begins_apart: bool = False,
    keep_layout: Callable[[KvLayout], None] = lambda layout: None,
) -> AsyncIterator[RunningEngine]:
    """Run `model` as `cllm serve` would, beside `embedder`; on leaving, all sequences are ended and the invariants are checked.

    For use in a test's own task, where leaving by an exception of the body is fine; not in a generator fixture.
    """
    settings = Settings() if settings is None else settings
    limits = attrs.evolve(limits_of(model, settings), begins_apart=begins_apart)
    metrics = Metrics()
    engine = Engine(metrics=metrics, stream_n_bytes_max=settings.stream_buffer_kb * 1024, watchdog_s=watchdog_s)
    async with open_model_thread() as thread:
        loop = make_loop(model, settings, limits, cost, metrics, thread, disk, keep_layout)
        scheduler = loop.scheduler
        metrics.watch(scheduler)
        served = served_model(model, limits, settings, backend="fake", name="fake")
        loaded = OFF if embedder is None else loaded_embedder(embedder, settings.embedding_alias or ("fake-embedder",))
        embeddings = embeddings_of(loaded, loop, metrics, settings)
        engine.ready(served, loop, embeddings)
        ended = trio.Event()

        async def run() -> None:
            await loop.run()
            ended.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            if isinstance(embeddings, Embeddings):
                nursery.start_soon(embeddings.loop.run)
            try:
                yield RunningEngine(engine, loop, scheduler, ended)
            finally:
                nursery.cancel_scope.cancel()
    scheduler.check()
