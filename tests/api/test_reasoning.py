"""Reasoning in chat completions: told apart, switched, bounded, counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cllm.testing.scripted import ScriptedModel
from cllm.text.answers import AnswerFormat, AnswerReader
from cllm.text.stops import StopStrings

TURNS = "{% for message in messages %}<turn>{{ message.role }}\n{{ message.content }}<end>{% endfor %}<turn>assistant\n"
# As Qwen's, which lets the model write the tag; as DeepSeek's, which writes it in any case; and one that is switched on.
FREE = TURNS + "{{ '<think>\n\n</think>\n\n' if enable_thinking is defined and not enable_thinking }}"
OPENED = TURNS + "{{ '<think>\n' }}"
SWITCHED = TURNS + "{{ '<think>\n' if enable_thinking }}"
STRICT = {"type": "function", "function": {"name": "add", "strict": True, "parameters": {"type": "object", "properties": {}}}}
THOUGHT = "<think>\nhm, so\n</think>\n\nIt is 5."


def says(answer: str, template: str = FREE) -> ScriptedModel:
    return ScriptedModel(answer, template=template)


def reasoning_of(answer: Any, index: int = 0) -> str:
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return str(answer.json["choices"][index]["message"].get("reasoning_content", ""))
    choices = [choice for chunk in answer.chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join([choice["delta"].get("reasoning_content", "") for choice in choices])


@pytest.mark.parametrize("template", [FREE, OPENED])
@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_told_apart_from_content(serve: Any, stream: bool, template: str) -> None:
    async with serve(says(THOUGHT, template)) as api:
        answer = await api.chat(stream=stream, max_tokens=200, n=2)
    for index in (0, 1):
        assert reasoning_of(answer, index) == "hm, so"
        assert answer.text(index) == "It is 5."
        assert answer.finish(index) == ("stop", None)


async def test_reasoning_tokens_are_counted(serve: Any) -> None:
    async with serve(says(THOUGHT, OPENED)) as api:
        answer = await api.chat(max_tokens=200)
        stream = await api.chat(max_tokens=200, stream=True, stream_options={"include_usage": True})
    n_tokens = len("hm, so\n</think>")  # a token is a byte here; the prompt has the opening tag
    for usage in (answer.json["usage"], stream.chunks[-1]["usage"]):
        assert usage["completion_tokens_details"] == {"reasoning_tokens": n_tokens}
        assert usage["completion_tokens"] == n_tokens + len("\n\nIt is 5.") + 1


async def test_reasoning_that_never_ends_is_reasoning(serve: Any) -> None:
    async with serve(says(THOUGHT, OPENED)) as api:
        answer = await api.chat(max_tokens=4)
    assert (reasoning_of(answer), answer.text()) == ("hm, ", "")
    assert answer.finish() == ("length", None)


@pytest.mark.parametrize(
    "fields", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}, {"reasoning_budget": 0}]
)
async def test_reasoning_can_be_switched_off(serve: Any, fields: dict[str, Any]) -> None:
    async with serve(says("<think>\n\n</think>\n\nIt is 5.")) as api:
        answer = await api.chat(max_tokens=200, **fields)
    assert (reasoning_of(answer), answer.text()) == ("", "It is 5.")
    assert answer.json["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_a_template_that_opens_the_tag_whatever_it_is_told_is_closed_again(serve: Any) -> None:
    async with serve(says("<think>\n\n</think>\n\nIt is 5.", OPENED)) as api:
        answer = await api.chat(max_tokens=200, reasoning_effort="none")
    assert (reasoning_of(answer), answer.text()) == ("", "It is 5.")


async def test_what_a_request_tells_the_template_prevails_over_the_effort(serve: Any) -> None:
    off, on = ({"chat_template_kwargs": {"enable_thinking": enabled}} for enabled in (False, True))
    async with serve(says("<think>\n\n</think>\n\nIt is 5.", OPENED)) as api:
        answer = await api.chat(max_tokens=200, reasoning_effort="high", **off)
        assert (reasoning_of(answer), answer.text()) == ("", "It is 5.")
    async with serve(says(THOUGHT, OPENED)) as api:
        assert reasoning_of(await api.chat(max_tokens=200, reasoning_effort="none", **on)) == "hm, so"


@pytest.mark.parametrize("fields", [{"reasoning_effort": "low"}, {"chat_template_kwargs": {"enable_thinking": True}}])
async def test_an_effort_switches_reasoning_on(serve: Any, fields: dict[str, Any]) -> None:
    async with serve(says(THOUGHT, SWITCHED)) as api:
        assert reasoning_of(await api.chat(max_tokens=200, **fields)) == "hm, so"


@pytest.mark.parametrize("template", [FREE, OPENED])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_budget_ends_reasoning_with_the_closing_tag(serve: Any, template: str, stream: bool) -> None:
    script = "<think>\n" + "h" * 100
    async with serve(says(script, template)) as api:
        answer = await api.chat(max_tokens=60, reasoning_budget=10, stream=stream, logprobs=True)
    assert reasoning_of(answer) in ("h" * 9, "h" * 10)  # a line break after the tag counts too, if the model writes it
    assert set(answer.text()) == {"h"}
    chunks = answer.chunks if stream else [answer.json]
    shown = [one["token"] for c in chunks for choice in c["choices"] for one in (choice["logprobs"] or {"content": []})["content"]]
    assert "\n</think>\n\n" in "".join(shown)


async def test_stop_strings_count_in_content_only(serve: Any) -> None:
    async with serve(says("<think>so, stop</think>go, stop it")) as api:
        answer = await api.chat(max_tokens=200, stop=["stop"])
    assert (reasoning_of(answer), answer.text()) == ("so, stop", "go, ")
    assert answer.finish() == ("stop", "stop")


@pytest.mark.parametrize("template", [OPENED, SWITCHED, FREE])
async def test_an_answer_that_is_held_to_a_schema_may_reason_first(serve: Any, template: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
    async with serve(says('<think>\nhm\n</think>\n{"a": 5}', template)) as api:
        answer = await api.chat(max_tokens=300, response_format=form, reasoning_effort="high")
        unasked = await api.chat(max_tokens=300, response_format=form)
    assert reasoning_of(answer) == "hm"
    assert json.loads(answer.text()) == {"a": 5}
    assert template is SWITCHED or unasked.text() == answer.text()


@pytest.mark.parametrize(
    ("fields", "is_held"),
    [
        ({"response_format": {"type": "json_object"}}, True),
        ({"tools": [STRICT], "tool_choice": "required"}, True),
        ({"tools": [STRICT]}, False),
        ({"tools": [STRICT], "tool_choice": "none"}, False),
        ({}, False),
    ],
)
async def test_what_comes_in_one_token_with_the_closing_tag_is_left_out_only_where_a_grammar_writes_it_again(
    serve: Any, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], *, is_held: bool
) -> None:
    forms: list[AnswerFormat] = []
    reader = AnswerFormat.reader

    def spy(form: AnswerFormat, stops: StopStrings | None) -> AnswerReader:
        forms.append(form)
        return reader(form, stops)

    monkeypatch.setattr(AnswerFormat, "reader", spy)
    async with serve(says(THOUGHT, OPENED)) as api:  # its tokens are bytes: none of them is of both
        await api.chat(max_tokens=300, **fields)
    assert [form.held for form in forms] == [is_held]


GOES_ON = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 300}


def begun(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "2 + <think>3?"}, {"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("final", "reasoning", "content"),
    [
        ("<think>\nhm", ", so", "It is 5."),
        ("<think>\nhm,", " so", "It is 5."),
        ("<think>\n", "hm, so", "It is 5."),
        ("<think>\nhm, so\n</think>\n\nIt", "", " is 5."),
    ],
)
async def test_an_answer_goes_on_within_the_reasoning_of_the_final_message(serve: Any, final: str, reasoning: str, content: str) -> None:
    async with serve(says(THOUGHT)) as api:
        answer = await api.chat(messages=begun(final), **GOES_ON)
    assert (reasoning_of(answer), answer.text()) == (reasoning, content)


SHOWN = (  # as Qwen's, which shows the last message's reasoning
    "{% for message in messages %}<turn>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content.strip('\\n') }}\n</think>\n\n{% endif %}"
    "{{ message.content }}<end>{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


@pytest.mark.parametrize("content", ["", None])
async def test_an_answer_that_was_cut_in_its_reasoning_is_gone_on_with_there(serve: Any, content: str | None) -> None:
    cut = {"role": "assistant", "content": content, "reasoning_content": "hm,"}
    async with serve(says(THOUGHT, SHOWN)) as api:
        answer = await api.chat(messages=[{"role": "user", "content": "2 + 3?"}, cut], **GOES_ON)
        whole = await api.chat(messages=[{"role": "user", "content": "2 + 3?"}, {**cut, "content": "It"}], **GOES_ON)
    assert (reasoning_of(answer), answer.text()) == (" so", "It is 5.")
    assert reasoning_of(whole) == "", "what has content has done with its reasoning"


OPENS_LAST = (  # as Nemotron Nano's, which writes the last message behind an opening tag of its own
    "{% for message in messages %}<turn>{{ message.role }}\n"
    "{% if loop.last and message.role == 'assistant' %}<think>\n{{ message.content | trim }}{% else %}{{ message.content }}<end>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<turn>assistant\n<think>\n{% endif %}"
)


async def test_what_goes_on_behind_a_tag_that_the_template_has_opened_is_reasoning(serve: Any) -> None:
    async with serve(says(THOUGHT, OPENS_LAST)) as api:
        answer = await api.chat(messages=begun("hm"), **GOES_ON)
    assert (reasoning_of(answer), answer.text()) == (", so", "It is 5.")


async def test_a_template_that_shows_no_reasoning_goes_on_without(serve: Any) -> None:
    cut = {"role": "assistant", "content": "", "reasoning_content": "hm,"}
    async with serve(says(THOUGHT)) as api:
        answer = await api.chat(messages=[{"role": "user", "content": "2 + <think>3?"}, cut], **GOES_ON)
    assert (reasoning_of(answer), answer.text()) == ("hm, so", "It is 5.")


async def test_where_reasoning_may_have_no_token_that_of_the_final_message_ends_at_once(serve: Any) -> None:
    async with serve(says(THOUGHT)) as api:
        answer = await api.chat(messages=begun("<think>\nhm"), reasoning_budget=0, **GOES_ON)
    assert (answer.status, reasoning_of(answer)) == (200, "")


async def test_a_tag_in_the_middle_of_the_final_message_begins_no_reasoning(serve: Any) -> None:
    async with serve(says("The tag <think> is one.")) as api:
        answer = await api.chat(messages=begun("The tag <think> is"), **GOES_ON)
    assert (reasoning_of(answer), answer.text()) == ("", " one.")


async def test_reasoning_that_is_gone_on_with_is_held_to_no_schema(serve: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
    async with serve(says('<think>\nhm, so\n</think>\n{"a": 5}')) as api:
        answer = await api.chat(messages=begun("<think>\nhm"), response_format=form, **GOES_ON)
    assert reasoning_of(answer) == ", so"
    assert json.loads(answer.text()) == {"a": 5}


async def test_calls_that_are_required_may_be_reasoned_about_first(serve: Any) -> None:
    tools = [
        {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}}
    ]
    for template in (FREE, OPENED):
        async with serve(says('<think>\nadd?\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>', template)) as api:
            answer = await api.chat(max_tokens=300, tools=tools, tool_choice="required")
        assert reasoning_of(answer) == "add?"
        assert answer.json["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}
        assert answer.finish() == ("tool_calls", None)


async def test_earlier_reasoning_reaches_the_template(serve: Any) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}|{% endfor %}"
    async with serve(says("", template)) as api:
        messages = [{"role": "assistant", "content": "a", "reasoning_content": "r"}]
        assert (await api.post("/apply-template", {"messages": messages})).json["prompt"] == "r|a|"


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"reasoning": "r"}, "r"),
        ({"reasoning": "s", "reasoning_content": "r"}, "r"),
        ({"reasoning": {"text": "r"}}, ""),
        ({"reasoning": None}, ""),
    ],
)
async def test_earlier_reasoning_by_the_name_that_other_servers_give_it_reaches_the_template(
    serve: Any, fields: dict[str, Any], shown: str
) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.content }}|{% endfor %}"
    async with serve(says("", template)) as api:
        messages = [{"role": "assistant", "content": "a", **fields}]
        assert (await api.post("/apply-template", {"messages": messages})).json["prompt"] == f"{shown}|a|"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"reasoning_budget": -2}, "reasoning_budget"),
        ({"reasoning_budget": "5"}, "reasoning_budget"),
    ],
)
async def test_what_is_wrong_with_it_is_400_and_named(serve: Any, fields: dict[str, Any], param: str) -> None:
    async with serve() as api:
        answer = await api.chat(**fields)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_a_model_that_does_not_reason_heeds_none_of_it(serve: Any) -> None:
    async with serve() as api:
        plain = await api.chat(seed=3, max_tokens=20)
        answer = await api.chat(seed=3, max_tokens=20, reasoning_effort="high", reasoning_budget=5)
    assert answer.text() == plain.text()
