"""What each request got: read from the bytes that came and when, after the pass, so that reading costs the pass nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

import attrs

from cllm.bench.events import EventReader
from cllm.bench.workloads import Ask

DONE: Final = b"[DONE]"
N_MESSAGE_MAX: Final = 300
GIVEN_UP: Final = ("error", "abort")  # finish reasons of answers that are none
MALFORMED: Final = (ValueError, TypeError, AttributeError, LookupError, RecursionError)  # of JSON that is none, or of another shape
OVER: Final = "the pass was over before"  # the error of what was under way when a pass was cut


@attrs.define(kw_only=True)
class Exchange:
    """The raw record of one request. Times are seconds since the pass began."""

    ask: Ask
    sent_at: float = 0.0
    status: int = 0
    is_stream: bool = True
    arrivals: list[tuple[float, bytes]] = attrs.field(factory=list)  # pieces of the body
    ended_at: float = 0.0
    error: str = ""  # why there is no whole answer


@attrs.define(kw_only=True)
class Answer:
    """What one request got. Times are seconds since the pass began."""

    n_asked: int
    sent_at: float
    n_prompt_asked: int = 0  # tokens at least, if ids were not taken and words were sent
    ended_at: float = 0.0
    status: int = 0
    error: str = ""
    is_stream: bool = True
    chunks_at: list[float] = attrs.field(factory=list)  # of each chunk with text; servers send one a token or fewer
    n_prompt: int = 0
    n_cached: int | None = None  # of the prompt's tokens, those that the server did not compute; None: it does not say
    n_generated: int = 0
    n_reasoned: int = 0  # of these, by the server's count
    shows_reasoning: bool = False
    counted_by: str = "nothing"  # "usage": the server's count; "chunks": ours
    finish_reason: str = ""

    @property
    def is_failed(self) -> bool:
        """Whether there is no whole answer."""
        return bool(self.error)

    @property
    def is_exact(self) -> bool | None:
        """Whether it has exactly the asked tokens, to the whole prompt. None: nobody knows, since a chunk may hold several."""
        if self.error or self.is_cut:
            return False
        if self.counted_by == "chunks" and self.n_generated <= self.n_asked:
            return False if self.has_stopped else None
        return self.n_generated == self.n_asked

    @property
    def has_stopped(self) -> bool:
        """Whether it ended by itself, with fewer tokens than were asked, or pieces of text: no stop string is ever sent."""
        return self.finish_reason == "stop" and self.n_generated < self.n_asked

    @property
    def is_cut(self) -> bool:
        """Whether the server says that it read less than the prompt, which makes it faster than those who read it all."""
        return 0 < self.n_prompt < self.n_prompt_asked

    @property
    def ttft_s(self) -> float | None:
        """To the first text, which comes with the last one without a stream; None: a stream showed none, as of reasoning that is hidden."""
        if self.chunks_at:
            return self.chunks_at[0] - self.sent_at
        return None if self.is_stream else self.e2e_s

    @property
    def e2e_s(self) -> float:
        """To the end of the answer."""
        return self.ended_at - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        """The times between two pieces of text."""
        return [b - a for a, b in zip(self.chunks_at, self.chunks_at[1:], strict=False)]

    @property
    def itl_s(self) -> float:
        """The mean time between two tokens of the text: those of reasoning that is hidden came before it."""
        n_shown = max(self.n_generated - (0 if self.shows_reasoning else self.n_reasoned), len(self.chunks_at))
        return 0.0 if len(self.chunks_at) < 2 else (self.chunks_at[-1] - self.chunks_at[0]) / (n_shown - 1)


def answer_of(exchange: Exchange) -> Answer:
    """Read one exchange."""
    answer = Answer(
        n_asked=exchange.ask.n_generated,
        n_prompt_asked=len(exchange.ask.prompt),
        sent_at=exchange.sent_at,
        ended_at=exchange.ended_at,
        status=exchange.status,
        error=exchange.error,
        is_stream=exchange.is_stream,
    )
    if exchange.status != 200:
        answer.error = answer.error or _refusal(exchange)
    elif exchange.is_stream:
        _read_stream(answer, exchange)
    else:
        _read_page(answer, exchange)
    if not answer.error and not answer.n_generated:
        answer.error = "an answer without any token"
    return answer


def _refusal(exchange: Exchange) -> str:
    text = b"".join(piece for _, piece in exchange.arrivals).decode("utf-8", "replace")
    return f"{exchange.status}: {message_of(text)}"


def message_of(text: str) -> str:
    """The message in an error's body, or the beginning of the body itself."""
    try:
        page = json.loads(text)
        error = page.get("error", page.get("detail", page.get("message")))
        message = error.get("message") if isinstance(error, dict) else error
    except MALFORMED:
        message = None
    return " ".join(str(message or text).split())[:N_MESSAGE_MAX]


