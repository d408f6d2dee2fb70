"""A step that begins before the one before it is settled: when there is one, and that what comes of it would have come without it, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import pytest

from cllm.backend import KvLayout, Logits
from cllm.config import Settings
from cllm.engine import stepping
from cllm.engine.batch.ahead import Ahead
from cllm.engine.batch.compute import NOBODYS, compute
from cllm.engine.batch.plan import Plan
from cllm.engine.cost.curve import DEFAULT_CURVE, Curve
from cllm.engine.cost.model import CostModel
from cllm.engine.events import Delta, Event, Failed, Finished, FinishReason
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sampling.step import Sampled, Sampler, sample
from cllm.engine.sequence import SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.errors import Aborted, NoRoom, StepFailed
from cllm.serve.loading import limits_of
from cllm.testing.fake import END_OF_TURN, FakeModel
from cllm.testing.fake_drawing import DrawingFakeModel
from cllm.text.answers import AnswerFormat
from cllm.text.reasoning import ReasoningTags
from tests.clock import tick

LEAST_S = stepping.AHEAD_S_LEAST


@pytest.fixture(autouse=True)
def _whatever_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake takes no time."""
    monkeypatch.setattr(stepping, "AHEAD_S_LEAST", 0.0)


LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


def spec_of(prompt: str = "once", n: int = 20, seed: int = 1, stop: tuple[str, ...] = (), **fields: object) -> SequenceSpec:
    return SequenceSpec(
        prompt=list(prompt.encode()),
        sampling=fields.pop("sampling", SamplingParams()),  # type: ignore[arg-type]
        stopping=StopParams(max_tokens=n, stop=stop),
        seed=seed,
        **fields,  # type: ignore[arg-type]
    )


@attrs.define
class Run:
    """A scheduler and its model, the texts that came, and how each ended."""

    model: FakeModel = attrs.field(factory=FakeModel)
    settings: Settings = attrs.field(factory=Settings)
    cost: CostModel | None = None
    by_model: bool = False
    now: float = 0.0
    texts: dict[int, str] = attrs.field(factory=dict)
    ends: dict[int, Finished | Failed] = attrs.field(factory=dict)
    scheduler: StepScheduler = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.scheduler = StepScheduler(limits_of(self.model, self.settings), self.model.vocabulary, self.cost)

    def submit(self, *specs: SequenceSpec) -> list[int]:
        return [self.scheduler.submit(spec, self.now) for spec in specs]

    def take(self, events: list[Event]) -> None:
        for event in events:
            if not isinstance(event, Failed):
                self.texts[event.seq_id] = self.texts.get(event.seq_id, "") + event.text
            if not isinstance(event, Delta):
                self.ends[event.seq_id] = event

    def plan(self) -> Plan:
        plan = self.scheduler.plan(self.now)
        assert plan is not None
        self.take(plan.events)
        return plan

    def settle(self, plan: Plan, ahead: Ahead | None = None) -> None:
        """Compute a step whose predecessor is settled, and settle it; `ahead` has been begun in between."""
        output = compute(self.model, plan, tick)
        if ahead is not None:
            assert ahead.begin()
        self.take(self.scheduler.apply(plan, output, self.now, ahead))
        if ahead is not None:
            ahead.settle()

    def ahead_of(self, plan: Plan) -> Ahead | None:
        return self.scheduler.plan_ahead(plan, self.now, by_model=self.by_model)

    def until_all_generate(self) -> Plan:
        """The first step in which all do, planned and not computed."""
        while (plan := self.plan()).prefilling:
            self.settle(plan)
        return plan

    def to_the_end(self, *, goes_ahead: bool) -> int:
        """Run until nothing is left; return the steps that began before the one before them was settled."""
        n_ahead = 0
        while (plan := self.scheduler.plan(self.now)) is not None:
            self.take(plan.events)
            while plan.is_step:
                ahead = self.ahead_of(plan) if goes_ahead else None
                output = compute(self.model, plan, tick)
                has_begun = ahead is not None and ahead.begin()
                self.take(self.scheduler.apply(plan, output, self.now, ahead if has_begun else None))
                if ahead is None or not has_begun:
                    break
                ahead.settle()
                n_ahead += 1
                plan = ahead.plan
        self.scheduler.check()
        assert self.model.n_cells_used == self.scheduler.cells.n_cached
        return n_ahead


