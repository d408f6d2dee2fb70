"""Asks every upstream every few seconds whether it is well, and says so in the log when that changes."""

from __future__ import annotations

import logging

import trio

from cllm.errors import RequestError
from cllm_backend_upstream.exchange import Exchange
from cllm_backend_upstream.failures import Busy, KeyRefused
from cllm_backend_upstream.kinds import Kind
from cllm_backend_upstream.options import Options
from cllm_backend_upstream.places import Places
from cllm_backend_upstream.pool import Pool, Upstream

log = logging.getLogger("cllm.upstream")


async def watch(pool: Pool, places: Places, exchange: Exchange, options: Options, kind: Kind) -> None:
    """Check all, for ever, each by itself: one that accepts and says nothing is no reason to look at the others less often."""
    async with trio.open_nursery() as nursery:
        for upstream in pool.upstreams:
            nursery.start_soon(_watch_one, places, upstream, exchange, kind, options.health_s)


async def _watch_one(places: Places, upstream: Upstream, exchange: Exchange, kind: Kind, health_s: float) -> None:
    while True:
        await check(upstream, exchange, kind)
        places.settle()
        await trio.sleep(health_s)


async def check(upstream: Upstream, exchange: Exchange, kind: Kind) -> None:
    """Ask one how it is: by /health, or where its kind has none by its list of models."""
    was_well, why = upstream.is_well, ""
    try:
        await _ask(upstream.url, exchange, kind)
    except Exception as error:  # whatever it is: the other upstreams are none the worse for it
        why = str(error) or type(error).__name__
    if was_well and not upstream.is_well:
        return  # a request found it down, and said so; what this saw may be older: the next check tells
    upstream.is_well = not why
    if was_well and why:
        log.warning("upstream %s is down: %s", upstream.url, why)
    elif not was_well and not why:
        upstream.answered()
        log.warning("upstream %s is up again", upstream.url)


async def _ask(url: str, exchange: Exchange, kind: Kind) -> None:
    try:
        if not (kind.has_health and await _has_told(url, exchange)):
            await exchange.get(f"{url}/v1/models")
    except Busy as busy:
        if busy.status != 429:
            raise
    except KeyRefused:  # it is there: a key may be good for answers and not for lists, and what it is not good for a request tells
        pass


async def _has_told(url: str, exchange: Exchange) -> bool:
    try:
        await exchange.get(f"{url}/health")
    except (RequestError, KeyRefused):  # there is none, as behind a proxy
        return False
    return True
