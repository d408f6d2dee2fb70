"""Reads one answer as it is written: reasoning, content and tool calls apart, and where a stop string ends it."""

from __future__ import annotations

import attrs

from cllm.text.call_formats import CallFormat
from cllm.text.call_reader import CallReader
from cllm.text.channels import ChannelReader
from cllm.text.parts import CallBegun, Content, Part, Reasoning
from cllm.text.reasoning import BETWEEN, ReasoningReader, ReasoningTags
from cllm.text.stops import StopStrings
from cllm.text.tools import Tool
from cllm.text.trailing import TrailingThoughts
from cllm.text.unclosed import UnclosedReasoning
from cllm.text.wrapping import Wrapping, WrappingReader


@attrs.frozen(kw_only=True)
class AnswerFormat:
    """How an answer is to be read: facts."""

    tags: ReasoningTags | None = None  # around reasoning; None: there is none
    opened: bool = False  # the prompt ends within reasoning
    resumed: bool = False  # of which it has some words
    n_reasoning_max: int | None = None  # tokens of the reasoning, after which `closing` is written
    closing: tuple[int, ...] = ()  # the tokens that end the reasoning
    wrapping: Wrapping | None = None  # around all that is said; None: there is none
    begun: bool = False  # the prompt ends within content that has a header
    calls: CallFormat | None = None  # None: there are no tools, and no channels
    tools: tuple[Tool, ...] = ()  # that may be called
    assured: bool = False  # a grammar makes sure that calls are well formed
    single: bool = False  # one call at most
    must_call: bool = False  # blanks before its calls are no content
    shown: frozenset[int] = frozenset()  # control tokens that the text must show
    held: bool = False  # its content to a grammar, which begins with the token after the one that ends the reasoning

    def reader(self, stops: StopStrings | None) -> AnswerReader:
        """A reader for one answer. Stop strings count in its content only."""
        if self.calls is not None and self.calls.channels:
            channels = ChannelReader(self.tools, assured=self.assured, single=self.single, opened=self.opened, begun=self.begun)
            return AnswerReader(None, channels, stops)
        reasoning = None if self.tags is None else ReasoningReader(self.tags, opened=self.opened, resumed=self.resumed)
        calls = None if self.calls is None else self._call_reader(self.calls, stops)
        unclosed = None if self.calls is None or reasoning is None else self._unclosed_reasoning(self.calls)
        markers = () if self.calls is None else self.calls.first_markers
        wrapping = None if self.wrapping is None else WrappingReader(self.wrapping, markers)
        trailing = None if self.tags is None or not self.tags.may_come_again else TrailingThoughts(self.tags)
        return AnswerReader(reasoning, calls, stops, unclosed, wrapping, trailing, held=self.held, resumed=self.resumed)

    def _unclosed_reasoning(self, form: CallFormat) -> UnclosedReasoning:
        return UnclosedReasoning(form, self.tools, assured=self.assured or self.held, single=self.single)

    def _call_reader(self, form: CallFormat, stops: StopStrings | None) -> CallReader:
        # Or none of them would be seen before the blanks' end.
        keeps_blanks = stops is not None and stops.any_ends_blank and not self.must_call
        return CallReader(form, self.tools, assured=self.assured, single=self.single, keeps_blanks=keeps_blanks)


