"""One streamed request over a gevent socket, with the time at which each piece arrived.

Locust's own clients are not used for the stream: ``FastHttpUser.client.iter_lines`` waits for full
1024-byte blocks, which moves the first token by the time of several tokens. Here every ``recv``
delivers what is there, with the time at which the kernel received it (Linux, without TLS), or else
with the time at which this process got it: waking up takes Python up to a millisecond.

The connection is opened, and the request made ready, before its time: what the server did not do
must not count as its TTFT, and a request leaves by one ``sendall`` when it is due.
"""

from __future__ import annotations

import json
import math
import socket as std_socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

import gevent
from gevent import socket, ssl
from geventhttpclient.response import HTTPConnectionClosed, HTTPParseError, HTTPSocketResponse

from adaserve.loadgen import protocol
from adaserve.loadgen.config import Endpoint
from adaserve.loadgen.errors import LoadgenError
from adaserve.loadgen.plain_http import tls_context
from adaserve.loadgen.schedule import PlannedRequest
from adaserve.slo.replay_lengths import ENV as REPLAY_ENV
from adaserve.slo.run_summary import NEVER_SENT, RequestRecord


class Target:
    """The server's address, resolved once: a name look-up per request would count as TTFT."""

    def __init__(self, server: Endpoint) -> None:
        parts = urlsplit(server.url)
        self.server = server
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.path = parts.path.rstrip("/").removesuffix("/v1") + protocol.PATHS[server.api]
        self.host_header = parts.netloc
        try:
            found = socket.getaddrinfo(self.host, self.port, 0, std_socket.SOCK_STREAM)
        except OSError as e:
            raise LoadgenError(f"cannot find the host of {server.url}: {e}") from e
        self._addresses = [(family, address) for family, _, _, _, address in found]
        self._context = tls_context(server)

    def connect(self) -> socket.socket:
        """A connection to the first address that takes one. Raises OSError."""
        sock = self._reach()
        try:
            sock.setsockopt(std_socket.IPPROTO_TCP, std_socket.TCP_NODELAY, 1)
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_hostname=self.host)
        except BaseException:
            sock.close()
            raise
        return sock

    def _reach(self) -> socket.socket:
        """A name may stand for several addresses, such as ::1 and 127.0.0.1 for localhost, and a server
        often listens on one of them only. The one that answered is tried first from then on."""
        failure = OSError("the name stands for no address")
        for place in tuple(self._addresses):
            family, address = place
            try:
                sock = socket.socket(family, std_socket.SOCK_STREAM)
            except OSError as e:  # this machine has no IPv6
                failure = e
                continue
            try:
                sock.settimeout(self.server.timeout_s)
                sock.connect(address)
            except OSError as e:
                sock.close()
                failure = e
            except BaseException:
                sock.close()
                raise
            else:
                self._addresses.sort(key=lambda other: other != place)
                return sock
        raise failure

    def encode(self, request: PlannedRequest, history: str) -> bytes:
        """The whole HTTP request."""
        payload = json.dumps(protocol.body(self.server, request, history)).encode()
        headers = {
            "Host": self.host_header,
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
            "Accept-Encoding": "identity",
            "Connection": "close",
            "User-Agent": "adaserve-bench",
            "X-Request-Id": f"bench-{request.index}",
            **self.server.headers,
            **protocol.slo_headers(self.server, request),
            "Content-Length": str(len(payload)),
        }
        head = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
        return f"POST {self.path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + payload


@dataclass(slots=True)
class Answer:
    """The text of an answer (for the next turn of a session) beside its record."""

    record: RequestRecord
    text: str


def send(
    target: Target,
    request: PlannedRequest,
    history: str,
    scheduled_s: float,
    now: Callable[[], float],
    wait_until: Callable[[float], bool],
) -> Answer | None:
    """Connects, waits until ``scheduled_s``, sends one request and reads its stream.

    ``now`` gives seconds since the start of the run; ``wait_until`` sleeps until such a time and
    returns False when the run was stopped: then nothing was sent and the result is None.

    Never raises for what the server does: failures are in the record."""
    record = _record(request, scheduled_s, math.nan)
    reader = _Reader(target.server.api, record, now, request)
    data = target.encode(request, history)
    began_s = now()
    sock: _TimedSocket | None = None
    try:
        try:
            sock = _TimedSocket(target.connect(), now, target.server.total_s)
        finally:
            record.sent_s = _leave(scheduled_s, began_s, now, wait_until)
        sock.send(data)
        reader.read(HTTPSocketResponse(sock, block_size=16384, method="POST"), sock)
    except gevent.GreenletExit:
        record.error = "interrupted"
    except (HTTPConnectionClosed, HTTPParseError):
        record.error = "connection closed before the end of the answer"
    except EndlessError as e:
        record.error = str(e)
    except TimeoutError:
        record.error = f"timeout: nothing came for {target.server.timeout_s:g} s"
    except OSError as e:
        record.error = f"{type(e).__name__}: {e.strerror or e}"
    finally:
        if sock is not None:
            sock.close()
    if math.isnan(record.sent_s):
        return None
    reader.finish()
    return Answer(record, "".join(reader.text))


