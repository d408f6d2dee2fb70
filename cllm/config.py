"""The settings: one class that gives the flags, the `CLLM_*` variables and the TOML keys, and says what is wrong with them.

`cllm.sources` reads those. Nothing here imports NumPy or a backend, so that `cllm --help` stays quick;
`cllm.serve.spec` turns settings into what a backend is asked for.
"""

from __future__ import annotations

import difflib
import functools
import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args, get_type_hints

import attrs
from cyclopts import Group, Parameter

from cllm.checks import (
    Check,
    at_home,
    at_least,
    at_most,
    between,
    check_each,
    has_home,
    known_aliases,
    lora_file,
    lora_scale,
    model_file,
    name_value,
    not_empty,
    not_negative,
    origin,
    parsable_keys,
    positive,
    readable_file,
    shares,
    split_words,
)
from cllm.errors import SettingsError
from cllm.hub import reference_of
from cllm.keys import ApiKey, named_keys

PREFIX: Final = "CLLM_"
N_SLOTS_MAX: Final = 256  # llama.cpp refuses more sequences in one context
_OTHER_VARIABLES = frozenset({"CLLM_WHEEL_CACHE", "CLLM_MODEL_CACHE"})  # read by tools/ and benchmarks/, not by the server

# The words of `cllm.backend`'s enumerations, which cannot be imported here: that module needs NumPy. A test holds them together.
KvLayout: TypeAlias = Literal["auto", "unified", "streams"]
FlashAttention: TypeAlias = Literal["auto", "on", "off"]
SplitMode: TypeAlias = Literal["none", "layer", "row"]
Profile: TypeAlias = Literal["openai", "llama", "model"]
Calibrate: TypeAlias = Literal["auto", "off", "again"]
ToolFormat: TypeAlias = Literal[
    "auto",
    "generic",
    "hermes",
    "qwen-coder",
    "glm",
    "llama",
    "mistral",
    "mistral-args",
    "deepseek",
    "deepseek-json",
    "deepseek-dsml",
    "phi",
    "granite",
    "cohere",
    "kimi",
    "lfm",
    "gemma",
    "seed",
    "minimax",
    "nemotron",
    "apriel",
    "functionary",
]
LogFormat: TypeAlias = Literal["console", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]
Pooling: TypeAlias = Literal["auto", "mean", "cls", "last", "rank"]
CacheType: TypeAlias = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
_UNQUANTISED = ("f32", "f16", "bf16")


# --- the settings -----------------------------------------------------------------------------------------------------


def _setting(default: Any, help: str, *checks: Check, kw_only: bool = True, repr: bool = True) -> Any:
    return attrs.field(default=default, validator=list(checks), kw_only=kw_only, repr=repr, metadata={"help": help})


def _path(default: Any, help: str, *checks: Check, kw_only: bool = True) -> Any:
    """A setting in which those who read settings are to call `at_home`. As a converter, it would hide the type from the command line."""
    return attrs.field(default=default, validator=list(checks), kw_only=kw_only, metadata={"help": help, "is_path": True})


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in text)  # which stand for bytes that are none


_nameable = check_each(_is_utf8, "is not UTF-8, and no answer could have it: {!r}")


def _section(title: str, sort_key: int) -> Parameter:
    return Parameter(group=Group(title, sort_key=sort_key))


def _short(*names: str) -> Parameter:
    """Return the other names of an option; they are those that llama-server's users know."""
    return Parameter(alias=names)


MODEL, MEMORY, SPEED = _section("Model", 1), _section("Memory", 2), _section("Speed", 3)
REQUESTS, NETWORK, OPERATION = _section("Requests", 4), _section("Network", 5), _section("Operation", 6)


