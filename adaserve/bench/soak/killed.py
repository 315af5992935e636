"""A client that opens streams, says so on stdout and waits for its SIGKILL: ``killed.py PORT COUNT CLASS``.

It uses the standard library alone, so that it starts in a moment.
"""

from __future__ import annotations

import json
import socket
import sys
import time

TOKENS = 120
"""Output tokens that each stream asks for: more than it lives to see."""


def hold(port: int, slo_class: str, number: int) -> socket.socket:
    """A connection whose answer has begun."""
    params = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    body = json.dumps({"text": f"class A{number}:\n", "sampling_params": params, "stream": True}).encode()
    head = (
        f"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"x-slo-class: {slo_class}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(head.encode() + body)
    return connection


def main() -> None:
    port, count, slo_class = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    held = [hold(port, slo_class, number) for number in range(count)]
    for connection in held[: count // 2]:  # the others may still wait for their first token
        connection.recv(1)
    print("holding", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
