"""Makes tiny encoders with random weights, for tests of what only they show: rows that see all others, and ranking heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

N_CTX: Final = 64
N_EMBD: Final = 32
N_HEAD: Final = 2
N_FF: Final = 64
N_LAYER: Final = 2
SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS: Final = ("once", "upon", "a", "time", "there", "was", "model")

_Array = npt.NDArray[np.float32]


def make_tiny_bert(path: str | Path, *, pooling: str = "MEAN", seed: int = 0) -> None:
    """Write an encoder that knows a few words and letters. `pooling` is MEAN, CLS, LAST or RANK, which has a head; NONE says nothing."""
    import gguf

    writer = gguf.GGUFWriter(str(path), "bert")
    writer.add_name("tiny bert")
    writer.add_block_count(N_LAYER)
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_file_type(0)
    if pooling != "NONE":
        writer.add_pooling_type(gguf.PoolingType[pooling])
    n_vocab = _write_vocabulary(writer)
    _write_weights(writer, n_vocab, np.random.default_rng(seed), ranks=pooling == "RANK")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_vocabulary(writer: Any) -> int:
    """Write pieces of words: those that begin one carry a mark, as llama.cpp wants it."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = [*SPECIAL, *(f"\u2581{piece}" for piece in (*WORDS, *letters) if len(piece) > 1 or piece != "a"), *letters]
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))  # control, normal
    writer.add_token_type_count(2)
    writer.add_bos_token_id(SPECIAL.index("[CLS]"))
    writer.add_sep_token_id(SPECIAL.index("[SEP]"))
    writer.add_unk_token_id(SPECIAL.index("[UNK]"))
    writer.add_pad_token_id(SPECIAL.index("[PAD]"))
    writer.add_mask_token_id(SPECIAL.index("[MASK]"))
    return len(tokens)


def _write_weights(writer: Any, n_vocab: int, rng: np.random.Generator, *, ranks: bool) -> None:
    writer.add_tensor("token_embd.weight", _matrix(rng, n_vocab, N_EMBD))
    writer.add_tensor("token_types.weight", _matrix(rng, 2, N_EMBD))
    writer.add_tensor("position_embd.weight", _matrix(rng, N_CTX, N_EMBD))
    _add_norm(writer, "token_embd_norm", rng)
    for layer in range(N_LAYER):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            _add_layer(writer, f"blk.{layer}.{name}", N_EMBD, N_EMBD, rng)
        _add_norm(writer, f"blk.{layer}.attn_output_norm", rng)
        _add_layer(writer, f"blk.{layer}.ffn_up", N_FF, N_EMBD, rng)
        _add_layer(writer, f"blk.{layer}.ffn_down", N_EMBD, N_FF, rng)
        _add_norm(writer, f"blk.{layer}.layer_output_norm", rng)
    if ranks:
        _add_layer(writer, "cls", N_EMBD, N_EMBD, rng)
        _add_layer(writer, "cls.output", 1, N_EMBD, rng)


def _add_layer(writer: Any, name: str, n_out: int, n_in: int, rng: np.random.Generator) -> None:
    writer.add_tensor(f"{name}.weight", _matrix(rng, n_out, n_in))
    writer.add_tensor(f"{name}.bias", rng.normal(0.0, 0.1, n_out).astype(np.float32))


def _add_norm(writer: Any, name: str, rng: np.random.Generator) -> None:
    writer.add_tensor(f"{name}.weight", rng.uniform(0.8, 1.2, N_EMBD).astype(np.float32))
    writer.add_tensor(f"{name}.bias", rng.normal(0.0, 0.1, N_EMBD).astype(np.float32))


def _matrix(rng: np.random.Generator, n_out: int, n_in: int) -> _Array:
    matrix: _Array = (rng.standard_normal((n_out, n_in)) * (2.0 / n_in**0.5)).astype(np.float32)
    return matrix
