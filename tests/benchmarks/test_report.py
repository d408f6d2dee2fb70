from __future__ import annotations

import json
import platform
import re
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from benchmarks import kills, ladder, matches, report, results
from benchmarks.contenders import LLAMA_SERVER_ALIKE, LLAMA_SERVER_SETTINGS, Contender
from benchmarks.figures import FIGURES
from benchmarks.promises import Part, Promise
from benchmarks.reporting.forms import GLANCE_PLOT, number, of_kind, when
from benchmarks.reporting.found import FOUND, WRITTEN_OF, Finding
from benchmarks.reporting.glance import counted_by_setting, is_in_part, standings
from benchmarks.reporting.peers import MAIN_FIGURES, MAIN_OVERLOAD_FIGURES, SIDE_FIGURES, n_settings
from benchmarks.reporting.readme import BEGIN, END, readme_table, with_table
from benchmarks.reporting.stack import client_of_stage
from benchmarks.reporting.words import MACHINES, MENDED, REASONS
from benchmarks.standings import best_rows, median_of
from cllm.bench.answers import Answer, Pass
from cllm.bench.metrics import summarize

ROOT = Path(__file__).parents[2]
NODE, HOME = "node-of-nobody", "/home-of-nobody"
COSTS = {
    "us_per_token": 300.0,
    "us_per_step": 2400.0,
    "spent_us_per_step": {"native": 9000.0, "rest": 1000.0},
    "more_us_per_step": {"native": {"median": 2000.0, "min": -50.0, "max": 2500.0}, "rest": {"median": 400.0, "min": 300.0, "max": 500.0}},
    "waiting_us_per_step": 150.0,
    "client_us_per_step": 2200.0,
}
KILLED = [{"n_under_way": 8, "n_pieces_before": 10, "n_complete": 8, "n_same": 7, "pause_s": 0.5}]


def summary(speed: float) -> dict[str, Any]:
    chunks_at = [1 / speed, 2 / speed, 3 / speed]
    answers = [Answer(n_asked=3, sent_at=0.0, ended_at=3 / speed, status=200, chunks_at=chunks_at, n_generated=3, counted_by="usage")]
    return summarize(Pass(wall_s=3 / speed, client_cpu_s=0.01, answers=answers), server_cpu_s=1.0, rss_peak_mb=100.0).page()


def side(setting: str, speed: float, n_pairs: int = 3, *, idle_ours: float = 0.0) -> matches.Side:
    ours = [summary(10.0 + pair) for pair in range(n_pairs)]
    theirs = [summary(speed * (10.0 + pair)) for pair in range(n_pairs)]
    curves = {"ttft_s": [0.1, 0.2], "itl_s": [0.1, 0.3], "e2e_s": [0.3, 0.4]}
    return matches.Side(
        contender=Contender(peer="llama-server", setting=setting, command=()),
        ours=ours,
        theirs=theirs,
        curves={"ours": [curves] * n_pairs, "theirs": [curves] * n_pairs},
        starts=list(range(n_pairs)),
        idle_cpu_shares={"ours": [idle_ours] * n_pairs, "theirs": [0.0] * n_pairs},
    )


def stage(number: int, name: str, speed: float, **more: Any) -> dict[str, Any]:
    return {"number": number, "name": name, "tokens_per_s": [speed, speed + 1], "ratios": [speed / 100, speed / 100], **more}


def stack_data(stages: list[dict[str, Any]]) -> dict[str, Any]:
    step = {"model_ms": 2.1, "sample_ms": 5.25, "rest_ms": 0.5}
    requests = {"requests_per_s": {"median": 900.0}, "cpu_us_per_request": {"median": 850.0}}
    profile = {
        "streams": 64,
        "tokens_per_s": 30000.0,
        "us_by_part": {"engine": 6.5, "the kernel's send": 5.5},
        "functions": [{"us": 5.5, "calls": 1.01, "name": "send"}, {"us": 2.125, "calls": 1.0, "name": "engine/scheduler.py:1 _accept"}],
    }
    stages = [{**one, "cpu_us_per_token": {"median": 9.0 - one["number"], "min": 1.0, "max": 10.0}} for one in stages]
    return {"rungs": [{"streams": 64, "stages": stages, "step": step, **requests}], "profile": profile, "reading_ms": 0.975}


def promised() -> dict[str, Any]:
    figures = {
        "rate": 8.0,
        "goodput_per_s": 1.5,
        "requests_per_s": 2.0,
        "tokens_per_s": 80.0,
        "ttft_s": {"p90": 3.0},
        "itl_s": {"p99": None},
    }
    promise = Promise(workload="overload", figure="good requests", value=0.85, bound=0.9, is_least=True)
    details = {"capacity_per_s": 2.0, "goal": {"ttft_s": 4.0, "itl_s": 0.25}, "passes": [{"factor": 4.0, **figures}]}
    return Part([promise], details).page()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:  # a machine's own name, or its owner's, may be a part of any word
        patch.setattr(platform, "node", lambda: NODE)
        patch.setenv("HOME", HOME)
        write_results(tmp_path)
    return tmp_path


def write_results(folder: Path) -> None:
    stages = [stage(0, "native", 100.0, spent_us_per_step={"native": 9990.0, "rest": 10.0}), stage(7, "sse", 97.0, **COSTS)]
    spreads = {"us_per_step_spread": {"median": 80.0, "min": -20.0, "max": 90.0}, "beside": "loop"}
    stages.append(stage(9, "isolated", 98.0, us_per_token=10.0, us_per_step=80.0, **spreads))
    results.write("ladder", "seed-40x8", {"threads": 2}, {"rungs": [{"concurrency": 8, "stages": stages}]}, folder)
    results.write("kills", "exact", {"rounds": 20}, kills.data_of(KILLED * 20, 2.0, {}), folder)
    results.write("stack", "instant", {}, stack_data(stages), folder)
    results.write("promises", "overload", {"seed": 1}, promised(), folder)
    data = matches.page([side("as it comes", 0.5), side("-b 64", 2.0), side("-b 32", 0.9, n_pairs=1)])
    results.write(
        "peers", "seed-40x8", {"rate": None}, {**data, "not_found": ["ollama"], "versions": {"llama-server": "version: 6700"}}, folder
    )


def test_every_figure_of_ours_stands_against_the_best_of_the_others_that_ran_to_the_end(folder: Path) -> None:
    (run,) = of_kind(results.read_all(folder), "peers")
    speed = next(row for row in run["data"]["best"] if row["figure"] == "tokens/s")
    assert (speed["setting"], speed["ratio"], speed["verdict"], speed["n_pairs"]) == ("-b 64", 0.5, "loss", 3)
    wait = next(row for row in run["data"]["best"] if row["figure"] == "first text p50, ms")
    assert (wait["setting"], wait["ratio"], wait["verdict"]) == ("-b 64", 2.0, "loss")


def test_a_peer_that_left_requests_unanswered_is_not_compared() -> None:
    failing, other = side("fast", 2.0), side("slow", 0.5)
    failing.theirs[0]["n_failed"] = 1
    data = matches.page([failing, other])
    assert {row["setting"] for row in data["best"] if not row["figure"].startswith("good")} == {"slow"}
    assert [one["n_failed"]["theirs"] for one in data["sides"]] == [1, 0]


