"""Model files of real shapes with random weights, made on demand into a cache folder: speed does not depend on what weights say.

    python -m benchmarks.models qwen3-0.6b Q4_K_M

prints the file's path. `CLLM_MODEL_CACHE` names the folder (default: `~/.cache/cllm/models`).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt

QUANTIZATIONS: Final = ("F16", "Q8_0", "Q4_K_M")
SEED: Final = 20250101
RECIPE: Final = "2"  # grows when the same name comes to mean another file


@attrs.frozen(kw_only=True)
class Shape:
    """The hyperparameters of a dense qwen3 model with tied embeddings."""

    n_layers: int
    n_embd: int
    n_heads: int
    n_heads_kv: int
    n_head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int


SHAPES: Final = {
    "qwen3-0.6b": Shape(n_layers=28, n_embd=1024, n_heads=16, n_heads_kv=8, n_head_dim=128, n_ff=3072, n_vocab=151_936, n_ctx_train=40_960),
}


def cache_folder() -> Path:
    """Where made models are kept."""
    chosen = os.environ.get("CLLM_MODEL_CACHE")
    folder = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cllm" / "models"
    return folder / RECIPE


def model_file(name: str, quantization: str) -> Path:
    """Return the file of a shape in a quantisation, made if it is not there yet (a minute or two)."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{quantization}.gguf"
    if path.exists():
        return path
    if quantization == "F16":
        _write(path, SHAPES[name])
    else:
        _quantize(model_file(name, "F16"), path, quantization)
    return path


def _write(path: Path, shape: Shape) -> None:
    import gguf

    part = path.with_suffix(".part")
    writer = gguf.GGUFWriter(str(part), "qwen3")
    _write_facts(writer, path.stem, shape)
    _write_vocabulary(writer, shape.n_vocab)
    _write_weights(writer, shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(path)


def _write_facts(writer: Any, name: str, shape: Shape) -> None:
    writer.add_name(name)
    writer.add_block_count(shape.n_layers)
    writer.add_context_length(shape.n_ctx_train)
    writer.add_embedding_length(shape.n_embd)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_heads_kv)
    writer.add_key_length(shape.n_head_dim)
    writer.add_value_length(shape.n_head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_file_type(1)


def _write_vocabulary(writer: Any, n_vocab: int) -> None:
    """The bytes, then two printable characters, then three, as far as it takes.

    So nearly every token is text by itself. Of one that ends within a character servers show nothing before the next has come, and what
    is measured between two texts would be two steps.
    """
    tokens, merges = _byte_letters(), []
    printable = tokens[0x20:0x7F]
    beginnings = printable.copy()
    for first in beginnings:  # which grows
        for second in printable[: n_vocab - 3 - len(tokens)]:
            tokens.append(first + second)
            beginnings.append(first + second)
            merges.append(f"{first} {second}")
        if len(tokens) == n_vocab - 3:
            break
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens + control)
    writer.add_token_types([1] * len(tokens) + [3] * len(control))
    writer.add_token_merges(merges)
    writer.add_eos_token_id(n_vocab - 1)
    writer.add_pad_token_id(n_vocab - 3)
    writer.add_add_bos_token(False)


def _byte_letters() -> list[str]:
    """The letters that stand for the 256 bytes in a byte-level vocabulary: printable ones for themselves, others from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    n_others = 0
    letters = []
    for byte in range(256):
        letters.append(chr(byte if byte in plain else 0x100 + n_others))
        n_others += byte not in plain
    return letters


def _write_weights(writer: Any, shape: Shape) -> None:
    rng = np.random.default_rng(SEED)

    def matrix(name: str, n_out: int, n_in: int) -> None:
        weights: npt.NDArray[np.float32] = rng.standard_normal((n_out, n_in), np.float32)
        weights *= 0.02
        writer.add_tensor(name, weights.astype(np.float16))

    def ones(name: str, n: int) -> None:
        writer.add_tensor(name, np.ones(n, np.float32))

    matrix("token_embd.weight", shape.n_vocab, shape.n_embd)
    ones("output_norm.weight", shape.n_embd)
    for i in range(shape.n_layers):
        block = f"blk.{i}"
        ones(f"{block}.attn_norm.weight", shape.n_embd)
        ones(f"{block}.ffn_norm.weight", shape.n_embd)
        ones(f"{block}.attn_q_norm.weight", shape.n_head_dim)
        ones(f"{block}.attn_k_norm.weight", shape.n_head_dim)
        matrix(f"{block}.attn_q.weight", shape.n_heads * shape.n_head_dim, shape.n_embd)
        matrix(f"{block}.attn_k.weight", shape.n_heads_kv * shape.n_head_dim, shape.n_embd)
        matrix(f"{block}.attn_v.weight", shape.n_heads_kv * shape.n_head_dim, shape.n_embd)
        matrix(f"{block}.attn_output.weight", shape.n_embd, shape.n_heads * shape.n_head_dim)
        matrix(f"{block}.ffn_gate.weight", shape.n_ff, shape.n_embd)
        matrix(f"{block}.ffn_up.weight", shape.n_ff, shape.n_embd)
        matrix(f"{block}.ffn_down.weight", shape.n_embd, shape.n_ff)


def _quantize(source: Path, target: Path, quantization: str) -> None:
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    part = target.with_suffix(".part")
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{quantization}")
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(part).encode(), ctypes.byref(params))
    if code:
        raise RuntimeError(f"llama_model_quantize gave {code} for {source.name} to {quantization}")
    part.rename(target)


def main() -> None:
    """Make one model and print its path."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("name", choices=sorted(SHAPES))
    parser.add_argument("quantization", choices=QUANTIZATIONS)
    arguments = parser.parse_args()
    print(f"making {arguments.name} in {arguments.quantization} if it is not there yet", file=sys.stderr)
    print(model_file(arguments.name, arguments.quantization))


if __name__ == "__main__":
    main()
