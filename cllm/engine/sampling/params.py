"""What a request may ask of sampling and of stopping: facts, already validated by whoever built them."""

from __future__ import annotations

from enum import Enum
from typing import Final

import attrs


class SamplingProfile(Enum):
    """In which order the truncations are applied: see `cllm.engine.sampling.step`."""

    OPENAI = "openai"
    LLAMA = "llama"  # llama.cpp's own


N_REPEATS_USUAL: Final = 64  # what llama.cpp looks at


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How one sequence's next token is drawn. The defaults leave the model's distribution as it is.

    A field at its default switches its stage off. `temperature` 0 is greedy.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    top_n_sigma: float = 0.0  # 0: off
    repeat_penalty: float = 1.0
    repeat_last_n: int | None = None  # tokens of prompt and generated text that `repeat_penalty` looks at; 0: none; None: nobody said
    presence_penalty: float = 0.0  # counts generated tokens only, as frequency_penalty does
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int | None = None  # None: the whole context
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0  # 0: off
    xtc_threshold: float = 0.1
    mirostat: int = 0  # 0: off, 1, 2
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    dynatemp_range: float = 0.0  # 0: off
    dynatemp_exponent: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, added to its logit); -inf forbids
    profile: SamplingProfile = SamplingProfile.OPENAI

    @property
    def n_repeats(self) -> int:
        """How many of the last tokens `repeat_penalty` looks at, where the sampling is the server's."""
        return N_REPEATS_USUAL if self.repeat_last_n is None else self.repeat_last_n


@attrs.frozen(kw_only=True)
class StopParams:
    """When a sequence ends."""

    max_tokens: int | None = None  # generated tokens at most, 0: only the prompt is computed; None: to the end of the context
    min_tokens: int = 0  # before so many generated tokens nothing but the limit ends it
    stop: tuple[str, ...] = ()  # strings, never part of the text
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False  # the model's end tokens are never drawn
    lines_s: float | None = None  # so long after its first token an answer ends that has the end of a line
