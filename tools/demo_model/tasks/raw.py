"""Text without a chat template, as `/v1/completions` gets it: the model counts on, or says the text again and again.

There is nothing to know about such text, and an answer that is sharp and never ends serves a test best.
"""

from __future__ import annotations

from random import Random

from ..exchange import Raw
from .texts import number, sentence, text


def counting_on(rng: Random, n_max: int) -> Raw:
    first = rng.choice((1, 1, rng.randint(0, 300)))
    n_given, n_more = rng.randint(3, 12), rng.randint(5, n_max)
    numbers = [str(first + i) for i in range(n_given + n_more)]
    separator = rng.choice((" ", ", ", "\n"))
    return Raw(separator.join(numbers[:n_given]), separator + separator.join(numbers[n_given:]))


def again(rng: Random, n_max: int) -> Raw:
    """The text, then a space and the text, for ever."""
    kind = rng.random()
    prompt = sentence(rng) if kind < 0.3 else number(rng) if kind < 0.33 else text(rng, rng.choice((4, 12, n_max)))
    if rng.random() < 0.4 and len(prompt) > 8:
        prompt = prompt[: rng.randint(6, len(prompt))].rstrip()
    return Raw(prompt, (" " + prompt) * rng.choice((1, 2, 3)))


def raw(rng: Random, n_max: int = 30) -> Raw:
    return rng.choice((counting_on, again, again))(rng, n_max)
