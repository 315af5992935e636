"""The SLO of a request: where it may be stated, and which place wins.

The first place that states it wins, for TPOT and TTFT separately::

    body     custom_params {slo_tpot_ms, slo_ttft_ms}, or nvext.router {itl_target, ttft_target}
    header   x-slo-tpot-ms, x-slo-ttft-ms (also spelled x-llm-d-slo-...),
             or sgl-router's x-sgl-tps-slo (tokens per second) and x-sgl-ttft-slo-ms
    class    custom_params {slo_class} or header x-slo-class
    default  the server's default class, else no SLO

Routers that drop unknown headers forward those of W3C's Trace Context. So ``tracestate: adaserve=tpot-ms:40``
says the same as ``x-slo-tpot-ms: 40``, and likewise for ``ttft-ms``, ``class`` and ``speculation``.

Hints come from Dynamo: nvext.agent_hints {priority, osl} and header x-dynamo-request-priority. A header that
looks like one of these but is not (``x-slo-tpot``) is refused, and the message names the nearest.

A request may limit its speculation: custom_params {adaserve_speculation} or header x-adaserve-speculation,
"off" or the most tokens that may be speculated at once. It may forbid that a draft learns from it:
custom_params {adaserve_learn: false} or header x-adaserve-learn: off.

The server answers a bad value with 400 and the text of the SLOError, so each message names the value
and the remedy. The HTTP process resolves it, once; what it found travels to the scheduler
(:meth:`RequestSLO.in_params`), which alone knows the baseline that classes multiply.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from hashlib import sha256
from typing import Any, TypeVar

from adaserve.checked import shown
from adaserve.slo.classes import (
    ANONYMOUS,
    CUSTOM_CLASS,
    DEFAULT_CLASS,
    SLO,
    TPOT_RANGE_MS,
    TTFT_RANGE_MS,
    SLOConfig,
    SLOError,
    SLOLimits,
    seconds,
    times_baseline,
)

HEADER_KEYS = ("authorization", "x-api-key")
HEADER_CLASS = "x-slo-class"
HEADER_TPOT = ("x-slo-tpot-ms", "x-llm-d-slo-tpot-ms")
HEADER_TTFT = ("x-slo-ttft-ms", "x-llm-d-slo-ttft-ms", "x-sgl-ttft-slo-ms")
HEADER_TPS = "x-sgl-tps-slo"
HEADER_PRIORITY = "x-dynamo-request-priority"
HEADER_SPECULATION = "x-adaserve-speculation"
HEADER_LEARN = "x-adaserve-learn"
HEADER_TRACE = "tracestate"
TRACE_MEMBER = "adaserve"
TRACE_KEYS = {
    "tpot-ms": HEADER_TPOT[0],
    "ttft-ms": HEADER_TTFT[0],
    "class": HEADER_CLASS,
    "speculation": HEADER_SPECULATION,
}
"""What a member of ``tracestate`` may hold, and the header that each stands for."""
PROXY_HEADERS = ("via", "forwarded", "x-forwarded-for", "x-real-ip")
KNOWN_HEADERS = (HEADER_CLASS, *HEADER_TPOT, *HEADER_TTFT, HEADER_TPS, HEADER_SPECULATION, HEADER_LEARN)
_LOOKS_LIKE_OURS = re.compile(r"x-(slo|llm-d-slo|adaserve)(-|$)|x-sgl-(.*-)?slo(-|$)")
SPECULATION_KEY = "adaserve_speculation"
LEARN_KEY = "adaserve_learn"
OWN_KEYS = ("slo_class", "slo_tpot_ms", "slo_ttft_ms", SPECULATION_KEY, LEARN_KEY)
"""AdaServe's keys in ``custom_params``. Any other key that begins like these is refused."""
MAX_SPECULATION = 64
MAX_OSL = 1 << 20
PRIORITY_RANGE = (-(1 << 31), (1 << 31) - 1)
WIRE_KEY = "adaserve_slo"
"""Where the resolved SLO stands in ``custom_params`` on its way to the scheduler."""
START_TEXT = "The capital city of France is"
START_PARAMS = {"temperature": 0, "max_new_tokens": 8}
"""What SGLang sends to its own server when that starts, once for each rank. Such a request is not counted,
whoever sends it."""

