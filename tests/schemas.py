"""Two hundred JSON Schemas of growing difficulty, made by a seeded script, the last of each ten with something that cannot be held to."""

from __future__ import annotations

import random
from typing import Any

import attrs

N_SCHEMAS = 200
PATTERNS = (r"^[a-z]{2,8}$", r"^\d{3}-\d{4}$", r"^(red|green|blue)$", r"^[A-Z][a-z]*( [A-Z][a-z]*){0,2}$", r"x", r"^#[0-9a-f]{6}$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "email")
WORDS = ("one", "two words", 'a "quote"', "back\\slash", "ünï", "日本", "", "line\nbreak", "/", "null")
UNSUPPORTED: tuple[dict[str, Any], ...] = (
    {"not": {"type": "null"}},
    {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    {"type": "array", "contains": {"type": "integer"}},
    {"type": "object", "propertyNames": {"pattern": "^a"}},
    {"type": "object", "minProperties": 3},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
    {"type": "string", "format": "colour"},
    {"type": "string", "pattern": "(?=a)b"},
    {"oneOf": [{"type": "string"}, {"type": "string", "minLength": 3}]},
    {"type": "object", "dependentRequired": {"a": ["b"]}},
    {"$ref": "https://example.org/schema.json"},
    {"type": "integer", "minimum": 9, "maximum": 3},
)


@attrs.frozen
class Case:
    """A schema, and whether an answer can be held to it."""

    schema: dict[str, Any]
    is_supported: bool


def cases(n: int = N_SCHEMAS, seed: int = 7) -> list[Case]:
    """The schemas, the easiest first."""
    rng = random.Random(seed)
    return [_case(rng, 1 + 4 * i // n, unsupported=i % 10 == 9) for i in range(n)]


def _case(rng: random.Random, n_levels: int, *, unsupported: bool) -> Case:
    made = _Schemas(rng)
    root = made.of(n_levels)
    if unsupported:
        root = {"type": "object", "properties": {"good": root, "bad": rng.choice(UNSUPPORTED)}, "required": ["bad"]}
    return Case({**root, **({"$defs": made.definitions} if made.definitions else {})}, not unsupported)


class _Schemas:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.definitions: dict[str, Any] = {}

    def of(self, n_levels: int) -> dict[str, Any]:
        if not n_levels:
            return self._rng.choice([self._string, self._number, self._enumeration, self._simple])()
        return self._rng.choice([self._object, self._object, self._array, self._any_of, self._reference, self._tree])(n_levels - 1)

    def _string(self) -> dict[str, Any]:
        rng = self._rng
        n_min = rng.randrange(4)
        lengths = {"minLength": n_min, "maxLength": n_min + rng.randrange(1, 20)}
        constraint = rng.choice([lengths, lengths, {"pattern": rng.choice(PATTERNS)}, {"format": rng.choice(FORMATS)}])
        return {"type": "string", **constraint}

    def _number(self) -> dict[str, Any]:
        rng = self._rng
        kind = rng.choice(["integer", "integer", "number"])
        low = rng.randrange(-100, 100)
        high = low + rng.randrange(1, 500)
        bounds = rng.choice([{"minimum": low, "maximum": high}, {"exclusiveMinimum": low, "exclusiveMaximum": high + 1}, {"minimum": low}])
        multiple = {"multipleOf": rng.choice([1, 2, 5])} if kind == "integer" and rng.random() < 0.3 and low + 10 < high else {}
        return {"type": kind, **bounds, **multiple}

    def _enumeration(self) -> dict[str, Any]:
        rng = self._rng
        values: list[Any] = [*rng.sample(WORDS, rng.randrange(1, 5)), *rng.sample([0, -1, 2.5, True, None, [1, 2], {"a": "b"}], 2)]
        return rng.choice([{"enum": values}, {"const": rng.choice(values)}])

    def _simple(self) -> dict[str, Any]:
        kind: dict[str, Any] = self._rng.choice([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"], "maximum": 99}])
        return {**kind, "title": "Simple", "description": "whatever"}

    def _object(self, n_levels: int) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(["id", "name", "a b", "größe", "x/y", "$z", "tags", 'q"'], rng.randrange(1, 5))
        properties = {name: self.of(rng.randrange(n_levels + 1)) for name in names}
        closed = {"additionalProperties": rng.choice([False, False, {"type": "integer", "minimum": 0, "maximum": 9}])}
        return {"type": "object", "properties": properties, "required": rng.sample(names, rng.randrange(len(names) + 1)), **closed}

    def _array(self, n_levels: int) -> dict[str, Any]:
        rng = self._rng
        n_min = rng.randrange(3)
        first = {"prefixItems": [self.of(0)]} if rng.random() < 0.3 else {}
        return {"type": "array", **first, "items": self.of(n_levels), "minItems": n_min, "maxItems": n_min + rng.randrange(1, 4)}

    def _any_of(self, n_levels: int) -> dict[str, Any]:
        return {"anyOf": [self.of(self._rng.randrange(n_levels + 1)) for _ in range(self._rng.randrange(2, 4))]}

    def _reference(self, n_levels: int) -> dict[str, Any]:
        name = f"part {len(self.definitions)}"
        self.definitions[name] = {}
        self.definitions[name] = self.of(n_levels)
        return {"$ref": f"#/$defs/{name}"}

    def _tree(self, n_levels: int) -> dict[str, Any]:
        """One that contains itself, as often as an answer likes."""
        name = f"tree {len(self.definitions)}"
        self.definitions[name] = {}
        children = {"type": "array", "items": {"$ref": f"#/$defs/{name}"}, "maxItems": 2}
        properties = {"value": self.of(0), "children": children}
        self.definitions[name] = {"type": "object", "properties": properties, "required": ["value"], "additionalProperties": False}
        return {"$ref": f"#/$defs/{name}"}
