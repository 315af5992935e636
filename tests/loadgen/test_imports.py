"""The load generator runs beside servers that it must not slow down, and on machines without them."""

from __future__ import annotations

import subprocess
import sys


def test_commands_load_no_model_libraries_and_no_gevent() -> None:
    code = (
        "import sys, adaserve.loadgen.cli, adaserve.loadgen.report, adaserve.loadgen.prompts as p\n"
        "p.load_prompts()\n"
        "print(*[m for m in ('torch', 'sglang', 'transformers', 'gevent', 'locust') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_shared_modules_need_only_numpy_yaml_and_pydantic() -> None:
    code = (
        "import sys, importlib; before = set(sys.modules)\n"
        "for m in ('resolve', 'trace', 'run_summary'): importlib.import_module('adaserve.slo.' + m)\n"
        "top = {m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "print(*sorted(m for m in top if not m.startswith('_')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    pydantic = {"pydantic", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"}
    assert set(done.stdout.split()) <= {"adaserve", "numpy", "yaml", "cython_runtime"} | pydantic
