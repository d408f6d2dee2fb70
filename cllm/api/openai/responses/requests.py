"""What clients of the Responses API send: the types of a body, and the conversation that it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cllm.api.conversation import Conversation
from cllm.api.openai.messages import NOT_SEEN, arguments_told
from cllm.api.openai.responses.functions import ToolChoice, ToolFields, full_name, toolbox_of
from cllm.api.sampling_fields import Limit, SamplingFields
from cllm.api.structured import Form, ResponseFormat, any_object, schema_form
from cllm.api.tool_checks import N_TOOLS_MAX
from cllm.api.wire import NULL, is_nothing
from cllm.errors import InvalidRequest, NotSupported
from cllm.text.thinking import Thinking

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Part(msgspec.Struct, omit_defaults=True):
    """A part of an item's content."""

    type: str = ""
    text: str | None = None
    refusal: str | None = None
    encrypted_content: str | None = None  # of a message between agents: a text, where it was not OpenAI's server that encrypted it


class Item(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A message, also one between agents, a call, its output, or reasoning; `type` says which, and a message may leave it out."""

    type: str | None = None
    id: str | None = None
    status: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None  # of the function that is called
    arguments: str | dict[str, Any] | None = None  # an object only where a tool of OpenAI's is called
    input: str | None = None  # of a custom tool, which takes any text
    output: str | list[Part] | dict[str, Any] | None = None  # an object only where a tool of OpenAI's was called
    summary: list[Part] | None = None
    encrypted_content: str | None = None  # of reasoning, for clients that bring back nothing else of it


class Format(msgspec.Struct):
    """`text.format`; `strict` changes nothing: a schema is always held to."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Meta(max_length=128)] | None = None
    description: Annotated[str, Meta(max_length=16_384)] | None = None
    schema: msgspec.Raw = NULL
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    """What the answer's text has to be."""

    format: Format | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    """Whether the model is to think before it answers, and how much."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class CreateRequest(SamplingFields, kw_only=True):
    """The body of POST /v1/responses. All sampling fields of this server are taken beside OpenAI's own."""

    input: str | list[Item] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Limit | None = None
    tools: Annotated[list[ToolFields], Meta(max_length=N_TOOLS_MAX)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    background: bool | None = None
    conversation: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL
    response_format: ResponseFormat | None = None  # this and the next are chat's names
    reasoning_effort: msgspec.Raw = NULL
    user: Annotated[str, Meta(max_length=512)] | None = None


class SentTools(msgspec.Struct):
    """The tools of the same body, with all their members."""

    tools: list[dict[str, Any]] | None = None


def refuse_unserved(body: CreateRequest) -> None:
    """Say what cannot be done rather than leave it out. Raises: InvalidRequest · NotSupported."""
    for name, why in (
        ("background", "a response is given to whoever waits for it"),
        ("conversation", "conversations are not kept here; previous_response_id goes on from a response"),
        ("prompt", "prompts are not kept here"),
        ("reasoning_effort", "here it is reasoning.effort"),
    ):
        value = getattr(body, name)
        if not is_nothing(value) if isinstance(value, msgspec.Raw) else value:
            raise InvalidRequest(f"{name}: {why}", param=name)
    if body.response_format is not None and body.response_format.type != "text":  # which asks for nothing
        raise InvalidRequest("response_format: here it is text.format", param="response_format")
    if body.truncation == "auto":
        raise InvalidRequest("truncation: nothing is left out of a conversation here; expected disabled", param="truncation")
    if body.n not in (None, 1):
        raise InvalidRequest("n: this endpoint gives one answer; /v1/chat/completions gives several", param="n")
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        raise NotSupported("logprobs are not supported here; /v1/chat/completions has them", param="top_logprobs")


# --- items -------------------------------------------------------------------------------------------------------------


def input_items(body: CreateRequest, item_of: Callable[[str], Item | None]) -> tuple[Item, ...]:
    """What the request brings, checked; `item_of` gives an item that is kept. Raises: InvalidRequest."""
    if isinstance(body.input, str):
        return (Item(type="message", role="user", content=body.input),)
    referred: set[str] = set()
    given = [_meant(item, f"input[{i}]", item_of, referred) for i, item in enumerate(body.input or ())]
    for i, item in enumerate(given):
        _check(item, f"input[{i}]")
    items = tuple(_as_function(item) for item in given if item.type not in _OTHERS_DOINGS)
    if not items and body.previous_response_id is None:
        raise InvalidRequest("input: there is nothing in it", param="input")
    return items


def is_reference(item: Item) -> bool:
    """Whether it only says which item is meant; such a one may leave out its type, and then has an id alone."""
    return item.type == "item_reference" or (item.id is not None and item == Item(id=item.id))


def _meant(item: Item, place: str, item_of: Callable[[str], Item | None], referred: set[str]) -> Item:
    """The item itself, or the kept one that it stands for: once, or a short body would be as long as somebody likes."""
    if not is_reference(item):
        return item
    if item.id in referred:
        raise InvalidRequest(f"{place}.id: {str(item.id)[:100]!r} is referred to twice", param=f"{place}.id")
    kept = None if item.id is None else item_of(item.id)
    if kept is None:
        raise InvalidRequest(f"{place}.id: there is no item {str(item.id)[:100]!r} here, or no longer", param=f"{place}.id")
    referred.add(str(item.id))
    return kept


def _as_function(item: Item) -> Item:
    """A custom tool's call as a function's, of whose arguments the text is one; its output likewise. No output is an empty one."""
    if item.type == "custom_tool_call":
        arguments = json.dumps({"input": item.input}, ensure_ascii=False)
        return msgspec.structs.replace(item, type="function_call", arguments=arguments, input=None)
    if item.type in ("function_call_output", "custom_tool_call_output"):
        return msgspec.structs.replace(item, type="function_call_output", output="" if item.output is None else item.output)
    return item


_NEEDED = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id",),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id",),
    "reasoning": (),
    "agent_message": ("content",),
}
_TEXTS = ("text", "input_text", "output_text", "reasoning_text", "summary_text")  # types of parts
# What was done with OpenAI's own tools, which a conversation that began there brings along: no turn, as the tools are not offered.
_OTHERS_DOINGS = frozenset({
    "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "computer_call", "computer_call_output", "file_search_call",
    "image_generation_call", "local_shell_call", "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call",
    "mcp_list_tools", "program", "program_output", "shell_call", "shell_call_output", "tool_search_call", "tool_search_output",
    "web_search_call",
})  # fmt: skip


