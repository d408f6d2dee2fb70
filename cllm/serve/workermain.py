"""The worker process: one model, which does what comes over its sockets until they close.

Started by `cllm.serve.workerprocess` with the numbers of four sockets. The main thread computes, always the same one; a thread listens for
aborts and for the parent's end; two tokenise. Standard output and error are the parent's log.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, cast

import msgspec
import numpy as np

from cllm.backend import Backend, Batch, StepModel, StreamModel, Vocabulary, infill_of
from cllm.errors import Aborted, BackendError, LoadFailed, ModelDied
from cllm.serve import frames
from cllm.serve.calibration import measure
from cllm.serve.crossing import Bench, failed
from cllm.serve.frames import Channel, Ended
from cllm.serve.workerprocess import Line

N_ABORTS: Final = 100
BETWEEN_ABORTS_S: Final = 0.002
CALLS: Final = frozenset({"share", "trim", "drop", "save", "restore"})


class Worker:
    """The process's state."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        engine, control, short, long = sockets
        self._channel: Channel[frames.ToWorker] = Channel(engine, frames.ToWorker)
        self._control: Channel[frames.Abort] = Channel(control, frames.Abort)
        self._tokenizers: list[Channel[frames.Tokenize]] = [Channel(end, frames.Tokenize) for end in (short, long)]
        self._model: StepModel | None = None
        self._number: int | None = None  # of the step under way
        self._aborted = 0  # the last step that was to end

    def run(self) -> None:
        """Load, and work until the other side is gone. Raises: Ended."""
        threading.Thread(target=self._heed, daemon=True).start()
        load = self._channel.receive()
        assert isinstance(load, frames.Load)
        logging.getLogger().setLevel(load.log_level)
        try:
            model = self._load(load)
        except Exception as error:
            self._channel.send(failed(error if isinstance(error, BackendError) else LoadFailed(f"{type(error).__name__}: {error}")))
            return
        self._model = model
        for channel in self._tokenizers:
            threading.Thread(target=_tokenize, args=(channel, model.vocabulary), daemon=True).start()
        self._channel.send(_loaded(model, with_vocabulary=load.wants_vocabulary))
        self._serve(model, Bench(model, model.vocabulary, Batch(model.n_rows_max)))

    def _load(self, load: frames.Load) -> StepModel:
        module, _, name = load.factory.partition(":")
        backend = cast(Callable[[], Backend], getattr(importlib.import_module(module), name))()
        model = backend.load(load.spec, self._on_progress)
        if isinstance(model, StreamModel):
            model.close()
            raise LoadFailed("this backend's models schedule themselves, and such cannot be had in a process of their own")
        return model

    def _on_progress(self, share: float) -> bool:
        self._channel.send(frames.Progress(share))
        answer = self._channel.receive()
        return isinstance(answer, frames.Proceed) and answer.yes

    def _serve(self, model: StepModel, bench: Bench) -> None:
        while True:
            message = self._channel.receive()
            self._number = message.number if isinstance(message, frames.Step | frames.Rows) else None
            if isinstance(message, frames.Step):
                answer: msgspec.Struct = bench.step(message, time.perf_counter, self._check)
            else:
                answer = self._answer(message, model, bench)
            self._number = None
            self._channel.send(answer)

    def _answer(self, message: frames.ToWorker, model: StepModel, bench: Bench) -> msgspec.Struct:
        try:
            match message:
                case frames.Rows():
                    return frames.Answer(np.ascontiguousarray(model.step(bench.fill(message))).tobytes())
                case frames.Call(name, numbers, state) if name in CALLS:
                    given = getattr(model, name)(*numbers, *([state] if name == "restore" else []))
                    return frames.Answer(given or b"")
                case frames.Measure():
                    return frames.Measured(measure(model, self._on_progress, time.perf_counter))
                case _:
                    raise AssertionError(message)
        except Exception as error:
            return failed(error)

    def _check(self) -> None:
        if self._aborted == self._number:
            raise Aborted("nobody waits for this step")

    def _heed(self) -> None:
        """Take aborts; when the parent has gone, so does this process, whatever it computes."""
        try:
            while True:
                self._aborted = self._control.receive().number
                if self._model is not None:
                    self._abort(self._model, self._aborted)
        except Ended:
            os._exit(0)

    def _abort(self, model: StepModel, number: int) -> None:
        """More than once: between our look at what runs and the model's own, an abort is lost."""
        for _ in range(N_ABORTS):
            if self._number != number:
                return
            model.abort()
            time.sleep(BETWEEN_ABORTS_S)


def _loaded(model: StepModel, *, with_vocabulary: bool) -> frames.Loaded:
    return frames.Loaded(
        info=model.info,
        capabilities=model.capabilities,
        n_cells=model.n_cells,
        n_cells_slot=model.n_cells_slot,
        n_slots=model.n_slots,
        n_rows_max=model.n_rows_max,
        vocabulary=_facts(model.vocabulary) if with_vocabulary else None,
    )


def _facts(vocabulary: Vocabulary) -> frames.VocabularyFacts:
    tokens = range(vocabulary.n_tokens)
    return frames.VocabularyFacts(
        n_tokens=vocabulary.n_tokens,
        bos=vocabulary.bos,
        eos=vocabulary.eos,
        end_tokens=vocabulary.end_tokens,
        adds_bos=vocabulary.adds_bos,
        chat_template=vocabulary.chat_template,
        infill=infill_of(vocabulary),
        texts=[vocabulary.token_bytes(token) for token in tokens],
        names=[vocabulary.token_bytes(token, special=True) for token in tokens],
    )


def _tokenize(channel: Channel[frames.Tokenize], vocabulary: Vocabulary) -> None:
    try:
        while True:
            wish = channel.receive()
            channel.send(_tokens(wish, vocabulary))
    except Ended:
        pass


def _tokens(wish: frames.Tokenize, vocabulary: Vocabulary) -> msgspec.Struct:
    try:
        text = wish.text.decode("utf-8", "surrogatepass")
        tokens = vocabulary.tokenize(text, add_special=wish.add_special, parse_special=wish.parse_special)
    except Exception as error:
        return failed(error)
    return frames.Answer(np.array(tokens, np.int32).tobytes())


class _ToParent(logging.Handler):
    """Writes each record as a line that the parent reads."""

    def emit(self, record: logging.LogRecord) -> None:
        line = msgspec.json.encode(Line(record.name, record.levelno, self.format(record)))
        with contextlib.suppress(OSError):  # the parent is gone
            os.write(sys.stderr.fileno(), line + b"\n")


def main() -> None:
    """Work for the parent, whose signals to the whole group are its own affair."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(handlers=[_ToParent()], level=logging.WARNING, force=True)
    try:
        Worker([socket.socket(fileno=int(number)) for number in sys.argv[1:5]]).run()
    except (Ended, ModelDied):
        pass
    finally:
        logging.shutdown()
        os._exit(0)  # without the native library's own farewell, which has nobody to talk to


if __name__ == "__main__":
    main()
