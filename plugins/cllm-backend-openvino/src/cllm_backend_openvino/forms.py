"""What an answer must look like, in OpenVINO's words; what it would hold otherwise than asked is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs

from cllm.backend import StreamForm, StreamRequest
from cllm.errors import NotHeeded
from cllm_backend_openvino import schemas
from cllm_backend_openvino.patterns import NotHeld

KINDS: Final[dict[str, Callable[[str], str]]] = {"json_schema": schemas.rules_of, "regex": schemas.regex_of, "choice": schemas.choice_of}
"""The kinds of forms that it takes. Other grammars may be such that a step of theirs takes as long as they like."""

_BLANKS: Final = "[ \\n]{0,4}"  # between reasoning and the form


@attrs.frozen
class Grammar:
    """A form as OpenVINO is told of it."""

    text: str
    after: str  # what ends the free text before it, if there is any

    def config(self) -> Any:
        """OpenVINO's configuration for it."""
        from openvino_genai import StructuredOutputConfig

        config = StructuredOutputConfig()
        if self.after:
            free = StructuredOutputConfig.Tag(begin="", content=StructuredOutputConfig.AnyText(), end=self.after)
            config.structural_tags_config = StructuredOutputConfig.Concat(free, StructuredOutputConfig.EBNF(self.text))
        else:
            config.grammar = self.text
        return config


def grammar_of(request: StreamRequest) -> Grammar | None:
    """Return what a request's answer is to be held to. Raises: NotHeeded for what OpenVINO cannot hold it to."""
    form = request.form
    if form is None:
        return None
    if request.n_tokens_min:
        raise NotHeeded(f"this model's backend cannot do min_tokens together with {_field(form)}", param="min_tokens")
    if request.barred_tokens:
        raise NotHeeded(f"this model's backend cannot do ignore_eos together with {_field(form)}", param="ignore_eos")
    return Grammar(_text(form), form.after)


def refusal_of(form: StreamForm, complaint: str) -> NotHeeded:
    """What the client is told of a form that cannot be held."""
    return NotHeeded(f"{_field(form)}: this model's backend cannot hold an answer to {complaint}", param=_field(form))


def _text(form: StreamForm) -> str:
    write = KINDS.get(form.kind)
    if write is None:
        raise refusal_of(form, "it")
    try:
        rules = write(form.source)
    except NotHeld as error:
        raise refusal_of(form, str(error)) from error
    except (AttributeError, RecursionError, TypeError, ValueError) as error:  # a schema of no schema's shape
        raise refusal_of(form, "what it does not know") from error
    return f"root ::= {_BLANKS if form.after else ''} form\n{rules}"


def _field(form: StreamForm) -> str:
    return form.field or form.kind
