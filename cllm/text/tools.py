"""What tools a conversation offers, and how they are to be used: facts, already validated by whoever built them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import attrs


@attrs.frozen
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments, an object's."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = attrs.field(factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False  # whether arguments must fit the schema even where the model calls of its own accord
    place: str = ""  # where the request has it, as in `tools[1]`; "": where it stands among the tools that are offered

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it, which is OpenAI's shape."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


class ToolUse(Enum):
    """Whether tools are called."""

    NONE = "none"
    AUTO = "auto"  # the model decides
    REQUIRED = "required"  # at least one


@attrs.frozen(kw_only=True)
class Toolbox:
    """The tools of a conversation; empty where there are none."""

    tools: tuple[Tool, ...] = ()
    use: ToolUse = ToolUse.AUTO
    only: str | None = None  # the one tool that may be called, with REQUIRED
    parallel: bool = True  # whether an answer may hold several calls

    @property
    def is_open(self) -> bool:
        """Whether the answer may call anything."""
        return bool(self.tools) and self.use is not ToolUse.NONE

    def place(self, i: int) -> str:
        """Where the request has the tool that is the `i`th here."""
        return self.tools[i].place or f"tools[{i}]"

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return tuple(tool for tool in self.tools if self.only in (None, tool.name)) if self.is_open else ()