def never_sent(request: PlannedRequest, at_s: float) -> RequestRecord:
    """The record of a turn that cannot be sent, because an earlier one of its conversation failed."""
    record = _record(request, at_s, at_s)
    record.error = NEVER_SENT
    return record


def _record(request: PlannedRequest, scheduled_s: float, sent_s: float) -> RequestRecord:
    return RequestRecord(
        id=str(request.index),
        slo_class=request.slo_class,
        slo_ttft_ms=request.ttft_ms,
        slo_tpot_ms=request.tpot_ms,
        scheduled_s=scheduled_s,
        sent_s=sent_s,
        session_id=request.session,
        turn=request.turn,
    )


def _leave(
    due_s: float, began_s: float, now: Callable[[], float], wait_until: Callable[[float], bool]
) -> float:
    """Waits until a request is due and returns when it left.

    A connection that was not there in time is the server's doing: its request was on its way when it
    was due. Raises GreenletExit when the run was stopped before."""
    if now() >= due_s:
        return max(began_s, due_s)
    if not wait_until(due_s):
        raise gevent.GreenletExit
    return now()


_SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python has no name for it
_TIMESPEC = struct.Struct("@qq")
_OLDEST_S = 1.0  # an older time stamp means that the wall clock was set


_MAX_BYTES = 64 * 1024 * 1024  # of an answer


class EndlessError(Exception):
    """An answer that does not end."""


