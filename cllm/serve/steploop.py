"""The step loop: plan, compute in the models' thread, apply, deliver. One task touches the model."""

from __future__ import annotations

import contextvars
import math
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from functools import partial

import attrs
import trio

from cllm.backend import DrawsTokens, KvLayout, LaysOut, StepModel
from cllm.engine.batch.ahead import Ahead
from cllm.engine.batch.compute import compute, empty
from cllm.engine.batch.plan import Plan, StepOutput
from cllm.engine.events import Event
from cllm.engine.limits import Limits
from cllm.engine.sequence import FINISHED, Sequence, SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.errors import Aborted, LoadFailed, ModelDied, NoRoom, RequestError, StepFailed, call_foreign, in_one_line
from cllm.serve.disktier import N_BYTES_OWED_MAX, DiskTier
from cllm.serve.loop import Loop, log
from cllm.serve.metrics import Metrics
from cllm.serve.modelthread import Call, ModelThread, Waiting
from cllm.serve.streams import EventStream
from cllm.serve.worker.model import WorkerModel

N_TURNS_FOR_COMPANIONS = 8  # of Trio's scheduler: about what a request needs from its socket to the queue; 0.1 ms when nobody else comes
# Others who come so soon after the one that ended an idle time belong to it; and how long they are waited for at most.
COMPANIONS_S = 0.05
SILENCE_S_LEAST, SILENCE_S_MOST = 0.001, 0.006  # after which nobody else is taken to come; timers are no finer
BACK_UP_AFTER_S = 2.0  # without work for any model, what is cached goes to disk
KEEP_LAYOUT_S = 1.0
N_AHEAD_MAX = 16  # steps in a row that follow on the one before: what is looked after between steps is looked after that often
N_UNASKED_MAX = 3
PATIENCE = 4.0  # times as long a silence is borne while fewer have come than the last time


@attrs.frozen(eq=False)
class Following:
    """The step that is to begin by itself behind the one that runs, and the call of it in the models' thread."""

    ahead: Ahead
    call: Call[StepOutput | None]


