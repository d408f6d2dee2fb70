"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from quart import Blueprint, Response, g

from cllm.api import prompts, wire
from cllm.api.context import Context
from cllm.api.errors import openai_shape
from cllm.api.generation import Completion, check_room, open_generation
from cllm.api.openai.shapes import NULL, Account, CommonFields, OpenAiStream, TokenNames, envelope, finite, is_nothing, json_response
from cllm.api.sampling_fields import wanted
from cllm.api.sse import SseBody, data, sse_response
from cllm.engine.events import Delta, Finished, TokenLogprob
from cllm.errors import InvalidRequest, NotSupported
from cllm.serve.engine import ServedModel

ENDPOINT = "/v1/chat/completions"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}  # developer is OpenAI's newer name


class Part(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """One turn of a conversation."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw = NULL


class Conversation(msgspec.Struct, kw_only=True):
    """Messages, and how the template is to write them."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(CommonFields, kw_only=True):
    """The body; a `Conversation` too, which msgspec cannot inherit beside the other."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: msgspec.Raw = NULL
    tool_choice: msgspec.Raw = NULL
    functions: msgspec.Raw = NULL
    reasoning_effort: msgspec.Raw = NULL
    reasoning_budget: msgspec.Raw = NULL


decoder = msgspec.json.Decoder(ChatRequest)


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("chat", __name__)

    @routes.post(ENDPOINT)
    @routes.post("/chat/completions")
    async def chat_completions() -> Response:
        return await answer(context, await wire.read(decoder))

    return routes


async def answer(context: Context, body: ChatRequest) -> Response:
    """Answer a conversation. Raises: RequestError."""
    model = context.served(body.model)
    _refuse_unserved(body)
    n_logprobs = _n_logprobs(body)
    asked = wanted(body, model, context.sampling_defaults, max_tokens=None, timeout_s=context.settings.timeout_s)
    check_room(context, asked.n, "n")
    text = await render(model, body)
    prompts.check_fits(model, text)
    tokens = await prompts.chat_prompt(context, text, "messages")
    specs = asked.specs([tokens], n_logprobs=n_logprobs, key=g.key, request_id=g.request_id)
    generation = open_generation(context, specs, ENDPOINT)
    names = TokenNames(model.vocabulary, asked.stopping.stop_token_ids)
    if body.stream:
        first = await generation.first_events()
        head = envelope("chatcmpl", "chat.completion.chunk", model.name)
        shape = ChatStream(head, names, asked.n, include_usage=body.include_usage)
        return sse_response(SseBody(generation, first, shape, openai_shape))
    completions = await generation.complete()
    account = Account([completion.finished for completion in completions], asked.n)
    choices = [_choice(i, completion, names) for i, completion in enumerate(completions)]
    head = envelope("chatcmpl", "chat.completion", model.name)
    return json_response(head(choices, usage=account.usage(), timings=account.timings()), account.headers())


def _refuse_unserved(body: ChatRequest) -> None:
    body.refuse_unserved("tools", "functions", "reasoning_effort", "reasoning_budget")
    if not is_nothing(body.tool_choice) and bytes(body.tool_choice) not in (b'"none"', b'"auto"'):
        raise InvalidRequest("tool_choice: there are no tools to choose from", param="tool_choice")


def _n_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs: it needs logprobs true", param="top_logprobs")
    return None


# --- messages ----------------------------------------------------------------------------------------------------------


async def render(model: ServedModel, body: Conversation | ChatRequest) -> str:
    """The conversation as the model's own template writes it. Raises: InvalidRequest · NotSupported · TemplateFailed."""
    return await prompts.render(
        model,
        [_message(message, f"messages[{i}]") for i, message in enumerate(body.messages)],
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=body.chat_template_kwargs or {},
    )


def _message(message: Message, place: str) -> dict[str, Any]:
    if message.role in ("tool", "function") or not is_nothing(message.tool_calls):
        raise NotSupported(f"{place}: tool calls are not supported", param=place)
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(f"{place}.role: expected one of {', '.join(ROLES)}", param=f"{place}.role")
    rendered = {"role": role, "content": _content(message, place)}
    for name in ("name", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            rendered[name] = value
    return rendered


def _content(message: Message, place: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":  # one that only called tools
            return ""
        raise InvalidRequest(f"{place}.content: it is missing", param=f"{place}.content")
    return "\n".join([_part(part, f"{place}.content[{i}]") for i, part in enumerate(message.content)])  # as llama.cpp joins them


def _part(part: Part, place: str) -> str:
    if part.type not in ("text", "input_text"):
        raise InvalidRequest(f"{place}: this model takes text, not {part.type[:40]!r}", param=f"{place}.type")
    if part.text is None:
        raise InvalidRequest(f"{place}.text: it is missing", param=f"{place}.text")
    return part.text


# --- answers -----------------------------------------------------------------------------------------------------------


def _choice(index: int, completion: Completion, names: TokenNames) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": completion.text, "refusal": None},
        "logprobs": None if completion.logprobs is None else _logprobs(completion.logprobs, names),
        "finish_reason": completion.finished.reason.value,
        "stop_reason": completion.finished.stop_reason,
    }


def _logprobs(logprobs: list[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    content = []
    for one in names.shown(logprobs):
        top = [_token(token, logprob, names) for token, logprob in one.top]
        content.append({**_token(one.token, one.logprob, names), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _token(token: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    raw = names.raw(token)
    return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}


class ChatStream(OpenAiStream):
    """See `cllm.api.sse.Shape`."""

    def __init__(self, head: Any, names: TokenNames, n: int, *, include_usage: bool) -> None:
        super().__init__(head, n, n=n, include_usage=include_usage)
        self._names = names

    def first(self) -> bytes:
        """Who speaks."""
        return b"".join([data(self._with({"role": "assistant", "content": ""}, i)) for i in range(self._n)])

    def delta(self, index: int, event: Delta) -> bytes:
        """New text, and the logprobs of new tokens where asked for, even of those that have no text yet."""
        if event.logprobs is None:
            return self.text(index, event.text)
        logprobs = _logprobs(event.logprobs, self._names)
        return data(self.chunk(index, event.text, logprobs)) if event.text or logprobs["content"] else b""

    def choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        """One choice with new text."""
        return {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}

    def end(self, index: int, event: Finished) -> dict[str, Any]:
        """One choice that has ended."""
        return {
            "index": index,
            "delta": {},
            "logprobs": None,
            "finish_reason": event.reason.value,
            "stop_reason": event.stop_reason,
        }

    def _with(self, delta: dict[str, str], index: int) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self.envelope([choice], **self._extra)
