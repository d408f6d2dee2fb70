"""Reads answers that are written in channels: messages one after the other, each behind a header that says what it is.

    <|channel|>analysis<|message|>17 and 4 are ...<|end|><|start|>assistant<|channel|>final<|message|>21<|return|>
    <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 17, "b": 4}<|call|>

What is addressed to a function is a call, the analysis is reasoning, and everything else is content. The prompt ends with
`<|start|>assistant`.

Source: OpenAI's Harmony response format, which gpt-oss writes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from typing import Final

from cllm.text.backlog import Backlog
from cllm.text.call_bodies import N_HEAD_MAX, JsonValue, as_object
from cllm.text.markers import N_BLANKS_MAX, first_marker, n_undecided
from cllm.text.parts import Arguments, CallBegun, Content, Part, Reasoning
from cllm.text.reasoning import ReasoningTags
from cllm.text.tools import Tool

CHANNEL: Final = "<|channel|>"
MESSAGE: Final = "<|message|>"
START: Final = "<|start|>"
CONSTRAIN: Final = "<|constrain|>"
ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
FINAL: Final = f"{CHANNEL}final{MESSAGE}"  # the header of what is said to whoever asked

_NEXT: Final = f"{START}assistant"  # before each header but the first, which the prompt has it of
TAGS: Final = ReasoningTags(f"{CHANNEL}analysis{MESSAGE}", ENDS[0], follows=_NEXT)

_BREAKS: Final = (*ENDS, START, CHANNEL)  # a message is over, though its end may have been left out
_HEADS: Final = (*_BREAKS, MESSAGE, "to=")  # how a header begins
_CHANNEL: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=([^\s<]+)")
_ITSELF: Final = "assistant"  # addressed, as it happens: that says nothing
_BETWEEN: Final = "\n\n"  # two messages of one kind


def is_written_in(template: str) -> bool:
    """Whether a chat template's source speaks of channels."""
    return CHANNEL in template and MESSAGE in template


def is_in_content(prompt: str) -> bool:
    """Whether a prompt ends within a message of content, so that what comes next is more of it."""
    return _channel_of(prompt) not in (None, "analysis")


def is_in_reasoning(prompt: str) -> bool:
    """Whether a prompt ends within a message of reasoning."""
    return _channel_of(prompt) == "analysis"


def _channel_of(prompt: str) -> str | None:
    """The channel of the message that a prompt ends within; None where it ends between two, or in one without a channel."""
    start, end = prompt.rfind(MESSAGE), max(prompt.rfind(marker) for marker in _BREAKS[:-1])
    channel = _CHANNEL.match(prompt[prompt.rfind(CHANNEL, 0, max(start, 0)) : start])
    return channel[1] if start > end and channel is not None else None


class _State(Enum):
    HEADER = 1
    REASONING = 2
    CONTENT = 3
    CALL = 4


