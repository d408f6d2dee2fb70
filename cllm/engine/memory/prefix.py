"""Which slots' cells begin with which tokens: a radix tree over token ids, whose nodes are physical cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import attrs

from cllm.engine.memory.cells import Cells
from cllm.engine.memory.tokens import shared

N_PIECE_FIRST = 16  # tokens compared at once, four times as many each time: most prompts part early, and slices are copies

Key = tuple[str, str]  # (cache_salt, adapter): cells of different keys are never shared
Rank = tuple[int, int]  # (priority, arrival) of a sequence


@attrs.define(eq=False)
class Node:
    """One cell for each of `tokens`, following on the parent's; every slot that ends at or below the node has them."""

    parent: Node | None
    start: int  # position of the first token
    tokens: list[int]
    children: dict[int, list[Node]] = attrs.field(factory=dict)  # by first token; several where equal tokens were computed apart
    tips: set[int] = attrs.field(factory=set)  # slots whose cells end here
    n_live: int = 0  # live slots that have these cells; 0: they are cached

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)


@attrs.frozen
class Match:
    """How far tokens are known: `n_tokens` of them, the last of which lies in `node`. Stale once the tree changes."""

    n_tokens: int
    node: Node

    @property
    def n_cached(self) -> int:
        """How many of these cells no live slot has."""
        n, node, end = 0, self.node, self.n_tokens
        while node.parent is not None:
            if not node.n_live:
                n += end - node.start
            node, end = node.parent, node.start
        return n


class Leaving:
    """Which cells would be held by nobody if live slots were left one after the other, of which nothing is done.

    `wanted`: what a newcomer would go on from, so that it stays held.
    """

    def __init__(self, tree: PrefixTree, wanted: Match | None) -> None:
        self._tree = tree
        self._n_gone: dict[Node, int] = {}  # of the live slots that have a node's cells
        self._wanted = {} if wanted is None else {node: wanted.n_tokens - node.start for node in _path(wanted.node)}

    def leave(self, slot: int) -> int:
        """Count a live slot as left; return how many cells nobody would hold any more than before."""
        n_cells = 0
        for node in _path(self._tree.tip(slot)):
            n_gone = self._n_gone[node] = self._n_gone.get(node, 0) + 1
            if n_gone == node.n_live:
                n_cells += max(0, len(node.tokens) - self._wanted.get(node, 0))
        return n_cells


