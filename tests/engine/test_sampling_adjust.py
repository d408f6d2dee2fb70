"""What a sequence's tokens, its bias and its mask do to its logits before anything is drawn."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.engine.sampling.dry import Dry, _Identity, _words_of, forget_vocabularies
from cllm.engine.sampling.params import SamplingParams, SamplingProfile
from cllm.engine.sampling.penalties import TokenCounts, repeat
from cllm.engine.sampling.step import Sampler, dry_breaker_tokens, sample
from cllm.testing.fake import END_OF_TURN, FakeVocabulary
from cllm.text.grammar import Grammars, GrammarSource, Kind
from tests.lines import n_lines

N_VOCAB = 12
tokens_lists = st.lists(st.integers(0, N_VOCAB - 1), max_size=60)


def adjusted(sampler: Sampler, n_vocab: int = N_VOCAB) -> npt.NDArray[np.float32]:
    logits = np.linspace(-3, 4, n_vocab, dtype=np.float32)
    sampler.adjust(logits)
    return logits


def grow(sampler: Sampler, tokens: list[int]) -> None:
    for token in tokens:
        sampler.tokens.append(token)
        sampler.observe(token)


# --- penalties --------------------------------------------------------------------------------------------------------


@given(tokens_lists, st.integers(1, 70))
def test_counts_of_a_sliding_window_are_the_counts_of_its_tokens(tokens: list[int], n_window: int) -> None:
    counts = TokenCounts()
    for i, token in enumerate(tokens):
        counts.add(token)
        if i >= n_window:
            counts.remove(tokens[i - n_window])
    kept = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert kept == Counter(tokens[-n_window:])


@given(tokens_lists)
def test_counts_taken_at_once_are_those_taken_one_by_one(tokens: list[int]) -> None:
    counts = TokenCounts.of(tokens)
    for token in tokens[:3]:
        counts.add(token)
        counts.remove(token)
    counts.add(N_VOCAB)
    kept = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert kept == Counter([*tokens, N_VOCAB])


adjusting_params = st.builds(
    SamplingParams,
    repeat_penalty=st.sampled_from([1.0, 1.3]),
    repeat_last_n=st.sampled_from([0, 1, 5, 64]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.2]),
    dry_multiplier=st.sampled_from([0.0, 0.8]),
    dry_penalty_last_n=st.sampled_from([None, 0, 7, 30]),
    logit_bias=st.sampled_from([(), ((3, 2.0), (4, -math.inf))]),
    profile=st.sampled_from(SamplingProfile),
)


@given(adjusting_params, tokens_lists, tokens_lists, tokens_lists)
def test_a_sampler_that_observed_is_the_same_as_one_built_afresh(
    params: SamplingParams, prompt: list[int], before: list[int], after: list[int]
) -> None:
    grown = Sampler(params, seed=1, tokens=list(prompt), n_prompt=len(prompt), dry_breakers=lambda: frozenset({2}))
    grow(grown, before)
    adjusted(grown)  # what was there is read now, and what comes is observed
    grow(grown, after)
    fresh = Sampler(params, seed=1, tokens=prompt + before + after, n_prompt=len(prompt), dry_breakers=lambda: frozenset({2}))
    assert adjusted(grown).tolist() == adjusted(fresh).tolist()
    assert grown.key == fresh.key


def test_tokens_are_read_once_and_when_they_first_count_so_that_a_request_that_comes_costs_nothing() -> None:
    n_reads = 0

    def breakers() -> frozenset[int]:
        nonlocal n_reads
        n_reads += 1
        return frozenset()

    sampler = Sampler(SamplingParams(dry_multiplier=1.0), seed=1, tokens=[1, 2, 1], n_prompt=3, dry_breakers=breakers)
    grow(sampler, [2])
    assert (sampler.adjusts, n_reads) == (True, 0)
    first = adjusted(sampler)
    assert first.tolist() == adjusted(sampler).tolist()
    assert n_reads == 1


@given(adjusting_params, tokens_lists, tokens_lists)
def test_penalties_are_what_their_definitions_say(params: SamplingParams, prompt: list[int], generated: list[int]) -> None:
    params = attrs.evolve(params, dry_multiplier=0.0, logit_bias=())
    tokens = prompt + generated
    expected = np.linspace(-3, 4, N_VOCAB, dtype=np.float32).tolist()
    for token in set(tokens[-params.repeat_last_n :] if params.repeat_last_n else []):
        expected[token] *= params.repeat_penalty if expected[token] <= 0 else 1 / params.repeat_penalty
    for token, n in Counter(generated).items():
        expected[token] -= params.presence_penalty + n * params.frequency_penalty
    actual = adjusted(Sampler(params, seed=1, tokens=tokens, n_prompt=len(prompt)))
    assert actual.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_the_prompt_counts_for_the_repeat_penalty_only() -> None:
    before = adjusted(Sampler(SamplingParams(), seed=1, tokens=[], n_prompt=0))
    presence = adjusted(Sampler(SamplingParams(presence_penalty=1.0), seed=1, tokens=[5], n_prompt=1))
    repeat = adjusted(Sampler(SamplingParams(repeat_penalty=2.0), seed=1, tokens=[5], n_prompt=1))
    assert presence[5] == before[5]
    assert repeat[5] != before[5]


# --- DRY --------------------------------------------------------------------------------------------------------------


def dry_reference(tokens: list[int], breakers: set[int], last_n: int | None, allowed_length: int) -> dict[int, int]:
    """The longest repetition that each next token would go on with, by comparing every place with the end."""
    tokens = tokens if last_n is None else tokens[-last_n:]
    longest: dict[int, int] = {}
    for end in range(len(tokens) - 1):
        n = 0
        while n <= end and tokens[end - n] == tokens[-1 - n] and tokens[end - n] not in breakers:
            n += 1
        if n >= allowed_length and tokens[end + 1] not in breakers:
            longest[tokens[end + 1]] = max(n, longest.get(tokens[end + 1], 0))
    return longest


@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 3), max_size=50),
    st.sets(st.integers(0, 3), max_size=1),
    st.sampled_from([None, 3, 10, 25]),
    st.integers(1, 4),
)
def test_dry_penalises_what_a_search_through_the_history_finds(
    tokens: list[int], breakers: set[int], last_n: int | None, allowed_length: int
) -> None:
    logits = np.zeros(4, np.float32)
    Dry.of(tokens, frozenset(breakers), last_n).penalise(logits, 0.8, 1.75, allowed_length)
    expected = np.zeros(4, np.float32)
    for token, n in dry_reference(tokens, breakers, last_n, allowed_length).items():
        expected[token] -= 0.8 * 1.75 ** (n - allowed_length)
    assert logits.tolist() == pytest.approx(expected.tolist(), rel=1e-5)


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), max_size=9), st.sampled_from([None, 3, 10, 25]))
def test_a_history_taken_in_at_once_is_as_good_as_token_by_token(first: list[int], rest: list[int], last_n: int | None) -> None:
    at_once, one_by_one = Dry.of(first, frozenset({3}), last_n), Dry(frozenset({3}), last_n)
    for token in first:
        one_by_one.observe(token)
    for token in [None, *rest]:
        if token is not None:
            at_once.observe(token)
            one_by_one.observe(token)
        after = np.zeros((2, 4), np.float32)
        at_once.penalise(after[0], 0.8, 1.75, 1)
        one_by_one.penalise(after[1], 0.8, 1.75, 1)
        assert after[0].tolist() == after[1].tolist()


def test_the_choices_of_a_prompt_share_its_reading_and_nothing_else() -> None:
    prompt = np.random.default_rng(1).integers(0, 4, 5000).tolist()
    first = Dry.of(prompt, frozenset({3}), None)
    for token in prompt[:50]:
        first.observe(token)
    second, afresh = Dry.of(prompt, frozenset({3}), None), Dry(frozenset({3}))
    for token in prompt:
        afresh.observe(token)
    after = np.zeros((2, 4), np.float32)
    for token in prompt[50:100]:
        second.observe(token)
        afresh.observe(token)
        second.penalise(after[0], 0.8, 1.75, 1)
        afresh.penalise(after[1], 0.8, 1.75, 1)
    assert after[0].tolist() == after[1].tolist()
    assert n_lines(lambda: Dry.of(prompt, frozenset({3}), None)) < 500


def test_a_breaker_is_not_penalised_though_it_would_make_a_repetition_longer() -> None:
    logits = np.zeros(5, np.float32)
    Dry.of([0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2], frozenset({3}), None).penalise(logits, 0.8, 1.75, 2)
    assert logits.tolist() == pytest.approx([0, 0, 0, 0, -0.8 * 1.75])


def test_an_endless_repetition_is_penalised_by_a_finite_number() -> None:
    logits = np.zeros(4, np.float32)
    Dry.of([1] * 3000, frozenset(), None).penalise(logits, 0.8, 1.75, 2)
    assert np.isfinite(logits[0])
    assert logits[1] < -1e30


def test_a_repetition_that_is_all_that_may_come_does_though_its_penalty_is_more_than_a_float_holds() -> None:
    params = SamplingParams(dry_multiplier=2.0, dry_penalty_last_n=None)
    sampler = Sampler(params, seed=1, tokens=[1] * 200, n_prompt=200, dry_breakers=frozenset)
    sampler.mask = packed({1}, 100)
    sampled = sample(np.zeros((1, 100), np.float32), [sampler])
    assert (sampled.invalid, list(sampled.tokens)) == ([], [1])


class Words:
    """A vocabulary of a few words."""

    n_tokens = 5
    bos = eos = chat_template = None
    end_tokens: frozenset[int] = frozenset()
    adds_bos = False
    n_reads = 0
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise AssertionError("vocabularies are told apart by identity")

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        raise NotImplementedError

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        self.n_reads += 1
        return [b"a", b"\n", b"b:\n", b'"', b""][token]


def test_breakers_are_the_tokens_whose_text_contains_them_and_are_found_once() -> None:
    words = Words()
    assert dry_breaker_tokens(words, ("\n", '"')) == {1, 2, 3}
    assert dry_breaker_tokens(words, ("\n", '"')) == {1, 2, 3}
    assert dry_breaker_tokens(words, (":", "\xff")) == {2}
    assert words.n_reads == 5, "it was read once"
    assert dry_breaker_tokens(words, ("",)) == frozenset()
    assert dry_breaker_tokens(Words(), ("a",)) == {0}


class Rows(Words):
    """As many words, of which the first is a long row of blanks."""

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        return b" " * 10_000 if token == 0 else super().token_bytes(token, special=special)


def test_a_breaker_is_found_once_in_a_token() -> None:
    rows = Rows()
    assert dry_breaker_tokens(rows, ("a",)) == frozenset()
    assert n_lines(lambda: dry_breaker_tokens(rows, (" ", "\n"))) < 2000
    assert dry_breaker_tokens(rows, (" ", "\n")) == {0, 1, 2}


def test_breakers_in_another_order_are_not_searched_again() -> None:
    """Of a large vocabulary that takes a second, in which everybody's step waits."""
    words = Words()
    for breakers in ((":", "\n"), ("\n", ":"), ("\n", ":", '"')):
        assert dry_breaker_tokens(words, breakers) >= {1, 2}
    assert _words_of(_Identity(words)).n_searches == 3


