"""The official `openai` package."""

from __future__ import annotations

import json
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="pip install --group clients")
pydantic = pytest.importorskip("pydantic", reason="pip install --group clients")

KEY = "key-of-the-tests"
HELLO: Any = [{"role": "user", "content": "hello"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False}
WEATHER: Any = {"name": "weather", "description": "The weather", "parameters": PARAMETERS}
QUESTION: Any = {"role": "user", "content": "How is the weather in Oslo and in Rome?"}


class Person(pydantic.BaseModel):  # type: ignore[misc,name-defined]
    name: str
    age: int


@pytest.fixture
def client(url: str) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


# --- chat -------------------------------------------------------------------------------------------------------------


def test_a_chat(client: Any) -> None:
    answer = client.chat.completions.create(model="fake", messages=HELLO)
    assert answer.choices[0].message.content == "Good day, friend."
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 18)


def test_a_streamed_chat(client: Any) -> None:
    chunks = list(client.chat.completions.create(model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}))
    assert "".join([chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]) == "Good day, friend."
    assert chunks[-1].usage.completion_tokens == 18


@pytest.mark.parametrize("streams", [False, True])
def test_two_parallel_tool_calls_and_their_results(client: Any, streams: bool) -> None:
    asked: dict[str, Any] = {"model": "fake", "tools": [{"type": "function", "function": WEATHER}]}
    if streams:
        with client.chat.completions.stream(messages=[QUESTION], **asked) as stream:
            choice = stream.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(messages=[QUESTION], **asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)["city"]) for call in calls] == [
        ("weather", "Oslo"),
        ("weather", "Rome"),
    ]
    assert calls[0].id != calls[1].id
    results = [{"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in calls]
    final = client.chat.completions.create(messages=[QUESTION, choice.message, *results], **asked)
    assert final.choices[0].message.content == "Oslo is cold, Rome is warm."


def test_structured_output(client: Any) -> None:
    answer = client.chat.completions.parse(model="fake", messages=[{"role": "user", "content": "Which person?"}], response_format=Person)
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36)


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_completions(client: Any) -> None:
    answer = client.completions.create(model="fake", prompt="once", max_tokens=5, seed=1)
    parts = client.completions.create(model="fake", prompt="once", max_tokens=5, seed=1, stream=True)
    assert answer.choices[0].text == "".join([part.choices[0].text for part in parts])


def test_embeddings(client: Any) -> None:
    one, two = client.embeddings.create(model="fake-embedder", input=["one", "two"]).data
    again = client.embeddings.create(model="fake-embedder", input="one", encoding_format="float").data[0]
    assert one.embedding == pytest.approx(again.embedding)
    assert one.embedding != two.embedding


def test_models(client: Any) -> None:
    assert "fake" in [model.id for model in client.models.list()]
    assert client.models.retrieve("fake").id == "fake"


def test_errors_are_the_packages_own_exceptions(client: Any, url: str) -> None:
    with pytest.raises(openai.NotFoundError, match="another"):
        client.chat.completions.create(model="another", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=HELLO, temperature=1000)
    assert caught.value.param == "temperature"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as other, pytest.raises(openai.AuthenticationError):
        other.models.list()


# --- responses --------------------------------------------------------------------------------------------------------


def test_a_response_and_one_that_goes_on_from_it(client: Any) -> None:
    first = client.responses.create(model="fake", input="I am a wizard.")
    assert (first.status, first.output_text) == ("completed", "You said 1.")
    second = client.responses.create(model="fake", input="And you?", previous_response_id=first.id)
    assert second.output_text == "You said 0."  # the wizard is in the prompt, but not in its last turn
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert [item.content[0].text for item in client.responses.input_items.list(first.id)] == ["I am a wizard."]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError, match="no response"):
        client.responses.create(model="fake", input="x", previous_response_id=first.id)


def test_a_streamed_response(client: Any) -> None:
    with client.responses.stream(model="fake", input="hello") as stream:
        text = "".join([event.delta for event in stream if event.type == "response.output_text.delta"])
        final = stream.get_final_response()
    assert text == final.output_text == "Good day, friend."
    assert final.usage.output_tokens == 18


@pytest.mark.parametrize("streams", [False, True])
def test_a_response_with_two_parallel_calls_and_their_results(client: Any, streams: bool) -> None:
    asked: dict[str, Any] = {"model": "fake", "tools": [{"type": "function", **WEATHER}]}
    if streams:
        with client.responses.stream(input=[QUESTION], **asked) as stream:
            called = stream.get_final_response()
    else:
        called = client.responses.create(input=[QUESTION], **asked)
    calls = [item for item in called.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "fine"} for call in calls]
    final = client.responses.create(input=results, previous_response_id=called.id, **asked)
    assert final.output_text == "Oslo is cold, Rome is warm."


def test_a_response_with_structured_output(client: Any) -> None:
    response = client.responses.parse(model="fake", input="Which person?", text_format=Person)
    assert response.output_parsed == Person(name="Ada", age=36)
