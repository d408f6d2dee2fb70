"""What a server asked of llama.cpp is asked again as it was, or not at all."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

from benchmarks import calls
from benchmarks.calls import MemoryMove, Recorder, steps_of
from benchmarks.layers import Bypassed, Counter
from benchmarks.native import FixedBatch
from benchmarks.replay import RecordedStage, ReplayStage
from benchmarks.stages import Bench, Ran, Work, run_checked
from benchmarks.workload import GREEDY, Ask
from cllm.backend import Batch
from cllm.config import Settings

WORK = Work(asks=[Ask(prompt=(5, 6, 7), n_generated=2)], concurrency=1, sampling=GREEDY, seed=1)


class Lib(SimpleNamespace):
    """Functions by llama.cpp's names, whose decode gives the code that it is told."""

    def __init__(self, code: int = 0) -> None:
        self.seen: list[tuple[Any, ...]] = []
        super().__init__(
            llama_decode=lambda context, batch: code,
            llama_memory_seq_rm=lambda *arguments: self.seen.append(arguments) or True,  # type: ignore[func-returns-value]
            llama_memory_seq_cp=lambda *arguments: self.seen.append(arguments),
            llama_state_seq_set_data=lambda *arguments: 1,
        )


def a_batch(n_rows: int) -> Any:
    """A llama_batch of rows 10, 11, ... of slot 3, the last an output, in columns that have room for more."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    import llama_cpp

    from cllm_llamacpp.batch import BatchPointer

    batch = Batch(8)
    batch.tokens[:n_rows], batch.positions[:n_rows], batch.slots[:n_rows] = range(10, 10 + n_rows), range(n_rows), 3
    batch.outputs[n_rows - 1] = 1
    pointer = BatchPointer(llama_cpp, batch)
    struct = pointer.first(n_rows)
    struct.kept = pointer  # which keeps the columns alive
    return struct


def test_calls_are_passed_on_and_noted_in_their_order() -> None:
    lib, recorder = Lib(), Recorder()
    recorder.install(lib)
    memory, context = object(), ctypes.c_void_p()
    assert lib.llama_memory_seq_rm(memory, 2, -1, -1) is True
    assert lib.llama_decode(context, a_batch(2)) == 0
    lib.llama_memory_seq_cp(memory, 3, 4, 0, 2)
    assert lib.seen == [(memory, 2, -1, -1), (memory, 3, 4, 0, 2)]
    removed, decoded, copied = steps_of(recorder.take())
    assert (removed, copied) == (MemoryMove("llama_memory_seq_rm", (2, -1, -1)), MemoryMove("llama_memory_seq_cp", (3, 4, 0, 2)))
    assert isinstance(decoded, FixedBatch)
    columns = [column.tolist() for column in (decoded.tokens, decoded.positions, decoded.slots, decoded.outputs)]
    assert columns == [[10, 11], [0, 1], [3, 3], [0, 1]]
    assert decoded.outputs.dtype == np.int8
    assert recorder.take() == []


def test_a_batch_that_llama_cpp_refused_is_not_made_again() -> None:
    lib, recorder = Lib(code=1), Recorder()
    recorder.install(lib)
    assert lib.llama_decode(None, a_batch(1)) == 1
    assert recorder.take() == []


def test_what_was_restored_cannot_be_made_again_and_is_not_left_out() -> None:
    lib, recorder = Lib(), Recorder()
    recorder.install(lib)
    lib.llama_state_seq_set_data(None, b"state", 5, 3)
    with pytest.raises(ValueError, match="llama_state_seq_set_data cannot be made again"):
        steps_of(recorder.take())


# --- which pass is made again --------------------------------------------------------------------------------------------


@attrs.define
class Served:
    """In the place of a server's stage: each pass is told by its number."""

    name: str = "sse"
    adds: str = "nothing"
    n_passes: int = 0

    def run(self, work: Work) -> Ran:
        self.n_passes += 1
        return Ran(wall_s=1.0, n_steps=2, n_tokens=work.n_tokens, counts={}, seconds={})


@attrs.define
class Server:
    """Whose calls are those since it was asked last: a number each."""

    stage: Served
    n_asked: int = 0

    def calls(self) -> list[list[Any]]:
        self.n_asked += 1
        return [["llama_memory_seq_rm", self.stage.n_passes, self.n_asked, -1]]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was made again, by the number of the pass that it came in, or 0 before any."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    numbers: list[int] = []

    def make(steps: list[MemoryMove], _context: Any, _batch: Any) -> int:
        numbers.extend(step.arguments[0] for step in steps)
        return 2

    monkeypatch.setattr("benchmarks.replay.make", make)
    return numbers


def replaying() -> tuple[RecordedStage, ReplayStage]:
    stage = Served()
    recorded = RecordedStage(stage, Server(stage))  # type: ignore[arg-type]
    return recorded, ReplayStage(Bench(SimpleNamespace(n_rows_max=8), Settings(), Counter()), None, recorded)


def test_each_served_pass_is_made_again_once_after_all_that_came_before_it(made: list[int]) -> None:
    recorded, replay = replaying()
    for _ in range(2):
        recorded.run(WORK)
    for _ in range(2):
        assert replay.run(WORK).n_tokens == WORK.n_tokens
    assert made == [0, 1, 1, 2]  # what came before the first pass, that, what came before the second, and that
    assert not recorded.passes


def test_before_the_first_served_pass_one_is_served_for_it(made: list[int]) -> None:
    recorded, replay = replaying()
    replay.run(WORK)
    assert made == [0, 1]
    recorded.run(WORK)
    replay.run(WORK)
    assert made == [0, 1, 1, 2]


def test_who_computes_nothing_has_made_nothing_again(made: list[int]) -> None:
    _, replay = replaying()
    with pytest.raises(Bypassed, match="stage replay went round its layer native"):
        run_checked(replay, WORK)


def test_the_calls_computed_again_give_as_many_outputs(tmp_path: Any) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    pytest.importorskip("gguf", reason="the package gguf, which makes the tiny models, is not installed")
    import llama_cpp

    from benchmarks import native
    from cllm.testing.tiny import make_tiny_gguf

    path = tmp_path / "tiny.gguf"
    make_tiny_gguf(path, "qwen3")
    context = native.new_context(native.load(str(path)), n_cells=64, n_sequences=2, n_threads=1, is_pool=True)
    batch = llama_cpp.llama_batch_init(8, 0, 1)
    first = ["llama_decode", [5, 6, 7], [0, 1, 2], [0, 0, 0], [0, 0, 1]]
    again = ["llama_decode", [8, 5], [3, 3], [0, 1], [1, 1]]
    copied = ["llama_memory_seq_cp", 0, 1, 0, 3]
    assert calls.make(steps_of([first, copied, again]), context, batch) == 3
    with pytest.raises(RuntimeError, match="llama_decode gave -1"):
        calls.make(steps_of([["llama_decode", [5], [9], [0], [1]]]), context, batch)  # a place that does not go on
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
