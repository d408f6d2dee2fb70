"""Shared and cached cells on a real model: what is computed, and that the texts are those of sequences alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cllm.backend import KvLayout, StepModel
from cllm.engine.batch.compute import compute
from cllm.engine.memory.prices import Prices
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.testing.tiny import ARCHITECTURES
from tests.clock import tick
from tests.endtoend.conftest import LoadModel, load_exact_model
from tests.endtoend.running import Text, alone, make_scheduler, run, take

SENTENCES = (
    "The sea lay grey under a low sky, and nobody on the pier spoke. ",
    "Count from 3 to 30 and say which of them are prime. ",
    "der Fluß fließt, 你好, déjà vu 🙂. ",
    "Batches are formed anew before every step, so that nobody waits for a batch to end. ",
)


Expected = Callable[[SequenceSpec], list[int]]


@pytest.fixture(scope="module")
def expected(exact_file: Path) -> Iterator[Expected]:
    """The tokens of a sequence that has a model to itself."""
    model = load_exact_model(exact_file, 4096)
    known: dict[tuple[object, ...], list[int]] = {}

    def of(wanted: SequenceSpec) -> list[int]:
        facts = (tuple(wanted.prompt), wanted.seed, wanted.sampling, wanted.stopping)
        if facts not in known:
            known[facts] = alone(model, wanted).tokens
        return known[facts]

    yield of
    model.close()


def tokens(model: StepModel, text: str) -> list[int]:
    return model.vocabulary.tokenize(text, add_special=False, parse_special=True)


def spec(prompt: list[int], seed: int, *, n_max: int = 12, temperature: float | None = None) -> SequenceSpec:
    return SequenceSpec(
        prompt=prompt,
        sampling=SamplingParams(temperature=float(seed % 2) if temperature is None else temperature),
        stopping=StopParams(max_tokens=n_max, ignore_eos=True),
        seed=seed,
    )


def long_text(n: int, first: int = 0) -> str:
    return "".join(SENTENCES[(first + i) % len(SENTENCES)] for i in range(n))


@pytest.mark.parametrize("layout", [KvLayout.UNIFIED, KvLayout.STREAMS])
def test_32_requests_with_one_long_beginning(load_exact: LoadModel, expected: Expected, layout: KvLayout) -> None:
    n_live = 32 if layout is KvLayout.UNIFIED else 4
    model = load_exact(8192, layout=layout, n_live=n_live)
    beginning = tokens(model, long_text(20))
    assert len(beginning) > 300
    specs = [spec(beginning + tokens(model, f" Question {i}: {SENTENCES[i % 4]}"), i) for i in range(32)]
    scheduler = make_scheduler(model, row_budget=128, n_live_max=n_live)
    texts = run(model, scheduler, specs)
    assert [text.tokens for text in texts] == [expected(each) for each in specs]
    n_own = sum(len(each.prompt) - len(beginning) for each in specs)
    if layout is KvLayout.UNIFIED:
        assert scheduler.totals.n_prefill_rows <= len(beginning) + n_own + 32
    else:
        assert scheduler.totals.n_prefill_rows < len(beginning) * 2 + n_own * 2


class DearPrices(Prices):
    """Of a larger model: what nobody reads is soon in the way, and to move it is always cheaper than to compute it again."""

    def carry_cell_s(self, n_rows: int) -> float:
        return 2e-6


def test_32_conversations_in_8_live_slots_compute_no_more_than_what_is_new(load_exact: LoadModel, expected: Expected) -> None:
    model = load_exact(8192)
    scheduler = make_scheduler(model, row_budget=64, n_live_max=8)
    assert scheduler.memory.offload is not None
    scheduler.memory.offload.prices = DearPrices()
    conversations = [tokens(model, f"Conversation {i}. {SENTENCES[i % 4]}") for i in range(32)]
    n_new = sum(map(len, conversations))
    for turn in range(3):
        specs = [spec(prompt, turn) for prompt in conversations]
        texts = run_on(model, scheduler, specs)
        assert [text.tokens for text in texts] == [expected(each) for each in specs]
        more = [tokens(model, f" And then, {i}?") for i in range(32)]
        conversations = [prompt + text.tokens + new for prompt, text, new in zip(conversations, texts, more, strict=True)]
        if turn < 2:
            n_new += sum(map(len, more)) + 32  # the answer's last token has no cell when the answer ends
    assert scheduler.totals.n_prefill_rows <= n_new
    assert scheduler.memory.offload.pool.totals.n_restores > 0


def test_four_times_as_many_as_fit_all_complete(load_exact: LoadModel, expected: Expected) -> None:
    model = load_exact(768)
    rng = random.Random(5)
    specs = [spec(tokens(model, long_text(rng.randrange(1, 6), i % 3)), i, n_max=60) for i in range(32)]
    assert sum(len(each.prompt) + 60 for each in specs) > 4 * model.n_cells
    scheduler = make_scheduler(model, row_budget=96)
    texts = run(model, scheduler, specs)
    assert scheduler.totals.n_preempted > 0
    assert scheduler.memory.totals.n_evicted_cells > 0
    assert [text.tokens for text in texts] == [expected(each) for each in specs]


def test_several_completions_of_a_prompt_cost_one_prefill(load_exact: LoadModel, expected: Expected) -> None:
    model = load_exact(4096)
    prompt = tokens(model, long_text(8))
    specs = [spec(prompt, i, temperature=1.0) for i in range(8)]
    scheduler = make_scheduler(model, row_budget=64)
    texts = run(model, scheduler, specs)
    assert [text.tokens for text in texts] == [expected(each) for each in specs]
    assert scheduler.totals.n_prefill_rows == len(prompt) + 7


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layout", [KvLayout.UNIFIED, KvLayout.STREAMS])
def test_whatever_is_preempted_cancelled_and_evicted_in_between(
    load_exact: LoadModel, expected: Expected, layout: KvLayout, seed: int
) -> None:
    rng = random.Random(seed)
    model = load_exact(1024 if layout is KvLayout.UNIFIED else 4096, layout=layout, n_live=6)
    scheduler = make_scheduler(model, row_budget=48, n_live_max=6)
    beginnings = [tokens(model, long_text(5, i)) for i in range(3)]
    specs = [spec(rng.choice(beginnings)[: rng.randrange(5, 80)] + tokens(model, f"{i} ends so"), i, n_max=24) for i in range(40)]
    texts: dict[int, Text] = {}
    waiting, cancelled = dict(enumerate(specs, start=1)), set()
    while True:
        if waiting and rng.random() < 0.6:
            seq_id = scheduler.submit(waiting.pop(len(texts) + 1), 0.0)
            texts[seq_id] = Text()
        if rng.random() < 0.1 and scheduler._running:
            scheduler._preempt(rng.choice(scheduler._running))
        if rng.random() < 0.05 and scheduler._running:
            cancelled.add(victim := rng.choice(scheduler._running).seq_id)
            scheduler.cancel(victim)
        if rng.random() < 0.02:
            scheduler.evict_cached()
        if (plan := scheduler.plan(0.0)) is None:
            if waiting:
                continue
            break
        take(plan.events, texts)
        if plan.is_step:
            take(scheduler.apply(plan, compute(model, plan, tick), 0.0), texts)
        scheduler.check()
    assert scheduler.memory.totals.n_hits > 10
    for seq_id, each in enumerate(specs, start=1):
        whole = expected(each)
        assert texts[seq_id].tokens == (whole[: len(texts[seq_id].tokens)] if seq_id in cancelled else whole)


@pytest.mark.parametrize("layout", [KvLayout.UNIFIED, KvLayout.STREAMS])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_in_every_kind_of_memory_the_next_turn_computes_only_what_is_new(load_tiny: LoadModel, architecture: str, layout: KvLayout) -> None:
    model, other = (load_tiny(2048, architecture, layout) for _ in range(2))
    scheduler = make_scheduler(model, row_budget=24, n_live_max=8)
    rng = random.Random(3)
    conversations = [[rng.randrange(40, 250) for _ in range(rng.randrange(5, 40))] for _ in range(6)]
    n_new = sum(map(len, conversations))
    for turn in range(3):
        specs = [spec(prompt, turn, n_max=9) for prompt in conversations]
        texts = run_on(model, scheduler, specs)
        assert [text.tokens for text in texts] == [alone(other, each).tokens for each in specs]
        conversations = [prompt + text.tokens + [60 + turn, 61] for prompt, text in zip(conversations, texts, strict=True)]
        n_new += 3 * len(conversations) if turn < 2 else 0  # two new tokens, and the answer's last one
    assert scheduler.totals.n_prefill_rows <= n_new


def run_on(model: StepModel, scheduler: StepScheduler, specs: list[SequenceSpec]) -> list[Text]:
    """Run all to their ends, and leave the cache as it is."""
    texts = {scheduler.submit(each, 0.0): Text() for each in specs}
    while (plan := scheduler.plan(0.0)) is not None:
        take(plan.events, texts)
        if plan.is_step:
            take(scheduler.apply(plan, compute(model, plan, tick), 0.0), texts)
        scheduler.check()
    return list(texts.values())
