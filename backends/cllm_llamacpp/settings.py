"""Turns a `ModelSpec` into llama.cpp's parameters."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

import attrs

from cllm import machine
from cllm.backend import FlashAttention, KvLayout, ModelSpec, SplitMode
from cllm.errors import LoadFailed
from cllm_llamacpp.facts import Facts

# ggml's number of each type, and its bytes per element (a block's bytes over its elements)
_CACHE_TYPES: Final = {
    "f32": (0, 4.0),
    "f16": (1, 2.0),
    "bf16": (30, 2.0),
    "q8_0": (8, 34 / 32),
    "q5_1": (7, 24 / 32),
    "q5_0": (6, 22 / 32),
    "q4_1": (3, 20 / 32),
    "q4_0": (2, 18 / 32),
    "iq4_nl": (20, 18 / 32),
}
_UNQUANTISED: Final = ("f32", "f16", "bf16")
_FLASH_ATTENTION: Final = {FlashAttention.AUTO: -1, FlashAttention.OFF: 0, FlashAttention.ON: 1}  # auto: on unless the model cannot
_SPLIT_MODES: Final = {SplitMode.NONE: 0, SplitMode.LAYER: 1, SplitMode.ROW: 2}
LOAD_WITHOUT_MAPPING: Final = 0
# By (mmap, mlock). -1 is llama.cpp's own choice: mapped, unless a device says that it does not bear that, as integrated GPUs, which would
# load slowly or hold the weights twice. With locking there is no such choice.
_LOAD_MODES: Final = {(False, False): LOAD_WITHOUT_MAPPING, (True, False): -1, (False, True): 2, (True, True): 3}

_NO_DEVICES: Final = (ctypes.c_void_p * 1)(None)  # a list that ends at once

N_SPARE: Final = 1  # sequences of one pool of plain attention that are no slots: a part of a slot is saved and restored by way of it
_N_SLOTS_MAX: Final = 256  # LLAMA_MAX_SEQ
_N_SLOTS_WITH_STATE: Final = 16  # where each slot costs a state or a window of its own, and `n_live` is not given
_N_SLOTS_STREAMS: Final = 8  # where each slot takes an equal part of the cells
_N_CELLS_MIN: Final = 512
_N_CELLS_ROUND: Final = 256  # llama.cpp rounds a slot's part of the cells up to a multiple of it
_GIB: Final = 1 << 30


def check(spec: ModelSpec) -> None:
    """Raise LoadFailed for what llama.cpp would refuse without a word, or only after minutes of loading."""
    for name in (spec.cache_type_k, spec.cache_type_v):
        if name not in _CACHE_TYPES:
            raise LoadFailed(f"unknown cache type {name!r}; choose from {', '.join(_CACHE_TYPES)}")
    if spec.cache_type_v not in _UNQUANTISED and spec.flash_attention is FlashAttention.OFF:
        raise LoadFailed(f"--cache-type-v {spec.cache_type_v} needs flash attention, and --flash-attn is off")
    if spec.n_rows_max < 1 or spec.n_rows_physical < 1:
        raise LoadFailed("n_rows_max and n_rows_physical must be at least 1")


def model_params(lib: Any, spec: ModelSpec, *, n_gpu_layers: int) -> Any:
    params = lib.llama_model_default_params()
    params.split_mode = _SPLIT_MODES[spec.split_mode]
    params.main_gpu = spec.main_gpu
    params.load_mode = _LOAD_MODES[spec.mmap, spec.mlock]
    params.n_gpu_layers = n_gpu_layers
    if n_gpu_layers == 0:
        params.devices = ctypes.addressof(_NO_DEVICES)  # else a build with GPU support takes a device all the same
    if spec.tensor_split:
        params.tensor_split = _tensor_split(lib, spec)
    return params


def _tensor_split(lib: Any, spec: ModelSpec) -> Any:
    n_devices = lib.llama_max_devices()  # llama.cpp reads as many
    if len(spec.tensor_split) > n_devices:
        raise LoadFailed(f"--tensor-split names {len(spec.tensor_split)} devices, llama.cpp takes {n_devices} at most")
    return (ctypes.c_float * n_devices)(*spec.tensor_split)


def n_layers_that_fit(n_layers: int, size_bytes: int, free_bytes: int, cells_bytes: int = 0) -> int:
    """Return how many of a model's layers to put into `free_bytes` of GPU memory; below zero for all, the output head too.

    A fifth of the memory and a gibibyte stay free for the cache and for llama.cpp's buffers. Cells that were named, of all layers together,
    may take more.
    """
    rooms = ((free_bytes * 4 // 5 - _GIB, size_bytes), (free_bytes - _GIB, size_bytes + cells_bytes))
    if all(wanted <= room for room, wanted in rooms):
        return -1
    return max(0, min(room * n_layers // max(1, wanted) for room, wanted in rooms))


def layout_of(spec: ModelSpec) -> KvLayout:
    return KvLayout.UNIFIED if spec.kv_layout is KvLayout.AUTO else spec.kv_layout


def with_layout(spec: ModelSpec, facts: Facts) -> ModelSpec:
    """Return the spec with the layout in which the model computes what it is, where it is that in one alone and none was asked for."""
    is_open = spec.kv_layout is KvLayout.AUTO and facts.needs_parts
    return attrs.evolve(spec, kv_layout=KvLayout.STREAMS) if is_open else spec


def layouts_of(spec: ModelSpec, facts: Facts, *, gpu: bool) -> frozenset[KvLayout]:
    """Return the layouts that a loaded model can take. On a GPU the pool costs little, and other memory shares nothing in it anyway."""
    is_free = spec.kv_layout is KvLayout.AUTO and not gpu and facts.keeps_all
    return frozenset((KvLayout.UNIFIED, KvLayout.STREAMS) if is_free else (layout_of(spec),))


def laid_out(spec: ModelSpec, layout: KvLayout, n_slots: int, n_cells: int) -> ModelSpec:
    """Return the spec with another layout and no more than `n_cells` cells: parts are rounded down, where llama.cpp would round up."""
    if layout is KvLayout.UNIFIED:
        return attrs.evolve(spec, kv_layout=layout, n_cells=n_cells)
    n_parts = max(1, min(n_slots, _N_SLOTS_MAX, n_cells // _N_CELLS_ROUND))
    n_part = n_cells // n_parts // _N_CELLS_ROUND * _N_CELLS_ROUND
    return attrs.evolve(spec, kv_layout=layout, n_live=n_parts, n_cells=n_parts * n_part)


def n_sequences(spec: ModelSpec, facts: Facts) -> int:
    """Return how many sequences to make, spare ones too. In one pool of plain attention they cost little: all that llama.cpp allows."""
    if layout_of(spec) is KvLayout.STREAMS:
        wanted = spec.n_live or _N_SLOTS_STREAMS
    elif not facts.keeps_all:
        wanted = spec.n_live or _N_SLOTS_WITH_STATE
    else:
        wanted = _N_SLOTS_MAX
    return min(wanted, _N_SLOTS_MAX)


def n_cells(spec: ModelSpec, facts: Facts, free_bytes: int) -> int:
    """Return the cells asked for, else what a quarter of the free memory holds, between 512 and 8 contexts of the trained length."""
    if spec.n_cells is not None:
        return max(1, spec.n_cells)
    n_least = min(_N_CELLS_MIN, facts.info.n_ctx_train)
    return max(n_least, min(n_cells_in(free_bytes // 4, spec, facts), 8 * facts.info.n_ctx_train))


def n_cells_in(n_bytes: float, spec: ModelSpec, facts: Facts) -> int:
    """Return how many cells have room in so much memory; without attention a token takes none, and they are as many as one likes."""
    return int(n_bytes / per_cell) if (per_cell := bytes_per_cell(spec, facts)) else sys.maxsize


def check_memory(spec: ModelSpec, facts: Facts, memory_bytes: int, share: float = 1.0) -> None:
    """Refuse cells for which the machine has no memory at all: the kernel would grant them, and end the process when they are filled.

    Only where every layer keeps every cell, so that their size is known; `share` of them lies there. Raises: LoadFailed.
    """
    wanted = 0 if spec.n_cells is None else share * spec.n_cells * bytes_per_cell(spec, facts)
    if facts.keeps_all and wanted > memory_bytes > 0:
        raise LoadFailed(
            f"{spec.n_cells} cells of {facts.info.name} take {wanted / 2**30:.0f} GiB, and this machine has {memory_bytes / 2**30:.0f}: "
            "ask for fewer (--ctx-size)"
        )


def bytes_per_cell(spec: ModelSpec, facts: Facts) -> float:
    """Return the bytes of one token's keys and values; 0 where no layer keeps any."""
    bytes_k = _CACHE_TYPES[spec.cache_type_k][1] * facts.n_head_k
    bytes_v = _CACHE_TYPES[spec.cache_type_v][1] * facts.n_head_v
    return facts.n_heads_kv * (bytes_k + bytes_v)


