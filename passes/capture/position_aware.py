"""Finds code that might treat a parameter by its position, its neighbours or its identity, from its source.

Given: `for i, p in enumerate(group["params"]): k = 4.0 if self.t > 10 and i == 0 else 1.0; ...`
Result: `enumerate` is among the signs, so every step has to be compared with a joint recording

A branch that is not taken yet shows in no recording. Code without any sign goes through each group's parameters once,
finds state by `self.state[p]`, and carries no variable from one parameter to the next. A sign where nothing depends on
it costs time only; so code whose source cannot be read has one.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch.optim import Optimizer

from collage_neuron.passes.capture.code_names import names_of
from collage_neuron.passes.capture.reach import Reach
from collage_neuron.torch_privates import unhooked_step

_FUNCTIONS = frozenset(
    {"enumerate", "range", "len", "zip", "id", "hash", "iter", "next", "reversed", "sorted", "sum", "count", "index",
     "itertools", "builtins", "getitem", "setattr", "globals", "vars", "locals", "eval", "exec"}
)  # fmt: skip
"""Names of functions and modules that count, number, order or look up."""
_METHODS = frozenset(
    {"index", "count", "append", "appendleft", "extend", "insert", "pop", "popleft", "send", "setdefault", "itertools",
     "__dict__", "__setattr__", "__next__", "__iter__", "__hash__", "__len__"}
)  # fmt: skip
"""The same of methods and attributes; tensors have none of them."""
_COLLECTING = frozenset({"add", "update", "remove", "discard", "clear"})
"""Methods of tensors too, but these return what they compute; a call whose result is not used changes a collection."""
_HARMLESS = frozenset({"grad", "data"})
"""Attributes of a parameter that code may set."""
Loops = tuple[ast.AST, ...]


def signs(base: type[Optimizer], optimizer: Optimizer) -> list[str]:
    """The signs in the code that `step` can reach, as short texts; empty if it treats parameters independently."""
    step = inspect.unwrap(unhooked_step(base))
    reach = Reach(base, optimizer, {})
    functions = [x for x in reach.seen.values() if isinstance(x, FunctionType) and not reach.is_of_library(_module(x))]
    called = reached(step, functions)
    if step not in functions and not _is_torchs(_module(step)):
        return ["a step of unknown origin"]
    found = [sign for x in called for sign in _signs_in(x.__code__, x.__code__ is step.__code__)]
    uses = [use for use in found if use in ("params", "param_groups")]
    twice = [f"{name!r} more than once" for name in dict.fromkeys(uses) if uses.count(name) > 1]
    return [sign for sign in found if sign not in uses] + twice


def is_of_torch(base: type[Optimizer]) -> bool:
    """Returns True for a class of torch.optim with torch's own step, which treats parameters independently."""
    step, modules = unhooked_step(base), {base.__module__}
    while step is not None:  # through torch's decorators, and anyone else's
        modules.add(_module(step))
        step = getattr(step, "__wrapped__", None)
    return all(map(_is_torchs, modules))


def _is_torchs(module: str) -> bool:
    return f"{module}.".startswith(("torch.optim.", "torch.utils."))


def _module(function: Any) -> str:
    """The module in which a function was written; `functools.wraps` changes its `__module__`."""
    names: dict[str, Any] = getattr(function, "__globals__", {})
    return str(names.get("__name__"))


def reached(step: Any, functions: list[FunctionType]) -> list[FunctionType]:
    """The functions that `step` may call: those whose names the code uses, and those called without a name."""
    names = {"step", "__call__", "<lambda>", "__next__", "__iter__", "__getitem__", "__getattr__", "__missing__"}
    names |= names_of(step.__code__)
    reached: list[FunctionType] = []
    while new := [x for x in functions if x.__code__.co_name in names and x not in reached]:
        reached += new
        names |= {name for x in new for name in names_of(x.__code__)}
        names |= {text for x in new for text in x.__code__.co_consts if isinstance(text, str)}  # for getattr
    return reached


@lru_cache(4096)
def _signs_in(code: CodeType, is_step: bool) -> tuple[str, ...]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, TypeError, SyntaxError, ValueError):
        return (f"no source of {code.co_name}",)
    return tuple(_Scan(tree, is_step).found())


