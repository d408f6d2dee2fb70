"""The plugin as its user meets it: installed with pip into an environment that has cLLM, listed, served, asked, uninstalled, gone.

The environment is the test's own. It sees what is installed where the tests run, cLLM and OpenVINO among it, and nothing that is installed
into it is seen there. Needs pip, and what a package is built with from an index.
"""

from __future__ import annotations

import json
import os
import re
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
MINE: Final = "openvino of cllm-backend-openvino"
START_S, END_S = 120.0, 30.0


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

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a module with arguments, without the variables that would change what it finds."""
        command = [self.python, "-m", *arguments]
        return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600, env=clean(), cwd=self.folder)

    def backends(self) -> set[str]:
        done = self.run("cllm", "backends", "--json")
        assert done.returncode == 0, done.stderr
        return {f"{one['name']} of {one['distribution']}" for one in json.loads(done.stdout)}


def clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("CLLM_", "PYTHON", "PYTEST"))}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """One without the plugin. What is installed where the tests run is seen through a line in a .pth file."""
    made = Environment(tmp_path_factory.mktemp("environment"))
    venv.create(made.folder, symlinks=True)
    (folder,) = made.folder.glob("lib/python*/site-packages")
    (folder / "seen.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in PACKAGES), "utf-8")
    return made


@contextmanager
def served(environment: Environment, *arguments: str) -> Iterator[str]:
    """Serve in a process of its own; give the server's URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [environment.python, "-m", "cllm", "serve", *arguments, "--port", str(port)]
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


def ask(url: str, **fields: Any) -> tuple[int, str]:
    body = {"messages": [{"role": "user", "content": "Is anybody there?"}], "max_tokens": 8, "temperature": 0, **fields}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def content_of(url: str) -> str:
    status, body = ask(url)
    assert status == 200, body
    return str(json.loads(body)["choices"][0]["message"]["content"])


def worker_of(url: str) -> int:
    """The process id of the model's process, a child of the server's."""
    port = url.rpartition(":")[2]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"--port\0{port}" in (folder / "cmdline").read_text("utf-8", "replace"):
                children = [int(pid) for task in (folder / "task").iterdir() for pid in (task / "children").read_text().split()]
                return next(pid for pid in children if b"workermain" in Path(f"/proc/{pid}/cmdline").read_bytes())
        except (OSError, StopIteration):
            continue
    raise AssertionError("the model has no process")


def test_it_is_installed_listed_served_asked_uninstalled_and_gone(environment: Environment, tiny: Path) -> None:
    before = environment.backends()
    assert MINE not in before
    environment.pip("install", "--quiet", "--no-deps", str(PLUGIN))  # of what it needs, cLLM and its own needs are there
    assert environment.backends() == before | {MINE}
    with served(environment, str(tiny), "--backend", "openvino", "--ctx-size", "1024", "--parallel", "4") as url:
        check_answers(url)
        check_forms(url)
        check_refusals(url)
        check_another_life(url)
    done = environment.run("cllm", "verify", str(tiny), "--backend", "openvino", "--text-tokens", "8", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mean"] < 0.1
    environment.pip("uninstall", "--quiet", "--yes", "cllm-backend-openvino")
    assert environment.backends() == before
    done = environment.run("cllm", "serve", str(tiny), "--backend", "openvino", "--port", "0", "--log-level", "error")
    assert (done.returncode, done.stderr.startswith("cllm: no backend openvino")) == (1, True)


def check_answers(url: str) -> None:
    whole = content_of(url)
    status, stream = ask(url, stream=True)
    assert status == 200
    assert stream.endswith("data: [DONE]\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]) == whole
    _, body = ask(url, logprobs=True)
    assert len(json.loads(body)["choices"][0]["logprobs"]["content"]) == 8
    if letters := re.findall("[a-z]", whole):
        _, body = ask(url, stop=letters[-1])
        assert json.loads(body)["choices"][0]["message"]["content"] == whole[: whole.index(letters[-1])]


def check_forms(url: str) -> None:
    """Each is answered in full, and held to what was asked."""
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}}, "required": ["yes", "n"]}
    for fields in ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}, {"json_schema": schema}):
        status, body = ask(url, max_tokens=200, **fields)
        assert status == 200, body
        content = json.loads(json.loads(body)["choices"][0]["message"]["content"])
        assert (content.keys(), content["yes"] in (True, False), content["n"] in (1, 2, 3)) == ({"yes", "n"}, True, True)
    _, body = ask(url, structured_outputs={"choice": ["north", "south"]})
    assert json.loads(body)["choices"][0]["message"]["content"] in ("north", "south")


def check_refusals(url: str) -> None:
    for fields, param in (
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"json_schema": {"type": "integer", "multipleOf": 7}}, "json_schema"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
    ):
        status, body = ask(url, **fields)
        error = json.loads(body)["error"]
        assert (status, error["type"], error["param"]) == (400, "not_supported_error", param)


def check_another_life(url: str) -> None:
    """Nobody who asks next learns that the model's process was killed."""
    whole = content_of(url)
    os.kill(worker_of(url), signal.SIGKILL)
    assert content_of(url) == whole


def test_it_keeps_the_contract(environment: Environment, tiny: Path) -> None:
    environment.pip("install", "--quiet", "--no-deps", str(PLUGIN))
    suite = ("pytest", "--pyargs", "cllm.testing.contract", "--backend", "openvino", "--model", str(tiny))
    done = environment.run(*suite, "-q", "-p", "no:cacheprovider")
    environment.pip("uninstall", "--quiet", "--yes", "cllm-backend-openvino")
    assert done.returncode == 0, done.stdout + done.stderr