class AnswerReader:
    """The state of reading one answer. Whatever the pieces, the parts are together the same, but for what comes in one with the end of
    reasoning where content is `held`.
    """

    def __init__(
        self,
        reasoning: ReasoningReader | None,
        calls: CallReader | ChannelReader | None,
        stops: StopStrings | None,
        unclosed: UnclosedReasoning | None = None,
        wrapping: WrappingReader | None = None,
        trailing: TrailingThoughts | None = None,
        *,
        held: bool = False,
        resumed: bool = False,
    ) -> None:
        """A reader of channels tells reasoning apart as well. `held`, `resumed`: see `AnswerFormat`."""
        self._reasoning = reasoning
        self._unclosed = unclosed  # of no use once the reasoning is past
        self._n_unclosed = 0  # calls that the reasoning ended with
        self._held = held
        self._wrapping = wrapping
        self._trailing = trailing
        self._has_reasoned = resumed
        self._calls = calls
        self._stops = stops

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning."""
        if isinstance(self._calls, ChannelReader):
            return self._calls.is_reasoning
        return self._reasoning is not None and self._reasoning.is_inside

    @property
    def may_be_cut(self) -> bool:
        """Whether reasoning is under way, which the closing tokens would end."""
        return self._calls.is_within_reasoning if isinstance(self._calls, ChannelReader) else self.is_reasoning

    @property
    def has_called_within_reasoning(self) -> bool:
        """Whether the reasoning under way ends with a call, as far as it has come."""
        return self.is_reasoning and self._unclosed is not None and self._unclosed.ends_in_call

    @property
    def is_idle(self) -> bool:
        """Whether all that comes from now on is content, and nothing is held back here."""
        return self._reasoning is None and self._wrapping is None and self._trailing is None and self._calls is None

    @property
    def is_done(self) -> bool:
        """Whether the answer is over, with the call that it was to make."""
        return self._calls is not None and self._calls.is_done

    @property
    def n_calls(self) -> int:
        """Complete calls."""
        return self._n_unclosed + (0 if self._calls is None else self._calls.n_calls)

    def push(self, text: str, *, can_stop: bool) -> tuple[list[Part], str | None]:
        """Return the parts that are certain now, and the stop string that ended the answer, if one has and `can_stop`."""
        parts: list[Part] = []
        if self._reasoning is not None:
            ends_here = self._reasoning.is_inside
            parts, text = self._reasoning.push(text)
            if self._unclosed is not None:
                parts = _reasoning([self._unclosed.push(part.text) for part in parts if isinstance(part, Reasoning)])
            if self._reasoning.is_past:
                self._reasoning = None
                if self._unclosed is not None:
                    parts += _reasoning([self._unclosed.give_up()])
                    self._unclosed = None
                if ends_here and self._held:  # what came in one token with the closing tag the grammar has written once more
                    text = ""
        if text and self._wrapping is not None:
            text = self._wrapping.push(text)
            if self._wrapping.is_past:
                self._wrapping = None
        if text:
            parts += [Content(text)] if self._calls is None else self._calls.push(text)
        if self._trailing is not None:
            parts = self._without_thoughts(parts, self._trailing)
        return (parts, None) if self._stops is None else watched(parts, self._stops, counts=can_stop)

    def finish(self) -> tuple[list[Part], str | None]:
        """Return what was still undecided, the end having come otherwise than by a stop string; and the one that is found in it now."""
        parts: list[Part] = [] if self._reasoning is None else self._reasoning.finish()
        if self._reasoning is not None and self._unclosed is not None:
            rest = [self._unclosed.push(part.text) for part in parts if isinstance(part, Reasoning)]
            content = [part for part in parts if isinstance(part, Content)]
            parts = [*_reasoning(rest), *self._unclosed.finish(is_closed=not self._reasoning.is_inside), *content]
            self._n_unclosed = sum(isinstance(part, CallBegun) for part in parts)
        if self._wrapping is not None:
            parts = [*(part for part in parts if not isinstance(part, Content)), *self._unwrapped(parts)]
        if self._calls is not None:
            parts += self._calls.finish()
        if self._trailing is not None:
            parts = [*self._without_thoughts(parts, self._trailing), *self._thoughts_behind(self._trailing)]
        if self._stops is None:
            return parts, None
        parts, match = watched(parts, self._stops)
        held = self._stops.flush()
        return parts if match is not None or not held else [*parts, Content(held)], match

    def _without_thoughts(self, parts: list[Part], trailing: TrailingThoughts) -> list[Part]:
        told: list[Part] = []
        for part in parts:
            if isinstance(part, Reasoning):
                self._has_reasoned = True
                told.append(part)
            elif not isinstance(part, Content):
                told += [*self._thoughts_behind(trailing), part]
            elif said := trailing.push(part.text):
                told.append(Content(said))
        return told

    def _thoughts_behind(self, trailing: TrailingThoughts) -> list[Part]:
        """What was held back behind the content, apart from the reasoning before it."""
        parts = trailing.end()
        if self._has_reasoned:
            parts = [Reasoning(BETWEEN + part.text) if isinstance(part, Reasoning) else part for part in parts]
        self._has_reasoned |= any(isinstance(part, Reasoning) for part in parts)
        return parts

    def _unwrapped(self, parts: list[Part]) -> list[Part]:
        """What the end leaves of the content, which is undecided yet."""
        assert self._wrapping is not None
        text = "".join(part.text for part in parts if isinstance(part, Content))
        rest = self._wrapping.push(text) + self._wrapping.finish()
        if not rest:
            return []
        return [Content(rest)] if self._calls is None else self._calls.push(rest)


def _reasoning(texts: list[str]) -> list[Part]:
    text = "".join(texts)
    return [Reasoning(text)] if text else []


def watched(parts: list[Part], stops: StopStrings, *, counts: bool = True) -> tuple[list[Part], str | None]:
    """Look for stop strings in the content; it may not be held back behind what comes after it. `counts`: see `StopStrings.push`."""
    told: list[Part] = []
    for part in parts:
        if isinstance(part, Content):
            text, match = stops.push(part.text, counts=counts)
        else:
            text, match = stops.flush(), None
        if text:
            told.append(Content(text))
        if match is not None:
            return told, match
        if not isinstance(part, Content):
            told.append(part)
    return told, None
