"""What is logged and told: what cannot be written ends nothing, and no line tells what was asked."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog

from cllm.backend import Batch
from cllm.config import Settings
from cllm.errors import LoadAborted
from cllm.serve import stdio
from cllm.serve.logs import configure_logging
from cllm.serve.progress import BarProgress, make_progress, shown
from cllm.serve.stdio import _Lossy, complain, tell
from cllm.testing.fake import FakeModel
from tests.serve.conftest import TEST_S, Steps, answers, make_spec, serving, text_alone

PROMPT = "what nobody else may read"


class Stream(io.StringIO):
    """Standard error, on a disk that may be full."""

    is_full = False
    is_terminal = False

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)

    def isatty(self) -> bool:
        return self.is_terminal


@contextmanager
def standard_error(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool = False, **settings: Any) -> Iterator[Stream]:
    """Have log lines go to a stream of ours. Not a fixture: pytest sets standard error anew between those and the test."""
    stream = Stream()
    stream.is_terminal = is_terminal
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setattr(logging.getLogger(), "handlers", [])
        configure_logging(Settings(**settings))
        yield stream


def load(*, n_presses: int) -> None:
    """A load in which Ctrl-C is pressed, and which ends when it is told to."""
    with shown("a model") as on_progress:
        assert on_progress(0.1)
        for _ in range(n_presses):
            signal.raise_signal(signal.SIGINT)
        assert n_presses == 1, "the second one does not wait"
        assert not on_progress(0.2), "it ends the load"
        raise LoadAborted("the load was stopped")


def test_ctrl_c_is_not_lost_in_what_native_code_calls_back_while_it_loads() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have had ignored
    try:
        for n_presses in (1, 2):
            with pytest.raises(KeyboardInterrupt):
                load(n_presses=n_presses)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_nobody_waits_for_a_reader_that_stands_still() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, b"x" * 4096):
            pass
    os.set_blocking(writing, True)
    with open(writing, "w", buffering=1) as stream:
        lossy: Any = _Lossy(stream, str)
        texts = ("lost\n", "long and lost " * 10_000, "lost, too\n")
        writer = threading.Thread(target=lambda: [lossy.write(text) for text in texts], daemon=True)
        writer.start()
        writer.join(10.0)
        assert not writer.is_alive()
        os.set_blocking(reading, False)
        with contextlib.suppress(BlockingIOError):
            while os.read(reading, 1 << 20):
                pass
        lossy.write("taken\n")
        assert os.read(reading, 1 << 20) == b"3\ntaken\n"
    os.close(reading)


def test_what_comes_after_half_a_line_begins_a_new_one() -> None:
    stream, is_full = io.StringIO(), False
    lossy: Any = _Lossy(stream, str)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stdio, "_takes", lambda _stream: not (is_full and stream.getvalue()))
        is_full = True
        lossy.write("a" * 3000 + "\n")
        is_full = False
        lossy.write("taken\n")
    half, notice, taken = stream.getvalue().splitlines()
    assert set(half) == {"a"}
    assert (notice, taken) == ("1", "taken")


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_that_lines_were_lost_is_told_as_lines_are(monkeypatch: pytest.MonkeyPatch, log_format: str) -> None:
    is_read = False
    monkeypatch.setattr(stdio, "_takes", lambda _stream: is_read)
    with standard_error(monkeypatch, log_format=log_format) as stream:
        logger = structlog.get_logger("ours")
        logger.error("lost")
        is_read = True
        logger.error("taken")
    notice, taken = stream.getvalue().splitlines()
    assert "taken" in taken
    if log_format == "json":
        page = json.loads(notice)
        assert (page["event"], page["level"]) == ("log.lost", "warning")
        assert page["n_writes"] >= 1
        assert set(page) - {"n_writes"} == set(json.loads(taken))
    else:
        assert "writes were lost" in notice


def test_what_a_model_writes_makes_no_lines_of_pythons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings(), standard_error(monkeypatch) as stream:
        warnings.warn_explicit("invalid escape sequence", SyntaxWarning, "<unknown>", 1)
    assert stream.getvalue() == ""


OF_THE_HUBS_LIBRARY = """
import logging, sys, warnings
from cllm import hub
from cllm.config import Settings
from cllm.serve.logs import configure_logging