def test_a_peer_that_says_less_than_was_asked_is_not_compared_either_and_the_page_says_so() -> None:
    short, other = side("fast", 2.0), side("slow", 0.5)
    short.theirs[0]["n_inexact"] = 3
    data = matches.page([short, other])
    assert {row["setting"] for row in data["best"]} == {"slow"}, "good ones come sooner where they are shorter"
    told = "llama-server fast answered 3 requests with other than as many tokens as were asked: nothing of it is compared."
    assert told in report.page([run_of(data)])


def test_by_what_counts_unanswered_requests_it_is_compared_and_the_page_says_so() -> None:
    failing, other = side("fast", 2.0), side("slow", 0.5)
    failing.theirs[0]["n_failed"] = 1
    for one in (failing, other):
        for summary in (*one.ours, *one.theirs):
            summary["goodput_per_s"] = summary["tokens_per_s"]
    data = matches.page([failing, other])
    assert {row["figure"] for row in data["best"] if row["setting"] == "fast"} == {"good requests/s", "good requests, share"}
    assert "llama-server fast left 1 requests unanswered: only what counts those is compared." in report.page([run_of(data)])


@pytest.mark.parametrize(("speed", "verdict"), [(0.5, "unclear: 2 requests of ours were not answered as asked"), (2.0, "missed")])
def test_what_ours_left_unanswered_keeps_no_promise_and_what_is_missed_in_spite_of_that_is_missed(speed: float, verdict: str) -> None:
    one = side("-no-kvu", speed)
    one.ours[0]["n_failed"] = 2
    run = {**run_of(matches.page([one])), "settings": {"workload": {"name": "seed-40x8"}}}
    assert f" | at least 1.05 | {verdict} |" in report.page([run])


def test_pairs_of_several_runs_are_told_to_be_and_those_of_one_are_not() -> None:
    entries = [
        {"date": "2001-02-03", "revision": name, "seed": 1, "n_pairs": {"llama-server (slow)": n}} for name, n in (("abc", 2), ("def", 1))
    ]
    data = matches.page([side("slow", 0.5)])
    told = report.page([run_of({**data, "runs": entries})])
    assert "- 2001-02-03, revision abc, seed 1: 2 beside llama-server (slow)\n" in told
    assert "- 2001-02-03, revision def, seed 1: 1 beside llama-server (slow)\n" in told
    for one in ({**data, "runs": entries[:1]}, data):
        assert "revision abc" not in report.page([run_of(one)])


def test_a_server_that_computes_while_the_other_is_measured_is_told_of() -> None:
    assert "while the other was measured" not in report.page([run_of(matches.page([side("calm", 1.0)]))])
    told = report.page([run_of(matches.page([side("busy", 1.0, idle_ours=0.05)]))])
    assert "Beside llama-server busy, while the other was measured, ours took 5.0% of a core." in told


def test_the_best_is_said_to_be_of_those_that_had_all_pairs() -> None:
    page = report.page([run_of(matches.page([side("a", 2.0), side("b", 1.0), side("dropped", 0.5, n_pairs=1)]))])
    assert "Each figure beside the best of 2 settings, 1 more having had 1 of 3 pairs:\n" in page
    page = report.page([run_of({**matches.page([side("a", 2.0), side("b", 0.5, n_pairs=1)]), "unfinished": ["llama-server (b)"]})])
    assert "Each figure beside the best of 1 setting, 1 more having had 1 of 3 pairs, when the run was ended:\n" in page
    assert "The run was ended before all pairs were made: llama-server (b)." in page


def test_the_page_has_every_run_with_its_circumstances(folder: Path) -> None:
    page = report.page(results.read_all(folder))
    assert "8 at a time:" in page
    assert "64 streams:" in page
    assert "| 7 | sse | 97.5 (97 to 98) | 300 | 2400 | 9000 | 0.900 | 150 | - | 2200 | 0.970 (0.970 to 0.970) |" in page
    where = "A step took more: 2000 (-50 to 2500) us in llama.cpp, 400 (300 to 500) us beside these."
    assert (
        "- sse, 3.0 % off native (off: 3.0 % to 3.0 %); outside llama.cpp a step took 4.0 % more: all that lies between, backend, " in page
    )
    assert f", sse. {where} What was done about each" in page
    assert "| 9 | isolated, over loop | 98.5 (98 to 99) | 10 | 80 (-20 to 90) |" in page
    assert "Not found on this machine: ollama." in page
    assert "What was beside us: llama-server, version: 6700." in page
    assert "| exact | 20 | 160 of 160 | 140 of 160 | 0.5 | 0.5 |" in page
    assert "threads 2" in page
    assert "| overload | overload | good requests | 0.85 | at least 0.9 | missed |" in page
    assert "| 4 | 8 | 1.5 | 2 | 80 | 3 | - |" in page


def test_how_many_texts_company_alone_changes_stands_where_a_run_has_it(folder: Path) -> None:
    unkilled = {"n_streams_unkilled": 24, "n_same_unkilled": 20}
    results.write("kills", "file", {}, kills.data_of(KILLED * 20, 2.0, unkilled), folder)
    page = report.page(results.read_all(folder))
    assert "| exact | 20 | 160 of 160 | 140 of 160 | - | 0.5 | 0.5 |" in page
    assert "| file | 20 | 160 of 160 | 140 of 160 | 20 of 24 | 0.5 | 0.5 |" in page


def test_how_far_a_backend_is_from_the_reference_stands_by_model_and_options(tmp_path: Path) -> None:
    figures = {"n_rows": 400, "mean": 0.000181, "p50": 1e-4, "p99": 0.001, "max": 0.0123, "top1_agreement": 0.9975}
    rows = [{"options": options, **figures} for options in ("as it comes", "precision=f32")]
    settings = {"model": {"file": "small-Q8_0.gguf", "size_bytes": 1}}
    results.write("verify", "openvino-small", settings, {"backend": "openvino", "reference": "llama-cpu", "rows": rows}, tmp_path)
    page = report.page(results.read_all(tmp_path))
    for options in ("as it comes", "precision=f32"):
        assert f"| small-Q8_0.gguf | openvino | {options} | 0.000181 | 0.0123 | 99.8% | 400 |" in page


def test_the_main_figures_of_all_comparisons_stand_together_before_each_with_its_pairs(folder: Path) -> None:
    slow = matches.page([side("as it comes", 0.5)])
    results.write("peers", "another", {"ours": ["--backend=other"]}, {**slow, "not_found": []}, folder)
    page = report.page(results.read_all(folder)).partition("## Beside other servers")[2]
    summary = page.partition("### ")[0]
    counts = "cLLM told only what every server is: loss 7. With other options, as another backend: win 7"
    assert f"({counts})" in summary
    names = [line.split(" | ")[0].removeprefix("| ") for line in summary.splitlines() if line.startswith("| ")][2:]
    assert names == ["seed-40x8"] * 7 + ["another"] * 7  # ours without further options goes first
    assert "| another | tokens/s | 11 | 5.5 | 2.000 (2.000 to 2.000) | win | llama-server as it comes | 3 of 3 | 1 |" in summary
    assert (
        "| seed-40x8 | tokens/s | 11 | 22 | 0.500 (0.500 to 0.500) | loss | llama-server -b 64 | 0 of 3 | 2, 1 more in fewer pairs |"
        in summary
    )


@pytest.mark.parametrize("workload", ["seed-40x8", "seed-160x5", "mixed", "mixed-small"])
def test_more_tokens_are_promised_of_short_and_of_mixed_prompts(workload: str) -> None:
    run = {**run_of(matches.page([side("-b 64", 0.5)])), "settings": {"workload": {"name": workload}}}
    assert "| x | tokens/s | the only setting measured | 2.000 (2.000 to 2.000) | at least 1.05 | kept |" in report.page([run])


