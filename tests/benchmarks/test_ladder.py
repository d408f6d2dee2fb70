"""The ladders measure what they say: structure and the self-check, never speed."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import trio

from benchmarks import ceiling, instant, ladder, layers, stages
from benchmarks.instant import InstantModel
from benchmarks.layers import BORDER, GATES, LAYERS, Bypassed, Counter, Gate, check, key_of
from benchmarks.stages import Bench, Cores, Ran, Work, layers_of, run_checked
from benchmarks.workload import GREEDY, PLAIN, Ask
from cllm.backend import Batch, ModelSpec
from cllm.bench import process
from cllm.bench.workloads import id_range
from cllm.config import Settings
from cllm.serve.modelthread import ModelThread
from cllm.serve.worker.model import WorkerBackend, WorkerModel
from cllm.testing.fake import FakeBackend
from cllm.threadtimes import ThreadTimes

ENGINE, LOOP = ceiling.ENGINE, ceiling.LOOP
NEEDED = {"step": 5, "draw": 4, "request": 3, "token": 12, "any": 0}
COUNTS = {key_of(gate): NEEDED[gate.per] for gate in GATES}


@pytest.fixture(scope="module")
def bench() -> Bench:
    """An instant model; nothing of llama.cpp's is in it."""
    return Bench(InstantModel(n_tokens=512, n_rows=8), Settings(), Counter())


def small_work(**fields: Any) -> Work:
    asks = [Ask(prompt=(40 + i, 50, 60), n_generated=4 + i) for i in range(3)]
    return Work(**{"asks": asks, "concurrency": 2, "sampling": GREEDY, "seed": 7, **fields})


# --- who has the cores -------------------------------------------------------------------------------------------------


def test_threads_that_compute_are_those_that_used_the_cores_most() -> None:
    before = {1: ThreadTimes(5.0, 1.0), 2: ThreadTimes(0.0, 0.0)}
    after = {1: ThreadTimes(5.5, 1.25), 2: ThreadTimes(9.0, 0.5), 3: ThreadTimes(8.0, 1.5)}  # the third began in between
    assert Cores.between(before, after, 2) == Cores(waiting_s=1.0, others_s=0.5)


def test_where_the_kernel_does_not_tell_nothing_is_made_up() -> None:
    assert Cores.between({}, {}, 2) is None


@pytest.mark.skipif(not process.threads(os.getpid()), reason="needs a kernel that tells a thread's times: Linux with schedstats")
def test_the_kernel_tells_what_this_thread_used() -> None:
    before = process.threads(os.getpid())[threading.get_native_id()]
    while (now := process.threads(os.getpid())[threading.get_native_id()]).cpu_s <= before.cpu_s:
        pass
    assert now.waiting_s >= before.waiting_s


def test_a_stage_tells_what_its_steps_waited_and_what_else_was_spent(bench: Bench) -> None:
    measured = ladder.Measured(number=0, stage=stages.EngineStage(bench))
    measured.passes = [attrs.evolve(run_checked(measured.stage, small_work(), ENGINE), cores=Cores(waiting_s=0.5, others_s=1.0))]
    page, n_steps = measured.page(measured, None), measured.passes[0].n_steps
    assert (page["waiting_us_per_step"], page["others_us_per_step"]) == (0.5e6 / n_steps, 1e6 / n_steps)


def test_a_stage_tells_where_its_steps_went_and_what_they_took_more_there(bench: Bench) -> None:
    below, above = (ladder.Measured(number=i, stage=stages.EngineStage(bench)) for i in range(2))
    ran = run_checked(below.stage, small_work(), ENGINE)
    assert ran.seconds["sampling"] > 0
    assert ran.seconds["engine"] > 0
    n = ran.n_steps
    below.passes = [attrs.evolve(ran, wall_s=n * 1e-3, seconds={"native": n * 7e-4, "sampling": n * 1e-4, "engine": n * 1e-4})]
    above.passes = [attrs.evolve(ran, wall_s=n * 2e-3, seconds={"native": n * 1e-3, "sampling": n * 1e-4, "engine": n * 1e-4})]
    page = above.page(below, below)
    assert page["spent_us_per_step"] == pytest.approx({"native": 1000, "sampling": 100, "engine": 100, "rest": 800})
    assert {part: spread["median"] for part, spread in page["more_us_per_step"].items()} == pytest.approx(
        {"native": 300, "sampling": 0, "engine": 0, "rest": 700}, abs=1e-6
    )


