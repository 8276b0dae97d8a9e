"""The site: what of a page would be cut off at 1400 pixels, as far as that can be computed without a browser.

Widths are those of mkdocs-material (a rem of 20 pixels; letters of a monospaced font .6 of its size) and docs/site.css.
"""

from __future__ import annotations

import importlib
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSS = (ROOT / "docs" / "site.css").read_text()
REM = 20
MARGINS = 2 * 1.2 * REM
"""Of the text beside the menus."""


def guide() -> dict[str, str]:
    """The pages of the menu's first tab."""
    names = re.findall(r"- ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text().split("- Evidence and")[0], re.MULTILINE)
    return {name: (ROOT / ("README.md" if name == "index.md" else f"docs/{name}")).read_text() for name in names}


def rule(selector: str, name: str) -> float:
    """A length of docs/site.css, in its unit."""
    block = re.search(rf"{re.escape(selector)} \{{([^}}]*)\}}", CSS)
    assert block is not None, selector
    found = re.search(rf"\b{name}: ([\d.]+)", block[1])
    assert found is not None, name
    return float(found[1])


def room(width: int) -> float:
    """Pixels between the two menus of a window, which is no wider than the grid."""
    return min(width, rule(".md-grid", "max-width") * REM) - 2 * rule(".md-sidebar", "width") * REM - MARGINS


def columns(width: int) -> int:
    """Letters of code in a line, beside its padding."""
    size = rule(".md-typeset pre > code", "font-size") * REM
    return int((room(width) - 2 * 1.18 * size) / (0.6 * size))


def code(text: str) -> Iterator[str]:
    for block in re.findall(r"^ *```\w*\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
        yield from block.splitlines()


def tables(text: str) -> Iterator[list[list[str]]]:
    for block in re.findall(r"(?:^\|.*\n)+", re.sub(r"^ *```.*?^ *```$", "", text, flags=re.M | re.S), re.MULTILINE):
        yield [re.split(r"(?<!\\)\|", line.strip()[1:-1]) for line in block.splitlines() if set(line) - set("|-: ")]


def widest(cell: str) -> float:
    """Pixels of the longest part of a cell that is not broken, at 12.8 pixels, of which a letter takes half."""
    shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell)
    parts = re.split(r"[\s\-]+", shown.replace("`", ""))
    return max(map(len, parts)) * 12.8 * 0.51


def test_a_line_of_code_is_not_cut_off() -> None:
    assert columns(1400) >= 118
    for page, text in guide().items():
        long = [line for line in code(text) if len(line) > columns(1400)]
        assert not long, f"{page}: {long[0]}"


def test_a_table_is_not_cut_off() -> None:
    padding = 2 * rule(".md-typeset table:not([class]) td", "padding-inline") * 12.8
    for page, text in guide().items():
        for rows in tables(text):
            count = max(map(len, rows))
            cells = ([row[i] for row in rows if i < len(row)] for i in range(count))
            width = sum(max(map(widest, column)) + padding for column in cells)
            assert width <= room(1400), f"{page}: {width:.0f} pixels, {rows[0]}"


def test_numbers_stay_whole_and_names_of_files_break_behind_a_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser breaks a number at its hyphen; what it shows was looked at in Chromium at 1400, 820 and 390 pixels."""
    for name in ("mkdocs", "mkdocs.exceptions", "mkdocs.structure", "mkdocs.structure.files"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(PluginError=Exception, File=object))
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    hooks = importlib.import_module("site_hooks")
    given = "<p>1e-6 of <code>x/y 1e-5</code></p><td><code>tests/a/b.py::c</code> 4.1e-5</td><pre>1e-3</pre>"
    assert hooks.on_page_content(given, None, None, None) == (
        '<p><span class="number">1e-6</span> of <code>x/y 1e-5</code></p>'
        '<td><code>tests/<wbr>a/<wbr>b.py::<wbr>c</code> <span class="number">4.1e-5</span></td><pre>1e-3</pre>'
    )
    assert "white-space: nowrap" in CSS[CSS.index(".number") :]


def test_a_figure_is_no_white_box_in_the_dark_scheme() -> None:
    dark = CSS[CSS.index('[data-md-color-scheme="slate"] .md-typeset img[src$=".svg"]') :]
    assert "invert(1)" in dark.split("}")[0]
    assert "mix-blend-mode: screen" in dark.split("}")[0]


def test_on_a_telephone_wide_tables_scroll() -> None:
    narrow = CSS[CSS.index("@media screen and (max-width: 44.9375em)") :]
    assert re.search(r"table.*:has\(th:nth-child\(5\)\) \{\s*min-width", narrow)


def test_what_is_too_wide_is_noticed() -> None:
    assert columns(1400) < 140
    assert widest("`" + "x" * 140 + "`") > room(1400)
    assert room(1000) < room(1400) <= room(1600)


def test_pages_are_called_in_the_menu_what_they_are_called_on_top() -> None:
    """No entry has a title of its own."""
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    assert not re.findall(r"- [^\n:]+: \S+\.md$", nav, re.MULTILINE)
    assert all(text.startswith("# ") for text in guide().values())


def test_every_page_is_in_the_menu() -> None:
    named = set(re.findall(r"- ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    found = {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")}
    assert found <= named


@pytest.mark.parametrize("feature", ["navigation.footer", "navigation.tabs", "content.code.copy"])
def test_previous_and_next_page_tabs_and_copying(feature: str) -> None:
    assert feature in (ROOT / "mkdocs.yml").read_text()
