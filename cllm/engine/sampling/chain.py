"""Draws from one row by the chain of truncations, one after the other: the way for whatever fits no faster one."""

from __future__ import annotations

import math

import numpy as np

from cllm.engine.sampling import truncation
from cllm.engine.sampling.noise import coin
from cllm.engine.sampling.params import SamplingProfile
from cllm.engine.sampling.race import Race
from cllm.engine.sampling.rows import Rows
from cllm.engine.sampling.sampler import TEMPERATURE_MIN, Sampler
from cllm.engine.sampling.shortlist import Shortlist, fits
from cllm.engine.sampling.truncation import Numbers


def draw(rows: Rows, row: int, sampler: Sampler) -> int:
    """Truncate and heat the tokens of one row as its parameters say, and draw one. top_n_sigma was applied before."""
    if sampler.params.mirostat:
        return _draw_by_mirostat(rows, row, sampler)
    heats_first = sampler.params.profile is SamplingProfile.OPENAI
    temperature = heat(rows.logits[row], sampler) if heats_first else 1.0
    ids, logits = None, rows.logits[row]
    if fits(sampler.params.top_k, rows.grid.n_columns):
        shortlist = Shortlist.of(rows, np.array([row]), sampler.params.top_k)
        ids, logits = shortlist.ids[0], shortlist.logits[0]
    elif sampler.params.top_k > 0:
        truncation.top_k(logits, sampler.params.top_k)
    truncate(logits, sampler, temperature)
    if not heats_first:
        temperature = heat(logits, sampler)
    if ids is None:
        return _draw_from_row(rows, row, sampler, temperature)
    times = rows.grid.times(np.array([sampler.key], np.uint64), ids)
    return int(ids[np.argmax((logits - logits.max()) / temperature - np.log(times))])


def truncate(logits: Numbers, sampler: Sampler, temperature: float) -> None:
    """Apply what comes after top_k, in the order that both profiles have in common."""
    params = sampler.params
    if params.typical_p < 1:
        truncation.typical_p(logits, params.typical_p, temperature)
    if params.top_p < 1:
        truncation.top_p(logits, params.top_p, temperature)
    if params.min_p > 0:
        truncation.min_p(logits, params.min_p, temperature)
    if params.xtc_probability > 0 and params.xtc_threshold <= 0.5 and coin(sampler.key) <= params.xtc_probability:
        truncation.xtc(logits, params.xtc_threshold, temperature)


def heat(logits: Numbers, sampler: Sampler) -> float:
    """Return the temperature for these logits."""
    params = sampler.params
    if params.dynatemp_range <= 0:
        return sampler.temperature
    dynamic = truncation.dynamic_temperature(logits, params.temperature, params.dynatemp_range, params.dynatemp_exponent)
    return max(dynamic, TEMPERATURE_MIN)


def _draw_by_mirostat(rows: Rows, row: int, sampler: Sampler) -> int:
    logits, params = rows.logits[row], sampler.params
    temperature = heat(logits, sampler)
    (truncation.mirostat_1 if params.mirostat == 1 else truncation.mirostat_2)(logits, sampler.mu, temperature)
    token = _draw_from_row(rows, row, sampler, temperature)
    heated, weights = truncation.weights_of(logits, temperature)
    surprise = (math.log(float(weights.sum(dtype=np.float64))) - float(heated[token])) / math.log(2)
    sampler.mu -= params.mirostat_eta * (surprise - params.mirostat_tau)
    return token


def _draw_from_row(rows: Rows, row: int, sampler: Sampler, temperature: float) -> int:
    rows.reread(row)
    keys, everything = np.array([sampler.key], np.uint64), np.array([-np.inf])
    race = Race.of(rows, np.array([row]), keys, np.array([temperature]), everything)
    race.run(np.zeros(1, np.int64))
    return int(race.winners[0])
