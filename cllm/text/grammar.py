"""Compiles what an answer must look like, and follows a sequence's tokens through it.

llguidance does the work: for each state of an answer it tells which tokens of the vocabulary may come next (a bit each, 5 to 50 us for
152,000 tokens). Every source becomes a Lark grammar, in which tools and surfaces can embed schemas (`json_rule`).

Native code compiles recursively: the caller of `Grammars.compile` provides the stack (`N_BYTES_STACK`) and does not wait for ever.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Final, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from cllm.backend import Vocabulary
from cllm.errors import GrammarInvalid
from cllm.text import gbnf, schema
from cllm.text.schema_parts import Schema, parts

Words: TypeAlias = npt.NDArray[np.uint32]

N_CHARS_MAX: Final = {"schema": 131_072, "other": 65_536}
N_CHOICES_MAX: Final = 1024
N_BYTES_STACK: Final = 256 << 20  # 64 MiB carry 3,200 schemas that refer to one another, or 6,400 rules: about what fits into the source
N_GRAMMARS_KEPT: Final = 64
N_TOKENIZERS_KEPT: Final = 4  # some tens of megabytes each, of large vocabularies
N_PLACES_TRIED: Final = 200  # to find out which part of a schema is at fault
PLACES_S: Final = 0.5  # of the thread's own time for that: a part may take as long as the schema did
# Where a schema begins in Lark. What is no code there, as llguidance reads it, is stepped over: comments, special tokens, strings and
# expressions. One that is not closed is its error, and reaches to its end here, or each mark behind it would be tried in turn.
_JSON_RULE: Final = re.compile(r'(?:#|//)[^\n]*|<[^<>\s]+>|"(?:\\.|[^"\\\n])*"?|/(?:\\.|[^/\\])+/?|(?P<json>%json\s*)')

# Bounds of what a request may take of everybody's step: 100,000 units of the lexer's fuel are some 7 ms, 300,000 items 30 ms, which is what
# the mask of a grammar that is read by characters takes of 152,000 tokens.
#
# The lexer keeps each state that it comes across: where characters are counted one for each byte of a text, and three to sixteen with the
# masks on the way, which for most grammars are a few thousand in all. A state takes 0.4 to 0.6 kB: a lexer that is full has some 35 MB, as
# long as its grammar is kept, and if every one that is kept had held long texts that are counted, they would have 2 GB.
_LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=300_000,
    max_lexer_states=60_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
# Otherwise only the tokens that the tokeniser itself would choose could spell what is certain; a model may spell it its own way.
_OPTIONS: Final = '\n%llguidance {"no_forcing": true}\n'
REMADE_S: Final = 0.1  # of a thread's time: what takes longer to compile is not made anew within a step
N_TOKENS_BETWEEN: Final = 64  # that a text goes on by before its grammar is made anew for it again,
N_REMADE_SHARED: Final = 8  # or so often within as many, where others are held to it, too, and fill the lexer with it
N_TOKENS_FED: Final = 64  # at a time: the lexer has new fuel with each mask, and takes some 30 units for a token


class Kind(Enum):
    """In which language a source is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # which the whole answer matches
    CHOICE = "choice"  # a JSON array of strings: the answer is one of them
    GRAMMAR = "grammar"  # GBNF, or Lark
    LARK = "lark"  # of our own making: without the limits for what clients send


@attrs.frozen
class GrammarSource:
    """What is to be compiled."""

    kind: Kind
    text: str


ANY_OBJECT: Final = GrammarSource(Kind.JSON_SCHEMA, '{"type":"object"}')


def json_rule(schema_text: str) -> str:
    """A rule's body, for a Lark source: JSON that fits the schema. Raises: GrammarInvalid."""
    _check_size(GrammarSource(Kind.JSON_SCHEMA, schema_text))
    return "%json " + json.dumps(schema.prepared(schema_text))


