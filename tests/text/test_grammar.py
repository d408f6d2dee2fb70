from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits

from cllm.errors import GrammarInvalid
from cllm.testing.fake import END_OF_TURN, FakeVocabulary
from cllm.text import grammar as grammar_module
from cllm.text.grammar import (
    ANY_OBJECT,
    N_CHARS_MAX,
    N_GRAMMARS_KEPT,
    Grammar,
    Grammars,
    GrammarSource,
    GrammarState,
    Kind,
    OnStack,
    json_rule,
)
from cllm.text.schema import N_CHARS_COUNTED_MAX
from tests.schemas import cases
from tests.text.conftest import allowed, compiled, takes

CASES = cases()
CAT, DOG = ({"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("cat", "dog"))
AGED = {"age": {"type": "integer"}}
UNION = {  # as pydantic writes one whose tags have defaults
    "$defs": {
        name: {"type": "object", "properties": {"kind": {"const": kind, "default": kind}, **AGED}, "required": ["age"]}
        for name, kind in (("Cat", "cat"), ("Dog", "dog"))
    },
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
}
PETS = {"$defs": {"Cat": CAT, "Dog": DOG}, "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node", "description": "the next one", "x-order": 1}}}


def of_kind(kind: Kind, text: str) -> Grammar:
    return compiled(GrammarSource(kind, text))


def of_schema(schema: Any) -> Grammar:
    return of_kind(Kind.JSON_SCHEMA, json.dumps(schema))


def written(grammar: Grammar, draw: Any, n_max: int = 400) -> bytes | None:
    """What `draw` makes of the tokens allowed; None if it came to no end. It writes what closes things often, or it never would."""
    state, text = grammar.start(), bytearray()
    while len(text) < n_max:
        tokens = sorted(allowed(state.mask()))
        assert tokens, state.failure
        closing = [token for token in tokens if token == END_OF_TURN or token in b'"]}']
        token = draw(closing if closing and draw([True, False]) else tokens)
        if token == END_OF_TURN:
            return bytes(text)
        state.accept(token)
        text.append(token)
        if state.is_done:
            return bytes(text)
    return None


# --- what is held to ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in CASES if case.is_supported], ids=lambda case: json.dumps(case.schema)[:60])
def test_whatever_is_written_within_a_schema_fits_it(case: Any) -> None:
    validator = jsonschema.Draft202012Validator(case.schema)
    grammar = of_schema(case.schema)
    rng = random.Random(1)
    texts = [text for _ in range(3) if (text := written(grammar, rng.choice)) is not None]
    assert texts, "a walk that closes what it can comes to an end"
    for text in texts:
        validator.validate(json.loads(text))


@settings(max_examples=100)
@given(st.data())
def test_any_tokens_that_are_allowed_keep_to_the_schema(data: st.DataObject) -> None:
    case = data.draw(st.sampled_from([case for case in CASES if case.is_supported]))
    text = written(of_schema(case.schema), lambda options: data.draw(st.sampled_from(options)))
    if text is not None:
        jsonschema.Draft202012Validator(case.schema).validate(json.loads(text))


@pytest.mark.parametrize("case", [case for case in CASES if not case.is_supported], ids=lambda case: json.dumps(case.schema)[:60])
def test_what_cannot_be_held_to_is_refused_with_its_place(case: Any) -> None:
    with pytest.raises(GrammarInvalid) as caught:
        of_schema(case.schema)
    assert caught.value.pointer.startswith("#/properties/bad")


