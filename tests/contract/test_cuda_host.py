"""The serving path on the bundle's GPU host, up to its imports: nothing here has a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.contract.cuda_host import FLASH_MLA, SERVING_PATH

SCRIPT = Path(__file__).with_name("cuda_host.py")


def test_serving_needs_only_what_is_there() -> None:
    """Models can be built without ``cutlass``, and SGLang's own speculation starts without ``flash_mla``; as
    it comes SGLang fails at both, or it would need no patch."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT)]
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines() == [
        *(f"imported {name}" for name in SERVING_PATH),
        "as it comes: missing cutlass",
        "as it comes: missing flash_mla",
        "registered: None False",
        "asked for: FlashMLA's attention backend needs the package flash_mla: pip install sgl-flash-mla",
    ]


def test_every_backend_that_a_draft_worker_asks_about_is_on_the_path() -> None:
    """SGLang imports them inside of a function that no host without a GPU reaches."""
    found = find_spec("sglang.srt.speculative.eagle_worker_v2")
    assert found is not None and found.origin is not None
    source = Path(found.origin).read_text()
    asks = source.partition("graph_supported_backend_types = [")[2].partition("isinstance(")[0]
    imported = set(re.findall(r"from (sglang[.\w]+) import", asks))
    assert FLASH_MLA in imported and imported <= {*SERVING_PATH, FLASH_MLA}
