"""The shared sampling fields: what they mean to the engine, and their limits."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any, cast

import attrs
import msgspec
import pytest

from cllm.api.sampling_fields import SamplingFields, Wanted, base_params, wanted
from cllm.api.wire import decode
from cllm.engine.sampling.params import SamplingParams, SamplingProfile
from cllm.engine.streaming import heeded
from cllm.errors import InvalidRequest
from cllm.serve.engine import ServedModel

decoder = msgspec.json.Decoder(SamplingFields)
MODEL = cast(ServedModel, SimpleNamespace(n_ctx=512, vocabulary=SimpleNamespace(n_tokens=100)))


def ask(
    defaults: SamplingParams = SamplingParams(),  # noqa: B008  # frozen
    max_tokens: int | None = None,
    priority_least: int | None = None,
    **fields: Any,
) -> Wanted:
    body = decode(json.dumps(fields).encode(), decoder)
    return wanted(body, MODEL, defaults, max_tokens=max_tokens, timeout_s=None, priority_least=priority_least)


def ask_within(max_tokens: int | None, fields: dict[str, Any]) -> Wanted:
    body = decode(json.dumps(fields).encode(), decoder)
    return wanted(body, MODEL, SamplingParams(), max_tokens=max_tokens, timeout_s=None, priority_least=None)


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        ask(**fields)
    return caught.value


def test_nothing_asked_for_is_the_defaults() -> None:
    defaults = SamplingParams(temperature=0.5)
    asked = ask(defaults, max_tokens=16)
    assert asked.sampling == defaults
    assert (asked.stopping.max_tokens, asked.n, asked.priority, asked.timeout_s) == (16, 1, 0, None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_n_sigma": -1}, {"top_n_sigma": 0.0}),
        ({"repetition_penalty": 1.2}, {"repeat_penalty": 1.2}),
        ({"repetition_penalty": 1.2, "repeat_penalty": 1.3}, {"repeat_penalty": 1.3}),
        ({"repeat_last_n": -1}, {"repeat_last_n": 512}),
        ({"dry_penalty_last_n": -1}, {"dry_penalty_last_n": None}),
        ({"dry_sequence_breakers": ["a", "b", "a"]}, {"dry_sequence_breakers": ("a", "b")}),
        ({"logit_bias": {"7": -100, "3": 5}}, {"logit_bias": ((3, 5.0), (7, -100.0))}),
        ({"logit_bias": [[7, -1.5], [3, False]]}, {"logit_bias": ((3, -math.inf), (7, -1.5))}),
        ({"logit_bias": {}}, {}),
        ({"mirostat": 2, "mirostat_tau": 4, "mirostat_eta": 0.2}, {"mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2}),
    ],
)
def test_each_field_reaches_the_sampler(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert ask(**fields).sampling == SamplingParams(**expected)


def test_temperature_0_stays_0() -> None:
    assert ask(SamplingParams(temperature=0.7), temperature=0).sampling.temperature == 0.0


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n_predict"])
def test_the_three_names_of_max_tokens_mean_the_same(name: str) -> None:
    assert ask_within(16, {name: 5}).stopping.max_tokens == 5


def test_a_single_stop_string_is_a_list_of_one() -> None:
    assert ask(stop="ab").stopping.stop == ("ab",)
    assert ask(stop=["a", "b"]).stopping.stop == ("a", "b")
    assert ask(stop=[]).stopping.stop == ()


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 101),
        ("top_p", 1.01),
        ("top_p", -1),
        ("min_p", 2),
        ("top_k", -2),
        ("top_k", 1 << 31),
        ("typical_p", -0.5),
        ("repeat_penalty", 0),
        ("repeat_last_n", -2),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("mirostat", 3),
        ("n", 0),
        ("n", 129),
        ("n", 1 << 70),
        ("max_completion_tokens", 0),
        ("n_predict", -1),
        ("min_tokens", -1),
        ("seed", 1 << 64),
        ("seed", -(1 << 63) - 1),
        ("stop", ""),
        ("stop", ["x"] * 17),
        ("timeout_s", 0),
        ("timeout_s", -5),
        ("priority", 1 << 31),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"100": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"1": 1, "01": 2}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("logit_bias", [[1, True]]),
        ("logit_bias", [[1, 1000]]),
        ("logit_bias", [[1, 1], [1, 2]]),
        ("stop_token_ids", [100]),
        ("stop_token_ids", [-1]),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(param: str, value: Any) -> None:
    error = refused(**{param: value})
    assert error.param == param
    assert len(error.message) < 300


@pytest.mark.parametrize("value", [0, -1, -(1 << 40)])
def test_max_tokens_below_1_is_refused_and_never_becomes_huge(value: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask_within(16, {"max_tokens": value})
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(("value", "place"), [(["ok", ""], "stop[1]"), (["x" * 257], "stop[0]"), (["ok", 5], "stop[1]")])
def test_a_bad_stop_string_is_refused_by_its_place(value: Any, place: str) -> None:
    assert refused(stop=value).param == place


def test_more_min_tokens_than_max_tokens_is_refused() -> None:
    assert refused(min_tokens=9, n_predict=8).param == "min_tokens"


def test_more_min_tokens_than_an_answer_has_without_being_asked_for_more_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="16") as caught:
        ask_within(16, {"min_tokens": 17})
    assert caught.value.param == "min_tokens"
    assert ask_within(16, {"min_tokens": 16}).stopping.max_tokens == 16
    assert ask_within(16, {"min_tokens": 17, "n_predict": 17}).stopping.max_tokens == 17
    assert ask_within(None, {"min_tokens": 17}).stopping.max_tokens is None


# --- seeds ------------------------------------------------------------------------------------------------------------


def specs(asked: Wanted, n_prompts: int = 1) -> list[Any]:
    return asked.specs([[1]] * n_prompts, n_logprobs=None, key="", request_id="")


def test_without_a_seed_or_with_minus_1_each_request_gets_its_own() -> None:
    seeds = {specs(ask())[0].seed for _ in range(50)} | {specs(ask(seed=-1))[0].seed for _ in range(50)}
    assert len(seeds) == 100


def test_without_a_seed_prompts_of_one_list_draw_by_different_ones_and_with_one_by_the_same() -> None:
    assert len({spec.seed for spec in specs(ask(n=2), n_prompts=8)}) == 16
    first, second = specs(ask(seed=5), n_prompts=2)
    assert first.seed == second.seed == 5


def test_all_64_bits_of_a_seed_count() -> None:
    assert ask(seed=5).seed == 5
    assert ask(seed=(1 << 64) - 1).seed == (1 << 64) - 1
    assert ask(seed=-2).seed == (1 << 64) - 2


def test_the_choices_of_a_request_have_different_seeds_and_the_first_has_the_requests() -> None:
    seeds = [spec.seed for spec in specs(ask(seed=5, n=128))]
    assert seeds[0] == 5
    assert len(set(seeds)) == 128


def test_a_prompts_seeds_do_not_depend_on_the_prompts_beside_it() -> None:
    alone = [spec.seed for spec in specs(ask(seed=5, n=2))]
    assert [spec.seed for spec in specs(ask(seed=5, n=2), n_prompts=3)] == alone * 3


# --- profiles ---------------------------------------------------------------------------------------------------------


def test_the_openai_profile_leaves_the_distribution_as_it_is() -> None:
    assert base_params("openai", {}, 512) == SamplingParams()


def test_the_llama_profile_has_llama_servers_defaults_and_order() -> None:
    base = base_params("llama", {}, 512)
    assert (base.temperature, base.top_p, base.top_k, base.min_p) == (0.8, 0.95, 40, 0.05)
    assert base.profile is SamplingProfile.LLAMA


def test_the_model_profile_takes_what_the_file_recommends() -> None:
    metadata = {"general.sampling.temp": "0.600000", "general.sampling.top_k": "20", "general.sampling.penalty_last_n": "-1"}
    assert base_params("model", metadata, 512) == SamplingParams(temperature=0.6, top_k=20, repeat_last_n=512)


@pytest.mark.parametrize(
    ("heeds", "n_repeats", "left_out"),
    [
        ({"top_k", "repeat_penalty", "repeat_last_n"}, 512, []),
        ({"top_k", "repeat_penalty", "repeat_last_n"}, 64, ["repeat_last_n"]),
        ({"top_k", "repeat_penalty"}, 512, ["repeat_last_n"]),
        ({"repeat_last_n"}, 512, ["top_k", "repeat_penalty"]),
    ],
)
def test_defaults_are_told_to_a_model_that_samples_by_itself_as_far_as_it_can(heeds: set[str], n_repeats: int, left_out: list[str]) -> None:
    defaults = SamplingParams(top_k=5, repeat_penalty=1.2, repeat_last_n=n_repeats)
    usual = SamplingParams()
    expected = attrs.evolve(defaults, **{name: getattr(usual, name) for name in left_out})
    assert heeded(defaults, frozenset(heeds), 512) == (expected, left_out)


@pytest.mark.parametrize("value", ["nan", "hot", "-3", '1,"top_k":7', "1e999"])
def test_nonsense_in_the_file_is_not_taken(value: str) -> None:
    assert base_params("model", {"general.sampling.temp": value}, 512) == SamplingParams()


@pytest.mark.parametrize(
    ("least", "given", "expected"), [(None, None, 0), (None, -9, -9), (3, None, 3), (-3, None, 0), (3, 3, 3), (-3, -3, -3)]
)
def test_a_request_is_as_urgent_as_it_says_and_as_its_key_may_be_at_most(least: int | None, given: int | None, expected: int) -> None:
    assert ask(priority_least=least, priority=given).priority == expected


def test_who_names_a_priority_that_the_key_may_not_have_is_told_which_it_may() -> None:
    with pytest.raises(InvalidRequest, match="3") as caught:
        ask(priority_least=3, priority=2)
    assert caught.value.param == "priority"
