"""Makes the pictures of docs/img: ``python docs/screenshots.py [server] [report] [runs=FOLDER]``.

All show the embedded pair on this machine: ``server`` the live page and Locust's tab (three minutes),
``report`` that of a demo (``runs=FOLDER``: of the demo whose results are there). Needs Chromium and its
driver (Debian: chromium, chromium-driver)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMG = ROOT / "docs" / "img"
TRAFFIC = (  # with milliseconds all requests would be `custom`
    "duration_s: 150\nserver: {slo_headers: class}\n"
    "arrivals: {kind: peak, rps: 0.8, to_rps: 1.8, at: 0.4, width: 0.15}\n"
)
SHOT_AT_S = 110.0
LIVE = (  # picture, width, height, dark
    ("slo-light", 1200, 850, False),
    ("slo-dark", 1200, 850, True),
    ("slo-phone", 390, 844, False),
)
sys.path[:0] = [str(ROOT)]

from tests.slo.browser import DRAWN, browser  # noqa: E402


def shoot_report(folder: Path) -> None:
    """The report of a demo on this machine (about four minutes), or of the one that lies in ``folder``."""
    if not (folder / "report.html").exists():
        folder = folder / "demo"
        subprocess.run([sys.executable, "-m", "adaserve.cli", "demo", "--out", str(folder)], check=True)
    with browser(1180, 1330) as page:
        page.open(f"file://{folder}/report.html")
        page.screenshot(IMG / "report.png", full=False)


def shoot_server(folder: Path) -> None:
    """The live page and Locust's tab, after the peak of one run."""
    from adaserve.host.ports import free_port
    from adaserve.server import ServerProcess, ServerSpec

    config, port = folder / "mix.yaml", free_port()
    config.write_text(TRAFFIC)
    with ExitStack() as stack:
        # Browsers first: beside a busy server they take long to start, and disturb what they show.
        live = [stack.enter_context(browser(width, height, dark)) for _, width, height, dark in LIVE]
        tab = stack.enter_context(browser(1200, 440, dark=False))
        server = stack.enter_context(ServerProcess(ServerSpec(port=free_port()), log=folder / "server.log"))
        command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadgen" / "locustfile.py")]
        command += ["--host", server.url, "--bench-config", str(config), "--results", str(folder / "locust")]
        command += ["--autostart", "--web-host", "127.0.0.1", "--web-port", str(port)]
        process = subprocess.Popen(command)
        try:
            _wait_for(f"http://127.0.0.1:{port}/")
            time.sleep(SHOT_AT_S)
            for page, (name, *_) in zip(live, LIVE, strict=True):
                page.open(f"{server.url}/slo")
                page.wait(DRAWN, 60)
                page.screenshot(IMG / f"{name}.png", full=name == "slo-light")
                page.open("about:blank")
            tab.open(f"http://127.0.0.1:{port}/?tab=slo")
            tab.wait("return document.body.innerText.includes('summarization')", 60)
            tab.screenshot(IMG / "locust.png", full=False)
        finally:
            process.terminate()
            process.wait(60)


def _wait_for(url: str) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.5)
    raise SystemExit(f"nothing answers at {url}")


def main() -> None:
    IMG.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        kept = [Path(word.partition("=")[2]) for word in sys.argv[1:] if word.startswith("runs=")]
        wanted = [word for word in sys.argv[1:] if "=" not in word] or ["server", "report"]
        if "server" in wanted:
            shoot_server(Path(folder))
        if "report" in wanted:
            shoot_report(kept[0].resolve() if kept else Path(folder))


if __name__ == "__main__":
    main()
