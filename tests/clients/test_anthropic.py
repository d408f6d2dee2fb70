"""The official `anthropic` package."""

from __future__ import annotations

from typing import Any

import pytest

anthropic = pytest.importorskip("anthropic", reason="pip install --group clients")

KEY = "key-of-the-tests"
HELLO: Any = [{"role": "user", "content": "hello"}]
WEATHER: Any = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}


@pytest.fixture
def client(url: str) -> Any:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_a_message(client: Any) -> None:
    message = client.messages.create(model="fake", max_tokens=50, messages=HELLO, system="Be kind.")
    assert [block.text for block in message.content] == ["Good day, friend."]
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens == 18


def test_a_stream(client: Any) -> None:
    with client.messages.stream(model="fake", max_tokens=50, messages=HELLO) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == "Good day, friend."
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 18)


def test_stop_sequences(client: Any) -> None:
    message = client.messages.create(model="fake", max_tokens=50, messages=HELLO, stop_sequences=["friend"])
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", "friend", "Good day, ")


def test_tokens_are_counted(client: Any) -> None:
    counted = client.messages.count_tokens(model="fake", messages=HELLO)
    message = client.messages.create(model="fake", max_tokens=1, messages=HELLO)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize("streams", [False, True])
def test_two_parallel_tool_calls_and_their_results(client: Any, streams: bool) -> None:
    asked: dict[str, Any] = {"model": "fake", "max_tokens": 300, "tools": [WEATHER]}
    question = {"role": "user", "content": "How is the weather in Oslo and in Rome?"}
    if streams:
        with client.messages.stream(messages=[question], **asked) as stream:
            called = stream.get_final_message()
    else:
        called = client.messages.create(messages=[question], **asked)
    assert called.stop_reason == "tool_use"
    calls = [block for block in called.content if block.type == "tool_use"]
    assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})]
    assert calls[0].id != calls[1].id
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": f"{call.input['city']}: fine"} for call in calls]
    messages = [question, {"role": "assistant", "content": called.content}, {"role": "user", "content": results}]
    final = client.messages.create(messages=messages, **asked)
    assert final.content[0].text == "Oslo is cold, Rome is warm."


def test_structured_output(client: Any) -> None:
    pydantic = pytest.importorskip("pydantic")

    class Person(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        name: str
        age: int

    message = client.messages.parse(
        model="fake", max_tokens=100, messages=[{"role": "user", "content": "Which person?"}], output_format=Person
    )
    assert message.parsed_output == Person(name="Ada", age=36)


def test_errors_are_the_packages_own_exceptions(client: Any, url: str) -> None:
    with pytest.raises(anthropic.NotFoundError, match="another"):
        client.messages.create(model="another", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        client.messages.create(model="fake", max_tokens=5, messages=HELLO, stop_sequences=["x"] * 17)
    with anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as other, pytest.raises(anthropic.AuthenticationError):
        other.messages.create(model="fake", max_tokens=5, messages=HELLO)
