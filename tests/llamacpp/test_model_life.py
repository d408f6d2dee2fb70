"""Loading a model, what it says of itself, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs
import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from cllm.backend import Backend, Batch, FlashAttention, KvLayout, Lora, ModelSpec, StepModel
from cllm.errors import LoadAborted, LoadFailed, ModelDied
from cllm.serve.worker.model import WorkerBackend
from cllm.testing import tiny
from cllm.testing.tiny import ARCHITECTURES, N_CTX_TRAIN
from cllm_llamacpp import facts, make_cpu_backend, settings
from cllm_llamacpp.context import Contexts
from cllm_llamacpp.header import numbers_in
from cllm_llamacpp.library import LOG, open_library


def go_on(_share: float) -> bool:
    return True


def fails(path, **settings) -> str:
    with pytest.raises(LoadFailed) as failure:
        make_cpu_backend().load(ModelSpec(path=str(path), **settings), go_on)
    line = str(failure.value)
    assert "\n" not in line
    return line


def test_a_model_that_gives_no_numbers_is_not_loaded(tiny_files, tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(tiny_files["qwen3"].read_bytes())
    (norm,) = [tensor for tensor in GGUFReader(path).tensors if tensor.name == "output_norm.weight"]
    with path.open("r+b") as file:
        file.seek(norm.data_offset)
        file.write(np.full(norm.n_elements, np.nan, np.float32).tobytes())
    assert fails(path).endswith("its logits are not numbers: the file is damaged, or was converted badly")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_says_what_it_is(load, architecture):
    model = load(architecture)
    info = model.info

    assert info.name == f"tiny {architecture}"
    assert info.architecture == architecture
    assert info.n_ctx_train == N_CTX_TRAIN
    assert info.n_embd == 64
    assert info.n_params > 50_000
    assert info.size_bytes == 4 * info.n_params
    assert info.quantization
    assert info.metadata["tokenizer.ggml.pre"] == "qwen2"
    assert all(isinstance(value, str) and len(value) < 100_000 for value in info.metadata.values())


def test_backend_and_model_have_the_shape_of_the_seam(load):
    assert isinstance(make_cpu_backend(), Backend)
    model: StepModel = load()
    assert model.n_rows_max == 1024  # no more than there are cells
    assert load(n_rows_max=64).n_rows_max == 64


def test_cells_are_those_that_llama_cpp_made(load):
    assert load(n_cells=1000).n_cells == 1024
    streams = load(n_cells=1000, kv_layout=KvLayout.STREAMS, n_live=2)
    assert (streams.n_cells, streams.n_cells_slot, streams.n_slots) == (1024, 512, 2)
    pool = load(n_cells=1000)
    assert pool.n_cells_slot == pool.n_cells


def test_cells_are_eight_contexts_by_default_where_memory_allows(load):
    assert load(n_cells=None).n_cells == 8 * N_CTX_TRAIN


def test_cells_take_a_quarter_of_the_free_memory_at_most(load, monkeypatch):
    from cllm import machine

    bytes_per_cell = 4 * 2 * (16 + 16) * 4  # layers, heads, key and value, f32
    size_bytes = load().info.size_bytes
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 4 * 3000 * bytes_per_cell + size_bytes)
    assert load(n_cells=None).n_cells == 3072
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 0)
    assert load(n_cells=None).n_cells == 512


def test_cells_for_which_the_machine_has_no_memory_are_refused_before_they_are_made(load, monkeypatch):
    from cllm import machine

    bytes_per_cell = 4 * 2 * (16 + 16) * 4  # layers, heads, key and value, f32
    monkeypatch.setattr(machine, "memory_bytes", lambda: 1000 * bytes_per_cell)
    assert load(n_cells=1000).n_cells >= 1000
    with pytest.raises(LoadFailed, match=r"^1001 cells of .* take 0 GiB, and this machine has 0: ask for fewer"):
        load(n_cells=1001)


@pytest.mark.parametrize(
    ("asked", "grown_bytes", "mapped_bytes"),
    [({}, 1000, 1000), ({}, 1 << 40, None), ({}, -5, 0), ({"mmap": False}, 1000, 0), ({"mlock": True}, 1000, 0)],
)
def test_weights_are_told_as_mapped_where_they_are_pages_of_their_file(load, monkeypatch, asked, grown_bytes, mapped_bytes):
    from cllm import machine

    told = iter([5000, 5000 + grown_bytes])
    monkeypatch.setattr(machine, "mapped_file_bytes", lambda: next(told, 0))
    info = load(**asked).info
    assert info.mapped_bytes == (info.size_bytes if mapped_bytes is None else mapped_bytes)


def test_a_file_is_mapped_where_llama_cpp_itself_would_unless_somebody_says_otherwise():
    lib = open_library()

    def load_mode(**asked):
        return settings.model_params(lib, ModelSpec(path="", **asked), n_gpu_layers=0).load_mode

    assert load_mode() == lib.llama_model_default_params().load_mode
    assert [load_mode(mmap=mmap, mlock=mlock) for mmap, mlock in ((False, False), (False, True), (True, True))] == [0, 2, 3]


def test_layers_without_attention_take_no_room_for_tokens(load, monkeypatch):
    from cllm import machine

    model = load("qwen35")
    bytes_per_cell = 2 * 2 * (16 + 16) * 4  # every other layer of four, heads, key and value, f32
    assert model.info.cells_bytes - model.info.fixed_bytes == model.n_cells * bytes_per_cell
    monkeypatch.setattr(machine, "free_memory_bytes", lambda: 4 * 3000 * bytes_per_cell + model.info.size_bytes)
    assert load("qwen35", n_cells=None).n_cells == 3072


def test_states_and_windows_count_as_memory_that_does_not_grow_with_cells(load):
    for architecture in ("qwen35", "gemma3"):
        few = load(architecture, n_cells=8192, n_live=2).info
        many = load(architecture, n_cells=8192, n_live=64).info
        long = load(architecture, n_cells=16384, n_live=2).info
        assert 0 < few.fixed_bytes < many.fixed_bytes
        assert long.fixed_bytes == few.fixed_bytes
        grown = [info.cells_bytes - info.fixed_bytes for info in (few, many, long)]
        assert grown == [grown[0], grown[0], 2 * grown[0]]
        assert grown[0] == 8192 * 2 * 2 * (16 + 16) * 4  # every other layer of four, heads, key and value, f32
    assert load("qwen3").info.fixed_bytes == 0


def test_where_llama_cpp_says_nothing_of_its_memory_cells_are_counted(load, monkeypatch):
    expected = load().info.cells_bytes
    monkeypatch.setattr("cllm_llamacpp.logs.LogSink.last_caches", lambda _sink: ())
    assert load().info.cells_bytes == expected == 1024 * 4 * 2 * (16 + 16) * 4  # layers, heads, key and value, f32


@pytest.mark.parametrize(
    ("is_recurrent", "n_first", "interval", "expected"),
    [(True, 0, 1, 0), (False, 8, 1, 8 * 16), (False, 2, 4, 2 * 4), (False, 0, 1, 32 * 16), (False, 2, 40, 2)],
)
def test_heads_of_keys_are_counted_where_layers_have_any(is_recurrent, n_first, interval, expected):
    lib = SimpleNamespace(
        llama_model_is_recurrent=lambda _: is_recurrent,
        llama_model_n_layer=lambda _: 16,
        llama_model_n_head_kv=lambda _: n_first,
        llama_model_n_head=lambda _: 32,
    )
    assert facts._n_heads_kv(lib, None, interval) == expected
    assert facts._n_heads_kv(lib, None, interval, [0, 0, 8, 0]) == (0 if is_recurrent else 8)


def test_lists_of_a_file_are_read_where_llama_cpp_keeps_none(tmp_path):
    writer = GGUFWriter(path := tmp_path / "model.gguf", "granitehybrid")
    writer.add_name("a name")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    writer.add_array("granitehybrid.scales", [0.5, 1.5])
    writer.add_head_count_kv([0, 8, 0, 4])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert numbers_in(str(path), "granitehybrid.attention.head_count_kv") == [0, 8, 0, 4]
    assert numbers_in(str(path), "granitehybrid.scales") == numbers_in(str(path), "general.name") == numbers_in(str(path), "x") == []
    whole = path.read_bytes()
    for cut in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:cut])
        assert numbers_in(str(path), "granitehybrid.attention.head_count_kv") == []
    path.write_bytes(whole[:24] + b"\xff" * 64)
    assert numbers_in(str(path), "granitehybrid.attention.head_count_kv") == numbers_in(str(tmp_path / "none"), "x") == []


@pytest.mark.parametrize(
    ("architecture", "more", "n_head_v"),
    [("qwen3", {}, 0), ("glm-dsa", {}, 16), ("glm5-next", {}, 16), ("qwen3", {"attention.indexer.key_length": "128"}, 16)],
)
def test_latent_attention_keeps_no_values(load, monkeypatch, architecture, more, n_head_v):
    model = load("qwen3")
    told = (
        dict.fromkeys((f"attention.{name}" for name in ("key_length", "value_length", "key_length_mla", "value_length_mla")), "16") | more
    )
    named = {f"{architecture}.{name}": value for name, value in told.items()}
    monkeypatch.setattr(facts, "metadata_of", lambda _lib, _model: {"general.architecture": architecture, **named})
    found = facts.facts_of(model._lib, model._native.model, "model.gguf")
    assert (found.n_head_k, found.n_head_v) == (16, n_head_v)


def test_a_memory_of_states_alone_has_room_for_eight_contexts_whatever_is_free(load):
    model = load("qwen35")
    recurrent = attrs.evolve(model._facts, n_heads_kv=0)
    assert settings.n_cells(ModelSpec(path=""), recurrent, free_bytes=0) == 8 * N_CTX_TRAIN


def test_states_of_two_caches_are_not_carried_into_another_layout(load, monkeypatch):
    assert load("qwen3").carries_states
    monkeypatch.setattr(facts, "_WITH_INDEXERS", frozenset({"qwen3"}))
    assert not load("qwen3").carries_states


@pytest.mark.parametrize(
    "sizes", [{"n_cells": 300}, {"n_cells": 512, "kv_layout": KvLayout.STREAMS, "n_live": 4}], ids=["a pool", "parts that were rounded up"]
)
def test_another_process_of_the_same_model_has_the_same_sizes(tiny_files, sizes):
    backend = WorkerBackend(make_cpu_backend(), "cllm_llamacpp:make_cpu_backend", hang_s=60.0)
    model = backend.load(ModelSpec(path=str(tiny_files["qwen3"]), n_threads=1, **sizes), lambda _share: True)
    try:
        n_rows_max = model.n_rows_max
        os.kill(model.life.pid, signal.SIGKILL)
        model.life.revive()
        batch = Batch(n_rows_max)
        batch.n_rows = batch.n_outputs = 1
        batch.slots[0], batch.positions[0], batch.tokens[0], batch.outputs[0] = 0, 0, 1, True
        assert model.step(batch).shape[0] == 1
    finally:
        model.close()


@pytest.mark.parametrize(
    ("architecture", "settings", "n_slots"),
    [
        ("qwen3", {}, 255),
        ("qwen3", {"n_live": 5}, 255),
        ("qwen3moe", {}, 255),
        ("qwen35", {}, 16),
        ("qwen35", {"n_live": 5}, 5),
        ("gemma3", {}, 16),
        ("gemma3", {"n_live": 5}, 5),
        ("qwen3", {"kv_layout": KvLayout.STREAMS, "n_cells": 2048}, 8),
        ("qwen3", {"kv_layout": KvLayout.STREAMS, "n_live": 3}, 3),
        ("qwen35", {"kv_layout": KvLayout.STREAMS, "n_live": 3}, 3),
    ],
)
def test_slots_are_many_where_they_cost_nothing(load, architecture, settings, n_slots):
    assert load(architecture, **settings).n_slots == n_slots


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"])
def test_every_cache_type_computes_where_heads_are_long_enough(load, drive, name):
    flash = FlashAttention.OFF if name in ("f32", "f16", "bf16") else FlashAttention.AUTO
    if flash is FlashAttention.OFF:
        assert drive(load(cache_type_k=name, cache_type_v=name)).feed({0: [1, 2, 3]}).shape[0] == 1
    else:  # the tiny heads of 16 are no whole block of 32
        with pytest.raises(LoadFailed, match="block size 32"):
            load(cache_type_k=name, cache_type_v=name, flash_attention=flash)


def test_a_quantised_v_cache_without_flash_attention_names_both_flags(tiny_files):
    line = fails(tiny_files["qwen3"], cache_type_v="q8_0", flash_attention=FlashAttention.OFF)

    assert "--cache-type-v" in line
    assert "--flash-attn" in line


def test_an_unknown_cache_type_lists_the_known_ones(tiny_files):
    assert "q8_0" in fails(tiny_files["qwen3"], cache_type_k="int3")


# --- loads that do not come to an end ---


def test_a_load_reports_its_progress(tiny_files):
    shares: list[float] = []

    make_cpu_backend().load(ModelSpec(path=str(tiny_files["qwen3"])), lambda share: shares.append(share) or True).close()

    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_load_can_be_stopped(tiny_files):
    with pytest.raises(LoadAborted):
        make_cpu_backend().load(ModelSpec(path=str(tiny_files["qwen3"])), lambda _share: False)


def test_what_on_progress_raises_comes_out_of_the_load(tiny_files):
    def on_progress(_share: float) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        make_cpu_backend().load(ModelSpec(path=str(tiny_files["qwen3"])), on_progress)


def test_a_missing_file_is_named(tmp_path):
    assert "gone.gguf: no such file" in fails(tmp_path / "gone.gguf")
    assert "a folder, not a file; a GGUF file is wanted" in fails(tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"hello, I am not a model", b"\0" * 1000])
def test_a_file_that_is_no_model_is_refused(tmp_path, content):
    (tmp_path / "odd.gguf").write_bytes(content)

    assert fails(tmp_path / "odd.gguf").startswith(str(tmp_path / "odd.gguf"))


def test_a_truncated_file_is_refused_and_does_not_crash(tmp_path, tiny_files):
    whole = tiny_files["qwen3"].read_bytes()
    for share in (0.001, 0.01, 0.02, 0.05, 0.3, 0.9, 0.9999):
        (tmp_path / "cut.gguf").write_bytes(whole[: int(len(whole) * share)])
        fails(tmp_path / "cut.gguf")


FLIP = """
import random, sys
from cllm.backend import ModelSpec
from cllm.errors import BackendError
from cllm_llamacpp import make_cpu_backend

