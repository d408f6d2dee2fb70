"""What is known of requests under way and of those that have lately ended, for whoever made them."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final

import attrs

from cllm.engine.timeline import Timeline

N_SEQUENCES_MAX: Final = 2048  # whose timelines are kept, of all requests together


@attrs.frozen
class Record:
    """One request. Times are seconds of Trio's clock."""

    request_id: str
    key: str  # whose it is; nobody else may see it
    created: int = attrs.field(kw_only=True)  # seconds since the epoch
    received_at: float = attrs.field(kw_only=True)
    timelines: tuple[Timeline, ...] = attrs.field(kw_only=True)  # of its sequences, in their order


class Records:
    """Requests, bounded by their sequences: the latest of each key. Of those with the same id and key it is the last one."""

    def __init__(self, n_sequences_max: int = N_SEQUENCES_MAX) -> None:
        self._n_sequences_max = n_sequences_max
        self._n_sequences = 0
        self._n_of: Counter[str] = Counter()  # of these, by key; none is 0
        self._records: OrderedDict[tuple[str, str], Record] = OrderedDict()

    def add(self, record: Record) -> None:
        """Keep a request, and forget the oldest of the key that has most beside it, as long as there is no room for it."""
        self._forget(self._records.pop((record.key, record.request_id), None))
        while self._records and self._n_sequences + len(record.timelines) > self._n_sequences_max:
            most = max(self._n_of, key=self._n_of.__getitem__)
            self._forget(self._records.pop(next(place for place in self._records if place[0] == most)))
        self._records[record.key, record.request_id] = record
        self._n_sequences += len(record.timelines)
        self._n_of[record.key] += len(record.timelines)

    def find(self, request_id: str, key: str) -> Record | None:
        """Return the request of that id that `key` made."""
        return self._records.get((key, request_id))

    def _forget(self, record: Record | None) -> None:
        if record is not None:
            self._n_sequences -= len(record.timelines)
            self._n_of -= Counter({record.key: len(record.timelines)})  # which leaves out who has none
