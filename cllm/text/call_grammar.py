"""The grammar of answers that must, or may, call tools: names of tools that there are, arguments that fit their schemas.

Reasoning is not its business: a sequence's grammar waits while the model reasons.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from cllm.errors import GrammarInvalid
from cllm.text.call_formats import CallFormat, Frame
from cllm.text.grammar import GrammarSource, Kind, json_rule
from cllm.text.tools import Tool, Toolbox, ToolUse

N_CALLS_MAX: Final = 32  # of an answer that must call: a model that would go on for ever is stopped
_ANY: Final = '{"type": "object"}'
_LEXEMES: Final = ("TEXT: /(.|\\n)*/", "BLANKS: /[ \\t\\r\\n]{1,8}/", "BLANK: / /")
_JSON_LEXEME: Final = re.compile(r'"[^"]*"|[{:,]')


def content_grammar(content: str, control: Mapping[str, int], *, opening: str, header: str = "") -> GrammarSource:
    """The grammar of an answer that fits the schema `content`, behind its header, after reasoning, or blanks, that may come first.

    Raises: GrammarInvalid.
    """
    terms = _Terms(control)
    may_reason = f"({terms.of(opening)})? " if opening else ""
    start = f"start: {may_reason}BLANKS? {terms.of(header)} content"
    return GrammarSource(Kind.LARK, "\n".join([start, f"content: {json_rule(content)}", *_LEXEMES[1:]]))


def is_held(form: CallFormat, toolbox: Toolbox) -> bool:
    """Whether a grammar holds the calls: where they are required, and where a tool is strict and a call's beginning can be told."""
    if not toolbox.is_open or toolbox.use is ToolUse.REQUIRED:
        return toolbox.is_open
    return any(tool.strict for tool in toolbox.callable) and not form.bare and form.tags is None and form.other is None


def call_grammar(
    form: CallFormat, toolbox: Toolbox, control: Mapping[str, int], *, opening: str = "", content: str | None = None
) -> GrammarSource:
    """The source.

    `control` has the markers that are control tokens, and which; `opening` is a tag of reasoning that may come first; `content` a schema
    for answers that call nothing, where calls are not required.

    Raises: GrammarInvalid for a schema that cannot be held to; its pointer begins with the tool's place.
    """
    required = toolbox.use is ToolUse.REQUIRED
    terms = _Terms(control)
    tools = toolbox.callable
    stands_alone = required or content is not None or form.channels
    otherwise = None if required else "TEXT" if content is None else json_rule(content)
    body = _alone(form.frame, toolbox, terms, otherwise) if stands_alone else _free(form, terms)
    may_reason = f"({terms.of(opening)})? " if opening else ""
    arguments = [f"args_{i}: {_arguments(tool, toolbox, required=required)}" for i, tool in enumerate(tools)]
    calls = [f"call_{i}: {_call(form, tool, i, terms, marked=not stands_alone)}" for i, tool in enumerate(tools)]
    names = " | ".join([f"call_{i}" for i in range(len(tools))])
    rules = [f"start: {may_reason}{body[0]}", *body[1:], f"call: {names}", *calls, *arguments, *_LEXEMES]
    return GrammarSource(Kind.LARK, "\n".join(rules))


class _Terms:
    """Writes literal text as Lark's terms; a control token is no text there."""

    def __init__(self, control: Mapping[str, int]) -> None:
        self._control = control
        longest_first = sorted(control, key=len, reverse=True)
        self._markers = re.compile("(" + "|".join([re.escape(marker) for marker in longest_first]) + ")" if control else "(?!)()")

    def of(self, text: str) -> str:
        """The terms of `text`; none for an empty one."""
        return " ".join([self._term(piece) for piece in self._markers.split(text) if piece])

    def _term(self, piece: str) -> str:
        return f"<[{self._control[piece]}]>" if piece in self._control else json.dumps(piece, ensure_ascii=False)

    def is_control(self, marker: str) -> bool:
        """Whether `marker` is one token that text does not have."""
        return marker in self._control


def schema_of(tool: Tool) -> str:
    """A tool's schema as text, about as long as the client wrote it."""
    return json.dumps(tool.parameters, ensure_ascii=False)


def _arguments(tool: Tool, toolbox: Toolbox, *, required: bool) -> str:
    try:
        return json_rule(schema_of(tool))
    except GrammarInvalid as error:
        if not required and not tool.strict:
            return json_rule(_ANY)
        raise GrammarInvalid(error.complaint, f"{toolbox.tools.index(tool)}{error.pointer}", error.keyword) from error


def _alone(frame: Frame, toolbox: Toolbox, terms: _Terms, content: str | None) -> list[str]:
    """One call, or several, and nothing else; or the content, where there is a rule for it."""
    more = f" ({terms.of(frame.between)} call){{0,{N_CALLS_MAX - 1}}}" if toolbox.parallel else ""
    calls = f"calls: {terms.of(frame.opening)} call{more} {terms.of(frame.closing)}"
    if content is None:
        return ["BLANKS? calls", calls]
    return [f"BLANKS? (calls | {terms.of(frame.before_content)} content)", calls, f"content: {content}"]


def _free(form: CallFormat, terms: _Terms) -> list[str]:
    """Text in which each marker that opens a call is followed by one."""
    frame = form.frame
    skipped = [terms.of(marker) for marker in form.ignored if terms.is_control(marker)]
    skip = f"skip: ({' | '.join([f'TEXT {marker}' for marker in skipped])})*" if skipped else 'skip: ""'
    marked = f"marked: TEXT {terms.of(form.begin)}" if terms.is_control(form.begin) else f"marked[lazy]: TEXT {terms.of(form.begin)}"
    if form.begin in frame.opening:
        opening = terms.of(frame.opening.partition(form.begin)[2])
        calls = f"{opening} call ({terms.of(frame.between)} call)* {terms.of(frame.closing)}"
    else:
        calls = "call"
    return ["(skip marked calls)* skip TEXT", f"calls: {calls}", skip, marked]


def _call(form: CallFormat, tool: Tool, place: int, terms: _Terms, *, marked: bool) -> str:
    """`marked`: the marker that opens a call has come already, and has made this one."""
    frame = form.frame
    before = frame.before_name
    if marked and form.begin in before:
        before = before.partition(form.begin)[2]
    head = before + tool.name + frame.before_arguments
    return f"{_as_json(head) if form.bare else terms.of(head)} args_{place} {terms.of(frame.after)}"


def _as_json(head: str) -> str:
    """The terms of what an object begins with, one for each of JSON's own lexemes: content may begin with an object, too.

    The lexer takes the longest that it can and never goes back, so behind the quote of a longer one there would be nothing else.
    """
    lexemes = _JSON_LEXEME.findall(head)
    return " ".join([json.dumps(lexeme, ensure_ascii=False) + (" BLANK?" if lexeme in "{:," else "") for lexeme in lexemes])