source, target, seed = sys.argv[1:]
whole, chance = open(source, "rb").read(), random.Random(int(seed))
for _ in range(15):
    broken = bytearray(whole)
    for _ in range(4):
        broken[chance.randrange(16_000)] ^= 1 << chance.randrange(8)  # the metadata and the tensors' descriptions
    open(target, "wb").write(broken)
    try:
        make_cpu_backend().load(ModelSpec(path=target, n_cells=256), lambda share: True).close()
    except BackendError as error:
        assert "\\n" not in str(error)
print("survived")
"""


def test_a_file_with_flipped_bits_is_refused_or_loads(tmp_path, tiny_files):
    """In a process of its own: llama.cpp may well stop the process for a file that lies about itself.

    What is promised is that ours are not the lines that crash; that a hostile file can end the process is why models may be isolated.
    """
    arguments = [sys.executable, "-c", FLIP, str(tiny_files["qwen3"]), str(tmp_path / "flipped.gguf"), "1"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)

    assert "Traceback" not in done.stderr
    assert done.returncode in (0, -signal.SIGABRT)  # survived, or stopped by llama.cpp's own abort


def watch(monkeypatch, *names: str) -> list[str]:
    """Return a list that will hold the names of these functions of llama.cpp's in the order of their calls."""
    lib, called = open_library(), []

    def watched(name, real):
        return lambda *arguments: (called.append(name), real(*arguments))[1]

    for name in names:
        monkeypatch.setattr(lib, name, watched(name, getattr(lib, name)))
    return called