@Parameter(name="*")
@attrs.frozen
class Settings:
    """All that an operator can set. None means that the server, or the backend, decides."""

    model: Annotated[str | None, MODEL, _short("-m")] = _path(
        None,
        "the GGUF file to serve, or one of the hub's: USER/REPO:Q4_K_M (default: a small demo model that comes with cLLM)",
        not_empty,
        model_file,
        kw_only=False,
    )
    models: Annotated[tuple[str, ...], MODEL] = _setting(
        (), "further models to serve, by their names; repeatable; in a TOML file also tables with settings of their own", kw_only=False
    )
    alias: Annotated[tuple[str, ...], MODEL] = _setting(
        (),
        "what clients call the model in place of its file's name, or MODEL=NAME for one of several; repeatable, and answers say the first",
        not_empty,
    )
    backend: Annotated[str, MODEL] = _setting("auto", "what computes the model; `cllm backends` lists them", not_empty)
    backend_option: Annotated[tuple[str, ...], MODEL] = _setting((), "NAME=VALUE for the backend; repeatable", name_value)
    isolate: Annotated[bool, MODEL] = _setting(
        False, "compute in a process of its own: when it dies, another one goes on with every answer where it was"
    )
    lora: Annotated[tuple[str, ...], MODEL] = _path((), "a LoRA adapter, PATH or PATH:SCALE; repeatable", lora_file, lora_scale)
    lora_dir: Annotated[str | None, MODEL] = _path(
        None,
        "a folder whose LoRA adapters may be loaded with POST /v1/load_lora_adapter, where --enable-admin is given",
        not_empty,
        has_home,
    )
    mmap: Annotated[bool, MODEL] = _setting(True, "map the file into memory instead of reading it, where the device bears it")
    mlock: Annotated[bool, MODEL] = _setting(False, "keep the model from being swapped out")
    chat_template_file: Annotated[str | None, MODEL] = _path(None, "a Jinja chat template in place of the model's own", readable_file)
    tool_format: Annotated[ToolFormat, MODEL] = _setting(
        "auto", "how the model writes tool calls (default: as its chat template says); generic: tell it in a system message"
    )
    gpu_layers: Annotated[int | None, MODEL, _short("-ngl", "--n-gpu-layers")] = _setting(
        None, "layers on the GPU, of llama-gpu (default: all that fit); llama-cpu has none there", at_least(0)
    )
    split_mode: Annotated[SplitMode, MODEL, _short("-sm")] = _setting(
        "layer", "how the model is laid out over several GPUs; row: only with a build for SYCL"
    )
    main_gpu: Annotated[int, MODEL, _short("-mg")] = _setting(0, "the one GPU that is used with --split-mode none", at_least(0))
    tensor_split: Annotated[str | None, MODEL, _short("-ts")] = _setting(None, "shares of the GPUs, as in 3,1", shares)

    embeddings: Annotated[bool, MODEL] = _setting(False, "also serve /v1/embeddings and /v1/rerank, from the same model")
    embedding_model: Annotated[str | None, MODEL] = _path(
        None, "the GGUF file of another model that serves these beside the first", not_empty, model_file
    )
    embedding_alias: Annotated[tuple[str, ...], MODEL] = _setting(
        (), "what clients call it in place of its file's name; repeatable", not_empty, _nameable
    )
    pooling: Annotated[Pooling, MODEL] = _setting("auto", "how an embedding is made of its tokens' (auto: as the model says, else mean)")

    ctx_size: Annotated[int | None, MEMORY, _short("-c")] = _setting(
        None,
        "cells (tokens) of KV cache, shared by all sequences (default: what a quarter of the free memory holds, at most eight contexts)",
        at_least(1),
    )
    ctx_max: Annotated[int | None, MEMORY] = _setting(
        None,
        "tokens of prompt and answer that one request may have (default: the model's own context); not for models behind other servers",
        at_least(2),
    )
    parallel: Annotated[int | None, MEMORY, _short("-np")] = _setting(
        None,
        "sequences that run at once (default: as many as keep --itl-max-ms, at most 64; of a model that schedules itself, all its slots)",
        between(1, N_SLOTS_MAX),
    )
    kv: Annotated[KvLayout, MEMORY] = _setting(
        "auto",
        "one pool of cells for all sequences, or an equal part for each (auto: a pool, but parts while nothing is shared, where a "
        "calibration found these faster; with --isolate the pool stays)",
    )
    models_memory_mb: Annotated[int | None, MEMORY] = _setting(
        None, "memory of the models that are loaded at a time, MiB: the least recently used makes room (default: all stay)", at_least(1)
    )
    prefix_cache: Annotated[bool, MEMORY] = _setting(True, "compute equal beginnings of prompts once, and keep ended sequences' cells")
    host_cache_mb: Annotated[int | None, MEMORY] = _setting(
        None,
        "memory for cells that had to leave a model's KV cache, MiB for each model: restored instead of computed again; 0, or without a "
        "prefix cache: none (default: a quarter of what is free once the model is loaded, at most 2048)",
        at_least(0),
    )
    cache_dir: Annotated[str | None, MEMORY] = _path(
        None,
        "a folder for what leaves that memory, and for what is cached while nobody asks: prefixes outlive the server (default: none)",
        not_empty,
        has_home,
    )
    cache_dir_mb: Annotated[int, MEMORY] = _setting(8192, "size limit of that folder, MiB", at_least(1))
    cache_type_k: Annotated[CacheType, MEMORY, _short("-ctk")] = _setting("f16", "number format of the cached keys")
    cache_type_v: Annotated[CacheType, MEMORY, _short("-ctv")] = _setting("f16", "number format of the cached values")
    flash_attn: Annotated[FlashAttention, MEMORY, _short("-fa")] = _setting("auto", "attention that does not write out its scores")

    threads: Annotated[int | None, SPEED, _short("-t")] = _setting(
        None, "threads of a step with few rows (default: the backend's choice)", between(1, 1024)
    )
    threads_batch: Annotated[int | None, SPEED, _short("-tb")] = _setting(
        None, "threads of a step with many rows (default: as --threads)", between(1, 1024)
    )
    batch_size: Annotated[int, SPEED, _short("-b")] = _setting(2048, "rows (tokens to compute) of one step at most", between(1, 65536))
    ubatch_size: Annotated[int, SPEED, _short("-ub")] = _setting(
        512, "rows computed at a time within a step; of a model with a sliding window, of one step at most", between(1, 65536)
    )
    calibrate: Annotated[Calibrate, SPEED] = _setting(
        "auto",
        "measure what steps cost: once for each model, machine and its settings here, never (it is learned while serving), or now again",
    )
    calibration_dir: Annotated[str | None, SPEED] = _path(
        None, "folder for what was measured (default: cllm/calibration in the user's cache)", not_empty, has_home
    )
    row_budget: Annotated[int | None, SPEED] = _setting(
        None, "rows of a step, beyond which prompts are computed in pieces (default: as the cost model says)", between(1, 65536)
    )
    itl_max_ms: Annotated[float | None, SPEED] = _setting(
        None,
        "time between tokens to aim at: it bounds how many sequences run at once, and how long steps with prompts take, unless their rows "
        "would be too dear then (default: 250, or with --parallel none)",
        positive,
    )
    itl_target_ms: Annotated[float | None, SPEED] = _setting(
        None, "time that a step beside running answers may take (default: mostly 2.4 times what it takes without prompts)", positive
    )

    embedding_ctx_size: Annotated[int | None, MEMORY] = _setting(
        None,
        "tokens of an input to embed at most, for which cells are kept (default: 2048, or 8192 for a model or a process of its own, as "
        "memory allows; where tokens see those after them, as BERT's do, at most --batch-size, as memory allows)",
        at_least(1),
    )
    embedding_slice_ms: Annotated[int, SPEED] = _setting(
        100, "time that a step of embeddings aims at, since answers wait for its end", between(1, 60_000)
    )

    queue_size: Annotated[int, REQUESTS] = _setting(
        1024,
        "completions that may wait; then 503, but only at twice it for a key with less than its part, and for what is more urgent",
        between(1, 1_000_000),
    )
    queue_wait_s: Annotated[float, REQUESTS] = _setting(
        300.0, "time that a request would wait, by the measured rate, above which it is answered with 503", positive
    )
    queue_patience_s: Annotated[float, REQUESTS] = _setting(
        2.5, "time in the queue after which a request lets later ones of its key go first; 0: strictly in turn", not_negative
    )
    key_cap: Annotated[int | None, REQUESTS] = _setting(
        None,
        "completions that each key may have under way, where keys are given; more are answered with 429 (default: no limit)",
        at_least(1),
    )
    timeout_s: Annotated[float | None, REQUESTS] = _setting(None, "time limit of a request that names none (default: none)", positive)
    load_wait_s: Annotated[float, REQUESTS] = _setting(
        60.0, "time that a request waits for its model, where that must be loaded first; then it is answered with 503", not_negative
    )
    grammar_timeout_s: Annotated[float, REQUESTS] = _setting(
        2.0,
        "time to compile a schema or a grammar, the wait for its turn included: 400 if it takes longer, 503 if its turn does not come",
        positive,
    )
    sampling_defaults: Annotated[Profile, REQUESTS] = _setting("openai", "whose defaults hold for parameters that a request leaves out")
    max_body_mb: Annotated[float, REQUESTS] = _setting(16.0, "size limit of a request's body, MiB", positive, at_most(1 << 20))
    stream_buffer_kb: Annotated[int, REQUESTS] = _setting(
        1024, "unread KiB after which a stream is ended, so that no other waits", at_least(1)
    )
    sse_ping_s: Annotated[float, REQUESTS] = _setting(
        15.0, "silence after which a stream of events carries a sign of life; 0: never", not_negative
    )
    responses_kept: Annotated[int, REQUESTS] = _setting(
        1024, "responses of POST /v1/responses that are kept to go on from; 0: none", between(0, 1_000_000)
    )
    responses_kept_mb: Annotated[int, REQUESTS] = _setting(64, "room for them, MiB", at_least(1))
    responses_kept_s: Annotated[float, REQUESTS] = _setting(86_400.0, "time after which one is forgotten", positive)

    host: Annotated[str, NETWORK] = _setting("127.0.0.1", "address to listen on; `::` is all of this machine, of both kinds", not_empty)
    port: Annotated[int, NETWORK] = _setting(8080, "port to listen on; 0 takes a free one", between(0, 65535))
    api_key: Annotated[tuple[str, ...], NETWORK] = _setting(
        (), "KEY [name=WORD] [weight=N] [cap=N] [priority=N]: a key, one of which clients must send; repeatable", parsable_keys, repr=False
    )
    api_key_file: Annotated[str | None, NETWORK] = _path(None, "a file with one key a line, in the same form", readable_file)
    ssl_certfile: Annotated[str | None, NETWORK] = _path(None, "certificate chain (PEM); HTTPS instead of HTTP", readable_file)
    ssl_keyfile: Annotated[str | None, NETWORK] = _path(None, "the certificate's private key (PEM)", readable_file)
    cors_origin: Annotated[tuple[str, ...], NETWORK] = _setting(
        (), "a web origin whose pages may call the server, or *; repeatable", origin
    )
    header_timeout_s: Annotated[float, NETWORK] = _setting(5.0, "time for a client to send its headers", positive)
    body_timeout_s: Annotated[float, NETWORK] = _setting(30.0, "time for a client to send its body", positive)
    write_timeout_s: Annotated[float, NETWORK] = _setting(30.0, "time for a client to take what is sent", positive)
    keep_alive_s: Annotated[float, NETWORK] = _setting(75.0, "idle time after which a connection is closed", positive)

    config: Annotated[str | None, OPERATION] = _path(None, "a TOML file with any of these settings", readable_file)
    grace_s: Annotated[float, OPERATION] = _setting(30.0, "time for running answers to end after SIGTERM", not_negative)
    watchdog_s: Annotated[float, OPERATION] = _setting(
        120.0,
        "a step that takes longer makes /health answer 503, and ends the process of --isolate, which is replaced; a load there that says"
        " nothing for so long, or for 600 s if that is longer, has failed",
        positive,
    )
    log_format: Annotated[LogFormat, OPERATION] = _setting("console", "for eyes or for machines")
    log_level: Annotated[LogLevel, OPERATION] = _setting("info", "the least that is logged")
    log_prompts: Annotated[bool, OPERATION] = _setting(False, "also log what is asked and answered")
    metrics_aliases: Annotated[str | None, OPERATION] = _setting(
        None,
        "also tell numbers of /metrics by the names of vllm, llamacpp, or both with a comma between, as boards ask for",
        known_aliases,
    )
    enable_benchmark: Annotated[bool, OPERATION] = _setting(False, "let POST /benchmark put load on the server")
    enable_admin: Annotated[bool, OPERATION] = _setting(
        False, "let clients load and unload models, with POST /models/load and /models/unload, and LoRA adapters"
    )

    def __attrs_post_init__(self) -> None:
        api_keys(self)  # a key file that cannot be read is a mistake to tell now, not when the server starts
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            given = "ssl_certfile" if self.ssl_certfile else "ssl_keyfile"
            raise SettingsError("--ssl-certfile and --ssl-keyfile go together", given)
        if self.cache_type_v not in _UNQUANTISED and self.flash_attn == "off":
            raise SettingsError(f"{self.cache_type_v} needs flash attention, and --flash-attn is off", "cache_type_v")
        if self.parallel is not None and self.parallel > self.batch_size:
            raise SettingsError(
                f"each of {self.parallel} sequences needs a row of a step, and --batch-size is {self.batch_size}", "parallel"
            )
        settings_of_models(self)