@pytest.mark.parametrize(
    ("schema", "text", "fits"),
    [
        ({"type": "object"}, '{"a": [1, null, {"b": "c"}]}', True),
        ({"type": "object"}, "[]", False),
        ({"type": "integer"}, "-12", True),
        ({"type": "integer"}, "1.5", False),
        ({"type": "integer"}, "012", False),
        ({"type": "string"}, '"\\ud800"', False),
        ({"type": "string", "maxLength": 1}, '"é"', True),
        ({"type": "string", "maxLength": 1}, '"\\n"', True),
        ({"type": "string", "pattern": "b"}, '"abc"', True),
        ({"type": "string", "pattern": "^[a[]$"}, '"["', True),
        ({"type": "string", "pattern": "^[a&&b]+$"}, '"a&b"', True),
        ({"type": "string", "pattern": "^[a-z--b]$"}, '"b"', True),
        ({"type": "string", "pattern": "^[+--]$"}, '","', True),
        ({"type": "string", "pattern": "^[^--a]$"}, '"5"', False),
        ({"type": "string", "pattern": "^[\\x2a-\\x2c--/]+$"}, '"+./"', True),
        ({"type": "string", "pattern": "^[\\w-]+[-+][+-]$"}, '"a-b-+"', True),
        ({"type": "string", "pattern": "^\\[\\d\\]$"}, '"[5]"', True),
        ({"enum": ["a", 1]}, "1", True),
        ({"enum": ["a", 1]}, '"b"', False),
        (True, "null", True),
        ({"$ref": "#/$defs/a%20b", "$defs": {"a b": {"type": "null"}}}, "null", True),
        ({"$ref": "#/$defs/a b", "$defs": {"a b": {"type": "null"}}}, "null", True),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, "[1, 1]", True),
        ({"type": "string", "format": "password"}, '"secret"', True),
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "null"}}, '{"a": null}', True),
        ({"type": "object", "propertyNames": True}, '{"a": null}', True),
        ({"type": "array", "items": [{"type": "null"}], "minItems": 1}, "[null]", True),
        ({"type": "null", "$defs": {"unused": {"not": {}}}}, "null", True),
        ({"type": "null", "x-guidance": {"lenient": True}, "title": "whatever"}, "null", True),
        ({"type": "null", "$schema": "http://json-schema.org/schema#"}, "null", True),
        ({"type": "null", "$schema": "https://json-schema.org/draft-07/schema#"}, "null", True),
        ({"type": "array", "items": {"type": "null", "$schema": "http://localhost/mine"}}, "[null]", True),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "null"}], "type": "array"}, "[null]", True),
        ({"type": "object", "minProperties": 1}, "{}", False),
        ({"properties": {"a": {}, "b": {}}, "required": ["a", "b"], "minProperties": 2, "type": "object"}, '{"a":1,"b":2}', True),
        ({"type": "object", "properties": {f"{i}": {"type": "null"} for i in range(480)}}, '{"0": null, "479": null, "x": 1}', True),
        (PETS, '{"kind": "dog"}', True),
        (PETS, '{"kind": "cow"}', False),
        ({**PETS, "discriminator": {"propertyName": "kind"}}, '{"kind": "cat"}', True),
        (UNION, '{"kind": "cat", "age": 5}', True),
        (UNION, '{"age": 5}', False),
        ({**PETS, "discriminator": {"propertyName": ["kind"]}}, '{"kind": "cat"}', True),
        ({**PETS, "discriminator": "kind"}, '{"kind": "cat"}', True),
        ({"oneOf": [{"type": "string"}, CAT, {"allOf": [DOG]}, {"const": 5}]}, '{"kind": "dog"}', True),
        ({"oneOf": [{"const": 1, "title": "low"}, {"const": 2, "title": "high"}]}, "2", True),
        ({"oneOf": [{"const": 1}, {"const": True}]}, "true", True),
        ({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["c"]}], "anyOf": [{"const": "a"}, {"const": "c"}]}, '"c"', True),
        ({"oneOf": [{"enum": ["a", "b"]}, {"enum": ["c"]}], "anyOf": [{"const": "a"}, {"const": "c"}]}, '"b"', False),
        ({"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"}, '{"next": {"next": {}}}', True),
        ({"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"}, '{"next": 5}', False),
        ({"type": "array", "prefixItems": [{"type": "null"}], "additionalItems": False, "minItems": 1}, "[null]", True),
        ({"type": "array", "prefixItems": [{"type": "null"}], "additionalItems": False, "minItems": 1}, "[5]", False),
    ],
)
def test_a_schema_takes_what_fits_it(schema: Any, text: str, fits: bool) -> None:
    assert takes(of_schema(schema), text) is fits


