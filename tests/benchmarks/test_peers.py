"""A comparison with other servers, played with servers and passes that are not there."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import peers, results
from benchmarks.contenders import Contender, House, cllm_serve
from benchmarks.generator import GeneratorDied, Order
from benchmarks.standings import Page
from cllm.bench.metrics import Goal
from cllm.bench.target import Dialect
from cllm.bench.workloads import WORKLOADS, Workload

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
    monkeypatch.setattr(peers, "_promising", lambda sides, _others: sides[1:])
    monkeypatch.setattr(peers, "page", lambda sides, _others: {"n_pairs": [side.n_pairs for side in sides]})
    monkeypatch.setattr(Contender, "server", lambda contender: Started(contender))
    return pairs


class Started(AbstractContextManager[str]):
    """In the place of a server: notes who was started."""

    names: ClassVar[list[str]] = []

    def __init__(self, contender: Contender) -> None:
        self.names.append(f"{contender.peer} {contender.setting}")

    def __exit__(self, *_: object) -> None: ...


def run(is_ended: Any = None, *, n_pairs_start: int = 2, n_screen: int = 1, kept: Sequence[Page] = ()) -> dict[str, Any]:
    workload = WORKLOADS["seed-40x8"]
    sizes = {"n_pairs": 3, "n_screen": n_screen, "n_pairs_start": n_pairs_start}
    plan = peers.Plan(name="x", workload=workload, rate=None, seed=1, warms_up=True, sampling="usual", goal=Goal(), **sizes)
    contenders = [Contender(peer="other", setting=name, command=("other",)) for name in "ab"]
    return peers.run_plan(plan, cllm_serve(HOUSE, ()), contenders, is_ended or (lambda: False), kept)


def test_every_setting_is_played_once_and_the_best_go_on(played: list[str]) -> None:
    assert run() == {"n_pairs": [1, 3]}
    assert played == ["a 0", "b 0", "b 1", "b 2"]


def test_pairs_that_are_kept_of_earlier_runs_are_not_played_again(played: list[str]) -> None:
    kept = [{"peer": "other", "setting": setting, "n_pairs": n} for setting, n in (("a", 1), ("b", 2), ("c", 3))]
    assert run(kept=kept) == {"n_pairs": [1, 3]}
    assert played == ["b 2"]


@pytest.mark.parametrize("fault", ["it does not start", "it answers no request, so that there is no rate to send them at"])
def test_an_overload_of_ours_that_cannot_be_measured_is_told_and_the_next_workload_goes_on(
    measure: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    def capacity(_plan: object, _ours: object, _ends: object) -> float:
        raise peers.OursFailed(fault)

    monkeypatch.setattr(peers, "_capacity", capacity)
    with pytest.raises(SystemExit, match=r"not measured: overload$"):
        measure("--workloads=overload,seed-40x8")
    told = capsys.readouterr().out
    assert f"ours: {fault}" in told
    assert "overload: nothing was measured, and nothing is written" in told
    assert "written: peers-seed-40x8-model.json" in told


@pytest.mark.parametrize(
    ("rates", "ends", "n_passes", "capacity"),
    [([1.0, 5.0, 2.0], [], 3, 2.0), ([4.0, 5.0, 2.0], [15], 1, 4.0), ([0.0, 0.0, 0.0], [], 3, None)],
)
def test_capacity_is_the_median_of_passes_as_far_as_they_are_to_go(
    monkeypatch: pytest.MonkeyPatch, rates: list[float], ends: list[int], n_passes: int, capacity: float | None
) -> None:
    asked: list[Order] = []

    class Passes(Orders):
        def run(self, order: Order) -> dict[str, Any]:
            asked.append(order)
            return {"summary": {"requests_per_s": rates[len(asked) - 1]}}

    monkeypatch.setattr(peers, "Generator", lambda: nullcontext(Passes()))
    monkeypatch.setattr(Contender, "server", lambda _contender: nullcontext(Up(1)))
    workload = WORKLOADS["overload"]
    sizes = {"n_pairs": 1, "n_screen": 1, "n_pairs_start": 1}
    plan = peers.Plan(name="x", workload=workload, rate=None, seed=1, warms_up=True, sampling="usual", goal=Goal(), **sizes)
    ours = cllm_serve(HOUSE, ())
    if capacity is None:
        with pytest.raises(peers.OursFailed, match="it answers no request"):
            peers._capacity(plan, ours, ends)
    else:
        assert peers._capacity(plan, ours, ends) == capacity
    assert [order.seed for order in asked] == list(range(1, 1 + n_passes))


def test_when_ours_does_not_start_any_more_what_was_measured_is_kept(played: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def server(contender: Contender) -> Started:
        started = Started(contender)
        if contender.peer != "other" and len(played) >= 2:
            raise RuntimeError("/home/somebody/cllm did not start")
        return started

    monkeypatch.setattr(Contender, "server", server)
    monkeypatch.setattr(peers, "page", lambda sides, _others: {"n_pairs": [side.n_pairs for side in sides], "broken": {}})
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
    monkeypatch.setattr(peers, "page", lambda sides, _others: {"n_pairs": [side.n_pairs for side in sides], "broken": {}})
    assert run() == {"n_pairs": [1, 1], "broken": {"cllm (as it comes)": "the load generator has died"}}


@pytest.mark.parametrize("n_pairs", range(4))
def test_a_run_that_is_told_to_end_ends_after_its_pair_and_keeps_what_it_has(played: list[str], n_pairs: int) -> None:
    assert sum(run(lambda: len(played) >= n_pairs)["n_pairs"]) == n_pairs
    assert played == list(itertools.islice(["a 0", "b 0", "b 1"], n_pairs))


@pytest.mark.parametrize(("n_pairs", "unfinished"), [(1, ["other (a)", "other (b)"]), (3, ["other (b)"])])
def test_a_run_that_was_told_to_end_says_who_would_have_gone_on(played: list[str], n_pairs: int, unfinished: list[str]) -> None:
    assert run(lambda: len(played) >= n_pairs)["unfinished"] == unfinished
    assert "unfinished" not in run()


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
        self.refused: set[tuple[str, ...]] = set()

    def dialect(self, port: int, n_vocab: int = 0, sampling: str = "greedy") -> Dialect:
        return Dialect(n_vocab=n_vocab, refused=("min_p",) if port == 2 and sampling == "usual" else ())

    def run(self, order: Order) -> dict[str, Any]:
        self.orders.append((order.port, order.workload.n_requests, order.rate, order.seed))
        self.refused.add(order.dialect.refused)
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
    assert generator.refused == {("min_p",)}, "what one of them refuses the other is not asked either"
    assert sorted(generator.orders[2:4]) == [(1, 40, 0.5, 101), (2, 40, 0.5, 101)]
    assert sorted(generator.orders[4:]) == [(1, 40, 0.5, 102), (2, 40, 0.5, 102)]
    assert len(side.ours) == len(side.theirs) == 2
    assert side.starts == [0, 0, 1, 1]


@pytest.mark.parametrize(("n_pairs_start", "began"), [(1, [1, 2, 1, 2]), (2, [1, 2, 2, 1, 1, 2, 2, 1])])
@pytest.mark.parametrize("n_kept", [0, 1])
def test_who_begins_alternates_within_a_start_and_from_one_to_the_next(n_pairs_start: int, began: list[int], n_kept: int) -> None:
    """Or the same one had the first pass of every start."""
    sizes = {"n_pairs": 8, "n_screen": 2, "n_pairs_start": n_pairs_start}
    plan = peers.Plan(name="x", workload=WORKLOADS["mixed"], rate=None, seed=1, warms_up=False, sampling="usual", goal=Goal(), **sizes)
    kept = side_page(n_kept) if n_kept else None
    side, generator = peers.Side(contender=Contender(peer="other", setting="a", command=()), kept=kept), Orders()
    for _ in range(4):
        match = peers.Match(plan, generator, Up(1), Up(2), side, itertools.count())  # type: ignore[arg-type]
        for _ in range(n_pairs_start):
            match.pair(side.n_pairs)
    first = [port for port, *_ in generator.orders[::2]]
    assert first == ([3 - port for port in began] if n_kept else began)


def side_page(n_pairs: int, speed: float = 2.0) -> Page:
    """What is kept of a setting beside which ours has `speed` times the tokens/s."""
    counts = {name: {"ours": 0, "theirs": 0} for name in ("n_failed", "n_inexact", "n_cached")}
    shares = dict.fromkeys(("client_cpu_share_max", "idle_cpu_share", "idle_cpu_share_ours"), 0.0)
    figures = {"tokens/s": {"ours": [speed * (10.0 + i) for i in range(n_pairs)], "theirs": [10.0 + i for i in range(n_pairs)]}}
    passes = {"ours": n_pairs * [{}], "theirs": n_pairs * [{}]}
    curves: dict[str, dict[str, list[float]]] = {"ours": {}, "theirs": {}}
    places = {"peer": "llama-server", "setting": "-no-kvu", "n_pairs": n_pairs, "starts": list(range(n_pairs))}
    return {**places, "figures": figures, "passes": passes, "curves": curves, **counts, **shares}


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command on servers that are not there: every run adds two pairs to what it finds. Gives the seeds that the runs began with."""
    seeds: list[int] = []

    def run_plan(plan: peers.Plan, _ours: object, _contenders: object, _is_ended: object, kept: Sequence[Page]) -> dict[str, Any]:
        seeds.append(plan.seed)
        side = peers.Side(contender=Contender(peer="llama-server", setting="-no-kvu", command=()), kept=kept[0] if kept else None)
        monkeypatch.setattr(peers, "_side_page", lambda _side: side_page(2))
        side.ours = [{}, {}]
        return peers.page([side])

    monkeypatch.setattr(peers, "run_plan", run_plan)
    monkeypatch.setattr(
        peers,
        "find_contenders",
        lambda _asked, _house: ([Contender(peer="llama-server", setting="-no-kvu", command=())], ["vllm", "llama-server"]),
    )
    monkeypatch.setattr(peers, "_capacity", lambda _plan, _ours, _ends: 3.0 if not seeds else 5.0)
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    path = tmp_path / "results"

    def measure(*options: str) -> list[int]:
        peers.main([f"--model={model}", f"--results={path}", *(options or ("--workloads=seed-40x8",))])
        return seeds

    return measure


