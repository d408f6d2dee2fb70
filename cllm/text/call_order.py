"""Keeps tool calls whole that somebody else has read: what comes between the pieces of one is told when it is complete.

OpenAI's protocol numbers calls, so that pieces of several may come by turns. Whoever is told one call after the other, as Anthropic's and
Ollama's clients are, would take a piece for the call that was begun last. What follows a call that has no arguments at all, not even `{}`,
waits for the end: some might still come.
"""

from __future__ import annotations

from cllm.text.call_bodies import JsonValue
from cllm.text.parts import Arguments, CallBegun, Part


class CallOrder:
    """Of one answer."""

    def __init__(self) -> None:
        self._open: int | None = None  # the call whose arguments are not complete
        self._value = JsonValue()
        self._has_begun = False  # its arguments
        self._held: list[Part] = []

    def push(self, parts: list[Part]) -> list[Part]:
        """Return what may be told now, in its order."""
        told: list[Part] = []
        for part in parts:
            self._take(part, told)
        return told

    def finish(self) -> list[Part]:
        """Return what is left when nothing more comes, also of calls that are not complete."""
        told: list[Part] = []
        while self._held:
            self._release(told)
        return told

    def _take(self, part: Part, told: list[Part]) -> None:
        if self._open is not None and not (isinstance(part, Arguments) and part.call == self._open):
            self._held.append(part)
            return
        told.append(part)
        if isinstance(part, CallBegun):
            self._open, self._value, self._has_begun = part.call, JsonValue(), False
        elif isinstance(part, Arguments) and self._is_complete(part.fragment):
            self._release(told)

    def _is_complete(self, fragment: str) -> bool:
        """Whether the open call is, with this piece. One that can be no JSON has no end, and is what it is."""
        if not self._has_begun:
            fragment = fragment.lstrip()
            self._has_begun = bool(fragment)
        self._value.push(fragment, 0)
        return self._value.is_complete or self._value.is_bad

    def _release(self, told: list[Part]) -> None:
        self._open = None
        held, self._held = self._held, []
        for part in held:
            self._take(part, told)
