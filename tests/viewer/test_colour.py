"""Colours that read: contrast and lightness, computed."""

import itertools

import numpy as np
import pytest

from pellucid.viewer.colour import (
    INKS,
    MIN_CONTRAST,
    NUM_CLASSES,
    contrast,
    fill_palettes,
    luminance,
    palette,
    scale_limits,
)


def test_contrast_of_known_colours() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.478, abs=1e-3)


@pytest.mark.parametrize("theme", sorted(INKS))
def test_every_class_has_readable_ink_and_its_own_lightness(theme: str) -> None:
    colours = palette(theme)
    assert len(colours) == NUM_CLASSES
    assert min(contrast(background, ink) for background, ink in colours) >= MIN_CONTRAST
    lightness = [luminance(background) for background, _ in colours]
    steps = [after - before for before, after in itertools.pairwise(lightness)]
    assert all(step < 0 for step in steps) if theme == "light" else all(step > 0 for step in steps)


def test_the_scale_ends_at_the_p95_but_never_below_a_twentieth() -> None:
    assert scale_limits(np.full(10, 1e-6)) == (1e-5, 0.05)
    assert scale_limits(np.empty(0)) == (1e-5, 0.05)
    low, high = scale_limits(np.linspace(0, 2, 101))
    assert (low, high) == (1e-3, pytest.approx(1.9))


def test_the_style_sheet_gets_its_classes() -> None:
    style = fill_palettes(":root { /* palette: light */ }\n/* palette: classes */")
    assert "--kl-0: #" in style and f".kl-{NUM_CLASSES - 1} {{ background" in style
