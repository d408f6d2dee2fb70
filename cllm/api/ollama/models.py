"""GET /api/tags, /api/ps and /api/version, and POST /api/show: what is served, as Ollama's clients ask for it."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from typing import Any

import msgspec
from quart import Blueprint, Response

from cllm.api import wire
from cllm.api.context import Context
from cllm.api.errors import ollama_shape
from cllm.api.ollama.requests import ShowRequest
from cllm.api.openai.models import Listed, all_listed, find_listed
from cllm.api.openai.shapes import json_response
from cllm.api.operations import Operation
from cllm.backend import ModelInfo, infill_of
from cllm.errors import InvalidRequest
from cllm.serve.embedding import ServedEmbedder
from cllm.serve.engine import ServedModel
from cllm.serve.house import LATEST

API_VERSION = "0.14.2"  # of Ollama: one that has what is served here. Clients refuse older ones, as Codex what is before 0.13.4
_UNKNOWN = ModelInfo(name="", architecture="", n_params=0, size_bytes=0, n_ctx_train=0, n_embd=0)  # of a model that is not loaded
_NUMBERS = frozenset({"general.file_type", "general.quantization_version", "general.alignment", "general.parameter_count"})
_INT = re.compile(r"-?\d{1,19}")
_FLOAT = re.compile(r"-?\d+(\.\d+([eE][+-]?\d+)?|[eE][+-]?\d+)")
NEVER = "9999-12-31T23:59:59Z"


def _operation(method: str, path: str, about: str, **facts: Any) -> Operation:
    return Operation(method=method, path=path, about=about, errors=ollama_shape, **facts)


OPERATIONS = (
    _operation("GET", "/api/tags", "what is served, in Ollama's way", also=(503,)),
    _operation("GET", "/api/ps", "what is loaded", also=(503,)),
    _operation("POST", "/api/show", "facts about a model", body=ShowRequest, generates=True),
    _operation("GET", "/api/version", "the version of Ollama's API that is spoken here"),
)

show_decoder = msgspec.json.Decoder(ShowRequest)


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("ollama_models", __name__)

    @routes.get("/api/tags")
    async def tags() -> Response:
        return json_response({"models": [_listed(one) for one in all_listed(context).values()]})

    @routes.get("/api/ps")
    async def ps() -> Response:
        loaded = {one.model.name: one for one in reversed(all_listed(context).values()) if one.model is not None}
        return json_response({"models": [{**_listed(one), **_running(one.model)} for one in reversed(loaded.values()) if one.model]})

    @routes.post("/api/show")
    async def show() -> Response:
        body = await wire.read(show_decoder)
        name = body.model or body.name
        if not name:
            raise InvalidRequest("model: it is missing", param="model")
        listed = find_listed(context, name)
        if listed is None:
            return json_response(_shown(await context.served(name)))  # says which there are
        if listed.model is not None:  # what is said once is said again when the model is not loaded, which nobody loads to ask
            listed.tenant.told[f"show {listed.name}"] = _shown(listed.model)
        return json_response(listed.tenant.told.get(f"show {listed.name}") or _unknown(listed))

    @routes.get("/api/version")
    async def version() -> Response:
        return json_response({"version": API_VERSION})

    return routes


def _running(model: ServedModel | ServedEmbedder) -> dict[str, Any]:
    is_on_gpu = (model.info.n_gpu_layers or 0) < 0  # all of it; how much some layers take is not known
    return {"expires_at": NEVER, "size_vram": model.info.size_bytes if is_on_gpu else 0, "context_length": _n_ctx(model)}


def _n_ctx(model: ServedModel | ServedEmbedder) -> int:
    """The tokens that a request may have here, which are mostly fewer than the model was trained for."""
    return model.n_ctx if isinstance(model, ServedModel) else model.n_tokens_max


def _listed(listed: Listed) -> dict[str, Any]:
    name, model = listed.name, listed.model
    tagged = name if ":" in name else name + LATEST
    info = _UNKNOWN if model is None else model.info
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _at(listed.tenant.known_at if model is None else model.loaded_at),
        "size": listed.tenant.n_bytes if model is None else info.size_bytes,
        "digest": hashlib.sha256((info.fingerprint or listed.tenant.name).encode()).hexdigest(),
        "details": _details(info),
    }


def _details(info: ModelInfo) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": _size(info.n_params),
        "quantization_level": info.quantization,
    }


def _size(n_params: int) -> str:
    """Parameters as people write them: 596M, 7.6B."""
    return f"{n_params / 1e9:.1f}B" if n_params >= 1e9 else f"{n_params / 1e6:.0f}M"


def _shown(model: ServedModel | ServedEmbedder) -> dict[str, Any]:
    info = model.info
    facts = {name: _fact(name, value, info.architecture) for name, value in info.metadata.items() if not name.startswith("tokenizer.")}
    sizes = {
        "general.architecture": info.architecture,
        "general.parameter_count": info.n_params,
        f"{info.architecture}.context_length": _n_ctx(model),  # clients make prompts as long as this says
        f"{info.architecture}.embedding_length": info.n_embd,
    }
    return {
        "modelfile": "",
        "parameters": "",
        "template": model.template.source if isinstance(model, ServedModel) else "",
        "details": _details(info),
        "model_info": {**facts, **sizes},
        "capabilities": _capabilities(model),
        "modified_at": _at(model.loaded_at),
    }


def _unknown(listed: Listed) -> dict[str, Any]:
    """What is said of a model that has not been loaded yet."""
    gives_text = listed.name in listed.tenant.aliases
    capabilities = ["completion", "tools"] if gives_text else ["embedding"]
    # Ollama's own command takes the architecture for a text, unseen.
    facts = {"details": _details(_UNKNOWN), "model_info": {"general.architecture": ""}, "capabilities": capabilities}
    return {"modelfile": "", "parameters": "", "template": "", **facts, "modified_at": _at(listed.tenant.known_at)}


def _fact(name: str, value: str, architecture: str) -> Any:
    """A value of the file's metadata, which are texts here, as the number or truth value that it is in the file."""
    if not name.startswith(f"{architecture}.") and name not in _NUMBERS:
        return value
    if value in ("true", "false"):
        return value == "true"
    return float(value) if _FLOAT.fullmatch(value) else int(value) if _INT.fullmatch(value) else value


def _capabilities(model: ServedModel | ServedEmbedder) -> list[str]:
    if isinstance(model, ServedEmbedder):
        return ["embedding"]
    further = {"insert": infill_of(model.vocabulary) is not None, "tools": True, "thinking": model.dialect.tags is not None}
    return ["completion", *[name for name, has in further.items() if has]]


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
