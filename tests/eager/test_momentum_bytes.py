"""torch's Muon with its momentum in 1, 2, 3 and 4 bytes: what is kept, how far it is off, and that it resumes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import collage_neuron

SHAPE, STEPS = (64, 96), 40

FORMATS = {  # bytes of the momentum, without those that 128 elements share; distance from fp32, of that travelled
    "i8q4": (1, 0.06), "i8q8": (1, 0.09), "e4m3": (1, 0.09),
    "bf16": (2, 0.009), "fp16": (2, 0.006), "i16q4": (2, 0.005),
    "bf16+int8": (3, 0.0045), "bf16+int16": (4, 2.0**-20),
}  # fmt: skip
"""Muon's own iteration begins by rounding to bf16: where the momentum is rounded before, that is another number."""


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE, generator=generator).bfloat16() for _ in range(STEPS)]


def start() -> torch.Tensor:
    return 0.1 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


def compiled(momentum: str) -> tuple[Parameter, Any]:
    p = Parameter(start())
    strategy = {"param": "bf16+int16", "momentum_buffer": momentum}
    return p, collage_neuron.compile(torch.optim.Muon([p], lr=0.02), strategy=strategy)


def trained(p: Parameter, optimizer: Any, grads: list[torch.Tensor]) -> None:
    for g in grads:
        p.grad = g.to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("momentum", FORMATS)
def test_the_momentum_has_its_bytes_and_the_run_its_distance_from_fp32(momentum: str) -> None:
    size, most = FORMATS[momentum]
    plain = Parameter(start())
    trained(plain, torch.optim.Muon([plain], lr=0.02), gradients())
    p, optimizer = compiled(momentum)
    trained(p, optimizer, gradients())
    words = {k: x for k, x in optimizer.state[p].items() if k.startswith("momentum_buffer")}
    assert sum(x.nbytes for k, x in words.items() if not k.endswith("_scale")) == size * p.numel()
    found, wanted = collage_neuron.exact_value(optimizer, p), plain.detach()
    assert float((found - wanted).norm() / (wanted - start()).norm()) < most


@pytest.mark.sampled(of=3, each=False)  # all formats are saved and loaded in one way
@pytest.mark.parametrize("momentum", FORMATS)
def test_a_checkpoint_resumes_bit_for_bit(momentum: str) -> None:
    grads = gradients()
    p, optimizer = compiled(momentum)
    trained(p, optimizer, grads[:6])
    saved, weight = copy.deepcopy(optimizer.state_dict()), p.detach().clone()
    trained(p, optimizer, grads[6:12])
    q, other = compiled(momentum)
    with torch.no_grad():
        q.copy_(weight)
    other.load_state_dict(saved)
    trained(q, other, grads[6:12])
    assert torch.equal(p, q)
    for key, x in optimizer.state[p].items():
        assert torch.equal(torch.as_tensor(x), torch.as_tensor(other.state[q][key])), key
