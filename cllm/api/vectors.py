"""From texts to vectors and scores, for every surface that asks for them."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import attrs
import msgspec
import numpy as np
import trio
from quart import Response, g

from cllm.api.context import Context, current_key
from cllm.api.prompts import N_TOKEN_BYTES_MAX, by_length
from cllm.api.sampling_fields import check_tokens
from cllm.backend import Int32s, Pooling, Vectors
from cllm.engine.embedding.scheduler import InputEmpty, InputTooLong
from cllm.errors import DeadlineExceeded, InvalidRequest, NotSupported, TokenizeFailed, Unavailable
from cllm.serve.embedding import ServedEmbedder
from cllm.serve.engine import Embeddings

T = TypeVar("T")

N_INPUTS_MAX = 2048  # of one request, as OpenAI's
N_NUMBERS_MAX = 1 << 24  # of all its vectors: 64 MiB here, and some 300 as JSON
N_TOKENS_MAX = 1 << 22  # of all its inputs: a query counts with each of its documents
N_ROWS_PIECE = 1024
N_CHARS_INPUT = 8  # that each input counts for besides its own, where it is asked how long they take to tokenise: an empty one takes 40 us
N_CHARS_PAIR = 256  # and each document beside a query: what the model's template writes around it is tokenised with it, each time


@attrs.frozen
class Embedded:
    """What a request's inputs came to."""

    model: ServedEmbedder
    vectors: Vectors  # (n, n_embd), not normalised
    n_tokens: int


async def embedder(context: Context, name: str | None) -> Embeddings:
    """What gives vectors under `name`, loaded if need be; the first that does when a request names none.

    Raises: Unavailable · NotSupported · NotFound.
    """
    return (await context.held(context.house.find_embedder(name))).embeddings


async def embed(
    context: Context,
    name: str | None,
    inputs: Sequence[str | Sequence[int]],
    param: str = "input",
    *,
    truncates: bool = False,
    n_most: int = N_INPUTS_MAX,
    n_beside: int = 0,
) -> Embedded:
    """The vectors of texts or token ids, maybe of no more of each than the model takes; `n_beside` of them do not count, as a query beside
    documents. Raises: RequestError.
    """
    embeddings = await embedder(context, name)
    if embeddings.model.pooling is Pooling.RANK:
        raise NotSupported(f"{embeddings.model.name} judges documents and gives no vectors: it serves /v1/rerank", param="model")
    check_number(len(inputs), param, n_most)
    _check_size(embeddings.model, len(inputs) - n_beside, param)
    _check_room(context, embeddings)
    if truncates:
        inputs = [one[: embeddings.model.n_tokens_max * N_TOKEN_BYTES_MAX] for one in inputs]
    with _naming(param, len(inputs), n_beside):
        tokens = await _tokens(context, embeddings.model, inputs, param, truncates=truncates)
        return await _computed(context, embeddings, tokens)


async def judge(context: Context, name: str | None, query: str, documents: Sequence[str]) -> tuple[Embedded, list[float]]:
    """How well each document answers `query`, 0 to 1 by a model made for it, else the cosine of their vectors. Raises: RequestError."""
    embeddings = await embedder(context, name)
    check_number(len(documents), "documents")
    if embeddings.model.pooling is not Pooling.RANK:
        embedded = await embed(context, name, [query, *documents], "documents", n_most=N_INPUTS_MAX + 1, n_beside=1)
        return embedded, await by_length(embedded.vectors.size, functools.partial(_cosines, embedded.vectors))
    _check_room(context, embeddings)
    n_chars = [len(query) + len(document) for document in documents]
    with _naming("documents", len(documents)):
        _check_fit(embeddings.model, n_chars)
        pair = functools.partial(embeddings.model.pair, query)
        n_chars_all = sum(n_chars) + N_CHARS_PAIR * len(documents)
        tokens = await _tokenized(context, embeddings.model, pair, documents, n_chars_all, "documents")
        judged = await _computed(context, embeddings, tokens)
    return judged, judged.vectors[:, 0].tolist()


def _cut(model: ServedEmbedder, tokens: Sequence[int]) -> Sequence[int]:
    """As many tokens as the model takes. One that closes a text, which some models' vectors are of, stays its last."""
    n_max = model.n_tokens_max
    if len(tokens) <= n_max:
        return tokens
    closes = not model.vocabulary.token_bytes(tokens[-1])
    return [*tokens[: n_max - 1], tokens[-1]] if closes else tokens[:n_max]


def normalised(vectors: Vectors, n_dimensions: int | None = None) -> Vectors:
    """The vectors' first `n_dimensions`, or all, at length 1; one without length stays as it is."""
    unit = vectors[:, :n_dimensions].astype(np.float32)
    for start in range(0, len(unit), N_ROWS_PIECE):  # in double precision there is a piece at a time
        rows = unit[start : start + N_ROWS_PIECE].astype(np.float64)
        lengths = np.linalg.norm(rows, axis=1, keepdims=True)
        unit[start : start + N_ROWS_PIECE] = rows / np.where(lengths > 0, lengths, 1.0)
    return unit


