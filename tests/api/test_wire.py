"""Bytes to values: whatever is wrong with them is a 400 that names what."""

from __future__ import annotations

import json
import threading
import tracemalloc
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import msgspec
import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from quart.wrappers.request import Body as RequestBody

from cllm.api import wire
from cllm.api.room import Room
from cllm.api.wire import N_CHARS_COMPLAINT, N_OPENED_MAX, decode, is_nothing
from cllm.errors import InvalidRequest, Unavailable
from cllm.testing.fake import FakeModel
from tests.api.conftest import TEST_S


class Inner(msgspec.Struct):
    x: int | None = None


class Body(msgspec.Struct):
    n: int | None = None
    text: str | None = None
    inner: list[Inner] | None = None
    x: float | None = None


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
    ("body", "value"),
    [
        (b'{"n": 128.0, "text": "\xc3\xbc", "other": [1.0, {"n": 0.5}]}', Body(n=128, text="ü")),
        (b'{"n": 1e3}', Body(n=1000)),
        (b'{"n": 1.0, "inner": [{"x": 2}, {"x": 3.0}]}', Body(n=1, inner=[Inner(2), Inner(3)])),
        (b'{"n": 5.0, "y": 1e400, "z": [-1e400]}', Body(n=5)),
    ],
)
def test_whole_numbers_are_integers_however_they_are_written(body: bytes, value: Body) -> None:
    assert decode(body, decoder) == value


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b'{"n": 1e300}', "n: Expected int, got float"),
        (b'{"n": 1.0, "inner": [{"x": 2.5}]}', "inner[0].x: Expected int, got float"),
        (b'{"n": 1.0, "n": 2.0}', "the body is not JSON: 'n' comes twice"),
        (b'{"inner": [{"x": 1.0}], "inner": 5}', "the body is not JSON: 'inner' comes twice"),
        (b'{"inner": [{"x": 1.0}], "inner": []}', "the body is not JSON: 'inner' comes twice"),
        (b'{"inner": [{"x": 1.0}], "inner": null}', "the body is not JSON: 'inner' comes twice"),
        (b'{"n": 1.0, "text": NaN}', "the body is not JSON: "),
        (b'{"n": 1.0, "x": 1e400}', "x: Number out of range"),
        (b'{"n": 1.0, "text": 1e400}', "text: "),
        (b'{"n": 1.0, "text": 2.0}', "text: Expected str, got "),
        (b'{"n": 1.0, "other": ' + b"[" * 500_000 + b"]" * 500_000 + b"}", "the body is nested too deeply"),
    ],
)
def test_beside_whole_numbers_everything_else_is_still_looked_at(body: bytes, complaint: str) -> None:
    assert str(refused(body)).startswith(complaint)


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


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"text": "cut \\ud83d"}', "text"),
        (b'{"inner": [{"x": 1}, {"y": {"z": ["a", "\\ude00 b"]}}]}', "inner[1].y.z[1]"),
        (b'{"inner": [{"x": 1, "\\ud83d": 2}]}', "inner[0]"),
        (b'{"\\ud83d": 2}', None),
    ],
)
def test_half_a_character_is_refused_by_its_place(body: bytes, param: str | None) -> None:
    """As of a text that was cut within one: it was not the body that was."""
    error = refused(body)
    assert error.param == param
    assert error.message.startswith(f"{param or 'the body'}: half a character")
    error.message.encode()


def test_to_look_for_it_costs_no_more_than_the_body_and_says_no_more_than_other_errors() -> None:
    name = b"A" * 20_000
    tracemalloc.start()
    try:
        refused(b'{"n": 1, "n": 1, "' + name + b'": [' + b"0," * 20_000 + b"0]}")
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
    error = refused(b'{"n": 1, "' + name + b'": ["\\ud83d"]}')
    assert len(error.message) < 2 * N_CHARS_COMPLAINT
    assert len(error.param or "") <= N_CHARS_COMPLAINT


@pytest.mark.parametrize("body", [b'{"n": 1, "n": 2}', b'{"other": {"a": 1, "b": 2, "a": 1}}', b'{"inner": [{"x": 1, "\\u0078": 2}]}'])
def test_a_member_that_comes_twice_is_refused(body: bytes) -> None:
    assert "comes twice" in refused(body).message


