"""An engine's life: load in the background, run, drain, end; and its death, which is never silent."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import attrs
import structlog
import trio

from cllm.backend import KvLayout, StepModel, n_logprobs_max_of
from cllm.config import Settings
from cllm.engine.cost.model import CostModel
from cllm.engine.limits import Limits
from cllm.engine.stepping import StepScheduler
from cllm.engine.streaming import StreamScheduler
from cllm.engine.telling import TextScheduler
from cllm.errors import LoadAborted, LoadFailed, Unavailable
from cllm.serve.disktier import DiskTier
from cllm.serve.embedders import embeddings_of, run_beside
from cllm.serve.embedding import EmbedLoop
from cllm.serve.engine import Embeddings, Engine, new_engine
from cllm.serve.loading import (
    Loaded,
    check_folder,
    host_pool_bytes,
    keep_layout,
    limits_of,
    load,
    load_unmeasured,
    measured,
    open_disk,
    what_is_kept,
)
from cllm.serve.loop import Loop
from cllm.serve.metrics import Metrics
from cllm.serve.modelthread import ModelThread, NoThread, open_model_thread, run_apart
from cllm.serve.progress import Progress
from cllm.serve.stepless import StreamsOnly
from cllm.serve.steploop import StepLoop
from cllm.serve.streamloop import StreamLoop
from cllm.text.unread import NoVocabulary

log = structlog.get_logger("cllm.engine")
T = TypeVar("T")

KEEP_S = 10.0  # at the end, for what is cached to be written to disk
LEAVE_S = 0.5  # at the end, for answers that have ended to be written
GIVE_UP_S = 5.0  # at the end, for a load to be given up: a download would leave half a file, of as many GiB as it had got
STEP_S = 0.9  # a step cannot be interrupted: when everything else has ended, the process waits no longer for one
CLOSE_S = 5.0  # at the end, for a model to close: it may have to end what it has started, as an engine of its own


class EngineLife:
    """Loads and runs the engine that `engine` shows to the API. One task runs `run`; the others call what they need."""

    def __init__(
        self,
        settings: Settings,
        progress: Progress,
        engine: Engine | None = None,
        on_ready: Callable[[int], None] = lambda n_bytes: None,
        until_left: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
        promised: Callable[[], int] = lambda: 0,
        on_death: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """`engine` is one without a model; `on_ready` is told the memory that the model takes, as far as it is known; `on_death` what it
        died of, before it is closed: who is broken may take any time for that.

        `until_left` waits until nobody uses the model any more: an answer that has ended may still be written, by its vocabulary.
        `promised` tells the bytes of `promised_bytes` of all others.
        """
        self.engine = new_engine(settings) if engine is None else engine
        self.ready = trio.Event()
        self._settings = settings
        self._progress = progress
        self._abort_load = threading.Event()
        self._loop: Loop | None = None
        self._embed_loop: EmbedLoop | None = None
        self._draining = False
        self._closing = trio.Event()  # nothing of it runs any more
        self._ended = trio.Event()
        self._on_ready = on_ready
        self._until_left = until_left
        self._promised = promised
        self._on_death = on_death
        self._mapped_bytes = 0

    async def run(self) -> None:
        """Load, then work until drained, in a thread of its own. Raises: as `run_on`."""
        async with open_model_thread() as thread:
            await self.run_on(thread)

    async def run_on(self, thread: ModelThread, *, beside_others: bool = False) -> None:
        """Load, then work until drained. `beside_others` keeps the load from holding up the thread's other models.

        Raises: what loading raises (LoadAborted after `drain`), ModelDied, or what is our own mistake. The model is closed in every case.
        """
        try:
            if self._settings.cache_dir is not None:  # not when the model has been loaded for minutes
                await _apart(check_folder, self._settings.cache_dir)
            try:
                loaded = await self._load(thread, beside_others=beside_others)
            except LoadAborted as error:
                if self._abort_load.is_set():
                    raise
                raise LoadFailed("the backend gave the load up, and nobody had asked it to") from error
            try:
                await self._work(loaded, thread)
            except LoadFailed:
                raise
            except Exception as error:
                self.engine.stopped()
                self._on_death(error)
                raise
            finally:
                self._closing.set()
                with trio.CancelScope(shield=True):
                    with trio.move_on_after(LEAVE_S):
                        await self._until_left()
                    await thread.run_last(loaded.close)
        finally:
            self.engine.stopped()
            self._closing.set()  # also of what was never loaded
            self._ended.set()

    async def _load(self, thread: ModelThread, *, beside_others: bool) -> Loaded:
        if not beside_others:
            return await thread.run(load, self._settings, self._on_progress)
        loaded = await _apart(load_unmeasured, self._settings, self._on_progress)
        with trio.CancelScope(shield=True):  # it closes what it cannot measure
            known = await thread.run(measured, loaded, self._settings, self._on_progress)
        return known  # noqa: RET504  # mypy takes a scope for something that may swallow exceptions

    @property
    def promised_bytes(self) -> int:
        """What counts as free memory and may be taken at any time: the pages of a mapped file, and the empty part of the host's pool."""
        if self._loop is None:
            return 0
        offload = self._loop.scheduler.memory.offload
        pool_bytes = 0 if offload is None else max(offload.pool.n_bytes_max - offload.pool.n_bytes, 0)
        return self._mapped_bytes + pool_bytes

    @property
    def n_embedding_requests(self) -> int:
        """Requests that wait for vectors."""
        return 0 if self._embed_loop is None else self._embed_loop.n_waiting

    async def wait_ended(self) -> None:
        """After `drain`, wait until what is cached is on disk or a load is given up, and the model is closed, or the time for that is over.

        For a step that runs on although nobody waits for it any more, there is little time.
        """
        with trio.move_on_after(GIVE_UP_S if self._loop is None else KEEP_S if self._loop.keeps_for_later else STEP_S):
            await self._closing.wait()
        if not self._closing.is_set():
            return
        with trio.move_on_after(CLOSE_S):
            await self._ended.wait()
        if not self._ended.is_set():
            log.warning("close.cut", seconds=CLOSE_S, why="the model has not closed in time, and the process ends without")

    def drain(self) -> None:
        """Accept nothing more; `run` returns when the running sequences have ended. A load under way is given up."""
        self._draining = True
        self._abort_load.set()
        self.engine.drain()
        if self._loop is not None:
            self._loop.stop()
        if self._embed_loop is not None:
            self._embed_loop.stop()

    async def finish(self, grace_s: float) -> None:
        """Drain, and end with an error what has not ended by itself after `grace_s`."""
        self.drain()
        if self._loop is None:
            return
        with trio.move_on_after(grace_s):
            await self._loop.wait_idle()
            if self._embed_loop is not None:
                await self._embed_loop.wait_idle()
        n_sequences, n_embedding = self._loop.scheduler.n_sequences, self.n_embedding_requests
        if n_sequences or n_embedding:
            log.warning("drain.cut", n_sequences=n_sequences, n_embedding_requests=n_embedding, grace_s=grace_s)
        error = Unavailable("the server is shutting down", retry_after_s=5.0, code="draining")
        self._loop.end_all(error)
        if self._embed_loop is not None:
            self._embed_loop.end_all(error)

    async def _work(self, loaded: Loaded, thread: ModelThread) -> None:
        keep = partial(keep_layout, loaded.curve_key, self._settings)
        limits, self._mapped_bytes = loaded.limits, loaded.step_model.info.mapped_bytes
        if promised := self._promised():
            limits = attrs.evolve(limits, host_pool_n_bytes=host_pool_bytes(loaded.step_model, self._settings, promised))
        disk = None if self._settings.cache_dir is None else await _apart(open_disk, attrs.evolve(loaded, limits=limits), self._settings)
        loop = make_loop(loaded.step_model, self._settings, limits, loaded.cost, self.engine.metrics, thread, disk, keep)
        if self._draining:
            return
        self._loop = loop
        kept = what_is_kept(loaded.step_model, limits)
        n_bytes_kept = limits.host_pool_n_bytes if limits.keeps_prefixes and limits.can_save else 0
        log.info("prefixes", kept=kept, host_cache_mib=n_bytes_kept >> 20)
        self.engine.metrics.watch(loop.scheduler, disk)
        embeddings = embeddings_of(loaded.embedder, loop, self.engine.metrics, self._settings)
        self.engine.ready(loaded.served, loop, embeddings)
        self._progress.done(loaded.served)
        self.ready.set()
        self._on_ready(loaded.n_bytes)
        try:
            if disk is None:
                await self._run(loop, embeddings)
            else:
                await disk.beside(partial(self._run, loop, embeddings))
                with trio.move_on_after(KEEP_S):
                    await loop.keep_prefixes()
        finally:
            loop.forget_host()  # what is left of the loop may lie about for long

    async def _run(self, loop: Loop, embeddings: Embeddings | str) -> None:
        if isinstance(embeddings, str):
            await loop.run()
        else:
            self._embed_loop = embeddings.loop
            await run_beside(loop, embeddings.loop)

    def _on_progress(self, share: float) -> bool:  # called from the loading thread
        self.engine.progress = share
        self._progress.update(share)
        return not self._abort_load.is_set()


