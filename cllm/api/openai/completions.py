"""POST /v1/completions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import attrs
import msgspec
from msgspec import Meta
from quart import Blueprint, Response, g

from cllm.api import prompts, wire
from cllm.api.context import Context
from cllm.api.errors import openai_shape
from cllm.api.generation import Completion, Generation, check_room, open_generation
from cllm.api.openai.legacy_logprobs import LegacyLogprobs, joined, n_before, prompt_logprobs
from cllm.api.openai.shapes import Account, CommonFields, OpenAiStream, TokenNames, envelope, json_response, n_shown
from cllm.api.operations import JSON, SSE, Operation
from cllm.api.sse import SseBody, data, sse_response
from cllm.api.structured import compiled, form_of, told
from cllm.engine.events import Delta, Finished
from cllm.engine.sequence import SequenceSpec
from cllm.errors import InvalidRequest, NotHeeded
from cllm.serve.engine import ServedModel

ENDPOINT = "/v1/completions"
N_TOKENS_DEFAULT = 16  # OpenAI's

Likeliest: TypeAlias = Annotated[int, Meta(ge=0, le=20)]


class CompletionRequest(CommonFields, kw_only=True):
    """The body."""

    prompt: str | Annotated[list[int | str | list[int]], Meta(min_length=1)]
    logprobs: Likeliest | None = None
    prompt_logprobs: Likeliest | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None

    @property
    def n_each(self) -> int:
        """Completions of each prompt, of which the best `n` are answered."""
        return self.best_of or self.n or 1

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the logprobs are to begin with the prompt's."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def n_prompt_logprobs(self) -> int | None:
        """The likeliest tokens wanted in the place of each of the prompt's."""
        asked = [n for n in (self.prompt_logprobs, self.logprobs if self.echo else None) if n is not None]
        return max(asked, default=None)


@attrs.frozen
class Prompt:
    """One of a request's prompts."""

    tokens: Sequence[int]
    echo: str  # its text where it is to be echoed


