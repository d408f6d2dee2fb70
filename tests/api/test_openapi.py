"""GET /openapi.json and GET /docs tell of every route, and of nothing else."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from cllm.api.app import OPERATIONS
from cllm.api.docs_page import kind
from cllm.api.openapi import document


async def test_every_route_has_an_operation_and_every_operation_a_route(serve: Any) -> None:
    async with serve() as api:
        rules = list(api.app.url_map.iter_rules())
    served = {(method, rule.rule) for rule in rules for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}}
    assert served == {(one.method, one.path) for one in OPERATIONS}


async def test_the_document_describes_bodies_by_the_types_that_validate_them(serve: Any) -> None:
    async with serve(api_key=("k",)) as api:
        answer = await api.get("/openapi.json")
    assert answer.status == 200
    chat = answer.json["paths"]["/v1/chat/completions"]["post"]
    name = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    schema = answer.json["components"]["schemas"][name]
    assert schema["required"] == ["messages"]
    assert {"type": "number", "minimum": 0.0, "maximum": 1.0} in schema["properties"]["top_p"]["anyOf"]
    assert set(chat["responses"]) >= {"200", "400", "401", "404", "408", "413", "429", "500", "501", "503", "504"}


def test_every_reference_leads_somewhere() -> None:
    described = document(OPERATIONS)
    names = re.findall(r'"\$ref":"#/components/schemas/([^"]+)"', msgspec.json.encode(described).decode())
    assert names
    assert set(names) <= set(described["components"]["schemas"])


def test_no_two_operations_have_the_same_id() -> None:
    ids = [one["operationId"] for methods in document(OPERATIONS)["paths"].values() for one in methods.values()]
    assert len(ids) == len(set(ids))


async def test_the_page_shows_every_path_needs_no_key_and_loads_nothing(serve: Any) -> None:
    async with serve(api_key=("k",)) as api:
        answer = await api.get("/docs")
    page = answer.body.decode()
    assert answer.headers["content-type"].startswith("text/html")
    assert [one.path for one in OPERATIONS if f"<code>{one.public_path}</code>" not in page] == []
    assert not re.search(r"(src|href)\s*=|<script|@import|url\(", page)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "string"),
        ({"type": "array", "items": {"$ref": "#/components/schemas/Message"}, "maxItems": 3}, "array of Message (items ≤ 3)"),
        ({"enum": ["a", "b"]}, "'a' | 'b'"),
        ({}, "any"),
    ],
)
def test_a_field_is_shown_in_a_few_words(schema: dict[str, Any], words: str) -> None:
    assert kind(schema) == words
