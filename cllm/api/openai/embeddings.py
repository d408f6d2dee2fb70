"""POST /v1/embeddings."""

from __future__ import annotations

import base64
import functools
from typing import Annotated, Literal

import attrs
import msgspec
from msgspec import Meta
from quart import Blueprint, Response

from cllm.api import vectors, wire
from cllm.api.context import Context
from cllm.api.operations import Operation
from cllm.api.prompts import by_length
from cllm.api.vectors import Embedded
from cllm.backend import Vectors
from cllm.errors import InvalidRequest

ENDPOINT = "/v1/embeddings"


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """The body."""

    input: str | Annotated[list[int | str | list[int]], Meta(min_length=1)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None
    user: str | None = None


decoder = msgspec.json.Decoder(EmbeddingRequest)
_EMBED = Operation(method="POST", path=ENDPOINT, about="vectors of texts", body=EmbeddingRequest, generates=True)
OPERATIONS = (_EMBED, attrs.evolve(_EMBED, path="/embeddings", alias_of=ENDPOINT))


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("embeddings", __name__)

    @routes.post(ENDPOINT)
    @routes.post("/embeddings")
    async def embeddings() -> Response:
        return await answer(context, await wire.read(decoder))

    return routes


async def answer(context: Context, body: EmbeddingRequest) -> Response:
    """The vectors of one or several inputs, at length 1. Raises: RequestError."""
    inputs = await by_length(1 if isinstance(body.input, str) else len(body.input), lambda: _inputs(body.input))
    vectors.check_number(len(inputs), "input")
    n_embd = (await vectors.embedder(context, body.model)).model.n_embd
    if body.dimensions is not None and body.dimensions > n_embd:
        raise InvalidRequest(f"dimensions: {body.dimensions} asked for, and the model has {n_embd}", param="dimensions")
    embedded = await vectors.embed(context, body.model, inputs)
    in_bytes = body.encoding_format == "base64"
    return await by_length(embedded.vectors.size, functools.partial(_response, embedded, body.dimensions, in_bytes))


def _inputs(given: str | list[int | str | list[int]]) -> list[str | list[int]]:
    """One input or several; a list of numbers is one. Raises: InvalidRequest."""
    if isinstance(given, str):
        return [given]
    if all(isinstance(item, int) for item in given):
        return [given]  # type: ignore[list-item]  # just checked
    if any(isinstance(item, int) for item in given):
        raise InvalidRequest("input: token ids and inputs stand side by side", param="input")
    return given  # type: ignore[return-value]  # just checked


def _response(embedded: Embedded, n_dimensions: int | None, in_bytes: bool) -> Response:
    unit = vectors.normalised(embedded.vectors, n_dimensions)
    data = (_item(i, vector, in_bytes) for i, vector in enumerate(unit))
    usage = {"prompt_tokens": embedded.n_tokens, "total_tokens": embedded.n_tokens}
    return vectors.listing({"object": "list"}, "data", data, {"model": embedded.model.name, "usage": usage})


def _item(index: int, vector: Vectors, in_bytes: bool) -> bytes:
    """One vector: the numbers, or the base64 of their 32 bits each, the lowest byte first."""
    numbers = base64.b64encode(vector.astype("<f4").tobytes()).decode() if in_bytes else vector.tolist()
    return msgspec.json.encode({"object": "embedding", "index": index, "embedding": numbers})
