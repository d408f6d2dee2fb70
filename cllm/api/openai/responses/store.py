"""The responses that are kept, so that a later request can go on from one: bounded in number, bytes and time, and gone with the process."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import attrs
import msgspec

from cllm.errors import NotFound

N_BYTES_OBJECT = 256  # that an item, a part of one, or what a tool has in it, takes at least besides what it says


@attrs.frozen(eq=False)
class Kept:
    """A response, and all that was said up to its end."""

    key: str  # whose it is
    response: dict[str, Any]
    inputs: tuple[Any, ...]  # the items that its request brought
    items: tuple[Any, ...]  # all items up to its end, earlier responses' included
    n_bytes: int
    ends_at: float


class ResponseStore:
    """Keeps the latest. Times are of any clock that does not run backwards, given by the caller."""

    def __init__(self, *, n_max: int, n_bytes_max: int, ttl_s: float) -> None:
        self._n_max = n_max
        self._n_bytes_max = n_bytes_max
        self._ttl_s = ttl_s
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._items: dict[tuple[str, str], dict[str, Any]] = {}  # by key and id, for each response that has one
        self._n_bytes_of: Counter[str] = Counter()  # by key
        self._n_of: Counter[str] = Counter()
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def is_open(self) -> bool:
        """Whether anything is kept."""
        return self._n_max > 0

    def keep(self, response: dict[str, Any], inputs: tuple[Any, ...], items: tuple[Any, ...], *, key: str, now: float) -> bool:
        """Keep a response; the oldest of the key that has most make room. Return whether it is: one larger than all the room is not.

        Items of earlier responses count each time, though they are shared: the earlier ones may go first.
        """
        n_objects = sum(map(_n_objects, items)) + _n_objects_within(response.get("tools"))
        n_bytes = len(msgspec.json.encode([response, items])) + N_BYTES_OBJECT * n_objects
        if n_bytes > self._n_bytes_max or not self.is_open:
            return False
        self._forget_old(now)
        self._kept[response["id"]] = Kept(key, response, inputs, items, n_bytes, now + self._ttl_s)
        for item in items:
            if item.id:
                self._items.setdefault((key, item.id), {})[response["id"]] = item
        self.n_bytes += n_bytes
        self._n_bytes_of[key] += n_bytes
        self._n_of[key] += 1
        while (is_many := len(self._kept) > self._n_max) or self.n_bytes > self._n_bytes_max:
            self._forget(self._oldest_of_largest(by_bytes=not is_many, latest=response["id"]))
        return True

    def find(self, response_id: str, *, key: str, now: float) -> Kept:
        """Return a response that is still kept. Another key's is as unknown as none. Raises: NotFound."""
        self._forget_old(now)
        kept = self._kept.get(response_id)
        if kept is None or kept.key != key:
            raise NotFound(f"there is no response {response_id[:100]!r} here, or no longer", code="response_not_found")
        return kept

    def item(self, item_id: str, *, key: str, now: float) -> Any | None:
        """Return an item of a response that is still kept, of any of the key's; None when there is none."""
        self._forget_old(now)
        of_responses = self._items.get((key, item_id))
        return None if of_responses is None else of_responses[next(reversed(of_responses))]

    def delete(self, response_id: str, *, key: str, now: float) -> None:
        """Forget a response. Raises: NotFound."""
        self.find(response_id, key=key, now=now)
        self._forget(response_id)

    def _oldest_of_largest(self, *, by_bytes: bool, latest: str) -> str:
        """Of the key that takes most, but for the latest of all: or one that asks for much would have everybody else's forgotten."""
        others = self._kept.keys() - {latest}
        taken = self._n_bytes_of if by_bytes else self._n_of
        largest = max((self._kept[name].key for name in others), key=lambda key: taken[key]) if others else ""
        return next((name for name, kept in self._kept.items() if kept.key == largest and name != latest), latest)

    def _forget_old(self, now: float) -> None:
        while self._kept and next(iter(self._kept.values())).ends_at <= now:  # they were kept in the order in which they end
            self._forget(next(iter(self._kept)))

    def _forget(self, response_id: str) -> None:
        kept = self._kept.pop(response_id)
        self.n_bytes -= kept.n_bytes
        self._n_bytes_of[kept.key] -= kept.n_bytes
        self._n_of[kept.key] -= 1
        for item in kept.items:
            of_responses = self._items.get((kept.key, item.id), {})
            of_responses.pop(response_id, None)
            if item.id and not of_responses:
                self._items.pop((kept.key, item.id), None)


def _n_objects_within(tools: Any) -> int:
    """Objects and lists, at all levels; such marks in texts count too, which are few in what tools say."""
    encoded = msgspec.json.encode(tools)
    return encoded.count(b"{") + encoded.count(b"[")


def _n_objects(item: Any) -> int:
    """The item, and the parts that it has."""
    return 1 + sum([len(parts) for parts in (item.content, item.output, item.summary) if isinstance(parts, list)])
