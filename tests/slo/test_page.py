"""The page at /slo in a real browser, with snapshots of a made-up server."""

from __future__ import annotations

import asyncio
import math
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse

from adaserve.slo.classes import SLO, SLOClass, SLOConfig
from adaserve.slo.events import DraftLearning, DraftScores, FinishedRequest, IterationSample, Judged
from adaserve.slo.page import mount, page_html
from adaserve.slo.snapshot import build_snapshot
from adaserve.slo.stats import SLOStats
from tests.slo.browser import AVAILABLE, DRAWN, browser

needs_browser = pytest.mark.skipif(not AVAILABLE, reason="Chromium and its driver are not installed")


def made_up(seconds: float = 300.0) -> SLOStats:
    """A server under a load that comes and goes: coding suffers at the peaks."""
    rng = random.Random(0)
    end = time.time()
    now = [end - seconds]
    stats = SLOStats(SLOConfig(), None, lambda: now[0])
    slos = {"coding": (0.0336, 0.80), "chat": (0.0467, 0.70), "summarization": (0.14, 0.40)}
    while now[0] < end:
        load = 6 + 5 * math.sin(9 * (end - now[0]) / seconds) + 2 * rng.random()
        for name, (slo, ease) in slos.items():
            if rng.random() < 0.006 * load:
                tpot = slo * ease * (1 + 0.028 * load * rng.lognormvariate(0, 0.5))
                tokens = 64 + rng.randrange(200)
                iterations, stall = int(tokens / (2.5 - 0.08 * load)), 0.4 * rng.random()
                asked, ttft = SLO(name, slo, 0.25), 0.05 * load * rng.random()
                stats.finish(
                    FinishedRequest(asked, ttft, tpot, tokens, failed=False, iterations=iterations,
                                    stall_s=stall, mean_running=load)
                )  # fmt: skip
        running, depth = 1 + int(load), 3 if load < 9 else 2
        emitted = round(running * (2.3 - 0.05 * load))
        stats.iteration(
            IterationSample(
                running=running,
                queue=max(0, int(load - 8)),
                depth=depth,
                width=2,
                budget=16 + 8 * (load < 9),
                verify_tokens=20,
                drafted_tokens=18,
                new_tokens=emitted,
                expected_tokens=emitted * 1.05,
                draft_s=0.004,
                select_s=0.0003,
                verify_s=0.021,
                total_s=0.0275,
                kv_use=0.2 + 0.05 * load,
                gated={"chat": [3, 1.234]},
            )
        )
        now[0] += 0.22
    scores = {"coding": DraftScores(12, 1.5, 1.3), "chat": DraftScores(20, 1.3, 1.2)}
    judged = [Judged(end - 60 * k, 1.42, 1.4, 1.25, "better", scores) for k in (3, 2, 1)]
    stats.learned(DraftLearning("running", judged, swaps=3, tokens=9000, cpu_s=8.5))
    return stats


