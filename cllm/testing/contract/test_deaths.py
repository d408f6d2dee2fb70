"""The process that has a model dies, whatever it is doing: the call tells it, and in the next one every slot is empty.

The model is loaded in a process of its own, as `cllm serve --isolate` has it. What is asked there is all of a `StepModel` and of an
`Embedder`, the engine's own way of asking for a step and for what steps cost, tokens of a text or a pair, and what begins and ends a
sequence of a `StreamModel`. A token's bytes are known outside.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import attrs
import pytest

from cllm.backend import Backend, Batch, Embeds, FileVocabulary, ModelSpec, Pooling, Vocabulary
from cllm.engine.batch.plan import Plan
from cllm.errors import LoadFailed, ModelDied
from cllm.serve.worker import life as workerlife
from cllm.serve.worker.embedder import WorkerEmbedder
from cllm.serve.worker.frames import Channel
from cllm.serve.worker.model import WorkerBackend, WorkerModel
from cllm.serve.worker.process import WorkerProcess
from cllm.serve.worker.streams import WorkerStreams
from cllm.testing.contract.conftest import Shared
from cllm.testing.contract.hand import Hand, Near, Outputs, PlainText, PlainTokens
from cllm.testing.contract.options import factory_of
from cllm.testing.contract.test_embedder import likeness, vectors
from cllm.testing.contract.test_streams import Ear
from cllm.text.prompt import N_CHARS_SHORT

T = TypeVar("T")
Worker: TypeAlias = WorkerModel | WorkerEmbedder | WorkerStreams

HANG_S: Final = 60.0
END_S: Final = 60.0
N_HELD: Final = 20  # cells of slot 0 when it happens


def _compute(hand: Hand, tokens: list[int]) -> object:
    assert isinstance(hand.model, WorkerModel)
    batch = hand.write(hand.rows(0, tokens[N_HELD:], Outputs.NONE))
    plan = Plan(moves=[], batch=batch, samplers=[], decoding=[], prefilling=[], outputs=[], events=[])
    return hand.model.compute(plan)


def _measure(hand: Hand, _tokens: list[int]) -> object:
    assert isinstance(hand.model, WorkerModel)
    return hand.model.measure(lambda _share: True)


Call = Callable[[Hand, list[int]], object]
CALLS: Final[dict[str, Call]] = {
    "step": lambda hand, tokens: hand.put(0, tokens[N_HELD:]),
    "share": lambda hand, _tokens: hand.model.share(0, 1, N_HELD),
    "trim": lambda hand, _tokens: hand.model.trim(0, 5),
    "drop": lambda hand, _tokens: hand.model.drop(0),
    "save": lambda hand, _tokens: hand.model.save(0),
    "restore": lambda hand, _tokens: hand.model.restore(1, b"a state"),
    "compute": _compute,  # the engine's own way of asking for a step
    "measure": _measure,
}
EMBEDDER_CALLS: Final[dict[str, Callable[[WorkerEmbedder, list[int]], object]]] = {
    "step": lambda embedder, tokens: embedder.step(rows_of(tokens)),
    "drop": lambda embedder, _tokens: embedder.drop(0),
}
TEXTS: Final = {"short": "some text", "long": "some text " * (N_CHARS_SHORT // 8)}  # which have a socket each

by_length = pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())


@pytest.fixture(scope="module")
def worker_backend(backend: Backend, pytestconfig: pytest.Config) -> WorkerBackend:
    return backend if isinstance(backend, WorkerBackend) else WorkerBackend(backend, factory_of(pytestconfig), HANG_S)


@pytest.fixture(scope="module")
def only(worker_backend: WorkerBackend, shared: Shared, spec: ModelSpec) -> Iterator[WorkerModel]:
    shared.with_empty_slots()  # or the model schedules itself, and the test is skipped
    model = worker_backend.load(spec, lambda _share: True)
    assert isinstance(model, WorkerModel)
    yield model
    model.close()


@pytest.fixture
def isolated(only: WorkerModel) -> WorkerModel:
    """A model in a process of its own, all of whose slots are empty, dead or not before."""
    if only.life.is_dead:
        revive(only)
    for slot in range(only.n_slots):
        only.drop(slot)
    return only


@pytest.fixture
def embedder(only: WorkerModel, shared: Shared, spec: ModelSpec) -> Iterator[WorkerEmbedder]:
    """What gives vectors of the same file, in a process of its own."""
    if not isinstance(shared.with_empty_slots(), Embeds):
        pytest.skip("this model gives no vectors")
    embedder = only.make_embedder(spec)
    assert isinstance(embedder, WorkerEmbedder)
    yield embedder
    embedder.close()


@pytest.fixture
def judge(only: WorkerModel, shared: Shared, spec: ModelSpec) -> Iterator[WorkerEmbedder]:
    """The same that judges pairs."""
    if not isinstance(shared.with_empty_slots(), Embeds):
        pytest.skip("this model gives no vectors")
    try:
        judge = only.make_embedder(attrs.evolve(spec, pooling=Pooling.RANK))
    except LoadFailed:
        pytest.skip("this model judges no pairs")
    assert isinstance(judge, WorkerEmbedder)
    yield judge
    judge.close()


@pytest.fixture
def apart(worker_backend: WorkerBackend, shared: Shared, spec: ModelSpec) -> Iterator[WorkerStreams]:
    """A model that schedules itself, in a process of its own."""
    shared.load_streams().close()  # or the model has steps, and the test is skipped
    model = worker_backend.load(spec, lambda _share: True)
    assert isinstance(model, WorkerStreams)
    yield model
    model.close()


def revive(model: Worker) -> None:
    model.life.revive()
    model.life.went_well()  # it counts those that did no step of the engine's


def kill(model: Worker) -> None:
    assert model.pid is not None
    os.kill(model.pid, signal.SIGKILL)
    until_dead(model)


def until_dead(model: Worker) -> None:
    deadline = time.monotonic() + END_S
    while not model.life.is_dead:
        assert time.monotonic() < deadline, "nobody noticed that the process has ended"
        time.sleep(0.001)


def until_stopped(pid: int) -> None:
    """Until then a thread of it may still answer, if another one is to take the signal and has no core yet."""
    deadline = time.monotonic() + END_S
    while os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT | os.WNOHANG) is None:
        assert time.monotonic() < deadline, "the process does not stop"
        time.sleep(0.001)


@contextmanager
def heeded_by_nobody(model: Worker) -> Iterator[threading.Event]:
    """Let its process stand still, and then die; what is given is set when it has been asked for something."""
    asked, send, pid = threading.Event(), Channel.send, model.pid
    assert pid is not None

    def send_and_say_so(channel: Channel[Any], message: Any) -> None:
        send(channel, message)
        asked.set()

    os.kill(pid, signal.SIGSTOP)
    until_stopped(pid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "send", send_and_say_so)
        try:
            yield asked
        finally:
            os.kill(pid, signal.SIGKILL)


@contextmanager
def killed_in(model: Worker, call: Callable[[], T]) -> Iterator[Callable[[], T]]:
    """Kill the process when it has been asked and has not answered; what is given waits for what came of the call, which may raise."""
    with ThreadPoolExecutor(1) as thread:
        with heeded_by_nobody(model) as asked:
            running = thread.submit(call)
            while not (asked.wait(0.1) or running.done()):  # a call that asks for nothing never does
                pass
        until_dead(model)
        yield lambda: running.result(timeout=END_S)


def rows_of(tokens: list[int]) -> Batch:
    """All of them in slot 0, from its beginning."""
    batch = Batch(len(tokens))
    batch.n_rows = batch.n_outputs = len(tokens)
    batch.tokens[:], batch.positions[:], batch.outputs[:] = tokens, range(len(tokens)), 1
    return batch


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_death_in_the_middle_of_a_call_is_told_and_the_next_life_begins_empty(
    isolated: WorkerModel, plain: PlainTokens, near: Near, call: Call
) -> None:
    hand, tokens = Hand(isolated), plain.draw(30)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:N_HELD])
    state = isolated.save(0) if isolated.capabilities.can_save and isolated.info.fingerprint else None
    with killed_in(isolated, lambda: call(hand, tokens)) as given, pytest.raises(ModelDied):
        given()
    revive(isolated)
    hand = Hand(isolated)
    near.check(hand.alone(tokens), expected)
    if state is not None:  # what was saved is the same model's
        hand.restore(0, state, tokens[:N_HELD])
        near.check(hand.put(0, tokens[N_HELD:], Outputs.ALL), expected[N_HELD:])


def test_every_call_of_a_dead_model_tells_it_and_an_abort_is_harmless(isolated: WorkerModel, plain: PlainTokens) -> None:
    kill(isolated)
    for call in CALLS.values():
        isolated.abort()
        with pytest.raises(ModelDied):
            call(Hand(isolated), plain.draw(30))


def test_tokens_are_known_while_it_is_dead_and_texts_are_tokenised_in_its_next_life(isolated: WorkerModel) -> None:
    vocabulary = isolated.vocabulary
    tokens = vocabulary.tokenize("some text", add_special=True, parse_special=False)
    text = [vocabulary.token_bytes(token) for token in tokens]
    kill(isolated)
    assert [vocabulary.token_bytes(token) for token in tokens] == text
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(vocabulary.tokenize, "some text", add_special=True, parse_special=False)
        revive(isolated)
        assert waiting.result(timeout=END_S) == tokens


def check_tokenised_in_the_next_life(model: Worker, vocabulary: Vocabulary, text: str) -> None:
    tokenise = partial(vocabulary.tokenize, text, add_special=True, parse_special=False)
    expected = tokenise()
    with killed_in(model, tokenise) as given:
        revive(model)
        assert given() == expected


@by_length
def test_a_text_whose_tokenising_a_death_interrupts_is_tokenised_in_the_next_life(isolated: WorkerModel, text: str) -> None:
    check_tokenised_in_the_next_life(isolated, isolated.vocabulary, text)


@by_length
def test_a_text_of_a_model_that_schedules_itself_is_tokenised_in_the_next_life_too(apart: WorkerStreams, text: str) -> None:
    if apart.vocabulary is None or isinstance(apart.vocabulary, FileVocabulary):
        pytest.skip("its texts are not tokenised there")
    check_tokenised_in_the_next_life(apart, apart.vocabulary, text)


@pytest.mark.parametrize("call", EMBEDDER_CALLS.values(), ids=EMBEDDER_CALLS.keys())
def test_a_death_in_the_middle_of_an_embedders_call_is_told_and_the_next_life_begins_empty(
    embedder: WorkerEmbedder, plain: PlainTokens, call: Callable[[WorkerEmbedder, list[int]], object]
) -> None:
    tokens, others = plain.draw(12), plain.draw(7, seed=1)
    expected = vectors(embedder, [tokens], embedder.n_rows_max)[0]
    embedder.step(rows_of(others))
    if call is EMBEDDER_CALLS["step"]:
        embedder.drop(0)
    with killed_in(embedder, lambda: call(embedder, others)) as given, pytest.raises(ModelDied):
        given()
    with pytest.raises(ModelDied):
        call(embedder, others)
    revive(embedder)
    assert embedder.step(rows_of(tokens)).shape == (len(tokens), embedder.n_embd), "slot 0 is not empty"
    embedder.drop(0)
    assert likeness(vectors(embedder, [tokens], embedder.n_rows_max)[0], expected) > 0.999


@by_length
def test_an_embedders_text_is_tokenised_in_its_next_life(embedder: WorkerEmbedder, text: str) -> None:
    check_tokenised_in_the_next_life(embedder, embedder.vocabulary, text)


def test_a_query_and_a_document_are_tokenised_in_the_next_life(judge: WorkerEmbedder) -> None:
    pair = partial(judge.pair, "some text", "some more of it")
    expected = pair()
    with killed_in(judge, pair) as given:
        revive(judge)
        assert given() == expected


def test_a_death_in_the_middle_of_a_load_is_told_in_one_line_and_another_load_goes_well(
    worker_backend: WorkerBackend, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[WorkerProcess] = []

    def begin(on_end: Callable[[], None]) -> WorkerProcess:
        begun.append(WorkerProcess(on_end))
        return begun[-1]

    def die(_share: float) -> bool:
        os.kill(begun[-1].pid, signal.SIGKILL)
        return True

    monkeypatch.setattr(workerlife, "WorkerProcess", begin)
    with pytest.raises(LoadFailed) as caught:
        worker_backend.load(spec, die)
    assert "\n" not in str(caught.value)
    worker_backend.load(spec, lambda _share: True).close()


def test_a_model_may_be_closed_when_it_is_dead(worker_backend: WorkerBackend, spec: ModelSpec) -> None:
    model = worker_backend.load(spec, lambda _share: True)
    assert isinstance(model, WorkerModel | WorkerStreams)
    kill(model)
    model.close()
    model.close()
    assert model.pid is None


@pytest.mark.parametrize("n_heard", [0, 1, 3])
def test_what_was_under_way_at_a_death_is_told_no_more_and_can_be_begun_again(apart: WorkerStreams, n_heard: int) -> None:
    ear = Ear(apart)
    words = PlainText() if ear.vocabulary is None else PlainTokens(ear.vocabulary)
    n_live = min(apart.n_live_max, 4)
    for seq_id in range(n_live):
        ear.start(seq_id, words.draw(8, seed=seq_id), n_tokens=min(100, apart.n_ctx - 20))
    ear.until(partial(ear.has_heard, 0, n_heard))
    kill(apart)
    apart.cancel(0)
    revive(apart)
    ear.silence()  # what came before the death may be told until then
    n_told = dict(ear.n_told)
    for seq_id in range(n_live):
        ear.start(n_live + seq_id, words.draw(8, seed=seq_id))
    ear.until_ended(*range(n_live, 2 * n_live))
    assert all(ear.is_whole(n_live + seq_id) for seq_id in range(n_live))
    assert {seq_id: n for seq_id, n in ear.n_told.items() if seq_id < n_live} == n_told


@pytest.mark.parametrize("call", ["start", "cancel"])
def test_what_a_dead_one_was_still_to_begin_or_to_give_up_is_told_no_more(apart: WorkerStreams, call: str) -> None:
    ear = Ear(apart)
    words = PlainText() if ear.vocabulary is None else PlainTokens(ear.vocabulary)
    if call == "cancel":
        ear.start(0, words.draw(8), n_tokens=min(100, apart.n_ctx - 20))
        ear.until(partial(ear.has_heard, 0, 1))
    with heeded_by_nobody(apart):
        if call == "start":
            ear.start(0, words.draw(8))
        else:
            apart.cancel(0)
    until_dead(apart)
    revive(apart)
    ear.silence()  # what came before the death may be told until then, an end too
    errors, n_told = dict(ear.errors), ear.n_told[0]
    ear.start(1, words.draw(8, seed=1))
    ear.until_ended(1)
    ear.silence()
    assert ear.errors == {**errors, 1: ""}
    assert ear.n_told[0] == n_told
    assert ear.is_whole(1)
