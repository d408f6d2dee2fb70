"""A model in a process of its own: what kills it does not kill the server, and another one takes its place."""

from __future__ import annotations

import time

import attrs
import numpy as np

from cllm.backend import (
    CONTRACT_VERSION,
    Backend,
    Batch,
    Embedder,
    LoadsEmbedders,
    Logits,
    ModelSpec,
    OnProgress,
    Probe,
    StepModel,
    StreamModel,
    Vocabulary,
)
from cllm.engine.batch.plan import Plan, StepOutput
from cllm.engine.cost.curve import Curve
from cllm.errors import Aborted, LoadFailed
from cllm.serve.worker import frames
from cllm.serve.worker.crossing import Crossing, columns_of
from cllm.serve.worker.embedder import WorkerEmbedder
from cllm.serve.worker.life import WorkerLife
from cllm.serve.worker.streams import WorkerStreams
from cllm.serve.worker.vocabulary import WorkerVocabulary


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

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StepModel | StreamModel:
        """See `Backend.load`."""
        life = WorkerLife(self.factory, spec, self.hang_s)
        loaded = life.start(on_progress)
        if isinstance(loaded, frames.Loaded):
            return WorkerModel(life, loaded)
        assert isinstance(loaded, frames.LoadedStreams)
        return WorkerStreams(life, loaded)

    def load_embedder(self, spec: ModelSpec, on_progress: OnProgress) -> Embedder:
        """See `LoadsEmbedders.load_embedder`."""
        if not isinstance(self.backend, LoadsEmbedders):
            raise LoadFailed("this backend loads no embedding models")
        return _embedder(WorkerLife(self.factory, spec, self.hang_s, embeds=True), on_progress)


class WorkerModel:
    """See `cllm.backend.StepModel`. The engine's steps go by `compute`; `step` carries the logits, and is slow.

    A call that finds the worker dead raises ModelDied; `life.revive` starts another one, whose slots are empty.
    """

    def __init__(self, life: WorkerLife, loaded: frames.Loaded) -> None:
        assert loaded.vocabulary is not None
        self.life = life
        self.life.on_start = self._forget
        self._n_steps = 0
        self._crossing = Crossing()
        self.vocabulary: Vocabulary = WorkerVocabulary(loaded.vocabulary, life.living)
        self.info = loaded.info
        self.capabilities = loaded.capabilities
        self.n_cells = loaded.n_cells
        self.n_cells_slot = loaded.n_cells_slot
        self.n_slots = loaded.n_slots
        self.n_rows_max = loaded.n_rows_max

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return self.life.pid

    def _forget(self, _process: object) -> None:
        self._crossing = Crossing()

    # --- steps --------------------------------------------------------------------------------------------------------

    def compute(self, plan: Plan) -> StepOutput:
        """`cllm.engine.batch.compute.compute`, done by the worker. Raises: as that does."""
        self._n_steps += 1
        if plan.is_given_up:  # meanwhile: an abort that named the step before is lost
            raise Aborted("nobody waits for this step")
        began_at = time.perf_counter()
        try:
            stepped = self.life.ask(self._crossing.step_of(plan, self._n_steps))
        except BaseException:  # it may not have been sent, for want of memory, say: then the worker has not seen what is taken for seen
            self._crossing = Crossing()
            raise
        assert isinstance(stepped, frames.Stepped)
        output = self._crossing.take(plan, stepped, seconds=time.perf_counter() - began_at)
        self.life.went_well()
        return output

    def abort(self) -> None:
        """See `StepModel.abort`."""
        process = self.life.process
        if process is not None:
            process.abort(self._n_steps)

    def measure(self, on_progress: OnProgress) -> Curve:
        """`cllm.serve.calibration.measure`, done by the worker. Raises: as that does."""
        measured = self.life.ask(frames.Measure(), on_progress)
        assert isinstance(measured, frames.Measured)
        return measured.curve

    def make_embedder(self, spec: ModelSpec) -> Embedder:
        """See `Embeds.make_embedder`: of the same file, in a process of its own, so that neither takes the other with it."""
        return _embedder(self.life.of_vectors(spec), lambda share: True)

    def close(self) -> None:
        """See `StepModel.close`."""
        self.life.close()

    # --- the rest of the contract -------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> Logits:
        """See `StepModel.step`."""
        self._n_steps += 1
        logits = np.frombuffer(bytearray(self.life.data_of(frames.Rows(self._n_steps, columns_of(batch)))), np.float32)
        return logits.reshape(batch.n_outputs, self.vocabulary.n_tokens)

    def share(self, source: int, target: int, n_tokens: int) -> None:
        """See `StepModel.share`."""
        self.life.data_of(frames.Call("share", (source, target, n_tokens)))

    def trim(self, slot: int, n_keep: int) -> None:
        """See `StepModel.trim`."""
        self.life.data_of(frames.Call("trim", (slot, n_keep)))

    def drop(self, slot: int) -> None:
        """See `StepModel.drop`."""
        self.life.data_of(frames.Call("drop", (slot,)))

    def save(self, slot: int, start: int = 0) -> bytes:
        """See `StepModel.save`."""
        return self.life.data_of(frames.Call("save", (slot, start) if start else (slot,)))

    def restore(self, slot: int, state: bytes) -> None:
        """See `StepModel.restore`."""
        self.life.data_of(frames.Call("restore", (slot,), state))


def _embedder(life: WorkerLife, on_progress: OnProgress) -> WorkerEmbedder:
    loaded = life.start(on_progress)
    assert isinstance(loaded, frames.LoadedEmbedder)
    return WorkerEmbedder(life, loaded)
