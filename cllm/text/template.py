"""Chat templates: from messages to the text of a prompt."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import attrs
from jinja2 import Template, meta
from jinja2.exceptions import SecurityError, TemplateRuntimeError, TemplateSyntaxError, UndefinedError

from cllm.errors import InvalidRequest, RequestError, TemplateFailed, TemplateInvalid, TemplateLimitExceeded, TemplateSlow
from cllm.text import call_ids
from cllm.text.arrangement import Message, arranged, together
from cllm.text.meter import N_COPIES, Meter, RenderLimits
from cllm.text.sandbox import ChatEnvironment, MeteredContext, TemplateRefused
from cllm.text.thinking import EFFORT, EFFORTS, USUAL_EFFORTS

N_PARTS_MANY: Final = 32  # messages and tools, from which on what a template may make goes by what it is given
N_SOURCE_MAX: Final = 128 * 1024
"""Characters of a template. The longest in use have some 30,000."""

PROBE_S: Final = 1.0  # that each of the small conversations may take of which loading learns what a template does
N_MESSAGE_MAX: Final = 500  # characters of what a template may say in an error

# Stands where the final message ends. The space at its end tells whether the template trims.
_END_MARK: Final = "cLLM-goes-on-from-here "

RESERVED: Final = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"})
"""Variables that have a place of their own: a request's `chat_template_kwargs` may set any other."""


@attrs.frozen(kw_only=True)
class TemplateFeatures:
    """What a template does with what it is given, found by rendering small conversations."""

    variables: frozenset[str]  # names that it expects from outside: "tools", "enable_thinking", ...
    supports_system: bool  # a system message at the beginning reaches the prompt
    takes_system_before_results: bool  # one at the beginning, also if the last turn is not the user's
    takes_system_anywhere: bool  # several of them, also between other turns
    takes_neighbours: bool  # two of the user's turns, one after the other
    takes_text_after_results: bool  # a user's turn after a tool's result
    takes_empty_turns: bool  # one of the model's that says and calls nothing
    takes_text_beside_calls: bool  # in the turn that calls, shown before the results
    speaker: str  # whose that text is in a turn of its own: "assistant", or "model" where else the calls would follow without a turn's head
    wants_results_with_calls: bool  # in the turn that called, as `tool_responses`
    supports_tools: bool  # the tools' names reach the prompt
    writes_bos: bool  # the prompt begins with the bos token, so tokenising must not add another
    wants_parts: bool  # content must be a list of parts, not a string
    wants_object_arguments: bool  # a tool call's arguments must be an object, not the JSON text that the OpenAI API has
    empty_content: str | None  # the content of a message that only calls tools: None or ""
    wants_short_ids: bool  # the ids of tool calls must be nine letters or digits, or as many at least
    wants_names_in_ids: bool  # of a call it shows the id and not the name
    takes_several_calls: bool  # in one message, or it shows none at all
    shows_calls: bool  # earlier calls reach the prompt
    written_call: str  # a conversation that ends with a call of `look_up`; "" where it renders none
    reasoning_name: str  # what it calls the reasoning of an earlier message that calls: "reasoning_content", or "thinking"
    wants_reasoning_in_parts: bool  # as a part of the content, of the type "thinking"
    efforts: tuple[str, ...]  # what it takes for `reasoning_effort`, if it knows that variable
    joins_reasoning: bool  # it takes the content of a message that calls for reasoning, and refuses both


