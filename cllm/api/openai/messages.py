"""OpenAI's messages: their types, and what templates and the other surfaces' conversations have in their place."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cllm.errors import InvalidRequest
from cllm.text.call_bodies import as_object
from cllm.text.call_ids import with_ids

_HALVES = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")  # escapes of half characters, alone or in a pair

ROLES = {  # developer is OpenAI's newer name, function its older one
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


# What tools gave, which the model asked for: to refuse it would end the conversation, of which it stays a part.
_IMAGE, _FILE = "(an image, which cannot be seen here)", "(a file, which cannot be read here)"
NOT_SEEN = {"image_url": _IMAGE, "input_image": _IMAGE, "file": _FILE, "input_file": _FILE}


class Part(msgspec.Struct):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Called(msgspec.Struct):
    """The function of a call; arguments are JSON text, or the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCallFields(msgspec.Struct):
    """A call that an earlier answer made."""

    function: Called
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct):
    """One turn of a conversation."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # the same, as newer servers name it, where it is a text
    refusal: str | None = None
    tool_calls: Annotated[list[ToolCallFields], Meta(max_length=1024)] | None = None
    tool_call_id: str | None = None
    function_call: Called | None = None


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as templates expect them. Raises: InvalidRequest, which names the field."""
    return with_ids([_message(message, f"messages[{i}]") for i, message in enumerate(messages)])


def _message(message: Message, place: str) -> dict[str, Any]:
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(f"{place}.role: expected one of {', '.join(ROLES)}", param=f"{place}.role")
    calls = _calls(message, place)
    if calls and role != "assistant":
        raise InvalidRequest(f"{place}.tool_calls: only the assistant calls tools", param=f"{place}.tool_calls")
    rendered: dict[str, Any] = {"role": role, "content": _content(message, place)}
    known = {"name": message.name, "reasoning_content": _reasoning(message), "tool_call_id": message.tool_call_id}
    rendered.update({name: value for name, value in known.items() if value is not None})
    return rendered | ({"tool_calls": calls} if calls else {})


def _reasoning(message: Message) -> str | None:
    if message.reasoning_content is None and isinstance(message.reasoning, str):
        return message.reasoning
    return message.reasoning_content


def _calls(message: Message, place: str) -> list[dict[str, Any]]:
    given = message.tool_calls or []
    calls = [_call(call.function, call.id, f"{place}.tool_calls[{i}].function") for i, call in enumerate(given)]
    if message.function_call is not None:
        calls.append(_call(message.function_call, None, f"{place}.function_call"))
    return calls


def _call(called: Called, call_id: str | None, place: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": called.name, "arguments": _arguments(called, place)}}


def _arguments(called: Called, place: str) -> str:
    if isinstance(called.arguments, dict):
        return msgspec.json.encode(called.arguments).decode()
    arguments = arguments_told(called.arguments or "")
    if arguments is None:
        raise InvalidRequest(f"{place}.arguments: expected a JSON object as text", param=f"{place}.arguments")
    return arguments


def arguments_told(text: str) -> str | None:
    """The arguments of an earlier call as text of a JSON object; None: they are something else.

    Some clients write them twice, as JSON of a text that is JSON: always, or where they could not read what a model wrote. Others write
    `null` or `[]` where there are none, and of a call that was cut in them, as ours are by `max_tokens`, there are none. It stays a part of
    the conversation, which would end here if it were refused: clients send all of it again with every turn.
    """
    try:
        value = msgspec.json.decode(text)
        if isinstance(value, str):
            return arguments_told(value)
        if value is None or value == []:
            return "{}"
        return text if isinstance(value, dict) else None
    except msgspec.DecodeError as error:
        # What has half a character in it is an object for other readers, and for this one it is cut there.
        if (told := as_object(text)) is not None:
            return told
        if (whole := _HALVES.sub("\\\\ufffd", text)) != text:
            return arguments_told(whole)
        return "{}" if not text.strip() or _is_cut(text, str(error)) else None
    except (UnicodeEncodeError, RecursionError):
        return None


def _is_cut(text: str, complaint: str) -> bool:
    """Whether it begins as an object, and ends too soon, by what msgspec says of it: in the middle of a number that is its last byte."""
    in_number = f"invalid number (byte {len(text.encode('utf-8', 'replace'))})"
    return text.lstrip().startswith("{") and complaint.endswith(("Input data was truncated", in_number))


def _content(message: Message, place: str) -> str | None:
    if isinstance(message.content, str):
        return message.content
    of_tool = ROLES.get(message.role) == "tool"
    if message.content is None:
        if of_tool or message.role == "assistant":  # a tool that gave nothing; one that only called tools
            return message.refusal or ""
        raise InvalidRequest(f"{place}.content: it is missing", param=f"{place}.content")
    # as llama.cpp joins them
    return "\n".join([_part(part, f"{place}.content[{i}]", given_by_tool=of_tool) for i, part in enumerate(message.content)])


def _part(part: Part, place: str, *, given_by_tool: bool) -> str:
    if given_by_tool and part.type in NOT_SEEN:
        return NOT_SEEN[part.type]
    if part.type not in ("text", "input_text", "output_text", "refusal"):
        raise InvalidRequest(f"{place}: this model takes text, not {part.type[:40]!r}", param=f"{place}.type")
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise InvalidRequest(f"{place}.text: it is missing", param=f"{place}.text")
    return text