def listing(before: dict[str, Any], name: str, items: Iterable[bytes], after: dict[str, Any]) -> Response:
    """An answer that has a list of `items`, each JSON already, as the member `name` between others.

    No piece of Python's work on it is longer than what one item takes, and large ones are joined where others run meanwhile (bpo-36051).
    """
    head = msgspec.json.encode(before)[:-1] + b',"%b":[' % name.encode()
    tail = b"]," + msgspec.json.encode(after)[1:]
    return Response(b"".join((head, b",".join(items), tail)), content_type="application/json")


def _cosines(vectors: Vectors) -> list[float]:
    """Of the first vector with each of the others."""
    unit = normalised(vectors)
    cosines: list[float] = (unit[1:] @ unit[0]).tolist()
    return cosines


def check_number(n: int, param: str, n_most: int = N_INPUTS_MAX) -> None:
    """Raises: InvalidRequest for no inputs, or too many."""
    if not 1 <= n <= n_most:
        raise InvalidRequest(f"{param}: expected 1 to {n_most}, not {n}", param=param)


def _check_size(model: ServedEmbedder, n: int, param: str) -> None:
    """Raises: InvalidRequest for more vectors than memory is kept for."""
    n_most = N_NUMBERS_MAX // model.n_embd
    if n > n_most:
        raise InvalidRequest(f"{param}: expected {n_most} at most, since this model's vectors have {model.n_embd} numbers", param=param)


def _check_room(context: Context, embeddings: Embeddings) -> None:
    """Refuse what cannot be taken, before any work is put into it. Raises: Unavailable."""
    try:
        embeddings.loop.check_room(g.key)
    except Unavailable as error:
        context.engine.metrics.refused(error)
        raise


async def _computed(context: Context, embeddings: Embeddings, tokens: Sequence[Int32s]) -> Embedded:
    timeout_s = context.settings.timeout_s
    left_s = math.inf if timeout_s is None else timeout_s - (time.perf_counter() - g.started_at)
    with trio.move_on_after(max(left_s, 0.0)):
        _check_room(context, embeddings)  # others may have come while its texts became tokens
        vectors = await embeddings.loop.vectors(tokens, g.key)
        return Embedded(embeddings.model, vectors, sum(map(len, tokens)))
    raise DeadlineExceeded("the server's time limit passed before all inputs were computed")


async def _tokens(
    context: Context, model: ServedEmbedder, inputs: Sequence[str | Sequence[int]], param: str, *, truncates: bool
) -> Sequence[Int32s]:
    """The token ids of each input; names of special tokens are not read as such."""
    _check_fit(model, [len(one) if isinstance(one, str) else 0 for one in inputs])
    tokenize = functools.partial(_each, model, param, truncates)
    n_chars = sum(map(len, inputs)) + N_CHARS_INPUT * len(inputs)
    return await _tokenized(context, model, tokenize, inputs, n_chars, param)


def _each(model: ServedEmbedder, param: str, truncates: bool, given: str | Sequence[int]) -> Sequence[int]:
    if isinstance(given, str):
        tokens: Sequence[int] = model.vocabulary.tokenize(given, add_special=True, parse_special=False)
    else:
        check_tokens(given, model.vocabulary.n_tokens, param)
        tokens = given
    return _cut(model, tokens) if truncates else tokens


async def _tokenized(
    context: Context, model: ServedEmbedder, tokenize: Callable[[T], Sequence[int]], given: Iterable[T], n_chars: int, param: str
) -> Sequence[Int32s]:
    try:
        return await context.engine.tokenized(lambda: _all(tokenize, given, param), n_chars, current_key(), model.vocabulary)
    except TokenizeFailed as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error


def _all(tokenize: Callable[[T], Sequence[int]], given: Iterable[T], param: str) -> list[Int32s]:
    """As arrays: as lists they take nine times as much, and wait, thousands of requests' maybe."""
    tokens: list[Int32s] = []
    n_left = N_TOKENS_MAX
    for one in given:
        tokens.append(np.asarray(tokenize(one), np.int32))
        n_left -= len(tokens[-1])
        if n_left < 0:
            raise InvalidRequest(f"{param}: they have more than {N_TOKENS_MAX} tokens together", param=param)
    return tokens


def _check_fit(model: ServedEmbedder, n_chars: Sequence[int]) -> None:
    """Refuse by its length alone what can never fit. Raises: InputTooLong."""
    n_most = max(n_chars, default=0)
    n_tokens_least = math.ceil(n_most / N_TOKEN_BYTES_MAX)
    if n_tokens_least > model.n_tokens_max:
        raise InputTooLong(n_tokens_least, model.n_tokens_max, n_chars.index(n_most), counted=False)


@contextmanager
def _naming(param: str, n_inputs: int, n_beside: int = 0) -> Iterator[None]:
    """Say of an input that is too long, or nothing, which one it is; the first `n_beside` are the query's."""
    try:
        yield
    except (InputTooLong, InputEmpty) as error:
        place = error.place - n_beside
        error.param = "query" if place < 0 else param if n_inputs - n_beside == 1 else f"{param}[{place}]"
        error.message = f"{error.param}: {error.message}"
        raise
