"""The command that compares with other servers: what it asks to be played, and what it keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmarks import matches, peers, results
from benchmarks.contenders import Contender, House, cllm_serve
from benchmarks.generator import Order
from benchmarks.standings import Page
from cllm.bench.metrics import Goal
from cllm.bench.workloads import WORKLOADS, Workload
from tests.benchmarks.stand_ins import Orders, Up, side_page

KILLED = 13  # the seed of a run that ends in its middle
HOUSE = House(model=Path("model.gguf"), n_slots=8, n_cells=2048, n_threads=2)


@pytest.mark.parametrize("fault", ["it does not start", "it answers no request, so that there is no rate to send them at"])
def test_an_overload_of_ours_that_cannot_be_measured_is_told_and_the_next_workload_goes_on(
    measure: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    def capacity(_plan: object, _ours: object, _ends: object) -> float:
        raise matches.OursFailed(fault)

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
    plan = matches.Plan(name="x", workload=workload, rate=None, seed=1, warms_up=True, sampling="usual", goal=Goal(), **sizes)
    ours = cllm_serve(HOUSE, ())
    if capacity is None:
        with pytest.raises(matches.OursFailed, match="it answers no request"):
            peers._capacity(plan, ours, ends)
    else:
        assert peers._capacity(plan, ours, ends) == capacity
    assert [order.seed for order in asked] == list(range(1, 1 + n_passes))


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command on servers that are not there: every run adds two pairs to what it finds. Gives the seeds that the runs began with."""
    seeds: list[int] = []

    def run_plan(
        plan: matches.Plan, _ours: object, _contenders: object, keep: Any, _is_ended: object, kept: Sequence[Page]
    ) -> dict[str, Any]:
        seeds.append(plan.seed)
        side = matches.Side(contender=Contender(peer="llama-server", setting="-no-kvu", command=()), kept=kept[0] if kept else None)
        monkeypatch.setattr(matches, "_side_page", lambda _side: side_page(len(side.ours)))
        side.ours = [{}]
        keep(matches.page([side]) | {"unfinished": ["llama-server (-no-kvu)"]})
        if plan.seed == KILLED:
            raise KeyboardInterrupt
        side.ours = [{}, {}]
        return matches.page([side])

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


def test_a_run_that_is_killed_has_written_what_was_measured_before_and_the_next_one_adds_to_it(measure: Any, tmp_path: Path) -> None:
    measure()
    with pytest.raises(KeyboardInterrupt):
        measure("--workloads=seed-40x8", "--add", f"--seed={KILLED}")
    data = kept_in(tmp_path, "seed-40x8-model")["data"]
    assert data["sides"][0]["n_pairs"] == 3
    assert data["unfinished"] == ["llama-server (-no-kvu)"]
    measure("--workloads=seed-40x8", "--add")
    data = kept_in(tmp_path, "seed-40x8-model")["data"]
    assert [one["n_pairs"] for one in data["runs"]] == [{"llama-server (-no-kvu)": n} for n in (2, 1, 2)]
    assert "unfinished" not in data


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

    def run_plan(
        _plan: object, _ours: object, _contenders: object, _keep: object, _is_ended: object, kept: Sequence[Page]
    ) -> dict[str, Any]:
        return {"sides": list(kept), "best": [], "broken": {}}

    monkeypatch.setattr(peers, "run_plan", run_plan)
    measure("--workloads=seed-40x8", "--add")
    assert "seed-40x8: all pairs are there already, and nothing is written" in capsys.readouterr().out
    assert kept_in(tmp_path, "seed-40x8-model") == before


def test_requests_are_new_also_where_a_seed_is_some_steps_of_an_earlier_run_away(measure: Any) -> None:
    measure()
    assert measure("--workloads=seed-40x8", "--add", f"--seed={1 + 3 * matches.SEED_STEP}") == [1, 2 + 3 * matches.SEED_STEP]


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
