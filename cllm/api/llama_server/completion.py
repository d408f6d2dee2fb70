"""POST /completion: continue a text, by llama-server's names."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta
from quart import Blueprint, Response, g

from cllm.api import prompts, wire
from cllm.api.context import Context, current_key
from cllm.api.errors import openai_shape
from cllm.api.generation import Completion, Generation, check_room, open_generation
from cllm.api.llama_server.answers import AnswerStream, ended, probabilities
from cllm.api.llama_server.fields import LinesMs, wanted_once
from cllm.api.openai.shapes import Account, TokenNames, json_response, n_shown
from cllm.api.operations import JSON, SSE, Operation
from cllm.api.sampling_fields import LimitOrNone
from cllm.api.sse import SseBody, sse_response
from cllm.api.structured import FormFields, compiled, form_of, told
from cllm.backend import Vocabulary
from cllm.engine.sequence import SequenceSpec
from cllm.errors import InvalidRequest, NotHeeded, TokenizeFailed
from cllm.serve.engine import ServedModel
from cllm.text.prompt import leading

ENDPOINT = "/completion"

Pieces: TypeAlias = list[int | str]  # a prompt of texts and token ids, one behind the other


class TextRequest(FormFields, kw_only=True):
    """The body. `prompt` is a text, token ids, both one behind the other, or a list of such; texts alone in a list are prompts each."""

    prompt: str | Annotated[list[int | str | Pieces], Meta(min_length=1)]
    model: str | None = None
    n_predict: LimitOrNone | None = None
    t_max_predict_ms: LinesMs | None = None
    n_probs: Annotated[int, Meta(ge=0, le=20)] | None = None
    post_sampling_probs: bool | None = None
    stream: bool | None = None


decoder = msgspec.json.Decoder(TextRequest)
OPERATIONS = (
    Operation(
        method="POST", path=ENDPOINT, about="continue a text, by llama-server's names", body=TextRequest, gives=(JSON, SSE), generates=True
    ),
)


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("completion", __name__)

    @routes.post(ENDPOINT)
    async def completion() -> Response:
        return await answer(context, await wire.read(decoder))

    return routes


async def answer(context: Context, body: TextRequest) -> Response:
    """Complete one or several prompts. Raises: RequestError."""
    if body.n_probs and body.post_sampling_probs:
        raise NotHeeded("post_sampling_probs: logprobs are told as they are before sampling", param="post_sampling_probs")
    form = form_of(body)
    model = await context.served(body.model)
    asked = wanted_once(context, body, model, body.t_max_predict_ms)
    given = await prompts.of_many(1 if isinstance(body.prompt, str) else len(body.prompt), lambda: _prompts(body.prompt, model))
    check_room(context, asked, "prompt", len(given))
    for one in given:
        prompts.check_fits(model, one)
    grammar = await compiled(context, model, form)
    specs = asked.specs(
        await _tokens(context, model, given),
        n_logprobs=body.n_probs or None,
        key=g.key,
        request_id=g.request_id,
        grammar=grammar,
        form=told(model, form),
    )
    generation = await _opened(context, specs)
    names = TokenNames(model.vocabulary, asked.stopping.stop_token_ids)
    if body.stream:
        shape = AnswerStream(model.name, len(given), names)
        return sse_response(SseBody(generation, await generation.first_events(), shape, openai_shape))
    done = await generation.complete()
    n_logprobs = sum(n_shown(one.logprobs or ()) for one in done)
    answers = await prompts.by_length(n_logprobs, functools.partial(_answers, model.name, done, names if body.n_probs else None))
    account = Account([one.finished for one in done])
    return json_response(answers[0] if len(answers) == 1 else answers, account.headers())


async def _opened(context: Context, specs: list[SequenceSpec]) -> Generation:
    try:
        return await open_generation(context, specs, ENDPOINT)
    except NotHeeded as error:  # by the name that this surface has for it
        name = {"logprobs": "n_probs", "top_logprobs": "n_probs", "max_tokens": "n_predict"}.get(error.param or "")
        if name is None:
            raise
        raise NotHeeded(f"this model's backend cannot do {name}", param=name) from error


def _answers(model: str, done: list[Completion], names: TokenNames | None) -> list[msgspec.Raw]:
    """As JSON, each by itself: while one is written nothing else runs."""
    answers = [ended(i, model, one.text, one.finished) for i, one in enumerate(done)]
    if names is not None:
        answers = [shape | probabilities(one.logprobs or [], names) for shape, one in zip(answers, done, strict=True)]
    return [msgspec.Raw(msgspec.json.encode(answer)) for answer in answers]


# --- prompts -----------------------------------------------------------------------------------------------------------


def _prompts(given: str | list[int | str | Pieces], model: ServedModel) -> Sequence[str | Pieces]:
    """One prompt or several. Raises: InvalidRequest · ContextExceeded."""
    if isinstance(given, str):
        return [given]
    if not any(isinstance(item, int) for item in given):
        return given  # type: ignore[return-value]  # just checked
    prompts.check_fits(model, given)  # before every one of them is looked at
    if any(isinstance(item, list) for item in given):
        raise InvalidRequest("prompt: token ids and prompts stand side by side", param="prompt")
    return [given]  # type: ignore[list-item]  # just checked


async def _tokens(context: Context, model: ServedModel, given: Sequence[str | Pieces]) -> Sequence[Sequence[int]]:
    of_texts = iter(await prompts.text_prompts(context, [one for one in given if isinstance(one, str)]))
    return [next(of_texts) if isinstance(one, str) else await _tokens_of_pieces(context, model, one) for one in given]


async def _tokens_of_pieces(context: Context, model: ServedModel, given: Pieces) -> Sequence[int]:
    texts = await prompts.by_length(len(given), functools.partial(_texts, given))
    if not texts:
        return await prompts.token_prompt(model, given)  # type: ignore[arg-type]  # just looked at
    text = "".join(texts)
    prompts.check_fits(model, text)
    if model.reads_text:
        if len(texts) < len(given):
            raise NotHeeded("prompt: this model's tokens are not known here, so that none can stand beside a text", param="prompt")
        return await prompts.text_prompt(context, text)
    try:  # at once, so that many short ones take one turn in a thread
        mixed = functools.partial(_mixed, model.vocabulary, given)
        tokens = await context.engine.tokenized(mixed, len(text) + len(given), current_key())
    except TokenizeFailed as error:
        raise InvalidRequest(f"prompt: {error}", param="prompt") from error
    return await prompts.token_prompt(model, tokens)


def _texts(pieces: Pieces) -> list[str]:
    return [piece for piece in pieces if isinstance(piece, str)]


def _mixed(vocabulary: Vocabulary, pieces: Pieces) -> list[int]:
    """The token ids of all pieces; what models want before a prompt stands before a text that is the first of them."""
    tokens = leading(vocabulary) if isinstance(pieces[0], str) else []
    for piece in pieces:
        tokens += [piece] if isinstance(piece, int) else vocabulary.tokenize(piece, add_special=False, parse_special=True)
    return tokens
