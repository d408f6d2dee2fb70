"""The step loop: plan, compute in the models' thread, apply, deliver. One task touches the model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from functools import partial

import structlog
import trio

from cllm.backend import KvLayout, LaysOut, StepModel
from cllm.engine.compute import compute, empty
from cllm.engine.events import Delta, Event, Failed
from cllm.engine.plan import Plan, StepOutput
from cllm.engine.scheduler import Limits, Scheduler
from cllm.engine.sequence import SequenceSpec
from cllm.errors import Aborted, LoadFailed, ModelDied, NoRoom, RequestError, Unavailable, call_foreign, in_one_line
from cllm.serve.beside import beside
from cllm.serve.disktier import DiskTier
from cllm.serve.metrics import Metrics
from cllm.serve.modelthread import ModelThread, Waiting, run_apart
from cllm.serve.stepless import StreamsOnly
from cllm.serve.streams import EventStream
from cllm.serve.worker import WorkerModel
from cllm.serve.workerlife import WorkerLife
from cllm.serve.workerstreams import WorkerStreams

log = structlog.get_logger("cllm.loop")

N_TURNS_FOR_COMPANIONS = 8  # of Trio's scheduler: about what a request needs from its socket to the queue; 0.1 ms when nobody else comes
# Others who come so soon after the one that ended an idle time belong to it; and how long they are waited for at most.
COMPANIONS_S = 0.05
SILENCE_S_LEAST, SILENCE_S_MOST = 0.001, 0.006  # after which nobody else is taken to come; timers are no finer
LOOK_S = 0.25  # into a step, and then again and again, whether the time of somebody who waits is over
BACK_UP_AFTER_S = 2.0  # without work for any model, what is cached goes to disk
PATIENCE = 4.0  # times as long a silence is borne while fewer have come than the last time


class StepLoop:
    """Runs one model for one scheduler. All methods belong to the Trio thread; only `compute` runs elsewhere."""

    def __init__(
        self,
        model: StepModel,
        scheduler: Scheduler,
        metrics: Metrics,
        thread: ModelThread,
        disk: DiskTier | None = None,
        limits_of: Callable[[StepModel], Limits] | None = None,
        keep_layout: Callable[[KvLayout], None] = lambda layout: None,
    ) -> None:
        self.scheduler = scheduler
        self.thread = thread
        self.disk = disk  # takes what the host pool gives up
        self.on_layout: Callable[[StepModel], None] = lambda model: None  # called when its cells lie otherwise than before
        if disk is not None and scheduler.memory.offload is not None:
            scheduler.memory.offload.pool.keep_evicted()
        self._model = model
        self._limits_of = limits_of  # of the model, when its cells have been laid out anew
        self._keep_layout = keep_layout  # for the next start; may block
        self._worker = model if isinstance(model, WorkerModel) else None
        self._life: WorkerLife | None = life_of(model)  # what may die and be replaced
        self._turns = thread if self._life is None else Waiting(thread)
        self._metrics = metrics
        self._streams: dict[int, EventStream] = {}
        self._owed: list[Event] = []  # to be delivered, in this order
        self._failure: Exception | None = None  # of a delivery
        self._work = trio.Event()  # set when an idle loop has something to look at
        self._idle_event = trio.Event()  # set while nothing is under way
        self._is_idle = False
        self._roused_at = -math.inf  # when the last idle time ended
        self._n_companions = 0  # that came soon after
        self._n_companions_before = 0  # and after the idle time before
        self._stopping = False
        self._has_ended = False
        self._plan: Plan | None = None  # of the step that runs
        self._progress_at = 0.0  # when a step last began or ended
        self._n_taken = 0  # calls of the thread, up to our last step
        self._timed_step = trio.Event()  # set while a step runs and somebody's time may be over before it is; or all wait
        self._all_wait = False  # for something else than a step, which may take many seconds
        self._is_replacing = False  # a worker that died: loading the next one has a limit of its own

    # --- from the API's side ------------------------------------------------------------------------------------------

    def open(self, specs: Seq[SequenceSpec], *, n_bytes_max: int) -> EventStream:
        """Submit sequences, all or none; return the stream of their events. Raises: ContextExceeded · Unavailable after its end."""
        if self._has_ended:
            raise _stopped()
        for spec in specs:  # before any of them is queued, and counted
            self.scheduler.check_length(spec)
        now = trio.current_time()
        if not self.scheduler.n_sequences:
            self._progress_at = now
        seq_ids: list[int] = []
        try:
            for spec in specs:
                seq_ids.append(self.scheduler.submit(spec, now))
        except Exception:
            for seq_id in seq_ids:
                self.cancel(seq_id)
            raise
        stream = EventStream(seq_ids, self.cancel, n_bytes_max=n_bytes_max)
        self._streams.update(dict.fromkeys(seq_ids, stream))
        if (self._plan is not None or self._all_wait) and self.scheduler.has_deadlines:
            self._timed_step.set()
        if not self._is_idle and now - self._roused_at <= COMPANIONS_S:
            self._n_companions += 1
        self._wake(now)
        return stream

    def cancel(self, seq_id: int) -> None:
        """Mark a sequence; an idle loop is woken to free it, and a step that nobody waits for any more is ended if that can be."""
        self.scheduler.cancel(seq_id)
        if self._plan is not None or self._all_wait:
            self._sweep_waiting()
        self._wake(trio.current_time())

    def _sweep_waiting(self) -> None:
        """While a step runs or all wait, which may take many seconds, let those go who only wait: they count in the queue, and for their
        keys. If nobody is left who waits for the step, it is given up.
        """
        try:
            events = self.scheduler.sweep_waiting(trio.current_time())
            plan = self._plan
            if plan is not None and not plan.is_given_up and self.scheduler.is_futile(plan):
                self._give_up(plan)
        except Exception as error:  # ours, and none of a client's that leaves
            self._failure = error
            return
        if events:
            self._owed += events
            # Not at once: this may be called by a stream that is being told something, or that goes through its sequences.
            trio.lowlevel.current_trio_token().run_sync_soon(self._deliver_soon)

    def _give_up(self, plan: Plan) -> None:
        plan.is_given_up = True
        if self._model.capabilities.can_abort:
            self._abort()

    def _abort(self) -> None:
        try:
            call_foreign(self._model.abort)
        except Exception as error:  # the step goes on to its end, as it would without
            log.error("abort.failed", why=in_one_line(error))

    @property
    def is_computing(self) -> bool:
        """Whether a step is under way."""
        return self._plan is not None

    @property
    def is_replacing(self) -> bool:
        """Whether a worker died and the next one is being loaded."""
        return self._is_replacing

    def stalled_s(self, now: float) -> float:
        """Seconds since a step last began or ended while there is work; 0 when there is none, or while a worker is replaced."""
        return now - self._progress_at if self.scheduler.n_sequences and not self._is_replacing else 0.0

    # --- its life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `stop` and nothing is left. Raises: ModelDied, and whatever is our own mistake; every stream is ended first."""
        try:
            if self._life is not None:
                self._life.on_death = partial(self._notice_death, trio.lowlevel.current_trio_token())
            with self.thread.shared():
                await beside(self._work_on, self._watch_deadlines)
        finally:
            self._has_ended = True
            self.end_all(_stopped())

    async def _work_on(self) -> None:
        while not (self._stopping and not self.scheduler.n_sequences):
            if self._failure is not None:
                raise self._failure
            await self._turn()

    async def _watch_deadlines(self) -> None:
        """While steps run; between them whose time is over is looked at in any case."""
        while True:
            await self._timed_step.wait()
            await trio.sleep(LOOK_S)
            if self._timed_step.is_set():
                self._sweep_waiting()

    async def _turn(self) -> None:
        """Do what is next. Whatever was awaited ends the turn: what happened meanwhile is looked at before anybody sleeps in `_idle`."""
        if self._life is not None and self._life.is_dead:
            await self._replace(self._life, None, ModelDied("the worker died between two steps"))
            return
        layout = self.scheduler.layout_due()
        if layout is not None:
            await self._lay_out(layout)
            return
        self.scheduler.has_neighbours = self._has_neighbours()
        plan = self.scheduler.plan(trio.current_time())
        if plan is None:
            self._deliver_owed()
            await self._idle()
            self._n_taken = self.thread.n_taken
            return
        self._owed += plan.events
        if plan.is_step:
            await self._step(plan)

    def _has_neighbours(self) -> bool:
        """Whether another loop computes in the thread now, or did so since our last step or rest: it would wait for the next one."""
        return self.thread.n_sharing > 1 and (self.thread.is_busy or self.thread.n_taken > self._n_taken)

    async def keep_prefixes(self) -> None:
        """After `run`, write what is cached in the model's memory and on the host to disk, if there is a disk tier."""
        offload = self.scheduler.memory.offload
        if self.disk is None or offload is None:
            return
        try:
            while (plan := self.scheduler.plan_retirement()) is not None:
                await self._step(plan)
        except ModelDied as error:
            if self._life is None:
                raise
            log.warning("disk.unsaved", why=str(error))  # what a worker had; nobody wants another one for that
        await self.disk.keep(offload.pool.pieces())

    def forget_host(self) -> None:
        """After `run` and `keep_prefixes`, give back the memory of what was saved on the host."""
        offload = self.scheduler.memory.offload
        if offload is not None:
            offload.pool.clear()

    async def recall(self, specs: Seq[SequenceSpec]) -> None:
        """Before sequences are submitted, bring what the disk has of their beginnings into memory; returns at once if it has nothing."""
        if self.disk is None:
            return
        shared = [spec for spec in specs if spec.cache_prompt and spec.n_prompt_logprobs is None]
        # Answers to one prompt have the same list of it, and to hash that for each would take long.
        for spec in {(spec.cache_salt, spec.adapter, id(spec.prompt)): spec for spec in shared}.values():
            await self.disk.recall(self.scheduler.memory, (spec.cache_salt, spec.adapter), list(spec.prompt))

    def stop(self) -> None:
        """Let `run` return once every sequence has ended."""
        self._stopping = True
        self._work.set()

    def end_all(self, error: RequestError) -> None:
        """End every sequence with `error`; an idle loop that has been told to stop is woken to do so, and rows under way are given up."""
        self._owed += self.scheduler.end_all(error)
        if self._plan is not None and self._plan.n_rows and not self._plan.is_given_up:
            self._give_up(self._plan)
        self._deliver_owed()
        self._work.set()

    async def wait_idle(self) -> None:
        """Wait until no sequence is under way."""
        while self.scheduler.n_sequences:
            if self._idle_event.is_set():  # not replaced while another one waits for it
                self._idle_event = trio.Event()
            await self._idle_event.wait()

    # --- one step -----------------------------------------------------------------------------------------------------

    async def _step(self, plan: Plan) -> None:
        self._progress_at = trio.current_time()
        self._plan = plan
        try:
            token = trio.lowlevel.current_trio_token()
            if self.thread.is_busy:  # an embedder's step runs: what is owed need not wait for its end
                self._deliver_owed()
            if self.scheduler.has_deadlines:
                self._timed_step.set()
            self._n_taken = self.thread.n_taken + 1
            output = await self._turns.run(self._compute, plan, token)
        except ModelDied as error:
            if self._life is None or self._has_ended:
                raise
            # A text that may have killed it is tried again, and found by itself: no step is to blame.
            await self._replace(self._life, None if self._life.may_be_a_texts else plan, error)
            return
        except Exception as error:
            self._progress_at = trio.current_time()
            self._report(plan, error)
            self._owed += self.scheduler.apply_failure(plan, error, self._progress_at)
            self._hand_down()
            return
        finally:
            self._plan = None
            if self._timed_step.is_set():
                self._timed_step = trio.Event()
        self._progress_at = now = trio.current_time()
        self._metrics.step(plan, output)
        self._owed += self.scheduler.apply(plan, output, now)
        self._hand_down()

    async def _lay_out(self, layout: KvLayout) -> None:
        """Lay the model's cells out anew; everybody waits meanwhile, and is computed again unless it can be carried. Raises: ModelDied."""
        assert isinstance(self._model, LaysOut)
        assert self._limits_of is not None
        began_at = trio.current_time()
        n_running, n_slots = self.scheduler.n_running, self.scheduler.limits.n_slots_apart or 1
        self.scheduler.interrupt(began_at)
        self._deliver_owed()
        while (plan := self.scheduler.plan_departure(trio.current_time())) is not None:
            await self._step(plan)
        self.scheduler.vacate()
        vacated_at = self._progress_at = trio.current_time()
        with self._all_waiting():
            try:
                await self._turns.run(self._model.lay_out, layout, n_slots)
            except ModelDied:
                raise
            except LoadFailed as error:
                log.warning("layout.failed", layout=layout.value, why=str(error))
            except Exception as error:
                self._metrics.step_failed(error)
                log.error("layout.failed", layout=layout.value, why=in_one_line(error))
                await self._turns.run(_empty_all, self._model)  # they may be as they were, and nobody knows who has cells in them
            self._progress_at = trio.current_time()
            self._owed += self.scheduler.laid_out(self._limits_of(self._model), self._progress_at - vacated_at)
            self.on_layout(self._model)
            try:
                await trio.to_thread.run_sync(self._keep_layout, self._model.capabilities.kv_layout)
            except Exception as error:  # the system has no thread left: the next start begins as this one did
                log.warning("layout.unkept", why=in_one_line(error))
        log.info("layout", layout=layout.value, n_running=n_running, seconds=round(self._progress_at - began_at, 2))

    @contextmanager
    def _all_waiting(self) -> Iterator[None]:
        """No step can be planned within: who leaves is let go all the same, and who waits hears when his time is over."""
        self._all_wait = True
        if self.scheduler.has_deadlines:
            self._timed_step.set()
        try:
            yield
        finally:
            self._all_wait = False
            if self._plan is None and self._timed_step.is_set():
                self._timed_step = trio.Event()

    async def _replace(self, life: WorkerLife, plan: Plan | None, error: ModelDied) -> None:
        """The worker died, in the step of `plan` or between two: another one goes on where it was. Raises: ModelDied when none can."""
        died_at = trio.current_time()
        log.error("worker.died", why=str(error), n_sequences=self.scheduler.n_sequences)
        self._metrics.step_failed(error)
        events = self._apply_death(plan, error, died_at)
        self._hand_down()
        if any(isinstance(event, Failed) for event in events):
            life.was_blameless()
        self._owed += events
        self._deliver_owed()
        self._is_replacing = True
        try:
            with self._all_waiting():
                await run_apart(life.revive)  # other models compute meanwhile
        finally:
            self._is_replacing = False
        self._progress_at = trio.current_time()
        log.warning("worker.replaced", pid=life.pid, seconds=round(self._progress_at - died_at, 2))

    def _apply_death(self, plan: Plan | None, error: ModelDied, now: float) -> list[Event]:
        return self.scheduler.apply_death(plan, error, now)

    def _notice_death(self, token: trio.lowlevel.TrioToken) -> None:
        """From a thread: an idle loop is woken to look."""
        with suppress(trio.RunFinishedError):
            token.run_sync_soon(lambda: self._work.set())

    def _hand_down(self) -> None:
        """Let the disk tier have what the host pool had to give up, and forget what the model did not take."""
        offload = self.scheduler.memory.offload
        if self.disk is not None and offload is not None:
            self.disk.refuse(offload.pool.take_refused())
            self.disk.offer(offload.pool.take_evicted())

    def _compute(self, plan: Plan, token: trio.lowlevel.TrioToken) -> StepOutput:
        """In the models' thread. Only now that it runs are the last step's events sent: earlier, sending them would hold it up."""
        if self._owed:
            token.run_sync_soon(self._deliver_soon)
        if plan.is_given_up:  # an abort that came while the call was on its way here is lost
            raise Aborted("nobody waits for this step")
        if self._worker is not None:
            return self._worker.compute(plan)
        return compute(self._model, plan, time.perf_counter)

    def _deliver_soon(self) -> None:
        try:
            self._deliver_owed()
        except Exception as error:  # from here it would end Trio itself; from `run` it ends the streams, then the engine
            self._failure = error

    def _deliver_owed(self) -> None:
        events, self._owed = self._owed, []
        streams = self._streams
        for event in events:
            stream = streams.get(event.seq_id)
            if stream is None:
                continue
            stream.put(event)
            if not isinstance(event, Delta):
                del streams[event.seq_id]
                self._metrics.end(event)
                if isinstance(event, Failed) and event.error.code == "answer_unread":
                    log.error("answer.unread", exc_info=event.error.__cause__)
        if not self.scheduler.n_sequences:
            self._idle_event.set()

    def _report(self, plan: Plan, error: Exception) -> None:
        if isinstance(error, Aborted) and plan.is_given_up:
            self._metrics.step_aborted()
            log.debug("step.aborted", n_rows=plan.n_rows)
            return
        self._metrics.step_failed(error)
        if isinstance(error, NoRoom | Aborted):
            log.info("step.retried", why=str(error) or type(error).__name__, n_rows=plan.n_rows)
        else:
            log.error("step.failed", why=f"{type(error).__name__}: {error}", n_rows=plan.n_rows, n_sequences=len(plan.members()))
            log.debug("step.failed", exc_info=error)

    async def _idle(self) -> None:
        if self._stopping and not self.scheduler.n_sequences:  # it was told so while cells were laid out, say
            return
        self._work, self._is_idle = trio.Event(), True
        if self.disk is not None:
            await self._back_up(self.disk)
        await self._work.wait()
        if self.disk is not None:
            self.disk.back_up_no_more()
        self._is_idle = False
        # Requests that came at the same moment are still being read: a step that began without them would keep them waiting for its end.
        for _ in range(N_TURNS_FOR_COMPANIONS):
            await trio.lowlevel.checkpoint()
        latest = self._roused_at + COMPANIONS_S
        while (silence_s := self._silence_s()) >= SILENCE_S_LEAST and trio.current_time() < latest:
            n_before, self._work = self._n_companions, trio.Event()
            with trio.move_on_at(min(trio.current_time() + silence_s, latest)):
                await self._work.wait()
            if self._n_companions == n_before:
                return

    async def _back_up(self, disk: DiskTier) -> None:
        """Nobody asks: what is cached is copied and written to disk, so that it outlives whatever ends the process.

        Returns as soon as there is work; who comes, to whichever model, waits for the copy of one branch at most.
        """
        offload = self.scheduler.memory.offload
        if offload is None:
            return
        tried: set[int] = set()  # each slot once: a copy may fail
        n_stored = partial(disk.n_stored, pool=offload.pool)
        while await self._is_quiet() and not disk.rests:
            n_taken = self.thread.n_taken
            while not self._work.is_set() and disk.keeps_up and self.thread.n_taken == n_taken:
                plan = self.scheduler.plan_copy(tried, n_stored)
                if plan is None:
                    disk.back_up(offload.pool.pieces())
                    return
                await self._step(plan)
                n_taken += 1

    async def _is_quiet(self) -> bool:
        """Wait until no model of this process has computed for a while, since all of them do so in one thread; False as soon as there is
        work here.
        """
        while not self._work.is_set():
            n_taken = self.thread.n_taken
            with trio.move_on_after(BACK_UP_AFTER_S):
                await self._work.wait()
            if not self._work.is_set() and self.thread.n_taken == n_taken and not self.thread.is_busy:
                return True
        return False

    def _silence_s(self) -> float:
        """How long to wait for one more who comes at the same moment: many who were answered together take a while to ask again."""
        patience = PATIENCE if self._n_companions < self._n_companions_before else 1.0
        return min(patience * self.scheduler.companions_s(), SILENCE_S_MOST)

    def _wake(self, now: float) -> None:
        if self._is_idle:
            self._is_idle, self._roused_at = False, now
            self._n_companions_before, self._n_companions = self._n_companions, 0
        self._work.set()


def life_of(model: StepModel) -> WorkerLife | None:
    """Return what may die apart from this process, if there is such a thing."""
    inner = model.stream_model if isinstance(model, StreamsOnly) else model
    return inner.life if isinstance(inner, WorkerModel | WorkerStreams) else None


def _stopped() -> Unavailable:
    return Unavailable("the engine has stopped", retry_after_s=5.0, code="stopped")


def _empty_all(model: StepModel) -> None:
    for slot in range(model.n_slots):
        empty(model, slot)
