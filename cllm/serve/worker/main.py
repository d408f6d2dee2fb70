"""The worker process: one model or embedder, which does what comes over its sockets until they close.

Started by `cllm.serve.worker.process`, through `cllm.serve.worker.start`, with the numbers of four sockets. The main thread computes,
always the same one, or takes what a model that schedules itself is to begin; a thread listens for aborts and for the parent's end; two
tokenise. Standard output and error are the parent's log.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint
from typing import Final, TypeAlias, TypeVar, cast

import msgspec
import numpy as np

from cllm.backend import (
    Backend,
    Batch,
    Embedder,
    Embeds,
    FileVocabulary,
    LoadsEmbedders,
    StepModel,
    StreamEnd,
    StreamEvent,
    StreamModel,
    Vocabulary,
    infill_of,
    n_cells_of,
    n_logprobs_max_of,
    tool_template_of,
)
from cllm.errors import Aborted, BackendError, LoadFailed, ModelDied, RequestError, call_foreign, in_one_line
from cllm.registry import GROUP, checked_model
from cllm.serve.calibration import measure
from cllm.serve.worker import frames
from cllm.serve.worker.crossing import Bench, encoded_event, failed, fill
from cllm.serve.worker.frames import Channel, Ended
from cllm.serve.worker.process import Line

T = TypeVar("T")
Told = TypeVar("Told", bound=msgspec.Struct)
MakePair: TypeAlias = Callable[[str, str], list[int]]

N_ABORTS: Final = 100
BETWEEN_ABORTS_S: Final = 0.002
CALLS: Final = frozenset({"share", "trim", "drop", "save", "restore"})


class Worker:
    """The process's state."""

    def __init__(self, sockets: list[socket.socket]) -> None:
        engine, control, short, long = sockets
        self._channel: Channel[frames.ToWorker] = Channel(engine, frames.ToWorker)
        self._control: Channel[frames.Abort] = Channel(control, frames.Abort)
        self._tokenizers: list[Channel[frames.ToTokenizer]] = [Channel(end, frames.ToTokenizer) for end in (short, long)]
        self._tell = _Telling(self._channel)
        self._bench: Bench | None = None  # where steps are done
        self._model: object = None  # which has the weights of an embedder that it made
        self._number: int | None = None  # of the step under way
        self._aborted = 0  # the last step that was to end
        self._telling_progress = threading.Lock()
        self._is_loaded = False

    def run(self) -> None:
        """Load, and work until the other side is gone. Raises: Ended."""
        threading.Thread(target=self._heed, daemon=True).start()
        load = self._channel.receive()
        assert isinstance(load, frames.Load)
        logging.getLogger().setLevel(load.log_level)
        if load.wants_embedder:
            embedder = self._loaded(self._load_embedder, load)
            if embedder is not None:
                self._run_embedder(embedder, load)
        else:
            model = self._loaded(self._load, load)
            if model is not None:
                self._run_model(model, load)

    def _loaded(self, load_it: Callable[[frames.Load], T], load: frames.Load) -> T | None:
        """What `load_it` gives; what it raises is told, and nothing is left to do."""
        try:
            loaded = load_it(load)
            with self._telling_progress:
                self._is_loaded = True
            return loaded
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: ASYNC103 - see `call_foreign`
            self._channel.send(failed(error if isinstance(error, BackendError) else LoadFailed(in_one_line(error))))
            return None  # noqa: ASYNC104

    def _run_model(self, model: StepModel | StreamModel, load: frames.Load) -> None:
        path, own = None, model.vocabulary
        if isinstance(own, FileVocabulary):
            path, own = own.path, None
        if own is not None:
            self._tokenize(own)
        facts = _facts(own) if own is not None and load.wants_vocabulary else None
        if isinstance(model, StreamModel):
            told = {"n_logprobs_max": n_logprobs_max_of(model), "n_cells": n_cells_of(model)}
            self._channel.send(_told(frames.LoadedStreams, model, **told, vocabulary=facts, vocabulary_path=path))
            self._serve_streams(model)
        else:
            bench = self._bench = Bench(model, model.vocabulary, Batch(model.n_rows_max))
            self._channel.send(_told(frames.Loaded, model, vocabulary=facts))
            self._serve(model, bench)

    def _run_embedder(self, embedder: Embedder, load: frames.Load) -> None:
        self._tokenize(embedder.vocabulary, embedder.pair)
        facts = _facts(embedder.vocabulary) if load.wants_vocabulary else None
        self._channel.send(_told(frames.LoadedEmbedder, embedder, vocabulary=facts))
        batch = Batch(embedder.n_rows_max)
        while True:
            self._channel.send(_answered(partial(_vectors, embedder, batch, self._channel.receive())))

    def _tokenize(self, vocabulary: Vocabulary, pair: MakePair | None = None) -> None:
        for channel in self._tokenizers:
            threading.Thread(target=_tokenize, args=(channel, vocabulary, pair), daemon=True).start()

    def _load(self, load: frames.Load) -> StepModel | StreamModel:
        model = checked_model(_backend(load.factory).load(load.spec, self._on_progress))
        if isinstance(model, StreamModel):
            model.open(self._tell)
        return model

    def _load_embedder(self, load: frames.Load) -> Embedder:
        backend = _backend(load.factory)
        if isinstance(backend, LoadsEmbedders):
            return backend.load_embedder(load.spec, self._on_progress)
        model = self._model = backend.load(load.spec, self._on_progress)
        if isinstance(model, Embeds):
            return model.make_embedder(load.spec)
        raise LoadFailed("this backend's models give no vectors")

    def _on_progress(self, share: float) -> bool:
        with self._telling_progress:
            # A thread of the backend's may be late, and what comes then is no answer to it.
            return self._is_loaded or self._may_proceed(share)

    def _may_proceed(self, share: float) -> bool:
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
                answer = _answered(partial(self._answer, message, model, bench))
            self._number = None
            self._channel.send(answer)

    def _serve_streams(self, model: StreamModel) -> None:
        self._tell.begin()
        while True:
            match self._channel.receive():
                case frames.Begin(seq_id, request):
                    try:
                        call_foreign(model.start, seq_id, request)
                    except ModelDied:
                        raise
                    except RequestError as error:
                        self._tell(StreamEnd(seq_id, refusal=error))  # the client's, who is told; nothing for the operator
                    except Exception as error:
                        self._tell(StreamEnd(seq_id, f"{type(error).__name__}: {error}"))
                case frames.GiveUp(seq_id):
                    _cancel(model, seq_id)
                case other:
                    raise AssertionError(other)

    def _answer(self, message: frames.ToWorker, model: StepModel, bench: Bench) -> msgspec.Struct:
        match message:
            case frames.Rows(_, columns):
                return frames.Answer(np.ascontiguousarray(model.step(fill(bench.batch, columns))).tobytes())
            case frames.Call(name, numbers, state) if name in CALLS:
                given = getattr(model, name)(*numbers, *([state] if name == "restore" else []))
                return frames.Answer(given or b"")
            case frames.Measure():
                return frames.Measured(measure(model, self._may_proceed, time.perf_counter))
            case _:
                raise AssertionError(message)

    def _check(self) -> None:
        if self._aborted == self._number:
            raise Aborted("nobody waits for this step")

    def _heed(self) -> None:
        """Take aborts; when the parent has gone, so does this process, whatever it computes."""
        try:
            while True:
                self._aborted = self._control.receive().number
                if self._bench is not None:
                    self._abort(self._bench, self._aborted)
        except Ended:
            os._exit(0)

    def _abort(self, bench: Bench, number: int) -> None:
        """More than once: between our look at what runs and the model's own, an abort is lost. One that comes while cells are moved has
        nothing to stop yet: the rows after them are given up.
        """
        for _ in range(N_ABORTS):
            work = bench.work
            if self._number != number:
                return
            if work is not None:
                work.is_given_up = True
            try:
                call_foreign(bench.model.abort)
            except Exception as error:  # the step goes on to its end, and whoever listens here goes on listening
                logging.getLogger("cllm.worker").error("a step could not be aborted: %s", in_one_line(error))
                return
            time.sleep(BETWEEN_ABORTS_S)


