"""What a sequence's own tokens do to its next logits: the penalties on what was said before, kept up token by token.

To read a long prompt takes milliseconds, so that this is done where it is first wanted, which is in the thread that computes, and never
while requests come in.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

import attrs

from cllm.backend import Logits
from cllm.engine.sampling.dry import Dry
from cllm.engine.sampling.params import SamplingParams
from cllm.engine.sampling.penalties import TokenCounts, presence_and_frequency, repeat

Breakers = Callable[[], AbstractSet[int]]  # the tokens that no repetition reaches across; to find them may take as long


def heeds_history(params: SamplingParams) -> bool:
    """Whether anything of the parameters depends on the tokens."""
    return _counts_generated(params) or _counts_recent(params) or dries(params)


def _counts_generated(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty)


def _counts_recent(params: SamplingParams) -> bool:
    return params.repeat_penalty != 1 and params.n_repeats > 0


def dries(params: SamplingParams) -> bool:
    """Whether repetitions of several tokens are penalised, for which breakers have to be known."""
    return bool(params.dry_multiplier and params.dry_base >= 1 and params.dry_penalty_last_n != 0)


@attrs.define(eq=False)
class History:
    """The counts that the parameters want, of the tokens so far; whoever appends one calls `observe`."""

    _params: SamplingParams
    _generated: TokenCounts | None
    _recent: TokenCounts | None
    _dry: Dry | None

    @classmethod
    def of(cls, params: SamplingParams, tokens: list[int], n_prompt: int, breakers: Breakers) -> History:
        """Return what observing `tokens` one by one gives, of which `n_prompt` were not generated."""
        return cls(
            params,
            generated=TokenCounts.of(tokens[n_prompt:]) if _counts_generated(params) else None,
            recent=TokenCounts.of(tokens[-params.n_repeats :]) if _counts_recent(params) else None,
            dry=Dry.of(tokens, breakers(), params.dry_penalty_last_n) if dries(params) else None,
        )

    def observe(self, tokens: list[int]) -> None:
        """Take note of the last of `tokens`."""
        token = tokens[-1]
        if self._generated is not None:
            self._generated.add(token)
        if self._recent is not None:
            self._recent.add(token)
            if len(tokens) > self._params.n_repeats:
                self._recent.remove(tokens[-self._params.n_repeats - 1])
        if self._dry is not None:
            self._dry.observe(token)

    def penalise(self, logits: Logits) -> None:
        """Apply the penalties to the row in place."""
        params = self._params
        if self._recent is not None:
            repeat(logits, self._recent.ids, params.repeat_penalty)
        if self._generated is not None:
            presence_and_frequency(logits, self._generated, params.presence_penalty, params.frequency_penalty)
        if self._dry is not None:
            self._dry.penalise(logits, params.dry_multiplier, params.dry_base, params.dry_allowed_length)
