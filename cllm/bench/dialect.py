"""Finds out, with a few tiny requests, what a server calls its model and what it takes."""

from __future__ import annotations

import json
import random
from typing import Any, Final

import attrs
import trio

from cllm.bench.answers import MALFORMED, message_of
from cllm.bench.load import FAULTS, Connections, fault
from cllm.bench.target import BenchFailed, Client, Dialect, Endpoint, Target
from cllm.bench.workloads import GREEDY, N_VOCAB_UNKNOWN, Ask, Sampling, id_range

N_PROBED: Final = 32  # ids of a prompt, of which no text would have as many tokens by chance
PROBE_S: Final = 600.0  # a server may load its model with the first request
# What a server answers when it does not understand; anything else is no question of dialect.
NOT_UNDERSTOOD: Final = frozenset({400, 422, 500, 501})
OK: Final = 200
# What is said in place of an answer by models that think first, if they may say one token: everything was understood then.
OUT_OF_TOKENS: Final = "model output limit was reached"
NOT_FOUND: Final = 404
MOVED: Final = frozenset({301, 302, 307, 308})  # not followed: a request would cost two
REWORDINGS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (  # a field, and what is said instead
    ("max_tokens", {"limit": "max_completion_tokens"}),
    ("seed", {"takes_seed": False}),
    ("stream_options", {"takes_usage": False}),
    ("top_k", {"all_tokens": -1}),
)


async def find_dialect(
    target: Target, *, endpoint: Endpoint, model: str = "", n_vocab: int = 0, sampling: Sampling = GREEDY, is_stream: bool = True
) -> Dialect:
    """Ask the server. Raises: BenchFailed, when it cannot be reached or answers nothing that it is asked."""
    told = await _told(target, model)
    dialect = attrs.evolve(told, model=model or told.model, n_vocab=n_vocab or told.n_vocab)
    said = ""
    for takes_ids, takes_extras in ((True, True), (True, False), (False, True), (False, False)):
        if takes_ids and endpoint == "chat":
            continue
        tried = attrs.evolve(dialect, takes_ids=takes_ids, takes_extras=takes_extras)
        client = Client(target=target, dialect=tried, endpoint=endpoint, sampling=sampling, is_stream=False)
        status, page, client = await _ask_as_it_likes(client)
        # One more: some put a begin token before them. Who makes text of them, and other tokens of that, takes no ids.
        is_read = not takes_ids or _n_prompt(page) in (N_PROBED, N_PROBED + 1, None)
        if is_read and ((status == OK and _is_answer(page)) or OUT_OF_TOKENS in page):
            # What it takes of a stream's fields, too; whatever else it says of streams, the pass tells.
            client = (await _ask_as_it_likes(attrs.evolve(client, is_stream=True)))[2] if is_stream else client
            return client.dialect
        said = f"{status}: {message_of(page)}"
        is_blamed_on_ids = takes_ids and status == NOT_FOUND  # some answer so to whatever they fail at
        if status != OK and status not in NOT_UNDERSTOOD and not is_blamed_on_ids:
            break
        dialect = attrs.evolve(dialect, prefix=client.dialect.prefix)
    raise BenchFailed(f"{target.url} answers {endpoint} with {said}")


async def _told(target: Target, wanted: str) -> Dialect:
    prefix = Dialect().prefix
    status, page = await _fetch(target, target.head("GET", f"{prefix}/models"))
    if status == NOT_FOUND and target.path:
        other_status, other_page = await _fetch(target, target.head("GET", "/models"))
        if other_status == OK:
            prefix, status, page = "", other_status, other_page
    if status in (401, 403) and not wanted:  # a key may be good for answers alone; one that is not is told so when they are asked for
        raise BenchFailed(f"{target.url} answers {status}: {message_of(page)}")
    try:
        models = json.loads(page)["data"]
        model: dict[str, Any] = next((one for one in models if one["id"] == wanted), models[0])
        return Dialect(model=str(model["id"]), n_vocab=int((model.get("meta") or {}).get("n_vocab") or 0), prefix=prefix)
    except MALFORMED:
        return Dialect(prefix=prefix)  # a server may do without a list of models


async def _ask_as_it_likes(client: Client) -> tuple[int, str, Client]:
    """Ask; once more in other words where a field is refused that some know by another name, or not at all."""
    status, page = await _ask(client)
    if status == NOT_FOUND and client.target.path and client.dialect.prefix:
        elsewhere = _in_words(client, prefix="")
        other_status, other_page = await _ask(elsewhere)
        if other_status != NOT_FOUND:
            client, status, page = elsewhere, other_status, other_page
    while status in NOT_UNDERSTOOD and (other := _other_words(client, page)) is not None:  # one at a time, as many servers name them
        client = other
        status, page = await _ask(client)
    return status, page, client


def _other_words(client: Client, page: str) -> Client | None:
    """The same without the first thing that the server complains of, if it can be said otherwise."""
    if OUT_OF_TOKENS in page:
        return None
    told = attrs.asdict(client.dialect)
    for name, other in REWORDINGS:
        is_new = any(told[key] != value for key, value in other.items())
        if name in page and is_new and (client.endpoint == "chat" or "limit" not in other):
            return _in_words(client, **other)
    refused = next((name for name in client.sampling_sent if name in page), None)
    return None if refused is None else _in_words(client, refused=(*client.dialect.refused, refused))


def _in_words(client: Client, **words: Any) -> Client:
    return attrs.evolve(client, dialect=attrs.evolve(client.dialect, **words))


async def _ask(client: Client) -> tuple[int, str]:
    ids = random.Random(N_PROBED).choices(known := range(*id_range(client.dialect.n_vocab or N_VOCAB_UNKNOWN)), k=N_PROBED)
    ids[-1] = known[-1]  # who has fewer refuses it here, and not every request of the pass
    return await _fetch(client.target, client.request(Ask(prompt=tuple(ids), n_generated=1), 0))


async def _fetch(target: Target, request: bytes) -> tuple[int, str]:
    pieces: list[bytes] = []
    connections = Connections(target)
    try:
        with trio.fail_after(PROBE_S):
            reader = await connections.fetch(request, pieces.append)
    except trio.TooSlowError as error:
        raise BenchFailed(f"{target.url} did not answer within {PROBE_S:.0f} s") from error
    except FAULTS as error:
        raise BenchFailed(f"cannot reach {target.url}: {fault(error)}") from error
    finally:
        with trio.move_on_after(1, shield=True):
            await connections.close()
    if reader.status in MOVED and "location" in reader.headers:
        return reader.status, f"it is at {reader.headers['location']}"
    return reader.status, b"".join(pieces).decode("utf-8", "replace")


def _is_answer(page: str) -> bool:
    try:
        answer = json.loads(page)
        return bool(answer.get("choices")) and not answer.get("error")
    except MALFORMED:
        return False


def _n_prompt(page: str) -> int | None:
    try:
        n: int | None = json.loads(page)["usage"]["prompt_tokens"]
    except MALFORMED:
        return None
    return n
