"""Decides, before every step, which sequences' rows it carries, and settles, after it, what became of them.

Pure and synchronous: time comes in as an argument, work goes out as a `Plan`, news as events. Memory is protected by counting: no row is
planned without a cell for it.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import attrs

from cllm.backend import KvLayout, Vocabulary
from cllm.engine.batching import NO_MEETINGS, BatchFormer, goes_before, n_owed
from cllm.engine.budget import ALONE_FULL_S, RowBudget
from cllm.engine.cost import CostModel
from cllm.engine.curve import DEFAULT_CURVE
from cllm.engine.events import Delta, Event, Failed, Finished, FinishReason, TokenLogprob, Usage
from cllm.engine.fairness import GENERATED_TOKEN, NO_WORK, PROMPT_TOKEN, Accounts, Work
from cllm.engine.fillers import N_TILE, Fillers
from cllm.engine.following import Followers, is_of_use, n_computing
from cllm.engine.gate import CERTAINTY, Behind, Coming, Gate, Newcomer, Service
from cllm.engine.hostpool import HostPool
from cllm.engine.layout import Apart, LayoutChoice, likely_length
from cllm.engine.memory import Memory, MemoryLimits
from cllm.engine.offload import Offload
from cllm.engine.places import Places
from cllm.engine.plan import Plan, Scoring, StepOutput
from cllm.engine.prefix import Key
from cllm.engine.prices import Prices
from cllm.engine.queue import Queue, gives_way, may_yield, order, who_yields
from cllm.engine.sampler import make_sampler
from cllm.engine.sequence import DECODE, FINISHED, PREFILL, Miss, Phase, Sequence, SequenceSpec
from cllm.engine.timeline import Timeline
from cllm.engine.trials import Trials
from cllm.errors import Aborted, ContextExceeded, DeadlineExceeded, GenerationFailed, NoRoom, RequestError
from cllm.text.detokenizer import TokenTexts
from cllm.text.transcript import Transcript

N_DEADLINES_SPARE = 64  # ended sequences whose deadlines are kept before they are cleared away
KNOWN_S = 20.0  # after the last step, for which the machine is believed to be as slow as it was
N_STEPS_OWED = 2  # room for prompts' rows that is spoken for: whoever comes then waits outside
COMPANIONS_SHARE = 0.02  # of a step, for which others who come at the same moment may be waited for
N_LONE_FAILURES_MAX = 2  # a sequence whose steps fail so often in a row while it is alone in them is the culprit


@attrs.frozen(kw_only=True)
class Limits:
    """What the scheduler deals out."""

    n_cells: int
    n_slots: int
    n_ctx: int  # tokens of one sequence at most
    n_rows_max: int  # rows of one step at most
    row_budget: int | None  # rows of one step, as far as prefill can be cut; None: as the cost model says
    n_live_max: int  # sequences that hold cells at once
    n_waiting_max: int
    patience_s: float | None = None  # of a waiting sequence, before fresher ones go first; None: order of arrival
    wait_max_s: float | None = None  # that a newcomer would probably wait; more is refused
    key_weights: Mapping[str, float] = attrs.field(factory=dict)  # of keys that are not to count 1
    key_caps: Mapping[str, int] = attrs.field(factory=dict)  # sequences that a key may have under way
    key_cap: int | None = None  # of the other keys
    keeps_prefixes: bool = False  # whether sequences share cells, and leave theirs to others
    can_share: bool = False  # what the model's memory can do, see cllm.backend.Capabilities
    can_trim: bool = False
    copies_slots: bool = False  # whether a slot may be copied whole
    can_save: bool = False
    can_save_part: bool = False
    host_pool_n_bytes: int = 0  # of states in the process's memory; 0: none
    cell_n_bytes: float = 1.0  # of a saved cell, as far as it is known before one was saved
    itl_max_s: float | None = None  # time between tokens that so many sequences may run as keep; None: as many as there is room for
    itl_target_s: float | None = None  # how long a step with running answers may take; None: some times as long as without prompts
    rows_by_slot: bool = False  # where each slot has cells of its own, a step is one pass only if the rows' slots ascend without a gap
    n_slots_apart: int | None = None  # where the layout may be changed: slots, if each had cells of its own; None: it stays as it is
    n_cells_slot_apart: int = 0  # and cells of each
    carries_states: bool = False  # whether a whole slot's state fits in either layout
    layout_change_s: float = 0.5  # that it takes, until it was measured
    begins_apart: bool = False  # whether they had when the server last ran

    def __attrs_post_init__(self) -> None:
        assert min(self.n_cells, self.n_slots, self.n_rows_max, self.n_live_max, self.n_waiting_max) >= 1
        assert self.row_budget is None or self.row_budget >= 1
        assert self.n_ctx >= 2
        assert self.n_ctx <= self.n_cells or (self.rows_by_slot and self.n_slots_apart), "a sequence alone must always fit"


@attrs.frozen(kw_only=True)
class SequenceView:
    """How one sequence stands, for people."""

    seq_id: int
    request_id: str
    phase: Phase
    slot: int | None
    n_prompt: int
    n_generated: int
    n_computed: int
    n_held: int
    n_shared: int  # of these, cells that others computed
    n_cached: int  # tokens of its prompt that were known when it was first admitted: where the match ended, for which `miss` is the reason
    miss: Miss | None  # None: it has not been admitted yet
    n_preempted: int
    priority: int


@attrs.define(eq=False)
class Totals:
    """Counts since the start."""

    n_submitted: int = 0
    n_finished: int = 0
    n_failed: int = 0
    n_cancelled: int = 0
    n_preempted: int = 0
    n_prompt_tokens: int = 0  # of admitted prompts
    n_prefill_rows: int = 0
    n_generated: int = 0
    n_fillers: int = 0  # rows that closed gaps between slots
    n_layouts: int = 0  # times that the cells were laid out anew


class Scheduler:
    """The batch re-former. One caller; every method returns at once."""

    def __init__(self, limits: Limits, vocabulary: Vocabulary, cost: CostModel | None = None) -> None:
        self.limits = limits
        if cost is None:
            cost = CostModel(DEFAULT_CURVE, n_rows_max=limits.n_rows_max, measured=False, apart=limits.rows_by_slot)
        self.cost = cost
        prices = Prices(self.cost)
        self.memory = Memory(_memory_limits(limits), _offload(limits, prices), prices)
        self.cells = self.memory.cells
        self.totals = Totals()
        self._vocabulary = vocabulary
        self._texts: dict[frozenset[int], TokenTexts] = {}  # by the control tokens that they show
        self._n_live_max, self._places, self._former = self._dealer()
        self._restores_alone = False  # whether the last step had nothing but moves, since some of these bring cells back
        self._n_live_max_usual = self._n_live_max
        self._places_other: Places | None = None  # of that layout
        # Apart fewer may have a slot, which is not to hide how many would run in a pool.
        self._n_wanted_max = min(limits.n_live_max, limits.n_rows_max)
        self._choice = _layout_choice(limits, self.cost)
        self._cost_other: CostModel | None = None  # of the layout that is not in force
        self._sequences: dict[int, Sequence] = {}  # all that have not ended
        self._accounts = Accounts(limits.key_weights)
        self._generated_token = GENERATED_TOKEN  # what one takes, in tokens of a prompt; where nothing was measured, what it is charged
        self._queue = Queue(self._accounts, limits.patience_s)
        self._followers = Followers()  # they wait too, but not in the queue
        self._coming: dict[Coming, None] = {}
        self._service = Service()
        self._gate = Gate(
            self._accounts,
            self._service,
            n_waiting_max=limits.n_waiting_max,
            wait_max_s=limits.wait_max_s,
            caps=limits.key_caps,
            cap=limits.key_cap,
        )
        self._running: list[Sequence] = []  # PREFILL and DECODE, by order of service
        self._marked: list[Sequence] = []  # cancelled, not yet freed
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, seq_id), ended sequences included until due
        self._trials = Trials()
        self.has_neighbours = False  # whether others compute in the thread that our steps have; told by the loop
        self._planned_at = self._now = 0.0
        self._stepped_at = -math.inf
        self._n_arrived = 0
        self._newest: Sequence | None = None

    def _dealer(self) -> tuple[int, Places, BatchFormer]:
        """What deals out the memory and the rows that the limits name."""
        limits, cost = self.limits, self.cost
        n_live_max = min(limits.n_live_max, limits.n_slots, limits.n_rows_max)
        budget = RowBudget(
            cost,
            n_rows_max=limits.n_rows_max,
            n_rows_fixed=limits.row_budget,
            itl_target_s=limits.itl_target_s,
            itl_max_s=limits.itl_max_s,
            apart=limits.rows_by_slot,
        )
        has_room = limits.n_rows_max >= limits.n_slots + N_TILE  # for a row of every slot, and a tile to its end
        may_fill = limits.rows_by_slot and limits.can_trim and has_room
        fillers = Fillers(limits.n_slots, cost.pass_s, cost.read_s, self.memory.filler_position) if may_fill else None
        former = BatchFormer(
            budget,
            n_rows_max=limits.n_rows_max,
            rows_by_slot=limits.rows_by_slot,
            fillers=fillers,
        )
        return n_live_max, Places(cost, n_max=n_live_max, itl_max_s=limits.itl_max_s), former

    # --- what the shell says ------------------------------------------------------------------------------------------

    def check_room(self, now: float, *, n_sequences: int = 1, key: str = "", priority: int = 0, timeout_s: float | None = None) -> None:
        """Let sequences pass that may join the queue now; the shell asks before it puts work into a request.

        Raises: QuotaExceeded · Unavailable · DeadlineExceeded.
        """
        work_running = self._work_until_one_ends(priority)
        newcomer = Newcomer(
            n_sequences=n_sequences,
            key=key,
            timeout_s=timeout_s,
            is_urgent=work_running == NO_WORK and self._queue.is_first(priority),
            work_running=work_running,
            behind=self._behind(key, priority),
            generated_token=self._generated_token,
        )
        self._gate.check(newcomer, NO_WORK if timeout_s is None else self._queue.work_before(key, priority, now))

    def expect(self, n_sequences: int, *, key: str = "", priority: int = 0) -> Coming:
        """Keep room in the queue for sequences that `check_room` let pass, while their prompts are read; until `expect_no_more`."""
        coming = Coming(self._accounts.of(key), n_sequences, priority)
        self._coming[coming] = None
        coming.account.n_coming += n_sequences
        return coming

    def expect_no_more(self, coming: Coming) -> None:
        """They are submitted next, or will not come. May be called again."""
        if coming in self._coming:
            del self._coming[coming]
            coming.account.n_coming -= coming.n_sequences

    def _work_until_one_ends(self, priority: int) -> Work:
        """What is probably done until one of those who run has ended, all going on together; none if there is room before."""
        n_running = len(self._running)
        if not n_running or not self._is_full or any(sequence.spec.priority > priority for sequence in self._running):
            return NO_WORK
        n_left = min(sequence.n_max - len(sequence.tokens) for sequence in self._running)
        return Work(n_generated=n_running * min(n_left, self._service.n_generated_mean / (n_running + 1)))

    def _behind(self, key: str, priority: int) -> Behind:
        """Those who wait, who follow another's prompt, and who are expected, and are less urgent."""
        behind = self._queue.behind(key, priority)
        for sequence in self._followers:
            if sequence.spec.priority > priority:
                own_work = sequence.work if sequence.account.key == key else NO_WORK
                behind = Behind(behind.n_waiting + 1, behind.work + sequence.work, behind.own_work + own_work)
        n_coming = sum(coming.n_sequences for coming in self._coming if coming.priority > priority)
        return attrs.evolve(behind, n_waiting=behind.n_waiting + n_coming)

    def check_length(self, spec: SequenceSpec) -> None:
        """Raises: ContextExceeded for a prompt that leaves no room for an answer, however long it waited."""
        if len(spec.prompt) >= self.limits.n_ctx:
            raise ContextExceeded(len(spec.prompt), self.limits.n_ctx)

    def submit(self, spec: SequenceSpec, now: float) -> int:
        """Queue a sequence; return its id. Its events come from `plan` and `apply` from now on.

        Raises: ContextExceeded when it could never be served.
        """
        assert spec.prompt, "a prompt has at least one token"
        self.check_length(spec)
        self._n_arrived += 1
        sequence = self._sequence(spec, self._n_arrived, now)
        try:  # there may be no memory to look for a prompt of a million tokens
            self.memory.arrived(sequence, is_another=self._is_another(sequence))
            sequence.work = self._service.work(self._n_new(sequence), sequence.n_max - sequence.n_prompt)
        except BaseException:
            self.memory.ends_waiting(sequence)
            raise
        self._sequences[sequence.seq_id] = sequence
        sequence.timeline.note(now, "queued", n_prompt=sequence.n_prompt, n_before=len(self._queue))
        self._queue.add(sequence)
        if self._choice is not None:
            self._choice.grew(sequence.n_prompt)
            self._choice.waits(self._n_crowd(0))
        if sequence.deadline is not None:
            self._remember_deadline(sequence.deadline, sequence.seq_id)
        self.totals.n_submitted += 1
        return sequence.seq_id

    def cancel(self, seq_id: int) -> None:
        """Mark a sequence that nobody waits for; the next `plan` frees what it holds. Ended ones are ignored."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None and not sequence.cancelled:
            sequence.cancelled = True
            self._marked.append(sequence)

    def is_futile(self, plan: Plan) -> bool:
        """Whether nobody waits for any row of a step under way: neither its members, nor those who would go on from their prompts."""
        if not plan.is_deserted():
            return False
        limits = self.memory.limits
        if not plan.prefilling or not limits.shares_live:
            return True
        those_who_wait = (waiting for waiting in (*self._queue, *self._followers) if not waiting.cancelled)
        return not any(is_of_use(plan.prefilling, waiting, can_trim=limits.can_trim) for waiting in those_who_wait)

    def timeline(self, seq_id: int) -> Timeline:
        """Return what happens to a sequence that has not ended; it is kept up to date."""
        return self._sequences[seq_id].timeline

    @property
    def has_deadlines(self) -> bool:
        """Whether somebody's time may be over soon, as far as that is known without looking."""
        return bool(self._deadlines)

    def sweep_waiting(self, now: float) -> list[Event]:
        """While a step runs, end those who wait and whom nobody waits for, or whose time is over: they have no part in it. Return their
        events.
        """
        self._now = now
        events: list[Event] = []
        self._sweep(now, events, only_waiting=True)
        return events

    def plan(self, now: float) -> Plan | None:
        """Re-form the batch. None when nothing is owed: no rows, no memory moves, no events."""
        self._planned_at = self._now = now
        events: list[Event] = []
        if self._marked or self._deadlines:
            self._sweep(now, events)
        if self._trials:
            self._trials.advance()
        if self.memory.offload is not None:
            is_generating = any(sequence.phase is DECODE for sequence in self._running)
            self.memory.offload.is_generating = is_generating or self.has_neighbours
        self.memory.retire_idle()
        self._admit(now, events)
        self._reserve_decode_cells()
        running = self._who_computes()
        is_decoding = any(sequence.phase is DECODE for sequence in running)
        places_taken = not is_decoding and len(running) >= self._n_places() and not self._is_hurried(running, now)
        n_cells = self.cells.n_total - self.cells.n_free
        plan = self._former.form(
            running,
            self.memory.take_moves(),
            events,
            n_cells,
            self.totals.n_prefill_rows,
            self._accounts.n_late if is_decoding else self._n_keys(),
            self._meetings(beside_answers=is_decoding),
            places_taken,
        )
        if plan.n_rows:
            plan.expected_s = self.cost.step_s(plan.n_rows, plan.batch.n_outputs, plan.n_cells, plan.passes, attended=plan.attended)
        return plan if plan.is_step or events else None

    def _who_computes(self) -> list[Sequence]:
        """Those who have rows in the next step: not those whose cells come back from the host in it, who would wait for the others' rows.

        These moves come before rows in any case. So where nobody generates they go by themselves, and who comes back is among the others in
        the step after that. Answers do not wait for it, nor does anybody twice in a row.
        """
        running = self._trials.take_turns(self._running) if self._trials else self._running
        restored_alone, self._restores_alone = self._restores_alone, False
        if not self.memory.n_restoring:
            return running
        running = [sequence for sequence in running if not sequence.is_restoring]
        self._restores_alone = not restored_alone and all(sequence.phase is PREFILL for sequence in running)
        return [] if self._restores_alone else running

    def apply(self, plan: Plan, output: StepOutput, now: float) -> list[Event]:
        """Settle a step that went well: every row has its cell, every output its token."""
        self._now = now
        events: list[Event] = []
        if plan.n_rows:
            self._serve(plan, now - self._planned_at)
        self._settle(plan, now)
        if self._choice is not None and plan.n_rows:
            self._note_cost_of_layout(self._choice, plan)
        if plan.n_rows and output.model_s > 0:
            self._stepped_at = now
            n_outputs = plan.batch.n_outputs
            self.cost.observe(plan.n_rows, n_outputs, plan.n_cells, output.model_s, plan.passes, attended=plan.attended)
        self.totals.n_fillers += len(plan.fillers)
        for sequence in plan.decoding:
            sequence.account.charge(GENERATED_TOKEN)
            self.memory.decoded(sequence)
        for sequence, n_rows in plan.prefilling:
            self.memory.prefilled(sequence, n_rows)
            sequence.timeline.prefill(now, n_rows)
            # Of one that was preempted, the last row is that of a drawn token, which nobody has computed before.
            self.totals.n_prefill_rows += n_rows - (sequence.n_generated > 0 and not n_owed(sequence))
        if plan.scorings:
            self._tell_scores(plan.scorings, output.scores, events)
        logprobs = output.logprobs
        invalid = frozenset(output.invalid)
        for i, sequence in enumerate(plan.outputs):
            if sequence.phase is FINISHED:  # ended from outside while the step ran
                continue
            if sequence.phase is PREFILL:
                sequence.move(DECODE)
                if sequence.order != sequence.own_order:  # nobody waits for its prompt any more
                    self._rank(sequence, sequence.own_order)
            if sequence.cancelled:  # the mark is met in the next plan
                continue
            if i in invalid:
                self._fail(sequence, _without_token(sequence), events, keep=False)
                continue
            self._accept(sequence, output.tokens[i], None if logprobs is None else logprobs[i], now, events)
        if self._trials.is_any_suspect:
            self._acquit(plan.outputs)
        return events

    def _serve(self, plan: Plan, seconds: float) -> None:
        """Count what was done, by what a generated token takes beside as many as run, and keep that for those who wait.

        While others could run, too, it is no measure for these: they will have a full house beside them.
        """
        n_running, cells = min(len(self._running), self.cost.n_rows_max), self.cells
        if n_running and self._is_full and self.cost.is_grounded:
            self._generated_token = self.cost.generated_rows(n_running, cells.n_total - cells.n_free, cells.n_held)
        self._service.step(plan.n_prompt_rows, len(plan.decoding), seconds, is_full=self._is_full, generated=self._generated_token)

    def _settle(self, plan: Plan, now: float) -> None:
        for sequence in self.memory.settle(plan):
            _note_cached(sequence, now, "restored")

    def apply_failure(self, plan: Plan, error: Exception, now: float) -> list[Event]:
        """Settle a step that raised: nobody's tokens are lost, cells are computed again, a culprit is told apart.

        After `NoRoom` everything is as it was: what is only cached goes, and if that was not enough the sequence that ranks last gives way;
        if a move had none, what goes on from it is computed anew. After `Aborted` slots have the cells that they had, where they can be
        trimmed. After anything else the content of the batch's slots is undefined, so its members start over;
        halves of them are tried until the one that fails is alone.
        """
        self._now = now
        events: list[Event] = []
        members = [sequence for sequence in plan.members() if sequence.phase is not FINISHED]
        self._settle(plan, now)
        robbed = self.memory.owe_again(plan.moves, plan.n_moves_done, has_failed=not isinstance(error, Aborted))
        for sequence in robbed:
            if sequence.phase is not Phase.WAITING:
                self._preempt(sequence, keep=False)
        if isinstance(error, NoRoom):
            if not robbed:
                self._give_way(members, error, events)
            return events
        if plan.has_move_failed and not isinstance(error, Aborted):  # what builds on it is given up, and no row was computed
            return events
        if not isinstance(error, Aborted):
            self.memory.spoilt([slot for slot, _ in plan.fillers])
        is_kept = isinstance(error, Aborted) and self.limits.can_trim
        for sequence in members:
            if sequence in robbed or (is_kept and sequence.cancelled):  # the latter's end is met in the next plan
                continue
            self._preempt(sequence, keep=is_kept)
        if not isinstance(error, Aborted):
            self._accuse(members, error, events)
        return events

    def apply_death(self, plan: Plan | None, error: Exception, now: float) -> list[Event]:
        """The model died, in the step of `plan` or between two, and another one with empty slots takes its place.

        That is a preemption of everybody: nobody's tokens are lost, and the cells are computed again. Those with whom it died twice are
        tried one by one; one with whom it dies alone again is to blame.
        """
        self._now = now
        events: list[Event] = []
        members = [] if plan is None else [sequence for sequence in plan.members() if sequence.phase is not FINISHED]
        for sequence in list(self._running):
            self._preempt(sequence, keep=False)
        self.memory.lost(plan)
        suspects = self._trials.note_death(members)
        if len(members) == 1:
            self._accuse(members, error, events)
        elif suspects:
            self._trials.isolate(suspects)
        return events

    # --- how the cells lie --------------------------------------------------------------------------------------------

    def layout_due(self) -> KvLayout | None:
        """The layout that the model's cells should have from now on; None: as it is. Cheap, to be asked before every plan."""
        choice = self._choice
        if choice is None or not choice.may_be_due or (self._trials and not choice.is_outgrown):
            return None
        n_longest = max((likely_length(len(sequence.tokens), sequence.n_max) for sequence in self._sequences.values()), default=0)
        if not choice.is_due(self._again_s(), n_longest):
            return None
        return KvLayout.UNIFIED if choice.is_apart else KvLayout.STREAMS

    def _again_s(self) -> float:
        """Seconds until what there is would be there again in another layout: carried over, or computed."""
        computed_s = sum(self.cost.prefill_s(sequence.n_computed) for sequence in self._running)
        computed_s += self.memory.n_asked_for * self.cost.least_row_s
        if not self.limits.carries_states:
            return computed_s
        carried = sum(sequence.n_computed for sequence in self._running if sequence.may_keep)
        alone_s = sum(self.cost.prefill_s(sequence.n_computed) for sequence in self._running if not sequence.may_keep)
        return min(self.memory.carry_s(carried) + alone_s, computed_s)

    def _note_cost_of_layout(self, choice: LayoutChoice, plan: Plan) -> None:
        n_rows, n_decoding = plan.n_rows - len(plan.fillers), len(plan.decoding)
        spared_s = self.cost.spared_s(n_rows, n_decoding, plan.n_cells) if 0 < n_decoding < n_rows else 0.0
        choice.stepped(n_rows, n_decoding, len(self._running), self.cells.n_held, spared_s)

    def interrupt(self, now: float) -> None:
        """Let everybody wait: the cells are about to be laid out anew. Nobody's tokens are lost."""
        self._now = now
        for sequence in list(self._running):
            self._preempt(sequence, keep=self.limits.carries_states and not sequence.cancelled)

    def plan_departure(self, now: float) -> Plan | None:
        """After `interrupt`: the step that takes one slot's cells to the host, if they fit another layout too; None when none is left."""
        if not self.limits.carries_states or not self.memory.move_out():
            return None
        self._planned_at = now
        return self._moves_alone()

    def vacate(self) -> None:
        """After `interrupt`: take back all cells."""
        self.memory.lost()

    def laid_out(self, limits: Limits, seconds: float) -> list[Event]:
        """After `vacate`: the cells lie as `limits` say, which took `seconds`; they are as before if that failed."""
        assert self._choice is not None
        if limits.rows_by_slot == self.limits.rows_by_slot:
            n_cells_slot, self._choice = self._choice.apart.n_cells_slot, None  # it will not be tried again
            return self._hold_to(n_cells_slot) if limits.rows_by_slot else []
        # What one sequence may have was promised, and does not change: who outgrows a part brings the pool back. What is saved may take no
        # less than before for what it has taken meanwhile.
        self.limits = attrs.evolve(limits, n_ctx=self.limits.n_ctx, host_pool_n_bytes=self.limits.host_pool_n_bytes)
        if self._cost_other is None:
            self._cost_other = self.cost.beside(n_rows_max=limits.n_rows_max, apart=limits.rows_by_slot)
        other = self._cost_other
        other.keep_up(self.cost)
        self.cost, self._cost_other = other, self.cost
        prices = Prices(self.cost)
        self.memory.laid_out(_memory_limits(self.limits), _offload(self.limits, prices), prices, carries_states=self.limits.carries_states)
        self.cells = self.memory.cells
        self._n_live_max, self._places, self._former = self._dealer()
        self._n_live_max_usual = self._n_live_max
        self._places_other = Places(self._cost_other, n_max=self._n_wanted_max, itl_max_s=limits.itl_max_s)
        self._choice.changed(seconds)
        for sequence in self._sequences.values():  # some came meanwhile
            self._choice.grew(len(sequence.tokens))
        self.totals.n_layouts += 1
        return []

    def _hold_to(self, n_ctx: int) -> list[Event]:
        """Nobody may have more than `n_ctx` tokens from now on, whatever was promised; who has cannot go on."""
        self.limits = attrs.evolve(self.limits, n_ctx=min(self.limits.n_ctx, n_ctx))
        events: list[Event] = []
        for sequence in list(self._sequences.values()):
            sequence.n_max = min(sequence.n_max, n_ctx)
            if len(sequence.tokens) >= n_ctx:
                self._fail(sequence, GenerationFailed("there is no memory for an answer as long as this one", code="no_memory"), events)
        return events

    def plan_retirement(self) -> Plan | None:
        """The step that moves one cached branch to the host, the oldest first; None when none is left. Only while nothing is under way."""
        assert not self._sequences
        return self._moves_alone() if self.memory.retire_oldest() else None

    def plan_copy(self, tried: set[int], n_stored: Callable[[Key, list[int]], int]) -> Plan | None:
        """The step that copies one cached branch, the newest first, as `Memory.copy_newest` says; None when none is left.

        Only while nothing is under way.
        """
        assert not self._sequences
        return self._moves_alone() if self.memory.copy_newest(tried, n_stored) else None

    def _moves_alone(self) -> Plan:
        """A step of what the model is owed, in which nobody has rows."""
        return self._former.form([], self.memory.take_moves(), [], 0)

    def evict_cached(self) -> None:
        """Forget what is kept of ended sequences; the next plan frees it."""
        self.memory.forget_cached()

    def end_all(self, error: RequestError) -> list[Event]:
        """End every sequence with `error`: the engine goes down, or its grace is over."""
        events: list[Event] = []
        for sequence in list(self._sequences.values()):
            self._fail(sequence, error, events, keep=False)  # a step that still runs writes to their slots
        self._marked.clear()
        return events

    # --- how things stand ---------------------------------------------------------------------------------------------

    @property
    def n_sequences(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    def companions_s(self) -> float:
        """How long the first step may be put off while others come at the same moment: a small part of what it will take now.

        0 when there is nothing to compute, or no place for one more.
        """
        n_rows = 0
        if self.n_waiting >= self._n_live_max_usual:
            return 0.0
        for sequence in self._queue:
            n_rows += len(sequence.tokens)
            if n_rows >= self.limits.n_rows_max:
                break
        return COMPANIONS_SHARE * self.cost.step_s(min(n_rows, self.limits.n_rows_max), 0, 0) if n_rows else 0.0

    @property
    def n_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._queue) + len(self._followers)

    @property
    def _is_full(self) -> bool:
        """Whether work is done as fast as it can be: somebody waits, or nobody else could run."""
        return self.n_waiting > 0 or len(self._running) >= self._n_live_max_usual

    @property
    def n_waiting_max(self) -> int:
        """Sequences that the queue takes."""
        return self.limits.n_waiting_max

    def key_cap(self, key: str) -> int | None:
        """Sequences that a key may have under way; None: as many as it likes."""
        return self._gate.cap(key)

    @property
    def n_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    def views(self) -> list[SequenceView]:
        """All sequences that have not ended, running ones first, each in order of service."""
        return [_view(sequence) for sequence in (*self._running, *self._queue, *self._followers)]

    def check(self) -> None:
        """Assert the invariants; for tests, and cheap enough for an idle moment."""
        self.memory.check(self._running)
        assert len(self._running) + self.n_waiting == len(self._sequences)
        assert self._running == sorted(self._running, key=order)
        assert len(self._running) == sum(account.n_running for account in self._accounts)
        self._queue.check()
        for sequence in (*self._queue, *self._followers):
            assert sequence.phase is Phase.WAITING
            assert sequence.n_held == sequence.n_computed == 0

    # --- before a step ------------------------------------------------------------------------------------------------

    def _sweep(self, now: float, events: list[Event], *, only_waiting: bool = False) -> None:
        marked, self._marked = self._marked, []
        for sequence in marked:
            if only_waiting and sequence.phase not in (Phase.WAITING, FINISHED):
                self._marked.append(sequence)
            elif sequence.phase is not FINISHED:
                self._finish(sequence, FinishReason.CANCELLED, None, now, events)
        in_step: list[tuple[float, int]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)
            late = self._sequences.get(entry[1])
            if late is None:
                continue
            if only_waiting and late.phase is not Phase.WAITING:
                in_step.append(entry)
            elif late.first_token_at is not None:  # a text's tokens may be counted later
                self._finish(late, FinishReason.LENGTH, "timeout", now, events)
            else:
                self._fail(late, _too_late(), events)
        for entry in in_step:
            heapq.heappush(self._deadlines, entry)

    def _n_keys(self) -> int:
        """Keys that have asked of late. Where nobody generates, who computes beside us waits for our steps as another key does."""
        return max(self._accounts.n_late, 1 + self.has_neighbours)

    def _remember_deadline(self, deadline: float, seq_id: int) -> None:
        if len(self._deadlines) > 2 * len(self._sequences) + N_DEADLINES_SPARE:  # mostly of sequences that ended long before theirs
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._sequences]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, seq_id))

    def _admit(self, now: float, events: list[Event]) -> None:
        """Let waiting sequences in, strictly in order: one that does not fit yet is not overtaken, or it would starve."""
        if self._followers:
            self._release_followers()
        while (sequence := self._trials.first_of(self._queue) if self._trials else self._queue.first(now)) is not None:
            if self._follows(sequence):
                continue
            if (error := self._hopeless(sequence, now)) is not None:
                self._fail(sequence, error, events)
                continue
            is_beside_trial = bool(self._trials) and not self._trials.is_tried(sequence)  # for whom nobody gives anything up
            if not self._fits(sequence) and (is_beside_trial or not self._make_way(sequence)):
                passing = None if is_beside_trial else self._passes(sequence, now, events)
                if passing is None:
                    return
                sequence = passing
            self._start(sequence, now)

    def _passes(self, first: Sequence, now: float, events: list[Event]) -> Sequence | None:
        """Who may come though it is the turn of `first`, whose prompt would only wait inside; that of a key with fewer places would not."""
        if not self._is_crowded(first):
            return None
        lighter = self._queue.lighter(first, now)
        while lighter:
            sequence = lighter.pop(0)
            if self._follows(sequence):
                continue
            if (error := self._hopeless(sequence, now)) is not None:
                self._fail(sequence, error, events)
                lighter = self._queue.lighter(first, now)  # it is the turn of its key's next one
                continue
            if self._fits(sequence) or self._make_way(sequence):
                return sequence
        return None

    def _hopeless(self, sequence: Sequence, now: float) -> DeadlineExceeded | None:
        """Why it cannot be in time: what is to be computed of its prompt takes longer by itself, and would at twice the speed, too.

        Asked before it is let in: nobody makes room for it, and its key pays nothing. None: it may be in time, as far as is known, or what
        is known is old: if none such were tried then, nothing would show that the machine has become faster.
        """
        is_old = not self._running and now - self._stepped_at >= KNOWN_S
        if sequence.first_token_at is not None or sequence.deadline is None or not self.cost.is_grounded or is_old:
            return None
        prompt_s = self.cost.prefill_s(len(sequence.tokens) - self.memory.n_known(sequence))
        left_s = sequence.deadline - now
        return _in_vain(prompt_s, left_s) if prompt_s > CERTAINTY * left_s else None

    def _release_followers(self) -> None:
        released = self._followers.take_released()
        for one in released:
            self._queue.bring_back(one.sequence)
            self._weigh(one.sequence, one.n_computed or self.memory.n_known(one.sequence))
        for leader in dict.fromkeys(one.leader for one in released):
            self._rank_anew(leader)

    def _follows(self, sequence: Sequence) -> bool:
        """Set a sequence aside that has only to wait for what another computes already; those behind it are not held up."""
        if not self.memory.limits.shares_live or not sequence.may_share or self._trials or len(self._running) >= self._n_places():
            return False
        leader = self._followers.leader_for(sequence, self._running, self.memory.n_known(sequence), n_least=self.memory.n_copied_least)
        if leader is None:
            return False
        self._queue.set_aside(sequence)
        self._weigh(sequence, self._followers.n_common(sequence))
        sequence.timeline.note(self._now, "following")
        if self._choice is not None and sequence.admitted_at is None and sequence.n_followed == 1:
            self._choice.came(sequence.n_prompt, self._followers.n_common(sequence), self._n_crowd(0))
        if sequence.order < leader.order:
            self._rank(leader, sequence.order)
        return True

    def _weigh(self, sequence: Sequence, n_known: int) -> None:
        """Count what it will probably cost if so many tokens of its prompt are there by then: who comes behind waits for no more."""
        if sequence.admitted_at is None:
            self._queue.reweigh(sequence, self._service.work(max(sequence.n_prompt - n_known, 1), sequence.n_max - sequence.n_prompt))

    def _meetings(self, *, beside_answers: bool) -> Mapping[Sequence, int]:
        """Where prompts are to stop, since others go on from there; in slots that cannot be cut also where others will."""
        if self.limits.can_trim:
            return self._followers.meetings(beside_answers=beside_answers) if self._followers else NO_MEETINGS
        stops = self._followers.stops()
        for sequence in self._running:
            if sequence.phase is PREFILL and sequence.stop_at > sequence.n_computed:
                stops[sequence] = min(stops.get(sequence, sequence.stop_at), sequence.stop_at)
        return stops

    def _rank_anew(self, leader: Sequence) -> None:
        """Somebody follows `leader` no longer: it is as urgent as itself, and as those who still do."""
        if leader.phase is PREFILL and (rank := self._followers.rank_of(leader)) != leader.order:
            self._rank(leader, rank)

    def _rank(self, sequence: Sequence, rank: tuple[int, int]) -> None:
        """Give a running sequence another rank of service."""
        self._running.remove(sequence)
        sequence.order = rank
        bisect.insort(self._running, sequence, key=order)

    def _fits(self, sequence: Sequence) -> bool:
        # One spare cell for each running sequence, so that a newcomer is not the reason for a preemption at the very next step.
        n_spare = len(self._running) + 1 if self._running else 0
        return len(self._running) < self._n_places() and not self._is_crowded(sequence) and self.memory.fits(sequence, n_spare)

    def _is_hurried(self, running: Seq[Sequence], now: float) -> bool:
        """Whether somebody's time may be over before the longest step of prompts is."""
        return any(sequence.deadline is not None and sequence.deadline < now + ALONE_FULL_S for sequence in running)

    def _n_places(self) -> int:
        return min(self._n_live_max, self._n_bearable(self._places))

    def _n_bearable(self, places: Places) -> int:
        cells = self.cells
        n_own = cells.n_held / max(len(self._running), 1)
        return places.n(cells.n_total - cells.n_free, self._service.prompt_rows, n_own)

    def _is_crowded(self, sequence: Sequence) -> bool:
        """Say whether prompts that go before its own fill some steps already. Inside it would only wait, and keep a fresher one out.

        As long as no step had room for prompts, nobody knows: on a model that makes its steps by itself, never.
        """
        if self.limits.itl_max_s is None or self._trials or not self._former.n_room:
            return False
        n_own, n_prefilled = len(sequence.tokens) - self.memory.n_known(sequence), self.totals.n_prefill_rows
        before = [one for one in self._running if one.phase is PREFILL and goes_before(n_prefilled, one, sequence, n_own)]
        owed = [len(one.tokens) - self.memory.n_coming(one) for one in before]
        n_before = sum(owed)
        if n_before <= N_STEPS_OWED * self._former.n_room:
            return False
        if any(one.phase is DECODE for one in self._running):
            return True
        # That was the room beside answers, which are no more.
        n_running, n_cells = min(len(self._running) + 1, self._n_live_max_usual), self.cells.n_total - self.cells.n_free
        places_taken = len(self._running) + self.n_waiting >= self._n_places()  # when all have come
        owed.append(n_own)
        n_room = self._former.n_room_alone(n_running, n_cells, owed, self._n_keys(), places_taken)
        return n_before > N_STEPS_OWED * n_room

    def _n_crowd(self, n_coming: int) -> int:
        """How many would run in a pool, and `n_coming` with them; of a slow model no more than leave the time between tokens bearable."""
        n = min(len(self._running) + self.n_waiting + n_coming, self._n_wanted_max)
        if not self.limits.n_slots_apart or n <= self.limits.n_slots_apart:  # they have room in either
            return n
        places = self._places_other if self.limits.rows_by_slot and self._places_other is not None else self._places
        return min(n, max(self._n_bearable(places), self.limits.n_slots_apart))

    def _make_way(self, sequence: Sequence) -> bool:
        return self._make_way_for_trial(sequence) if self._trials else self._make_way_for_justice(sequence)

    def _make_way_for_justice(self, sequence: Sequence) -> bool:
        """Preempt sequences that must yield to `sequence`, if it then fits. Should more run than there are places now, one goes for one."""
        if not may_yield(self._running, sequence):  # as mostly, before every step while somebody waits
            return False
        n_places = int(len(self._running) >= self._n_places())
        n_cells = self.memory.n_missing(sequence, len(self._running) + 1)
        yielding = who_yields(self._running, sequence, n_places, n_cells, self.memory.freeing(sequence))
        for running in yielding:
            self._preempt(running)
        return bool(yielding) and self.memory.fits(sequence, len(self._running) + 1 if self._running else 0)

    def _make_way_for_trial(self, sequence: Sequence) -> bool:
        """Preempt sequences that are not on trial until `sequence`, which is, fits."""
        while not self._fits(sequence):
            last = self._trials.last_outside(self._running)
            if last is None:
                return False
            self._preempt(last)
        return True

    def _start(self, sequence: Sequence, now: float) -> None:
        self._queue.admit(sequence, now)
        sequence.move(PREFILL)
        n_shared = self.memory.n_shared(sequence)
        self.memory.take(sequence)
        sequence.waits_from = self.totals.n_prefill_rows
        if sequence.admitted_at is None:
            sequence.admitted_at = now
            sequence.prefill_from = self.totals.n_prefill_rows
            n_cached = self.memory.n_coming(sequence)
            if self._choice is not None and not sequence.n_followed:
                self._choice.came(sequence.n_prompt, max(n_shared, n_computing(sequence, self._running)), self._n_crowd(1))
            # Charged at once: otherwise the same key would be given the next place too.
            sequence.account.charge(PROMPT_TOKEN * (sequence.n_prompt - n_cached))
            self.totals.n_prompt_tokens += sequence.n_prompt
        bisect.insort(self._running, sequence, key=order)
        if sequence.is_restoring:  # how much is cached is known when it has come
            sequence.timeline.note(now, "admitted", slot=sequence.slot)
        else:
            _note_cached(sequence, now, "admitted", slot=sequence.slot)

    def _reserve_decode_cells(self) -> None:
        """Hold a cell for the next row of each decoding sequence; those that rank last give way when cells run out."""
        if self.memory.reserve_all([sequence for sequence in self._running if sequence.phase is DECODE]):
            return
        for sequence in list(self._running):
            while sequence.phase is DECODE and not self.memory.reserve(sequence):
                self._preempt(gives_way(self._running))

    # --- after a step -------------------------------------------------------------------------------------------------

    def _tell_scores(self, scorings: Seq[Scoring], scores: list[list[TokenLogprob] | None], events: list[Event]) -> None:
        for scoring, score in zip(scorings, scores, strict=True):
            sequence = scoring.sequence
            if sequence.phase is FINISHED or sequence.cancelled:
                continue
            if score is None:
                self._fail(sequence, _invalid_logits(), events, keep=False)
                continue
            sequence.n_scored += len(score)
            events.append(Delta(sequence.seq_id, "", [], prompt_logprobs=score))

    def _accept(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float, events: list[Event]) -> None:
        """Take a drawn token: append it, tell of it, and see whether it was the last."""
        if sequence.first_token_at is None:
            if not self._begin(sequence, now, events):
                return
            if len(sequence.tokens) >= sequence.n_max:  # only the prompt was wanted
                self._finish(sequence, FinishReason.LENGTH, None, now, events)
                return
        if not 0 <= token < self._vocabulary.n_tokens:  # as of a model whose vocabulary is another one's
            self._fail(sequence, GenerationFailed(f"the model told token {token}, which its vocabulary does not have"), events)
            return
        tokens = sequence.tokens
        tokens.append(token)
        sequence.sampler.observe(token)
        grammar = sequence.sampler.grammar
        if grammar is not None and grammar.failure is not None:
            self._fail(sequence, _without_token(sequence), events)
            return
        self.totals.n_generated += 1
        n_tokens = len(tokens)
        logprobs = None if logprob is None else [logprob]
        can_end = n_tokens >= sequence.n_final_from
        if can_end and token in sequence.final_tokens:
            events.append(Delta(sequence.seq_id, "", [token], logprobs))
            reason: str | int | None = token if token in sequence.spec.stopping.stop_token_ids else None
            self._finish(sequence, FinishReason.STOP, reason, now, events)
            return
        transcript = sequence.transcript
        try:
            text, parts, match = transcript.push(token, can_stop=can_end)
        except Exception as error:  # what a model writes knows no bounds: a mistake in reading it costs the one answer
            self._fail(sequence, _unread(error), events)
            return
        events.append(Delta(sequence.seq_id, text, [token], logprobs, parts=parts))
        if match is not None:
            self._finish(sequence, FinishReason.STOP, match, now, events)
        elif transcript.is_done or (grammar is not None and grammar.is_done):
            self._finish(sequence, FinishReason.STOP, None, now, events)
        elif n_tokens >= sequence.n_max or (sequence.lines_s is not None and _has_had_its_time(sequence, text, now) and can_end):
            self._finish(sequence, FinishReason.LENGTH, None, now, events)
        else:
            if self._choice is not None and self._choice.is_apart:  # the last token would have needed no cell
                self._choice.grew(n_tokens)
            if grammar is not None:
                sequence.sampler.grammar_waits = transcript.is_reasoning
            if due := transcript.due():
                sequence.sampler.force(due)

    def _begin(self, sequence: Sequence, now: float, events: list[Event]) -> bool:
        """Note the first token, unless it comes too late."""
        if sequence.deadline is not None and now >= sequence.deadline:
            self._fail(sequence, _too_late(), events)
            return False
        sequence.first_token_at = now
        sequence.timeline.note(now, "first_token")
        return True

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None, now: float, events: list[Event]) -> None:
        self._end(sequence)
        try:
            text, parts, match = sequence.transcript.finish()
        except Exception as error:  # as above
            self._tell_failed(sequence, _unread(error), events)
            return
        if match is not None and reason is FinishReason.STOP:  # in what was held back; an answer that was cut stays one, and half a call
            stop_reason = match
        if reason is FinishReason.STOP and sequence.transcript.n_calls:
            reason = FinishReason.TOOL_CALLS
        sequence.timeline.end(now, "finished", reason=reason.value, n_generated=sequence.n_generated)
        if reason is FinishReason.CANCELLED:
            self.totals.n_cancelled += 1
        else:
            self.totals.n_finished += 1
            self._service.answer(sequence.n_generated)
        events.append(Finished(sequence.seq_id, reason, stop_reason, _usage(sequence, now), text, parts))

    def _fail(self, sequence: Sequence, error: RequestError, events: list[Event], *, keep: bool = True) -> None:
        self._end(sequence, keep=keep)
        self._tell_failed(sequence, error, events)

    def _tell_failed(self, sequence: Sequence, error: RequestError, events: list[Event]) -> None:
        sequence.timeline.end(self._now, "failed", error=str(error.code or error.type))
        self.totals.n_failed += 1
        events.append(Failed(sequence.seq_id, error))

    def _give_way(self, members: list[Sequence], error: NoRoom, events: list[Event]) -> None:
        if self.memory.evict_all():
            return
        if len(self._running) > 1:
            self._preempt(gives_way(self._running), keep=False)
            self._n_live_max = len(self._running)  # our count says that there is room, the model knows better: until somebody ends
            return
        for sequence in members:  # alone, and yet there is no room: from the start once more, then give up
            self._preempt(sequence, keep=False)
            self._accuse([sequence], error, events)

    def _accuse(self, members: list[Sequence], error: Exception, events: list[Event]) -> None:
        if len(members) != 1:
            self._trials.split(members)
            return
        (sequence,) = members
        sequence.n_lone_failures += 1
        if sequence.n_lone_failures >= N_LONE_FAILURES_MAX:
            self._trials.acquit(sequence)
            failure = GenerationFailed("the model failed on this request", code="step_failed")
            failure.__cause__ = error
            self._fail(sequence, failure, events, keep=False)
        else:
            self._trials.split(members)

    def _acquit(self, sequences: list[Sequence]) -> None:
        """A token was drawn for them, so what failed before was not theirs, or is past: only failures in a row make a culprit."""
        self._trials.clear(sequences)
        for sequence in sequences:
            sequence.n_lone_failures = 0

    # --- moves between phases -----------------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Take back what a running sequence holds; it waits, keeps its tokens and its rank.

        What it has computed is cached until the cells are wanted; without `keep`, or then, it is computed again.
        """
        self._free(sequence, keep=keep, comes_back=True)
        sequence.order = sequence.own_order
        sequence.move(Phase.WAITING)
        sequence.n_preempted += 1
        sequence.timeline.note(self._now, "preempted", n_generated=sequence.n_generated)
        self.totals.n_preempted += 1
        self._queue.add(sequence)

    def _end(self, sequence: Sequence, *, keep: bool = True) -> None:
        if sequence in self._followers:
            leader = self._followers.remove(sequence)
            self._queue.remove_aside(sequence)
            self.memory.ends_waiting(sequence)
            if leader.order == sequence.order:  # which it had lent; all followers are gone through then, and thousands may end at once
                self._rank_anew(leader)
        elif sequence.phase is Phase.WAITING:
            self._queue.remove(sequence)
            self.memory.ends_waiting(sequence)
        else:
            self._free(sequence, keep=keep)
            self._n_live_max = self._n_live_max_usual
        if self._choice is not None:
            self._choice.ended(len(sequence.tokens), sequence.n_max)
        sequence.move(FINISHED)
        del self._sequences[sequence.seq_id]
        if self._trials.is_any_suspect:
            self._trials.acquit(sequence)

    def _free(self, sequence: Sequence, *, keep: bool, comes_back: bool = False) -> None:
        self._running.remove(sequence)
        if keep:
            self.memory.keep(sequence, comes_back=comes_back)
        else:
            self.memory.forget(sequence)

    def _sequence(self, spec: SequenceSpec, seq_id: int, now: float) -> Sequence:
        stopping, vocabulary = spec.stopping, self._vocabulary
        tokens = list(spec.prompt)
        n_prompt = len(tokens)
        n_max = self.limits.n_ctx
        if stopping.max_tokens is not None:
            n_max = min(n_max, n_prompt + stopping.max_tokens)
        end_tokens = vocabulary.end_tokens
        transcript = self._transcript(spec)
        may_keep = spec.cache_prompt and self.limits.keeps_prefixes
        sequence = Sequence(
            seq_id=seq_id,
            spec=spec,
            account=self._accounts.of(spec.key),
            tokens=tokens,
            n_prompt=n_prompt,
            n_max=n_max,
            lines_s=stopping.lines_s,
            sampler=make_sampler(
                spec.sampling,
                stopping,
                vocabulary,
                seed=spec.seed,
                tokens=tokens,
                n_prompt=n_prompt,
                n_logprobs=spec.n_logprobs,
                dry_breakers=spec.dry_breakers,
                grammar=None if spec.grammar is None else spec.grammar.start(),
            ),
            transcript=transcript,
            final_tokens=stopping.stop_token_ids if stopping.ignore_eos else stopping.stop_token_ids | end_tokens,
            n_final_from=n_prompt + max(stopping.min_tokens, 1),
            arrived_at=now,
            deadline=None if spec.timeout_s is None else now + spec.timeout_s,
            order=(spec.priority, seq_id),
            may_share=may_keep or bool(spec.group),
            may_keep=may_keep,
        )
        sequence.sampler.grammar_waits = spec.grammar is not None and transcript.is_reasoning
        if due := transcript.due():  # a prompt may end within a reasoning that may not have any token
            sequence.sampler.force(due)
        return sequence

    def _is_another(self, sequence: Sequence) -> bool:
        """Whether the sequence before was another choice of its request."""
        return self._newest is not None and self._newest.spec.prompt is sequence.spec.prompt

    def _n_new(self, sequence: Sequence) -> int:
        """Rows that a newcomer's prompt will probably need: not those that are known, nor those that another of its request computes."""
        before, is_another = self._newest, self._is_another(sequence)
        self._newest = sequence
        is_coming = is_another and before is not None and before.phase is not FINISHED
        if is_coming and sequence.may_share and self.memory.limits.shares_live:
            return 1
        return sequence.n_prompt - self.memory.n_known(sequence)

    def _transcript(self, spec: SequenceSpec) -> Transcript:
        shown = frozenset() if spec.answer is None else spec.answer.shown
        texts = self._texts.get(shown)
        if texts is None:
            texts = self._texts[shown] = TokenTexts(self._vocabulary, shown=shown)
        return Transcript(texts, stop=spec.stopping.stop, form=spec.answer)


