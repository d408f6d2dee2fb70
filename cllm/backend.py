"""The seam between the engine and a model: the protocols and value types that are all a backend needs to import.

A backend is a distribution with an entry point in the group ``cllm.backends``. The entry point names a callable without
arguments that gives a `Backend`. Errors are those of `cllm.errors`, by name; any other exception that leaves a model's call is
taken for `StepFailed`, a panic of Rust's and SystemExit too. Numbers are Python's own, but in arrays: no others become JSON.

Words. *Slot*: the model's place for one sequence, ``0 <= slot < n_slots``. *Cell*: the KV of one token. *Row*: one token to
compute in a step. *Output*: a row whose logits are wanted. Positions count from 0 within a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, Literal, Protocol, TypeAlias, runtime_checkable

import attrs
import numpy as np
import numpy.typing as npt

from cllm.errors import RequestError

CONTRACT_VERSION: Final = 1
"""Grows when a backend written to this page would no longer work with the server, or the other way round."""

Logits: TypeAlias = npt.NDArray[np.float32]
Vectors: TypeAlias = npt.NDArray[np.float32]
Int32s: TypeAlias = npt.NDArray[np.int32]
Int8s: TypeAlias = npt.NDArray[np.int8]

OnProgress: TypeAlias = Callable[[float], bool]
"""Called with the loaded share, 0 to 1; an answer of False asks the load to stop with `LoadAborted`.

In a process of its own a load is taken to hang when it says nothing for ten minutes: the same share may be told again.
"""


# --- what is asked for ------------------------------------------------------------------------------------------------


class KvLayout(Enum):
    """How slots share the cells."""

    AUTO = "auto"
    UNIFIED = "unified"  # one pool: a slot may take all cells, prefixes are shared without copying
    STREAMS = "streams"  # an equal part for each slot: faster attention, no sharing


class FlashAttention(Enum):
    """Whether attention is computed without materialising its scores."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class SplitMode(Enum):
    """How a model is laid out over several GPUs."""

    NONE = "none"
    LAYER = "layer"
    ROW = "row"


class Pooling(Enum):
    """How the vectors of an input's rows become the input's."""

    MEAN = "mean"
    CLS = "cls"  # the first row's
    LAST = "last"
    RANK = "rank"  # none: the model gives how well a document answers a query


@attrs.frozen
class Lora:
    """A LoRA adapter that is active for every sequence from the start."""

    path: str
    scale: float = 1.0


@attrs.frozen(kw_only=True)
class ModelSpec:
    """What to load and how. None leaves the choice to the backend; a backend ignores what it has no use for.

    In a process of its own, what takes the place of a dead one is asked for the sizes that the first one had.
    """

    path: str
    n_cells: int | None = None  # KV capacity in tokens, of all sequences together; of an embedder tokens of one input at most
    n_live: int | None = None  # sequences that run at once
    n_rows_max: int = 2048  # rows of one step at most; a model may take fewer, but as many as `n_rows_physical`, or as it has cells
    n_rows_physical: int = 512  # rows computed at a time within a step (llama.cpp's ubatch)
    n_threads: int | None = None  # threads of a step with few rows
    n_threads_batch: int | None = None  # threads of a step with many rows
    n_gpu_layers: int | None = None  # layers on the GPU; None: all that fit. llama-cpu has none there
    kv_layout: KvLayout = KvLayout.AUTO
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: FlashAttention = FlashAttention.AUTO
    split_mode: SplitMode = SplitMode.LAYER
    main_gpu: int = 0
    tensor_split: tuple[float, ...] = ()
    mmap: bool = True
    mlock: bool = False
    loras: tuple[Lora, ...] = ()
    pooling: Pooling | None = None  # of an embedder, which is LoadFailed if it cannot do that one; None: as the model says
    keeps_prefixes: bool = True  # False: what is computed for a request is of no use to another. With steps, the engine sees to it
    options: Mapping[str, str] = attrs.field(factory=dict)  # a plugin's own settings, --backend-option NAME=VALUE