@pytest.mark.parametrize(("speed", "verdicts"), [(0.5, ["kept", "missed"]), (0.6, ["missed", "missed"])])
def test_what_was_promised_beside_others_is_held_against_the_best_of_their_settings(
    speed: float, verdicts: list[str], tmp_path: Path
) -> None:
    data = {**matches.page([side("as it comes", speed), side("-b 32", 0.4)]), "not_found": []}
    for name, options in (("ours", []), ("another", ["--backend=other"])):  # another engine has promised nothing
        results.write("peers", name, {"workload": {"name": "shared-prefix"}, "ours": options}, data, tmp_path)
    table = report.page(results.read_all(tmp_path)).partition("What was promised of these:")[2].partition("### ")[0]
    lines = [line for line in table.splitlines() if line.startswith(("| ours", "| another"))]
    assert [line.split(" | ")[1] for line in lines] == ["tokens/s", "first text p90, ms"]
    assert [line.split(" | ")[4:] for line in lines] == [
        ["at least 2", f"{verdicts[0]} |"],
        ["at most 0.25", f"{verdicts[1]} |"],
    ]


def test_their_default_alone_is_held_to_what_was_promised_beside_it_and_is_not_the_best_of_their_settings(tmp_path: Path) -> None:
    data = {**matches.page([side("as it comes", 0.2)]), "not_found": []}
    results.write("peers", "default", {"workload": {"name": "mixed-small"}}, data, tmp_path)
    table = report.page(results.read_all(tmp_path)).partition("What was promised of these:")[2].partition("### ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| default")]
    assert lines == ["| default | between texts p99, ms | llama-server as it comes | 0.200 (0.200 to 0.200) | at most 0.25 | kept |"]


def test_any_other_setting_alone_is_held_to_what_was_promised_beside_the_best_of_them(tmp_path: Path) -> None:
    data = {**matches.page([side("-no-kvu", 0.96)]), "not_found": []}
    results.write("peers", "alone", {"workload": {"name": "mixed"}}, data, tmp_path)
    table = report.page(results.read_all(tmp_path)).partition("What was promised of these:")[2].partition("### ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| alone")]
    assert lines == [
        "| alone | tokens/s | the only setting measured | 1.042 (1.042 to 1.042) | at least 1.05 | missed |",
        "| alone | between texts p99, ms | the only setting measured | 0.960 (0.960 to 0.960) | at most 0.75 | missed |",
        "| alone | between texts p99, ms | llama-server as it comes, which is -no-kvu | 0.960 (0.960 to 0.960) | at most 0.25 | missed |",
    ]


def test_what_was_promised_beside_their_default_is_not_measured_where_no_run_has_it(tmp_path: Path) -> None:
    results.write("peers", "alone", {"workload": {"name": "mixed"}}, {**matches.page([side("-b 64", 0.5)]), "not_found": []}, tmp_path)
    page = report.page(results.read_all(tmp_path))
    assert "| alone | between texts p99, ms | llama-server as it comes | - | at most 0.25 | not measured |" in page


def test_what_has_two_names_is_one_setting() -> None:
    sides = matches.page([side("-no-kvu", 0.5), side("as it comes", 2.0, n_pairs=1), side("-b 64", 0.4, n_pairs=1)])["sides"]
    assert {row["verdict"] for row in best_rows(sides) if row["figure"] == "tokens/s"} == {"win"}, (
        "it was better in fewer pairs of the same"
    )
    assert n_settings({"sides": sides}) == "1 setting, 1 more having had 1 of 3 pairs"


def test_whom_more_pairs_were_added_to_is_one_of_those_with_ten() -> None:
    sides = matches.page([side("-no-kvu", 0.5, n_pairs=12), side("-b 32", 0.4, n_pairs=10), side("-b 64", 0.4, n_pairs=2)])["sides"]
    assert n_settings({"sides": sides}) == "2 settings, 1 more having had 2 of 10 pairs"


def test_who_is_worse_than_one_of_them_for_sure_is_worse_than_the_best_of_them_though_that_one_varies() -> None:
    unsteady = side("-b 32", 1.0)
    unsteady.theirs = [summary(speed * (10.0 + pair)) for pair, speed in enumerate((0.8, 1.2, 3.0))]
    (row,) = [row for row in best_rows(matches.page([unsteady, side("-no-kvu", 1.1)])["sides"]) if row["figure"] == "tokens/s"]
    assert (row["setting"], row["verdict"]) == ("-no-kvu", "loss")
    (row,) = [row for row in best_rows(matches.page([unsteady, side("-no-kvu", 0.9)])["sides"]) if row["figure"] == "tokens/s"]
    assert (row["setting"], row["verdict"]) == ("-b 32", "unclear")
    sides = matches.page([side("-no-kvu", 0.5, n_pairs=4), side("-b 64", 1.5, n_pairs=3)])["sides"]
    (row,) = [row for row in best_rows(sides) if row["figure"] == "tokens/s"]
    assert (row["setting"], row["verdict"]) == ("-b 64", "loss"), "by the three starts that it had"


def test_a_run_that_was_ended_early_is_marked_where_a_setting_would_have_gone_on() -> None:
    fewer = [side(name, 0.5, n_pairs=1) for name in LLAMA_SERVER_SETTINGS if name != "-no-kvu"]
    data = {**matches.page([side("-no-kvu", 0.5), *fewer]), "unfinished": ["llama-server (as it comes)"]}
    assert not is_in_part(run_of(data)), "which is measured under its other name"
    assert is_in_part(run_of({**data, "unfinished": ["llama-server (-b 64)"]}))
    assert {one.run for one in standings([run_of({**data, "unfinished": ["llama-server (-b 64)"]})])} == {"x*"}


def test_a_run_in_which_a_setting_leads_in_the_fewer_pairs_that_it_has_is_marked() -> None:
    *others, last = [name for name in LLAMA_SERVER_SETTINGS if name != "-no-kvu"]
    left = [side(name, 0.4, n_pairs=1) for name in others]
    for speed, is_ahead in ((0.4, False), (0.6, True)):
        run = run_of(dict(matches.page([side("-no-kvu", 0.5), *left, side(last, speed, n_pairs=1)])))
        assert is_in_part(run) is is_ahead


def test_what_each_of_several_runs_had_is_told_of_each() -> None:
    runs = [{"date": "2026-11-2", "revision": str(i), "seed": 70 + i, "n_pairs": {"llama-server (a)": 2}} for i in range(2)]
    run = run_of({**matches.page([side("a", 0.5)]), "runs": runs})
    run["settings"] |= {"only": "-no-kvu", "seed": 71}
    page = report.page([run])
    assert "revision 0, seed 70: 2 beside llama-server (a)" in page
    assert "only -no-kvu" not in page


def test_what_was_promised_is_kept_by_the_mean_alone_where_the_interval_has_the_bound_in_it(tmp_path: Path) -> None:
    unsteady = side("-no-kvu", 1.0)
    unsteady.ours = [summary(speed) for speed in (9.0, 16.0, 12.0)]
    settings = {"workload": {"name": "seed-40x8", "n_requests": 16, "concurrency": 8}}
    results.write("peers", "seed", settings, {**matches.page([unsteady]), "not_found": []}, tmp_path)
    page = report.page(results.read_all(tmp_path))
    (line,) = [line for line in page.partition("What was promised of these:")[2].splitlines() if line.startswith("| seed")]
    assert line.startswith("| seed, 16 requests | tokens/s | the only setting measured | 1.094 (")
    assert line.endswith("| at least 1.05 | kept, by the mean alone |")


