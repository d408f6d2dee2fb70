"""What gives vectors, in a process of its own: its rows go there and their vectors come back."""

from __future__ import annotations

import numpy as np

from cllm.backend import Batch, Vectors, Vocabulary
from cllm.serve.worker import frames
from cllm.serve.worker.crossing import columns_of
from cllm.serve.worker.life import WorkerLife
from cllm.serve.worker.vocabulary import WorkerVocabulary


class WorkerEmbedder:
    """See `cllm.backend.Embedder`. A call that finds the worker dead raises ModelDied; `life.revive` starts another one."""

    def __init__(self, life: WorkerLife, loaded: frames.LoadedEmbedder) -> None:
        assert loaded.vocabulary is not None
        self.life = life
        self._words = WorkerVocabulary(loaded.vocabulary, life.living)
        self.vocabulary: Vocabulary = self._words
        self.info = loaded.info
        self.pooling = loaded.pooling
        self.n_embd = loaded.n_embd
        self.n_tokens_max = loaded.n_tokens_max
        self.n_cells = loaded.n_cells
        self.n_slots = loaded.n_slots
        self.n_rows_max = loaded.n_rows_max
        self.can_split = loaded.can_split
        self._n_steps = 0

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return self.life.pid

    def step(self, batch: Batch) -> Vectors:
        """See `Embedder.step`."""
        self._n_steps += 1
        data = self.life.data_of(frames.Rows(self._n_steps, columns_of(batch)))
        self.life.went_well()
        return np.frombuffer(data, np.float32).reshape(batch.n_rows, self.n_embd)

    def drop(self, slot: int) -> None:
        """See `Embedder.drop`."""
        self.life.data_of(frames.Call("drop", (slot,)))

    def pair(self, query: str, document: str) -> list[int]:
        """See `Embedder.pair`."""
        return self._words.pair(query, document)

    def close(self) -> None:
        """See `Embedder.close`."""
        self.life.close()
