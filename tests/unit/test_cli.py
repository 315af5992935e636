"""The command line: what it makes of its options, and what it says to wrong ones."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from adaserve import server
from adaserve.bench import profile, start_server
from adaserve.cli import app
from adaserve.commands import Commands
from adaserve.config import ENV, AdaServeConfig, ConfigError
from adaserve.engine.cpu.linear import STORAGES
from adaserve.pair.folders import PairError
from adaserve.server import ServerError, ServerProcess, ServerSpec
from adaserve.terminal import say


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that take this process's place, which none does here."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: commands.append(words))
    monkeypatch.setattr("adaserve.server.spec.on_cpu", lambda: True)
    monkeypatch.setattr(server, "require_free", lambda host, port: None)
    monkeypatch.setattr(server, "require_models", lambda spec: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return commands


@pytest.mark.parametrize("direct", ["", "intra.example", "*"])
def test_servers_of_this_machine_are_asked_without_a_proxy(direct: str) -> None:
    """A shell may name a proxy and no exceptions; what it names as exceptions stays so."""
    environ = {**os.environ, "http_proxy": "http://127.0.0.1:9", "NO_PROXY": direct}
    environ.pop("no_proxy", None)
    ask = "print([bool(r.proxy_bypass(h)) for h in ('localhost', '127.0.0.1', '::1', 'intra.example')])"
    code = f"import urllib.request as r; from adaserve import cli; cli.app = lambda: {ask}; cli.main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str([True, True, True, bool(direct)])


def test_files_of_the_present_folder_are_no_modules_of_what_is_started(tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('not ours')")
    ask = "subprocess.run([sys.executable, '-c', 'import queue'], check=True)"
    code = f"import subprocess, sys; from adaserve import cli; cli.app = lambda: {ask}; cli.main()"
    subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, check=True)


def test_what_sglang_warns_of_when_it_is_imported_is_not_shown() -> None:
    warn = "warnings.warn_explicit('Only CUDA', UserWarning, 'awq.py', 53, module='sglang.srt.layers.awq')"
    code = f"import warnings; from adaserve import cli; cli.app = lambda: {warn}; cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not done.stderr


def test_serve_and_the_settings_have_the_same_defaults() -> None:
    """Each stands twice, since help must not wait for the settings' module."""
    fields = AdaServeConfig.model_fields
    options = [o for o in get_command(app).commands["serve"].params if o.name in fields]
    assert len(options) > 15
    for option in options:
        assert option.default is None or str(option.default) == str(fields[option.name].default), option.name


def test_two_draft_models(started: list[list[str]], tmp_path: Path) -> None:
    words = ["--model-path", "m", "--draft-model-path", "d", "--second-draft", str(tmp_path)]
    result = CliRunner().invoke(app, ["serve", *words])
    assert result.exit_code == 0, result.output
    (command,) = started
    assert command[command.index("--speculative-draft-model-path") + 1] == "d"
    config = json.loads(os.environ[ENV])
    assert (config["second_draft"], config["drafts"]) == (str(tmp_path), "model")


