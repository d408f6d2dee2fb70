"""A conversation to its answers: the one request that every chat surface makes, and what it gets back.

A surface reads its wire shape into a `Conversation`, and into what it wants of sampling (`cllm.api.sampling_fields.wanted`). `open_chat`
gives a `Chat`: either `complete` it, which gives an `Answer` for each completion, or `stream` it in a shape of the surface's own, which
is told content, reasoning and tool calls apart (`AnswerShape`). No surface reads templates, parsers or the engine's events.

Messages are dicts as chat templates expect them, which is OpenAI's shape: `role` (system, user, assistant, tool), `content` (a string or
None), and where they have them `name`, `reasoning_content`, `tool_call_id` and `tool_calls`: `[{"id", "type": "function", "function":
{"name", "arguments": JSON text}}]`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from quart import Response, g

from cllm.api import prompts
from cllm.api.calling import grammar_of
from cllm.api.context import Context
from cllm.api.errors import ErrorShape
from cllm.api.generation import Completion, Generation, check_room, open_generation
from cllm.api.sampling_fields import Wanted
from cllm.api.sse import PLAIN, SseBody, Wire, sse_response
from cllm.api.structured import Form, told
from cllm.api.tool_checks import check_toolbox
from cllm.backend import StreamChat
from cllm.engine.events import Delta, Finished, TokenLogprob
from cllm.errors import InvalidRequest, NotHeeded
from cllm.serve.engine import ServedModel
from cllm.text import earlier_calls, generic_tools
from cllm.text.answers import AnswerFormat
from cllm.text.arrangement import in_order_of_calls
from cllm.text.call_grammar import is_held
from cllm.text.channels import is_in_content, is_in_reasoning
from cllm.text.dialect import Dialect
from cllm.text.grammar import Grammar, Kind
from cllm.text.parts import Arguments, CallBegun, Content, Part, Reasoning
from cllm.text.reasoning import ReasoningReader
from cllm.text.template import n_chars, plain_text
from cllm.text.thinking import SWITCHES, Thinking
from cllm.text.tools import Tool, Toolbox, ToolUse
from cllm.text.unread import UnreadPrompt

CALL_ID_PREFIX = "call_"
N_CHARS_READ = 1024  # of the message that is gone on from, at a time


@attrs.frozen(kw_only=True)
class Conversation:
    """What is to be answered, validated."""

    messages: Sequence[dict[str, Any]]
    turns_field: str = "messages"  # what the surface calls these
    toolbox: Toolbox = attrs.field(factory=Toolbox)
    tool_fields: tuple[str, str] = ("name", "parameters")  # what the surface calls a tool's name and schema
    thinking: Thinking = attrs.field(factory=Thinking)
    form: Form | None = None  # what the answer's content must look like
    variables: Mapping[str, Any] = attrs.field(factory=dict)  # further ones for the template
    documents: Sequence[dict[str, Any]] = ()  # that the template is to show
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def given_variables(self) -> Mapping[str, Any]:
        """What the request gives the template besides messages and tools."""
        return {"documents": self.documents, **self.variables} if self.documents else self.variables


# --- answers -----------------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class ToolCall:
    """A call in full; `arguments` is JSON text, a whole object unless the answer was cut."""

    id: str
    name: str
    arguments: str


@attrs.define(eq=False)
class Answer:
    """An answer in full."""

    content: str
    reasoning: str
    calls: list[ToolCall]
    logprobs: list[TokenLogprob] | None
    finished: Finished
    is_content_last: bool  # as in `Completion`

    @classmethod
    def of(cls, completion: Completion) -> Answer:
        """Put together what a completion's parts say."""
        reasoning, calls, arguments = "", list[ToolCall](), dict[int, list[str]]()
        for part in completion.parts:
            if isinstance(part, Reasoning):
                reasoning += part.text
            elif isinstance(part, CallBegun):
                calls.append(ToolCall(new_call_id(), part.name, ""))
            elif isinstance(part, Arguments):
                arguments.setdefault(part.call, []).append(part.fragment)
        for i, fragments in arguments.items():
            calls[i].arguments = "".join(fragments)
        return cls(completion.text, reasoning, calls, completion.logprobs, completion.finished, completion.is_content_last)


def new_call_id() -> str:
    """An id for a tool call, unlike all others."""
    return CALL_ID_PREFIX + secrets.token_hex(12)


