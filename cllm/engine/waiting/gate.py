"""Who may join the queue: refuses, before any work is put into it, what would be too much or wait in vain; and says when to come back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import attrs

from cllm.engine.waiting.fairness import GENERATED_TOKEN, NO_WORK, Account, Accounts, Work
from cllm.errors import DeadlineExceeded, QuotaExceeded, Unavailable

RETRY_AFTER_S: Final = (1.0, 120.0)  # what a refused client is told at least and at most
MEMORY_S: Final = 20.0  # of work, after which the rate remembers a third of what was
RATE_AFTER_S: Final = 2.0  # of work; before, no rate is known and nobody is refused for it
N_GENERATED_GUESS: Final = 128  # of an answer, before any has ended
PROMPT_ROWS_GUESS: Final = 1.0  # for each generated token
PROMPT_ROWS_MAX: Final = 1e6
N_ANSWERS_AVERAGED: Final = 32
CERTAINTY: Final = 2.0  # a deadline counts as missed when it would be at so many times the measured rate


@attrs.define
class _Rate:
    """Work in a second, in tokens of a prompt, of which what is long ago fades."""

    done: float = 0.0
    seconds: float = 0.0
    worked_s: float = 0.0

    def add(self, work: float, seconds: float, kept: float) -> None:
        self.done = self.done * kept + work
        self.seconds = self.seconds * kept + seconds
        self.worked_s += seconds

    @property
    def per_s(self) -> float | None:
        return self.done / self.seconds if self.done and self.worked_s >= RATE_AFTER_S else None


class Service:
    """How fast work is done and how long answers are, both measured."""

    def __init__(self) -> None:
        self.n_generated_mean = float(N_GENERATED_GUESS)
        self._n_prefill_rows = 0.0
        self._n_decode_rows = 0.0
        self._recent = _Rate()
        self._full = _Rate()
        self._n_answers = 0

    def step(
        self, n_prefill_rows: int, n_decode_rows: int, seconds: float, *, is_full: bool = True, generated: float = GENERATED_TOKEN
    ) -> None:
        """Count a step, in which a generated token was as much as `generated` of a prompt.

        In one that is not full nobody else waited, so that it does not say how fast work could be done.
        """
        kept = math.exp(-seconds / MEMORY_S)  # prompts that go at once may take longer than that, and are not all there is to know
        work = Work(n_prefill_rows, n_decode_rows).tokens(generated)
        for rate in (self._recent, self._full) if is_full else (self._recent,):
            rate.add(work, seconds, kept)
        self._n_prefill_rows = self._n_prefill_rows * kept + n_prefill_rows
        self._n_decode_rows = self._n_decode_rows * kept + n_decode_rows

    def answer(self, n_generated: int) -> None:
        """Count an answer that has ended."""
        self._n_answers = min(self._n_answers + 1, N_ANSWERS_AVERAGED)
        self.n_generated_mean += (n_generated - self.n_generated_mean) / self._n_answers

    @property
    def rate(self) -> float | None:
        """Work done in a second while others wait, in tokens of a prompt; None as long as too little was measured, or nothing was done."""
        return self._full.per_s

    @property
    def recent_rate(self) -> float | None:
        """The same of late, whether there was more to do or not."""
        return self._recent.per_s

    @property
    def prompt_rows(self) -> float:
        """Rows of prompts for each generated token; a guess, as long as nothing was."""
        if not self._n_decode_rows:
            return PROMPT_ROWS_GUESS
        # What was long ago fades to next to nothing, and any number over that is infinite.
        return min(self._n_prefill_rows / self._n_decode_rows, PROMPT_ROWS_MAX)

    def work(self, n_prompt: int, n_generated_max: int) -> Work:
        """What a sequence will probably cost."""
        return Work(n_prompt, min(n_generated_max, self.n_generated_mean))


@attrs.frozen
class Behind:
    """Those who wait and are less urgent than a newcomer, and what they will probably cost."""

    n_waiting: int = 0
    work: Work = NO_WORK
    own_work: Work = NO_WORK  # of the newcomer's key


NOBODY: Final = Behind()


@attrs.frozen(eq=False)
class Coming:
    """Sequences that were let in, while their prompts are read."""

    account: Account
    n_sequences: int
    priority: int


@attrs.frozen(kw_only=True)
class Newcomer:
    """What a request wants of the queue, as far as it is known before its prompt is."""

    n_sequences: int = 1
    key: str = ""
    timeout_s: float | None = None
    is_urgent: bool = False  # more so than any that waits, and somebody makes room
    work_running: Work = NO_WORK  # what is probably done until one of those who run has ended; none: one more could run now
    behind: Behind = NOBODY
    generated_token: float = GENERATED_TOKEN  # what one took of late, in tokens of a prompt


class Gate:
    """Weighs a newcomer against the queue."""

    def __init__(
        self,
        accounts: Accounts,
        service: Service,
        *,
        n_waiting_max: int,
        wait_max_s: float | None,
        caps: Mapping[str, int],
        cap: int | None,
    ) -> None:
        self._accounts = accounts
        self._service = service
        self._n_waiting_max = n_waiting_max
        self._wait_max_s = wait_max_s
        self._caps = dict(caps)
        self._cap = cap  # of keys that have none of their own

    def check(self, newcomer: Newcomer, fresh_work: Work = NO_WORK) -> None:
        """Let a newcomer pass, or say why not. `fresh_work` is what will certainly be done before it.

        Raises: QuotaExceeded · Unavailable · DeadlineExceeded.
        """
        account = self._accounts.seen(newcomer.key)
        self._check_quota(account, newcomer)
        self._check_queue(account, newcomer)
        generated = newcomer.generated_token
        rate = self._service.rate
        if rate is None or newcomer.is_urgent:
            return
        wait_s = (self._tokens_before(account, generated, newcomer.behind) + newcomer.work_running.tokens(generated)) / rate
        if self._wait_max_s is not None and wait_s > self._wait_max_s:
            retry_after_s = bearable(wait_s - self._wait_max_s)
            raise Unavailable(f"the wait would be about {wait_s:.0f} s", retry_after_s=retry_after_s, code="wait_too_long")
        if newcomer.timeout_s is not None and min(wait_s, fresh_work.tokens(generated) / rate) > CERTAINTY * newcomer.timeout_s:
            raise DeadlineExceeded(f"timeout_s: the wait would be about {wait_s:.0f} s", param="timeout_s", code="wait_too_long")

    def cap(self, key: str) -> int | None:
        """Sequences that a key may have under way; None: as many as it likes."""
        return self._caps.get(key, self._cap)

    def _check_quota(self, account: Account, newcomer: Newcomer) -> None:
        cap = self.cap(account.key)
        if cap is not None and account.n_under_way + newcomer.n_sequences > cap:
            message = f"this key may have {cap} completions under way, and has {account.n_under_way}"
            raise QuotaExceeded(message, retry_after_s=self._next_end_s(account, newcomer.generated_token))

    def _check_queue(self, account: Account, newcomer: Newcomer) -> None:
        """A full queue still takes who finds less than its size of others as urgent, and from a key with less than its part of it, so that
        neither the less urgent nor a key shuts the others out: twice its size at most.
        """
        n_waiting = sum(other.n_coming + other.n_waiting for other in self._accounts) + newcomer.n_sequences
        finds_room = n_waiting - newcomer.behind.n_waiting <= self._n_waiting_max
        if n_waiting <= 2 * self._n_waiting_max and (
            finds_room or account.n_coming + account.n_waiting + newcomer.n_sequences <= self._n_waiting_max * self._part(account)
        ):
            return
        ahead = newcomer.behind if n_waiting <= 2 * self._n_waiting_max else NOBODY  # of those behind, some must have gone then, too
        retry_after_s = self._retry_after_s(account, newcomer.generated_token, ahead)
        raise Unavailable("the queue is full", retry_after_s=retry_after_s, code="queue_full")

    def _retry_after_s(self, account: Account, generated: float, behind: Behind) -> float:
        """Seconds until what waits now before a newcomer is probably served, and half of what runs, which is what of it is left."""
        rate = self._service.rate
        if rate is None:
            return RETRY_AFTER_S[0]
        return bearable((self._tokens_before(account, generated, behind) + self._answer_tokens(self._n_running, generated) / 2) / rate)

    def _tokens_before(self, account: Account, generated: float, behind: Behind = NOBODY) -> float:
        """What is done before a newcomer of this key: all that waits at most, and of its own what its part of the service can do."""
        owed = Work.of(other.owed for other in self._accounts) - behind.work
        return min(owed.tokens(generated), (account.owed - behind.own_work).tokens(generated) / self._part(account))

    def _part(self, account: Account) -> float:
        """The part of the whole that this key is due when it waits too. Alone, everything."""
        if sum(other.n_waiting > 0 for other in self._accounts if other is not account) == 0:
            return 1.0
        return account.weight / (account.weight + sum(other.weight for other in self._accounts if other.n_waiting and other is not account))

    def _next_end_s(self, account: Account, generated: float) -> float:
        """Seconds until one of this key's sequences has probably ended: all that run go on together."""
        rate = self._service.recent_rate
        if rate is None:
            return RETRY_AFTER_S[0]
        one_s = self._answer_tokens(max(self._n_running, 1), generated) / rate
        return bearable(
            self._tokens_before(account, generated) / rate + one_s if not account.n_running else one_s / (account.n_running + 1)
        )

    @property
    def _n_running(self) -> int:
        return sum(account.n_running for account in self._accounts)

    def _answer_tokens(self, n_running: int, generated: float) -> float:
        """What is done from an answer's beginning to its end, beside as many that go on together."""
        return Work(n_generated=self._service.n_generated_mean * n_running).tokens(generated)


def bearable(seconds: float) -> float:
    """Return what a refused client is told, of what it would be."""
    least, most = RETRY_AFTER_S
    return min(max(seconds, least), most)
