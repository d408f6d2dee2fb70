"""Structured output: from what a request's fields say of the answer's form to the grammar that holds it to that.

A surface with fields of its own makes a `Form` with `schema_form` or `ANY_OBJECT`; `compiled` gives the grammar for the sequences' specs.
"""

from __future__ import annotations

import json
from typing import Annotated

import attrs
import msgspec
from msgspec import Meta

from cllm.api.context import Context, current_key
from cllm.api.sampling_fields import SamplingFields
from cllm.api.wire import NULL, is_nothing
from cllm.backend import FormKind, StreamForm
from cllm.errors import GrammarInvalid, InvalidRequest, NotHeeded
from cllm.serve.engine import ServedModel
from cllm.text import grammar
from cllm.text.grammar import Grammar, GrammarSource, Kind

_KINDS: dict[Kind, FormKind] = {  # the last one is for our own sources
    Kind.JSON_SCHEMA: "json_schema",
    Kind.REGEX: "regex",
    Kind.CHOICE: "choice",
    Kind.GRAMMAR: "grammar",
}


class JsonSchemaFormat(msgspec.Struct):
    """`response_format.json_schema`; `strict` changes nothing: a schema is always held to."""

    name: str | None = None
    description: str | None = None
    schema: msgspec.Raw = NULL
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """`response_format`."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: msgspec.Raw = NULL  # llama-server's place for it, beside json_object


class StructuredOutputs(msgspec.Struct):
    """`structured_outputs`, of which exactly one is given."""

    json: msgspec.Raw = NULL
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1, max_length=grammar.N_CHOICES_MAX)] | None = None
    grammar: str | None = None


class FormFields(SamplingFields, kw_only=True):
    """The fields that say what an answer must look like, by their wire names, beside those of sampling."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None
    json_schema: msgspec.Raw = NULL
    guided_json: msgspec.Raw = NULL  # these four are `structured_outputs` by vLLM's older names
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1, max_length=grammar.N_CHOICES_MAX)] | None = None
    guided_grammar: str | None = None


@attrs.frozen
class Form:
    """What an answer must look like, and the field that says so."""

    source: GrammarSource
    param: str

    @property
    def field(self) -> str:
        """What a client is told that the backend cannot do."""
        return "response_format" if self.param.startswith("response_format") else self.param


def form_of(fields: FormFields) -> Form | None:
    """What the fields ask for; None leaves the answer free. Raises: InvalidRequest."""
    named = [_response_format(fields), _structured_outputs(fields), _grammar(fields), _json_schema(fields)]
    forms = [form for form in (*named, *_guided(fields)) if form]
    if len(forms) > 1:
        first, second, *_ = (form.param.partition(".")[0] for form in forms)
        raise InvalidRequest(f"{second}: {first} says already what the answer must look like", param=second)
    return forms[0] if forms else None


def schema_form(schema: msgspec.Raw, param: str) -> Form:
    """The form of what fits a JSON Schema, which a client may also have sent as a string with JSON in it. Raises: InvalidRequest."""
    text = bytes(schema).decode("utf-8", "replace")
    if text.startswith('"'):
        text = msgspec.json.decode(schema, type=str)
    return Form(GrammarSource(Kind.JSON_SCHEMA, text), param)


def any_object(param: str) -> Form:
    """The form of any JSON object."""
    return Form(grammar.ANY_OBJECT, param)


def told(model: ServedModel, form: Form | None, *, after: str = "") -> StreamForm | None:
    """What a model that holds its answers to a form by itself is told of it, and of what ends the reasoning before; None for all others.

    Raises: NotHeeded for a kind of form that it cannot hold them to.
    """
    if form is None or model.heeds is None:
        return None
    kind = _KINDS[form.source.kind]
    if kind not in model.heeds:
        raise NotHeeded(f"this model's backend cannot do {form.field}", param=form.field)
    if model.reads_text:
        _check_text(form)
    return StreamForm(kind, form.source.text, form.field, after)


