"""What becomes of requests when more come than can be served, in simulated time on measured step times."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from cllm.engine.batch.plan import Plan
from cllm.engine.cost.curve import Curve
from cllm.engine.cost.model import CostModel
from cllm.engine.cost.places import Places
from cllm.engine.limits import Limits
from cllm.engine.sampling.params import StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.errors import Unavailable
from cllm.testing.fake import FakeVocabulary
from tests.engine.simulation import NO_OUTPUT_MS, STEP_MS, Asked, Simulation, ask, step_s
from tests.lines import n_lines

CURVE = Curve(
    rows=tuple((n, (ms - NO_OUTPUT_MS * n) / 1000) for n, ms in STEP_MS.items()),
    outputs=tuple((n, NO_OUTPUT_MS * n / 1000) for n in STEP_MS),
)
LONGEST_S = 240.0
SETTLED_S = 40.0  # how long a load has to show what it does


def make_scheduler(**changes: Any) -> StepScheduler:
    """One with the server's defaults."""
    fields: dict[str, Any] = {"n_cells": 40_000, "n_slots": 256, "n_ctx": 2_000, "n_rows_max": 512, "row_budget": None, "n_live_max": 64}
    fields |= {"n_waiting_max": 1024, "patience_s": 2.5, "wait_max_s": 300.0, "itl_max_s": 0.25, **changes}
    return StepScheduler(Limits(**fields), FakeVocabulary(), CostModel(CURVE, n_rows_max=512))


def some_request(at: float, random: random.Random, key: str = "") -> Asked:
    return ask(at, random.randint(16, 64), random.randint(20, 80), key)


def long_request(at: float, random: random.Random, key: str = "") -> Asked:
    """Twice as much for its prompt as for its answer."""
    return ask(at, random.randint(8, 240), random.randint(8, 100), key)


def goodput(rate: float, some_request: Callable[[float, random.Random], Asked] = some_request, **changes: Any) -> float:
    """Requests served well, in a second, while `rate` come in a second."""
    dice, scheduler = random.Random(1), make_scheduler(**changes)
    simulation = Simulation(scheduler, refuse=lambda spec, now: scheduler.check_room(now, key=spec.key))
    at, requests = 0.0, []
    while at < LONGEST_S:
        at += dice.expovariate(rate)
        requests.append(some_request(at, dice))
    simulation.ask(requests)
    simulation.run(until_s=LONGEST_S)
    scheduler.check()
    return sum(request.is_good() for request in requests if request.at >= SETTLED_S) / (LONGEST_S - SETTLED_S)


# --- overload ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def best() -> float:
    """The goodput of loads up to what can just be served, which is about two requests in a second."""
    return max(goodput(rate) for rate in (1.5, 2.0, 2.5))


def test_at_four_times_what_can_be_served_as_many_are_served_well_as_at_any_load(best: float) -> None:
    assert goodput(8.0) >= 0.9 * best


def test_at_four_times_what_can_be_served_as_many_are_served_well_where_most_of_the_work_are_prompts() -> None:
    best = max(goodput(rate, long_request) for rate in (0.6, 0.9, 1.2))
    assert best > 0.5
    assert goodput(4.0, long_request) >= 0.9 * best


def test_many_answers_to_one_long_prompt_are_its_work_once() -> None:
    """Or the next would be told to come again in minutes, though all of them wait for one prompt alone."""
    scheduler = make_scheduler(keeps_prefixes=True, can_share=True, can_trim=True, wait_max_s=60.0, n_live_max=64)
    simulation = Simulation(scheduler)
    simulation.ask([ask(0.02 * i, 40, 40) for i in range(150)])  # more than it can do at a time, so that it knows what it can
    simulation.run(until_s=60.0)
    stopping, prompt = StopParams(max_tokens=20), list(range(1500))
    for _ in range(32):
        scheduler.submit(SequenceSpec(prompt=prompt, stopping=stopping), 60.0)
    scheduler.check_room(60.0)
    for _ in range(32):
        scheduler.submit(SequenceSpec(prompt=prompt.copy(), stopping=stopping), 60.0)  # of others, who may be gone any time
    with pytest.raises(Unavailable, match="the wait would be"):
        scheduler.check_room(60.0)


