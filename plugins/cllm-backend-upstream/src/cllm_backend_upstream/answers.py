"""From an upstream's chunks to what the model tells: text, reasoning, calls, and in the end what was used."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Final

import attrs
import msgspec
from msgspec import Meta

from cllm.backend import StreamCall, StreamEnd, StreamLogprob, StreamText, StreamUsage
from cllm.errors import NotHeeded, RequestError
from cllm_backend_upstream.failures import Broken, Failure, Garbled
from cllm_backend_upstream.logprobs import Logprobs
from cllm_backend_upstream.statuses import complaint, what_it_means

DONE = b"[DONE]"
_CUT = ("length", "max_tokens", "model_length", "content_filter")
_FAILED = ("error", "abort")
_STATUS: Final = re.compile("[45][0-9]{2}")
_STATUSES: Final = {  # of the errors that TGI names only; it has no status for the others, which are its own
    "validation": 422,
    "template_error": 422,
    "missing_template_variable": 422,
    "tool_error": 422,
    "overloaded": 429,
}
Count = Annotated[int, Meta(ge=0, le=1 << 40)]


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: Annotated[int, Meta(ge=0, le=1 << 16)] | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # what vLLM and Ollama call it
    refusal: str | None = None
    tool_calls: list[_Call] | _Call | None = None  # one by itself is what TGI tells before its 3.1

    @property
    def calls(self) -> Sequence[_Call]:
        return (self.tool_calls,) if isinstance(self.tool_calls, _Call) else self.tool_calls or ()


class _Choice(msgspec.Struct):
    logprobs: Logprobs | None = None
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: Any = None


class _Cached(msgspec.Struct):
    cached_tokens: Count | None = None


class _Reasoned(msgspec.Struct):
    reasoning_tokens: Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count | None = None  # MiniMax sends an empty usage until the end
    completion_tokens: Count | None = None
    prompt_tokens_details: _Cached | None = None
    completion_tokens_details: _Reasoned | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    error_type: str | None = None  # beside it, from TGI


_decoder = msgspec.json.Decoder(_Chunk)


@attrs.define(eq=False)
class Answer:
    """One answer as it comes."""

    seq_id: int
    stops: tuple[str, ...] = ()
    n_logprobs: int | None = None  # as asked for
    has_begun: bool = False  # something was told
    is_done: bool = False  # nothing more is wanted
    _finish: str | None = None
    _stop_reason: str | None = None
    _usage: StreamUsage | None = None
    _calls: dict[int, tuple[int, str]] = attrs.field(factory=dict)  # by the upstream's index: ours, and the id
    _n_calls: int = 0

    def take(self, data: bytes) -> StreamText | None:
        """Take the data of an event; return what is to be told of it. Raises: Garbled · Broken · NotHeeded."""
        if data == DONE:
            self.is_done = True
            return None
        try:
            chunk = _decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Garbled("a chunk that is none") from error
        if chunk.error is not None:
            raise self._failure(chunk, data)
        if chunk.choices is None and chunk.usage is None:
            raise Garbled("a chunk that is none")
        if chunk.usage is not None:
            self._usage = _used(chunk.usage) or self._usage
        return self._choice(chunk.choices[0]) if chunk.choices else None

    def _failure(self, chunk: _Chunk, data: bytes) -> Failure | RequestError:
        """What an error in the stream means. Before anything was told it may stand for a status: the stream had begun with a comment."""
        status = None if self.has_begun else _status(chunk)
        if status is not None:
            return what_it_means(status, None, data)
        return Broken(f"it told an error in the stream: {complaint(data).message or 'without a word'}")

    def end(self) -> StreamEnd:
        """Return the end, which must have been told. Raises: Broken where it was not."""
        if self._finish is None:
            raise Broken("the stream was cut")
        if self._finish in _FAILED:
            raise Broken(f"it gave up: {self._finish}")
        return StreamEnd(self.seq_id, is_cut=self._finish in _CUT, stop_reason=self._stop_reason, usage=self._usage)

    @property
    def is_finished(self) -> bool:
        """Whether its end was told; a usage may follow."""
        return self._finish is not None

    def _choice(self, choice: _Choice) -> StreamText | None:
        if choice.finish_reason:  # an empty one is no end: so do SGLang, MiniMax and old Ollamas fill it in until there is one
            self._finish = choice.finish_reason
            self._stop_reason = choice.stop_reason if choice.stop_reason in self.stops else None
        delta = choice.delta or _Delta(content=choice.text)
        calls = tuple(piece for call in delta.calls for piece in self._call(call))
        text = StreamText(
            self.seq_id,
            content=(delta.content or "") + (delta.refusal or ""),
            reasoning=delta.reasoning_content or delta.reasoning or "",
            calls=calls,
        )
        return self._told(text, self._logprobs(choice.logprobs))

    def _logprobs(self, told: Logprobs | None) -> tuple[StreamLogprob, ...]:
        if told is None or self.n_logprobs is None:
            return ()
        return tuple(attrs.evolve(one, top=one.top[: self.n_logprobs]) for one in told.told())

    def _told(self, text: StreamText, logprobs: tuple[StreamLogprob, ...]) -> StreamText | None:
        if logprobs:
            text = attrs.evolve(text, logprobs=logprobs, n_tokens=len(logprobs))
        elif not (text.content or text.reasoning or text.calls):
            return None
        elif self.n_logprobs is not None and not self.has_begun and not text.calls:
            raise NotHeeded("the server behind this one tells no logprobs", param="logprobs")
        self.has_begun = True
        return text

    def _call(self, call: _Call) -> list[StreamCall]:
        function, index, call_id = call.function or _Function(), call.index or 0, call.id or ""
        known = self._calls.get(index)
        begins = bool(function.name) and (known is None or (call_id not in ("", known[1])))
        if begins:
            known = self._calls[index] = (self._n_calls, call_id)
            self._n_calls += 1
        if known is None:
            raise Garbled("a piece of a call that never began")
        name = (function.name or "") if begins else ""
        return [StreamCall(known[0], name, function.arguments or "")] if begins or function.arguments else []


def _status(chunk: _Chunk) -> int | None:
    """The status that an error in a stream would have had, as far as it says so: by OpenAI's name, by TGI's, or by what TGI calls it."""
    told = (chunk.error.get("code"), chunk.error.get("http_status_code")) if isinstance(chunk.error, dict) else ()
    statuses = (int(one) for one in told if isinstance(one, int | str) and _STATUS.fullmatch(str(one)))
    return next(statuses, _STATUSES.get(chunk.error_type or ""))


def _used(usage: _Usage) -> StreamUsage | None:
    """What it says; where it says but a part, the server's own count is as good."""
    if usage.prompt_tokens is None or usage.completion_tokens is None:
        return None
    cached, reasoned = usage.prompt_tokens_details or _Cached(), usage.completion_tokens_details or _Reasoned()
    return StreamUsage(
        n_prompt=usage.prompt_tokens,
        n_generated=usage.completion_tokens,
        n_cached=min(cached.cached_tokens or 0, usage.prompt_tokens),
        n_reasoning=reasoned.reasoning_tokens or 0,
    )
