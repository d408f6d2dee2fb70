"""What requests of llama-server's surface have in common."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import attrs
from msgspec import Meta

from cllm.api.context import Context
from cllm.api.sampling_fields import SamplingFields, Wanted
from cllm.errors import InvalidRequest
from cllm.serve.engine import ServedModel

LinesMs: TypeAlias = Annotated[int, Meta(ge=-1, le=1 << 31)]
"""`t_max_predict_ms`: so long after its first token an answer ends that has the end of a line; 0 and -1: it need not."""


def wanted_once(context: Context, body: SamplingFields, model: ServedModel, lines_ms: int | None) -> Wanted:
    """What a request asks, of which each prompt gets one answer, and a long one where nothing bounds it. Raises: InvalidRequest."""
    asked = context.wanted(body, model, max_tokens=None)
    if asked.n != 1:
        raise InvalidRequest("n: this endpoint gives one answer to each prompt; /v1/completions gives several", param="n")
    if lines_ms is None or lines_ms <= 0:
        return asked
    return attrs.evolve(asked, stopping=attrs.evolve(asked.stopping, lines_s=lines_ms / 1000))
