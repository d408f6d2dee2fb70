"""Draws the next token of every sequence in a step from the model's logits.

There are four ways, and each row goes the cheapest that its parameters allow:

- *greedy*: the highest logit, the lowest id among equals;
- *shortlist*: a small top_k leaves a short list, on which whatever follows is cheap (`cllm.engine.sampling.shortlist`);
- *race*: the winner among the whole vocabulary, found without looking at most of it (`cllm.engine.sampling.race`);
- *chain*: one truncation after the other on the row itself, then a race, for what fits nothing else (`cllm.engine.sampling.chain`).

All four draw with the same noise, so a token does not depend on the way it was drawn.

The order of the stages. OPENAI: repeat, presence and frequency penalty, DRY, bias, mask, top_n_sigma, temperature, top_k, typical_p,
top_p, min_p, XTC. LLAMA: bias, the penalties, DRY, mask, top_n_sigma, top_k, typical_p, top_p, min_p, XTC, temperature. In both,
mirostat takes the place of all truncations and follows the temperature, as in llama.cpp, and temperature 0 takes the likeliest token
after the mask, whatever the truncations.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import TypeAlias

import attrs
import numpy as np

from cllm.backend import Logits
from cllm.engine.events import TokenLogprob
from cllm.engine.sampling import chain, truncation
from cllm.engine.sampling.dry import dry_breaker_tokens
from cllm.engine.sampling.logprobs import read_raw
from cllm.engine.sampling.noise import Floats, Ids, Keys, row_keys
from cllm.engine.sampling.nucleus import Nucleus
from cllm.engine.sampling.race import Race, win_alone
from cllm.engine.sampling.rows import Rows, Workspace
from cllm.engine.sampling.sampler import Sampler
from cllm.engine.sampling.shortlist import Shortlist, fits, kept

__all__ = ["Sampled", "Sampler", "Workspace", "dry_breaker_tokens", "keys_of", "sample"]

Places: TypeAlias = list[int]
_Way: TypeAlias = Callable[[Rows, Places, list[Sampler]], Ids]

_N_ROWS_AT_ONCE = 32  # measured at 64: 8 take a fifth longer, by the calls; 64 take as long, and twice the scratch memory
_CACHE_BYTES = 1 << 24  # of a step's logits; more of them will not be found in the cache


@attrs.define
class Sampled:
    """What `sample` drew."""

    tokens: list[int]  # one for each row
    invalid: list[int]  # rows whose logits held NaN or +inf or nothing finite; their token is meaningless
    logprobs: list[TokenLogprob | None] | None  # None when no row asked; else None for the rows that did not, and for invalid ones


class _ThreadsWorkspace(threading.local):
    def __init__(self) -> None:
        self.workspace = Workspace()


_default = _ThreadsWorkspace()


def sample(logits: Logits, samplers: Seq[Sampler], workspace: Workspace | None = None) -> Sampled:
    """Draw a token for each row of `logits` (n_rows, n_vocab), which may be overwritten; `samplers` in the order of the rows.

    A row's token depends on nothing but that row and its sampler. Different rows may be sampled in different threads at once, each
    with its own workspace (without one, the thread's own is used).
    """
    work = workspace or _default.workspace
    logits = np.ascontiguousarray(logits)
    sampled = Sampled([], [], None if all(s.n_logprobs is None for s in samplers) else [])
    with np.errstate(all="ignore"):  # invalid rows are told by their maximum, and exp(-inf) is meant
        if sampled.logprobs is None and all(s.is_greedy for s in samplers):
            _sample_greedy(logits, samplers, sampled)
        elif sampled.logprobs is None and len(samplers) == 1:
            _sample_alone(logits, samplers[0], work, sampled)
        else:
            for start in range(0, len(samplers), _N_ROWS_AT_ONCE):
                part = slice(start, start + _N_ROWS_AT_ONCE)
                _sample_part(logits[part], samplers[part], work, sampled, is_far=logits.nbytes > _CACHE_BYTES)
    return sampled


def _sample_greedy(logits: Logits, samplers: Seq[Sampler], sampled: Sampled) -> None:
    for row, sampler in enumerate(samplers):
        if sampler.adjusts:
            sampler.adjust(logits[row])
    tokens = logits.argmax(axis=1)  # of a row with NaN the first NaN
    sampled.tokens += tokens.tolist()
    sampled.invalid += np.flatnonzero(~np.isfinite(logits[np.arange(len(tokens)), tokens])).tolist()


def _sample_alone(logits: Logits, sampler: Sampler, work: Workspace, sampled: Sampled) -> None:
    if sampler.adjusts:
        sampler.adjust(logits[0])
    rows = Rows.of(logits, work)
    is_valid = math.isfinite(rows.tops[0])
    sampled.tokens.append(int(_way(sampler, rows.grid.n_columns)(rows, [0], [sampler])[0]) if is_valid else 0)
    if not is_valid:
        sampled.invalid.append(0)


def _sample_part(logits: Logits, samplers: Seq[Sampler], work: Workspace, sampled: Sampled, *, is_far: bool) -> None:
    """Draw for a few rows at once and append to `sampled`."""
    for row, sampler in enumerate(samplers):
        if sampler.n_logprobs is None and sampler.adjusts:  # nobody asks what the row was: it is read once
            sampler.adjust(logits[row])
    rows = Rows.of(logits, work, is_far=is_far)
    changing = [s.n_logprobs is not None and s.adjusts for s in samplers]
    raws = read_raw(rows, {row: s.n_logprobs for row, s in enumerate(samplers) if s.n_logprobs is not None}, changing)
    for row, sampler in enumerate(samplers):
        if changing[row]:
            sampler.adjust(logits[row])
            rows.reread(row)
    tokens = np.zeros(len(samplers), np.int64)
    valid = np.isfinite(rows.tops)
    for way, places in _ways(rows, np.flatnonzero(valid).tolist(), samplers).items():
        tokens[places] = way(rows, places, [samplers[place] for place in places])
    n_before = len(sampled.tokens)
    sampled.tokens += tokens.tolist()
    sampled.invalid += (np.flatnonzero(~valid) + n_before).tolist()
    if sampled.logprobs is not None:
        drawn = [raws[row].of_token(int(tokens[row])) if valid[row] and row in raws else None for row in range(len(samplers))]
        sampled.logprobs += drawn


def _ways(rows: Rows, places: Places, samplers: Seq[Sampler]) -> dict[_Way, Places]:
    """Sort the rows by the way that they are drawn."""
    ways: dict[_Way, Places] = {}
    for place in places:
        ways.setdefault(_way(samplers[place], rows.grid.n_columns), []).append(place)
    return ways


def _way(sampler: Sampler, n_columns: int) -> _Way:
    if sampler.is_greedy:
        return _take_likeliest
    if not sampler.is_plain:
        return _draw_by_chain
    return _draw_from_shortlists if fits(sampler.params.top_k, n_columns) else _draw_by_race


def _take_likeliest(rows: Rows, places: Places, samplers: list[Sampler]) -> Ids:
    return np.array([rows.logits[place].argmax() for place in places])


def _draw_from_shortlists(rows: Rows, places: Places, samplers: list[Sampler]) -> Ids:
    tokens = np.zeros(len(places), np.int64)
    for k in {s.params.top_k for s in samplers}:
        which = [i for i, s in enumerate(samplers) if s.params.top_k == k]
        tokens[which] = _draw_from_equal_shortlists(rows, [places[i] for i in which], [samplers[i] for i in which], k)
    return tokens


def _draw_from_equal_shortlists(rows: Rows, places: Places, samplers: list[Sampler], k: int) -> Ids:
    _cut_by_sigma(rows, places, samplers)
    shortlist = Shortlist.of(rows, np.array(places), k)
    keep = kept(
        shortlist.logits,
        _floats([s.truncation_temperature for s in samplers])[:, None],
        _floats([s.params.top_p for s in samplers])[:, None],
        _floats([s.log_min_p for s in samplers])[:, None],
    )
    return shortlist.draw(rows.grid, keys_of(samplers), keep, _floats([s.temperature for s in samplers])[:, None])


def _draw_by_race(rows: Rows, places: Places, samplers: list[Sampler]) -> Ids:
    _cut_by_sigma(rows, places, samplers)
    _cut_by_rank(rows, places, samplers)
    members = np.array(places)
    truncation_temperatures = _floats([s.truncation_temperature for s in samplers])
    floor = rows.tops[members] + _floats([s.log_min_p for s in samplers]) * truncation_temperatures
    nucleus = Nucleus(rows, members, _floats([s.params.top_p for s in samplers]), truncation_temperatures)
    running = np.arange(len(members))
    keys = keys_of(samplers)
    if len(members) == 1 and floor[0] == -np.inf:
        winners = np.array([win_alone(rows, places[0], keys[0], samplers[0].temperature)])
        if nucleus.holds(running, winners)[0]:
            return winners
    race = Race.of(rows, members, keys, _floats([s.temperature for s in samplers]), floor)
    while len(running):
        race.run(running)
        running = _run_few_again(race, nucleus, running[~nucleus.holds(running, race.winners[running])])
    return race.winners


def _run_few_again(race: Race, nucleus: Nucleus, outside: Ids) -> Ids:
    """Settle the members whose nucleus is known to be small; return the others, without the tokens that are known to be outside."""
    left = []
    for place in outside.tolist():
        inside = nucleus.listed(place, int(race.winners[place]))
        if inside is not None:
            race.run_among(place, inside)
        else:
            race.exclude_from(place)
            left.append(place)
    return np.array(left, np.int64)


def _draw_by_chain(rows: Rows, places: Places, samplers: list[Sampler]) -> Ids:
    truncated = [i for i, s in enumerate(samplers) if not s.params.mirostat]
    _cut_by_sigma(rows, [places[i] for i in truncated], [samplers[i] for i in truncated])
    return np.array([chain.draw(rows, place, sampler) for place, sampler in zip(places, samplers, strict=True)])


def _cut_by_sigma(rows: Rows, places: Places, samplers: list[Sampler]) -> None:
    for place, sampler in zip(places, samplers, strict=True):
        if sampler.params.top_n_sigma > 0:
            truncation.top_n_sigma(rows.logits[place], sampler.params.top_n_sigma)
            rows.reread(place)


def _cut_by_rank(rows: Rows, places: Places, samplers: list[Sampler]) -> None:
    """Apply the top_k that are too large for a list."""
    for place, sampler in zip(places, samplers, strict=True):
        if 0 < sampler.params.top_k < rows.grid.n_vocab and not fits(sampler.params.top_k, rows.grid.n_columns):
            truncation.top_k(rows.logits[place], sampler.params.top_k)
            rows.reread(place)


def keys_of(samplers: Seq[Sampler], n_tokens: Seq[int] | None = None) -> Keys:
    """Return the keys of the samplers' next tokens, before which their sequences have `n_tokens`; None: as many as they have now."""
    return row_keys([s.sequence_key for s in samplers], [len(s.tokens) for s in samplers] if n_tokens is None else list(n_tokens))


def _floats(values: list[float]) -> Floats:
    return np.array(values, np.float64)
