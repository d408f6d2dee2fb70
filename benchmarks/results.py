"""Results as files: one JSON a run in `benchmarks/results/`, with the machine, the versions and the settings it was measured with.

    {"kind": "ladder" | "stack" | "kills" | "promises" | "passes" | "peers" | "verify", "name": ..., "date": ...,
     "machine": {...}, "settings": {...}, "data": {...}}

`data` of a ladder is `{"rungs": [{"concurrency": 8, "stages": [STAGE, ...]}]}`, of a stack `{"rungs": [{"streams": 64, "stages":
[STAGE, ...]}]}`, with the stages from the floor up:

    {"number": 0, "name": "native", "tokens_per_s": [a figure for each turn], "ratios": [to the floor of the same turn, ...],
     "us_per_token": over the stage below, "us_per_step": likewise, "beside": "the stage that it is over, where that is not the one below"}

What `data` of kills is, `benchmarks.kills.data_of` says, what those of promises, passes, peers and verify are,
`benchmarks.promises`, `benchmarks.passes`, `benchmarks.peers` and `benchmarks.verify`. Further members are kept and not shown.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import re
import subprocess
from pathlib import Path
from typing import Any, Final

from cllm.bench import machine as of_bench

FOLDER: Final = Path(__file__).parent / "results"
_LIST: Final = re.compile(r"\[[^][{}]*\]")  # of numbers or texts: on one line each, or a diff of two runs has thousands
_GIT: Final = ("git", "-C", str(Path(__file__).parent))
_MEASURED: Final = ("../cllm", "../backends", "../plugins", "./*.py")
LIBRARIES: Final = (
    "cllm",
    "llama-cpp-python",
    "numpy",
    "trio",
    "quart",
    "quart-trio",
    "hypercorn",
    "h11",
    "msgspec",
    "openai",
    "openvino",
    "openvino-genai",
)


def write(kind: str, name: str, settings: dict[str, Any], data: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Keep one run; a later one of the same kind and name takes its place."""
    run = {
        "kind": kind,
        "name": name,
        "date": today(),
        "machine": machine(),
        "settings": settings,
        "data": data,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(kind, name, folder)
    unfinished = path.with_suffix(".part")  # who is killed while it writes leaves the run before
    unfinished.write_text(_LIST.sub(lambda found: " ".join(found[0].split()), json.dumps(_rounded(run), indent=1)) + "\n", "utf-8")
    unfinished.replace(path)
    return path


def read_all(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """All runs that are kept, by kind and name; what else lies in the folder, as of `cllm bench`, is none of them."""
    pages = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    return [page for page in pages if isinstance(page, dict) and {"kind", "name", "settings", "data"} <= set(page)]


def read(kind: str, name: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """One run; None when there is none of that name."""
    path = _path(kind, name, folder)
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def remove(kind: str, name: str, folder: Path = FOLDER) -> None:
    """Forget one run, if there is one of that name."""
    _path(kind, name, folder).unlink(missing_ok=True)


def _path(kind: str, name: str, folder: Path) -> Path:
    return folder / f"{kind}-{name}.json"


def today() -> str:
    """The date of a run."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def machine() -> dict[str, Any]:
    """The machine, and what is measured on it."""
    return {
        **of_bench.machine(),
        "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
        "revision": revision(),
    }


def model_facts(path: Path) -> dict[str, Any]:
    """A model file as results name it: without its folder."""
    return {"file": path.name, "size_bytes": path.stat().st_size}


def revision() -> str:
    """The commit that is measured, as it is when this is first asked. A plus sign says that what is measured is not that alone: files were
    changed then, or are another commit's now, and servers that were started in the meantime have some of these.
    """
    commit, was_changed = _at_first()
    return commit + ("+" if was_changed or _is_changed(commit) else "")


@functools.cache
def _at_first() -> tuple[str, bool]:
    try:
        commit = subprocess.run([*_GIT, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown", False
    return commit, _is_changed(commit)


def _is_changed(commit: str) -> bool:
    """Whether a file that is measured differs from the commit's."""
    if commit == "unknown":
        return False
    return subprocess.run([*_GIT, "diff", "--quiet", commit, "--", *_MEASURED], capture_output=True).returncode == 1


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _rounded(value: Any) -> Any:
    """Floats to six significant digits: more would only make files long."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {str(key): _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value
