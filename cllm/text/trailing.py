"""Tells thoughts that stand behind what was said, at the end of an answer or before its calls, from content that speaks of them."""

from __future__ import annotations

from typing import Final

from cllm.text.markers import N_BLANKS_MAX, first_marker, n_undecided
from cllm.text.parts import Content, Part, Reasoning
from cllm.text.reasoning import ReasoningTags

N_HELD_MAX: Final = 4096  # characters of thoughts: more is said, or an answer that speaks of them would stand still to its end


class TrailingThoughts:
    """Reads the content of one answer of a model that may think once more behind it, as Gemma 4 does, mostly to no end.

    What looks like a thought, or the end of one, is held back until something is said behind it: then it is content.
    """

    def __init__(self, tags: ReasoningTags) -> None:
        self._opening, self._closing = tags.opening, tags.closing
        self._held = ""
        self._is_held = False  # what is held begins with a thought, or the end of one; else it is at most a part of a tag
        self._n_read = 0  # characters of it that are whole thoughts, and ends of some

    def push(self, text: str) -> str:
        """Return what is certainly said now."""
        self._held += text
        said = ""
        while True:
            if not self._is_held:
                found = first_marker(self._held, (self._opening, self._closing))
                n = found[0] if found else len(self._held) - n_undecided(self._held, (self._opening, self._closing))
                said, self._held = said + self._held[:n], self._held[n:]
                if not found:
                    return said
                self._is_held, self._n_read = True, 0
            n_said = self._read()
            if n_said is None:
                return said
            said, self._held, self._is_held = said + self._held[:n_said], self._held[n_said:], False

    def end(self) -> list[Part]:
        """Return what was held back, now that the content is over: thoughts that are whole, or content."""
        held, self._held, self._is_held = self._held, "", False
        thoughts: list[str] = []
        rest = held.strip()
        while rest:
            if rest.startswith(self._closing):  # of no thought
                rest = rest[len(self._closing) :].lstrip()
                continue
            thought, closing, behind = rest.removeprefix(self._opening).partition(self._closing)
            if not rest.startswith(self._opening) or not closing:
                return [Content(held)]
            thoughts.append(thought.strip())
            rest = behind.lstrip()
        told = "\n\n".join(filter(None, thoughts))
        return [Reasoning(told)] if told else []

    def _read(self) -> int | None:
        """Read on; return how much of what is held is said after all, None while nothing is said behind it."""
        while True:
            place = self._n_read
            while self._held[place : place + 1].isspace():
                place += 1
            if place - self._n_read > N_BLANKS_MAX:
                return self._n_read
            if self._held.startswith(self._closing, place):
                self._n_read = place + len(self._closing)
            elif self._held.startswith(self._opening, place):
                end = self._held.find(self._closing, place, N_HELD_MAX)
                if end < 0:
                    return None if len(self._held) < N_HELD_MAX else place + len(self._opening)
                self._n_read = end + len(self._closing)
            elif any(marker.startswith(self._held[place : place + len(marker)]) for marker in (self._opening, self._closing)):
                return None
            else:
                return self._n_read
            if self._n_read > N_HELD_MAX:
                return self._n_read
