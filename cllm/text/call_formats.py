"""How families of models write tool calls: markers, and what stands between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import attrs

from cllm.text import channels
from cllm.text.call_bodies import Body, NamedBody, ObjectBody
from cllm.text.call_expressions import QUOTE, MarkedBody, PythonBody
from cllm.text.call_tags import DSML_TAGS, FUNCTION_TAGS, INVOKE_TAGS, KEY_TAGS, SEED_TAGS, TaggedBody, Tags
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
    tags: Tags | None = None  # in these instead of JSON
    other: Callable[[], Body] | None = None  # in some other way that is no JSON
    opens: str = ""  # opens a call too, of whose body it is
    again: tuple[str, ...] = ("{",)  # how another call may begin before what closes the first
    bare: bool = False  # an answer that begins with an object is a call without a marker
    channels: bool = False  # calls, reasoning and content are messages with headers
    as_python: bool = False  # without a grammar it writes `[name(a=1)]` between `begin` and the first of `ends`

    @property
    def markers(self) -> tuple[str, ...]:
        """All that it has; some may be control tokens, which a text shows only where asked to."""
        return (self.begin, *([self.opens] if self.opens else []), *self.ends, *self.ignored, *self.separators)

    @property
    def first_markers(self) -> tuple[str, ...]:
        """What calls begin with, or what stands before all of them."""
        return (self.begin, *([self.opens] if self.opens else []), *self.ignored)

    def body(self, first: str, tools: Mapping[str, Tool]) -> Body:
        """A reader for what follows `begin`; `first` is the first character of it that is not blank."""
        if first == "{":
            return ObjectBody()
        if self.tags is not None:
            return TaggedBody(tools, self.tags)
        if self.other is not None:
            return self.other()
        return NamedBody(self.head) if self.head is not None else ObjectBody()


def _objects(begin: str, end: str, gap: str = "\n") -> Frame:
    """A call is an object between `begin` and `end`."""
    return Frame(before_name=f'{begin}{gap}{{"name": "', before_arguments='", "arguments": ', after=f"}}{gap}{end}", between="\n")


def _list(begin: str, end: str) -> Frame:
    """All calls are one list of objects between `begin` and `end`."""
    return Frame(
        opening=f"{begin}[", before_name='{"name": "', before_arguments='", "arguments": ', after="}", between=", ", closing=f"]{end}"
    )


_HERMES_FRAME: Final = _objects("<tool_call>", "</tool_call>")
HERMES: Final = CallFormat(name="hermes", begin="<tool_call>", ends=("</tool_call>",), frame=_HERMES_FRAME)
QWEN_CODER: Final = CallFormat(
    name="qwen-coder",
    begin="<tool_call>",
    ends=("</tool_call>",),
    tags=FUNCTION_TAGS,
    opens=FUNCTION_TAGS.opening,
    again=("{", FUNCTION_TAGS.opening),
    frame=_HERMES_FRAME,
)
GLM: Final = CallFormat(name="glm", begin="<tool_call>", ends=("</tool_call>",), tags=KEY_TAGS, frame=_HERMES_FRAME)
SEED: Final = CallFormat(
    name="seed",
    begin="<seed:tool_call>",
    ends=("</seed:tool_call>",),
    tags=SEED_TAGS,
    again=("{", SEED_TAGS.opening),
    frame=_objects("<seed:tool_call>", "</seed:tool_call>"),
)
MINIMAX: Final = CallFormat(
    name="minimax",
    begin="<minimax:tool_call>",
    ends=("</minimax:tool_call>",),
    tags=INVOKE_TAGS,
    again=("{", INVOKE_TAGS.opening),
    frame=_objects("<minimax:tool_call>", "</minimax:tool_call>"),
)
LLAMA: Final = CallFormat(
    name="llama",
    begin="<|python_tag|>",
    bare=True,
    frame=Frame(before_name='{"name": "', before_arguments='", "parameters": ', after="}", between="; "),
)
_MISTRAL_HEAD: Final = re.compile(r"\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[\]]*)?(?:\[ARGS\])?\s*")
MISTRAL: Final = CallFormat(name="mistral", begin="[TOOL_CALLS]", head=_MISTRAL_HEAD, frame=_list("[TOOL_CALLS]", ""))
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
DSML: Final = CallFormat(
    name="deepseek-dsml",
    begin="<｜DSML｜function_calls>",
    ends=("</｜DSML｜function_calls>",),
    ignored=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
    separators=("｜DSML｜",),
    tags=DSML_TAGS,
    opens=DSML_TAGS.opening,
    again=("{", DSML_TAGS.opening),
    frame=_objects("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
)
_KIMI_HEAD: Final = re.compile(r"\s*(?:functions\.)?(?P<name>[^\s<]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*")
KIMI: Final = CallFormat(
    name="kimi",
    begin="<|tool_call_begin|>",
    ends=("<|tool_call_end|>",),
    ignored=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    separators=("<|tool_call_argument_begin|>",),
    head=_KIMI_HEAD,
    frame=Frame(
        opening="<|tool_calls_section_begin|>",
        before_name="<|tool_call_begin|>functions.",
        before_arguments=":0<|tool_call_argument_begin|>",
        after="<|tool_call_end|>",
        closing="<|tool_calls_section_end|>",
    ),
)
FUNCTIONARY: Final = CallFormat(
    name="functionary",
    begin="<function=",
    ends=("</function>",),
    head=re.compile(r"\s*(?P<name>[^\s<>]+)>\s*"),
    frame=Frame(before_name="<function=", before_arguments=">", after="</function>"),
)
LFM: Final = CallFormat(
    name="lfm",
    begin="<|tool_call_start|>",
    ends=("<|tool_call_end|>",),
    other=PythonBody,
    as_python=True,
    frame=_list("<|tool_call_start|>", "<|tool_call_end|>"),
)
GEMMA: Final = CallFormat(
    name="gemma",
    begin="<|tool_call>",
    ends=("<tool_call|>",),
    separators=(QUOTE, "<|channel>", "<channel|>"),
    other=MarkedBody,
    frame=_objects("<|tool_call>", "<tool_call|>", gap=""),
)
NEMOTRON: Final = CallFormat(name="nemotron", begin="<TOOLCALL>", ends=("</TOOLCALL>",), frame=_list("<TOOLCALL>", "</TOOLCALL>"))
APRIEL: Final = CallFormat(name="apriel", begin="<tool_calls>", ends=("</tool_calls>",), frame=_list("<tool_calls>", "</tool_calls>"))
PHI: Final = CallFormat(
    name="phi",
    begin="<|tool_call|>",
    ends=("<|/tool_call|>",),
    frame=_list("<|tool_call|>", "<|/tool_call|>"),
)
GRANITE: Final = CallFormat(name="granite", begin="<|tool_call|>", frame=_list("<|tool_call|>", ""))
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

FORMATS: Final = {
    each.name: each
    for each in (
        HERMES,
        QWEN_CODER,
        GLM,
        LLAMA,
        MISTRAL,
        MISTRAL_ARGS,
        DEEPSEEK,
        DEEPSEEK_JSON,
        DSML,
        PHI,
        GRANITE,
        COHERE,
        KIMI,
        LFM,
        GEMMA,
        SEED,
        MINIMAX,
        NEMOTRON,
        APRIEL,
        FUNCTIONARY,
        HARMONY,
    )
}
