"""Schedules sequences on a model that reads and tells text: nobody here knows its tokens, so they are counted as it counts them."""

from __future__ import annotations

from collections import Counter

import attrs

from cllm.backend import StreamChat, StreamEnd, StreamRequest, StreamText, StreamUsage
from cllm.engine.events import Delta, Event, Finished, FinishReason, TokenLogprob, Usage
from cllm.engine.limits import Limits
from cllm.engine.sequence import Phase, Sequence, SequenceSpec
from cllm.engine.streaming import SAMPLING, SHARING, StreamScheduler, check_heeded
from cllm.engine.waiting.fairness import GENERATED_TOKEN
from cllm.errors import GenerationFailed
from cllm.text.parts import Arguments, CallBegun, Content, Part, Reasoning
from cllm.text.transcript import told
from cllm.text.unread import NoVocabulary, UnreadPrompt

_FIELDS = {  # of a `StreamChat`, by the names of the requests' fields that ask for them
    "tools": "tools",
    "tool_choice": "tool_choice",
    "parallel_tool_calls": "parallel_tool_calls",
    "reasoning_effort": "reasoning_effort",
    "chat_template_kwargs": "template_variables",
    "continue_final_message": "continue_final_message",
}
_NO_CHAT = StreamChat(messages=())


class TextScheduler(StreamScheduler):
    """A `StreamScheduler` for a model without a vocabulary. A sequence's tokens are zeros, of which only the number counts."""

    def __init__(self, limits: Limits, vocabulary: NoVocabulary, heeds: frozenset[str], n_logprobs_max: int = 0) -> None:
        super().__init__(limits, vocabulary, heeds, n_logprobs_max)
        self._book = vocabulary
        self._too_many: Counter[tuple[object, str]] = Counter()  # that was counted by guesses, to be taken off what comes: no count falls

    def take_text(self, event: StreamText, now: float) -> list[Event]:
        """Settle what the model told. What it tells of sequences that have ended is not heard."""
        sequence = self._started.get(event.seq_id)
        if sequence is None or event.seq_id not in self._sequences or sequence.cancelled:
            return []
        parts = _parts(event)
        if not (parts or event.n_tokens or event.logprobs):
            return []  # it has not begun by that: another model can still answer in its place
        self._now = now
        events: list[Event] = []
        self._count(sequence, event.n_tokens, now)
        if sequence.first_token_at is None and not self._begin(sequence, now, events):
            return events
        sequence.tokens += [0] * event.n_tokens
        self._add("n_generated", event.n_tokens, sequence)
        try:
            logprobs = self._logprobs(event) if event.logprobs else None
        except GenerationFailed as error:
            self._fail(sequence, error, events)
            return events
        parts, match = sequence.transcript.push_parts(parts, event.n_tokens)
        text, others = told(parts)
        events.append(Delta(event.seq_id, text, [0] * event.n_tokens, logprobs, parts=others))
        if match is not None:
            self._finish(sequence, FinishReason.STOP, match, now, events)
        return events

    def take_end(self, end: StreamEnd, now: float) -> list[Event]:
        """See `StreamScheduler.take_end`."""
        sequence = self._started.get(end.seq_id)
        events = super().take_end(end, now)
        if end.usage is not None and sequence is not None and events and isinstance(events[-1], Finished):
            guessed = events[-1].usage
            events[-1].usage = told = _as_told(guessed, end.usage)
            self._add("n_prompt_tokens", told.n_prompt - guessed.n_prompt, sequence)
            self._add("n_generated", told.n_generated - guessed.n_generated, sequence)
            self._add("n_prefill_rows", told.n_prompt - told.n_cached - (guessed.n_prompt if guessed.has_begun else 0))
            self.memory.totals.n_prompt_tokens_saved += told.n_cached
        return events

    def _count_prompt(self, sequence: Sequence) -> None:
        self._add("n_prompt_tokens", sequence.n_prompt, sequence)

    def _add(self, total: str, n: int, sequence: Sequence | None = None) -> None:
        """Add to a total, and to that of the sequence's key."""
        for counted in (self.totals, *([] if sequence is None else [sequence.account])):
            n_more = n - self._too_many[counted, total]
            self._too_many[counted, total] = max(-n_more, 0)
            setattr(counted, total, getattr(counted, total) + max(n_more, 0))

    def _logprobs(self, event: StreamText) -> list[TokenLogprob]:
        number = self._book.number
        return [
            TokenLogprob(number(one.token), one.logprob, [(number(token), logprob) for token, logprob in one.top]) for one in event.logprobs
        ]

    def _can_go_on(self, sequence: Sequence) -> bool:
        return sequence.first_token_at is None  # a text's tokens may be counted later

    def _count(self, sequence: Sequence, n_tokens: int, now: float) -> None:
        """Charge for them. The cells are those of the prompt: how many there are is the model's business."""
        n_rows = sequence.n_prompt if sequence.phase is Phase.PREFILL else 0
        self._service.step(n_rows, n_tokens, now - self._heard_at, is_full=self._is_full)
        self._heard_at = now
        if n_rows:
            self.memory.prefilled(sequence, n_rows)
            self._add("n_prefill_rows", n_rows)
            sequence.move(Phase.DECODE)
        sequence.account.charge(GENERATED_TOKEN * n_tokens)

    def _check_heeded(self, spec: SequenceSpec) -> None:
        chat = spec.prompt.said if isinstance(spec.prompt, UnreadPrompt) else ""
        asked = {"ignore_eos": "ignore_eos" not in self._heeds and spec.stopping.ignore_eos}
        asked["t_max_predict_ms"] = spec.stopping.lines_s is not None
        asked["prompt"] = "prompt" not in self._heeds and not isinstance(spec.prompt, UnreadPrompt)
        if isinstance(chat, StreamChat):
            for field, name in _FIELDS.items():
                asked[field] = name not in self._heeds and getattr(chat, name) != getattr(_NO_CHAT, name)
        check_heeded(spec, self._heeds, asked, n_logprobs_max=self._n_logprobs_max)


