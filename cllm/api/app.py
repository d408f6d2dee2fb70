"""The HTTP application: every surface's routes, and one answer for whatever goes wrong."""

from __future__ import annotations

import structlog
from quart import Response, g, request
from quart.wrappers.base import BaseRequestWebsocket
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException
from werkzeug.routing import MapAdapter

from cllm.api import admin, guards, native, openapi, requests, rerank, status, tokens
from cllm.api.anthropic import messages
from cllm.api.connection import Connection
from cllm.api.context import Context, route_path
from cllm.api.errors import ErrorShape, InternalError, anthropic_shape, from_http, ollama_shape, openai_shape, response_of
from cllm.api.llama_server import completion, infill
from cllm.api.metrics import HttpMetrics
from cllm.api.ollama import embed as ollama_embed
from cllm.api.ollama import generate as ollama
from cllm.api.ollama import models as ollama_models
from cllm.api.openai import chat, completions, embeddings, models
from cllm.api.openai.responses import routes as responses
from cllm.api.operations import Operation
from cllm.config import Settings
from cllm.errors import RequestError
from cllm.serve.engine import Engine
from cllm.serve.house import House

log = structlog.get_logger("cllm.api")

SURFACES = (
    *(chat, completions, responses, completion, infill, embeddings, rerank, models, messages, ollama, ollama_embed, ollama_models),
    *(native, tokens, status, requests, admin, openapi),
)
OPERATIONS: tuple[Operation, ...] = tuple(one for surface in SURFACES for one in surface.OPERATIONS)
_SHAPES: dict[str, ErrorShape] = {one.path: one.errors for one in OPERATIONS}
_SHAPES_BELOW: dict[str, ErrorShape] = {"/v1/messages/": anthropic_shape, "/api/": ollama_shape}  # where there is no such path, too


class _App(QuartTrio):
    """Which route is meant does not depend on the host that a request names: one that can be none would raise before anybody answers."""

    def create_url_adapter(self, request: BaseRequestWebsocket | None) -> MapAdapter | None:
        if request is None:
            return super().create_url_adapter(request)
        query = request.query_string.decode("ascii", "replace")
        return self.url_map.bind("localhost", request.root_path, None, request.scheme, request.method, request.path, query)


def create_app(engine: Engine | House, settings: Settings) -> QuartTrio:
    """Return the ASGI application that serves one engine, or the models of a house. One application for either."""
    house = engine if isinstance(engine, House) else House.of(engine, settings)
    app = _App(__name__, static_folder=None)
    app.asgi_http_class = Connection
    app.url_map.strict_slashes = False  # otherwise a redirect, which is a page of HTML, and for POST of no use
    app.url_map.merge_slashes = False
    app.config.update(
        RESPONSE_TIMEOUT=None,  # streams last as long as they last; deadlines are the engine's
        BODY_TIMEOUT=settings.body_timeout_s,
        MAX_CONTENT_LENGTH=int(settings.max_body_mb * 1024 * 1024),
    )
    context = Context(house, settings, HttpMetrics(house.registry), OPERATIONS)
    app.extensions["cllm"] = context
    guards.install(app, context)
    for surface in SURFACES:
        app.register_blueprint(surface.blueprint(context))
    _answer_errors(app)
    return app


def _answer_errors(app: QuartTrio) -> None:
    @app.errorhandler(RequestError)
    async def refused(error: RequestError) -> Response:
        return response_of(error, _shape())

    @app.errorhandler(HTTPException)
    async def refused_by_quart(error: HTTPException) -> Response:
        ours, headers = from_http(error, request.path[:200])
        return response_of(ours, _shape(), headers)

    @app.errorhandler(Exception)
    async def failed(error: Exception) -> Response:
        log.error("request.failed", path=request.path, request_id=g.get("request_id"), exc_info=error)
        return response_of(InternalError("internal error; the server's log has it under this request's x-request-id"), _shape())


def _shape() -> ErrorShape:
    path = route_path()
    return _SHAPES.get(path) or next((shape for below, shape in _SHAPES_BELOW.items() if path.startswith(below)), openai_shape)
