"""Anything may happen in any order, and the invariants hold: cells, slots, one terminal event each, and the text of a sequence alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import attrs
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from cllm.backend import KvLayout
from cllm.config import Settings
from cllm.engine import stepping
from cllm.engine.batch.compute import compute, do_move
from cllm.engine.batch.plan import Plan, Save
from cllm.engine.events import Delta, Event, Failed, Finished, FinishReason
from cllm.engine.memory.prices import Prices
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sequence import Phase, SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.errors import Aborted, DeadlineExceeded, GenerationFailed, ModelDied, NoRoom, QuotaExceeded, StepFailed, Unavailable
from cllm.serve.loading import limits_of
from cllm.testing.fake import FakeModel
from tests.clock import tick

N_CTX, N_SLOTS = 100, 5
BEGINNINGS = tuple(tuple(range(first, first + 60)) for first in (40, 60))


class Copying(FakeModel):
    """Slots of one pool that can be copied and cut, and share nothing."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.capabilities = attrs.evolve(self.capabilities, can_share=False)


KINDS: dict[str, tuple[Callable[..., FakeModel], dict[str, int]]] = {  # of memory: what the model can do, and its cells
    "shares": (FakeModel, {"n_cells": 160}),
    "no cache": (FakeModel, {"n_cells": 160}),
    "copies that could be cut, in one pool": (Copying, {"n_cells": 160}),
    "parts of its own for each slot": (partial(FakeModel, kv_layout=KvLayout.STREAMS), {"n_cells": N_SLOTS * N_CTX}),
    "only whole slots": (partial(FakeModel, can_trim=False), {"n_cells": 160}),
    "whole slots that stay where they are": (partial(FakeModel, can_trim=False, can_save=False), {"n_cells": 160}),
    "whole slots that are never copied": (partial(FakeModel, can_trim=False, can_copy=False), {"n_cells": 160}),
}
STOPS: list[tuple[str, ...]] = [(), (), ("!", "5", "F", "g", "x")]
ERRORS: list[Exception] = [NoRoom("no room"), StepFailed("failed"), Aborted("aborted"), RuntimeError("a mistake")]


class CostsOfCarrying:
    """Costs by which a branch that rests for some steps moves to the host."""

    def prefill_s(self, n_rows: int, n_cells: int = 0) -> float:
        return 1.0 * n_rows

    def carry_s(self, n_cells: int, n_rows: int) -> float:
        return 1e-5 * n_cells

    def save_s(self, n_cells: int) -> float | None:
        return 2e-5 * n_cells

    def restore_s(self, n_cells: int) -> float | None:
        return None


def make_scheduler(row_budget: int, kind: str = "no cache", pool_n_bytes: int = 0) -> tuple[FakeModel, StepScheduler]:
    make_model, cells = KINDS[kind]
    model = make_model(n_slots=N_SLOTS, n_tokens_to_end=25, n_ctx_train=N_CTX, n_rows_max=32, **cells)
    limits = limits_of(model, Settings(row_budget=row_budget, parallel=4, prefix_cache=kind != "no cache"))
    limits = attrs.evolve(limits, patience_s=5.0, key_weights={"other": 2.0}, host_pool_n_bytes=pool_n_bytes)
    scheduler = StepScheduler(limits, model.vocabulary)
    if scheduler.memory.offload is not None:
        scheduler.memory.offload.prices = Prices(CostsOfCarrying())
    return model, scheduler


def run_step(model: FakeModel, scheduler: StepScheduler, now: float) -> list[Event] | None:
    plan = scheduler.plan(now)
    if plan is None:
        return None
    if not plan.is_step:
        return plan.events
    return plan.events + scheduler.apply(plan, compute(model, plan, tick), now)


@cache
def alone(prompt: tuple[int, ...], seed: int, max_tokens: int, temperature: float, stop: tuple[str, ...]) -> str:
    """The text of a sequence that has a model to itself."""
    model, scheduler = make_scheduler(row_budget=32)
    scheduler.submit(make_spec(prompt, seed, max_tokens, temperature, stop), 0.0)
    text = ""
    while (events := run_step(model, scheduler, 0.0)) is not None:
        text += "".join(event.text for event in events if not isinstance(event, Failed))
    return text


