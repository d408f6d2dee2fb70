"""Runs one task for another's sake, as long as that runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio


async def beside(work: Callable[[], Awaitable[None]], other: Callable[[], Awaitable[None]]) -> None:
    """Run `other`, which does not end by itself, until `work` ends. Raises: what `work` raises, as it would come without a nursery."""
    failure: Exception | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            try:
                await work()
            except Exception as error:
                failure = error
            nursery.cancel_scope.cancel()
    finally:
        if failure is not None:  # also where all of it was cancelled meanwhile
            raise failure
