"""From settings to a loaded model: chooses the backend, loads the file, and works out what the scheduler may deal out."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import msgspec
import structlog

from cllm import hub, machine
from cllm.backend import Backend, Embedder, KvLayout, LaysOut, LoadsEmbedders, OnProgress, StepModel, tool_template_of
from cllm.checks import split_lora
from cllm.config import Settings, api_keys, name_of_model
from cllm.engine.cost.curve import DEFAULT_CURVE, Curve
from cllm.engine.cost.model import CostModel
from cllm.engine.limits import Limits
from cllm.engine.memory.layout import N_FEW
from cllm.engine.sampling.dry import forget_vocabularies
from cllm.errors import BackendUnavailable, LoadAborted, LoadFailed, SettingsError, TemplateInvalid, call_foreign, in_one_line
from cllm.registry import choose_backend, factory_of
from cllm.serve import curves
from cllm.serve.calibration import N_CELLS_PART, measure
from cllm.serve.disktier import DiskTier
from cllm.serve.embedders import OFF, EmbeddingsOnly, LoadedEmbedder, load_embedder, load_main
from cllm.serve.engine import ServedModel, Speech
from cllm.serve.spec import embedder_spec, model_spec
from cllm.serve.statefiles import StateFiles
from cllm.serve.stepless import Stepless, StreamsOnly
from cllm.serve.worker.embedder import WorkerEmbedder
from cllm.serve.worker.model import WorkerBackend, WorkerModel
from cllm.text.builtin_templates import CHATML, source_of
from cllm.text.dialect import GENERIC, UNKNOWN, dialect_of
from cllm.text.grammar import Grammars
from cllm.text.reasoning import mentions_reasoning
from cllm.text.template import ChatTemplate

log = structlog.get_logger("cllm.load")

N_LIVE_DEFAULT_MAX = 64
ITL_MAX_S = 0.25  # where neither that nor how many sequences run is said
N_SLOTS_APART = 16  # with cells of their own, where it is not said how many sequences run at once: each has a part of the cells only
LAYOUT_S, LAYOUT_GIB_S = 0.1, 0.5  # to lay cells out anew, as measured: mostly for the system to give fresh memory
HOST_CACHE_BYTES_MAX = 2 << 30  # where nobody says how many; that, and one of so many parts of what is free, as a model's cells are one
HOST_CACHE_SHARE = 4
SHARE_LOADING = 0.8  # of the progress that is shown; the rest is measuring


@attrs.frozen(kw_only=True)
class Loaded:
    """A loaded model, what is told of it, and the limits for its scheduler."""

    step_model: StepModel
    served: ServedModel
    limits: Limits
    curve_key: curves.Key
    cost: CostModel
    embedder: LoadedEmbedder | str = OFF  # or why there is none
    n_bytes_embedder: int = 0  # of its cells, and of its weights where they are not the model's; of one that is the model itself none

    @property
    def n_bytes(self) -> int:
        """The memory that it takes, as far as it is known: weights and cells."""
        info = self.step_model.info
        return info.size_bytes + info.cells_bytes + self.n_bytes_embedder

    def close(self) -> None:
        """Give all memory back. What is raised meanwhile is logged: other models go on, and whoever closes this one has a reason to."""
        if not isinstance(self.embedder, str):  # first: it may stand on the model's weights
            _close(self.embedder.embedder)
        _close(self.step_model)
        forget_vocabularies()


def _close(model: StepModel | Embedder) -> None:
    try:
        call_foreign(model.close)
    except Exception as error:
        log.error("close.failed", model=model.info.name, why=in_one_line(error))


def load(settings: Settings, on_progress: OnProgress) -> Loaded:
    """Load what the settings name and learn what its steps cost; blocks. Raises: as `load_unmeasured`."""
    return measured(load_unmeasured(settings, on_progress), settings, on_progress)


def measured(loaded: Loaded, settings: Settings, on_progress: OnProgress) -> Loaded:
    """Return `loaded` with what is known of the cost of its steps; blocks, and is the model's only caller.

    Raises: LoadAborted · LoadFailed, whatever the model's calls raise. The model is closed then.
    """
    try:
        _, on_measuring = _in_turn(on_progress, settings)
        cost = cost_of(loaded.step_model, loaded.curve_key, settings, on_measuring)
        limits = attrs.evolve(loaded.limits, begins_apart=_begins_apart(loaded.curve_key, settings))
        return attrs.evolve(loaded, cost=cost, limits=limits)
    except BaseException as error:  # see `call_foreign`
        loaded.close()
        if isinstance(error, LoadAborted | LoadFailed | KeyboardInterrupt):
            raise
        log.debug("load.failed", exc_info=error)
        raise LoadFailed(f"{loaded.served.name}: its steps could not be measured: {in_one_line(error)}") from error  # noqa: ASYNC104


def load_unmeasured(settings: Settings, on_progress: OnProgress) -> Loaded:
    """Load what the settings name, with a guess at what its steps cost; blocks.

    Raises: BackendUnavailable · LoadFailed · LoadAborted · TemplateInvalid.
    """
    name, backend = choose_backend(settings.backend, asks=False) if settings.isolate else choose_backend(settings.backend)
    _check_vectors(backend, settings)
    if settings.isolate or getattr(backend, "wants_worker", False):
        backend = WorkerBackend(backend, factory_of(name), hang_s=settings.watchdog_s)
    spec = model_spec(settings)
    on_loading, _ = _in_turn(on_progress, settings)
    other = settings.embedding_model
    with blaming(name):
        if _knows_models(backend):
            spec = attrs.evolve(spec, path=settings.model or "")
        else:
            spec = attrs.evolve(spec, path=_local_path(spec.path, on_loading))
            other = None if other is None else _local_path(other, on_loading)
        vectors = embedder_spec(settings, other or spec.path)
        model = load_main(backend, spec, vectors, on_loading)
        try:
            limits = limits_of(model, settings)
            served = served_model(model, limits, settings, backend=name, name=_name_of(model, settings.model, name, backend))
            embedder = load_embedder(backend, model, served.aliases, vectors, settings, on_loading)
            return Loaded(
                step_model=model,
                served=served,
                limits=limits,
                curve_key=curves.key_of(model, spec, name),
                cost=_guess(model),
                embedder=embedder,
                n_bytes_embedder=_n_bytes_beside(model, embedder, is_other=other is not None),
            )
        except BaseException:
            _close(model)
            raise


def check_beforehand(settings: Settings) -> None:
    """See what can be known at once of a model that will be loaded after others; blocks. Raises: BackendUnavailable · LoadFailed."""
    _, backend = choose_backend(settings.backend, asks=False)
    _check_vectors(backend, settings)
    for model in () if _knows_models(backend) else (settings.model, settings.embedding_model):
        if model is not None and hub.reference_of(model) is None and not os.path.exists(model):
            raise LoadFailed(f"{model}: no such file")
    for path in () if _knows_models(backend) else [split_lora(text)[0] for text in settings.lora]:
        if not os.path.exists(path):
            raise LoadFailed(f"{path}: no such file")


def check_folder(cache_dir: str) -> None:
    """See at once whether the folder of `--cache-dir` can be used; blocks. Raises: LoadFailed."""
    with _blaming_folder(cache_dir):
        StateFiles.open(Path(cache_dir), "")


def _check_vectors(backend: Backend, settings: Settings) -> None:
    if settings.embedding_model is not None and not isinstance(backend, LoadsEmbedders):
        raise LoadFailed("this backend loads no embedding models")


@contextmanager
def blaming(backend_name: str, to_do: str = "load the model") -> Iterator[None]:
    """Tell what a backend raises against its contract, or the hub's library, as a load that failed.

    As our own mistake it would be tried again for ever, and on demand it would end the server.
    """
    try:
        yield
    except (LoadFailed, LoadAborted, BackendUnavailable, KeyboardInterrupt):
        raise
    except SettingsError as error:  # of an option of the backend's, say, which nobody but it can check
        raise LoadFailed(str(error)) from error
    except BaseException as error:  # see `call_foreign`
        log.debug("load.failed", exc_info=error)
        raise LoadFailed(f"backend {backend_name} failed to {to_do}: {in_one_line(error)}") from error  # noqa: ASYNC104


def _guess(model: StepModel) -> CostModel:
    return CostModel(DEFAULT_CURVE, n_rows_max=model.n_rows_max, measured=False, apart=_is_apart(model))


def _is_apart(model: StepModel) -> bool:
    return model.capabilities.kv_layout is KvLayout.STREAMS


def _in_turn(on_progress: OnProgress, settings: Settings) -> tuple[OnProgress, OnProgress]:
    """Two that share a bar: one for what is loaded, one for what is measured then."""
    part = 1.0 if settings.calibrate == "off" else SHARE_LOADING
    return lambda share: on_progress(part * share), lambda share: on_progress(part + (1 - part) * share)


# By this process: who is loaded again and again is measured once, also where nothing can be kept, or a busy machine cuts each time short.
_measured_here: dict[tuple[str, str, bytes], Curve] = {}


def cost_of(model: StepModel, key: curves.Key, settings: Settings, on_progress: OnProgress) -> CostModel:
    """Return what is known of the cost of `model`'s steps: measured now, or before, or not at all.

    Raises: LoadAborted · what the model's calls raise.
    """
    if settings.calibrate == "off" or isinstance(model, Stepless):
        return _guess(model)
    folder = _curves_folder(settings)
    place = (settings.calibrate, str(folder), msgspec.json.encode(key, order="sorted"))
    curve = curves.read(folder, key) if settings.calibrate == "auto" else None
    curve = curve or _measured_here.get(place)
    if curve is None:
        log.info("calibration.start", why="it is asked for" if settings.calibrate == "again" else "nothing is kept for this model here")
        began_at = time.perf_counter()
        curve = model.measure(on_progress) if isinstance(model, WorkerModel) else measure(model, on_progress, time.perf_counter)
        log.info("calibration.done", seconds=round(time.perf_counter() - began_at, 1), n_sizes=len(curve.rows))
        _measured_here[place] = curve
        if curve.is_cut_short:
            log.warning("calibration.cut_short", why="something held the machine up; the next start measures again")
        else:
            curves.write(folder, key, curve)
    return CostModel(curve, n_rows_max=model.n_rows_max, apart=_is_apart(model))


def last_layout(key: curves.Key, settings: Settings) -> KvLayout | None:
    """Return how the model's cells lay when it was last served with such settings here; None when that is not known."""
    return None if settings.calibrate == "off" else curves.read_layout(_curves_folder(settings), key)


