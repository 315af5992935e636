"""Settings: bad values are refused with what is accepted; precedence; the flags."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from adaserve.config import CLASSES_ENV, ENV, AdaServeConfig, ConfigError, settle_classes, slo_classes
from adaserve.slo.classes import SLOConfig


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV, "")  # so that what a test exports is undone too


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policy": "fast"}, "unknown policy 'fast'.*adaserve"),
        ({"policy": "chain-0"}, "unknown policy"),
        ({"policy": "chain-33"}, "unknown policy"),
        ({"policy": "urgency-K"}, "unknown policy"),
        (
            {"policy": "chain-8"},
            "chain-8 drafts 8 tokens deep, and trees have at most 5 levels: give a larger",
        ),
        ({"policy": "urgency-4", "max_depth": 3}, "or a shorter chain"),
        ({"max_depth": 0}, "max_depth is 0: it should be greater than or equal to 1"),
        ({"max_depth": "4"}, "max_depth is '4': it should be a valid integer"),
        ({"max_width": 17}, "max_width.*less than or equal to 16"),
        ({"draft_window": 15}, "draft_window is 15: it should be auto, 0 .the whole context., or 16 to"),
        ({"draft_window": "some"}, "draft_window is 'some': it should be auto, 0"),
        ({"draft_window": -1}, "draft_window is -1: it should be auto, 0"),
        ({"draft_window": 64.0}, "draft_window is 64.0: it should be auto, 0"),
        ({"draft_window": True}, "draft_window is True: it should be auto, 0"),
        ({"draft_sinks": -1}, "draft_sinks.*greater than or equal to 0"),
        ({"budget": 0}, "budget.*greater than or equal to 1"),
        ({"prefill": "fast"}, "prefill is 'fast': it should be 'mixed', 'slack' or 'exclusive'"),
        ({"prefill_interval": 0}, "prefill_interval.*greater than or equal to 1"),
        ({"prefill_patience_ms": 0.0}, "prefill_patience_ms.*greater than 0"),
        ({"prefill_headroom": -0.1}, "prefill_headroom.*greater than or equal to 0"),
        ({"prefill_headroom": float("nan")}, "prefill_headroom.*finite number"),
        ({"baseline_ms": -1.0}, "baseline_ms.*greater than 0"),
        ({"baseline_ms": float("nan")}, "baseline_ms.*finite number"),
        ({"slo_config": "/nowhere.yaml"}, "slo_config: there is no file /nowhere.yaml"),
        ({"learn": True, "drafts": "suffix"}, "nothing can learn: give --drafts model"),
        (
            {"draft_kind": "eagle3", "drafts": "suffix"},
            "draft_kind eagle3 would have no effect: give a draft",
        ),
        ({"draft_kind": "model", "drafts": "self", "draft_window": 64}, "draft_kind model would have no"),
        ({"draft_window": 256, "drafts": "suffix"}, "drafts are suffix, which read no draft_window: leave"),
        ({"draft_window": "auto", "drafts": "suffix"}, "read no draft_window"),
        ({"learn_folder": "/kept"}, "give --learn as well"),
        ({"learn": True, "learn_folder": __file__}, "learn_folder: .*.py is a file: give a folder"),
        ({"learn": True, "learn_loss": "l2"}, "learn_loss is 'l2': it should be 'forward'"),
        ({"learn_share": 1.5}, "learn_share.*less than or equal to 1"),
        ({"profile": "/nowhere.json"}, "profile: there is no file"),
    ],
)
def test_bad_values_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdaServeConfig(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("setting", "text", "message"),
    [
        ("slo_config", "classes: {chat: {tpot_ms: 50}", "slo_config: .*file is not valid YAML"),
        ("slo_config", "classes: {chat: {tpot: 50}}", "slo_config: .*file: classes.chat: unknown setting"),
        ("slo_config", "", "slo_config: .*file: expected a mapping 'classes:'"),
        ("profile", "{", "profile: .*file is not JSON"),
        ("profile", "{}", "profile: .*file: profile needs a non-empty list 'draft_points'"),
    ],
)
def test_a_file_is_read_before_the_server_starts(
    tmp_path: Path, setting: str, text: str, message: str
) -> None:
    """A server that reads it itself has loaded its models by then, and ends with a traceback."""
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        AdaServeConfig(**{setting: str(path)})


@pytest.mark.parametrize(
    "policy", ["adaserve", "none", "chain-1", "chain-5", "priced", "adaptive-verify-4", "urgency-2"]
)
def test_known_policies(policy: str) -> None:
    assert AdaServeConfig(policy=policy).policy == policy


def test_the_longest_chain() -> None:
    assert AdaServeConfig(policy="chain-32", max_depth=32).policy == "chain-32"
    assert AdaServeConfig(policy="chain-8", drafts="suffix").policy == "chain-8", "no model drafts there"


def test_default_without_environment() -> None:
    assert AdaServeConfig.load() == AdaServeConfig()


def test_export_round_trip() -> None:
    config = AdaServeConfig(policy="chain-3", budget=7, max_depth=4, max_width=2, baseline_ms=12.5)
    config.export()
    assert AdaServeConfig.load() == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ('{"depth": 3}', "unknown setting 'depth'"),
        ("null", "is None: it should be an object"),
        ("[1]", r"is \[1\]: it should be an object"),
    ],
)
def test_bad_environment(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setenv(ENV, text)
    with pytest.raises(ConfigError, match=message):
        AdaServeConfig.load()


def test_candidates() -> None:
    assert AdaServeConfig(max_depth=5, max_width=4, forced_depth=0).max_candidates == 20


def parse(*words: str) -> argparse.Namespace:
    from adaserve.patches.start import flags

    parser = argparse.ArgumentParser()
    flags.add_flags(None, parser)
    return parser.parse_args(words)


def test_flags_reach_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from adaserve.patches.start import flags

    classes = tmp_path / "slo.yaml"
    classes.write_text("classes: {chat: {tpot_ms: 50}}")
    monkeypatch.setenv(ENV, json.dumps({"policy": "none", "budget": 9}))
    words = (
        "--adaserve-policy",
        "chain-2",
        "--adaserve-learn",
        "--adaserve-max-depth",
        "3",
        "--adaserve-slo-config",
        str(classes),
        "--adaserve-draft-window",
        "64",
    )
    flags._export_flags(None, parse(*words))
    loaded = AdaServeConfig.load()
    assert loaded.draft_window == 64
    assert (loaded.policy, loaded.max_depth, loaded.budget, loaded.learn) == ("chain-2", 3, 9, True)
    assert loaded.slo_config == str(classes)


def test_a_wrong_flag_is_answered_in_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """SGLang's own usage has hundreds of lines, and the reason stands below them."""
    with pytest.raises(SystemExit):
        parse("--adaserve-polcy", "none")
    usage, error = capsys.readouterr().err.splitlines()
    assert "--help" in usage and "--adaserve-polcy" in error


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("--adaserve-polcy=none", " (did you mean --adaserve-policy?)"),
        ("--polcy", " (did you mean --adaserve-policy?)"),  # of `adaserve serve`
        ("--nothing-like-it", ""),
        ("policy", ""),
    ],
)
def test_the_flag_that_was_meant_is_named(wrong: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(wrong)
    assert capsys.readouterr().err.endswith(f"unrecognized arguments: {wrong}{meant}\n")


def test_no_flag_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from adaserve.patches.start import flags

    flags._export_flags(None, parse())
    import os

    assert os.environ[ENV] == ""


def test_every_setting_has_a_flag() -> None:
    names = {name.removeprefix("adaserve_") for name in vars(parse())}
    assert names == set(AdaServeConfig.model_fields)


@pytest.mark.parametrize(
    ("drafts", "beam", "suffix", "deepest"),
    [
        ("model", 15, 0, 5),
        ("self", 15, 0, 5),
        ("suffix", 0, 18, 12),
        ("model,suffix", 15, 18, 12),
        ("suffix,model", 15, 18, 12),
        ("self,suffix", 15, 18, 12),
    ],
)
@pytest.mark.parametrize("forced", [0, 8, 20])
def test_a_window_has_room_for_every_source(
    drafts: str, beam: int, suffix: int, deepest: int, forced: int
) -> None:
    window = 0 if drafts == "suffix" else "auto"
    config = AdaServeConfig(drafts=drafts, forced_depth=forced, draft_window=window)
    assert (config.beam_candidates, config.suffix_candidates) == (beam, suffix)
    assert config.deepest == max(deepest, forced)
    assert config.max_candidates == beam + suffix + forced and config.draft_models == (drafts != "suffix")
    if config.has_model:
        two = config.changed(second_draft="lab/model")
        assert (two.draft_models, two.deepest) == (2, config.deepest)
        assert two.max_candidates == 2 * beam + suffix + forced


def test_a_target_that_drafts_for_itself_reads_little_and_has_no_rival() -> None:
    with pytest.raises(ConfigError, match="set draft_window to auto"):
        AdaServeConfig(drafts="self")
    with pytest.raises(ConfigError, match="choose either model or self"):
        AdaServeConfig(drafts="model,self", draft_window=64)


@pytest.mark.parametrize(
    ("window", "among"), [(0, (0,)), ("auto", (0, 256, 64)), (128, (128,)), ("128", (128,)), ("0", (0,))]
)
def test_what_a_draft_reads(window: int | str, among: tuple[int, ...]) -> None:
    config = AdaServeConfig(draft_window=window)  # type: ignore[arg-type]
    assert config.draft_windows == among
    assert AdaServeConfig(**json.loads(config.to_json())) == config


def test_a_second_draft_model_is_a_folder_or_on_the_hub(tmp_path: Path) -> None:
    for path in (str(tmp_path), "meta-llama/Llama-3.2-1B"):
        assert AdaServeConfig(second_draft=path).second_draft == path
    for path in (str(tmp_path / "gone"), "./gone", "gone", "a/b/c", ""):
        with pytest.raises(ConfigError, match="second_draft: there is no folder " + re.escape(path)):
            AdaServeConfig(second_draft=path)


def test_a_second_draft_model_needs_a_first() -> None:
    with pytest.raises(ConfigError, match="a second draft model would not be used: leave it out, or"):
        AdaServeConfig(drafts="suffix", second_draft="lab/model")


@pytest.mark.parametrize("drafts", ["", "eagle", "model,", "model,model", "Model"])
def test_unknown_drafts(drafts: str) -> None:
    with pytest.raises(ConfigError, match="it should be model, self, suffix, model,suffix or self,suffix"):
        AdaServeConfig(drafts=drafts)


CLASSES = """
default_class: chat
classes: {chat: {tpot_ms: 50, ttft_ms: 2000}, coding: {x_baseline: 1.2, target: 0.95}}
limits: {own_ms: false, never_learn: [a1b2c3d4e5f60718]}
"""


@pytest.mark.parametrize("now", [None, "classes: {", "classes: {other: {tpot_ms: 9}}"])
def test_what_starts_later_knows_the_classes_that_the_server_started_with(
    now: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An HTTP worker may be started again at any time, and a class that it alone knows would end a scheduler
    where that looks for it."""
    path = tmp_path / "classes.yaml"
    path.write_text(CLASSES)
    monkeypatch.setenv(ENV, AdaServeConfig(slo_config=str(path)).to_json())
    monkeypatch.setenv(CLASSES_ENV, "{}")  # of another server
    settle_classes()
    path.unlink() if now is None else path.write_text(now)
    later = "from adaserve.config import slo_classes; print(slo_classes().model_dump_json())"
    told = subprocess.run([sys.executable, "-c", later], capture_output=True, text=True, check=True).stdout
    path.write_text(CLASSES)
    assert SLOConfig(**json.loads(told)) == slo_classes() == SLOConfig.load(path)
    slo_classes.cache_clear()


def test_a_server_goes_on_without_the_files_that_it_has_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An HTTP worker that is started again reads its settings, and so does a change of the policy."""
    path = tmp_path / "classes.yaml"
    path.write_text(CLASSES)
    monkeypatch.setenv(ENV, AdaServeConfig(slo_config=str(path)).to_json())
    monkeypatch.setenv(CLASSES_ENV, "{}")
    settle_classes()
    path.unlink()
    assert AdaServeConfig.load().changed(policy="none").slo_config == str(path)
    with pytest.raises(ConfigError, match="there is no file"):
        settle_classes()  # another server's start
    slo_classes.cache_clear()
