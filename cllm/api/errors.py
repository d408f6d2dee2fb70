"""The wire form of errors: one shape for each surface, the status and headers alike for all."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import msgspec
from quart import Response, g, has_request_context
from werkzeug.exceptions import HTTPException
from werkzeug.exceptions import MethodNotAllowed as WerkzeugMethodNotAllowed

from cllm import errors
from cllm.errors import ContextExceeded, RequestError

# What would come to the same end, at the same price: a step that fails with this request alone may have killed the model's process.
FAILS_AGAIN: Final = frozenset({"step_failed", "grammar_failed", "answer_unread", "invalid_logits", "invalid_vector", "tokens_overflow"})

ErrorShape: TypeAlias = Callable[[RequestError], dict[str, Any]]


class InternalError(RequestError):
    """Something of ours went wrong; the log knows what, the client does not need to."""


class ContextExceededByFar(ContextExceeded):
    """As `ContextExceeded`, of a prompt whose tokens nobody needs to count."""

    def __init__(self, n_prompt_tokens_min: int, n_ctx: int) -> None:
        super().__init__(n_prompt_tokens_min, n_ctx)
        self.message = self.words(f"at least {n_prompt_tokens_min}", n_ctx, n_ctx)


def openai_shape(error: RequestError) -> dict[str, Any]:
    """The shape of every surface that has none of its own."""
    code = error.status if error.code is None else error.code
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": code, **error.extra}}


def native_shape(error: RequestError) -> dict[str, Any]:
    """The first cLLM's."""
    shape: dict[str, Any] = {"success": False, "error": error.message}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        shape["retry_after"] = whole_seconds(retry_after_s)
    return shape


def anthropic_shape(error: RequestError) -> dict[str, Any]:
    """Anthropic's, with its names for what went wrong."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    shape = {"type": "error", "error": {"type": kind, "message": error.message}}
    return {**shape, "request_id": g.request_id} if has_request_context() and "request_id" in g else shape


def ollama_shape(error: RequestError) -> dict[str, Any]:
    """Ollama's, which has the message alone."""
    return {"error": error.message}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_TEXT, _MAYBE_TEXT = {"type": "string"}, {"type": ["string", "null"]}
ERROR_SCHEMAS: dict[ErrorShape, tuple[str, dict[str, Any]]] = {  # what OpenAPI calls them, and how they look
    openai_shape: (
        "Error",
        _object(error=_object(message=_TEXT, type=_TEXT, param=_MAYBE_TEXT, code={"type": ["string", "integer", "null"]})),
    ),
    native_shape: ("NativeError", _object(success={"const": False}, error=_TEXT)),
    anthropic_shape: ("AnthropicError", _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT))),
    ollama_shape: ("OllamaError", _object(error=_TEXT)),
}


def response_of(error: RequestError, shape: ErrorShape, headers: dict[str, str] | None = None) -> Response:
    """The response that carries `error`."""
    response = Response(msgspec.json.encode(shape(error)), error.status, headers, content_type="application/json")
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None:
        response.headers["Retry-After"] = str(whole_seconds(retry_after_s))
    if (
        error.status == 501 or error.code in FAILS_AGAIN or isinstance(error, errors.TemplateFailed)
    ):  # OpenAI's and Anthropic's packages ask three times for whatever is a 5xx
        response.headers["x-should-retry"] = "false"
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def from_http(error: HTTPException, path: str) -> tuple[RequestError, dict[str, str]]:
    """What the web framework refused by itself, in our words, with the headers that belong to it."""
    if isinstance(error, WerkzeugMethodNotAllowed):
        allowed = ", ".join(sorted(error.valid_methods or ()))
        return errors.MethodNotAllowed(f"{path} takes {allowed or 'other methods'}"), {"Allow": allowed}
    if error.code == 404:
        return errors.NotFound(f"there is no {path} here; GET / lists what is"), {}
    if error.code == 408:
        return errors.BodyTimeout("the body did not arrive in time"), {}
    if error.code == 413:
        return errors.BodyTooLarge("the body is larger than this server takes"), {}
    if error.code is not None and error.code < 500:
        return errors.InvalidRequest(error.description or "the request is malformed"), {}
    return InternalError("internal error"), {}


def whole_seconds(seconds: float) -> int:
    """What Retry-After can say."""
    return max(1, math.ceil(seconds))
