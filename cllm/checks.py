"""Values of settings that have a form of their own, and what is held to it. Nothing here imports NumPy or a backend."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

import attrs

from cllm.errors import SettingsError
from cllm.files import why_no_file
from cllm.keys import parse_key

METRICS_OF: Final = ("vllm", "llamacpp")  # by whose names numbers may be told, too


_USUAL_PORTS: Final = {"http": ":80", "https": ":443"}


def is_origin(text: str) -> bool:
    """Whether it is one as browsers write it, in lower case and without the usual port: origins are compared letter by letter."""
    try:
        parts = urlsplit(text)
    except ValueError:  # a bracket without its other one
        return False
    has_scheme = bool(parts.scheme) and parts.scheme != "file"  # also `app://obsidian.md` and the like
    is_written_so = text == text.lower() and not text.endswith(_USUAL_PORTS.get(parts.scheme, " "))
    return text == "*" or (has_scheme and is_written_so and bool(parts.netloc) and not (parts.path or parts.query or parts.fragment))


def is_split(text: str) -> bool:
    try:
        shares = split_shares(text)
    except ValueError:
        return False
    return bool(shares) and all(math.isfinite(s) and s >= 0 for s in shares) and sum(shares) > 0


def split_lora(text: str) -> tuple[str, float]:
    """Return path and scale of `PATH` or `PATH:SCALE`; what does not read as a number belongs to the path."""
    path, colon, scale = text.rpartition(":")
    try:
        return (path, float(scale)) if colon else (text, 1.0)
    except ValueError:
        return text, 1.0


def split_words(text: str) -> tuple[str, ...]:
    """Return the words of `a,b`."""
    return tuple(word.strip() for word in text.split(","))


def split_shares(text: str) -> tuple[float, ...]:
    """Return the numbers of `3,1`. Raises: ValueError."""
    return tuple(float(share) for share in text.split(","))


def at_home(value: Any) -> Any:
    """Return a path, or each of several, with a leading ~ as a shell would have it: none has seen what is in a file or a variable."""
    if isinstance(value, tuple):
        return tuple(at_home(item) for item in value)
    return os.path.expanduser(value) if isinstance(value, str) else value


# --- checks: called with the settings, the attribute and its value, as attrs does --------------------------------------

Check: TypeAlias = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def check_each(holds: Callable[[Any], bool], complaint: str) -> Check:
    """Refuse a value, or an item of a tuple, for which `holds` is False. None stands for "not given" and always passes."""

    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        for item in value if isinstance(value, tuple) else (value,):
            if item is not None and not holds(item):
                raise SettingsError(complaint.format(item), attribute.name)

    return check


def check_file(path_of: Callable[[str], str | None]) -> Check:
    """Refuse a text that names a file, as `path_of` has it, where there is none to be read."""

    def check(_: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        for item in value if isinstance(value, tuple) else (value,):
            path = None if item is None else path_of(item)
            if path is not None and (why := why_no_file(path)):
                raise SettingsError(f"{why}: {item}", attribute.name)

    return check


def between(low: int, high: int) -> Check:
    return check_each(lambda n: low <= n <= high, f"must be {low} to {high}, not {{}}")


def at_least(low: int) -> Check:
    return check_each(lambda n: low <= n, f"must be at least {low}, not {{}}")


def at_most(high: int) -> Check:
    return check_each(lambda n: n <= high, f"must be at most {high}, not {{}}")


positive = check_each(lambda x: x > 0 and math.isfinite(x), "must be more than 0, not {}")
not_negative = check_each(lambda x: x >= 0 and math.isfinite(x), "must be 0 or more, not {}")
not_empty = check_each(lambda text: bool(text.strip()), "must not be empty")
has_home = check_each(lambda text: not text.startswith("~"), "there is no home directory for {}")
readable_file = check_file(lambda text: text)
known_aliases = check_each(lambda text: set(split_words(text)) <= {*METRICS_OF}, "must be some of vllm,llamacpp, not {}")
lora_file = check_file(lambda text: split_lora(text)[0])
lora_scale = check_each(lambda text: math.isfinite(split_lora(text)[1]), "the scale must be a finite number: {}")
name_value = check_each(lambda text: text.partition("=")[0].strip() and "=" in text, "must be NAME=VALUE, not {}")
# A model that is not a file name is the hub's, or its backend knows it by a name of its own.
model_file = check_file(lambda text: text if text.lower().endswith(".gguf") and ":" not in text else None)


def parsable_keys(_: object, attribute: attrs.Attribute[Any], texts: tuple[str, ...]) -> None:
    for text in texts:
        try:
            parse_key(text)
        except ValueError as error:
            raise SettingsError(str(error), attribute.name) from None


origin = check_each(is_origin, "must be * or an origin as browsers send it (https://example.org), not {}")
shares = check_each(is_split, "must be numbers with commas between, as in 3,1, not {}")
