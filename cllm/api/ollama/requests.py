"""What Ollama's clients send: the types of bodies, and the conversations that they stand for."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cllm.api.conversation import Conversation
from cllm.api.openai.messages import NOT_SEEN
from cllm.api.sampling_fields import INT32_MAX, SamplingFields
from cllm.api.structured import Form, any_object, schema_form
from cllm.api.tool_checks import N_TOOLS_MAX, parameters_of
from cllm.api.wire import NULL, is_nothing
from cllm.errors import InvalidRequest, NotSupported
from cllm.text.call_ids import with_ids
from cllm.text.thinking import Thinking
from cllm.text.tools import Tool, Toolbox


class Options(SamplingFields, kw_only=True):
    """`options`: every sampling field of this server under its own name too. Those of loading, `num_ctx` among them, are the operator's."""

    repeat_penalty: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None  # 0 as 1: some clients mean none by it, and Ollama answers
    num_predict: Annotated[int, Meta(ge=-2, le=INT32_MAX)] | None = None  # 0: the prompt alone; less: to the end of the context


_NO_TIME = re.compile(r"(?:[0.]++(?:ns|us|µs|ms|s|m|h)?+)+")  # a duration as Go writes it: Ollama's own `stop` sends "0s"


def is_no_time(keep_alive: str | float | None) -> bool:
    """Whether a model is to go at once."""
    return _NO_TIME.fullmatch(keep_alive) is not None if isinstance(keep_alive, str) else keep_alive == 0


class CommonFields(msgspec.Struct, kw_only=True):
    """What both ways of generating take."""

    model: str | None = None
    stream: bool | None = None
    format: msgspec.Raw = NULL  # "json", or a JSON Schema
    options: Options | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: str | float | None = None  # taken: a model stays as long as the operator lets it
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None

    @property
    def timeout_s(self) -> float | None:
        """How long its client waits, also for the model to be loaded; None: as long as the server's settings say."""
        return None if self.options is None else self.options.timeout_s


class GenerateRequest(CommonFields, kw_only=True):
    """The body of POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    raw: bool | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[str] | None = None


class CallFunction(msgspec.Struct):
    """What was called."""

    name: str
    arguments: dict[str, Any] | None = None


class Call(msgspec.Struct):
    """A call that the model made."""

    function: CallFunction
    id: str | None = None


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool", "function": "tool"}
THOUGHT = "thinking"  # the role that Continue gives to what the model thought, before what it said then


class Message(msgspec.Struct):
    """One turn of a conversation."""

    role: str  # however it is written
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: Annotated[list[Call], Meta(max_length=1024)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ToolFunction(msgspec.Struct):
    """A function that may be called."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolFields(msgspec.Struct):
    """A tool."""

    function: ToolFunction
    type: Literal["function"] | None = None


class ChatRequest(CommonFields, kw_only=True):
    """The body of POST /api/chat."""

    messages: list[Message] | None = None
    truncate: bool | None = None  # without the oldest turns, if all of them do not fit; unless it is false
    tools: Annotated[list[ToolFields], Meta(max_length=N_TOOLS_MAX)] | None = None


class ShowRequest(msgspec.Struct):
    """The body of POST /api/show, with either name."""

    model: str | None = None
    name: str | None = None


def options_of(body: CommonFields) -> Options:
    """The sampling that is asked for. Raises: InvalidRequest."""
    options = body.options or Options()
    if options.n not in (None, 1):
        raise InvalidRequest("options.n: this endpoint gives one answer; /v1/chat/completions gives several", param="options.n")
    if options.repeat_penalty == 0:
        options.repeat_penalty = 1.0
    if options.num_predict is not None and options.num_predict >= 0:
        options.max_tokens = options.num_predict
    return options


