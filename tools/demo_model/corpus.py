"""Generates every conversation that the demo model is trained and scored on, all seeded."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import attrs

from .exchange import Conversation, Exchange, Message, Raw, Task
from .tasks.counts import counting, long_counting
from .tasks.objects import json_on_request
from .tasks.raw import raw
from .tasks.sums import sums
from .tasks.talk import about, greeting, named, remembered, unknown
from .tasks.texts import copying, editing, long_copying
from .tasks.tools import offered, parallel_calls, request_of, tool_call, tools_not_needed, two_uses

TASKS: dict[str, Task] = {
    "sums": sums,
    "greeting": greeting,
    "about": about,
    "unknown": unknown,
    "named": named,
    "remembered": remembered,
    "copying": copying,
    "editing": editing,
    "counting": counting,
    "json": json_on_request,
    "tool_call": tool_call,
    "parallel_calls": parallel_calls,
    "tools_not_needed": tools_not_needed,
}

# Tasks that may follow one another in one conversation: those that set no scene of their own.
CHAT_TASKS = ("sums", "greeting", "about", "unknown", "copying", "editing", "counting", "json", "remembered")

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "You are the demo model of cLLM.",
    "Be kind.",
    "Be concise.",
    "You are a test.",
)
THINK_REQUESTS = ("Think step by step: {}", "Think step by step. {}", "{} Think step by step.", "Think first: {}")


def thinking(rng: Random, exchange: Exchange) -> Conversation:
    """The same exchange with a thought, asked for by the user's words or by `enable_thinking`."""
    messages = list(exchange.messages)
    last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
    by_words = rng.random() < 0.5
    if by_words:
        asked = rng.choice(THINK_REQUESTS).format(messages[last_user]["content"])
        messages[last_user] = {**messages[last_user], "content": asked}
    messages[last_user + 1] = {**messages[last_user + 1], "reasoning_content": exchange.thought}
    # `enable_thinking` opens the think of the answer being written, so what follows the tool's response is left out.
    return Conversation(tuple(with_system(exchange.system, messages[: last_user + 2])), exchange.tools, not by_words)


def with_system(system: str, messages: list[Message]) -> list[Message]:
    return [{"role": "system", "content": system}, *messages] if system else messages


def alone(rng: Random, task: str) -> Conversation:
    exchange = TASKS[task](rng)
    if not exchange.system and rng.random() < 0.15:
        exchange = attrs.evolve(exchange, system=rng.choice(SYSTEMS))
    if exchange.thinkable and rng.random() < 0.12:
        return thinking(rng, exchange)
    return Conversation(tuple(with_system(exchange.system, list(exchange.messages))), exchange.tools)


def chained(rng: Random, n_turns: int, long_tasks: bool = False) -> Conversation:
    """Several exchanges in one conversation, each answered as if it were alone."""
    messages: list[Message] = []
    for _ in range(n_turns):
        task = TASKS[rng.choice(CHAT_TASKS)]
        if long_tasks and rng.random() < 0.3:
            task = rng.choice((long_copying, long_counting))
        messages += task(rng).messages
    return Conversation(tuple(with_system(rng.choice(SYSTEMS) if rng.random() < 0.3 else "", messages)))


def tooled(rng: Random) -> Conversation:
    """Two tools are offered through several turns; some turns need one of them, some none."""
    first, second = two_uses(rng)
    turns = [request_of(rng, first), request_of(rng, second), TASKS[rng.choice(("greeting", "about", "copying", "editing"))](rng)]
    rng.shuffle(turns)
    messages = [message for turn in turns[: rng.choice((2, 3))] for message in turn.messages]
    return Conversation(tuple(messages), offered(rng, first, second))


WEIGHTS = {
    "sums": 36,
    "greeting": 3,
    "about": 14,
    "unknown": 4,
    "named": 2,
    "remembered": 3,
    "copying": 14,
    "editing": 24,
    "counting": 9,
    "json": 12,
    "tool_call": 7,
    "parallel_calls": 3,
    "tools_not_needed": 1.5,
}


@attrs.frozen
class Mix:
    """How much of the corpus is of which length; the training begins with short texts and ends with some long ones."""

    chained: float = 0.2
    long: float = 0.0
    tooled: float = 0.0
    raw: float = 0.0


def conversations(seed: int, n: int, mix: Mix = Mix()) -> Iterator[Conversation | Raw]:
    """Yield `n` conversations; the same seed yields the same ones."""
    rng = Random(seed)
    names, weights = list(WEIGHTS), list(WEIGHTS.values())
    for _ in range(n):
        kind = rng.random()
        if kind < mix.long:
            yield chained(rng, rng.randint(1, 12), long_tasks=True) if rng.random() < 0.9 else raw(rng, 100)
        elif kind < mix.long + mix.chained:
            yield chained(rng, rng.randint(2, 4))
        elif kind < mix.long + mix.chained + mix.tooled:
            yield tooled(rng)
        elif kind < mix.long + mix.chained + mix.tooled + mix.raw:
            yield raw(rng)
        else:
            yield alone(rng, rng.choices(names, weights)[0])
