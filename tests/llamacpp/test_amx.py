"""A build of llama.cpp whose tile instructions fail costs their speed, and nothing else."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cllm.backend import ModelSpec
from cllm_llamacpp import abi, amx, library, make_cpu_backend


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


def ends(monkeypatch, code: int, stdout: str = "", stderr: bytes = b"") -> list[list[str]]:
    """Let the process that computes a product end so; return the commands it was started with."""
    commands: list[list[str]] = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, code, stdout.encode(), stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_the_product_is_right_with_the_installed_library_unless_amx_is_said_to_be_unused():
    lib = library.open_library()
    path = str(lib.llama_cpp._lib._name)
    done = subprocess.run([sys.executable, "-I", amx.__file__, path], capture_output=True, timeout=60, check=False)
    assert done.stdout.endswith(amx._SOUND.encode()) == amx.is_sound(lib), done.stderr


@pytest.mark.parametrize("wrong", [0.0, float("nan")])
def test_wrong_numbers_are_told(monkeypatch, capfd, wrong):
    monkeypatch.setattr(amx, "_Ggml", lambda _library: None)
    numbers = [256.0 * amx._value(i % amx._N_OUT) for i in range(amx._N_OUT * amx._N_ROWS)]
    monkeypatch.setattr(amx, "_product", lambda _ggml: numbers)
    amx._main("libllama.so")
    assert capfd.readouterr().out == amx._SOUND
    numbers[0] = wrong
    amx._main("libllama.so")
    assert capfd.readouterr().out == amx._WRONG


def test_a_build_without_tile_instructions_is_believed_without_a_process(monkeypatch):
    commands = ends(monkeypatch, -4)
    assert amx.is_sound(built_with(b"AVX2 = 1 | AVX512 = 1 | "))
    assert not commands


def test_a_process_that_finds_the_product_right_is_believed_whatever_was_said_before(monkeypatch, caplog):
    ends(monkeypatch, 0, f"a library's own words\n{amx._SOUND}")
    assert amx.is_sound(built_with(b"AMX_INT8 = 1 | "))
    assert not caplog.records


@pytest.mark.parametrize(("code", "stdout", "why"), [(-4, "", "SIGILL"), (0, amx._WRONG, amx._WRONG)])
def test_a_build_that_fails_with_them_is_told_once_with_what_to_do(monkeypatch, caplog, code, stdout, why):
    commands = ends(monkeypatch, code, stdout)
    with caplog.at_level(logging.WARNING, "cllm.llamacpp"):
        assert not amx.is_sound(built_with(b"AMX_INT8 = 1 | "))
        assert not amx.is_sound(built_with(b"AMX_INT8 = 1 | "))
    assert len(commands) == len(caplog.records) == 1
    assert why in caplog.text
    assert "CXXFLAGS" in caplog.text
    assert f"llama-cpp-python=={abi.PACKAGE_VERSION}" in caplog.text


@pytest.mark.parametrize(
    "outcome",
    [
        OSError("no processes left"),
        subprocess.TimeoutExpired("python", 60),
        subprocess.CompletedProcess([], 0, b"", b""),  # children are nobody's to wait for: how it ended is not known
        subprocess.CompletedProcess([], -9, b"", b""),
        subprocess.CompletedProcess([], 1, b"", b"no module named encodings"),
    ],
    ids=str,
)
def test_where_it_cannot_be_tried_they_are_not_used_and_nobody_is_told_to_compile(monkeypatch, caplog, outcome):
    def run(*_, **__):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)
    assert not amx.is_sound(built_with(b"AMX_INT8 = 1 | "))
    assert "could not be tried" in caplog.text
    assert "CXXFLAGS" not in caplog.text


def test_within_a_program_that_has_no_python_to_start_they_are_not_used(monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", None)
    assert not amx.is_sound(built_with(b"AMX_INT8 = 1 | "))
    assert "could not be tried" in caplog.text


def test_a_library_that_dies_is_found_out_even_where_children_are_nobodys_to_wait_for(tmp_path):
    (tmp_path / "dies.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    code = (
        "import signal, sys\n"
        "from types import SimpleNamespace as Some\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "from cllm_llamacpp import amx\n"
        f"amx.__file__ = {str(tmp_path / 'dies.py')!r}\n"
        "built = Some(llama_print_system_info=lambda: b'AMX_INT8 = 1', llama_cpp=Some(_lib=Some(_name='')))\n"
        "sys.exit(amx.is_sound(built))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("sound", [True, False])
def test_a_model_is_laid_out_for_them_only_where_they_work(monkeypatch, tiny_files, sound):
    laid_out = []
    lib = library.open_library()
    load = lib.llama_model_load_from_file
    monkeypatch.setattr(
        lib, "llama_model_load_from_file", lambda path, params: laid_out.append(params.use_extra_bufts) or load(path, params)
    )
    monkeypatch.setattr(amx, "is_sound", lambda _lib: sound)
    model = make_cpu_backend().load(ModelSpec(path=str(tiny_files["qwen3"])), lambda _share: True)
    try:
        assert laid_out == [sound]
        assert ("AMX unused" in model.info.build) is not sound
    finally:
        model.close()
