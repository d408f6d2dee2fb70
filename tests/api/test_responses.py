"""POST /v1/responses, and the responses that are kept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from cllm.api.openai.messages import arguments_told
from cllm.api.openai.responses import routes
from cllm.api.openai.responses.answers import ResponseHead
from cllm.api.openai.responses.requests import Item, Part
from cllm.api.openai.responses.store import N_BYTES_OBJECT, ResponseStore
from cllm.errors import NotFound
from cllm.testing.fake import FakeModel
from cllm.testing.scripted import TOOL_TEMPLATE, ScriptedModel
from tests.api.conftest import failing

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def events(answer: Any) -> list[Any]:
    """A stream's events, which are named as their data says and numbered from 0."""
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.body
    told = []
    for event in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


class Listener:
    """A model that answers with one text, and remembers what it was asked."""

    def __init__(self, answer: str = "Good day.") -> None:
        self.prompts: list[str] = []
        self._answer = answer
        self.model = ScriptedModel(self._say)

    def _say(self, prompt: str) -> str:
        if prompt not in self.prompts:
            self.prompts.append(prompt)
        return self._answer


async def test_a_response_has_the_shape_that_clients_expect(serve: Any) -> None:
    async with serve(ScriptedModel("Good day.")) as api:
        answer = await api.post("/v1/responses", {"model": "fake", "input": "hello", "metadata": {"a": "b"}, "temperature": 0.5})
    assert answer.status == 200
    response = answer.json
    assert response["id"].startswith("resp_")
    assert (response["object"], response["status"], response["model"], response["error"]) == ("response", "completed", "fake", None)
    (item,) = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Good day.", "annotations": [], "logprobs": []}]
    assert (response["metadata"], response["temperature"], response["store"]) == ({"a": "b"}, 0.5, True)
    usage = response["usage"]
    assert usage["output_tokens"] == 10
    assert usage["total_tokens"] == usage["input_tokens"] + 10
    assert usage["input_tokens_details"]["cached_tokens"] == 0


async def test_a_stream_tells_the_response_item_by_item_and_ends_without_done(serve: Any) -> None:
    async with serve(ScriptedModel("Good day.")) as api:
        answer = await api.post("/v1/responses", {"input": "hello", "stream": True})
        whole = (await api.get(f"/v1/responses/{events(answer)[0]['response']['id']}")).json
    told = events(answer)
    kinds = [event["type"] for event in told]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"]
    assert "".join([event["delta"] for event in told[4:-4]]) == told[-4]["text"] == "Good day."
    assert told[-1]["response"] == whole
    assert whole["output"] == [told[-2]["item"]]
    assert {event["item_id"] for event in told if "item_id" in event} == {told[-2]["item"]["id"]}
    assert b"[DONE]" not in answer.body


def shown(response: Any) -> list[tuple[str, str, str]]:
    """The items: what they are, their status and what they say."""
    said = [item.get("arguments") or "".join(part["text"] for part in item.get("content", [])) for item in response["output"]]
    return [(item["type"], item["status"], text) for item, text in zip(response["output"], said, strict=True)]


@pytest.mark.parametrize(
    ("n", "items"),
    [
        (1, [("reasoning", "incomplete", "h")]),
        (12, [("reasoning", "completed", "hm"), ("message", "incomplete", "It")]),
        (200, [("reasoning", "completed", "hm"), ("message", "completed", "It is 5.")]),
    ],
)
async def test_a_cut_answer_is_told_alike_whole_and_in_a_stream(serve: Any, n: int, items: list[Any]) -> None:
    template = "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}<end>{% endfor %}<turn>assistant\n<think>"
    async with serve(ScriptedModel("<think>hm</think>It is 5.", template=template)) as api:
        whole = await api.post("/v1/responses", {"input": "hello", "max_output_tokens": n})
        stream = await api.post("/v1/responses", {"input": "hello", "max_output_tokens": n, "stream": True})
    assert shown(whole.json) == shown(events(stream)[-1]["response"]) == items


async def test_what_is_cut_short_is_incomplete_and_says_why(serve: Any) -> None:
    async with serve(ScriptedModel("Good day.")) as api:
        whole = (await api.post("/v1/responses", {"input": "hello", "max_output_tokens": 4})).json
        told = events(await api.post("/v1/responses", {"input": "hello", "max_output_tokens": 4, "stream": True}))
    assert told[-1]["type"] == "response.incomplete"
    for response in (whole, told[-1]["response"]):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert response["output"][0]["status"] == "incomplete"
        assert response["output"][0]["content"][0]["text"] == "Good"


