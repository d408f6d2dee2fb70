"""A sequence: the tokens of one completion, its phase, and the moves between phases that are legal."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import Enum

import attrs

from cllm.backend import StreamForm
from cllm.engine.sampling.dry import TokenSet
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sampling.step import Sampler
from cllm.engine.timeline import Timeline
from cllm.engine.waiting.fairness import NO_WORK, Account, Work
from cllm.text.answers import AnswerFormat
from cllm.text.grammar import Grammar
from cllm.text.transcript import Transcript


@attrs.frozen(kw_only=True)
class SequenceSpec:
    """What is wanted of one sequence, validated. Seconds are of the scheduler's clock, which its caller provides."""

    prompt: Seq[int]  # at least one token. Answers to one prompt have one list of it: by that (`is`) they are known to be alike, unread
    sampling: SamplingParams = attrs.field(factory=SamplingParams)
    stopping: StopParams = attrs.field(factory=StopParams)
    seed: int = 0  # 64 bits; the same seed gives the same text
    n_logprobs: int | None = None  # the likeliest tokens to report beside each drawn one; None: no logprobs
    n_prompt_logprobs: int | None = None  # the same for the prompt's tokens, of which the first has none
    dry_breakers: TokenSet | None = None  # of `sampling`, where they were looked for already
    grammar: Grammar | None = None  # what the generated text must be
    form: StreamForm | None = None  # the same, for a model that sees to it by itself
    answer: AnswerFormat | None = None  # how its text is read for reasoning and tool calls; None: it is not
    priority: int = 0  # lower goes first
    timeout_s: float | None = None
    key: str = ""  # whose it is, for fairness and quotas
    cache_prompt: bool = True  # whether it shares cells with other requests; False: it takes none and leaves none
    cache_salt: str = ""  # only sequences of the same salt share cells
    group: str = ""  # secret; sequences of the same one share cells while they run, also where they share none with others
    adapter: str = ""  # what its cells were computed with beside the model
    request_id: str = ""


class Phase(Enum):
    """Where a sequence is between submission and its terminal event."""

    WAITING = "waiting"  # in the queue, holds no cells
    PREFILL = "prefill"  # holds a slot; some of its tokens have no cell yet
    DECODE = "decode"  # every token but the last drawn one has its cell
    FINISHED = "finished"


class Miss(Enum):
    """Why a sequence's tokens had to be computed from some position on."""

    NONE = "none"  # they had not: all but the last were known
    DIFFERS = "differs"  # nothing known goes on as this prompt does
    UNKNOWN = "unknown"  # nothing known begins as this prompt does
    OUT_OF_REACH = "out_of_reach"  # something does, but cannot be cut to where they part, or is not worth a copy
    OFF = "off"  # it shares nothing: by request, by setting, or by the model


MOVES: dict[Phase, frozenset[Phase]] = {  # the end may come at any time, preemption whenever cells are held
    Phase.WAITING: frozenset({Phase.PREFILL, Phase.FINISHED}),
    Phase.PREFILL: frozenset({Phase.DECODE, Phase.WAITING, Phase.FINISHED}),
    Phase.DECODE: frozenset({Phase.WAITING, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}
HOLDING = frozenset({Phase.PREFILL, Phase.DECODE})  # phases with a slot and cells
# For what is asked of every sequence in every step: Python 3.11 takes 45 ns to look a member up.
PREFILL, DECODE, FINISHED = Phase.PREFILL, Phase.DECODE, Phase.FINISHED


@attrs.define(eq=False, kw_only=True)
class Sequence:
    """The state of one sequence. Changed by the scheduler, and by its `Memory` (slot, cells, what was known), `Followers` and `Queue`.

    tokens:   [0, n_prompt) the prompt | [n_prompt, len) generated
    computed: [0, n_computed) have their cells in `slot`; the rest is owed
    scored:   [0, n_scored) are rows whose successors' logprobs have been told; those after them, up to the prompt's last but one,
              must be computed as outputs, so that n_computed <= n_scored as long as some are missing
    """

    seq_id: int
    spec: SequenceSpec
    account: Account  # its key's
    work: Work = NO_WORK  # what it will probably cost
    tokens: list[int]
    n_prompt: int
    n_max: int  # the sequence ends when it has so many tokens
    sampler: Sampler
    transcript: Transcript
    final_tokens: frozenset[int]  # tokens that end it: the model's end tokens unless ignored, and the request's stop tokens
    n_final_from: int  # they, and the stop strings, count once it has so many tokens
    arrived_at: float
    deadline: float | None
    order: tuple[int, int]  # rank of service: (priority, arrival); lower first
    timeline: Timeline = attrs.field(factory=Timeline)
    phase: Phase = Phase.WAITING
    slot: int = 0  # its place while it holds cells, and then the last that it had, which nobody else is given before the next plan
    n_computed: int = 0
    prefill_from: int = 0  # rows of prompts that had ever been computed when it was first admitted, and its own since then
    waits_from: int = 0  # the same since it was admitted last
    n_cached: int = 0  # of the prompt's tokens, those that were not computed for it
    n_shared: int = 0  # cells that it found when it was admitted last, those that it had computed before it gave way among them
    miss: Miss | None = None  # why not all of its prompt was known when it was first admitted; from position `n_cached` on
    may_share: bool = True
    may_keep: bool = True  # whether its cells are for others, too, and for those who come when it has ended
    is_restoring: bool = False  # cells of its are on their way from the host: its rows wait for them
    stop_at: int = 0  # a step ends at so many of its tokens, where what it shares with others is saved; 0: nowhere
    n_followed: int = 0  # times that it waited for another to compute the beginning of its tokens
    n_scored: int = 0
    n_held: int = 0  # cells held or reserved
    n_preempted: int = 0
    n_lone_failures: int = 0  # steps that failed with nobody else in them since its last token
    cancelled: bool = False
    admitted_at: float | None = None
    first_token_at: float | None = None
    lines_s: float | None = None  # see `StopParams`
    has_line: bool = False  # its text has the end of a line; known only where that matters

    @property
    def n_generated(self) -> int:
        """Tokens drawn so far."""
        return len(self.tokens) - self.n_prompt

    @property
    def n_unscored(self) -> int:
        """Rows of the prompt whose successors' logprobs are wanted and not known yet."""
        return 0 if self.spec.n_prompt_logprobs is None else self.n_prompt - 1 - self.n_scored

    @property
    def n_shareable(self) -> int:
        """Tokens at its beginning that it need not compute itself: the last one's logits are wanted, and those that are to be scored."""
        return self.n_scored if self.n_unscored else len(self.tokens) - 1

    @property
    def cache_key(self) -> tuple[str, str]:
        """Cells are shared by sequences of the same."""
        return self.spec.cache_salt if self.may_keep else self.spec.group, self.spec.adapter

    @property
    def own_order(self) -> tuple[int, int]:
        """Its rank of service while nobody has lent it a better one."""
        return self.spec.priority, self.seq_id

    def move(self, phase: Phase) -> None:
        """Enter `phase`, which must be a legal move."""
        assert phase in MOVES[self.phase], f"sequence {self.seq_id} cannot go from {self.phase} to {phase}"
        self.account.n_running += (phase in HOLDING) - (self.phase in HOLDING)
        self.phase = phase
