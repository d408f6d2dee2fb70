"""Loading and unloading of models by llama-server's names and of LoRA adapters by vLLM's, where the operator allows it."""

from __future__ import annotations

import os
from typing import Annotated, Any

import msgspec
import trio
from msgspec import Meta
from quart import Blueprint, Response

from cllm.api import wire
from cllm.api.context import Context
from cllm.api.openai.shapes import json_response
from cllm.api.operations import Operation
from cllm.errors import InvalidRequest, NotPermitted, Unavailable
from cllm.serve.house import RETRY_AFTER_S, State, Tenant


class ModelRequest(msgspec.Struct):
    """The body: a model by any of its names."""

    model: str


class LoadAdapterRequest(msgspec.Struct):
    """The body: a file below --lora-dir, and what it is to be called after its base and a colon."""

    lora_name: Annotated[str, Meta(pattern=r"^[\w.-]{1,100}$")]
    lora_path: Annotated[str, Meta(min_length=1, max_length=1000)]
    base_model_name: str | None = None


class UnloadAdapterRequest(msgspec.Struct):
    """The body: the adapter's name, or the model's that it makes with its base."""

    lora_name: str
    base_model_name: str | None = None


decoder = msgspec.json.Decoder(ModelRequest)
load_adapter_decoder = msgspec.json.Decoder(LoadAdapterRequest)
unload_adapter_decoder = msgspec.json.Decoder(UnloadAdapterRequest)


def _operation(path: str, about: str, body: type = ModelRequest) -> Operation:
    return Operation(method="POST", path=path, about=about + ", where the operator allows it", body=body, also=(403, 404, 503))


OPERATIONS = (
    _operation("/models/load", "load a model"),
    _operation("/models/unload", "unload a model when it has answered what it was asked"),
    _operation("/v1/load_lora_adapter", "serve a model with a LoRA adapter as one more", LoadAdapterRequest),
    _operation("/v1/unload_lora_adapter", "serve it no longer", UnloadAdapterRequest),
)


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("admin", __name__)

    @routes.post("/models/load")
    async def load() -> Response:
        tenant = await _tenant(context)
        tenant.try_again()
        await context.held(tenant)
        return json_response(_state(tenant))

    @routes.post("/models/unload")
    async def unload() -> Response:
        tenant = await _tenant(context)
        await _unload(context, tenant)
        return json_response(_state(tenant))

    @routes.post("/v1/load_lora_adapter")
    async def load_adapter() -> Response:
        _check_permitted(context)
        body = await wire.read(load_adapter_decoder)
        path = _adapter_file(context.settings.lora_dir, body.lora_path)
        tenant = context.house.adopt(context.house.find(body.base_model_name), body.lora_name, path)
        try:
            await context.held(tenant)
        except Unavailable:
            if tenant.state is State.FAILED:
                context.house.forget(tenant)
            raise
        tenant.is_known_loaded = True
        return json_response(_state(tenant))

    @routes.post("/v1/unload_lora_adapter")
    async def unload_adapter() -> Response:
        _check_permitted(context)
        body = await wire.read(unload_adapter_decoder)
        base = context.house.find(body.base_model_name)
        tenant = context.house.lookup(f"{base.name}:{body.lora_name}") or context.house.find(body.lora_name)
        if not tenant.is_adopted:
            raise InvalidRequest(f"lora_name: {tenant.name} was not loaded by /v1/load_lora_adapter", param="lora_name")
        await _unload(context, tenant)
        context.house.forget(tenant)
        return json_response(_state(tenant))

    return routes


def _check_permitted(context: Context) -> None:
    if not context.settings.enable_admin:
        raise NotPermitted("the operator has not enabled this; --enable-admin does")


async def _tenant(context: Context) -> Tenant:
    _check_permitted(context)
    return context.house.find((await wire.read(decoder)).model)


async def _unload(context: Context, tenant: Tenant) -> None:
    with trio.move_on_after(context.settings.load_wait_s):
        await context.house.unload(tenant)
        return
    if tenant.state is State.LOADING:
        raise Unavailable(f"{tenant.name} is still being loaded, and unloaded then", retry_after_s=RETRY_AFTER_S, code="loading")
    raise Unavailable(f"{tenant.name} still answers what it was asked", retry_after_s=RETRY_AFTER_S, code="unloading")


def _adapter_file(folder: str | None, name: str) -> str:
    """The file of that name below `folder`, and no other one. Raises: NotPermitted · InvalidRequest."""
    if folder is None:
        raise NotPermitted("the operator has named no folder of adapters; --lora-dir does")
    root = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(root, name)) if "\0" not in name else ""
    if not path.startswith(root + os.sep) or not os.path.isfile(path):
        raise InvalidRequest("lora_path: there is no such file in the folder of adapters", param="lora_path")
    return path


def _state(tenant: Tenant) -> dict[str, Any]:
    return {"success": True, "model": tenant.name, "status": {"value": tenant.state.value}}
