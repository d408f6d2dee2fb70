"""The truncations and penalties against llama.cpp's own, on the same candidates."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cllm.engine.sampling import truncation
from cllm.engine.sampling.dry import Dry
from cllm.engine.sampling.params import SamplingParams, SamplingProfile
from cllm.engine.sampling.step import Sampler, sample

llama_cpp = pytest.importorskip("llama_cpp")
N_VOCAB = 6000  # more than what is sorted at once
DTYPE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


def applied(logits: npt.NDArray[np.float32], *links: Any, accepted: tuple[int, ...] = ()) -> npt.NDArray[Any]:
    """Return the candidates that llama.cpp's chain of `links` leaves."""
    data = np.zeros(len(logits), DTYPE)
    data["id"], data["logit"] = np.arange(len(logits)), logits
    pointer = ctypes.cast(data.ctypes.data, ctypes.POINTER(llama_cpp.llama_token_data))
    array = llama_cpp.llama_token_data_array(data=pointer, size=len(logits), selected=-1, sorted=False)
    made = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for link in links:
        llama_cpp.llama_sampler_chain_add(made, link)
    for token in accepted:
        llama_cpp.llama_sampler_accept(made, token)
    llama_cpp.llama_sampler_apply(made, ctypes.byref(array))
    left = np.array([(array.data[i].id, array.data[i].logit, array.data[i].p) for i in range(array.size)], DTYPE)
    llama_cpp.llama_sampler_free(made)
    return left


def rows() -> list[npt.NDArray[np.float32]]:
    rng = np.random.default_rng(21)
    return [rng.normal(0, scale, N_VOCAB).astype(np.float32) for scale in (0.5, 1.5, 3, 6)]


LINKS: dict[str, tuple[Callable[[], Any], Callable[[npt.NDArray[np.float32]], None]]] = {
    "top_n_sigma": (lambda: llama_cpp.llama_sampler_init_top_n_sigma(1.3), lambda x: truncation.top_n_sigma(x, 1.3)),
    "top_k": (lambda: llama_cpp.llama_sampler_init_top_k(17), lambda x: truncation.top_k(x, 17)),
    "top_p": (lambda: llama_cpp.llama_sampler_init_top_p(0.87, 1), lambda x: truncation.top_p(x, 0.87, 1.0)),
    "min_p": (lambda: llama_cpp.llama_sampler_init_min_p(0.07, 1), lambda x: truncation.min_p(x, 0.07, 1.0)),
    "typical_p": (lambda: llama_cpp.llama_sampler_init_typical(0.73, 1), lambda x: truncation.typical_p(x, 0.73, 1.0)),
    "xtc": (lambda: llama_cpp.llama_sampler_init_xtc(1.0, 0.05, 1, 1), lambda x: truncation.xtc(x, 0.05, 1.0)),
}


def left_by(truncate: Callable[[npt.NDArray[np.float32]], None], logits: npt.NDArray[np.float32]) -> set[int]:
    truncated = logits.copy()
    with np.errstate(divide="ignore"):
        truncate(truncated)
    return set(np.flatnonzero(truncated > -np.inf).tolist())


@pytest.mark.parametrize("name", LINKS)
def test_a_truncation_keeps_what_llama_cpps_keeps(name: str) -> None:
    link, truncate = LINKS[name]
    for logits in rows():
        left = applied(logits, link())
        assert left_by(truncate, logits) == set(left["id"][left["logit"] > -np.inf].tolist())