@pytest.mark.parametrize(("theirs", "verdict"), [(0.99, "unclear: beside another one, in fewer pairs, it was not"), (0.6, "kept")])
def test_a_promise_is_not_kept_beside_a_setting_that_was_better_in_fewer_pairs(tmp_path: Path, theirs: float, verdict: str) -> None:
    settings = {"workload": {"name": "seed-40x8", "n_requests": 40, "concurrency": 8}}
    data = {**matches.page([side("a", 0.5), side("b", theirs, n_pairs=1)]), "not_found": []}
    results.write("peers", "seed", settings, data, tmp_path)
    page = report.page(results.read_all(tmp_path))
    (line,) = [line for line in page.partition("What was promised of these:")[2].splitlines() if line.startswith("| seed")]
    assert line.endswith(f"| at least 1.05 | {verdict} |")


@pytest.mark.parametrize(
    ("workload", "told"),
    [
        ({"name": "chat-turns", "n_requests": 8, "concurrency": 8, "n_turns": 6}, "8 conversations of 6 turns"),
        ({"name": "long-among-short", "n_requests": 7, "concurrency": 7, "n_prompt_late": 4096}, "7 requests and a long one"),
        ({"name": "mixed", "n_requests": 32, "concurrency": 8, "n_turns": 1, "n_prompt_late": 0}, "32 requests"),
    ],
)
def test_what_a_pass_had_is_told_as_what_it_was(tmp_path: Path, workload: dict[str, Any], told: str) -> None:
    results.write("peers", "once", {"workload": workload}, {**matches.page([side("-no-kvu", 0.5)]), "not_found": []}, tmp_path)
    runs = results.read_all(tmp_path)
    assert f"| once, {told} |" in readme_table(runs)
    assert f"workload {workload['name']} ({told}, {workload['concurrency']} at a time)" in report.page(runs)


def test_of_a_single_pair_no_interval_is_told_and_nothing_is_said(tmp_path: Path) -> None:
    results.write("peers", "once", {}, {**matches.page([side("-no-kvu", 0.5, n_pairs=1)]), "not_found": []}, tmp_path)
    page = report.page(results.read_all(tmp_path))
    assert "| once | tokens/s | 10 | 5 | 2.000 | unclear | llama-server -no-kvu | 1 of 1 | 1 |" in page


def test_of_a_long_prompt_among_short_ones_its_own_first_text_is_a_main_figure(tmp_path: Path) -> None:
    one = side("-no-kvu", 0.5)
    for speed, passes in ((2.0, one.ours), (1.0, one.theirs)):
        for summary in passes:
            summary["late_ttft_s"] = speed
    settings = {"workload": {"name": "long-among-short", "n_requests": 7, "concurrency": 7, "n_prompt_late": 4096}}
    results.write("peers", "long", settings, {**matches.page([one]), "not_found": []}, tmp_path)
    runs = results.read_all(tmp_path)
    assert "| long, 7 requests and a long one (its first text: *0.50*) |" in readme_table(runs)
    told = "| first text of the late one, ms | 2000 | 1000 | 2.000 (2.000 to 2.000) | loss |"
    assert report.page(runs).count(told) == 2, "among the main figures, and in the run's own table"


def test_nothing_is_won_at_what_a_setting_with_fewer_pairs_leads_at() -> None:
    for theirs, verdict in ((2.0, "unclear"), (0.6, "unclear"), (0.4, "win")):
        page = report.page([run_of(matches.page([side("a", 0.5), side("b", theirs, n_pairs=1)]))])
        assert f"| tokens/s | 11 | 5.5 | 2.000 (2.000 to 2.000) | {verdict} | llama-server a" in page


def test_what_a_setting_with_fewer_pairs_leads_at_is_won_where_it_is_won_beside_that_one_too() -> None:
    for n_pairs, verdict in ((2, "unclear"), (3, "win")):
        sides = matches.page([side("-no-kvu", 0.5, n_pairs=4), side("-b 64", 0.8, n_pairs=n_pairs)])["sides"]
        assert {(row["setting"], row["verdict"]) for row in best_rows(sides) if row["figure"] == "tokens/s"} == {("-no-kvu", verdict)}


def test_the_page_begins_with_who_is_faster_at_what(folder: Path) -> None:
    page = report.page(results.read_all(folder))
    glance = page.partition("## At a glance")[2].partition("## ")[0]
    assert "- seed-40x8, 8 at a time: sse comes to 0.970 by the median" in glance
    assert "| tokens/s, or good requests/s of overloads |  | seed-40x8* 0.50 |  |" in glance
    assert "| first text p50 |  | seed-40x8* 0.50 |  |" in glance, "twice as long is half as good"
    assert f"]({GLANCE_PLOT})" in glance


def test_each_setting_is_told_by_itself_where_it_has_all_pairs() -> None:
    """Beside the slow one alone ours is better at all; beside the best at each figure, at nothing."""
    slow, fast, short = side("-no-kvu", 0.5), side("-b 64", 2.0), side("-b 32", 2.0, n_pairs=1)
    runs = [run_of(matches.page([slow, fast, short])) for _ in range(2)]
    for page in (report.page(runs), readme_table(runs)):
        assert "| llama-server (-no-kvu) | 2 | 2 / 0 / 0 | 6 / 0 / 0 | 6 / 0 / 0 | 0 / 0 / 2 |" in page
        assert "| llama-server (-b 64) | 2 | 0 / 2 / 0 | 0 / 6 / 0 | 0 / 6 / 0 | 0 / 0 / 2 |" in page
        assert "| llama-server (-b 32) | " not in page


def test_what_was_compared_with_all_settings_has_no_mark() -> None:
    sides = [side(setting, 0.5) for setting in LLAMA_SERVER_SETTINGS]
    assert "| x 2.00 |" in report.page([run_of(matches.page(sides))])
    assert "| x* 2.00 |" in report.page([run_of(matches.page([one for one in sides if one.contender.setting != "-b 64"]))])
    for alike in LLAMA_SERVER_ALIKE:
        assert "| x 2.00 |" in report.page([run_of(matches.page([one for one in sides if one.contender.setting != alike]))])


def test_libraries_that_runs_share_are_told_once() -> None:
    libraries = ({"trio": "1", "numpy": "1"}, {"trio": "1", "numpy": "1"}, {"trio": "2", "openvino": "5"})
    runs = [run_of(matches.page([side("a", 0.5)])) for _ in libraries]
    for run, own in zip(runs, libraries, strict=True):
        run["machine"] = {**run["machine"], "libraries": own}
    page = report.page(runs)
    assert "names no other version: trio 1, numpy 1, openvino 5.\n" in page
    assert page.count("trio 1") == page.count("; trio 2. Settings") == 1


def test_settings_that_were_left_out_are_named_and_so_is_one_that_ended_early(tmp_path: Path) -> None:
    ended, refused = side("-no-kvu", 0.5), side("-kvu", 0.5, n_pairs=0)
    ended.fault, refused.fault = "it has died", "no room"
    results.write("peers", "few", {}, {**matches.page([ended, refused]), "not_found": []}, tmp_path)
    page = report.page(results.read_all(tmp_path))
    assert "Ended early: llama-server (-no-kvu): it has died" in page
    assert "Not measured: llama-server (-kvu): no room" in page
    assert "Settings that were not asked for: as it comes, -b 32, -b 64, -kvu -b 64, no prompt cache." in page


