"""Starts SGLang servers with AdaServe: what to serve, a child process for tools and tests, its control."""

from adaserve.host.device import on_cpu
from adaserve.server.control import ServerError
from adaserve.server.process import START_TIMEOUT_S, ServerProcess, Spec, require_free
from adaserve.server.spec import ServerSpec, api_key, bearer, require_models, url_of

__all__ = [
    "START_TIMEOUT_S",
    "ServerError",
    "ServerProcess",
    "ServerSpec",
    "Spec",
    "api_key",
    "bearer",
    "on_cpu",
    "require_free",
    "require_models",
    "url_of",
]
