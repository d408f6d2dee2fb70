"""Facts about a loaded model, from its metadata."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs

from cllm.backend import ModelInfo, Pooling
from cllm_llamacpp import amx
from cllm_llamacpp.header import numbers_in

_N_VALUE_BYTES_MAX: Final = 1 << 16  # longer values (a chat template) are the vocabulary's; nobody reads them here


_POOLINGS: Final = {"1": Pooling.MEAN, "2": Pooling.CLS, "3": Pooling.LAST, "4": Pooling.RANK}  # llama_pooling_type
EMBEDDERS: Final = frozenset(
    {
        "bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "modern-bert", "eurobert", "gemma-embedding",
        "llama-embed",
    }
)  # fmt: skip
"""Architectures of encoders without a decoder; their files need not say so."""


_APART_ALONE: Final = frozenset({"minimax-m3"})  # dense attention in a pool, where it is sparse (models/minimax-m3.cpp)
_ALWAYS_APART: Final = frozenset({"deepseek4"})
"""Architectures whose sequences have cells of their own in a pool, too, and whose copies are made as late as in the next step."""
_HEADS_KV: Final = "attention.head_count_kv"  # a number, or a list with one for each layer
_WITH_INDEXERS: Final = frozenset({"deepseek32", "dots3note", "glm-dsa", "glm5-next", "minimax-m3", "hy_v4"})
"""Architectures whose attention is sparse by keys of an indexer, which lie in a cache of their own."""


@attrs.frozen(kw_only=True)
class Facts:
    """What decides how a model's memory may be used."""

    info: ModelInfo
    n_heads_kv: int  # of all layers together: those whose memory is a state have none
    n_head_k: int  # length of a head's key
    n_head_v: int
    has_recurrent_state: bool  # recurrent or hybrid
    has_two_caches: bool  # an indexer's beside that of attention
    needs_parts: bool  # in one pool its attention is another, worse one
    has_window: bool  # some layers forget what slides out of their window
    lies_apart: bool  # a sequence's cells are its own, however they are laid out
    has_encoder: bool  # before its decoder, or instead of one
    generates: bool  # a token after the other; some embedding models could, but were trained for their vectors
    sees_ahead: bool  # a row attends to those after it too
    pooling: Pooling | None  # how the model's vectors are meant to be made

    @property
    def keeps_all(self) -> bool:
        """Whether the memory is that of plain attention: every position stays until it is removed."""
        return not self.has_recurrent_state and not self.has_window

    @property
    def n_ctx_unscaled(self) -> int | None:
        """Tokens up to which positions are turned as they were before the context was made longer; None: it never was."""
        length = self.info.metadata.get(f"{self.info.architecture}.rope.scaling.original_context_length", "")
        return int(length) if length.isdigit() else None


def facts_of(lib: Any, model: Any, path: str) -> Facts:
    metadata = metadata_of(lib, model)
    architecture = metadata.get("general.architecture", "")
    n_embd = lib.llama_model_n_embd(model)
    has_encoder = bool(lib.llama_model_has_encoder(model))
    pooling = _POOLINGS.get(metadata.get(f"{architecture}.pooling_type", ""))
    sees_ahead = architecture in EMBEDDERS or metadata.get(f"{architecture}.attention.causal") == "false"
    n_head = max(1, lib.llama_model_n_head(model))

    def number(key: str, default: int) -> int:
        value = metadata.get(f"{architecture}.{key}", "")
        return int(value) if value.isdigit() else default

    each_kv = [] if number(_HEADS_KV, 0) else numbers_in(path, f"{architecture}.{_HEADS_KV}")
    # Latent attention reads the values out of the keys; what an indexer's cache takes beside is not counted, so that they stay for that.
    is_latent = bool(number("attention.key_length_mla", 0) and number("attention.value_length_mla", 0))
    keeps_no_values = is_latent and architecture not in _WITH_INDEXERS and not number("attention.indexer.key_length", 0)
    return Facts(
        info=ModelInfo(
            name=metadata.get("general.name") or path.rpartition("/")[2].removesuffix(".gguf"),
            architecture=architecture,
            n_params=lib.llama_model_n_params(model),
            size_bytes=lib.llama_model_size(model),
            n_ctx_train=lib.llama_model_n_ctx_train(model),
            n_embd=n_embd,
            quantization=_text(lib.llama_ftype_name(lib.llama_model_ftype(model))),
            build=_text(lib.llama_print_system_info()) + ("" if amx.is_sound(lib) else "AMX unused |"),
            metadata=metadata,
        ),
        n_heads_kv=_n_heads_kv(lib, model, number("full_attention_interval", 1), each_kv),
        n_head_k=number("attention.key_length", n_embd // n_head),
        n_head_v=0 if keeps_no_values else number("attention.value_length", n_embd // n_head),
        has_recurrent_state=bool(lib.llama_model_is_recurrent(model) or lib.llama_model_is_hybrid(model)),
        has_two_caches=architecture in _WITH_INDEXERS,
        needs_parts=architecture in _APART_ALONE,
        has_window=lib.llama_model_n_swa(model) > 0,
        lies_apart=architecture in _ALWAYS_APART,
        has_encoder=has_encoder,
        generates=bool(lib.llama_model_has_decoder(model)) and not has_encoder and not sees_ahead and pooling is None,
        sees_ahead=sees_ahead,
        pooling=pooling,
    )


def _n_heads_kv(lib: Any, model: Any, interval: int, each: Sequence[int] = ()) -> int:
    """Return the key and value heads of all layers: as many as `each` has, if the file says that, which of a layer without attention is 0;
    else each `interval`-th has attention, and every one as many as the first.
    """
    if lib.llama_model_is_recurrent(model):
        return 0
    if any(each):
        return sum(each)
    n_layers: int = max(1, lib.llama_model_n_layer(model))
    n_heads: int = lib.llama_model_n_head_kv(model) or max(1, lib.llama_model_n_head(model))  # 0 where the first layer is recurrent
    return max(1, n_layers // max(1, interval)) * n_heads


def metadata_of(lib: Any, model: Any) -> dict[str, str]:
    """Return the scalars among the metadata, which is what llama.cpp keeps of it."""
    found = {}
    for i in range(lib.llama_model_meta_count(model)):
        key = _string(lambda buffer, n, i=i: lib.llama_model_meta_key_by_index(model, i, buffer, n))  # type: ignore[misc]
        value = _string(lambda buffer, n, i=i: lib.llama_model_meta_val_str_by_index(model, i, buffer, n))  # type: ignore[misc]
        if key and value is not None:
            found[key] = value
    return found


def _string(fill: Callable[[Any, int], int]) -> str | None:
    """Return what `fill` writes; it answers with the length, as snprintf does, or below zero for nothing."""
    n = 256
    while True:
        buffer = ctypes.create_string_buffer(n)
        length = fill(buffer, n)
        if length < 0 or length > _N_VALUE_BYTES_MAX:
            return None
        if length < n:
            return buffer.raw[:length].decode("utf-8", "replace")
        n = length + 1


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "replace")
