"""One palette for every figure: those of commands, the study, the accuracy page, README, and the demo."""

from __future__ import annotations

import re
from pathlib import Path

from collage_neuron.cli import palette
from collage_neuron.numerics.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
OTHER_COLOURS = {
    "collage_neuron/cli/charts.py",  # of a scale
    "examples/study/figures.py",  # of widths of a mantissa
    "benchmarks/accuracy/figure.py",  # of other packages
    "benchmarks/fp8/figure.py",  # of ways to scale
}


def luminance(colour: str) -> float:
    """The relative luminance of WCAG."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_strategy_has_a_colour_of_its_own_that_is_seen_on_its_paper() -> None:
    assert set(STRATEGIES) < set(palette.COLOURS)
    css = (ROOT / "collage_neuron/cli/report.css").read_text()
    for i, paper in enumerate(re.findall(r"--card: (#\w{6})", css)):
        colours = [pair[i] for pair in palette.COLOURS.values()]
        assert len(set(colours)) == len(colours)
        for colour in colours:
            low, high = sorted((luminance(colour), luminance(paper)))
            assert (high + 0.05) / (low + 0.05) >= 3, colour


def test_no_other_file_has_colours_of_strategies() -> None:
    """Whoever draws asks the palette: in the code, no other colour is written down but what is no strategy's."""
    for folder in ("collage_neuron", "examples", "benchmarks"):
        for file in (ROOT / folder).rglob("*.py"):
            name = file.relative_to(ROOT).as_posix()
            if name != "collage_neuron/cli/palette.py" and re.search(r'"#[0-9a-fA-F]{6}"', file.read_text()):
                assert name in OTHER_COLOURS, name
