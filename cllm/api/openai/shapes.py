"""What chat and text completions have in common on the wire: ids, usage, timings, logprobs, and the chunks of streams."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import msgspec
from quart import Response

import cllm
from cllm.api import sse
from cllm.api.sampling_fields import LimitOrNone, LimitOrPrompt
from cllm.api.structured import FormFields
from cllm.backend import Vocabulary
from cllm.engine.events import Finished, TokenLogprob

LOGPROB_MIN = -9999.0  # JSON has no infinity; OpenAI's own stand-in for it
SYSTEM_FINGERPRINT = f"cllm-{cllm.__version__}"


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class CommonFields(FormFields, kw_only=True):
    """What both surfaces take beside sampling."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: LimitOrPrompt | None = None
    max_completion_tokens: LimitOrPrompt | None = None
    n_predict: LimitOrNone | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


@attrs.frozen(kw_only=True)
class Envelope:
    """The members that every object of one answer shares."""

    id: str
    object: str
    created: int
    model: str

    def __call__(self, choices: Sequence[dict[str, Any] | msgspec.Raw], **members: Any) -> dict[str, Any]:
        """The object with its choices."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
            "choices": choices,
            **members,
        }


def envelope(prefix: str, kind: str, model: str) -> Envelope:
    """A new answer's."""
    return Envelope(id=f"{prefix}-{uuid.uuid4().hex}", object=kind, created=int(time.time()), model=model)


# --- usage -------------------------------------------------------------------------------------------------------------


@attrs.frozen
class Account:
    """What a request used, from its completions' ends in the order of the request, `n` for each prompt."""

    ends: Sequence[Finished]
    n: int = 1

    @property
    def n_cached(self) -> int:
        """Prompt tokens that were not computed; each prompt counts once, by that of its completions which computed it for the others."""
        cached = [end.usage.n_cached for end in self.ends]
        return sum(min(cached[i : i + self.n]) for i in range(0, len(cached), self.n))

    @property
    def queue_ms(self) -> float:
        """The longest wait."""
        return _ms(end.usage.queue_s for end in self.ends)

    def usage(self) -> dict[str, Any]:
        """OpenAI's counts; each prompt counts once."""
        n_prompt = sum(end.usage.n_prompt for end in self.ends[:: self.n])
        n_generated = sum(end.usage.n_generated for end in self.ends)
        return {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_generated,
            "total_tokens": n_prompt + n_generated,
            "prompt_tokens_details": {"cached_tokens": self.n_cached},
            "completion_tokens_details": {"reasoning_tokens": sum(end.usage.n_reasoning for end in self.ends)},
        }

    def timings(self) -> dict[str, Any]:
        """llama-server's; tokens are summed over the completions, times are the longest, since they run side by side."""
        usages = [end.usage for end in self.ends]
        n_prompt = sum(usage.n_prompt - usage.n_cached for usage in usages)
        n_predicted = sum(usage.n_generated for usage in usages)
        prompt_ms, predicted_ms = _ms(usage.prefill_s for usage in usages), _ms(usage.decode_s for usage in usages)
        return {
            "prompt_n": n_prompt,
            "prompt_ms": prompt_ms,
            "prompt_per_second": _rate(n_prompt, prompt_ms),
            "cache_n": sum(usage.n_cached for usage in usages),
            "predicted_n": n_predicted,
            "predicted_ms": predicted_ms,
            "predicted_per_second": _rate(n_predicted, predicted_ms),
            "queue_ms": self.queue_ms,
        }

    def headers(self) -> dict[str, str]:
        """Those of an answer that is no stream."""
        return {"x-cllm-cached-tokens": str(self.n_cached), "x-cllm-queue-ms": f"{self.queue_ms:.3f}"}


def _ms(seconds: Iterable[float]) -> float:
    return round(max(seconds) * 1000.0, 3)


def _rate(n: int, ms: float) -> float:
    return round(n * 1000.0 / ms, 3) if ms > 0 else 0.0


