"""Schedules sequences on a model that batches and samples by itself: who is let in when, and what comes of its tokens."""

from __future__ import annotations

import attrs

from cllm.backend import StreamRequest, Vocabulary
from cllm.engine.events import Event, FinishReason
from cllm.engine.fairness import GENERATED_TOKEN
from cllm.engine.params import SamplingParams
from cllm.engine.scheduler import Limits, Scheduler
from cllm.engine.sequence import Phase, Sequence, SequenceSpec
from cllm.errors import GenerationFailed, NotSupported

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
"""Of `SamplingParams`, what a `StreamRequest` has too, by the same names."""

_USUAL = SamplingParams()
_OTHER = ("typical_p", "top_n_sigma", "dry_multiplier", "xtc_probability", "mirostat", "dynatemp_range", "logit_bias")
"""The rest of it that switches something on."""


@attrs.define(eq=False)
class Turn:
    """What is owed to the model and to clients."""

    started: list[Sequence] = attrs.field(factory=list)
    stopped: list[int] = attrs.field(factory=list)  # sequences that the model need not go on with
    events: list[Event] = attrs.field(factory=list)


class StreamScheduler(Scheduler):
    """The queue before a `StreamModel`. The same as before steps, but that nobody is preempted: what runs is out of reach.

    Its cells are a formality: as many as let every live sequence grow to its end. `turn`, `take` and `take_end` stand for `plan` and
    `apply`.
    """

    def __init__(self, limits: Limits, vocabulary: Vocabulary, heeds: frozenset[str]) -> None:
        super().__init__(limits, vocabulary)
        self._heeds = heeds
        self._started: dict[int, Sequence] = {}  # that the model works on, as far as it has been told
        self._heard_at = 0.0  # when a token came last

    def submit(self, spec: SequenceSpec, now: float) -> int:
        """See `Scheduler.submit`. Raises also: NotSupported for what the model does not heed."""
        check_heeded(spec, self._heeds)
        return super().submit(spec, now)

    @property
    def next_deadline(self) -> float | None:
        """When `turn` is to be called at the latest."""
        return self._deadlines[0][0] if self._deadlines else None

    def turn(self, now: float) -> Turn:
        """Let in who may come in, and see who has left."""
        self._now = now
        if not self._started:
            self._heard_at = now
        turn = Turn()
        self._sweep(now, turn.events)
        self._admit(now, turn.events)
        self.memory.take_moves()  # the model has no slots
        running = {sequence.seq_id: sequence for sequence in self._running}
        turn.stopped = [seq_id for seq_id in self._started if seq_id not in running]
        turn.started = [sequence for seq_id, sequence in running.items() if seq_id not in self._started]
        self._started = running
        return turn

    def take(self, seq_id: int, token: int, now: float) -> list[Event]:
        """Settle a token that the model told. Those of sequences that have ended are not heard."""
        sequence = self._started.get(seq_id)
        if sequence is None or sequence.seq_id not in self._sequences or sequence.cancelled:
            return []
        self._now = now
        events: list[Event] = []
        n_rows = len(sequence.tokens) - sequence.n_computed if sequence.phase is Phase.PREFILL else 0
        self._service.step(n_rows, 1 - bool(n_rows), now - self._heard_at)
        self._heard_at = now
        if n_rows:
            self.memory.prefilled(sequence, n_rows)
            self.totals.n_prefill_rows += n_rows
            sequence.move(Phase.DECODE)
        else:
            self.memory.decoded(sequence)
        sequence.share.charge(GENERATED_TOKEN)
        self._accept(sequence, token, None, now, events)
        if seq_id in self._sequences:
            self.memory.reserve(sequence)
        return events

    def take_end(self, seq_id: int, error: str, now: float) -> list[Event]:
        """Settle the end of a sequence that the model told; one without an error ended for its length."""
        sequence = self._started.pop(seq_id, None)
        if sequence is None or seq_id not in self._sequences:
            return []
        self._now = now
        events: list[Event] = []
        if error:
            self._fail(sequence, GenerationFailed("the model failed on this request", code="stream_failed"), events)
        else:
            self._finish(sequence, FinishReason.STOP, None, now, events)
        return events

    def _make_way(self, sequence: Sequence) -> bool:
        return False


def request_of(sequence: Sequence) -> StreamRequest:
    """Return what the model is asked for."""
    spec = sequence.spec
    return StreamRequest(
        prompt=tuple(spec.prompt),
        n_tokens_max=sequence.n_max - sequence.n_prompt,
        end_tokens=sequence.final_tokens,
        seed=spec.seed,
        **{name: getattr(spec.sampling, name) for name in SAMPLING},
    )


def check_heeded(spec: SequenceSpec, heeds: frozenset[str]) -> None:
    """Refuse what the model would ignore. Raises: NotSupported with the field's name."""
    sampling = spec.sampling
    asked = [name for name in SAMPLING if name not in heeds and getattr(sampling, name) != getattr(_USUAL, name)]
    asked += [name for name in _OTHER if getattr(sampling, name) != getattr(_USUAL, name)]
    others = {
        "logprobs": spec.n_logprobs is not None,
        "prompt_logprobs": spec.n_prompt_logprobs is not None,
        "response_format": spec.grammar is not None,
        "min_tokens": spec.stopping.min_tokens > 0,
        "reasoning_budget": spec.answer is not None and spec.answer.n_reasoning_max is not None,
        "max_tokens": spec.stopping.max_tokens == 0,
    }
    asked += [name for name, is_asked in others.items() if is_asked]
    if asked:
        raise NotSupported(f"this model's backend cannot do {asked[0]}", param=asked[0])
