"""Reads what models write between the markers of a tool call: what a reader of that is, and those of calls whose arguments are JSON."""

from __future__ import annotations

import json
import math
import re
from enum import Enum
from typing import Any, Final, NoReturn, Protocol

N_NESTED_MAX: Final = 128  # brackets within brackets in arguments
N_HEAD_MAX: Final = 512  # characters before the arguments where the name stands outside of them

NAME_KEYS: Final = frozenset({"name", "tool_name", "function_name"})
ARGUMENT_KEYS: Final = frozenset({"arguments", "parameters", "args"})

_BLANKS: Final = " \t\r\n"
_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_SURROGATE = re.compile("[\ud800-\udfff]")
_SCALAR_END = re.compile(r"[,}\] \t\r\n]")
_CLOSING: Final = {"{": "}", "[": "]"}


class Body(Protocol):
    """One call's inside. `name` and `fragments` fill as text comes; a fragment is a piece of the arguments' JSON."""

    name: str | None
    fragments: list[str]  # not yet taken
    is_complete: bool
    is_bad: bool  # it is no call

    def push(self, text: str, pos: int) -> int:
        """Read `text` from `pos` on; return where the call ends, or the text. Where it is bad the place means nothing.

        Below `pos` a call ends that was known to do so by what came behind it.
        """


# --- JSON --------------------------------------------------------------------------------------------------------------


