"""Makes tiny model files with random weights, for tests of what only a real model shows: batching, memory and tokenising.

The files need the package ``gguf``, which only tests depend on. Four architectures stand for the four kinds of memory: dense
attention, recurrent beside attention, sliding windows, and experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

ARCHITECTURES: Final = ("qwen3", "qwen35", "gemma3", "qwen3moe")

N_CTX_TRAIN: Final = 2048
N_SWA: Final = 16  # gemma3's window, small enough that short tests leave it

CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_WORDS: Final = (
    " the", " and", " you", " that", " was", " for", " are", " with", " his", " they", " this", " have", " from", " one",
    " had", " word", " but", " not", " what", " all", "ing", "tion", "Hello", " world", "user", "assistant", "system",
)  # fmt: skip
_CONTROL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_INFILL: Final = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
_USER_DEFINED: Final = ("<think>", "</think>", "<tool_call>", "</tool_call>")

_N_EMBD: Final = 64
_N_HEAD: Final = 4
_N_HEAD_KV: Final = 2
_N_HEAD_DIM: Final = 16
_N_FF: Final = 96
_N_LAYER: Final = 4
_N_EXPERT: Final = 4
_N_FF_EXPERT: Final = 48
_N_SSM_STATE: Final = 16  # head size of the linear attention
_N_SSM_KEY_HEADS: Final = 2
_N_SSM_VALUE_HEADS: Final = 4
_N_SSM_CONV: Final = 4

_Array = npt.NDArray[np.float32]
_Put = Callable[[str, _Array], None]


def make_tiny_gguf(
    path: str | Path,
    architecture: str,
    *,
    seed: int = 0,
    pre: str = "qwen2",
    pooling: str | None = None,
    infills: bool = False,
    half: bool = False,
    suppressed: Sequence[int] = (),
    tool_template: str | None = None,
) -> None:
    """Write a model of `architecture` (one of ARCHITECTURES) with random F32 weights; the same seed gives the same file.

    `pre` names the pre-tokeniser (llama.cpp's ``tokenizer.ggml.pre``); `pooling`, as ``LAST``, makes it an embedding model;
    with `infills` the vocabulary has fill-in-the-middle tokens; with `half` its matrices are F16; the tokens `suppressed` are never to be
    drawn; `tool_template` is its chat template for conversations with tools.

    Logits are spread widely, so that greedy choices stand well above rounding.
    """
    import gguf

    if architecture not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {architecture!r}, choose from {', '.join(ARCHITECTURES)}")
    writer = gguf.GGUFWriter(str(path), architecture)
    _write_shape(writer, architecture)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType[pooling])
    n_vocab = _write_vocabulary(writer, pre, _INFILL if infills else ())
    if suppressed:
        writer.add_array("tokenizer.ggml.suppress_tokens", list(suppressed))
    if tool_template is not None:
        writer.add_string("tokenizer.chat_template.tool_use", tool_template)

    def put(name: str, array: _Array) -> None:
        writer.add_tensor(name, array.astype(np.float16) if half and array.ndim > 1 else array)

    _write_weights(put, architecture, n_vocab, np.random.default_rng(seed))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def expand_to_f32(source: str | Path, target: str | Path) -> None:
    """Rewrite a model file with its F16 tensors as F32; metadata is kept.

    With F32 weights, an F32 cache and flash attention off, logits hardly depend on what else is in the batch, so that tests may
    compare token by token.
    """
    import gguf

    reader = gguf.GGUFReader(str(source))
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(target), architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            sub_type = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        _copy_tensor(writer, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_tensor(writer: Any, tensor: Any) -> None:
    import gguf

    if tensor.tensor_type is gguf.GGMLQuantizationType.F16:
        writer.add_tensor(tensor.name, tensor.data.astype(np.float32))
    else:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)


# --- metadata ---------------------------------------------------------------------------------------------------------


def _write_shape(writer: Any, architecture: str) -> None:
    writer.add_name(f"tiny {architecture}")
    writer.add_block_count(_N_LAYER)
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(_N_EMBD)
    writer.add_feed_forward_length(_N_FF)
    writer.add_head_count(_N_HEAD)
    writer.add_head_count_kv(_N_HEAD_KV)
    writer.add_key_length(_N_HEAD_DIM)
    writer.add_value_length(_N_HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(_N_HEAD_DIM)
    writer.add_file_type(0)
    if architecture == "gemma3":
        writer.add_sliding_window(N_SWA)
        writer.add_sliding_window_pattern(2)
    elif architecture == "qwen3moe":
        writer.add_expert_count(_N_EXPERT)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(_N_FF_EXPERT)
    elif architecture == "qwen35":
        writer.add_rope_dimension_sections([4, 2, 2, 0])
        writer.add_uint32("qwen35.full_attention_interval", 2)
        writer.add_ssm_conv_kernel(_N_SSM_CONV)
        writer.add_ssm_inner_size(_N_SSM_STATE * _N_SSM_VALUE_HEADS)
        writer.add_ssm_state_size(_N_SSM_STATE)
        writer.add_ssm_time_step_rank(_N_SSM_VALUE_HEADS)
        writer.add_ssm_group_count(_N_SSM_KEY_HEADS)


def _write_vocabulary(writer: Any, pre: str, infill: tuple[str, ...]) -> int:
    """Write a byte-level BPE vocabulary: every byte, the words above with the merges that lead to them, special tokens."""
    tokens, merges = _byte_tokens(), []
    for word in _WORDS:
        pieces = [_BYTE_CHARS[b] for b in word.encode()]
        while len(pieces) > 1:
            if (merge := f"{pieces[0]} {pieces[1]}") not in merges:
                merges.append(merge)
            pieces[:2] = [pieces[0] + pieces[1]]
            if pieces[0] not in tokens:
                tokens.append(pieces[0])
    types = [1] * len(tokens) + [3] * len(_CONTROL) + [4] * len(_USER_DEFINED) + [3] * len(infill)  # normal, control, user-defined
    tokens += [*_CONTROL, *_USER_DEFINED, *infill]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    return len(tokens)


def _byte_chars() -> list[str]:
    """Return the printable character that stands for each byte in byte-level BPE (GPT-2's table)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


_BYTE_CHARS: Final = _byte_chars()


def _byte_tokens() -> list[str]:
    return list(_BYTE_CHARS)


# --- weights ----------------------------------------------------------------------------------------------------------


def _write_weights(put: _Put, architecture: str, n_vocab: int, rng: np.random.Generator) -> None:
    put("token_embd.weight", _matrix(rng, n_vocab, _N_EMBD, gain=8.0))
    put("output.weight", _matrix(rng, n_vocab, _N_EMBD, gain=8.0))
    put("output_norm.weight", _norm(rng, _N_EMBD))
    for layer in range(_N_LAYER):
        block: _Put = lambda name, array, layer=layer: put(f"blk.{layer}.{name}", array)  # type: ignore[misc]  # noqa: E731
        block("attn_norm.weight", _norm(rng, _N_EMBD))
        if architecture == "qwen35" and layer % 2 == 0:
            _put_linear_attention(block, rng)
        else:
            _put_attention(block, rng, gated=architecture == "qwen35")
        _put_norms(block, architecture, rng)
        if architecture == "qwen3moe":
            _put_experts(block, rng)
        else:
            _put_feed_forward(block, rng)


def _put_attention(block: _Put, rng: np.random.Generator, *, gated: bool) -> None:
    n_query = _N_HEAD * _N_HEAD_DIM
    block("attn_q.weight", _matrix(rng, n_query * (2 if gated else 1), _N_EMBD))
    block("attn_k.weight", _matrix(rng, _N_HEAD_KV * _N_HEAD_DIM, _N_EMBD))
    block("attn_v.weight", _matrix(rng, _N_HEAD_KV * _N_HEAD_DIM, _N_EMBD))
    block("attn_output.weight", _matrix(rng, _N_EMBD, n_query, gain=2.0))
    block("attn_q_norm.weight", _norm(rng, _N_HEAD_DIM))
    block("attn_k_norm.weight", _norm(rng, _N_HEAD_DIM))


def _put_linear_attention(block: _Put, rng: np.random.Generator) -> None:
    n_value = _N_SSM_STATE * _N_SSM_VALUE_HEADS
    n_conv = 2 * _N_SSM_STATE * _N_SSM_KEY_HEADS + n_value
    block("attn_qkv.weight", _matrix(rng, n_conv, _N_EMBD))
    block("attn_gate.weight", _matrix(rng, n_value, _N_EMBD))
    block("ssm_conv1d.weight", _matrix(rng, n_conv, _N_SSM_CONV))
    block("ssm_dt.bias", rng.uniform(-1.0, 1.0, _N_SSM_VALUE_HEADS).astype(np.float32))
    block("ssm_a", -rng.uniform(0.02, 0.2, _N_SSM_VALUE_HEADS).astype(np.float32))  # decay: negative, slow enough to remember
    block("ssm_beta.weight", _matrix(rng, _N_SSM_VALUE_HEADS, _N_EMBD))
    block("ssm_alpha.weight", _matrix(rng, _N_SSM_VALUE_HEADS, _N_EMBD))
    block("ssm_norm.weight", _norm(rng, _N_SSM_STATE))
    block("ssm_out.weight", _matrix(rng, _N_EMBD, n_value, gain=2.0))


def _put_norms(block: _Put, architecture: str, rng: np.random.Generator) -> None:
    if architecture in ("qwen35", "gemma3"):
        block("post_attention_norm.weight", _norm(rng, _N_EMBD))
    if architecture != "qwen35":
        block("ffn_norm.weight", _norm(rng, _N_EMBD))
    if architecture == "gemma3":
        block("post_ffw_norm.weight", _norm(rng, _N_EMBD))


def _put_feed_forward(block: _Put, rng: np.random.Generator) -> None:
    block("ffn_gate.weight", _matrix(rng, _N_FF, _N_EMBD))
    block("ffn_up.weight", _matrix(rng, _N_FF, _N_EMBD))
    block("ffn_down.weight", _matrix(rng, _N_EMBD, _N_FF))


def _put_experts(block: _Put, rng: np.random.Generator) -> None:
    block("ffn_gate_inp.weight", _matrix(rng, _N_EXPERT, _N_EMBD))
    for name, n_out, n_in in (("gate", _N_FF_EXPERT, _N_EMBD), ("up", _N_FF_EXPERT, _N_EMBD), ("down", _N_EMBD, _N_FF_EXPERT)):
        block(f"ffn_{name}_exps.weight", np.stack([_matrix(rng, n_out, n_in) for _ in range(_N_EXPERT)]))


def _matrix(rng: np.random.Generator, n_out: int, n_in: int, *, gain: float = 1.0) -> _Array:
    matrix: _Array = (rng.standard_normal((n_out, n_in)) * (gain / n_in**0.5)).astype(np.float32)
    return matrix


def _norm(rng: np.random.Generator, n: int) -> _Array:
    return rng.uniform(0.8, 1.2, n).astype(np.float32)


def make_tiny_lora(path: str | Path, architecture: str = "qwen3", *, seed: int = 0, invocation: Sequence[int] = ()) -> None:
    """Write a LoRA adapter for `make_tiny_gguf`'s models with plain attention, strong enough to change what they say.

    With tokens of an `invocation` it is an activated one, which is to be active behind these alone.
    """
    import gguf

    rng, rank = np.random.default_rng(seed), 4
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    if invocation:
        kinds = gguf.GGUFValueType
        writer.add_key_value("adapter.alora.invocation_tokens", list(invocation), kinds.ARRAY, sub_type=kinds.UINT32)
    for layer in range(_N_LAYER):
        name = f"blk.{layer}.ffn_up.weight"
        writer.add_tensor(f"{name}.lora_a", rng.normal(0.0, 1.0, (rank, _N_EMBD)).astype(np.float32))
        writer.add_tensor(f"{name}.lora_b", rng.normal(0.0, 1.0, (_N_FF, rank)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
