"""Tools in chat completions: offered, called, required, and their results."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import jsonschema
import msgspec
import pytest
import trio
import trio.testing

from cllm.api import calling
from cllm.api.anthropic import requests as anthropic
from cllm.api.openai.messages import Message, arguments_told, template_messages
from cllm.api.tool_checks import parameters_of
from cllm.errors import GrammarInvalid
from cllm.testing.fake import FakeModel
from cllm.testing.scripted import TOOL_TEMPLATE, ScriptedModel
from cllm.text.call_formats import FORMATS, HARMONY
from cllm.text.tools import Tool, Toolbox

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city"],
    "additionalProperties": False,
}
CLOCK = {"type": "object", "properties": {"zone": {"enum": ["utc", "local"]}}, "required": ["zone"], "additionalProperties": False}


def tool(name: str, parameters: Any = WEATHER, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"the {name}", "parameters": parameters, **more}}


TOOLS = [tool("weather"), tool("clock", CLOCK)]
FORECAST = {"name": "weather", "arguments": '{"city": "Ulm"}'}
SCHEMAS = {"weather": WEATHER, "clock": CLOCK}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


TWO = call("weather", '{"city": "Ulm"}') + "\n" + call("clock", '{"zone": "utc"}')


def says(answer: str, template: str = TOOL_TEMPLATE) -> ScriptedModel:
    return ScriptedModel(answer, template=template)


def calls_of(answer: Any, index: int = 0) -> list[Any]:
    """The calls of one choice, put together where they were streamed; deltas must come as OpenAI's do."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return list(answer.json["choices"][index]["message"].get("tool_calls", []))
    calls: list[Any] = []
    for chunk in answer.chunks:
        for choice in chunk["choices"]:
            for delta in choice["delta"].get("tool_calls", []) if choice["index"] == index else []:
                if delta["index"] == len(calls):
                    assert delta["type"] == "function"
                    assert delta["function"]["arguments"] == ""
                    calls.append({"id": delta["id"], "type": "function", "function": dict(delta["function"])})
                else:
                    assert set(delta) == {"index", "function"}
                    calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return calls


def named(calls: list[Any]) -> list[tuple[str, Any]]:
    return [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in calls]


# --- calling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("strict", [False, True])
async def test_two_calls_of_one_answer_come_with_ids_of_their_own(serve: Any, stream: bool, strict: bool) -> None:
    tools = [tool("weather", strict=strict), tool("clock", CLOCK, strict=strict)]
    async with serve(says("I look.\n" + TWO)) as api:
        answer = await api.chat(tools=tools, stream=stream, max_tokens=500)
        other = await api.chat(tools=tools, stream=stream, max_tokens=500)
    calls = calls_of(answer)
    assert named(calls) == [("weather", {"city": "Ulm"}), ("clock", {"zone": "utc"})]
    assert answer.finish() == ("tool_calls", None)
    assert answer.text() == "I look."
    assert len({each["id"] for each in calls + calls_of(other)}) == 4


