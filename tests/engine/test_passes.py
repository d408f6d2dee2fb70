"""Where each slot has cells of its own, llama.cpp computes a step in passes; the planner counts them beforehand."""

from __future__ import annotations

from cllm.engine.batch.passes import passes


def test_slots_that_follow_one_another_with_equally_many_rows_are_one_pass() -> None:
    assert passes([(0, 1), (1, 1), (2, 1)]) == (3,)
    assert passes([(3, 32), (4, 32)]) == (64,)


def test_a_gap_between_slots_begins_another_pass() -> None:
    assert passes([(0, 1), (1, 1), (3, 1)]) == (2, 1)


def test_a_prompt_beside_answers_has_its_first_row_in_their_pass_and_the_rest_in_one_of_its_own() -> None:
    assert passes([(0, 1), (1, 65), (2, 1)]) == (3, 64)


def test_prompts_of_different_lengths_go_together_as_far_as_the_shortest_reaches() -> None:
    assert passes([(0, 40), (1, 24)]) == (48, 16)
    assert passes([(0, 40), (1, 1), (2, 24)]) == (3, 39, 23)


def test_no_rows_are_no_pass() -> None:
    assert passes([]) == ()