class GrammarState:
    """Where one sequence stands in its grammar. One caller at a time, from any thread."""

    __slots__ = (
        "_address", "_grammar", "_mask", "_matcher", "_n_remade", "_n_tokens_remade", "_origin", "_tokens", "failure", "is_done"
    )  # fmt: skip

    def __init__(self, grammar: Grammar, n_words: int) -> None:
        self._grammar = grammar
        self._origin = grammar.join()
        self._matcher = self._origin.deep_copy()
        self._tokens: list[int] = []
        self._n_tokens_remade = -N_TOKENS_BETWEEN  # how many they were when the grammar was made anew for this one,
        self._n_remade = 0  # and how often it has been since then
        self._mask = np.zeros(n_words, np.uint32)
        self._address = self._mask.ctypes.data
        self.is_done = False  # nothing may follow but the end
        self.failure: str | None = None  # why the sequence cannot go on

    def mask(self) -> Words:
        """Which tokens may come next: bit i % 32 of word i // 32 is token i's. Valid until the next call; all 0 after a failure."""
        self._compute()
        while self._matcher.is_error() and self._moves():
            self._compute()
        if self._matcher.is_error():
            self._fail()
        elif not self._mask.any():
            self.failure = "no token of the vocabulary fits what must come next"
        return self._mask

    def accept(self, token: int) -> None:
        """Take note of a token that was drawn. If the lexer is full, the next mask, for which there is time, goes on with another."""
        if self.is_done:
            return
        self._tokens.append(token)
        self._matcher.consume_token(token)
        if self._matcher.is_error():
            if self.failure is None and self._is_lexers_failure():
                return
            self._fail()
        self.is_done = self._matcher.is_stopped()

    def _compute(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._address, self._mask.nbytes)

    def _moves(self) -> bool:
        """Go on with another lexer where that of all has failed, be it for what others wrote. Returns whether there is one to try."""
        if self.failure is not None or not self._is_lexers_failure():
            return False
        if self._origin is self._grammar.origin:  # nobody else had it made anew
            if len(self._tokens) - self._n_tokens_remade >= N_TOKENS_BETWEEN:
                self._n_tokens_remade, self._n_remade = len(self._tokens), 0
            n_most = N_REMADE_SHARED if self._grammar.is_shared else 1
            if self._n_remade >= n_most or not self._grammar.remake(self._origin):
                return False
            self._n_remade += 1
        self._origin = self._grammar.join()
        self._matcher = self._origin.deep_copy()
        for i in range(0, len(self._tokens), N_TOKENS_FED):
            self._compute()
            self._matcher.consume_tokens(self._tokens[i : i + N_TOKENS_FED])
        return True

    def _fail(self) -> None:
        self._mask[:] = 0
        self._grammar.is_spent |= self._origin is self._grammar.origin and self._is_lexers_failure()
        self.failure = _why_stopped(self._matcher.get_error()) or "the grammar does not allow this token"

    def _is_lexers_failure(self) -> bool:
        return self._matcher.get_error().startswith("lexer error")


OnStack: TypeAlias = Callable[[Callable[[], LLMatcher]], LLMatcher | None]
"""Calls what it is given on a thread with `N_BYTES_STACK`; None where there is no room for one."""


class Grammar:
    """A compiled grammar, of one vocabulary. Thread-safe.

    All its sequences share one lexer: their matchers are copies of `origin`, which copies everything else. When the lexer has more states
    than it may, it fails for good and for all of them. But its states are a cache, and it is done as RE2 does with its own: they are thrown
    away by making the grammar anew, and each sequence goes on from its tokens with what it needs of them. A text fails that alone needs too
    many, or whose grammar had to be made anew too often beside others; all fail whose grammar takes too long to compile for that.
    """

    def __init__(self, make: Callable[[], LLMatcher], n_words: int, clock: Callable[[], float], on_stack: OnStack | None) -> None:
        self._make = make
        self._n_words = n_words
        began_s = clock()
        self.origin = make()
        self._on_stack = on_stack if clock() - began_s < REMADE_S else None
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._n_on_origin = 0  # states that have begun with the origin, or moved to it
        self.is_spent = False  # the lexer has failed, and was not made anew

    @property
    def is_shared(self) -> bool:
        """Whether several have written to the lexer that is now."""
        return self._n_on_origin > 1

    def join(self) -> LLMatcher:
        """The origin, for one more state that goes on with a copy of it."""
        with self._counting:
            self._n_on_origin += 1
            return self.origin

    def start(self, tokens: Sequence[int] = ()) -> GrammarState:
        """Return the state after `tokens`, which is how one is rebuilt. Costs microseconds."""
        state = GrammarState(self, self._n_words)
        for token in tokens:
            state.accept(token)
        return state

    def remake(self, spent: LLMatcher) -> bool:
        """Have another origin than `spent`, with an empty lexer. Returns whether there is one; takes as long as compiling did."""
        with self._lock:
            made = self._on_stack(self._make) if self.origin is spent and self._on_stack is not None else None
            if made is not None:
                with self._counting:
                    self.origin, self.is_spent, self._n_on_origin = made, False, 0
            return self.origin is not spent