async def test_an_answer_of_calls_alone_has_no_content(serve: Any) -> None:
    async with serve(says(TWO)) as api:
        message = (await api.chat(tools=TOOLS, max_tokens=500)).json["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 2


async def test_arguments_that_a_grammar_assures_are_streamed_in_pieces(serve: Any) -> None:
    async with serve(says(call("weather", '{"city": "Ulm"}'))) as api:
        answer = await api.chat(tools=[tool("weather", strict=True)], stream=True, max_tokens=500)
    pieces = [c["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] for c in answer.chunks[1:-1]]
    assert len(pieces) > 5
    assert "".join(pieces) == '{"city": "Ulm"}'


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [call("weather", '{"city": '), call("moon", "{}"), call("weather", "[1]"), "<tool_call>so?</tool_call>"])
async def test_what_is_no_call_is_content(serve: Any, text: str, stream: bool) -> None:
    async with serve(says(f"so: {text} and on")) as api:
        answer = await api.chat(tools=TOOLS, stream=stream, max_tokens=500)
    assert answer.text() == f"so: {text} and on"
    assert calls_of(answer) == []
    assert answer.finish() == ("stop", None)


async def test_where_the_template_takes_one_call_at_a_time_there_is_one_and_the_conversation_goes_on(serve: Any) -> None:
    refuses = "{% for m in messages if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one at a time') }}{% endfor %}"
    for fields in ({}, {"tool_choice": "required", "seed": 4}):
        async with serve(says(TWO, refuses + TOOL_TEMPLATE)) as api:
            answer = await api.chat(tools=TOOLS, max_tokens=500, **fields)
            (made,) = calls_of(answer)
            turns = [
                {"role": "user", "content": "hello"},
                answer.json["choices"][0]["message"],
                {"role": "tool", "content": "fine", "tool_call_id": made["id"]},
            ]
            assert (await api.chat(messages=turns, tools=TOOLS, max_tokens=5)).status == 200
    async with serve(says(TWO)) as api:
        assert len(calls_of(await api.chat(tools=TOOLS, max_tokens=500))) == 2


async def test_without_parallel_calls_the_answer_is_over_with_the_first(serve: Any) -> None:
    for stream in (False, True):
        async with serve(says(TWO)) as api:
            answer = await api.chat(tools=TOOLS, parallel_tool_calls=False, stream=stream, max_tokens=500)
        assert named(calls_of(answer)) == [("weather", {"city": "Ulm"})]
        assert answer.finish() == ("tool_calls", None)


@pytest.mark.parametrize("choice", ["none", {"type": "none"}])  # Cursor writes the words so
async def test_with_tool_choice_none_the_tools_are_not_told_and_nothing_is_called(serve: Any, choice: Any) -> None:
    prompts: list[str] = []

    def answered(prompt: str) -> str:
        prompts.append(prompt)
        return TWO

    async with serve(ScriptedModel(answered, template=TOOL_TEMPLATE)) as api:
        answer = await api.chat(tools=TOOLS, tool_choice=choice, max_tokens=500)
    assert answer.text() == TWO
    assert answer.finish() == ("stop", None)
    assert "weather" not in prompts[0]


async def test_an_answer_cut_by_max_tokens_says_length_and_keeps_what_it_had_begun(serve: Any) -> None:
    async with serve(says(TWO)) as api:
        free = await api.chat(tools=TOOLS, max_tokens=30)
        held = await api.chat(tools=TOOLS, tool_choice="required", max_tokens=60)
    assert free.finish() == held.finish() == ("length", None)
    assert free.text() == TWO[:30]
    (cut,) = calls_of(held)
    assert cut["function"]["name"] in SCHEMAS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("says_so", "stop", "told", "n_tokens"),
    [("Hello." + 8 * "\n", "\n\n", "Hello.", 8), ('so <tool_call>{"STOP": 1', "STOP", 'so <tool_call>{"', 25)],
)
async def test_a_stop_string_in_what_might_lead_to_a_call_ends_the_answer(
    serve: Any, stream: bool, says_so: str, stop: str, told: str, n_tokens: int
) -> None:
    async with serve(says(says_so)) as api:
        answer = await api.chat(tools=TOOLS, stop=stop, max_tokens=500, stream=stream, stream_options={"include_usage": True})
    assert answer.text() == told
    assert answer.finish() == ("stop", stop)
    assert (answer.chunks[-1] if stream else answer.json)["usage"]["completion_tokens"] == n_tokens


async def test_an_answer_that_is_cut_within_a_call_is_told_as_cut_whatever_stands_in_the_call(serve: Any) -> None:
    async with serve(says('<tool_call>{"name": "STOP the clock", "arguments": {}}')) as api:
        answer = await api.chat(tools=TOOLS, stop="STOP", max_tokens=30)
    assert answer.finish() == ("length", None)


async def test_blanks_before_a_call_that_must_come_are_no_end_of_the_answer(serve: Any) -> None:
    async with serve(says('\n<tool_call>{"name": "clock", "arguments": {}}</tool_call>')) as api:
        answer = await api.chat(tools=TOOLS, tool_choice="required", stop="\n", max_tokens=500, temperature=0)
    calls = answer.json["choices"][0]["message"]["tool_calls"]
    assert (answer.finish()[0], [call["function"]["name"] for call in calls]) == ("tool_calls", ["clock"])


async def test_the_tool_that_is_held_to_its_schema_is_blamed_and_not_one_that_nothing_is_held_to(serve: Any) -> None:
    lenient, strict = {"type": "object", "not": {}}, {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    async with serve() as api:
        answer = await api.chat(tools=[tool("a", lenient), tool("b", strict, strict=True)])
    assert (answer.status, answer.error["param"]) == (400, "tools[1].function.parameters")


async def test_a_schema_may_be_as_long_in_any_script(serve: Any) -> None:
    async with serve() as api:
        answer = await api.chat(tools=[tool("a", {"type": "object", "description": "天" * 30_000})], tool_choice="required")
    assert answer.error["type"] == "exceed_context_size_error"


# --- what tools may cost ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "limit"),
    [
        ({"type": "object", "enum": [1] * 9000}, "100000 members"),
        ({"type": "object", "description": "x" * 60_000}, "1048576 characters"),
        ({"type": "object", "properties": {"x" * 60_000: {}}}, "1048576 characters"),
    ],
)
async def test_all_schemas_together_are_bounded(serve: Any, parameters: Any, limit: str) -> None:
    async with serve() as api:
        answer = await api.chat(tools=[tool(f"f{i}", parameters) for i in range(20)])
        assert (answer.status, answer.error["param"], limit in answer.error["message"]) == (400, "tools", True), answer.error
        assert (await api.chat(tools=[tool(f"f{i}", parameters) for i in range(2)])).error["type"] == "exceed_context_size_error"


@pytest.mark.parametrize(
    ("writer", "fields"),
    [
        ("call_grammar", {"tools": TOOLS, "tool_choice": "required"}),
        ("content_grammar", {"response_format": {"type": "json_object"}}),
    ],
)
async def test_a_grammar_is_written_where_it_holds_nobody_up(
    serve: Any, monkeypatch: pytest.MonkeyPatch, writer: str, fields: dict[str, Any]
) -> None:
    write, threads = getattr(calling, writer), []

    def noted(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return write(*args, **options)

    monkeypatch.setattr(calling, writer, noted)
    async with serve(says("<think>hm</think>so")) as api:
        assert (await api.chat(max_tokens=5, **fields)).status == 200
    assert threads
    assert threading.main_thread() not in threads


async def test_the_tool_at_fault_is_looked_for_no_longer_than_a_grammar_may_take(autojump_clock: trio.testing.MockClock) -> None:
    n_tried = 0

    async def compile_slowly(*_: Any, **__: Any) -> None:
        nonlocal n_tried
        n_tried += 1
        await trio.sleep(0.75)

    context: Any = SimpleNamespace(engine=SimpleNamespace(grammar=compile_slowly), settings=SimpleNamespace(grammar_timeout_s=2.0))
    toolbox = Toolbox(tools=tuple(Tool(f"f{i}", strict=True) for i in range(512)))
    model: Any = None
    error = await calling._complaint(context, model, toolbox, None, "parameters", GrammarInvalid("it is too large"))
    assert (error.param, error.message, n_tried) == ("tools", "tools: it is too large", 3)


# --- required ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
async def test_required_calls_come_whatever_the_model_would_say(serve: Any, stream: bool, parallel: bool) -> None:
    async with serve(FakeModel(n_tokens_to_end=3)) as api:
        for seed in range(4):
            fields = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": parallel, "seed": seed}
            answer = await api.chat(**fields, stream=stream, max_tokens=3000)
            calls = named(calls_of(answer))
            assert calls
            assert len(calls) == 1 or parallel
            for name, arguments in calls if answer.finish()[0] == "tool_calls" else calls[:-1]:
                jsonschema.validate(arguments, SCHEMAS[name])
            assert not answer.text()


async def test_a_named_function_is_called_and_no_other(serve: Any) -> None:
    choice = {"type": "function", "function": {"name": "clock"}}
    async with serve() as api:
        for seed in range(4):
            answer = await api.chat(tools=TOOLS, tool_choice=choice, seed=seed, max_tokens=500)
            ((name, arguments),) = named(calls_of(answer))
            assert name == "clock"
            jsonschema.validate(arguments, CLOCK)
            assert answer.finish() == ("tool_calls", None)


@pytest.mark.parametrize("awkward", [{"format": "colour"}, {"pattern": "(?=x)"}])
async def test_a_tool_that_need_not_be_held_to_its_schema_may_have_one_that_cannot_be(serve: Any, awkward: dict[str, Any]) -> None:
    free = tool("b", {"type": "object", "properties": {"a": {"type": "string", **awkward}}})
    async with serve(says(call("b", '{"x": 1}'))) as api:
        answer = await api.chat(tools=[tool("a", strict=True), free], max_tokens=300)
        assert named(calls_of(answer)) == [("b", {"x": 1})]
        held = await api.chat(tools=[tool("a", strict=True), {**free, "function": {**free["function"], "strict": True}}])
    assert (held.status, held.error["param"]) == (400, "tools[1].function.parameters")


async def test_allowed_tools_may_leave_their_mode_out_by_null(serve: Any) -> None:
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": None, "tools": [tool("clock")]}}
    flat = {"type": "allowed_tools", "mode": None, "tools": [{"type": "function", "name": "clock"}]}
    async with serve(says("No.")) as api:
        assert (await api.chat(tools=TOOLS, tool_choice=choice, max_tokens=9)).status == 200
        tools = [{"type": "function", "name": "clock"}]
        assert (await api.post("/v1/responses", {"input": "x", "tools": tools, "tool_choice": flat})).status == 200


async def test_allowed_tools_are_the_only_ones(serve: Any) -> None:
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "clock"}}]},
    }
    async with serve() as api:
        answer = await api.chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, max_tokens=500)
    assert [name for name, _ in named(calls_of(answer))] == ["clock"]


