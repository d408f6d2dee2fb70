"""What can go wrong with an upstream, and what it means: for the upstream, for another try, for the client."""

from __future__ import annotations

import attrs


class Failure(Exception):
    """An upstream did not do what it was asked, and another one may."""


class Unreachable(Failure):
    """No connection, or it broke before anything came."""


class Silent(Failure):
    """Nothing came in time."""


class Broken(Failure):
    """What came is an error of the upstream's own, or was cut."""


class Garbled(Failure):
    """What came is no answer."""


@attrs.define(eq=False)
class Busy(Failure):
    """The upstream wants to be left alone."""

    status: int  # 429 or 503
    retry_after_s: float

    def __str__(self) -> str:
        return f"HTTP {self.status}, and to be left alone for {self.retry_after_s:.0f} s"


class KeyRefused(Failure):
    """The upstream does not know the operator's key, or wants to be paid for it: the operator's matter, and no client's."""
