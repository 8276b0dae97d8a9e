"""The page of calls and constructs, docs/development/nki_calls.md, has all that generated kernels use."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from exact import update_of
from kernel_examples import FOLDERS
from kernel_files import FOLDER, KEPT
from nki_runs import search_less, step_of
from torch_cases import CASES

from collage_neuron.passes.backends.nki import chunk_totals
from collage_neuron.passes.backends.nki.hardware import TARGETS
from collage_neuron.passes.backends.nki.lower import lower_to_nki
from collage_neuron.passes.backends.nki.target import Machine
from collage_neuron.passes.ir.update import Update


@pytest.fixture(autouse=True)
def _short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    search_less(monkeypatch, 0)


PYTHON = set(
    re.findall(
        r"\w+",
        """Module FunctionDef arguments arg Return Assign For If Expr Pass Assert Import ImportFrom alias Call keyword
        Attribute Name Constant BinOp UnaryOp Compare BoolOp IfExp Subscript Slice Tuple List Load Store And Or Not
        USub Eq NotEq Lt LtE Gt GtE Add Sub Mult FloorDiv Mod Pow""",
    )
)
"""What both front ends of NKI are documented to take of Python."""


def constructs(text: str) -> set[str]:
    """What a kernel's file uses of the language."""
    tree = ast.parse(text)
    assert {type(node).__name__ for node in ast.walk(tree)} <= PYTHON
    own = {f.name for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)}
    return {name for node in ast.walk(tree) for name in _of(node) if name not in own}


def _of(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        known = "." not in name or name.startswith(("nisa.", "nl."))
        yield name if known else f"tensor.{name.rpartition('.')[2]}"
        given = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if "scalar_offset" in given:
            yield "tensor.ap with scalar_offset"
        if "bias" in given:
            yield "nisa.activation with a bias"
    elif isinstance(node, ast.Subscript) and not ast.unparse(node.value).endswith(".shape"):
        yield from _index(node)
    elif isinstance(node, ast.Assert):
        yield "assert"
    elif isinstance(node, ast.FunctionDef):
        yield from (ast.unparse(d) for d in node.decorator_list)
        yield from ("the body of a compiled loop" for x in ast.walk(node) if x is not node and type(x) is type(node))
    elif isinstance(node, ast.arg) and node.annotation is not None:
        yield ast.unparse(node.annotation)


def _index(node: ast.Subscript) -> Iterator[str]:
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    kind = "slices" if any(isinstance(p, ast.Slice) for p in parts) else "indices"
    if ast.unparse(node.slice) == "...":
        kind = "..."
    if ast.unparse(node.value).startswith("nl.arange"):  # the shape of an index: part of nl.arange
        return
    yield f"tile[{kind}] = instruction" if isinstance(node.ctx, ast.Store) else f"tensor[{kind}]"


def updates() -> Iterator[tuple[Update, dict[str, str]]]:
    """Updates that between them need every instruction."""
    for name, strategy in (
        ("adamw", "plus"), ("adamw", "split433"), ("sgd_momentum", "stochastic"), ("adamax", "plus"), ("rprop", "plus"),
        ("sgd_momentum", {"param": "bf16", "momentum_buffer": "i16q4"}),
    ):  # fmt: skip
        yield step_of(CASES[name], strategy, "fp32").update, {}
    yield step_of(CASES["sgd_momentum"], "plus", "fp32", measured=True).update, {}
    fp32 = {"x": "fp32", "y": "fp32"}
    yield update_of(["x", "y"], lambda x, y: [x / y]), fp32
    yield update_of(["x", "y"], lambda x, y: [torch.where(x > y, x, y * 2.0) + y]), fp32


SOMETIMES = {"nisa.tensor_copy", "nisa.activation with a bias", "tile[...] = instruction"}
"""What a longer search for the best engines takes for some updates."""


def used(dialect: str) -> set[str]:
    texts = [lower_to_nki(u, "trn1", dialect, components=c).source for u, c in updates()]
    texts += [
        (FOLDER / folder / f"{name}.py").read_text()
        for folder in KEPT
        if FOLDERS[folder][1] == dialect
        for name in KEPT[folder]
    ]
    return set().union(*map(constructs, texts))


PAGE = Path(__file__).parents[3] / "docs" / "development" / "nki_calls.md"
HEADINGS = {"nki": "## `import nki`", "beta1": "## `neuronxcc.nki`"}


def rows(heading: str, columns: int) -> list[list[str]]:
    section = PAGE.read_text().partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    found = [line[1:-1].split("|") for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in found if len(row) == columns]


def table(dialect: str) -> dict[str, tuple[set[str], ...]]:
    """Arguments, operators and engines of each call, as the page has them."""
    return {
        row[0].strip("`"): tuple({*re.findall(r"\w+", cell)} for cell in row[1:4])
        for row in rows(HEADINGS[dialect], columns=7)
    }


@pytest.mark.parametrize("dialect", HEADINGS)
def test_the_page_has_a_place_for_each_construct_and_nothing_else(dialect: str) -> None:
    others = {
        row[0].strip("`"): row[1 + list(HEADINGS).index(dialect)] for row in rows("## Everything else", columns=4)
    }
    documented = {f"nisa.{name}" for name in table(dialect)} | {name for name, place in others.items() if place}
    found = used(dialect)
    assert not found - documented
    assert documented - found <= SOMETIMES
    folder = "general/nki/" if dialect == "beta1" else "nki/"
    assert all(re.fullmatch(rf"`{folder}.*\.(py|rst)` [1-9]\d*", place) for place in others.values() if place)


def calls(text: str) -> Iterator[tuple[str, set[str], set[str], set[str]]]:
    """Name, arguments, operators and engines of each instruction of a kernel."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("nisa."):
            given = {str(k.arg): ast.unparse(k.value).rpartition(".")[2] for k in node.keywords}
            operators = {value for key, value in given.items() if key in ("op", "op0", "op1")}
            engines = {given["engine"].removesuffix("_engine")} if "engine" in given else set()
            yield ast.unparse(node.func).removeprefix("nisa."), set(given), operators, engines


def missing(dialect: str, text: str) -> list[str]:
    """What a kernel calls and the page does not have."""
    known = table(dialect)
    return [
        f"{name}: {', '.join(sorted(found - has))}"
        for name, *seen in calls(text)
        for found, has in zip(seen, known.get(name, (set[str](), set[str](), set[str]())), strict=True)
        if found - has
    ]


@pytest.mark.parametrize(("dialect", "target"), [*(("nki", t) for t in TARGETS), ("beta1", "trn1")])
def test_every_call_is_on_the_page(dialect: str, target: str) -> None:
    for update, components in updates():
        assert not missing(dialect, lower_to_nki(update, target, dialect, components=components).source)
    for is_square in (False, True):
        assert not missing(dialect, chunk_totals.kernel_for(is_square, Machine(target, dialect), torch.float32).source)


def test_what_is_not_on_the_page_is_found() -> None:
    text = "nisa.tensor_scalar(dst=x, data=y, op0=nl.rsqrt, operand0=0.0, mask=z, engine=nisa.engine.gpsimd)"
    assert missing("nki", text) == ["tensor_scalar: mask", "tensor_scalar: rsqrt", "tensor_scalar: gpsimd"]
    assert missing("nki", "nisa.iota(dst=x)") == ["iota: dst"]
