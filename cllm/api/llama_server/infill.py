"""POST /infill: the text between a prefix and a suffix, by llama-server's names, for the editors that speak to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta
from quart import Blueprint, Response, g

from cllm.api import prompts, wire
from cllm.api.context import Context
from cllm.api.errors import openai_shape
from cllm.api.generation import check_room, open_generation
from cllm.api.llama_server.answers import AnswerStream, ended
from cllm.api.llama_server.fields import LinesMs, wanted_once
from cllm.api.openai.shapes import Account, json_response
from cllm.api.operations import JSON, SSE, Operation
from cllm.api.sampling_fields import LimitOrNone, SamplingFields
from cllm.api.sse import SseBody, sse_response
from cllm.backend import InfillTokens
from cllm.serve.engine import ServedModel
from cllm.text.prompt import infill_tokens

ENDPOINT = "/infill"
SNIPPET = "\n\n--- snippet ---\n\n"  # between pieces of other files, as llama-server writes it where the vocabulary has no token for it
ANSWER_SHARE = 4  # the answer has one part in so many of the context, if it is to be so long
SUFFIX_SHARE = 4  # what follows the gap has one part in so many of what is left, what comes before it the rest, as in llama-server
N_MARKS = 5  # the tokens around them
EXTRA_SHARE = 2  # other files take one part in so many of the context at most


class Extra(msgspec.Struct):
    """A piece of another file."""

    text: str
    filename: str | None = None


class InfillRequest(SamplingFields, kw_only=True):
    """The body. `prompt` is the beginning of what stands between; `n_predict` -1 is no limit, 0 only computes the prompt."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[Extra], Meta(max_length=1024)] | None = None
    prompt: str | None = None
    model: str | None = None
    n_predict: LimitOrNone | None = None
    t_max_predict_ms: LinesMs | None = None
    stream: bool | None = None


decoder = msgspec.json.Decoder(InfillRequest)
OPERATIONS = (
    Operation(
        method="POST",
        path=ENDPOINT,
        about="what stands between a prefix and a suffix",
        body=InfillRequest,
        gives=(JSON, SSE),
        generates=True,
    ),
)


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("infill", __name__)

    @routes.post(ENDPOINT)
    async def infill() -> Response:
        return await answer(context, await wire.read(decoder))

    return routes


async def answer(context: Context, body: InfillRequest) -> Response:
    """Fill in. Raises: RequestError."""
    model = await context.served(body.model)
    infill = prompts.check_infills(model, "input_suffix")
    asked = wanted_once(context, body, model, body.t_max_predict_ms)
    check_room(context, asked, "n")
    tokens = await _tokens(context, model, body, infill, asked.stopping.max_tokens)
    specs = asked.specs([tokens], n_logprobs=None, key=g.key, request_id=g.request_id)
    generation = await open_generation(context, specs, ENDPOINT)
    if body.stream:
        return sse_response(SseBody(generation, await generation.first_events(), AnswerStream(model.name), openai_shape))
    (completion,) = await generation.complete()
    account = Account([completion.finished])
    return json_response(ended(0, model.name, completion.text, completion.finished), account.headers())


async def _tokens(context: Context, model: ServedModel, body: InfillRequest, infill: InfillTokens, n_asked: int | None) -> Sequence[int]:
    """Editors count lines, not tokens: of what stands around the gap the nearest is read, as much as there is room for."""
    prompts.check_fits(model, body.prompt or "")
    begun = await prompts.plain_tokens(context, body.prompt or "", "prompt")
    n_answer = min(model.n_ctx if n_asked is None else max(n_asked, 1), model.n_ctx // ANSWER_SHARE)
    n_room = max(model.n_ctx - n_answer - len(begun) - N_MARKS, 0)
    n_bytes = n_room * prompts.N_TOKEN_BYTES_MAX
    before = await prompts.plain_tokens(context, body.input_prefix[-n_bytes:] if n_room else "", "input_prefix")
    after = await prompts.plain_tokens(context, body.input_suffix[:n_bytes], "input_suffix")
    n_after = min(len(after), max(n_room // SUFFIX_SHARE, n_room - len(before)))
    n_before = min(len(before), n_room - n_after)
    between = infill_tokens(model.vocabulary, infill, before[len(before) - n_before :], after[:n_after])
    extra = await _extra(context, model, body.input_extra or [], model.n_ctx - n_answer - len(between) - len(begun))
    n_bos = 1 if model.vocabulary.adds_bos else 0
    return [*between[:n_bos], *extra, *between[n_bos:], *begun]


async def _extra(context: Context, model: ServedModel, pieces: Sequence[Extra], n_room: int) -> Sequence[int]:
    """The end of the other files' pieces, as much as there is room for."""
    n_max = min(n_room // EXTRA_SHARE, model.n_ctx // EXTRA_SHARE)
    if not pieces or n_max <= 0:
        return []
    text = "".join([SNIPPET + piece.text for piece in pieces])[-n_max * prompts.N_TOKEN_BYTES_MAX :]
    return (await prompts.plain_tokens(context, text, "input_extra"))[-n_max:]
