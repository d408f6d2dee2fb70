"""What a chat template does with what it is given, found by rendering small conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs

from cllm.errors import RequestError
from cllm.text.arrangement import Message
from cllm.text.thinking import EFFORT, EFFORTS, USUAL_EFFORTS

REASONING: Final = "reasoning_content"  # the member that a message has it in, as requests are read
PROBE_S: Final = 1.0  # that each of the small conversations may take of which loading learns what a template does

_CALL_ID: Final = "abcdefgh1"  # Mistral's templates take only nine letters or digits
_LONG_ID: Final = "call_0123456789abcdef"
_TINY_ID: Final = "1"
_FUNCTION: Final = "look_up"
_NEEDLE: Final = "needle"  # no template says this by itself
_OTHER_NEEDLE: Final = "noodle"
_MODEL: Final = "model"  # Google's name for the assistant
_RESPONSES: Final = "tool_responses"  # Google's name for results in the turn that called


@attrs.frozen(kw_only=True)
class TemplateFeatures:
    """What was found of one template."""

    variables: frozenset[str]  # names that it expects from outside: "tools", "enable_thinking", ...
    supports_system: bool  # a system message at the beginning reaches the prompt
    takes_system_before_results: bool  # one at the beginning, also if the last turn is not the user's
    takes_system_anywhere: bool  # several of them, also between other turns
    takes_system_alone: bool  # one that nothing follows
    takes_answers_first: bool  # a turn of the model's before any of the user's
    takes_no_user: bool  # the model's turns without any of the user's
    takes_neighbours: bool  # two of the user's turns, one after the other
    takes_text_after_results: bool  # a user's turn after a tool's result
    takes_empty_turns: bool  # one of the model's that says and calls nothing
    takes_text_beside_calls: bool  # in the turn that calls, shown before the results
    speaker: str  # whose that text is in a turn of its own: "assistant", or "model" where else the calls would follow without a turn's head
    wants_results_with_calls: bool  # in the turn that called, as `tool_responses`
    supports_tools: bool  # the tools' names reach the prompt
    wants_parts: bool  # content must be a list of parts, not a string
    wants_object_arguments: bool  # a tool call's arguments must be an object, not the JSON text that the OpenAI API has
    empty_content: str | None  # the content of a message that only calls tools: None or ""
    wants_short_ids: bool  # the ids of tool calls must be nine letters or digits, or as many at least
    wants_names_in_ids: bool  # of a call it shows the id and not the name, or makes one of the name
    counts_ids_in_turns: bool  # and these it makes itself, anew in each turn
    takes_several_calls: bool  # in one message, or it shows none at all
    shows_calls: bool  # earlier calls reach the prompt
    written_call: str  # a conversation that ends with a call of `look_up`; "" where it renders none
    reasoning_name: str  # what it calls the reasoning of an earlier message that calls: "reasoning_content", "thinking", or "tool_plan"
    wants_reasoning_in_parts: bool  # as a part of the content, of the type "thinking"
    efforts: tuple[str, ...]  # what it takes for `reasoning_effort`, if it knows that variable
    joins_reasoning: bool  # it takes the content of a message that calls for reasoning, and refuses both


def text_part(text: str) -> Message:
    """Text as a part of a content."""
    return {"type": "text", "text": text}


def thought_part(reasoning: str) -> Message:
    """Mistral's form of it, which its later templates know alone."""
    return {"type": "thinking", "thinking": reasoning}