def test_what_bounds_a_missed_promise_stands_beside_it(tmp_path: Path) -> None:
    alone = {"usual_s": 0.1, "usual_p99_s": 0.11, "usual_max_s": 1.5, "before_s": 0.09}
    turn = {"cells": "a pool", **alone, "beside_p50_s": 0.15, "beside_p99_s": 0.2, "longest_s": 0.4, "late_ttft_s": 9.0}
    times = {"p50": 0.15, "p90": 0.2, "p99": 0.3, "max": 3.5}
    keys = {f"{name}_s": times for name in ("step", "ttft_alone", "ttft_beside")}
    for name, details in (("long", {"turns": [turn]}), ("two-keys", keys)):
        results.write("promises", name, {}, {"promises": [], "details": details}, tmp_path)
    page = report.page(results.read_all(tmp_path))
    assert "| 1, a pool | 0.1 | 0.11 | 1.5 | 0.09 | 0.15 | 0.2 | 0.4 | 9 |" in page
    assert "| first text, beside the flood | 0.15 | 0.2 | 0.3 | 3.5 |" in page


def test_a_ladder_says_how_many_requests_a_turn_had(tmp_path: Path) -> None:
    rungs = [{"concurrency": 8, "stages": [stage(0, "native", 100.0), stage(7, "sse", 97.0, **COSTS)]}]
    results.write("ladder", "seed-c8", {"requests": 16}, {"rungs": rungs}, tmp_path)
    runs = results.read_all(tmp_path)
    assert "ratio to the first: seed-c8, 16 requests a turn, 8 at a time; 20" in report.page(runs)
    assert "| seed-c8, 16 requests a turn, 8 at a time |" in readme_table(runs)


def test_every_setting_says_what_was_won_and_lost_beside_it_and_in_how_many_pairs(folder: Path) -> None:
    page = report.page(results.read_all(folder))
    assert "| llama-server -b 64 | 3 | 22 / 11 loss |" in page
    assert "| llama-server as it comes | 3 | 5.5 / 11 win |" in page
    assert "| llama-server -b 32 | 1 | 9 / 10 unclear |" in page


def test_a_peer_that_failed_is_neither_better_nor_worse() -> None:
    failing = side("fast", 2.0)
    failing.theirs[0]["n_failed"] = 1
    assert "| llama-server fast | 3 | 22 / 11 |" in report.page([run_of(matches.page([failing]))])


def test_a_client_that_may_be_what_limits_the_figures_is_told_of() -> None:
    busy = side("-b 64", 2.0)
    busy.ours[1]["client_cpu_share"] = 0.71
    page = report.page([run_of(matches.page([busy, side("-b 32", 2.0)]))])
    assert "Beside llama-server -b 64 the client took up to 71% of a core" in page
    assert page.count("limits these figures") == 1


def run_of(data: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "peers", "name": "x", "date": "today", "machine": results.machine(), "settings": {}, "data": data}


@pytest.mark.parametrize(
    ("instructions", "told"),
    [("avx2 fma avx512f amx_int8", ", AMX"), ("avx2 fma avx512f", ", AVX-512"), ("avx2 fma", ", AVX2"), (None, "")],
)
def test_a_row_names_the_widest_instructions_of_its_machine(instructions: str | None, told: str) -> None:
    machine = {} if instructions is None else {"instructions": instructions}
    assert when({"date": "2026-11-28", "machine": machine, "data": {}}) == f"2026-11-28{told}"


def test_a_row_whose_pairs_are_of_several_days_says_from_when_to_when_they_are() -> None:
    run = {**run_of({"runs": [{"date": day} for day in ("2026-11-29", "2026-11-27", "2026-11-30")]}), "date": "2026-11-30"}
    assert when({**run, "machine": {}}) == "2026-11-27 to 2026-11-30"
    assert when({**run, "machine": {}, "data": {"runs": [{"date": "2026-11-30"}]}}) == "2026-11-30"


def test_readmes_table_is_renewed_between_its_markers(folder: Path) -> None:
    runs = results.read_all(folder)
    text = f"before\n{BEGIN}\nstale\n{END}\nafter\n"
    new = with_table(text, runs)
    assert new.startswith("before\n")
    assert new.endswith("\nafter\n")
    assert "stale" not in new
    assert "| seed-40x8, 8 at a time | 100 | 97.5 | 0.970 |" in new
    assert "| seed-40x8 | 11 / 22 | *0.50* | *0.50* | " in new
    assert " | llama-server, 3 settings, 1 of them in fewer pairs | 3 (3) |" in new
    assert with_table(new, runs) == new


def test_a_comparison_with_unanswered_requests_stands_in_readme_by_its_good_ones() -> None:
    uneven = side("as it comes", 2.0)
    for one in uneven.theirs:
        one["n_failed"] = one["n_inexact"] = 1
    new = with_table(f"{BEGIN}\n{END}\n", [run_of(matches.page([uneven]))])
    assert " | llama-server as it comes | 3 (3) |" in new
    assert f"| x | {number(median_of(matches.page([uneven])['sides'][0], 'good requests/s', 'ours'))} / " in new
    assert "At a glance" not in report.page([run_of(matches.page([uneven]))]), "there is no speed to compare"


def test_a_comparison_with_shorter_answers_does_not_stand_in_readme() -> None:
    short = side("as it comes", 2.0)
    for one in short.theirs:
        one["n_inexact"] = 1
    assert "as it comes" not in with_table(f"{BEGIN}\n{END}\n", [run_of(matches.page([short]))])


def test_shorter_answers_of_ours_win_nothing_by_being_quick() -> None:
    short = side("as it comes", 0.5)
    for one in short.ours:
        one["n_inexact"] = 1
    assert {row["verdict"] for row in matches.page([short])["best"]} == {"unclear"}


def test_a_promise_about_llama_server_is_not_kept_beside_another() -> None:
    other = side("as it comes", 0.5)
    other.contender = attrs.evolve(other.contender, peer="llama-cpp-python")
    run = {**run_of(matches.page([other])), "settings": {"workload": {"name": "seed-40x8"}}}
    assert "What was promised" not in report.page([run])


def test_what_is_kept_has_what_the_report_must_show() -> None:
    runs = results.read_all()
    shown = {
        rung["concurrency"]
        for run in runs
        if run["kind"] == "ladder" and run["settings"]["requests"] >= 12
        for rung in run["data"]["rungs"]
        if {"native", "backend", "sampling", "engine", "loop", "app", "http", "sse", "client"}
        <= {stage["name"] for stage in rung["stages"]}
    }
    assert shown >= {1, 8, 16}
    (instant,) = [run for run in runs if (run["kind"], run["name"]) == ("stack", "instant")]
    assert {rung["streams"] for rung in instant["data"]["rungs"]} >= {1, 8, 64, 256}
    assert instant["data"]["profile"]


@pytest.mark.parametrize(("share", "says"), [(0.35, False), (0.8, True)])
def test_a_stage_whose_client_may_be_what_limits_it_is_told_of(share: float, says: bool) -> None:
    assert ("limits these figures" in client_of_stage({"name": "sse", "client_cpu_share": share})) is says


def test_a_readme_without_markers_is_refused_before_anything_is_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readme, page = tmp_path / "README.md", tmp_path / "report.md"
    readme.write_text("nothing")
    with pytest.raises(SystemExit):
        report.main(["--results", str(folder), "--page", str(page), "--readme", str(readme), "--no-plots"])
    assert "README has no markers" in capsys.readouterr().err
    assert not page.exists()