def _vectors(embedder: Embedder, batch: Batch, message: frames.ToWorker) -> msgspec.Struct:
    match message:
        case frames.Rows(_, columns):
            return frames.Answer(np.ascontiguousarray(embedder.step(fill(batch, columns)), np.float32).tobytes())
        case frames.Call("drop", (slot,)):
            embedder.drop(slot)
            return frames.Answer()
        case _:
            raise AssertionError(message)


def _told(kind: type[Told], source: object, **fields: object) -> Told:
    """A message whose fields are those of `source`, but for `fields`."""
    names = [name for name in kind.__struct_fields__ if name not in fields]
    return kind(**{name: getattr(source, name) for name in names}, **fields)


def _answered(give: Callable[[], msgspec.Struct]) -> msgspec.Struct:
    """What `give` gives, or what it raises."""
    try:
        return call_foreign(give)
    except Exception as error:
        return failed(error)


def _cancel(model: StreamModel, seq_id: int) -> None:
    try:
        call_foreign(model.cancel, seq_id)
    except ModelDied:
        raise
    except Exception as error:  # nobody waits for the sequence any more
        logging.getLogger("cllm.worker").error("a sequence could not be given up: %s", in_one_line(error))


class _Telling:
    """Sends what a model tells, from any of its threads, once it may `begin`. When the parent has gone, so does this process."""

    def __init__(self, channel: Channel[frames.ToWorker]) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._early: list[StreamEvent] | None = []  # told before the parent knows that the model is there; None: it does

    def begin(self) -> None:
        """The parent has been told of the model."""
        with self._lock:
            early, self._early = self._early or [], None
            for event in early:
                self._send(event)

    def __call__(self, event: StreamEvent) -> None:
        with self._lock:
            if self._early is None:
                self._send(event)
            else:
                self._early.append(event)

    def _send(self, event: StreamEvent) -> None:
        try:
            self._channel.send_encoded(encoded_event(event))
        except Ended:
            os._exit(0)


