from __future__ import annotations

import math

import pytest

from benchmarks.figures import FIGURES, FIGURES_BY_NAME, RATIO_MAX, Figure, compare

HIGHER = Figure("speed", True, lambda summary: summary["speed"])
LOWER = Figure("wait", False, lambda summary: summary["wait"])


def test_a_ratio_is_the_geometric_mean_over_the_pairs() -> None:
    compared = compare([2.0, 8.0], [1.0, 1.0])
    assert compared is not None
    assert compared.ratio == pytest.approx(4.0)


def test_an_interval_is_students_on_the_logarithms_of_the_ratios() -> None:
    compared = compare([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])  # logarithms 0, ln 2, 2 ln 2: their deviation is ln 2
    assert compared is not None
    half = math.exp(4.303 * math.log(2) / math.sqrt(3))
    assert (compared.low, compared.high) == pytest.approx((2 / half, 2 * half))


def test_few_pairs_that_differ_say_nothing_though_all_are_above_one() -> None:
    compared = compare([1.05, 1.3], [1.0, 1.0])
    assert compared is not None
    assert compared.verdict(HIGHER) == "unclear"


def test_an_interval_holds_the_ratio_and_narrows_with_more_pairs() -> None:
    ours = [1.0, 1.1, 1.2, 1.05]
    few, many = compare(ours, [1.0] * 4), compare(ours * 5, [1.0] * 20)
    assert few is not None
    assert many is not None
    assert few.low is not None
    assert few.high is not None
    assert many.low is not None
    assert many.high is not None
    assert few.low < few.ratio < few.high
    assert many.high - many.low < few.high - few.low


def test_of_several_starts_each_counts_once_however_alike_its_pairs_are() -> None:
    ours = [1.0, 1.0, 2.0, 2.0]
    pairs, starts, means = compare(ours, [1.0] * 4), compare(ours, [1.0] * 4, [0, 0, 1, 1]), compare([1.0, 2.0], [1.0] * 2)
    assert pairs is not None
    assert starts is not None
    assert means is not None
    assert pairs.ratio == starts.ratio == pytest.approx(2**0.5)
    assert (starts.low, starts.high) == pytest.approx((means.low, means.high))
    assert starts.n_pairs == 4


def test_of_a_single_start_the_interval_is_over_its_pairs() -> None:
    single, pairs = compare([1.0, 2.0, 4.0], [1.0] * 3, [0, 0, 0]), compare([1.0, 2.0, 4.0], [1.0] * 3)
    assert single is not None
    assert pairs is not None
    assert (single.ratio, single.low, single.high) == (pairs.ratio, pairs.low, pairs.high)


@pytest.mark.parametrize(("starts", "verdict"), [([0, 0, 0, 0], "unclear"), ([0, 0, 1, 1], "unclear"), ([0, 0, 1, 2], "win")])
def test_nobody_is_called_better_by_fewer_than_three_starts_which_may_agree_by_luck(starts: list[int], verdict: str) -> None:
    compared = compare([2.0] * 4, [1.0] * 4, starts)
    assert compared is not None
    assert (compared.low, compared.verdict(HIGHER)) == (2.0, verdict)


def test_the_machines_own_speed_cancels_out() -> None:
    compared = compare([10.0, 5.0, 20.0], [5.0, 2.5, 10.0])
    assert compared is not None
    assert (compared.low, compared.ratio, compared.high) == pytest.approx((2.0, 2.0, 2.0))


def test_pairs_without_the_figure_are_left_out() -> None:
    assert compare([None, 1.0], [1.0, None]) is None
    compared = compare([None, 3.0], [1.0, 1.0])
    assert compared is not None
    assert compared.n_pairs == 1


def test_a_start_without_the_figure_is_none_of_those_that_tell_who_is_better() -> None:
    ours, theirs = [1.0, None, 1.01, None, None], [2.0, None, 2.02, 2.0, None]
    compared = compare(ours, theirs, range(5))
    assert compared is not None
    assert (compared.n_pairs, compared.n_starts) == (2, 2)
    assert compared.verdict(LOWER) == "unclear"


