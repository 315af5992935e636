"""Scripts on Triton's kernels. Before its import Triton is told whether to interpret them or to compile them.

The tests' own process compiles. The interpreter has another one, which forks for each script: to import
SGLang, and to end in order after that, would be nearly all of a script's time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.simulated_gpu import SITE

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 300
INTERPRETER = f"""
import gc, json, os, signal, sys, traceback
sys.path.append({str(SITE)!r})
from quick_interpreter import quicken
from triton.runtime import interpreter
quicken(interpreter)
import adaserve.bench.gpu_check.kernels
gc.freeze()
print(flush=True)
for line in sys.stdin:
    script, *files = json.loads(line)
    pid = os.fork()
    if not pid:
        signal.alarm({TIMEOUT_S})
        for stream, file in enumerate(files, 1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), stream)
        failed = 0
        try:
            exec(script, {{"__name__": "__main__"}})
        except BaseException:
            failed = 1
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(failed)
    print(os.waitpid(pid, 0)[1], flush=True)
os._exit(0)
"""


def python(script: str, interpret: bool) -> str:
    """What it prints, with Triton's interpreter or with its compiler."""
    if not interpret:
        with redirect_stdout(StringIO()) as output:
            exec(script, {})
        return output.getvalue()
    process = _interpreter()
    assert process.stdin is not None and process.stdout is not None
    with TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        print(json.dumps([script, str(output), str(errors)]), file=process.stdin, flush=True)
        assert process.stdout.readline() == "0\n", errors.read_text()[-3000:]
        return output.read_text()


@cache
def _interpreter() -> subprocess.Popen[str]:
    """Ends with its input."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", INTERPRETER]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=env, cwd=ROOT,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline() == "\n", "SGLang could not be imported"
    return process
