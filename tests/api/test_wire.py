"""Bytes to values: whatever is wrong with them is a 400 that names what."""

from __future__ import annotations

import json
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.api.wire import decode
from cllm.errors import InvalidRequest


class Inner(msgspec.Struct):
    x: int | None = None


class Body(msgspec.Struct):
    n: int | None = None
    text: str | None = None
    inner: list[Inner] | None = None


unhurried = settings(max_examples=50)
decoder = msgspec.json.Decoder(Body)


def refused(body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(body, decoder)
    assert caught.value.status == 400
    return caught.value


def test_unknown_members_are_ignored_and_null_is_the_default() -> None:
    assert decode(b'{"n": null, "other": {"deep": [1, 2]}}', decoder) == Body()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"n": "1"}', "n"),
        (b'{"n": 1.5}', "n"),
        (b'{"n": true}', "n"),
        (b'{"text": 1}', "text"),
        (b'{"inner": [{"x": 1}, {"x": "y"}]}', "inner[1].x"),
        (b"[]", None),
        (b'"text"', None),
    ],
)
def test_a_wrong_type_names_the_member(body: bytes, param: str | None) -> None:
    error = refused(body)
    assert error.param == param
    assert "`" not in error.message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{}}",
        b"not json",
        b"{'n': 1}",
        b'{"n": NaN}',
        b'{"n": Infinity}',
        b'{"other": NaN}',
        b'{"other": -Infinity}',
        b'{"n": 1e999}',
        b'{"text": "\xff"}',
        b'{"other": "\xff"}',
        b'{"\xff": 1}',
        b'{"text": "\\ud800"}',
        b'{"other": "\\udc00 and more text"}',
        '{"text": "x"}'.encode("utf-16"),
        '{"text": "x"}'.encode("utf-32-le"),
        b'\xef\xbb\xbf{"n": 1}',
        b'{"text": "\xed\xa0\x80"}',
        b'{"text": "line\nend"}',
        b"\x00",
        b'{"n": ' + b"9" * 5000 + b"}",
    ],
)
def test_what_is_not_json_in_utf8_is_refused(body: bytes) -> None:
    refused(body)


@pytest.mark.parametrize("body", [b'{"n": 1, "n": 2}', b'{"other": {"a": 1, "b": 2, "a": 1}}', b'{"inner": [{"x": 1, "\\u0078": 2}]}'])
def test_a_member_that_comes_twice_is_refused(body: bytes) -> None:
    assert "comes twice" in refused(body).message


@pytest.mark.parametrize("body", [b'{"o":' * 100_000, b'{"o":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"text":' + b'{"a":' * 50_000])
def test_nesting_without_end_is_refused(body: bytes) -> None:
    refused(body)


@unhurried
@given(st.binary(max_size=200))
def test_no_bytes_at_all_do_more_than_be_refused(body: bytes) -> None:
    with suppress(InvalidRequest):
        decode(body, decoder)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=6
)


@unhurried
@given(st.dictionaries(st.sampled_from(["n", "text", "inner", "other"]), JSON))
def test_any_json_is_decoded_or_refused(value: object) -> None:
    with suppress(InvalidRequest):
        decode(json.dumps(value).encode("utf-8", "surrogatepass"), decoder)
