"""The official `ollama` package."""

from __future__ import annotations

import json
from typing import Any

import pytest

ollama = pytest.importorskip("ollama", reason="pip install --group clients")

KEY = "key-of-the-tests"
HELLO: Any = [{"role": "user", "content": "hello"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": PARAMETERS}}


@pytest.fixture
def client(url: str) -> Any:
    with ollama.Client(host=url, headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


def test_a_chat(client: Any) -> None:
    answer = client.chat(model="fake", messages=HELLO)
    assert answer.message.content == "Good day, friend."
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "stop", 18)


def test_a_streamed_chat(client: Any) -> None:
    *parts, last = client.chat(model="fake:latest", messages=HELLO, stream=True)
    assert "".join([part.message.content for part in parts]) == "Good day, friend."
    assert (last.done, last.eval_count) == (True, 18)


def test_a_prompt_whole_and_streamed(client: Any) -> None:
    assert client.generate(model="fake", prompt="hello").response == "Good day, friend."
    parts = list(client.generate(model="fake", prompt="hello", stream=True, options={"num_predict": 8}))
    assert "".join([part.response for part in parts]) == "Good day"
    assert parts[-1].done_reason == "length"


@pytest.mark.parametrize("streams", [False, True])
def test_two_parallel_tool_calls_and_their_results(client: Any, streams: bool) -> None:
    question = {"role": "user", "content": "How is the weather in Oslo and in Rome?"}
    asked: dict[str, Any] = {"model": "fake", "tools": [WEATHER]}
    if streams:
        messages = [part.message for part in client.chat(messages=[question], stream=True, **asked)]
    else:
        messages = [client.chat(messages=[question], **asked).message]
    calls = [call.function for message in messages for call in message.tool_calls or []]
    assert [(call.name, call.arguments) for call in calls] == [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})]
    results = [{"role": "tool", "tool_name": "weather", "content": f"{call.arguments['city']}: fine"} for call in calls]
    said = [message for message in messages if message.tool_calls]
    final = client.chat(messages=[question, *said, *results], **asked)
    assert final.message.content == "Oslo is cold, Rome is warm."


def test_structured_output(client: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for form in (schema, "json"):
        answer = client.chat(model="fake", messages=[{"role": "user", "content": "Which person?"}], format=form)
        assert json.loads(answer.message.content) == {"name": "Ada", "age": 36}


def test_embeddings(client: Any) -> None:
    both = client.embed(model="fake-embedder", input=["one", "two"]).embeddings
    one = client.embed(model="fake-embedder", input="one").embeddings
    assert both[0] == one[0] != both[1]
    assert len(client.embeddings(model="fake-embedder", prompt="one").embedding) == len(one[0])


def test_what_is_served(client: Any) -> None:
    names = [model.model for model in client.list().models]
    assert "fake:latest" in names
    assert client.ps().models[0].context_length == 4096
    shown = client.show("fake")
    assert "completion" in shown.capabilities
    assert shown.modelinfo["general.architecture"] == "fake"


def test_errors_are_the_packages_own_exception(client: Any, url: str) -> None:
    with pytest.raises(ollama.ResponseError, match="another") as caught:
        client.chat(model="another", messages=HELLO)
    assert caught.value.status_code == 404
    with ollama.Client(host=url) as other, pytest.raises(ollama.ResponseError, match="key") as caught:
        other.chat(model="fake", messages=HELLO)
    assert caught.value.status_code == 401
