"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.testing.fake import FakeModel

BYTES_OF_E_ACUTE = {"195": 100, "169": 99}  # a byte that opens a character, and one that closes it: unfinished ones come too


async def test_an_answer_has_the_shape_that_clients_expect(serve: Any) -> None:
    async with serve() as api:
        answer = await api.chat(max_tokens=5)
    assert answer.status == 200
    body = answer.json
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "fake"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert len(choice["message"]["content"]) == 5
    assert (choice["index"], choice["logprobs"], choice["finish_reason"], choice["stop_reason"]) == (0, None, "length", None)
    usage = body["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    timings = body["timings"]
    assert (timings["prompt_n"], timings["cache_n"], timings["predicted_n"]) == (usage["prompt_tokens"], 0, 5)
    assert timings["predicted_per_second"] == pytest.approx(5000 / timings["predicted_ms"], rel=0.01)
    assert timings["prompt_per_second"] == pytest.approx(1000 * timings["prompt_n"] / timings["prompt_ms"], rel=0.01)
    assert answer.headers["x-cllm-cached-tokens"] == "0"
    assert float(answer.headers["x-cllm-queue-ms"]) == timings["queue_ms"]


async def test_the_path_without_v1_is_the_same(serve: Any) -> None:
    async with serve() as api:
        answer = await api.post("/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
        bodies = [(await api.post(f"{v1}/completions", {"prompt": "x", "max_tokens": 3, "seed": 1})).json for v1 in ("/v1", "")]
        models = [(await api.get(f"{v1}/models")).json["data"] for v1 in ("/v1", "")]
        vectors = [(await api.post(f"{v1}/embeddings", {"input": "x"})) for v1 in ("/v1", "")]
    assert answer.status == 200
    assert bodies[0]["choices"] == bodies[1]["choices"]
    assert [one["id"] for one in models[0]] == [one["id"] for one in models[1]] == ["fake"]
    assert vectors[0].error == vectors[1].error, "it has none, whatever the path"


async def test_a_stream_begins_with_the_role_and_ends_with_the_finish_and_done(serve: Any) -> None:
    async with serve() as api:
        answer = await api.chat(stream=True, max_tokens=5)
    chunks = answer.chunks
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(chunk["choices"][0]["delta"]) == {"content"} for chunk in chunks[1:-1])
    last = chunks[-1]["choices"][0]
    assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({}, "length", None)
    assert chunks[-1]["timings"]["predicted_n"] == 5
    assert answer.lines[-1] == "[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["object"], chunk["model"]) for chunk in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    assert "usage" not in chunks[0]


async def test_a_stream_with_usage_has_it_in_a_chunk_of_its_own_before_done(serve: Any) -> None:
    async with serve() as api:
        answer = await api.chat(stream=True, max_tokens=5, stream_options={"include_usage": True})
    *others, last = answer.chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert last["timings"]["predicted_n"] == 5
    assert all(chunk["usage"] is None for chunk in others)
    assert answer.lines[-1] == "[DONE]"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20},
        {"logit_bias": BYTES_OF_E_ACUTE},
        {"stop": ["e", "ab"]},
        {"n": 3},
        {"logprobs": True, "top_logprobs": 2},
    ],
)
async def test_the_concatenated_stream_equals_the_answer(serve: Any, fields: dict[str, Any]) -> None:
    async with serve() as api:
        for seed in range(5):
            whole = await api.chat(seed=seed, max_tokens=40, **fields)
            stream = await api.chat(seed=seed, max_tokens=40, stream=True, **fields)
            for index in range(fields.get("n", 1)):
                assert stream.text(index) == whole.text(index)
                assert stream.finish(index) == whole.finish(index)


@pytest.mark.parametrize("max_tokens", range(1, 13))
async def test_no_chunk_splits_a_character(serve: Any, max_tokens: int) -> None:
    async with serve() as api:
        fields = {"logit_bias": {"195": 100, "169": 100}, "seed": max_tokens, "max_tokens": max_tokens}
        stream = await api.chat(stream=True, **fields)  # .decode() is strict, and json reads every chunk by itself
        whole = await api.chat(**fields)
    contents = [c["choices"][0]["delta"].get("content", "") for c in stream.chunks]
    assert set("".join(contents)) <= {"é", "\ufffd"}
    assert "".join(contents) == whole.text()


