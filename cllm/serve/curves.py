"""Measured curves on disk, so that a model is measured once on a machine: one file each, found by all that a curve depends on.

Beside each may stand another one, which tells how the model's cells lay when it was last served.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import attrs
import msgspec
import structlog

from cllm.backend import KvLayout, ModelSpec, StepModel
from cllm.engine.cost.curve import Curve
from cllm.registry import list_backends
from cllm.threadtimes import cpu_share

log = structlog.get_logger("cllm.load")

FORMAT: Final = 8  # grows when what is measured, or how, changes
N_BYTES_MAX: Final = 1 << 20  # a larger file is none of ours

Key: TypeAlias = dict[str, Any]  # plain values, as JSON has them
T = TypeVar("T")


_NO_MATTER: Final = frozenset({"path", "keeps_prefixes"})  # to what a step takes


def key_of(model: StepModel, spec: ModelSpec, backend: str) -> Key:
    """Return all that the curve of a loaded model depends on: the model's shape, what computes it, how, and on what."""
    info = model.info
    settings = {name: str(value) for name, value in attrs.asdict(spec, recurse=False).items() if name not in _NO_MATTER}
    # Adapters cost by their size, wherever they are and however strongly they count: another version of one is no model to measure anew.
    settings["loras"] = str(tuple(map(_size, [lora.path for lora in spec.loras])))
    versions = sorted(f"{one.distribution} {one.version}" for one in list_backends() if one.name == backend)
    return {
        "format": FORMAT,
        "model": [info.architecture, info.n_params, info.size_bytes, info.n_embd, info.quantization, model.vocabulary.n_tokens],
        "memory": [model.n_cells.bit_length(), model.n_slots, model.n_rows_max, model.capabilities.kv_layout.value],
        "backend": [backend, *versions, *_library_versions(), info.build],
        "settings": settings,
        "machine": [platform.machine(), _cpu(), cpu_share()],
    }


def _size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:  # gone since it was loaded
        return 0


def read(folder: Path | None, key: Key) -> Curve | None:
    """Return the curve that was kept for `key`; None when there is none, or the file is not what we wrote, or nothing can be kept."""
    return _read(_path(folder, key), key, lambda kept: Curve(**kept["curve"]))


def write(folder: Path | None, key: Key, curve: Curve) -> None:
    """Keep `curve` for `key`. A folder that cannot be written to costs the next start its time, and nothing else."""
    _write(_path(folder, key), {"key": key, "curve": attrs.asdict(curve)})


def read_layout(folder: Path | None, key: Key) -> KvLayout | None:
    """Return how the cells of the model with this `key` lay last; None when that is not known."""
    return _read(_layout_path(folder, key), key, lambda kept: KvLayout(kept["layout"]))


def write_layout(folder: Path | None, key: Key, layout: KvLayout) -> None:
    """Keep how the cells lie, for the next start. A folder that cannot be written to is no failure."""
    _write(_layout_path(folder, key), {"key": key, "layout": layout.value})


def default_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return where programs keep what they can make again; None for a user without a home directory."""
    try:
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "cllm" / "calibration"
        return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cllm" / "calibration"
    except RuntimeError:
        return None


def _read(path: Path | None, key: Key, value_of: Callable[[dict[str, Any]], T]) -> T | None:
    if path is None:
        return None
    try:
        if path.stat().st_size > N_BYTES_MAX:
            return None
        kept = msgspec.json.decode(path.read_bytes())
        if not isinstance(kept, dict) or kept.get("key") != key:
            return None
        return value_of(kept)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.debug("calibration.ignored", file=str(path), why=f"{type(error).__name__}: {error}")
        return None


def _write(path: Path | None, kept: dict[str, Any]) -> None:
    if path is None:
        log.warning("calibration.not_kept", why="this user has no home directory; --calibration-dir names another folder")
        return
    content = msgspec.json.format(msgspec.json.encode(kept), indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.replace(file.name, path)
            except OSError:  # a full disk, which half a file would keep full
                os.unlink(file.name)
                raise
    except OSError as error:
        log.warning("calibration.not_kept", folder=str(path.parent), why=str(error))


def _layout_path(folder: Path | None, key: Key) -> Path | None:
    path = _path(folder, key)
    return path and path.with_suffix(".layout.json")


def _path(folder: Path | None, key: Key) -> Path | None:
    return folder and folder / f"{hashlib.sha256(msgspec.json.encode(key, order='sorted')).hexdigest()[:24]}.json"


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
