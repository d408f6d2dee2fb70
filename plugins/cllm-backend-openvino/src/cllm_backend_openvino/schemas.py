"""Writes JSON Schemas in the grammar language that OpenVINO compiles.

OpenVINO reads schemas too, but passes over keywords that it does not know, lets members follow that break what was said of others, and lets
a model write blanks for ever. What is written here fits the schema, whatever comes of it; where a grammar would have to allow more than the
schema does, the keyword is refused. Sometimes it allows less: members come in the order of the schema, beside named ones there are no
others, and numbers are as long as everybody reads them.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NoReturn
from urllib.parse import unquote

from cllm_backend_openvino.patterns import (
    ANY,
    IN_JSON,
    N_TIMES,
    Chars,
    Node,
    NotHeld,
    as_set,
    cost,
    in_json,
    literal,
    parsed,
    without,
    written,
)

COST_MAX: Final = 500.0  # in all of a form: seconds, and some 50 MB
N_ITEMS_MAX: Final = 1000

_ANNOTATIONS: Final = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
        "$id",
        "$defs",
        "definitions",
    }
)
_KEYWORDS: Final = {  # by the type that they are about
    "object": frozenset({"properties", "required", "additionalProperties", "minProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "integer": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
_IS: Final = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}
_SILENT_FORMATS: Final = frozenset({"password", "path", "file-path", "directory-path", "binary", "int32", "int64", "float", "double"})
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_DATE: Final = r"[12][0-9]{3}-((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_BYTE: Final = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    "ipv4": rf"{_BYTE}(\.{_BYTE}){{3}}",
    "email": r"[A-Za-z0-9]+([._+-][A-Za-z0-9]+)*@([a-z0-9]+(-[a-z0-9]+)*\.)+[a-z]{2,6}",
}
_NOTHING: Final = '""'
_COMMA: Final = ' ws "," ws '
_N_DIGITS: Final = 15  # that every reader of numbers keeps
_FRACTION: Final = '"." [0-9]{0,5} [1-9]'
# A character of a string is written as it is, or with the short escapes: with the long ones it could be half of one.
_CHAR: Final = as_set(Chars(without(ANY.ranges, IN_JSON))) + ' | "\\\\" ["\\\\/bfnrt]'
_RULES: Final = f"""\
ws ::= "" | " " | "\\n" [ ]{{0,16}}
char ::= {_CHAR}
string ::= "\\"" char* "\\""
digits ::= "0" | [1-9] [0-9]{{0,{_N_DIGITS - 1}}}
number ::= "-"? digits ("." [0-9]{{1,{_N_DIGITS}}})? ([eE] [+-]? [0-9]{{1,2}})?
integer ::= "0" | "-"? [1-9] [0-9]{{0,{_N_DIGITS - 1}}}
boolean ::= "true" | "false"
null ::= "null"
member ::= string ws ":" ws value
object ::= "{{" ws (member (ws "," ws member)* ws)? "}}"
array ::= "[" ws (value (ws "," ws value)* ws)? "]"
value ::= object | array | string | number | boolean | null
"""


def rules_of(source: str) -> str:
    """The rules of a schema, the first of which is ``form``. Raises: NotHeld."""
    schema = json.loads(source)
    writer = _Writer(schema)
    body = writer.of(schema, "#")
    return "\n".join([f"form ::= {body}", *writer.rules, *_rules(writer.sets), _RULES])


def choice_of(source: str) -> str:
    """The same of a list of texts."""
    return "form ::= " + " | ".join(literal(text) for text in json.loads(source))


def regex_of(source: str) -> str:
    """The same of a regular expression. Raises: NotHeld."""
    node = parsed(source, whole=True)
    _check_cost(cost(node))
    sets: dict[str, str] = {}
    body = written(node, sets)
    return "\n".join([f"form ::= {body}", *_rules(sets)])


def _rules(sets: dict[str, str]) -> list[str]:
    return [f"{name} ::= {body}" for body, name in sets.items()]


def _check_cost(total: float) -> None:
    if total > COST_MAX:
        raise NotHeld(f"counted characters: {math.ceil(total)} of them would take too long to compile, {COST_MAX:.0f} are the most")


class _Writer:
    """Writes a schema's parts; what is referred to becomes a rule."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self.rules: list[str] = []
        self.sets: dict[str, str] = {}
        self._names: dict[str, str] = {}  # of the rules of references
        self._bodies: dict[str, str] = {}  # of the other rules, with their names
        self._cost = 0.0

    def of(self, schema: Any, place: str) -> str:
        """What a value that fits the schema is, as a body of a rule."""
        if schema is True:
            return "value"
        if not isinstance(schema, dict):
            self._fail("false", place)
        told = {name: value for name, value in schema.items() if name not in _ANNOTATIONS and not name.startswith("x-")}
        if told.get("format") in _SILENT_FORMATS:
            del told["format"]
        for name in ("$ref", "anyOf", "oneOf", "allOf"):
            if name in told:
                return self._combined(told, name, place)
        if "enum" in told or "const" in told:
            return self._values(told, place)
        return self._typed(told, place)

    # --- combinations --------------------------------------------------------------------------------------------------

    def _combined(self, told: dict[str, Any], name: str, place: str) -> str:
        if others := told.keys() - {name}:
            self._fail(f"{name} beside {min(others)}", place)
        parts = told[name]
        if name == "$ref":
            return self._referred(parts, place)
        if name == "allOf" and len(parts) != 1:
            self._fail("allOf of several", place)
        # The server takes `oneOf` of schemas alone that exclude one another.
        return "(" + " | ".join(self.of(part, f"{place}/{name}/{i}") for i, part in enumerate(parts)) + ")"

    def _referred(self, reference: str, place: str) -> str:
        if reference not in self._names:
            name = self._names[reference] = f"ref{len(self._names)}"
            self.rules.append(f"{name} ::= {self.of(self._target(reference, place), reference)}")
        return self._names[reference]

    def _target(self, reference: str, place: str) -> Any:
        node = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                node = node[int(key)] if isinstance(node, list) else node[key]
            except (KeyError, ValueError, IndexError, TypeError):
                self._fail(f"$ref {reference}", place)
        return node

    def _values(self, told: dict[str, Any], place: str) -> str:
        if others := told.keys() - {"enum", "const", "type"}:
            self._fail(f"{min(others)} beside enum or const", place)
        values = [told["const"]] if "const" in told else list(told["enum"])
        if "const" in told and "enum" in told:
            self._fail("enum beside const", place)
        types = _types(told)
        fitting = [value for value in values if not types or any(_IS[name](value) for name in types)]
        if not fitting:
            self._fail("enum without a value of its type", place)
        return "(" + " | ".join(literal(json.dumps(value, ensure_ascii=False)) for value in fitting) + ")"

    # --- types ---------------------------------------------------------------------------------------------------------

    def _typed(self, told: dict[str, Any], place: str) -> str:
        keywords = told.keys() - {"type"}
        types = _types(told) or [name for name in _KEYWORDS if name != "integer" and keywords & _KEYWORDS[name]][:1]
        if not types:
            if keywords:
                self._fail(min(keywords), place)
            return "value"
        if unknown := keywords - frozenset().union(*(_KEYWORDS.get(name, frozenset()) for name in types)):
            self._fail(min(unknown), place)
        bodies = [self._of_type(name, {key: told[key] for key in keywords & _KEYWORDS[name]}, place) for name in types]
        return bodies[0] if len(bodies) == 1 else "(" + " | ".join(bodies) + ")"

    def _of_type(self, name: str, told: dict[str, Any], place: str) -> str:
        if name == "object":
            return self._object(told, place)
        if name == "array":
            return self._array(told, place)
        if name == "string":
            return self._string(told, place)
        if name in ("integer", "number") and told:
            return self._number(name, told, place)
        return name

    def _object(self, told: dict[str, Any], place: str) -> str:
        properties = {
            **told.get("properties", {}),
            **{name: True for name in told.get("required", ()) if name not in told.get("properties", {})},
        }
        others = told.get("additionalProperties", True)
        required = set(told.get("required", ()))
        if told.get("minProperties", 0) > len(required):
            self._fail("minProperties", place)
        if not properties:
            return self._free_object(others, place)
        if not isinstance(others, bool) and others != {}:
            self._fail("additionalProperties beside properties", place)
        members = [
            (f'{literal(json.dumps(name, ensure_ascii=False))} ws ":" ws {self.of(part, f"{place}/properties/{name}")}', name in required)
            for name, part in properties.items()
        ]
        return f'"{{" ws {self._members(members)} "}}"'

    def _free_object(self, others: Any, place: str) -> str:
        if others is False:
            return '"{" ws "}"'
        if others is True or others == {}:
            return "object"
        member = f'string ws ":" ws {self.of(others, f"{place}/additionalProperties")}'
        name = self._rule(member)
        return f'"{{" ws ({name} (ws "," ws {name})* ws)? "}}"'

    def _members(self, members: list[tuple[str, bool]]) -> str:
        """Members in their order, some of them left out; a comma comes before each but the first.

        For each place there are two rules, made from the last to the first: what follows where nothing was written so far, and where
        something was.
        """
        first, later = _NOTHING, "ws"
        for body, is_required in reversed(members):
            name = self._rule(body)
            begun = f"{name} {later}"
            going = f'ws "," ws {name} {later}'
            if is_required:
                first, later = self._rule(begun), self._rule(going)
            else:
                first, later = self._rule(f"{begun} | {first}"), self._rule(f"{going} | {later}")
        return first

    def _array(self, told: dict[str, Any], place: str) -> str:
        n_min, n_max = told.get("minItems", 0), told.get("maxItems")
        if not isinstance(told.get("items", True), bool | dict):
            self._fail("items as a list", place)
        if max(n_min, n_max or 0) > N_ITEMS_MAX:
            self._fail(f"more than {N_ITEMS_MAX} items", place)
        first = [self._rule(self.of(part, f"{place}/prefixItems/{i}")) for i, part in enumerate(told.get("prefixItems", ())[:n_max])]
        rest = told.get("items", True)
        is_closed = rest is False or (n_max is not None and n_max <= len(first))
        if is_closed and n_min > len(first):
            self._fail("minItems", place)
        begin = _COMMA.join(first) or _NOTHING
        if is_closed:
            return f'"[" ws {begin} ws "]"'
        item = self._rule(self.of(rest, f"{place}/items"))
        least, most = max(0, n_min - len(first)), None if n_max is None else n_max - len(first)
        if first:
            return f'"[" ws {begin} {_times(f"({_COMMA}{item})", least, most)} ws "]"'
        more = _times(f"({_COMMA}{item})", max(0, least - 1), None if most is None else most - 1)
        return f'"[" ws ({item} {more} ws){"" if least else "?"} "]"'

    def _string(self, told: dict[str, Any], place: str) -> str:
        if len([name for name in ("pattern", "format") if name in told]) + bool(told.keys() & {"minLength", "maxLength"}) > 1:
            self._fail("pattern, format and length beside one another", place)
        if "pattern" in told:
            return self._pattern(in_json(parsed(told["pattern"], whole=False)))
        if "format" in told:
            if told["format"] not in _FORMATS:
                self._fail(f"format {told['format']}", place)
            return self._pattern(in_json(parsed(_FORMATS[told["format"]], whole=True)))
        if not told:
            return "string"
        least, most = told.get("minLength", 0), told.get("maxLength")
        body = f'"\\"" {_times("char", least, most)} "\\""'
        return self._rule(body, cost=min(max(least, most or 0), N_TIMES))

    def _pattern(self, node: Node) -> str:
        return self._rule(f'"\\"" {written(node, self.sets)} "\\""', cost=cost(node))

    # --- numbers -------------------------------------------------------------------------------------------------------

    def _number(self, name: str, told: dict[str, Any], place: str) -> str:
        if "format" in told:
            self._fail(f"format {told['format']}", place)
        if any(isinstance(value, bool) for value in told.values()):
            self._fail("exclusive bounds that are no numbers", place)
        end = 10**_N_DIGITS - 1
        lows = [math.ceil(told.get("minimum", -end)), math.floor(told["exclusiveMinimum"]) + 1 if "exclusiveMinimum" in told else -end]
        highs = [math.floor(told.get("maximum", end)), math.ceil(told["exclusiveMaximum"]) - 1 if "exclusiveMaximum" in told else end]
        bodies = _whole_numbers(max(-end, *lows), min(end, *highs))
        if name == "number":  # what lies between two whole numbers that are within the bounds, or are them
            low = max(-end, math.ceil(told.get("minimum", -end)), math.ceil(told.get("exclusiveMinimum", -end)))
            high = min(end, math.floor(told.get("maximum", end)), math.floor(told.get("exclusiveMaximum", end)))
            bodies += [f"{body} {_FRACTION}" for body in _counting(max(0, low), high - 1)]
            bodies += [f'"-" {body} {_FRACTION}' for body in _counting(max(0, -high), -low - 1)]
        if not bodies:
            self._fail("a range without a whole number", place)
        return "(" + " | ".join(bodies) + ")"

    # --- rules ---------------------------------------------------------------------------------------------------------

    def _rule(self, body: str, *, cost: float = 0.0) -> str:
        """A rule of its own. What is written the same is the same rule, and costs nothing more."""
        if body not in self._bodies:
            self._cost += cost
            _check_cost(self._cost)
            self._bodies[body] = f"part{len(self._bodies)}"
            self.rules.append(f"{self._bodies[body]} ::= {body}")
        return self._bodies[body]

    def _fail(self, what: str, place: str) -> NoReturn:
        raise NotHeld(f"{what} (at {place})")