async def test_an_answer_without_a_word_is_an_empty_message(serve: Any) -> None:
    async with serve(ScriptedModel("")) as api:
        whole = (await api.post("/v1/responses", {"input": "hello"})).json
        told = events(await api.post("/v1/responses", {"input": "hello", "stream": True}))
    for response in (whole, told[-1]["response"]):
        assert [part["text"] for item in response["output"] for part in item["content"]] == [""]


# --- going on from a response -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_goes_on_from_a_response_but_not_with_its_instructions(serve: Any, stream: bool) -> None:
    listener = Listener()
    async with serve(listener.model) as api:
        first = await api.post("/v1/responses", {"input": "one", "instructions": "Be brief.", "stream": stream})
        response = events(first)[-1]["response"] if stream else first.json
        second = (await api.post("/v1/responses", {"input": "two", "previous_response_id": response["id"]})).json
        third = await api.post("/v1/responses", {"input": "three", "previous_response_id": second["id"]})
    assert third.status == 200
    before = "<turn>user\none<end><turn>assistant\nGood day.<end><turn>user\ntwo<end><turn>assistant\n"
    assert listener.prompts == [
        "<bos><turn>system\nBe brief.<end><turn>user\none<end><turn>assistant\n",
        f"<bos>{before}",
        f"<bos>{before}Good day.<end><turn>user\nthree<end><turn>assistant\n",
    ]


async def test_a_response_is_kept_until_it_is_deleted(serve: Any) -> None:
    async with serve(ScriptedModel("Good day.")) as api:
        response = (await api.post("/v1/responses", {"input": "hello"})).json
        path = f"/v1/responses/{response['id']}"
        assert (await api.get(path)).json == response
        inputs = (await api.get(f"{path}/input_items")).json
        deleted = await api.ask("DELETE", path)
        assert deleted.json == {"id": response["id"], "object": "response", "deleted": True}
        assert (await api.get(path)).status == (await api.ask("DELETE", path)).status == 404
        gone_on = await api.post("/v1/responses", {"input": "x", "previous_response_id": response["id"]})
    assert [(item["role"], item["content"]) for item in inputs["data"]] == [("user", [{"type": "input_text", "text": "hello"}])]
    assert (gone_on.status, gone_on.error["param"], gone_on.error["code"]) == (400, "previous_response_id", "previous_response_not_found")


async def test_the_items_of_a_response_are_listed_from_the_last_one_on_and_in_pages(serve: Any) -> None:
    said = [{"role": "user", "content": word} for word in ("one", "two", "three")]
    async with serve(ScriptedModel("Good day.")) as api:
        response = (await api.post("/v1/responses", {"input": said})).json
        path = f"/v1/responses/{response['id']}/input_items"

        async def listed(query: str = "") -> tuple[list[str], Any]:
            page = (await api.get(path + query)).json
            return [item["content"][0]["text"] for item in page["data"]], page

        whole, page = await listed()
        assert (whole, page["has_more"]) == (["three", "two", "one"], False)
        assert (await listed("?order=asc"))[0] == ["one", "two", "three"]
        first, page = await listed("?limit=2")
        assert (first, page["has_more"]) == (["three", "two"], True)
        assert (await listed(f"?limit=2&after={page['last_id']}"))[0] == ["one"]
        for param, value in (("order", "up"), ("limit", "0"), ("limit", "101"), ("limit", "x"), ("after", "y")):
            refused = await api.get(f"{path}?{param}={value}")
            assert (refused.status, refused.error["param"]) == (400, param)


