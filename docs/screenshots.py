"""Makes the pictures of docs/img: ``python docs/screenshots.py [live] [report] [locust] [runs=FOLDER]``.

The live page and Locust's tab show made-up traffic, the report a real run of the embedded pair on this
machine (``runs=FOLDER`` keeps its results there, and draws them again when they are there). Needs
Chromium and its driver (Debian: chromium, chromium-driver)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMG = ROOT / "docs" / "img"
POLICIES = ("priced", "none")
SEEDS = ("0", "1")
sys.path[:0] = [str(ROOT / "tests" / "live"), str(ROOT / "tests" / "loadgen")]

from browser import browser  # noqa: E402
from fake_server import running_fake  # noqa: E402


@contextmanager
def live_page() -> Iterator[str]:
    """A server process with the page and five minutes of made-up traffic."""
    code = (
        "import sys, socket, uvicorn; sys.path.insert(0, 'tests/live'); import test_page as t\n"
        "sock = socket.create_server(('127.0.0.1', 0)); print(sock.getsockname()[1], flush=True)\n"
        "app = t.Site([t.made_up().state()]).app\n"
        "uvicorn.Server(uvicorn.Config(app, log_level='error')).run(sockets=[sock])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/slo"
    finally:
        process.terminate()
        process.wait(10)


def shoot_live_page() -> None:
    with live_page() as url:
        for name, width, height, dark in (
            ("slo-light", 1200, 850, False),
            ("slo-dark", 1200, 850, True),
            ("slo-phone", 390, 844, False),
        ):
            with browser(width, height, dark) as page:
                page.open(url)
                page.wait("return document.querySelectorAll('.u-over').length === 6", 60)
                page.screenshot(IMG / f"{name}.png", full=name == "slo-light")


def shoot_report(folder: Path, scratch: Path) -> None:
    """A real run: the embedded pair on this machine, with AdaServe and without (about five minutes). Runs
    that lie in ``folder`` already, for example a demo's, are taken as they are."""
    if not list(folder.glob("*/summary.json")):
        _measure(folder)
    runs = sorted((p.parent for p in folder.glob("*/summary.json")), key=lambda r: (r.name[:4] == "none", r))
    report = [sys.executable, "-m", "adaserve.loadgen", "report", *map(str, runs), "--no-png"]
    subprocess.run([*report, "--out", str(scratch)], check=True)
    with browser(1180, 1330) as page:
        page.open(f"file://{scratch}/report.html")
        page.screenshot(IMG / "report.png", full=False)


def _measure(folder: Path) -> None:
    from adaserve.server import Server, ServerSpec, free_port

    with Server(ServerSpec(port=free_port()), log=folder / "server.log") as server:
        for seed in SEEDS:
            for policy in POLICIES:
                server.set_policy(policy)
                args = ["--url", server.url, "--rps", "1.2", "--duration", "30", "--seed", seed]
                args += ["--out", f"{policy}-seed{seed}"]
                bench = [sys.executable, "-m", "adaserve.loadgen", "bench", "serve", *args]
                subprocess.run(bench, check=False, cwd=folder)


def shoot_locust(folder: Path) -> None:
    config = folder / "mix.yaml"
    config.write_text("baseline_ms: 20\nduration_s: 300\narrivals: {rps: 4}\n")
    with running_fake(token_ms=20, jitter=0.35) as fake:
        command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadgen" / "locustfile.py")]
        command += ["--host", fake.url, "--bench-config", str(config), "--results", str(folder / "locust")]
        command += ["--autostart", "--web-host", "127.0.0.1", "--web-port", "8976"]
        process = subprocess.Popen(command)
        try:
            _wait_for("http://127.0.0.1:8976/")
            with browser(1200, 560, dark=False) as page:
                page.open("http://127.0.0.1:8976/?tab=slo")
                page.wait("return document.body.innerText.includes('summarization')", 300)
                time.sleep(20)
                page.screenshot(IMG / "locust.png", full=False)
        finally:
            process.terminate()
            process.wait(30)


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
        wanted = [word for word in sys.argv[1:] if "=" not in word] or ["live", "report", "locust"]
        if "live" in wanted:
            shoot_live_page()
        if "report" in wanted:
            shoot_report(kept[0] if kept else Path(folder), Path(folder))
        if "locust" in wanted:
            shoot_locust(Path(folder))


if __name__ == "__main__":
    main()
