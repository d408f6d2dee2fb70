"""What a server and a worker process say to each other: typed messages in MessagePack, each in a frame, over a socket pair."""

from __future__ import annotations

import select
import socket
import struct
import threading
from typing import Any, Final, Generic, TypeVar

import msgspec

from cllm.backend import Capabilities, InfillTokens, ModelInfo, ModelSpec, Pooling, StreamRequest, StreamText, StreamToken, StreamUsage
from cllm.engine.cost.curve import Curve
from cllm.engine.events import TokenLogprob
from cllm.engine.sampling.params import SamplingParams, StopParams

_LENGTH: Final = struct.Struct("<Q")
N_BYTES_FRAME_MAX: Final = 1 << 40  # beyond it, it was no frame
N_BYTES_AT_ONCE: Final = 1 << 28  # memory that is taken for what is yet to come
N_BYTES_AHEAD: Final = 1 << 14  # larger messages are read to where they belong
INT64_MAX: Final = (1 << 63) - 1  # the largest number that crosses everywhere
N_BYTES_VALUE_MAX: Final = (1 << 32) - 1  # of one value in MessagePack


class Ended(Exception):
    """The other side has closed the socket, or its process has ended."""


class Garbled(Ended):
    """What came was no message."""


# --- how a model begins ------------------------------------------------------------------------------------------------


class Load(msgspec.Struct, tag=True, frozen=True):
    """The first message: which model. `factory` is the entry point's value, module:callable."""

    factory: str
    spec: ModelSpec
    log_level: int
    wants_vocabulary: bool = True
    wants_embedder: bool = False  # instead of what generates


class Progress(msgspec.Struct, tag=True, frozen=True):
    """The loaded share; the worker waits for a `Proceed`."""

    share: float


class Proceed(msgspec.Struct, tag=True, frozen=True):
    """The answer to it."""

    yes: bool


class VocabularyFacts(msgspec.Struct, tag=True, frozen=True):
    """All of a vocabulary but its tokeniser."""

    n_tokens: int
    bos: int | None
    eos: int | None
    end_tokens: frozenset[int]
    adds_bos: bool
    chat_template: str | None
    tool_template: str | None
    infill: InfillTokens | None
    texts: list[bytes]  # of each token
    names: list[bytes]  # the same, where control tokens have a name


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The model is there."""

    info: ModelInfo
    capabilities: Capabilities
    n_cells: int
    n_cells_slot: int
    n_slots: int
    n_rows_max: int
    vocabulary: VocabularyFacts | None  # None: as it was told the last time


class LoadedStreams(msgspec.Struct, tag=True, frozen=True):
    """A model that schedules itself is there."""

    info: ModelInfo
    n_live_max: int
    n_ctx: int
    heeds: frozenset[str]
    n_logprobs_max: int
    n_cells: int | None  # None: not told
    vocabulary: VocabularyFacts | None  # None: as it was told the last time, or not its own
    vocabulary_path: str | None  # of the file that has its vocabulary


class LoadedEmbedder(msgspec.Struct, tag=True, frozen=True):
    """What gives vectors is there."""

    info: ModelInfo
    pooling: Pooling
    n_embd: int
    n_tokens_max: int
    n_cells: int
    n_slots: int
    n_rows_max: int
    can_split: bool
    vocabulary: VocabularyFacts | None  # None: as it was told the last time


AnyLoaded = Loaded | LoadedStreams | LoadedEmbedder


class Failed(msgspec.Struct, tag=True, frozen=True):
    """What was asked for raised. `error` is a name in `cllm.errors`; any other exception is a StepFailed."""

    error: str
    message: str


# --- a step ------------------------------------------------------------------------------------------------------------


class Moving(msgspec.Struct, frozen=True, array_like=True):
    """A memory move; `name` is that of its class in `cllm.engine.batch.plan`."""

    name: str
    slot: int
    number: int = 0  # Trim: cells to keep; Share: the source; Save: from which cell on; Restore: where the chain ends
    n_tokens: int = 0  # Share: how many; Save: cells of the slot
    pieces: tuple[tuple[int, int, bytes], ...] = ()  # Restore: (start, end, state) of each piece


class Opening(msgspec.Struct, frozen=True, array_like=True):
    """All about a sequence's sampling, for a worker that does not know it (any more)."""

    sampling: SamplingParams
    stopping: StopParams
    seed: int
    n_logprobs: int | None
    n_prompt: int
    mu: float
    dry_breakers: bytes | None  # as a `TokenSet` has them


