"""The backends themselves: whether llama.cpp can work here, and loading a model with it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import attrs

from cllm import machine
from cllm.backend import CONTRACT_VERSION, Embedder, ModelSpec, OnProgress, Probe, SplitMode, StepModel, Vocabulary
from cllm.errors import BackendError, BackendUnavailable, DoesNotGenerate, LoadAborted, LoadFailed
from cllm_llamacpp import amx, devices, settings
from cllm_llamacpp.abi import PACKAGE_VERSION
from cllm_llamacpp.abortflag import AbortFlag
from cllm_llamacpp.adapters import load_adapters
from cllm_llamacpp.context import Contexts
from cllm_llamacpp.embedder import N_TOKENS_OWN, LlamaEmbedder, make_embedder
from cllm_llamacpp.facts import EMBEDDERS, Facts, facts_of, metadata_of
from cllm_llamacpp.failure import load_failed
from cllm_llamacpp.library import LOG, open_library
from cllm_llamacpp.model import LlamaModel
from cllm_llamacpp.native import Native
from cllm_llamacpp.vocabulary import LlamaVocabulary, check_vocabulary

_PREFERENCE_CPU: Final = 10
_PREFERENCE_GPU: Final = 20

_NO_GPU: Final = (
    "llama-cpp-python was built without GPU support, or its driver is not there: CMAKE_ARGS=-DGGML_CUDA=on {python} -m pip install "
    "--force-reinstall --no-deps --no-cache-dir llama-cpp-python=={version} builds it for NVIDIA, -DGGML_METAL=on for Apple and "
    "-DGGML_VULKAN=on for others; or install a prebuilt wheel of that version for your GPU"
)

logger = logging.getLogger("cllm.llamacpp")
_load_lock = threading.Lock()  # one load at a time: the log's last errors are then this load's


@attrs.frozen
class LlamaBackend:
    """See `cllm.backend.Backend`."""

    gpu: bool
    contract_version: int = CONTRACT_VERSION

    def probe(self) -> Probe:
        try:
            lib = open_library()
            return self._probe_gpu(lib) if self.gpu else Probe(available=True, reason="llama.cpp", preference=_PREFERENCE_CPU)
        except BackendUnavailable as error:
            return Probe(available=False, reason=str(error))
        except Exception as error:  # whatever it is, listing the backends must go on
            return Probe(available=False, reason=f"llama.cpp does not work here: {type(error).__name__}: {error}")

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
        lib = self._checked(spec)
        with _load_lock, LOG.loading():
            return _load(lib, spec, on_progress, gpu=self.gpu)

    def load_embedder(self, spec: ModelSpec, on_progress: OnProgress) -> Embedder:
        lib = self._checked(spec)
        with _load_lock:
            return _load_embedder(lib, spec, on_progress, gpu=self.gpu)

    def load_vocabulary(self, path: str) -> Vocabulary:
        lib = open_library()
        _check_file(path)
        with _load_lock, LOG.loading():
            return _load_vocabulary(lib, path)

    def _checked(self, spec: ModelSpec) -> Any:
        lib = open_library()
        if self.gpu and not (probe := self._probe_gpu(lib)).available:
            raise BackendUnavailable(probe.reason)
        settings.check(spec)
        if self.gpu:
            _check_rows(lib, spec)
        _check_file(spec.path)
        return lib

    def _probe_gpu(self, lib: Any) -> Probe:
        found = devices.gpus(lib) if lib.llama_supports_gpu_offload() else []  # which says whether there is a GPU, not what was built
        if not found:
            kinds = ", ".join(devices.supported(lib))
            found_none = f"llama.cpp has GPU support ({kinds}), but found no GPU: is the driver installed, and new enough?"
            return Probe(available=False, reason=found_none if kinds else _no_gpu())
        names = ", ".join(f"{gpu.name} ({gpu.free_bytes / 2**30:.0f} GiB free)" for gpu in found)
        return Probe(available=True, reason=f"llama.cpp on {names}", preference=_PREFERENCE_GPU)


def _no_gpu() -> str:
    """What to do; without the version pip would be content with what is there, and without the rest with the wheel that it built before."""
    return _NO_GPU.format(python=sys.executable, version=PACKAGE_VERSION)


def _load(lib: Any, spec: ModelSpec, on_progress: OnProgress, *, gpu: bool) -> LlamaModel:
    """Build the model up from its native parts; what was made is freed again, last first, when a later part fails."""
    free_before = machine.free_memory_bytes()  # later on, a mapped file's pages would count as free though they are wanted
    with ExitStack() as parts:
        model_params = settings.model_params(lib, spec, n_gpu_layers=_n_gpu_layers(lib, spec) if gpu else _no_layers(spec))
        mapped_before = machine.mapped_file_bytes()
        model = _load_model(lib, spec, on_progress, model_params)
        parts.callback(lib.llama_model_free, model)
        facts = facts_of(lib, model, spec.path)
        if spec.mmap and not spec.mlock:
            # What was copied, as to a GPU, llama.cpp unmaps at the file's beginning and end; what lies between counts as wanted.
            mapped_bytes = min(max(machine.mapped_file_bytes() - mapped_before, 0), facts.info.size_bytes)
            facts = attrs.evolve(facts, info=attrs.evolve(facts.info, mapped_bytes=mapped_bytes))
        if gpu:
            facts = _on_gpus(facts, model_params.n_gpu_layers, _own_gpus(lib, spec))
        if not facts.generates:
            raise _does_not_generate(spec, facts)
        spec = settings.with_layout(spec, facts)
        is_on_gpu = gpu and model_params.n_gpu_layers != 0  # without layers there, no GPU has a part in what is computed
        if not is_on_gpu:
            settings.check_memory(spec, facts, machine.memory_bytes())
        elif 0 <= model_params.n_gpu_layers < (n_layers := lib.llama_model_n_layer(model)):
            settings.check_memory(spec, facts, machine.memory_bytes(), share=1 - model_params.n_gpu_layers / n_layers)
        free_bytes = _gpu_bytes(lib, spec) if is_on_gpu else free_before - facts.info.size_bytes
        adapters, abort = load_adapters(lib, model, spec.loras, parts), AbortFlag(lib)
        contexts = Contexts(lib, model, facts, adapters, abort, is_on_gpu)
        parts.callback(contexts.free)
        context = contexts.make(spec, free_bytes=free_bytes)
        if not context.memory:  # embedding and diffusion models keep no cells
            raise _does_not_generate(spec, facts)
        native = Native(lib=lib, model=model, contexts=contexts, abort=abort, model_params=model_params, parts=parts)
        loaded = LlamaModel(native, context, facts, spec, gpu=is_on_gpu)
        _warm_up(loaded, spec)
        native.parts = parts.pop_all()
        return loaded


def _load_embedder(lib: Any, spec: ModelSpec, on_progress: OnProgress, *, gpu: bool) -> LlamaEmbedder:
    with ExitStack() as parts:
        with LOG.loading():
            model_params = settings.model_params(lib, spec, n_gpu_layers=_n_gpu_layers(lib, spec) if gpu else _no_layers(spec))
            model = _load_model(lib, spec, on_progress, model_params)
        parts.callback(lib.llama_model_free, model)
        facts = facts_of(lib, model, spec.path)
        vocabulary = LlamaVocabulary(lib, model, facts.info.metadata.get("tokenizer.ggml.pre", ""))
        parts.callback(vocabulary.close)
        adapters = load_adapters(lib, model, spec.loras, parts)
        is_on_gpu = gpu and model_params.n_gpu_layers != 0
        embedder = make_embedder(lib, model, facts, spec, vocabulary, adapters, parts, n_usual=N_TOKENS_OWN, gpu=is_on_gpu)
        embedder.own(parts.pop_all(), model_params)
        return embedder


def _load_vocabulary(lib: Any, path: str) -> LlamaVocabulary:
    """The model stays as long as its vocabulary does: it has no weights."""
    params = settings.model_params(lib, ModelSpec(path=path), n_gpu_layers=0)
    params.vocab_only = True
    model = _checked(lib, lib.llama_model_load_from_file(os.fsencode(path), params), path)
    vocabulary = LlamaVocabulary(lib, model, metadata_of(lib, model).get("tokenizer.ggml.pre", ""))
    freed = weakref.finalize(vocabulary, lib.llama_model_free, model)
    freed.atexit = False  # a thread may still be at work on a text by then
    return vocabulary


def _check_file(path: str) -> None:
    if Path(path).is_dir():
        raise LoadFailed(f"{path}: a folder, not a file; a GGUF file is wanted")
    if not Path(path).is_file():
        raise LoadFailed(f"{path}: no such file")


def _warm_up(model: LlamaModel, spec: ModelSpec) -> None:
    try:
        model.warm_up()
    except BackendError as error:
        raise load_failed(spec.path, str(error)) from error


def _n_gpu_layers(lib: Any, spec: ModelSpec) -> int:
    """Return the layers to put on GPUs; below zero for all. llama.cpp does not find out for itself how many fit."""
    if spec.n_gpu_layers is not None:
        return spec.n_gpu_layers
    params = settings.model_params(lib, spec, n_gpu_layers=0)
    params.no_alloc = True  # the file's description alone
    params.load_mode = settings.LOAD_WITHOUT_MAPPING  # llama.cpp ends the process (GGML_ASSERT) where a file is mapped besides
    model = lib.llama_model_load_from_file(os.fsencode(spec.path), params)
    if not model:
        raise load_failed(spec.path)
    try:
        n_layers, facts = lib.llama_model_n_layer(model), facts_of(lib, model, spec.path)
    finally:
        lib.llama_model_free(model)
    cells_bytes = int(spec.n_cells * settings.bytes_per_cell(spec, facts)) if spec.n_cells and facts.keeps_all else 0
    n_fitting = settings.n_layers_that_fit(n_layers, facts.info.size_bytes, free_bytes := _gpu_bytes(lib, spec), cells_bytes)
    if n_fitting == 0:
        logger.warning("no layer of %s fits into the %d MiB that are free on the GPU: the CPU computes all", spec.path, free_bytes >> 20)
    elif n_fitting > 0:
        logger.warning("%d of %d layers of %s go to the GPU, of which %d MiB are free", n_fitting, n_layers, spec.path, free_bytes >> 20)
    return n_fitting


def _no_layers(spec: ModelSpec) -> int:
    """None: a number that somebody named is read over only with a word, since they mean a GPU that is not used."""
    if spec.n_gpu_layers:
        logger.warning(
            "--gpu-layers %d has no effect: llama-cpu computes all on the processor; `cllm backends` says more", spec.n_gpu_layers
        )
    return 0


def _gpu_bytes(lib: Any, spec: ModelSpec) -> int:
    """Return how much the GPUs have room for together, dealt to them as `tensor_split` says, or as llama.cpp does by what is free."""
    gpus = _own_gpus(lib, spec)
    parts = spec.tensor_split[: len(gpus)] if len(gpus) > 1 else ()
    if not (whole := sum(parts)):
        return sum(gpu.free_bytes for gpu in gpus)
    return min(int(gpu.free_bytes * whole / part) for gpu, part in zip(gpus, parts, strict=False) if part)


def _own_gpus(lib: Any, spec: ModelSpec) -> list[devices.Gpu]:
    """Return the GPUs that the model goes to: all of them, or the one that was named. Raises: LoadFailed where there is none such."""
    found = devices.gpus(lib)
    if spec.split_mode is not SplitMode.NONE or spec.main_gpu < 0:
        return found
    if spec.main_gpu >= len(found):  # llama.cpp would say so only where layers are to go there, and none would fit
        there = "is GPU 0 alone" if len(found) == 1 else f"are GPUs 0 to {len(found) - 1}"
        raise LoadFailed(f"--main-gpu {spec.main_gpu}: there {there}")
    return [found[spec.main_gpu]]


def _check_rows(lib: Any, spec: ModelSpec) -> None:
    """Refuse to split rows over GPUs that cannot: llama.cpp says so in words of its own, once the file is read. Raises: LoadFailed."""
    if spec.split_mode is not SplitMode.ROW or spec.n_gpu_layers == 0:
        return
    for gpu in devices.gpus(lib):
        if not devices.splits_rows(lib, gpu):
            raise LoadFailed(
                f"--split-mode row: with this build of llama.cpp {gpu.name} cannot, only one for SYCL can; "
                "left out, several GPUs share the layers"
            )


def _on_gpus(facts: Facts, n_layers: int, gpus: Sequence[devices.Gpu]) -> Facts:
    """Say in the model's facts what computes it: what steps take with few layers on a GPU, or on another, is no measure of these."""
    where = f"{'all' if n_layers < 0 else n_layers} layers on {', '.join(gpu.name for gpu in gpus)} |"
    return attrs.evolve(facts, info=attrs.evolve(facts.info, build=f"{facts.info.build} {where}", n_gpu_layers=n_layers))


