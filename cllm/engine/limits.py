"""What a scheduler may deal out, and the memory that this makes."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from cllm.engine.memory.hostpool import HostPool
from cllm.engine.memory.offload import Offload
from cllm.engine.memory.prices import Prices

N_COPY_LEAST = 32  # tokens for which a copy is worth its two calls
# Cells that are copied in less time than one is computed: 66 measured on a CPU, fewer where computing is fast. llama.cpp copies a slot's
# whole part of the cells, however few of them are in use.
COPY_GAIN = 32


@attrs.frozen(kw_only=True)
class Limits:
    """What the scheduler deals out."""

    n_cells: int
    n_slots: int
    n_ctx: int  # tokens of one sequence at most
    n_rows_max: int  # rows of one step at most
    row_budget: int | None  # rows of one step, as far as prefill can be cut; None: as the cost model says
    n_live_max: int  # sequences that hold cells at once
    n_waiting_max: int
    patience_s: float | None = None  # of a waiting sequence, before fresher ones go first; None: order of arrival
    wait_max_s: float | None = None  # that a newcomer would probably wait; more is refused
    key_weights: Mapping[str, float] = attrs.field(factory=dict)  # of keys that are not to count 1
    key_caps: Mapping[str, int] = attrs.field(factory=dict)  # sequences that a key may have under way
    key_cap: int | None = None  # of the other keys
    key_priorities: Mapping[str, int] = attrs.field(factory=dict)  # of their requests that name none, where it is not 0
    keeps_prefixes: bool = False  # whether sequences share cells, and leave theirs to others
    can_share: bool = False  # what the model's memory can do, see cllm.backend.Capabilities
    can_trim: bool = False
    copies_slots: bool = False  # whether a slot may be copied whole
    can_save: bool = False
    can_save_part: bool = False
    host_pool_n_bytes: int = 0  # of states in the process's memory; 0: none
    cell_n_bytes: float = 1.0  # of a saved cell, as far as it is known before one was saved
    itl_max_s: float | None = None  # time between tokens that so many sequences may run as keep; None: as many as there is room for
    itl_target_s: float | None = None  # how long a step with running answers may take; None: some times as long as without prompts
    apart: bool = False  # each slot has cells of its own: a step is one pass only if the rows' slots ascend without a gap
    n_slots_apart: int | None = None  # where the layout may be changed: slots, if each had cells of its own; None: it stays as it is
    n_cells_slot_apart: int = 0  # and cells of each
    carries_states: bool = False  # whether a whole slot's state fits in either layout
    layout_change_s: float = 0.5  # that it takes, until it was measured
    begins_apart: bool = False  # whether they had when the server last ran

    def __attrs_post_init__(self) -> None:
        assert min(self.n_cells, self.n_slots, self.n_rows_max, self.n_live_max, self.n_waiting_max) >= 1
        assert self.row_budget is None or self.row_budget >= 1
        assert self.n_ctx >= 2
        assert self.n_ctx <= self.n_cells or (self.apart and self.n_slots_apart), "a sequence alone must always fit"


@attrs.frozen(kw_only=True)
class MemoryLimits:
    """What there is to deal out, and what the model's memory can do."""

    n_cells: int
    n_slots: int
    can_share: bool = False  # see cllm.backend.Capabilities
    can_trim: bool = False
    copies_slots: bool = False  # whether a slot may be copied whole; the copy has cells of its own
    apart: bool = False  # whether each slot has a part of the cells to itself

    @property
    def n_cells_slot(self) -> int:
        """Cells of each slot, where it has some of its own."""
        return self.n_cells // self.n_slots

    @property
    def shares_live(self) -> bool:
        """Whether a sequence can have cells of one that still runs."""
        return self.can_share or self.copies_slots

    @property
    def n_copied_least(self) -> int:
        """Tokens from which on a copy between slots pays; 0 where cells are shared and not copied."""
        if self.can_share:
            return 0
        return max(N_COPY_LEAST, -(-self.n_cells_slot // COPY_GAIN)) if self.apart else N_COPY_LEAST


def n_live_max_of(limits: Limits) -> int:
    """Return how many sequences may run at once."""
    return min(limits.n_live_max, limits.n_slots, limits.n_rows_max)


def memory_limits(limits: Limits) -> MemoryLimits:
    """Return what the memory is to be, by what may be dealt out."""
    return MemoryLimits(
        n_cells=limits.n_cells,
        n_slots=limits.n_slots,
        can_share=limits.can_share,
        can_trim=limits.can_trim,
        copies_slots=limits.copies_slots,
        apart=limits.apart,
    )


def offload_of(limits: Limits, prices: Prices) -> Offload | None:
    """Return what is kept on the host; None where nothing is."""
    if not (limits.keeps_prefixes and limits.can_save and limits.host_pool_n_bytes):
        return None
    pool = HostPool(limits.host_pool_n_bytes, can_cut=limits.can_trim)
    n_cells_slot = limits.n_cells // limits.n_slots if limits.apart else limits.n_cells
    return Offload(pool, prices, can_save_part=limits.can_save_part, n_cells_slot=n_cells_slot, cell_n_bytes=limits.cell_n_bytes)
