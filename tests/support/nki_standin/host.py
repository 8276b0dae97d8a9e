"""Tensors of the host in and out of a kernel: torch tensors on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch

from nki_standin.dtypes import BFLOAT16, DTYPES, Array
from nki_standin.errors import StandinError, require
from nki_standin.machine import Machine
from nki_standin.tensors import MemoryRegion, NkiTensor
from nki_standin.trace import Trace


def run(
    machine: Machine,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mutable: Collection[str] | None = None,
    cores: int = 1,
) -> Any:
    """Runs a kernel on `machine`: inputs it wrote to are written too.

    `mutable` are the inputs it may write, and then must write and return; None: any. With several cores their programs
    run one after the other, in both orders: neither may see which.
    """
    given = inspect.signature(function).bind(*args, **kwargs)
    *others, (bound, result) = (_ran(machine, function, given, mutable, cores, order) for order in (-1, 1)[-cores:])
    results = result if isinstance(result, tuple) else (result,)
    for _, other in others:
        pairs = zip(results, other if isinstance(other, tuple) else (other,), strict=True)
        same = all(np.array_equal(a.bits(), b.bits()) for a, b in pairs)
        require(same, f"{function.__name__}: a result depends on the order in which cores run")
    for name in mutable or ():
        written = bound.arguments[name].storage.stored
        require(written, f"{function.__name__}: input {name} is a mutable_tensor that is never written")
    _write_back(function.__name__, given.arguments, bound.arguments, results)
    out = tuple(map(_to_host, results))
    return out if isinstance(result, tuple) else out[0]


def _ran(
    machine: Machine,
    function: Callable[..., Any],
    given: inspect.BoundArguments,
    mutable: Collection[str] | None,
    cores: int,
    order: int,
) -> tuple[inspect.BoundArguments, Any]:
    """The tensors of the device after the programs of all cores, and what the first core's returned."""
    bound = inspect.signature(function).bind(*given.args, **given.kwargs)
    machine.cores, machine.traces, machine.drawn, machine.trace = cores, [Trace() for _ in range(cores)], [], Trace()
    for name, value in given.arguments.items():
        bound.arguments[name] = _to_device(machine, name, value)
        if mutable is not None and name not in mutable and isinstance(bound.arguments[name], NkiTensor):
            bound.arguments[name].storage.mutable = False
    results = {}
    for core in range(cores)[::order]:
        machine.core, machine.trace, machine.generator = core, machine.traces[core], None
        results[core] = function(*bound.args, **bound.kwargs)
        machine.trace.check_capacity(machine.target)
    turns = [trace.nest.turns for trace in machine.traces]
    require(turns == turns[:1] * cores, f"{function.__name__}: loops have other turns on other cores: {turns}")
    machine.trace, result = machine.traces[0], results[0]
    _check_results(function.__name__, result if isinstance(result, tuple) else (result,))
    return bound, result


def _to_device(machine: Machine, name: str, x: Any) -> Any:
    """A tensor in HBM; other arguments stay what they are, compile-time constants."""
    if isinstance(x, torch.Tensor):
        if x.device.type != "cpu":
            raise StandinError(f"input {name} is on {x.device}; the stand-in takes CPU tensors")
        bits = x.detach().contiguous().view(torch.int16) if x.dtype is torch.bfloat16 else x.detach().contiguous()
        return _in_hbm(machine, name, bits.numpy(), "bfloat16" if x.dtype is torch.bfloat16 else None)
    if x is None or isinstance(x, (bool, int, float, str, tuple)):
        return x
    raise StandinError(f"argument {name} is a {type(x).__name__}; a kernel takes tensors, numbers, strings and tuples")


def _in_hbm(machine: Machine, name: str, x: Array, of: str | None) -> NkiTensor:
    of = of or x.dtype.name
    if of not in DTYPES:
        raise StandinError(f"input {name} is of type {of}, which the stand-in does not have")
    if not x.size:
        raise StandinError(f"input {name} has no elements: shape {x.shape}")
    t = machine.allocate(x.shape or (1,), DTYPES[of], MemoryRegion.shared_hbm, name)
    t.storage.data[...] = np.ascontiguousarray(x).reshape(-1).view(t.storage.data.dtype)
    t.storage.written[...] = True
    return t


def _check_results(kernel: str, results: tuple[Any, ...]) -> None:
    for i, t in enumerate(results):
        if not isinstance(t, NkiTensor) or t.buffer is not MemoryRegion.shared_hbm:
            raise StandinError(f"{kernel} returns {t!r} as result {i}; a kernel returns tensors in nl.shared_hbm")
        if not t.written.all():
            raise StandinError(f"{kernel} never wrote all of result {i}, {t!r}")


def _to_host(t: NkiTensor) -> torch.Tensor:
    x = np.ascontiguousarray(t.bits())
    y = torch.from_numpy(x.view(np.int16) if t.dtype is BFLOAT16 else x)
    return y.view(torch.bfloat16) if t.dtype is BFLOAT16 else y


def _write_back(kernel: str, given: dict[str, Any], bound: dict[str, Any], results: tuple[NkiTensor, ...]) -> None:
    """The host's tensors get what the kernel stored into its inputs, all of which it must return."""
    for name, t in bound.items():
        if not isinstance(t, NkiTensor) or not t.storage.stored:
            continue
        if all(t.storage is not r.storage for r in results):
            raise StandinError(f"{kernel}: input {name} is written but not returned: a graph never sees it")
        given[name][...] = _to_host(t).reshape(given[name].shape)
