"""Bodies in chunks: as clients send them, and as nobody should."""

from __future__ import annotations

import asyncio

import h11
import pytest
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from adaserve.patches.http import small_chunks
from adaserve.patches.http.small_chunks import FREE_CHUNKS, FewChunks

HEAD = b"POST /generate HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def chunks(size: int, count: int) -> bytes:
    return b"%x\r\n%s\r\n" % (size, b"x" * size) * count


def read(connection: h11.Connection, data: bytes) -> int:
    """Bytes of the bodies in ``data``, given piece by piece."""
    size = 0
    for start in range(0, len(data), 1000):
        connection.receive_data(data[start : start + 1000])
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            size += len(event.data) if isinstance(event, h11.Data) else 0
    return size


@pytest.mark.parametrize(
    "body", [chunks(1, FREE_CHUNKS), chunks(32, 5000), chunks(1, 1000) + chunks(4000, 100)]
)
def test_usual_chunks_are_read(body: bytes) -> None:
    assert read(FewChunks(h11.SERVER), CHUNKED + body + b"0\r\n\r\n") == body.count(b"x")


def test_a_body_of_known_length_may_come_byte_by_byte() -> None:
    connection = FewChunks(h11.SERVER)
    read(connection, HEAD + b"Content-Length: 5000\r\n\r\n")
    assert sum(read(connection, b"x") for _ in range(5000)) == 5000


def test_many_tiny_chunks_are_refused() -> None:
    with pytest.raises(h11.RemoteProtocolError, match="tiny chunks"):
        read(FewChunks(h11.SERVER), CHUNKED + chunks(1, FREE_CHUNKS + 1))


def test_uvicorn_answers_and_closes() -> None:
    class Transport(asyncio.Transport):
        sent = b""

        def write(self, data: bytes | bytearray | memoryview) -> None:
            self.sent += bytes(data)

        def close(self) -> None:
            self.sent += b"closed"

        def pause_reading(self) -> None:
            """Nothing."""

    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    async def answer() -> bytes:
        config = Config(never)
        config.load()
        protocol = H11Protocol(config, ServerState(), {})
        small_chunks._count_chunks(None, protocol)
        transport = Transport()
        protocol.connection_made(transport)
        protocol.data_received(CHUNKED + chunks(1, 100_000))
        told = transport.sent
        await asyncio.sleep(0)  # so that the app has begun, and is cancelled
        return told

    told = asyncio.run(answer())
    assert told.startswith(b"HTTP/1.1 400") and told.endswith(b"closed")
