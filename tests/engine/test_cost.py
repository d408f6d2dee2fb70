import math
import random

import attrs
import pytest

from cllm.engine.cost.curve import DEFAULT_CURVE, Curve
from cllm.engine.cost.model import CostModel, one_by_one

# Two cores, a model of 0.6 billion parameters: seconds of steps without outputs, and what as many outputs add.
ROWS = {1: 8, 2: 18, 3: 29, 4: 41, 6: 50, 8: 60, 12: 73, 15: 88, 16: 71, 24: 94, 32: 120, 48: 179, 64: 225, 128: 435, 256: 850, 512: 1725}
OUTPUTS = {1: 7, 4: 10, 8: 22, 16: 28, 32: 45, 64: 75}
TWO_CORES = Curve(
    rows=[(n, ms / 1e3) for n, ms in ROWS.items()],
    outputs=[(n, ms / 1e3) for n, ms in OUTPUTS.items()],
    cell_s=6e-7,
    row_cell_s=1e-7,
)
GPU = Curve(
    rows=[(1, 0.0070), (8, 0.0072), (64, 0.0075), (128, 0.0080), (256, 0.0100), (512, 0.0180)],
    outputs=[(1, 0.0002), (64, 0.0006), (256, 0.002)],
)


def model(curve: Curve = TWO_CORES, *, n_rows_max: int = 2048, measured: bool = True) -> CostModel:
    return CostModel(curve, n_rows_max=n_rows_max, measured=measured)


def test_a_step_costs_its_rows_its_outputs_and_the_cells_that_attention_walks() -> None:
    assert model().step_s(8, 8, 1000) == pytest.approx(0.060 + 0.022 + 1000 * (6e-7 + 8 * 1e-7))
    assert model().step_s(8, 0, 0) == pytest.approx(0.060)


def test_a_step_in_passes_costs_what_they_cost_one_after_the_other() -> None:
    cost = model()
    assert cost.step_s(40, 8, 0, passes=(8, 32)) == pytest.approx(cost.step_s(8, 8, 0) + cost.step_s(32, 0, 0))


def test_where_slots_have_cells_of_their_own_a_row_does_not_walk_those_of_others() -> None:
    apart = CostModel(model().curve, n_rows_max=2048, apart=True)
    assert apart.step_s(64, 8, 1000) - apart.step_s(64, 8, 0) == pytest.approx(1000 * 6e-7)


def test_where_slots_have_cells_of_their_own_those_of_nobody_cost_no_step_anything() -> None:
    assert model().carry_s(1000, 8) > 0
    assert CostModel(model().curve, n_rows_max=2048, apart=True).carry_s(1000, 8) == 0


def test_a_step_in_passes_corrects_the_sizes_of_its_passes() -> None:
    cost = CostModel(model().curve, n_rows_max=2048, measured=False)
    for _ in range(30):
        cost.observe(40, 8, 0, 2 * model().step_s(40, 8, 0, passes=(8, 32)), passes=(8, 32))
    assert cost.step_s(40, 8, 0, passes=(8, 32)) == pytest.approx(2 * model().step_s(40, 8, 0, passes=(8, 32)), rel=0.05)


@pytest.mark.parametrize("passes", [(6,), (6,) * 4, (3,) * 8])
def test_passes_of_one_size_are_corrected_once_however_many_they_are(passes: tuple[int, ...]) -> None:
    n_rows = sum(passes)
    cost = CostModel(attrs.evolve(TWO_CORES, rows=[(1, 0.008), (512, 1.725)]), n_rows_max=2048, apart=True)
    truth_s = 1.15 * cost.step_s(n_rows, 1, 0, passes=passes)
    for _ in range(8):
        cost.observe(n_rows, 1, 0, truth_s, passes=passes)
        assert 0.98 * truth_s / 1.15 < cost.step_s(n_rows, 1, 0, passes=passes) < 1.02 * truth_s


def test_between_measured_counts_lies_a_straight_line_and_beyond_the_last_it_goes_on() -> None:
    assert model().step_s(40, 0, 0) == pytest.approx((0.120 + 0.179) / 2)
    assert model().step_s(1024, 0, 0) == pytest.approx(1.725 * 2, rel=0.02)


def test_a_curve_that_ends_while_falling_does_not_go_on_falling() -> None:
    curve = Curve(rows=[(15, 0.090), (16, 0.071)], outputs=[(1, 0.0)])
    assert model(curve).step_s(512, 0, 0) > 0.071 * 8


