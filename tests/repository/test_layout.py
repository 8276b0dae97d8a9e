"""One direction of imports: every module has a rank, and imports lower ones; nothing far away is needed to load it."""

import ast
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from own_modules import PACKAGE, Module, longest_chain, modules

ROOT = Path(__file__).parents[2]

RANKS = (
    ("_version", "errors", "torch_privates", "kernels_nki"),
    ("numerics",),
    ("passes.ir",),
    ("passes.functionalize",),
    ("passes.analysis",),
    ("passes.rewrite",),
    ("passes.backends",),
    ("passes.pipeline", "passes.fp8_scaling"),
    ("settings",),
    ("states",),
    ("runtime",),
    ("validation",),
    ("trace",),
    ("eager",),
    ("optimizer",),
    ("conversion", "matmuls"),
    ("exact", "explanation", "extend", "bookkeeping", "validate"),
    ("checkpoint", "accumulation", "averaging", "monitoring"),
    ("api", "trainers", "collage_neuron"),
    ("cli",),
)
"""From the lowest: files and folders of the package. A module imports from lower ranks, and from its own folder."""

OPEN_TO_PASSES = ("passes", "numerics", "errors", "torch_privates")
"""What the compiler may import: it knows nothing of what users see."""

DEPTH = 12
"""The longest chain of imports between our own modules."""


def place(name: str) -> str:
    return name.removeprefix(f"{PACKAGE}.")


@cache
def part(name: str) -> str:
    """The part of the package that a module belongs to, as RANKS has it."""
    known = [p for rank in RANKS for p in rank if place(name) == p or place(name).startswith(f"{p}.")]
    return max(known, key=len, default="")


@cache
def rank(name: str) -> int:
    if place(name) == "__main__":
        return len(RANKS)
    (found,) = [i for i, parts in enumerate(RANKS) if part(name) in parts] or [-1]
    return found


def without_rank(found: Mapping[str, Module]) -> Iterator[str]:
    yield from (f"{name} has no rank" for name in found if rank(name) < 0 and place(name) != "passes")


def upward(found: Mapping[str, Module]) -> Iterator[str]:
    """Imports of a higher rank, or of an equal one elsewhere; what only a type checker sees may point anywhere."""
    for name, module in found.items():
        for i in module.imports:
            apart = part(i.module) != part(name)
            if not i.for_types and (rank(i.module) > rank(name) or (rank(i.module) == rank(name) and apart)):
                yield f"{name}:{i.line} imports {i.module}, which is not below it"


def out_of_the_compiler(found: Mapping[str, Module]) -> Iterator[str]:
    """Imports by which passes/ knows of what is above it, also of those that only a type checker sees."""
    for name, module in found.items():
        for i in module.imports if place(name).split(".")[0] == "passes" else ():
            if place(i.module).split(".")[0] not in OPEN_TO_PASSES:
                yield f"{name}:{i.line} imports {i.module}, and passes/ knows only {', '.join(OPEN_TO_PASSES)}"


def in_functions(found: Mapping[str, Module]) -> Iterator[str]:
    for name, module in found.items():
        yield from (f"{name}:{i.line} imports {i.module} in a function" for i in module.imports if i.in_function)


BY_NAME = {
    PACKAGE: "torch takes seconds to import, and `--version` needs none of it",
    "cli.main": "a command is loaded when it is given",
    "passes.backends.registry": "a backend is loaded when parameters are on its device",
    "passes.backends.nki.target": "Neuron's own packages, where they are installed",
    "passes.backends.torch_neuron": "TorchNeuron's package, where it is installed",
}
"""Who may import a module that the text does not name, and why."""


def by_name(found: Mapping[str, Module]) -> Iterator[str]:
    """Imports that no other rule here would see."""
    for name, module in found.items():
        for node in ast.walk(module.tree) if place(name) not in BY_NAME else ():
            last = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if isinstance(node, ast.expr) and last in ("import_module", "__import__"):
                yield f"{name}:{node.lineno} imports a module by its name"


def cycles(found: Mapping[str, Module]) -> Iterator[str]:
    try:
        TopologicalSorter({name: module.loads - {name} for name, module in found.items()}).prepare()
    except CycleError as error:
        yield "modules import each other: " + " > ".join(error.args[1])


def too_deep(found: Mapping[str, Module]) -> Iterator[str]:
    chain = longest_chain(found)
    if len(chain) > DEPTH:
        yield f"{len(chain)} modules import one another in a chain: " + " > ".join(chain)


RULES = (without_rank, upward, out_of_the_compiler, in_functions, by_name, cycles, too_deep)


Rule = Callable[[Mapping[str, Module]], Iterator[str]]


@pytest.fixture(scope="module")
def ours() -> dict[str, Module]:
    return modules(ROOT)


@pytest.mark.parametrize("rule", RULES)
def test_every_module_follows(rule: Rule, ours: dict[str, Module]) -> None:
    assert list(rule(ours)) == []


TOP = "collage_neuron passes kernels_nki tests examples benchmarks docs docker"
"""The folders of the top level; files there are of the kinds that a package has."""


def test_nothing_that_a_run_left_behind_is_in_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {x.split("/")[0] for x in listed if "/" in x and x[0] != "."} == set(TOP.split())
    known = {".md", ".toml", ".yml", ".cff", ".in", ""}
    assert [x for x in listed if "/" not in x and x[0] != "." and Path(x).suffix not in known] == []
