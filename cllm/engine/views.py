"""How sequences stand, and what has been counted: for people, for metrics, and for the usage that an answer ends with."""

from __future__ import annotations

import attrs

from cllm.engine.events import Usage
from cllm.engine.sequence import Miss, Phase, Sequence


@attrs.frozen(kw_only=True)
class SequenceView:
    """How one sequence stands, for people."""

    seq_id: int
    request_id: str
    phase: Phase
    slot: int | None
    n_prompt: int
    n_generated: int
    n_computed: int
    n_held: int
    n_shared: int  # of these, cells that it found when it was admitted last
    n_cached: int  # tokens of its prompt that were known when it was first admitted: where the match ended, for which `miss` is the reason
    miss: Miss | None  # None: it has not been admitted yet
    n_preempted: int
    priority: int


@attrs.define(eq=False)
class Totals:
    """Counts since the start."""

    n_submitted: int = 0
    n_finished: int = 0
    n_failed: int = 0
    n_cancelled: int = 0
    n_preempted: int = 0
    n_prompt_tokens: int = 0  # of admitted prompts
    n_prefill_rows: int = 0
    n_generated: int = 0
    n_fillers: int = 0  # rows that closed gaps between slots
    n_layouts: int = 0  # times that the cells were laid out anew


def view_of(sequence: Sequence) -> SequenceView:
    """Return how `sequence` stands."""
    return SequenceView(
        seq_id=sequence.seq_id,
        request_id=sequence.spec.request_id,
        phase=sequence.phase,
        slot=None if sequence.phase is Phase.WAITING else sequence.slot,
        n_prompt=sequence.n_prompt,
        n_generated=sequence.n_generated,
        n_computed=sequence.n_computed,
        n_held=sequence.n_held,
        n_shared=sequence.n_shared,
        n_cached=sequence.n_cached,
        miss=sequence.miss,
        n_preempted=sequence.n_preempted,
        priority=sequence.spec.priority,
    )


def usage_of(sequence: Sequence, now: float) -> Usage:
    """Return what `sequence` has taken up to `now`."""
    admitted_at = now if sequence.admitted_at is None else sequence.admitted_at
    first_token_at = now if sequence.first_token_at is None else sequence.first_token_at
    return Usage(
        n_prompt=sequence.n_prompt,
        n_cached=sequence.n_cached,
        n_generated=sequence.n_generated,
        queue_s=admitted_at - sequence.arrived_at,
        prefill_s=first_token_at - admitted_at,
        decode_s=now - first_token_at,
        n_preempted=sequence.n_preempted,
        n_reasoning=sequence.transcript.n_reasoning,
        is_admitted=sequence.admitted_at is not None,
        has_begun=sequence.first_token_at is not None,
    )
