"""`cllm verify`: two backends on the same texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import pytest

from cllm.backend import Backend, Logits, ModelSpec, OnProgress
from cllm.commands import verify
from cllm.commands.verify import Order, run
from cllm.config import Settings
from cllm.errors import BackendUnavailable, LoadFailed, SettingsError
from cllm.testing.fake import FakeBackend, FakeModel
from cllm.testing.fake_streams import FakeStreamBackend, FakeStreamModel


class Telling(FakeStreamModel):
    """A model that schedules itself and tells logits: another model's, a little off."""

    def logits(self, tokens: Sequence[int]) -> Logits:
        rows = verify._computed(FakeModel(), tokens)
        return rows + np.float32(0.1) * np.random.default_rng(0).normal(0, 1, rows.shape).astype(np.float32)


class Small(FakeBackend):
    def load(self, spec: ModelSpec, on_progress: OnProgress) -> FakeModel:
        return FakeModel(n_tokens=400)


BACKENDS: dict[str, Backend] = {
    "right": FakeBackend(),
    "same": FakeBackend(),
    "telling": FakeStreamBackend(Telling),
    "mute": FakeStreamBackend(),
}


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "load_backend", BACKENDS.__getitem__)


def order(backend: str, *text_paths: str) -> Order:
    return Order(Settings(backend=backend), "right", None, text_paths, 40)


def test_a_backend_is_0_from_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(order("same"), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["backend"], found["reference"], found["n_rows"]) == ("same", "right", 40 * len(verify.TEXTS))
    assert (found["mean"], found["max"], found["top1_agreement"]) == (0, 0, 1)


def test_a_model_that_schedules_itself_may_tell_logits_for_this(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(order("telling"), as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["p50"] <= found["mean"] <= found["p99"] <= found["max"]


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(order("telling"), as_json=False) == 0
    shown = capsys.readouterr().out
    assert "telling beside right" in shown
    assert "99th percentile" in shown


def test_a_text_of_ones_own_is_compared_as_far_as_it_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "text"
    path.write_text("the sea")
    assert run(order("same", str(path)), as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["n_rows"] == 1 + len("the sea")  # bos before it


def test_what_is_wrong_with_an_order_is_told_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_backend(name: str) -> Backend:
        if name == "right":
            raise AssertionError("the reference would compute for minutes")
        raise BackendUnavailable(f"no backend {name}")

    monkeypatch.setattr(verify, "load_backend", load_backend)
    with pytest.raises(BackendUnavailable, match="no backend other"):
        run(order("other"), as_json=True)
    monkeypatch.setattr(verify, "load_backend", lambda _name: FakeBackend())
    small = attrs.evolve(order("same"), settings=Settings(backend="same", ctx_size=39))
    with pytest.raises(SettingsError, match=r"--ctx-size: 39 are fewer than the 40 tokens"):
        run(small, as_json=True)


def test_what_tells_no_logits_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="tell tokens, and no logits"):
        run(order("mute"), as_json=True)


def test_the_reference_must_compute_steps() -> None:
    with pytest.raises(BackendUnavailable, match="mute schedules itself"):
        run(Order(Settings(backend="same"), "mute", None, (), 40), as_json=True)


def test_a_reference_that_is_missing_is_told_by_its_flag() -> None:
    with pytest.raises(SettingsError, match=r"^--reference-model: .*missing\.gguf") as caught:
        run(attrs.evolve(order("same"), reference_model="missing.gguf"), as_json=True)
    assert caught.value.field is None


def test_the_backend_must_be_named() -> None:
    with pytest.raises(SettingsError, match="name the backend"):
        run(order("auto"), as_json=True)


def test_a_text_that_cannot_be_read_or_is_empty_is_told_by_its_flag(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--text: .*No such file"):
        run(order("same", str(tmp_path / "missing")), as_json=True)
    (tmp_path / "empty").write_text("")
    with pytest.raises(SettingsError, match="--text: there is nothing in it"):
        run(order("same", str(tmp_path / "empty")), as_json=True)


def test_other_models_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "small", Small())
    with pytest.raises(LoadFailed, match="different sizes"):
        run(order("small"), as_json=True)


class Failing(FakeBackend):
    """Its models fail to compute; with a path they are not even loaded."""

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> FakeModel:
        if spec.path == "unloadable":
            fail()
        return FakeModel(before_step=fail)


def fail(_batch: object = None) -> None:
    raise RuntimeError("tensor 7\nis upside down")


@pytest.mark.parametrize(("model", "to_do"), [("unloadable", "load the model"), (None, "compute")])
def test_what_a_backend_raises_is_told_by_its_name_in_one_line(monkeypatch: pytest.MonkeyPatch, model: str | None, to_do: str) -> None:
    monkeypatch.setattr(verify.hub, "local_path", lambda path, _on_bytes: path)
    monkeypatch.setitem(BACKENDS, "failing", Failing())
    with pytest.raises(LoadFailed, match=rf"^backend failing failed to {to_do}: RuntimeError: tensor 7 is upside down$"):
        run(Order(Settings(model, backend="failing"), "right", None, (), 40), as_json=True)
