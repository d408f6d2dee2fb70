"""The prefix tree: what it finds, what it keeps, and what it counts."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from cllm.engine.memory.cells import Cells
from cllm.engine.memory.prefix import PrefixTree, n_common

KEY = ("", "")


class Garden:
    """A tree whose slots are filled from texts."""

    def __init__(self, *, can_trim: bool = True) -> None:
        self.cells = Cells(1000, 16)
        self.tree = PrefixTree(self.cells, can_trim=can_trim)

    def grow(self, slot: int, text: str, *, rests: bool = False) -> None:
        """A slot with all of `text`, of which it shares what is known."""
        tokens = list(text.encode())
        match = self.tree.match(KEY, tokens, len(tokens))
        if match is None:
            self.tree.enter(slot, KEY)
        else:
            self.tree.share(slot, match)
        n_known = self.tree.n_tokens(slot)
        self.cells.hold(len(tokens) - n_known)
        self.tree.extend(slot, tokens[n_known:])
        if rests:
            self.tree.rest(slot)

    def plant(self, slot: int, text: str, *, rests: bool = False) -> None:
        """A slot with cells of its own for all of `text`."""
        self.tree.enter(slot, KEY)
        self.cells.hold(len(text))
        self.tree.extend(slot, list(text.encode()))
        if rests:
            self.tree.rest(slot)

    def known(self, text: str, *, whole: bool = False, n_in: Callable[[int], int] | None = None) -> int:
        tokens = list(text.encode())
        match = self.tree.match(KEY, tokens, len(tokens), whole=whole, n_in=n_in)
        return 0 if match is None else match.n_tokens

    def check(self) -> None:
        assert self.tree.check() == (self.cells.n_held, self.cells.n_cached)


def test_two_who_were_told_the_same_tokens_keep_one_number_for_each() -> None:
    """What is kept of a text is charged a list's place for a token that others have, too."""
    garden = Garden()
    for slot in range(2):
        garden.tree.enter(slot, KEY)
        garden.cells.hold(100)
        garden.tree.extend(slot, [int(f"1{i:03}") for i in range(100)])
    first, second = (garden.tree.tokens_of(slot) for slot in range(2))
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_the_longest_known_beginning_is_found() -> None:
    garden = Garden()
    garden.grow(0, "once upon a time")
    garden.grow(1, "once more")
    assert [garden.known(text) for text in ("once upon", "once upon us", "once mo!", "two", "once ")] == [9, 10, 7, 0, 5]
    garden.check()


def test_shared_cells_count_once_and_stay_as_long_as_one_slot_has_them() -> None:
    garden = Garden()
    garden.grow(0, "once upon a time")
    garden.grow(1, "once more")
    assert garden.cells.n_held == len("once upon a time") + len("more")
    garden.tree.leave(0)
    assert garden.cells.n_held == len("once more")
    assert garden.known("once upon") == 5


def test_equal_tokens_in_other_cells_stand_beside_each_other_and_the_longer_one_is_found() -> None:
    garden = Garden()
    tree = garden.tree
    for slot in (0, 1):
        tree.enter(slot, KEY)
        garden.cells.hold(3)
        tree.extend(slot, list(b"abc"))
    garden.cells.hold(2)
    tree.extend(1, list(b"de"))
    assert garden.known("abcdef") == 5
    assert garden.cells.n_held == 8
    garden.check()


def test_what_was_computed_twice_is_kept_once() -> None:
    garden = Garden()
    tree = garden.tree
    for slot in (0, 1):
        tree.enter(slot, KEY)
        garden.cells.hold(3)
        tree.extend(slot, list(b"abc"))
    assert not tree.rest(0)
    assert tree.rest(1)
    assert garden.cells.n_cached == 3
    garden.check()


def test_what_others_have_all_of_is_not_worth_a_slot() -> None:
    garden = Garden()
    garden.grow(0, "once")
    garden.grow(1, "once more")
    assert not garden.tree.rest(0)
    assert garden.known("once") == 4
    garden.check()


