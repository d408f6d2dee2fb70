"""OpenAI's fields about tools and reasoning, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from cllm.api.openai.shapes import CommonFields
from cllm.api.sampling_fields import INT32_MAX
from cllm.api.tool_checks import N_TOOLS_MAX, parameters_of
from cllm.api.wire import NULL, is_nothing
from cllm.errors import InvalidRequest
from cllm.text.thinking import SWITCHES, Thinking
from cllm.text.tools import Tool, Toolbox, ToolUse

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class FunctionFields(msgspec.Struct):
    """A function that may be called; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(msgspec.Struct):
    """A tool."""

    type: str
    function: FunctionFields | None = None


class Named(msgspec.Struct):
    """A function by its name."""

    name: str


class AllowedTools(msgspec.Struct):
    """Some of the tools, and whether one of them must be called."""

    tools: list[ToolFields]
    mode: Literal["auto", "required"] | None = "auto"


class ToolChoice(msgspec.Struct):
    """Which tool must be called."""

    type: str
    function: Named | None = None
    allowed_tools: AllowedTools | None = None


class ToolingFields(CommonFields, kw_only=True):
    """The fields by their wire names."""

    tools: Annotated[list[ToolFields], Meta(max_length=N_TOOLS_MAX)] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: msgspec.Raw = NULL
    function_call: msgspec.Raw = NULL
    reasoning_effort: Effort | None = None
    reasoning_budget: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None  # -1: no limit, as in llama-server


def thinking_of(fields: ToolingFields, variables: Mapping[str, Any]) -> Thinking:
    """What the fields want of reasoning; a switch among the template's variables prevails over an effort."""
    n_tokens_max = None if fields.reasoning_budget == -1 else fields.reasoning_budget
    enabled = None
    if fields.reasoning_effort is not None:
        enabled = next((variables[name] for name in SWITCHES if isinstance(variables.get(name), bool)), None)
    names = {} if variables else {"chat_template_kwargs": "reasoning_budget"}  # of which 0 is a switch
    return Thinking(enabled=enabled, effort=fields.reasoning_effort, n_tokens_max=n_tokens_max, names=names)


def toolbox_of(fields: ToolingFields) -> Toolbox:
    """What the fields offer. Raises: InvalidRequest."""
    for name in ("functions", "function_call"):
        if not is_nothing(getattr(fields, name)) and bytes(getattr(fields, name)) not in (b'"none"', b'"auto"'):
            raise InvalidRequest(f"{name}: OpenAI has replaced it by tools and tool_choice, which are taken", param=name)
    tools = tools_of(fields.tools)
    choice, parallel = fields.tool_choice, fields.parallel_tool_calls is not False
    if isinstance(choice, str):
        return Toolbox(tools=tools, use=_use(choice, tools), parallel=parallel)
    if choice is None:
        return Toolbox(tools=tools, parallel=parallel)
    if choice.type in {use.value for use in ToolUse}:  # as Cursor sends it
        return Toolbox(tools=tools, use=_use(choice.type, tools), parallel=parallel)
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        return _allowed(choice.allowed_tools, tools, parallel=parallel)
    if choice.type != "function" or choice.function is None:
        raise InvalidRequest("tool_choice: expected none, auto, required or a function's name", param="tool_choice")
    _check_known(choice.function.name, tools, "tool_choice.function.name")
    return Toolbox(tools=tools, use=ToolUse.REQUIRED, only=choice.function.name, parallel=parallel)


def tools_of(given: list[ToolFields] | None) -> tuple[Tool, ...]:
    """The tools, in their order. Raises: InvalidRequest."""
    return tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(given or []))


def _tool(tool: ToolFields, place: str) -> Tool:
    if tool.type != "function":
        raise InvalidRequest(f"{place}.type: this server knows functions, not {tool.type[:40]!r}", param=f"{place}.type")
    function = tool.function
    if function is None:
        raise InvalidRequest(f"{place}.function: it is missing", param=f"{place}.function")
    return Tool(function.name, function.description or "", parameters_of(function.parameters), bool(function.strict), place)


def _use(choice: str, tools: tuple[Tool, ...]) -> ToolUse:
    if choice not in {use.value for use in ToolUse}:
        raise InvalidRequest("tool_choice: expected none, auto, required or a function's name", param="tool_choice")
    if choice == ToolUse.REQUIRED.value and not tools:
        raise InvalidRequest("tool_choice: there are no tools to choose from", param="tool_choice")
    return ToolUse(choice)


def _allowed(allowed: AllowedTools, tools: tuple[Tool, ...], *, parallel: bool) -> Toolbox:
    names = {tool.function.name for tool in allowed.tools if tool.function is not None}
    for name in sorted(names):
        _check_known(name, tools, "tool_choice.allowed_tools.tools")
    chosen = tuple(tool for tool in tools if tool.name in names)
    return Toolbox(tools=chosen, use=_use(allowed.mode or "auto", chosen), parallel=parallel)


def _check_known(name: str, tools: tuple[Tool, ...], place: str) -> None:
    if name not in {tool.name for tool in tools}:
        raise InvalidRequest(f"{place}: there is no tool {name[:128]!r}", param=place)