class _Scan:
    """The syntax of one function, with the loops around each node."""

    def __init__(self, tree: ast.AST, is_step: bool) -> None:
        self._is_step = is_step
        self._nodes: list[tuple[ast.AST, Loops]] = []
        self._stored: dict[str, set[Loops]] = {}
        """Where each variable gets a value; an argument of a lambda is a variable of its own."""
        self._state_names: dict[str, bool] = {}
        self._iterated: set[int] = set()
        self._entered: set[int] = set()
        self._groups: dict[str, Loops] = {}
        """Names of groups, and the loops in which each is the current one."""
        self._walk(tree, ())

    def _walk(self, node: ast.AST, loops: Loops) -> None:
        self._nodes.append((node, loops))
        self._note(node, loops)
        for name, field in ast.iter_fields(node):
            inside = isinstance(node, (ast.For, ast.While)) and name != "iter"
            if name in ("annotation", "returns") or (isinstance(node, ast.Lambda) and name == "args"):
                continue
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST):
                    self._walk(child, (*loops, node) if inside else loops)

    def _note(self, node: ast.AST, loops: Loops) -> None:
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
                self._stored.setdefault(name, set()).add(loops)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._note_states(target, value)
            case ast.For(iter=ast.Subscript(slice=used)):
                self._iterated.add(id(used))
            case ast.For(iter=ast.Call(func=ast.Name(id="filter"), args=[_, ast.Subscript(slice=used)])):
                self._iterated.add(id(used))
            case ast.For(target=target, iter=used):
                self._iterated.add(id(used))
                if isinstance(target, ast.Name) and isinstance(used, ast.Attribute) and used.attr == "param_groups":
                    self._groups[target.id] = (*loops, node)
            case ast.Subscript(value=used) if _is_entry_of_state(node):
                self._entered.add(id(used))

    def _note_states(self, target: ast.AST, value: ast.AST) -> None:
        """Notes which variables are assigned; of a tuple with a starred part, those after it."""
        if isinstance(target, ast.Name):
            self._state_names[target.id] = self._state_names.get(target.id, True) and _is_entry_of_state(value)
        elif isinstance(target, ast.Tuple):
            values: list[ast.AST] = list(value.elts) if isinstance(value, ast.Tuple) else []
            starred = [i for i, x in enumerate(values) if isinstance(x, ast.Starred)]
            known = values[starred[-1] + 1 :] if starred else values
            padded: list[ast.AST] = [ast.Pass()] * (len(target.elts) - len(known)) + known
            for part, x in zip(target.elts, padded, strict=False):
                self._note_states(part, x)

    def found(self) -> Iterator[str]:
        """The signs; `params` and `param_groups` are listed for each use."""
        yield from (f"{name} of two loops" for name, places in self._stored.items() if len(places) > 1)
        allowed = {
            id(node.func) for node, _ in self._nodes if isinstance(node, ast.Call) and self._is_about_a_state(node)
        }
        for node, loops in self._nodes:
            if id(node) not in allowed:
                yield from self._of(node, loops)

    def _of(self, node: ast.AST, loops: Loops) -> Iterator[str]:
        yield from _of_name(node)
        yield from self._of_all(node)
        yield from _of_choice(node)
        if loops or not self._is_step:  # what step() assigns outside of loops, it assigns once
            yield from self._of_assignment(node, loops)

    def _of_all(self, node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Attribute(attr="param_groups"):
                yield "param_groups" if id(node) in self._iterated else "all groups"
            case ast.Attribute(attr="state") if id(node) not in self._entered:
                yield "all states"
            case ast.Constant(value="params"):
                yield "params" if id(node) in self._iterated else "a list of the parameters"

    def _of_assignment(self, node: ast.AST, loops: Loops) -> Iterator[str]:
        match node:
            case ast.Attribute(attr=name, ctx=ast.Store()) if name not in _HARMLESS:
                yield f"an assignment to .{name}"
            case ast.Subscript(ctx=ast.Store(), value=kept) if not self._is_own(kept, loops):
                yield "an assignment to an entry"
            case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name, value=kept))) if name in _COLLECTING:
                if not self._is_state(kept):
                    yield name

    def _is_about_a_state(self, node: ast.AST) -> bool:
        """Returns True for `len(state)` and `state.setdefault(...)`, where `state` can only be that of a parameter."""
        match node:
            case ast.Call(func=ast.Name(id="len"), args=[kept]):
                return self._is_state(kept)
            case ast.Call(func=ast.Attribute(attr="setdefault" | "pop", value=kept), args=[ast.Constant(), *_]):
                return self._is_state(kept)
        return False

    def _is_state(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return self._state_names.get(node.id, False) and len(self._stored.get(node.id, ())) == 1
        return _is_entry_of_state(node)

    def _is_own(self, node: ast.AST, loops: Loops) -> bool:
        """Returns True for a state, and in the loop over the groups for the group."""
        return self._is_state(node) or (isinstance(node, ast.Name) and self._groups.get(node.id) == loops)


def _is_entry_of_state(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(value=ast.Attribute(attr="state"), slice=ast.Name()):
            return True
    return False


def _of_name(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name) if name in _FUNCTIONS:
            yield name
        case ast.Attribute(attr=name) if name in _METHODS:
            yield name
        case ast.Global() | ast.Nonlocal():
            yield "global or nonlocal"


def _of_choice(node: ast.AST) -> Iterator[str]:
    """The sign of a comparison, or of an entry or attribute that is looked up under something computed."""
    match node:
        case ast.Compare(left=left, ops=ops, comparators=[*others]):
            yield from _of_comparison(left, ops, others)
        case ast.Subscript(ctx=ast.Load(), slice=ast.Name(id=key)) if not _is_entry_of_state(node):
            yield f"an entry of {key}"
        case ast.Call(func=ast.Attribute(attr="get"), args=[key, *_]) if not isinstance(key, ast.Constant):
            yield "get"
        case ast.Call(func=ast.Name(id="getattr"), args=[_, key, *_]) if not isinstance(key, ast.Constant):
            yield "getattr"


def _of_comparison(left: ast.AST, ops: list[ast.cmpop], others: list[ast.expr]) -> Iterator[str]:
    """The sign of an identity that is not one with None, and of a search for something that has no name."""
    for x, op, y in zip((left, *others), ops, others, strict=False):
        if isinstance(op, (ast.Is, ast.IsNot)) and not any(isinstance(z, ast.Constant) for z in (x, y)):
            yield "is"
        if isinstance(op, (ast.In, ast.NotIn)) and not isinstance(x, ast.Constant):
            yield "in"
