"""Who waits for a prompt that another sequence is computing: equal beginnings are computed once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import attrs

from cllm.engine.memory.prefix import n_common
from cllm.engine.sequence import Phase, Sequence

N_COMMON_LEAST = 32  # tokens: waiting costs at least a step, and fewer rows than this hardly make one longer
N_SAME_LEAST = 8  # the same where nothing but the last token is left to compute: several answers to one prompt come in dozens
N_FOLLOWED_MAX = 4  # leaders of one sequence; then it computes what is left by itself, so that nobody waits for ever


@attrs.frozen
class _Lead:
    leader: Sequence
    n_common: int  # tokens

    @property
    def is_over(self) -> bool:
        """Whether the common part is computed, or the leader computes it no longer."""
        return self.leader.phase is not Phase.PREFILL or self.leader.n_computed >= self.n_common


@attrs.frozen
class Released:
    """One who followed `leader`, by whom so many tokens of its prompt were computed; 0: it ended before."""

    sequence: Sequence
    leader: Sequence
    n_computed: int


class Followers:
    """Waiting sequences beside the queue, each with a leader that computes the beginning of its tokens. They hold up nobody."""

    def __init__(self) -> None:
        self._leads: dict[Sequence, _Lead] = {}

    def __len__(self) -> int:
        return len(self._leads)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._leads)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._leads

    def leader_for(self, sequence: Sequence, running: list[Sequence], n_known: int, *, n_least: int = 0) -> Sequence | None:
        """Let `sequence` follow whoever of `running` computes most of what it needs beyond `n_known` tokens; None: it is not worth it.

        Where it would have a copy of those cells, fewer than `n_least` are not worth it.
        """
        if sequence.n_followed >= N_FOLLOWED_MAX:
            return None
        best: _Lead | None = None
        for leader in running:
            if leader.phase is not Phase.PREFILL or not _could_share(leader, sequence):
                continue
            n_wanted = max(n_known + N_SAME_LEAST, n_least, leader.n_computed + 1, best.n_common + 1 if best else 0)
            if _may_have(leader, sequence, n_wanted):
                n = _n_common(leader, sequence)
                least = n_known + (N_COMMON_LEAST if n_least or n < sequence.n_shareable else N_SAME_LEAST)
                if n >= max(least, n_wanted):
                    best = _Lead(leader, n)
        if best is None:
            return None
        sequence.n_followed += 1
        self._leads[sequence] = best
        return best.leader

    def n_common(self, sequence: Sequence) -> int:
        """Tokens of a follower that its leader computes for it, or has."""
        return self._leads[sequence].n_common

    def meetings(self, *, beside_answers: bool) -> dict[Sequence, int]:
        """For leaders whose followers have much left of their own, the tokens after which these go on: together they have it sooner, since
        who began to generate before would leave these the room of a step beside answers. Where it is that already, nothing is gained.

        For leaders whose cells are gone with them, in any case: their first token may be the last.
        """
        n_left: Counter[Sequence] = Counter()
        ends: dict[Sequence, int] = {}
        for sequence, lead in self._leads.items():
            n_left[lead.leader] += len(sequence.tokens) - lead.n_common
            ends[lead.leader] = max(ends.get(lead.leader, 0), lead.n_common)
        gains = {leader for leader, n in n_left.items() if n >= N_COMMON_LEAST and not beside_answers}
        return {leader: end for leader, end in ends.items() if leader in gains or not leader.may_keep}

    def stops(self) -> dict[Sequence, int]:
        """For leaders, the tokens after which the first of their followers can go on from all that they have."""
        ends: dict[Sequence, int] = {}
        for lead in self._leads.values():
            if not lead.is_over:
                ends[lead.leader] = min(ends.get(lead.leader, lead.n_common), lead.n_common)
        return ends

    def take_released(self) -> list[Released]:
        """Hand back those who need not wait for their leaders any longer."""
        over = [(sequence, lead) for sequence, lead in self._leads.items() if lead.is_over]
        for sequence, _ in over:
            del self._leads[sequence]
        return [Released(sequence, lead.leader, lead.n_common if lead.leader.n_computed >= lead.n_common else 0) for sequence, lead in over]

    def remove(self, sequence: Sequence) -> Sequence:
        """Take out a follower that ends; return whom it followed."""
        return self._leads.pop(sequence).leader

    def rank_of(self, leader: Sequence) -> tuple[int, int]:
        """The rank of the most urgent of `leader` and those who follow it."""
        return min([leader.own_order, *(sequence.order for sequence, lead in self._leads.items() if lead.leader is leader)])


def n_computing(sequence: Sequence, running: list[Sequence], n_shared: int) -> int:
    """How many tokens of `sequence`, of which it shares `n_shared` in any case, somebody of `running` is computing, or has, whether or not
    that is waited for; few count as none.
    """
    if not sequence.may_share:
        return n_shared
    n = n_shared
    for one in running:
        n_wanted = max(n + 1, N_COMMON_LEAST)
        if one.phase is Phase.PREFILL and _could_share(one, sequence) and _may_have(one, sequence, n_wanted):
            n_common = _n_common(one, sequence)
            n = n_common if n_common >= n_wanted else n
    return n


def is_of_use(prompts: Seq[tuple[Sequence, int]], sequence: Sequence, *, can_trim: bool) -> bool:
    """Whether `sequence` can go on from the rows that a step computes of one of `prompts`, given with their numbers.

    Where cells cannot be trimmed, it must begin with all of them.
    """
    if not sequence.may_share:
        return False
    for one, n_rows in prompts:
        n_wanted = max(one.n_computed + (1 if can_trim else n_rows), N_COMMON_LEAST)
        if _could_share(one, sequence) and _may_have(one, sequence, n_wanted) and _n_common(one, sequence) >= n_wanted:
            return True
    return False


def _n_common(leader: Sequence, sequence: Sequence) -> int:
    """Tokens of those that `sequence` need not compute itself with which `leader` begins, too.

    Answers to one prompt have the same list of it, and are not compared: a hundred, of a hundred thousand tokens, take a tenth of a second.
    """
    n_most = sequence.n_shareable
    if leader.spec.prompt is sequence.spec.prompt and n_most <= sequence.n_prompt:
        return n_most
    return n_common(leader.tokens, sequence.tokens, 0, n_most)


def _may_have(leader: Sequence, sequence: Sequence, n: int) -> bool:
    """Whether `leader` may have the first `n` tokens of `sequence`, by the last of these.

    Of those who ask about one document each has all of it. To compare it between any two takes half a second of 64 and 8,000 tokens.
    """
    start = max(n - N_SAME_LEAST, 0)
    return n <= sequence.n_shareable and leader.tokens[start:n] == sequence.tokens[start:n]


def _could_share(one: Sequence, other: Sequence) -> bool:
    return one.may_share and one.cache_key == other.cache_key
