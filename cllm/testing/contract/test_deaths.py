"""The process that has a model dies, whatever it is doing: the call tells it, and in the next one every slot is empty.

The model is loaded in a process of its own, as `cllm serve --isolate` has it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import pytest

from cllm.backend import Backend, ModelSpec
from cllm.errors import ModelDied
from cllm.serve.worker import WorkerBackend, WorkerModel
from cllm.serve.workerstreams import WorkerStreams
from cllm.testing.contract.conftest import Shared
from cllm.testing.contract.hand import Hand, Near, Outputs, PlainText, PlainTokens
from cllm.testing.contract.options import factory_of
from cllm.testing.contract.test_streams import N_TOKENS, Ear

HANG_S: Final = 60.0
END_S: Final = 60.0
N_HELD: Final = 20  # cells of slot 0 when it happens

Call = Callable[[Hand, list[int]], object]
CALLS: Final[dict[str, Call]] = {
    "step": lambda hand, tokens: hand.put(0, tokens[N_HELD:]),
    "share": lambda hand, _tokens: hand.model.share(0, 1, N_HELD),
    "trim": lambda hand, _tokens: hand.model.trim(0, 5),
    "drop": lambda hand, _tokens: hand.model.drop(0),
    "save": lambda hand, _tokens: hand.model.save(0),
    "restore": lambda hand, _tokens: hand.model.restore(1, b"a state"),
}


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
def apart(worker_backend: WorkerBackend, shared: Shared, spec: ModelSpec) -> Iterator[WorkerStreams]:
    """A model that schedules itself, in a process of its own."""
    shared.load_streams().close()  # or the model has steps, and the test is skipped
    model = worker_backend.load(spec, lambda _share: True)
    assert isinstance(model, WorkerStreams)
    yield model
    model.close()


def revive(model: WorkerModel | WorkerStreams) -> None:
    model.life.revive()
    model.life.n_lives = 0  # it counts those that did no step of the engine's


def kill(model: WorkerModel | WorkerStreams) -> None:
    assert model.pid is not None
    os.kill(model.pid, signal.SIGKILL)
    deadline = time.monotonic() + END_S
    while not model.life.is_dead:
        assert time.monotonic() < deadline, "nobody noticed that the process has ended"
        time.sleep(0.001)


def kill_in(model: WorkerModel, call: Callable[[], object]) -> BaseException | None:
    """Kill the process when it has been asked and has not answered; return what the call raised."""
    assert model.pid is not None
    os.kill(model.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(call)
        os.kill(model.pid, signal.SIGKILL)
        return running.exception(timeout=END_S)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_death_in_the_middle_of_a_call_is_told_and_the_next_life_begins_empty(
    isolated: WorkerModel, plain: PlainTokens, near: Near, call: Call
) -> None:
    hand, tokens = Hand(isolated), plain.draw(30)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:N_HELD])
    state = isolated.save(0) if isolated.capabilities.can_save and isolated.info.fingerprint else None
    assert isinstance(kill_in(isolated, lambda: call(hand, tokens)), ModelDied)
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
    assert {ear.n_told[n_live + seq_id] for seq_id in range(n_live)} == {N_TOKENS}
    assert {seq_id: n for seq_id, n in ear.n_told.items() if seq_id < n_live} == n_told
