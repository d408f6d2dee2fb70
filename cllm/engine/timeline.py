"""What happened to a sequence, and when: what is rare is noted, nothing at every token."""

from __future__ import annotations

from typing import Final

import attrs

N_MOMENTS_MAX: Final = 32  # of one sequence; later prefills are added up, and preemptions without end are not listed

Fact = int | float | str | None


@attrs.define(eq=False)
class Moment:
    """Something that happened at `at`, in seconds of the scheduler's clock."""

    at: float
    what: str
    facts: dict[str, Fact]


class Timeline:
    """The moments of one sequence, in order."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.ended = False

    def note(self, at: float, what: str, **facts: Fact) -> None:
        """Add a moment. Those beyond the bound are dropped."""
        if len(self.moments) < N_MOMENTS_MAX:
            self.moments.append(Moment(at, what, facts))

    def prefill(self, at: float, n_rows: int) -> None:
        """Add a piece of the prompt that was computed by now. Half of the moments may be pieces; the last of these takes in all others."""
        last = self.moments[-1] if self.moments else None
        if last is not None and last.what == "prefill" and len(self.moments) >= N_MOMENTS_MAX // 2:
            last.at = at
            last.facts = {"n_rows": _int(last.facts["n_rows"]) + n_rows, "n_steps": _int(last.facts.get("n_steps", 1)) + 1}
        else:
            self.note(at, "prefill", n_rows=n_rows)

    def end(self, at: float, what: str, **facts: Fact) -> None:
        """Add the last moment, for which there is always room."""
        self.moments.append(Moment(at, what, facts))
        self.ended = True


def _int(fact: Fact) -> int:
    assert isinstance(fact, int)
    return fact
