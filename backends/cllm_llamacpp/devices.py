"""The GPUs that llama.cpp sees."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import attrs

from cllm import machine

_GPU, _IGPU = 1, 2  # GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU
_WITHOUT_GPU = frozenset({"CPU", "BLAS", "RPC"})  # what any build may have


@attrs.frozen
class Gpu:
    """`device_id` is where it sits on the bus, empty where that is not known; `registry` stands for the backend that shows it."""

    name: str
    free_bytes: int
    total_bytes: int
    is_integrated: bool = False
    device_id: str = ""
    registry: int = 0


class _Props(ctypes.Structure):
    """ggml_backend_dev_props, with room behind it for capabilities that are not read here."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("caps", ctypes.c_byte * 64),
    )


def gpus(lib: Any) -> list[Gpu]:
    """Return the GPUs that llama.cpp takes, in its order, with their memory. llama-cpp-python does not wrap these functions."""
    native = lib.llama_cpp._lib  # libllama's dependencies hold them
    count = _function(native, "ggml_backend_dev_count", ctypes.c_size_t)
    get = _function(native, "ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    kind = _function(native, "ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    devices = (get(i) for i in range(count()))
    return taken([_gpu(native, device) for device in devices if kind(device) in (_GPU, _IGPU)])


def supported(lib: Any) -> list[str]:
    """Return the names of what this build of llama.cpp has for devices beside the processor, whether or not there is one now."""
    native = lib.llama_cpp._lib
    count = _function(native, "ggml_backend_reg_count", ctypes.c_size_t)
    get = _function(native, "ggml_backend_reg_get", ctypes.c_void_p, ctypes.c_size_t)
    name = _function(native, "ggml_backend_reg_name", ctypes.c_char_p, ctypes.c_void_p)
    names = [(name(get(i)) or b"").decode("utf-8", "replace") for i in range(count())]
    return [one for one in names if one not in _WITHOUT_GPU]


def splits_rows(lib: Any, gpu: Gpu) -> bool:
    """Whether a matrix can be split over several such GPUs by its rows. Source: make_gpu_buft_list (llama-model.cpp)."""
    find = _function(lib.llama_cpp._lib, "ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    return bool(gpu.registry and find(gpu.registry, b"ggml_backend_split_buffer_type"))


def taken(found: Sequence[Gpu]) -> list[Gpu]:
    """Return those of the devices that llama.cpp takes: each once, though several backends may show it, and integrated ones, of the first
    backend that shows any, only where there are no others. Source: llama_prepare_model_devices (llama.cpp).
    """
    own = [gpu for gpu in found if not gpu.is_integrated]
    if not own:
        return [gpu for gpu in found if gpu.registry == found[0].registry]
    ids = [gpu.device_id for gpu in own]
    return [gpu for i, gpu in enumerate(own) if not gpu.device_id or gpu.device_id not in ids[:i]]


def _gpu(native: Any, device: Any) -> Gpu:
    props = _Props()
    _function(native, "ggml_backend_dev_get_props", None, ctypes.c_void_p, ctypes.POINTER(_Props))(device, ctypes.byref(props))
    tells_memory = bool(props.memory_total)  # else llama.cpp counts the host's, too: llama_model_base::load_tensors (llama-model.cpp)
    return Gpu(
        name=(props.description or b"").decode("utf-8", "replace"),
        free_bytes=props.memory_free if tells_memory else machine.free_memory_bytes(),
        total_bytes=props.memory_total if tells_memory else machine.memory_bytes(),
        is_integrated=props.type == _IGPU,
        device_id=(props.device_id or b"").decode("utf-8", "replace"),
        registry=_function(native, "ggml_backend_dev_backend_reg", ctypes.c_void_p, ctypes.c_void_p)(device) or 0,
    )


def _function(native: Any, name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.CFUNCTYPE(result, *arguments)((name, native))
