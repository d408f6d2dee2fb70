"""A model in a process of its own: what kills it does not kill the server, and another one takes its place."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import attrs
import numpy as np

from cllm.backend import CONTRACT_VERSION, Backend, Batch, Logits, ModelSpec, OnProgress, Probe, StepModel, Vocabulary
from cllm.engine.curve import Curve
from cllm.engine.plan import Plan, StepOutput
from cllm.errors import BackendError, LoadFailed, ModelDied, StepFailed
from cllm.serve import frames
from cllm.serve.crossing import Crossing, columns, error_of
from cllm.serve.frames import Ended
from cllm.serve.workerprocess import WorkerProcess
from cllm.serve.workervocabulary import WorkerVocabulary

N_LIVES_MAX: Final = 12  # in a row without a step that went well: what dies so often will not be better the next time
LOAD_SILENCE_S: Final = 600.0  # between two words of how far a load is
PAUSE_S: Final = 0.1  # before the second life in a row, doubled before each further one
PAUSE_MAX_S: Final = 5.0


@attrs.define
class WorkerBackend:
    """Loads the models of `backend` in processes of their own. `factory` is its entry point's value."""

    backend: Backend
    factory: str
    hang_s: float  # a worker that is silent for so long in the middle of a call counts as dead
    contract_version: int = CONTRACT_VERSION

    @property
    def knows_models(self) -> bool:
        """See `Backend`."""
        return bool(getattr(self.backend, "knows_models", False))

    def probe(self) -> Probe:
        """See `Backend.probe`."""
        return self.backend.probe()

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
        """See `Backend.load`."""
        return WorkerModel(self.factory, spec, on_progress, self.hang_s)


