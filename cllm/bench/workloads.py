"""Requests with exact token counts, the same for every server that is measured: seeded, so that a pass can be repeated or made fresh."""

from __future__ import annotations

import random
from typing import Final, Literal, TypeAlias

import attrs

WorkloadName: TypeAlias = Literal[
    "seed-40x8", "seed-160x5", "mixed", "mixed-small", "long-among-short", "shared-prefix", "chat-turns", "overload"
]

Tokens: TypeAlias = tuple[int, ...]

N_VOCAB_UNKNOWN: Final = 30_000  # every vocabulary in common use has as many
N_KEPT_LOW, N_KEPT_HIGH = 256, 44  # ids at the ends of a vocabulary are bytes and control tokens


@attrs.frozen(kw_only=True)
class Ask:
    """One request. A prompt is token ids, so that every server computes the same rows."""

    prompt: Tokens
    n_generated: int


@attrs.frozen(kw_only=True)
class Sampling:
    """How a pass asks for its tokens to be drawn."""

    name: str
    fields: tuple[tuple[str, float], ...]


GREEDY: Final = Sampling(name="greedy", fields=(("temperature", 0.0),))
PLAIN: Final = Sampling(name="temperature 1", fields=(("temperature", 1.0),))
USUAL: Final = Sampling(name="0.8 / 0.95 / 40", fields=(("temperature", 0.8), ("top_p", 0.95), ("top_k", 40)))
SAMPLINGS: Final = {"greedy": GREEDY, "plain": PLAIN, "usual": USUAL}


@attrs.frozen
class Work:
    """What one pass sends: chains of requests, each of which waits for the one before it, and perhaps one that comes late."""

    chains: tuple[tuple[Ask, ...], ...]
    late: Ask | None = None  # sent when all others are being answered

    @property
    def asks(self) -> list[Ask]:
        """All requests in the order of their numbers, the late one last."""
        return [ask for chain in self.chains for ask in chain] + ([self.late] if self.late else [])


@attrs.frozen(kw_only=True)
class Workload:
    """The recipe of a pass; sizes are drawn evenly from ranges that include both ends."""

    name: str
    n_requests: int  # chains, where requests follow each other
    concurrency: int
    n_prompt: tuple[int, int]
    n_generated: tuple[int, int]
    n_prefix: int = 0  # tokens that all prompts begin with, besides their own
    n_turns: int = 1
    n_prompt_late: int = 0  # 0: nobody comes late
    n_generated_late: int = 16
    is_open: bool = False  # arrivals do not wait for answers

    def make(self, n_vocab: int, seed: int) -> Work:
        """Draw the requests; another seed gives other prompts, so that no cache remembers the last pass."""
        draw = _Draw(n_vocab, seed)
        prefix = draw.tokens(self.n_prefix)
        chains = tuple(self._chain(draw, prefix) for _ in range(self.n_requests))
        late = Ask(prompt=draw.tokens(self.n_prompt_late), n_generated=self.n_generated_late) if self.n_prompt_late else None
        return Work(chains, late)

    def _chain(self, draw: _Draw, prefix: Tokens) -> tuple[Ask, ...]:
        """The turns of one conversation: each begins with the last one's tokens and as many as it was answered with.

        The latter are drawn here: what a server really said cannot be had as token ids over every server's API.
        """
        asks: list[Ask] = []
        so_far = prefix
        for _ in range(self.n_turns):
            ask = Ask(prompt=so_far + draw.tokens(draw.size(self.n_prompt)), n_generated=draw.size(self.n_generated))
            asks.append(ask)
            so_far = ask.prompt + draw.tokens(ask.n_generated)
        return tuple(asks)

    def cells(self) -> int:
        """Cells that suffice for all that runs at once."""
        turn = self.n_prompt[1] + self.n_generated[1]
        return (
            self.concurrency * (self.n_prefix + self.n_turns * turn) + self.n_prompt_late + bool(self.n_prompt_late) * self.n_generated_late
        )

    def n_longest(self) -> int:
        """Cells of the longest request, its answer included."""
        usual = self.n_prefix + self.n_turns * (self.n_prompt[1] + self.n_generated[1])
        return max(usual, self.n_prompt_late + self.n_generated_late if self.n_prompt_late else 0)


