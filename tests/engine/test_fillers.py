"""Rows that nobody wants, so that the slots which have rows follow one another: where they go, and where they do not."""

from __future__ import annotations

from collections.abc import Callable

from cllm.engine.batch.fillers import N_STEPS_KEPT, Fillers

CHEAP = 0.010, 0.001  # seconds of a pass, and of each of its rows
DEAR = 0.001, 0.010


def fillers(costs: tuple[float, float], *, n_slots: int = 16, taken: frozenset[int] = frozenset()) -> Fillers:
    """For slots that hold ten cells each, but for those that are `taken`."""
    base_s, row_s = costs
    return Fillers(n_slots, lambda n: base_s + n * row_s, reads_nothing, lambda slot: None if slot in taken else 10)


def reads_nothing(_n_cells: int) -> float:
    return 0.0


def slots_of(found: list[tuple[int, int]]) -> list[int]:
    assert all(position == 10 for _, position in found)
    return sorted(slot for slot, _ in found)


def test_gaps_are_closed_where_a_pass_costs_more_than_the_rows_that_it_takes() -> None:
    assert slots_of(fillers(CHEAP).beside([0, 1, 4, 7])) == [2, 3, 5, 6]


def test_gaps_stay_where_a_pass_costs_less_than_the_rows_that_would_close_them() -> None:
    assert fillers(DEAR).beside([0, 1, 4, 7]) == []


def test_a_wide_gap_stays_beside_one_that_is_closed() -> None:
    assert slots_of(fillers(CHEAP).beside([0, 2, 15])) == [1]


def test_many_passes_of_one_row_become_one_though_no_two_of_them_would() -> None:
    times = {1: 0.010, 2: 0.015, 3: 0.021, 5: 0.022}
    some = Fillers(8, lambda n: times.get(n, 0.1), reads_nothing, lambda slot: 0)
    assert some.beside([0, 2]) == []
    assert slots_are([1, 3], some.beside([0, 2, 4]))


def slots_are(expected: list[int], found: list[tuple[int, int]]) -> bool:
    return sorted(slot for slot, _ in found) == expected


def test_what_a_slot_between_them_cannot_take_keeps_its_gap() -> None:
    assert slots_of(fillers(CHEAP, taken=frozenset({1})).beside([0, 2, 4])) == [3]


def test_a_tile_is_filled_on_either_side_where_that_takes_less_time() -> None:
    def times(n: int) -> float:
        return 0.05 if n == 16 else 0.01 + 0.005 * n

    upwards, downwards = Fillers(20, times, reads_nothing, lambda slot: 0), Fillers(16, times, reads_nothing, lambda slot: 0)
    assert slots_are([14, 15], upwards.beside(list(range(14))))
    assert slots_are([0, 1], downwards.beside(list(range(2, 16))))
    assert Fillers(14, times, reads_nothing, lambda slot: 0).beside(list(range(14))) == [], "there are no more slots"
    assert Fillers(16, times, reads_nothing, lambda slot: None).beside(list(range(14))) == []


def test_a_choice_stands_until_a_slot_is_taken_or_some_time_has_passed() -> None:
    room: dict[int, int | None] = {1: 5}
    asked: list[int] = []

    def counted(pass_s: Callable[[int], float]) -> Callable[[int], float]:
        def count(n: int) -> float:
            asked.append(n)
            return pass_s(n)

        return count

    some = Fillers(4, counted(lambda n: 0.01 + 0.001 * n), reads_nothing, room.get)
    assert some.beside([0, 2]) == [(1, 5)]
    n_asked = len(asked)
    room[1] = 6
    assert some.beside([0, 2]) == [(1, 6)]
    assert len(asked) == n_asked
    room[1] = None
    assert some.beside([0, 2]) == []
    room[1] = 7
    assert any(some.beside([0, 2]) == [(1, 7)] for _ in range(N_STEPS_KEPT)), "that it has room again is found out in time"


def test_what_a_filler_reads_counts_as_its_price() -> None:
    cells = {1: 100, 3: 5000, 5: 100}
    some = Fillers(7, lambda n: 0.010 + 0.001 * n, lambda n_cells: n_cells * 10e-6, cells.get)
    assert slots_are([1, 5], some.beside([0, 2, 4, 6])), "to read 5000 cells takes longer than a pass"


def test_a_tile_is_not_filled_by_reading_more_than_that_gains() -> None:
    def times(n: int) -> float:
        return 0.05 if n == 16 else 0.01 + 0.005 * n

    assert Fillers(16, times, lambda n_cells: n_cells * 10e-6, lambda slot: 4000).beside(list(range(14))) == []
    assert slots_are([14, 15], Fillers(16, times, lambda n_cells: n_cells * 10e-6, lambda slot: 400).beside(list(range(14))))


def test_one_slot_and_none_need_nothing() -> None:
    some = fillers(CHEAP)
    assert some.beside([3]) == []
    assert some.beside([]) == []