async def test_a_strict_function_is_held_to_its_schema_where_it_is_called_freely(serve: Any) -> None:
    wrong = call("weather", '{"city": 5}')
    async with serve(says(f"so {wrong}")) as api:
        answer = await api.chat(tools=[tool("weather", strict=True)], max_tokens=200, seed=1)
    assert answer.text() == "so"
    (made,) = calls_of(answer)
    assert made["function"]["arguments"].startswith('{"city": "')


@pytest.mark.parametrize("form", sorted(FORMATS.keys() - {HARMONY.name}))
async def test_every_family_can_be_made_to_call(serve: Any, form: str) -> None:
    async with serve(tool_format=form) as api:
        answer = await api.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=900, seed=3, stream=True)
    ((name, arguments),) = named(calls_of(answer))
    jsonschema.validate(arguments, SCHEMAS[name])


async def test_earlier_calls_are_in_the_text_where_the_template_tells_of_tools_and_shows_no_calls(serve: Any) -> None:
    template = "{% if tools %}List of tools: [{{ tools[0].function.name }}]\n{% endif %}{% for m in messages %}{{ m.content }}|{% endfor %}"
    earlier = {"role": "assistant", "content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": FORECAST}]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "fog"}
    twice = [{**earlier["tool_calls"][0], "id": f"call_{i}"} for i in (1, 2)]
    results = [{"role": "tool", "tool_call_id": f"call_{i}", "content": f"fog {i}"} for i in (2, 1)]
    asked = {"messages": [{"role": "user", "content": "so?"}, earlier, result]}
    async with serve(says("", template)) as api:
        shown = "so?|<|tool_call_start|>[weather(city='Ulm')]<|tool_call_end|>|fog|"
        assert (await api.post("/apply-template", {**asked, "tools": TOOLS})).json["prompt"] == f"List of tools: [weather]\n{shown}"
        assert (await api.post("/apply-template", asked)).json["prompt"] == shown
        both = {"messages": [earlier | {"tool_calls": twice}, *results], "tools": TOOLS}
        assert (await api.post("/apply-template", both)).json["prompt"].endswith("<|tool_call_end|>|fog 1|fog 2|"), "no ids are shown"
    async with serve(says(""), tool_format="generic") as api:
        assert "fog 1\n</tool_response>\n<tool_response>\nfog 2" in (await api.post("/apply-template", both)).json["prompt"]


