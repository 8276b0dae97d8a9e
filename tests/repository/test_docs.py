"""The pages in docs/ say what is so: the tests, files, names and options that they name are there."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import collage_neuron
from collage_neuron.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
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


def test_what_is_too_many_pages_or_words_for_users() -> None:
    """Those in the menu's first tab: at most 22 pages and 30,000 words, README.md among them."""
    pages = re.findall(r"- ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text().split("- Evidence and")[0], re.MULTILINE)
    texts = [(ROOT / ("README.md" if page == "index.md" else f"docs/{page}")).read_text() for page in pages]
    assert 15 <= len(pages) <= 22
    assert sum(len(text.split()) for text in texts) <= 30_000


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
