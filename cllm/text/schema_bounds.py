"""Bounds of numbers that the compiler of grammars reads otherwise than they are written.

It takes a whole number that is excluded where the other bound begins with the same digits, as 0 between 0 and 0.5, in whatever parts of a
schema the two stand; it reads bounds as floats; and it takes none that is beyond whole numbers of 64 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeGuard

import attrs

from cllm.errors import GrammarInvalid
from cllm.text.schema_parts import Schema, reachable, target

N_EXACT: Final = 1 << 53  # beyond which the compiler writes another whole number
N_INT64: Final = (1 << 63) - 1  # from which on it knows no other: what people write there is the end of their type
N_MINIMUM_LEAST: Final = (1 << 10) - (1 << 63)  # the next float above the least of 64 bits, which the compiler cannot negate
N_FRACTION_MOST: Final = 92 * 10**17  # of a bound of what may have a fraction, whose whole part is written with 63 bits
N_KEPT_MAX: Final = 100_000  # numbers, of all parts: each has those of all that it holds at once, and of all that it may be
LOWER: Final = ("minimum", "exclusiveMinimum")
UPPER: Final = ("maximum", "exclusiveMaximum")


def prepare_bounds(node: Schema, pointer: str) -> None:
    """Write one part's bounds as the compiler understands them. Raises: GrammarInvalid."""
    for name in (*LOWER, *UPPER):
        if not _is_float(node.get(name)):
            raise GrammarInvalid(f"{name}: a whole number beyond 2^53 is not supported", pointer, name)
    if _may_have_fraction(node):
        _narrow(node, pointer)
    if node.get("type") != "number" and any(is_number(node.get(name)) and node[name] < N_MINIMUM_LEAST for name in LOWER):
        node["minimum"] = N_MINIMUM_LEAST
        node.pop("exclusiveMinimum", None)
    own = _own(node)
    if meeting := own.meets(own):
        raise GrammarInvalid(f"{meeting}: not beside a bound with the same whole part", pointer, meeting)


def _may_have_fraction(node: Schema) -> bool:
    named = node.get("type", "number")
    return "number" in named if isinstance(named, list) else named == "number"


def _narrow(node: Schema, pointer: str) -> None:
    """Bring in what is beyond the compiler's floats, as people write it for the end of theirs: what is taken then fits as well."""
    for name in (*LOWER, *UPPER):
        bound = node.get(name)
        if not is_number(bound) or abs(bound) <= N_FRACTION_MOST:
            continue
        if (bound > 0) is (name in LOWER):
            raise GrammarInvalid(f"{name}: beyond {N_FRACTION_MOST:.1e} none is supported, but for whole numbers", pointer, name)
        node[name] = N_FRACTION_MOST if bound > 0 else -N_FRACTION_MOST


def check_bounds_meeting(schema: Schema) -> None:
    """Refuse a whole number that one part excludes where another part's bound, that holds with it, has the same whole part."""
    known: dict[int, _Bounds] = {}
    n_kept = 0

    def bounds(node: Any, pointer: str) -> _Bounds:
        nonlocal n_kept
        if isinstance(node, bool):
            return NONE
        if id(node) not in known:
            known[id(node)] = NONE  # for one that refers to itself
            told = [_own(node), *(bounds(part, pointer) for part in node.get("allOf", ()))]
            told += [bounds(*target(schema, node["$ref"], pointer))] if "$ref" in node else []
            told += [_all([bounds(part, pointer) for part in node.get(name, ())]) for name in ("anyOf", "oneOf")]
            told = [one for one in told if one is not NONE]
            _check_apart(told, pointer)
            found = known[id(node)] = _all(told)
            n_kept += 0 if any(found is one for one in told) else found.n_numbers
            if n_kept > N_KEPT_MAX:
                raise GrammarInvalid("maximum: so many bounds meet that they are not looked through", pointer, "maximum")
        return known[id(node)]

    if any(_own(node).excluded for node, _ in reachable(schema)):
        for node, pointer in reachable(schema):
            bounds(node, pointer)


@attrs.frozen(eq=False)
class _Bounds:
    """The whole numbers that are excluded at either end, and the whole parts of all bounds."""

    above: frozenset[int] = frozenset()  # numbers have to be above these
    below: frozenset[int] = frozenset()
    lows: frozenset[int] = frozenset()
    highs: frozenset[int] = frozenset()

    @property
    def n_numbers(self) -> int:
        return len(self.above) + len(self.below) + len(self.lows) + len(self.highs)

    @property
    def excluded(self) -> frozenset[int]:
        return self.above | self.below

    def meets(self, other: _Bounds) -> str:
        """The keyword of what this excludes beside a bound of the other's; "" where nothing is."""
        if self.above & other.highs:
            return "exclusiveMinimum"
        return "exclusiveMaximum" if self.below & other.lows else ""


NONE: Final = _Bounds()


def _own(node: Schema) -> _Bounds:
    if node.get("type") == "integer":  # where the number that is excluded leaves none
        return NONE
    above, below = ({number} if number is not None else set() for number in (_excluded(node, LOWER), _excluded(node, UPPER)))
    lows, highs = ({math.trunc(node[name]) for name in names if is_number(node.get(name))} for names in (LOWER, UPPER))
    return _Bounds(*map(frozenset, (above, below, lows, highs))) if above or below or lows or highs else NONE


def _excluded(node: Schema, names: tuple[str, str]) -> int | None:
    inclusive, name = names
    number = node.get(inclusive) if node.get(name) is True else node.get(name)  # `true` is how drafts before the sixth wrote it
    return math.trunc(number) if is_number(number) and number == math.trunc(number) else None


def _all(some: Sequence[_Bounds]) -> _Bounds:
    if len(some) < 2:
        return some[0] if some else NONE
    return _Bounds(*(frozenset().union(*(getattr(one, field.name) for one in some)) for field in attrs.fields(_Bounds)))


def _check_apart(told: Sequence[_Bounds], pointer: str) -> None:
    """Hold every two of those that hold at once against each other; within each that was done."""
    for excluded, bounds in (("above", "highs"), ("below", "lows")):
        met = _union(told, excluded) & _union(told, bounds)
        if any(_has_two(told, excluded, bounds, number) for number in met):
            keyword = "exclusiveMinimum" if excluded == "above" else "exclusiveMaximum"
            raise GrammarInvalid(f"{keyword}: not beside a bound with the same whole part", pointer, keyword)


def _has_two(told: Sequence[_Bounds], excluded: str, bounds: str, number: int) -> bool:
    """Whether one excludes the number, and another one has it for a bound."""
    excluding = [i for i, one in enumerate(told) if number in getattr(one, excluded)]
    bounding = [i for i, one in enumerate(told) if number in getattr(one, bounds)]
    return len({*excluding, *bounding}) > 1


def _union(some: Iterable[_Bounds], name: str) -> frozenset[int]:
    return frozenset().union(*(getattr(one, name) for one in some))


def is_number(value: Any) -> TypeGuard[float]:
    """Whether it is a number that has a size."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (isinstance(value, float) and math.isfinite(value))


def _is_float(value: Any) -> bool:
    """Whether a bound is none that is rounded to another whole number."""
    if not isinstance(value, int) or not N_EXACT < abs(value) < N_INT64:
        return True
    return int(float(value)) == value
