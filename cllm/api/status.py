"""How the server is, for load balancers, dashboards and people."""

from __future__ import annotations

import functools
from typing import Any

import attrs
from prometheus_client.exposition import choose_encoder
from quart import Blueprint, Response, request

import cllm
from cllm.api.context import Context
from cllm.api.errors import whole_seconds
from cllm.api.metric_aliases import WithAliases
from cllm.api.openai.shapes import json_response
from cllm.api.operations import TEXT, Operation
from cllm.config import aliases_of
from cllm.engine.sampling.params import SamplingParams
from cllm.engine.views import SequenceView
from cllm.errors import Unavailable
from cllm.serve.embedding import ServedEmbedder
from cllm.serve.engine import ServedModel

OPERATIONS = (
    Operation(method="GET", path="/health", about="whether the engine makes progress", public=True, also=(503,), own_bodies=(503,)),
    Operation(method="GET", path="/ready", about="whether a request would be accepted", public=True, also=(503,), own_bodies=(503,)),
    Operation(method="GET", path="/metrics", about="counters for Prometheus", gives=(TEXT,)),
    Operation(method="GET", path="/slots", about="the sequences under way", also=(503,)),
    Operation(method="GET", path="/props", about="settings and the chat template, of the model in ?model=", also=(404, 503)),
    Operation(method="GET", path="/version", about="the server's version"),
)


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("status", __name__)
    house = context.house

    @routes.get("/health")
    async def health() -> Response:
        state = house.health()
        return json_response({"status": "ok"}) if state.ok else json_response({"status": "error", "reason": state.reason}, status=503)

    @routes.get("/ready")
    async def ready() -> Response:
        try:
            house.check_ready()
        except Unavailable as error:
            state = {"status": error.code or "unavailable", **error.extra}
            return json_response(state, {"Retry-After": str(whole_seconds(error.retry_after_s))}, status=503)
        return json_response({"status": "ready"})

    @routes.get("/metrics")
    async def metrics() -> Response:
        try:
            encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        except Exception:  # of a version that is no number
            encode, content_type = choose_encoder("")
        kinds = aliases_of(context.settings)
        model = "" if house.names_models else house.first.name
        source = WithAliases(house.registry, kinds, model) if kinds else house.registry
        # Every scheme of escaping leaves names such as these as they are, but the library's, which writes a sample's colon otherwise.
        if isinstance(encode, functools.partial) and "escaping" in encode.keywords:
            encode.keywords["escaping"] = "allow-utf-8"
        return Response(encode(source), content_type=content_type)

    @routes.get("/slots")
    async def slots() -> Response:
        engines = house.engines() if house.is_open else [house.first.engine]
        models = [(one.model, one) for one in engines]
        return json_response([_slot(view, model, is_shared=house.is_shared) for model, one in models for view in one.sequences()])

    @routes.get("/props")
    async def props() -> Response:
        def tell(model: ServedModel) -> dict[str, Any]:
            return _props(model, context.engine.embedder, context.sampling_defaults)

        return json_response(await context.told(request.args.get("model"), "props", tell))

    @routes.get("/version")
    async def version() -> Response:
        return json_response({"version": cllm.__version__})

    return routes


def _slot(view: SequenceView, model: ServedModel, *, is_shared: bool) -> dict[str, Any]:
    return {
        **({"model": model.name} if is_shared else {}),
        "id": view.slot,
        "id_task": view.seq_id,
        "is_processing": view.slot is not None,
        "n_ctx": model.n_ctx,
        "request_id": view.request_id,
        "phase": view.phase.value,
        "n_prompt": view.n_prompt,
        "n_generated": view.n_generated,
        "n_computed": view.n_computed,
        "n_cells": view.n_held,
        "n_shared": view.n_shared,
        "n_preempted": view.n_preempted,
        "priority": view.priority,
    }


def _props(model: ServedModel, embedder: ServedEmbedder | None, defaults: SamplingParams) -> dict[str, Any]:
    """By llama-server's names."""
    vocabulary = model.vocabulary
    params = attrs.asdict(defaults, filter=lambda attribute, _: attribute.name not in ("logit_bias", "profile"))
    return {
        "default_generation_settings": {"n_ctx": model.n_ctx, "params": {**params, "profile": defaults.profile.value}},
        "total_slots": model.n_live_max,
        "model_alias": model.name,
        "backend": model.backend,
        "n_cells": model.n_cells,
        "chat_template": model.template.source,
        **({} if model.for_tools is None else {"chat_template_tool_use": model.for_tools.template.source}),
        "bos_token": _name(model, vocabulary.bos),
        "eos_token": _name(model, vocabulary.eos),
        "embeddings": None if embedder is None else _embedder(embedder),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"cllm-{cllm.__version__}",
    }


def _embedder(embedder: ServedEmbedder) -> dict[str, Any]:
    return {
        "model": embedder.name,
        "pooling": embedder.pooling.value,
        "n_embd": embedder.n_embd,
        "n_ctx": embedder.n_tokens_max,
    }


def _name(model: ServedModel, token: int | None) -> str:
    return "" if token is None else model.vocabulary.token_bytes(token, special=True).decode("utf-8", "replace")
