"""Bytes of a request to typed, checked values; whatever is wrong with them is a 400 that says what and where."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
import trio
from quart import current_app, g, request
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout

from cllm.api.context import Context, cleanup, current_key
from cllm.errors import InvalidRequest

T = TypeVar("T")
S = TypeVar("S")

NULL: Any = msgspec.field(default_factory=lambda: msgspec.Raw(b"null"))  # msgspec has no Raw | None, and cannot describe a Raw as default
N_BYTES_OF_NOTHING = 16

N_BYTES_INLINE = 262_144  # a longer body is decoded in a thread, so that others' tokens need not wait for it
N_OBJECTS_INLINE = 2_000  # so is one of more objects: that no member comes twice is seen in each of them, which takes 10 ms for so many
N_OPENED_MAX = 1_000_000  # arrays and objects of a body: each takes a hundred times the byte that it may be written with
N_CHARS_COMPLAINT = 200  # a complaint may have the client's own value in it
_MISSING = re.compile(r"missing required field `(\w+)`")
_WANTS_WHOLE = re.compile(r"^Expected `[^`]*\bint\b[^`]*`, got `float` - at `\$((?:\.\w+|\[\d+\])*)\.\w+`$")
_HALF = re.compile("[\ud800-\udfff]")
_Place: TypeAlias = "tuple[_Place, int | str] | None"  # the holder's, and the step from there; written only when it is told
_STEP = re.compile(r"\w+|\[\d+\]")
_COMPRESSED = frozenset({"gzip", "x-gzip", "compress", "x-compress", "deflate", "br", "zstd"})
N_EXACT_MAX = 1 << 53  # beyond it a float stands for several integers
N_BEYOND = 10**400  # out of a float's range
N_OBJECTS_MENDED = 4  # objects of one body whose whole numbers are taken for integers
_PLACE = re.compile(r" - at `\$\.?(.*)`$")


async def read(decoder: msgspec.json.Decoder[T]) -> T:
    """Return the current request's body, decoded. Raises: InvalidRequest · Unavailable, and the framework's own 408 and 413."""
    decoded = await _decoded(partial(decode, decoder=decoder))
    g.timeout_s = getattr(decoded, "timeout_s", math.inf)  # None: what the server's settings say
    return decoded


async def read_both(decoder: msgspec.json.Decoder[T], other: msgspec.json.Decoder[S]) -> tuple[T, S | None]:
    """As `read`, with the same body as `other` has it; None where that cannot read it."""
    decoded, otherwise = await _decoded(partial(_decode_both, decoder=decoder, other=other))
    g.timeout_s = getattr(decoded, "timeout_s", math.inf)
    return decoded, otherwise


async def _decoded(work: Callable[[bytes], T]) -> T:
    context: Context = current_app.extensions["cllm"]
    if _COMPRESSED & {*re.split(r"[\s,]+", request.headers.get("Content-Encoding", "").lower())}:  # others' words mean nothing, as UTF-8
        raise InvalidRequest("Content-Encoding: a body is taken as it is, and not compressed")
    key = current_key()
    # Until the exchange ends: who waits for his turn has what was made of it.
    take = cleanup().enter_context(context.bodies.shared(key))
    body = await _body(take)
    context.metrics.bytes_in.inc(len(body))  # now: who leaves before the answer is told nothing, and counted nowhere else
    g.n_bytes = len(body)
    if len(body) <= N_BYTES_INLINE and body.count(b"{") <= N_OBJECTS_INLINE:
        return work(body)
    return await context.decoding.run(partial(work, body), key)


def _decode_both(body: bytes, decoder: msgspec.json.Decoder[T], other: msgspec.json.Decoder[S]) -> tuple[T, S | None]:
    decoded = decode(body, decoder)
    try:
        return decoded, other.decode(body)
    except (msgspec.MsgspecError, RecursionError):  # of what the first one left undecoded
        return decoded, None


async def _body(take: Callable[[int], None]) -> bytes:
    """The whole body. What of it is long takes its room as it comes: who only says that much will come has none."""
    n_max, body = request.max_content_length, bytearray()
    with trio.move_on_after(math.inf if request.body_timeout is None else request.body_timeout) as scope:
        async for piece in request.body:
            n_before = len(body)
            body += piece
            if n_max is not None and len(body) > n_max:
                raise RequestEntityTooLarge
            if len(body) > N_BYTES_INLINE:
                take(len(body) - (n_before if n_before > N_BYTES_INLINE else 0))
    if scope.cancelled_caught:
        raise RequestTimeout
    return bytes(body)


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Return `body` decoded. Unknown members are ignored, but no member may come twice.

    Raises: InvalidRequest, with the member's name in `param` where one is at fault.
    """
    if len(body) > N_OPENED_MAX and body.count(b"[") + body.count(b"{") > N_OPENED_MAX:
        raise InvalidRequest(f"the body has more than {N_OPENED_MAX} [ and {{")
    try:
        text = body.decode("utf-8")  # msgspec looks at the encoding of known members only
        try:
            value = decoder.decode(body)
        except msgspec.ValidationError as error:
            value = _with_whole_numbers(text, decoder, error)
        json.loads(text, object_pairs_hook=_unique)  # msgspec takes the last of equal members; another reader, the first
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except UnicodeDecodeError:
        raise InvalidRequest("the body is not UTF-8") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    except ValueError as error:
        raise _no_json(text, error) from None
    return value


