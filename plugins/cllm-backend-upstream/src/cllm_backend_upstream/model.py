"""The model that a server is given: each sequence is a request to an upstream, in a thread with a Trio of its own."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from typing import Final

import trio

from cllm.backend import Measure, ModelInfo, StreamBeat, StreamEnd, StreamEvent, StreamRequest
from cllm.errors import LoadFailed, ModelDied, NotHeeded, NotSupported, RequestError
from cllm_backend_upstream.answers import Answer
from cllm_backend_upstream.asking import body_of, path_of
from cllm_backend_upstream.discovery import Found
from cllm_backend_upstream.exchange import Answered, Exchange
from cllm_backend_upstream.failures import Broken, Failure, KeyRefused, Silent
from cllm_backend_upstream.health import watch
from cllm_backend_upstream.kinds import N_LOGPROBS_MAX
from cllm_backend_upstream.limits import limited
from cllm_backend_upstream.lines import EventLines
from cllm_backend_upstream.options import Options
from cllm_backend_upstream.places import Places
from cllm_backend_upstream.pool import Pool, Upstream, measures_of

log = logging.getLogger("cllm.upstream")

USAGE_S: Final = 2.0  # for which the usage is waited for once the answer has ended
START_S: Final = 10.0
BEAT_S: Final = 5.0


class UpstreamModel:
    """See `cllm.backend.StreamModel`."""

    vocabulary = None

    def __init__(self, options: Options, found: Found) -> None:
        self.info = ModelInfo(
            name=found.model,
            architecture=f"upstream ({found.kind_name})",
            n_params=0,
            size_bytes=0,
            n_ctx_train=found.n_ctx,
            n_embd=0,
        )
        self.n_live_max = options.n_live_max
        self.n_ctx = found.n_ctx
        self.n_logprobs_max = N_LOGPROBS_MAX
        self.heeds = found.kind.heeds
        self.pool = Pool(options.urls, options.n_places)
        self.places = Places(self.pool)
        self._options = options
        self._found = found
        self._exchange = Exchange(options)
        self._tell: Callable[[StreamEvent], None] = lambda _event: None
        self._scopes: dict[int, trio.CancelScope] = {}  # of the sequences under way; the thread's
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._runs = threading.Event()
        self._is_closed = False
        in_context = contextvars.copy_context().run  # in which the server has said of which model log lines are
        self._thread = threading.Thread(target=in_context, args=(self._run,), name="upstream", daemon=True)

    # --- what the server calls ----------------------------------------------------------------------------------------

    def open(self, tell: Callable[[StreamEvent], None]) -> None:
        """See `StreamModel.open`. Raises: LoadFailed."""
        self._tell = tell
        self._thread.start()
        self._runs.wait(START_S)
        if self._token is None:
            raise LoadFailed("upstream: the thread that asks the upstreams did not begin")

    def start(self, seq_id: int, request: StreamRequest) -> None:
        """See `StreamModel.start`."""
        if not self._do(self._begin, seq_id, request):
            raise ModelDied("the thread that asks the upstreams has ended")

    def cancel(self, seq_id: int) -> None:
        """See `StreamModel.cancel`. The connection is closed at once."""
        self._do(self._give_up, seq_id)

    def close(self) -> None:
        """See `StreamModel.close`."""
        self._is_closed = True
        self._do(self._leave)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def measures(self) -> list[Measure]:
        """See `cllm.backend.Measures`."""
        return [measure for upstream in self.pool.upstreams for measure in measures_of(upstream)]

    def _do(self, what: Callable[..., None], *arguments: object) -> bool:
        """Have something done in the thread; return whether it still runs."""
        if self._token is None or not self._thread.is_alive():
            return False
        try:
            self._token.run_sync_soon(what, *arguments)
        except trio.RunFinishedError:
            return False
        return True

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except Exception as error:
            log.error("the thread that asks the upstreams has ended: %r", error)
        finally:
            self._runs.set()
            for seq_id in list(self._scopes):
                self._say(StreamEnd(seq_id, "the thread that asks the upstreams has ended"))

    async def _main(self) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self._token = trio.lowlevel.current_trio_token()
            self._runs.set()
            if self._is_closed:  # it began too late to be told to leave
                self._leave()
            nursery.start_soon(watch, self.pool, self.places, self._exchange, self._options, self._found.kind)
            nursery.start_soon(self._beat)

    async def _beat(self) -> None:
        """Say that a wait for an upstream is no hanging: how long it may last is said by the options."""
        while True:
            await trio.sleep(BEAT_S)
            if self._scopes:
                self._say(StreamBeat())

    def _leave(self) -> None:
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()

    def _begin(self, seq_id: int, request: StreamRequest) -> None:
        if self._nursery is None or self._is_closed:
            return
        self._scopes[seq_id] = trio.CancelScope()
        self._nursery.start_soon(self._serve, seq_id, request)

    def _give_up(self, seq_id: int) -> None:
        scope = self._scopes.get(seq_id)
        if scope is not None:
            scope.cancel()

    def _say(self, event: StreamEvent) -> None:
        if not self._is_closed:
            self._tell(event)

    # --- one sequence -------------------------------------------------------------------------------------------------

    async def _serve(self, seq_id: int, request: StreamRequest) -> None:
        """Answer a sequence, whatever happens. A cancelled one is not heard of again."""
        scope = self._scopes[seq_id]
        end: StreamEnd | None = None
        with scope:
            try:
                end = await self._answered(seq_id, request)
            except RequestError as refusal:
                end = StreamEnd(seq_id, refusal=refusal)
            except Exception as error:  # ours: it may not take the others with it
                log.exception("a request to an upstream failed unexpectedly")
                end = StreamEnd(seq_id, f"{type(error).__name__}: {error}".replace("\n", " "))
        del self._scopes[seq_id]
        if end is not None and not scope.cancelled_caught:
            self._say(end)

    async def _answered(self, seq_id: int, request: StreamRequest) -> StreamEnd:
        """Ask one upstream after the other, as long as nothing has been told. Raises: RequestError."""
        tried: list[Upstream] = []
        lacking: dict[Upstream, NotSupported] = {}  # who does not serve this: no trouble of theirs, unless another one does
        failure: Failure | None = None
        while True:
            async with self.places.place(tried) as upstream:
                if upstream is None:
                    if lacking and failure is None:
                        raise next(iter(lacking.values()))
                    raise self.pool.why_not(trio.current_time(), failure, self._options.health_s)
                tried.append(upstream)
                answer = Answer(seq_id, request.stop, request.n_logprobs)
                try:
                    end = await self._asked(upstream, request, answer)
                    for one, refusal in lacking.items():
                        self._note(one, Broken(str(refusal)))
                    return end
                except NotSupported as refusal:
                    if isinstance(refusal, NotHeeded):  # it is a field of the request that it does not do
                        raise
                    lacking[upstream] = refusal
                except Failure as raised:
                    failure = raised
                    self._note(upstream, failure)
                    if answer.has_begun:
                        return StreamEnd(seq_id, f"{upstream.url}: {failure}")

    async def _asked(self, upstream: Upstream, request: StreamRequest, answer: Answer) -> StreamEnd:
        """Have one upstream answer. Raises: Failure · RequestError."""
        self.pool.asks(upstream)
        with trio.CancelScope(deadline=trio.current_time() + self._options.first_token_s) as patience:
            try:
                asked = await limited(request, upstream.url, self._found, self._exchange)
                body = body_of(asked, self._found.model, self._found.kind)
                async with self._exchange.posted(upstream.url + path_of(asked), body) as answered:
                    await self._read(answered, answer, patience, self._token_s(request))
            except Failure:
                if not answer.is_finished:  # what comes after its end is the usage alone
                    raise
        if patience.cancelled_caught and not answer.is_finished:
            raise Silent("it fell silent" if answer.has_begun else "no first token in time")
        end = answer.end()
        upstream.answered()
        return end

    def _token_s(self, request: StreamRequest) -> float:
        """How long nothing may be told. Some servers tell no call in pieces: where tools may be called, one may be computed meanwhile."""
        may_call = request.chat is not None and request.chat.tools
        return max(self._options.token_s, self._options.first_token_s) if may_call else self._options.token_s

    async def _read(self, answered: Answered, answer: Answer, patience: trio.CancelScope, token_s: float) -> None:
        lines = EventLines()
        while piece := await answered.piece():
            for data in lines.feed(piece):
                text = answer.take(data)
                if text is not None:
                    self._say(text)
                    patience.deadline = trio.current_time() + token_s
                if answer.is_done:
                    return
            if answer.is_finished:
                patience.deadline = min(patience.deadline, trio.current_time() + USAGE_S)

    def _note(self, upstream: Upstream, failure: Failure) -> None:
        was_well = upstream.is_well
        upstream.failed(failure, trio.current_time())
        if isinstance(failure, KeyRefused):
            log.error("upstream %s: %s", upstream.url, failure)
        elif was_well and not upstream.is_well:
            log.warning("upstream %s is down: %s", upstream.url, failure)
        else:
            log.warning("upstream %s failed: %s", upstream.url, failure)
