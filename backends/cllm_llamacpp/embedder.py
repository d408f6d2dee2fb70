"""Vectors from llama.cpp: a context of its own, on a model of its own or on a served one's weights."""

from __future__ import annotations

import ctypes
import functools
import math
import re
from contextlib import ExitStack
from typing import Any, Final

import attrs
import numpy as np

from cllm import machine
from cllm.backend import Batch, ModelInfo, ModelSpec, Pooling, Vectors, Vocabulary
from cllm.errors import BackendError, LoadFailed, ModelDied, StepFailed
from cllm_llamacpp import settings
from cllm_llamacpp.adapters import Adapters
from cllm_llamacpp.batch import BatchPointers
from cllm_llamacpp.codes import check_alive
from cllm_llamacpp.facts import Facts
from cllm_llamacpp.library import LOG
from cllm_llamacpp.pages import give_back_zeros
from cllm_llamacpp.vocabulary import LlamaVocabulary

_POOLING_NONE: Final = 0
_POOLING_RANK: Final = 4

_N_SLOTS: Final = 64  # inputs of one step at most
_N_SLOTS_WITH_STATE: Final = 8  # where each slot costs a state or a window of its own
N_TOKENS_OWN: Final = 8192  # of one input, if memory allows, for a model that does nothing else; OpenAI's limit
N_TOKENS_BESIDE: Final = 2048  # for one that has cells to generate with
_N_TOKENS_LEAST: Final = 512
_N_CELLS_BESIDE: Final = 512  # so many more, so that a short input need not wait for the end of the longest
_SHARE_OF_MEMORY: Final = 8  # the cells take one part in so many of what is free
_N_BYTES_OF_LOGITS: Final = 128 << 20  # llama.cpp keeps logits of every row, though nobody asks for them; where an input may be cut
_N_ROWS: Final = (32, 512)  # of one step, where an input may be cut


@attrs.frozen(kw_only=True)
class Sizes:
    """What a context for vectors is made for."""

    n_tokens_max: int
    n_cells: int
    n_rows_max: int
    n_slots: int
    can_split: bool


