"""Structured output: whatever the model draws fits what was asked for, and what OpenVINO cannot hold it to is refused by name."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from cllm.backend import FormKind, StreamForm, StreamRequest, Vocabulary
from cllm.errors import NotHeeded
from cllm.registry import vocabulary_of
from cllm_backend_openvino import forms
from cllm_backend_openvino.forms import Grammar
from cllm_backend_openvino.patterns import without
from cllm_backend_openvino.trials import Failed, Trials

from .test_model import PROMPT, Told, load

FIELD: Final = "response_format"
N_TRIES: Final = 6  # with ever less of what the model likes, so that every corner of a form is drawn sometimes


def test_ranges_without_others_are_those_that_are_left() -> None:
    dice = random.Random(7)
    for _ in range(300):
        ranges, removed = ([(a, a + dice.randrange(6)) for a in dice.choices(range(40), k=dice.randrange(7))] for _ in range(2))
        left = without(ranges, removed)
        held = [{c for low, high in some for c in range(low, high + 1)} for some in (ranges, removed, left)]
        assert held[2] == held[0] - held[1]
        assert list(left) == sorted(left)


class Asker:
    """Asks for answers of a form."""

    def __init__(self, path: Path) -> None:
        self.told = Told(load(path))
        vocabulary = vocabulary_of(self.told.model)
        assert vocabulary is not None
        self.vocabulary: Vocabulary = vocabulary
        self._seq_id = 0

    def ask(self, form: StreamForm, **fields: Any) -> tuple[str, bool]:
        """An answer's text, and whether it came to its end."""
        self._seq_id += 1
        end = {"end_tokens": self.vocabulary.end_tokens, "n_tokens_max": 200, "seed": self._seq_id}
        tokens = self.told.ask(self._seq_id, **{**end, "form": form, **fields})
        data = b"".join(self.vocabulary.token_bytes(token, special=bool(form.after)) for token in tokens)
        is_over = tokens[-1] in self.vocabulary.end_tokens
        return data.decode(errors="strict" if is_over and not form.after else "replace"), is_over

    def answers(self, kind: FormKind, source: str) -> list[str]:
        """Those of several answers that came to their end."""
        answers = [self.ask(StreamForm(kind, source, FIELD), temperature=4.0**i if i else 0.0) for i in range(N_TRIES)]
        return [text for text, is_over in answers if is_over]


@pytest.fixture(scope="module")
def asker(tiny: Path) -> Iterator[Asker]:
    made = Asker(tiny)
    yield made
    made.told.model.close()


def is_person(value: Any) -> bool:
    return isinstance(value["b"], str) and isinstance(value.get("a", 1), int) and isinstance(value.get("c", True), bool)