class Grammars:
    """Compiles for one vocabulary, and keeps what was compiled last. Thread-safe.

    The first for a vocabulary of 152,000 tokens takes a second, and nothing else runs in Python meanwhile; a few vocabularies' are kept,
    for who loads a model again, or an adapter of it.
    """

    def __init__(self, vocabulary: Vocabulary, clock: Callable[[], float] = time.thread_time) -> None:
        """`clock` gives seconds for looking for what is at fault."""
        self._clock = clock
        tokens = _Tokens(vocabulary)
        self._tokenizer = _tokenizer_of(tokens)
        self._n_words = (len(tokens.tokens) + 31) // 32
        self._kept: OrderedDict[GrammarSource, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def known(self, source: GrammarSource) -> Grammar | None:
        """The grammar, if it was compiled not long ago and is of use."""
        with self._lock:
            grammar = self._kept.pop(source, None)
            if grammar is None or grammar.is_spent:
                return None
            self._kept[source] = grammar
            return grammar

    def compile(self, source: GrammarSource, on_stack: OnStack | None = None) -> Grammar:
        """Compile; blocks, mostly without the GIL, and needs `N_BYTES_STACK` of stack. Raises: GrammarInvalid.

        With `on_stack` the grammar can be made anew while sequences are held to it.
        """
        grammar = self._compiled(source, on_stack)
        with self._lock:
            self._kept[source] = grammar
            while len(self._kept) > N_GRAMMARS_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _compiled(self, source: GrammarSource, on_stack: OnStack | None) -> Grammar:
        if source.kind is not Kind.JSON_SCHEMA:
            return self._compiled_lark(_lark(source), on_stack)
        _check_size(source)
        prepared = schema.prepared(source.text)
        try:
            return self._compiled_lark(_start(prepared), on_stack)
        except GrammarInvalid as error:
            is_too_much = _TOO_MUCH.search(error.complaint) is not None  # that is the fault of no part, and trying them would take long
            raise GrammarInvalid(error.complaint, "#" if is_too_much else _place_at_fault(prepared, self._clock)) from None

    def _compiled_lark(self, lark: str, on_stack: OnStack | None) -> Grammar:
        return Grammar(partial(self._origin, lark), self._n_words, self._clock, on_stack)

    def _origin(self, lark: str) -> LLMatcher:
        """The matcher of which sequences have copies. Raises: GrammarInvalid."""
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(lark + _OPTIONS), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarInvalid(_complaint(matcher.get_error()))
        first = np.zeros(self._n_words, np.uint32)
        matcher.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)  # which the copies have, too: what it costs is paid once
        if matcher.is_error():
            raise GrammarInvalid(f"no answer could fit: {_why_stopped(matcher.get_error())}")
        if not first.any():
            raise GrammarInvalid("no answer could fit: no token of the vocabulary fits what must come first")
        return matcher


class _Tokens:
    """A vocabulary as llguidance wants it: control tokens begin with a byte that no text has."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens: list[bytes] = []
        self.special_token_ids: list[int] = []
        self.bos_token_id = vocabulary.bos
        for token in range(vocabulary.n_tokens):
            data = vocabulary.token_bytes(token)
            if not data:
                data = b"\xff" + vocabulary.token_bytes(token, special=True)
                self.special_token_ids.append(token)
            self.tokens.append(data)
        self.end_tokens = sorted(vocabulary.end_tokens) or [self._stand_in()]
        self.eos_token_id = self.end_tokens[0]

    def _stand_in(self) -> int:
        """A model that never ends by itself still gets a token for it, beyond all others: no logit is there for it."""
        self.tokens.append(b"\xff<end>")
        self.special_token_ids.append(len(self.tokens) - 1)
        return len(self.tokens) - 1

    def digest(self) -> bytes:
        """The same for vocabularies that are the same to llguidance."""
        lists = [len(token) for token in self.tokens], self.special_token_ids, self.end_tokens
        bos = -1 if self.bos_token_id is None else self.bos_token_id
        numbers = [bos, *map(len, lists), *itertools.chain.from_iterable(lists)]
        return hashlib.sha256(array("q", numbers).tobytes() + b"".join(self.tokens)).digest()

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of a text; nobody needs them under `_OPTIONS`."""
        return []


_tokenizers: OrderedDict[bytes, LLTokenizer] = OrderedDict()
_tokenizers_lock = threading.Lock()