@pytest.mark.parametrize("is_kept", [True, False])
def test_behind_one_that_gave_way_a_newcomer_waits_for_what_is_left_of_it(is_kept: bool) -> None:
    """Its prompt is long, and was computed before an urgent one took its place."""
    scheduler = make_scheduler(n_ctx=25_000, n_live_max=2, wait_max_s=60.0, keeps_prefixes=is_kept, can_share=is_kept, can_trim=True)
    simulation = Simulation(scheduler)
    simulation.ask([ask(0.0, 20, 4_000), ask(0.0, 20_000, 400)])
    while any(sequence.n_generated < 10 for sequence in scheduler._sequences.values()) or not scheduler.n_running:
        simulation.run(simulation.now + 1.0)
    scheduler.check_room(simulation.now)
    simulation.ask([ask(simulation.now, 20, 30, priority=-1)])
    simulation.run(simulation.now + 0.1)
    (waiting,) = scheduler._queue
    assert waiting.n_prompt == 20_000
    assert waiting.work == waiting.account.owed
    if is_kept:
        assert waiting.work.n_prompt == 1, "the token that was drawn last"
        scheduler.check_room(simulation.now)
        scheduler.check_room(simulation.now, timeout_s=20.0)
        return
    assert waiting.work.n_prompt == len(waiting.tokens)
    with pytest.raises(Unavailable, match="the wait would be"):
        scheduler.check_room(simulation.now)
    with pytest.raises(Unavailable, match="the wait would be"):
        scheduler.check_room(simulation.now, timeout_s=20.0)


def test_what_was_computed_counts_as_owed_where_its_cells_are_wanted_and_no_host_keeps_them() -> None:
    scheduler = make_scheduler(n_ctx=22_000, n_live_max=2, n_cells=22_000, keeps_prefixes=True, can_share=True, can_trim=True)
    simulation = Simulation(scheduler)
    simulation.ask([ask(0.0, 20_000, 400)])
    while any(sequence.n_generated < 10 for sequence in scheduler._sequences.values()) or not scheduler.n_running:
        simulation.run(simulation.now + 1.0)
    urgent = ask(simulation.now, 5_000, 30, priority=-1)
    simulation.ask([attrs.evolve(urgent, spec=attrs.evolve(urgent.spec, prompt=[97] * 5_000))])
    simulation.run(simulation.now + 0.1)
    (waiting,) = scheduler._queue
    assert waiting.n_prompt == 20_000
    assert waiting.work.n_prompt >= len(waiting.tokens) - scheduler.memory.n_known(waiting) > 1


@pytest.mark.parametrize("priority", [0, 1])
def test_however_many_wait_a_newcomer_is_weighed_without_looking_at_each(priority: int) -> None:
    def n_lines_beside(n_waiting: int) -> int:
        scheduler = make_scheduler(n_live_max=1, n_waiting_max=2 * n_waiting)
        for _ in range(n_waiting):
            scheduler.submit(ask(0.0, 20, 20, priority=1).spec, 0.0)
        scheduler.check()
        return n_lines(lambda: scheduler.check_room(0.0, priority=priority, timeout_s=20.0))

    assert n_lines_beside(400) < 2 * n_lines_beside(4)


def test_where_few_generate_the_wait_behind_long_prompts_is_told_about_as_long_as_it_is() -> None:
    """A step of a GPU takes nearly as long for four rows as for a hundred, and of late there were answers alone: by rows it would be told
    twenty times as long.
    """

    def rows_s(n_rows: int) -> float:
        return 0.01 + 0.00005 * n_rows

    curve = Curve(rows=tuple((n, rows_s(n)) for n in (1, 4, 64, 512)), outputs=((1, 1e-6), (512, 512e-6)))
    limits = Limits(
        n_cells=100_000, n_slots=8, n_ctx=8_000, n_rows_max=512, row_budget=None, n_live_max=4, n_waiting_max=64, wait_max_s=1.0
    )
    scheduler = StepScheduler(limits, FakeVocabulary(), CostModel(curve, n_rows_max=512))
    simulation = Simulation(scheduler, step_s=lambda plan: rows_s(plan.n_rows))
    simulation.ask(ask(0.0, 16, 4_000) for _ in range(4))
    simulation.run(until_s=30.0)
    running = scheduler.views()
    waiting = [ask(30.0, 6_000 + i, 2) for i in range(8)]
    simulation.ask(waiting)
    simulation.run(until_s=30.1)
    with pytest.raises(Unavailable, match="the wait would be") as caught:
        scheduler.check_room(simulation.now)
    told_s = caught.value.retry_after_s or 0.0
    scheduler.apply_death(None, RuntimeError("the worker died"), simulation.now)
    assert not scheduler.n_running
    with pytest.raises(Unavailable, match="the wait would be") as caught:
        scheduler.check_room(simulation.now)
    assert told_s / 2 < (caught.value.retry_after_s or 0.0) < 3 * told_s, "by what tokens took when somebody ran"
    for view in running:
        scheduler.cancel(view.seq_id)
    simulation.run()
    wait_s = max(request.first_at or math.inf for request in waiting) - 30.1
    assert wait_s / 2 < 1.0 + told_s < 2 * wait_s


