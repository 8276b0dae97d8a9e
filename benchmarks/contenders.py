"""Who takes part: torch's AdamW, the compiled AdamW in each strategy, arithmetic and backend, and a memory copy."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from workloads import Shape

import collage_neuron
from collage_neuron.numerics.strategies import ARITHMETICS, STRATEGIES, possible
from collage_neuron.optimizer.compiled import base_of
from collage_neuron.runtime import plan

TORCH = "torch AdamW"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Contender:
    """One way to take a step. `backend` is `cpu` or `xla` for torch's own, else the compiled optimizer's."""

    kind: str
    """`copy`, `torch AdamW`, or a strategy."""
    numbers: str
    """`fp32` or `bf16`: the arithmetic, or the dtype of torch's own."""
    backend: str

    @property
    def name(self) -> str:
        if self.kind == "copy":
            return "memory copy"
        return f"{self.kind}{' fused' if self == FUSED[self.numbers] else ''}, {self.numbers}, {self.backend}"

    @property
    def device(self) -> str:
        return "xla" if self.backend == "xla" else "cpu"


COPY = Contender("copy", "", "cpu")
FUSED = {numbers: Contender(TORCH, numbers, "cpu") for numbers in DTYPES}


def contenders() -> list[Contender]:
    """All that can take part on this machine."""
    xla = importlib.util.find_spec("torch_xla") is not None
    found = [COPY, *FUSED.values()] + [Contender(TORCH, numbers, "xla") for numbers in DTYPES if xla]
    for backend in ["xla", "reference"] if xla else ["reference"]:
        pairs = [(s, a) for a in ARITHMETICS for s in STRATEGIES if possible(s, a)]
        found += [Contender(s, a, backend) for s, a in pairs]
    return found


@dataclass
class Built:
    """A contender ready to step: `launch` starts the step and `finish` waits for it."""

    launch: Callable[[], None]
    finish: Callable[[], None]
    kept: int
    """Bytes of parameters, gradients and states."""
    traffic: int
    """Bytes a step must read and write at least: every stored component and the gradient, once."""


def build(contender: Contender, shapes: Sequence[Shape]) -> Built:
    torch.manual_seed(0)
    if contender.kind == "copy":
        return _build_copy(shapes)
    device, finish = _device(contender)
    dtype = DTYPES["bf16"] if contender.kind in STRATEGIES else DTYPES[contender.numbers]
    params = [torch.nn.Parameter((torch.randn(s) * 0.02).to(dtype).to(device)) for s in shapes]
    for p in params:
        p.grad = (torch.randn(p.shape) * 1e-3).to(dtype).to(device)
    fused = {"fused": True} if contender.kind == TORCH and contender.backend == "cpu" else {}
    optimizer = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1, **fused)  # type: ignore[arg-type]  # a dict of bools
    if contender.kind in STRATEGIES:
        collage_neuron.compile(
            optimizer, strategy=contender.kind, arithmetic=contender.numbers, backend=contender.backend
        )

    def launch() -> None:
        optimizer.step()

    launch()
    finish()
    kept = sum(t.nbytes for p in params for t in (p, p.grad, *_tensors(optimizer, p)) if t is not None)
    return Built(launch, finish, kept, _traffic(contender, optimizer))


def _device(contender: Contender) -> tuple[torch.device, Callable[[], None]]:
    if contender.device == "cpu":
        return torch.device("cpu"), lambda: None
    import torch_xla
    import torch_xla.core.xla_model as xm

    def finish() -> None:
        torch_xla.sync()
        xm.wait_device_ops()  # sync(wait=True) may return before the last graph has run

    return torch_xla.device(), finish


def _tensors(optimizer: torch.optim.Optimizer, p: Tensor) -> list[Tensor]:
    return [t for t in optimizer.state[p].values() if isinstance(t, Tensor) and t.shape == p.shape]


def _traffic(contender: Contender, optimizer: torch.optim.Optimizer) -> int:
    params: list[Any] = optimizer.param_groups[0]["params"]
    size: int = sum(p.numel() for p in params)
    if contender.kind == TORCH:
        return 7 * _itemsize(params[0]) * size  # reads p, g, m, v; writes p, m, v
    base = base_of(type(optimizer))
    update = plan.plan_update(base, optimizer, optimizer.param_groups[0], params[:1]).update
    tensors = {"param": params[0], "grad": params[0].grad} | optimizer.state[params[0]]
    used = {n.target for n in update.graph.graph.nodes if n.op == "placeholder" and n.users}
    read = [key for key in update.inputs if key in used]
    return sum(_itemsize(tensors[key]) for key in [*read, *update.outputs]) * size


def _itemsize(t: Tensor) -> int:
    return t.dtype.itemsize


def _build_copy(shapes: Sequence[Shape]) -> Built:
    """Reads 11 bytes a parameter and writes 11: what `plus` must move with a bf16 gradient."""
    sources = [torch.ones(s, dtype=torch.uint8).repeat(*[1] * (len(s) - 1), 11) for s in shapes]
    targets = [torch.zeros_like(s) for s in sources]

    def launch() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    size = 2 * sum(s.nbytes for s in sources)
    return Built(launch, lambda: None, size, size)
