"""The site: what lies in its menu, lines of code that fit, and what its hooks do to a page.

`make docs` builds it; widths of tables were looked at in Chromium at 1400, 820 and 390 pixels.
"""

from __future__ import annotations

import importlib
import re
import sys
import types
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAV = (ROOT / "mkdocs.yml").read_text()
COLUMNS = 122
"""Letters of a line of code that a window of 1400 pixels shows."""


def guide() -> dict[str, str]:
    """The pages of the menu's first tab."""
    names = re.findall(r"- ([\w/]+\.md)$", NAV.split("- Evidence and")[0], re.MULTILINE)
    return {name: (ROOT / ("README.md" if name == "index.md" else f"docs/{name}")).read_text() for name in names}


def test_a_line_of_code_is_not_cut_off() -> None:
    for page, text in guide().items():
        for block in re.findall(r"^ *```\w*\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
            assert max(map(len, block.splitlines())) <= COLUMNS, page


def test_numbers_stay_whole_and_names_of_files_break_behind_a_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser breaks a number at its hyphen."""
    for name in ("mkdocs", "mkdocs.exceptions", "mkdocs.structure", "mkdocs.structure.files"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(PluginError=Exception, File=object))
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    hooks = importlib.import_module("site_hooks")
    given = "<p>1e-6 of <code>x/y 1e-5</code></p><td><code>tests/a/b.py::c</code> 4.1e-5</td><pre>1e-3</pre>"
    assert hooks.on_page_content(given, None, None, None) == (
        '<p><span class="number">1e-6</span> of <code>x/y 1e-5</code></p>'
        '<td><code>tests/<wbr>a/<wbr>b.py::<wbr>c</code> <span class="number">4.1e-5</span></td><pre>1e-3</pre>'
    )


def test_every_page_is_in_the_menu_under_its_own_title() -> None:
    assert not re.findall(r"- [^\n:]+: \S+\.md$", NAV.split("\nnav:")[1], re.MULTILINE)
    assert all(text.startswith("# ") for text in guide().values())
    named = set(re.findall(r"- ([\w/]+\.md)$", NAV, re.MULTILINE))
    assert {str(p.relative_to(ROOT / "docs")) for p in (ROOT / "docs").rglob("*.md")} <= named
