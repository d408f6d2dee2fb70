"""The clients of others, unmodified, against a running server. One that is not installed is left out: `tox -e clients` has them all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cllm.testing.fake_embedder import FakeEmbedder
from cllm.testing.live import live_server
from cllm.testing.scripted import TOOL_TEMPLATE, ScriptedModel

KEY = "key-of-the-tests"
TWO_CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)


def answer(prompt: str) -> str:
    """What the model says: it calls a tool twice if it has one and no results yet, and knows one person."""
    *_, last = prompt.split("<turn>")[:-1]
    if last.startswith("tool"):
        return "Oslo is cold, Rome is warm."
    if "<tool_call>" in prompt:
        return TWO_CALLS
    if "person" in last:
        return '{"name":"Ada","age":36}'
    if "wizard" in prompt:
        return f"You said {last.count('wizard')}."
    return "Good day, friend."


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A server that wants a key, on a model that says what it is told to."""
    with live_server(ScriptedModel(answer, template=TOOL_TEMPLATE), embedder=FakeEmbedder(), api_key=(KEY,)) as url:
        yield url
