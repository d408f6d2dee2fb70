"""The engine as the API sees it: what is served, open a request, read its events, ask how things stand."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from enum import Enum
from functools import partial
from typing import TypeVar

import attrs
import trio

from cllm.backend import Capabilities, ModelInfo, StepModel, Vocabulary
from cllm.config import Settings
from cllm.engine.sampling.dry import dry_breaker_tokens
from cllm.engine.sampling.history import dries
from cllm.engine.scheduler import Scheduler
from cllm.engine.sequence import SequenceSpec
from cllm.engine.views import SequenceView
from cllm.engine.waiting.fairness import Account, likeliest
from cllm.errors import DeadlineExceeded, ModelDied, NotSupported, Unavailable, call_foreign
from cllm.serve.embedding import EmbedLoop, ServedEmbedder
from cllm.serve.grammars import GrammarDesk
from cllm.serve.keythreads import KeyThreads
from cllm.serve.loop import Loop
from cllm.serve.metrics import Metrics
from cllm.serve.records import Record, Records
from cllm.serve.streams import EventStream
from cllm.text.dialect import Dialect
from cllm.text.grammar import Grammar, Grammars, GrammarSource
from cllm.text.prompt import N_CHARS_SHORT, prompt_tokens
from cllm.text.template import ChatTemplate

T = TypeVar("T")

N_CHARS_INLINE = 1024  # shorter texts are tokenised where they are, which takes half a millisecond of English and 2.5 of Chinese
N_KEYS_FEW = 16  # each of which may be asked whether it would be let in
N_TOKENIZING_MAX = 4  # of each kind at a time: they take cores from the model, and may not take all the threads that others need


class EnginePhase(Enum):
    """Where the engine is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # finishes what was accepted, accepts nothing
    STOPPED = "stopped"


@attrs.frozen
class Speech:
    """How a model writes conversations, and its answers are read."""

    template: ChatTemplate
    dialect: Dialect


@attrs.frozen(kw_only=True)
class ServedModel:
    """What a loaded model is called and what it can take, as its cells lie now."""

    name: str
    aliases: tuple[str, ...]  # all names that a request may use, `name` first
    backend: str
    info: ModelInfo
    vocabulary: Vocabulary
    template: ChatTemplate
    grammars: Grammars | None  # None: it holds its answers to a form by itself, if at all
    dialect: Dialect
    capabilities: Capabilities
    n_ctx: int  # tokens of one sequence at most, prompt and generated
    n_cells: int
    n_slots: int
    n_live_max: int
    loaded_at: float  # seconds since the epoch
    generates: bool = True  # False: it gives vectors only
    reads_text: bool = False  # nobody here knows its tokens, nor how it writes a conversation
    heeds: frozenset[str] | None = None  # what a `StreamModel` heeds of a request, by its names; None: the engine sees to all
    for_tools: Speech | None = None  # where it may call tools, if that is otherwise than elsewhere

    def with_tools(self) -> ServedModel:
        """The model as it speaks where it may call tools."""
        if self.for_tools is None:
            return self
        return attrs.evolve(self, template=self.for_tools.template, dialect=self.for_tools.dialect, for_tools=None)


@attrs.frozen
class Embeddings:
    """What gives vectors, and its loop."""

    model: ServedEmbedder
    loop: EmbedLoop


@attrs.frozen(kw_only=True)
class Health:
    """Whether the engine makes progress."""

    ok: bool
    reason: str = ""


