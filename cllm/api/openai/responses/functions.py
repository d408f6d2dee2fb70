"""The functions that a request offers. A namespace's have its name before theirs where the model is told of them, and only there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from cllm.api.tool_checks import N_TOOLS_MAX, parameters_of
from cllm.errors import InvalidRequest
from cllm.text.tools import Tool, Toolbox, ToolUse

Names: TypeAlias = Mapping[str, dict[str, str]]
"""For each function of a namespace, by the name that the model knows: the members of a call that say which it is."""


class ToolFields(msgspec.Struct):
    """A tool that may be called, or a namespace of such."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: Annotated[list[ToolFields], Meta(max_length=N_TOOLS_MAX)] | UnsetType | None = UNSET  # a namespace's
    namespace: str | UnsetType | None = UNSET  # whose function is meant, in a choice


class ToolChoice(msgspec.Struct):
    """The function that is to be called, or those that may be (`allowed_tools`)."""

    type: str
    name: str | None = None
    namespace: str | UnsetType | None = UNSET
    mode: Literal["auto", "required"] | None = "auto"
    tools: Annotated[list[ToolFields], Meta(max_length=N_TOOLS_MAX)] | None = None


def full_name(namespace: str | UnsetType | None, name: str) -> str:
    """Return the name by which the model knows a function."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def names_of(tools: list[ToolFields]) -> Names:
    """Return what tells the calls of namespaces' functions."""
    return {
        full_name(tool.name, member.name): {"name": member.name, "namespace": tool.name}
        for tool in tools
        if tool.type == "namespace" and tool.name
        for member in tool.tools or ()
        if member.type == "function" and member.name
    }


def toolbox_of(tools: list[ToolFields], choice: str | ToolChoice | None, *, parallel: bool) -> Toolbox:
    """Return what may be called. Raises: InvalidRequest."""
    functions = tuple(_functions(tools))
    if tools and not functions:  # beside functions, clients offer such whatever the server
        kind = tools[0].type[:40]
        raise InvalidRequest(f"tools[0].type: this server runs no tools of its own, such as {kind!r}", param="tools[0].type")
    if choice is None or isinstance(choice, str):
        use = ToolUse(choice or "auto")
        if use is ToolUse.REQUIRED and not functions:
            raise InvalidRequest("tool_choice: there are no tools to choose from", param="tool_choice")
        return Toolbox(tools=functions, use=use, parallel=parallel)
    if choice.type == "allowed_tools":
        return _allowed(choice, functions, parallel=parallel)
    if choice.type != "function":
        raise InvalidRequest(f"tool_choice.type: expected function, not {choice.type[:40]!r}", param="tool_choice.type")
    name = full_name(choice.namespace, choice.name or "")
    if name not in {function.name for function in functions}:
        raise InvalidRequest("tool_choice.name: there is no such tool", param="tool_choice.name")
    return Toolbox(tools=functions, use=ToolUse.REQUIRED, only=name, parallel=parallel)


def _functions(tools: list[ToolFields]) -> Iterator[Tool]:
    for i, tool in enumerate(tools):
        if tool.type == "function":
            yield _function(tool, None, f"tools[{i}]")
        elif tool.type == "namespace":
            namespace = _name(tool, f"tools[{i}]")
            for j, member in enumerate(tool.tools or ()):
                if member.type == "function":
                    yield _function(member, namespace, f"tools[{i}].tools[{j}]")


def _function(tool: ToolFields, namespace: str | None, place: str) -> Tool:
    name = full_name(namespace, _name(tool, place))
    return Tool(name, tool.description or "", parameters_of(tool.parameters), bool(tool.strict), place)


def _name(tool: ToolFields, place: str) -> str:
    if not tool.name:
        raise InvalidRequest(f"{place}.name: it is missing", param=f"{place}.name")
    return tool.name


def _allowed(choice: ToolChoice, functions: tuple[Tool, ...], *, parallel: bool) -> Toolbox:
    # Tools of the provider's are left out here as they are of `tools`.
    names = {full_name(tool.namespace, tool.name or "") for tool in choice.tools or [] if tool.type == "function"}
    if not names or names - {function.name for function in functions}:
        raise InvalidRequest("tool_choice.tools: expected some of the functions in tools", param="tool_choice.tools")
    allowed = tuple(function for function in functions if function.name in names)
    return Toolbox(tools=allowed, use=ToolUse(choice.mode or "auto"), parallel=parallel)