async def test_what_is_not_to_be_stored_is_not(serve: Any) -> None:
    for settings, fields in (({}, {"store": False}), ({"responses_kept": 0}, {})):
        async with serve(ScriptedModel("Good day."), **settings) as api:
            response = (await api.post("/v1/responses", {"input": "hello", **fields})).json
            assert (await api.get(f"/v1/responses/{response['id']}")).status == 404
            assert response["store"] is False


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_is_larger_than_all_the_room_says_that_it_is_not_stored(
    serve: Any, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(*, n_bytes_max: int, **fields: Any) -> ResponseStore:
        return ResponseStore(n_bytes_max=n_bytes_max // 1_000_000, **fields)

    monkeypatch.setattr(routes, "ResponseStore", small)
    async with serve(ScriptedModel("Good day.")) as api:
        answer = await api.post("/v1/responses", {"input": "hello", "stream": stream})
        response = events(answer)[-1]["response"] if stream else answer.json
        assert response["store"] is False
        assert (await api.get(f"/v1/responses/{response['id']}")).status == 404


async def test_a_response_is_seen_by_the_key_that_made_it_alone(serve: Any) -> None:
    async with serve(ScriptedModel("Good day."), api_key=("one", "two")) as api:
        response = (await api.post("/v1/responses", {"input": "hello"}, Authorization="Bearer one")).json
        path = f"/v1/responses/{response['id']}"
        assert (await api.get(path, Authorization="Bearer one")).status == 200
        assert (await api.get(path, Authorization="Bearer two")).status == 404
        assert (await api.ask("DELETE", path, Authorization="Bearer two")).status == 404
        other = await api.post("/v1/responses", {"input": "x", "previous_response_id": response["id"]}, Authorization="Bearer two")
        assert other.status == 400
        assert (await api.get(path)).status == 401


@pytest.mark.parametrize("kind", [{"type": "item_reference"}, {}])
async def test_an_item_that_is_kept_may_be_referred_to(serve: Any, kind: dict[str, str]) -> None:
    said, more = {"role": "user", "content": "hello"}, {"role": "user", "content": "and then?"}
    listener = Listener()
    async with serve(listener.model) as api:
        (item,) = (await api.post("/v1/responses", {"input": [said]})).json["output"]
        referred = await api.post("/v1/responses", {"input": [said, {**kind, "id": item["id"]}, more]})
        again = await api.post("/v1/responses", {"input": [said, {**kind, "id": item["id"]}, more, more]})
        await api.post("/v1/responses", {"input": [said, item, more]})
    assert (referred.status, again.status) == (200, 200)
    assert "<turn>assistant\nGood day.<end>" in listener.prompts[1]
    assert len(listener.prompts) == 3  # the last one's is the same as the second


async def test_an_item_is_referred_to_once(serve: Any) -> None:
    listener = Listener()
    async with serve(listener.model) as api:
        (item,) = (await api.post("/v1/responses", {"input": "hello"})).json["output"]
        answer = await api.post("/v1/responses", {"input": [{"type": "item_reference", "id": item["id"]}] * 2})
    assert (answer.status, answer.error["param"]) == (400, "input[1].id")
    assert len(listener.prompts) == 1


async def test_the_items_that_a_response_was_asked_with_may_be_referred_to_as_well(serve: Any) -> None:
    async with serve(Listener().model) as api:
        response = (await api.post("/v1/responses", {"input": "hello"})).json
        (listed,) = (await api.get(f"/v1/responses/{response['id']}/input_items")).json["data"]
        answer = await api.post("/v1/responses", {"input": [{"type": "item_reference", "id": listed["id"]}]})
    assert answer.status == 200


async def test_tools_that_are_no_functions_are_left_out_beside_functions(serve: Any) -> None:
    others = [{"type": "web_search"}, {"type": "namespace", "name": "mcp", "tools": [{"type": "custom", "name": "x"}]}]
    listener = Listener()
    async with serve(listener.model) as api:
        for tools in ([TOOL], [others[0], TOOL, others[1]]):
            assert (await api.post("/v1/responses", {"input": "hello", "tools": tools})).status == 200
    assert len(listener.prompts) == 1


async def test_tools_that_nobody_calls_here_are_told_as_they_were_sent(serve: Any) -> None:
    hosted = [
        {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}},
        {"type": "mcp", "server_label": "a", "server_url": "https://example.com", "require_approval": "never"},
    ]
    policy = {"network_policy": {"type": "allowlist", "domain_secrets": [{"name": "key", "value": "secret-3"}]}}
    secrets = {"authorization": "secret-1", "headers": {"Authorization": "Bearer secret-2"}, "container": policy}
    async with serve() as api:
        tools = [hosted[0], TOOL, hosted[1] | secrets]
        answer = await api.post("/v1/responses", {"input": "hello", "max_output_tokens": 1, "tools": tools})
        kept = await api.get(f"/v1/responses/{answer.json['id']}")
    hosted[1]["container"] = {"network_policy": {"type": "allowlist"}}
    assert [answer.json["tools"][i] for i in (0, 2)] == [kept.json["tools"][i] for i in (0, 2)] == hosted
    assert b"secret" not in answer.body + kept.body
    assert answer.json["tools"][1] == {"strict": None, "description": None, **TOOL}


async def test_a_hosted_tool_that_is_nested_too_deeply_to_be_told_costs_nothing(serve: Any) -> None:
    async with serve() as api:
        for depth in (400, 600, 800, 950):
            nested = '{"a":' * depth + "1" + "}" * depth
            tools = f'[{json.dumps(TOOL)}, {{"type": "custom", "name": "x", "format": {nested}}}]'
            answer = await api.post("/v1/responses", f'{{"input": "hello", "max_output_tokens": 1, "tools": {tools}}}'.encode())
            assert answer.status in (200, 400), depth


@pytest.mark.parametrize(
    ("others", "limit"),
    [
        ([{"type": "web_search", "x": [[]] * 100_000}], "100000 members"),
        ([{"type": "web_search", "x": "y" * (1 << 20)}] * 2, "1048576 characters"),
    ],
)
async def test_hosted_tools_with_more_in_them_than_any_in_use_are_refused(serve: Any, others: list[Any], limit: str) -> None:
    async with serve() as api:
        answer = await api.post("/v1/responses", {"input": "hello", "tools": [TOOL, *others]})
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert limit in answer.error["message"]


async def test_what_a_hosted_tool_has_in_it_counts_for_what_is_kept(serve: Any) -> None:
    store = ResponseStore(n_max=9, n_bytes_max=1 << 30, ttl_s=10.0)
    store.keep({"id": "a", "tools": []}, (), (), key="", now=0.0)
    n_bytes = store.n_bytes
    store.keep({"id": "b", "tools": [{"type": "custom", "x": [[], {}]}]}, (), (), key="", now=0.0)
    assert store.n_bytes >= 2 * n_bytes + 4 * N_BYTES_OBJECT


async def test_what_a_template_refuses_is_told_by_the_name_that_it_has_here(serve: Any) -> None:
    model = Listener().model
    model.vocabulary.chat_template = "{{ raise_exception('not that') }}"
    async with serve(model) as api:
        for path, body, name in (
            ("/v1/responses", {"input": "hello"}, "input"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}, "messages"),
        ):
            answer = await api.post(path, body)
            assert (answer.status, answer.error["param"]) == (400, name)
            assert "not that" in answer.error["message"]
        assert (await api.post("/api/generate", {"prompt": "hello"})).json["error"].startswith("prompt: ")


