"""What the engine tells about a sequence: deltas, then exactly one terminal event."""

from __future__ import annotations

from enum import Enum

import attrs

from cllm.errors import RequestError
from cllm.text.parts import Part


class FinishReason(Enum):
    """Why a sequence ended; the wire names are the API's business."""

    STOP = "stop"  # an end token, a stop token or a stop string
    TOOL_CALLS = "tool_calls"  # the same, of an answer that calls tools
    LENGTH = "length"  # max_tokens, the end of the context, or the deadline after the first token
    CANCELLED = "cancelled"  # nobody waits for it any more


@attrs.define(frozen=False, eq=False)
class TokenLogprob:
    """The model's raw log-probability of one token, and of the likeliest ones at its place, likeliest first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    rank: int | None = None  # 1: no token is likelier; told of a prompt's tokens alone


@attrs.define(eq=False)
class Delta:
    """Tokens that a step added, or scored. `text` lags behind `tokens` while a character or a stop string is undecided.

    Where an answer is read for reasoning and tool calls and holds more than content here, `parts` has all of it, and `text` is empty.
    """

    seq_id: int
    text: str
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None  # one for each token, where asked for
    parts: list[Part] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None  # of the prompt's next tokens, the second of all first; it has no tokens then


@attrs.define(eq=False)
class Usage:
    """Counts and times of one sequence; times in seconds."""

    n_prompt: int
    n_cached: int  # prompt tokens whose cells were not computed for this sequence
    n_generated: int
    queue_s: float  # arrival to admission
    prefill_s: float  # admission to first token
    decode_s: float  # first token to end
    n_preempted: int = 0
    n_reasoning: int = 0  # generated tokens of the reasoning
    is_admitted: bool = True  # False: it left before, and `queue_s` is until then
    has_begun: bool = True  # False: it had no first token, and `prefill_s` is until its end


@attrs.define(eq=False)
class Finished:
    """Terminal: the sequence ended well."""

    seq_id: int
    reason: FinishReason
    stop_reason: str | int | None  # the stop string or token, "timeout", or None
    usage: Usage
    text: str = ""  # text that was still held back
    parts: list[Part] | None = None  # as a delta's


@attrs.define(eq=False)
class Failed:
    """Terminal: the sequence ended badly."""

    seq_id: int
    error: RequestError


Event = Delta | Finished | Failed
