"""Messages between a server and a worker's process."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import msgspec
import pytest

from cllm.serve.worker import frames
from cllm.serve.worker.frames import Channel, Ended, Garbled


class Message(msgspec.Struct):
    data: bytes


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel[Message]]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, Channel[Message](other, Message)


@pytest.mark.parametrize("n_bytes", [0, 1, frames.N_BYTES_AHEAD, 100_000])
@pytest.mark.parametrize("n_at_once", [1000, 1 << 28])
def test_a_message_comes_as_it_was_sent_however_long(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[socket.socket, Channel[Message]], n_bytes: int, n_at_once: int
) -> None:
    monkeypatch.setattr(frames, "N_BYTES_AT_ONCE", n_at_once)
    end, channel = ends
    sender = threading.Thread(target=lambda: [Channel[Message](end, Message).send(Message(b"x" * n)) for n in (n_bytes, 5)])
    sender.start()
    assert [len(channel.receive().data) for _ in range(2)] == [n_bytes, 5]
    sender.join()


@pytest.mark.parametrize("n_bytes", [1 << 39, (1 << 40) + 1])
def test_a_length_that_is_none_takes_no_memory(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[socket.socket, Channel[Message]], n_bytes: int
) -> None:
    """Or a worker that has gone wrong would take the server with it."""
    monkeypatch.setattr(frames, "N_BYTES_AT_ONCE", 1 << 16)
    end, channel = ends
    end.sendall(struct.pack("<Q", n_bytes) + b"no message")
    end.close()
    with pytest.raises(Ended):
        channel.receive()


def test_what_is_no_message_is_told(ends: tuple[socket.socket, Channel[Message]]) -> None:
    end, channel = ends
    end.sendall(struct.pack("<Q", 3) + b"\xc1\xc1\xc1")
    with pytest.raises(Garbled, match="no message"):
        channel.receive()
