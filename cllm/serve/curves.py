"""Measured curves on disk, so that a model is measured once on a machine: one file each, found by all that a curve depends on."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

import attrs
import msgspec
import structlog

from cllm.backend import ModelSpec, StepModel
from cllm.engine.curve import Curve
from cllm.registry import list_backends

log = structlog.get_logger("cllm.load")

FORMAT: Final = 2  # grows when what is measured, or how, changes
N_BYTES_MAX: Final = 1 << 20  # a larger file is none of ours

Key: TypeAlias = dict[str, Any]  # plain values, as JSON has them


def key_of(model: StepModel, spec: ModelSpec, backend: str) -> Key:
    """Return all that the curve of a loaded model depends on: the model's shape, what computes it, how, and on what."""
    info = model.info
    settings = {name: str(value) for name, value in attrs.asdict(spec, recurse=False).items() if name != "path"}
    versions = sorted(f"{one.distribution} {one.version}" for one in list_backends() if one.name == backend)
    return {
        "format": FORMAT,
        "model": [info.architecture, info.n_params, info.size_bytes, info.n_embd, info.quantization, model.vocabulary.n_tokens],
        "memory": [model.n_cells, model.n_slots, model.n_rows_max, model.capabilities.kv_layout.value],
        "backend": [backend, *versions, *_library_versions()],
        "settings": settings,
        "machine": [platform.machine(), _cpu(), _n_cpus()],
    }


def read(folder: Path, key: Key) -> Curve | None:
    """Return the curve that was kept for `key`; None when there is none, or the file is not what we wrote."""
    path = _path(folder, key)
    try:
        if path.stat().st_size > N_BYTES_MAX:
            return None
        kept = msgspec.json.decode(path.read_bytes())
        if not isinstance(kept, dict) or kept.get("key") != key:
            return None
        return Curve(**kept["curve"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.debug("calibration.ignored", file=str(path), why=f"{type(error).__name__}: {error}")
        return None


def write(folder: Path, key: Key, curve: Curve) -> None:
    """Keep `curve` for `key`. A folder that cannot be written to costs the next start its time, and nothing else."""
    content = msgspec.json.format(msgspec.json.encode({"key": key, "curve": attrs.asdict(curve)}), indent=1)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".new-", delete=False) as file:
            file.write(content)
        os.replace(file.name, _path(folder, key))
    except OSError as error:
        log.warning("calibration.not_kept", folder=str(folder), why=str(error))


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return where programs keep what they can make again."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "cllm" / "calibration"
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cllm" / "calibration"


def _path(folder: Path, key: Key) -> Path:
    return folder / f"{hashlib.sha256(msgspec.json.encode(key, order='sorted')).hexdigest()[:24]}.json"


def _library_versions() -> list[str]:
    """What computes underneath a backend that is built in."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return [f"llama-cpp-python {version('llama-cpp-python')}"]
    except PackageNotFoundError:
        return []


def _cpu() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def _n_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
