"""From what is asked for to a pipeline: which files OpenVINO reads, with what precision, and how many cells there are."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import attrs

from cllm.backend import FileVocabulary, ModelInfo, ModelSpec
from cllm.errors import BackendUnavailable, LoadFailed
from cllm.machine import cpu_quota, free_memory_bytes, n_cores
from cllm_backend_openvino.forms import KINDS
from cllm_backend_openvino.header import TYPES, Header, NoGguf, read_model
from cllm_backend_openvino.model import OpenVinoModel
from cllm_backend_openvino.sampling import HEEDS, UNSHARED
from cllm_backend_openvino.scoring import Scorer

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
BLOCK: Final = 32  # cells that are given out at a time on CPUs
N_LIVE_DEFAULT: Final = 64
N_CONTEXTS_MAX: Final = 8  # cells, unless a number is named
PRECISIONS: Final = ("bf16", "f16", "f32")
KV_PRECISIONS: Final = {"u8": 1.0, "u4": 0.5, "f16": 2.0, "bf16": 2.0, "f32": 4.0}  # bytes of a number, about
OTHERWISE: Final = "serve it with --backend llama-cpu"


@attrs.frozen
class Options:
    """The backend's own settings; None leaves the choice to OpenVINO, which takes bf16 and u8 where the processor can."""

    precision: str | None = None
    kv_precision: str | None = None
    prefix_cache: bool = True  # unless the server is to keep none
    vocabulary: str | None = None  # the GGUF file with the tokens of a model in OpenVINO's own format


@attrs.frozen
class Facts:
    """What is known of a model before it is loaded."""

    info: ModelInfo
    vocabulary: FileVocabulary
    n_vocab: int
    n_numbers_cell: int  # keys and values of a token


