"""Takes away what some models wrap all that they say in: a tag before it, and one behind."""

from __future__ import annotations

from typing import Final

import attrs

from cllm.text.markers import N_BLANKS_MAX, n_before_blanks, n_undecided
from cllm.text.reasoning import without_comments


@attrs.frozen
class Wrapping:
    """The two tags."""

    opening: str
    closing: str


WRAPPINGS: Final = (
    Wrapping("<answer>", "</answer>"),  # Hunyuan
    Wrapping("<response>", "</response>"),  # ERNIE that thinks, and Granite 3.3
)


_OTHERWISE: Final = ("]<]minimax[>[",)  # of MiniMax' templates, which have such tags around what tools gave


def wrapping_in(template: str) -> Wrapping | None:
    """The tags that a chat template's source speaks of; one of a pair is enough."""
    source = without_comments(template)
    if any(sign in source for sign in _OTHERWISE):
        return None
    return next((tags for tags in WRAPPINGS if tags.opening in source or tags.closing in source), None)


class WrappingReader:
    """Reads what one answer says, which begins with the opening tag or is not wrapped. A closing tag ends it if nothing comes behind it but
    blanks, and calls; any other is said. Blanks beside the tags are left out with them.
    """

    def __init__(self, tags: Wrapping, call_markers: tuple[str, ...] = ()) -> None:
        """`call_markers` are what calls begin with."""
        self._tags = tags
        self._markers = call_markers
        self._held = ""
        self._is_open = False
        self._has_text = False
        self.is_past = False  # it is not wrapped, or no more: all that comes is said

    def push(self, text: str) -> str:
        """Return what is certainly said now."""
        if self.is_past:
            return text
        self._held += text
        if not self._is_open:
            self._look_for_opening()
        said = self._said() if self._is_open else ""
        return said + self._given_up() if self.is_past else said

    def finish(self) -> str:
        """Return what was still undecided."""
        pos = self._held.find(self._tags.closing) if self._is_open else -1
        held = self._given_up()
        if pos >= 0:
            return held[:pos].rstrip() + held[pos + len(self._tags.closing) :].lstrip()
        return held.rstrip() if self._is_open else held

    def _given_up(self) -> str:
        held, self._held = self._held, ""
        return held

    def _look_for_opening(self) -> None:
        begun = self._held.lstrip()
        opening = self._tags.opening
        if len(self._held) - len(begun) > N_BLANKS_MAX:
            self.is_past = True
        elif begun.startswith(opening):
            self._held, self._is_open = begun[len(opening) :], True
        elif not opening.startswith(begun):
            self.is_past = True

    def _said(self) -> str:
        """All up to what may be the end, or is."""
        if not self._has_text:
            self._held = self._held.lstrip()
        closing, start = self._tags.closing, 0
        while (pos := self._held.find(closing, start)) >= 0:
            behind = self._held[pos + len(closing) :]
            rest = behind.lstrip()
            is_near = len(behind) - len(rest) <= N_BLANKS_MAX
            if is_near and rest.startswith(self._markers):
                before, self._held, self.is_past = self._held[: n_before_blanks(self._held, pos)], behind, True
                return before
            if is_near and (not rest or any(marker.startswith(rest) for marker in self._markers)):
                return self._told(n_before_blanks(self._held, pos))
            start = pos + len(closing)
        return self._told(n_before_blanks(self._held, len(self._held) - n_undecided(self._held[start:], (closing,))))

    def _told(self, n: int) -> str:
        said, self._held = self._held[:n], self._held[n:]
        self._has_text = self._has_text or bool(said)
        return said