async def test_exactly_max_tokens_tokens_come_under_each_of_its_names(serve: Any) -> None:
    async with serve() as api:
        for name in ("max_tokens", "max_completion_tokens", "n_predict"):
            body = {"messages": [{"role": "user", "content": "x"}], name: 7}
            answer = await api.post("/v1/chat/completions", body)
            assert answer.json["usage"]["completion_tokens"] == 7
            assert answer.finish() == ("length", None)


async def test_without_max_tokens_an_answer_goes_on_to_the_end_of_the_context(serve: Any) -> None:
    async with serve(FakeModel(n_ctx_train=64)) as api:
        answer = await api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    assert answer.json["usage"]["total_tokens"] == 64
    assert answer.finish() == ("length", None)


async def test_max_tokens_beyond_the_context_is_clipped(serve: Any) -> None:
    async with serve(FakeModel(n_ctx_train=64)) as api:
        answer = await api.chat(max_tokens=1_000_000)
    assert answer.json["usage"]["total_tokens"] == 64
    assert answer.finish() == ("length", None)


async def test_an_end_token_finishes_with_stop_and_is_not_in_text_or_logprobs(serve: Any) -> None:
    async with serve(FakeModel(n_tokens_to_end=5)) as api:
        answer = await api.chat(max_tokens=500, seed=1, logprobs=True)
        stream = await api.chat(max_tokens=500, seed=1, logprobs=True, stream=True)
    assert answer.finish() == stream.finish() == ("stop", None)
    tokens = [one["token"] for one in answer.json["choices"][0]["logprobs"]["content"]]
    assert "".join(tokens) == answer.text() == stream.text()


async def test_a_stop_string_ends_the_text_before_it_and_is_named(serve: Any) -> None:
    async with serve() as api:
        free = (await api.chat(seed=3, max_tokens=40)).text()
        stop = free[20:23]
        for stream in (False, True):
            answer = await api.chat(seed=3, max_tokens=40, stop=[stop, "never this"], stream=stream)
            assert answer.text() == free[: free.index(stop)]
            assert answer.finish() == ("stop", stop)


async def test_a_stop_token_is_named(serve: Any) -> None:
    async with serve() as api:
        free = (await api.chat(seed=3, max_tokens=40)).text()
        token = ord(free[10])
        answer = await api.chat(seed=3, max_tokens=40, stop_token_ids=[token], logprobs=True)
    assert answer.finish() == ("stop", token)
    assert "".join(one["token"] for one in answer.json["choices"][0]["logprobs"]["content"]) == answer.text()
    assert answer.text() == free[: free.index(free[10])]


async def test_n_choices_differ_and_the_first_is_what_one_choice_gives(serve: Any) -> None:
    async with serve() as api:
        one = await api.chat(seed=9, max_tokens=20)
        three = await api.chat(seed=9, max_tokens=20, n=3)
        stream = await api.chat(seed=9, max_tokens=20, n=3, stream=True)
    texts = [three.text(i) for i in range(3)]
    assert texts[0] == one.text()
    assert len(set(texts)) == 3
    assert [stream.text(i) for i in range(3)] == texts
    assert three.json["usage"]["prompt_tokens"] == one.json["usage"]["prompt_tokens"]
    assert three.json["usage"]["completion_tokens"] == 60
    roles = [c["choices"][0]["index"] for c in stream.chunks if "role" in c["choices"][0].get("delta", {})]
    assert roles == [0, 1, 2]


async def test_a_seed_gives_the_same_text_and_no_seed_gives_another(serve: Any) -> None:
    async with serve() as api:
        seeded = {(await api.chat(seed=11, max_tokens=20)).text() for _ in range(3)}
        free = {(await api.chat(max_tokens=20)).text() for _ in range(3)}
    assert len(seeded) == 1
    assert len(free) == 3


async def test_temperature_0_is_greedy(serve: Any) -> None:
    async with serve() as api:
        assert len({(await api.chat(temperature=0, max_tokens=20)).text() for _ in range(3)}) == 1


async def test_a_logit_bias_can_force_a_token(serve: Any) -> None:
    async with serve() as api:
        answer = await api.chat(logit_bias={str(ord("z")): 100}, max_tokens=6)
        listed = await api.chat(logit_bias=[[ord("z"), 100]], max_tokens=6)
    assert answer.text() == listed.text() == "zzzzzz"


