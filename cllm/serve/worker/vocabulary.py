"""A worker's vocabulary in its parent: tokens' bytes are known here, texts are tokenised there, so that none can crash the server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from cllm.errors import ModelDied, TokenizeFailed
from cllm.serve.worker import frames
from cllm.serve.worker.crossing import error_of
from cllm.serve.worker.frames import Ended
from cllm.serve.worker.process import WorkerProcess
from cllm.text.prompt import N_CHARS_SHORT

N_TRIES: Final = 5  # a request whose steps kill the process does so four times before it is found; a text beside it is not to blame
REVIVAL_S: Final = 60.0  # to wait for the next worker


class WorkerVocabulary:
    """See `cllm.backend.Vocabulary`. `tokenize` may wait for a new worker, and must not be called from the Trio thread."""

    n_chars_inline = -1  # of texts that are tokenised without a thread at most: none is, not even an empty one

    def __init__(self, facts: frames.VocabularyFacts, process: Callable[[float], WorkerProcess]) -> None:
        """`process` gives the worker that lives, waiting for one as long as it is told; it raises ModelDied."""
        self.n_tokens = facts.n_tokens
        self.bos = facts.bos
        self.eos = facts.eos
        self.end_tokens = facts.end_tokens
        self.adds_bos = facts.adds_bos
        self.chat_template = facts.chat_template
        self.tool_template = facts.tool_template
        self.infill = facts.infill
        self._texts, self._names = facts.texts, facts.names
        self._process = process
        self._locks = {"short": threading.Lock(), "long": threading.Lock()}

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """See `Vocabulary.token_bytes`."""
        if token < 0:
            raise IndexError(f"token {token} of {self.n_tokens}")
        return (self._names if special else self._texts)[token]

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """See `Vocabulary.tokenize`."""
        return self._tokens(frames.Tokenize(_bytes_of(text), add_special, parse_special), len(text))

    def pair(self, query: str, document: str) -> list[int]:
        """See `Embedder.pair`."""
        return self._tokens(frames.Pair(_bytes_of(query), _bytes_of(document)), len(query) + len(document))

    def _tokens(self, wish: frames.ToTokenizer, n_chars: int) -> list[int]:
        kind = "short" if n_chars <= N_CHARS_SHORT else "long"
        for _ in range(N_TRIES):
            try:
                return self._ask(wish, kind)
            except Ended:
                continue
        raise TokenizeFailed("the tokeniser's process died of this text, or beside it")

    def _ask(self, wish: frames.ToTokenizer, kind: str) -> list[int]:
        while True:
            self._process(REVIVAL_S)  # before its turn, or those behind it would wait for the next worker one after the other
            with self._locks[kind]:
                if (process := self._process_now()) is not None:
                    return self._answer(process, wish, kind)

    def _process_now(self) -> WorkerProcess | None:
        try:
            return self._process(0.0)
        except ModelDied:  # since its turn came, of another's text
            return None

    def _answer(self, process: WorkerProcess, wish: frames.ToTokenizer, kind: str) -> list[int]:
        channel = process.short if kind == "short" else process.long
        process.texts_under_way[kind] = True
        is_sent = False
        try:
            channel.send(wish)
            is_sent = True
            answer = channel.receive()
        except Ended as end:  # or silent for too long
            process.slay(end)
            raise
        except MemoryError as lack:
            if not is_sent:  # it is written down before anything is sent
                process.texts_under_way[kind] = False
                raise
            process.slay(lack)  # what is left of the answer would be taken for the next one's
            raise Ended("there is no memory for what it tells") from lack
        process.texts_under_way[kind] = False
        if isinstance(answer, frames.Failed):
            raise error_of(answer)  # of the text, or of the tokeniser's own doing: as it would be in this process
        tokens: list[int] = np.frombuffer(answer.data, np.int32).tolist()
        return tokens


def _bytes_of(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
