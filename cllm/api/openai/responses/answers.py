"""What clients of the Responses API get: a response, and the events that tell how it came to be."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from typing import Any

import attrs
import msgspec

from cllm.api.conversation import Answer, AnswerShape
from cllm.api.errors import FAILS_AGAIN
from cllm.api.openai.responses.functions import Names, ToolFields, names_of
from cllm.api.openai.responses.requests import CreateRequest, SentTools, sealed
from cllm.api.sampling_fields import Wanted
from cllm.api.sse import Wire, named
from cllm.api.tool_checks import check_others
from cllm.engine.events import Finished, FinishReason, Usage


def new_id(prefix: str) -> str:
    """An id unlike all others."""
    return f"{prefix}_{uuid.uuid4().hex}"


# --- items -------------------------------------------------------------------------------------------------------------


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _thought_part(text: str) -> dict[str, Any]:
    return {"type": "reasoning_text", "text": text}


def message_item(text: str | None = None, status: str = "in_progress") -> dict[str, Any]:
    """A message; without its text where that is still to come."""
    content = [] if text is None else [_text_part(text)]
    return {"id": new_id("msg"), "type": "message", "role": "assistant", "status": status, "content": content}


def reasoning_item(text: str | None = None, status: str = "in_progress", *, is_sealed: bool = False) -> dict[str, Any]:
    """Reasoning; without its text where that is still to come. If it `is_sealed`, clients that leave out its content can bring it back."""
    content = [] if text is None else [_thought_part(text)]
    item = {"id": new_id("rs"), "type": "reasoning", "status": status, "summary": [], "content": content}
    return item if text is None or not is_sealed else {**item, "encrypted_content": sealed(text)}


def call_item(call_id: str, name: str, names: Names, arguments: str = "", status: str = "in_progress") -> dict[str, Any]:
    """A call of the function that the model calls `name`."""
    which = names.get(name, {"name": name})
    return {"id": new_id("fc"), "type": "function_call", "status": status, "call_id": call_id, **which, "arguments": arguments}


def items_of(answer: Answer, head: ResponseHead) -> list[dict[str, Any]]:
    """An answer's items: where it was cut one is not complete, and there may be no message. A stream tells them in the order in which they
    were written; here the message comes before the calls.
    """
    is_cut = answer.finished.reason is FinishReason.LENGTH
    items = [reasoning_item(answer.reasoning, "completed", is_sealed=head.seals)] if answer.reasoning else []
    if answer.content or not (answer.calls or (is_cut and items)):
        items.append(message_item(answer.content, "completed"))
    items += [call_item(call.id, call.name, head.names, call.arguments, "completed") for call in answer.calls]
    if is_cut:
        items[-1 - len(answer.calls) if answer.content and answer.is_content_last else -1]["status"] = "incomplete"
    return items


_SECRETS = {"authorization", "headers", "domain_secrets"}


def _tools(tools: list[ToolFields], sent: list[dict[str, Any]]) -> list[Any]:
    """Strict clients refuse tools that lack what their type must have, which is known here of functions alone. No secret is told.

    Raises: InvalidRequest, where there is more in the others than in any in use.
    """
    own = {"function", "namespace"}
    told = [msgspec.to_builtins(tool) for tool in tools]
    check_others([whole for tool, whole in zip(told, sent or told, strict=True) if tool["type"] not in own])
    try:
        return [tool if tool["type"] in own else _public(whole) for tool, whole in zip(told, sent or told, strict=True)]
    except RecursionError:  # then what is known of them must do
        return told


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _public(member) for name, member in value.items() if name not in _SECRETS}
    return [_public(member) for member in value] if isinstance(value, list) else value


# --- the response ------------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class ResponseHead:
    """All of a response but what comes of it; made once for a request."""

    members: dict[str, Any]
    names: Names  # of the functions that may be called
    seals: bool  # reasoning that is not kept here comes back with the next request or not at all, and so it does where that is asked for

    @classmethod
    def of(cls, body: CreateRequest, sent: SentTools | None, asked: Wanted, model: str, *, stored: bool) -> ResponseHead:
        """A new response's: what was asked for, with the defaults filled in, and tools that are not called here as they were `sent`."""
        form = None if body.text is None else body.text.format
        return cls(
            {
                "id": new_id("resp"),
                "object": "response",
                "created_at": int(time.time()),
                "background": False,
                "instructions": body.instructions,
                "max_output_tokens": body.max_output_tokens,
                "metadata": body.metadata or {},
                "model": model,
                "parallel_tool_calls": body.parallel_tool_calls is not False,
                "previous_response_id": body.previous_response_id,
                "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
                "store": stored,
                "temperature": asked.sampling.temperature,
                "text": {"format": {"type": "text"} if form is None else msgspec.to_builtins(_shown(form))},
                "tool_choice": "auto" if body.tool_choice is None else msgspec.to_builtins(body.tool_choice),
                "tools": _tools(body.tools or [], (None if sent is None else sent.tools) or []),
                "top_p": asked.sampling.top_p,
                "truncation": body.truncation or "disabled",
                "user": body.user,
            },
            names_of(body.tools or []),
            not stored or "reasoning.encrypted_content" in (body.include or ()),
        )

    @property
    def id(self) -> str:
        """The response's."""
        return str(self.members["id"])

    def begun(self) -> dict[str, Any]:
        """The response before anything has come."""
        return self._response("in_progress", [])

    def ended(self, output: list[dict[str, Any]], finished: Finished) -> dict[str, Any]:
        """The response when all has come."""
        usage = _usage(finished.usage)
        if finished.reason is FinishReason.LENGTH:
            return self._response("incomplete", output, usage=usage, incomplete_details={"reason": "max_output_tokens"})
        return self._response("completed", output, usage=usage, completed_at=int(time.time()))

    def failed(self, output: list[dict[str, Any]], error: dict[str, Any]) -> dict[str, Any]:
        """The response when it came to nothing. Codex asks again for what is a server's error, and not for an invalid prompt's."""
        code = "invalid_prompt" if error["code"] in FAILS_AGAIN else "server_error"
        return self._response("failed", output, error={"code": code, "message": error["message"]})

    def _response(self, status: str, output: list[dict[str, Any]], **members: Any) -> dict[str, Any]:
        outcome = {"status": status, "output": output, "error": None, "incomplete_details": None, "usage": None}
        return {**self.members, **outcome, **members}