def context_params(lib: Any, spec: ModelSpec, facts: Facts, *, free_bytes: int, gpu: bool) -> Any:
    params = lib.llama_context_default_params()
    params.n_seq_max = n_sequences(spec, facts)
    params.n_ctx = n_cells(spec, facts, free_bytes)
    params.n_ubatch = min(spec.n_rows_physical, spec.n_rows_max)
    # llama.cpp finds cells for all pieces of a step before it computes the first. Where a window slides in a pool it frees cells for the
    # later ones meanwhile, for good, that the rows of earlier ones still attend to (llama_kv_cache::prepare): so a step is one piece there.
    params.n_batch = params.n_ubatch if facts.has_window else spec.n_rows_max
    # llama.cpp's output buffer has a row for each slot at least, and asserts that the limit of outputs allows them.
    params.n_outputs_max = max(spec.n_rows_max, params.n_seq_max)
    params.n_outputs_max_per_seq = 0  # as many as outputs
    params.n_threads = spec.n_threads or machine.n_cores()
    params.n_threads_batch = spec.n_threads_batch or params.n_threads
    params.type_k = _CACHE_TYPES[spec.cache_type_k][0]
    params.type_v = _CACHE_TYPES[spec.cache_type_v][0]
    params.flash_attn_type = _FLASH_ATTENTION[spec.flash_attention]
    params.kv_unified = layout_of(spec) is KvLayout.UNIFIED
    # With it a window's cells would still be overwritten once a neighbour is dropped, so that it buys no certainty for its memory.
    params.swa_full = False
    params.offload_kqv = params.op_offload = gpu
    params.embeddings = False
    params.no_perf = True
    return params