class PrefixTree:
    """The cells of all slots that may be shared, live and resting (finished, kept). It moves cells between held and cached.

    A resting slot always ends at a leaf, alone: where others have all its cells too it is not worth a slot. Where slots cannot be cut
    (`can_trim`), one that has more cells can never stand for it.
    """

    def __init__(self, cells: Cells, *, can_trim: bool = True) -> None:
        self.version = 0  # grows when a match may have become stale
        self._cells = cells
        self._can_trim = can_trim
        self._roots: dict[Key, Node] = {}
        self._keys: dict[Node, Key] = {}
        self._tips: dict[int, Node] = {}
        self._resting: dict[int, None] = {}  # slots, the longest unused first
        self._awaited: dict[int, set[Rank]] = {}  # of these, such as waiting sequences will go on from: whose turn is when

    # --- reading ------------------------------------------------------------------------------------------------------

    def __contains__(self, slot: int) -> bool:
        return slot in self._tips

    def tip(self, slot: int) -> Node:
        """The node at whose end a slot's cells end."""
        return self._tips[slot]

    def n_tokens(self, slot: int) -> int:
        """How many of a slot's cells the tree knows."""
        return self._tips[slot].end

    def is_resting(self, slot: int) -> bool:
        """Whether no live sequence has the slot."""
        return slot in self._resting

    @property
    def n_resting(self) -> int:
        """Slots that are kept though their sequences have ended."""
        return len(self._resting)

    def oldest(self, *, but: int | None = None) -> int | None:
        """The resting slot that was unused for longest, leaving out `but`; where all are awaited, the one whose sequence comes last.

        Among sequences that wait, what was unused for longest is what is wanted next.
        """
        slots = [slot for slot in self._resting if slot != but]
        free = next((slot for slot in slots if slot not in self._awaited), None)
        return free if free is not None else max(slots, key=lambda slot: min(self._awaited[slot]), default=None)

    def resting(self) -> list[int]:
        """The resting slots, the longest unused first."""
        return list(self._resting)

    def longest_resting(self) -> int:
        """The resting slot that was unused for longest, awaited or not. There must be one."""
        return next(iter(self._resting))

    def n_alone(self, slot: int) -> int:
        """How many cells at its end a resting slot has to itself, at least."""
        return len(self._tips[slot].tokens)

    def tokens_of(self, slot: int) -> list[int]:
        """The tokens whose cells a slot has, as far as the tree knows."""
        return [token for node in reversed(list(_path(self._tips[slot]))) for token in node.tokens]

    def key_of(self, slot: int) -> Key:
        """Whose cells a slot has."""
        *_, root = _path(self._tips[slot])
        return self._keys[root]

    def match(
        self, key: Key, tokens: Seq[int], n_max: int, *, whole: bool = False, n_in: Callable[[int], int] | None = None
    ) -> Match | None:
        """Return the longest known beginning of ``tokens[:n_max]``; with `whole`, only one that is all that is known of some slot, and
        with `n_in` besides, which tells of a slot how many cells it has, all that is in it.
        """
        root = self._roots.get(key)
        if root is None:
            return None
        best: Match | None = None
        open_nodes = [root]
        while open_nodes:
            node = open_nodes.pop()
            if node.end >= n_max:
                continue
            for child in node.children.get(tokens[node.end], ()):
                end = child.start + n_common(child.tokens, tokens, child.start, n_max)
                if end == child.end:
                    open_nodes.append(child)
                if best is not None and end <= best.n_tokens:
                    continue
                if not whole or (end == child.end and any(n_in is None or n_in(slot) == end for slot in child.tips)):
                    best = Match(end, child)
        return best

    def slot_through(self, node: Node) -> int:
        """Some slot that has the node's cells."""
        while not node.tips:
            node = next(iter(node.children.values()))[0]
        return next(iter(node.tips))

    # --- slots come, grow and go --------------------------------------------------------------------------------------

    def enter(self, slot: int, key: Key) -> None:
        """A live slot without cells."""
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(None, 0, [])
            self._keys[root] = key
        self._attach(slot, root)

    def share(self, slot: int, match: Match) -> None:
        """A live slot that begins with the match's cells."""
        self._attach(slot, self._cut(match.node, match.n_tokens))

    def extend(self, slot: int, tokens: list[int]) -> None:
        """The live slot's next cells, held already."""
        if not tokens:
            return
        self.version += 1
        tip = self._tips[slot]
        own = shared(tokens) if len(tokens) > 1 else tokens  # of a prompt, which others may have too; an answer's come one by one
        if tip.parent is not None and not tip.children and len(tip.tips) == 1:
            tip.tokens += own
            return
        node = Node(tip, tip.end, list(own), tips={slot}, n_live=1)
        tip.children.setdefault(tokens[0], []).append(node)
        tip.tips.discard(slot)
        self._tips[slot] = node

    def rest(self, slot: int) -> bool:
        """The live slot's sequence has ended, or comes back later. False when nothing is worth keeping: the slot has left the tree."""
        tip = self._tips[slot]
        if tip.parent is None or tip.children or len(tip.tips) > 1 or self._is_known_elsewhere(tip):
            self.leave(slot)
            return False
        self.version += 1
        self._count_down(tip)
        self._resting[slot] = None
        return True

    def wait_for(self, slot: int, rank: Rank) -> None:
        """A sequence that waits will go on from what a resting slot has; it is evicted after those that nobody waits for."""
        self.version += 1
        self._awaited.setdefault(slot, set()).add(rank)

    @property
    def are_all_awaited(self) -> bool:
        """Whether somebody waits for each slot that rests."""
        return len(self._awaited) == len(self._resting)

    def is_awaited(self, slot: int, *, but: Rank | None = None) -> bool:
        """Whether somebody waits who will go on from the slot, leaving out the sequence of the rank `but`."""
        ranks = self._awaited.get(slot, ())
        return len(ranks) > (but in ranks)

    def wait_no_more(self, slot: int, rank: Rank) -> None:
        """The sequence of that rank waits no more, whatever the slot has become meanwhile."""
        self.version += 1
        ranks = self._awaited.get(slot, set())
        ranks.discard(rank)
        if not ranks:
            self._awaited.pop(slot, None)

    def wake(self, slot: int) -> None:
        """A resting slot is a live sequence's again."""
        self.version += 1
        del self._resting[slot]
        self._awaited.pop(slot, None)
        self._count_up(self._tips[slot])

    def trim(self, slot: int, n_keep: int) -> bool:
        """The slot loses its cells from `n_keep` on. False when others have all that is left: a resting slot has left the tree."""
        self.version += 1
        is_resting = slot in self._resting
        tip = self._tips[slot]
        while tip.parent is not None and tip.start >= n_keep:
            tip = self._step_back(slot, tip, is_live=not is_resting)
        if tip.end > n_keep:
            tip = self._shorten(slot, tip, n_keep, is_live=not is_resting)
        if is_resting and (tip.parent is None or tip.children or len(tip.tips) > 1):
            self.leave(slot)
            return False
        return True

    def leave(self, slot: int) -> None:
        """The slot loses all its cells."""
        self.version += 1
        is_live = slot not in self._resting
        self._resting.pop(slot, None)
        self._awaited.pop(slot, None)
        tip = self._tips.pop(slot)
        tip.tips.discard(slot)
        if is_live:
            self._count_down(tip)
        self._prune(tip)

    # --- how it works -------------------------------------------------------------------------------------------------

    def _attach(self, slot: int, node: Node) -> None:
        self.version += 1
        node.tips.add(slot)
        self._tips[slot] = node
        self._count_up(node)

    def _count_up(self, tip: Node) -> None:
        for node in _path(tip):
            node.n_live += 1
            if node.n_live == 1:
                self._cells.revive(len(node.tokens))

    def _count_down(self, tip: Node) -> None:
        for node in _path(tip):
            node.n_live -= 1
            if not node.n_live:
                self._cells.cache(len(node.tokens))

    def _cut(self, node: Node, at: int) -> Node:
        """Make position `at` the end of a node, and return that node."""
        if node.end == at:
            return node
        parent, n = node.parent, at - node.start
        assert parent is not None
        head = Node(parent, node.start, node.tokens[:n], n_live=node.n_live)
        siblings = parent.children[node.tokens[0]]
        siblings[siblings.index(node)] = head
        node.parent, node.start, node.tokens = head, at, node.tokens[n:]
        head.children[node.tokens[0]] = [node]
        return head

    def _step_back(self, slot: int, tip: Node, *, is_live: bool) -> Node:
        """Let the slot end at the parent of `tip`."""
        parent = tip.parent
        assert parent is not None
        tip.tips.discard(slot)
        parent.tips.add(slot)
        self._tips[slot] = parent
        if is_live:
            tip.n_live -= 1
            if not tip.n_live:
                self._cells.cache(len(tip.tokens))
        self._prune(tip)
        return parent

    def _shorten(self, slot: int, tip: Node, n_keep: int, *, is_live: bool) -> Node:
        """Let the slot end within `tip`."""
        self._cut(tip, n_keep)
        return self._step_back(slot, tip, is_live=is_live)

    def _prune(self, node: Node) -> None:
        """Let go of nodes that no slot has any more, from `node` upwards, and join what is left in a row."""
        while not node.tips and not node.children:
            parent = node.parent
            if parent is None:
                del self._roots[self._keys.pop(node)]
                return
            self._cells.evict(len(node.tokens))
            siblings = parent.children[node.tokens[0]]
            siblings.remove(node)
            if not siblings:
                del parent.children[node.tokens[0]]
            node = parent
        self._join(node)

    def _join(self, node: Node) -> None:
        """Make one of a node and its only child where no slot ends between them, so that paths stay short."""
        if node.parent is None or node.tips or len(node.children) != 1:
            return
        (children,) = node.children.values()
        if len(children) != 1:
            return
        (child,) = children
        assert child.n_live == node.n_live
        node.tokens += child.tokens
        node.children, node.tips = child.children, child.tips
        for nodes in node.children.values():
            for grandchild in nodes:
                grandchild.parent = node
        self._tips.update(dict.fromkeys(node.tips, node))

    def _is_known_elsewhere(self, leaf: Node) -> bool:
        """Whether the leaf's tokens stand beside it once more, computed apart, and of use to whoever wants them; if so, they were now."""
        parent = leaf.parent
        assert parent is not None
        for other in parent.children[leaf.tokens[0]]:
            if other is not leaf and len(other.tokens) >= len(leaf.tokens) and other.tokens[: len(leaf.tokens)] == leaf.tokens:
                resting = other.tips & self._resting.keys()
                if not (self._can_trim or (resting and len(other.tokens) == len(leaf.tokens))):
                    continue
                for slot in resting:
                    del self._resting[slot]
                    self._resting[slot] = None
                return True
        return False

    # --- for tests ----------------------------------------------------------------------------------------------------

    def check(self) -> tuple[int, int]:
        """Assert that the tree is sound; return its live and its cached cells, recounted."""
        n_live_cells = n_cached_cells = n_nodes_of_tips = 0
        for root in self._roots.values():
            for node in _below(root):
                live = [slot for below in _below(node) for slot in below.tips if slot not in self._resting]
                assert node.n_live == len(live)
                assert node.tips or node.children, "a node that no slot has"
                assert all(self._tips[slot] is node for slot in node.tips)
                assert all(child.parent is node and child.start == node.end for nodes in node.children.values() for child in nodes)
                assert self._awaited.keys() <= self._resting.keys()
                assert not (node.tips & self._resting.keys()) or (len(node.tips) == 1 and not node.children)
                n_nodes_of_tips += len(node.tips)
                if node.n_live:
                    n_live_cells += len(node.tokens)
                else:
                    n_cached_cells += len(node.tokens)
        assert n_nodes_of_tips == len(self._tips)
        return n_live_cells, n_cached_cells


def n_common(known: list[int], tokens: Seq[int], start: int, n_max: int) -> int:
    """How many of `known` ``tokens[start:n_max]`` begins with. Takes time in proportion to that."""
    low, n_most, n_piece = 0, min(len(known), n_max - start), N_PIECE_FIRST
    while low < n_most:
        high = min(low + n_piece, n_most)
        if known[low:high] != tokens[start + low : start + high]:
            return _parting(known, tokens, start, low, high)
        low, n_piece = high, n_piece * 4
    return low


def _parting(known: list[int], tokens: Seq[int], start: int, low: int, high: int) -> int:
    """Where two texts part: ``known[:low]`` is equal, ``known[:high]`` is not."""
    while high - low > 1:
        middle = (low + high) // 2
        if known[low:middle] == tokens[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low


def _path(tip: Node) -> Iterator[Node]:
    node: Node | None = tip
    while node is not None:
        yield node
        node = node.parent


def _below(node: Node) -> Iterator[Node]:
    yield node
    for nodes in node.children.values():
        for child in nodes:
            yield from _below(child)