def columns(plan: Plan) -> list[tuple[int, int, int]]:
    """Slot, position and whether it is an output, of each row."""
    batch, n = plan.batch, plan.n_rows
    return list(zip(batch.slots[:n].tolist(), batch.positions[:n].tolist(), batch.outputs[:n].tolist(), strict=True))


# --- what it is -------------------------------------------------------------------------------------------------------


def test_it_is_the_step_that_would_have_been_planned_when_the_one_before_it_was_settled() -> None:
    run, other = Run(), Run()
    for one in (run, other):
        one.submit(spec_of("once"), spec_of("upon a time"))
    plan, same = run.until_all_generate(), other.until_all_generate()
    ahead = run.ahead_of(plan)
    assert ahead is not None
    run.settle(plan, ahead)
    other.settle(same)
    planned = other.plan()
    assert columns(ahead.plan) == columns(planned)
    assert ahead.plan.batch.tokens[:2].tolist() == planned.batch.tokens[:2].tolist() == [one.tokens[-1] for one in planned.decoding]
    assert (ahead.plan.n_cells, list(ahead.plan.attended)) == (planned.n_cells, list(planned.attended))
    assert ahead.plan.batch is not plan.batch, "whose columns the model still reads"


@pytest.mark.parametrize("layout", KvLayout)
@pytest.mark.parametrize("n_tokens_to_end", [None, 20])
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(temperature=0), SamplingParams(), SamplingParams(repeat_penalty=1.3, presence_penalty=0.5), SamplingParams(mirostat=2)],
    ids=["greedy", "plain", "penalties", "mirostat"],
)
def test_texts_are_the_same_whether_steps_wait_for_each_other_or_not(
    layout: KvLayout, n_tokens_to_end: int | None, sampling: SamplingParams
) -> None:
    done = []
    for goes_ahead in (True, False):
        model = FakeModel(kv_layout=layout, n_slots=8, n_cells=800, n_tokens_to_end=n_tokens_to_end)
        run = Run(model, Settings(parallel=4))
        for i in range(6):
            stop = LETTERS if i % 2 else ()
            run.submit(spec_of("some words"[: 3 + i], 10 + 5 * i, i, stop, sampling=sampling, n_logprobs=2 if i == 3 else None))
        n_ahead = run.to_the_end(goes_ahead=goes_ahead)
        assert (n_ahead >= 10) == goes_ahead
        done.append((run.texts, {seq_id: end.reason for seq_id, end in run.ends.items() if isinstance(end, Finished)}))
        assert len(run.ends) == 6
    assert done[0] == done[1]


def test_the_rows_of_fillers_stay_where_they_are() -> None:
    curve = Curve(rows=[(1, 0.014), (2, 0.015), (16, 0.016)], outputs=[(1, 1e-6), (16, 2e-6)], cell_s=0.0, row_cell_s=0.0)
    model = FakeModel(kv_layout=KvLayout.STREAMS, n_slots=16, n_cells=1600)
    run = Run(model, Settings(parallel=16), CostModel(curve, n_rows_max=64, apart=True))
    short = spec_of("b", 3)
    run.submit(spec_of("a", 30), short, spec_of("c", 30))
    while len(run.ends) < 1:
        run.settle(run.plan())
    plan = run.plan()
    assert plan.fillers
    assert len(plan.decoding) == 2
    ahead = run.ahead_of(plan)
    assert ahead is not None
    run.settle(plan, ahead)
    before = {slot: position for slot, position, _ in columns(plan)}
    for slot, position, is_output in columns(ahead.plan):
        assert position == before[slot] + is_output
    tokens = {sequence.slot: sequence.tokens[-1] for sequence in plan.decoding}
    rows = zip(columns(ahead.plan), ahead.plan.batch.tokens[: ahead.plan.n_rows].tolist(), strict=True)
    assert {slot: token for (slot, _, is_output), token in rows if is_output} == tokens
    run.settle(ahead.plan)
    run.to_the_end(goes_ahead=True)


# --- when there is one ------------------------------------------------------------------------------------------------


def begun(n: int = 20, *, settings: Settings | None = None, model: FakeModel | None = None, **fields: object) -> tuple[Run, Plan]:
    """Two that generate, and their next step."""
    run = Run(model or FakeModel(), settings or Settings())
    run.submit(spec_of("once", n, **fields), spec_of("upon a time", n, 2, **fields))  # type: ignore[arg-type]
    return run, run.until_all_generate()


def has_neighbours(run: Run) -> None:
    run.scheduler.has_neighbours = True


