"""What the upstreams are and what they serve, asked once while the backend loads."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

import attrs
import msgspec
import trio

from cllm.errors import LoadFailed, RequestError
from cllm_backend_upstream.exchange import Exchange
from cllm_backend_upstream.failures import Failure
from cllm_backend_upstream.kinds import KINDS, KNOWN_OTHERS, Kind, kind_of
from cllm_backend_upstream.options import Options

log = logging.getLogger("cllm.upstream")

N_CTX_UNKNOWN: Final = 1 << 20  # then the upstream alone says what is too long
N_NAMES_TOLD: Final = 8


@attrs.frozen(kw_only=True)
class Found:
    """What the upstreams serve."""

    model: str  # what they call it
    kind_name: str
    n_ctx: int

    @property
    def kind(self) -> Kind:
        """What they are like."""
        return KINDS[self.kind_name]


class _Entry(msgspec.Struct):
    id: str
    owned_by: str | None = None
    max_model_len: int | None = None  # vLLM's
    meta: dict[str, Any] | None = None  # llama-server's and cLLM's
    parent: str | None = None  # of a LoRA adapter of vLLM's, which is told without a length


class _List(msgspec.Struct):
    data: list[_Entry]


def discover(options: Options) -> Found:
    """Ask each until one answers; blocks. Raises: LoadFailed."""
    return trio.run(_discover, options)


async def _discover(options: Options) -> Found:
    exchange = Exchange(options)
    told: dict[str, Found | LoadFailed | str] = dict.fromkeys(options.urls, "")  # a complaint of those that do not answer

    async def ask(url: str) -> None:
        try:
            entries = msgspec.json.decode(await exchange.get(f"{url}/v1/models"), type=_List).data
            told[url] = await _found(exchange, url, entries, options)
        except LoadFailed as error:
            told[url] = error
        except (Failure, RequestError) as error:
            told[url] = f"{url}: {error}"
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            told[url] = f"{url}: /v1/models is no list of models"

    async with trio.open_nursery() as nursery:
        for url in options.urls:
            nursery.start_soon(ask, url)
    found = {url: one for url, one in told.items() if isinstance(one, Found)}
    failed = [one for one in told.values() if isinstance(one, LoadFailed)]
    if not found:
        raise failed[0] if failed else LoadFailed(f"upstream: no server answers: {'; '.join(map(str, told.values()))}")
    for complaint in map(str, failed):
        log.warning(complaint)
    return _common(found)


def _common(found: Mapping[str, Found]) -> Found:
    """What holds for all that answered: each is asked in the same words, as will be those that are down now. Raises: LoadFailed.

    By what name is not compared: some servers take any.
    """
    (url, first), *others = found.items()
    for other_url, other in others:
        if other.kind_name != first.kind_name:
            kinds = f"{url} is of the kind {first.kind_name}, and {other_url} of {other.kind_name}"
            raise LoadFailed(f"upstream: {kinds}: serve them apart, or say --backend-option kind=NAME")
    return attrs.evolve(first, n_ctx=min(one.n_ctx for one in found.values()))


async def _found(exchange: Exchange, url: str, entries: list[_Entry], options: Options) -> Found:
    entry = _chosen(url, entries, options.model)
    kind = options.kind or kind_of(entry.owned_by or "")
    if kind == "other" and not options.kind and entry.owned_by not in KNOWN_OTHERS:
        kind = await _probed(exchange, url)
    return Found(model=entry.id, kind_name=kind, n_ctx=options.n_ctx or _n_ctx(entry, entries))


def _chosen(url: str, entries: list[_Entry], name: str) -> _Entry:
    chosen = [entry for entry in entries if not name or entry.id == name]
    if len(chosen) == 1:
        return chosen[0]
    names = ", ".join(entry.id for entry in entries[:N_NAMES_TOLD]) + (", ..." if len(entries) > N_NAMES_TOLD else "")
    if not entries:
        raise LoadFailed(f"upstream: {url} serves no model")
    if not chosen:
        raise LoadFailed(f"upstream: {url} serves no model {name}, but {names}")
    raise LoadFailed(f"upstream: {url} serves several models; choose one: --backend-option model=NAME, of {names}")


def _n_ctx(entry: _Entry, entries: list[_Entry]) -> int:
    own = entry.max_model_len or next((one.max_model_len for one in entries if one.id == entry.parent), None)
    told = own or (entry.meta or {}).get("n_ctx") or (entry.meta or {}).get("n_ctx_train")
    return told if isinstance(told, int) and 2 <= told <= N_CTX_UNKNOWN else N_CTX_UNKNOWN


async def _probed(exchange: Exchange, url: str) -> str:
    """Return what the paths that a server has say of it. A model that Ollama has from elsewhere is owned by whoever made it."""
    if "text-generation" in str((await _told(exchange, f"{url}/info")).get("router", "")):
        return "tgi"
    # With more beside it, it is another's: llama-swap and Open WebUI tell theirs there, too.
    if list(await _told(exchange, f"{url}/api/version")) == ["version"]:
        return "ollama"
    return "other"


async def _told(exchange: Exchange, url: str) -> Mapping[str, Any]:
    """Return the object that is there, or none."""
    try:
        return msgspec.json.decode(await exchange.get(url), type=dict[str, Any])
    except (Failure, RequestError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
