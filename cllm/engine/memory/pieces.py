"""Finds saved pieces of sequences by their tokens: a radix tree whose nodes know the pieces that run through them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import attrs

from cllm.engine.memory.prefix import Key, n_common


class PieceLike(Protocol):
    """The cells of some tokens, behind those of the tokens before them.

    tokens: [0, start) come before | [start, len) are the piece's
    """

    @property
    def key(self) -> Key: ...

    @property
    def tokens(self) -> list[int]: ...

    @property
    def start(self) -> int: ...


P = TypeVar("P", bound=PieceLike)


@attrs.frozen
class Chain(Generic[P]):
    """Pieces that lead, one after the other, from `start` cells that somebody has to `end` cells."""

    start: int
    end: int
    pieces: tuple[P, ...]

    def first(self) -> Chain[P]:
        """The first piece alone, as far as it is wanted."""
        (piece, end), *_ = self.cuts()
        return Chain(self.start, end, (piece,))

    def cuts(self) -> Iterator[tuple[P, int]]:
        """Each piece, and the position up to which it is wanted: the next one's start, and in the end the chain's."""
        yield from zip(self.pieces, [*(piece.start for piece in self.pieces[1:]), self.end], strict=True)


@attrs.define(eq=False)
class _Node(Generic[P]):
    """The tokens of one edge, and what follows them. `through` are the pieces that contain the whole edge."""

    edge: list[int]
    parent: _Node[P] | None
    children: dict[int, _Node[P]] = attrs.field(factory=dict)
    through: dict[P, None] = attrs.field(factory=dict)


@attrs.frozen
class _Stretch(Generic[P]):
    """Tokens ``[start, end)`` of a path that lie in `node`, maybe not to its end."""

    node: _Node[P]
    start: int
    end: int


class PieceTree(Generic[P]):
    """Pieces by the tokens that they belong to."""

    def __init__(self) -> None:
        self._roots: dict[Key, _Node[P]] = {}

    def add(self, piece: P) -> None:
        """Make `piece` findable. It may be there only once."""
        root = self._roots.setdefault(piece.key, _Node([], None))
        before = self._extend(root, piece.tokens, 0, piece.start)
        for node in self._extend(before[-1] if before else root, piece.tokens, piece.start, len(piece.tokens)):
            node.through[piece] = None

    def remove(self, piece: P) -> None:
        """Forget a piece that is there."""
        root = node = self._roots[piece.key]
        path = self._walk(root, piece.tokens)
        for stretch in path:
            node = stretch.node
            node.through.pop(piece, None)
        while not node.through and not node.children and node.parent is not None:
            del node.parent.children[node.edge[0]]
            node = node.parent
        for stretch in reversed(path):
            self._join(stretch.node)
        if not root.children:
            del self._roots[piece.key]

    def find(self, key: Key, tokens: list[int], n_have: int, *, can_cut: bool) -> Chain[P] | None:
        """Return the chain that leads furthest into `tokens` from a place that `n_have` known cells reach; None if none leads beyond.

        Unless cells can be cut, each piece must end within `tokens`.
        """
        root = self._roots.get(key)
        path = [] if root is None else self._walk(root, tokens)
        while path and path[-1].end > n_have:
            chain = self._chain(path, n_have, can_cut=can_cut)
            if chain is not None:
                return chain
            path.pop()
        return None

    def leading(self, key: Key, tokens: list[int], *, can_cut: bool) -> list[P]:
        """Return the pieces that lead furthest into `tokens`, from wherever the first of them begins; the last piece comes first."""
        root = self._roots.get(key)
        path = [] if root is None else self._walk(root, tokens)
        while path:
            if pieces := self._back(path, 0, can_cut=can_cut):
                return pieces
            path.pop()
        return []

    def n_leading(self, key: Key, tokens: list[int]) -> int:
        """Return how many of `tokens` some piece's tokens begin with, whether or not its cells can be cut there."""
        root = self._roots.get(key)
        path = [] if root is None else self._walk(root, tokens)
        return path[-1].end if path else 0

    def within(self, piece: P) -> list[P]:
        """Return the other pieces whose cells are all among those of `piece`, which is there."""
        found: dict[P, None] = {}
        for stretch in self._walk(self._roots[piece.key], piece.tokens):
            for other in stretch.node.through:
                n = len(other.tokens)
                if other is not piece and piece.start <= other.start and n <= stretch.end and other.tokens == piece.tokens[:n]:
                    found[other] = None
        return list(found)

    def _chain(self, path: list[_Stretch[P]], n_have: int, *, can_cut: bool) -> Chain[P] | None:
        pieces = self._back(path, n_have, can_cut=can_cut)
        is_whole = pieces and pieces[-1].start <= n_have
        return Chain(pieces[-1].start, path[-1].end, tuple(reversed(pieces))) if is_whole else None

    @staticmethod
    def _back(path: list[_Stretch[P]], n_have: int, *, can_cut: bool) -> list[P]:
        """Go back from the end of `path`, each time by the piece that goes back furthest, no further than needed, as far as they lead."""
        pieces: list[P] = []
        start = path[-1].end
        for stretch in reversed(path):
            if stretch.start >= start:
                continue  # within the piece that was taken last
            fitting = [piece for piece in stretch.node.through if can_cut or len(piece.tokens) <= start]
            if not fitting:
                break
            piece = min(fitting, key=lambda piece: (max(piece.start, n_have), -piece.start, len(piece.tokens)))
            pieces.append(piece)
            start = piece.start
            if start <= n_have:
                break
        return pieces

    def _walk(self, root: _Node[P], tokens: list[int]) -> list[_Stretch[P]]:
        """Return the nodes along `tokens`; the last may be matched in part."""
        path: list[_Stretch[P]] = []
        node, pos, n_tokens = root, 0, len(tokens)
        while pos < n_tokens and (child := node.children.get(tokens[pos])) is not None:
            n = n_common(child.edge, tokens, pos, n_tokens)
            path.append(_Stretch(child, pos, pos + n))
            pos += n
            if n < len(child.edge):
                break
            node = child
        return path

    def _extend(self, node: _Node[P], tokens: list[int], start: int, end: int) -> list[_Node[P]]:
        """Return the nodes of ``tokens[start:end]`` below `node`, made or split so that the last one ends there."""
        path: list[_Node[P]] = []
        while start < end:
            child = node.children.get(tokens[start])
            if child is None:
                child = node.children[tokens[start]] = _Node(tokens[start:end], node)
            n = n_common(child.edge, tokens, start, end)
            if n < len(child.edge):
                child = self._split(node, child, n)
            path.append(child)
            node, start = child, start + n
        return path

    @staticmethod
    def _join(node: _Node[P]) -> None:
        """Make one of a node and its only child that the same pieces run through, so that paths stay short."""
        if node.parent is None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if node.through.keys() == child.through.keys():
            node.edge += child.edge  # its own list: edges are slices
            node.children = child.children
            for grandchild in node.children.values():
                grandchild.parent = node

    @staticmethod
    def _split(parent: _Node[P], node: _Node[P], at: int) -> _Node[P]:
        """Put a node between that takes the first `at` tokens of `node`'s edge; return it."""
        head: _Node[P] = _Node(node.edge[:at], parent, through=dict(node.through))
        parent.children[head.edge[0]] = head
        node.edge, node.parent = node.edge[at:], head
        head.children[node.edge[0]] = node
        return head
