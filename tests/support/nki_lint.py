"""A lint for kernel files: the subset of Python that they may use, and where a file leaves it.

NKI 0.6 parses a kernel's source, 0.7 traces it, the older `neuronxcc.nki` traces it once with symbolic loop variables.
The subset is what all of them are documented to accept, narrowed to what generated kernels use: instructions of
`nki.isa`, allocations, access patterns, static loops. Sources: the NKI language guide and migration guide of SDK 2.32.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

INSTRUCTIONS = frozenset(
    {
        "dma_copy", "tensor_copy", "memset", "tensor_tensor", "tensor_scalar", "scalar_tensor_tensor", "activation",
        "reciprocal", "tensor_copy_predicated", "tensor_reduce", "rng", "set_rng_seed",
    }
)  # fmt: skip
OLD_ENGINES = frozenset({"vector_engine", "scalar_engine", "gpsimd_engine", "unknown_engine"})

OPERATORS = frozenset(
    {
        "add", "subtract", "multiply", "maximum", "minimum", "power", "equal", "not_equal", "less", "less_equal",
        "greater", "greater_equal", "logical_and", "logical_or", "bitwise_and", "bitwise_xor", "right_shift", "abs",
        "square", "relu", "copy", "sign", "exp", "log", "sqrt", "rsqrt", "reciprocal",
    }
)  # fmt: skip
TOKENS = frozenset(
    {
        "float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "int8", "int16", "int32", "uint8", "uint16",
        "uint32", "sbuf", "psum", "private_hbm", "shared_hbm",
    }
) | OPERATORS  # fmt: skip
"""Names of `nki.language` that are values."""

BUILTINS = frozenset({"range", "min", "max", "len", "int", "float"})


@dataclass(frozen=True)
class Dialect:
    """The functions, methods and loops of one dialect of NKI."""

    imports: frozenset[str]
    functions: frozenset[str]
    """Functions of `nki.language` that may be called."""
    isa: frozenset[str]
    methods: frozenset[str]
    """Methods of tensors."""
    loops: frozenset[str]
    """Functions over whose result a `for` may iterate."""
    forbidden: frozenset[str]
    """Arguments that its instructions do not have, or no longer have."""
    compiled: frozenset[str] = frozenset()
    """Functions that take the body of a loop as a function inside a function."""


DIALECTS = {
    "nki": Dialect(
        frozenset({"import nki", "import nki.isa as nisa", "import nki.language as nl"}),
        frozenset({"ndarray", "fori_loop", "program_id", "num_programs"}),
        INSTRUCTIONS | {"engine"},
        frozenset({"ap", "reshape", "view"}),
        frozenset({"range"}),
        frozenset({"mask", "dtype"}),
        frozenset({"nl.fori_loop"}),
    ),
    "beta1": Dialect(
        frozenset(
            {
                "from neuronxcc import nki", "import neuronxcc.nki as nki", "import neuronxcc.nki.isa as nisa",
                "import neuronxcc.nki.language as nl", "import neuronxcc.nki.typing as nt",
            }
        ),
        frozenset({"ndarray", "load", "store", "arange", "par_dim", "rand", "random_seed", "affine_range"}),
        INSTRUCTIONS - {"rng", "set_rng_seed"} | OLD_ENGINES,
        frozenset({"reshape", "view"}),
        frozenset({"nl.affine_range"}),
        frozenset({"mask"}),
    ),
}  # fmt: skip

STRUCTURE = (
    ast.Module, ast.FunctionDef, ast.arguments, ast.arg, ast.Return, ast.Assign, ast.For, ast.If, ast.Expr, ast.Pass,
    ast.Assert, ast.Import, ast.ImportFrom, ast.alias,
)  # fmt: skip
EXPRESSIONS = (
    ast.Call, ast.keyword, ast.Attribute, ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp,
    ast.IfExp, ast.Subscript, ast.Slice, ast.Tuple, ast.List, ast.expr_context, ast.boolop, ast.unaryop,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Pow,
)  # fmt: skip
"""Nodes that a kernel may have; all others are rejected by name."""


class Finding(NamedTuple):
    """A place where a file leaves the subset."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