# --- several models ---------------------------------------------------------------------------------------------------

DEMO_NAME: Final = "cllm-demo"
GGUF: Final = ".gguf"
# Of the first: the others do not share them.
_OF_ONE_MODEL = ("alias", "lora", "chat_template_file", "embedding_model", "embedding_alias")
_OF_THE_PROCESS = ("models", "models_memory_mb", "lora_dir")


def name_of_model(model: str | None) -> str:
    """Return what a model is called that was given no other name."""
    if model is None:
        return DEMO_NAME
    if reference := reference_of(model):
        return str(reference)
    return _in_utf8(model) if "://" in model else name_of_file(model)


def name_of_file(path: str) -> str:
    """Return what a file's model is called."""
    name = Path(path).name
    return _in_utf8(name[: -len(GGUF)] if name.lower().endswith(GGUF) else name)  # a dot elsewhere is of a version: Qwen3-0.6B


def _in_utf8(name: str) -> str:
    """Escape bytes that are no UTF-8: no answer could have them."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def names_of(settings: Settings) -> tuple[str, ...]:
    """Return the names by which a request may ask for the one model of `settings`."""
    return settings.alias or (name_of_model(settings.model),)


def aliases_of(settings: Settings) -> tuple[str, ...]:
    """Return by whose names numbers are told as well."""
    return () if settings.metrics_aliases is None else split_words(settings.metrics_aliases)


def embedding_names_of(settings: Settings) -> tuple[str, ...]:
    """Return the names by which a request may ask for vectors beside those of the model itself."""
    own = () if settings.embedding_model is None else (name_of_model(settings.embedding_model),)
    return settings.embedding_alias or own


def settings_of_models(settings: Settings) -> tuple[Settings, ...]:
    """Return the settings of each model, of which the first is meant by a request that names none.

    Raises: SettingsError for a model that cannot be, and for a name that two have.
    """
    if not settings.models:
        alias = tuple(_of_one(settings.model, word) for word in settings.alias)
        _nameable(settings, attrs.fields(Settings).alias, alias)  # only now: what stands before the name may be a file's
        return (settings if alias == settings.alias else attrs.evolve(settings, alias=alias),)
    shared = attrs.evolve(settings, models=(), **{name: _default_of(name) for name in _OF_ONE_MODEL})
    first = () if settings.model is None else (attrs.evolve(settings, models=(), alias=()),)
    given = {name: getattr(settings, name) for name in _OF_ONE_MODEL if name != "alias"} if settings.model is None else {}
    further = [_settings_of(shared, word, {} if i else given) for i, word in enumerate(settings.models)]
    each = _with_aliases(_with_template_of_first((*first, *further)), settings.alias)
    names = [name for one in each for name in names_of(one)]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise SettingsError(f"two models are called {min(twice)}: give one another name with --alias MODEL=NAME", "models")
    return each


def _with_template_of_first(each: tuple[Settings, ...]) -> tuple[Settings, ...]:
    """What is the first model's own file once more, as with other adapters, has its template, too."""
    model, template = each[0].model, each[0].chat_template_file
    has_none = [one.model == model and one.chat_template_file is None for one in each]
    return tuple(attrs.evolve(each[i], chat_template_file=template) if none else each[i] for i, none in enumerate(has_none))


