"""How many rows a step may have where scenarios say too little: deep in a long prompt, on a curve as measured on two cores."""

from __future__ import annotations

import math

import pytest

from cllm.engine.batch.budget import RowBudget
from cllm.engine.cost.curve import Curve
from cllm.engine.cost.model import CostModel

CURVE = Curve(
    rows=[(1, 0.013), (2, 0.02), (4, 0.038), (8, 0.071), (12, 0.097), (16, 0.095), (32, 0.2), (64, 0.3), (128, 0.6), (512, 2.5)],
    outputs=[(1, 0.003), (8, 0.01)],
    attended=[(1, 3.5e-5), (16, 1.7e-4), (64, 2.1e-4)],
)
SLOWER = Curve(  # where 32 rows take 1.4 to 1.7 steps of eight that generate, by their cells
    rows=[(1, 0.022), (2, 0.04), (4, 0.062), (8, 0.131), (16, 0.179), (24, 0.281), (32, 0.316), (64, 0.58), (128, 1.03), (512, 4.69)],
    outputs=[(1, 0.011), (8, 0.05)],
    attended=[(1, 3.5e-5), (16, 1.7e-4), (64, 2.5e-4)],
)
N_DECODING, N_CELLS_EACH = 7, 150


def budget_on(curve: Curve, *, apart: bool, itl_max_s: float | None = None) -> tuple[CostModel, RowBudget]:
    cost = CostModel(curve, n_rows_max=512, apart=apart)
    return cost, RowBudget(cost, n_rows_max=512, n_rows_fixed=None, itl_target_s=None, itl_max_s=itl_max_s, apart=apart)


@pytest.mark.parametrize("apart", [False, True])
def test_beside_many_answers_a_step_deep_in_a_prompt_is_not_much_longer_than_they_take_alone(apart: bool) -> None:
    cost, budget = budget_on(CURVE, apart=apart)
    n_attended = N_DECODING * N_CELLS_EACH
    singles = (N_DECODING + 1,) if apart else ()
    usual_s = cost.step_s(N_DECODING, N_DECODING, n_attended, attended=((1, n_attended),))
    for depth in (2048, 3000, 4000):
        n_cells = n_attended + depth
        n_rows = budget.n_rows(N_DECODING, N_DECODING + 1, n_cells, n_owed=4000, n_attended=n_attended, depth=depth, singles=singles)
        prompt = (n_rows - N_DECODING, depth)
        step_s = cost.step_s(n_rows, N_DECODING + 1, n_cells, attended=((1, n_attended), prompt))
        assert step_s < 3 * usual_s, prompt


@pytest.mark.parametrize("n_cells_each", [30, N_CELLS_EACH])
@pytest.mark.parametrize("n", [5, 6, 7])
def test_where_a_pass_of_32_takes_as_long_as_one_and_a_half_steps_of_answers_prompts_go_so_all_the_same(n: int, n_cells_each: int) -> None:
    cost, budget = budget_on(SLOWER, apart=True)
    n_attended = n * n_cells_each
    attended = ((1, n_attended),)
    n_rows = budget.n_rows(n, 8, n_attended, n_owed=300, n_attended=n_attended, length=150, singles=(8,)) - 8
    assert n_rows >= 32
    assert cost.step_s(8 + n_rows, n, n_attended, (8, n_rows), attended=attended) <= 4 * cost.step_s(8, 8, n_attended, attended=attended)


@pytest.mark.parametrize("n_waiting", [2, 4, 7, 12])
@pytest.mark.parametrize("depth", [1000, 2000, 3000])
def test_between_answers_whose_steps_are_long_already_a_deep_prompt_does_not_go_row_by_row(n_waiting: int, depth: int) -> None:
    cost, budget = budget_on(CURVE, apart=True, itl_max_s=0.25)
    n_attended = n_waiting * N_CELLS_EACH
    n_rows, n_steps = budget.n_rows_between(n_waiting, n_waiting + 1, n_attended + depth, n_owed=4000, n_attended=n_attended, depth=depth)
    usual_s = cost.step_s(n_waiting, n_waiting, n_attended, attended=((1, n_attended),))
    row_s, best_s = (cost.step_s(n, 0, 0, attended=((n, depth),)) / n for n in (n_rows, 64))
    assert row_s < 3 * best_s or (n_steps == 1 and n_rows * row_s > 0.5 * usual_s), "unless they would wait for many of their own steps"


@pytest.mark.parametrize("apart", [False, True])
def test_beside_answers_whose_steps_alone_take_all_the_time_that_is_borne_a_prompt_has_more_than_a_row(apart: bool) -> None:
    _, budget = budget_on(CURVE, apart=apart, itl_max_s=0.05)
    n_attended = N_DECODING * N_CELLS_EACH
    singles = (N_DECODING + 1,) if apart else ()
    n_rows = budget.n_rows(N_DECODING, N_DECODING + 1, n_attended, n_owed=4000, n_attended=n_attended, singles=singles)
    assert n_rows - N_DECODING >= 4


