"""Ollama's surface: /api/generate, /api/chat, and what tells of the model."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

import attrs
import pytest

from cllm.api.ollama.requests import ChatRequest, Message, _turns, chat_conversation
from cllm.errors import InvalidRequest
from cllm.serve.embedders import EmbeddingsOnly
from cllm.testing.fake import END_OF_TURN, FakeModel, FakeVocabulary
from cllm.testing.fake_embedder import FakeEmbedder
from cllm.testing.scripted import TOOL_TEMPLATE, ScriptedModel
from tests.api.conftest import TEST_S, failing


def lines(answer: Any) -> list[Any]:
    """A stream's objects."""
    assert answer.headers["content-type"] == "application/x-ndjson", answer.body
    return [json.loads(line) for line in answer.body.decode().splitlines()]


def chat(content: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": content}], "options": {"num_predict": 50}, **fields}


async def test_a_chat_is_a_stream_of_lines_unless_it_is_said_otherwise(serve: Any) -> None:
    async with serve(ScriptedModel("Good day.")) as api:
        told = lines(await api.post("/api/chat", chat()))
        whole = (await api.post("/api/chat", chat(stream=False))).json
    assert "".join([one["message"]["content"] for one in told]) == whole["message"]["content"] == "Good day."
    assert [one["done"] for one in told] == [False] * (len(told) - 1) + [True]
    assert {one["model"] for one in told} == {"fake"}
    assert whole["message"]["role"] == "assistant"
    for last in (told[-1], whole):
        assert (last["done"], last["done_reason"], last["eval_count"], last["load_duration"]) == (True, "stop", 10, 0)
        assert last["prompt_eval_count"] > 0
        assert all(isinstance(last[name], int) for name in ("total_duration", "prompt_eval_duration", "eval_duration"))
        assert last["total_duration"] >= last["eval_duration"]
        datetime.fromisoformat(last["created_at"])


async def test_durations_are_nanoseconds(serve: Any) -> None:
    step_s, n_steps = 0.005, 20
    async with serve(FakeModel(step_s=lambda batch: step_s)) as api:
        told = (await api.post("/api/chat", chat(stream=False, options={"num_predict": n_steps}))).json
    assert told["eval_count"] == n_steps
    assert told["eval_duration"] >= 0.9 * (n_steps - 1) * step_s * 1e9
    assert told["prompt_eval_duration"] >= 0.9 * step_s * 1e9
    assert told["total_duration"] >= told["prompt_eval_duration"] + 0.9 * told["eval_duration"]
    assert told["total_duration"] < TEST_S * 1e9


async def test_generate_answers_a_prompt_through_the_template(serve: Any) -> None:
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "Good day."

    sent = {"model": "fake:latest", "prompt": "hello", "system": "Be brief."}
    async with serve(ScriptedModel(answer)) as api:
        told = lines(await api.post("/api/generate", sent))
        whole = (await api.post("/api/generate", {**sent, "stream": False})).json
    assert "".join([one["response"] for one in told]) == whole["response"] == "Good day."
    assert set(prompts) == {"<bos><turn>system\nBe brief.<end><turn>user\nhello<end><turn>assistant\n"}
    assert "message" not in whole


async def test_raw_continues_the_prompt_as_completions_do(serve: Any) -> None:
    async with serve() as api:
        raw = await api.post("/api/generate", {"prompt": "once", "raw": True, "stream": False, "options": {"num_predict": 9, "seed": 3}})
        same = await api.complete("once", max_tokens=9, seed=3)
    assert raw.json["response"] == same.text()
    assert raw.json["done_reason"] == "length"


async def test_a_suffix_is_filled_in_where_the_vocabulary_can(serve: Any) -> None:
    sent = {"prompt": "def f(", "suffix": "return x", "stream": False, "options": {"num_predict": 5, "seed": 1}}
    model = FakeModel(n_tokens=262)
    model.vocabulary = FakeVocabulary(262, infills=True)
    async with serve(model) as api:
        filled = await api.post("/api/generate", sent)
        same = await api.complete("def f(", suffix="return x", max_tokens=5, seed=1)
        shown = (await api.post("/api/show", {"model": "fake"})).json
    assert filled.json["response"] == same.text()
    assert "insert" in shown["capabilities"]
    async with serve() as api:
        refused = await api.post("/api/generate", sent)
    assert refused.status == 400
    assert refused.json["error"].startswith("suffix")


async def test_a_negative_num_predict_is_no_limit(serve: Any) -> None:
    async with serve(FakeModel(n_ctx_train=64)) as api:
        answer = await api.post("/api/chat", chat(stream=False, options={"num_predict": -1}))
    assert answer.json["prompt_eval_count"] + answer.json["eval_count"] == 64
    assert answer.json["done_reason"] == "length"


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
async def test_a_num_predict_of_0_computes_the_prompt_for_who_comes_after(serve: Any, path: str) -> None:
    sent = {**chat(), "prompt": "hello"}
    async with serve() as api:
        parts = lines(await api.post(path, {**sent, "options": {"num_predict": 0}}))
        whole = (await api.post(path, {**sent, "stream": False, "options": {"num_predict": 0}})).json
        after = (await api.post(path, {**sent, "stream": False, "options": {"num_predict": 1}})).json
        assert api.scheduler.totals.n_submitted == 3
    assert len(parts) == 1
    for told in (*parts, whole):
        assert (told["done"], told["done_reason"], told["eval_count"]) == (True, "length", 0)
        assert told["prompt_eval_count"] == after["prompt_eval_count"] > 0
        assert (told["message"]["content"] if path == "/api/chat" else told["response"]) == ""


async def test_a_penalty_of_0_is_none_as_some_clients_mean_it(serve: Any) -> None:
    async with serve() as api:
        none, one = [
            await api.post("/api/chat", chat(stream=False, options={"repeat_penalty": penalty, "temperature": 0, "num_predict": 9}))
            for penalty in (0, 1)
        ]
        below = await api.post("/api/chat", chat(options={"repeat_penalty": -1}))
    assert none.json["message"] == one.json["message"]
    assert (below.status, "options.repeat_penalty" in below.json["error"]) == (400, True)


async def test_stop_strings_and_seeds_come_in_the_options(serve: Any) -> None:
    async with serve(ScriptedModel("Good day.")) as api:
        answer = await api.post("/api/chat", chat(stream=False, options={"stop": ["day"], "seed": 1, "num_ctx": 2048, "mirostat": 0}))
    assert answer.json["message"]["content"] == "Good "


@pytest.mark.parametrize(
    ("path", "sent", "reason"),
    [
        ("/api/generate", {}, "load"),
        ("/api/chat", {"messages": []}, "load"),
        ("/api/chat", {"keep_alive": 0}, "unload"),
        ("/api/generate", {"keep_alive": "5m0s"}, "load"),
        ("/api/generate", {"prompt": "", "keep_alive": "10m", "options": {"num_predict": 0}}, "load"),
        ("/api/chat", {"messages": [], "keep_alive": -1, "options": {"num_predict": 0, "n": 2}}, "load"),
    ],
)
async def test_a_request_without_a_prompt_is_answered_without_generating(serve: Any, path: str, sent: dict[str, Any], reason: str) -> None:
    async with serve() as api:
        answer = await api.post(path, {"model": "fake", **sent})
        assert api.scheduler.totals.n_submitted == 0
    assert (answer.status, answer.json["done"], answer.json["done_reason"]) == (200, True, reason)


@pytest.mark.parametrize(("n_gpu_layers", "n_bytes"), [(None, 0), (0, 0), (-1, 4096)])
async def test_what_is_wholly_on_a_gpu_is_told_to_be_there(serve: Any, n_gpu_layers: int | None, n_bytes: int) -> None:
    model = FakeModel()
    model.info = attrs.evolve(model.info, size_bytes=4096, n_gpu_layers=n_gpu_layers)
    async with serve(model) as api:
        (running,) = (await api.get("/api/ps")).json["models"]
    assert running["size_vram"] == n_bytes


async def test_the_model_is_listed_running_and_shown(serve: Any) -> None:
    async with serve(alias=("mine:7b",)) as api:
        tags = (await api.get("/api/tags")).json["models"]
        (running,) = (await api.get("/api/ps")).json["models"]
        shown = (await api.post("/api/show", {"model": running["name"]})).json
        version = (await api.get("/api/version")).json
        for one in tags:
            assert (await api.post("/api/chat", chat(model=one["name"], stream=False, options={"num_predict": 1}))).status == 200
    assert tuple(map(int, version["version"].split("."))) >= (0, 14, 2), "clients that speak Responses refuse older ones"
    assert {one["name"] for one in tags} >= {"mine:7b"}
    assert all(one["details"]["format"] == "gguf" and len(one["digest"]) == 64 for one in tags)
    assert running["context_length"] == 4096
    assert shown["model_info"]["general.architecture"] == "fake"
    assert shown["model_info"]["fake.context_length"] == running["context_length"]
    assert shown["capabilities"] == ["completion", "tools"]
    assert "<turn>" in shown["template"]
    assert set(version) == {"version"}


@pytest.mark.parametrize(
    ("path", "fields", "status", "place"),
    [
        ("/api/generate", {"prompt": 5}, 400, "prompt"),
        ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, 400, "template"),
        ("/api/generate", {"prompt": "x", "context": [1]}, 400, "context"),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}, 400, "images"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "y"}, 400, "system"),
        ("/api/generate", {"prompt": "x", "options": {"temperature": "hot"}}, 400, "options.temperature"),
        ("/api/generate", {"prompt": "x", "options": {"num_predict": -3}}, 400, "options.num_predict"),
        ("/api/generate", {"prompt": "x", "options": {"n": 2}}, 400, "options.n"),
        ("/api/chat", {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "messages[0].images"),
        ("/api/chat", {"model": "other", "messages": [{"role": "user", "content": "x"}]}, 404, "other"),
        ("/api/show", {"model": "other"}, 404, "other"),
        ("/api/show", {}, 400, "model"),
        ("/api/nowhere", {}, 404, "/api/nowhere"),
    ],
)
async def test_what_is_wrong_is_named_and_nothing_is_queued(serve: Any, path: str, fields: dict[str, Any], status: int, place: str) -> None:
    async with serve() as api:
        answer = await api.post(path, fields)
        assert api.scheduler.totals.n_submitted == 0
    assert answer.status == status
    assert set(answer.json) == {"error"}
    assert place in answer.error


