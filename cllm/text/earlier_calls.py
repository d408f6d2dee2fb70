"""Earlier calls for a template that tells of tools and shows no calls: in the content, in a form that is read of the model's answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cllm.text.call_formats import CallFormat

N_READ_MAX: Final = 4096  # characters of a call's arguments


def told(messages: Sequence[Mapping[str, Any]], form: CallFormat) -> list[dict[str, Any]]:
    """Return `messages` with calls as a part of the text of those who call."""
    return [_as_text(message, form) if message.get("tool_calls") else dict(message) for message in messages]


def _as_text(message: Mapping[str, Any], form: CallFormat) -> dict[str, Any]:
    said = {name: value for name, value in message.items() if name != "tool_calls"}
    return said | {"content": (said.get("content") or "") + written(message["tool_calls"], form)}


def written(calls: Sequence[Mapping[str, Any]], form: CallFormat) -> str:
    """Return calls as text."""
    return _in_python([call["function"] for call in calls], form) if form.as_python else framed(calls, form)


def framed(calls: Sequence[Mapping[str, Any]], form: CallFormat) -> str:
    """Return calls as text with JSON, which every form is read with."""
    functions, frame = [call["function"] for call in calls], form.frame
    named = [(json.dumps(each["name"])[1:-1], _json_of(each)) for each in functions]
    texts = [f"{frame.before_name}{name}{frame.before_arguments}{arguments}{frame.after}" for name, arguments in named]
    return f"{frame.opening}{frame.between.join(texts)}{frame.closing}"


def _in_python(functions: Sequence[Mapping[str, Any]], form: CallFormat) -> str:
    calls = [f"{each['name']}({_terms_of(each)})" for each in functions]
    return f"{form.begin}[{', '.join(calls)}]{''.join(form.ends[:1])}"


def _json_of(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments")
    return (arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)) or "{}"


def _terms_of(function: Mapping[str, Any]) -> str:
    """The arguments as keywords; as they are if they are no object, or long, since everybody waits for this."""
    text = _json_of(function)
    if len(text) > N_READ_MAX:
        return text
    try:
        arguments = json.loads(text)
        return ", ".join([f"{name}={value!r}" for name, value in arguments.items()]) if isinstance(arguments, dict) else text
    except (ValueError, RecursionError):
        return text