if sys.argv[1:]:
    configure_logging(Settings(log_format=sys.argv[1]))
hub.cached_models()
logging.getLogger("huggingface_hub.file_download").warning("logged")
warnings.warn("warned")
"""


def lines_of_the_hubs_library(folder: Path, *log_format: str) -> list[str]:
    command = [sys.executable, "-c", OF_THE_HUBS_LIBRARY, *log_format]
    environment = {**os.environ, "HF_HOME": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, timeout=TEST_S, env=environment, check=True).stderr.splitlines()


def test_what_the_hubs_library_logs_and_warns_of_is_there_once_and_as_our_own(tmp_path: Path) -> None:
    logged, warned = (json.loads(line) for line in lines_of_the_hubs_library(tmp_path, "json"))
    assert (logged["event"], logged["level"]) == ("logged", "warning")
    assert ("UserWarning: warned" in warned["event"], warned["level"]) == (True, "warning")


def test_where_logging_is_not_set_up_the_hubs_library_writes_its_lines(tmp_path: Path) -> None:
    assert [line for line in lines_of_the_hubs_library(tmp_path) if "logged" in line] == ["logged"]


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_line_for_which_there_is_no_room_is_lost_and_the_next_one_is_tried(monkeypatch: pytest.MonkeyPatch, log_format: str) -> None:
    with standard_error(monkeypatch, log_format=log_format) as stream:
        for logger in (structlog.get_logger("ours"), logging.getLogger("foreign")):
            stream.is_full = True
            logger.error("lost")
            stream.is_full = False
            logger.error("written")
    assert (stream.getvalue().count("lost"), stream.getvalue().count("written")) == (0, 2)


def test_a_line_after_standard_error_was_closed_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with standard_error(monkeypatch) as stream:
        stream.close()
        structlog.get_logger("ours").error("lost")
        logging.getLogger("foreign").error("lost")
        complain(RuntimeError("lost"))


async def test_a_step_that_fails_costs_its_request_alone_though_nobody_can_be_told(monkeypatch: pytest.MonkeyPatch, steps: Steps) -> None:
    def fail(_batch: Batch) -> None:
        raise RuntimeError("out of order")

    model = FakeModel(before_step=fail)
    with standard_error(monkeypatch, log_level="debug") as stream:
        stream.is_full = True
        async with serving(model) as running:
            (answer,) = await answers(running, make_spec())
            assert answer.error.code == "step_failed"
            model.before_step = None
            (answer,) = await answers(running, make_spec())
            assert answer.text == text_alone("once upon a time", 8)


def test_a_bar_on_a_terminal_that_has_gone_ends_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with standard_error(monkeypatch, is_terminal=True) as stream:
        stream.is_full = True
        progress = make_progress("a model")
        assert isinstance(progress, BarProgress)
        progress.update(0.5)
        structlog.get_logger("ours").error("lost")
        progress.stop()


@pytest.mark.parametrize(
    ("environment", "is_colored"),
    [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_lines_have_colors_on_a_terminal_unless_it_or_its_user_wants_none(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], is_colored: bool
) -> None:
    for name, value in {"TERM": "xterm", **environment}.items():
        monkeypatch.setenv(name, value)
    with standard_error(monkeypatch, is_terminal=True) as stream:
        structlog.get_logger("ours").error("told")
    assert ("\x1b[" in stream.getvalue()) is is_colored


@pytest.mark.parametrize("name", ["{x}.gguf", "a[/b].gguf", "[red]a.gguf"])
def test_a_bar_shows_a_name_as_it_is_whatever_that_would_mean_to_who_draws_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with standard_error(monkeypatch, is_terminal=True) as stream:
        make_progress(name).stop()
    assert f"loading {name} " in stream.getvalue()


def test_what_standard_output_cannot_take_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream()
    stream.close()
    monkeypatch.setattr(sys, "stdout", stream)
    tell("lost")


@pytest.mark.parametrize(
    ("encoding", "text", "written"),
    [
        ("utf-8", "模型", "模型"),
        ("utf-8", "m\udcff", r"m\udcff"),  # how a file name has a byte that is no UTF-8
        ("latin-1", "é模", r"é\u6a21"),
        ("ascii", "é", r"\xe9"),
    ],
)
def test_a_character_that_standard_output_has_not_is_escaped(
    monkeypatch: pytest.MonkeyPatch, encoding: str, text: str, written: str
) -> None:
    data = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data, encoding))
    tell(text)
    assert data.getvalue().decode(encoding) == written + "\n"


def test_a_server_without_standard_output_tells_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    tell("lost")


@pytest.mark.parametrize(("log_format", "written"), [("console", r"/\x1b[2J\x9b\u202eпцт"), ("json", r"/\u001b[2J\u009b\u202e\u043f")])
def test_what_a_client_has_a_say_in_tells_a_terminal_nothing(monkeypatch: pytest.MonkeyPatch, log_format: str, written: str) -> None:
    with standard_error(monkeypatch, log_format=log_format) as stream:
        for logger in (structlog.get_logger("ours"), logging.getLogger("foreign")):
            logger.error("/\x1b[2J\x9b\u202eпцт")
        structlog.get_logger("ours").error("failed", path="/\x1b[2J\x9b\u202eпцт")
    assert stream.getvalue().count(written) == 3
    assert stream.getvalue().replace("\n", "").isprintable()


def read_prompt(prompt: str) -> None:
    """Fails with the prompt among its variables, and nowhere else."""
    raise RuntimeError(f"{len(prompt)} characters are too many")


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_traceback_tells_where_it_was_and_not_what_was_asked(monkeypatch: pytest.MonkeyPatch, log_format: str, is_terminal: bool) -> None:
    with standard_error(monkeypatch, log_format=log_format, is_terminal=is_terminal) as stream:
        for logger in (structlog.get_logger("ours"), logging.getLogger("foreign")):
            try:
                read_prompt(PROMPT)
            except RuntimeError:
                logger.exception("failed")
    assert PROMPT not in stream.getvalue()
    assert stream.getvalue().count("read_prompt") >= 2, stream.getvalue()


def test_lines_of_several_threads_do_not_run_into_each_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open(tmp_path / "log", "w", buffering=1) as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setattr(logging.getLogger(), "handlers", [])
        configure_logging(Settings(log_format="json"))

        def write(log: Any) -> None:
            for n in (10, 6_000) * 100:
                log.warning("x" * n)

        writers = [threading.Thread(target=write, args=(log,)) for log in (structlog.get_logger("ours"), logging.getLogger("foreign")) * 2]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
    lengths = Counter(len(json.loads(line)["event"]) for line in (tmp_path / "log").read_text().splitlines())
    assert lengths == {10: 400, 6_000: 400}


def test_lines_that_come_while_a_bar_is_drawn_wait_for_no_lock_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(log: Any) -> None:
        for n in range(150):
            log.warning("told", n=n)

    def draw(progress: BarProgress) -> None:
        while not written.is_set():
            progress._bar.refresh()  # as its own thread does, ten times in a second

    monkeypatch.setenv("TERM", "xterm")
    switched_s, written = sys.getswitchinterval(), threading.Event()
    with standard_error(monkeypatch, is_terminal=True) as stream:
        progress = make_progress("a model")
        assert isinstance(progress, BarProgress)
        writers = [threading.Thread(target=write, args=(structlog.get_logger("ours"),), daemon=True) for _ in range(2)]
        drawer = threading.Thread(target=draw, args=(progress,), daemon=True)
        sys.setswitchinterval(1e-5)
        try:
            for thread in (drawer, *writers):
                thread.start()
            for writer in writers:
                writer.join(TEST_S)
                assert not writer.is_alive()
        finally:
            sys.setswitchinterval(switched_s)
            written.set()
        drawer.join()
        progress.stop()
    assert stream.getvalue().count("told") == 300