async def test_texts_have_vectors_as_the_embedder_gives_them(serve: Any) -> None:
    async with serve(embedder=FakeEmbedder()) as api:
        both = (await api.post("/api/embed", {"model": "fake-embedder:latest", "input": ["one", "two"]})).json
        one = (await api.post("/api/embed", {"model": "fake-embedder", "input": "one", "dimensions": 4})).json
        openai = (await api.post("/v1/embeddings", {"input": ["one", "two"]})).json
        older = (await api.post("/api/embeddings", {"model": "fake-embedder", "prompt": "one"})).json
        names = {model["name"] for model in (await api.get("/api/tags")).json["models"]}
        shown = (await api.post("/api/show", {"model": "fake-embedder:latest"})).json
    assert both["embeddings"] == [item["embedding"] for item in openai["data"]]
    assert both["prompt_eval_count"] == openai["usage"]["prompt_tokens"]
    assert len(one["embeddings"][0]) == 4
    length = sum(x * x for x in older["embedding"]) ** 0.5
    assert [x / length for x in older["embedding"]] == pytest.approx(both["embeddings"][0], abs=1e-6)
    assert "fake-embedder:latest" in names
    assert shown["capabilities"] == ["embedding"]


@pytest.mark.parametrize("fields", [{}, {"input": []}, {"input": ""}, {"input": ["", ""]}, {"input": None}])
async def test_no_input_has_no_vectors(serve: Any, fields: dict[str, Any]) -> None:
    async with serve(embedder=FakeEmbedder()) as api:
        answer = await api.post("/api/embed", {"model": "fake-embedder", **fields})
        older = await api.post("/api/embeddings", {"model": "fake-embedder", "prompt": ""})
    assert (answer.status, answer.json["model"], answer.json["embeddings"]) == (200, "fake-embedder", [])
    assert (older.status, older.json) == (200, {"embedding": []})


