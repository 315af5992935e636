"""Queries and commands to a running server from the process that started it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import httpx

from adaserve.errors import UserError

_DRAIN_S = 60.0


class ServerError(UserError, RuntimeError):
    """A server did not start, or died; the message says why and what to do."""


class ServerControl:
    """Asks and tells the server at ``url``. ``headers``: what requests need, so that they are let in."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self.url, self._headers = url, headers

    def report(self) -> dict[str, Any]:
        """State of the first scheduler: policy, baseline, times, statistics."""
        info = self._ask("GET", "/server_info").raise_for_status().json()
        return dict(info["internal_states"][0]["adaserve"])

    def set_policy(self, name: str) -> None:
        """Changes the policy of the running server. Raises ServerError."""
        self._set("policy", name)

    def set_prefill(self, mode: str) -> None:
        """Changes how the running server prefills: one of ``config.PREFILLS``. Raises ServerError."""
        self._set("prefill", mode)

    def set_draft(self, name: str) -> None:
        """Where a draft learns: serves the "first" one, the "present" one, or that one "held" as it is.

        Raises ServerError."""
        self._set("draft", name)

    def number_requests(self, number: int) -> None:
        """The same requests after the same number, in one call, get the same texts. Raises ServerError."""
        self._set_state({"adaserve_next_request": number})

    def _set(self, setting: str, value: str) -> None:
        self._set_state({f"adaserve_{setting}={value}": 1})

    def fix_baseline(self, baseline_ms: float, headers: Mapping[str, str]) -> None:
        """Nothing changes the server's baseline any more. ``headers``: its admin's. Raises ServerError."""
        self._set_state({"adaserve_baseline_ms": baseline_ms}, headers)

    def _set_state(self, values: dict[str, float], headers: Mapping[str, str] | None = None) -> None:
        body = {"server_args": values}
        answer = self._ask("POST", "/set_internal_state", json=body, headers=headers)
        if answer.status_code != 200:
            raise ServerError(f"the server refused {values}: {answer.text}")

    def drain(self) -> None:
        """Waits until nothing runs and empties the prefix cache; requests that take too long are aborted.

        Raises ServerError when the server does not become idle."""
        end_s = time.monotonic() + _DRAIN_S
        while self._ask("POST", "/flush_cache").status_code != 200:
            if time.monotonic() > end_s:
                raise ServerError(f"the server did not become idle within {_DRAIN_S:.0f} s")
            self._ask("POST", "/abort_request", json={"rid": "", "abort_all": True})
            time.sleep(0.5)

    def _ask(
        self,
        method: str,
        path: str,
        json: Any = None,
        timeout: float = 30.0,
        headers: Mapping[str, str] | None = None,
    ) -> httpx.Response:
        """Raises httpx.HTTPError."""
        headers = headers or self._headers
        return httpx.request(method, self.url + path, json=json, timeout=timeout, headers=headers)