def _load_model(lib: Any, spec: ModelSpec, on_progress: OnProgress, params: Any) -> Any:
    params.use_extra_bufts = amx.is_sound(lib)
    watch = _Progress(on_progress)
    callback = lib.llama_progress_callback(watch)  # referenced until the load is over
    params.progress_callback = callback
    model = lib.llama_model_load_from_file(os.fsencode(spec.path), params)
    watch.raise_if_stopped()
    return _checked(lib, model, spec.path)


def _checked(lib: Any, model: Any, path: str) -> Any:
    """The model that llama.cpp gave for a file, if it is one that has tokens. Raises: LoadFailed."""
    if not model:
        raise load_failed(path)
    try:
        check_vocabulary(lib, model, path)
    except LoadFailed:
        lib.llama_model_free(model)
        raise
    return model


class _Progress:
    """Stands between llama.cpp and `on_progress`: an exception may not pass through C, it waits for the end of the load."""

    def __init__(self, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._stopped: BaseException | None = None

    def __call__(self, share: float, _user_data: object) -> bool:
        try:
            if not self._on_progress(share):
                self._stopped = LoadAborted("the load was stopped")
        except BaseException as error:
            self._stopped = error
        return self._stopped is None

    def raise_if_stopped(self) -> None:
        if self._stopped is not None:
            raise self._stopped


def _does_not_generate(spec: ModelSpec, facts: Facts) -> LoadFailed:
    text = f"{spec.path}: a {facts.info.architecture} model does not generate text token by token"
    if facts.pooling is None and facts.info.architecture not in EMBEDDERS:  # diffusion models and encoders before decoders
        return LoadFailed(text)
    return DoesNotGenerate(text)
