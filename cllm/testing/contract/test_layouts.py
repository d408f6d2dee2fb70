"""Cells that are laid out anew: every slot is empty, what the model says of itself is true of the new layout, and the text is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cllm.backend import Embeds, KvLayout, LaysOut, ModelSpec, StepModel
from cllm.testing.contract.hand import Hand, Near, Outputs, PlainTokens, refused

N_SLOTS = 2
N_TOKENS = 30


@pytest.fixture
def lone(model: StepModel, load: Callable[[], StepModel]) -> StepModel:
    """A model of the test's own that can be laid out anew."""
    if not isinstance(model, LaysOut) or len(model.layouts) == 1:
        pytest.skip("this model's cells stay as they are")
    return load()


@pytest.fixture(params=[KvLayout.UNIFIED, KvLayout.STREAMS], ids=lambda layout: layout.value)
def target(request: pytest.FixtureRequest, lone: StepModel) -> KvLayout:
    """A layout that it can take, be it the one that it has."""
    assert isinstance(lone, LaysOut)
    if request.param not in lone.layouts:
        pytest.skip(f"this model's cells cannot be laid out as {request.param.value}")
    layout: KvLayout = request.param
    return layout


def lay_out(model: StepModel, layout: KvLayout, n_slots: int = N_SLOTS) -> Hand:
    """Lay the cells out; return a hand to feed the slots, which are empty now."""
    assert isinstance(model, LaysOut)
    model.lay_out(layout, n_slots)
    return Hand(model)


def says(model: StepModel) -> tuple[object, ...]:
    return model.capabilities, model.info, model.n_cells, model.n_cells_slot, model.n_slots, model.n_rows_max


def test_the_layout_in_force_is_one_of_those_that_it_can_take(model: StepModel) -> None:
    if not isinstance(model, LaysOut):
        pytest.skip("this model's cells stay as they are")
    assert model.capabilities.kv_layout in model.layouts
    assert KvLayout.AUTO not in model.layouts


def test_where_it_is_left_the_choice_of_layouts_it_begins_as_one_pool(model: StepModel, spec: ModelSpec) -> None:
    """The engine counts what it loses there, and lays the cells out anew when that is much."""
    if not isinstance(model, LaysOut) or not model.layouts >= {KvLayout.UNIFIED, KvLayout.STREAMS}:
        pytest.skip("this model's cells stay as they are")
    if spec.kv_layout is not KvLayout.AUTO:
        pytest.skip("a layout is asked for: --kv")
    assert model.capabilities.kv_layout is KvLayout.UNIFIED


def test_every_slot_is_empty_in_the_new_layout(lone: StepModel, target: KvLayout, plain: PlainTokens, near: Near) -> None:
    hand = Hand(lone)
    tokens = plain.draw(N_TOKENS)
    expected = hand.alone(tokens)
    for slot in range(min(N_SLOTS, lone.n_slots)):
        hand.put(slot, plain.draw(40, seed=slot + 1))
    hand = lay_out(lone, target)
    for slot in range(min(N_SLOTS, lone.n_slots)):
        near.check(hand.put(slot, tokens, Outputs.ALL), expected)
        hand.drop(slot)


def test_what_it_says_of_itself_is_true_of_the_new_layout(lone: StepModel, target: KvLayout) -> None:
    n_cells, n_rows_max = lone.n_cells, lone.n_rows_max
    lay_out(lone, target)
    assert lone.capabilities.kv_layout is target
    assert lone.n_rows_max == n_rows_max
    assert 0 < lone.n_cells <= n_cells
    assert lone.n_slots > 0
    if target is KvLayout.STREAMS:
        assert lone.n_slots <= N_SLOTS
        assert lone.n_cells_slot * lone.n_slots <= lone.n_cells
    else:
        assert lone.n_cells_slot == lone.n_cells


def test_every_cell_of_the_new_layout_can_be_filled(lone: StepModel, target: KvLayout, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(N_TOKENS)
    hand = lay_out(lone, target)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:-1])
    hand.fill(plain, n_free=0 if target is KvLayout.STREAMS else 1, first_slot=1)
    near.check(hand.put(0, tokens[-1:]), expected[-1:])


def test_more_slots_than_there_are_cells_are_fewer(lone: StepModel, target: KvLayout, plain: PlainTokens) -> None:
    hand = lay_out(lone, target, n_slots=1_000_000)
    assert 0 < lone.n_slots <= lone.n_cells
    assert lone.n_cells_slot > 0
    hand.put(lone.n_slots - 1, plain.draw(1))


