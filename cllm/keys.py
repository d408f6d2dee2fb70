"""The keys that open the server, and what each may take of it: `KEY [name=WORD] [weight=N] [cap=N] [priority=N]`."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter

import attrs

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@attrs.frozen(kw_only=True)
class ApiKey:
    """A key. `name` stands for it wherever it might be seen."""

    secret: str = attrs.field(repr=False)
    name: str = ""  # what logs and numbers call it
    weight: float = 1.0  # of its requests beside other keys'
    cap: int | None = None  # completions under way at most; None: as all keys
    priority: int | None = 0  # the most urgent that its requests may name, or any key could have all others wait; None: any


def parse_key(text: str) -> ApiKey:
    """Read a key and its options. Raises: ValueError, whose message never shows the key."""
    secret, *options = text.split(" ")
    if not (secret and secret.isascii() and secret.isprintable()):  # it travels in a header
        raise ValueError("a key must be printable ASCII without blanks")
    fields: dict[str, float | int | str] = {}
    for option in filter(None, options):
        name, _, value = option.partition("=")
        if name in fields:
            raise ValueError(f"{name} is given twice for one key")
        fields[name] = _option(name, value)
    return ApiKey(secret=secret, **fields)  # type: ignore[arg-type]  # `_option` gives each its type


@functools.lru_cache(maxsize=4)  # there may be thousands, which are asked for whenever settings are
def named_keys(texts: tuple[str, ...]) -> tuple[ApiKey, ...]:
    """Read keys, and name by their places those that have no name. Raises: ValueError."""
    keys = [parse_key(text) for text in texts]
    named = tuple(key if key.name else attrs.evolve(key, name=f"key{i}") for i, key in enumerate(keys))
    name, n = Counter(key.name for key in named).most_common(1)[0] if named else ("", 0)
    if n > 1:
        raise ValueError(f"two keys are called {name}")
    return named


def _option(name: str, value: str) -> float | int | str:
    if name == "name":
        if not _NAME.fullmatch(value):
            raise ValueError("a key's name must be 1 to 64 letters, digits or _.-")
        return value
    if name == "weight":
        weight = _number(value)
        if not 0 < weight < math.inf:
            raise ValueError("a key's weight must be a number above 0")
        return weight
    if name == "cap":
        if not value.isascii() or not value.isdigit() or int(value) < 1:
            raise ValueError("a key's cap must be a whole number above 0")
        return int(value)
    if name == "priority":
        if not re.fullmatch(r"-?[0-9]{1,9}", value):
            raise ValueError("a key's priority must be a whole number of at most nine digits")
        return int(value)
    raise ValueError("after a key and a blank there may be name=WORD, weight=N, cap=N and priority=N")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
