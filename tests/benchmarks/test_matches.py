"""A comparison as it is played, with servers and passes that are not there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import matches
from benchmarks.contenders import Contender, House, cllm_serve
from benchmarks.generator import GeneratorDied
from benchmarks.standings import Page
from cllm.bench.answers import Answer, Pass
from cllm.bench.metrics import Goal, summarize
from cllm.bench.workloads import WORKLOADS
from tests.benchmarks.stand_ins import Orders, Up, side_page

HOUSE = House(model=Path("model.gguf"), n_slots=8, n_cells=2048, n_threads=2)


class Pairs:
    """In the place of a match: notes who was played, and how often."""

    def __init__(self, played: list[str]) -> None:
        self.played = played

    def __call__(
        self, _plan: matches.Plan, _generator: object, _ours: object, _theirs: object, side: matches.Side, _seeds: object
    ) -> Pairs:
        self.side = side
        return self

    def warm_up(self) -> None: ...

    def pair(self, number: int) -> None:
        self.played.append(f"{self.side.contender.setting} {number}")
        for summaries in (self.side.ours, self.side.theirs):
            summaries.append({"n_failed": 0})


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    pairs: list[str] = []
    monkeypatch.setattr(matches, "Match", Pairs(pairs))
    monkeypatch.setattr(matches, "Generator", nullcontext)
    monkeypatch.setattr(matches, "_promising", lambda sides, _others: sides[1:])
    monkeypatch.setattr(matches, "page", lambda sides, _others: {"n_pairs": [side.n_pairs for side in sides]})
    monkeypatch.setattr(Contender, "server", lambda contender: Started(contender))
    return pairs


class Started(AbstractContextManager[str]):
    """In the place of a server: notes who was started."""

    names: ClassVar[list[str]] = []

    def __init__(self, contender: Contender) -> None:
        self.names.append(f"{contender.peer} {contender.setting}")

    def __exit__(self, *_: object) -> None: ...


def run(
    is_ended: Any = None, *, n_pairs_start: int = 2, n_screen: int = 1, kept: Sequence[Page] = (), keep: Any = lambda _data: None
) -> dict[str, Any]:
    workload = WORKLOADS["seed-40x8"]
    sizes = {"n_pairs": 3, "n_screen": n_screen, "n_pairs_start": n_pairs_start}
    plan = matches.Plan(name="x", workload=workload, rate=None, seed=1, warms_up=True, sampling="usual", goal=Goal(), **sizes)
    contenders = [Contender(peer="other", setting=name, command=("other",)) for name in "ab"]
    return matches.run_plan(plan, cllm_serve(HOUSE, ()), contenders, keep, is_ended or (lambda: False), kept)


def test_every_setting_is_played_once_and_the_best_go_on(played: list[str]) -> None:
    assert run() == {"n_pairs": [1, 3]}
    assert played == ["a 0", "b 0", "b 1", "b 2"]


def test_pairs_that_are_kept_of_earlier_runs_are_not_played_again(played: list[str]) -> None:
    kept = [{"peer": "other", "setting": setting, "n_pairs": n} for setting, n in (("a", 1), ("b", 2), ("c", 3))]
    assert run(kept=kept) == {"n_pairs": [1, 3]}
    assert played == ["b 2"]


def test_when_ours_does_not_start_any_more_what_was_measured_is_kept(played: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def server(contender: Contender) -> Started:
        started = Started(contender)
        if contender.peer != "other" and len(played) >= 2:
            raise RuntimeError("/home/somebody/cllm did not start")
        return started

    monkeypatch.setattr(Contender, "server", server)
    monkeypatch.setattr(matches, "page", lambda sides, _others: {"n_pairs": [side.n_pairs for side in sides], "broken": {}})
    done = run()
    assert done["n_pairs"] == [1, 1]
    ((title, fault),) = done["broken"].items()
    assert title == cllm_serve(HOUSE, ()).title
    assert fault == "cllm did not start"


@pytest.mark.parametrize(("n_pairs_start", "n_starts"), [(1, 3), (2, 2), (3, 2)])
def test_both_servers_are_started_anew_after_every_few_pairs(
    played: list[str], monkeypatch: pytest.MonkeyPatch, n_pairs_start: int, n_starts: int
) -> None:
    """The first round is one pair, the second has the two others."""
    monkeypatch.setattr(Started, "names", [])
    run(n_pairs_start=n_pairs_start)
    assert len(played) == 4
    assert Started.names == ["cllm as it comes", "other a", *n_starts * ["cllm as it comes", "other b"]]


def test_who_is_screened_has_a_start_for_each_pair(played: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts differ more than pairs of one."""
    monkeypatch.setattr(Started, "names", [])
    run(n_screen=2, n_pairs_start=2)
    assert played == ["a 0", "a 1", "b 0", "b 1", "b 2"]
    assert Started.names == [*2 * ["cllm as it comes", "other a"], *3 * ["cllm as it comes", "other b"]]


