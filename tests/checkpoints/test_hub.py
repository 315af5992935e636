"""A model that cannot be downloaded is told in a sentence, before SGLang tries for a minute."""

from __future__ import annotations

from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError
from typer.testing import CliRunner

from adaserve.checkpoints.hub import why_no_model, why_not_on_hub
from adaserve.cli import app

REQUEST = httpx.Request("GET", "https://hub/api/models/gpt2")
GONE = httpx.ConnectError("[Errno -2] Name or service not known", request=REQUEST)


def answered(status: int) -> httpx.Response:
    return httpx.Response(status, request=REQUEST)


@pytest.fixture(autouse=True)
def nothing_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


def hub_says(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    def model_info(name: str, timeout: float) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr(huggingface_hub, "model_info", model_info)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (GONE, "hub cannot be reached to look for it there: [Errno -2] Name or service not known"),
        (httpx.ReadTimeout(""), "hub cannot be reached to look for it there: ReadTimeout"),
        (RepositoryNotFoundError("404", response=answered(404)), "neither a folder here nor on the"),
        (OfflineModeIsEnabled(), "HF_HUB_OFFLINE forbids downloading it"),
    ],
)  # fmt: skip
def test_a_model_that_is_nowhere(error: Exception, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_says(monkeypatch, error)
    why = why_not_on_hub("gpt2")
    assert why is not None and "gpt2" in why and says in why and "\n" not in why


@pytest.mark.parametrize(
    "error", [None, HfHubHTTPError("busy", response=answered(503)), ValueError("no JSON")]
)
def test_a_model_that_may_be_there(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_says(monkeypatch, error)
    assert why_not_on_hub("gpt2") is None


def test_nobody_is_asked_for_what_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_says(monkeypatch, GONE)
    (tmp_path / "folder").mkdir()
    downloaded = tmp_path / "hub" / "models--lab--model" / "snapshots" / "abc"
    downloaded.mkdir(parents=True)
    (downloaded / "config.json").touch()
    for name in ("folder", "lab/model", "s3://bucket/model"):
        assert why_not_on_hub(name) is None
    assert why_not_on_hub("lab/other") is not None
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true")
    assert why_not_on_hub("lab/other") is None


def test_a_file_of_weights_is_no_model(tmp_path: Path) -> None:
    for name, is_model in {"model.safetensors": False, "model.gguf": True}.items():
        (tmp_path / name).touch()
        why = why_no_model(str(tmp_path / name))
        assert why is None if is_model else "is a file" in str(why)


@pytest.mark.parametrize("flag", ["--model", "--second-draft"])
def test_a_server_is_not_started_without_its_model(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_says(monkeypatch, GONE)
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("it is started"))
    others = [] if flag == "--model" else ["--model-path", ".", "--draft-model-path", "."]
    Path("config.json").write_text("{}")
    result = CliRunner().invoke(app, ["serve", flag, "lab/nosuchmodel", *others])
    assert result.exit_code == 2 and "error: there is no folder lab/nosuchmodel" in result.stderr
