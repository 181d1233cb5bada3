"""The colours of the mismatch KL: a ramp per theme, and on each class the ink that reads best.

The ramps change in lightness all the way, away from the page's own background, so that they read without
colour vision. The ink on a class is the theme's own where that has a contrast of 4.5:1, else black or white,
one of which always has.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

NUM_CLASSES = 10
MIN_CONTRAST = 4.5
DEEPEST_AT_LEAST = 0.05
"""A mismatch KL that deserves the deepest colour even in a run that never reaches it."""

RAMPS = {
    "light": ("#f6efe0", "#f5cf8a", "#e8954a", "#c2571f", "#7c2d0c"),
    "dark": ("#3b3228", "#67431c", "#a05a14", "#e0912f", "#ffe2a6"),
}
INKS = {"light": "#1d1f23", "dark": "#e6e4df"}


def scale_limits(trainable_kl: NDArray[np.float64]) -> tuple[float, float]:
    """(low, high) of the log scale: the p95 of the trainable tokens, and three to four decades below it."""
    high = max(float(np.quantile(trainable_kl, 0.95)) if len(trainable_kl) else 0.0, DEEPEST_AT_LEAST)
    return 10.0 ** math.floor(math.log10(high) - 3), high


def palette(theme: str) -> list[tuple[str, str]]:
    """(background, ink) per class, from the lowest KL to the highest."""
    anchors = [_channels(colour) for colour in RAMPS[theme]]
    backgrounds = [_between(anchors, index / (NUM_CLASSES - 1)) for index in range(NUM_CLASSES)]
    return [(background, ink_on(background, INKS[theme])) for background in backgrounds]


def fill_palettes(style: str) -> str:
    """The style sheet with variables per theme and the classes `kl-N` at its `/* palette: … */` marks."""
    for theme in RAMPS:
        variables = (
            f"--kl-{index}: {background}; --kl-ink-{index}: {ink};"
            for index, (background, ink) in enumerate(palette(theme))
        )
        style = style.replace(f"/* palette: {theme} */", " ".join(variables))
    classes = (
        f".kl-{index} {{ background: var(--kl-{index}); color: var(--kl-ink-{index}); }}"
        for index in range(NUM_CLASSES)
    )
    return style.replace("/* palette: classes */", "\n".join(classes))


def ink_on(background: str, preferred: str) -> str:
    if contrast(background, preferred) >= MIN_CONTRAST:
        return preferred
    return max("#000000", "#ffffff", key=lambda ink: contrast(background, ink))


def contrast(first: str, second: str) -> float:
    """WCAG 2 contrast ratio."""
    lighter, darker = sorted((luminance(first), luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    """WCAG 2 relative luminance."""
    linear = [
        value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4
        for value in (channel / 255 for channel in _channels(colour))
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _between(anchors: Sequence[tuple[int, int, int]], position: float) -> str:
    scaled = position * (len(anchors) - 1)
    index = min(int(scaled), len(anchors) - 2)
    share = scaled - index
    channels = (
        round(low + (high - low) * share)
        for low, high in zip(anchors[index], anchors[index + 1], strict=True)
    )
    return "#" + "".join(f"{channel:02x}" for channel in channels)