def test_a_peer_that_does_not_start_is_told_and_the_others_are_played(played: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def start(contender: Contender) -> Started:
        if contender.setting == "a":
            raise RuntimeError("/opt/other did not start")
        return Started(contender)

    monkeypatch.setattr(Contender, "server", start)
    assert run() == {"n_pairs": [0, 3]}
    assert played == ["b 0", "b 1", "b 2"]


def test_the_generators_death_is_not_put_down_to_a_peer(played: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pair, deaths = Pairs.pair, [GeneratorDied("the load generator has died")]

    def dies_once(self: Pairs, number: int) -> None:
        if deaths and number == 1:
            raise deaths.pop()
        pair(self, number)

    monkeypatch.setattr(Pairs, "pair", dies_once)
    assert run() == {"n_pairs": [1, 3]}
    assert played == ["a 0", "b 0", "b 1", "b 2"]


def test_one_that_dies_again_and_again_ends_the_run_and_what_was_measured_is_kept(
    played: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pairs.pair

    def dies(self: Pairs, number: int) -> None:
        if number == 1:
            raise GeneratorDied("the load generator has died")
        pair(self, number)

    monkeypatch.setattr(Pairs, "pair", dies)
    monkeypatch.setattr(matches, "page", lambda sides, _others: {"n_pairs": [side.n_pairs for side in sides], "broken": {}})
    broken = {"cllm (as it comes)": "the load generator has died"}
    assert run() == {"n_pairs": [1, 1], "broken": broken, "unfinished": ["other (b)"]}


@pytest.mark.parametrize("n_pairs", range(4))
def test_a_run_that_is_told_to_end_ends_after_its_pair_and_keeps_what_it_has(played: list[str], n_pairs: int) -> None:
    assert sum(run(lambda: len(played) >= n_pairs)["n_pairs"]) == n_pairs
    assert played == list(itertools.islice(["a 0", "b 0", "b 1"], n_pairs))


@pytest.mark.parametrize(("n_pairs", "unfinished"), [(1, ["other (a)", "other (b)"]), (3, ["other (b)"])])
def test_a_run_that_was_told_to_end_says_who_would_have_gone_on(played: list[str], n_pairs: int, unfinished: list[str]) -> None:
    assert run(lambda: len(played) >= n_pairs)["unfinished"] == unfinished
    assert "unfinished" not in run()


def test_where_ours_fails_who_would_have_gone_on_is_told(played: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def server(contender: Contender) -> Started:
        if contender.peer != "other" and len(played) >= 2:
            raise RuntimeError("it did not start")
        return Started(contender)

    monkeypatch.setattr(Contender, "server", server)
    monkeypatch.setattr(matches, "page", lambda sides, _others: {"n_pairs": [side.n_pairs for side in sides], "broken": {}})
    assert run()["unfinished"] == ["other (b)"]


def test_what_was_measured_is_handed_out_after_each_start_with_who_goes_on(played: list[str]) -> None:
    """Of a run that is killed all is there but its last start."""
    so_far: list[dict[str, Any]] = []
    run(keep=so_far.append, n_pairs_start=1)
    assert so_far == [
        {"n_pairs": [1, 0], "unfinished": ["other (a)", "other (b)"]},
        {"n_pairs": [1, 1], "unfinished": ["other (b)"]},
        {"n_pairs": [1, 2], "unfinished": ["other (b)"]},
        {"n_pairs": [1, 3]},
    ]


@pytest.mark.parametrize(("warms_up", "n_requests"), [(True, 40), (False, 8)])
def test_a_start_begins_with_what_does_not_count_and_pairs_have_the_same_new_requests_in_turns(warms_up: bool, n_requests: int) -> None:
    sizes = {"n_pairs": 2, "n_screen": 2, "n_pairs_start": 2}
    plan = matches.Plan(
        name="x", workload=WORKLOADS["seed-40x8"], rate=0.5, seed=1, warms_up=warms_up, sampling="usual", goal=Goal(), **sizes
    )
    side, generator = matches.Side(contender=Contender(peer="other", setting="a", command=())), Orders()
    side.starts = [0, 0]
    match = matches.Match(plan, generator, Up(1), Up(2), side, itertools.count(100))  # type: ignore[arg-type]
    match.warm_up()
    match.pair(2)
    match.pair(3)
    assert generator.orders[:2] == [(1, n_requests, None, 100), (2, n_requests, None, 100)]
    assert generator.refused == {("min_p",)}, "what one of them refuses the other is not asked either"
    assert sorted(generator.orders[2:4]) == [(1, 40, 0.5, 101), (2, 40, 0.5, 101)]
    assert sorted(generator.orders[4:]) == [(1, 40, 0.5, 102), (2, 40, 0.5, 102)]
    assert len(side.ours) == len(side.theirs) == 2
    assert side.starts == [0, 0, 1, 1]


def test_a_peer_whose_processes_die_is_compared_but_for_what_its_tokens_took() -> None:
    """The CPU time of its children is not told any more once they are dead, so that it seems to have spent less than before."""

    def passes(cpu_s: float) -> list[dict[str, Any]]:
        answer = Answer(n_asked=1, sent_at=0.0, ended_at=1.0, status=200, chunks_at=[1.0], n_generated=1, counted_by="usage")
        return 3 * [summarize(Pass(wall_s=1.0, client_cpu_s=0.01, answers=[answer]), server_cpu_s=cpu_s, rss_peak_mb=1.0).page()]

    shares = {who: [0.0] for who in ("ours", "theirs")}
    other = Contender(peer="other", setting="a", command=())
    dying = matches.Side(contender=other, ours=passes(1.0), theirs=passes(-1.0), starts=[0, 1, 2], idle_cpu_shares=shares)
    figures = {row["figure"] for row in matches.page([dying])["best"]}
    assert "tokens/s" in figures
    assert "server CPU per token, ms" not in figures


@pytest.mark.parametrize(("n_pairs_start", "began"), [(1, [1, 2, 1, 2]), (2, [1, 2, 2, 1, 1, 2, 2, 1])])
@pytest.mark.parametrize("n_kept", [0, 1])
def test_who_begins_alternates_within_a_start_and_from_one_to_the_next(n_pairs_start: int, began: list[int], n_kept: int) -> None:
    """Or the same one had the first pass of every start."""
    sizes = {"n_pairs": 8, "n_screen": 2, "n_pairs_start": n_pairs_start}
    plan = matches.Plan(name="x", workload=WORKLOADS["mixed"], rate=None, seed=1, warms_up=False, sampling="usual", goal=Goal(), **sizes)
    kept = side_page(n_kept) if n_kept else None
    side, generator = matches.Side(contender=Contender(peer="other", setting="a", command=()), kept=kept), Orders()
    for _ in range(4):
        match = matches.Match(plan, generator, Up(1), Up(2), side, itertools.count())  # type: ignore[arg-type]
        for _ in range(n_pairs_start):
            match.pair(side.n_pairs)
    first = [port for port, *_ in generator.orders[::2]]
    assert first == ([3 - port for port in began] if n_kept else began)


@pytest.mark.parametrize(("ours", "theirs", "inexact"), [(520, 512, (0, 0)), (1040, 512, (0, 8)), (300, 1040, (8, 0)), (1040, 0, (0, 0))])
def test_who_reads_fewer_tokens_of_the_same_texts_has_cut_them(ours: int, theirs: int, inexact: tuple[int, int]) -> None:
    done = [{"n_requests": 8, "n_failed": 0, "n_inexact": 0, "n_prompt": n} for n in (ours, theirs)]
    matches._mark_cut(*done)
    assert (done[0]["n_inexact"], done[1]["n_inexact"]) == inexact
