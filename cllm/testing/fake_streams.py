"""A deterministic `StreamModel`: what `FakeModel` says, told by a thread of its own, or token by token when a test says so."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from cllm.backend import (
    CONTRACT_VERSION,
    Batch,
    Logits,
    ModelSpec,
    OnProgress,
    Probe,
    StreamEnd,
    StreamEvent,
    StreamModel,
    StreamRequest,
    StreamText,
    StreamToken,
    StreamUsage,
    Vocabulary,
)
from cllm.errors import InvalidRequest, LoadAborted, StepFailed
from cllm.testing.fake import FakeModel

HEEDS = frozenset({"temperature", "cache_salt", "cache_prompt"})  # no request finds anything of another
HEEDS_MORE = HEEDS | {"n_tokens_min", "n_logprobs", "seed", "top_k", "top_p", "min_p", "repeat_penalty"}
# Prompts that `FakeStreamBackend`'s models cannot begin, that end their process, and that they refuse as a client's mistake.
UNWANTED, DEADLY, MISTAKEN = "\x05", "\x06", "\x07"
BEARS = "bears "  # begins a path that ends in a file's

CHILD_S = 600  # of a process that a model may begin: longer than any test, which is to end it


@attrs.define(eq=False)
class _Live:
    request: StreamRequest
    slot: int
    tokens: list[int]  # that have no cell yet
    n_generated: int = 0
    n_cells: int = 0
    known: set[int] = attrs.field(factory=set)  # tokens that have one


class FakeStreamModel:
    """Greedy, whatever is asked. `go` tells one token of each live sequence; `by_itself` has a thread do that as long as there are any."""

    def __init__(self, *, n_live_max: int = 4, n_ctx: int = 256, n_tokens_to_end: int | None = None, by_itself: bool = True) -> None:
        self._model = FakeModel(n_cells=n_live_max * n_ctx, n_slots=n_live_max, n_ctx_train=n_ctx, n_tokens_to_end=n_tokens_to_end)
        self.info = self._model.info
        self.n_live_max = n_live_max
        self.n_ctx = n_ctx
        self.heeds = HEEDS
        self.n_cells: int | None = None
        self.started: list[StreamRequest] = []
        self.cancelled: list[int] = []
        self.fails: Callable[[StreamRequest], str] = lambda _request: ""  # why `start` raises
        self._tell: Callable[[StreamEvent], None] = lambda _event: None
        self._live: dict[int, _Live] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._by_itself = by_itself
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def vocabulary(self) -> Vocabulary | None:
        """See `StreamModel.vocabulary`."""
        return self._model.vocabulary

    @property
    def n_live(self) -> int:
        """Sequences under way."""
        return len(self._live)

    def open(self, tell: Callable[[StreamEvent], None]) -> None:
        """See `StreamModel.open`."""
        self._tell = tell
        if self._by_itself:
            self._thread.start()

    def start(self, seq_id: int, request: StreamRequest) -> None:
        """See `StreamModel.start`."""
        if why := self.fails(request):
            raise StepFailed(why)
        with self._changed:
            slot = min(set(range(self.n_live_max)) - {live.slot for live in self._live.values()}, default=None)
            if slot is None:
                raise StepFailed(f"{self.n_live_max} sequences at once, and no more")
            self.started.append(request)
            self._live[seq_id] = _Live(request, slot, list(request.prompt))
            self._changed.notify()

    def cancel(self, seq_id: int) -> None:
        """See `StreamModel.cancel`."""
        with self._changed:
            self.cancelled.append(seq_id)
            self._leave(seq_id)

    def close(self) -> None:
        """See `StreamModel.close`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    def go(self) -> None:
        """Tell the next token of every live sequence."""
        with self._changed:
            for seq_id in list(self._live):
                self._next(seq_id)

    def end(self, seq_id: int, error: str) -> None:
        """Let a sequence fail."""
        with self._changed:
            self._leave(seq_id)
            self._tell(StreamEnd(seq_id, error))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._live)
                if self._closed:
                    return
            self.go()

    def _next(self, seq_id: int) -> None:
        live = self._live[seq_id]
        token = self._say(seq_id, live)
        live.tokens = [token]
        live.n_generated += 1
        if token in live.request.end_tokens or self._is_cut(live):
            self._leave(seq_id)
            self._tell(self._ended(seq_id, live))

    def _is_cut(self, live: _Live) -> bool:
        return live.n_generated == live.request.n_tokens_max or live.n_cells + len(live.tokens) >= self.n_ctx

    def _say(self, seq_id: int, live: _Live) -> int:
        """Draw a sequence's next token, and tell it."""
        logits = self._logits(live).ravel()
        logits[list(live.request.barred_tokens)] = -np.inf
        token = int(np.argmax(logits))
        self._tell(self._told(seq_id, token))
        return token

    def _told(self, seq_id: int, token: int) -> StreamEvent:
        return StreamToken(seq_id, token)

    def _ended(self, seq_id: int, live: _Live) -> StreamEnd:
        return StreamEnd(seq_id)

    def _logits(self, live: _Live) -> Logits:
        n = len(live.tokens)
        batch = Batch(n)
        batch.n_rows, batch.n_outputs = n, 1
        batch.tokens[:] = live.tokens
        batch.positions[:] = range(live.n_cells, live.n_cells + n)
        batch.slots[:] = live.slot
        batch.outputs[-1] = 1
        live.n_cells += n
        live.known.update(live.tokens)
        return self._model.step(batch)

    def _leave(self, seq_id: int) -> None:
        live = self._live.pop(seq_id, None)
        if live is not None:
            self._model.drop(live.slot)


