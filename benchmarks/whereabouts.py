"""Where the time goes while a server streams: its steps by phase, and its Trio thread by layer and by function."""

from __future__ import annotations

import pstats
import statistics
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs
import numpy as np

from benchmarks.stages import Ran
from cllm.backend import Logits

N_FUNCTIONS: Final = 25  # as many are told
PARTS: Final = (  # of a file's path, the first that fits; what a built-in function takes counts for its caller
    ("engine", "/cllm/engine/"),
    ("text", "/cllm/text/"),
    ("loop and streams", "/cllm/serve/loop"),
    ("loop and streams", "/cllm/serve/steploop"),
    ("loop and streams", "/cllm/serve/streams"),
    ("loop and streams", "/cllm/serve/metrics"),
    ("http", "/cllm/serve/http/"),
    ("api", "/cllm/api/"),
    ("hypercorn", "/hypercorn/"),
    ("h11", "/h11/"),
    ("quart", "/quart"),
    ("trio", "/trio/"),
    ("trio", "/outcome/"),
)


# --- a step ------------------------------------------------------------------------------------------------------------


@attrs.define
class Phases:
    """What steps took in the model and in sampling, by the server's own metrics, and what passed between them."""

    port: int
    _model_ms: list[float] = attrs.field(factory=list)
    _sample_ms: list[float] = attrs.field(factory=list)
    _rest_ms: list[float] = attrs.field(factory=list)

    def watch(self, run: Callable[[], Ran]) -> Ran:
        """Run a pass, and note it."""
        before = self._read()
        ran = run()
        model_s, sample_s, n_steps = (now - then for now, then in zip(self._read(), before, strict=True))
        self._model_ms.append(1e3 * model_s / n_steps)
        self._sample_ms.append(1e3 * sample_s / n_steps)
        self._rest_ms.append(1e3 * (ran.wall_s - model_s - sample_s) / n_steps)
        return ran

    def page(self) -> dict[str, float]:
        """Medians over the passes, milliseconds a step."""
        return {
            "model_ms": statistics.median(self._model_ms),
            "sample_ms": statistics.median(self._sample_ms),
            "rest_ms": statistics.median(self._rest_ms),
        }

    def _read(self) -> tuple[float, float, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as response:
            lines = [line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line.startswith("cllm_step_seconds")]
        sums = {phase: _value(lines, "_sum{", f'phase="{phase}"') for phase in ("model", "sample")}
        return sums["model"], sums["sample"], _value(lines, "_count{", 'phase="model"')


def _value(lines: list[list[str]], *marks: str) -> float:
    return sum(float(value) for name, value in lines if all(mark in name for mark in marks))


def reading_ms(logits: Logits, n_times: int = 30) -> float:
    """What it takes to read all logits of a step once, straight on, milliseconds: no sampling on the host can take less."""
    times = []
    for _ in range(n_times):
        began = time.perf_counter()
        np.max(logits)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


# --- a token, in the Trio thread -----------------------------------------------------------------------------------------


def profile_page(path: Path, n_tokens: int) -> dict[str, Any]:
    """The microseconds of a token by layer and by function, of a profile in the file `path`. The profiler slows calls down."""
    functions: dict[Any, Any] = pstats.Stats(str(path)).stats  # type: ignore[attr-defined]  # typeshed does not tell
    busy = {key: entry for key, entry in functions.items() if "poll" not in key[2] and "'acquire'" not in key[2]}  # the others wait
    us = 1e6 / n_tokens
    top = sorted(busy.items(), key=lambda item: -item[1][2])[:N_FUNCTIONS]
    return {
        "us_by_part": {part: own_s * us for part, own_s in sorted(_by_part(busy).items(), key=lambda item: -item[1])},
        "functions": [
            {"us": own_s * us, "calls": n_calls / n_tokens, "name": _name(*key)} for key, (_, n_calls, own_s, _, _) in top
        ],
    }  # fmt: skip


def _by_part(functions: dict[Any, Any]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for (file, _, name), (_, _, own_s, _, callers) in functions.items():
        if "'send' of '_socket" in name:
            shares = [("the kernel's send", own_s)]
        elif file == "~":
            shares = [(_part(caller[0]), caller_own_s) for caller, (_, _, caller_own_s, _) in callers.items()]
        else:
            shares = [(_part(file), own_s)]
        for part, share_s in shares:
            parts[part] = parts.get(part, 0.0) + share_s
    return parts


def _part(file: str) -> str:
    return next((part for part, mark in PARTS if mark in file), "other")


def _name(file: str, line: int, name: str) -> str:
    if file == "~":
        return name
    _, is_ours, path = file.rpartition("/cllm/")
    return f"{path if is_ours else '/'.join(Path(file).parts[-2:])}:{line} {name}"
