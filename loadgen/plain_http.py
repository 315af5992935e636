"""Plain blocking HTTP from the standard library, for everything except the load: it works with and without
gevent."""

from __future__ import annotations

import http.client
import ssl
import urllib.request
from collections.abc import Mapping
from typing import Any

from adaserve.loadgen.config import Endpoint

ERRORS = (OSError, ValueError, http.client.HTTPException)
"""Raised when nothing answers, or something that is not such a server; ValueError: the answer is not JSON."""


def base_url(server: Endpoint) -> str:
    return server.url.rstrip("/").removesuffix("/v1")


def tls_context(server: Endpoint) -> ssl.SSLContext | None:
    """How certificates are checked; None for a server without TLS."""
    if not server.url.startswith("https:"):
        return None
    context = ssl.create_default_context()
    if server.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def open_url(
    server: Endpoint,
    path: str,
    timeout_s: float,
    data: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """GET, or POST of ``data``, with the server's own headers. Raises ERRORS.

    Never through a proxy that the environment names, because the load does not go through it either."""
    request = urllib.request.Request(base_url(server) + path, data, {**server.headers, **(headers or {})})
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls_context(server)))
    return urllib.request.build_opener(*handlers).open(request, timeout=timeout_s)