class JsonValue:
    """Finds the end of one JSON value. It looks at strings and brackets only; whether the rest is JSON, a parser must say."""

    def __init__(self) -> None:
        self.is_complete = False
        self.is_bad = False
        self._open: list[str] = []  # the brackets that must still close
        self._in_string = False
        self._escaped = False
        self._is_scalar: bool | None = None

    def push(self, text: str, pos: int) -> int:
        """Read `text` from `pos` on; return where the value ends, or the text."""
        if self._is_scalar is None and pos < len(text):
            self._is_scalar = text[pos] not in '"{['
        if self._is_scalar:
            end = _SCALAR_END.search(text, pos)
            self.is_complete = end is not None
            return len(text) if end is None else end.start()
        while pos < len(text) and not (self.is_complete or self.is_bad):
            pos = self._in(text, pos) if self._in_string else self._out(text, pos)
        return pos

    def _in(self, text: str, pos: int) -> int:
        if self._escaped:
            self._escaped = False
            return pos + 1
        found = _IN_STRING.search(text, pos)
        if found is None:
            return len(text)
        if found[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.is_complete = not self._open
        return found.end()

    def _out(self, text: str, pos: int) -> int:
        found = _OUTSIDE.search(text, pos)
        if found is None:
            return len(text)
        letter = found[0]
        if letter == '"':
            self._in_string = True
        elif letter in _CLOSING:
            self._open.append(_CLOSING[letter])
            self.is_bad = len(self._open) > N_NESTED_MAX
        elif self._open[-1] != letter:
            self.is_bad = True
        else:
            self._open.pop()
            self.is_complete = not self._open
        return found.end()


def read_json(text: str, *, strict: bool = True) -> Any:
    """The value of `text`; unless `strict`, with line ends and the like in strings. Raises: ValueError, also for what only Python takes for
    JSON.
    """
    try:
        return json.loads(text, strict=strict, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def as_object(text: str) -> str | None:
    """`text` if it is one JSON object, as a call's arguments must be; None if it is none.

    Line ends and tabs in its strings are escaped. Models write them as they are, where they hold a whole file, and mean nothing else. For
    half a character stands U+FFFD.
    """
    for strict in (True, False):
        try:
            value = read_json(text, strict=strict)
        except ValueError:
            continue
        if not isinstance(value, dict):
            return None
        return text if strict and not ("\\u" in text and _has_half(value)) else written(value)
    return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits)  # which no JSON could say again


def _has_half(value: Any) -> bool:
    """Whether a text in it, which was read from JSON, has half a character (a lone U+D800 to U+DFFF): no UTF-8 has it, and few readers."""
    return _SURROGATE.search(json.dumps(value, ensure_ascii=False)) is not None


def written(value: Any) -> str:
    """`value` as JSON, with U+FFFD in place of half characters. Raises: ValueError for what JSON has no word for."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if not _SURROGATE.search(text):
            return text
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")  # both halves of one are that
    except (TypeError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error


class _Place(Enum):
    """Where in the object of a call."""

    OPENING = 1
    BEFORE_KEY = 2
    KEY = 3
    COLON = 4
    BEFORE_VALUE = 5
    VALUE = 6
    AFTER_VALUE = 7


class ObjectBody:
    """`{"name": ..., "arguments": {...}}`, in any order. Arguments may be an object, or its JSON text as a string."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.fragments: list[str] = []
        self.is_complete = False
        self.is_bad = False
        self._place = _Place.OPENING
        self._value = JsonValue()
        self._raw = ""  # of a key, or of a value that is read as a whole
        self._key = ""
        self._streams = False  # whether the value is told as it comes
        self._has_arguments = False

    def push(self, text: str, pos: int) -> int:
        """See `Body.push`."""
        while pos < len(text) and not (self.is_complete or self.is_bad):
            if self._place in (_Place.KEY, _Place.VALUE):
                pos = self._read_value(text, pos)
            elif text[pos] in _BLANKS:
                pos += 1
            elif self._place is _Place.BEFORE_VALUE:
                self._begin_value(text[pos])
            else:
                pos += self._pass(text[pos])
        return pos

    def _pass(self, letter: str) -> int:
        """Take one of the object's own letters; return how many were taken, as a key's quote belongs to the key."""
        if self._place is _Place.OPENING and letter == "{":
            self._place = _Place.BEFORE_KEY
        elif self._place is _Place.BEFORE_KEY and letter == '"':
            self._place, self._value, self._raw, self._streams = _Place.KEY, JsonValue(), "", False
            return 0
        elif self._place is _Place.COLON and letter == ":":
            self._place = _Place.BEFORE_VALUE
        elif self._place is _Place.AFTER_VALUE and letter == ",":
            self._place = _Place.BEFORE_KEY
        elif self._place in (_Place.BEFORE_KEY, _Place.AFTER_VALUE) and letter == "}":
            self._end()
        else:
            self.is_bad = True
        return 1

    def _begin_value(self, letter: str) -> None:
        self._place, self._value, self._raw = _Place.VALUE, JsonValue(), ""
        self._streams = self._key in ARGUMENT_KEYS and letter == "{"
        if self._key in ARGUMENT_KEYS:
            self.is_bad = self._has_arguments
            self._has_arguments = True

    def _read_value(self, text: str, pos: int) -> int:
        end = self._value.push(text, pos)
        if self._streams:
            self.fragments.append(text[pos:end])
        elif self._place is _Place.KEY or self._key in NAME_KEYS | ARGUMENT_KEYS:
            self._raw += text[pos:end]
        self.is_bad = self._value.is_bad
        if self._value.is_complete:
            self._end_value()
        return end

    def _end_value(self) -> None:
        try:
            if self._place is _Place.KEY:
                self._key, self._place = str(read_json(self._raw)), _Place.COLON
                return
            if self._key in NAME_KEYS:
                self._take_name(read_json(self._raw))
            elif self._key in ARGUMENT_KEYS and not self._streams:
                self._take_arguments(read_json(self._raw))
        except ValueError:
            self.is_bad = True
        self._place = _Place.AFTER_VALUE

    def _take_name(self, name: Any) -> None:
        self.is_bad = not isinstance(name, str) or not name or self.name is not None
        self.name = str(name)

    def _take_arguments(self, value: Any) -> None:
        if isinstance(value, str) and value.strip():
            self.fragments.append(_SURROGATE.sub("\ufffd", value))
        elif value in (None, ""):
            self._has_arguments = False
        else:
            self.is_bad = True

    def _end(self) -> None:
        self.is_bad = self.name is None
        self.is_complete = not self.is_bad
        if not self._has_arguments:
            self.fragments.append("{}")


class NamedBody:
    """A name, what stands between, and an object of arguments: `look_up[ARGS]{...}`. `head` matches all before it, the name in a group."""

    def __init__(self, head: re.Pattern[str]) -> None:
        self.name: str | None = None
        self.fragments: list[str] = []
        self.is_complete = False
        self.is_bad = False
        self._pattern = head
        self._head = ""
        self._value = JsonValue()

    def push(self, text: str, pos: int) -> int:
        """See `Body.push`."""
        if self.name is None:
            pos = self._read_head(text, pos)
        if self.name is not None and not self.is_bad:
            end = self._value.push(text, pos)
            self.fragments.append(text[pos:end])
            self.is_bad, self.is_complete = self._value.is_bad, self._value.is_complete
            return end
        return pos

    def _read_head(self, text: str, pos: int) -> int:
        end = text.find("{", pos)
        self._head += text[pos:] if end < 0 else text[pos:end]
        if end >= 0:
            found = self._pattern.fullmatch(self._head)
            self.name = next(name for name in found.groups() if name) if found else None
            self.is_bad = found is None
        self.is_bad = self.is_bad or len(self._head) > N_HEAD_MAX
        return len(text) if end < 0 else end
