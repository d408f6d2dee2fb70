"""Reads what models write between the markers of a tool call: a name and arguments, each in the form of some family of models."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, NoReturn, Protocol

import attrs

from cllm.text.tools import Tool

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
        """Read `text` from `pos` on; return where the call ends, or the text. Where it is bad the place means nothing."""


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


def read_json(text: str) -> Any:
    """The value of `text`. Raises: ValueError, also for what only Python takes for JSON."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits)  # which no JSON could say again


def written(value: Any) -> str:
    """`value` as JSON. Half characters, which no UTF-8 has, are escaped. Raises: ValueError for what JSON has no word for."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from error


def _read_python(text: str) -> Any:
    """The value of what is written as Python does: templates write earlier values so, and models copy that. Else the text itself."""
    try:
        value = ast.literal_eval(text.strip())
        written(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
    return value


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


# --- types -------------------------------------------------------------------------------------------------------------

_JSON_WORDS: Final = {"true": True, "false": False, "null": None}


def _types_of(schema: Any) -> frozenset[str] | None:
    """The types that a schema names for a value; None where it does not say."""
    if not isinstance(schema, Mapping):
        return None
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str))
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            each = [_types_of(one) for one in schema[word]]
            known = [types for types in each if types is not None]
            return frozenset().union(*known) if known and len(known) == len(each) else None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset().union(*map(_type_names, values)) if isinstance(values, list) and values else None


def _type_names(value: Any) -> frozenset[str]:
    """What JSON Schema calls the type of a value."""
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset(("integer", "number"))
    if isinstance(value, float):
        return frozenset(("number",))
    if isinstance(value, str):
        return frozenset(("string",))
    if value is None:
        return frozenset(("null",))
    return frozenset(("array",)) if isinstance(value, list) else frozenset(("object",))


# --- tags --------------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Tags:
    """How a family writes a call in tags: `<function=look_up><parameter=city>Ulm</parameter></function>`."""

    opening: str  # before the name; "": the name comes first
    before_key: str
    before_value: str  # behind the key
    after_value: str
    closing: str
    after_name: str = ""  # behind the name; "": the first key, or the end
    on_lines: bool = False  # values stand on lines of their own, whose ends do not belong to them


FUNCTION_TAGS: Final = Tags(
    opening="<function=",
    after_name=">",
    before_key="<parameter=",
    before_value=">",
    after_value="</parameter>",
    closing="</function>",
    on_lines=True,
)
SEED_TAGS: Final = attrs.evolve(FUNCTION_TAGS, on_lines=False)
INVOKE_TAGS: Final = Tags(
    opening='<invoke name="',
    after_name='">',
    before_key='<parameter name="',
    before_value='">',
    after_value="</parameter>",
    closing="</invoke>",
)
DSML_TAGS: Final = Tags(
    opening='<｜DSML｜invoke name="',
    after_name='">',
    before_key='<｜DSML｜parameter name="',
    before_value='">',
    after_value="</｜DSML｜parameter>",
    closing="</｜DSML｜invoke>",
)
KEY_TAGS: Final = Tags(opening="", before_key="<arg_key>", before_value="<arg_value>", after_value="</arg_value>", closing="</tool_call>")
_KEY_END: Final = re.compile(r'["<]')
_TYPE_IS_TEXT: Final = ' string="true'  # what some write behind the key


class TaggedBody:
    """A call in tags: values are texts, whose type the function's schema tells."""

    def __init__(self, tools: Mapping[str, Tool], tags: Tags = FUNCTION_TAGS) -> None:
        self.name: str | None = None
        self.fragments: list[str] = []
        self.is_complete = False
        self.is_bad = False
        self._tools = tools
        self._tags = tags
        self._text = ""
        self._from = 0  # where what is looked for may begin
        self._reads: Callable[[], bool] = self._read_opening if tags.opening else self._read_name
        self._key = ""
        self._n_values = 0

    def push(self, text: str, pos: int) -> int:
        """See `Body.push`."""
        n_before = len(self._text)
        self._text += text[pos:]
        n_all, n_read = len(self._text), 0
        while not (self.is_complete or self.is_bad) and self._reads():
            n_read = n_all - len(self._text)
        return pos + n_read - n_before if self.is_complete or self.is_bad else len(text)

    def _until(self, *ends: str) -> tuple[str, str] | None:
        """Take what stands before the first of `ends`, and that; None when there is none of them yet."""
        found = [(pos, end) for end in ends if (pos := self._text.find(end, self._from)) >= 0]
        if not found:
            self._from = max(0, len(self._text) - max(map(len, ends)) + 1)
            return None
        pos, end = min(found)
        inside, self._text, self._from = self._text[:pos], self._text[pos + len(end) :], 0
        return inside, end

    def _nothing_until(self, *ends: str) -> str | None:
        """Read on to one of `ends`, before which only blanks may stand; return which it was."""
        taken = self._until(*ends)
        self.is_bad = bool(taken[0].strip()) if taken else len(self._text.strip()) > N_HEAD_MAX
        return taken[1] if taken else None

    def _read_opening(self) -> bool:
        is_there = self._nothing_until(self._tags.opening) is not None
        if is_there:
            self._reads = self._read_name
        return is_there

    def _read_name(self) -> bool:
        tags = self._tags
        taken = self._until(tags.after_name) if tags.after_name else self._until(tags.before_key, tags.closing)
        if taken is None:
            self.is_bad = len(self._text) > N_HEAD_MAX
            return False
        self.name = taken[0].strip()
        self.is_bad = not self.name
        self._goes_on(taken[1])
        return True

    def _goes_on(self, end: str) -> None:
        if end == self._tags.closing:
            self.fragments.append("}" if self._n_values else "{}")
            self.is_complete = not self.is_bad
        else:
            self._reads = self._read_key if end == self._tags.before_key else self._read_next

    def _read_next(self) -> bool:
        end = self._nothing_until(self._tags.before_key, self._tags.closing)
        if end is not None:
            self._goes_on(end)
        return end is not None

    def _read_key(self) -> bool:
        taken = self._until(self._tags.before_value)
        if taken is not None:
            self._key, self._reads = taken[0].strip(), self._read_value
        return taken is not None

    def _read_value(self) -> bool:
        taken = self._until(self._tags.after_value)
        if taken is not None:
            self._tell(taken[0].removeprefix("\n").removesuffix("\n") if self._tags.on_lines else taken[0])
            self._reads = self._read_next
        return taken is not None

    def _tell(self, text: str) -> None:
        key, *rest = _KEY_END.split(self._key, maxsplit=1)
        value = written(text) if _TYPE_IS_TEXT in "".join(rest) else self._typed(key, text)
        self.fragments.append((", " if self._n_values else "{") + f"{json.dumps(key)}: {value}")
        self._n_values += 1

    def _typed(self, key: str, text: str) -> str:
        """The value as JSON: of a type that the schema names where it is one, else a string where it may be, else JSON where it is some."""
        tool = self._tools.get(self.name or "")
        properties = tool.parameters.get("properties") if tool is not None else None
        types = _types_of(properties.get(key)) if isinstance(properties, Mapping) else None
        if types == frozenset(("string",)):  # whatever it looks like; whole files are written this way
            return written(text)
        try:
            value = read_json(text)
        except ValueError:
            value = text if types is None or "string" in types else _read_python(text)
        if types is not None and "string" in types and (isinstance(value, str) or not _type_names(value) & types):
            value = text
        return written(value)