def _tokenizer_of(tokens: _Tokens) -> LLTokenizer:
    key = tokens.digest()
    with _tokenizers_lock:
        tokenizer = _tokenizers.get(key)
    if tokenizer is None:
        tokenizer = LLTokenizer(TokenizerWrapper(tokens), eos_token=tokens.end_tokens)
    with _tokenizers_lock:
        _tokenizers[key] = tokenizer
        _tokenizers.move_to_end(key)
        while len(_tokenizers) > N_TOKENIZERS_KEPT:
            _tokenizers.popitem(last=False)
    return tokenizer


# --- sources to Lark ---------------------------------------------------------------------------------------------------


def _lark(source: GrammarSource) -> str:
    if source.kind is Kind.LARK:
        return source.text
    _check_size(source)
    if source.kind is Kind.REGEX:
        serialised = json.loads(LLMatcher.grammar_from_regex(source.text))
        return str(serialised["grammars"][0]["lark_grammar"])
    if source.kind is Kind.CHOICE:
        return _choice(source.text)
    return _with_checked_schemas(source.text) if gbnf.is_lark(source.text) else gbnf.to_lark(source.text)


def _choice(text: str) -> str:
    choices = json.loads(text)
    if not choices or len(choices) > N_CHOICES_MAX:
        raise GrammarInvalid(f"expected 1 to {N_CHOICES_MAX} choices, not {len(choices)}")
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)


def _with_checked_schemas(lark: str) -> str:
    """The schemas in a client's Lark are held to what those that come alone are."""
    written, pos, looked_at = [], 0, 0
    while match := _JSON_RULE.search(lark, looked_at):
        looked_at = match.end()
        if match["json"] is None:
            continue
        try:
            _, end = json.JSONDecoder().raw_decode(lark, match.end())
        except (ValueError, RecursionError):
            raise GrammarInvalid("%json: expected a JSON Schema") from None
        written += [lark[pos : match.start()], json_rule(lark[match.end() : end])]
        pos = looked_at = end
    return "".join([*written, lark[pos:]])


def _start(prepared: Schema) -> str:
    return "start: %json " + json.dumps(prepared)


def _place_at_fault(prepared: Schema, clock: Callable[[], float]) -> str:
    """The innermost part of a schema that does not compile by itself, or as far in as there is time to find out."""
    ends_at = clock() + PLACES_S
    shared: Schema = {name: prepared[name] for name in ("$defs", "definitions", "x-guidance") if name in prepared}
    fault, refers_to = "#", prepared.get("$ref")
    for pointer, part in parts(prepared)[1:N_PLACES_TRIED]:
        if pointer != refers_to and not pointer.startswith(fault + "/"):
            continue
        if clock() > ends_at:
            break
        error = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(_start({**shared, **part})), limits=_LIMITS)
        if error and _NOT_SHARED not in error:
            fault, refers_to = pointer, part.get("$ref")
    return fault


def _check_size(source: GrammarSource) -> None:
    n_max = N_CHARS_MAX["schema" if source.kind is Kind.JSON_SCHEMA else "other"]
    if len(source.text) > n_max:
        raise GrammarInvalid(f"it has {len(source.text)} characters, and {n_max} are the most that is compiled")


# --- complaints --------------------------------------------------------------------------------------------------------

_NOT_SHARED: Final = "does not exist"  # what a part refers to that is no definition
# What the compiler says of places is about the source that it sees, which is ours.
_PLACES: Final = re.compile(r"^at \d+\(\d+\): |^failed to compile JSON schema: | while processing json-schema:\S*|^\d+\(\d+\): ")
_EXCERPT: Final = re.compile(r"\n +\d+ \| .*", re.DOTALL)
_TOO_MUCH: Final = re.compile(r"too (large|big|many|complex)|exhausted|more than the compiler", re.IGNORECASE)
_ONE_OF: Final = re.compile(r"oneOf constraints are not supported.*")
_ENDINGS: Final = {"NoExtension": "nothing can complete it", "NoExtensionBias": "nothing can complete it"}
N_CHARS_COMPLAINT: Final = 300


def _complaint(error: str) -> str:
    """The compiler's error in one line."""
    if error.startswith("panic"):
        return "it is more than the compiler can take"
    error = _EXCERPT.sub("", error)
    error = _ONE_OF.sub("oneOf is supported where its schemas exclude one another", error)
    while error != (shorter := _PLACES.sub("", error)):
        error = shorter
    return " ".join(line.strip() for line in error.splitlines() if line.strip("^ "))[:N_CHARS_COMPLAINT]


def _why_stopped(error: str) -> str:
    """The first line of what the matcher says."""
    line = error.partition("\n")[0]
    return _ENDINGS.get(line, line[:N_CHARS_COMPLAINT])