async def _apart(work: Callable[..., T], *arguments: Any) -> T:
    """`run_apart`, but that for want of a thread the load has failed, and is tried again as others are. Raises: LoadFailed."""
    try:
        return await run_apart(work, *arguments)
    except NoThread as error:
        raise LoadFailed(str(error)) from error


def _stream_scheduler(model: StreamsOnly, limits: Limits) -> StreamScheduler:
    streams = model.stream_model
    if isinstance(model.vocabulary, NoVocabulary):
        return TextScheduler(limits, model.vocabulary, streams.heeds, n_logprobs_max_of(streams))
    return StreamScheduler(limits, model.vocabulary, streams.heeds, n_logprobs_max_of(streams))


def make_loop(
    model: StepModel,
    settings: Settings,
    limits: Limits,
    cost: CostModel | None,
    metrics: Metrics,
    thread: ModelThread,
    disk: DiskTier | None = None,
    keep_layout: Callable[[KvLayout], None] = lambda layout: None,
) -> Loop:
    """Return what runs `model`, with a scheduler of its kind. Raises: LoadFailed when one that schedules itself cannot begin."""
    if isinstance(model, StreamsOnly):
        return StreamLoop(model, _stream_scheduler(model, limits), metrics, thread)
    return StepLoop(
        model, StepScheduler(limits, model.vocabulary, cost), metrics, thread, disk, partial(limits_of, settings=settings), keep_layout
    )