@pytest.mark.parametrize("stream", [False, True])
async def test_each_choice_has_calls_logprobs_and_stop_strings_of_its_own(serve: Any, stream: bool) -> None:
    fields = {"tools": TOOLS, "tool_choice": "required", "n": 3, "logprobs": True, "stop": ["never"], "seed": 5}
    async with serve() as api:
        answer = await api.chat(**fields, parallel_tool_calls=False, max_tokens=900, stream=stream)
    chunks = answer.chunks if stream else [answer.json]
    for index in range(3):
        ((name, arguments),) = named(calls_of(answer, index))
        jsonschema.validate(arguments, SCHEMAS[name])
        shown = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index and choice["logprobs"]]
        text = "".join([one["token"] for each in shown for one in each["content"]])
        assert name in text
        assert calls_of(answer, index)[0]["function"]["arguments"] in text


async def test_an_answer_may_be_held_to_a_schema_and_call_tools_instead(serve: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CLOCK}}
    async with serve(says(call("weather", '{"city": "Ulm"}'))) as api:
        assert named(calls_of(await api.chat(tools=TOOLS, response_format=form, max_tokens=300))) == [("weather", {"city": "Ulm"})]
    async with serve(says('{"zone": "utc"}')) as api:
        answer = await api.chat(tools=TOOLS, response_format=form, max_tokens=300)
        assert json.loads(answer.text()) == {"zone": "utc"}
        refused = await api.chat(tools=TOOLS, structured_outputs={"regex": "a+"})
        assert (refused.status, refused.error["param"]) == (400, "structured_outputs.regex")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}, "response_format"),
    ],
)
async def test_what_no_answer_could_be_held_to_is_refused_also_where_calls_leave_it_no_place(
    serve: Any, fields: dict[str, Any], param: str
) -> None:
    async with serve(says(TWO)) as api:
        refused = await api.chat(tools=TOOLS, tool_choice="required", **fields)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CLOCK}}
        answer = await api.chat(tools=TOOLS, tool_choice="required", response_format=form, max_tokens=300)
    assert (refused.status, refused.error["param"].startswith(param)) == (400, True)
    assert named(calls_of(answer))[0] == ("weather", {"city": "Ulm"})


