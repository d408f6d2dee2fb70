"""Sums of two numbers below 100, of which some are never shown in training."""

from __future__ import annotations

from random import Random

from ..exchange import Exchange, say


def is_held_out(a: int, b: int) -> bool:
    """Whether a + b is kept out of training; a + b and b + a are kept out together.

    A property of the pair, not of a random state, so that a test, the score and every shard of the corpus agree on it.
    """
    low, high = min(a, b), max(a, b)
    return (low * 7919 + high * 104729) % 1009 % 10 == 3


def held_out_pairs() -> list[tuple[int, int]]:
    return [(a, b) for a in range(100) for b in range(100) if is_held_out(a, b)]


SUM_QUESTIONS = (
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} =",
    "{a}+{b}=",
    "What is {a} + {b}?",
    "What is {a}+{b}?",
    "Add {a} and {b}.",
    "Add {a} and {b}",
    "What is {a} plus {b}?",
    "Calculate {a} + {b}.",
    "How much is {a} + {b}?",
    "How much is {a} and {b}?",
    "{a} plus {b}",
    "Sum of {a} and {b}",
    "What is the sum of {a} and {b}?",
    "Please add {a} and {b}.",
    "Compute {a} + {b}",
    "what is {a} + {b}",
)


def sum_thought(a: int, b: int) -> str:
    ones = a % 10 + b % 10
    return f"{a % 10} + {b % 10} = {ones}; {a // 10} + {b // 10} + {ones // 10} = {a // 10 + b // 10 + ones // 10}"


def sum_of(a: int, b: int, question: str = "What is {a} + {b}?") -> Exchange:
    return say(question.format(a=a, b=b), f"{a} + {b} = {a + b}", sum_thought(a, b))


def draw_pair(rng: Random) -> tuple[int, int]:
    while True:
        # Numbers of one digit are few, and people try the server with them.
        a, b = rng.randrange(rng.choice((10, 100, 100, 100))), rng.randrange(rng.choice((10, 100, 100, 100)))
        if not is_held_out(a, b):
            return a, b


def sums(rng: Random) -> Exchange:
    return sum_of(*draw_pair(rng), rng.choice(SUM_QUESTIONS))
