"""What Ollama's clients get: an object, or lines of them that add up to it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TypeAlias

import msgspec

from cllm.api.conversation import Answer, AnswerShape
from cllm.api.operations import NDJSON
from cllm.api.sse import Wire, line
from cllm.engine.events import Finished, FinishReason

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


def whole(answer: Answer, model: str, body: Body) -> dict[str, Any]:
    """An answer in one object."""
    said: dict[str, Any] = {"content": answer.content}
    if answer.reasoning:
        said["thinking"] = answer.reasoning
    if answer.calls:
        said["tool_calls"] = [_call(i, call.id, call.name, call.arguments) for i, call in enumerate(answer.calls)]
    return {**head(model), **body(said), **_end(answer.finished)}


def nothing_asked(model: str, body: Body, *, unload: bool) -> dict[str, Any]:
    """The answer to a request without a prompt, by which clients load a model, or let it go: here that is the operator's."""
    return {**head(model), **body({}), "done": True, "done_reason": "unload" if unload else "load"}


def _call(index: int, call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call, which has a number of its own: there are clients that take those with one number for pieces of one."""
    try:
        value = msgspec.json.decode(arguments)
    except msgspec.DecodeError:  # cut short
        value = {}
    return {"id": call_id, "function": {"index": index, "name": name, "arguments": value if isinstance(value, dict) else {}}}


def _end(finished: Finished) -> dict[str, Any]:
    usage = finished.usage
    return {
        "done": True,
        "done_reason": "length" if finished.reason is FinishReason.LENGTH else "stop",
        "total_duration": _ns(usage.queue_s + usage.prefill_s + usage.decode_s),
        "load_duration": 0,
        "prompt_eval_count": usage.n_prompt,
        "prompt_eval_duration": _ns(usage.prefill_s),
        "eval_count": usage.n_generated,
        "eval_duration": _ns(usage.decode_s),
    }


def _ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


class LineStream(AnswerShape):
    """See `AnswerShape`. Calls are told whole: their arguments are kept until something else comes when they are, or the end."""

    def __init__(self, model: str, body: Body) -> None:
        self._model = model
        self._body = body
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
        """The last call, and the end."""
        return self._called() + line({**head(self._model), **self._body({}), **_end(event)})

    def _called_if_whole(self) -> bytes:
        if self._call is not None:
            try:
                msgspec.json.decode("".join(self._arguments))
            except msgspec.DecodeError:
                return b""
        return self._called()

    def _called(self) -> bytes:
        if self._call is None:
            return b""
        call = _call(*self._call, "".join(self._arguments))
        self._call, self._arguments = None, []
        return self._line({"tool_calls": [call]})

    def _line(self, said: dict[str, Any]) -> bytes:
        return line({**head(self._model), **self._body(said), "done": False})
