from __future__ import annotations

import io

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cllm.bench.answers import Answer, Pass
from cllm.bench.metrics import Goal, curve, percentile, spread, summarize
from cllm.bench.show import N_REASONS, print_table, rows


def answer(
    sent_at: float, chunks_at: list[float], *, n_asked: int = 0, error: str = "", counted_by: str = "usage", finish_reason: str = "length"
) -> Answer:
    n = len(chunks_at)
    return Answer(
        n_asked=n_asked or n,
        sent_at=sent_at,
        ended_at=max(chunks_at, default=sent_at) + 0.5,
        status=0 if error else 200,
        error=error,
        chunks_at=chunks_at,
        n_prompt=10,
        n_generated=n,
        counted_by=counted_by,
        finish_reason=finish_reason,
    )


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    assert percentile(sorted(values), share) == pytest.approx(np.quantile(values, share), rel=1e-9, abs=1e-9)


def test_a_spread_of_nothing_is_nothing() -> None:
    assert spread([]).p50 is None
    assert curve([]) == []


def test_a_spread_has_mean_percentiles_and_maximum() -> None:
    found = spread([4.0, 1.0, 3.0, 2.0])
    assert (found.mean, found.p50, found.max) == (2.5, 2.5, 4.0)
    assert found.p90 == pytest.approx(3.7)


def test_a_curve_goes_from_the_least_to_the_greatest() -> None:
    assert curve([2.0, 0.0, 1.0], 5) == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_a_pass_is_reduced_to_rates_and_times() -> None:
    done = Pass(wall_s=10.0, client_cpu_s=1.0, answers=[answer(0.0, [1.0, 1.5, 2.0]), answer(2.0, [5.0, 5.1], n_asked=3)])
    figures = summarize(done)
    assert (figures.tokens_per_s, figures.requests_per_s, figures.n_prompt) == (0.5, 0.2, 20)
    assert (figures.ttft_s.p50, figures.ttft_s.max) == (2.0, 3.0)
    assert figures.itl_s.p50 == pytest.approx(0.5)
    assert figures.e2e_s.max == pytest.approx(3.6)
    assert (figures.n_inexact, figures.is_exact) == (1, False)
    assert figures.client_cpu_share == 0.1
    assert figures.warnings() == []


def test_an_answer_to_a_part_of_the_prompt_is_not_exact() -> None:
    answers = [attrs.evolve(answer(0.0, [1.0]), n_prompt_asked=n) for n in (9, 10, 11)]
    assert [one.is_cut for one in answers] == [False, False, True]
    assert summarize(Pass(wall_s=1.0, client_cpu_s=0.0, answers=answers)).n_inexact == 1
    assert [Goal(ttft_s=1.0, itl_s=1.0).is_met(one) for one in answers] == [True, True, False], "nor is it good, however soon it comes"


def test_of_a_server_that_does_not_count_the_prompt_nothing_is_said() -> None:
    assert not attrs.evolve(answer(0.0, [1.0]), n_prompt=0, n_prompt_asked=11).is_cut


def test_a_failed_request_counts_as_asked_for_and_not_in_the_times() -> None:
    done = Pass(
        wall_s=1.0, client_cpu_s=0.0, answers=[answer(0.0, [0.5]), answer(0.0, [], error="503: full"), answer(0.0, [9.0], error="x")]
    )
    figures = summarize(done)
    assert (figures.n_requests, figures.n_failed, figures.requests_per_s) == (3, 2, 1.0)
    assert figures.failures == {"503: full": 1, "x": 1}
    assert figures.ttft_s.max == 0.5
    assert figures.goodput_share == pytest.approx(1 / 3)


def test_of_many_reasons_why_requests_failed_the_most_common_ones_are_told() -> None:
    answers = [answer(0.0, [], error=error) for error in ("often", "often", *(f"429: {n} tokens left" for n in range(20)))]
    page = io.StringIO()
    print_table([("a", summarize(Pass(wall_s=1.0, client_cpu_s=0.0, answers=answers)))], Console(file=page, width=200))
    told = [line.strip() for line in page.getvalue().splitlines() if line.startswith("a: ")]
    assert told[0] == "a: 2 failed: often"
    assert told[N_REASONS:] == ["a: 16 failed for 16 other reasons (--json has them)"]


def test_an_answer_is_good_when_its_first_text_and_its_tokens_come_in_time() -> None:
    goal = Goal(ttft_s=1.0, itl_s=0.25)
    assert goal.is_met(answer(0.0, [1.0, 1.1, 1.5]))  # one long gap does not matter, the mean does
    assert not goal.is_met(answer(0.0, [1.1, 1.2, 1.3]))
    assert not goal.is_met(answer(0.0, [0.5, 0.6, 1.2]))
    assert goal.is_met(answer(0.0, [0.5]))
    assert not goal.is_met(answer(0.0, [0.5, 0.6], error="gone"))


def test_an_answer_whose_stream_shows_nothing_has_no_first_text_and_is_not_good() -> None:
    hidden, shown = attrs.evolve(answer(0.0, [], n_asked=50), n_generated=50), answer(0.0, [1.0])
    assert (hidden.ttft_s, attrs.evolve(hidden, is_stream=False).ttft_s) == (None, 0.5)
    figures = summarize(Pass(wall_s=2.0, client_cpu_s=0.0, answers=[hidden, shown]))
    assert (figures.ttft_s.max, figures.goodput_share, figures.n_failed) == (1.0, 0.5, 0)
    assert [line[:26] for line in figures.warnings()] == ["1 answers showed no text: "]


