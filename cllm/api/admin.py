"""POST /models/load and /models/unload, by llama-server's names, where the operator allows it."""

from __future__ import annotations

from typing import Any

import msgspec
import trio
from quart import Blueprint, Response

from cllm.api import wire
from cllm.api.context import Context
from cllm.api.openai.shapes import json_response
from cllm.api.operations import Operation
from cllm.errors import NotPermitted, Unavailable
from cllm.serve.house import RETRY_AFTER_S, Tenant


class ModelRequest(msgspec.Struct):
    """The body: a model by any of its names."""

    model: str


decoder = msgspec.json.Decoder(ModelRequest)


def _operation(path: str, about: str) -> Operation:
    return Operation(method="POST", path=path, about=about, body=ModelRequest, also=(403, 404, 503))


OPERATIONS = (
    _operation("/models/load", "load a model, where the operator allows it"),
    _operation("/models/unload", "unload a model when it has answered what it was asked, where the operator allows it"),
)


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("admin", __name__)

    @routes.post("/models/load")
    async def load() -> Response:
        tenant = await _tenant(context)
        await context.held(tenant)
        return json_response(_state(tenant))

    @routes.post("/models/unload")
    async def unload() -> Response:
        tenant = await _tenant(context)
        with trio.move_on_after(context.settings.load_wait_s):
            await context.house.unload(tenant)
            return json_response(_state(tenant))
        raise Unavailable(f"{tenant.name} still answers what it was asked", retry_after_s=RETRY_AFTER_S, code="unloading")

    return routes


async def _tenant(context: Context) -> Tenant:
    if not context.settings.enable_admin:
        raise NotPermitted("the operator has not enabled this; --enable-admin does")
    return context.house.find((await wire.read(decoder)).model)


def _state(tenant: Tenant) -> dict[str, Any]:
    return {"success": True, "model": tenant.name, "status": {"value": tenant.state.value}}