def _begins_apart(key: curves.Key, settings: Settings) -> bool:
    """Whether cells are to lie apart from the start, where that may be: as last time; else if it is said that many will run at once.

    If that proves wrong, they are laid out anew once, which the next start knows.
    """
    last = last_layout(key, settings)
    return (settings.parallel or 0) > N_FEW if last is None else last is KvLayout.STREAMS


def keep_layout(key: curves.Key, settings: Settings, layout: KvLayout) -> None:
    """Keep how the model's cells lie for the next start."""
    if settings.calibrate != "off":
        curves.write_layout(_curves_folder(settings), key, layout)


def _curves_folder(settings: Settings) -> Path | None:
    return Path(settings.calibration_dir) if settings.calibration_dir else curves.default_folder()


_found: dict[tuple[str, str], str] = {}  # what the hub's names were found to be, by cache


def _local_path(model: str, on_progress: OnProgress) -> str:
    """The file to load, fetched first where `model` names one of the hub's. Raises: HubFailed · LoadAborted.

    A model that is loaded again is the same file, whatever the hub has by then, and needs no hub.
    """
    name = model, os.environ.get("HF_HUB_CACHE") or os.environ.get("HF_HOME", "")
    if os.path.isfile(_found.get(name, "")):
        return _found[name]

    def on_bytes(n: int, n_total: int) -> bool:
        return on_progress(n / max(n_total, 1))

    path = hub.local_path(model, on_bytes)
    if path != model:
        _found[name] = path
        log.info("hub.found", model=model, file=Path(path).name)
    return path


