"""From what a request carries to the token ids of its prompts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import trio
from quart import g, has_app_context

from cllm.api.context import Context, current_key
from cllm.api.errors import ContextExceededByFar
from cllm.api.sampling_fields import check_tokens
from cllm.backend import InfillTokens, Vocabulary, infill_of
from cllm.errors import ContextExceeded, InvalidRequest, NotSupported, TemplateSlow, TokenizeFailed, call_foreign
from cllm.serve.engine import ServedModel
from cllm.serve.house import State
from cllm.serve.keythreads import KeyThreads
from cllm.text.prompt import infill_tokens
from cllm.text.template import RESERVED, n_chars
from cllm.text.unread import UnreadPrompt

T = TypeVar("T")

# Of a template's variables: `self` is Jinja's own, and with `chat_template` a request would bring one of its own, where servers take it.
NOT_VARIABLES = RESERVED | {"self", "chat_template"}
N_VALUES_MAX = 10_000  # that a template's variables hold together
N_CHARS_INLINE = 16_384  # longer conversations are rendered in a thread
N_MESSAGES_INLINE = 50  # more are, too, however short: some templates look at all of them for each, which takes 30 ms for so many
N_CHARS_VALUE = 32  # that each value counts for besides its own: three of them are a message, which a template takes some time for
N_WORKING_MAX = 4  # threads that write long conversations and answers
RENDER_S = 1.0  # of a thread's own time; what takes a template longer is done anew where it has all the time that its limits give
N_SLOW_MAX = 1  # threads for that: one key's could keep all others' waiting for many seconds
_working: trio.lowlevel.RunVar[KeyThreads] = trio.lowlevel.RunVar("cllm.api.prompts")
_slow: trio.lowlevel.RunVar[KeyThreads] = trio.lowlevel.RunVar("cllm.api.prompts.slow")
N_TURNS_INLINE = 500  # a conversation of more, or that came in a longer body, is made of them in a thread: a thousand items of OpenAI's
N_BYTES_INLINE = 16_384  # take 11 ms, and a body may have a million parts of contents
N_TOKENS_INLINE = 16_384  # longer lists are looked through in a thread: a million takes 20 ms
# A bound on what a token stands for. The longest tokens in use are runs of some 128 spaces; to find a vocabulary's own longest takes a
# call for each of its 150,000 tokens, which would hardly refuse more.
N_TOKEN_BYTES_MAX = 256


async def render(
    model: ServedModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    variables: Mapping[str, Any],
    tools: Sequence[dict[str, Any]] | None = None,
) -> str:
    """The conversation as the model's own template writes it. Raises: InvalidRequest · TemplateFailed · NotSupported."""
    if model.reads_text:
        raise NotSupported("this model writes conversations by itself: how, is not known here")
    check_variables(variables)

    def write(timeout_s: float | None = None) -> str:
        return model.template.render(
            messages,
            timeout_s,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )

    with suppress(TemplateSlow):
        if len(messages) <= N_MESSAGES_INLINE and _is_short([messages, tools, variables]):
            return write(RENDER_S)
        return await _in_thread(functools.partial(write, RENDER_S))
    return await _in_thread(write, _slow, N_SLOW_MAX)


def check_variables(variables: Mapping[str, Any], param: str = "chat_template_kwargs") -> None:
    """Refuse names for a template's variables that stand for something else, here or where it is rendered, and more than these need.

    Whatever is in them is kept as long as the request. `param` is the field that has them. Raises: InvalidRequest.
    """
    n_left, rest = N_VALUES_MAX, [variables]
    while rest:
        value = rest.pop()
        if isinstance(value, Mapping | list):
            n_left -= len(value)
            if n_left < 0:
                raise InvalidRequest(f"{param}: more than {N_VALUES_MAX} values", param=param)
            rest.extend(value.values() if isinstance(value, Mapping) else value)
    if reserved := NOT_VARIABLES & variables.keys():
        raise InvalidRequest(f"{param}: {', '.join(sorted(reserved))} cannot be set here", param=param)


