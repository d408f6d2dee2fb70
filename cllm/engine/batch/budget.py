"""How many rows a step may have: what makes prompts fast against what makes running answers wait."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from cllm.engine.cost.model import N_TOGETHER, CostModel

# How many times as long as a step of all that run, if they all generated, one with prompts may take; the cells of prompts do not count, if
# that is less. Eight at once with mixed prompts, on a machine with nothing else to do: with 2.6 they had 1.07 times the tokens/s and first
# texts after 0.77 of the time that they had with 2.0, and no longer gaps at p99; with 3.2 and 4.0 gaps alone grew, to 1.4 and 1.9 times. By
# the curve of a slower hour (`python -m benchmarks simulate`) they grow by a quarter from 2.2 to 2.5, and by three quarters from 2.6 on.
PACE = 2.4
# Where several keys ask, whoever asks now and then comes into the middle of another's step, and is to wait two at most.
PACE_KEYS = 2.0
# And what that comes down to between so many cells that a prompt has computed and twice as many: it makes many steps longer, and those who
# wait for them meanwhile have gaps of three of their usual steps at most, also where a step takes a third longer than it should.
PACE_DEEP, N_DEEP = 2.2, 256
# Where prompts are computed in passes of their own, a row costs the same beside answers as by itself: a pass is as small as makes it hardly
# dearer than in the best one. What a step may take at least for that, and at most. The smaller the pieces, the longer prompts wait for each
# other, and the fewer generate meanwhile. With 2.25 and 2.5 a pass of 32 just fitted on one machine, and just not on another, where prompts
# went 16 rows at a time. With 2.75 and 3.0 ten pairs there had 0.93 of the tokens/s of llama-server, which computes them whole, first texts
# at p50 after 1.76 times the time and gaps at p99 0.30 times as long; in simulated time, by four seeds, 0.93, 1.86 and 0.32, and with these
# 0.97, 1.71 and 0.34; with 5.0 0.97, 1.36 and 0.49. On the other machine tokens/s go from 0.94 to 0.97, and gaps at p99 from 0.31 to 0.43.
PRICE_APART = 1.15
PACE_APART, PACE_APART_MAX = 3.75, 4.0
N_DEEP_APART = 1024  # tokens of a prompt, which makes many steps longer; up to twice as many, either comes down to `PACE_DEEP`
PRICE = 1.5  # in any case as long as the smallest step in which a row costs at most so many times what it costs in the best one
# Deep in a prompt that is no longer than what `PACE_DEEP` gives where so many run, and the longer the fewer they are: the price alone gave
# seven gaps of 4.2 steps, while beside one answer so short a step would make the prompt take many times as long as it must.
N_DEEP_MOST = 8
# By turns is better where the answers, if they had as many cells to read as the prompt, took so many times what a pass of one row does: to
# walk by cells costs a quarter of reading them.
WALK = 4.0
# What a prompt's step and one of answers may take together, in steps of these: two steps vary more than one. With 2.2 seven beside a prompt
# of 4,096 tokens had gaps of 2.7 to 4.0 of their usual steps at most, with 2.0 of 2.1 to 3.1, with 1.85 of 2.1 to 2.3.
PACE_TURNS = 1.85
# However long answers take by themselves, `itl_max_s` leaves so much of a step for prompts, or these would go row by row for minutes.
PACE_LEAST = 1.5
# Deep in a prompt rows cost less together: by a curve of two cores, 16,000 cells deep one takes 0.37 s and 16 take 0.95. As many go as make
# one cost at most so many times what it costs at best, even if that takes longer than `itl_max_s`. Row by row, 3,000 tokens beside twelve
# answers took seven times as long in simulated time, and these had 0.73 of the tokens/s, and gaps of 0.72 s at most where they had 0.42.
# If by turns not even one row is done in the time that answers may wait, they wait longer, and have steps by themselves for as long.
PRICE_MOST = 3.0
# What a step may take so that a prompt of a key with few places ends in it, or in one of a few: a key that asks now and then does not wait
# many small steps beside one that floods. No longer than `itl_max_s`, or than the usual step would be without that bound, but for its end.
PACE_LIGHT, N_STEPS_LIGHT = 4.0, 4
# So much longer may it be if the prompt ends in it: a few rows that are left cost a step of their own, and the prompt waits for both. Of 60
# prompts of 32 rows beside a flood, the four slowest had been cut into 27 or 28 rows and the rest, which took 0.38 to 0.48 s in two steps.
PACE_LIGHT_END = 1.25
# When nobody generates, only a newcomer waits for a step's end. If all prompts that are here end in it, they generate together from then
# on, where half of them would let the others wait in small steps: eight that came at once had 1.06 times the tokens/s. Where only one key
# asks it may take so long in any case, and for short prompts until what comes last: no longer than so many steps in which all generate.
# Prompts of 32 tokens take as long as 12 to 26 of those, by seven curves of one machine: with a limit of 24 it was chance whether they went
# in pieces. Who comes meanwhile waits for the step's end: a prompt no shorter than these would be computed after them in any case, while a
# shorter one, another key's and one of a higher priority would not have waited for all of them.
ALONE_S, ALONE_ALL_S = 0.5, 1.0
N_STEPS_ALONE, ALONE_SHORT_S = 48, 6.0
# If they have all places, who comes meanwhile could begin only in the place of one of them. Sixteen at once on two slow cores, whose
# prompts take 4 to 5 s, in four turns: 1.10 times the tokens/s, gaps at p99 0.44 times as long, whole answers 0.81, the last first text
# after 0.64 of the time; the median one, which had been of the first few, after 1.8 times. Thirty-two take 6 to 11 s: where ten
# were borne, and they went in pieces, whole answers took 1.19 times as long at p90 as llama-server's.
# However many steps that is of those in which all generate, if none of the prompts owes much less than another: it would go first and begin
# at once. Of alike ones in pieces, the first few gain no more than the others lose, and all end later: eight next turns of conversations,
# 114 rows each, ended after 2.2 to 19.3 s in pieces, 9.8 in the mean, and after 8.8 s in the turn before, in which they went at once. Such
# turns took as long as 33 to 44 steps of their answers, and more of those that the limit counts. These leave out the cells that answers
# will read: with them, the longer a prompt that is alone, the longer would who comes wait for its step, up to six seconds.
ALONE_FULL_S = 30.0
# Where several keys ask, one that asks now and then finds such a step under way, too, and waits for its end before its own begins: of 60
# waits beside a key that floods, the longest was for one of 0.44 s.
ALONE_KEYS_S = 0.35


class RowBudget:
    """Rows of a step, decode rows included. A decode row always goes, and a row of a prompt too: the budget is what is aimed at. Where
    answers and a prompt have steps of their own, that is so of the two together.
    """

    def __init__(
        self,
        cost: CostModel,
        *,
        n_rows_max: int,
        n_rows_fixed: int | None,
        itl_target_s: float | None,
        itl_max_s: float | None = None,
        apart: bool = False,
    ) -> None:
        self._cost = cost
        self._n_rows_max = n_rows_max
        self._n_rows_fixed = n_rows_fixed
        self._itl_target_s = itl_target_s
        self._itl_max_s = math.inf if itl_max_s is None else itl_max_s
        self._apart = apart  # each slot has cells of its own, see `cllm.engine.batch.passes`

    def n_rows(
        self,
        n_decoding: int,
        n_running: int,
        n_cells: int,
        *,
        n_owed: int = 0,
        n_attended: int = 0,
        depth: int = 0,
        n_shared: int = 0,
        length: int = 0,
        singles: Seq[int] = (),
        n_fillers: int = 0,
        n_keys: int = 1,
        places_taken: bool = False,
        are_alike: bool = False,
    ) -> int:
        """Return the budget of a step of `n_running` sequences, `n_decoding` of which generate, with `n_cells` cells in use.

        The latter have `n_attended` cells before them. Prompts owe `n_owed` rows in all, and the one that is next has `depth` cells, of
        which it found `n_shared` when it was admitted last, of `length` that it will have. At least one of the rows is a prompt's. `n_keys`
        have asked of late; `places_taken` when none generates and no more could run; `are_alike` when no prompt would begin much earlier by
        itself.
        Where each slot has cells of its own, `singles` are the passes of the rows that come alone from a slot: decode rows, some of
        prompts, and `n_fillers`, which are none of the budget's rows.
        """
        if self._n_rows_fixed is not None:
            n_rows = self._n_rows_fixed
        elif not n_decoding:
            n_rows = self._n_rows_alone(n_running, n_cells, n_owed, depth, n_keys, places_taken, are_alike)
        elif self._apart:
            n_beside = sum(singles) - n_fillers
            most = PACE_KEYS if n_keys > 1 else PACE_APART_MAX
            n_ridden, n_deep = n_beside - n_decoding, max(depth, length)
            n_rows = n_beside + self._n_rows_apart(n_decoding, n_running, n_cells, n_attended, depth, n_deep, singles, n_ridden, most)
        else:
            target_s = self._itl_target_s
            if target_s is None:
                pace = PACE_KEYS if n_keys > 1 else PACE
                target_s = self._adaptive_s(n_running, n_cells, n_attended, depth, n_shared, pace)
                most_s = self._deep_most_s(n_running, n_attended) if depth else math.inf
                target_s = max(target_s, self._efficient_s(n_decoding, n_cells, depth, most_s=most_s))
            n_rows = self._cost.n_rows_within(target_s, n_decoding, n_cells, attended=((1, n_attended),), depth=depth)
        return min(max(n_rows, n_decoding + 1), self._n_rows_max - n_fillers)

    def gains_by_turns(self, n_decoding: int, depth: int) -> bool:
        """Whether answers of so many sequences and a prompt that is `depth` cells deep had better be computed in a step each.

        Where attention is cheap, both would only read the model's weights. A target or a fixed number of rows holds for all.
        """
        if self._n_rows_fixed is not None or self._itl_target_s is not None:
            return False
        return n_decoding * self._cost.read_s(depth) > WALK * self._cost.pass_s(1)

    def n_rows_between(self, n_waiting: int, n_running: int, n_cells: int, *, n_owed: int, n_attended: int, depth: int) -> tuple[int, int]:
        """Return how many rows a prompt that is `depth` cells deep gets in a step of its own, and in how many steps after it answers have
        theirs.

        There are `n_running` sequences, of which `n_waiting` generate, with `n_attended` cells before them; `n_cells` are in use, and
        prompts owe `n_owed` rows. What answers wait for is a step of theirs and the prompt's together.
        """
        cost = self._cost
        now_s = cost.step_s(n_waiting, n_waiting, n_attended, attended=((1, n_attended),))
        usual_s = min(PACE_TURNS * now_s, self._longest_s(now_s, depth))
        are_few = n_running < N_DEEP_MOST
        most_s = PACE_TURNS / PACE_DEEP * self._deep_most_s(n_running, n_attended) if are_few else PACE_TURNS * now_s
        n_usual = cost.n_rows_within(usual_s - now_s, 0, n_cells, depth=depth)
        n_most = cost.n_rows_within(most_s - now_s, 0, n_cells, depth=depth)
        n_rows = max(n_usual, min(cost.n_rows_efficient(min(PRICE * n_waiting, PRICE_MOST), depth), n_most))
        if n_rows:
            return min(n_rows, self._n_rows_max), 1
        n_rows = min(self._n_rows_worth(depth), n_owed)
        own_s = cost.step_s(n_rows, 0, n_cells, attended=((n_rows, depth),))
        return n_rows, math.ceil(own_s / ((PACE_TURNS - 1.0) * now_s))

    def _n_rows_worth(self, depth: int) -> int:
        """The rows of one sequence, `depth` cells deep, that are worth their price; a tile, if it takes less time than what does not fill
        it.
        """
        n_rows = self._cost.n_rows_efficient(PRICE_MOST, depth)
        if not n_rows < N_TOGETHER <= self._n_rows_max:
            return n_rows
        return min(n_rows, N_TOGETHER, key=lambda n: self._cost.step_s(n, 0, 0, attended=((n, depth),)))

    def n_rows_light(
        self,
        n_owed: int,
        n_decoding: int,
        n_running: int,
        n_cells: int,
        *,
        n_attended: int = 0,
        depth: int = 0,
        singles: Seq[int] = (),
        n_fillers: int = 0,
    ) -> int:
        """Return the budget of such a step in which a prompt ends that owes `n_owed` rows, or in a few of which; 0 when it would take many.

        It is for a prompt whose key has few places beside another's many; a target or a fixed number of rows holds for all.
        """
        if self._n_rows_fixed is not None or self._itl_target_s is not None:
            return 0
        cost, attended = self._cost, ((1, n_attended),)
        decode_s = cost.step_s(n_running, n_running, n_cells, attended=attended)
        most_s = min(PACE_LIGHT * decode_s, max(PACE_KEYS * decode_s, self._itl_max_s))
        if self._apart:
            n_beside, n_owed = sum(singles) - n_fillers, n_owed - 1  # one of them rides with the answers
            now_s = cost.step_s(n_beside + n_fillers, n_decoding, n_cells, singles, attended=attended)
            n_room = cost.n_rows_within(most_s - now_s, 0, 0, depth=depth)
        else:
            n_beside = n_decoding
            n_room = cost.n_rows_within(most_s, n_beside, n_cells, attended=attended, depth=depth) - n_beside
        if n_room < n_owed <= self._n_rows_max - n_beside:
            prompt = (n_owed, depth)
            if self._apart:
                ended_s = now_s + cost.step_s(n_owed, 0, 0, attended=(prompt,))
            else:
                ended_s = cost.step_s(n_beside + n_owed, n_beside + 1, n_cells, attended=(*attended, prompt))
            if ended_s <= PACE_LIGHT_END * most_s:
                n_room = n_owed
        n_rows = min(n_beside + min(n_owed, n_room), self._n_rows_max - n_fillers)
        return n_rows if n_owed <= N_STEPS_LIGHT * n_room else 0

    def deeper(self, n_rows: int, depth: int, other: int) -> int:
        """Return how many rows of a prompt that is `other` cells deep may go instead of `n_rows` of one that is `depth` deep."""
        return n_rows if self._n_rows_fixed is not None else self._cost.deeper(n_rows, depth, other)

    def _n_rows_alone(self, n_running: int, n_cells: int, n_owed: int, depth: int, n_keys: int, places_taken: bool, are_alike: bool) -> int:
        """All rows that prompts owe, if that does not take long, or else as many as are computed fastest in less."""
        generating_s = self._cost.step_s(n_running, n_running, n_cells)
        most_s, fast_s = ALONE_KEYS_S, ALONE_KEYS_S
        if n_keys <= 1:
            short_s = min(N_STEPS_ALONE * generating_s, ALONE_FULL_S if places_taken else ALONE_SHORT_S)
            most_s, fast_s = max(ALONE_ALL_S, ALONE_FULL_S if places_taken and are_alike else short_s), ALONE_S
        if n_owed <= self._n_rows_max and self._cost.step_s(n_owed, n_running, n_cells, attended=((n_owed, depth),)) <= most_s:
            return n_owed
        n_rows = self._cost.n_rows_fastest(max(fast_s, self._efficient_s(0, n_cells, depth)), depth)
        # What is worth its price goes in any case, and deep in a prompt of the only key what is fastest within a tile. By time alone it may
        # not fit: what steps of that size took last is known at once, but not to the choice among sizes. After one that was slow a long
        # prompt went on row by row, and after two in steps of twelve at half the speed, since what those took was put down to all sizes.
        if n_keys <= 1 and self._cost.is_deep(depth):
            return max(n_rows, self._cost.n_rows_fastest(math.inf, depth, n_most=N_TOGETHER))
        return max(n_rows, self._cost.n_rows_efficient(PRICE, depth))

    def _adaptive_s(self, n_running: int, n_cells: int, n_attended: int, depth: int, n_shared: int, usual: float) -> float:
        """Time for a step that slows running answers down to two fifths at most.

        It is counted in steps of all that run, whichever of them generate now. Counted in those that do, few answers would leave little
        time for many prompts, and so stay few.
        """
        pace = _deeper_pace(usual, _share_between(depth - n_shared, N_DEEP))
        attended = ((1, n_attended),)
        decode_s = self._cost.step_s(n_running, n_running, n_cells, attended=attended)
        own_s = self._cost.step_s(n_running, n_running, n_attended, attended=attended)
        return min(usual * decode_s, pace * own_s, self._longest_s(decode_s, depth))

    def may_fill(self, filled: Seq[int], bare: Seq[int], n_more: int) -> bool:
        """Whether passes `filled` with `n_more` rows of prompts cost no more over `bare` ones than such rows do in the best pass."""
        return self._n_rows_fixed is None and self._cost.passes_s(filled) - self._cost.passes_s(bare) <= n_more * self._cost.least_row_s

    def is_less(self, some: Seq[int], others: Seq[int]) -> bool:
        """Whether the passes `some` take less time than `others`."""
        return self._cost.passes_s(some) < self._cost.passes_s(others)

    def _longest_s(self, now_s: float, depth: int) -> float:
        """What a step may take by `itl_max_s`, that without a prompt takes `now_s`; more if that would leave prompts hardly any rows."""
        if self._itl_max_s == math.inf:
            return math.inf
        n_rows = self._n_rows_worth(depth)
        worth_s = self._cost.step_s(n_rows, 0, 0, attended=((n_rows, depth),)) if depth else 0.0
        return max(self._itl_max_s, PACE_LEAST * now_s, now_s + worth_s)

    def _n_rows_apart(
        self,
        n_decoding: int,
        n_running: int,
        n_cells: int,
        n_attended: int,
        depth: int,
        n_deep: int,
        singles: Seq[int],
        n_ridden: int,
        most: float,
    ) -> int:
        """Rows of prompts that follow in a pass of their own; `n_ridden` of the `singles` are prompts' too. The step may take `most` times
        what one of all that run takes, and less the longer the prompt: it will have `n_deep` cells.

        That fewer generate than could makes each token dearer, which such a step pays once, however many rows it has.
        """
        attended = ((1, n_attended),)
        n_singles = sum(singles)
        decode_s = self._cost.step_s(n_running, n_running, n_attended, attended=attended)
        now_s = self._cost.step_s(n_singles, n_decoding, n_cells, singles, attended=attended)
        if self._itl_target_s is None:
            worth_s = n_decoding / n_running * decode_s + n_ridden * self._cost.least_row_s
            n_cheap = self._cost.n_rows_efficient(PRICE_APART, beside_s=max(now_s - worth_s, 0.0))
            cheap_s = now_s + self._cost.step_s(n_cheap, 0, 0)
            share = _share_between(n_deep, N_DEEP_APART)
            pace, most = _deeper_pace(PACE_APART, share), _deeper_pace(most, share)
            adaptive_s = min(max(pace * decode_s, cheap_s), most * decode_s, self._longest_s(now_s, depth))
            deep_s = self._deep_most_s(n_running, n_attended) - now_s if depth else math.inf
            room_s = max(adaptive_s - now_s, self._efficient_s(0, 0, depth, n_waiting=n_decoding, most_s=deep_s))
        else:
            room_s = self._itl_target_s - now_s
        return self._cost.n_rows_within(room_s, 0, 0, depth=depth)

    def _deep_most_s(self, n_running: int, n_attended: int) -> float:
        """Time for a step that is long because it is deep in a prompt; the cells of this do not count."""
        n = min(max(n_running, N_DEEP_MOST), self._n_rows_max)
        return PACE_DEEP * n / n_running * self._cost.step_s(n, n, n_attended, attended=((1, n_attended),))

    def _efficient_s(self, n_outputs: int, n_cells: int, depth: int, *, n_waiting: int = 0, most_s: float = math.inf) -> float:
        """Time for the smallest step that is worth its price, which may be the higher deep in a prompt the more answers wait meanwhile.

        The step has `n_outputs` of these; `n_waiting` are in another pass. Because of the depth it takes no longer than `most_s`.
        """
        n_rows = self._cost.n_rows_efficient(PRICE)
        efficient_s = self._cost.step_s(n_rows, n_outputs, n_cells)
        if not depth:
            return efficient_s
        n_rows = self._cost.n_rows_efficient(PRICE * max(n_outputs, n_waiting, 1), depth)
        return max(efficient_s, min(self._cost.step_s(n_rows, n_outputs, n_cells, attended=((n_rows, depth),)), most_s))


def _deeper_pace(usual: float, share: float) -> float:
    return usual - max(usual - PACE_DEEP, 0.0) * share


def _share_between(n: int, low: int) -> float:
    """How far a count is on the way from `low`, 0, to twice as much, 1."""
    return min(max(n / low - 1.0, 0.0), 1.0)
