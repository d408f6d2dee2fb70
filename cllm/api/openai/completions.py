"""POST /v1/completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Annotated, Any

import attrs
import msgspec
from msgspec import Meta
from quart import Blueprint, Response, g

from cllm.api import prompts, wire
from cllm.api.context import Context
from cllm.api.errors import openai_shape
from cllm.api.generation import Completion, check_room, open_generation
from cllm.api.openai.shapes import Account, CommonFields, OpenAiStream, TokenNames, envelope, finite, json_response
from cllm.api.operations import JSON, SSE, Operation
from cllm.api.sampling_fields import wanted
from cllm.api.sse import SseBody, data, sse_response
from cllm.engine.events import Delta, Finished, TokenLogprob
from cllm.errors import InvalidRequest, NotSupported
from cllm.serve.engine import ServedModel

ENDPOINT = "/v1/completions"
N_TOKENS_DEFAULT = 16  # OpenAI's


class CompletionRequest(CommonFields, kw_only=True):
    """The body."""

    prompt: str | Annotated[list[int | str | list[int]], Meta(min_length=1)]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None


decoder = msgspec.json.Decoder(CompletionRequest)

_COMPLETE = Operation(method="POST", path=ENDPOINT, about="continue a text", body=CompletionRequest, gives=(JSON, SSE), generates=True)
OPERATIONS = (_COMPLETE, attrs.evolve(_COMPLETE, path="/completions", alias_of=ENDPOINT))


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("completions", __name__)

    @routes.post(ENDPOINT)
    @routes.post("/completions")
    async def completions() -> Response:
        return await answer(context, await wire.read(decoder))

    return routes


async def answer(context: Context, body: CompletionRequest) -> Response:
    """Complete one or several prompts. Raises: RequestError."""
    model = context.served(body.model)
    _refuse_unserved(body)
    asked = wanted(body, model, context.sampling_defaults, max_tokens=N_TOKENS_DEFAULT, timeout_s=context.settings.timeout_s)
    given = _prompts(body.prompt, model)
    check_room(context, asked.n * len(given), "prompt" if len(given) > 1 else "n")
    for prompt in given:
        prompts.check_fits(model, prompt)
    tokens = [await _tokens(context, model, prompt) for prompt in given]
    echoes = [_echo(model, prompt) if body.echo else "" for prompt in given for _ in range(asked.n)]
    specs = asked.specs(tokens, n_logprobs=body.logprobs, key=g.key, request_id=g.request_id)
    generation = open_generation(context, specs, ENDPOINT)
    names = TokenNames(model.vocabulary, asked.stopping.stop_token_ids)
    head = envelope("cmpl", "text_completion", model.name)
    if body.stream:
        first = await generation.first_events()
        shape = CompletionStream(head, names, echoes, n=asked.n, include_usage=body.include_usage)
        return sse_response(SseBody(generation, first, shape, openai_shape))
    done = await generation.complete()
    account = Account([completion.finished for completion in done], asked.n)
    choices = [_choice(i, echoes[i], completion, names) for i, completion in enumerate(done)]
    return json_response(head(choices, usage=account.usage(), timings=account.timings()), account.headers())


def _refuse_unserved(body: CompletionRequest) -> None:
    n = body.n or 1
    if body.best_of is not None and body.best_of < n:
        raise InvalidRequest(f"best_of: {body.best_of} is less than n, which is {n}", param="best_of")
    if body.best_of is not None and body.best_of > n:
        if body.stream:
            raise InvalidRequest("best_of: a stream cannot show the best of several", param="best_of")
        raise NotSupported("best_of more than n is not supported", param="best_of")
    if body.suffix:
        raise InvalidRequest("suffix: this model's vocabulary has no fill-in-the-middle tokens", param="suffix")
    if body.echo and body.logprobs is not None:
        raise NotSupported("echo with logprobs is not supported", param="echo")
    body.refuse_unserved()


# --- prompts -----------------------------------------------------------------------------------------------------------


def _prompts(given: str | list[int | str | list[int]], model: ServedModel) -> list[str | list[int]]:
    """One prompt or several; a list of numbers is one. Raises: InvalidRequest · ContextExceeded."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        prompts.check_fits(model, given)  # before every one of them is looked at
    if all(isinstance(item, int) for item in given):
        return [given]  # type: ignore[list-item]  # just checked
    if any(isinstance(item, int) for item in given):
        raise InvalidRequest("prompt: token ids and prompts stand side by side", param="prompt")
    return given  # type: ignore[return-value]  # just checked


async def _tokens(context: Context, model: ServedModel, prompt: str | list[int]) -> Sequence[int]:
    if isinstance(prompt, str):
        return await prompts.text_prompt(context, prompt)
    return await prompts.token_prompt(model, prompt)


def _echo(model: ServedModel, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else prompts.text_of(model.vocabulary, prompt)


# --- answers -----------------------------------------------------------------------------------------------------------


class LegacyLogprobs:
    """The arrays of the old completions API, over one completion's text from its beginning to where it has got."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_chars = 0

    def __call__(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The arrays of the next tokens. An offset counts the characters before a token, unfinished ones left out."""
        arrays: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for one in self._names.shown(logprobs):
            raw = self._names.raw(one.token)
            arrays["tokens"].append(_text(raw))
            arrays["token_logprobs"].append(finite(one.logprob))
            arrays["top_logprobs"].append(self._top(one))
            arrays["text_offset"].append(self._n_chars)
            self._n_chars += len(self._decoder.decode(raw))
        return arrays

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in (*one.top, (one.token, one.logprob)):  # the drawn one too, as OpenAI's
            top.setdefault(_text(self._names.raw(token)), finite(logprob))
        return top


def _text(raw: bytes) -> str:
    """A token's text; where it is a part of a character, OpenAI's way of writing bytes, so that different ones stay apart."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join([f"\\x{byte:02x}" for byte in raw])


def _choice(index: int, echo: str, completion: Completion, names: TokenNames) -> dict[str, Any]:
    return {
        "index": index,
        "text": echo + completion.text,
        "logprobs": None if completion.logprobs is None else LegacyLogprobs(names)(completion.logprobs),
        "finish_reason": completion.finished.reason.value,
        "stop_reason": completion.finished.stop_reason,
    }


class CompletionStream(OpenAiStream):
    """See `cllm.api.sse.Shape`."""

    def __init__(self, head: Any, names: TokenNames, echoes: list[str], *, n: int, include_usage: bool) -> None:
        super().__init__(head, len(echoes), n=n, include_usage=include_usage)
        self._echoes = echoes
        self._logprobs = [LegacyLogprobs(names) for _ in echoes]

    def first(self) -> bytes:
        """The prompts, where they are to be echoed."""
        return b"".join([self.text(i, echo) for i, echo in enumerate(self._echoes)])

    def delta(self, index: int, event: Delta) -> bytes:
        """New text, and the logprobs of new tokens where asked for, even of those that have no text yet."""
        if event.logprobs is None:
            return self.text(index, event.text)
        logprobs = self._logprobs[index](event.logprobs)
        return data(self.chunk(index, event.text, logprobs)) if event.text or logprobs["tokens"] else b""

    def choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        """One choice with new text."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def end(self, index: int, event: Finished) -> dict[str, Any]:
        """One choice that has ended."""
        return {"index": index, "text": "", "logprobs": None, "finish_reason": event.reason.value, "stop_reason": event.stop_reason}
