"""A build of llama.cpp whose tile instructions fail costs their speed, and nothing else."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cllm.backend import ModelSpec
from cllm_llamacpp import amx, library, settings


def built_with(info: bytes):
    return SimpleNamespace(
        llama_print_system_info=lambda: info,
        llama_cpp=SimpleNamespace(_lib=SimpleNamespace(_name="libllama.so")),
    )


@pytest.fixture(autouse=True)
def nothing_known():
    amx._computes.cache_clear()
    yield
    amx._computes.cache_clear()


def ends(monkeypatch, code: int, stderr: bytes = b"") -> list[list[str]]:
    """Let the process that computes a product end so; return the commands it was started with."""
    commands: list[list[str]] = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, code, b"", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_the_product_is_right_with_the_installed_library_unless_amx_is_said_to_be_unused():
    lib = library.open_library()
    path = str(lib.llama_cpp._lib._name)
    done = subprocess.run([sys.executable, "-I", amx.__file__, path], capture_output=True, timeout=60, check=False)
    assert (done.returncode == 0) == amx.is_sound(lib), done.stderr


def test_wrong_numbers_are_told(monkeypatch):
    monkeypatch.setattr(amx, "_Ggml", lambda _library: None)
    right = [256.0 * amx._value(i % amx._N_OUT) for i in range(amx._N_OUT * amx._N_ROWS)]
    monkeypatch.setattr(amx, "_product", lambda _ggml: right)
    amx._main("libllama.so")
    for wrong in (0.0, float("nan")):
        monkeypatch.setattr(amx, "_product", lambda _ggml, wrong=wrong: [wrong, *right[1:]])
        with pytest.raises(SystemExit, match="a product is"):
            amx._main("libllama.so")


def test_a_build_without_tile_instructions_is_believed_without_a_process(monkeypatch):
    commands = ends(monkeypatch, -4)
    assert amx.is_sound(built_with(b"AVX2 = 1 | AVX512 = 1 | "))
    assert not commands


@pytest.mark.parametrize(("code", "stderr", "why"), [(-4, b"noise\n", "signal 4"), (1, b"noise\na product is 0.0\n", "a product is 0.0")])
def test_a_build_that_fails_with_them_is_told_once_with_what_to_do(monkeypatch, caplog, code, stderr, why):
    commands = ends(monkeypatch, code, stderr)
    with caplog.at_level(logging.WARNING, "cllm.llamacpp"):
        assert not amx.is_sound(built_with(b"AMX_INT8 = 1 | "))
        assert not amx.is_sound(built_with(b"AMX_INT8 = 1 | "))
    assert len(commands) == len(caplog.records) == 1
    assert why in caplog.text
    assert "CXXFLAGS" in caplog.text


def test_a_process_that_cannot_start_or_does_not_end_counts_as_failed(monkeypatch, caplog):
    for error in (OSError("no processes left"), subprocess.TimeoutExpired("python", 60)):

        def run(*_, error=error, **__):
            raise error

        monkeypatch.setattr(subprocess, "run", run)
        amx._computes.cache_clear()
        assert not amx.is_sound(built_with(b"AMX_INT8 = 1 | "))


@pytest.mark.parametrize("sound", [True, False])
def test_a_model_is_laid_out_for_them_only_where_they_work(monkeypatch, sound):
    monkeypatch.setattr(amx, "is_sound", lambda _lib: sound)
    params = settings.model_params(library.open_library(), ModelSpec(path="model.gguf"), n_gpu_layers=0)
    assert params.use_extra_bufts is sound
