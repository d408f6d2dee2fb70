"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import functools
import math

import msgspec
from quart import Blueprint, Response

from cllm.api import prompts, wire
from cllm.api.anthropic.answers import WIRE, MessageStream, message
from cllm.api.anthropic.requests import CountRequest, MessagesRequest, conversation_of
from cllm.api.context import Context
from cllm.api.conversation import open_chat, prompt_of
from cllm.api.errors import anthropic_shape
from cllm.api.openai.shapes import Account, json_response
from cllm.api.operations import JSON, SSE, Operation
from cllm.errors import InvalidRequest

ENDPOINT = "/v1/messages"
COUNT = ENDPOINT + "/count_tokens"

OPERATIONS = (
    Operation(
        method="POST",
        path=ENDPOINT,
        about="answer a conversation, in Anthropic's way",
        body=MessagesRequest,
        gives=(JSON, SSE),
        generates=True,
        errors=anthropic_shape,
    ),
    Operation(
        method="POST", path=COUNT, about="how many tokens a conversation has", body=CountRequest, generates=True, errors=anthropic_shape
    ),
)

decoder = msgspec.json.Decoder(MessagesRequest)
count_decoder = msgspec.json.Decoder(CountRequest)


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("anthropic", __name__)

    @routes.post(ENDPOINT)
    async def messages() -> Response:
        return await answer(context, await wire.read(decoder))

    @routes.post(COUNT)
    async def count_tokens() -> Response:
        body = await wire.read(count_decoder)
        read = functools.partial(conversation_of, body)
        model = await prompts.model_for(context, body.model, body.messages, read)
        tokens = await prompt_of(context, model, await prompts.of_turns(model, body.messages, read))
        return json_response({"input_tokens": len(tokens)})

    return routes


async def answer(context: Context, body: MessagesRequest) -> Response:
    """Answer a conversation. Raises: RequestError."""
    if body.n not in (None, 1):
        raise InvalidRequest("n: this endpoint gives one answer; /v1/chat/completions gives several", param="n")
    read = functools.partial(conversation_of, body)
    model = await prompts.model_for(context, body.model, body.messages, read)
    body.stop = body.stop_sequences or body.stop
    body.top_p = None if body.top_p is not None and body.top_p < 0 else body.top_p
    asked = context.wanted(body, model, max_tokens=None)
    conversation = await prompts.of_turns(model, body.messages, read)
    chat = await open_chat(context, model, conversation, asked, endpoint=ENDPOINT)
    # Of what reads text nobody knows the tokens; and where all that is asked for fits, the context ends nothing.
    n_ctx = model.n_ctx if chat.n_prompt + body.max_tokens > model.n_ctx and not model.reads_text else math.inf
    if body.stream:
        return await chat.stream(MessageStream(model.name, chat.n_prompt, n_ctx), anthropic_shape, WIRE)
    (whole,) = await chat.complete()
    return json_response(message(whole, model.name, n_ctx), Account([whole.finished]).headers())
