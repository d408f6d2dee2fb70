"""How many tokens an answer may have where the client sets no limit, or more than the context has left: as many as are left."""

from __future__ import annotations

from typing import Final

import attrs
import msgspec

from cllm.backend import StreamRequest
from cllm.errors import ContextExceeded, NotHeeded, NotSupported
from cllm_backend_upstream.asking import rendered
from cllm_backend_upstream.discovery import Found
from cllm_backend_upstream.exchange import Exchange
from cllm_backend_upstream.failures import Broken, Garbled, KeyRefused
from cllm_backend_upstream.kinds import ToTheEnd

N_SPECIAL: Final = 16  # tokens that a vocabulary puts around a text
N_TEMPLATE: Final = 2048  # tokens of a template's own words, of which those about tools are the most


class _Counted(msgspec.Struct):
    count: int
    max_model_len: int | None = None


async def limited(request: StreamRequest, url: str, found: Found, exchange: Exchange) -> StreamRequest:
    """Return it with the limit that it is to be sent with. Raises: Failure · RequestError."""
    to_the_end = found.kind.to_the_end
    if to_the_end is ToTheEnd.COUNTED and request.n_tokens_max is not None:
        return await _clipped(request, request.n_tokens_max, url, found, exchange)
    if request.chat is not None or request.n_tokens_max is not None or to_the_end is ToTheEnd.UNASKED:
        return request
    if to_the_end is ToTheEnd.UNKNOWN:
        raise _unknown()
    if to_the_end is ToTheEnd.CLIPPED:
        return attrs.evolve(request, n_tokens_max=found.n_ctx)
    return attrs.evolve(request, n_tokens_max=await _n_left(request, url, found, exchange))


async def _clipped(request: StreamRequest, n_wanted: int, url: str, found: Found, exchange: Exchange) -> StreamRequest:
    """Return it with no more than the context has left. How much that is, is asked only where it might be too little."""
    if n_wanted + _n_tokens_at_most(request) <= found.n_ctx:
        return request
    try:
        n_left = await _n_left(request, url, found, exchange)
    except (NotHeeded, Garbled, Broken, KeyRefused):  # where that is closed, the rest may do all the same
        return request
    return attrs.evolve(request, n_tokens_max=min(n_wanted, n_left))


def _n_tokens_at_most(request: StreamRequest) -> int:
    """A token has a byte at least. What a template adds of its own is less than JSON's signs and so much."""
    if request.chat is not None:
        return len(msgspec.json.encode((request.chat.messages, request.chat.tools))) + N_TEMPLATE
    if request.text is not None:
        return len(request.text.encode("utf-8", "surrogatepass")) + N_SPECIAL
    return len(request.prompt)


async def _n_left(request: StreamRequest, url: str, found: Found, exchange: Exchange) -> int:
    """Tokens that the context has left; the server is asked where the prompt is no tokens. Raises: ContextExceeded · as `_counted`."""
    n_prompt, n_ctx = len(request.prompt), found.n_ctx
    if request.chat is not None or request.text is not None:
        counted = await _counted(request, url, found, exchange)
        n_prompt, n_ctx = counted.count, min(n_ctx, counted.max_model_len or n_ctx)
    if n_prompt >= n_ctx:
        raise ContextExceeded(n_prompt, n_ctx)
    return n_ctx - n_prompt


async def _counted(request: StreamRequest, url: str, found: Found, exchange: Exchange) -> _Counted:
    asked = {"prompt": request.text} if request.chat is None else rendered(request.chat)
    try:
        body = await exchange.post(f"{url}/tokenize", msgspec.json.encode({"model": found.model, **asked}))
        return msgspec.json.decode(body, type=_Counted)
    except NotSupported as error:
        raise _unknown() from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Garbled("it does not tell how many tokens a prompt has") from error


def _unknown() -> NotHeeded:
    return NotHeeded("the server behind this one completes no prompt without a limit: set max_tokens", param="max_tokens")