def _layout_choice(limits: Limits, cost: CostModel) -> LayoutChoice | None:
    gain_cell_s = cost.apart_gain_cell_s
    if not limits.n_slots_apart or not gain_cell_s:
        return None
    return LayoutChoice(
        Apart(
            n_slots=limits.n_slots_apart,
            n_cells_slot=limits.n_cells_slot_apart,
            gain_cell_s=gain_cell_s,
            change_s=limits.layout_change_s,
        ),
        begins_apart=limits.begins_apart,
    )


def _memory_limits(limits: Limits) -> MemoryLimits:
    return MemoryLimits(
        n_cells=limits.n_cells,
        n_slots=limits.n_slots,
        can_share=limits.can_share,
        can_trim=limits.can_trim,
        copies_slots=limits.copies_slots,
        has_parts=limits.rows_by_slot,
    )


def _offload(limits: Limits, prices: Prices) -> Offload | None:
    if not (limits.keeps_prefixes and limits.can_save and limits.host_pool_n_bytes):
        return None
    pool = HostPool(limits.host_pool_n_bytes, can_cut=limits.can_trim)
    n_cells_slot = limits.n_cells // limits.n_slots if limits.rows_by_slot else limits.n_cells
    return Offload(pool, prices, can_save_part=limits.can_save_part, n_cells_slot=n_cells_slot, cell_n_bytes=limits.cell_n_bytes)


