"""Who is served first: the order of the sequences that wait, and the rank of those that run."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from cllm.engine.sequence import Sequence


def order(sequence: Sequence) -> tuple[int, int]:
    """Return the rank of service; lower first."""
    return sequence.order


class Queue:
    """The sequences that wait, in order of service."""

    def __init__(self) -> None:
        self._waiting: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)

    def first(self) -> Sequence | None:
        """Who is next; None when nobody waits."""
        return self._waiting[0] if self._waiting else None

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait at its rank."""
        bisect.insort(self._waiting, sequence, key=order)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that waits."""
        self._waiting.remove(sequence)

    def check(self) -> None:
        """Assert the order."""
        assert self._waiting == sorted(self._waiting, key=order)
