"""POST /api/generate and /api/chat."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import msgspec
from quart import Blueprint, Response, g

from cllm.api import prompts, wire
from cllm.api.context import Context
from cllm.api.conversation import Chat, open_chat
from cllm.api.errors import ollama_shape
from cllm.api.generation import check_room, open_generation
from cllm.api.ollama import requests
from cllm.api.ollama.answers import WIRE, Arrival, Body, LineStream, chat_body, generate_body, nothing_asked, whole
from cllm.api.ollama.requests import ChatRequest, CommonFields, GenerateRequest
from cllm.api.ollama.shortening import open_shortened
from cllm.api.openai.shapes import Account, json_response
from cllm.api.operations import JSON, NDJSON, Operation
from cllm.api.sampling_fields import Wanted
from cllm.api.structured import compiled, told
from cllm.errors import InvalidRequest
from cllm.serve.engine import ServedModel

GENERATE, CHAT = "/api/generate", "/api/chat"


def _operation(path: str, about: str, body: type) -> Operation:
    return Operation(method="POST", path=path, about=about, body=body, gives=(NDJSON, JSON), generates=True, errors=ollama_shape)


OPERATIONS = (
    _operation(GENERATE, "answer a prompt, in Ollama's way", GenerateRequest),
    _operation(CHAT, "answer a conversation, in Ollama's way", ChatRequest),
)

generate_decoder = msgspec.json.Decoder(GenerateRequest)
chat_decoder = msgspec.json.Decoder(ChatRequest)


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("ollama", __name__)

    @routes.post(GENERATE)
    async def generate() -> Response:
        body = await wire.read(generate_decoder)
        return await answer_prompt(context, body)

    @routes.post(CHAT)
    async def chat() -> Response:
        body = await wire.read(chat_decoder)
        return await answer_chat(context, body)

    return routes


async def answer_chat(context: Context, body: ChatRequest) -> Response:
    """Answer a conversation. Raises: RequestError."""
    if not body.messages:
        return await _nothing_asked(context, body, chat_body)
    read = functools.partial(requests.chat_conversation, body)
    model, asked = await _checked(context, body, body.messages, functools.partial(read, can_go_on=True))
    # A server behind this one that cannot be told to may go on by itself.
    can_go_on = not model.reads_text or "continue_final_message" in (model.heeds or ())
    conversation = await prompts.of_turns(model, body.messages, functools.partial(read, can_go_on=can_go_on))
    open_it = open_chat if body.truncate is False else open_shortened
    return await _told(await open_it(context, model, conversation, asked, endpoint=CHAT), model, body, chat_body)


async def answer_prompt(context: Context, body: GenerateRequest) -> Response:
    """Answer a prompt, or continue it as it is. Raises: RequestError."""
    if not body.prompt:
        return await _nothing_asked(context, body, generate_body)
    is_continued = bool(body.raw or body.suffix)
    if is_continued and body.system:
        raise InvalidRequest("system: a prompt that is continued as it is has no system message", param="system")
    model, asked = await _checked(context, body, (), functools.partial(requests.form_of, body))
    if is_continued:
        chat = await _open_text(context, model, body, asked)
    else:
        chat = await open_chat(context, model, requests.generate_conversation(body), asked, endpoint=GENERATE)
    return await _told(chat, model, body, generate_body)


async def _nothing_asked(context: Context, body: CommonFields, shape: Body) -> Response:
    """A model that is asked nothing is loaded; when it goes is the operator's affair, and it is not loaded to be told to go."""
    if requests.is_no_time(body.keep_alive):
        return json_response(nothing_asked(context.house.find(body.model).name, shape, unload=True))
    model = await prompts.model_for(context, body.model, (), lambda: None)  # of what it would draw by, nothing is refused
    return json_response(nothing_asked(model.name, shape, unload=False))


async def _checked(context: Context, body: CommonFields, turns: Sequence[object], read: Callable[[], object]) -> tuple[ServedModel, Wanted]:
    """The model, and what is asked of it; `turns` and `read` as in `prompts.model_for`."""
    requests.refuse_unserved(body)
    options = requests.options_of(body)
    model = await prompts.model_for(context, body.model, turns, read)
    return model, context.wanted(options, model, max_tokens=None)


async def _open_text(context: Context, model: ServedModel, body: GenerateRequest, asked: Wanted) -> Chat:
    """Submit a prompt as it is, maybe with what is to follow the answer."""
    assert body.prompt is not None
    if body.suffix:
        prompts.check_infills(model, "suffix")
    check_room(context, asked, "prompt")
    prompts.check_fits(model, body.prompt)
    if body.suffix:
        tokens = await prompts.infill_prompt(context, model, body.prompt, body.suffix)
    else:
        tokens = await prompts.text_prompt(context, body.prompt)
    form = requests.form_of(body)
    grammar = await compiled(context, model, form)
    specs = asked.specs([tokens], n_logprobs=None, key=g.key, request_id=g.request_id, grammar=grammar, form=told(model, form))
    return Chat(await open_generation(context, specs, GENERATE), len(tokens))


async def _told(chat: Chat, model: ServedModel, body: CommonFields, shape: Body) -> Response:
    """The answer as lines, which is Ollama's default, or as one object."""
    if body.stream is not False:
        return await chat.stream(LineStream(model.name, shape, Arrival.of_current()), ollama_shape, WIRE)
    (answer,) = await chat.complete()
    return json_response(whole(answer, model.name, shape, Arrival.of_current()), Account([answer.finished]).headers())