def _note_cached(sequence: Sequence, now: float, event: str, **facts: int) -> None:
    """Tell how much was cached, and for the first admission from which position on it was not, and why."""
    miss = sequence.miss if sequence.n_preempted == 0 else None
    if miss in (None, Miss.NONE):
        sequence.timeline.note(now, event, **facts, n_cached=sequence.n_computed)
    else:
        sequence.timeline.note(now, event, **facts, n_cached=sequence.n_computed, miss_from=sequence.n_computed, miss=miss.value)


def _has_had_its_time(sequence: Sequence, text: str, now: float) -> bool:
    """Whether an answer that is to be some lines, soon, has some and was not soon."""
    assert sequence.lines_s is not None, "it was looked at"
    sequence.has_line = sequence.has_line or "\n" in text
    return sequence.has_line and sequence.first_token_at is not None and now - sequence.first_token_at >= sequence.lines_s


def _too_late() -> DeadlineExceeded:
    return DeadlineExceeded("timeout_s passed before the first token", param="timeout_s")


def _in_vain(prompt_s: float, left_s: float) -> DeadlineExceeded:
    message = f"timeout_s leaves {max(left_s, 0.0):.2g} s, and the prompt alone would take about {prompt_s:.2g} s"
    return DeadlineExceeded(message, param="timeout_s", code="wait_too_long")