def test_who_renews_a_run_reads_what_is_said_of_it_here_and_in_readme() -> None:
    measured = {f"{run['kind']}-{run['name']}": f"{run['date']} {run['machine']['revision']}" for run in results.read_all()}
    assert measured == WRITTEN_OF, "read benchmarks/reporting/found.py and README again beside what was measured, then renew WRITTEN_OF"


def test_what_was_found_stands_before_the_runs_that_it_was_found_in(folder: Path) -> None:
    of_kept, of_others = report.page(results.read_all()), report.page(results.read_all(folder))
    for finding in FOUND:
        assert finding.text in of_kept
        assert finding.text not in of_others
        own = of_kept.partition(f"### {finding.title}\n\n{finding.text}")[2].partition("\n### ")[0].partition("\n## ")[0]
        assert [line.removeprefix("#### ") for line in own.splitlines() if line.startswith("#### ")] == [*finding.of] * bool(finding.title)
    assert MACHINES in of_kept
    assert MACHINES not in of_others


@pytest.mark.parametrize("finding", FOUND, ids=lambda finding: finding.title or finding.kind)
def test_what_was_found_is_said_of_no_other_runs(finding: Finding) -> None:
    kept = results.read_all()
    assert finding.holds_of(kept)
    for name in finding.names:
        kind, _, rest = name.partition("-")
        (run,) = (run for run in kept if (run["kind"], run["name"]) == (kind, rest))
        others = [other for other in kept if other is not run]
        assert not finding.holds_of(others)
        assert not finding.holds_of([{**run, "date": "today"}, *others])


def test_a_run_of_which_nothing_is_said_stands_behind_those_that_have_their_finding() -> None:
    kept = results.read_all()
    (alike,) = (run for run in kept if (run["kind"], run["name"]) == ("peers", "shared-prefix"))
    page = report.page([{**alike, "name": "another"}, *kept]).partition("## Beside other servers")[2].partition("\n## ")[0]
    assert page.index("#### another\n") > page.index("\n### Others\n") > page.index("#### shared-prefix\n")


def test_the_command_writes_page_table_and_plots(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra [bench]")
    readme, page = tmp_path / "README.md", tmp_path / "out" / "report.md"
    readme.write_text(f"{BEGIN}\n{END}\n")
    report.main(["--results", str(folder), "--page", str(page), "--readme", str(readme)])
    assert "| seed-40x8" in readme.read_text()
    names = re.findall(r"\]\(([^)]+\.svg)\)", page.read_text())
    assert names
    for name in names:
        assert (page.parent / name).read_text().lstrip().startswith("<?xml"), name


def test_bars_stand_in_pairs_for_each_setting_over_the_same_passes(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra [bench]")
    from benchmarks.reporting.plots import draw_bars

    (run,) = of_kind(results.read_all(folder), "peers")
    path = tmp_path / "bars.svg"
    draw_bars(run["data"]["sides"], str(path), "three settings")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text("utf-8"))
    # Of tokens/s, beside the ticks: three pairs of ours in two of the settings; theirs at half, twice and 0.9 of ours.
    assert [text for text in texts if text in ("11", "5.5", "22", "9")] == ["11", "11", "5.5", "22", "9"]
    assert texts.count("cLLM") == 1


def test_one_picture_has_what_serving_costs_and_who_is_faster_at_what_and_beside_which_setting(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra [bench]")
    from benchmarks.reporting.plots import draw

    runs = results.read_all(folder)
    for one in (run for run in of_kind(runs, "peers")[0]["data"]["sides"]):
        one["figures"]["first text of the late one, ms"] = one["figures"]["first text p50, ms"]
    draw(runs, tmp_path)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / GLANCE_PLOT).read_text("utf-8"))
    assert texts.count("8 at a time") == 2
    assert "0.970" in texts, "of native's tokens/s"
    assert " 1.0 of 10 ms" in texts, "of a step of what is served"
    assert list(dict.fromkeys(text for text in texts if text.startswith("seed-40x8*"))) == ["seed-40x8*", "seed-40x8*, the long one"]
    for title, n_runs, counts in counted_by_setting(of_kind(runs, "peers")):
        assert f"{title}, {n_runs} run" in texts
        assert counts["first texts"].total() == 4, "p50, p90, p99, and that of the late one"


def test_latencies_are_drawn_of_those_who_are_the_best_by_the_pairs_that_are_kept() -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra [bench]")
    from benchmarks.reporting.plots import _latency_sides

    data = matches.page([side("-b 32", 0.5), side("-b 64", 2.0)])
    stale = [{**row, "setting": "-b 32"} for row in data["best"]]
    for best in (data["best"], stale):
        assert list(_latency_sides(run_of({**data, "best": best}))) == ["cLLM beside llama-server -b 64", "llama-server -b 64"]


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_there_is_no_bar_for_what_is_not_known_or_not_to_be_compared(folder: Path, tmp_path: Path, whose: str) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra [bench]")
    from benchmarks.reporting.plots import draw_bars

    (run,) = of_kind(results.read_all(folder), "peers")
    first, second, *_ = run["data"]["sides"]
    first["figures"]["tokens/s"]["theirs"] = [None] * 3
    second["n_inexact"][whose] = 1
    path = tmp_path / "bars.svg"
    draw_bars([first, second], str(path), "two settings")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text("utf-8"))
    assert [text for text in texts if text in ("11", "5.5", "22")] == ["11"]  # ours in the first setting
    assert "llama-server as it comes, 3 pairs" in texts


def test_results_name_the_machine_but_neither_its_owner_nor_its_folders(folder: Path) -> None:
    for path in folder.glob("*.json"):
        text = path.read_text("utf-8")
        assert [word for word in (NODE, str(ROOT), HOME, str(folder)) if word in text] == []
        assert {"processor", "n_cores", "memory_gib", "kernel", "python", "libraries", "revision"} <= set(json.loads(text)["machine"])


def test_readmes_table_and_the_page_are_those_of_the_results_that_are_kept() -> None:
    runs = results.read_all()
    readme = (ROOT / "README.md").read_text("utf-8")
    assert with_table(readme, runs) == readme, "run: python -m benchmarks report"
    assert report.PAGE.read_text("utf-8") == report.page(runs), "run: python -m benchmarks report"
    for name in re.findall(r"\]\(([^)]+\.svg)\)", report.page(runs)):
        assert (report.PAGE.parent / name).exists(), "run: python -m benchmarks report"


def test_no_plot_is_left_of_a_result_that_is_not_there_any_more() -> None:
    shown = set(re.findall(r"\]\(([^)]+\.svg)\)", report.page(results.read_all())))
    assert {path.name for path in report.PAGE.parent.glob("*.svg")} == shown


def test_what_else_lies_in_the_folder_is_no_result(folder: Path) -> None:
    runs = results.read_all(folder)
    (folder / "bench.json").write_text('{"version": "1", "passes": []}')
    assert results.read_all(folder) == runs


def test_without_results_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(before := (ROOT / "README.md").read_text("utf-8"), "utf-8")
    with pytest.raises(SystemExit):
        report.main([f"--results={tmp_path / 'nowhere'}", f"--page={tmp_path / 'report.md'}", f"--readme={readme}", "--no-plots"])
    assert "--results: there is none" in capsys.readouterr().err
    assert readme.read_text("utf-8") == before
    assert not (tmp_path / "report.md").exists()


def test_tables_and_their_plots_have_a_figure_that_is_measured() -> None:
    assert set(MAIN_FIGURES) | set(MAIN_OVERLOAD_FIGURES) | set(SIDE_FIGURES) <= {f.name for f in FIGURES}


