"""Writes a checkpoint as a GGUF file: `python -m demo_model.export --run DIR --to FILE`, from `tools/`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from .model import Shape
from .render import template_text
from .tokenizer import CONTROL, USER_DEFINED

N_BYTES_MAX = 5_000_000  # what the wheel has room for

# Names of the modules in `model.py` and of the tensors in a GGUF file of qwen3.
LAYER_NAMES = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.out": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "ffn_gate",
    "ffn.up": "ffn_up",
    "ffn.down": "ffn_down",
}
NAMES = {"embedding": "token_embd", "norm": "output_norm"}


def gguf_name(name: str) -> str:
    """Return `blk.0.attn_q.weight` for `layers.0.attention.q.weight`."""
    stem = name.removesuffix(".weight")
    if not stem.startswith("layers."):
        return NAMES[stem] + ".weight"
    _, layer, rest = stem.split(".", 2)
    return f"blk.{layer}.{LAYER_NAMES[rest]}.weight"


def write_shape(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(shape.n_context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.n_layers)
    writer.add_feed_forward_length(shape.ffn_width)
    writer.add_head_count(shape.n_heads)
    writer.add_head_count_kv(shape.n_kv_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def token_type(token: str) -> gguf.TokenType:
    if token in CONTROL:
        return gguf.TokenType.CONTROL
    return gguf.TokenType.USER_DEFINED if token in USER_DEFINED else gguf.TokenType.NORMAL


def write_vocabulary(writer: gguf.GGUFWriter, path: Path) -> None:
    saved = json.loads(path.read_text(encoding="utf-8"))
    ids: dict[str, int] = dict(saved["model"]["vocab"]) | {each["content"]: each["id"] for each in saved["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    assert [ids[token] for token in tokens] == list(range(len(tokens)))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([token_type(token) for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in saved["model"]["merges"]])
    writer.add_eos_token_id(ids["<|im_end|>"])
    writer.add_eot_token_id(ids["<|im_end|>"])
    writer.add_pad_token_id(ids["<|endoftext|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(template_text())


def write_weights(writer: gguf.GGUFWriter, weights: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        # Norms stay F32: llama.cpp multiplies by them in F32, and they are few.
        writer.add_tensor(gguf_name(name), weight.numpy().astype(np.float32 if weight.ndim == 1 else np.float16))


def export(run: Path, to: Path) -> None:
    state = torch.load(run / "model.pt", weights_only=True)
    writer = gguf.GGUFWriter(to, "qwen3")
    writer.add_name("cLLM demo")
    writer.add_description("A tiny model for trying the cLLM server and for its tests; it knows nothing of the world.")
    writer.add_license("MIT")
    write_shape(writer, Shape(**state["shape"]))
    write_vocabulary(writer, run / "tokenizer.json")
    write_weights(writer, state["model"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    n_bytes = to.stat().st_size
    print(f"{to.name}: {n_bytes} bytes, {sum(w.numel() for w in state['model'].values())} parameters, {state['step']} steps")
    if n_bytes > N_BYTES_MAX:
        raise SystemExit(f"more than {N_BYTES_MAX} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the checkpoint and the tokenizer")
    parser.add_argument("--to", type=Path, required=True, help="the GGUF file to write")
    options = parser.parse_args()
    export(options.run, options.to)


if __name__ == "__main__":
    main()
