"""What a server and a worker process say to each other: typed messages in MessagePack, each in a frame, over a socket pair."""

from __future__ import annotations

import socket
import struct
from typing import Any, Final, Generic, TypeVar

import msgspec

from cllm.backend import Capabilities, InfillTokens, ModelInfo, ModelSpec
from cllm.engine.curve import Curve
from cllm.engine.events import TokenLogprob
from cllm.engine.params import SamplingParams, StopParams

_LENGTH: Final = struct.Struct("<Q")
N_BYTES_FRAME_MAX: Final = 1 << 40  # beyond it, it was no frame
N_BYTES_VALUE_MAX: Final = (1 << 32) - 1  # of one value in MessagePack


class Ended(Exception):
    """The other side has closed the socket, or its process has ended."""


# --- how a model begins ------------------------------------------------------------------------------------------------


class Load(msgspec.Struct, tag=True, frozen=True):
    """The first message: which model. `factory` is the entry point's value, module:callable."""

    factory: str
    spec: ModelSpec
    log_level: int
    wants_vocabulary: bool = True


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


class Failed(msgspec.Struct, tag=True, frozen=True):
    """What was asked for raised. `error` is a name in `cllm.errors`; any other exception is a StepFailed."""

    error: str
    message: str


# --- a step ------------------------------------------------------------------------------------------------------------


class Moving(msgspec.Struct, frozen=True, array_like=True):
    """A memory move; `name` is that of its class in `cllm.engine.plan`."""

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


class Step(msgspec.Struct, tag=True, frozen=True):
    """One step's work. The columns are int32, `outputs` int8."""

    number: int  # of the step, for an abort to name
    moves: list[Moving]
    n_rows: int
    n_outputs: int
    tokens: bytes
    positions: bytes
    slots: bytes
    outputs: bytes
    drawings: list[Drawing]
    scorings: list[Scored]


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
    n_rows: int
    n_outputs: int
    tokens: bytes
    positions: bytes
    slots: bytes
    outputs: bytes


class Measure(msgspec.Struct, tag=True, frozen=True):
    """Ask for a curve."""


class Measured(msgspec.Struct, tag=True, frozen=True):
    """The curve."""

    curve: Curve


class Answer(msgspec.Struct, tag=True, frozen=True):
    """What a call gave: a state, logits, or nothing."""

    data: bytes = b""


class Tokenize(msgspec.Struct, tag=True, frozen=True):
    """A text to be tokenised; UTF-8 with surrogates passed."""

    text: bytes
    add_special: bool
    parse_special: bool


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End the step of this number."""

    number: int


ToWorker = Load | Proceed | Step | Call | Rows | Measure
FromWorker = Progress | Loaded | Failed | Stepped | Answer | Measured
FromTokenizer = Answer | Failed
T = TypeVar("T")


class Channel(Generic[T]):
    """One end of a socket pair, on which messages of the type `T` come. Each direction has one user at a time."""

    def __init__(self, end: socket.socket, incoming: Any) -> None:
        self._socket = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._length = bytearray(_LENGTH.size)

    def send(self, message: msgspec.Struct) -> None:
        """Send one message; blocks. Raises: Ended."""
        data = self._encoder.encode(message)
        try:
            self._socket.sendall(_LENGTH.pack(len(data)))
            self._socket.sendall(data)
        except OSError as error:
            raise Ended(str(error)) from error

    def receive(self) -> T:
        """Wait for the next message. Raises: Ended, also for what is no message."""
        self._fill(memoryview(self._length))
        (n_bytes,) = _LENGTH.unpack(self._length)
        if n_bytes > N_BYTES_FRAME_MAX:
            raise Ended("what came was no frame")
        data = bytearray(n_bytes)
        self._fill(memoryview(data))
        try:
            message: T = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise Ended(f"what came was no message: {error}") from error
        return message

    def _fill(self, view: memoryview) -> None:
        while len(view):
            try:
                n = self._socket.recv_into(view)
            except OSError as error:
                raise Ended(str(error)) from error
            if not n:
                raise Ended("the other side has closed")
            view = view[n:]