def test_a_load_that_fails_half_way_frees_what_it_made_last_first(tiny_files, monkeypatch, adapter):
    freed = watch(monkeypatch, "llama_model_free", "llama_free", "llama_adapter_lora_free")
    good = Lora(adapter)

    fails(tiny_files["qwen3"], loras=(good, Lora("/nowhere.gguf")))
    assert freed == ["llama_adapter_lora_free", "llama_model_free"]

    freed.clear()
    monkeypatch.setattr(open_library(), "llama_decode", lambda *_: -3)
    fails(tiny_files["qwen3"], loras=(good,))
    assert freed == ["llama_free", "llama_adapter_lora_free", "llama_model_free"]


@pytest.mark.parametrize(("name", "answer"), [("llama_get_memory", None), ("llama_model_has_encoder", True)])
def test_a_model_that_does_not_generate_is_not_loaded(tiny_files, monkeypatch, name, answer):
    monkeypatch.setattr(open_library(), name, lambda _handle: answer)

    assert "does not generate" in fails(tiny_files["qwen3"], n_cells=256)


def test_a_model_whose_first_step_fails_is_not_loaded(tiny_files, monkeypatch):
    monkeypatch.setattr(open_library(), "llama_decode", lambda *_: -3)

    fails(tiny_files["qwen3"], n_cells=256)