class ChatTemplate:
    """One model's chat template, compiled once; renders are independent of each other and may come from several threads."""

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        limits: RenderLimits | None = None,
        clock: Callable[[], float] = time.thread_time,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Compile Jinja `source`. `clock` gives seconds for the time limit, `now` the date for templates that say it.

        The thread's own time counts: how much a machine has to do beside it is not the template's doing.

        Raises: TemplateInvalid.
        Source: `apply_chat_template` of Hugging Face transformers, whose environment and variables these are.
        """
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._limits = limits or RenderLimits()
        self._clock = clock
        self._template, variables = _compile(source, ChatEnvironment(now))
        self.features = _probe(self, variables, bos_token)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        timeout_s: float | None = None,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """Return the prompt for `messages`, normalised first; `kwargs` are further variables of the template.

        With `continue_final_message` the prompt ends where the last message, the assistant's, ends so far, within its reasoning if it has
        no more than that and the template shows it; the generation prompt is then left out. `timeout_s`: less time than the limits give.

        Raises: InvalidRequest when the template refuses the messages or cannot work with them · TemplateSlow, also where more time than
        `timeout_s` might do · TemplateLimitExceeded · TemplateFailed when it does what it may not.
        """
        _check_variables(kwargs)
        normal = self.normalize(messages)
        if continue_final_message:
            marked = _marked(normal, self.features.reasoning_name)
            texts = (self._render(one, timeout_s, tools=tools, add_generation_prompt=False, **kwargs) for one in marked)
            return _cut_at_mark(next((text for text in texts if _END_MARK.strip() in text), ""))
        return self._render(normal, timeout_s, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)

    def normalize(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return copies of `messages` in the shape that this template can work with.

        Text parts are joined by line ends, or a string is made a part; arguments of tool calls become objects where the template
        wants that; turns are joined where the template would refuse or not show them as they follow each other.

        Raises: InvalidRequest for parts that are not text, or arguments that are not JSON.
        """
        shapes = _Shapes(self.features)
        normal = [shapes.message(message) for message in messages]
        return arranged(call_ids.with_names(normal) if self.features.wants_names_in_ids else normal, self.features)

    def _render(self, messages: list[Message], timeout_s: float | None = None, /, **variables: Any) -> str:
        """Render with exactly these messages."""
        n_parts = len(messages) + len(variables.get("tools") or ())
        limits = self._limits if n_parts < N_PARTS_MANY else self._limits.for_parts(n_parts, n_chars([messages, variables]))
        if timeout_s is not None:
            limits = attrs.evolve(limits, timeout_s=min(timeout_s, limits.timeout_s))
        try:
            return "".join(self._pieces({"documents": None, "tools": None, **self._tokens, "messages": messages, **variables}, limits))
        except TemplateLimitExceeded as error:
            more_might_do = timeout_s is not None and isinstance(error, TemplateSlow)
            n_given = n_chars([messages, variables])
            if not more_might_do and (n_given > limits.n_chars_max // 4 or n_parts * n_given > limits.n_chars_total // N_COPIES):
                raise InvalidRequest("the messages and tools are too long to render", param="messages") from error
            raise
        except RequestError:
            raise
        except Exception as error:
            raise _request_error(error) from error

    def _pieces(self, variables: dict[str, Any], limits: RenderLimits) -> Iterator[str]:
        meter = Meter(limits, self._clock)
        context = self._template.new_context(variables)
        assert isinstance(context, MeteredContext)
        context.meter = meter
        n_chars = 0
        for piece in self._template.root_render_func(context):
            n_chars += len(piece)
            meter.step()
            if n_chars > limits.n_chars_max:
                raise TemplateLimitExceeded(f"the chat template put out more than {limits.n_chars_max} characters")
            yield piece


# --- compiling, and what can go wrong -----------------------------------------------------------------------------------------


def _compile(source: str, environment: ChatEnvironment) -> tuple[Template, frozenset[str]]:
    if len(source) > N_SOURCE_MAX:
        raise TemplateInvalid(f"longer than {N_SOURCE_MAX} characters")
    try:
        tree = environment.parse(source)
        variables = meta.find_undeclared_variables(tree) - environment.globals.keys()
        return environment.from_string(tree), frozenset(variables)
    except TemplateSyntaxError as error:
        raise TemplateInvalid(_brief(error.message), error.lineno) from error
    except Exception as error:  # Python's own compiler has limits too: nesting, digits
        raise TemplateInvalid(_brief(error)) from error


def _request_error(error: Exception) -> RequestError:
    """Say whose fault it is. A template stumbles over messages that it was not made for, so that is what most errors mean."""
    if isinstance(error, TemplateRefused):
        return InvalidRequest(f"the chat template refused: {_brief(error.message)}", param="messages")
    if isinstance(error, (RecursionError, MemoryError, OverflowError)):
        return TemplateLimitExceeded(f"the chat template exceeded a limit: {_brief(error) or type(error).__name__}")
    if isinstance(error, SecurityError) or (isinstance(error, TemplateRuntimeError) and not isinstance(error, UndefinedError)):
        return TemplateFailed(f"the chat template failed: {_brief(error)}")
    return InvalidRequest(f"the chat template cannot render these messages: {_brief(error)}", param="messages")


def _brief(message: object) -> str:
    text = str(message)
    return text if len(text) <= N_MESSAGE_MAX else text[:N_MESSAGE_MAX] + "..."


def _check_variables(kwargs: Mapping[str, Any]) -> None:
    for name in kwargs:
        if name in RESERVED:
            raise InvalidRequest(f"{name} is not for the request to set", param="chat_template_kwargs")


def plain_text(content: Any) -> str:
    """Return the text of a message's content, of its text parts one after the other."""
    return content if isinstance(content, str) else "".join([part.get("text", "") for part in content or ()])


def n_chars(value: Any) -> int:
    """Return the characters in JSON-like `value`, however deep; names of members do not count."""
    n, rest = 0, [value]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            n += len(value)
        elif isinstance(value, Mapping):
            rest.extend(value.values())
        elif isinstance(value, (list, tuple)):
            rest.extend(value)
    return n


# --- going on from the final message ------------------------------------------------------------------------------------------


def _marked(messages: list[Message], reasoning_name: str) -> Iterator[list[Message]]:
    """Give `messages` with a mark where the last one ends: searching for its text would find repetitions, or miss a trimmed one.

    One that has reasoning alone ends in that, or, for templates that do not show it, in the content that it has not.
    """
    if not messages or messages[-1].get("role") != "assistant":
        raise InvalidRequest("the last message is not the assistant's, so there is nothing to go on from", param="messages")
    final = messages[-1]
    content = final.get("content")
    if final.get(reasoning_name) and not plain_text(content):
        yield [*messages[:-1], final | {reasoning_name: final[reasoning_name] + _END_MARK}]
    if isinstance(content, list) and content:
        name = content[-1]["type"]
        content = [*content[:-1], content[-1] | {name: content[-1][name] + _END_MARK}]
    else:
        content = (content or "") + _END_MARK
    yield [*messages[:-1], final | {"content": content}]


def _cut_at_mark(text: str) -> str:
    pos = text.rfind(_END_MARK.strip())
    if pos < 0:
        raise InvalidRequest("the chat template does not show the last message, so there is nothing to go on from", param="messages")
    # Without the mark a template that trims would have trimmed the message itself.
    return text[:pos] if text.startswith(_END_MARK, pos) else text[:pos].rstrip()


# --- shapes of messages -------------------------------------------------------------------------------------------------------


@attrs.frozen
class _Shapes:
    """Makes one message fit the template."""

    features: TemplateFeatures

    def message(self, message: Mapping[str, Any]) -> Message:
        normal = dict(message)
        calls = normal.get("tool_calls")
        thought: list[Message] = []
        if normal.get(_REASONING) and self.features.wants_reasoning_in_parts:
            thought = [_thought(normal.pop(_REASONING))]
        elif normal.get(_REASONING):
            normal = self._with_reasoning(normal)
        if calls:
            normal["tool_calls"] = [self._call(self._with_short_id(call, "id")) for call in calls]
        if normal.get("tool_call_id"):
            normal = self._with_short_id(normal, "tool_call_id")
        content = normal.get("content")
        if content or not (calls or thought):
            normal["content"] = self._content(content)
        else:
            normal["content"] = self.features.empty_content
        if thought:
            normal["content"] = together([thought, *([normal["content"]] if content else [])])
        return normal

    def _with_reasoning(self, message: Message) -> Message:
        reasoning, content = message.pop(_REASONING), message.get("content")
        if self.features.joins_reasoning and message.get("tool_calls") and content:
            content = self._content(content)
            content = "\n".join([part["text"] for part in content]) if isinstance(content, list) else content
            return message | {self.features.reasoning_name: f"{reasoning}\n\n{content}", "content": None}
        return message | {self.features.reasoning_name: reasoning}

    def _content(self, content: Any) -> Any:
        texts = _texts_of(content)
        return [_text_part(text) for text in texts] if self.features.wants_parts else "\n".join(texts)

    def _with_short_id(self, mapping: Mapping[str, Any], name: str) -> dict[str, Any]:
        given = mapping.get(name)
        return {**mapping, name: call_ids.short(given)} if self.features.wants_short_ids and isinstance(given, str) else dict(mapping)

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function")
        if not (self.features.wants_object_arguments and isinstance(function, Mapping) and isinstance(function.get("arguments"), str)):
            return dict(call)
        return {**call, "function": {**function, "arguments": _parsed(function["arguments"])}}


def _texts_of(content: Any) -> list[str]:
    if isinstance(content, str) or content is None:
        return [content or ""]
    if not isinstance(content, (list, tuple)):
        raise InvalidRequest("content must be a string or a list of parts", param="messages")
    return [_text_of(part) for part in content]


def _text_part(text: str) -> Message:
    return {"type": "text", "text": text}


def _thought(reasoning: str) -> Message:
    """Mistral's form of it, which its later templates know alone."""
    return {"type": "thinking", "thinking": reasoning}


def _text_of(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequest("this model takes text only", param="messages")


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the arguments of a tool call are not JSON: {error}", param="messages") from error


# --- what a template can do ---------------------------------------------------------------------------------------------------

_CALL_ID: Final = "abcdefgh1"  # Mistral's templates take only nine letters or digits
_LONG_ID: Final = "call_0123456789abcdef"
_TINY_ID: Final = "1"
_FUNCTION: Final = "look_up"
_NEEDLE: Final = "needle"  # no template says this by itself
_OTHER_NEEDLE: Final = "noodle"
_REASONING: Final = "reasoning_content"
_MODEL: Final = "model"  # Google's name for the assistant
_RESPONSES: Final = "tool_responses"  # Google's name for results in the turn that called


@attrs.frozen
class _Prober:
    """Renders small conversations; a render that fails shows nothing."""

    render: Callable[..., str]
    wants_parts: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None  # for a template that renders nothing without

    def shows(self, messages: list[Message], **variables: Any) -> str:
        try:
            return self.render(messages, **{"add_generation_prompt": True, "tools": self.tools, **variables})
        except RequestError:
            return ""

    def said(self, role: str, text: str) -> Message:
        return {"role": role, "content": [_text_part(text)] if self.wants_parts else text}

    def shows_both(self, messages: list[Message]) -> bool:
        text = self.shows(messages)
        return _NEEDLE in text and _OTHER_NEEDLE in text

    def takes_system_anywhere(self) -> bool:
        one, other, hello = self.said("system", _NEEDLE), self.said("system", _OTHER_NEEDLE), self.said("user", "hello")
        late = [one, hello, other], [one, hello, self.said("assistant", "so"), other, hello]
        return all(self.shows_both(messages) for messages in ([one, other, hello], *late))

    def takes_neighbours(self) -> bool:
        return self.shows_both([self.said("user", _NEEDLE), self.said("user", _OTHER_NEEDLE)])

    def called(self, content: Any, *, as_object: bool, call_id: str = _CALL_ID, **more: Any) -> list[Message]:
        """A call and its result; `more` is said with the call."""
        call = _call({"a": 1} if as_object else '{"a": 1}', call_id)
        calling = {"role": "assistant", "content": content, **more, "tool_calls": [call]}
        return [self.said("user", "hello"), calling, self.said("tool", "ok") | {"name": _FUNCTION, "tool_call_id": call["id"]}]

    def takes_text_after_results(self, content: str | None, *, as_object: bool) -> bool:
        turns = self.called(content, as_object=as_object)
        return not self.shows(turns) or _NEEDLE in self.shows([*turns, self.said("user", _NEEDLE)])

    def takes_system_before_results(self, content: str | None, *, as_object: bool) -> bool:
        system, turns = self.said("system", _NEEDLE), self.called(content, as_object=as_object)
        is_shown = _NEEDLE in self.shows([system, self.said("user", "hello")])
        return not is_shown or not self.shows(turns) or _NEEDLE in self.shows([system, *turns])

    def takes_empty_turns(self) -> bool:
        empty, other = (
            [self.said("user", "hello"), self.said("assistant", text), self.said("user", _NEEDLE)] for text in ("", _OTHER_NEEDLE)
        )
        return _NEEDLE in self.shows(empty) or _NEEDLE not in self.shows(other)

    def result_shapes(self, source: str, content: str | None, *, as_object: bool) -> tuple[bool, bool, str]:
        """Return `wants_results_with_calls`, `takes_text_beside_calls` and `speaker` of the features."""
        turns = self.called(content, as_object=as_object)
        own = self._told_with_call(turns)
        with_calls = _RESPONSES in source and _OTHER_NEEDLE in self.shows(own) and self.shows(own) != self.shows(self._told_apart(turns))
        tell = self._told_with_call if with_calls else self._told_apart
        text = self.said("assistant", _NEEDLE)
        ways = (
            self.called(text["content"], as_object=as_object),
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

    def reasoning_shape(self, content: str | None, *, as_object: bool) -> tuple[str, bool, bool]:
        """Return `reasoning_name`, `joins_reasoning` and `wants_reasoning_in_parts` of the features."""
        names = (_REASONING, "thinking")
        name = next((name for name in names if _NEEDLE in self.shows(self.called(content, as_object=as_object, **{name: _NEEDLE}))), None)
        if name is None:
            parts = [_thought(_NEEDLE), _text_part(_OTHER_NEEDLE)]
            text = self.shows(self.called(parts, as_object=as_object))
            is_read = "'thinking'" not in text and '"thinking"' not in text  # else a part came out as Python or JSON writes it
            return _REASONING, False, is_read and _NEEDLE in text and _OTHER_NEEDLE in text
        both = self.said("assistant", "so")["content"]
        return name, _NEEDLE not in self.shows(self.called(both, as_object=as_object, **{name: _NEEDLE})), False

    def takes_several_calls(self, content: str | None, *, as_object: bool) -> bool:
        arguments = {_NEEDLE: "x"} if as_object else f'{{"{_NEEDLE}": "x"}}'
        ns = [[self.calls(content, arguments, answered, n=n).count(_NEEDLE) for n in (1, 2)] for answered in (True, False)]
        return all(two > one or not one for one, two in ns)

    def wants_short_ids(self, content: str | None, *, as_object: bool) -> bool:
        arguments = {_NEEDLE: "x"} if as_object else f'{{"{_NEEDLE}": "x"}}'
        return any(
            _NEEDLE in self.calls(content, arguments, answered) and _NEEDLE not in self.calls(content, arguments, answered, other_id)
            for answered in (True, False)
            for other_id in (_LONG_ID, _TINY_ID)
        )

    def with_calls(self, content: str | None, *, as_object: bool) -> list[str]:
        """How a call is shown: with its result or without, beside tools or not."""
        *asked, result = self.called(content, as_object=as_object)
        asked.append({name: result[name] for name in ("role", "content")})
        return [self.shows(messages, tools=tools) for messages in (asked, asked[:2]) for tools in (self.tools, [_tool(_NEEDLE)])]

    def written_call(self, content: str | None, *, as_object: bool) -> tuple[str, bool]:
        """Return `written_call` and `wants_names_in_ids` of the features."""
        text = self.shows(self.called(content, as_object=as_object)[:2], add_generation_prompt=False)
        if _CALL_ID not in text or _FUNCTION in text or self.wants_short_ids(content, as_object=as_object):
            return text, False
        named = self.called(content, as_object=as_object, call_id=f"functions.{_FUNCTION}:0")
        return self.shows(named[:2], add_generation_prompt=False), True

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


def _probe(template: ChatTemplate, variables: frozenset[str], bos_token: str) -> TemplateFeatures:
    prober = _Prober(lambda messages, **variables: template._render(messages, PROBE_S, **variables))
    parts = attrs.evolve(prober, wants_parts=True)
    wants_parts = _NEEDLE not in prober.shows([prober.said("user", _NEEDLE)]) and _NEEDLE in parts.shows([parts.said("user", _NEEDLE)])
    prober = parts if wants_parts else prober
    hello = prober.said("user", "hello")
    if not prober.shows([hello]):
        prober = attrs.evolve(prober, tools=[_tool(_FUNCTION)])
    empty_content, wants_object_arguments = prober.call_shapes()
    written_call, wants_names_in_ids = prober.written_call(empty_content, as_object=wants_object_arguments)
    reasoning_name, joins_reasoning, wants_reasoning_in_parts = prober.reasoning_shape(empty_content, as_object=wants_object_arguments)
    wants_results_with_calls, takes_text_beside_calls, speaker = prober.result_shapes(
        template.source, empty_content, as_object=wants_object_arguments
    )
    with_calls = prober.with_calls(empty_content, as_object=wants_object_arguments)
    return TemplateFeatures(
        variables=variables,
        supports_system=_NEEDLE in prober.shows([prober.said("system", _NEEDLE), hello]),
        takes_system_before_results=prober.takes_system_before_results(empty_content, as_object=wants_object_arguments),
        takes_system_anywhere=prober.takes_system_anywhere(),
        takes_neighbours=prober.takes_neighbours(),
        takes_text_after_results=prober.takes_text_after_results(empty_content, as_object=wants_object_arguments),
        takes_empty_turns=prober.takes_empty_turns(),
        takes_text_beside_calls=takes_text_beside_calls,
        speaker=speaker,
        wants_results_with_calls=wants_results_with_calls,
        # Where it fails with every call that was made, as one that changes lists, no conversation could go on from the first.
        supports_tools=_NEEDLE in prober.shows([hello], tools=[_tool(_NEEDLE)]) and any(with_calls),
        writes_bos=bool(bos_token) and prober.shows([hello]).startswith(bos_token),
        wants_parts=wants_parts,
        wants_object_arguments=wants_object_arguments,
        empty_content=empty_content,
        wants_short_ids=prober.wants_short_ids(empty_content, as_object=wants_object_arguments),
        takes_several_calls=prober.takes_several_calls(empty_content, as_object=wants_object_arguments),
        shows_calls=any(_FUNCTION in text or _CALL_ID in text for text in with_calls) or not any(with_calls),
        written_call=written_call,
        wants_names_in_ids=wants_names_in_ids,
        reasoning_name=reasoning_name,
        efforts=prober.efforts(template.source) if EFFORT in variables else (),
        joins_reasoning=joins_reasoning,
        wants_reasoning_in_parts=wants_reasoning_in_parts,
    )