class _TimedSocket:
    """What geventhttpclient's response needs of a socket; remembers when it last received something."""

    __slots__ = ("_most_s", "_now", "_received", "_sent_s", "_sock", "_stamped", "at_s")

    def __init__(self, sock: socket.socket, now: Callable[[], float], most_s: float) -> None:
        """``most_s``: of an answer, from the request on."""
        self._sock, self._now, self._most_s = sock, now, most_s
        self._sent_s, self._received = math.inf, 0
        self._stamped = sys.platform == "linux" and not isinstance(sock, ssl.SSLSocket)
        if self._stamped:
            try:
                sock.setsockopt(std_socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            except OSError:  # a sandbox that imitates the kernel may lack it
                self._stamped = False
        self.at_s = 0.0

    def send(self, data: bytes) -> None:
        self._sent_s = self._now()
        sent = self._sock.send(data)
        if sent < len(data):
            self._sock.sendall(data[sent:])

    def recv(self, size: int) -> bytes:
        """Raises EndlessError."""
        data = self._recv(size)
        self._received += len(data)
        if self._received > _MAX_BYTES:
            raise EndlessError(f"the answer is longer than {_MAX_BYTES >> 20} MiB")
        if self.at_s - self._sent_s > self._most_s:
            raise EndlessError(f"timeout: the answer did not end within {self._most_s:g} s")
        return data

    def _recv(self, size: int) -> bytes:
        data: bytes
        if not self._stamped:
            data = self._sock.recv(size)
            self.at_s = self._now()  # before anything else: this is the measurement
            return data
        data, told, _, _ = self._sock.recvmsg(size, std_socket.CMSG_SPACE(_TIMESPEC.size))
        self.at_s, wall_s = self._now(), time.time()
        for level, kind, value in told:
            if level == std_socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
                seconds, nanoseconds = _TIMESPEC.unpack(value)
                age_s = wall_s - seconds - nanoseconds * 1e-9
                self.at_s -= age_s if 0 < age_s < _OLDEST_S else 0.0
        return data

    def close(self) -> None:
        self._sock.close()


class _Reader:
    """Fills a record from a response."""

    def __init__(
        self,
        api: str,
        record: RequestRecord,
        now: Callable[[], float],
        request: PlannedRequest,
    ) -> None:
        self.api, self.record, self.now = api, record, now
        self.hang_up_at = math.inf if request.disconnect_after is None else request.disconnect_after
        self.answer_tokens = request.answer_tokens
        self.text: list[str] = []
        self._gaps_ms: list[float] = []
        self._seen = 0
        self._events = 0
        self._done = False
        self._usage_tokens: int | None = None  # more than 0: servers that do not count may say 0

    def read(self, response: HTTPSocketResponse, sock: _TimedSocket) -> None:
        self.record.http_status = response.status_code
        if response.status_code != 200:
            text = response.read().decode("utf-8", "replace")
            self.record.error = f"HTTP {response.status_code}: {_short(text)}"
            return
        named = b""  # the event
        while not self._done:
            line = response.readline(b"\n")
            if not line:
                break
            field, _, value = line.partition(b":")
            if field == b"event":
                named = value.strip()
            elif field == b"data":
                self._events += 1
                self._event(value.strip(), sock.at_s, named)
            elif not line.strip():  # the end of an event
                named = b""
        kind = _short(response.get("content-type", "something else"))
        if not self._events and not kind.startswith("text/event-stream"):
            self.record.error = f"the answer is not a stream of events but {kind}"
        elif not self._done and self.record.error is None and self.record.finish_reason is None:
            self.record.error = "the stream ended without a finish reason"

    def _event(self, payload: bytes, at_s: float, named: bytes) -> None:
        if payload == b"[DONE]":
            self._done = True
            return
        if named == b"error":  # whatever form its data has
            self.record.error, self._done = _short(payload.decode(errors="replace")), True
            return
        try:
            event = protocol.parse_event(self.api, json.loads(payload), self._seen)
        except protocol.NOT_UNDERSTOOD:
            event = protocol.StreamEvent(error=f"not understood: {_short(payload.decode(errors='replace'))}")
        record = self.record
        if event.error is not None:
            record.error, self._done = event.error, True
            return
        if event.text or event.finish_reason:
            self._token(event, at_s)
        record.finish_reason = event.finish_reason or record.finish_reason
        self._usage_tokens = event.output_tokens or self._usage_tokens
        record.prompt_tokens = event.prompt_tokens or record.prompt_tokens
        record.accept_length = event.accept_length or record.accept_length
        record.server_slo = event.server_slo or record.server_slo
        # A server that speculates sends several tokens in a chunk; not every server counts them.
        received = max(self._usage_tokens or 0, record.n_chunks)
        if record.finish_reason is None and received >= self.hang_up_at:
            record.error, self._done = "client_disconnect", True

    def _token(self, event: protocol.StreamEvent, at_s: float) -> None:
        record = self.record
        if record.first_token_s is None:
            record.first_token_s = at_s
            record.first_chunk_tokens = event.output_tokens or 1
        elif event.text and record.last_token_s is not None:
            self._gaps_ms.append(round((at_s - record.last_token_s) * 1e3, 2))
        # The end-of-text token has no text: its time is that of the event with the finish reason, also
        # if it is the whole answer.
        record.last_token_s = at_s
        if event.text:
            record.n_chunks += 1
            self.text.append(event.text)
            self._seen += len(event.text)

    def finish(self) -> None:
        """Token counts, end time, verdict."""
        record = self.record
        # JSON can write half a surrogate pair, and a file cannot: the record would be lost.
        record.error, record.finish_reason = map(_encodable, (record.error, record.finish_reason))
        record.end_s = self.now()
        record.itl_ms = self._gaps_ms
        record.output_tokens = self._usage_tokens or record.n_chunks
        record.token_source = "usage" if self._usage_tokens else "chunks"
        record.first_chunk_tokens = min(record.first_chunk_tokens, max(1, record.output_tokens))
        if record.ok and not self.text and record.output_tokens == 0:
            record.error = "the answer holds no token"
        if record.ok and self.answer_tokens is not None and record.output_tokens > self.answer_tokens:
            record.error = (
                f"the answer did not end after the {self.answer_tokens} tokens of its trace: "
                f"start the server with {REPLAY_ENV}=1 in its environment"
            )
        record.judge()


def _encodable(text: str | None) -> str | None:
    return None if text is None else text.encode("utf-8", "replace").decode()


def _short(text: str) -> str:
    """One line for an error message: the server's own words if it sent JSON."""
    try:
        data = json.loads(text)
        said = protocol.parse_event("completions", data, 0).error
        text = said or data.get("detail") or data.get("message") or text
    except protocol.NOT_UNDERSTOOD:
        pass
    return " ".join(str(text).split())[:300]