@pytest.mark.parametrize(
    "rows", [[], [(1, math.nan)], [(1, -0.1)], [(1, 0.0)], [(2, 0.1), (1, 0.1)], [(1, 0.1), (1, 0.1)], [(0, 0.1)], [(1, math.inf)]]
)
def test_numbers_that_cannot_be_a_curve_are_refused(rows: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match=r"ascending|takes time"):
        Curve(rows=rows, outputs=[(1, 0.0)])


def test_a_budget_takes_sixteen_rows_rather_than_fifteen() -> None:
    """15 rows cost more than 16, so 15 are never what fits."""
    assert {model().n_rows_within(ms / 1e3, 0, 0) for ms in range(60, 100)} == {8, 16, 24}
    assert {model().n_rows_within(ms / 1e3, 12, 0) for ms in range(60, 200)} == {12, 16, 24, 32}


def test_a_budget_is_rounded_down_to_where_a_row_is_cheap() -> None:
    curve = Curve(rows=[(1, 0.02), (16, 0.07), (18, 0.10), (32, 0.12)], outputs=[(1, 0.0)])
    assert model(curve).n_rows_within(0.105, 1, 0) == 16


def test_of_the_rows_of_prompts_hardly_more_than_half_are_rounded_away_however_cheap_the_first_is_beside_the_answers() -> None:
    """Where rows go in tiles of six, the first one beside five answers is nearly free, and of prompts that get only that nothing comes."""
    curve = Curve(rows=[(1, 0.014), (5, 0.054), (6, 0.0545), (8, 0.073), (12, 0.096), (16, 0.097)], outputs=[(1, 0.0)])
    assert model(curve).n_rows_within(0.080, 5, 0) == 8
    assert model(curve).n_rows_within(0.060, 5, 0) == 6


def test_where_few_generate_no_more_than_two_fifths_of_all_rows_are_rounded_away() -> None:
    curve = Curve(rows=[(1, 0.020), (16, 0.040), (24, 0.100), (32, 0.150)], outputs=[(1, 0.0)])
    assert model(curve).n_rows_within(0.151, 1, 0) > 0.6 * 32
    assert model(curve).n_rows_within(0.060, 1, 0) == 16


def test_when_nothing_more_fits_the_answers_go_alone() -> None:
    assert model().n_rows_within(0.01, 8, 0) == 8
    assert model().n_rows_within(0.0, 0, 0) == 0


def test_cells_in_use_and_outputs_leave_less_room_for_rows() -> None:
    assert model().n_rows_within(0.25, 0, 0) > model().n_rows_within(0.25, 16, 0) > model().n_rows_within(0.25, 16, 60_000)


def test_on_a_gpu_many_rows_cost_as_much_as_one() -> None:
    assert model(GPU).n_rows_within(0.008, 0, 0) == 128
    assert model(GPU).n_rows_efficient(1.5) == 168


def test_rows_of_prompts_take_less_beside_answers_than_by_themselves() -> None:
    """Eight of them 27 ms in a large step, and 11 where eight answers go."""
    assert model().spared_s(16, 8) == pytest.approx(0.01556, abs=1e-5)
    assert model().spared_s(8, 8) == 0.0
    assert model().spared_s(16, 8, 4000) < model().spared_s(16, 8), "but for the cells of others, which they walk there"


def test_prompts_alone_are_computed_in_steps_of_the_cheapest_size() -> None:
    assert model(GPU).n_rows_fastest(1.0) == 512
    assert model(GPU).n_rows_fastest(0.009) == 184
    assert model().prefill_s(1000) == pytest.approx(1000 * 0.00337, rel=0.05)


def run_steps(
    cost: CostModel, true: CostModel, *, n_steps: int, slowdown: float = 1.0, noise: float = 0.04, rng: random.Random
) -> list[float]:
    errors = []
    for _ in range(n_steps):
        n_outputs = rng.randint(1, 16)
        n_rows = n_outputs + rng.choice([0, 0, 0, rng.randint(1, 32)])
        seconds = true.step_s(n_rows, n_outputs, 500) * slowdown * math.exp(rng.gauss(0.0, noise))
        errors.append(cost.observe(n_rows, n_outputs, 500, seconds))
    return sorted(errors)


