"""Slots: emptied, cut, shared, saved, restored, and never in each other's way."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cllm.backend import KvLayout, StepModel
from cllm.errors import NoRoom
from cllm.testing.contract.hand import Hand, Near, Outputs, PlainTokens, denied, needs_slots, refused

N_PREFIX = 20  # of a slot whose end alone is saved


def check_denied(hand: Hand, plain: PlainTokens, near: Near, *calls: Callable[[], object]) -> None:
    """What this memory cannot do is refused by name, and the slot goes on as if nobody had asked."""
    tokens = plain.draw(15)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:10])
    for call in calls:
        with denied():
            call()
    near.check(hand.put(0, tokens[10:], Outputs.ALL), expected[10:])


# --- drop -------------------------------------------------------------------------------------------------------------


def test_a_dropped_slot_begins_anew(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(20, seed=1)
    expected = hand.alone(tokens)
    hand.put(0, plain.draw(30, seed=2))
    hand.drop(0)
    near.check(hand.put(0, tokens, Outputs.ALL), expected)


def test_dropping_an_empty_slot_is_harmless(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(8)
    expected = hand.alone(tokens)
    for slot in range(hand.model.n_slots):
        hand.drop(slot)
        hand.drop(slot)
    near.check(hand.put(0, tokens, Outputs.ALL), expected)


def test_a_slot_is_used_again_and_again_without_a_trace(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(20)
    expected = hand.alone(tokens)
    for seed in range(8):
        hand.put(0, plain.draw(5 + 4 * seed, seed=seed))
        hand.drop(0)
        near.check(hand.alone(tokens), expected)


# --- neighbours -------------------------------------------------------------------------------------------------------


def test_slots_never_disturb_each_other(hand: Hand, plain: PlainTokens, near: Near) -> None:
    """One slot goes on, row by row, while another is filled, dropped and filled with something else."""
    needs_slots(hand.model, 3)
    running = plain.draw(30, seed=1)
    expected = hand.alone(running)
    hand.put(1, running[:6])
    for i in range(6, 30, 3):
        hand.put(0, plain.draw(11, seed=i))
        hand.put(2, plain.draw(7, seed=i + 1))
        near.check(hand.put(1, running[i : i + 3], Outputs.ALL), expected[i : i + 3])
        hand.drop(0)
        if i % 2:
            hand.drop(2)


def test_equal_texts_in_two_slots_are_two_texts(hand: Hand, plain: PlainTokens, near: Near) -> None:
    needs_slots(hand.model, 2)
    tokens, ends = plain.draw(20, seed=1), [plain.draw(5, seed=2), plain.draw(5, seed=3)]
    expected = [hand.alone([*tokens, *end])[20:] for end in ends]
    hand.put(0, tokens)
    hand.put(1, tokens)
    near.check(hand.put(0, ends[0], Outputs.ALL), expected[0])
    near.check(hand.put(1, ends[1], Outputs.ALL), expected[1])


# --- trim -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def trims(model: StepModel) -> None:
    if not model.capabilities.can_trim:
        pytest.skip("this memory cannot be trimmed")


@pytest.mark.usefixtures("trims")
@pytest.mark.parametrize("n_keep", [1, 7, 20, 29])
def test_a_trimmed_slot_goes_on_with_other_tokens(hand: Hand, plain: PlainTokens, near: Near, n_keep: int) -> None:
    tokens, other = plain.draw(30, seed=1), plain.draw(9, seed=2)
    expected = hand.alone([*tokens[:n_keep], *other])[n_keep:]
    hand.put(0, tokens)
    hand.trim(0, n_keep)
    near.check(hand.put(0, other, Outputs.ALL), expected)


@pytest.mark.usefixtures("trims")
def test_trimming_to_nothing_is_dropping(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(12, seed=1)
    expected = hand.alone(tokens)
    hand.put(0, plain.draw(12, seed=2))
    hand.trim(0, 0)
    near.check(hand.put(0, tokens, Outputs.ALL), expected)


@pytest.mark.usefixtures("trims")
def test_trimming_to_what_is_there_or_more_changes_nothing(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(15)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:10])
    hand.trim(0, 10)
    hand.trim(0, 99)
    near.check(hand.put(0, tokens[10:], Outputs.ALL), expected[10:])


@pytest.mark.usefixtures("trims")
def test_trimming_one_slot_leaves_the_others(hand: Hand, plain: PlainTokens, near: Near) -> None:
    needs_slots(hand.model, 2)
    tokens = plain.draw(15)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:10])
    hand.put(1, tokens[:10])
    hand.trim(1, 3)
    near.check(hand.put(0, tokens[10:], Outputs.ALL), expected[10:])


def test_a_memory_that_cannot_be_trimmed_refuses_and_keeps_the_slot(hand: Hand, plain: PlainTokens, near: Near) -> None:
    if hand.model.capabilities.can_trim:
        pytest.skip("this memory can be trimmed")
    check_denied(hand, plain, near, lambda: hand.model.trim(0, 4))


# --- share ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def shares(model: StepModel) -> None:
    needs_slots(model, 3)
    if not model.capabilities.can_share:
        pytest.skip("this memory does not share any prefix")


@pytest.mark.usefixtures("shares")
@pytest.mark.parametrize("n_tokens", [1, 13, 30])
def test_a_shared_prefix_is_as_good_as_a_computed_one(hand: Hand, plain: PlainTokens, near: Near, n_tokens: int) -> None:
    tokens, other = plain.draw(30, seed=1), plain.draw(9, seed=2)
    expected = hand.alone([*tokens[:n_tokens], *other])[n_tokens:]
    hand.put(0, tokens)
    hand.share(0, 1, n_tokens)
    near.check(hand.put(1, other, Outputs.ALL), expected)


@pytest.mark.usefixtures("shares")
def test_who_shares_a_prefix_goes_its_own_way(hand: Hand, plain: PlainTokens, near: Near) -> None:
    prefix, ends = plain.draw(20), [plain.draw(6, seed=seed) for seed in (1, 2, 3)]
    expected = [hand.alone([*prefix, *end])[20:] for end in ends]
    hand.put(0, prefix)
    hand.share(0, 1, 20)
    hand.share(1, 2, 20)
    for i in range(6):
        logits = hand.step([row for slot, end in enumerate(ends) for row in hand.rows(slot, [end[i]])])
        near.check(logits, np.stack([of_end[i] for of_end in expected]))


@pytest.mark.usefixtures("shares")
@pytest.mark.parametrize("leaver", ["source", "target"])
def test_a_prefix_lives_on_when_one_that_shares_it_leaves(hand: Hand, plain: PlainTokens, near: Near, leaver: str) -> None:
    tokens = plain.draw(26)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:20])
    hand.share(0, 1, 20)
    gone, left = (0, 1) if leaver == "source" else (1, 0)
    hand.drop(gone)
    hand.put(2, plain.draw(30, seed=5))  # takes what was freed, and nothing else
    near.check(hand.put(left, tokens[20:], Outputs.ALL), expected[20:])


@pytest.mark.usefixtures("shares")
def test_sharing_nothing_leaves_the_target_empty(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(10)
    expected = hand.alone(tokens)
    hand.put(0, plain.draw(10, seed=1))
    hand.share(0, 1, 0)
    near.check(hand.put(1, tokens, Outputs.ALL), expected)


@pytest.mark.usefixtures("shares", "trims")
def test_trimming_into_a_shared_prefix_leaves_it_to_the_other(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens, other = plain.draw(26), plain.draw(6, seed=1)
    expected, cut = hand.alone(tokens), hand.alone([*tokens[:8], *other])
    hand.put(0, tokens[:20])
    hand.share(0, 1, 20)
    hand.trim(1, 8)
    near.check(hand.put(1, other, Outputs.ALL), cut[8:])
    near.check(hand.put(0, tokens[20:], Outputs.ALL), expected[20:])


@pytest.mark.usefixtures("shares")
def test_in_one_pool_sharing_takes_no_cells(hand: Hand, plain: PlainTokens) -> None:
    if hand.model.capabilities.kv_layout is not KvLayout.UNIFIED:
        pytest.skip("the cells are not in one pool")
    n_prefix = 30
    hand.put(0, plain.draw(n_prefix))
    n_sharers = min(hand.model.n_slots - 1, 40)
    for slot in range(1, n_sharers):
        hand.model.share(0, slot, n_prefix)
    hand.fill(plain, n_free=0, first_slot=n_sharers)


@pytest.mark.usefixtures("shares")
def test_a_share_that_cannot_be_is_refused_and_changes_nothing(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(15)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:10])
    hand.put(1, tokens[:10])
    for source, target, n_tokens in ((0, 1, 5), (0, 2, 11), (0, 2, -1), (0, hand.model.n_slots, 5), (-1, 2, 5)):
        with refused():
            hand.model.share(source, target, n_tokens)
    near.check(hand.put(0, tokens[10:], Outputs.ALL), expected[10:])
    near.check(hand.put(1, tokens[10:], Outputs.ALL), expected[10:])
    near.check(hand.put(2, tokens, Outputs.ALL), expected)


def test_a_copy_for_which_there_is_no_room_leaves_the_target_empty(hand: Hand, plain: PlainTokens, near: Near) -> None:
    can = hand.model.capabilities
    if not can.can_copy or can.can_share or can.kv_layout is not KvLayout.UNIFIED:
        pytest.skip("this memory makes no copies, or each slot has room of its own for one")
    needs_slots(hand.model, 3)
    tokens = plain.draw(25)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:20])
    slot = hand.fill(plain, n_free=19, first_slot=2)
    try:
        hand.share(0, 1, 20)  # of a memory whose copies take no cells
        hand.drop(slot)
    except NoRoom:
        hand.drop(slot)
        hand.share(0, 1, 20)
    near.check(hand.put(1, tokens[20:], Outputs.ALL), expected[20:])


def test_where_only_whole_slots_are_shared_a_part_is_refused(hand: Hand, plain: PlainTokens, near: Near) -> None:
    needs_slots(hand.model, 2)
    if hand.model.capabilities.can_share:
        pytest.skip("this memory shares any prefix")
    tokens = plain.draw(20)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:12])
    with denied():
        hand.model.share(0, 1, 5)
    if hand.model.capabilities.can_copy:
        hand.share(0, 1, 12)
    else:
        with denied():
            hand.model.share(0, 1, 12)
        hand.put(1, tokens[:12])
    near.check(hand.put(1, tokens[12:], Outputs.ALL), expected[12:])
    near.check(hand.put(0, tokens[12:], Outputs.ALL), expected[12:])


# --- save and restore -------------------------------------------------------------------------------------------------


@pytest.fixture
def saves(model: StepModel) -> None:
    if not model.capabilities.can_save:
        pytest.skip("this memory cannot be saved")


def test_a_memory_that_cannot_be_saved_refuses_and_keeps_the_slot(hand: Hand, plain: PlainTokens, near: Near) -> None:
    needs_slots(hand.model, 2)
    if hand.model.capabilities.can_save:
        pytest.skip("this memory can be saved")
    check_denied(hand, plain, near, lambda: hand.model.save(0), lambda: hand.model.restore(1, b"a state of another model"))


@pytest.mark.usefixtures("saves")
def test_a_restored_slot_is_as_good_as_a_computed_one(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(40)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:30])
    state = hand.model.save(0)
    hand.drop(0)
    hand.put(0, plain.draw(10, seed=1))
    hand.drop(0)
    hand.restore(0, state, tokens[:30])
    near.check(hand.put(0, tokens[30:], Outputs.ALL), expected[30:])


@pytest.mark.usefixtures("saves")
def test_a_state_may_be_restored_into_other_slots_more_than_once(hand: Hand, plain: PlainTokens, near: Near) -> None:
    needs_slots(hand.model, 3)
    tokens = plain.draw(26)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:20])
    state = hand.model.save(0)
    hand.restore(1, state, tokens[:20])
    hand.restore(2, state, tokens[:20])
    for slot in (1, 0, 2):
        near.check(hand.put(slot, tokens[20:], Outputs.ALL), expected[20:])


@pytest.mark.usefixtures("saves")
def test_saving_changes_nothing_and_is_not_changed_by_what_comes_after(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens, other = plain.draw(26), plain.draw(6, seed=1)
    expected, elsewhere = hand.alone(tokens), hand.alone([*tokens[:20], *other])
    hand.put(0, tokens[:20])
    state = hand.model.save(0)
    near.check(hand.put(0, tokens[20:], Outputs.ALL), expected[20:])
    hand.drop(0)
    hand.restore(0, state, tokens[:20])
    near.check(hand.put(0, other, Outputs.ALL), elsewhere[20:])


@pytest.mark.usefixtures("saves")
def test_saving_and_restoring_leave_the_other_slots(hand: Hand, plain: PlainTokens, near: Near) -> None:
    needs_slots(hand.model, 2)
    running, tokens = plain.draw(30, seed=1), plain.draw(20, seed=2)
    expected = hand.alone(running)
    hand.put(0, running[:10])
    hand.put(1, tokens)
    state = hand.model.save(1)
    near.check(hand.put(0, running[10:15], Outputs.ALL), expected[10:15])
    hand.drop(1)
    near.check(hand.put(0, running[15:20], Outputs.ALL), expected[15:20])
    hand.restore(1, state, tokens)
    near.check(hand.put(0, running[20:], Outputs.ALL), expected[20:])


@pytest.mark.usefixtures("saves")
def test_an_empty_slot_can_be_saved_and_restored(hand: Hand, plain: PlainTokens, near: Near) -> None:
    needs_slots(hand.model, 2)
    tokens = plain.draw(10)
    expected = hand.alone(tokens)
    hand.restore(1, hand.model.save(0), [])
    near.check(hand.put(1, tokens, Outputs.ALL), expected)


@pytest.mark.usefixtures("saves")
def test_restoring_into_a_slot_that_is_not_empty_is_refused(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(15)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:10])
    state = hand.model.save(0)
    with refused():
        hand.model.restore(0, state)
    near.check(hand.put(0, tokens[10:], Outputs.ALL), expected[10:])


@pytest.mark.usefixtures("saves")
@pytest.mark.parametrize("damage", ["nothing", "noise", "a cut end", "half", "a longer end", "another beginning"])
def test_a_state_that_is_none_is_refused_and_the_slot_stays_empty(hand: Hand, plain: PlainTokens, near: Near, damage: str) -> None:
    needs_slots(hand.model, 2)
    tokens = plain.draw(20)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:10])
    state = hand.model.save(0)
    damaged = {
        "nothing": b"",
        "noise": np.random.default_rng(0).bytes(len(state)),
        "a cut end": state[:-4],
        "half": state[: len(state) // 2],
        "a longer end": state + bytes(4),
        "another beginning": bytes(byte ^ 0x55 for byte in state[:8]) + state[8:],
    }[damage]
    with refused():
        hand.model.restore(1, damaged)
    near.check(hand.put(1, tokens, Outputs.ALL), expected)
    near.check(hand.put(0, tokens[10:], Outputs.ALL), expected[10:])


# --- save and restore of a part ---------------------------------------------------------------------------------------


@pytest.fixture
def saves_parts(model: StepModel) -> None:
    needs_slots(model, 3)
    if not model.capabilities.can_save_part:
        pytest.skip("this memory saves whole slots only")


@pytest.mark.usefixtures("saves_parts", "trims")
@pytest.mark.parametrize("start", [1, 13, 29])
def test_a_part_restored_behind_what_came_before_is_as_good_as_computed(hand: Hand, plain: PlainTokens, near: Near, start: int) -> None:
    tokens = plain.draw(40)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:30])
    state = hand.model.save(0, start)
    hand.trim(0, start)
    hand.put(1, plain.draw(20, seed=1))
    hand.restore(0, state, tokens[start:30])
    near.check(hand.put(0, tokens[30:], Outputs.ALL), expected[30:])


@pytest.mark.usefixtures("saves_parts", "shares")
def test_parts_of_several_slots_are_restored_behind_one_shared_prefix(hand: Hand, plain: PlainTokens, near: Near) -> None:
    prefix, ends = plain.draw(20), [plain.draw(9, seed=1), plain.draw(9, seed=2)]
    expected = [hand.alone([*prefix, *end])[25:] for end in ends]
    hand.put(0, prefix)
    states = []
    for end in ends:
        hand.share(0, 1, 20)
        hand.put(1, end[:5])
        states.append(hand.model.save(1, 20))
        hand.drop(1)
    for slot, (state, end) in enumerate(zip(states, ends, strict=True), 1):
        hand.share(0, slot, 20)
        hand.restore(slot, state, end[:5])
    for slot, end in enumerate(ends, 1):
        near.check(hand.put(slot, end[5:], Outputs.ALL), expected[slot - 1])


@pytest.mark.usefixtures("saves_parts", "shares")
def test_a_part_takes_only_its_own_cells(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(N_PREFIX + 10)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:N_PREFIX])
    hand.share(0, 1, N_PREFIX)
    hand.put(1, tokens[N_PREFIX : N_PREFIX + 5])
    state = hand.model.save(1, N_PREFIX)
    hand.trim(1, N_PREFIX)
    hand.model.drop(0)  # the prefix is the other's now
    hand.held(0).clear()
    hand.fill(plain, n_free=6, first_slot=2)
    hand.restore(1, state, tokens[N_PREFIX : N_PREFIX + 5])
    near.check(hand.put(1, tokens[N_PREFIX + 5 : N_PREFIX + 6], Outputs.ALL), expected[N_PREFIX + 5 : N_PREFIX + 6])


@pytest.mark.usefixtures("saves_parts", "trims")
def test_a_part_for_which_there_is_no_room_leaves_the_slot_as_it_was(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(40)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:30])
    state = hand.model.save(0, 10)
    hand.trim(0, 10)
    slot = hand.fill(plain, n_free=19, first_slot=1)
    with pytest.raises(NoRoom):
        hand.model.restore(0, state)
    hand.drop(slot)
    near.check(hand.put(0, tokens[10:15], Outputs.ALL), expected[10:15])
    hand.trim(0, 10)
    hand.restore(0, state, tokens[10:30])
    near.check(hand.put(0, tokens[30:], Outputs.ALL), expected[30:])


@pytest.mark.usefixtures("saves_parts")
def test_saving_a_part_changes_nothing_while_every_slot_is_in_use(hand: Hand, plain: PlainTokens, near: Near) -> None:
    texts = [plain.draw(6, seed=slot) for slot in range(min(hand.model.n_slots, 40))]
    expected = [hand.alone(text) for text in texts]
    for slot in range(hand.model.n_slots):
        hand.put(slot, texts[slot][:4] if slot < len(texts) else plain.draw(1))
    states = [hand.model.save(slot, 2) for slot in range(len(texts))]
    for slot, (text, state) in enumerate(zip(texts, states, strict=True)):
        near.check(hand.put(slot, text[4:5], Outputs.ALL), expected[slot][4:5])
        if hand.model.capabilities.can_trim:
            hand.trim(slot, 2)
            hand.restore(slot, state, text[2:4])
            near.check(hand.put(slot, text[4:], Outputs.ALL), expected[slot][4:])


@pytest.mark.usefixtures("saves_parts")
def test_a_part_without_cells_can_be_saved_and_restored(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(15)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:10])
    hand.restore(0, hand.model.save(0, 10), [])
    near.check(hand.put(0, tokens[10:], Outputs.ALL), expected[10:])


@pytest.mark.usefixtures("saves_parts")
def test_a_part_restored_elsewhere_than_behind_its_beginning_is_refused(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(30)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:20])
    hand.put(1, tokens[:9])
    state = hand.model.save(0, 10)
    for slot in (0, 1, 2):
        with refused():
            hand.model.restore(slot, state)
    near.check(hand.put(0, tokens[20:], Outputs.ALL), expected[20:])
    near.check(hand.put(1, tokens[9:12], Outputs.ALL), expected[9:12])
    near.check(hand.put(2, tokens[:5], Outputs.ALL), expected[:5])


@pytest.mark.usefixtures("saves_parts")
@pytest.mark.parametrize("start", [-1, 21])
def test_a_part_that_there_is_not_is_not_saved(hand: Hand, plain: PlainTokens, start: int) -> None:
    hand.put(0, plain.draw(20))
    with refused():
        hand.model.save(0, start)


@pytest.mark.usefixtures("saves")
def test_where_only_whole_slots_are_saved_a_part_is_refused(hand: Hand, plain: PlainTokens, near: Near) -> None:
    if hand.model.capabilities.can_save_part:
        pytest.skip("this memory saves any part")
    check_denied(hand, plain, near, lambda: hand.model.save(0, 5))