# --- results ----------------------------------------------------------------------------------------------------------

CONVERSATION = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]


async def prompt_of(api: Any, messages: list[Any], **fields: Any) -> str:
    answer = await api.post("/apply-template", {"messages": messages, **fields})
    assert answer.status == 200, answer.error
    return str(answer.json["prompt"])


async def test_results_go_back_through_the_template(serve: Any) -> None:
    async with serve(says("")) as api:
        prompt = await prompt_of(api, CONVERSATION, tools=TOOLS)
    assert '"name": "weather"' in prompt.split("<turn>user")[0]
    assert '{"name": "weather", "arguments": {"city": "Ulm"}}' in prompt
    assert "<turn>tool\nsunny<end>" in prompt


async def test_a_default_that_a_template_takes_for_a_text_is_one_for_it_and_the_grammar_keeps_the_schema(serve: Any) -> None:
    joining = "{% for name, p in tool.function.parameters.properties.items() if p.enum %}{{ ' ' + name + '=' + p.default }}{% endfor %}"
    template = TOOL_TEMPLATE.replace("{{ tool | tojson }}", "{{ tool.function.name }}" + joining)
    clock = {**CLOCK, "properties": {"zone": {"enum": ["utc", None], "default": None}}}
    async with serve(says(call("clock", '{"zone": null}'), template)) as api:
        for stream in (False, True):
            answer = await api.chat(tools=[tool("clock", clock, strict=True)], stream=stream, max_tokens=500)
            assert answer.status == 200
            assert named(calls_of(answer)) == [("clock", {"zone": None})]
        prompt = await prompt_of(api, CONVERSATION, tools=[tool("clock", clock)])
        assert prompt.startswith("<turn>system\nTools, each call in <tool_call></tool_call>:clock zone=null<end>")
        refused = await api.chat(tools=[tool("clock", {**CLOCK, "properties": {"zone": {"enum": ["utc"]}}})])
    assert (refused.status, refused.error["param"]) == (400, "tools"), "it has no default at all"


