"""What `/metrics` tells of steps, and what a model tells there of itself."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import generate_latest

from cllm.backend import Measure
from cllm.config import Settings
from cllm.engine.batch.compute import compute
from cllm.engine.events import Failed, Finished
from cllm.engine.limits import Limits
from cllm.engine.stepping import StepScheduler
from cllm.errors import GenerationFailed
from cllm.serve.house import House, Tenant
from cllm.serve.metrics import Metrics
from cllm.testing.mortal import Panic
from tests.serve.conftest import make_spec
from tests.serve.timed import TimedModel


class Counting:
    def __init__(self, *measures: Measure) -> None:
        self._measures = measures

    def measures(self) -> list[Measure]:
        return list(self._measures)


def told(model: object) -> list[str]:
    metrics = Metrics()
    metrics.watch_model(model)
    return [line for line in metrics.text().decode().splitlines() if "_doors" in line and not line.startswith("#")]


def test_its_numbers_stand_beside_the_servers() -> None:
    doors = [Measure(name="doors", help="Doors", value=n, labels={"side": side}) for side, n in (("left", 2), ("right", 3))]
    model = Counting(*doors, Measure(name="open_doors", help="Open", value=1.5, is_count=False))
    assert told(model) == ['cllm_doors_total{side="left"} 2.0', 'cllm_doors_total{side="right"} 3.0', "cllm_open_doors 1.5"]


def test_a_model_that_keeps_none_tells_none() -> None:
    assert told(object()) == []


@pytest.mark.parametrize("name", ["Doors", "a b", "x{}", ""])
def test_nonsense_is_left_out_and_the_rest_is_told(name: str) -> None:
    metrics = Metrics()
    metrics.watch_model(Counting(Measure(name=name, help="", value=1.0)))
    assert b"cllm_queue_seconds" in metrics.text()


@pytest.mark.parametrize("label", ["", "a b", "1a", "\udce8", "model", "le", "__name__", "é"])
def test_labels_that_no_number_may_have_are_left_out_with_it_and_the_rest_is_told(label: str) -> None:
    metrics = Metrics()
    metrics.watch_model(Counting(Measure(name="doors", help="", value=1.0, labels={label: "x"})))
    text = metrics.text()
    assert b"cllm_queue_seconds" in text
    assert b"_doors" not in text


def test_of_several_models_none_tells_numbers_by_a_name_of_the_servers_own() -> None:
    house = House([Tenant(Settings(model="a")), Tenant(Settings(model="b"))])
    for name in ("doors", "queue_seconds"):
        house.tenants[1].engine.metrics.watch_model(Counting(Measure(name=name, help="", value=77.0, is_count=False)))
    lines = generate_latest(house.registry).decode().splitlines()
    assert [line for line in lines if line.endswith(" 77.0")] == ['cllm_doors{model="b"} 77.0']
    assert 'cllm_queue_seconds_count{model="b"} 0.0' in lines


def test_texts_that_are_no_utf8_are_told_escaped() -> None:
    measure = Measure(name="doors", help="T\udcfcren", value=1, labels={"side": "l\udceft"})
    assert told(Counting(measure)) == [r'cllm_doors_total{side="l\\udceft"} 1.0']


def test_labels_and_a_help_that_are_no_text_are_told_as_such() -> None:
    floor: Any = 3
    assert told(Counting(Measure(name="doors", help=floor, value=1, labels={"floor": floor}))) == ['cllm_doors_total{floor="3"} 1.0']


def test_what_somebody_is_to_be_woken_for_is_there_before_it_happens() -> None:
    """Or its first event, and all that come before the first look, would be no growth."""
    told = Metrics().text().decode()
    for series in (
        'sequences_ended_total{how="server_error"}',
        'sequences_ended_total{how="timeout_error"}',
        'steps_failed_total{error="ModelDied"}',
        'refusals_total{why="queue_full"}',
        'refusals_total{why="wait_too_long"}',
    ):
        assert f"cllm_{series} 0.0\n" in told


@pytest.mark.parametrize("error", [RuntimeError("no"), Panic("no")])
def test_a_model_that_cannot_count_is_left_out_and_the_rest_is_told(error: BaseException) -> None:
    class Lost:
        def measures(self) -> list[Measure]:
            raise error

    metrics = Metrics()
    metrics.watch_model(Lost())
    assert b"cllm_queue_seconds" in metrics.text()


def value_of(metrics: Metrics, name: str) -> float | None:
    value = metrics.registry.get_sample_value(name)
    return None if value is None else float(value)


def test_how_far_steps_were_from_what_was_expected_is_told_and_shrinks_as_they_are_made() -> None:
    model = TimedModel(first_s=0.2, row_s=0.03, output_s=0.001)
    limits = Limits(n_cells=4096, n_slots=8, n_ctx=4096, n_rows_max=512, row_budget=64, n_live_max=8, n_waiting_max=64)
    scheduler, metrics = StepScheduler(limits, model.vocabulary), Metrics()
    metrics.watch(scheduler)
    name = "cllm_step_prediction_error"
    assert value_of(metrics, f"{name}_count") == 0
    assert value_of(metrics, f"{name}_median") is None

    def make_steps(n: int) -> float:
        """Return the mean error of so many steps."""
        before = value_of(metrics, f"{name}_sum")
        for _ in range(n):
            if not scheduler.n_running + scheduler.n_waiting:
                for i in range(8):
                    scheduler.submit(make_spec(f"{i} and so on" * (i + 1), 20), 0.0)
            plan = scheduler.plan(0.0)
            assert plan is not None
            output = compute(model, plan, model.clock)
            metrics.step(plan, output)
            scheduler.apply(plan, output, 0.0)
        after = value_of(metrics, f"{name}_sum")
        assert before is not None
        assert after is not None
        return (after - before) / n

    first, later = make_steps(4), make_steps(600)
    assert value_of(metrics, f"{name}_count") == 604
    assert make_steps(40) < min(0.1, first / 4)
    assert later < first
    assert value_of(metrics, f"{name}_median") == scheduler.cost.error()


def test_rows_that_are_scored_are_outputs_too() -> None:
    model = TimedModel(first_s=0.2, row_s=0.03, output_s=0.001)
    limits = Limits(n_cells=4096, n_slots=8, n_ctx=4096, n_rows_max=512, row_budget=64, n_live_max=8, n_waiting_max=64)
    scheduler, metrics = StepScheduler(limits, model.vocabulary), Metrics()
    metrics.watch(scheduler)
    scheduler.submit(make_spec("once upon a time", 1, n_prompt_logprobs=0), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    metrics.step(plan, compute(model, plan, model.clock))
    n_outputs = plan.batch.n_outputs
    assert n_outputs > len(plan.outputs)
    assert value_of(metrics, "cllm_step_outputs_sum") == n_outputs


def test_who_left_before_is_not_in_what_others_waited_for() -> None:
    model = TimedModel(first_s=0.2, row_s=0.03, output_s=0.001)
    limits = Limits(n_cells=4096, n_slots=8, n_ctx=4096, n_rows_max=512, row_budget=64, n_live_max=1, n_waiting_max=64)
    scheduler, metrics = StepScheduler(limits, model.vocabulary), Metrics()
    metrics.watch(scheduler)
    stays, waits = (scheduler.submit(make_spec(n_tokens=2), 0.0) for _ in range(2))
    now, n_ended = 0.0, 0
    while (plan := scheduler.plan(now)) is not None:
        now += 1.0
        for event in plan.events + scheduler.apply(plan, compute(model, plan, lambda: model.now), now):
            if isinstance(event, Finished):
                n_ended += 1
                metrics.end(event)
        scheduler.cancel(waits)
    assert n_ended == 2
    assert value_of(metrics, "cllm_queue_seconds_count") == value_of(metrics, "cllm_prefill_seconds_count") == 1
    assert stays < waits


def test_moves_alone_are_no_step_of_the_model() -> None:
    model = TimedModel(first_s=0.2, row_s=0.03, output_s=0.001)
    limits = Limits(n_cells=4096, n_slots=8, n_ctx=4096, n_rows_max=512, row_budget=64, n_live_max=8, n_waiting_max=64)
    scheduler, metrics = StepScheduler(limits, model.vocabulary), Metrics()
    scheduler.submit(make_spec(n_tokens=2, cache_prompt=False), 0.0)
    n_rows = []
    while (plan := scheduler.plan(0.0)) is not None:
        output = compute(model, plan, model.clock)
        metrics.step(plan, output)
        scheduler.apply(plan, output, 0.0)
        n_rows.append(plan.n_rows)
    assert n_rows[-1] == 0, "what it had is dropped in a step of its own"
    assert value_of(metrics, "cllm_step_rows_count") == len(n_rows) - n_rows.count(0) == 2


def test_an_answer_for_which_a_client_left_no_token_is_no_sign_of_a_damaged_model() -> None:
    metrics = Metrics()
    for code, n in (("grammar_failed", 0.0), ("invalid_logits", 1.0)):
        metrics.end(Failed(0, GenerationFailed("no", code=code)))
        assert value_of(metrics, "cllm_invalid_logits_total") == n
