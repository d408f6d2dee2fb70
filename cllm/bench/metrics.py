"""What a pass comes to: rates, percentiles, goodput, and what client and server spent on it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

import attrs

from cllm.bench.answers import Answer, Pass, ttfts_s

CLIENT_SHARE_MAX: Final = 0.70  # beyond it the generator may be what is measured


@attrs.frozen
class Goal:
    """What an answer must keep to count as good: the time to its first text, and the mean time between its tokens."""

    ttft_s: float = 4.0
    itl_s: float = 0.25

    def is_met(self, answer: Answer) -> bool:
        """Whether this answer is good."""
        is_whole = not answer.is_failed and not answer.is_cut
        return is_whole and answer.ttft_s is not None and answer.ttft_s <= self.ttft_s and answer.itl_s <= self.itl_s


@attrs.frozen
class Spread:
    """How values lie; None of none."""

    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    max: float | None = None


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the values lie, interpolated between its neighbours (NumPy's default way)."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Sequence[float]) -> Spread:
    """Mean, percentiles and maximum."""
    if not values:
        return Spread()
    ordered = sorted(values)
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Spread(mean=sum(ordered) / len(ordered), p50=p50, p90=p90, p99=p99, max=ordered[-1])


def curve(values: Sequence[float], n_points: int = 51) -> list[float]:
    """Evenly spaced percentiles from the least to the greatest: a distribution in few numbers."""
    ordered = sorted(values)
    return [percentile(ordered, i / (n_points - 1)) for i in range(n_points)] if ordered else []


@attrs.frozen(kw_only=True)
class Summary:
    """The figures of one pass. Times are seconds."""

    wall_s: float
    n_requests: int
    n_failed: int
    failures: dict[str, int]  # how many failed why
    n_prompt: int
    n_cached: int | None  # by those who tell; None: nobody does
    n_generated: int
    counted_by: str
    n_inexact: int  # answers that have not exactly the asked tokens, or to a part of the prompt only
    n_uncounted: int  # those of which nobody knows that
    n_stopped: int  # those that ended by themselves before they had as many
    n_cut: int  # those to a part of their prompt, by what the server says that it read
    n_textless: int  # those whose stream showed nothing of it
    tokens_per_s: float
    requests_per_s: float  # those that were answered
    ttft_s: Spread  # here and in `e2e_s` not the late request's, which stands by itself
    itl_s: Spread  # between two pieces of text, over all answers
    e2e_s: Spread
    goal: Goal
    goodput_per_s: float  # good answers
    goodput_share: float  # of all requests
    client_cpu_s: float
    rate: float | None = None  # at which requests were to arrive, a second, by chance:
    arrived_per_s: float | None = None  # at which they did
    n_under_way: int | None = None  # of a pass that was cut: not among the requests, their tokens are among those generated
    server_cpu_s: float | None = None
    server_rss_peak_mb: float | None = None  # since the server's start
    server_process: str | None = None  # whose these are: it listens on the port, and may be a tunnel to the server
    late_gap_max_s: float | None = None  # the longest that anybody waited for text from when the late request was sent
    late_ttft_s: float | None = None
    late_e2e_s: float | None = None
    is_late_alone: bool = False  # all others had ended when the late request was sent

    @property
    def client_cpu_share(self) -> float:
        """Of one core."""
        return self.client_cpu_s / self.wall_s

    @property
    def is_exact(self) -> bool | None:
        """Whether every answer has exactly the asked tokens. None: none is known to have others, and not all are known."""
        return False if self.n_inexact else None if self.n_uncounted else True

    def warnings(self) -> list[str]:
        """What makes the figures doubtful, one line each."""
        lines = []
        if self.client_cpu_share > CLIENT_SHARE_MAX:
            lines.append(f"the client took {self.client_cpu_share:.0%} of a core: it may be what limits these figures")
        if self.counted_by == "chunks":
            lines.append("the server reports no usage: tokens are counted by chunks of text, which may hold several")
        if self.n_cut:
            lines.append(f"{self.n_cut} answers are to a part of their prompt, as the server tells: that is quicker than to the whole")
        if self.n_stopped:
            lines.append(f"{self.n_stopped} answers ended by themselves: the server leaves ignore_eos out, or has no such thing")
        if self.n_textless:
            lines.append(f"{self.n_textless} answers showed no text: they have no first one, and are not good")
        if self.is_late_alone:
            lines.append("the late request came when the others had ended: they came in too few pieces to tell that they had begun")
        return lines

    def page(self) -> dict[str, Any]:
        """For JSON."""
        return {**attrs.asdict(self), "client_cpu_share": self.client_cpu_share, "is_exact": self.is_exact}


def summarize(
    done: Pass, goal: Goal = Goal(), *, server_cpu_s: float | None = None, rss_peak_mb: float | None = None, has_late: bool = False
) -> Summary:
    """Reduce a pass to its figures. What failed counts as asked for and as not good, and not in the times."""
    answered = [answer for answer in done.answers if not answer.is_failed]
    n_good = sum(goal.is_met(answer) for answer in answered)
    late = done.answers[-1] if has_late else None  # whose times are not for the others' percentiles: of eight, they would be their p90
    timed = late if late is not None and not late.is_failed and not late.is_cut else None
    others = [answer for answer in answered if answer is not late]
    return Summary(
        wall_s=done.wall_s,
        n_requests=len(done.answers),
        n_failed=len(done.answers) - len(answered),
        failures=dict(Counter(answer.error for answer in done.answers if answer.is_failed).most_common()),
        n_prompt=sum(answer.n_prompt for answer in answered),
        n_cached=_sum_told(answer.n_cached for answer in answered),
        n_generated=sum(answer.n_generated for answer in done.answers),
        counted_by=min((answer.counted_by for answer in answered), default="nothing"),
        n_inexact=sum(answer.is_exact is False for answer in done.answers),
        n_uncounted=sum(answer.is_exact is None for answer in done.answers),
        n_stopped=sum(answer.has_stopped for answer in answered),
        n_cut=sum(answer.is_cut for answer in answered),
        n_textless=sum(answer.ttft_s is None for answer in answered),
        tokens_per_s=done.tokens_per_s,
        requests_per_s=len(answered) / done.wall_s,
        ttft_s=spread(ttfts_s(others)),
        itl_s=spread([gap for answer in answered for gap in answer.gaps_s]),
        e2e_s=spread([answer.e2e_s for answer in others]),
        goal=goal,
        goodput_per_s=n_good / done.wall_s,
        goodput_share=n_good / len(done.answers) if done.answers else 0.0,
        client_cpu_s=done.client_cpu_s,
        server_cpu_s=server_cpu_s,
        server_rss_peak_mb=rss_peak_mb,
        late_gap_max_s=_longest_gap_since(late.sent_at, done.answers[:-1]) if late else None,
        late_ttft_s=timed.ttft_s if timed else None,
        late_e2e_s=timed.e2e_s if timed else None,
        is_late_alone=late is not None and bool(others) and all(other.ended_at <= late.sent_at for other in others),
    )


def arrived_per_s(done: Pass) -> float | None:
    """The rate at which the requests of an open loop came; None of those that all came at once."""
    last = max((answer.sent_at for answer in done.answers), default=0.0)
    return len(done.answers) / last if last else None


def _sum_told(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _longest_gap_since(at: float, answers: list[Answer]) -> float | None:
    """Of the gaps that had not ended by then."""
    pairs = [(a, b) for answer in answers for a, b in zip(answer.chunks_at, answer.chunks_at[1:], strict=False)]
    return max((b - a for a, b in pairs if b > at), default=None)
