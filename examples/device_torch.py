"""What torch-xla and neuronx-cc do around a kernel, as questions that a device answers.

Aliasing, loops, logical cores, a kernel in a training graph, roundings of plain operations, TorchNeuron's names.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from device_kernels import LOOPED, Function, in_place, load
from device_questions import sums_of
from device_steps import FEW, Place, compared
from torch import Tensor

from collage_neuron.errors import NoMachine
from collage_neuron.numerics.strategies import DEFAULT
from collage_neuron.passes.backends.nki.target import machine_of


class Runs(Protocol):
    """What these questions need of a machine."""

    @property
    def evidence(self) -> str: ...
    @property
    def dialect(self) -> str: ...
    @property
    def device(self) -> torch.device: ...
    def run(self, kernel: Function, *tensors: Tensor) -> Tensor: ...


Answer = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class TorchQuestion:
    """A question by name, and how to answer it; the folder is for kernel files."""

    name: str
    text: str
    answer: Callable[[Runs, Path], Answer]


NO_LOOP = "not asked: only `import nki` has such loops"
NOT_HERE = "not asked: needs a device", dict[str, Any]()


def _inputs(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.arange(128 * 64).reshape(128, 64).remainder(97).bfloat16()
    return x.to(device), torch.full_like(x, 0.5).to(device), torch.ones(128, 1, device=device)


def _sync(device: torch.device) -> None:
    """Ends the graph of torch_xla; elsewhere nothing waits."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


def aliasing(machine: Runs, folder: Path) -> Answer:
    """What does a caller see of a kernel that stores into its input?"""
    kernel = load(in_place(machine.dialect), folder / "in_place.py")
    expected = torch.add(*_inputs(torch.device("cpu"))[:2])
    x, y, s = _inputs(machine.device)
    if machine.evidence == "device":
        result = kernel(x, y, s)
        _sync(machine.device)
    else:
        result = machine.run(kernel, x, y, s)
    words = "returned" if torch.equal(result.cpu(), expected) else "wrong in what is returned"
    if torch.equal(result.cpu(), torch.add(expected, y.cpu())):
        words = "added twice, as two programs do that run the kernel on one tensor"
    held = "the new" if torch.equal(x.cpu(), expected) else "the old"
    return f"x + y is {words}; the tensor that was given holds {held} values", {}


def indirect_dim(machine: Runs, folder: Path) -> Answer:
    """Whose dimension does indirect_dim of a reshaped view mean? Kernels with loops count on lines of the view."""
    if machine.dialect != "nki":
        return NO_LOOP, {}
    found = machine.run(load(LOOPED, folder / "looped.py"), torch.arange(1536, dtype=torch.float32).reshape(1536, 1))
    firsts = found[::128, 0].tolist()
    ways = {"of the view": [0.0, 512.0, 1024.0], "of the argument: a tile is misplaced": [0.0, 128.0, 256.0]}
    words = next((way for way, expected in ways.items() if firsts == expected), "neither's")
    whole = torch.equal(found.flatten(), torch.arange(1536, dtype=torch.float32))
    return words if whole or words != "of the view" else "of the view, and lines are wrong", {"first of each": firsts}


def logical_cores(machine: Runs, _: Path) -> Answer:
    """How many physical cores has a logical core?"""
    if machine.device.type == "cpu":
        return NOT_HERE
    try:
        found = machine_of(machine.device)
        return f"{'two physical cores' if found.cores > 1 else 'one physical core'}, of a {found.target}", {}
    except NoMachine as error:
        return str(error), {}


def integer_sums(machine: Runs, _: Path) -> Answer:
    """How does a graph add 32-bit integers? The random bits of backend `xla` are such sums."""
    if machine.device.type == "cpu":
        return NOT_HERE
    x = torch.arange(2**24 - 1024, 2**24 + 1024, dtype=torch.int32)
    y = torch.full_like(x, 2**20 + 1)
    return sums_of((x.to(machine.device) + y.to(machine.device)).cpu(), x, y)


def training_graph(machine: Runs, folder: Path) -> Answer:
    """Does one kernel inside forward, backward and update compile?"""
    if machine.evidence != "device":
        return NOT_HERE
    kernel = load(in_place(machine.dialect), folder / "in_graph.py")
    x, data, s = _inputs(machine.device)
    p = x.detach().clone().requires_grad_()
    _sync(machine.device)
    (data @ p.t()).float().pow(2).mean().backward()
    assert p.grad is not None
    updated = kernel(p.detach(), p.grad, s)
    p.data.copy_(updated)
    _sync(machine.device)
    return "compiled and ran", {"finite": bool(p.detach().float().cpu().isfinite().all())}


def two_kernels(machine: Runs, folder: Path) -> Answer:
    """Do two kernels in one graph compile? The verifier for trn1 was seen to reject them."""
    if machine.evidence != "device":
        return NOT_HERE
    kernel = load(in_place(machine.dialect), folder / "twice.py")
    x, y, s = _inputs(machine.device)
    first, second = kernel(x, y, s), kernel(y, x, s)
    _sync(machine.device)
    same = torch.equal(first.cpu(), second.cpu())
    return f"compiled and ran; results are {'alike, as they should' if same else 'not alike'}", {}


