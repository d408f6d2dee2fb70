from __future__ import annotations

import itertools
import statistics

import attrs
import pytest

from cllm.bench.workloads import WORKLOADS, Ask, Workload, arrivals, id_range, seed_workload, with_load

N_VOCAB = 151_936
ALL = pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda workload: workload.name)


@ALL
def test_every_request_has_sizes_within_the_recipe(workload: Workload) -> None:
    work = workload.make(N_VOCAB, 1)
    assert len(work.chains) == workload.n_requests
    for chain in work.chains:
        assert len(chain) == workload.n_turns
        assert workload.n_prompt[0] <= len(chain[0].prompt) - workload.n_prefix <= workload.n_prompt[1]
        assert all(workload.n_generated[0] <= ask.n_generated <= workload.n_generated[1] for ask in chain)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [  # requests, at a time, tokens of a prompt, tokens generated, of a prefix, turns, of a prompt that comes late
        ("seed-40x8", (40, 8, (32, 32), (50, 50), 0, 1, 0)),
        ("seed-160x5", (160, 5, (32, 32), (50, 50), 0, 1, 0)),
        ("mixed", (40, 8, (8, 512), (8, 256), 0, 1, 0)),
        ("mixed-small", (40, 8, (8, 240), (8, 100), 0, 1, 0)),
        ("long-among-short", (7, 7, (32, 32), (256, 256), 0, 1, 4096)),
        ("shared-prefix", (32, 8, (32, 32), (50, 50), 1000, 1, 0)),
        ("chat-turns", (8, 8, (64, 64), (50, 50), 0, 6, 0)),
    ],
)
def test_results_of_another_day_are_of_the_same_sizes(name: str, sizes: tuple[object, ...]) -> None:
    one = WORKLOADS[name]
    assert sizes == (one.n_requests, one.concurrency, one.n_prompt, one.n_generated, one.n_prefix, one.n_turns, one.n_prompt_late)


@ALL
def test_the_same_seed_gives_the_same_requests_and_another_gives_others(workload: Workload) -> None:
    assert workload.make(N_VOCAB, 1) == workload.make(N_VOCAB, 1)
    firsts = [{ask.prompt[:8] for ask in workload.make(N_VOCAB, seed).asks} for seed in (1, 2)]
    assert not firsts[0] & firsts[1]


@ALL
def test_all_that_runs_at_once_fits_into_the_cells_that_a_workload_names(workload: Workload) -> None:
    work = workload.make(N_VOCAB, 3)
    greatest = sorted((len(chain[-1].prompt) + chain[-1].n_generated for chain in work.chains), reverse=True)[: workload.concurrency]
    late = len(work.late.prompt) + work.late.n_generated if work.late else 0
    assert sum(greatest) + late <= workload.cells()
    assert max(*greatest, late) <= workload.n_longest()


@ALL
@pytest.mark.parametrize("n_vocab", [259, 1024, 32_000, N_VOCAB])
def test_every_token_is_in_the_vocabulary(workload: Workload, n_vocab: int) -> None:
    low, high = id_range(n_vocab)
    assert 0 < low < high <= n_vocab
    tokens = {token for ask in workload.make(n_vocab, 1).asks for token in ask.prompt}
    assert low <= min(tokens) <= max(tokens) < high


def test_the_first_cllms_workload_is_forty_requests_of_32_and_50_tokens() -> None:
    asks = WORKLOADS["seed-40x8"].make(N_VOCAB, 1).asks
    assert [(len(ask.prompt), ask.n_generated) for ask in asks] == [(32, 50)] * 40


def test_the_other_of_its_workloads_is_a_hundred_and_sixty_of_them_five_at_a_time() -> None:
    workload = WORKLOADS["seed-160x5"]
    assert workload.concurrency == 5
    assert [(len(ask.prompt), ask.n_generated) for ask in workload.make(N_VOCAB, 1).asks] == [(32, 50)] * 160


def test_requests_of_equal_shape_can_be_had_alone() -> None:
    asks = seed_workload(3, n_prompt=5, n_generated=7, n_vocab=N_VOCAB, seed=1)
    assert [(len(ask.prompt), ask.n_generated) for ask in asks] == [(5, 7)] * 3


def test_a_shared_prefix_is_the_same_thousand_tokens_and_the_rest_is_not() -> None:
    asks = WORKLOADS["shared-prefix"].make(N_VOCAB, 1).asks
    assert len({ask.prompt[:1000] for ask in asks}) == 1
    assert len({ask.prompt[1000:] for ask in asks}) == 32
    assert {len(ask.prompt) for ask in asks} == {1032}


def test_each_turn_of_a_conversation_begins_with_the_last_ones_tokens_and_room_for_its_answer() -> None:
    work = WORKLOADS["chat-turns"].make(N_VOCAB, 1)
    assert [len(chain) for chain in work.chains] == [6] * 8
    for chain in work.chains:
        for before, after in itertools.pairwise(chain):
            assert after.prompt[: len(before.prompt)] == before.prompt
            assert len(after.prompt) == len(before.prompt) + before.n_generated + 64


def test_the_one_that_comes_late_is_the_last_of_all_and_long() -> None:
    work = WORKLOADS["long-among-short"].make(N_VOCAB, 1)
    assert work.asks[-1] is work.late
    assert [len(ask.prompt) for ask in work.asks] == [32] * 7 + [4096]


def test_more_at_once_means_more_conversations_but_no_more_requests_than_that_takes() -> None:
    assert with_load(WORKLOADS["chat-turns"], concurrency=32).n_requests == 32
    more = with_load(WORKLOADS["seed-40x8"], concurrency=16)
    assert (more.concurrency, more.n_requests) == (16, 40)
    many = with_load(WORKLOADS["seed-40x8"], concurrency=64)
    assert (many.concurrency, many.n_requests) == (64, 64)
    few = with_load(WORKLOADS["mixed"], n_requests=7)
    assert (few.concurrency, few.n_requests) == (7, 7)
    with pytest.raises(ValueError, match="64 at a time are more than the 40 requests"):
        with_load(WORKLOADS["seed-40x8"], concurrency=64, n_requests=40)


def test_what_runs_at_once_cannot_be_more_than_that() -> None:
    with pytest.raises(ValueError, match="all run at once"):
        with_load(WORKLOADS["chat-turns"], concurrency=8, n_requests=32)
    assert with_load(WORKLOADS["chat-turns"], concurrency=32, n_requests=32).concurrency == 32


def test_arrivals_come_by_chance_at_the_rate_that_was_asked_for() -> None:
    times = arrivals(4000, 5.0, seed=1)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.1)  # as large as the mean: an exponential distribution
    assert arrivals(10, 5.0, seed=1) == times[:10]


def test_a_request_is_a_fact() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Ask(prompt=(1,), n_generated=1).n_generated = 2  # type: ignore[misc]
