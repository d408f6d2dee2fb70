"""How far distributions are from one another, in nats."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cllm.engine.sampling.divergence import compare_rows, summary


def logits(*rows: list[float]) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    return np.log(np.array(rows, np.float32))


def test_it_is_what_the_formula_says() -> None:
    found = compare_rows(logits([0.5, 0.5]), logits([0.9, 0.1]))
    assert found.divergences[0] == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), rel=1e-5)


def test_equal_distributions_are_0_apart_wherever_their_logits_lie() -> None:
    some = np.random.default_rng(1).normal(0, 5, (10, 1000)).astype(np.float32)
    found = compare_rows(some, some + np.float32(3))
    assert found.divergences.max() < 1e-9
    assert found.agree.all()


def test_far_logits_make_no_infinities() -> None:
    found = compare_rows(np.array([[1000.0, 0.0]], np.float32), np.array([[0.0, 1000.0]], np.float32))
    assert found.divergences[0] == pytest.approx(1000.0)
    assert not found.agree[0]


def test_what_never_comes_counts_nothing_and_what_the_other_never_says_without_bound() -> None:
    some = np.array([[0, 0, -math.inf]], np.float32)
    assert compare_rows(some, some).divergences.tolist() == [0]
    assert compare_rows(some, np.zeros((1, 3), np.float32)).divergences[0] == pytest.approx(math.log(1.5))
    assert compare_rows(np.zeros((1, 3), np.float32), some).divergences.tolist() == [math.inf]


def test_a_summary_is_of_all_rows_whichever_part_they_came_in() -> None:
    first = compare_rows(logits([0.5, 0.5], [0.2, 0.8]), logits([0.5, 0.5], [0.8, 0.2]))
    second = compare_rows(logits([0.3, 0.7]), logits([0.3, 0.7]))
    found = summary([first, second])
    assert (found.n_rows, found.max) == (3, first.divergences[1])
    assert found.mean == pytest.approx(first.divergences[1] / 3)
    assert found.p50 == pytest.approx(0, abs=1e-6)
    assert found.top1_agreement == pytest.approx(2 / 3)
