"""An HTML page with charts in cards: one file with everything that it needs, plotly.js included."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import chain, count

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
    number = count()  # through all groups: report.js finds each chart by its id
    groups = ("".join(_section(f"chart{next(number)}", card) for card in group) for group in cards if group)
    sections = "".join(f"<div class=cards>{group}</div>" for group in groups)
    figures = {f"chart{i}": figure for i, (_, _, figure) in enumerate(chain.from_iterable(cards))}
    return (
        "<!doctype html>\n<html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{name}</title><style>{palette.css()}{_file('report.css')}</style></head><body><h1>{name}</h1>{said}{body}"
        f"<noscript><p>The charts need JavaScript.</p></noscript>{sections}"
        f"<p class=note>Written by python -m collage_neuron {command}.</p>"
        f"{_scripts(figures)}</body></html>\n"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], colours: Sequence[str]) -> str:
    """A table whose rows begin with a square of their colour in the palette; narrow windows show a block for each."""
    names = [html.escape(name) for name in head]
    lines = [f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"]
    for row, colour in zip(rows, colours, strict=True):
        first, *others = map(html.escape, row)
        # report.css shows the names if the window is narrow.
        named = "".join(f"<td data-name='{n}'>{cell}</td>" for n, cell in zip(names[1:], others, strict=True))
        lines.append(f"<tr><td class=swatch><i style='background:var(--of-{colour})'></i>{first}</td>{named}</tr>")
    return f"<div class=scrolls><table>{''.join(lines)}</table></div>"


def _section(name: str, card: Card) -> str:
    heading, note, _ = card
    said = f"<p class=note>{html.escape(note)}</p>" if note else ""
    return f"<section><h2>{html.escape(heading)}</h2>{said}<div class=chart id={name}></div></section>"


def _scripts(figures: Mapping[str, Figure]) -> str:
    """plotly.js itself, so that the page needs no network, then the figures, then what draws them."""
    from plotly.offline import get_plotlyjs  # an extra: imported only where a page is written

    data = json.dumps(figures, allow_nan=False).replace("<", "\\u003c")  # a name may hold </script>
    shown = f"<script type='application/json' id=figures>{data}</script>"
    return f"<script>{get_plotlyjs()}</script>{shown}<script>{_file('report.js')}</script>"


def _file(name: str) -> str:
    return files("collage_neuron.cli").joinpath(name).read_text(encoding="utf-8")
