"""One sequence's sampling state: what its parameters and its own tokens do to its next logits."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence as Seq
from functools import partial

import attrs
import numpy as np
import numpy.typing as npt

from cllm.backend import Draw, Logits, Vocabulary
from cllm.engine.sampling.dry import TokenSet, dry_breaker_tokens
from cllm.engine.sampling.history import Breakers, History, heeds_history
from cllm.engine.sampling.noise import row_key, sequence_key
from cllm.engine.sampling.params import SamplingParams, SamplingProfile, StopParams
from cllm.text.grammar import GrammarState, Words

TEMPERATURE_MIN = 1e-6  # what is below is as good as greedy, and would overflow


def _id_array(tokens: frozenset[int]) -> npt.NDArray[np.int64]:
    return np.array(sorted(token for token in tokens if token >= 0), np.int64)


@attrs.define(eq=False, init=False)
class Sampler:
    """One sequence's sampling state. It follows the sequence, never the slot, and can be rebuilt from its tokens, except `mu`.

    `tokens` is the sequence's own live list, prompt and generated; whoever appends to it calls `observe`.
    """

    params: SamplingParams
    seed: int
    sequence_key: int  # of its noise
    tokens: list[int]
    n_prompt: int
    n_logprobs: int | None
    min_tokens: int
    mu: float  # mirostat's running limit, bits
    temperature: float  # > 0 also where `is_greedy`
    truncation_temperature: float  # at which the truncations look at the logits
    log_min_p: float  # -inf: off
    is_greedy: bool
    is_plain: bool  # whether nothing but penalties, bias, mask, temperature, top_n_sigma, top_k, top_p and min_p is on
    grammar: GrammarState | None
    mask: Words | None  # bit i % 32 of word i // 32: whether token i is allowed; None: all are
    grammar_waits: bool  # the grammar holds what comes later, and knows nothing of what comes now
    _forced: deque[int]
    _heeds_history: bool
    _breakers: Breakers
    _history: History | None  # None: not read yet
    _biased: npt.NDArray[np.int64]
    _biases: npt.NDArray[np.float32]
    _banned: npt.NDArray[np.int64]  # by a bias
    _never: npt.NDArray[np.int64]
    _not_yet: npt.NDArray[np.int64]
    _adjusts_always: bool
    _draw: Draw | None  # by which a model that can may draw all that is not held to something else

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
        dry_breakers: Breakers = frozenset,
        grammar: GrammarState | None = None,
    ) -> None:
        self.params = params
        self.seed = seed
        self.sequence_key = sequence_key(seed)
        self.tokens = tokens
        self.n_prompt = n_prompt
        self.n_logprobs = n_logprobs
        self.min_tokens = min_tokens
        self.mu = 2 * params.mirostat_tau
        self.grammar = grammar
        self.grammar_waits = False
        self.mask = None
        self._forced = deque()
        self.temperature = max(params.temperature, TEMPERATURE_MIN)
        self.truncation_temperature = self.temperature if params.profile is SamplingProfile.OPENAI else 1.0
        self.log_min_p = math.log(min(params.min_p, 1.0)) if params.min_p > 0 else -math.inf
        self.is_greedy = params.temperature <= 0
        xtc = params.xtc_probability > 0 and params.xtc_threshold <= 0.5
        self.is_plain = not (params.mirostat or params.dynatemp_range > 0 or params.typical_p < 1 or xtc)
        self._biased = np.array([token for token, _ in params.logit_bias if token >= 0], np.int64)
        self._biases = np.array([bias for token, bias in params.logit_bias if token >= 0], np.float32)
        self._banned = self._biased[np.isneginf(self._biases)]
        self._never = _id_array(end_tokens - barred_until_min if ignore_eos else frozenset())  # who names one wants it
        self._not_yet = _id_array(end_tokens | barred_until_min)
        self._heeds_history = heeds_history(params)
        self._breakers = dry_breakers
        self._history = None
        self._adjusts_always = self._heeds_history or bool(params.logit_bias)
        needs_logits = self._adjusts_always or grammar is not None or n_logprobs is not None or len(self._never) or params.top_n_sigma > 0
        self._draw = self._draw_of(params) if self.is_plain and not needs_logits else None

    def _draw_of(self, params: SamplingParams) -> Draw:
        if self.is_greedy:
            return Draw(temperature=1.0, truncation_temperature=1.0, top_k=1, top_p=1.0, min_p=0.0)
        return Draw(self.temperature, self.truncation_temperature, max(params.top_k, 0), min(params.top_p, 1.0), params.min_p)

    def observe(self, token: int) -> None:
        """Take note of `token`, which was just appended to `tokens`. What was forced is no part of what the grammar holds."""
        is_forced = bool(self._forced)
        if is_forced:
            self._forced.popleft()
        if self._history is not None:
            self._history.observe(self.tokens)
        if self.grammar is not None and not self.grammar_waits and not is_forced:
            self.grammar.accept(token)

    @property
    def due(self) -> int | None:
        """The token that comes next whatever the logits, if there is one."""
        return self._forced[0] if self._forced else None

    def be_told(self, *, due: int | None, mask: Words | None, grammar_waits: bool) -> None:
        """Take what holds for the next token alone from another process, where the sequence's grammar and transcript are."""
        self._forced.clear()
        if due is not None:
            self._forced.append(due)
        self.mask = mask
        self.grammar_waits = grammar_waits

    def force(self, tokens: Seq[int]) -> None:
        """Let the next tokens be these, whatever the logits; their logprobs are the model's all the same."""
        self._forced.extend(tokens)

    def draw_by_model(self) -> Draw | None:
        """Return how a model that can draws the next token; None where nothing but its logits will do."""
        if self._forced or self.mask is not None or self.grammar_waits or len(self.tokens) - self.n_prompt < self.min_tokens:
            return None
        return self._draw

    @property
    def never_draws_by_model(self) -> bool:
        """Whether `draw_by_model` tells none for any of its tokens."""
        return self._draw is None

    @property
    def key(self) -> int:
        """The key of the next token's noise."""
        return row_key(self.seed, len(self.tokens))

    @property
    def adjusts(self) -> bool:
        """Whether `adjust` would change anything now."""
        masked = self.grammar is not None or self.mask is not None
        return self._adjusts_always or masked or bool(self._forced) or len(self._barred()) > 0

    def _barred(self) -> npt.NDArray[np.int64]:
        if self.grammar_waits:
            return self._not_yet  # an answer that ended now would lack what it is held to
        barred = self._not_yet if len(self.tokens) - self.n_prompt < self.min_tokens else self._never
        if self.mask is not None and len(barred) and not _allows_others(self.mask, self._with_banned(barred)):
            return barred[:0]  # a grammar that is at its end knows better than a request for more
        return barred

    def is_contradicted(self) -> bool:
        """Whether what may not be drawn, by bias or yet, is all that the grammar allows next."""
        if self.grammar is None or self.grammar_waits:
            return False
        self.mask = self.grammar.mask()
        return not _allows_others(self.mask, self._with_banned(self._barred()))

    def _with_banned(self, barred: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.concatenate([barred, self._banned]) if len(self._banned) else barred

    def adjust(self, logits: Logits) -> None:
        """Apply penalties, bias and mask to the row in place, or what is forced. A row with a NaN or +inf keeps one."""
        if self._forced and np.isfinite(logits.max()):
            logits.fill(-np.inf)
            logits[self._forced[0]] = 0.0
            return
        if self.grammar is not None:
            self.mask = None if self.grammar_waits else self.grammar.mask()
        if self.params.profile is SamplingProfile.OPENAI:
            self._penalise(logits)
            self._bias(logits)
        else:
            self._bias(logits)
            self._penalise(logits)
        if self.mask is not None and np.isfinite(logits.max()):
            apply_mask(logits, self.mask)

    def _bias(self, logits: Logits) -> None:
        if len(self._biased):
            known = self._biased < len(logits)  # a request's tokens need not exist, and must not fail the batch
            np.add.at(logits, self._biased[known], self._biases[known])
        barred = self._barred()
        if len(barred):
            logits[barred[barred < len(logits)]] += np.float32(-np.inf)

    def _penalise(self, logits: Logits) -> None:
        if not self._heeds_history:
            return
        if self._history is None:
            self._history = History.of(self.params, self.tokens, self.n_prompt, self._breakers)
        self._history.penalise(logits)


def make_sampler(
    params: SamplingParams,
    stopping: StopParams,
    vocabulary: Vocabulary,
    *,
    seed: int,
    tokens: list[int],
    n_prompt: int,
    n_logprobs: int | None,
    dry_breakers: TokenSet | None = None,
    grammar: GrammarState | None = None,
) -> Sampler:
    """A sequence's sampler, before its first token or after any. `dry_breakers` are looked for in the step where nobody has before."""
    look_for = partial(dry_breaker_tokens, vocabulary, params.dry_sequence_breakers)
    return Sampler(
        params,
        seed=seed,
        tokens=tokens,
        n_prompt=n_prompt,
        n_logprobs=n_logprobs,
        end_tokens=vocabulary.end_tokens,
        min_tokens=stopping.min_tokens,
        ignore_eos=stopping.ignore_eos,
        barred_until_min=stopping.stop_token_ids,
        dry_breakers=look_for if dry_breakers is None else lambda: dry_breakers,
        grammar=grammar,
    )


# For each byte of a mask what to add to the logits of its eight tokens: a table is faster than unpacking the bits and selecting by them.
_MASK_PENALTIES = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf).astype(np.float32)


def apply_mask(logits: Logits, mask: Words) -> None:
    """Set the logits of tokens to -inf whose bit is 0, or missing at the end."""
    # "clip" saves a check that bytes cannot fail, and with it four fifths of the time: 30 us for 152,000 tokens.
    penalties = np.take(_MASK_PENALTIES, mask.view(np.uint8), axis=0, mode="clip").reshape(-1)[: len(logits)]
    logits[: len(penalties)] += penalties
    logits[len(penalties) :] = -np.inf


def _allows_others(mask: Words, tokens: npt.NDArray[np.int64]) -> bool:
    """Tell whether the mask allows any token but these."""
    others = mask.copy()
    known = tokens[tokens < 32 * len(mask)]
    np.bitwise_and.at(others, known // 32, ~(np.uint32(1) << (known % 32).astype(np.uint32)))
    return bool(others.any())
