"""What a tool must be like before a model is told of it: every surface's tools are held to it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cllm.errors import InvalidRequest
from cllm.text.tools import Tool, Toolbox

N_TOOLS_MAX: Final = 512
N_MEMBERS_MAX: Final = 10_000  # of one schema, at all levels together
N_MEMBERS_ALL_MAX: Final = 100_000  # of all tools' schemas
N_CHARS_ALL_MAX: Final = 1 << 20  # of names and texts in them
N_LEVELS_MAX: Final = 64  # of JSON in a schema; the longest in use have some ten
_NAME: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_NO_PARAMETERS: Final = {"type": "object", "properties": {}}
_SAY_PROPERTIES: Final = {"properties", "$ref", "allOf", "anyOf", "oneOf"}


def check_toolbox(toolbox: Toolbox, *, name: str, parameters: str) -> None:
    """Check what types cannot say. `name` and `parameters` are what the surface calls these fields of a tool. Raises: InvalidRequest."""
    if len(toolbox.tools) > N_TOOLS_MAX:
        raise InvalidRequest(f"tools: more than {N_TOOLS_MAX}", param="tools")
    names: set[str] = set()
    n_members = n_chars = 0
    for i, tool in enumerate(toolbox.tools):
        place = toolbox.place(i)
        _check_name(tool, names, f"{place}.{name}")
        n_more_members, n_more_chars = _check_schema(tool.parameters, f"{place}.{parameters}")
        n_members, n_chars = n_members + n_more_members, n_chars + n_more_chars
        _check_all(n_members, n_chars, "their schemas have")


def check_others(tools: Sequence[Mapping[str, Any]]) -> None:
    """Hold tools that are not called here, and are kept and told as they were sent, to the same sizes. Raises: InvalidRequest."""
    n_members = n_chars = 0
    owed: list[Any] = [tools]
    while owed:
        members, n_more_chars = _members(owed.pop())
        n_members, n_chars = n_members + len(members), n_chars + n_more_chars
        _check_all(n_members, n_chars, "those that are no functions have")
        owed += [member for member in members if isinstance(member, dict | list)]


def _check_all(n_members: int, n_chars: int, who_have: str) -> None:
    if n_members > N_MEMBERS_ALL_MAX or n_chars > N_CHARS_ALL_MAX:
        limit = f"{N_MEMBERS_ALL_MAX} members" if n_members > N_MEMBERS_ALL_MAX else f"{N_CHARS_ALL_MAX} characters"
        raise InvalidRequest(f"tools: {who_have} more than {limit} together", param="tools")


def _members(value: Any) -> tuple[list[Any], int]:
    """What an object or a list has in it, and how many characters there are in names and texts."""
    members = list(value.values()) if isinstance(value, dict) else value
    n_chars = sum(map(len, value)) if isinstance(value, dict) else 0
    return members, n_chars + sum([len(member) for member in members if isinstance(member, str)])


def parameters_of(given: dict[str, Any] | None) -> dict[str, Any]:
    """A function's schema; that of a function without arguments where none is given."""
    return with_properties({"type": "object", **given}) if given else dict(_NO_PARAMETERS)


def with_properties(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with properties, none if need be: some templates look for them, and functions without arguments often have none."""
    return schema if schema.keys() & _SAY_PROPERTIES else {**schema, "properties": {}}


def _check_name(tool: Tool, names: set[str], place: str) -> None:
    if not _NAME.fullmatch(tool.name):
        raise InvalidRequest(f"{place}: expected 1 to 128 letters, digits or any of _.:/-", param=place)
    if tool.name in names:
        raise InvalidRequest(f"{place}: {tool.name!r} comes twice", param=place)
    names.add(tool.name)


def _check_schema(schema: Any, place: str) -> tuple[int, int]:
    """How many members it has, and how many characters in names and texts."""
    if schema.get("type") != "object":
        raise InvalidRequest(f"{place}.type: arguments are an object", param=f"{place}.type")
    n_members = n_chars = 0
    owed = [(schema, 1)]
    while owed:
        value, level = owed.pop()
        members, n_more_chars = _members(value)
        n_members, n_chars = n_members + len(members), n_chars + n_more_chars
        if level > N_LEVELS_MAX or n_members > N_MEMBERS_MAX:
            limit = f"{N_LEVELS_MAX} levels" if level > N_LEVELS_MAX else f"{N_MEMBERS_MAX} members"
            raise InvalidRequest(f"{place}: the schema has more than {limit}", param=place)
        owed += [(member, level + 1) for member in members if isinstance(member, dict | list)]
    return n_members, n_chars