async def test_a_template_that_knows_no_tools_is_told_in_plain_messages(serve: Any) -> None:
    async with serve() as api:
        prompt = await prompt_of(api, [{"role": "system", "content": "Be brief."}, *CONVERSATION], tools=TOOLS)
        assert prompt.startswith("<turn>system\nBe brief.\n\nYou may call")
        assert '"name": "clock"' in prompt
        assert '<turn>assistant\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><end>' in prompt
        assert "<turn>user\n<tool_response>\nsunny\n</tool_response><end>" in prompt
        assert "None" not in prompt
    async with serve(ScriptedModel(TWO)) as api:
        assert named(calls_of(await api.chat(tools=TOOLS, max_tokens=500))) == [("weather", {"city": "Ulm"}), ("clock", {"zone": "utc"})]


async def test_the_older_names_of_calls_and_results_are_understood(serve: Any) -> None:
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": {"city": "Ulm"}}},
        {"role": "function", "name": "weather", "content": "sunny"},
    ]
    async with serve(says("")) as api:
        prompt = await prompt_of(api, messages)
    assert '"weather", "arguments": {"city":"Ulm"}' in prompt.replace('": "Ulm"', '":"Ulm"')
    assert "<turn>tool\nsunny<end>" in prompt


# As Mistral's, which take no ids but of nine characters.
OF_NINE = TOOL_TEMPLATE.replace(
    "{% for message in messages %}",
    "{% for message in messages %}{% for call in message.tool_calls or [] %}{% if call.id | length != 9 %}{{ raise_exception('nine') }}"
    "{% endif %}{% endfor %}{% if message.role == 'tool' and message.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}",
)


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "assistant", "function_call": FORECAST}, {"role": "function", "name": "weather", "content": "sunny"}],
        [{"role": "assistant", "tool_calls": [{"function": FORECAST}]}, {"role": "tool", "content": "sunny"}],
        [{"role": "assistant", "tool_calls": [{"function": FORECAST, "id": "c1"}]}, {"role": "tool", "content": "sunny"}],
    ],
)
async def test_calls_and_results_without_ids_reach_a_template_that_wants_some(serve: Any, turns: list[Any]) -> None:
    async with serve(says("", OF_NINE)) as api:
        messages = [CONVERSATION[0], *turns, CONVERSATION[0]]
        assert "<turn>tool\nsunny<end>" in await prompt_of(api, messages)
        assert (await api.post("/v1/chat/completions", {"messages": messages, "max_tokens": 3})).status == 200