@dataclass(frozen=True)
class Context:
    """What rules need to know about the file: its dialect and its functions."""

    dialect: Dialect
    functions: dict[str, ast.FunctionDef]

    @property
    def kernels(self) -> list[ast.FunctionDef]:
        """Functions with a decorator."""
        return [f for f in self.functions.values() if f.decorator_list]


Rule = Callable[[ast.AST, Context], Iterator[str]]


def lint(text: str, file: str, dialect: str = "nki") -> list[Finding]:
    """The places where the kernel file `text` leaves the subset of `dialect` (nki or beta1), by line.

    Raises:
        SyntaxError: `text` is not Python.
    """
    tree = ast.parse(text, file)
    functions = {f.name: f for f in tree.body if isinstance(f, ast.FunctionDef)}
    context = Context(DIALECTS[dialect], functions)
    found = [
        Finding(file, getattr(node, "lineno", 1), message)
        for node in _numbered(tree)
        for rule in RULES
        for message in rule(node, context)
    ]
    return sorted(set(found), key=lambda f: f.line)


def _numbered(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes; an operator has the line of the expression it is in."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            if not hasattr(child, "lineno") and hasattr(node, "lineno"):
                child.lineno = node.lineno  # type: ignore[attr-defined]
        yield node


def _syntax(node: ast.AST, _: Context) -> Iterator[str]:
    if not isinstance(node, STRUCTURE + EXPRESSIONS):
        yield f"{type(node).__name__} is not in the subset"


def _module(node: ast.AST, context: Context) -> Iterator[str]:
    """A kernel is a pure function of its arguments: a file has imports, constants and functions."""
    if not isinstance(node, ast.Module):
        return
    for statement in node.body:
        constant = isinstance(statement, ast.Assign) and _is_constant(statement.value)
        docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not (constant or docstring or isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef))):
            yield f"line {statement.lineno}: a kernel file has imports, constants and functions"
    if ast.get_docstring(node) is None:
        yield "a kernel file starts with a docstring"
    if len(context.kernels) != 1:
        yield f"a kernel file has one function decorated with nki.jit, not {len(context.kernels)}"


def _imports(node: ast.AST, context: Context) -> Iterator[str]:
    if isinstance(node, (ast.Import, ast.ImportFrom)) and ast.unparse(node) not in context.dialect.imports:
        yield f"`{ast.unparse(node)}`: a kernel file imports {'; '.join(sorted(context.dialect.imports))}"


def _signature(node: ast.AST, context: Context) -> Iterator[str]:
    if not isinstance(node, ast.FunctionDef):
        return
    a = node.args
    if a.kwonlyargs or a.posonlyargs or a.vararg or a.kwarg:
        yield f"{node.name}: `*`, `/`, *args and **kwargs are not in the subset"
    if any(not _is_constant(d) for d in [*a.defaults, *a.kw_defaults] if d is not None):
        yield f"{node.name}: a default must be a number, a string, None or a tuple of such"
    inside = [x for statement in node.body for x in ast.walk(statement) if isinstance(x, ast.FunctionDef)]
    if any(x.name not in _bodies(node, context) for x in inside):
        yield f"{node.name}: a function inside a function is not in the subset, except as the body of a compiled loop"
    if any(isinstance(x, ast.Return) for function in inside for x in ast.walk(function)):
        yield f"{node.name}: the body of a compiled loop returns nothing"


def _bodies(node: ast.AST, context: Context) -> set[str]:
    """The names of functions that are bodies of compiled loops."""
    calls = (x for x in ast.walk(node) if isinstance(x, ast.Call) and ast.unparse(x.func) in context.dialect.compiled)
    return {x.id for call in calls for x in call.args if isinstance(x, ast.Name)}


def _kernel(node: ast.AST, context: Context) -> Iterator[str]:
    if not isinstance(node, ast.FunctionDef) or node not in context.kernels:
        return
    if [ast.unparse(d) for d in node.decorator_list] != ["nki.jit"]:
        yield f"{node.name}: a kernel has one decorator, @nki.jit without arguments"
    last = node.body[-1]
    if not isinstance(last, ast.Return) or last.value is None:
        yield f"{node.name}: a kernel ends with `return`, of the tensors it wrote"


