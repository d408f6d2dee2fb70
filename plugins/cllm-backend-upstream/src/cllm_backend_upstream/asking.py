"""From a `StreamRequest` to the body that an upstream is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import attrs
import msgspec

from cllm.backend import StreamChat, StreamForm, StreamRequest
from cllm.errors import NotHeeded
from cllm_backend_upstream.kinds import N_LOGPROBS_MAX, Forms, Kind

N_STOPS_MAX: Final = 4  # more are refused by some; the server in front looks for all of them anyway
SEED_MASK: Final = (1 << 31) - 1  # what every server takes for a seed

_DEFAULTS: Final = {field.name: field.default for field in attrs.fields(StreamRequest)}
_AS_THEY_ARE: Final = ("ignore_eos", "cache_salt", "cache_prompt", "repeat_last_n")  # sent by these names, and only where asked for
_ANY_OBJECT: Final = {"type": "object"}
_NEAREST_EFFORTS: Final = {"minimal": "low", "xhigh": "high", "max": "high"}  # of those that every server knows


def path_of(request: StreamRequest) -> str:
    """Return where the request is posted to."""
    return "/v1/completions" if request.chat is None else "/v1/chat/completions"


def body_of(request: StreamRequest, model: str, kind: Kind) -> bytes:
    """Return what is posted. Raises: NotHeeded for what the server would ignore."""
    body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}, "seed": request.seed & SEED_MASK}
    for name, theirs in kind.sampling.items():
        if kind.sends_defaults or getattr(request, name) != _DEFAULTS[name]:
            body[theirs] = getattr(request, name)
    if request.stop and (request.chat is None or kind.stops_in_content):  # else the server in front alone, which closes at once
        body["stop"] = list(request.stop[:N_STOPS_MAX])
    for name in _AS_THEY_ARE:
        if name in kind.heeds and getattr(request, name) != _DEFAULTS[name]:
            body[name] = getattr(request, name)
    if request.n_tokens_max is not None:
        body["max_tokens" if request.chat is None else kind.limit] = request.n_tokens_max
    if request.n_logprobs is not None:
        body |= _logprobs(request.n_logprobs, kind, is_chat=request.chat is not None)
    if request.form is not None:
        body |= _form(request.form, kind, is_chat=request.chat is not None)
    body |= {"prompt": _prompt(request)} if request.chat is None else _chat(request.chat, kind)
    return msgspec.json.encode(body)


def _logprobs(n: int, kind: Kind, *, is_chat: bool) -> dict[str, Any]:
    """0 means none at all to some; what comes too much is left out again."""
    if not is_chat:
        return {"logprobs": max(n, 1)}
    return {"logprobs": True, "top_logprobs": min(n + 1, N_LOGPROBS_MAX) if kind.tells_drawn_first else max(n, 1)}


def _prompt(request: StreamRequest) -> str | list[int]:
    return list(request.prompt) if request.text is None else request.text


def rendered(chat: StreamChat) -> dict[str, Any]:
    """Return the fields that say what a conversation is rendered to."""
    body: dict[str, Any] = {"messages": list(chat.messages)}
    if chat.tools:
        body["tools"] = list(chat.tools)
    if chat.template_variables:
        body["chat_template_kwargs"] = dict(chat.template_variables)
    if chat.continue_final_message:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body


def _chat(chat: StreamChat, kind: Kind) -> dict[str, Any]:
    body = rendered(chat)
    if chat.tools:
        parallel, choice = chat.parallel_tool_calls, chat.tool_choice
        if isinstance(choice, Mapping) and not kind.names_tool:  # it would not even say that it takes no notice
            named = choice["function"]["name"]
            body["tools"] = [tool for tool in chat.tools if tool["function"]["name"] == named]
            parallel, choice = False, "required"
        if choice != "auto":
            body["tool_choice"] = choice
        if not parallel:
            body["parallel_tool_calls"] = False
    if chat.reasoning_effort is not None:
        effort = chat.reasoning_effort
        body["reasoning_effort"] = effort if kind.knows_efforts else _NEAREST_EFFORTS.get(effort, effort)
    return body


def _form(form: StreamForm, kind: Kind, *, is_chat: bool) -> dict[str, Any]:
    if form.kind == "json_schema":
        schema = json.loads(form.source)
        if not is_chat and not kind.text_schema:
            raise NotHeeded(
                f"{form.field}: the server behind this one holds conversations to a schema, and no completions", param=form.field
            )
        if not is_chat and kind.text_schema != "response_format":
            return {kind.text_schema: schema}
        if kind.has_bare_schemas:
            if schema == _ANY_OBJECT:
                raise NotHeeded(f"{form.field}: the server behind this one holds answers to a schema that says more", param=form.field)
            return {"response_format": {"type": "json", "value": schema}}
        if schema == _ANY_OBJECT:
            return {"response_format": {"type": "json_object"}}
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}}
    if kind.forms is Forms.GRAMMAR:
        return {"grammar": form.source}
    return {"structured_outputs": {form.kind: json.loads(form.source) if form.kind == "choice" else form.source}}