def load(spec: ModelSpec) -> OpenVinoModel:
    """Load a model; blocks for seconds. Raises: LoadFailed with one line · BackendUnavailable where OpenVINO cannot be imported."""
    options = _options(spec)
    facts = facts_of(spec.path, options)
    if spec.loras:
        raise LoadFailed("the openvino backend applies no LoRA adapters")
    n_cells = _n_cells(spec, facts, options)
    n_live_max = spec.n_live or N_LIVE_DEFAULT
    try:
        # A block more for each sequence: their last ones are not full, and what was promised is the cells.
        pipeline = _pipeline(spec, options, n_blocks=-(-n_cells // BLOCK) + n_live_max, n_live_max=n_live_max)
    except ImportError as error:  # it is installed, and does not work here
        raise BackendUnavailable(f"openvino-genai cannot be imported: {reason_of(error)}") from error
    except Exception as error:
        raise LoadFailed(f"{spec.path}: OpenVINO cannot load it: {reason_of(error)}") from error
    info = attrs.evolve(facts.info, cells_bytes=_cells_bytes(facts, options, n_cells))
    n_ctx = min(info.n_ctx_train, n_cells)
    scorer = Scorer(spec.path, _properties(spec, options))
    heeds = _heeds(spec, options)
    model = OpenVinoModel(pipeline, info, facts.vocabulary, scorer, heeds=heeds, n_vocab=facts.n_vocab, n_live_max=n_live_max, n_ctx=n_ctx)
    model.n_cells = n_cells
    return model


def _heeds(spec: ModelSpec, options: Options) -> frozenset[str]:
    """What of a request it heeds. OpenVINO finds a prompt by its tokens alone, so salts keep nobody apart while it looks for any."""
    heeds = HEEDS if options.prefix_cache else HEEDS | UNSHARED
    return heeds if _has_tokenizer(Path(spec.path)) else heeds - set(KINDS)


def _has_tokenizer(path: Path) -> bool:
    """Whether OpenVINO knows the tokens, without which it holds no answer to a form. Of a GGUF file it always does."""
    return path.is_file() or all((path / f"openvino_{name}.xml").is_file() for name in ("tokenizer", "detokenizer"))


def _pipeline(spec: ModelSpec, options: Options, *, n_blocks: int, n_live_max: int) -> Any:
    import openvino_genai

    scheduling = openvino_genai.SchedulerConfig()
    scheduling.num_kv_blocks = n_blocks
    scheduling.max_num_seqs = n_live_max
    scheduling.max_num_batched_tokens = max(min(spec.n_rows_physical, spec.n_rows_max), n_live_max)
    scheduling.enable_prefix_caching = options.prefix_cache
    return openvino_genai.ContinuousBatchingPipeline(spec.path, scheduling, "CPU", _properties(spec, options))


def _properties(spec: ModelSpec, options: Options) -> dict[str, object]:
    properties: dict[str, object] = {}
    n_threads = spec.n_threads
    if n_threads is None and cpu_quota() < math.inf:
        n_threads = n_cores()  # OpenVINO counts the cores alone, and would be throttled in each of the quota's periods
    if n_threads is not None:
        properties["INFERENCE_NUM_THREADS"] = n_threads
    if options.precision is not None:
        properties["INFERENCE_PRECISION_HINT"] = options.precision
    if options.kv_precision is not None:
        properties["KV_CACHE_PRECISION"] = options.kv_precision
    return properties


def _options(spec: ModelSpec) -> Options:
    given: dict[str, Any] = dict(spec.options)
    known = attrs.fields_dict(Options)
    for name, value in given.items():
        if name not in known:
            raise LoadFailed(f"the openvino backend has no option {name}, only {', '.join(known)}")
        _check_choice(name, value)
    given["prefix_cache"] = given.get("prefix_cache", "on") == "on" and spec.keeps_prefixes
    if spec.options.get("prefix_cache") == "on" and not spec.keeps_prefixes:
        raise LoadFailed("--no-prefix-cache and --backend-option prefix_cache=on say opposite things")
    return Options(**given)


def _check_choice(name: str, value: str) -> None:
    choices = {"precision": PRECISIONS, "kv_precision": tuple(KV_PRECISIONS), "prefix_cache": ("on", "off")}.get(name)
    if choices is not None and value not in choices:
        raise LoadFailed(f"the openvino backend's option {name} is one of {', '.join(choices)}, not {value}")


# --- what is known of a file ------------------------------------------------------------------------------------------


def facts_of(path: str, options: Options) -> Facts:
    """Read what a model is. Raises: LoadFailed for what OpenVINO does not read, with what to do."""
    if Path(path).is_dir():
        return _facts_of_folder(Path(path), options)
    try:
        header = read_model(path)
    except (NoGguf, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise LoadFailed(f"{path}: {reason}") from error
    _check_readable(path, header)
    return _facts_of_gguf(path, header)


def _check_readable(path: str, header: Header) -> None:
    if header.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise LoadFailed(f"{path}: OpenVINO reads GGUF files of {known}, and this is {header.architecture or 'of none'}; {OTHERWISE}")
    scaling = [name for name in ("rope.scaling.factor", "rope.scale_linear") if _scales(header, name)]
    scaling += ["rope.scaling.type"] if header.values.get(f"{header.architecture}.rope.scaling.type") in ("yarn", "longrope") else []
    scaling += [tensor.name for tensor in header.tensors if tensor.name.startswith(("rope_freqs", "rope_factors"))]
    if scaling:  # it would answer as if it were not there, and the worse the longer a prompt is
        raise LoadFailed(f"{path}: OpenVINO does not read how its positions are scaled ({scaling[0]}); {OTHERWISE}")
    matrices = {tensor.type for tensor in header.tensors if len(tensor.shape) > 1}
    if unread := matrices - set(TYPES) | matrices & {0}:
        known = ", ".join(name for number, (name, _, _) in TYPES.items() if number)
        which = "F32" if 0 in unread else f"of type {min(unread)} (ggml_type)"
        raise LoadFailed(f"{path}: OpenVINO reads weights in {known}, and some are {which}; quantise it anew, or {OTHERWISE}")


def _scales(header: Header, name: str) -> bool:
    return header.values.get(f"{header.architecture}.{name}", 1) not in (0, 1)


def _facts_of_gguf(path: str, header: Header) -> Facts:
    n_embd = header.number("embedding_length")
    n_heads = header.number("attention.head_count", 1)
    n_head_k = header.number("attention.key_length", n_embd // max(1, n_heads))
    n_head_v = header.number("attention.value_length", n_head_k)
    info = ModelInfo(
        name=str(header.values.get("general.name") or Path(path).stem),
        architecture=header.architecture,
        n_params=sum(tensor.n_elements for tensor in header.tensors),
        size_bytes=header.n_bytes,
        n_ctx_train=max(2, header.number("context_length", 4096)),
        n_embd=n_embd,
        quantization=_quantization(header),
        metadata={name: str(value) for name, value in header.values.items() if len(str(value)) < 1024},
    )
    n_vocab = next((tensor.shape[-1] for tensor in header.tensors if tensor.name == "token_embd.weight"), 0)
    n_numbers = header.number("block_count") * header.number("attention.head_count_kv", n_heads) * (n_head_k + n_head_v)
    return Facts(info, FileVocabulary(path), n_vocab, n_numbers)


def _quantization(header: Header) -> str:
    """The type that most weights have."""
    n_by_type: dict[int, int] = {}
    for tensor in header.tensors:
        n_by_type[tensor.type] = n_by_type.get(tensor.type, 0) + tensor.n_elements
    return TYPES[max(n_by_type, key=lambda number: n_by_type[number])][0] if n_by_type else ""


def _facts_of_folder(folder: Path, options: Options) -> Facts:
    """A model in OpenVINO's own format, with the config.json of Hugging Face beside it."""
    weights = folder / "openvino_model.bin"
    if not weights.is_file() or not (folder / "config.json").is_file():
        raise LoadFailed(f"{folder}: not a model in OpenVINO's format: openvino_model.xml, openvino_model.bin and config.json belong there")
    if options.vocabulary is None:
        raise LoadFailed(f"{folder}: name a GGUF file of the same model for its tokens: --backend-option vocabulary=FILE.gguf")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    n_heads = int(config.get("num_attention_heads") or 1)
    n_embd = int(config.get("hidden_size") or 0)
    n_head = int(config.get("head_dim") or n_embd // n_heads)
    info = ModelInfo(
        name=str(config.get("_name_or_path") or folder.name),
        architecture=str(config.get("model_type") or ""),
        n_params=0,
        size_bytes=weights.stat().st_size,
        n_ctx_train=max(2, int(config.get("max_position_embeddings") or 4096)),
        n_embd=n_embd,
    )
    n_numbers = int(config.get("num_hidden_layers") or 0) * int(config.get("num_key_value_heads") or n_heads) * 2 * n_head
    return Facts(info, FileVocabulary(options.vocabulary), int(config.get("vocab_size") or 0), n_numbers)


# --- how many cells ---------------------------------------------------------------------------------------------------


def _n_cells(spec: ModelSpec, facts: Facts, options: Options) -> int:
    if spec.n_cells is not None:
        return spec.n_cells
    n_that_fit = free_memory_bytes() // 4 // max(1, _cells_bytes(facts, options, 1))
    return max(BLOCK, min(n_that_fit, N_CONTEXTS_MAX * facts.info.n_ctx_train))


def _cells_bytes(facts: Facts, options: Options, n_cells: int) -> int:
    n_bytes = KV_PRECISIONS[options.kv_precision or "u8"]
    scales = 1.25 if n_bytes <= 1 else 1.0  # the scales of quantised numbers lie beside them
    return int(facts.n_numbers_cell * n_bytes * scales) * n_cells


def reason_of(error: Exception) -> str:
    """What OpenVINO complains of, without the places in its source."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if line and not line.startswith(("Exception from", "Check '")) and "/src/" not in line]
    return " ".join(told)[:300] or " ".join(lines)[:300] or type(error).__name__
