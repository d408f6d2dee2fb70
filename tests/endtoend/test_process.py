"""The server as a process of its own, started as a user starts it."""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest

from cllm.bench.process import children
from cllm.testing.ports import free_port

START_S = END_S = 120.0  # end a test that hangs; a machine that is busy with something else takes its time
FOREVER_S = "3600"  # of a time limit that must not be what ends the server
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # stands for what is no character, as where the last one was cut
FEW_CELLS = ("--ctx-size", "4096", "--threads", "1")
# Takes minutes: still under way when a signal comes, however long a busy machine keeps the test from sending it.
MUCH = {"prompt": "Count", "max_tokens": 3000, "n": 32, "ignore_eos": True}
STARTED: list[Process] = []


@attrs.define(eq=False)
class Process:
    """A started command, its port, and what it wrote once it has ended."""

    popen: subprocess.Popen[str]
    port: int
    output: str = ""

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(self.url(path), timeout=END_S) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(self.url(path), json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=END_S) as response:
            data = response.read()
        return json.loads(data) if not body.get("stream") else data.decode()

    def wait_ready(self) -> None:
        until(self._is_ready, START_S)

    def _is_ready(self) -> bool:
        assert self.popen.poll() is None, f"ended with {self.popen.returncode}: {self.popen.communicate()[0]}"
        try:
            return self.get("/ready")[0] == 200
        except OSError:
            return False

    def end(self, *signals: signal.Signals) -> int:
        """Send signals and wait; return the exit code."""
        for number in signals:
            self.popen.send_signal(number)
        self.output = self.popen.communicate(timeout=END_S)[0]
        return self.popen.returncode


def until(condition: Callable[[], bool], within_s: float = END_S) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.01)


def start(*command: str, port: int = 0, stderr: int = subprocess.STDOUT, **environment: str) -> Process:
    popen = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**{name: value for name, value in os.environ.items() if not name.startswith("CLLM_")}, **environment},
    )
    STARTED.append(Process(popen, port))
    return STARTED[-1]


def serve(*options: str, stderr: int = subprocess.STDOUT, **environment: str) -> Process:
    port = free_port()
    return start("cllm", "serve", "--port", str(port), *FEW_CELLS, *options, port=port, stderr=stderr, **environment)


@pytest.fixture
def full_disk() -> Iterator[int]:
    """A file descriptor that takes nothing."""
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    number = os.open("/dev/full", os.O_WRONLY)
    yield number
    os.close(number)


@pytest.fixture(autouse=True)
def _no_process_is_left_behind() -> Iterator[None]:
    n_before = len(STARTED)
    yield
    for process in STARTED[n_before:]:
        if process.popen.poll() is None:
            process.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def server() -> Iterator[Process]:
    process = serve("--body-timeout-s", "1")
    process.wait_ready()
    yield process
    process.end(signal.SIGTERM)


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def streamed_text(data: str) -> str:
    events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event["choices"])


def metric(server: Process, pattern: str) -> list[tuple[str, int]]:
    """(label, value) of the samples that match."""
    with urllib.request.urlopen(server.url("/metrics")) as response:
        text = response.read().decode()
    return [(label, int(float(value))) for label, value in re.findall("^" + pattern + r" (\S+)$", text, re.MULTILINE)]


def submitted(server: Process) -> int:
    """The sequences that the engine has accepted in all."""
    return metric(server, "cllm_sequences_submitted_total()")[0][1]


def cancelled(server: Process) -> int:
    """The sequences that ended because nobody waited for them any more."""
    return dict(metric(server, r'cllm_sequences_ended_total\{how="(\w+)"\}')).get("cancelled", 0)


def wait_submitted(server: Process, n_sequences: int) -> None:
    """Wait until the engine has accepted so many sequences in all."""
    until(lambda: submitted(server) >= n_sequences)


def wait_generated(server: Process, n_tokens: int) -> None:
    """Wait until so many tokens have come in all."""
    until(lambda: dict(metric(server, r"cllm_(generated_tokens)_total")).get("generated_tokens", 0) >= n_tokens)