class AnswerShape:
    """A surface's stream; see `cllm.api.sse.Shape`. Each method gives whole events as bytes, or nothing.

    `index` is the completion's place in the request, `call` the tool call's in its answer. `content` is what nearly every token of every
    stream goes through: it should do no more than fill in a frame (`cllm.api.sse.TextFrame`).
    """

    def first(self) -> bytes:
        """What comes before everything else."""
        return b""

    def content(self, index: int, text: str) -> bytes:
        """More text; may be empty, and then there is nothing to tell."""
        raise NotImplementedError

    def reasoning(self, index: int, text: str) -> bytes:
        """More reasoning."""
        raise NotImplementedError

    def call_begun(self, index: int, call: int, call_id: str, name: str) -> bytes:
        """A tool is called."""
        raise NotImplementedError

    def arguments(self, index: int, call: int, fragment: str) -> bytes:
        """More of a call's arguments."""
        raise NotImplementedError

    def ended(self, index: int, event: Finished) -> bytes:
        """A completion has ended; what text it had left has been told."""
        raise NotImplementedError

    def last(self) -> bytes:
        """What comes after every completion's end."""
        return b""

    # --- what the stream calls ----------------------------------------------------------------------------------------

    def delta(self, index: int, event: Delta) -> bytes:
        """See `Shape.delta`."""
        return self.content(index, event.text) if event.parts is None else self.parts(index, event.parts)

    def finished(self, index: int, event: Finished) -> bytes:
        """See `Shape.finished`."""
        rest = self.content(index, event.text) if event.parts is None else self.parts(index, event.parts)
        return rest + self.ended(index, event)

    def parts(self, index: int, parts: list[Part]) -> bytes:
        """Several parts, one after the other."""
        return b"".join([self._part(index, part) for part in parts])

    def _part(self, index: int, part: Part) -> bytes:
        if isinstance(part, Content):
            return self.content(index, part.text)
        if isinstance(part, Reasoning):
            return self.reasoning(index, part.text)
        if isinstance(part, CallBegun):
            return self.call_begun(index, part.call, new_call_id(), part.name)
        return self.arguments(index, part.call, part.fragment)


@attrs.frozen(eq=False)
class Chat:
    """A conversation that is being answered."""

    generation: Generation
    n_prompt: int  # tokens

    async def complete(self) -> list[Answer]:
        """Wait for the end; an answer for each completion. Raises: RequestError, what a completion failed with."""
        return [Answer.of(completion) for completion in await self.generation.complete()]

    async def stream(self, shape: AnswerShape, error_shape: ErrorShape, wire: Wire = PLAIN) -> Response:
        """The response that tells the answers as they come, sent once the first news is there. Raises: as `complete`."""
        return sse_response(SseBody(self.generation, await self.generation.first_events(), shape, error_shape, wire))


# --- from a conversation to a generation -------------------------------------------------------------------------------


async def open_chat(
    context: Context, model: ServedModel, conversation: Conversation, asked: Wanted, *, endpoint: str, n_logprobs: int | None = None
) -> Chat:
    """Submit a conversation. Raises: InvalidRequest · NotSupported · ContextExceeded · Unavailable · TemplateFailed."""
    check_room(context, asked, "n")
    try:
        open_it = _open_unread if model.reads_text else _open_read
        return await open_it(context, model, conversation, asked, endpoint=endpoint, n_logprobs=n_logprobs)
    except InvalidRequest as error:
        name = conversation.turns_field
        if error.param != "messages" or name == "messages":
            raise
        raise InvalidRequest(f"{name}: {error.message.removeprefix('messages: ')}", param=name, code=error.code) from error


async def _open_read(
    context: Context, model: ServedModel, conversation: Conversation, asked: Wanted, *, endpoint: str, n_logprobs: int | None
) -> Chat:
    """Submit a conversation to a model that computes tokens."""
    model = _as_it_speaks(model, conversation)
    text = await render(model, conversation)
    form = _form(model, conversation, text)
    grammar = await _grammar(context, model, conversation, form)
    if form is not None:  # beside tools that may be called, a grammar leaves other text as it comes
        is_whole = conversation.form is not None or conversation.toolbox.use is ToolUse.REQUIRED
        form = attrs.evolve(form, held=grammar is not None and is_whole)
    tokens = await _tokens(context, model, text)
    after = form.tags.closing if form is not None and form.tags is not None and form.opened else ""
    specs = asked.specs(
        [tokens],
        n_logprobs=n_logprobs,
        key=g.key,
        request_id=g.request_id,
        grammar=grammar,
        form=told(model, conversation.form, after=after),
        answer=form,
    )
    return Chat(await open_generation(context, specs, endpoint), len(tokens))


