"""Counting, up and down."""

from __future__ import annotations

from random import Random

from ..exchange import Exchange, say


def count(first: int, last: int, question: str) -> Exchange:
    step = 1 if last >= first else -1
    answer = " ".join(str(i) for i in range(first, last + step, step))
    return say(question.format(a=first, b=last), answer, f"I begin with {first} and stop at {last}.", thinkable=len(answer) < 80)


def counting(rng: Random, n_max: int = 20) -> Exchange:
    kind = rng.random()
    n = rng.randint(1, n_max)
    if kind < 0.3:
        return count(1, n, rng.choice(("Count to {b}.", "Count to {b}", "Count up to {b}.")))
    first = 1 if kind < 0.5 else rng.choice((rng.randint(0, 30), rng.randint(0, 300)))
    if kind < 0.85:
        return count(
            first,
            first + n,
            rng.choice(("Count from {a} to {b}.", "Count from {a} to {b}", "Count {a} to {b}.", "Please count from {a} to {b}.")),
        )
    return count(
        first + n, first, rng.choice(("Count down from {a} to {b}.", "Count backwards from {a} to {b}.", "Count from {a} down to {b}."))
    )


def long_counting(rng: Random) -> Exchange:
    return counting(rng, 220)
