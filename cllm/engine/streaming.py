"""Schedules sequences on a model that batches and samples by itself: who is let in when, and what comes of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import attrs

from cllm.backend import StreamEnd, StreamRequest, StreamToken, Vocabulary
from cllm.engine.events import Event, FinishReason, TokenLogprob
from cllm.engine.limits import Limits
from cllm.engine.sampling.params import SamplingParams
from cllm.engine.scheduler import Scheduler
from cllm.engine.sequence import Phase, Sequence, SequenceSpec
from cllm.engine.waiting.fairness import GENERATED_TOKEN
from cllm.errors import GenerationFailed, NotHeeded

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty")
"""Of `SamplingParams`, what a `StreamRequest` has too, by the same names."""

SHARING = ("cache_salt", "cache_prompt")
"""The same of `SequenceSpec`."""

_USUAL = SamplingParams()
_PLAIN = SequenceSpec(prompt=())
_OTHER = ("typical_p", "top_n_sigma", "dry_multiplier", "xtc_probability", "mirostat", "dynatemp_range", "logit_bias")
"""The rest of it that switches something on."""

_FORMS = {"json_schema": "response_format"}  # the kinds of a `StreamForm`; fields of the others are called as they are


N_DEATHS_MAX = 3  # of the model, between two tokens of a sequence that it worked on each time


@attrs.define(eq=False)
class Turn:
    """What is owed to the model and to clients."""

    started: list[Sequence] = attrs.field(factory=list)
    stopped: list[int] = attrs.field(factory=list)  # sequences that the model need not go on with
    events: list[Event] = attrs.field(factory=list)


class StreamScheduler(Scheduler):
    """The queue before a `StreamModel`. Nobody is preempted: what runs is out of reach.

    Its cells are a formality: as many as let every live sequence grow to its end.
    """

    def __init__(self, limits: Limits, vocabulary: Vocabulary, heeds: frozenset[str], n_logprobs_max: int = 0) -> None:
        super().__init__(limits, vocabulary)
        self._heeds = heeds
        self._n_logprobs_max = n_logprobs_max
        self._n_deaths: dict[int, int] = {}  # of those that the model died with since they had a token last
        self._started: dict[int, Sequence] = {}  # that the model works on, as far as it has been told
        self._heard_at = 0.0  # when a token came last

    def submit(self, spec: SequenceSpec, now: float) -> int:
        """See `Scheduler.submit`. Raises also: NotHeeded for what the model does not heed."""
        self._check_heeded(spec)
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
        while (sequence := self._queue.first(now)) is not None and self._fits(sequence):
            self._start(sequence, now)
        self.memory.take_moves()  # the model has no slots
        running = {sequence.seq_id: sequence for sequence in self._running}
        turn.stopped = [seq_id for seq_id in self._started if seq_id not in running]
        turn.started = [sequence for seq_id, sequence in running.items() if seq_id not in self._started]
        self._started = running
        return turn

    def take(self, told: StreamToken, now: float) -> list[Event]:
        """Settle a token that the model told. Those of sequences that have ended are not heard."""
        seq_id = told.seq_id
        sequence = self._started.get(seq_id)
        if sequence is None or sequence.seq_id not in self._sequences or sequence.cancelled:
            return []
        self._now = now
        events: list[Event] = []
        n_rows = len(sequence.tokens) - sequence.n_computed if sequence.phase is Phase.PREFILL else 0
        self._service.step(n_rows, 1 - bool(n_rows), now - self._heard_at, is_full=self._is_full)
        self._heard_at = now
        if n_rows:
            self.memory.prefilled(sequence, n_rows)
            self.totals.n_prefill_rows += n_rows
            sequence.move(Phase.DECODE)
        else:
            self.memory.decoded(sequence)
        sequence.account.charge(GENERATED_TOKEN)
        self._n_deaths.pop(seq_id, None)
        self._accept(sequence, told.token, _logprob_of(told), now, events)
        if seq_id in self._sequences:
            self.memory.reserve(sequence)
        return events

    def sweep_waiting(self, now: float) -> list[Event]:
        """See `Scheduler.sweep_waiting`. While another model takes the place of one that died, nobody is out of reach."""
        self._now = now
        events: list[Event] = []
        self._sweep(now, events, only_waiting=bool(self._started))
        return events

    def has_started(self, seq_id: int) -> bool:
        """Whether the model works on it, as far as it has been told."""
        return seq_id in self._started

    def take_end(self, end: StreamEnd, now: float) -> list[Event]:
        """Settle the end of a sequence that the model told."""
        sequence = self._started.pop(end.seq_id, None)
        if sequence is None or end.seq_id not in self._sequences:
            return []
        self._now = now
        events: list[Event] = []
        if end.error or end.refusal is not None:
            self._fail(sequence, end.refusal or GenerationFailed("the model failed on this request", code="stream_failed"), events)
        else:
            self._finish(sequence, FinishReason.LENGTH if end.is_cut else FinishReason.STOP, end.stop_reason, now, events)
        return events

    def take_death(self, now: float) -> list[Event]:
        """The model died with all that it worked on, and another one takes its place, which `turn` then begins anew on what they have.

        Nobody knows who brought it about. Who is there again and again without having come further is to blame, or at least unlucky.
        """
        self._now = now
        events: list[Event] = []
        for seq_id, sequence in self._started.items():
            n_deaths = self._n_deaths[seq_id] = self._n_deaths.get(seq_id, 0) + 1
            if seq_id in self._sequences and (n_deaths >= N_DEATHS_MAX or not self._can_go_on(sequence)):
                self._fail(sequence, GenerationFailed("the model failed on this request", code="stream_failed"), events)
        self._started = {}
        self._n_deaths = {seq_id: n for seq_id, n in self._n_deaths.items() if seq_id in self._sequences}
        return events

    def _can_go_on(self, sequence: Sequence) -> bool:
        """Whether another model could continue what was told. Where a form was half filled in, it would begin it anew."""
        return sequence.spec.form is None or sequence.n_generated == 0

    def _check_heeded(self, spec: SequenceSpec) -> None:
        check_heeded(spec, self._heeds, n_logprobs_max=self._n_logprobs_max)


def request_of(sequence: Sequence, vocabulary: Vocabulary) -> StreamRequest:
    """Return what the model is asked for: all of it, or what is left to be said after the tokens that an earlier one told."""
    spec = sequence.spec
    return StreamRequest(
        prompt=tuple(sequence.tokens),
        n_tokens_max=sequence.n_max - len(sequence.tokens),
        end_tokens=sequence.final_tokens,
        barred_tokens=vocabulary.end_tokens - sequence.final_tokens,
        n_tokens_min=max(0, spec.stopping.min_tokens - sequence.n_generated),
        seed=spec.seed,
        n_logprobs=spec.n_logprobs,
        form=spec.form,
        repeat_last_n=spec.sampling.repeat_last_n,
        **{name: getattr(spec.sampling, name) for name in SAMPLING},
        **{name: getattr(spec, name) for name in SHARING},
    )


def _logprob_of(told: StreamToken) -> TokenLogprob | None:
    return None if told.logprob is None else TokenLogprob(told.token, told.logprob, list(told.top))


def heeded(defaults: SamplingParams, heeds: frozenset[str], n_ctx: int) -> tuple[SamplingParams, list[str]]:
    """Return what is to hold for parameters that a request leaves out, less what the model would ignore or refuse, and the names of that.

    How short a window of repeats it can look at, the model alone knows: unasked, it is asked for none but the whole context.
    """
    left_out = [name for name in SAMPLING if name not in heeds and getattr(defaults, name) != getattr(_USUAL, name)]
    left_out += [name for name in _OTHER if getattr(defaults, name) != getattr(_USUAL, name)]
    if defaults.repeat_last_n is not None and ("repeat_last_n" not in heeds or defaults.repeat_last_n < n_ctx):
        left_out.append("repeat_last_n")
    return attrs.evolve(defaults, **{name: getattr(_USUAL, name) for name in left_out}), left_out


def check_heeded(
    spec: SequenceSpec, heeds: frozenset[str], further: Mapping[str, bool] = MappingProxyType({}), *, n_logprobs_max: int = 0
) -> None:
    """Refuse what the model would ignore, `further` fields that are asked for included. Raises: NotHeeded with the field's name."""
    sampling = spec.sampling
    asked = [name for name in SAMPLING if name not in heeds and getattr(sampling, name) != getattr(_USUAL, name)]
    asked += [name for name in SHARING if name not in heeds and getattr(spec, name) != getattr(_PLAIN, name)]
    asked += [name for name in _OTHER if getattr(sampling, name) != getattr(_USUAL, name)]
    others = {
        "logprobs": spec.n_logprobs is not None and "n_logprobs" not in heeds,
        "top_logprobs": (spec.n_logprobs or 0) > n_logprobs_max,
        "prompt_logprobs": spec.n_prompt_logprobs is not None,
        "response_format": spec.grammar is not None,  # the masks of a grammar are for logits
        "min_tokens": spec.stopping.min_tokens > 0 and "n_tokens_min" not in heeds,
        "repeat_last_n": sampling.repeat_penalty != 1 and sampling.repeat_last_n is not None and "repeat_last_n" not in heeds,
        "reasoning_budget": spec.answer is not None and spec.answer.n_reasoning_max is not None,
        "max_tokens": spec.stopping.max_tokens == 0,
    }
    if spec.form is not None:
        others[spec.form.field or _FORMS.get(spec.form.kind, spec.form.kind)] = spec.form.kind not in heeds
    asked += [name for name, is_asked in {**others, **further}.items() if is_asked]
    if asked:
        raise NotHeeded(f"this model's backend cannot do {asked[0]}", param=asked[0])
