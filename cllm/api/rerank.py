"""POST /v1/rerank: documents in the order in which they answer a query, in Jina's shape."""

from __future__ import annotations

from typing import Annotated, Any

import attrs
import msgspec
from msgspec import Meta
from quart import Blueprint, Response

from cllm.api import vectors, wire
from cllm.api.context import Context
from cllm.api.openai.shapes import json_response
from cllm.api.operations import Operation
from cllm.backend import Pooling

ENDPOINT = "/v1/rerank"


class Document(msgspec.Struct):
    """A document with members; its text is what counts."""

    text: str


class RerankRequest(msgspec.Struct, kw_only=True):
    """The body."""

    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | Document], Meta(min_length=1)]
    model: str | None = None
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = None  # they are, unless it is false: so Jina's clients expect


decoder = msgspec.json.Decoder(RerankRequest)
_RERANK = Operation(method="POST", path=ENDPOINT, about="documents in order of relevance", body=RerankRequest, generates=True)
OPERATIONS = (_RERANK, attrs.evolve(_RERANK, path="/rerank", alias_of=ENDPOINT))


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("rerank", __name__)

    @routes.post(ENDPOINT)
    @routes.post("/rerank")
    async def rerank() -> Response:
        return await answer(context, await wire.read(decoder))

    return routes


async def answer(context: Context, body: RerankRequest) -> Response:
    """The documents that answer the query best, the best first. Raises: RequestError."""
    vectors.check_number(len(body.documents), "documents")
    texts = [one if isinstance(one, str) else one.text for one in body.documents]
    judged, scores = await vectors.judge(context, body.model, body.query, texts)
    order = sorted(range(len(texts)), key=lambda i: scores[i], reverse=True)[: body.top_n]
    results = [_result(i, scores[i], None if body.return_documents is False else texts[i]) for i in order]
    method = "rank" if judged.model.pooling is Pooling.RANK else "cosine"
    usage = {"prompt_tokens": judged.n_tokens, "total_tokens": judged.n_tokens}
    return json_response({"object": "list", "model": judged.model.name, "method": method, "results": results, "usage": usage})


def _result(index: int, score: float, text: str | None) -> dict[str, Any]:
    result: dict[str, Any] = {"index": index, "relevance_score": score}
    return result if text is None else {**result, "document": {"text": text}}