class Site:
    """A FastAPI app with the page, as SGLang would carry it."""

    def __init__(self, states: list[Any], key: str = "") -> None:
        self.app = FastAPI()
        self.states = states

        async def snapshot(_: Request) -> dict[str, Any]:
            notes = ["the host is busy"] * len(self.states)
            return build_snapshot(self.states, "adaserve-pair", "adaserve", 28.0, notes).to_json()

        if key:

            @self.app.middleware("http")
            async def authenticate(request: Request, call_next: Any) -> Any:
                if request.headers.get("authorization") != f"Bearer {key}":
                    return JSONResponse({"error": "Unauthorized"}, 401)
                return await call_next(request)

        mount(self.app, snapshot)


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(site: Site) -> str:
        sock = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(site.app, log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{sock.getsockname()[1]}/slo"

    yield start
    for server, thread in servers:
        server.should_exit = True
        thread.join(10)


DRAWN_WITH_LEARNING = DRAWN.replace("7", "8")
HURRIED = """
const [wait, limit] = [setTimeout, AbortSignal.timeout.bind(AbortSignal)];
setTimeout = (f, ms) => wait(f, ms / 4);
AbortSignal.timeout = ms => limit(ms / 4);
"""
"""From then on the page polls every half second, and gives up on an answer four times as soon."""
OVERFLOWING = """
const clipped = e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== 'inline';
const outside = e => {
  const c = e.closest('.card'), b = e.getBoundingClientRect(), o = c && c.getBoundingClientRect();
  return c && c !== e && b.width && (b.right > o.right + 0.5 || b.left < o.left - 0.5); };
return [...document.querySelectorAll('main, main *')].filter(e => !e.closest('.plot'))
  .filter(e => clipped(e) || outside(e)).map(e => `${e.className}: ${e.textContent.slice(0, 50)}`);
"""


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desktop"])
def test_page_shows_everything(width: int, dark: bool, serve: Any, tmp_path: Path) -> None:
    state = made_up().state()
    url = serve(Site([state]))
    with browser(width, 850, dark) as page:
        page.open(url)
        page.wait(DRAWN_WITH_LEARNING)
        text = page.run("return document.body.innerText")
        background = page.run("return getComputedStyle(document.body).backgroundColor")
        overflow = page.run("return document.documentElement.scrollWidth - innerWidth")
        narrow = page.run(
            "return [...document.querySelectorAll('.plot .u-over')].some(area => area.clientWidth < 200)"
        )
        page.screenshot(tmp_path / "page.png")
        assert page.log() == []
    for expected in (
        "3 held at the gate, up to 1.2 s",
        "TTFT",
        "coding",
        "chat",
        "summarization",
        "adaserve-pair",
        "policy adaserve",
        "live",
    ):
        assert expected in text
    assert text.count("The host is busy.") == 1
    coding = build_snapshot([state]).classes[0]
    assert coding.attainment is not None and f"{100 * coding.attainment:.1f}%" in text
    assert "tokens but gave" in text or "prefills of other requests" in text
    assert sum(map(int, background[4:-1].split(","))) < 120 if dark else "246, 247, 249" in background
    assert overflow <= 0 and not narrow
    assert (tmp_path / "page.png").stat().st_size > 20_000


@needs_browser
@pytest.mark.parametrize("width", [360, 480, 700, 1024, 1200, 1920])
def test_every_label_fits_its_box(width: int, serve: Any) -> None:
    state = made_up().state()
    names = {"coding": "coding_assistants_of_the_editors", "custom": "custom"}
    for bucket in state["buckets"]:
        bucket["classes"] = {names.get(k, k): v for k, v in bucket["classes"].items()}
    for part in ("targets", "slos", "totals"):
        state[part] = {names.get(k, k): v for k, v in state[part].items()}
    url = serve(Site([state]))
    with browser(width, 900) as page:
        page.open(url)
        page.wait(DRAWN_WITH_LEARNING)
        assert page.run(OVERFLOWING) == []
        assert page.run("return document.documentElement.scrollWidth - innerWidth") <= 0


@needs_browser
def test_classes_without_requests_take_no_room(serve: Any) -> None:
    stats = SLOStats(SLOConfig())
    stats.finish(FinishedRequest(SLO("chat", 0.05), 0.2, 0.01, 40))
    with browser(1200, 900) as page:
        page.open(serve(Site([stats.state()])))
        page.wait(DRAWN)
        assert page.run("return [...document.querySelectorAll('#classes .name')].map(e => e.innerText)") == [
            "chat"
        ]
        assert "No requests so far: coding, summarization" in page.run("return document.body.innerText")


@needs_browser
def test_key_is_asked_for_and_used(serve: Any) -> None:
    url = serve(Site([made_up(20).state()], key="s3cret"))
    with browser(1000, 800) as page:
        page.open(url)
        page.wait("return !document.getElementById('message').hidden")
        assert "needs its API key" in page.run("return document.body.innerText")
        fill = "document.querySelector('input').value = arguments[0];"
        fill += "document.querySelector('form button').click()"
        page.run(fill, "wrong")
        page.wait("return document.body.innerText.includes('refused')")
        page.run(fill, "s3cret")
        page.wait(DRAWN_WITH_LEARNING)
        assert page.run("return document.getElementById('message').hidden")


@needs_browser
def test_an_idle_server_and_a_lost_one(serve: Any) -> None:
    site = Site([])
    url = serve(site)
    with browser(1000, 800) as page:
        page.open(url)
        page.run(HURRIED)
        page.wait("return document.body.innerText.includes('No classes yet')")
        fresh = SLOStats(SLOConfig())
        site.states = [fresh.state()]
        page.wait("return document.body.innerText.includes('No requests so far')")
        site.states = [{}]
        page.wait("return document.body.innerText.includes('showing the last figures')")


@needs_browser
def test_a_server_that_answers_no_more_is_not_live(serve: Any) -> None:
    site = Site([made_up(20).state()])
    stopped = threading.Event()

    @site.app.middleware("http")
    async def stall(request: Request, call_next: Any) -> Any:
        while stopped.is_set():
            await asyncio.sleep(0.1)
        return await call_next(request)

    with browser(1000, 800) as page:
        page.open(serve(site))
        page.wait(DRAWN_WITH_LEARNING)
        page.run(HURRIED)
        stopped.set()
        try:
            page.wait("return document.body.innerText.includes('no answer from the server; showing')", 60)
        finally:
            stopped.clear()
        page.wait("return document.getElementById('state').textContent === 'live'", 60)


@needs_browser
def test_a_key_that_no_header_can_hold_is_refused(serve: Any) -> None:
    with browser(1000, 800) as page:
        page.open(serve(Site([made_up(20).state()], key="s3cret")))
        page.wait("return document.querySelector('form')")
        page.run(
            "document.querySelector('input').value = '5€'; document.querySelector('form').requestSubmit()"
        )
        page.wait("return document.body.innerText.includes('This key was refused')")


@needs_browser
def test_a_key_that_is_given_twice_does_not_double_the_polls(serve: Any) -> None:
    site = Site([made_up(20).state()], key="s3cret")
    polls = [0]

    @site.app.middleware("http")
    async def slow(request: Request, call_next: Any) -> Any:
        if "authorization" in request.headers:
            polls[0] += 1
            await asyncio.sleep(0.1)
        return await call_next(request)

    with browser(1000, 800) as page:
        page.open(serve(site))
        page.wait("return document.querySelector('form')")
        page.run("document.querySelector('input').value = 's3cret'")
        page.run(HURRIED)
        page.run(
            "const form = document.querySelector('form'); for (let k = 0; k < 4; k++) form.requestSubmit()"
        )
        page.wait(DRAWN_WITH_LEARNING)
        first = polls[0]
        page.wait("return (window.polled = window.polled || Date.now()) && Date.now() - window.polled > 2250")
    assert 1 <= polls[0] - first <= 5, "one every half second"


@needs_browser
def test_a_single_point_is_seen_on_an_axis_of_a_minute(serve: Any) -> None:
    now = [time.time()]
    stats = SLOStats(SLOConfig(), None, lambda: now[0])
    stats.finish(FinishedRequest(SLO("chat", 0.05), 0.2, 0.01, 40))
    scores = {"chat": DraftScores(12, 1.5, 1.3)}
    stats.learned(DraftLearning("running", [Judged(now[0], 1.4, 1.4, 1.2, "better", scores)]))
    now[0] += 2.0
    with browser(1000, 800) as page:
        page.open(serve(Site([stats.state()])))
        page.wait(DRAWN_WITH_LEARNING)
        axes = page.run(
            "const axis = name => plots[name].plot.scales.x;"
            "return ['attainment', 'budget', 'learning'].map(axis).map(x => x.max - x.min)"
        )
        assert axes == [60, 60, 60]
        shown = "const p = plots[arguments[0]].plot; return p.series[1].points.show(p, 1)"
        assert page.run(shown, "attainment") and page.run(shown, "learning")
        assert not page.run(shown, "budget")


@needs_browser
def test_figures_are_not_rounded_to_something_else(serve: Any) -> None:
    strict = SLOConfig(classes={"chat": SLOClass(name="chat", tpot_ms=50.0, target=0.9999)})
    stats = SLOStats(strict, None)
    for k in range(2500):
        stats.finish(FinishedRequest(SLO("chat", 0.05), 0.2, 0.01 if k else 0.06, 1, iterations=1))
    with browser(1000, 800) as page:
        page.open(serve(Site([stats.state()])))
        page.wait(DRAWN)
        card = page.run("return document.querySelector('article').innerText")
        assert "99.96%" in card and "99.99% target" in card and "below target" in card
        assert page.run("return [0, 0.5, 0.994, 0.9996, 1].map(v => percent(v, 0))") == [
            "0%", "50%", "99%", "99.96%", "100%",
        ]  # fmt: skip
        ticks = "const p = plots.budget.plot; return p.axes[1].values(p, [0, 0.25, 0.5, 0.75, 1])"
        assert page.run(ticks) == ["0", "0.25", "0.5", "0.75", "1"]


@needs_browser
def test_requests_that_state_their_own_slos_are_not_shown_with_that_of_the_last_one(serve: Any) -> None:
    stats = SLOStats(SLOConfig())
    for slo_s, tpot_s in ((0.2, 0.15), (0.02, 0.01)):
        stats.finish(FinishedRequest(SLO("custom", slo_s), 0.2, tpot_s, 40))
    with browser(1000, 800) as page:
        page.open(serve(Site([stats.state()])))
        page.wait(DRAWN)
        card = page.run("return document.querySelector('article').innerText")
        assert "20.0 ms" not in card and "own" in card
        assert page.run("return document.querySelectorAll('article .over').length") == 0, "both were in time"


@needs_browser
def test_a_browser_that_keeps_no_data_shows_the_page(serve: Any) -> None:
    with browser(1000, 800, keeps_data=False) as page:
        page.open(serve(Site([made_up(20).state()], key="s3cret")))
        page.wait("return document.querySelector('form')")
        page.run(
            "document.querySelector('input').value = 's3cret'; document.querySelector('form button').click()"
        )
        page.wait(DRAWN_WITH_LEARNING)
        page.run("document.getElementById('theme').click()")
        assert page.run("return document.documentElement.dataset.theme") == "dark"


@needs_browser
def test_theme_button(serve: Any) -> None:
    with browser(1000, 800, dark=False) as page:
        page.open(serve(Site([made_up(20).state()])))
        page.wait(DRAWN_WITH_LEARNING)
        page.run("document.getElementById('theme').click()")
        assert page.run("return document.documentElement.dataset.theme") == "dark"
        page.wait(DRAWN_WITH_LEARNING)


def test_page_is_one_file_without_outside_links() -> None:
    html = page_html().decode()
    assert "UPLOT_JS" not in html and "uPlot" in html
    assert 'src="http' not in html and 'href="http' not in html
    assert len(html) < 100_000


def test_vendored_files_are_what_was_published() -> None:
    import hashlib
    from importlib import resources

    static = resources.files("adaserve.slo") / "static"
    for line in (static / "uPlot-SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((static / name).read_bytes()).hexdigest() == digest