NAMESPACE = {"type": "namespace", "name": "mcp__sums", "description": "sums", "tools": [TOOL]}
CALL = '<tool_call>\n{"name": "mcp__sums__add", "arguments": {"a": 1}}\n</tool_call>'


async def test_functions_of_a_namespace_are_offered_and_called_by_both_names(serve: Any) -> None:
    listener = Listener(CALL)
    asked = {"input": "hello", "tools": [NAMESPACE]}
    async with serve(listener.model) as api:
        (whole,) = (await api.post("/v1/responses", asked)).json["output"]
        told = events(await api.post("/v1/responses", {**asked, "stream": True}))
    assert '"mcp__sums__add"' in listener.prompts[0]
    streamed = [event["item"] for event in told if event["type"].startswith("response.output_item.")]
    for item in (whole, *streamed, *told[-1]["response"]["output"]):
        assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__sums", "add")
    assert json.loads(whole["arguments"]) == {"a": 1}


async def test_a_call_of_a_namespaces_function_is_gone_on_from_as_the_model_wrote_it(serve: Any) -> None:
    listener = Listener()
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    call = {"type": "function_call", "call_id": "c", "arguments": '{"a": 1}'}
    async with serve(listener.model) as api:
        for which in ({"namespace": "mcp__sums", "name": "add"}, {"name": "mcp__sums__add"}):
            asked = {"input": [{"role": "user", "content": "1?"}, {**call, **which}, output], "tools": [NAMESPACE]}
            assert (await api.post("/v1/responses", asked)).status == 200
    assert len(listener.prompts) == 1
    assert "mcp__sums__add" in listener.prompts[0]


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "namespace": "mcp__sums", "name": "add"},
        {"type": "function", "name": "mcp__sums__add"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "namespace": "mcp__sums", "name": "add"}]},
    ],
)
async def test_a_namespaces_function_may_be_chosen(serve: Any, choice: dict[str, Any]) -> None:
    async with serve() as api:
        asked = {"input": "x", "tools": [TOOL, NAMESPACE], "tool_choice": choice, "parallel_tool_calls": False}
        answer = await api.post("/v1/responses", {**asked, "max_output_tokens": 300, "seed": 1})
    assert answer.status == 200, answer.body
    (item,) = answer.json["output"]
    assert (item["namespace"], item["name"]) == ("mcp__sums", "add")