def _names(node: ast.AST, context: Context) -> Iterator[str]:
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return
    known = {"nisa": context.dialect.isa, "nl": TOKENS | context.dialect.functions, "nki": {"jit"}}
    if node.value.id in known and node.attr not in known[node.value.id]:
        yield f"{node.value.id}.{node.attr} is not in the subset, or not in this dialect"


def _calls(node: ast.AST, context: Context) -> Iterator[str]:
    if not isinstance(node, ast.Call):
        return
    callee = ast.unparse(node.func)
    if isinstance(node.func, ast.Name):
        if callee not in context.functions and callee not in BUILTINS:
            yield f"{callee}(...) is neither a function of this file nor one of {', '.join(sorted(BUILTINS))}"
        elif callee in context.functions and context.functions[callee].decorator_list:
            yield f"{callee} is a kernel: only the top function is decorated, and it is not called"
    elif callee.startswith("nl.") and callee[3:] in TOKENS:
        yield f"{callee}(...) on tiles is several instructions or one, undocumented which: use nki.isa"
    elif not callee.startswith(("nl.", "nisa.")) and callee.rpartition(".")[2] not in context.dialect.methods:
        yield f"{callee}(...) is not a tensor method of the subset"


def _instructions(node: ast.AST, context: Context) -> Iterator[str]:
    if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("nisa."):
        return
    name = ast.unparse(node.func)
    given = {k.arg: k.value for k in node.keywords}
    for argument in sorted(context.dialect.forbidden & given.keys()):
        yield f"{name} has no argument {argument} in this dialect"
    if node.args or None in given:
        yield f"{name}: arguments are given by name, since their order differs between dialects"
    engine = ast.unparse(given["engine"]) if "engine" in given else "nisa.engine.unknown"
    if not engine.startswith("nisa.engine.") and engine.removeprefix("nisa.") not in OLD_ENGINES:
        yield f"{name}: engine must be a member of nisa.engine, got {engine}"


def _allocations(node: ast.AST, _: Context) -> Iterator[str]:
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != "nl.ndarray":
        return
    given = {k.arg: ast.unparse(k.value) for k in node.keywords}
    if "dtype" not in given:
        yield "nl.ndarray: the dtype of a tile is its rounding; give it by name"
    if not given.get("buffer", "").startswith("nl."):
        yield "nl.ndarray: give buffer=, one of nl.sbuf, nl.psum, nl.shared_hbm, nl.private_hbm"


def _loops(node: ast.AST, context: Context) -> Iterator[str]:
    if not isinstance(node, ast.For):
        return
    over = ast.unparse(node.iter.func) if isinstance(node.iter, ast.Call) else ast.unparse(node.iter)
    if over not in context.dialect.loops:
        yield f"a loop goes over {' or '.join(sorted(context.dialect.loops))}, not over {over}"
    if node.orelse:
        yield "`else` of a loop is not in the subset"


def _assignments(node: ast.AST, context: Context) -> Iterator[str]:
    if not isinstance(node, ast.Assign):
        return
    targets = [x for t in node.targets for x in (t.elts if isinstance(t, ast.Tuple) else [t])]
    if "ap" in context.dialect.methods and any(not isinstance(t, ast.Name) for t in targets):
        yield "a tensor is written by instructions of nki.isa only, not by assignment"


RULES: tuple[Rule, ...] = (
    _syntax, _module, _imports, _signature, _kernel, _names, _calls, _instructions, _allocations, _loops, _assignments,
)  # fmt: skip


def _is_constant(node: ast.AST) -> bool:
    """A number, string or None, or a tuple or sum of such, known before the kernel is built."""
    if isinstance(node, ast.Tuple):
        return all(_is_constant(x) for x in node.elts)
    if isinstance(node, ast.BinOp):
        return _is_constant(node.left) and _is_constant(node.right)
    return isinstance(node, ast.Constant) or (isinstance(node, ast.UnaryOp) and _is_constant(node.operand))
