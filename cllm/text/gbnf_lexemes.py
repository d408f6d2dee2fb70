"""Which rules of a GBNF grammar may be matched as far as they go.

That is what becomes of the compiler's terminals, with no way back: of `num ::= [0-9]+ ws` and `ws ::= [ \\n]*` a number takes the end of
the line along, also where the rule around it wants one, and what was written then can never be ended. So a rule stays a terminal where
nothing that may follow could continue it. The others are taken apart, down to characters, of which the parser knows all meanings at once;
their masks take up to some 30 ms for 152,000 tokens, those of terminals 3 at most.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from graphlib import TopologicalSorter
from typing import Final

import attrs
from llguidance.gbnf_to_lark import AlternativeNode, ASTNode, LiteralNode, RegexNode, RepetitionNode, RuleNode, RuleRefNode, SequenceNode

N_VISITS_MAX: Final = 500_000  # of nodes, which takes a second: where that does not tell, every terminal is taken apart
# A set of characters is a number: a bit for each of ASCII's, and one for all others together, which may make two sets meet that do not.
_OTHERS: Final = 1 << 128
_ALL: Final = (_OTHERS << 1) - 1
_PIECE: Final = re.compile(r"\\x[0-9A-Fa-f]{2}|\\.|.", re.DOTALL)  # of a literal: a character, or an escape
_NAMED: Final = {"n": "\n", "r": "\r", "t": "\t"}


def take_apart(rules: dict[str, RuleNode]) -> None:
    """Put other rules in the place of terminals that may swallow the beginning of what follows them; their closed beginnings stay such.

    What begins with a character of a class that is read by itself is taken apart, too: the compiler reads on in the longer one, and what is
    read by single characters cannot go on beside it.
    """
    for rule in _bodies(rules):
        rule.alternatives = _changed(rule.alternatives, partial(_repeated_class, rules=rules))
    shapes, n_visits, is_known = _Shapes(rules.values()), 0, True
    apart: dict[int, RuleNode] = {}  # by the terminal: what stands in its place
    while is_known:
        follows = _Follows(list(rules.values()), shapes, N_VISITS_MAX - n_visits)
        n_visits += follows.n_visits
        is_known = follows.is_complete
        met = _classes(rules, shapes)
        terminals = [rule for rule in rules.values() if rule.rule_is_terminal and id(rule) not in apart]
        if is_known:
            terminals = [rule for rule in terminals if follows.knows(rule)]
            greedy = [rule for rule in terminals if follows.may_swallow(rule)]
            terminals = greedy or [rule for rule in terminals if shapes.of(rule.alternatives).first & met]
        if not terminals:
            break
        for rule in terminals:  # itself it stays what other terminals have in them
            copy = apart[id(rule)] = rules[rule.name.lower()] = RuleNode(rule.name.lower(), _changed(rule.alternatives, lambda _: None), "")
            if is_known:
                _hoist(copy, rules, shapes, met)
        for node in _nodes_of_bodies(rules):
            if isinstance(node, RuleRefNode):
                node.target = apart.get(id(node.target), node.target)
    met = _met(rules, shapes)
    for rule in _bodies(rules):
        rule.alternatives = _changed(rule.alternatives, partial(_letters, met=met))


@attrs.frozen
class _Shape:
    """What a node matches, as sets of characters."""

    is_nullable: bool
    first: int  # that it may begin with
    further: int  # that may continue what is a match already
    inside: int  # that it may have


class _Shapes:
    """The shapes of nodes that are terminal, each found out once."""

    def __init__(self, rules: Iterable[RuleNode]) -> None:
        self._known: dict[int, tuple[ASTNode, _Shape]] = {}  # the node is kept, so that no other has its number
        terminals = {id(rule): rule for rule in rules if rule.rule_is_terminal}
        used = {number: {id(node.target) for node in nodes(rule) if isinstance(node, RuleRefNode)} for number, rule in terminals.items()}
        for number in TopologicalSorter(used).static_order():  # so that what one refers to is known, and nothing recurses through many
            self.of(terminals[number].alternatives)

    def of(self, node: ASTNode) -> _Shape:
        known = self._known.get(id(node))
        if known is None:
            known = self._known[id(node)] = (node, self._found(node))
        return known[1]

    def _found(self, node: ASTNode) -> _Shape:
        if isinstance(node, LiteralNode):
            text, inside = _said(node), 0
            for letter in set(text):
                inside |= _letter(letter)
            return _Shape(not text, _letter(text[0]) if text else 0, 0, inside)
        if isinstance(node, RegexNode):
            letters_of_it = _class(node.rx)
            return _Shape(False, letters_of_it, 0, letters_of_it)
        if isinstance(node, RuleRefNode):
            return self.of(node.target.alternatives) if node.target is not None else _Shape(True, _ALL, _ALL, _ALL)
        if isinstance(node, RepetitionNode):
            return self._repeated(node)
        return self._in_turn(node) if isinstance(node, SequenceNode) else self._either(node)

    def _repeated(self, node: RepetitionNode) -> _Shape:
        one = self.of(node.node)
        may_go_on = node.max_times != node.min_times or one.is_nullable
        further = one.further | (one.first if may_go_on else 0)
        if node.max_times != 1 and one.further & one.first:  # where one ends and the next one begins may be read in several ways
            further |= one.inside
        return _Shape(node.min_times == 0 or one.is_nullable, one.first, further, one.inside)

    def _in_turn(self, node: SequenceNode) -> _Shape:
        parts = [self.of(part) for part in node.nodes]
        first = further = inside = 0  # of what comes from a part on
        may_end = True
        for part in reversed(parts):
            is_ambiguous = bool(part.further & first)  # where it ends and the next one begins may be read in several ways
            inside |= part.inside
            if may_end:
                further |= part.further | (part.first if part.is_nullable else 0)
            if is_ambiguous:
                further |= inside
            first = part.first | (first if part.is_nullable else 0)
            may_end = may_end and part.is_nullable
        return _Shape(all(part.is_nullable for part in parts), first, further, inside)

    def _either(self, node: ASTNode) -> _Shape:
        parts = [self.of(part) for part in node.children()]
        first = further = inside = shared = 0
        for part in parts:
            shared |= first & part.first
            first |= part.first
            further |= part.further
            inside |= part.inside
        is_nullable = any(part.is_nullable for part in parts)
        if is_nullable:
            further |= first
        alike = [(child, part) for child, part in zip(node.children(), parts, strict=True) if part.first & shared]
        if all(isinstance(child, LiteralNode) for child, _ in alike):
            further |= _continuing({_said(child) for child, _ in alike if isinstance(child, LiteralNode)})
        else:  # one of them may be the beginning of another
            for _, part in alike:
                further |= part.inside
        return _Shape(is_nullable, first, further, inside)


class _Follows:
    """What may come after each terminal, looked for in the rules that are none, again and again until nothing is new."""

    def __init__(self, rules: list[RuleNode], shapes: _Shapes, n_visits_max: int) -> None:
        self._bodies = [rule for rule in rules if not rule.rule_is_terminal]
        self._shapes = shapes
        self._first: dict[int, int] = {}  # by rule: what it may begin with
        self._nullable: set[int] = set()
        self._begun: dict[int, tuple[bool, int]] = {}  # by node, in one round
        self._after: dict[int, int] = {}  # by rule
        self.n_visits = 0
        self.is_complete = False
        while not self.is_complete and self.n_visits < n_visits_max:
            before = (dict(self._first), len(self._nullable), dict(self._after))
            self._begun = {}
            for rule in self._bodies:
                is_nullable, first = self._begin(rule.alternatives)
                self._first[id(rule)] = first
                if is_nullable:
                    self._nullable.add(id(rule))
                self._walk(rule.alternatives, self._after.setdefault(id(rule), 0))
            self.is_complete = before == (self._first, len(self._nullable), self._after)

    def knows(self, terminal: RuleNode) -> bool:
        """Whether it is in a rule that is no terminal."""
        return id(terminal) in self._after

    def may_swallow(self, terminal: RuleNode) -> bool:
        """Whether what comes after a terminal may begin as what would continue it."""
        return bool(self._after.get(id(terminal), 0) & self._shapes.of(terminal.alternatives).further)

    def _begin(self, node: ASTNode) -> tuple[bool, int]:
        """Whether it may be empty, and what it may begin with, as far as is known."""
        known = self._begun.get(id(node))
        if known is None:
            self.n_visits += 1
            known = self._begun[id(node)] = self._found(node)
        return known

    def _found(self, node: ASTNode) -> tuple[bool, int]:
        if isinstance(node, RuleRefNode) and node.target is not None and not node.target.rule_is_terminal:
            return id(node.target) in self._nullable, self._first.get(id(node.target), 0)
        if isinstance(node, LiteralNode | RegexNode | RuleRefNode):
            shape = self._shapes.of(node)
            return shape.is_nullable, shape.first
        if isinstance(node, RepetitionNode):
            is_nullable, first = self._begin(node.node)
            return is_nullable or node.min_times == 0, first
        first = 0
        if isinstance(node, AlternativeNode):
            parts = [self._begin(part) for part in node.alternatives]
            for _, begun in parts:
                first |= begun
            return any(is_nullable for is_nullable, _ in parts), first
        for part in node.children():
            is_nullable, begun = self._begin(part)
            first |= begun
            if not is_nullable:
                return False, first
        return True, first

    def _walk(self, node: ASTNode, after: int) -> None:
        """Note for all that is in a node what may come after it, where `after` may come after the node."""
        self.n_visits += 1
        if isinstance(node, RuleRefNode) and node.target is not None:
            self._after[id(node.target)] = self._after.get(id(node.target), 0) | after
        elif isinstance(node, RepetitionNode):
            self._walk(node.node, after if node.max_times == 1 else after | self._begin(node.node)[1])
        elif isinstance(node, AlternativeNode):
            for part in node.alternatives:
                self._walk(part, after)
        elif isinstance(node, SequenceNode):
            for part in reversed(node.nodes):
                self._walk(part, after)
                is_nullable, first = self._begin(part)
                after = first | (after if is_nullable else 0)


def _hoist(rule: RuleNode, rules: dict[str, RuleNode], shapes: _Shapes, met: int) -> None:
    """Make terminals of what its alternatives begin with, as far as nothing could continue that: a string up to its closing quote."""
    node = rule.alternatives
    alternatives = node.alternatives if isinstance(node, AlternativeNode) else [node]
    for i, each in enumerate(alternatives):
        if not isinstance(each, SequenceNode) or shapes.of(each).first & met:
            continue
        closed = [j for j, part in enumerate(each.nodes, 1) if not (shapes.of(part).is_nullable or shapes.of(part).further)]
        n = closed[-1] if closed else 0
        node = SequenceNode(each.nodes[:n])
        if n < 2 or shapes.of(node).is_nullable or shapes.of(node).further:
            continue
        name = f"{rule.name}_{i}".upper()
        beginning = rules[name] = RuleNode(name, node, "", rule_is_terminal=True)
        alternatives[i] = SequenceNode([RuleRefNode(name, beginning), *each.nodes[n:]])
    rule.alternatives = AlternativeNode(alternatives)


def _classes(rules: dict[str, RuleNode], shapes: _Shapes) -> int:
    """The characters of classes that are no part of a terminal."""
    met = 0
    for node in _nodes_of_bodies(rules):
        if isinstance(node, RegexNode):
            met |= shapes.of(node).first
    return met


def _met(rules: dict[str, RuleNode], shapes: _Shapes) -> int:
    """The characters that may stand by themselves: of classes, of literals that others begin with, and of all that begin with these."""
    met = _classes(rules, shapes)
    literals = {_said(node) for node in _nodes_of_bodies(rules) if isinstance(node, LiteralNode)} - {""}
    for one, other in itertools.pairwise([*sorted(literals), ""]):
        if len(one) == 1 or other.startswith(one):
            met |= _letter(one[0])
    left = [literal for literal in literals if len(literal) > 1]
    while any(is_met := [bool(_letter(literal[0]) & met) for literal in left]):
        for letter in set("".join(itertools.compress(left, is_met))):
            met |= _letter(letter)
        left = list(itertools.compress(left, [not one for one in is_met]))
    return met


def _letters(node: ASTNode, met: int) -> ASTNode | None:
    """The letters of a literal that begins with one of `met`."""
    pieces = _PIECE.findall(node.value) if isinstance(node, LiteralNode) else []
    is_met = len(pieces) > 1 and bool(_letter(_character(pieces[0])) & met)
    return SequenceNode([LiteralNode(piece) for piece in pieces]) if is_met else None


def _repeated_class(node: ASTNode, rules: dict[str, RuleNode]) -> ASTNode | None:
    """A terminal for a class that is repeated: whether it may be one shows as with any."""
    if not isinstance(node, RepetitionNode) or node.max_times == 1 or not node.is_terminal():
        return None
    if not any(isinstance(part, RegexNode) for part in nodes(node)):
        return None
    name = f"W{len(rules)}"
    rules[name] = RuleNode(name, node, "", rule_is_terminal=True)
    return RuleRefNode(name, rules[name])


def _changed(node: ASTNode, change: Callable[[ASTNode], ASTNode | None]) -> ASTNode:
    """A copy of the node, with what `change` gives for its parts in their places, as far as it gives something."""
    if (other := change(node)) is not None:
        return other
    if isinstance(node, RepetitionNode):
        return RepetitionNode(_changed(node.node, change), node.min_times, node.max_times)
    if isinstance(node, SequenceNode):
        return SequenceNode([_changed(part, change) for part in node.nodes])
    if isinstance(node, AlternativeNode):
        return AlternativeNode([_changed(part, change) for part in node.alternatives])
    return RuleRefNode(node.name, node.target) if isinstance(node, RuleRefNode) else node


def _bodies(rules: dict[str, RuleNode]) -> list[RuleNode]:
    """The rules that are no terminals."""
    return [rule for rule in rules.values() if not rule.rule_is_terminal]


def _nodes_of_bodies(rules: dict[str, RuleNode]) -> Iterator[ASTNode]:
    return (node for rule in _bodies(rules) for node in nodes(rule))


def nodes(node: ASTNode) -> Iterator[ASTNode]:
    """All that is in a node, but not what the rules have that it refers to."""
    for child in node.children():
        yield child
        yield from nodes(child)


def _continuing(literals: set[str]) -> int:
    """What may continue one of the literals to another of them."""
    further, lengths = 0, {len(literal) for literal in literals}
    for literal in literals:
        for n in lengths:
            if 0 < n < len(literal) and literal[:n] in literals:
                further |= _letter(literal[n])
    return further


def _said(literal: LiteralNode) -> str:
    """Its characters."""
    return "".join([_character(piece) for piece in _PIECE.findall(literal.value)])


def _character(piece: str) -> str:
    if len(piece) == 1:
        return piece
    return chr(int(piece[2:], 16)) if piece[1] == "x" else _NAMED.get(piece[1], piece[1])


def _letter(character: str) -> int:
    return 1 << ord(character) if ord(character) < 128 else _OTHERS


def _class(rx: str) -> int:
    """The characters of a class, or of what stands for any. Of others than ASCII's a class that leaves some out has some."""
    if not rx.startswith("["):
        return _ALL
    pieces = _PIECE.findall(rx[1:-1])
    leaves_out = pieces[:1] == ["^"]
    letters, i = 0, int(leaves_out)
    while i < len(pieces):
        low = high = ord(_character(pieces[i]))
        if i + 2 < len(pieces) and pieces[i + 1] == "-":  # by itself it is escaped
            high = ord(_character(pieces[i + 2]))
            i += 2
        i += 1
        letters |= ((1 << min(high, 127) + 1) - 1) & -(1 << min(low, 128))
        letters |= _OTHERS if high > 127 else 0
    return (_ALL & ~letters) | _OTHERS if leaves_out else letters