CHAIN: Final = {
    "$defs": {"n": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, "required": ["next"]}},
    "$ref": "#/$defs/n",
}
ENDLESS: Final[list[tuple[Any, Callable[[Any], bool]]]] = [  # an answer may be as long as it likes, so that many are cut
    ({"type": "object"}, lambda value: isinstance(value, dict)),
    ({"properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "boolean"}}, "required": ["b"]}, is_person),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, lambda value: all(isinstance(one, int) for one in value.values())),
]
SCHEMAS: Final[list[tuple[Any, Callable[[Any], bool]]]] = [
    ({"type": "object", "properties": {"a": {"type": "null"}}}, lambda value: value in ({}, {"a": None})),
    ({"type": "object", "additionalProperties": False}, lambda value: value == {}),
    (
        {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 4},
        lambda value: 2 <= len(value) <= 4 and set(value) <= {1, 2},
    ),
    (
        {"prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False},
        lambda value: isinstance(value[0], int) and value[1] is None,
    ),
    ({"type": "array", "maxItems": 0}, lambda value: value == []),
    ({"type": "string", "minLength": 2, "maxLength": 5}, lambda value: 2 <= len(value) <= 5),
    ({"type": "string", "pattern": "^a+[b-d]{2}$"}, lambda value: re.search("^a+[b-d]{2}$", value) is not None),
    ({"type": "string", "pattern": "^[^a-z]{1,3}$"}, lambda value: re.search("^[^a-z]{1,3}$", value) is not None),
    ({"type": "string", "format": "date"}, lambda value: re.fullmatch(r"\d{4}-\d\d-\d\d", value) is not None),
    ({"type": "integer", "minimum": -13, "maximum": 105}, lambda value: isinstance(value, int) and -13 <= value <= 105),
    ({"type": "integer", "minimum": 987, "exclusiveMaximum": 12045}, lambda value: 987 <= value < 12045),
    ({"type": "number", "minimum": -1.5, "maximum": 98.25}, lambda value: -1.5 <= value <= 98.25),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 2}, lambda value: 0 < value < 2),
    ({"enum": ["a", 'é"\\\n', 5, None, {"a": [1, 2]}, "😀"]}, lambda value: value in ["a", 'é"\\\n', 5, None, {"a": [1, 2]}, "😀"]),
    ({"type": ["string", "null"], "maxLength": 3}, lambda value: value is None or len(value) <= 3),
    (CHAIN, lambda value: set(value) == {"next"}),
    ({"properties": {'n"q\n': {"const": 1}, "é": {"$ref": "#/properties/n%22q%0A"}}, "required": ["é"]}, lambda value: value["é"] == 1),
]


@pytest.mark.parametrize(("schema", "fits"), SCHEMAS, ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "")
def test_what_fits_a_schema_is_all_that_is_said(asker: Asker, schema: Any, fits: Callable[[Any], bool]) -> None:
    answers = asker.answers("json_schema", json.dumps(schema))
    assert answers
    for text in answers:
        assert fits(json.loads(text)), text


def test_what_fits_a_schema_is_all_that_is_said_where_an_answer_may_be_as_long_as_it_likes(asker: Asker) -> None:
    answers = [(fits, text) for schema, fits in ENDLESS for text in asker.answers("json_schema", json.dumps(schema))]
    assert answers, "all were cut"
    for fits, text in answers:
        assert fits(json.loads(text)), text


@pytest.mark.parametrize(
    "pattern",
    [
        "a+b{2,3}",
        r"[^\s]{1,5}",
        "(foo|ba[rz])?x",
        r"\d{3}-\d{4}",
        ".{3}",
        "^ab$",
        r"\w+\W",
        r"[\]\-a]{2}",
        r"\x41\u00e9",
        "(?:a|b)*?c",
        "é{2}",
        "a{0}b",
        "([0-9]+)?x",
        "(a{2}){3}",
        "(?:(?:[A-Z]{1,2})?b){1,2}",
    ],
)
def test_all_of_an_answer_matches_a_regular_expression(asker: Asker, pattern: str) -> None:
    answers = asker.answers("regex", pattern)
    assert answers
    for text in answers:
        assert re.fullmatch(pattern, text, re.ASCII), text


@pytest.mark.parametrize("choices", [["yes", "no"], ['é"x\\', "a\nb", "😀"], ["", "a"]])
def test_an_answer_is_one_of_the_choices(asker: Asker, choices: list[str]) -> None:
    answers = asker.answers("choice", json.dumps(choices))
    assert answers
    assert set(answers) <= set(choices)


def test_what_comes_before_the_end_of_reasoning_is_free(asker: Asker) -> None:
    form = StreamForm("regex", "[0-9]{3}", FIELD, after="4")
    answers = [asker.ask(form, temperature=2.0 ** (i + 1), seed=i) for i in range(8)]
    ended = [text for text, is_over in answers if is_over]
    assert ended
    for text in ended:
        assert re.fullmatch(r"[^4]*4[ \n]{0,4}[0-9]{3}<\|[a-z_]+\|>", text), text


# --- what is refused ---------------------------------------------------------------------------------------------------


def held(kind: FormKind, source: Any, **fields: Any) -> StreamRequest:
    text = source if isinstance(source, str) else json.dumps(source)
    return StreamRequest(prompt=PROMPT, n_tokens_max=8, form=StreamForm(kind, text, FIELD), **fields)


@pytest.mark.parametrize(
    ("kind", "source", "complaint"),
    [
        ("json_schema", {"type": "integer", "multipleOf": 7}, "multipleOf (at #)"),
        ("json_schema", {"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems (at #/properties/a)"),
        ("json_schema", {"not": {}}, "not (at #)"),
        ("json_schema", {"allOf": [{"type": "string"}, {"maxLength": 3}]}, "allOf of several (at #)"),
        ("json_schema", {"anyOf": [{"type": "string"}], "maxLength": 3}, "anyOf beside maxLength (at #)"),
        (
            "json_schema",
            {"properties": {"a": {}}, "additionalProperties": {"type": "null"}},
            "additionalProperties beside properties (at #)",
        ),
        ("json_schema", {"patternProperties": {"a": {}}}, "patternProperties (at #)"),
        ("json_schema", {"type": "string", "format": "idn-email"}, "format idn-email (at #)"),
        ("json_schema", {"type": "string", "pattern": "^a$", "maxLength": 3}, "pattern, format and length beside one another (at #)"),
        ("json_schema", {"type": "string", "pattern": '^"$'}, "quotes, backslashes and control characters in a pattern"),
        ("json_schema", {"minimum": 0.2, "maximum": 0.8}, "a range without a whole number (at #)"),
        ("json_schema", {"enum": [1], "maximum": 3}, "maximum beside enum or const (at #)"),
        ("json_schema", {"type": "object", "minProperties": 1}, "minProperties (at #)"),
        ("regex", r"a\bc", r"\b in a regular expression, at character 3"),
        ("regex", "(?=a)b", "(?= in a regular expression, at character 2"),
        ("regex", "[a&&b]", "&& in a regular expression, at character 2"),
        ("regex", r"\p{Greek}", r"\p in a regular expression, at character 2"),
        ("regex", "(.{1,200}x){1,200}", "counted characters: 80003 of them would take too long to compile, 500 are the most"),
        ("regex", "([一-龥가]{1,200}x){1,200}", "counted characters: 40424 of them would take too long to compile, 500 are the most"),
        ("regex", "((é{200}){200}){200}", "counted characters: 84211 of them would take too long to compile, 500 are the most"),
        ("grammar", 'root ::= "a"', "it"),
    ],
)
def test_what_an_answer_cannot_be_held_to_is_refused_with_its_place(kind: FormKind, source: Any, complaint: str) -> None:
    with pytest.raises(NotHeeded) as caught:
        forms.grammar_of(held(kind, source))
    assert caught.value.param == FIELD
    assert str(caught.value) == f"{FIELD}: this model's backend cannot hold an answer to {complaint}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"n_tokens_min": 3, "end_tokens": frozenset({1})}, "min_tokens"), ({"barred_tokens": frozenset({1})}, "ignore_eos")],
)
def test_what_would_go_against_the_form_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(NotHeeded) as caught:
        forms.grammar_of(held("regex", "a", **fields))
    assert caught.value.param == param


def refusal(asker: Asker, request: StreamRequest, seq_id: int) -> NotHeeded:
    told = asker.told
    told.model.start(seq_id, request)
    told.until(lambda: seq_id in told.ends)
    error = told.ends[seq_id].refusal
    assert isinstance(error, NotHeeded)
    return error


def test_a_stop_token_that_the_form_may_need_is_refused(asker: Asker) -> None:
    (token,) = asker.vocabulary.tokenize("a", add_special=False, parse_special=False)
    assert refusal(asker, held("regex", "a+b", end_tokens=frozenset({token})), 1001).param == "stop_token_ids"


def test_a_grammar_that_does_not_compile_is_refused_and_disturbs_nobody(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    told = asker.told
    told.model.start(1002, StreamRequest(prompt=PROMPT, n_tokens_max=100, temperature=0.0))
    told.until(lambda: len(told.tokens[1002]) > 3)
    monkeypatch.setitem(forms.KINDS, "regex", lambda source: "form ::= [unclosed")
    assert refusal(asker, held("regex", "a"), 1003).param == FIELD
    told.until(lambda: 1002 in told.ends)
    assert len(told.tokens[1002]) == 100
    assert told.ends[1002].error == ""


def test_what_the_compiler_complains_of_is_told_in_one_line(asker: Asker) -> None:
    trials = Trials(asker.told.model._pipeline.get_tokenizer())
    with pytest.raises(Failed) as caught:
        trials.compile(Grammar("root ::= missing", ""))
    assert "missing" in str(caught.value)
    assert "/" not in str(caught.value)
    trials.compile(Grammar('root ::= "a"', ""))
    assert trials.knows(Grammar('root ::= "a"', ""))
    trials.close()


# --- many at once ------------------------------------------------------------------------------------------------------


def test_those_with_a_form_and_those_without_are_answered_beside_one_another(asker: Asker) -> None:
    """More than run at once, one after the other with new forms and old ones, and some given up while they wait for theirs."""
    told = asker.told
    first = 2000
    for round_ in range(6):
        ids = range(first + 4 * round_, first + 4 * round_ + 4)
        for i in ids:
            form = StreamForm("regex", f"[a-c]{{{i % 3 + round_ + 1}}}", FIELD) if i % 4 else None
            request = StreamRequest(
                prompt=PROMPT, n_tokens_max=20, temperature=1.0, seed=i, form=form, end_tokens=asker.vocabulary.end_tokens
            )
            told.model.start(i, request)
        told.model.cancel(ids[round_ % 4])
        left = set(ids) - {ids[round_ % 4]}
        told.until(lambda left=left: told.ends.keys() >= left)  # type: ignore[misc]
        for i in left:
            assert (told.ends[i].error, told.ends[i].refusal) == ("", None)
            if i % 4:
                text = b"".join(asker.vocabulary.token_bytes(one.token) for one in told.tokens[i]).decode()
                assert re.fullmatch(f"[a-c]{{{i % 3 + round_ + 1}}}", text)