async def test_logprobs_name_each_token_with_its_bytes_and_the_likeliest_beside_it(serve: Any) -> None:
    async with serve() as api:
        answer = await api.chat(logprobs=True, top_logprobs=3, max_tokens=4, temperature=0)
        stream = await api.chat(logprobs=True, top_logprobs=3, max_tokens=4, temperature=0, stream=True)
        plain = await api.chat(logprobs=True, max_tokens=4, temperature=0)
    content = answer.json["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == answer.text()
    for one in content:
        assert bytes(one["bytes"]).decode() == one["token"]
        assert one["logprob"] <= 0
        assert len(one["top_logprobs"]) == 3
        assert one["top_logprobs"][0]["token"] == one["token"]  # greedy
        assert one["top_logprobs"][0]["logprob"] == one["logprob"]
    streamed = [one for c in stream.chunks for choice in c["choices"] for one in (choice["logprobs"] or {"content": []})["content"]]
    assert streamed == content
    assert all(one["top_logprobs"] == [] for one in plain.json["choices"][0]["logprobs"]["content"])


async def test_a_token_that_is_a_part_of_a_character_is_shown_as_such_with_its_byte(serve: Any) -> None:
    async with serve() as api:
        answer = await api.chat(logprobs=True, max_tokens=2, temperature=0, logit_bias={"195": 100})
        stream = await api.chat(logprobs=True, max_tokens=2, temperature=0, logit_bias={"195": 100}, stream=True)
    assert answer.json["choices"][0]["logprobs"]["content"][0]["token"] == "\ufffd"
    assert answer.json["choices"][0]["logprobs"]["content"][0]["bytes"] == [195]
    assert stream.text() == answer.text()


# --- messages ---------------------------------------------------------------------------------------------------------


async def prompt_of(api: Any, messages: list[Any], **fields: Any) -> str:
    return str((await api.post("/apply-template", {"messages": messages, **fields})).json["prompt"])


async def test_text_parts_are_joined_and_developer_means_system(serve: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    async with serve() as api:
        assert await prompt_of(api, [{"role": "user", "content": parts}]) == "<turn>user\na\nb<end><turn>assistant\n"
        assert (await prompt_of(api, [{"role": "developer", "content": "d"}])).startswith("<turn>system\nd<end>")


async def test_an_answer_can_be_continued(serve: Any) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "so far"}]
    async with serve() as api:
        assert (await prompt_of(api, messages, continue_final_message=True)).endswith("<turn>assistant\nso far")
        assert (await prompt_of(api, messages, add_generation_prompt=False)).endswith("so far<end>")
        answer = await api.post("/v1/chat/completions", {"messages": messages, "continue_final_message": True, "max_tokens": 1})
        assert answer.status == 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (None, "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content[0].type"),
    ],
)
async def test_a_bad_message_is_400_and_named(serve: Any, messages: Any, param: str) -> None:
    async with serve() as api:
        answer = await api.post("/v1/chat/completions", {"messages": messages})
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == param


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"tools": [{"type": "function"}]}, 400, "tools[0].function"),
        ({"functions": [{}]}, 400, "functions"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, 400, "response_format.json_schema.schema"),
        ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
        ({"response_format": "text"}, 400, "response_format"),
        ({"structured_outputs": {}}, 400, "structured_outputs"),
        ({"grammar": "root"}, 400, "grammar"),
        ({"json_schema": 5}, 400, "json_schema"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"logprobs": 3}, 400, "logprobs"),
        ({"stream": "yes"}, 400, "stream"),
        ({"chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "{{ x }}"}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": []}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": True}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, 400, "chat_template_kwargs"),
        ({"chat_template_kwargs": 5}, 400, "chat_template_kwargs"),
        ({"chat_template": "{{ x }}"}, 400, "chat_template"),
        ({"prompt_logprobs": 1}, 400, "prompt_logprobs"),
        ({"documents": [{"text": "x"}]}, 400, "documents"),  # its template shows none
        ({"documents": ["x"]}, 400, "documents[0]"),
        ({"documents": [{"text": "x"}] * 10_000}, 400, "documents"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(serve: Any, fields: dict[str, Any], status: int, param: str) -> None:
    async with serve() as api:
        answer = await api.chat(**fields)
    assert (answer.status, answer.error["param"]) == (status, param)
    assert answer.error["type"] == ("not_supported_error" if status == 501 else "invalid_request_error")


async def test_fields_that_ask_for_nothing_are_no_reason_to_refuse(serve: Any) -> None:
    async with serve() as api:
        answer = await api.chat(
            tools=[], tool_choice="auto", grammar="", response_format={"type": "text"}, structured_outputs=None, top_logprobs=0,
            user="me", store=False, metadata={"a": "b"}, stream_options={"include_usage": True},
            cache_prompt=True, cache_salt="s", chat_template_kwargs={"enable_thinking": False},
            chat_template="", prompt_logprobs=0, documents=[],
        )  # fmt: skip
    assert answer.status == 200


async def test_a_template_that_writes_bos_gets_no_second_one(serve: Any) -> None:
    model = FakeModel()
    model.vocabulary.chat_template = "<bos>{{ messages[0].content }}"
    async with serve(model) as api:
        answer = await api.post("/tokenize", {"messages": [{"role": "user", "content": "ab"}]})
        assert answer.json["tokens"] == [256, 97, 98]
        assert (await api.chat("ab", max_tokens=1)).json["usage"]["prompt_tokens"] == 3


async def test_a_template_that_refuses_is_400_and_one_that_fails_says_so_without_a_traceback(serve: Any) -> None:
    model = FakeModel()
    model.vocabulary.chat_template = (
        "{% if messages[0].content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
        "{% if messages[0].content == 'reach' %}{{ ''.__class__ }}{% endif %}{{ messages[0].content }}"
    )
    async with serve(model) as api:
        answer = await api.chat("no")
        assert answer.status == 400
        assert "not that" in answer.error["message"]
        failed = await api.chat("reach")
        assert (failed.status, failed.error["type"]) == (500, "server_error")
        assert b"Traceback" not in failed.body
        assert (await api.chat("yes")).status == 200


async def test_special_tokens_in_what_a_user_wrote_are_read_as_llama_server_reads_them(serve: Any) -> None:
    async with serve() as api:
        tokens = (await api.post("/tokenize", {"messages": [{"role": "user", "content": "<end>"}]})).json["tokens"]
    assert tokens.count(257) == 2


async def test_n_predict_minus_1_is_no_limit(serve: Any) -> None:
    fields = {"max_tokens": None, "min_tokens": 30, "n_predict": -1}
    async with serve(FakeModel(n_tokens_to_end=40)) as api:
        answers = [await api.chat(**fields), await api.complete(**fields)]
    for answer in answers:
        assert answer.finish()[0] == "stop"
        assert answer.json["usage"]["completion_tokens"] > 30, "more than a completion's usual limit"


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("max_tokens", -1),
        ("max_completion_tokens", -1),
        ("n_predict", -2),
        ("max_tokens", 0),
        ("max_completion_tokens", 0),
        ("n_predict", 0),
    ],
)
async def test_no_other_limit_below_1_is_taken_for_an_answer(serve: Any, name: str, n: int) -> None:
    async with serve() as api:
        refused = await api.chat(**{"max_tokens": None, name: n})
    assert (refused.status, refused.error["param"]) == (400, name)


