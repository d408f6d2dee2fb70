"""A backend that has other servers with OpenAI's API answer: vLLM, TGI, llama-server, Ollama, another cLLM."""

from __future__ import annotations

from cllm.backend import ModelSpec, OnProgress, Probe, StreamModel
from cllm.errors import LoadAborted
from cllm_backend_upstream.discovery import discover
from cllm_backend_upstream.model import UpstreamModel
from cllm_backend_upstream.options import options_of


class UpstreamBackend:
    """What the entry point names."""

    contract_version = 1  # that it was written to
    knows_models = True  # its models are URLs

    def probe(self) -> Probe:
        """See `Backend.probe`."""
        return Probe(available=True, reason="has other servers answer: --model http://HOST:PORT")

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StreamModel:
        """Ask the upstreams what they serve. See `Backend.load`."""
        options = options_of(spec)
        found = discover(options)
        if not on_progress(1.0):
            raise LoadAborted("the load was asked to stop")
        return UpstreamModel(options, found)
