"""The extension that writes a stream's chunk without waking the request's task."""

from __future__ import annotations

import trio

START = {"type": "http.response.start", "status": 200, "headers": []}


def body(data: bytes, *, more: bool = True) -> dict:
    return {"type": "http.response.body", "body": data, "more_body": more}


class StreamingApp:
    """Begins a response, then hands its writer to the test and waits."""

    def __init__(self) -> None:
        self.ready = trio.Event()
        self.finish = trio.Event()
        self.refused_before_the_start = None
        self.last = b""

    async def __call__(self, scope, receive, send):
        assert scope["type"] == "http"
        self.send, self.send_now = send, scope["extensions"]["cllm.send_now"]
        await send(START)
        self.refused_before_the_start = not self.send_now(b"early")
        await send(body(b"first "))
        self.ready.set()
        await self.finish.wait()
        await send(body(self.last))
        await send(body(b"last", more=False))


async def start(server, app: StreamingApp, version: str = "1.1", **options):
    client = await server.connect(**options)
    await client.send(f"GET / HTTP/{version}\r\nHost: test\r\n\r\n".encode())
    await app.ready.wait()
    return client


def unchunk(answer: bytes) -> bytes:
    data, rest = b"", answer.partition(b"\r\n\r\n")[2]
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not int(size, 16):
            return data
        data, rest = data + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


async def test_what_it_writes_is_in_its_place_in_the_body(serving):
    app = StreamingApp()
    async with serving(app=app) as server:
        client = await start(server, app)
        assert app.refused_before_the_start
        assert app.send_now(b"second ")
        await client.read_until(b"second")
        await app.send(body(b"third "))
        assert app.send_now(b"fourth ")
        app.finish.set()
        answer = await client.read_until(b"0\r\n\r\n")
        assert [word in answer for word in (b"third", b"fourth", b"last")] == [True] * 3


async def test_what_the_socket_takes_in_part_is_accepted_and_sent_in_full(serving):
    app = StreamingApp()
    async with serving(app=app) as server:
        client = await start(server, app, receive_buffer=4096)
        n = 0
        while app.send_now(b"%06d" % n * 1000):
            n += 1
        assert n > 2
        assert not app.send_now(b"no room")
        app.last = b"%06d" % n * 1000
        app.finish.set()
        answer = await client.read_until(b"\r\n0\r\n\r\n")
        assert unchunk(answer) == b"first " + b"".join(b"%06d" % i * 1000 for i in range(n + 1)) + b"last"


async def test_it_refuses_a_response_without_chunks(serving):
    app = StreamingApp()
    async with serving(app=app) as server:
        client = await start(server, app, version="1.0")
        assert not app.send_now(b"x")
        app.finish.set()
        assert (await client.read_to_end()).endswith(b"first last")


async def test_it_refuses_when_the_client_has_gone_or_the_response_has_ended(serving, until):
    app = StreamingApp()
    async with serving(app=app) as server:
        client = await start(server, app)
        await client.reset()
        await until(lambda: not app.send_now(b"x"))
        app.finish.set()
        app.ready, app.finish = trio.Event(), trio.Event()
        client = await start(server, app)
        app.finish.set()
        await client.read_until(b"\r\n0\r\n\r\n")
        assert not app.send_now(b"x")
        assert await server.ask(b"nonsense\r\n\r\n")


async def test_it_writes_no_empty_chunk_which_would_end_the_body(serving):
    app = StreamingApp()
    async with serving(app=app) as server:
        client = await start(server, app)
        assert not app.send_now(b"")
        await app.send(body(b""))
        app.finish.set()
        assert unchunk(await client.read_until(b"\r\n0\r\n\r\n")) == b"first last"
