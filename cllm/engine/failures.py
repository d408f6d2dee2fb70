"""Why a sequence ends without what was asked for."""

from __future__ import annotations

from cllm.engine.sequence import Sequence
from cllm.errors import DeadlineExceeded, GenerationFailed


def too_late() -> DeadlineExceeded:
    """Its time was over before anything of it could be told."""
    return DeadlineExceeded("timeout_s passed before the first token", param="timeout_s")


def in_vain(prompt_s: float, left_s: float) -> DeadlineExceeded:
    """Its time would be over before its prompt were computed."""
    message = f"timeout_s leaves {max(left_s, 0.0):.2g} s, and the prompt alone would take about {prompt_s:.2g} s"
    return DeadlineExceeded(message, param="timeout_s", code="wait_too_long")


def without_token(sequence: Sequence) -> GenerationFailed:
    """Why no token could be drawn for it."""
    grammar = sequence.sampler.grammar
    if grammar is not None and grammar.failure is not None:
        return GenerationFailed(f"the answer cannot be held to what was asked: {grammar.failure}", code="grammar_failed")
    if sequence.sampler.is_contradicted():
        return GenerationFailed("the answer cannot be held to what was asked: logit_bias forbids all that may come", code="grammar_failed")
    return invalid_logits()


def unread(error: Exception) -> GenerationFailed:
    """What the model said could not be read."""
    failure = GenerationFailed("the answer could not be read", code="answer_unread")
    failure.__cause__ = error
    return failure


def invalid_logits() -> GenerationFailed:
    """What the model computed is no numbers."""
    return GenerationFailed("the model's logits are not numbers", code="invalid_logits")
