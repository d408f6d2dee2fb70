"""What the servers in use heed, and what they call it: so that nothing is sent that one would ignore."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

import attrs

N_LOGPROBS_MAX: Final = 20  # likely tokens that are told of a place: what OpenAI's reference says
_OPENAI: Final = {name: name for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty")}
_TOOLS: Final = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
_STRICT: Final = frozenset({"strict"})
_LOCAL: Final = _TOOLS | {"json_schema", "n_logprobs", "prompt", "ignore_eos", "template_variables"}


class Forms(Enum):
    """How a server takes forms that are no JSON Schema."""

    NONE = "none"
    STRUCTURED = "structured_outputs"
    GRAMMAR = "grammar"  # GBNF alone


class ToTheEnd(Enum):
    """How a prompt is completed to the end of the context. Most servers stop after 16 tokens unasked, as OpenAI's reference says."""

    UNASKED = "unasked"  # it goes on by itself
    CLIPPED = "clipped"  # a limit beyond the end is the end
    COUNTED = "counted"  # such a limit is refused, but /tokenize tells how many tokens the prompt has
    UNKNOWN = "unknown"


@attrs.frozen(kw_only=True)
class Kind:
    """What one server is like. Sampling is by the names of `StreamRequest`; the values are the server's."""

    sampling: Mapping[str, str] = attrs.field(factory=lambda: dict(_OPENAI))
    others: frozenset[str] = _TOOLS | _STRICT | {"reasoning_effort", "json_schema", "n_logprobs"}
    forms: Forms = Forms.NONE
    limit: str = "max_tokens"  # of a conversation's answer
    to_the_end: ToTheEnd = ToTheEnd.UNKNOWN
    has_health: bool = False  # a /health that costs nothing: LiteLLM's has every model compute, which is paid for
    knows_efforts: bool = False  # below "low" and above "high", which others refuse
    has_bare_schemas: bool = False  # a conversation's `response_format` has the schema by itself, and none stands for any object
    text_schema: str = ""  # where a completion's JSON Schema goes; "": nowhere, it would be ignored
    sends_defaults: bool = True  # its own may be others; False: they are the same, and it refuses ours
    names_tool: bool = True  # False: one that must be called is not known by its name, and anything may be
    tells_drawn_first: bool = False  # the drawn token is one of a conversation's likely ones, and takes the last one's place
    stops_in_content: bool = True  # False: stop strings are looked for in reasoning and in calls, too

    @property
    def heeds(self) -> frozenset[str]:
        """What of a request it does not ignore."""
        forms = {Forms.NONE: (), Forms.STRUCTURED: ("regex", "choice", "grammar"), Forms.GRAMMAR: ("grammar",)}[self.forms]
        return self.others.union(self.sampling, forms)


KINDS: Final[Mapping[str, Kind]] = {
    "openai": Kind(limit="max_completion_tokens", knows_efforts=True, sends_defaults=False),  # its models that reason refuse some
    "vllm": Kind(
        tells_drawn_first=True,
        sampling={**_OPENAI, "top_k": "top_k", "min_p": "min_p", "repeat_penalty": "repetition_penalty"},
        others=_LOCAL | {"reasoning_effort", "continue_final_message", "cache_salt"},
        forms=Forms.STRUCTURED,
        text_schema="response_format",
        has_health=True,
        stops_in_content=False,
        to_the_end=ToTheEnd.COUNTED,  # max_tokens null, which once was the end of the context, breaks its streams (completion/serving.py)
    ),
    "cllm": Kind(
        sampling={**_OPENAI, "top_k": "top_k", "min_p": "min_p", "repeat_penalty": "repeat_penalty"},
        others=_LOCAL | _STRICT | {"reasoning_effort", "continue_final_message", "cache_salt", "cache_prompt", "repeat_last_n"},
        forms=Forms.STRUCTURED,
        text_schema="response_format",
        has_health=True,
        to_the_end=ToTheEnd.CLIPPED,
        knows_efforts=True,
    ),
    "llamacpp": Kind(  # its cache_prompt takes nothing, but leaves what it computed for others
        sampling={**_OPENAI, "top_k": "top_k", "min_p": "min_p", "repeat_penalty": "repeat_penalty"},
        others=_LOCAL | {"repeat_last_n"},
        forms=Forms.GRAMMAR,
        text_schema="json_schema",  # its completions read no response_format
        has_health=True,
        names_tool=False,
        stops_in_content=False,
        to_the_end=ToTheEnd.UNASKED,
    ),
    "ollama": Kind(others=frozenset({"tools", "reasoning_effort", "json_schema"}), stops_in_content=False, to_the_end=ToTheEnd.UNASKED),
    "tgi": Kind(
        sampling={name: name for name in ("temperature", "top_p", "frequency_penalty")},
        others=frozenset({"tools", "tool_choice", "json_schema"}),
        has_bare_schemas=True,
        has_health=True,
        sends_defaults=False,
        stops_in_content=False,
    ),
    "other": Kind(),
}
"""By the names that operators use. `other` is what OpenAI's reference says, for servers that nothing is known of."""

_OWNERS: Final = {"vllm": "vllm", "cllm": "cllm", "llamacpp": "llamacpp", "library": "ollama", "openai": "openai", "system": "openai"}
# They have paths of Ollama's or of TGI's, and are neither.
KNOWN_OTHERS: Final = frozenset({"koboldcpp"})


def kind_of(owner: str) -> str:
    """Return the name of the kind whose models say that they are owned by `owner`."""
    return _OWNERS.get(owner, "other")