async def test_documents_are_the_templates_variable_of_that_name(serve: Any) -> None:
    model, messages = FakeModel(), [{"role": "user", "content": "x"}]
    assert model.vocabulary.chat_template is not None
    model.vocabulary.chat_template = "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}" + model.vocabulary.chat_template
    given = {"documents": [{"text": "one"}, {"text": "two"}]}
    async with serve(model) as api:
        assert (await prompt_of(api, messages)).startswith("<turn>user")
        prompt = await prompt_of(api, messages, **given)
        assert prompt.startswith("[one][two]<turn>user")
        assert await prompt_of(api, messages, chat_template_kwargs=given) == prompt
        tokens = (await api.post("/tokenize", {"messages": messages, **given})).json["tokens"]
        answer = await api.chat("x", **given)
    assert answer.json["usage"]["prompt_tokens"] == len(tokens) > len("[one][two]")


async def test_documents_that_can_never_fit_are_too_long_for_the_context(serve: Any) -> None:
    model = FakeModel()
    assert model.vocabulary.chat_template is not None
    model.vocabulary.chat_template = "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}" + model.vocabulary.chat_template
    async with serve(model) as api:
        answer = await api.chat("x", documents=[{"text": "x" * 5_000_000}])  # more than is ever rendered
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")


async def test_a_templates_variables_are_few(serve: Any) -> None:
    async with serve() as api:
        taken = await api.chat(chat_template_kwargs={"x": list(range(9000))})
        refused = await api.chat(chat_template_kwargs={"x": {"y": [[1] * 5000, [2] * 5000]}})
    assert taken.status == 200
    assert (refused.status, refused.error["param"]) == (400, "chat_template_kwargs")
