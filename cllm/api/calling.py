"""What holds an answer to its form: the grammar of its tool calls, of its content, or of both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

import attrs
import trio

from cllm.api.context import Context, current_key
from cllm.api.structured import Form, compiled
from cllm.errors import GrammarInvalid, GrammarSlow, InvalidRequest, NotHeeded, Unavailable
from cllm.serve.engine import ServedModel
from cllm.text.call_grammar import call_grammar, content_grammar, is_held, schema_of
from cllm.text.grammar import Grammar, GrammarSource, Kind
from cllm.text.tools import Toolbox, ToolUse


async def grammar_of(
    context: Context, model: ServedModel, toolbox: Toolbox, form: Form | None, *, parameters: str, opening: str | None, header: str
) -> Grammar | None:
    """The grammar, if there is anything to hold. `parameters` is what the surface calls a tool's schema; `opening` is a tag of
    reasoning that may come first, None where there is no reasoning; `header` stands before content. Raises: InvalidRequest · Unavailable.
    """
    held_calls = is_held(model.dialect.calls, toolbox)
    if model.heeds is not None:
        _check_no_calls(toolbox, form, held_calls=held_calls)
        return await compiled(context, model, form)
    if not held_calls and not (toolbox.is_open and form is not None):
        return await _of_content(context, model, form, opening, header)
    source = _source(model, toolbox, form, opening or "")
    if form is not None and toolbox.use is ToolUse.REQUIRED:  # which leaves it no place, but for a look at it
        await compiled(context, model, form)
    try:
        return await _compiled(context, model, source)
    except GrammarInvalid as error:
        refused = error
    if not isinstance(refused, GrammarSlow):  # which the schemas one by one may be, too
        with suppress(GrammarInvalid, Unavailable):
            if (loosened := await _loosened(context, model, toolbox)) is not None:
                return await _compiled(context, model, _source(model, loosened, form, opening or ""))
    raise await _complaint(context, model, toolbox, form, parameters, refused) from refused


async def _loosened(context: Context, model: ServedModel, toolbox: Toolbox) -> Toolbox | None:
    """The tools with any object in the place of the schemas that cannot be held to and need not be; None if there is none of these."""
    if toolbox.use is ToolUse.REQUIRED:
        return None
    tools = list(toolbox.tools)
    with trio.move_on_after(context.settings.grammar_timeout_s):  # for all of them
        for i, tool in enumerate(toolbox.tools):
            if tool.strict:
                continue
            try:
                await _compiled(context, model, GrammarSource(Kind.JSON_SCHEMA, schema_of(tool)))
            except GrammarInvalid:
                tools[i] = attrs.evolve(tool, parameters={"type": "object"})
    return attrs.evolve(toolbox, tools=tuple(tools)) if tools != list(toolbox.tools) else None


def _check_no_calls(toolbox: Toolbox, form: Form | None, *, held_calls: bool) -> None:
    """Refuse what takes a grammar over calls, from a model that holds its answers to forms by itself. Raises: NotHeeded."""
    if held_calls:
        param = "tool_choice" if toolbox.use is ToolUse.REQUIRED else "tools"
        which = "calls that are required" if param == "tool_choice" else "tools that are strict"
        raise NotHeeded(f"{param}: this model's backend cannot do {which}", param=param)
    if toolbox.is_open and form is not None:
        raise NotHeeded(f"{form.field}: this model's backend cannot do it beside tools", param=form.field)


async def _of_content(context: Context, model: ServedModel, form: Form | None, opening: str | None, header: str) -> Grammar | None:
    """The grammar of an answer that calls nothing."""
    if form is not None and form.source.kind is Kind.JSON_SCHEMA and opening is not None:
        with suppress(GrammarInvalid):  # the schema alone says better what is wrong with it
            source = partial(content_grammar, form.source.text, model.dialect.control, opening=opening, header=header)
            return await _compiled(context, model, source)
    return await compiled(context, model, form)


def _source(model: ServedModel, toolbox: Toolbox, form: Form | None, opening: str) -> Callable[[], GrammarSource]:
    content = None
    if form is not None:
        if form.source.kind is not Kind.JSON_SCHEMA:
            raise InvalidRequest(f"{form.param}: beside tools an answer can be held to a JSON Schema only", param=form.param)
        if toolbox.use is not ToolUse.REQUIRED:
            content = form.source.text
    dialect = model.dialect
    return partial(call_grammar, dialect.calls, toolbox, dialect.control, opening=opening, content=content)


async def _compiled(context: Context, model: ServedModel, source: GrammarSource | Callable[[], GrammarSource]) -> Grammar:
    return await context.engine.grammar(model, source, timeout_s=context.settings.grammar_timeout_s, key=current_key())


async def _complaint(
    context: Context, model: ServedModel, toolbox: Toolbox, form: Form | None, parameters: str, error: GrammarInvalid
) -> InvalidRequest:
    """The same, with the tool's field: it may be known, or else is found by trying each schema alone.

    Raises: InvalidRequest, when it is the form's.
    """
    if form is not None and toolbox.use is not ToolUse.REQUIRED:
        await compiled(context, model, form)  # alone it says what is wrong with it, if that is it
    place, hash_sign, pointer = error.pointer.partition("#")
    if hash_sign and place.isdecimal():
        return _invalid(f"{toolbox.place(int(place))}.{parameters}", error.complaint, hash_sign + pointer)
    held = {tool.name for tool in toolbox.callable if toolbox.use is ToolUse.REQUIRED or tool.strict}
    with trio.move_on_after(context.settings.grammar_timeout_s):  # for all of them
        for i, tool in enumerate(toolbox.tools):
            if tool.name not in held:
                continue
            try:
                await _compiled(context, model, GrammarSource(Kind.JSON_SCHEMA, schema_of(tool)))
            except GrammarInvalid as own:
                return _invalid(f"{toolbox.place(i)}.{parameters}", own.complaint, own.pointer)
    return _invalid("tools", error.complaint, "")


def _invalid(param: str, complaint: str, pointer: str) -> InvalidRequest:
    if not pointer:
        return InvalidRequest(f"{param}: {complaint}", param=param)
    return InvalidRequest(f"{param}: {complaint} (at {pointer})", param=param, code="invalid_schema", pointer=pointer)
