"""The ids of calls, as templates take them: clients send back the ids that they were given, by this server or by another one."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

_SHORT: Final = re.compile("[A-Za-z0-9]{9}")


def short(given: str) -> str:
    """An id of nine letters and digits, which is all that Mistral's templates take; one that is so already stays."""
    return given if _SHORT.fullmatch(given) else hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]


def with_names(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` with ids of calls that name their functions, and the same ids with the results.

    Kimi K2's template shows no names besides, and its model writes `functions.NAME:N` where N counts a conversation's calls from 0.
    """
    named: dict[str, str] = {}
    told, n_calls = [], 0
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            new_id = f"functions.{name}:{n_calls}"
            if isinstance(given := call.get("id"), str):
                named[given] = new_id
            calls.append({**call, "id": new_id})
            n_calls += 1
        if calls:
            message = message | {"tool_calls": calls}
        if (given := message.get("tool_call_id")) in named:
            message = message | {"tool_call_id": named[given]}
        told.append(message)
    return told