def kept_in(folder: Path, name: str) -> Any:
    return json.loads((folder / "results" / f"peers-{name}.json").read_text("utf-8"))


def test_a_run_that_adds_keeps_the_pairs_that_are_there_and_makes_new_requests(measure: Any, tmp_path: Path) -> None:
    measure()
    assert measure("--workloads=seed-40x8", "--add") == [1, 2]
    run = kept_in(tmp_path, "seed-40x8-model")
    (side,) = run["data"]["sides"]
    assert (side["n_pairs"], side["starts"]) == (4, [0, 1, 2, 3])
    assert [(one["seed"], one["n_pairs"]) for one in run["data"]["runs"]] == [
        (1, {"llama-server (-no-kvu)": 2}),
        (2, {"llama-server (-no-kvu)": 2}),
    ]
    (row,) = run["data"]["best"]
    assert (row["figure"], row["n_pairs"], row["ratio"]) == ("tokens/s", 4, 2.0)


def test_a_run_that_does_not_add_takes_the_place_of_what_is_there(measure: Any, tmp_path: Path) -> None:
    measure()
    assert measure() == [1, 1]
    run = kept_in(tmp_path, "seed-40x8-model")
    assert run["data"]["sides"][0]["n_pairs"] == 2
    assert len(run["data"]["runs"]) == 1


