"""What holds for every request whatever it asks: who may ask, by which id it is known, and which web pages may read the answer."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import urlsplit

from quart import Response, g, request
from quart_trio import QuartTrio

from cllm.api.context import KEY_NAME, Context, route_path
from cllm.config import Settings, api_keys, is_address, is_loopback
from cllm.errors import NotAuthenticated, NotPermitted
from cllm.keys import ApiKey
from cllm.serve.http.requests import REQUEST_ID

OPEN = ApiKey(secret="", priority=None)  # whose requests are nobody's
_ID_FORM = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_CORS_HEADERS = "authorization, content-type, x-api-key, x-request-id"
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2048}")
_CORS_EXPOSED = "retry-after, x-should-retry, x-request-id, request-id, x-cllm-cached-tokens, x-cllm-queue-ms"
_ANTHROPIC = "/v1/messages"
_CORS_MAX_AGE_S = 600
_CHANGES_NOTHING = ("GET", "HEAD", "OPTIONS")


def install(app: QuartTrio, context: Context) -> None:
    """Put the guards before and after every request of `app`."""
    keys = Keys(api_keys(context.settings))
    public = frozenset(one.path for one in context.operations if one.public)

    @app.before_request
    async def enter() -> Response | None:
        g.started_at = time.perf_counter()
        scope = cast(dict[str, Any], request.scope)  # in which it is for the log
        g.request_id = scope[REQUEST_ID] = _request_id(request.headers.get("X-Request-Id"))
        if _is_preflight():
            return _preflight()
        key = OPEN if route_path() in public else keys.check(_given_keys())
        g.key, g.priority_least = key.name, key.priority
        scope[KEY_NAME] = key.name
        if keys.is_open:
            _check_page(context.settings)
        return None

    @app.after_request
    async def leave(response: Response) -> Response:
        response.headers["x-request-id"] = g.get("request_id") or uuid.uuid4().hex
        if route_path().startswith(_ANTHROPIC):  # whose clients tell it by that name, with their errors, too
            response.headers["request-id"] = response.headers["x-request-id"]
        if request.method == "OPTIONS" and response.mimetype == "text/html":
            del response.headers["Content-Type"]  # the framework's guess at what nothing is
        _open_to_pages(response, context.settings)
        rule = request.url_rule
        endpoint, method = ("none", "none") if rule is None else (rule.rule, request.method)  # no label that a client may choose
        context.metrics.requests.labels(endpoint, method, response.status_code).inc()
        return response


class Keys:
    """The keys that open the server; none, and it is open."""

    def __init__(self, keys: tuple[ApiKey, ...]) -> None:
        self._keys = keys
        self._digests = [_digest(key.secret) for key in keys]

    @property
    def is_open(self) -> bool:
        """Whether there are none."""
        return not self._keys

    def check(self, given: Sequence[str]) -> ApiKey:
        """Return whose request it is, by the first one `given` that is a key. Raises: NotAuthenticated."""
        if self.is_open:
            return OPEN
        for candidate in map(_digest, given):
            matches = [hmac.compare_digest(key, candidate) for key in self._digests]  # all of them, of equal length: the time tells nothing
            if any(matches):
                return self._keys[matches.index(True)]
        raise NotAuthenticated("this server wants a key: Authorization: Bearer KEY, or X-Api-Key: KEY", code="invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def _given_keys() -> list[str]:
    """Some clients send both headers, one of which is meant for another server."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    return [*([key.strip()] if scheme.lower() == "bearer" else []), request.headers.get("X-Api-Key", "").strip()]


def _request_id(given: str | None) -> str:
    return given if given is not None and _ID_FORM.fullmatch(given) else uuid.uuid4().hex


def _check_page(settings: Settings) -> None:
    """Refuse what a page of another site posts: browsers send it unasked, and here it needs no key. Raises: NotPermitted.

    Source: `CrossOriginProtection` of Go's net/http, and Ollama's `AllowedOrigins`.
    """
    origin = request.headers.get("Origin")
    if request.method in _CHANGES_NOTHING or not origin:  # programs send none
        return
    # Which tells also behind a proxy that sends another host on. Browsers leave it out where there is no TLS.
    if request.headers.get("Sec-Fetch-Site") in ("same-origin", "none"):
        return
    is_here = _is_here(request.scope.get("server"))
    if not {"*", origin} & set(settings.cors_origin) and not _is_at_home(origin, request.headers.get("Host", ""), is_here=is_here):
        way = "--cors-origin lets them" if "://" in origin else "keys, or --cors-origin '*', let them"
        raise NotPermitted(f"pages of {origin[:100]} may not ask this server; {way}", code="origin_not_allowed")


def _is_here(server: Any) -> bool:
    """Whether who asks came to an address that is this machine's alone, as ASGI tells it: a program here, or a proxy."""
    return server is not None and is_loopback(str(server[0]))


def _is_at_home(origin: str, host: str, *, is_here: bool) -> bool:
    """Whether it is the server's own page, one of this machine's, or no page of the web at all: an app's or an extension's.

    A page's name may be made to point here once it was loaded (DNS rebinding), so that it counts as the server's own where it comes from
    this machine, `is_here`, only if it is no name but an address, or if there is TLS, whose certificate would be another's.
    """
    try:
        parts = urlsplit(origin.lower())
        name = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme not in ("http", "https"):
        return bool(parts.scheme)  # "null" has none: that may be any page
    if name in ("localhost", "127.0.0.1", "::1") or name.endswith(".localhost"):
        return True
    may_be_foreign = is_here and parts.scheme == "http" and not is_address(name)
    return not may_be_foreign and parts.netloc == host.lower().removesuffix(":443" if parts.scheme == "https" else ":80")


def _is_preflight() -> bool:
    return request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers


def _preflight() -> Response:
    response = Response(b"", 204)
    del response.headers["Content-Length"]  # which a 204 may not have (RFC 9110, 8.6)
    return response


def _allowed_headers() -> str:
    """Whatever the page asks for: SDKs send some of their own, and none of them means anything here."""
    asked = request.headers.get("Access-Control-Request-Headers", "")
    return asked if _HEADER_NAMES.fullmatch(asked) else _CORS_HEADERS


def _open_to_pages(response: Response, settings: Settings) -> None:
    origins = settings.cors_origin
    if not origins:
        return
    headers = response.headers
    if "*" not in origins:
        headers.add("Vary", "Origin")
    origin = request.headers.get("Origin")
    if origin is None or ("*" not in origins and origin not in origins):
        return
    headers["Access-Control-Allow-Origin"] = "*" if "*" in origins else origin
    headers["Access-Control-Expose-Headers"] = _CORS_EXPOSED
    if _is_preflight():
        headers["Access-Control-Allow-Methods"] = "GET, POST, DELETE, OPTIONS"
        headers["Access-Control-Allow-Headers"] = _allowed_headers()
        headers.add("Vary", "Access-Control-Request-Headers")
        headers["Access-Control-Max-Age"] = str(_CORS_MAX_AGE_S)
