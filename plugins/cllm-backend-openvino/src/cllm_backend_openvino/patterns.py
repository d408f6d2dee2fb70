"""Reads regular expressions, and writes them in the grammar language that OpenVINO compiles.

OpenVINO reads regular expressions too, but passes over some of what it does not know, so that an answer could be something else than was
asked for. What is read here means the same in every dialect, or less than in any: whatever comes of it matches. The rest is refused.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left
from collections.abc import Iterable
from typing import Final, NoReturn, TypeAlias

import attrs

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # of code points, in order, both ends included

_LAST: Final = 0x10FFFF
_SURROGATES: Final = (0xD800, 0xDFFF)
_BEYOND_ASCII: Final = (0x80, _LAST)
# Of a range of characters OpenVINO holds each byte to what the range has at its place: across these, other characters would come of it.
_BY_LENGTH: Final = ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFF), (0x1000, 0xCFFF), (0xD000, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x3FFFF),
                     (0x40000, 0xFFFFF), (0x100000, _LAST))  # fmt: skip
_DIGITS: Final = ((0x30, 0x39),)
_LETTERS: Final = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_BLANKS: Final = ((0x09, 0x0D), (0x20, 0x20))
_BLANKS_ANYWHERE: Final = (*_BLANKS, (0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200D), (0x2028, 0x2029),
                           (0x202F, 0x202F), (0x205F, 0x2060), (0x3000, 0x3000), (0xFEFF, 0xFEFF))  # fmt: skip
_CONTROL: Final = {"n": 0x0A, "t": 0x09, "r": 0x0D, "f": 0x0C, "v": 0x0B}
_COUNTS: Final = re.compile(r"\{(\d{1,5})(,?)(\d{0,5})\}")
_HEX: Final = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})")
_PRINTABLE: Final = range(0x20, 0x7F)
_COST_MIN: Final = 0.25  # of a set that is a rule
N_LEVELS_MAX: Final = 50  # of groups in one another
N_TIMES: Final = 200  # from which on more of the same cost no more: no token is that long


class NotHeld(Exception):
    """An answer cannot be held to it; the message says to what."""


@attrs.frozen
class Chars:
    """Any one of some characters."""

    ranges: Ranges


@attrs.frozen
class Row:
    """One part after the other."""

    parts: tuple[Node, ...]


@attrs.frozen
class Either:
    """One of several."""

    parts: tuple[Node, ...]


@attrs.frozen
class Times:
    """Something several times; without a `most`, as often as one likes."""

    part: Node
    least: int
    most: int | None


Node: TypeAlias = Chars | Row | Either | Times

ANY: Final = Chars(((0, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, _LAST)))
IN_JSON: Final = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
"""The characters that stand in no JSON string as themselves."""


def without(ranges: Iterable[tuple[int, int]], removed: Iterable[tuple[int, int]]) -> Ranges:
    """The characters of `ranges` that are none of `removed`."""
    gone: list[tuple[int, int]] = []  # in order, none of them within another
    for low, high in sorted(removed):
        if not gone or high > gone[-1][1]:
            gone.append((low if not gone else max(low, gone[-1][1] + 1), high))
    ends, left = [high for _, high in gone], []
    for start, last in sorted(ranges):
        a = start
        for low, high in itertools.islice(gone, bisect_left(ends, start), None):
            if low > last:
                break
            if a < low:
                left.append((a, low - 1))
            a = high + 1
        if a <= last:
            left.append((a, last))
    return tuple(sorted(left))


def parsed(pattern: str, *, whole: bool) -> Node:
    """Read a regular expression. Of a `whole` one all of the text is the match; otherwise it is found somewhere in it. Raises: NotHeld."""
    return _Reader(pattern, whole=whole).read()


def in_json(node: Node) -> Node:
    """The same, of characters alone that stand in a JSON string as themselves. Raises: NotHeld where nothing is left."""
    if isinstance(node, Chars):
        ranges = without(node.ranges, IN_JSON)
        if not ranges:
            raise NotHeld("quotes, backslashes and control characters in a pattern")
        return Chars(ranges)
    if isinstance(node, Times):
        return Times(in_json(node.part), node.least, node.most)
    return type(node)(tuple(in_json(part) for part in node.parts))


def written(node: Node, sets: dict[str, str]) -> str:
    """The node in the grammar language; `sets` has the rules that it refers to, by their bodies.

    A set of many characters is a rule of its own: what of the vocabulary fits is found out once then, not for each time that it may come.
    """
    if isinstance(node, Chars):
        body = as_set(node)
        return sets.setdefault(body, f"set{len(sets)}") if cost(node) > _COST_MIN else body
    if isinstance(node, Times):
        if node.most == 0:
            return '""'
        part, most = written(node.part, sets), "" if node.most is None else node.most
        counted = f"({part})" if isinstance(node.part, Times) else part  # one count is read behind a part, and no second one
        return f"{counted}{{{node.least},{most}}}"
    if not node.parts:
        return '""'
    return "(" + (" " if isinstance(node, Row) else " | ").join([written(part, sets) for part in node.parts]) + ")"


def as_set(chars: Chars) -> str:
    """A set of characters in the grammar language, in place."""
    ranges = [
        (max(low, first), min(high, last)) for low, high in chars.ranges for first, last in _BY_LENGTH if low <= last and high >= first
    ]
    return "[" + "".join([_letter(low) if low == high else f"{_letter(low)}-{_letter(high)}" for low, high in ranges]) + "]"


def literal(text: str) -> str:
    """A text in the grammar language."""
    return '"' + "".join(_letter(ord(letter)) for letter in text) + '"'


def cost(node: Node) -> float:
    """What it takes to compile, in places of an answer for which most of the vocabulary must be looked at."""
    if isinstance(node, Chars):
        n_printable = sum(min(high, 0x7E) - max(low, 0x20) + 1 for low, high in node.ranges if low <= 0x7E and high >= 0x20)
        is_wide = any(high - low > 0x80 for low, high in node.ranges)
        return max(n_printable, 1) / len(_PRINTABLE) + is_wide  # a letter that is none of these is a place, too
    if isinstance(node, Times):
        return cost(node.part) * min(max(1, node.least, node.most or 0), N_TIMES)
    return sum(map(cost, node.parts))


def _letter(code: int) -> str:
    letter = chr(code)
    if code < 0x80 and letter.isalnum():
        return letter
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


class _Reader:
    def __init__(self, pattern: str, *, whole: bool) -> None:
        self._text = pattern
        self._pos = 0
        self._whole = whole
        self._level = 0

    def read(self) -> Node:
        """All of it."""
        node = self._either()
        if self._pos < len(self._text):
            self._fail(self._text[self._pos])
        return node

    def _either(self) -> Node:
        parts = [self._row()]
        while self._take("|"):
            parts.append(self._row())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _row(self) -> Node:
        """One alternative. At the outermost level it may begin with ^ and end with $."""
        is_outer = self._level == 0
        at_begin = is_outer and self._take("^")
        parts: list[Node] = []
        at_end = False
        while self._pos < len(self._text) and self._peek() not in "|)":
            if is_outer and self._peek() == "$" and self._text[self._pos + 1 : self._pos + 2] in ("", "|"):
                self._pos += 1
                at_end = True
            else:
                parts.append(self._counted())
        if is_outer and not self._whole:
            anything = Times(ANY, 0, None)
            parts = [*([] if at_begin else [anything]), *parts, *([] if at_end else [anything])]
        return parts[0] if len(parts) == 1 else Row(tuple(parts))

    def _counted(self) -> Node:
        node = self._atom()
        counts: tuple[int, int | None]
        if self._take("*"):
            counts = (0, None)
        elif self._take("+"):
            counts = (1, None)
        elif self._take("?"):
            counts = (0, 1)
        elif self._peek() == "{":
            counts = self._counts()
        else:
            return node
        self._take("?")  # how much of a text it would rather match does not matter
        if self._peek() and self._peek() in "*+?{":
            self._fail(self._peek())
        return Times(node, *counts)

    def _counts(self) -> tuple[int, int | None]:
        match = _COUNTS.match(self._text, self._pos)
        if match is None:
            self._fail("{")
        self._pos = match.end()
        least = int(match[1])
        most = (int(match[3]) if match[3] else None) if match[2] else least
        if most is not None and most < least:
            self._fail(match[0])
        return least, most

    def _atom(self) -> Node:
        letter = self._text[self._pos]
        self._pos += 1
        if letter == "(":
            return self._group()
        if letter == "[":
            return Chars(self._class())
        if letter == ".":
            return Chars(without(ANY.ranges, ((0x0A, 0x0A), (0x0D, 0x0D), (0x85, 0x85), (0x2028, 0x2029))))
        if letter == "\\":
            return Chars(self._escape(negated=False))
        if letter in "^$*+?{}]":
            self._fail(letter)
        return Chars(_one(letter))

    def _group(self) -> Node:
        if self._peek() == "?":
            self._pos += 1
            if not self._take(":"):
                self._fail("(?" + self._peek())
        self._level += 1
        if self._level > N_LEVELS_MAX:
            raise NotHeld(f"more than {N_LEVELS_MAX} groups in one another")
        node = self._either()
        self._level -= 1
        if not self._take(")"):
            self._fail("(")
        return node

    def _class(self) -> Ranges:
        negated = self._take("^")
        ranges: list[tuple[int, int]] = []
        while not self._take("]"):
            low = self._member(negated=negated)
            if self._peek() == "-" and self._text[self._pos + 1 : self._pos + 2] not in ("]", ""):
                self._pos += 1
                high = self._member(negated=negated)
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1] or low[0][0] > high[0][0]:
                    self._fail("-")
                low = ((low[0][0], high[0][0]),)
            ranges += low
        if not ranges:
            self._fail("[]")
        return without(ANY.ranges, ranges) if negated else without(ANY.ranges, without(ANY.ranges, ranges))

    def _member(self, *, negated: bool) -> Ranges:
        letter = self._peek()
        following = self._text[self._pos : self._pos + 2]
        if letter in ("", "[") or following in ("&&", "--", "~~"):  # sets within sets, for some readers
            self._fail(following or "[")
        self._pos += 1
        return self._escape(negated=negated) if letter == "\\" else _one(letter)

    def _escape(self, *, negated: bool) -> Ranges:
        """What follows a backslash. Of what lies beyond ASCII, dialects differ: it is in no class, and in no complement of one."""
        if (match := _HEX.match(self._text, self._pos)) is not None:
            self._pos = match.end()
            code = int(match[1] or match[2], 16)
            if _SURROGATES[0] <= code <= _SURROGATES[1]:
                self._fail("\\" + match[0])
            return ((code, code),)
        letter = self._peek()
        self._pos += 1
        if letter in _CONTROL:
            return ((_CONTROL[letter], _CONTROL[letter]),)
        if letter and letter in "dws":
            inner = {"d": _DIGITS, "w": _LETTERS, "s": _BLANKS}[letter]
            beyond = _BLANKS_ANYWHERE if letter == "s" else (_BEYOND_ASCII,)
            return (*inner, *beyond) if negated else inner
        if letter and letter in "DWS" and not negated:
            inner = {"D": (*_DIGITS, _BEYOND_ASCII), "W": (*_LETTERS, _BEYOND_ASCII), "S": _BLANKS_ANYWHERE}[letter]
            return without(ANY.ranges, inner)
        if not letter or letter.isalnum() or not letter.isascii():
            self._fail("\\" + letter)
        return _one(letter)

    def _peek(self) -> str:
        return self._text[self._pos : self._pos + 1]

    def _take(self, letter: str) -> bool:
        if self._peek() != letter:
            return False
        self._pos += 1
        return True

    def _fail(self, what: str) -> NoReturn:
        raise NotHeld(f"{what} in a regular expression, at character {self._pos}")


def _one(letter: str) -> Ranges:
    return ((ord(letter), ord(letter)),)
