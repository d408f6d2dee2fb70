"""Says which JSON Schemas can be honoured, and makes those ready for the compiler of grammars.

A grammar holds an answer to a schema while it is written, so every keyword that constrains must be known to it: what it cannot hold is
refused by name rather than left out. Annotations (`title`, `default`, ...) are read over, as the standard wants. What a definition says
that nothing refers to does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote, unquote

from cllm.errors import GrammarInvalid
from cllm.text.char_classes import plain_classes
from cllm.text.schema_bounds import N_EXACT, is_number, prepare_bounds
from cllm.text.schema_meeting import all_exclude, check_meeting
from cllm.text.schema_parts import LISTS, MAPS, Schema, reachable, shown, target

# What a schema may cost: beyond these, compiling takes seconds for what nobody writes. With the first three together it is about two.
N_PARTS_MAX: Final = 4096
N_PROPERTIES_MAX: Final = 1024  # of one object; compiling takes the square of their number
N_PATTERN_PROPERTIES_MAX: Final = 50  # of one object; each pair is looked at
N_SOME_PROPERTIES_MAX: Final = 32  # of an object of which it takes any one; each is written out before each other
N_ITEMS_MAX: Final = 16_384  # that `minItems` and `maxItems` name, in all parts: the compiler writes each out, however many there are
# Of a string's counted length: each byte takes a state of the lexer, and characters may have three, or four.
N_CHARS_COUNTED_MAX: Final = 16_000
# One blank, or a line break with its indentation: whatever a model may do between two values, it is never long.
WHITESPACE: Final = r" |\r?\n[ \t]{0,32}"
# Without \u: with it a name can be written in several ways, and a further member could pass for one that the schema constrains.
ESCAPES: Final = 'nrbtf\\"'

N_ROUNDS_MAX: Final = 32  # two or three settle what people write; a schema made to take more is not looked through to its end

REFUSED: Final = frozenset(
    {
        *("not", "if", "then", "else", "propertyNames", "dependencies", "dependentRequired", "dependentSchemas"),
        *("contains", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef"),
    }
)
_ALL_NAMES: Final[tuple[Any, ...]] = (True, {}, {"type": "string"})  # what generators of schemas write, and what holds for every name
_KINDS: Final[dict[str, tuple[type, str]]] = {  # of what is read here; the rest the compiler looks at itself
    **dict.fromkeys(MAPS, (dict, "an object")),
    **dict.fromkeys((*LISTS, "required"), (list, "an array")),
    **dict.fromkeys(("minItems", "maxItems", "minProperties"), (int, "a whole number")),
}
# They say nothing of what fits. The compiler reads most of them over, but not beside a reference that leads back to where it stands.
_ANNOTATIONS: Final = frozenset(
    {
        *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "nullable"),
        *("$comment", "discriminator", "externalDocs", "xml", "contentMediaType", "contentEncoding"),
    }
)
# Of `$schema`, those whose rules the compiler knows. It takes any other for a schema that it has to fetch.
_DRAFTS: Final = frozenset(
    {
        *(f"http://json-schema.org/draft-{n}/schema" for n in ("04", "06", "07")),
        *(f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")),
    }
)
# Formats that say how a value is meant, not how it is written: they constrain nothing.
_SILENT_FORMATS: Final = frozenset({"password", "path", "file-path", "directory-path", "binary", "int32", "int64", "float", "double"})


def prepared(text: str) -> Schema:
    """Return the schema in the JSON text, ready for `%json`. Raises: GrammarInvalid, which names the keyword and where it stands."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise GrammarInvalid("the schema is nested too deeply") from None
    except ValueError as error:
        raise GrammarInvalid(f"the schema is not JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise GrammarInvalid(f"a schema is an object, not {shown(schema)}")
    for n_parts, (node, pointer) in enumerate(reachable(schema)):
        if n_parts >= N_PARTS_MAX:
            raise GrammarInvalid(f"the schema has more than {N_PARTS_MAX} parts", pointer)
        _require_tag(schema, node, pointer)
        _prepare(node, pointer)
    _check_n_items(schema)
    check_meeting(schema)
    if (endless := first_endless(schema)) is not None:
        raise GrammarInvalid("no finite answer fits", endless)
    schema["x-guidance"] = {"whitespace_pattern": WHITESPACE, "json_allowed_escapes": ESCAPES, "coerce_one_of": all_exclude(schema)}
    return schema


# --- whether answers end -----------------------------------------------------------------------------------------------


def first_endless(schema: Schema) -> str | None:
    """Where the first part stands that no finite answer fits, such as one that must contain another that must fit it."""
    nodes = list(reachable(schema))
    ending: set[int] = set()
    for _ in range(N_ROUNDS_MAX):  # what ends by itself, then what ends because of that, and so on
        n_before = len(ending)
        for node, pointer in reversed(nodes):
            if id(node) not in ending and _ends(schema, node, pointer, ending):
                ending.add(id(node))
        if len(ending) == n_before:
            return next((pointer for node, pointer in nodes if id(node) not in ending), None)
    return None


def _ends(root: Schema, node: Schema, pointer: str, ending: set[int]) -> bool:
    def ends(part: Any) -> bool:
        return part is True or id(part) in ending

    if "$ref" in node and not ends(target(root, node["$ref"], pointer)[0]):
        return False
    if not all(ends(part) for part in node.get("allOf", ())):
        return False
    if any(name in node and not any(ends(part) for part in node[name]) for name in ("anyOf", "oneOf")):
        return False
    if node.get("type") == "object":
        properties = node.get("properties", {})
        return all(ends(properties.get(name, True)) for name in node.get("required", ()))
    if node.get("type") == "array":
        return all(ends(item) for item in _first_items(node))
    return True


def _first_items(node: Schema) -> list[Any]:
    """What an array's items must fit, as many as there must be, equal ones once."""
    first, rest = node.get("prefixItems", []), node.get("items", True)
    if isinstance(rest, list):  # of the drafts before 2020
        first, rest = rest, node.get("additionalItems", True)
    n_min = node.get("minItems", 0)
    return [*first[:n_min], *([rest] if n_min > len(first) else [])]


# --- what a part may say -----------------------------------------------------------------------------------------------


def _require_tag(root: Schema, node: Schema, pointer: str) -> None:
    """Have alternatives name the property that tells them apart: where it has a default, pydantic leaves it out of `required`.

    That narrows what may be said, so that every answer still fits.
    """
    told = node.get("discriminator")
    name = told.get("propertyName") if isinstance(told, dict) else None
    alternatives = node.get("oneOf")
    for one in alternatives if isinstance(name, str) and isinstance(alternatives, list) else ():
        meant = target(root, one["$ref"], pointer)[0] if isinstance(one, dict) and isinstance(one.get("$ref"), str) else one
        if not isinstance(meant, dict) or not isinstance(meant.get("properties"), dict) or name not in meant["properties"]:
            continue
        required = meant.get("required", [])
        if isinstance(required, list) and name not in required:
            meant["required"] = [*required, name]


def _prepare(node: Schema, pointer: str) -> None:
    """Refuse what no grammar holds; write the rest as the compiler understands it."""
    is_root = pointer == "#"  # of which "#/x-..." may be referred to
    for name in [name for name in node if name in _ANNOTATIONS or (name.startswith("x-") and not is_root)]:
        del node[name]
    if node.get("propertyNames") in _ALL_NAMES:
        del node["propertyNames"]
    for name in node:
        if name in REFUSED:
            raise GrammarInvalid(f"{name} is not supported", pointer, name)
    for name, (kind, wanted) in _KINDS.items():
        if name in node and not isinstance(node[name], kind):
            raise GrammarInvalid(f"{name}: expected {wanted}, not {shown(node[name])}", pointer, name)
    for name in ("minItems", "maxItems"):
        if node.get(name, 0) < 0:
            raise GrammarInvalid(f"{name}: expected 0 or more", pointer, name)
    if not all(isinstance(name, str) for name in node.get("required", ())):
        raise GrammarInvalid("required: expected names", pointer, "required")
    if not isinstance(node.get("items"), list):
        node.pop("additionalItems", None)  # it says nothing then, and the compiler would take `prefixItems` for nothing beside it
    if node.pop("uniqueItems", False):
        raise GrammarInvalid("uniqueItems is not supported", pointer, "uniqueItems")
    if "$id" in node and pointer != "#":
        raise GrammarInvalid("$id is supported at the top only", pointer, "$id")
    if "$schema" in node and str(node["$schema"]).removesuffix("#") not in _DRAFTS:
        del node["$schema"]
    if str(node.get("$ref")).startswith("#"):
        node["$ref"] = quote(unquote(node["$ref"]), safe="#/$~", errors="replace")  # people leave out what URIs want
    if str(node.get("format")) in _SILENT_FORMATS:
        del node["format"]
    if isinstance(node.get("pattern"), str):
        node["pattern"] = plain_classes(node["pattern"])
    if isinstance(node.get("patternProperties"), dict):
        node["patternProperties"] = {plain_classes(pattern): part for pattern, part in node["patternProperties"].items()}
    for name, n_max in (
        ("properties", N_PROPERTIES_MAX),
        ("required", N_PROPERTIES_MAX),
        ("patternProperties", N_PATTERN_PROPERTIES_MAX),
    ):
        if len(node.get(name, ())) > n_max:
            raise GrammarInvalid(f"{name}: {n_max} are the most that is compiled", pointer, name)
    for name in ("const", "enum"):
        if name in node and not all(map(_is_exact, _numbers(node[name]))):
            raise GrammarInvalid(f"{name}: a whole number beyond 2^53 is not supported", pointer, name)
    prepare_bounds(node, pointer)
    _prepare_lengths(node, pointer)
    _prepare_n_properties(node, pointer)


def _numbers(value: Any) -> Iterator[int]:
    """The whole numbers in a value, however deep."""
    owed = [value]
    while owed:
        one = owed.pop()
        if isinstance(one, dict):
            owed += one.values()
        elif isinstance(one, list):
            owed += one
        elif isinstance(one, int):
            yield one


def _is_exact(number: int) -> bool:
    return abs(number) <= N_EXACT


def _prepare_lengths(node: Schema, pointer: str) -> None:
    """Count no further than the compiler can: whoever allows more is content with a shorter string."""
    n_min, n_max = node.get("minLength"), node.get("maxLength")
    if is_number(n_min) and n_min > N_CHARS_COUNTED_MAX:
        raise GrammarInvalid(f"minLength: {N_CHARS_COUNTED_MAX} is the most that is counted to", pointer, "minLength")
    if is_number(n_max) and n_max > N_CHARS_COUNTED_MAX:
        node["maxLength"] = N_CHARS_COUNTED_MAX


def _prepare_n_properties(node: Schema, pointer: str) -> None:
    """Leave of `minProperties` what a grammar can hold.

    It cannot see that a further member's name came before, and a reader takes two of a name for one: there may be too few of them.
    """
    n_min = node.pop("minProperties", 0)
    if n_min <= len(set(node.get("required", ()))):
        return
    is_open = node.get("additionalProperties", True) is not False or bool(node.get("patternProperties"))
    if n_min > 1 and is_open:
        raise GrammarInvalid("minProperties is supported up to the number of required properties", pointer, "minProperties")
    if len(node.get("properties", ())) > N_SOME_PROPERTIES_MAX:
        complaint = f"minProperties: beside {N_SOME_PROPERTIES_MAX} properties at most, of which none is required"
        raise GrammarInvalid(complaint, pointer, "minProperties")
    node["minProperties"] = n_min


def _check_n_items(schema: Schema) -> None:
    n = 0
    for node, pointer in reachable(schema):
        name = max(("minItems", "maxItems"), key=lambda name: node.get(name, 0))
        n += node.get(name, 0)
        if n > N_ITEMS_MAX:
            raise GrammarInvalid(f"{name}: {N_ITEMS_MAX} are the most in all parts together", pointer, name)
