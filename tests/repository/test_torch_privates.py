"""What is private in torch is used in one folder, and each use is explained."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from own_modules import Module, modules

ROOT = Path(__file__).parents[2]
PRIVATES = "collage_neuron.torch_privates"

NOT_TORCHS = {
    "_replace": "a named tuple's",
    "_make": "a named tuple's",
    "_asdict": "a named tuple's",
    "_fields": "a named tuple's",
    "_getframe": "Python's",
    "_bit_generator": "numpy's",
    "_keep_in_fp32_modules_strict": "transformers'",
}
"""Names that begin with an underscore and are public, or private to others."""

OVERRIDDEN = {("collage_neuron.averaging", "_apply")}
"""What torch calls on a module of ours: overriding it is the only way to answer."""


def reaches_into_torch(module: Module) -> Iterator[str]:
    """Private names in a file that are not its own: attributes, imports, and names given to `getattr` and the like."""
    own = {node.name for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)} | {"self", "cls"}
    for node in ast.walk(module.tree):
        for name in _names(node, own):
            private = name.startswith("_") and not name.startswith(("__", "_collage"))
            if private and name not in NOT_TORCHS and (module.name, name) not in OVERRIDDEN:
                yield f"{module.name}:{getattr(node, 'lineno', 0)} uses {name}"


def _names(node: ast.AST, own: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        base = ast.unparse(node.value)
        if base not in own and base not in ("aten", "torch.ops.aten"):  # operations, whose names users see too
            yield node.attr
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "torch_xla"):
        yield from (node.module or "").split(".")
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.Import):
        yield from (part for alias in node.names for part in alias.name.split("."))
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("getattr", "hasattr", "setattr", ".get")):
        given = (x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str))
        yield from given


@pytest.fixture(scope="module")
def ours() -> dict[str, Module]:
    return modules(ROOT)


def test_no_other_file_reaches_into_torch(ours: dict[str, Module]) -> None:
    others = [module for name, module in ours.items() if not name.startswith(PRIVATES) and "kernels_nki" not in name]
    assert [line for module in others for line in reaches_into_torch(module)] == []


def test_reaching_into_torch_is_noticed_and_other_names_are_not() -> None:
    def is_noticed(line: str) -> bool:
        return bool(list(reaches_into_torch(Module("a", Path("a.py"), ast.parse(line), ()))))

    reaching = "x = t._version", "import torch._dynamo", "from torch_xla import _XLAC", "getattr(p, '_fsdp_flattened')"
    assert all(map(is_noticed, reaching))
    assert not any(map(is_noticed, ("self._x", "op._replace(a=1)", "aten._to_copy.default", "x.__wrapped__")))


def entries(ours: dict[str, Module]) -> Iterator[tuple[str, str]]:
    """Every public function and constant of the folder, with what is said of it."""
    for name, module in ours.items():
        if name.startswith(f"{PRIVATES}."):
            yield from _entries(module.tree)


def _entries(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield node.name, ast.get_docstring(node) or ""
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            said = after.value if isinstance(after, ast.Expr) else None
            if name != "_DDP":
                yield name, str(said.value) if isinstance(said, ast.Constant) else ""


def test_every_use_has_a_reason(ours: dict[str, Module]) -> None:
    assert [name for name, reason in entries(ours) if len(reason) <= 30] == []


def test_every_use_is_used(ours: dict[str, Module]) -> None:
    text = "".join(module.path.read_text() for name, module in ours.items() if not name.startswith(PRIVATES))
    own = "".join(module.path.read_text() for name, module in ours.items() if name.startswith(f"{PRIVATES}."))
    unused = [name for name, _ in entries(ours) if name not in text and own.count(name) < 2]
    assert unused == []