class StepLoop(Loop):
    """Only `compute` runs outside the Trio thread, and what begins a step that was planned ahead."""

    scheduler: StepScheduler

    def __init__(
        self,
        model: StepModel,
        scheduler: StepScheduler,
        metrics: Metrics,
        thread: ModelThread,
        disk: DiskTier | None = None,
        limits_of: Callable[[StepModel], Limits] | None = None,
        keep_layout: Callable[[KvLayout], None] = lambda layout: None,
    ) -> None:
        super().__init__(model, scheduler, metrics, thread)
        self.disk = disk  # takes what the host pool gives up
        if disk is not None and scheduler.memory.offload is not None:
            scheduler.memory.offload.pool.keep_evicted(N_BYTES_OWED_MAX)
        self._limits_of = limits_of  # of the model, when its cells have been laid out anew
        self._keep_layout = keep_layout  # for the next start; may block
        self._keeping = trio.CapacityLimiter(1)
        self._worker = model if isinstance(model, WorkerModel) else None
        self._turns = thread if self._life is None else Waiting(thread)
        self._is_idle = False
        self._roused_at = -math.inf  # when the last idle time ended
        self._n_companions = 0  # that came soon after
        self._n_companions_before = 0  # and after the idle time before
        self._plan: Plan | None = None  # of the step that runs
        self._following: Following | None = None  # the step after it, if that is to begin by itself
        self._last_following: Call[StepOutput | None] | None = None  # the call of the last such step, whatever became of it
        self._begun: Call[StepOutput | None] | None = None  # of one that has begun so, while the one before it is settled already
        self._n_ahead = 0  # such steps in a row
        self._draws = isinstance(model, DrawsTokens)
        self._context = contextvars.copy_context()  # of these calls
        self._n_taken = 0  # calls of the thread, up to our last step
        # Of a sequence's steps in a row, and of those without rows, how many were aborted that nobody has given up.
        self._n_unasked: dict[Sequence | None, int] = {}

    # --- from the API's side ------------------------------------------------------------------------------------------

    def open(self, specs: Seq[SequenceSpec], *, n_bytes_max: int) -> EventStream:
        """See `Loop.open`."""
        is_companion = not self._is_idle and trio.current_time() - self._roused_at <= COMPANIONS_S
        stream = super().open(specs, n_bytes_max=n_bytes_max)
        self._n_companions += is_companion
        return stream

    def _wake(self, now: float) -> None:
        self._withdraw()  # the next step will be another one
        if self._is_idle:
            self._is_idle, self._roused_at = False, now
            self._n_companions_before, self._n_companions = self._n_companions, 0
        super()._wake(now)

    def _swept(self, now: float) -> list[Event]:
        """If nobody is left who waits for the step, it is given up."""
        events = super()._swept(now)
        plan = self._latest()
        if plan is not None and not plan.is_given_up and self.scheduler.is_futile(plan):
            self._give_up(plan)
        return events

    def _latest(self) -> Plan | None:
        """The plan of the step that runs: also where the one before it was computed and is not settled yet."""
        following = self._following
        return following.ahead.plan if following is not None and following.ahead.is_decided else self._plan

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
    def _is_held(self) -> bool:
        return self._plan is not None or self._all_wait

    @property
    def is_computing(self) -> bool:
        """See `Loop.is_computing`."""
        return self._plan is not None

    async def recall(self, specs: Seq[SequenceSpec]) -> None:
        """See `Loop.recall`. Returns at once if the disk has nothing."""
        if self.disk is None:
            return
        shared = [spec for spec in specs if spec.cache_prompt and spec.n_prompt_logprobs is None]
        # Answers to one prompt have the same list of it, and to hash that for each would take long.
        for spec in {(spec.cache_salt, spec.adapter, id(spec.prompt)): spec for spec in shared}.values():
            await self.disk.recall(self.scheduler.memory, (spec.cache_salt, spec.adapter), list(spec.prompt))

    # --- its life -----------------------------------------------------------------------------------------------------

    async def _turn(self) -> None:
        """Do what is next. Whatever was awaited ends the turn: what happened meanwhile is looked at before anybody sleeps in `_idle`."""
        if self._life is not None and self._life.is_dead:
            error = ModelDied("the worker died between two steps")
            await self._replace(self._life, error, partial(self._settle_death, None, error))
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
        return self.thread.n_sharing > 1 and (self._do_others_compute() or self.thread.n_taken > self._n_taken)

    def _do_others_compute(self) -> bool:
        """Whether calls of others are under way in the thread, between two steps of ours. One of ours that is not to be is no step."""
        is_own_left = self._last_following is not None and not self._last_following.is_over
        return self.thread.n_under_way > is_own_left

    def end_all(self, error: RequestError) -> None:
        """See `Loop.end_all`. Rows under way are given up."""
        self._withdraw()
        plan = self._latest()
        if plan is not None and plan.n_rows and not plan.is_given_up:
            self._give_up(plan)
        super().end_all(error)

    def _settle_death(self, plan: Plan | None, error: ModelDied, now: float) -> list[Event]:
        events = self.scheduler.apply_death(plan, error, now)
        if not self._model.info.fingerprint:  # nobody says that what the dead process saved fits the next one
            self.forget_host()
        self._hand_down()
        return events

    # --- one step -----------------------------------------------------------------------------------------------------

    async def _step(self, plan: Plan) -> None:
        """Have it computed, and settle it; and so those that begin before the one before them is settled, as long as there are such."""
        self._progress_at = trio.current_time()
        self._plan = plan
        self._n_ahead = 0
        self._context = contextvars.copy_context()
        try:
            token = trio.lowlevel.current_trio_token()
            if self._do_others_compute():  # an embedder's step runs, or a model is measured: what is owed need not wait for its end
                self._deliver_owed()
            if self.scheduler.has_deadlines:
                self._timed.set()
            self._n_taken = self.thread.n_taken + 1
            following = await self._settle(plan, self._turns.run(self._run_first, plan, token))
            while following is not None:
                self._plan = following
                assert self._begun is not None
                if trio.current_effective_deadline() > -math.inf:  # not cancelled
                    self._look_ahead(following)  # before anything is told: a short step may be over before that is
                self._deliver_owed()
                following = await self._settle(following, self._begun.result())
        finally:
            self._plan = None
            self._look_no_more()
            for call in self._left_over():
                with suppress(Exception):
                    await call.result()  # noqa: ASYNC102 - it cannot be cancelled, and whoever closes the model must not meet it

    def _left_over(self) -> list[Call[StepOutput | None]]:
        """Let the steps be over that have begun and will not be settled, since a mistake of ours came between; mostly there are none."""
        calls = [self._begun]
        if not self._withdraw() and self._following is not None:
            self._following.ahead.settle()
            calls.append(self._following.call)
        self._begun = self._following = None
        return [call for call in calls if call is not None]

    async def _settle(self, plan: Plan, coming: Awaitable[StepOutput | None]) -> Plan | None:
        """Settle a step when it was computed; return the one that has begun meanwhile, if one has."""
        try:
            try:
                output = await coming
                assert output is not None
            finally:
                self._begun = None
        except ModelDied as error:
            if self._life is None or self._has_ended:
                raise
            # A text that may have killed it is tried again, and found by itself: no step is to blame.
            await self._replace(self._life, error, partial(self._settle_death, None if self._life.may_be_a_texts else plan, error))
            return None
        except Exception as error:
            self._progress_at = trio.current_time()
            error = self._blamed(plan, error)
            self._report(plan, error)
            self._owed += self.scheduler.apply_failure(plan, error, self._progress_at)
            self._hand_down()
            return None
        if self._n_unasked:
            went_well: set[Sequence | None] = {None, *plan.members()}
            left = [(one, n) for one, n in self._n_unasked.items() if one not in went_well]
            self._n_unasked = {one: n for one, n in left if one is None or one.phase is not FINISHED}
        self._progress_at = now = trio.current_time()
        following, self._following = self._following, None
        ahead = None
        if following is not None and following.ahead.goes_on:
            ahead, self._begun = following.ahead, following.call
        try:
            self._metrics.step(plan, output)
            self._owed += self.scheduler.apply(plan, output, now, ahead)
            if ahead is not None and not ahead.plan.is_given_up and self.scheduler.is_futile(ahead.plan):
                self._give_up(ahead.plan)
        finally:
            if ahead is not None:
                ahead.settle()  # whatever happened here: the thread waits for it
        self._hand_down()
        return None if ahead is None else ahead.plan

    def _run_first(self, plan: Plan, token: trio.lowlevel.TrioToken) -> StepOutput:
        """In the models' thread. Only now that it runs are the last step's events sent: earlier, sending them would hold it up."""
        token.run_sync_soon(self._is_under_way, plan)
        return self._compute(plan)

    def _run_ahead(self, ahead: Ahead) -> StepOutput | None:
        """In the models' thread; None when the step is not to be."""
        return self._compute(ahead.plan) if ahead.begin() else None

    def _compute(self, plan: Plan) -> StepOutput:
        if plan.is_given_up:  # an abort that came while the call was on its way here is lost
            raise Aborted("nobody waits for this step")
        if self._worker is not None:
            return self._worker.compute(plan)
        return compute(self._model, plan, time.perf_counter)

    def _is_under_way(self, plan: Plan) -> None:
        try:
            if self._plan is plan:
                self._look_ahead(plan)
            self._deliver_owed()
        except Exception as error:  # from here it would end Trio itself; from `run` it ends the streams, then the engine
            self._failure = error

    def _look_ahead(self, plan: Plan) -> None:
        """While `plan`'s step runs, let the one after it begin by itself, if that can be known now."""
        if self._life is not None or self._n_ahead == N_AHEAD_MAX or self._failure is not None:
            return
        if self.thread.n_taken > self._n_taken:  # others compute in the thread, too, and it is their turn
            return
        if plan.is_given_up or self.scheduler.layout_due() is not None:
            return
        ahead = self.scheduler.plan_ahead(plan, trio.current_time(), by_model=self._draws)
        if ahead is not None:
            self._n_ahead += 1
            self._last_following = self.thread.begin(partial(self._run_ahead, ahead), self._context)
            self._following = Following(ahead, self._last_following)
            self._n_taken = self.thread.n_taken

    def _withdraw(self) -> bool:
        """Let the step that was planned ahead not be; False when it has begun, or there is none."""
        if self._following is None or not self._following.ahead.withdraw():
            return False
        self._following = None
        return True

    def _blamed(self, plan: Plan, error: Exception) -> Exception:
        """An abort may come late, for the step before. Steps that are aborted unasked again and again have failed, as any others do."""
        if not isinstance(error, Aborted) or plan.is_given_up:
            return error
        members: Seq[Sequence | None] = plan.members() or [None]
        for one in members:
            self._n_unasked[one] = self._n_unasked.get(one, 0) + 1
        if max(self._n_unasked[one] for one in members) <= N_UNASKED_MAX:
            return error
        failure = StepFailed("the model aborts steps that nobody has given up")
        failure.__cause__ = error
        return failure

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

    # --- how the cells lie --------------------------------------------------------------------------------------------

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
            await self._keep(self._model.capabilities.kv_layout)
        log.info("layout", layout=layout.value, n_running=n_running, seconds=round(self._progress_at - began_at, 2))

    async def _keep(self, layout: KvLayout) -> None:
        """Keep it for the next start, which begins as this one did if that cannot be done soon: everybody's answers wait."""
        why = f"the folder takes longer than {KEEP_LAYOUT_S:g} s"
        if not self._keeping.borrowed_tokens:  # or the last one is not kept yet, and may never be
            with trio.move_on_after(KEEP_LAYOUT_S):
                try:
                    await trio.to_thread.run_sync(self._keep_layout, layout, abandon_on_cancel=True, limiter=self._keeping)
                    return
                except Exception as error:  # the system has no thread left
                    why = in_one_line(error)
        log.warning("layout.unkept", why=why)

    # --- while nothing is owed ----------------------------------------------------------------------------------------

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

    def _silence_s(self) -> float:
        """How long to wait for one more who comes at the same moment: many who were answered together take a while to ask again."""
        patience = PATIENCE if self._n_companions < self._n_companions_before else 1.0
        return min(patience * self.scheduler.companions_s(), SILENCE_S_MOST)

    # --- what is kept on the host and on disk -------------------------------------------------------------------------

    def _hand_down(self) -> None:
        """Let the disk tier have what the host pool had to give up, and forget what the model did not take."""
        offload = self.scheduler.memory.offload
        if self.disk is not None and offload is not None:
            self.disk.refuse(offload.pool.take_refused())
            self.disk.offer(offload.pool.take_evicted())

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

    @property
    def keeps_for_later(self) -> bool:
        """See `Loop.keeps_for_later`."""
        return self.disk is not None

    async def keep_prefixes(self) -> None:
        """See `Loop.keep_prefixes`. It goes to the disk tier, if there is one: from the model's memory and from the host."""
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
        """See `Loop.forget_host`."""
        offload = self.scheduler.memory.offload
        if offload is not None:
            offload.pool.clear()


def _empty_all(model: StepModel) -> None:
    for slot in range(model.n_slots):
        empty(model, slot)
