"""Reads calls that are written in tags: their values are texts, whose types the function's schema tells."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final

import attrs

from cllm.errors import GrammarInvalid
from cllm.text.call_bodies import N_HEAD_MAX, read_json, written
from cllm.text.call_expressions import NOT_PYTHON
from cllm.text.markers import N_BLANKS_MAX
from cllm.text.schema_parts import target
from cllm.text.tools import Tool


@attrs.frozen(kw_only=True)
class Tags:
    """How a family writes a call in tags: `<function=look_up><parameter=city>Ulm</parameter></function>`."""

    opening: str  # before the name; "": the name comes first
    before_key: str
    before_value: str  # behind the key
    after_value: str
    closing: str
    on_lines: bool = False  # values stand on lines of their own, whose ends do not belong to them
    after_name: str = ""  # behind the name; "": the first key, or the end
    calls_ends: tuple[str, ...] = ()  # what ends all calls: behind a value it shows that `closing` was left out
    calls_begins: tuple[str, ...]  # what begins the next one, if a function's name stands behind it


FUNCTION_TAGS: Final = Tags(
    opening="<function=",
    after_name=">",
    before_key="<parameter=",
    before_value=">",
    after_value="</parameter>",
    closing="</function>",
    on_lines=True,
    calls_ends=("</tool_call>",),
    calls_begins=("<tool_call>", "<function="),
)
SEED_TAGS: Final = attrs.evolve(
    FUNCTION_TAGS, on_lines=False, calls_ends=("</seed:tool_call>",), calls_begins=("<seed:tool_call>", "<function=")
)
INVOKE_TAGS: Final = Tags(
    opening='<invoke name="',
    after_name='">',
    before_key='<parameter name="',
    before_value='">',
    after_value="</parameter>",
    closing="</invoke>",
    calls_ends=("</minimax:tool_call>",),
    calls_begins=("<minimax:tool_call>", '<invoke name="'),
)
DSML_TAGS: Final = Tags(
    opening='<｜DSML｜invoke name="',
    after_name='">',
    before_key='<｜DSML｜parameter name="',
    before_value='">',
    after_value="</｜DSML｜parameter>",
    closing="</｜DSML｜invoke>",
    calls_ends=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    calls_begins=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="'),
)
KEY_TAGS: Final = Tags(
    opening="",
    before_key="<arg_key>",
    before_value="<arg_value>",
    after_value="</arg_value>",
    closing="</tool_call>",
    calls_begins=("<tool_call>",),
)
N_BEHIND: Final = 64  # blanks between a value's end and what follows it
N_LOOKED_AT_AGAIN: Final = 1024  # characters at the end of a text that goes on, in which what `_LEFT_OUT` finds may have begun
# The next argument, or the call's end, where a value's own end was left out, as it happens in long contexts.
_LEFT_OUT: Final = re.compile(r"\n(?:<parameter=(?P<name>[^>\n]{1,512})>\n|</function>\s{0,64}</tool_call>)")
_IN_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]")  # as a function's may be
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
        self._types = _Types({})
        self._not_given: set[str] = set()  # names of arguments that the schema has
        self._looked_until = 0  # for ends that were left out
        marks = (tags.before_key, tags.closing, *tags.calls_ends, *tags.calls_begins)
        self._n_behind = 2 * N_BEHIND + 2 * max(map(len, marks)) + max(map(len, tools), default=0) + 1  # characters that tell

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
        self.is_bad = bool(taken[0].strip()) if taken else len(self._text) > N_HEAD_MAX + N_BLANKS_MAX
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
        if self.name in self._tools:
            parameters = self._tools[self.name].parameters
            self._types, properties = _Types(parameters), parameters.get("properties")
            self._not_given = set(properties) if isinstance(properties, Mapping) else set()
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
            self._not_given.discard(self._key)
            self._looked_until = 0
        return taken is not None

    def _read_value(self) -> bool:
        """One that may have the tag that ends it within, as a file does that is written in such tags."""
        end = self._value_end()
        if end is None:
            return False
        inside, self._text, self._from = self._text[: end[0]], self._text[end[1] :], 0
        self._tell(inside.removeprefix("\n").removesuffix("\n") if self._tags.on_lines else inside)
        self._reads = self._read_next
        return True

    def _value_end(self) -> tuple[int, int] | None:
        """Where the value ends, and where what is behind it begins; None while that is not known."""
        tags = self._tags
        next_ones = (tags.before_key, tags.closing)
        while True:
            pos = self._text.find(tags.after_value, self._from)
            left_out = self._left_out(len(self._text) if pos < 0 else pos) if tags.on_lines else None
            if left_out is not None:
                return left_out, left_out
            if pos < 0:
                self._from = max(self._from, len(self._text) - len(tags.after_value) + 1)
                return None
            behind = pos + len(tags.after_value)
            rest, is_all_there = self._text[behind : behind + self._n_behind].lstrip(), len(self._text) >= behind + self._n_behind
            if rest.startswith(next_ones) or (is_all_there and not rest):  # no value goes on after so many blanks
                return pos, behind
            is_over = self._is_over(rest)
            if is_over:  # without the function's end: no call, and the next one may be
                self.is_bad = True
                return None
            if not is_all_there and (is_over is None or any(end.startswith(rest) for end in next_ones)):
                return None
            self._from = behind  # it belongs to the value

    def _is_over(self, rest: str) -> bool | None:
        """Whether what stands behind a value ends all calls, or begins the next one of a function that there is; None: more must come."""
        tags = self._tags
        if rest.startswith(tags.calls_ends):
            return True
        name = rest
        while mark := next((begin for begin in tags.calls_begins if name.startswith(begin)), ""):
            name = name[len(mark) :].lstrip()
        tools = self._tools if name != rest else ()
        if any(name.startswith(tool) and len(name) > len(tool) and not _IN_NAME.match(name, len(tool)) for tool in tools):
            return True
        return None if any(one.startswith(name) for one in (*tags.calls_ends, *tags.calls_begins, *tools)) else False

    def _left_out(self, end: int) -> int | None:
        """Where a value ends before `end` though nothing says so: at an argument that is still to come, or at the call's end."""
        for found in _LEFT_OUT.finditer(self._text, self._looked_until, end):
            is_end = found["name"] is None and "<function=" not in self._text[: found.start()]  # or that of a call that the value quotes
            if is_end or found["name"] in self._not_given:
                return found.start()
        self._looked_until = max(self._looked_until, end - N_LOOKED_AT_AGAIN)
        return None

    def _tell(self, text: str) -> None:
        key, *rest = _KEY_END.split(self._key, maxsplit=1)
        value = written(text) if _TYPE_IS_TEXT in "".join(rest) else self._typed(key, text)
        self.fragments.append((", " if self._n_values else "{") + f"{json.dumps(key)}: {value}")
        self._n_values += 1

    def _typed(self, key: str, text: str) -> str:
        """The value as JSON: of a type that the schema names where it is one, else a string where it may be, else JSON where it is some."""
        types = self._types.of(key)
        if types == frozenset(("string",)):  # whatever it looks like; whole files are written this way
            return written(text)
        try:
            value = read_json(text)
        except ValueError:
            value = text if types is None or "string" in types else _read_loosely(text, types)
        if types is not None and "string" in types and (isinstance(value, str) or not _type_names(value) & types):
            value = text
        return written(value)


