"""What messages of Anthropic's clients are made of, and the tools that they offer."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta


class Text(msgspec.Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class Thought(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model wrote for itself in an earlier turn."""

    thinking: str
    signature: str | None = None


class RedactedThought(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """The same, unreadable: of no use here."""

    data: str | None = None


class ToolCall(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call that the model made."""

    id: str
    name: str
    # A text from clients that could not read what a model wrote, an empty list from those whose language writes an empty object so.
    input: dict[str, Any] | Annotated[list[Any], Meta(max_length=0)] | str | None


class Image(msgspec.Struct, tag_field="type", tag="image"):
    """Refused, but for what a tool gave: of that the model is told that it cannot be seen."""


class Source(msgspec.Struct):
    """What a document is, if that is text."""

    type: str | None = None
    data: str | None = None
    content: str | list[Text | Image] | None = None  # in place of `data`, where a client has cut the text into blocks


def _said(source: Source | None) -> str | None:
    match source:
        case Source(type="text"):
            return source.data
        case Source(type="content", content=str(text)):
            return text
        case Source(type="content", content=[*blocks]):
            texts = [block.text for block in blocks if isinstance(block, Text)]
            return "\n".join(texts) if len(texts) == len(blocks) else None
    return None


class Document(msgspec.Struct, tag_field="type", tag="document"):
    """As an image, but for one that is plain text."""

    source: Source | None = None
    title: str | None = None
    context: str | None = None  # words about it

    @property
    def text(self) -> str | None:
        """All of it, where it can be read."""
        said = _said(self.source)
        return None if said is None else "\n".join(filter(None, (self.title, self.context, said)))


class SearchResult(msgspec.Struct, tag_field="type", tag="search_result"):
    """A passage that a client has found, to be quoted from."""

    source: str
    title: str
    content: list[Text]

    @property
    def text(self) -> str:
        """Where it is from, and what it says."""
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class ToolReference(msgspec.Struct, tag_field="type", tag="tool_reference"):
    """A tool that a search for tools has found."""

    tool_name: str


ResultBlock: TypeAlias = Text | Image | Document | SearchResult | ToolReference


class ToolResult(msgspec.Struct, tag_field="type", tag="tool_result"):
    """What came of a call."""

    tool_use_id: str
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


class ToolFields(msgspec.Struct):
    """A tool that may be called."""

    name: Annotated[str, Meta(min_length=1, max_length=128)] | None = None  # a set of tools that a server knows has none
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None


class ChangedTool(msgspec.Struct):
    """One of `tools`, or where `definition` is given one more."""

    type: str | None = None
    definition: ToolFields | None = None


class ToolAddition(msgspec.Struct, tag_field="type", tag="tool_addition"):
    """A tool that may be called from here on. All of `tools` may be from the beginning."""

    tool: ChangedTool


class ToolRemoval(msgspec.Struct, tag_field="type", tag="tool_removal"):
    """A tool that is not to be called from here on: without effect, since what is cached begins with the tools."""


class ServersDoing(msgspec.Struct):
    """What Anthropic's servers did with tools of their own, which a conversation that began there brings along: without effect."""


class ServerToolUse(ServersDoing, tag_field="type", tag="server_tool_use"):
    """`server_tool_use`: without effect."""


class AdvisorResult(ServersDoing, tag_field="type", tag="advisor_tool_result"):
    """`advisor_tool_result`: without effect."""


class WebSearchResult(ServersDoing, tag_field="type", tag="web_search_tool_result"):
    """`web_search_tool_result`: without effect."""


class WebFetchResult(ServersDoing, tag_field="type", tag="web_fetch_tool_result"):
    """`web_fetch_tool_result`: without effect."""


class CodeResult(ServersDoing, tag_field="type", tag="code_execution_tool_result"):
    """`code_execution_tool_result`: without effect."""


class BashResult(ServersDoing, tag_field="type", tag="bash_code_execution_tool_result"):
    """`bash_code_execution_tool_result`: without effect."""


class EditorResult(ServersDoing, tag_field="type", tag="text_editor_code_execution_tool_result"):
    """`text_editor_code_execution_tool_result`: without effect."""


class ToolSearchResult(ServersDoing, tag_field="type", tag="tool_search_tool_result"):
    """`tool_search_tool_result`: without effect."""


class McpToolUse(ServersDoing, tag_field="type", tag="mcp_tool_use"):
    """`mcp_tool_use`: without effect."""


class McpToolResult(ServersDoing, tag_field="type", tag="mcp_tool_result"):
    """`mcp_tool_result`: without effect."""


class McpToolListing(ServersDoing, tag_field="type", tag="mcp_tool_listing"):
    """`mcp_tool_listing`: without effect."""


class Fallback(ServersDoing, tag_field="type", tag="fallback"):
    """`fallback`: without effect."""


class Compaction(msgspec.Struct, tag_field="type", tag="compaction"):
    """What came before it in few words, read as a text, and what had become of the tools by then."""

    content: str | None = None
    tool_changes: list[ToolAddition | ToolRemoval] | None = None


Block: TypeAlias = (
    Text
    | Thought
    | RedactedThought
    | ToolCall
    | ToolResult
    | ToolAddition
    | ToolRemoval
    | Image
    | Document
    | SearchResult
    | ServerToolUse
    | AdvisorResult
    | WebSearchResult
    | WebFetchResult
    | CodeResult
    | BashResult
    | EditorResult
    | ToolSearchResult
    | McpToolUse
    | McpToolResult
    | McpToolListing
    | Fallback
    | Compaction
)
