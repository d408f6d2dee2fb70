"""Tools for models whose chat template knows none: everything about them is said in plain messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from cllm.text.call_formats import HERMES, CallFormat
from cllm.text.earlier_calls import framed
from cllm.text.tools import Tool

_OFFER = """\
You may call the functions below. To call one, write
{call}
and nothing after it; several calls may follow each other. The results come in <tool_response>.

<tools>
{tools}
</tools>"""


_CALL = {"function": {"name": "<its name>", "arguments": "<an object that fits its parameters>"}}


def told(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], form: CallFormat = HERMES) -> list[dict[str, Any]]:
    """Return `messages` with the tools in the system message, calls as the assistant's text, in the `form` that is read of its answers, and
    results as the user's.
    """
    plain: list[dict[str, Any]] = []
    results: list[str] = []  # several are one message, with what the user says then, as many templates want the roles to alternate
    for message in messages:
        if message.get("role") == "tool":
            results.append(_result(message))
            continue
        if results and message.get("role") == "user" and isinstance(message.get("content"), str):
            plain.append(_user([*results, message["content"]]))
        else:
            plain += [*([_user(results)] if results else []), _as_text(message, form) if message.get("tool_calls") else dict(message)]
        results = []
    if results:
        plain.append(_user(results))
    return _offered(plain, tools, form) if tools else plain


def _user(texts: list[str]) -> dict[str, Any]:
    return {"role": "user", "content": "\n".join(texts)}


def _offered(messages: list[dict[str, Any]], tools: Sequence[Tool], form: CallFormat) -> list[dict[str, Any]]:
    offer = _OFFER.format(
        call=framed([_CALL], form), tools="\n".join([json.dumps(tool.for_template()["function"], ensure_ascii=False) for tool in tools])
    )
    if messages and messages[0].get("role") == "system":
        first = messages[0]
        return [first | {"content": f"{first.get('content') or ''}\n\n{offer}".lstrip()}, *messages[1:]]
    return [{"role": "system", "content": offer}, *messages]


def _result(message: Mapping[str, Any]) -> str:
    return f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"


def _as_text(message: Mapping[str, Any], form: CallFormat) -> dict[str, Any]:
    said = {name: value for name, value in message.items() if name != "tool_calls"}
    return said | {"content": "\n".join([*([said["content"]] if said.get("content") else []), framed(message["tool_calls"], form)])}
