"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cllm.testing.fake import FakeModel
from cllm.testing.scripted import TOOL_TEMPLATE, ScriptedModel
from tests.api.conftest import failing

CHAT_CALL = {"id": "t1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}


def body(content: Any = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "max_tokens": 8, "messages": [{"role": "user", "content": content}], **fields}


def events(answer: Any) -> list[tuple[str, Any]]:
    """A stream's events as (name, data)."""
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.body
    told = []
    for event in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        told.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == data["type"] for name, data in told)
    return told


async def prompt_of(api: Any, **fields: Any) -> str:
    """What the template made of a body, read from the tokens that it was counted by."""
    seen: list[Any] = []
    original = api.running.engine.prompt_tokens

    async def spy(texts: list[str], **options: Any) -> Any:
        seen.extend(texts)
        return await original(texts, **options)

    api.running.engine.prompt_tokens = spy
    answer = await api.post("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x"}], **fields})
    assert answer.status == 200, answer.body
    return str(seen[0])


async def test_a_message_has_the_shape_that_clients_expect(serve: Any) -> None:
    async with serve(ScriptedModel("Good day.")) as api:
        answer = await api.post("/v1/messages", body(max_tokens=50))
    assert answer.status == 200
    message = answer.json
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "fake")
    assert message["content"] == [{"type": "text", "text": "Good day."}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    usage = message["usage"]
    assert usage["output_tokens"] == 10  # the one that ended it, too
    assert usage["input_tokens"] > 0
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (0, 0)


async def test_a_stream_tells_the_same_message_block_by_block(serve: Any) -> None:
    async with serve(ScriptedModel("Good day.")) as api:
        told = events(await api.post("/v1/messages", body(max_tokens=50, stream=True)))
    names = [name for name, _ in told]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert set(names[3:-3]) == {"content_block_delta"}
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join([data["delta"]["text"] for name, data in told if name == "content_block_delta"]) == "Good day."
    assert told[0][1]["message"]["content"] == []
    assert told[-2][1]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert told[-2][1]["usage"]["output_tokens"] == 10


@pytest.mark.parametrize(
    ("fields", "ending"),
    [
        ({"max_tokens": 4}, ("max_tokens", None)),
        ({"stop_sequences": ["d d", "zzz"]}, ("stop_sequence", "d d")),
        ({}, ("end_turn", None)),
    ],
)
async def test_why_it_ended_is_told_in_anthropics_words(serve: Any, fields: dict[str, Any], ending: tuple[str, Any]) -> None:
    async with serve(ScriptedModel("Good day.")) as api:
        whole = (await api.post("/v1/messages", body(**{"max_tokens": 50, **fields}))).json
        told = events(await api.post("/v1/messages", body(stream=True, **{"max_tokens": 50, **fields})))
    assert (whole["stop_reason"], whole["stop_sequence"]) == ending
    assert tuple(told[-2][1]["delta"].values()) == ending
    assert "".join([b["text"] for b in whole["content"]]) == "".join(
        [data["delta"]["text"] for name, data in told if name == "content_block_delta"]
    )


async def test_tokens_are_counted_as_the_message_is_billed(serve: Any) -> None:
    async with serve() as api:
        sent = {"system": "Be brief.", "messages": [{"role": "user", "content": "hello"}]}
        counted = await api.post("/v1/messages/count_tokens", sent)
        message = await api.post("/v1/messages", {**sent, "max_tokens": 1})
        usage = message.json["usage"]
    assert counted.json == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


async def test_system_and_blocks_are_what_the_template_sees(serve: Any) -> None:
    async with serve() as api:
        prompt = await prompt_of(
            api,
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "And kind."}],
            messages=[{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
        )
    assert prompt == "<turn>system\nBe brief.\nAnd kind.<end><turn>user\none\ntwo<end><turn>assistant\n"


async def test_a_line_that_is_new_in_each_request_keeps_nothing_from_being_cached(serve: Any) -> None:
    said = [{"role": "user", "content": "one cch=abcde; two"}]
    async with serve() as api:
        prompts = [
            await prompt_of(api, system=system, messages=said)
            for system in (
                "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=a5145;\nBe brief.",
                [
                    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.177.2fe; cc_entrypoint=cli; cch=b0b77;"},
                    {"type": "text", "text": "Be brief."},
                ],
                "Be brief.",
            )
        ]
        other = await prompt_of(api, system="Say cch=a5145; please.", messages=said)
    assert len(set(prompts)) == 1
    assert "cch=abcde; two" in prompts[0]
    assert "cch=a5145;" in other


async def test_tools_that_anthropics_servers_run_are_left_out_beside_others(serve: Any) -> None:
    own = {"name": "f", "input_schema": {"type": "object", "properties": {}}}
    advisor = {"type": "advisor_20260301", "name": "advisor", "model": "another", "defer_loading": True}
    async with serve() as api:
        prompts = [await prompt_of(api, tools=tools) for tools in ([own], [own, advisor], [advisor, own], [own, {"type": "mcp_toolset"}])]
        twice = await api.post("/v1/messages", body(tools=[advisor, own, own]))
        bash = await api.post("/v1/messages", body(tools=[own, {"type": "bash_20250124", "name": "bash"}]))
    assert len(set(prompts)) == 1
    assert "tools[2].name" in twice.error["message"], "by its place among all that were sent"
    assert "tools[1].type" in bash.error["message"], "which clients run themselves: nobody would learn that the model has none"


async def test_what_anthropics_servers_did_is_no_part_of_a_conversation_that_goes_on_here(serve: Any) -> None:
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]
    theirs = [
        {"type": "server_tool_use", "id": "a", "name": "advisor", "input": {}},
        {"type": "advisor_tool_result", "tool_use_id": "a", "content": {"type": "advisor_result", "text": "so"}},
        {"type": "web_search_tool_result", "tool_use_id": "b", "content": []},
        {"type": "fallback", "from": {}, "to": {}},
        {"type": "compaction", "content": None},
        {"type": "compaction", "content": "two"},
    ]
    async with serve() as api:
        plain = await prompt_of(api, messages=said)
        assert await prompt_of(api, messages=[said[0], {"role": "assistant", "content": theirs}, said[2]]) == plain


