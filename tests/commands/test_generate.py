"""`cllm generate`: an answer, and nothing that is not needed for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cllm import cli
from cllm.backend import Embedder, ModelSpec, OnProgress
from cllm.errors import LoadFailed
from cllm.serve import loading
from cllm.testing.fake import FakeBackend


class Textual(FakeBackend):
    """Cannot load what gives vectors."""

    def load_embedder(self, spec: ModelSpec, on_progress: OnProgress) -> Embedder:
        raise LoadFailed("nobody asked for vectors")


@pytest.fixture(autouse=True)
def _backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "choose_backend", lambda _name: ("textual", Textual()))
    monkeypatch.setattr("cllm.commands.generate.configure_logging", lambda _settings: None)


@pytest.mark.parametrize("vectors", ["embedding_model = 'vectors'", "embeddings = true\npooling = 'mean'\nembedding_alias = 'v'"])
def test_what_a_server_has_besides_is_read_and_not_loaded(vectors: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cllm.toml"
    path.write_text(f"{vectors}\nalias = 'chat'\ncache_dir = '{tmp_path / 'kept'}'\ncalibrate = 'again'\n", "utf-8")
    assert cli.run(["generate", "once", "--raw", "-n", "4", "--seed", "1", "--config", str(path)]) == 0
    assert capsys.readouterr().out.strip()
    assert not (tmp_path / "kept").exists()
