"""GET /v1/models."""

from __future__ import annotations

from typing import Any

import attrs
from quart import Blueprint, Response

from cllm.api.context import Context
from cllm.api.openai.shapes import json_response
from cllm.api.operations import Operation
from cllm.serve.embedding import ServedEmbedder
from cllm.serve.engine import ServedModel
from cllm.serve.house import State, Tenant, with_and_without_tag

_LIST = Operation(method="GET", path="/v1/models", about="what is served", also=(503,))
_ONE = Operation(method="GET", path="/v1/models/<path:model>", about="facts about one model", also=(404, 503))
OPERATIONS = (
    _LIST,
    _ONE,
    attrs.evolve(_LIST, path="/models", alias_of=_LIST.path),
    attrs.evolve(_ONE, path="/models/<path:model>", alias_of=_ONE.path),
)


@attrs.frozen
class Listed:
    """One name of what a request may ask for, and what is known of it now."""

    name: str
    tenant: Tenant
    model: ServedModel | ServedEmbedder | None  # None while it is not loaded


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("models", __name__)

    @routes.get("/v1/models")
    @routes.get("/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(one) for one in all_listed(context).values()]})

    @routes.get("/v1/models/<path:model>")
    @routes.get("/models/<path:model>")
    async def one_model(model: str) -> Response:
        found = find_listed(context, model)
        if found is None:
            context.house.find(model)  # says which there are
        assert found is not None, "what is found by name is listed by name"
        return json_response(_model(found))

    return routes


def all_listed(context: Context) -> dict[str, Listed]:
    """Everything that a request may name. Raises: Unavailable while the only model is being loaded."""
    if not context.house.is_shared and context.house.first.state is State.LOADING:
        _ = context.house.first.engine.model
    names: dict[str, Listed] = {}
    for tenant in context.house.tenants:
        is_there = tenant.state in (State.LOADED, State.UNLOADING)
        model, embedder = tenant.engine.model if is_there else None, tenant.engine.embedder if is_there else None
        gives_text = model is None or model.generates or embedder is None
        names.update({name: Listed(name, tenant, model if gives_text else embedder) for name in tenant.aliases})
        vector_names = tenant.embedding_aliases if not is_there else () if embedder is None else embedder.aliases
        for name in vector_names:
            names.setdefault(name, Listed(name, tenant, embedder))
    return names


def find_listed(context: Context, name: str) -> Listed | None:
    """What is known of one name, with Ollama's tag or without. Raises: as `all_listed`."""
    listed = all_listed(context)
    return next((listed[each] for each in with_and_without_tag(name) if each in listed), None)


def _model(listed: Listed) -> dict[str, Any]:
    model = listed.model
    return {
        "id": listed.name,
        "object": "model",
        "created": int(listed.tenant.known_at if model is None else model.loaded_at),
        "owned_by": "cllm",
        "status": {"value": listed.tenant.state.value},
        **({} if model is None else {"meta": _meta(model)}),
    }


def _meta(model: ServedModel | ServedEmbedder) -> dict[str, Any]:
    info = model.info
    n_ctx = model.n_ctx if isinstance(model, ServedModel) else model.n_tokens_max
    return {
        "architecture": info.architecture,
        "quantization": info.quantization,
        "n_params": info.n_params,
        "size": info.size_bytes,
        "n_ctx_train": info.n_ctx_train,
        "n_ctx": n_ctx,
        "n_embd": info.n_embd,
        "n_vocab": model.vocabulary.n_tokens,
    }
