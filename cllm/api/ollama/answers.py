"""What Ollama's clients get: an object, or lines of them that add up to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeAlias

import attrs
import msgspec
from quart import g

from cllm.api.conversation import Answer, AnswerShape
from cllm.api.operations import NDJSON
from cllm.api.sse import Wire, line
from cllm.engine.events import Finished, FinishReason
from cllm.text.call_bodies import as_object

NS_PER_S = 1_000_000_000
WIRE = Wire(failed=line, ping=None, content_type=NDJSON)  # there is no line that says nothing: clients read each as JSON

Body: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
"""What a piece of an answer stands in: /api/chat's message, or /api/generate's plain members."""


def chat_body(said: dict[str, Any]) -> dict[str, Any]:
    """/api/chat's."""
    return {"message": {"role": "assistant", "content": "", **said}}


def generate_body(said: dict[str, Any]) -> dict[str, Any]:
    """/api/generate's."""
    return {"response": said.pop("content", ""), **said}


def head(model: str) -> dict[str, Any]:
    """What every object begins with."""
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


@attrs.frozen
class Arrival:
    """When a request came, by `time.perf_counter`, and for how long it waited for its model to be loaded."""

    at: float
    load_s: float = 0.0

    @classmethod
    def of_current(cls) -> Arrival:
        """The current request's."""
        return cls(g.started_at, g.get("load_s", 0.0))

    def durations(self) -> dict[str, int]:
        """All that it has taken so far, and what of that was the load."""
        return {"total_duration": _ns(time.perf_counter() - self.at), "load_duration": _ns(self.load_s)}


def whole(answer: Answer, model: str, body: Body, arrival: Arrival) -> dict[str, Any]:
    """An answer in one object."""
    said: dict[str, Any] = {"content": answer.content}
    if answer.reasoning:
        said["thinking"] = answer.reasoning
    is_cut, i_last = _is_cut(answer.finished), len(answer.calls) - 1
    told = [_call(i, call.id, call.name, call.arguments, is_cut=is_cut and i == i_last) for i, call in enumerate(answer.calls)]
    if calls := [call for call in told if call is not None]:
        said["tool_calls"] = calls
    return {**head(model), **body(said), **_end(answer.finished, arrival)}


def nothing_asked(model: str, body: Body, *, unload: bool) -> dict[str, Any]:
    """The answer to a request without a prompt, by which clients load a model, or let it go: here that is the operator's."""
    return {**head(model), **body({}), "done": True, "done_reason": "unload" if unload else "load"}


def _call(index: int, call_id: str, name: str, arguments: str, *, is_cut: bool) -> dict[str, Any] | None:
    """A call, which has a number of its own: there are clients that take those with one number for pieces of one.

    None where its arguments are no object, as of one that was cut: an object is all that this shape has a place for, and clients would run
    the call without them. A call that has none comes with an empty object, from some servers behind this one with no text or null; but if
    the answer `is_cut` in the call, no text is what was not written yet.
    """
    given = arguments.strip()
    told = "{}" if given == "null" or not (given or is_cut) else as_object(given)
    return None if told is None else {"id": call_id, "function": {"index": index, "name": name, "arguments": msgspec.json.decode(told)}}


def _is_cut(finished: Finished) -> bool:
    return finished.reason is FinishReason.LENGTH


def _end(finished: Finished, arrival: Arrival) -> dict[str, Any]:
    usage = finished.usage
    return {
        "done": True,
        "done_reason": "length" if _is_cut(finished) else "stop",
        **arrival.durations(),
        "prompt_eval_count": usage.n_prompt,
        "prompt_eval_duration": _ns(usage.prefill_s),
        "eval_count": usage.n_generated,
        "eval_duration": _ns(usage.decode_s),
    }


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


class LineStream(AnswerShape):
    """See `AnswerShape`. Calls are told whole: their arguments are kept until something else comes when they are, or the end."""

    def __init__(self, model: str, body: Body, arrival: Arrival) -> None:
        self._model = model
        self._body = body
        self._arrival = arrival
        self._call: tuple[int, str, str] | None = None
        self._arguments: list[str] = []

    def content(self, index: int, text: str) -> bytes:
        """More text."""
        return self._called_if_whole() + self._line({"content": text}) if text else b""

    def reasoning(self, index: int, text: str) -> bytes:
        """More reasoning."""
        return self._called_if_whole() + self._line({"thinking": text}) if text else b""

    def call_begun(self, index: int, call: int, call_id: str, name: str) -> bytes:
        """A tool is called: what was called before is known now."""
        before = self._called()
        self._call = call, call_id, name
        return before

    def arguments(self, index: int, call: int, fragment: str) -> bytes:
        """More of a call's arguments."""
        if self._call is not None:
            self._arguments.append(fragment)
        return b""

    def ended(self, index: int, event: Finished) -> bytes:
        """The last call, unless it was cut, and the end."""
        return self._called(is_cut=_is_cut(event)) + line({**head(self._model), **self._body({}), **_end(event, self._arrival)})

    def _called_if_whole(self) -> bytes:
        if self._call is not None:
            try:
                msgspec.json.decode("".join(self._arguments))
            except msgspec.DecodeError:
                return b""
        return self._called()

    def _called(self, *, is_cut: bool = False) -> bytes:
        if self._call is None:
            return b""
        call = _call(*self._call, "".join(self._arguments), is_cut=is_cut)
        self._call, self._arguments = None, []
        return b"" if call is None else self._line({"tool_calls": [call]})

    def _line(self, said: dict[str, Any]) -> bytes:
        return line({**head(self._model), **self._body(said), "done": False})
