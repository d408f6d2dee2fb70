"""`cllm serve` under measurement, in a process of its own, with the layers' counters in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import attrs

from benchmarks.calls import Call
from benchmarks.layers import Counts, Seconds
from benchmarks.server import START_S, without_settings
from cllm.testing.ports import free_port

CALLS, INSTANT, PROFILE = "BENCHMARK_CALLS", "BENCHMARK_INSTANT", "BENCHMARK_PROFILE"  # what the child is told by its environment
ROOT: Final = str(Path(__file__).parents[1])
# At the end of the path, so that an installed cllm goes before the checkout's.
MAIN: Final = f"import sys; sys.path.append({ROOT!r}); from benchmarks.counted_server import main; sys.exit(main())"


@attrs.frozen
class Reading:
    """Where the server's counters stand."""

    counts: Counts
    seconds: Seconds
    cpu_s: float  # of all its threads


class CountedServer:
    """`cllm serve` on a free port, ready when entered, drained when left.

    `instant` are the fields of a fake model that it serves instead of a file; `profile` is where the profile of its Trio thread goes;
    `records_calls` of who asks for them (`calls`).
    """

    def __init__(
        self,
        model: str | None,
        options: list[str],
        *,
        instant: dict[str, Any] | None = None,
        profile: Path | None = None,
        records_calls: bool = False,
    ) -> None:
        self.port = free_port()
        named = [] if model is None else [model]
        self._command = [sys.executable, "-c", MAIN, "serve", *named, *options, "--log-level", "warning", "--port", str(self.port)]
        self._environment = without_settings(os.environ)
        if instant is not None:
            self._environment[INSTANT] = json.dumps(instant)
        if profile is not None:
            self._environment[PROFILE] = str(profile)
        if records_calls:
            self._environment[CALLS] = "1"

    def __enter__(self) -> CountedServer:
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, close_fds=True
        )
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._process.kill()
                self._process.wait()
                raise RuntimeError(f"the server did not start: exit code {self._process.poll()}")
            time.sleep(0.05)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.stdin.close()
            self._process.stdout.close()

    def reading(self) -> Reading:
        """Ask the process."""
        told = self._ask("")
        return Reading(told["counts"], told["seconds"], told["cpu_s"])

    def calls(self) -> list[Call]:
        """What the server asked of llama.cpp since it was asked this last (`benchmarks.calls`)."""
        calls: list[Call] = self._ask(CALLS)["calls"]
        return calls

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n".encode())
        while answer := self._process.stdout.readline():
            if answer.startswith(b"{"):  # it also announces itself
                told: dict[str, Any] = json.loads(answer)
                return told
        raise RuntimeError("the server has ended")

    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False