class HeedingFakeModel(FakeStreamModel):
    """The same that draws as it is asked to, and tells how likely its tokens were."""

    n_logprobs_max = 5

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.heeds = HEEDS_MORE

    def _say(self, seq_id: int, live: _Live) -> int:
        raw = self._logits(live).ravel()
        token = _drawn(raw, live)
        if (n := live.request.n_logprobs) is None:
            self._tell(StreamToken(seq_id, token))
            return token
        logprobs = raw - np.logaddexp.reduce(raw)
        top = tuple((int(one), float(logprobs[one])) for one in np.argsort(-logprobs, kind="stable")[:n])
        self._tell(StreamToken(seq_id, token, float(logprobs[token]), top))
        return token


def _drawn(raw: npt.NDArray[np.float32], live: _Live) -> int:
    request, logits = live.request, raw.astype(np.float64)
    logits[list(request.barred_tokens)] = -np.inf
    if live.n_generated < request.n_tokens_min:
        logits[list(request.end_tokens)] = -np.inf
    known = list(live.known)
    logits[known] = np.where(logits[known] > 0, logits[known] / request.repeat_penalty, logits[known] * request.repeat_penalty)
    if request.temperature == 0:
        return int(np.argmax(logits))
    likely = np.exp((logits - logits.max()) / request.temperature)
    order = np.argsort(-likely, kind="stable")
    before = np.cumsum(likely[order]) - likely[order]  # what the likelier ones have
    is_out = (before >= request.top_p * likely.sum()) | (likely[order] < request.min_p)
    if request.top_k:
        is_out[request.top_k :] = True
    likely[order[1:][is_out[1:]]] = 0.0
    return int(np.random.default_rng((request.seed, live.n_generated)).choice(likely.size, p=likely / likely.sum()))


class FakeTextModel(FakeStreamModel):
    """The same without a vocabulary: it reads text, and of a conversation what was said last; it tells text, and what it took."""

    @property
    def vocabulary(self) -> Vocabulary | None:
        """None."""
        return None

    def start(self, seq_id: int, request: StreamRequest) -> None:
        """See `StreamModel.start`."""
        if not request.prompt:
            tokens = self._model.vocabulary.tokenize(_said(request), add_special=False, parse_special=False)
            request = attrs.evolve(request, prompt=tuple(tokens))
        super().start(seq_id, request)

    def _told(self, seq_id: int, token: int) -> StreamEvent:
        return StreamText(seq_id, self._model.vocabulary.token_bytes(token).decode("utf-8", "replace"))

    def _ended(self, seq_id: int, live: _Live) -> StreamEnd:
        usage = StreamUsage(n_prompt=len(live.request.prompt), n_generated=live.n_generated)
        return StreamEnd(seq_id, is_cut=self._is_cut(live), usage=usage)


def _said(request: StreamRequest) -> str:
    if request.text is not None:
        return request.text
    assert request.chat is not None
    return str(request.chat.messages[-1]["content"])


def _touchy(request: StreamRequest) -> str:
    if request.prompt == tuple(DEADLY.encode()):
        os.kill(os.getpid(), signal.SIGKILL)
    if request.prompt == tuple(MISTAKEN.encode()):
        raise InvalidRequest("prompt: not this one", param="prompt")
    return "not this one" if request.prompt == tuple(UNWANTED.encode()) else ""


def _stay_closed(_tell: Callable[[StreamEvent], None]) -> None:
    raise RuntimeError("no thread left")


def make_isolated() -> object:
    """For the contract suite: such a model in a process of its own."""
    from cllm.serve.worker.model import WorkerBackend

    return WorkerBackend(FakeStreamBackend(), "cllm.testing.fake_streams:make_backend", hang_s=60.0)


class FakeStreamBackend:
    """A backend that gives `FakeStreamModel`s, or what `make` makes.

    With a path of `BEARS` and a file's it also starts a process for each model, and adds its id to the file as a line.
    Models of the path `closed` cannot be opened, and those of `roomy` have as many cells as the machine happens to have room for.
    """

    contract_version = CONTRACT_VERSION
    knows_models = True

    def __init__(self, make: type[FakeStreamModel] = FakeStreamModel) -> None:
        self._make = make

    def probe(self) -> Probe:
        """Always available, only by name."""
        return Probe(available=True, reason="a model without weights that schedules itself, for tests")

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StreamModel:
        """Give a `FakeStreamModel`. See `Backend.load`."""
        if not on_progress(1.0):
            raise LoadAborted("the load was asked to stop")
        if spec.path.startswith(BEARS):
            child = subprocess.Popen(["sleep", str(CHILD_S)])
            with open(spec.path.removeprefix(BEARS), "a") as children:
                children.write(f"{child.pid}\n")
        model = self._make(**{name: int(value) for name, value in spec.options.items()})  # type: ignore[arg-type]
        model.fails = _touchy
        if spec.path == "closed":
            model.open = _stay_closed  # type: ignore[method-assign, assignment]
        if spec.path == "roomy":
            model.n_cells = spec.n_cells or time.monotonic_ns()
            model.info = attrs.evolve(model.info, n_ctx_train=model.n_cells, cells_bytes=os.getpid())
        return model


def make_backend() -> FakeStreamBackend:
    """What an entry point names."""
    return FakeStreamBackend()


def make_text_backend() -> FakeStreamBackend:
    """The same, of models without a vocabulary."""
    return FakeStreamBackend(FakeTextModel)


def make_heeding_backend() -> FakeStreamBackend:
    """The same, of models that draw as they are asked to."""
    return FakeStreamBackend(HeedingFakeModel)