N_CHARS_ECHOED_MAX = 1 << 24  # of prompts, once for each choice
N_PROMPT_LOGPROBS_MAX = 1 << 21  # the same of their logprobs, some 55 bytes each
N_CHARS_LOGPROB = 64  # that take as long to write as one

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
    _check(body)
    form = form_of(body)
    model = await context.served(body.model)
    if body.suffix:
        prompts.check_infills(model, "suffix")
    asked = context.wanted(body, model, max_tokens=N_TOKENS_DEFAULT)
    texts = await prompts.by_length(1 if isinstance(body.prompt, str) else len(body.prompt), lambda: _prompts(body.prompt, model))
    param = "prompt" if len(texts) > 1 else "n" if body.best_of is None else "best_of"
    check_room(context, asked, param, body.n_each * len(texts))
    for text in texts:
        prompts.check_fits(model, text)
    grammar = await compiled(context, model, form)
    given = await _given(context, model, body, texts)
    _check_size(body, given)
    asked = attrs.evolve(asked, n=body.n_each)
    specs = asked.specs(
        [one.tokens for one in given],
        n_logprobs=_n_logprobs(body),
        key=g.key,
        request_id=g.request_id,
        grammar=grammar,
        form=told(model, form),
    )
    generation = await _opened(context, _scored(specs, body), body)
    names = TokenNames(model.vocabulary, asked.stopping.stop_token_ids)
    head = envelope("cmpl", "text_completion", model.name)
    if body.stream:
        first = await generation.first_events()
        n_tokens = sum(len(one.tokens) for one in given) if body.echoes_logprobs else 0
        befores = await prompts.by_length(n_tokens, functools.partial(_befores, body, given, names))
        return sse_response(SseBody(generation, first, CompletionStream(head, names, body, given, befores), openai_shape))
    done = await generation.complete()
    account = Account([completion.finished for completion in done], asked.n)
    n_logprobs = sum(n_shown(completion.logprobs or ()) + asked.n * n_shown(completion.prompt_logprobs) for completion in done)

    def written() -> Response:
        choices = [msgspec.Raw(msgspec.json.encode(choice)) for choice in _choices(body, given, done, names)]
        return json_response(head(choices, usage=account.usage(), timings=account.timings()), account.headers())

    n_chars = sum(len(one.echo) for one in given) * (body.n or 1)
    return await prompts.by_length(n_logprobs + n_chars // N_CHARS_LOGPROB, written)


async def _opened(context: Context, specs: list[SequenceSpec], body: CompletionRequest) -> Generation:
    try:
        return await open_generation(context, specs, ENDPOINT)
    except NotHeeded as error:  # by the fields that this surface has
        if error.param == "logprobs" and body.logprobs is None:
            raise NotHeeded("best_of: this model's backend cannot do logprobs, by which the best are told", param="best_of") from error
        if error.param == "top_logprobs":
            raise NotHeeded("logprobs: this model's backend tells fewer likely tokens than that", param="logprobs") from error
        if error.param == "prompt_logprobs" and body.prompt_logprobs is None:
            raise NotHeeded("echo: this model's backend cannot do logprobs of a prompt", param="echo") from error
        raise


def _check(body: CompletionRequest) -> None:
    """Refuse what goes together with nothing. Raises: InvalidRequest."""
    n = body.n or 1
    if body.best_of is not None and body.best_of < n:
        raise InvalidRequest(f"best_of: {body.best_of} is less than n, which is {n}", param="best_of")
    if body.stream and body.n_each > n:
        raise InvalidRequest("best_of: a stream cannot show the best of several", param="best_of")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs: a stream has them with echo and logprobs only", param="prompt_logprobs")
    if body.suffix and body.n_prompt_logprobs is not None:
        raise InvalidRequest("suffix: a prompt with a suffix has no logprobs of its own", param="suffix")


def _check_size(body: CompletionRequest, given: Sequence[Prompt]) -> None:
    """Refuse what would tell so much of prompts, once for each choice, that all others would wait for that. Raises: InvalidRequest."""
    n = body.n or 1
    n_chars = sum(len(one.echo) for one in given) * n
    if n_chars > N_CHARS_ECHOED_MAX:
        param = "n" if n > 1 else "echo"
        raise InvalidRequest(f"{param}: {n_chars} characters of prompts would be told, and {N_CHARS_ECHOED_MAX} may be", param=param)
    n_each = [1 + n_told for n_told in (body.prompt_logprobs, body.logprobs if body.echoes_logprobs else None) if n_told is not None]
    n_told = sum(len(one.tokens) for one in given) * sum(n_each) * n
    if n_told > N_PROMPT_LOGPROBS_MAX:
        param = "n" if n > 1 else "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        raise InvalidRequest(f"{param}: {n_told} logprobs of prompts would be told, and {N_PROMPT_LOGPROBS_MAX} may be", param=param)


def _n_logprobs(body: CompletionRequest) -> int | None:
    """The likeliest tokens to tell with each drawn one; the best of several is told by logprobs, whether they are shown or not."""
    return 0 if body.logprobs is None and body.n_each > (body.n or 1) else body.logprobs


def _scored(specs: list[SequenceSpec], body: CompletionRequest) -> list[SequenceSpec]:
    """Let one completion of each prompt tell the prompt's logprobs; in a stream each, since none may wait for another's."""
    if body.n_prompt_logprobs is None:
        return specs
    every = 1 if body.stream else body.n_each
    return [attrs.evolve(s, n_prompt_logprobs=body.n_prompt_logprobs) if i % every == 0 else s for i, s in enumerate(specs)]


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


async def _given(context: Context, model: ServedModel, body: CompletionRequest, given: list[str | list[int]]) -> list[Prompt]:
    tokens = await _tokens(context, model, body, given)
    if not body.echo:
        return [Prompt(one, "") for one in tokens]
    echoes = [one if isinstance(one, str) else await prompts.detokenize(model, one) for one in given]
    return [Prompt(*both) for both in zip(tokens, echoes, strict=True)]


async def _tokens(context: Context, model: ServedModel, body: CompletionRequest, given: list[str | list[int]]) -> Sequence[Sequence[int]]:
    if body.suffix:
        return [await prompts.infill_prompt(context, model, one, body.suffix) for one in given]
    of_texts = iter(await prompts.text_prompts(context, [one for one in given if isinstance(one, str)]))
    return [next(of_texts) if isinstance(one, str) else await prompts.token_prompt(model, one) for one in given]


# --- answers -----------------------------------------------------------------------------------------------------------


def _choices(body: CompletionRequest, given: list[Prompt], done: list[Completion], names: TokenNames) -> list[dict[str, Any]]:
    """The choices to answer, each prompt's together, the best first where there are more than asked for."""
    choices: list[dict[str, Any]] = []
    for i, prompt in enumerate(given):
        completions = done[i * body.n_each : (i + 1) * body.n_each]
        scores = completions[0].prompt_logprobs  # which are the others' too
        echoed = LegacyLogprobs(names, body.logprobs).prompt(prompt.echo, prompt.tokens, scores) if body.echoes_logprobs else None
        of_prompt = None if body.prompt_logprobs is None else prompt_logprobs(names, scores, body.prompt_logprobs)
        for completion in _best(completions, body.n or 1):
            choices.append(_choice(len(choices), prompt.echo, completion))
            if body.logprobs is not None:
                choices[-1]["logprobs"] = _logprobs(prompt.echo, echoed, completion, LegacyLogprobs(names, body.logprobs))
            if of_prompt is not None:
                choices[-1]["prompt_logprobs"] = of_prompt
    return choices


def _best(completions: list[Completion], n: int) -> list[Completion]:
    """The `n` whose tokens the model thought likeliest on average, as OpenAI's."""
    return completions if len(completions) == n else sorted(completions, key=_mean_logprob, reverse=True)[:n]


def _mean_logprob(completion: Completion) -> float:
    logprobs = completion.logprobs or ()
    return sum(one.logprob for one in logprobs) / len(logprobs) if logprobs else 0.0


def _choice(index: int, echo: str, completion: Completion) -> dict[str, Any]:
    return {
        "index": index,
        "text": echo + completion.text,
        "logprobs": None,
        "finish_reason": completion.finished.reason.value,
        "stop_reason": completion.finished.stop_reason,
    }


def _logprobs(echo: str, echoed: dict[str, Any] | None, completion: Completion, legacy: LegacyLogprobs) -> dict[str, Any]:
    if echoed is None:
        return legacy(completion.logprobs or ())
    legacy.end_prompt(echo)
    return joined(echoed, legacy(completion.logprobs or (), with_end=True))


def _befores(body: CompletionRequest, given: list[Prompt], names: TokenNames) -> list[int]:
    """Of each prompt whose logprobs are echoed the characters before its text."""
    return [n_before(names, prompt.echo, prompt.tokens) if body.echoes_logprobs else 0 for prompt in given]


class CompletionStream(OpenAiStream):
    """See `cllm.api.sse.Shape`."""

    def __init__(self, head: Any, names: TokenNames, body: CompletionRequest, given: list[Prompt], befores: list[int]) -> None:
        """`befores` is of each prompt that is echoed with its logprobs how many characters its tokens have before its text."""
        n = body.n or 1
        super().__init__(head, n * len(given), n=n, include_usage=body.include_usage)
        self._prompts = [prompt for prompt in given for _ in range(n)]
        self._befores = [before for before in befores for _ in range(n)]
        self._logprobs = [LegacyLogprobs(names, body.logprobs) for _ in self._prompts]
        self._with_end = body.echoes_logprobs  # who reads the logprobs of prompt and answer in one counts tokens
        self._scoring = [body.echoes_logprobs for _ in self._prompts]  # whether a choice's prompt is still being told

    def first(self) -> bytes:
        """The prompts, where they are to be echoed."""
        return b"".join([self._echo(i, prompt) for i, prompt in enumerate(self._prompts)])

    def _echo(self, index: int, prompt: Prompt) -> bytes:
        if not self._scoring[index]:
            return self.text(index, prompt.echo)
        return data(self.chunk(index, prompt.echo, self._logprobs[index].begin(self._befores[index], prompt.tokens[0])))

    def delta(self, index: int, event: Delta) -> bytes:
        """New text, and the logprobs of new tokens where asked for, even of those that have no text yet."""
        if event.prompt_logprobs is not None:
            return data(self.chunk(index, "", self._logprobs[index].go_on(event.prompt_logprobs)))
        if event.logprobs is None:
            return self.text(index, event.text)
        if self._scoring[index]:
            self._scoring[index] = False
            self._logprobs[index].end_prompt(self._prompts[index].echo)
        logprobs = self._logprobs[index](event.logprobs, with_end=self._with_end)
        return data(self.chunk(index, event.text, logprobs)) if event.text or logprobs["tokens"] else b""

    def choice(self, index: int, text: str, logprobs: Any) -> dict[str, Any]:
        """One choice with new text."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def end(self, index: int, event: Finished) -> dict[str, Any]:
        """One choice that has ended."""
        return {"index": index, "text": "", "logprobs": None, "finish_reason": event.reason.value, "stop_reason": event.stop_reason}
