"""Headless Chromium over the WebDriver protocol, with the standard library only."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
AVAILABLE = bool(CHROMIUM and DRIVER)
DRAWN = "return document.querySelectorAll('.u-over').length === 7"
"""The live page has all its charts, of a server whose draft does not learn."""

_ARGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


class Browser:
    """One window."""

    def __init__(self, base: str, session: str) -> None:
        self._url = f"{base}/session/{session}"

    def open(self, url: str) -> None:
        call(f"{self._url}/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        return call(f"{self._url}/execute/sync", {"script": script, "args": list(args)})

    def wait(self, script: str, seconds: float = 15.0) -> Any:
        """The first truthy result of ``script``."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if result := self.run(script):
                return result
            time.sleep(0.1)
        raise AssertionError(f"still false after {seconds} s: {script}")

    def log(self) -> list[str]:
        """Errors that the page wrote to the console."""
        entries = call(f"{self._url}/se/log", {"type": "browser"})
        return [e["message"] for e in entries if e["level"] == "SEVERE"]

    def screenshot(self, path: Path, full: bool = True) -> None:
        """The whole page when ``full``, else what the window shows."""
        command: dict[str, Any] = {"format": "png", "captureBeyondViewport": full}
        if full:
            width, height = self.run(
                "return [document.documentElement.clientWidth, document.documentElement.scrollHeight]"
            )
            command["clip"] = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        data = call(f"{self._url}/goog/cdp/execute", {"cmd": "Page.captureScreenshot", "params": command})
        path.write_bytes(base64.b64decode(data["data"]))


def call(url: str, data: Any = None, method: str | None = None) -> Any:
    body = None if data is None else json.dumps(data).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["value"]
    except urllib.error.HTTPError as e:
        raise AssertionError(e.read().decode("utf-8", "replace")[:600]) from None


@contextlib.contextmanager
def browser(width: int, height: int, dark: bool = False, keeps_data: bool = True) -> Iterator[Browser]:
    """A window of that size in CSS pixels; narrow ones are phones. ``keeps_data``: cookies and the like."""
    with tempfile.TemporaryDirectory() as profile, _driver() as base:
        options: dict[str, Any] = {
            "binary": CHROMIUM,
            "prefs": {"profile.default_content_setting_values.cookies": 1 if keeps_data else 2},
            "args": [*_ARGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"],
        }
        wanted = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        session = call(f"{base}/session", {"capabilities": wanted})["sessionId"]
        window = Browser(base, session)
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1.0, "mobile": width < 600}
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        for cmd, params in (
            ("Emulation.setDeviceMetricsOverride", metrics),
            ("Emulation.setEmulatedMedia", {"features": media}),
        ):
            call(f"{base}/session/{session}/goog/cdp/execute", {"cmd": cmd, "params": params})
        try:
            yield window
        finally:
            call(f"{base}/session/{session}", method="DELETE")


@contextlib.contextmanager
def _driver() -> Iterator[str]:
    """Address of a chromedriver of one's own."""
    process, base = _started()
    try:
        yield base
    finally:
        process.terminate()
        process.wait(10)


def _started(attempts: int = 5) -> tuple[subprocess.Popen[str], str]:
    """One that runs, and its address. Now and then chromedriver gives up at its start, so it gets several."""
    assert DRIVER is not None
    said = ""
    for _ in range(attempts):
        process = subprocess.Popen(
            [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            if "started successfully on port" in line:
                return process, f"http://127.0.0.1:{line.rsplit(' ', 1)[1].strip().rstrip('.')}"
            said += line
        process.wait(10)
    raise AssertionError(f"chromedriver did not start in {attempts} attempts: {said[-2000:]}")
