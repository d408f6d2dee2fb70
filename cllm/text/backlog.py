"""Text that a reader has still to read, some of it once more: in pieces, and not without bound."""

from __future__ import annotations

from typing import Final

N_PIECE_MAX: Final = 1024  # characters: a reader searches and copies what it holds at each marker, so that it should hold little
N_AGAIN_MAX: Final = 1 << 16  # characters that one answer has read once more, while everybody's next step waits


class Backlog:
    """What is still to be read."""

    __slots__ = ("_n_again_left", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[str] = []  # the next one last
        self._n_again_left = N_AGAIN_MAX

    def put(self, text: str) -> None:
        """Let `text` be read next."""
        self._pieces += [text[start : start + N_PIECE_MAX] for start in range(0, len(text), N_PIECE_MAX)][::-1]

    def put_again(self, text: str) -> bool:
        """Let `text` be read next, which has been read in vain; return whether it may be.

        Each marker in it may begin another vain reading, and a model may be made to write any number of them.
        """
        may_be = len(text) <= self._n_again_left
        if may_be:
            self._n_again_left -= len(text)
            self.put(text)
        return may_be

    def take(self) -> str:
        """Return what is to be read now; "" when that is nothing."""
        return self._pieces.pop() if self._pieces else ""
