"""POST /v1/chat/completions."""

from __future__ import annotations

import functools
from typing import Annotated, Any

import attrs
import msgspec
from msgspec import Meta
from quart import Blueprint, Response

from cllm.api import conversation, prompts, wire
from cllm.api.context import Context
from cllm.api.conversation import Answer, AnswerShape, open_chat
from cllm.api.errors import openai_shape
from cllm.api.openai.messages import Message, template_messages
from cllm.api.openai.shapes import Account, OpenAiStream, TokenNames, envelope, json_response, n_shown, token_logprobs
from cllm.api.openai.tools import ToolFields, ToolingFields, thinking_of, toolbox_of, tools_of
from cllm.api.operations import JSON, SSE, Operation
from cllm.api.sse import data
from cllm.api.structured import form_of
from cllm.api.tool_checks import N_TOOLS_MAX
from cllm.api.wire import NULL, is_nothing
from cllm.engine.events import Delta, Finished, TokenLogprob
from cllm.errors import InvalidRequest
from cllm.serve.engine import ServedModel
from cllm.text.thinking import Thinking
from cllm.text.tools import Toolbox

ENDPOINT = "/v1/chat/completions"
TOOL_FIELDS = ("function.name", "function.parameters")


class TemplateOptions(msgspec.Struct, kw_only=True):
    """How the template is to write messages."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: msgspec.Raw = NULL  # refused
    documents: list[dict[str, Any]] | None = None
    tools: Annotated[list[ToolFields], Meta(max_length=N_TOOLS_MAX)] | None = None


class TemplateFields(TemplateOptions, kw_only=True):
    """Messages, and how the template is to write them."""

    messages: Annotated[list[Message], Meta(min_length=1)]


class ChatRequest(ToolingFields, kw_only=True):
    """The body; `TemplateFields` too, which msgspec cannot inherit beside the others."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: msgspec.Raw = NULL  # refused
    documents: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    prompt_logprobs: int | None = None  # refused, but 0: completions have them


decoder = msgspec.json.Decoder(ChatRequest)

_CHAT = Operation(method="POST", path=ENDPOINT, about="answer a conversation", body=ChatRequest, gives=(JSON, SSE), generates=True)
OPERATIONS = (_CHAT, attrs.evolve(_CHAT, path="/chat/completions", alias_of=ENDPOINT))


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
    n_logprobs = _n_logprobs(body)
    _check_limit(body)
    read = functools.partial(conversation_of, body)
    model = await prompts.model_for(context, body.model, body.messages, read)
    asked = context.wanted(body, model, max_tokens=None)
    asks = await prompts.of_turns(model, body.messages, read)
    chat = await open_chat(context, model, asks, asked, endpoint=ENDPOINT, n_logprobs=n_logprobs)
    names = TokenNames(model.vocabulary, asked.stopping.stop_token_ids)
    if body.stream:
        head = envelope("chatcmpl", "chat.completion.chunk", model.name)
        return await chat.stream(ChatStream(head, names, asked.n, include_usage=body.include_usage), openai_shape)
    answers = await chat.complete()
    account = Account([answer.finished for answer in answers], asked.n)
    n_logprobs = sum(n_shown(answer.logprobs or ()) for answer in answers)
    choices = await prompts.by_length(n_logprobs, lambda: [_written(_choice(i, answer, names)) for i, answer in enumerate(answers)])
    head = envelope("chatcmpl", "chat.completion", model.name)
    return json_response(head(choices, usage=account.usage(), timings=account.timings()), account.headers())


def _check_limit(body: ChatRequest) -> None:
    """A conversation is there to be answered: 0, which completions take, is none of its lengths. Raises: InvalidRequest."""
    for name in ("max_completion_tokens", "max_tokens", "n_predict"):
        if getattr(body, name) == 0:
            raise InvalidRequest(f"{name}: expected at least 1{', or -1 for no limit' if name == 'n_predict' else ''}", param=name)


def _n_logprobs(body: ChatRequest) -> int | None:
    if body.prompt_logprobs:
        raise InvalidRequest("prompt_logprobs: /v1/completions has them", param="prompt_logprobs")
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs: it needs logprobs true", param="top_logprobs")
    return None


