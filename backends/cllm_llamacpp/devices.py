"""The GPUs that llama.cpp sees."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import attrs

_TYPES_GPU: Final = (1, 2)  # GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU


@attrs.frozen
class Gpu:
    name: str
    free_bytes: int
    total_bytes: int


def gpus(lib: Any) -> list[Gpu]:
    """Return the GPUs with their memory. llama-cpp-python does not wrap these functions, libllama's dependencies hold them."""
    native = lib.llama_cpp._lib
    count = _function(native, "ggml_backend_dev_count", ctypes.c_size_t)
    get = _function(native, "ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    kind = _function(native, "ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    devices = (get(i) for i in range(count()))
    return [_gpu(native, device) for device in devices if kind(device) in _TYPES_GPU]


def _gpu(native: Any, device: Any) -> Gpu:
    size_p = ctypes.POINTER(ctypes.c_size_t)
    name = _function(native, "ggml_backend_dev_description", ctypes.c_char_p, ctypes.c_void_p)
    memory = _function(native, "ggml_backend_dev_memory", None, ctypes.c_void_p, size_p, size_p)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    memory(device, ctypes.byref(free), ctypes.byref(total))
    return Gpu(name(device).decode("utf-8", "replace"), free.value, total.value)


def _function(native: Any, name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.CFUNCTYPE(result, *arguments)((name, native))
