"""What the scheduler asks of one step, and what comes back."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Seq

import attrs

from cllm.backend import Batch
from cllm.engine.cost.model import Attended
from cllm.engine.events import Event, TokenLogprob
from cllm.engine.memory.hostpool import Piece
from cllm.engine.memory.pieces import Chain
from cllm.engine.memory.prefix import Key
from cllm.engine.sampling.step import Sampler
from cllm.engine.sequence import FINISHED, Sequence


@attrs.frozen
class Drop:
    """Free all cells of `slot`."""

    slot: int


@attrs.frozen
class Trim:
    """Free the cells of `slot` at positions ``>= n_keep``."""

    slot: int
    n_keep: int


@attrs.frozen
class Share:
    """Let the empty `slot` begin with the first `n_tokens` cells of `source`; all of them where the model shares only whole slots."""

    slot: int
    source: int
    n_tokens: int


@attrs.frozen(eq=False)
class Save:
    """Save the cells of `slot` from `start` on, which are those of ``tokens[start:]``. The slot stays as it is."""

    slot: int
    start: int
    key: Key
    tokens: list[int]
    is_spare: bool = False  # a copy of what stays in the slot: nothing else leaves the host pool for it


@attrs.frozen(eq=False)
class Restore:
    """Fill `slot`, which holds the cells before the chain, up to the chain's end."""

    slot: int
    chain: Chain[Piece]


Move = Drop | Trim | Share | Save | Restore  # memory moves of a plan, done in order and before its rows; `slot` is the one that changes


@attrs.frozen(eq=False)
class Restored:
    """What came of a `Restore`."""

    move: Restore
    n_tokens: int  # cells that the slot holds now
    n_moved: int  # cells that were restored, some of which may have been cut again
    seconds: float
    unfit: Piece | None = None  # the piece that could not be restored, though there was room for it


@attrs.frozen(eq=False)
class Scored:
    """Outputs from which nothing is drawn: they tell how likely the model thought the prompt's tokens that follow them."""

    first: int  # of the logits' rows, which go on from there
    targets: list[int]  # the token that follows each
    n_top: int  # the likeliest tokens to tell beside each

    @property
    def rows(self) -> slice:
        """The logits' rows."""
        return slice(self.first, self.first + len(self.targets))


@attrs.frozen(eq=False)
class Scoring(Scored):
    """The same, and whose they are."""

    sequence: Sequence


@attrs.define(eq=False)
class Unsettled:
    """What is known of a step that begins before the one before it is settled (`cllm.engine.batch.ahead`)."""

    n_tokens: Seq[int]  # of each output's sequence, with the one that the step before drew
    # Until then nothing is drawn here, since samplers change with what came before; a model that draws by itself does so before.
    is_settled: threading.Event = attrs.field(factory=threading.Event)
    overrun: frozenset[int] = frozenset()  # outputs that nobody wants any more; known once it is settled


@attrs.define(eq=False, kw_only=True)
class StepWork:
    """The model's side of a step: what `compute` does, wherever that runs."""

    moves: list[Move]
    batch: Batch
    samplers: list[Sampler]  # one for each output that a token is drawn from, in the order of the logits' rows
    scorings: Seq[Scored] = ()  # the other outputs
    fillers: Seq[tuple[int, int]] = ()  # rows that nobody wants: slots, and their cells without them, which `compute` sees to
    is_given_up: bool = False  # nobody waits for it any more; set from outside while it is under way
    n_moves_done: int = 0  # counted by `compute`, so that a failure does not leave it open what was done
    saved: list[tuple[Save, bytes | None, float]] = attrs.field(factory=list)  # the states, None where it failed, and the seconds
    restored: list[Restored] = attrs.field(factory=list)
    unsettled: Unsettled | None = None
    drawn: Seq[int] | None = None  # by `compute`, the outputs' tokens, when each has a valid one: a step may follow on them at once

    @property
    def n_rows(self) -> int:
        """Rows of the step; 0 when only moves or events are owed."""
        return self.batch.n_rows


@attrs.define(eq=False, kw_only=True)
class Plan(StepWork):
    """One step's work, and whose it is. `events` are owed at once, whatever the step brings."""

    decoding: list[Sequence]  # one row each
    prefilling: list[tuple[Sequence, int]]  # (sequence, rows)
    outputs: list[Sequence]  # whose next token is drawn, as `samplers`
    events: list[Event]
    scorings: Seq[Scoring] = ()
    n_cells: int = 0  # cells in use, which the step's attention walks
    attended: Attended = ()  # cells of their own sequences before the rows; single rows, as answers' are, come first
    passes: tuple[int, ...] = ()  # rows that are computed at once, where each slot has cells of its own
    expected_s: float = 0.0  # what the rows will probably take

    @property
    def is_step(self) -> bool:
        """Whether the model has anything to do."""
        return bool(self.moves) or self.batch.n_rows > 0

    @property
    def has_move_failed(self) -> bool:
        """Of a step that raised: whether the cells of one slot could not be moved, so that it came to no rows."""
        return self.n_moves_done < len(self.moves) and not isinstance(self.moves[self.n_moves_done], Drop | Save)

    def is_unwanted(self) -> bool:
        """Whether nobody waits for any of its rows."""
        if not all(sequence.cancelled or sequence.phase is FINISHED for sequence in self.decoding):
            return False
        return self.n_rows > 0 and all(sequence.cancelled for sequence, _ in self.prefilling)

    @property
    def n_prompt_rows(self) -> int:
        """Rows of prompts."""
        return self.n_rows - len(self.decoding) - len(self.fillers)

    def overrun(self) -> list[Sequence]:
        """Whose rows nobody wanted any more when what came before was settled: their cells are freed after the step."""
        return [] if self.unsettled is None else [self.outputs[place] for place in self.unsettled.overrun]

    def members(self) -> list[Sequence]:
        """The sequences that have rows in this step."""
        return [*self.decoding, *(sequence for sequence, _ in self.prefilling)]


@attrs.define(eq=False)
class StepOutput:
    """What a step drew, for each of the plan's outputs, and scored; times in seconds."""

    tokens: list[int]
    invalid: list[int]  # outputs whose logits were not numbers
    logprobs: list[TokenLogprob | None] | None
    scores: list[list[TokenLogprob] | None] = attrs.field(factory=list)  # one for each of `scorings`; None: they were not numbers
    model_s: float = 0.0  # the rows alone
    moves_s: float = 0.0
    sample_s: float = 0.0
