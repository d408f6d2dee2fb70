"""The chat template for models that bring none."""

from __future__ import annotations

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