# --- types -------------------------------------------------------------------------------------------------------------


_TYPES_OF: Final = {"number": frozenset(("integer", "number"))}  # a whole number is one, too
N_LEVELS_MAX: Final = 32  # of schemas that refer to one another; what stands deeper says nothing


class _Types:
    """What a function's schema says of the types of its arguments."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._parameters = parameters
        self._known: dict[int, frozenset[str] | None] = {}  # by identity: each part is looked at once, whatever refers to it

    def of(self, name: str) -> frozenset[str] | None:
        """The types that an argument may have; None where the schema does not say."""
        said = [types for part in self._parts_for(name) if (types := self._of_part(part)) is not None]
        return frozenset.intersection(*said) if said else None

    def _parts_for(self, name: str) -> Iterator[Any]:
        """What the schema, and all that holds beside it, has for a member of this name."""
        seen: set[int] = set()
        owed: list[Any] = [self._parameters]
        while owed:
            schema = owed.pop()
            if not isinstance(schema, Mapping) or id(schema) in seen:
                continue
            seen.add(id(schema))
            properties = schema.get("properties")
            if isinstance(properties, Mapping) and name in properties:
                yield properties[name]
            elif not schema.get("patternProperties"):
                yield schema.get("additionalProperties")
            owed += _listed(schema, "allOf")
            with suppress(GrammarInvalid):
                owed += [target(self._parameters, schema["$ref"], "")[0]] if "$ref" in schema else []

    def _of_part(self, schema: Any, level: int = 0) -> frozenset[str] | None:
        if not isinstance(schema, Mapping) or level > N_LEVELS_MAX:
            return None
        if id(schema) not in self._known:
            self._known[id(schema)] = None  # for one that refers to itself
            said = [types for types in self._said(schema, level + 1) if types is not None]
            self._known[id(schema)] = frozenset.intersection(*said) if said else None
        return self._known[id(schema)]

    def _said(self, schema: Mapping[str, Any], level: int) -> Iterator[frozenset[str] | None]:
        """What each keyword says, all of which holds."""
        named = schema.get("type")
        if isinstance(named, str):
            named = [named]
        if isinstance(named, list):
            yield frozenset().union(*[_TYPES_OF.get(name, (name,)) for name in named if isinstance(name, str)])
        if "$ref" in schema:
            yield self._of_target(schema["$ref"], level)
        for part in _listed(schema, "allOf"):
            yield self._of_part(part, level)
        for word in ("anyOf", "oneOf"):
            each = [self._of_part(part, level) for part in _listed(schema, word)]
            known = [types for types in each if types is not None]
            yield frozenset().union(*known) if known and len(known) == len(each) else None
        values = [schema["const"]] if "const" in schema else _listed(schema, "enum")
        yield frozenset().union(*map(_type_names, values)) if values else None

    def _of_target(self, ref: Any, level: int) -> frozenset[str] | None:
        try:
            return self._of_part(target(self._parameters, ref, "")[0], level)
        except GrammarInvalid:
            return None


def _listed(schema: Mapping[str, Any], word: str) -> list[Any]:
    value = schema.get(word)
    return value if isinstance(value, list) else []


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


def _read_loosely(text: str, types: frozenset[str]) -> Any:
    """The value, of one of `types`, of what is JSON but for line ends within its strings, or what is written as Python does: templates
    write earlier values so, and models copy that. Else the text itself.
    """
    for read in (partial(read_json, strict=False), _read_python):
        with suppress(*NOT_PYTHON):
            value = read(text)
            if _type_names(value) & types:
                return value
    return text


def _read_python(text: str) -> Any:
    return read_json(written(ast.literal_eval(text.strip())))
