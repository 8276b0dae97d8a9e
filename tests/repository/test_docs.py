"""The pages in docs/ say what is so: their code runs, and the tests that they name are there."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
from pathlib import Path

import pytest
from models import run_script

import collage_neuron
from collage_neuron.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize(("page", "blocks"), [("checkpoints", 8), ("fp8", 2), ("monitor", 4), ("validation", 3)])
def test_the_code_on_a_page_runs_from_top_to_bottom(page: str, blocks: int, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert len(found) >= blocks
    quiet = f"import os, warnings\nos.chdir({str(tmp_path)!r})\nwarnings.simplefilter('ignore')\n"
    run_script(tmp_path, quiet + "\n".join(found))


def functions_in(path: Path) -> set[str]:
    return {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_tests_that_a_page_names_are_there(page: Path) -> None:
    for file, _, name in re.findall(r"`(tests/[\w/]+\.py)(::(\w+))?`", page.read_text()):
        assert (ROOT / file).exists(), file
        assert not name or name in functions_in(ROOT / file), f"{file}::{name}"


def test_the_reference_has_every_public_name() -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    assert set(re.findall(r"^::: collage_neuron\.(\w+)$", text, flags=re.MULTILINE)) == set(collage_neuron.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_names_of_the_package_on_a_page_are_there(page: Path) -> None:
    for name in re.findall(r"`collage_neuron\.(\w+)[`(]", page.read_text()):
        assert hasattr(collage_neuron, name) or importlib.util.find_spec(f"collage_neuron.{name}"), name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_on_a_page_have_their_options(page: Path) -> None:
    for command, rest in re.findall(r"(?:python -m |^)collage_neuron ([a-z]+)((?: [^\n`#|]+)?)", page.read_text()):
        if command not in COMMANDS:
            continue
        parser = argparse.ArgumentParser()
        importlib.import_module(f"collage_neuron.cli.{command}").add_arguments(parser)
        for option in re.findall(r"(?<=\s)--[a-z][\w-]*", rest.split(" -- ")[0]):
            assert option in parser._option_string_actions, f"{command} {option}"


def test_the_page_about_integrations_names_a_test_in_every_row() -> None:
    section = (ROOT / "docs" / "integrations.md").read_text().split("## What every one needs")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 28  # of two tables, the headings of the second among them
    assert all("| tested by |" in row or re.search(r"`tests/[\w/]+\.py::test_\w+`|the same", row) for row in rows)


def test_the_page_about_checkpoints_names_a_test_in_every_row_of_its_last_table() -> None:
    section = (ROOT / "docs" / "checkpoints.md").read_text().split("## What runs this")[1].split("## Limits")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 20
    assert all(re.search(r"`tests/[\w/]+\.py::test_\w+`", row) for row in rows)


def section(page: str, heading: str) -> str:
    found = re.search(rf"^## {heading}\n(.*?)^## ", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
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