def _knows_models(backend: Backend) -> bool:
    return bool(getattr(backend, "knows_models", False))


def _name_of(model: StepModel, path: str | None, backend_name: str, backend: Backend) -> str:
    if not _knows_models(backend):
        return name_of_model(path)
    if not path:
        return backend_name
    return model.info.name if "://" in path else name_of_model(path)  # as it is called before it is loaded


def _n_bytes_beside(model: StepModel, embedder: LoadedEmbedder | str, *, is_other: bool) -> int:
    if isinstance(embedder, str) or isinstance(model, EmbeddingsOnly):
        return 0
    info = embedder.embedder.info
    if is_other:
        return info.cells_bytes + info.size_bytes
    # In a process of its own it has the weights once more, but for the file's pages, which both have.
    is_apart = isinstance(embedder.embedder, WorkerEmbedder)
    return info.cells_bytes + (max(info.size_bytes - model.info.mapped_bytes, 0) if is_apart else 0)


def limits_of(model: StepModel, settings: Settings) -> Limits:
    """Return what the scheduler may deal out of `model` under `settings`."""
    can, layout = model.capabilities, model.capabilities.kv_layout
    keys = api_keys(settings)
    n_slots_apart = settings.parallel or N_SLOTS_APART
    n_cells_apart = model.n_cells // n_slots_apart // N_CELLS_PART * N_CELLS_PART
    limits = Limits(
        n_cells=model.n_cells,
        n_slots=model.n_slots,
        n_ctx=min(model.info.n_ctx_train, model.n_cells_slot, sys.maxsize if _reads_text(model) else settings.ctx_max or sys.maxsize),
        n_rows_max=model.n_rows_max,
        row_budget=settings.row_budget,
        itl_max_s=_itl_max_s(settings),
        itl_target_s=None if settings.itl_target_ms is None else settings.itl_target_ms / 1000,
        n_live_max=settings.parallel if settings.parallel is not None else min(model.n_slots, N_LIVE_DEFAULT_MAX),
        n_waiting_max=settings.queue_size,
        patience_s=settings.queue_patience_s or None,
        wait_max_s=settings.queue_wait_s,
        key_weights={key.name: key.weight for key in keys},
        key_caps={key.name: key.cap for key in keys if key.cap is not None},
        key_cap=settings.key_cap if keys else None,
        key_priorities={key.name: key.priority for key in keys if key.priority is not None and key.priority > 0},
        keeps_prefixes=settings.prefix_cache,
        can_share=can.can_share,
        can_trim=can.can_trim,
        # In one pool a copy of a slot that could be cut may need more cells than there are, its own source's among them.
        copies_slots=can.can_copy and not can.can_share and (layout is KvLayout.STREAMS or not can.can_trim),
        can_save=can.can_save,
        can_save_part=can.can_save_part,
        host_pool_n_bytes=host_pool_bytes(model, settings),
        apart=layout is KvLayout.STREAMS,
        n_slots_apart=n_slots_apart if n_cells_apart and may_change_layout(model, settings) else None,
        n_cells_slot_apart=n_cells_apart,
        carries_states=_carries_states(model),
        cell_n_bytes=max((model.info.cells_bytes - model.info.fixed_bytes) / model.n_cells, 1.0),
        layout_change_s=LAYOUT_S + LAYOUT_GIB_S * model.info.cells_bytes / 2**30,
    )
    if isinstance(model, StreamsOnly):  # it knows itself how many steps of what size it takes
        return attrs.evolve(limits, itl_max_s=None, keeps_prefixes=False, n_live_max=settings.parallel or model.n_slots)
    return limits