async def test_as_many_inputs_as_somebody_likes_have_vectors_and_no_more_dimensions_than_there_are(serve: Any) -> None:
    async with serve(embedder=FakeEmbedder()) as api:
        answer = await api.post("/api/embed", {"input": ["x"] * 2049, "dimensions": 100_000})
    assert answer.status == 200
    assert len(answer.json["embeddings"]) == 2049


async def test_a_last_turn_of_the_assistants_is_gone_on_from(serve: Any) -> None:
    turn = "<turn>{{ m.role }}\n{{ m.content }}{% if not loop.last or add_generation_prompt %}<end>{% endif %}"
    template = f"{{% for m in messages %}}{turn}{{% endfor %}}"
    messages = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "It is "}]
    async with serve(ScriptedModel("It is because.", template=template)) as api:
        answer = await api.post("/api/chat", chat(messages=messages, stream=False))
    assert answer.json["message"]["content"] == "because."


def test_a_last_turn_is_a_turn_where_the_model_cannot_be_told_to_go_on() -> None:
    body = ChatRequest(messages=[Message(role="user", content="why?"), Message(role="assistant", content="It is ")])
    assert chat_conversation(body, can_go_on=True).continue_final_message
    conversation = chat_conversation(body, can_go_on=False)
    assert (conversation.continue_final_message, conversation.add_generation_prompt) == (False, True)
    assert [message["content"] for message in conversation.messages] == ["why?", "It is "]


