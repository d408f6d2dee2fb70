"""A server process under measurement, started as a user starts it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any

START_S = 120.0


class ServerProcess:
    """`cllm serve MODEL` on a free port, ready when entered, drained when left."""

    def __init__(self, model: str, options: list[str]) -> None:
        self._command = [sys.executable, "-m", "cllm", "serve", model, *options, "--log-level", "warning"]
        self.port = _free_port()
        self.n_vocab = 0

    def __enter__(self) -> ServerProcess:
        self._process = subprocess.Popen([*self._command, "--port", str(self.port)], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start: exit code {self._process.poll()}")
            time.sleep(0.1)
        self.n_vocab = int(self.get("/props").get("n_vocab", 151_936))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def get(self, path: str) -> dict[str, Any]:
        """Return a JSON page."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}") as response:
            page: dict[str, Any] = json.load(response)
            return page

    def cpu_s(self) -> float:
        """User and system time of the process so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss_mb(self) -> float:
        """Resident memory, file pages of the model included."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024

    def anonymous_mb(self) -> float:
        """Resident memory that is not a mapped file."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) / 1024

    def _ready(self) -> bool:
        try:
            return self.get("/ready").get("status") == "ready"
        except (OSError, urllib.error.URLError):
            return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
