"""What is held against a promise is what clients and counters saw."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import promises
from benchmarks.promises import Asked, Promise, Sizes
from cllm.bench.answers import Answer, Pass
from cllm.bench.metrics import Goal


def answer(sent_at: float, *chunks_at: float) -> Answer:
    n = len(chunks_at)
    return Answer(n_asked=n, sent_at=sent_at, ended_at=chunks_at[-1], status=200, chunks_at=list(chunks_at), n_generated=n)


@pytest.mark.parametrize(("value", "is_least", "is_kept"), [(1.0, True, True), (0.9, True, False), (1.0, False, True), (1.1, False, False)])
def test_a_bound_is_the_least_or_the_most_that_is_good(value: float, is_least: bool, is_kept: bool) -> None:
    assert Promise(workload="w", figure="f", value=value, bound=1.0, is_least=is_least).page()["is_kept"] is is_kept


def test_of_a_load_that_was_cut_only_what_ended_while_it_counted_is_told() -> None:
    asked = Asked(model=Path(), n_threads=1, seed=1, sizes=Sizes(settled_s=10.0, counted_s=20.0))
    early, good, slow, after = answer(0.0, 1.0, 2.0), answer(9.0, 10.0, 10.2), answer(9.0, 15.0, 15.2), answer(29.0, 30.0, 30.2)
    given_up = Answer(n_asked=5, sent_at=12.0, error="the pass was over before")
    done = Pass(wall_s=30.5, client_cpu_s=0.1, answers=[early, good, slow, after, given_up])
    figures = promises.within(done, asked, Goal())
    assert (figures["requests_per_s"], figures["goodput_per_s"], figures["n_failed"]) == (2 / 20, 1 / 20, 0)


def test_a_gap_counts_beside_the_long_prompt_as_soon_as_it_reaches_into_its_time() -> None:
    alone = answer(0.0, 1.0, 2.0, 3.5, 5.0, 6.5)
    one = answer(0.0, 1.0, 2.0, 3.0, 7.0, 8.0)
    long = answer(3.5, 6.0, 6.5)
    turn = promises.turn_of(*(Pass(wall_s=8.0, client_cpu_s=0.1, answers=answers) for answers in ([alone], [one, long])))
    usual = {"usual_s": 1.5, "usual_p99_s": 1.5, "usual_max_s": 1.5, "before_s": 1.0}
    assert turn == {**usual, "beside_p50_s": 4.0, "beside_p99_s": 4.0, "longest_s": 4.0, "late_ttft_s": 2.5}


def test_steps_beside_a_flood_are_those_since_it_has_settled_whether_or_not_their_answers_ended() -> None:
    given_up = Answer(n_asked=9, sent_at=0.0, chunks_at=[1.0, 3.0, 3.5], error="the pass was over before")
    done = Pass(wall_s=5.0, client_cpu_s=0.1, answers=[answer(0.0, 0.5, 2.0, 2.25), given_up])
    assert promises.gaps_since(2.0, done) == [0.25, 0.5]


def test_cells_are_equal_round_parts_for_all_slots() -> None:
    assert promises.sized(8, 5472) == ("--parallel", "8", "--ctx-size", "6144")