async def test_more_inputs_than_can_be_counted_at_once_are_400(serve: Any) -> None:
    async with serve(embedder=FakeEmbedder()) as api:
        answer = await api.post("/api/embed", {"input": ["a"] * 16_385})
    assert (answer.status, "16384" in answer.error) == (400, True)


async def test_a_file_that_gives_vectors_alone_is_shown_as_what_it_is(serve: Any) -> None:
    embedder = FakeEmbedder()
    async with serve(EmbeddingsOnly(embedder), embedder, alias=("fake-embedder",)) as api:
        shown = (await api.post("/api/show", {"model": "fake-embedder"})).json
    assert shown["capabilities"] == ["embedding"]


async def test_numbers_of_the_file_are_numbers(serve: Any) -> None:
    facts = {
        "general.file_type": "15",
        "general.version": "1.5",
        "fake.block_count": "32",
        "fake.rope.freq_base": "10000.000000",
        "fake.attention.causal": "true",
        "fake.rope.scaling.type": "linear",
    }
    model = FakeModel()
    model.info = attrs.evolve(model.info, metadata={**model.info.metadata, **facts})
    async with serve(model) as api:
        shown = (await api.post("/api/show", {"model": "fake"})).json["model_info"]
    assert [shown[name] for name in facts] == [15, "1.5", 32, 10000.0, True, "linear"]
    assert [type(shown[name]) for name in facts] == [int, str, int, float, bool, str]


async def test_inputs_that_are_too_long_are_cut_unless_that_is_not_wanted(serve: Any) -> None:
    async with serve(embedder=FakeEmbedder(n_tokens_max=8)) as api:
        cut = await api.post("/api/embed", {"input": "x" * 5_000})
        whole = await api.post("/api/embed", {"input": "x" * 5_000, "truncate": False})
    assert (cut.status, cut.json["prompt_eval_count"]) == (200, 8)
    assert (whole.status, set(whole.json)) == (400, {"error"})


@pytest.mark.parametrize("sizes", [{"can_split": False, "n_rows_max": 32}, {"n_cells": 32}])
async def test_inputs_are_cut_to_what_the_embedder_can_be_given_whatever_it_says_of_itself(serve: Any, sizes: dict[str, Any]) -> None:
    async with serve(embedder=FakeEmbedder(n_tokens_max=64, **sizes)) as api:
        answer = await api.post("/api/embed", {"input": "x" * 40})
        refused = await api.post("/api/embed", {"input": "x" * 40, "truncate": False})
    assert (answer.status, refused.status) == (200, 400)
    assert "takes 32 at most" in refused.json["error"]


