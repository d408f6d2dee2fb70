"""The tiny model files themselves."""

from __future__ import annotations

import numpy as np
import pytest

from cllm.testing.tiny import ARCHITECTURES, expand_to_f32, make_tiny_gguf


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_seed_is_a_file(tmp_path, architecture):
    paths = [tmp_path / name for name in ("one", "same", "other")]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        make_tiny_gguf(path, architecture, seed=seed)
    one, same, other = (path.read_bytes() for path in paths)

    assert one == same
    assert one != other
    assert len(one) < 1_000_000


def test_an_unknown_architecture_is_refused(tmp_path):
    with pytest.raises(ValueError, match="qwen35"):
        make_tiny_gguf(tmp_path / "x.gguf", "gpt5")


def test_expanding_makes_f16_tensors_f32_and_keeps_the_rest(tmp_path):
    import gguf

    half = np.linspace(-1, 1, 64, dtype=np.float16).reshape(2, 32)
    writer = gguf.GGUFWriter(str(tmp_path / "half.gguf"), "qwen3")
    writer.add_file_type(1)
    writer.add_token_list(["a", "ö", "<|x|>"])
    writer.add_token_scores([0.5, 1.0, 2.0])
    writer.add_add_bos_token(False)
    writer.add_tensor("half", half)
    writer.add_tensor("single", half.astype(np.float32))
    writer.add_tensor("blocks", gguf.quants.quantize(half, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    expand_to_f32(tmp_path / "half.gguf", tmp_path / "full.gguf")

    before, after = gguf.GGUFReader(tmp_path / "half.gguf"), gguf.GGUFReader(tmp_path / "full.gguf")
    assert [t.tensor_type.name for t in after.tensors] == ["F32", "F32", "Q8_0"]
    np.testing.assert_array_equal(after.tensors[0].data, half.astype(np.float32))
    np.testing.assert_array_equal(after.tensors[2].data, before.tensors[2].data)
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.scores", "tokenizer.ggml.add_bos_token", "general.architecture"):
        assert after.fields[key].contents() == before.fields[key].contents()


def test_an_expanded_model_computes_the_same(load, drive, tiny_files, tmp_path):
    expand_to_f32(tiny_files["qwen35"], tmp_path / "again.gguf")

    one, other = (
        drive(load("qwen35", n_live=1, path=str(path))).feed({0: [1, 2]}) for path in (tiny_files["qwen35"], tmp_path / "again.gguf")
    )

    np.testing.assert_array_equal(one, other)