def test_the_llama_profile_draws_from_what_llama_cpps_chain_leaves_and_as_often() -> None:
    params = SamplingParams(
        temperature=0.7, top_k=30, typical_p=0.98, top_p=0.9, min_p=0.04, top_n_sigma=2.0, profile=SamplingProfile.LLAMA
    )
    plain = SamplingParams(temperature=0.7, top_k=30, top_p=0.9, min_p=0.04, top_n_sigma=2.0, profile=SamplingProfile.LLAMA)
    for p in (params, plain):
        typical = [llama_cpp.llama_sampler_init_typical(p.typical_p, 1)] if p.typical_p < 1 else []
        logits = rows()[2]
        left = applied(
            logits,
            llama_cpp.llama_sampler_init_top_n_sigma(2.0),
            llama_cpp.llama_sampler_init_top_k(30),
            *typical,
            llama_cpp.llama_sampler_init_top_p(0.9, 1),
            llama_cpp.llama_sampler_init_min_p(0.04, 1),
            llama_cpp.llama_sampler_init_temp(0.7),
            llama_cpp.llama_sampler_init_dist(1),
        )
        left = left[left["logit"] > -np.inf]
        samplers = [Sampler(p, seed=seed, tokens=[], n_prompt=0) for seed in range(2000)]
        observed = np.bincount(sample(np.tile(logits, (2000, 1)), samplers).tokens, minlength=N_VOCAB)
        assert not observed[np.setdiff1d(np.arange(N_VOCAB), left["id"])].any()
        expected = left["p"] * 2000
        assert ((observed[left["id"]] - expected) ** 2 / expected).sum() < len(left) + 4 * np.sqrt(2 * len(left))


def test_the_dynamic_temperature_is_llama_cpps() -> None:
    for logits in rows():
        heated = applied(logits, llama_cpp.llama_sampler_init_temp_ext(0.9, 0.5, 1.3))
        theirs = (logits.max() - logits.min()) / (heated["logit"].max() - heated["logit"].min())
        assert truncation.dynamic_temperature(logits, 0.9, 0.5, 1.3) == pytest.approx(theirs, rel=1e-4)


def test_penalties_are_llama_cpps() -> None:
    generated = tuple(np.random.default_rng(3).integers(0, 40, 100).tolist())
    for logits in rows():
        left = applied(logits, llama_cpp.llama_sampler_init_penalties(N_VOCAB, 1000, 1.2, 0.3, 0.6), accepted=generated)
        params = SamplingParams(repeat_penalty=1.2, repeat_last_n=1000, frequency_penalty=0.3, presence_penalty=0.6)
        ours = logits.copy()
        Sampler(params, seed=0, tokens=list(generated), n_prompt=0).adjust(ours)
        assert ours[left["id"]].tolist() == pytest.approx(left["logit"].tolist(), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("last_n", [None, 20])
def test_dry_is_llama_cpps(last_n: int | None) -> None:
    for seed in range(20):
        tokens = tuple(np.random.default_rng(seed).integers(0, 3, 60).tolist())
        link = llama_cpp.llama_sampler_init_dry(None, 0.8, 1.75, 2, last_n or 1000, None, 0)
        left = applied(np.zeros(4, np.float32), link, accepted=tokens)
        ours = np.zeros(4, np.float32)
        Dry.of(list(tokens), frozenset(), last_n).penalise(ours, 0.8, 1.75, 2)
        assert ours[left["id"]].tolist() == pytest.approx(left["logit"].tolist(), rel=1e-5)


def test_mirostat_keeps_the_likeliest_token_however_much_too_surprising_the_last_ones_were() -> None:
    for logits in rows():
        assert left_by(lambda x: truncation.mirostat_1(x, -2000.0, 1.0), logits) == {int(logits.argmax())}


@pytest.mark.parametrize("mu", [1.0, 3.0, 6.0])
def test_mirostat_keeps_what_llama_cpps_keeps(mu: float) -> None:
    for logits in rows():
        second = applied(logits, llama_cpp.llama_sampler_init_mirostat_v2(1, mu / 2, 0.1))
        assert left_by(lambda x: truncation.mirostat_2(x, mu, 1.0), logits) == set(second["id"].tolist())
        first = applied(logits, llama_cpp.llama_sampler_init_mirostat(N_VOCAB, 1, mu / 2, 0.1, 100))
        assert left_by(lambda x: truncation.mirostat_1(x, mu, 1.0), logits) == set(first["id"].tolist())
