"""Requests with exact token counts, the same for everyone who is measured: prompts are token ids, answers have as many tokens as asked."""

from __future__ import annotations

import random
from typing import Final

import attrs


@attrs.frozen(kw_only=True)
class Ask:
    """One request. A prompt is token ids, so that every server computes the same rows."""

    prompt: tuple[int, ...]
    n_generated: int


@attrs.frozen(kw_only=True)
class Sampling:
    """How a pass asks for its tokens to be drawn."""

    name: str
    fields: tuple[tuple[str, float], ...]


GREEDY: Final = Sampling(name="greedy", fields=(("temperature", 0.0),))
PLAIN: Final = Sampling(name="temperature 1", fields=(("temperature", 1.0),))
USUAL: Final = Sampling(name="0.8 / 0.95 / 40", fields=(("temperature", 0.8), ("top_p", 0.95), ("top_k", 40)))


def seed_workload(n_requests: int, *, n_prompt: int, n_generated: int, n_vocab: int, seed: int) -> list[Ask]:
    """Requests of equal shape with random prompts; another seed gives other prompts, so that no cache remembers the last pass."""
    rng = random.Random(seed)
    top = min(n_vocab, 100_000) - 300
    return [
        Ask(
            prompt=tuple(rng.randrange(256, 256 + top) if top > 256 else rng.randrange(40, 120) for _ in range(n_prompt)),
            n_generated=n_generated,
        )
        for _ in range(n_requests)
    ]
