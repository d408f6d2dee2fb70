"""The command line, mostly in a process of its own, as a person meets it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

import cllm
from cllm import cli
from cllm.errors import BackendUnavailable, SettingsError


def cllm_process(*arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *options, "-m", "cllm", *arguments]
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["serve", "--help"], ["generate", "--help"], ["bench", "--help"], ["--version"], ["serve", "--port", "x"]]
)
def test_help_version_and_mistakes_import_neither_numpy_nor_a_backend(arguments: list[str]) -> None:
    imported = cllm_process(*arguments, options=("-X", "importtime")).stderr
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in imported.splitlines() if line.startswith("import time:")}
    assert "cyclopts" in modules
    assert not modules & {"numpy", "llama_cpp", "cllm_llamacpp", "trio", "quart", "hypercorn"}


def test_help_tells_the_commands() -> None:
    done = cllm_process("--help")
    assert done.returncode == 0
    for word in ("serve", "generate", "bench", "backends", "pull", "models", "--version"):
        assert word in done.stdout


def test_no_arguments_show_the_help() -> None:
    assert cllm_process().stdout == cllm_process("--help").stdout


def test_the_help_of_serve_groups_all_settings() -> None:
    text = cllm_process("serve", "--help").stdout
    assert [title for title in ("Model", "Memory", "Speed", "Requests", "Network", "Operation") if f"─ {title} ─" not in text] == []
    assert "CLLM_CTX_SIZE" in text


def test_the_help_of_generate_leaves_out_what_only_a_server_has() -> None:
    text = cllm_process("generate", "--help").stdout
    assert "--threads" in text
    assert [name for name in ("--port", "--queue-size", "--enable-admin", "--grace-s", "--models") if name in text] == []


@pytest.mark.parametrize(
    ("command", "told", "ignored"),
    [
        ("generate", ["--model", "--isolate", "--lora"], ["--embedding", "--pooling", "--alias", "--cache-dir", "--calibrat"]),
        ("calibrate", ["--model", "--isolate", "--alias", "--calibration-dir"], ["--embedding", "--pooling", "--calibrate "]),
        (
            "verify",
            ["--model", "--lora"],
            [
                "--embedding",
                "--pooling",
                "--alias",
                "--cache-dir",
                "--calibrat",
                "--isolate",
                "--watchdog",
                "--parallel",
                "--itl",
                "--tool-format",
            ],
        ),
    ],
)
def test_the_help_of_a_command_leaves_out_what_it_ignores(command: str, told: list[str], ignored: list[str]) -> None:
    text = cllm_process(command, "--help").stdout
    assert [name for name in told if name not in text] == []
    assert [name for name in ignored if f"│ {name}" in text] == []


def test_version_is_printed() -> None:
    assert cllm_process("--version").stdout == f"cllm {cllm.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "--port", "99999"], "cllm: --port: must be 0 to 65535, not 99999"),
        (["serve", "--prot", "1"], "cllm: Unknown option: --prot. Did you mean --port?"),
        (["serve", "a", "a"], "cllm: MODEL: two models are called a: give one another name with --alias MODEL=NAME"),
        (["generate", "hi", "-m", "a", "--models", "b"], "cllm: --models: this command takes one model"),
        (["serve", "no-such.gguf"], "cllm: MODEL: no such file: no-such.gguf"),
        (
            ["serv"],
            'cllm: Unknown command "serv". Did you mean "serve"? Available commands: serve, generate, calibrate, verify, bench, backends, '
            "pull, models.",
        ),
        (["generate"], 'cllm: Command "generate" parameter PROMPT requires an argument.'),
        (["bench", "--concurrency", "0"], "cllm: --concurrency: must be at least 1, not 0"),
        (["bench", "--rate", "nan"], "cllm: --rate: must be more than 0, not nan"),
        (["bench", "--rate", "1", "--workload", "chat-turns"], "cllm: --rate: the requests of chat-turns wait for each other"),
        (["bench", "ftp://there"], "cllm: URL: not an address as in http://127.0.0.1:8080: ftp://there"),
        (["bench", "http://localhost:port"], "cllm: URL: not an address as in http://127.0.0.1:8080: http://localhost:port"),
        (["verify"], "cllm: --backend: name the backend that is to be compared with the reference"),
        (["generate", "hi", "--max-tokens", "0"], "cllm: --max-tokens: must be at least 1, not 0"),
        (["generate", "-", "--max-tokens", "0"], "cllm: --max-tokens: must be at least 1, not 0"),
        (["generate", "- buy milk", "--system", "- be brief", "-n", "0"], "cllm: --max-tokens: must be at least 1, not 0"),
        (["generate", "-n", "0", "--", "--foo"], "cllm: --max-tokens: must be at least 1, not 0"),
        (["generate", "--foo"], "cllm: Unknown option: --foo."),
        (["generate", "--max-token", "3", "hi"], "cllm: Unknown option: --max-token. Did you mean --max-tokens?"),
        (["generate", "hi", "--foo=x"], "cllm: Unknown option: --foo."),
        (["generate", "-hf", "a/b"], "cllm: Unknown option: -hf. Here the model stands in its place: cllm serve USER/REPO:Q4_K_M"),
        (["generate", "hi", "--system", "--raw"], 'cllm: Command "generate" parameter --system requires an argument.'),
        (["generate", "hi", "-n", "x"], 'cllm: Invalid value for -n: "x" is not a whole number.'),
        (["generate", "hi", "--temperature", "nan"], "cllm: --temperature: must be 0 or more, not nan"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(arguments: list[str], line: str) -> None:
    done = cllm_process(*arguments)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (cli.USAGE, "", line)


def test_a_mistake_that_nobody_can_be_told_of_is_not_told_in_the_output() -> None:
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "cllm", "serve", "--port", "x"]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=300)
    assert (done.returncode, done.stdout) == (2, b"")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serve", "--backend", "llama-cup"], "--backend"),
        (["serve", "a", '{"model": "b", "backend": "llama-cup"}'], "MODEL"),
        (["generate", "hi", "--backend", "llama-cup"], "--backend"),
        (["calibrate", "--backend", "llama-cup"], "--backend"),
        (["verify", "--backend", "llama-cup"], "--backend"),
        (["verify", "--backend", "llama-cpu", "--reference", "llama-cup"], "--reference"),
    ],
)
def test_an_unknown_backend_is_a_mistake_that_is_seen_before_anything_is_imported_for_it(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.EntryPoint.load", raising(AssertionError("it may be slow, or broken")))
    assert cli.run(arguments) == cli.USAGE
    assert capsys.readouterr().err.startswith(f"cllm: {named}: no backend llama-cup; did you mean llama-cpu? (installed: ")


def test_a_prompt_may_come_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(_settings: object, prompt: str, **_: object) -> int:
        asked.append(prompt)
        return 0

    monkeypatch.setattr("cllm.commands.generate.run", answer)
    for prompt in ("-", "- buy milk"):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"--foo\n")))
        assert cli.run(["generate", prompt]) == 0
    assert asked == ["--foo\n", "- buy milk"]


@pytest.mark.parametrize(
    ("word", "hint"), [("x.gguf", "; a model is named by --model"), ("USER/REPO:Q4_K_M", "; a model is named by --model"), ("there", "")]
)
def test_a_model_at_the_place_of_the_prompts_end_is_told_how_to_be_named(word: str, hint: str) -> None:
    done = cllm_process("generate", "hi", word)
    assert (done.returncode, done.stderr) == (cli.USAGE, f"cllm: one argument too many: {word}{hint}\n")


def test_a_server_that_is_not_there_is_one_line_and_exit_code_1() -> None:
    done = cllm_process("bench", "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (cli.FAILED, "")
    assert done.stderr.startswith("cllm: cannot reach http://127.0.0.1:1: ")
    assert len(done.stderr.splitlines()) == 1


def test_backends_are_listed_plainly_where_nobody_looks() -> None:
    done = cllm_process("backends")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert [line.split()[:3] for line in lines if line.startswith("llama-cpu")] == [["llama-cpu", "cllm", cllm.__version__]]


def test_backends_are_listed_as_json() -> None:
    found = {one["name"]: one for one in json.loads(cllm_process("backends", "--json").stdout)}
    assert {"llama-cpu", "llama-gpu"} <= set(found)
    assert set(found["llama-cpu"]) == {"name", "distribution", "version", "available", "reason", "preference"}


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_takes_is_a_failure_and_one_line_at_most(unbuffered: str) -> None:
    command, environment = [sys.executable, "-m", "cllm", "backends", "--json"], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stderr) == (cli.FAILED, "cllm: No space left on device\n")
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as nobody:
        done = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stderr) == (cli.FAILED, "")


def raising(error: BaseException) -> Callable[..., int]:
    def command(*_: object, **__: object) -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code"),
    [(SettingsError("not so"), cli.USAGE), (BackendUnavailable("none\nhere"), cli.FAILED)],
)
def test_an_error_that_cllm_names_becomes_its_line_and_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cllm.registry.probe_backends", raising(error))
    assert cli.run(["backends"]) == code
    assert capsys.readouterr().err == f"cllm: {' '.join(str(error).split())}\n"


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), BaseExceptionGroup("", [ValueError(), BaseExceptionGroup("", [KeyboardInterrupt()])])]
)
def test_ctrl_c_exits_quietly_with_130(error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("cllm.registry.probe_backends", raising(error))
    with pytest.raises(SystemExit) as exit_:
        cli.main(["backends"])
    assert exit_.value.code == cli.INTERRUPTED
    assert capsys.readouterr().err == ""


def test_a_group_without_ctrl_c_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cllm.registry.probe_backends", raising(BaseExceptionGroup("", [ValueError("a"), GeneratorExit()])))
    with pytest.RaisesGroup(ValueError, GeneratorExit):
        cli.main(["backends"])


def test_a_key_that_is_typed_is_sent_whole_and_of_those_in_the_variable_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr("cllm.bench.command.run", lambda order: sent.append(order.target.api_key))
    cli.run(["bench", "--api-key", "a,b"])
    monkeypatch.setenv("CLLM_API_KEY", " one 2,other")
    cli.run(["bench"])
    cli.run(["bench", "--api-key", "c d"])
    assert sent == ["a,b", "one", "c d"]


def test_the_keys_in_the_variable_are_not_told_to_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr("cllm.bench.command.run", lambda order: sent.append(order.target.api_key))
    monkeypatch.setenv("CLLM_API_KEY", "own")
    for url in ("http://localhost:8080", "http://[::1]:8080/v1", "https://api.example.com", "http://192.0.2.1:8080"):
        cli.run(["bench", url])
    assert sent == ["own", "own", "", ""]