def sizes_of(spec: ModelSpec, facts: Facts, n_vocab: int, *, n_usual: int, free_bytes: int) -> Sizes:
    """Return how large to make it: an input that must be computed whole sets the rows of a step, else memory does.

    An input has as many tokens as the spec has cells, if it says so, else `n_usual`, as far as memory and the model's training go.
    """
    n_slots = _N_SLOTS_WITH_STATE if facts.has_recurrent_state or facts.has_window else _N_SLOTS
    if facts.sees_ahead:
        fitting = int(free_bytes / _SHARE_OF_MEMORY) // (4 * n_vocab)  # llama.cpp has logits of every row here, too
        n = max(1, min(facts.info.n_ctx_train, spec.n_rows_max, spec.n_cells or max(_N_TOKENS_LEAST, fitting)))
        return Sizes(n_tokens_max=n, n_cells=n, n_rows_max=n, n_slots=_N_SLOTS, can_split=False)
    fitting = settings.n_cells_in(free_bytes / _SHARE_OF_MEMORY, spec, facts)
    n_tokens = min(facts.info.n_ctx_train, spec.n_cells or max(_N_TOKENS_LEAST, min(n_usual, fitting)))
    least, most = _N_ROWS
    n_rows = min(max(_N_BYTES_OF_LOGITS // (4 * n_vocab) // least * least, least), most, spec.n_rows_max, n_tokens)
    n_cells = n_tokens + _N_CELLS_BESIDE
    if facts.n_ctx_unscaled is not None and n_tokens <= facts.n_ctx_unscaled:
        n_cells = min(n_cells, facts.n_ctx_unscaled)  # with more, llama.cpp gives all inputs the positions of long ones
    return Sizes(n_tokens_max=n_tokens, n_cells=n_cells, n_rows_max=n_rows, n_slots=n_slots, can_split=True)


def make_embedder(
    lib: Any,
    model: Any,
    facts: Facts,
    spec: ModelSpec,
    vocabulary: LlamaVocabulary,
    adapters: Adapters,
    parts: ExitStack,
    *,
    n_usual: int,
    gpu: bool,
) -> LlamaEmbedder:
    """Make a context for vectors, which `parts` frees until the embedder owns them, and try it. Raises: LoadFailed."""
    if facts.has_encoder:
        raise LoadFailed(f"{spec.path}: models with an encoder and a decoder give no vectors here")
    pooling = _pooling(spec, facts)
    sizes = sizes_of(spec, facts, vocabulary.n_tokens, n_usual=n_usual, free_bytes=machine.free_memory_bytes())
    LOG.forget()
    context = lib.llama_init_from_model(model, _context_params(lib, spec, facts, sizes, pooling, gpu=gpu))
    if not context:
        errors = LOG.last_errors()
        raise LoadFailed(f"{spec.path}: no context for vectors: {errors[0] if errors else 'no memory'}")
    parts.callback(lib.llama_free, context)
    adapters.activate(context)
    n_cells = sizes.n_cells if lib.llama_get_memory(context) else 0  # none are kept where rows see all others
    cells_bytes = sum(cache.n_bytes for cache in LOG.last_caches()) or int(settings.bytes_per_cell(spec, facts) * n_cells)
    info = attrs.evolve(facts.info, cells_bytes=cells_bytes)
    embedder = LlamaEmbedder(lib, model, context, info, sizes, pooling, vocabulary, gpu=gpu, has_recurrent_state=facts.has_recurrent_state)
    try:
        embedder.warm_up()
    except BackendError as error:
        raise LoadFailed(f"{spec.path}: {error}") from error
    return embedder


def _pooling(spec: ModelSpec, facts: Facts) -> Pooling:
    wanted = spec.pooling or facts.pooling or Pooling.MEAN
    if wanted is Pooling.RANK and facts.pooling is not Pooling.RANK:
        raise LoadFailed(f"{spec.path}: the model was not made to rank, and --pooling is rank")
    return wanted


def _context_params(lib: Any, spec: ModelSpec, facts: Facts, sizes: Sizes, pooling: Pooling, *, gpu: bool) -> Any:
    cells = attrs.evolve(spec, n_cells=sizes.n_cells, n_rows_max=sizes.n_rows_max, n_rows_physical=sizes.n_rows_max)
    params = settings.context_params(lib, cells, facts, free_bytes=0, gpu=gpu)
    params.n_seq_max = sizes.n_slots
    params.n_outputs_max = max(sizes.n_rows_max, sizes.n_slots)
    params.kv_unified = True
    params.embeddings = True
    # Rows are pooled above the seam, where an input's parts come together; only a ranking head is llama.cpp's.
    params.pooling_type = _POOLING_RANK if pooling is Pooling.RANK else _POOLING_NONE
    return params


class LlamaEmbedder:
    """See `cllm.backend.Embedder`."""

    def __init__(
        self,
        lib: Any,
        model: Any,
        context: Any,
        info: ModelInfo,
        sizes: Sizes,
        pooling: Pooling,
        vocabulary: LlamaVocabulary,
        *,
        gpu: bool,
        has_recurrent_state: bool,
    ) -> None:
        self._lib = lib
        self._gpu = gpu
        self._has_recurrent_state = has_recurrent_state
        self._context = context
        self._memory = lib.llama_get_memory(context)  # none where rows see all others: nothing is kept between steps
        self._parts: ExitStack | None = ExitStack()
        self._kept: tuple[object, ...] = ()
        self._vocabulary = vocabulary
        self._pairs = Pairs(lib, model, vocabulary)
        self._gives_shares = info.architecture in ("qwen3", "qwen3vl")  # whose ranking heads end with a softmax, others with a logit
        self.vocabulary: Vocabulary = vocabulary
        self.info = info
        self.pooling = pooling
        self.n_embd: int = 1 if pooling is Pooling.RANK else lib.llama_model_n_embd_out(model)
        self.n_tokens_max = sizes.n_tokens_max
        self.n_cells = sizes.n_cells
        self.n_slots = sizes.n_slots
        self.n_rows_max = sizes.n_rows_max
        self.can_split = sizes.can_split and bool(self._memory) and bool(lib.llama_get_causal_attn(context))
        self._pointers = BatchPointers(lib)
        self._given_back = (0, 0)  # address and bytes

    def own(self, parts: ExitStack, *kept: object) -> None:
        """Free `parts` when it is closed; `kept` is what they go on reading."""
        self._parts, self._kept = parts, kept

    def step(self, batch: Batch) -> Vectors:
        self._check(batch)
        code = self._lib.llama_decode(self._context, self._pointers.of(batch).first(batch.n_rows))
        check_alive(code, has_recurrent_state=self._has_recurrent_state, gpu=self._gpu)
        if code != 0:
            raise StepFailed(f"llama.cpp failed with code {code}")
        if not (self._memory or self._gpu):
            self._give_back_logits(batch.n_rows)
        return self._scores(batch) if self.pooling is Pooling.RANK else self._rows(batch.n_rows)

    def drop(self, slot: int) -> None:
        self._check_open()
        if self._memory:
            self._lib.llama_memory_seq_rm(self._memory, slot, -1, -1)

    def pair(self, query: str, document: str) -> list[int]:
        return self._pairs.tokens(query, document)

    def close(self) -> None:
        if self._parts is not None:
            parts, self._parts = self._parts, None
            parts.close()

    def warm_up(self) -> None:
        """Compute two rows. Raises: StepFailed · ModelDied."""
        batch = Batch(min(2, self.n_rows_max))
        batch.n_rows = batch.n_outputs = len(batch.tokens)
        batch.positions[:] = range(batch.n_rows)
        batch.outputs[:] = 1
        if not np.isfinite(self.step(batch)).any():
            raise StepFailed("its vectors are not numbers: the file is damaged, or was converted badly")
        self.drop(0)

    def _give_back_logits(self, n_rows: int) -> None:
        """The room that llama.cpp clears for the logits of each row before the vectors, up to gigabytes, which an encoder does not fill.

        With another number of rows the vectors lie elsewhere, where others' logits had room.
        """
        address = ctypes.cast(self._lib.llama_get_logits(self._context), ctypes.c_void_p).value or 0
        n_bytes = ctypes.sizeof(ctypes.c_float) * self.vocabulary.n_tokens * max(n_rows, self.n_slots)
        if (address, n_bytes) != self._given_back:
            give_back_zeros(address, n_bytes)
            self._given_back = address, n_bytes

    def _rows(self, n_rows: int) -> Vectors:
        address = ctypes.cast(self._lib.llama_get_embeddings(self._context), ctypes.c_void_p).value
        if address is None:
            raise StepFailed("llama.cpp gave no vectors")
        floats = (ctypes.c_float * (n_rows * self.n_embd)).from_address(address)
        rows: Vectors = np.ctypeslib.as_array(floats).reshape(n_rows, self.n_embd)
        return rows

    def _scores(self, batch: Batch) -> Vectors:
        slots = batch.slots[: batch.n_rows].tolist()
        scores = {slot: self._score(slot) for slot in set(slots)}
        return np.array([[scores[slot]] for slot in slots], np.float32)

    def _score(self, slot: int) -> float:
        outputs = self._lib.llama_get_embeddings_seq(self._context, slot)
        if not outputs:
            raise StepFailed("llama.cpp gave no score")
        first = float(outputs[0])  # of a softmax over "yes" and "no", or the only one
        return first if self._gives_shares else 1.0 / (1.0 + math.exp(-max(first, -700.0)))

    def _check(self, batch: Batch) -> None:
        """What llama.cpp answers with an assertion is a StepFailed here. Raises: StepFailed · ModelDied."""
        self._check_open()
        n = batch.n_rows
        if not 0 < n <= self.n_rows_max:
            raise StepFailed(f"a step takes 1 to {self.n_rows_max} rows, not {n}")
        limits = ((batch.slots, self.n_slots), (batch.tokens, self.vocabulary.n_tokens), (batch.positions, self.n_tokens_max))
        for column, n_values in limits:
            if column[:n].view(np.uint32).max() >= n_values:  # seen as unsigned, a negative number is a large one
                raise StepFailed(f"a slot, token or position is not below {n_values}")

    def _check_open(self) -> None:
        if self._parts is None:
            raise ModelDied("the model is closed")


N_QUERIES_KEPT: Final = 8  # each is asked with up to thousands of documents


class Pairs:
    """Writes a query and a document as a ranking model was trained on them."""

    def __init__(self, lib: Any, model: Any, vocabulary: LlamaVocabulary) -> None:
        vocab = lib.llama_model_get_vocab(model)
        template = lib.llama_model_chat_template(model, b"rerank")
        self._template = None if template is None else template.decode("utf-8", "replace")
        self._vocabulary = vocabulary
        separator = _known(_token(lib.llama_vocab_sep(vocab))) if lib.llama_vocab_get_add_sep(vocab) else []
        ends = bool(lib.llama_vocab_get_add_eos(vocab))
        end = _known(vocabulary.eos if vocabulary.eos is not None else _token(lib.llama_vocab_sep(vocab))) if ends else []
        self._start = _known(vocabulary.bos) if vocabulary.adds_bos else []
        self._between = [*end, *separator]
        self._end = end or separator  # BERT's own way has a separator at the end, too
        plain = functools.partial(vocabulary.tokenize, add_special=False, parse_special=False)
        self._query = functools.lru_cache(N_QUERIES_KEPT)(plain)
        self._query_names_tokens = functools.lru_cache(N_QUERIES_KEPT)(functools.partial(_names_tokens, vocabulary))

    def tokens(self, query: str, document: str) -> list[int]:
        """By the model's own template for it, else BOS query EOS SEP document EOS, as far as its tokeniser adds them."""
        if self._template is not None:
            before, _, after = self._template.partition("{query}")  # one after the other: a query may contain "{document}"
            before, after = before.replace("{document}", document), after.replace("{document}", document)
            if not (self._query_names_tokens(query) or _names_tokens(self._vocabulary, document)):
                return self._special(f"{before}{query}{after}")
            return self._apart(query, document)
        return [*self._start, *self._query(query), *self._between, *self._plain(document), *self._end]

    def _apart(self, query: str, document: str) -> list[int]:
        """Piece by piece, so that names of special tokens in what is judged are text, though the others may be split otherwise."""
        assert self._template is not None
        given = {"{query}": self._query(query), "{document}": self._plain(document)}
        pieces = re.split(r"(\{query\}|\{document\})", self._template)
        return [token for piece in pieces for token in (given[piece] if piece in given else self._special(piece))]

    def _special(self, text: str) -> list[int]:
        return self._vocabulary.tokenize(text, add_special=False, parse_special=True)

    def _plain(self, text: str) -> list[int]:
        return self._vocabulary.tokenize(text, add_special=False, parse_special=False)


def _names_tokens(vocabulary: LlamaVocabulary, text: str) -> bool:
    special, plain = (vocabulary.tokenize(text, add_special=False, parse_special=parse_special) for parse_special in (True, False))
    return special != plain


def _token(token: int) -> int | None:
    return None if token < 0 else token


def _known(token: int | None) -> list[int]:
    return [] if token is None else [token]