# --- what is given ----------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class ModelInfo:
    """Facts about a loaded model, for people and for `GET /v1/models`."""

    name: str
    architecture: str
    n_params: int
    size_bytes: int
    n_ctx_train: int  # the longest sequence that the model was trained for, tokens
    n_embd: int
    quantization: str = ""
    build: str = ""  # what computes was compiled for, as its library tells, and with how many threads; with another steps take other times
    cells_bytes: int = 0  # memory of all cells, and of what else slots keep; 0: not known
    fixed_bytes: int = 0  # of `cells_bytes`, what does not grow with the cells: recurrent states, sliding windows
    n_gpu_layers: int | None = None  # layers on the GPU, below zero for all; in a process of its own the next one is told so many
    mapped_bytes: int = 0  # of `size_bytes`, what is in the host's memory as pages of a file: the system counts them as free
    fingerprint: str = ""
    """Differs where saved states do not fit, and wherever equal tokens would not have equal cells: with other weights, other adapters or
    scales of theirs, other cache types, another build. The same in each process. Empty: saved states end with the process."""

    metadata: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a model's memory can do; the engine uses nothing that is False here."""

    can_share: bool  # `share` of any prefix; False: only of a whole slot, or not at all
    can_trim: bool  # `trim` to any length; False: only `drop` (recurrent and hybrid memory)
    can_save: bool  # `save` and `restore`
    can_abort: bool  # `abort` ends a running step early
    can_save_part: bool = False  # `save` from any position on; False: of whole slots only
    can_copy: bool = False  # `share` of a whole slot, where not of any prefix
    kv_layout: KvLayout = KvLayout.UNIFIED  # the layout in force, never AUTO


class Batch:
    """The rows of one step as columns, allocated once and refilled by the engine at every step, which only reads them: while it runs the
    engine reads them too, and goes on from them.

    Only the first `n_rows` entries of each column count. A slot's rows stand in order of their position, which goes on from the
    slot's cells without a gap. The columns keep their addresses for the life of the batch, so a backend may point native code at
    them: at those of the batch that it is given, since the engine has two and fills one while the step of the other runs.
    """

    __slots__ = ("n_outputs", "n_rows", "outputs", "positions", "slots", "tokens")

    def __init__(self, n_rows_max: int) -> None:
        self.n_rows = 0
        self.n_outputs = 0  # how many of `outputs` are set
        self.tokens: Int32s = np.zeros(n_rows_max, np.int32)
        self.positions: Int32s = np.zeros(n_rows_max, np.int32)
        self.slots: Int32s = np.zeros(n_rows_max, np.int32)
        self.outputs: Int8s = np.zeros(n_rows_max, np.int8)  # 1 where the row's logits are wanted


@attrs.frozen
class InfillTokens:
    """The special tokens by which a model is asked for the text between a prefix and a suffix."""

    prefix: int
    suffix: int
    middle: int


class Vocabulary(Protocol):
    """A model's tokens. Thread-safe, and independent of the step's caller; no call disturbs a running step."""

    n_tokens: int
    bos: int | None
    eos: int | None
    end_tokens: frozenset[int]  # tokens after which the model has nothing more to say (end of turn included)
    adds_bos: bool  # whether `add_special` puts bos first
    chat_template: str | None  # Jinja source from the model's metadata

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the token ids of `text`.

        `add_special` adds bos/eos as the model's metadata says; `parse_special` reads special tokens' text (``<|im_end|>``) as those
        tokens, and must be False for text that is not trusted to contain them. Lone surrogates are replaced. No text crashes this.

        Raises: TokenizeFailed for text that is too long for the tokeniser.
        Source: llama_tokenize (llama.h).
        """

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes that `token` adds to a text: maybe a part of a UTF-8 character, empty for control tokens.

        With `special`, control tokens give their name (``b"<|im_end|>"``).
        Raises: IndexError unless ``0 <= token < n_tokens``.
        """


def infill_of(vocabulary: Vocabulary) -> InfillTokens | None:
    """Return the fill-in-the-middle tokens: the attribute ``infill``, which a vocabulary need not have."""
    infill: InfillTokens | None = getattr(vocabulary, "infill", None)
    return infill


