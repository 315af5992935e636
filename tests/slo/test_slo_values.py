"""SLO values, classes and precedence."""

from __future__ import annotations

import json
import math
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from adaserve.slo.classes import SLO, SLOClass, SLOConfig, SLOError, SLOLimits
from adaserve.slo.resolve import OWN_KEYS, RequestSLO, resolve

CONFIG = SLOConfig()
BASELINE_S = 0.030


def ask(headers: Any = None, body: Any = None, config: SLOConfig = CONFIG, **more: Any) -> Any:
    return resolve(headers or {}, body, config, **more).at(BASELINE_S)


def test_nothing_asked_means_no_objective() -> None:
    r = ask()
    assert (r.slo_class, r.tpot_s, r.ttft_s) == ("default", math.inf, math.inf)


def test_precedence_is_body_header_class_default() -> None:
    headers = {"X-SLO-TPOT-MS": "50", "x-slo-class": "coding"}
    config = SLOConfig(default_class="summarization")
    assert ask(headers, {"slo_tpot_ms": 40}, config).tpot_s == pytest.approx(0.040)
    assert ask(headers, None, config).tpot_s == pytest.approx(0.050)
    assert ask({"x-slo-class": "coding"}, None, config).tpot_s == pytest.approx(0.036)
    assert ask({}, None, config).tpot_s == pytest.approx(0.150)
    assert ask({}, None, config).slo_class == "summarization"


@pytest.mark.parametrize("named", [None, "default"])
def test_a_class_named_default_is_that_of_requests_that_name_none(named: str | None) -> None:
    config = SLOConfig(classes={"default": {"tpot_ms": 40}, "a": {"tpot_ms": 50}}, default_class=named)
    assert ask({}, None, config).tpot_s == ask({"x-slo-class": "default"}, None, config).tpot_s == 0.04


SPECULATION = "x-adaserve-speculation"


@pytest.mark.parametrize(
    ("headers", "body", "limit"),
    [
        ({}, None, None),
        ({SPECULATION: "off"}, None, 0),
        ({SPECULATION: "3"}, None, 3),
        ({}, {"adaserve_speculation": "off"}, 0),
        ({}, {"adaserve_speculation": 64}, 64),
        ({SPECULATION: "off"}, {"adaserve_speculation": 2}, 2),
        ([(SPECULATION, "4"), (SPECULATION.upper(), "4")], None, 4),
    ],
)
def test_a_client_limits_its_speculation(headers: Any, body: Any, limit: int | None) -> None:
    resolved = resolve(headers, body, CONFIG)
    assert resolved.speculation == limit
    carried = resolved.in_params(body)
    assert "adaserve_speculation" not in carried and RequestSLO.from_params(carried) == resolved


LEARN = "x-adaserve-learn"


@pytest.mark.parametrize(
    ("headers", "body", "learns"),
    [
        ({}, None, True),
        ({LEARN: "on"}, {"adaserve_learn": True}, True),
        ({LEARN: "OFF"}, None, False),
        ({}, {"adaserve_learn": False}, False),
        ({LEARN: "off"}, {"adaserve_learn": True}, False),
        ({LEARN: "on"}, {"adaserve_learn": False}, False),
        ([(LEARN, "on"), (LEARN, "off")], None, False),
    ],
)
def test_any_place_can_forbid_learning(headers: Any, body: Any, learns: bool) -> None:
    resolved = resolve(headers, body, CONFIG)
    assert resolved.learn is learns
    carried = resolved.in_params(body)
    assert "adaserve_learn" not in carried and RequestSLO.from_params(carried) == resolved


