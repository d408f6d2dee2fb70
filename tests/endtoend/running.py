"""Runs sequences on a model through the scheduler, step by step, in the test's own thread."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import attrs

from cllm.backend import StepModel
from cllm.config import Settings
from cllm.engine.batch.compute import compute
from cllm.engine.events import Delta, Event, Failed, TokenLogprob
from cllm.engine.sequence import SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.serve.loading import limits_of
from tests.clock import tick


@attrs.define
class Text:
    """What a sequence gave."""

    text: str = ""
    tokens: list[int] = attrs.field(factory=list)
    logprobs: list[TokenLogprob] = attrs.field(factory=list)
    n_ends: int = 0


def make_scheduler(model: StepModel, *, row_budget: int = 512, n_live_max: int = 32) -> StepScheduler:
    """A scheduler over all of `model`, as the server makes it."""
    return StepScheduler(limits_of(model, Settings(row_budget=row_budget, parallel=n_live_max)), model.vocabulary)


def run(
    model: StepModel,
    scheduler: StepScheduler,
    specs: Seq[SequenceSpec],
    *,
    n_at_start: int = 1000,
    meddle: Callable[[StepScheduler], None] = lambda scheduler: None,
) -> list[Text]:
    """Run all to their ends; after the first `n_at_start`, one more is submitted at every step, before which `meddle` is called.

    The invariants are checked throughout.
    """
    later = list(specs)[::-1]
    texts: dict[int, Text] = {}
    for _ in range(min(n_at_start, len(later))):
        texts[scheduler.submit(later.pop(), 0.0)] = Text()
    while (plan := scheduler.plan(0.0)) is not None or later:
        if plan is not None:
            take(plan.events, texts)
            if plan.is_step:
                take(scheduler.apply(plan, compute(model, plan, tick), 0.0), texts)
        scheduler.check()
        meddle(scheduler)
        if later:
            texts[scheduler.submit(later.pop(), 0.0)] = Text()
    scheduler.evict_cached()
    if (plan := scheduler.plan(0.0)) is not None:
        compute(model, plan, tick)
    assert scheduler.cells.n_free == model.n_cells
    assert all(text.n_ends == 1 for text in texts.values())
    return list(texts.values())


def alone(model: StepModel, spec: SequenceSpec, *, row_budget: int = 512) -> Text:
    """Run one sequence with the model to itself."""
    (text,) = run(model, make_scheduler(model, row_budget=row_budget), [spec])
    return text


def take(events: list[Event], texts: dict[int, Text]) -> None:
    """Add events to their sequences' texts."""
    for event in events:
        assert not isinstance(event, Failed), event
        text = texts[event.seq_id]
        text.text += event.text
        if isinstance(event, Delta):
            text.tokens += event.tokens
            text.logprobs += event.logprobs or []
        else:
            text.n_ends += 1
