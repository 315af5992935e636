"""SGLang's HTTP app for ``--tokenizer-worker-num`` above 1.

SGLang's HTTP workers import their app by name and never load plugins, so SLO headers would be
ignored there. ``SGLANG_HTTP_SERVER_APP_PATH=adaserve.http_app:app`` names this module instead.
"""

from __future__ import annotations

from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.entrypoints.http_server import app  # noqa: E402 - hooks must be in place first

from adaserve.patches.start import http_app_setup  # noqa: E402

http_app_setup.complete(app)

__all__ = ["app"]
