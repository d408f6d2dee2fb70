"""Which upstream is asked next: the least loaded one of those that are well, have a place and do not rest. Knows no socket and no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import attrs

from cllm.backend import Measure
from cllm.errors import DeadlineExceeded, GenerationFailed, RateLimited, RequestError, Unavailable
from cllm_backend_upstream.failures import Busy, Failure, Silent, Unreachable

SUSPECT_S: Final = 1.0  # that one which failed is asked last; doubled with each failure in a row
SUSPECT_S_MAX: Final = 60.0
N_PLACES: Final = 64  # requests under way at each


@attrs.define(eq=False)
class Upstream:
    """One server, and how it fares."""

    url: str
    is_well: bool = True
    n_live: int = 0  # requests under way
    n_requests: int = 0
    asked_last: int = 0  # which of all requests that was: of equals the one is asked that was not for longest
    n_failures: int = 0
    n_rests: int = 0
    n_failures_in_row: int = 0
    suspect_until: float = 0.0
    rests_until: float = 0.0  # as it has asked
    rest_status: int = 503  # with which it has

    def failed(self, failure: Failure, now: float) -> None:
        """Note what went wrong."""
        if isinstance(failure, Busy):
            self.rests_until = max(self.rests_until, now + failure.retry_after_s)
            self.rest_status = failure.status
            self.n_rests += 1
            return
        self.n_failures += 1
        self.n_failures_in_row += 1
        self.suspect_until = now + min(SUSPECT_S * 2 ** min(self.n_failures_in_row - 1, 10), SUSPECT_S_MAX)
        if isinstance(failure, Unreachable):
            self.is_well = False  # until a check says otherwise

    @property
    def again_at(self) -> float:
        """When it may be asked again, and not as the last one."""
        return max(self.rests_until, self.suspect_until)

    def answered(self) -> None:
        """Note that all was well."""
        self.n_failures_in_row = 0
        self.suspect_until = 0.0


def measures_of(upstream: Upstream) -> list[Measure]:
    """Return what `/metrics` tells of one."""
    labels = {"upstream": upstream.url}
    return [
        Measure(name="upstream_requests", help="Requests sent to an upstream", value=upstream.n_requests, labels=labels),
        Measure(name="upstream_failures", help="Of these, those that failed there", value=upstream.n_failures, labels=labels),
        Measure(name="upstream_rests", help="Times that it asked to be left alone", value=upstream.n_rests, labels=labels),
        Measure(name="upstream_live", help="Requests under way", value=upstream.n_live, labels=labels, is_count=False),
        Measure(name="upstream_up", help="Whether it is well", value=upstream.is_well, labels=labels, is_count=False),
    ]


class Pool:
    """All upstreams."""

    def __init__(self, urls: Iterable[str], n_places: int = N_PLACES) -> None:
        self.upstreams: Sequence[Upstream] = [Upstream(url) for url in urls]
        self._n_places = n_places  # at each
        self._n_asked = 0

    def choose(self, now: float, tried: Sequence[Upstream] = ()) -> Upstream | None:
        """Return whom to ask, not one of those `tried`, nor one that has no place left."""
        free = [one for one in self._able(now, tried) if one.n_live < self._n_places]
        return min(free, key=lambda one: (one.suspect_until > now, one.n_live, one.asked_last), default=None)

    def asks(self, upstream: Upstream) -> None:
        """Note that it is asked now."""
        self._n_asked += 1
        upstream.asked_last = self._n_asked
        upstream.n_requests += 1

    def has_full(self, now: float, tried: Sequence[Upstream]) -> bool:
        """Return whether there is one that could be asked if it had a place left."""
        return any(one.n_live >= self._n_places for one in self._able(now, tried))

    def next_rested(self, now: float, tried: Sequence[Upstream]) -> float:
        """Return when the next one will have rested."""
        return min((one.rests_until for one in self.upstreams if one.rests_until > now and one not in tried), default=math.inf)

    def _able(self, now: float, tried: Sequence[Upstream]) -> list[Upstream]:
        return [one for one in self.upstreams if one.is_well and one.rests_until <= now and one not in tried]

    def why_not(self, now: float, failure: Failure | None, health_s: float) -> RequestError:
        """Return what a client is told when nobody is left to ask, after the last `failure` of an upstream if one was asked."""
        if isinstance(failure, Silent):
            return DeadlineExceeded("the server behind this one did not answer in time")
        if failure is not None and not isinstance(failure, Busy | Unreachable):
            return GenerationFailed("the server behind this one failed", code="upstream_failed")
        well = [one for one in self.upstreams if one.is_well]
        resting = [one for one in well if one.rests_until > now]
        if resting:
            status = min(resting, key=lambda one: one.rests_until).rest_status
        elif well and isinstance(failure, Busy):  # for no time, or the time is over
            status = failure.status
        else:
            return Unavailable("the server behind this one cannot be reached", retry_after_s=health_s, code="upstream_unreachable")
        wait_s = max(min(one.again_at for one in well) - now, 0.0)
        if status == 429:
            return RateLimited("the server behind this one is asked too often", retry_after_s=wait_s)
        return Unavailable("the server behind this one is busy", retry_after_s=wait_s, code="upstream_busy")