# --- bias, ends, mask -------------------------------------------------------------------------------------------------


def greedy(logits: list[float], sampler: Sampler) -> int:
    return sample(np.array([logits], np.float32), [sampler]).tokens[0]


def test_a_bias_is_added_and_minus_infinity_forbids() -> None:
    params = SamplingParams(temperature=0, logit_bias=((2, -math.inf), (0, 1.5)))
    assert greedy([1.0, 2.0, 9.0], Sampler(params, seed=0, tokens=[], n_prompt=0)) == 0
    logits = np.zeros((300, 3), np.float32)
    params = SamplingParams(logit_bias=((2, -math.inf),))
    assert set(sample(logits, [Sampler(params, seed=s, tokens=[], n_prompt=0) for s in range(300)]).tokens) == {0, 1}


def test_a_token_that_is_biased_twice_gets_both() -> None:
    sampler = Sampler(SamplingParams(logit_bias=((2, 1.0), (2, 0.5))), seed=0, tokens=[], n_prompt=0)
    assert adjusted(sampler)[2] - adjusted(Sampler(SamplingParams(), seed=0, tokens=[], n_prompt=0))[2] == pytest.approx(1.5)


def test_biases_and_stops_for_tokens_that_do_not_exist_are_harmless() -> None:
    params = SamplingParams(logit_bias=((-1, 5.0), (N_VOCAB, 5.0), (10**9, 1.0)))
    sampler = Sampler(params, seed=0, tokens=[], n_prompt=0, min_tokens=5, barred_until_min=frozenset({-2, N_VOCAB + 3}))
    assert adjusted(sampler).tolist() == np.linspace(-3, 4, N_VOCAB, dtype=np.float32).tolist()


