"""Cells that are laid out anew: which models take it, what the parts are, and what is left when it fails."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from cllm.backend import KvLayout, LaysOut, Lora, ModelSpec
from cllm.errors import LoadFailed, ModelDied, NoRoom
from cllm.testing.tiny import make_tiny_lora
from cllm_llamacpp import settings

UNIFIED, STREAMS = KvLayout.UNIFIED, KvLayout.STREAMS


@pytest.mark.parametrize(
    ("architecture", "asked_for", "layouts"),
    [
        ("qwen3", KvLayout.AUTO, {UNIFIED, STREAMS}),
        ("qwen3moe", KvLayout.AUTO, {UNIFIED, STREAMS}),
        ("qwen3", UNIFIED, {UNIFIED}),
        ("qwen3", STREAMS, {STREAMS}),
        ("qwen35", KvLayout.AUTO, {UNIFIED}),
        ("gemma3", KvLayout.AUTO, {UNIFIED}),
    ],
)
def test_plain_attention_takes_either_layout_where_nobody_has_chosen(load, architecture, asked_for, layouts):
    model = load(architecture, kv_layout=asked_for, n_live=2)

    assert isinstance(model, LaysOut)
    assert model.layouts == layouts


def test_on_a_gpu_the_layout_stays(load):
    assert settings.layouts_of(ModelSpec(path=""), load()._facts, gpu=True) == {UNIFIED}


def test_who_computes_something_else_in_a_pool_is_laid_apart_unless_a_pool_is_asked_for(load):
    facts = attrs.evolve(load()._facts, needs_parts=True)
    spec = settings.with_layout(ModelSpec(path=""), facts)
    assert settings.layouts_of(spec, facts, gpu=False) == {STREAMS}
    assert settings.with_layout(ModelSpec(path="", kv_layout=UNIFIED), facts).kv_layout is UNIFIED
    assert settings.with_layout(ModelSpec(path=""), load()._facts).kv_layout is KvLayout.AUTO


@pytest.mark.parametrize(
    ("n_cells", "n_asked", "n_slots", "n_cells_slot"),
    [
        (2048, 4, 4, 512),
        (2048, 3, 3, 512),  # llama.cpp would make it 768
        (2048, 7, 7, 256),
        (2048, 8, 8, 256),
        (2048, 9, 8, 256),
        (1024, 1, 1, 1024),
        (1000, 5, 4, 256),
    ],
)
def test_parts_are_rounded_down_so_that_there_are_never_more_cells(load, n_cells, n_asked, n_slots, n_cells_slot):
    model = load(n_cells=n_cells)
    bytes_at_load = model.info.cells_bytes
    model.lay_out(STREAMS, n_asked)

    assert (model.n_slots, model.n_cells_slot, model.n_cells) == (n_slots, n_cells_slot, n_slots * n_cells_slot)
    assert model.info.cells_bytes <= bytes_at_load


def test_parts_do_not_shrink_from_one_layout_to_the_next(load):
    model = load(n_cells=2048)
    for n_slots in (7, 3, 7, 2):
        model.lay_out(STREAMS, n_slots)
    assert (model.n_slots, model.n_cells) == (2, 2048)
    model.lay_out(UNIFIED, 5)
    assert (model.n_slots, model.n_cells, model.n_cells_slot) == (255, 2048, 2048)


@pytest.mark.parametrize("asked_for", [KvLayout.AUTO, UNIFIED])
def test_a_state_fits_the_same_layout_however_it_came_about(load, drive, some_tokens, asked_for):
    model, other = load(), load(kv_layout=asked_for)
    drive(model).feed({0: some_tokens(9, 40)})
    state = model.save(0)
    expected = drive_on(drive, model, some_tokens(9, 40))
    if asked_for is KvLayout.AUTO:
        other.lay_out(STREAMS, 2)
        other.lay_out(UNIFIED, 2)
    other.restore(0, state)

    assert drive_on(drive, other, some_tokens(9, 40)) == expected


def drive_on(drive, model, tokens):
    driver = drive(model)
    driver.adopt(0, tokens)
    return driver.greedy({0: [3]}, 12)[0]


def test_more_rows_than_the_new_layout_has_cells_find_no_room(load, drive, some_tokens):
    model = load(n_cells=1024)
    assert model.n_rows_max == 1024
    model.lay_out(STREAMS, 3)
    driver = drive(model)
    tokens = some_tokens(1, 1024)

    with pytest.raises(NoRoom):
        driver.feed({slot: tokens[slot * 256 : slot * 256 + (512 if slot == 2 else 256)] for slot in range(3)})

    assert driver.feed(dict.fromkeys(range(3), tokens[:256])).shape[0] == 3


def test_adapters_stay_active(load, drive, some_tokens, tmp_path):
    make_tiny_lora(tmp_path / "lora.gguf", seed=1)
    model = load(loras=(Lora(str(tmp_path / "lora.gguf")),))
    expected = drive(model).feed({0: some_tokens(1, 10)})
    assert np.abs(drive(load()).feed({0: some_tokens(1, 10)}) - expected).max() > 0.01

    for layout in (STREAMS, UNIFIED):
        model.lay_out(layout, 2)
        np.testing.assert_allclose(drive(model).feed({0: some_tokens(1, 10)}), expected, atol=1e-3)


# --- without memory ---------------------------------------------------------------------------------------------------


@pytest.fixture
def without_memory(monkeypatch):
    """Let llama.cpp make no context, for the next so many times."""

    def fail(model, n_times):
        real, left = model._lib.llama_init_from_model, [None] * n_times

        def make(*arguments):
            return left.pop() if left else real(*arguments)

        monkeypatch.setattr(model._lib, "llama_init_from_model", make)

    return fail


@pytest.mark.parametrize("before", [UNIFIED, STREAMS])
def test_without_memory_the_layout_is_as_it_was_and_empty(load, drive, some_tokens, without_memory, before):
    model = load(n_cells=2048)
    model.lay_out(before, 3)
    said = (model.info, model.capabilities, model.n_cells, model.n_cells_slot, model.n_slots)
    expected = drive(model).greedy({1: some_tokens(9, 40)}, 8)
    without_memory(model, 1)

    with pytest.raises(LoadFailed, match="no memory for 2048 cells"):
        model.lay_out(STREAMS if before is UNIFIED else UNIFIED, 4)

    assert (model.info, model.capabilities, model.n_cells, model.n_cells_slot, model.n_slots) == said
    assert drive(model).greedy({1: some_tokens(9, 40)}, 8) == expected
    model.lay_out(STREAMS, 4)
    assert model.n_slots == 4


def test_when_not_even_that_can_be_had_again_the_model_is_dead(load, drive, without_memory):
    model = load()
    without_memory(model, 2)

    with pytest.raises(ModelDied, match="no memory"):
        model.lay_out(STREAMS, 4)

    for call in (lambda: drive(model).feed({0: [1]}), lambda: model.drop(0), lambda: model.save(0), lambda: model.lay_out(UNIFIED, 1)):
        with pytest.raises(ModelDied, match="no memory"):
            call()
    model.abort()
    model.close()
    model.close()


def test_the_old_cells_are_free_before_there_are_new_ones(load, monkeypatch):
    model, calls = load(), []

    def watched(name):
        real = getattr(model._lib, name)
        return lambda *arguments: calls.append(name) or real(*arguments)

    for name in ("llama_free", "llama_init_from_model"):
        monkeypatch.setattr(model._lib, name, watched(name))

    model.lay_out(STREAMS, 4)
    assert calls == ["llama_free", "llama_init_from_model"]
    model.close()
    assert calls == ["llama_free", "llama_init_from_model", "llama_free"]
