"""Curves of several runs in panels side by side, as an SVG that reads well on light and dark pages.

A thin line goes through the steps, a thick one through means over the last steps; a bar is an interval.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

PANEL, HEIGHT = 370, 300
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 34, 46
COLOURS = ("#2f6fdf", "#d2691e", "#2e8b57", "#8a4fbf", "#b03060")
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #222 } .title { font-weight: 600 }
.axis, .grid { stroke: #888; fill: none } .grid { stroke-opacity: 0.25 }
.raw { fill: none; stroke-width: 1; stroke-opacity: 0.3 } .mean { fill: none; stroke-width: 2 }
.interval { stroke-width: 1.5 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } .ground { fill: #16181d } }
"""


@dataclass(frozen=True)
class Series:
    """One run's rewards, step by step, and shares with an interval: `(x, low, share, high)`."""

    name: str
    rewards: Sequence[float]
    shares: Sequence[tuple[float, float, float, float]] = ()


@dataclass(frozen=True)
class Panel:
    title: str
    series: list[Series] = field(default_factory=list)


def draw_panels(panels: Sequence[Panel], window: int) -> str:
    """Draws each panel over its own number of steps, all from 0 to 1; a mean is over `window` steps."""
    width = PANEL * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" role="img" '
        'aria-label="Mean reward over steps, by task and seed">',
        f"<style>{_STYLE}</style>",
        f'<rect class="ground" width="{width}" height="{HEIGHT}" fill="#fff"/>',
    ]
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate({number * PANEL} 0)">', *_panel(panel, window), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def means(rewards: Sequence[float], window: int) -> list[tuple[float, float]]:
    """Returns (step, mean of the `window` steps up to it), for steps that have as many before them."""
    return [(step, sum(rewards[step - window : step]) / window) for step in range(window, len(rewards) + 1)]


def _panel(panel: Panel, window: int) -> Iterator[str]:
    last = max(len(series.rewards) for series in panel.series)
    yield f'<text class="title" x="{LEFT}" y="18">{escape(panel.title)}</text>'
    for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        x, y = _place(0, share, last)
        yield f'<path class="grid" d="M{x:.1f} {y:.1f}H{PANEL - RIGHT}"/>'
        yield f'<text x="{x - 8:.1f}" y="{y + 4:.1f}" text-anchor="end">{share}</text>'
    ticks = max(1, last // 4)
    for step in range(0, last + 1, ticks):
        x, y = _place(step, 0.0, last)
        yield f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{step}</text>'
    x, y = _place(last / 2, 0.0, last)
    yield f'<text x="{x:.1f}" y="{y + 36:.1f}" text-anchor="middle">steps of rl</text>'
    yield f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{PANEL - RIGHT}"/>'
    for number, series in enumerate(panel.series):
        colour = COLOURS[number % len(COLOURS)]
        raw = list(enumerate(series.rewards, start=1))
        yield _line(raw, last, f'class="raw" stroke="{colour}"')
        yield _line(means(series.rewards, window), last, f'class="mean" stroke="{colour}"')
        offset = 4.0 * (number - (len(panel.series) - 1) / 2)
        for at, low, share, high in series.shares:
            (x, top), (_, bottom) = _place(at, high, last), _place(at, low, last)
            x, middle = x + offset, _place(at, share, last)[1]
            yield f'<path class="interval" stroke="{colour}" d="M{x:.1f} {top:.1f}V{bottom:.1f}"/>'
            yield f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="3.5" fill="{colour}"/>'
        y = TOP + 12 + 16 * number
        yield f'<text x="{LEFT + 12}" y="{y}" style="fill: {colour}">{escape(series.name)}</text>'


def _line(points: Sequence[tuple[float, float]], last: int, attributes: str) -> str:
    places = (_place(step, reward, last) for step, reward in points)
    return f'<polyline {attributes} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'


def _place(step: float, share: float, last: int) -> tuple[float, float]:
    x = LEFT + step / last * (PANEL - LEFT - RIGHT)
    y = TOP + (1.0 - share) * (HEIGHT - TOP - BOTTOM)
    return x, y
