"""LoRA adapters: loaded once for a model, and active in every context that is made on it."""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from typing import Any

import attrs

from cllm.backend import Lora
from cllm.errors import LoadFailed
from cllm_llamacpp.failure import load_failed


@attrs.frozen
class Adapters:
    """The adapters of one model, which go by its handles."""

    lib: Any
    handles: tuple[Any, ...]
    scales: tuple[float, ...]

    def activate(self, context: Any) -> None:
        n = len(self.handles)
        if n:
            pointers = (self.lib.llama_adapter_lora_p_ctypes * n)(*self.handles)
            self.lib.llama_set_adapters_lora(context, pointers, n, (ctypes.c_float * n)(*self.scales))


def load_adapters(lib: Any, model: Any, loras: tuple[Lora, ...], parts: ExitStack) -> Adapters:
    """Load `loras`, which `parts` frees. Raises: LoadFailed."""
    handles = []
    for lora in loras:
        handle = lib.llama_adapter_lora_init(model, os.fsencode(lora.path))
        if not handle:
            raise load_failed(lora.path, "not a LoRA adapter for this model")
        parts.callback(lib.llama_adapter_lora_free, handle)
        if lib.llama_adapter_get_alora_n_invocation_tokens(handle):
            raise LoadFailed(f"{lora.path}: an activated LoRA, which is to be active behind its invocation alone, is not supported")
        handles.append(handle)
    return Adapters(lib, tuple(handles), tuple(lora.scale for lora in loras))