def test_to_add_where_nothing_is_kept_is_to_begin(measure: Any, tmp_path: Path) -> None:
    measure("--workloads=seed-40x8", "--add")
    assert kept_in(tmp_path, "seed-40x8-model")["data"]["sides"][0]["n_pairs"] == 2


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--no-warm-up"], "warms_up"),
        (["--threads=77"], "n_threads"),
        (["--ours=--kv=unified"], "ours"),
        (["--without-parallel"], "ours"),
    ],
)
def test_pairs_that_are_measured_otherwise_are_not_added_and_what_differs_is_named(measure: Any, options: list[str], name: str) -> None:
    measure()
    with pytest.raises(SystemExit, match=rf"--add: the pairs of peers-seed-40x8-model.json were measured otherwise: {name}$"):
        measure("--workloads=seed-40x8", "--add", *options)


def test_whole_answers_with_the_late_one_among_them_are_not_joined_with_those_without(measure: Any, tmp_path: Path) -> None:
    measure("--workloads=long-among-short")
    path = tmp_path / "results" / "peers-long-among-short-model.json"
    run = json.loads(path.read_text("utf-8"))
    assert run["settings"].pop("late_apart")
    path.write_text(json.dumps(run), "utf-8")
    with pytest.raises(SystemExit, match=r"were measured otherwise: late_apart$"):
        measure("--workloads=long-among-short", "--add")