async def test_a_call_that_was_cut_may_be_gone_on_from_and_one_that_is_wrong_is_named(serve: Any) -> None:
    async with serve() as api:
        asked = {"input": "x", "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 43, "seed": 1}
        cut = (await api.post("/v1/responses", asked)).json
        (item,) = cut["output"]
        assert (item["type"], item["status"], arguments_told(item["arguments"])) == ("function_call", "incomplete", "{}")
        unsaid = {name: value for name, value in item.items() if name != "status"}
        elsewhere = {**item, "status": "completed"}
        echoes = ({"input": [one, {"role": "user", "content": "go on"}]} for one in (item, unsaid, elsewhere))
        for more in ({"previous_response_id": cut["id"], "input": "go on"}, *echoes):
            assert (await api.post("/v1/responses", {**more, "max_output_tokens": 4})).status == 200
        wrong = {**item, "arguments": "[1]"}
        answer = await api.post("/v1/responses", {"input": [{"role": "user", "content": "x"}, wrong]})
    assert (answer.status, answer.error["param"]) == (400, "input[1].arguments")


@pytest.mark.parametrize("text", ["null", "[]"])
async def test_an_earlier_call_that_a_client_has_written_without_arguments_has_none(serve: Any, text: str) -> None:
    called = {"type": "function_call", "call_id": "c", "name": "add", "arguments": text}
    told = [called, {"type": "function_call_output", "call_id": "c", "output": "ok"}, {"role": "user", "content": "so?"}]
    async with serve(ScriptedModel("so", template=TOOL_TEMPLATE)) as api:
        answer = await api.post("/v1/responses", {"input": told, "max_output_tokens": 4})
    assert answer.status == 200


@pytest.mark.parametrize("text", ["hi \\ud83d there", "caf\\ude00", "\\ud83d"])
def test_half_a_character_in_an_earlier_call_costs_it_nothing_else(text: str) -> None:
    assert json.loads(arguments_told(f'{{"path": "x", "text": "{text}"}}') or "") == {
        "path": "x",
        "text": re.sub(r"\\u....", "\ufffd", text),
    }


def test_of_one_that_was_cut_as_well_nothing_is_left() -> None:
    assert arguments_told('{"text": "\\ud83d", "a": ') == "{}"
    assert arguments_told('["\\ud83d"') is None


@pytest.mark.parametrize(("n", "statuses"), [(75, ["incomplete", "completed"]), (54, ["completed", "incomplete"])])
async def test_of_an_answer_that_was_cut_the_item_that_came_last_is_not_complete(serve: Any, n: int, statuses: list[str]) -> None:
    script = 'so <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call> and more and more and more'
    asked = {"input": "x", "tools": [TOOL], "max_output_tokens": n}
    async with serve(ScriptedModel(script, template=TOOL_TEMPLATE)) as api:
        whole = (await api.post("/v1/responses", asked)).json
        told = events(await api.post("/v1/responses", {**asked, "stream": True}))[-1]["response"]
    assert [(item["type"], item["status"]) for item in whole["output"]] == [*zip(["message", "function_call"], statuses, strict=True)]
    assert {item["type"]: item["status"] for item in told["output"]}["function_call"] == statuses[1]


async def test_a_message_between_agents_is_read_as_what_somebody_says(serve: Any) -> None:
    listener = Listener()
    parts = [{"type": "input_text", "text": "NEW_TASK"}, {"type": "encrypted_content", "encrypted_content": "Count."}]
    items = (
        {"type": "agent_message", "author": "lead", "recipient": "lead/helper", "content": parts},
        {"type": "agent_message", "role": "tool", "content": parts},
        {"role": "user", "content": "NEW_TASK\nCount."},
    )
    async with serve(listener.model) as api:
        for item in items:
            assert (await api.post("/v1/responses", {"input": [item]})).status == 200
    assert len(listener.prompts) == 1


async def test_of_an_image_that_a_tool_gave_the_model_is_told_and_one_of_the_users_is_refused(
    serve: Any,
) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,x"}
    call = {"type": "function_call", "call_id": "c", "name": "view_image", "arguments": "{}"}
    listener = Listener()
    async with serve(listener.model) as api:
        for output in ([image], "(an image, which cannot be seen here)"):
            given = {"type": "function_call_output", "call_id": "c", "output": output}
            assert (await api.post("/v1/responses", {"input": [call, given]})).status == 200
        refused = await api.post("/v1/responses", {"input": [{"role": "user", "content": [image]}]})
    assert len(listener.prompts) == 1
    assert (refused.status, refused.error["param"]) == (400, "input[0].content[0]")


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_that_is_not_kept_here_comes_back_from_clients_that_bring_what_is_encrypted_alone(serve: Any, stream: bool) -> None:
    template = "{% for m in messages %}<turn>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    template += "{{ m.content }}<end>{% endfor %}<turn>assistant\n<think>"
    asked = {"role": "user", "content": "one"}
    async with serve(ScriptedModel("<think>hm</think>It is 5.", template=template)) as api:
        first = await api.post("/v1/responses", {"input": [asked], "store": False, "stream": stream})
        thought, said = (events(first)[-1]["response"] if stream else first.json)["output"]
        kept = await api.post("/v1/responses", {"input": [asked]})
        wanted = await api.post("/v1/responses", {"input": [asked], "include": ["reasoning.encrypted_content"]})
        prompts = []
        for reasoning in (thought, {"type": "reasoning", "summary": [], "encrypted_content": thought["encrypted_content"]}):
            again = await api.post("/v1/responses", {"input": [asked, reasoning, said, asked], "store": False})
            prompts.append(again.json["usage"]["input_tokens"])
        others = await api.post("/v1/responses", {"input": [asked, {"type": "reasoning", "encrypted_content": "gAAAA"}, said, asked]})
    assert "encrypted_content" not in kept.json["output"][0]
    assert wanted.json["output"][0]["encrypted_content"] == thought["encrypted_content"]
    assert prompts[0] == prompts[1] > others.json["usage"]["input_tokens"], "and what another server encrypted is nothing"


async def test_only_the_tools_that_are_allowed_are_offered(serve: Any) -> None:
    other, hosted = {"type": "function", "name": "look_up"}, {"type": "web_search"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]}
    with_hosted = choice | {"tools": [*choice["tools"], hosted]}
    listener = Listener()
    async with serve(listener.model) as api:
        offers = [
            {"tools": [TOOL]},
            {"tools": [TOOL, other], "tool_choice": choice},
            {"tools": [TOOL, other, hosted], "tool_choice": with_hosted},
        ]
        for fields in offers:
            assert (await api.post("/v1/responses", {"input": "hello", **fields})).status == 200
    assert len(listener.prompts) == 1


