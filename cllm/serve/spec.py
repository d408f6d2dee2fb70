"""Turns settings into what a backend is asked to load."""

from __future__ import annotations

import attrs

from cllm import backend, demo
from cllm.backend import Lora, ModelSpec
from cllm.checks import split_lora, split_shares
from cllm.config import Settings


def model_spec(settings: Settings) -> ModelSpec:
    """Return what to load and how; without a model in the settings it is the embedded one.

    Batch sizes are clipped to one another as llama-server does, so that a small -b needs no -ub beside it.
    """
    return ModelSpec(
        path=settings.model if settings.model is not None else str(demo.path()),
        n_cells=settings.ctx_size,
        n_live=settings.parallel,
        n_rows_max=settings.batch_size,
        n_rows_physical=min(settings.ubatch_size, settings.batch_size),
        n_threads=settings.threads,
        n_threads_batch=settings.threads_batch if settings.threads_batch is not None else settings.threads,
        n_gpu_layers=settings.gpu_layers,
        kv_layout=backend.KvLayout(settings.kv),
        cache_type_k=settings.cache_type_k,
        cache_type_v=settings.cache_type_v,
        flash_attention=backend.FlashAttention(settings.flash_attn),
        split_mode=backend.SplitMode(settings.split_mode),
        main_gpu=settings.main_gpu,
        tensor_split=split_shares(settings.tensor_split) if settings.tensor_split else (),
        mmap=settings.mmap,
        mlock=settings.mlock,
        loras=tuple(Lora(*split_lora(text)) for text in settings.lora),
        keeps_prefixes=settings.prefix_cache,
        options=dict(_name_value(text) for text in settings.backend_option),
    )


def _name_value(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name.strip(), value.strip()


def embedder_spec(settings: Settings, path: str) -> ModelSpec:
    """Return what to load for vectors, or, of the same model, how."""
    pooling = None if settings.pooling == "auto" else backend.Pooling(settings.pooling)
    return attrs.evolve(model_spec(settings), path=path, n_cells=settings.embedding_ctx_size, loras=(), pooling=pooling)
