"""A backend from outside: NumPy runs the graphs of a step, in place, on the memory of CPU tensors."""

from typing import Any

import numpy as np
import torch
import torch.fx as fx

from collage_neuron.numerics import eft
from collage_neuron.numerics.eft import storage_named
from collage_neuron.passes.backends.protocol import Backend


def round_to(x: Any, name: str) -> Any:
    if name == "bf16":  # to nearest even, on bits; a NaN would be carried into infinity
        n = x.view(np.uint32)
        even = (n + (0x7FFF + (n >> 16 & 1)) & 0xFFFF0000).view(np.float32)
        return np.where(np.isnan(x), np.float32(np.nan), even)
    return x if storage_named(name).is_floating else np.rint(x).clip(*storage_named(name).limits)


def widen(x: Any) -> Any:
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(np.float32)


def narrow(x: Any, name: str) -> Any:
    dtype = str(storage_named(name).dtype).removeprefix("torch.")
    return (x.view(np.uint32) >> 16).astype(np.uint16) if name == "bf16" else x.astype(dtype)


def memory(t: torch.Tensor) -> Any:
    """The memory of a tensor as an array: of bf16, which NumPy does not have, the bits."""
    return t.detach().view(torch.uint16 if t.dtype == torch.bfloat16 else t.dtype).numpy()


SAME = ("abs", "where", "maximum", "minimum", "logical_or", "logical_and", "logical_not", "exp", "log", "sign")
NUMPY: dict[Any, Any] = {getattr(torch, name): getattr(np, name) for name in SAME}
NUMPY |= {torch.pow: np.power, eft.sqrt: np.sqrt, eft.capped: lambda x: np.minimum(x, np.float32(eft.LARGEST))}
NUMPY[eft.power_of_two] = lambda x: (x.view(np.uint32) & 0x7F800000).view(np.float32)
NUMPY |= {eft.round_to: round_to, eft.widen: widen, eft.narrow: narrow}


class OnArrays(fx.Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return NUMPY.get(target, target)(*(np.float32(x) if isinstance(x, float) else x for x in args), **kwargs)


class NumPy(Backend):
    name, devices = "numpy", ("cpu",)

    def run(self, launches: Any) -> tuple[()]:
        for launch in (each for each in launches if each.finite is None or each.finite):
            for reads, writes in zip(launch.reads, launch.writes, strict=True):
                with np.errstate(all="ignore"):
                    results = OnArrays(launch.update.graph).run(*map(memory, reads), *launch.vector.numpy())
                for old, new in zip(writes, results, strict=True):
                    memory(old)[...] = new
                    torch.autograd.graph.increment_version(old)
        return ()
