"""Load on the real scheduler in simulated time: requests arrive, steps take what they were measured to take, nothing is computed."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Iterable

import attrs

from cllm.engine.batch.plan import Plan, StepOutput
from cllm.engine.events import Delta, Failed, Finished
from cllm.engine.sampling.params import StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.errors import RequestError

# Milliseconds of a step by its rows, all of them outputs: a 0.6B model in Q4_K_M on two cores. A row without an output costs 1.4 ms less.
STEP_MS = {1: 14.5, 2: 27, 4: 42, 6: 58, 8: 88, 12: 105, 16: 103, 24: 147, 32: 175, 64: 320, 128: 600, 512: 2300}
NO_OUTPUT_MS = 1.4


@attrs.define(eq=False)
class Asked:
    """One request, and what became of it; times in seconds of the simulation."""

    at: float
    spec: SequenceSpec
    refused: bool = False
    first_at: float | None = None
    ended_at: float | None = None
    n_tokens: int = 0
    longest_gap_s: float = 0.0
    last_at: float = 0.0

    @property
    def ttft_s(self) -> float:
        """Arrival to first token; for ever, if none came."""
        return float("inf") if self.first_at is None else self.first_at - self.at

    @property
    def itl_s(self) -> float:
        """The mean time between tokens."""
        if self.first_at is None or self.ended_at is None:
            return float("inf")
        return (self.ended_at - self.first_at) / max(self.n_tokens - 1, 1)

    def is_good(self, ttft_s: float = 4.0, itl_s: float = 0.25) -> bool:
        """Whether it was served, and soon enough."""
        return self.ended_at is not None and self.ttft_s <= ttft_s and self.itl_s <= itl_s


def ask(at: float, n_prompt: int, n_tokens: int, key: str = "", **fields: object) -> Asked:
    """Return a request of so many tokens."""
    stopping = StopParams(max_tokens=n_tokens)
    return Asked(at, SequenceSpec(prompt=[98] * n_prompt, stopping=stopping, key=key, **fields))  # type: ignore[arg-type]


def step_s(plan: Plan) -> float:
    """Return the seconds of a step."""
    n_rows, sizes = plan.n_rows, list(STEP_MS)
    if not n_rows:
        return 0.0
    i = min(max(bisect.bisect_left(sizes, n_rows), 1), len(sizes) - 1)
    low, high = sizes[i - 1], sizes[i]
    all_outputs_ms = STEP_MS[low] + (STEP_MS[high] - STEP_MS[low]) * (n_rows - low) / (high - low)
    return max(all_outputs_ms - NO_OUTPUT_MS * (n_rows - len(plan.outputs)), 10.0) / 1000


class Simulation:
    """A scheduler's time. `refuse` is asked before each submission; `again` gives a closed loop's next request when one has ended; `slower`
    says how many times as long a step takes that begins at a time, and `step_s` how long it takes otherwise.
    """

    def __init__(
        self,
        scheduler: StepScheduler,
        *,
        refuse: Callable[[SequenceSpec, float], object] = lambda spec, now: None,
        again: Callable[[Asked, float], Asked | None] = lambda asked, now: None,
        slower: Callable[[float], float] = lambda now: 1.0,
        step_s: Callable[[Plan], float] = step_s,
    ) -> None:
        self.scheduler = scheduler
        self.now = 0.0
        self.done: list[Asked] = []
        self.steps_s: list[float] = []
        self._refuse = refuse
        self._again = again
        self._slower = slower
        self._step_s = step_s
        self._due: list[tuple[float, int, Asked]] = []
        self._asked: dict[int, Asked] = {}
        self._n_asked = 0

    def ask(self, requests: Iterable[Asked]) -> None:
        """Let requests arrive at their times."""
        for request in requests:
            self._n_asked += 1
            heapq.heappush(self._due, (request.at, self._n_asked, request))

    def follow(self, seq_id: int, request: Asked) -> None:
        """Watch a sequence that was submitted from elsewhere."""
        self._asked[seq_id] = request

    def run(self, until_s: float = float("inf")) -> list[Asked]:
        """Run until nothing is left, or until it is so late; return all requests that have arrived."""
        while self.now < until_s:
            self._arrive()
            plan = self.scheduler.plan(self.now)
            if plan is None:
                if not self._due:
                    break
                self.now = self._due[0][0]
                continue
            self._take(plan.events)
            if plan.is_step:
                seconds = self._slower(self.now) * self._step_s(plan)
                self.now += seconds
                self.steps_s.append(seconds)
                self._take(self.scheduler.apply(plan, StepOutput([97] * len(plan.outputs), [], None, model_s=seconds), self.now))
        return self.done

    def _arrive(self) -> None:
        while self._due and self._due[0][0] <= self.now:
            _, _, request = heapq.heappop(self._due)
            self.done.append(request)
            try:
                self._refuse(request.spec, request.at)
            except RequestError:
                request.refused = True
                continue
            self._asked[self.scheduler.submit(request.spec, request.at)] = request

    def _take(self, events: Iterable[Delta | Finished | Failed]) -> None:
        for event in events:
            request = self._asked[event.seq_id]
            if isinstance(event, Delta):
                if request.first_at is None:
                    request.first_at = request.last_at = self.now
                request.n_tokens += len(event.tokens)
                request.longest_gap_s = max(request.longest_gap_s, self.now - request.last_at)
                request.last_at = self.now
            elif isinstance(event, Finished):
                request.ended_at = self.now
                if (following := self._again(request, self.now)) is not None:
                    self.ask([following])
