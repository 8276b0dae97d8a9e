"""An HTML page with charts in cards: one file with everything that it needs, plotly.js included."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import chain, islice

from collage_neuron.cli import palette
from collage_neuron.cli.charts import Figure

Card = tuple[str, str, Figure]
"""Title, note and figure."""


def document(heading: str, sentences: Sequence[str], body: str, cards: Sequence[Sequence[Card]], command: str) -> str:
    """The page: heading, what it concludes, further HTML, then groups of cards; those of a group have one height.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    name = html.escape(heading)
    said = "".join(f"<p class=conclusion>{html.escape(sentence)}</p>" for sentence in sentences)
    charts = {f"chart{i}": card for i, card in enumerate(chain.from_iterable(cards))}
    # Charts are numbered through all groups: report.js finds each by its id.
    named = iter(charts.items())
    groups = ("".join(_section(*one) for one in islice(named, len(group))) for group in cards if group)
    sections = "".join(f"<div class=cards>{group}</div>" for group in groups)
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{name}</title><style>{palette.css()}{_file('report.css')}</style></head><body><h1>{name}</h1>{said}{body}"
        f"<noscript><p>The charts need JavaScript.</p></noscript>{sections}"
        f"<p class=note>Written by python -m collage_neuron {command}.</p>"
        f"{_scripts({chart: figure for chart, (_, _, figure) in charts.items()})}</body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], colours: Sequence[str]) -> str:
    """A table whose rows begin with a square of their colour in the palette; narrow windows show a block for each."""
    names = [html.escape(name) for name in head]
    lines = "".join(_row(names, [html.escape(cell) for cell in row], c) for row, c in zip(rows, colours, strict=True))
    return f"<div class=scrolls><table><tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>{lines}</table></div>"


def _row(names: Sequence[str], cells: Sequence[str], colour: str) -> str:
    others = zip(names[1:], cells[1:], strict=True)
    named = "".join(f"<td data-name='{name}'>{cell}</td>" for name, cell in others)  # report.css shows it if narrow
    return f"<tr><td class=swatch><i style='background:var(--of-{colour})'></i>{cells[0]}</td>{named}</tr>"


def _section(name: str, card: Card) -> str:
    heading, note, _ = card
    said = f"<p class=note>{html.escape(note)}</p>" if note else ""
    return f"<section><h2>{html.escape(heading)}</h2>{said}<div class=chart id={name}></div></section>"


def _scripts(figures: Mapping[str, Figure]) -> str:
    """plotly.js itself, so that the page needs no network, then the figures, then what draws them."""
    from plotly.offline import get_plotlyjs  # an extra: imported only where a page is written

    data = json.dumps(figures, allow_nan=False).replace("<", "\\u003c")  # a name may hold </script>
    drawing = _file("report.js")
    return (
        f"<script>{get_plotlyjs()}</script><script type='application/json' id=figures>{data}</script>"
        f"<script>{drawing}</script>"
    )


def _file(name: str) -> str:
    return files("collage_neuron.cli").joinpath(name).read_text(encoding="utf-8")
