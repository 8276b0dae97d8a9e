"""The modules of this project as text: what each is called, and which others it imports, where."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = "collage_neuron"
FOLDERS = {"collage_neuron": PACKAGE, "passes": f"{PACKAGE}.passes", "kernels_nki": f"{PACKAGE}.kernels_nki"}
"""Folders of a checkout, and what they are imported as."""


@dataclass(frozen=True)
class Import:
    """One module that another one imports."""

    module: str
    line: int
    in_function: bool
    for_types: bool
    """Whether only a type checker sees it."""


@dataclass(frozen=True)
class Module:
    """A file of ours."""

    name: str
    path: Path
    tree: ast.Module
    imports: tuple[Import, ...]

    @property
    def loads(self) -> set[str]:
        """The modules that are imported with it."""
        return {i.module for i in self.imports if not (i.in_function or i.for_types)}


def modules(root: Path) -> dict[str, Module]:
    """All modules below the checkout `root`, by name."""
    files = {_name(root, path): path for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))}
    trees = {name: ast.parse(path.read_text()) for name, path in files.items()}
    return {name: Module(name, path, trees[name], _imports(trees[name], files)) for name, path in files.items()}


def _name(root: Path, path: Path) -> str:
    folder, *parts = path.relative_to(root).with_suffix("").parts
    return ".".join([FOLDERS[folder], *(part for part in parts if part != "__init__")])


def _imports(tree: ast.Module, known: dict[str, Path]) -> tuple[Import, ...]:
    return tuple(
        Import(module, node.lineno, in_function, for_types)
        for node, in_function, for_types in _statements(tree, False, False)
        for module in _imported(node, known)
    )


def _statements(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[tuple[ast.stmt, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, in_function, for_types
        typed = for_types or (isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING")
        function = in_function or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _statements(child, function, typed)


def _imported(node: ast.stmt, known: dict[str, Path]) -> Iterator[str]:
    """The modules of ours: `from a import b` imports `a.b` if that is one, else a name of `a`."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            yield from (name for name in (whole if whole in known else node.module,) if name in known)


def longest_chain(found: Mapping[str, Module]) -> list[str]:
    """The longest chain of imports."""
    chains: dict[str, list[str]] = {}
    for name in TopologicalSorter({n: m.loads & found.keys() for n, m in found.items()}).static_order():
        below = [chains[other] for other in found[name].loads & found.keys()]
        chains[name] = [name, *max(below, key=len, default=[])]
    return max(chains.values(), key=len)
