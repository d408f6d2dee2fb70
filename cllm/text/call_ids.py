"""The ids of calls, as templates take them: clients send back those that they were given, by this server or by another one, or none."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

_SHORT: Final = re.compile("[A-Za-z0-9]{9}")


def short(given: str) -> str:
    """An id of nine letters and digits, which is all that Mistral's templates take; one that is so already stays."""
    return given if _SHORT.fullmatch(given) else hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]


class _OpenCalls:
    """The calls of a turn that have no result yet. What was taken by one way is left out when its turn comes by another."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._all: deque[dict[str, Any]] = deque()
        self._by_id: defaultdict[str, deque[dict[str, Any]]] = defaultdict(deque)
        self._by_name: defaultdict[str, deque[dict[str, Any]]] = defaultdict(deque)

    def add(self, calls: Iterable[dict[str, Any]]) -> None:
        """More calls, in their order."""
        for call in calls:
            self._all.append(call)
            self._by_id[call["id"]].append(call)
            self._by_name[call["function"]["name"]].append(call)

    def take(self, call_id: str | None, name: str | None) -> dict[str, Any] | None:
        """The first one of that id, or else of that name, or else of all."""
        waiting = self._by_id[call_id] if call_id else self._by_name[name] if name else self._all
        while waiting:
            call = waiting.popleft()
            if id(call) not in self._taken:
                self._taken.add(id(call))
                return call
        return None


def with_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, with each result that has no id as that of the first open call, by its name if it has one.

    Ollama's clients send none, nor had OpenAI's when they called functions. Calls without an id are numbered through. Turns of calls that
    follow each other are one, told in parts, as streams tell them.
    """
    open_calls, follows = _OpenCalls(), False
    results: list[dict[str, Any]] = []
    given = {call["id"] for message in messages for call in message.get("tool_calls", ())}
    ids = (name for i in itertools.count() if (name := f"call{i:05}") not in given)  # nine letters and digits, as some templates want
    for message in messages:
        calls = message.get("tool_calls", ())
        for call in calls:
            call["id"] = call["id"] or next(ids)
        if calls:
            _settle(results, open_calls)
            open_calls, results = open_calls if follows else _OpenCalls(), []
            open_calls.add(calls)
        elif message["role"] == "tool":
            results.append(message)
        follows = bool(calls)
    _settle(results, open_calls)
    return messages


def _settle(results: list[dict[str, Any]], open_calls: _OpenCalls) -> None:
    """Give results the calls that they are of: those that name theirs first, in whatever order they stand."""
    for result in sorted(results, key=lambda one: not one.get("tool_call_id")):
        if (call := open_calls.take(result.get("tool_call_id"), result.get("name"))) is not None:
            result["tool_call_id"] = call["id"]


def with_names(messages: Sequence[dict[str, Any]], *, in_turns: bool) -> list[dict[str, Any]]:
    """Return `messages` with ids of calls that name their functions, and the same ids with the results.

    Kimi K2's template shows no names besides, and its model writes `functions.NAME:N` where N counts a conversation's calls from 0. The
    first one that it had makes these ids itself, for the calls alone, and counts those of each turn (`in_turns`).
    """
    named: dict[str, str] = {}
    told, n_calls = [], 0
    for message in messages:
        calls = []
        n_calls = 0 if in_turns else n_calls
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
