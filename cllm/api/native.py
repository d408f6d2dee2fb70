"""The first cLLM's own API, so that its clients keep working, and GET /."""

from __future__ import annotations

import time
import uuid
from typing import Any

import attrs
import msgspec
from quart import Blueprint, Response, g, request
from werkzeug.datastructures import MIMEAccept
from werkzeug.http import parse_accept_header

from cllm.api import benchmark, pages, prompts, wire
from cllm.api.context import Context
from cllm.api.errors import native_shape
from cllm.api.generation import Completion, check_room, open_generation
from cllm.api.openai.shapes import Account, json_response
from cllm.api.operations import HTML, JSON, SSE, Operation
from cllm.api.sampling_fields import SamplingFields, Wanted
from cllm.api.sse import SseBody, TextFrame, data, sse_response
from cllm.api.tokens import TokenIds
from cllm.engine.events import Delta, Finished
from cllm.engine.sampling.params import SamplingParams
from cllm.errors import InvalidRequest
from cllm.serve.engine import ServedModel

DEFAULTS = SamplingParams(temperature=0.7, top_p=0.9, top_k=0, repeat_penalty=1.1)  # whatever --sampling-defaults says
N_TOKENS_DEFAULT = 100
N_CHARS_ACCEPT = 1024  # browsers send a tenth of that


class GenerateRequest(SamplingFields, kw_only=True):
    """The body."""

    prompt: str
    stream: bool | None = None


class EncodeRequest(msgspec.Struct):
    """The body."""

    text: str


class DecodeRequest(msgspec.Struct):
    """The body."""

    tokens: TokenIds


generate_decoder = msgspec.json.Decoder(GenerateRequest)
encode_decoder = msgspec.json.Decoder(EncodeRequest)
decode_decoder = msgspec.json.Decoder(DecodeRequest)


def _operation(method: str, path: str, about: str, **facts: Any) -> Operation:
    return Operation(method=method, path=path, about=about, errors=native_shape, **facts)


OPERATIONS = (
    _operation("POST", "/generate", "continue a text, in the first cLLM's way", body=GenerateRequest, gives=(JSON, SSE), generates=True),
    _operation("POST", "/generate_stream", "the same as a stream", body=GenerateRequest, gives=(SSE,), generates=True),
    _operation("POST", "/encode", "text to token ids", body=EncodeRequest, generates=True),
    _operation("POST", "/decode", "token ids to text", body=DecodeRequest, generates=True),
    _operation("GET", "/model/info", "facts about the model, or ?model=", also=(404, 503)),
    _operation(
        "POST",
        "/benchmark",
        "measure the server, where the operator allows it",
        body=benchmark.BenchmarkRequest,
        generates=True,
        also=(403,),
    ),
    _operation("GET", "/", "this list", gives=(JSON, HTML), public=True),
)


def blueprint(context: Context) -> Blueprint:
    """The routes."""
    routes = Blueprint("native", __name__)

    @routes.post("/generate")
    async def generate() -> Response:
        body = await wire.read(generate_decoder)
        return await answer(context, body, stream=bool(body.stream), endpoint="/generate")

    @routes.post("/generate_stream")
    async def generate_stream() -> Response:
        return await answer(context, await wire.read(generate_decoder), stream=True, endpoint="/generate_stream")

    @routes.post("/encode")
    async def encode() -> Response:
        body = await wire.read(encode_decoder)
        await context.served()
        tokens = await prompts.plain_tokens(context, body.text, "text", parse_special=True)
        return _success({"tokens": tokens, "length": len(tokens)})

    @routes.post("/decode")
    async def decode() -> Response:
        tokens = (await wire.read(decode_decoder)).tokens
        return _success({"text": await prompts.detokenize(await context.served(), tokens)})

    @routes.get("/model/info")
    async def model_info() -> Response:
        return _success(await context.told(request.args.get("model"), "model info", _model_info))

    @routes.post("/benchmark")
    async def run_benchmark() -> Response:
        return _success(await benchmark.run(context))

    @routes.get("/")
    async def index() -> Response:
        if _wants_page(request.headers.get("Accept", "")):
            return pages.index_page(context.operations)
        return json_response(pages.index(context.operations))

    return routes


async def answer(context: Context, body: GenerateRequest, *, stream: bool, endpoint: str) -> Response:
    """Complete a prompt. Raises: RequestError."""
    model = await context.served()
    asked = context.wanted(body, model, defaults=DEFAULTS, max_tokens=N_TOKENS_DEFAULT)
    if asked.n != 1:
        raise InvalidRequest("n: this endpoint gives one answer; /v1/completions gives several", param="n")
    check_room(context, asked, "n")
    prompts.check_fits(model, body.prompt)
    tokens = await prompts.text_prompt(context, body.prompt)
    specs = asked.specs([tokens], n_logprobs=None, key=g.key, request_id=g.request_id)
    generation = await open_generation(context, specs, endpoint)
    answer_id = uuid.uuid4().hex
    if stream:
        return sse_response(SseBody(generation, await generation.first_events(), NativeStream(answer_id), native_shape))
    (completion,) = await generation.complete()
    account = Account([completion.finished])
    shape = _answer(answer_id, completion, asked, time.perf_counter() - g.started_at)
    return json_response({"success": True, "data": shape}, account.headers())


def _answer(answer_id: str, completion: Completion, asked: Wanted, response_s: float) -> dict[str, Any]:
    usage = completion.finished.usage
    return {
        "id": answer_id,
        "text": completion.text,
        "response_time": round(response_s, 6),
        "tokens_per_second": round(usage.n_generated / response_s, 3) if response_s > 0 else 0.0,
        "generated_tokens": usage.n_generated,
        "max_tokens": asked.stopping.max_tokens,
        "finish_reason": completion.finished.reason.value,
        "prompt_tokens": usage.n_prompt,
    }


class NativeStream:
    """See `cllm.api.sse.Shape`."""

    def __init__(self, answer_id: str) -> None:
        self._id = answer_id
        self._frame = TextFrame({"id": answer_id, "token": TextFrame.MARK, "done": False})

    def first(self) -> bytes:
        """Nothing."""
        return b""

    def delta(self, index: int, event: Delta) -> bytes:
        """New text, if there is any."""
        return self._frame(event.text) if event.text else b""

    def finished(self, index: int, event: Finished) -> bytes:
        """The rest of the text, then the end."""
        end = {"id": self._id, "token": "", "done": True, "generated_tokens": event.usage.n_generated, "finish_reason": event.reason.value}
        return (self._frame(event.text) if event.text else b"") + data(end)

    def last(self) -> bytes:
        """Nothing: the end said it all."""
        return b""


def _model_info(model: ServedModel) -> dict[str, Any]:
    info = attrs.asdict(model.info, filter=lambda attribute, _: attribute.name != "metadata")
    return {
        **info,
        "name": model.name,
        "backend": model.backend,
        "n_ctx": model.n_ctx,
        "n_vocab": model.vocabulary.n_tokens,
        "n_cells": model.n_cells,
        "n_slots": model.n_slots,
        "kv_layout": model.capabilities.kv_layout.value,
    }


def _wants_page(accept: str) -> bool:
    accepted = parse_accept_header(accept[:N_CHARS_ACCEPT], MIMEAccept)
    return accepted.best_match(["application/json", "text/html"]) == "text/html"


def _success(data: dict[str, Any]) -> Response:
    return json_response({"success": True, "data": data})
