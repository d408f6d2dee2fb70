"""GBNF, the grammar language of llama.cpp, to Lark, which the compiler of grammars reads."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    GrammarParser,
    RegexNode,
    RepetitionNode,
    RuleNode,
    RuleRefNode,
    resolve,
)

from cllm.errors import GrammarInvalid
from cllm.text.char_classes import plain_classes
from cllm.text.gbnf_lexemes import nodes, take_apart

# Escapes by code point, which the converter would shorten into something that the compiler does not read. A backslash takes the
# character after it along, so that the second of two begins nothing.
_ESCAPES = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# As llguidance's `is_lark_syntax`, whose blanks run over the ends of lines: of many empty lines it takes the square.
_LARK = re.compile(r"^[^\S\n]*(%llguidance\b|start\s*:)", re.MULTILINE)
N_RULES_MAX = 1000  # the converter looks through the whole grammar for each of them,
N_LOOKED_AT_MAX = 30_000_000  # characters, which takes three seconds at the most; a thousand short rules are half of that
_FIRST_PRINTABLE_BEYOND_ASCII = 0xA0
_PLAIN = {r"\-": r"\x2d", r"\[": r"\x5b", r"\]": r"\x5d"}  # which neither the converter nor Lark's strings know


def is_lark(text: str) -> bool:
    """Whether a grammar is Lark, and not GBNF, in which a rule may be called `start`, too."""
    return _LARK.search(text) is not None and not _RULE.search(text)


def to_lark(text: str) -> str:
    """Return a GBNF grammar as Lark. Raises: GrammarInvalid."""
    if (n_rules := text.count("::=")) > N_RULES_MAX:
        raise GrammarInvalid(f"the grammar has {n_rules} rules, and {N_RULES_MAX} are the most that is compiled")
    if n_rules * len(text) > N_LOOKED_AT_MAX:
        n_most = N_LOOKED_AT_MAX // n_rules
        raise GrammarInvalid(f"the grammar has {n_rules} rules in {len(text)} characters, and of so many {n_most} are the most")
    try:
        return _converted(_ESCAPES.sub(_plain_escape, text))
    except RecursionError:
        raise GrammarInvalid("the grammar is nested too deeply") from None
    except GrammarInvalid:
        raise
    except Exception as error:  # the converter raises plain ones
        raise GrammarInvalid(f"the grammar is not GBNF: {error}") from None


def _converted(text: str) -> str:
    rules = _numbered(GrammarParser().parse(text))
    resolve(rules)
    for rule in rules.values():
        _mend(rule)
    start = rules["start"]
    if start.alternatives.is_terminal():  # nothing recurses: the whole is one terminal, which is matched as what it is
        start.name, head = "WHOLE_OF_IT", ["start: WHOLE_OF_IT"]
    else:
        take_apart(rules)
        head = []
    return "\n".join([*head, *(f"{rule.name}: {rule.alternatives.top_str()}" for rule in _reached(start))])


def _reached(start: RuleNode) -> list[RuleNode]:
    """The rules that an answer may have in it, the first one first."""
    found, left = {id(start): start}, [start]
    while left:
        for node in nodes(left.pop()):
            if isinstance(node, RuleRefNode) and node.target is not None and id(node.target) not in found:
                found[id(node.target)] = node.target
                left.append(node.target)
    return list(found.values())


def _numbered(rules: dict[str, RuleNode]) -> dict[str, RuleNode]:
    """The rules under other names: Lark's first rule is called `start`, and its names have neither capitals of their own nor hyphens."""
    names = {name: f"r{i}" for i, name in enumerate(rules)} | {"root": "root"}
    for rule in rules.values():
        rule.name = names[rule.name]
        for node in nodes(rule):
            if isinstance(node, RuleRefNode):
                if node.name not in rules:
                    raise GrammarInvalid(f"the grammar is not GBNF: Rule '{node.name}' not found")
                node.name = names[node.name]
    return {rule.name: rule for rule in rules.values()}


def _mend(rule: RuleNode) -> None:
    """Make of what the converter would write as something else what it means in GBNF."""
    for node in nodes(rule):
        if isinstance(node, RegexNode):
            node.rx = r"(.|\n)" if node.rx == "." else plain_classes(node.rx)  # a line break, too
        elif isinstance(node, RepetitionNode) and isinstance(node.node, RepetitionNode):  # which is written behind the other one's sign
            node.node = AlternativeNode([node.node])


def _plain_escape(match: re.Match[str]) -> str:
    digits = match[1] or match[2]
    if digits is None:
        return _PLAIN.get(match[0], match[0])
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    if code < _FIRST_PRINTABLE_BEYOND_ASCII or 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
        raise GrammarInvalid(f"the grammar's {match[0]} stands for no character")
    return chr(code)