def test_end_tokens_are_not_drawn_when_they_are_to_be_ignored() -> None:
    sampler = Sampler(SamplingParams(temperature=0), seed=0, tokens=[], n_prompt=0, end_tokens=frozenset({1}), ignore_eos=True)
    assert greedy([1.0, 2.0, 0.0], sampler) == 0
    grow(sampler, [0] * 10)
    assert greedy([1.0, 2.0, 0.0], sampler) == 0


def test_an_end_token_that_the_request_stops_at_is_drawn_though_the_others_are_ignored() -> None:
    params, ends = SamplingParams(temperature=0), frozenset({1, 2})
    sampler = Sampler(params, seed=0, tokens=[], n_prompt=0, end_tokens=ends, ignore_eos=True, barred_until_min=frozenset({1}))
    assert greedy([1.0, 2.0, 3.0], sampler) == 1


def test_end_and_stop_tokens_are_not_drawn_before_min_tokens_are_generated() -> None:
    sampler = Sampler(
        SamplingParams(temperature=0),
        seed=0,
        tokens=[0, 0, 0],
        n_prompt=3,
        end_tokens=frozenset({1}),
        min_tokens=2,
        barred_until_min=frozenset({2}),
    )
    logits = [1.0, 3.0, 2.0]
    assert greedy(logits, sampler) == 0
    grow(sampler, [0])
    assert greedy(logits, sampler) == 0
    grow(sampler, [0])
    assert greedy(logits, sampler) == 1