async def _open_unread(
    context: Context, model: ServedModel, conversation: Conversation, asked: Wanted, *, endpoint: str, n_logprobs: int | None
) -> Chat:
    """Submit a conversation to a model that writes and reads conversations by itself."""
    name, parameters = conversation.tool_fields

    def sent() -> UnreadPrompt:
        prompts.check_texts_fit(model, [*conversation.messages, *conversation.documents])
        check_toolbox(conversation.toolbox, name=name, parameters=parameters)
        chat = _as_sent(conversation, model.heeds or frozenset())
        if chat.strict and "strict" not in (model.heeds or ()):
            raise NotHeeded("this model's backend cannot do tools that are strict", param="tools")
        return UnreadPrompt.of(chat, n_chars([chat.messages, chat.tools, conversation.documents]), model.n_ctx)

    prompt = await prompts.of_many(len(conversation.messages), sent)
    form = told(model, conversation.form)
    specs = asked.specs([prompt], n_logprobs=n_logprobs, key=g.key, request_id=g.request_id, form=form)
    try:
        return Chat(await open_generation(context, specs, endpoint), len(prompt))
    except NotHeeded as error:
        own_name = conversation.thinking.names.get(error.param or "")
        if own_name is None:
            raise
        raise NotHeeded(f"this model's backend cannot do {own_name}", param=own_name) from error


def _as_sent(conversation: Conversation, heeds: frozenset[str]) -> StreamChat:
    """The conversation for a model that writes it by itself and heeds `heeds` of it. Raises: NotHeeded · InvalidRequest."""
    prompts.check_variables(conversation.given_variables)
    _check_can_go_on(conversation)
    thinking, toolbox = conversation.thinking, conversation.toolbox
    if conversation.documents and "template_variables" not in heeds:
        raise NotHeeded("this model's backend cannot do documents", param="documents")
    if thinking.n_tokens_max:
        name = thinking.names.get("reasoning_budget", "reasoning_budget")
        raise NotHeeded(f"this model's backend cannot do {name}", param=name)
    if not (conversation.add_generation_prompt or conversation.continue_final_message):
        raise NotHeeded("this model's backend cannot do add_generation_prompt", param="add_generation_prompt")
    effort, variables = _reasoning_as_sent(thinking, conversation.given_variables, heeds)
    return StreamChat(
        messages=conversation.messages,
        tools=[_tool_as_sent(tool) for tool in toolbox.tools] if toolbox.is_open else (),
        tool_choice=_tool_choice(toolbox),
        parallel_tool_calls=toolbox.parallel or not toolbox.is_open,
        reasoning_effort=effort,
        template_variables=variables,
        continue_final_message=conversation.continue_final_message,
        strict=toolbox.is_open and any(tool.strict for tool in toolbox.callable),
    )


def _reasoning_as_sent(thinking: Thinking, given: Mapping[str, Any], heeds: frozenset[str]) -> tuple[str | None, dict[str, Any]]:
    """The effort and the variables of a template that say what is wanted, in the words that the model heeds where it does not heed both."""
    heeds_effort, heeds_switch = "reasoning_effort" in heeds, "template_variables" in heeds
    if heeds_effort and not heeds_switch:  # that it is to reason goes without saying
        switches = [name for name in SWITCHES if isinstance(given.get(name), bool)]
        wanted = thinking.wanted if thinking.wanted is not None or not switches else given[switches[0]]
        return ("none" if wanted is False else thinking.effort), {name: value for name, value in given.items() if name not in switches}
    if thinking.wanted is False and heeds_switch and (thinking.effort != "none" or not heeds_effort):  # whatever else is said
        return None, {"enable_thinking": False, **given}
    if thinking.effort is None:
        return None, {**({} if thinking.wanted is None else {"enable_thinking": thinking.wanted}), **given}
    return thinking.effort, {**given}


def _tool_as_sent(tool: Tool) -> dict[str, Any]:
    shape = tool.for_template()
    if tool.strict:
        shape["function"]["strict"] = True
    return shape


