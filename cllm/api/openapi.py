"""GET /openapi.json, made of the types that validate, and GET /docs, the same for people."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec
from quart import Blueprint, Response

import cllm
from cllm.api.context import Context
from cllm.api.docs_page import page
from cllm.api.errors import ERROR_SCHEMAS
from cllm.api.operations import HTML, JSON, Operation

OPERATIONS = (
    Operation(method="GET", path="/openapi.json", about="this API for programs", public=True),
    Operation(method="GET", path="/docs", about="this API for people", gives=(HTML,), public=True),
)
SCHEMAS = "#/components/schemas/"
_CSP = "default-src 'none'; style-src 'unsafe-inline'"
_REASONS = {
    400: "the request is malformed, of the wrong type, out of range, or can never fit",
    401: "a key is wanted",
    403: "the operator has not enabled it, or not for pages of this origin",
    404: "no such model or object",
    408: "the body did not come in time",
    409: "it cannot be done as things stand",
    413: "the body is too large",
    429: "the key has as much under way as it may",
    500: "the model failed on this request, or the server has a bug",
    501: "known, but not served here",
    503: "loading, draining, the queue is full, or what it needs is taken by others",
    504: "the request's time was over before its first token",
}


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("openapi", __name__)
    described, shown = _pages(context.operations)

    @routes.get("/openapi.json")
    async def openapi() -> Response:
        return Response(described, content_type=JSON)

    @routes.get("/docs")
    async def docs() -> Response:
        headers = {"Content-Security-Policy": _CSP, "X-Content-Type-Options": "nosniff"}
        return Response(shown, 200, headers, content_type="text/html; charset=utf-8")

    return routes


@functools.lru_cache(maxsize=1)  # they are the same for every app, and take a tenth of a second
def _pages(operations: tuple[Operation, ...]) -> tuple[bytes, str]:
    """The document as JSON, and for people."""
    described = document(operations)
    return msgspec.json.encode(described), page(described)


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """The OpenAPI document of `operations`."""
    bodies = list({id(one.body): one.body for one in operations if one.body is not None}.values())
    refs, components = msgspec.json.schema_components(bodies, ref_template=SCHEMAS + "{name}")
    by_body = {id(body): ref for body, ref in zip(bodies, refs, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.public_path, {})[one.method.lower()] = _operation(one, by_body.get(id(one.body)))
    return {
        "openapi": "3.1.0",
        "info": {"title": "cLLM", "version": cllm.__version__, "description": "Members of a body that are not named here are ignored."},
        "paths": paths,
        "components": {
            "schemas": {**components, **dict(ERROR_SCHEMAS.values())},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _operation(one: Operation, body: dict[str, Any] | None) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _id(one),
        "summary": one.about if one.alias_of is None else f"as {one.alias_of}",
        "security": [] if one.public else [{}, {"bearer": []}, {"key": []}],
        "responses": {str(one.status): _answer(one), **{str(status): _error(one, status) for status in one.error_statuses}},
    }
    if one.parameters:
        described["parameters"] = [{"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in one.parameters]
    if body is not None:
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    return described


def _id(one: Operation) -> str:
    words = one.path.replace("<path:", "").translate(str.maketrans("/.-<>:", "______")).strip("_")
    return f"{one.method.lower()}_{words or 'index'}"


def _answer(one: Operation) -> dict[str, Any]:
    return {"description": one.about, "content": {kind: {} for kind in one.gives}}


def _error(one: Operation, status: int) -> dict[str, Any]:
    name, _ = ERROR_SCHEMAS[one.errors]
    schema = {} if status in one.own_bodies else {"schema": {"$ref": SCHEMAS + name}}
    return {"description": _REASONS[status], "content": {JSON: schema}}