def _check(item: Item, place: str) -> None:
    kind = item.type or "message"
    if kind == "message":
        if item.role not in ROLES:
            raise InvalidRequest(f"{place}.role: expected one of {', '.join(ROLES)}", param=f"{place}.role")
        if item.content is None:
            raise InvalidRequest(f"{place}.content: it is missing", param=f"{place}.content")
    elif kind in _OTHERS_DOINGS:
        return
    elif kind not in _NEEDED:
        known = ", ".join(["message", *_NEEDED, "item_reference"])
        raise InvalidRequest(f"{place}.type: expected one of {known}, not {kind[:40]!r}", param=f"{place}.type")
    for name in _NEEDED.get(kind, ()):
        if getattr(item, name) is None:
            raise InvalidRequest(f"{place}.{name}: it is missing", param=f"{place}.{name}")
    text = item.arguments
    if kind == "function_call" and (not isinstance(text, str) or arguments_told(text) is None):
        raise InvalidRequest(f"{place}.arguments: expected a JSON object as text", param=f"{place}.arguments")
    if isinstance(item.output, dict):
        raise InvalidRequest(f"{place}.output: expected a text, or parts of one", param=f"{place}.output")
    for name in ("content", "output"):
        parts = getattr(item, name)
        for i, part in enumerate(parts if isinstance(parts, list) else ()):
            is_text = any(text is not None for text in (part.text, part.refusal, part.encrypted_content))
            if not is_text and not (name == "output" and part.type in NOT_SEEN):
                where = f"{place}.{name}[{i}]"
                if part.type in _TEXTS:
                    raise InvalidRequest(f"{where}.text: it is missing", param=f"{where}.text")
                raise InvalidRequest(f"{where}: this model takes text, not {part.type[:40]!r}", param=where)


_SEAL = "cllm:"  # what OpenAI's servers have encrypted does not begin so


def sealed(thought: str) -> str:
    """Reasoning as clients bring it back that take it for encrypted."""
    return _SEAL + thought


def unsealed(text: str | None) -> str:
    """The same read again; nothing of what another server has encrypted."""
    return text.removeprefix(_SEAL) if text is not None and text.startswith(_SEAL) else ""


def _parts(output: str | list[Part] | dict[str, Any] | None) -> str | list[Part] | None:
    """What a call gave; an object is none of a tool's that was offered here."""
    return None if isinstance(output, dict) else output


def messages_of(items: Iterable[Item]) -> list[dict[str, Any]]:
    """The turns that items stand for: reasoning, text and calls of the assistant that follow each other are one turn."""
    turns: list[dict[str, Any]] = []  # with their texts one by one
    for item in items:
        match item.type:
            case "function_call":
                arguments = arguments_told(item.arguments) if isinstance(item.arguments, str) else None
                function = {"name": full_name(item.namespace, item.name or ""), "arguments": arguments or "{}"}
                _assistant(turns).setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
            case "function_call_output":
                turns.append({"role": "tool", "tool_call_id": item.call_id, "content": [_text(_parts(item.output))]})
            case "reasoning":
                if thought := _text(item.content) or unsealed(item.encrypted_content):
                    turns.append({"role": "assistant", "content": [], "reasoning_content": thought})
            case "agent_message":
                turns.append({"role": "user", "content": [_text(item.content)]})
            case _ if item.role == "assistant":
                _assistant(turns)["content"].append(_text(item.content))
            case _:
                turns.append({"role": ROLES[item.role or "user"], "content": [_text(item.content)]})
    return [turn | {"content": "\n".join([text for text in turn["content"] if text])} for turn in turns]


def _assistant(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's turn that is under way, or a new one."""
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": []})
    return turns[-1]


def _text(content: str | list[Part] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join([part.text or part.refusal or part.encrypted_content or NOT_SEEN.get(part.type, "") for part in content])


# --- what it stands for ------------------------------------------------------------------------------------------------


def conversation_of(body: CreateRequest, items: Iterable[Item]) -> Conversation:
    """What is to be answered: the request's instructions, and all items up to now. Raises: InvalidRequest."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    effort = None if body.reasoning is None else body.reasoning.effort
    return Conversation(
        messages=[*system, *messages_of(items)],
        turns_field="input",
        toolbox=toolbox_of(body.tools or [], body.tool_choice, parallel=body.parallel_tool_calls is not False),
        form=_form(body),
        thinking=Thinking(effort=effort, names={"reasoning_effort": "reasoning.effort"}),
    )


def _form(body: CreateRequest) -> Form | None:
    given = None if body.text is None else body.text.format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return any_object("text.format")
    if is_nothing(given.schema):
        raise InvalidRequest("text.format.schema: it is missing", param="text.format.schema")
    return schema_form(given.schema, "text.format.schema")