def test_a_burst_after_a_load_has_ended_is_priced_as_beside_a_full_house() -> None:
    """The last answers of a load have few others beside them, and each of their tokens takes as long as many rows."""

    def rows_s(n_rows: int) -> float:
        return 0.03 + 0.0015 * n_rows

    curve = Curve(rows=tuple((n, rows_s(n)) for n in (1, 4, 16, 64, 512)), outputs=((1, 1e-6), (512, 512e-6)))
    limits = Limits(
        n_cells=100_000, n_slots=8, n_ctx=8_000, n_rows_max=512, row_budget=None, n_live_max=8, n_waiting_max=1000, wait_max_s=60.0
    )
    scheduler = StepScheduler(limits, FakeVocabulary(), CostModel(curve, n_rows_max=512))
    simulation = Simulation(scheduler, step_s=lambda plan: rows_s(plan.n_rows), refuse=lambda spec, now: scheduler.check_room(now))
    simulation.ask(ask(0.0, 20, 128 if i else 200) for i in range(17))
    simulation.run()
    burst = [ask(simulation.now + 5.0 + 0.001 * bool(i), 200, 128) for i in range(61)]
    simulation.ask(burst)
    simulation.run()
    assert not any(request.refused for request in burst)
    assert max(request.ttft_s for request in burst) < 60.0


def test_in_order_of_arrival_everybody_would_wait_too_long(best: float) -> None:
    assert goodput(8.0, patience_s=None) < 0.1 * best


def test_without_a_limit_of_places_everybody_would_be_too_slow(best: float) -> None:
    assert goodput(8.0, itl_max_s=None) < 0.5 * best


def test_a_burst_is_served_to_the_last_request() -> None:
    scheduler = make_scheduler()
    simulation = Simulation(scheduler, refuse=lambda spec, now: scheduler.check_room(now))
    simulation.ask(ask(0.0, 32, 50) for _ in range(64))
    done = simulation.run()
    assert all(request.ended_at is not None for request in done)
    assert max(request.itl_s for request in done) <= 0.25


def test_beside_others_a_deadline_that_its_prompt_makes_impossible_ends_before_anything_is_computed_for_it() -> None:
    scheduler = make_scheduler(n_live_max=4)
    simulation = Simulation(scheduler)
    simulation.ask(ask(0.0, 32, 200) for _ in range(3))
    simulation.run(until_s=5.0)
    n_rows = scheduler.totals.n_prefill_rows
    late = ask(5.0, 1900, 10, timeout_s=0.5)
    simulation.ask([late])
    simulation.run()
    assert late.first_at is None
    assert scheduler.totals.n_prefill_rows == n_rows


def test_one_that_is_hopeless_is_refused_while_what_is_known_is_fresh_though_nobody_runs() -> None:
    """Or each of them would take the only place from those who come after it."""
    scheduler = make_scheduler(n_live_max=1)
    simulation = Simulation(scheduler)
    short = [ask(2.0 * i, 32, 2) for i in range(20)]
    hopeless = [ask(2.0 * i + 1.0, 1900, 2, timeout_s=0.5) for i in range(20)]
    simulation.ask(short + hopeless)
    simulation.run()
    assert all(request.first_at is not None and request.first_at - request.at < 0.5 for request in short)
    assert scheduler.totals.n_prefill_rows == 20 * 32


