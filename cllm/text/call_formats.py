"""How families of models write tool calls: markers, and what stands between them; and which family a chat template is of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import attrs

from cllm.text import channels
from cllm.text.call_bodies import Body, NamedBody, ObjectBody, TaggedBody
from cllm.text.tools import Tool


@attrs.frozen(kw_only=True)
class Frame:
    """What stands around the names and arguments of an answer's calls, where a grammar writes them."""

    opening: str = ""  # before the first call
    before_name: str
    before_arguments: str
    after: str = ""
    between: str = ""  # two calls
    closing: str = ""  # after the last call
    before_content: str = ""  # where content has a header too


@attrs.frozen(kw_only=True)
class CallFormat:
    """One family's form. An object, `{"name": ..., "arguments": ...}`, is understood after `begin` in every one."""

    name: str
    begin: str  # opens a call, or a list of calls
    frame: Frame
    ends: tuple[str, ...] = ()  # close one
    ignored: tuple[str, ...] = ()  # stand around all calls of an answer and say nothing
    separators: tuple[str, ...] = ()  # stand within a call
    head: re.Pattern[str] | None = None  # before the arguments, where the name stands there
    tagged: bool = False  # in tags instead of JSON
    bare: bool = False  # an answer that begins with an object is a call without a marker
    channels: bool = False  # calls, reasoning and content are messages with headers

    @property
    def markers(self) -> tuple[str, ...]:
        """All that it has; some may be control tokens, which a text shows only where asked to."""
        return (self.begin, *self.ends, *self.ignored, *self.separators)

    def body(self, first: str, tools: Mapping[str, Tool]) -> Body:
        """A reader for what follows `begin`; `first` is the first character of it that is not blank."""
        if first == "{":
            return ObjectBody()
        if self.tagged:
            return TaggedBody(tools)
        return NamedBody(self.head) if self.head is not None else ObjectBody()


_HERMES_FRAME: Final = Frame(
    before_name='<tool_call>\n{"name": "', before_arguments='", "arguments": ', after="}\n</tool_call>", between="\n"
)
HERMES: Final = CallFormat(name="hermes", begin="<tool_call>", ends=("</tool_call>",), frame=_HERMES_FRAME)
QWEN_CODER: Final = CallFormat(name="qwen-coder", begin="<tool_call>", ends=("</tool_call>",), tagged=True, frame=_HERMES_FRAME)
LLAMA: Final = CallFormat(
    name="llama",
    begin="<|python_tag|>",
    bare=True,
    frame=Frame(before_name='{"name": "', before_arguments='", "parameters": ', after="}", between="; "),
)
_MISTRAL_HEAD: Final = re.compile(r"\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[\]]*)?(?:\[ARGS\])?\s*")
MISTRAL: Final = CallFormat(
    name="mistral",
    begin="[TOOL_CALLS]",
    head=_MISTRAL_HEAD,
    frame=Frame(
        opening="[TOOL_CALLS][", before_name='{"name": "', before_arguments='", "arguments": ', after="}", between=", ", closing="]"
    ),
)
MISTRAL_ARGS: Final = CallFormat(
    name="mistral-args",
    begin="[TOOL_CALLS]",
    separators=("[ARGS]", "[CALL_ID]"),
    head=_MISTRAL_HEAD,
    frame=Frame(before_name="[TOOL_CALLS]", before_arguments="[ARGS]"),
)
_DEEPSEEK_HEAD: Final = re.compile(r"\s*(?:function<｜tool▁sep｜>(?P<name>[^\s<]+)\s*```json|(?P<only>[^\s<]+)<｜tool▁sep｜>)\s*")
DEEPSEEK: Final = CallFormat(
    name="deepseek",
    begin="<｜tool▁call▁begin｜>",
    ends=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"),
    ignored=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    separators=("<｜tool▁sep｜>",),
    head=_DEEPSEEK_HEAD,
    frame=Frame(
        opening="<｜tool▁calls▁begin｜>",
        before_name="<｜tool▁call▁begin｜>",
        before_arguments="<｜tool▁sep｜>",
        after="<｜tool▁call▁end｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
)
DEEPSEEK_JSON: Final = attrs.evolve(
    DEEPSEEK,
    name="deepseek-json",
    frame=Frame(
        opening="<｜tool▁calls▁begin｜>",
        before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        before_arguments="\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        between="\n",
        closing="<｜tool▁calls▁end｜>",
    ),
)
PHI: Final = CallFormat(
    name="phi",
    begin="<|tool_call|>",
    ends=("<|/tool_call|>",),
    frame=Frame(
        opening="<|tool_call|>[",
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        after="}",
        between=", ",
        closing="]<|/tool_call|>",
    ),
)
COHERE: Final = CallFormat(
    name="cohere",
    begin="<|START_ACTION|>",
    ends=("<|END_ACTION|>",),
    frame=Frame(
        opening="<|START_ACTION|>[\n    ",
        before_name='{"tool_name": "',
        before_arguments='", "parameters": ',
        after="}",
        between=",\n    ",
        closing="\n]<|END_ACTION|>",
    ),
)
HARMONY: Final = CallFormat(
    name="harmony",
    begin=channels.CHANNEL,
    ends=channels.ENDS,
    separators=(channels.START, channels.MESSAGE, channels.CONSTRAIN),
    channels=True,
    frame=Frame(
        before_name=f"{channels.CHANNEL}commentary to=functions.",
        before_arguments=f" {channels.CONSTRAIN}json{channels.MESSAGE}",
        before_content=channels.FINAL,
    ),
)

_ALL: Final = (HERMES, QWEN_CODER, LLAMA, MISTRAL, MISTRAL_ARGS, DEEPSEEK, DEEPSEEK_JSON, PHI, COHERE, HARMONY)
FORMATS: Final = {each.name: each for each in _ALL}


def format_of(template: str) -> CallFormat:
    """The form that a chat template's source speaks of; Hermes', the most common, when it speaks of none."""
    if channels.is_written_in(template):
        return HARMONY
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if DEEPSEEK.begin in template:
        return DEEPSEEK_JSON if "```json" in template else DEEPSEEK
    if COHERE.begin in template:
        return COHERE
    if "<function=" in template and HERMES.begin in template:
        return QWEN_CODER
    if HERMES.begin in template:
        return HERMES
    if PHI.begin in template or "<|tool|>" in template:
        return PHI
    if LLAMA.begin in template or re.search(r'"parameters"\s*:', template):
        return LLAMA
    return HERMES