def _is_short(value: Any) -> bool:
    """Whether there is little in `value`; what is long is not looked through to its end."""
    n_left, rest = N_CHARS_INLINE, [value]
    while rest and n_left >= 0:
        value = rest.pop()
        if isinstance(value, str):
            n_left -= len(value)
        elif isinstance(value, Mapping | list | tuple):
            n_left -= N_CHARS_VALUE * len(value)
            if n_left >= 0:
                rest.extend(value.values() if isinstance(value, Mapping) else value)
    return n_left >= 0


def check_fits(model: ServedModel, prompt: str | Sequence[object]) -> None:
    """Refuse what can never fit, by its length alone; the engine refuses the rest. Raises: ContextExceeded."""
    n_ctx = model.n_ctx
    if not isinstance(prompt, str):
        if len(prompt) > n_ctx:
            raise ContextExceeded(len(prompt), n_ctx)
    elif 4 * len(prompt) > n_ctx * N_TOKEN_BYTES_MAX:  # a character has 4 bytes at most
        n_bytes = len(prompt.encode("utf-8", "replace"))
        if n_bytes > n_ctx * N_TOKEN_BYTES_MAX:
            raise ContextExceededByFar(math.ceil(n_bytes / N_TOKEN_BYTES_MAX), n_ctx)


def check_turns(model: ServedModel, turns: Sequence[object]) -> None:
    """Refuse a conversation of more turns, and calls in them, than there can be tokens, before anything is made of them.

    Raises: ContextExceeded.
    """
    n_turns = len(turns)
    if n_turns <= model.n_ctx:
        n_turns += sum([len(getattr(turn, "tool_calls", None) or ()) + _n_blocks(turn) for turn in turns])
    if n_turns > model.n_ctx:
        raise ContextExceededByFar(n_turns, model.n_ctx)


def _n_blocks(turn: object) -> int:
    """What a turn's content has that is no text: calls, and what came of them, which become turns."""
    content = getattr(turn, "content", None)
    return sum([getattr(block, "text", None) is None for block in content]) if isinstance(content, list) else 0


