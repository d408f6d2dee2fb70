"""From a conversation to its prompt: what takes long holds nobody up."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from cllm.api import prompts
from tests.lines import n_lines

SAID = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "tools", "variables", "inline"),
    [
        ([SAID] * 20, None, {}, True),
        ([SAID | {"content": "x" * 16_000}], None, {}, True),
        ([SAID | {"content": "x" * 17_000}], None, {}, False),
        ([SAID] * 1000, None, {}, False),
        ([SAID], [{"type": "function", "function": {"name": "f", "parameters": {}}}] * 500, {}, False),
        ([SAID], None, {"notes": "x" * 17_000}, False),
        ([SAID], None, {"notes": {"more": [1] * 1000}}, False),
    ],
)
async def test_what_takes_a_template_long_is_rendered_in_a_thread(messages: Any, tools: Any, variables: Any, inline: bool) -> None:
    threads: list[threading.Thread] = []

    def render(*_: Any, **__: Any) -> str:
        threads.append(threading.current_thread())
        return ""

    model: Any = SimpleNamespace(reads_text=False, template=SimpleNamespace(render=render))
    options = {"add_generation_prompt": True, "continue_final_message": False}
    await prompts.render(model, messages, tools=tools, variables=variables, **options)
    assert [thread is threading.main_thread() for thread in threads] == [inline]


def test_how_much_there_is_is_not_counted_to_the_end() -> None:
    assert n_lines(lambda: prompts._is_short([[0] * 100_000, [[0] * 100_000]])) < 50