def _read_page(answer: Answer, exchange: Exchange) -> None:
    try:
        page = json.loads(b"".join(piece for _, piece in exchange.arrivals))
        has_text = _take(answer, page)
    except MALFORMED:
        answer.error = answer.error or "the answer is not what OpenAI's API has"
        return
    if has_text and answer.counted_by == "nothing":  # how many tokens the text is, only the server could say
        answer.error = answer.error or "an answer without usage"


def _read_stream(answer: Answer, exchange: Exchange) -> None:
    reader = EventReader()
    is_begun = is_ended = False
    try:
        for at, piece in exchange.arrivals:
            for data in reader.feed(piece):
                is_begun = True
                is_ended = is_ended or data == DONE
                if data != DONE and _take(answer, json.loads(data)):
                    answer.chunks_at.append(at)
    except MALFORMED:
        answer.error = answer.error or "the stream is not what OpenAI's API has"
    if not answer.n_generated and answer.chunks_at:  # also where a server counts nothing, and says so
        answer.n_generated, answer.counted_by = len(answer.chunks_at), "chunks"
    if not is_begun:
        answer.error = answer.error or _in_the_place_of_a_stream(exchange)
    if not is_ended and not answer.finish_reason:
        answer.error = answer.error or "the stream ended before its answer"


def _in_the_place_of_a_stream(exchange: Exchange) -> str:
    """What a body without events says; nothing, if that is nothing whole."""
    text = b"".join(piece for _, piece in exchange.arrivals).decode("utf-8", "replace")
    try:
        page = json.loads(text)
    except MALFORMED:
        return ""
    if isinstance(page, dict) and page.get("choices"):
        return "the server answers in one piece where a stream is asked for (--no-stream asks for none)"
    return message_of(text)


def _take(answer: Answer, page: dict[str, Any]) -> bool:
    """Take what a chunk or a whole answer tells; return whether it has text."""
    if page.get("error") or page.get("object") == "error":
        answer.error = answer.error or message_of(json.dumps(page))
        return False
    _take_usage(answer, page.get("usage"))
    has_text = False
    for choice in page.get("choices") or []:
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if answer.finish_reason in GIVEN_UP:
            answer.error = answer.error or f"the server ended the answer with {answer.finish_reason!r}"
        message = choice.get("delta") or choice.get("message") or {}
        shows_reasoning = any(message.get(key) for key in ("reasoning_content", "reasoning"))
        answer.shows_reasoning |= shows_reasoning
        has_text = has_text or shows_reasoning or any((choice.get("text"), message.get("content"), message.get("tool_calls")))
    return has_text


def _take_usage(answer: Answer, usage: dict[str, Any] | None) -> None:
    if not usage or usage.get("completion_tokens") is None:
        return
    answer.n_prompt = _number(usage.get("prompt_tokens")) or 0
    answer.n_generated = _number(usage["completion_tokens"]) or 0
    answer.n_cached = _number((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
    answer.n_reasoned = _number((usage.get("completion_tokens_details") or {}).get("reasoning_tokens")) or 0
    answer.counted_by = "usage"


def _number(told: Any) -> int | None:
    if told is not None and not isinstance(told, int):
        raise TypeError(f"{told!r} is no number of tokens")
    return told


def ttfts_s(answers: Iterable[Answer]) -> list[float]:
    """The times to the first text of those that have one."""
    return [answer.ttft_s for answer in answers if answer.ttft_s is not None]


@attrs.frozen(kw_only=True)
class Pass:
    """One run through a workload."""

    wall_s: float
    client_cpu_s: float
    answers: list[Answer]  # in the order of the requests' numbers

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the wall time of the whole pass; those of failed requests count, since they were computed and sent."""
        return sum(answer.n_generated for answer in self.answers) / self.wall_s

    @property
    def gaps_s(self) -> list[float]:
        """The times between two pieces of text of one answer."""
        return [gap for answer in self.answers for gap in answer.gaps_s]

    @property
    def ttfts_s(self) -> list[float]:
        """The times to the first text."""
        return ttfts_s(answer for answer in self.answers if not answer.is_failed)

    def cut(self, ttft_s: float) -> tuple[Pass, int]:
        """Of a pass that was cut, what is known: what had ended, and who had waited for a first text for longer than `ttft_s`, which no end
        could make good. And how many others were under way, of whom nothing can be said but their tokens.
        """
        sent = [answer for answer in self.answers if answer.ended_at or answer.error == OVER]
        known = [one for one in sent if one.ended_at or (one.chunks_at[0] if one.chunks_at else self.wall_s) - one.sent_at > ttft_s]
        return attrs.evolve(self, answers=known), len(sent) - len(known)

    def check(self, asks: list[Ask]) -> None:
        """Refuse a pass in which anybody got anything but what was asked for."""
        for ask, answer in zip(asks, self.answers, strict=True):
            got = (answer.status, answer.n_prompt, answer.n_generated)
            if answer.error or got != (200, len(ask.prompt), ask.n_generated):
                asked = f"asked for {len(ask.prompt)} + {ask.n_generated} tokens"
                raise RuntimeError(f"{asked}, got status, prompt, generated = {got} {answer.error}")
