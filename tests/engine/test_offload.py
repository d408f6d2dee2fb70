"""What moves to the host and back: only where that is cheaper than computing, and what nobody comes back for is not carried for ever."""

from __future__ import annotations

import attrs
import pytest

from cllm.backend import KvLayout
from cllm.config import Settings
from cllm.engine.batch.compute import compute
from cllm.engine.batch.plan import Restore, Save, Share
from cllm.engine.memory.hostpool import Piece
from cllm.engine.memory.offload import Offload
from cllm.engine.memory.prices import MOVE_S, Prices
from cllm.engine.memory.statesize import StateSize
from cllm.engine.stepping import StepScheduler
from cllm.errors import Aborted, ModelDied, NoRoom
from cllm.serve.loading import limits_of
from cllm.testing.fake import FakeModel
from tests.clock import tick
from tests.engine.test_machine import make_spec, run_step

KEY = ("", "")


@attrs.define
class Costs:
    """Seconds for each cell or row."""

    prefill: float = 1e-3
    carry: float = 0.0
    save: float | None = 1e-5
    restore: float | None = 1e-5
    save_fixed: float = 0.0  # of every state
    restore_fixed: float = 0.0

    def prefill_s(self, n_rows: int, n_cells: int = 0) -> float:
        return self.prefill * n_rows

    def carry_s(self, n_cells: int, n_rows: int) -> float:
        return self.carry * n_cells

    def save_s(self, n_cells: int) -> float | None:
        return None if self.save is None else self.save_fixed + self.save * n_cells

    def restore_s(self, n_cells: int) -> float | None:
        return None if self.restore is None else self.restore_fixed + self.restore * n_cells


def make(costs: Costs, n_cells: int = 300) -> tuple[FakeModel, StepScheduler, Offload]:
    model = FakeModel(n_cells=n_cells, n_ctx_train=n_cells)
    scheduler = StepScheduler(limits_of(model, Settings()), model.vocabulary)
    assert scheduler.memory.offload is not None
    scheduler.memory.offload.prices = Prices(costs)
    return model, scheduler, scheduler.memory.offload


def answer(model: FakeModel, scheduler: StepScheduler, prompt: str, n_tokens: int = 2) -> None:
    scheduler.submit(make_spec(tuple(prompt.encode()), 0, n_tokens, 0.0), 0.0)
    while run_step(model, scheduler, 0.0) is not None:
        pass
    scheduler.check()


def test_what_is_computed_as_fast_as_it_is_moved_is_not_saved() -> None:
    model, scheduler, offload = make(Costs(prefill=1e-5))
    answer(model, scheduler, "a" * 200)
    answer(model, scheduler, "b" * 200)
    assert offload.pool.totals.n_saves == 0


def test_what_is_slow_to_compute_is_saved_and_restored() -> None:
    model, scheduler, offload = make(Costs())
    for letter in "aba":
        answer(model, scheduler, letter * 200)
    assert (offload.pool.totals.n_saves, offload.pool.totals.n_restores) == (2, 1)


@pytest.mark.parametrize(("error", "stays"), [(MemoryError(), True), (NoRoom("no cells"), True), (ValueError("another model's"), False)])
def test_a_state_stays_where_its_restore_failed_for_want_of_memory_and_goes_where_the_model_refused_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception, *, stays: bool
) -> None:
    model, scheduler, offload = make(Costs())
    answer(model, scheduler, "a" * 200)
    answer(model, scheduler, "b" * 200)
    offload.pool.keep_evicted()
    before = {id(piece) for piece in offload.pool.pieces()}

    def restore(_slot: int, _state: bytes) -> None:
        raise error

    monkeypatch.setattr(model, "restore", restore)
    answer(model, scheduler, "a" * 200)  # it is answered, whatever came of that
    assert offload.pool.totals.n_restores == 0
    assert (before <= {id(piece) for piece in offload.pool.pieces()}) is stays
    assert len(offload.pool.take_refused()) == (not stays)


