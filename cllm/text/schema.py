"""Says which JSON Schemas can be honoured, and makes those ready for the compiler of grammars.

A grammar holds an answer to a schema while it is written, so every keyword that constrains must be known to it: what it cannot hold is
refused by name rather than left out. Annotations (`title`, `default`, ...) are read over, as the standard wants. What a definition says
that nothing refers to does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, TypeAlias

from cllm.errors import GrammarInvalid

Schema: TypeAlias = dict[str, Any]

N_LEVELS_MAX: Final = 60  # of schemas in one another; the compiler's own reader gives up at 128 levels of JSON, two to a schema
# One blank, or a line break with its indentation: whatever a model may do between two values, it is never long.
WHITESPACE: Final = r" |\r?\n[ \t]{0,32}"
# Without \u: with it a name can be written in several ways, and a further member could pass for one that the schema constrains.
ESCAPES: Final = 'nrbtf\\"'

REFUSED: Final = frozenset(
    {
        *("not", "if", "then", "else", "propertyNames", "dependencies", "dependentRequired", "dependentSchemas"),
        *("contains", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef"),
    }
)
_MAPS: Final = ("properties", "patternProperties")  # of names to schemas
_LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLES: Final = ("items", "additionalProperties", "additionalItems")
# Formats that say how a value is meant, not how it is written: they constrain nothing.
_SILENT_FORMATS: Final = frozenset({"password", "path", "file-path", "directory-path", "binary", "int32", "int64", "float", "double"})


def prepared(text: str) -> Schema:
    """Return the schema in the JSON text, ready for `%json`. Raises: GrammarInvalid, which names the keyword and where it stands."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise GrammarInvalid("the schema is nested too deeply") from None
    except ValueError as error:
        raise GrammarInvalid(f"the schema is not JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarInvalid(f"a schema is an object, not {_shown(schema)}")
    for node, pointer in _reachable(schema):
        _prepare(node, pointer)
    schema["x-guidance"] = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES}
    return schema


def pointers(schema: Schema) -> list[str]:
    """Where the schema's parts stand, the outermost first."""
    return [pointer for _, pointer in _reachable(schema)]


# --- the parts of a schema ---------------------------------------------------------------------------------------------


def _reachable(root: Schema) -> Iterator[tuple[Schema, str]]:
    """Every schema that an answer could be held to, with its JSON pointer; a schema that several refer to comes once."""
    seen: set[int] = set()
    owed: list[tuple[Any, str, int]] = [(root, "#", 0)]
    while owed:
        node, pointer, level = owed.pop()
        if isinstance(node, bool) or id(node) in seen:
            continue
        if not isinstance(node, dict):
            raise GrammarInvalid(f"expected a schema, not {_shown(node)}", pointer)
        if level > N_LEVELS_MAX:
            raise GrammarInvalid(f"the schema has more than {N_LEVELS_MAX} levels", pointer)
        seen.add(id(node))
        yield node, pointer
        parts = [(part, place, level + 1) for part, place in _parts(node, pointer)]
        if "$ref" in node:
            parts.append((*_target(root, node["$ref"], pointer), 0))
        owed += reversed(parts)


def _parts(node: Schema, pointer: str) -> Iterator[tuple[Any, str]]:
    for name in _MAPS:
        if name in node:
            members = _expect(node, name, dict, "an object", pointer)
            yield from ((part, f"{pointer}/{name}/{_escaped(key)}") for key, part in members.items())
    for name in _LISTS:
        if name in node:
            members = _expect(node, name, list, "an array", pointer)
            yield from ((part, f"{pointer}/{name}/{i}") for i, part in enumerate(members))
    for name in _SINGLES:
        part = node.get(name, True)
        if isinstance(part, list):  # `items` of the drafts before 2020
            yield from ((one, f"{pointer}/{name}/{i}") for i, one in enumerate(part))
        else:
            yield part, f"{pointer}/{name}"


def _target(root: Schema, ref: Any, pointer: str) -> tuple[Any, str]:
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise GrammarInvalid(f"$ref: expected a place in this schema (#/...), not {_shown(ref)}", pointer)
    node: Any = root
    for step in ref.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            raise GrammarInvalid(f"$ref: there is no {_shown(ref)}", pointer)
    return node, ref


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


# --- what a part may say -----------------------------------------------------------------------------------------------


def _prepare(node: Schema, pointer: str) -> None:
    """Refuse what no grammar holds; write the rest as the compiler understands it."""
    for name in node:
        if name in REFUSED:
            raise GrammarInvalid(f"{name} is not supported", pointer, name)
    if node.pop("uniqueItems", False):
        raise GrammarInvalid("uniqueItems is not supported", pointer, "uniqueItems")
    if "$id" in node and pointer != "#":
        raise GrammarInvalid("$id is supported at the top only", pointer, "$id")
    if node.get("format") in _SILENT_FORMATS:
        del node["format"]
    if isinstance(node.get("pattern"), str):
        node["pattern"] = _pattern(node["pattern"])
    if isinstance(node.get("patternProperties"), dict):
        node["patternProperties"] = {_pattern(pattern): part for pattern, part in node["patternProperties"].items()}
    _check_n_properties(node, pointer)


def _check_n_properties(node: Schema, pointer: str) -> None:
    """A grammar cannot see that a further member's name came before, and a reader takes two of a name for one: they may be too few."""
    n_min = node.get("minProperties", 0)
    required = node.get("required", [])
    if not isinstance(n_min, int) or not isinstance(required, list) or n_min <= max(1, len({str(name) for name in required})):
        return
    if node.get("additionalProperties", True) is not False or node.get("patternProperties"):
        raise GrammarInvalid("minProperties is supported up to the number of required properties", pointer, "minProperties")


def _pattern(pattern: str) -> str:
    """`pattern`, of JavaScript's kind, for a reader that takes `[`, `&&` and `~~` inside a class for more than characters."""
    written, in_class, skip = [], False, False
    for letter in pattern:
        if skip:
            skip = False
        elif letter == "\\":
            skip = True
        elif in_class and letter in "[&~":
            written.append("\\")
        elif letter in "[]":
            in_class = letter == "["
        written.append(letter)
    return "".join(written)


def _expect(node: Schema, name: str, kind: type, wanted: str, pointer: str) -> Any:
    value = node[name]
    if not isinstance(value, kind):
        raise GrammarInvalid(f"{name}: expected {wanted}, not {_shown(value)}", pointer, name)
    return value


def _shown(value: Any) -> str:
    return json.dumps(value)[:60]
