"""The load generator: raw sockets on Trio, so that it costs the server's cores little; any OpenAI-style server will do."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Final

import attrs
import trio

from benchmarks.workload import Ask, Sampling

DATA: Final = b"data: "
DONE: Final = b"data: [DONE]"


@attrs.define(kw_only=True)
class Answer:
    """What one request got. Times are seconds since the pass began."""

    sent_at: float
    status: int = 0
    chunks_at: list[float] = attrs.field(factory=list)  # one for each streamed token, if the server sends them one by one
    ended_at: float = 0.0
    n_prompt: int = 0
    n_generated: int = 0


@attrs.frozen(kw_only=True)
class Pass:
    """One run through a workload."""

    wall_s: float
    client_cpu_s: float
    answers: list[Answer]

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the wall time of the whole pass."""
        return sum(answer.n_generated for answer in self.answers) / self.wall_s

    @property
    def gaps_s(self) -> list[float]:
        """The times between two tokens of one answer."""
        return [b - a for answer in self.answers for a, b in zip(answer.chunks_at, answer.chunks_at[1:], strict=False)]

    @property
    def ttfts_s(self) -> list[float]:
        """The times to the first token."""
        return [answer.chunks_at[0] - answer.sent_at for answer in self.answers if answer.chunks_at]

    def check(self, asks: list[Ask]) -> None:
        """Refuse a pass in which anybody got anything but what was asked for."""
        for ask, answer in zip(asks, self.answers, strict=True):
            got = (answer.status, answer.n_prompt, answer.n_generated)
            if got != (200, len(ask.prompt), ask.n_generated):
                raise RuntimeError(f"asked for {len(ask.prompt)} + {ask.n_generated} tokens, got status, prompt, generated = {got}")


async def closed_loop(port: int, asks: list[Ask], concurrency: int, sampling: Sampling, *, seed: int) -> Pass:
    """Send the requests, `concurrency` at a time, each on a connection that its worker keeps."""
    answers: list[Answer] = [Answer(sent_at=0.0) for _ in asks]
    numbers = iter(range(len(asks)))
    began, cpu_began = time.perf_counter(), time.process_time()
    async with trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(_work, port, asks, answers, numbers, sampling, seed, began)
    return Pass(wall_s=time.perf_counter() - began, client_cpu_s=time.process_time() - cpu_began, answers=answers)


async def _work(
    port: int, asks: list[Ask], answers: list[Answer], numbers: Iterator[int], sampling: Sampling, seed: int, began: float
) -> None:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        for number in numbers:
            await stream.send_all(_request(asks[number], sampling, seed + number))
            answers[number] = await _read(stream, began)


def _request(ask: Ask, sampling: Sampling, seed: int) -> bytes:
    body = json.dumps(
        {
            "prompt": ask.prompt,
            "max_tokens": ask.n_generated,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "seed": seed,
            **dict(sampling.fields),
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _read(stream: trio.SocketStream, began: float) -> Answer:
    answer = Answer(sent_at=time.perf_counter() - began)
    data = bytearray()
    n_seen = 0
    while not data.endswith(b"0\r\n\r\n"):  # the last chunk of a chunked body
        received = await stream.receive_some(65536)
        if not received:
            raise RuntimeError(f"the server closed the connection after {bytes(data[:200])!r}")
        now = time.perf_counter() - began
        data += received
        if not answer.status:
            answer.status = int(data.split(b" ", 2)[1])
            if answer.status != 200:
                raise RuntimeError(bytes(data[:500]).decode("utf-8", "replace"))
        n_chunks = data.count(DATA) - n_seen
        n_seen += n_chunks
        answer.chunks_at.extend([now] * n_chunks)
    answer.ended_at = time.perf_counter() - began
    _read_usage(answer, bytes(data))
    return answer


def _read_usage(answer: Answer, data: bytes) -> None:
    events = [line[len(DATA) :] for line in data.split(b"\n") if line.startswith(DATA) and not line.startswith(DONE)]
    usage = json.loads(events[-1])["usage"]
    answer.n_prompt, answer.n_generated = usage["prompt_tokens"], usage["completion_tokens"]
    n_without_text = data.count(DATA) - answer.n_generated  # the finish, the usage and [DONE] carry no token
    if n_without_text > 0:
        del answer.chunks_at[-n_without_text:]
