"""A step that is planned while the one before it runs, and begins before that one is settled.

Most steps of answers are the one before once more, each row a token on. Such a step needs nothing of what is decided between two steps
but the tokens that were drawn, which the thread that computes has at hand. So it goes on by itself, and what the tokens mean is read, told
and planned while it computes. With 8 streams on a fake GPU, which takes 2 ms for a step, 0.27 ms were between two steps; 0.1 are now.

It does not begin where the tokens show that it would be in vain: one of them ends its sequence, or is none. What only reading them shows,
as a stop string, leaves a row that nobody wants: what is drawn from it is no token, and its cell is freed after the step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import attrs
import numpy as np

from cllm.engine.batch.plan import Plan
from cllm.engine.sequence import FINISHED, Sequence


@attrs.define(eq=False, kw_only=True)
class Ahead:
    """The step `plan`, which follows on `before` and has a row for each of that one's outputs, in their order."""

    plan: Plan
    before: Plan
    n_vocab: int
    _ends: Seq[frozenset[int]] = attrs.field(alias="ends")  # of each output, the tokens that end its sequence
    _any_ends: frozenset[int] = attrs.field(init=False)  # those of any
    _turns: list[None] = attrs.field(init=False, factory=lambda: [None])  # whoever takes it first has the say: popping is atomic

    def __attrs_post_init__(self) -> None:
        self._any_ends = frozenset().union(*set(self._ends))  # mostly all have the same

    def begin(self) -> bool:
        """In the thread that computes, when `before` was computed: write the rows' tokens; False when the step is not to be."""
        drawn = self.before.drawn
        if drawn is None or not self.goes_on or not self._take_turn():
            return False
        batch = self.plan.batch
        n_rows = batch.n_rows
        if n_rows == batch.n_outputs:
            batch.tokens[:n_rows] = drawn
        else:
            batch.tokens[np.flatnonzero(batch.outputs[:n_rows])] = drawn
        return True

    @property
    def is_decided(self) -> bool:
        """Whether it has begun, or was withdrawn: nothing changes that any more."""
        return not self._turns

    def withdraw(self) -> bool:
        """From the thread that plans: let the step not be, since it would be another one now; False when it has begun."""
        return self._take_turn()

    def _take_turn(self) -> bool:
        try:
            self._turns.pop()
        except IndexError:
            return False
        return True

    @property
    def goes_on(self) -> bool:
        """Whether what `before` drew, which it has done or never will, lets the step begin."""
        drawn = self.before.drawn
        if drawn is None:
            return False
        if min(drawn) < 0 or max(drawn) >= self.n_vocab:
            return False
        return self._any_ends.isdisjoint(drawn) or not any(token in ends for token, ends in zip(drawn, self._ends, strict=True))

    def note_overrun(self) -> list[Sequence]:
        """`before` is settled: note whose rows nobody wants any more, since they have ended, or did not take their tokens; return them."""
        assert self.plan.unsettled is not None
        outputs = self.plan.outputs
        places = [place for place, sequence in enumerate(outputs) if sequence.cancelled or sequence.phase is FINISHED]
        self.plan.unsettled.overrun = frozenset(places)
        return [outputs[place] for place in places]

    def settle(self) -> None:
        """Let tokens be drawn: all that `before` brought has been taken note of, or never will be."""
        assert self.plan.unsettled is not None
        self.plan.unsettled.is_settled.set()
