"""`cllm verify`: how far a backend's distributions of the next token are from another's, on the same model and texts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import attrs
import numpy as np
from rich.console import Console
from rich.table import Table

from cllm import hub
from cllm.backend import Backend, Batch, Logits, ModelSpec, StepModel, StreamModel, TellsLogits, Vocabulary
from cllm.config import Settings
from cllm.engine.sampling.divergence import Divergence, compare_rows, summary
from cllm.errors import BackendUnavailable, LoadFailed, SettingsError
from cllm.registry import checked_model, load_backend
from cllm.serve.loading import blaming
from cllm.serve.logs import configure_logging
from cllm.serve.progress import shown
from cllm.serve.spec import model_spec

N_ROWS: Final = 32  # of a step, all outputs
N_TOKENS_LEAST: Final = 2

TEXTS: Final = (
    "The harbour lay quiet under a low sky. Two men mended nets on the quay, and neither of them spoke until the bell of the ferry rang "
    "across the water. Then the older one put down his needle and said that the weather would turn before night, as it always did when "
    "the gulls sat on the roofs.",
    "def merge(left, right):\n    merged = []\n    while left and right:\n        source = left if left[0] <= right[0] else right\n"
    "        merged.append(source.pop(0))\n    return merged + left + right\n\n\ndef merge_sort(items):\n    if len(items) < 2:\n"
    "        return items\n    middle = len(items) // 2\n    return merge(merge_sort(items[:middle]), merge_sort(items[middle:]))\n",
    "Question: A train leaves at 9:40 and arrives at 11:05. How long does it take?\nAnswer: From 9:40 to 11:00 are 80 minutes, and 5 more "
    "make 85, so that it takes 1 hour and 25 minutes.\n\nQuestion: What is 17 times 6?\nAnswer: 10 times 6 is 60, 7 times 6 is 42, "
    "together 102.\n",
    "Die Bibliothek ist montags geschlossen. An den anderen Tagen öffnet sie um zehn Uhr; wer ein Buch zurückgeben will, kann es auch "
    "nachts in den Kasten neben der Tür legen. Die Gebühr für verspätete Rückgabe beträgt zwanzig Cent je Tag und Buch.",
    '{"order": 1187, "customer": {"name": "M. Okafor", "city": "Leeds"}, "items": [{"sku": "A-20", "count": 3, "price": 4.5}, {"sku": '
    '"B-7", "count": 1, "price": 19.0}], "paid": true, "notes": null}',
    "Water boils at a lower temperature on a mountain because the air presses on it less. Each gas molecule that leaves the surface has to "
    "push its way out; where fewer molecules push back, less heat is enough. That is why an egg takes longer to cook there.",
)
"""What is compared unless texts are named: prose, code, arithmetic, another language, JSON, explanation."""


@attrs.frozen
class Order:
    """What is to be compared."""

    settings: Settings  # with the backend under test
    reference: str  # a backend's name
    reference_model: str | None  # None: the same file
    text_paths: Sequence[str]
    n_tokens: int  # of each text at most


def run(order: Order, *, as_json: bool) -> int:
    """Compare and show; return the process's exit code. Raises: SettingsError · BackendUnavailable · LoadFailed."""
    settings = order.settings
    if settings.backend == "auto":
        raise SettingsError("--backend: name the backend that is to be compared with the reference")
    if settings.log_level == "info":
        settings = attrs.evolve(settings, log_level="warning")
    configure_logging(settings)
    texts = [_read(path) for path in order.text_paths] or list(TEXTS)
    found = compare(attrs.evolve(order, settings=settings), texts)
    if as_json:
        print(json.dumps({"backend": settings.backend, "reference": order.reference, **attrs.asdict(found)}, indent=2))
    else:
        show(found, title=f"{settings.backend} beside {order.reference}")
    return 0


