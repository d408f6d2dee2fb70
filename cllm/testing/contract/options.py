"""The suite's command line, and what it means: which backend, which model, how near is equal."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Final, cast

import pytest

from cllm import registry
from cllm.backend import Backend, FlashAttention, KvLayout, ModelSpec
from cllm.errors import BackendUnavailable
from cllm.testing.tiny import ARCHITECTURES, make_tiny_gguf

TINY: Final = "tiny:"
N_CELLS: Final = 512
N_LIVE: Final = 4
N_ROWS_MAX: Final = 64
N_ROWS_PHYSICAL: Final = 32  # less than N_ROWS_MAX, so that a step may fall into parts


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cllm", "the contract of cLLM's backends")
    group.addoption("--backend", metavar="NAME", help="the backend: the name of its entry point, or module:callable")
    group.addoption("--model", metavar="FILE", help="the model to load, or tiny:ARCHITECTURE to have one made")
    group.addoption("--backend-option", metavar="NAME=VALUE", action="append", default=[], help="the backend's own setting; repeatable")
    group.addoption("--kv", choices=[layout.value for layout in KvLayout], default="auto", help="the memory layout to ask for")
    group.addoption("--tolerance", type=float, default=0.01, help="of the logits' standard deviation; 0.01")


def pytest_report_header(config: pytest.Config) -> str:
    return f"backend: {config.getoption('backend')}, model: {model_name(config) or 'none'}, layout: {config.getoption('kv')}"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say in one line what is wrong with the command, before every test says it."""
    backend_of(session.config)
    options_of(session.config)
    name = model_name(session.config)
    if name.startswith(TINY):
        _check_tiny(name.removeprefix(TINY))


def backend_of(config: pytest.Config) -> Backend:
    """Return the backend under test."""
    name = config.getoption("backend")
    if not name:
        raise pytest.UsageError("--backend NAME is missing: which backend is to be tried?")
    if ":" in name:
        return _make(name)
    try:
        return registry.load_backend(name)
    except BackendUnavailable as error:
        raise pytest.UsageError(str(error)) from error


def factory_of(config: pytest.Config) -> str:
    """Return the entry point's value, by which another process finds the backend."""
    name: str = config.getoption("backend")
    return name if ":" in name else registry.factory_of(name)


def _make(factory: str) -> Backend:
    try:
        make = cast(Callable[[], Backend], EntryPoint("", factory, registry.GROUP).load())
    except (ImportError, AttributeError) as error:
        raise pytest.UsageError(f"--backend {factory}: {error}") from error
    return make()


def model_name(config: pytest.Config) -> str:
    """Return what `--model` says or means; empty for a backend that is given none."""
    default = f"{TINY}qwen3" if str(config.getoption("backend")).startswith("llama-") else ""
    return str(config.getoption("model") or default)


def options_of(config: pytest.Config) -> dict[str, str]:
    """Return the backend's own settings."""
    pairs = [text.partition("=") for text in config.getoption("backend_option")]
    for name, equals, _ in pairs:
        if not equals:
            raise pytest.UsageError(f"--backend-option takes NAME=VALUE, not {name}")
    return {name: value for name, _, value in pairs}


def spec_of(config: pytest.Config, folder: Path) -> ModelSpec:
    """Return what the suite loads; a tiny model is made in `folder`."""
    name = model_name(config)
    return ModelSpec(
        path=_path(name, folder),
        n_threads=1 if name.startswith(TINY) else None,  # a tiny model's step is over before a second thread is awake
        n_cells=N_CELLS,
        n_live=N_LIVE,
        n_rows_max=N_ROWS_MAX,
        n_rows_physical=N_ROWS_PHYSICAL,
        kv_layout=KvLayout(config.getoption("kv")),
        cache_type_k="f32",
        cache_type_v="f32",
        flash_attention=FlashAttention.OFF,
        options=options_of(config),
    )


def _check_tiny(architecture: str) -> None:
    if architecture not in ARCHITECTURES:
        raise pytest.UsageError(f"no tiny model of architecture {architecture} can be made, only of {', '.join(ARCHITECTURES)}")
    if find_spec("gguf") is None:
        raise pytest.UsageError("a tiny model cannot be made without the package gguf; install it, or give --model FILE")


def _path(name: str, folder: Path) -> str:
    if not name.startswith(TINY):
        return name
    architecture = name.removeprefix(TINY)
    path = folder / f"{architecture}.gguf"
    make_tiny_gguf(path, architecture)
    return str(path)
