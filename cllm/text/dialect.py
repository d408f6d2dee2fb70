"""How a model speaks beside content: what its chat template and its vocabulary say of reasoning and of tools."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from cllm.backend import Vocabulary
from cllm.errors import TokenizeFailed
from cllm.text import channels
from cllm.text.call_formats import FORMATS, HERMES, MINIMAX, CallFormat
from cllm.text.call_signs import format_of
from cllm.text.reasoning import ReasoningTags, tags_in
from cllm.text.template import ChatTemplate
from cllm.text.wrapping import Wrapping, wrapping_in

GENERIC = "generic"  # Hermes' form, told to the model in a system message


@attrs.frozen(kw_only=True)
class Dialect:
    """Facts about one model."""

    tags: ReasoningTags | None  # None: it does not reason apart
    closing: tuple[int, ...]  # the tokens that end its reasoning
    calls: CallFormat
    wrapping: Wrapping | None = None  # around all that it says; None: there is none
    knows_tools: bool  # its template tells it of tools
    control: Mapping[str, int]  # markers that are control tokens, which text does not show by itself

    @property
    def shown(self) -> frozenset[int]:
        """The tokens that the text must show where it is read."""
        return frozenset(self.control.values())


UNKNOWN = Dialect(tags=None, closing=(), calls=HERMES, knows_tools=True, control={})
"""Of a model whose answers somebody else reads."""


def dialect_of(template: ChatTemplate, vocabulary: Vocabulary, tool_format: str = "auto") -> Dialect:
    """Find out. `tool_format` names a form of tool calls, where what the template says is not to count; what is written in
    channels can be read in these alone.
    """
    in_channels = channels.is_written_in(template.source)
    tags = channels.TAGS if in_channels else tags_in(template.source)
    form = format_of(template.source, template.features.written_call) if template.features.supports_tools or in_channels else None
    named = None if in_channels else FORMATS.get(tool_format)
    # Tools that a template tells in words of its own, and calls in a form that is not known, are told and read as anywhere else.
    is_known = form is not None or named is not None
    knows_tools = template.features.supports_tools and is_known and (in_channels or tool_format != GENERIC)
    calls = named or (form if form is not None and (knows_tools or in_channels) else HERMES)
    markers = (*calls.markers, *(() if tags is None else (tags.opening, tags.closing, *tags.tokens)))
    return Dialect(
        tags=tags,
        closing=() if tags is None else _tokens(vocabulary, tags.cut),
        calls=calls,
        # MiniMax speaks of such tags as well, which it has around what tools gave.
        wrapping=None if tags is None or in_channels or form is MINIMAX else wrapping_in(template.source),
        knows_tools=knows_tools,
        control={marker: token for marker in markers if (token := _control_token(vocabulary, marker)) is not None},
    )


def _tokens(vocabulary: Vocabulary, text: str) -> tuple[int, ...]:
    try:
        return tuple(vocabulary.tokenize(text, add_special=False, parse_special=True))
    except TokenizeFailed:
        return ()


def _control_token(vocabulary: Vocabulary, marker: str) -> int | None:
    tokens = _tokens(vocabulary, marker)
    if len(tokens) != 1 or vocabulary.token_bytes(tokens[0]) or tokens[0] in vocabulary.end_tokens:
        return None
    return tokens[0]
