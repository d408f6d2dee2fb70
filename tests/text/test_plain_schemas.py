"""Schemas in plainer words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cllm.text.plain_schemas import plain


def told(parameters: Any) -> Any:
    """What becomes of a tool's parameters."""
    before = json.dumps(parameters)
    (tool,) = plain([{"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}])
    assert json.dumps(parameters) == before
    assert tool == {"type": "function", "function": {"name": "f", "description": "d", "parameters": tool["function"]["parameters"]}}
    return tool["function"]["parameters"]


@pytest.mark.parametrize(
    ("schema", "plainer"),
    [
        ({"type": ["string", "null"]}, {"type": "string"}),
        ({"type": ["null", "string", "integer"]}, {"type": ["string", "integer"]}),
        ({"type": ["integer"]}, {"type": "integer"}),
        ({"type": "null", "description": "none"}, {"description": "none"}),
        ({"type": ["null"]}, {}),
        ({"type": [["string"], {}, 5]}, {}),
        ({"enum": ["a"], "default": None}, {"enum": ["a"], "default": "null"}),
        ({"oneOf": [{"type": "null"}], "default": {"\u00fc": 1}}, {"oneOf": [{}], "default": '{"\u00fc": 1}'}),
        ({"enum": ["a"], "default": "a"}, {"enum": ["a"], "default": "a"}),
        ({"type": "integer", "default": 5}, {"type": "integer", "default": 5}),
        ({"type": "object", "required": None}, {"type": "object"}),
        (True, True),
        (None, None),
    ],
)
def test_it_is_so_wherever_a_schema_stands(schema: Any, plainer: Any) -> None:
    for place in ("properties", "patternProperties", "$defs", "definitions"):
        assert told({"properties": {}, place: {"a": schema}}) == {"properties": {}, place: {"a": plainer}}
    for place in ("anyOf", "oneOf", "allOf", "prefixItems", "items"):
        assert told({"properties": {"a": {place: [schema]}}}) == {"properties": {"a": {place: [plainer]}}}
    for place in ("items", "additionalProperties", "additionalItems"):
        assert told({"properties": {"a": {place: schema}}}) == {"properties": {"a": {place: plainer}}}


def test_a_parameter_may_have_the_name_of_a_keyword() -> None:
    properties = {name: {"type": "string"} for name in ("default", "enum", "oneOf", "type", "required", "properties", "items")}
    assert told({"type": "object", "properties": properties}) == {"type": "object", "properties": properties}


@pytest.mark.parametrize("given", [None, "text", [], {}, {"properties": None}, {"properties": []}])
def test_there_are_properties_at_the_root_whatever_was_there(given: Any) -> None:
    assert told(given) == {"properties": {}}
