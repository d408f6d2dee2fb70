"""POST /v1/responses; GET and DELETE of those that are kept."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from quart import Blueprint, Response, g, request

from cllm.api import prompts, wire
from cllm.api.context import Context
from cllm.api.conversation import Conversation, open_chat
from cllm.api.errors import openai_shape
from cllm.api.openai.responses import requests
from cllm.api.openai.responses.answers import ResponseHead, ResponseStream, items_of, new_id
from cllm.api.openai.responses.requests import CreateRequest, Item, SentTools
from cllm.api.openai.responses.store import ResponseStore
from cllm.api.openai.shapes import Account, json_response
from cllm.api.operations import JSON, SSE, Operation
from cllm.errors import InvalidRequest, NotFound

ENDPOINT = "/v1/responses"
ONE = ENDPOINT + "/<response_id>"
INPUTS = ONE + "/input_items"
N_LISTED, N_LISTED_MAX = 20, 100  # items of a page: as a rule, and at most

OPERATIONS = (
    Operation(
        method="POST",
        path=ENDPOINT,
        about="answer a conversation that may be kept and gone on from",
        body=CreateRequest,
        gives=(JSON, SSE),
        generates=True,
    ),
    Operation(method="GET", path=ONE, about="a response that is kept", also=(404,)),
    Operation(method="DELETE", path=ONE, about="forget a response", also=(404,)),
    Operation(method="GET", path=INPUTS, about="what a response was asked", also=(404,)),
)

decoder = msgspec.json.Decoder(CreateRequest)
sent_decoder = msgspec.json.Decoder(SentTools)


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("responses", __name__)
    settings = context.settings
    store = ResponseStore(
        n_max=settings.responses_kept, n_bytes_max=settings.responses_kept_mb * 1024 * 1024, ttl_s=settings.responses_kept_s
    )

    @routes.post(ENDPOINT)
    async def create() -> Response:
        return await answer(context, store, *await wire.read_both(decoder, sent_decoder))

    @routes.get(ONE)
    async def response(response_id: str) -> Response:
        return json_response(store.find(response_id, key=g.key, now=time.monotonic()).response)

    @routes.delete(ONE)
    async def delete(response_id: str) -> Response:
        store.delete(response_id, key=g.key, now=time.monotonic())
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @routes.get(INPUTS)
    async def inputs(response_id: str) -> Response:
        items = store.find(response_id, key=g.key, now=time.monotonic()).inputs
        return json_response(_listed(items, request.args))

    return routes


async def answer(context: Context, store: ResponseStore, body: CreateRequest, sent: SentTools | None) -> Response:
    """Answer a conversation; `sent` has of the tools what is not known here. Raises: RequestError."""
    requests.refuse_unserved(body)
    given = body.input if isinstance(body.input, list) else []
    model = await prompts.model_for(context, body.model, given, lambda: _check(store, body))
    body.max_tokens = body.max_output_tokens or body.max_tokens
    asked = context.wanted(body, model, max_tokens=None)
    key, now = g.key, time.monotonic()
    references = [item.id for item in given if requests.is_reference(item) and item.id is not None] if len(given) <= model.n_ctx else []
    kept = {item_id: store.item(item_id, key=key, now=now) for item_id in references}
    inputs = await prompts.of_turns(model, given, lambda: _with_ids(requests.input_items(body, kept.get)))
    items = (*_said_before(store, body), *inputs)
    stores = body.store is not False and store.is_open

    def read() -> tuple[Conversation, ResponseHead]:  # tools that are not known here are shown as they were sent
        return requests.conversation_of(body, items), ResponseHead.of(body, sent, asked, model.name, stored=stores)

    conversation, head = await prompts.of_turns(model, items, read)
    chat = await open_chat(context, model, conversation, asked, endpoint=ENDPOINT)

    def keep(response: dict[str, Any]) -> None:
        if stores:
            output = tuple(msgspec.convert(response["output"], list[Item]))
            response["store"] = store.keep(response, inputs, (*items, *output), key=key, now=time.monotonic())

    if body.stream:
        shape = ResponseStream(head, keep)
        return await chat.stream(shape, openai_shape, shape.wire)
    (whole,) = await chat.complete()
    response = head.ended(items_of(whole, head), whole.finished)
    keep(response)
    return json_response(response, Account([whole.finished]).headers())


def _check(store: ResponseStore, body: CreateRequest) -> None:
    """Read a request as `answer` does, without what was said before. Raises: InvalidRequest."""
    _said_before(store, body)
    requests.conversation_of(body, requests.input_items(body, functools.partial(store.item, key=g.key, now=time.monotonic())))


def _said_before(store: ResponseStore, body: CreateRequest) -> tuple[Item, ...]:
    if body.previous_response_id is None:
        return ()
    try:
        return store.find(body.previous_response_id, key=g.key, now=time.monotonic()).items
    except NotFound as error:
        raise InvalidRequest(error.message, param="previous_response_id", code="previous_response_not_found") from None


def _with_ids(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """Items as they are listed: clients expect them to have names."""
    return tuple(msgspec.structs.replace(item, id=item.id or new_id("item"), type=item.type or "message") for item in items)


def _listed(items: tuple[Item, ...], asked: Mapping[str, str]) -> dict[str, Any]:
    """The page of `items` that is `asked` for: of the last one first, unless told otherwise. Raises: InvalidRequest."""
    order, after = asked.get("order", "desc"), asked.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: expected asc or desc", param="order")
    n_most = _n_listed(asked.get("limit", str(N_LISTED)))
    left = items if order == "asc" else items[::-1]
    if after is not None:
        ids = [item.id for item in left]
        if after not in ids:
            raise InvalidRequest("after: there is no such item", param="after")
        left = left[ids.index(after) + 1 :]
    shown = [_shown(item) for item in left[:n_most]]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": len(left) > n_most}


def _n_listed(limit: str) -> int:
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= N_LISTED_MAX):
        raise InvalidRequest(f"limit: expected 1 to {N_LISTED_MAX}", param="limit")
    return int(limit[:9])


def _shown(item: Item) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(item)
    if isinstance(item.content, str):
        shown["content"] = [{"type": "output_text" if item.role == "assistant" else "input_text", "text": item.content}]
    return shown
