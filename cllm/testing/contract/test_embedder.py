"""Vectors beside logits, for a model that gives them: one for each row, the same in any company and in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import attrs
import numpy as np
import pytest

from cllm.backend import Batch, Embedder, Embeds, ModelSpec, Pooling, StepModel, Vectors
from cllm.engine.embedding.scheduler import EmbedScheduler, compute
from cllm.errors import LoadFailed, StepFailed
from cllm.testing.contract.hand import N_CELLS_TO_FILL_MAX, Hand, Near, Outputs, PlainTokens, are_pythons_own


@pytest.fixture
def embedder(model: StepModel, spec: ModelSpec) -> Iterator[Embedder]:
    if not isinstance(model, Embeds):
        pytest.skip("this model gives no vectors")
    embedder = model.make_embedder(spec)
    yield embedder
    embedder.close()


@pytest.fixture(params=list(Pooling), ids=lambda pooling: pooling.value)
def asked(request: pytest.FixtureRequest, model: StepModel, spec: ModelSpec) -> Iterator[tuple[Pooling, Embedder]]:
    """A pooling that was asked for, and what came of it."""
    pooling: Pooling = request.param
    with made(model, spec, pooling) as embedder:
        yield pooling, embedder


@pytest.fixture
def judge(model: StepModel, spec: ModelSpec) -> Iterator[Embedder]:
    """One that is asked how well a document answers a query."""
    with made(model, spec, Pooling.RANK) as embedder:
        yield embedder


@contextmanager
def made(model: StepModel, spec: ModelSpec, pooling: Pooling) -> Iterator[Embedder]:
    """Ask for an embedder of that pooling; one that the model cannot do is LoadFailed, and the test skipped."""
    if not isinstance(model, Embeds):
        pytest.skip("this model gives no vectors")
    try:
        embedder = model.make_embedder(attrs.evolve(spec, pooling=pooling))
    except LoadFailed as error:
        pytest.skip(f"this model cannot be asked for {pooling.value}: {error}")
    yield embedder
    embedder.close()


def vectors(embedder: Embedder, inputs: Sequence[Sequence[int]], n_rows: int) -> Vectors:
    scheduler = EmbedScheduler(embedder)
    job = scheduler.submit(inputs)
    while (plan := scheduler.plan(n_rows)) is not None:
        scheduler.apply(plan, compute(embedder, plan))
    assert job.error is None
    for slot in range(embedder.n_slots):
        embedder.drop(slot)
    return job.vectors


def likeness(one: Vectors, other: Vectors) -> float:
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other)))


def test_it_says_what_it_can_take(embedder: Embedder) -> None:
    numbers = (embedder.n_embd, embedder.n_tokens_max, embedder.n_cells, embedder.n_slots, embedder.n_rows_max)
    assert are_pythons_own(*numbers)
    assert min(numbers) >= 1
    assert isinstance(embedder.pooling, Pooling)
    assert embedder.can_split or embedder.n_rows_max >= embedder.n_tokens_max


def test_it_has_the_pooling_that_it_is_asked_for(asked: tuple[Pooling, Embedder]) -> None:
    """What is served, vectors or judgements, is chosen by what it says."""
    pooling, embedder = asked
    assert embedder.pooling is pooling


def test_who_judges_gives_each_pair_one_number_from_0_to_1_the_same_in_any_company(judge: Embedder) -> None:
    assert judge.n_embd == 1
    pairs = [judge.pair("what is it?", document) for document in ("it is a cat", "nobody knows, and " * 3, "a")]
    assert all(are_pythons_own(*pair) and set(pair) <= set(range(judge.vocabulary.n_tokens)) for pair in pairs)
    together = vectors(judge, pairs, judge.n_rows_max)
    assert together.shape == (len(pairs), 1)
    assert together.min() >= 0, "it is told as a score from 0 to 1"
    assert together.max() <= 1, "it is told as a score from 0 to 1"
    assert together == pytest.approx(np.concatenate([vectors(judge, [pair], judge.n_rows_max) for pair in pairs]), abs=0.01)


@pytest.mark.parametrize("n_cells", [None, 64, 2048], ids=["as it likes", "short inputs", "long inputs"])
def test_one_that_is_asked_for_the_sizes_of_another_has_them(model: StepModel, spec: ModelSpec, n_cells: int | None) -> None:
    """As what takes the place of a dead one in a process of its own, and is taken for another model otherwise."""
    if not isinstance(model, Embeds):
        pytest.skip("this model gives no vectors")
    first = sizes_of(model, attrs.evolve(spec, n_cells=n_cells))
    again = attrs.evolve(spec, n_cells=first["n_tokens_max"], n_rows_max=first["n_rows_max"])
    assert sizes_of(model, again) == first, "the spec's n_cells are tokens of one input at most"


def sizes_of(model: Embeds, spec: ModelSpec) -> dict[str, int]:
    """Make an embedder, and close it; return its sizes by their names."""
    embedder = model.make_embedder(spec)
    sizes = {name: getattr(embedder, name) for name in ("n_tokens_max", "n_rows_max", "n_cells", "n_slots", "n_embd", "can_split")}
    embedder.close()
    return sizes


def test_each_row_has_a_vector_whatever_the_outputs_say(embedder: Embedder, plain: PlainTokens) -> None:
    batch = Batch(3)
    batch.n_rows = 3
    batch.tokens[:] = plain.draw(3, seed=1)
    batch.positions[:] = range(3)
    batch.outputs[:] = 1
    batch.n_outputs = 3
    rows = embedder.step(batch)
    assert rows.shape == (3, embedder.n_embd)
    assert rows.dtype == np.float32
    assert np.isfinite(rows).all()


def test_an_input_has_the_same_vector_alone_in_company_and_in_pieces(embedder: Embedder, plain: PlainTokens) -> None:
    inputs = [plain.draw(n, seed=seed) for seed, n in ((1, 9), (2, 20), (3, 1), (4, 5))]
    alone = [vectors(embedder, [one], embedder.n_rows_max)[0] for one in inputs]
    for n_rows in (embedder.n_rows_max, 7):
        for one, other in zip(alone, vectors(embedder, inputs, n_rows), strict=True):
            assert likeness(one, other) > 0.999


def test_an_input_may_be_as_long_as_it_says_and_all_together_too(embedder: Embedder, plain: PlainTokens) -> None:
    n_most = min(embedder.n_tokens_max, embedder.n_cells)
    n_slots = min(embedder.n_slots, embedder.n_cells)
    if embedder.n_cells > N_CELLS_TO_FILL_MAX:
        pytest.skip(f"more than {N_CELLS_TO_FILL_MAX} cells would take too long to fill")
    longest = plain.draw(n_most, seed=11)
    at_once = vectors(embedder, [longest], embedder.n_rows_max)[0]
    assert np.isfinite(at_once).all()
    if embedder.can_split:
        assert likeness(at_once, vectors(embedder, [longest], max(1, n_most // 3))[0]) > 0.999
    n_each = min(n_most, embedder.n_cells // n_slots)
    for slot in range(n_slots):
        assert np.isfinite(put(embedder, slot, plain.draw(n_each, seed=12 + slot))).all()


def put(embedder: Embedder, slot: int, tokens: Sequence[int]) -> Vectors:
    """Compute an input, which stays in its slot; return what its last step gave."""
    n_rows = embedder.n_rows_max
    for start in range(0, len(tokens), n_rows):
        part = tokens[start : start + n_rows]
        n = len(part)
        batch = Batch(n)
        batch.n_rows = batch.n_outputs = n
        batch.tokens[:], batch.positions[:], batch.slots[:], batch.outputs[:] = part, np.arange(start, start + n), slot, 1
        rows = embedder.step(batch)
    return rows


def test_other_tokens_have_another_vector(embedder: Embedder, plain: PlainTokens) -> None:
    one, other = vectors(embedder, [plain.draw(12, seed=5), plain.draw(12, seed=6)], embedder.n_rows_max)
    assert not np.array_equal(one, other)


def test_too_many_rows_fail_and_change_nothing(embedder: Embedder, plain: PlainTokens) -> None:
    before = vectors(embedder, [plain.draw(5, seed=7)], embedder.n_rows_max)[0]
    n = embedder.n_rows_max + 1
    batch = Batch(n)
    batch.n_rows = batch.n_outputs = n
    batch.tokens[:] = plain.draw(n, seed=7)
    slots = np.sort(np.arange(n) % embedder.n_slots)  # in all slots, so that nothing is wrong with them but their number
    batch.positions[:], batch.slots[:], batch.outputs[:] = np.arange(n) - np.searchsorted(slots, slots), slots, 1
    with pytest.raises(StepFailed):
        embedder.step(batch)
    assert likeness(before, vectors(embedder, [plain.draw(5, seed=7)], embedder.n_rows_max)[0]) > 0.999


def test_text_is_not_disturbed_by_vectors(embedder: Embedder, hand: Hand, plain: PlainTokens, near: Near) -> None:
    prompt = plain.draw(10, seed=8)
    expected = hand.alone(prompt, Outputs.LAST)
    hand.put(0, prompt[:5])
    vectors(embedder, [plain.draw(20, seed=9)], embedder.n_rows_max)
    near.check(hand.put(0, prompt[5:]), expected)


def test_the_model_does_not_need_it_and_closing_it_twice_is_harmless(embedder: Embedder, hand: Hand, plain: PlainTokens) -> None:
    embedder.close()
    embedder.close()
    hand.put(0, plain.draw(4, seed=10))
