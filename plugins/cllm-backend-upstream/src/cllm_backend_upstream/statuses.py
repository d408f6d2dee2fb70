"""What a status that is no success means: the client's mistake, which no other upstream would take better, or the upstream's trouble."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from typing import Any, Final

import msgspec

from cllm.errors import ContextExceeded, InvalidRequest, NotHeeded, NotSupported, RequestError
from cllm_backend_upstream.failures import Broken, Busy, Failure, KeyRefused

N_BODY_MAX: Final = 65_536  # bytes of a complaint that are read
N_MESSAGE_MAX: Final = 500  # characters of it that are told
RETRY_AFTER_S: Final = 1.0  # where it is not said
RETRY_AFTER_S_MAX: Final = 3600.0


def what_it_means(status: int, retry_after: str | None, body: bytes) -> Failure | RequestError:
    """Return what an answer with `status` is to be taken for."""
    if status in (429, 503):
        return Busy(status, retry_after_s(retry_after))
    if status in (401, 403, 407):
        return KeyRefused(f"HTTP {status}: {'a proxy before it' if status == 407 else 'it'} wants another key")
    if status == 402:  # the operator's bill, which is none of the client's
        return KeyRefused(f"HTTP {status}: it wants to be paid")
    if status == 501 or status in (404, 405):
        return NotSupported(f"the server behind this one does not serve this: {complaint(body).message or status}")
    if 400 <= status < 500 and status not in (408, 409, 424, 425):  # 424 is what TGI says when computing fails
        return _refusal(complaint(body))
    message = complaint(body).message
    return Broken(f"HTTP {status}: {message}" if message else f"HTTP {status}")


def retry_after_s(text: str | None) -> float:
    """Return the seconds that a `Retry-After` asks for: a number, or a date."""
    try:
        seconds = float(text or "")
    except ValueError:
        seconds = _until(text)
    return min(max(seconds, 0.0), RETRY_AFTER_S_MAX) if seconds == seconds else RETRY_AFTER_S


def _until(text: str | None) -> float:
    try:
        return parsedate_to_datetime(text or "").timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return RETRY_AFTER_S


class Complaint(msgspec.Struct):
    """What an error says, whichever server's."""

    message: str = ""
    type: str = ""
    param: str | None = None
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None


def complaint(body: bytes) -> Complaint:
    """Read the body of an error. OpenAI's shape, or that of vLLM, TGI and FastAPI; of anything else nothing is told."""
    try:
        said = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return Complaint()
    error = said.get("error", said) if isinstance(said, dict) else {}
    if isinstance(error, str):
        return Complaint(message=_line(error))
    if not isinstance(error, dict):
        return Complaint()
    message = error.get("message") or error.get("detail") or ""
    return Complaint(
        message=_line(message) if isinstance(message, str) else "",
        type=_line(error.get("type")),
        param=_line(error.get("param")) or None,
        n_prompt_tokens=_count(error.get("n_prompt_tokens")),
        n_ctx=_count(error.get("n_ctx")),
    )


def _refusal(said: Complaint) -> RequestError:
    if said.n_prompt_tokens is not None and said.n_ctx is not None:
        return ContextExceeded(said.n_prompt_tokens, said.n_ctx)
    message = said.message or "the server behind this one refuses the request"
    if said.type == NotSupported.type:
        return NotHeeded(message, param=said.param)
    return InvalidRequest(message, param=said.param)


def _line(text: Any) -> str:
    if not isinstance(text, str):
        return ""
    return " ".join("".join(c if c.isprintable() else " " for c in text[: 2 * N_MESSAGE_MAX]).split())[:N_MESSAGE_MAX]


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 40 else None
