"""The pages in docs/ say what is so: the tests, files, names and options that they name are there."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest

import collage_neuron
from collage_neuron.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
NAV = (ROOT / "mkdocs.yml").read_text()
TEXT = "\n".join(page.read_text() for page in PAGES)


def functions_in(path: Path) -> set[str]:
    return {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}


def test_tests_that_a_page_names_are_there() -> None:
    for file, _, name in re.findall(r"`(tests/[\w/]+\.py)(::(\w+))?`", TEXT):
        assert (ROOT / file).exists(), file
        assert not name or name in functions_in(ROOT / file), f"{file}::{name}"


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    assert set(re.findall(r"^::: collage_neuron\.(\w+)$", text, flags=re.MULTILINE)) == set(collage_neuron.__all__)


def test_the_table_of_the_reference_is_that_of_the_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a plain listing of the page is useful, and each public name has its line."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    made = importlib.import_module("make_reference")
    text = made.PAGE.read_text()
    assert text == made.page(text), "run python docs/make_reference.py"
    rows = re.findall(r"^\| `([\w.]+)[`(].* \| (.+) \|$", text, re.MULTILINE)
    assert {name for name, _ in rows if "." not in name} == set(collage_neuron.__all__) - {"checkpoint"}
    assert {name.removeprefix("checkpoint.") for name, _ in rows if name.startswith("checkpoint.")} == set(
        collage_neuron.checkpoint.__all__
    )
    assert all(said.endswith((".", "...")) for _, said in rows)


def test_names_of_the_package_on_a_page_are_there() -> None:
    for name in re.findall(r"`collage_neuron\.(\w+)[`(]", TEXT):
        assert hasattr(collage_neuron, name) or importlib.util.find_spec(f"collage_neuron.{name}"), name


def test_commands_on_a_page_have_their_options() -> None:
    for command, rest in re.findall(r"(?:python -m |^)collage_neuron ([a-z]+)((?: [^\n`#|]+)?)", TEXT):
        if command not in COMMANDS:
            continue
        parser = argparse.ArgumentParser()
        importlib.import_module(f"collage_neuron.cli.{command}").add_arguments(parser)
        for option in re.findall(r"(?<=\s)--[a-z][\w-]*", rest.split(" -- ")[0]):
            assert option in parser._option_string_actions, f"{command} {option}"


def test_the_page_of_evidence_names_a_test_in_every_row() -> None:
    """And has a row for every place of the line that the page for users has."""
    tables = (ROOT / "docs" / "development" / "evidence.md").read_text().split("### ")[0]
    rows = [line for line in tables.splitlines() if line.startswith("| ") and "tested by |" not in line]
    rows = [row for row in rows if set(row) - set("|- ")]
    assert len(rows) >= 70
    assert all(re.search(r"`tests/[\w/]+\.py(::test_\w+)?`|the same", row) for row in rows)
    places = section("docs/integrations.md", "Where the line goes")
    assert places.count("\n| ") - 1 <= tables.split("| what, before the line")[1].split("## ")[0].count("\n| ")


COLUMNS = 122
"""Letters of a line of code that a window of 1400 pixels shows."""


def guide() -> dict[str, str]:
    """The pages of the menu's first tab."""
    names = re.findall(r"- ([\w/]+\.md)$", NAV.split("- Evidence and")[0], re.MULTILINE)
    return {name: (ROOT / ("README.md" if name == "index.md" else f"docs/{name}")).read_text() for name in names}


def test_what_is_too_many_pages_or_words_for_users() -> None:
    """At most 22 pages and 30,000 words, README.md among them."""
    assert 15 <= len(guide()) <= 22
    assert sum(len(text.split()) for text in guide().values()) <= 30_000


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


ERRORS = {
    name
    for name in collage_neuron.__all__
    if isinstance(kind := getattr(collage_neuron, name), type) and issubclass(kind, (Exception, Warning))
}


def test_every_error_and_warning_has_its_cause_and_cure() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    parts = dict(part.split("\n", 1) for part in text.split("\n### ")[1:])
    assert set(parts) >= ERRORS
    for name in ERRORS:
        assert "* **Cause**:" in parts[name], name
        assert "* **Cure**:" in parts[name], name


def test_messages_that_are_quoted_are_those_of_the_package() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\* `([^`]+)`:", text.split("### ValueError")[1].split("## ")[0], re.MULTILINE)
    sources = "".join(path.read_text() for path in (ROOT / "collage_neuron" / "conversion").glob("*.py"))
    assert len(quoted) >= 3
    assert [words for words in quoted if words not in sources] == []


def section(page: str, heading: str, last: bool = False) -> str:
    end = r"\Z" if last else "^## "
    found = re.search(rf"^## {heading}\n(.*?){end}", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_map_for_contributors_names_files_that_are_there() -> None:
    rows = [line.split(" | ") for line in section("CONTRIBUTING.md", "Where a new thing goes").splitlines()[2:] if line]
    rows = [row for row in rows if row[0].startswith("| ") and row[0] != "| new"]
    assert len(rows) >= 15
    for name, place, example in rows:
        files = re.findall(r"`((?:collage_neuron|passes|tests|docs|examples)/[\w/.]*)", place + example)
        assert files, name
        assert [file for file in files if not (ROOT / file).exists()] == [], name


def test_the_layout_for_contributors_has_the_ranks_that_are_kept() -> None:
    """Those of test_layout.py, in the same order."""
    tree = ast.parse((ROOT / "tests/repository/test_layout.py").read_text())
    (kept,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RANKS"
    )
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", section("CONTRIBUTING.md", "Layout"), flags=re.MULTILINE)
    assert [int(rank) for rank, _ in rows] == list(range(len(kept)))
    assert [set(re.findall(r"`([\w.]+)`", parts)) for _, parts in rows] == [set(rank) for rank in kept]
