"""An engine's life: load in the background, run, drain, end; and its death, which is never silent."""

from __future__ import annotations

import threading
from functools import partial

import structlog
import trio

from cllm.config import Settings
from cllm.engine.scheduler import Scheduler
from cllm.errors import Unavailable
from cllm.serve.embedders import embeddings_of, run_beside
from cllm.serve.embedding import EmbedLoop
from cllm.serve.engine import Embeddings, Engine
from cllm.serve.loading import Loaded, load, open_disk, what_is_kept
from cllm.serve.loop import StepLoop
from cllm.serve.metrics import Metrics
from cllm.serve.modelthread import ModelThread, open_model_thread
from cllm.serve.progress import Progress

log = structlog.get_logger("cllm.engine")


KEEP_S = 10.0  # at the end, for what is cached to be written to disk


class EngineLife:
    """Loads and runs the engine that `engine` shows to the API. One task runs `run`; the others call what they need."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        self.engine = Engine(metrics=Metrics(), stream_n_bytes_max=settings.stream_buffer_kb * 1024, watchdog_s=settings.watchdog_s)
        self.ready = trio.Event()
        self._settings = settings
        self._progress = progress
        self._abort_load = threading.Event()
        self._loop: StepLoop | None = None
        self._embed_loop: EmbedLoop | None = None
        self._draining = False
        self._ended = trio.Event()

    async def run(self) -> None:
        """Load, then work until drained.

        Raises: what loading raises (LoadAborted after `drain`), ModelDied, or what is our own mistake. The model is closed in every case.
        """
        try:
            async with open_model_thread() as thread:
                loaded = await thread.run(load, self._settings, self._on_progress)
                try:
                    await self._work(loaded, thread)
                finally:
                    if not isinstance(loaded.embedder, str):  # first: it may stand on the model's weights
                        loaded.embedder.embedder.close()
                    loaded.step_model.close()
        finally:
            self.engine.stopped()
            self._ended.set()

    async def wait_kept(self) -> None:
        """After `drain`, wait until what is cached is on disk, or the time for that is over; without a disk tier returns at once."""
        if self._loop is not None and self._loop.disk is not None:
            with trio.move_on_after(KEEP_S):
                await self._ended.wait()

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
        if self._loop.scheduler.n_sequences:
            log.warning("drain.cut", n_sequences=self._loop.scheduler.n_sequences, grace_s=grace_s)
        error = Unavailable("the server is shutting down", retry_after_s=5.0, code="draining")
        self._loop.end_all(error)
        if self._embed_loop is not None:
            self._embed_loop.end_all(error)

    async def _work(self, loaded: Loaded, thread: ModelThread) -> None:
        scheduler = Scheduler(loaded.limits, loaded.served.vocabulary, loaded.cost)
        disk = None if self._settings.cache_dir is None else await thread.run(open_disk, loaded.step_model, self._settings)
        loop = StepLoop(loaded.step_model, scheduler, self.engine.metrics, thread, disk)
        if self._draining:
            return
        self._loop = loop
        log.info("prefixes", kept=what_is_kept(loaded.limits))
        self.engine.metrics.watch(scheduler, disk)
        embeddings = embeddings_of(loaded.embedder, loop, self.engine.metrics, self._settings)
        self.engine.ready(loaded.served, loop, embeddings)
        self._progress.done(loaded.served)
        self.ready.set()
        if disk is None:
            await self._run(loop, embeddings)
        else:
            await disk.beside(partial(self._run, loop, embeddings))
            with trio.move_on_after(KEEP_S):
                await loop.keep_prefixes()

    async def _run(self, loop: StepLoop, embeddings: Embeddings | str) -> None:
        if isinstance(embeddings, str):
            await loop.run()
        else:
            self._embed_loop = embeddings.loop
            await run_beside(loop, embeddings.loop)

    def _on_progress(self, share: float) -> bool:  # called from the loading thread
        self.engine.progress = share
        self._progress.update(share)
        return not self._abort_load.is_set()
