"""A stand-in for what this project calls of `torch_neuronx`, over `neuron_device.py` and the stand-in for NKI.

Written from AWS's pages "How to work with NKI kernels" and "Run an NKI kernel" (SDK 2.33). A kernel that is called with
tensors of the device gets their memory; an operator of `nki_op` may change the arguments that it declares, and an
undeclared change is an error here. Evidence level of what runs on it: stand-in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import neuron_device
import nki_standin
import torch
from nki_standin import Device, Machine, dialect_nki
from torch import Tensor
from torch.library import infer_schema
from torch.utils._pytree import tree_flatten

from collage_neuron.passes.backends.nki import custom_op

called: list[str] = []
"""The operators of `nki_op` that ran, by name, since the list was last cleared."""
CACHED = custom_op.function
_made: dict[str, Any] = {}


def nki_op(name: str, fn: Any = None, mutates_args: str | Iterable[str] = ()) -> Any:
    """Registers a function that calls kernels as an operator of torch; as a decorator, too."""
    if fn is None:
        return lambda function: nki_op(name, function, mutates_args)

    @wraps(fn)
    def run(*args: Any) -> Any:
        called.append(name)
        declared = {id(x) for x, n in zip(args, fn.__code__.co_varnames, strict=False) if n in mutates_args
                    for x in tree_flatten(x)[0]}  # fmt: skip
        others = [x for x in tree_flatten(args)[0] if isinstance(x, Tensor) and id(x) not in declared]
        before = [_bytes(x) for x in others]
        result = fn(*args)
        for x, old in zip(others, before, strict=True):
            assert torch.equal(_bytes(x), old), (
                f"{name} changed an argument that is not among mutates_args={set(mutates_args)}"
            )
        return result

    if name not in _made:  # torch keeps operators for the process
        schema = infer_schema(fn, mutates_args=mutates_args)
        _made[name] = torch.library.custom_op(name, run, mutates_args=mutates_args, schema=schema)
    return _made[name]


def _bytes(x: Tensor) -> Tensor:
    there = neuron_device.on_host(x) if neuron_device.is_ours(x) else x
    return there.detach().reshape(-1).clone().view(torch.uint8)


def on_the_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` of the stand-in, also for tensors of the device: a kernel works in their memory, and results are there."""

    def moved(machine: Any, function: Any, args: tuple[Any, ...], *more: Any) -> Any:
        if not any(map(neuron_device.is_ours, args)):
            return run(machine, function, args, *more)
        results = run(machine, function, tuple(map(_there, args)), *more)
        back = tuple(map(neuron_device.on_device, results if isinstance(results, tuple) else (results,)))
        return back if isinstance(results, tuple) else back[0]

    def _there(x: Any) -> Any:
        return neuron_device.on_host(x) if neuron_device.is_ours(x) else x

    return moved


def _module(name: str) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)  # what looks whether it is installed asks for one
    return made


@contextmanager
def install(target: str = "trn2", device: Device | None = None) -> Iterator[Machine]:
    """Inside, this process is on a machine with TorchNeuron: the device, `nki`, and `torch_neuronx`."""
    neuron_device.register()
    top, utils = (_module(name) for name in ("torch_neuronx", "torch_neuronx.utils"))
    utils.get_platform_target = lambda: target  # type: ignore[attr-defined]
    top.utils, top.nki_op = utils, nki_op  # type: ignore[attr-defined]
    dialect: Any = dialect_nki
    run = dialect.run
    with nki_standin.install("nki", target, device or Device(overflow="infinity")) as machine:
        dialect.run = on_the_device(run)
        sys.modules |= {"torch_neuronx": top, "torch_neuronx.utils": utils}
        CACHED.cache_clear()  # a kernel belongs to the NKI it was loaded under
        try:
            yield machine
        finally:
            dialect.run = run
            del sys.modules["torch_neuronx"], sys.modules["torch_neuronx.utils"]
            CACHED.cache_clear()