def cells(server: Process) -> dict[str, int]:
    """The cells by state."""
    return dict(metric(server, r'cllm_cells\{state="(\w+)"\}'))


def takes_connections(server: Process) -> bool:
    """Whether it has not been told to stop."""
    try:
        socket.create_connection(("127.0.0.1", server.port)).close()
    except ConnectionError:
        return False
    return True


def test_it_answers_and_a_stream_is_the_same_as_no_stream(server: Process) -> None:
    answer = server.post("/v1/chat/completions", chat("What is cLLM?"))
    assert "cLLM" in answer["choices"][0]["message"]["content"]
    data = server.post("/v1/chat/completions", chat("What is cLLM?", stream=True))
    assert data.endswith("data: [DONE]\n\n")
    assert streamed_text(data) == answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize(("path", "outermost"), [("/v1/messages", {"type", "error", "request_id"}), ("/api/chat", {"error"})])
def test_a_body_that_does_not_come_is_refused_in_its_surfaces_own_shape(server: Process, path: str, outermost: set[str]) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\nX-Request-Id: mine\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=END_S) as client:
        client.sendall(head.encode() + b'{"model": ')
        answer = http.client.HTTPResponse(client)
        answer.begin()
        body = json.loads(answer.read())
    assert (answer.status, answer.headers["x-request-id"]) == (408, "mine")
    assert body.keys() <= outermost
    assert "type" in body if path == "/v1/messages" else isinstance(body["error"], str)


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 33])
def test_it_gives_exactly_as_many_tokens_as_asked(server: Process, max_tokens: int) -> None:
    body = {"prompt": "Count from 1 to 90.", "max_tokens": max_tokens, "ignore_eos": True, "temperature": 1.0, "seed": max_tokens}
    answer = server.post("/v1/completions", body)
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_character_is_never_split_whatever_max_tokens_is(server: Process) -> None:
    question = "Repeat: 你好 déjà vu 🙂 über"
    whole = server.post("/v1/chat/completions", chat(question))["choices"][0]["message"]["content"]
    assert not whole.isascii()
    assert REPLACEMENT not in whole
    for max_tokens in range(1, 24):
        body = chat(question, max_tokens=max_tokens)
        answer = server.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
        assert whole.startswith(answer.removesuffix(REPLACEMENT)), "only the last character may be cut"
        data = server.post("/v1/chat/completions", {**body, "stream": True})
        assert streamed_text(data) == answer


def test_clients_that_leave_at_any_moment_leave_no_cell_held(server: Process) -> None:
    def ask(path: str, body: dict[str, Any]) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", server.port))
        data = json.dumps(body).encode()
        client.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data)) + data)
        return client

    def leave(i: int) -> None:
        text = "Count from 1 to 99." + " Please." * (i % 7 * 20)
        with ask("/v1/chat/completions", chat(text, stream=i % 2 == 0)) as client:
            leaves_at = time.monotonic() + 0.003 * i  # from before the first row to the middle of the answer
            with suppress(OSError):
                while (left_s := leaves_at - time.monotonic()) > 0:
                    client.settimeout(left_s)
                    if not client.recv(4096):
                        break

    n_submitted, n_cancelled = submitted(server), cancelled(server)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(1, 41)))
    # However busy the machine, one leaves in the middle of its answer.
    with ask("/v1/completions", {"prompt": "Count", "max_tokens": 3000, "ignore_eos": True, "stream": True}) as client:
        assert client.recv(1)
    until(lambda: cells(server)["held"] == 0)
    assert cells(server)["free"] + cells(server)["cached"] == 4096
    assert submitted(server) > n_submitted, "all left before their requests were read"
    assert cancelled(server) > n_cancelled, "all stayed to the end"
    assert server.get("/health")[0] == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_it_drains_and_exits_with_0(number: signal.Signals) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        process = serve("--grace-s", FOREVER_S)
    finally:
        signal.signal(signal.SIGHUP, before)
    process.wait_ready()
    with ThreadPoolExecutor(4) as pool:
        body = chat("Count from 1 to 60.", logprobs=True, top_logprobs=20)  # whose names are read when all has been computed
        answers = [pool.submit(process.post, "/v1/chat/completions", body) for _ in range(4)]
        wait_submitted(process, 4)
        assert process.end(number) == 0
        for answer in answers:
            assert answer.result()["choices"][0]["finish_reason"] == "stop"
    assert "Traceback" not in process.output


