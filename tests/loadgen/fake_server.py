"""An OpenAI-compatible server with known timing, in a process of its own.

It writes down when it really received each request and sent each chunk (CLOCK_MONOTONIC, shared by
all processes of a machine), so that a test judges a client against what happened and not against
what was intended on a busy machine. ``GET /log`` returns these times.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Behavior:
    """How the fake answers. Times in ms."""

    first_ms: float = 20.0  # request to first chunk
    token_ms: float = 20.0  # per token after the first chunk
    per_chunk: int = 1  # tokens in each chunk
    first_chunk: int = 1  # tokens in the first chunk
    error_after: int = 0  # tokens after which the stream breaks with an error event; 0 = never
    drop_after: int = 0  # tokens after which the connection is cut; 0 = never
    no_usage: bool = False
    usage_factor: float = 1.0  # a lie: reported tokens / sent tokens
    late_header_ms: float = 0.0  # a lie: keeps chunks back but logs them as sent
    status: int = 200  # answer everything with this status
    refuses: str = ""  # answer 400 to bodies with this in them
    models: list[str] = field(default_factory=lambda: ["fake"])
    key: str = ""  # wants "Authorization: Bearer <key>"
    known_classes: list[str] = field(default_factory=list)  # known classes; others get 400
    certificate: str = ""  # PEM file with key and certificate: speaks TLS
    metrics_ms: float = 0.0  # until it says that it has no metrics


class TimedReader(asyncio.StreamReader):
    """Remembers when its first bytes came: the task that reads them wakes up later."""

    received = 0.0

    def feed_data(self, data: bytes) -> None:
        self.received = self.received or time.perf_counter()
        super().feed_data(data)


class FakeServer:
    def __init__(self, behavior: Behavior) -> None:
        self.b = behavior
        self.log: list[dict[str, Any]] = []
        self.open = 0
        self.max_open = 0
        self.disconnects = 0

    async def handle(self, reader: TimedReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            request_line, *lines = head.strip().split("\r\n")
            method, path, _ = request_line.split(" ")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            await self.route(method, path, headers, body, reader.received, writer)
            await writer.drain()
        with contextlib.suppress(ConnectionError):
            writer.close()

    async def route(  # noqa: PLR0911
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes,
        received: float,
        writer: asyncio.StreamWriter,
    ) -> None:
        if path == "/log":  # for the tests: no key needed
            return self.reply(
                writer, 200, {"log": self.log, "max_open": self.max_open, "lost": self.disconnects}
            )
        if path == "/behavior":
            self.b = Behavior(**json.loads(body))
            self.log.clear()
            return self.reply(writer, 200, {})
        if self.b.key and headers.get("authorization") != f"Bearer {self.b.key}":
            return self.reply(writer, 401, {"error": {"message": "no key"}})
        if path == "/v1/models":
            return self.reply(writer, 200, {"data": [{"id": m} for m in self.b.models]})
        if path == "/metrics":
            await asyncio.sleep(self.b.metrics_ms / 1e3)
        if path not in ("/v1/completions", "/v1/chat/completions", "/generate"):
            return self.reply(writer, 404, {"error": {"message": "no such path"}})
        if self.b.status != 200:
            return self.reply(writer, self.b.status, {"error": {"message": "the fake was told to refuse"}})
        if self.b.refuses and self.b.refuses.encode() in body:
            return self.reply(writer, 400, {"error": {"message": f"unknown field {self.b.refuses!r}"}})
        slo_class = headers.get("x-slo-class")
        if self.b.known_classes and slo_class and slo_class not in self.b.known_classes:
            return self.reply(writer, 400, {"error": {"message": f"unknown SLO class {slo_class!r}"}})
        self.open += 1
        self.max_open = max(self.max_open, self.open)
        try:
            data = json.loads(body)
            await self.answer(path, headers, data, received, writer)
        except ConnectionError:
            self.disconnects += 1
        finally:
            self.open -= 1

    def reply(self, writer: asyncio.StreamWriter, status: int, data: Any) -> None:
        body = json.dumps(data).encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )

    async def answer(
        self,
        path: str,
        headers: dict[str, str],
        data: dict[str, Any],
        received: float,
        writer: asyncio.StreamWriter,
    ) -> None:
        params = data.get("sampling_params", data)
        n = int(params.get("max_new_tokens") or params.get("max_tokens") or 16)
        prompt = data.get("prompt") or data.get("text") or data["messages"][0]["content"]
        usage = {"prompt_tokens": max(1, len(prompt) // 4), "completion_tokens": n}
        if not data.get("stream"):
            await asyncio.sleep((self.b.first_ms + (n - 1) * self.b.token_ms) / 1e3)
            if path == "/generate":
                return self.reply(writer, 200, {"text": "x " * n, "output_ids": [5] * n, "meta_info": usage})
            return self.reply(writer, 200, {"choices": [{"text": "x " * n}], "usage": usage})
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
            b"Connection: close\r\n\r\n"
        )
        await self.stream(path, headers, data, n, usage, received, writer)

    async def stream(
        self,
        path: str,
        headers: dict[str, str],
        data: dict[str, Any],
        n: int,
        usage: dict[str, int],
        received: float,
        writer: asyncio.StreamWriter,
    ) -> None:
        b = self.b
        entry: dict[str, Any] = {
            "id": headers.get("x-request-id"),
            "received": received,
            "headers": headers,
            "body": data,
            "chunks": [],
        }
        self.log.append(entry)
        options = data.get("stream_options") or {}
        due, sent, size = received + b.first_ms / 1e3, 0, b.first_chunk
        while sent < n:
            size = min(size, n - sent)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if (b.error_after and sent >= b.error_after) or (b.drop_after and sent >= b.drop_after):
                if b.error_after:
                    writer.write(sse({"error": {"message": "the fake broke"}}))
                writer.transport.abort() if b.drop_after else writer.write(b"0\r\n\r\n")
                return
            sent += size
            told = {**usage, "completion_tokens": round(sent * b.usage_factor)}
            event = chunk(path, "tok " * size, sent, "length" if sent == n else None, told)
            if options.get("continuous_usage_stats") and path != "/generate":
                event["usage"] = told
            at = time.perf_counter()
            if b.late_header_ms:
                await asyncio.sleep(b.late_header_ms / 1e3)
            writer.write(sse(event))
            entry["chunks"].append((at, sent))
            if writer.transport.is_closing():
                raise ConnectionError
            due += min(b.per_chunk, n - sent) * b.token_ms / 1e3
            size = b.per_chunk
        if options.get("include_usage") and not b.no_usage:
            told = {**usage, "completion_tokens": round(n * b.usage_factor)}
            writer.write(sse({"choices": [], "usage": told}))
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def sse(data: dict[str, Any]) -> bytes:
    event = b"data: " + json.dumps(data).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


def chunk(path: str, text: str, sent: int, reason: str | None, usage: dict[str, int]) -> dict[str, Any]:
    if path == "/generate":
        meta = {
            **usage,
            "finish_reason": {"type": reason} if reason else None,
            "spec_verify_ct": 1 + sent // 2,
        }
        return {"text": "tok " * sent, "meta_info": meta}
    choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
    choice |= {"delta": {"content": text}} if "chat" in path else {"text": text}
    return {"id": "cmpl-1", "object": "text_completion", "model": "fake", "choices": [choice]}


async def serve(behavior: Behavior) -> None:
    # This process is a measuring instrument: no pauses for collections, nor for a growing file table.
    gc.disable()
    os.close(fcntl.fcntl(0, fcntl.F_DUPFD, 1000))
    fake = FakeServer(behavior)
    tls = None
    if behavior.certificate:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(behavior.certificate)
    server = await asyncio.get_running_loop().create_server(
        lambda: asyncio.StreamReaderProtocol(TimedReader(), fake.handle),
        "127.0.0.1",
        0,
        backlog=1024,
        ssl=tls,
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    loop = asyncio.get_running_loop()

    def end_with_parent() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=end_with_parent, daemon=True).start()
    await stop.wait()


@dataclass
class Fake:
    """Handle of a running fake."""

    url: str

    def set(self, **behavior: Any) -> None:
        """New behavior; clears the log."""
        request = urllib.request.Request(
            self.url + "/behavior", json.dumps(asdict(Behavior(**behavior))).encode(), method="POST"
        )
        urllib.request.urlopen(request, timeout=10).close()

    def state(self) -> dict[str, Any]:
        unsigned = ssl.create_default_context()
        unsigned.check_hostname, unsigned.verify_mode = False, ssl.CERT_NONE
        with urllib.request.urlopen(self.url + "/log", timeout=30, context=unsigned) as response:
            result: dict[str, Any] = json.load(response)
            return result

    def log(self) -> list[dict[str, Any]]:
        """The streams that were answered, without those of the preflight (which carry no id)."""
        return [e for e in self.state()["log"] if e["id"] is not None]


@contextlib.contextmanager
def running_fake(**behavior: Any) -> Iterator[Fake]:
    """Starts the server in a process of its own."""
    command = [sys.executable, __file__, json.dumps(behavior)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        scheme = "https" if behavior.get("certificate") else "http"
        yield Fake(f"{scheme}://127.0.0.1:{int(process.stdout.readline())}")
    finally:
        process.terminate()
        process.wait(10)


def certificate(folder: Path) -> str:
    """A PEM file with a key and a certificate that nobody signed."""
    path = folder / "server.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=fake"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(path), "-out", "-"]
    signed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    with open(path, "a", encoding="utf-8") as file:
        file.write(signed)
    return str(path)


if __name__ == "__main__":
    asyncio.run(serve(Behavior(**json.loads(sys.argv[1]))))
