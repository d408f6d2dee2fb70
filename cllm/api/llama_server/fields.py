"""What requests of llama-server's surface have in common."""

from __future__ import annotations

from cllm.api.context import Context
from cllm.api.sampling_fields import SamplingFields, Wanted
from cllm.errors import InvalidRequest
from cllm.serve.engine import ServedModel


def wanted_once(context: Context, body: SamplingFields, model: ServedModel) -> Wanted:
    """What a request asks, of which each prompt gets one answer, and a long one where nothing bounds it. Raises: InvalidRequest."""
    asked = context.wanted(body, model, max_tokens=None)
    if asked.n != 1:
        raise InvalidRequest("n: this endpoint gives one answer to each prompt; /v1/completions gives several", param="n")
    return asked