def test_the_embedded_target_takes_a_draft_that_was_trained_for_it(
    started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From `adaserve draft save` or `adaserve pair`: nobody knows where in the cache its target is."""
    monkeypatch.setattr("adaserve.pair.widen.ensure_embedded_pair", lambda size, draft: ("target", "ours"))
    (tmp_path / "config.json").write_text("{}")
    serve = ["serve", "--draft-model-path", str(tmp_path)]
    assert CliRunner().invoke(app, serve).exit_code == 0
    (command,) = started
    for flag, path in (("--model-path", "target"), ("--speculative-draft-model-path", str(tmp_path))):
        assert command[command.index(flag) + 1] == path
    refused = CliRunner().invoke(app, [*serve, "--drafts", "suffix"])
    assert refused.exit_code == 2 and "leave out --draft-model-path" in refused.output and len(started) == 1


def test_what_the_draft_reads_is_a_flag(started: list[list[str]]) -> None:
    serve = ["serve", "--model-path", "m", "--draft-model-path", "d", "--draft-window"]
    refused = CliRunner().invoke(app, [*serve, "7"])
    assert refused.exit_code == 2 and "draft_window is '7': it should be auto, 0" in refused.output
    assert not started
    assert CliRunner().invoke(app, [*serve, "auto", "--draft-sinks", "6"]).exit_code == 0
    config = AdaServeConfig(**json.loads(os.environ[ENV]))
    assert (config.draft_window, config.draft_sinks, len(started)) == ("auto", 6, 1)


def test_flags_beat_the_environment(started: list[list[str]], tmp_path: Path) -> None:
    os.environ[ENV] = '{"policy": "adaserve", "max_depth": 3, "drafts": "suffix"}'
    (tmp_path / "slo.yaml").write_text("classes: {chat: {tpot_ms: 50}}")
    words = ["--model-path", "m", "--policy", "none", "--slo-config", str(tmp_path / "slo.yaml")]
    result = CliRunner().invoke(app, ["serve", *words])
    assert result.exit_code == 0, result.output
    config = AdaServeConfig(**json.loads(os.environ[ENV]))
    assert (config.policy, config.max_depth, config.max_width, config.drafts) == ("none", 3, None, "suffix")
    os.environ[ENV] = "{policy: none}"
    refused = CliRunner().invoke(app, ["serve"])
    assert refused.exit_code == 2 and "not valid JSON" in refused.output and len(started) == 1


def test_an_mtp_layer_comes_from_the_targets_checkpoint(started: list[list[str]]) -> None:
    """Unless a draft is named; the embedded target has none."""
    refused = CliRunner().invoke(app, ["serve", "--draft-kind", "mtp"])
    assert refused.exit_code == 2 and not started
    assert "the embedded target has no MTP layer: give a --model-path that has one" in refused.output
    serve = ["serve", "--draft-kind", "mtp", "--model-path", "m"]
    for given in ([], ["--draft-model-path", "d"]):
        assert CliRunner().invoke(app, [*serve, *given]).exit_code == 0
    drafts = [command[command.index("--speculative-draft-model-path") + 1] for command in started]
    assert drafts == ["m", "d"]
    assert AdaServeConfig(**json.loads(os.environ[ENV])).draft_kind == "mtp"


def test_a_kind_of_draft_without_a_draft_is_refused(started: list[list[str]]) -> None:
    """The head's path was forgotten; the server would draft from earlier text alone."""
    result = CliRunner().invoke(app, ["serve", "--model-path", "m", "--draft-kind", "eagle3"])
    assert result.exit_code == 2 and "give a draft (--draft-model-path)" in result.output and not started


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--draft-model-path", "d", "--second-draft", "gone"], "there is no folder gone"),
        (["--second-draft", "lab/model"], "a second draft model would not be used"),
    ],
)
def test_a_second_draft_model_that_cannot_be_served(
    started: list[list[str]], words: list[str], says: str
) -> None:
    result = CliRunner().invoke(app, ["serve", "--model-path", "m", *words])
    assert result.exit_code == 2 and says in result.output and not started


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--size", "banana"],
        ["profile", "--size", "banana"],
        ["demo", "--size", "banana", "--seconds", "5"],
        ["demo", "--policy", "bogus", "--seconds", "5"],
        ["demo", "--policy", "none", "--seconds", "5"],
        ["bench", "fleet", "--size=banana"],
        ["bench", "fleet", "--policy=bogus"],
        ["bench", "fleet", "--router=bogus"],
        ["bench", "fleet", "--duration=7"],  # all of it would be warm-up
        ["bench", "learn", "--size=banana"],
        ["bench", "latency", "--policies=bogus@256"],
        ["serve", "--model-path", "/nowhere/model"],
        ["serve", "--model-path", "some/folder/below"],
        ["profile", "--model-path", "."],
        ["serve", "--draft-model-path", "~user/model", "--model-path", "m"],
        ["serve", "--draft-model-path", "lab/draft"],
        ["serve", "--record", "nowhere/iterations.jsonl"],
        ["serve", "--record-requests", "."],
    ],
)
def test_what_cannot_be_served_is_one_line(
    words: list[str], started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.exception
    (line,) = result.stderr.splitlines()  # and nothing of what would have been done
    assert line.startswith("error: ")
    assert words[2].rpartition("=")[2].partition("@")[0] in line and not started
    assert not [*tmp_path.iterdir()], "nothing is made before all is known to be right"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["demo", "--seconds", "nan"], "nan is not a finite number"),
        (["bench", "soak", "--minutes=inf"], "--minutes=inf is not a finite number"),
        (["bench", "latency", "--temperatures", "0,nan"], "expected comma-separated numbers"),
        (["bench", "latency", "--temperatures=-1"], "--temperatures must be 0 or more, not -1"),
        (["bench", "latency", "--contexts", "81,80"], "--contexts must be 81 to 8192, answers included"),
        (["bench", "latency", "--contexts", "1024,8192"], "ask for fewer or shorter texts"),
        (["bench", "learn", "--classes", "bogus"], "--classes accepts coding"),
        (["bench", "learn", "--seed", "-1"], "greater than or equal to 0"),
        (["bench", "learn", "--order", "cpp:0"], "--order has 0 requests of cpp"),
        (["bench", "kernels", "--against", "nowhere"], "nowhere"),
        (["gpu-check", "--device", "cpu", "--rounds", "0"], "greater than or equal to 1"),
        (["bench", "latency", "--draft-kind", ""], "--draft-kind needs at least one kind of draft"),
        (["bench", "sweep", "--loads", ""], "expected comma-separated numbers"),
        (["bench", "sweep", "--capacity", "0"], "greater than or equal to 0.001"),
        (["serve", "--learn", "--learn-folder", "file/x"], "is a file: give another path"),
        (
            ["simulate", "run", "--trace", "synthetic:5:1", "--recorded", "file"],
            "cannot read the recording file",
        ),
        (["demo", "--rps", "1e9"], "more than one run can plan"),
        (["fleet", "up", "--router-flags", "'"], "--router-flags cannot be read as flags"),
        (["pair", "train-head", "--vocabulary", "4097"], "takes 4097 tokens from its target, which has 4096"),
        (["pair", "train-head", "--mlp", "769"], "takes 769 MLP columns from its target, which has 768"),
        (["pair", "train-head", "--kind", "medusa", "--kv-heads", "1"], "sizes: leave out --kv-heads"),
        (["pair", "train-head", "--go-on", "--mlp", "64"], "keeps the size of the pair's head: leave out"),
    ],
)
def test_what_no_command_can_mean_is_refused(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_bytes(b"\xff")
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 2 and says in result.output, result.output
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_what_is_measured_for_long_has_a_place_to_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for words, wrong in [
        (["profile"], tmp_path),
        (["bench", "latency"], tmp_path / "file" / "x.json"),
        (["bench", "kernels"], tmp_path / "file"),
        (["bench", "soak"], tmp_path / "file"),
    ]:
        result = CliRunner().invoke(app, [*words, "--out", str(wrong)])
        assert result.exit_code == 2 and "give a" in result.output, result.output


@pytest.mark.parametrize(
    "words",
    [
        ["demo"],
        ["bench", "fleet"],
        ["bench", "learn", "--offline"],
        ["bench", "learn"],
        ["bench", "soak"],
        ["bench", "serve"],
        ["pair", "average", "first", "second"],
        ["pair", "test-draft", "target"],
    ],
)
def test_results_of_another_run_are_not_written_over(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    out = [str(tmp_path)] if words[0] == "pair" else ["--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*words, *out], env={"COLUMNS": "200"})
    assert result.exit_code == 2 and "results are not overwritten" in result.output, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


@pytest.mark.parametrize("more", [["--pair", "nowhere"], ["--only", "nowhere"]])
def test_a_pair_that_is_not_there_has_no_table(more: list[str]) -> None:
    result = CliRunner().invoke(app, ["pair", "eval", *more])
    assert result.exit_code == 2 and "nowhere" in result.stderr


def test_an_address_that_a_server_cannot_have_is_said_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} is in use"):
            server.require_free("127.0.0.1", port)
        found = socket.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
        found += socket.getaddrinfo("127.0.0.1", port, type=socket.SOCK_STREAM)
        with pytest.MonkeyPatch.context() as names:
            names.setattr(socket, "getaddrinfo", lambda *_, **__: found)
            with pytest.raises(ServerError, match="in use"):
                server.require_free("a name of two addresses", port)
    server.require_free("127.0.0.1", port)
    with pytest.raises(ServerError, match=r"cannot listen on no\.such\.host:1"):
        server.require_free("no.such.host", 1)


GONE = httpx.ConnectError("[Errno 111] refused [/foo]\nmore", request=httpx.Request("GET", "http://h:1/x"))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ConfigError("no [/foo]"), "error: no [/foo]"),
        (PairError("no pair"), "error: no pair"),
        (GONE, "error: a server did not answer: [Errno 111] refused [/foo]"),
        (httpx.ReadTimeout(""), "error: a server did not answer: ReadTimeout"),
        (PermissionError(13, "Permission denied", "/x/[y]"), "error: /x/[y]: Permission denied"),
        (
            FileNotFoundError(2, "No temporary directory in ['/tmp']"),
            "error: No temporary directory in ['/tmp']: set TMPDIR to a folder that can be written to",
        ),
        (
            OSError(errno.ENOSPC, "No space left on device"),  # which does not say what for
            "error: No space left on device: make room for what this command writes or prints",
        ),
    ],
)
def test_errors_of_users_and_servers_end_any_command_in_one_line(error: Exception, says: str) -> None:
    commands, below = typer.Typer(cls=Commands), typer.Typer()

    @below.command()
    def one() -> None:
        raise error

    @below.command()
    def other() -> None:
        raise KeyError("a mistake of ours")

    commands.add_typer(below, name="below")
    result = CliRunner().invoke(commands, ["below", "one"])
    assert result.exit_code == 2 and result.stderr.strip() == says
    ours = CliRunner().invoke(commands, ["below", "other"])
    assert isinstance(ours.exception, KeyError), "that needs its traceback"


