"""How often what ended sequences leave behind is asked for again: learned from what was, whether or not it had been kept.

Carrying cells and copying them to the host cost time whatever becomes of them. Where every prompt is new, that is lost (a tenth of what 8
streams could have, when every branch was carried for a while and then copied); where conversations go on, it is saved many times over.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from cllm.engine.memory.prefix import Key

SHARE_AT_FIRST: Final = 0.2  # before anything is known: a guess on the side of not saving
N_AT_FIRST: Final = 10.0  # branches that this guess counts for
MEMORY: Final = 0.98  # of what is known, for each branch that is left: about the last fifty count
N_TOKENS_LEAST: Final = 16  # of a beginning that tells one sequence from another
N_BRANCHES_MAX: Final = 4096  # that are remembered, by a number each


class Demand:
    """Remembers what was left by a number for its beginning: the tokens up to a power of two, as many as it has."""

    def __init__(self) -> None:
        self._left: OrderedDict[int, None] = OrderedDict()
        self._n_left = N_AT_FIRST
        self._n_asked = N_AT_FIRST * SHARE_AT_FIRST

    @property
    def share(self) -> float:
        """The share of branches that are asked for again, 0 to 1."""
        return min(self._n_asked / self._n_left, 1.0)

    def left(self, key: Key, tokens: list[int]) -> None:
        """A sequence has ended, whose cells another one may begin with."""
        self._n_left = self._n_left * MEMORY + 1.0
        self._n_asked *= MEMORY
        lengths = _lengths(tokens)
        if lengths:
            self._left[_number(key, tokens, lengths[-1])] = None
            if len(self._left) > N_BRANCHES_MAX:
                self._left.popitem(last=False)

    def came(self, key: Key, tokens: list[int]) -> None:
        """A sequence begins; what it goes on from, if it was left, has been asked for."""
        for length in reversed(_lengths(tokens)):
            number = _number(key, tokens, length)
            if number in self._left:
                del self._left[number]
                self._n_asked += 1.0
                return


def _lengths(tokens: list[int]) -> list[int]:
    lengths = []
    length = N_TOKENS_LEAST
    while length <= len(tokens):
        lengths.append(length)
        length *= 2
    return lengths


def _number(key: Key, tokens: list[int], length: int) -> int:
    return hash((key, length, *tokens[:length]))
