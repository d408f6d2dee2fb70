"""Classes of characters in patterns, for a reader that takes more signs for operators in them than JavaScript and GBNF do."""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

_PIECE: Final = re.compile(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|.)|.", re.DOTALL)  # a character, or an escape


class _InClass(Enum):
    """Where in a class of a pattern, and so what a `-` is: a character, or what makes a range of two."""

    BEGIN = 1  # or behind a range
    CHARACTER = 2  # behind one, with which a range may begin
    RANGE = 3  # within one


def plain_classes(pattern: str) -> str:
    """`pattern`, of JavaScript's kind, for a reader that takes `[`, `&&`, `~~` and `--` inside a class for more than characters."""
    written: list[str] = []
    place: _InClass | None = None
    for piece in _PIECE.findall(pattern):
        is_opened = written[-1:] == ["["] and place is _InClass.BEGIN
        written.append(piece)
        if place is None:
            place = _InClass.BEGIN if piece == "[" else None
        elif piece == "]":
            place = None
        elif piece == "-" and place is _InClass.CHARACTER:
            place = _InClass.RANGE
        elif not (piece == "^" and is_opened):
            written[-1] = f"\\{piece}" if piece in ("[", "&", "~", "-") else piece
            place = _InClass.BEGIN if place is _InClass.RANGE else _InClass.CHARACTER
    return "".join(written)
