"""The model file itself, read without a backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from cllm import demo

TEMPLATE = Path(__file__).parents[2] / "tools" / "demo_model" / "template.jinja"


def test_the_file_is_there_and_small_enough_for_the_wheel() -> None:
    assert 0 < demo.path().stat().st_size <= 5_000_000


def test_the_vocabulary_is_of_the_kind_that_splits_digits() -> None:
    gguf = pytest.importorskip("gguf")
    fields = gguf.GGUFReader(demo.path()).fields
    assert fields["general.architecture"].contents() == "qwen3"
    assert fields["tokenizer.ggml.pre"].contents() == "qwen2"
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert not [token for token in tokens if any(c.isdigit() for c in token) and len(token) > 1]
    assert tokens[fields["tokenizer.ggml.eos_token_id"].contents()] == "<|im_end|>"


def test_the_template_is_the_one_that_the_model_was_trained_with() -> None:
    gguf = pytest.importorskip("gguf")
    if not TEMPLATE.exists():
        pytest.skip("the tools are not in this distribution")
    carried = gguf.GGUFReader(demo.path()).fields["tokenizer.chat_template"].contents()
    assert carried == TEMPLATE.read_text(encoding="utf-8").rstrip("\n")


def test_weights_are_f16_and_norms_f32() -> None:
    gguf = pytest.importorskip("gguf")
    for tensor in gguf.GGUFReader(demo.path()).tensors:
        assert tensor.tensor_type.name == ("F32" if "norm" in tensor.name else "F16"), tensor.name