def _default_of(name: str) -> Any:
    return getattr(attrs.fields(Settings), name).default


def _settings_of(shared: Settings, word: str, given: dict[str, Any]) -> Settings:
    """The settings of a further model: a file or a reference, or an object with `model` and what is not shared, as JSON.

    `given` is what it has of what is not shared, unless it says otherwise.
    """
    own = given | (_read_table(word) if word.lstrip().startswith("{") else {"model": word})
    own = {name: at_home(value) if is_path(name) else value for name, value in own.items()}
    if "model" not in own:
        raise SettingsError("a table without model", "models")
    try:
        return attrs.evolve(shared, **own)
    except SettingsError as error:
        raise SettingsError(f"{own['model']}: {error}" if error.field != "model" else error.message, "models") from error


def _read_table(word: str) -> dict[str, Any]:
    import msgspec

    hints = get_type_hints(Settings)
    known = [f.name for f in attrs.fields(Settings) if f.name not in _OF_THE_PROCESS and _section_of(f.name) in (MODEL, MEMORY, SPEED)]
    try:
        table = msgspec.json.decode(word, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError) as error:  # the latter of bytes that are no UTF-8
        raise SettingsError(f"not an object: {error}", "models") from error
    own = {}
    for name, value in table.items():
        if name not in known:
            raise SettingsError(f"{name} is not a setting of one model{did_you_mean(name, known)}", "models")
        try:
            own[name] = msgspec.convert(value, hints[name])
        except msgspec.ValidationError as error:
            raise SettingsError(f"{name}: {error}", "models") from error
    return own


