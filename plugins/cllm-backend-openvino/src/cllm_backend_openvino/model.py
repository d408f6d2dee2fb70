"""A model that OpenVINO's pipeline computes and samples, driven step by step from one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import numpy as np

from cllm.backend import FileVocabulary, Logits, ModelInfo, StreamBeat, StreamEnd, StreamEvent, StreamRequest, StreamToken
from cllm.errors import ModelDied, NotHeeded, StepFailed
from cllm_backend_openvino.forms import grammar_of
from cllm_backend_openvino.line import Asked, Line
from cllm_backend_openvino.sampling import config_of, ends_here
from cllm_backend_openvino.scoring import Scorer
from cllm_backend_openvino.trials import Trials

FAILED_IN_A_ROW_MAX: Final = 3  # steps


@attrs.define(eq=False)
class _Live:
    """A sequence that the pipeline has."""

    handle: Any
    has_logprobs: bool
    ends_here: frozenset[int]  # tokens that end it, which the pipeline does not know of
    in_line: bool  # others wait until it has a token


class OpenVinoModel:
    """See `cllm.backend.StreamModel`.

    `start` and `cancel` leave word for the thread that drives the pipeline, which takes it between two steps. Nobody else touches the
    pipeline: its calls keep the GIL, and are not made to be called at once. Whose answer is held to a form stands in line before (`Line`).
    """

    n_logprobs_max = 0  # the drawn token's own alone
    n_cells: int | None = None  # tokens that there is room for, once it is loaded

    def __init__(
        self,
        pipeline: Any,
        info: ModelInfo,
        vocabulary: FileVocabulary,
        scorer: Scorer,
        *,
        heeds: frozenset[str],
        n_vocab: int,
        n_live_max: int,
        n_ctx: int,
    ) -> None:
        self._pipeline = pipeline
        self._vocabulary = vocabulary
        self._scorer = scorer
        self._n_vocab = n_vocab
        self.info = info
        self.n_live_max = n_live_max
        self.n_ctx = n_ctx
        self.heeds = heeds
        self._tell: Callable[[StreamEvent], None] = lambda _event: None
        self._changed = threading.Condition()
        self._wanted: set[int] = set()  # sequences that were begun and have neither ended nor been given up
        self._words: list[tuple[int, Asked | None]] = []  # for the thread: begin this, or, without it, give the sequence up
        self._line = Line(Trials(pipeline.get_tokenizer()), self._let_go, self._refuse)
        self._live: dict[int, _Live] = {}  # the thread's
        self._n_failed = 0  # steps in a row
        self._closed = False
        self._dead = ""
        self._thread = threading.Thread(target=self._run, name="openvino", daemon=True)

    @property
    def vocabulary(self) -> FileVocabulary:
        """See `StreamModel.vocabulary`."""
        return self._vocabulary

    def open(self, tell: Callable[[StreamEvent], None]) -> None:
        """See `StreamModel.open`."""
        self._tell = tell
        self._thread.start()
        self._line.open()

    def start(self, seq_id: int, request: StreamRequest) -> None:
        """See `StreamModel.start`."""
        self._check(request)
        grammar = grammar_of(request)
        asked = Asked(request, config_of(request, grammar), grammar)
        with self._changed:
            if self._dead:
                raise ModelDied(self._dead)
            if len(self._wanted) >= self.n_live_max:
                raise StepFailed(f"{self.n_live_max} sequences at once, and no more")
            self._wanted.add(seq_id)
            if grammar is None:
                self._words.append((seq_id, asked))
                self._changed.notify()
        if grammar is not None:
            self._line.join(seq_id, asked)

    def cancel(self, seq_id: int) -> None:
        """See `StreamModel.cancel`."""
        with self._changed:
            if seq_id in self._wanted:
                self._wanted.remove(seq_id)
                self._words.append((seq_id, None))
                self._changed.notify()
        self._line.leave(seq_id)

    def logits(self, tokens: Sequence[int]) -> Logits:
        """See `cllm.backend.TellsLogits`."""
        return self._scorer.logits(tokens)

    def close(self) -> None:
        """See `StreamModel.close`."""
        with self._changed:
            self._closed = True
            self._tell = lambda _event: None
            self._changed.notify()
        self._line.close()
        if self._thread.is_alive():
            self._thread.join()
        self._live.clear()
        self._pipeline = None
        self._scorer.close()

    def _check(self, request: StreamRequest) -> None:
        if not request.prompt or request.n_tokens_max is None or request.n_tokens_max < 1:
            raise StepFailed("a prompt and a number of tokens are wanted")
        if len(request.prompt) + request.n_tokens_max > self.n_ctx:
            raise StepFailed(f"{len(request.prompt)} and {request.n_tokens_max} tokens do not fit into {self.n_ctx}")
        if min(request.prompt) < 0 or max(request.prompt) >= self._n_vocab:
            raise StepFailed(f"a token is not below {self._n_vocab}")

    # --- in the line's thread -----------------------------------------------------------------------------------------

    def _let_go(self, seq_id: int, asked: Asked) -> bool:
        with self._changed:
            if seq_id not in self._wanted:
                return False
            self._words.append((seq_id, asked))
            self._changed.notify()
            return True

    def _refuse(self, seq_id: int, error: Exception) -> None:
        with self._changed:
            if seq_id not in self._wanted:
                return
            self._wanted.remove(seq_id)
        if isinstance(error, NotHeeded):
            self._tell(StreamEnd(seq_id, refusal=error))
        else:
            self._tell(StreamEnd(seq_id, " ".join(f"it cannot be begun: {type(error).__name__}: {error}".split())))

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while self._take_words():
            try:
                self._step()
            except Exception as error:
                self._fail(error)

    def _take_words(self) -> bool:
        """Wait for work; begin and give up what was asked for. Return whether to go on."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._words or self._live)
            words, self._words = self._words, []
            if self._closed:
                return False
        for seq_id, asked in words:
            if asked is not None:
                self._begin(seq_id, asked)
            elif (live := self._live.pop(seq_id, None)) is not None:
                live.handle.cancel()
        return True

    def _begin(self, seq_id: int, asked: Asked) -> None:
        import openvino

        request = asked.request
        prompt = openvino.Tensor(np.array([request.prompt], np.int64))
        try:
            handle = self._pipeline.add_request(seq_id, prompt, asked.config)
        except Exception as error:
            self._end(seq_id, f"it cannot be begun: {type(error).__name__}: {error}")
        else:
            self._live[seq_id] = _Live(handle, request.n_logprobs is not None, ends_here(request), in_line=asked.grammar is not None)

    def _step(self) -> None:
        """One step of everybody. It also frees the cells of those that were given up, be they all."""
        self._pipeline.step()
        self._n_failed = 0
        n_told = sum(self._tell_of(seq_id, live) for seq_id, live in list(self._live.items()))
        if self._live and not n_told:
            self._tell(StreamBeat())

    def _tell_of(self, seq_id: int, live: _Live) -> int:
        """Tell what came of a sequence; return how many tokens."""
        n_told = 0
        is_over, why = _state_of(live.handle)
        if live.in_line and live.handle.can_read():
            live.in_line = False
            self._line.leave(seq_id)
        while live.handle.can_read():
            for output in live.handle.read().values():
                for token, logprob in zip(output.generated_ids, output.generated_log_probs, strict=True):
                    self._tell(StreamToken(seq_id, token, logprob if live.has_logprobs else None))
                    n_told += 1
                    if token in live.ends_here:
                        live.handle.cancel()
                        self._end(seq_id)
                        return n_told
        if is_over:
            self._end(seq_id, why)
        return n_told

    def _end(self, seq_id: int, error: str = "") -> None:
        self._live.pop(seq_id, None)
        with self._changed:
            self._wanted.discard(seq_id)
        self._line.leave(seq_id)
        self._tell(StreamEnd(seq_id, " ".join(error.split())))

    def _fail(self, error: Exception) -> None:
        """A step failed: nobody knows what is left of those that were in it."""
        for seq_id, live in list(self._live.items()):
            live.handle.cancel()
            self._end(seq_id, f"OpenVINO's step failed: {type(error).__name__}: {error}")
        self._n_failed += 1
        if self._n_failed >= FAILED_IN_A_ROW_MAX:
            with self._changed:
                self._dead = "OpenVINO's steps fail, whatever is asked for"


def _state_of(handle: Any) -> tuple[bool, str]:
    """Whether a sequence is over, and why it failed. Looked at before its tokens are read, so that none comes in between."""
    import openvino_genai

    status = handle.get_status()
    if status == openvino_genai.GenerationStatus.RUNNING:
        return False, ""
    return True, "" if status == openvino_genai.GenerationStatus.FINISHED else f"OpenVINO gave it up: {status.name}"
