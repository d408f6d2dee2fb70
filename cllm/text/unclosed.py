"""Finds the calls of a model that has called a tool from within its reasoning, and left it at that."""

from __future__ import annotations

from collections.abc import Sequence

from cllm.text.backlog import Backlog
from cllm.text.call_formats import CallFormat
from cllm.text.call_reader import CallReader
from cllm.text.markers import first_marker, n_before_blanks, n_undecided
from cllm.text.parts import Arguments, Content, Part, Reasoning
from cllm.text.tools import Tool


class UnclosedReasoning:
    """Reads the text of one answer's reasoning.

    Models forget to close it before they call something. So complete calls that the reasoning ends with count, if nothing comes after
    them but, at most, the closing tag. A call that more reasoning, content or calls follow was but thought of.
    """

    def __init__(self, form: CallFormat, tools: Sequence[Tool], *, assured: bool, single: bool) -> None:
        """`assured`: they count only where an answer that a grammar holds comes to nothing else; `single`: the first one alone does."""
        self._form = form
        self._tools = tools
        self._assured = assured
        self._single = single
        self._markers = (form.begin, *form.ignored, *([form.opens] if form.opens else []))
        self._backlog = Backlog()
        self._text = ""  # what might become a marker; from one on, all of it
        self._n_marker = 0  # so much of that is the first marker, with the blanks before it
        self._reader: CallReader | None = None  # of what comes from a marker on
        self._calls: list[Part] = []

    @property
    def ends_in_call(self) -> bool:
        """Whether what has come ends with a complete call, and with what closes it."""
        return self._reader is not None and self._reader.ends_with_call

    def push(self, text: str) -> str:
        """Return what is certain to be reasoning."""
        self._backlog.put(text)
        told = ""
        while piece := self._backlog.take():
            self._text += piece
            told += self._look_for_marker() if self._reader is None else self._read(piece)
        return told

    def give_up(self) -> str:
        """Return what was undecided: it is reasoning, since the answer goes on after it."""
        text, self._text = self._text, ""
        self._reader = None
        return text

    def finish(self, *, is_closed: bool) -> list[Part]:
        """Return what was undecided, the answer having ended, after the reasoning's closing tag or before: calls, or reasoning."""
        has_called = self._reader is not None and self._reader.n_calls > 0 and self._ends_with(self._reader)
        rest = self.give_up()
        told: list[Part] = [Reasoning(rest)] if rest else []
        if not has_called:
            return told
        calls = self._calls
        if self._single:
            calls = calls[: next(i for i, part in enumerate(calls, 1) if isinstance(part, Arguments))]
        if self._assured:
            return [*told, *calls] if is_closed else told
        return calls

    def _ends_with(self, reader: CallReader) -> bool:
        """Whether nothing comes after the last call, nor was about to."""
        return not reader.finish() and not reader.has_rest

    def _look_for_marker(self) -> str:
        found = first_marker(self._text, self._markers)
        pos = found[0] if found else len(self._text) - n_undecided(self._text, self._markers)
        n_told = n_before_blanks(self._text, pos)
        told, self._text = self._text[:n_told], self._text[n_told:]
        if found:
            self._n_marker = pos - n_told + len(found[1])
            self._reader = CallReader(self._form, self._tools, assured=False, single=False, keeps_blanks=False)
            self._calls = []
            told += self._read(self._text[pos - n_told :])
        return told

    def _read(self, piece: str) -> str:
        assert self._reader is not None
        self._calls += self._reader.push(piece)
        if not any(isinstance(part, Content) for part in self._calls):
            return ""
        n_told = self._n_marker  # it is no call, or not the last thing: what is behind the marker is looked through once more, if it may be
        text = self.give_up()
        if not self._backlog.put_again(text[n_told:]):
            return text
        return text[:n_told]
