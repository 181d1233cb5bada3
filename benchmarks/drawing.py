"""Reward over time as an SVG that reads well on light and dark pages."""

from collections.abc import Iterator, Sequence
from html import escape
from statistics import median_low

from benchmarks.curve import Curve

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 110, 24, 48
COLOURS = {"pellucid": "#2f6fdf", "TRL": "#d2691e"}
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #222 }
.axis, .grid { stroke: #888; fill: none } .grid { stroke-opacity: 0.25 } .target { stroke-dasharray: 4 4 }
.raw { fill: none; stroke-width: 1; stroke-opacity: 0.25 } .mean { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } rect { fill: #16181d } }
"""


def draw(curves: Sequence[Curve], target: float) -> str:
    longest = max(time_s for curve in curves for time_s, _ in curve.points)
    end_s = 10 * (int(longest / 10) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="Mean reward over wall time, by trainer">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        *_axes(end_s, target),
    ]
    middle = {curve.name: _middle(curves, curve.name, target) for curve in curves}
    for curve in curves:
        colour = COLOURS[curve.name]
        parts.append(_line(curve.points, end_s, f'class="raw" stroke="{colour}"'))
        parts.append(_line(curve.smoothed(), end_s, f'class="mean" stroke="{colour}"'))
        if (reached := curve.reached(target)) is not None:
            x, y = _place(reached[0], target, end_s)
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
            if reached[0] == middle[curve.name]:
                text = f"{escape(curve.name)} {reached[0]:.0f} s"
                parts.append(f'<text x="{x + 6:.1f}" y="{y - 8:.1f}">{text}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _middle(curves: Sequence[Curve], name: str, target: float) -> float | None:
    """Returns the time of the run, of those of this name that got to the target, that carries their label."""
    times = [found[0] for curve in curves if curve.name == name and (found := curve.reached(target))]
    return median_low(times) if times else None


def _axes(end_s: int, target: float) -> Iterator[str]:
    for reward in (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        x, y = _place(0, reward, end_s)
        kind = "grid target" if reward == target else "grid"
        yield f'<path class="{kind}" d="M{x} {y:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text x="{x - 8}" y="{y + 4:.1f}" text-anchor="end">{reward}</text>'
    step = max(10, end_s // 80 * 10)
    for time_s in range(0, end_s + 1, step):
        x, y = _place(time_s, 0.4, end_s)
        yield f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{time_s}</text>'
    x, y = _place(end_s / 2, 0.4, end_s)
    yield f'<text x="{x:.1f}" y="{y + 38:.1f}" text-anchor="middle">seconds of training</text>'
    yield f'<text x="{LEFT}" y="14" text-anchor="middle">reward</text>'
    yield f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'


def _line(points: Sequence[tuple[float, float]], end_s: int, attributes: str) -> str:
    places = (_place(time_s, reward, end_s) for time_s, reward in points)
    return f'<polyline {attributes} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'


def _place(time_s: float, reward: float, end_s: float) -> tuple[float, float]:
    x = LEFT + time_s / end_s * (WIDTH - LEFT - RIGHT)
    y = TOP + (1.0 - reward) / 0.6 * (HEIGHT - TOP - BOTTOM)
    return x, y
