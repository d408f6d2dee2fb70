"""Which rows are computed at once where each slot has cells of its own: equally many of each slot, of slots that follow one another."""

from __future__ import annotations

from collections.abc import Sequence as Seq


def passes(rows: Seq[tuple[int, int]]) -> tuple[int, ...]:
    """Return the sizes of the passes over `rows`, given as (slot, rows) in ascending order of the slots.

    A pass reads all weights, so that few large ones are cheap. Source: split_equal (llama-batch.cpp).
    """
    sizes: list[int] = []
    waiting = _runs(rows)[::-1]  # rows that are left of slots that follow one another
    while waiting:
        left = waiting.pop()
        n_each = min(left)
        sizes.append(n_each * len(left))
        if (most := max(left)) > n_each:
            if left.count(n_each) == len(left) - 1:  # one prompt beside answers, mostly
                sizes.append(most - n_each)
            else:
                waiting += reversed(_without_zeros([n - n_each for n in left]))
    return tuple(sizes)


def _runs(rows: Seq[tuple[int, int]]) -> list[list[int]]:
    """Rows of each slot, for slots that follow one another."""
    if not rows:
        return []
    slots, counts = zip(*rows, strict=True)
    if slots[-1] - slots[0] == len(slots) - 1:  # mostly: all places are taken, or gaps are filled
        return [list(counts)]
    found, start = [], 0
    for first, last in consecutive(slots):
        end = start + last - first + 1
        found.append(list(counts[start:end]))
        start = end
    return found


def _without_zeros(left: list[int]) -> list[list[int]]:
    """The stretches of `left` between its zeros."""
    return [[left[i] for i in range(first, last + 1)] for first, last in consecutive([i for i, n in enumerate(left) if n])]


def consecutive(slots: Seq[int]) -> list[tuple[int, int]]:
    """First and last of slots that follow one another; `slots` ascend. With one row in each slot, every run is a pass."""
    found = []
    first = last = -1
    for slot in slots:
        if slot == last + 1 and first >= 0:
            last = slot
            continue
        if first >= 0:
            found.append((first, last))
        first = last = slot
    if first >= 0:
        found.append((first, last))
    return found