def kept(store: ResponseStore, name: str, *, size: int = 10, now: float = 0.0) -> None:
    store.keep({"id": name, "text": "x" * size}, (), (), key="k", now=now)


def known(store: ResponseStore, *names: str, now: float = 0.0) -> list[str]:
    found = []
    for name in names:
        try:
            found.append(store.find(name, key="k", now=now).response["id"])
        except NotFound:
            continue
    return found


def test_the_oldest_responses_make_room_for_the_latest() -> None:
    store = ResponseStore(n_max=2, n_bytes_max=10_000, ttl_s=10.0)
    for name in "abc":
        kept(store, name)
    assert known(store, "a", "b", "c") == ["b", "c"]
    kept(store, "d", size=9_950)
    assert known(store, "b", "c", "d") == ["d"]
    assert store.n_bytes <= 10_000
    kept(store, "e", size=20_000)
    assert known(store, "d", "e") == ["d"]


@pytest.mark.parametrize("sizes", [[10] * 9, [2_000] * 9])
def test_a_key_that_asks_for_much_makes_room_of_its_own(sizes: list[int]) -> None:
    store = ResponseStore(n_max=4, n_bytes_max=8_000, ttl_s=10.0)
    for name in "ab":
        store.keep({"id": name}, (), (Item(content="x"),), key="quiet", now=0.0)
    for i, size in enumerate(sizes):
        store.keep({"id": f"loud {i}"}, (), (Item(content="x" * size),), key="loud", now=0.0)
    assert [store.find(name, key="quiet", now=0.0).key for name in "ab"] == ["quiet"] * 2
    assert store.find("loud 8", key="loud", now=0.0)
    store.keep({"id": "first"}, (), (Item(content="x" * 3_000),), key="third", now=0.0)
    assert store.find("first", key="third", now=0.0), "its key is the largest now, and has this one only"


@pytest.mark.parametrize("items", [lambda n: (Item(),) * n, lambda n: (Item(content=[Part(type="t")] * (n - 1)),)])
def test_items_and_their_parts_count_though_they_say_nothing(items: Callable[[int], tuple[Item, ...]]) -> None:
    store = ResponseStore(n_max=9, n_bytes_max=100 * N_BYTES_OBJECT, ttl_s=10.0)
    for name, n in (("many", 100), ("fewer", 80)):
        store.keep({"id": name}, (), items(n), key="k", now=0.0)
    assert known(store, "many", "fewer") == ["fewer"]


