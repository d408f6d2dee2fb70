"""Conversations to token ids with a mask of what the model must write, and those to batches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from random import Random

import attrs
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from .about import ABOUT
from .corpus import Mix, conversations
from .exchange import Conversation, Raw
from .render import segments
from .tokenizer import CONTROL, USER_DEFINED

N_TOKENS_MAX = 1280  # of a training text; what is longer is cut

SPECIAL = re.compile("|".join(map(re.escape, CONTROL + USER_DEFINED)))


@attrs.frozen
class Text:
    tokens: list[int]
    wanted: list[bool]  # of the same length: whether the model must write this token


@attrs.frozen
class Batch:
    tokens: NDArray[np.int64]  # (rows, length), padded with 0 on the right
    weights: NDArray[np.float32]  # of the same shape: of predicting this token from those before it


def vocabulary_corpus(n: int = 6000) -> list[str]:
    """What the vocabulary is trained on: a sample of everything, and the fixed answers often enough to be cut into words."""
    parts = [text for conversation in conversations(0, n) for text, _ in segments(conversation)]
    fixed = [text for answer, questions in ABOUT for text in (answer, answer, *questions)] * 20
    return [piece for text in parts + fixed for piece in SPECIAL.split(text) if piece]


def encode(tokenizer: Tokenizer, conversation: Conversation | Raw) -> Text:
    tokens: list[int] = []
    wanted: list[bool] = []
    for text, is_answer in segments(conversation):
        ids = tokenizer.encode(text).ids
        tokens += ids
        wanted += [is_answer] * len(ids)
    return Text(tokens[:N_TOKENS_MAX], wanted[:N_TOKENS_MAX])


def batch_of(texts: list[Text]) -> Batch:
    length = max(len(text.tokens) for text in texts)
    tokens, weights = np.zeros((len(texts), length), np.int64), np.zeros((len(texts), length), np.float32)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = text.tokens
        # By the root of the answer's length: neither do long copies drown the sums, nor do their last words count for nothing.
        weights[row, : len(text.tokens)] = np.array(text.wanted, np.float32) / max(1, sum(text.wanted)) ** 0.5
    return Batch(tokens, weights)


def cut(texts: list[Text], n_tokens: int) -> list[Batch]:
    """Batches of texts of near lengths, at most `n_tokens` with the padding, in order of length."""
    batches: list[Batch] = []
    pending: list[Text] = []
    for text in sorted(texts, key=lambda each: len(each.tokens)):
        if pending and len(text.tokens) * (len(pending) + 1) > n_tokens:
            batches.append(batch_of(pending))
            pending = []
        pending.append(text)
    return [*batches, batch_of(pending)]


def shard(tokenizer: Tokenizer, seed: int, mix: Mix, n_conversations: int, n_tokens: int, n_parts: int) -> Iterable[list[Batch]]:
    """Yield the steps of one shard: each has a short, a middle and a long batch (for `n_parts` 3), so that no step is of one task."""
    batches = cut([encode(tokenizer, each) for each in conversations(seed, n_conversations, mix)], n_tokens)
    rng = Random(seed)
    n_steps = len(batches) // n_parts
    strata = [batches[i * n_steps : (i + 1) * n_steps] for i in range(n_parts)]
    for stratum in strata:
        rng.shuffle(stratum)
    return (list(step) for step in zip(*strata, strict=True))
