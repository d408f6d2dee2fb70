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

_LIST = Operation(method="GET", path="/v1/models", about="what is served", also=(503,))
_ONE = Operation(method="GET", path="/v1/models/<path:model>", about="facts about one model", also=(404, 503))
OPERATIONS = (
    _LIST,
    _ONE,
    attrs.evolve(_LIST, path="/models", alias_of=_LIST.path),
    attrs.evolve(_ONE, path="/models/<path:model>", alias_of=_ONE.path),
)


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("models", __name__)

    @routes.get("/v1/models")
    @routes.get("/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [_model(model, name) for name, model in all_served(context).items()]})

    @routes.get("/v1/models/<path:model>")
    @routes.get("/models/<path:model>")
    async def one_model(model: str) -> Response:
        return json_response(_model(all_served(context).get(model) or context.served(model), model))

    return routes


def all_served(context: Context) -> dict[str, ServedModel | ServedEmbedder]:
    """Everything that a request may name. Raises: Unavailable while it is being loaded."""
    model, embedder = context.engine.model, context.engine.embedder
    names: dict[str, ServedModel | ServedEmbedder] = dict.fromkeys(model.aliases, model)
    if embedder is not None:
        names.update({name: embedder for name in embedder.aliases if name not in names})
    return names


def _model(model: ServedModel | ServedEmbedder, name: str) -> dict[str, Any]:
    info = model.info
    n_ctx = model.n_ctx if isinstance(model, ServedModel) else model.n_tokens_max
    return {
        "id": name,
        "object": "model",
        "created": int(model.loaded_at),
        "owned_by": "cllm",
        "meta": {
            "architecture": info.architecture,
            "quantization": info.quantization,
            "n_params": info.n_params,
            "size": info.size_bytes,
            "n_ctx_train": info.n_ctx_train,
            "n_ctx": n_ctx,
            "n_embd": info.n_embd,
            "n_vocab": model.vocabulary.n_tokens,
        },
    }
