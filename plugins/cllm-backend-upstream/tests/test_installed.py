"""The plugin as its user meets it: installed with pip into an environment that has cLLM, listed, served, asked, uninstalled, gone.

The environment is the test's own. It sees what is installed where the tests run, cLLM among it, and nothing that is installed into it is
seen there. Needs pip, and what a package is built with from an index.
"""

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
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import pytest

PLUGIN: Final = Path(__file__).parent.parent
PACKAGES: Final = [path for path in sys.path if path.endswith("-packages")]
START_S, END_S = 60.0, 30.0


@attrs.frozen
class Environment:
    """A virtual environment."""

    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.python, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, *projects: Path) -> None:
        self.pip("install", "--quiet", "--no-deps", *map(str, projects))  # of what it needs, cLLM and its own needs are there

    def uninstall(self, *names: str) -> None:
        self.pip("uninstall", "--quiet", "--yes", *names)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a module with arguments, without the variables that would change what it finds."""
        command = [self.python, "-m", *arguments]
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300, env=clean(), cwd=self.folder)

    def backends(self) -> dict[str, str]:
        """Each backend that is listed, with the reason that is told beside it."""
        done = self.run("cllm", "backends", "--json")
        assert done.returncode == 0, done.stderr
        return {f"{one['name']} of {one['distribution']}": one["reason"] for one in json.loads(done.stdout)}


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("CLLM_", "PYTHON", "PYTEST"))}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """One without the plugin. What is installed where the tests run is seen through a line in a .pth file."""
    made = Environment(tmp_path_factory.mktemp("environment"))
    venv.create(made.folder, symlinks=True)
    (folder,) = made.folder.glob("lib/python*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})\n" for path in PACKAGES]
    (folder / "seen.pth").write_text("".join(lines), "utf-8")
    return made


@contextmanager
def served(environment: Environment, *arguments: str) -> Iterator[str]:
    """Serve with the backend, as a process of its own; give the server's URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [environment.python, "-m", "cllm", "serve", *arguments, "--calibrate", "off", "--port", str(port)]
    process = subprocess.Popen(command, env=clean(), cwd=environment.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_ready(process, url)
        yield url
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=END_S)[0]
        assert process.returncode == 0, output
    finally:
        process.kill()
        process.communicate()


def wait_ready(process: subprocess.Popen[str], url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        try:
            urllib.request.urlopen(f"{url}/ready", timeout=10).close()
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.05)
        else:
            return
    raise AssertionError("not ready in time")


def ask(url: str, text: str, **fields: Any) -> str:
    body = {"messages": [{"role": "user", "content": text}], **fields}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()


def test_it_is_installed_listed_served_asked_uninstalled_and_gone(environment: Environment) -> None:
    """Before the demo model, which another process serves."""
    mine = "upstream of cllm-backend-upstream"
    before = environment.backends()
    assert mine not in before
    environment.install(PLUGIN)
    assert environment.backends()[mine].startswith("has other servers answer")
    with served(environment) as behind, served(environment, "--backend", "upstream", "--model", behind) as url:
        here, there = (json.loads(ask(one, "Hello!", temperature=0, max_tokens=30)) for one in (url, behind))
        assert here["choices"] == there["choices"]
        assert here["model"] == there["model"]
        assert ask(url, "Hello!", stream=True, max_tokens=5).endswith("data: [DONE]\n\n")
    environment.uninstall("cllm-backend-upstream")
    assert environment.backends() == before
    done = environment.run("cllm", "serve", "--backend", "upstream", "--port", "0", "--log-level", "error")
    assert (done.returncode, done.stderr.startswith("cllm: no backend upstream")) == (1, True)


def test_it_keeps_the_contract(environment: Environment, faulty: Any) -> None:
    """With one that behaves; there are other tests for those that do not."""
    environment.install(PLUGIN)
    suite = ["pytest", "--pyargs", "cllm.testing.contract", "-q", "-p", "no:cacheprovider"]
    done = environment.run(*suite, "--backend", "upstream", "--model", faulty.url)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    environment.uninstall("cllm-backend-upstream")
