"""How families of models write tool calls: markers, and what stands between them; and which family a chat template is of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import attrs

from cllm.text.call_bodies import Body, NamedBody, ObjectBody, TaggedBody
from cllm.text.tools import Tool


@attrs.frozen(kw_only=True)
class CallFormat:
    """One family's form. An object, `{"name": ..., "arguments": ...}`, is understood after `begin` in every one."""

    name: str
    begin: str  # opens a call, or a list of calls
    ends: tuple[str, ...] = ()  # close one
    ignored: tuple[str, ...] = ()  # stand around all calls of an answer and say nothing
    head: re.Pattern[str] | None = None  # before the arguments, where the name stands there
    tagged: bool = False  # in tags instead of JSON
    bare: bool = False  # an answer that begins with an object is a call without a marker

    @property
    def markers(self) -> tuple[str, ...]:
        """All of them; some may be control tokens, which a text shows only where asked to."""
        return (self.begin, *self.ends, *self.ignored, *_SEPARATORS.get(self.name, ()))

    def body(self, first: str, tools: Mapping[str, Tool]) -> Body:
        """A reader for what follows `begin`; `first` is the first character of it that is not blank."""
        if first == "{":
            return ObjectBody()
        if self.tagged:
            return TaggedBody(tools)
        return NamedBody(self.head) if self.head is not None else ObjectBody()


HERMES: Final = CallFormat(name="hermes", begin="<tool_call>", ends=("</tool_call>",))
QWEN_CODER: Final = CallFormat(name="qwen-coder", begin="<tool_call>", ends=("</tool_call>",), tagged=True)
LLAMA: Final = CallFormat(name="llama", begin="<|python_tag|>", bare=True)
MISTRAL: Final = CallFormat(
    name="mistral",
    begin="[TOOL_CALLS]",
    head=re.compile(r"\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[\]]*)?(?:\[ARGS\])?\s*"),
)
DEEPSEEK: Final = CallFormat(
    name="deepseek",
    begin="<｜tool▁call▁begin｜>",
    ends=("```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"),
    ignored=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    head=re.compile(r"\s*(?:function<｜tool▁sep｜>(?P<name>[^\s<]+)\s*```json|(?P<only>[^\s<]+)<｜tool▁sep｜>)\s*"),
)
PHI: Final = CallFormat(name="phi", begin="<|tool_call|>", ends=("<|/tool_call|>",))
COHERE: Final = CallFormat(name="cohere", begin="<|START_ACTION|>", ends=("<|END_ACTION|>",))

FORMATS: Final = {each.name: each for each in (HERMES, QWEN_CODER, LLAMA, MISTRAL, DEEPSEEK, PHI, COHERE)}
_SEPARATORS: Final[Mapping[str, tuple[str, ...]]] = {"mistral": ("[ARGS]", "[CALL_ID]"), "deepseek": ("<｜tool▁sep｜>",)}


def format_of(template: str) -> CallFormat:
    """The form that a chat template's source speaks of; Hermes', the most common, when it speaks of none."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if DEEPSEEK.begin in template:
        return DEEPSEEK
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