def packed(allowed: set[int], n_vocab: int) -> npt.NDArray[np.uint32]:
    mask = np.zeros((n_vocab + 31) // 32, np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << (token % 32))
    return mask


@settings(deadline=None)
@given(st.sampled_from([5, 32, 70, 300]), st.data())
def test_a_mask_leaves_the_allowed_tokens_as_they_were(n_vocab: int, data: st.DataObject) -> None:
    allowed = data.draw(st.sets(st.integers(0, n_vocab - 1)))
    sampler = Sampler(SamplingParams(), seed=0, tokens=[], n_prompt=0)
    before = adjusted(sampler, n_vocab)
    sampler.mask = packed(allowed, n_vocab)
    after = adjusted(sampler, n_vocab)
    assert {i for i in range(n_vocab) if after[i] == before[i]} == allowed
    assert all(after[i] == -math.inf for i in set(range(n_vocab)) - allowed)


def test_a_mask_shorter_than_the_vocabulary_forbids_the_padding_tokens() -> None:
    sampler = Sampler(SamplingParams(temperature=0), seed=0, tokens=[], n_prompt=0)
    sampler.mask = packed({3, 5}, 32)
    assert greedy([0.0] * 3 + [1.0] + [5.0] * 36, sampler) == 5


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_k=40, top_p=0.9), SamplingParams(top_p=0.9), SamplingParams(min_p=0.1)]
)
def test_only_allowed_tokens_are_drawn_however_few(params: SamplingParams) -> None:
    logits = np.random.default_rng(2).normal(0, 2, (100, 5000)).astype(np.float32)
    samplers = [Sampler(params, seed=s, tokens=[], n_prompt=0) for s in range(100)]
    for sampler in samplers:
        sampler.mask = packed({7, 4000}, 5000)
    sampled = sample(logits, samplers)
    assert sampled.invalid == []
    assert set(sampled.tokens) <= {7, 4000}


