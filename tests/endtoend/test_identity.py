"""What a request gets does not depend on what else runs: on real models, byte for byte where arithmetic allows."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cllm import demo
from cllm.backend import KvLayout, ModelSpec, StepModel
from cllm.engine.memory.prices import Prices
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.registry import load_backend
from cllm.testing.tiny import ARCHITECTURES
from cllm.text.template import ChatTemplate
from tests.endtoend.conftest import LoadModel, load_exact_model
from tests.endtoend.running import Text, alone, make_scheduler, run

N_REQUESTS = 32
QUESTIONS = (
    "What is cLLM?",
    "What is {a} + {b}?",
    "Count from {a} to {c}.",
    "Repeat: der Fluß fließt {a} mal, 你好, déjà vu 🙂",
    "Give me JSON with name Anna and age {a}",
    "Hello! Tell me what continuous batching is. " * 4,
)
NOISE_OF_SHAPES = 0.05  # by so much may logits differ between batch shapes under default settings; 8 times what was measured


def requests(model: StepModel, *, n_logprobs: int | None = None, n_max: int = 60) -> list[SequenceSpec]:
    """Requests of mixed lengths, every other one greedy, the rest at temperature 1."""
    rng = random.Random(7)
    template = ChatTemplate(model.vocabulary.chat_template or "", bos_token="", eos_token="<|im_end|>")
    specs = []
    for i in range(N_REQUESTS):
        a, b = rng.randrange(100), rng.randrange(100)
        text = QUESTIONS[i % len(QUESTIONS)].format(a=a, b=b, c=a + rng.randrange(5, 40))
        prompt = model.vocabulary.tokenize(template.render([{"role": "user", "content": text}]), add_special=False, parse_special=True)
        specs.append(
            SequenceSpec(
                prompt=prompt,
                sampling=SamplingParams(temperature=float(i % 2)),
                stopping=StopParams(max_tokens=rng.randrange(4, n_max)),
                seed=i,
                n_logprobs=n_logprobs,
            )
        )
    return specs


@pytest.fixture(scope="module")
def expected(exact_file: Path) -> list[Text]:
    """What each request gives alone."""
    model = load_exact_model(exact_file, 8192)
    texts = [alone(model, spec) for spec in requests(model)]
    model.close()
    return texts


@pytest.mark.parametrize("row_budget", [7, 64, 512])
def test_32_requests_together_give_what_each_gives_alone(load_exact: LoadModel, expected: list[Text], row_budget: int) -> None:
    model = load_exact(8192)
    specs = requests(model)
    together = run(model, make_scheduler(model, row_budget=row_budget), specs, n_at_start=12)
    assert [text.tokens for text in together] == [text.tokens for text in expected]
    assert [text.text for text in together] == [text.text for text in expected]
    assert len({text.text for text in together}) > N_REQUESTS / 2, "the requests are too much alike to tell them apart"


def test_together_they_give_what_each_gives_alone_with_cells_so_short_that_sequences_are_preempted(
    load_exact: LoadModel, expected: list[Text]
) -> None:
    short = load_exact(512)
    specs = requests(short)
    scheduler = make_scheduler(short, row_budget=64)
    together = run(short, scheduler, specs)
    assert scheduler.totals.n_preempted > 0, "the cells were not short"
    assert [text.text for text in together] == [text.text for text in expected]


def test_together_they_give_what_each_gives_alone_where_slots_have_cells_of_their_own_and_gaps_are_closed(
    load_exact: LoadModel, expected: list[Text]
) -> None:
    """Nor is anything left of the rows that close them in what was cached there: all is asked for once more, and goes on from it."""
    parts = load_exact(8192, layout=KvLayout.STREAMS, n_live=16)
    specs = requests(parts)
    scheduler = make_scheduler(parts, row_budget=64, n_live_max=16)
    for n_at_start in (5, 3):
        together = run(parts, scheduler, specs, n_at_start=n_at_start)
        assert [text.text for text in together] == [text.text for text in expected]
    assert scheduler.totals.n_fillers > 20, "there were no gaps"
    assert scheduler.memory.totals.n_hits > 0, "nothing was found again"


def preempt_now_and_then(rng: random.Random) -> Callable[[StepScheduler], None]:
    def meddle(scheduler: StepScheduler) -> None:
        if scheduler._running and rng.random() < 0.15:
            scheduler._preempt(rng.choice(scheduler._running))

    return meddle


def test_together_they_give_what_each_gives_alone_when_they_are_preempted_at_random_and_come_back_from_the_host(
    load_exact: LoadModel, expected: list[Text]
) -> None:
    short = load_exact(512)
    specs = requests(short)
    scheduler = make_scheduler(short, row_budget=64)
    assert scheduler.memory.offload is not None
    scheduler.memory.offload.prices = Prices()  # of a larger model, for which a restore is always worth it
    together = run(short, scheduler, specs, meddle=preempt_now_and_then(random.Random(1)))
    assert scheduler.memory.offload.pool.totals.n_restores >= N_REQUESTS / 4
    assert scheduler.memory.offload.pool.totals.n_failures == 0
    assert [text.text for text in together] == [text.text for text in expected]


def test_a_seed_gives_the_same_text_in_another_place_of_another_batch(load_exact: LoadModel, expected: list[Text]) -> None:
    model = load_exact(8192)
    backwards = run(model, make_scheduler(model), requests(model)[::-1], n_at_start=3)[::-1]
    assert [text.text for text in backwards] == [text.text for text in expected]


def test_under_default_settings_greedy_texts_agree_up_to_the_first_near_tie() -> None:
    model = load_backend("llama-cpu").load(ModelSpec(path=str(demo.path()), n_cells=8192, n_threads=1), lambda share: True)
    try:
        specs = [spec for spec in requests(model, n_logprobs=2) if spec.sampling.temperature == 0]
        expected = [alone(model, spec) for spec in specs]
        together = run(model, make_scheduler(model, row_budget=64), specs, n_at_start=5)
        n_equal = sum(map(agree_up_to_a_near_tie, expected, together))
    finally:
        model.close()
    assert n_equal >= len(specs) * 0.8, "the demo model is not sharp enough for this to say much"


def agree_up_to_a_near_tie(one: Text, other: Text) -> bool:
    """Say whether two texts are equal; they may part only where the two likeliest tokens are closer than the noise."""
    for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)):
        if a != b:
            (_, first), (_, second) = one.logprobs[i].top
            assert first - second < NOISE_OF_SHAPES, f"token {i} differs, and it was no near-tie: {first} and {second}"
            return False
    assert len(one.tokens) == len(other.tokens)
    return True


@pytest.mark.parametrize("layout", [KvLayout.UNIFIED, KvLayout.STREAMS])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kind_of_memory_gives_what_each_request_gives_alone(load_tiny: LoadModel, architecture: str, layout: KvLayout) -> None:
    model = load_tiny(4096, architecture, layout)
    rng = random.Random(3)
    specs = [
        SequenceSpec(
            prompt=[rng.randrange(40, 250) for _ in range(rng.randrange(1, 90))],
            sampling=SamplingParams(temperature=float(i % 2)),
            stopping=StopParams(max_tokens=rng.randrange(1, 50), ignore_eos=True),
            seed=i,
        )
        for i in range(16)
    ]
    expected = [alone(model, spec) for spec in specs]
    scheduler = make_scheduler(model, row_budget=24, n_live_max=8)
    together = run(model, scheduler, specs, n_at_start=6, meddle=preempt_now_and_then(random.Random(2)))
    assert scheduler.totals.n_preempted
    assert [text.tokens for text in together] == [text.tokens for text in expected]
    assert [len(text.tokens) for text in together] == [spec.stopping.max_tokens for spec in specs]


@pytest.mark.parametrize("layout", [KvLayout.UNIFIED, KvLayout.STREAMS])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_in_every_kind_of_memory_what_prompts_have_in_common_is_computed_once(
    load_tiny: LoadModel, architecture: str, layout: KvLayout
) -> None:
    model = load_tiny(4096, architecture, layout)
    rng = random.Random(4)
    prefix, *ends = [[rng.randrange(40, 250) for _ in range(n)] for n in (150, 30, 40, 50)]
    prompts = [prefix + ends[0]] * 3 + [prefix + end for end in ends[1:]]
    stopping = StopParams(max_tokens=20, ignore_eos=True)
    specs = [
        SequenceSpec(prompt=prompt, sampling=SamplingParams(temperature=1.0), stopping=stopping, seed=i) for i, prompt in enumerate(prompts)
    ]
    expected = [alone(model, spec) for spec in specs]
    scheduler = make_scheduler(model, row_budget=64, n_live_max=8)
    together = run(model, scheduler, specs)
    assert [text.tokens for text in together] == [text.tokens for text in expected]
    # The whole of the first prompt, of its copies the last row, and what is the others' own.
    assert scheduler.totals.n_prefill_rows == 150 + 30 + 2 + 40 + 50
