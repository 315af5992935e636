"""Every field that a client can set is checked: a field that SGLang adds shows here."""

from __future__ import annotations

import dataclasses

from sglang.srt.entrypoints.http_server import app
from sglang.srt.managers.io_struct import GenerateReqInput, SessionParams
from sglang.srt.sampling.sampling_params import SamplingParams

from adaserve.boundary import request, sampling
from adaserve.patches.http.routes import REFUSED

PROMPT = {"text", "input_ids", "token_ids_logprob"}
INTERNAL = {
    "stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized",
}  # fmt: skip


def test_every_field_of_a_request_is_checked() -> None:
    fields = {field.name for field in dataclasses.fields(GenerateReqInput)}
    assert fields == {*request.EACH, *request.WHOLE, *request.OF_MEDIA, *PROMPT}


def test_every_sampling_parameter_is_checked() -> None:
    assert set(SamplingParams.__struct_fields__) == {*sampling.FIELDS, *INTERNAL}


def test_every_session_parameter_is_checked() -> None:
    assert set(SessionParams.__struct_fields__) == set(request._SESSION)


def test_refused_routes_exist() -> None:
    assert set(app.openapi()["paths"]) >= set(REFUSED)
