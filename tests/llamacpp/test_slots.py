"""Moving slots' cells: whatever way a slot came to its content, it goes on as if it had been computed there."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from cllm.backend import KvLayout
from cllm.errors import NoRoom, StepFailed
from cllm.testing.tiny import ARCHITECTURES

KEEPS_ALL = ["qwen3", "qwen3moe"]
FORGETS = ["qwen35", "gemma3"]


@pytest.fixture
def continued(load, drive, some_tokens):
    """Return what follows `n` tokens of a known prompt, computed from nothing, for the settings given."""

    def compute(architecture, n, **settings):
        return drive(load(architecture, **settings)).greedy({0: some_tokens(9, n)}, 12)[0]

    return compute


@pytest.mark.parametrize("architecture", KEEPS_ALL)
@pytest.mark.parametrize("n_shared", [1, 37, 60])
def test_a_shared_prefix_goes_on_as_if_computed(load, drive, some_tokens, continued, architecture, n_shared):
    prompt = some_tokens(9, 61)
    model = load(architecture)
    driver = drive(model)
    driver.feed({3: prompt[:60]})

    model.share(3, 200, n_shared)
    driver.adopt(200, prompt[:n_shared])

    assert driver.greedy({200: prompt[n_shared:]}, 12)[200] == continued(architecture, 61)


def test_sharing_takes_no_cells(load, drive, some_tokens):
    model = load(n_cells=256)
    driver = drive(model)
    driver.feed({0: some_tokens(1, 200)})
    for slot in range(1, 50):
        model.share(0, slot, 200)
        driver.adopt(slot, some_tokens(1, 200))

    logits = driver.feed({slot: [5] for slot in range(50)})

    np.testing.assert_allclose(logits, np.tile(logits[0], (50, 1)), atol=1e-3)


def test_the_source_of_a_share_may_go_first(load, drive, some_tokens, continued):
    model = load()
    driver = drive(model)
    driver.feed({0: some_tokens(9, 40)})
    model.share(0, 1, 40)
    driver.adopt(1, some_tokens(9, 40))
    driver.drop(0)
    driver.feed({2: some_tokens(5, 300)})  # would overwrite cells that were free

    assert driver.greedy({1: some_tokens(9, 60)[40:]}, 12)[1] == continued("qwen3", 60)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_whole_slot_can_be_shared_by_every_memory(load, drive, some_tokens, layout, architecture):
    model = load(architecture, kv_layout=layout, n_live=4)
    driver = drive(model)
    prompt = some_tokens(9, 50)
    driver.feed({2: prompt})

    model.share(2, 1, 50)
    driver.adopt(1, prompt)

    one, other = driver.greedy({2: [3], 1: [3]}, 12).values()
    assert one == other


@pytest.mark.parametrize("architecture", ["qwen35", "gemma3"])
def test_a_share_and_its_source_go_apart_without_disturbing_each_other(load, drive, some_tokens, layout, architecture):
    settings = {"kv_layout": layout, "n_live": 4}
    alone = drive(load(architecture, **settings))
    expected = {}
    for slot, first in ((2, 3), (1, 4)):
        expected[slot] = alone.greedy({0: [*some_tokens(9, 50), first]}, 30)[0]
        alone.drop(0)
    model = load(architecture, **settings)
    driver = drive(model)
    driver.feed({2: some_tokens(9, 50)})
    model.share(2, 1, 50)
    driver.adopt(1, some_tokens(9, 50))

    assert driver.greedy({2: [3], 1: [4]}, 30) == expected


@pytest.mark.parametrize("architecture", FORGETS)
def test_memory_that_forgets_shares_no_prefix_and_trims_nothing(load, drive, some_tokens, architecture):
    model = load(architecture, n_live=4)
    drive(model).feed({0: some_tokens(9, 50)})

    assert not model.capabilities.can_share
    assert not model.capabilities.can_trim
    with pytest.raises(StepFailed, match="whole slots"):
        model.share(0, 1, 20)
    with pytest.raises(StepFailed, match="dropped"):
        model.trim(0, 20)
    model.trim(0, 50)  # nothing to do


def test_a_part_of_a_stream_is_not_shared(load, drive, some_tokens):
    # llama.cpp would end the process.
    model = load(kv_layout=KvLayout.STREAMS, n_live=4)
    drive(model).feed({0: some_tokens(9, 50)})

    assert not model.capabilities.can_share
    with pytest.raises(StepFailed, match="whole slots"):
        model.share(0, 1, 20)


@pytest.mark.parametrize("architecture", KEEPS_ALL)
@pytest.mark.parametrize("n_keep", [0, 1, 37, 60, 1000])
def test_a_trimmed_slot_goes_on_as_if_computed(load, drive, some_tokens, continued, layout, architecture, n_keep):
    model = load(architecture, kv_layout=layout, n_live=4)
    driver = drive(model)
    driver.feed({1: some_tokens(9, 60)[:40] + some_tokens(5, 60)})
    model.trim(1, min(n_keep, 40))
    model.trim(1, n_keep)
    driver.adopt(1, some_tokens(9, 60)[: min(n_keep, 40)])

    assert driver.greedy({1: some_tokens(9, 60)[min(n_keep, 40) :]}, 12)[1] == continued(architecture, 60)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_dropped_slot_is_as_new(load, drive, some_tokens, continued, layout, architecture):
    driver = drive(load(architecture, kv_layout=layout, n_live=4))
    for round_ in range(3):
        driver.feed({slot: some_tokens(round_ + slot, 60) for slot in range(4)})
        for slot in (2, 0, 3, 1):
            driver.drop(slot)
    driver.drop(1)

    assert driver.greedy({1: some_tokens(9, 60)}, 12)[1] == continued(architecture, 60)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_saved_slot_goes_on_anywhere_as_if_computed(load, drive, some_tokens, continued, layout, architecture):
    model = load(architecture, kv_layout=layout, n_live=4)
    driver = drive(model)
    driver.feed({1: some_tokens(9, 45)})
    state = model.save(1)
    driver.drop(1)
    driver.feed({slot: some_tokens(slot, 60) for slot in (0, 1)})

    model.restore(3, state)
    driver.adopt(3, some_tokens(9, 45))

    assert driver.greedy({3: some_tokens(9, 60)[45:]}, 12)[3] == continued(architecture, 60)


def test_a_shared_slot_is_saved_with_what_it_shares(load, drive, some_tokens, continued):
    model = load()
    driver = drive(model)
    driver.feed({0: some_tokens(9, 45)})
    model.share(0, 1, 30)
    state = model.save(1)
    driver.drop(0)
    model.drop(1)

    model.restore(2, state)
    driver.adopt(2, some_tokens(9, 30))

    assert driver.greedy({2: some_tokens(9, 60)[30:]}, 12)[2] == continued("qwen3", 60)


def test_what_follows_a_shared_prefix_is_saved_without_it(load, drive, some_tokens, continued):
    model = load()
    driver = drive(model)
    driver.feed({0: some_tokens(9, 60)[:30]})
    model.share(0, 1, 30)
    driver.adopt(1, some_tokens(9, 60)[:30])
    driver.feed({1: some_tokens(9, 60)[30:45]})
    whole, part = model.save(1), model.save(1, 30)
    model.trim(1, 30)
    driver.feed({slot: some_tokens(slot, 60) for slot in (2, 3)})

    model.restore(1, part)
    driver.adopt(1, some_tokens(9, 60)[:45])

    assert 2.5 * len(part) < len(whole)
    assert driver.greedy({1: some_tokens(9, 60)[45:]}, 12)[1] == continued("qwen3", 60)


@pytest.mark.parametrize("architecture", FORGETS)
def test_memory_that_forgets_is_saved_whole(load, drive, some_tokens, architecture):
    model = load(architecture, n_live=4)
    drive(model).feed({0: some_tokens(9, 50)})

    assert model.capabilities.can_save
    assert not model.capabilities.can_save_part
    with pytest.raises(StepFailed, match="whole slots"):
        model.save(0, 20)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_an_empty_slot_can_be_saved_and_restored(load, drive, some_tokens, layout, architecture):
    model = load(architecture, kv_layout=layout, n_live=4)

    model.restore(1, model.save(0))

    assert drive(model).feed({1: some_tokens(1, 3)}).shape[0] == 1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_restore_without_room_leaves_the_slot_empty(load, drive, some_tokens, layout, architecture):
    if layout is KvLayout.STREAMS:
        pytest.skip("every state fits an empty stream")
    model = load(architecture, kv_layout=layout, n_live=2, n_cells=512)
    driver = drive(model)
    driver.feed({0: some_tokens(9, 300)})
    state = model.save(0)

    with pytest.raises(NoRoom):
        model.restore(1, state)

    driver.feed({1: some_tokens(9, 200)})
    driver.drop(0)
    driver.drop(1)
    model.restore(1, state)


def test_a_state_of_another_model_or_none_at_all_is_refused(load, drive, some_tokens, layout):
    settings = {"kv_layout": layout, "n_live": 4}
    model, other = load("qwen3", **settings), load("qwen3moe", **settings)
    for each in (model, other):
        drive(each).feed({0: some_tokens(9, 30)})
    state = model.save(0)

    for wrong in (b"", b"cLs2", state[:-1], state + b"x", b"\0" * len(state), other.save(0)):
        with pytest.raises(StepFailed):
            model.restore(1, wrong)
    model.restore(1, state)


def test_a_state_with_flipped_bits_harms_no_other_slot(load, drive, some_tokens):
    model = load()
    driver = drive(model)
    driver.feed({0: some_tokens(9, 30)})
    state = model.save(0)
    expected = driver.feed({0: [1]})
    model.trim(0, 30)
    driver.adopt(0, some_tokens(9, 30))
    header = 24
    for at in range(header, header + 40, 3):
        broken = state[:at] + bytes([state[at] ^ 0x55]) + state[at + 1 :]
        with contextlib.suppress(StepFailed, NoRoom):
            model.restore(1, broken)
        model.drop(1)

    np.testing.assert_allclose(driver.feed({0: [1]}), expected, atol=1e-3)


@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.share(0, 0, 5),
        lambda m: m.share(0, 1, 5),
        lambda m: m.share(0, 2, 31),
        lambda m: m.share(0, 2, -1),
        lambda m: m.share(0, 255, 5),
        lambda m: m.share(-1, 2, 5),
        lambda m: m.trim(0, -1),
        lambda m: m.trim(255, 1),
        lambda m: m.drop(-1),
        lambda m: m.save(255),
        lambda m: m.save(0, 31),
        lambda m: m.save(0, -1),
        lambda m: m.restore(0, b""),
    ],
)
def test_a_move_that_makes_no_sense_is_refused_and_changes_nothing(load, drive, some_tokens, move):
    model = load()
    driver = drive(model)
    driver.feed({0: some_tokens(0, 30), 1: some_tokens(1, 30)})

    with pytest.raises(StepFailed):
        move(model)

    assert driver.feed({0: [1], 1: [1]}).shape[0] == 2