def test_a_machine_that_becomes_slower_is_followed_within_some_steps() -> None:
    rng, cost, true = random.Random(1), model(), model()
    run_steps(cost, true, n_steps=200, rng=rng)
    run_steps(cost, true, n_steps=20, slowdown=1.3, rng=rng)
    assert run_steps(cost, true, n_steps=100, slowdown=1.3, rng=rng)[50] < 0.06


def test_a_layout_that_comes_again_keeps_up_with_what_became_of_the_machine_meanwhile() -> None:
    rng, pool, true = random.Random(1), model(), model()
    apart = pool.beside(n_rows_max=2048, apart=True)
    run_steps(pool, true, n_steps=200, slowdown=2.0, rng=rng)
    before_s = apart.step_s(8, 8, 500)
    apart.keep_up(pool)
    assert apart.step_s(8, 8, 500) / before_s == pytest.approx(2.0, rel=0.3)


def test_how_far_off_predictions_were_is_told_over_a_change_of_layout() -> None:
    rng, pool, true = random.Random(1), model(), model()
    apart = pool.beside(n_rows_max=2048, apart=True)
    assert (pool.error(), apart.error()) == (None, None)
    run_steps(pool, true, n_steps=20, rng=rng)
    apart.keep_up(pool)
    assert apart.error() == pool.error() is not None


def test_when_it_is_fast_again_what_was_measured_still_holds() -> None:
    rng, cost, true = random.Random(2), model(), model()
    run_steps(cost, true, n_steps=500, slowdown=1.3, rng=rng)
    run_steps(cost, true, n_steps=50, rng=rng)
    for n_rows, n_outputs in ((1, 1), (16, 16), (40, 8), (64, 1)):
        assert cost.step_s(n_rows, n_outputs, 500) == pytest.approx(true.step_s(n_rows, n_outputs, 500), rel=0.15)


def test_one_step_that_was_held_up_bends_nothing() -> None:
    cost = model()
    before_s = cost.step_s(8, 8, 0)
    assert cost.observe(8, 8, 0, 60.0) == pytest.approx(1.0, abs=0.01)
    assert cost.step_s(8, 8, 0) < 1.2 * before_s


def test_a_guessed_count_gives_way_sooner_than_a_measured_one() -> None:
    guessed, measured = model(), model()
    for _ in range(3):
        guessed.observe(20, 1, 0, 2 * guessed.step_s(20, 1, 0))
        measured.observe(16, 1, 0, 2 * measured.step_s(16, 1, 0))
    assert guessed.step_s(20, 1, 0) / model().step_s(20, 1, 0) > measured.step_s(16, 1, 0) / model().step_s(16, 1, 0)


def test_without_calibration_the_default_curve_is_good_after_some_hundred_steps() -> None:
    rng, cost, true = random.Random(3), model(DEFAULT_CURVE, measured=False), model(GPU)
    run_steps(cost, true, n_steps=400, rng=rng)
    assert run_steps(cost, true, n_steps=200, rng=rng)[100] < 0.10


def test_what_is_learned_of_small_steps_alone_does_not_keep_prompts_from_large_ones() -> None:
    """Answers of one sequence have taught that one row takes a hundredth of what was assumed; larger steps may be as quick."""
    cost, true = model(DEFAULT_CURVE, measured=False), model(GPU)
    for _ in range(50):
        cost.observe(1, 1, 0, true.step_s(1, 1, 0))
    sizes = []
    for _ in range(10):
        sizes.append(cost.n_rows_fastest(0.5))
        cost.observe(sizes[-1], 0, 0, true.step_s(sizes[-1], 0, 0))
    assert sizes[-1] >= 128


def test_the_error_is_the_median_of_the_last_steps() -> None:
    cost = model()
    assert cost.error() is None
    for share in (1.0, 1.0, 9.0):
        cost.observe(8, 8, 0, share * cost.step_s(8, 8, 0))
    assert cost.error() == pytest.approx(0.0, abs=1e-9)


def test_any_steps_leave_sound_numbers() -> None:
    rng, cost = random.Random(4), model(n_rows_max=64)
    for _ in range(3000):
        n_outputs = rng.randint(0, 64)
        cost.observe(rng.randint(max(n_outputs, 1), 64), n_outputs, rng.randint(0, 10**6), 10 ** rng.uniform(-6, 3))
        assert 0 < cost.step_s(64, 1, 100) < math.inf
        assert 0 <= cost.n_rows_within(0.1, 1, 100) <= 64


# --- attention ---------------------------------------------------------------------------------------------------------

