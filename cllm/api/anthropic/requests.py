"""What Anthropic's clients send: the types of a body, and the conversation that it stands for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from cllm.api.anthropic.blocks import (
    Block,
    Compaction,
    Document,
    Image,
    RedactedThought,
    SearchResult,
    ServersDoing,
    Text,
    Thought,
    ToolAddition,
    ToolCall,
    ToolFields,
    ToolReference,
    ToolRemoval,
    ToolResult,
)
from cllm.api.conversation import Conversation
from cllm.api.openai.messages import NOT_SEEN, arguments_told
from cllm.api.sampling_fields import LimitOrPrompt, SamplingFields, StopString
from cllm.api.structured import Form, schema_form
from cllm.api.tool_checks import N_TOOLS_MAX, with_properties
from cllm.errors import InvalidRequest
from cllm.text.thinking import Thinking
from cllm.text.tools import Tool, Toolbox, ToolUse


class Message(msgspec.Struct):
    """One turn, or a part of one."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


# --- the rest of a body ------------------------------------------------------------------------------------------------


class ToolChoice(msgspec.Struct):
    """Whether tools are to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingFields(msgspec.Struct):
    """Whether the model is to think before it answers, and how much."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1, le=1 << 31)] | None = None


class Format(msgspec.Struct):
    """What the answer's text has to be."""

    type: Literal["json_schema"]
    schema: msgspec.Raw