def test_what_a_few_slow_prompts_seemed_to_show_refuses_nobody_for_long() -> None:
    """Or all prompts that are long against their deadlines would be refused, and nothing learned, by a server that has nothing to do."""
    scheduler = make_scheduler(itl_max_s=None)
    slow, simulation = 12.0, Simulation(scheduler, slower=lambda now: slow if now < 1000.0 else 1.0)
    simulation.ask(ask(200.0 * i, 1500, 2) for i in range(4))
    requests = [ask(1000.0 + 30.0 * i, 1500, 2, timeout_s=15.0) for i in range(20)]
    simulation.ask(requests)
    simulation.run()
    assert [request.first_at is not None for request in requests] == [True] * 20


def test_nobody_makes_room_for_a_deadline_that_is_hopeless_and_its_key_pays_nothing() -> None:
    scheduler = make_scheduler(n_live_max=2)
    simulation = Simulation(scheduler)
    simulation.ask(ask(0.0, 32, 400) for _ in range(2))
    urgent = ask(10.0, 1900, 10, key="urgent", priority=-1, timeout_s=0.5)  # it would take a place from one of those
    simulation.ask([urgent])
    simulation.run()
    assert urgent.first_at is None
    assert scheduler.totals.n_preempted == 0
    assert scheduler._accounts.of("urgent").served <= scheduler._accounts.of("").served  # the level that it joined at


# --- two keys ---------------------------------------------------------------------------------------------------------


def quiet_beside(
    n_flooding: int, flood: Callable[[float, random.Random, str], Asked] = some_request, **changes: Any
) -> tuple[list[Asked], Simulation]:
    """One key asks now and then, while another has `n_flooding` requests under way at any time."""
    dice, scheduler = random.Random(2), make_scheduler(**changes)

    def again(request: Asked, now: float) -> Asked | None:
        return flood(now, dice, "flood") if request.spec.key == "flood" and now < LONGEST_S else None

    simulation = Simulation(scheduler, again=again)
    quiet = [ask(20 + 3.77 * i, 32, 50, "quiet") for i in range(50)]
    simulation.ask(flood(0.0, dice, "flood") for _ in range(n_flooding))
    simulation.ask(quiet)
    simulation.run()
    return quiet, simulation


def worst_of_hundred(requests: list[Asked]) -> float:
    return sorted(request.ttft_s for request in requests)[round(0.99 * (len(requests) - 1))]


@pytest.mark.parametrize("flood", [some_request, long_request])
@pytest.mark.parametrize("n_flooding", [8, 32, 100])
def test_beside_a_key_that_floods_the_other_waits_two_steps_longer_than_alone(
    n_flooding: int, flood: Callable[[float, random.Random, str], Asked]
) -> None:
    alone, _ = quiet_beside(0)
    beside, simulation = quiet_beside(n_flooding, flood)
    assert worst_of_hundred(beside) <= worst_of_hundred(alone) + 2 * statistics.median(simulation.steps_s)


def test_yielding_is_no_thrashing_each_request_of_the_quiet_key_costs_one_preemption_at_most() -> None:
    quiet, simulation = quiet_beside(100)
    assert 0 < simulation.scheduler.totals.n_preempted <= len(quiet)


def test_keys_that_both_flood_are_served_by_their_weights() -> None:
    dice, scheduler = random.Random(3), make_scheduler(key_weights={"double": 2.0})

    def again(request: Asked, now: float) -> Asked:
        return some_request(now, dice, request.spec.key)

    simulation = Simulation(scheduler, again=again)
    simulation.ask(some_request(0.0, dice, key) for key in ("double", "single") for _ in range(50))
    simulation.run(until_s=LONGEST_S)
    n_tokens = {key: sum(request.n_tokens for request in simulation.done if request.spec.key == key) for key in ("double", "single")}
    assert n_tokens["double"] / n_tokens["single"] == pytest.approx(2.0, rel=0.1)


# --- places -----------------------------------------------------------------------------------------------------------