def _facts(vocabulary: Vocabulary) -> frames.VocabularyFacts:
    tokens = range(vocabulary.n_tokens)
    return frames.VocabularyFacts(
        n_tokens=vocabulary.n_tokens,
        bos=vocabulary.bos,
        eos=vocabulary.eos,
        end_tokens=vocabulary.end_tokens,
        adds_bos=vocabulary.adds_bos,
        chat_template=vocabulary.chat_template,
        tool_template=tool_template_of(vocabulary),
        infill=infill_of(vocabulary),
        texts=[vocabulary.token_bytes(token) for token in tokens],
        names=[vocabulary.token_bytes(token, special=True) for token in tokens],
    )


def _tokenize(channel: Channel[frames.ToTokenizer], vocabulary: Vocabulary, pair: MakePair | None) -> None:
    try:
        while True:
            channel.send(_answered(partial(_tokens, channel.receive(), vocabulary, pair)))
    except Ended:
        pass


def _tokens(wish: frames.ToTokenizer, vocabulary: Vocabulary, pair: MakePair | None) -> msgspec.Struct:
    if isinstance(wish, frames.Tokenize):
        tokens = vocabulary.tokenize(_text(wish.text), add_special=wish.add_special, parse_special=wish.parse_special)
    else:
        assert pair is not None, "this model judges no pairs"
        tokens = pair(_text(wish.query), _text(wish.document))
    return frames.Answer(np.array(tokens, np.int32).tobytes())


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _backend(factory: str) -> Backend:
    return cast(Callable[[], Backend], EntryPoint("", factory, GROUP).load())()


class _ToParent(logging.Handler):
    """Writes each record as a line that the parent reads."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = msgspec.json.encode(Line(record.name, record.levelno, self.format(record)))
            os.write(sys.stderr.fileno(), line + b"\n")
        except OSError:
            pass  # the parent is gone
        except Exception:
            self.handleError(record)  # what cannot be written down is told, and costs who logs nothing


def main() -> None:
    """Work for the parent."""
    # The parent's log says the level and the logger.
    logging.basicConfig(handlers=[_ToParent()], level=logging.WARNING, format="%(message)s", force=True)
    code = 0
    try:
        Worker([socket.socket(fileno=int(number)) for number in sys.argv[1:5]]).run()
    except Ended:
        pass
    except ModelDied as error:
        print(error, file=sys.stderr)
    except BaseException:  # whose last line the parent tells with the death
        code = 1
        traceback.print_exc()
        raise  # which comes no further than the end below
    finally:
        logging.shutdown()
        os._exit(code)  # without the native library's own farewell, which has nobody to talk to
