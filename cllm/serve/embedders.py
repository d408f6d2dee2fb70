"""From settings to what gives vectors: another model, the same one, or nothing, with the reason."""

from __future__ import annotations

import time

import attrs
import structlog
import trio

from cllm.backend import Backend, Embedder, Embeds, LoadsEmbedders, ModelSpec, OnProgress, StepModel, StreamModel
from cllm.config import Settings, api_keys, embedding_names_of
from cllm.engine.embedding.scheduler import n_tokens_max_of
from cllm.errors import DoesNotGenerate, LoadFailed
from cllm.registry import check_embedder, checked_model
from cllm.serve.embedding import EmbedLoop, ServedEmbedder
from cllm.serve.engine import Embeddings
from cllm.serve.loop import Loop
from cllm.serve.metrics import Metrics
from cllm.serve.stepless import Stepless, StreamsOnly

log = structlog.get_logger("cllm.load")

OFF = "embeddings are off: start the server with --embeddings, or with --embedding-model FILE"


class EmbeddingsOnly(Stepless):
    """Stands where a `StepModel` would when the served file gives vectors and no text."""

    def __init__(self, embedder: Embedder) -> None:
        super().__init__(embedder.vocabulary, embedder.info, n_slots=1, n_cells_slot=max(2, n_tokens_max_of(embedder)))
        self.embedder = embedder

    def close(self) -> None:
        """See `StepModel.close`."""
        self.embedder.close()


@attrs.frozen(kw_only=True)
class LoadedEmbedder:
    """What gives vectors, and what is told of it."""

    embedder: Embedder
    served: ServedEmbedder


def load_main(backend: Backend, spec: ModelSpec, vectors: ModelSpec, on_progress: OnProgress) -> StepModel:
    """Load the served model, or, where it gives vectors only, that. Raises: LoadFailed · LoadAborted · BackendUnavailable."""
    try:
        model = checked_model(backend.load(spec, on_progress))
        return _streams_only(model, spec) if isinstance(model, StreamModel) else model
    except DoesNotGenerate:
        if not isinstance(backend, LoadsEmbedders):
            raise
        embedder = backend.load_embedder(attrs.evolve(vectors, path=spec.path, loras=spec.loras), on_progress)
        check_embedder(embedder)  # before anything of it is read
        return EmbeddingsOnly(embedder)


def _streams_only(model: StreamModel, spec: ModelSpec) -> StreamsOnly:
    try:
        return StreamsOnly(model, keeps_prefixes=spec.keeps_prefixes)
    except BaseException:
        model.close()
        raise


def load_embedder(
    backend: Backend, model: StepModel, aliases: tuple[str, ...], vectors: ModelSpec, settings: Settings, on_progress: OnProgress
) -> LoadedEmbedder | str:
    """Return what the settings ask for beside `model`, or in words why there is nothing.

    A file that was named must load. The served model's own vectors are an extra: without memory for them the rest is served.

    Raises: LoadFailed · LoadAborted · BackendUnavailable.
    """
    if settings.embedding_model is not None:
        assert isinstance(backend, LoadsEmbedders), "it was looked at before anything was loaded"
        return loaded_embedder(backend.load_embedder(vectors, on_progress), embedding_names_of(settings))
    own_names = (*aliases, *settings.embedding_alias)
    if isinstance(model, EmbeddingsOnly):
        return loaded_embedder(model.embedder, own_names)
    if not settings.embeddings:
        return OFF
    if not isinstance(model, Embeds):
        return "this backend's models give no vectors: name one with --embedding-model FILE"
    try:
        return loaded_embedder(model.make_embedder(vectors), own_names)
    except LoadFailed as error:
        log.warning("embeddings.off", why=str(error))
        return f"the model could not be made ready for embeddings: {error}"


def embeddings_of(loaded: LoadedEmbedder | str, loop: Loop, metrics: Metrics, settings: Settings) -> Embeddings | str:
    """Return what runs `loaded` in turns with `loop`, or the reason why nothing does."""
    if isinstance(loaded, str):
        return loaded
    embed_loop = EmbedLoop(
        loaded.embedder,
        loop.thread,
        metrics,
        slice_s=settings.embedding_slice_ms / 1000.0,
        n_jobs_max=settings.queue_size,
        is_busy=lambda: loop.scheduler.n_sequences > 0,
        key_weights={key.name: key.weight for key in api_keys(settings)},
    )
    return Embeddings(loaded.served, embed_loop)


async def run_beside(loop: Loop, embed_loop: EmbedLoop) -> None:
    """Run both until both are stopped and nothing is left. Raises: what either raises."""
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(embed_loop.run)
            await loop.run()
    except BaseExceptionGroup as group:
        if len(group.exceptions) == 1:  # as it would come without a nursery
            raise group.exceptions[0] from None  # noqa: ASYNC123 - the group says nothing that the one does not
        raise


def loaded_embedder(embedder: Embedder, aliases: tuple[str, ...]) -> LoadedEmbedder:
    """Return `embedder` with what is told of it."""
    check_embedder(embedder)
    served = ServedEmbedder(
        name=aliases[0],
        aliases=aliases,
        info=embedder.info,
        vocabulary=embedder.vocabulary,
        pooling=embedder.pooling,
        n_embd=embedder.n_embd,
        n_tokens_max=n_tokens_max_of(embedder),
        loaded_at=time.time(),
        pair=embedder.pair,
    )
    return LoadedEmbedder(embedder=embedder, served=served)
