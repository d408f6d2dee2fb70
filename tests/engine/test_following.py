"""Who follows whom, beside the scenarios: how much is looked at for that, and what is found while a step runs."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from cllm.config import Settings
from cllm.engine.batch.compute import compute
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sequence import Phase, SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.engine.waiting import following
from cllm.engine.waiting.fairness import NO_WORK, Work
from cllm.engine.waiting.trials import Trials
from cllm.errors import StepFailed
from cllm.serve.loading import limits_of
from cllm.testing.fake import FakeModel
from tests.clock import tick


def spec(prompt: list[int]) -> SequenceSpec:
    return SequenceSpec(prompt=prompt, sampling=SamplingParams(temperature=0), stopping=StopParams(max_tokens=20, ignore_eos=True))


def run_step(scheduler: StepScheduler, model: FakeModel) -> None:
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.apply(plan, compute(model, plan, tick), 0.0)


def test_of_many_answers_to_one_prompt_none_is_compared_with_those_that_were_let_in_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, n_compared = FakeModel(), 0
    n_common = following.n_common

    def count(*given: object) -> int:
        nonlocal n_compared
        n_compared += 1
        return n_common(*given)  # type: ignore[arg-type]

    scheduler = StepScheduler(limits_of(model, Settings(parallel=32)), model.vocabulary)
    for _ in range(32):
        scheduler.submit(spec(list(range(40, 140))), 0.0)
    monkeypatch.setattr(following, "n_common", count)
    for _ in range(3):
        run_step(scheduler, model)
    assert scheduler.totals.n_generated > 32
    assert n_compared < 4 * 32


def test_of_many_questions_about_a_document_none_is_compared_with_those_that_were_let_in_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has all of it when they are let go on together, and nobody computes it any more."""
    model, n_common, compared = FakeModel(n_cells=20_000), following.n_common, []
    scheduler = StepScheduler(limits_of(model, Settings(parallel=32, row_budget=100)), model.vocabulary)
    document = [40 + i % 80 for i in range(300)]
    for i in range(32):
        scheduler.submit(spec([*document, 130 + i, *range(40, 60)]), 0.0)
    monkeypatch.setattr(following, "n_common", lambda *given: compared.append(given) or n_common(*given))  # type: ignore[arg-type]
    while scheduler.n_waiting:
        n_waiting = scheduler.n_waiting
        compared.clear()
        run_step(scheduler, model)
    assert n_waiting == 31, "they came in together"
    assert not compared


