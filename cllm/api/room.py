"""How much long bodies may take while they are read and decoded: each is bounded, and so must all of them be together."""

from __future__ import annotations

from collections.abc import Iterator
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
    def taken(self, n: int) -> Iterator[None]:
        """Take `n` bytes while this lasts; one body may be larger than all the room, if it is the only one. Raises: Unavailable."""
        if self.n_taken and self.n_taken + n > self.n_max:
            what = f"{self.n_taken // 2**20} MiB of long bodies are being read, and {self.n_max // 2**20} may be"
            raise Unavailable(f"{what}; a short one is answered", retry_after_s=RETRY_AFTER_S, code="bodies_busy")
        self.n_taken += n
        try:
            yield
        finally:
            self.n_taken -= n
