"""The named errors, sorted by who can act on them: a backend's caller, a client, the operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")


def in_one_line(error: BaseException) -> str:
    """Return an error's kind and message, for a line of another one's."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def call_foreign(call: Callable[..., T], *arguments: Any) -> T:
    """Call what is a plugin's. What it raises that is no Exception, a panic of Rust's or SystemExit, comes as StepFailed.

    Whoever serves many catches no such thing, so that one request would end all. KeyboardInterrupt is the operator's, and comes as it is.
    """
    try:
        return call(*arguments)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:  # no call of these is asynchronous, so that nothing is cancelled in it
        raise StepFailed(in_one_line(error)) from error  # noqa: ASYNC104


class CllmError(Exception):
    """The root of every error that cLLM raises on purpose."""


class SettingsError(CllmError):
    """The operator asked for something that cannot be; one line. `field` is the attribute at fault, if it is one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.message = message
        self.field = field


# --- the seam: what a model's calls may raise (cllm/backend.py says when) ---------------------------------------------


class BackendError(CllmError):
    """A backend could not do what it was asked."""


class BackendUnavailable(BackendError):
    """No such backend, or it cannot work here; the message says why and what to install."""


class LoadFailed(BackendError):
    """The model file cannot be loaded; the message is one line for the operator."""


class DoesNotGenerate(LoadFailed):
    """The file is a model that gives vectors, not text; it may be loaded as an embedder."""


class LoadAborted(BackendError):
    """`on_progress` asked the load to stop."""


class TemplateInvalid(LoadFailed):
    """The chat template cannot be compiled; `line` counts from 1, None where the fault is not in one place."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(f"chat template: {message}" if line is None else f"chat template, line {line}: {message}")
        self.line = line


class GrammarInvalid(CllmError):
    """A schema, regular expression or grammar cannot be compiled, or not be held to.

    `complaint` says what is wrong; `pointer` is the JSON pointer of the part of a schema that is at fault, "" where there is none, and
    `keyword` the one in it, where it is known.
    """

    def __init__(self, complaint: str, pointer: str = "", keyword: str = "") -> None:
        super().__init__(f"{complaint} (at {pointer})" if pointer else complaint)
        self.complaint = complaint
        self.pointer = pointer
        self.keyword = keyword


class GrammarSlow(GrammarInvalid):
    """It takes longer to compile than it may."""


class TokenizeFailed(BackendError):
    """The text cannot be tokenised (too long for the tokeniser's stack); nothing was changed."""


class NoRoom(BackendError):
    """The cells do not suffice for these rows; the memory is as it was. Send fewer rows, or free cells."""


class Aborted(BackendError):
    """The step was stopped by `abort`; the memory is as it was, where slots can be trimmed, and else that of its slots is undefined."""


class StepFailed(BackendError):
    """The step failed; the content of the slots it touched is undefined, all other slots are intact."""


class ModelDied(BackendError):
    """The model cannot be used any more; everything it held is lost."""


# --- the client: what a request may be answered with ------------------------------------------------------------------


class RequestError(CllmError):
    """A request is refused or ended. `status` and `type` are the HTTP contract's; `param` names the field at fault."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: int | str | None = None, **extra: Any) -> None:
        message, param = _writable(message), None if param is None else _writable(param)
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.extra = {name: _writable(value) if isinstance(value, str) else value for name, value in extra.items()}  # of the wire's object


def _writable(text: str) -> str:
    """What it names may be a client's, with half a surrogate in it, which no answer and no log can carry."""
    return text.encode("utf-8", "backslashreplace").decode()


class InvalidRequest(RequestError):
    """Malformed, of the wrong type, or out of range."""

    status = 400
    type = "invalid_request_error"


class ContextExceeded(RequestError):
    """The prompt leaves no room for one generated token in the sequence's context."""

    status = 400
    type = "exceed_context_size_error"

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            self.words(str(n_prompt_tokens), min(n_ctx, n_prompt_tokens - 1), n_ctx),
            code="context_length_exceeded",
            n_prompt_tokens=n_prompt_tokens,
            n_ctx=n_ctx,
        )

    @staticmethod
    def words(n_prompt_tokens: str, n_max: int, n_ctx: int) -> str:
        """The message. Clients that shorten a conversation and try again know such refusals by Anthropic's and llama-server's words."""
        return f"prompt is too long: {n_prompt_tokens} tokens > {n_max} maximum; it exceeds the available context size ({n_ctx} tokens)"


class NotAuthenticated(RequestError):
    """A key is wanted and none, or an unknown one, came."""

    status = 401
    type = "authentication_error"


class NotPermitted(RequestError):
    """The operator has not enabled this."""

    status = 403
    type = "permission_error"


class NotFound(RequestError):
    """No such path, model or object."""

    status = 404
    type = "not_found_error"


class MethodNotAllowed(RequestError):
    """The path exists, with another method."""

    status = 405
    type = "invalid_request_error"


class BodyTimeout(RequestError):
    """The body did not arrive in time."""

    status = 408
    type = "timeout_error"


class BodyTooLarge(RequestError):
    """The body exceeds the limit."""

    status = 413
    type = "invalid_request_error"


class QuotaExceeded(RequestError):
    """A key has more under way than it may."""

    status = 429
    type = "quota_exceeded_error"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, code="quota_exceeded")
        self.retry_after_s = retry_after_s


class RateLimited(RequestError):
    """What answers the request, and belongs to somebody else, has been asked too often."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, code="rate_limited")
        self.retry_after_s = retry_after_s


class GenerationFailed(RequestError):
    """The model failed on this sequence (its step raised, or its logits were not numbers)."""


class TemplateFailed(RequestError):
    """The model's chat template did what a template may not; another request may fare better."""


class TemplateLimitExceeded(TemplateFailed):
    """The model's chat template needs more time or memory than it is given."""


class TemplateSlow(TemplateLimitExceeded):
    """It needs more time."""


class NotSupported(RequestError):
    """The contract knows this, the model or the backend cannot do it."""

    status = 501
    type = "not_supported_error"


class NotHeeded(NotSupported):
    """The contract knows this field, and what answers the request would ignore it. `param` names it."""

    status = 400


class Unavailable(RequestError):
    """Loading, draining, or the queue is full."""

    status = 503
    type = "unavailable_error"

    def __init__(self, message: str, *, retry_after_s: float, **extra: Any) -> None:
        super().__init__(message, **extra)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(RequestError):
    """The request's `timeout_s` passed before its first token."""

    status = 504
    type = "timeout_error"


# --- the operator: the message is one line, and says what to change ---------------------------------------------------


class OperatorError(CllmError):
    """The server cannot run as it was told to."""


class CannotListen(OperatorError):
    """The address is taken, forbidden or unknown, or the TLS files cannot be used."""


class AppFailed(OperatorError):
    """The app under the HTTP server did not start, or its lifespan ended before the server's."""
