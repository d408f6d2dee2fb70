"""While it serves, the loop has the model's cells laid out anew as the work asks for it, and no client sees more of it than a pause."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
import trio

from cllm.api.app import create_app
from cllm.backend import KvLayout
from cllm.config import Settings
from cllm.engine.cost.curve import DEFAULT_CURVE
from cllm.engine.cost.model import CostModel
from cllm.engine.events import Failed, Finished
from cllm.engine.memory.prices import PREFILL_ROW_S
from cllm.engine.sampling.params import StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.errors import ContextExceeded, DeadlineExceeded, LoadFailed, ModelDied, Unavailable
from cllm.serve import steploop
from cllm.serve.disktier import DiskTier
from cllm.testing.engine import RunningEngine, running_engine
from cllm.testing.fake import FakeModel
from cllm.testing.mortal import Panic
from tests.api.conftest import Api
from tests.serve.conftest import TEST_S, Answer, make_spec, read_all, text_alone, until

SETTINGS = Settings(parallel=16)  # parts of 256 cells
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class DearToCompute(CostModel):
    """Costs by which a restore is always worth it, however fast this machine is, and though it paused during one."""

    def prefill_s(self, n_rows: int, n_cells: int = 0) -> float:
        """See `CostModel.prefill_s`."""
        return max(super().prefill_s(n_rows, n_cells), n_rows * PREFILL_ROW_S)

    def beside(self, *, n_rows_max: int, apart: bool) -> CostModel:
        """See `CostModel.beside`."""
        other = super().beside(n_rows_max=n_rows_max, apart=apart)
        other.__class__ = DearToCompute
        return other


def cost(model: FakeModel, *, is_dear: bool = False) -> CostModel:
    """Costs by which a few steps in the pool are as expensive as to leave it."""
    return (DearToCompute if is_dear else CostModel)(attrs.evolve(DEFAULT_CURVE, apart_gain_cell_s=1.0), n_rows_max=model.n_rows_max)


def tiled(model: FakeModel) -> CostModel:
    """Costs by which a pass of eight rows takes hardly longer than one of a single row."""
    rows = ((1, 20e-3), (8, 24e-3), (64, 100e-3))
    return CostModel(attrs.evolve(DEFAULT_CURVE, rows=rows), n_rows_max=model.n_rows_max, apart=True)


def words(n: int, *, seed: int, n_letters: int = 60) -> list[str]:
    """Prompts that have nothing in common."""
    rng = random.Random(seed)
    return ["".join(rng.choices(LETTERS, k=n_letters)) for _ in range(n)]


async def ask(running: RunningEngine, specs: Sequence[SequenceSpec], n_at_once: int = 16) -> list[Answer]:
    """Answers, in the order of the specs."""
    answers: dict[int, Answer] = {}
    places = trio.Semaphore(n_at_once)

    async def read(number: int) -> None:
        async with places:
            (answers[number],) = await read_all(running.engine.open([specs[number]]))

    with trio.fail_after(TEST_S):
        async with trio.open_nursery() as nursery:
            for number in range(len(specs)):
                nursery.start_soon(read, number)
    return [answers[number] for number in range(len(specs))]


async def ask_and_compare(running: RunningEngine, prompts: Sequence[str], n_tokens: int = 30) -> None:
    answers = await ask(running, [make_spec(prompt, n_tokens) for prompt in prompts])
    assert [answer.text for answer in answers] == [text_alone(prompt, n_tokens) for prompt in prompts]


async def test_where_nothing_is_shared_the_cells_come_to_lie_apart_and_texts_stay_the_same() -> None:
    model = FakeModel(lays_out=True)
    async with running_engine(model, SETTINGS, cost=cost(model)) as running:
        await ask_and_compare(running, words(60, seed=1))
        assert model.capabilities.kv_layout is KvLayout.STREAMS
        assert running.scheduler.limits.n_ctx == 4096, "what one sequence may have was promised"
        told = (await Api(create_app(running.engine, SETTINGS), running).get("/model/info")).json["data"]
        assert (told["kv_layout"], told["n_slots"], told["n_ctx"]) == ("streams", 16, 4096)
        await ask_and_compare(running, words(12, seed=2))
        assert running.scheduler.totals.n_layouts == 1


@pytest.mark.parametrize("n_rows_max", [2048, 32])
async def test_more_at_once_than_there_are_parts_bring_the_pool_back_also_when_nobody_said_how_many_run(n_rows_max: int) -> None:
    model = FakeModel(lays_out=True, n_rows_max=n_rows_max)
    async with running_engine(model, Settings(), cost=cost(model)) as running:
        await ask_and_compare(running, words(60, seed=1))
        assert model.capabilities.kv_layout is KvLayout.STREAMS
        n_promised = running.engine.model.n_live_max
        assert n_promised > model.n_slots
        await ask(running, [make_spec(prompt, 30) for prompt in words(60, seed=2)], n_at_once=40)
        assert model.capabilities.kv_layout is KvLayout.UNIFIED
        assert running.engine.model.n_live_max == n_promised


async def test_one_more_than_there_are_parts_does_not_wait_until_somebody_ends() -> None:
    model = FakeModel(lays_out=True)
    async with running_engine(model, Settings(), cost=cost(model)) as running:
        await ask_and_compare(running, words(60, seed=1))
        assert model.capabilities.kv_layout is KvLayout.STREAMS
        n_parts = model.n_slots
        ended: list[int] = []

        async def read(number: int, spec: SequenceSpec) -> None:
            await read_all(running.engine.open([spec]))
            ended.append(number)

        with trio.fail_after(TEST_S):
            async with trio.open_nursery() as nursery:
                for number, prompt in enumerate(words(n_parts, seed=2)):
                    nursery.start_soon(read, number, make_spec(prompt, 150))
                await until(lambda: running.scheduler.n_running == n_parts)
                nursery.start_soon(read, n_parts, make_spec("one more", 5))
        assert ended[0] == n_parts
        assert model.capabilities.kv_layout is KvLayout.UNIFIED


async def test_a_crowd_that_a_pool_could_bear_no_better_leaves_the_cells_apart() -> None:
    model = FakeModel(lays_out=True)
    slow = attrs.evolve(DEFAULT_CURVE, rows=((1, 0.2), (16, 1.0), (64, 4.0)), attended=((1, 1.0),), apart_gain_cell_s=1.0)
    async with running_engine(model, Settings(), cost=CostModel(slow, n_rows_max=model.n_rows_max)) as running:
        await ask_and_compare(running, words(60, seed=1))
        assert model.capabilities.kv_layout is KvLayout.STREAMS
        await ask(running, [make_spec(prompt, 30) for prompt in words(60, seed=2)], n_at_once=40)
        assert model.capabilities.kv_layout is KvLayout.STREAMS


async def test_rows_that_close_gaps_between_slots_change_no_text_and_leave_what_is_cached() -> None:
    model = FakeModel(kv_layout=KvLayout.STREAMS, n_slots=8)
    lengths = random.Random(3)
    prompts = words(40, seed=3, n_letters=40)
    async with running_engine(model, Settings(parallel=8, host_cache_mb=0), cost=tiled(model)) as running:
        asked = [(prompt, lengths.randint(2, 60)) for prompt in prompts]
        answers = await ask(running, [make_spec(prompt, n) for prompt, n in asked], n_at_once=5)
        assert [answer.text for answer in answers] == [text_alone(prompt, n) for prompt, n in asked]
        assert running.scheduler.totals.n_fillers > 20
        (kept,) = words(1, seed=4)
        (first,) = await ask(running, [make_spec(kept, 8)])
        await ask(running, [make_spec(prompt, n) for prompt, n in asked[:6]], n_at_once=6)  # about its slot, and into it at times
        again = kept + first.text[:1]
        (last,) = await ask(running, [make_spec(again, 5)])
        (end,) = last.ends
        assert isinstance(end, Finished)
        assert (last.text, end.usage.n_cached) == (text_alone(again, 5), len(again) - 1)


async def test_the_cells_come_to_lie_apart_while_the_first_answers_are_still_under_way() -> None:
    model = FakeModel(lays_out=True)
    async with running_engine(model, Settings(parallel=16, host_cache_mb=0), cost=cost(model)) as running:
        stopping = StopParams(max_tokens=150, ignore_eos=True)
        answers = await ask(
            running, [attrs.evolve(make_spec(prompt, 150), stopping=stopping) for prompt in words(12, seed=14)], n_at_once=12
        )
        assert [len(answer.tokens) for answer in answers] == [150] * 12
        assert running.scheduler.totals.n_layouts == 1


@pytest.mark.parametrize("carries_states", [True, False])
async def test_what_was_computed_is_carried_into_the_new_layout_where_states_fit_it(carries_states: bool) -> None:
    """There by what it costs, and back because somebody needs more than a part."""
    model = FakeModel(lays_out=True, carries_states=carries_states)
    prompts = words(24, seed=31)
    async with running_engine(model, SETTINGS, cost=cost(model, is_dear=carries_states)) as running:
        await ask_and_compare(running, prompts, n_tokens=100)
        (long,) = words(1, seed=32, n_letters=300)
        await ask_and_compare(running, [*words(5, seed=33), long, *words(5, seed=34)])
        totals = running.scheduler.totals
    assert (totals.n_layouts, totals.n_preempted > 0) == (2, True)
    n_new = 24 * 61 + 10 * 61 + 301
    n_again = totals.n_prefill_rows - n_new
    assert (n_again <= totals.n_preempted) if carries_states else (n_again > 10 * totals.n_preempted)


@pytest.mark.parametrize("carries_states", [True, False])
async def test_with_a_disk_tier_they_are_laid_out_anew_where_its_states_fit_then_too(tmp_path: Path, carries_states: bool) -> None:
    settings = attrs.evolve(SETTINGS, cache_dir=str(tmp_path))
    model = FakeModel(lays_out=True, carries_states=carries_states)
    disk = DiskTier.open(str(tmp_path), model.info.fingerprint, 1 << 20)
    async with running_engine(model, settings, cost=cost(model), disk=disk) as running:
        await ask_and_compare(running, words(60, seed=36))
        assert running.scheduler.totals.n_layouts == carries_states


@pytest.mark.parametrize("long", [300, 900])
async def test_who_comes_while_they_are_laid_out_and_needs_more_than_a_part_is_answered(long: int) -> None:
    model = FakeModel(lays_out=True)
    (prompt,) = words(1, seed=37, n_letters=long)
    token = trio.lowlevel.current_trio_token()
    answers: list[Answer] = []

    async with running_engine(model, SETTINGS, cost=cost(model), begins_apart=True) as running, trio.open_nursery() as nursery:

        async def ask_long() -> None:
            answers.extend(await ask(running, [make_spec(prompt, 20)]))

        def come(layout: KvLayout, n_slots: int) -> None:
            if not answers and layout is KvLayout.STREAMS:
                trio.from_thread.run_sync(nursery.start_soon, ask_long, trio_token=token)

        model.before_lay_out = come
        await ask_and_compare(running, words(4, seed=38))
    assert [answer.text for answer in answers] == [text_alone(prompt, 20)]
    assert model.capabilities.kv_layout is KvLayout.UNIFIED


async def test_who_leaves_or_whose_time_is_over_while_they_are_laid_out_is_let_go_at_once() -> None:
    model = FakeModel(lays_out=True)
    begun, go_on = threading.Event(), threading.Event()

    def stand_still(_layout: KvLayout, _n_slots: int) -> None:
        begun.set()
        assert go_on.wait(TEST_S)

    model.before_lay_out = stand_still
    async with running_engine(model, SETTINGS, cost=cost(model)) as running, trio.open_nursery() as nursery:
        nursery.start_soon(ask, running, [make_spec(prompt, 50) for prompt in words(60, seed=39)])
        await until(begun.is_set)
        try:
            n_waiting = running.scheduler.n_waiting
            leaving = running.engine.open([make_spec("leaves")])
            assert running.scheduler.n_waiting == n_waiting + 1
            leaving.cancel()
            assert running.scheduler.n_waiting == n_waiting
            with trio.fail_after(TEST_S):
                (late,) = await read_all(running.engine.open([make_spec("late", timeout_s=0.05)], is_expected=True))
            assert isinstance(late.error, DeadlineExceeded)
        finally:
            go_on.set()


async def test_a_server_that_ends_all_in_the_middle_of_a_step_ends_well() -> None:
    model = FakeModel(lays_out=True, step_s=lambda batch: 0.002)
    async with running_engine(model, SETTINGS, cost=cost(model)) as running:
        with trio.fail_after(TEST_S):
            stream = running.engine.open([make_spec("once", 4000)])
            await until(lambda: running.scheduler.totals.n_generated > 200)
            await until(lambda: running.loop.is_computing)
            running.loop.end_all(Unavailable("the grace is over", retry_after_s=1.0, code="stopped"))
            (answer,) = await read_all(stream)
            assert isinstance(answer.ends[0], Failed)
            assert (await ask(running, [make_spec("again", 5)]))[0].text == text_alone("again", 5)


async def test_what_nobody_may_share_is_computed_again_in_the_new_layout() -> None:
    model = FakeModel(lays_out=True)
    async with running_engine(model, SETTINGS, cost=cost(model)) as running:
        specs = [attrs.evolve(make_spec(prompt, 100), cache_prompt=False) for prompt in words(24, seed=35)]
        answers = await ask(running, specs)
        assert [answer.text for answer in answers] == [text_alone(prompt, 100) for prompt in words(24, seed=35)]
        assert running.scheduler.totals.n_layouts == 1
        assert running.scheduler.memory.offload.pool.n_bytes == 0


async def test_a_restarted_server_goes_on_with_the_layout_that_it_had() -> None:
    kept: list[KvLayout] = []
    first, second = FakeModel(lays_out=True), FakeModel(lays_out=True)
    async with running_engine(first, SETTINGS, cost=cost(first), keep_layout=kept.append) as running:
        await ask_and_compare(running, words(60, seed=1))
    assert kept == [KvLayout.STREAMS]
    async with running_engine(second, SETTINGS, cost=cost(second), begins_apart=True) as running:
        await ask_and_compare(running, words(1, seed=2))
        assert second.capabilities.kv_layout is KvLayout.STREAMS
        assert running.scheduler.totals.n_layouts == 1


async def test_a_folder_that_does_not_take_the_layout_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steploop, "KEEP_LAYOUT_S", 0.01)
    taken = threading.Event()
    model = FakeModel(lays_out=True)

    def keep(_layout: KvLayout) -> None:
        taken.wait()

    async with running_engine(model, SETTINGS, cost=cost(model), keep_layout=keep) as running:
        try:
            with trio.fail_after(TEST_S):
                await ask_and_compare(running, words(60, seed=1))
            assert running.scheduler.totals.n_layouts == 1
            assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0, "others wait for these"
            monkeypatch.setattr(steploop, "KEEP_LAYOUT_S", math.inf)
            with trio.fail_after(TEST_S):  # the one before is under way still
                await running.loop._keep(KvLayout.UNIFIED)
        finally:
            taken.set()


async def test_who_begins_apart_has_the_pool_back_before_more_than_a_step_of_shared_prompts_was_computed() -> None:
    kept: list[KvLayout] = []
    model = FakeModel(lays_out=True)
    prefix = "".join(words(1, seed=3, n_letters=600))
    prompts = [prefix + word for word in words(4, seed=4, n_letters=8)]
    settings = attrs.evolve(SETTINGS, row_budget=100)
    async with running_engine(model, settings, cost=cost(model), begins_apart=True, keep_layout=kept.append) as running:
        await ask_and_compare(running, prompts)
        assert kept == [KvLayout.STREAMS, KvLayout.UNIFIED]
        assert running.scheduler.totals.n_prefill_rows <= 100 + 600 + 4 * 8 + 4


async def test_who_cannot_begin_apart_serves_from_the_pool() -> None:
    def refuse(layout: KvLayout, n_slots: int) -> None:
        raise LoadFailed("no memory")

    kept: list[KvLayout] = []
    model = FakeModel(lays_out=True, before_lay_out=refuse)
    async with running_engine(model, SETTINGS, cost=cost(model), begins_apart=True, keep_layout=kept.append) as running:
        await ask_and_compare(running, words(4, seed=5))
    assert kept == [KvLayout.UNIFIED]


async def test_conversations_come_to_lie_apart_and_compute_their_new_text_alone_there() -> None:
    """What an ended turn left is shared with nobody who runs, and the next one goes on in its slot."""
    model = FakeModel(lays_out=True)
    async with running_engine(model, SETTINGS, cost=cost(model, is_dear=True)) as running:
        chats = words(12, seed=21, n_letters=20)
        for turn in range(10):
            n_rows = running.scheduler.totals.n_prefill_rows
            await ask_and_compare(running, chats, n_tokens=10)
            n_rows = running.scheduler.totals.n_prefill_rows - n_rows
            chats = [chat + word for chat, word in zip(chats, words(12, seed=22 + turn, n_letters=8), strict=True)]
        assert model.capabilities.kv_layout is KvLayout.STREAMS
        assert running.scheduler.totals.n_layouts == 1
        assert n_rows <= 12 * (8 + 1)


async def test_where_prompts_are_shared_the_pool_stays() -> None:
    model = FakeModel(lays_out=True)
    prompts = [LETTERS * 3 + word for word in words(60, seed=3, n_letters=8)]
    async with running_engine(model, SETTINGS, cost=cost(model)) as running:
        await ask_and_compare(running, prompts)
        assert running.scheduler.totals.n_layouts == 0
        assert model.capabilities.kv_layout is KvLayout.UNIFIED


async def test_a_prompt_longer_than_a_part_brings_the_pool_back_and_is_answered() -> None:
    model = FakeModel(lays_out=True)
    async with running_engine(model, SETTINGS, cost=cost(model)) as running:
        await ask_and_compare(running, words(60, seed=4))
        (long,) = words(1, seed=5, n_letters=1500)
        await ask_and_compare(running, [*words(3, seed=6), long, *words(3, seed=7)])
        assert model.capabilities.kv_layout is KvLayout.UNIFIED


async def test_an_answer_that_outgrows_its_part_goes_on_in_the_pool() -> None:
    model = FakeModel(lays_out=True)
    async with running_engine(model, SETTINGS, cost=cost(model)) as running:
        await ask_and_compare(running, words(60, seed=8))
        await ask_and_compare(running, words(1, seed=9, n_letters=900), n_tokens=400)
        assert model.capabilities.kv_layout is KvLayout.UNIFIED


@pytest.mark.parametrize("error", [LoadFailed("no memory"), RuntimeError("a mistake"), Panic("a mistake")])
async def test_a_layout_that_cannot_be_had_costs_a_pause_and_is_not_tried_again(error: BaseException) -> None:
    def refuse(layout: KvLayout, n_slots: int) -> None:
        tried.append(layout)
        raise error

    tried: list[KvLayout] = []
    model = FakeModel(lays_out=True, before_lay_out=refuse)
    async with running_engine(model, SETTINGS, cost=cost(model)) as running:
        await ask_and_compare(running, words(80, seed=10))
    assert tried == [KvLayout.STREAMS]


async def test_after_a_layout_that_failed_in_its_own_way_no_slot_is_taken_to_be_empty_that_may_not_be() -> None:
    class Stubborn(FakeModel):
        def lay_out(self, layout: KvLayout, n_slots: int) -> None:
            emptied.clear()
            raise RuntimeError("a mistake before anything was done")

        def drop(self, slot: int) -> None:
            emptied.append(slot)
            super().drop(slot)

    emptied: list[int] = []
    model = Stubborn(lays_out=True)
    async with running_engine(model, SETTINGS, cost=cost(model)) as running:
        await ask_and_compare(running, words(80, seed=10))
    assert emptied[: model.n_slots] == list(range(model.n_slots))


async def test_where_the_pool_cannot_be_had_again_only_what_needs_it_fails_and_no_more_is_promised() -> None:
    def refuse(layout: KvLayout, n_slots: int) -> None:
        if layout is KvLayout.UNIFIED:
            raise LoadFailed("no memory")

    model = FakeModel(lays_out=True, before_lay_out=refuse)
    async with running_engine(model, SETTINGS, cost=cost(model)) as running:
        await ask_and_compare(running, words(60, seed=15))
        (long,), others = words(1, seed=16, n_letters=900), words(6, seed=17)
        given, *answers = await ask(running, [make_spec(long, 40), *(make_spec(prompt, 40) for prompt in others)])
        assert [answer.text for answer in answers] == [text_alone(prompt, 40) for prompt in others]
        (end,) = given.ends
        assert isinstance(end, Failed)
        assert end.error.code == "no_memory"
        assert running.engine.model.n_ctx == 256
        with pytest.raises(ContextExceeded):
            running.engine.open([make_spec(long, 40)])
        (growing,) = await ask(running, [make_spec(others[0], 400)])
        assert len(growing.tokens) == 256 - len(others[0])


async def test_a_model_that_dies_of_it_ends_the_engine_and_every_stream() -> None:
    def die(layout: KvLayout, n_slots: int) -> None:
        raise ModelDied("nothing is left")

    model = FakeModel(lays_out=True, before_lay_out=die)
    ended: list[Answer] = []
    with pytest.RaisesGroup(ModelDied, flatten_subgroups=True):
        async with running_engine(model, SETTINGS, cost=cost(model)) as running:
            stream = running.engine.open([make_spec(words(1, seed=11)[0], 4000)])
            ended += await ask(running, [make_spec(prompt, 30) for prompt in words(60, seed=12)])
            await read_all(stream)
    assert model.capabilities.kv_layout is KvLayout.UNIFIED


async def test_a_model_whose_layout_was_chosen_keeps_it() -> None:
    model = FakeModel()
    async with running_engine(model, SETTINGS, cost=cost(model)) as running:
        await ask_and_compare(running, words(60, seed=13))
        assert running.scheduler.totals.n_layouts == 0