class WorkerModel:
    """See `cllm.backend.StepModel`. The engine's steps go by `compute`; `step` carries the logits, and is slow.

    A call that finds the worker dead raises ModelDied; `revive` starts another one, whose slots are empty.
    """

    def __init__(self, factory: str, spec: ModelSpec, on_progress: OnProgress, hang_s: float) -> None:
        self._factory = factory
        self._spec = spec
        self._hang_s = hang_s
        self._n_lives = 0  # since a step went well
        self._n_steps = 0
        self._closed = False
        self._alive = threading.Condition()
        self._process: WorkerProcess | None = None  # None: there is none just now
        self._crossing = Crossing()
        self.on_death: Callable[[], None] = lambda: None  # called from a thread of the worker's, whenever one has ended
        loaded = self._start(on_progress, wants_vocabulary=True)
        assert loaded.vocabulary is not None
        self._loaded = loaded
        self.vocabulary: Vocabulary = WorkerVocabulary(loaded.vocabulary, self._living)
        self.info = loaded.info
        self.capabilities = loaded.capabilities
        self.n_cells = loaded.n_cells
        self.n_cells_slot = loaded.n_cells_slot
        self.n_slots = loaded.n_slots
        self.n_rows_max = loaded.n_rows_max
        self._spec = attrs.evolve(spec, n_cells=loaded.n_cells)  # the next life has what this one found

    # --- steps --------------------------------------------------------------------------------------------------------

    def compute(self, plan: Plan, _clock: Callable[[], float]) -> StepOutput:
        """`cllm.engine.compute.compute`, done by the worker. Raises: as that does."""
        self._n_steps += 1
        stepped = self._ask(self._crossing.step_of(plan, self._n_steps))
        assert isinstance(stepped, frames.Stepped)
        output = self._crossing.take(plan, stepped)
        self._n_lives = 0
        return output

    def abort(self) -> None:
        """See `StepModel.abort`."""
        process = self._process
        if process is not None:
            process.abort(self._n_steps)

    def measure(self, on_progress: OnProgress) -> Curve:
        """`cllm.serve.calibration.measure`, done by the worker. Raises: as that does."""
        measured = self._ask(frames.Measure(), on_progress)
        assert isinstance(measured, frames.Measured)
        return measured.curve

    # --- death and life -----------------------------------------------------------------------------------------------

    @property
    def is_dead(self) -> bool:
        """Whether the worker has ended, so that the next call would fail."""
        process = self._process
        return not self._closed and (process is None or process.is_lost)

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return None if self._process is None else self._process.pid

    def revive(self) -> None:
        """Start another worker with the same model; blocks. Raises: ModelDied when it cannot be, or was too often without success."""
        why = self._bury()
        while not self._closed:
            self._n_lives += 1
            if self._n_lives > N_LIVES_MAX:
                break
            if self._n_lives > 1:
                time.sleep(min(PAUSE_S * 2 ** (self._n_lives - 2), PAUSE_MAX_S))
            try:
                loaded = self._start(lambda share: not self._closed, wants_vocabulary=False)
            except BackendError as error:
                why = str(error)
                continue
            if _sizes(loaded) != _sizes(self._loaded):
                self._bury()
                raise ModelDied("the model is another one now: its file was changed while it was served")
            return
        raise ModelDied(f"the worker died {self._n_lives - 1} times in a row, the last time: {why}")

    def _start(self, on_progress: OnProgress, *, wants_vocabulary: bool) -> frames.Loaded:
        process = WorkerProcess(lambda: self.on_death())
        process.limit(max(LOAD_SILENCE_S, self._hang_s))
        load = frames.Load(self._factory, self._spec, logging.getLogger().getEffectiveLevel(), wants_vocabulary)
        try:
            loaded = _load(process, load, on_progress)
        except BaseException:
            process.kill()
            raise
        process.limit(self._hang_s)
        self._crossing = Crossing()
        with self._alive:
            self._process = process
            self._alive.notify_all()
        return loaded

    def _bury(self) -> str:
        """Make sure that the worker is gone; return in words how it ended."""
        with self._alive:
            process, self._process = self._process, None
        return "" if process is None else process.kill()

    def _living(self, timeout_s: float) -> WorkerProcess:
        """The worker, or the next one. Raises: ModelDied."""
        with self._alive:
            if not self._alive.wait_for(lambda: self._closed or not self.is_dead, timeout_s) or self._closed:
                raise ModelDied("the model's process has ended")
            assert self._process is not None
            return self._process

    def _ask(self, message: frames.ToWorker, on_progress: OnProgress = lambda share: True) -> frames.FromWorker:
        process = self._process
        if process is None:
            raise ModelDied("the model's process has ended")
        try:
            process.channel.send(message)
            answer = _answer(process, on_progress)
        except Ended:
            raise ModelDied(f"the worker died: {self._bury()}") from None
        if isinstance(answer, frames.Failed):
            raise error_of(answer)
        return answer

    def close(self) -> None:
        """See `StepModel.close`."""
        self._closed = True
        self._bury()
        with self._alive:
            self._alive.notify_all()

    # --- the rest of the contract -------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> Logits:
        """See `StepModel.step`."""
        self._n_steps += 1
        rows = frames.Rows(self._n_steps, batch.n_rows, batch.n_outputs, *columns(batch))
        logits = np.frombuffer(bytearray(self._call(rows)), np.float32)
        return logits.reshape(batch.n_outputs, self.vocabulary.n_tokens)

    def share(self, source: int, target: int, n_tokens: int) -> None:
        """See `StepModel.share`."""
        self._call(frames.Call("share", (source, target, n_tokens)))

    def trim(self, slot: int, n_keep: int) -> None:
        """See `StepModel.trim`."""
        self._call(frames.Call("trim", (slot, n_keep)))

    def drop(self, slot: int) -> None:
        """See `StepModel.drop`."""
        self._call(frames.Call("drop", (slot,)))

    def save(self, slot: int, start: int = 0) -> bytes:
        """See `StepModel.save`."""
        return self._call(frames.Call("save", (slot, start) if start else (slot,)))

    def restore(self, slot: int, state: bytes) -> None:
        """See `StepModel.restore`."""
        self._call(frames.Call("restore", (slot,), state))

    def _call(self, message: frames.Call | frames.Rows) -> bytes:
        answer = self._ask(message)
        if not isinstance(answer, frames.Answer):
            raise StepFailed(f"the worker answered {type(answer).__name__}")
        return answer.data


def _load(process: WorkerProcess, load: frames.Load, on_progress: OnProgress) -> frames.Loaded:
    try:
        process.channel.send(load)
        answer = _answer(process, on_progress)
    except Ended:
        raise LoadFailed(f"{load.spec.path}: the worker died while it loaded this: {process.kill()}") from None
    if isinstance(answer, frames.Loaded):
        return answer
    raise error_of(answer) if isinstance(answer, frames.Failed) else LoadFailed("the worker did not load anything")


def _answer(process: WorkerProcess, on_progress: OnProgress) -> frames.FromWorker:
    """Wait for the answer; what is told of its progress before it goes to `on_progress`. Raises: Ended."""
    while isinstance(message := process.channel.receive(), frames.Progress):
        process.channel.send(frames.Proceed(on_progress(message.share)))
    return message


def _sizes(loaded: frames.Loaded) -> tuple[object, ...]:
    return loaded.info, loaded.capabilities, loaded.n_cells, loaded.n_cells_slot, loaded.n_slots, loaded.n_rows_max
