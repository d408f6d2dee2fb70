"""Forms the batch of a step: a row for each decoding sequence, and prompts' rows as far as the row budget goes.

Answers and a prompt much deeper than they are have steps of their own, by turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial
from types import MappingProxyType

import attrs

from cllm.engine.batch.budget import RowBudget
from cllm.engine.batch.columns import Columns
from cllm.engine.batch.fillers import N_STEPS_KEPT, Fillers
from cllm.engine.batch.passes import consecutive, passes
from cllm.engine.batch.plan import Move, Plan, Unsettled
from cllm.engine.batch.scoring import ScoringRows
from cllm.engine.cost.model import N_TOGETHER
from cllm.engine.events import Event
from cllm.engine.sequence import DECODE, PREFILL, Sequence
from cllm.engine.waiting.fairness import Account

LATE = 32  # times as many rows of prompts as one owes: if so many were computed since it was admitted, it goes before those of other keys
N_LATE_LEAST = 64  # rows that it counts as owing at least, since what is short goes first in any case
ALIKE = 2.0  # times what another owes is the most that a prompt owes where they are alike
REST = 0.4  # of the room for prompts' rows, which is too little for a pass of its own
# Where a prompt has so many cells more than any answer, these are computed in steps of their own. Of slots with cells of their own a pass
# of llama.cpp walks as many cells of each as the deepest has: seven rows and nine of a prompt with 2,048 cells took 0.43 s in one step, and
# 0.07 and 0.27 in two. In a pool it is 0.30 s in one, 0.08 and 0.27 in two, but what answers take without the prompt is told by no step
# then: it was believed to be half as much again, and their gaps were as much longer. A prompt that owed less than a tile when it came is
# through in a few steps, and would wait for twice as many.
N_DEEPER = 512
NO_MEETINGS: Mapping[Sequence, int] = MappingProxyType({})


@attrs.frozen
class Who:
    """Those who may have rows in a step."""

    decoding: list[Sequence]
    put_off: Seq[Sequence]  # who generate in the next step, while this one is a prompt's; then nobody is `decoding`
    beside: Seq[Sequence]  # the same if those who have rows in this one are on trial, however deep they are
    prompts: list[Sequence]  # by order of service
    ranked: list[Sequence]  # the same by who goes first

    @property
    def answers(self) -> Seq[Sequence]:
        """Who generate in this step, or wait for its end."""
        return self.decoding or self.put_off or self.beside


@attrs.frozen
class Riding:
    """Prompts of which one row goes in the passes of the decode rows."""

    riders: Seq[Sequence] = ()
    singles: Seq[int] = ()  # the passes that the decode rows and those come to
    n_fillers: int = 0  # among these rows


@attrs.frozen
class Load:
    """What a step's room for prompts depends on beside who has rows in it."""

    n_running: int
    n_cells: int  # in use
    n_owed: int  # rows, by all prompts
    n_attended: int  # cells, by the rows of answers
    n_keys: int  # that have asked of late
    places_taken: bool  # nobody generates, and no more could run


@attrs.define(eq=False)
class Filling:
    """What a step has so far beside its answers' rows."""

    outputs: list[Sequence]  # whose next token is drawn: those who generate, then the prompts that end in the step
    prefilling: list[tuple[Sequence, int]] = attrs.field(factory=list)
    scoring: ScoringRows = attrs.field(factory=ScoringRows)


NOBODY_RIDES = Riding()