def test_a_response_is_forgotten_when_its_time_is_over() -> None:
    store = ResponseStore(n_max=9, n_bytes_max=10_000, ttl_s=10.0)
    kept(store, "a", now=0.0)
    kept(store, "b", now=5.0)
    assert known(store, "a", "b", now=9.0) == ["a", "b"]
    assert known(store, "a", "b", now=10.0) == ["b"]
    assert known(store, "a", "b", now=15.0) == []
    assert (len(store), store.n_bytes) == (0, 0)


# --- items ------------------------------------------------------------------------------------------------------------


async def test_items_are_what_the_template_sees(serve: Any) -> None:
    listener = Listener()
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
        {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "Yes.", "annotations": []}]},
        {"role": "user", "content": "three"},
    ]
    async with serve(listener.model) as api:
        assert (await api.post("/v1/responses", {"input": items})).status == 200
    assert listener.prompts == [
        "<bos><turn>system\nBe brief.<end><turn>user\none\ntwo<end><turn>assistant\nYes.<end><turn>user\nthree<end><turn>assistant\n"
    ]


async def test_a_conversation_that_began_at_openai_goes_on_without_what_its_servers_did(serve: Any) -> None:
    tool = {"type": "function", "name": "apply_patch", "parameters": {"type": "object"}}
    begun = [
        {"role": "user", "content": "Mend it."},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "tool_search_call", "call_id": "t", "execution": "client", "arguments": {"query": "x"}},
        {"type": "tool_search_output", "call_id": "t", "tools": [{"type": "function", "name": "f"}]},
        {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": [{"name": "f", "input_schema": {}}]},
        {"type": "program", "id": "p", "call_id": "p", "code": "1", "fingerprint": "f"},
        {"type": "program_output", "id": "q", "call_id": "p", "result": "1", "status": "completed"},
        {"type": "shell_call", "call_id": "h", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "h", "output": [{"stdout": "a", "outcome": {"type": "exit", "exit_code": 0}}]},
        {"type": "computer_call", "call_id": "k", "id": "k", "action": {"type": "screenshot"}, "pending_safety_checks": []},
        {"type": "computer_call_output", "call_id": "k", "output": {"type": "computer_screenshot", "image_url": "x"}},
        {"type": "apply_patch_call", "call_id": "l", "status": "completed", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "l", "status": "completed", "output": "done"},
    ]
    call = {"call_id": "c", "name": "apply_patch"}
    patch = 'begin\n"end"'
    as_custom = [
        {"type": "custom_tool_call", "status": "completed", **call, "input": patch},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
    ]
    as_function = [
        {"type": "function_call", **call, "arguments": json.dumps({"input": patch})},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
    ]
    listener = Listener()
    async with serve(listener.model) as api:
        for items in ([*begun, *as_custom], [begun[0], *as_function]):
            made = await api.post("/v1/responses", {"input": items, "tools": [tool], "max_output_tokens": 4})
            assert made.status == 200, made.json
            listed = (await api.get(f"/v1/responses/{made.json['id']}/input_items?order=asc")).json["data"]
            assert [item["type"] for item in listed] == ["message", "function_call", "function_call_output"]
        (prompt,) = listener.prompts  # of both
        assert '"input": "begin' in prompt
        assert "done" in prompt
        assert (await api.post("/v1/responses", {"input": "on", "previous_response_id": made.json["id"]})).status == 200


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "web_search_call"}]}, "input"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": {"a": 1}}]}, "input[0].output"),
        ({"input": [{"role": "user", "content": [{"image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": None}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text"}]}]}, "input[0].output[0].text"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "tools[1].name"),
        ({"tools": [{"type": "web_search"}, {"type": "function", "name": "bad name"}]}, "tools[1].name"),
        (
            {"tools": [TOOL, {"type": "namespace", "name": "n", "tools": [TOOL, {"type": "function", "name": "bad name"}]}]},
            "tools[1].tools[1].name",
        ),
        ({"tools": [{"type": "namespace", "tools": [TOOL]}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "mcp", "tools": [{"type": "function"}]}]}, "tools[0].tools[0].name"),
        ({"tools": [{"type": "namespace", "name": "mcp", "tools": [TOOL, TOOL]}]}, "tools[0].tools[1].name"),
        ({"input": [{"type": "agent_message"}]}, "input[0].content"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "web_search"}]}}, "tool_choice.tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]}}, "tool_choice.tools"),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"id": "msg_x"}]}, "input[0].id"),
        ({"input": [{"id": "msg_x", "content": "said otherwise"}]}, "input[0].role"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": "conv_x"}, "conversation"),
        ({"n": 2}, "n"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"text": {"format": {"type": "poem"}}}, "text.format.type"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
    ],
)
async def test_what_is_wrong_is_named_and_nothing_is_queued(serve: Any, fields: dict[str, Any], place: str) -> None:
    async with serve() as api:
        answer = await api.post("/v1/responses", {"input": "x", **fields})
        assert api.scheduler.totals.n_submitted == 0
    assert (answer.status, answer.error["type"], answer.error["param"]) == (400, "invalid_request_error", place)


