"""A model in a process of its own: it gives what it gives here, and its death costs nobody his answer but the one who brought it about."""

from __future__ import annotations

import copy
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import attrs
import msgspec
import numpy as np
import pytest
import trio

from cllm.backend import Batch, LaysOut, ModelSpec
from cllm.config import Settings
from cllm.engine.batch.plan import Plan, Restore, Save
from cllm.engine.memory.hostpool import Piece
from cllm.engine.memory.pieces import Chain
from cllm.engine.memory.prices import Prices
from cllm.engine.sampling.dry import TokenSet
from cllm.engine.sampling.params import SamplingParams
from cllm.errors import (
    Aborted,
    DeadlineExceeded,
    GenerationFailed,
    LoadAborted,
    LoadFailed,
    ModelDied,
    StepFailed,
    TokenizeFailed,
    Unavailable,
)
from cllm.serve.disktier import DiskTier
from cllm.serve.worker import frames, start
from cllm.serve.worker import life as workerlife
from cllm.serve.worker import main as workermain
from cllm.serve.worker.crossing import Bench, Crossing
from cllm.serve.worker.frames import Ended
from cllm.serve.worker.life import WorkerLife
from cllm.serve.worker.model import WorkerBackend, WorkerModel
from cllm.serve.worker.process import WorkerProcess
from cllm.serve.worker.vocabulary import WorkerVocabulary
from cllm.testing import mortal
from cllm.testing.engine import RunningEngine
from cllm.testing.fake import N_TOKENS_LEAST, FakeModel, FakeVocabulary, make_backend
from cllm.text.grammar import GrammarSource, Kind
from tests.serve.conftest import (
    HANG_S,
    TEST_S,
    Answer,
    answers,
    kill,
    kill_again_and_again,
    kill_twice,
    make_spec,
    serving,
    text_alone,
    until,
    until_replaced,
)

PROMPTS = ("once upon a time", "the sea", "a", "seven long winters and seven short summers", "lorem ipsum", "dolor", "b", "under a low sky")
SAMPLINGS = {
    "at random": SamplingParams(temperature=1.0, top_p=0.95),
    "with penalties": SamplingParams(temperature=1.0, presence_penalty=1.0, frequency_penalty=0.5, repeat_penalty=1.2),
    "with DRY": SamplingParams(temperature=1.0, dry_multiplier=0.8),
    "by mirostat": SamplingParams(temperature=1.0, mirostat=2, mirostat_tau=3.0),
    "with a bias": SamplingParams(temperature=0.0, logit_bias=((101, 5.0), (32, float("-inf")))),
}


def load(path: str = "", *, hang_s: float = TEST_S, n_cells: int = 4096) -> WorkerModel:
    backend = WorkerBackend(mortal.make_backend(), "cllm.testing.mortal:make_backend", hang_s)
    model = backend.load(ModelSpec(path=path, n_cells=n_cells, n_rows_max=2048), lambda share: True)
    assert isinstance(model, WorkerModel)
    return model


@pytest.fixture
def model() -> Iterator[WorkerModel]:
    loaded = load()
    yield loaded
    loaded.close()


# --- nobody sees that it is elsewhere ---------------------------------------------------------------------------------


def test_the_next_one_is_told_as_many_layers_on_the_gpu_as_the_first_one_found_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int | None] = []
    model = FakeModel()

    def start(self: WorkerLife, *_: object, **__: object) -> frames.Loaded:
        told.append(self._spec.n_gpu_layers)
        return frames.Loaded(
            info=attrs.evolve(model.info, n_gpu_layers=18),
            capabilities=model.capabilities,
            n_cells=model.n_cells,
            n_cells_slot=model.n_cells_slot,
            n_slots=model.n_slots,
            n_rows_max=model.n_rows_max,
            vocabulary=None,
        )

    monkeypatch.setattr(WorkerLife, "_start", start)
    life = WorkerLife("cllm.testing.fake:make_backend", ModelSpec(path=""), TEST_S)
    life.start(lambda _share: True)
    life.revive()
    assert told == [None, 18]


async def test_requests_get_what_they_get_of_a_model_in_this_process(model: WorkerModel) -> None:
    async with serving(model) as running:
        given = await answers(running, *(make_spec(prompt, 10 + i) for i, prompt in enumerate(PROMPTS)))
    assert [one.text for one in given] == [text_alone(prompt, 10 + i) for i, prompt in enumerate(PROMPTS)]


def test_what_a_terminal_sends_to_its_group_is_not_for_it(model: WorkerModel) -> None:
    assert os.getpgid(model.pid) == model.pid