def generate_conversation(body: GenerateRequest) -> Conversation:
    """What a prompt stands for that is no text to be continued as it is. Raises: InvalidRequest."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": body.system}] if body.system else []
    messages.append({"role": "user", "content": body.prompt})
    return Conversation(messages=messages, turns_field="prompt", thinking=_thinking(body), form=form_of(body))


def chat_conversation(body: ChatRequest, *, can_go_on: bool) -> Conversation:
    """What is to be answered; a last turn of the assistant's is gone on from where the model can be told to. Raises: InvalidRequest."""
    messages = with_ids(_turns(body.messages or []))
    # A thought that is the last one belongs to what is to come.
    last = messages[-1] if messages and body.messages and body.messages[-1].role.lower() != THOUGHT else {}
    goes_on = can_go_on and last.get("role") == "assistant" and bool(last["content"]) and not last.get("tool_calls")
    return Conversation(
        messages=messages,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        toolbox=Toolbox(tools=tuple(_tool(tool) for tool in body.tools or [])),
        tool_fields=("function.name", "function.parameters"),
        thinking=_thinking(body),
        form=form_of(body),
    )


def refuse_unserved(body: CommonFields) -> None:
    """Say what cannot be done rather than leave it out. Raises: InvalidRequest · NotSupported."""
    if body.logprobs or body.top_logprobs:
        raise NotSupported("logprobs are not supported here; /v1/chat/completions has them", param="logprobs")
    if isinstance(body, GenerateRequest):
        for name, why in (
            ("template", "templates come from the model alone"),
            ("context", "an earlier answer is gone on from with /api/chat"),
            ("images", "this model takes text alone"),
        ):
            if getattr(body, name):
                raise InvalidRequest(f"{name}: {why}", param=name)


def form_of(body: CommonFields) -> Form | None:
    """What the answer must look like. Raises: InvalidRequest."""
    if is_nothing(body.format):
        return None
    if bytes(body.format) == b'"json"':
        return any_object("format")
    if not bytes(body.format).startswith(b"{"):
        raise InvalidRequest('format: expected "json" or a JSON Schema', param="format")
    return schema_form(body.format, "format")


def _thinking(body: CommonFields) -> Thinking:
    names = {"reasoning_effort": "think", "chat_template_kwargs": "think"}
    if isinstance(body.think, str):
        return Thinking(enabled=True, effort=body.think, names=names)
    return Thinking(enabled=body.think, names=names)


def _turns(messages: list[Message]) -> list[dict[str, Any]]:
    """The turns; what was thought by itself is the next one's, if that is the assistant's."""
    turns: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for i, message in enumerate(messages):
        role = message.role.lower()
        if role == THOUGHT:
            thoughts += [message.content] if message.content else []
            continue
        turn = _message(message, ROLES.get(role), f"messages[{i}]")
        if thoughts and role == "assistant":
            turn.setdefault("reasoning_content", "\n".join(thoughts))
        thoughts = []
        turns.append(turn)
    if messages and not turns:
        raise InvalidRequest(f"messages: there is no turn but {THOUGHT}", param="messages")
    return turns


def _message(message: Message, role: str | None, place: str) -> dict[str, Any]:
    if role is None:
        raise InvalidRequest(f"{place}.role: expected one of {', '.join([*ROLES, THOUGHT])}", param=f"{place}.role")
    if message.images and role != "tool":
        raise InvalidRequest(f"{place}.images: this model takes text alone", param=f"{place}.images")
    texts = [message.content or "", *[NOT_SEEN["image_url"] for _ in message.images or ()]]
    turn: dict[str, Any] = {"role": role, "content": "\n".join(filter(None, texts))}
    known = {"reasoning_content": message.thinking, "name": message.tool_name, "tool_call_id": message.tool_call_id}
    turn.update({name: value for name, value in known.items() if value})
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    return turn


def _call(call: Call) -> dict[str, Any]:
    arguments = msgspec.json.encode(call.function.arguments or {}).decode()
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _tool(tool: ToolFields) -> Tool:
    function = tool.function
    return Tool(function.name, function.description or "", parameters_of(function.parameters))
