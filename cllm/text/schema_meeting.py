"""What parts of a JSON Schema say of one and the same place in an answer, beside what each says by itself.

All that `allOf`, a reference and its neighbours say holds at once, and there the compiler can be too slow, or hold less than they say. Of
what stands in `oneOf` one holds, which it knows of fewer schemas than exclude one another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from cllm.errors import GrammarInvalid
from cllm.text.schema_bounds import check_bounds_meeting
from cllm.text.schema_parts import Schema, reachable, target

N_OPTIONAL_MAX: Final = 480  # of one object, whatever parts it is told in: the parser follows four ways for each, and 2,000 at once
N_PATTERNS_MAX: Final = 8  # that one string must match at once
N_LOOKED_AT: Final = 20_000  # parts, members and values, in search of what sets alternatives apart
N_PAIRS_OF: Final = 64  # alternatives, of which each pair is looked at; of more, what sets all of them apart


def check_meeting(schema: Schema) -> None:
    """What meets at one place is more than its parts: patterns multiply one another, and any property that is not required may be next."""
    try:
        _check_sum(schema, lambda node: int("pattern" in node), N_PATTERNS_MAX, ("pattern", "are the most that one string can be held to"))
        _check_sum(schema, _n_optional, N_OPTIONAL_MAX, ("properties", "that are not required are the most"))
        if any("patternProperties" in node for node, _ in reachable(schema)):
            _check_closed(schema)
        check_bounds_meeting(schema)
    except RecursionError:
        raise GrammarInvalid("$ref: the references go on too far") from None


def _n_optional(node: Schema) -> int:
    return len(node.get("properties", {}).keys() - set(node.get("required", ())))


def _check_sum(schema: Schema, count: Callable[[Schema], int], n_max: int, complaint: tuple[str, str]) -> None:
    """Refuse more than `n_max` of what `count` finds in the parts that meet at one place. `complaint`: the keyword, and the rest."""
    counts: dict[int, int] = {}

    def n_in(node: Any, pointer: str) -> int:
        if isinstance(node, bool):
            return 0
        if id(node) not in counts:
            counts[id(node)] = 0  # for one that refers to itself
            n = count(node)
            n += sum(n_in(part, pointer) for part in node.get("allOf", ()))
            n += n_in(*target(schema, node["$ref"], pointer)) if "$ref" in node else 0
            n += max((n_in(part, pointer) for name in ("anyOf", "oneOf") for part in node.get(name, ())), default=0)
            if n > n_max:
                keyword, why = complaint
                raise GrammarInvalid(f"{keyword}: {n_max} {why}", pointer, keyword)
            counts[id(node)] = n
        return counts[id(node)]

    for node, pointer in reachable(schema):
        n_in(node, pointer)


def _check_closed(schema: Schema) -> None:
    """Refuse patterns of names beside another part that bounds further members: the compiler takes such names over, whatever that says."""
    known: dict[int, tuple[bool, bool]] = {}

    def says(node: Any, pointer: str) -> tuple[bool, bool]:
        """Whether it has patterns, and whether it bounds further members."""
        if isinstance(node, bool):
            return False, False
        if id(node) not in known:
            known[id(node)] = False, False  # for one that refers to itself
            told = [("patternProperties" in node, node.get("additionalProperties", True) not in (True, {}))]
            told += [says(part, pointer) for part in node.get("allOf", ())]
            told += [says(*target(schema, node["$ref"], pointer))] if "$ref" in node else []
            told += [_any([says(part, pointer) for part in node.get(name, ())]) for name in ("anyOf", "oneOf")]
            n_patterned, n_closing = (sum(one[i] for one in told) for i in (0, 1))
            if n_patterned and n_closing and not (n_patterned == n_closing == 1 and (True, True) in told):  # by one, it is its own
                complaint = "patternProperties: not beside another part's additionalProperties"
                raise GrammarInvalid(complaint, pointer, "patternProperties")
            known[id(node)] = _any(told)
        return known[id(node)]

    for node, pointer in reachable(schema):
        says(node, pointer)


def _any(told: Sequence[tuple[bool, bool]]) -> tuple[bool, bool]:
    return any(one[0] for one in told), any(one[1] for one in told)


# --- of which one holds -------------------------------------------------------------------------------------------------


_Mark: TypeAlias = tuple[str, str]  # what sets schemas apart: ("type", ""), ("value", ""), or ("member", its name)
_Marks: TypeAlias = Mapping[_Mark, frozenset[Any]]  # what can be of each
_TYPES_OF: Final = {str: ("string",), bool: ("boolean",), type(None): ("null",), int: ("integer", "number"), float: ("integer", "number")}


class _TooMuch(Exception):
    """There is more to look at than it is worth."""


def all_exclude(schema: Schema) -> bool:
    """Whether there is a `oneOf`, and all of them are of schemas that exclude one another, so that it is as good as `anyOf`.

    By their types, their values, or those of a member that each must have: for the compiler they do so only where it sees that without
    looking behind a reference, and never by numbers.
    """
    alternatives = [(node["oneOf"], pointer) for node, pointer in reachable(schema) if node.get("oneOf")]
    apart = _Apart(schema)
    try:
        return bool(alternatives) and all(apart.exclude(each, pointer) for each, pointer in alternatives)
    except _TooMuch:
        return False


class _Apart:
    """Looks for what sets alternatives of one schema apart."""

    def __init__(self, schema: Schema) -> None:
        self._schema = schema
        self._n_left = N_LOOKED_AT

    def exclude(self, alternatives: Sequence[Any], pointer: str) -> bool:
        """Whether no value fits two of them, as far as can be told. Raises: _TooMuch."""
        marks = [self._marks(part, pointer) for part in alternatives]
        common = set(marks[0]).intersection(*marks)
        if any(sum(len(one[mark]) for one in marks) == len(frozenset().union(*(one[mark] for one in marks))) for mark in common):
            return True
        pairs = itertools.combinations(marks, 2) if len(marks) <= N_PAIRS_OF else ()
        n_apart = sum(any(a[mark].isdisjoint(b[mark]) for mark in a.keys() & b.keys()) for a, b in pairs)
        return n_apart == len(marks) * (len(marks) - 1) // 2

    def _marks(self, part: Any, pointer: str) -> _Marks:
        """What a value that fits can be only, by what it is told by."""
        found: dict[_Mark, frozenset[Any]] = {}
        required: set[str] = set()
        members: dict[str, list[Any]] = {}
        for node in self._holding(part, pointer):
            _narrow(found, ("type", ""), _types(node))
            _narrow(found, ("value", ""), _values(node))
            required.update(node.get("required", ()))
            for name, member in node.get("properties", {}).items():
                members.setdefault(name, []).append(member)
        if found.get(("type", "")) == frozenset(("object",)):
            for name in required & members.keys():
                for node in itertools.chain.from_iterable(self._holding(member, pointer) for member in members[name]):
                    _narrow(found, ("member", name), _values(node))
        return found

    def _holding(self, part: Any, pointer: str) -> Iterator[Schema]:
        """The parts that hold where `part` does, itself among them."""
        seen: set[int] = set()
        owed = [part]
        while owed:
            node = owed.pop()
            if isinstance(node, bool) or id(node) in seen:
                continue
            seen.add(id(node))
            sizes = [len(each) for name in ("properties", "required", "enum") if isinstance(each := node.get(name), dict | list)]
            self._n_left -= 1 + sum(sizes)
            if self._n_left < 0:
                raise _TooMuch
            yield node
            owed += node.get("allOf", ())
            owed += [target(self._schema, node["$ref"], pointer)[0]] if "$ref" in node else []


def _narrow(found: dict[_Mark, frozenset[Any]], mark: _Mark, can_be: frozenset[Any] | None) -> None:
    if can_be is not None:
        found[mark] = found[mark] & can_be if mark in found else can_be


def _types(node: Schema) -> frozenset[Any] | None:
    named = node.get("type")
    if isinstance(named, str):
        named = [named]
    if isinstance(named, list):  # of what is no name the compiler says so
        names = [name for name in named if isinstance(name, str)]
        return frozenset(one for name in names for one in (("integer", "number") if name == "number" else (name,)))
    values = _values(node)
    return None if values is None else frozenset(name for kind, _ in values for name in _TYPES_OF[kind])


def _values(node: Schema) -> frozenset[Any] | None:
    """The values that are named, with their kinds, for 1 is no true; numbers are equal however they are written."""
    values = [node["const"]] if "const" in node else node.get("enum")
    if not isinstance(values, list) or not all(type(value) in _TYPES_OF for value in values):
        return None
    return frozenset((float, float(value)) if type(value) is int else (type(value), value) for value in values)
