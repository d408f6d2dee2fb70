"""What stands where a `StepModel` would when what was loaded has no steps: the rest of the server asks it for facts only."""

from __future__ import annotations

from typing import NoReturn

from cllm.backend import Batch, Capabilities, Logits, ModelInfo, StreamModel, Vocabulary
from cllm.errors import LoadFailed, StepFailed
from cllm.registry import vocabulary_of
from cllm.text.unread import NoVocabulary


class Stepless:
    """Can do nothing; its memory is a formality."""

    def __init__(self, vocabulary: Vocabulary, info: ModelInfo, *, n_slots: int, n_cells_slot: int) -> None:
        self.vocabulary = vocabulary
        self.info = info
        self.capabilities = Capabilities(can_share=False, can_trim=False, can_save=False, can_abort=False)
        self.n_slots = self.n_rows_max = n_slots
        self.n_cells_slot = n_cells_slot
        # A scheduler wants a spare cell for each running sequence, and nobody is to wait for cells here.
        self.n_cells = n_cells_slot if n_slots == 1 else n_slots * (n_cells_slot + 1)

    def step(self, batch: Batch) -> Logits:
        """See `StepModel.step`."""
        self._refuse()

    def share(self, source: int, target: int, n_tokens: int) -> None:
        """See `StepModel.share`."""
        self._refuse()

    def trim(self, slot: int, n_keep: int) -> None:
        """See `StepModel.trim`."""
        self._refuse()

    def drop(self, slot: int) -> None:
        """See `StepModel.drop`."""

    def save(self, slot: int, start: int = 0) -> bytes:
        """See `StepModel.save`."""
        self._refuse()

    def restore(self, slot: int, state: bytes) -> None:
        """See `StepModel.restore`."""
        self._refuse()

    def abort(self) -> None:
        """See `StepModel.abort`."""

    def close(self) -> None:
        """See `StepModel.close`."""

    def _refuse(self) -> NoReturn:
        raise StepFailed("this model has no steps")


class StreamsOnly(Stepless):
    """A `StreamModel` as the rest of the server sees it."""

    def __init__(self, stream_model: StreamModel, *, keeps_prefixes: bool = True) -> None:
        """Without `keeps_prefixes`, each request is for a model that takes nothing of what it computed for others.

        Raises: LoadFailed when the file that has its vocabulary cannot be read, or when the model cannot be asked for that.
        """
        if not keeps_prefixes and "cache_prompt" not in stream_model.heeds:
            raise LoadFailed(
                "--no-prefix-cache: this backend's model finds by itself what it computed for others, and cannot be told not to"
            )
        n_ctx = min(stream_model.n_ctx, stream_model.info.n_ctx_train)
        vocabulary = vocabulary_of(stream_model)
        self.reads_text = vocabulary is None
        super().__init__(vocabulary or NoVocabulary(), stream_model.info, n_slots=stream_model.n_live_max, n_cells_slot=n_ctx)
        self.stream_model = stream_model
        self.keeps_prefixes = keeps_prefixes

    def close(self) -> None:
        """See `StreamModel.close`."""
        self.stream_model.close()