async def test_chats_names_that_ask_for_nothing_are_no_reason_to_refuse(serve: Any) -> None:
    async with serve() as api:
        for form in (None, {"type": "text"}):
            asked = {"input": "x", "max_output_tokens": 2, "response_format": form, "reasoning_effort": None}
            assert (await api.post("/v1/responses", asked)).status == 200


@pytest.mark.parametrize("nothing", [{}, {"output": None}, {"output": []}])
@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
async def test_what_came_of_a_tool_that_gave_nothing_is_empty(serve: Any, kind: str, nothing: dict[str, Any]) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    listener = Listener()
    async with serve(listener.model) as api:
        for output in ({"output": ""}, nothing):
            made = await api.post("/v1/responses", {"input": [call, {"type": kind, "call_id": "c", **output}]})
            assert made.status == 200, made.body
        listed = (await api.get(f"/v1/responses/{made.json['id']}/input_items")).json["data"]
    assert len(listener.prompts) == 1, "of both"
    assert listed[0]["output"] in ("", [])


async def test_a_stream_that_fails_ends_with_the_response_that_failed(serve: Any) -> None:
    async with serve(failing(4)) as api:
        told = events(await api.post("/v1/responses", {"input": "hello", "stream": True}))
    assert told[-1]["type"] == "response.failed"
    response = told[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "invalid_prompt"), "it would fail again"
    assert "fan" not in json.dumps(response)


def test_what_may_have_ended_the_model_is_told_as_a_prompt_that_is_not_to_be_sent_again() -> None:
    """Codex repeats what is told as a server's error, six times in all."""
    head = ResponseHead({"id": "a"}, {}, seals=False)
    codes = [head.failed([], {"code": code, "message": "no"})["error"]["code"] for code in ("step_failed", "internal_error", None)]
    assert codes == ["invalid_prompt", "server_error", "server_error"]


async def test_a_silent_stream_says_by_events_that_it_is_still_there(serve: Any) -> None:
    """Codex gives up after five minutes without one, whatever comments come."""
    slow = FakeModel(step_s=lambda batch: 0.05)
    async with serve(slow, sse_ping_s=0.005) as api:
        told = events(await api.post("/v1/responses", {"input": "hello", "max_output_tokens": 4, "stream": True}))
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    assert len([event for event in told if event["type"] == "response.in_progress"]) > 1
    assert told[-1]["type"] == "response.incomplete"


def test_items_are_known_to_their_key_as_long_as_a_response_has_them() -> None:
    store = ResponseStore(n_max=2, n_bytes_max=10_000, ttl_s=10.0)
    first, second = Item(id="i1", type="message"), Item(id="i2", type="message")
    store.keep({"id": "a"}, (), (first,), key="k", now=0.0)
    store.keep({"id": "b"}, (), (first, second), key="k", now=5.0)
    store.keep({"id": "c"}, (), (Item(id="i1", role="user"),), key="other", now=6.0)
    assert store.item("i1", key="k", now=6.0) is first
    assert store.item("i2", key="other", now=6.0) is None
    store.delete("b", key="k", now=6.0)
    assert store.item("i1", key="k", now=6.0) is None, "its first response has gone to make room"
    assert store.item("i2", key="k", now=6.0) is None
    store.delete("c", key="other", now=6.0)
    assert store.item("i1", key="other", now=6.0) is None
    store.keep({"id": "d"}, (), (second,), key="k", now=7.0)
    store.keep({"id": "e"}, (), (second,), key="k", now=8.0)
    store.delete("e", key="k", now=8.0)
    assert store.item("i2", key="k", now=8.0) is second
    assert store.item("i2", key="k", now=17.0) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"user": "x" * 513}, "user"), ({"text": {"format": {"type": "json_schema", "name": "x" * 129, "schema": {}}}}, "text.format.name")],
)
async def test_what_is_told_again_with_every_event_is_not_long(serve: Any, fields: dict[str, Any], param: str) -> None:
    async with serve(ScriptedModel("Good day.")) as api:
        answer = await api.post("/v1/responses", {"input": "hello", **fields})
    assert (answer.status, answer.error["param"]) == (400, param)
