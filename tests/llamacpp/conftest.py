"""Tiny models, and a driver that computes greedy continuations on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the package gguf, which makes the tiny models, is not installed")

from cllm.backend import Batch, FlashAttention, KvLayout, Logits, ModelSpec
from cllm.testing.tiny import ARCHITECTURES, make_tiny_gguf
from cllm_llamacpp import make_cpu_backend
from cllm_llamacpp.model import LlamaModel

Load = Callable[..., LlamaModel]

EXACT = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": FlashAttention.OFF}
"""Settings under which logits hardly depend on what else is in the batch (the tiny models' weights are F32 anyway)."""


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    files = {name: folder / f"{name}.gguf" for name in ARCHITECTURES}
    for name, path in files.items():
        make_tiny_gguf(path, name)
    return files


@pytest.fixture
def load(tiny_files: Mapping[str, Path]) -> Iterator[Load]:
    """Load a tiny model with exact settings; it is closed after the test."""
    models: list[LlamaModel] = []

    def load_one(architecture: str = "qwen3", **settings: object) -> LlamaModel:
        spec = {"path": str(tiny_files[architecture]), "n_cells": 1024, "n_threads": 1, **EXACT, **settings}
        model = make_cpu_backend().load(ModelSpec(**spec), lambda _share: True)  # type: ignore[arg-type]
        assert isinstance(model, LlamaModel)
        models.append(model)
        return model

    yield load_one
    for model in models:
        model.close()


class Driver:
    """Computes rows on a model, keeping the tokens that each slot holds."""

    def __init__(self, model: LlamaModel) -> None:
        self.model = model
        self.batch = Batch(model.n_rows_max)
        self.held: dict[int, list[int]] = {}

    def feed(self, new: Mapping[int, list[int]], *, outputs: str = "last", interleaved: bool = False) -> Logits:
        """Compute the new tokens of each slot; return a copy of the logits, in the order of the rows."""
        rows = [(slot, len(self.held.get(slot, [])) + i, token) for slot, tokens in new.items() for i, token in enumerate(tokens)]
        if interleaved:
            rows.sort(key=lambda row: row[1] - len(self.held.get(row[0], [])))
        self.fill(rows, outputs)
        logits = self.model.step(self.batch).copy()
        for slot, tokens in new.items():
            self.held.setdefault(slot, []).extend(tokens)
        return logits

    def fill(self, rows: list[tuple[int, int, int]], outputs: str = "last") -> None:
        """Fill the batch with rows of (slot, position, token)."""
        batch, n = self.batch, len(rows)
        batch.slots[:n], batch.positions[:n], batch.tokens[:n] = np.array(rows, np.int32).T
        last = {slot: i for i, (slot, _, _) in enumerate(rows)}
        batch.outputs[:n] = [outputs == "all" or (outputs == "last" and last[row[0]] == i) for i, row in enumerate(rows)]
        batch.n_rows, batch.n_outputs = n, int(batch.outputs[:n].sum())

    def greedy(self, prompts: Mapping[int, list[int]], n_tokens: int) -> dict[int, list[int]]:
        """Continue the prompts side by side, a token of each in a step."""
        new = dict(prompts)
        found: dict[int, list[int]] = {slot: [] for slot in prompts}
        for _ in range(n_tokens):
            for slot, row in zip(new, self.feed(new), strict=True):
                found[slot].append(int(row.argmax()))
            new = {slot: tokens[-1:] for slot, tokens in found.items()}
        return found

    def drop(self, slot: int) -> None:
        self.model.drop(slot)
        self.held.pop(slot, None)

    def adopt(self, slot: int, tokens: list[int]) -> None:
        """Note that `slot` holds these tokens by other means than `feed`."""
        self.held[slot] = list(tokens)


@pytest.fixture
def drive() -> type[Driver]:
    return Driver


def tokens_of(seed: int, n: int) -> list[int]:
    """Return `n` tokens that are all alike for the model, in an order of `seed`'s own."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, 256, n).tolist()
    return tokens


@pytest.fixture
def some_tokens() -> Callable[[int, int], list[int]]:
    return tokens_of


@pytest.fixture(params=[KvLayout.UNIFIED, KvLayout.STREAMS], ids=lambda layout: layout.value)
def layout(request: pytest.FixtureRequest) -> KvLayout:
    found: KvLayout = request.param
    return found
