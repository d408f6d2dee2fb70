"""Decides, before every step, which sequences' rows it carries, and settles, after it, what became of them.

Pure and synchronous: time comes in as an argument, work goes out as a `Plan`, news as events. Memory is protected by counting: no row is
planned without a cell for it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq

import attrs

from cllm.backend import KvLayout, Vocabulary
from cllm.engine.batch.ahead import Ahead
from cllm.engine.batch.budget import ALONE_FULL_S, RowBudget
from cllm.engine.batch.fillers import N_TILE, Fillers
from cllm.engine.batch.former import NO_MEETINGS, BatchFormer, goes_before, n_owed
from cllm.engine.batch.plan import Plan, Scoring, StepOutput
from cllm.engine.cost.model import CostModel
from cllm.engine.cost.places import Places
from cllm.engine.events import Delta, Event, TokenLogprob
from cllm.engine.failures import in_vain, invalid_logits, without_token
from cllm.engine.limits import Limits, memory_limits, n_live_max_of, offload_of
from cllm.engine.memory.layout import Apart, LayoutChoice, likely_length
from cllm.engine.memory.prefix import Key
from cllm.engine.memory.prices import Prices
from cllm.engine.scheduler import Scheduler, note_cached
from cllm.engine.sequence import DECODE, FINISHED, PREFILL, Phase, Sequence, SequenceSpec
from cllm.engine.waiting.fairness import GENERATED_TOKEN, NO_WORK, Work
from cllm.engine.waiting.following import Followers, is_of_use, n_computing
from cllm.engine.waiting.gate import CERTAINTY, Behind
from cllm.engine.waiting.queue import gives_way, may_yield, order, who_yields
from cllm.engine.waiting.trials import Trials
from cllm.errors import Aborted, DeadlineExceeded, GenerationFailed, NoRoom

KNOWN_S = 20.0  # after the last step, for which the machine is believed to be as slow as it was
N_STEPS_EVICTED = 8  # whose cells are freed at once where steps follow on each other: before each such move one is planned by itself
# Steps that are expected to take longer wait for what is decided between them: that is half a percent of theirs, and whoever computes it
# beside them takes the cores that they have. Those that take less than to decide it have nothing to hide it behind: two threads of Python
# then wait for each other, and a model that takes no time at all had 0.8 to 0.9 of the tokens/s with 64 streams.
AHEAD_S_LEAST, AHEAD_S_MAX = 0.0005, 0.05
N_STEPS_OWED = 2  # room for prompts' rows that is spoken for: whoever comes then waits outside
COMPANIONS_SHARE = 0.02  # of a step, for which others who come at the same moment may be waited for
MOVING_S_MAX = 0.1  # of cells that come back from the host or are copied in one step, for which answers wait; the first may take longer
STALLED, STALLED_S = 32.0, 5.0  # times as long as expected, and seconds, beyond which a step was held up, by whatever it was
N_LONE_FAILURES_MAX = 2  # a sequence whose steps fail so often in a row while it is alone in them is the culprit


class StepScheduler(Scheduler):
    """The batch re-former."""

    def __init__(self, limits: Limits, vocabulary: Vocabulary, cost: CostModel | None = None) -> None:
        super().__init__(limits, vocabulary, cost)
        self._places, self._former = self._dealer()
        self._n_live_now = self._n_live_max  # fewer where the model has less room than it says: until somebody ends
        self._restores_alone = False  # whether the last step had nothing but moves, since some of these bring cells back
        self._places_other: Places | None = None  # of the layout that is not in force
        # Apart fewer may have a slot, which is not to hide how many would run in a pool.
        self._n_wanted_max = min(limits.n_live_max, limits.n_rows_max)
        self._choice = _layout_choice(limits, self.cost)
        self._cost_other: CostModel | None = None  # of that layout
        self._followers = Followers()  # they wait too, but not in the queue
        self._trials = Trials()
        self.has_neighbours = False  # whether others compute in the thread that our steps have; told by the loop
        self._planned_at = 0.0
        self._goes_ahead = False  # whether a step might have begun before the one before it was settled, since the last plan
        self._stepped_at = -math.inf

    def _dealer(self) -> tuple[Places, BatchFormer]:
        """What deals out the memory and the rows that the limits name."""
        limits, cost = self.limits, self.cost
        budget = RowBudget(
            cost,
            n_rows_max=limits.n_rows_max,
            n_rows_fixed=limits.row_budget,
            itl_target_s=limits.itl_target_s,
            itl_max_s=limits.itl_max_s,
            apart=limits.apart,
        )
        has_room = limits.n_rows_max >= limits.n_slots + N_TILE  # for a row of every slot, and a tile to its end
        may_fill = limits.apart and limits.can_trim and has_room
        fillers = Fillers(limits.n_slots, cost.pass_s, cost.read_s, self.memory.filler_position) if may_fill else None
        former = BatchFormer(
            budget,
            n_rows_max=limits.n_rows_max,
            apart=limits.apart,
            fillers=fillers,
        )
        return Places(cost, n_max=self._n_live_max, itl_max_s=limits.itl_max_s), former

    def submit(self, spec: SequenceSpec, now: float) -> int:
        """See `Scheduler.submit`. Its events come from `plan` and `apply` from now on."""
        seq_id = super().submit(spec, now)
        if self._choice is not None:
            self._choice.grew(len(spec.prompt))
            self._choice.waits(self._n_crowd())
        return seq_id

    # --- a step -------------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Plan | None:
        """Re-form the batch. None when nothing is owed: no rows, no memory moves, no events.

        In this order: who leaves frees cells; what is idle goes to the host, which is told first whether anybody waits for that; who waits
        is let in, where that leaves a cell for each who runs (`_fits`); these take it. Only then it is known who has rows: whoever had to
        give way, or whose cells are on their way, has none. What all of that moves is taken last.
        """
        self._planned_at = self._now = now
        events: list[Event] = []
        if self._marked or self._deadlines:
            self._sweep(now, events)
        if self._trials:
            self._trials.advance()
        if self.memory.offload is not None:
            self.memory.offload.is_generating = self._is_waited_for
        self.memory.retire_idle()
        self._admit(now, events)
        self._reserve_decode_cells()
        running = self._who_computes()
        beside = self._who_is_put_off(running) if self._trials else []
        is_decoding = bool(beside) or any(sequence.phase is DECODE for sequence in running)
        places_taken = not is_decoding and len(running) >= self._n_places() and not self._is_hurried(running, now)
        moves = self.memory.take_moves()  # nothing below may move a cell: it would be done after the rows that count on it
        plan = self._former.form(
            running,
            moves,
            events,
            self.cells.n_in_use,
            beside=beside,
            n_prefilled=self.totals.n_prefill_rows,
            n_keys=self._accounts.n_recent if is_decoding else self._n_keys(),
            meetings=self._meetings(beside_answers=is_decoding),
            places_taken=places_taken,
        )
        if plan.n_rows:
            self._expect(plan)
        return plan if plan.is_step or events else None

    def plan_ahead(self, plan: Plan, now: float, *, by_model: bool) -> Ahead | None:
        """The step after `plan`'s, which runs; None where more is to be decided for it than the tokens that come now.

        So it is while somebody comes, may be let in, leaves or is at the end of its room, or of its part of the cells, or cells are to be
        moved; and steps that are very short or long gain nothing by it. `by_model`: the model draws what it can, for which nothing may
        depend on what the tokens say.
        """
        decoding = plan.decoding
        if not decoding or plan.prefilling or len(decoding) != len(self._running) or self._marked or self._trials:
            return None
        # Where slots cannot be trimmed, the cell of a row in vain could not be freed.
        if not self.limits.can_trim or self.has_neighbours or (self._deadlines and self._deadlines[0][0] <= now):
            return None
        if self.cost.is_grounded and not AHEAD_S_LEAST <= plan.expected_s <= AHEAD_S_MAX:
            return None
        if self.n_waiting and self._may_enter(now):
            return None
        n_most = math.inf if self._choice is None else self._choice.n_cells_most
        for sequence in decoding:
            n_coming = len(sequence.tokens) + 1
            if sequence.phase is not DECODE or n_coming >= sequence.n_max or n_coming > n_most:
                return None
        if by_model and not _are_drawn_alike(decoding):
            return None
        self._goes_ahead = True  # but for what memory is due
        if self.memory.is_due or not self.memory.reserve_all(decoding, n_ahead=1):
            return None
        after = self._former.follow(plan)
        self._expect(after)
        ends = [sequence.final_tokens for sequence in after.outputs]
        return Ahead(plan=after, before=plan, n_vocab=self._vocabulary.n_tokens, ends=ends)

    def _may_enter(self, now: float) -> bool:
        """Whether somebody who waits might come in before one who runs has ended."""
        first = self._queue.first(now)
        return len(self._running) < self._n_places() or (first is not None and may_yield(self._running, first))

    def _expect(self, plan: Plan) -> None:
        """Say what its rows will probably take."""
        plan.expected_s = self.cost.step_s(plan.n_rows, plan.batch.n_outputs, plan.n_cells, plan.passes, attended=plan.attended)

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

    def _who_is_put_off(self, running: list[Sequence]) -> list[Sequence]:
        """Those who generate, and wait for a step of `running` who are on trial. A fixed number of rows is that of any step."""
        if self.limits.row_budget is not None:
            return []
        return [sequence for sequence in self._running if sequence.phase is DECODE and sequence not in running]

    def is_futile(self, plan: Plan) -> bool:
        """Whether nobody waits for any row of a step under way: neither its members, nor those who would go on from their prompts."""
        if not plan.is_unwanted():
            return False
        limits = self.memory.limits
        if not plan.prefilling or not limits.shares_live:
            return True
        those_who_wait = (waiting for waiting in self._waiting() if not waiting.cancelled)
        return not any(is_of_use(plan.prefilling, waiting, can_trim=limits.can_trim) for waiting in those_who_wait)

    def companions_s(self) -> float:
        """How long the first step may be put off while others come at the same moment: a small part of what it will take now.

        0 when there is nothing to compute, or no place for one more.
        """
        n_rows = 0
        if self.n_waiting >= self._n_live_max:
            return 0.0
        for sequence in self._queue:
            n_rows += len(sequence.tokens)
            if n_rows >= self.limits.n_rows_max:
                break
        return COMPANIONS_SHARE * self.cost.step_s(min(n_rows, self.limits.n_rows_max), 0, 0) if n_rows else 0.0

    def apply(self, plan: Plan, output: StepOutput, now: float, ahead: Ahead | None = None) -> list[Event]:
        """Settle a step that went well: every row has its cell, every output its token. `ahead`: the step that has begun meanwhile.

        Rows are noted before tokens are told: whoever ends by its token leaves the cells that it has by then. `ahead` comes last: whose row
        there is in vain is known when all tokens were read.
        """
        self._now = now
        events: list[Event] = []
        if plan.n_rows:
            self._serve(plan, now - self._planned_at)
        self._note_moves(plan, now)
        if plan.n_rows:
            self._learn_cost(plan, output.model_s, now)
        self._note_rows(plan, now)
        if plan.scorings:
            self._tell_scores(plan.scorings, output.scores, events)
        self._tell_tokens(plan.outputs, output, now, events)
        if self._trials.is_any_suspect:
            self._acquit(plan.outputs)
        if ahead is not None:
            self._planned_at = now
            self.memory.overrun(ahead.note_overrun())
        return events

    def _learn_cost(self, plan: Plan, model_s: float, now: float) -> None:
        if self._choice is not None:  # by the prices that it was planned with
            self._note_cost_of_layout(self._choice, plan)
        if model_s > 0:
            self._stepped_at = now
            self.cost.observe(plan.n_rows, plan.batch.n_outputs, plan.n_cells, model_s, plan.passes, attended=plan.attended)

    def _note_rows(self, plan: Plan, now: float) -> None:
        """Every row has its cell."""
        self.totals.n_fillers += len(plan.fillers)
        overrun = plan.overrun()
        for sequence in plan.decoding:
            if overrun and sequence in overrun:
                continue
            sequence.account.charge(GENERATED_TOKEN)
            self.memory.decoded(sequence)
        for sequence, n_rows in plan.prefilling:
            self.memory.prefilled(sequence, n_rows)
            sequence.timeline.prefill(now, n_rows)
            # Of one that was preempted, the last row is that of a drawn token, which nobody has computed before.
            n_counted = n_rows - (sequence.n_generated > 0 and not n_owed(sequence))
            self.totals.n_prefill_rows += n_counted
            sequence.prefill_from += n_counted  # it has not waited for its own
            sequence.waits_from += n_counted

    def _tell_tokens(self, outputs: Seq[Sequence], output: StepOutput, now: float, events: list[Event]) -> None:
        """Every output has its token."""
        logprobs = output.logprobs
        invalid = frozenset(output.invalid)
        choice = self._choice if self._choice is not None and self._choice.is_apart else None
        for i, sequence in enumerate(outputs):
            if sequence.phase is FINISHED:  # ended from outside while the step ran
                continue
            if sequence.phase is PREFILL:
                sequence.move(DECODE)
                if sequence.order != sequence.own_order:  # nobody waits for its prompt any more
                    self._rank(sequence, sequence.own_order)
            if sequence.cancelled:  # the mark is met in the next plan
                continue
            if i in invalid:
                self._fail(sequence, without_token(sequence), events, keep=False)
                continue
            self._accept(sequence, output.tokens[i], None if logprobs is None else logprobs[i], now, events)
            if choice is not None and sequence.phase is not FINISHED:  # the last token would have needed no cell
                choice.grew(len(sequence.tokens))

    def _serve(self, plan: Plan, seconds: float) -> None:
        """Count what was done, by what a generated token takes beside as many as run, and keep that for those who wait.

        While others could run, too, it is no measure for these: they will have a full house beside them.
        """
        n_running, cells = min(len(self._running), self.cost.n_rows_max), self.cells
        if self.cost.is_grounded:  # a process that was stopped for a while says nothing of how fast it is
            seconds = min(seconds, max(STALLED * plan.expected_s, STALLED_S))
        if n_running and self._is_full and self.cost.is_grounded:
            self._generated_token = self.cost.generated_rows(n_running, cells.n_in_use, cells.n_held)
        n_generated = len(plan.decoding) - len(plan.overrun())
        self._service.step(plan.n_prompt_rows, n_generated, seconds, is_full=self._is_full, generated=self._generated_token)

    def _note_moves(self, plan: Plan, now: float) -> None:
        for sequence in self.memory.settle(plan):
            note_cached(sequence, now, "restored")

    def _tell_scores(self, scorings: Seq[Scoring], scores: list[list[TokenLogprob] | None], events: list[Event]) -> None:
        for scoring, score in zip(scorings, scores, strict=True):
            sequence = scoring.sequence
            if sequence.phase is FINISHED or sequence.cancelled:
                continue
            if score is None:
                self._fail(sequence, invalid_logits(), events, keep=False)
                continue
            sequence.n_scored += len(score)
            events.append(Delta(sequence.seq_id, "", [], prompt_logprobs=score))

    # --- a step that failed -------------------------------------------------------------------------------------------

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
        self._note_moves(plan, now)
        robbed = self.memory.owe_again(plan.moves, plan.n_moves_done, has_failed=not isinstance(error, Aborted))
        for sequence in robbed:
            if sequence.phase is not Phase.WAITING:
                self._preempt(sequence, keep=False)
        if isinstance(error, NoRoom):
            if not robbed:
                self._give_way(members, error, events, is_alone=not plan.overrun())
            return events
        if plan.has_move_failed and not isinstance(error, Aborted):  # what builds on it is given up, and no row was computed
            return events
        if not isinstance(error, Aborted):
            ended = [sequence for sequence in plan.overrun() if sequence.phase is FINISHED]
            self.memory.spoilt([*(slot for slot, _ in plan.fillers), *(sequence.slot for sequence in ended)])
        is_kept = isinstance(error, Aborted) and self.limits.can_trim
        for sequence in members:
            if sequence in robbed or (is_kept and sequence.cancelled):  # the latter's end is met in the next plan
                continue
            self._preempt(sequence, keep=is_kept)
        if not isinstance(error, Aborted):
            self._accuse(members, error, events, is_alone=not plan.overrun())
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
            self._preempt(sequence, keep=False, is_lost=True)
        self.memory.lost(plan)
        suspects = self._trials.note_death(members)
        if len(members) == 1:
            self._accuse(members, error, events, is_alone=True)
        elif suspects:
            self._trials.isolate(suspects)
        return events

    def _give_way(self, members: list[Sequence], error: NoRoom, events: list[Event], *, is_alone: bool) -> None:
        if self.memory.evict_all():
            return
        if len(self._running) > 1:
            self._preempt(gives_way(self._running), keep=False)
            self._n_live_now = len(self._running)  # our count says that there is room, the model knows better: until somebody ends
            return
        for sequence in members:  # alone, and yet there is no room: from the start once more, then give up
            self._preempt(sequence, keep=False)
            self._accuse([sequence], error, events, is_alone=is_alone)

    def _accuse(self, members: list[Sequence], error: Exception, events: list[Event], *, is_alone: bool) -> None:
        """One of `members` may be why a step failed; `is_alone` if nobody else had rows in it."""
        if len(members) != 1 or not is_alone:
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
        if limits.apart == self.limits.apart:
            n_cells_slot, self._choice = self._choice.apart.n_cells_slot, None  # it will not be tried again
            return self._hold_to(n_cells_slot) if limits.apart else []
        # What one sequence may have was promised, and does not change: who outgrows a part brings the pool back. What is saved may take no
        # less than before for what it has taken meanwhile.
        self.limits = attrs.evolve(limits, n_ctx=self.limits.n_ctx, host_pool_n_bytes=self.limits.host_pool_n_bytes)
        if self._cost_other is None:
            self._cost_other = self.cost.beside(n_rows_max=limits.n_rows_max, apart=limits.apart)
        other = self._cost_other
        other.keep_up(self.cost)
        self.cost, self._cost_other = other, self.cost
        prices = Prices(self.cost)
        self.memory.laid_out(memory_limits(self.limits), offload_of(self.limits, prices), prices, carries_states=self.limits.carries_states)
        self._n_live_now = self._n_live_max = n_live_max_of(self.limits)
        self._places, self._former = self._dealer()
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

    # --- what is cached -----------------------------------------------------------------------------------------------

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

    # --- who is let in ------------------------------------------------------------------------------------------------

    def _admit(self, now: float, events: list[Event]) -> None:
        """Let waiting sequences in, strictly in order: one that does not fit yet is not overtaken, or it would starve."""
        if self._followers:
            self._release_followers()
        while (sequence := self._trials.first_of(self._queue) if self._trials else self._queue.first(now)) is not None:
            if self._is_moving_enough():
                return
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

    def _is_moving_enough(self) -> bool:
        """Whether what comes back from the host or is copied in the next step takes long enough already for those who wait for it."""
        return self.memory.moving_s >= MOVING_S_MAX and self._is_waited_for

    @property
    def _is_waited_for(self) -> bool:
        """Whether somebody waits for the end of each step: who generates, or another who computes in our thread."""
        return self.has_neighbours or any(sequence.phase is DECODE for sequence in self._running)

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
        return in_vain(prompt_s, left_s) if prompt_s > CERTAINTY * left_s else None

    def _fits(self, sequence: Sequence) -> bool:
        return super()._fits(sequence) and not self._is_crowded(sequence)

    def _n_places(self) -> int:
        return min(self._n_live_now, self._n_bearable(self._places))

    def _n_bearable(self, places: Places) -> int:
        cells = self.cells
        n_own = cells.n_held / max(len(self._running), 1)
        return places.n(cells.n_in_use, self._service.prompt_rows, n_own)

    def _is_crowded(self, sequence: Sequence) -> bool:
        """Say whether prompts that go before its own fill some steps already. Inside it would only wait, and keep a fresher one out.

        As long as no step had room for prompts, nobody knows.
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
        n_running, n_cells = min(len(self._running) + 1, self._n_live_max), self.cells.n_in_use
        places_taken = len(self._running) + self.n_waiting >= self._n_places()  # when all have come
        owed.append(n_own)
        n_room = self._former.n_room_alone(n_running, n_cells, owed, self._n_keys(), places_taken)
        return n_before > N_STEPS_OWED * n_room

    def _n_crowd(self) -> int:
        """How many would run in a pool; of a slow model no more than leave the time between tokens bearable."""
        n = min(len(self._running) + self.n_waiting, self._n_wanted_max)
        if not self.limits.n_slots_apart or n <= self.limits.n_slots_apart:  # they have room in either
            return n
        places = self._places_other if self.limits.apart and self._places_other is not None else self._places
        return min(n, max(self._n_bearable(places), self.limits.n_slots_apart))

    def _is_hurried(self, running: Seq[Sequence], now: float) -> bool:
        """Whether somebody's time may be over before the longest step of prompts is."""
        return any(sequence.deadline is not None and sequence.deadline < now + ALONE_FULL_S for sequence in running)

    def _n_keys(self) -> int:
        """Keys that have asked of late. Where nobody generates, who computes beside us waits for our steps as another key does."""
        return max(self._accounts.n_recent, 1 + self.has_neighbours)

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
            self._preempt(running, is_lost=n_cells > 0 and self.memory.offload is None)
        return bool(yielding) and self.memory.fits(sequence, len(self._running) + 1 if self._running else 0)

    def _make_way_for_trial(self, sequence: Sequence) -> bool:
        """Preempt sequences that are not on trial until `sequence`, which is, fits."""
        while not self._fits(sequence):
            last = self._trials.last_outside(self._running)
            if last is None:
                return False
            self._preempt(last, is_lost=self.memory.offload is None)
        return True

    def _start(self, sequence: Sequence, now: float) -> None:
        if self._choice is not None and sequence.admitted_at is None and not sequence.n_followed:
            n_alike = n_computing(sequence, self._running, self.memory.n_shared(sequence))
            self._choice.came(sequence.n_prompt, n_alike, self._n_crowd())
        super()._start(sequence, now)

    def _reserve_decode_cells(self) -> None:
        """Hold a cell for the next row of each decoding sequence; those that rank last give way when cells run out."""
        n_steps, self._goes_ahead = N_STEPS_EVICTED if self._goes_ahead else 1, False
        if self.memory.reserve_all([sequence for sequence in self._running if sequence.phase is DECODE]):
            return
        for sequence in list(self._running):
            while sequence.phase is DECODE and not self.memory.reserve(sequence, n_steps):
                self._preempt(gives_way(self._running), is_lost=self.memory.offload is None)

    # --- who follows another ------------------------------------------------------------------------------------------

    @property
    def n_waiting(self) -> int:
        """Sequences in the queue, and those that follow another's prompt."""
        return len(self._queue) + len(self._followers)

    def _waiting(self) -> Iterator[Sequence]:
        return itertools.chain(self._queue, self._followers)

    def _behind(self, key: str, priority: int) -> Behind:
        behind = super()._behind(key, priority)
        for sequence in self._followers:
            if sequence.spec.priority > priority:
                own_work = sequence.work if sequence.account.key == key else NO_WORK
                behind = Behind(behind.n_waiting + 1, behind.work + sequence.work, behind.own_work + own_work)
        return behind

    def _follows(self, sequence: Sequence) -> bool:
        """Set a sequence aside that has only to wait for what another computes already; those behind it are not held up."""
        if not self.memory.limits.shares_live or not sequence.may_share or len(self._running) >= self._n_places():
            return False
        running = self._trials.companions(sequence, self._running)  # others' turns may be long in coming
        leader = self._followers.leader_for(sequence, running, self.memory.n_known(sequence), n_least=self.memory.limits.n_copied_least)
        if leader is None:
            return False
        self._queue.set_aside(sequence)
        self._weigh(sequence, self._followers.n_common(sequence))
        sequence.timeline.note(self._now, "following")
        if self._choice is not None and sequence.admitted_at is None and sequence.n_followed == 1:
            self._choice.came(sequence.n_prompt, self._followers.n_common(sequence), self._n_crowd())
        if sequence.order < leader.order:
            self._rank(leader, sequence.order)
        return True

    def _release_followers(self) -> None:
        released = self._followers.take_released()
        for one in released:
            self._weigh(one.sequence, one.n_computed or self.memory.n_known(one.sequence))
            self._queue.bring_back(one.sequence)
        for leader in dict.fromkeys(one.leader for one in released):
            self._rank_anew(leader)

    def _weigh(self, sequence: Sequence, n_known: int) -> None:
        """Count what one that is set aside will probably cost if so many of its tokens are there by then."""
        self._queue.reweigh(sequence, self._work_left(sequence, n_known))

    def _work_left(self, sequence: Sequence, n_known: int) -> Work:
        """What is still to be done for one that waits, of whose tokens so many are known: who comes behind it waits for no more.

        However long an answer is already, what is left of it is guessed as of a new one, as that of those who run is.
        """
        return self._service.work(max(len(sequence.tokens) - n_known, 1), sequence.n_max - len(sequence.tokens))

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

    # --- moves between phases -----------------------------------------------------------------------------------------

    def _preempt(self, sequence: Sequence, *, keep: bool = True, is_lost: bool = False) -> None:
        """Take back what a running sequence holds; it waits, keeps its tokens and its rank.

        What it has computed is cached until the cells are wanted; without `keep`, or then, it is computed again. With `is_lost` that is
        what those behind it wait for: the cells are wanted now, and no host keeps them, or the model has none any more.
        """
        self._free(sequence, keep=keep, comes_back=True)
        sequence.order = sequence.own_order
        sequence.move(Phase.WAITING)
        sequence.n_preempted += 1
        sequence.timeline.note(self._now, "preempted", n_generated=sequence.n_generated)
        self.totals.n_preempted += 1
        sequence.work = self._work_left(sequence, 0 if is_lost else self.memory.n_known(sequence))
        self._queue.add(sequence)

    def _end(self, sequence: Sequence, *, keep: bool = True) -> None:
        if sequence.phase is not Phase.WAITING:
            self._n_live_now = self._n_live_max
        super()._end(sequence, keep=keep)
        if self._choice is not None:
            self._choice.ended(len(sequence.tokens), sequence.n_max)
        if self._trials.is_any_suspect:
            self._trials.acquit(sequence)

    def _wait_no_more(self, sequence: Sequence) -> None:
        if sequence not in self._followers:
            super()._wait_no_more(sequence)
            return
        leader = self._followers.remove(sequence)
        self._queue.remove_aside(sequence)
        self.memory.ends_waiting(sequence)
        if leader.order == sequence.order:  # which it had lent; all followers are gone through then, and thousands may end at once
            self._rank_anew(leader)


def _are_drawn_alike(sequences: Seq[Sequence]) -> bool:
    """Whether it is known before the next tokens are read who draws those after them: the model all of them, or none."""
    if all(sequence.sampler.draw_by_model() is not None and not sequence.transcript.may_be_due for sequence in sequences):
        return True
    return all(sequence.sampler.never_draws_by_model for sequence in sequences)


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