@attrs.frozen
class _Prober:
    """Renders small conversations; a render that fails shows nothing."""

    render: Callable[..., str]
    wants_parts: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None  # for a template that renders nothing without
    empty_content: str | None = ""  # this and the next as the features have them, once they are known
    as_object: bool = False  # the arguments of calls

    def shows(self, messages: list[Message], **variables: Any) -> str:
        try:
            return self.render(messages, **{"add_generation_prompt": True, "tools": self.tools, **variables})
        except RequestError:
            return ""

    def said(self, role: str, text: str) -> Message:
        return {"role": role, "content": [text_part(text)] if self.wants_parts else text}

    def shows_both(self, messages: list[Message]) -> bool:
        text = self.shows(messages)
        return _NEEDLE in text and _OTHER_NEEDLE in text

    def takes_system_anywhere(self) -> bool:
        one, other, hello = self.said("system", _NEEDLE), self.said("system", _OTHER_NEEDLE), self.said("user", "hello")
        late = [one, hello, other], [one, hello, self.said("assistant", "so"), other, hello]
        return all(self.shows_both(messages) for messages in ([one, other, hello], *late))

    def takes_system_alone(self) -> bool:
        system = self.said("system", _NEEDLE)
        return _NEEDLE in self.shows([system]) or _NEEDLE not in self.shows([system, self.said("user", "hello")])

    def takes_answers_first(self) -> bool:
        turns = [self.said("assistant", _NEEDLE), self.said("user", _OTHER_NEEDLE)]
        return self.shows_both(turns) or not self.shows_both([self.said("user", "hello"), *turns])

    def takes_no_user(self) -> bool:
        turns = [self.said("assistant", _NEEDLE)]
        return _NEEDLE in self.shows(turns) or _NEEDLE not in self.shows([self.said("user", "hello"), *turns])

    def takes_neighbours(self) -> bool:
        return self.shows_both([self.said("user", _NEEDLE), self.said("user", _OTHER_NEEDLE)])

    def called(self, *, call_id: str = _CALL_ID, **more: Any) -> list[Message]:
        """A call and its result; `more` is said with the call."""
        call = _call({"a": 1} if self.as_object else '{"a": 1}', call_id)
        calling = {"role": "assistant", "content": self.empty_content, **more, "tool_calls": [call]}
        return [self.said("user", "hello"), calling, self.said("tool", "ok") | {"name": _FUNCTION, "tool_call_id": call["id"]}]

    def takes_text_after_results(self) -> bool:
        turns = self.called()
        return not self.shows(turns) or _NEEDLE in self.shows([*turns, self.said("user", _NEEDLE)])

    def takes_system_before_results(self) -> bool:
        system, turns = self.said("system", _NEEDLE), self.called()
        is_shown = _NEEDLE in self.shows([system, self.said("user", "hello")])
        return not is_shown or not self.shows(turns) or _NEEDLE in self.shows([system, *turns])

    def takes_empty_turns(self) -> bool:
        empty, other = (
            [self.said("user", "hello"), self.said("assistant", text), self.said("user", _NEEDLE)] for text in ("", _OTHER_NEEDLE)
        )
        return _NEEDLE in self.shows(empty) or _NEEDLE not in self.shows(other)

    def result_shapes(self, source: str) -> tuple[bool, bool, str]:
        """Return `wants_results_with_calls`, `takes_text_beside_calls` and `speaker` of the features."""
        turns = self.called()
        own = self._told_with_call(turns)
        with_calls = _RESPONSES in source and _OTHER_NEEDLE in self.shows(own) and self.shows(own) != self.shows(self._told_apart(turns))
        tell = self._told_with_call if with_calls else self._told_apart
        text = self.said("assistant", _NEEDLE)
        ways = (
            self.called(content=text["content"]),
            [turns[0], text, *turns[1:]],
            [turns[0], text | {"role": _MODEL}, *turns[1:]],
        )
        beside, apart, as_model = (self.shows(tell(each)) for each in ways)
        has_head = not _is_behind(as_model) and _n_between(as_model) > _n_between(apart)
        takes_text = not _is_behind(beside) or _is_behind(apart)
        if beside and _NEEDLE not in beside and _NEEDLE in apart and not _is_behind(apart):  # it would be lost beside a call
            first = tell(ways[1])
            takes_text = not self.shows([*first, *first[1:]])  # some count it as a turn, which is not to be followed by another of theirs
        return with_calls, takes_text, _MODEL if has_head else "assistant"

    def _told_apart(self, turns: list[Message]) -> list[Message]:
        return [*turns[:-1], turns[-1] | {"content": self.said("tool", _OTHER_NEEDLE)["content"]}]

    def _told_with_call(self, turns: list[Message]) -> list[Message]:
        return [*turns[:-2], turns[-2] | {_RESPONSES: [{"name": _FUNCTION, "response": _OTHER_NEEDLE}]}]

    def efforts(self, source: str) -> tuple[str, ...]:
        """Those of `EFFORTS` that the template knows: all that it takes, or of one that takes anything the usual, and what it speaks of."""
        taken = [
            effort
            for effort in (*EFFORTS, _NEEDLE)
            if self.shows([self.said("user", "hello")], enable_thinking=True, reasoning_effort=effort)
        ]
        if _NEEDLE in taken:
            taken = [effort for effort in EFFORTS if effort in USUAL_EFFORTS or f'"{effort}"' in source or f"'{effort}'" in source]
        return tuple(taken)

    def calls(self, content: str | None, arguments: Any, answered: bool, call_id: str = _CALL_ID, n: int = 1) -> str:
        call = _call(arguments, call_id)
        calls = [call, *({**call, "id": f"abcdefgh{i}"} for i in range(2, n + 1))]
        messages = [self.said("user", "hello"), {"role": "assistant", "content": content, "tool_calls": calls}]
        results = [self.said("tool", "ok") | {"name": _FUNCTION, "tool_call_id": call["id"]} for call in calls]
        return self.shows([*messages, *results] if answered else messages)

    def reasoning_shape(self) -> tuple[str, bool, bool]:
        """Return `reasoning_name`, `joins_reasoning` and `wants_reasoning_in_parts` of the features."""
        names = (REASONING, "thinking", "tool_plan")
        name = next((name for name in names if _NEEDLE in self.shows(self.called(**{name: _NEEDLE}))), None)
        if name is None:
            parts = [thought_part(_NEEDLE), text_part(_OTHER_NEEDLE)]
            text = self.shows(self.called(content=parts))
            is_read = "'thinking'" not in text and '"thinking"' not in text  # else a part came out as Python or JSON writes it
            return REASONING, False, is_read and _NEEDLE in text and _OTHER_NEEDLE in text
        both = self.said("assistant", "so")["content"]
        return name, _NEEDLE not in self.shows(self.called(content=both, **{name: _NEEDLE})), False

    def takes_several_calls(self) -> bool:
        arguments = {_NEEDLE: "x"} if self.as_object else f'{{"{_NEEDLE}": "x"}}'
        ns = [[self.calls(self.empty_content, arguments, answered, n=n).count(_NEEDLE) for n in (1, 2)] for answered in (True, False)]
        return all(two > one or not one for one, two in ns)

    def wants_short_ids(self) -> bool:
        arguments = {_NEEDLE: "x"} if self.as_object else f'{{"{_NEEDLE}": "x"}}'
        return any(
            _NEEDLE in self.calls(self.empty_content, arguments, answered)
            and _NEEDLE not in self.calls(self.empty_content, arguments, answered, other_id)
            for answered in (True, False)
            for other_id in (_LONG_ID, _TINY_ID)
        )

    def with_calls(self) -> list[str]:
        """How a call is shown: with its result or without, beside tools or not."""
        *asked, result = self.called()
        asked.append({name: result[name] for name in ("role", "content")})
        return [self.shows(messages, tools=tools) for messages in (asked, asked[:2]) for tools in (self.tools, [_tool(_NEEDLE)])]

    def written_call(self) -> tuple[str, bool, bool]:
        """Return `written_call`, `wants_names_in_ids` and `counts_ids_in_turns` of the features."""
        text, named_id = self.shows(self.called()[:2], add_generation_prompt=False), f"functions.{_FUNCTION}:0"
        if named_id in text and _CALL_ID not in text:  # where a result has the client's id, no call would have the same
            is_told_apart = _CALL_ID in self.shows(self.called())
            return text, is_told_apart, is_told_apart
        if _CALL_ID not in text or _FUNCTION in text or self.wants_short_ids():
            return text, False, False
        return self.shows(self.called(call_id=named_id)[:2], add_generation_prompt=False), True, False

    def call_shapes(self) -> tuple[str | None, bool]:
        """Return `empty_content` and `wants_object_arguments` of the features."""
        # The last message may be treated differently, so the call is not the last where the template knows the role of results.
        for answered in (True, False):
            for content in (None, ""):
                as_object = self.calls(content, {_NEEDLE: "x"}, answered)
                as_text = self.calls(content, f'{{"{_NEEDLE}": "x"}}', answered)
                if "None" not in as_object + as_text and _NEEDLE in as_object + as_text:
                    # JSON text is right where it comes out as an object does, and where objects come out as Python writes them.
                    return content, _NEEDLE in as_object and as_object != as_text and f"'{_NEEDLE}'" not in as_object
        return "", False  # it does not show calls; a message without content is the likelier to offend it