def test_where_a_figure_is_nought_in_some_pass_it_counts_and_the_sums_are_compared() -> None:
    few, many = compare([0.0, 3.0, 1.0], [1.0, 1.0, 0.0]), compare([0.0, 3.0, 1.0] * 3, [1.0, 1.0, 0.0] * 3)
    assert few is not None
    assert many is not None
    assert (few.ratio, few.low, few.high, few.n_pairs) == (pytest.approx(2.0), None, None, 3)
    assert many.low is not None
    assert many.high is not None
    assert 0.0 <= many.low < many.ratio < many.high <= RATIO_MAX
    assert compare([0.0, 0.0], [0.0, 0.0]) is None


def test_with_noughts_each_start_counts_once_with_its_sums() -> None:
    ours, theirs, starts = [1.0, 0.0, 3.0, 1.0, 2.0, 2.0], [0.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0, 0, 1, 1, 2, 2]
    compared, twice = compare(ours, theirs, starts), compare(ours * 2, theirs * 2, starts * 2)
    assert compared is not None
    assert twice is not None
    assert compared.ratio == pytest.approx(4 ** (1 / 3))  # sums of 1 to 1, 4 to 2, 4 to 2
    assert (compared.low, compared.high) == pytest.approx((twice.low, twice.high)), "pairs of the same starts say no more of other starts"
    assert compared.verdict(HIGHER) == "unclear"
    few = compare([1.0, 0.0], [0.0, 0.0], [0, 1])
    assert few is not None
    assert few.low is None


def test_two_pairs_of_six_in_which_the_other_has_nothing_are_no_sure_win() -> None:
    compared = compare([0.4, 0.4, 0.0, 0.0, 0.0, 0.0], [0.0] * 6)
    assert compared is not None
    assert (compared.ratio, compared.low, compared.high) == (RATIO_MAX, 1.0, RATIO_MAX)


def test_better_is_higher_or_lower_and_unclear_where_the_interval_has_one_in_it() -> None:
    faster, unsure = compare([2.0, 2.1, 2.05], [1.0] * 3), compare([0.9, 1.1], [1.0, 1.0])
    assert faster is not None
    assert unsure is not None
    assert (faster.verdict(HIGHER), faster.verdict(LOWER), unsure.verdict(HIGHER)) == ("win", "loss", "unclear")


def test_who_leaves_requests_out_wins_nothing_by_being_quick_with_the_others_and_loses_what_it_loses_in_spite_of_that() -> None:
    slower, faster = compare([1.0] * 3, [2.0] * 3, [0, 1, 2]), compare([2.0] * 3, [1.0] * 3, [0, 1, 2])
    assert slower is not None
    assert faster is not None
    assert (slower.verdict(HIGHER, n_spoiling=1), slower.verdict(LOWER, n_spoiling=1)) == ("loss", "unclear")
    assert (faster.verdict(HIGHER, n_spoiling=1), faster.verdict(LOWER, n_spoiling=1)) == ("unclear", "loss")


@pytest.mark.parametrize("cpu_s", [None, 0.0, -2.5])
def test_of_a_server_whose_processes_have_died_nobody_knows_what_a_token_took(cpu_s: float | None) -> None:
    figure = FIGURES_BY_NAME["server CPU per token, ms"]
    assert figure.of({"server_cpu_s": cpu_s, "n_generated": 100}) is None
    assert figure.of({"server_cpu_s": 2.5, "n_generated": 100}) == 25.0


def test_the_pairs_in_which_ours_is_better_are_counted_and_those_in_which_both_are_alike_are_not() -> None:
    compared = compare([2.0, 3.0, 1.0, 1.0], [1.0, 1.0, 1.0, 2.0])
    assert compared is not None
    assert (compared.n_better(HIGHER), compared.n_better(LOWER)) == (2, 1)


def test_of_a_single_pair_nothing_is_said() -> None:
    compared = compare([2.0], [1.0])
    assert compared is not None
    assert (compared.ratio, compared.low, compared.verdict(HIGHER)) == (2.0, None, "unclear")


def test_figures_have_names_of_their_own() -> None:
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
