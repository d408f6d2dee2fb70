"""Draws the next token of every sequence in a step from the model's logits."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from cllm.backend import Logits
from cllm.engine import truncation
from cllm.engine.dry import Dry, dry_breaker_tokens
from cllm.engine.events import TokenLogprob
from cllm.engine.logprobs import RawLogits
from cllm.engine.noise import coin, grid_of, row_key
from cllm.engine.params import SamplingParams, SamplingProfile
from cllm.engine.penalties import TokenCounts, presence_and_frequency, repeat
from cllm.engine.truncation import Candidates

__all__ = ["Sampled", "Sampler", "dry_breaker_tokens", "sample"]


@attrs.define
class Sampled:
    """What `sample` drew."""

    tokens: list[int]  # one for each row
    invalid: list[int]  # rows whose logits held NaN or +inf or nothing finite; their token is meaningless
    logprobs: list[TokenLogprob | None] | None  # None when no row asked; else None for the rows that did not, and for invalid ones


def _id_array(tokens: frozenset[int]) -> npt.NDArray[np.int64]:
    return np.array(sorted(tokens), np.int64)


@attrs.define(eq=False, init=False)
class Sampler:
    """One sequence's sampling state. It follows the sequence, never the slot, and can be rebuilt from its tokens, except `mu`.

    `tokens` is the sequence's own live list, prompt and generated; whoever appends to it calls `observe`.
    """

    params: SamplingParams
    seed: int
    tokens: list[int]
    n_prompt: int
    n_logprobs: int | None
    min_tokens: int
    mu: float  # mirostat's running limit, bits
    mask: npt.NDArray[np.uint32] | None  # bit i % 32 of word i // 32: whether token i is allowed; None: all are
    _generated: TokenCounts | None
    _recent: TokenCounts | None
    _dry: Dry | None
    _biased: npt.NDArray[np.int64]
    _biases: npt.NDArray[np.float32]
    _never: npt.NDArray[np.int64]
    _not_yet: npt.NDArray[np.int64]

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        tokens: list[int],
        n_prompt: int,
        n_logprobs: int | None = None,
        end_tokens: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        ignore_eos: bool = False,
        barred_until_min: frozenset[int] = frozenset(),
        dry_breakers: frozenset[int] = frozenset(),
    ) -> None:
        self.params = params
        self.seed = seed
        self.tokens = tokens
        self.n_prompt = n_prompt
        self.n_logprobs = n_logprobs
        self.min_tokens = min_tokens
        self.mu = 2 * params.mirostat_tau
        self.mask = None
        self._biased = np.array([token for token, _ in params.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._never = _id_array(end_tokens if ignore_eos else frozenset())
        self._not_yet = _id_array(end_tokens | barred_until_min)
        self._generated = TokenCounts.of(tokens[n_prompt:]) if params.presence_penalty or params.frequency_penalty else None
        repeats = params.repeat_penalty != 1 and params.repeat_last_n > 0
        self._recent = TokenCounts.of(tokens[-params.repeat_last_n :]) if repeats else None
        dries = params.dry_multiplier and params.dry_base >= 1 and params.dry_penalty_last_n != 0
        self._dry = Dry.of(tokens, dry_breakers, params.dry_penalty_last_n) if dries else None

    def observe(self, token: int) -> None:
        """Take note of `token`, which was just appended to `tokens`."""
        if self._generated is not None:
            self._generated.add(token)
        if self._recent is not None:
            self._recent.add(token)
            if len(self.tokens) > self.params.repeat_last_n:
                self._recent.remove(self.tokens[-self.params.repeat_last_n - 1])
        if self._dry is not None:
            self._dry.observe(token)

    @property
    def key(self) -> int:
        """The key of the next token's noise."""
        return row_key(self.seed, len(self.tokens))

    @property
    def adjusts(self) -> bool:
        """Whether `adjust` would change anything now."""
        counters = self._generated or self._recent or self._dry
        return counters is not None or self.mask is not None or len(self._biased) > 0 or len(self._barred()) > 0

    def _barred(self) -> npt.NDArray[np.int64]:
        return self._not_yet if len(self.tokens) - self.n_prompt < self.min_tokens else self._never

    def adjust(self, logits: Logits) -> None:
        """Apply penalties, bias and mask to the row in place. A NaN or +inf anywhere but under the mask leaves one behind."""
        if self.params.profile is SamplingProfile.OPENAI:
            self._penalise(logits)
            self._bias(logits)
        else:
            self._bias(logits)
            self._penalise(logits)
        if self.mask is not None:
            apply_mask(logits, self.mask)

    def _bias(self, logits: Logits) -> None:
        if len(self._biased):
            np.add.at(logits, self._biased, self._biases)
        barred = self._barred()
        if len(barred):
            logits[barred] += np.float32(-np.inf)

    def _penalise(self, logits: Logits) -> None:
        params = self.params
        if self._recent is not None:
            repeat(logits, self._recent.ids, params.repeat_penalty)
        if self._generated is not None:
            presence_and_frequency(logits, self._generated, params.presence_penalty, params.frequency_penalty)
        if self._dry is not None:
            self._dry.penalise(logits, params.dry_multiplier, params.dry_base, params.dry_allowed_length)