def test_an_operator_excludes_tenants_from_learning(tmp_path: Path) -> None:
    """By the hash of the key, so that the file holds no keys; what the request says of it does not count."""
    excluded = sha256(b"sk-secret").hexdigest()[:16]
    (tmp_path / "slo.yaml").write_text(f"classes: {{}}\nlimits: {{never_learn: ['{excluded}', anonymous]}}")
    config = SLOConfig.load(tmp_path / "slo.yaml")
    for headers, learns in (
        ({"Authorization": "Bearer sk-secret", LEARN: "on"}, False),
        ({"Authorization": "Bearer sk-other"}, True),
        ({"Authorization": "Bearer  sk-secret"}, False),
        ({"Authorization": "Bearer a-gateways-own", "X-Api-Key": "sk-secret"}, False),
        ({}, False),
    ):
        assert resolve(headers, {"adaserve_learn": True}, config).learn is learns
    with pytest.raises(SLOError, match="never_learn"):
        SLOLimits(never_learn=frozenset({"sk-secret"}))


@pytest.mark.parametrize(
    ("headers", "body"), [({LEARN: "no"}, None), ({LEARN: ""}, None), ({}, {"adaserve_learn": 0})]
)
def test_an_unclear_wish_about_learning_is_refused(headers: Any, body: Any) -> None:
    with pytest.raises(SLOError, match="expected"):
        resolve(headers, body, CONFIG)


@pytest.mark.parametrize(
    "value", ["on", "", "-1", "65", "1.5", "1e3", 65, -1, 2.0, True, [3], {"a": 1}, 10**5000], ids=type
)
def test_what_is_not_a_limit_is_refused(value: Any) -> None:
    with pytest.raises(SLOError, match=r'expected "off" or a number of tokens, 0 to 64'):
        resolve({}, {"adaserve_speculation": value}, CONFIG)
    if isinstance(value, str):
        with pytest.raises(SLOError, match=f"header {SPECULATION} is "):
            resolve({SPECULATION: value}, {"adaserve_speculation": 2}, CONFIG)


def test_two_limits_are_refused() -> None:
    with pytest.raises(SLOError, match="sent twice"):
        resolve([(SPECULATION, "4"), (SPECULATION, "5")], None, CONFIG)


def test_ttft_and_tpot_are_resolved_separately() -> None:
    config = SLOConfig(classes={"a": SLOClass(name="a", tpot_ms=20, ttft_ms=500)})
    r = ask({"x-slo-ttft-ms": "900"}, {"slo_class": "a"}, config)
    assert (r.tpot_s, r.ttft_s) == (pytest.approx(0.020), pytest.approx(0.900))


def test_milliseconds_with_a_class_are_custom() -> None:
    """Somebody's 0.1 ms must not spend the error budget of everybody's "coding"."""
    r = ask({"x-slo-class": "coding", "x-slo-tpot-ms": "0.1"})
    assert (r.slo_class, r.tpot_s) == ("custom", pytest.approx(0.0001))
    r = ask({"x-slo-class": "coding"}, {"slo_ttft_ms": 300})
    assert (r.slo_class, r.tpot_s, r.ttft_s) == ("custom", pytest.approx(0.036), pytest.approx(0.3))


def test_limits_of_the_classes_file() -> None:
    limits = SLOLimits(least_tpot_ms=20, least_ttft_ms=200)
    config = SLOConfig(classes={"fast": SLOClass(name="fast", tpot_ms=5)}, limits=limits)
    assert ask({"x-slo-class": "fast"}, None, config).tpot_s == 0.005, "classes are the operator's own"
    assert ask({"x-slo-tpot-ms": "20"}, None, config).tpot_s == 0.020
    for headers, body, says in (
        ({"x-slo-tpot-ms": "19.9"}, None, "from 20 to 60000 ms"),
        ({"x-slo-ttft-ms": "199"}, None, "from 200 to 3600000 ms"),
        ({}, {"slo_tpot_ms": 19.9}, "slo_tpot_ms is 19.9.*from 20 to"),
        ({}, {"nvext": {"router": {"ttft_target": 1}}}, "from 200 to"),
    ):
        with pytest.raises(SLOError, match=says):
            ask(headers, body, config)
    classes_only = SLOConfig(limits=SLOLimits(own_ms=False))
    assert ask({"x-slo-class": "chat"}, None, classes_only).slo_class == "chat"
    with pytest.raises(SLOError, match="name a class, coding, chat, summarization"):
        ask({"x-slo-tpot-ms": "50"}, None, classes_only)


