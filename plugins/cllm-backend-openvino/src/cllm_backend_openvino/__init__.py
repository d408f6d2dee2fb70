"""OpenVINO GenAI behind cLLM's seam: the backend ``openvino``.

Importing this package is instantaneous: OpenVINO is imported by a load.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from cllm.backend import ModelSpec, OnProgress, Probe, StreamModel
from cllm.errors import BackendUnavailable, LoadAborted


class OpenVinoBackend:
    """See `cllm.backend.Backend`. A step of OpenVINO's keeps Python to itself, so that the models want a process of their own."""

    contract_version = 1
    wants_worker = True

    def probe(self) -> Probe:
        """See `Backend.probe`."""
        try:
            return Probe(available=True, reason=f"OpenVINO GenAI {version('openvino-genai')}: llama, qwen2 and qwen3 on CPUs")
        except PackageNotFoundError:
            remedy = f"{sys.executable} -m pip install 'openvino-genai>=2026.4'"
            return Probe(available=False, reason=f"openvino-genai is not installed: {remedy}")

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StreamModel:
        """See `Backend.load`."""
        from cllm_backend_openvino.loading import load

        if not (found := self.probe()).available:  # of which nobody asked: its models have a process of their own
            raise BackendUnavailable(found.reason)
        if not on_progress(0.0):
            raise LoadAborted("the load was asked to stop")
        model = load(spec)
        if not on_progress(1.0):
            model.close()
            raise LoadAborted("the load was asked to stop")
        return model
