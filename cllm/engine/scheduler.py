"""Decides which sequences run, and settles what becomes of them: the queue, its gate, who is let in, what is told, and how each ends.

Pure and synchronous: time comes in as an argument, news goes out as events. What is computed when, the kinds of it say.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterable, Iterator

import attrs

from cllm.backend import Vocabulary
from cllm.engine.cost.curve import DEFAULT_CURVE
from cllm.engine.cost.model import CostModel
from cllm.engine.events import Delta, Event, Failed, Finished, FinishReason, TokenLogprob
from cllm.engine.failures import too_late, unread, without_token
from cllm.engine.limits import Limits, memory_limits, n_live_max_of, offload_of
from cllm.engine.making import SequenceMaker
from cllm.engine.memory.cells import Cells
from cllm.engine.memory.dealing import Memory
from cllm.engine.memory.prices import Prices
from cllm.engine.sequence import FINISHED, PREFILL, Miss, Phase, Sequence, SequenceSpec
from cllm.engine.timeline import Timeline
from cllm.engine.views import SequenceView, Totals, usage_of, view_of
from cllm.engine.waiting.fairness import GENERATED_TOKEN, NO_WORK, PROMPT_TOKEN, Account, Accounts, Work
from cllm.engine.waiting.gate import Behind, Coming, Gate, Newcomer, Service
from cllm.engine.waiting.queue import Queue, order
from cllm.errors import ContextExceeded, GenerationFailed, RequestError

N_DEADLINES_SPARE = 64  # ended sequences whose deadlines are kept before they are cleared away


class Scheduler:
    """What is the same before every kind of model. One caller; every method returns at once.

    `StepScheduler` plans the steps of a model that computes what it is told, `StreamScheduler` stands before one that batches by itself.
    """

    def __init__(self, limits: Limits, vocabulary: Vocabulary, cost: CostModel | None = None) -> None:
        self.limits = limits
        if cost is None:
            cost = CostModel(DEFAULT_CURVE, n_rows_max=limits.n_rows_max, measured=False, apart=limits.apart)
        self.cost = cost
        prices = Prices(self.cost)
        self.memory = Memory(memory_limits(limits), offload_of(limits, prices), prices)
        self.totals = Totals()
        self._vocabulary = vocabulary
        self._n_live_max = n_live_max_of(limits)
        self._sequences: dict[int, Sequence] = {}  # all that have not ended
        self._accounts = Accounts(limits.key_weights)
        self._maker = SequenceMaker(vocabulary, self._accounts)
        self._generated_token = GENERATED_TOKEN  # what one takes, in tokens of a prompt; where nothing was measured, what it is charged
        self._queue = Queue(self._accounts, limits.patience_s)
        self._coming: dict[Coming, None] = {}
        self._service = Service()
        self._gate = Gate(
            self._accounts,
            self._service,
            n_waiting_max=limits.n_waiting_max,
            wait_max_s=limits.wait_max_s,
            caps=limits.key_caps,
            cap=limits.key_cap,
        )
        self._running: list[Sequence] = []  # PREFILL and DECODE, by order of service
        self._marked: list[Sequence] = []  # cancelled, not yet freed
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, seq_id), ended sequences included until due
        self._now = 0.0
        self._n_arrived = 0
        self._newest: Sequence | None = None

    @property
    def cells(self) -> Cells:
        """Who holds how many cells; another object once they lie otherwise."""
        return self.memory.cells

    # --- what the shell says ------------------------------------------------------------------------------------------

    def check_room(self, now: float, *, n_sequences: int = 1, key: str = "", priority: int = 0, timeout_s: float | None = None) -> None:
        """Let sequences pass that may join the queue now; the shell asks before it puts work into a request.

        Raises: QuotaExceeded · Unavailable · DeadlineExceeded.
        """
        work_running = self._work_until_one_ends(priority)
        newcomer = Newcomer(
            n_sequences=n_sequences,
            key=key,
            timeout_s=timeout_s,
            is_urgent=work_running == NO_WORK and self._queue.is_first(priority),
            work_running=work_running,
            behind=self._behind(key, priority),
            generated_token=self._generated_token,
        )
        self._gate.check(newcomer, NO_WORK if timeout_s is None else self._queue.work_before(key, priority, now))

    def expect(self, n_sequences: int, *, key: str = "", priority: int = 0) -> Coming:
        """Keep room in the queue for sequences that `check_room` let pass, while their prompts are read; until `expect_no_more`."""
        coming = Coming(self._accounts.of(key), n_sequences, priority)
        self._coming[coming] = None
        coming.account.n_coming += n_sequences
        return coming

    def expect_no_more(self, coming: Coming) -> None:
        """They are submitted next, or will not come. May be called again."""
        if coming in self._coming:
            del self._coming[coming]
            coming.account.n_coming -= coming.n_sequences

    def _work_until_one_ends(self, priority: int) -> Work:
        """What is probably done until one of those who run has ended, all going on together; none if there is room before."""
        n_running = len(self._running)
        if not n_running or not self._is_full or any(sequence.spec.priority > priority for sequence in self._running):
            return NO_WORK
        n_left = min(sequence.n_max - len(sequence.tokens) for sequence in self._running)
        return Work(n_generated=n_running * min(n_left, self._service.n_generated_mean / (n_running + 1)))

    def _behind(self, key: str, priority: int) -> Behind:
        """Those who wait, and who are expected, and are less urgent."""
        behind = self._queue.behind(key, priority)
        n_coming = sum(coming.n_sequences for coming in self._coming if coming.priority > priority)
        return attrs.evolve(behind, n_waiting=behind.n_waiting + n_coming)

    def check_length(self, spec: SequenceSpec) -> None:
        """Raises: ContextExceeded for a prompt that leaves no room for an answer, however long it waited."""
        if len(spec.prompt) >= self.limits.n_ctx:
            raise ContextExceeded(len(spec.prompt), self.limits.n_ctx)

    def submit(self, spec: SequenceSpec, now: float) -> int:
        """Queue a sequence; return its id.

        Raises: ContextExceeded when it could never be served.
        """
        assert spec.prompt, "a prompt has at least one token"
        self.check_length(spec)
        self._n_arrived += 1
        sequence = self._maker.make(spec, self._n_arrived, now, self.limits)
        other = self._other_choice(sequence)
        try:  # there may be no memory to look for a prompt of a million tokens
            self.memory.arrived(sequence, is_another=other is not None)
            sequence.work = self._service.work(self._n_new(sequence, other), sequence.n_max - sequence.n_prompt)
        except BaseException:
            self.memory.ends_waiting(sequence)
            raise
        self._newest = sequence
        self._sequences[sequence.seq_id] = sequence
        sequence.timeline.note(now, "queued", n_prompt=sequence.n_prompt, n_before=len(self._queue))
        self._queue.add(sequence)
        if sequence.deadline is not None:
            self._remember_deadline(sequence.deadline, sequence.seq_id)
        self.totals.n_submitted += 1
        return sequence.seq_id

    def cancel(self, seq_id: int) -> None:
        """Mark a sequence that nobody waits for; its end is met before the next step. Ended ones are ignored."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None and not sequence.cancelled:
            sequence.cancelled = True
            self._marked.append(sequence)

    def timeline(self, seq_id: int) -> Timeline:
        """Return what happens to a sequence that has not ended; it is kept up to date."""
        return self._sequences[seq_id].timeline

    @property
    def has_deadlines(self) -> bool:
        """Whether somebody's time may be over soon, as far as that is known without looking."""
        return bool(self._deadlines)

    def sweep_waiting(self, now: float) -> list[Event]:
        """While a step runs, end those who wait and whom nobody waits for, or whose time is over: they have no part in it. Return their
        events.
        """
        self._now = now
        events: list[Event] = []
        self._sweep(now, events, only_waiting=True)
        return events

    def end_all(self, error: RequestError) -> list[Event]:
        """End every sequence with `error`: the engine goes down, or its grace is over."""
        events: list[Event] = []
        for sequence in list(self._sequences.values()):
            self._fail(sequence, error, events, keep=False)  # a step that still runs writes to their slots
        self._marked.clear()
        return events

    # --- how things stand ---------------------------------------------------------------------------------------------

    @property
    def n_sequences(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    @property
    def n_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._queue)

    @property
    def accounts(self) -> Iterable[Account]:
        """Those of the keys that have asked for something."""
        return self._accounts

    def _waiting(self) -> Iterator[Sequence]:
        """Those who are counted by `n_waiting`."""
        return iter(self._queue)

    @property
    def _is_full(self) -> bool:
        """Whether work is done as fast as it can be: somebody waits, or nobody else could run."""
        return self.n_waiting > 0 or len(self._running) >= self._n_live_max

    @property
    def n_waiting_max(self) -> int:
        """Sequences that the queue takes."""
        return self.limits.n_waiting_max

    def key_cap(self, key: str) -> int | None:
        """Sequences that a key may have under way; None: as many as it likes."""
        return self._gate.cap(key)

    @property
    def n_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self._running)

    def views(self) -> list[SequenceView]:
        """All sequences that have not ended, running ones first, each in order of service."""
        return [view_of(sequence) for sequence in (*self._running, *self._waiting())]

    def check(self) -> None:
        """Assert the invariants; for tests, and cheap enough for an idle moment."""
        self.memory.check(self._running)
        assert len(self._running) + self.n_waiting == len(self._sequences)
        assert self._running == sorted(self._running, key=order)
        assert len(self._running) == sum(account.n_running for account in self._accounts)
        self._queue.check()
        for sequence in self._waiting():
            assert sequence.phase is Phase.WAITING
            assert sequence.n_held == sequence.n_computed == 0

    # --- who leaves, and who is let in --------------------------------------------------------------------------------

    def _sweep(self, now: float, events: list[Event], *, only_waiting: bool = False) -> None:
        marked, self._marked = self._marked, []
        for sequence in marked:
            if only_waiting and sequence.phase not in (Phase.WAITING, FINISHED):
                self._marked.append(sequence)
            elif sequence.phase is not FINISHED:
                self._finish(sequence, FinishReason.CANCELLED, None, now, events)
        in_step: list[tuple[float, int]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            entry = heapq.heappop(self._deadlines)
            late = self._sequences.get(entry[1])
            if late is None:
                continue
            if only_waiting and late.phase is not Phase.WAITING:
                in_step.append(entry)
            elif late.first_token_at is not None:  # a text's tokens may be counted later
                self._finish(late, FinishReason.LENGTH, "timeout", now, events)
            else:
                self._fail(late, too_late(), events)
        for entry in in_step:
            heapq.heappush(self._deadlines, entry)

    def _remember_deadline(self, deadline: float, seq_id: int) -> None:
        if len(self._deadlines) > 2 * len(self._sequences) + N_DEADLINES_SPARE:  # mostly of sequences that ended long before theirs
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._sequences]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, seq_id))

    def _fits(self, sequence: Sequence) -> bool:
        # One spare cell for each running sequence, so that a newcomer is not the reason for a preemption at the very next step.
        n_spare = len(self._running) + 1 if self._running else 0
        return len(self._running) < self._n_places() and self.memory.fits(sequence, n_spare)

    def _n_places(self) -> int:
        """How many may run at once now."""
        return self._n_live_max

    def _start(self, sequence: Sequence, now: float) -> None:
        self._queue.admit(sequence, now)
        sequence.move(PREFILL)
        self.memory.take(sequence)
        sequence.waits_from = self.totals.n_prefill_rows
        if sequence.admitted_at is None:
            sequence.admitted_at = now
            sequence.prefill_from = self.totals.n_prefill_rows
            n_cached = self.memory.n_coming(sequence)
            # Charged at once: otherwise the same key would be given the next place too.
            sequence.account.charge(PROMPT_TOKEN * (sequence.n_prompt - n_cached))
            self._count_prompt(sequence)
        bisect.insort(self._running, sequence, key=order)
        if sequence.is_restoring:  # how much is cached is known when it has come
            sequence.timeline.note(now, "admitted", slot=sequence.slot)
        else:
            note_cached(sequence, now, "admitted", slot=sequence.slot)

    def _count_prompt(self, sequence: Sequence) -> None:
        self.totals.n_prompt_tokens += sequence.n_prompt
        sequence.account.n_prompt_tokens += sequence.n_prompt

    # --- what comes of a token ----------------------------------------------------------------------------------------

    def _accept(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float, events: list[Event]) -> None:
        """Take a drawn token: append it, tell of it, and see whether it was the last."""
        if sequence.first_token_at is None:
            if not self._begin(sequence, now, events):
                return
            if len(sequence.tokens) >= sequence.n_max:  # only the prompt was wanted
                self._finish(sequence, FinishReason.LENGTH, None, now, events)
                return
        if not 0 <= token < self._vocabulary.n_tokens:  # as of a model whose vocabulary is another one's
            self._fail(sequence, GenerationFailed(f"the model told token {token}, which its vocabulary does not have"), events)
            return
        tokens = sequence.tokens
        tokens.append(token)
        is_forced = sequence.sampler.due is not None
        sequence.sampler.observe(token)
        grammar = sequence.sampler.grammar
        if grammar is not None and grammar.failure is not None:
            self._fail(sequence, without_token(sequence), events)
            return
        self.totals.n_generated += 1
        sequence.account.n_generated += 1
        n_tokens = len(tokens)
        logprobs = None if logprob is None else [logprob]
        can_end = n_tokens >= sequence.n_final_from
        if can_end and token in sequence.final_tokens and not is_forced:  # what we wrote ourselves ends nothing
            events.append(Delta(sequence.seq_id, "", [token], logprobs))
            reason: str | int | None = token if token in sequence.spec.stopping.stop_token_ids else None
            self._finish(sequence, FinishReason.STOP, reason, now, events)
            return
        transcript = sequence.transcript
        try:
            text, parts, match = transcript.push(token, can_stop=can_end)
        except Exception as error:  # what a model writes knows no bounds: a mistake in reading it costs the one answer
            self._fail(sequence, unread(error), events)
            return
        events.append(Delta(sequence.seq_id, text, [token], logprobs, parts=parts))
        if match is not None:
            self._finish(sequence, FinishReason.STOP, match, now, events)
        elif transcript.is_done or (grammar is not None and grammar.is_done):
            self._finish(sequence, FinishReason.STOP, None, now, events)
        elif n_tokens >= sequence.n_max or (sequence.lines_s is not None and _has_had_its_time(sequence, text, now) and can_end):
            self._finish(sequence, FinishReason.LENGTH, None, now, events)
        else:
            if grammar is not None:
                sequence.sampler.grammar_waits = transcript.is_reasoning
            if due := transcript.due():
                sequence.sampler.force(due)

    def _begin(self, sequence: Sequence, now: float, events: list[Event]) -> bool:
        """Note the first token, unless it comes too late."""
        if sequence.deadline is not None and now >= sequence.deadline:
            self._fail(sequence, too_late(), events)
            return False
        sequence.first_token_at = now
        sequence.timeline.note(now, "first_token")
        return True

    def _finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None, now: float, events: list[Event]) -> None:
        self._end(sequence)
        try:
            text, parts, match = sequence.transcript.finish()
        except Exception as error:  # as above
            self._tell_failed(sequence, unread(error), events)
            return
        if match is not None and reason is FinishReason.STOP:  # in what was held back; an answer that was cut stays one, and half a call
            stop_reason = match
        if reason is FinishReason.STOP and sequence.transcript.n_calls:
            reason = FinishReason.TOOL_CALLS
        sequence.timeline.end(now, "finished", reason=reason.value, n_generated=sequence.n_generated)
        if reason is FinishReason.CANCELLED:
            self.totals.n_cancelled += 1
        else:
            self.totals.n_finished += 1
            self._service.answer(sequence.n_generated)
        events.append(Finished(sequence.seq_id, reason, stop_reason, usage_of(sequence, now), text, parts))

    def _fail(self, sequence: Sequence, error: RequestError, events: list[Event], *, keep: bool = True) -> None:
        self._end(sequence, keep=keep)
        self._tell_failed(sequence, error, events)

    def _tell_failed(self, sequence: Sequence, error: RequestError, events: list[Event]) -> None:
        sequence.timeline.end(self._now, "failed", error=str(error.code or error.type))
        self.totals.n_failed += 1
        events.append(Failed(sequence.seq_id, error))

    # --- moves between phases -----------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, *, keep: bool = True) -> None:
        if sequence.phase is Phase.WAITING:
            self._wait_no_more(sequence)
        else:
            self._free(sequence, keep=keep)
        sequence.move(FINISHED)
        del self._sequences[sequence.seq_id]

    def _wait_no_more(self, sequence: Sequence) -> None:
        """Take it out of where those who wait are."""
        self._queue.remove(sequence)
        self.memory.ends_waiting(sequence)

    def _free(self, sequence: Sequence, *, keep: bool, comes_back: bool = False) -> None:
        self._running.remove(sequence)
        if keep:
            self.memory.keep(sequence, comes_back=comes_back)
        else:
            self.memory.forget(sequence)

    def _other_choice(self, sequence: Sequence) -> Sequence | None:
        """The sequence that came just before, if it is another choice of the same request."""
        newest = self._newest
        return newest if newest is not None and newest.spec.prompt is sequence.spec.prompt else None

    def _n_new(self, sequence: Sequence, other: Sequence | None) -> int:
        """Rows that a newcomer's prompt will probably need: not those that are known, nor those that the `other` choice computes."""
        is_coming = other is not None and other.phase is not FINISHED
        if is_coming and sequence.may_share and self.memory.limits.shares_live:
            return 1
        return sequence.n_prompt - self.memory.n_known(sequence)


def note_cached(sequence: Sequence, now: float, event: str, **facts: int) -> None:
    """Tell how much was cached, and for the first admission from which position on it was not, and why."""
    miss = sequence.miss if sequence.n_preempted == 0 else None
    if miss in (None, Miss.NONE):
        sequence.timeline.note(now, event, **facts, n_cached=sequence.n_computed)
    else:
        sequence.timeline.note(now, event, **facts, n_cached=sequence.n_computed, miss_from=sequence.n_computed, miss=miss.value)


def _has_had_its_time(sequence: Sequence, text: str, now: float) -> bool:
    """Whether an answer that is to be some lines, soon, has some and was not soon."""
    assert sequence.lines_s is not None, "it was looked at"
    sequence.has_line = sequence.has_line or "\n" in text
    return sequence.has_line and sequence.first_token_at is not None and now - sequence.first_token_at >= sequence.lines_s