def text_request_of(sequence: Sequence) -> StreamRequest:
    """Return what a model without a vocabulary is asked for."""
    spec = sequence.spec
    request = StreamRequest(
        n_tokens_max=spec.stopping.max_tokens,
        seed=spec.seed,
        stop=spec.stopping.stop,
        n_tokens_min=max(0, spec.stopping.min_tokens - sequence.n_generated),
        ignore_eos=spec.stopping.ignore_eos,
        form=spec.form,
        n_logprobs=spec.n_logprobs,
        repeat_last_n=spec.sampling.repeat_last_n,
        **{name: getattr(spec.sampling, name) for name in SAMPLING},
        **{name: getattr(spec, name) for name in SHARING},
    )
    if not isinstance(spec.prompt, UnreadPrompt):
        return attrs.evolve(request, prompt=tuple(spec.prompt))
    said = spec.prompt.said
    return attrs.evolve(request, text=said) if isinstance(said, str) else attrs.evolve(request, chat=said)


def _parts(event: StreamText) -> list[Part]:
    parts: list[Part] = []
    if event.reasoning:
        parts.append(Reasoning(event.reasoning))
    if event.content:
        parts.append(Content(event.content))
    for call in event.calls:
        if call.name:
            parts.append(CallBegun(call.call, call.name))
        if call.arguments:
            parts.append(Arguments(call.call, call.arguments))
    return parts


def _as_told(guessed: Usage, usage: StreamUsage) -> Usage:
    return attrs.evolve(
        guessed,
        n_prompt=usage.n_prompt,
        n_cached=usage.n_cached,
        n_generated=usage.n_generated,
        n_reasoning=usage.n_reasoning or guessed.n_reasoning,
    )
