"""From what a request carries to the token ids of its prompts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import trio

from cllm.api.context import Context
from cllm.api.sampling_fields import check_tokens
from cllm.backend import Vocabulary
from cllm.errors import InvalidRequest, TokenizeFailed
from cllm.serve.engine import ServedModel

N_CHARS_INLINE = 16_384  # longer conversations are rendered in a thread

RESERVED_VARIABLES = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message"})  # have their own ways


async def render(
    model: ServedModel,
    messages: Sequence[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
) -> str:
    """The conversation as the model's own template writes it. Raises: InvalidRequest · TemplateFailed."""
    if reserved := RESERVED_VARIABLES & variables.keys():
        raise InvalidRequest(f"chat_template_kwargs: {', '.join(sorted(reserved))} cannot be set here", param="chat_template_kwargs")
    render = functools.partial(
        model.template.render,
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        **variables,
    )
    if sum(len(message["content"]) for message in messages) <= N_CHARS_INLINE:
        return render()
    return await trio.to_thread.run_sync(render, abandon_on_cancel=True)


async def chat_prompt(context: Context, text: str, param: str) -> list[int]:
    """The token ids of a rendered conversation. Raises: InvalidRequest."""
    return await _tokens(context, text, param, is_conversation=True)


async def text_prompt(context: Context, text: str, param: str = "prompt") -> list[int]:
    """The token ids of a plain prompt. Raises: InvalidRequest."""
    return await _tokens(context, text, param, is_conversation=False)


async def _tokens(context: Context, text: str, param: str, *, is_conversation: bool) -> list[int]:
    try:
        tokens = await context.engine.prompt_tokens(text, is_conversation=is_conversation)
    except TokenizeFailed as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error
    if not tokens:
        raise InvalidRequest(f"{param}: there is nothing in it", param=param)
    return tokens


def token_prompt(model: ServedModel, tokens: Sequence[int], param: str = "prompt") -> Sequence[int]:
    """A prompt that came as token ids, checked. Raises: InvalidRequest."""
    if not tokens:
        raise InvalidRequest(f"{param}: there is nothing in it", param=param)
    check_tokens(tokens, model.vocabulary.n_tokens, param)
    return tokens


def text_of(vocabulary: Vocabulary, tokens: Sequence[int], *, special: bool = True) -> str:
    """The text of `tokens`; bytes that are no UTF-8 become U+FFFD. Raises: InvalidRequest for what is no token."""
    check_tokens(tokens, vocabulary.n_tokens, "tokens")
    return b"".join([vocabulary.token_bytes(token, special=special) for token in tokens]).decode("utf-8", "replace")