def test_paragraphs_of_help_are_not_broken_where_our_lines_are() -> None:
    shown = CliRunner().invoke(app, ["bench", "serve", "--help"], env={"COLUMNS": "200"}).output
    assert "however slow the server is. Without options: one minute" in shown


def leaves(group: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """The words of every command below a group."""
    for name, command in getattr(group, "commands", {}).items():
        yield from leaves(command, *path, name)
    if not hasattr(group, "commands"):
        yield path


def test_it_says_its_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"adaserve {version('adaserve')}\n"


def test_help_is_whole_on_a_narrow_terminal() -> None:
    """A word that does not fit into its column is cut off."""
    for words in leaves(get_command(app)):
        shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).output
        assert "Usage" in shown and "…" not in shown, shown


@pytest.mark.parametrize(("encoding", "shown"), [("latin-1", "?? 1"), ("utf-8", "助手 1")])
def test_a_terminal_of_another_encoding_ends_no_command(encoding: str, shown: str, tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 5, "output_length": 5, "slo_class": "助手", "slo_tpot_ms": 40}
    (tmp_path / "trace.jsonl").write_text(json.dumps(row) + "\n")
    words = ["bench", "serve", "--plan-only", "--trace", str(tmp_path / "trace.jsonl"), "--baseline-ms", "20"]
    done = subprocess.run(
        [sys.executable, "-m", "adaserve", *words],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        encoding=encoding,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"1 requests in 0.0 s: {shown}" in done.stdout


def test_a_verdict_and_a_result_that_does_not_count_have_codes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 is what Python ends with after a traceback, 2 what could not be done."""
    results: dict[str, Any] = {
        "sweep.commands.sweep": False,
        "soak.run.run_soak": {}, "soak.report.held": False,
        "fleet.run.run_fleet_bench": {"valid": False}, "fleet.run.summary_text": "",
    }  # fmt: skip
    for place, result in results.items():
        monkeypatch.setattr(f"adaserve.bench.{place}", lambda *_, result=result: result)
    codes = {"sweep": 4, "soak": 3, "fleet": 4}
    for name, code in codes.items():
        out = CliRunner().invoke(app, ["bench", name, "--out", str(tmp_path / name)])
        assert out.exit_code == code, (name, out.output)


def test_help_names_every_storage_of_weights() -> None:
    shown = CliRunner().invoke(app, ["bench", "kernels", "--help"], env={"COLUMNS": "200"}).output
    (line,) = (line for line in shown.splitlines() if "--storages" in line)
    assert set(STORAGES) <= set(re.findall(r"\w+", line))


def test_help_and_small_commands_load_nothing_heavy() -> None:
    """A module of a command imports what does the work where that runs: PyTorch alone takes seconds."""
    code = """
import sys
from typer.testing import CliRunner
from adaserve.cli import app

def run(*words):
    return CliRunner().invoke(app, words).exit_code

def loaded(*names):
    return [name for name in names if name in sys.modules]

for words in ("", "bench", "bench serve", "bench sweep", "simulate run", "pair train", "fleet up", "draft"):
    assert run(*words.split(), "--help") == 0
print(*loaded("torch", "sglang", "transformers", "scipy", "numpy", "matplotlib", "locust", "httpx", "yaml"))
assert run("draft", "history", ".") == 0
assert run("report", "nowhere") == 2
assert run("bench", "serve", "--plan-only") == 0
assert run("simulate", "run", "--trace", "synthetic:5:1") == 0
print(*loaded("torch", "sglang", "transformers"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.fixture
def sglang() -> None:
    """Imported while the environment is the process's own."""
    import sglang.srt.server_args  # noqa: F401


CONFIG_FILE = """
model-path: m
speculative-draft-model-path: d
host: 0.0.0.0
port: 31000
dtype: bfloat16
disable-radix-cache: true
skip-tokenizer-init: false
adaserve-shed: true
"""


@pytest.mark.parametrize("joined", [False, True])
def test_a_file_of_flags_says_what_is_served(
    joined: bool, sglang: None, started: list[list[str]], tmp_path: Path
) -> None:
    """Nothing that we add wins over it, and the command line does."""
    path = tmp_path / "flags.yaml"
    path.write_text(CONFIG_FILE)
    given = [f"--config={path}"] if joined else ["--config", str(path)]
    for more, port, dtype in ((), "31000", "bfloat16"), (("--port", "5", "--dtype=half"), "5", "half"):
        result = CliRunner().invoke(app, ["serve", *more, *given])
        assert result.exit_code == 0, result.output
        command = [part for word in started.pop() for part in word.split("=")]
        assert [command[command.index(flag) + 1] for flag in ("--model-path", "--host", "--port")] == [
            "m", "0.0.0.0", port
        ]  # fmt: skip
        assert command[command.index("--speculative-draft-model-path") + 1] == "d"
        assert "--disable-radix-cache" in command
        assert json.loads(os.environ.pop(ENV))["shed"] and "--adaserve-shed" not in command
        assert not {"--config", "--skip-tokenizer-init", "adaserve-embedded", "float32"} & set(command)
        assert command[len(command) - command[::-1].index("--dtype")] == dtype, "the last one counts"


@pytest.mark.parametrize(
    "flags",
    [
        ["--adaserve-policy", "none", "--adaserve-max-depth=2", "--policy", "chain-8", "--max-depth=8"],
        ["--policy", "none", "--adaserve-policy=chain-8", "--adaserve-max-depth", "8"],
    ],
)
def test_of_a_setting_that_is_given_by_both_its_names_the_last_counts(
    flags: list[str], started: list[list[str]]
) -> None:
    serve = ["serve", "--model-path", "m", "--draft-model-path", "d", "--adaserve-forced-depth", "3"]
    result = CliRunner().invoke(app, [*serve, *flags])
    assert result.exit_code == 0, result.output
    config = AdaServeConfig(**json.loads(os.environ[ENV]))
    assert (config.policy, config.max_depth) == ("chain-8", 8)
    (command,) = started
    assert [word for word in command if word.startswith("--adaserve-")] == ["--adaserve-forced-depth"]


def test_the_command_line_beats_settings_of_adaserve_in_a_file(
    sglang: None, started: list[list[str]], tmp_path: Path
) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("model-path: m\ndraft-model-path: d\nadaserve-policy: none\nadaserve-max-width: 2\n")
    result = CliRunner().invoke(app, ["serve", "--config", str(path), "--policy", "adaserve"])
    assert result.exit_code == 0, result.output
    config = AdaServeConfig(**json.loads(os.environ[ENV]))
    assert (config.policy, config.max_width) == ("adaserve", 2)
    assert not [word for word in started[0] if word.startswith("--adaserve-")]


@pytest.mark.parametrize("on", [True, False])
def test_switches_of_adaserve_in_a_file_are_on_or_off(
    on: bool, sglang: None, started: list[list[str]], tmp_path: Path
) -> None:
    said, path = str(on).lower(), tmp_path / "flags.yaml"
    path.write_text(f"model-path: m\ndraft-model-path: d\nshed: {said}\norca: {said}\nlearn: {said}\n")
    result = CliRunner().invoke(app, ["serve", "--config", str(path)])
    assert result.exit_code == 0, result.output
    config = AdaServeConfig(**json.loads(os.environ[ENV]))
    assert (config.shed, config.orca, config.learn) == (on, on, on)
    assert not {"true", "false"} & set(started[0]), "SGLang refuses a word that belongs to no flag"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("gone.yaml", None, "Config file not found"),
        ("flags.json", "{}", "must be YAML format"),
        ("flags.yaml", "a: {b", "while parsing a flow mapping"),
        ("flags.yaml", "- a", "must contain a dictionary"),
    ],
)
def test_a_file_of_flags_that_cannot_be_read_is_refused(
    name: str, text: str | None, says: str, sglang: None, started: list[list[str]], tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    result = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / name)])
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("error: "))
    assert result.exit_code == 2 and line.startswith("error: --config: ") and says in line and not started