def test_a_state_fits_where_the_fingerprint_is_what_it_was_and_is_refused_elsewhere(
    lone: StepModel, target: KvLayout, plain: PlainTokens, near: Near
) -> None:
    if not lone.capabilities.can_save:
        pytest.skip("this memory cannot be saved")
    tokens, mark, before = plain.draw(N_TOKENS), lone.info.fingerprint, lone.capabilities.kv_layout
    hand = Hand(lone)
    hand.put(0, tokens[:-1])
    state = lone.save(0)
    expected = hand.put(0, tokens[-1:])
    hand = lay_out(lone, target)
    if target is before:
        assert lone.info.fingerprint == mark
        hand.restore(1, state, tokens[:-1])
        near.check(hand.put(1, tokens[-1:]), expected)
    elif getattr(lone, "carries_states", False):
        assert lone.info.fingerprint == mark
        hand.restore(1, state, tokens[:-1])
        near.check(hand.put(1, tokens[-1:]), expected)
        lay_out(lone, before).restore(0, state, tokens[:-1])
    else:
        assert lone.info.fingerprint != mark or not mark
        with refused():
            lone.restore(1, state)
        near.check(hand.put(1, tokens), expected)


def test_states_go_from_layout_to_layout_where_it_carries_them_and_a_part_is_refused_where_none_are_restored(
    lone: StepModel, target: KvLayout, plain: PlainTokens, near: Near
) -> None:
    if not lone.capabilities.can_save or not getattr(lone, "carries_states", False):
        pytest.skip("this model's states fit the layout alone in which they were saved")
    texts = [plain.draw(n, seed=n) for n in (N_TOKENS, 2 * N_TOKENS)]
    hand = Hand(lone)
    expected = [hand.alone(text)[-1:] for text in texts]
    for slot, text in enumerate(texts):
        hand.put(slot, text[:-1])
    part = lone.save(1, N_TOKENS) if lone.capabilities.can_save_part else None
    for layout in (target, lone.capabilities.kv_layout, target):
        states = [lone.save(slot) for slot in range(2)]
        hand = lay_out(lone, layout)
        for slot, (state, text) in enumerate(zip(states, texts, strict=True)):
            hand.restore(1 - slot, state, text[:-1])
        texts.reverse()
        expected.reverse()
    if part is not None and not lone.capabilities.can_save_part:
        with refused():
            lone.restore(texts.index(max(texts, key=len)), part)
    for slot, text in enumerate(texts):
        near.check(hand.put(slot, text[-1:]), expected[slot])


def test_there_and_back_again_it_is_what_it_was(lone: StepModel, target: KvLayout, plain: PlainTokens, near: Near) -> None:
    hand = Hand(lone)
    tokens, before, said = plain.draw(N_TOKENS), lone.capabilities.kv_layout, says(lone)
    expected = hand.alone(tokens)
    for _ in range(3):
        near.check(lay_out(lone, target).alone(tokens), expected)
        near.check(lay_out(lone, before, lone.n_slots).alone(tokens), expected)
    assert says(lone) == said


def test_a_layout_that_it_cannot_take_is_refused_and_changes_nothing(lone: StepModel, plain: PlainTokens, near: Near) -> None:
    hand, tokens, said = Hand(lone), plain.draw(N_TOKENS), says(lone)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:10])
    with refused():
        lay_out(lone, KvLayout.AUTO)
    assert says(lone) == said
    near.check(hand.put(0, tokens[10:], Outputs.ALL), expected[10:])


def test_an_abort_counts_in_the_new_layout_too_or_comes_too_late(lone: StepModel, target: KvLayout, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(N_TOKENS)
    hand = lay_out(lone, target)
    expected = hand.alone(tokens)
    lone.abort()
    near.check(hand.alone(tokens), expected)


def test_what_gives_vectors_beside_it_is_not_disturbed(lone: StepModel, target: KvLayout, spec: ModelSpec, plain: PlainTokens) -> None:
    if not isinstance(lone, Embeds):
        pytest.skip("this model gives no vectors")
    embedder = lone.make_embedder(spec)
    hand = Hand(lone)
    batch = hand.write(hand.rows(0, plain.draw(5)))
    before = embedder.step(batch).copy()
    embedder.drop(0)
    lay_out(lone, target).put(0, plain.draw(9))
    assert embedder.step(batch) == pytest.approx(before, abs=1e-4)
    embedder.close()
