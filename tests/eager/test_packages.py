"""Published optimizers that are not known before a step: each is what it is in fp32, or rejected."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from as_written import equal, run, values
from package_cases import (
    CLOSURE,
    CONTAINER,
    DRAWS,
    LAUNCHED,
    MEMORY,
    NOT_FLOATING,
    ORDER,
    OTHER_SHAPE,
    OTHER_TYPE,
    PAIRS,
    READS,
    REFUSED,
    REJECTED,
)
from sampling import part
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.states.bookkeeping import bookkeeping

pytestmark = [
    pytest.mark.filterwarnings("ignore:This overload of:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:pytorch_optimizer"),
    pytest.mark.filterwarnings(r"ignore:Using backward\(\) with create_graph=True:UserWarning"),
]

WRITTEN = [
    (package, name, why)
    for package, refused in REFUSED.items()
    for name, why in refused.items()
    if name not in REJECTED[package] and why is not PAIRS
]
COMPILED = [(package, name, "") for package, names in LAUNCHED.items() for name in names.split()]

REASONS = {
    r"'closure'": CLOSURE,
    r"something else than a state keeps": CONTAINER,
    r"takes the norm of order": ORDER,
    r"reads a value": READS,
    r"is neither a parameter, a gradient nor a state": OTHER_SHAPE,
    r"(aten\.sort)": "",
    r"makes a tensor of torch\.": OTHER_TYPE,
    r"in torch\.bool, shaped like": NOT_FLOATING,
    r"the value of this tensor waits": MEMORY,
    r"draws random numbers|it uses random": DRAWS,
    r"(aten\.\w+)\.\w+ cannot wait": "",
    r"not elementwise: (aten\.\w+)": "",
}
"""What a message says, in short; without words of its own, the operation that it names."""

MATRICES = ((8, 12), (6, 4))
ONLY_MATRICES = ("SpectralSphere", "Muon")


def made(package: str, name: str, params: list[Parameter]) -> Any:
    """The optimizer with its own defaults, of which `foreach` is off; in training mode."""
    cls: Any = getattr(pytest.importorskip(package), name)
    required = {p.name for p in inspect.signature(cls).parameters.values() if p.default is p.empty}
    torch.manual_seed(0)  # some draw matrices when they are made
    optimizer = cls(params, lr=1e-3) if "lr" in required else cls(params)
    if hasattr(optimizer, "train"):
        optimizer.train()
    for group in optimizer.param_groups:
        group.update({k: False for k in ("foreach", "fused", "capturable") if k in group})
    return optimizer


def params_of(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Parameter]:
    g = torch.Generator().manual_seed(0)
    return [Parameter((0.3 * torch.randn(shape, generator=g)).bfloat16().to(dtype)) for shape in shapes]


def closure_of(optimizer: Optimizer, number: int) -> Any:
    """A closure whose gradients depend on the weights, with values that bf16 has: those of the weights that it sees."""
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def closure() -> torch.Tensor:
        g = torch.Generator().manual_seed(number)
        for p in params:
            p.grad = (0.1 * torch.randn(p.shape, generator=g) + p.detach().bfloat16() / 8).bfloat16().to(p.dtype)
        return torch.stack([(p.detach().bfloat16().float() ** 2).sum() for p in params]).sum()

    return closure


def stepped(optimizer: Optimizer, name: str) -> None:
    if name == "AliG":  # it takes its step size from the loss
        step = optimizer.step
        optimizer.step = lambda: step(lambda: 0.5)  # type: ignore[method-assign,assignment]
    if name.endswith("Closure") or name == "LBFGS":
        for number in range(3):
            optimizer.step(closure_of(optimizer, number))
        return
    numpy.random.seed(0)  # Kron asks numpy's generator whether it balances its factors
    run(optimizer, 3)


def reason(message: str) -> str:
    found = next((short, m) for pattern, short in REASONS.items() if (m := re.search(pattern, message)))
    return found[0] or found[1][1]


OF_TORCH = [("torch.optim", "LBFGS", CLOSURE), ("torch.optim", "Muon", OTHER_TYPE)]


@pytest.mark.sampled(of=4, each=False)  # the steps of all go one way: as written
@pytest.mark.parametrize(("package", "name", "why"), [*WRITTEN, *part(COMPILED, 2), *OF_TORCH])
def test_each_is_what_it_is_in_fp32_bit_for_bit_if_it_runs_as_written(package: str, name: str, why: str) -> None:
    shapes = MATRICES if name in ONLY_MATRICES else (*MATRICES, (16,))
    plain = made(package, name, params_of(shapes, torch.float32))
    stepped(plain, name)
    params = params_of(shapes, torch.bfloat16)
    optimizer = collage_neuron.compile(made(package, name, params), strategy="fp32", validate="off")
    stepped(optimizer, name)
    found = values(optimizer, params)
    wanted = [p.detach() for group in plain.param_groups for p in group["params"]]
    assert bool(bookkeeping(optimizer).as_written) == bool(why)
    if why:
        assert reason(bookkeeping(optimizer).as_written) == why
        assert equal(found, wanted)
    for x, y, start in zip(found, wanted, params_of(shapes, torch.float32), strict=True):
        # What is launched rounds in another order: an update by a few units of its last place, and then the weight.
        rounded = 2**-19 * float((y - start.detach()).norm()) + 3 * 2**-24 * float(y.norm())
        assert float((x - y).norm()) <= rounded
    assert all(math.isfinite(float(x.sum())) for x in found)


def compiled_and_stepped(package: str, name: str) -> None:
    params = params_of(MATRICES, torch.bfloat16)
    optimizer = collage_neuron.compile(made(package, name, params))
    torch.stack([p.float().pow(4).sum() for p in params]).sum().backward(create_graph=True)
    optimizer.step()


@pytest.mark.parametrize(("package", "name"), [(p, n) for p, refused in REJECTED.items() for n in refused])
def test_the_others_are_rejected(package: str, name: str) -> None:
    with pytest.raises(UnsupportedUpdate, match=r"Nor can step\(\) run as written"):
        compiled_and_stepped(package, name)


def test_no_package_has_a_rejected_optimizer_that_is_not_refused() -> None:
    assert all(REJECTED[package].keys() <= refused.keys() for package, refused in REFUSED.items())
    assert sum(map(len, REJECTED.values())) == 3