def is_path(name: str) -> bool:
    """Whether a setting names a file or a folder, in which `at_home` is to be called."""
    return "is_path" in getattr(attrs.fields(Settings), name).metadata


def _section_of(name: str) -> object:
    return get_args(get_type_hints(Settings, include_extras=True)[name])[1]


def _of_one(model: str | None, word: str) -> str:
    """The alias of a model that is alone, and may have been named in the way of several. It may have an equals sign in it, too."""
    of, _, name = word.partition("=")
    return name if name.strip() and at_home(of) in (model, name_of_model(model)) else word


def _with_aliases(each: tuple[Settings, ...], words: Sequence[str]) -> tuple[Settings, ...]:
    """Deal out the aliases: `MODEL=NAME` to the model so called, `NAME` to the first."""
    given: dict[int, list[str]] = {}
    for word in words:
        of, is_named, name = word.partition("=")
        places = [i for i, one in enumerate(each) if at_home(of) in (one.model, name_of_model(one.model))] if is_named else [0]
        if not places or (is_named and not name.strip()):
            raise SettingsError(f"must be NAME, or MODEL=NAME with one of the models, not {word}", "alias")
        given.setdefault(places[0], []).append(name if is_named else word)
    return tuple(attrs.evolve(one, alias=(*one.alias, *given.get(i, ()))) for i, one in enumerate(each))


