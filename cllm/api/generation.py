"""One request's completions, from submission to the last event: opened, timed, counted, and never left behind."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

import attrs
import msgspec
import structlog
from quart import g

from cllm.api.context import Context, cleanup
from cllm.api.prompts import by_length, text_of
from cllm.api.sampling_fields import Wanted
from cllm.backend import Vocabulary
from cllm.engine.events import Delta, Event, Failed, Finished, TokenLogprob
from cllm.engine.sequence import SequenceSpec
from cllm.errors import InvalidRequest, RequestError
from cllm.serve.streams import EventStream, Sink
from cllm.text.parts import Content, Part, written
from cllm.text.unread import UnreadPrompt

log = structlog.get_logger("cllm.api")


@attrs.define(eq=False)
class Completion:
    """A completion in full."""

    text: str  # its content
    logprobs: list[TokenLogprob] | None
    finished: Finished
    parts: list[Part] = attrs.field(factory=list)  # what is not content, where the answer was read for it
    is_content_last: bool = True  # whether nothing of these came behind the last of the content
    prompt_logprobs: list[TokenLogprob] = attrs.field(factory=list)  # where asked for, of the prompt's second token and so on


class Generation:
    """The sequences of one request."""

    def __init__(self, context: Context, stream: EventStream, n: int, endpoint: str, started_at: float) -> None:
        self.n = n
        self._context = context
        self._stream = stream
        self._endpoint = endpoint
        self._n_open = n
        self._started_at = started_at
        self._last_at: list[float | None] = [None] * n  # when each completion's latest tokens were taken
        self._is_begun = False
        self._closed = False
        self._texts: list[list[str]] | None = [[] for _ in range(n)] if context.settings.log_prompts else None
        self._request_id = g.request_id
        self._model = context.engine.model.name

    async def next_events(self) -> list[tuple[int, Event]]:
        """Wait for news; return all there is as (place in the request, event). Empty when every completion has ended."""
        try:
            events = await self._stream.__anext__()
        except StopAsyncIteration:
            return []
        self._observe(events)
        return events

    def divert(self, sink: Sink) -> None:
        """Let deltas go to `sink` while `next_events` waits; see `EventStream`."""

        def observed(index: int, delta: Delta) -> bool:
            if not sink(index, delta):
                return False
            if delta.tokens:
                self._observe_delta(index, time.perf_counter())
            if self._texts is not None:
                self._texts[index].append(_logged(delta))
            return True

        self._stream.sink = observed

    async def first_events(self) -> list[tuple[int, Event]]:
        """The first news, before which no status is sent. Raises: what a completion failed with, or any RequestError of the engine."""
        events = await self.next_events()
        for _, event in events:
            if isinstance(event, Failed):
                raise event.error
            break
        return events

    async def complete(self) -> list[Completion]:
        """Wait for the end. Raises: what a completion failed with; the others are given up."""
        texts: list[list[str]] = [[] for _ in range(self.n)]
        parts: list[list[Part]] = [[] for _ in range(self.n)]
        logprobs: list[list[TokenLogprob]] = [[] for _ in range(self.n)]
        of_prompts: list[list[TokenLogprob]] = [[] for _ in range(self.n)]
        ends: dict[int, Finished] = {}
        is_content_last = [True] * self.n

        def sort(index: int, event: Delta | Finished) -> None:
            is_content_last[index] = _sort(event, texts[index], parts[index], is_content_last[index])

        def take(index: int, delta: Delta) -> bool:
            sort(index, delta)
            if delta.logprobs is not None:
                logprobs[index] += delta.logprobs
            if delta.prompt_logprobs is not None:
                of_prompts[index] += delta.prompt_logprobs
            return True

        self.divert(take)
        while len(ends) < self.n:
            for index, event in await self.next_events():
                if type(event) is Delta:
                    take(index, event)
                elif type(event) is Finished:
                    sort(index, event)
                    ends[index] = event
                else:
                    assert isinstance(event, Failed)
                    raise event.error
        return [
            Completion("".join(texts[i]), logprobs[i] or None, ends[i], parts[i], is_content_last[i], of_prompts[i]) for i in range(self.n)
        ]

    def close(self) -> None:
        """Cancel what has not ended. May be called again."""
        if not self._closed:
            self._closed = True
            self._stream.cancel()
            if self._n_open:
                self._context.metrics.finishes.labels(self._endpoint, "cancelled").inc(self._n_open)

    def _observe(self, events: Sequence[tuple[int, Event]]) -> None:
        metrics, now = self._context.metrics, time.perf_counter()
        if self._texts is not None:
            self._log(self._texts, events)
        for index, event in events:
            if type(event) is Delta:
                if event.tokens and self._last_at[index] != now:  # what was taken together came together
                    self._observe_delta(index, now)
                continue
            self._n_open -= 1
            finish = event.reason.value if isinstance(event, Finished) else "error"
            metrics.finishes.labels(self._endpoint, finish).inc()
            if not self._n_open:
                metrics.end_to_end_s.observe(now - self._started_at)

    def _observe_delta(self, index: int, now: float) -> None:
        last_at = self._last_at[index]
        if last_at is not None:
            self._context.metrics.inter_token_s.observe(now - last_at)
        elif not self._is_begun:
            self._context.metrics.first_token_s.observe(now - self._started_at)
        self._last_at[index], self._is_begun = now, True

    def _log(self, texts: list[list[str]], events: Sequence[tuple[int, Event]]) -> None:
        for index, event in events:
            if not isinstance(event, Failed):
                texts[index].append(_logged(event))
            if isinstance(event, Finished):
                log.info("answer", model=self._model, request_id=self._request_id, index=index, text="".join(texts[index]))


def _sort(event: Delta | Finished, texts: list[str], parts: list[Part], is_content_last: bool) -> bool:
    """Put an event's content to the texts, and what else it has to the parts; return whether content came last, as it did before."""
    if event.parts is None:
        texts.append(event.text)
        return is_content_last or bool(event.text)
    for part in event.parts:
        if isinstance(part, Content):
            texts.append(part.text)
            is_content_last = is_content_last or bool(part.text)
        else:
            parts.append(part)
            is_content_last = False
    return is_content_last


