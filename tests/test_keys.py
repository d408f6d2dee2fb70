"""A key and what it may take, as one line of text."""

from __future__ import annotations

import pytest

from cllm.keys import ApiKey, named_keys, parse_key


def test_a_key_alone_counts_as_one_and_has_no_cap_of_its_own() -> None:
    assert parse_key("s3cret") == ApiKey(secret="s3cret", weight=1.0, cap=None)


def test_weight_and_cap_follow_in_any_order() -> None:
    assert parse_key("s3cret cap=8  weight=2.5") == ApiKey(secret="s3cret", weight=2.5, cap=8)


def test_the_most_urgent_priority_that_a_key_may_name_follows_too() -> None:
    assert parse_key("s3cret priority=-2") == ApiKey(secret="s3cret", priority=-2)


def test_keys_are_called_by_their_places_or_as_their_owner_says() -> None:
    assert [key.name for key in named_keys(("a", "b weight=2", "c name=team-3.x_y"))] == ["key0", "key1", "team-3.x_y"]


@pytest.mark.parametrize("texts", [("a name=x", "b name=x"), ("a", "b name=key0")])
def test_two_keys_have_two_names(texts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="two keys are called"):
        named_keys(texts)


@pytest.mark.parametrize(
    "text",
    [
        *("", " weight=2", "s3cret s3cret2", "schlüssel"),
        *("s3cret weight=0", "s3cret weight=nan", "s3cret weight=inf", "s3cret weight="),
        *("s3cret priority=", "s3cret priority=1.5", "s3cret priority=--1", "s3cret priority=²", "s3cret priority=1234567890"),
        *("s3cret name=", "s3cret name=a:b", "s3cret name=ü", f"s3cret name={'a' * 65}"),
        *("s3cret cap=0", "s3cret cap=1.5", "s3cret cap=-1", "s3cret cap=²", "s3cret cap=1 cap=2"),
    ],
)
def test_what_is_no_key_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(ValueError, match="key") as caught:
        parse_key(text)
    assert "s3cret" not in str(caught.value)


def test_a_key_is_not_shown_among_other_things() -> None:
    assert "s3cret" not in repr(parse_key("s3cret weight=2"))