# --- what follows from them -------------------------------------------------------------------------------------------


def api_keys(settings: Settings) -> tuple[ApiKey, ...]:
    """Return the keys given and those of the key file, where blank lines and lines that begin with # do not count.

    Raises: SettingsError.
    """
    return named_keys(_key_texts(settings))


def with_keys_read(settings: Settings) -> Settings:
    """Return `settings` without the key file, and with its keys: what serves must not depend on a file that may change, or go.

    Raises: SettingsError.
    """
    return attrs.evolve(settings, api_key=_key_texts(settings), api_key_file=None)


def _key_texts(settings: Settings) -> tuple[str, ...]:
    keys = settings.api_key
    if settings.api_key_file is not None:
        lines = tuple(line for line in _read_lines(settings.api_key_file) if line and not line.startswith("#"))
        if not lines:  # an empty file would open the server to everybody
            raise SettingsError(f"no key in {settings.api_key_file}", "api_key_file")
        parsable_keys(settings, attrs.fields(Settings).api_key_file, lines)
        keys += lines
    keys = tuple(dict.fromkeys(keys))
    field = "api_key_file" if settings.api_key_file else "api_key"
    if len({text.split(" ")[0] for text in keys}) < len(keys):
        raise SettingsError("a key is given twice, with other options", field)
    try:
        named_keys(keys)
    except ValueError as error:
        raise SettingsError(str(error), field) from None
    return keys


@functools.cache  # what is checked is what is served, and a pipe can be read but once
def _read_lines(path: str) -> tuple[str, ...]:
    try:
        return tuple([line.strip() for line in Path(path).read_text("utf-8").splitlines()])
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read {path}: {reason(error)}", "api_key_file") from error


DEFAULT_SETTINGS: Final = Settings()


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach `host`. A name that is not an address counts as reachable, `localhost` apart."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback  # as a socket for both kinds tells those of the older


def is_address(host: str) -> bool:
    """Say whether `host` is an IP address and no name."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True


def warnings(settings: Settings, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return what an operator should know and may still want, one line each."""
    lines = []
    if not is_loopback(settings.host) and not settings.api_key and settings.api_key_file is None:
        lines.append(f"listening on {settings.host} without --api-key: whoever reaches this machine can use the model")
    return lines + strange_variables(environ)


def strange_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return a line for each variable that looks like a setting and is none."""
    return [f"{name} is not a setting{did_you_mean(name, _variables())}" for name in sorted(_unknown_variables(environ))]


def variable(field: str) -> str:
    """Return the environment variable that sets a field."""
    return PREFIX + field.upper()


def _variables() -> list[str]:
    return [variable(field.name) for field in attrs.fields(Settings)]


def _unknown_variables(environ: Mapping[str, str]) -> set[str]:
    return {name for name in environ if name.startswith(PREFIX)} - set(_variables()) - _OTHER_VARIABLES


def did_you_mean(word: str, words: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