@pytest.mark.parametrize("depth", [8000, 11_000, 11_650, 32_000])
def test_between_answers_where_one_row_is_too_long_they_have_steps_for_as_long_as_a_few_take(depth: int) -> None:
    cost, budget = budget_on(CURVE, apart=True)
    n_attended = N_DECODING * N_CELLS_EACH
    n_rows, n_steps = budget.n_rows_between(N_DECODING, N_DECODING + 1, n_attended + depth, n_owed=4000, n_attended=n_attended, depth=depth)
    prompt_s = cost.step_s(n_rows, 0, 0, attended=((n_rows, depth),))
    answers_s = n_steps * cost.step_s(N_DECODING, N_DECODING, n_attended, attended=((1, n_attended),))
    assert n_rows > 1
    assert prompt_s <= cost.step_s(64, 0, 0, attended=((64, depth),)), "a tile that is not full reads row by row"
    assert 1.0 <= answers_s / prompt_s < 1.3


def test_beside_a_single_answer_a_long_prompt_does_not_take_many_times_as_long_as_at_best() -> None:
    cost, budget = budget_on(CURVE, apart=False)
    for depth in (1000, 2000, 4000):
        n_rows = budget.n_rows(1, 2, depth + N_CELLS_EACH, n_owed=4000, n_attended=N_CELLS_EACH, depth=depth) - 1
        row_s, best_s = (cost.step_s(n, 0, 0, attended=((n, depth),)) / n for n in (n_rows, 64))
        assert row_s < 3 * best_s, depth


def test_after_a_slow_step_of_one_it_goes_on_in_full_tiles_all_the_same() -> None:
    cost, budget = budget_on(CURVE, apart=True)
    for depth in range(1100, 1900, 4):
        cost.observe(4, 0, 2000, 0.03 + 0.1 * depth / 2048, attended=((4, depth),))
    depth = 1912
    for _ in range(12):
        n_rows = budget.n_rows(0, 1, depth, n_owed=2000, depth=depth)
        assert n_rows % 64 == 0, depth
        cost.observe(n_rows, 0, depth, 0.011 * n_rows, attended=((n_rows, depth),))
        depth += n_rows


def test_while_all_steps_have_become_slower_it_goes_on_in_full_tiles_all_the_same() -> None:
    cost, budget = budget_on(CURVE, apart=False)
    for depth in range(1800, 2300, 9):
        attended = ((1, 1500), (9, depth))
        cost.observe(16, 8, 1500 + depth, cost.step_s(16, 8, 1500 + depth, attended=attended), attended=attended)
    depth, truth = 2300, CostModel(CURVE, n_rows_max=512)
    for _ in range(12):
        n_rows = budget.n_rows(0, 1, depth, n_owed=2000, depth=depth)
        assert n_rows % 64 == 0, depth
        attended = ((n_rows, depth),)
        cost.observe(n_rows, 0, depth, 1.65 * truth.step_s(n_rows, 0, depth, attended=attended), attended=attended)
        depth += n_rows


def test_a_long_prompt_is_priced_by_the_steps_that_are_fastest_deep_in_it() -> None:
    cost, _ = budget_on(CURVE, apart=False)
    before_s = cost.prefill_s(4000)
    for _ in range(6):
        for n_rows, off in ((48, 0.85), (64, 1.05), (512, 1.05)):
            cost.observe(n_rows, 0, 0, off * cost.step_s(n_rows, 0, 0))
    assert cost.n_rows_fastest(math.inf) == 48, "where little is before them"
    assert cost.prefill_s(4000) == pytest.approx(before_s, rel=0.05), "48 read the prompt's cells row by row"


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("depth", [1000, 2000, 4000])
def test_while_nobody_generates_a_long_prompt_is_computed_in_full_tiles(depth: int, apart: bool) -> None:
    _, budget = budget_on(CURVE, apart=apart)
    assert budget.n_rows(0, 1, depth, n_owed=3000, depth=depth) % 64 == 0


@pytest.mark.parametrize(
    ("n_keys", "n_running", "n_owed", "all_go"),
    [(1, 1, 128, True), (1, 1, 512, False), (1, 8, 512, True), (2, 1, 64, True), (2, 1, 128, False), (2, 8, 512, False)],
)
def test_prompts_alone_go_together_for_a_second_or_48_steps_of_answers_and_for_a_third_of_one_where_several_keys_ask(
    n_keys: int, n_running: int, n_owed: int, all_go: bool
) -> None:
    _, budget = budget_on(CURVE, apart=False)
    n_rows = budget.n_rows(0, n_running, 100, n_owed=n_owed, n_keys=n_keys)
    assert (n_rows == n_owed) is all_go
    assert all_go or n_rows >= 64, "else in the size that is computed fastest"