def test_body_class_beats_header_class() -> None:
    assert ask({"x-slo-class": "chat"}, {"slo_class": "coding"}).slo_class == "coding"


def test_milliseconds_without_class_are_custom() -> None:
    assert ask({"x-llm-d-slo-tpot-ms": " 25.5 "}).slo_class == "custom"


def test_dynamo_fields() -> None:
    r = ask(nvext={"router": {"itl_target": 20, "ttft_target": 300}})
    assert (r.tpot_s, r.ttft_s) == (pytest.approx(0.020), pytest.approx(0.3))
    assert ask(body={"nvext": {"router": {"itl_target": 20}}}).tpot_s == pytest.approx(0.020)


@pytest.mark.parametrize(
    ("headers", "tpot_s", "ttft_s"),
    [
        ({"X-SGL-TPS-SLO": "40"}, 0.025, math.inf),
        ({"x-sgl-tps-slo": "2.5e1", "x-sgl-ttft-slo-ms": "700"}, 0.040, 0.7),
        ({"x-sgl-tps-slo": "33.33", "x-slo-tpot-ms": "30"}, 0.030, math.inf),
        ({"x-llm-d-slo-ttft-ms": "700", "x-sgl-ttft-slo-ms": "700.0"}, math.inf, 0.7),
    ],
)
def test_headers_of_sgl_router(headers: Any, tpot_s: float, ttft_s: float) -> None:
    r = ask(headers)
    assert (r.slo_class, r.tpot_s, r.ttft_s) == ("custom", pytest.approx(tpot_s), pytest.approx(ttft_s))


TRACED = "vendor=1, adaserve=tpot-ms:40;ttft-ms:500;class:chat"


def test_what_a_router_forwards_in_tracestate() -> None:
    asked = resolve({"tracestate": TRACED, "user-agent": "x"}, None, CONFIG)
    assert (asked.tpot_s, asked.ttft_s, asked.stated, asked.routed) == (0.040, 0.5, True, False)
    assert ask({"tracestate": "adaserve=class:coding"}).slo_class == "coding"
    assert ask({"tracestate": "adaserve=tpot-ms:40 ; ttft-ms:500"}).ttft_s == 0.5
    assert resolve({"TraceState": "adaserve=speculation:off"}, None, CONFIG).speculation == 0
    assert ask({"tracestate": "vendor=tpot-ms:1"}).tpot_s == math.inf
    with pytest.raises(SLOError, match="disagree"):
        ask({"tracestate": TRACED, "x-slo-tpot-ms": "41"})


@pytest.mark.parametrize("member", ["", "tpot:40", "tpot-ms", "tpot-ms:40;", "class=chat"])
def test_bad_tracestate(member: str) -> None:
    with pytest.raises(SLOError, match=r"tracestate has .* known are tpot-ms:\.\.\., ttft-ms:\.\.\."):
        ask({"tracestate": f"adaserve={member}"})
    with pytest.raises(SLOError, match="x-slo-tpot-ms is 'soon'"):
        ask({"tracestate": "adaserve=tpot-ms:soon"})


@pytest.mark.parametrize(
    ("headers", "routed", "stated"),
    [
        ({}, False, False),
        ({"user-agent": "curl", "x-slo-class": "chat"}, False, True),
        ({"content-type": "application/json"}, True, False),
        ({"user-agent": "curl", "via": "1.1 proxy", "x-slo-tpot-ms": "40"}, True, True),
        ({"user-agent": "curl", "x-envoy-attempt-count": "1"}, True, False),
        ({"user-agent": "curl", "X-Real-IP": "10.0.0.7"}, True, False),
    ],
)
def test_how_a_request_came(headers: Any, routed: bool, stated: bool) -> None:
    asked = resolve(headers, None, CONFIG)
    assert (asked.routed, asked.stated) == (routed, stated)