DEEP = attrs.evolve(TWO_CORES, attended=((1, 8e-6),))  # each row reads the cells of its sequence for itself
TILED = attrs.evolve(TWO_CORES, attended=((1, 3.5e-5), (16, 1.6e-4), (64, 2.5e-4)))  # as measured on two cores


def test_a_row_takes_longer_the_more_of_its_own_sequence_is_before_it() -> None:
    cost = model(DEEP)
    assert cost.step_s(16, 0, 4000, attended=((16, 4000),)) == pytest.approx(cost.step_s(16, 0, 4000) + 16 * 4000 * 8e-6)
    assert cost.prefill_s(2000) > 2 * cost.prefill_s(1000) + 1000 * 1000 * 8e-6 * 0.9


def test_several_rows_of_a_sequence_read_its_cells_together() -> None:
    cost = model(TILED)
    assert cost.step_s(16, 0, 4000, attended=((16, 4000),)) == pytest.approx(cost.step_s(16, 0, 4000) + 4000 * 1.6e-4)
    assert cost.step_s(2, 2, 4000, attended=((1, 4000),)) == pytest.approx(cost.step_s(2, 2, 4000) + 4000 * 3.5e-5)
    assert cost.step_s(144, 0, 4000, attended=((144, 4000),)) == pytest.approx(cost.step_s(144, 0, 4000) + 4000 * (2 * 2.5e-4 + 1.6e-4))


@pytest.mark.parametrize("curve", [DEEP, TILED])
def test_deep_in_a_prompt_fewer_rows_fit_beside_answers(curve: Curve) -> None:
    cost, answers = model(curve), (1, 8 * 200)
    fitting = {depth: cost.n_rows_within(0.4, 8, 4000, attended=(answers,), depth=depth) for depth in (500, 1000, 2000, 4000)}
    deep = [fitting[depth] for depth in (1000, 2000, 4000)]
    assert deep == sorted(deep, reverse=True)
    assert fitting[500] >= fitting[2000]  # attention is little there, and a count is rounded down to where a row is cheap
    assert fitting[500] - 8 > 2 * (fitting[4000] - 8)
    for depth, n_rows in fitting.items():  # and they take no longer than they may
        assert n_rows == 8 or cost.step_s(n_rows, 8, 4000, attended=(answers, (n_rows - 8, depth))) <= 0.401


def test_where_each_row_reads_for_itself_small_steps_are_efficient_deep_in_a_prompt() -> None:
    cost = model(DEEP)
    assert cost.n_rows_efficient(1.5, 4000) < cost.n_rows_efficient(1.5)
    assert cost.n_rows_fastest(0.5, 4000) < cost.n_rows_fastest(0.5)


def test_where_rows_read_together_they_are_not() -> None:
    """Or a prompt would be computed the slower the longer it is, down to row by row."""
    cost = model(TILED)
    assert cost.n_rows_efficient(1.5, 4000) >= 32 > cost.n_rows_efficient(1.5)
    assert cost.n_rows_efficient(10.0, 4000) < 8


def test_rows_that_do_not_fill_a_tile_read_one_by_one_and_take_longer_than_a_full_one() -> None:
    cost = model(TILED)

    def attention_s(n: int) -> float:
        return cost.step_s(n, 0, 4000, attended=((n, 4000),)) - cost.step_s(n, 0, 4000)

    assert attention_s(32) == pytest.approx(2 * attention_s(16))
    assert attention_s(48) > 1.5 * attention_s(64)
    assert attention_s(64 + 48) == pytest.approx(2 * attention_s(64)), "behind a full one, the rest is another"
    assert cost.n_rows_efficient(1.5, 4000) == 64
    assert cost.deeper(100, 2000, 2000) == 100
    assert 64 < cost.deeper(128, 2000, 3000) < 96, "a tile, and as many as fit one by one"


def test_of_few_rows_those_that_were_measured_alone_count() -> None:
    assert one_by_one(((1, 1e-5),)) == ((1, 1e-5),)
    assert one_by_one(((64, 1e-4),)) == ((64, 1e-4),)
    assert one_by_one(((16, 1e-5), (64, 1e-4))) == ((16, 1e-5), (64, 1e-4)), "a tile is no cheaper"


def test_room_at_one_depth_is_less_room_deeper() -> None:
    cost = model(DEEP)
    assert cost.deeper(100, 0, 0) == 100
    assert cost.deeper(100, 0, 4000) < 20
    assert cost.deeper(1, 0, 100_000) == 1


