"""What a step will cost: a measured curve of the machine and the model, corrected by every step that was really made.

Step time is not linear in rows, and not even monotonic (kernels work in tiles: 16 rows may cost less than 15), so the curve is a table.
What a step costs is the sum of four parts, each of which can be measured alone:

    rows      the layers, over the rows of the step
    outputs   the head, over the rows whose logits are wanted
    cells     attention, which walks the cells in use, whosever they are: some of it once a step, some of it for each row
    attended  attention proper, over the cells of its own sequence before each row: deep in a long prompt it is most of a step. Rows of one
              sequence read its cells together, by tiles of 64, and one by one where there are fewer: of a model of 0.6 billion parameters,
              2,000 cells deep, 16 rows take 0.36 s for it, 48 take 0.94, and 64 take 0.42

Real steps correct the parts and a factor common to all of them (the machine is busy, or hot) by a Kalman filter on the logarithm of
the step's time. It keeps for each number how uncertain it is, so that a guess gives way at once, a measured number slowly, and the
common factor takes what concerns all.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from operator import truediv
from statistics import median
from typing import TypeAlias

from cllm.engine.cost.curve import Curve, Points

N_EXACT_MAX = 64  # counts up to here are corrected one by one, larger ones in groups
N_GROUPS_OCTAVE = 8  # of those, for each doubling
NOISE = 0.05**2  # variance of a step's log time around what is expected of it
MEASURED = 0.05**2  # variance of a number that was measured once
GUESSED = 0.15**2  # of one that lies between measured ones
ATTENTION = 1.0**2  # of what attention costs, which is measured in short sequences, where it is little beside the rest
ATTENDED = 0.4**2  # of how much more so many rows of a sequence take for it than one
ATTENDED_BEND_MAX = 4.0  # times as much, or as little, is what steps may make of the latter
N_TOGETHER = 64  # rows of a sequence that read its cells together
FADE = 0.02  # of what was learned of so many rows of a sequence is forgotten with each step that has others: after a tile that was held up,
# a long prompt went on in pieces of 56 rows at a third of the speed, and no tile came any more that could have shown what it takes
KNOWN = 0.10**2  # a number with less was measured or met
DRIFT = 0.01**2  # that the common factor gains with every step
DRIFT_ENTRY = 0.001**2  # that a part gains whenever it is seen, so that none is believed for ever
UNKNOWN = 1.5**2  # of the common factor when nothing was measured
N_SIGMAS_MAX = 3.0  # a step further off counts as this far off: one that was held up must not bend the curve
N_ERRORS_KEPT = 256
N_BITS_DEPTH = 5  # of a depth that are looked at where only sizes of step are asked for
N_STEPS_TO_REFRESH = 64  # steps after which the sizes worth having are worked out anew
OPTIMISM = 0.95  # of the price that is known, for sizes of step that were never met
WALKED = 0.2  # of what a cell costs that a row sees is what one costs at least that it only walks by; a measurement may lose it in noise
WALKED_MOST = 0.3  # of the same is what it costs at most: two layouts compared on a disturbed machine may say six times as much
TILES = 1.25  # times as long as a larger step one may take, as 15 rows beside 16
CLEARLY = 1.1  # times as much for a row as in half as many: it is not so, and something disturbed what says so
BEND_MAX = 1.5  # times as much as was measured, or as little, is what steps may make of one count: a machine that others use as well has
# fast and slow minutes, and what they say of the counts that happened to come then is not about these
ROUNDING = 0.6  # a count is rounded down to more than this share of itself,
ROUNDING_PROMPTS = 0.45  # and the rows of prompts in it to more than this one of theirs

Attended: TypeAlias = Seq[tuple[int, int]]  # (rows of one sequence, cells of it before them); single rows of several may be one pair


class _Part:
    """One part of a step's time over a count: what was measured, what lies between, and a correction for each group of counts."""

    def __init__(self, points: Points, n_max: int, group: Callable[[int], int], *, bend_max: float, variance: float = GUESSED) -> None:
        self.seconds = _table(points, n_max)
        self.groups = [group(n) for n in range(n_max + 1)]
        self._factors = [1.0] * (self.groups[-1] + 1)
        self._bend_max = bend_max
        self.variances = [variance] * len(self._factors)

    @classmethod
    def of_counts(cls, points: Points, n_max: int, *, measured: bool) -> _Part:
        """Over counts that differ each from the next, as kernels work in tiles."""
        part = cls(points, n_max, _group, bend_max=BEND_MAX if measured else math.inf)
        for n, _ in points if measured else ():
            if n <= n_max:
                part.variances[_group(n)] = MEASURED
        return part

    def of(self, n: int) -> float:
        return self.seconds[n] * self._factors[self.groups[n]]

    def by_group(self, times: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
        """Return `times` of counts with those of one group added up, under one count of it: they share one correction."""
        together: dict[int, tuple[int, float]] = {}
        for n, seconds in times:
            first, before = together.get(self.groups[n], (n, 0.0))
            together[self.groups[n]] = first, before + seconds
        return list(together.values())

    def is_known(self, n: int) -> bool:
        return self.variances[self.groups[n]] < KNOWN

    def correct(self, n: int, shift: float, remaining: float) -> None:
        group = self.groups[n]
        self._factors[group] = min(max(self._factors[group] * math.exp(shift), 1.0 / self._bend_max), self._bend_max)
        self.variances[group] = self.variances[group] * remaining + DRIFT_ENTRY

    def fade(self, met: Collection[int]) -> None:
        """Go back a little towards what was measured, where that is not of one of the counts that were `met`."""
        groups = {self.groups[n] for n in met}
        self._factors = [one if group in groups else one ** (1.0 - FADE) for group, one in enumerate(self._factors)]


class CostModel:
    """Predicts steps of up to `n_rows_max` rows and learns from those that were made. A prediction takes about a microsecond.

    With `apart`, each slot has cells of its own, and no row walks those of others.
    """

    def __init__(self, curve: Curve, *, n_rows_max: int, measured: bool = True, apart: bool = False) -> None:
        self.curve = curve
        self.n_rows_max = n_rows_max
        self._rows = _Part.of_counts(plausible(curve.rows), n_rows_max, measured=measured)
        self._outputs = _Part.of_counts(ascending(curve.outputs), n_rows_max, measured=measured)
        self._cells = _Part.of_counts(((1, 1.0),), 1, measured=False)  # a factor of what the cells cost
        attended = one_by_one(cheaper_together(ascending(curve.attended), 1.0))
        self._attention = _Part(((1, 1.0),), 1, int.bit_length, bend_max=math.inf, variance=ATTENTION)  # a factor of what that says
        self._attended = _Part(attended, N_TOGETHER, int.bit_length, bend_max=ATTENDED_BEND_MAX, variance=ATTENDED)
        seen_s = min(seconds / n for n, seconds in attended)
        self._apart = apart
        self._row_cell_s = 0.0 if apart else max(curve.row_cell_s, WALKED * seen_s)
        self.apart_gain_cell_s = min(curve.apart_gain_cell_s or 0.0, WALKED_MOST * seen_s)  # of each row, for each cell that it walks by
        self._measured = measured
        self._scale = 1.0
        self._scale_variance = NOISE if measured else UNKNOWN
        self._counts = _counts(curve.rows, n_rows_max)
        self._reads_s: dict[int, float] = {}  # by rows, until they are corrected
        self._errors: deque[float] = deque(maxlen=N_ERRORS_KEPT)
        self._n_steps = 0
        self._refresh()

    def beside(self, *, n_rows_max: int, apart: bool) -> CostModel:
        """Return a model of the same machine at its present speed, for cells that lie in another way."""
        other = CostModel(self.curve, n_rows_max=n_rows_max, measured=self._measured, apart=apart)
        other.keep_up(self)
        return other

    def keep_up(self, other: CostModel) -> None:
        """Take over the machine's present speed from the model of the layout that was in force meanwhile, and how far off that was."""
        self._scale, self._scale_variance = other._scale, other._scale_variance
        self._errors = other._errors  # of the last steps, however cells lay: else `/metrics` has nothing to tell after a change

    # --- what will be -------------------------------------------------------------------------------------------------

    def step_s(self, n_rows: int, n_outputs: int, n_cells: int, passes: Seq[int] = (), *, attended: Attended = ()) -> float:
        """Seconds of a step of `n_rows` rows, `n_outputs` of them outputs, while `n_cells` cells are in use.

        `passes` are the rows that are computed at once, where that is not all of them.
        """
        rows_s = sum(map(self._rows.of, passes)) if passes else self._rows.of(n_rows)
        return self._scale * (rows_s + self._outputs.of(n_outputs) + self._cells_s(n_rows, n_cells) + self._attended_s(attended))

    def usual_s(self, n_rows: int, n_outputs: int, n_cells: int, n_attended: int) -> float:
        """Seconds of such a step by what was measured at first, at the machine's present speed; single rows see `n_attended` cells in all.

        What steps said of single counts is left out; where nothing was measured, that is all there is.
        """
        if not self._measured:
            return self.step_s(n_rows, n_outputs, n_cells, attended=((1, n_attended),))
        counted_s = self._rows.seconds[n_rows] + self._outputs.seconds[n_outputs] + n_attended * self._read_s(1)
        return self._scale * (counted_s + self._cells_s(n_rows, n_cells))

    def spared_s(self, n_rows: int, n_decoding: int, n_cells: int = 0) -> float:
        """Seconds that rows of prompts take less in a step of `n_rows` rows, `n_decoding` of which generate, than in steps of their own.

        There they would not walk the `n_cells` cells that are in use.
        """
        beside_s = self._rows.of(n_rows) - self._rows.of(n_decoding) + self._cells_s(n_rows, n_cells) - self._cells_s(n_decoding, n_cells)
        return self._scale * ((n_rows - n_decoding) * self._least_row_s - beside_s)

    def prefill_s(self, n_rows: int, n_cells: int = 0) -> float:
        """Seconds to compute the first `n_rows` rows of a prompt by themselves, in steps of the size that is cheapest for each row."""
        size = max(self.n_rows_fastest(math.inf, n_rows // 2), 1)  # half of them are before a row, in the mean
        n_full, n_rest = divmod(n_rows, size)
        n_together = min(size, n_rows)
        attended_s = self._scale * self._read_s(n_together) * n_rows * n_rows / (2 * n_together) if n_rows else 0.0
        return n_full * self.step_s(size, 0, n_cells) + (self.step_s(n_rest, 0, n_cells) if n_rest else 0.0) + attended_s

    def carry_s(self, n_cells: int, n_rows: int) -> float:
        """Seconds that `n_cells` cells which nobody reads add to a step of `n_rows` rows, because attention walks them too in a pool."""
        return 0.0 if self._apart else self._scale * self._cells_s(n_rows, n_cells)

    def save_s(self, n_cells: int) -> float | None:
        """Seconds to save a state of `n_cells` cells; None when it was not measured."""
        curve = self.curve
        return None if curve.save_cell_s is None else curve.save_fixed_s + curve.save_cell_s * n_cells

    def restore_s(self, n_cells: int) -> float | None:
        """Seconds to restore a state of `n_cells` cells; None when it was not measured."""
        curve = self.curve
        return None if curve.restore_cell_s is None else curve.restore_fixed_s + curve.restore_cell_s * n_cells

    def n_rows_within(self, seconds: float, n_least: int, n_cells: int, *, attended: Attended = (), depth: int = 0) -> int:
        """The rows of the largest step that takes at most `seconds`, when `n_least` of them are outputs that go in any case.

        `attended` is of those; the others are of one sequence and have `depth` cells before them. It is rounded down to where a row beside
        those is cheap. `n_least` when nothing more fits.
        """
        room = seconds / self._scale - self._outputs.of(n_least) - self._cells_s(0, n_cells) - self._attended_s(attended)
        row_s = self._row_cell_s * self._cells.of(1) * n_cells
        sizes, sizes_s = self._sizes, self._sizes_s

        def fits(n: int, rows_s: float) -> bool:
            return rows_s + n * row_s + depth * self._read_s(max(n - n_least, 0)) <= room

        end = bisect_right(range(len(sizes)), room, key=lambda i: sizes_s[i] + sizes[i] * row_s)
        while end and not fits(sizes[end - 1], sizes_s[end - 1]):
            end -= 1
        n = max(sizes[end - 1], n_least) if end else n_least
        if self.is_deep(depth):  # what else a row costs makes little difference
            following = next((size for size in sizes if size > n), n)
            return next((m for m in range(min(following, n + N_TOGETHER) - 1, n, -1) if fits(m, self._rows.of(m))), n)
        if n == n_least:
            return n_least
        base_s = self._rows.of(n_least)
        begin = bisect_right(sizes, max(ROUNDING * n, n_least + ROUNDING_PROMPTS * (n - n_least)), hi=end - 1)
        return sizes[min(range(end - 1, begin - 1, -1), key=lambda i: (sizes_s[i] - base_s) / (sizes[i] - n_least))]

    def is_deep(self, depth: int) -> bool:
        """Whether rows with so many cells of their sequence before them are mostly attention."""
        return depth * self._read_s(N_TOGETHER) > N_TOGETHER * self._least_row_s

    def n_rows_fastest(self, seconds: float, depth: int = 0, *, n_most: int | None = None) -> int:
        """The size of step that computes prompts fastest, for each row, among those that take at most `seconds`; 0 when there is none.

        Before the rows are `depth` cells of their sequence. With `n_most` no larger size is looked at.
        """
        room, sizes_s = seconds / self._scale, self._deep_s(depth)
        sizes = self._sizes if n_most is None else self._sizes[: bisect_right(self._sizes, n_most)]
        fitting = ((size_s / n, n) for n, size_s in zip(sizes, sizes_s, strict=False) if size_s <= room)
        return min(fitting, default=(0.0, 0))[1]

    def n_rows_efficient(self, price: float, depth: int = 0, *, beside_s: float = 0.0) -> int:
        """The smallest step in which a row costs at most `price` times as much as in the best one, `depth` cells deep in its sequence.

        What is paid beside the rows, `beside_s`, counts as theirs; if they are never that cheap then, it is the largest step.
        """
        if beside_s:
            return self._n_rows_efficient(price, depth, beside_s)
        key = price, _coarse(depth)  # asked for in every step, and nearly the same in the next
        n_rows = self._efficient.get(key)
        if n_rows is None:
            n_rows = self._efficient[key] = self._n_rows_efficient(price, key[1], 0.0)
        return n_rows

    def _n_rows_efficient(self, price: float, depth: int, beside_s: float) -> int:
        sizes, sizes_s = self._sizes, self._deep_s(depth)
        limit = price * (min(map(truediv, sizes_s, sizes)) if depth else self._least_row_s)
        more_s = beside_s / self._scale
        return next((n for n, seconds in zip(sizes, sizes_s, strict=True) if seconds + more_s <= limit * n), sizes[-1])

    def passes_s(self, passes: Seq[int]) -> float:
        """Seconds of the layers alone over passes of so many rows each."""
        return self._scale * sum(map(self._rows.of, passes))

    def pass_s(self, n_rows: int) -> float:
        """Seconds of the layers over one pass of `n_rows` rows."""
        return self._scale * self._rows.of(n_rows)

    def read_s(self, n_cells: int) -> float:
        """Seconds that a single row takes longer for `n_cells` cells of its sequence before it."""
        return self._scale * n_cells * self._read_s(1)

    @property
    def least_row_s(self) -> float:
        """Seconds of a row in the step that is cheapest for each of its rows."""
        return self._scale * self._least_row_s

    def generated_rows(self, n_running: int, n_cells: int, n_attended: int) -> float:
        """Rows of prompts that take as long, in the step that is cheapest for them, as a token that one of `n_running` generates.

        `n_cells` cells are in use, of which they see `n_attended`. A step reads the whole model for few rows as for many, so that with few
        who generate, on a GPU most of all, this is far more than what a row with an output takes longer than one without.
        """
        return self.usual_s(n_running, n_running, n_cells, n_attended) / n_running / self.least_row_s

    def deeper(self, n_rows: int, depth: int, other: int) -> int:
        """The rows that take as long at the depth `other` as `n_rows` do at `depth`, one at least."""

        def prompt_s(n: int, before: int) -> float:
            return n * self._least_row_s + before * self._read_s(n)

        most_s = prompt_s(n_rows, depth)
        n_tiles = bisect_right(range(n_rows // N_TOGETHER + 1), most_s, key=lambda n: prompt_s(n * N_TOGETHER, other)) - 1
        n = max(n_tiles, 0) * N_TOGETHER
        n_more = min(N_TOGETHER - 1, n_rows - n)
        return max(n + bisect_right(range(n_more + 1), most_s, key=lambda more: prompt_s(n + more, other)) - 1, 1)

    # --- what was -----------------------------------------------------------------------------------------------------

    def observe(
        self, n_rows: int, n_outputs: int, n_cells: int, seconds: float, passes: Seq[int] = (), *, attended: Attended = ()
    ) -> float:
        """Learn from a step that took `seconds`; return how far off the prediction was, as a share of the time taken."""
        rows_s = [(n, self._rows.of(n)) for n in passes or (n_rows,)]
        outputs_s, cells_s = self._outputs.of(n_outputs), self._cells_s(n_rows, n_cells)
        attended_s = [(n, cells * self._read_s(n)) for n, cells in self._tiles(attended)]
        attention_s = sum(s for _, s in attended_s)
        total_s = sum(s for _, s in rows_s) + outputs_s + cells_s + attention_s
        was_known = all(self._rows.is_known(n) for n, _ in rows_s)
        off = math.log(seconds / (self._scale * total_s))
        self._correct(
            off,
            (
                *((self._rows, n, s / total_s) for n, s in self._rows.by_group(rows_s)),
                (self._outputs, n_outputs, outputs_s / total_s),
                (self._cells, 1, cells_s / total_s),
                (self._attention, 1, attention_s / total_s),
                *((self._attended, n, s / total_s) for n, s in self._attended.by_group(attended_s)),
            ),
        )
        self._attended.fade([n for n, _ in attended_s])
        error = abs(math.expm1(-off))
        self._errors.append(error)
        self._n_steps += 1
        if self._n_steps % N_STEPS_TO_REFRESH == 0 or (not was_known and all(self._rows.is_known(n) for n, _ in rows_s)):
            self._refresh()
        return error

    @property
    def is_grounded(self) -> bool:
        """Whether it rests on anything that was measured: a curve of this machine, or a step."""
        return self._measured or bool(self._errors)

    def error(self) -> float | None:
        """The median error of the last predictions, as a share of the time taken; None before the first step."""
        return median(self._errors) if self._errors else None

    def _correct(self, off: float, parts: Seq[tuple[_Part, int, float]]) -> None:
        """Spread what a step was off over the numbers that it was made of, by how uncertain each is and how much it weighs."""
        scale_variance = self._scale_variance + DRIFT
        variance = scale_variance + NOISE
        for part, n, share in parts:
            variance += share * share * part.variances[part.groups[n]]
        bound = N_SIGMAS_MAX * math.sqrt(variance)
        step = min(max(off, -bound), bound) / variance
        for part, n, share in parts:
            if share:
                weight = share * part.variances[part.groups[n]]
                part.correct(n, weight * step, 1.0 - share * weight / variance)
        self._reads_s.clear()
        self._scale *= math.exp(scale_variance * step)
        self._scale_variance = scale_variance * (1.0 - scale_variance / variance)

    # --- how it is kept -----------------------------------------------------------------------------------------------

    def _cells_s(self, n_rows: int, n_cells: int) -> float:
        return n_cells * (self.curve.cell_s + n_rows * self._row_cell_s) * self._cells.of(1)

    def _attended_s(self, attended: Attended) -> float:
        return sum([cells * self._read_s(n) for n, cells in attended])

    def _read_s(self, n: int) -> float:
        """What `n` rows of one sequence take for each cell before them."""
        seconds = self._reads_s.get(n)  # the same few, several times between two steps
        if seconds is None:
            n_tiles, n_rest = self._tiled(n)
            seconds = (n_tiles * self._attended.of(N_TOGETHER) + self._attended.of(n_rest)) * self._attention.of(1)
            self._reads_s[n] = seconds
        return seconds

    def _tiled(self, n: int) -> tuple[int, int]:
        """Tiles of rows that read their cells together, and rows that do so one by one; behind full tiles the rest is one more, if that is
        less.
        """
        n_tiles, n_rest = divmod(n, N_TOGETHER)
        return (n_tiles + 1, 0) if n_tiles and self._attended.of(n_rest) > self._attended.of(N_TOGETHER) else (n_tiles, n_rest)

    def _tiles(self, attended: Attended) -> list[tuple[int, int]]:
        """The same, with no more rows than a tile in a pair."""
        tiles = []
        for n, cells in attended:
            n_tiles, n_rest = self._tiled(n)
            tiles += [(N_TOGETHER, n_tiles * cells)] if n_tiles else []
            tiles += [(n_rest, cells)] if n_rest else []
        return tiles

    def _deep_s(self, depth: int) -> list[float]:
        """Seconds of the sizes worth having, all rows of one sequence which has `depth` cells before them."""
        if not depth:
            return self._sizes_s
        of, deep_s = self._attended.of, depth * self._attention.of(1)
        tile_s = of(N_TOGETHER)  # asked for in every step: as `_read_s`, without a call for each size
        reads = [n_tiles * tile_s + (min(of(n_rest), tile_s) if n_tiles else of(n_rest)) for n_tiles, n_rest in self._sizes_tiles]
        return [seconds + deep_s * read for seconds, read in zip(self._sizes_s, reads, strict=True)]

    def _refresh(self) -> None:
        """Work out the sizes of step that no larger one undercuts.

        Where nothing was measured, a size that was not met either is believed to cost a little less for each row than smaller ones. It is
        so mostly, and if not, it is met and known then. Otherwise what was learned of small steps, and of them alone, would make them
        look cheap, and larger ones would never come.
        """
        seconds = self._believed()
        self._sizes: list[int] = []
        self._sizes_s: list[float] = []
        for n in reversed(self._counts):
            if not self._sizes or seconds[n] < self._sizes_s[-1]:
                self._sizes.append(n)
                self._sizes_s.append(seconds[n])
        self._sizes.reverse()
        self._sizes_s.reverse()
        self._sizes_tiles = [divmod(n, N_TOGETHER) for n in self._sizes]
        self._efficient: dict[tuple[float, int], int] = {}  # by price and depth, as long as these stand
        self._least_row_s: float = min(map(truediv, self._sizes_s, self._sizes))

    def _believed(self) -> dict[int, float]:
        believed = {}
        least_row_s = math.inf
        for n in self._counts:
            seconds = self._rows.of(n)
            if self._rows.is_known(n):
                least_row_s = min(least_row_s, seconds / n)
            elif not self._measured:
                seconds = min(seconds, OPTIMISM * least_row_s * n)
            believed[n] = seconds
        return dict(cheaper_together(tuple(believed.items()), OPTIMISM)) if self._measured else believed


def _coarse(depth: int) -> int:
    """The depth, rounded down by less than a sixteenth."""
    n_dropped = depth.bit_length() - N_BITS_DEPTH
    return depth >> n_dropped << n_dropped if n_dropped > 0 else depth


def ascending(points: Points) -> Points:
    """The points, those against the order replaced by their mean: more outputs never take less time, whatever disturbed a measurement."""
    pools: list[tuple[list[int], float]] = []
    for n, seconds in points:
        counts, mean_s = [n], seconds
        while pools and pools[-1][1] > mean_s:
            before, before_s = pools.pop()
            mean_s = (before_s * len(before) + mean_s * len(counts)) / (len(before) + len(counts))
            counts = before + counts
        pools.append((counts, mean_s))
    return tuple((n, mean_s) for counts, mean_s in pools for n in counts)


def one_by_one(points: Points) -> Points:
    """The points of rows that read together, and between the last one below a tile and the tile that each row costs what it does there."""
    (n, seconds), (n_last, last_s) = ((0, 0.0), *points)[-2:]
    without_s = seconds / n * (N_TOGETHER - 1) if n else 0.0
    if n_last == N_TOGETHER and n < N_TOGETHER - 1 and without_s > last_s:
        return (*points[:-1], (N_TOGETHER - 1, without_s), points[-1])
    return points


def plausible(points: Points) -> Points:
    """The points, each not much dearer than larger ones: tiles make a difference of a fifth, and the rest was a disturbance."""
    found: list[tuple[int, float]] = []
    least_s = math.inf
    for n, seconds in reversed(points):
        least_s = min(least_s, seconds)
        found.append((n, min(seconds, TILES * least_s)))
    return cheaper_together(tuple(reversed(found)), 1.0)


def cheaper_together(points: Points, price: float) -> Points:
    """The points; a row of one that costs clearly more than in half as many rows is put at `price` times as much as there.

    If small steps looked cheap, prompts would be computed in those alone, and nothing could show what larger ones take.
    """
    found: list[tuple[int, float]] = []
    least_row_s, i = math.inf, 0
    for n, seconds in points:
        while 2 * points[i][0] <= n:
            least_row_s = min(least_row_s, points[i][1] / points[i][0])
            i += 1
        found.append((n, seconds if seconds <= CLEARLY * least_row_s * n else price * least_row_s * n))
    return tuple(found)


def _table(points: Points, n_max: int) -> list[float]:
    """Seconds for 0 to `n_max`: straight lines from nothing at 0 through the points, and on."""
    counts, seconds = [0, *(n for n, _ in points)], [0.0, *(s for _, s in points)]
    table = []
    for n in range(n_max + 1):
        i = min(max(bisect_right(counts, n), 1), len(counts) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (counts[i] - counts[i - 1])
        if n > counts[-1]:  # beyond the last point a row costs no less than on average before: a large step is computed in passes
            slope = max(slope, seconds[-1] / counts[-1])
        table.append(seconds[i] + slope * (n - counts[i]))
    return table


def _group(n: int) -> int:
    return n if n <= N_EXACT_MAX else N_EXACT_MAX + 1 + int(N_GROUPS_OCTAVE * math.log2(n / N_EXACT_MAX))


def _counts(points: Points, n_max: int) -> list[int]:
    """The counts that a budget may be: those that were measured, and multiples of what kernels work in."""
    counts = {n for n, _ in points} | {*range(8, 256, 8), *range(256, 1024, 32), *range(1024, n_max, 128)}
    return [*sorted(n for n in counts if n < n_max), n_max]
