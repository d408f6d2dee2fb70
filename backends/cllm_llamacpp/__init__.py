"""llama.cpp behind cLLM's seam: the backends ``llama-cpu`` and ``llama-gpu``.

Importing this package is instantaneous: ``llama_cpp`` is imported by the first probe or load.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cllm_llamacpp.backend import LlamaBackend


def make_cpu_backend() -> LlamaBackend:
    """Return the backend that computes on the CPU alone, whatever llama.cpp was built with."""
    from cllm_llamacpp.backend import LlamaBackend

    return LlamaBackend(gpu=False)


def make_gpu_backend() -> LlamaBackend:
    """Return the backend that puts layers, cache and attention on GPUs."""
    from cllm_llamacpp.backend import LlamaBackend

    return LlamaBackend(gpu=True)