def _no_json(text: str, error: ValueError) -> InvalidRequest:
    """Say what is wrong. Half a character is JSON to most, as what programs write whose texts were cut within one, and to no decoder."""
    with suppress(ValueError, RecursionError):
        place = _place_of_half(json.loads(text))
        if place is not None:
            said = "half a character (a lone \\ud800 to \\udfff), as in a text that was cut within one"
            return InvalidRequest(f"{place or 'the body'}: {said}", param=place or None)
    return InvalidRequest(f"the body is not JSON: {error}")


def _place_of_half(value: Any) -> str | None:
    """Where the first text stands that has half a character in it, of one in a member's name the member's holder; None: nowhere."""
    rest: list[tuple[_Place, Any]] = [(None, value)]
    while rest:
        place, value = rest.pop()
        if isinstance(value, str):
            if _HALF.search(value):
                return _written(place)
        elif isinstance(value, list):
            rest += [((place, i), value[i]) for i in range(len(value) - 1, -1, -1)]
        elif isinstance(value, dict):
            if any(map(_HALF.search, value)):
                return _written(place)
            rest += [((place, name), member) for name, member in reversed(value.items())]
    return None


def _written(place: _Place) -> str:
    """A place as errors tell it, as much of it as they do."""
    steps: list[str] = []
    while place is not None:
        place, step = place
        steps.append(f"[{step}]" if isinstance(step, int) else f".{step[:N_CHARS_COMPLAINT]}")
    return "".join(reversed(steps)).removeprefix(".")[:N_CHARS_COMPLAINT]


def _with_whole_numbers(text: str, decoder: msgspec.json.Decoder[T], error: msgspec.ValidationError) -> T:
    """Decode what has a whole number such as 128.0 for an integer, which JSON does not tell apart and some languages write.

    The numbers beside the one that `error` complains of are taken with it. Raises: msgspec.ValidationError, for the rest.
    """
    value: Any = None
    for _ in range(N_OBJECTS_MENDED):
        wants = _WANTS_WHOLE.search(str(error))
        if wants is None:
            break
        if value is None:
            json.loads(text, object_pairs_hook=_unique)  # first: of equal members the complaint may be of another one than is found here
            value = json.loads(text, parse_float=_writable)
        holder = value
        for step in _STEP.findall(wants[1]):
            holder = holder[int(step[1:-1]) if step.startswith("[") else step]
        n_mended = 0
        for name, number in holder.items():
            if isinstance(number, float) and number.is_integer() and abs(number) <= N_EXACT_MAX:
                holder[name], n_mended = int(number), n_mended + 1
        if not n_mended:
            break
        try:
            return decoder.decode(json.dumps(value))
        except msgspec.ValidationError as further:
            error = further
    raise error


def _writable(number: str) -> float | int:
    """A number that is as much out of range as `number` where that is: of the infinity that is read of it no JSON can be written."""
    read = float(number)
    return read if math.isfinite(read) else N_BEYOND


def is_nothing(value: msgspec.Raw) -> bool:
    """Whether a field carries what clients send that have no use for it: null, no tools, an empty grammar."""
    # Not by msgspec, which refuses numbers beyond the range of a float only now: what it leaves undecoded it has not looked at.
    return len(bytes(value)) <= N_BYTES_OF_NOTHING and json.loads(bytes(value)) in (None, [], "")


def _invalid(complaint: str) -> InvalidRequest:
    place = _PLACE.search(complaint)
    where = "" if place is None else place[1].removesuffix("[...]")
    what = _plain(complaint if place is None else complaint[: place.start()])[:N_CHARS_COMPLAINT]
    missing = _MISSING.search(complaint)
    if missing is not None:
        where, what = f"{where}.{missing[1]}".lstrip("."), "it is missing"
    return InvalidRequest(f"{where}: {what}", param=where) if where else InvalidRequest(what)


def _plain(complaint: str) -> str:
    return complaint.replace("`", "").replace(" | null", "")


class _Repeated(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> None:
    if len({name for name, _ in pairs}) == len(pairs):
        return
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise _Repeated(f"{name[:64]!r} comes twice")
        seen.add(name)
