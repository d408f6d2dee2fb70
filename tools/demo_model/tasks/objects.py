"""JSON on request."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from ..exchange import Exchange, say
from ..words import ADJECTIVES, CITIES, FIELDS, NAMES, NOUNS
from .texts import word


def value(rng: Random) -> tuple[str, Any]:
    """A value as the user writes it, and as JSON has it."""
    kind = rng.random()
    if kind < 0.4:
        number = rng.randrange(10 ** rng.randint(1, 4))
        return str(number), number
    if kind < 0.48:
        return rng.choice((("true", True), ("false", False), ("null", None)))
    chosen = rng.choice((word(rng), rng.choice(NAMES), rng.choice(CITIES), rng.choice(NOUNS), rng.choice(ADJECTIVES)))
    return chosen, chosen


def pairs(rng: Random, n: int) -> tuple[str, dict[str, Any]]:
    """`n` keys with values, as in "name Anna and age 31"."""
    keys = list(dict.fromkeys(rng.choice((rng.choice(FIELDS), rng.choice(FIELDS), word(rng))) for _ in range(n)))
    values = [value(rng) for _ in keys]
    return joined([f"{key} {each[0]}" for key, each in zip(keys, values, strict=True)]), dict(
        zip(keys, (each[1] for each in values), strict=True)
    )


def joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def as_json(anything: Any) -> str:
    return json.dumps(anything, ensure_ascii=False)


def json_object(rng: Random) -> Exchange:
    said, made = pairs(rng, rng.choice((1, 2, 2, 3, 4)))
    question = rng.choice(
        (
            "Give me JSON with {}.",
            "Give me JSON with {}",
            "Write JSON with {}.",
            "JSON with {}",
            "Return JSON with {}.",
            "Make a JSON object with {}.",
            "As JSON: {}",
            "Give me a JSON object with {}.",
        )
    )
    return say(question.format(said), as_json(made), "The user wants JSON.")


def json_list(rng: Random) -> Exchange:
    values = [value(rng) for _ in range(rng.randint(1, 6))]
    question = rng.choice(("Give me a JSON list of {}.", "Give me a JSON list with {}.", "Write a JSON array of {}.", "JSON list of {}"))
    return say(question.format(joined([each[0] for each in values])), as_json([each[1] for each in values]), "The user wants a JSON list.")


def json_nested(rng: Random) -> Exchange:
    outer, (inner_said, inner) = value(rng), pairs(rng, rng.choice((1, 2)))
    key, parent = rng.sample(FIELDS, 2)
    question = rng.choice(("Give me JSON with {k} {v} and {p} with {i}.", "Write JSON with {k} {v} and {p} with {i}."))
    return say(
        question.format(k=key, v=outer[0], p=parent, i=inner_said), as_json({key: outer[1], parent: inner}), "The user wants nested JSON."
    )


def json_on_request(rng: Random) -> Exchange:
    return rng.choice((json_object, json_object, json_object, json_list, json_nested))(rng)