def tool_template_of(vocabulary: Vocabulary) -> str | None:
    """Return the Jinja source for conversations with tools: the attribute ``tool_template``, which a vocabulary need not have."""
    template: str | None = getattr(vocabulary, "tool_template", None)
    return template


@attrs.frozen
class FileVocabulary:
    """Stands for the vocabulary of a GGUF file, which the server then reads itself.

    It is for who has no tokeniser, or none that can be asked while the model computes.
    """

    path: str


class StepModel(Protocol):
    """A model that computes rows; scheduling and sampling are the engine's.

    Every call blocks; there is one caller at a time, not always from the same thread, except `abort`, which may come from any thread
    at any moment. Slots begin empty. A call that `capabilities` rules out raises StepFailed and changes nothing, but for `abort`, which
    then has no effect.
    """

    vocabulary: Vocabulary
    info: ModelInfo
    capabilities: Capabilities
    n_cells: int  # KV capacity in tokens, of all slots together
    n_cells_slot: int  # cells that one slot can hold: `n_cells` when they are pooled
    n_slots: int
    n_rows_max: int  # rows of one step at most

    def step(self, batch: Batch) -> Logits:
        """Compute the batch's rows, filling one cell each; return the outputs' logits.

        Returns float32 of shape (batch.n_outputs, vocabulary.n_tokens) in the order of the rows. It is a view of the model's own
        memory, which the caller may write to, and is valid until the next call of any method but `abort`.

        Raises: NoRoom, every slot is as it was · Aborted, so it is too, where slots can be trimmed · StepFailed, the slots of this batch
        are undefined, as after Aborted elsewhere · ModelDied.
        Source: llama_decode (llama.h).
        """

    def share(self, source: int, target: int, n_tokens: int) -> None:
        """Let the empty slot `target` begin with the first `n_tokens` cells of `source`, which keeps them.

        Where `can_share`, that takes no cells. Otherwise, where `can_copy`, a whole slot is copied, cell by cell.

        Raises: NoRoom for a copy, the target is still empty · StepFailed for what this memory cannot share.
        Source: llama_memory_seq_cp (llama.h).
        """

    def trim(self, slot: int, n_keep: int) -> None:
        """Free the cells of `slot` at positions ``>= n_keep``. Source: llama_memory_seq_rm (llama.h)."""

    def drop(self, slot: int) -> None:
        """Free all cells of `slot`; harmless on an empty one. Always possible: whatever it raises is taken for ModelDied."""

    def save(self, slot: int, start: int = 0) -> bytes:
        """Return the state of the cells of `slot` at positions ``>= start``, for `restore` by the same model.

        The slot stays as it is. Where it has no cells from `start` on, the state is an empty one.

        Raises: StepFailed when `start` is not 0 and this memory saves whole slots only.
        Source: llama_state_seq_get_data (llama.h).
        """

    def restore(self, slot: int, state: bytes) -> None:
        """Append the cells of `state` to `slot`, which must hold exactly the `start` cells that it was saved behind.

        That those are the same tokens' is the caller's to know. A state can be restored any number of times.

        Raises: NoRoom · StepFailed when `state` does not fit this model or this slot. The slot is as it was.
        Source: llama_state_seq_set_data (llama.h).
        """

    def abort(self) -> None:
        """Ask the running step to end with `Aborted`; without effect when none runs or `can_abort` is False."""

    def close(self) -> None:
        """Give back all memory; a second call is harmless. After it nothing is called but what may be called from any thread.

        A client that leaves does not wait for the thread that tokenises its text: calls of the vocabulary may be under way, which `close`
        waits for, and may come later, which raise ModelDied where the vocabulary is gone. `cllm serve` waits five seconds for it at its
        end.
        """


