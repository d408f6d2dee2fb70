"""POST /tokenize, /detokenize, /apply-template: by llama-server's names."""

from __future__ import annotations

import functools
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta
from quart import Blueprint, Response

from cllm.api import prompts, wire
from cllm.api.context import Context
from cllm.api.openai.chat import TemplateFields, TemplateOptions, conversation_of, render
from cllm.api.openai.messages import Message
from cllm.api.openai.shapes import json_response
from cllm.api.operations import Operation
from cllm.backend import Vocabulary
from cllm.errors import InvalidRequest
from cllm.serve.engine import ServedModel
from cllm.text.prompt import without_bos

TokenIds: TypeAlias = Annotated[list[int], Meta(max_length=1 << 20)]  # more than any context has


class TokenizeRequest(TemplateOptions, kw_only=True):
    """The body; exactly one of `content`, `prompt` and `messages`, which are written as a chat with the same fields has them.

    Special tokens are added and read as llama-server does, with messages always.
    """

    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    model: str | None = None


class DetokenizeRequest(msgspec.Struct):
    """The body."""

    tokens: TokenIds
    model: str | None = None


class TemplateRequest(TemplateFields, kw_only=True):
    """The body."""

    model: str | None = None


N_PIECES_MAX = 1 << 18  # that are told one by one

tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)
template_decoder = msgspec.json.Decoder(TemplateRequest)

OPERATIONS = (
    Operation(method="POST", path="/tokenize", about="text or messages to token ids", body=TokenizeRequest, generates=True),
    Operation(method="POST", path="/detokenize", about="token ids to text", body=DetokenizeRequest, generates=True),
    Operation(method="POST", path="/apply-template", about="messages to what the model sees", body=TemplateRequest, generates=True),
)


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("tokens", __name__)

    @routes.post("/tokenize")
    async def tokenize() -> Response:
        body = await wire.read(tokenize_decoder)
        chat = _chat_of(body)
        model = await (context.served(body.model) if chat is None else _model_for(context, body.model, chat))
        tokens = await (_text_tokens(context, body) if chat is None else _chat_tokens(context, model, chat))
        if body.with_pieces and len(tokens) > N_PIECES_MAX:
            raise InvalidRequest(f"with_pieces: of {N_PIECES_MAX} tokens at most, and there are {len(tokens)}", param="with_pieces")
        if body.with_pieces:
            return await prompts.by_length(len(tokens), lambda: json_response(_pieces(model.vocabulary, tokens)))
        return await prompts.by_length(len(tokens), lambda: json_response({"tokens": tokens}))

    @routes.post("/detokenize")
    async def detokenize() -> Response:
        body = await wire.read(detokenize_decoder)
        return json_response({"content": await prompts.detokenize(await context.served(body.model), body.tokens)})

    @routes.post("/apply-template")
    async def apply_template() -> Response:
        body = await wire.read(template_decoder)
        model = await _model_for(context, body.model, body)
        return json_response({"prompt": without_bos(model.vocabulary, await render(model, body))})

    return routes


async def _model_for(context: Context, name: str | None, chat: TemplateFields) -> ServedModel:
    return await prompts.model_for(context, name, chat.messages, functools.partial(conversation_of, chat))


def _chat_of(body: TokenizeRequest) -> TemplateFields | None:
    """The conversation whose tokens are asked for; None: they are a text's. Raises: InvalidRequest."""
    given = [value for value in (body.content, body.prompt, body.messages) if value is not None]
    if len(given) != 1:
        raise InvalidRequest("expected one of content, prompt and messages", param="content")
    if body.messages is None:
        return None
    options: dict[str, Any] = {name: getattr(body, name) for name in TemplateOptions.__struct_fields__}
    return TemplateFields(messages=body.messages, **options)


async def _chat_tokens(context: Context, model: ServedModel, chat: TemplateFields) -> list[int]:
    return await prompts.chat_prompt(context, await render(model, chat), "messages")


async def _text_tokens(context: Context, body: TokenizeRequest) -> list[int]:
    param, text = ("content", body.content) if body.content is not None else ("prompt", body.prompt)
    assert text is not None
    parse_special = body.parse_special is not False
    return await prompts.plain_tokens(context, text, param, add_special=bool(body.add_special), parse_special=parse_special)


def _pieces(vocabulary: Vocabulary, tokens: list[int]) -> dict[str, Any]:
    return {"tokens": [{"id": token, "piece": _piece(vocabulary, token)} for token in tokens]}


def _piece(vocabulary: Vocabulary, token: int) -> Any:
    """The token's text, or its bytes where they are no whole characters."""
    raw = vocabulary.token_bytes(token, special=True)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return list(raw)
