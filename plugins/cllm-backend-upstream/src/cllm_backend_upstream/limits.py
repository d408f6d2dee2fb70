"""How many tokens a prompt is completed with where the client sets no limit: as many as the context has left."""

from __future__ import annotations

import attrs
import msgspec

from cllm.backend import StreamRequest
from cllm.errors import ContextExceeded, NotHeeded, NotSupported
from cllm_backend_upstream.discovery import Found
from cllm_backend_upstream.exchange import Exchange
from cllm_backend_upstream.failures import Garbled
from cllm_backend_upstream.kinds import ToTheEnd


class _Counted(msgspec.Struct):
    count: int
    max_model_len: int | None = None


async def limited(request: StreamRequest, url: str, found: Found, exchange: Exchange) -> StreamRequest:
    """Return it with the limit that it is to be sent with. Raises: Failure · RequestError."""
    to_the_end = found.kind.to_the_end
    if request.chat is not None or request.n_tokens_max is not None or to_the_end is ToTheEnd.UNASKED:
        return request
    if to_the_end is ToTheEnd.UNKNOWN:
        raise _unknown()
    if to_the_end is ToTheEnd.CLIPPED:
        return attrs.evolve(request, n_tokens_max=found.n_ctx)
    n_prompt, n_ctx = len(request.prompt), found.n_ctx
    if request.text is not None:
        counted = await _counted(request.text, url, found.model, exchange)
        n_prompt, n_ctx = counted.count, min(n_ctx, counted.max_model_len or n_ctx)
    if n_prompt >= n_ctx:
        raise ContextExceeded(n_prompt, n_ctx)
    return attrs.evolve(request, n_tokens_max=n_ctx - n_prompt)


async def _counted(text: str, url: str, model: str, exchange: Exchange) -> _Counted:
    try:
        body = await exchange.post(f"{url}/tokenize", msgspec.json.encode({"model": model, "prompt": text}))
        return msgspec.json.decode(body, type=_Counted)
    except NotSupported as error:
        raise _unknown() from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Garbled("it does not tell how many tokens a prompt has") from error


def _unknown() -> NotHeeded:
    return NotHeeded("the server behind this one completes no prompt without a limit: set max_tokens", param="max_tokens")
