"""Who is served first: the order of the sequences that wait, and which of those that run gives way."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import attrs

from cllm.engine.sequence import Sequence
from cllm.engine.waiting.fairness import NO_WORK, Account, Accounts, Work
from cllm.engine.waiting.gate import NOBODY, Behind

N_FRESH_IN_A_ROW_MAX = 19  # then the one that has waited longest has its turn: none waits for ever


def order(sequence: Sequence) -> tuple[int, int]:
    """Return the rank of service, by which lines and those who run are kept; lower first."""
    return sequence.order


@attrs.define(eq=False)
class Line:
    """The waiting sequences of one key and priority, in order of arrival. Only a line's own order is settled here."""

    account: Account
    begun: list[Sequence] = attrs.field(factory=list)  # preempted ones: what was promised them comes first
    new: list[Sequence] = attrs.field(factory=list)
    work_begun: Work = NO_WORK  # what `begun` will probably cost
    work_new: Work = NO_WORK  # and `new`: thousands may wait, whenever somebody comes
    n_passed: int = 0  # fresh ones in a row that went before a late one

    def __len__(self) -> int:
        return len(self.begun) + len(self.new)

    @property
    def work(self) -> Work:
        """What all of them will probably cost."""
        return self.work_begun + self.work_new

    def put_in(self, sequence: Sequence) -> None:
        """Let `sequence` stand at its place. As long as it does, what it will probably cost stays the same."""
        bisect.insort(self._part_of(sequence), sequence, key=order)
        if sequence.admitted_at is None:
            self.work_new += sequence.work
        else:
            self.work_begun += sequence.work

    def take_out(self, sequence: Sequence) -> None:
        """Let `sequence` stand here no more."""
        self._part_of(sequence).remove(sequence)
        if sequence.admitted_at is None:
            self.work_new = self.work_new - sequence.work if self.new else NO_WORK  # no rounding errors are kept
        else:
            self.work_begun = self.work_begun - sequence.work if self.begun else NO_WORK

    def _part_of(self, sequence: Sequence) -> list[Sequence]:
        return self.new if sequence.admitted_at is None else self.begun

    def first(self, late_before: float) -> Sequence:
        """Return who is next. Whoever arrived before `late_before` has waited in vain already, and lets the newest go first.

        Not the oldest that is not late: by the time of its first token it mostly would be.
        """
        if self.begun:
            return self.begun[0]
        is_overloaded = self.new[0].arrived_at < late_before <= self.new[-1].arrived_at
        return self.new[-1] if is_overloaded and self.n_passed < N_FRESH_IN_A_ROW_MAX else self.new[0]

    def work_before(self, late_before: float) -> Work:
        """Return what those will probably cost that go before a newcomer in any case."""
        is_overloaded = bool(self.new) and self.new[0].arrived_at < late_before
        return self.work_begun if is_overloaded else self.work


