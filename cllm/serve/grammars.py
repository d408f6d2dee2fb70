"""Has grammars compiled beside everything else: on threads with enough stack, few at a time, and nobody waits for ever."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import trio

from cllm.bigstack import NoStack, call_with_stack
from cllm.errors import GrammarInvalid, GrammarSlow, Unavailable
from cllm.serve.keythreads import KeyThreads
from cllm.serve.metrics import Metrics
from cllm.text.grammar import N_BYTES_STACK, Grammar, Grammars, GrammarSource

T = TypeVar("T")

N_COMPILING_MAX = 2  # each has a core; what takes too long goes on until its fuel is used up, and takes one of these places meanwhile


def on_stack(make: Callable[[], T]) -> T | None:
    """What `make` gives on a thread with `N_BYTES_STACK`, of what compiled before; None where there is no memory for it any more."""
    try:
        return call_with_stack(make, N_BYTES_STACK)
    except (NoStack, GrammarInvalid):
        return None


class GrammarDesk:
    """Where the API gets its grammars. All methods belong to the Trio thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._writing = KeyThreads(N_COMPILING_MAX)  # apart: what was compiled before need not wait for others' compiling
        self._compiling = KeyThreads(N_COMPILING_MAX)

    async def compiled(
        self, grammars: Grammars, source: GrammarSource | Callable[[], GrammarSource], *, timeout_s: float, key: str = ""
    ) -> Grammar:
        """The grammar of `source`, or of what that writes, which takes its time, too. Keys take turns at both.

        Raises: GrammarInvalid, also for what takes longer than `timeout_s` · Unavailable.
        """
        ends_at = trio.current_time() + timeout_s
        try:
            if not isinstance(source, GrammarSource):
                source = await self._apart(source, self._writing, key, ends_at, timeout_s)
            known = grammars.known(source)
            if known is not None:
                self._metrics.grammars.labels("cached").inc()
                return known
            grammar = await self._compile(grammars, source, key, ends_at, timeout_s)
        except GrammarInvalid:
            self._metrics.grammars.labels("refused").inc()
            raise
        self._metrics.grammars.labels("compiled").inc()
        return grammar

    async def _compile(self, grammars: Grammars, source: GrammarSource, key: str, ends_at: float, timeout_s: float) -> Grammar:
        started_at = math.inf

        def work() -> Grammar:
            nonlocal started_at
            started_at = time.perf_counter()
            return call_with_stack(partial(grammars.compile, source, on_stack), N_BYTES_STACK)

        try:
            return await self._apart(work, self._compiling, key, ends_at, timeout_s)
        except NoStack:
            raise Unavailable("there is no memory to compile a grammar", retry_after_s=timeout_s) from None
        except (GrammarInvalid, Unavailable):
            known = grammars.known(source)
            if known is None:
                raise
            return known  # it was compiled in time, and Trio came too late to see that: the whole process stood still
        finally:
            if started_at < math.inf:
                self._metrics.grammar_s.observe(time.perf_counter() - started_at)

    async def _apart(self, work: Callable[[], T], threads: KeyThreads, key: str, ends_at: float, timeout_s: float) -> T:
        """What `work` gives in a thread. Raises: GrammarInvalid when it takes too long · Unavailable when its turn does not come."""
        is_begun = False

        def begin() -> T:
            nonlocal is_begun
            is_begun = True
            return work()

        with trio.move_on_at(ends_at):
            return await threads.run(begin, key)
        if is_begun:
            raise GrammarSlow(f"it takes longer than {timeout_s:g} s to compile")
        raise Unavailable("other grammars are being compiled", retry_after_s=timeout_s, code="grammars_busy")