# --- logprobs ----------------------------------------------------------------------------------------------------------


class TokenNames:
    """How a model's tokens are shown beside their logprobs."""

    def __init__(self, vocabulary: Vocabulary, stop_token_ids: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._final = vocabulary.end_tokens | stop_token_ids

    def raw(self, token: int) -> bytes:
        """The token's bytes; a special token's name."""
        return self._vocabulary.token_bytes(token, special=True)

    def said(self, token: int) -> bytes:
        """What the token adds to a text that is generated, where a special token is not seen."""
        return self._vocabulary.token_bytes(token)

    def shown(self, logprobs: Iterable[TokenLogprob]) -> list[TokenLogprob]:
        """Those of tokens that are part of the text: the one that ends a completion is none, and is left out."""
        return [one for one in logprobs if one.token not in self._final]


def finite(logprob: float) -> float:
    """`logprob` as JSON can carry it."""
    return max(logprob, LOGPROB_MIN)


def n_shown(logprobs: Iterable[TokenLogprob]) -> int:
    """How many tokens `token_logprobs` writes."""
    return sum(1 + len(one.top) for one in logprobs)


def token_logprobs(logprobs: Iterable[TokenLogprob], names: TokenNames, *, with_ids: bool = False) -> list[dict[str, Any]]:
    """The tokens of the text, each with the likeliest ones at its place; with their ids, as llama-server has them."""
    token = functools.partial(_token, names, with_ids)
    return [
        {**token(one.token, one.logprob), "top_logprobs": [token(likely, logprob) for likely, logprob in one.top]}
        for one in names.shown(logprobs)
    ]


def _token(names: TokenNames, with_id: bool, token: int, logprob: float) -> dict[str, Any]:
    raw = names.raw(token)
    shown = {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}
    return {"id": token, **shown} if with_id else shown


# --- answers -----------------------------------------------------------------------------------------------------------


def json_response(value: Any, headers: dict[str, str] | None = None, status: int = 200) -> Response:
    """`value` as a response."""
    return Response(msgspec.json.encode(value), status, headers, content_type="application/json")


class OpenAiStream:
    """The part of a stream's shape that chat and text completions share; see `cllm.api.sse.Shape`."""

    def __init__(self, envelope: Envelope, n_completions: int, *, n: int, include_usage: bool) -> None:
        self.envelope = envelope
        self._n = n
        self._include_usage = include_usage
        self._extra: dict[str, Any] = {"usage": None} if include_usage else {}
        self._frames = [sse.TextFrame(self.chunk(i, sse.TextFrame.MARK)) for i in range(n_completions)]
        self._ends: dict[int, Finished] = {}

    def choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        """One choice with new text; the surface's own."""
        raise NotImplementedError

    def end(self, index: int, event: Finished) -> dict[str, Any]:
        """One choice that has ended; the surface's own."""
        raise NotImplementedError

    def chunk(self, index: int, text: str, logprobs: Any = None) -> dict[str, Any]:
        """A chunk with new text."""
        return self.envelope([self.choice(index, text, logprobs)], **self._extra)

    def text(self, index: int, text: str) -> bytes:
        """A chunk's event with new text, if there is any."""
        return self._frames[index](text) if text else b""

    def finished(self, index: int, event: Finished) -> bytes:
        """The rest of the text, then the end."""
        return self.text(index, event.text) + self.ended(index, event)

    def ended(self, index: int, event: Finished) -> bytes:
        """The end. Timings stand beside usage, or with each end where no usage is wanted."""
        self._ends[index] = event
        extra = self._extra or {"timings": Account([event]).timings()}
        return sse.data(self.envelope([self.end(index, event)], **extra))

    def last(self) -> bytes:
        """The usage, where wanted, and the mark of the end."""
        if not self._include_usage:
            return sse.DONE
        account = Account([self._ends[i] for i in sorted(self._ends)], self._n)
        return sse.data(self.envelope([], usage=account.usage(), timings=account.timings())) + sse.DONE