def _check_text(form: Form) -> None:
    """Refuse what is too long, and what is no JSON Schema at all, where nothing is compiled that would say so. Raises: InvalidRequest."""
    is_schema = form.source.kind is Kind.JSON_SCHEMA
    n_chars, n_max = len(form.source.text), grammar.N_CHARS_MAX["schema" if is_schema else "other"]
    if n_chars > n_max:
        raise InvalidRequest(f"{form.param}: it has {n_chars} characters, and {n_max} are the most that is taken", param=form.param)
    if not is_schema:
        return
    try:
        schema = json.loads(form.source.text, parse_constant=_no_constant)
        json.dumps(schema, allow_nan=False, ensure_ascii=False).encode()  # half a surrogate, and 1e999, could not be told on
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{form.param}: it is no JSON: {error}", param=form.param) from error
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequest(f"{form.param}: expected a schema, which is an object", param=form.param)


def _no_constant(name: str) -> None:
    raise ValueError(f"it has no {name}")


async def compiled(context: Context, model: ServedModel, form: Form | None) -> Grammar | None:
    """The grammar that holds an answer to `form`, where that is the engine's work. Where it is the model's, the form is compiled all the
    same, if there is a vocabulary to do it with: what cannot be held is told in the same words then, and in time.

    Raises: InvalidRequest, with the field, and the place in it · NotHeeded as `told` · Unavailable.
    """
    told(model, form)
    if form is None or model.reads_text:
        return None
    try:
        grammar = await context.engine.grammar(model, form.source, timeout_s=context.settings.grammar_timeout_s, key=current_key())
        return grammar if model.heeds is None else None
    except GrammarInvalid as error:
        extra = {"pointer": error.pointer} if error.pointer else {}
        raise InvalidRequest(f"{form.param}: {error}", param=form.param, code="invalid_schema" if extra else None, **extra) from error


# --- the fields --------------------------------------------------------------------------------------------------------


def _response_format(fields: FormFields) -> Form | None:
    given = fields.response_format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return any_object("response_format") if is_nothing(given.schema) else schema_form(given.schema, "response_format.schema")
    if given.type != "json_schema":
        raise InvalidRequest("response_format.type: expected text, json_object or json_schema", param="response_format.type")
    param = "response_format.json_schema.schema"
    schema = given.schema if given.json_schema is None else given.json_schema.schema
    if is_nothing(schema):
        raise InvalidRequest(f"{param}: it is missing", param=param)
    return schema_form(schema, param)


def _structured_outputs(fields: FormFields) -> Form | None:
    given = fields.structured_outputs
    if given is None:
        return None
    forms = _forms(given, "structured_outputs.")
    if len(forms) != 1:
        raise InvalidRequest("structured_outputs: expected exactly one of json, regex, choice and grammar", param="structured_outputs")
    return forms[0]


def _guided(fields: FormFields) -> list[Form]:
    return _forms(StructuredOutputs(fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar), "guided_")


def _forms(given: StructuredOutputs, prefix: str) -> list[Form]:
    forms = [] if is_nothing(given.json) else [schema_form(given.json, f"{prefix}json")]
    sources = {
        "regex": given.regex and GrammarSource(Kind.REGEX, given.regex),
        "choice": given.choice and GrammarSource(Kind.CHOICE, msgspec.json.encode(given.choice).decode()),
        "grammar": given.grammar and GrammarSource(Kind.GRAMMAR, given.grammar),
    }
    return forms + [Form(source, f"{prefix}{name}") for name, source in sources.items() if isinstance(source, GrammarSource)]


def _grammar(fields: FormFields) -> Form | None:
    return Form(GrammarSource(Kind.GRAMMAR, fields.grammar), "grammar") if fields.grammar else None


def _json_schema(fields: FormFields) -> Form | None:
    return None if is_nothing(fields.json_schema) else schema_form(fields.json_schema, "json_schema")
