"""`cllm calibrate`: what was measured is shown, drawn, and found by the server."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest

from cllm import cli
from cllm.backend import ModelSpec, OnProgress, StepModel
from cllm.commands.calibrate import N_COLUMNS_BAR
from cllm.config import Settings
from cllm.serve import loading
from cllm.testing.fake import FakeBackend
from cllm.testing.fake_streams import FakeStreamBackend
from tests.serve.timed import TimedModel, by_its_own_clock


def make_model() -> TimedModel:
    return TimedModel(first_s=0.005, row_s=0.001, output_s=0.0005, cell_s=1e-6, n_cells=16384)


class Timed(FakeBackend):
    """Gives models that say by themselves what their steps take."""

    def __init__(self) -> None:
        self.loaded: list[TimedModel] = []

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
        self.loaded.append(make_model())
        return self.loaded[-1]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Timed:
    backend = Timed()
    monkeypatch.setattr(loading, "choose_backend", lambda _name: ("timed", backend))
    monkeypatch.setattr(loading, "measure", by_its_own_clock)
    monkeypatch.setattr("cllm.commands.calibrate.configure_logging", lambda _settings: None)
    monkeypatch.setenv("COLUMNS", "100")  # a line of the table is a line, however narrow the terminal
    return backend


@pytest.fixture
def calibrate(backend: Timed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the command, which goes well; return what it prints."""

    def run(*arguments: str) -> str:
        assert cli.run(["calibrate", "--calibration-dir", str(tmp_path / "kept"), *arguments]) == 0
        return capsys.readouterr().out

    return run


def test_the_curve_is_printed_as_it_was_measured(calibrate: Callable[..., str]) -> None:
    printed = calibrate()
    lines = [line for line in printed.splitlines() if "│" in line]
    rows = [[float(number) for number in re.findall(r"[\d.]+", line)] for line in lines]
    assert rows[0] == [1, 6, 6.5, 6]  # rows, a step, a step with all of them outputs, each of them; ms
    of_sixteen = rows.index([16, 21, 29, 1.31])
    assert [lines[i].count("█") for i in (0, of_sixteen)] == [N_COLUMNS_BAR, int(N_COLUMNS_BAR * 1.31 / 6)]
    assert "a cell in use adds 1 us to a step" in printed


def test_a_server_finds_what_the_command_measured_and_the_command_measures_again(
    backend: Timed, calibrate: Callable[..., str], tmp_path: Path
) -> None:
    calibrate()
    settings = Settings(calibration_dir=str(tmp_path / "kept"))
    served = loading.load(settings, lambda _share: True)
    loading._measured_here.clear()  # in another process
    calibrate()
    first, second, third = backend.loaded
    assert served.cost.curve == by_its_own_clock(make_model(), lambda _share: True, time.perf_counter)
    assert second.sizes == []
    assert third.sizes == first.sizes


def test_of_a_model_that_makes_its_steps_by_itself_no_curve_is_shown(
    backend: Timed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loading, "choose_backend", lambda _name: ("streams", FakeStreamBackend()))
    assert cli.run(["calibrate", "--calibration-dir", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "cllm: there is nothing to measure" in shown.err
    assert shown.out == ""


def test_what_gives_vectors_is_not_loaded_for_it(backend: Timed, calibrate: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "load_embedder", None)
    assert "rows of a step" in calibrate("--embedding-model", "vectors")


def test_the_curve_is_drawn_where_asked(calibrate: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra [bench]")
    calibrate("--plot", str(tmp_path / "curve.svg"))
    drawing = ET.parse(tmp_path / "curve.svg").getroot()
    words = " ".join(drawing.itertext())
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    assert all(label in words for label in ("rows of a step", "a step, ms", "each row, ms", "no outputs", "all outputs"))


@pytest.mark.parametrize(("path", "told"), [("/nowhere/x.svg", "--plot: cannot write into /nowhere"), ("/tmp", "--plot: /tmp is a folder")])
def test_where_nothing_can_be_drawn_nothing_is_measured(
    path: str, told: str, backend: Timed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["calibrate", "--plot", path, "--calibration-dir", str(tmp_path)]) == cli.USAGE
    assert told in capsys.readouterr().err
    assert backend.loaded == []
