"""Finds out in which family's form a chat template has tools called."""

from __future__ import annotations

import re
from typing import Final

from cllm.text import channels
from cllm.text.call_formats import (
    APRIEL,
    COHERE,
    DEEPSEEK,
    DEEPSEEK_JSON,
    DSML,
    FUNCTIONARY,
    GEMMA,
    GLM,
    GRANITE,
    HARMONY,
    HERMES,
    KIMI,
    LFM,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    NEMOTRON,
    PHI,
    QWEN_CODER,
    SEED,
    CallFormat,
)
from cllm.text.call_reader import CallReader
from cllm.text.tools import Tool

_SIGNS: Final = (  # of each form, of which one must be in the template, with all that it has; the first that fits counts
    (DEEPSEEK_JSON, (DEEPSEEK.begin, "```json")),
    (DEEPSEEK, (DEEPSEEK.begin,)),
    (MISTRAL_ARGS, (MISTRAL.begin, "[ARGS]")),
    (MISTRAL, (MISTRAL.begin,)),
    (DSML, ("｜DSML｜",)),
    (COHERE, (COHERE.begin,)),
    (GEMMA, (f"{GEMMA.begin}call:",)),
    (SEED, (SEED.begin,)),
    (MINIMAX, (MINIMAX.begin,)),
    (KIMI, (KIMI.begin,)),
    (LFM, (LFM.begin,)),
    (LFM, ("<|tool_list_start|>",)),
    (LFM, ("List of tools: [",)),  # in LFM2.5, whose template has no markers
    (NEMOTRON, (NEMOTRON.begin,)),
    (GLM, (GLM.begin, "<arg_key>")),
    (QWEN_CODER, (QWEN_CODER.begin, "<function=")),
    (APRIEL, (APRIEL.begin,)),
    (HERMES, (HERMES.begin,)),
    (FUNCTIONARY, (FUNCTIONARY.begin,)),
    (GRANITE, (GRANITE.begin, "<|start_of_role|>")),
    (PHI, (PHI.begin,)),
    (PHI, ("<|tool|>",)),
    (LLAMA, (LLAMA.begin,)),
)

_BARE: Final = re.compile(r'\{[^{}]*"name":\s*"look_up",\s*"parameters"')  # where an answer may begin that is a call without a marker


def format_of(template: str, written: str = "") -> CallFormat | None:
    """The form that a chat template's source speaks of, and in which it has `written` a call of `look_up`, if it has.

    None when it is none that is known.
    """
    if channels.is_written_in(template):
        return HARMONY
    found = [form for form, signs in _SIGNS if all(sign in template for sign in signs)]
    found += [LLAMA] if re.search(r'"parameters"\s*:', template) else []
    return next((form for form in found if _has_written(form, written)), None)


def _has_written(form: CallFormat, text: str) -> bool:
    """Whether the form's own reader tells the call in `text`, if there is one: markers may stand among others, or around another form."""
    if "look_up" not in text:
        return True
    if form.bare:
        begun = _BARE.search(text)
        text = text[begun.start() :] if begun else "".join(text.partition(form.begin)[1:])
    reader = CallReader(form, [Tool("look_up")], assured=False, single=True, keeps_blanks=False)
    reader.push(text)
    return reader.is_done