def test_a_terminal_that_closes_is_one_reason_to_drain_however_often_it_is_told() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        process = serve("--grace-s", "2")
    finally:
        signal.signal(signal.SIGHUP, before)
    process.wait_ready()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(process.post, "/v1/completions", MUCH)
        wait_submitted(process, 1)
        process.popen.send_signal(signal.SIGHUP)
        until(lambda: not takes_connections(process))
        assert process.end(signal.SIGHUP) == 0


def test_a_terminal_that_closes_changes_nothing_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as the child has it from its parent
    try:
        process = serve()
    finally:
        signal.signal(signal.SIGHUP, before)
    process.wait_ready()
    process.popen.send_signal(signal.SIGHUP)
    assert process.post("/v1/chat/completions", chat("What is cLLM?"))["choices"][0]["finish_reason"] == "stop"
    assert process.end(signal.SIGTERM) == 0


def test_it_serves_and_drains_though_its_log_has_no_room(full_disk: int) -> None:
    process = serve("--calibrate", "off", "--log-level", "debug", stderr=full_disk, PYTHONUNBUFFERED="")  # as a user has it
    process.wait_ready()
    assert process.get("/health")[0] == 200
    assert process.post("/v1/chat/completions", chat("What is cLLM?"))["choices"][0]["finish_reason"] == "stop"
    assert process.end(signal.SIGTERM) == 0


def test_a_second_signal_ends_it_at_once() -> None:
    process = serve("--grace-s", FOREVER_S)
    process.wait_ready()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(process.post, "/v1/completions", MUCH)
        wait_submitted(process, 1)
        process.popen.send_signal(signal.SIGTERM)
        until(lambda: not takes_connections(process))  # the first must have been taken before the second is sent, or they are one
        assert process.end(signal.SIGTERM) == 128 + signal.SIGTERM
    assert "Traceback" not in process.output


def test_when_grace_is_over_streams_end_with_an_error_and_the_code_is_0() -> None:
    process = serve("--grace-s", "0.2")
    process.wait_ready()
    with ThreadPoolExecutor(1) as pool:
        # Not all of it: what is unread while the test itself is kept waiting must have room.
        stream = pool.submit(process.post, "/v1/completions", {**MUCH, "n": 8, "stream": True})
        wait_generated(process, 100)  # so that the answer has begun: an error can only be in it
        assert process.end(signal.SIGTERM) == 0
        data = stream.result()
    assert '"error"' in data
    assert "[DONE]" not in data


def test_ctrl_c_while_loading_gives_up_the_load() -> None:
    process = serve()
    assert process.popen.stdout is not None
    while "load.start" not in (line := process.popen.stdout.readline()):
        assert line, "it ended before it began to load"
    assert process.end(signal.SIGINT) in (0, 130)
    assert "Traceback" not in process.output
    assert " serves " not in process.output, "it was loaded to its end"


@pytest.fixture
def broken_file(tmp_path: Path) -> Path:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\x03\0\0\0" + b"\xff" * 64)
    return path


