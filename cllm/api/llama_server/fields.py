"""What requests of llama-server's surface have in common."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

from cllm.api.context import Context
from cllm.api.sampling_fields import SamplingFields, Wanted
from cllm.errors import InvalidRequest
from cllm.serve.engine import ServedModel

NPredict: TypeAlias = Annotated[int, Meta(ge=-1, le=1 << 53)]  # -1: no limit, 0: only the prompt is computed


def wanted_once(context: Context, body: SamplingFields, model: ServedModel) -> Wanted:
    """What a request asks, of which each prompt gets one answer, and a long one where nothing bounds it. Raises: InvalidRequest."""
    if body.n_predict == -1:
        body.n_predict = None
    asked = context.wanted(body, model, max_tokens=None)
    if asked.n != 1:
        raise InvalidRequest("n: this endpoint gives one answer to each prompt; /v1/completions gives several", param="n")
    return asked