def _is_behind(text: str) -> bool:
    """Whether what is said beside a call stands behind its result."""
    return 0 <= text.rfind(_OTHER_NEEDLE) < text.rfind(_NEEDLE)


def _n_between(text: str) -> int:
    """Characters from what is said to the call after it; 0 where either is not there."""
    pos = text.rfind(_NEEDLE)
    return max(text.find(_FUNCTION, pos) - pos, 0) if pos >= 0 else 0


def _call(arguments: Any, call_id: str = _CALL_ID) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": _FUNCTION, "arguments": arguments}}


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "", "parameters": {"type": "object", "properties": {}}}}


def probe(render: Callable[..., str], source: str, variables: frozenset[str]) -> TemplateFeatures:
    """Find what the template of `source` does, which expects `variables` and is rendered by `render(messages, timeout_s, **variables)`.

    `render` raises RequestError where it cannot.
    """
    prober = _Prober(lambda messages, **given: render(messages, PROBE_S, **given))
    parts = attrs.evolve(prober, wants_parts=True)
    wants_parts = _NEEDLE not in prober.shows([prober.said("user", _NEEDLE)]) and _NEEDLE in parts.shows([parts.said("user", _NEEDLE)])
    prober = parts if wants_parts else prober
    hello = prober.said("user", "hello")
    if not prober.shows([hello]):
        prober = attrs.evolve(prober, tools=[_tool(_FUNCTION)])
    empty_content, wants_object_arguments = prober.call_shapes()
    prober = attrs.evolve(prober, empty_content=empty_content, as_object=wants_object_arguments)
    written_call, wants_names_in_ids, counts_ids_in_turns = prober.written_call()
    reasoning_name, joins_reasoning, wants_reasoning_in_parts = prober.reasoning_shape()
    wants_results_with_calls, takes_text_beside_calls, speaker = prober.result_shapes(source)
    with_calls = prober.with_calls()
    return TemplateFeatures(
        variables=variables,
        supports_system=_NEEDLE in prober.shows([prober.said("system", _NEEDLE), hello]),
        takes_system_before_results=prober.takes_system_before_results(),
        takes_system_anywhere=prober.takes_system_anywhere(),
        takes_system_alone=prober.takes_system_alone(),
        takes_answers_first=prober.takes_answers_first(),
        takes_no_user=prober.takes_no_user(),
        takes_neighbours=prober.takes_neighbours(),
        takes_text_after_results=prober.takes_text_after_results(),
        takes_empty_turns=prober.takes_empty_turns(),
        takes_text_beside_calls=takes_text_beside_calls,
        speaker=speaker,
        wants_results_with_calls=wants_results_with_calls,
        # Where it fails with every call that was made, as one that changes lists, no conversation could go on from the first.
        supports_tools=_NEEDLE in prober.shows([hello], tools=[_tool(_NEEDLE)]) and any(with_calls),
        wants_parts=wants_parts,
        wants_object_arguments=wants_object_arguments,
        empty_content=empty_content,
        wants_short_ids=prober.wants_short_ids(),
        takes_several_calls=prober.takes_several_calls(),
        shows_calls=any(_FUNCTION in text or _CALL_ID in text for text in with_calls) or not any(with_calls),
        written_call=written_call,
        wants_names_in_ids=wants_names_in_ids,
        counts_ids_in_turns=counts_ids_in_turns,
        reasoning_name=reasoning_name,
        efforts=prober.efforts(source) if EFFORT in variables else (),
        joins_reasoning=joins_reasoning,
        wants_reasoning_in_parts=wants_reasoning_in_parts,
    )
