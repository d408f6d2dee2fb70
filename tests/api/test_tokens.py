"""POST /tokenize, /detokenize, /apply-template."""

from __future__ import annotations

from typing import Any

import pytest

from cllm.api import tokens
from cllm.errors import TokenizeFailed
from cllm.serve.engine import N_CHARS_INLINE
from cllm.testing.fake import FakeModel, FakeVocabulary
from cllm.testing.mortal import Panic
from cllm.testing.scripted import TOOL_TEMPLATE, ScriptedModel


async def test_text_becomes_tokens_without_bos_unless_asked_for(serve: Any) -> None:
    async with serve() as api:
        assert (await api.post("/tokenize", {"content": "ab"})).json == {"tokens": [97, 98]}
        assert (await api.post("/tokenize", {"prompt": "ab"})).json == {"tokens": [97, 98]}
        assert (await api.post("/tokenize", {"content": "ab", "add_special": True})).json == {"tokens": [256, 97, 98]}
        assert (await api.post("/tokenize", {"content": ""})).json == {"tokens": []}


async def test_special_tokens_are_read_unless_declined(serve: Any) -> None:
    async with serve() as api:
        assert (await api.post("/tokenize", {"content": "<end>"})).json == {"tokens": [257]}
        assert (await api.post("/tokenize", {"content": "<end>", "parse_special": False})).json == {"tokens": list(b"<end>")}


async def test_pieces_are_text_or_bytes_where_they_are_no_whole_characters(serve: Any) -> None:
    async with serve() as api:
        answer = await api.post("/tokenize", {"content": "aé<end>", "with_pieces": True})
    pieces = [(97, "a"), (195, [195]), (169, [169]), (257, "<end>")]
    assert answer.json == {"tokens": [{"id": token, "piece": piece} for token, piece in pieces]}


@pytest.mark.parametrize("begins", ["", "<bos>"])
async def test_messages_are_rendered_and_tokenised_as_a_chat_would(serve: Any, begins: str) -> None:
    model = FakeModel()
    assert model.vocabulary.chat_template is not None
    model.vocabulary.chat_template = begins + model.vocabulary.chat_template
    messages = [{"role": "user", "content": "hi"}]
    async with serve(model) as api:
        prompt = (await api.post("/apply-template", {"messages": messages})).json["prompt"]
        assert prompt == "<turn>user\nhi<end><turn>assistant\n"
        tokens = (await api.post("/tokenize", {"messages": messages})).json["tokens"]
        again = (await api.post("/tokenize", {"content": prompt, "add_special": True})).json["tokens"]
        chat = await api.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
    assert tokens == again
    assert len(tokens) == chat.json["usage"]["prompt_tokens"]


async def test_the_tokens_of_messages_are_counted_as_the_chat_has_them_with_all_that_goes_into_its_prompt(serve: Any) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    asked, said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "so"}
    bodies: list[dict[str, Any]] = [
        {"messages": [asked]},
        {"messages": [asked], "tools": [tool]},
        {"messages": [asked], "chat_template_kwargs": {"mood": "fine"}},
        {"messages": [asked, said], "continue_final_message": True, "add_generation_prompt": False},
        {"messages": [asked, said], "add_generation_prompt": False},
    ]
    counts = []
    async with serve(ScriptedModel("fine", template="{{ mood }}" + TOOL_TEMPLATE)) as api:
        for body in bodies:
            tokens = (await api.post("/tokenize", body)).json["tokens"]
            chat = await api.post("/v1/chat/completions", {**body, "max_tokens": 1})
            counts.append((len(tokens), chat.json["usage"]["prompt_tokens"]))
        refused = await api.post("/tokenize", {"messages": [asked], "chat_template": "{{ x }}"})
    assert [told for told, _ in counts] == [of_chat for _, of_chat in counts]
    assert len({told for told, _ in counts}) == len(bodies), "and each of them counts"
    assert (refused.status, refused.error["param"]) == (400, "chat_template")


@pytest.mark.parametrize(("path", "field"), [("/tokenize", "content"), ("/tokenize", "prompt"), ("/encode", "text")])
async def test_a_text_that_the_tokeniser_does_not_take_is_refused_by_its_fields_name(serve: Any, path: str, field: str) -> None:
    class Full(FakeVocabulary):
        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            raise TokenizeFailed("the text is too long")

    model = FakeModel()
    model.vocabulary = Full()
    async with serve(model) as api:
        answer = await api.post(path, {field: "x"})
    assert answer.status == 400
    assert f"{field}: the text is too long" in answer.body.decode()


@pytest.mark.parametrize("n_chars", [6, N_CHARS_INLINE + 1])  # in Trio's thread, and in another one
async def test_a_text_over_which_the_tokeniser_panics_is_a_500_and_the_server_lives(serve: Any, n_chars: int) -> None:
    class Panicking(FakeVocabulary):
        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            if text.startswith("unwrap"):
                raise Panic("called unwrap on nothing")
            return super().tokenize(text, add_special=add_special, parse_special=parse_special)

    model = FakeModel()
    model.vocabulary = Panicking()
    async with serve(model) as api:
        assert (await api.post("/tokenize", {"content": "unwrap".ljust(n_chars, "x")})).status == 500
        assert (await api.post("/tokenize", {"content": "ab"})).json == {"tokens": [97, 98]}


async def test_tokens_become_text_again(serve: Any) -> None:
    async with serve() as api:
        assert (await api.post("/detokenize", {"tokens": [*"é".encode(), 257]})).json == {"content": "é<end>"}
        assert (await api.post("/detokenize", {"tokens": [195]})).json == {"content": "\ufffd"}
        assert (await api.post("/detokenize", {"tokens": []})).json == {"content": ""}
        assert (await api.post("/detokenize", {"tokens": [97] * 20_000})).json == {"content": "a" * 20_000}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "a", "prompt": "b"}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 80]}, "tokens"),
        ("/apply-template", {}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "x"}]}, "tools[0].type"),
        ("/apply-template", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ],
)
async def test_nonsense_is_400_and_named(serve: Any, path: str, body: Any, param: str) -> None:
    async with serve() as api:
        answer = await api.post(path, body)
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_pieces_are_told_of_so_many_tokens_and_no_more(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "N_PIECES_MAX", 3)
    async with serve() as api:
        few = await api.post("/tokenize", {"content": "abc", "with_pieces": True})
        many = await api.post("/tokenize", {"content": "abcd", "with_pieces": True})
        assert (await api.post("/tokenize", {"content": "abcd"})).status == 200
    assert len(few.json["tokens"]) == 3
    assert (many.status, many.error["param"]) == (400, "with_pieces")
