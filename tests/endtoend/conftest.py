"""The demo model in the settings under which logits do not depend on what else is in the batch, and as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cllm import demo
from cllm.backend import FlashAttention, KvLayout, ModelSpec, StepModel
from cllm.registry import load_backend
from cllm.testing.tiny import expand_to_f32, make_tiny_gguf

LoadModel = Callable[..., StepModel]


@pytest.fixture(scope="session")
def exact_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with its F16 weights written as F32."""
    path = tmp_path_factory.mktemp("models") / "demo-f32.gguf"
    expand_to_f32(demo.path(), path)
    return path


def load_exact_model(path: Path, n_cells: int, *, layout: KvLayout = KvLayout.UNIFIED, n_live: int = 32) -> StepModel:
    """Load a file with F32 cells and without flash attention."""
    spec = ModelSpec(
        path=str(path),
        n_cells=n_cells,
        n_live=n_live,
        kv_layout=layout,
        cache_type_k="f32",
        cache_type_v="f32",
        flash_attention=FlashAttention.OFF,
        n_threads=1,  # tiny models gain nothing from a second thread, and lose much when the machine is busy
    )
    return load_backend("llama-cpu").load(spec, lambda share: True)


@pytest.fixture
def load_exact(exact_file: Path) -> Iterator[LoadModel]:
    """`load_exact_model`, with the demo model unless told otherwise; closed after the test."""
    loaded: list[StepModel] = []

    def load(n_cells: int, *, path: Path = exact_file, layout: KvLayout = KvLayout.UNIFIED, n_live: int = 32) -> StepModel:
        loaded.append(load_exact_model(path, n_cells, layout=layout, n_live=n_live))
        return loaded[-1]

    yield load
    for model in loaded:
        model.close()


@pytest.fixture
def load_tiny(load_exact: LoadModel, tmp_path: Path) -> LoadModel:
    """The same for a tiny model with random weights: `load_tiny(n_cells, architecture, layout)`, for 8 sequences at once."""

    def load(n_cells: int, architecture: str, layout: KvLayout) -> StepModel:
        path = tmp_path / f"{architecture}.gguf"
        if not path.exists():
            make_tiny_gguf(path, architecture)
        return load_exact(n_cells, path=path, layout=layout, n_live=8)

    return load
