from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
import trio

from cllm.testing.fake import FakeModel

SCHEMA = {
    "type": "object",
    "properties": {
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["age", "kind", "tags"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
MODEL = {"n_tokens_to_end": 5}  # of the bytes that may come, about one in so many is the end, where the end may come


def fits(text: str, schema: Any = SCHEMA) -> bool:
    jsonschema.validate(json.loads(text), schema)
    return True


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": FORMAT},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"json_schema": SCHEMA},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
    ],
    ids=lambda fields: ".".join(f"{name}" for name in fields),
)
@pytest.mark.parametrize("seed", [1, 2])
async def test_an_answer_fits_the_schema_wherever_the_schema_stands(serve: Any, fields: dict[str, Any], seed: int) -> None:
    async with serve(FakeModel(**MODEL)) as api:
        for answer in (
            await api.chat(max_tokens=200, seed=seed, **fields),
            await api.chat(max_tokens=200, seed=seed, stream=True, **fields),
            await api.complete(max_tokens=200, seed=seed, **fields),
        ):
            assert answer.status == 200, answer.body
            assert answer.finish() == ("stop", None)
            assert fits(answer.text())
        await api.idle()


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"structured_outputs": {"regex": "a{2,3}"}}, {"aa", "aaa"}),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, {"x", "y"}),
        ({"guided_choice": ["yes", "no"]}, {"yes", "no"}),
        ({"guided_regex": "a{2,3}"}, {"aa", "aaa"}),
        ({"guided_grammar": 'root ::= "x" | "y"'}, {"x", "y"}),
        ({"grammar": 'root ::= "(" ("x" | "y") ")"'}, {"(x)", "(y)"}),
        ({"grammar": 'start: "x" | "y"'}, {"x", "y"}),
        ({"structured_outputs": {"choice": ["ünï"]}}, {"ünï"}),
    ],
)
async def test_an_answer_is_what_was_asked_for(serve: Any, fields: dict[str, Any], texts: set[str]) -> None:
    async with serve(FakeModel(**MODEL)) as api:
        answer = await api.chat(max_tokens=50, n=4, **fields)
        assert {answer.text(i) for i in range(4)} <= texts
        assert {answer.finish(i) for i in range(4)} == {("stop", None)}


async def test_any_object_is_what_json_object_gives(serve: Any) -> None:
    async with serve(FakeModel(**MODEL)) as api:
        answer = await api.chat(max_tokens=3000, seed=1, response_format={"type": "json_object"})
        assert answer.finish() == ("stop", None)
        assert isinstance(json.loads(answer.text()), dict)


async def test_an_answer_that_max_tokens_cuts_says_length(serve: Any) -> None:
    async with serve(FakeModel(**MODEL)) as api:
        answer = await api.chat(max_tokens=5, response_format=FORMAT)
        assert answer.finish() == ("length", None)


async def test_every_answer_of_several_fits_with_logprobs_and_in_a_stream(serve: Any) -> None:
    async with serve(FakeModel(**MODEL)) as api:
        whole = await api.chat(max_tokens=200, n=3, seed=3, logprobs=True, top_logprobs=2, response_format=FORMAT)
        stream = await api.chat(max_tokens=200, n=3, seed=3, logprobs=True, top_logprobs=2, response_format=FORMAT, stream=True)
        texts = [whole.text(i) for i in range(3)]
        assert all(fits(text) for text in texts)
        assert [stream.text(i) for i in range(3)] == texts
        for i, text in enumerate(texts):
            content = whole.json["choices"][i]["logprobs"]["content"]
            assert "".join(token["token"] for token in content) == text
            assert all(token["logprob"] <= 0 for token in content)


async def test_a_stop_string_ends_even_what_is_not_complete(serve: Any) -> None:
    async with serve(FakeModel(**MODEL)) as api:
        answer = await api.chat(max_tokens=200, response_format=FORMAT, stop='"kind"')
        assert answer.finish() == ("stop", '"kind"')
        assert '"kind"' not in answer.text()


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 150}])
async def test_who_wants_more_tokens_gets_no_more_than_fits(serve: Any, fields: dict[str, Any]) -> None:
    async with serve(FakeModel(**MODEL)) as api:
        answer = await api.chat(max_tokens=200, response_format=FORMAT, **fields)
        assert answer.finish() == ("stop", None)
        assert fits(answer.text())


async def test_a_plain_request_beside_it_is_free(serve: Any) -> None:
    async with serve(FakeModel()) as api:
        alone = await api.chat(max_tokens=100, seed=5)

        async def hold() -> None:
            assert fits((await api.chat(max_tokens=200, response_format=FORMAT)).text())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold)
            beside = await api.chat(max_tokens=100, seed=5)
        assert beside.text() == alone.text()


