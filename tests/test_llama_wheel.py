"""The tool that compiles llama-cpp-python once, with a compiler and a pip of the tests' own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "llama_wheel.py"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The tool, with an empty cache and a compiler on the path."""
    spec = importlib.util.spec_from_file_location("llama_wheel", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("CLLM_WHEEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(module, "processor", lambda: "flags : avx2 fma")
    for name in os.environ:
        if name in module.BUILD_VARIABLES or name.startswith(module.BUILD_PREFIXES):
            monkeypatch.delenv(name)
    return module


def pip(monkeypatch: pytest.MonkeyPatch, *, code: int = 0) -> list[list[str]]:
    """Put a pip in place that writes an empty wheel, or fails; return the commands it was called with."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        if not code:
            out = Path(command[command.index("--wheel-dir") + 1])
            out.mkdir()
            (out / "llama.whl").touch()
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_the_wheel_is_built_once(wheel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pip(monkeypatch)
    folder = wheel.wheel_folder()
    assert wheel.wheel_folder() == folder
    assert [path.name for path in folder.iterdir()] == ["llama.whl"]
    assert [command[-1] for command in commands] == [wheel.requirement()]


def test_other_build_options_give_another_wheel_and_distrust_what_pip_kept(wheel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pip(monkeypatch)
    plain = wheel.wheel_folder()
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_CUDA=on")
    assert wheel.wheel_folder() != plain
    assert ["--no-cache-dir" in command for command in commands] == [True, True]


def test_whatever_cmake_is_told_makes_another_wheel(wheel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = wheel.key()
    monkeypatch.setenv("SKBUILD_CMAKE_ARGS", "-DGGML_CUDA=on")
    cuda = wheel.key()
    monkeypatch.setenv("CMAKE_BUILD_TYPE", "Debug")
    assert len({plain, cuda, wheel.key()}) == 3


def test_a_date_for_builds_that_are_the_same_everywhere_makes_none_without_avx(wheel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = wheel.key()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert "SOURCE_DATE_EPOCH" not in wheel.environment()
    assert wheel.key() == plain


def test_a_cache_that_cannot_be_written_is_told_in_one_line(wheel: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CLLM_WHEEL_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SystemExit, match=r"cannot be kept in .*: Not a directory; CLLM_WHEEL_CACHE names another folder"):
        wheel.wheel_folder()


def test_another_system_gets_another_wheel_though_homes_may_be_shared(wheel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch)
    here = wheel.wheel_folder()
    monkeypatch.setattr(wheel.platform, "libc_ver", lambda: ("musl", "1"))
    assert wheel.wheel_folder() != here


def test_another_processor_gets_another_wheel_and_not_the_one_that_pip_kept(wheel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pip(monkeypatch)
    here = wheel.wheel_folder()
    monkeypatch.setattr(wheel, "processor", lambda: "another")
    assert wheel.wheel_folder() != here
    assert ["--no-cache-dir" in command for command in commands] == [True, True]


def test_a_processor_with_amx_gets_a_build_that_keeps_its_tiles_beside_the_options_asked_for(
    wheel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXXFLAGS", "-g")
    assert wheel.environment()["CXXFLAGS"] == "-g"
    monkeypatch.setattr(wheel, "processor", lambda: "flags : avx2 amx_tile amx_int8")
    environments = []

    def run(command: list[str], *, env: dict[str, str] | None = None, **_: object) -> SimpleNamespace:
        if "--version" in command:
            return SimpleNamespace(stdout="c++ (Debian 12.2.0-14) 12.2.0")
        environments.append(env)
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(SystemExit):
        wheel.wheel_folder()
    assert [env and env["CXXFLAGS"] for env in environments] == [f"-g {wheel.AMX_FLAGS}"]


def test_clang_which_has_no_such_options_is_given_none(wheel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(stdout="Debian clang version 14.0.6")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(wheel, "processor", lambda: "flags : amx_tile")
    monkeypatch.setenv("CXX", "ccache clang++")
    assert "CXXFLAGS" not in wheel.environment()
    assert commands == [["ccache", "clang++", "--version"]]


def test_a_build_that_fails_leaves_nothing_that_looks_whole(wheel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, code=1)
    with pytest.raises(SystemExit, match="could not be built"):
        wheel.wheel_folder()
    pip(monkeypatch)
    assert wheel.wheel_folder().is_dir()


def test_without_a_compiler_one_line_says_what_to_install(wheel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"no C\+\+ compiler \(Debian, Ubuntu: apt install build-essential"):
        wheel.wheel_folder()
