"""An environment of its own in which a plugin is what its user has of it: installed with pip, listed, served, uninstalled, gone.

Needs pip where the tests run, and what the plugin is built with from an index.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final

import attrs

from cllm.testing.ports import free_port

LOOPBACK: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy knows this machine's own servers
END_S: Final = 600.0  # ends what hangs; a machine that is busy with something else takes its time


@attrs.frozen
class Environment:
    """A virtual environment that sees what is installed where the tests run, cLLM among it; what is installed into it is seen in it alone.

    Raises of every method: AssertionError, with what was printed, when something does not go as it must.
    """

    folder: Path

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.folder / "bin" / "python")

    def run(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a module to its end, without the variables that would change what it finds; its exit code is the caller's to judge."""
        command = [self.python, "-m", module, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=END_S, env=_environ(), cwd=self.folder, check=False
        )

    def install(self, *projects: Path) -> None:
        """Install plugins from their folders, and what they need beside what is seen already, as cLLM is."""
        self._pip("install", "--quiet", *map(str, projects))

    def uninstall(self, *distributions: str) -> None:
        """Remove distributions by their names."""
        self._pip("uninstall", "--quiet", "--yes", *distributions)

    @contextmanager
    def installed(self, *projects: Path) -> Iterator[None]:
        """Have plugins for a while."""
        self.install(*projects)
        try:
            yield
        finally:
            self.uninstall(*map(_name_of, projects))

    @contextmanager
    def lent(self, project: Path, *backends: str) -> Iterator[dict[str, str]]:
        """Have a plugin for a while: it must add these backends to the list, and take them away again. Give the reasons beside them."""
        name = _name_of(project)
        before = self.backends()
        there = sorted(before.keys() & {f"{backend} of {name}" for backend in backends})
        assert not there, f"{', '.join(there)}: uninstall {name} where the tests run, whose packages this environment sees"
        with self.installed(project):
            now = self.backends()
            added = {f"{backend} of {name}" for backend in backends}
            assert now.keys() - before.keys() == added, f"{sorted(now.keys() - before.keys())} are new in the list"
            yield {backend: now[f"{backend} of {name}"] for backend in backends}
        assert self.backends() == before, "something is left in the list"
        for backend in backends:
            self.check_refused(backend, f"--backend: no backend {backend}", code=2)

    def backends(self) -> dict[str, str]:
        """What `cllm backends` lists, as `NAME of DISTRIBUTION`, with the reason that is told beside each."""
        done = self.run("cllm", "backends", "--json")
        assert done.returncode == 0, done.stderr
        return {f"{one['name']} of {one['distribution']}": one["reason"] for one in json.loads(done.stdout)}

    def check_refused(self, backend: str, complaint: str, *, code: int = 1) -> None:
        """Serving with `backend` must end with this exit code, 2 where there is none of that name, and one line that begins with
        `complaint`.
        """
        done = self.run("cllm", "serve", "--backend", backend, "--port", "0", "--log-level", "error")
        line = f"cllm: {complaint}"
        assert (done.returncode, done.stderr[: len(line)], done.stderr.count("\n")) == (code, line, 1), done.stdout + done.stderr

    def check_contract(self, backend: str, *arguments: str) -> None:
        """Backend `backend` must keep the contract; further arguments are the contract suite's."""
        done = self.run("pytest", "--pyargs", "cllm.testing.contract", "--backend", backend, *arguments, "-q", "-p", "no:cacheprovider")
        assert done.returncode == 0, done.stdout + done.stderr
        assert " passed" in done.stdout, done.stdout

    @contextmanager
    def served(self, *arguments: str) -> Iterator[str]:
        """Run `cllm serve` with arguments, ready to answer; give its URL. When told to stop it must end with exit code 0."""
        port = free_port()
        command = [self.python, "-m", "cllm", "serve", *arguments, "--port", str(port)]
        url = f"http://127.0.0.1:{port}"
        with NamedTemporaryFile(dir=self.folder, prefix="served-") as printed:  # a pipe that nobody reads would hold up who writes much
            process = subprocess.Popen(command, env=_environ(), cwd=self.folder, stdout=printed, stderr=subprocess.STDOUT)
            output = Path(printed.name)
            try:
                _wait_ready(process, url, output)
                yield url
                process.send_signal(signal.SIGTERM)
                assert process.wait(timeout=END_S) == 0, _text_of(output)
            finally:
                process.kill()
                process.wait()

    def _pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", self.python, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=END_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def make_environment(folder: Path) -> Environment:
    """Make one in `folder`, which must be empty."""
    made = Environment(folder)
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    seen = [path for path in sys.path if path.endswith("-packages")]
    (packages / "seen.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in seen), "utf-8")
    return made


def chat(url: str, text: str, **fields: Any) -> tuple[int, str]:
    """Ask the server at `url` for a chat completion; give the answer's status and body. `fields` are further ones of the request."""
    body = json.dumps({"messages": [{"role": "user", "content": text}], **fields}).encode()
    request = urllib.request.Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    try:
        with LOOPBACK.open(request, timeout=END_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def content_of(answer: tuple[int, str]) -> str:
    """The text of a chat completion, streamed or not. Raises: AssertionError when it is none, or a stream without its end."""
    status, body = answer
    assert status == 200, body
    if not body.startswith("data: "):
        return str(json.loads(body)["choices"][0]["message"]["content"])
    assert body.endswith("data: [DONE]\n\n"), body
    chunks = [json.loads(line.removeprefix("data: ")) for line in body.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("CLLM_", "PYTHON", "PYTEST"))}


def _name_of(project: Path) -> str:
    return str(tomllib.loads((project / "pyproject.toml").read_text("utf-8"))["project"]["name"])


def _text_of(output: Path) -> str:
    return output.read_text("utf-8", "replace")


def _wait_ready(process: subprocess.Popen[bytes], url: str, output: Path) -> None:
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        assert process.poll() is None, _text_of(output)
        try:
            LOOPBACK.open(f"{url}/ready", timeout=END_S).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError(f"not ready in time: {_text_of(output)}")
