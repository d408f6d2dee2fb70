"""How long a state fits into so many bytes, learned from those that were saved."""

from __future__ import annotations

from cllm.engine.memory.statesize import StateSize


def test_before_one_was_saved_what_memory_was_given_for_a_cell_counts() -> None:
    assert StateSize(100.0).n_cells(1000) == 10


def test_a_short_state_that_is_mostly_a_fixed_part_does_not_make_long_ones_look_dear() -> None:
    size = StateSize(100.0)
    size.saw(10, 51_000)
    assert size.n_cells(150_000) == 1000
    assert size.n_cells(40_000) == 0


def test_what_a_cell_takes_is_learned_from_a_short_one_and_a_long_one() -> None:
    size = StateSize(1.0)
    size.saw(100, 30_000)
    size.saw(1000, 210_000)
    assert (size.cell_n_bytes, size.fixed_n_bytes) == (200.0, 10_000.0)
    assert size.n_cells(50_000) == 200


def test_two_of_about_the_same_length_say_little_of_a_cell() -> None:
    size = StateSize(100.0)
    size.saw(100, 30_000)
    size.saw(101, 10_000)
    assert size.cell_n_bytes == 100.0


def test_states_that_are_the_shorter_the_more_cells_they_have_leave_a_cell_a_byte() -> None:
    size = StateSize(100.0)
    size.saw(10, 5000)
    size.saw(100, 4000)
    assert size.n_cells(10_000) == 6100
