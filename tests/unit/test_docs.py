"""What the documentation points at is there: links, commands and their options, files, settings, metrics."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from prometheus_client import CollectorRegistry
from typer.main import get_command

from adaserve.cli import app
from adaserve.config import AdaServeConfig
from adaserve.slo.prometheus import ServerMetrics

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "results" / "README.md"]
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
SERVE = get_command(app).commands["serve"]
SPAN = re.compile(r"(?<!`)`(adaserve [^`]+)`")
SOURCE = re.compile(r"`(?!gpu-bundle/)((?:[\w.-]+/)*\w+\.(?:py|h|sh|toml|yml))(?::\w+)?`")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(page.read_text()))
    return {heading.replace(" ", "-") for heading in kept}


def commands(page: Path) -> list[str]:
    """Every ``adaserve`` command of a page, without comments and continued lines in one."""
    text = page.read_text()
    lines = "\n".join(BLOCK.findall(text)).replace("\\\n", " ").splitlines()
    found = [line.strip() for line in lines if line.strip().startswith("adaserve ")]
    return found + [" ".join(span.split()) for span in SPAN.findall(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        target = page if not path else page.parent / path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def options(command: typer.core.TyperCommand) -> set[str]:
    """What a command accepts, that which it passes on included."""
    found = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {
        "--help"
    }
    if command.context_settings.get("ignore_unknown_options"):
        from sglang.srt.server_args import ServerArgs

        passed_on = [f"adaserve_{name}" for name in AdaServeConfig.model_fields] + [
            *ServerArgs.__annotations__
        ]
        found |= {"--" + name.replace("_", "-") for name in passed_on}
        found |= {name for option in SERVE.params for name in option.opts}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_have_the_options_that_are_named(page: Path) -> None:
    for line in commands(page):
        command, words = get_command(app), shlex.split(line, comments=True)[1:]
        while isinstance(command, typer.core.TyperGroup) and words and not words[0].startswith("-"):
            assert words[0] in command.commands, line
            command = command.commands[words.pop(0)]
        named = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert named <= options(command), line


@pytest.fixture(scope="module")
def files() -> list[str]:
    """Of the repository, each after a slash."""
    folders = ("adaserve", "scheduler", "patches", "loadgen", "scripts", "tests", "docs", "deploy")
    paths = [*ROOT.glob("*"), *(path for folder in folders for path in (ROOT / folder).rglob("*.*"))]
    return [f"/{path.relative_to(ROOT)}" for path in paths]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path, files: list[str]) -> None:
    """Also where a page leaves the first folders of a path out."""
    for name in SOURCE.findall(page.read_text()):
        assert any(file.endswith(f"/{name}") for file in files), name


@pytest.fixture(scope="module")
def metrics() -> set[str]:
    """Names of our metrics, without what Prometheus adds, and those that rules record."""
    registry = CollectorRegistry()
    ServerMetrics("m", registry)
    rules = (ROOT / "deploy" / "grafana" / "prometheus" / "rules.yml").read_text()
    return {metric.name for metric in registry.collect()} | set(re.findall(r"record: (\S+)", rules))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_and_metrics_that_are_named_are_there(page: Path, metrics: set[str]) -> None:
    text = page.read_text()
    flags = {flag.replace("-", "_") for flag in re.findall(r"--adaserve-([a-z-]+)", text)}
    assert flags <= AdaServeConfig.model_fields.keys()
    for name in re.findall(r"(?<!--only )adaserve:[a-z_:]{2,}", text):  # those are stages of gpu-check
        bare = name.removesuffix("_total").removesuffix("_bucket")
        assert any(metric.startswith(bare) for metric in metrics), name
