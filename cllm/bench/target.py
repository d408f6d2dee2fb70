"""Where requests go and how they are written: the server's address, its dialect of OpenAI's API, and the bytes of a request."""

from __future__ import annotations

import json
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import urlsplit

import attrs

from cllm import __version__
from cllm.bench.workloads import Ask, Sampling, Tokens
from cllm.errors import OperatorError

Endpoint: TypeAlias = Literal["completions", "chat"]

# Short words that most vocabularies have whole, so that a text of n words has about n tokens.
WORDS: Final = (
    "the", "and", "you", "that", "was", "for", "are", "with", "his", "they", "this", "have", "from", "one", "had", "word",
    "but", "not", "what", "all", "were", "when", "your", "can", "said", "there", "use", "each", "which", "she", "how", "time",
)  # fmt: skip


class BenchFailed(OperatorError):
    """The server cannot be measured; the message is one line that says why."""


@attrs.frozen(kw_only=True)
class Target:
    """A server."""

    host: str
    port: int
    is_tls: bool = False
    path: str = ""  # what stands before /v1, or in its place
    api_key: str = attrs.field(default="", repr=False)

    @property
    def url(self) -> str:
        """The address, as a person writes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.path}"

    def head(self, method: str, path: str, n_body: int = 0) -> bytes:
        """The head of a request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        agent = f"User-Agent: cllm-bench/{__version__}"  # what stands before a server may refuse who does not say
        lines = [f"{method} {self.path}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Accept: */*", agent]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {n_body}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def parse_url(url: str, api_key: str = "") -> Target:
    """Read an address, with or without `http://` before it and `/v1` behind it. Raises: ValueError, whose text says what is wrong."""
    complaint = f"not an address as in http://127.0.0.1:8080: {url}"
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
        (host or "").encode("idna")  # refuses what resolvers raise other errors for: labels of no letter, or of too many
    except ValueError as error:
        raise ValueError(complaint) from error
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or not url.isprintable() or " " in url or port == 0:
        raise ValueError(complaint)
    is_tls = parts.scheme == "https"
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError("only a path may stand behind host and port, and nobody before them")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Target(host=host, port=port or (443 if is_tls else 80), is_tls=is_tls, path=path, api_key=api_key)


@attrs.frozen(kw_only=True)
class Dialect:
    """What a server takes of what OpenAI's API does not have."""

    model: str = ""
    n_vocab: int = 0  # 0: the server does not say
    takes_ids: bool = True  # prompts as token ids
    takes_extras: bool = True  # `ignore_eos` and the sampling fields that OpenAI lacks
    limit: str = "max_tokens"  # what it calls the number of tokens
    takes_seed: bool = True
    takes_usage: bool = True  # `stream_options`
    all_tokens: int = 0  # the `top_k` that cuts nothing off
    refused: tuple[str, ...] = ()  # sampling fields that it does not take, or not with the value that was to be sent
    prefix: str = "/v1"  # of paths; some have a path of their own in its place


# What cuts nothing off: sent where tokens are drawn by chance, since servers differ in what they take for granted.
NEUTRAL: Final = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
OPENAI_SAMPLING: Final = frozenset({"temperature", "top_p"})


@attrs.frozen(kw_only=True)
class Client:
    """How the requests of a pass are written."""

    target: Target
    dialect: Dialect = Dialect()
    endpoint: Endpoint = "completions"
    sampling: Sampling
    is_stream: bool = True
    seed: int = 0

    @property
    def _wished(self) -> dict[str, float]:
        own = dict(self.sampling.fields)
        return own if own.get("temperature") == 0 else {**NEUTRAL, "top_k": self.dialect.all_tokens, **own}

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn by chance, as far as the server is told."""
        return "temperature" not in self.sampling_sent or self._wished["temperature"] != 0

    @property
    def sampling_sent(self) -> list[str]:
        """The sampling fields of each request."""
        return [name for name in self._wished if self._takes(name)]

    @property
    def sampling_left_out(self) -> list[str]:
        """Those that the server does not take, so that its own values hold."""
        return [name for name in self._wished if not self._takes(name)]

    def request(self, ask: Ask, number: int) -> bytes:
        """The bytes of the request with this number."""
        body = json.dumps(self._body(ask, number), separators=(",", ":")).encode()
        path = "/chat/completions" if self.endpoint == "chat" else "/completions"
        return self.target.head("POST", self.dialect.prefix + path, len(body)) + body

    def _body(self, ask: Ask, number: int) -> dict[str, Any]:
        fields: dict[str, Any] = {**self._prompt(ask.prompt), self.dialect.limit: ask.n_generated}
        if self.draws and self.dialect.takes_seed:  # some compute a request with a seed by itself, also where it changes nothing
            fields["seed"] = self.seed + number
        fields |= {name: value for name, value in self._wished.items() if self._takes(name)}
        if self.dialect.model:
            fields["model"] = self.dialect.model
        if self.dialect.takes_extras:
            fields["ignore_eos"] = True
        if self.is_stream:
            fields["stream"] = True
        if self.is_stream and self.dialect.takes_usage:
            fields["stream_options"] = {"include_usage": True}
        return fields

    def _takes(self, name: str) -> bool:
        return name not in self.dialect.refused and (self.dialect.takes_extras or name in OPENAI_SAMPLING)

    def _prompt(self, prompt: Tokens) -> dict[str, Any]:
        if self.endpoint == "chat":
            return {"messages": [{"role": "user", "content": words(prompt)}]}
        return {"prompt": prompt if self.dialect.takes_ids else words(prompt)}


def words(prompt: Tokens) -> str:
    """A text in the place of token ids: equal ids give equal words, so that what prompts share stays shared."""
    return " ".join(WORDS[token % len(WORDS)] for token in prompt)