def test_calls_stand_by_their_rows_with_what_they_took_in_each_memory() -> None:
    shapes = [
        {"name": "10 generate + 34 rows of a prompt", "n_rows": 44, "ms": {"apart": [311.0, 300.0, 340.0], "pool": [302.0, 290.0, 350.0]}}
    ]
    page = report.page([{**run_of({"shapes": shapes}), "kind": "passes"}])
    assert "|  | rows | apart, ms | pool, ms |" in page
    assert "| 10 generate + 34 rows of a prompt | 44 | 311 (300 to 340) | 302 (290 to 350) |" in page


def test_of_every_layer_that_may_cost_something_it_is_told_what_was_done_about_it() -> None:
    assert list(MENDED) == list(REASONS) == [name for name in ladder.STAGES if name not in ("native", "replay")]


def test_every_stages_ratio_at_every_concurrency_stands_in_one_table_and_the_served_ones_is_held_to_its_promise() -> None:
    rungs = [
        {"concurrency": 1, "stages": [stage(0, "native", 100.0), stage(7, "sse", 90.0)]},
        {"concurrency": 8, "stages": [stage(0, "native", 100.0), stage(7, "sse", 94.0, adds="streaming"), stage(8, "client", 80.0)]},
    ]
    page = report.page([{**run_of({"rungs": rungs}), "kind": "ladder"}])
    assert "|  | adds | ratio to the first: x, 1 at a time; today, " in page
    assert "| sse | streaming | 0.900 (0.900 to 0.900) | 0.940 (0.940 to 0.940) |" in page
    assert "| client |  |  | 0.800 (0.800 to 0.800) |" in page
    assert page.count("promised") == 1
    assert "x, 1 at a time: sse comes to 0.900 by the median (0.900 to 0.900 in 2 turns, of 1 start), to 0.900 by the mean.\n" in page
    by_median = "sse comes to 0.940 by the median (0.940 to 0.940 in 2 turns, of 1 start), to 0.940 by the mean"
    assert f"x, 8 at a time: {by_median}, promised is at least 0.95: missed, but not for sure." in page


def test_whether_a_served_promise_is_kept_says_how_sure_that_is_and_whether_the_floor_was_one() -> None:
    def told(floor: list[float], served: list[float], starts: tuple[int, ...] = (0, 1, 2)) -> str:
        stages = [stage(number, name, speeds[0]) for number, name, speeds in ((0, "native", floor), (7, "sse", served))]
        for one, speeds in zip(stages, (floor, served), strict=True):
            one |= {"tokens_per_s": speeds, "ratios": [own / bare for own, bare in zip(speeds, floor, strict=True)]}
        rung = {"concurrency": 8, "stages": stages, "starts": [*starts]}
        page = report.page([{**run_of({"rungs": [rung]}), "kind": "ladder"}])
        return next(line for line in page.splitlines() if "promised is" in line)

    sure = told([100.0, 101.0, 99.0], [98.0, 99.0, 97.0])
    assert "in 3 turns, of 3 starts), to 0.980 (0.980 to 0.980 with 95 %) by the mean, promised is" in sure
    assert sure.endswith("kept.")
    of_one_start = told([100.0, 101.0, 99.0], [98.0, 99.0, 97.0], (0, 0, 0))
    assert "of 1 start), to 0.980 by the mean, promised is" in of_one_start
    assert of_one_start.endswith("kept, but not for sure.")
    assert told([100.0, 100.0, 100.0], [99.0, 99.0, 93.0]).endswith("kept, but not for sure.")
    assert told([100.0, 100.0, 100.0], [99.0, 99.0, 80.0]).endswith("unclear, kept by the median and missed by the mean.")
    assert told([100.0, 100.0, 100.0], [80.0, 81.0, 79.0]).endswith("missed.")
    assert told([100.0, 100.0], [110.0, 111.0], (0, 1)).endswith("sse had more than the first in every turn: it was not the floor there.")


def test_what_a_served_stage_keeps_is_told_by_its_steps_too_and_what_its_threads_waited_is_taken_off() -> None:
    spent = {"spent_us_per_step": {"native": 9900.0, "rest": 100.0}}
    stages = [stage(0, "native", 100.0, waiting_us_per_step=50.0, **spent), stage(7, "sse", 97.0, waiting_us_per_step=150.0, **spent)]
    page = report.page([{**run_of({"rungs": [{"concurrency": 8, "stages": stages}]}), "kind": "ladder"}])
    assert "Of its steps' time, 0.990 is in llama.cpp, and 0.980 without what threads waited there for a core more than in native." in page


def test_a_ladder_without_the_bare_loop_promises_nothing_and_is_not_in_readme() -> None:
    rungs = [{"concurrency": 8, "stages": [stage(1, "backend", 100.0), stage(7, "sse", 99.0)]}]
    run = {**run_of({"rungs": rungs}), "kind": "ladder"}
    assert "promised is" not in report.page([run])
    assert "sse" not in readme_table([run])


@pytest.mark.parametrize(("carried", "verdict"), [(19_999.0, "missed"), (20_000.0, "kept")])
def test_the_stack_is_held_to_what_it_must_carry(carried: float, verdict: str) -> None:
    rungs = [{"streams": streams, "stages": [stage(7, "sse", carried)]} for streams in (8, 64)]
    runs = [{**run_of({"rungs": rungs}), "kind": "stack", "name": name} for name in ("instant", "gpu")]
    page = report.page(runs)
    assert page.count("promised") == 1
    assert f"promised are at least 20000: {verdict}." in page
    named = [{**runs[0], "name": "mine", "settings": {"fake": "instant"}}]
    assert f"promised are at least 20000: {verdict}." in report.page(named), "whatever the result is called"


@pytest.mark.parametrize(("kind", "unit"), [("ladder", "concurrency"), ("stack", "streams")])
def test_the_speeds_of_each_stage_are_told_as_they_differed_from_turn_to_turn(kind: str, unit: str) -> None:
    rungs = [{unit: 8, "stages": [{**stage(0, "native", 1.0), "tokens_per_s": [20.0, 18.0, 25.0]}]}]
    assert "| 0 | native | 20 (18 to 25) |" in report.page([{**run_of({"rungs": rungs}), "kind": kind}])


@pytest.mark.parametrize(("stepped", "verdict"), [(474.0, "missed"), (475.0, "kept")])
def test_a_fast_device_is_to_be_kept_busy(stepped: float, verdict: str) -> None:
    rungs = [{"streams": streams, "stages": [{**stage(7, "sse", 1.0), "steps_per_s": stepped}]} for streams in (8, 64)]
    page = report.page([{**run_of({"rungs": rungs}), "kind": "stack", "name": "gpu"}])
    assert page.count("the aim is") == 1
    assert f"the aim is 475: {verdict}." in page


def test_what_stands_beside_the_ladder_loses_to_the_stage_that_it_is_compared_with() -> None:
    stages = [stage(0, "native", 100.0), stage(4, "loop", 99.0), stage(7, "sse", 50.0)]
    stages.append(stage(9, "isolated", 89.1, beside="loop"))
    run = {**run_of({"rungs": [{"concurrency": 8, "stages": stages}]}), "kind": "ladder"}
    assert "- isolated, 10.0 % off loop (off: 9.9 % to 10.0 %); its own part of that is not told apart." in report.page([run])


