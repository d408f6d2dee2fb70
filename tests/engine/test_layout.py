"""When the cells are laid out anew: apart while nothing is shared and a slot's part suffices, and only once staying has cost as much."""

from __future__ import annotations

import pytest

from cllm.engine.memory.layout import N_FEW, N_REMEMBERED, N_SEEN_LEAST, Apart, LayoutChoice

CHANGE_S = 0.5
APART = Apart(n_slots=12, n_cells_slot=512, gain_cell_s=1e-6, change_s=CHANGE_S)


def choice(*, n_came: int = 20, n_known: int = 0, n_tokens: int = 200, n_live: int = 12) -> LayoutChoice:
    """A choice that has seen so many sequences of 100 tokens come, and end with `n_tokens`."""
    one = LayoutChoice(APART)
    for _ in range(n_came):
        one.came(100, n_known, n_live)
        one.ended(n_tokens, n_max=4096)
    return one


def serve(one: LayoutChoice, seconds: float) -> None:
    """Make steps of twelve that generate, until staying in the pool has cost so much."""
    while one._lost_s < seconds:  # what it comes to in steps is a matter of a constant
        one.stepped(12, 12, 12, 1000)


def test_it_changes_once_staying_has_cost_as_much_as_changing() -> None:
    one = choice()
    serve(one, CHANGE_S)
    assert one.may_be_due
    assert one.is_due(0.0, 200), "nobody holds anything"
    assert not one.is_due(2.0, 200), "what is held would have to be computed again"
    serve(one, CHANGE_S + 2.0)
    assert one.is_due(2.0, 200)


def test_one_sequence_alone_loses_nothing_in_a_pool() -> None:
    one = choice()
    for _ in range(10_000):
        one.stepped(1, 1, 1, 4000)
    assert not one.may_be_due


def few(*, n_tokens: int = 200) -> LayoutChoice:
    """A choice that knows few sequences of so many tokens."""
    return choice(n_came=N_REMEMBERED, n_tokens=n_tokens, n_live=N_FEW)


def test_what_prompts_gain_in_a_pool_does_not_count_for_a_few() -> None:
    one = few()
    while one._lost_s < CHANGE_S:
        one.stepped(24, N_FEW, N_FEW, N_FEW * 100, spared_s=1.0)
    assert one.is_due(0.0, 200)


def test_a_few_who_lie_apart_stay_there_though_prompts_come_among_their_answers() -> None:
    one = few()
    one.changed(0.2)
    for _ in range(1000):
        one.stepped(24, N_FEW, N_FEW, N_FEW * 100, spared_s=1.0)
    assert not one.may_be_due


def test_a_step_whose_sequences_have_all_ended_meanwhile_says_nothing() -> None:
    one = few()
    lost_s = one._lost_s
    one.stepped(8, 8, 0, 0)
    assert one._lost_s == lost_s


def test_a_long_one_among_short_ones_does_not_have_them_change_for_ever() -> None:
    """What is there says that they gain apart, what has ended that they were short."""
    one = choice(n_came=N_REMEMBERED, n_tokens=100, n_live=N_FEW)
    n_changes = 0
    for step in range(20_000):
        one.stepped(24 if step % 3 else N_FEW, N_FEW, N_FEW, 3600)
        if step % 20 == 0:
            one.came(100, 0, N_FEW)
            one.ended(100, n_max=4096)
        if one.may_be_due and one.is_due(0.1, 500):
            one.changed(0.2)
            n_changes += 1
    assert n_changes == 1


def test_prompts_that_are_computed_together_are_no_loss_to_a_few_short_ones() -> None:
    one = few()
    lost_s = one._lost_s
    one.stepped(800, 0, N_FEW, N_FEW * 100)
    assert one._lost_s == lost_s


def test_a_few_with_many_cells_lose_what_all_their_rows_walk_by() -> None:
    slow, fast = choice(), choice()
    for one, n_rows in ((slow, N_FEW), (fast, 3 * N_FEW)):
        one.stepped(n_rows, N_FEW, N_FEW, 5000)
    assert fast._lost_s == pytest.approx(3 * slow._lost_s)
    serve(fast, CHANGE_S)
    assert fast.is_due(0.0, 200)


def test_the_pool_stays_while_prompts_gain_more_beside_answers_than_these_lose() -> None:
    one = choice()
    for _ in range(10_000):
        one.stepped(12, 12, 12, 1000, spared_s=0.0 if one._lost_s else 0.02)
        one.stepped(6, 6, 12, 1000, spared_s=0.01)
    assert not one.may_be_due


