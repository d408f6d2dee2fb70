"""How much long bodies may take until they are answered: each is bounded, and so must all of them be together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs

from cllm.errors import Unavailable

N_BYTES_MAX = 1024 * 1024 * 1024  # while one is decoded it may be ten times as large, but few are at a time
RETRY_AFTER_S = 10.0  # what holds the room may be a long answer


@attrs.define(eq=False)
class Room:
    """Bytes that are taken, of so many. Full, it still takes from a key that has less than its part of it, up to twice as many."""

    n_max: int = N_BYTES_MAX
    n_taken: int = 0
    _n_of: Counter[str] = attrs.field(factory=Counter)  # by key; none is 0

    @contextmanager
    def shared(self, key: str = "") -> Iterator[Callable[[int], None]]:
        """Give what takes so many bytes more, as they come, until this ends. Who is the only one may take more than all the room.

        What is given raises: Unavailable.
        """
        n_own = 0

        def take(n: int) -> None:
            nonlocal n_own
            if self.n_taken > n_own and not self._has_room(key, n):
                what = f"{self.n_taken // 2**20} MiB of long bodies are being read or answered, and {self.n_max // 2**20} may be"
                raise Unavailable(f"{what}; a short one is answered", retry_after_s=RETRY_AFTER_S, code="bodies_busy")
            self.n_taken += n
            self._n_of[key] += n
            n_own += n

        try:
            yield take
        finally:
            self.n_taken -= n_own
            self._n_of -= Counter({key: n_own})  # which leaves out who has none

    def _has_room(self, key: str, n: int) -> bool:
        if self.n_taken + n <= self.n_max:
            return True
        part = self.n_max / len({key, *self._n_of})
        return self.n_taken + n <= 2 * self.n_max and self._n_of[key] + n <= part