@pytest.mark.parametrize("beside", [False, True])
def test_a_state_whose_restore_the_model_died_of_leaves_the_disk_where_no_row_can_be_why(*, beside: bool) -> None:
    model, scheduler, offload = make(Costs())
    for letter in "ab":
        answer(model, scheduler, letter * 200)
    offload.pool.keep_evicted()
    if beside:
        scheduler.submit(make_spec(tuple(b"c" * 20), 0, 50, 0.0), 0.0)
        run_step(model, scheduler, 0.0)
    scheduler.submit(make_spec(tuple(b"a" * 200), 0, 2, 0.0), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    while not any(isinstance(move, Restore) for move in plan.moves):
        scheduler.apply(plan, compute(model, plan, tick), 0.0)
        plan = scheduler.plan(0.0)
        assert plan is not None
    assert bool(plan.n_rows) is beside
    scheduler.apply_death(plan, ModelDied("killed"), 0.0)
    assert len(offload.pool.take_refused()) == (not beside)
    assert all(piece.tokens[0] != ord("a") for piece in offload.pool.pieces())  # or it would be restored again at once


@pytest.mark.parametrize("has_fixed_part", [False, True])
@pytest.mark.parametrize(("n_more", "letters"), [(0, "ij"), (2, "ghij")])
def test_one_step_saves_no_more_than_the_pool_can_hold_and_of_that_what_was_of_use_last(
    n_more: int, letters: str, *, has_fixed_part: bool
) -> None:
    """All that it saves is in memory at once; where evicted pieces go on to the disk, there is room for some of these, too."""
    model, scheduler, offload = make(Costs(), n_cells=2000)
    for letter in "abcdefghij":
        answer(model, scheduler, letter * 150)
    n_bytes, n_cells = len(model.save(0, 0)), 151
    offload._size = StateSize(n_bytes / n_cells)
    if has_fixed_part:  # as of a recurrent model's states, most of which is not its cells
        offload._size.saw(n_cells, n_bytes)
        offload._size.saw(3 * n_cells, n_bytes + 2 * n_cells)
    offload.pool.n_bytes_max = offload.pool.n_bytes_at_once = int(2.5 * n_bytes)
    if n_more:
        offload.pool.keep_evicted(n_more * n_bytes)
    scheduler.submit(make_spec(tuple(b"z" * 1900), 0, 2, 0.0), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert [chr(move.tokens[0]) for move in plan.moves if isinstance(move, Save)] == list(letters)
    scheduler.apply(plan, compute(model, plan, tick), 0.0)
    scheduler.check()
    while run_step(model, scheduler, 0.0) is not None:
        pass
    scheduler.check()


def test_of_states_that_are_saved_whole_one_is_saved_before_it_is_known_what_they_take() -> None:
    model, scheduler, offload = make(Costs(), n_cells=2000)
    offload.can_save_part = offload.pool.takes_parts = False
    for letter in "abcdefghij":
        answer(model, scheduler, letter * 150)
    scheduler.submit(make_spec(tuple(b"z" * 1900), 0, 2, 0.0), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert [chr(move.tokens[0]) for move in plan.moves if isinstance(move, Save)] == ["j"]


def test_what_became_fast_to_compute_is_not_restored() -> None:
    model, scheduler, offload = make(Costs())
    answer(model, scheduler, "a" * 200)
    answer(model, scheduler, "b" * 200)
    offload.prices = Prices(Costs(prefill=1e-7))
    answer(model, scheduler, "a" * 200)
    assert offload.pool.totals.n_restores == 0


def test_a_branch_goes_to_the_host_when_carrying_it_has_cost_a_fifth_of_moving_it() -> None:
    model, scheduler, offload = make(Costs(carry=2e-6), n_cells=1000)
    answer(model, scheduler, "a" * 200)
    answer(model, scheduler, "b" * 100, n_tokens=1)  # one step: 2e-6 s for each cell, and moving one costs 2e-5 and a little
    assert offload.pool.totals.n_saves == 0
    answer(model, scheduler, "c" * 100, n_tokens=4)
    assert offload.pool.totals.n_saves >= 1
    assert scheduler.memory.totals.n_retired_slots >= 1
    answer(model, scheduler, "a" * 200)
    assert offload.pool.totals.n_restores == 1


@pytest.mark.parametrize(("is_generating", "n_saved"), [(True, 1), (False, 3)])
def test_who_generates_waits_for_one_slow_save_in_a_step_and_where_nobody_does_all_that_go_are_saved(
    is_generating: bool, n_saved: int
) -> None:
    _, _, offload = make(Costs(prefill=1.0, save=0.01))
    offload.is_generating = is_generating
    saves = [offload.save_of(slot, KEY, [slot] * 9, 9) for slot in range(3)]  # 0.09 s each
    assert len([save for save in saves if save is not None]) == n_saved


def test_the_scheduler_says_whether_somebody_generates() -> None:
    model, scheduler, offload = make(Costs())
    scheduler.submit(make_spec(tuple(b"abc"), 0, 3, 0.0), 0.0)
    run_step(model, scheduler, 0.0)
    assert not offload.is_generating
    run_step(model, scheduler, 0.0)
    assert offload.is_generating


def test_cells_that_cost_nothing_to_carry_stay() -> None:
    model, scheduler, offload = make(Costs(carry=0.0), n_cells=1000)
    answer(model, scheduler, "a" * 200)
    answer(model, scheduler, "b" * 100, n_tokens=50)
    assert offload.pool.totals.n_saves == 0
    assert scheduler.cells.n_cached >= 300


def test_memory_that_cannot_be_cut_is_saved_at_the_end_of_the_prompt_for_another_answer_to_follow() -> None:
    model = FakeModel(can_trim=False)
    scheduler = StepScheduler(limits_of(model, Settings()), model.vocabulary)
    offload = scheduler.memory.offload
    assert offload is not None
    offload.prices = Prices(Costs())
    answer(model, scheduler, "a" * 200, n_tokens=5)
    assert offload.pool.totals.n_saves == 1
    answer(model, scheduler, "a" * 200 + "not what was answered")
    assert offload.pool.totals.n_restores == 1
    assert scheduler.memory.totals.n_tokens_saved == 200


def test_memory_that_can_be_cut_is_not_saved_before_it_must_go() -> None:
    model, scheduler, offload = make(Costs(), n_cells=1000)
    answer(model, scheduler, "a" * 200, n_tokens=5)
    assert offload.pool.totals.n_saves == 0


def test_what_a_preempted_sequence_left_is_saved_though_nothing_else_is_ever_asked_for_again() -> None:
    model, scheduler, offload = make(Costs())
    for _ in range(400):
        offload.prices.demand.left(("", ""), [])
    scheduler.submit(make_spec(tuple(b"a" * 200), 0, 60, 0.0, priority=1), 0.0)
    for _ in range(5):
        run_step(model, scheduler, 0.0)
    answer(model, scheduler, "b" * 200)
    assert scheduler.totals.n_preempted == 1
    assert scheduler.memory.totals.n_tokens_saved > 0
    assert scheduler.memory.totals.n_prompt_tokens_saved == 0, "who comes back has come before"
    assert (offload.pool.totals.n_saves, offload.pool.totals.n_restores) == (1, 1)  # nothing was saved of the other one
    assert scheduler.totals.n_prefill_rows == 400, "the last token that was drawn had no cell yet, but its row is no prompt's"


@pytest.mark.parametrize(("restore", "n_restores"), [(1e-5, 1), (5e-4, 0)])
def test_what_a_preempted_sequence_left_is_saved_where_another_goes_on_from_its_beginning_in_its_slot(
    restore: float, n_restores: int
) -> None:
    """Slots with cells of their own are saved whole, for which the end that would be lost has to be long enough."""
    model = FakeModel(n_cells=2000, n_slots=2, kv_layout=KvLayout.STREAMS)
    scheduler = StepScheduler(limits_of(model, Settings(parallel=2)), model.vocabulary)
    offload = scheduler.memory.offload
    assert offload is not None
    offload.prices = Prices(Costs(restore=restore))
    scheduler.submit(make_spec(tuple(b"z" * 50), 0, 200, 0.0, priority=1), 0.0)
    scheduler.submit(make_spec(tuple(b"a" * 300 + b"b" * 200), 0, 60, 0.0, priority=1), 0.0)
    while scheduler.totals.n_prefill_rows < 550:
        run_step(model, scheduler, 0.0)
    answer(model, scheduler, "a" * 300 + "c" * 20)
    assert scheduler.totals.n_preempted == 1
    assert offload.pool.totals.n_restores == n_restores
    assert (offload.pool.totals.n_saves > 0) == (n_restores > 0)
    assert scheduler.totals.n_prefill_rows == 50 + 500 + 20 + (0 if n_restores else 200)


def test_of_a_question_about_what_all_have_in_common_nothing_is_saved_for_the_next_one() -> None:
    """All of a slot would be, for an end that nobody waits for: each time as many cells as the document has."""
    model = FakeModel(n_cells=4000, n_slots=2, kv_layout=KvLayout.STREAMS)
    scheduler = StepScheduler(limits_of(model, Settings(parallel=2)), model.vocabulary)
    offload = scheduler.memory.offload
    assert offload is not None
    offload.prices = Prices(Costs(prefill=3.5e-3, save=1.5e-5, restore=1.5e-5))
    for i in range(8):
        answer(model, scheduler, "a" * 1200 + chr(98 + i) * 20, n_tokens=60)
    assert scheduler.totals.n_prefill_rows < 1220 + 7 * 40, "the document was computed once"
    assert offload.pool.totals.n_saves == 0


def test_choices_of_one_request_have_asked_for_what_was_left_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, scheduler, offload = make(Costs())
    asked: list[int] = []
    monkeypatch.setattr(offload.prices.demand, "came", lambda _, tokens: asked.append(len(tokens)))
    for spec in [make_spec(tuple(b"a" * 200), 0, 2, 0.0)] * 4:
        scheduler.submit(spec, 0.0)
    scheduler.submit(make_spec(tuple(b"a" * 100), 0, 2, 0.0), 0.0)
    assert asked == [200, 100]


def test_who_waits_for_a_place_has_asked_for_what_was_left() -> None:
    model, scheduler, offload = make(Costs())
    answer(model, scheduler, "a" * 200)
    before = offload.prices.demand.share
    scheduler.submit(make_spec(tuple(b"a" * 200 + b"b"), 0, 2, 0.0), 0.0)
    assert offload.prices.demand.share > before


def make_small(n_slots: int, **settings: int) -> tuple[FakeModel, StepScheduler]:
    model = FakeModel(n_cells=2000, n_ctx_train=1000, n_slots=n_slots)
    return model, StepScheduler(limits_of(model, Settings(**settings)), model.vocabulary)


def test_one_that_goes_on_from_its_prompt_loses_its_answer_rather_than_another_branch() -> None:
    model, scheduler = make_small(2, host_cache_mb=0)
    for prompt in ("a" * 200, "b" * 200, "a" * 200 + "more", "b" * 200 + "more"):
        answer(model, scheduler, prompt, n_tokens=30)
    assert scheduler.memory.totals.n_tokens_saved == 400
    assert scheduler.memory.totals.n_evicted_slots == 0


def test_the_answer_that_it_loses_is_on_the_host_for_whoever_goes_on_from_that() -> None:
    model, scheduler = make_small(2)
    scheduler.submit(make_spec(tuple(b"a" * 200), 0, 60, 0.0), 0.0)
    while run_step(model, scheduler, 0.0) is not None:
        pass
    (tip,) = [scheduler.memory.tree.tokens_of(slot) for slot in range(2) if slot in scheduler.memory.tree]
    for prompt in ("b" * 200, "a" * 200 + "more"):
        answer(model, scheduler, prompt, n_tokens=30)
    assert scheduler.memory.offload is not None
    assert scheduler.memory.offload.pool.covers(("", ""), tip, 200)


def test_what_one_that_waits_goes_on_from_is_kept_before_what_was_used_since() -> None:
    model, scheduler = make_small(2, parallel=1, host_cache_mb=0)
    answer(model, scheduler, "a" * 200)
    answer(model, scheduler, "b" * 200)
    scheduler.submit(make_spec(tuple(b"c" * 200), 0, 2, 0.0), 0.0)
    answer(model, scheduler, "a" * 200 + "more")  # the one with `c` goes first, and takes a slot
    assert scheduler.memory.totals.n_tokens_saved == 200


def test_of_those_who_wait_the_one_who_comes_last_loses_what_it_would_go_on_from() -> None:
    model, scheduler = make_small(2, parallel=1, host_cache_mb=0)
    answer(model, scheduler, "a" * 200)
    answer(model, scheduler, "b" * 100)
    for prompt in (b"c" * 200, b"a" * 200 + b"more"):
        scheduler.submit(make_spec(tuple(prompt), 0, 2, 0.0), 0.0)
    answer(model, scheduler, "b" * 100 + "more")
    assert scheduler.memory.totals.n_tokens_saved == 200


def test_one_who_goes_on_does_not_take_the_end_that_another_waits_for() -> None:
    model, scheduler = make_small(2, parallel=1, host_cache_mb=0)
    first = "a" * 200
    answer(model, scheduler, first + "b" * 100)
    answer(model, scheduler, "c" * 200)
    waiting = make_spec(tuple((first + "b" * 100 + "more").encode()), 0, 2, 0.0)
    scheduler.submit(make_spec(tuple((first + "else").encode()), 0, 2, 0.0), 0.0)
    scheduler.submit(waiting, 0.0)
    while run_step(model, scheduler, 0.0) is not None:
        pass
    scheduler.check()
    assert scheduler.memory.totals.n_tokens_saved == 200 + 300


def test_what_one_that_waits_goes_on_from_stays_on_the_host_before_what_went_there_since() -> None:
    model, scheduler, offload = make(Costs())
    answer(model, scheduler, "a" * 200)
    answer(model, scheduler, "b" * 200)
    (one,) = offload.pool.pieces()
    offload.pool.n_bytes_max = one.n_bytes
    waiting = "a" * 200 + "more"
    scheduler.submit(make_spec(tuple(b"c" * 200), 0, 2, 0.0), 0.0)  # goes first; the states of `b` and of itself have to leave after it
    answer(model, scheduler, waiting)
    assert offload.pool.totals.n_evictions
    assert scheduler.memory.totals.n_tokens_saved == 200
    answer(model, scheduler, "d" * 200)
    assert one not in offload.pool, "nobody waits for it any longer"


def test_two_may_wait_for_the_same_and_one_may_leave() -> None:
    model, scheduler = make_small(2, parallel=1, host_cache_mb=0)
    answer(model, scheduler, "a" * 200)
    answer(model, scheduler, "b" * 200)
    scheduler.submit(make_spec(tuple(b"c" * 200), 0, 2, 0.0), 0.0)
    one, _ = [scheduler.submit(make_spec(tuple(b"a" * 200 + b"more"), 0, 2, 0.0), 0.0) for _ in range(2)]
    scheduler.cancel(one)
    while run_step(model, scheduler, 0.0) is not None:
        pass
    scheduler.check()
    assert scheduler.memory.totals.n_tokens_saved == 200


def test_a_step_that_is_told_to_end_before_its_moves_costs_no_reuse() -> None:
    model, scheduler = make_small(2, host_cache_mb=0)
    answer(model, scheduler, "a" * 200, n_tokens=30)
    answer(model, scheduler, "b" * 230)
    scheduler.submit(make_spec(tuple(b"a" * 200 + b"more"), 0, 2, 0.0), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert plan.moves
    scheduler.apply_failure(plan, Aborted("aborted"), 0.0)
    while run_step(model, scheduler, 0.0) is not None:
        pass
    scheduler.check()
    assert scheduler.totals.n_prefill_rows == 200 + 230 + len("more")


def test_a_preempted_one_waits_for_its_beginning_also_where_another_has_all_its_cells() -> None:
    model, scheduler, offload = make(Costs(), n_cells=2000)
    for _ in range(2):
        scheduler.submit(make_spec(tuple(b"a" * 200), 0, 20, 0.0), 0.0)
    while (plan := scheduler.plan(0.0)) is not None and scheduler.n_running < 2:
        scheduler.apply(plan, compute(model, plan, lambda: 0.0), 0.0)
    assert plan is not None
    assert len(plan.moves) == 1, "the second one shares what the first one has"
    plan.n_moves_done = 1
    scheduler.apply_failure(plan, Aborted("aborted"), 0.0)
    assert len(list(offload.pool.texts_awaited())) == 2
    scheduler.check()


def test_what_nobody_waits_for_any_more_is_like_everybodys() -> None:
    model, scheduler = make_small(2, parallel=1, host_cache_mb=0)
    answer(model, scheduler, "a" * 200)
    answer(model, scheduler, "b" * 200)
    scheduler.submit(make_spec(tuple(b"c" * 200), 0, 2, 0.0), 0.0)
    waiting = scheduler.submit(make_spec(tuple(b"a" * 200 + b"more"), 0, 2, 0.0), 0.0)
    scheduler.cancel(waiting)
    answer(model, scheduler, "b" * 200 + "more")
    assert scheduler.memory.totals.n_tokens_saved == 200


@pytest.mark.parametrize(("start", "end"), [(0, 100), (50, 50)])
def test_a_part_is_not_kept_where_only_whole_slots_are_restored_but_what_is_before_it_is(start: int, end: int) -> None:
    model = FakeModel(n_cells=300, n_slots=3, kv_layout=KvLayout.STREAMS)
    scheduler = StepScheduler(limits_of(model, Settings()), model.vocabulary)
    offload = scheduler.memory.offload
    assert offload is not None
    offload.prices = Prices(Costs())
    tokens = list(range(100))
    pieces = [Piece(KEY, tokens[:start], 0, b"whole"), Piece(KEY, tokens, start, b"perhaps a part")]
    for piece in pieces:
        if piece.n_cells:
            offload.pool.put(piece)
    chain = offload.chain_for(KEY, tokens, 0)
    assert chain is not None
    assert (chain.start, chain.end) == (0, end)


def test_a_state_that_is_longer_than_a_slot_is_not_restored_there() -> None:
    model = FakeModel(n_cells=300, n_slots=3, kv_layout=KvLayout.STREAMS)
    offload = StepScheduler(limits_of(model, Settings()), model.vocabulary).memory.offload
    assert offload is not None
    offload.prices = Prices(Costs())
    tokens = list(range(150))
    offload.pool.put(Piece(KEY, tokens[:101], 0, b"too long"))
    assert offload.chain_for(KEY, tokens[:80], 0) is None
    offload.pool.put(Piece(KEY, [*tokens[:60], 7], 0, b"fits"))
    assert offload.chain_for(KEY, [*tokens[:60], 7, 8], 0) is not None


def test_what_the_host_has_no_room_for_is_computed_again_after_a_change_of_layout() -> None:
    _, scheduler, offload = make(Costs(prefill=1e-3, save=1e-5, restore=1e-5))
    assert scheduler.memory.carry_s(0) == 0
    carried_s = scheduler.memory.carry_s(100)
    assert carried_s == pytest.approx(100 * 2e-5 + 2 * MOVE_S)
    offload.pool.n_bytes_max = 40
    offload._cell_n_bytes = 1.0
    assert scheduler.memory.carry_s(100) == pytest.approx(40 * 2e-5 + 2 * MOVE_S + 60 * 1e-3)


def test_a_slot_that_is_to_be_there_in_one_piece_replaces_the_parts_that_it_was_kept_in() -> None:
    _, _, offload = make(Costs())
    tokens = list(range(100))
    parts = [Piece(KEY, tokens[:60], 0, b"whole"), Piece(KEY, tokens, 60, b"part")]
    for piece in parts:
        offload.pool.put(piece)
    assert offload.save_of(0, KEY, tokens, 100, is_awaited=True) is None, "it is there"
    assert offload.save_of(0, KEY, tokens, 100, is_awaited=True, whole=True) is not None
    one = Piece(KEY, tokens, 0, b"in one")
    offload.pool.put(one)
    assert offload.pool.pieces() == [one]
    assert offload.save_of(1, KEY, tokens, 100, is_awaited=True, whole=True) is None


def test_what_was_learned_of_moves_is_known_in_the_new_layout_too() -> None:
    old, new = Prices(Costs(save=1e-5)), Prices(Costs(save=2e-5))
    old.saved(100, 100 * 5e-5)
    new.succeed(old)
    assert new.save_s(100) == old.save_s(100)
    assert new.demand is old.demand


def test_a_host_pool_of_no_size_is_none() -> None:
    model = FakeModel()
    assert StepScheduler(limits_of(model, Settings(host_cache_mb=0)), model.vocabulary).memory.offload is None
    assert StepScheduler(limits_of(model, Settings(prefix_cache=False)), model.vocabulary).memory.offload is None


# --- prices -----------------------------------------------------------------------------------------------------------


def test_the_first_moves_set_the_price_and_later_ones_correct_it() -> None:
    prices = Prices(Costs(save=None, restore=None))
    prices.saved(100, 1.0)
    assert prices.save_s(100) == pytest.approx(1.0 + MOVE_S)
    prices.saved(100, 2.0)
    assert 1.0 < prices.save_s(100) < 2.0
    prices.restored(100, 3.0)
    assert prices.restore_s(100) == pytest.approx(3.0 + MOVE_S)


def test_a_move_of_few_cells_says_nothing_about_the_price_of_one() -> None:
    prices = Prices(Costs(save=None))
    before = prices.save_s(1000)
    prices.saved(1, 1.0)
    assert prices.save_s(1000) == before


def test_what_every_state_has_does_not_make_long_ones_dear() -> None:
    """A recurrent state, say: 10 ms to save and 8 to restore, whatever its length, where a row is computed in 0.2 ms."""
    prices = Prices(Costs(prefill=2e-4, save=1e-6, restore=1e-6, save_fixed=0.010, restore_fixed=0.008))
    assert prices.is_worth_saving(4000)
    assert not prices.is_worth_saving(64)


def test_what_a_move_took_corrects_both_parts_of_its_price() -> None:
    prices = Prices(Costs(save=1e-5, save_fixed=0.01))
    for _ in range(100):
        prices.saved(1000, 0.04)  # twice as long as was measured
    assert prices.save_s(1000) == pytest.approx(0.04 + MOVE_S)
    assert prices.save_s(0) == pytest.approx(0.02 + MOVE_S)


def test_a_price_of_saving_that_nobody_pays_falls_until_it_is_tried_and_corrected() -> None:
    prices = Prices(Costs(prefill=1e-3, save=3e-3))  # measured while something else had the machine
    n_refused = next(n for n in range(400) if prices.is_worth_saving(100, is_awaited=True))
    assert n_refused > 20
    prices.saved(100, 100 * 3e-3)  # it was right
    assert not prices.is_worth_saving(100, is_awaited=True)


def test_a_price_that_keeps_only_what_is_seldom_asked_for_from_being_saved_stands() -> None:
    prices = Prices(Costs(prefill=1e-3, save=5e-4))
    assert not any(prices.is_worth_saving(100) for _ in range(400))
    assert prices.is_worth_saving(100, is_awaited=True)


def test_a_restore_that_something_held_up_does_not_end_restoring_for_good() -> None:
    prices = Prices(Costs(prefill=2e-4))
    prices.restored(100, 0.2)
    assert not prices.is_worth_restoring(200, 200)
    assert not prices.is_worth_saving(200)
    n_refused = next(n for n in range(400) if prices.is_worth_saving(200, is_awaited=True))
    assert n_refused > 5
    assert prices.is_worth_restoring(200, 200)


def test_saving_must_pay_though_few_branches_are_asked_for_again() -> None:
    assert Prices(Costs(prefill=1e-3)).is_worth_saving(100)
    assert not Prices(Costs(prefill=3e-5)).is_worth_saving(100)
    assert Prices(Costs(prefill=3e-5)).is_worth_restoring(100, 100)


def test_of_what_nobody_holds_as_much_is_asked_for_as_usually_is_and_of_the_hosts_no_more_than_would_fit_here() -> None:
    model, scheduler, offload = make(Costs())
    assert scheduler.memory.n_asked_for == 0.0
    for letter in "abcdef":
        answer(model, scheduler, letter * 200)
    assert offload.pool.n_cells > 300, "more than there are cells"
    cached = scheduler.cells.n_cached
    assert cached > 0
    assert scheduler.memory.n_asked_for == pytest.approx(offload.prices.demand.share * (cached + 300))
    offload.pool.clear()
    assert scheduler.memory.n_asked_for == pytest.approx(offload.prices.demand.share * cached)


def test_shared_is_what_somebody_has_who_runs() -> None:
    model, scheduler, _ = make(Costs(), n_cells=1000)
    prompts = [tuple(("a" * 100 + letter * 20).encode()) for letter in "bcd"]
    running = scheduler.submit(make_spec(prompts[0], 0, 50, 0.0), 0.0)
    for _ in range(3):  # its prompt is computed
        run_step(model, scheduler, 0.0)
    came = [scheduler._maker.make(make_spec(prompt, 0, 2, 0.0), 99, 0.0, scheduler.limits) for prompt in prompts]
    assert [scheduler.memory.n_shared(one) for one in came] == [119, 100, 100]
    scheduler.cancel(running)
    run_step(model, scheduler, 0.0)
    assert [scheduler.memory.n_shared(one) for one in came] == [0, 0, 0]
    assert [scheduler.memory.n_known(one) for one in came] == [119, 100, 100]


@pytest.mark.parametrize("is_generating", [False, True])
def test_who_generates_waits_for_few_who_come_back_at_once(*, is_generating: bool) -> None:
    model, scheduler, _ = make(Costs(restore=2e-4), n_cells=4000)
    letters = "abcdefgh"
    for letter in letters:
        answer(model, scheduler, letter * 300)
    while (plan := scheduler.plan_retirement()) is not None:
        scheduler.apply(plan, compute(model, plan, tick), 0.0)
    if is_generating:
        scheduler.submit(make_spec((33,) * 20, 0, 300, 0.0), 0.0)
        for _ in range(3):
            run_step(model, scheduler, 0.0)
    for letter in letters:
        scheduler.submit(make_spec(tuple((letter * 300 + "!").encode()), 0, 2, 0.0), 0.0)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert len(plan.decoding) == is_generating
    n_restores = sum(isinstance(move, Restore) for move in plan.moves)
    assert n_restores == (2 if is_generating else 8), "0.06 s each, and beside answers no more once they take 0.1"
    scheduler.apply(plan, compute(model, plan, tick), 0.0)
    while run_step(model, scheduler, 0.0) is not None:
        pass
    assert scheduler.memory.offload is not None
    assert scheduler.memory.offload.pool.totals.n_restores == 8


def test_who_generates_waits_for_few_copies_at_once() -> None:
    model = FakeModel(n_cells=8000, n_ctx_train=1000, kv_layout=KvLayout.STREAMS, n_slots=8)
    scheduler = StepScheduler(limits_of(model, Settings(parallel=8)), model.vocabulary)
    assert scheduler.memory.offload is not None
    scheduler.memory.offload.prices = Prices(Costs(save=1e-4, restore=1e-4))
    prompt = tuple(b"a" * 300)
    for i in range(8):
        scheduler.submit(make_spec(prompt, i, 50, 0.0), 0.0)
    n_copies = []
    while (plan := scheduler.plan(0.0)) is not None and scheduler.n_sequences == 8:
        n_copies.append(sum(isinstance(move, Share) for move in plan.moves))
        assert n_copies[-1] <= 2, "0.06 s each"
        scheduler.apply(plan, compute(model, plan, tick), 0.0)
    assert sum(n_copies) == 7
