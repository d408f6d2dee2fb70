"""Pairs of several runs as those of one."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import standings
from benchmarks.figures import FIGURES, compare
from benchmarks.standings import (
    Page,
    best_rows,
    best_side,
    by_pairs,
    compared_by,
    joined,
    key_of,
    median_of,
    of_others,
    promising,
    run_entry,
    unlike,
)

SPEED = next(figure for figure in FIGURES if figure.name == "tokens/s")
GOOD = next(figure for figure in FIGURES if figure.name == "good requests/s")


def side(ratios: list[float], starts: list[int] | None = None, *, setting: str = "-no-kvu", curve: list[float] | None = None) -> Page:
    counts = {name: {"ours": 1, "theirs": 2} for name in ("n_failed", "n_inexact", "n_cached")}
    shares = {"client_cpu_share_max": 0.1 * len(ratios), "idle_cpu_share": 0.01, "idle_cpu_share_ours": 0.02 / len(ratios)}
    return {
        "peer": "llama-server",
        "setting": setting,
        "n_pairs": len(ratios),
        "starts": list(range(len(ratios))) if starts is None else starts,
        "figures": {name: {"ours": [10 * ratio for ratio in ratios], "theirs": [10.0 for _ in ratios]} for name in (SPEED.name, GOOD.name)},
        "passes": {who: [{"wall_s": ratio} for ratio in ratios] for who in ("ours", "theirs")},
        "curves": {who: {"ttft_s": [1.0, 2.0] if curve is None else curve} for who in ("ours", "theirs")},
        **counts,
        **shares,
    }


def run(sides: list[Page], **changes: Any) -> dict[str, Any]:
    settings = dict.fromkeys(standings.ALIKE_SETTINGS, 1) | {"seed": 3, "only": "x"} | changes.pop("settings", {})
    machine = {"processor": "p", "n_cores": 2, "revision": "abc", "libraries": {"llama-cpp-python": "1", "trio": "1"}}
    data = {"sides": sides, "versions": {"llama-server": "v1"}} | changes.pop("data", {})
    return {"date": "2001-02-03", "settings": settings, "machine": machine | changes.pop("machine", {}), "data": data}


def test_the_pairs_of_two_runs_stand_behind_each_other_and_their_starts_are_others() -> None:
    both = joined(side([1.0, 1.1, 1.2], [0, 0, 1]), side([1.3, 1.4], [0, 1]))
    assert (both["n_pairs"], both["starts"]) == (5, [0, 0, 1, 2, 3])
    assert both["figures"]["tokens/s"]["ours"] == [10.0, 11.0, 12.0, 13.0, 14.0]
    assert [one["wall_s"] for one in both["passes"]["theirs"]] == [1.0, 1.1, 1.2, 1.3, 1.4]
    assert both["n_failed"] == {"ours": 2, "theirs": 4}
    assert (both["client_cpu_share_max"], both["idle_cpu_share_ours"]) == pytest.approx((0.3, 0.01))


def test_the_interval_is_over_the_starts_of_both() -> None:
    both = compared_by(joined(side([1.0, 1.1], [0, 0]), side([1.2, 1.3], [0, 1])), "tokens/s")
    assert both == compare([10.0, 11.0, 12.0, 13.0], 4 * [10.0], [0, 0, 1, 2])


def test_of_a_figure_that_grows_from_pass_to_pass_the_first_one_of_each_start_counts() -> None:
    page = side([1.0] * 5, [0, 0, 1, 1, 2])
    page["figures"]["server peak memory, MiB"] = {"ours": [10.0, 11.0, 10.0, 11.0, 10.0], "theirs": [20.0, 40.0, 20.0, 40.0, 20.0]}
    compared = compared_by(page, "server peak memory, MiB")
    assert compared is not None
    assert (compared.ratio, compared.n_pairs, compared.n_below, compared.n_starts) == (pytest.approx(0.5), 3, 3, 3)
    assert median_of(page, "server peak memory, MiB", "theirs") == 20.0
    speed = compared_by(page, "tokens/s")
    assert speed is not None
    assert speed.n_pairs == 5


def test_ours_has_more_good_ones_a_second_for_nothing_where_it_refused_some() -> None:
    page = side([1.5, 1.6, 1.7])
    page["n_failed"] = page["n_inexact"] = {"ours": 0, "theirs": 1}
    assert [row["verdict"] for row in best_rows([page])] == ["win"], "theirs refused one: of what counts those it is compared all the same"
    page["n_failed"] = page["n_inexact"] = {"ours": 1, "theirs": 0}
    assert {row["figure"]: row["verdict"] for row in best_rows([page])} == {SPEED.name: "unclear", GOOD.name: "unclear"}


def test_a_curve_is_the_mean_of_both_in_which_each_pair_counts_once() -> None:
    first, then = side([1.0, 1.0, 1.0], curve=[1.0, 4.0]), side([1.0], curve=[5.0, 8.0])
    assert joined(first, then)["curves"]["ours"]["ttft_s"] == [2.0, 5.0]
    assert joined(first, side([1.0], curve=[]))["curves"]["ours"]["ttft_s"] == [1.0, 4.0]


def test_a_figure_that_only_one_run_has_is_in_none_of_the_pairs() -> None:
    then = side([1.0])
    del then["figures"]["good requests/s"]
    assert set(joined(side([1.0]), then)["figures"]) == {"tokens/s"}


def test_runs_of_the_same_thing_may_stand_together_whatever_revision_and_seed() -> None:
    other = run([], settings={"seed": 4, "only": "y"}, machine={"revision": "def"})
    assert unlike(run([side([1.0])]), other) == []


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"settings": {"n_cells": 2}}, "n_cells"),
        ({"settings": {"rate": 0.5}}, "rate"),
        ({"machine": {"n_cores": 4}}, "n_cores"),
        ({"machine": {"instructions": "avx2"}}, "instructions"),
        ({"machine": {"libraries": {"llama-cpp-python": "2", "trio": "1"}}}, "llama-cpp-python"),
        ({"data": {"versions": {"llama-server": "v2"}}}, "llama-server"),
    ],
)
def test_what_runs_differ_in_is_named(changes: dict[str, Any], name: str) -> None:
    assert unlike(run([side([1.0])]), run([], **changes)) == [name]


def test_another_openvino_matters_to_who_computes_with_it_alone() -> None:
    other = {"libraries": {"llama-cpp-python": "1", "openvino": "1"}}
    assert unlike(run([side([1.0])]), run([], machine=other)) == []
    ours = {"ours": ["--backend=openvino"]}
    assert unlike(run([side([1.0])], settings=ours), run([], settings=ours, machine=other)) == ["openvino"]


def test_tuples_and_long_numbers_are_what_is_read_of_them() -> None:
    kept = run([side([1.0])], settings={"workload": {"n_prompt": [8, 32]}, "rate": 0.123457})
    assert unlike(kept, run([], settings={"workload": {"n_prompt": (8, 32)}, "rate": 0.12345678})) == []


def test_a_run_is_told_by_what_it_added() -> None:
    before = [side([1.0, 1.0]), side([1.0], setting="-kvu")]
    after = [side([1.0, 1.0, 1.0]), side([1.0], setting="-kvu"), side([1.0], setting="-b 32")]
    assert run_entry("d", "r", 1, after, before)["n_pairs"] == {"llama-server (-no-kvu)": 1, "llama-server (-b 32)": 1}


def test_of_settings_that_are_the_same_one_goes_on() -> None:
    both = [side([0.5, 0.5], setting="as it comes"), side([0.4, 0.6]), side([2.0, 2.0], setting="-kvu")]
    for one in both:
        one["n_failed"]["theirs"] = one["n_inexact"]["theirs"] = 0
    assert len(promising(both)) == 1
    both[1]["n_pairs"] = 10
    assert promising(both) == {key_of(both[1])}, "what it has counts"


def test_ours_beside_itself_counts_where_nobody_else_is_there() -> None:
    own, other = side([1.0]) | {"peer": "cllm"}, side([1.0])
    assert of_others([own, other]) == [other]
    assert of_others([own]) == [own]


def test_the_best_is_the_one_beside_which_ours_does_worst() -> None:
    slow, fast = side([2.0, 2.0], setting="slow"), side([0.5, 0.5], setting="fast")
    for one in (slow, fast):
        one["n_failed"]["theirs"] = one["n_inexact"]["theirs"] = 0
    assert best_side([slow, fast], SPEED) is fast
    assert promising([slow, fast]) == {key_of(fast)}
    fast["n_failed"]["theirs"] = fast["n_inexact"]["theirs"] = 1
    assert best_side([slow, fast], SPEED) is slow
    assert best_side([slow, fast], GOOD) is fast, "unanswered requests are no good ones"
    fast["n_inexact"]["theirs"] = 2
    assert best_side([slow, fast], GOOD) is slow, "shorter answers come sooner"


def test_pairs_that_are_added_to_one_setting_leave_those_with_ten_among_the_best() -> None:
    ten, twelve, nine = side(5 * [0.8, 1.1]), side(12 * [1.3], setting="-b 64"), side(9 * [2.0], setting="-kvu")
    for one in (ten, twelve, nine):
        one["n_failed"]["theirs"] = one["n_inexact"]["theirs"] = 0
    assert by_pairs([ten, twelve, nine]) == ([ten, twelve], [nine])
    (row,) = (row for row in best_rows([ten, twelve]) if row["figure"] == SPEED.name)
    assert (row["setting"], row["n_pairs"], row["verdict"]) == ("-no-kvu", 10, "unclear")


def test_where_nobody_has_ten_pairs_all_are_as_many_as_one_has() -> None:
    three, two = side(3 * [1.0]), side(2 * [1.0], setting="-b 64")
    assert by_pairs([three, two]) == ([three], [two])