@attrs.frozen(kw_only=True)
class StreamChat:
    """A conversation, for a model that applies a chat template of its own. What is JSON is checked, and in OpenAI's shape."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()  # that may be called
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    template_variables: Mapping[str, Any] = attrs.field(factory=dict)
    continue_final_message: bool = False
    strict: bool = False  # whether calls of some of the tools must fit their schemas, as `strict` within these says


FormKind: TypeAlias = Literal["json_schema", "regex", "choice", "grammar"]


@attrs.frozen
class StreamForm:
    """What the text of an answer must be. For a model with a vocabulary the server has tried to compile it, and refused what is no form.
    For others it has seen that a JSON Schema is JSON.
    """

    kind: FormKind
    source: str  # the schema, or the list of choices, as JSON; the regular expression, which all of the text matches; GBNF or Lark
    field: str = ""  # the request's field that says so, for a refusal
    after: str = ""  # what ends the reasoning that comes before, which is free; empty: the form is all that comes


@attrs.frozen(kw_only=True)
class StreamRequest:
    """One sequence, as a `StreamModel` is asked for it. A field at its default asks for nothing.

    The prompt is tokens. Where the model has no vocabulary it is `text` or `chat` instead, or tokens that the client named by their ids.
    """

    prompt: tuple[int, ...] = ()
    text: str | None = None
    chat: StreamChat | None = None
    n_tokens_max: int | None = None  # tokens to generate at most; None, without a vocabulary only: as many as the model likes
    end_tokens: frozenset[int] = frozenset()  # the sequence is over with one of these, which is told too
    barred_tokens: frozenset[int] = frozenset()  # never drawn: end tokens that are to be ignored
    n_tokens_min: int = 0  # before so many were generated, no end token is drawn
    seed: int = 0  # of use where a seed can be heeded
    stop: tuple[str, ...] = ()  # without a vocabulary only: strings that end the text. The server looks for them too, and cancels
    n_logprobs: int | None = None  # the likeliest tokens to tell beside each drawn one, 0: its own logprob alone; None: no logprobs
    temperature: float = 1.0  # 0: always the likeliest token
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int | None = None  # the last tokens that it looks at, prompt and generated; None: as many as the model likes
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    form: StreamForm | None = None
    cache_salt: str = ""  # what was computed for a prompt is of use to requests of the same salt alone
    cache_prompt: bool = True  # False: it takes nothing of what was computed for others, and leaves nothing for them
    ignore_eos: bool = False  # without a vocabulary only


@attrs.frozen
class StreamToken:
    """The next token of a sequence."""

    seq_id: int
    token: int
    logprob: float | None = None  # the model's own, before any sampling; None unless it was asked for
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens with theirs, likeliest first


@attrs.frozen
class StreamCall:
    """A piece of a tool call: its name where it begins, and what comes next of its arguments, which are JSON."""

    call: int  # counts an answer's calls from 0
    name: str = ""
    arguments: str = ""


@attrs.frozen
class StreamLogprob:
    """How likely a drawn token was, by a model without a vocabulary, and the likeliest ones at its place, likeliest first."""

    token: bytes
    logprob: float  # the model's own, before any sampling
    top: tuple[tuple[bytes, float], ...] = ()


@attrs.frozen
class StreamText:
    """More of a sequence, by a model without a vocabulary: reasoning comes before content, and content before calls."""

    seq_id: int
    content: str = ""
    reasoning: str = ""
    calls: tuple[StreamCall, ...] = ()
    n_tokens: int = 1  # that this took, as far as is known
    logprobs: tuple[StreamLogprob, ...] = ()  # where asked for, of each of them


@attrs.frozen(kw_only=True)
class StreamUsage:
    """What a sequence took, by the count of a model without a vocabulary; the server has but guessed it."""

    n_prompt: int
    n_generated: int
    n_cached: int = 0  # tokens of the prompt that were known
    n_reasoning: int = 0  # generated tokens of the reasoning


@attrs.frozen
class StreamEnd:
    """Nothing more comes of a sequence: it has what it may have, or, with an `error` or a `refusal`, it failed."""

    seq_id: int
    error: str = ""  # one line for the log, if it is of interest to the operator; a client learns nothing of it
    refusal: RequestError | None = None  # what the client is told, and with what status, its `extra` numbers and texts; None: a 500
    is_cut: bool = False  # without a vocabulary only, as what follows: it ended for its length
    stop_reason: str | None = None  # the stop string that ended it, where the model has seen to that
    usage: StreamUsage | None = None


@attrs.frozen
class StreamBeat:
    """The model has come further, though nothing came of it: it computes a long prompt. Without these, long silence counts as hanging."""


StreamEvent: TypeAlias = StreamToken | StreamText | StreamEnd | StreamBeat


@runtime_checkable
class StreamModel(Protocol):
    """A model that schedules and samples by itself; queue, fairness, stop strings and streams are the server's.

    For what batches on its own: another engine, another server, a cluster. `open`, `start` and `cancel` come one after the other from one
    thread and do not block; `close` comes after them, from another one, and may. What the model has to tell, it tells from a thread of
    its own, or several.

    A model whose tokens are not known here has no vocabulary. It reads text and conversations, and tells `StreamText` instead of
    `StreamToken`.
    """

    @property
    def vocabulary(self) -> Vocabulary | FileVocabulary | None:
        """The model's tokens, as far as they are known here."""

    info: ModelInfo
    n_live_max: int  # sequences that it takes at once
    n_ctx: int  # tokens of one sequence at most, prompt and generated
    heeds: frozenset[str]
    """The names of what it heeds of a `StreamRequest` from `n_tokens_min` on, with the kinds of a `StreamForm` in the place of `form`; a
    request for another is refused, but for `seed`, which every request has, and `stop`, which the server looks for itself. Without a
    vocabulary also of `StreamChat` from `tools` on, and `prompt` for token ids.

    A model whose requests share nothing that was computed heeds `cache_salt` and `cache_prompt` by nature, and is to name them."""

    def open(self, tell: Callable[[StreamEvent], None]) -> None:
        """Take what events are told to, once, before the first `start`. `tell` may be called from any thread and returns at once."""

    def start(self, seq_id: int, request: StreamRequest) -> None:
        """Begin a sequence. Its tokens are told in order, then exactly one `StreamEnd`, unless it is cancelled.

        Raises: StepFailed, the sequence has failed and nothing is told of it · RequestError, the same, with what the client is told ·
        ModelDied.
        """

    def cancel(self, seq_id: int) -> None:
        """Give up a sequence; what is still told of it is not heard. Without effect on one that has ended."""

    def close(self) -> None:
        """Give back everything. Nothing is told afterwards; a second call is harmless. One that was never opened is closed, too.

        It may block; `cllm serve` waits five seconds for it at its end, and what it has not ended by then is left behind.
        """