def test_goodput_counts_good_answers_by_time() -> None:
    done = Pass(wall_s=4.0, client_cpu_s=0.0, answers=[answer(0.0, [1.0]), answer(0.0, [3.0]), answer(0.0, [9.0])])
    assert summarize(done, Goal(ttft_s=4.0, itl_s=0.25)).goodput_per_s == 0.5


def test_the_mean_time_between_tokens_is_that_of_tokens_even_if_chunks_hold_several() -> None:
    got = answer(0.0, [1.0, 2.0, 3.0])
    got.n_generated = 5
    assert got.itl_s == 0.5


def test_the_longest_wait_is_that_of_the_others_from_when_the_late_one_was_sent() -> None:
    others = [answer(0.0, [1.0, 4.0, 5.0, 7.5]), answer(0.0, [1.0, 6.0])]
    done = Pass(wall_s=9.0, client_cpu_s=0.0, answers=[*others, answer(5.5, [8.0])])
    figures, all_alike = summarize(done, has_late=True), summarize(done)
    assert figures.late_gap_max_s == 5.0  # it had begun before, and was not over
    # Nobody's percentile lies between the two kinds.
    assert (figures.late_ttft_s, figures.ttft_s.max) == (2.5, 1.0)
    assert (figures.late_e2e_s, figures.e2e_s.max, figures.e2e_s.p50) == (3.0, 8.0, 7.25)
    assert (all_alike.late_ttft_s, all_alike.ttft_s.max, all_alike.late_gap_max_s) == (None, 2.5, None)


def test_answers_to_a_part_of_their_prompt_are_warned_of_and_a_late_one_has_no_times_then() -> None:
    late = attrs.evolve(answer(4.0, [5.0, 6.0]), n_prompt_asked=40)
    figures = summarize(Pass(wall_s=9.0, client_cpu_s=0.0, answers=[answer(0.0, [1.0, 8.0]), late]), has_late=True)
    assert (figures.n_cut, figures.late_ttft_s, figures.late_e2e_s) == (1, None, None)
    (line,) = figures.warnings()
    assert line.startswith("1 answers are to a part of their prompt")


def test_what_a_server_does_not_tell_of_its_prompts_is_not_shown_as_nothing() -> None:
    silent, tells = answer(0.0, [1.0]), attrs.evolve(answer(0.0, [1.0]), n_cached=0)
    shown = {
        name: rows(summarize(Pass(wall_s=1.0, client_cpu_s=0.0, answers=answers)))
        for name, answers in {"nothing": [attrs.evolve(silent, n_prompt=0)], "prompts": [silent], "both": [silent, tells]}.items()
    }
    assert "prompt tokens" not in shown["nothing"]
    assert shown["prompts"]["prompt tokens"] == "10"
    assert "of these not computed" not in shown["prompts"]
    assert shown["both"]["of these not computed"] == "0"


def test_a_late_request_that_came_when_the_others_had_ended_is_warned_of() -> None:
    others = [answer(0.0, [1.0, 4.0]), answer(0.0, [1.0, 6.0])]  # of which the second ends at 6.5
    for sent_at, is_alone in ((6.4, False), (6.5, True)):
        figures = summarize(Pass(wall_s=9.0, client_cpu_s=0.0, answers=[*others, answer(sent_at, [8.0])]), has_late=True)
        assert figures.is_late_alone is is_alone
        assert [line[:16] for line in figures.warnings()] == is_alone * ["the late request"]


def test_a_busy_client_and_tokens_that_nobody_counted_are_warned_of() -> None:
    done = Pass(wall_s=1.0, client_cpu_s=0.71, answers=[answer(0.0, [0.5], counted_by="chunks"), answer(0.0, [0.5])])
    busy, counted = summarize(done).warnings()
    assert busy.startswith("the client took 71% of a core")
    assert counted.startswith("the server reports no usage")


def test_of_tokens_that_nobody_counted_it_is_not_said_that_they_were_as_many_as_asked_or_not() -> None:
    uncounted = answer(0.0, [0.5], n_asked=2, counted_by="chunks")
    figures = summarize(Pass(wall_s=1.0, client_cpu_s=0.0, answers=[uncounted, answer(0.0, [0.5])]))
    assert (figures.n_inexact, figures.n_uncounted, figures.is_exact, figures.page()["is_exact"]) == (0, 1, None, None)
    short = answer(0.0, [0.5], n_asked=2)
    figures = summarize(Pass(wall_s=1.0, client_cpu_s=0.0, answers=[uncounted, short]))
    assert (figures.n_inexact, figures.n_uncounted, figures.is_exact) == (1, 1, False)


@pytest.mark.parametrize("counted_by", ["usage", "chunks"])
def test_who_stops_before_the_tokens_that_were_asked_has_not_as_many_whoever_counts_them(counted_by: str) -> None:
    stopped = answer(0.0, [0.5], n_asked=2, counted_by=counted_by, finish_reason="stop")
    figures = summarize(Pass(wall_s=1.0, client_cpu_s=0.0, answers=[stopped, answer(0.0, [0.5])]))
    assert (figures.n_inexact, figures.n_uncounted, figures.n_stopped) == (1, 0, 1)
    assert any(line.startswith("1 answers ended by themselves") for line in figures.warnings())
    at_the_end = answer(0.0, [0.5], counted_by="chunks", finish_reason="stop")  # whose one chunk may hold several
    assert at_the_end.is_exact is None


def test_a_page_of_figures_is_plain_values() -> None:
    page = summarize(Pass(wall_s=1.0, client_cpu_s=0.5, answers=[answer(0.0, [0.5])]), server_cpu_s=2.0).page()
    assert (page["server_cpu_s"], page["client_cpu_share"], page["ttft_s"]["p50"], page["is_exact"]) == (2.0, 0.5, 0.5, True)
