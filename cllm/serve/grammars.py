"""Has grammars compiled beside everything else: on threads with enough stack, few at a time, and nobody waits for ever."""

from __future__ import annotations

import math
import time
from functools import partial

import trio

from cllm.bigstack import NoStack, call_with_stack
from cllm.errors import GrammarInvalid, Unavailable
from cllm.serve.metrics import Metrics
from cllm.text.grammar import N_BYTES_STACK, Grammar, Grammars, GrammarSource

N_COMPILING_MAX = 2  # each has a core; what takes too long goes on until its fuel is used up, and takes one of these places meanwhile


class GrammarDesk:
    """Where the API gets its grammars. All methods belong to the Trio thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._limiter = trio.CapacityLimiter(N_COMPILING_MAX)

    async def compiled(self, grammars: Grammars, source: GrammarSource, *, timeout_s: float) -> Grammar:
        """The grammar of `source`. Raises: GrammarInvalid, also for what takes longer than `timeout_s` · Unavailable."""
        known = grammars.known(source)
        if known is not None:
            self._metrics.grammars.labels("cached").inc()
            return known
        try:
            grammar = await self._compile(grammars, source, timeout_s)
        except GrammarInvalid:
            self._metrics.grammars.labels("refused").inc()
            raise
        self._metrics.grammars.labels("compiled").inc()
        return grammar

    async def _compile(self, grammars: Grammars, source: GrammarSource, timeout_s: float) -> Grammar:
        started_at = math.inf

        def work() -> Grammar:
            nonlocal started_at
            started_at = time.perf_counter()
            return call_with_stack(partial(grammars.compile, source), N_BYTES_STACK)

        with trio.move_on_after(timeout_s):
            try:
                grammar = await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._limiter)
            except NoStack:
                raise Unavailable("there is no memory to compile a grammar", retry_after_s=timeout_s) from None
            finally:
                if started_at < math.inf:
                    self._metrics.grammar_s.observe(time.perf_counter() - started_at)
            return grammar
        known = grammars.known(source)
        if known is not None:  # it was compiled in time, and Trio came too late to see that: the whole process stood still
            return known
        if started_at < math.inf:
            raise GrammarInvalid(f"it takes longer than {timeout_s:g} s to compile")
        raise Unavailable("other grammars are being compiled", retry_after_s=timeout_s, code="grammars_busy")