class Name(str):
    """A member's name that counts how often it is compared."""

    n_compared = 0

    def __eq__(self, other: object) -> bool:
        Name.n_compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_the_member_that_comes_twice_is_found_without_comparing_each_with_all() -> None:
    Name.n_compared = 0
    with pytest.raises(ValueError, match="'last' comes twice"):
        wire._unique([(Name(name), None) for name in [*map(str, range(1000)), "last", "last"]])
    assert Name.n_compared < 10_000


def test_more_arrays_and_objects_than_memory_is_kept_for_are_refused_before_they_are_made() -> None:
    decode(b'{"other": [' + b"[]," * 400_000 + b"1]}", decoder)
    body = b'{"other": [' + b"[]," * N_OPENED_MAX + b"1]}"
    with pytest.raises(InvalidRequest, match="more than"):
        decode(body, decoder=None)  # type: ignore[arg-type]  # nobody decodes


async def test_a_body_that_no_handler_reads_is_not_kept(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    append = RequestBody.append

    def noted(self: RequestBody, data: bytes) -> None:
        kept.append(len(data))
        append(self, data)

    monkeypatch.setattr(RequestBody, "append", noted)
    async with serve() as api:
        assert (await api.ask("GET", "/health", {"x": "y" * 1000})).status == 200
        assert sum(kept) == 0
        assert (await api.post("/tokenize", {"content": "y" * 1000})).status == 200
        assert sum(kept) > 1000


async def test_a_body_of_many_objects_is_decoded_where_that_holds_nobody_up(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def noted(body: bytes, decoder: Any) -> Any:
        threads.append(threading.current_thread())
        return decode(body, decoder)

    monkeypatch.setattr(wire, "decode", noted)
    async with serve() as api:
        for n in (wire.N_OBJECTS_INLINE - 1, wire.N_OBJECTS_INLINE):
            assert (await api.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "other": [{}] * n})).status == 200
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


