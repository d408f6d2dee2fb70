"""A plugin's environment of its own: what needs neither pip nor an index, since the plugin is written into it."""

from __future__ import annotations

from pathlib import Path

from cllm.testing.environment import chat, content_of, make_environment

LOUD = """
from cllm.testing.fake import FakeBackend

class Backend(FakeBackend):
    def load(self, spec, on_progress):
        print("loading " * 12_500, flush=True)
        return super().load(spec, on_progress)
"""


def test_a_server_that_prints_more_than_a_pipe_takes_is_ready_all_the_same(tmp_path: Path) -> None:
    environment = make_environment(tmp_path)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    (packages / "loud.py").write_text(LOUD)
    info = packages / "loud-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loud\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cllm.backends]\nloud = loud:Backend\n")
    with environment.served("--backend", "loud", "a model") as url:
        assert content_of(chat(url, "Is anybody there?", max_tokens=4))
    assert not list(tmp_path.glob("served-*"))
