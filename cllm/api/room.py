"""How much long bodies may take while they are read and decoded: each is bounded, and so must all of them be together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs

from cllm.errors import Unavailable

N_BYTES_MAX = 256 * 1024 * 1024  # decoded, a body may be ten times as large, but few are at a time
RETRY_AFTER_S = 2.0


@attrs.define(eq=False)
class Room:
    """Bytes that are taken, of so many."""

    n_max: int = N_BYTES_MAX
    n_taken: int = 0

    @contextmanager
    def shared(self) -> Iterator[Callable[[int], None]]:
        """Give what takes so many bytes more, as they come, until this ends. Who is the only one may take more than all the room.

        What is given raises: Unavailable.
        """
        n_own = 0

        def take(n: int) -> None:
            nonlocal n_own
            if self.n_taken > n_own and self.n_taken + n > self.n_max:
                what = f"{self.n_taken // 2**20} MiB of long bodies are being read, and {self.n_max // 2**20} may be"
                raise Unavailable(f"{what}; a short one is answered", retry_after_s=RETRY_AFTER_S, code="bodies_busy")
            self.n_taken += n
            n_own += n

        try:
            yield take
        finally:
            self.n_taken -= n_own
