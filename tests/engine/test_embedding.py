"""Inputs become vectors in steps of bounded size, the same vectors however they are cut and whatever else is there."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.backend import Batch, Pooling, Vectors
from cllm.engine.embedding.pace import N_ROWS_FIRST, N_ROWS_LEAST, Pace
from cllm.engine.embedding.scheduler import EmbedScheduler, InputTooLong, Job, compute
from cllm.engine.waiting.fairness import Accounts
from cllm.errors import GenerationFailed, InvalidRequest, ModelDied, StepFailed, Unavailable
from cllm.testing.fake_embedder import FakeEmbedder

ALL_POOLINGS = list(Pooling)


def test_an_embedder_whose_slots_cannot_be_emptied_is_dead_and_never_computes_behind_old_cells() -> None:
    class Stuck(FakeEmbedder):
        def drop(self, slot: int) -> None:
            raise RuntimeError("stuck")

    embedder = Stuck()
    scheduler = EmbedScheduler(embedder)
    scheduler.submit([[97, 98]])
    run(scheduler, embedder)
    scheduler.submit([[97, 99]])
    with pytest.raises(ModelDied, match=r"^slot \d+ could not be emptied: RuntimeError: stuck$"):
        run(scheduler, embedder)


def run(scheduler: EmbedScheduler, embedder: FakeEmbedder, n_rows: int = 512) -> list[Job]:
    """Step until nothing is left; return the jobs in the order of their ends."""
    over: list[Job] = []
    while (plan := scheduler.plan(n_rows)) is not None:
        try:
            over += scheduler.apply(plan, compute(embedder, plan))
        except StepFailed as error:
            over += scheduler.apply_failure(plan, error)
    return over


def alone(tokens: Sequence[int], pooling: Pooling) -> Vectors:
    embedder = FakeEmbedder(pooling=pooling)
    scheduler = EmbedScheduler(embedder)
    job = scheduler.submit([tokens])
    run(scheduler, embedder)
    return job.vectors[0]


@pytest.mark.parametrize("pooling", ALL_POOLINGS)
def test_a_vector_is_pooled_from_its_rows_as_the_model_says(pooling: Pooling) -> None:
    embedder, batch = FakeEmbedder(pooling=pooling), Batch(3)
    batch.n_rows = 3
    batch.tokens[:], batch.positions[:] = [97, 98, 99], [0, 1, 2]
    rows = embedder.step(batch)
    expected = {Pooling.MEAN: rows.mean(axis=0), Pooling.CLS: rows[0], Pooling.LAST: rows[2], Pooling.RANK: rows[2]}
    assert alone([97, 98, 99], pooling) == pytest.approx(expected[pooling])


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(ALL_POOLINGS),
    st.booleans(),
    st.lists(st.lists(st.lists(st.integers(0, 200), min_size=1, max_size=40), min_size=1, max_size=6), min_size=1, max_size=4),
    st.integers(1, 70),
    st.integers(1, 5),
)
def test_an_input_has_the_same_vector_alone_and_in_any_company(
    pooling: Pooling, can_split: bool, requests: list[list[list[int]]], n_rows: int, n_slots: int
) -> None:
    embedder = FakeEmbedder(pooling=pooling, can_split=can_split, n_slots=n_slots, n_cells=90, n_tokens_max=40)
    scheduler = EmbedScheduler(embedder)
    jobs = [scheduler.submit(inputs) for inputs in requests]
    over = run(scheduler, embedder, n_rows)
    assert set(over) == set(jobs)
    for job, inputs in zip(jobs, requests, strict=True):
        assert job.error is None
        for vector, tokens in zip(job.vectors, inputs, strict=True):
            assert vector == pytest.approx(alone(tokens, pooling), abs=1e-6)
    assert embedder.n_rows_most <= max(n_rows, 0 if can_split else 40)


def test_a_long_input_is_cut_where_the_model_can_and_computed_whole_where_it_cannot() -> None:
    for can_split, n_steps in ((True, 10), (False, 1)):
        embedder = FakeEmbedder(can_split=can_split)
        scheduler = EmbedScheduler(embedder)
        scheduler.submit([[7] * 100])
        run(scheduler, embedder, 10)
        assert embedder.n_steps == n_steps


def test_requests_take_turns_input_by_input() -> None:
    embedder = FakeEmbedder(n_slots=1)
    scheduler = EmbedScheduler(embedder)
    long = scheduler.submit([[i] * 10 for i in range(20)])
    short = scheduler.submit([[99]])
    assert run(scheduler, embedder, 10) == [short, long]


def test_a_key_that_floods_does_not_hold_up_another_whatever_the_lengths_of_inputs() -> None:
    embedder = FakeEmbedder(n_slots=1)
    scheduler = EmbedScheduler(embedder, Accounts({"heavy": 2.0}))
    flood = [scheduler.submit([[i] * 10] * 2, "flood") for i in range(50)]
    quiet, heavy = scheduler.submit([[99] * 5] * 4, "quiet"), scheduler.submit([[98] * 5] * 8, "heavy")
    over = run(scheduler, embedder, 10)
    assert set(over[:2]) == {quiet, heavy}
    assert set(over[2:]) == set(flood)
    late = scheduler.submit([[97] * 10], "flood"), scheduler.submit([[96] * 10] * 3, "quiet")
    assert run(scheduler, embedder, 10) == [*late]  # idling has earned no credit, nor cost any


def test_a_long_input_leaves_room_for_others() -> None:
    embedder = FakeEmbedder()
    scheduler = EmbedScheduler(embedder)
    long = scheduler.submit([[1] * 400])
    plan = scheduler.plan(20)
    assert plan is not None
    scheduler.apply(plan, compute(embedder, plan))
    short = scheduler.submit([[2] * 10])
    plan = scheduler.plan(20)
    assert plan is not None
    assert scheduler.apply(plan, compute(embedder, plan)) == [short]
    assert run(scheduler, embedder, 20) == [long]


def test_what_has_no_tokens_or_too_many_is_refused_and_nothing_of_its_request_is_queued() -> None:
    scheduler = EmbedScheduler(FakeEmbedder(n_tokens_max=20))
    with pytest.raises(InputTooLong) as error:
        scheduler.submit([[1], [2] * 21])
    assert (error.value.status, error.value.extra) == (400, {"n_prompt_tokens": 21, "n_ctx": 20})
    with pytest.raises(InvalidRequest):
        scheduler.submit([[1], []])
    assert scheduler.n_waiting == 0


@pytest.mark.parametrize(("n", "n_tokens", "n_embd"), [(1000, 1, 8), (100, 400, 8), (100, 2, 1024)])
def test_a_job_says_what_memory_its_inputs_and_vectors_take(n: int, n_tokens: int, n_embd: int) -> None:
    embedder = FakeEmbedder()
    embedder.n_embd = n_embd
    scheduler = EmbedScheduler(embedder)
    tracemalloc.start()
    try:
        job = scheduler.submit([np.ones(n_tokens, np.int32) for _ in range(n)])
        n_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert job.n_bytes == pytest.approx(n_bytes, rel=0.2)


def test_a_model_that_needs_inputs_whole_takes_none_longer_than_a_step() -> None:
    scheduler = EmbedScheduler(FakeEmbedder(can_split=False, n_rows_max=16))
    with pytest.raises(InputTooLong):
        scheduler.submit([[1] * 17])
    scheduler.submit([[1] * 16])


def test_who_leaves_gives_everything_back() -> None:
    embedder = FakeEmbedder()
    scheduler = EmbedScheduler(embedder)
    job = scheduler.submit([[1] * 100, [2] * 100])
    plan = scheduler.plan(30)
    assert plan is not None
    scheduler.cancel(job)
    assert scheduler.apply(plan, compute(embedder, plan)) == []
    assert scheduler.plan(30) is None
    scheduler.submit([[3]])
    run(scheduler, embedder)
    assert embedder.n_cells_used <= 1  # the last one's slot is freed before the next step


def test_after_a_failed_step_inputs_are_tried_one_by_one_and_the_one_that_fails_ends_its_request() -> None:
    def fail(batch: Batch) -> None:
        if 66 in batch.tokens[: batch.n_rows]:
            raise StepFailed("66")

    embedder = FakeEmbedder(before_step=fail)
    scheduler = EmbedScheduler(embedder)
    good, bad, other = scheduler.submit([[1, 2], [3]]), scheduler.submit([[4], [66]]), scheduler.submit([[5]])
    run(scheduler, embedder)
    assert isinstance(bad.error, GenerationFailed)
    assert (good.error, other.error) == (None, None)
    assert good.vectors[0] == pytest.approx(alone([1, 2], Pooling.MEAN))
    assert scheduler.plan(10) is None


def test_a_slot_that_a_step_was_to_empty_before_it_failed_is_emptied_by_the_next() -> None:
    embedder = FakeEmbedder(n_slots=2)
    scheduler = EmbedScheduler(embedder)
    scheduler.submit([[1, 2], [5]])
    plan = scheduler.plan(10)
    assert plan is not None
    scheduler.apply(plan, compute(embedder, plan))
    scheduler.submit([[3]])
    failed = scheduler.plan(10)
    assert failed is not None
    assert failed.drops
    (ended,) = scheduler.apply_failure(failed, StepFailed("before it began"))
    assert isinstance(ended.error, GenerationFailed)
    after = scheduler.submit([[4], [6]])
    run(scheduler, embedder)
    for vector, token in zip(after.vectors, (4, 6), strict=True):
        assert vector == pytest.approx(alone([token], Pooling.MEAN))


def die_of(token: int, scheduler: EmbedScheduler, n_rows: int = 512) -> list[Job]:
    """Step until nothing is left on models that die of a token, each with empty slots; return the jobs in the order of their ends."""
    over: list[Job] = []
    embedder = FakeEmbedder()
    while (plan := scheduler.plan(n_rows)) is not None:
        if token in plan.batch.tokens[: plan.batch.n_rows]:
            embedder = FakeEmbedder()
            over += scheduler.apply_death(plan, ModelDied("it died"))
        else:
            over += scheduler.apply(plan, compute(embedder, plan))
    return over


def test_after_a_death_everything_starts_over_and_the_input_with_which_it_dies_alone_twice_ends_its_request() -> None:
    scheduler = EmbedScheduler(FakeEmbedder())
    good, bad, other = scheduler.submit([[1, 2], [3]]), scheduler.submit([[4], [66]]), scheduler.submit([[5] * 30])
    assert die_of(66, scheduler)[0] is not bad
    assert isinstance(bad.error, GenerationFailed)
    assert (good.error, other.error) == (None, None)
    assert good.vectors[0] == pytest.approx(alone([1, 2], Pooling.MEAN))
    assert other.vectors[0] == pytest.approx(alone([5] * 30, Pooling.MEAN))


def test_what_was_computed_of_an_input_before_a_death_is_computed_again_also_if_it_had_no_part_in_it() -> None:
    embedder = FakeEmbedder()
    scheduler = EmbedScheduler(embedder)
    long = scheduler.submit([list(range(100))])
    plan = scheduler.plan(40)
    assert plan is not None
    scheduler.apply(plan, compute(embedder, plan))
    assert scheduler.apply_death(None, ModelDied("between two steps")) == []
    run(scheduler, FakeEmbedder(), 40)
    assert long.vectors[0] == pytest.approx(alone(list(range(100)), Pooling.MEAN))


def test_an_input_that_was_alone_at_one_death_is_not_blamed_for_it() -> None:
    scheduler = EmbedScheduler(FakeEmbedder())
    job = scheduler.submit([[1, 2, 3]])
    plan = scheduler.plan(10)
    assert scheduler.apply_death(plan, ModelDied("somebody killed it")) == []
    run(scheduler, FakeEmbedder())
    assert job.error is None


def test_a_vector_that_is_not_made_of_numbers_fails_its_request_alone() -> None:
    embedder = FakeEmbedder()
    scheduler = EmbedScheduler(embedder)
    bad, good = scheduler.submit([[1]]), scheduler.submit([[2]])
    plan = scheduler.plan(10)
    assert plan is not None
    first, second = compute(embedder, plan)
    assert scheduler.apply(plan, [first * np.nan, second]) == [bad, good]
    assert isinstance(bad.error, GenerationFailed)
    assert good.error is None


def test_the_end_of_all_ends_begun_and_waiting_ones() -> None:
    scheduler = EmbedScheduler(FakeEmbedder(n_slots=1))
    jobs = [scheduler.submit([[1] * 50]), scheduler.submit([[2]])]
    scheduler.plan(10)
    error = Unavailable("over", retry_after_s=1.0)
    assert scheduler.end_all(error) == jobs
    assert [job.error for job in jobs] == [error, error]


def test_steps_grow_and_shrink_with_what_a_row_takes() -> None:
    pace = Pace()
    assert pace.n_rows(0.1) == N_ROWS_FIRST
    pace.took(10, 0.01)
    assert pace.n_rows(0.1) == pytest.approx(100, abs=1)
    for _ in range(40):
        pace.took(10, 1.0)
    assert pace.n_rows(0.1) == N_ROWS_LEAST


def test_vectors_of_which_a_row_is_missing_are_nobodys() -> None:
    class Forgetful(FakeEmbedder):
        n_left_out = 0

        def step(self, batch: Batch) -> Vectors:
            vectors = super().step(batch)
            if self.n_left_out:
                return vectors
            self.n_left_out = 1
            return vectors[:-1]

    embedder = Forgetful(pooling=Pooling.MEAN)
    scheduler = EmbedScheduler(embedder)
    jobs = [scheduler.submit([tokens]) for tokens in ([97, 98], [99, 100, 101])]
    run(scheduler, embedder)
    for job, tokens in zip(jobs, ([97, 98], [99, 100, 101]), strict=True):
        assert job.vectors[0] == pytest.approx(alone(tokens, Pooling.MEAN))


def test_an_input_leaves_no_room_to_one_for_which_there_is_no_memory() -> None:
    embedder = FakeEmbedder(n_cells=512)
    scheduler = EmbedScheduler(embedder)
    scheduler.submit([[97] * 400] * 3)
    sizes = []
    while (plan := scheduler.plan(128)) is not None:
        sizes.append(plan.batch.n_rows)
        scheduler.apply(plan, compute(embedder, plan))
    assert sizes == [128, 128, 128, 16] * 3


def test_a_short_text_of_another_key_begins_in_the_next_step_where_long_ones_leave_it_cells() -> None:
    embedder = FakeEmbedder(n_cells=512)
    scheduler = EmbedScheduler(embedder, Accounts())
    scheduler.submit([[97] * 400] * 4, "bulk")
    for _ in range(3):
        plan = scheduler.plan(16)
        assert plan is not None
        scheduler.apply(plan, compute(embedder, plan))
    quiet = scheduler.submit([[98] * 60], "quiet")
    n_steps = 0
    while not quiet.is_over and (plan := scheduler.plan(16)) is not None:
        n_steps += 1
        scheduler.apply(plan, compute(embedder, plan))
    assert n_steps <= 5


def test_slots_to_be_emptied_do_not_pile_up_while_steps_fail() -> None:
    scheduler = EmbedScheduler(FakeEmbedder(n_slots=4))
    for _ in range(50):
        scheduler.submit([[97, 98]])
        plan = scheduler.plan(16)
        assert plan is not None
        assert len(plan.drops) <= 4
        scheduler.apply_failure(plan, StepFailed("broken"))