# --- the end ---


def test_close_frees_everything_once(tiny_files, monkeypatch):
    freed = watch(monkeypatch, "llama_model_free", "llama_free")
    model = make_cpu_backend().load(ModelSpec(path=str(tiny_files["qwen3"]), n_cells=256), go_on)

    model.close()
    model.close()

    assert freed == ["llama_free", "llama_model_free"]


def test_a_closed_model_refuses_work_and_does_not_crash(load, drive):
    model = load()
    driver = drive(model)
    model.close()

    for call in (
        lambda: driver.feed({0: [1]}),
        lambda: model.drop(0),
        lambda: model.trim(0, 1),
        lambda: model.share(0, 1, 1),
        lambda: model.save(0),
        lambda: model.restore(0, b""),
        lambda: model.vocabulary.tokenize("a", add_special=False, parse_special=False),
        lambda: model.vocabulary.token_bytes(7),
    ):
        with pytest.raises(ModelDied):
            call()
    model.abort()


def test_close_waits_for_a_text_that_is_being_tokenised(load, monkeypatch):
    model = load()
    lib, started, n_tokens = open_library(), threading.Event(), []

    def tokenize(*arguments, real=lib.llama_tokenize):
        started.set()
        return real(*arguments)

    monkeypatch.setattr(lib, "llama_tokenize", tokenize)
    text = "a" * 500_000
    thread = threading.Thread(target=lambda: n_tokens.append(len(model.vocabulary.tokenize(text, add_special=False, parse_special=False))))
    thread.start()
    started.wait()

    model.close()

    thread.join()
    assert n_tokens == [500_000]


