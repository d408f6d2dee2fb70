"""Without a host pool, a cached branch goes for good once every step has paid more for it than computing it anew is likely to take."""

from __future__ import annotations

import pytest

from cllm.config import Settings
from cllm.engine.memory.prices import Prices
from cllm.engine.stepping import StepScheduler
from cllm.serve.loading import limits_of
from cllm.testing.fake import FakeModel
from tests.engine.test_machine import make_spec, run_step
from tests.engine.test_offload import Costs, answer

PREFILL_S = 1e-3  # for a row
CARRY_S = 1e-5  # for a cell, in each step


def make(carry_s: float) -> tuple[FakeModel, StepScheduler]:
    model = FakeModel(n_cells=1000, n_ctx_train=1000)
    scheduler = StepScheduler(limits_of(model, Settings(host_cache_mb=0)), model.vocabulary)
    assert scheduler.memory.offload is None
    scheduler.memory._prices = Prices(Costs(prefill=PREFILL_S, carry=carry_s))
    return model, scheduler


def n_steps_carried(scheduler: StepScheduler, model: FakeModel) -> int:
    """For how many steps of another the branch stays that rests now."""
    before = scheduler.memory.totals.n_retired_slots
    scheduler.submit(make_spec(tuple(b"b" * 20), 0, 400, 0.0), 0.0)
    n_steps = 0
    while scheduler.memory.totals.n_retired_slots == before and run_step(model, scheduler, 0.0) is not None:
        n_steps += 1
    while run_step(model, scheduler, 0.0) is not None:
        pass
    scheduler.check()
    return n_steps


def test_it_goes_when_carrying_has_cost_what_computing_it_again_would_as_far_as_it_is_asked_for() -> None:
    model, scheduler = make(CARRY_S)
    answer(model, scheduler, "a" * 200, 2)
    share = scheduler.memory.prices.demand.share
    assert n_steps_carried(scheduler, model) == pytest.approx(share * PREFILL_S / CARRY_S, abs=2)


def test_what_is_mostly_asked_for_again_is_carried_for_longer() -> None:
    model, scheduler = make(CARRY_S)
    demand = scheduler.memory.prices.demand
    for i in range(40):
        text = tuple(f"{i:02}{'-' * 100}".encode())
        demand.left(("", ""), list(text))
        demand.came(("", ""), list(text))
    answer(model, scheduler, "a" * 200, 2)
    share = demand.share
    assert share > 0.5
    assert n_steps_carried(scheduler, model) == pytest.approx(share * PREFILL_S / CARRY_S, abs=2)


def test_what_costs_nothing_to_carry_stays() -> None:
    model, scheduler = make(0.0)
    answer(model, scheduler, "a" * 200, 2)
    n_steps_carried(scheduler, model)
    assert scheduler.memory.totals.n_retired_slots == 0


def test_demand_is_learned_without_a_host_pool_too_and_outlives_a_change_of_layout() -> None:
    model, scheduler = make(CARRY_S)
    at_first = scheduler.memory.prices.demand.share
    for _ in range(3):
        answer(model, scheduler, "a" * 200, 2)
    learned = scheduler.memory.prices.demand.share
    assert learned > at_first
    scheduler.memory.lost()
    scheduler.memory.laid_out(scheduler.memory.limits, None, Prices(Costs()), carries_states=True)
    assert scheduler.memory.prices.demand.share == learned