async def test_a_text_that_is_cut_keeps_the_token_that_closes_it(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenize, closing = FakeVocabulary.tokenize, END_OF_TURN

    def closed(self: Any, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        tokens = tokenize(self, text, add_special=add_special, parse_special=parse_special)
        return [*tokens, closing] if add_special else tokens

    monkeypatch.setattr(FakeVocabulary, "tokenize", closed)
    given: list[list[int]] = []
    async with serve(
        embedder=FakeEmbedder(n_tokens_max=8, before_step=lambda batch: given.append(batch.tokens[: batch.n_rows].tolist()))
    ) as api:
        assert (await api.post("/api/embed", {"input": "x" * 5_000})).status == 200
        assert (await api.post("/api/embed", {"input": "x"})).status == 200
    assert [(len(one), one[-1]) for one in given] == [(8, closing), (len(given[1]), closing)]


async def test_more_calls_in_a_turn_than_there_may_be_are_400(serve: Any) -> None:
    calls = [{"function": {"name": "look"}}] * 1025
    async with serve() as api:
        answer = await api.post("/api/chat", {"messages": [{"role": "assistant", "content": "x", "tool_calls": calls}]})
    assert (answer.status, "messages[0].tool_calls" in answer.error) == (400, True), answer.error


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_num_predict_cuts_is_not_told_as_one_without_arguments(serve: Any, stream: bool) -> None:
    parameters = {"type": "object", "properties": {"door": {"type": "string"}}, "required": ["door"]}
    tool = {"type": "function", "function": {"name": "unlock", "parameters": parameters}}
    form = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
    called = '<tool_call>\n{"name": "unlock", "arguments": {"door": "front"}}\n</tool_call>'
    told = []
    async with serve(ScriptedModel(called, template=TOOL_TEMPLATE)) as api:
        for n in (called.index("{", 20), called.index("front"), 400):  # before the arguments, within them, and not at all
            options = {"num_predict": n, "temperature": 0}
            answer = await api.post("/api/chat", chat(tools=[tool], format=form, stream=stream, options=options))
            parts = lines(answer) if stream else [answer.json]
            calls = [call["function"] for part in parts for call in part["message"].get("tool_calls", [])]
            told.append((parts[-1]["done_reason"], [(call["name"], call["arguments"]) for call in calls]))
    assert told == [("length", []), ("length", []), ("stop", [("unlock", {"door": "front"})])]


async def test_a_tool_loop_goes_on_with_a_template_that_wants_ids(serve: Any) -> None:
    wants = "{% for m in messages if m.role == 'tool' and not m.tool_call_id %}{{ raise_exception('no id') }}{% endfor %}"
    turns = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": "found", "tool_name": "look"},
    ]
    async with serve(ScriptedModel("fine", template=wants + TOOL_TEMPLATE)) as api:
        assert (await api.post("/api/chat", {"messages": turns, "stream": False})).status == 200


async def test_a_stream_that_fails_ends_with_a_line_that_says_so(serve: Any) -> None:
    async with serve(failing(4)) as api:
        told = lines(await api.post("/api/chat", chat()))
    assert told[0]["done"] is False
    assert set(told[-1]) == {"error"}


async def test_a_silent_stream_carries_no_line_that_is_not_json(serve: Any) -> None:
    slow = FakeModel(step_s=lambda batch: 0.05)
    async with serve(slow, sse_ping_s=0.005) as api:
        told = lines(await api.post("/api/chat", chat(options={"num_predict": 4})))
    assert told[-1]["done"] is True


def talk(n_turns: int, *system: str) -> list[dict[str, Any]]:
    """A conversation in which every turn says which one it is."""
    said = [{"role": role, "content": f"{role} {i}"} for i in range(n_turns) for role in ("user", "assistant")]
    return [*({"role": "system", "content": text} for text in system), *said, {"role": "user", "content": "and now?"}]


async def test_a_conversation_that_does_not_fit_is_answered_without_its_oldest_turns_but_for_what_the_system_says(serve: Any) -> None:
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return "Good day."

    async with serve(ScriptedModel(answer, n_ctx_train=256), queue_size=1) as api:  # of which the first try takes the one place
        sent = {"messages": talk(20, "Be brief."), "stream": False}
        answered = await api.post("/api/chat", sent)
        refused = await api.post("/api/chat", {**sent, "truncate": False})
        short = await api.post("/api/chat", {**sent, "messages": talk(2, "Be brief.")})
        hopeless = await api.post("/api/chat", {**sent, "messages": [{"role": "user", "content": "word " * 200}]})
    assert [one.status for one in (answered, refused, short, hopeless)] == [200, 400, 200, 400]
    long, whole = dict.fromkeys(prompts)
    assert long.startswith("<bos><turn>system\nBe brief.<end><turn>user\nuser ")
    assert long.endswith("<turn>assistant\nassistant 19<end><turn>user\nand now?<end><turn>assistant\n")
    assert "user 0<" not in long
    n_left = long.count("<turn>user")
    assert n_left >= 2, "as much as fits beside a quarter for the answer"
    assert answered.json["prompt_eval_count"] <= 256 - 64
    assert answered.json["prompt_eval_count"] + len("<turn>user\nuser 19<end><turn>assistant\nassistant 19<end>") > 256 - 64
    assert "user 0<" in whole


async def test_roles_are_read_as_ollama_and_its_clients_write_them_and_what_was_thought_is_the_next_turns(serve: Any) -> None:
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "USER", "content": "why?"},
        {"role": "thinking", "content": "hm"},
        {"role": "thinking", "content": "so"},
        {"role": "assistant", "content": "Because."},
        {"role": "thinking", "content": "left over"},
        {"role": "user", "content": "and?"},
    ]
    body = ChatRequest(messages=[Message(**turn) for turn in turns])
    assert chat_conversation(body, can_go_on=True).messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "why?"},
        {"role": "assistant", "content": "Because.", "reasoning_content": "hm\nso"},
        {"role": "user", "content": "and?"},
    ]
    async with serve() as api:
        assert (await api.post("/api/chat", chat(messages=turns, stream=False))).status == 200
        alone = await api.post("/api/chat", chat(messages=turns[2:3]))
        unknown = await api.post("/api/chat", chat(messages=[{"role": "narrator", "content": "x"}]))
    assert (alone.status, "messages" in alone.error) == (400, True)
    assert (unknown.status, unknown.error.startswith("messages[0].role: expected one of system,")) == (400, True)


