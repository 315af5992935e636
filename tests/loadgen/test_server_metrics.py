"""What a load test reads of a server's Prometheus endpoint."""

from __future__ import annotations

import socket
import threading

from adaserve.loadgen.config import Endpoint
from adaserve.loadgen.server_metrics import REQUESTS, learning, parse_metrics, scrape, server_side

METRICS = """
adaserve:draft_accepted{draft="present",slo_class="chat",model_name="m"} 1.5
adaserve:draft_accepted{slo_class="chat",draft="first"} 1.25
adaserve:draft_swaps 3
"""


def test_what_drafts_that_learn_gain_is_found() -> None:
    assert learning(parse_metrics(METRICS)) == {"chat": {"present": 1.5, "first": 1.25}}
    assert learning(parse_metrics("adaserve:draft_swaps 0\n")) is None


def test_a_server_that_was_started_anew_counts_from_nothing() -> None:
    def counted(met: int, missed: int) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        line = '%s{slo_class="chat",objective="all",outcome="%s"} %d\n'
        other = 'adaserve:output_tokens_total{slo_class="chat"} 7\n'
        return parse_metrics(line % (REQUESTS, "met", met) + line % (REQUESTS, "missed", missed) + other)

    def told(requests: int, attainment: float) -> dict[str, dict[str, dict[str, float]]]:
        return {"chat": {"all": {"requests": requests, "attainment": attainment}}}

    assert server_side(counted(3, 10), counted(20, 13)) == told(20, 0.85)
    assert server_side(counted(3, 10), counted(20, 5)) == told(25, 0.8)


def test_nothing_is_known_without_the_counts_before_the_run() -> None:
    after = parse_metrics(REQUESTS + '{slo_class="chat",objective="all",outcome="met"} 900\n')
    assert server_side(scrape(Endpoint(url="http://127.0.0.1:9")), after) is None
    assert server_side(parse_metrics("python_info 1\n"), after) is not None, "it has served nobody yet"


def test_an_answer_that_breaks_off_is_no_answer() -> None:
    """A server that ends at the end of a run: the records are there, and the run counts."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with server.accept()[0] as asked:
                asked.recv(4096)
                asked.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nadaserve:draft_swaps 3\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert scrape(Endpoint(url=f"http://127.0.0.1:{server.getsockname()[1]}")) == {}
        thread.join()