@pytest.mark.parametrize("model", ["--model-path", "--model"])
@pytest.mark.parametrize(
    "draft", ["--draft-model-path", "--speculative-draft-model-path", "--speculative-draft-model"]
)
def test_sglangs_names_of_the_models(model: str, draft: str, started: list[list[str]]) -> None:
    result = CliRunner().invoke(app, ["serve", model, "m", f"{draft}=d"])
    assert result.exit_code == 0, result.output
    (command,) = started
    assert command[command.index("--model-path") + 1] == "m" and "--model" not in command
    assert command[command.index("--speculative-draft-model-path") + 1] == "d"
    assert not [word for word in command if "adaserve-embedded" in word]


class Dead(ServerProcess):
    """A server that starts and then answers nothing."""

    def start(self, waiting: Any = None, limit_s: float = 0.0) -> None:
        self.log.write_text("it burns")


def test_a_server_that_stops_answering_names_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_server, "ServerProcess", Dead)
    log = tmp_path / "server.log"
    with (
        pytest.raises(ServerError, match="it burns") as raised,
        start_server.running_server(ServerSpec(), log) as one,
    ):
        one.report()
    assert str(log) in str(raised.value)
    with pytest.raises(httpx.ConnectError), start_server.running_server(ServerSpec(), log):
        raise GONE  # of another server


