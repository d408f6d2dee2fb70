"""What each key has been served, and so whose turn it is: weighted fair queueing on tokens, by virtual counters.

After "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024): the counter of whoever has nothing waiting does not lag behind
those that have, so that idling earns no credit.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import attrs

PROMPT_TOKEN: Final = 1.0  # what a computed token of a prompt costs its key; cached ones cost nothing
AHEAD_MAX: Final = 512.0  # tokens over weight that a key with few places may have been served more than one that it passes
N_RECENT: Final = 256  # sequences, the last that came: whose keys they have is who asks of late
GENERATED_TOKEN: Final = 2.0  # a row with an output costs about twice one without, on CPUs as on GPUs


@attrs.frozen
class Work:
    """Tokens that are to be computed, or were. What one of each sort takes is for who asks to say."""

    n_prompt: float = 0.0
    n_generated: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.n_prompt + other.n_prompt, self.n_generated + other.n_generated)

    def __sub__(self, other: Work) -> Work:
        return Work(self.n_prompt - other.n_prompt, self.n_generated - other.n_generated)

    @classmethod
    def of(cls, works: Iterable[Work]) -> Work:
        """Return the sum; thousands of keys may have asked, whenever somebody comes."""
        n_prompt = n_generated = 0.0
        for work in works:
            n_prompt += work.n_prompt
            n_generated += work.n_generated
        return cls(n_prompt, n_generated)

    def tokens(self, generated: float = GENERATED_TOKEN) -> float:
        """Return it in tokens of a prompt, of which a generated one is as much as `generated`."""
        return PROMPT_TOKEN * self.n_prompt + generated * self.n_generated


NO_WORK: Final = Work()


@attrs.define(eq=False)
class Account:
    """One key's account. `served` is in tokens over weight, so that equal counters are fair."""

    key: str = ""
    weight: float = 1.0
    served: float = 0.0
    n_coming: int = 0  # let in, and not in the queue yet: their prompts are being read
    n_waiting: int = 0
    n_waiting_at: Counter[int] = attrs.field(factory=Counter)  # by priority
    n_running: int = 0
    owed: Work = NO_WORK  # what those that wait will probably cost
    n_prompt_tokens: int = 0  # of admitted prompts, since the start
    n_generated: int = 0

    @property
    def n_under_way(self) -> int:
        """Sequences of this key that were let in and have not ended."""
        return self.n_coming + self.n_waiting + self.n_running

    @property
    def load(self) -> float:
        """Places taken, over weight."""
        return self.n_running / self.weight

    def waits_at(self, priority: int) -> bool:
        """Say whether anything of this key waits that is as urgent, or more."""
        return any(rank <= priority for rank in self.n_waiting_at)

    def charge(self, tokens: float) -> None:
        """Count what was computed for this key, in tokens of a prompt."""
        self.served += tokens / self.weight

    def may_pass(self, other: Account, work: Work = NO_WORK) -> bool:
        """Say whether this key may have what costs `work` before its turn, where another with more places would only wait for it."""
        return self.load < other.load and self.served + work.tokens() / self.weight <= other.served + AHEAD_MAX

    def may_take_from(self, other: Account, n_taken: int) -> bool:
        """Say whether one place more here and one less there would still leave this key no better off, `n_taken` being gone already.

        Strictly fewer places are then unevenly held after the exchange, and the other cannot claim the place back: no thrashing.
        """
        if self is other or self.served > other.served:
            return False
        return (self.n_running + 1) / self.weight <= (other.n_running - n_taken - 1) / other.weight


class Accounts:
    """The accounts of all keys that have asked for something; the caller bounds how many there are."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._accounts: dict[str, Account] = {}
        self._level = 0.0  # the counter of who was last in the queue
        self._recent: deque[str] = deque()  # keys of the last sequences that came: who only asks whether there is room is not among them
        self._n_recent: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    @property
    def n_recent(self) -> int:
        """Keys that asked for something of late."""
        return len(self._n_recent)

    def of(self, key: str) -> Account:
        """Return the account of `key`."""
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account(key, self._weights.get(key, 1.0))
        return account

    def wait(self, account: Account, work: Work, priority: int = 0) -> None:
        """One more of this key waits, to cost `work`. The first joins the others at the level of the least served of them.

        Those who wait less urgently do not count: they may have been passed for days, which is no reason to pass others at this priority.
        They are lifted as much, too, so that what is less urgent of this key does not go behind what is of theirs; but nobody beyond the
        level at which this key joins: lifts that add up would part what is counted from what was served, further with each newcomer.
        """
        if not account.waits_at(priority):
            others = [other for other in self._accounts.values() if other is not account]
            served = [other.served for other in others if other.waits_at(priority)]
            level = min(served) if served else self._level
            lift = max(level - account.served, 0.0)
            for lifted in (account, *(other for other in others if other.n_waiting and not other.waits_at(priority))):
                lifted.served = max(lifted.served, min(lifted.served + lift, level))
        self._note_recent(account.key)
        account.n_waiting += 1
        account.n_waiting_at[priority] += 1
        account.owed += work

    def _note_recent(self, key: str) -> None:
        self._recent.append(key)
        self._n_recent[key] += 1
        if len(self._recent) > N_RECENT:
            oldest = self._recent.popleft()
            self._n_recent[oldest] -= 1
            if not self._n_recent[oldest]:
                del self._n_recent[oldest]

    def wait_no_more(self, account: Account, work: Work, priority: int = 0) -> None:
        """One of this key left the queue."""
        account.n_waiting -= 1
        account.n_waiting_at[priority] -= 1
        if not account.n_waiting_at[priority]:
            del account.n_waiting_at[priority]
        account.owed = account.owed - work if account.n_waiting else NO_WORK  # no rounding errors are kept
        self._level = max(self._level, account.served)

    def seen(self, key: str) -> Account:
        """Return the account of `key`, or one as it would begin: who only asks whether there is room opens none."""
        return self._accounts.get(key) or Account(key, self._weights.get(key, 1.0))


def finds_room(key: str, n_waiting_of: Mapping[str, int], n_max: int, weights: Mapping[str, float]) -> bool:
    """Say whether a queue for `n_max` takes one more of this key, beside so many of each.

    A full one still takes from a key that has less than its part of it, up to twice its size, so that no key shuts the others out.
    """
    n_waiting = sum(n_waiting_of.values())
    if n_waiting < n_max:
        return True
    keys = {key, *(each for each, n in n_waiting_of.items() if n)}
    part = weights.get(key, 1.0) / sum(weights.get(each, 1.0) for each in keys)
    return n_waiting < 2 * n_max and n_waiting_of.get(key, 0) < n_max * part


def likeliest(keys: Iterable[str], weights: Mapping[str, float], *burdens: Callable[[str], float]) -> set[str]:
    """Return those that are let in before the others: of the keys of each weight the one with the least of each burden.

    There may be thousands of keys, and each that is asked for is weighed against all of them.
    """
    of_weight: dict[float, list[str]] = {}
    for key in keys:
        of_weight.setdefault(weights.get(key, 1.0), []).append(key)
    return {min(alike, key=burden) for alike in of_weight.values() for burden in burdens}