@pytest.mark.parametrize(
    "one",
    [
        choice(n_came=N_SEEN_LEAST - 1),
        choice(n_known=90),
        choice(n_tokens=500),
        choice(n_live=13),
    ],
    ids=["few were seen", "prompts are shared", "the next one may outgrow a part", "more would run than there are parts"],
)
def test_the_pool_stays_where_parts_would_not_pay_or_not_do(one: LayoutChoice) -> None:
    serve(one, 60.0)
    assert not one.is_due(0.0, 200)
    assert not one.may_be_due, "what was lost does not count: it was worth it"


def test_the_pool_stays_while_somebody_is_there_who_would_not_fit() -> None:
    one = choice()
    serve(one, 60.0)
    assert not one.is_due(0.0, 513)


def test_a_sequence_that_says_how_long_it_will_be_needs_no_room_to_spare() -> None:
    one = choice(n_tokens=100)
    one.ended(512, n_max=512)
    serve(one, CHANGE_S)
    assert one.is_due(0.0, 0)


def test_it_may_be_due_before_any_sequence_has_ended() -> None:
    one = LayoutChoice(APART)
    for _ in range(N_SEEN_LEAST):
        one.came(100, 0, 12)
    serve(one, CHANGE_S)
    assert one.is_due(0.0, 200)
    assert not one.is_due(0.0, 513)


def test_what_was_apart_when_it_last_served_is_to_be_apart_at_once() -> None:
    one = LayoutChoice(APART, begins_apart=True)
    assert one.may_be_due
    assert one.is_due(0.0, 0)
    one.changed(0.2)
    assert one.is_apart
    assert not one.may_be_due


def test_what_was_apart_before_is_not_so_at_once_if_the_first_who_came_would_not_fit_and_then_the_rule_is_the_usual_one() -> None:
    one = LayoutChoice(APART, begins_apart=True)
    assert not one.is_due(0.0, 513)
    assert not one.may_be_due
    assert not one.is_due(0.0, 0)


def test_what_was_apart_before_is_not_so_at_once_if_something_was_computed_already() -> None:
    assert not LayoutChoice(APART, begins_apart=True).is_due(0.1, 0)


def test_where_it_began_apart_a_few_who_share_bring_the_pool_back() -> None:
    one = LayoutChoice(APART, begins_apart=True)
    one.changed(0.2)
    one.came(100, 0, 12)
    one.came(100, 90, 12)
    assert not one.may_be_due, "one may be by chance"
    one.came(100, 90, 12)
    one.came(100, 90, 12)
    assert one.is_due(5.0, 200)


def changed() -> LayoutChoice:
    one = choice()
    one.changed(0.2)
    return one


def test_apart_it_stays_so() -> None:
    one = changed()
    for _ in range(1000):
        one.stepped(12, 12, 12, 1000)
        one.came(100, 0, 12)
        one.grew(512)
    assert one.is_apart
    assert not one.may_be_due


def test_it_goes_back_at_once_when_a_sequence_outgrows_its_part() -> None:
    one = changed()
    one.grew(513)
    assert one.may_be_due
    assert one.is_due(5.0, 513)
    one.changed(0.2)
    serve(one, 60.0)
    for _ in range(N_SEEN_LEAST):
        one.came(100, 0, 12)
    assert not one.is_due(0.0, 200), "and does not change again while such a one is remembered"


def test_it_goes_back_when_prompts_are_shared_again() -> None:
    one = changed()
    for _ in range(10):
        one.came(100, 90, 12)
    assert one.may_be_due
    assert one.is_due(5.0, 200)


def test_it_goes_back_when_more_would_run_than_there_are_parts() -> None:
    one = changed()
    one.came(100, 0, 13)
    assert one.is_due(5.0, 200)


def test_it_goes_back_for_one_who_waits_for_a_part_before_anybody_ends() -> None:
    one = changed()
    one.waits(12)
    assert not one.may_be_due
    one.waits(13)
    assert one.may_be_due
    assert one.is_due(5.0, 200)


def test_in_a_pool_only_those_who_were_let_in_say_how_many_come() -> None:
    one = choice()
    one.waits(13)
    serve(one, 10.0)
    assert one.is_due(5.0, 200)
