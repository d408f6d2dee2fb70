"""Takes away the frame that some models set what they say in: a tag before all of it, and one behind."""

from __future__ import annotations

from enum import Enum
from typing import Final

import attrs

from cllm.text.markers import N_BLANKS_MAX, n_before_blanks, n_undecided
from cllm.text.reasoning import without_comments


@attrs.frozen
class Frame:
    """The two tags."""

    opening: str
    closing: str


FRAMES: Final = (
    Frame("<answer>", "</answer>"),  # Hunyuan
    Frame("<response>", "</response>"),  # ERNIE that thinks, and Granite 3.2 and 3.3
)


def frame_in(template: str) -> Frame | None:
    """The frame that a chat template's source speaks of; one tag of it is enough."""
    source = without_comments(template)
    return next((frame for frame in FRAMES if frame.opening in source or frame.closing in source), None)


class _State(Enum):
    BEFORE = 1  # nothing but blanks so far, and the beginning of the tag
    WITHIN = 2
    BEHIND = 3  # nothing but blanks since the closing tag
    PAST = 4


class FrameReader:
    """Reads what one answer says, which begins with the opening tag or has no frame. Blanks between the tags and what is said are left out
    with them, and so are those that the answer ends with.
    """

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._state = _State.BEFORE
        self._held = ""
        self._has_text = False

    @property
    def is_past(self) -> bool:
        """Whether all that comes from now on is said."""
        return self._state is _State.PAST

    def push(self, text: str) -> str:
        """Return what is certainly said now."""
        self._held += text
        if self._state is _State.BEFORE:
            self._look_for_opening()
        said = self._said_within() if self._state is _State.WITHIN else ""
        if self._state is _State.BEHIND and (self._held.strip() or len(self._held) > N_BLANKS_MAX):
            self._state = _State.PAST
        return said + self._given_up() if self.is_past else said

    def finish(self) -> str:
        """Return what was still undecided."""
        held = self._given_up()
        return held if self._state in (_State.BEFORE, _State.PAST) else held.rstrip()

    def _given_up(self) -> str:
        held, self._held = self._held, ""
        return held

    def _look_for_opening(self) -> None:
        begun = self._held.lstrip()
        opening = self._frame.opening
        if begun.startswith(opening):
            self._held, self._state = begun[len(opening) :], _State.WITHIN
        elif not opening.startswith(begun) or len(self._held) - len(begun) > N_BLANKS_MAX:
            self._state = _State.PAST

    def _said_within(self) -> str:
        if not self._has_text:
            self._held = self._held.lstrip()
        closing = self._frame.closing
        pos = self._held.find(closing)
        if pos >= 0:
            said, self._held = self._held[:pos].rstrip(), self._held[pos + len(closing) :]
            self._state = _State.BEHIND
            return said
        n_said = n_before_blanks(self._held, len(self._held) - n_undecided(self._held, (closing,)))
        said, self._held = self._held[:n_said], self._held[n_said:]
        self._has_text = self._has_text or bool(said)
        return said