def test_a_member_cannot_pass_for_another_by_another_spelling_of_its_name() -> None:
    grammar = of_schema({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert takes(grammar, '{"a": 1, "b": "x"}')
    assert not takes(grammar, '{"a": 1, "\\u0061": "x"}')
    assert not takes(grammar, '{"a": 1, "a": "x"}')


def test_blanks_between_values_are_free_but_few() -> None:
    grammar = of_schema({"type": "array", "items": {"type": "integer"}})
    assert takes(grammar, "[1,2]")
    assert takes(grammar, "[ 1, 2 ]")
    assert takes(grammar, "[\n    1,\n    2\n]")
    assert not takes(grammar, "[1,  2]")
    assert not takes(grammar, "[1,\n\n2]")
    assert not takes(grammar, "[1,\n" + 40 * " " + "2]")
    assert not takes(grammar, " [1]")


@pytest.mark.parametrize(
    ("kind", "source", "text", "fits"),
    [
        (Kind.REGEX, r"\d{3}-\w+", "123-ab", True),
        (Kind.REGEX, r"\d{3}-\w+", "123-", False),
        (Kind.REGEX, "^a/b$", "a/b", True),
        (Kind.REGEX, "a|bc", "bc", True),
        (Kind.CHOICE, '["yes","no","a\\"b/é"]', 'a"b/é', True),
        (Kind.CHOICE, '["yes","no"]', "ye", False),
        (Kind.GRAMMAR, 'root ::= "(" root ")" | "x"', "((x))", True),
        (Kind.GRAMMAR, 'root ::= "(" root ")" | "x"', "((x)", False),
        (Kind.GRAMMAR, 'root ::= [a-z]+ "b"', "aab", True),
        (Kind.GRAMMAR, 'root ::= ws "a-b" ws\nws ::= [ \\t]*  # blanks', " a-b", True),
        (Kind.GRAMMAR, 'root ::= "\\u0041" [\\u00e9-\\u00ff] "\\x42" "\\\\u0041"', "AéB\\u0041", True),
        (Kind.GRAMMAR, 'root ::= item{2,3}\nitem ::= "- " [^\\n]+ "\\n"', "- a\n- b\n", True),
        (Kind.GRAMMAR, 'root ::= "<" .* ">"', "<a\nb>", True),
        (Kind.GRAMMAR, "root ::= [a\\-z]+", "a-z", True),
        (Kind.GRAMMAR, "root ::= [a\\-z]+", "b", False),
        (Kind.GRAMMAR, 'root ::= "\\-\\\\-"', "-\\-", True),
        (Kind.GRAMMAR, "root ::= [+--]+", "+,-", True),
        (Kind.GRAMMAR, "root ::= [+--]+", "*", False),
        (Kind.GRAMMAR, "root ::= [&&||;]+", "&|;", True),
        (Kind.GRAMMAR, "root ::= [a&&b~~c/[]+", "a&b~c/[", True),
        (Kind.GRAMMAR, 'root ::= ("a"*)+ "b"', "aab", True),
        (Kind.GRAMMAR, 'root ::= ("ab"{2})?', "abab", True),
        (Kind.GRAMMAR, 'root ::= start\nstart ::= "x" | "(" start ")"', "(x)", True),
        (Kind.GRAMMAR, 'root ::= start\nstart ::= start-0 "x"\nstart-0 ::= "y"', "yx", True),
        (Kind.GRAMMAR, 'start: "a" "b"*', "abb", True),
        (Kind.GRAMMAR, 'start: "<" %json {"type": "integer"} ">"', "<5>", True),
        (Kind.GRAMMAR, 'start: "a" // see %json', "a", True),
        (Kind.GRAMMAR, 'start: "a" # see / or %json', "a", True),
        (Kind.GRAMMAR, 'start: "50%json" | "\\"%json {}" | /%json/ | %json {"type": "integer"}', "50%json", True),
        (Kind.GRAMMAR, 'start: "50%json" | "\\"%json {}" | /%json/ | %json {"type": "integer"}', '"%json {}', True),
        (Kind.GRAMMAR, 'start: "50%json" | "\\"%json {}" | /%json/ | %json {"type": "integer"}', "7", True),
    ],
)
def test_a_source_takes_what_fits_it(kind: Kind, source: str, text: str, fits: bool) -> None:
    assert takes(of_kind(kind, source), text) is fits


def test_a_schema_can_stand_in_a_source_of_our_own() -> None:
    rule = json_rule('{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}')
    grammar = of_kind(Kind.LARK, f'start: TEXT "<call>" call "</call>"\nTEXT: /[^<]*/\ncall: {rule}')
    assert takes(grammar, 'I call it: <call>{"a": 1}</call>')
    assert not takes(grammar, 'I call it: <call>{"b": 1}</call>')


# --- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "pointer", "complaint"),
    [
        ({"properties": {"a/b": {"items": {"not": {}}}}}, "#/properties/a~1b/items", "not is not supported"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{}, {"if": {}}]}}}, "#/$defs/x/anyOf/1", "if is not supported"),
        ({"properties": {"a": {"type": "string"}, "b": {"type": "strin"}}}, "#/properties/b", "strin"),
        ({"properties": {"a": {"type": "array", "items": {"pattern": "("}}}}, "#/properties/a/items", "regex"),
        ({"anyOf": [{"type": "null"}, {"type": "string", "minLength": 3, "maxLength": 2}], "type": "string"}, "#/anyOf/1", "minLength"),
        ({"properties": []}, "#", "properties: expected an object"),
        ({"properties": {"a": 5}}, "#/properties/a", "expected a schema"),
        ({"required": "a"}, "#", "required: expected an array"),
        ({"required": [["a"]]}, "#", "required: expected names"),
        ({"minItems": "3"}, "#", "minItems: expected a whole number"),
        ({"$ref": "#/nowhere"}, "#", "there is no"),
        ({"$ref": 5}, "#", "$ref: expected a place"),
        ({"$ref": "#/anyOf/" + "9" * 5000, "anyOf": [{}]}, "#", "there is no"),
        ({"properties": {"a": {"$id": "b"}}}, "#/properties/a", "$id"),
        ({"type": "object", "minProperties": 2}, "#", "minProperties"),
        ({"type": "object", "properties": {f"{i}": {} for i in range(33)}, "minProperties": 1}, "#", "minProperties"),
        ({"properties": {"a": {"properties": {f"{i}": {} for i in range(1025)}}}}, "#/properties/a", "1024"),
        ({"properties": {f"{i}": {} for i in range(500)}, "required": [f"{i}" for i in range(19)]}, "#", "not required"),
        ({"allOf": [{"properties": {f"{name}{i}": {} for i in range(300)}} for name in "ab"], "type": "object"}, "#", "not required"),
        (
            {
                "items": {"properties": {f"a{i}": {} for i in range(300)}, "$ref": "#/$defs/b"},
                "$defs": {"b": {"allOf": [{"properties": {f"b{i}": {} for i in range(300)}}]}},
            },
            "#/items",
            "not required",
        ),
        ({"patternProperties": {f"^{i:03}$": {} for i in range(51)}}, "#", "50"),
        ({"allOf": [{"type": "string", "pattern": f"{i}"} for i in range(9)]}, "#", "pattern"),
        ({"oneOf": [CAT, CAT]}, "#", "oneOf"),
        ({"oneOf": [{key: value for key, value in pet.items() if key != "type"} for pet in (CAT, DOG)]}, "#", "oneOf"),
        ({"oneOf": [{"const": 1}, {"const": 1.0}]}, "#", "oneOf"),
        (
            {"allOf": [{"type": "object", "additionalProperties": False}, {"type": "object", "patternProperties": {"^x-": {}}}]},
            "#",
            "patternProperties",
        ),
        (
            {"items": {"$ref": "#/$defs/a", "additionalProperties": {"type": "null"}}, "$defs": {"a": {"patternProperties": {"^x-": {}}}}},
            "#/items",
            "patternProperties",
        ),
        ({"$ref": "#/$defs/a", "maximum": 0.5, "$defs": {"a": {"type": "number", "exclusiveMinimum": 0}}}, "#", "exclusiveMinimum"),
        ({"type": "number", "exclusiveMinimum": 0, "anyOf": [{"maximum": 0.5}, {"minimum": 7}]}, "#", "exclusiveMinimum"),
        ({"properties": {"p": {"allOf": [{"exclusiveMaximum": -1}, {"minimum": -1.5}]}}}, "#/properties/p", "exclusiveMaximum"),
        ({"allOf": [{"exclusiveMinimum": 2}, {"anyOf": [{}, {"oneOf": [{"maximum": 2.5}]}]}]}, "#", "exclusiveMinimum"),
        ({"minimum": 9007199254740993}, "#", "minimum: a whole number beyond 2^53"),
        ({"items": {"type": "number", "minimum": 1e20, "maximum": 1e300}}, "#/items", "minimum: beyond 9.2e+18"),
        ({"type": "number", "exclusiveMaximum": -1e19}, "#", "exclusiveMaximum: beyond 9.2e+18"),
        ({"items": {"type": "string", "minLength": 16_001}}, "#/items", "minLength: 16000 is the most"),
        ({"$ref": "#"}, "#", "no finite answer"),
        ({"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}, "#", "no finite answer"),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#", "no finite answer"),
        ({"const": "\x01"}, "#", "no answer could fit"),
        ([], "", "a schema is an object"),
        (False, "", "a schema is an object"),
    ],
)
def test_a_schema_that_cannot_be_honoured_says_what_and_where(schema: Any, pointer: str, complaint: str) -> None:
    with pytest.raises(GrammarInvalid) as caught:
        of_schema(schema)
    assert (caught.value.pointer, complaint in caught.value.complaint) == (pointer, True), caught.value