def test_ids_that_calls_and_results_have_are_theirs_and_one_has_that_of_the_other_where_it_has_none() -> None:
    (asked, calling, result) = CONVERSATION
    nameless = {name: value for name, value in result.items() if name != "tool_call_id"}
    for given in (result, nameless):
        told = template_messages(msgspec.convert([asked, calling, given], list[Message]))
        assert [told[1]["tool_calls"][0], told[2]] == [calling["tool_calls"][0], result]


async def test_a_call_that_was_cut_stays_in_the_conversation_without_its_arguments(serve: Any) -> None:
    asked = {"role": "user", "content": "weather?"}
    async with serve(says(TWO)) as api:
        cut = (await api.chat(tools=TOOLS, tool_choice="required", max_tokens=55, seed=1)).json["choices"][0]["message"]
        (call,) = cut["tool_calls"]
        with pytest.raises(json.JSONDecodeError):
            json.loads(call["function"]["arguments"])
        result = {"role": "tool", "tool_call_id": call["id"], "content": "cut short"}
        assert f'"name": "{call["function"]["name"]}", "arguments": {{}}' in await prompt_of(api, [asked, cut, result])
        answer = await api.post("/v1/chat/completions", {"messages": [asked, cut, result, asked], "tools": TOOLS, "max_tokens": 3})
    assert answer.status == 200


async def test_of_an_image_that_a_tool_gave_the_model_is_told_and_one_of_the_users_is_refused(serve: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}
    given = [{"type": "text", "text": "The page:"}, image, {"type": "file", "file": {}}]
    async with serve(says("")) as api:
        prompt = await prompt_of(api, [*CONVERSATION[:-1], {**CONVERSATION[-1], "content": given}])
        refused = await api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}]})
    assert "The page:\n(an image, which cannot be seen here)\n(a file, which cannot be read here)<end>" in prompt
    assert (refused.status, refused.error["param"]) == (400, "messages[0].content[0].type")


@pytest.mark.parametrize("role", ["tool", "function"])
@pytest.mark.parametrize("nothing", [{}, {"content": None}, {"content": []}])
async def test_what_came_of_a_tool_that_gave_nothing_is_empty(serve: Any, role: str, nothing: dict[str, Any]) -> None:
    result = {"role": role, "tool_call_id": "c1"}
    async with serve(says("")) as api:
        empty = await prompt_of(api, [*CONVERSATION[:-1], {**result, "content": ""}])
        assert await prompt_of(api, [*CONVERSATION[:-1], {**result, **nothing}]) == empty
    assert "<turn>tool\n<end>" in empty


# --- what is refused --------------------------------------------------------------------------------------------------


def nested(n_levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(n_levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


REQUIRED = {"tool_choice": "required"}
ONLY_B = {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("b")]}}}
BAD_PATTERN = {"type": "object", "properties": {"x": {"pattern": "("}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "all"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [tool("")]}, "tools[0].function.name"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name"),
        ({"tools": [tool("a", 5)]}, "tools[0].function.parameters"),
        ({"tools": [tool("a", {"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool("a", nested(50))]}, "tools[0].function.parameters"),
        ({"tools": [tool("a", {"type": "object", "enum": list(range(20_000))})]}, "tools[0].function.parameters"),
        ({"tools": [tool("a")] * 600}, "tools"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "required"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "moon"}}}, "tool_choice.function.name"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [tool("moon")]}}},
            "tool_choice.allowed_tools.tools",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "a"}]}, "functions"),
        ({"function_call": {"name": "a"}}, "function_call"),
        ({"tools": [tool("a"), tool("b", {"type": "object", "not": {}})], **REQUIRED}, "tools[1].function.parameters"),
        (
            {"tools": [tool("a"), tool("b", BAD_PATTERN)], **REQUIRED},
            "tools[1].function.parameters",
        ),
        ({"tools": [tool("a", {"type": "object", "not": {}}, strict=True)]}, "tools[0].function.parameters"),
        ({"tools": [tool("a"), tool("b", {"type": "object", "not": {}})], **ONLY_B}, "tools[1].function.parameters"),
        ({"tools": [tool("a"), tool("b", BAD_PATTERN)], **ONLY_B}, "tools[1].function.parameters"),
        ({"tools": [tool("a"), tool("b", {"type": "string"})], **ONLY_B}, "tools[1].function.parameters.type"),
    ],
)
async def test_what_is_wrong_with_tools_is_400_and_named(serve: Any, fields: dict[str, Any], param: str) -> None:
    async with serve() as api:
        answer = await api.chat(**fields)
        await api.idle()
    assert (answer.status, answer.error["param"]) == (400, param)
    assert answer.error["type"] == "invalid_request_error"