async def test_tools_that_a_compaction_brings_along_are_offered_as_those_of_a_turn_are(serve: Any) -> None:
    said = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}, {"role": "user", "content": "three"}]
    look = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": look}}
    changes = [added, {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "other"}}]
    compaction = {"type": "compaction", "content": "two", "tool_changes": changes}
    async with serve() as api:
        plain = await prompt_of(api, messages=said, tools=[look])
        assert await prompt_of(api, messages=[said[0], {"role": "assistant", "content": [compaction]}, said[2]]) == plain


async def test_thinking_between_tools_is_taken_as_a_wish_as_adaptive_is(serve: Any) -> None:
    async with serve() as api:
        wishes = [await prompt_of(api, thinking={"type": kind}) for kind in ("adaptive", "between_tools")]
    assert wishes[0] == wishes[1]


async def test_of_an_image_that_a_tool_gave_the_model_is_told_and_one_of_the_users_is_refused_in_words_they_know(
    serve: Any,
) -> None:
    image, paper = {"type": "image", "source": {}}, {"type": "document", "source": {}}
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "read", "input": {}}]}
    given = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [image, paper]}]}
    async with serve() as api:
        prompt = await prompt_of(api, messages=[{"role": "user", "content": "one"}, called, given])
        refused = [await api.post("/v1/messages", body(messages=[{"role": "user", "content": [one]}])) for one in (image, paper)]
    assert "(an image, which cannot be seen here)\n(a document, which cannot be read here)" in prompt
    assert [answer.status for answer in refused] == [400, 400]
    for answer, words in zip(refused, ("Could not process image", "Could not process PDF"), strict=True):
        assert words in answer.error["message"]