def _tool_choice(toolbox: Toolbox) -> str | dict[str, Any]:
    if toolbox.only is not None:
        return {"type": "function", "function": {"name": toolbox.only}}
    return "required" if toolbox.is_open and toolbox.use is ToolUse.REQUIRED else "auto"


async def prompt_of(context: Context, model: ServedModel, conversation: Conversation) -> list[int]:
    """The tokens of a conversation's prompt. Raises: InvalidRequest · ContextExceeded by far · TemplateFailed."""
    return await _tokens(context, model, await render(model, conversation))


async def render(model: ServedModel, conversation: Conversation) -> str:
    """The conversation as the model's own template writes it. Raises: InvalidRequest · ContextExceeded by far · TemplateFailed."""
    model = _as_it_speaks(model, conversation)
    known, thinking = model.template.features.variables, conversation.thinking
    if conversation.documents and "documents" not in known:
        raise InvalidRequest("documents: this model's chat template shows none; a message can have them as text", param="documents")
    messages, offered = await prompts.of_many(len(conversation.messages), lambda: _for_template(model, conversation))
    text = await prompts.render(
        model,
        messages,
        tools=[tool.for_template() for tool in offered] or None,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        variables=thinking.variables(known, conversation.given_variables, model.template.features.efforts),
    )
    return _begun(model, text, conversation, thinking.budget(known))


def _as_it_speaks(model: ServedModel, conversation: Conversation) -> ServedModel:
    """Some models have a template of their own for conversations in which tools are offered."""
    return model.with_tools() if conversation.toolbox.is_open else model


def _for_template(model: ServedModel, conversation: Conversation) -> tuple[list[dict[str, Any]], Sequence[Tool]]:
    """Messages and tools as the model's template is told of them. Raises: InvalidRequest · ContextExceeded by far."""
    name, parameters = conversation.tool_fields
    prompts.check_texts_fit(model, [*conversation.messages, *conversation.documents])
    check_toolbox(conversation.toolbox, name=name, parameters=parameters)
    toolbox, dialect = conversation.toolbox, model.dialect
    offered = toolbox.tools if toolbox.is_open else ()
    _check_can_go_on(conversation)
    messages = with_names(conversation.messages)
    if not dialect.knows_tools:
        return generic_tools.told(in_order_of_calls(messages), offered, dialect.calls), ()
    if not model.template.features.shows_calls and not dialect.calls.channels:
        messages = earlier_calls.told(in_order_of_calls(messages), dialect.calls)
    return messages, offered


def _check_can_go_on(conversation: Conversation) -> None:
    """A message with calls is over: what would be written on is the text before them. Raises: InvalidRequest."""
    if conversation.continue_final_message and conversation.messages and conversation.messages[-1].get("tool_calls"):
        raise InvalidRequest("messages: the last message calls tools, so there is nothing to go on from", param="messages")


def _begun(model: ServedModel, text: str, conversation: Conversation, budget: int | None) -> str:
    """The prompt with the beginning of an answer that is to have reasoning, or none, or a form, as far as the template leaves that out."""
    if model.dialect.tags is None or conversation.continue_final_message or not conversation.add_generation_prompt:
        return text
    if model.dialect.calls.channels:
        return _with_header(model, text, conversation, budget)
    return _with_tags(model.dialect, text, conversation, budget)


def _with_header(model: ServedModel, text: str, conversation: Conversation, budget: int | None) -> str:
    """Forms that know nothing of headers begin behind one."""
    form = conversation.form
    is_known = form is None or (form.source.kind is Kind.JSON_SCHEMA and model.heeds is None)
    if not is_known or (budget == 0 and not conversation.toolbox.is_open):
        return text + model.dialect.calls.frame.before_content
    tags = model.dialect.tags
    return f"{text}{tags.opening}" if tags is not None and form is not None and conversation.thinking.wanted else text


def _with_tags(dialect: Dialect, text: str, conversation: Conversation, budget: int | None) -> str:
    """The prompt with the tags of reasoning that a template has left out, or written whatever it was told."""
    assert dialect.tags is not None
    if budget == 0 and _is_opened(dialect, text):
        return f"{text.rstrip()}\n\n{dialect.tags.closing}\n\n"
    # An answer that is held to a form begins with it, unless reasoning has begun.
    if conversation.form is not None and conversation.thinking.wanted and not _is_opened(dialect, text):
        return f"{text}{dialect.tags.opening}\n"
    return text


