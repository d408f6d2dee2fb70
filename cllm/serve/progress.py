"""How a load is shown to the operator: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

import structlog
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from cllm.backend import OnProgress
from cllm.serve.engine import ServedModel
from cllm.serve.stdio import lossy_stderr

log = structlog.get_logger("cllm.load")
SHARES_TOLD = (0.25, 0.5, 0.75)


class Progress(Protocol):
    """Told of a load's course; `update` comes from the loading thread."""

    def update(self, share: float) -> None:
        """So much is loaded, 0 to 1."""

    def done(self, model: ServedModel) -> None:
        """The model is ready."""

    def stop(self) -> None:
        """Whatever happened, show nothing more."""


class BarProgress:
    """A bar on standard error. Log lines that come meanwhile go above it; otherwise the bar would wipe them out."""

    def __init__(self, name: str) -> None:
        self._bar = Bar(
            TextColumn("loading {task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            console=Console(file=lossy_stderr()),
            transient=True,
        )
        self._task = self._bar.add_task(name, total=1.0)
        self._bar.start()
        self._logger_factory = structlog.get_config()["logger_factory"]
        structlog.configure(logger_factory=structlog.WriteLoggerFactory(lossy_stderr()))  # which is the bar's while it runs

    def update(self, share: float) -> None:
        """See `Progress.update`."""
        self._bar.update(self._task, completed=share)

    def done(self, model: ServedModel) -> None:
        """See `Progress.done`."""
        self.stop()
        _tell(model)

    def stop(self) -> None:
        """See `Progress.stop`."""
        self._bar.stop()
        structlog.configure(logger_factory=self._logger_factory)


class LogProgress:
    """A line for each quarter."""

    def __init__(self, name: str) -> None:
        self._untold = list(SHARES_TOLD)
        log.info("load.start", source=name)

    def update(self, share: float) -> None:
        """See `Progress.update`."""
        if self._untold and share >= self._untold[0]:
            while self._untold and share >= self._untold[0]:
                told = self._untold.pop(0)
            log.info("load.progress", percent=round(told * 100))

    def done(self, model: ServedModel) -> None:
        """See `Progress.done`."""
        self._untold.clear()
        _tell(model)

    def stop(self) -> None:
        """See `Progress.stop`."""
        self._untold.clear()


def make_progress(name: str) -> Progress:
    """A bar if standard error is a terminal, else lines in the log."""
    return BarProgress(name) if sys.stderr.isatty() else LogProgress(name)


@contextmanager
def shown(name: str) -> Iterator[OnProgress]:
    """Show the course of a load in this thread, which Ctrl-C gives up, for as long as the block runs."""
    progress = make_progress(name)
    with _noted_interrupts() as is_interrupted:

        def on_progress(share: float) -> bool:
            progress.update(share)
            return not is_interrupted()

        try:
            yield on_progress
        finally:
            progress.stop()


@contextmanager
def _noted_interrupts() -> Iterator[Callable[[], bool]]:
    """Tell whether Ctrl-C was pressed meanwhile, and raise KeyboardInterrupt for it at the end; the second one does not wait.

    Raised as soon as Python runs, it would mostly be in what native code calls back, where nothing can be raised: it would be lost.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            signal.default_int_handler(number, frame)
        noted.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if noted:
            raise KeyboardInterrupt


def _tell(model: ServedModel) -> None:
    log.info(
        "load.done",
        model=model.name,
        backend=model.backend,
        n_ctx=model.n_ctx,
        n_cells=model.n_cells,
        n_live_max=model.n_live_max,
        kv=model.capabilities.kv_layout.value,
    )
