"""Tells tool calls from the rest of an answer as its text comes, in whatever pieces."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

from cllm.text.backlog import Backlog
from cllm.text.call_bodies import Body, as_object
from cllm.text.call_formats import CallFormat
from cllm.text.call_tags import TaggedBody
from cllm.text.markers import N_BLANKS_MAX, first_marker, n_before_blanks, n_undecided
from cllm.text.parts import Arguments, CallBegun, Content, Part
from cllm.text.tools import Tool

_BLANKS: Final = " \t\r\n"


class _State(Enum):
    START = 1  # nothing but blanks so far
    TEXT = 2
    BEFORE_BODY = 3
    BODY = 4
    AFTER_BODY = 5


class CallReader:
    """Reads one answer.

    Where calls are `assured` (a grammar makes sure of them) they are told as they come. Otherwise each is held until it is complete,
    and one that is not well formed, or names no tool of these, is content: nothing that the model wrote is lost but blanks and markers
    around calls. Calls within such a one are looked for as far as the backlog allows.
    """

    def __init__(self, form: CallFormat, tools: Sequence[Tool], *, assured: bool, single: bool, keeps_blanks: bool) -> None:
        """`single`: the answer is over with the end of its first call; `keeps_blanks`: those before a call are content, told at once."""
        self.n_calls = 0
        self.has_rest = False  # at the end: what was undecided was more than blanks, be it a marker that was cut
        self._form = form
        self._tools = {tool.name: tool for tool in tools}
        self._assured = assured
        self._single = single
        self._keeps_blanks = keeps_blanks
        self._backlog = Backlog()
        self._state = _State.START if form.bare else _State.TEXT
        self._text = ""  # what is being read
        self._raw = ""  # what of a call would be content if it were none: blanks before it, the marker, all of it since
        self._n_marker = 0  # so much of it comes before the call's body
        self._body: Body | None = None
        self._held: list[Part] = []  # of a call that might still be none
        self._is_begun = False  # whether the call has been told of
        self._is_list = False
        self._wants_end = bool(form.ends)  # the last call
        self._is_closed = False  # by that

    @property
    def ends_with_call(self) -> bool:
        """Whether what has been read ends with a complete call, and with what closes it, if its form has that."""
        return self._state is _State.AFTER_BODY and not self._is_list and (self._is_closed or not self._wants_end)

    @property
    def is_done(self) -> bool:
        """Whether the answer is over."""
        return self._single and self.n_calls > 0

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
        if self.is_done or self._is_begun:
            rest = ""
        elif self._state is _State.AFTER_BODY:
            rest = self._text.lstrip(_BLANKS + ",;]")
            self.has_rest = bool(rest)
            markers = (*self._form.ends, self._form.begin, *self._form.ignored, *self._form.again)
            rest = "" if any(marker.startswith(rest) for marker in markers) else rest  # one that the end of the answer has cut
        else:
            rest = self._raw + self._text
        self.has_rest = self.has_rest or bool(rest)
        self._raw = self._text = ""
        return [Content(rest)] if rest else []

    def _read(self, parts: list[Part]) -> bool:
        """Read on from where it stands; return whether there may be more to read."""
        if self._state is _State.START:
            return self._start(parts)
        if self._state is _State.TEXT:
            return self._read_text(parts)
        if self._state is _State.BEFORE_BODY:
            return self._begin_body(parts)
        return self._read_body(parts) if self._state is _State.BODY else self._go_on()

    def _start(self, parts: list[Part]) -> bool:
        begun = self._text.lstrip()
        n_blanks = len(self._text) - len(begun)
        if self._keeps_blanks and n_blanks:
            parts.append(Content(self._text[:n_blanks]))
            self._text, n_blanks = begun, 0
        if begun.startswith("{") and n_blanks <= N_BLANKS_MAX:
            self._mark(self._text[:n_blanks], begun)
        elif begun or n_blanks > N_BLANKS_MAX:
            self._state = _State.TEXT
        return self._state is not _State.START

    def _read_text(self, parts: list[Part]) -> bool:
        form = self._form
        markers = (form.begin, *form.ignored, *([form.opens] if form.opens else []))
        found = first_marker(self._text, markers)
        pos = found[0] if found else len(self._text) - n_undecided(self._text, markers)
        n_told = pos if self._keeps_blanks else n_before_blanks(self._text, pos)
        if n_told:
            parts.append(Content(self._text[:n_told]))
        if not found:
            self._text = self._text[n_told:]
            return False
        marker = found[1]
        self._wants_end = bool(form.ends) and marker != form.opens  # without what begins it, it mostly lacks what ends it
        if marker == form.begin:
            self._mark(self._text[n_told:pos] + marker, self._text[pos + len(marker) :])
        elif marker == form.opens:
            self._mark(self._text[n_told:pos], self._text[pos:], n_marker=pos - n_told + len(marker))
        else:
            self._text = self._text[n_told:pos] + self._text[pos + len(marker) :]
        return True

    def _mark(self, raw: str, rest: str, *, n_marker: int | None = None) -> None:
        self._raw, self._text, self._n_marker = raw, rest, len(raw) if n_marker is None else n_marker
        self._is_closed = False
        self._state = _State.BEFORE_BODY

    def _begin_body(self, parts: list[Part]) -> bool:
        begun = self._text.lstrip(_BLANKS + "[")
        n = len(self._text) - len(begun)
        if n > N_BLANKS_MAX:
            self._give_up(parts)
            return True
        if not begun:
            return False
        self._is_list = "[" in self._text[:n] or (self._is_list and not self._raw)
        self._raw, self._text = self._raw + self._text[:n], begun
        self._body = self._form.body(begun[0], self._tools)
        self._state, self._held, self._is_begun = _State.BODY, [], False
        return True

    def _read_body(self, parts: list[Part]) -> bool:
        body = self._body
        assert body is not None
        end = body.push(self._text, 0)
        if body.is_bad or (body.name is not None and body.name not in self._tools):
            self._give_up(parts)
            return True
        raw = self._raw + self._text
        self._raw, self._text = raw[: len(self._raw) + end], raw[len(self._raw) + end :]
        self._tell(body, parts)
        return not body.is_complete or self._end_call(body, parts)

    def _tell(self, body: Body, parts: list[Part]) -> None:
        if body.name is None:
            return
        told = parts if self._assured else self._held
        if not self._is_begun and not self._held:
            told.append(CallBegun(self.n_calls, body.name))
            self._is_begun = self._assured
        if fragment := "".join(body.fragments):
            told.append(Arguments(self.n_calls, fragment))
        body.fragments = []

    def _end_call(self, body: Body, parts: list[Part]) -> bool:
        if not self._assured:
            begun, arguments = _joined(self._held)
            found = as_object(arguments.fragment)
            if found is None:
                self._give_up(parts)
                return True
            parts += [begun, Arguments(arguments.call, found)]
        self.n_calls += 1
        tags = self._form.tags
        self._is_closed = isinstance(body, TaggedBody) and tags is not None and tags.closing in self._form.ends
        self._reset(_State.AFTER_BODY)
        return True

    def _give_up(self, parts: list[Part]) -> None:
        """It is no call: its marker is text, and what follows is read once more, if it may be."""
        if not self._is_begun:
            raw, self._text = self._raw + self._text, ""
            n_told = self._n_marker if self._backlog.put_again(raw[self._n_marker :]) else len(raw)
            if n_told:
                parts.append(Content(raw[:n_told]))
        self._reset(_State.TEXT)

    def _reset(self, state: _State) -> None:
        self._state, self._body, self._held, self._raw, self._is_begun = state, None, [], "", False

    def _go_on(self) -> bool:
        """After a call: more of the list, its end, the next call, or text."""
        self._text = self._text.lstrip()  # at once, however many blanks come
        if self._is_list and self._text.startswith("]"):
            self._text, self._is_list = self._text[1:].lstrip(), False
        rest = self._text.lstrip(_BLANKS + ",;]")
        skipped = self._text[: len(self._text) - len(rest)]
        if len(skipped) > N_BLANKS_MAX:
            self._state = _State.TEXT
            return True
        again = self._form.again
        is_listed = self._form.other is not None and self._is_list and "]" not in skipped
        markers = (*self._form.ends, self._form.begin, *self._form.ignored)
        marker = next((marker for marker in markers if rest.startswith(marker)), None)
        if marker == self._form.begin:
            self._mark(marker, rest[len(marker) :])
        elif marker is not None:
            self._is_closed = self._is_closed or marker in self._form.ends
            self._text = rest[len(marker) :]
        elif any(each.startswith(rest) for each in (*markers, *again) if each != rest):  # nothing but blanks too
            return False
        elif rest.startswith(again) or (is_listed and rest[0].isidentifier()):
            self._mark("", rest)
        else:
            self._state = _State.TEXT
        return True


def _joined(parts: list[Part]) -> tuple[CallBegun, Arguments]:
    """A call's parts with its arguments in one."""
    begun = parts[0]
    assert isinstance(begun, CallBegun)
    return begun, Arguments(begun.call, "".join([part.fragment for part in parts if isinstance(part, Arguments)]))