async def _tokens(context: Context, model: ServedModel, text: str) -> list[int]:
    prompts.check_fits(model, text)
    return await prompts.chat_prompt(context, text, "messages")


def _is_opened(dialect: Dialect, text: str) -> bool:
    return dialect.tags is not None and text.rstrip().endswith(dialect.tags.opening)


def _goes_on_reasoning(dialect: Dialect, conversation: Conversation, text: str) -> bool:
    """Whether the answer goes on from a message that has begun to reason, and that the template has not closed."""
    tags = dialect.tags
    if tags is None or not conversation.continue_final_message:
        return False
    if dialect.calls.channels:
        return is_in_reasoning(text)
    if text.rfind(tags.opening) <= text.rfind(tags.closing):
        return False
    final, reader = conversation.messages[-1], ReasoningReader(tags, opened=False)
    content, reasoning = plain_text(final.get("content")), (final.get("reasoning_content") or "").strip()
    if content.strip() and text[text.rfind(tags.opening) + len(tags.opening) :].strip() == content.strip():
        return True  # the template itself has opened a reasoning before it
    for start in range(0, len(content), N_CHARS_READ):  # the reader keeps what it is given, and copies that at each tag
        reader.push(content[start : start + N_CHARS_READ])
        if reader.is_past:
            break
    return reader.is_inside or (not content and bool(reasoning) and text.rstrip().endswith(reasoning))


async def _grammar(context: Context, model: ServedModel, conversation: Conversation, form: AnswerFormat | None) -> Grammar | None:
    """What holds the answer, whose reasoning stays free."""
    opening: str | None = None
    if form is not None and form.tags is not None:
        opening = "" if form.opened or form.begun or form.n_reasoning_max == 0 else form.tags.opening
    header = "" if form is None or form.begun else model.dialect.calls.frame.before_content
    _, parameters = conversation.tool_fields
    toolbox = _toolbox(model, conversation)
    return await grammar_of(context, model, toolbox, conversation.form, parameters=parameters, opening=opening, header=header)


def _toolbox(model: ServedModel, conversation: Conversation) -> Toolbox:
    """What the answer may call: once what is named, and one thing at a time where the template would refuse several when it goes on."""
    features, toolbox = model.template.features, conversation.toolbox
    return toolbox if features.takes_several_calls and toolbox.only is None else attrs.evolve(toolbox, parallel=False)


def _form(model: ServedModel, conversation: Conversation, text: str) -> AnswerFormat | None:
    """How the answer to the prompt `text` is to be read; None where it can hold nothing but content."""
    dialect, toolbox = model.dialect, _toolbox(model, conversation)
    if dialect.tags is None and not toolbox.is_open:
        return None
    is_opened = _is_opened(dialect, text)
    goes_on = not is_opened and _goes_on_reasoning(dialect, conversation, text)
    return AnswerFormat(
        tags=dialect.tags,
        opened=is_opened or goes_on,
        resumed=goes_on,
        n_reasoning_max=_n_reasoning_max(model, conversation),
        closing=dialect.closing,
        wrapping=dialect.wrapping if conversation.form is None else None,  # else what the form has are its own
        begun=dialect.calls.channels and is_in_content(text),
        calls=dialect.calls if toolbox.is_open or dialect.calls.channels else None,
        tools=toolbox.callable,
        assured=is_held(dialect.calls, toolbox) or (toolbox.is_open and conversation.form is not None),
        single=not toolbox.parallel,
        must_call=toolbox.use is ToolUse.REQUIRED,
        shown=dialect.shown,
    )


def _n_reasoning_max(model: ServedModel, conversation: Conversation) -> int | None:
    """The tokens after which reasoning is ended; None: nobody ends it."""
    if not model.dialect.closing:
        return None
    if model.heeds is not None:  # it draws by itself, and is not to be refused for what the template has been told
        return conversation.thinking.n_tokens_max or None
    return conversation.thinking.budget(model.template.features.variables)


def with_names(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of tools with the names of what was called, which some templates want and few clients send."""
    names: dict[str, str] = {}
    named: list[dict[str, Any]] = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call.get("id") or ""] = call["function"]["name"]
        name = names.get(message.get("tool_call_id") or "") if message.get("role") == "tool" else None
        named.append({"name": name, **message} if name is not None else message)
    return named
