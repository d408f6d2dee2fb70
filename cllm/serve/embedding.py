"""Runs an embedder beside the step loop: the two take turns, step by step, so that texts become vectors while answers go on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import attrs
import structlog
import trio

from cllm.backend import Embedder, ModelInfo, Pooling, Vectors, Vocabulary
from cllm.engine.embedding.pace import Pace
from cllm.engine.embedding.scheduler import EmbedPlan, EmbedScheduler, Job, Sums, Tokens, compute
from cllm.engine.waiting.fairness import Accounts, finds_room, likeliest
from cllm.engine.waiting.gate import Service, bearable
from cllm.errors import ModelDied, RequestError, Unavailable
from cllm.serve.metrics import Metrics
from cllm.serve.modelthread import ModelThread, Waiting, run_apart
from cllm.serve.worker.embedder import WorkerEmbedder
from cllm.serve.worker.life import WorkerLife

log = structlog.get_logger("cllm.embedding")

N_SLICES_IDLE = 4  # a step may be so many slices long while nobody generates

N_BYTES_MAX = 1 << 30  # of all requests together, inputs and vectors; the one that fills it up may have more


@attrs.frozen(kw_only=True)
class ServedEmbedder:
    """What gives vectors, as it is told to people."""

    name: str
    aliases: tuple[str, ...]  # all names that a request may use, `name` first
    info: ModelInfo
    vocabulary: Vocabulary
    pooling: Pooling
    n_embd: int
    n_tokens_max: int  # tokens of one input
    loaded_at: float  # seconds since the epoch
    pair: Callable[[str, str], list[int]]  # see `Embedder.pair`


class EmbedLoop:
    """Steps one embedder. All methods belong to the Trio thread; only `compute` runs elsewhere.

    `thread` is the step loop's own: who asks first is next, so the two alternate. `is_busy` tells whether it has work.
    """

    def __init__(
        self,
        embedder: Embedder,
        thread: ModelThread,
        metrics: Metrics,
        *,
        slice_s: float,
        n_jobs_max: int,
        is_busy: Callable[[], bool],
        key_weights: Mapping[str, float] | None = None,
    ) -> None:
        self.scheduler = EmbedScheduler(embedder, Accounts(key_weights))
        self._embedder = embedder
        self._life = embedder.life if isinstance(embedder, WorkerEmbedder) else None  # what may die and be replaced
        self._thread = thread
        self._turns = thread if self._life is None else Waiting(thread)
        self._metrics = metrics
        self._slice_s = slice_s
        self._n_jobs_max = n_jobs_max
        self._is_busy = is_busy
        self._pace = Pace()
        self._service = Service()  # in the time that it has, generation's turns included
        self._waiters: dict[Job, trio.Event] = {}
        self._weights = dict(key_weights or {})
        self._work = trio.Event()
        self._stopping = False
        self._progress_at = 0.0  # when a step last began or ended
        self._is_replacing = False  # a worker that died, as `Loop` has it

    def check_room(self, *keys: str) -> None:
        """Let a request pass that may join the queue now, of one of `keys` at least; the caller asks before it puts work into one.

        Raises: Unavailable.
        """
        if self._stopping:
            raise Unavailable("the server is draining", retry_after_s=5.0, code="draining")
        n_jobs_of, n_bytes_of = self._waiting_of_keys()

        def has_room(key: str) -> bool:
            return finds_room(key, n_jobs_of, self._n_jobs_max, self._weights) and finds_room(key, n_bytes_of, N_BYTES_MAX, self._weights)

        if not any(map(has_room, likeliest(keys or ("",), self._weights, n_jobs_of.__getitem__, n_bytes_of.__getitem__))):
            rate = self._service.rate
            empty_in_s = 0.0 if rate is None else sum(job.n_tokens_left for job in self._waiters) / rate
            raise Unavailable("the queue is full", retry_after_s=bearable(empty_in_s), code="queue_full")

    def _waiting_of_keys(self) -> tuple[Counter[str], Counter[str]]:
        """Requests that are not answered yet, by key, and the memory that they will have taken by then."""
        n_jobs: Counter[str] = Counter()
        n_bytes: Counter[str] = Counter()
        for job in self._waiters:
            n_jobs[job.key] += 1
            n_bytes[job.key] += job.n_bytes
        return n_jobs, n_bytes

    async def vectors(self, inputs: Sequence[Tokens], key: str = "") -> Vectors:
        """Return a vector of any length for each input, (n, n_embd). Cancelled, what is not computed yet is given up.

        Raises: Unavailable · InputTooLong · InvalidRequest · GenerationFailed.
        """
        self.check_room(key)
        job = self.scheduler.submit(inputs, key)
        done = self._waiters[job] = trio.Event()
        if not self._work.is_set():
            self._progress_at = trio.current_time()
            self._work.set()
        try:
            await done.wait()
        finally:
            if self._waiters.pop(job, None) is not None:  # it leaves before it was told anything
                self.scheduler.cancel(job)
                done.set()
                self._work.set()
        if job.error is not None:
            raise job.error
        return job.vectors

    async def run(self) -> None:
        """Work until `stop` and nothing is left. Raises: ModelDied, and what is our own mistake; every waiter is told first."""
        try:
            if self._life is not None:
                self._life.on_death = partial(self._notice_death, trio.lowlevel.current_trio_token())
            with self._thread.shared():
                while not (self._stopping and not self._waiters):
                    await self._turn()
        finally:
            self.end_all(Unavailable("the engine has stopped", retry_after_s=5.0, code="stopped"))

    async def _turn(self) -> None:
        """Do what is next; after a death once more, since the next one may have died while nobody looked."""
        if self._life is not None and self._life.is_dead:
            await self._replace(self._life, None, ModelDied("the worker died between two steps"))
            return
        plan = self.scheduler.plan(self._n_rows())
        if plan is not None:
            await self._step(plan)
        else:
            self._work = trio.Event()
            await self._work.wait()

    @property
    def n_waiting(self) -> int:
        """Requests that have no vectors yet."""
        return len(self._waiters)

    @property
    def is_replacing(self) -> bool:
        """As `Loop.is_replacing`."""
        return self._is_replacing

    def stalled_s(self, now: float) -> float:
        """Seconds since a step last began or ended while somebody waits for vectors; 0 when nobody does, or while a worker is replaced."""
        return now - self._progress_at if self._waiters and not self._is_replacing else 0.0

    def stop(self) -> None:
        """Take nothing more, and let `run` return once everything is answered."""
        self._stopping = True
        self._work.set()

    def end_all(self, error: RequestError) -> None:
        """End every job with `error`."""
        self._stopping = True
        self._tell(self.scheduler.end_all(error))

    async def wait_idle(self) -> None:
        """Wait until nobody waits for vectors."""
        while self._waiters:
            await next(iter(self._waiters.values())).wait()

    def _n_rows(self) -> int:
        return self._pace.n_rows(self._slice_s * (1 if self._is_busy() else N_SLICES_IDLE))

    async def _step(self, plan: EmbedPlan) -> None:
        self._progress_at = trio.current_time()
        try:
            pooled, seconds = await self._turns.run(self._compute, plan)
        except ModelDied as error:
            if self._life is None:
                raise
            await self._replace(self._life, None if self._life.may_be_a_texts else plan, error)  # see `StepLoop._step`
            return
        except Exception as error:
            self._progress_at = trio.current_time()
            self._metrics.step_failed(error)
            log.error("embedding.failed", why=f"{type(error).__name__}: {error}", n_inputs=len(plan.parts))
            self._tell(self.scheduler.apply_failure(plan, error))
            return
        begun_at, self._progress_at = self._progress_at, trio.current_time()
        self._service.step(plan.batch.n_rows, 0, self._progress_at - begun_at)
        self._pace.took(plan.batch.n_rows, seconds)
        self._metrics.embedded(_n_rows_of_keys(plan), seconds)
        self._tell(self.scheduler.apply(plan, pooled))

    async def _replace(self, life: WorkerLife, plan: EmbedPlan | None, error: ModelDied) -> None:
        """The worker died: another one starts over, beside the answers that go on. Raises: ModelDied when there can be none."""
        log.error("worker.died", why=str(error), n_inputs=0 if plan is None else len(plan.parts))
        self._metrics.step_failed(error)
        given_up = self.scheduler.apply_death(plan, error)
        if given_up:
            life.was_blameless()
        self._tell(given_up)
        self._is_replacing = True
        try:
            await run_apart(life.revive)
        finally:
            self._is_replacing = False
        self._progress_at = trio.current_time()
        log.warning("worker.replaced", pid=life.pid, ended=life.last_end)

    def _notice_death(self, token: trio.lowlevel.TrioToken) -> None:
        """From a thread: an idle loop is woken to look."""
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(lambda: self._work.set())

    def _compute(self, plan: EmbedPlan) -> tuple[list[Sums], float]:
        started_at = time.perf_counter()
        pooled = compute(self._embedder, plan)
        return pooled, time.perf_counter() - started_at

    def _tell(self, jobs: list[Job]) -> None:
        for job in jobs:
            waiter = self._waiters.pop(job, None)
            if waiter is not None:
                waiter.set()


def _n_rows_of_keys(plan: EmbedPlan) -> Counter[str]:
    n_rows_of: Counter[str] = Counter()
    for one, n_rows in plan.parts:
        n_rows_of[one.job.key] += n_rows
    return n_rows_of