def somebody_comes(run: Run) -> None:
    run.submit(spec_of("late"))


def somebody_leaves(run: Run) -> None:
    run.scheduler.cancel(1)


def cells_are_to_be_moved(run: Run) -> None:
    run.scheduler.memory._drop(run.scheduler.cells.take_slot())


@pytest.mark.parametrize("what", [has_neighbours, somebody_comes, somebody_leaves, cells_are_to_be_moved])
def test_there_is_none_where_the_next_step_is_another_one(what: Callable[[Run], None]) -> None:
    run, plan = begun()
    assert run.ahead_of(plan) is not None
    what(run)
    assert run.ahead_of(plan) is None


def test_there_is_none_while_a_prompt_is_computed() -> None:
    run = Run(settings=Settings(row_budget=4))
    run.submit(spec_of("a long prompt"))
    plan = run.plan()
    assert plan.prefilling
    assert run.ahead_of(plan) is None


def test_there_is_none_for_who_comes_to_an_end_in_this_step() -> None:
    run, plan = begun(n=3)  # of which each has one, and gets its second now
    assert run.ahead_of(plan) is not None
    run.settle(plan)
    assert run.ahead_of(run.plan()) is None


def test_there_is_none_when_somebodys_time_is_over() -> None:
    run, plan = begun(timeout_s=5.0)
    assert run.ahead_of(plan) is not None
    run.now = 6.0
    assert run.ahead_of(plan) is None


def test_there_is_none_without_a_cell_for_each_row() -> None:
    run, plan = begun(model=FakeModel(n_cells=18, n_ctx_train=18, n_slots=4))
    n_free = run.scheduler.cells.n_free
    assert n_free < 2
    assert run.ahead_of(plan) is None
    assert run.scheduler.cells.n_free == n_free, "nothing is held for what will not be"


def test_there_is_none_for_who_outgrows_its_part_of_the_cells_in_it() -> None:
    """It would have no room, for which others would have to give up what they have; the layout changes then, and everything is kept."""
    model, settings = FakeModel(lays_out=True), Settings(parallel=16)
    cost = CostModel(attrs.evolve(DEFAULT_CURVE, apart_gain_cell_s=1.0), n_rows_max=model.n_rows_max)
    run = Run(model, settings, cost)
    run.scheduler = scheduler = StepScheduler(attrs.evolve(limits_of(model, settings), begins_apart=True), model.vocabulary, cost)
    scheduler.vacate()
    assert scheduler.layout_due() is KvLayout.STREAMS
    model.lay_out(KvLayout.STREAMS, 16)
    scheduler.laid_out(limits_of(model, settings), 0.1)
    assert model.n_cells_slot == 256

    run.submit(spec_of("a" * 250, 30))
    plan, n_ahead = run.until_all_generate(), 0
    while (ahead := run.ahead_of(plan)) is not None:
        run.settle(plan, ahead)
        plan, n_ahead = ahead.plan, n_ahead + 1
    run.settle(plan)
    (view,) = scheduler.views()
    assert (n_ahead, view.n_computed, view.n_preempted) == (5, 256, 0)
    assert scheduler.layout_due() is KvLayout.UNIFIED


def test_there_is_none_where_slots_cannot_be_cut() -> None:
    run, plan = begun(model=FakeModel(can_trim=False))
    assert run.ahead_of(plan) is None


def test_there_is_none_where_steps_are_so_long_or_so_short_that_nothing_is_gained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "AHEAD_S_LEAST", LEAST_S)
    for seconds, is_one in ((0.0004, False), (0.0006, True), (0.04, True), (0.06, False)):
        curve = Curve(rows=[(1, seconds), (64, seconds)], outputs=[(1, 1e-6), (16, 2e-6)], cell_s=0.0, row_cell_s=0.0)
        run = Run(cost=CostModel(curve, n_rows_max=64, apart=False))
        run.submit(spec_of())
        assert (run.ahead_of(run.until_all_generate()) is not None) == is_one


def test_who_waits_for_a_place_is_no_reason_against_it_as_long_as_there_is_none() -> None:
    run, plan = begun(settings=Settings(parallel=2))
    run.submit(spec_of("late"))
    ahead = run.ahead_of(plan)
    assert ahead is not None
    run.settle(plan, ahead)
    run.settle(ahead.plan)
    run.to_the_end(goes_ahead=True)
    assert len(run.ends) == 3


# --- what does not begin ----------------------------------------------------------------------------------------------