class Drawing(msgspec.Struct, frozen=True, array_like=True):
    """An output from which a token is drawn."""

    seq_id: int
    tokens: bytes  # int32, which its sampler has not seen: the last one mostly, all of them after an opening
    opening: Opening | None = None
    due: int | None = None  # the token that must come
    mask: bytes | None = None  # uint32: what a grammar allows
    grammar_waits: bool = False


class Scored(msgspec.Struct, frozen=True, array_like=True):
    """Outputs that are scored."""

    first: int
    targets: list[int]
    n_top: int


class Columns(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a batch, column by column: int32, `outputs` int8."""

    n_rows: int
    n_outputs: int
    tokens: bytes
    positions: bytes
    slots: bytes
    outputs: bytes


class Step(msgspec.Struct, tag=True, frozen=True):
    """One step's work."""

    number: int  # of the step, for an abort to name
    moves: list[Moving]
    columns: Columns
    drawings: list[Drawing]
    scorings: list[Scored]
    fillers: list[tuple[int, int]]  # slots, and their cells without these rows


class Moved(msgspec.Struct, frozen=True):
    """What came of the moves, also when the step raised."""

    n_done: int
    saved: list[tuple[bytes | None, float]]  # state and seconds of each save
    restored: list[tuple[int, int, float, int | None]]  # cells, cells moved, seconds, which piece did not fit


class Stepped(msgspec.Struct, tag=True, frozen=True):
    """What a step brought; `failure` when it raised."""

    moved: Moved
    failure: Failed | None
    tokens: list[int]
    invalid: list[int]
    logprobs: list[TokenLogprob | None] | None
    scores: list[list[TokenLogprob] | None]
    mus: list[float] | None  # mirostat's limits, where one of the sequences has it
    model_s: float
    moves_s: float
    sample_s: float


# --- the rest of the contract ------------------------------------------------------------------------------------------


class Call(msgspec.Struct, tag=True, frozen=True):
    """A call of a model's method that is no step of the engine's."""

    name: str
    numbers: tuple[int, ...]
    state: bytes = b""


class Rows(msgspec.Struct, tag=True, frozen=True):
    """A call of the model's `step`: the logits themselves are wanted."""

    number: int
    columns: Columns


class Measure(msgspec.Struct, tag=True, frozen=True):
    """Ask for a curve."""


class Measured(msgspec.Struct, tag=True, frozen=True):
    """The curve."""

    curve: Curve


class Answer(msgspec.Struct, tag=True, frozen=True):
    """What a call gave: a state, logits, or nothing."""

    data: bytes = b""


# --- a model that schedules itself ---------------------------------------------------------------------------------------


class Begin(msgspec.Struct, tag=True, frozen=True):
    """A call of its `start`."""

    seq_id: int
    request: StreamRequest


class GiveUp(msgspec.Struct, tag=True, frozen=True):
    """A call of its `cancel`."""

    seq_id: int


class TokenTold(msgspec.Struct, tag=True, frozen=True):
    """What it told."""

    event: StreamToken


class TextTold(msgspec.Struct, tag=True, frozen=True):
    """What it told."""

    event: StreamText


class BeatTold(msgspec.Struct, tag=True, frozen=True):
    """That it has come further."""


class Refused(msgspec.Struct, frozen=True):
    """A `RequestError`; `error` is its name in `cllm.errors`."""

    error: str
    message: str
    param: str | None
    code: int | str | None
    extra: dict[str, int | float | str | None]
    retry_after_s: float | None


class EndTold(msgspec.Struct, tag=True, frozen=True):
    """What it told, or that a sequence could not be begun."""

    seq_id: int
    error: str
    refused: Refused | None
    is_cut: bool
    stop_reason: str | None
    usage: StreamUsage | None


class WrongTold(msgspec.Struct, tag=True, frozen=True):
    """That it told something of a sequence that cannot cross: an event of a kind `event`, and why not."""

    seq_id: int | None
    event: str
    why: str


# --- texts ---------------------------------------------------------------------------------------------------------------


class Tokenize(msgspec.Struct, tag=True, frozen=True):
    """A text to be tokenised; UTF-8 with surrogates passed."""

    text: bytes
    add_special: bool
    parse_special: bool


class Pair(msgspec.Struct, tag=True, frozen=True):
    """A query and a document to be tokenised as the model judges them together; UTF-8 with surrogates passed."""

    query: bytes
    document: bytes


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End the step of this number."""

    number: int


ToWorker = Load | Proceed | Step | Call | Rows | Measure | Begin | GiveUp
Told = TokenTold | TextTold | BeatTold | EndTold | WrongTold
FromWorker = AnyLoaded | Told | Progress | Failed | Stepped | Answer | Measured
ToTokenizer = Tokenize | Pair
FromTokenizer = Answer | Failed
T = TypeVar("T")
_told_decoder: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)


def encoded(message: msgspec.Struct) -> bytes:
    """Return a message as it goes over a channel. Raises: what msgspec does, as for integers beyond 64 bits."""
    return msgspec.msgpack.encode(message)


def encoded_told(message: Told) -> bytes:
    """Return a message that has a foreign event in it as `encoded` does. Raises: what msgspec does, also where the other side would."""
    data = encoded(message)
    _told_decoder.decode(data)
    return data


class Channel(Generic[T]):
    """One end of a socket pair, on which messages of the type `T` come. Each direction has one user at a time.

    It reads ahead: a small message, or several, come by one call to the system, after which another thread may have kept the GIL for long.
    """

    def __init__(self, end: socket.socket, incoming: Any) -> None:
        self._socket = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._ahead = memoryview(bytearray(N_BYTES_AHEAD))
        self._read, self._filled = 0, 0  # of `_ahead`, what was taken and what is there
        self._waiting = threading.Lock()  # held by who waits for a message

    def send(self, message: msgspec.Struct) -> None:
        """Send one message; blocks. Raises: Ended."""
        self.send_encoded(self._encoder.encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Send a message that `encoded` has written down; blocks. Raises: Ended."""
        length = _LENGTH.pack(len(data))
        try:
            if len(data) < N_BYTES_AHEAD:
                self._socket.sendall(length + data)
            else:
                self._socket.sendall(length)
                self._socket.sendall(data)
        except OSError as error:
            raise Ended(str(error)) from error

    def receive(self) -> T:
        """Wait for the next message. Raises: Ended, also for what is no message."""
        with self._waiting:
            length = bytearray(_LENGTH.size)
            self._fill(memoryview(length))
            (n_bytes,) = _LENGTH.unpack(length)
            if n_bytes > N_BYTES_FRAME_MAX:
                raise Ended("what came was no frame")
            data = self._take(n_bytes)
        try:
            message: T = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise Garbled(f"what came was no message: {error}") from error
        return message

    def wait(self, seconds: float) -> bool:
        """Wait so long for something to come; return whether it did. Raises: Ended."""
        with self._waiting:
            try:
                return self._has_more or self._comes_within(seconds)
            except (OSError, ValueError) as error:
                raise Ended(str(error)) from error

    def close(self) -> None:
        """Close this end once nobody waits at it; the other end must be closed, so that nobody waits for long.

        A thread that the other end's closing wakes looks at the number of its socket again, which by then could be another socket's.
        """
        with self._waiting:
            self._socket.close()

    def _comes_within(self, seconds: float) -> bool:
        poller = select.poll()  # `select.select` takes no socket with a number above 1,023
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    @property
    def _has_more(self) -> bool:
        return self._read < self._filled

    def _take(self, n_bytes: int) -> bytearray:
        """Return so many bytes. Memory is taken as they come: a length from a process that has gone wrong may be any."""
        data = bytearray(min(n_bytes, N_BYTES_AT_ONCE))
        self._fill(memoryview(data))
        while len(data) < n_bytes:
            piece = bytearray(min(n_bytes - len(data), N_BYTES_AT_ONCE))
            self._fill(memoryview(piece))
            data += piece
        return data

    def _fill(self, view: memoryview) -> None:
        while len(view):
            if not self._has_more and len(view) < N_BYTES_AHEAD:
                self._read, self._filled = 0, self._receive_into(self._ahead)
            if self._has_more:
                n = min(len(view), self._filled - self._read)
                view[:n] = self._ahead[self._read : self._read + n]
                self._read += n
            else:
                n = self._receive_into(view)
            view = view[n:]

    def _receive_into(self, view: memoryview) -> int:
        try:
            n = self._socket.recv_into(view)
        except OSError as error:
            raise Ended(str(error)) from error
        if not n:
            raise Ended("the other side has closed")
        return n