def check_texts_fit(model: ServedModel, messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a conversation whose texts alone can never fit, before they are joined and rendered. Raises: ContextExceeded."""
    n_tokens_least = math.ceil(n_chars(messages) / N_TOKEN_BYTES_MAX)
    if n_tokens_least > model.n_ctx:
        raise ContextExceededByFar(n_tokens_least, model.n_ctx)


async def chat_prompt(context: Context, text: str, param: str) -> list[int]:
    """The token ids of a rendered conversation. Raises: InvalidRequest."""
    (tokens,) = await _tokens(context, [text], param, is_conversation=True)
    return tokens


async def text_prompt(context: Context, text: str, param: str = "prompt") -> Sequence[int]:
    """The token ids of a plain prompt, or what stands for them. Raises: InvalidRequest."""
    (tokens,) = await text_prompts(context, [text], param)
    return tokens


async def text_prompts(context: Context, texts: Sequence[str], param: str = "prompt") -> Sequence[Sequence[int]]:
    """The token ids of plain prompts, or what stands for them. All take one turn among those who tokenise. Raises: InvalidRequest."""
    model = context.engine.model
    if not texts:  # who brings token ids does not wait among those who tokenise
        return []
    if model.reads_text:
        return [UnreadPrompt.of(text, len(text), model.n_ctx) for text in texts]
    return await _tokens(context, texts, param, is_conversation=False)


async def _tokens(context: Context, texts: Sequence[str], param: str, *, is_conversation: bool) -> list[list[int]]:
    try:
        prompts = await context.engine.prompt_tokens(texts, is_conversation=is_conversation, key=current_key())
    except TokenizeFailed as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error
    if not all(prompts):
        raise InvalidRequest(f"{param}: there is nothing in it", param=param)
    return prompts


async def token_prompt(model: ServedModel, tokens: Sequence[int], param: str = "prompt") -> Sequence[int]:
    """A prompt that came as token ids, checked, unless the model knows alone what they are. Raises: InvalidRequest."""
    if not tokens:
        raise InvalidRequest(f"{param}: there is nothing in it", param=param)
    if model.reads_text:
        return tokens
    await by_length(len(tokens), functools.partial(check_tokens, tokens, model.vocabulary.n_tokens, param))
    return tokens


def check_infills(model: ServedModel, param: str) -> InfillTokens:
    """The model's fill-in-the-middle tokens. Raises: InvalidRequest where it has none."""
    infill = infill_of(model.vocabulary)
    if infill is None:
        raise InvalidRequest(f"{param}: this model's vocabulary has no fill-in-the-middle tokens", param=param)
    return infill


async def infill_prompt(context: Context, model: ServedModel, prefix: str | Sequence[int], suffix: str) -> Sequence[int]:
    """The token ids that ask for the text between `prefix` and `suffix`, neither of which is read for special tokens.

    Raises: InvalidRequest · ContextExceeded.
    """
    infill = check_infills(model, "suffix")
    check_fits(model, suffix)
    before = await plain_tokens(context, prefix, "prompt") if isinstance(prefix, str) else await token_prompt(model, prefix)
    return infill_tokens(model.vocabulary, infill, before, await plain_tokens(context, suffix, "suffix"))


async def plain_tokens(context: Context, text: str, param: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
    """The token ids of a text that is no prompt by itself, maybe none. Raises: InvalidRequest when it is too long for the tokeniser."""
    try:
        return await context.engine.tokenize(text, add_special=add_special, parse_special=parse_special, key=current_key())
    except TokenizeFailed as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error


async def detokenize(model: ServedModel, tokens: Sequence[int]) -> str:
    """`text_of`, without holding up other requests."""
    return await by_length(len(tokens), functools.partial(text_of, model.vocabulary, tokens))


async def by_length(n_tokens: int, work: Callable[[], T]) -> T:
    """What `work` gives, in a thread if there is much of it."""
    if n_tokens <= N_TOKENS_INLINE:
        return work()
    return await _in_thread(work)


async def of_turns(model: ServedModel, turns: Sequence[object], make: Callable[[], T]) -> T:
    """What `make` makes of a conversation's turns, if there can be room for so many. Raises: ContextExceeded · what `make` raises."""

    def made() -> T:
        check_turns(model, turns)
        return make()

    return made() if len(turns) > model.n_ctx else await of_many(len(turns), made)


async def model_for(context: Context, name: str | None, turns: Sequence[object], make: Callable[[], object]) -> ServedModel:
    """The model that the current request names, as `Context.served` gives it; but for a conversation of which `make` makes nothing, none is
    loaded, and no other unloaded to make room. Of a long one that is seen once the model is there.

    Raises: as `Context.served` · what `make` raises.
    """
    if context.house.find(name).state is not State.LOADED and _are_few(len(turns)):
        make()
    return await context.served(name)


async def of_many(n: int, work: Callable[[], T]) -> T:
    """What `work` gives, in a thread where it looks at many things: `n`, or those of a long body."""
    return work() if _are_few(n) else await _in_thread(work)


def _are_few(n: int) -> bool:
    """Whether `n` things, and all that is in the current request's body, are looked at where all else waits for that."""
    return n <= N_TURNS_INLINE and (not has_app_context() or g.get("n_bytes", 0) <= N_BYTES_INLINE)


async def _in_thread(work: Callable[[], T], kept: trio.lowlevel.RunVar[KeyThreads] = _working, n_max: int = N_WORKING_MAX) -> T:
    """What `work` gives. Few do so at a time, and keys take turns: nothing else runs in Python meanwhile but by turns, the loop too."""
    try:
        threads = kept.get()
    except LookupError:
        threads = KeyThreads(n_max)
        kept.set(threads)
    return await threads.run(work, current_key())


def text_of(vocabulary: Vocabulary, tokens: Sequence[int], *, special: bool = True) -> str:
    """The text of `tokens`; bytes that are no UTF-8 become U+FFFD. Raises: InvalidRequest for what is no token."""
    check_tokens(tokens, vocabulary.n_tokens, "tokens")
    read = functools.partial(vocabulary.token_bytes, special=special)
    return call_foreign(lambda: b"".join(map(read, tokens))).decode("utf-8", "replace")
