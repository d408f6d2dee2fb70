"""What waits for clients that do not read is bounded for all of them together."""

from __future__ import annotations

import trio
import trio.testing

from cllm.serve.http import Traffic
from cllm.serve.http.held import Held
from cllm.serve.http.writer import Writer


class Unread(trio.abc.SendStream):
    """To a client that takes nothing before `goes_on`."""

    def __init__(self):
        self.goes_on = trio.Event()

    async def send_all(self, data):
        await self.goes_on.wait()

    async def wait_send_all_might_not_block(self):
        await self.goes_on.wait()

    async def aclose(self):
        pass


async def test_answers_that_nobody_reads_take_so_much_together_and_no_more(monkeypatch, autojump_clock):
    """Each client is given time for each piece, so that many could have one of the largest each for hours."""
    monkeypatch.setattr("cllm.serve.http.held.N_BYTES_MAX", 5_000_000)
    traffic, held, cut_off = Traffic(), Held(), []
    async with trio.open_nursery() as nursery:
        streams = [Unread() for _ in range(5)]

        def writer(i):
            return Writer(
                streams[i], None, timeout_s=30, spawn=nursery.start_soon, on_broken=lambda: cut_off.append(i), traffic=traffic, held=held
            )

        for i, n_bytes in enumerate((3_000_000, 1000, 2_000_000, 100_000)):  # the second hardly counts
            nursery.start_soon(writer(i).send, b"x" * n_bytes)
            await trio.testing.wait_all_tasks_blocked()
        assert cut_off == [0], "it had most"
        assert held.n_bytes == 2_101_000
        nursery.start_soon(writer(4).send, b"x" * 6_000_000)  # which alone is more than all may be
        await trio.testing.wait_all_tasks_blocked()
        assert cut_off == [0, 4], "who was there before, and has little, stays"
        for stream in streams:
            stream.goes_on.set()
    assert held.n_bytes == 0
    assert traffic.n_bytes_out >= 2_101_000
