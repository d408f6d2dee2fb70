"""Measures what a model's steps cost on this machine: some steps of chosen sizes, within bounded time, after which all slots are empty."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Final

import numpy as np

from cllm.backend import Batch, KvLayout, LaysOut, OnProgress, StepModel
from cllm.engine.cost.curve import DEFAULT_CURVE, Curve, Points
from cllm.engine.cost.model import N_TOGETHER, WALKED
from cllm.errors import LoadAborted, LoadFailed
from cllm.threadtimes import ThreadTimes, cpu_share, own_times

# After the first step, after which no measurement begins, but for the two sizes that every curve needs. A slow model gets so many of its
# steps of 16 rows, up to three times as long: two slow cores, 0.17 s for such a step without outputs, had their time spent before it was
# known what cells cost and what they would gain apart, so that they never lay apart, and 16 at once had 0.94 of llama-server's tokens/s.
SECONDS_MAX: Final = 4.0
N_STEPS_SLOW, SLOW_MAX = 60, 3.0
SHARE_ROWS, SHARE_OUTPUTS = 0.5, 0.75  # of that time, when each part is over
ROWS: Final = (1, 16, 8, 64, 4, 2, 32, 12, 24, 128, 6, 3, 48, 256, 15, 512, 20, 40, 96)  # the most telling first
OUTPUTS: Final = (1, 16, 8, 4, 64, 32, 2, 12, 24, 48, 128)
N_ROWS_NEEDED: Final = 2  # sizes that are measured however long it takes
ROWS_BEYOND: Final = (64, 256)  # that a slow model gets, too, one after the other, where
FLAT: Final = 0.5  # of what its rows cost in the mean is all that one more takes
N_REPEATS, REPEATS_S = 7, 0.05  # a size is measured so often, or as often as goes into this time, but twice at least
N_CELLS_SAVED: Final = 128  # of the slot whose copies fill the cells
FIXED_MOST: Final = 0.999  # of a state: where every state is as large as another, a cell's price is not to be nothing
N_CELLS_FULL: Final = 4096  # in use when their cost is measured, if there are twice as many
N_COPIES_LEAST: Final = 4
N_SLOTS_MEASURED: Final = 8  # that generate when it is measured what it gains if their cells lie apart
N_CELLS_PART: Final = 256  # llama.cpp rounds parts to so many
APART_S_MAX: Final = 3.0  # that may take, longer for a slow model likewise: without it the cells would never lie apart
N_ROUNDS_APART, N_REPEATS_APART = 2, 3  # in turns, and steps of each: in the time of a few steps a shared machine changes by more than this
GAIN_LEAST: Final = 0.02  # of a step; less is noise
HELD_UP: Final = 2.0  # times as long as it needs by its own numbers: whoever is short of time then has been disturbed
# Whose threads wait for cores so much of the time that they have some, and of all the time, do so in every step, of which then the least is
# too long as well: with a barrier after each of the model's operations two busy processes made 636 ms of a step of 0.2. Unless they have
# nearly all cores themselves: of more threads than cores some always wait.
WAITED_MOST, WAITED_LEAST, OWN_LEAST = 0.3, 0.2, 0.8
N_ROWS_MANY: Final = 16  # of the step that tells, beside one of a single row, what a cell costs for each row
ATTENDING: Final = (N_ROWS_MANY, 1, N_TOGETHER)  # rows of one sequence whose attention is measured, as long as there is time
STEADY, STEADY_S = 2.0, 1e-3  # times as long or as short as before, and by so many seconds, is a step of another machine
N_DEEP: Final = 3  # pairs of steps of so many rows, in a slot that has cells and in an empty one
ATTENDING_GUESS: Final = 1.5  # times as long as the longest of those that were measured takes a tile, where time was short
DEEP_LEAST: Final = 0.01  # of such a step is what the slot's cells cost at least; less is noise
Clock = Callable[[], float]
Times = Callable[[], ThreadTimes]


def measure(model: StepModel, on_progress: OnProgress, clock: Clock, times: Times = own_times) -> Curve:
    """Measure `model`, all of whose slots are empty, computing in this process, of which `times` tells; blocks.

    Raises: LoadAborted when `on_progress` says so · what the model's calls raise. The slots are empty then too, unless it died.
    """
    return _Measurement(model, on_progress, clock, times).curve()


class _Measurement:
    def __init__(self, model: StepModel, on_progress: OnProgress, clock: Clock, times: Times) -> None:
        self._model = model
        self._on_progress = on_progress
        self._clock = clock
        self._times = times
        self._batch = Batch(model.n_rows_max)
        self._began_at = clock()
        self._needed_s = 0.0  # of the time since, by the least that each step took
        self._is_cut_short = False
        self._used: set[int] = set()  # slots that are not empty
        self._n_ctx = min(model.n_cells_slot, model.info.n_ctx_train)  # positions of a slot: more are asked for by no request either
        self._rows_s: dict[int, float] = {}
        self._n_deep = 0  # cells of slot 0, where it is not empty
        is_able = isinstance(model, LaysOut) and model.layouts >= {KvLayout.UNIFIED, KvLayout.STREAMS}
        is_pool = model.capabilities.kv_layout is KvLayout.UNIFIED  # else they lie apart already, and are to go on so
        self._can_lie_apart = is_able and is_pool and model.capabilities.can_save
        self._slow = 1.0  # times as long as usual all of it may take
        self._told = 0.0

    def curve(self) -> Curve:
        try:
            self._step(1, 1)  # the first one finds everything cold, maybe its file still on the disk
            self._began_at, before = self._clock(), self._times()
            self._measure_rows()
            outputs = self._measure_outputs()
            cell_s, row_cell_s, attended, moves = self._measure_cells()
            apart_gain_cell_s = self._measure_apart(WALKED * min(seconds / n for n, seconds in attended))
            self._is_cut_short |= self._lacked_cores(before) or self._has_changed()
        finally:
            self._empty()
        return Curve(
            rows=sorted(self._rows_s.items()),
            outputs=outputs,
            cell_s=cell_s,
            row_cell_s=row_cell_s,
            attended=attended,
            **moves,
            apart_gain_cell_s=apart_gain_cell_s,
            is_cut_short=self._is_cut_short,
        )

    def _lacked_cores(self, before: ThreadTimes) -> bool:
        """Whether others had the cores that the model would have computed on since `before`; threads wait for a new quota, too."""
        seconds, now = self._clock() - self._began_at, self._times()
        cpu_s, waiting_s = now.cpu_s - before.cpu_s, now.waiting_s - before.waiting_s
        return waiting_s > max(WAITED_MOST * cpu_s, WAITED_LEAST * seconds) and cpu_s <= OWN_LEAST * cpu_share() * seconds

    def _has_changed(self) -> bool:
        """Whether the machine is another than it was at the beginning: what was measured late was compared with what was early."""
        then_s, now_s = self._rows_s[1], self._least_s(1, 0)
        return abs(now_s - then_s) > STEADY_S and not then_s / STEADY <= now_s <= STEADY * then_s

    # --- the parts ----------------------------------------------------------------------------------------------------

    def _measure_rows(self) -> None:
        n_max = min(self._model.n_rows_max, self._n_ctx)
        for i, n in enumerate(n for n in ROWS if n <= n_max):
            if i < N_ROWS_NEEDED or self._has_time(SHARE_ROWS, self._expected_s(n)):
                self._rows_s[n] = self._least_s(n, 0)
            if n == N_ROWS_MANY:
                self._slow = min(max(N_STEPS_SLOW * self._rows_s[n] / SECONDS_MAX, 1.0), SLOW_MAX)
        for n in ROWS_BEYOND:
            if n > n_max or (n > max(self._rows_s) and not self._goes_on_flat(n)):
                break

    def _goes_on_flat(self, n: int) -> bool:
        """Where more rows hardly take longer than the most for which there was time, measure `n`, too; return whether that still holds.

        All that is larger would be taken to cost as much for each row as the largest that is known, and never be tried: of a model whose
        weights come from a disk or go to a GPU for each step, prompts went 16 rows at a time, at a tenth of the speed in simulated time.
        """
        n_last = max(self._rows_s)
        n_before = max(other for other in self._rows_s if 2 * other <= n_last)  # not the next: a tile of rows may take as long as one
        last_s = self._rows_s[n_last]
        row_s = max(last_s - self._rows_s[n_before], 0.0) / (n_last - n_before)
        expected_s = last_s + (n - n_last) * row_s
        if row_s > FLAT * last_s / n_last or 2 * expected_s > SLOW_MAX * SECONDS_MAX:
            return False
        seconds = [self._step(n, 0)]
        is_flat = seconds[0] <= STEADY * expected_s
        if is_flat:  # else one is enough: it takes much longer
            seconds.append(self._step(n, 0))
        self._tell()
        self._rows_s[n] = min(seconds)
        self._needed_s += len(seconds) * min(seconds)
        return is_flat

    def _measure_outputs(self) -> Points:
        """What outputs add: the same step with and without them, some time apart: see `_has_changed`."""
        added: dict[int, float] = {}
        for n in OUTPUTS:
            if n > min(self._model.n_slots, self._model.n_rows_max, self._n_ctx):  # without outputs, they are all in one slot
                continue
            if not added or self._has_time(SHARE_OUTPUTS, 2 * self._expected_s(n)):
                bare_s = self._rows_s[n] if n in self._rows_s else self._least_s(n, 0)
                added[n] = max(self._least_s(n, n) - bare_s, 0.0)
        return tuple(sorted(added.items()))

    def _measure_cells(self) -> tuple[float, float, Points, dict[str, float]]:
        """What cells cost that are only there, by filling them with copies of one slot; what those cost that rows see; what copies cost.

        Returns seconds for each cell, in a step, in a step for each row, and for so many rows that see it; and a curve's fields of moves.
        """
        model = self._model
        n_cells = min(N_CELLS_SAVED, self._n_ctx // 2, model.n_rows_max)
        n_copies = min(N_CELLS_FULL, model.n_cells // 2) // max(n_cells, 1)
        n_copies = min(n_copies, model.n_slots - 2)
        is_large = n_cells >= N_ROWS_MANY and n_copies >= N_COPIES_LEAST
        if not model.capabilities.can_save or not is_large or not self._has_time(1.0, self._expected_s(n_cells) / 2):
            return *self._guessed_cells_s(), {}
        self._fill(0, n_cells)
        state, save_s = self._save()
        fixed = 0.0 if model.capabilities.can_trim else self._fixed_share(n_cells, len(state))
        attended = self._measure_attended(n_cells, n_kept=n_cells * (n_copies - 1) + N_ROWS_MANY)
        # A few take no time beside what was measured before, and what a copy costs is not guessed without one.
        restores_s = [self._restore(slot, state) for slot in range(1, n_copies) if slot < N_COPIES_LEAST or self._has_time(1.0, 0.0)]
        n_full = self._n_deep + n_cells * len(restores_s)
        free = len(restores_s) + 1
        full_s = [self._least_s(n, 0, first_slot=free) for n in (1, N_ROWS_MANY)]
        self._empty()
        bare_s = [self._least_s(n, 0, first_slot=free) for n in (1, N_ROWS_MANY)]
        row_cell_s = max((full_s[1] - bare_s[1]) - (full_s[0] - bare_s[0]), 0.0) / (N_ROWS_MANY - 1) / n_full
        cell_s = max((full_s[0] - bare_s[0]) / n_full - row_cell_s, 0.0)
        if not cell_s + row_cell_s:  # lost in the noise
            cell_s, row_cell_s, _ = self._guessed_cells_s()
        restore_s = median(restores_s)
        moves = {
            "save_cell_s": (1 - fixed) * save_s / n_cells,
            "restore_cell_s": (1 - fixed) * restore_s / n_cells,
            "save_fixed_s": fixed * save_s,
            "restore_fixed_s": fixed * restore_s,
        }
        return cell_s, row_cell_s, attended, moves

    def _fixed_share(self, n_cells: int, n_bytes: int) -> float:
        """Of the `n_bytes` that a state of `n_cells` cells has, how much those have that are shorter, too. Time goes by the bytes: what so
        short a state takes by itself would be lost in the noise.
        """
        self._fill(1, 1)
        n_bytes_short = len(self._model.save(1))
        self._model.drop(1)
        self._used.discard(1)
        cell_n_bytes = max(n_bytes - n_bytes_short, 0) / max(n_cells - 1, 1)
        return min(max(1 - n_cells * cell_n_bytes / n_bytes, 0.0), FIXED_MOST) if n_bytes else 0.0

    def _measure_attended(self, n_cells: int, *, n_kept: int) -> Points:
        """What rows of one sequence take together for each cell before them: steps in slot 0, of `n_cells` cells, beside an empty one's.

        Of one pool `n_kept` cells are left, for what is measured after it.
        """
        found: dict[int, float] = {}
        self._n_deep = n_cells
        for n in ATTENDING:
            has_time = not found or self._has_time(1.0, N_DEEP * self._expected_s(n))
            n_then = self._n_deep + N_DEEP * n
            is_pool = self._model.n_cells_slot == self._model.n_cells
            has_room = n_then <= self._n_ctx and n_then + (n_kept if is_pool else 0) <= self._model.n_cells_slot
            if has_time and has_room and n <= self._model.n_rows_max:
                found[n] = median(self._deep_pair_s(n) for _ in range(N_DEEP))
                self._tell()
        if N_TOGETHER not in found:
            found[N_TOGETHER] = ATTENDING_GUESS * max(found.values())
        return tuple(sorted(found.items()))

    def _deep_pair_s(self, n: int) -> float:
        """Seconds for each cell of slot 0 that a step of `n` rows takes longer there than in an empty slot; they stay."""
        batch, depth = self._batch, self._n_deep
        batch.n_rows, batch.n_outputs = n, 0
        batch.tokens[:n] = np.arange(n) % self._model.vocabulary.n_tokens
        batch.positions[:n], batch.slots[:n], batch.outputs[:n] = depth + np.arange(n), 0, 0
        began_at = self._clock()
        self._model.step(batch)
        deep_s = self._clock() - began_at
        self._n_deep += n
        return max(deep_s - self._step(n, 0, first_slot=1), DEEP_LEAST * deep_s) / depth

    def _measure_apart(self, least_s: float) -> float | None:
        """What a generating row gains for each cell of others if they lie apart; None where they cannot, or to measure it takes too long.

        It gains `least_s` where that is worth anything: so few sequences of a few cells may lose it in noise, and more of more do not.
        """
        model = self._model
        if not isinstance(model, LaysOut) or not self._can_lie_apart:
            return None
        n_slots = min(N_SLOTS_MEASURED, model.n_cells // N_CELLS_PART, model.n_rows_max)
        n_cells = min(N_CELLS_SAVED, model.n_rows_max, self._n_ctx - N_REPEATS_APART)
        most_s = self._slow * APART_S_MAX
        if n_slots < 2 or n_cells < 1:
            return None
        if self._expected_s(n_cells) + N_ROUNDS_APART * N_REPEATS_APART * self._expected_s(n_slots) > most_s:
            return None
        states: dict[KvLayout, bytes] = {}
        pooled_s, apart_s = math.inf, math.inf
        began_at = self._clock()
        for number in range(N_ROUNDS_APART):
            if number and self._clock() - began_at > most_s:  # all rounds would have gone into it: something has the machine
                self._is_cut_short = True
                break
            pooled_s = min(pooled_s, self._generating_s(n_slots, n_cells, states))
            try:
                model.lay_out(KvLayout.STREAMS, n_slots)
            except LoadFailed:  # there is no memory for it, nor will there be
                return None
            try:
                if model.n_slots < n_slots:  # parts would be too small
                    n_slots, pooled_s = model.n_slots, math.inf
                apart_s = min(apart_s, self._generating_s(n_slots, n_cells, states))
            finally:
                model.lay_out(KvLayout.UNIFIED, n_slots)
        n_walked = n_slots * (n_slots - 1) * n_cells  # by all rows together in a pool, and not apart
        gain_s = max(pooled_s - apart_s, n_walked * least_s)
        return gain_s / n_walked if gain_s > GAIN_LEAST * apart_s else 0.0

    def _generating_s(self, n_slots: int, n_cells: int, states: dict[KvLayout, bytes]) -> float:
        """Seconds of a step in which so many slots of so many cells generate. `states` has what one of them holds, by layout."""
        layout = self._model.capabilities.kv_layout
        if layout not in states:
            self._fill(0, n_cells)
            states[layout] = self._model.save(0)
            self._empty()
        for slot in range(n_slots):
            self._restore(slot, states[layout])
        batch, seconds = self._batch, []
        for number in range(N_REPEATS_APART):
            batch.n_rows = batch.n_outputs = n_slots
            batch.tokens[:n_slots], batch.slots[:n_slots], batch.outputs[:n_slots] = number, np.arange(n_slots), 1
            batch.positions[:n_slots] = n_cells + number
            began_at = self._clock()
            self._model.step(batch)
            seconds.append(self._clock() - began_at)
        self._empty()
        self._tell()
        return min(seconds)

    def _guessed_cells_s(self) -> tuple[float, float, Points]:
        """What cells usually cost a model of this speed: at a price of nothing they would be kept for ever, and every step would pay."""
        share = self._rows_s[1] / DEFAULT_CURVE.rows[0][1]
        attended = tuple((n, share * seconds) for n, seconds in DEFAULT_CURVE.attended)
        return share * DEFAULT_CURVE.cell_s, share * DEFAULT_CURVE.row_cell_s, attended

    # --- one size -----------------------------------------------------------------------------------------------------

    def _least_s(self, n_rows: int, n_outputs: int, *, first_slot: int = 0) -> float:
        """Seconds of a step; all outputs in slots of their own, all other rows in one."""
        seconds: list[float] = []
        while len(seconds) < 2 or (len(seconds) < N_REPEATS and sum(seconds) < REPEATS_S):
            seconds.append(self._step(n_rows, n_outputs, first_slot=first_slot))
        self._tell()
        least_s = min(seconds)  # what disturbs a step makes it longer, never shorter
        self._needed_s += len(seconds) * least_s
        return least_s

    def _step(self, n_rows: int, n_outputs: int, *, first_slot: int = 0) -> float:
        """Make a step in empty slots and empty them again; return its seconds."""
        batch = self._batch
        batch.n_rows, batch.n_outputs = n_rows, n_outputs
        batch.tokens[:n_rows] = np.arange(n_rows) % self._model.vocabulary.n_tokens
        batch.outputs[:n_rows] = n_outputs > 0
        batch.positions[:n_rows] = 0 if n_outputs else np.arange(n_rows)
        batch.slots[:n_rows] = first_slot + np.arange(n_rows) if n_outputs else first_slot
        slots = range(first_slot, first_slot + max(n_outputs, 1))
        self._used.update(slots)
        began_at = self._clock()
        self._model.step(batch)
        seconds = self._clock() - began_at
        for slot in slots:
            self._model.drop(slot)
        self._used.difference_update(slots)
        return max(seconds, 1e-9)

    def _fill(self, slot: int, n_cells: int) -> None:
        batch = self._batch
        batch.n_rows, batch.n_outputs = n_cells, 0
        batch.tokens[:n_cells] = np.arange(n_cells) % self._model.vocabulary.n_tokens
        batch.positions[:n_cells], batch.slots[:n_cells], batch.outputs[:n_cells] = np.arange(n_cells), slot, 0
        self._used.add(slot)
        self._model.step(batch)

    def _save(self) -> tuple[bytes, float]:
        """Save slot 0; return its state, and the least seconds: the first copy comes into memory that was never touched."""
        seconds: list[float] = []
        while len(seconds) < 2 or (len(seconds) < N_REPEATS and sum(seconds) < REPEATS_S):
            began_at = self._clock()
            state = self._model.save(0)
            seconds.append(self._clock() - began_at)
        return state, min(seconds)

    def _restore(self, slot: int, state: bytes) -> float:
        self._used.add(slot)
        began_at = self._clock()
        self._model.restore(slot, state)
        return self._clock() - began_at

    def _empty(self) -> None:
        for slot in self._used:
            self._model.drop(slot)
        self._used.clear()

    # --- time ---------------------------------------------------------------------------------------------------------

    def _expected_s(self, n_rows: int) -> float:
        """Seconds to measure a size, if a row costs what it cost in the nearest size so far."""
        if not self._rows_s:
            return 0.0
        nearest = min(self._rows_s, key=lambda n: abs(n - n_rows))
        most_s = min((seconds for n, seconds in self._rows_s.items() if n >= n_rows), default=math.inf)  # of more rows
        return 2 * min(self._rows_s[nearest] * max(n_rows / nearest, 1.0), most_s)

    def _has_time(self, share: float, seconds: float) -> bool:
        limit_s = share * self._slow * SECONDS_MAX
        has_time = self._clock() - self._began_at + seconds <= limit_s
        if not has_time and HELD_UP * self._needed_s + seconds <= limit_s:
            self._is_cut_short = True
        return has_time

    def _tell(self) -> None:
        seconds_max = self._slow * (SECONDS_MAX + (APART_S_MAX if self._can_lie_apart else 0.0))
        self._told = max(self._told, min((self._clock() - self._began_at) / seconds_max, 1.0))  # it may turn out to be slow
        if not self._on_progress(self._told):
            raise LoadAborted("the load was asked to stop")
