"""Who takes part: torch's optimizers, compiled ones in each strategy, arithmetic and backend, peers, a memory copy."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

import collage_neuron
from collage_neuron.numerics.strategies import ARITHMETICS, DEFAULT, STRATEGIES, possible
from collage_neuron.passes.backends import registry

# torch_xla picks its device when it is first imported, and asks for this line where there is no accelerator.
if importlib.util.find_spec("libneuronxla") is None:
    os.environ.setdefault("PJRT_DEVICE", "CPU")

TORCH = "torch"
PEER = "peer"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Contender:
    """One way to take a step."""

    kind: str
    """`copy`, `torch` (the optimizer as it is), `peer`, or a strategy."""
    numbers: str
    """`fp32` or `bf16`: the arithmetic, or the dtype of torch's own; the name of a peer."""
    backend: str
    """The compiled optimizer's; `fused`, `foreach` or `cpu` (the plain loop), or `xla`, for torch's own."""
    optimizer: str = "AdamW"

    @property
    def name(self) -> str:
        if self.kind == "copy":
            return "memory copy"
        if self.kind == PEER:
            return self.numbers
        if self.kind == TORCH:
            return f"torch {self.optimizer} {self.numbers}, {self.backend}"
        own = "" if self.optimizer == "AdamW" else f"{self.optimizer} "
        return f"{own}{self.kind}{'' if self.numbers == 'fp32' else f' ({self.numbers})'}, {self.backend}"

    @property
    def is_compiled(self) -> bool:
        return self.kind in STRATEGIES

    @property
    def is_fast(self) -> bool:
        """Returns True for those that differ by little: several processes measure them."""
        return self.backend in ("native", "fused", "foreach") or self.kind == "copy"

    @property
    def device(self) -> str:
        return "xla" if self.backend.startswith("xla") else "cpu"


COPY = Contender("copy", "", "cpu")
FUSED = {numbers: Contender(TORCH, numbers, "fused") for numbers in DTYPES}
BASELINES = (COPY, FUSED["fp32"])


def backends() -> list[str]:
    """The backends that run compiled updates on this machine's CPU: native, if it can, XLA's, and the reference."""
    cpu = torch.device("cpu")
    native = "native" in registry.names() and registry.get("native").suits(cpu)
    return [*(["native"] if native else []), *(["xla"] if _has("torch_xla") else []), "reference"]


def opened(kind: str) -> tuple[torch.device, Callable[[], None]]:
    """The device of XLA, if it is that kind, or the CPU; and what waits for it."""
    if kind != "xla":
        return torch.device("cpu"), lambda: None
    import torch_xla
    import torch_xla.core.xla_model as xm

    def finish() -> None:
        torch_xla.sync()
        xm.wait_device_ops()  # sync(wait=True) may return before the last graph has run

    return torch_xla.device(), finish


def contenders(peers: bool = False) -> list[Contender]:
    """All that can take part on this machine."""
    found = [*BASELINES, FUSED["bf16"], *(Contender(TORCH, n, "foreach") for n in DTYPES)]
    found += [Contender(TORCH, n, "xla") for n in DTYPES if _has("torch_xla")]
    found += [Contender(TORCH, "fp32", "fused", "SGD")]
    found += [Contender(TORCH, "fp32", "cpu", "Lion")] if _has("lion_pytorch") else []
    for backend in backends():
        strategies = [DEFAULT] if backend == "reference" else STRATEGIES  # the oracle: as slow in all of them
        found += [Contender(s, a, backend) for a, s in product(ARITHMETICS, strategies) if possible(s, a)]
    for optimizer in ("SGD", *(["Lion"] if _has("lion_pytorch") else [])):
        found += [Contender(s, "fp32", backends()[0], optimizer) for s in dict.fromkeys((DEFAULT, "light", "bf16"))]
    return found + ([Contender(PEER, name, "cpu") for name in peers_by_name()] if peers else [])


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def peers_by_name() -> dict[str, Any]:
    """The optimizers of other packages that `benchmarks/accuracy` compares with too, as far as they are installed."""
    found, _ = importlib.import_module("accuracy.peers").found()
    return {c.name: c for c in found}


def optimizer_of(contender: Contender, params: list[Parameter]) -> Optimizer:
    """The optimizer of a contender other than the copy, over `params`."""
    if contender.kind == PEER:
        options = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
        made: Optimizer = peers_by_name()[contender.numbers].build(params, options)
        return made
    fast = {name: name == contender.backend for name in ("fused", "foreach")} if contender.device == "cpu" else {}
    own = MAKE[contender.optimizer](params, fast if contender.kind == TORCH else {})
    if contender.is_compiled:
        collage_neuron.compile(
            own, strategy=contender.kind, arithmetic=contender.numbers, backend=contender.backend, validate="off"
        )
    return own


def _lion(params: list[Parameter], _: dict[str, bool]) -> Optimizer:
    made: Optimizer = importlib.import_module("lion_pytorch").Lion(params, lr=1e-4, weight_decay=0.1)
    return made


MAKE: dict[str, Callable[[list[Parameter], Any], Optimizer]] = {
    "AdamW": lambda params, fast: AdamW(params, lr=1e-4, weight_decay=0.1, **fast),
    "SGD": lambda params, fast: SGD(params, lr=1e-4, momentum=0.9, weight_decay=0.1, **fast),
    "Lion": _lion,
}


def words(optimizer: Optimizer, p: Parameter) -> Iterator[torch.Tensor]:
    """What an optimizer keeps of a parameter: every tensor of its state with more than a number, each once."""
    tensors = importlib.import_module("accuracy.contenders").tensors
    found = {t.data_ptr() or id(t): t for t in tensors(optimizer.state[p]) if t.numel() > 1 or t.shape == p.shape}
    yield from found.values()
