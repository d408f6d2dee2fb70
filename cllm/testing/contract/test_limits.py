"""The ends of memory and of what may be asked: named errors, nothing lost, never a crash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from cllm.backend import Batch, KvLayout
from cllm.errors import NoRoom
from cllm.testing.contract.hand import Hand, Near, Outputs, PlainTokens, Row, n_tokens_max, needs_slots, refused

N_BEFORE: Final = 20  # tokens of the bystander when the limit is met
N_AFTER: Final = 8


# --- no room ----------------------------------------------------------------------------------------------------------


def test_every_cell_that_is_promised_can_be_filled(hand: Hand, plain: PlainTokens) -> None:
    hand.fill(plain, n_free=0)


def test_cells_that_were_freed_here_and_there_can_all_be_filled(hand: Hand, plain: PlainTokens) -> None:
    """Slots of two tokens are dropped alternately, so that free cells lie scattered."""
    n_slots = min(hand.model.n_slots, hand.model.n_cells // 2)
    for slot in range(n_slots):
        hand.put(slot, plain.draw(2, seed=slot), Outputs.NONE)
    for slot in range(0, n_slots, 2):
        hand.drop(slot)
    hand.fill(plain, n_free=0)


def test_one_row_more_than_there_are_cells_is_no_room(hand: Hand, plain: PlainTokens) -> None:
    slot = hand.fill(plain, n_free=0)
    if len(hand.held(slot)) == hand.model.info.n_ctx_train:
        pytest.skip("the slot is as long as the model allows")
    with pytest.raises(NoRoom):
        hand.step(hand.rows(slot, plain.draw(1)))


@pytest.mark.parametrize("n_free", [0, 1, 40])
def test_after_no_room_every_slot_is_as_it_was(hand: Hand, plain: PlainTokens, near: Near, n_free: int) -> None:
    needs_slots(hand.model, 2)
    bystander = plain.draw(N_BEFORE + N_AFTER)
    expected = hand.alone(bystander)
    hand.put(0, bystander[:N_BEFORE])
    slot = hand.fill(plain, n_free=n_free, first_slot=1)
    n_rows = min(hand.model.n_rows_max, 64)
    if n_rows <= n_free:
        pytest.skip("its steps are too small to be too large")
    for _ in range(3):  # nothing may be used up by failing
        with pytest.raises(NoRoom):
            hand.step(hand.rows(slot, plain.draw(n_rows, seed=99)))
    if n_free:
        hand.put(slot, plain.draw(n_free, seed=5))  # what was free still is
    hand.drop(slot)
    near.check(hand.put(0, bystander[N_BEFORE:], Outputs.ALL), expected[N_BEFORE:])


def test_after_no_room_the_slot_that_asked_for_it_is_as_it_was(hand: Hand, plain: PlainTokens, near: Near) -> None:
    needs_slots(hand.model, 2)
    tokens = plain.draw(N_BEFORE + N_AFTER)
    n_rows = min(hand.model.n_rows_max, 64)
    if hand.model.capabilities.kv_layout is not KvLayout.UNIFIED or n_rows <= N_AFTER:
        pytest.skip("a slot that holds little has room here")
    expected = hand.alone(tokens)
    hand.put(0, tokens[:N_BEFORE])
    hand.fill(plain, n_free=N_AFTER, first_slot=1)
    with pytest.raises(NoRoom):
        hand.step(hand.rows(0, plain.draw(n_rows, seed=99)))
    near.check(hand.put(0, tokens[N_BEFORE:], Outputs.ALL), expected[N_BEFORE:])


def test_no_room_in_a_step_of_several_slots_leaves_all_of_them(hand: Hand, plain: PlainTokens, near: Near) -> None:
    needs_slots(hand.model, 3)
    tokens = plain.draw(N_BEFORE + N_AFTER)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:N_BEFORE])
    slot = hand.fill(plain, n_free=1, first_slot=1)
    with pytest.raises(NoRoom):
        hand.step(hand.rows(0, tokens[N_BEFORE : N_BEFORE + 2], Outputs.ALL) + hand.rows(slot, plain.draw(5, seed=9)))
    hand.drop(slot)
    near.check(hand.put(0, tokens[N_BEFORE:], Outputs.ALL), expected[N_BEFORE:])


def test_dropping_a_slot_makes_room_again(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(N_BEFORE)
    expected = hand.alone(tokens)
    slot = hand.fill(plain, n_free=0)
    hand.drop(slot)
    near.check(hand.put(slot, tokens, Outputs.ALL), expected)


def test_a_slot_that_is_full_is_no_room_while_another_one_goes_on(hand: Hand, plain: PlainTokens, near: Near) -> None:
    needs_slots(hand.model, 2)
    model = hand.model
    if model.n_cells_slot == model.n_cells or n_tokens_max(model) < model.n_cells_slot:
        pytest.skip("a slot can hold all cells, or more than the model was trained for")
    tokens = plain.draw(N_BEFORE + N_AFTER)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:N_BEFORE])
    hand.put(1, plain.draw(model.n_cells_slot, seed=1))
    with pytest.raises(NoRoom):
        hand.step(hand.rows(1, plain.draw(1)))
    near.check(hand.put(0, tokens[N_BEFORE:], Outputs.ALL), expected[N_BEFORE:])


def test_a_state_for_which_there_is_no_room_is_no_room_and_the_slot_stays_empty(hand: Hand, plain: PlainTokens, near: Near) -> None:
    needs_slots(hand.model, 3)
    capabilities = hand.model.capabilities
    if not capabilities.can_save or capabilities.kv_layout is not KvLayout.UNIFIED:
        pytest.skip("this memory cannot be saved, or an empty slot always has room")
    tokens = plain.draw(N_BEFORE + N_AFTER)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:N_BEFORE])
    state = hand.model.save(0)
    hand.drop(0)
    slot = hand.fill(plain, n_free=N_BEFORE - 1, first_slot=1)
    with pytest.raises(NoRoom):
        hand.model.restore(0, state)
    hand.drop(slot)
    hand.restore(0, state, tokens[:N_BEFORE])
    near.check(hand.put(0, tokens[N_BEFORE:], Outputs.ALL), expected[N_BEFORE:])


# --- what cannot be ---------------------------------------------------------------------------------------------------

Spoil = Callable[[Hand, list[int], Batch], object]


def set_column(column: str, i: int, value: int) -> Spoil:
    def spoil(_hand: Hand, _tokens: list[int], batch: Batch) -> None:
        getattr(batch, column)[i] = value

    return spoil


def set_count(name: str, value: int) -> Spoil:
    return lambda _hand, _tokens, batch: setattr(batch, name, value)


IMPOSSIBLE: Final[dict[str, Spoil]] = {
    "no rows": set_count("n_rows", 0),
    "fewer rows than none": set_count("n_rows", -1),
    "fewer outputs than there are": set_count("n_outputs", 0),
    "more outputs than there are": set_count("n_outputs", 2),
    "a token after the last": lambda hand, _tokens, batch: batch.tokens.__setitem__(1, hand.model.vocabulary.n_tokens),
    "a token before the first": set_column("tokens", 1, -1),
    "a slot after the last": lambda hand, _tokens, batch: batch.slots.__setitem__(slice(0, 3), hand.model.n_slots),
    "a slot before the first": lambda _hand, _tokens, batch: batch.slots.__setitem__(slice(0, 3), -1),
    "a position before the first": set_column("positions", 0, -1),
    "a position that leaves a gap": set_column("positions", 2, 30),
    "a position that comes twice": set_column("positions", 2, 1),
    "positions that go backwards": lambda _hand, _tokens, batch: batch.positions.__setitem__(slice(0, 3), [2, 1, 0]),
    "a beginning that leaves a gap": lambda _hand, _tokens, batch: batch.positions.__setitem__(slice(0, 3), [1, 2, 3]),
}


@pytest.mark.parametrize("spoil", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_a_step_that_cannot_be_is_refused_and_the_other_slots_are_as_they_were(
    hand: Hand, plain: PlainTokens, near: Near, spoil: Spoil
) -> None:
    needs_slots(hand.model, 2)
    tokens = plain.draw(N_BEFORE + N_AFTER)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:N_BEFORE])
    batch = hand.write(hand.rows(1, tokens[:3]))
    spoil(hand, tokens, batch)
    with refused():
        hand.model.step(batch)
    hand.drop(1)
    near.check(hand.put(0, tokens[N_BEFORE:], Outputs.ALL), expected[N_BEFORE:])
    near.check(hand.put(1, tokens[:N_BEFORE], Outputs.ALL), expected[:N_BEFORE])


@pytest.mark.parametrize("position", [0, N_BEFORE - 1, N_BEFORE + 1], ids=["from the start", "one again", "one left out"])
def test_a_row_at_a_position_that_does_not_come_next_is_refused(hand: Hand, plain: PlainTokens, near: Near, position: int) -> None:
    """The position mismatch that a slot given away too soon leads to must be told, not computed."""
    tokens = plain.draw(N_BEFORE)
    expected = hand.alone(tokens)
    hand.put(0, tokens)
    with refused():
        hand.model.step(hand.write([Row(0, tokens[0], position, is_output=True)]))
    hand.drop(0)
    near.check(hand.put(0, tokens, Outputs.ALL), expected)


def test_more_rows_than_a_step_takes_are_refused(hand: Hand, plain: PlainTokens, near: Near) -> None:
    n = hand.model.n_rows_max + 1
    tokens = plain.draw(n)
    expected = hand.alone(tokens[:N_BEFORE])
    batch = hand.write([Row(0, token, i, is_output=i == n - 1) for i, token in enumerate(tokens)], Batch(n))
    with refused():
        hand.model.step(batch)
    hand.drop(0)
    near.check(hand.put(0, tokens[:N_BEFORE], Outputs.ALL), expected)


def test_slots_that_there_are_not_are_refused(hand: Hand, plain: PlainTokens, near: Near) -> None:
    model = hand.model
    tokens = plain.draw(N_BEFORE + N_AFTER)
    expected = hand.alone(tokens)
    last = model.n_slots - 1
    hand.put(last, tokens[:N_BEFORE])
    for slot in (-1, model.n_slots, 2**31 - 1):
        with refused():
            model.drop(slot)
        with refused():
            model.trim(slot, 0)
        with refused():
            model.save(slot)
    with refused():
        model.trim(last, -1)
    near.check(hand.put(last, tokens[N_BEFORE:], Outputs.ALL), expected[N_BEFORE:])
