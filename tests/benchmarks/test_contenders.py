"""Which servers are found to be measured beside ours, and what each is told."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from benchmarks import contenders, peers
from benchmarks.contenders import LLAMA_SERVER_SETTINGS, Contender, House, cllm_serve, find_contenders, versions
from benchmarks.server import without_settings
from cllm.bench.workloads import WORKLOADS
from cllm.testing.tiny import make_tiny_gguf

HOUSE = House(model=Path("model.gguf"), n_slots=8, n_cells=2048, n_threads=2)


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has none of them."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(contenders, "has_llama_cpp_server", lambda _python: False)


def found_by(*options: str) -> tuple[list[Contender], list[str]]:
    return find_contenders(peers.parser().parse_args(options), HOUSE)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A server that can only tell its version, after what it says of its libraries."""
    path = tmp_path / "llama-server"
    path.write_text("#!/bin/sh\necho 'loaded 3 of /some/folder/lib.so'\necho 'version: 6700 (abc)'\necho 'built with 9'\n")
    path.chmod(0o755)
    return path


def test_servers_that_are_not_here_are_named_and_nothing_is_measured_beside_us() -> None:
    assert found_by() == ([], ["llama-server", "ollama", "vllm", "llama-cpp-python's server"])


@pytest.mark.parametrize("name", ["llama-server", "ollama", "vllm", "llama-cpp-python"])
def test_a_server_that_is_named_and_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(SystemExit, match=rf"--{name}: .*/typo"):
        found_by(f"--{name}=/nowhere/typo")


def test_vllm_gets_our_threads_and_cells(tmp_path: Path) -> None:
    make_tiny_gguf(model := tmp_path / "tiny.gguf", "qwen3")
    (one,) = contenders.vllm("vllm", attrs.evolve(HOUSE, model=model))
    assert one.environment["OMP_NUM_THREADS"] == "2"
    assert one.environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert one.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"


def test_settings_that_a_shell_has_for_daily_use_reach_no_server() -> None:
    kept = {"PATH": "/bin", "HF_HOME": "/models", "LLAMA_CACHE": "/cache"}
    daily = {
        "CLLM_PORT": "1",
        "LLAMA_ARG_CACHE_TYPE_K": "q8_0",
        "LLAMA_API_KEY": "k",
        "OLLAMA_KV_CACHE_TYPE": "q8_0",
        "VLLM_LOGGING_LEVEL": "x",
    }
    assert without_settings(kept | daily) == kept


def test_settings_of_which_there_are_none_are_refused_and_those_that_there_are_named(program: Path) -> None:
    with pytest.raises(SystemExit, match=r"--only: none is named -x; there are .*llama-server \(-no-kvu\)"):
        found_by(f"--llama-server={program}", "--only=-x")


def test_a_server_is_found_by_its_path_and_played_in_every_setting_with_our_sizes(program: Path) -> None:
    found, missing = found_by(f"--llama-server={program}")
    assert "llama-server" not in missing
    assert [one.setting for one in found] == list(LLAMA_SERVER_SETTINGS)
    assert {"as it comes", "-no-kvu", "-kvu", "-b 32", "-b 64", "no prompt cache"} <= set(LLAMA_SERVER_SETTINGS)
    for one in found:
        words = one.command
        sizes = {word: words[words.index(word) + 1] for word in ("-m", "-c", "-np", "-t", "-tb")}
        assert sizes == {"-m": "model.gguf", "-c": "2048", "-np": "8", "-t": "2", "-tb": "2"}


def test_a_server_is_found_on_path(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(program.parent))
    found, _ = found_by("--only=no-kvu")
    assert [(one.setting, one.command[0]) for one in found] == [("-no-kvu", str(program))]


def test_a_peers_version_is_the_line_that_names_it_and_has_no_folders(program: Path) -> None:
    found, _ = found_by(f"--llama-server={program}")
    assert versions(found) == {"llama-server": "version: 6700 (abc)"}


def test_a_peer_that_cannot_tell_its_version_is_measured_all_the_same(program: Path) -> None:
    found, _ = found_by(f"--llama-server={program}")
    program.unlink()
    assert versions(found) == {}


def test_every_workload_is_played_unless_some_are_named() -> None:
    assert peers.parser().parse_args([]).workloads.split(",") == list(WORKLOADS)
    assert set(peers.QUANTIZATION_OF) <= set(WORKLOADS)


def test_what_steps_cost_is_measured_for_a_run_alone_unless_it_is_said_where_it_is_kept(tmp_path: Path) -> None:
    house = House(model=tmp_path / "x.gguf", n_slots=1, n_cells=256, n_threads=1)
    folders = [one.command[one.command.index("--calibration-dir") + 1] for one in (cllm_serve(house, ()) for _ in range(2))]
    assert len(set(folders)) == 2
    kept = cllm_serve(house, ("--calibration-dir", "here"))
    assert [kept.command.count(word) for word in ("--calibration-dir", "here")] == [1, 1]
    assert "--calibration-dir" not in cllm_serve(house, ("--calibration-dir=here",)).command


def test_ours_is_told_how_many_run_as_the_others_are_unless_it_is_to_find_that_out() -> None:
    told, untold = cllm_serve(HOUSE, ()).command, cllm_serve(HOUSE, (), says_parallel=False).command
    assert told[told.index("--parallel") + 1] == "8"
    assert "--parallel" not in untold
    assert [command[command.index("--ctx-size") + 1] for command in (told, untold)] == ["2048", "2048"]
