"""Figures as inline SVG. Colours are CSS variables of the page, so that light and dark both work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from adaserve.loadgen.figures import DASHES, Bars, Figure, Line, nice_ticks

W, H = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 44
_COLORS = 6

Scale = Callable[[float], float]


def figure_svg(figure: Figure) -> str:
    """The chart without its title and legend, which the page writes as text."""
    y_max = figure.y_max if figure.y_max is not None else _highest(figure) * 1.08
    y_max = y_max if y_max > 0 else 1.0

    def y(value: float) -> float:
        return H - BOTTOM - (H - BOTTOM - TOP) * min(value, y_max * 1.02) / y_max

    parts = [_y_axis(figure, y_max, y)]
    parts.append(_bars(figure, y) if figure.bars else _lines(figure, y))
    label = escape(f"{figure.title}: {figure.y_label} over {figure.x_label}")
    return (
        f'<svg viewBox="0 0 {W} {H}" role="img" aria-label="{label}" xmlns="http://www.w3.org/2000/svg">'
        + "".join(parts)
        + "</svg>"
    )


def legend(figure: Figure) -> list[tuple[str, str]]:
    """(label, small SVG) per series."""
    items: list[tuple[str, str]] = []
    for line in figure.lines:
        dash = DASHES[line.dash % len(DASHES)]
        swatch = (
            f'<svg viewBox="0 0 26 8" width="26" height="8" aria-hidden="true"><path d="M1 4H25" '
            f'stroke="{_color(line.color)}" stroke-width="2.5" stroke-dasharray="{dash}"/></svg>'
        )
        items.append((line.label, swatch))
    for b in figure.bars if len(figure.bars) > 1 else ():
        swatch = (
            '<svg viewBox="0 0 10 10" width="10" height="10" aria-hidden="true">'
            f'<rect width="10" height="10" rx="2" fill="{_color(b.color)}"/></svg>'
        )
        items.append((b.label, swatch))
    return items


def _color(index: int) -> str:
    return f"var(--c{index % _COLORS})"


def _highest(figure: Figure) -> float:
    values: list[float] = [v for line in figure.lines for v in line.y if v is not None]
    for b in figure.bars:
        errors = list(b.error) or [None] * len(b.values)
        values += [(v or 0) + (e or 0) for v, e in zip(b.values, errors, strict=True)]
        values += [v for v in b.outline if v is not None]
    return max(values, default=1.0)


def _y_axis(figure: Figure, y_max: float, y: Scale) -> str:
    parts = []
    for tick in nice_ticks(0, y_max):
        text = f"{100 * tick:.0f}%" if figure.percent else f"{tick:g}"
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick):.1f}H{W - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{text}</text>')
    middle = (H - BOTTOM + TOP) / 2
    parts.append(
        f'<text class="label" transform="translate(13 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(figure.y_label)}</text>"
    )
    parts.append(
        f'<text class="label" x="{(W + LEFT) / 2}" y="{H - 6}" text-anchor="middle">'
        f"{escape(figure.x_label)}</text>"
    )
    return "".join(parts)


def _bars(figure: Figure, y: Scale) -> str:
    slot = (W - LEFT - RIGHT) / max(1, len(figure.categories))
    width = min(slot * 0.76 / len(figure.bars), 72)
    parts = []
    for i, name in enumerate(figure.categories):
        middle = LEFT + slot * (i + 0.5)
        parts.append(
            f'<text x="{middle:.1f}" y="{H - BOTTOM + 17}" text-anchor="middle">{escape(name)}</text>'
        )
        for k, b in enumerate(figure.bars):
            x = middle + (k - len(figure.bars) / 2) * width
            parts.append(_bar(figure, b, i, (x + 1, width - 2), y))
        mark = figure.marks_y[i] if i < len(figure.marks_y) else None
        if mark is not None:
            half = width * len(figure.bars) / 2 + 5
            parts.append(f'<path class="target" d="M{middle - half:.1f} {y(mark):.1f}h{2 * half:.1f}"/>')
    return "".join(parts)


def _text(x: float, y: float, text: str, kind: str = "tick") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{text}</text>'


def _bar(figure: Figure, b: Bars, i: int, at: tuple[float, float], y: Scale) -> str:
    """Bar ``i`` of a series; ``at``: left edge and width."""
    x, width = at
    value = b.values[i]
    if value is None:
        return ""
    error = b.error[i] if i < len(b.error) else None
    text = f"{100 * value:.1f}%" if figure.percent else f"{value:.1f}"
    tip = f"{b.label}, {figure.categories[i]}: {text}"
    if error:
        tip += f" ± {100 * error:.1f}%" if figure.percent else f" ± {error:.1f}"
    base, color = y(0), _color(b.color)
    parts = []
    outline = b.outline[i] if i < len(b.outline) else None
    if outline is not None:
        parts.append(
            f'<rect x="{x:.1f}" y="{y(outline):.1f}" width="{width:.1f}" height="{base - y(outline):.1f}" '
            f'rx="2" fill="{color}" fill-opacity=".14" stroke="{color}" stroke-opacity=".6"/>'
        )
    parts.append(
        f'<rect x="{x:.1f}" y="{y(value):.1f}" width="{width:.1f}" height="{max(0.0, base - y(value)):.1f}" '
        f'rx="2" fill="{color}"><title>{escape(tip)}</title></rect>'
    )
    if error:
        low, high, center = y(max(0.0, value - error)), y(value + error), x + width / 2
        parts.append(
            f'<path class="error" d="M{center:.1f} {low:.1f}V{high:.1f}M{center - 4:.1f} {high:.1f}h8'
            f'M{center - 4:.1f} {low:.1f}h8"/>'
        )
    if width >= 30:
        # Above the filled bar, also inside an outline: it is the number of what is filled.
        top = y(value + (error or 0)) - 5
        parts.append(
            f'<text class="value" x="{x + width / 2:.1f}" y="{top:.1f}" text-anchor="middle">{text}</text>'
        )
    return "".join(parts)


def _lines(figure: Figure, y: Scale) -> str:
    x_max = figure.x_max or max((v for line in figure.lines for v in line.x), default=1.0) or 1.0

    def x(value: float) -> float:
        return LEFT + (W - LEFT - RIGHT) * min(value, x_max) / x_max

    parts = []
    for tick in nice_ticks(0, x_max, 6):
        parts.append(f'<path class="grid" d="M{x(tick):.1f} {TOP}V{H - BOTTOM}"/>')
        parts.append(_text(x(tick), H - BOTTOM + 17, f"{tick:g}"))
    for mark in figure.marks_x:
        parts.append(f'<path class="limit" d="M{x(mark):.1f} {TOP}V{H - BOTTOM}"/>')
    parts += [_path(line, x, y) for line in figure.lines]
    return "".join(parts)


def _path(line: Line, x: Scale, y: Scale) -> str:
    commands: list[str] = []
    pen_down = False
    last_y = 0.0
    for at, value in _thinned(line.x, line.y):
        if value is None:
            pen_down = False
            continue
        if not pen_down:
            commands.append(f"M{x(at):.1f} {y(value):.1f}")
        elif line.step:
            commands.append(f"H{x(at):.1f}V{y(value):.1f}" if value != last_y else f"H{x(at):.1f}")
        else:
            commands.append(f"L{x(at):.1f} {y(value):.1f}")
        pen_down, last_y = True, value
    dash = DASHES[line.dash % len(DASHES)]
    return (
        f'<path class="line" d="{"".join(commands)}" stroke="{_color(line.color)}" stroke-dasharray="{dash}">'
        f"<title>{escape(line.label)}</title></path>"
    )


def _thinned(
    xs: Sequence[float], ys: Sequence[float | None], most: int = 600
) -> list[tuple[float, float | None]]:
    """At most ``most`` points: more than the chart has pixels only makes the page heavy."""
    pairs = list(zip(xs, ys, strict=True))
    if len(pairs) <= most:
        return pairs
    step = (len(pairs) - 1) / (most - 1)
    return [pairs[round(k * step)] for k in range(most)]