async def test_documents_of_plain_text_and_search_results_are_read_wherever_they_stand(serve: Any) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "the sky is blue"}
    paper = {"type": "document", "title": "Notes", "context": "of a walk", "source": source}
    found = {"type": "search_result", "source": "https://a.test", "title": "Seas", "content": [{"type": "text", "text": "they are salt"}]}
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "read", "input": {}}]}
    given = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [paper, found]}]}
    async with serve() as api:
        asked = await prompt_of(api, messages=[{"role": "user", "content": [paper, found, {"type": "text", "text": "and?"}]}])
        told = await prompt_of(api, messages=[{"role": "user", "content": "one"}, called, given])
        misplaced = [await api.post("/v1/messages", body(messages=[{"role": "assistant", "content": [one]}])) for one in (paper, found)]
    said = "Notes\nof a walk\nthe sky is blue\nSeas\nhttps://a.test\nthey are salt"
    assert f"{said}\nand?" in asked
    assert said in told
    assert [(answer.status, "cannot hold this" in answer.error["message"]) for answer in misplaced] == [(400, True)] * 2


async def test_a_document_of_text_blocks_is_text_and_one_with_an_image_in_it_is_none(serve: Any) -> None:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": "the sky"}, {"type": "text", "text": "is blue"}]
    paper, page = ({"type": "document", "source": {"type": "content", "content": content}} for content in (blocks, "is blue"))
    seen = {"type": "document", "source": {"type": "content", "content": [*blocks, {"type": "image", "source": {}}]}}
    async with serve() as api:
        asked = await prompt_of(api, messages=[{"role": "user", "content": [paper, page]}])
        refused = await api.post("/v1/messages", body(messages=[{"role": "user", "content": [seen]}]))
    assert "the sky\nis blue\nis blue" in asked
    assert (refused.status, refused.error["message"].count("Could not process PDF")) == (400, 1)


@pytest.mark.parametrize(
    ("given", "told"),
    [("no such city", "Error: no such city"), (None, "Error"), ("KeyError: 'a'", "KeyError: 'a'")],
    ids=["", "none", "said"],
)
async def test_that_a_tool_failed_is_told_where_its_result_does_not_say_so(serve: Any, given: str | None, told: str) -> None:
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "read", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": given, "is_error": True}
    async with serve() as api:
        prompt = await prompt_of(api, messages=[{"role": "user", "content": "one"}, called, {"role": "user", "content": [result]}])
        good = {**result, "is_error": False}
        plain = await prompt_of(api, messages=[{"role": "user", "content": "one"}, called, {"role": "user", "content": [good]}])
    assert f"<tool_response>\n{told}\n</tool_response>" in prompt
    assert f"<tool_response>\n{given or ''}\n</tool_response>" in plain


async def test_an_input_that_a_client_could_not_read_and_sends_as_text_is_read_as_far_as_it_goes(serve: Any) -> None:
    async with serve() as api:
        for text, status in (('{"city": "Ulm"}', 200), ('{"city": "Ul', 200), ("[1]", 400)):
            called = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "read", "input": text}]}
            result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "ok"}]}
            answer = await api.post("/v1/messages", body(messages=[{"role": "user", "content": "one"}, called, result]))
            assert answer.status == status
    assert "messages[1].content[0].input" in answer.error["message"]


@pytest.mark.parametrize("given", [[], None, {}])
async def test_an_input_that_is_none_or_an_empty_list_has_nothing_in_it(serve: Any, given: Any) -> None:
    asked = {"role": "user", "content": "one"}
    called, wrong = (
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "read", "input": value}]} for value in (given, [1])
    )
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "ok"}]}
    async with serve() as api:
        prompt = await prompt_of(api, messages=[asked, called, result])
        refused = await api.post("/v1/messages", body(messages=[asked, wrong, result]))
    assert '{"name": "read", "arguments": {}}' in prompt
    assert refused.status == 400
    assert "messages[1].content[0].input" in refused.error["message"]


