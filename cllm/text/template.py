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
from cllm.text.features import REASONING, TemplateFeatures, probe, text_part, thought_part
from cllm.text.meter import N_COPIES, Meter, RenderLimits
from cllm.text.plain_schemas import plain
from cllm.text.sandbox import ChatEnvironment, MeteredContext, TemplateRefused

N_PARTS_MANY: Final = 32  # messages and tools, from which on what a template may make goes by what it is given
N_SOURCE_MAX: Final = 128 * 1024
"""Characters of a template. The longest in use have some 30,000."""

N_MESSAGE_MAX: Final = 500  # characters of what a template may say in an error

# Stands where the final message ends. The space at its end tells whether the template trims.
_END_MARK: Final = "cLLM-goes-on-from-here "

_STUMBLES: Final = (TypeError, UndefinedError, RecursionError)  # what a template raises that finds something else than it looks for

RESERVED: Final = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token"})
"""Variables that have a place of their own: a request's `chat_template_kwargs` may set any other."""


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
        self.features = probe(self._render, source, variables)

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
        `tools` are told in plainer words where the template stumbles over their schemas.

        Raises: InvalidRequest when the template refuses the messages or cannot work with them · TemplateSlow, also where more time than
        `timeout_s` might do · TemplateLimitExceeded · TemplateFailed when it does what it may not.
        """
        _check_variables(kwargs)
        normal = self.normalize(messages)
        if continue_final_message:
            for marked, says_something in _marked(normal, self.features.reasoning_name):
                text = self._told(marked, timeout_s, tools=tools, add_generation_prompt=False, **kwargs)
                if _END_MARK.strip() in text:
                    return _cut_at_mark(text, says_something)
            raise InvalidRequest("the chat template does not show the last message, so there is nothing to go on from", param="messages")
        return self._told(normal, timeout_s, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs)

    def normalize(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return copies of `messages` in the shape that this template can work with.

        Text parts are joined by line ends, or a string is made a part; arguments of tool calls become objects where the template
        wants that; turns are joined where the template would refuse or not show them as they follow each other.

        Raises: InvalidRequest for parts that are not text, or arguments that are not JSON.
        """
        shapes = _Shapes(self.features)
        normal = [shapes.message(message) for message in messages]
        if self.features.wants_names_in_ids:
            normal = call_ids.with_names(normal, in_turns=self.features.counts_ids_in_turns)
        return arranged(normal, self.features)

    def _told(
        self, messages: list[Message], timeout_s: float | None, /, *, tools: Sequence[Mapping[str, Any]] | None, **variables: Any
    ) -> str:
        """Render with exactly these messages, and where the template stumbles over the tools, with plainer ones in the time that is left.

        Hermes' template never ends with a parameter that may be null, gpt-oss's takes every default beside an `enum` for a text, and
        Seed-OSS's looks for properties at the root.
        """
        ends_at = self._clock() + (self._limits.timeout_s if timeout_s is None else min(timeout_s, self._limits.timeout_s))
        try:
            return self._render(messages, timeout_s, tools=tools, **variables)
        except RequestError as first:
            if not tools or not isinstance(first.__cause__, _STUMBLES):
                raise
            try:
                return self._render(messages, ends_at - self._clock(), tools=plain(tools), **variables)
            except RequestError as error:
                if timeout_s is not None and isinstance(error, TemplateSlow):  # more time might do
                    raise
            try:
                self._render(messages, ends_at - self._clock(), tools=None, **variables)
            except RequestError as error:
                if timeout_s is not None and isinstance(error, TemplateSlow):
                    raise
                raise first from first.__cause__
            raise InvalidRequest(f"the chat template cannot render these tools: {_brief(first.__cause__)}", param="tools") from first

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


def _marked(messages: list[Message], reasoning_name: str) -> Iterator[tuple[list[Message], bool]]:
    """Give `messages` with a mark where the last one ends, and whether there is any text of it before that.

    Searching for its text would find repetitions, or miss a trimmed one.

    One that has reasoning alone ends in that, or, for templates that do not show it, in the content that it has not.
    """
    if not messages or messages[-1].get("role") != "assistant":
        raise InvalidRequest("the last message is not the assistant's, so there is nothing to go on from", param="messages")
    final = messages[-1]
    content = final.get("content")
    if final.get(reasoning_name) and not plain_text(content):
        yield [*messages[:-1], final | {reasoning_name: final[reasoning_name] + _END_MARK}], True
    says_something = bool(plain_text(content).strip())
    if isinstance(content, list) and content:
        name = content[-1]["type"]
        content = [*content[:-1], content[-1] | {name: content[-1][name] + _END_MARK}]
    else:
        content = (content or "") + _END_MARK
    yield [*messages[:-1], final | {"content": content}], says_something


def _cut_at_mark(text: str, says_something: bool) -> str:
    pos = text.rfind(_END_MARK.strip())
    # Without the mark a template that trims would have trimmed the message itself, but not what it writes before one that says nothing.
    if text.startswith(_END_MARK, pos):
        return text[:pos]
    return text[:pos].rstrip() if says_something else text[:pos].rstrip(" ")  # which a tokenizer would join with the answer's first word


# --- shapes of messages -------------------------------------------------------------------------------------------------------


@attrs.frozen
class _Shapes:
    """Makes one message fit the template."""

    features: TemplateFeatures

    def message(self, message: Mapping[str, Any]) -> Message:
        normal = dict(message)
        calls = normal.get("tool_calls")
        thought: list[Message] = []
        if normal.get(REASONING) and self.features.wants_reasoning_in_parts:
            thought = [thought_part(normal.pop(REASONING))]
        elif normal.get(REASONING):
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
        reasoning, content = message.pop(REASONING), message.get("content")
        if self.features.joins_reasoning and message.get("tool_calls") and content:
            content = self._content(content)
            content = "\n".join([part["text"] for part in content]) if isinstance(content, list) else content
            return message | {self.features.reasoning_name: f"{reasoning}\n\n{content}", "content": None}
        return message | {self.features.reasoning_name: reasoning}

    def _content(self, content: Any) -> Any:
        texts = _texts_of(content)
        return [text_part(text) for text in texts] if self.features.wants_parts else "\n".join(texts)

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


def _text_of(part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequest("this model takes text only", param="messages")


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the arguments of a tool call are not JSON: {error}", param="messages") from error