async def test_a_schema_keeps_the_order_of_its_members(serve: Any) -> None:
    schema = {
        "type": "object",
        "properties": {n: {"type": "null"} for n in "zax"},
        "required": ["a", "x", "z"],
        "additionalProperties": False,
    }
    async with serve(FakeModel(**MODEL)) as api:
        answer = await api.chat(max_tokens=200, json_schema=schema)
        assert list(json.loads(answer.text())) == ["z", "a", "x"]


@pytest.mark.parametrize("fields", [{"guided_json": '{"$ref": "#/\\ud83d"}'}, {"grammar": 'start: %json {"$ref": "#/\\ud83d"}'}])
async def test_half_a_character_in_a_place_of_a_schema_is_nowhere(serve: Any, fields: dict[str, str]) -> None:
    async with serve() as api:
        answer = await api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}], **fields})
    assert (answer.status, answer.error["param"]) == (400, *fields)


@pytest.mark.parametrize(
    ("fields", "param", "pointer"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", None),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}},
            "response_format.json_schema.schema",
            None,
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"properties": {"b": {"not": {}}}}}}},
            "response_format.json_schema.schema",
            "#/properties/b",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": '{"$ref": "#/\\ud83d"}'}}},
            "response_format.json_schema.schema",
            "#",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type", None),
        ({"response_format": {"type": "json_object", "schema": {"uniqueItems": True}}}, "response_format.schema", "#"),
        ({"structured_outputs": {}}, "structured_outputs", None),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", None),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", None),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", None),
        ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice", None),
        ({"structured_outputs": {"grammar": "root"}}, "structured_outputs.grammar", None),
        ({"structured_outputs": {"json": {"type": "strin"}}}, "structured_outputs.json", "#"),
        ({"grammar": "root ::= ("}, "grammar", None),
        ({"grammar": 5}, "grammar", None),
        ({"json_schema": "{"}, "json_schema", None),
        ({"json_schema": '{"properties": {"\\ud83d": {"not": {}}}}'}, "json_schema", "#/properties/\\ud83d"),  # half a surrogate
        ({"json_schema": SCHEMA, "response_format": FORMAT}, "json_schema", None),
        ({"grammar": 'root ::= "a"', "structured_outputs": {"regex": "a"}}, "grammar", None),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", None),
        ({"guided_regex": "("}, "guided_regex", None),
        ({"guided_choice": []}, "guided_choice", None),
    ],
)
@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": {"name": "add"}}]}),
        ("/v1/completions", {}),
    ],
)
async def test_what_cannot_be_honoured_is_refused_before_anything_runs(
    serve: Any, path: str, more: dict[str, Any], fields: dict[str, Any], param: str, pointer: str | None
) -> None:
    model = FakeModel()
    async with serve(model) as api:
        body = {"messages": [{"role": "user", "content": "hello"}], "prompt": "hello", **more, **fields}
        answer = await api.post(path, body)
        assert (answer.status, answer.error["param"], answer.error.get("pointer")) == (400, param, pointer)
        assert model.n_steps == 0


async def test_nothing_is_asked_for_by_what_clients_send_that_want_nothing(serve: Any) -> None:
    async with serve(FakeModel()) as api:
        nothing = {"response_format": {"type": "text"}, "grammar": "", "json_schema": None, "structured_outputs": None}
        assert (await api.chat(seed=1, **nothing)).text() == (await api.chat(seed=1)).text()


async def test_grammars_are_counted(serve: Any) -> None:
    async with serve(FakeModel(**MODEL)) as api:
        await api.chat(response_format=FORMAT)
        await api.chat(response_format=FORMAT)
        await api.chat(grammar="root")
        text = (await api.get("/metrics")).body.decode()
        for outcome in ("compiled", "cached", "refused"):
            assert f'cllm_grammars_total{{outcome="{outcome}"}} 1.0' in text
        assert "cllm_grammar_compile_seconds_count 2.0" in text


async def test_the_schemas_that_clients_make_of_classes_are_held_to(serve: Any) -> None:
    """As OpenAI's client writes a class with a list of another class and an optional member."""
    pet = {
        "properties": {
            "name": {"maxLength": 8, "title": "Name", "type": "string"},
            "age": {"maximum": 30, "minimum": 0, "type": "integer"},
        },
        "required": ["name", "age"],
        "title": "Pet",
        "type": "object",
        "additionalProperties": False,
    }
    town = {"anyOf": [{"maxLength": 8, "type": "string"}, {"type": "null"}], "title": "Town"}
    schema = {
        "$defs": {"Pet": pet},
        "properties": {"pets": {"items": {"$ref": "#/$defs/Pet"}, "maxItems": 2, "title": "Pets", "type": "array"}, "town": town},
        "required": ["pets", "town"],
        "title": "Household",
        "type": "object",
        "additionalProperties": False,
    }
    async with serve(FakeModel(**MODEL)) as api:
        response_format = {"type": "json_schema", "json_schema": {"schema": schema, "name": "Household", "strict": True}}
        answer = await api.chat(max_tokens=500, response_format=response_format)
        assert answer.finish() == ("stop", None)
        assert fits(answer.text(), schema)