def test_what_the_scheduler_does_while_the_model_computes_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, counter = [0.0], Counter()
    monkeypatch.setattr(layers, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def passes(seconds: float, meanwhile: Callable[[], object] = lambda: None) -> None:
        now[0] += seconds
        meanwhile()
        now[0] += seconds

    native, engine = counter._timed("native", passes), counter._timed("engine", passes)
    native(2.0, lambda: engine(5.0))
    assert counter.seconds == {"native": 14.0, "sampling": 0.0, "engine": 0.0}, "beside it"
    engine(1.0, lambda: native(3.0))
    assert counter.seconds == {"native": 20.0, "sampling": 0.0, "engine": 2.0}, "before and behind it"
    engine(1.0)
    assert counter.seconds == {"native": 20.0, "sampling": 0.0, "engine": 4.0}
    with pytest.raises(TypeError):
        engine()
    assert counter.seconds["engine"] == 4.0, "it runs no more"
    now[0] += 100.0
    assert sum(counter.seconds.values()) == now[0] - 100.0


def test_of_a_model_in_another_process_nothing_is_made_up() -> None:
    with isolated_fake() as model:
        measured = ladder.Measured(number=0, stage=stages.isolated_stage(Bench(model, Settings(), Counter())))
        measured.passes = [run_checked(measured.stage, small_work())]
    page = measured.page(measured, measured)
    assert page["spent_us_per_step"] == page["more_us_per_step"] == {}


# --- the self-check ----------------------------------------------------------------------------------------------------


def counts_of(stage: str) -> dict[str, int]:
    """What a truthful pass of a stage counts."""
    return {key_of(gate): COUNTS[key_of(gate)] if gate.layer in layers_of(stage) else 0 for gate in GATES}


@pytest.mark.parametrize("stage", [*LAYERS, BORDER])
def test_a_pass_through_all_its_layers_is_accepted(stage: str) -> None:
    check(stage, layers_of(stage), counts_of(stage), NEEDED)


@pytest.mark.parametrize("gate", [gate for gate in GATES if gate.per != "any"], ids=key_of)
def test_whichever_gate_a_pass_misses_it_is_refused(gate: Gate) -> None:
    stage = BORDER if gate.layer == BORDER else "client"
    for n_calls in (0, NEEDED[gate.per] - 1):
        with pytest.raises(Bypassed, match=f"went round its layer {gate.layer}"):
            check(stage, layers_of(stage), {**counts_of(stage), key_of(gate): n_calls}, NEEDED)


@pytest.mark.parametrize(("below", "above"), list(itertools.pairwise(LAYERS)))
def test_a_pass_through_a_layer_above_its_own_is_refused(below: str, above: str) -> None:
    with pytest.raises(Bypassed, match=f"went through {above}, which is not part of it"):
        check(below, layers_of(below), counts_of(above), NEEDED)


@attrs.define(eq=False)
class Liar:
    """What an earlier ladder did: a stage with a layer's name that runs the one below."""

    name: str
    below: Any
    adds: str = ""

    def run(self, work: Work) -> Ran:
        return self.below.run(work)


def test_a_step_with_a_part_of_a_prompt_alone_draws_nothing_and_is_no_way_round() -> None:
    work = Work(asks=[Ask(prompt=tuple(range(40, 70)), n_generated=4)], concurrency=1, sampling=GREEDY, seed=7)
    small = Bench(InstantModel(n_tokens=512, n_rows=8), Settings(row_budget=8), Counter())
    ran = run_checked(stages.EngineStage(small), work, ENGINE)
    assert (ran.n_tokens, ran.counts["cllm.engine.batch.compute.sample"]) == (4, 4)
    n_steps = ran.counts["cllm.engine.stepping.StepScheduler.apply"]
    assert n_steps > 4
    needed = work.needed({**ran.counts, "llama_cpp.llama_decode": n_steps})  # which these would be of llama.cpp
    assert (needed["step"], needed["draw"]) == (n_steps, 4)


def test_a_loop_stage_that_calls_the_engine_directly_is_found_out(bench: Bench) -> None:
    engine = stages.EngineStage(bench)
    assert run_checked(engine, small_work(), ENGINE).n_tokens == 15
    with pytest.raises(Bypassed, match=r"stage loop went round its layer loop: 0 calls of cllm\.serve\.steploop"):
        run_checked(Liar("loop", engine), small_work(), LOOP)


def test_an_app_stage_that_reads_the_engines_streams_is_found_out(bench: Bench) -> None:
    with pytest.raises(Bypassed, match="stage app went round its layer app"):
        run_checked(Liar("app", stages.LoopStage(bench)), small_work(), (*LOOP, "app"))


def test_a_stream_that_is_answered_in_one_piece_is_found_out(bench: Bench) -> None:
    with pytest.raises(Bypassed, match="stage app went round its layer sse"):
        run_checked(stages.AppStage(bench, stream=False), small_work(), (*LOOP, "app", "sse"))


@pytest.mark.parametrize(("n_pieces", "is_stream"), [([3, 2], False), ([1, 1], False), ([4, 1], True), ([17, 17], True)])
def test_events_that_are_sent_when_the_answer_is_complete_are_no_stream(n_pieces: list[int], is_stream: bool) -> None:
    asks = [Ask(prompt=(5,), n_generated=stages.N_STREAMED)] * 2
    work = small_work(asks=asks)
    with contextlib.nullcontext() if is_stream else pytest.raises(Bypassed, match="stage sse does not stream"):
        stages.refuse_unstreamed("sse", n_pieces, work)


def test_of_answers_of_a_few_tokens_nobody_knows_whether_they_were_streamed() -> None:
    stages.refuse_unstreamed("sse", [1] * len(small_work().asks), small_work())


def test_steps_computed_in_the_trio_thread_are_no_hop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run_here(_thread: ModelThread, function: Any, *arguments: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return function(*arguments)

    monkeypatch.setattr(ModelThread, "run", run_here)
    with pytest.raises(Bypassed, match=r"0 calls of cllm\.serve\.steploop\.StepLoop\._compute"):
        run_checked(stages.LoopStage(bench), small_work(), LOOP)


def test_a_stage_that_computes_in_its_own_process_is_not_isolated(bench: Bench) -> None:
    with pytest.raises(Bypassed, match="stage isolated went through sampling, which is not part of it"):
        run_checked(stages.isolated_stage(bench), small_work())


def test_an_isolated_stage_sends_every_step_across_and_takes_every_answer() -> None:
    with isolated_fake() as model:
        ran = run_checked(stages.isolated_stage(Bench(model, Settings(), Counter())), small_work())
    assert ran.n_tokens == 15
    assert ran.counts["cllm.serve.worker.frames.Channel.send"] >= ran.n_steps >= 8


@contextmanager
def isolated_fake() -> Iterator[WorkerModel]:
    model = WorkerBackend(FakeBackend(), "cllm.testing.fake:make_backend", hang_s=60.0).load(ModelSpec(path=""), lambda share: True)
    try:
        assert isinstance(model, WorkerModel)
        yield model
    finally:
        model.close()


def test_after_counting_everything_is_as_it_was(bench: Bench) -> None:
    from cllm.engine.stepping import StepScheduler

    before = StepScheduler.plan
    run_checked(stages.EngineStage(bench), small_work(), ENGINE)
    assert StepScheduler.plan is before


def test_a_stage_that_gives_fewer_tokens_is_refused(bench: Bench) -> None:
    class Short(Liar):
        def run(self, work: Work) -> Ran:
            return attrs.evolve(self.below.run(work), n_tokens=3)

    with pytest.raises(RuntimeError, match="gave 3 tokens, asked for were 15"):
        run_checked(Short("engine", stages.EngineStage(bench)), small_work(), ENGINE)


# --- the same work in every stage --------------------------------------------------------------------------------------


def test_fixed_batches_carry_every_token_once(bench: Bench) -> None:
    work = small_work()
    generated = [[100 + i] * ask.n_generated for i, ask in enumerate(work.asks)]
    batches = stages.fixed_batches(bench.model, bench.settings, work, generated)
    n_rows = sum(len(fixed.tokens) for fixed in batches)
    assert sum(len(fixed.owners) for fixed in batches) == work.n_tokens
    assert n_rows == sum(len(ask.prompt) + ask.n_generated - 1 for ask in work.asks)  # nothing is computed after a last token
    assert all(int(fixed.outputs.sum()) == len(fixed.owners) for fixed in batches)


def test_stages_ask_for_the_same_with_prompts_that_no_cache_knows() -> None:
    asks = small_work().asks
    works = [ladder.work_of(asks, number, 1024, concurrency=2, sampling=GREEDY, seed=1) for number in range(3)]
    assert len({work.asks[0].prompt[0] for work in works}) == 3
    assert all(work.asks[1].prompt[2:] == asks[1].prompt[2:] for work in works)


def test_prompts_stay_within_a_small_vocabulary_and_begin_otherwise_however_many_there_are() -> None:
    asks = small_work().asks
    serials = range(0, 20_000, len(ladder.STAGES) * len(asks))
    works = [ladder.work_of(asks, number, 1024, concurrency=2, sampling=GREEDY, seed=1) for number in serials]
    prompts = [ask.prompt for work in works for ask in work.asks]
    low, high = id_range(1024)
    assert all(low <= token < high for prompt in prompts for token in prompt[:2])
    assert len({prompt[:2] for prompt in prompts}) == len(prompts)


# --- whole runs --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    pytest.importorskip("gguf", reason="the package gguf, which makes the tiny models, is not installed")
    from cllm.testing.tiny import make_tiny_gguf

    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    make_tiny_gguf(path, "qwen3")
    return path


def parsed(module: Any, *arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return parser.parse_args(arguments)


def test_of_two_turns_each_stage_comes_as_early_in_one_as_late_in_the_other_and_not_always_behind_the_same_one() -> None:
    measured: Any = list(range(10))
    turns = [ladder.in_turn(measured, 1, turn) for turn in range(4)]
    assert all(sorted(order) == measured for order in turns)
    assert [a + b for a, b in zip(*(map(order.index, measured) for order in turns[:2]), strict=True)] == [9] * 10
    assert len({tuple(order) for order in turns}) == 4
    assert ladder.in_turn(measured, 1, ladder.WARM_UP) == measured


def test_a_ladder_on_a_tiny_model_has_every_stage_and_its_figures(tiny_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--requests", "3", "--generated", "5", "--prompt", "6", "--turns", "2", "--ctx-size", "512", "--threads", "1"]
    kept: list[dict[str, Any]] = []
    data = ladder.run(parsed(ladder, "--model", str(tiny_file), "--concurrency", "2", "--sampling", "plain", *small), kept.append)
    (rung,) = data["rungs"]
    assert kept == [data]
    assert rung["starts"] == [0, 1]
    assert (rung["concurrency"], rung["sampling"]) == (2, PLAIN.name)
    assert [page["name"] for page in rung["stages"]] == [name for name in ladder.STAGES if name not in rung["not_found"]]
    for number, page in enumerate(rung["stages"]):
        assert ladder.STAGES[page["number"]] == page["name"]
        assert len(page["tokens_per_s"]) == len(page["ratios"]) == len(page["n_steps"]) == 2
        assert min(page["n_steps"]) >= 8  # 15 tokens, two at a time
        assert ("us_per_token" in page) == ("us_per_step" in page) == (number > 0)
        assert page.get("beside") == ladder.BESIDE.get(page["name"])
    assert rung["stages"][0]["ratios"] == [1.0, 1.0]
    by_name = {page["name"]: page for page in rung["stages"]}
    assert by_name["replay"]["counts"] == {"llama_cpp.llama_decode": by_name["replay"]["n_steps"][-1]}
    assert set(by_name["sse"]["more_us_per_step_than_replay"]) == {"native", "sampling", "engine", "rest"}
    assert "concurrency 2, temperature 1" in capsys.readouterr().out


def test_a_start_has_as_many_turns_as_were_asked_for_and_warms_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[int, int]] = []
    opened: list[int] = []

    @contextmanager
    def open_none(*_arguments: Any) -> Iterator[tuple[int, list[Any]]]:
        opened.append(len(opened))
        yield 1024, []

    def turn(_arguments: Any, _measured: Any, _n_vocab: int, _concurrency: int, _sampling: Any, number: int, serial: int) -> None:
        done.append((number, serial))

    monkeypatch.setattr(ladder, "open_stages", open_none)
    monkeypatch.setattr(ladder, "_turn", turn)
    monkeypatch.setattr(ladder, "pages_of", lambda measured: [])
    monkeypatch.setattr(ladder, "show", lambda rung: None)
    data = ladder.run(parsed(ladder, "--model", __file__, "--concurrency", "2", "--turns", "5", "--turns-a-start", "2"))
    assert [rung["starts"] for rung in data["rungs"]] == [[0, 0, 1, 1, 2]]
    assert done == [(ladder.WARM_UP, 0), (0, 1), (1, 2), (ladder.WARM_UP, 3), (2, 4), (3, 5), (ladder.WARM_UP, 6), (4, 7)]
    assert len(opened) == 3


def test_calls_that_nobody_makes_are_not_made_again(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ladder.main(["--model", __file__, "--stages", "native,replay"])
    assert "--stages: replay makes the calls of sse again beside native, which have to be among them" in capsys.readouterr().err


def test_no_stage_keeps_anything_on_the_host_since_only_new_schedulers_would() -> None:
    options, settings = ladder._sizes(parsed(ladder, "--model", __file__, "--concurrency", "2,4"))
    assert options[options.index("--host-cache-mb") + 1] == "0"
    assert (settings.host_cache_mb, settings.parallel) == (0, 4)


def test_the_fake_of_a_fast_device_takes_as_long_again_for_every_64_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[float] = []
    monkeypatch.setattr(instant, "_wait_until", ends.append)
    monkeypatch.setattr("benchmarks.instant.time.perf_counter", lambda: 100.0)
    model = InstantModel(n_tokens=512, step_s=0.002, n_rows=256)
    batch = Batch(256)
    for n_outputs in (0, 1, 64, 65, 256):
        batch.n_outputs = n_outputs
        assert len(model.step(batch)) == n_outputs
    assert [round(1000 * (end - 100)) for end in ends] == [2, 2, 2, 4, 8]
    assert all(fake.n_rows >= 256 for fake in ceiling.FAKES.values())  # the most streams that are measured


def test_a_ceiling_has_every_stage_and_its_cpu_time(capsys: pytest.CaptureFixture[str]) -> None:
    data = ceiling.run(parsed(ceiling, "--fake", "instant", "--streams", "2", "--generated", "5", "--turns", "1"))
    (rung,) = data["rungs"]
    clients = ["client"] if importlib.util.find_spec("openai") is not None else []
    assert [page["name"] for page in rung["stages"]] == ["sampling", "engine", "loop", "app", "http", "sse", *clients]
    assert all(page["cpu_us_per_token"]["median"] > 0 for page in rung["stages"])
    assert rung["requests_per_s"]["median"] > 0
    assert "requests of one token" in capsys.readouterr().out


def test_a_profile_names_the_parts(capsys: pytest.CaptureFixture[str]) -> None:
    ceiling.show_profile(ceiling.profile(parsed(ceiling, "--fake", "instant", "--streams", "2", "--generated", "5", "--profile")))
    shown = capsys.readouterr().out
    assert all(part in shown for part in ("engine", "http", "trio", "the kernel's send"))
