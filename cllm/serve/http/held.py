"""Answers that wait for clients who do not take them: how much of all connections may wait, and whose has to go."""

from __future__ import annotations

from typing import Protocol

import attrs
import structlog

# Of one answer, what is less is no matter. Each is bounded, and its client by a time for each piece, which lets ten thousand connections
# have ten thousand of the largest for hours.
N_BYTES_LARGE = 64 * 1024
N_BYTES_MAX = 512 * 1024 * 1024

log = structlog.get_logger(__name__)


class Holder(Protocol):
    """A connection that holds bytes for its client."""

    def cut_off(self) -> None:
        """End the connection."""


@attrs.define(eq=False)
class Held:
    """What all connections of a server hold, in bytes."""

    n_bytes: int = 0
    _of: dict[Holder, int] = attrs.field(factory=dict)

    def add(self, holder: Holder, n_bytes: int) -> None:
        """Count so many more. Where that is too much, those are cut off that hold most, a lone one excepted."""
        self._of[holder] = self._of.get(holder, 0) + n_bytes
        self.n_bytes += n_bytes
        while self.n_bytes > N_BYTES_MAX and len(large := [one for one, n in self._of.items() if n > N_BYTES_LARGE]) > 1:
            largest = max(large, key=self._of.__getitem__)
            why = "too much is held for clients that have not taken it, and for this one most"
            log.warning("answer.dropped", n_bytes=self._of[largest], n_bytes_of_all=self.n_bytes, why=why)
            largest.cut_off()
            self.drop(largest)

    def take(self, holder: Holder, n_bytes: int) -> None:
        """Count so many less, which were sent; nothing is counted any more for one that was dropped."""
        if holder in self._of:
            self._of[holder] -= n_bytes
            self.n_bytes -= n_bytes
            if not self._of[holder]:
                del self._of[holder]

    def drop(self, holder: Holder) -> None:
        """Count nothing for it any more."""
        self.n_bytes -= self._of.pop(holder, 0)