# --- messages ----------------------------------------------------------------------------------------------------------


def conversation_of(body: TemplateFields | ChatRequest) -> conversation.Conversation:
    """What is to be answered. Raises: InvalidRequest."""
    if not is_nothing(body.chat_template):
        said = "templates come from the model alone; chat_template_kwargs has variables for it"
        raise InvalidRequest(f"chat_template: {said}", param="chat_template")
    documents = body.documents or []
    prompts.check_variables({"documents": documents}, "documents")
    return conversation.Conversation(
        messages=template_messages(body.messages),
        toolbox=toolbox_of(body) if isinstance(body, ChatRequest) else Toolbox(tools=tools_of(body.tools)),
        tool_fields=TOOL_FIELDS,
        thinking=thinking_of(body, body.chat_template_kwargs or {}) if isinstance(body, ChatRequest) else Thinking(),
        form=form_of(body) if isinstance(body, ChatRequest) else None,
        variables=body.chat_template_kwargs or {},
        documents=documents,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )


async def render(model: ServedModel, body: TemplateFields) -> str:
    """The conversation as the model's own template writes it. Raises: InvalidRequest · ContextExceeded by far · TemplateFailed."""
    return await conversation.render(model, await prompts.of_turns(model, body.messages, lambda: conversation_of(body)))


# --- answers -----------------------------------------------------------------------------------------------------------


def _written(choice: dict[str, Any]) -> msgspec.Raw:
    """As JSON, each by itself: while one is written nothing else runs."""
    return msgspec.Raw(msgspec.json.encode(choice))


def _choice(index: int, answer: Answer, names: TokenNames) -> dict[str, Any]:
    return {
        "index": index,
        "message": _answered(answer),
        "logprobs": None if answer.logprobs is None else _logprobs(answer.logprobs, names),
        "finish_reason": answer.finished.reason.value,
        "stop_reason": answer.finished.stop_reason,
    }


def _answered(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in answer.calls
        ]
    return message


def _logprobs(logprobs: list[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    return {"content": token_logprobs(logprobs, names), "refusal": None}


class ChatStream(OpenAiStream, AnswerShape):
    """See `AnswerShape`."""

    def __init__(self, head: Any, names: TokenNames, n: int, *, include_usage: bool) -> None:
        super().__init__(head, n, n=n, include_usage=include_usage)
        self._names = names

    def first(self) -> bytes:
        """Who speaks."""
        return b"".join([self._told(i, {"role": "assistant", "content": ""}) for i in range(self._n)])

    def delta(self, index: int, event: Delta) -> bytes:
        """What is new, and the logprobs of new tokens where asked for, even of those that have no text yet."""
        if event.logprobs is None:
            return AnswerShape.delta(self, index, event)
        logprobs = _logprobs(event.logprobs, self._names)
        if event.parts is None:
            return data(self.chunk(index, event.text, logprobs)) if event.text or logprobs["content"] else b""
        told = self._told(index, {}, logprobs) if logprobs["content"] else b""
        return told + self.parts(index, event.parts)

    def finished(self, index: int, event: Finished) -> bytes:
        """See `AnswerShape.finished`."""
        return AnswerShape.finished(self, index, event)

    def content(self, index: int, text: str) -> bytes:
        """A chunk with text."""
        return self.text(index, text)

    def reasoning(self, index: int, text: str) -> bytes:
        """A chunk with reasoning."""
        return self._told(index, {"reasoning_content": text})

    def call_begun(self, index: int, call: int, call_id: str, name: str) -> bytes:
        """A chunk that opens a call."""
        function = {"name": name, "arguments": ""}
        return self._told(index, {"tool_calls": [{"index": call, "id": call_id, "type": "function", "function": function}]})

    def arguments(self, index: int, call: int, fragment: str) -> bytes:
        """A chunk with a piece of arguments."""
        return self._told(index, {"tool_calls": [{"index": call, "function": {"arguments": fragment}}]})

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

    def _told(self, index: int, delta: dict[str, Any], logprobs: Any = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return data(self.envelope([choice], **self._extra))
