from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.server import Server
from benchmarks.serving import CALLS

ROOT = str(Path(__file__).parents[2])
SERVES = "import http.server, sys; http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind='127.0.0.1')"
LEAVES = f"import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, file=open(sys.argv[2], 'w')); {SERVES}"


def is_running(pid: int) -> bool:
    """Whether the process is there, and not only its entry, which nobody has read yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="whether a process is there is read from /proc")
def test_what_a_server_left_running_does_not_keep_the_cores_from_the_next(tmp_path: Path) -> None:
    left = tmp_path / "pid"
    with Server([sys.executable, "-c", LEAVES, "{port}", str(left)], ready_path="/"):
        pid = int(left.read_text())
        assert is_running(pid)
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:  # it was killed, and ends when the kernel comes to it
        time.sleep(0.01)
    assert not is_running(pid)


@pytest.mark.parametrize(("line", "tells_calls"), [(b"\n", False), (f"{CALLS}\n".encode(), True)])
def test_a_counted_server_tells_what_it_is_asked_and_ends_with_the_process_that_started_it(line: bytes, *, tells_calls: bool) -> None:
    modules = ("counted_server import _answer", "layers import Counter", "calls import Recorder")
    answers = "; ".join([*(f"from benchmarks.{module}" for module in modules), "_answer(Counter(()), Recorder())"])
    asked = subprocess.run(
        [sys.executable, "-c", answers], input=line, capture_output=True, env={**os.environ, "PYTHONPATH": ROOT}, timeout=300, check=False
    )
    told = json.loads(asked.stdout)
    assert set(told) == {"counts", "seconds", "cpu_s"} | ({"calls"} if tells_calls else set())
    assert asked.returncode == -signal.SIGTERM


def test_a_measured_server_has_none_of_the_settings_that_the_shell_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would change what is measured, and no result says so."""
    monkeypatch.setenv("CLLM_API_KEY", "secret")
    monkeypatch.setenv("ANYTHING_ELSE", "kept")
    has = "import http.server, os, sys; assert 'CLLM_API_KEY' not in os.environ and os.environ['ANYTHING_ELSE'] == 'kept'"
    serves = f"{has}; http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind='127.0.0.1')"
    with Server([sys.executable, "-c", serves, "{port}"], ready_path="/"):
        pass