def test_what_a_served_stage_loses_is_told_apart_by_its_own_calls_made_again() -> None:
    more = {"native": {"median": 1500.0, "min": -20.0, "max": 1900.0}, "rest": {"median": 300.0, "min": 200.0, "max": 400.0}}
    stages = [
        stage(0, "native", 100.0),
        stage(7, "sse", 90.0, more_us_per_step_than_replay=more),
        stage(10, "replay", 95.0, beside="native"),
    ]
    run = {**run_of({"rungs": [{"concurrency": 8, "stages": stages}]}), "kind": "ladder"}
    page = report.page([run])
    assert "had 0.950 of native's tokens/s by the mean, which is not told from 1: that tells what its batches cost. sse had 0.948" in page
    assert "A step took more there: 1500 (-20 to 1900) us in llama.cpp, 300 (200 to 400) us beside these." in page
    assert "- replay," not in page
    stages.pop()
    assert "made again by a bare loop with nothing beside it" not in report.page([run])


def test_without_the_stage_that_it_is_compared_with_what_stands_beside_the_ladder_has_lost_to_none() -> None:
    stages = [stage(0, "native", 100.0), stage(9, "isolated", 50.0)]
    run = {**run_of({"rungs": [{"concurrency": 8, "stages": stages, "not_found": ["client"]}]}), "kind": "ladder"}
    assert "- isolated," not in report.page([run])
    assert "Left out, since their packages were not installed: client." in report.page([run])


def test_of_a_stage_that_is_as_fast_as_the_one_above_it_is_told_that_the_loss_is_the_others() -> None:
    stages = [stage(0, "native", 100.0), stage(6, "http", 95.0), stage(7, "sse", 94.9)]
    page = report.page([{**run_of({"rungs": [{"concurrency": 8, "stages": stages}]}), "kind": "ladder"}])
    assert "- sse, 5.1 % off native, not more than 1.0 % of it off the stage above: see there." in page
    assert "- http, 5.0 % off native (off: 5.0 % to 5.0 %): all that lies between" in page


def test_a_loss_that_turns_do_not_tell_from_none_is_told_as_such() -> None:
    stages = [stage(0, "native", 100.0), stage(1, "backend", 95.0)]
    stages[1] |= {"tokens_per_s": [90.0, 105.0], "ratios": [0.9, 1.05], "n_steps": [254, 254]}
    stages[0] |= {"n_steps": [250, 250]}
    page = report.page([{**run_of({"rungs": [{"concurrency": 8, "stages": stages, "starts": [0, 1]}]}), "kind": "ladder"}])
    assert "(off: -4.0 % to 10.0 %), which these turns do not tell from none: 0.387 to 2.418 of it with 95 %" in page
    assert ", in 254 steps instead of 250, since clients come back a step late" in page


def test_a_reason_is_taken_back_where_a_stage_with_more_layers_spends_less_on_them() -> None:
    def of(number: int, name: str, rest_us: float, more_us: float) -> dict[str, Any]:
        more = {part: {"median": us, "min": us, "max": us} for part, us in (("native", 0.0), ("rest", more_us))}
        return stage(number, name, 90.0, spent_us_per_step={"native": 9000.0, "rest": rest_us}, more_us_per_step=more)

    below = stage(2, "sampling", 100.0, spent_us_per_step={"native": 9900.0, "rest": 100.0})
    for served_us, is_taken_back in ((500.0, True), (1400.0, False)):
        stages = [below, of(3, "engine", 1400.0, 1300.0), of(6, "http", served_us, served_us - 1400.0)]
        run = {"kind": "ladder", "name": "x", "date": "", "machine": results.machine(), "settings": {}}
        page = report.page([{**run, "data": {"rungs": [{"concurrency": 8, "stages": stages}]}}])
        told = "But http, which has all of this and more, took 500 us of a step beside llama.cpp"
        assert (told in page) is is_taken_back


@pytest.mark.parametrize(
    ("speed", "own_us", "told"),
    [
        (90.0, 50.0, "outside llama.cpp a step took 0.5 % more: the rest is in llama.cpp's own calls. A step took more: "),
        (90.0, 300.0, "outside llama.cpp a step took 3.0 % more: a write to a socket"),
        (100.0, 300.0, "outside llama.cpp a step took 3.0 % more: a write to a socket"),
        (100.0, 50.0, ""),
    ],
)
def test_a_stage_answers_for_what_is_outside_llama_cpp_and_not_for_the_rest(speed: float, own_us: float, told: str) -> None:
    more = {part: {"median": us, "min": us, "max": us} for part, us in (("native", 900.0), ("rest", own_us))}
    below = stage(6, "http", 100.0, spent_us_per_step={"native": 9900.0, "rest": 100.0})
    stages = [below, stage(7, "sse", speed, more_us_per_step=more, us_per_token=1.0, us_per_step=1.0)]
    page = report.page([{**run_of({"rungs": [{"concurrency": 8, "stages": stages}]}), "kind": "ladder"}])
    assert told in page
    assert ("- sse, " in page) == bool(told)
    assert ("Done about it: a chunk is encoded once" in page) == (own_us > 100)
    assert "| sse | a write to a socket for each token, on the cores that compute | a chunk is encoded once" in page


def test_matplotlib_is_asked_for_by_name_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from cllm.bench.plot import pyplot
    from cllm.bench.target import BenchFailed

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchFailed, match=r"pip install 'cllm\[bench\]'"):
        pyplot()


@pytest.mark.parametrize(
    ("value", "told"), [(0.9, "kept"), (0.93, "kept, narrowly"), (0.87, "missed, narrowly"), (1.0, "kept"), (0.8, "missed")]
)
def test_a_promise_of_one_run_says_that_it_was_near_its_bound(value: float, told: str, tmp_path: Path) -> None:
    promise = Promise(workload="overload", figure="good requests", value=value, bound=0.9, is_least=True)
    results.write("promises", "overload", {"seed": 1}, Part([promise], {}).page(), tmp_path)
    assert f" | at least 0.9 | {told} | 20" in report.page(results.read_all(tmp_path))


@pytest.mark.parametrize(("settings", "told"), [({"warms_up": True}, "warm"), ({"warms_up": False}, "cold"), ({}, "")])
def test_a_row_of_readmes_says_whether_the_first_pass_of_a_server_counts(settings: dict[str, Any], told: str) -> None:
    run = {**run_of(matches.page([side("-no-kvu", 0.5)])), "machine": {}, "settings": settings}
    row = next(line for line in readme_table([run]).splitlines() if line.startswith("| x |"))
    assert row.endswith(f" | today, {told} |" if told else " | today |")


def test_a_figure_in_readme_that_fewer_pairs_tell_says_how_many(tmp_path: Path) -> None:
    """Beside the one that is best nothing is told; beside the other, which ended early, ours is worse for sure."""
    even, short = side("-no-kvu", 1.0, n_pairs=4), side("-b 64", 2.0)
    for theirs, ours in zip(even.theirs, even.ours, strict=True):
        theirs["tokens_per_s"] = ours["tokens_per_s"]
    row = next(line for line in readme_table([run_of(matches.page([even, short]))]).splitlines() if line.startswith("| x |"))
    assert "*0.50* (3 pairs)" in row
    assert " | 3 (3) |" in row


def test_a_fakes_steps_and_the_profile_of_its_server_are_told(folder: Path) -> None:
    text = report.page(results.read_all(folder))
    assert "2.1 ms in the model, 5.25 ms in sampling, 0.5 ms between steps" in text
    assert "Requests of one token, in one piece: 900 a second" in text
    assert "| `engine/scheduler.py:1 _accept` | 2.12 | 1 |" in text
    assert "takes 0.975 ms here" in text
