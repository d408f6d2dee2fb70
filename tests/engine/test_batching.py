"""Whose prompt's rows go first, over many steps; and which rows share a pass where each slot has cells of its own."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from cllm.config import Settings
from cllm.engine.batch.budget import RowBudget
from cllm.engine.batch.plan import Plan, StepOutput
from cllm.engine.cost.curve import DEFAULT_CURVE, Curve
from cllm.engine.cost.model import CostModel
from cllm.engine.events import Finished
from cllm.engine.limits import Limits
from cllm.engine.sequence import Phase, Sequence
from cllm.engine.stepping import StepScheduler
from cllm.errors import StepFailed
from cllm.serve.loading import limits_of
from cllm.testing.fake import FakeModel, FakeVocabulary
from tests.engine.test_machine import make_spec, run_step

N_PROMPT, N_ROWS = 300, 100


def test_a_prompt_of_a_key_with_many_places_goes_on_though_a_key_with_fewer_never_stops_asking() -> None:
    model = FakeModel(n_cells=4000, n_ctx_train=1000, n_slots=8)
    scheduler = StepScheduler(limits_of(model, Settings(row_budget=N_ROWS, prefix_cache=False)), model.vocabulary)

    def submit(key: str) -> int:
        return scheduler.submit(make_spec(tuple(range(32, 32 + 64)) * 5, 0, 1, 0.0, key=key), 0.0)

    for _ in range(3):
        submit("many")
    of_few = {submit("few"), submit("few")}
    ended = set()
    for _ in range(1000):
        for event in run_step(model, scheduler, 0.0) or []:
            if isinstance(event, Finished):
                ended.add(event.seq_id)
                if event.seq_id in of_few:
                    of_few.add(submit("few"))
        if 1 in ended:
            break
    assert 1 in ended


def test_a_prompt_that_gave_its_cells_back_does_not_go_first_for_what_was_computed_meanwhile() -> None:
    model = FakeModel(n_cells=3300, n_ctx_train=3300, n_slots=8)
    scheduler = StepScheduler(limits_of(model, Settings(row_budget=N_ROWS, prefix_cache=False)), model.vocabulary)

    def submit(key: str, n_prompt: int, n_generated: int, priority: int = 0) -> int:
        spec = make_spec(tuple(range(32, 32 + 64)) * (n_prompt // 64), 0, n_generated, 0.0, key=key, priority=priority)
        return scheduler.submit(spec, 0.0)

    def rows_of_next() -> list[int]:
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.apply(plan, StepOutput([40] * len(plan.outputs), [], None, model_s=0.0), 0.0)
        return [sequence.seq_id for sequence, _ in plan.prefilling]

    many = [submit("many", 64, 50) for _ in range(3)]
    for _ in range(10):
        rows_of_next()
    urgent = submit("many", 3264, 1, priority=-1)
    while rows_of_next() == [urgent]:
        pass
    assert scheduler.totals.n_preempted == len(many)
    few = submit("few", 128, 1)
    assert rows_of_next() == [few], "all of the step is its prompt's"


TILED = {1: 14, 2: 28, 4: 46, 8: 83, 12: 103, 15: 127, 16: 107, 32: 169, 64: 282, 128: 560}  # ms; twelve rows cost what sixteen do
DEAR_TO_16 = {1: 2, 16: 32, 64: 64, 128: 128}
N_RUNNING = 16


def apart(rows_ms: Mapping[int, float]) -> CostModel:
    curve = Curve(rows=[(n, ms / 1000) for n, ms in rows_ms.items()], outputs=[(1, 1e-6), (16, 2e-6)], cell_s=0.0, row_cell_s=0.0)
    return CostModel(curve, n_rows_max=512, apart=True)


def step_with_prompts_waiting(cost: CostModel, *, n_decoding: int = 12, n_before: int = 0) -> Plan:
    """The first step in which so many of sixteen generate while long prompts of the others wait, or the one `n_before` steps after it."""
    limits = Limits(
        n_cells=16384, n_slots=N_RUNNING, n_ctx=1024, n_rows_max=512, row_budget=None,
        n_live_max=N_RUNNING, n_waiting_max=100, apart=True,
    )  # fmt: skip
    scheduler = StepScheduler(limits, FakeVocabulary(1000), cost)
    for i in range(N_RUNNING):
        n_prompt = 1 if i < n_decoding else 400
        scheduler.submit(make_spec(tuple(range(32, 32 + n_prompt)), 0, 100, 0.0), 0.0)
    while True:
        plan = scheduler.plan(0.0)
        assert plan is not None
        if len(plan.decoding) == n_decoding and plan.prefilling:
            if not n_before:
                return plan
            n_before -= 1
        assert all(sequence.phase is not Phase.FINISHED for sequence in plan.members())
        scheduler.apply(plan, StepOutput([40] * len(plan.outputs), [], None, model_s=0.0), 0.0)


def test_a_row_of_each_waiting_prompt_fills_the_pass_of_the_decode_rows() -> None:
    plan = step_with_prompts_waiting(apart(TILED))
    assert plan.passes[0] == N_RUNNING
    assert len(plan.passes) == 2, "and more of one prompt is a pass of its own"
    assert sorted(n for _, n in plan.prefilling) == [1, 1, 1, 1 + plan.passes[1]]


def test_rows_that_fill_the_pass_are_the_next_of_their_prompts_and_none_of_them_is_an_output() -> None:
    plan = step_with_prompts_waiting(apart(TILED), n_before=2)
    assert [n for sequence, n in plan.prefilling if sequence.n_computed].count(1) == N_RUNNING - 12 - 1
    batch, n_rows = plan.batch, plan.n_rows
    rows = list(zip(batch.slots[:n_rows], batch.positions[:n_rows], batch.tokens[:n_rows], batch.outputs[:n_rows], strict=True))
    for sequence, n in plan.prefilling:
        positions = range(sequence.n_computed, sequence.n_computed + n)
        own = [(position, token, is_output) for slot, position, token, is_output in rows if slot == sequence.slot]
        assert own == [(position, sequence.tokens[position], 0) for position in positions]
    assert sum(is_output for _, _, _, is_output in rows) == len(plan.decoding)


def test_where_rows_are_dear_in_small_passes_only_the_prompt_that_is_next_has_one_there() -> None:
    plan = step_with_prompts_waiting(apart(DEAR_TO_16))
    assert len(plan.prefilling) == 1, "a row in the pass of the decode rows would cost twice what it does in the prompt's own"


@pytest.mark.parametrize("n_rows_max", [N_RUNNING, 40])
def test_filled_passes_stay_within_what_a_step_may_have(n_rows_max: int) -> None:
    budget = RowBudget(apart(TILED), n_rows_max=n_rows_max, n_rows_fixed=None, itl_target_s=None, apart=True)
    assert budget.n_rows(12, N_RUNNING, 2000, singles=(N_RUNNING,)) <= n_rows_max


def test_the_fewer_generate_of_those_who_could_the_more_rows_of_prompts_follow_since_each_step_makes_their_tokens_dear() -> None:
    budget = RowBudget(apart(TILED), n_rows_max=512, n_rows_fixed=None, itl_target_s=None, apart=True)
    few, many = (budget.n_rows(n, N_RUNNING, 2000, singles=(n + 1,)) - (n + 1) for n in (7, 15))
    assert few > many


def test_a_target_for_the_time_between_tokens_is_kept_apart_too() -> None:
    cost = apart(TILED)
    budget = RowBudget(cost, n_rows_max=512, n_rows_fixed=None, itl_target_s=0.3, apart=True)
    n_rows = budget.n_rows(12, N_RUNNING, 2000, singles=(N_RUNNING,))
    assert n_rows > N_RUNNING
    assert cost.step_s(n_rows, 12, 2000, (N_RUNNING, n_rows - N_RUNNING)) <= 0.3


@pytest.mark.parametrize("n_decoding", [2, 3, 4, 5, 6])
def test_a_prompt_that_has_computed_little_behind_cells_that_it_found_gets_the_rows_of_a_short_one(n_decoding: int) -> None:
    """What makes all steps longer is a prompt that must be computed whole, not one that begins deep."""
    attended = [(16, 16e-6), (64, 25e-6)]
    curve = Curve(rows=[(n, ms / 1000) for n, ms in TILED.items()], outputs=[(1, 1e-6), (16, 2e-6)], attended=attended)
    budget = RowBudget(CostModel(curve, n_rows_max=512), n_rows_max=512, n_rows_fixed=None, itl_target_s=None)

    def n_rows(depth: int, n_shared: int) -> int:
        return budget.n_rows(n_decoding, 8, 2000, n_attended=100 * n_decoding, depth=depth, n_shared=n_shared)

    assert n_rows(12000, 12000) > n_rows(12000, 0)
    assert n_rows(12000, 11000) == n_rows(12000, 0)  # of which it has computed enough itself


# --- while a culprit is looked for -------------------------------------------------------------------------------------

ITL_MAX_S = 0.25


def on_trial(*, apart: bool) -> tuple[StepScheduler, Sequence]:
    """Four answers and a prompt of 3,000 tokens, whose step has failed once; that prompt is the last to be tried."""
    limits = Limits(
        n_cells=80_000, n_slots=8, n_ctx=10_000, n_rows_max=512, row_budget=None,
        n_live_max=8, n_waiting_max=8, itl_max_s=ITL_MAX_S, apart=apart,
    )  # fmt: skip
    scheduler = StepScheduler(limits, FakeVocabulary(1000), CostModel(DEFAULT_CURVE, n_rows_max=512, apart=apart))
    for i in range(4):
        scheduler.submit(make_spec(tuple(range(32 + i, 52 + i)), 0, 5000, 0.0), 0.0)
    while not all(sequence.phase is Phase.DECODE for sequence in scheduler._sequences.values()):
        do_step(scheduler)
    prompt = submit_long(scheduler, 3000)
    do_step(scheduler)
    failed = scheduler.plan(0.0)
    assert failed is not None
    assert len(failed.members()) == 5
    scheduler.apply_failure(failed, StepFailed("for once"), 0.0)
    return scheduler, prompt


def submit_long(scheduler: StepScheduler, n_prompt: int) -> Sequence:
    return scheduler._sequences[scheduler.submit(make_spec(tuple(32 + i % 64 for i in range(n_prompt)), 0, 5, 0.0), 0.0)]


def do_step(scheduler: StepScheduler) -> Plan:
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.apply(plan, StepOutput([40] * len(plan.outputs), [], None, model_s=plan.expected_s), 0.0)
    return plan


@pytest.mark.parametrize("apart", [False, True])
def test_answers_do_not_wait_longer_for_a_long_prompt_that_is_on_trial_than_for_any_other(apart: bool) -> None:
    scheduler, prompt = on_trial(apart=apart)
    waited_s, n_turns = 0.0, 0
    while prompt.phase is not Phase.DECODE:
        has_answers = any(sequence.phase is Phase.DECODE for sequence in scheduler._running)
        plan = do_step(scheduler)
        waited_s = 0.0 if plan.decoding or not has_answers else waited_s + plan.expected_s
        n_turns += bool(waited_s)
        assert waited_s <= ITL_MAX_S
    assert n_turns > 100, "by turns with them, to its end"
    do_step(scheduler)
    assert not scheduler._trials
    assert len(scheduler._sequences) == 5


def test_a_deep_prompt_that_nobody_suspects_goes_on_beside_one_that_is_on_trial() -> None:
    """Each of the latter's steps is followed by one of theirs, which is not the answers' every time."""
    scheduler, prompt = on_trial(apart=False)
    while prompt.n_computed < 1000:
        do_step(scheduler)
    other = submit_long(scheduler, 1500)
    while other.phase is not Phase.DECODE:
        do_step(scheduler)
    assert prompt.phase is Phase.PREFILL
