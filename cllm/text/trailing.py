"""Tells thoughts that stand behind what was said, at the end of an answer or before its calls, from content that speaks of them."""

from __future__ import annotations

from cllm.text.markers import N_BLANKS_MAX, first_marker, n_undecided
from cllm.text.parts import Content, Part, Reasoning
from cllm.text.reasoning import ReasoningTags


class TrailingThoughts:
    """Reads the content of one answer of a model that may think once more behind it, as Gemma 4 does, mostly to no end.

    What looks like a thought, or the end of one, is held back until something is said behind it: then it is content.
    """

    def __init__(self, tags: ReasoningTags) -> None:
        self._opening, self._closing = tags.opening, tags.closing
        self._held = ""

    def push(self, text: str) -> str:
        """Return what is certainly said now."""
        self._held += text
        said = ""
        while found := first_marker(self._held, (self._opening, self._closing)):
            n_before = found[0]
            end = self._end_of_thoughts(n_before)
            if end is None:
                break
            said, self._held = said + self._held[:end], self._held[end:]
        else:
            n_before = len(self._held) - n_undecided(self._held, (self._opening, self._closing))
        said, self._held = said + self._held[:n_before], self._held[n_before:]
        return said

    def end(self) -> list[Part]:
        """Return what was held back, now that the content is over: thoughts that are whole, or content."""
        held, self._held = self._held, ""
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

    def _end_of_thoughts(self, start: int) -> int | None:
        """Where what is said begins behind the thoughts at `start`; None while nothing is."""
        place = start
        while True:
            if self._held.startswith(self._closing, place):
                place += len(self._closing)
            elif self._held.startswith(self._opening, place):
                closing = self._held.find(self._closing, place)
                if closing < 0:
                    return None
                place = closing + len(self._closing)
            else:
                return place
            rest = self._held[place:].lstrip()
            if len(self._held) - place - len(rest) > N_BLANKS_MAX:
                return place
            if not rest or any(marker.startswith(rest) for marker in (self._opening, self._closing)):
                return None
            if rest.startswith((self._opening, self._closing)):
                place = len(self._held) - len(rest)
                continue
            return place
