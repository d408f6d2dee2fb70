"""Tells the reasoning of an answer from its content, by the tags around it."""

from __future__ import annotations

import re
from enum import Enum
from typing import Final

import attrs

from cllm.text.markers import N_BLANKS_MAX, first_marker, n_before_blanks, n_undecided
from cllm.text.parts import Content, Part, Reasoning


@attrs.frozen
class ReasoningTags:
    """What stands before and after reasoning."""

    opening: str
    closing: str
    follows: str | None = None  # on the closing tag, before anything else comes; None: blanks
    tokens: tuple[str, ...] = ()  # within them, of those that are not one token each
    may_come_again: bool = False  # right behind the closing tag; elsewhere a tag there is content that speaks of it

    @property
    def cut(self) -> str:
        """What is written to end reasoning that does not end by itself."""
        return f"\n{self.closing}\n\n" if self.follows is None else self.closing + self.follows


TAGS: Final = (
    ReasoningTags("<think>", "</think>"),  # Qwen, DeepSeek, and most others
    ReasoningTags("[THINK]", "[/THINK]"),  # Mistral
    ReasoningTags("<seed:think>", "</seed:think>"),  # ByteDance
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ReasoningTags("<|channel>thought", "<channel|>", tokens=("<|channel>",), may_come_again=True),  # Google, from Gemma 4 on
    ReasoningTags("<mm:think>", "</mm:think>"),  # MiniMax, from M3 on
    ReasoningTags("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ReasoningTags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel, whose template also speaks of the next ones
    ReasoningTags("<thinking>", "</thinking>"),
    ReasoningTags("<reasoning>", "</reasoning>"),
)


_MADE: Final = re.compile(r"""['"]<think\{\}>['"]\s*\.format\(\s*(\w+)\s*\)""")
_WORDS: Final = ("<|think|>", "reasoning_content", "thinking")


def tags_in(template: str) -> ReasoningTags | None:
    """The tags that a chat template's source speaks of; one of a pair is enough, as some cut reasoning off at its end only."""
    source = without_comments(template)
    return _made_in(source) or next((tags for tags in TAGS if tags.opening in source or tags.closing in source), None)


def _made_in(source: str) -> ReasoningTags | None:
    """Tags that a template makes with a word of its own in them, as Hunyuan's do from Hy3 on."""
    made = _MADE.search(source)
    told = None if made is None else re.search(rf"""set\s+{made[1]}\s*=\s*(['"])(?P<word>.{{0,64}}?)\1""", source)
    return None if told is None else ReasoningTags(f"<think{told['word']}>", f"</think{told['word']}>")


def mentions_reasoning(template: str) -> bool:
    """Whether a chat template's source treats reasoning apart, whatever the tags."""
    source = without_comments(template)
    return any(word in source for word in _WORDS)


def without_comments(template: str) -> str:
    """A chat template's source without what Jinja leaves out."""
    kept, start = [], 0
    while (begin := template.find("{#", start)) >= 0 and (end := template.find("#}", begin + 2)) >= 0:
        kept.append(template[start:begin])
        start = end + 2
    return "".join([*kept, template[start:]])


BETWEEN: Final = "\n\n"  # two pieces


class _State(Enum):
    BEFORE = 1  # nothing but blanks so far
    INSIDE = 2
    AFTER = 3  # in the blanks between reasoning and content
    PAST = 4


class ReasoningReader:
    """Reads one answer, whose reasoning comes first if there is any, in one piece or several.

    Blanks around the reasoning are left out. Reasoning that never closes is reasoning to the end.
    """

    def __init__(self, tags: ReasoningTags, *, opened: bool, resumed: bool = False) -> None:
        """`opened`: the prompt ends within reasoning, of which it has some words if that is `resumed`."""
        self._tags = tags
        self._state = _State.INSIDE if opened else _State.BEFORE
        self._held = ""
        self._has_text = resumed  # of the reasoning: what comes before it is blank
        self._between = ""  # it and the piece of reasoning before it

    @property
    def is_inside(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._state is _State.INSIDE

    @property
    def is_past(self) -> bool:
        """Whether all that comes from now on is content."""
        return self._state is _State.PAST

    def push(self, text: str) -> tuple[list[Part], str]:
        """Return the reasoning that is certain now, and the content after it."""
        if self.is_past:
            return [], text
        self._held += text
        parts: list[Part] = []
        if self._state is _State.BEFORE:
            self._look_for_opening()
        elif self._state is _State.AFTER:
            self._look_for_more()
        while self._state is _State.INSIDE and self._read(parts):
            self._look_for_more()
        return parts, self._given_up() if self.is_past else ""

    def finish(self) -> list[Part]:
        """Return what was still undecided."""
        rest = self._given_up()
        if not rest:
            return []
        return [Reasoning(rest)] if self._state is _State.INSIDE else [Content(rest)]

    def _given_up(self) -> str:
        held, self._held = self._held, ""
        return held

    def _look_for_opening(self) -> None:
        begun = self._held.lstrip()
        opening = self._tags.opening
        if len(self._held) - len(begun) > N_BLANKS_MAX:
            self._state = _State.PAST
        elif begun.startswith(opening):
            self._held = begun[len(opening) :]
            self._state = _State.INSIDE
        elif not opening.startswith(begun):
            self._state = _State.PAST

    def _look_for_more(self) -> None:
        self._held = self._held.lstrip()
        opening = self._tags.opening
        if self._tags.may_come_again and self._held.startswith(opening):
            self._held = self._held[len(opening) :]
            if self._has_text:
                self._between, self._has_text = BETWEEN, False
            self._state = _State.INSIDE
        elif self._held and not (self._tags.may_come_again and opening.startswith(self._held)):
            self._state = _State.PAST

    def _read(self, parts: list[Part]) -> bool:
        """Read reasoning; return whether it has ended."""
        if not self._has_text:
            self._held = self._held.lstrip()
        closing = (self._tags.closing,)
        if found := first_marker(self._held, closing):
            pos, marker = found
            self._tell(self._held[: n_before_blanks(self._held, pos)], parts)
            self._held = self._held[pos + len(marker) :]
            self._state = _State.AFTER
            return True
        n_told = n_before_blanks(self._held, len(self._held) - n_undecided(self._held, closing))
        self._tell(self._held[:n_told], parts)
        self._held = self._held[n_told:]
        return False

    def _tell(self, text: str, parts: list[Part]) -> None:
        if text:
            self._has_text = True
            parts.append(Reasoning(self._between + text))
            self._between = ""
