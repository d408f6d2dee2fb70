"""What a sequence's tokens say: their text, read for reasoning and tool calls where asked for, up to a stop string."""

from __future__ import annotations

from cllm.text.answers import AnswerFormat, AnswerReader, watched
from cllm.text.call_order import CallOrder
from cllm.text.detokenizer import Detokenizer, TokenTexts
from cllm.text.parts import CallBegun, Content, Part, Reasoning
from cllm.text.stops import StopStrings


class Transcript:
    """The text of one sequence.

    What it tells is (text, parts): text where all of it is content, and then parts is None; else "" and the parts in order. Together
    they are the same whatever the tokens.
    """

    __slots__ = ("_calls", "_detokenizer", "_form", "_is_closing", "_is_stopped", "_reader", "_stops", "n_calls", "n_reasoning")

    def __init__(self, texts: TokenTexts, *, stop: tuple[str, ...] = (), form: AnswerFormat | None = None) -> None:
        self._detokenizer = Detokenizer(texts)
        self._stops = StopStrings(stop) if stop else None
        self._form = form
        self._reader: AnswerReader | None = None if form is None else form.reader(self._stops)
        self._calls: CallOrder | None = None  # of parts that somebody else has read
        self._is_stopped = False
        self._is_closing = False
        self.n_reasoning = 0  # tokens of the reasoning
        self.n_calls = 0  # complete tool calls

    @property
    def is_done(self) -> bool:
        """Whether the answer is over: it was to hold one tool call and does."""
        return self._reader is not None and self._reader.is_done

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._reader is not None and self._reader.is_reasoning

    @property
    def may_be_due(self) -> bool:
        """Whether `due` may ever name tokens."""
        form = self._form
        return self._reader is not None and form is not None and (form.n_reasoning_max is not None or form.assured or form.held)

    def due(self) -> tuple[int, ...]:
        """The tokens that must come next, told once: those that end a reasoning that has had its budget, or in which the model has called
        something as a grammar is yet to hold it to. Mostly none.

        Reasoning that begins once more is ended once more.
        """
        reader, form = self._reader, self._form
        if reader is None or form is None:
            return ()
        is_spent = form.n_reasoning_max is not None and reader.may_be_cut and self.n_reasoning >= form.n_reasoning_max
        is_over = (form.assured or form.held) and reader.has_called_within_reasoning  # it would end here, and may not
        was_closing, self._is_closing = self._is_closing, is_spent or is_over
        return form.closing if self._is_closing and not was_closing else ()

    def push(self, token: int, *, can_stop: bool) -> tuple[str, list[Part] | None, str | None]:
        """Take the next token. Returns text and parts that are certain now, and the stop string that ended it, if one has and may.

        Raises: IndexError for a token that the vocabulary does not have.
        """
        text = self._detokenizer.push(token)
        if self._reader is not None:
            return self._read(self._reader, text, can_stop)
        if self._stops is None:
            return text, None, None
        text, match = self._stops.push(text, counts=can_stop)
        self._is_stopped = match is not None
        return text, None, match

    def finish(self) -> tuple[str, list[Part] | None, str | None]:
        """Return what was held back because it might have become more, and the stop string that ends it there, if one does.

        After a stop string that `push` has told there is nothing.
        """
        if self._is_stopped:
            return "", None, None
        if self._calls is not None:
            return self._finish_parts(self._calls.finish())
        text = self._detokenizer.flush()
        if self._reader is not None:
            parts, match = self._reader.push(text, can_stop=True)
            if match is None:
                rest, match = self._reader.finish()
                parts += rest
            self._count_calls(self._reader, parts, match)
            return *told(parts), match
        if self._stops is None:
            return text, None, None
        released, match = self._stops.push(text)
        return (released if match is not None else released + self._stops.flush()), None, match

    def _read(self, reader: AnswerReader, text: str, can_stop: bool) -> tuple[str, list[Part] | None, str | None]:
        self.n_reasoning += reader.is_reasoning
        parts, match = reader.push(text, can_stop=can_stop)
        self._is_stopped = match is not None
        self._count_calls(reader, parts, match)
        if reader.is_idle:
            self._reader = None
        return *told(parts), match

    def _count_calls(self, reader: AnswerReader, parts: list[Part], match: str | None) -> None:
        """Those behind a stop string have been read, and are not told."""
        self.n_calls = reader.n_calls if match is None else self.n_calls + _n_begun(parts)

    def push_parts(self, parts: list[Part], n_tokens: int) -> tuple[list[Part], str | None]:
        """Take parts that somebody else has read; for a transcript that takes no tokens, and has no form."""
        if any(isinstance(part, Reasoning) for part in parts):
            self.n_reasoning += n_tokens
        if self._calls is None:
            self._calls = CallOrder()
        return self._watched(self._calls.push(parts))

    def _watched(self, parts: list[Part]) -> tuple[list[Part], str | None]:
        match = None
        if self._stops is not None:
            parts, match = watched(parts, self._stops)
            self._is_stopped = match is not None
        self.n_calls += _n_begun(parts)
        return parts, match

    def _finish_parts(self, parts: list[Part]) -> tuple[str, list[Part] | None, str | None]:
        parts, match = self._watched(parts)
        if self._stops is not None and match is None and (text := self._stops.flush()):
            parts.append(Content(text))
        return *told(parts), match


def _n_begun(parts: list[Part]) -> int:
    return sum(isinstance(part, CallBegun) for part in parts)


def told(parts: list[Part]) -> tuple[str, list[Part] | None]:
    """Parts as a transcript tells them."""
    if all(isinstance(part, Content) for part in parts):
        return "".join([part.text for part in parts if isinstance(part, Content)]), None
    return "", parts