def test_the_place_at_fault_is_not_looked_for_for_long() -> None:
    ticks = itertools.count()
    grammars = Grammars(FakeVocabulary(), clock=lambda: next(ticks) / 10)
    parts = {f"{i}": {"type": "array", "items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(100)}
    costly = {"type": "array", "prefixItems": [{"type": "array", "maxItems": 1000}, {"type": "string", "pattern": "("}], "minItems": 2}
    source = GrammarSource(Kind.JSON_SCHEMA, json.dumps({"$ref": "#/$defs/0", "$defs": {**parts, "100": costly}}))
    with pytest.raises(GrammarInvalid, match="regex") as caught:
        grammars.compile(source)
    assert caught.value.pointer.startswith("#/$defs/"), "as far as it was found"
    assert next(ticks) < 10, "each try looks at the clock once"


@pytest.mark.parametrize(
    ("kind", "source", "complaint"),
    [
        (Kind.JSON_SCHEMA, "tru", "not JSON"),
        (Kind.REGEX, "[a", "unclosed character class"),
        (Kind.REGEX, "(?=a)b", "look-around"),
        (Kind.REGEX, r"(a)\1", "backreferences"),
        (Kind.CHOICE, "[]", "1 to"),
        (Kind.GRAMMAR, "root = x", "Expected ::="),
        (Kind.GRAMMAR, "root ::= x", "'x' not found"),
        (Kind.GRAMMAR, 'a ::= "x"', "No 'root' rule"),
        (Kind.GRAMMAR, 'root ::= "\\ud800"', "stands for no character"),
        (Kind.GRAMMAR, "start: x", "unknown name"),
        (Kind.GRAMMAR, "start: start", "nothing can complete it"),
        (Kind.GRAMMAR, 'start: %json {"not": {}}', "not is not supported"),
        (Kind.GRAMMAR, "start: %json {", "expected a JSON Schema"),
    ],
)
def test_a_source_that_does_not_compile_says_why(kind: Kind, source: str, complaint: str) -> None:
    with pytest.raises(GrammarInvalid, match=complaint):
        of_kind(kind, source)


def _chain(n: int, rule: str) -> str:
    """Rules of which each needs the next."""
    return "\n".join(["start: r0", *(f"r{i}: {rule.replace('NEXT', f'r{i + 1}')}" for i in range(n)), f'r{n}: "x"'])


REFUSED = '{"not": {}}'
HOSTILE = {
    "a schema behind a special token's name, which is no expression": (
        Kind.GRAMMAR,
        f'start: <think> "a" </think> %json {REFUSED} /x/',
    ),
    "a schema behind an expression with the end of a line in it": (Kind.GRAMMAR, f"start: /x\n/ %json {REFUSED} /y\n/"),
    "bounds of which each place has those of all": (
        Kind.JSON_SCHEMA,
        json.dumps(
            {
                "prefixItems": [{"$ref": "#/$defs/a", "minimum": i} for i in range(400)],
                "$defs": {"a": {"anyOf": [{"type": "number", "exclusiveMinimum": i} for i in range(1000)]}},
            }
        ),
    ),
    "60,000 levels of schemas": (Kind.JSON_SCHEMA, '{"items":' * 60_000 + "{}" + "}" * 60_000),
    "100 levels of schemas": (Kind.JSON_SCHEMA, '{"items":' * 100 + "{}" + "}" * 100),
    "30,000 parts under a long name": (
        Kind.JSON_SCHEMA,
        json.dumps({"properties": {"\U0001f600" * 65_500: {"anyOf": [0] * 32_000}}}, ensure_ascii=False, separators=(",", ":")),
    ),
    "4,000 parts under a long name": (Kind.JSON_SCHEMA, json.dumps({"properties": {"x" * 60_000: {"anyOf": [{}] * 4000}}})),
    "20,000 parts that hold everything": (Kind.JSON_SCHEMA, '{"anyOf":[' + "true," * 20_000 + "true]}"),
    "10,000 levels of constants": (Kind.JSON_SCHEMA, '{"const":' + "[" * 10_000 + "]" * 10_000 + "}"),
    "60,000 parentheses": (Kind.GRAMMAR, "root ::= " + "(" * 60_000 + '"x"'),
    "15,000 parentheses": (Kind.GRAMMAR, "root ::= " + "(" * 15_000 + '"x"' + ")" * 15_000),
    "15,000 parentheses in Lark": (Kind.GRAMMAR, "start: " + "(" * 15_000 + '"x"' + ")" * 15_000),
    "65,000 empty lines": (Kind.GRAMMAR, "\n" * 65_000),
    "200,000 rules": (Kind.GRAMMAR, _chain(200_000, '"a" NEXT | "b"')),
    "1,000 rules in 60,000 characters": (
        Kind.GRAMMAR,
        "".join(f"r{i} ::= {'. ' * 25} r{i + 1}\n" for i in range(999)).replace("r0", "root") + 'r999 ::= "x"',
    ),
    "2,000 rules": (Kind.GRAMMAR, _chain(2000, "NEXT").replace(": ", " ::= ").replace("start", "root")),
    "15,000 groups": (Kind.REGEX, "(" * 15_000 + "a" + ")" * 15_000),
    "a million repetitions": (Kind.REGEX, "(((a{1,100}){1,100}b){1,100}c){1,100}(?=x)"),
    "ambiguous without end": (Kind.GRAMMAR, "start: A\nA: /(.*a.{20})/ & /(.*b.{20})/ & ~/(.*c.{20})/"),
    "too many cases": (
        Kind.JSON_SCHEMA,
        json.dumps({"allOf": [{"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(10)]} for i in range(10)]}),
    ),
    "a hundred million items": (Kind.JSON_SCHEMA, '{"type":"array","maxItems":100000000}'),
    "five billion items": (Kind.JSON_SCHEMA, '{"type":"array","minItems":5000000000}'),
    "a hundred million items within a grammar": (Kind.GRAMMAR, 'start: %json {"type":"array","maxItems":100000000}'),
    "many items behind fewer than none": (
        Kind.JSON_SCHEMA,
        '{"properties":{"a":{"type":"string","minItems":-1000000000,"maxItems":-1000000000},"b":{"type":"array","maxItems":100000000}}}',
    ),
    "a bound of 400 digits": (Kind.JSON_SCHEMA, '{"type":"number","exclusiveMinimum":1' + "0" * 400 + "}"),
    "above 0 and up to a half, as it was written before": (
        Kind.JSON_SCHEMA,
        '{"type":"number","minimum":0,"exclusiveMinimum":true,"maximum":0.5}',
    ),
    "many items in many parts": (
        Kind.JSON_SCHEMA,
        json.dumps({"properties": {f"a{i}": {"type": "array", "maxItems": 1000} for i in range(20)}}),
    ),
    "above 0 and up to a half": (Kind.JSON_SCHEMA, '{"type":"number","exclusiveMinimum":0,"maximum":0.5}'),
    "below -1, above -1.5": (Kind.JSON_SCHEMA, '{"type":"number","exclusiveMinimum":-1.5,"exclusiveMaximum":-1}'),
    "below 0, from -0.5 on": (Kind.JSON_SCHEMA, '{"type":"number","minimum":-0.5,"exclusiveMaximum":0}'),
    "numbers that the compiler writes as others": (Kind.JSON_SCHEMA, '{"enum": [1, {"a": [1234567890123456789]}]}'),
    "a hundred million multiples": (Kind.JSON_SCHEMA, '{"type":"integer","multipleOf":123456789,"minimum":1000000,"maximum":99999999999}'),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_sources_are_refused(name: str) -> None:
    with pytest.raises(GrammarInvalid):
        of_kind(*HOSTILE[name])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "number", "exclusiveMinimum": 0},
        {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 9},
        {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
        {"type": "integer", "exclusiveMinimum": -(1 << 63)},
        {"type": "integer", "minimum": 1 - (1 << 63)},
        {"type": "array", "items": {"type": "array", "maxItems": 1000}, "maxItems": 1000},
        {"enum": [1 << 53, -(1 << 53), 0.1]},
        {"type": "integer", "maximum": 1 << 60},
        {"type": "integer", "minimum": 0, "maximum": (1 << 64) - 1},
        {"type": "number", "minimum": 0, "maximum": sys.float_info.max},
        {"type": "number", "exclusiveMinimum": -sys.float_info.max, "exclusiveMaximum": sys.float_info.max},
        {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 3.4028235e38},
        {"type": ["number", "null"], "minimum": -(1 << 63), "maximum": (1 << 63) - 1},
        {"minimum": 1 - (1 << 96), "maximum": (1 << 96) - 1},
        {"type": "number", "anyOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]},
        {"type": "number", "anyOf": [{"exclusiveMinimum": 0, "maximum": 7}, {"exclusiveMaximum": 0, "minimum": -7}]},
        {"type": "integer", "exclusiveMinimum": 0, "allOf": [{"maximum": 9}, {"minimum": 0}]},
    ],
)
def test_bounds_that_people_write_are_taken(schema: Any) -> None:
    assert of_schema(schema)


def test_a_bound_beyond_what_floats_are_compiled_with_takes_what_is_within() -> None:
    grammar = of_schema({"type": "number", "exclusiveMinimum": 0, "maximum": sys.float_info.max})
    assert [takes(grammar, text) for text in ("0", "-1", "0.5", "1000000000000", "1" + 20 * "0")] == [False, False, True, True, False]
    nullable = of_schema({"type": ["integer", "null"], "maximum": (1 << 63) - 1})
    assert takes(nullable, "9223372036854775000"), "whole numbers have all their bits"


def test_a_schema_within_a_grammar_is_no_longer_than_one_that_comes_alone() -> None:
    with pytest.raises(GrammarInvalid, match="131072 are the most"):
        json_rule(json.dumps({"description": "x" * N_CHARS_MAX["schema"]}))


@pytest.mark.parametrize("text", ['"' + '\\"' * 32_000, "/" + "\\/" * 32_000, "<" * 64_000])
def test_where_a_schema_begins_in_lark_is_found_in_one_pass_over_it(text: str) -> None:
    started_s = time.process_time()
    with pytest.raises(GrammarInvalid):
        of_kind(Kind.GRAMMAR, f'start: "a"\n{text}')
    assert time.process_time() - started_s < 5, "each mark was tried from where it stands: 12 s"


def test_a_sources_language_is_found_in_one_pass_over_it() -> None:
    started_s = time.process_time()
    with pytest.raises(GrammarInvalid):
        of_kind(Kind.GRAMMAR, "\n" * 65_000)
    assert time.process_time() - started_s < 5, "empty lines were looked at from each of them: 24 s"


def _references(n: int) -> str:
    return json.dumps({"$ref": "#/$defs/0", "$defs": {**{f"{i}": {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(n)}, f"{n}": {}}})


DEEP = {
    "rules": (Kind.GRAMMAR, _chain(5000, "NEXT"), b"x"),
    "rules with more than one way": (Kind.GRAMMAR, _chain(2500, '"a" NEXT | "b"'), b"a" * 900 + b"b"),
    "terminals": (Kind.GRAMMAR, _chain(2500, '"a" NEXT|"b"').replace("r", "R").replace("staRt", "start"), b"a" * 2000 + b"b"),
    "references": (Kind.JSON_SCHEMA, _references(2000), b"[[[[1]]]]"),
}


@pytest.mark.parametrize("name", DEEP)
def test_the_deepest_that_is_taken_compiles_and_is_followed_on_an_ordinary_stack(name: str) -> None:
    kind, source, text = DEEP[name]
    assert len(source) < N_CHARS_MAX["schema" if kind is Kind.JSON_SCHEMA else "other"]
    state = of_kind(kind, source).start()
    for token in text:
        state.mask()
        state.accept(token)
        assert state.failure is None


# --- states ------------------------------------------------------------------------------------------------------------


def test_a_state_is_rebuilt_from_its_tokens() -> None:
    grammar = of_schema({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]})
    state = grammar.start()
    for n, byte in enumerate(b'{"a": "x"}'):
        assert allowed(grammar.start(list(b'{"a": "x"}'[:n])).mask()) == allowed(state.mask())
        state.accept(byte)
    assert state.is_done
    assert grammar.start(list(b'{"a": "x"}')).is_done


def test_states_of_one_grammar_do_not_disturb_one_another() -> None:
    grammar = of_kind(Kind.REGEX, "ab|cd")
    first, second = grammar.start(), grammar.start()
    first.accept(ord("a"))
    second.accept(ord("c"))
    assert allowed(first.mask()) == {ord("b")}
    assert allowed(second.mask()) == {ord("d")}


def test_a_token_that_is_not_allowed_fails_the_state_for_good() -> None:
    state = of_kind(Kind.REGEX, "ab").start()
    state.accept(ord("x"))
    assert state.failure is not None
    assert allowed(state.mask()) == set()


def test_a_string_may_be_long_where_its_length_is_bounded() -> None:
    state = of_schema({"type": "string", "maxLength": 100_000, "minLength": 5}).start()
    for token in b'"' + b"a" * N_CHARS_COUNTED_MAX:
        state.mask()
        state.accept(token)
        assert state.failure is None, "of the lexer's states there are nine for each character, and no more than are kept"
    assert allowed(state.mask()) == {ord('"')}, "who allows more is content with so many"


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lexer that soon has too many."""
    limits = LLParserLimits(step_lexer_fuel=100_000, max_lexer_states=1000)
    monkeypatch.setattr(grammar_module, "_LIMITS", limits)


BOUNDED = GrammarSource(Kind.JSON_SCHEMA, '{"type": "string", "maxLength": 4000}')


def _make(make: Callable[[], LLMatcher]) -> LLMatcher:
    return make()


def _n_accepted(state: GrammarState, text: bytes) -> int:
    """How far a text goes on."""
    for n, token in enumerate(text):
        state.mask()
        state.accept(token)
        if state.failure is not None:
            return n
    return len(text)


@pytest.mark.usefixtures("few_states")
def test_a_text_goes_on_though_the_lexer_has_had_too_many_states() -> None:
    grammar = Grammars(FakeVocabulary()).compile(BOUNDED, _make)
    origin, state = grammar.origin, grammar.start()
    text = b'"' + b"abcdefgh" * 60
    assert _n_accepted(state, text) == len(text)
    assert grammar.origin is not origin, "the grammar was made anew"
    assert allowed(state.mask()) == allowed(compiled(BOUNDED).start(text).mask())
    state.accept(ord('"'))
    assert state.is_done


@pytest.mark.usefixtures("few_states")
def test_a_text_that_needs_too_many_states_by_itself_fails_alone() -> None:
    grammars = Grammars(FakeVocabulary())
    grammar = grammars.compile(BOUNDED, _make)
    others = [grammar.start(b'"' + b"b" * n) for n in range(0, 30, 10)]
    long = grammar.start()
    assert 300 < _n_accepted(long, b'"' + b"a" * 2000) < 1000, "it has a state for each byte, and nine with their masks"
    assert long.failure is not None
    assert "too many states" in long.failure
    for other in (*others, grammar.start(b'"')):
        assert _n_accepted(other, b'bc"') == 3
        assert other.is_done
    assert allowed(long.mask()) == set(), "a failure is for good"
    assert grammars.known(BOUNDED) is grammar


def test_texts_that_fit_by_themselves_go_on_though_others_fill_the_lexer_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_LIMITS", LLParserLimits(step_lexer_fuel=100_000, max_lexer_states=2000))
    grammar = Grammars(FakeVocabulary()).compile(GrammarSource(Kind.JSON_SCHEMA, '{"type": "string", "maxLength": 600}'), _make)
    text, n_apart = b'"' + b"abcdefgh" * 62, 70
    states = [grammar.start() for _ in range(4)]
    for n in range(len(text) + n_apart * len(states)):  # where they are in the text decides which states they need
        for i, state in enumerate(states):
            if 0 <= n - n_apart * i < len(text):
                state.mask()
                state.accept(text[n - n_apart * i])
                assert state.failure is None


@pytest.mark.usefixtures("few_states")
def test_a_token_that_meets_a_full_lexer_is_taken_with_the_next_mask() -> None:
    """Tokens are told between two steps, where there is no time to make a grammar anew."""
    grammar = Grammars(FakeVocabulary()).compile(BOUNDED, _make)
    state, origin = grammar.start(b'"'), grammar.origin
    state.mask()
    filling, token = origin.deep_copy(), ord('"')
    while not filling.is_error():
        filling.compute_bitmask()
        filling.consume_token(token)
        token = ord("a")
    state.accept(ord("a"))
    assert grammar.origin is origin
    assert state.failure is None
    assert not state.is_done
    assert ord("b") in allowed(state.mask())
    assert grammar.origin is not origin


@pytest.mark.usefixtures("few_states")
@pytest.mark.parametrize(("on_stack", "is_slow"), [(None, False), (lambda make: None, False), (_make, True)])
def test_a_grammar_that_cannot_be_made_anew_is_compiled_for_the_next_request(on_stack: OnStack | None, is_slow: bool) -> None:
    grammars = Grammars(FakeVocabulary(), clock=itertools.count(step=1 if is_slow else 0).__next__)
    spent = grammars.compile(BOUNDED, on_stack)
    assert _n_accepted(spent.start(), b'"' + b"a" * 200) < 200
    assert grammars.known(BOUNDED) is None
    fresh = grammars.compile(BOUNDED, on_stack)
    assert grammars.known(BOUNDED) is fresh
    assert _n_accepted(fresh.start(), b'"b"') == 3


def test_a_token_that_takes_too_much_of_everybodys_step_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "_LIMITS", LLParserLimits(step_lexer_fuel=500))
    grammar = Grammars(FakeVocabulary()).compile(GrammarSource(Kind.REGEX, "x([ab]*a[ab]{40}){1,50}|y[a-z]*"), _make)
    cheap, costly = grammar.start(), grammar.start()
    assert _n_accepted(cheap, b"ya") == 2
    assert 10 < _n_accepted(costly, b"x" + b"aab" * 20) < 60
    assert _n_accepted(cheap, b"bc") == 2
    assert _n_accepted(grammar.start(), b"yb") == 2


class _WithoutQuotes(FakeVocabulary):
    """A vocabulary in which nothing can be quoted."""

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        return b"'" if token == ord('"') else super().token_bytes(token, special=special)


def test_a_vocabulary_that_cannot_spell_any_answer_is_told_of_when_compiling() -> None:
    with pytest.raises(GrammarInvalid, match="no answer could fit"):
        Grammars(_WithoutQuotes()).compile(GrammarSource(Kind.JSON_SCHEMA, '{"type":"string"}'))


def test_a_dead_end_in_mid_text_fails_the_state() -> None:
    state = Grammars(_WithoutQuotes()).compile(GrammarSource(Kind.REGEX, 'a"')).start()
    state.accept(ord("a"))
    assert allowed(state.mask()) == set()
    assert state.failure is not None


class _WithoutEnd(FakeVocabulary):
    """A vocabulary of a model that never ends a text."""

    def __init__(self) -> None:
        super().__init__()
        self.end_tokens = frozenset()


def test_without_end_tokens_a_text_still_ends_where_nothing_may_follow() -> None:
    state = Grammars(_WithoutEnd()).compile(GrammarSource(Kind.REGEX, "a?b")).start()
    state.accept(ord("b"))
    assert state.is_done


# --- what is kept ------------------------------------------------------------------------------------------------------


def test_what_was_compiled_is_kept_until_enough_others_came() -> None:
    grammars = Grammars(FakeVocabulary())
    assert grammars.known(ANY_OBJECT) is None
    grammar = grammars.compile(ANY_OBJECT)
    for i in range(N_GRAMMARS_KEPT - 1):
        grammars.compile(GrammarSource(Kind.REGEX, f"a{i}"))
        assert grammars.known(ANY_OBJECT) is grammar
    for i in range(N_GRAMMARS_KEPT):
        grammars.compile(GrammarSource(Kind.REGEX, f"b{i}"))
    assert grammars.known(ANY_OBJECT) is None


def test_equal_vocabularies_are_made_ready_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps everything else from running, and models are loaded beside others that generate."""
    made, make = [], grammar_module.LLTokenizer

    def counted(*given: Any, **named: Any) -> Any:
        made.append(given)
        return make(*given, **named)

    monkeypatch.setattr(grammar_module, "LLTokenizer", counted)
    monkeypatch.setattr(grammar_module, "_tokenizers", OrderedDict())
    for vocabulary in (FakeVocabulary(), _WithoutEnd(), FakeVocabulary(), _WithoutQuotes(), _WithoutEnd(), FakeVocabulary(300)):
        Grammars(vocabulary)
    assert len(made) == 4
