"""All of the benchmarks in two minutes on the demo model: that they run and write what the report reads. Speed is not looked at.

python -m benchmarks smoke
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import attrs

from benchmarks import against_native, ceiling, kills, ladder, matches, passes, peers, promises, report, results, simulate, verify
from benchmarks.contenders import CALIBRATION_DIR, Contender, House, cllm_serve
from benchmarks.reporting.forms import of_kind
from benchmarks.reporting.readme import BEGIN, END
from benchmarks.server import Server
from cllm import demo
from cllm.bench.metrics import Goal
from cllm.bench.workloads import OVERLOAD_FACTORS, WORKLOADS, Workload


def small_workloads() -> list[Workload]:
    """Every recipe, so small that the demo model takes it in a second or two."""
    return [
        attrs.evolve(_few("seed-40x8", 4), n_generated=(6, 6)),
        attrs.evolve(_few("seed-160x5", 4), n_generated=(6, 6)),
        attrs.evolve(_few("mixed", 4), n_prompt=(8, 40), n_generated=(4, 12)),
        attrs.evolve(_few("mixed-small", 4), n_prompt=(8, 40), n_generated=(4, 12)),
        attrs.evolve(_few("long-among-short", 2), n_generated=(40, 40), n_prompt_late=200, n_generated_late=4),
        attrs.evolve(_few("shared-prefix", 4), n_prefix=100, n_generated=(6, 6)),
        attrs.evolve(_few("chat-turns", 2), n_turns=3, n_prompt=(8, 8), n_generated=(6, 6)),
    ]


def _few(name: str, n_requests: int) -> Workload:
    return attrs.evolve(WORKLOADS[name], n_requests=n_requests, concurrency=2)


def main(arguments: list[str] | None = None) -> None:
    """Run everything into a folder that is thrown away. Raises: AssertionError, when something is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks smoke", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", type=_parts, help=f"these parts alone, with commas between, one after the other: {', '.join(PARTS)}")
    parser.add_argument("--results", type=Path, help="a folder for what they write, which is kept (default: one that is thrown away)")
    asked = parser.parse_args(arguments)
    began = time.monotonic()
    with contextlib.ExitStack() as opened:
        folder = asked.results or Path(opened.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        if asked.only:
            _run(asked.only, folder)
        else:
            _run_lanes(folder)
            _run(["report"], folder)
            took_s = time.monotonic() - began
            print(
                f"smoke: all ran, in {took_s:.0f} s{'' if took_s <= LONG_S else f', which is to take {LONG_S:.0f}: is the machine busy?'}"
            )


def _parts(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        raise argparse.ArgumentTypeError(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return names


def _run(names: Sequence[str], folder: Path) -> None:
    for name in names:
        began = time.monotonic()
        PARTS[name](folder)
        print(f"smoke: {name} in {time.monotonic() - began:.0f} s", flush=True)


def _run_lanes(folder: Path) -> None:
    """All parts but the report, some beside others: most of their time goes to servers that start, which keeps one core busy.

    Each lane has a folder of its own, so that none reads what another is writing.
    """
    command = [sys.executable, "-m", "benchmarks", "smoke"]
    lanes = [
        (subprocess.Popen([*command, f"--only={','.join(names)}", f"--results={folder / str(i)}"]), folder / str(i))
        for i, names in enumerate(LANES)
    ]
    try:
        codes = [lane.wait() for lane, _ in lanes]
    finally:
        for lane, _ in lanes:
            if lane.poll() is None:  # as after a Ctrl-C: they stop their servers before their folder goes
                lane.send_signal(signal.SIGINT)
                lane.wait()
    assert not any(codes), codes
    for _, written in lanes:
        for path in written.glob("*.json"):
            path.rename(folder / path.name)


def run_bench(folder: Path) -> None:
    """`cllm bench` as a person runs it, with both endpoints, by turns and by the clock."""
    house = House(model=demo.path(), n_slots=2, n_cells=512, n_threads=1)
    page, plot = folder / "bench.json", folder / "bench.svg"
    load = ("--workload=seed-40x8", "--requests=4", f"--json={page}", *([f"--plot={plot}"] if has_matplotlib() else []))
    with cllm_serve(house, ()).server() as server:
        for options in (("--concurrency=2",), ("--concurrency=2", "--endpoint=chat"), ("--rate=20",)):
            command = (sys.executable, "-m", "cllm", "bench", f"127.0.0.1:{server.port}", *options, *load)
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            (one,) = json.loads(page.read_text("utf-8"))["passes"]
            assert (one["n_requests"], one["n_failed"], one["is_exact"]) == (4, 0, True), one
            assert None not in (
                one["server_cpu_s"],
                one["server_rss_peak_mb"],
                one["server_process"],
                *one["ttft_s"].values(),
                *one["itl_s"].values(),
            ), one
    page.unlink()  # the report reads what is in the folder
    assert plot.exists() or not has_matplotlib()


def has_matplotlib() -> bool:
    """Whether plots can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def run_ladder(folder: Path) -> None:
    """All stages that can be measured here."""
    parser = argparse.ArgumentParser()
    ladder.add_arguments(parser)
    sizes = ["--concurrency=1,2", "--turns=2", "--turns-a-start=2", "--requests=4", "--generated=6", "--ctx-size=1024", "--threads=1"]
    data = ladder.run(parser.parse_args([f"--model={demo.path()}", *sizes]))
    for rung in data["rungs"]:
        numbers = [stage["number"] for stage in rung["stages"]]
        assert numbers == sorted(set(numbers)), numbers
        assert numbers[:8] == list(range(8)), numbers
        assert {stage["name"]: stage["beside"] for stage in rung["stages"] if "beside" in stage} == ladder.BESIDE, rung["stages"]
        assert all(len(stage["tokens_per_s"]) == len(stage["ratios"]) == 2 for stage in rung["stages"])
        assert rung["starts"] == [0, 0], rung["starts"]
    results.write("ladder", "seed-40x8", {"model": results.model_facts(demo.path())}, data, folder)


def run_against_native(_: Path) -> None:
    """The whole stack beside the bare loop, each in a process of its own."""
    row = last_line(against_native.main, f"--model={demo.path()}", "--pairs=1", "--requests=2", "--concurrency=2", "--threads=1")["rows"][0]
    assert min(row["native_tokens_per_s"], row["served_tokens_per_s"], row["ratio_median"]) > 0, row


def run_simulation(_: Path) -> None:
    """The rules on a machine that only counts time, beside a fixed budget."""
    rows = last_line(simulate.main, "--rows", "32")["rows"]
    assert {row["rule"] for row in rows} == {"auto", "auto, 250 ms", "32 rows"}, rows
    assert len(rows) == 3 * len(simulate.WORKED) * len(simulate.MACHINES), rows


def last_line(command: Callable[[list[str]], None], *arguments: str) -> dict[str, Any]:
    """What a command says in JSON at its end."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        command([*arguments])
    page: dict[str, Any] = json.loads(told.getvalue().splitlines()[-1])
    return page


def run_passes(folder: Path) -> None:
    """Single calls, in both memories."""
    passes.main([f"--model={demo.path()}", "--sequences=4", "--cells=16", "--calls=1", "--threads=1", f"--results={folder}"])
    (run,) = of_kind(results.read_all(folder), "passes")
    assert all({"apart", "pool"} == set(shape["ms"]) for shape in run["data"]["shapes"])


def run_stack(folder: Path) -> None:
    """The stages above a model, on every fake."""
    parser = argparse.ArgumentParser()
    ceiling.add_arguments(parser)
    for fake, streams in (("instant", "1,4"), ("gpu", "2"), ("gpu-draws", "2")):
        data = ceiling.run(parser.parse_args([f"--fake={fake}", f"--streams={streams}", "--turns=1", "--generated=20", "--least=40"]))
        assert [str(rung["streams"]) for rung in data["rungs"]] == streams.split(",")
        assert data["profile"]["functions"]
        assert {"engine", "api", "the kernel's send"} <= set(data["profile"]["us_by_part"]), data["profile"]["us_by_part"]
        results.write("stack", fake, {}, data, folder)


def run_kills(folder: Path) -> None:
    """Two deaths that nobody notices."""
    parser = argparse.ArgumentParser()
    kills.add_arguments(parser)
    data = kills.run(parser.parse_args(["--rounds=2", "--generated=40", "--threads=1"]))
    assert data["n_complete"] == data["n_same"] == data["n_streams"] == 16, data
    assert data["n_same_unkilled"] == data["n_streams_unkilled"] > 0, data
    assert data["n_under_way"] > 0, data
    results.write("kills", "exact", {}, data, folder)


def run_promises(folder: Path) -> None:
    """Every part, for as little as shows that it runs; what does not depend on speed is kept here, too."""
    sizes = promises.Sizes(
        n_conversations=(2, 3),
        n_slots=2,
        settled_s=0.2,
        counted_s=0.6,
        cleared_s=0.2,
        n_crowd=2,
        n_quiet=4,
        n_flooding=4,
        think_s=0.01,
        n_turns=1,
        n_prompt_late=200,
        n_over_requests=8,
        n_planned=8,
    )
    asked = promises.Asked(model=demo.path(), n_threads=1, seed=1, sizes=sizes)
    kept = {name: promises.run(name, asked, folder)["promises"] for name in promises.PARTS}
    assert all(kept.values())
    assert all(one["is_kept"] for one in kept["over-commit"]), kept["over-commit"]


def run_verify(folder: Path) -> None:
    """llama.cpp beside itself: the same distributions."""
    sizes = ["--text-tokens=16", "--threads=1", f"--results={folder}"]
    verify.main([f"--model={demo.path()}", "--backend=llama-cpu", *sizes])
    (run,) = of_kind(results.read_all(folder), "verify")
    (row,) = run["data"]["rows"]
    assert (row["mean"], row["max"], row["top1_agreement"]) == (0.0, 0.0, 1.0), row
    assert row["n_rows"] > 0


@attrs.frozen(kw_only=True)
class Standing(Contender):
    """One whose server runs already, and goes on to."""

    running: Server

    @classmethod
    def of(cls, contender: Contender, running: Server) -> Standing:
        """The same contender with its server."""
        return cls(running=running, **{field.name: getattr(contender, field.name) for field in attrs.fields(Contender)})

    def server(self) -> contextlib.AbstractContextManager[Server]:
        """See `Contender.server`."""
        return contextlib.nullcontext(self.running)


def run_peers(folder: Path) -> None:
    """Ours beside ours, on every workload. One has two beside it, and a second round, which shows that the best of them go on.

    That one starts its servers, as all do when a person runs this. It takes longer than what is measured, so that for the others two stand.
    """
    first, *others = [_plan(workload) for workload in small_workloads()]
    house = House(model=demo.path(), n_slots=4, n_cells=2048, n_threads=1)
    measured_once = (CALIBRATION_DIR, str(folder / "calibration"))  # what steps cost takes longer to measure than the loads here
    ours = cllm_serve(house, measured_once)
    contenders = [cllm_serve(house, measured_once, "one"), cllm_serve(house, (*measured_once, "--row-budget", "64"), "another")]
    _run_plan(first, ours, contenders, folder)
    with ours.server() as mine, contenders[0].server() as theirs:
        for plan in others:
            _run_plan(plan, Standing.of(ours, mine), [Standing.of(contenders[0], theirs)], folder)


def _run_plan(plan: matches.Plan, ours: Contender, contenders: Sequence[Contender], folder: Path) -> None:
    data = matches.run_plan(plan, ours, contenders, keep=lambda _so_far: None)
    check_peers(plan, data)
    results.write("peers", plan.name, {"rate": plan.rate, "model": results.model_facts(demo.path())}, data, folder)


def run_overload(folder: Path) -> None:
    """Ours beside ours as a person runs it: how much can be served is measured first, and then comes half of it to four times as much."""
    sizes = ["--concurrency=2", "--requests=3", "--no-warm-up", "--pairs=1", "--threads=1"]
    beside = ["--only=cllm", "--beside=--row-budget 64", f"--ours={CALIBRATION_DIR}", f"--ours={folder / 'calibration'}"]
    with contextlib.redirect_stdout(io.StringIO()):
        peers.main([f"--model={demo.path()}", "--workloads=overload", *sizes, *beside, f"--results={folder}"])
    runs = [run for run in of_kind(results.read_all(folder), "peers") if run["settings"]["rate"]]
    rates = sorted(run["settings"]["rate"] for run in runs)
    assert len(rates) == len(OVERLOAD_FACTORS), runs
    assert [round(rate / rates[0], 2) for rate in rates] == [factor / OVERLOAD_FACTORS[0] for factor in OVERLOAD_FACTORS], rates
    for run in runs:
        assert [side["n_pairs"] for side in run["data"]["sides"]] == [1], run["name"]
        check_answers(run["name"], run["data"])


def _plan(workload: Workload) -> matches.Plan:
    n_pairs = 2 if workload.name == "seed-40x8" else 1  # a second round is to be seen but once
    sizes = {"n_pairs": n_pairs, "n_screen": 1, "n_pairs_start": 1, "warms_up": False}
    return matches.Plan(name=workload.name, workload=workload, rate=None, seed=1, sampling="usual", goal=Goal(), **sizes)


def check_peers(plan: matches.Plan, data: dict[str, Any]) -> None:
    """Everybody was answered with exactly the asked tokens, and every figure is there."""
    check_answers(plan.name, data)
    figures = {row["figure"] for row in data["best"]}
    assert {"tokens/s", "first text p50, ms", "whole answer max, ms", "server CPU per token, ms"} <= figures, (plan.name, figures)
    if plan.workload.n_prompt_late:
        assert "longest wait of the others, ms" in figures


def check_answers(name: str, data: dict[str, Any]) -> None:
    """Everybody was answered with exactly the asked tokens."""
    assert not data["broken"], (name, data["broken"])
    for side in data["sides"]:
        assert set(side["n_failed"].values()) | set(side["n_inexact"].values()) == {0}, (name, side["n_failed"], side["n_inexact"])


def run_report(folder: Path) -> None:
    """The report over what was written."""
    readme, page = folder / "README.md", folder / "page" / "report.md"
    readme.write_text(f"{BEGIN}\n{END}\n", "utf-8")
    plots = [] if has_matplotlib() else ["--no-plots"]
    report.main(["--results", str(folder), "--page", str(page), "--readme", str(readme), *plots])
    text = page.read_text("utf-8")
    sections = {title: body for title, _, body in (part.partition("\n") for part in text.split("\n## ")[1:])}
    assert list(sections) == [report.GLANCE_TITLE, *report.TITLES.values()], list(sections)
    for run in results.read_all(folder):
        body = sections[report.TITLES[run["kind"]]]
        assert f"# {run['name']}\n" in body or f"\n{run['name']}: " in body, (run["kind"], run["name"])
    missing = [name for name in _images(text) if not (page.parent / name).exists()]
    assert plots or not missing, missing
    lines = readme.read_text("utf-8").splitlines()
    for start in ("| workload | cLLM / the other |", "| overload-", "| seed-40x8, "):
        assert any(line.startswith(start) for line in lines), (start, lines)


def _images(text: str) -> list[str]:
    return [part.partition(")")[0] for part in text.split("](")[1:] if part.partition(")")[0].endswith(".svg")]


LONG_S: Final = 120.0  # for all of it, on two cores
LANES: Final[tuple[tuple[str, ...], ...]] = (  # that take as long as each other
    ("bench", "peers", "overload", "verify", "against_native", "passes", "kills"),
    ("ladder", "simulation", "stack", "promises"),
)
PARTS: Final = {
    part.__name__.removeprefix("run_"): part
    for part in (
        run_bench, run_peers, run_overload, run_ladder, run_against_native, run_passes, run_simulation, run_stack, run_kills, run_promises,
        run_verify, run_report,
    )
}  # fmt: skip


if __name__ == "__main__":
    main()
