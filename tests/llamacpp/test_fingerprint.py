"""Fingerprints: equal where one process's states fit another's, different where they do not."""

from __future__ import annotations

import shutil

import attrs
import pytest

from cllm.backend import KvLayout, Lora, ModelSpec
from cllm_llamacpp.fingerprint import fingerprint, mark_of_files

FACTS_OF_NO_WEIGHT = {"n_cells": 512, "n_rows_max": 64, "n_threads": 2}


def mark(load, architecture="qwen3", **settings):
    return load(architecture, **settings).info.fingerprint


def test_the_same_file_loaded_again_has_the_same_fingerprint_however_many_cells_there_are(load):
    assert mark(load) == mark(load, **FACTS_OF_NO_WEIGHT) != ""


def test_a_saved_state_fits_the_same_model_loaded_again(load, drive, some_tokens):
    model, again = load(), load(n_cells=2048)
    drive(model).feed({0: some_tokens(9, 40)})
    driver = drive(again)
    again.restore(7, model.save(0))
    driver.adopt(7, some_tokens(9, 40))

    assert driver.greedy({7: [3]}, 12)[7] == drive_on(model, drive, some_tokens(9, 40))


def drive_on(model, drive, tokens):
    driver = drive(model)
    driver.adopt(0, tokens)
    return driver.greedy({0: [3]}, 12)[0]


@pytest.mark.parametrize(
    "settings",
    [{"cache_type_k": "f16"}, {"cache_type_v": "f16"}, {"architecture": "gemma3", "kv_layout": KvLayout.STREAMS, "n_live": 4}],
    ids=lambda settings: " ".join(settings),
)
def test_what_changes_the_form_of_a_state_changes_the_fingerprint(load, settings):
    assert mark(load, settings.get("architecture", "qwen3")) != mark(load, **settings)


def test_plain_attentions_states_fit_in_either_layout(load):
    assert mark(load) == mark(load, kv_layout=KvLayout.STREAMS, n_live=4)


def test_states_of_models_with_two_caches_fit_the_layout_that_they_were_saved_in_and_no_other(tiny_files, load):
    facts = load()._facts
    specs = [ModelSpec(path=str(tiny_files["qwen3"]), kv_layout=layout) for layout in (KvLayout.UNIFIED, KvLayout.STREAMS)]
    for has_two, n_marks in ((False, 1), (True, 2)):
        own = attrs.evolve(facts, has_two_caches=has_two)
        marks = {fingerprint(mark_of_files(spec), spec, own, n_slots=4, n_cells_slot=512, gpu=False) for spec in specs}
        assert len(marks) == n_marks


def test_other_models_have_other_fingerprints(load):
    assert len({mark(load, architecture) for architecture in ("qwen3", "qwen3moe", "gemma3", "qwen35")}) == 4


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0], ids=["head", "middle", "end"])
def test_other_weights_under_the_same_name_are_another_model(tiny_files, load, tmp_path, place):
    model = load()
    copy = tmp_path / "qwen3.gguf"
    shutil.copy(tiny_files["qwen3"], copy)
    before = of_file(copy, model)
    content = bytearray(copy.read_bytes())
    at = min(int(len(content) * place), len(content) - 1)
    content[at : at + 200_000] = bytes(byte ^ 1 for byte in content[at : at + 200_000])
    copy.write_bytes(content)

    assert of_file(copy, model) != before


def of_file(path, model, **changes):
    spec = ModelSpec(path=str(path), **changes)
    return fingerprint(mark_of_files(spec), spec, model._facts, n_slots=4, n_cells_slot=512, gpu=False)


def test_all_parts_of_a_split_model_count(load, tmp_path):
    model = load()
    for i in (1, 2):
        (tmp_path / f"big-0000{i}-of-00002.gguf").write_bytes(bytes(1000))
    first = tmp_path / "big-00001-of-00002.gguf"
    before = of_file(first, model)
    (tmp_path / "big-00002-of-00002.gguf").write_bytes(b"1" * 1000)

    assert of_file(first, model) != before


def test_adapters_and_their_scales_count(load, tmp_path):
    model, path = load(), tmp_path / "model.gguf"
    path.write_bytes(b"model")
    (tmp_path / "lora").write_bytes(b"lora")
    marks = {of_file(path, model, loras=loras) for loras in ((), (Lora(str(tmp_path / "lora")),), (Lora(str(tmp_path / "lora"), 0.5),))}

    assert len(marks) == 3