@cache
def scored_alone(prompt: tuple[int, ...]) -> list[tuple[int, float]]:
    """A prompt's tokens from the second on, with their logprobs, by a model that does nothing else."""
    model, scheduler = make_scheduler(row_budget=32)
    scheduler.submit(make_spec(prompt, 0, 0, 0.0, n_prompt_logprobs=0), 0.0)
    scores: list[tuple[int, float]] = []
    while (events := run_step(model, scheduler, 0.0)) is not None:
        scores += [score for event in events for score in scores_of(event)]
    return scores


def scores_of(event: Event) -> list[tuple[int, float]]:
    return [(one.token, one.logprob) for one in event.prompt_logprobs or ()] if isinstance(event, Delta) else []


def make_spec(
    prompt: tuple[int, ...], seed: int, max_tokens: int, temperature: float, stop: tuple[str, ...] = (), **fields: object
) -> SequenceSpec:
    return SequenceSpec(
        prompt=prompt,
        sampling=SamplingParams(temperature=temperature),
        stopping=StopParams(max_tokens=max_tokens, stop=stop),
        seed=seed,
        **fields,  # type: ignore[arg-type]
    )


@pytest.fixture(autouse=True)
def _steps_follow_on_each_other_whatever_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "AHEAD_S_LEAST", 0.0)
    monkeypatch.setattr(stepping, "AHEAD_S_MAX", math.inf)