def test_tokens_per_second_are_limited_like_milliseconds() -> None:
    config = SLOConfig(limits=SLOLimits(least_tpot_ms=20))
    assert ask({"x-sgl-tps-slo": "50"}, None, config).tpot_s == 0.020
    with pytest.raises(SLOError, match=r"x-sgl-tps-slo is 51.*from 0.01667 to 50 tokens per second"):
        ask({"x-sgl-tps-slo": "51"}, None, config)
    with pytest.raises(SLOError, match="name a class"):
        ask({"x-sgl-tps-slo": "50"}, None, SLOConfig(limits=SLOLimits(own_ms=False)))


@pytest.mark.parametrize(
    "value",
    ["nan", "inf", "-40", "0", "", "fast", "40tps", "1e-3", "1e5", "4_0", "0x10", "40, 41", "9" * 400],
)
def test_bad_tokens_per_second(value: str) -> None:
    with pytest.raises(SLOError, match=r"x-sgl-tps-slo.*from 0.01667 to 10000 tokens per second"):
        ask({"x-sgl-tps-slo": value})


def test_hints_of_dynamo() -> None:
    hints = {"agent_hints": {"priority": 5, "strict_priority": 1, "osl": 1024, "speculative_prefill": True}}
    r = resolve({}, None, CONFIG, hints)
    assert (r.osl, r.priority, r.slo_class) == (1024, 5, "default")
    assert resolve({}, {"nvext": hints}, CONFIG).osl == 1024
    assert resolve({"x-dynamo-request-priority": "-3"}, None, CONFIG).priority == -3
    assert resolve({"x-dynamo-request-priority": "-3"}, None, CONFIG, hints).priority == 5
    assert RequestSLO.from_params(r.in_params(None)) == r


@pytest.mark.parametrize(
    "value", [0, -1, 1.5, True, "64", [64], math.nan, 10**5000], ids=lambda v: str(type(v))
)
def test_bad_hints(value: Any) -> None:
    with pytest.raises(SLOError, match=r"agent_hints.osl is .*an integer from 1 to 1048576"):
        ask(nvext={"agent_hints": {"osl": value}})
    if type(value) is not int or value > 1:
        with pytest.raises(SLOError, match=r"agent_hints.priority is .*an integer from -2147483648"):
            ask(nvext={"agent_hints": {"priority": value}})


def test_a_value_that_is_too_deep_to_be_shown_is_refused_like_any_other() -> None:
    deep: list[object] = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(SLOError, match=r"nvext.router must be an object like .*\[\.\.\.\]"):
        ask(nvext={"router": deep})


@pytest.mark.parametrize("value", ["high", "", "1.5", "2147483648", "9" * 5000, "\u0665"])
def test_a_bad_priority_header(value: str) -> None:
    with pytest.raises(SLOError, match=r"x-dynamo-request-priority is .*an integer from -2147483648"):
        ask({"x-dynamo-request-priority": value})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("x-slo-tpot", "x-slo-tpot-ms"),
        ("X-SLO-TTFT", "x-slo-ttft-ms"),
        ("x-slo-", "x-slo-class"),
        ("x-slo-clas", "x-slo-class"),
        ("x-slo-tpot-ms-", "x-slo-tpot-ms"),
        ("x-llm-d-slo-tpot", "x-llm-d-slo-tpot-ms"),
        ("x-sgl-tpot-slo", "x-sgl-tps-slo"),
        ("x-sgl-slo-ttft-ms", "x-slo-ttft-ms"),
        ("x-adaserve-speculate", "x-adaserve-speculation"),
        ("x-slo-" + "\xff" * 300, "x-slo-class"),
        ("x_slo_tpot_ms", "x-slo-tpot-ms"),
    ],
)
def test_an_unknown_header_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(SLOError, match=f"did you mean {nearest}\\?"):
        ask({name: "50"})