def _logged(event: Delta | Finished) -> str:
    return event.text if event.parts is None else written(event.parts)


def _prompt_text(vocabulary: Vocabulary, prompt: Sequence[int]) -> str:
    if isinstance(prompt, UnreadPrompt):
        return prompt.said if isinstance(prompt.said, str) else msgspec.json.encode(prompt.said.messages).decode()
    return text_of(vocabulary, prompt) if vocabulary.n_tokens else str(list(prompt))


def check_room(context: Context, asked: Wanted, param: str, n_sequences: int | None = None) -> None:
    """Refuse what cannot be taken, before any work is put into it: `n_sequences`, or as many as `asked` says for one prompt.

    What passes has its room in the queue until `open_generation`, or until the exchange ends: others do not take it meanwhile.

    Raises: Unavailable · QuotaExceeded · DeadlineExceeded · InvalidRequest when it never could be.
    """
    n = asked.n if n_sequences is None else n_sequences
    n_max, cap = context.settings.queue_size, context.engine.key_cap(g.key)
    if n > n_max:
        raise InvalidRequest(f"{param}: {n} completions in one request, and this server queues {n_max} at most", param=param)
    if cap is not None and n > cap:
        raise InvalidRequest(f"{param}: {n} completions in one request, and this key may have {cap} under way", param=param)
    try:
        g.gives_up_room = context.engine.expect(n, key=g.key, priority=asked.priority, timeout_s=asked.timeout_s)
    except RequestError as error:
        context.engine.metrics.refused(error)
        raise
    cleanup().callback(g.gives_up_room)


async def open_generation(context: Context, specs: list[SequenceSpec], endpoint: str) -> Generation:
    """Submit a request's sequences; they are cancelled when the exchange ends before they do.

    `check_room` has let them pass. Raises: Unavailable · ContextExceeded · DeadlineExceeded.
    """
    if context.settings.log_prompts:
        for prompt in {id(spec.prompt): spec.prompt for spec in specs}.values():  # answers to one prompt share it
            text = await by_length(len(prompt), functools.partial(_prompt_text, context.engine.model.vocabulary, prompt))
            log.info("prompt", model=context.engine.model.name, request_id=g.request_id, text=text)
    specs = await context.engine.prepared(specs)
    g.gives_up_room()
    stream = context.engine.open(specs, since_s=time.perf_counter() - g.started_at, is_expected=True)
    generation = Generation(context, stream, len(specs), endpoint, g.started_at)
    cleanup().callback(generation.close)
    return generation
