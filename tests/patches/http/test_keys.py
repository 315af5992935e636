"""Wrong keys are refused, whatever they are made of, and right ones are told to nobody."""

from __future__ import annotations

import inspect
import pickle
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.sampling.watermarking.core import redact_watermark_command_line, redact_watermark_secrets
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.auth import AuthLevel, decide_request_auth

from adaserve.patches.http.keys import _decide, _dumped, _hide, _hide_in_command


@pytest.fixture(autouse=True)
def prefix(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """How the server was started."""
    serving = SimpleNamespace(fastapi_root_path="")
    monkeypatch.setattr("sglang.srt.runtime_context.get_serving", lambda: serving)
    return serving


def decided(
    header: str | None, path: str = "/generate", level: AuthLevel = AuthLevel.NORMAL, admin: str | None = None
) -> Any:
    return _decide(
        inspect.unwrap(decide_request_auth),
        method="POST",
        path=path,
        authorization_header=header,
        api_key="secret",
        admin_api_key=admin,
        auth_level=level,
    )


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer wrong", "Bearer sécret", "Bearer \x80", "é secret"]
)
def test_a_wrong_key_gets_401(header: str | None) -> None:
    answer = decided(header)
    assert not answer.allowed and answer.error_status_code == 401


def test_the_right_one_is_let_in() -> None:
    assert decided("Bearer secret").allowed


@pytest.mark.parametrize("root", ["", "/llm", "/health-ai", "/metrics-llm", "/ready-to-use", "/llm/"])
def test_a_prefix_changes_nothing_about_who_needs_a_key(root: str, prefix: SimpleNamespace) -> None:
    """uvicorn puts it before every path."""
    prefix.fastapi_root_path = root
    for path in ("/generate", "/v1/models", "/server_info"):
        assert not decided(None, root + path).allowed
        assert decided("Bearer secret", root + path).allowed
    for path in ("/flush_cache", "/freeze_gc"):
        assert not decided(None, root + path, AuthLevel.ADMIN_OPTIONAL, "root").allowed
    for path in ("/health", "/health_generate", "/metrics", "/metrics/"):
        assert decided(None, root + path).allowed


def test_what_a_server_says_about_itself_holds_no_key() -> None:
    settings = {"api_key": "user's", "admin_api_key": "root's", "ssl_keyfile_password": None, "port": 30000}
    told = _hide(inspect.unwrap(redact_watermark_secrets), settings)
    assert told == settings | {"api_key": "<redacted>", "admin_api_key": "<redacted>"}
    assert settings["api_key"] == "user's", "the server needs it"


def test_nor_does_the_dump_of_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    core = "sglang.srt.sampling.watermarking.core.redact_watermark_secrets"
    monkeypatch.setattr(core, partial(_hide, inspect.unwrap(redact_watermark_secrets)))
    args = ServerArgs(model_path="none", api_key="user's", admin_api_key="root's")
    dump = _dumped(lambda manager: manager.server_args, SimpleNamespace(server_args=args))
    assert dump["model_path"] == "none"
    assert b"user's" not in pickle.dumps(dump) and b"root's" not in pickle.dumps(dump)


@pytest.mark.parametrize(
    "command",
    [
        "serve --api-key secret --port 1", "serve --api-key=secret", "serve --admin-api-key secret",
        "serve --admin-api=secret --api-k secret", "serve --ssl-keyfile-password secret",
        "serve --api-key secret --api-key secret", "serve --ap secret --ssl-keyfile file",
    ],
)  # fmt: skip
def test_nor_does_its_command_line(command: str) -> None:
    told = _hide_in_command(inspect.unwrap(redact_watermark_command_line), command.split())
    assert "secret" not in told and len(told.split()) == len(command.split())
    assert told.split()[1].partition("=")[0] == command.split()[1].partition("=")[0]
    for other in ("--port 1", "--ssl-keyfile file"):
        assert (other in command) == (other in told)


def test_a_key_may_look_like_a_flag() -> None:
    told = _hide_in_command(
        inspect.unwrap(redact_watermark_command_line), ["--api-key", "--api-key", "--host", "h"]
    )
    assert told == "--api-key <redacted> --host h"


def test_what_is_no_key_is_told() -> None:
    command = "serve --port=1 -- a - b"
    assert _hide_in_command(inspect.unwrap(redact_watermark_command_line), command.split()) == command