@runtime_checkable
class TellsLogits(Protocol):
    """What a `StreamModel` has besides that can tell the logits behind its tokens, for `cllm verify`."""

    def logits(self, tokens: Sequence[int]) -> Logits:
        """Return what the successor of each token is scored with, computed as answers are; blocks. Called before `open`.

        Returns float32 of shape (len(tokens), n_tokens of the vocabulary), which is the caller's. Raises: StepFailed.
        """


def n_logprobs_max_of(model: StreamModel) -> int:
    """Return how many likeliest tokens a model that heeds `n_logprobs` tells: the attribute ``n_logprobs_max``, which it need not have."""
    n_max: int = getattr(model, "n_logprobs_max", 0)
    return n_max


def n_cells_of(model: StreamModel) -> int | None:
    """Return how many tokens such a model has room for: the attribute ``n_cells``, which it need not have.

    Who chooses it by the memory that is free tells it, an int, so that another process of the same model is given as many
    (`ModelSpec.n_cells`).
    """
    n_cells: int | None = getattr(model, "n_cells", None)
    return n_cells


@attrs.frozen(kw_only=True)
class Measure:
    """A number for `GET /metrics`, where its name begins with ``cllm_``.

    A name that the server has itself is the server's; labels are ``[a-zA-Z_][a-zA-Z0-9_]*``, but not ``model``, ``le`` or ``__...``.
    """

    name: str  # small letters, digits and underscores
    help: str
    value: float
    labels: Mapping[str, str] = attrs.field(factory=dict)  # measures of one name all have the same
    is_count: bool = True  # it only grows; False: it goes up and down