async def test_all_that_was_thought_in_a_turn_is_told_thought_by_thought(serve: Any) -> None:
    thoughts = [{"type": "thinking", "thinking": text} for text in ("first", "second", "", "third")]
    call = {"type": "tool_use", "id": "t1", "name": "look_up", "input": {}}
    said = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [*thoughts[:3], {"type": "text", "text": "I look."}]},
        {"role": "assistant", "content": "Now."},
        {"role": "assistant", "content": [thoughts[3], call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "ok"}]},
    ]
    async with serve(ScriptedModel("", template=TOOL_TEMPLATE)) as api:
        assert "<think>first\n\nsecond\n\nthird</think>I look.\nNow.<tool_call>" in await prompt_of(api, messages=said)


async def test_a_top_p_below_0_is_none_as_some_clients_mean_it(serve: Any) -> None:
    async with serve() as api:
        plain, unset = [
            (await api.post("/v1/messages", body(seed=3, temperature=1.0, **fields))).json["content"]
            for fields in ({}, {"top_p": -1, "top_k": -1})
        ]
        refused = await api.post("/v1/messages", body(top_p=1.5))
    assert plain == unset
    assert refused.status == 400


async def test_reasoning_is_signed_since_clients_drop_it_otherwise(serve: Any) -> None:
    template = "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}<end>{% endfor %}<turn>assistant\n<think>"
    async with serve(ScriptedModel("<think>hm</think>It is 5.", template=template)) as api:
        whole = (await api.post("/v1/messages", body(max_tokens=100))).json["content"][0]
        told = events(await api.post("/v1/messages", body(stream=True, max_tokens=100)))
        back = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [whole]}, {"role": "user", "content": "y"}]
        assert (await api.post("/v1/messages", body(messages=back))).status == 200
    assert (whole["type"], whole["thinking"], bool(whole["signature"])) == ("thinking", "hm", True)
    kinds = [(event["delta"]["type"] if name == "content_block_delta" else name) for name, event in told]
    place = kinds.index("signature_delta")
    assert kinds[place - 1 : place + 2] == ["thinking_delta", "signature_delta", "content_block_stop"]
    assert (told[place][1]["index"], told[place][1]["delta"]["signature"]) == (0, whole["signature"])
    assert kinds.count("signature_delta") == 1


async def test_neighbours_of_one_role_are_one_turn(serve: Any) -> None:
    said = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    async with serve() as api:
        assert await prompt_of(api, messages=said) == "<turn>user\none\ntwo<end><turn>assistant\n"


async def test_tools_that_a_search_has_found_are_told_by_name(serve: Any) -> None:
    call = {"type": "tool_use", "id": "t", "name": "ToolSearch", "input": {"query": "web"}}
    found = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "WebFetch"}]}
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [call]}, {"role": "user", "content": [found]}]
    async with serve() as api:
        assert "The tool WebFetch may be called." in await prompt_of(api, messages=said)


async def test_tools_that_come_with_a_turn_are_offered_and_references_to_others_change_nothing(serve: Any) -> None:
    tool = {"name": "look_up", "input_schema": {"type": "object", "properties": {}}}
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool}}
    reference = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "look_up"}}
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look_up"}}
    said = {"role": "user", "content": "x"}
    async with serve() as api:
        plain = await prompt_of(api, messages=[said], tools=[tool])
        assert "look_up" in plain
        for blocks in ([added], [added, added], [reference], [removal]):
            turns = [said, {"role": "system", "content": blocks}]
            tools = [] if added in blocks else [tool]
            assert await prompt_of(api, messages=turns, tools=tools) == plain
        answer = await api.post("/v1/messages", body(messages=[{"role": "system", "content": [removal]}]))
    assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


async def test_a_last_turn_of_the_assistant_is_gone_on_from(serve: Any) -> None:
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "My answer is"}]
    async with serve() as api:
        assert await prompt_of(api, messages=said) == "<turn>user\nx<end><turn>assistant\nMy answer is"


async def test_one_behind_which_something_is_told_of_tools_is_over(serve: Any) -> None:
    added = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "look_up"}}
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "done"}, {"role": "user", "content": [added]}]
    async with serve() as api:
        assert (await prompt_of(api, messages=said)).endswith("done<end><turn>assistant\n")