def compare(order: Order, texts: Sequence[str]) -> Divergence:
    """Have both compute the texts, one after the other, so that only one model is in memory."""
    settings = order.settings
    load_backend(settings.backend)  # whatever is wrong with it is known before the other one has computed for minutes
    if settings.ctx_size and settings.ctx_size < order.n_tokens:
        raise SettingsError(f"--ctx-size: {settings.ctx_size} are fewer than the {order.n_tokens} tokens of a text (--text-tokens)")
    try:
        plain = attrs.evolve(settings, backend_option=(), model=order.reference_model or settings.model)
    except SettingsError as error:  # of the model, which the file at fault is not
        raise SettingsError(f"--reference-model: {error.message}") from error
    spec = attrs.evolve(model_spec(settings), n_cells=settings.ctx_size or order.n_tokens + N_ROWS, n_live=1)
    reference_spec = attrs.evolve(model_spec(plain), n_cells=spec.n_cells, n_live=1)
    with _loaded(order.reference, reference_spec) as model:
        if isinstance(model, StreamModel):
            raise BackendUnavailable(f"backend {order.reference} schedules itself, and the reference is one that does not")
        tokens = _tokens(model.vocabulary, texts, order.n_tokens)
        references = [_computed(model, one) for one in tokens]
    if not tokens:
        raise SettingsError("--text: there is nothing in it")
    with _loaded(settings.backend, spec) as model:
        others = _scored(model, tokens)
    if references[0].shape != others[0].shape:
        raise LoadFailed(f"{settings.backend} and {order.reference} have vocabularies of different sizes: are the models the same?")
    return summary([compare_rows(reference, other) for reference, other in zip(references, others, strict=True)])


def _tokens(vocabulary: Vocabulary, texts: Sequence[str], n_max: int) -> list[list[int]]:
    tokens = [vocabulary.tokenize(text, add_special=True, parse_special=False)[:n_max] for text in texts]
    return [one for one in tokens if len(one) >= N_TOKENS_LEAST]


@contextmanager
def _loaded(name: str, spec: ModelSpec) -> Iterator[StepModel | StreamModel]:
    """A model, in this process: nobody else waits for it."""
    backend = load_backend(name)
    with shown(f"{spec.path} with {name}") as on_progress, blaming(name):
        model = checked_model(backend.load(_fetched(backend, spec, on_progress), on_progress))
    with blaming(name, "compute"):
        try:
            yield model
        finally:
            model.close()


def _scored(model: StepModel | StreamModel, tokens: list[list[int]]) -> list[Logits]:
    """What a model scores the successor of each token with."""
    if not isinstance(model, StreamModel):
        return [_computed(model, one) for one in tokens]
    if isinstance(model, TellsLogits):
        return [model.logits(one) for one in tokens]
    raise BackendUnavailable("this backend's models tell tokens, and no logits that could be compared")


def _fetched(backend: Backend, spec: ModelSpec, on_progress: Callable[[float], bool]) -> ModelSpec:
    if getattr(backend, "knows_models", False):
        return spec
    return attrs.evolve(spec, path=hub.local_path(spec.path, lambda n, n_total: on_progress(n / max(n_total, 1))))


def _computed(model: StepModel, tokens: Sequence[int]) -> Logits:
    """The tokens as rows of one slot, all of them outputs, some at a time."""
    n_rows = min(N_ROWS, model.n_rows_max)
    batch, parts = Batch(n_rows), []
    for start in range(0, len(tokens), n_rows):
        part = tokens[start : start + n_rows]
        n = batch.n_rows = batch.n_outputs = len(part)
        batch.tokens[:n] = part
        batch.positions[:n] = range(start, start + n)
        batch.slots[:n], batch.outputs[:n] = 0, 1
        parts.append(model.step(batch).copy())
    model.drop(0)
    return np.concatenate(parts)


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError as error:
        raise SettingsError(f"--text: {path}: {error.strerror}") from error


def show(found: Divergence, *, title: str) -> None:
    """Print the figures."""
    table = Table(title=title, title_justify="left", box=None, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, text in (
        ("tokens", str(found.n_rows)),
        ("KL divergence, mean (nats)", f"{found.mean:.3g}"),
        ("median", f"{found.p50:.3g}"),
        ("99th percentile", f"{found.p99:.3g}"),
        ("greatest", f"{found.max:.3g}"),
        ("same likeliest token", f"{found.top1_agreement:.1%}"),
    ):
        table.add_row(name, text)
    Console().print(table)