def drawing(run: Run, plan: Plan, token: int) -> None:
    """Have it computed as if the first had drawn `token`."""
    compute(run.model, plan, tick)
    assert plan.drawn is not None
    plan.drawn = [token, *list(plan.drawn)[1:]]


@pytest.mark.parametrize(("token", "begins"), [(65, True), (END_OF_TURN, False), (-1, False), (10_000, False)])
def test_it_does_not_begin_with_a_token_that_ends_somebody_or_is_none(token: int, begins: bool) -> None:
    run, plan = begun()
    ahead = run.ahead_of(plan)
    assert ahead is not None
    drawing(run, plan, token)
    assert (ahead.goes_on, ahead.begin()) == (begins, begins)


def test_a_token_that_ends_another_ends_nobody_who_may_have_it() -> None:
    run = Run()
    run.submit(spec_of("once"), attrs.evolve(spec_of("upon"), stopping=StopParams(stop_token_ids=frozenset({65}))))
    ahead = run.ahead_of(plan := run.until_all_generate())
    assert ahead is not None
    drawing(run, plan, 65)
    assert ahead.goes_on


def test_it_does_not_begin_when_the_one_before_it_failed_or_has_logits_that_are_no_numbers() -> None:
    run, plan = begun()
    ahead = run.ahead_of(plan)
    assert ahead is not None
    assert not ahead.begin(), "nothing was computed"
    run.model.step = lambda batch: np.full((batch.n_outputs, run.model.vocabulary.n_tokens), np.nan, np.float32)  # type: ignore[method-assign]
    compute(run.model, plan, tick)
    assert not ahead.begin()


def test_who_withdraws_it_first_has_the_say_and_who_begins_it() -> None:
    run, plan = begun()
    ahead = run.ahead_of(plan)
    assert ahead is not None
    compute(run.model, plan, tick)
    assert ahead.withdraw()
    assert not ahead.begin()
    other = run.ahead_of(plan)
    assert other is not None
    assert other.begin()
    assert not other.withdraw()


def test_cells_that_were_held_for_one_that_was_withdrawn_are_those_of_the_step_that_comes() -> None:
    run, plan = begun()
    ahead = run.ahead_of(plan)
    assert ahead is not None
    assert ahead.withdraw()
    run.settle(plan)
    n_held = run.scheduler.cells.n_held
    run.settle(run.plan())
    assert run.scheduler.cells.n_held == n_held
    run.to_the_end(goes_ahead=False)


# --- who ends meanwhile -----------------------------------------------------------------------------------------------


def begun_beside_one_who_ends(stop: tuple[str, ...], **fields: object) -> tuple[Run, Ahead]:
    """Two who generate; the first ends by a stop string when the step after that one has begun already."""
    run = Run(FakeModel())
    run.submit(spec_of("once", 200, 3, stop, **fields), spec_of("upon a time", 200, 2))
    plan = run.until_all_generate()
    while True:
        ahead = run.ahead_of(plan)
        assert ahead is not None
        run.settle(plan, ahead)
        if run.ends:
            return run, ahead
        plan = ahead.plan


def test_of_who_ended_by_a_string_nothing_more_is_drawn_and_the_cell_too_many_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Sampler] = []

    def sample_and_note(logits: Logits, samplers: Sequence[Sampler]) -> Sampled:
        drawn.extend(samplers)
        return sample(logits, samplers)

    run, ahead = begun_beside_one_who_ends(LETTERS)
    (end,) = run.ends.values()
    assert isinstance(end, Finished)
    assert end.reason is FinishReason.STOP
    ended = ahead.plan.outputs[0]
    n_tokens, n_generated = len(ended.tokens), run.scheduler.totals.n_generated
    assert run.ahead_of(ahead.plan) is None, "the next one frees the cell"
    monkeypatch.setattr("cllm.engine.batch.compute.sample", sample_and_note)
    run.settle(ahead.plan)
    assert drawn == [NOBODYS, ahead.plan.outputs[1].sampler]
    assert len(ended.tokens) == n_tokens
    assert run.scheduler.totals.n_generated == n_generated + 1
    assert len(run.model.slot_tokens(ended.slot)) == n_tokens, "one more than is kept, as long as that is owed"
    run.settle(run.plan())
    assert run.model.slot_tokens(ended.slot) == ended.tokens[: n_tokens - 1]
    run.to_the_end(goes_ahead=True)