async def test_few_long_bodies_are_decoded_at_a_time_and_the_others_wait(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    may_go = threading.Event()

    def slowly(body: bytes, decoder: Any) -> Any:
        begun.append(len(body))
        may_go.wait()
        return decode(body, decoder)

    monkeypatch.setattr(wire, "decode", slowly)
    body = b'{"prompt": "x", "max_tokens": 1, "other": "' + b"x" * wire.N_BYTES_INLINE + b'"}'
    statuses: list[int] = []

    async def post(api: Any) -> None:
        statuses.append((await api.post("/v1/completions", body)).status)

    async with serve() as api:
        decoding = api.app.extensions["cllm"].decoding
        try:
            async with trio.open_nursery() as nursery:
                for _ in range(4):
                    nursery.start_soon(post, api)
                await api.until(lambda: len(begun) + sum(map(len, decoding._waiting.values())) == 4)
                assert len(begun) == 2
                may_go.set()
        finally:
            may_go.set()
    assert statuses == [200] * 4


@pytest.mark.parametrize("head", [{"Content_Length": "500046"}, {"Transfer_Encoding": "chunked"}])
async def test_long_bodies_that_are_being_read_take_so_much_together_and_no_more(serve: Any, head: dict[str, str]) -> None:
    """Or many who send all of a body but its end would have the memory."""
    long = b'{"prompt": "x", "max_tokens": 1, "other": "' + b"x" * 500_000 + b'"}'
    short = b'{"prompt": "x", "max_tokens": 1}'
    async with serve(max_body_mb=1) as api:
        room = api.app.extensions["cllm"].bodies
        room.n_max = 2**20
        with room.shared() as take:
            take(700_000)
            refused = await api.post("/v1/completions", long, **head)
            assert (await api.post("/v1/completions", short, Transfer_Encoding="chunked")).status == 200
        assert (refused.status, refused.json["error"]["code"], refused.headers["Retry-After"]) == (503, "bodies_busy", "10")
        assert (await api.post("/v1/completions", long, **head)).status == 200
        room.n_max = 10  # a lone one may be larger
        assert (await api.post("/v1/completions", long, **head)).status == 200
        assert room.n_taken == 0


async def test_a_long_body_has_its_room_until_it_is_answered(serve: Any) -> None:
    """Who waits for his turn has what was made of it."""
    go_on = threading.Event()
    long = b'{"prompt": "x", "max_tokens": 1, "other": "' + b"x" * 500_000 + b'"}'
    async with serve(FakeModel(before_step=lambda _batch: go_on.wait(TEST_S) and None), max_body_mb=1) as api:
        room = api.app.extensions["cllm"].bodies
        room.n_max = 2**19
        try:
            async with api.asking("/v1/completions", long) as waiting:
                await api.until(lambda: api.scheduler.n_running == 1)
                assert room.n_taken == len(long)
                refused = await api.post("/v1/completions", long)
                go_on.set()
                assert (await waiting.answer()).status == 200
        finally:
            go_on.set()
        assert (refused.status, refused.json["error"]["code"]) == (503, "bodies_busy")
        await api.until(lambda: room.n_taken == 0)


def test_full_the_room_for_long_bodies_takes_from_a_key_that_has_less_than_its_part() -> None:
    room = Room(n_max=100)
    with room.shared("flood") as take, room.shared("flood") as take_more, room.shared("other") as take_other:
        take(60)
        take_more(40)
        with pytest.raises(Unavailable):
            take_more(1)
        take_other(50)
        with pytest.raises(Unavailable):
            take_other(1)
        with room.shared("third") as take_third:
            with pytest.raises(Unavailable):
                take_third(34)
            take_third(33)
    assert (room.n_taken, room._n_of) == (0, {})


async def test_the_long_bodies_of_one_key_do_not_go_before_those_of_all_others(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[bytes] = []
    go_on = threading.Event()

    def slowly(body: bytes, decoder: Any) -> Any:
        begun.append(body[-3:-2])
        assert go_on.wait(TEST_S)
        return decode(body, decoder)

    monkeypatch.setattr(wire, "decode", slowly)

    def body(letter: bytes) -> bytes:
        return b'{"prompt": "x", "max_tokens": 1, "other": "' + b"x" * wire.N_BYTES_INLINE + letter + b'"}'

    async with serve(api_key=("key-of-a-flood", "key-of-another")) as api:
        decoding = api.app.extensions["cllm"].decoding
        async with trio.open_nursery() as nursery:
            for i in range(9):
                nursery.start_soon(partial(api.post, "/v1/completions", body(b"f"), X_Api_Key="key-of-a-flood"))
                await api.until(lambda i=i: len(begun) + sum(map(len, decoding._waiting.values())) == i + 1)
            nursery.start_soon(partial(api.post, "/v1/completions", body(b"o"), X_Api_Key="key-of-another"))
            await api.until(lambda: len(begun) + sum(map(len, decoding._waiting.values())) == 10)
            go_on.set()
    assert begun.index(b"o") <= 6, "behind two that ran, one whose turn it was, and some that a quicker thread began meanwhile"


async def test_what_is_said_to_come_takes_no_room_before_it_has_come(serve: Any) -> None:
    async with serve(body_timeout_s=0.2) as api:
        room = api.app.extensions["cllm"].bodies
        room.n_max = 2**20
        async with api.asking("/v1/completions", b"{", complete=False, Content_Length=str(2**24)) as exchange:
            long = b'{"prompt": "x", "max_tokens": 1, "other": "' + b"x" * 500_000 + b'"}'
            assert (await api.post("/v1/completions", long)).status == 200
            assert (await exchange.answer()).status == 408
        assert room.n_taken == 0


class Choice(msgspec.Struct):
    kind: Literal["one", "other"]


def test_a_value_that_is_none_of_the_known_ones_is_not_sent_back_whole() -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(json.dumps({"kind": "x" * 100_000}).encode(), msgspec.json.Decoder(Choice))
    assert caught.value.param == "kind"
    assert len(caught.value.message) < N_CHARS_COMPLAINT + 20


@pytest.mark.parametrize(("value", "nothing"), [(b"null", True), (b"[ ]", True), (b'""', True), (b"1e999", False), (b"-1e999", False)])
def test_a_number_beyond_all_range_is_something(value: bytes, nothing: bool) -> None:
    assert is_nothing(msgspec.Raw(value)) is nothing


async def test_a_number_beyond_all_range_in_a_field_that_is_not_decoded_names_the_field(serve: Any) -> None:
    async with serve() as api:
        for field, path in (("functions", "/v1/chat/completions"), ("json_schema", "/v1/chat/completions"), ("format", "/api/chat")):
            answer = await api.post(path, f'{{"messages": [{{"role": "user", "content": "x"}}], "{field}": 1e999}}'.encode())
            assert (answer.status, field in str(answer.error)) == (400, True), answer.body


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
