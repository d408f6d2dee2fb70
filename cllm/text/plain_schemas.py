"""Tools in plainer words than a client's, for chat templates that stumble over what is ordinary in a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cllm.text.schema_parts import LISTS, MAPS, SINGLES

_MAPS: Final = (*MAPS, "$defs", "definitions")
_TYPES: Final = ("string", "number", "integer", "boolean", "array", "object")  # for "null", and what is none, templates have no word


def plain(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return `tools` with schemas whose types are one name where that suffices, whose defaults are texts where a template might join them
    to others, and that have properties at the root.
    """
    return [{**tool, "function": {**tool["function"], "parameters": _parameters(tool["function"].get("parameters"))}} for tool in tools]


def _parameters(schema: Any) -> Any:
    told = _schema(schema) if isinstance(schema, dict) else {}
    properties = told.get("properties")
    return {**told, "properties": properties if isinstance(properties, dict) else {}}


def _schema(schema: Any) -> Any:
    """The same, and so all that it consists of; not by the names of members, since a parameter may be called `default`."""
    if not isinstance(schema, dict):
        return schema
    told = dict(schema)
    for name in _MAPS:
        if isinstance(parts := told.get(name), dict):
            told[name] = {key: _schema(part) for key, part in parts.items()}
    for name in (*LISTS, *SINGLES):
        if name in told:
            told[name] = [_schema(part) for part in told[name]] if isinstance(told[name], list) else _schema(told[name])
    if "default" in told and not isinstance(told["default"], str) and ("enum" in told or "oneOf" in told):
        told["default"] = json.dumps(told["default"], ensure_ascii=False)
    if told.get("required", ()) is None:
        del told["required"]
    return _with_plain_type(told) if "type" in told else told


def _with_plain_type(schema: dict[str, Any]) -> dict[str, Any]:
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    known = [each for each in types if each in _TYPES]
    if not known:
        return {name: value for name, value in schema.items() if name != "type"}
    return {**schema, "type": known[0] if len(known) == 1 else known}
