"""LangChain's `ChatOpenAI`."""

from __future__ import annotations

from typing import Any

import pytest

langchain_openai = pytest.importorskip("langchain_openai", reason="pip install --group clients")
messages = pytest.importorskip("langchain_core.messages")
pydantic = pytest.importorskip("pydantic")

KEY = "key-of-the-tests"


class Person(pydantic.BaseModel):  # type: ignore[misc,name-defined]
    """Somebody."""

    name: str
    age: int


def weather(city: str) -> str:
    """The weather in a city."""
    return f"{city}: fine"


@pytest.fixture
def model(url: str) -> Any:
    return langchain_openai.ChatOpenAI(base_url=f"{url}/v1", api_key=KEY, model="fake", max_retries=0)


def test_a_chat_whole_and_streamed(model: Any) -> None:
    assert model.invoke("hello").content == "Good day, friend."
    assert "".join([chunk.content for chunk in model.stream("hello")]) == "Good day, friend."


@pytest.mark.parametrize("streams", [False, True])
def test_two_parallel_tool_calls_and_their_results(model: Any, streams: bool) -> None:
    with_tools = model.bind_tools([weather])
    question = messages.HumanMessage("How is the weather in Oslo and in Rome?")
    if streams:
        called, *more = with_tools.stream([question])
        for chunk in more:
            called += chunk
    else:
        called = with_tools.invoke([question])
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [("weather", {"city": "Oslo"}), ("weather", {"city": "Rome"})]
    results = [messages.ToolMessage(weather(**call["args"]), tool_call_id=call["id"]) for call in called.tool_calls]
    assert with_tools.invoke([question, called, *results]).content == "Oslo is cold, Rome is warm."


def test_structured_output(model: Any) -> None:
    assert model.with_structured_output(Person).invoke("Which person?") == Person(name="Ada", age=36)