def plain_roundings(machine: Runs, _: Path) -> Answer:
    """Does neuronx-cc round bf16 between plain operations?"""
    if machine.evidence != "device":
        return NOT_HERE
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4096, generator=g).bfloat16() for _ in range(2))
    lost = [name for name, chain in CHAINS.items() if not _same_on(machine.device, chain, a, b)]
    return ("all rounded" if not lost else f"lost in: {', '.join(lost)}"), {"lost": lost}


CHAINS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum meets product": lambda a, b: (a + b) * a,
    "sum is widened": lambda a, b: (a + b).float() * 3,
    "quotient meets product": lambda a, b: (a / b) * a,
    "error of a sum": lambda a, b: b - ((a + b) - a),
}


def _same_on(device: torch.device, chain: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> bool:
    result = chain(a.to(device), b.to(device))
    _sync(device)
    return torch.equal(result.cpu(), chain(a, b))


def reduce_precision(machine: Runs, _: Path) -> Answer:
    """Does neuronx-cc round by reduce-precision?"""
    return _probed_on_xla("Computation", machine)


def rounding_by_bits(machine: Runs, _: Path) -> Answer:
    """Does neuronx-cc keep roundings by bits?"""
    return _probed_on_xla("ForNeuron", machine)


def _probed_on_xla(form: str, machine: Runs) -> Answer:
    if machine.evidence == "device" and machine.device.type != "xla":
        return "not asked: TorchNeuron has no XLA devices", {}
    if machine.evidence != "device":
        return NOT_HERE
    from collage_neuron.passes.backends.xla import compilers
    from collage_neuron.passes.backends.xla.backend import Xla

    return _probed(Xla(getattr(compilers, form)), machine)


def generated_roundings(machine: Runs, _: Path) -> Answer:
    """Does a generated kernel compile, and keep every rounding?"""
    from collage_neuron.passes.backends.registry import get

    return _probed(get("nki"), machine)


def _probed(backend: Any, machine: Runs) -> Answer:
    from collage_neuron.runtime.rounding_probe import failures

    lost = failures(backend, machine.device)
    return ("every rounding is kept" if not lost else f"lost in: {', '.join(lost)}"), {"lost": lost}


def generated_adamw(machine: Runs, _: Path) -> Answer:
    """How far is AdamW as one kernel from the reference?

    The moments need no function that the device only approximates: their bits must be the same.
    """
    found = compared("AdamW", DEFAULT, Place("nki", machine.device), FEW)
    return found["answer"], {"differing": found["differing"], "off": found["off"]}


def wide_types(machine: Runs, _: Path) -> Answer:
    """Are float64 and int64 on the device what they say? The reference form needs them."""
    if machine.device.type == "cpu":
        return NOT_HERE
    x = torch.tensor([1 + 2.0**-40, 3.0], dtype=torch.float64).to(machine.device)
    n = torch.tensor([2**40 + 1, 3]).to(machine.device)
    kept = {
        "float64": x.cpu()[0].item() != 1 and (x * x).cpu()[0].item() > 1,
        "int64": (n + n).cpu()[0].item() == 2**41 + 2,
    }
    narrow = {"float64": "fp32", "int64": "int32"}
    return "; ".join(f"{name} is {name if kept[name] else narrow[name]}" for name in kept), kept


def torch_neuron_names(_: Runs, __: Path) -> Answer:
    """Which names does TorchNeuron have?"""
    if importlib.util.find_spec("torch_neuronx") is None:
        return "torch_neuronx is not installed", {}
    names = {
        "torch_neuronx": ("nki_op", "nki_jit", "wrap_nki"),
        "torch_neuronx.nki_hop": ("wrap_nki", "nki_kernel_wrapper"),
    }
    found = [f"{module}.{name}" for module in names for name in names[module] if _has(module, name)]
    backends = [b for b in torch._dynamo.list_backends() if "neuron" in b]
    return ", ".join(found) or "none of those looked for", {"found": found, "dynamo backends": backends}


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def titan_optimizer(_: Runs, __: Path) -> Answer:
    """What does TorchTitan build optimizers from?"""
    if importlib.util.find_spec("torchtitan") is None:
        return "torchtitan is not installed", {}
    container = importlib.import_module("torchtitan.components.optimizer")
    names = [name for name in dir(container) if "ptimizer" in name]
    return ", ".join(names), {"names": names}


GROUPS = {
    "aliasing": (aliasing,),
    "loops": (indirect_dim,),
    "cores": (logical_cores,),
    "training_graph": (training_graph,),
    "two_kernels": (two_kernels,),
    "graph_roundings": (plain_roundings, reduce_precision, rounding_by_bits),
    "generated": (generated_roundings, generated_adamw),
    "types": (wide_types, integer_sums),
    "names": (torch_neuron_names, titan_optimizer),
}
"""What answers the questions of graphs, by group; a question is the first sentence of a docstring."""

QUESTIONS: dict[str, list[TorchQuestion]] = {
    group: [
        TorchQuestion(answer.__name__, f"{(answer.__doc__ or '').partition('?')[0]}?", answer) for answer in answers
    ]
    for group, answers in GROUPS.items()
}