def test_what_attention_costs_is_learned_from_steps_deep_in_a_prompt() -> None:
    """It was measured with few cells, where it is lost in the noise."""
    rng, true = random.Random(3), model(TILED)
    cost = model(attrs.evolve(DEEP, attended=((1, 1e-5),)))
    for depth in range(0, 4000, 20):
        for n_rows, attended in ((27, ((1, 7 * 200), (20, depth))), (7, ((1, 7 * 200),))):  # answers alone now and then
            seconds = true.step_s(n_rows, 7, 4000, attended=attended) * math.exp(rng.gauss(0.0, 0.04))
            cost.observe(n_rows, 7, 4000, seconds, attended=attended)
    for n_rows, attended in ((27, ((1, 7 * 200), (20, 4000))), (7, ((1, 7 * 200),))):
        assert cost.step_s(n_rows, 7, 4000, attended=attended) == pytest.approx(true.step_s(n_rows, 7, 4000, attended=attended), rel=0.2)


@pytest.mark.parametrize("n_held_up", [0, 1, 6])
def test_tiles_that_were_held_up_come_again(n_held_up: int) -> None:
    curve = attrs.evolve(TWO_CORES, attended=[(1, 2e-5), (16, 1.4e-4), (64, 2.1e-4)])
    cost, truth = model(curve), model(curve)

    def observe(n: int, times: int = 1) -> None:
        cost.observe(n, 0, 2000, times * truth.step_s(n, 0, 2000, attended=((n, 2000),)), attended=((n, 2000),))

    for n in [8, 16, 24, 48] * 10:  # beside answers
        observe(n)
    sizes = []
    for i in range(200):  # and then alone
        sizes.append(cost.n_rows_fastest(math.inf, 2000, n_most=64))
        observe(sizes[-1], 4 if i < n_held_up else 1)
    assert (set(sizes) == {64}) == (not n_held_up), "what took long is believed for a while"
    assert set(sizes[-100:]) == {64}


def test_what_single_rows_take_deep_in_a_sequence_says_nothing_of_many() -> None:
    """Each reads all cells: were that believed of 64 as well, a prompt that was computed row by row once would be so for ever."""
    cost, true = model(TILED), model(attrs.evolve(TILED, attended=((1, 1e-4), *TILED.attended[1:])))
    for _ in range(100):
        cost.observe(1, 0, 4000, true.step_s(1, 0, 4000, attended=((1, 4000),)), attended=((1, 4000),))
    assert cost.n_rows_efficient(1.5, 4000) >= 32


# --- a machine that does something else as well ------------------------------------------------------------------------


def test_outputs_that_were_disturbed_are_put_in_order() -> None:
    curve = attrs.evolve(TWO_CORES, outputs=[(1, 0.003), (2, 0.010), (4, 0.014), (8, 0.023), (12, 0.055), (16, 0.014)])
    cost = model(curve)
    seconds = [cost.step_s(16, n, 0) for n in range(17)]
    assert seconds == sorted(seconds)
    assert cost.step_s(16, 12, 0) - cost.step_s(16, 0, 0) == pytest.approx((0.055 + 0.014) / 2)


def test_a_size_that_was_measured_in_a_bad_moment_costs_no_more_than_larger_ones_say_nor_more_for_a_row_than_smaller_ones() -> None:
    rows = {**dict(TWO_CORES.rows), 8: 0.9, 64: 3.0}
    cost = model(attrs.evolve(TWO_CORES, rows=sorted(rows.items())))
    assert cost.step_s(8, 0, 0) <= 1.25 * 0.073
    assert cost.step_s(64, 0, 0) <= 64 / 32 * 0.120 + 1e-9


def test_slow_minutes_of_the_machine_do_not_make_single_rows_look_cheap() -> None:
    """All steps of many rows came while somebody else had the cores, and all of one row while nobody did."""
    rng, cost, true = random.Random(4), model(), model()
    for _ in range(3000):
        n_rows, slowdown = rng.choice([(1, 0.5), (8, 3.0), (16, 3.0), (32, 3.0)])
        cost.observe(n_rows, min(n_rows, 8), 500, true.step_s(n_rows, min(n_rows, 8), 500) * slowdown)
    assert cost.n_rows_fastest(1.0) >= 16
    assert cost.n_rows_within(cost.step_s(8, 8, 500) * 3, 8, 500) >= 16