class BatchFormer:
    """Fills the columns of a batch anew for every step."""

    def __init__(self, budget: RowBudget, *, n_rows_max: int, apart: bool, fillers: Fillers | None = None) -> None:
        self._columns = Columns(n_rows_max)
        self._columns_ahead = Columns(n_rows_max)  # two steps that follow on each other have one each
        self._budget = budget
        self._apart = apart
        self._fillers = fillers  # None: gaps between slots stay
        self._singles_known: dict[tuple[int, ...], tuple[Seq[int], int]] = {}
        self._n_asked = 0
        self._n_turns = 0  # of answers, before the next one of a prompt that is much deeper than they are
        self.n_room = 0  # rows of prompts that a step had room for, when there last were any; 0: there were none yet

    def form(
        self,
        running: list[Sequence],
        moves: list[Move],
        events: list[Event],
        n_cells: int,
        *,
        beside: Seq[Sequence] = (),
        n_prefilled: int = 0,
        n_keys: int = 1,
        meetings: Mapping[Sequence, int] = NO_MEETINGS,
        places_taken: bool = False,
    ) -> Plan:
        """Return the step of `running`, who hold the cells of their rows, after `moves`; `n_cells` cells are in use.

        While `running` are on trial, those `beside` generate in steps of their own and wait for this one, in which prompts have the room
        that they would have beside these. Of prompts, `n_prefilled` rows have ever been computed, and `n_keys` have asked of late. Prompts
        in `meetings` stop after so many tokens, where others go on with them. `places_taken` when nobody generates and no more could run.
        """
        who = self._who(running, beside, n_prefilled)
        self._columns.begin(who.decoding)
        n_attended = sum([sequence.n_computed for sequence in who.answers])
        attended = [] if who.put_off else [(1, n_attended)]
        filling = Filling(who.decoding)
        if who.prompts:
            n_owed_all = sum([len(sequence.tokens) - sequence.n_computed for sequence in who.prompts])
            load = Load(len(running) + len(beside), n_cells, n_owed_all, n_attended, n_keys, places_taken)
            attended = self._with_prompts(who, running, load, meetings, filling)
        sizes: tuple[int, ...] = ()
        fillers: Seq[tuple[int, int]] = ()
        if self._apart and self._columns.batch.n_rows > 1:
            sizes, fillers = self._by_slot(who.decoding, filling)
            attended += [(1, sum(position for _, position in fillers))] if fillers else []
        return Plan(
            moves=moves,
            batch=self._columns.batch,
            decoding=who.decoding,
            prefilling=filling.prefilling,
            outputs=filling.outputs,
            samplers=[sequence.sampler for sequence in filling.outputs],
            events=events,
            scorings=filling.scoring.scorings,
            fillers=fillers,
            n_cells=n_cells,
            attended=attended,
            passes=sizes,
        )

    def _with_prompts(
        self, who: Who, running: list[Sequence], load: Load, meetings: Mapping[Sequence, int], filling: Filling
    ) -> list[tuple[int, int]]:
        """Add the prompts' rows, as many as there is room for; return what all rows attend to."""
        first = who.ranked[0]
        riding = self._riding(who, first) if self._apart else NOBODY_RIDES
        n_room = self._n_room_after(who, load) if who.put_off else self._n_room_beside(who, load, riding)
        if who.decoding and _is_light(first.account, running):
            n_room = max(n_room, self._n_room_light(who, load, riding))
        in_order = who.ranked if load.n_owed > n_room else who.prompts
        filling.outputs = who.decoding.copy()
        self._add_prompts(in_order, n_room, first.n_computed, riding.riders, meetings, filling)
        n_alone = sum([sequence.n_computed for sequence, n in filling.prefilling if n == 1])
        n_alone += load.n_attended if who.decoding else 0
        return [(1, n_alone), *((n, sequence.n_computed + n // 2) for sequence, n in filling.prefilling if n > 1)]

    def _by_slot(self, decoding: list[Sequence], filling: Filling) -> tuple[tuple[int, ...], Seq[tuple[int, int]]]:
        """Each slot has cells of its own: put the rows in the slots' order, and fill gaps between these where that pays. Return the passes
        that llama.cpp makes of them, and slots and positions of the fillers.
        """
        rows = sorted([(sequence.slot, 1) for sequence in decoding] + [(sequence.slot, n) for sequence, n in filling.prefilling])
        sizes = passes(rows)
        if filling.scoring.scorings:  # those name their outputs by number
            return sizes, ()
        sizes, fillers = self._fill(rows, sizes)
        self._columns.sort_by_slot()
        filling.outputs = sorted(filling.outputs, key=_slot)
        return sizes, fillers

    def follow(self, plan: Plan) -> Plan:
        """Return the step after `plan`'s, which runs and has rows of answers alone: the same rows, each a token on."""
        columns = self._columns_ahead if plan.batch is self._columns.batch else self._columns
        columns.go_on(plan.batch)
        self._n_turns = max(self._n_turns - 1, 0)
        n_decoding = len(plan.decoding)
        (_, n_attended), *others = plan.attended
        return Plan(
            moves=[],
            batch=columns.batch,
            decoding=plan.decoding,
            prefilling=[],
            outputs=plan.outputs,
            samplers=plan.samplers,
            events=[],
            fillers=plan.fillers,
            n_cells=plan.n_cells + n_decoding,
            attended=[(1, n_attended + n_decoding), *others],
            passes=plan.passes,
            unsettled=Unsettled([len(sequence.tokens) + 1 for sequence in plan.outputs]),
        )

    def _who(self, running: list[Sequence], beside: Seq[Sequence], n_prefilled: int) -> Who:
        """Answers and prompts together, or by turns where the prompt that goes first is much deeper than all answers."""
        decoding = [sequence for sequence in running if sequence.phase is DECODE]
        put_off: Seq[Sequence] = []
        prompts: list[Sequence] = []
        ranked: list[Sequence] = []
        if len(running) > len(decoding):
            prompts = [sequence for sequence in running if sequence.phase is PREFILL]
            ranked = sorted(prompts, key=partial(_prefill_rank, n_prefilled))
            if answers := decoding or beside:
                n_deep = N_DEEPER + max([sequence.n_computed for sequence in answers])
                if self._is_kept_out(ranked[0], len(answers), n_deep) and not _is_light(ranked[0].account, running):
                    if decoding and self._n_turns:
                        prompts = []
                    else:
                        decoding, put_off = [], answers
                elif self._apart:
                    ranked = ranked[:1] + [sequence for sequence in ranked[1:] if not self._is_kept_out(sequence, len(answers), n_deep)]
                    prompts = prompts if len(ranked) == len(prompts) else ranked
        if decoding:
            self._n_turns = max(self._n_turns - 1, 0)  # whoever else is in a step of theirs; one on trial may have a step in between
        return Who(decoding, put_off, beside, prompts, ranked)

    def _n_room_after(self, who: Who, load: Load) -> int:
        """Rows of prompts that a step of theirs has room for, after which answers have some steps."""
        n_rows, n_turns = self._budget.n_rows_between(
            len(who.put_off),
            load.n_running,
            load.n_cells,
            n_owed=load.n_owed,
            n_attended=load.n_attended,
            depth=who.ranked[0].n_computed,
        )
        if not who.beside:  # who have the next step in any case, while it may be the turn of a prompt that nobody suspects
            self._n_turns = n_turns
        self.n_room = max(n_rows, 1)
        return self.n_room

    def _n_room_beside(self, who: Who, load: Load, riding: Riding) -> int:
        """Rows of prompts that a step has room for beside those of answers."""
        first, n_decoding = who.ranked[0], len(who.answers)
        n_rows = self._budget.n_rows(
            n_decoding,
            load.n_running,
            load.n_cells,
            n_owed=load.n_owed,
            n_attended=load.n_attended,
            depth=first.n_computed,
            n_shared=first.n_shared,
            length=len(first.tokens),
            singles=riding.singles,
            n_fillers=riding.n_fillers,
            n_keys=load.n_keys,
            places_taken=load.places_taken,
            are_alike=load.places_taken and _are_alike(who.prompts),
        )
        self.n_room = max(n_rows - n_decoding, 1)
        return self.n_room

    def _n_room_light(self, who: Who, load: Load, riding: Riding) -> int:
        """The same for a key with few places, whose prompt goes first."""
        first, n_decoding = who.ranked[0], len(who.decoding)
        n_rows = self._budget.n_rows_light(
            n_owed(first),
            n_decoding,
            load.n_running,
            load.n_cells,
            n_attended=load.n_attended,
            depth=first.n_computed,
            singles=riding.singles,
            n_fillers=riding.n_fillers,
        )
        return n_rows - n_decoding

    def n_room_alone(self, n_running: int, n_cells: int, owed: Seq[int], n_keys: int, places_taken: bool) -> int:
        """Rows of prompts that a step has room for in which none of `n_running` generates, who owe `owed`; `n_keys` asked of late."""
        return self._budget.n_rows(
            0, n_running, n_cells, n_owed=sum(owed), n_keys=n_keys, places_taken=places_taken, are_alike=owe_alike(owed)
        )

    def _is_kept_out(self, prompt: Sequence, n_decoding: int, n_deep: int) -> bool:
        """Whether a prompt is kept out of the steps of so many answers: it has `n_deep` cells or more, and owed more than a few rows when
        it came. That of a key with few places goes beside answers all the same, when it is first.
        """
        is_deep = prompt.n_computed >= n_deep and len(prompt.tokens) - prompt.n_shared > N_TOGETHER
        return is_deep and self._budget.gains_by_turns(n_decoding, prompt.n_computed)

    def _riding(self, who: Who, first: Sequence) -> Riding:
        """Prompts one row of which goes in the pass of the decode rows, each slot having cells of its own: the first, or all.

        They close the gaps between the slots that decode, each of which is a pass more, and fill the tiles that kernels work in.
        """
        decoding = who.decoding
        if not decoding:
            return Riding((), *self._singles(who.beside, ())) if who.beside else NOBODY_RIDES
        riders = [one for one in who.prompts if one is first or not one.n_unscored]
        bare, n_fillers = self._singles(decoding, (first,))
        if len(riders) > 1:
            filled, n_beside = self._singles(decoding, riders)
            if self._budget.may_fill(filled, bare, len(riders) - 1):
                return Riding(riders, filled, n_beside)
        return Riding((first,), bare, n_fillers)

    def _singles(self, decoding: Seq[Sequence], riders: Seq[Sequence]) -> tuple[Seq[int], int]:
        """The passes over one row of each, and how many fillers are among these."""
        stays = self._fillers is None or any(sequence.n_unscored for sequence in riders)  # as `form` leaves such steps
        key = (stays, *[sequence.slot for sequence in decoding], *[sequence.slot for sequence in riders])
        self._n_asked += 1
        if self._n_asked % N_STEPS_KEPT == 0:  # as choices of fillers stand so long
            self._singles_known.clear()
        known = self._singles_known.get(key)
        if known is None:
            slots = sorted(key[1:])
            added = [] if stays or self._fillers is None else [slot for slot, _ in self._fillers.beside(slots)]
            sizes = [last - first + 1 for first, last in consecutive(sorted(slots + added) if added else slots)]
            known = self._singles_known[key] = sizes, len(added)
        return known

    def _fill(self, rows: list[tuple[int, int]], sizes: tuple[int, ...]) -> tuple[tuple[int, ...], Seq[tuple[int, int]]]:
        """Add fillers to `rows` of slots, which come to passes of `sizes`, if these take less time then; return the passes, and slots and
        positions of the fillers.
        """
        batch = self._columns.batch
        found = [] if self._fillers is None else self._fillers.beside([slot for slot, _ in rows])
        if not found or batch.n_rows + len(found) > len(batch.tokens):
            return sizes, ()
        filled = passes(sorted([*rows, *((slot, 1) for slot, _ in found)]))
        if not self._budget.is_less(filled, sizes):  # prompts whose rows would have gone together are torn apart
            return sizes, ()
        self._columns.fill(found)
        return filled, found

    def _add_prompts(
        self,
        prompts: list[Sequence],
        n_room: int,
        depth: int,
        riders: Seq[Sequence],
        meetings: Mapping[Sequence, int],
        filling: Filling,
    ) -> None:
        """Add `n_room` rows of prompts that are `depth` cells deep, as far as there are so many; fewer of deeper ones.

        One of each of the `riders` comes first. Beside answers, and where each slot has cells of its own, more of a prompt is a pass of its
        own: a small rest of the room is left.
        """
        prefilling, scoring = filling.prefilling, filling.scoring
        n_room -= len(riders)
        n_rest = n_room * REST if riders else 0
        riding, alone = set(riders), []
        for sequence in prompts:
            n_ridden = 1 if sequence in riding else 0
            if prefilling and n_room < n_rest:
                n_room = 0
            if not n_ridden and not n_room:
                continue
            n_left = len(sequence.tokens) - sequence.n_computed
            if not n_room and n_left > 1 and sequence.spec.n_prompt_logprobs is None:  # of a crowd, most are
                alone.append(sequence)
                prefilling.append((sequence, 1))
                continue
            if sequence.n_computed > depth:  # the room is time, of which a row takes more the more there is before it
                n_room, depth = self._budget.deeper(n_room, depth, sequence.n_computed) if n_room else 0, sequence.n_computed
            n_before = meetings.get(sequence, 0) - sequence.n_computed
            n_rows = scoring.cut(sequence, min(n_left if n_before <= 0 else n_before, n_ridden + n_room))
            if not n_rows:
                continue
            self._columns.add(sequence, n_rows, scoring, wants_output=n_rows == n_left)
            prefilling.append((sequence, n_rows))
            if n_rows == n_left:
                filling.outputs.append(sequence)
            n_room -= n_rows - n_ridden
        if alone:
            self._columns.add_one_each(alone)


def _is_light(account: Account, running: Seq[Sequence]) -> bool:
    """Whether a key has at most half of the places for its weight that another has, and was not served much more."""
    others = {sequence.account for sequence in running} - {account}
    return any(2.0 * account.load <= other.load and account.may_pass(other) for other in others)


def _slot(sequence: Sequence) -> int:
    return sequence.slot


def _prefill_rank(n_prefilled: int, sequence: Sequence) -> tuple[int, bool, float, int]:
    """Within a priority a key with fewer places for its weight goes first, then the prompt with the fewest rows left: all wait least.

    Each prompt row that is computed makes the others that are in older by one. So a prompt is overtaken only by ones that were admitted
    before as many rows of others were computed as it has left: a long one waits, but not for ever. Nor does one of a key that has many
    places: it goes first when it has waited inside for many times as much as it owes.
    """
    n_left = len(sequence.tokens) - sequence.n_computed
    is_in_time = n_prefilled - sequence.waits_from <= LATE * max(n_left, N_LATE_LEAST)
    return sequence.order[0], is_in_time, sequence.account.load, sequence.prefill_from + n_left


def goes_before(n_prefilled: int, prompt: Sequence, newcomer: Sequence, n_newcomer: int) -> bool:
    """Whether a prompt that is computed would get its rows before those that a `newcomer` owes, were that let in now."""
    rank = newcomer.order[0], newcomer.account.load
    if (prompt.order[0], prompt.account.load) > rank:
        return False
    if prompt.account is not newcomer.account:  # whose key would have one more
        return True
    begun = n_prefilled if newcomer.admitted_at is None else newcomer.prefill_from
    return _prefill_rank(n_prefilled, prompt) <= (rank[0], True, rank[1], begun + n_newcomer)


def _are_alike(prompts: Seq[Sequence]) -> bool:
    """Whether none of the prompts, if it went first, would begin much earlier than with the others."""
    return len({sequence.order[0] for sequence in prompts}) == 1 and owe_alike([n_owed(sequence) for sequence in prompts])


def owe_alike(owed: Seq[int]) -> bool:
    """Whether no prompt owes much less than another."""
    return max(owed) <= ALIKE * min(owed)


def n_owed(sequence: Sequence) -> int:
    """Rows that a sequence needs before its next token can be drawn. Written out where it is asked for of every prompt in every plan."""
    return len(sequence.tokens) - sequence.n_computed
