"""One object for each token, of which kept texts have millions: a number of its own takes 32 bytes, its place in a list 8."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_SHARED: Final[dict[int, int]] = {}  # as many as vocabularies have


def shared(tokens: Iterable[int]) -> list[int]:
    """Return the same tokens by the objects that all have. From any thread."""
    return [_SHARED.setdefault(token, token) for token in tokens]
