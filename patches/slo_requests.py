"""Per-request SLOs at the HTTP boundary: headers, body and class become ``custom_params``.

Why: SGLang knows no SLOs. ``custom_params`` is the one body field that travels to the scheduler
unchanged. Requests are checked before anything is queued or streamed, because an error raised
inside a stream would come after status 200.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from adaserve.config import AdaServeConfig
from adaserve.patches import hook
from adaserve.slo.classes import SLOConfig, SLOError, resolve


def register() -> None:
    openai = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request"
    hook(openai, _openai_request, HookType.AROUND)
    hook("sglang.srt.entrypoints.http_server.serve_generate_request", _native_request, HookType.AROUND)
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"
    hook(manager, _any_request, HookType.BEFORE)


@lru_cache(maxsize=1)
def slo_config() -> SLOConfig:
    """The classes of this server."""
    path = AdaServeConfig.load().slo_config
    return SLOConfig() if path is None else SLOConfig.load(path)


def slo_params(
    headers: Iterable[tuple[str, str]], params: dict[str, Any] | None, nvext: dict[str, Any] | None = None
) -> dict[str, Any] | None:
    """``custom_params`` with the request's SLO in them. Raises SLOError.

    A class given as a multiple of the baseline stays a name: only the scheduler knows the baseline.
    """
    # Validation does not depend on the baseline's value, so any will do here.
    slo = resolve(headers, params, slo_config(), baseline_s=1.0, nvext=nvext)
    if slo.source in ("body", "header"):
        wanted = slo.to_params()
    elif slo.slo_class == "default" and not math.isfinite(slo.ttft_s):
        return params
    else:
        wanted = {k: v for k, v in slo.to_params().items() if k != "slo_tpot_ms"}
    return {**(params or {}), **wanted}


def _header_pairs(request: Any) -> list[tuple[str, str]]:
    if request is None:
        return []
    return [(k.decode("latin-1"), v.decode("latin-1")) for k, v in request.headers.raw]


async def _openai_request(
    original: Callable[..., Awaitable[Any]], self: Any, request: Any, raw_request: Any
) -> Any:
    if "custom_params" in type(request).model_fields:
        try:
            body = await raw_request.json()
            request.custom_params = slo_params(
                _header_pairs(raw_request), request.custom_params, body.get("nvext")
            )
        except SLOError as error:
            return self.create_error_response(message=str(error), err_type="BadRequest", status_code=400)
    return await original(self, request, raw_request)


async def _native_request(original: Callable[..., Awaitable[Any]], obj: Any, request: Any) -> Any:
    from fastapi.responses import ORJSONResponse

    try:
        _attach(obj, _header_pairs(request))
    except SLOError as error:
        return ORJSONResponse(status_code=400, content={"error": {"message": str(error)}})
    return await original(obj, request)


def _any_request(self: Any, obj: Any, request: Any = None) -> None:
    """Also for ``sgl.Engine``: raises SLOError, a ValueError, before the request is queued."""
    if hasattr(obj, "sampling_params"):
        _attach(obj, _header_pairs(request))


def _attach(obj: Any, headers: list[tuple[str, str]]) -> None:
    given = obj.sampling_params
    if isinstance(given, list):
        obj.sampling_params = [_with_slo(p, headers) for p in given]
    else:
        obj.sampling_params = _with_slo(given, headers)


def _with_slo(params: Any, headers: list[tuple[str, str]]) -> Any:
    if params is not None and not isinstance(params, dict):
        return params  # SGLang says what is wrong with it
    custom = slo_params(headers, (params or {}).get("custom_params"))
    return params if custom is None else {**(params or {}), "custom_params": custom}