def test_it_is_deaf_to_signals_before_it_imports_what_takes_time() -> None:
    code = (
        "import sys; from cllm.serve.worker import start; assert not {'numpy', 'msgspec', 'trio'} & sys.modules.keys(), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_its_steps_cost_is_measured_there_and_told_as_it_goes_on() -> None:
    model = WorkerBackend(make_backend(), "cllm.testing.fake:make_backend", TEST_S).load(ModelSpec(path=""), lambda share: True)
    assert isinstance(model, WorkerModel)
    shares: list[float] = []

    def on_progress(share: float) -> bool:
        shares.append(share)
        return True

    try:
        curve = model.measure(on_progress)
    finally:
        model.close()
    assert {1, 16} <= dict(curve.rows).keys()
    assert shares
    assert shares == sorted(shares)


async def test_what_its_process_logs_or_writes_to_stderr_is_logged_here(caplog: pytest.LogCaptureFixture) -> None:
    expected = {
        ("mortal", logging.WARNING, "a warning that\nhas 2 lines"),
        ("cllm.worker", logging.WARNING, "what native code writes"),
    }
    model = load("talks")
    try:
        with trio.move_on_after(TEST_S):
            await until(lambda: expected <= set(caplog.record_tuples))
    finally:
        model.close()
    assert expected <= set(caplog.record_tuples)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
async def test_whatever_sampling_remembers_goes_with_it_and_outlives_it(model: WorkerModel, sampling: SamplingParams) -> None:
    specs = [make_spec(prompt, 40, sampling=sampling, seed=i, n_logprobs=2) for i, prompt in enumerate(PROMPTS[:3])]
    async with serving(FakeModel()) as running:
        expected = await answers(running, *specs)
    async with serving(model) as running, trio.open_nursery() as nursery:
        nursery.start_soon(kill_again_and_again, running, model, 20)
        given = await answers(running, *specs)
    assert [one.tokens for one in given] == [one.tokens for one in expected]


async def test_breakers_that_were_looked_for_before_hold_there(model: WorkerModel) -> None:
    every = TokenSet.of(np.ones(model.vocabulary.n_tokens, np.bool_))  # so that nothing is a repetition
    plain = SamplingParams(temperature=1.0, logit_bias=((97, 60.0), (98, 60.0)))  # a and b alone, so that much is repeated
    dry = attrs.evolve(plain, dry_multiplier=100.0, dry_allowed_length=1)
    async with serving(model) as running:
        specs = [make_spec("aaaa aaaa", 30, seed=3, sampling=sampling) for sampling in (plain, dry)]
        given = await answers(running, *specs, attrs.evolve(specs[1], dry_breakers=every))
    assert given[0].text == given[2].text != given[1].text


async def test_grammars_and_the_prompts_own_logprobs_are_the_same(model: WorkerModel) -> None:
    source = GrammarSource(Kind.REGEX, "(yes|no|maybe so){1,3}")

    async def given(running: RunningEngine) -> list[Answer]:
        grammar = await running.engine.grammar(running.engine.model, source, timeout_s=TEST_S)
        held = make_spec("is it?", 20, grammar=grammar, sampling=SamplingParams(temperature=1.0))
        return await answers(running, held, make_spec("the sea", 4, n_prompt_logprobs=1))

    async with serving(FakeModel()) as running:
        expected = await given(running)
    async with serving(model) as running:
        assert [(one.text, one.tokens) for one in await given(running)] == [(one.text, one.tokens) for one in expected]


async def test_what_must_come_comes_whatever_the_logits_are(model: WorkerModel) -> None:
    async with serving(model) as running:
        with running.engine.open([make_spec("a", 4)]) as stream:
            running.scheduler._sequences[stream.seq_ids[0]].sampler.force([72, 105])
            tokens = [token async for events in stream for _, event in events for token in getattr(event, "tokens", [])]
        (after,) = await answers(running, make_spec("aHi", 2))
    assert tokens == [72, 105, *after.tokens]


async def test_texts_are_tokenised_there_and_longer_ones_than_a_line_too(model: WorkerModel) -> None:
    async with serving(model) as running:
        for text in ("", "hello", "x" * 100_000, "\ud800 and on"):
            expected = FakeModel().vocabulary.tokenize(text, add_special=True, parse_special=False)
            assert await running.engine.tokenize(text, add_special=True, parse_special=False) == expected


@pytest.mark.parametrize("text", ["", "a"])
async def test_no_text_is_tokenised_in_trios_thread_which_a_new_worker_would_hold_up(
    model: WorkerModel, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(model) as running:
        threads: list[threading.Thread] = []
        tokenize = model.vocabulary.tokenize
        monkeypatch.setattr(
            model.vocabulary, "tokenize", lambda *given, **named: (threads.append(threading.current_thread()), tokenize(*given, **named))[1]
        )
        await running.engine.tokenize(text, add_special=True, parse_special=False)
    assert len(threads) == 1
    assert threads[0] is not threading.current_thread()


def test_a_process_that_takes_long_to_go_is_not_waited_for(model: WorkerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives much memory back."""
    process = model.life.process
    assert process is not None

    really_wait = process._popen.wait

    def wait(seconds: float | None = None) -> int:
        if seconds is None:  # whoever has all the time there is
            return really_wait()
        raise subprocess.TimeoutExpired("worker", seconds)

    with monkeypatch.context() as some:
        some.setattr(process._popen, "wait", wait)
        assert "not gone" in model.life.bury()


async def test_a_step_that_nobody_waits_for_leaves_the_others_as_they_are(model: WorkerModel) -> None:
    async with serving(model) as running:
        with running.engine.open([make_spec("a" * 2000, 100)]) as stream:
            await until(lambda: running.loop.is_computing)
            stream.cancel()
        (answer,) = await answers(running, make_spec("the sea", 8))
    assert answer.text == text_alone("the sea", 8)


async def test_after_a_step_that_could_not_be_sent_the_worker_still_knows_every_token(
    model: WorkerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec("the sea", 12, sampling=SAMPLINGS["with penalties"], seed=3)
    n_asked, ask = 0, model.life.ask

    def ask_without_memory(message: Any, *arguments: Any) -> Any:
        nonlocal n_asked
        n_asked += isinstance(message, frames.Step)
        if n_asked == 4:
            n_asked += 1
            raise MemoryError
        return ask(message, *arguments)

    async with serving(model) as running:
        (expected,) = await answers(running, spec)
        monkeypatch.setattr(model.life, "ask", ask_without_memory)
        (answer,) = await answers(running, spec)
    assert n_asked > 4
    assert answer.tokens == expected.tokens


async def test_an_answer_that_cannot_be_read_costs_the_worker_and_nobody_else(model: WorkerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model.life.process is not None
    n_answers, receive = 0, model.life.process.channel.receive

    def receive_without_memory() -> Any:
        nonlocal n_answers
        n_answers += 1
        if n_answers == 3:
            raise MemoryError
        return receive()

    async with serving(model) as running:
        monkeypatch.setattr(model.life.process.channel, "receive", receive_without_memory)
        pid = model.pid
        (answer,) = await answers(running, make_spec("the sea", 12))
        assert model.pid not in (None, pid)
    assert answer.text == text_alone("the sea", 12)


def test_rows_after_moves_that_nobody_waits_for_are_not_computed() -> None:
    model = FakeModel(can_abort=True)
    bench = Bench(model, model.vocabulary, Batch(64))

    def save(_slot: int, _start: int = 0) -> bytes:
        assert bench.work is not None
        bench.work.is_given_up = True
        return b""

    model.save = save  # type: ignore[method-assign]
    columns = frames.Columns(1, 0, *(np.zeros(1, kind).tobytes() for kind in (np.int32, np.int32, np.int32, np.int8)))
    step = frames.Step(1, [frames.Moving("Save", 0, 0, 3)], columns, [], [], [])
    stepped = bench.step(step, time.perf_counter, lambda: None)
    assert stepped.failure is not None
    assert (stepped.failure.error, stepped.moved.n_done, model.n_steps) == ("Aborted", 1, 0)
    assert bench.work is None


def test_its_cells_stay_as_they_were_laid_out_when_it_was_loaded(model: WorkerModel) -> None:
    assert isinstance(FakeModel(), LaysOut)
    assert not isinstance(model, LaysOut)


# --- its death --------------------------------------------------------------------------------------------------------


async def test_streams_go_on_where_they_were_when_the_worker_is_killed_again_and_again(model: WorkerModel) -> None:
    async with serving(model) as running, trio.open_nursery() as nursery:
        nursery.start_soon(kill_again_and_again, running, model, 5, 60, 300)
        given = await answers(running, *(make_spec(prompt, 60) for prompt in PROMPTS))
        assert running.scheduler.totals.n_preempted > 0
        nursery.cancel_scope.cancel()  # they may have ended before the last death
    assert [one.text for one in given] == [text_alone(prompt, 60) for prompt in PROMPTS]


async def test_a_death_while_nothing_is_computed_is_noticed_and_mended_before_anybody_asks(model: WorkerModel) -> None:
    async with serving(model) as running:
        await answers(running, make_spec("the sea", 8))
        await until_replaced(model, kill(model))
        assert running.scheduler.cells.n_cached == 0
        (answer,) = await answers(running, make_spec("the sea", 8))
    assert answer.text == text_alone("the sea", 8)


@pytest.mark.parametrize("poison", [mortal.KILL, mortal.ABORT])
async def test_a_request_that_kills_the_worker_every_time_gets_an_error_and_takes_no_other_with_it(model: WorkerModel, poison: int) -> None:
    deadly = make_spec("", 8)
    deadly.prompt.extend([65, poison, 66])  # type: ignore[attr-defined]
    async with serving(model) as running:
        *given, last = await answers(running, *(make_spec(prompt, 30) for prompt in PROMPTS[:4]), deadly)
        assert isinstance(last.error, GenerationFailed)
        assert last.error.status == 500
    assert [one.text for one in given] == [text_alone(prompt, 30) for prompt in PROMPTS[:4]]


async def test_requests_that_kill_an_idle_worker_one_after_the_other_do_not_end_the_server(
    model: WorkerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workerlife, "N_LIVES_MAX", 2)  # two such requests cost more
    monkeypatch.setattr(workerlife, "PAUSE_S", 0.0)
    async with serving(model) as running:
        for _ in range(3):
            deadly = make_spec("", 8)
            deadly.prompt.extend([65, mortal.KILL, 66])  # type: ignore[attr-defined]
            (given,) = await answers(running, deadly)
            assert isinstance(given.error, GenerationFailed)
        (answer,) = await answers(running, make_spec("the sea", 8))
    assert answer.text == text_alone("the sea", 8)


async def test_a_worker_that_dies_of_every_request_is_given_up(model: WorkerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workerlife, "PAUSE_S", 0.0)
    monkeypatch.setattr(workerlife, "N_LIVES_MAX", 2)
    monkeypatch.setattr(workerlife, "N_GIVEN_UP_MAX", 1)

    async def ask() -> None:
        async with serving(model) as running:
            for _ in range(2):
                deadly = make_spec("", 8)
                deadly.prompt.extend([65, mortal.KILL, 66])  # type: ignore[attr-defined]
                await answers(running, deadly)
            await trio.sleep_forever()

    with pytest.RaisesGroup(pytest.RaisesExc(ModelDied, match="in a row"), flatten_subgroups=True):
        await ask()


@pytest.mark.slow
async def test_a_worker_that_hangs_is_ended_and_replaced() -> None:
    model = load(hang_s=HANG_S)
    deadly = make_spec("", 8)
    deadly.prompt.extend([65, mortal.HANG])  # type: ignore[attr-defined]
    try:
        async with serving(model) as running:
            other, hanging = await answers(running, make_spec("the sea", 30), deadly)
        assert isinstance(hanging.error, GenerationFailed)
        assert other.text == text_alone("the sea", 30)
    finally:
        model.close()


PARENT_OF_ONE_THAT_HANGS = """
import sys, trio
from cllm.serve.server import exit_now
sys.path.append(sys.argv[1])  # last: what is installed is what is tested
from tests.serve.conftest import make_spec, read_all, serving
from tests.serve.test_worker import load

async def main():
    model = load()
    deadly = make_spec("", 8)
    deadly.prompt.extend([65, int(sys.argv[2])])
    async with serving(model) as running, trio.open_nursery() as nursery:
        nursery.start_soon(read_all, running.engine.open([deadly]))
        while not running.loop.is_computing:
            await trio.sleep(0.01)
        await trio.sleep(0.5)  # to be in the middle of it
        print(model.pid, flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)
        exit_now(7)

trio.run(main)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="whether a process runs is read from /proc, which Linux has")
@pytest.mark.parametrize("is_killed", [True, False])
def test_a_worker_whose_server_ends_in_the_middle_of_a_step_does_not_compute_on(is_killed: bool) -> None:
    """Whoever is killed can do nothing about it: the worker sees it. Who ends in haste kills a worker that cannot see anything."""
    program = [sys.executable, "-P", "-c", PARENT_OF_ONE_THAT_HANGS, str(Path(__file__).parents[2])]
    token = mortal.HANG if is_killed else mortal.HOLD
    with subprocess.Popen([*program, str(token)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if is_killed:
            parent.kill()
        parent.stdin.close()
    assert parent.returncode == (-signal.SIGKILL if is_killed else 7)
    stat, until_at = Path(f"/proc/{pid}/stat"), time.monotonic() + TEST_S
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        if time.monotonic() >= until_at:
            os.kill(pid, signal.SIGKILL)
            pytest.fail("its step takes an hour")
        time.sleep(0.01)


async def test_a_stopped_worker_is_replaced_too_and_its_silence_is_told(logged: list[Any]) -> None:
    model = load(hang_s=HANG_S)
    try:
        async with serving(model) as running:
            kill(model, signal.SIGSTOP)
            (answer,) = await answers(running, make_spec("the sea", 8))
        assert answer.text == text_alone("the sea", 8)
        ended = f"it was silent for {HANG_S:g} s, and was ended; killed by SIGKILL"
        # More than one where a busy machine keeps the next one silent for as long.
        assert {entry["why"] for entry in logged if entry["event"] == "worker.died"} == {f"the worker died: {ended}"}
        assert {entry["ended"] for entry in logged if entry["event"] == "worker.replaced"} == {ended}
    finally:
        model.close()


async def test_nothing_stalls_while_a_worker_is_replaced_however_long_its_load_takes(
    model: WorkerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    revive = model.life.revive

    def slowly() -> None:
        begun.set()
        assert go_on.wait(TEST_S)
        revive()

    monkeypatch.setattr(model.life, "revive", slowly)
    async with serving(model) as running, trio.open_nursery() as nursery:
        kill(model)
        nursery.start_soon(answers, running, make_spec("the sea", 8))
        await until(lambda: begun.is_set() and bool(running.engine.sequences()))
        try:
            assert running.engine._stalled_s(trio.current_time() + 3600) == 0
            with pytest.raises(Unavailable, match="being started anew"):
                running.engine.check_ready()
        finally:
            go_on.set()
        await until(lambda: not running.engine.sequences())
        running.engine.check_ready()


async def test_a_worker_that_dies_as_soon_as_it_is_there_is_replaced_though_nobody_asks(model: WorkerModel) -> None:
    async with serving(model) as running:
        await answers(running, make_spec("a", 2))
        await kill_twice(model)
        await until(lambda: not model.life.is_dead)
        (answer,) = await answers(running, make_spec("the sea", 8))
    assert answer.text == text_alone("the sea", 8)


async def test_tokenising_waits_for_the_next_worker(model: WorkerModel) -> None:
    async with serving(model) as running:
        kill(model)
        assert await running.engine.tokenize("ab", add_special=False, parse_special=False) == [97, 98]


def test_whoever_waits_for_the_next_worker_waits_beside_the_others(model: WorkerModel) -> None:
    assert isinstance(model.vocabulary, WorkerVocabulary)
    vocabulary, errors, all_wait = copy.copy(model.vocabulary), [], threading.Barrier(3)

    def no_worker(_timeout_s: float) -> NoReturn:
        all_wait.wait(TEST_S)  # which those who waited for one another's turn would not reach
        raise ModelDied("there is none")

    def ask() -> None:
        try:
            vocabulary.tokenize("a", add_special=False, parse_special=False)
        except Exception as error:
            errors.append(error)

    vocabulary._process = no_worker
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(error) for error in errors] == [ModelDied] * 3


def test_an_abort_that_raises_ends_nobody_who_listens_for_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    def abort() -> NoReturn:
        raise ValueError("not now")

    worker = object.__new__(workermain.Worker)
    worker._number = 7
    worker._abort(SimpleNamespace(work=None, model=SimpleNamespace(abort=abort)), 7)  # type: ignore[arg-type]
    assert "not now" in caplog.text


async def test_a_step_that_was_given_up_on_its_way_is_not_begun(model: WorkerModel) -> None:
    plan: Any = SimpleNamespace(is_given_up=True)  # of which nothing else is looked at
    with pytest.raises(Aborted):
        model.compute(plan)
    async with serving(model) as running:
        (answer,) = await answers(running, make_spec("the sea", 8))
    assert answer.text == text_alone("the sea", 8)


def test_who_ends_a_worker_says_so_at_once(model: WorkerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when its output has ended, which a process that it began may keep open."""
    assert model.life.process is not None
    told: list[bool] = []
    monkeypatch.setattr(model.life, "on_death", lambda: told.append(model.life.process is not None and model.life.process.is_lost))
    model.life.process.slay()
    assert told[0]


def test_a_model_that_made_an_embedder_lives_as_long_as_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[FakeModel]] = []

    def load(_spec: ModelSpec, _on_progress: object) -> FakeModel:
        model = FakeModel()
        made.append(weakref.ref(model))
        return model

    worker = object.__new__(workermain.Worker)
    monkeypatch.setattr(workermain, "_backend", lambda _factory: SimpleNamespace(load=load))
    embedder = worker._load_embedder(SimpleNamespace(factory="", spec=ModelSpec(path="")))  # type: ignore[arg-type]
    gc.collect()
    assert embedder.n_embd
    assert made[0]() is not None, "it has the weights"


async def test_a_text_that_kills_the_worker_again_and_again_is_refused_and_costs_nobody_else_the_answer(
    model: WorkerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workerlife, "PAUSE_S", 0.0)
    async with serving(model) as running, trio.open_nursery() as nursery:
        given: list[Answer] = []

        async def ask() -> None:
            given.extend(await answers(running, make_spec("the sea", 3000)))

        nursery.start_soon(ask)
        await until(lambda: running.scheduler.totals.n_generated > 10)
        with pytest.raises(TokenizeFailed):
            await running.engine.tokenize(mortal.DEADLY_TEXT, add_special=False, parse_special=False)
        assert not given, "it was there all the time"
    assert given[0].text == text_alone("the sea", 3000)


async def test_whatever_panics_in_the_worker_costs_the_request_that_it_panicked_over_and_not_the_worker(model: WorkerModel) -> None:
    panicking = make_spec("", 8)
    panicking.prompt.extend([65, mortal.PANIC, 66])  # type: ignore[attr-defined]
    pid = model.pid
    async with serving(model) as running:
        with pytest.raises(StepFailed, match="Panic: called unwrap on nothing"):
            await running.engine.tokenize(mortal.PANICKING_TEXT, add_special=False, parse_special=False)
        assert await running.engine.tokenize("ab", add_special=False, parse_special=False) == [97, 98]
        given, failed = await answers(running, make_spec("the sea", 8), panicking)
    assert given.text == text_alone("the sea", 8)
    assert isinstance(failed.error, GenerationFailed)
    assert model.pid == pid


async def test_texts_beside_one_that_kills_the_worker_are_read_when_another_one_lives(
    model: WorkerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workerlife, "PAUSE_S", 0.0)
    async with serving(model) as running, trio.open_nursery() as nursery:
        read: list[list[int]] = []

        async def refused() -> None:
            with pytest.raises(TokenizeFailed):
                await running.engine.tokenize(mortal.DEADLY_TEXT, add_special=False, parse_special=False)

        async def innocent() -> None:
            read.append(await running.engine.tokenize("ab", add_special=False, parse_special=False))

        nursery.start_soon(refused)
        for _ in range(3):
            nursery.start_soon(innocent)
    assert read == [[97, 98]] * 3


async def test_texts_that_kill_an_idle_worker_are_refused_and_do_not_end_the_server(
    model: WorkerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workerlife, "N_LIVES_MAX", 2)  # one such text costs more
    monkeypatch.setattr(workerlife, "PAUSE_S", 0.0)
    async with serving(model) as running:
        with pytest.raises(TokenizeFailed):
            await running.engine.tokenize(mortal.DEADLY_TEXT, add_special=False, parse_special=False)
        (answer,) = await answers(running, make_spec("the sea", 8))
    assert answer.text == text_alone("the sea", 8)


def test_deaths_in_steps_beside_texts_are_put_down_to_these_as_long_as_that_is_likely(
    model: WorkerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workerlife, "PAUSE_S", 0.0)
    monkeypatch.setattr(workerlife, "N_LIVES_MAX", 1)
    monkeypatch.setattr(workerlife, "N_BESIDE_TEXTS_MAX", 3)

    def die_beside_a_text() -> bool:
        assert model.life.process is not None
        model.life.process.texts_under_way["long"] = True
        kill(model)
        with pytest.raises(ModelDied):
            model.drop(0)
        return model.life.may_be_a_texts

    is_a_texts = []
    for _ in range(4):
        is_a_texts.append(die_beside_a_text())
        model.life.revive()
    assert is_a_texts == [True, True, True, False], "then it may as well be the step's"
    assert not die_beside_a_text()
    with pytest.raises(ModelDied, match="in a row"):
        model.life.revive()


async def test_a_worker_that_dies_while_its_cache_is_kept_is_not_replaced_for_that(
    model: WorkerModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(cache_dir=str(tmp_path))
    tier = DiskTier.open(str(tmp_path), "worker", 1 << 30)
    async with serving(model, settings, tier) as running:
        await answers(running, make_spec("once upon a time " * 8, 8))
        running.loop.stop()
        await running.loop.wait_idle()
        pid, plan_retirement = model.pid, running.scheduler.plan_retirement

        def plan_and_kill() -> Any:
            plan = plan_retirement()
            if model.pid == pid:
                kill(model)
            return plan

        monkeypatch.setattr(running.scheduler, "plan_retirement", plan_and_kill)
        await until(lambda: running.loop._has_ended)
        await running.loop.keep_prefixes()
        assert model.life.process is None


@pytest.mark.parametrize("fingerprint", ["fake", ""])
async def test_what_was_saved_on_the_host_outlives_the_worker_where_states_have_a_fingerprint(fingerprint: str) -> None:
    model = load("" if fingerprint else "keeps nothing", n_cells=256)
    assert model.info.fingerprint == fingerprint
    try:
        async with serving(model, Settings(row_budget=64)) as running:
            assert running.scheduler.memory.offload is not None
            pool = running.scheduler.memory.offload.pool
            running.scheduler.memory.offload.prices = Prices()  # of a larger model, for which a move is always worth it
            await answers(running, make_spec("once upon a time " * 8, 8))
            running.scheduler.memory.retire_oldest()
            await answers(running, make_spec("the sea", 2))
            assert (pool.totals.n_saves, len(pool)) == (1, 1)
            await until_replaced(model, kill(model))
            assert len(pool) == (1 if fingerprint else 0)
            (answer,) = await answers(running, make_spec("once upon a time " * 8, 8))
            assert pool.totals.n_restores == (1 if fingerprint else 0)
        assert answer.text == text_alone("once upon a time " * 8, 8)
    finally:
        model.close()


def test_what_moving_a_state_costs_has_its_crossing_in_it() -> None:
    """By what it cost moves are chosen, and most of that is how it goes to the other process and back."""
    save = Save(0, 0, ("", ""), [1, 2, 3])
    restore = Restore(0, Chain(0, 3, (Piece(("", ""), [1, 2, 3], 0, bytes(3 << 20)),)))
    for n_bytes, saved_s, restored_s in ((1 << 20, 0.1 + 1.0, 0.2 + 3.0), (0, 0.1, 0.2 + 4.0)):
        plan = Plan(moves=[save, restore], batch=Batch(1), samplers=[], decoding=[], prefilling=[], outputs=[], events=[])
        moved = frames.Moved(2, [(bytes(n_bytes), 0.1)], [(3, 3, 0.2, None)])
        stepped = frames.Stepped(moved, None, [], [], None, [], None, 1.0, 0.5, 0.5)
        Crossing().take(plan, stepped, seconds=6.0)
        assert (plan.saved[0][2], plan.restored[0].seconds) == pytest.approx((saved_s, restored_s))


# --- when there is no way on ------------------------------------------------------------------------------------------


def test_a_path_that_cannot_be_told_to_another_process_is_refused_as_that() -> None:
    with pytest.raises(LoadFailed, match=r"^/srv/caf\\xe9.gguf: what is not UTF-8 cannot be told to a process of its own$"):
        load(os.fsdecode(b"/srv/caf\xe9.gguf"))


def test_a_worker_that_dies_while_it_loads_is_told_in_one_line() -> None:
    with pytest.raises(LoadFailed, match=r"^dies: the worker died while it loaded this: killed by SIGKILL$"):
        load("dies")


@pytest.mark.parametrize(
    ("path", "complaint"),
    [("panics", "Panic: called unwrap on nothing"), ("nothing", "the backend's load gave a NoneType, which is no model")],
)
def test_a_load_that_panics_or_gives_nothing_is_told_in_one_line(path: str, complaint: str) -> None:
    with pytest.raises(LoadFailed, match=rf"^{complaint}"):
        load(path)


def test_an_entry_point_may_name_an_attribute_of_what_its_module_has() -> None:
    backend = WorkerBackend(make_backend(), "cllm.testing.fake:make_backend.__call__", TEST_S)
    backend.load(ModelSpec(path=""), lambda share: True).close()


def test_what_it_said_last_is_told_with_its_death_however_late_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    log = WorkerProcess._log

    def log_late(process: WorkerProcess, data: bytes) -> None:
        time.sleep(0.2)
        log(process, data)

    monkeypatch.setattr(WorkerProcess, "_log", log_late)
    with pytest.raises(LoadFailed, match=r": killed by SIGKILL: what native code writes$"):
        load("dies loudly")


def test_a_model_that_says_of_itself_what_cannot_be_is_told_in_one_line() -> None:
    with pytest.raises(LoadFailed, match=r"^garbled: what came was no message: Expected `bool`, got `int`"):
        load("garbled")


def test_a_model_that_cannot_be_told_is_so_in_one_line_and_why() -> None:
    with pytest.raises(LoadFailed, match=r"^untellable: .*: exit code 1: TypeError: .*numpy.int64"):
        load("untellable")


def test_what_a_backend_logs_and_cannot_be_written_down_costs_it_nothing() -> None:
    load("talks badly").close()


def test_all_that_a_vocabulary_has_crosses() -> None:
    vocabulary = FakeVocabulary(N_TOKENS_LEAST + 3, infills=True)
    vocabulary.tool_template = "{{ tools }}"
    facts = msgspec.msgpack.decode(msgspec.msgpack.encode(workermain._facts(vocabulary)), type=frames.VocabularyFacts)
    no_process: Any = None  # none is asked
    crossed = WorkerVocabulary(facts, no_process)
    for name in ("n_tokens", "bos", "eos", "end_tokens", "adds_bos", "chat_template", "tool_template", "infill"):
        assert getattr(crossed, name) == getattr(vocabulary, name) is not None, name
    for special in (False, True):
        told = [crossed.token_bytes(token, special=special) for token in range(vocabulary.n_tokens)]
        assert told == [vocabulary.token_bytes(token, special=special) for token in range(vocabulary.n_tokens)]


def test_an_answer_of_the_tokeniser_for_which_there_is_no_memory_is_nobody_elses() -> None:
    def receive() -> NoReturn:
        raise MemoryError

    slain: list[type] = []
    channel = SimpleNamespace(send=lambda _wish: None, receive=receive)
    process: Any = SimpleNamespace(short=channel, texts_under_way={}, slay=lambda lack: slain.append(type(lack)))
    facts: Any = SimpleNamespace(**dict.fromkeys(frames.VocabularyFacts.__struct_fields__))
    with pytest.raises(Ended):
        WorkerVocabulary(facts, lambda _s: process)._answer(process, frames.Tokenize(b"a", True, True), "short")
    assert slain == [MemoryError], "what is left of it stands in the socket"


@pytest.mark.parametrize(("error", "raised"), [("TokenizeFailed", TokenizeFailed), ("AttributeError", StepFailed)])
def test_what_the_tokeniser_does_wrong_by_itself_is_not_laid_to_the_text(error: str, raised: type[Exception]) -> None:
    """As in this process, where it is a server's error, which is logged; the text's is the client's."""
    channel = SimpleNamespace(send=lambda _wish: None, receive=lambda: frames.Failed(error, "no such field"))
    process: Any = SimpleNamespace(short=channel, texts_under_way={})
    facts: Any = SimpleNamespace(**dict.fromkeys(frames.VocabularyFacts.__struct_fields__))
    with pytest.raises(raised, match="no such field"):
        WorkerVocabulary(facts, lambda _s: process)._answer(process, frames.Tokenize(b"a", True, True), "short")
    assert process.texts_under_way == {"short": False}


def test_a_load_can_be_given_up() -> None:
    backend = WorkerBackend(mortal.make_backend(), "cllm.testing.mortal:make_backend", TEST_S)
    with pytest.raises(LoadAborted):
        backend.load(ModelSpec(path=""), lambda share: False)


def test_one_that_cannot_come_back_is_given_up(model: WorkerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workerlife, "PAUSE_S", 0.0)
    monkeypatch.setattr(workerlife, "N_LIVES_MAX", 2)
    model.life._factory = "cllm.testing.mortal:no_such_name"
    kill(model)
    with pytest.raises(ModelDied, match="3 times in a row"):
        model.life.revive()


def test_one_that_is_given_up_as_soon_as_it_died_says_how(model: WorkerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workerlife, "N_LIVES_MAX", 0)
    kill(model)
    model.life.bury()  # as a step does that finds it dead
    with pytest.raises(ModelDied, match="1 times in a row, the last time: killed by SIGKILL"):
        model.life.revive()


def test_a_system_that_has_no_process_left_for_a_moment_does_not_end_it(model: WorkerModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workerlife, "PAUSE_S", 0.0)
    start, shortages = workerlife.WorkerProcess, [BlockingIOError("no process left")] * 3

    def start_late(on_end: Callable[[], None]) -> workerlife.WorkerProcess:
        if shortages:
            raise shortages.pop()
        return start(on_end)

    monkeypatch.setattr(workerlife, "WorkerProcess", start_late)
    kill(model)
    model.life.revive()
    assert model.vocabulary.tokenize("ab", add_special=False, parse_special=False) == [97, 98]


def test_a_process_that_cannot_be_started_is_told_in_one_line_and_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise BlockingIOError("no process left")

    n_before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(LoadFailed, match=r"^fake: no process could be started for it: no process left$"):
        load("fake")
    assert len(os.listdir("/proc/self/fd")) <= n_before


def test_of_what_native_code_says_as_it_aborts_the_last_line_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ggml would go on with a backtrace, for which it has a debugger hold the process."""
    environments: list[dict[str, str]] = []

    def refuse(*_arguments: object, env: dict[str, str], **_options: object) -> None:
        environments.append(env)
        raise BlockingIOError("no process left")

    monkeypatch.delenv("GGML_NO_BACKTRACE", raising=False)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(LoadFailed):
        load("fake")
    assert {env["GGML_NO_BACKTRACE"] for env in environments} == {"1"}


def test_it_is_borne_as_long_as_anybody_likes() -> None:
    model = load(hang_s=1e300)
    try:
        assert model.vocabulary.tokenize("ab", add_special=False, parse_special=False) == [97, 98]
    finally:
        model.close()


def test_nothing_of_it_is_left_when_it_is_closed(model: WorkerModel, tmp_path: Path) -> None:
    n_before = len(os.listdir("/proc/self/fd"))
    other = load()
    pid = other.pid
    other.close()
    other.close()
    deadline = time.monotonic() + TEST_S
    while len(os.listdir("/proc/self/fd")) > n_before:  # what it wrote is read to its end by a thread
        assert time.monotonic() < deadline
    assert pid is not None
    assert not Path(f"/proc/{pid}").exists()


async def test_while_another_worker_is_loaded_time_runs_and_who_leaves_is_gone(model: WorkerModel) -> None:
    revive, may_go_on = model.life.revive, threading.Event()

    def revive_slowly() -> None:
        assert may_go_on.wait(TEST_S)
        revive()

    async with serving(model) as running:
        await answers(running, make_spec("a", 1))
        model.life.revive = revive_slowly  # type: ignore[method-assign]
        kill(model)
        await until(lambda: running.loop._is_replacing)
        with running.engine.open([make_spec("b")]):
            assert running.scheduler.n_sequences == 1
        assert running.scheduler.n_sequences == 0, "who has left counts in nobody's queue"
        (late,) = await answers(running, make_spec("c", timeout_s=0.05))
        assert [type(getattr(end, "error", None)) for end in late.ends] == [DeadlineExceeded]
        assert running.loop._is_replacing, "it was told when its time was over"
        may_go_on.set()
        (given,) = await answers(running, make_spec("d", 8))
    assert given.text == text_alone("d", 8)


async def test_a_worker_that_has_other_cores_is_the_same_model(model: WorkerModel) -> None:
    loaded = model.life._loaded
    assert loaded is not None
    async with serving(model) as running:
        await answers(running, make_spec("a", 1))
        model.life._loaded = msgspec.structs.replace(loaded, info=attrs.evolve(loaded.info, build="64 threads"))
        kill(model)
        (given,) = await answers(running, make_spec("b", 8))
    assert given.text == text_alone("b", 8)


def test_what_a_plugin_starts_in_a_worker_is_not_given_our_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(workermain, "main", lambda: seen.append(os.environ.get("PYTHONPATH")))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["start"])
    for own in ("", "/the/server's"):
        monkeypatch.setenv("PYTHONPATH", "/all/that/the/server/imports/from")
        monkeypatch.setenv(start.OWN_PATH, own)
        start.main()
        assert start.OWN_PATH not in os.environ
    assert seen == [None, "/the/server's"]


def test_what_a_plugin_starts_in_a_worker_does_not_hold_our_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may outlive the worker, whose death the parent knows by their end."""
    monkeypatch.setattr(workermain, "main", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    ends = [os.open(os.devnull, os.O_RDONLY) for _ in range(4)]
    try:
        for end in ends:
            os.set_inheritable(end, True)
        monkeypatch.setattr(sys, "argv", ["start", *map(str, ends)])
        start.main()
        assert [os.get_inheritable(end) for end in ends] == [False] * 4
    finally:
        for end in ends:
            os.close(end)