def test_a_broken_model_file_is_one_line_and_code_1(broken_file: Path) -> None:
    process = serve(str(broken_file))
    assert process.end() == 1
    assert_one_complaint(process.output, "broken.gguf")


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="bounds another process's memory by prlimit, which Linux has")
@pytest.mark.parametrize("options", [(), ("--isolate",)], ids=["here", "isolated"])
def test_too_little_memory_for_the_cells_is_one_line_and_code_1_and_leaves_no_open_port(options: tuple[str, ...]) -> None:
    port = free_port()
    process = start("cllm", "serve", "--port", str(port), "--ctx-size", "4000000", *options, port=port)  # 5.7 GiB
    resource.prlimit(process.popen.pid, resource.RLIMIT_AS, (4 << 30, 4 << 30))
    assert process.end() == 1
    assert "insufficient memory" in process.output.splitlines()[-1]
    assert "Traceback" not in process.output
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_for_machines_every_line_is_an_event_also_why_it_does_not_start(broken_file: Path) -> None:
    process = serve("--log-format", "json")
    process.wait_ready()
    assert process.end(signal.SIGTERM) == 0
    events = {event["event"]: event for event in map(json.loads, process.output.splitlines())}
    assert events["serve"]["url"] == process.url("")
    assert "drain" in events
    process = serve(str(broken_file), "--log-format", "json")
    assert process.end() == 1
    *_, last = map(json.loads, process.output.splitlines())
    assert (last["event"], last["level"]) == ("start.failed", "critical")
    assert "broken.gguf" in last["why"]


def worker_of(server: Process) -> int:
    """The process id of a server's only child."""
    (pid,) = workers_of(server)
    return pid


def workers_of(server: Process) -> list[int]:
    """The process ids of a server's children."""
    return children(server.popen.pid)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_clients_do_not_see_that_the_process_which_computes_is_killed() -> None:
    server = serve("--isolate", "--calibrate", "off")
    server.wait_ready()
    n_tokens = 480  # of each: for so many of all there is room
    bodies = [
        {"prompt": f"Count from {i} to 90.", "max_tokens": n_tokens, "ignore_eos": True, "temperature": i % 2, "seed": i} for i in range(8)
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        answers = [pool.submit(server.post, "/v1/completions", body) for body in bodies]
        wait_generated(server, 100)
        killed = worker_of(server)
        os.kill(killed, signal.SIGKILL)
        until(lambda: any(pid != killed for pid in workers_of(server)))  # a server that has nothing left to do may end without another one
        assert [answer.result()["usage"]["completion_tokens"] for answer in answers] == [n_tokens] * len(bodies)
    assert server.end(signal.SIGTERM) == 0
    assert "worker.replaced" in server.output


def test_vectors_too_come_of_a_process_of_their_own_and_outlive_it() -> None:
    here = serve("--embeddings", "--calibrate", "off")
    here.wait_ready()
    body = {"input": ["a sea", "a mountain"]}
    expected = [one["embedding"] for one in here.post("/v1/embeddings", body)["data"]]
    here.end(signal.SIGKILL)
    server = serve("--isolate", "--embeddings", "--calibrate", "off")
    server.wait_ready()
    for _ in range(2):
        given = [one["embedding"] for one in server.post("/v1/embeddings", body)["data"]]
        assert given == [pytest.approx(vector, abs=1e-4) for vector in expected]
        for pid in workers_of(server):
            os.kill(pid, signal.SIGKILL)
    assert server.end(signal.SIGTERM) == 0


def test_a_server_that_is_killed_leaves_no_worker_behind() -> None:
    server = serve("--isolate", "--calibrate", "off")
    server.wait_ready()
    worker = worker_of(server)
    server.end(signal.SIGKILL)
    until(lambda: not is_running(worker))


def test_a_broken_model_file_is_one_line_from_a_worker_too(broken_file: Path) -> None:
    process = serve(str(broken_file), "--isolate")
    assert process.end() == 1
    assert_one_complaint(process.output, "broken.gguf")


def test_a_taken_port_is_one_line_and_code_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = start("cllm", "serve", "--port", str(port), *FEW_CELLS)
        assert process.end() == 1
    assert_one_complaint(process.output, str(port))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--port", "x"), "--port"),
        (("--no-such-flag",), "--no-such-flag"),
        (("missing.gguf",), "missing.gguf"),
        (("--ctx-size", "0"), "ctx"),
    ],
)
def test_a_bad_flag_is_one_line_and_code_2(options: tuple[str, ...], named: str) -> None:
    process = start("cllm", "serve", *options)
    assert process.end() == 2
    assert_one_complaint(process.output, named)