def test_a_slow_model_has_as_many_places_as_bring_most_of_what_it_can_do_nevertheless() -> None:
    slow = CostModel(Curve(rows=((1, 2.0), (8, 2.4), (64, 19.0)), outputs=((1, 0.0),)), n_rows_max=64)
    n = Places(slow, n_max=64, itl_max_s=0.25).n(0, 0.0)
    assert 6 <= n <= 8, "a step of eight rows takes hardly longer than one of a single row, and a larger one in proportion"


def test_there_are_four_places_however_slow_a_model_is() -> None:
    """Behind one answer alone, everybody would wait for the whole of it."""
    flat = CostModel(Curve(rows=((1, 1.0), (64, 64.0)), outputs=((1, 0.0),)), n_rows_max=64)
    assert Places(flat, n_max=64, itl_max_s=0.25).n(0, 0.0) == 4
    assert Places(flat, n_max=2, itl_max_s=0.25).n(0, 0.0) == 2


def test_long_answers_leave_fewer_places_than_short_ones() -> None:
    cost = CostModel(attrs.evolve(CURVE, attended=((1, 8e-6),)), n_rows_max=512)
    n_places = [Places(cost, n_max=64, itl_max_s=0.25).n(0, 0.0, n_own) for n_own in (0.0, 500.0, 2000.0)]
    assert n_places == sorted(n_places, reverse=True)
    assert n_places[0] > n_places[-1] >= 4


def test_steps_that_said_otherwise_of_single_counts_take_no_places_away() -> None:
    cost, true = CostModel(CURVE, n_rows_max=512), CostModel(CURVE, n_rows_max=512)
    n_before = Places(cost, n_max=64, itl_max_s=0.25).n(0, 0.0)
    for _ in range(500):
        for n, slowdown in ((1, 1 / 3), (8, 1.5), (16, 1.5)):
            cost.observe(n, n, 0, slowdown * true.step_s(n, n, 0))
    assert Places(cost, n_max=64, itl_max_s=0.25).n(0, 0.0) >= n_before / 2


def test_the_more_prompt_rows_come_with_a_token_the_fewer_places_there_are() -> None:
    cost = CostModel(CURVE, n_rows_max=512)
    n_places = [Places(cost, n_max=64, itl_max_s=0.25).n(0, prompt_rows) for prompt_rows in (0.0, 1.0, 3.0)]
    assert n_places == sorted(n_places, reverse=True)
    assert n_places[0] > n_places[-1]


def test_a_batch_has_no_more_rows_than_the_model_takes_however_many_come_with_a_token() -> None:
    assert Places(CostModel(CURVE, n_rows_max=64), n_max=64, itl_max_s=0.25).n(0, 100.0) >= 1


def test_a_fast_model_has_all_places() -> None:
    fast = CostModel(Curve(rows=((1, 0.005), (64, 0.008)), outputs=((1, 0.0001),)), n_rows_max=64)
    assert Places(fast, n_max=64, itl_max_s=0.25).n(0, 3.0) == 64


def test_as_long_as_nothing_was_measured_all_places_are_open() -> None:
    guessed = CostModel(CURVE, n_rows_max=512, measured=False)
    places = Places(guessed, n_max=64, itl_max_s=0.001)
    assert places.n(0, 1.0) == 64


# --- a step that was held up ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("held_up_s", [0.0, 60.0, 600.0])
def test_after_a_step_that_was_held_up_those_who_find_free_places_are_not_refused(held_up_s: float) -> None:
    """A process that was stopped, or a machine that was moved, says nothing of how fast it is."""
    scheduler = make_scheduler(n_live_max=16)
    held_up = [held_up_s]

    def step(plan: Plan) -> float:
        return step_s(plan) + (held_up.pop() if held_up and simulation.now > 6 else 0.0)

    simulation = Simulation(scheduler, step_s=step, refuse=lambda spec, now: scheduler.check_room(now, key=spec.key))
    simulation.ask([ask(0.0, 60, 80) for _ in range(24)])
    simulation.run(6.5)
    assert not held_up
    for seq_id in list(scheduler._sequences):
        scheduler.cancel(seq_id)
    bursts = [ask(100_000.0 + 20 * k + 0.01 * i, 60, 80) for k in range(6) for i in range(8)]
    simulation.ask(bursts)
    simulation.run(100_400.0)
    assert not [one.at for one in bursts if one.refused]