@pytest.mark.parametrize(
    ("headers", "body"), [({"x-slo-class": "custom"}, {}), ({}, {"slo_class": "custom"})]
)
def test_the_class_of_milliseconds_needs_some(headers: dict[str, str], body: dict[str, Any]) -> None:
    """Without an SLO the answer would count as one that met it."""
    with pytest.raises(SLOError, match=r"^class 'custom' is .* states none: send x-slo-tpot-ms, or name"):
        ask(headers, body)
    for value in ({"x-slo-tpot-ms": "40"}, {"x-slo-ttft-ms": "400"}):
        assert ask(headers | value, body).slo_class == "custom"


def test_other_headers_are_left_alone() -> None:
    others = ("x-slot", "x-sgl-request-id", "x-llm-d-inference-objective", "x-slog-level", "x-sgl-slow")
    assert ask(dict.fromkeys(others, "50")).slo_class == "default"


BAD_HEADERS = [
    "nan",
    "inf",
    "-inf",
    "-5",
    "0",
    "",
    "fast",
    "50ms",
    "5_0",
    "0x10",
    "50, 60",
    "1e999",
    "\u0665\u0660",
    "61000",
]


@pytest.mark.parametrize("value", BAD_HEADERS)
def test_bad_header_values(value: str) -> None:
    with pytest.raises(SLOError, match=r"x-slo-tpot-ms.*from 0.1 to 60000 ms"):
        ask({"x-slo-tpot-ms": value})


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -1, 0, True, "50", [50], {"a": 1}, 10**5000, 1e400],
    ids=lambda v: str(type(v)),
)
def test_bad_body_values(value: Any) -> None:
    with pytest.raises(SLOError, match=r"slo_tpot_ms.*from 0.1 to 60000 ms"):
        ask(body={"slo_tpot_ms": value})


@pytest.mark.parametrize(
    ("headers", "body", "says"),
    [
        ({"x-slo-class": "codng"}, None, "known classes are coding, chat, summarization, default"),
        ({"x-slo-class": ""}, None, "unknown SLO class"),
        ({}, {"slo_class": 3}, "must be a class name"),
        *(
            ({}, {key: value}, f"has no '{key}': AdaServe's keys are {', '.join(OWN_KEYS)}")
            for key, value in (
                ("adaserve_slo", {"slo_class": "coding"}),
                ("slo_tpot", 50),
                ("adaserve_learning", False),
                ("adaserve_speculations", "off"),
            )
        ),
        ({"x-slo-tpot-ms": "50", "x-llm-d-slo-tpot-ms": "60"}, None, "disagree"),
        ([("x-slo-tpot-ms", "50"), ("X-Slo-Tpot-Ms", "51")], None, "disagree"),
        ([("x-slo-class", "chat"), ("x-slo-class", "coding")], None, "sent twice"),
        ({}, {"slo_tpot_ms": 50, "nvext": {"router": {"itl_target": 51}}}, "disagree"),
        ({}, {"nvext": {"router": 5}}, "must be an object"),
        ({}, {"nvext": {"agent_hints": [1]}}, "nvext.agent_hints must be an object"),
        ({"x-sgl-tps-slo": "40", "x-slo-tpot-ms": "30"}, None, "= 30 ms and .* = 25 ms disagree"),
        ([("x-dynamo-request-priority", "1"), ("x-dynamo-request-priority", "2")], None, "sent twice"),
    ],
)
def test_refusals_say_what_is_accepted(headers: Any, body: Any, says: str) -> None:
    with pytest.raises(SLOError, match=says):
        ask(headers, body)


def test_agreeing_duplicates_and_foreign_keys_are_fine() -> None:
    r = ask([("x-slo-tpot-ms", "50"), ("x-llm-d-slo-tpot-ms", "50.0")], {"my_processor": 7})
    assert r.tpot_s == pytest.approx(0.05)