class Engine:
    """One model being loaded, served, drained.

    `phase` and `progress` (0 to 1) say how far it is. All methods must be called from the Trio
    thread; those that tokenise may wait, the others are synchronous.
    """

    def __init__(self, *, metrics: Metrics, stream_n_bytes_max: int, watchdog_s: float) -> None:
        self.phase = EnginePhase.LOADING
        self.progress = 0.0
        self.metrics = metrics
        self.records = Records()
        self._stream_n_bytes_max = stream_n_bytes_max
        self._watchdog_s = watchdog_s
        self._model: ServedModel | None = None
        self._loop: Loop | None = None
        self._embeddings: Embeddings | str = ""
        self._desk = GrammarDesk(metrics)
        self._tokenizing = {is_long: KeyThreads(N_TOKENIZING_MAX) for is_long in (False, True)}  # no short one waits for long ones

    # --- what the API asks --------------------------------------------------------------------------------------------

    @property
    def model(self) -> ServedModel:
        """The served model. Raises: Unavailable while it is being loaded."""
        if self._model is None:
            raise Unavailable("the model is being loaded", retry_after_s=2.0, code="loading", progress=round(self.progress, 3))
        return self._model

    def check_accepting(self, n_sequences: int = 1, *, key: str = "", priority: int = 0, timeout_s: float | None = None) -> None:
        """Refuse early, before a prompt is rendered and tokenised.

        Raises: Unavailable while loading or draining, when the queue has no room, or when the wait would be too long · QuotaExceeded ·
        DeadlineExceeded when `timeout_s` would pass in the queue · NotSupported by a model that gives vectors only.
        """
        scheduler = self._ready_loop().scheduler
        if not self.model.generates:
            raise NotSupported(f"{self.model.name} gives embeddings, and no text")
        scheduler.check_room(trio.current_time(), n_sequences=n_sequences, key=key, priority=priority, timeout_s=timeout_s)

    def expect(self, n_sequences: int = 1, *, key: str = "", priority: int = 0, timeout_s: float | None = None) -> Callable[[], None]:
        """As `check_accepting`; besides, keep their room in the queue until what is returned is called, be it more than once."""
        self.check_accepting(n_sequences, key=key, priority=priority, timeout_s=timeout_s)
        scheduler = self._ready_loop().scheduler
        return partial(scheduler.expect_no_more, scheduler.expect(n_sequences, key=key, priority=priority))

    def key_cap(self, key: str) -> int | None:
        """Completions that a key may have under way; None: as many as it likes, or it is not known while the model is being loaded."""
        return None if self._loop is None else self._loop.scheduler.key_cap(key)

    def check_ready(self) -> None:
        """Raises: Unavailable unless a request of one key at least would be taken, and would not wait for another worker to be loaded.

        A key at its own cap says nothing of the server.
        """
        loop = self._ready_loop()
        if (loop if self.model.generates else self.embeddings.loop).is_replacing:
            raise _anew()
        if not self.model.generates:
            self.embeddings.loop.check_room(*loop.scheduler.limits.key_weights)
            return
        refusals = []
        for key in _keys_to_ask(loop.scheduler):
            try:
                self.check_accepting(key=key, priority=loop.scheduler.limits.key_priorities.get(key, 0))
                return
            except Unavailable as error:
                refusals.append(error)
        if refusals:
            raise min(refusals, key=lambda error: error.retry_after_s)

    @property
    def embedder(self) -> ServedEmbedder | None:
        """What gives vectors, for those who only want to know."""
        return None if isinstance(self._embeddings, str) else self._embeddings.model

    @property
    def embeddings(self) -> Embeddings:
        """What gives vectors. Raises: Unavailable while loading or draining · NotSupported where nothing does."""
        self._ready_loop()
        if isinstance(self._embeddings, str):
            raise NotSupported(self._embeddings)
        return self._embeddings

    async def prepared(self, specs: Seq[SequenceSpec]) -> list[SequenceSpec]:
        """Do for the sequences of one request what may take long, before they are queued; return them with what was found.

        What the disk has of their beginnings is brought into memory, and DRY's breakers are looked for in the vocabulary, which would
        hold up everybody in a step. Raises: Unavailable.
        """
        await self._ready_loop().recall(specs)
        first = specs[0]  # all sample alike
        if self.model.heeds is not None or not dries(first.sampling):
            return list(specs)
        search = partial(dry_breaker_tokens, self.model.vocabulary, first.sampling.dry_sequence_breakers)
        found = await self.tokenized(search, sys.maxsize, first.key)  # however few they are, in a thread
        return [attrs.evolve(spec, dry_breakers=found) for spec in specs]

    def open(self, specs: Seq[SequenceSpec], *, since_s: float = 0.0, is_expected: bool = False) -> EventStream:
        """Submit the sequences of one request, which was received `since_s` ago, all or none; return the stream of their events.

        Their `timeout_s` counts from when it was received. One that `expect` has let pass `is_expected`, and is not weighed again: what it
        had no room for then has come since. Raises: as `check_accepting` · ContextExceeded.
        """
        received_at = trio.current_time() - since_s
        specs = [spec if spec.timeout_s is None else attrs.evolve(spec, timeout_s=spec.timeout_s - since_s) for spec in specs]
        first, loop = specs[0], self._ready_loop()
        if first.timeout_s is not None and first.timeout_s <= 0:
            raise DeadlineExceeded("timeout_s passed before the prompt was read", param="timeout_s")
        if not is_expected:
            self.check_accepting(len(specs), key=first.key, priority=first.priority, timeout_s=first.timeout_s)
        stream = loop.open(specs, n_bytes_max=self._stream_n_bytes_max)
        if first.request_id:
            timelines = tuple(loop.scheduler.timeline(seq_id) for seq_id in stream.seq_ids)
            self.records.add(Record(first.request_id, first.key, created=int(time.time()), received_at=received_at, timelines=timelines))
        return stream

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool, key: str = "") -> list[int]:
        """Return the token ids of `text` without holding up other requests. Raises: Unavailable · TokenizeFailed."""
        tokenize = partial(self.model.vocabulary.tokenize, text, add_special=add_special, parse_special=parse_special)
        return await self.tokenized(tokenize, len(text), key)

    async def prompt_tokens(self, texts: Seq[str], *, is_conversation: bool, key: str = "") -> list[list[int]]:
        """`cllm.text.prompt.prompt_tokens` of each without holding up other requests. Raises: Unavailable · TokenizeFailed."""
        vocabulary = self.model.vocabulary

        def tokenize() -> list[list[int]]:
            return [prompt_tokens(vocabulary, text, is_conversation=is_conversation) for text in texts]

        return await self.tokenized(tokenize, sum(map(len, texts)), key)

    async def tokenized(self, tokenize: Callable[[], T], n_chars: int, key: str = "", vocabulary: Vocabulary | None = None) -> T:
        """Return what `tokenize` makes of texts of `n_chars`, in a thread if that may take long, at which keys take turns. `vocabulary` is
        the one that does it, if not the model's. Others have their turn before each, so that many short texts hold nobody up.

        Raises: Unavailable · TokenizeFailed.
        """
        await trio.lowlevel.checkpoint()
        n_inline = getattr(vocabulary or self.model.vocabulary, "n_chars_inline", N_CHARS_INLINE)  # another process may keep one waiting
        try:
            if n_chars <= n_inline:
                return call_foreign(tokenize)
            return await self._tokenizing[n_chars > N_CHARS_SHORT].run(partial(call_foreign, tokenize), key)
        except ModelDied:  # and the next one takes long to load, or there will be none
            self._ready_loop()  # says so where the server drains, and the model is closed already
            raise _anew() from None

    async def grammar(
        self, model: ServedModel, source: GrammarSource | Callable[[], GrammarSource], *, timeout_s: float, key: str = ""
    ) -> Grammar:
        """The compiled grammar of `source`, or of what that writes in a thread.

        Raises: GrammarInvalid, also after `timeout_s` · Unavailable · NotSupported.
        """
        if model.grammars is None:
            raise NotSupported("this model's answers cannot be held to a grammar here")
        return await self._desk.compiled(model.grammars, source, timeout_s=timeout_s, key=key)

    def sequences(self) -> list[SequenceView]:
        """The sequences under way, waiting ones included, in order of service."""
        return [] if self._loop is None else self._loop.scheduler.views()

    def health(self) -> Health:
        """Whether work is being done while there is work: a step that runs longer than the watchdog allows is not."""
        if self.phase is EnginePhase.STOPPED:
            return Health(ok=False, reason="the engine has stopped")
        stalled_s = self._stalled_s(trio.current_time())
        if stalled_s > self._watchdog_s:
            return Health(ok=False, reason=f"no step has ended for {math.floor(stalled_s)} s")
        return Health(ok=True)

    def _stalled_s(self, now: float) -> float:
        loop, embeddings = self._loop, self._embeddings
        stalled_s = 0.0 if loop is None else loop.stalled_s(now)
        return stalled_s if isinstance(embeddings, str) else max(stalled_s, embeddings.loop.stalled_s(now))

    # --- what the lifecycle tells -------------------------------------------------------------------------------------

    def ready(self, model: ServedModel, loop: Loop, embeddings: Embeddings | str = "no embeddings are served") -> None:
        """The model is loaded and its loop runs; so is what gives vectors, or it is said why nothing does."""
        self._model, self._loop, self._embeddings = model, loop, embeddings
        loop.on_layout = self._laid_out
        self.progress = 1.0
        self.phase = EnginePhase.READY

    def _laid_out(self, model: StepModel) -> None:
        """Its cells lie otherwise now: what is told of it is told anew. What one sequence may have stays as it was promised, if it can.

        So does how many may run: if more come than there are parts, the pool is back.
        """
        assert self._model is not None
        assert self._loop is not None
        self._model = attrs.evolve(
            self._model,
            info=model.info,
            capabilities=model.capabilities,
            n_cells=model.n_cells,
            n_slots=model.n_slots,
            n_ctx=self._loop.scheduler.limits.n_ctx,
        )

    def drain(self) -> None:
        """Accept nothing more."""
        if self.phase is not EnginePhase.STOPPED:
            self.phase = EnginePhase.DRAINING

    def stopped(self) -> None:
        """The loop has ended; nothing will be answered any more."""
        self.phase = EnginePhase.STOPPED

    def _ready_loop(self) -> Loop:
        if self.phase is EnginePhase.DRAINING:
            raise Unavailable("the server is draining", retry_after_s=5.0, code="draining")
        if self.phase is EnginePhase.STOPPED:
            raise Unavailable("the engine has stopped", retry_after_s=5.0, code="stopped")
        _ = self.model  # raises while loading
        assert self._loop is not None
        return self._loop