class Queue:
    """The sequences that wait. First by priority, then by what their keys have been served, then by arrival.

    Within a key, as soon as one has waited for more than `patience_s`, the newest goes first, if it has not: when more comes than can be
    served, a queue in order of arrival makes everybody wait too long. Every twentieth time the oldest goes nevertheless.
    """

    def __init__(self, accounts: Accounts, patience_s: float | None = None) -> None:
        self._accounts = accounts
        self._patience_s = patience_s
        self._lines: dict[int, dict[str, Line]] = {}  # by priority, then by key; none is empty
        self._n_waiting = 0
        self._n_aside = 0

    def __len__(self) -> int:
        return self._n_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, by priority, by what their keys have been served, by arrival."""
        for _, lines in sorted(self._lines.items()):
            for line in sorted(lines.values(), key=_turn):
                yield from (*line.begun, *line.new)

    def first(self, now: float) -> Sequence | None:
        """Who is next; None when nobody waits."""
        if not self._lines:
            return None
        lines = self._lines[min(self._lines)]
        line = min(lines.values(), key=_turn) if len(lines) > 1 else next(iter(lines.values()))
        return line.first(self._late_before(now))

    def lighter(self, than: Sequence, now: float) -> list[Sequence]:
        """Who would be next of each key that may pass that of `than`, who is next of all, in the order of their turns."""
        late_before = self._late_before(now)
        firsts = [line.first(late_before) for line in sorted(self._lines[than.spec.priority].values(), key=_turn)]
        return [first for first in firsts if first.account.may_pass(than.account, first.work)]

    def is_first(self, priority: int) -> bool:
        """Say whether everybody who waits is less urgent."""
        return not self._lines or priority < min(self._lines)

    def behind(self, key: str, priority: int) -> Behind:
        """Return what waits that is less urgent than a newcomer."""
        n_waiting, work, own_work = 0, NO_WORK, NO_WORK
        for line in (line for rank, lines in self._lines.items() if rank > priority for line in lines.values()):
            line_work = line.work
            n_waiting += len(line)
            work += line_work
            own_work += line_work if line.account.key == key else NO_WORK
        return Behind(n_waiting, work, own_work) if n_waiting else NOBODY

    def work_before(self, key: str, priority: int, now: float) -> Work:
        """Return what those of the same key will probably cost that go before a newcomer, whoever comes later."""
        line = self._lines.get(priority, {}).get(key)
        return NO_WORK if line is None else line.work_before(self._late_before(now))

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait at its rank."""
        self._accounts.wait(sequence.account, sequence.work, sequence.spec.priority)
        self._put_in(sequence)

    def set_aside(self, sequence: Sequence) -> None:
        """Take out a sequence that waits for something else than its turn, and still counts as waiting."""
        self._take_out(sequence)
        self._n_aside += 1

    def bring_back(self, sequence: Sequence) -> None:
        """Let a sequence that was set aside wait at its rank again."""
        self._put_in(sequence)
        self._n_aside -= 1

    def reweigh(self, sequence: Sequence, work: Work) -> None:
        """A sequence that is set aside will probably cost something else than it was thought to."""
        sequence.account.owed += work - sequence.work
        sequence.work = work

    def remove_aside(self, sequence: Sequence) -> None:
        """A sequence that was set aside waits no more."""
        self._accounts.wait_no_more(sequence.account, sequence.work, sequence.spec.priority)
        self._n_aside -= 1

    def admit(self, sequence: Sequence, now: float) -> None:
        """Take out a sequence whose turn it is."""
        line = self._lines[sequence.spec.priority][sequence.account.key]
        has_passed = bool(line.new) and line.new[0] is not sequence and line.new[0].arrived_at < self._late_before(now)
        line.n_passed = line.n_passed + 1 if has_passed else 0
        self.remove(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that waits."""
        self._take_out(sequence)
        self._accounts.wait_no_more(sequence.account, sequence.work, sequence.spec.priority)

    def _put_in(self, sequence: Sequence) -> None:
        account = sequence.account
        self._lines.setdefault(sequence.spec.priority, {}).setdefault(account.key, Line(account)).put_in(sequence)
        self._n_waiting += 1

    def _take_out(self, sequence: Sequence) -> None:
        lines = self._lines[sequence.spec.priority]
        line = lines[sequence.account.key]
        line.take_out(sequence)
        self._n_waiting -= 1
        if not line:
            del lines[sequence.account.key]
        if not lines:
            del self._lines[sequence.spec.priority]

    def check(self) -> None:
        """Assert that everybody stands where he belongs, and that the counts are right."""
        lines = [line for lines in self._lines.values() for line in lines.values()]
        assert all(len(line) for line in lines)
        assert sum(len(line) for line in lines) == self._n_waiting == sum(account.n_waiting for account in self._accounts) - self._n_aside
        assert all(account.n_waiting_at.total() == account.n_waiting for account in self._accounts)
        for line in lines:
            assert line.begun == sorted(line.begun, key=order)
            assert line.new == sorted(line.new, key=order)
            assert all(sequence.account is line.account for sequence in (*line.begun, *line.new))
            for work, part in ((line.work_begun, line.begun), (line.work_new, line.new)):
                assert math.isclose(work.tokens(), Work.of(sequence.work for sequence in part).tokens(), abs_tol=1e-6)

    def _late_before(self, now: float) -> float:
        return float("-inf") if self._patience_s is None else now - self._patience_s


def gives_way(running: Seq[Sequence]) -> Sequence:
    """Return which of `running` gives its cells back when they run out.

    The least urgent; among them one of the key that has the most places for its weight, and its latest.
    """
    return max(running, key=_rank)


def who_yields(
    running: Seq[Sequence], newcomer: Sequence, n_places: int, n_cells: int, n_freed: Callable[[Sequence], int]
) -> list[Sequence]:
    """Return whom to preempt so that `newcomer` has `n_places` and `n_cells` more; empty when justice does not demand it.

    `n_freed` is asked for each of them in the order in which they go, how many cells that brings.

    A less urgent sequence yields to a more urgent one. Among equally urgent ones, a key that has been served more and has more places
    gives them to one that has fewer, as long as that does not turn their roles around. `running` stands in order of service.
    """
    if not may_yield(running, newcomer):
        return []
    yielding: list[Sequence] = []
    n_taken: dict[str, int] = {}
    for sequence in sorted(running, key=_rank, reverse=True):
        if n_places <= 0 and n_cells <= 0:
            break
        account = sequence.account
        if _must_yield(sequence, newcomer, n_taken.get(account.key, 0)):
            n_taken[account.key] = n_taken.get(account.key, 0) + 1
            yielding.append(sequence)
            n_places -= 1
            n_cells -= n_freed(sequence)
    return yielding if n_places <= 0 and n_cells <= 0 else []


def may_yield(running: Seq[Sequence], newcomer: Sequence) -> bool:
    """Whether any of `running`, in order of service, must yield at all."""
    if not running:
        return False
    if running[-1].order[0] > newcomer.order[0]:
        return True
    return any(newcomer.account.may_take_from(account, 0) for account in {sequence.account for sequence in running})


def _must_yield(sequence: Sequence, newcomer: Sequence, n_taken: int) -> bool:
    if sequence.order[0] != newcomer.order[0]:
        return sequence.order[0] > newcomer.order[0]
    return newcomer.account.may_take_from(sequence.account, n_taken)


def _rank(sequence: Sequence) -> tuple[int, float, float, int]:
    account = sequence.account
    return (sequence.order[0], account.load, account.served, sequence.seq_id)


def _turn(line: Line) -> tuple[float, float, tuple[int, int]]:
    return (line.account.served, line.account.load, (line.begun or line.new)[0].order)
