"""A model that reads and tells text, over HTTP: conversations and prompts go to it as they came, and its own counts come back."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cllm.backend import (
    StreamCall,
    StreamChat,
    StreamEnd,
    StreamEvent,
    StreamForm,
    StreamLogprob,
    StreamRequest,
    StreamText,
    StreamToken,
    StreamUsage,
)
from cllm.errors import InvalidRequest, RateLimited, RequestError, Unavailable
from cllm.serve.stepless import StreamsOnly
from cllm.testing.fake_streams import FakeTextModel
from cllm.testing.live import live_server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USAGE = StreamUsage(n_prompt=5, n_generated=4, n_cached=2)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}


class Told(FakeTextModel):
    """Tells what a test has it tell."""

    def __init__(self) -> None:
        super().__init__(by_itself=False)
        self.heeds |= {"tools", "json_schema", "template_variables", "prompt", "top_p", "top_k", "repeat_penalty", "n_logprobs"}
        self.n_logprobs_max = 3
        self.events: list[StreamEvent] = []
        self.refuses: RequestError | None = None

    def start(self, seq_id: int, request: StreamRequest) -> None:
        self.started.append(request)
        if self.refuses is not None:
            raise self.refuses
        for event in self.events:
            self._tell(type(event)(**{**{f: getattr(event, f) for f in event.__slots__ if f != "__weakref__"}, "seq_id": seq_id}))


@pytest.fixture(scope="module")
def told() -> Iterator[tuple[Told, str]]:
    model = Told()
    with live_server(StreamsOnly(model)) as url:
        yield model, url
    model.close()


@pytest.fixture
def model(told: tuple[Told, str]) -> Told:
    told[0].started.clear()
    told[0].events = [StreamText(0, "a b "), StreamText(0, "c d", n_tokens=3), StreamEnd(0, usage=USAGE)]
    told[0].refuses = None
    return told[0]


@pytest.fixture
def url(told: tuple[Told, str]) -> str:
    return told[1]


def post(url: str, body: dict[str, Any]) -> tuple[int, str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, response.read().decode(), response.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def hello(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"}], **fields}


def chunks_of(stream: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]


def test_a_conversation_goes_to_it_as_it_came_and_its_usage_comes_back(model: Told, url: str) -> None:
    status, body, _ = post(url + CHAT, hello(temperature=0.5, seed=3, max_tokens=9, stop=["x"]))
    answer = json.loads(body)
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "a b c d")
    assert answer["choices"][0]["finish_reason"] == "stop"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (5, 4, 2)
    assert model.started == [
        StreamRequest(
            chat=StreamChat(messages=[{"role": "user", "content": "hello"}]), n_tokens_max=9, seed=3, stop=("x",), temperature=0.5
        )
    ]


def test_a_token_instead_of_a_text_costs_that_request_alone(model: Told, url: str) -> None:
    usual, model.events = model.events, [StreamText(0, "a b "), StreamToken(0, 5)]
    assert post(url + CHAT, hello())[0] == 500
    model.events = usual
    assert post(url + CHAT, hello())[0] == 200


def test_without_a_limit_none_is_set(model: Told, url: str) -> None:
    post(url + CHAT, hello())
    assert model.started[0].n_tokens_max is None


@pytest.mark.parametrize(("prompt", "field", "value"), [("once", "text", "once"), ([4, 5], "prompt", (4, 5))])
def test_a_prompt_goes_to_it_as_it_came(model: Told, url: str, prompt: Any, field: str, value: Any) -> None:
    status, body, _ = post(url + COMPLETIONS, {"prompt": prompt})
    assert (status, json.loads(body)["choices"][0]["text"]) == (200, "a b c d")
    assert getattr(model.started[0], field) == value
    assert model.started[0].n_tokens_max == 16


@pytest.mark.parametrize("prompt", ["once", ["once"], [["on", "ce"]]])
def test_a_prompt_by_llama_servers_names_goes_to_it_as_it_came(model: Told, url: str, prompt: Any) -> None:
    status, body, _ = post(url + "/completion", {"prompt": prompt})
    assert (status, json.loads(body)["content"], json.loads(body)["tokens_predicted"]) == (200, "a b c d", 4)
    assert (model.started[0].prompt, model.started[0].text) == ((), "once")


@pytest.mark.parametrize(
    ("fields", "param"), [({"prompt": ["once", 5]}, "prompt"), ({"n_probs": 4}, "n_probs"), ({"n_predict": 0}, "n_predict")]
)
def test_what_it_cannot_do_is_refused_by_those_names(model: Told, url: str, fields: dict[str, Any], param: str) -> None:
    status, body, _ = post(url + "/completion", {"prompt": "once", **fields})
    assert (status, json.loads(body)["error"]["param"]) == (400, param)
    assert not model.started


def test_a_stop_string_ends_the_answer_whatever_the_model_makes_of_it(model: Told, url: str) -> None:
    for is_stream in (False, True):
        _, body, _ = post(url + CHAT, hello(stop="b c", stream=is_stream))
        if is_stream:
            chunks = chunks_of(body)
            assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "a "
            assert chunks[-1]["choices"][0]["stop_reason"] == "b c"
        else:
            assert json.loads(body)["choices"][0]["message"]["content"] == "a "


def test_reasoning_and_calls_are_told_apart_in_streams_too(model: Told, url: str) -> None:
    model.events = [
        StreamText(0, reasoning="hm"),
        StreamText(0, calls=(StreamCall(0, "look", '{"at":'),)),
        StreamText(0, calls=(StreamCall(0, "", '"it"}'),)),
        StreamEnd(0, usage=USAGE),
    ]
    _, body, _ = post(url + CHAT, hello(tools=[TOOL]))
    (choice,) = json.loads(body)["choices"]
    assert (choice["finish_reason"], choice["message"]["reasoning_content"]) == ("tool_calls", "hm")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at":"it"}'}
    _, stream, _ = post(url + CHAT, hello(tools=[TOOL], stream=True))
    calls = [call for chunk in chunks_of(stream) for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert "".join(call["function"]["arguments"] for call in calls) == '{"at":"it"}'
    chat = model.started[0].chat
    assert chat is not None
    assert [tool["function"]["name"] for tool in chat.tools] == ["look"]


ALTERNATING = [
    StreamText(0, calls=(StreamCall(0, "look"), StreamCall(1, "see"))),
    StreamText(0, calls=(StreamCall(0, "", ' {"at":'), StreamCall(1, "", "{"))),
    StreamText(0, content="so"),
    StreamText(0, calls=(StreamCall(1, "", "}"), StreamCall(0, "", '"it"}'))),
    StreamEnd(0, usage=USAGE),
]


def calls_of_ollama(url: str) -> list[tuple[str, Any]]:
    _, body, _ = post(url + "/api/chat", hello(tools=[TOOL], stream=True))
    calls = [call["function"] for line in body.splitlines() for call in json.loads(line)["message"].get("tool_calls", [])]
    return [(call["name"], call["arguments"]) for call in calls]


def calls_of_anthropic(url: str) -> list[tuple[str, Any]]:
    tool = {"name": "look", "input_schema": {"type": "object"}}
    _, body, _ = post(url + "/v1/messages", hello(tools=[tool], max_tokens=50, stream=True))
    events = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: ")]
    names = {one["index"]: one["content_block"]["name"] for one in events if one.get("content_block", {}).get("type") == "tool_use"}
    said = dict.fromkeys(names, "")
    for event in events:
        said |= (
            {event["index"]: said[event["index"]] + event["delta"]["partial_json"]}
            if event.get("index") in names and "delta" in event
            else {}
        )
    assert events[-1]["type"] == "message_stop", events[-1]
    return [(name, json.loads(said[index])) for index, name in names.items()]


def calls_of_responses(url: str) -> list[tuple[str, Any]]:
    _, body, _ = post(url + "/v1/responses", {"input": "hello", "tools": [{"type": "function", "name": "look"}], "stream": True})
    events = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: {")]
    items = events[-1]["response"]["output"]
    return [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"]


@pytest.mark.parametrize("calls_of", [calls_of_ollama, calls_of_anthropic, calls_of_responses])
def test_pieces_of_calls_that_come_by_turns_are_told_one_call_after_the_other(
    model: Told, url: str, calls_of: Callable[[str], list[tuple[str, Any]]]
) -> None:
    model.events = list(ALTERNATING)
    assert calls_of(url) == [("look", {"at": "it"}), ("see", {})]


def test_a_form_goes_to_it_where_it_heeds_it(model: Told, url: str) -> None:
    schema = {"type": "object"}
    post(url + CHAT, hello(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}))
    assert model.started[0].form == StreamForm("json_schema", '{"type": "object"}', "response_format")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_p": 0.5}, "min_p"),
        ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]}, "tools"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"stop_token_ids": [5]}, "stop_token_ids"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"reasoning_budget": 7}, "reasoning_budget"),
    ],
)
def test_what_it_does_not_heed_is_refused_by_the_fields_name(model: Told, url: str, fields: dict[str, Any], param: str) -> None:
    status, body, _ = post(url + CHAT, hello(**fields))
    error = json.loads(body)["error"]
    assert (status, error["type"], error["param"]) == (400, "not_supported_error", param)
    assert model.started == []


def test_a_strict_tool_goes_to_it_as_such_where_it_heeds_that() -> None:
    model = Told()
    model.heeds |= {"strict"}
    model.events = [StreamText(0, "a"), StreamEnd(0, usage=USAGE)]
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    with live_server(StreamsOnly(model)) as url:
        assert post(url + CHAT, hello(tools=[strict, {**TOOL, "function": {"name": "other"}}]))[0] == 200
    model.close()
    chat = model.started[0].chat
    assert chat is not None
    assert (chat.strict, [tool["function"].get("strict") for tool in chat.tools]) == (True, [True, None])


def test_a_schema_that_is_longer_than_any_may_be_is_refused_before_it_hears_of_it(model: Told, url: str) -> None:
    status, body, _ = post(url + CHAT, hello(json_schema={"title": "x" * 131_072}))
    error = json.loads(body)["error"]
    assert (status, error["param"], model.started) == (400, "json_schema", []), body
    assert "are the most that is taken" in error["message"]


@pytest.mark.parametrize(
    "schema",
    ["not json", "[[[[", '{"minimum": NaN}', '{"minimum": 1e999}', '{"title": "\\ud83d"}', 5, "5", "[" * 3000],
)
def test_what_is_no_schema_is_refused_before_it_hears_of_it(model: Told, url: str, schema: object) -> None:
    status, body, _ = post(url + CHAT, hello(json_schema=schema))
    assert (status, json.loads(body)["error"]["param"], model.started) == (400, "json_schema", []), body


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/api/chat", {"think": "high"}, "think"),
        ("/v1/messages", {"max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ("/v1/messages", {"max_tokens": 9, "output_config": {"effort": "low"}}, "output_config.effort"),
        ("/v1/responses", {"input": "hello", "reasoning": {"effort": "low"}}, "reasoning.effort"),
    ],
)
def test_what_it_does_not_heed_of_reasoning_is_refused_by_the_surfaces_name(
    model: Told, url: str, path: str, fields: dict[str, Any], name: str
) -> None:
    status, body, _ = post(url + path, {"model": "fake", **({} if "input" in fields else hello()), **fields})
    assert status == 400
    assert f"cannot do {name}" in body
    assert model.started == []


OF_REASONING: list[tuple[str, dict[str, Any]]] = [
    ("/api/chat", {"think": False}),
    ("/v1/messages", {"max_tokens": 9, "thinking": {"type": "disabled"}}),
    (CHAT, {"reasoning_budget": 0}),
    (CHAT, {"reasoning_effort": "none"}),
    ("/api/chat", {"think": True}),
    (CHAT, {"reasoning_effort": "high", "reasoning_budget": 0}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
]
OFF, ON = (None, {"enable_thinking": False}), (None, {"enable_thinking": True})
NONE, NOTHING = ("none", {}), (None, {})


@pytest.mark.parametrize(
    ("heeds", "said"),
    [
        ({"reasoning_effort"}, [NONE, NONE, NONE, NONE, NOTHING, NONE, NONE]),
        ({"template_variables"}, [OFF, OFF, OFF, OFF, ON, OFF, OFF]),
        ({"reasoning_effort", "template_variables"}, [OFF, OFF, OFF, NONE, ON, OFF, OFF]),
        (set(), [400] * 7),
    ],
    ids=["efforts", "switches", "both", "neither"],
)
def test_whether_it_is_to_reason_is_said_in_the_words_that_it_heeds(heeds: set[str], said: list[Any]) -> None:
    model = Told()
    model.heeds = model.heeds - {"template_variables"} | heeds
    model.events = [StreamText(0, "a"), StreamEnd(0, usage=USAGE)]
    told: list[Any] = []
    with live_server(StreamsOnly(model)) as url:
        for path, fields in OF_REASONING:
            status, _, _ = post(url + path, hello(**fields))
            chat = model.started[-1].chat if status == 200 else None
            told.append(status if chat is None else (chat.reasoning_effort, dict(chat.template_variables)))
    model.close()
    assert told == said


@pytest.mark.parametrize("heeds", [True, False])
def test_documents_go_to_it_as_a_variable_of_its_template_if_it_heeds_these(heeds: bool) -> None:
    model, documents = Told(), [{"text": "x"}]
    model.heeds -= frozenset() if heeds else {"template_variables"}
    model.events = [StreamText(0, "a"), StreamEnd(0, usage=USAGE)]
    with live_server(StreamsOnly(model)) as url:
        status, body, _ = post(url + CHAT, hello(documents=documents))
        told = [dict(request.chat.template_variables) for request in model.started if request.chat is not None]
    model.close()
    assert (status, told) == ((200, [{"documents": documents}]) if heeds else (400, []))
    assert heeds or json.loads(body)["error"]["param"] == "documents"


def test_documents_are_guessed_to_be_tokens_as_messages_are() -> None:
    model = Told()
    model.events = [StreamText(0, "a"), StreamEnd(0)]
    with live_server(StreamsOnly(model)) as url:
        answers = [post(url + CHAT, hello(documents=[{"text": "word " * n}])) for n in (1, 400)]
    model.close()
    few, many = (json.loads(body)["usage"]["prompt_tokens"] for _, body, _ in answers)
    assert many > few + 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"logprobs": 4}, "logprobs"), ({"logprobs": 1, "echo": True}, "echo"), ({"prompt_logprobs": 1}, "prompt_logprobs")],
)
def test_completions_have_their_own_names_for_logprobs_that_it_does_not_tell(
    model: Told, url: str, fields: dict[str, Any], param: str
) -> None:
    status, body, _ = post(url + COMPLETIONS, {"prompt": "once", **fields})
    assert (status, json.loads(body)["error"]["param"]) == (400, param)
    assert model.started == []


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/apply-template", "/v1/messages/count_tokens"])
def test_what_needs_its_tokens_is_not_served(model: Told, url: str, path: str) -> None:
    status, body, _ = post(url + path, hello(content="a", tokens=[1], max_tokens=5) if path != "/tokenize" else {"content": "a"})
    assert (status, "not" in body) == (501 if path != "/detokenize" else 400, True)


@pytest.mark.parametrize(
    ("refusal", "status", "retry_after"),
    [
        (InvalidRequest("top_p: too much", param="top_p"), 400, None),
        (RateLimited("asked too often", retry_after_s=7.0), 429, "7"),
        (Unavailable("all are busy", retry_after_s=3.0), 503, "3"),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_refusal_is_told_to_the_client_as_it_is(
    model: Told, url: str, refusal: RequestError, status: int, retry_after: str | None, at_once: bool
) -> None:
    if at_once:
        model.refuses = refusal
    else:
        model.events = [StreamEnd(0, refusal=refusal)]
    got, body, headers = post(url + CHAT, hello(stream=True))
    assert (got, json.loads(body)["error"]["message"], headers["Retry-After"]) == (status, refusal.message, retry_after)


def test_logprobs_are_told_by_the_models_own_tokens(model: Told, url: str) -> None:
    first = StreamLogprob(b"ab", -0.5, ((b"ab", -0.5), (b"\xff", -2.0)))
    model.events = [StreamText(0, "ab", logprobs=(first,)), StreamText(0, "cd", logprobs=(StreamLogprob(b"cd", -1.0),)), StreamEnd(0)]
    _, body, _ = post(url + CHAT, hello(logprobs=True, top_logprobs=2))
    ab, cd = json.loads(body)["choices"][0]["logprobs"]["content"]
    assert (ab["token"], ab["logprob"], [likely["bytes"] for likely in ab["top_logprobs"]]) == ("ab", -0.5, [[97, 98], [255]])
    assert (cd["token"], cd["top_logprobs"]) == ("cd", [])
    assert model.started[0].n_logprobs == 2
    status, body, _ = post(url + CHAT, hello(logprobs=True, top_logprobs=5))
    assert (status, json.loads(body)["error"]["param"]) == (400, "top_logprobs")


def test_a_token_that_no_vocabulary_has_ends_the_answer_alone(model: Told, url: str) -> None:
    model.events = [StreamText(0, "ab", logprobs=(StreamLogprob(b"a" * 5000, -0.5),)), StreamEnd(0)]
    assert post(url + CHAT, hello(logprobs=True))[0] == 500
    model.events = [StreamText(0, "ab"), StreamEnd(0)]
    assert post(url + CHAT, hello())[0] == 200


def test_a_stream_that_breaks_ends_with_an_error_and_without_done(model: Told, url: str) -> None:
    model.events = [StreamText(0, "a"), StreamEnd(0, "the line is cut")]
    status, body, _ = post(url + CHAT, hello(stream=True))
    assert status == 200
    assert "error" in chunks_of(body)[-1]
    assert "[DONE]" not in body
    assert "the line is cut" not in body


def test_other_surfaces_answer_too_and_the_pages_know_it(model: Told, url: str) -> None:
    bodies = {"/v1/responses": {"input": "hello"}, "/v1/messages": hello(max_tokens=20), "/api/chat": hello(stream=False)}
    bodies |= {path: {"prompt": "hello", "stream": False} for path in ("/api/generate", "/generate")}
    for path, body in bodies.items():
        status, answer, _ = post(url + path, body)
        assert (status, "a b " in answer) == (200, True), (path, answer)
    for path in ("/health", "/ready", "/metrics", "/slots", "/props", "/v1/models", "/model/info"):
        with urllib.request.urlopen(url + path, timeout=120) as response:
            assert response.status == 200