@runtime_checkable
class Measures(Protocol):
    """What a `StreamModel` has besides that keeps numbers of its own."""

    def measures(self) -> Sequence[Measure]:
        """Return them all as they are now; returns at once. From any thread, also while the model is closed and after that."""


class Embedder(Protocol):
    """A model that gives vectors instead of logits. Optional: a backend that has none leaves out what gives it, below.

    As with a `StepModel`, every call blocks, and there is one caller at a time. Slots begin empty. What takes the place of a dead one is
    asked for its `n_tokens_max`, as `ModelSpec.n_cells`, and for its `n_rows_max`: all its sizes have to be the same again.
    """

    vocabulary: Vocabulary
    info: ModelInfo
    pooling: Pooling
    n_embd: int  # numbers of a vector; 1 for RANK
    n_tokens_max: int  # tokens of one input at most; no more are taken than there are cells, or rows of a step where it cannot be split
    n_cells: int  # tokens of all inputs under way at most
    n_slots: int
    n_rows_max: int  # rows of one step at most
    can_split: bool  # whether an input's rows may come in several steps; False: each row sees all others, so that one step has them all

    def step(self, batch: Batch) -> Vectors:
        """Compute the batch's rows; return a vector for each, whatever the column of outputs says.

        Returns float32 of shape (batch.n_rows, n_embd), valid until the next call; the vectors have any length. For RANK, all rows of
        a slot have the slot's relevance so far, 0 to 1: the last row's step tells the input's.

        Raises: StepFailed, the slots of this batch are undefined until they are dropped · ModelDied.
        Source: llama_decode, llama_get_embeddings (llama.h).
        """

    def drop(self, slot: int) -> None:
        """Free all cells of `slot`; harmless on an empty one. Always possible: whatever it raises is taken for ModelDied."""

    def pair(self, query: str, document: str) -> list[int]:
        """Return the tokens of a query and a document as the model judges them together; for RANK only. From any thread.

        As the vocabulary's methods, also while it is closed and after that. Raises: TokenizeFailed · ModelDied.
        """

    def close(self) -> None:
        """Give back all memory; a second call is harmless."""


@runtime_checkable
class Embeds(Protocol):
    """What a `StepModel` has besides that can give vectors too."""

    def make_embedder(self, spec: ModelSpec) -> Embedder:
        """Make an embedder on the same weights, to be closed before the model. Of `spec` only its sizes and pooling count.

        Its `n_cells` are tokens of one input at most. Of a model in a process of its own, vectors come of another process: there
        `Backend.load` is called with the same `spec` before this, or `load_embedder` alone where the backend `LoadsEmbedders`.

        Raises: LoadFailed with one line for the operator; the model is as it was.
        """


@runtime_checkable
class LaysOut(Protocol):
    """What a `StepModel` has besides whose cells can be laid out anew while it is loaded.

    With an attribute `carries_states` that is true, a state that was saved from a slot's first cell on fits in any layout, under one
    `info.fingerprint`: what was computed is then carried over when the layout changes, and computed again otherwise.
    """

    layouts: frozenset[KvLayout]  # those that it can take, never AUTO; `lay_out` is not called where there is only one
    """One that can take both and is asked for `KvLayout.AUTO` is loaded as UNIFIED. Where another was asked for, it serves with that."""

    def lay_out(self, layout: KvLayout, n_slots: int) -> None:
        """Lay the cells out anew, as one of `layouts`; blocks. Every slot is empty after it, whatever comes of it.

        STREAMS divides the cells among `n_slots` slots, or fewer where a part would be too small. For UNIFIED the number does not
        count: it has the slots that the model makes there by itself. There are never more cells than at load, and maybe some less, where
        parts have to be rounded. `capabilities`, `info`, `n_cells`, `n_cells_slot` and `n_slots` are the new layout's afterwards;
        `n_rows_max` and the vocabulary stay. A saved state fits again where `info.fingerprint` is the one that it was saved under. What
        `make_embedder` made is not disturbed.

        Raises: LoadFailed when there is no memory for it, the layout is as it was · ModelDied when not even that can be had again ·
        StepFailed for a layout that is none of `layouts`, and only then the slots are as they were.
        """


