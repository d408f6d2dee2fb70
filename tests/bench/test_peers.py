"""A comparison with other servers, played with servers and passes that are not there."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import peers
from benchmarks.contenders import Contender, House, cllm_serve
from benchmarks.generator import Order
from cllm.bench.metrics import Goal
from cllm.bench.target import Dialect
from cllm.bench.workloads import WORKLOADS

HOUSE = House(model=Path("model.gguf"), n_slots=8, n_cells=2048, n_threads=2)


class Pairs:
    """In the place of a match: notes who was played, and how often."""

    def __init__(self, played: list[str]) -> None:
        self.played = played

    def __call__(self, _plan: peers.Plan, _generator: object, _ours: object, _theirs: object, side: peers.Side, _seeds: object) -> Pairs:
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
    monkeypatch.setattr(peers, "Match", Pairs(pairs))
    monkeypatch.setattr(peers, "Generator", nullcontext)
    monkeypatch.setattr(peers, "_promising", lambda sides: sides[1:])
    monkeypatch.setattr(peers, "page", lambda sides: {"n_pairs": [len(side.ours) for side in sides]})
    monkeypatch.setattr(Contender, "server", lambda contender: Started(contender))
    return pairs


class Started(AbstractContextManager[str]):
    """In the place of a server: notes who was started."""

    names: ClassVar[list[str]] = []

    def __init__(self, contender: Contender) -> None:
        self.names.append(f"{contender.peer} {contender.setting}")

    def __exit__(self, *_: object) -> None: ...


def run(is_ended: Any = None, *, n_pairs_start: int = 2) -> dict[str, Any]:
    workload = WORKLOADS["seed-40x8"]
    sizes = {"n_pairs": 3, "n_screen": 1, "n_pairs_start": n_pairs_start}
    plan = peers.Plan(name="x", workload=workload, rate=None, seed=1, warms_up=True, sampling="usual", goal=Goal(), **sizes)
    contenders = [Contender(peer="other", setting=name, command=("other",)) for name in "ab"]
    return peers.run_plan(plan, cllm_serve(HOUSE, ()), contenders, *([] if is_ended is None else [is_ended]))


def test_every_setting_is_played_once_and_the_best_go_on(played: list[str]) -> None:
    assert run() == {"n_pairs": [1, 3]}
    assert played == ["a 0", "b 0", "b 1", "b 2"]


def test_when_ours_does_not_start_any_more_what_was_measured_is_kept(played: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def server(contender: Contender) -> Started:
        started = Started(contender)
        if contender.peer != "other" and len(played) >= 2:
            raise RuntimeError("/home/somebody/cllm did not start")
        return started

    monkeypatch.setattr(Contender, "server", server)
    monkeypatch.setattr(peers, "page", lambda sides: {"n_pairs": [len(side.ours) for side in sides], "broken": {}})
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


def test_a_peer_that_does_not_start_is_told_and_the_others_are_played(played: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def start(contender: Contender) -> Started:
        if contender.setting == "a":
            raise RuntimeError("/opt/other did not start")
        return Started(contender)

    monkeypatch.setattr(Contender, "server", start)
    assert run() == {"n_pairs": [0, 3]}
    assert played == ["b 0", "b 1", "b 2"]


@pytest.mark.parametrize("n_pairs", range(4))
def test_a_run_that_is_told_to_end_ends_after_its_pair_and_keeps_what_it_has(played: list[str], n_pairs: int) -> None:
    assert sum(run(lambda: len(played) >= n_pairs)["n_pairs"]) == n_pairs
    assert played == list(itertools.islice(["a 0", "b 0", "b 1"], n_pairs))


class Up:
    """In the place of a server that is up."""

    n_vocab = 1000

    def __init__(self, port: int) -> None:
        self.port = port

    def cpu_s(self) -> float:
        return 0.0

    def rss_peak_mb(self) -> float:
        return 0.0


class Orders:
    """In the place of a generator: notes what it is to run, as (port, requests, rate, seed)."""

    def __init__(self) -> None:
        self.orders: list[tuple[int, int, float | None, int]] = []

    def dialect(self, _port: int, n_vocab: int = 0) -> Dialect:
        return Dialect(n_vocab=n_vocab)

    def run(self, order: Order) -> dict[str, Any]:
        self.orders.append((order.port, order.workload.n_requests, order.rate, order.seed))
        summary = {"wall_s": 1.0, "tokens_per_s": 1.0, "n_failed": 0, "client_cpu_share": 0.0}
        return {"summary": summary, "curves": {}}


@pytest.mark.parametrize(("warms_up", "n_requests"), [(True, 40), (False, 8)])
def test_a_start_begins_with_what_does_not_count_and_pairs_have_the_same_new_requests_in_turns(warms_up: bool, n_requests: int) -> None:
    sizes = {"n_pairs": 2, "n_screen": 2, "n_pairs_start": 2}
    plan = peers.Plan(
        name="x", workload=WORKLOADS["seed-40x8"], rate=0.5, seed=1, warms_up=warms_up, sampling="usual", goal=Goal(), **sizes
    )
    side, generator = peers.Side(contender=Contender(peer="other", setting="a", command=())), Orders()
    side.starts = [0, 0]
    match = peers.Match(plan, generator, Up(1), Up(2), side, itertools.count(100))  # type: ignore[arg-type]
    match.warm_up()
    match.pair(2)
    match.pair(3)
    assert generator.orders[:2] == [(1, n_requests, None, 100), (2, n_requests, None, 100)]
    assert generator.orders[2:] == [(1, 40, 0.5, 101), (2, 40, 0.5, 101), (2, 40, 0.5, 102), (1, 40, 0.5, 102)]
    assert len(side.ours) == len(side.theirs) == 2
    assert side.starts == [0, 0, 1, 1]
