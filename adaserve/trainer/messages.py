"""What server and trainer say to each other: JSON over a socket; weights and records are in shared memory.

A message is one packet: it is there as a whole or not at all, so nobody waits for the rest of one whose
sender was stopped in the middle. The server asks (``Load``) and the trainer answers (``Alive``), never the
other way round, and the server asks again only when it has been answered: so no message of the server's can
ever find the socket full.
"""

from __future__ import annotations

import socket

import msgspec

from adaserve.sharpening import Correction
from adaserve.slo.events import DraftScores


class Hello(msgspec.Struct, tag=True):
    """The trainer is ready. What a candidate must look like: name -> (dtype, shape)."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]


class Progress(msgspec.Struct, tag=True):
    """After every judgement: expected accepted tokens of a chain of 4 on the newest requests."""

    present: float
    first: float
    candidate: float
    verdict: str  # "better", "worse", "undecided", or "first": the first draft serves again
    classes: dict[str, DraftScores]
    requests: int  # taken in since the start
    tokens: int
    updates: int


class Candidate(msgspec.Struct, tag=True):
    """Better weights lie in shared memory: ``size`` bytes of a safetensors file."""

    number: int
    size: int
    score: float
    present: float  # of the draft that it is to replace, on the same requests
    correction: Correction  # how it is read


class Answer(msgspec.Struct, tag=True):
    """The server has swapped the candidate in, or has dropped it."""

    number: int
    taken: bool


class Load(msgspec.Struct, tag=True):
    """Whether the server needs the processor for itself for the next moments."""

    busy: bool


class Alive(msgspec.Struct, tag=True):
    """The answer to ``Load``."""

    cpu_s: float  # that the trainer has used


class Settings(msgspec.Struct):
    """What the trainer is started with, as JSON on its command line."""

    draft: str
    device: str  # that it is trained on
    loss: str
    rate: float
    memory_mb: int
    folder: str | None  # of the versions that are kept
    ring: int  # descriptors of shared memory and of the socket
    weights: int
    socket: int
    vocabulary: int  # the target's tokens
    known: int | None = (
        None  # descriptor of shared memory: ids (int64) of those that a model knows; None = all
    )
    target: str | None = None  # whose embedding the draft reads, which is a head; None = it is a model
    served: Candidate | None = None  # after a restart: the draft that is served, in shared memory


Message = Hello | Progress | Candidate | Answer | Load | Alive
_DECODER = msgspec.json.Decoder(Message)
_ENCODER = msgspec.json.Encoder()
_MAX_BYTES = 1 << 20
"""Of a packet: more than Linux lets anybody send."""


def line() -> tuple[socket.socket, socket.socket]:
    """Two ends that talk to each other. Linux only."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Message) -> None:
    """Raises OSError when the other side is gone."""
    end.send(_ENCODER.encode(message))


def receive(end: socket.socket) -> Message | None:
    """The next message; None where there is none yet.

    Raises EOFError or OSError when the other side is gone, DecodeError for what is no message."""
    try:
        packet = end.recv(_MAX_BYTES, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    if not packet:
        raise EOFError
    return _DECODER.decode(packet)
