"""What the operator says of the upstreams: their URLs, and the backend's own settings."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import attrs

from cllm.backend import ModelSpec
from cllm.errors import LoadFailed
from cllm_backend_upstream.kinds import KINDS
from cllm_backend_upstream.pool import N_PLACES

KEY_VARIABLE: Final = "UPSTREAM_API_KEY"
SECONDS_MAX: Final = 86_400.0
_PLAIN: Final = re.compile(r"[!-~]+")  # what a request's head can carry


@attrs.frozen(kw_only=True)
class Options:
    """The settings."""

    urls: tuple[str, ...]  # without a slash and without /v1 at their ends
    n_live: int | None = None  # requests at once in all; None: as many as there are places
    model: str = ""  # what the upstreams call the model; empty: the only one that they have
    kind: str = ""  # what the upstreams are; empty: as they say
    key: str = attrs.field(default="", repr=False)
    n_ctx: int | None = None
    parallel: int | None = None  # requests at once on each; None: N_PLACES, or what makes n_live in all
    connect_s: float = 5.0
    first_token_s: float = 300.0
    token_s: float = 60.0  # between two
    health_s: float = 5.0  # between two checks, and for one to be answered

    @property
    def n_places(self) -> int:
        """Requests at once on each upstream."""
        return self.parallel or max(N_PLACES, math.ceil((self.n_live or 0) / len(self.urls)))

    @property
    def n_live_max(self) -> int:
        """Requests at once in all."""
        n_all = self.n_places * len(self.urls)
        return min(self.n_live or n_all, n_all)


def options_of(spec: ModelSpec) -> Options:
    """Read them. Raises: LoadFailed, which says what is wrong with which."""
    given = dict(spec.options)
    if unknown := given.keys() - {"key_file", *_READERS}:
        raise LoadFailed(f"upstream: there is no option {min(unknown)}; there are key_file, {', '.join(sorted(_READERS))}")
    key = _key(given.pop("key_file", ""))
    return Options(urls=_urls(spec.path), n_live=spec.n_live, key=key, **_read(given))


def _read(given: Mapping[str, str]) -> dict[str, Any]:
    read: dict[str, Any] = {}
    for name, text in given.items():
        try:
            read[name] = _READERS[name](text)
        except ValueError as error:
            raise LoadFailed(f"upstream: {name}: {error}, not {text!r}") from error
    return read


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:10]) <= 1 << 30):
        raise ValueError("expected a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= SECONDS_MAX:
        raise ValueError("expected a number of seconds")
    return seconds


def _kind(text: str) -> str:
    if text not in KINDS:
        raise ValueError(f"expected one of {', '.join(sorted(KINDS))}")
    return text


_READERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "model": str,
    "kind": _kind,
    "n_ctx": _count,
    "parallel": _count,
    "connect_s": _seconds,
    "first_token_s": _seconds,
    "token_s": _seconds,
    "health_s": _seconds,
}


def _urls(path: str) -> tuple[str, ...]:
    urls = tuple(dict.fromkeys(_url(text.strip()) for text in path.split(",") if text.strip()))
    if not urls:
        raise LoadFailed("upstream: which servers? Name them: --model http://HOST:PORT, several with commas between")
    return urls


def _url(text: str) -> str:
    try:
        url = urlsplit(text)
        is_good = url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:
        is_good = False
    if not is_good or not _PLAIN.fullmatch(text):
        raise LoadFailed(f"upstream: {text[:200]!r} is no URL of a server, as http://127.0.0.1:8000 is")
    if "@" in url.netloc or url.query or url.fragment:
        raise LoadFailed(
            f"upstream: {url.hostname}: a URL has no user, query or fragment here; a key is given by key_file or {KEY_VARIABLE}"
        )
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def _key(path: str) -> str:
    try:
        key = Path(path).read_text("utf-8").strip() if path else os.environ.get(KEY_VARIABLE, "").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise LoadFailed(f"upstream: key_file {path}: {error}") from error
    if not key.isascii() or not key.isprintable() or " " in key:
        raise LoadFailed("upstream: the key has characters that no header can carry")
    return key
