"""Checks that the installed llama-cpp-python matches the one this package was written to.

llama-cpp-python mirrors C structs by hand. Where a field is missing or too many, values land in their neighbours and nothing says
so. What C returns by value is therefore compared, field by field, with llama.cpp's documented defaults: a shifted field shows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Any, Final

PACKAGE_VERSION: Final = "0.3.36"
LIBRARY_VERSION: Final = "0.5.0"  # of llama.cpp itself, which LLAMA_CPP_LIB_PATH may exchange

SIZES: Final[Mapping[str, int]] = {
    "llama_model_params": 80,
    "llama_context_params": 160,
    "llama_batch": 56,
}
"""Bytes on the 64-bit platforms, where long and pointers agree."""

MODEL_DEFAULTS: Final[Mapping[str, object]] = {
    "devices": None,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "progress_callback_user_data": None,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
}
CONTEXT_DEFAULTS: Final[Mapping[str, object]] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "pooling_type": -1,
    "flash_attn_type": -1,
    "yarn_ext_factor": -1.0,
    "yarn_orig_ctx": 0,
    "defrag_thold": -1.0,
    "type_k": 1,
    "type_v": 1,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "n_samplers": 0,
    "ctx_other": None,
}


def what_is_wrong(lib: Any) -> str | None:
    """Return one line that says how `lib` (the module ``llama_cpp``) differs from what is expected, None when it does not."""
    return next(_differences(lib), None)


def _differences(lib: Any) -> Iterator[str]:
    yield from _version_differences(lib)
    for name, expected in SIZES.items():
        if (size := ctypes.sizeof(getattr(lib, name))) != expected:
            yield f"struct {name} has {size} bytes in llama-cpp-python, {expected} were expected"
    yield from _default_differences("llama_model_params", lib.llama_model_default_params(), MODEL_DEFAULTS)
    yield from _default_differences("llama_context_params", lib.llama_context_default_params(), CONTEXT_DEFAULTS)
    yield from _batch_differences(lib)


def _version_differences(lib: Any) -> Iterator[str]:
    if lib.__version__ != PACKAGE_VERSION:
        yield f"llama-cpp-python is {lib.__version__}, this version of cLLM needs {PACKAGE_VERSION}"
    version = ctypes.CFUNCTYPE(ctypes.c_char_p)(("llama_version", lib.llama_cpp._lib))().decode()
    if not version.startswith(LIBRARY_VERSION):
        yield f"the llama.cpp library is {version}, llama-cpp-python {PACKAGE_VERSION} goes with {LIBRARY_VERSION}"


def _default_differences(struct: str, params: Any, expected: Mapping[str, object]) -> Iterator[str]:
    for field, value in expected.items():
        if (found := getattr(params, field, "missing")) != value:
            yield f"{struct}.{field} is {found!r} by default, {value!r} was expected: the struct's layout has changed"


def _batch_differences(lib: Any) -> Iterator[str]:
    batch = lib.llama_batch_init(2, 0, 1)  # all columns but embd are allocated, and seq_id ends with NULL
    try:
        columns = all((batch.token, batch.pos, batch.n_seq_id, batch.seq_id, batch.logits))
        if not columns or batch.embd or batch.seq_id[2]:
            yield "llama_batch comes with other columns than expected: the struct's layout has changed"
    finally:
        lib.llama_batch_free(batch)