@given(
    st.one_of(st.none(), st.sampled_from(["coding", "chat", "default", "custom"])),
    st.one_of(st.none(), st.floats(0.1, 60_000)),
    st.one_of(st.none(), st.floats(1, 3_600_000)),
)
def test_what_reaches_the_scheduler_is_what_was_resolved(
    name: str | None, tpot: float | None, ttft: float | None
) -> None:
    """Between processes nothing is rounded, and nothing of what the client wrote is read again."""
    assume(name != "custom" or tpot is not None or ttft is not None)
    body = {"slo_class": name, "slo_tpot_ms": tpot, "slo_ttft_ms": ttft, "my_processor": 7}
    asked = resolve({}, body, CONFIG)
    params = asked.in_params(body)
    assert params.keys() == {"my_processor", "adaserve_slo"}
    assert RequestSLO.from_params(msgspec.msgpack.decode(msgspec.msgpack.encode(params))) == asked
    logged = json.dumps(params, allow_nan=False)  # as of --log-requests-format json
    assert RequestSLO.from_params(json.loads(logged)) == asked


@given(st.dictionaries(st.text(max_size=12), st.one_of(st.text(), st.integers(), st.floats(), st.booleans())))
def test_any_body_gives_a_result_or_an_slo_error(body: dict[str, Any]) -> None:
    try:
        assert ask(body=body).slo_class in CONFIG.labels
    except SLOError:
        assert any(key.startswith(("slo_", "adaserve_")) or key == "nvext" for key in body)


def test_baseline_is_only_needed_when_used() -> None:
    with pytest.raises(SLOError, match="baseline latency, which is not known"):
        resolve({"x-slo-class": "coding"}, None, CONFIG).at(None)
    absolute = resolve({"x-slo-class": "coding"}, {"slo_tpot_ms": 9}, CONFIG)
    assert absolute.at(None).tpot_s == pytest.approx(0.009)


def test_config_file(tmp_path: Path) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text("default_class: b\nclasses:\n  a: {x_baseline: 1.5, target: 0.99}\n  b: {tpot_ms: 70}\n")
    config = SLOConfig.load(path)
    assert config.get("a").slo(0.02) == SLO("a", 0.03)
    assert config.get("a").target == 0.99
    assert config.labels == ("a", "b", "default", "custom")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("classes: {a: {tpot_ms: 5, x_baseline: 2}}", "not both"),
        ("classes: {a: {tpot: 5}}", r"classes.a: unknown setting 'tpot': known are name, tpot_ms"),
        ("classes: {a: {tpot_ms: fast}}", "tpot_ms is 'fast'"),
        ("classes: {a: {target: 1}}", "target is 1: it should be less than 1"),
        ("classes: {'1a': {}}", "classes.1a: name is '1a'"),
        ("classes: {a: 50}", "classes.a is 50: it should be a mapping"),
        ("classes: {}\nlimits: {never_learn: anonymous}", "is 'anonymous': it should be a list"),
        ("classes: {custom: {}}", "reserved"),
        ("classes: {a: {}}\ndefault_class: z", "not one of"),
        ("classes: {a: {}, default: {}}\ndefault_class: a", "nobody could ask for the class 'default'"),
        ("classes: {a: {name: b, tpot_ms: 50}}", "class 'a' has the name 'b': leave it out"),
        ("classes: {}\nlimits: {least_tpot_ms: 0}", "limits: least_tpot_ms is 0"),
        ("classes: {}\nlimits: {tenant_share: 1.5}", "limits: tenant_share is 1.5.*less than or equal to 1"),
        ("classes: {}\nlimits: {share: 0.5}", "limits: unknown setting 'share': known are own_ms"),
        ("[1]", "expected a mapping"),
        ("a: [", "not valid YAML"),
        ("a: " + "[" * 3000, "not valid YAML"),
        ("classes: {a: {tpot_ms: 2026-13-45}}", "not valid YAML: month"),
        ("classes:\n  a: {tpot_ms: 5}\n  a: {tpot_ms: 50}", "the key 'a' is given twice .* line 3"),
    ],
)
def test_bad_config_files_are_named(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text(text)
    with pytest.raises(SLOError, match=says) as caught:
        SLOConfig.load(path)
    assert "slo.yaml" in str(caught.value)