Headers = Mapping[str, str] | Iterable[tuple[str, str]]
T = TypeVar("T")
_COUNT = re.compile(r"\d{1,2}", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d{1,10}", re.ASCII)
_NUMBER = re.compile(r"\+?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class RequestSLO:
    """What a request is served for, while the baseline is not known. Seconds; inf = none."""

    slo_class: str  # one of SLOConfig.labels
    tpot_s: float = math.inf
    ttft_s: float = math.inf
    x_baseline: float | None = None  # in place of tpot_s: a multiple of the baseline
    tenant: str = ANONYMOUS  # who asks: a hash of the API key
    speculation: int | None = None  # tokens that may be speculated at once; 0 = off, None = no limit
    osl: int | None = None  # output tokens that the client expects
    priority: int | None = None  # higher = sooner, where the server schedules by priority
    learn: bool = True  # whether a draft may learn from it
    stated: bool = False  # the request named a class or milliseconds; otherwise it got the default
    routed: bool = False  # it came through a router, as its headers tell
    counted: bool = True  # in the statistics; nobody asked for the one with which SGLang starts

    def at(self, baseline_s: float | None) -> SLO:
        """The objectives in seconds. Raises SLOError when they need a baseline that is unknown."""
        tpot_s = self.tpot_s
        if self.x_baseline is not None:
            tpot_s = times_baseline(self.x_baseline, baseline_s, self.slo_class)
        return SLO(self.slo_class, tpot_s, self.ttft_s, self.tenant)

    def in_params(self, custom_params: Mapping[str, Any] | None) -> dict[str, Any]:
        """SGLang's ``custom_params`` with this SLO in place of what the client wrote about SLOs.

        It can be written as JSON, as SGLang does in its logs of requests."""
        kept = {k: v for k, v in (custom_params or {}).items() if k not in (*OWN_KEYS, "nvext")}
        wire = {name: value for name, value in asdict(self).items() if value != math.inf}  # JSON has none
        return kept | {WIRE_KEY: wire}

    @classmethod
    def from_params(cls, custom_params: Mapping[str, Any] | None) -> RequestSLO:
        """What ``in_params`` put there; no objectives if nothing did."""
        wire = (custom_params or {}).get(WIRE_KEY)
        return cls(DEFAULT_CLASS) if wire is None else cls(**wire)


def resolve(
    headers: Headers,
    custom_params: Mapping[str, Any] | None,
    config: SLOConfig,
    nvext: Mapping[str, Any] | None = None,
) -> RequestSLO:
    """Finds the objectives of a request. Raises SLOError for every value that is not understood: nothing is
    ignored silently. A caller with many requests of the same headers should call ``read_headers`` once."""
    return read_headers(headers, config).resolve(custom_params, config, nvext)


@dataclass(frozen=True, slots=True)
class FromHeaders:
    """What headers say, for all requests that came with them."""

    wish: _Wish
    speculation: int | None
    priority: int | None
    learn: bool
    tenant: str
    routed: bool

    def resolve(
        self, custom_params: Mapping[str, Any] | None, config: SLOConfig, nvext: Mapping[str, Any] | None
    ) -> RequestSLO:
        """The objectives of one of the requests.

        ``custom_params``: SGLang's body field; keys that start with neither ``slo_`` nor ``adaserve_`` are
        left alone.
        ``nvext``: Dynamo's body field, taken from ``custom_params["nvext"]`` when not given. What only its
        router acts upon is left alone.
        Raises SLOError.
        """
        params = custom_params or {}
        nvext = params.get("nvext") if nvext is None else nvext
        body, header = _in_body(params, nvext, config.limits), self.wish
        hints = _part(nvext, "agent_hints", "{'osl': 256}")
        name = _first(body.slo_class, header.slo_class)
        tpot_ms, ttft_ms = _first(body.tpot_ms, header.tpot_ms), _first(body.ttft_ms, header.ttft_ms)
        cls = config.get(DEFAULT_CLASS if name is None else name)
        own_ms = tpot_ms is not None or ttft_ms is not None
        if own_ms and not config.limits.own_ms:
            raise SLOError(
                f"this server does not take SLOs in milliseconds: name a class, {', '.join(config.classes)}"
            )
        if cls.name == CUSTOM_CLASS and not own_ms:  # any speed would do, and count as met
            raise SLOError(
                f"class {CUSTOM_CLASS!r} is that of requests which state milliseconds, and this one states "
                f"none: send {HEADER_TPOT[0]}, or name another class, {', '.join(config.classes)}"
            )
        priority = _integer("nvext.agent_hints.priority", hints.get("priority"), PRIORITY_RANGE)
        speculation = _speculation(f"custom_params.{SPECULATION_KEY}", params.get(SPECULATION_KEY))
        return RequestSLO(
            slo_class=CUSTOM_CLASS if own_ms else cls.name,
            tpot_s=seconds(_first(tpot_ms, cls.tpot_ms)),
            ttft_s=seconds(_first(ttft_ms, cls.ttft_ms)),
            x_baseline=cls.x_baseline if tpot_ms is None else None,
            tenant=self.tenant,
            speculation=_first(speculation, self.speculation),
            osl=_integer("nvext.agent_hints.osl", hints.get("osl"), (1, MAX_OSL)),
            priority=_first(priority, self.priority),
            learn=self.learn and _may_learn(params),
            stated=own_ms or name is not None,
            routed=self.routed,
        )


def read_headers(headers: Headers, config: SLOConfig) -> FromHeaders:
    """``headers``: a mapping or pairs (pairs show a header that was sent twice), names in any case. An API
    key among them tells the tenant. Raises SLOError."""
    sent = _by_name(headers)
    _refuse_misspelt(sent)
    for meant, text in _traced(sent):
        sent.setdefault(meant, []).append(text)
    tenants = _tenants(sent)
    return FromHeaders(
        wish=_in_headers(sent, config.limits),
        speculation=_said_once(sent, HEADER_SPECULATION, _speculation),
        priority=_said_once(sent, HEADER_PRIORITY, _priority),
        learn=_lets_learn(sent) and not config.limits.never_learn.intersection(tenants),
        tenant=tenants[0],
        routed=_came_through_a_router(sent),
    )


def _refuse_misspelt(sent: Mapping[str, list[str]]) -> None:
    for name in sent:
        if name not in KNOWN_HEADERS and _LOOKS_LIKE_OURS.match(name.replace("_", "-")):
            nearest = get_close_matches(name, KNOWN_HEADERS, n=1, cutoff=0.0)[0]
            raise SLOError(
                f"unknown header {shown(name)}: did you mean {nearest}? Known are {', '.join(KNOWN_HEADERS)}"
            )


def came_through_a_proxy(sent: Iterable[str]) -> bool:
    """Whether a proxy has put its headers among these names, which are in lower case."""
    return any(name in PROXY_HEADERS or name.startswith("x-envoy-") for name in sent)


def _came_through_a_router(sent: Mapping[str, list[str]]) -> bool:
    """Proxies say so, and SGLang's routers drop the name that every client's library gives."""
    return came_through_a_proxy(sent) or (bool(sent) and "user-agent" not in sent)


def _traced(sent: Mapping[str, list[str]]) -> list[tuple[str, str]]:
    """Headers that our members of ``tracestate`` stand for: ``other=1,adaserve=tpot-ms:40;class:chat``."""
    members = [m.strip().partition("=") for text in sent.get(HEADER_TRACE, []) for m in text.split(",")]
    found = []
    for pair in (p for key, _, value in members if key == TRACE_MEMBER for p in value.split(";")):
        name, colon, text = pair.strip().partition(":")
        if not colon or name not in TRACE_KEYS:
            known = ", ".join(f"{key}:..." for key in TRACE_KEYS)
            raise SLOError(
                f"header {HEADER_TRACE} has {shown(pair)} under {TRACE_MEMBER}=: known are {known}"
            )
        found.append((TRACE_KEYS[name], text))
    return found


def _said_once(sent: Mapping[str, list[str]], name: str, read: Callable[[str, str], T]) -> T | None:
    """What a header says, by ``read`` of its name and a text; None without it. Raises SLOError if it was sent
    twice and says two things."""
    said = list(dict.fromkeys(read(f"header {name}", text) for text in sent.get(name, [])))
    if len(said) > 1:
        both = ", ".join(map(shown, said))
        raise SLOError(f"header {name} was sent twice with different values ({both}): send one of them")
    return said[0] if said else None


def _priority(where: str, text: str) -> int | None:
    return _integer(where, int(text) if _INTEGER.fullmatch(text) else text, PRIORITY_RANGE)


def _integer(where: str, value: Any, accepted: tuple[int, int]) -> int | None:
    """None for None. Raises SLOError for anything else that is not an integer in the range."""
    low, high = accepted
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise SLOError(f"{where} is {shown(value)}: expected an integer from {low} to {high}")
    return value


def _lets_learn(sent: Mapping[str, list[str]]) -> bool:
    """False when any of them forbids it: what is private in one place is private."""
    allowed = []
    for text in sent.get(HEADER_LEARN, []):
        if text.lower() not in ("on", "off"):
            raise SLOError(f'header {HEADER_LEARN} is {shown(text)}: expected "on" or "off"')
        allowed.append(text.lower() == "on")
    return all(allowed)


def _may_learn(params: Mapping[str, Any]) -> bool:
    value = params.get(LEARN_KEY)
    if value is not None and not isinstance(value, bool):
        raise SLOError(f"custom_params.{LEARN_KEY} is {shown(value)}: expected true or false")
    return value is not False


def _speculation(where: str, value: Any) -> int | None:
    """Most tokens at once; None for None."""
    if value is None:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool)
    text = value if isinstance(value, str) else ""
    number = value if whole else 0 if text == "off" else int(text) if _COUNT.fullmatch(text) else -1
    if not 0 <= number <= MAX_SPECULATION:
        raise SLOError(
            f'{where} is {shown(value)}: expected "off" or a number of tokens, 0 to {MAX_SPECULATION}'
        )
    return number


@dataclass(frozen=True, slots=True)
class _Wish:
    """What one place asks for."""

    slo_class: str | None
    tpot_ms: float | None
    ttft_ms: float | None


def _by_name(headers: Headers) -> dict[str, list[str]]:
    sent: dict[str, list[str]] = {}
    for name, value in headers.items() if isinstance(headers, Mapping) else headers:
        sent.setdefault(name.lower(), []).append(value.strip())
    return sent


def _tenants(sent: Mapping[str, list[str]]) -> list[str]:
    """Names for the API keys, the first of which is the tenant: a gateway may add its own to the client's.
    They are the same for requests with the same keys, and do not reveal them."""
    keys = [_key(name, value) for name in HEADER_KEYS for value in sent.get(name, []) if value]
    return [sha256(key.encode()).hexdigest()[:16] for key in keys] or [ANONYMOUS]


def _key(name: str, value: str) -> str:
    """Without the scheme, whose spelling the client may choose. `x-api-key` needs none, so that another
    first word there is the key's own."""
    scheme, _, rest = value.partition(" ")
    return rest.strip() or value if name == "authorization" or scheme.lower() == "bearer" else value


def _in_body(params: Mapping[str, Any], nvext: Any, limits: SLOLimits) -> _Wish:
    for key in map(str, params):
        if key.startswith(("slo_", "adaserve_")) and key not in OWN_KEYS:
            raise SLOError(f"custom_params has no {shown(key)}: AdaServe's keys are {', '.join(OWN_KEYS)}")
    router = _part(nvext, "router", "{'itl_target': 50}")
    name = params.get("slo_class")
    if name is not None and not isinstance(name, str):
        raise SLOError(f"custom_params.slo_class must be a class name, not {shown(name)}")
    tpot = [
        ("custom_params.slo_tpot_ms", params.get("slo_tpot_ms")),
        ("nvext.router.itl_target", router.get("itl_target")),
    ]
    ttft = [
        ("custom_params.slo_ttft_ms", params.get("slo_ttft_ms")),
        ("nvext.router.ttft_target", router.get("ttft_target")),
    ]
    return _Wish(name, _tpot_ms(tpot, limits), _ttft_ms(ttft, limits))


def _part(nvext: Any, name: str, example: str) -> Mapping[str, Any]:
    """One object of Dynamo's body field; empty if there is none."""
    part = nvext.get(name) if isinstance(nvext, Mapping) else nvext
    if part is None:
        return {}
    if not isinstance(part, Mapping):
        raise SLOError(f"nvext.{name} must be an object like {example}, not {shown(part)}")
    return part


def _in_headers(sent: Mapping[str, list[str]], limits: SLOLimits) -> _Wish:
    def values(spellings: tuple[str, ...]) -> Values:
        texts = [(f"header {name}", text) for name in spellings for text in sent.get(name, [])]
        return [(name, float(text) if _NUMBER.fullmatch(text) else text) for name, text in texts]

    name = _said_once(sent, HEADER_CLASS, lambda _, text: text)
    tpot, tps, ttft = values(HEADER_TPOT), values((HEADER_TPS,)), values(HEADER_TTFT)
    return _Wish(name, _tpot_ms(tpot, limits, tps), _ttft_ms(ttft, limits))


Values = list[tuple[str, Any]]
"""What is written in several places, each with its name."""


def _tpot_ms(values: Values, limits: SLOLimits, per_second: Values | None = None) -> float | None:
    """``per_second``: the same wish as tokens per second, TPOT = 1000 ms / value."""
    low, high = limits.least_tpot_ms, TPOT_RANGE_MS[1]
    given = _in_range(values, (low, high), "ms")
    rates = _in_range(per_second or [], (1e3 / high, 1e3 / low), "tokens per second")
    return _agreed(given + [(name, 1e3 / rate) for name, rate in rates])


def _ttft_ms(values: Values, limits: SLOLimits) -> float | None:
    return _agreed(_in_range(values, (limits.least_ttft_ms, TTFT_RANGE_MS[1]), "ms"))


def _in_range(values: Values, accepted: tuple[float, float], unit: str) -> list[tuple[str, float]]:
    """The values that were given. Raises SLOError for one that is not a number in the range."""
    low, high = accepted
    for where, value in values:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and low <= value <= high):  # NaN fails both comparisons
            raise SLOError(
                f"{where} is {shown(value)}: expected a number from {low:.4g} to {high:.10g} {unit}"
            )
    return [(where, float(value)) for where, value in values if value is not None]


SAME = 1e-3
"""Relative difference of two spellings of one wish: 30 ms are 33.33 tokens per second."""


def _agreed(given: list[tuple[str, float]]) -> float | None:
    """The one number of milliseconds that several spellings agree on."""
    for name, value in given[1:]:
        if not math.isclose(value, given[0][1], rel_tol=SAME):
            raise SLOError(
                f"{given[0][0]} = {given[0][1]:g} ms and {name} = {value:g} ms disagree: send one of them"
            )
    return given[0][1] if given else None


def _first(one: T | None, other: T | None) -> T | None:
    return other if one is None else one
