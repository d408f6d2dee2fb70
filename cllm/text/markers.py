"""Finds markers in text that arrives in pieces: which comes first, and what might still become one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

N_BLANKS_MAX: Final = 1024  # held back at once: they are looked through again at each token, and what follows so many is no marker


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """The place and name of the marker that stands first in `text`; of several at one place the longest."""
    found = [(pos, -len(marker), marker) for marker in markers if (pos := text.find(marker)) >= 0]
    if not found:
        return None
    pos, _, marker = min(found)
    return pos, marker


def n_undecided(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of `text` that might be the beginning of a marker."""
    return max([_n_begun(text, marker) for marker in markers], default=0)


def n_before_blanks(text: str, end: int) -> int:
    """Characters of `text[:end]` before the blanks at its end, which a marker may yet swallow: the last `N_BLANKS_MAX` of them at most."""
    return max(len(text[:end].rstrip()), end - N_BLANKS_MAX)


def _n_begun(text: str, marker: str) -> int:
    for n in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:n]):
            return n
    return 0
