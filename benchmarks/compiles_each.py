"""A pytest plugin that compiles each optimizer that a test constructs: `python -m pytest -p compiles_each FOLDER`.

It runs the tests of others as they are. An optimizer is compiled when the test first calls a method of it, or runs a
module, or at the end of the test: until then the test may put it into another optimizer, and the outermost one is what
is compiled. What a program has to do itself is done for the test: fp32 gradients that it assigns to bf16 parameters
become bf16, and modules with bf16 weights take and return fp32 values. Optimizers with parameters of other types
(complex numbers, fp16) are left as they are. Nothing is undone when pytest ends: it needs a process of its own.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer

import collage_neuron

TYPES = (torch.bfloat16, torch.float32)


def pytest_collection_finish() -> None:
    """Freezes the objects of libraries and tests, a million, which `compile` would list: as in tests/conftest.py."""
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 0


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CompilesEach().installed())


class CompilesEach:
    """The optimizers that the running test has constructed and not used yet, and the names of those that it used."""

    def __init__(self) -> None:
        self.waiting: list[Optimizer] = []
        self.compiled: list[str] = []
        self.error: Exception | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        """An error of `compile` fails the test even where the test expects some error."""
        self.compiled, self.error = [], None
        try:
            result = yield
            self.compile_all()
            if self.error is not None:
                raise self.error
            return result
        finally:
            self.waiting = []
            pyfuncitem.user_properties.append(("compiled", " ".join(self.compiled)))

    def installed(self) -> CompilesEach:
        """Follows all optimizers from now on."""

        def new(cls: type[Optimizer], *_: Any, **__: Any) -> Optimizer:
            one = object.__new__(cls)
            if not issubclass(cls, collage_neuron.Compiled):
                self.waiting.append(one)
            return one

        def get(one: Optimizer, name: str) -> Any:
            if self.waiting and name[0] != "_" and self._uses(one, name):
                self.compile(_outermost(one, self.waiting))
            return object.__getattribute__(one, name)

        # Of all classes, as a suite that runs unmodified makes them: there is no other way in.
        Optimizer.__new__, Optimizer.__getattribute__ = new, get  # type: ignore[assignment, method-assign]
        Tensor.__setattr__ = _set_narrow  # type: ignore[assignment]  # likewise
        register_module_forward_pre_hook(self._before_forward)  # type: ignore[arg-type]  # it may return arguments
        register_module_forward_hook(_widened)
        return self

    def _uses(self, one: Optimizer, name: str) -> bool:
        """Whether the test, and not another optimizer, asks for a method of an optimizer that waits."""
        caller = sys._getframe(2).f_locals.get("self")
        method = callable(getattr(type(one), name, None))
        return method and not isinstance(caller, Optimizer) and any(other is one for other in self.waiting)

    def compile(self, one: Optimizer) -> None:
        """Compiles an optimizer, if it has been constructed; those inside it go with it."""
        self.waiting = [o for o in self.waiting if _outermost(o, self.waiting) is not one]
        name = type(one).__name__
        if not _fits(one):
            return
        try:
            collage_neuron.compile(one, verbose=False)
        except Exception as error:
            self.error = error
            raise
        self.compiled.append(name)

    def compile_all(self) -> None:
        while self.waiting:
            self.compile(_outermost(self.waiting[0], self.waiting))

    def _before_forward(self, module: torch.nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not isinstance(sys._getframe(1).f_locals.get("self"), Optimizer):
            self.compile_all()
        own = list(module.parameters(recurse=False))
        if not any(p.dtype == torch.bfloat16 for p in own):
            return None
        for p in own:
            if p.dtype == torch.float32:  # no optimizer has it
                p.data = p.data.bfloat16()
        return tuple(_cast(x, torch.float32, torch.bfloat16) for x in given)


def _outermost(one: Optimizer, among: list[Optimizer]) -> Optimizer:
    """The optimizer that steps `one`, or steps one that does, if any of them does."""
    for other in among:
        if other is not one and any(value is one for value in vars(other).values()):
            return _outermost(other, among)
    return one


def _fits(one: Optimizer) -> bool:
    """Whether its construction came to an end, with parameters of the types that can be compiled, and no other."""
    groups: Any = getattr(one, "param_groups", ())
    params = [p for group in groups for p in group["params"]]
    return bool(params) and hasattr(one, "defaults") and all(p.dtype in TYPES for p in params)


def _cast(value: Any, given: torch.dtype, wanted: torch.dtype) -> Any:
    return value.to(wanted) if isinstance(value, Tensor) and value.dtype == given else value


def _set_narrow(tensor: Tensor, name: str, value: Any) -> None:
    if name == "grad" and tensor.dtype == torch.bfloat16:
        value = _cast(value, torch.float32, torch.bfloat16)
    object.__setattr__(tensor, name, value)


def _widened(module: torch.nn.Module, given: Any, result: Any) -> Any:
    """A module with weights of its own returns fp32 values, as its input was."""
    return _cast(result, torch.bfloat16, torch.float32) if list(module.parameters(recurse=False)) else None
