"""Which rows are computed at once where each slot has cells of its own: equally many of each slot, of slots that follow one another."""

from __future__ import annotations

from collections.abc import Iterable


def passes(rows: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return the sizes of the passes over `rows`, given as (slot, rows) in ascending order of the slots.

    A pass reads all weights, so that few large ones are cheap. Source: split_equal (llama-batch.cpp).
    """
    left = dict(rows)
    sizes = []
    while left:
        first = min(left)
        run = [first]
        while run[-1] + 1 in left:
            run.append(run[-1] + 1)
        n_each = min(left[slot] for slot in run)
        sizes.append(n_each * len(run))
        for slot in run:
            left[slot] -= n_each
            if not left[slot]:
                del left[slot]
    return tuple(sizes)