# --- a function's call -------------------------------------------------------------------------------------------------


class PythonBody:
    """A call as Python writes it: `look_up(city="Ulm", days=3)`. Told when it is complete."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.fragments: list[str] = []
        self.is_complete = False
        self.is_bad = False
        self._text = ""
        self._pos = 0  # so much of it has been looked at
        self._quote = ""  # of the string that it ends in
        self._depth = 0

    def push(self, text: str, pos: int) -> int:
        """See `Body.push`."""
        n_before = len(self._text)
        self._text += text[pos:]
        if self.name is None:
            name, bracket, _ = self._text.partition("(")
            self.is_bad = len(name) > N_HEAD_MAX or not _NAME.fullmatch(name)
            if not bracket or self.is_bad:
                return len(text)
            self.name, self._pos = name.strip(), len(name)
        self._look()
        if self.is_complete:
            self._end()
            return pos + self._pos - n_before
        return len(text)

    def _look(self) -> None:
        while (found := _IN_PYTHON.search(self._text, self._pos)) and not (self.is_complete or self.is_bad):
            letter, self._pos = found[0], found.end()
            if self._quote:
                self._quote = "" if letter == self._quote else self._quote
            elif letter in "'\"":
                self._quote = letter
            elif letter in "([{":
                self._depth += 1
                self.is_bad = self._depth > N_NESTED_MAX
            elif letter in ")]}":
                self._depth -= 1
                self.is_complete = not self._depth
        if not found:
            self._pos = max(self._pos, len(self._text) - self._text.endswith("\\"))  # which may belong to what comes

    def _end(self) -> None:
        try:
            arguments = _keywords(self._text[self._text.index("(") : self._pos])
            self.fragments.append(written(arguments))
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            self.is_bad, self.is_complete = True, False


_PYTHON_STRING = re.compile(r"""(['"])(?:\\.|(?!\1)[^\\])*\1""", re.DOTALL)
_NAME = re.compile(r"\s*[\w.-]*\s*")
_IN_PYTHON = re.compile(r"""\\.|['"()\[\]{}]""", re.DOTALL)


def _keywords(text: str) -> dict[str, Any]:
    """The values of a call's keywords, of which `text` has the brackets and what is in them. Raises: what Python's parser does."""
    text = _PYTHON_STRING.sub(lambda string: string[0].replace("\n", "\\n").replace("\r", "\\r"), text)  # which templates write as they are
    call = ast.parse(f"f{text}", mode="eval").body
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no call by keywords")
    values: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("keywords that are not named")
        values[keyword.arg] = ast.literal_eval(_AsPython().visit(keyword.value))
    return values


class _AsPython(ast.NodeTransformer):
    """JSON's words as values."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in _JSON_WORDS:
            raise ValueError(f"{node.id} is no value")
        return ast.Constant(_JSON_WORDS[node.id])


# --- objects whose strings have marks of their own ---------------------------------------------------------------------

QUOTE: Final = '<|"|>'  # around strings in Gemma's calls
_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)(\s*:)")


class MarkedBody:
    """`call:look_up{city:<|"|>Ulm<|"|>,days:3}`: an object whose keys stand bare. Told when it is complete."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.fragments: list[str] = []
        self.is_complete = False
        self.is_bad = False
        self._text = ""
        self._start = 0  # where the object begins
        self._pos = 0  # so much has been looked at
        self._depth = 0
        self._is_inside = False  # a string

    def push(self, text: str, pos: int) -> int:
        """See `Body.push`."""
        n_before = len(self._text)
        self._text += text[pos:]
        if self.name is None and not self._read_name():
            return len(text)
        if not self._look():
            return len(text)
        try:
            self.fragments.append(written(read_json(_as_json(self._text[self._start : self._pos]))))
            self.is_complete = True
        except ValueError:
            self.is_bad = True
        return pos + self._pos - n_before

    def _read_name(self) -> bool:
        head, brace, _ = self._text.partition("{")
        begun = head.strip()
        is_name = begun.startswith("call:") if brace else begun[:5] == "call:"[: len(begun)]
        self.is_bad = not is_name or len(begun) > N_HEAD_MAX
        if not brace or self.is_bad:
            return False
        self.name = begun.removeprefix("call:").strip()
        self._start = self._pos = len(head)
        return True

    def _look(self) -> bool:
        """Whether the object is at its end."""
        for found in _IN_MARKED.finditer(self._text, self._pos):
            mark, self._pos = found[0], found.end()
            if mark == QUOTE:
                self._is_inside = not self._is_inside
            elif not self._is_inside:
                self._depth += 1 if mark in "{[" else -1
                if not self._depth:
                    return True
        self._pos = max(self._pos, len(self._text) - len(QUOTE) + 1)  # a mark may have begun
        return False


_IN_MARKED = re.compile(re.escape(QUOTE) + r"|[{}\[\]]")


def _as_json(text: str) -> str:
    """What stands between marks is a string, and what stands before a colon a key."""
    pieces = text.split(QUOTE)
    for i, piece in enumerate(pieces):
        pieces[i] = json.dumps(piece, ensure_ascii=False) if i % 2 else _KEY.sub(r'\1"\2"\3', piece)
    return "".join(pieces)