def _types(told: dict[str, Any]) -> list[str]:
    given = told.get("type", [])
    return [given] if isinstance(given, str) else list(given)


def _times(body: str, least: int, most: int | None) -> str:
    if most == 0:
        return _NOTHING
    if (least, most) == (0, None):
        return f"{body}*"
    return f"{body}{{{least},{'' if most is None else most}}}"


def _whole_numbers(low: int, high: int) -> list[str]:
    """Bodies for the whole numbers from `low` to `high`."""
    negative = [f'"-" {body}' for body in _counting(max(1, -high), -low)]
    return negative + _counting(max(0, low), high)


def _counting(low: int, high: int) -> list[str]:
    """The same where none is below 0."""
    bodies: list[str] = []
    for n_digits in range(len(str(low)), len(str(max(high, 0))) + 1):
        first = max(low, 10 ** (n_digits - 1) if n_digits > 1 else 0)
        last = min(high, 10**n_digits - 1)
        if first <= last:
            bodies += _same_length(str(first), str(last))
    return bodies


def _same_length(low: str, high: str) -> list[str]:
    if not low:
        return [_NOTHING]
    n = len(low) - 1
    if set(low[1:]) <= {"0"} and set(high[1:]) <= {"9"}:
        return [" ".join([_digit(low[0], high[0]), *([f"[0-9]{{{n},{n}}}"] if n else [])])]
    if low[0] == high[0]:
        return [f'"{low[0]}" {body}' for body in _same_length(low[1:], high[1:])]
    bodies = [f'"{low[0]}" {body}' for body in _same_length(low[1:], "9" * n)]
    if int(high[0]) - int(low[0]) > 1:
        bodies.append(f"{_digit(str(int(low[0]) + 1), str(int(high[0]) - 1))} [0-9]{{{n},{n}}}")
    return bodies + [f'"{high[0]}" {body}' for body in _same_length("0" * n, high[1:])]


def _digit(low: str, high: str) -> str:
    return f'"{low}"' if low == high else f"[{low}-{high}]"
