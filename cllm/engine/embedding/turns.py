"""Whose input is next: keys take turns by what they have been served, the lists of one key item by item."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import attrs

from cllm.engine.waiting.fairness import NO_WORK, Account, Accounts

T = TypeVar("T")


@attrs.define(eq=False)
class _Line(Generic[T]):
    """The lists of one key, none of them empty; the first one has its turn."""

    account: Account
    lists: deque[deque[T]] = attrs.field(factory=deque)
    n_taken: int = 0  # items that had their turn; of keys that were served alike, the one with fewer is next


class Turns(Generic[T]):
    """Items that wait, in lists that belong to keys. What is put back goes before everything else."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts
        self._lines: dict[str, _Line[T]] = {}  # none is empty
        self._back: deque[T] = deque()

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return bool(self._back or self._lines)

    def __iter__(self) -> Iterator[T]:
        yield from self._back
        for line in self._lines.values():
            for items in line.lists:
                yield from items

    def add(self, key: str, items: Iterable[T]) -> None:
        """Let a list, which is not empty, wait behind the others of its key."""
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(self._accounts.of(key))
        line.lists.append(deque(items))
        self._accounts.wait(line.account, NO_WORK)

    def put_back(self, item: T) -> None:
        """Let an item that had its turn wait before all others; it is not charged again."""
        self._back.appendleft(item)

    def first(self) -> T | None:
        """The item whose turn it is; None when none waits."""
        if self._back:
            return self._back[0]
        return self._next_line().lists[0][0] if self._lines else None

    def take(self, cost: float) -> None:
        """Take out the first item, which costs its key so many tokens."""
        if self._back:
            self._back.popleft()
            return
        line = self._next_line()
        line.account.charge(cost)
        line.n_taken += 1
        items = line.lists.popleft()
        items.popleft()
        if items:
            line.lists.append(items)
        else:
            self._is_over(line)

    def keep(self, is_wanted: Callable[[T], bool]) -> None:
        """Let the lists go whose first item is not wanted any more, and what was put back and is not."""
        self._back = deque(item for item in self._back if is_wanted(item))
        for line in list(self._lines.values()):
            for items in list(line.lists):
                if not is_wanted(items[0]):
                    line.lists.remove(items)
                    self._is_over(line)

    def _next_line(self) -> _Line[T]:
        return min(self._lines.values(), key=_served)

    def _is_over(self, line: _Line[T]) -> None:
        """A list of the line's is at its end."""
        self._accounts.wait_no_more(line.account, NO_WORK)
        if not line.lists:
            del self._lines[line.account.key]


def _served(line: _Line[T]) -> tuple[float, int]:
    return line.account.served, line.n_taken
