"""The table of constructs has all that generated kernels use, and nothing else."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import torch
from exact import update_of
from nki_runs import search_less, step_of
from torch_cases import CASES

from collage_neuron.cli.kernels import FOLDER, FOLDERS, KEPT
from collage_neuron.passes.backends.nki.constructs import CONSTRUCTS
from collage_neuron.passes.backends.nki.lower import lower_to_nki
from collage_neuron.passes.ir.update import Update


@pytest.fixture(autouse=True)
def _short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    search_less(monkeypatch, 0)


def constructs(text: str) -> set[str]:
    """What a kernel's file uses of the language."""
    tree = ast.parse(text)
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
        if given.get("op") == "nl.square":
            yield "nisa.activation of square"
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


SOMETIMES = {"nisa.tensor_copy", "nisa.activation of square"}
"""What a longer search for the best engines takes for some updates, and what a target's `squares` would."""


def used(dialect: str) -> set[str]:
    texts = [lower_to_nki(u, "trn1", dialect, components=c).source for u, c in updates()]
    texts += [
        (FOLDER / folder / f"{name}.py").read_text()
        for folder in KEPT
        if FOLDERS[folder][1] == dialect
        for name in KEPT[folder]
    ]
    return set().union(*map(constructs, texts))


@pytest.mark.parametrize("dialect", CONSTRUCTS)
def test_the_table_is_what_kernels_use(dialect: str) -> None:
    found, table = used(dialect), set(CONSTRUCTS[dialect])
    assert not found - table
    assert table - found <= SOMETIMES


@pytest.mark.parametrize("dialect", CONSTRUCTS)
def test_every_source_is_a_place(dialect: str) -> None:
    for source in CONSTRUCTS[dialect].values():
        assert source.line > 0
        assert source.path.endswith((".py", ".rst"))
        assert source.path.startswith("general/nki/" if dialect == "beta1" else "nki/")
