"""Draws from one row by the plain chain of truncations: the way for whatever fits no faster one, and the definition of all of them."""

from __future__ import annotations

import numpy as np

from cllm.engine import truncation
from cllm.engine.noise import coin
from cllm.engine.params import SamplingParams, SamplingProfile
from cllm.engine.rows import Rows
from cllm.engine.sampler import TEMPERATURE_MIN, Sampler
from cllm.engine.shortlist import Shortlist, fits
from cllm.engine.truncation import Candidates

_SLACK = 1e-3  # of a logit: what rounding could take from min_p's own test, which follows


def truncate(c: Candidates, params: SamplingParams, key: int) -> Candidates:
    """Apply the truncations in the order that both profiles have in common."""
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


def heat(c: Candidates, sampler: Sampler) -> Candidates:
    """Divide the logits by the temperature."""
    params, temperature = sampler.params, sampler.temperature
    if params.dynatemp_range > 0:
        temperature = truncation.dynamic_temperature(c, temperature, params.dynatemp_range, params.dynatemp_exponent)
    return Candidates(c.ids, (c.logits - c.logits[0]) / max(temperature, TEMPERATURE_MIN))


def draw(rows: Rows, row: int, sampler: Sampler) -> int:
    """Truncate and heat the tokens of one row as its parameters say, and draw one. top_n_sigma was applied before."""
    params, key = sampler.params, sampler.key
    c = _candidates(rows, row, sampler)
    if params.mirostat:
        c = heat(c, sampler)
        c = truncation.mirostat_1(c, sampler.mu, rows.grid.n_vocab) if params.mirostat == 1 else truncation.mirostat_2(c, sampler.mu)
    elif params.profile is SamplingProfile.OPENAI:
        c = truncate(heat(c, sampler), params, key)
    else:
        c = heat(truncate(c, params, key), sampler)
    times = rows.grid.times(np.array([key], np.uint64), c.ids)
    place = int(np.argmax(c.logits - np.log(times)))
    if params.mirostat:
        surprise = -float(np.log2(c.probs()[place]))
        sampler.mu -= params.mirostat_eta * (surprise - params.mirostat_tau)
    return int(c.ids[place])


def _candidates(rows: Rows, row: int, sampler: Sampler) -> Candidates:
    """Return the tokens in order; those only that min_p or top_k leave where it comes first, which saves sorting them all."""
    params, logits = sampler.params, rows.logits[row]
    if params.mirostat or (params.dynatemp_range > 0 and params.profile is SamplingProfile.OPENAI):
        return Candidates.of(logits)
    if fits(params.top_k, rows.grid.n_columns):
        shortlist = Shortlist.of(rows, np.array([row]), params.top_k)
        c = Candidates(shortlist.ids[0], shortlist.logits[0])
        return c.kept(c.logits > -np.inf)
    if params.typical_p >= 1 and params.top_p >= 1 and params.min_p > 0:
        floor = float(rows.tops[row]) + (sampler.log_min_p - _SLACK) * sampler.truncation_temperature
        return Candidates.of(logits, np.flatnonzero(logits >= floor))
    return Candidates.of(logits)
