"""Conversations to text, through the very template that the model file carries."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .exchange import Conversation, Message, Raw


def template_text() -> str:
    return (Path(__file__).parent / "template.jinja").read_text(encoding="utf-8").rstrip("\n")


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


@cache
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    # Jinja's own filter escapes for HTML and sorts the keys; chat templates are written for this one.
    environment.filters["tojson"] = lambda anything: json.dumps(anything, ensure_ascii=False)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template_text())


def render(messages: tuple[Message, ...], tools: tuple[Any, ...] = (), *, thinking: bool = False, prompt: bool = False) -> str:
    return _template().render(messages=messages, tools=list(tools), enable_thinking=thinking, add_generation_prompt=prompt)


def segments(conversation: Conversation | Raw) -> list[tuple[str, bool]]:
    """Cut the rendered conversation into texts that the model reads (False) and texts that it must write (True).

    What it must write follows a prompt exactly as a server would render it, and ends with <|im_end|>.
    """
    if isinstance(conversation, Raw):
        return [(conversation.prompt, False), (conversation.continuation, True)]
    parts: list[tuple[str, bool]] = []
    done = ""
    for i, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        opened = conversation.thinking and i == len(conversation.messages) - 1
        prompt = render(conversation.messages[:i], conversation.tools, thinking=opened, prompt=True)
        whole = render(conversation.messages[: i + 1], conversation.tools).removesuffix("\n")
        assert prompt.startswith(done)
        assert whole.startswith(prompt)
        parts += [(prompt[len(done) :], False), (whole[len(prompt) :], True)]
        done = whole
    return parts
