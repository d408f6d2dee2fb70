"""Who is to blame for a failed step: its members are tried in halves, until the one that fails is alone."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from cllm.engine.sequence import Sequence

N_DEATHS_TOGETHER = 2  # a model that dies once may have died of anything


class Trials:
    """The groups of sequences that must each get through a step without the others before all run together again.

    While there is a group, only the first one's members get rows, by turns with those whom nobody suspects: a long prompt on trial does not
    hold up their answers, and in no step is it open whose fault it was. A member is acquitted by an output of a step that went well, or by
    its end.
    """

    def __init__(self) -> None:
        self._groups: deque[set[Sequence]] = deque()
        self._others_turn = False  # whether the last step was of those whom nobody suspects
        self._n_deaths: Counter[Sequence] = Counter()  # of the model while a sequence was in its step, since its last token

    def __bool__(self) -> bool:
        return bool(self._groups)

    def split(self, members: list[Sequence]) -> None:
        """Try the halves of `members` next; a group that they were part of is replaced by them."""
        for sequence in members:
            self.acquit(sequence)
        middle = len(members) // 2
        for half in (members[middle:], members[:middle]):
            if half:
                self._groups.appendleft(set(half))

    def isolate(self, members: list[Sequence]) -> None:
        """Try each of `members` by itself next: what befell them costs too much for halves."""
        for sequence in members:
            self.acquit(sequence)
        self._groups.extendleft({sequence} for sequence in reversed(members))

    def note_death(self, members: list[Sequence]) -> list[Sequence]:
        """The model died in a step of `members`; return those with whom it did so before."""
        self._n_deaths.update(members)
        return [sequence for sequence in members if self._n_deaths[sequence] >= N_DEATHS_TOGETHER]

    @property
    def is_any_suspect(self) -> bool:
        """Whether there is anybody to acquit."""
        return bool(self._groups or self._n_deaths)

    def advance(self) -> None:
        """Leave the groups behind whose members are all acquitted."""
        while self._groups and not self._groups[0]:
            self._groups.popleft()

    def clear(self, sequences: Iterable[Sequence]) -> None:
        """Acquit sequences whose step went well."""
        for sequence in sequences:
            self.acquit(sequence)

    def acquit(self, sequence: Sequence) -> None:
        """Take a sequence off every group, and what is held against it off the record."""
        self._n_deaths.pop(sequence, None)
        for group in self._groups:
            group.discard(sequence)

    def take_turns(self, running: list[Sequence]) -> list[Sequence]:
        """Those of `running` that the next step is for; all of them when no group is on trial."""
        if not self._groups:
            return running
        members = [sequence for sequence in running if sequence in self._groups[0]]
        suspects = set().union(*self._groups)
        others = [sequence for sequence in running if sequence not in suspects]
        self._others_turn = bool(others) and not (self._others_turn and members)
        return others if self._others_turn else members

    def companions(self, sequence: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Those of `running` who have their turns together with `sequence`: in its group on trial, or suspected by nobody either."""
        if not self._groups:
            return running
        if self.is_tried(sequence):
            return [other for other in running if self.is_tried(other)]
        suspects = set().union(*self._groups)
        return [] if sequence in suspects else [other for other in running if other not in suspects]

    def first_of(self, waiting: Iterable[Sequence]) -> Sequence | None:
        """The first of `waiting` that is on trial; else of those whom nobody suspects, who run by turns with the trial, the first.

        In the order of `waiting`: that the newest go first where some have waited in vain does not hold meanwhile.
        """
        unsuspected = None
        for sequence in waiting:
            if self.is_tried(sequence):
                return sequence
            if unsuspected is None and not any(sequence in group for group in self._groups):
                unsuspected = sequence
        return unsuspected

    def is_tried(self, sequence: Sequence) -> bool:
        """Whether it is one of those who are tried next."""
        return bool(self._groups) and sequence in self._groups[0]

    def last_outside(self, running: list[Sequence]) -> Sequence | None:
        """The last of `running` that is not on trial."""
        return next((sequence for sequence in reversed(running) if sequence not in self._groups[0]), None)
