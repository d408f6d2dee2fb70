"""What Anthropic's clients get: a message, or the events that it is made of."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from cllm.api.conversation import Answer, AnswerShape
from cllm.api.sse import TextFrame, Wire, named
from cllm.engine.events import Finished, FinishReason, Usage
from cllm.text.call_bodies import as_object


def error_event(error: dict[str, Any]) -> bytes:
    """A stream's last event, when it fails."""
    return named("error", error)


SIGNATURE = "unsigned"  # of reasoning: clients drop what has none, and nobody here looks at what they send back
PING = named("ping", {"type": "ping"})
WIRE = Wire(failed=error_event, ping=lambda: PING)


def message(answer: Answer, model: str, n_ctx: float) -> dict[str, Any]:
    """A whole message. `n_ctx`: the tokens with which the context ends an answer; infinite where that cannot be."""
    return {**_head(model), "content": _blocks(answer), **_end(answer.finished, n_ctx), "usage": _usage(answer.finished.usage)}


def _head(model: str) -> dict[str, Any]:
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": SIGNATURE})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    return blocks + [{"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)} for call in answer.calls]


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; of arguments that were cut short, nothing: this shape has a call for each that began."""
    told = as_object(arguments.strip())
    return {} if told is None else dict(msgspec.json.decode(told))


def _end(finished: Finished, n_ctx: float) -> dict[str, Any]:
    """Why it ended. `n_ctx`: see `message`."""
    if finished.reason is FinishReason.LENGTH:
        is_full = finished.usage.n_prompt + finished.usage.n_generated >= n_ctx
        return {"stop_reason": "model_context_window_exceeded" if is_full else "max_tokens", "stop_sequence": None}
    if finished.reason is FinishReason.TOOL_CALLS:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if isinstance(finished.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": finished.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.n_prompt - usage.n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.n_cached,
        "output_tokens": usage.n_generated,
    }


class MessageStream(AnswerShape):
    """See `AnswerShape`. A message is a row of blocks, one open at a time."""

    def __init__(self, model: str, n_prompt: int, n_ctx: float) -> None:
        """`n_ctx`: see `message`."""
        self._model = model
        self._n_prompt = n_prompt
        self._n_ctx = n_ctx
        self._n_blocks = 0
        self._open: str | int | None = None  # what the block that is open holds: text, thinking, or the call of that number
        self._frame = TextFrame(TextFrame.MARK)

    def first(self) -> bytes:
        """The message without its content. How much of the prompt was cached is told at the end."""
        usage = {"input_tokens": self._n_prompt, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 0}
        empty = {**_head(self._model), "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return named("message_start", {"type": "message_start", "message": empty}) + PING

    def content(self, index: int, text: str) -> bytes:
        """More text."""
        if not text:
            return b""
        if self._open == "text":
            return self._frame(text)
        return self._begin("text", {"type": "text", "text": ""}, {"type": "text_delta", "text": TextFrame.MARK}) + self._frame(text)

    def reasoning(self, index: int, text: str) -> bytes:
        """More reasoning."""
        if not text:
            return b""
        if self._open == "thinking":
            return self._frame(text)
        block, delta = {"type": "thinking", "thinking": "", "signature": ""}, {"type": "thinking_delta", "thinking": TextFrame.MARK}
        return self._begin("thinking", block, delta) + self._frame(text)

    def call_begun(self, index: int, call: int, call_id: str, name: str) -> bytes:
        """A tool is called."""
        block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        return self._begin(call, block, {"type": "input_json_delta", "partial_json": TextFrame.MARK})

    def arguments(self, index: int, call: int, fragment: str) -> bytes:
        """More of the arguments of the call that was begun last."""
        assert self._open == call, "calls come one after the other"
        return self._frame(fragment) if fragment else b""

    def ended(self, index: int, event: Finished) -> bytes:
        """Why it ended, and what it took."""
        return self._close() + named(
            "message_delta", {"type": "message_delta", "delta": _end(event, self._n_ctx), "usage": _usage(event.usage)}
        )

    def last(self) -> bytes:
        """The end."""
        return named("message_stop", {"type": "message_stop"})

    def _begin(self, kind: str | int, block: dict[str, Any], delta: dict[str, Any]) -> bytes:
        closed, i = self._close(), self._n_blocks
        self._open = kind
        self._frame = TextFrame({"type": "content_block_delta", "index": i, "delta": delta}, "content_block_delta")
        return closed + named("content_block_start", {"type": "content_block_start", "index": i, "content_block": block})

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        i, kind, self._open = self._n_blocks, self._open, None
        self._n_blocks += 1
        signed = b""
        if kind == "thinking":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signed = named("content_block_delta", {"type": "content_block_delta", "index": i, "delta": delta})
        return signed + named("content_block_stop", {"type": "content_block_stop", "index": i})