async def test_a_schema_that_no_grammar_holds_is_no_reason_to_refuse_where_nothing_is_held_to_it(serve: Any) -> None:
    async with serve() as api:
        answer = await api.chat(tools=[tool("a", {"type": "object", "not": {}})])
    assert answer.status == 200


@pytest.mark.parametrize(
    ("message", "param"),
    [
        *(
            ({"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": text}}]}, "tool_calls[0].function.arguments")
            for text in ("no JSON", "{'a': 'b'}", "{'a': '5\" pipe'}", "{foo", '{"a": NaN}', '{"a": 1}{"b": 2}', '{"a": 1,}', '{"a": [}')
        ),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]}, "tool_calls[0].function.arguments"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}, "tool_calls[0].function.name"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": 5}, "tool_calls"),
        ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "a"}}]}, "tool_calls"),
    ],
)
async def test_what_is_wrong_with_calls_in_messages_is_400_and_named(serve: Any, message: dict[str, Any], param: str) -> None:
    async with serve() as api:
        answer = await api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}, message]})
    assert (answer.status, answer.error["param"]) == (400, f"messages[1].{param}")


@pytest.mark.parametrize(
    "given", [None, {}, {"type": "object"}, {"type": "object", "additionalProperties": False}, {"type": "object", "title": "Empty"}]
)
def test_a_function_without_arguments_has_properties_however_that_is_said(given: dict[str, Any] | None) -> None:
    assert parameters_of(given) == {"type": "object", "properties": {}, **(given or {})}, "some templates look for them"


def test_a_function_without_arguments_has_properties_on_anthropics_surface_too() -> None:
    fields = anthropic.ToolFields(name="a", input_schema={"type": "object"})
    assert anthropic._toolbox([fields], None).tools[0].parameters == {"type": "object", "properties": {}}


def test_a_schema_that_says_more_is_left_as_it_is() -> None:
    assert parameters_of({"$ref": "#/$defs/a", "$defs": {}}) == {"type": "object", "$ref": "#/$defs/a", "$defs": {}}


def test_wherever_a_calls_arguments_are_cut_they_are_told_from_what_is_no_object() -> None:
    whole = '{"a": 1.5e3, "b": [true, null, "x\\n\u00e9"], "c": {"d": -2}}'
    assert arguments_told(whole) == whole
    assert {arguments_told(whole[:n]) for n in range(len(whole))} == {"{}"}
    assert [arguments_told(text) for text in ("[1", "5", '"a', whole + "}")] == [None] * 4


def test_arguments_that_a_client_has_written_twice_are_read_as_they_were_meant() -> None:
    whole = '{"a": "x"}'
    assert arguments_told(json.dumps(whole)) == arguments_told(json.dumps(json.dumps(whole))) == whole
    assert arguments_told(json.dumps(whole[:5])) == "{}", "it was cut, and then written as a text"
    assert arguments_told(json.dumps("a text")) is None


@pytest.mark.parametrize("text", ["null", "[]", " [ ]\n", '"null"', '"[]"'])
def test_arguments_that_a_client_writes_where_there_are_none_are_none(text: str) -> None:
    assert arguments_told(text) == "{}"
    assert [arguments_told(text) for text in ("[null]", "[[]]", "false", "0", '"nil"')] == [None] * 5