def _without_token(sequence: Sequence) -> GenerationFailed:
    """Why no token could be drawn for it."""
    grammar = sequence.sampler.grammar
    if grammar is not None and grammar.failure is not None:
        return GenerationFailed(f"the answer cannot be held to what was asked: {grammar.failure}", code="grammar_failed")
    if sequence.sampler.is_contradicted():
        return GenerationFailed("the answer cannot be held to what was asked: logit_bias forbids all that may come", code="grammar_failed")
    return _invalid_logits()


def _unread(error: Exception) -> GenerationFailed:
    failure = GenerationFailed("the answer could not be read", code="answer_unread")
    failure.__cause__ = error
    return failure


def _invalid_logits() -> GenerationFailed:
    return GenerationFailed("the model's logits are not numbers", code="invalid_logits")


def _usage(sequence: Sequence, now: float) -> Usage:
    admitted_at = now if sequence.admitted_at is None else sequence.admitted_at
    first_token_at = now if sequence.first_token_at is None else sequence.first_token_at
    return Usage(
        n_prompt=sequence.n_prompt,
        n_cached=sequence.n_cached,
        n_generated=sequence.n_generated,
        queue_s=admitted_at - sequence.arrived_at,
        prefill_s=first_token_at - admitted_at,
        decode_s=now - first_token_at,
        n_preempted=sequence.n_preempted,
        n_reasoning=sequence.transcript.n_reasoning,
        is_admitted=sequence.admitted_at is not None,
        has_begun=sequence.first_token_at is not None,
    )


def _view(sequence: Sequence) -> SequenceView:
    return SequenceView(
        seq_id=sequence.seq_id,
        request_id=sequence.spec.request_id,
        phase=sequence.phase,
        slot=None if sequence.phase is Phase.WAITING else sequence.slot,
        n_prompt=sequence.n_prompt,
        n_generated=sequence.n_generated,
        n_computed=sequence.n_computed,
        n_held=sequence.n_held,
        n_shared=sequence.n_shared,
        n_cached=sequence.n_cached,
        miss=sequence.miss,
        n_preempted=sequence.n_preempted,
        priority=sequence.spec.priority,
    )