class ChannelReader:
    """Reads one answer. Text without a header is content.

    Calls that are `assured` (a grammar makes sure of them) are told as they come. Otherwise each is held until it is complete; one whose
    arguments are no object, or that no tool is there for, is content with its header.
    """

    def __init__(self, tools: Sequence[Tool], *, assured: bool, single: bool, opened: bool, begun: bool) -> None:
        """`single`: the answer is over with its first call. The prompt ends within reasoning (`opened`) or content (`begun`)."""
        self.n_calls = 0
        self._names = frozenset(tool.name for tool in tools)
        self._assured = assured
        self._single = single
        self._state = _State.REASONING if opened else _State.CONTENT if begun else _State.HEADER
        self._has_reasoned = False  # and nothing has begun since
        self._backlog = Backlog()
        self._text = ""  # what is being read
        self._raw = ""  # of a call: what comes before its arguments
        self._name = ""
        self._body = ""  # its arguments so far
        self._arguments = JsonValue()
        self._skips = False  # blanks after a call
        self._is_told = False  # something of the message
        self._seen: set[_State] = set()  # what has been told before

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, or leads from it to the next header."""
        if self._state is _State.HEADER:
            return self._has_reasoned and not any(marker in self._text for marker in (_NEXT, CHANNEL, MESSAGE))
        return self._state is _State.REASONING

    @property
    def is_within_reasoning(self) -> bool:
        """Whether the message under way is reasoning."""
        return self._state is _State.REASONING

    @property
    def is_done(self) -> bool:
        """Whether the answer is over."""
        return self._single and self.n_calls > 0

    @property
    def _is_first(self) -> bool:
        return not self._seen and not self.n_calls

    def push(self, text: str) -> list[Part]:
        """Return the parts that are certain now."""
        self._backlog.put(text)
        parts: list[Part] = []
        while piece := self._backlog.take():
            self._text += piece
            while self._text and not self.is_done and self._read(parts):
                pass
        return parts

    def finish(self) -> list[Part]:
        """Return what was still undecided. A call that was cut is told so far where calls are assured, and content elsewhere."""
        parts: list[Part] = []
        rest = self._raw + self._body + self._text
        self._raw = self._body = self._text = ""
        begun = rest.lstrip()
        is_between = self._state is _State.HEADER and (begun.startswith(_HEADS) or not (begun or self._is_first))
        if not self.is_done and not is_between and not (self._state is _State.CALL and self._assured):
            self._tell(_State.REASONING if self._state is _State.REASONING else _State.CONTENT, rest, parts)
        return parts

    def _read(self, parts: list[Part]) -> bool:
        """Read on from where it stands; return whether there may be more to read."""
        if self._state is _State.HEADER:
            return self._read_header(parts)
        return self._read_call(parts) if self._state is _State.CALL else self._read_message(parts)

    def _read_header(self, parts: list[Part]) -> bool:
        begun = self._text.lstrip()
        pos = self._text.find(MESSAGE, 0, N_HEAD_MAX + len(MESSAGE))
        if any(begun.startswith(head) or head.startswith(begun) for head in _HEADS):  # nothing but blanks too
            if pos >= 0:
                self._begin(self._text[:pos], parts)
            elif len(self._text) >= N_HEAD_MAX + len(MESSAGE):
                self._begin_without(parts)
            return pos >= 0 or self._state is not _State.HEADER
        self._begin_without(parts)
        return True

    def _begin(self, header: str, parts: list[Part]) -> None:
        raw = header + MESSAGE
        self._text = self._text[len(raw) :]
        self._is_told = self._has_reasoned = False
        recipient, channels = _RECIPIENT.search(header), _CHANNEL.findall(header)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        if name in self._names:
            self._state, self._raw, self._name, self._arguments = _State.CALL, raw, name, JsonValue()
            if self._assured:
                parts.append(CallBegun(self.n_calls, name))
        elif name and name != _ITSELF:
            self._state = _State.CONTENT
            self._tell(_State.CONTENT, raw, parts)
        else:
            self._state = _State.REASONING if channels[-1:] == ["analysis"] else _State.CONTENT  # of several, as it happens, the last

    def _begin_without(self, parts: list[Part]) -> None:
        """What comes is content, though it looks like the beginning of a header."""
        self._state, self._is_told, self._has_reasoned = _State.CONTENT, False, False
        self._tell(_State.CONTENT, self._text[:1], parts)
        self._text = self._text[1:]

    def _read_message(self, parts: list[Part]) -> bool:
        if self._skips:
            self._text = self._text.lstrip()
            self._skips = not self._text
        found = first_marker(self._text, _BREAKS)
        pos = found[0] if found else len(self._text) - n_undecided(self._text, _BREAKS)
        self._tell(self._state, self._text[:pos], parts)
        self._text = self._text[pos:]
        if not found:
            return False
        self._has_reasoned = self._state is _State.REASONING
        if found[1] in ENDS:
            self._text = self._text[len(found[1]) :]
        self._state = _State.HEADER
        return True

    def _tell(self, kind: _State, text: str, parts: list[Part]) -> None:
        if not text:
            return
        if not self._is_told and kind in self._seen:
            text = _BETWEEN + text
        self._is_told = True
        self._seen.add(kind)
        parts.append(Reasoning(text) if kind is _State.REASONING else Content(text))

    def _read_call(self, parts: list[Part]) -> bool:
        if not self._body:
            begun = self._text.lstrip()
            self._raw, self._text = self._raw + self._text[: len(self._text) - len(begun)], begun
            if len(self._raw) > N_HEAD_MAX + N_BLANKS_MAX:
                self._give_up(parts)
                return True
            if not begun:
                return False
        end = self._arguments.push(self._text, 0) if self._body or self._text[0] == "{" else 0
        if not end or self._arguments.is_bad:
            self._give_up(parts)
            return True
        fragment, self._text = self._text[:end], self._text[end:]
        self._body += fragment
        if self._assured:
            parts.append(Arguments(self.n_calls, fragment))
        return not self._arguments.is_complete or self._end_call(parts)

    def _end_call(self, parts: list[Part]) -> bool:
        if not self._assured:
            found = as_object(self._body)
            if found is None:
                self._give_up(parts)
                return True
            parts += [CallBegun(self.n_calls, self._name), Arguments(self.n_calls, found)]
        self.n_calls += 1
        self._raw = self._body = ""
        self._state, self._skips = _State.CONTENT, True
        return True

    def _give_up(self, parts: list[Part]) -> None:
        """It is no call: its header is text, and what follows is read once more, if it may be."""
        raw, n_header = self._raw + self._body, self._raw.index(MESSAGE) + len(MESSAGE)
        self._raw = self._body = ""
        self._state = _State.CONTENT
        if not self._assured:
            raw, self._text = raw + self._text, ""
            n_told = n_header if self._backlog.put_again(raw[n_header:]) else len(raw)
            self._tell(_State.CONTENT, raw[:n_told], parts)