class _Draw:
    def __init__(self, n_vocab: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._low, self._high = id_range(n_vocab)

    def tokens(self, n: int) -> Tokens:
        return tuple(self._rng.randrange(self._low, self._high) for _ in range(n))

    def size(self, bounds: tuple[int, int]) -> int:
        return self._rng.randint(*bounds)


def id_range(n_vocab: int) -> tuple[int, int]:
    """The ids that prompts are drawn from, half open: plain tokens in the vocabularies in use, letters in a tiny one."""
    high = min(n_vocab, 100_000) - N_KEPT_HIGH
    return (N_KEPT_LOW, high) if high >= 2 * N_KEPT_LOW else (40, 120)


def seed_workload(n_requests: int, *, n_prompt: int, n_generated: int, n_vocab: int, seed: int) -> list[Ask]:
    """Requests of equal shape with random prompts."""
    workload = Workload(
        name="seed", n_requests=n_requests, concurrency=1, n_prompt=(n_prompt, n_prompt), n_generated=(n_generated, n_generated)
    )
    return workload.make(n_vocab, seed).asks


def _workloads(*workloads: Workload) -> dict[str, Workload]:
    return {workload.name: workload for workload in workloads}


WORKLOADS: Final = _workloads(
    # The first cLLM's own two, so that its reports can be compared.
    Workload(name="seed-40x8", n_requests=40, concurrency=8, n_prompt=(32, 32), n_generated=(50, 50)),
    Workload(name="seed-160x5", n_requests=160, concurrency=5, n_prompt=(32, 32), n_generated=(50, 50)),
    Workload(name="mixed", n_requests=40, concurrency=8, n_prompt=(8, 512), n_generated=(8, 256)),
    Workload(name="mixed-small", n_requests=40, concurrency=8, n_prompt=(8, 240), n_generated=(8, 100)),
    Workload(name="long-among-short", n_requests=7, concurrency=7, n_prompt=(32, 32), n_generated=(256, 256), n_prompt_late=4096),
    Workload(name="shared-prefix", n_requests=32, concurrency=8, n_prefix=1000, n_prompt=(32, 32), n_generated=(50, 50)),
    Workload(name="chat-turns", n_requests=8, concurrency=8, n_turns=6, n_prompt=(64, 64), n_generated=(50, 50)),
    Workload(name="overload", n_requests=64, concurrency=16, n_prompt=(8, 240), n_generated=(8, 100), is_open=True),
)


def with_load(workload: Workload, *, concurrency: int | None = None, n_requests: int | None = None) -> Workload:
    """The same recipe for more or fewer; conversations, and those among whom one comes late, are as many as run at once.

    Requests are as many as are to run at once, at least. Raises: ValueError where both are said, and do not go together.
    """
    is_at_once = workload.n_turns > 1 or workload.n_prompt_late > 0
    if is_at_once and concurrency and n_requests and concurrency != n_requests:
        raise ValueError(f"of {workload.name} all run at once: {n_requests} requests cannot be {concurrency} at a time")
    asked, concurrency = concurrency, concurrency or workload.concurrency
    if is_at_once:
        return attrs.evolve(workload, concurrency=n_requests or concurrency, n_requests=n_requests or concurrency)
    if n_requests is None:
        return attrs.evolve(workload, concurrency=concurrency, n_requests=max(workload.n_requests, concurrency))
    if asked and asked > n_requests:
        raise ValueError(f"{asked} at a time are more than the {n_requests} requests")
    return attrs.evolve(workload, concurrency=min(concurrency, n_requests), n_requests=n_requests)


OVERLOAD_FACTORS: Final = (0.5, 1.0, 2.0, 4.0)


def arrivals(n: int, rate: float, seed: int) -> list[float]:
    """Seconds at which `n` requests arrive when they come independently of each other, `rate` a second on average (a Poisson process)."""
    rng = random.Random(f"arrivals {seed}")
    times, now = [], 0.0
    for _ in range(n):
        now += rng.expovariate(rate)
        times.append(now)
    return times
