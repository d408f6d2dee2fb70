"""POST /api/embed and /api/embeddings."""

from __future__ import annotations

import functools
from typing import Annotated

import msgspec
from msgspec import Meta
from quart import Blueprint, Response

from cllm.api import vectors, wire
from cllm.api.context import Context
from cllm.api.errors import ollama_shape
from cllm.api.ollama.answers import Arrival
from cllm.api.ollama.requests import is_no_time
from cllm.api.openai.shapes import json_response
from cllm.api.operations import Operation
from cllm.api.prompts import by_length
from cllm.api.vectors import Embedded

N_INPUTS_MAX = 16_384  # of one request: Ollama has no bound, and its clients send all that they have at once


class EmbedRequest(msgspec.Struct, kw_only=True):
    """The body of POST /api/embed."""

    input: str | list[str] | None = None  # nothing: the model is only to be loaded
    model: str | None = None
    truncate: bool | None = None  # inputs that are too long; unless it is false
    dimensions: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    keep_alive: str | float | None = None


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """The body of POST /api/embeddings, the older way."""

    prompt: str | None = None
    model: str | None = None
    keep_alive: str | float | None = None


def _operation(path: str, about: str, body: type) -> Operation:
    return Operation(method="POST", path=path, about=about, body=body, generates=True, errors=ollama_shape)


OPERATIONS = (
    _operation("/api/embed", "vectors of texts, in Ollama's way", EmbedRequest),
    _operation("/api/embeddings", "the vector of a text, in Ollama's older way", EmbeddingsRequest),
)

embed_decoder = msgspec.json.Decoder(EmbedRequest)
embeddings_decoder = msgspec.json.Decoder(EmbeddingsRequest)


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("ollama_embed", __name__)

    @routes.post("/api/embed")
    async def embed() -> Response:
        body = await wire.read(embed_decoder)
        inputs = [body.input] if isinstance(body.input, str) else body.input or []
        if not any(inputs):
            return _nothing(await _name(context, body))
        embedded = await _embedded(context, body.model, inputs, "input", truncates=body.truncate is not False)
        durations = Arrival.of_current().durations()
        return await by_length(embedded.vectors.size, functools.partial(_response, embedded, body.dimensions, durations))

    @routes.post("/api/embeddings")
    async def embeddings() -> Response:
        body = await wire.read(embeddings_decoder)
        if not body.prompt:
            await _name(context, body)
            return json_response({"embedding": []})
        embedded = await _embedded(context, body.model, [body.prompt], "prompt", truncates=True)
        return json_response({"embedding": embedded.vectors[0].tolist()})  # as it comes: this way does not normalise

    return routes


async def _embedded(context: Context, name: str | None, inputs: list[str], param: str, *, truncates: bool) -> Embedded:
    vectors.check_number(len(inputs), param, N_INPUTS_MAX)  # before a model is loaded for them
    return await vectors.embed(context, name, inputs, param, truncates=truncates, n_most=N_INPUTS_MAX)


async def _name(context: Context, body: EmbedRequest | EmbeddingsRequest) -> str:
    """What a model that is asked nothing is called. It is loaded, but not to be told to go. Raises: RequestError."""
    if is_no_time(body.keep_alive):
        return context.house.find_embedder(body.model).embedding_aliases[0]
    return (await vectors.embedder(context, body.model)).model.name


def _nothing(model: str) -> Response:
    """The answer to no input."""
    return json_response({"model": model, "embeddings": [], "total_duration": 0, "load_duration": 0, "prompt_eval_count": 0})


def _response(embedded: Embedded, n_dimensions: int | None, durations: dict[str, int]) -> Response:
    unit = vectors.normalised(embedded.vectors, n_dimensions)
    embeddings = (msgspec.json.encode(vector.tolist()) for vector in unit)
    after = {**durations, "prompt_eval_count": embedded.n_tokens}
    return vectors.listing({"model": embedded.model.name}, "embeddings", embeddings, after)