@attrs.frozen
class Draw:
    """How a token is drawn from an output's logits, where the model draws it.

    Of all tokens `top_k` keeps so many of the likeliest; of these, at `truncation_temperature`, `top_p` keeps each before which the
    likelier ones have less than this share together, and `min_p` those that are at least so likely beside the likeliest. One of what is
    left is drawn, at `temperature`. Among equal logits the lower id is the likelier; the likeliest token always stays.
    """

    temperature: float  # above 0
    truncation_temperature: float  # above 0
    top_k: int  # 0: all; 1: the likeliest, whatever the key
    top_p: float  # 1: all
    min_p: float  # 0: all


@attrs.frozen(eq=False)
class Drawn:
    """What came of a step in which the model drew."""

    tokens: Int32s  # (outputs with a draw,)
    valid: npt.NDArray[np.bool_]  # of each of these: False where its logits held NaN or +inf or nothing finite
    logits: Logits  # (outputs without one, n_tokens), as of `StepModel.step`


@runtime_checkable
class DrawsTokens(Protocol):
    """What a `StepModel` has besides that can draw tokens where its logits are, on a device say, so that these need not come to the host.

    To read 64 rows of 152,000 logits once takes a host a millisecond, and to sample from them some more.
    """

    def step_and_draw(self, batch: Batch, draws: Sequence[Draw | None], keys: npt.NDArray[np.uint64]) -> Drawn:
        """Compute the batch's rows as `StepModel.step` does, and draw a token from each output that has a draw.

        `draws` and `keys` are those of the outputs, in the order of the rows. What is drawn depends on the output's logits, its draw and
        its key alone, never on what else is in the batch. Keys are even over all 64 bits; other keys give tokens that are independent.

        Raises: as `step`.
        """


@runtime_checkable
class LoadsEmbedders(Protocol):
    """What a `Backend` has besides that loads models for their vectors alone; its `load` raises DoesNotGenerate for those."""

    def load_embedder(self, spec: ModelSpec, on_progress: OnProgress) -> Embedder:
        """Load an embedder; blocks. The `n_cells` of `spec` are tokens of one input at most.

        Raises: LoadFailed · LoadAborted · BackendUnavailable.
        """


@runtime_checkable
class LoadsVocabularies(Protocol):
    """What a `Backend` has besides that can read the vocabulary of a file alone, with little time and memory."""

    def load_vocabulary(self, path: str) -> Vocabulary:
        """Read a vocabulary, which lives as long as it is used; blocks. Raises: LoadFailed · BackendUnavailable."""


@attrs.frozen(kw_only=True)
class Probe:
    """Whether a backend can work here."""

    available: bool
    reason: str = ""  # one line, never empty: what was found, or why not and what to install
    preference: int = 0  # `--backend auto` takes the available one with the highest; 0: only when named


@runtime_checkable
class Backend(Protocol):
    """What an entry point's callable gives.

    A model is a file for most backends, and a reference to GGUF files of the hub (`user/repo:Q4_K_M`) is fetched before `load` is called.
    One whose models have names of their own, or are fetched by itself, has an attribute `knows_models` that is True, and gets
    `ModelSpec.path` as the operator wrote it, empty where none was named.

    One whose models may end the process, or keep Python to themselves while they compute, has an attribute `wants_worker` that is True:
    its models are loaded in a process of their own, in which the entry point is called again, and which is replaced when it dies.
    """

    contract_version: int  # the CONTRACT_VERSION it was written to, as a number: the name would be the server's

    def probe(self) -> Probe:
        """Say whether this backend can work here. Cheap: well under a second, loads no model, never raises.

        Not asked of one that was named and whose models are loaded in a process of their own: there `load` says it (BackendUnavailable).
        """

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StepModel | StreamModel:
        """Load a model; blocks. Another one that is served may compute meanwhile, in another thread; so it is when this one is closed.

        Raises: LoadFailed with one line for the operator · LoadAborted · BackendUnavailable.
        """
