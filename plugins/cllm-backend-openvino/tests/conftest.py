"""Tiny models with random weights, for tests of the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from cllm.testing.loopback import pass_by_proxies
from cllm.testing.tiny import make_tiny_gguf

pass_by_proxies()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen3 model, with matrices in F16."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    make_tiny_gguf(path, "qwen3", half=True)
    return path