def assert_one_complaint(output: str, named: str) -> None:
    assert "Traceback" not in output
    complaints = [line for line in output.splitlines() if line.startswith("cllm: ")]
    assert len(complaints) == 1, output
    assert named in complaints[0]


def test_hypercorn_serves_the_application_with_settings_from_the_environment() -> None:
    process = hypercorn(CLLM_CTX_SIZE="2048", CLLM_THREADS="1", CLLM_ALIAS="mine", CLLM_PARALEL="2", CLLM_KEEP_ALIVE_S="5")
    process.wait_ready()
    assert process.get("/v1/models")[1]["data"][0]["id"] == "mine"
    answer = process.post("/v1/chat/completions", chat("What is cLLM?", model="mine"))
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert process.end(signal.SIGTERM) == 0
    assert "Traceback" not in process.output
    assert "CLLM_PARALEL is not a setting; did you mean CLLM_PARALLEL?" in process.output
    (unused,) = [line for line in process.output.splitlines() if "setting.unused" in line]
    assert "CLLM_KEEP_ALIVE_S" in unused
    assert "CLLM_CTX_SIZE" not in unused


def hypercorn(**environment: str) -> Process:
    port = free_port()
    return start("hypercorn", "-k", "trio", "-b", f"127.0.0.1:{port}", "cllm.asgi:create_app()", port=port, **environment)


def test_under_hypercorn_a_model_that_cannot_be_loaded_leaves_no_server_behind(broken_file: Path) -> None:
    process = hypercorn(CLLM_MODEL=str(broken_file))
    process.end()  # Hypercorn 0.18 forgets its worker's exit code, so only that it ends can be told
    assert "broken.gguf" in process.output
    assert "Traceback" not in process.output


def test_under_hypercorn_a_mistake_in_the_environment_is_one_line() -> None:
    process = hypercorn(CLLM_CTX_SIZE="many")
    process.end()
    assert_one_complaint(process.output, "CLLM_CTX_SIZE")


def test_generate_answers_on_the_terminal() -> None:
    process = start("cllm", "generate", "What is cLLM?", "--temperature", "0", "--log-level", "error", *FEW_CELLS)
    assert process.end() == 0
    assert "cLLM" in process.output


def test_generate_with_nothing_to_go_on_from_is_one_line_and_code_2() -> None:
    process = start("cllm", "generate", "", "--raw", *FEW_CELLS)
    assert process.end() == 2
    assert_one_complaint(process.output, "PROMPT")


def test_backends_lists_both_built_in_ones() -> None:
    process = start("cllm", "backends", "--json")
    assert process.end() == 0
    names = {backend["name"]: backend["available"] for backend in json.loads(process.output)}
    assert names["llama-cpu"] is True
    assert "llama-gpu" in names


def test_a_server_finds_again_what_the_one_before_it_computed(tmp_path: Path) -> None:
    question = chat("What is continuous batching? " * 40, max_tokens=20)
    answers = []
    for _ in range(2):  # by costs of a larger model: what the disk has is waited for as long as it would take to compute, here a second
        server = serve("--cache-dir", str(tmp_path / "cache"), "--calibrate", "off")
        server.wait_ready()
        answers.append(server.post("/v1/chat/completions", question))
        n_read = metric(server, "cllm_disk_cache_reads_total()")[0][1]
        assert server.end(signal.SIGTERM) == 0, server.output
    first, again = (answer["usage"] for answer in answers)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] - 1
    assert n_read == 1
    assert answers[0]["choices"][0]["message"] == answers[1]["choices"][0]["message"]


def test_a_cache_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    process = serve("--cache-dir", str(tmp_path / "file"))
    assert process.end() == 1
    assert f"cllm: --cache-dir {tmp_path / 'file'}: " in process.output
    assert "Traceback" not in process.output
