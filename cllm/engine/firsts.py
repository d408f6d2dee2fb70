"""Who is the first of those who wait with prompts that begin alike: what they have in common will be computed once, and is owed once.

Those who follow a running one are told by it (`engine/following.py`). These are the others, who wait for a place: forty questions about one
document, or a team's first requests with one long instruction, would be owed forty times, and who comes then refused for minutes of waiting
that nobody will wait.
"""

from __future__ import annotations

from typing import TypeAlias

from cllm.engine.following import N_COMMON_LEAST, could_share, n_common_of
from cllm.engine.sequence import Phase, Sequence

Head: TypeAlias = tuple[tuple[str, str], tuple[int, ...]]


class Firsts:
    """Sequences by how their prompts begin, in order of arrival, until they end."""

    def __init__(self) -> None:
        self._alike: dict[Head, dict[Sequence, None]] = {}  # none is empty

    def n_coming(self, sequence: Sequence) -> int:
        """Tokens of a newcomer's prompt that another one computes before it; 0 where it is the first, or they are there already."""
        head = _head_of(sequence)
        if head is None:
            return 0
        alike = self._alike.setdefault(head, {})
        first = next(iter(alike), None)
        alike[sequence] = None
        return n_common_of(first, sequence) if first is not None and _computes(first) and could_share(first, sequence) else 0

    def ends(self, sequence: Sequence) -> Sequence | None:
        """It ends. If it was the first and had not computed its prompt, return who is the first now, and owes what it has left."""
        head = _head_of(sequence)
        alike = None if head is None else self._alike.get(head)
        if head is None or alike is None or sequence not in alike:
            return None
        was_first = next(iter(alike)) is sequence
        del alike[sequence]
        if not alike:
            del self._alike[head]
            return None
        heir = next(iter(alike))
        return heir if was_first and _computes(sequence) and heir.phase is Phase.WAITING else None


def _computes(sequence: Sequence) -> bool:
    """Whether its prompt is being computed, or will be."""
    return sequence.phase is Phase.PREFILL or (sequence.phase is Phase.WAITING and sequence.first_token_at is None)


def _head_of(sequence: Sequence) -> Head | None:
    if not sequence.may_keep or sequence.n_prompt <= N_COMMON_LEAST:
        return None
    return sequence.cache_key, tuple(sequence.tokens[:N_COMMON_LEAST])