def test_models_can_be_loaded_side_by_side_and_again(load, drive):
    one, other = load(), load("qwen3moe")
    assert drive(one).feed({0: [1]}).shape == drive(other).feed({0: [1]}).shape
    one.close()
    assert drive(other).feed({1: [1]}).shape[0] == 1
    assert drive(load()).feed({0: [1]}).shape[0] == 1


def test_a_load_that_goes_well_warns_of_nothing(load, caplog):
    with caplog.at_level("WARNING", "cllm.llamacpp"):
        load(n_cells=None)
        load("qwen35", n_cells=3000, n_live=3, kv_layout=KvLayout.STREAMS)

    assert not caplog.records


# --- adapters ---


@pytest.fixture
def adapter(tmp_path):
    import gguf
    import numpy as np

    path = tmp_path / "lora.gguf"
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    rng = np.random.default_rng(0)
    for layer in range(4):
        writer.add_tensor(f"blk.{layer}.attn_q.weight.lora_a", rng.standard_normal((4, 64)).astype(np.float32))
        writer.add_tensor(f"blk.{layer}.attn_q.weight.lora_b", rng.standard_normal((64, 4)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_an_adapter_changes_what_is_computed_by_its_scale(load, drive, some_tokens, adapter):
    import numpy as np

    def logits(*loras):
        return drive(load(loras=loras)).feed({0: some_tokens(1, 10)})

    plain = logits()
    np.testing.assert_allclose(logits(Lora(adapter, 0.0)), plain, atol=1e-3)
    assert np.abs(logits(Lora(adapter, 1.0)) - plain).max() > 0.1
    np.testing.assert_allclose(logits(Lora(adapter, 0.5), Lora(adapter, 0.5)), logits(Lora(adapter, 1.0)), atol=1e-2)


def test_a_file_without_tokens_is_refused_before_a_text_ends_the_process(tmp_path, monkeypatch):
    def no_vocabulary(writer, pre, infill):
        writer.add_tokenizer_model("none")
        writer.add_vocab_size(300)
        return 300

    monkeypatch.setattr(tiny, "_write_vocabulary", no_vocabulary)
    path = tmp_path / "mute.gguf"
    tiny.make_tiny_gguf(path, "qwen3")
    backend = make_cpu_backend()
    with pytest.raises(LoadFailed, match=r"mute.gguf: it has no vocabulary"):
        backend.load(ModelSpec(path=str(path)), lambda _share: True)
    with pytest.raises(LoadFailed, match=r"mute.gguf: it has no vocabulary"):
        backend.load_embedder(ModelSpec(path=str(path)), lambda _share: True)
    with pytest.raises(LoadFailed, match=r"mute.gguf: it has no vocabulary"):
        backend.load_vocabulary(str(path))


def test_an_adapter_that_is_none_is_named(tiny_files):
    assert "qwen3.gguf" in fails(tiny_files["qwen3moe"], loras=(Lora(str(tiny_files["qwen3"])),))


# --- the log ---


def test_log_lines_are_put_together_and_errors_are_kept(caplog):
    from cllm_llamacpp.logs import LogSink

    sink = LogSink()
    with caplog.at_level("DEBUG", "cllm.llamacpp"), sink.loading():
        sink.feed(2, "load: read")
        sink.feed(5, "ing\n")
        sink.feed(5, "....")
        sink.feed(4, "load: it broke\n")

    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("DEBUG", "load: reading"),
        ("WARNING", "load: it broke"),
    ]
    assert sink.last_errors() == ("load: it broke",)


def test_where_an_adapters_tensors_go_is_no_warning(caplog):
    from cllm_llamacpp.logs import LogSink

    sink = LogSink()
    with caplog.at_level("INFO", "cllm.llamacpp"), sink.loading():
        sink.feed(3, "init: lora for 'blk.0.attn_q.weight' cannot use buft 'CPU_REPACK', fallback to CPU\n")

    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_what_another_model_says_meanwhile_is_not_taken_for_a_loads_own_error():
    from cllm_llamacpp.logs import LogSink

    sink = LogSink()
    with sink.loading():
        sink.feed(4, "load: the cause")
        for text in ("decode: no room\n", "half a line"):
            other = threading.Thread(target=lambda text=text: (sink.forget(), sink.feed(4, text)))
            other.start()
            other.join(60)
        sink.feed(5, " goes on\n")

    assert sink.last_errors() == ("load: the cause goes on",)


def test_a_busy_servers_routine_is_no_warning(load, drive, some_tokens, caplog):
    from cllm.errors import NoRoom

    driver = drive(load("qwen35", n_cells=256, n_live=2))
    driver.feed({0: some_tokens(0, 200)})
    with caplog.at_level("WARNING", "cllm.llamacpp"), pytest.raises(NoRoom):
        driver.feed({1: some_tokens(1, 200)})

    assert not caplog.records


@pytest.mark.parametrize(("size_gib", "free_gib", "n_layers"), [(4, 24, -1), (16, 24, -1), (40, 24, 18), (40, 1, 0), (40, 0, 0)])
def test_layers_go_to_the_gpu_as_far_as_they_fit(size_gib, free_gib, n_layers):
    assert settings.n_layers_that_fit(40, size_gib << 30, free_gib << 30) == n_layers


def test_cells_that_were_named_take_their_part_of_what_layers_fit():
    gib = 1 << 30
    assert settings.n_layers_that_fit(40, 15 * gib, 24 * gib, 4 * gib) == -1
    assert settings.n_layers_that_fit(40, 15 * gib, 24 * gib, 10 * gib) == 40 * 23 // 25
    assert settings.n_layers_that_fit(40, 15 * gib, 24 * gib, 1000 * gib) == 0


def test_of_cells_those_of_the_layers_that_stay_must_have_room(load):
    model = load()
    spec = ModelSpec(path="", n_cells=1000)
    memory_bytes = int(600 * settings.bytes_per_cell(spec, model._facts))
    settings.check_memory(spec, model._facts, memory_bytes, share=0.5)
    with pytest.raises(LoadFailed, match="ask for fewer"):
        settings.check_memory(spec, model._facts, memory_bytes)


def test_a_path_may_hold_any_characters(load, tiny_files, tmp_path: Path):
    path = tmp_path / "modèle\udcff 模型.gguf"
    path.write_bytes(tiny_files["qwen3"].read_bytes())

    assert load(path=str(path)).info.architecture == "qwen3"


@pytest.mark.parametrize(("lies_apart", "n_bytes"), [(False, 1 << 20), (True, 0)])
def test_caches_of_a_fraction_of_the_cells_are_not_taken_for_what_does_not_grow(lies_apart: bool, n_bytes: int) -> None:
    LOG.forget()
    for line in (
        "size =    2.00 MiB (   256 cells,  24 layers,  1/1 seqs)\n",
        "size =    1.00 MiB (    64 cells,  12 layers,  1/1 seqs)\n",
    ):
        LOG.feed(2, f"llama_kv_cache: {line}")
    told = {"llama_n_ctx_seq": 256, "llama_n_ctx": 256, "llama_n_seq_max": 1, "llama_n_batch": 512, "llama_get_memory": 1}
    lib: Any = SimpleNamespace(**{name: lambda _handle, value=value: value for name, value in told.items()})
    contexts = Contexts(lib, None, cast(Any, SimpleNamespace(lies_apart=lies_apart)), cast(Any, None), cast(Any, None), gpu=False)
    context = contexts._described(1, KvLayout.UNIFIED)
    assert (context.cells_bytes, context.fixed_bytes) == (3 << 20, n_bytes)