def test_the_log_of_a_profile_that_failed_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = []

    @contextmanager
    def failing(spec: ServerSpec, log: Path, env: Any) -> Any:
        log.write_text("why")
        logs.append(log)
        raise ServerError(f"it ended (full log: {log})")
        yield

    monkeypatch.setattr(profile, "running_server", failing)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ServerError):
        profile.run_profile(ServerSpec(), None, Console(quiet=True))
    assert logs[0].read_text() == "why"


def test_a_profile_is_that_of_a_server_with_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without which a model may not even start, and of others the profile would not be used."""
    specs: list[ServerSpec] = []
    monkeypatch.setattr(profile, "run_profile", lambda spec, *_: specs.append(spec))
    flags = ["--context-length", "128", "--trust-remote-code"]
    result = CliRunner().invoke(app, ["profile", "--model-path", "m", "--flags", " ".join(flags)])
    assert result.exit_code == 0 and specs[0].command()[-3:] == flags, result.output


def test_paths_are_said_as_they_are() -> None:
    """Rich would read brackets as markup, a name as an emoji, and cut a path at the end of a line."""
    console = Console(record=True, width=20, file=io.StringIO())
    say(console, "written to a-long-folder/[bold]/[/x]:smile:/latency.json")
    assert console.export_text() == "written to a-long-folder/[bold]/[/x]:smile:/latency.json\n"