def _itl_max_s(settings: Settings) -> float | None:
    """The time between tokens to aim at; None: however long, as where it is only said how many sequences run."""
    if settings.itl_max_ms is not None:
        return settings.itl_max_ms / 1000
    return ITL_MAX_S if settings.parallel is None else None


def host_pool_bytes(model: StepModel, settings: Settings, promised_bytes: int = 0) -> int:
    """Return the bytes that saved cells may take; where nobody says how many, so few that what kills processes for their memory has no
    cause. `promised_bytes` of what is free are other models' to take.
    """
    if settings.host_cache_mb is not None:
        return settings.host_cache_mb << 20
    # A mapped file's pages count as free, and are wanted.
    free_bytes = machine.free_memory_bytes() - model.info.mapped_bytes - promised_bytes
    return min(HOST_CACHE_BYTES_MAX, max(free_bytes, 0) // HOST_CACHE_SHARE)


def may_change_layout(model: StepModel, settings: Settings) -> bool:
    """Whether the cells may be laid out anew while it serves: not where a layout was asked for, whatever else the model could take. With a
    disk tier they stay if its states would fit one layout alone.
    """
    if settings.kv != "auto" or not isinstance(model, LaysOut) or not model.layouts >= {KvLayout.UNIFIED, KvLayout.STREAMS}:
        return False
    return settings.cache_dir is None or _carries_states(model)


def _carries_states(model: StepModel) -> bool:
    return bool(getattr(model, "carries_states", False))


def what_is_kept(model: StepModel, limits: Limits) -> str:
    """Say which beginnings of prompts this model need not compute twice, for people."""
    if isinstance(model, StreamsOnly) and model.keeps_prefixes:
        return "what the model keeps by itself, if anything"
    if not limits.keeps_prefixes:
        return "nothing"
    if limits.can_share:
        return "any beginning, shared by whoever has it"
    if limits.can_trim:
        return "the beginnings of ended sequences, in one slot at a time or copied"
    if limits.can_save and limits.host_pool_n_bytes:
        return "ended sequences, the ends of prompts, and where prompts part, whole: this memory cannot be cut"
    return "ended sequences, whole: this memory cannot be cut"


def open_disk(loaded: Loaded, settings: Settings) -> DiskTier | None:
    """Open the folder that the settings name, if any; blocks. Raises: LoadFailed when it cannot be used."""
    if settings.cache_dir is None:
        return None
    what_is_missing = _why_no_disk(loaded.step_model, loaded.limits, settings)
    if what_is_missing:
        log.warning("disk.off", why=what_is_missing)
        return None
    with _blaming_folder(settings.cache_dir):
        return DiskTier.open(settings.cache_dir, _mark_of(loaded, settings), settings.cache_dir_mb << 20)


@contextmanager
def _blaming_folder(folder: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LoadFailed(f"--cache-dir {folder}: {error.strerror or error}") from error


def _mark_of(loaded: Loaded, settings: Settings) -> str:
    """What tells a model's files from others'. Its fingerprint should do; states that came of what is known to differ never fit."""
    info = loaded.step_model.info
    loras = [(os.path.abspath(lora.path), lora.scale) for lora in model_spec(settings).loras]
    return repr((loaded.served.backend, info.size_bytes, loras, info.fingerprint))


def _why_no_disk(model: StepModel, limits: Limits, settings: Settings) -> str:
    if not limits.keeps_prefixes or settings.host_cache_mb == 0:
        return "--cache-dir needs the prefix cache and --host-cache-mb"
    if not limits.host_pool_n_bytes:
        return "--cache-dir needs --host-cache-mb, for which no memory is left (what other models may still take counts first): name it"
    if not model.capabilities.can_save or not model.info.fingerprint:
        return "this backend cannot save what it has computed"
    return ""


def served_model(model: StepModel, limits: Limits, settings: Settings, *, backend: str, name: str) -> ServedModel:
    """Return what is told of `model`; `name` is what it is called unless the settings give it another."""
    aliases = settings.alias or (name,)
    reads_text = _reads_text(model)
    if reads_text and settings.chat_template_file is not None:
        raise LoadFailed("--chat-template-file: this model applies a template of its own")
    if reads_text and settings.ctx_max is not None:
        log.warning("ctx_max.unused", why="how long a request may be is for this model to say, whose tokens are not known here")
    template = ChatTemplate("", bos_token="", eos_token="") if reads_text else _template(model, settings)
    dialect = UNKNOWN if reads_text else dialect_of(template, model.vocabulary, settings.tool_format)
    if not reads_text and dialect.tags is None and mentions_reasoning(template.source):
        log.warning("reasoning.unread", why="the chat template speaks of thinking in no form that is known: it would be content")
    return ServedModel(
        name=aliases[0],
        aliases=aliases,
        backend=backend,
        info=model.info,
        vocabulary=model.vocabulary,
        template=template,
        dialect=dialect,
        for_tools=None if reads_text else _for_tools(model, settings),
        # Now, while nobody waits for a token: it keeps everything else from running.
        grammars=None if reads_text else Grammars(model.vocabulary),
        capabilities=model.capabilities,
        n_ctx=limits.n_ctx,
        n_cells=limits.n_cells,
        n_slots=limits.n_slots,
        n_live_max=limits.n_live_max,
        loaded_at=time.time(),
        generates=not isinstance(model, EmbeddingsOnly),
        reads_text=reads_text,
        heeds=model.stream_model.heeds if isinstance(model, StreamsOnly) else None,
    )


def _reads_text(model: StepModel) -> bool:
    return isinstance(model, StreamsOnly) and model.reads_text


def _template(model: StepModel, settings: Settings) -> ChatTemplate:
    vocabulary = model.vocabulary
    if settings.chat_template_file is not None:
        return _compiled(model, _read_template(settings.chat_template_file))
    source = source_of(vocabulary.chat_template)
    if source is None and not isinstance(model, EmbeddingsOnly):
        why = f"the model names {vocabulary.chat_template!r}, and brings none" if vocabulary.chat_template else "the model brings none"
        log.warning("chat_template.fallback", used="ChatML", why=why)
    return _compiled(model, source or CHATML)


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadFailed(f"--chat-template-file: cannot read {path}: {in_one_line(error)}") from error


def _for_tools(model: StepModel, settings: Settings) -> Speech | None:
    """How it speaks where tools are offered, if it brings a template for that whose calls can be read."""
    source = None if settings.chat_template_file else source_of(tool_template_of(model.vocabulary))
    if source is None or settings.tool_format == GENERIC:
        return None
    try:
        template = _compiled(model, source)
    except TemplateInvalid as error:
        why = in_one_line(error)
    else:
        dialect = dialect_of(template, model.vocabulary, settings.tool_format)
        if dialect.knows_tools:
            return Speech(template, dialect)
        why = "its calls are written in no form that is known" if template.features.supports_tools else "it tells of no tools"
    log.warning("chat_template.tools_unread", why=why)
    return None


def _compiled(model: StepModel, source: str) -> ChatTemplate:
    vocabulary = model.vocabulary
    return ChatTemplate(source, bos_token=_text(model, vocabulary.bos), eos_token=_text(model, vocabulary.eos))


def _text(model: StepModel, token: int | None) -> str:
    return "" if token is None else model.vocabulary.token_bytes(token, special=True).decode("utf-8", "replace")