def test_the_longest_unused_goes_first_and_use_makes_young() -> None:
    garden = Garden()
    tree = garden.tree
    garden.grow(0, "abc", rests=True)
    garden.grow(1, "xyz", rests=True)
    assert tree.oldest() == 0
    tree.wake(0)
    assert tree.oldest() == 1
    tree.rest(0)
    assert (tree.oldest(), tree.oldest(but=1)) == (1, 0)
    garden.check()


def test_a_branch_is_trimmed_from_its_end_and_leaves_where_others_have_the_rest() -> None:
    garden = Garden()
    garden.grow(0, "once upon", rests=True)
    garden.grow(1, "once more", rests=True)
    assert garden.tree.trim(0, 7)
    assert garden.known("once upon") == 7
    assert not garden.tree.trim(0, 5)
    assert 0 not in garden.tree
    assert garden.known("once upon") == 5
    garden.check()


def test_only_whole_slots_are_found_where_nothing_can_be_trimmed() -> None:
    garden = Garden()
    garden.grow(0, "once", rests=True)
    assert [garden.known(text, whole=True) for text in ("once more", "once", "onc")] == [4, 4, 0]


def test_a_whole_slot_that_has_moved_on_does_not_hide_a_shorter_one() -> None:
    garden = Garden(can_trim=False)
    garden.plant(0, "once upon", rests=True)
    garden.plant(1, "once upon a time")
    n_in = {0: 9, 1: 20}
    assert garden.known("once upon a time it was", whole=True, n_in=n_in.__getitem__) == 9
    n_in[1] = 16
    assert garden.known("once upon a time it was", whole=True, n_in=n_in.__getitem__) == 16


def test_where_slots_cannot_be_cut_a_longer_one_does_not_stand_for_one_that_ends() -> None:
    for can_trim in (True, False):
        garden = Garden(can_trim=can_trim)
        garden.plant(0, "once upon")
        garden.plant(1, "once upon a ti")
        garden.plant(2, "once")
        assert garden.tree.rest(0) is not can_trim
        assert garden.tree.rest(1)
        assert garden.known("once upon a time", whole=True) == 14
        assert garden.known("once upon us", whole=True) == (4 if can_trim else 9)
        garden.check()


def test_where_slots_cannot_be_cut_one_of_two_that_are_equal_and_rest_is_enough() -> None:
    garden = Garden(can_trim=False)
    for slot in (0, 1, 2):
        garden.plant(slot, "once")
    assert garden.tree.rest(0)
    assert not garden.tree.rest(1), "the first one has the same"
    assert not garden.tree.rest(2)
    garden.check()


@given(st.text("ab", max_size=12), st.text("ab", max_size=12), st.integers(0, 3), st.integers(0, 12))
def test_the_common_part_is_as_long_as_it_looks(known: str, rest: str, start: int, n_max: int) -> None:
    tokens = list(b"x" * start + rest.encode())
    expected = 0
    for a, b in zip(known.encode(), tokens[start : max(start, n_max)], strict=False):
        if a != b:
            break
        expected += 1
    assert n_common(list(known.encode()), tokens, start, max(start, n_max)) == expected


def test_what_was_found_is_stale_once_a_slot_rests_or_wakes_or_is_waited_for() -> None:
    """How a match is come by depends on it: a resting slot is gone on with, and must not be shared at its end."""
    garden = Garden()
    garden.grow(0, "once upon a time")
    versions = [garden.tree.version]
    garden.tree.rest(0)
    versions.append(garden.tree.version)
    garden.tree.wait_for(0, (0, 1))
    versions.append(garden.tree.version)
    garden.tree.wait_no_more(0, (0, 1))
    versions.append(garden.tree.version)
    garden.tree.wake(0)
    versions.append(garden.tree.version)
    assert len(set(versions)) == len(versions)