def test_what_is_kept_of_who_ended_so_can_be_gone_on_from() -> None:
    run, ahead = begun_beside_one_who_ends(LETTERS)
    ended = ahead.plan.outputs[0]
    run.settle(ahead.plan)
    (seq_id,) = run.submit(attrs.evolve(spec_of("x", 5), prompt=[*ended.tokens, 66]))
    plan = run.plan()
    ((sequence, n_rows),) = plan.prefilling
    assert (sequence.seq_id, n_rows) == (seq_id, 2)
    run.settle(plan)
    run.to_the_end(goes_ahead=True)


def test_who_is_cancelled_before_its_token_was_read_takes_no_more() -> None:
    run, plan = begun()
    ahead = run.ahead_of(plan)
    assert ahead is not None
    output = compute(run.model, plan, tick)
    assert ahead.begin()
    leaving = ahead.plan.outputs[0]
    run.scheduler.cancel(leaving.seq_id)
    run.take(run.scheduler.apply(plan, output, 0.0, ahead))
    ahead.settle()
    run.settle(ahead.plan)
    run.settle(run.plan())
    assert run.ends[leaving.seq_id].reason is FinishReason.CANCELLED  # type: ignore[union-attr]
    assert run.model.slot_tokens(leaving.slot) == leaving.tokens
    run.to_the_end(goes_ahead=True)


@pytest.mark.parametrize("error", [NoRoom("no room"), StepFailed("failed"), Aborted("aborted")], ids=lambda error: type(error).__name__)
def test_a_step_that_fails_after_somebody_ended_costs_the_others_nothing_but_time(error: Exception) -> None:
    run, ahead = begun_beside_one_who_ends(LETTERS)
    if isinstance(error, StepFailed):  # what the slots hold is not known
        for sequence in ahead.plan.outputs:
            run.model.drop(sequence.slot)
    run.take(run.scheduler.apply_failure(ahead.plan, error, 0.0))
    run.to_the_end(goes_ahead=True)
    ended, other = ahead.plan.outputs
    (again,) = run.submit(attrs.evolve(spec_of("x", 5), prompt=ended.tokens))  # whose cells may be kept, if they are still what they were
    run.to_the_end(goes_ahead=True)
    alone = Run()
    alone.submit(spec_of("upon a time", 200, 2), attrs.evolve(spec_of("x", 5), prompt=ended.tokens))
    alone.to_the_end(goes_ahead=False)
    assert [run.texts[other.seq_id], run.texts[again]] == list(alone.texts.values())


def test_a_step_in_which_nobody_is_left_is_futile() -> None:
    run = Run()
    run.submit(spec_of("once", 200, 3, LETTERS))
    plan = run.until_all_generate()
    while not run.ends:
        ahead = run.ahead_of(plan)
        assert ahead is not None
        assert not run.scheduler.is_futile(ahead.plan)
        run.settle(plan, ahead)
        plan = ahead.plan
    assert run.scheduler.is_futile(plan)
    run.settle(plan)
    run.to_the_end(goes_ahead=True)


# --- models that draw by themselves -----------------------------------------------------------------------------------


def drawing_run(*specs: SequenceSpec) -> tuple[Run, Plan]:
    run = Run(DrawingFakeModel(), by_model=True)
    run.submit(*specs)
    return run, run.until_all_generate()


def test_a_model_that_draws_draws_the_same_without_waiting_for_what_its_tokens_say() -> None:
    texts = []
    for goes_ahead in (True, False):
        run = Run(DrawingFakeModel(), by_model=True)
        run.submit(spec_of("once", 30, 1, LETTERS), spec_of("upon", 30, 2), spec_of("a time", 20, 3))
        assert (run.to_the_end(goes_ahead=goes_ahead) > 10) == goes_ahead
        texts.append(run.texts)
    assert texts[0] == texts[1]


def test_its_step_is_computed_and_drawn_before_the_one_before_it_is_settled() -> None:
    run, plan = drawing_run(spec_of("once"), spec_of("upon"))
    ahead = run.ahead_of(plan)
    assert ahead is not None
    output = compute(run.model, plan, tick)
    assert ahead.begin()
    after = compute(run.model, ahead.plan, tick)
    run.take(run.scheduler.apply(plan, output, 0.0, ahead))
    run.take(run.scheduler.apply(ahead.plan, after, 0.0))
    other = Run(DrawingFakeModel(), by_model=True)
    other.submit(spec_of("once"), spec_of("upon"))
    other.settle(other.until_all_generate())
    other.settle(other.plan())
    assert run.texts == other.texts