def test_what_is_added_to_an_overload_comes_at_the_rates_that_are_kept(measure: Any, tmp_path: Path) -> None:
    for options in ([], ["--add"]):
        measure("--workloads=overload", *options)
    runs = [kept_in(tmp_path, f"overload-{factor}x-model") for factor in ("0.5", "1", "2", "4")]
    assert [run["settings"]["rate"] for run in runs] == [1.5, 3.0, 6.0, 12.0]
    assert [run["data"]["sides"][0]["n_pairs"] for run in runs] == [4, 4, 4, 4]


def test_some_loads_of_an_overload_come_at_the_capacity_that_is_kept_of_others(
    measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure("--workloads=overload", "--loads=4,1")
    monkeypatch.setattr(peers, "_capacity", lambda *_: 99.0)
    measure("--workloads=overload", "--loads=2", "--add")
    kept = {path.name: json.loads(path.read_text("utf-8"))["settings"]["rate"] for path in (tmp_path / "results").iterdir()}
    assert kept == {f"peers-overload-{name}x-model.json": rate for name, rate in {"1": 3.0, "2": 6.0, "4": 12.0}.items()}


def test_a_load_that_there_is_not_is_refused(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        peers.parser().parse_args(["--loads=0.5,3"])
    assert "there is no load '3'; there are 0.5, 1, 2, 4" in capsys.readouterr().err


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS.keys())
def test_a_slot_with_a_share_of_its_own_has_room_for_the_longest_request(workload: Workload) -> None:
    house = peers.house_for(peers.parser().parse_args([]), Path("model.gguf"), workload)
    assert house.n_cells >= max(workload.cells(), house.n_slots * workload.n_longest())
    assert house.n_cells % (256 * house.n_slots) == 0


def test_one_result_is_read_by_its_name(tmp_path: Path) -> None:
    assert results.read("peers", "x", tmp_path) is None
    results.write("peers", "x", {"seed": 1}, {}, tmp_path)
    assert (results.read("peers", "x", tmp_path) or {})["settings"] == {"seed": 1}


def test_nothing_is_measured_again_where_all_pairs_are_there(
    measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    measure()
    before = kept_in(tmp_path, "seed-40x8-model")

    def run_plan(_plan: object, _ours: object, _contenders: object, _is_ended: object, kept: Sequence[Page]) -> dict[str, Any]:
        return {"sides": list(kept), "best": [], "broken": {}}

    monkeypatch.setattr(peers, "run_plan", run_plan)
    measure("--workloads=seed-40x8", "--add")
    assert "seed-40x8: all pairs are there already, and nothing is written" in capsys.readouterr().out
    assert kept_in(tmp_path, "seed-40x8-model") == before


def test_requests_are_new_also_where_a_seed_is_some_steps_of_an_earlier_run_away(measure: Any) -> None:
    measure()
    assert measure("--workloads=seed-40x8", "--add", f"--seed={1 + 3 * peers.SEED_STEP}") == [1, 2 + 3 * peers.SEED_STEP]


def test_what_was_broken_or_not_found_before_is_told_until_it_was_measured(measure: Any, tmp_path: Path) -> None:
    measure()
    path = tmp_path / "results" / "peers-seed-40x8-model.json"
    run = kept_in(tmp_path, "seed-40x8-model")
    ours = cllm_serve(HOUSE, ()).title
    run["data"]["broken"] = {"vllm (as it comes)": "no memory", "llama-server (-no-kvu)": "slow", ours: "no port"}
    run["data"]["versions"] = {"vllm": "version 1"}
    path.write_text(json.dumps(run), "utf-8")
    measure("--workloads=seed-40x8", "--add")
    data = kept_in(tmp_path, "seed-40x8-model")["data"]
    assert data["broken"] == {"vllm (as it comes)": "no memory"}
    assert data["versions"] == {"vllm": "version 1"}
    assert data["not_found"] == ["vllm"]


@pytest.mark.parametrize(("ours", "theirs", "inexact"), [(520, 512, (0, 0)), (1040, 512, (0, 8)), (300, 1040, (8, 0)), (1040, 0, (0, 0))])
def test_who_reads_fewer_tokens_of_the_same_texts_has_cut_them(ours: int, theirs: int, inexact: tuple[int, int]) -> None:
    done = [{"n_requests": 8, "n_failed": 0, "n_inexact": 0, "n_prompt": n} for n in (ours, theirs)]
    peers._mark_cut(*done)
    assert (done[0]["n_inexact"], done[1]["n_inexact"]) == inexact