def apply_mask(logits: Logits, mask: npt.NDArray[np.uint32]) -> None:
    """Set the logits of tokens to -inf whose bit is 0, or missing at the end."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(logits)]
    logits[: len(bits)][bits == 0] = -np.inf
    logits[len(bits) :] = -np.inf


def sample(logits: Logits, samplers: Sequence[Sampler]) -> Sampled:
    """Draw a token for each row of `logits` (n_rows, n_vocab), which may be overwritten; `samplers` in the order of the rows."""
    sampled = Sampled([], [], None if all(s.n_logprobs is None for s in samplers) else [])
    for row, sampler in enumerate(samplers):
        token, logprob = _sample_row(logits[row], sampler)
        sampled.tokens.append(token or 0)
        if token is None:
            sampled.invalid.append(row)
        if sampled.logprobs is not None:
            sampled.logprobs.append(logprob)
    return sampled


def _sample_row(logits: Logits, sampler: Sampler) -> tuple[int | None, TokenLogprob | None]:
    if not np.isfinite(logits.max()):
        return None, None
    raw = None if sampler.n_logprobs is None else RawLogits.of(logits.copy(), sampler.n_logprobs)
    sampler.adjust(logits)
    if not np.isfinite(logits.max()):
        return None, None
    token = int(logits.argmax()) if sampler.params.temperature == 0 else draw(Candidates.of(logits), sampler, len(logits))
    return token, None if raw is None else raw.of_token(token)


def truncate(c: Candidates, params: SamplingParams, key: int) -> Candidates:
    """Apply the truncations in the order that both profiles have in common."""
    if params.top_n_sigma > 0:
        c = truncation.top_n_sigma(c, params.top_n_sigma)
    if params.top_k > 0:
        c = c.first(params.top_k)
    if params.typical_p < 1:
        c = truncation.typical_p(c, params.typical_p)
    if params.top_p < 1:
        c = truncation.top_p(c, params.top_p)
    if params.min_p > 0:
        c = truncation.min_p(c, params.min_p)
    if params.xtc_probability > 0 and params.xtc_threshold <= 0.5 and coin(key) <= params.xtc_probability:
        c = truncation.xtc(c, params.xtc_threshold)
    return c


def heat(c: Candidates, params: SamplingParams) -> Candidates:
    """Divide the logits by the temperature."""
    temperature = params.temperature
    if params.dynatemp_range > 0:
        temperature = truncation.dynamic_temperature(c, temperature, params.dynatemp_range, params.dynatemp_exponent)
    return Candidates(c.ids, (c.logits - c.logits[0]) / max(temperature, 1e-9))


def draw(c: Candidates, sampler: Sampler, n_vocab: int) -> int:
    """Truncate and heat the candidates of one row as its parameters say, and draw one."""
    params = sampler.params
    key = sampler.key
    if params.mirostat:
        c = heat(c, params)
        c = truncation.mirostat_1(c, sampler.mu, n_vocab) if params.mirostat == 1 else truncation.mirostat_2(c, sampler.mu)
    elif params.profile is SamplingProfile.OPENAI:
        c = truncate(heat(c, params), params, key)
    else:
        c = heat(truncate(c, params, key), params)
    times = grid_of(n_vocab).times(np.array([key], np.uint64), c.ids)
    place = int(np.argmax(c.logits - np.log(times)))
    if params.mirostat:
        surprise = -float(np.log2(c.probs()[place]))
        sampler.mu -= params.mirostat_eta * (surprise - params.mirostat_tau)
    return int(c.ids[place])
