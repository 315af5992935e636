"""SGLang's offline API, as a user's own program calls it: no server, no route, no client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from adaserve.host.processes import family
from adaserve.server import ServerSpec

PROGRAM = """
import json
import sys

import sglang as sgl

PROMPTS = ["def main(argv):", "import os"]
GREEDY = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}


def asking(**custom):
    return {**GREEDY, "custom_params": custom}


if __name__ == "__main__":  # SGLang's processes import this file again
    target, draft, told = sys.argv[1:]
    engine = sgl.Engine(
        model_path=target, speculative_draft_model_path=draft, speculative_algorithm="ADASERVE",
        device="cpu", dtype="float32", max_total_tokens=8192,
    )
    answers = {"plain": engine.generate(PROMPTS, asking(adaserve_speculation="off"))}
    answers["drafted"] = engine.generate(PROMPTS, [asking(slo_tpot_ms=60000), asking(slo_class="chat")])
    try:
        engine.generate(PROMPTS, [GREEDY, asking(slo_tpot_ms=-1)])
    except ValueError as error:
        answers["refusal"] = str(error)
    answers["streamed"] = list(engine.generate(PROMPTS[0], asking(slo_tpot_ms=0.1), stream=True))
    with open(told, "w") as file:
        json.dump(answers, file)
    raise RuntimeError("the user's own mistake")  # and no shutdown()
"""


def run(folder: Path) -> tuple[subprocess.CompletedProcess[str], dict[str, Any], list[Any]]:
    """What the program ends with, what it was told, and what is left of its processes."""
    (folder / "program.py").write_text(PROGRAM)
    target, draft = ServerSpec(size="12M").models()
    command = [sys.executable, "program.py", target, str(draft), "told.json"]
    environment = {name: value for name, value in os.environ.items() if name != "ADASERVE_CONFIG"}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=300)
            end = time.monotonic() + 10
            while (left := family(process.pid)) and time.monotonic() < end:
                time.sleep(0.1)
        finally:
            for one in family(process.pid):
                one.kill()
    assert (folder / "told.json").exists(), errors[-3000:]
    ended = subprocess.CompletedProcess(command, process.returncode, stderr=errors)
    return ended, json.loads((folder / "told.json").read_text()), left


def test_a_program_with_an_engine_of_its_own(tmp_path: Path) -> None:
    ended, told, left = run(tmp_path)
    plain, drafted = told["plain"], told["drafted"]
    assert [one["text"] for one in drafted] == [one["text"] for one in plain]
    first, second = (one["meta_info"]["slo"] for one in drafted)
    assert (first["class"], first["tpot_slo_ms"], first["met"]) == ("custom", 60000.0, True)
    assert second["class"] == "chat" and second["tpot_slo_ms"] > 0
    assert first["drafts"]["model"]["accepted"] > 0, "nothing was drafted, so nothing was compared"
    assert not any("model" in one["meta_info"]["slo"]["drafts"] for one in plain)
    assert told["refusal"].startswith("custom_params.slo_tpot_ms is -1: expected a number")
    *earlier, last = told["streamed"]
    assert last["text"] == plain[0]["text"], "the engine goes on after a refusal"
    assert last["meta_info"]["slo"]["met"] is False and not earlier[0]["meta_info"].get("slo")
    assert ended.returncode == 1 and "the user's own mistake" in ended.stderr
    assert not left, f"still there: {left}"
