"""What the tasks make: a question with its one right answer, and a conversation of such."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import attrs

Message = dict[str, Any]
Tool = dict[str, Any]


@attrs.frozen
class Exchange:
    """One question with its only right answer; `messages` begins with a user's and ends with the assistant's."""

    messages: tuple[Message, ...]
    thought: str  # what the model writes between <think> and </think> when it is asked to think
    tools: tuple[Tool, ...] = ()
    system: str = ""
    thinkable: bool = True  # false where a thought would be no help to the reader: long copies and counts


@attrs.frozen
class Raw:
    """Text without a chat template."""

    prompt: str
    continuation: str  # cut anywhere: the model would go on


@attrs.frozen
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool = False  # the template opens the <think> of the last answer, as for `enable_thinking`


Task = Callable[[Random], Exchange]


def say(question: str, answer: str, thought: str, **more: Any) -> Exchange:
    return Exchange(({"role": "user", "content": question}, {"role": "assistant", "content": answer}), thought, **more)