def test_a_row_with_nothing_allowed_or_with_nan_under_the_mask_is_invalid() -> None:
    samplers = [Sampler(SamplingParams(), seed=s, tokens=[], n_prompt=0) for s in range(3)]
    samplers[0].mask = packed(set(), 100)
    samplers[1].mask = packed({5}, 100)
    samplers[2].mask = packed({5}, 100)
    logits = np.zeros((3, 100), np.float32)
    logits[1, 50] = np.nan
    sampled = sample(logits, samplers)
    assert sampled.invalid == [0, 1]
    assert sampled.tokens[2] == 5


GRAMMARS = Grammars(FakeVocabulary())


def held_to(regex: str, **fields: Any) -> Sampler:
    """A sampler whose grammar takes what matches."""
    grammar = GRAMMARS.compile(GrammarSource(Kind.REGEX, regex)).start()
    params = SamplingParams(temperature=0, logit_bias=fields.pop("logit_bias", ()))
    return Sampler(params, seed=0, tokens=[], n_prompt=0, grammar=grammar, **fields)


def draw(sampler: Sampler, favourite: int) -> int:
    logits = np.zeros((1, FakeVocabulary().n_tokens), np.float32)
    logits[0, favourite] = 5
    (token,) = sample(logits, [sampler]).tokens
    sampler.tokens.append(token)
    sampler.observe(token)
    return token


def test_a_grammar_moves_on_with_what_is_drawn() -> None:
    sampler = held_to("a[bc]")
    assert draw(sampler, ord("c")) == ord("a")
    assert draw(sampler, ord("c")) == ord("c")


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 9}])
def test_end_tokens_are_barred_where_the_grammar_allows_others_and_only_there(fields: dict[str, Any]) -> None:
    sampler = held_to("ab?", end_tokens=frozenset({END_OF_TURN}), **fields)
    assert draw(sampler, END_OF_TURN) == ord("a")
    assert draw(sampler, END_OF_TURN) == ord("b")
    assert draw(sampler, ord("x")) == END_OF_TURN


@pytest.mark.parametrize("fields", [{}, {"ignore_eos": True}, {"min_tokens": 9}])
def test_where_a_bias_forbids_all_else_that_a_grammar_allows_the_answer_may_end(fields: dict[str, Any]) -> None:
    sampler = held_to("ab?", end_tokens=frozenset({END_OF_TURN}), logit_bias=((ord("b"), -math.inf),), **fields)
    assert draw(sampler, ord("b")) == ord("a")
    assert not sampler.is_contradicted()
    assert draw(sampler, ord("b")) == END_OF_TURN


def test_where_a_grammar_allows_nothing_the_row_is_invalid_and_the_grammar_says_why() -> None:
    sampler = held_to("ab")
    assert sampler.grammar is not None
    sampler.grammar.accept(ord("x"))
    assert sample(np.zeros((1, 300), np.float32), [sampler]).invalid == [0]
    assert sampler.grammar.failure is not None


def test_a_repeat_penalty_next_to_nothing_leaves_logits_that_are_numbers() -> None:
    logits = np.array([3.0, -2.0, 0.0, 50.0], np.float32)
    repeat(logits, np.array([0, 1, 2, 3]), 5e-324)
    assert np.isfinite(logits).all()
    assert logits.argmax() == 3


def test_a_vocabulary_whose_breakers_were_looked_up_is_let_go_of() -> None:
    class Words(FakeVocabulary):
        pass

    words = Words()
    gone = weakref.ref(words)
    assert dry_breaker_tokens(words, ("a",))
    del words
    forget_vocabularies()
    gc.collect()
    assert gone() is None