def test_a_thought_that_comes_last_is_of_the_answer_to_come_and_not_of_the_turn_before() -> None:
    turns = [Message(role="user", content="why?"), Message(role="assistant", content="It is "), Message(role="thinking", content="hm")]
    conversation = chat_conversation(ChatRequest(messages=turns), can_go_on=True)
    assert (conversation.continue_final_message, conversation.add_generation_prompt) == (False, True)


def test_many_thoughts_by_themselves_are_read_in_one_pass_over_them() -> None:
    messages = [*[Message(role="thinking", content="x" * 500)] * 30_000, Message(role="assistant", content="so")]
    started_s = time.process_time()
    (turn,) = _turns(messages)
    assert time.process_time() - started_s < 5, "each was joined to all before it: more than a minute"
    assert len(turn["reasoning_content"]) == 30_000 * 501 - 1


def test_of_images_that_a_tool_gave_the_model_is_told() -> None:
    body = ChatRequest(messages=[Message(role="tool", content="a page", images=["x"])])
    assert chat_conversation(body, can_go_on=True).messages[0]["content"] == "a page\n(an image, which cannot be seen here)"
    with pytest.raises(InvalidRequest, match=r"^messages\[0\].images: "):
        chat_conversation(ChatRequest(messages=[Message(role="user", content="x", images=["x"])]), can_go_on=True)