async def test_one_that_called_something_is_over(serve: Any) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look_up", "input": {}}
    said = [{"role": "user", "content": "x"}, {"role": "assistant", "content": [{"type": "text", "text": "Let me look."}, call]}]
    async with serve() as api:
        prompt = await prompt_of(api, messages=said)
        chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so", "tool_calls": [CHAT_CALL]}]
        refused = await api.chat(messages=chat, continue_final_message=True, add_generation_prompt=False)
    assert prompt.endswith("<end><turn>assistant\n")
    assert (refused.status, refused.error["param"]) == (400, "messages")
    assert "the last message calls tools" in refused.error["message"]


async def test_a_key_opens_it_as_x_api_key(serve: Any) -> None:
    async with serve(api_key=("k",)) as api:
        assert (await api.post("/v1/messages", body(), x_api_key="k", anthropic_version="2023-06-01")).status == 200
        refused = await api.post("/v1/messages", body())
    assert refused.status == 401
    assert (refused.json["type"], refused.error["type"]) == ("error", "authentication_error")
    assert refused.json["request_id"] == refused.headers["x-request-id"] == refused.headers["request-id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_with_no_token_the_prompt_is_computed_for_who_comes_after_it(serve: Any, stream: bool) -> None:
    long = "once upon a time there was a sea " * 8
    async with serve() as api:
        if stream:
            told = events(await api.post("/v1/messages", body(long, max_tokens=0, stream=True)))
            end = dict(told)["message_delta"]
            reason, usage = end["delta"]["stop_reason"], end["usage"]
        else:
            warmed = (await api.post("/v1/messages", body(long, max_tokens=0))).json
            assert warmed["content"] == []
            reason, usage = warmed["stop_reason"], warmed["usage"]
        assert (reason, usage["output_tokens"]) == ("max_tokens", 0)
        after = (await api.post("/v1/messages", body(long))).json["usage"]
        told = dict(events(await api.post("/v1/messages", body(long, stream=True))))["message_delta"]["usage"]
    assert after["cache_read_input_tokens"] >= usage["input_tokens"] - 1
    for again in (after, told):
        assert again["cache_read_input_tokens"] + again["input_tokens"] == usage["input_tokens"], "what was found is not counted twice"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_the_context_cuts_says_so(serve: Any, stream: bool) -> None:
    async def reason(api: Any, max_tokens: int) -> str:
        answer = await api.post("/v1/messages", body(max_tokens=max_tokens, stream=stream, ignore_eos=True))
        if not stream:
            return str(answer.json["stop_reason"])
        return str(dict(events(answer))["message_delta"]["delta"]["stop_reason"])

    async with serve(FakeModel(n_ctx_train=512)) as api:
        n_prompt = (await api.post("/v1/messages", body())).json["usage"]["input_tokens"]
        assert await reason(api, 1_000_000) == "model_context_window_exceeded"
        assert await reason(api, 512 - n_prompt) == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temperature": "warm"}, "temperature"),
        ({"n": 2}, "n"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
        ({"messages": [{"role": "user", "content": [{"type": "container_upload", "file_id": "f"}]}]}, "messages[0].content[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ],
)
async def test_what_is_wrong_is_named_and_nothing_is_queued(serve: Any, fields: dict[str, Any], place: str) -> None:
    sent = {name: value for name, value in body(**fields).items() if value is not None}
    async with serve() as api:
        answer = await api.post("/v1/messages", sent)
        assert api.scheduler.totals.n_submitted == 0
    assert (answer.status, answer.json["type"], answer.error["type"]) == (400, "error", "invalid_request_error")
    assert place in answer.error["message"]


async def test_a_stream_that_fails_says_so_in_an_error_event(serve: Any) -> None:
    async with serve(failing(4)) as api:
        told = events(await api.post("/v1/messages", body(max_tokens=100, stream=True)))
    assert told[0][0] == "message_start"
    assert told[-1][0] == "error"
    assert told[-1][1]["error"]["type"] == "api_error"
    assert "message_stop" not in [name for name, _ in told]