def _shown(form: Any) -> dict[str, Any]:
    shown = {name: getattr(form, name) for name in ("type", "name", "description", "strict") if getattr(form, name) is not None}
    return {**shown, "schema": json.loads(bytes(form.schema))} if form.type == "json_schema" else shown


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.n_prompt,
        "input_tokens_details": {"cached_tokens": usage.n_cached, "cache_write_tokens": 0},
        "output_tokens": usage.n_generated,
        "output_tokens_details": {"reasoning_tokens": usage.n_reasoning},
        "total_tokens": usage.n_prompt + usage.n_generated,
    }


# --- the stream --------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class _Open:
    """The item that is being told."""

    item: dict[str, Any]
    pieces: list[str] = attrs.field(factory=list)


class ResponseStream(AnswerShape):
    """See `AnswerShape`. An answer is a row of items, one open at a time; every event has a name and a number."""

    def __init__(self, head: ResponseHead, on_end: Callable[[dict[str, Any]], None]) -> None:
        self._head = head
        self._on_end = on_end
        self._n_events = 0
        self._output: list[dict[str, Any]] = []
        self._open: _Open | None = None
        self.wire = Wire(failed=self._failed, ping=self._still_there)

    def first(self) -> bytes:
        """That it has begun."""
        begun = self._head.begun()
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def content(self, index: int, text: str) -> bytes:
        """More text."""
        if not text:
            return b""
        begun = self._begin_part("message", message_item, _text_part(""))
        return begun + self._piece("response.output_text.delta", text, content_index=0, logprobs=[])

    def reasoning(self, index: int, text: str) -> bytes:
        """More reasoning."""
        if not text:
            return b""
        begun = self._begin_part("reasoning", reasoning_item, _thought_part(""))
        return begun + self._piece("response.reasoning_text.delta", text, content_index=0)

    def call_begun(self, index: int, call: int, call_id: str, name: str) -> bytes:
        """A function is called."""
        return self._close() + self._begin(call_item(call_id, name, self._head.names))

    def arguments(self, index: int, call: int, fragment: str) -> bytes:
        """More of a call's arguments."""
        return self._piece("response.function_call_arguments.delta", fragment) if fragment else b""

    def ended(self, index: int, event: Finished) -> bytes:
        """The whole response. It is kept before it is told, so that the next request may go on from it."""
        status = "incomplete" if event.reason is FinishReason.LENGTH else "completed"
        kinds = {item["type"] for item in self._output} | ({self._open.item["type"]} if self._open is not None else set())
        has_all = bool(kinds - {"reasoning"}) or (bool(kinds) and status == "incomplete")
        told = b"" if has_all else self._begin_part("message", message_item, _text_part(""))
        told += self._close(status)
        response = self._head.ended(self._output, event)
        self._on_end(response)
        return told + self._event(f"response.{status}", response=response)

    def _still_there(self) -> bytes:
        """A comment would do for other clients; Codex gives up a stream without an event in five minutes, and asks for all of it again."""
        return self._event("response.in_progress", response=self._head.begun())

    def _failed(self, error: dict[str, Any]) -> bytes:
        output = [*self._output, *([] if self._open is None else [_filled(self._open, "incomplete", self._head)])]
        return self._event("response.failed", response=self._head.failed(output, error["error"]))

    # --- items --------------------------------------------------------------------------------------------------------

    def _begin_part(self, kind: str, make: Callable[[], dict[str, Any]], part: dict[str, Any]) -> bytes:
        """Open an item that has one part, unless it is open."""
        if self._open is not None and self._open.item["type"] == kind:
            return b""
        begun = self._close() + self._begin(make())
        return begun + self._of_item("response.content_part.added", content_index=0, part=part)

    def _begin(self, item: dict[str, Any]) -> bytes:
        self._open = _Open(item)
        return self._event("response.output_item.added", output_index=len(self._output), item=item)

    def _piece(self, name: str, text: str, **members: Any) -> bytes:
        assert self._open is not None
        self._open.pieces.append(text)
        return self._of_item(name, delta=text, **members)

    def _close(self, status: str = "completed") -> bytes:
        """Tell the item that is open in full."""
        if self._open is None:
            return b""
        item = _filled(self._open, status, self._head)
        if item["type"] == "function_call":
            told = self._of_item("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            told = self._part_done(item)
        told += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = None
        return told

    def _part_done(self, item: dict[str, Any]) -> bytes:
        (part,) = item["content"]
        if item["type"] == "reasoning":
            told = self._of_item("response.reasoning_text.done", content_index=0, text=part["text"])
        else:
            told = self._of_item("response.output_text.done", content_index=0, text=part["text"], logprobs=[])
        return told + self._of_item("response.content_part.done", content_index=0, part=part)

    def _of_item(self, kind: str, /, **members: Any) -> bytes:
        assert self._open is not None
        return self._event(kind, item_id=self._open.item["id"], output_index=len(self._output), **members)

    def _event(self, kind: str, /, **members: Any) -> bytes:
        number = self._n_events
        self._n_events += 1
        return named(kind, {"type": kind, "sequence_number": number, **members})


def _filled(told: _Open, status: str, head: ResponseHead) -> dict[str, Any]:
    """An item with all that came for it."""
    text = "".join(told.pieces)
    filled = {**told.item, "status": status}
    if filled["type"] == "function_call":
        return {**filled, "arguments": text}
    if filled["type"] == "reasoning":
        return {**filled, "content": [_thought_part(text)], **({"encrypted_content": sealed(text)} if head.seals else {})}
    return {**filled, "content": [_text_part(text)]}
