"""Wrong keys are refused, whatever they are made of."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from sglang.srt.utils.auth import AuthLevel, decide_request_auth

from adaserve.patches.keys import _ascii_only


def decided(header: str | None) -> Any:
    return _ascii_only(
        inspect.unwrap(decide_request_auth),
        method="POST",
        path="/generate",
        authorization_header=header,
        api_key="secret",
        admin_api_key=None,
        auth_level=AuthLevel.NORMAL,
    )


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Bearer sécret", "Bearer \x80", "é secret"])
def test_a_wrong_key_gets_401(header: str | None) -> None:
    answer = decided(header)
    assert not answer.allowed and answer.error_status_code == 401


def test_the_right_one_is_let_in() -> None:
    assert decided("Bearer secret").allowed
