"""`cllm serve` with counters at the layers' entry points, for measurements: python -m benchmarks.counted_server serve MODEL ...

It runs what a user runs, by the command line's own entry point. For every line on standard input it prints a line of JSON: the calls so
far, what some of them took, and the CPU time of the process, and where that line says so what was asked of llama.cpp since the last such
line; it ends with its standard input. Its parent may ask for a fake model, for those calls or for a profile (`benchmarks.serving`).
"""

from __future__ import annotations

import cProfile
import importlib
import json
import os
import signal
import sys
import threading
import time
from typing import Any

from benchmarks import instant
from benchmarks.calls import Recorder
from benchmarks.layers import Counter
from benchmarks.serving import CALLS, INSTANT, PROFILE
from cllm import cli
from cllm.serve import loading
from cllm.serve.steploop import StepLoop

SERVED_LAYERS = ("native", "backend", "sampling", "engine", "loop", "app", "http", "sse")


def main() -> int:
    """Serve; return the exit code."""
    counter = Counter(SERVED_LAYERS)
    if not os.environ.get(PROFILE):  # a counter costs little, but a profiler sees every one of them
        counter.install()
    recorder = Recorder()
    if os.environ.get(CALLS):
        recorder.install(importlib.import_module("llama_cpp"))  # round the counter, which times without it
    if fields := os.environ.get(INSTANT):
        backend = instant.InstantBackend(**json.loads(fields))
        vars(loading)["choose_backend"] = lambda _name: ("instant", backend)
    threading.Thread(target=_answer, args=(counter, recorder), daemon=True).start()
    profile = _profiled() if os.environ.get(PROFILE) else None
    code = cli.run(sys.argv[1:])
    if profile is not None:
        profile.disable()
        profile.dump_stats(os.environ[PROFILE])
    return code


def _answer(counter: Counter, recorder: Recorder) -> None:
    while asked := os.read(0, 4096):  # not sys.stdin, whose lock a daemon thread must not hold when the interpreter ends
        told: dict[str, Any] = {"counts": counter.counts, "seconds": counter.seconds, "cpu_s": time.process_time()}
        if asked.decode().strip() == CALLS:
            told["calls"] = recorder.take()
        line = f"{json.dumps(told)}\n".encode()
        os.write(1, line)  # at once: print writes a line's end by itself, and the server announces itself meanwhile
    os.kill(os.getpid(), signal.SIGTERM)  # its parent has ended, maybe killed: nobody else would end it, and it would have the cores


def _profiled() -> cProfile.Profile:
    """Profile the Trio thread from the first step on."""
    profile = cProfile.Profile()
    original: Any = StepLoop._step
    begun = False

    def step(*arguments: Any) -> Any:
        nonlocal begun
        if not begun:
            begun = True
            profile.enable()
        return original(*arguments)

    setattr(StepLoop, "_step", step)  # noqa: B010  # mypy would not have it assigned
    return profile


if __name__ == "__main__":
    sys.exit(main())