def _keys_to_ask(scheduler: Scheduler) -> Collection[str]:
    """The keys that are not at their caps, those that would be let in before the others first; of many keys these alone."""
    accounts = {account.key: account for account in scheduler.accounts}
    idle = Account()

    def account_of(key: str) -> Account:
        return accounts.get(key, idle)

    def is_below_cap(key: str) -> bool:
        cap = scheduler.key_cap(key)
        return cap is None or account_of(key).n_under_way < cap

    def n_in_queue(key: str) -> int:
        return account_of(key).n_coming + account_of(key).n_waiting

    def n_tokens_owed(key: str) -> float:
        return account_of(key).owed.tokens()

    weights = scheduler.limits.key_weights
    below = list(filter(is_below_cap, weights or ("",)))
    if len(below) <= N_KEYS_FEW:
        return sorted(below, key=n_tokens_owed)
    return likeliest(below, weights, n_in_queue, n_tokens_owed)


def _anew() -> Unavailable:
    return Unavailable("the model is being started anew", retry_after_s=5.0, code="loading")


def new_engine(settings: Settings) -> Engine:
    """Return an engine without a model."""
    return Engine(metrics=Metrics(), stream_n_bytes_max=settings.stream_buffer_kb * 1024, watchdog_s=settings.watchdog_s)