class OutputConfig(msgspec.Struct):
    """Further wishes for the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


class Metadata(msgspec.Struct):
    """Taken, and without effect."""

    user_id: str | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """The body of count_tokens: what a prompt is made of."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str | None = None
    system: str | list[Text] | None = None
    tools: Annotated[list[ToolFields], Meta(max_length=N_TOOLS_MAX)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(SamplingFields, kw_only=True):
    """The body. All sampling fields of this server are taken beside Anthropic's own; a `CountRequest` too."""

    max_tokens: LimitOrPrompt
    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str | None = None
    top_p: Annotated[float, Meta(ge=-1.0, le=1.0)] | None = None  # below 0: not set, as LangChain's package for JavaScript sends it
    system: str | list[Text] | None = None
    tools: Annotated[list[ToolFields], Meta(max_length=N_TOOLS_MAX)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingFields | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    metadata: Metadata | None = None
    stream: bool | None = None


# --- what it stands for ------------------------------------------------------------------------------------------------


def conversation_of(body: CountRequest | MessagesRequest) -> Conversation:
    """What is to be answered; a last turn of the assistant's is gone on from, unless it called something. Raises: InvalidRequest."""
    turns = _joined(body.messages)
    messages = [*_system(body.system), *turns]
    if not turns:
        raise InvalidRequest("messages: there is nothing in them", param="messages")
    last = messages[-1]  # of the turns that say something; one of the user's may tell of tools alone
    goes_on = body.messages[-1].role == last["role"] == "assistant" and not last.get("tool_calls")
    return Conversation(
        messages=messages,
        toolbox=_toolbox([*(body.tools or ()), *_added(body)], body.tool_choice),
        tool_fields=("name", "input_schema"),
        thinking=_thinking(body),
        form=_form(body),
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
    )


N_ERROR_SAID: Final = 80  # characters in which a tool's result has said that it is an error, if it says so
_BILLING: Final = "x-anthropic-billing-header:"  # the line that Claude Code begins its system message with, and Anthropic takes away


def _system(system: str | list[Text] | None) -> Iterator[dict[str, Any]]:
    text = system if isinstance(system, str) else "\n".join([block.text for block in system or []])
    if text.startswith(_BILLING):  # another one with each conversation or request, it would keep all behind it from being cached
        text = text.partition("\n")[2]
    if text:
        yield {"role": "system", "content": text}


def _joined(messages: list[Message]) -> list[dict[str, Any]]:
    """The turns as templates take them: neighbours of one role are one turn, as Anthropic has it."""
    neighbours: list[list[dict[str, Any]]] = []
    for i, message in enumerate(messages):
        for turn in _turns(message, f"messages[{i}].content"):
            if neighbours and neighbours[-1][0]["role"] == turn["role"] != "tool":
                neighbours[-1].append(turn)
            else:
                neighbours.append([turn])
    return [_one(turns) for turns in neighbours]


def _one(turns: list[dict[str, Any]]) -> dict[str, Any]:
    """One turn in place of several: all their texts, thoughts and calls, and of everything else the latest."""
    turn = {name: value for each in turns for name, value in each.items()}
    turn["content"] = "\n".join([each["content"] for each in turns if each["content"]])
    if thoughts := [each["reasoning_content"] for each in turns if "reasoning_content" in each]:
        turn["reasoning_content"] = "\n\n".join(thoughts)
    if calls := [call for each in turns for call in each.get("tool_calls", ())]:
        turn["tool_calls"] = calls
    return turn


def _turns(message: Message, place: str) -> Iterator[dict[str, Any]]:
    """A message as one turn, after a turn for each result of a call that it brings."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    texts: list[str] = []
    thoughts: list[str] = []
    said: dict[str, Any] = {}
    n_others = 0  # blocks that are no part of the turn itself
    for i, block in enumerate(message.content):
        match block:
            case Text():
                texts.append(block.text)
            case ToolResult() if message.role == "user":
                n_others += 1
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result(block)}
            case ToolCall() if message.role == "assistant":
                said.setdefault("tool_calls", []).append(_call(block, f"{place}[{i}]"))
            case Thought() if message.role == "assistant":
                thoughts += [block.thinking] if block.thinking else []
            case Document(text=str(text)) | SearchResult(text=text) if message.role == "user":
                texts.append(text)
            case Compaction():
                texts += [block.content] if block.content else []
            case RedactedThought():
                pass
            case ToolAddition() | ToolRemoval() | ServersDoing():
                n_others += 1
            case _:
                raise _misplaced(block, message.role, f"{place}[{i}]")
    if thoughts:
        said["reasoning_content"] = "\n\n".join(thoughts)
    if texts or said or not n_others:
        yield {"role": message.role, "content": "\n".join(texts), **said}


def _misplaced(block: Block, role: str, place: str) -> InvalidRequest:
    is_unreadable = isinstance(block, Image) or (isinstance(block, Document) and block.text is None)
    if is_unreadable:  # by these words Claude Code knows what to take out, and goes on without it
        what = "image" if isinstance(block, Image) else "PDF"
        return InvalidRequest(f"{place}: Could not process {what}: this model takes text alone", param=place)
    return InvalidRequest(f"{place}: a message of the role {role} cannot hold this", param=place)


def _result(block: ToolResult) -> str:
    """What a tool gave, as text; templates have no other place for that it failed."""
    text = _result_text(block)
    if not block.is_error or "error" in text[:N_ERROR_SAID].lower():
        return text
    return f"Error: {text}" if text else "Error"


def _result_text(block: ToolResult) -> str:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    texts = []
    for one in block.content:
        match one:
            case Text():
                texts.append(one.text)
            case ToolReference():
                texts.append(f"The tool {one.tool_name} may be called.")
            case Image():  # which the model asked for: to refuse it would end the conversation, of which it stays a part
                texts.append(NOT_SEEN["image_url"])
            case Document(text=str(text)) | SearchResult(text=text):
                texts.append(text)
            case Document():
                texts.append("(a document, which cannot be read here)")
    return "\n".join(texts)


def _call(block: ToolCall, place: str) -> dict[str, Any]:
    arguments = arguments_told(block.input) if isinstance(block.input, str) else msgspec.json.encode(block.input or {}).decode()
    if arguments is None:
        raise InvalidRequest(f"{place}.input: expected an object", param=f"{place}.input")
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _form(body: CountRequest | MessagesRequest) -> Form | None:
    if isinstance(body, MessagesRequest) and body.output_format is not None:
        return schema_form(body.output_format.schema, "output_format.schema")
    if body.output_config is None or body.output_config.format is None:
        return None
    return schema_form(body.output_config.format.schema, "output_config.format.schema")


def _added(body: CountRequest | MessagesRequest) -> Iterator[ToolFields]:
    """The tools that come with a turn, each once, and none that is there from the beginning."""
    known = {tool.name for tool in body.tools or ()}
    for message in body.messages:
        for block in message.content if isinstance(message.content, list) else ():
            for change in (block.tool_changes or ()) if isinstance(block, Compaction) else (block,):
                tool = change.tool.definition if isinstance(change, ToolAddition) else None
                if tool is not None and tool.name is not None and tool.name not in known:
                    known.add(tool.name)
                    yield tool


_SERVERS_TOOLS: Final = ("web_search_", "web_fetch_", "code_execution_", "advisor_", "tool_search_tool_", "mcp_toolset")


def _toolbox(tools: list[ToolFields], choice: ToolChoice | None) -> Toolbox:
    given = [(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    # Beside tools of their own, clients offer such as Anthropic's servers run, whatever the server.
    own = [(tool, place) for tool, place in given if not (tool.type or "").startswith(_SERVERS_TOOLS)] or given
    known = tuple(_tool(tool, place) for tool, place in own)
    if choice is None:
        return Toolbox(tools=known)
    if choice.type in ("any", "tool") and not known:
        raise InvalidRequest("tool_choice: there are no tools to choose from", param="tool_choice")
    if choice.type == "tool" and choice.name not in {tool.name for tool in known}:
        raise InvalidRequest("tool_choice.name: there is no such tool", param="tool_choice.name")
    use = {"auto": ToolUse.AUTO, "none": ToolUse.NONE}.get(choice.type, ToolUse.REQUIRED)
    only = choice.name if choice.type == "tool" else None
    return Toolbox(tools=known, use=use, only=only, parallel=not choice.disable_parallel_tool_use)


def _tool(tool: ToolFields, place: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(f"{place}.type: this server runs no tools of its own, such as {tool.type[:40]!r}", param=f"{place}.type")
    if tool.name is None:
        raise InvalidRequest(f"{place}.name: it is missing", param=f"{place}.name")
    if tool.input_schema is None:
        raise InvalidRequest(f"{place}.input_schema: it is missing", param=f"{place}.input_schema")
    return Tool(tool.name, tool.description or "", with_properties(tool.input_schema), bool(tool.strict), place)


_NAMES: Final = {
    "reasoning_budget": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "chat_template_kwargs": "thinking",
}


def _thinking(body: CountRequest | MessagesRequest) -> Thinking:
    effort = None if body.output_config is None else body.output_config.effort
    match body.thinking:
        case None | ThinkingFields(type="adaptive" | "between_tools"):
            return Thinking(effort=effort, names=_NAMES)
        case ThinkingFields(type="disabled"):
            return Thinking(enabled=False, names=_NAMES)
        case ThinkingFields(budget_tokens=None):
            raise InvalidRequest("thinking.budget_tokens: it is missing", param="thinking.budget_tokens")
        case ThinkingFields(budget_tokens=n_tokens):
            return Thinking(enabled=True, effort=effort, n_tokens_max=n_tokens, names=_NAMES)