class Machine(RuleBasedStateMachine):
    sequences: Bundle[int] = Bundle("sequences")

    @initialize(
        row_budget=st.sampled_from([1, 3, 7, 32]), kind=st.sampled_from(sorted(KINDS)), pool_n_bytes=st.sampled_from([0, 8000, 1 << 20])
    )
    def start(self, row_budget: int, kind: str, pool_n_bytes: int) -> None:
        self.model, self.scheduler = make_scheduler(row_budget, kind, pool_n_bytes)
        self.now = 0.0
        self.specs: dict[int, SequenceSpec] = {}
        self.texts: dict[int, str] = {}
        self.scores: dict[int, list[tuple[int, float]]] = {}
        self.ends: dict[int, Finished | Failed] = {}

    @rule(
        target=sequences,
        beginning=st.sampled_from(BEGINNINGS),
        n_beginning=st.sampled_from([0, 10, 40, 59, 60]),
        rest=st.lists(st.integers(33, 126), min_size=1, max_size=N_CTX - 61).map(tuple),
        seed=st.integers(0, 3),
        max_tokens=st.integers(0, 30),
        n_prompt_logprobs=st.sampled_from([None, None, None, 0]),
        temperature=st.sampled_from([0.0, 1.0]),
        stop=st.sampled_from(STOPS),
        priority=st.integers(-1, 1),
        timeout_s=st.sampled_from([None, None, None, 5.0]),
        cache_salt=st.sampled_from(["", "", "", "salt"]),
        cache_prompt=st.sampled_from([True, True, True, False]),
        group=st.sampled_from(["", "choices"]),  # as those of one request are
        key=st.sampled_from(["", "one", "other"]),
    )
    def submit(
        self,
        beginning: tuple[int, ...],
        n_beginning: int,
        rest: tuple[int, ...],
        seed: int,
        max_tokens: int,
        temperature: float,
        **fields: object,
    ) -> object:
        return self.submit_prompt(beginning[:n_beginning] + rest, seed, max_tokens, temperature, **fields)

    @rule(target=sequences, data=st.data(), more=st.lists(st.integers(33, 126), max_size=10).map(tuple))
    def go_on_with_a_conversation(self, data: st.DataObject, more: tuple[int, ...]) -> object:
        if not self.specs:
            return multiple()
        seq_id = data.draw(st.sampled_from(sorted(self.specs)))
        prompt = (*self.specs[seq_id].prompt, *self.texts[seq_id].encode("ascii", "ignore"), *more)
        return self.submit_prompt(prompt[: N_CTX - 1], 1, 20, 0.0)

    def submit_prompt(self, prompt: tuple[int, ...], seed: int, max_tokens: int, temperature: float, **fields: object) -> object:
        spec = make_spec(prompt, seed, max_tokens, temperature, **fields)
        seq_id = self.scheduler.submit(spec, self.now)
        self.specs[seq_id], self.texts[seq_id], self.scores[seq_id] = spec, "", []
        return multiple(seq_id)

    @rule(key=st.sampled_from(["", "one", "other"]), n=st.integers(1, 5), timeout_s=st.sampled_from([None, 1.0]))
    def ask_for_room(self, key: str, n: int, timeout_s: float | None) -> None:
        refusal: QuotaExceeded | Unavailable | DeadlineExceeded | None = None
        try:
            self.scheduler.check_room(self.now, n_sequences=n, key=key, timeout_s=timeout_s)
        except (QuotaExceeded, Unavailable, DeadlineExceeded) as error:
            refusal = error
        if isinstance(refusal, DeadlineExceeded):
            assert timeout_s is not None
        elif refusal is not None:
            assert 1.0 <= refusal.retry_after_s <= 120.0

    @rule(seq_id=sequences)
    def cancel(self, seq_id: int) -> None:
        self.scheduler.cancel(seq_id)

    @rule(n_steps=st.integers(1, 10))
    def step(self, n_steps: int) -> None:
        for _ in range(n_steps):
            self.take(run_step(self.model, self.scheduler, self.now) or [])

    def next_step(self) -> Plan | None:
        """The step that is due; what is told without one is taken."""
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return None
        self.take(plan.events)
        return plan if plan.is_step else None

    @rule(meanwhile=st.sampled_from(["cancel", "end all", "submit", "time passes"]), data=st.data())
    def step_while_something_happens(self, meanwhile: str, data: st.DataObject) -> None:
        plan = self.next_step()
        if plan is None:
            return
        output = compute(self.model, plan, tick)
        match meanwhile:
            case "cancel" if self.specs:
                self.scheduler.cancel(data.draw(st.sampled_from(sorted(self.specs))))
            case "end all":
                self.take(self.scheduler.end_all(Unavailable("going down", retry_after_s=1.0)))
            case "submit":
                self.submit_prompt(BEGINNINGS[0], 0, 5, 0.0)
            case _:
                self.now += 6.0
        if data.draw(st.booleans()):
            self.take(self.scheduler.sweep_waiting(self.now))
        self.take(self.scheduler.apply(plan, output, self.now))

    @rule(data=st.data(), n_steps=st.integers(1, 8))
    def steps_that_begin_before_the_one_before_is_settled(self, data: st.DataObject, n_steps: int) -> None:
        """As the loop has them: planned while one runs, begun when it is computed, and computed to their end when it is settled."""
        plan = self.next_step()
        if plan is None:
            return
        for _ in range(n_steps):
            ahead = self.scheduler.plan_ahead(plan, self.now, by_model=False)
            output = compute(self.model, plan, tick)
            if ahead is None or not ahead.begin():
                self.take(self.scheduler.apply(plan, output, self.now))
                return
            if self.specs and data.draw(st.booleans()):
                self.scheduler.cancel(data.draw(st.sampled_from(sorted(self.specs))))
            self.take(self.scheduler.apply(plan, output, self.now, ahead))
            ahead.settle()
            plan = ahead.plan
        if data.draw(st.booleans()):
            self.take(self.scheduler.apply(plan, compute(self.model, plan, tick), self.now))
            return
        error = data.draw(st.sampled_from(ERRORS))
        if not isinstance(error, NoRoom | Aborted):
            for sequence in plan.members():
                self.model.drop(sequence.slot)
        self.take(self.scheduler.apply_failure(plan, error, self.now))

    @rule(error=st.sampled_from(ERRORS), data=st.data())
    def fail_a_step(self, error: Exception, data: st.DataObject) -> None:
        plan = self.next_step()
        if plan is None:
            return
        n_moves_done = data.draw(st.integers(0, len(plan.moves)))
        for move in plan.moves[:n_moves_done]:
            do_move(self.model, plan, move, tick)
        plan.n_moves_done = n_moves_done
        leaves_slots_as_they_were = isinstance(error, NoRoom) or (isinstance(error, Aborted) and self.model.capabilities.can_trim)
        if n_moves_done == len(plan.moves) and not leaves_slots_as_they_were:  # the content of the batch's slots is undefined
            for slot in {sequence.slot for sequence in plan.members()}:
                self.model.drop(slot)
        if self.specs and data.draw(st.booleans()):
            self.scheduler.cancel(data.draw(st.sampled_from(sorted(self.specs))))
            self.take(self.scheduler.sweep_waiting(self.now))
        self.take(self.scheduler.apply_failure(plan, error, self.now))

    @rule(in_a_step=st.booleans())
    def die(self, in_a_step: bool) -> None:
        plan = self.scheduler.plan(self.now) if in_a_step else None
        if plan is not None:
            self.take(plan.events)
        self.empty_the_model()
        self.take(self.scheduler.apply_death(plan, ModelDied("killed"), self.now))

    def empty_the_model(self) -> None:
        for slot in range(N_SLOTS):
            self.model.drop(slot)

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        if self.scheduler._running:
            self.scheduler._preempt(data.draw(st.sampled_from(self.scheduler._running)))

    @rule(seconds=st.sampled_from([0.5, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def evict_cached(self) -> None:
        self.scheduler.evict_cached()

    @rule()
    def end_all(self) -> None:
        self.take(self.scheduler.end_all(Unavailable("going down", retry_after_s=1.0)))

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert event.seq_id not in self.ends, "something came after the terminal event"
            if isinstance(event, Delta):
                self.texts[event.seq_id] += event.text
                self.scores[event.seq_id] += scores_of(event)
                continue
            self.ends[event.seq_id] = event
            if isinstance(event, Finished):
                self.texts[event.seq_id] += event.text
                self.judge(event)
            else:
                assert isinstance(event.error, GenerationFailed | DeadlineExceeded | Unavailable)

    def judge(self, event: Finished) -> None:
        spec = self.specs[event.seq_id]
        stopping = spec.stopping
        expected = alone(tuple(spec.prompt), spec.seed, stopping.max_tokens or 0, spec.sampling.temperature, stopping.stop)
        if event.reason is FinishReason.CANCELLED or event.stop_reason == "timeout":
            assert expected.startswith(self.texts[event.seq_id].rstrip("\N{REPLACEMENT CHARACTER}"))
        else:
            assert self.texts[event.seq_id] == expected
            assert self.scores[event.seq_id] == ([] if spec.n_prompt_logprobs is None else scored_alone(tuple(spec.prompt)))

    @invariant()
    def cells_and_slots_add_up(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    @invariant()
    def the_host_pool_keeps_its_bound(self) -> None:
        if hasattr(self, "scheduler") and self.scheduler.memory.offload is not None:
            self.scheduler.memory.offload.pool.check()

    @invariant()
    def slots_hold_what_the_scheduler_thinks(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        owed = {move.slot for move in self.scheduler.memory._moves if not isinstance(move, Save)}  # that leaves its slot as it is
        tree = self.scheduler.memory.tree
        for sequence in self.scheduler._running:
            if sequence.cancelled:  # what it has too much is owed, and goes with it
                continue
            if sequence.slot not in owed:
                assert self.model.slot_tokens(sequence.slot) == sequence.tokens[: sequence.n_computed]
            else:
                assert sequence.phase is Phase.PREFILL
                assert sequence.n_computed == sequence.n_shared
        for slot in tree._resting.keys() - owed:
            assert self.model.slot_tokens(slot) == tree.tokens_of(slot)
        if not owed:
            n_reserved = sum(sequence.n_held - sequence.n_computed for sequence in self.scheduler._running)
            assert self.model.n_cells_used == self.model.n_cells - self.scheduler.cells.n_free - n_reserved

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10_000):
            events = run_step(self.model, self.scheduler, self.now)
            if events is None:
                break
            self.take(events)
        assert set(self.ends) == set(self.specs), "an accepted sequence has no terminal event"
        self.scheduler.check()
        assert self.scheduler.cells.n_held == 0
        self.scheduler.evict_cached()
        run_step(self.model, self.scheduler, self.now)
        self.scheduler.check()
        assert self.scheduler.cells.n_free == self.model.n_cells
        assert self.scheduler.cells.n_free_slots == N_SLOTS
        assert self.model.n_cells_used == 0


TestMachine = Machine.TestCase
TestMachine.pytestmark = [pytest.mark.slow]  # type: ignore[attr-defined]  # the same on every Python, as all that is simulated
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
