"""What a grammar takes, byte by byte."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cllm.bigstack import call_with_stack
from cllm.serve.grammars import on_stack
from cllm.testing.fake import END_OF_TURN, FakeVocabulary
from cllm.text.grammar import N_BYTES_STACK, Grammar, Grammars, GrammarSource

GRAMMARS = Grammars(FakeVocabulary())


def compiled(source: GrammarSource) -> Grammar:
    """Compile it as the server does."""
    return call_with_stack(partial(GRAMMARS.compile, source, on_stack), N_BYTES_STACK)


def allowed(words: Any) -> set[int]:
    """The tokens of a mask."""
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def takes(grammar: Grammar, text: str) -> bool:
    """Whether `text` may be written, and be all."""
    state = grammar.start()
    for byte in text.encode():
        if byte not in allowed(state.mask()):
            return False
        state.accept(byte)
    return state.is_done or END_OF_TURN in allowed(state.mask())
