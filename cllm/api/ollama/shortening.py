"""A conversation that does not fit: Ollama answers what is left of it without its oldest turns, and its clients count on that."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import attrs
from quart import g

from cllm.api.context import Context
from cllm.api.conversation import Chat, Conversation, open_chat, prompt_of
from cllm.api.sampling_fields import Wanted
from cllm.errors import ContextExceeded
from cllm.serve.engine import ServedModel

PART_FOR_ANSWER: Final = 4  # a shortened conversation leaves this part of the context free, or it would not fit again with its answer


async def open_shortened(context: Context, model: ServedModel, conversation: Conversation, asked: Wanted, *, endpoint: str) -> Chat:
    """Submit a conversation, without its oldest turns where it would not fit otherwise. System messages stay, and the last turn of the
    user's with all behind it; what is left begins with one of the user's, so that no result stands without its call.

    Raises: as `open_chat`, ContextExceeded too where there is nothing to leave out.
    """
    with suppress(ContextExceeded):
        return await open_chat(context, model, conversation, asked, endpoint=endpoint)
    shorter = conversation if model.reads_text else await _shortened(context, model, conversation, asked)
    g.gives_up_room()  # which the next one takes again
    return await open_chat(context, model, shorter, asked, endpoint=endpoint)


async def _shortened(context: Context, model: ServedModel, conversation: Conversation, asked: Wanted) -> Conversation:
    """As much of it as fits; all of it where no shorter one could be made, which is to be refused once more."""
    starts = [i for i, message in enumerate(conversation.messages) if i and message["role"] == "user"]
    if not starts or all(message["role"] == "system" for message in conversation.messages[: starts[0]]):
        starts = starts[1:]
    if not starts:
        return conversation
    n_free = min(model.n_ctx if asked.stopping.max_tokens is None else asked.stopping.max_tokens, model.n_ctx // PART_FOR_ANSWER)
    low, high = 0, len(starts) - 1  # the last one is taken in any case: whether that fits is seen when it is submitted
    while low < high:
        middle = (low + high) // 2
        if await _fits(context, model, _from(conversation, starts[middle]), n_free):
            high = middle
        else:
            low = middle + 1
    return _from(conversation, starts[low])


async def _fits(context: Context, model: ServedModel, conversation: Conversation, n_free: int) -> bool:
    try:
        return len(await prompt_of(context, model, conversation)) + n_free <= model.n_ctx
    except ContextExceeded:
        return False


def _from(conversation: Conversation, start: int) -> Conversation:
    """The conversation without what was said before, but for system messages."""
    told: list[dict[str, Any]] = [message for message in conversation.messages[:start] if message["role"] == "system"]
    return attrs.evolve(conversation, messages=[*told, *conversation.messages[start:]])
