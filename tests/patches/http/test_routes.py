"""Which of SGLang's routes a server refuses."""

from __future__ import annotations

import asyncio
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from jinja2 import TemplateError
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

from adaserve.host.device import PROFILE_ROUTES_ENV
from adaserve.patches.http import routes
from adaserve.patches.http.admin_access import _guarded


def refused(
    path: str = "/generate", method: str = "POST", *headers: tuple[bytes, bytes], kind: str = "http"
) -> Any:
    """How the answer to a request begins that is not passed on; None for one that is."""
    passed: list[str] = []
    sent: list[Any] = []

    async def app(scope: Any, *_: Any) -> None:
        passed.append(scope["path"])

    async def receive() -> Any:
        raise AssertionError("nobody reads the body")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": kind, "method": method, "path": path, "headers": list(headers)}
    asyncio.run(routes.Routes(app)(scope, receive, send))
    assert passed == ([] if sent else [path])
    return sent[0] if sent else None


def test_websockets_are_refused() -> None:
    """SGLang asks for no key there, and Prometheus' app falls over them."""
    assert refused("/v1/realtime", "GET", kind="websocket")["type"] == "websocket.close"
    assert refused(kind="lifespan") is None


@pytest.mark.parametrize(
    ("path", "allowed", "passes"),
    [
        ("/start_profile", "1", True),
        ("/stop_profile", "1", True),
        ("/start_profile", "", False),
        ("/slow_down", "1", False),
        ("/generate", "", True),
    ],
)
def test_profiles_are_for_those_who_start_the_server(
    path: str, allowed: str, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROFILE_ROUTES_ENV, allowed)
    start = refused(path)
    assert start is None if passes else start["status"] == 400


def test_a_request_with_two_lengths_is_refused_and_its_connection_closed() -> None:
    lengths = (b"content-length", b"5"), (b"transfer-encoding", b"chunked")
    start = refused("/generate", "POST", *lengths)
    assert start["status"] == 400 and (b"connection", b"close") in start["headers"]
    assert refused("/generate", "POST", lengths[0]) is None


def test_methods_that_nobody_serves_are_refused() -> None:
    """Each would be a label of SGLang's metrics for as long as the server lives."""
    assert refused(method="ANYTHING")["status"] == 405


def test_a_model_of_text_transcribes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "_takes_media", lambda: False)
    assert refused(routes.TRANSCRIPTIONS)["status"] == 400
    monkeypatch.setattr(routes, "_takes_media", lambda: True)
    assert refused(routes.TRANSCRIPTIONS) is None


@pytest.mark.parametrize(
    ("error", "status"),
    [(TemplateError("roles must alternate"), 400), (ValueError("too long"), 400), (KeyError("ours"), 500)],
)
def test_a_chat_that_its_template_refuses_is_the_clients_fault(error: Exception, status: int) -> None:
    """SGLang says so on its other routes, but not on Ollama's."""
    app = FastAPI()

    @app.post("/api/chat")
    async def chat() -> None:
        raise error

    routes.mount(app)
    answer = TestClient(app, raise_server_exceptions=False).post("/api/chat")
    assert answer.status_code == status and (status == 500 or str(error) in answer.text)


def engine() -> Any:
    """An ``sgl.Engine`` whose tokenizer manager could talk to nobody."""
    own = Engine.__new__(Engine)
    own.loop, own.tokenizer_manager = asyncio.new_event_loop(), TokenizerManager.__new__(TokenizerManager)
    return own


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("update_weights_from_disk", ("folder",)),
        ("init_weights_update_group", ("host", 1, 0, 2, "group")),
        ("release_memory_occupation", ()),
        ("load_lora_adapter", ("name", "folder")),
        ("start_profile", ()),
    ],
)
def test_an_engine_refuses_what_a_server_does(
    name: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"/{name}"
    hooked = _wrap_fn(getattr(TokenizerManager, name), routes.refuse_call(path), HookType.BEFORE)
    monkeypatch.setattr(TokenizerManager, name, hooked)
    with pytest.raises(ValueError, match=f"^{path} is refused .*: {re.escape(routes.REFUSED[path])}$"):
        getattr(engine(), name)(*arguments)


@pytest.mark.parametrize("method", ["save_sharded_model", "save_remote_model", "update_weights_from_disk"])
def test_an_engine_reaches_no_scheduler_past_that(method: str) -> None:
    with pytest.raises(ValueError, match=f"^{method} is refused .* packed"):
        routes.refuse_rpc(None, method, path="x")
    routes.refuse_rpc(None, "flush_cache")


@pytest.mark.parametrize("measured", ["", "1"])
def test_every_refused_route_is_refused_to_an_engine_too(
    measured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROFILE_ROUTES_ENV, measured)
    hooked: list[str] = []
    monkeypatch.setattr(routes, "hook", lambda target, *_: hooked.append(target.rpartition(".")[2]))
    routes.register()
    offered = {name for name in vars(Engine) if f"/{name}" in routes.REFUSED}
    profiling = {"start_profile", "stop_profile"}
    assert "update_weights_from_tensor" in offered - profiling <= set(hooked)
    assert profiling <= offered and bool(profiling & set(hooked)) != bool(measured)


def serve_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = SimpleNamespace(api_key=None, admin_api_key=None)
    monkeypatch.setattr("sglang.srt.runtime_context.get_serving", lambda: serving)


def test_a_client_that_left_before_its_request_was_read_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    serve_without_keys(monkeypatch)

    async def never(*_: Any) -> None:
        raise AssertionError("nobody is there")

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": "/abort_request", "headers": []}
    asyncio.run(_guarded(never)(scope, gone, never))


@pytest.mark.parametrize("prefix", ["", "/v"])
@pytest.mark.parametrize(("abort_all", "status"), [(True, 403), (False, 200)])
def test_only_aborts_of_everything_need_a_key(
    prefix: str, abort_all: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the server is mounted below a prefix (``--fastapi-root-path``)."""
    serve_without_keys(monkeypatch)
    sent = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        sent.append(message.get("status"))

    async def receive() -> Any:
        body = json.dumps({"rid": "" if abort_all else "r", "abort_all": abort_all}).encode()
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "method": "POST",
        "path": f"{prefix}/abort_request",
        "root_path": prefix,
        "headers": [],
    }
    asyncio.run(_guarded(app)({**scope, "client": ("10.0.0.9", 1)}, receive, send))
    assert sent[0] == status
