"""Servers under measurement, each in a process of its own: ready when entered, ended when left, and what they cost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from cllm.bench import process
from cllm.testing.ports import free_port

START_S: Final = 300.0
END_S: Final = 60.0
N_VOCAB_UNKNOWN: Final = 30_000
SETTINGS_OF_SERVERS: Final = ("CLLM_", "LLAMA_ARG_", "LLAMA_API_KEY", "OLLAMA_", "VLLM_")  # how the names of their variables begin


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without the settings of ours, or a peer's, that a user's shell may have: what is measured is what the results say."""
    return {name: text for name, text in environment.items() if not name.startswith(SETTINGS_OF_SERVERS)}


class Server:
    """Any server: `command` is given `{port}` to fill in, and `ready_path` answers 200 when it is ready."""

    def __init__(self, command: Sequence[str], *, ready_path: str = "/v1/models", environment: Mapping[str, str] | None = None) -> None:
        self.port = free_port()
        self._command = [word.replace("{port}", str(self.port)) for word in command]
        self._environment = {
            **without_settings(os.environ),
            **{name: text.replace("{port}", str(self.port)) for name, text in (environment or {}).items()},
        }
        self._ready_path = ready_path

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=self._environment, start_new_session=True
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def get(self, path: str) -> dict[str, Any]:
        """Return a JSON page."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as response:
            page: dict[str, Any] = json.load(response)
            return page

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def n_vocab(self) -> int:
        """The size of the vocabulary, from which prompts are drawn."""
        models = self.get("/v1/models")["data"]
        return int((models[0].get("meta") or {}).get("n_vocab") or N_VOCAB_UNKNOWN)

    def cpu_s(self) -> float:
        """User and system time of the process and its children so far."""
        return process.cpu_s(self._process.pid) or 0.0

    def rss_peak_mb(self) -> float:
        """Resident memory at its greatest, file pages of the model included."""
        return process.rss_peak_mb(self._process.pid) or 0.0

    def anonymous_mb(self) -> float:
        """Resident memory that is not a mapped file."""
        return process.anonymous_mb(self._process.pid) or 0.0

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self._command[0]} did not start (exit code {self._process.poll()}): {self._last_words()}")
            time.sleep(0.1)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{self._ready_path}", timeout=10) as response:
                return bool(response.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace").strip()[-1000:]

    def _end(self) -> None:
        """Ask it to end; what has not, or what it left running, is killed: it would have the cores while others are measured."""
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        with contextlib.suppress(ProcessLookupError):  # nobody is left of its group
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()


class ServerProcess(Server):
    """`cllm serve MODEL`."""

    def __init__(self, model: str, options: list[str]) -> None:
        command = [sys.executable, "-m", "cllm", "serve", model, *options, "--log-level", "warning", "--port", "{port}"]
        super().__init__(command, ready_path="/ready")
