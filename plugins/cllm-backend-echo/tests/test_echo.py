"""The plugin as its user meets it: installed with pip into an environment that has cLLM, listed, served, asked, uninstalled, gone.

The environment is the test's own. It sees what is installed where the tests run, cLLM among it, and nothing that is installed into it is
seen there. Needs pip, and what a package is built with from an index.
"""

from __future__ import annotations

import json
import os
import shutil
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


@pytest.fixture
def installed(environment: Environment) -> Iterator[Environment]:
    """The environment with the plugin."""
    environment.install(PLUGIN)
    yield environment
    environment.uninstall("cllm-backend-echo")


def variant(folder: Path, name: str, *, was: str = "", becomes: str = "", entry_point: str = "echo") -> Path:
    """Write a distribution like the plugin, called `name`, with another entry point or another line in its module."""
    shutil.copytree(PLUGIN, folder / name, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    package = name.replace("-", "_")
    (folder / name / "src" / "cllm_backend_echo").rename(folder / name / "src" / package)
    replace(folder / name / "pyproject.toml", "echo = ", f"{entry_point} = ")
    replace(folder / name / "pyproject.toml", "cllm-backend-echo", name)
    replace(folder / name / "pyproject.toml", "cllm_backend_echo", package)
    if was:
        replace(folder / name / "src" / package / "__init__.py", was, becomes)
    return folder / name


def replace(path: Path, was: str, becomes: str) -> None:
    text = path.read_text("utf-8")
    assert was in text
    path.write_text(text.replace(was, becomes), "utf-8")


# --- one plugin -------------------------------------------------------------------------------------------------------


@contextmanager
def served(environment: Environment, backend: str) -> Iterator[str]:
    """Serve with a backend, as a process of its own; give the server's URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [environment.python, "-m", "cllm", "serve", "--backend", backend, "--calibrate", "off", "--port", str(port)]
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


def check_refused(environment: Environment, backend: str, complaint: str) -> None:
    """Serving with `backend` must be refused in one line with exit code 1."""
    done = environment.run("cllm", "serve", "--backend", backend, "--port", "0", "--log-level", "error")
    assert done.returncode == 1
    assert done.stderr.startswith(f"cllm: {complaint}")
    assert done.stderr.count("\n") == 1


def test_it_is_installed_listed_served_asked_uninstalled_and_gone(environment: Environment) -> None:
    mine = "echo of cllm-backend-echo"
    before = environment.backends()
    assert mine not in before
    environment.install(PLUGIN)
    assert environment.backends() == before | {mine: "says again what it is told"}
    with served(environment, "echo") as url:
        answer = json.loads(ask(url, "Is anybody there?"))
        assert answer["model"] == "echo"
        assert answer["choices"][0]["message"]["content"] == "Is anybody there?"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert ask(url, "Is anybody there?", stream=True).endswith("data: [DONE]\n\n")
    environment.uninstall("cllm-backend-echo")
    assert environment.backends() == before
    check_refused(environment, "echo", "no backend echo")


def test_it_keeps_the_contract(installed: Environment) -> None:
    done = installed.run("pytest", "--pyargs", "cllm.testing.contract", "--backend", "echo", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr


# --- plugins that cannot be used --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bad(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """The environment with the plugin, and beside it one that claims its name, two of other contracts, and one that cannot be imported."""
    folder = tmp_path_factory.mktemp("projects")
    version = "contract_version = 1"
    projects = [
        variant(folder, "cllm-backend-ohce"),
        variant(folder, "cllm-backend-past", was=version, becomes="contract_version = 0", entry_point="past"),
        variant(folder, "cllm-backend-future", was=version, becomes="contract_version = 99", entry_point="future"),
        variant(folder, "cllm-backend-broken", was="import LoadAborted", becomes="import NoSuchError as LoadAborted", entry_point="broken"),
        variant(folder, "cllm-backend-sound", entry_point="sound"),
    ]
    environment.install(PLUGIN, *projects)
    yield environment
    environment.uninstall("cllm-backend-echo", *(project.name for project in projects))


def test_each_that_cannot_be_used_is_listed_with_the_reason_in_one_line(bad: Environment) -> None:
    found = bad.backends()
    both = "is claimed by cllm-backend-echo 1.0 and cllm-backend-ohce 1.0; uninstall one of them"
    assert found["echo of cllm-backend-echo"] == found["echo of cllm-backend-ohce"] == f"the backend name echo {both}"
    assert found["past of cllm-backend-past"].endswith("update the backend")
    assert found["future of cllm-backend-future"].endswith("update cLLM")
    assert found["broken of cllm-backend-broken"].startswith("is broken: ImportError: cannot import name 'NoSuchError'")
    assert not [reason for reason in found.values() if "\n" in reason]


def test_the_others_go_on(bad: Environment) -> None:
    with served(bad, "sound") as url:
        assert json.loads(ask(url, "Still there?"))["choices"][0]["message"]["content"] == "Still there?"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("echo", "the backend name echo is claimed by cllm-backend-echo 1.0 and cllm-backend-ohce 1.0; uninstall one of them"),
        ("past", "backend past (cllm-backend-past 1.0) speaks version 0 of the contract, this server version 1; update the backend"),
        ("future", "backend future (cllm-backend-future 1.0) speaks version 99 of the contract, this server version 1; update cLLM"),
        ("broken", "backend broken (cllm-backend-broken 1.0) is broken: ImportError: cannot import name 'NoSuchError'"),
        ("sonud", "no backend sonud; did you mean sound?"),
    ],
)
def test_serving_with_one_that_cannot_be_used_is_one_line_and_code_1(bad: Environment, name: str, complaint: str) -> None:
    check_refused(bad, name, complaint)
