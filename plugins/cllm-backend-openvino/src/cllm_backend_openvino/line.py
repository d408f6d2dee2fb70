"""The line of those whose answers are held to a form, until theirs is compiled."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

from cllm.backend import StreamRequest
from cllm.errors import NotHeeded
from cllm_backend_openvino.forms import Grammar, refusal_of
from cllm_backend_openvino.trials import Failed, Trials


@attrs.frozen(eq=False)
class Asked:
    """A sequence that is to be begun."""

    request: StreamRequest
    config: Any  # OpenVINO's
    grammar: Grammar | None


class Line:
    """A thread of its own compiles, and lets go who may be begun, in order.

    OpenVINO looks for what is compiled when an answer's first token is drawn, and has to wait while anything is being compiled. So nothing
    is, as long as somebody is unsettled: let go, and without a token yet.
    """

    def __init__(self, trials: Trials, let_go: Callable[[int, Asked], bool], refuse: Callable[[int, Exception], None]) -> None:
        """The thread calls both: `let_go` says whether the sequence is still wanted, `refuse` is told NotHeeded, or what went wrong."""
        self._trials = trials
        self._let_go = let_go
        self._refuse = refuse
        self._waiting: deque[tuple[int, Asked]] = deque()
        self._unsettled: set[int] = set()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="openvino forms", daemon=True)

    def open(self) -> None:
        """Begin to work."""
        self._thread.start()

    def join(self, seq_id: int, asked: Asked) -> None:
        """Stand in line."""
        with self._changed:
            self._waiting.append((seq_id, asked))
            self._changed.notify()

    def leave(self, seq_id: int) -> None:
        """Wait for nothing any more: the sequence has a token, or has ended. Without effect on who is not here."""
        with self._changed:
            self._unsettled.discard(seq_id)
            self._waiting = deque(one for one in self._waiting if one[0] != seq_id)
            self._changed.notify()

    def close(self) -> None:
        """Let nobody go any more, and wait until nothing is being compiled."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        self._trials.close()

    def _run(self) -> None:
        while (first := self._first()) is not None:
            seq_id, asked = first
            try:
                self._compile(asked)
            except Exception as error:
                self.leave(seq_id)
                self._refuse(seq_id, error)
                continue
            if not self._let_go(seq_id, asked):
                self.leave(seq_id)

    def _first(self) -> tuple[int, Asked] | None:
        """Wait until the first in line has its turn, and take it; None when all is over. It is unsettled from here on."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._waiting and (not self._unsettled or self._is_known(self._waiting[0][1]))))
            if self._closed:
                return None
            first = self._waiting.popleft()
            self._unsettled.add(first[0])
            return first

    def _is_known(self, asked: Asked) -> bool:
        return asked.grammar is None or self._trials.knows(asked.grammar)

    def _compile(self, asked: Asked) -> None:
        form = asked.request.form
        assert asked.grammar is not None
        assert form is not None
        if any(self._trials.is_text(token) for token in asked.request.end_tokens):  # OpenVINO would have them nowhere but at the end
            raise NotHeeded("this model's backend cannot do stop_token_ids of text together with a form", param="stop_token_ids")
        if not self._trials.knows(asked.grammar):
            try:
                self._trials.compile(asked.grammar)
            except Failed as error:
                raise refusal_of(form, f"it: {error}") from error