def test_answers_to_one_prompt_are_never_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the same list of it, and a hundred of a long one would hold everybody up when they come, and when they leave."""
    model, prompt = FakeModel(), list(range(40, 140))
    scheduler = StepScheduler(limits_of(model, Settings(parallel=32)), model.vocabulary)
    seq_ids = [scheduler.submit(spec(prompt), 0.0) for _ in range(32)]
    monkeypatch.setattr(following, "n_common", lambda *_: pytest.fail("two were compared"))
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert (plan.n_rows, scheduler.n_waiting) == (100, 31), "one computes it, and the others follow"
    for seq_id in seq_ids:
        scheduler.cancel(seq_id)
        scheduler.is_futile(plan)
    assert scheduler.is_futile(plan)


def test_who_follows_owes_only_what_is_its_own_and_all_of_it_again_when_nobody_computes_the_rest() -> None:
    model = FakeModel()
    scheduler = StepScheduler(limits_of(model, Settings(parallel=8)), model.vocabulary)
    document = [40 + i % 80 for i in range(600)]
    first = scheduler.submit(spec(document), 0.0)
    for i in range(4):
        scheduler.submit(spec([*document, 130 + i, 140, 150]), 0.0)
    (account,) = scheduler._accounts
    assert account.owed == Work(600 + 4 * 603, 5 * 20)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert account.owed == Work(4 * 3, 4 * 20)
    scheduler.cancel(first)
    scheduler.apply(plan, compute(model, plan, tick), 0.0)
    scheduler.check()
    n_there = scheduler.totals.n_prefill_rows
    assert 0 < n_there < 600
    scheduler.plan(0.0)
    assert account.owed == Work(3 * 3, 3 * 20), "they follow the next one, which begins where the first one ended"
    while (plan := scheduler.plan(0.0)) is not None:
        scheduler.apply(plan, compute(model, plan, tick), 0.0)
    assert account.owed == NO_WORK
    assert scheduler.totals.n_prefill_rows == 603 + 3 * 3


def test_who_shares_nothing_gains_nothing_by_what_others_compute() -> None:
    """Its key is that of those who are not told apart."""
    model = FakeModel()
    scheduler = StepScheduler(limits_of(model, Settings(parallel=4)), model.vocabulary)
    for may_share in (True, True, False):
        scheduler.submit(attrs.evolve(spec(list(range(40, 140))), cache_prompt=may_share), 0.0)
    usual, other, apart = scheduler._sequences.values()
    usual.move(Phase.PREFILL)
    assert following.n_computing(other, [usual], 0) == 99
    assert following.n_computing(other, [usual], 98) == 99
    assert following.n_computing(apart, [usual], 7) == 7


def test_who_comes_while_a_slot_that_cannot_be_cut_generates_does_not_have_what_it_was_copied() -> None:
    """It could be copied before that step, and has a token more after it."""
    model = FakeModel(can_trim=False, can_save=False)
    scheduler = StepScheduler(limits_of(model, Settings(parallel=4)), model.vocabulary)
    scheduler.submit(spec(list(range(40, 100))), 0.0)
    run_step(scheduler, model)
    plan = scheduler.plan(0.0)
    assert plan is not None
    second = scheduler.submit(spec([*range(40, 100), 200, 201, 202, 203]), 0.0)
    scheduler.apply(plan, compute(model, plan, tick), 0.0)
    run_step(scheduler, model)
    assert scheduler._sequences[second].may_keep
    scheduler.check()


# --- while a culprit is looked for -------------------------------------------------------------------------------------


def prompt_rows(n_good_steps: int | None, prompts: list[list[int]]) -> int:
    """The rows of prompts that answers to `prompts` take, if the step after so many good ones fails; None: none does."""
    model = FakeModel(n_cells=30_000)
    limits = limits_of(model, Settings(parallel=12, row_budget=256))
    scheduler = StepScheduler(attrs.evolve(limits, host_pool_n_bytes=0), model.vocabulary)
    for prompt in prompts:
        scheduler.submit(spec(prompt), 0.0)
    n_steps = 0
    while (plan := scheduler.plan(0.0)) is not None:
        if n_steps == n_good_steps:
            assert not scheduler.apply_failure(plan, StepFailed("for once"), 0.0)
        else:
            scheduler.apply(plan, compute(model, plan, tick), 0.0)
        n_steps += 1
        scheduler.check()
    assert scheduler.totals.n_generated == 20 * len(prompts)
    return scheduler.totals.n_prefill_rows


DOCUMENT = [40 + i * i % 80 for i in range(2000)]


@pytest.mark.parametrize("n_good_steps", [1, 7])
def test_a_step_that_fails_once_has_one_prompt_computed_by_who_is_on_trial_and_once_for_all_others(n_good_steps: int) -> None:
    prompts = [DOCUMENT] * 8
    assert prompt_rows(None, prompts) < 2100
    assert prompt_rows(n_good_steps, prompts) < n_good_steps * 256 + 2000 + 2100, "what was lost, and two of it"


def test_halves_that_are_tried_compute_what_they_have_in_common_once_each() -> None:
    prompts = [[*DOCUMENT, 130 + i, *range(40, 60)] for i in range(8)]
    n_rows = prompt_rows(None, prompts)
    assert n_rows < 2000 + 8 * 40
    assert prompt_rows(20, prompts) < 3 * n_rows + 256


def test_nobody_waits_for_the_turn_of_who_is_under_another_suspicion() -> None:
    trials = Trials()
    running: list[Any] = ["tried", "later", "with it", "other"]
    tried, later, _, other = running
    assert trials.companions(other, running) == running
    trials.split(running[:3])  # the first half is one
    assert trials.companions(tried, running) == [tried]
    assert trials.companions(other, running) == [other]
    assert trials.companions(later, running) == []


def test_who_parts_before_what_a_step_computes_is_not_compared_when_somebody_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a document that is computed already everybody has all, which is of no use; a hundred of them would hold up every cancel."""
    model, compared = FakeModel(n_cells=20_000), []
    scheduler = StepScheduler(limits_of(model, Settings(parallel=1, row_budget=100)), model.vocabulary)
    document = [40 + i % 80 for i in range(350)]
    seq_ids = [scheduler.submit(spec([*document, *own]), 0.0) for own in (range(40, 120), *([130 + i, 40] for i in range(32)))]
    seq_ids.append(scheduler.submit(spec([*document, *range(40, 120), 7]), 0.0))
    first, *others, alike = (scheduler._sequences[seq_id] for seq_id in seq_ids)
    while first.n_computed <= len(document):
        run_step(scheduler, model)
    n_common = following.n_common
    monkeypatch.setattr(following, "n_common", lambda *given: compared.append(given) or n_common(*given))  # type: ignore[arg-type]
    prompts = [(first, 20)]
    assert not any(following.is_of_use(prompts, other, can_trim=True) for other in others)
    assert compared == []
    assert following.is_of_use(prompts, alike, can_trim=True)
