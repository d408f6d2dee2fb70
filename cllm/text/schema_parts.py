"""The parts that a JSON Schema consists of, and where each stands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

from cllm.errors import GrammarInvalid

Schema: TypeAlias = dict[str, Any]

MAPS: Final = ("properties", "patternProperties")  # of names to schemas
LISTS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
SINGLES: Final = ("items", "additionalProperties", "additionalItems")
N_PLACES_MAX: Final = 8192  # that are still to be looked at: each is kept with its pointer, and `true` and what comes twice are no parts
N_POINTER_MAX: Final = 2048  # characters of a pointer: a long name would be in that of all that is within
N_LEVELS_MAX: Final = 60  # of schemas in one another; the compiler's own reader gives up at 128 levels of JSON, two to a schema


def parts(schema: Schema) -> list[tuple[str, Schema]]:
    """The schema's parts with their JSON pointers, each before what it consists of."""
    return [(pointer, part) for part, pointer in reachable(schema)]


def reachable(root: Schema) -> Iterator[tuple[Schema, str]]:
    """Every schema that an answer could be held to, with its JSON pointer; a schema that several refer to comes once."""
    seen: set[int] = set()
    owed: list[tuple[Any, str, int]] = [(root, "#", 0)]
    while owed:
        node, pointer, level = owed.pop()
        if isinstance(node, bool) or id(node) in seen:
            continue
        if len(pointer) > N_POINTER_MAX:
            raise GrammarInvalid(f"the names that lead there have more than {N_POINTER_MAX} characters", pointer[:N_POINTER_MAX])
        if not isinstance(node, dict):
            raise GrammarInvalid(f"expected a schema, not {shown(node)}", pointer)
        if level > N_LEVELS_MAX:
            raise GrammarInvalid(f"the schema has more than {N_LEVELS_MAX} levels", pointer)
        seen.add(id(node))
        yield node, pointer  # whoever reads it may change it, before its parts are looked at
        held = [node.get(name) for name in (*MAPS, *LISTS, *SINGLES)]
        if len(owed) + sum(len(each) for each in held if isinstance(each, (dict, list))) > N_PLACES_MAX:
            raise GrammarInvalid(f"the schema has more than {N_PLACES_MAX} parts", pointer)
        parts = [(part, place, level + 1) for part, place in _parts(node, pointer)]
        if "$ref" in node:
            parts.append((*target(root, node["$ref"], pointer), 0))
        owed += reversed(parts)


def _parts(node: Schema, pointer: str) -> Iterator[tuple[Any, str]]:
    for name in MAPS:
        yield from ((part, f"{pointer}/{name}/{_escaped(key)}") for key, part in node.get(name, {}).items())
    for name in LISTS:
        yield from ((part, f"{pointer}/{name}/{i}") for i, part in enumerate(node.get(name, ())))
    for name in SINGLES:
        part = node.get(name, True)
        if isinstance(part, list):  # `items` of the drafts before 2020
            yield from ((one, f"{pointer}/{name}/{i}") for i, one in enumerate(part))
        else:
            yield part, f"{pointer}/{name}"


def target(root: Any, ref: Any, pointer: str) -> tuple[Any, str]:
    """The part of `root` that `ref` names, and where it stands. Raises: GrammarInvalid at `pointer`, where the reference stands."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        raise GrammarInvalid(f"$ref: expected a place in this schema (#/...), not {shown(ref)}", pointer)
    node = root
    for step in ref.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdecimal() and len(name) < 10 and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict) and name in node:
            node = node[name]
        else:
            raise GrammarInvalid(f"$ref: there is no {shown(ref)}", pointer)
    return node, ref


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def shown(value: Any) -> str:
    return json.dumps(value)[:60]
