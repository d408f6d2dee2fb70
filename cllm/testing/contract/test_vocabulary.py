"""Tokens: from any text and back, without trust in it, from any thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import pytest

from cllm.backend import StepModel, Vocabulary, tool_template_of
from cllm.errors import ModelDied, TokenizeFailed
from cllm.testing.contract.hand import Hand, Near, PlainTokens, are_pythons_own

TEXTS: Final = {
    "words": "The quick brown fox, isn't it?",
    "spaces": "a  b   c\t\td\n\n\ne",
    "chinese": "你好世界。今天天气很好。",
    "mixed scripts": "Grüße, שלום, مرحبا, Привет, 한국어, ไทย",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 🤷🏽‍♀️",
    "numbers": "3.14159 1,000,000 0x7f -12",
    "code": "def f(x):\n    return {'a': [x ** 2]}\n",
    "rare": "ﷺ ẞ ǅ ṩ",
}

HOSTILE: Final = {
    "empty": "",
    "nul": "a\0b\0",
    "controls": "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "lone surrogates": "a\ud800b\udc00c\udfff",
    "noncharacters": "\ufffe\uffff\U0010ffff\ufdd0",
    "byte order marks": "\ufeff\ufeffa",
    "one long word": "a" * 50_000,
    "one long number": "1" * 50_000,
    "long blanks": " " * 50_000,
    "line ends": "\n" * 50_000,
    "exclamation": "!" * 50_000,
    "long emoji": "😀" * 12_000,
    "combining": "e" + "\u0301" * 20_000,
    "hangul fillers": "\u3164" * 12_000,
    "unfinished names": "<|im_start|" * 2_000 + "<" * 5_000,
    "right to left marks": "\u202e\u202d" * 5_000,
}

by_name = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())


def plain_ids(vocabulary: Vocabulary, text: str) -> list[int]:
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=False)
    assert are_pythons_own(*tokens)
    return tokens


def text_of(vocabulary: Vocabulary, tokens: list[int]) -> bytes:
    return b"".join(vocabulary.token_bytes(token) for token in tokens)


# --- there and back ---------------------------------------------------------------------------------------------------


@by_name
def test_the_bytes_of_a_texts_tokens_are_the_text(vocabulary: Vocabulary, text: str) -> None:
    found = text_of(vocabulary, plain_ids(vocabulary, text))
    assert found.removeprefix(b" ") == text.encode(), "but for a blank that some vocabularies put first"


@by_name
def test_the_same_text_gives_the_same_tokens(vocabulary: Vocabulary, text: str) -> None:
    assert plain_ids(vocabulary, text) == plain_ids(vocabulary, text)


def test_every_token_has_bytes_maybe_none(vocabulary: Vocabulary) -> None:
    for token in _sample(vocabulary):
        assert isinstance(vocabulary.token_bytes(token), bytes)
        assert isinstance(vocabulary.token_bytes(token, special=True), bytes)


@pytest.mark.parametrize("place", ["before the first", "after the last", "far away"])
def test_a_token_that_is_none_is_an_index_error(vocabulary: Vocabulary, place: str) -> None:
    token = {"before the first": -1, "after the last": vocabulary.n_tokens, "far away": 2**31 - 1}[place]
    for special in (False, True):
        with pytest.raises(IndexError):
            vocabulary.token_bytes(token, special=special)


def _sample(vocabulary: Vocabulary) -> list[int]:
    n = vocabulary.n_tokens
    return list(range(n)) if n <= 4096 else np.random.default_rng(0).integers(n, size=4096).tolist()


# --- special tokens ---------------------------------------------------------------------------------------------------


def test_special_tokens_are_tokens_of_the_vocabulary(vocabulary: Vocabulary) -> None:
    assert isinstance(vocabulary.end_tokens, frozenset)
    for token in (vocabulary.bos, vocabulary.eos, *vocabulary.end_tokens):
        assert token is None or (0 <= token < vocabulary.n_tokens and are_pythons_own(token))
    assert vocabulary.eos is None or vocabulary.eos in vocabulary.end_tokens
    assert vocabulary.bos is not None or not vocabulary.adds_bos


def test_the_chat_template_is_text_or_none(vocabulary: Vocabulary) -> None:
    for template in (vocabulary.chat_template, tool_template_of(vocabulary)):
        assert template is None or template.strip()


def test_bos_comes_first_where_the_metadata_say_so_and_only_on_request(vocabulary: Vocabulary) -> None:
    if vocabulary.bos is None:
        pytest.skip("the vocabulary has no bos")
    tokens = vocabulary.tokenize("Hello", add_special=True, parse_special=False)
    assert (tokens[0] == vocabulary.bos) == vocabulary.adds_bos
    assert vocabulary.bos not in plain_ids(vocabulary, "Hello")


def test_names_of_special_tokens_are_read_as_such_only_where_asked_for(vocabulary: Vocabulary) -> None:
    for token, name in _control_tokens(vocabulary).items():
        text = f"see {name} there"
        assert token in vocabulary.tokenize(text, add_special=False, parse_special=True)
        untrusted = plain_ids(vocabulary, text)
        assert token not in untrusted
        assert text_of(vocabulary, untrusted).removeprefix(b" ") == text.encode()


def test_special_tokens_add_nothing_to_a_text_but_have_a_name(vocabulary: Vocabulary) -> None:
    for token in _control_tokens(vocabulary):
        assert vocabulary.token_bytes(token) == b""


def _control_tokens(vocabulary: Vocabulary) -> dict[int, str]:
    tokens = {token for token in (vocabulary.bos, vocabulary.eos, *vocabulary.end_tokens) if token is not None}
    names = {token: vocabulary.token_bytes(token, special=True).decode() for token in sorted(tokens)}
    if not names:
        pytest.skip("the vocabulary has no special tokens")
    assert all(names.values()), "a special token without a name"
    return names


# --- texts from strangers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parse_special", [False, True], ids=["plain", "special"])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_text_does_harm(vocabulary: Vocabulary, text: str, parse_special: bool) -> None:
    try:
        tokens = vocabulary.tokenize(text, add_special=True, parse_special=parse_special)
    except TokenizeFailed:
        assert len(text) > 1000, "short texts can always be tokenised"
    else:
        assert all(0 <= token < vocabulary.n_tokens for token in tokens)
        assert are_pythons_own(*tokens)


def test_lone_surrogates_are_replaced_and_the_text_about_them_stays(vocabulary: Vocabulary) -> None:
    text = text_of(vocabulary, plain_ids(vocabulary, "before \ud800 after")).decode()
    assert text.removeprefix(" ").startswith("before ")
    assert text.endswith(" after")


def test_an_empty_text_has_no_tokens_of_its_own(vocabulary: Vocabulary) -> None:
    assert plain_ids(vocabulary, "") == []


# --- threads ----------------------------------------------------------------------------------------------------------


def test_texts_may_be_tokenised_in_many_threads_at_once(vocabulary: Vocabulary) -> None:
    texts = [f"{text} {i} " * 40 for i in range(4) for text in TEXTS.values()]
    expected = [plain_ids(vocabulary, text) for text in texts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda text: plain_ids(vocabulary, text), texts)) == expected


def test_tokens_bytes_may_be_asked_for_in_many_threads_at_once(load: Callable[[], StepModel]) -> None:
    vocabulary = load().vocabulary  # a new one, which has not been asked yet
    tokens = _sample(vocabulary)[:1024]
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: [vocabulary.token_bytes(token) for token in tokens], range(8)))
    assert all(answer == answers[0] for answer in answers)


def test_texts_may_be_tokenised_while_the_model_is_closed_and_after_that(load: Callable[[], StepModel]) -> None:
    """A client that leaves does not wait for the thread that tokenises its text."""
    model = load()
    vocabulary, text, done = model.vocabulary, TEXTS["words"] * 200, False
    expected = plain_ids(vocabulary, text)

    def is_tokenised() -> bool:
        try:
            assert plain_ids(vocabulary, text) == expected
        except ModelDied:  # which says so
            return False
        return True

    def tokenize_on(has_begun: threading.Event) -> None:
        while is_tokenised() and not done:
            has_begun.set()

    begun = [threading.Event(), threading.Event()]
    with ThreadPoolExecutor(2) as threads:
        busy = [threads.submit(tokenize_on, has_begun) for has_begun in begun]
        try:
            for one, has_begun in zip(busy, begun, strict=True):
                while not (has_begun.wait(0.1) or one.done()):
                    pass
            model.close()
        finally:
            done = True
    for one in busy:
        one.result()
    is_tokenised()


def test_tokenising_does_not_disturb_a_running_step(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(48)
    expected = hand.alone(tokens)
    vocabulary, done, begun = hand.model.vocabulary, False, [threading.Event(), threading.Event()]

    def tokenize_on(has_begun: threading.Event) -> None:
        while not done:
            assert plain_ids(vocabulary, TEXTS["words"])
            has_begun.set()

    with ThreadPoolExecutor(2) as threads:
        busy = [threads.submit(tokenize_on, has_begun) for has_begun in begun]
        try:
            for one, has_begun in zip(busy, begun, strict=True):
                while not (has_begun.wait(0.1) or one.done()):  # one that raised never begins
                    pass
            for _ in range(4):
                near.check(hand.alone(tokens), expected)
        finally:
            done = True
    for one in busy:
        one.result()