REASONS = AnswerFormat(tags=ReasoningTags("<think>", "</think>"), opened=True)
REASONS_BRIEFLY = attrs.evolve(REASONS, n_reasoning_max=5, closing=(65,))


@pytest.mark.parametrize(
    ("fields", "is_one"),
    [
        ([{}, {}], True),
        ([{"n_logprobs": 1}, {"n_logprobs": 1}], True),  # none is drawn by the model
        ([{}, {"n_logprobs": 1}], False),
        ([{}, {"sampling": SamplingParams(repeat_penalty=1.2)}], False),
        ([{}, {"answer": REASONS}], True),
        ([{}, {"answer": REASONS_BRIEFLY}], False),  # what its tokens say may come to a token that is not drawn
    ],
)
def test_where_some_are_drawn_by_the_model_and_some_may_not_be_there_is_none(fields: list[dict[str, object]], is_one: bool) -> None:
    run, plan = drawing_run(*(spec_of(f"once {i}", **one) for i, one in enumerate(fields)))  # type: ignore[arg-type]
    assert (run.ahead_of(plan) is not None) == is_one


# --- what is looked after between two steps ---------------------------------------------------------------------------


def test_there_is_none_while_somebody_waits_who_may_take_the_place_of_another() -> None:
    run, plan = begun(settings=Settings(parallel=2))
    (equal,) = run.submit(spec_of("one like them"))
    assert run.ahead_of(plan) is not None
    run.scheduler.cancel(equal)
    run.take(run.scheduler.sweep_waiting(0.0))
    run.submit(spec_of("more urgent", priority=-1))
    assert run.ahead_of(plan) is None


def test_there_is_none_when_something_that_rests_is_to_go() -> None:
    run, plan = begun()
    memory = run.scheduler.memory
    assert not memory.is_due
    memory._idle_slot = lambda: 3  # type: ignore[method-assign]
    assert memory.is_due
    assert run.ahead_of(plan) is None


def test_answers_that_make_room_make_it_for_some_steps() -> None:
    """Each time that something is evicted, a step has to wait for what is decided before it."""
    n_ahead = []
    for n_cells in (20_000, 2000):  # the latter are full of what the first ones left
        run = Run(FakeModel(n_cells=n_cells, n_ctx_train=1000, n_slots=200), Settings(parallel=32))
        run.scheduler.memory._is_carried_too_long = lambda slot: False  # type: ignore[method-assign]
        for turn in range(3):
            run.submit(*(spec_of(f"{turn} {i}", 40, i) for i in range(32)))
            n = run.to_the_end(goes_ahead=True)
        n_ahead.append(n)
    assert n_ahead[1] >= 0.75 * n_ahead[0]


def test_where_steps_wait_for_each_other_they_take_no_more_room_than_they_need() -> None:
    n_evicted = []
    for goes_ahead in (True, False):
        run = Run(FakeModel(n_cells=2000, n_ctx_train=1000, n_slots=200), Settings(parallel=32))
        run.scheduler.memory._is_carried_too_long = lambda slot: False  # type: ignore[method-assign]
        for turn in range(3):
            run.submit(*(spec_of(f"{turn} {i}", 40, i) for i in range(32)))
            run.to_the_end(goes_ahead=goes_ahead)
        n_evicted.append(run.scheduler.memory.totals.n_evicted_cells)
    assert n_evicted[1] < n_evicted[0]


def test_turns_of_answers_are_counted_also_where_their_steps_follow_on_each_other() -> None:
    run, plan = begun()
    run.scheduler._former._n_turns = 2
    for n_left in (1, 0, 0):
        ahead = run.ahead_of(plan)
        assert ahead is not None
        assert run.scheduler._former._n_turns == n_left
        run.settle(plan, ahead)
        plan = ahead.plan


@pytest.mark.parametrize("error", [StepFailed("failed"), NoRoom("no room")], ids=lambda error: type(error).__name__)
def test_who_is_left_in_a_step_with_one_who_had_ended_is_not_the_culprit_when_it_fails(error: Exception) -> None:
    run, ahead = begun_beside_one_who_ends(LETTERS, cache_prompt=False)  # of which nothing stays that could make room
    run.take(run.scheduler.apply_failure(ahead.plan, error, 0.0))
    other = ahead.plan.outputs[1]
    assert other.n_lone_failures == 0
