"""Chat templates for models that bring none, or the name of one alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

# The form that most models of unknown descent have seen in training (ChatML). It says each turn's role, and nothing else.
CHATML: Final = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_MISTRAL_TURNS: Final = """\
{%- set turn = namespace(is_begun=false, is_asked=false) %}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role not in ('system', 'user') %}
        {{- ('LEAD[/INST]' if turn.is_begun and not turn.is_asked else '') + 'TRAIL' + ANSWER + eos_token }}
        {%- set turn.is_begun = false %}
        {%- set turn.is_asked = false %}
    {%- elif turn.is_asked %}
        {{- raise_exception('an answer is to follow what the user says') }}
    {%- else %}
        {{- '' if turn.is_begun else 'LEAD[INST]TRAIL' }}
        {%- set turn.is_begun = true %}
        {%- set turn.is_asked = message.role == 'user' %}
        {{- content + ('LEAD[/INST]' if turn.is_asked else '\\n\\n') }}
    {%- endif %}
{%- endfor %}
{{- 'LEAD[/INST]' if turn.is_begun and not turn.is_asked else '' }}
"""

_MISTRAL_MARKS: Final = """\
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]TRAIL' + content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'user' %}
        {{- '[INST]TRAIL' + content + '[/INST]' }}
    {%- else %}
        {{- 'TRAIL' + content + eos_token }}
    {%- endif %}
{%- endfor %}
"""


def _mistral(form: str, *, lead: str = "", trail: str = "", answer: str = "content") -> str:
    return form.replace("LEAD", lead).replace("TRAIL", trail).replace("ANSWER", answer)


NAMED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "chatml": CHATML,
        "mistral-v1": _mistral(_MISTRAL_TURNS, lead=" ", trail=" "),
        "mistral-v3": _mistral(_MISTRAL_TURNS, trail=" ", answer="content | trim"),
        "mistral-v3-tekken": _mistral(_MISTRAL_TURNS),
        "mistral-v7": _mistral(_MISTRAL_MARKS, trail=" "),
        "mistral-v7-tekken": _mistral(_MISTRAL_MARKS),
    }
)
"""By the names that llama.cpp and its converter write in the place of a template.

Source: the formats of Mistral's tokenisers, as llama.cpp's `llama_chat_apply_template` has them.
"""


def source_of(told: str | None) -> str | None:
    """Return the Jinja of what a model brings, which may be the name of a template alone; None where it is none that is known."""
    if told is None or "{" in told:  # without one, a template would say the same of every conversation
        return told or None
    return NAMED.get(told.strip())
