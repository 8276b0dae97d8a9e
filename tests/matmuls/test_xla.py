"""Matmuls in fp8 on XLA's CPU device: dots of 8 bits, gradients close to eager ones, which are the oracle; programs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp8_models import compiled, dots, forward, gradients, graph, hlo, largest_difference, loss_of, small_gpt, tokens
from torch import nn

import collage_neuron
from collage_neuron.matmuls.scales import worst
from collage_neuron.numerics.eft import power_of_two, round_to
from collage_neuron.passes.fp8_scaling.scaled_matmul import amax_powers, dot, exponent_of

Golden = Callable[[str, str], None]


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).bfloat16()


def test_every_product_is_a_dot_of_8_bits(xla: torch.device, golden: Golden) -> None:
    model = compiled(small_gpt()).to(xla)
    batch = tokens().to(xla)
    loss_of(model, batch).backward()  # waits for the size of the gradient
    model.zero_grad()
    loss_of(model, batch).backward()
    text = dots(hlo(list(gradients(model).values())))
    assert len(graph(model).plan.products) == sum("f8" in line for line in text.splitlines()) == 12
    assert not graph(model).plan.reductions
    golden("fp8_gpt_xla.txt", text)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_a_dot_is_that_of_rounded_values(xla: torch.device, fmt: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(16, 32, generator=generator) * 100, torch.randn(32, 8, generator=generator)
    a[0, 0], a[0, 1] = 1e9, -1e9
    found = dot(round_to(a.to(xla), fmt), round_to(b.to(xla), "e4m3"), fmt, "e4m3").cpu()
    wanted = round_to(a, fmt).double() @ round_to(b, "e4m3").double()
    size = round_to(a, fmt).double().abs() @ round_to(b, "e4m3").double().abs()
    assert bool(((found - wanted).abs() <= 32 * 2.0**-24 * size).all())  # 31 additions in fp32


def test_gradients_are_close_to_eager_ones(xla: torch.device) -> None:
    plain = perceptron()
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    for device in (torch.device("cpu"), xla):
        model = compiled(copy.deepcopy(plain).to(device))
        model(x.to(device)).float().square().mean().backward()
        found.append({n: g.cpu() for n, g in gradients(model).items()})
        assert forward(model).backend.scales.exponents()["0.input"] == 0
    # Sums in another order may round to the bf16 next to it, 2**-8, and that to the next of 8 bits: in few elements.
    assert largest_difference(found[1], found[0]) < 2.0**-6


def test_an_amax_and_a_drift_are_those_of_the_cpu(xla: torch.device) -> None:
    """`amax()` of torch_xla 2.9 without dimensions gives its operand back."""
    x = torch.tensor([[1.0, -37.0], [0.5, 4.0]])
    for fmt in ("e4m3", "e5m2"):
        for found, wanted in zip(amax_powers(x.to(xla), fmt), amax_powers(x, fmt), strict=True):
            assert torch.equal(found.cpu(), wanted)
    assert worst(x.abs().to(xla)) == worst(x.abs())


def test_the_power_of_two_of_numbers_of_every_exponent(xla: torch.device) -> None:
    """An operation of HLO against the bits of eager numbers."""
    powers = torch.exp2(torch.arange(-126, 128, dtype=torch.float64)).float()
    odd = torch.tensor([0.0, -0.0, 2.0**-149, 2.0**-127, torch.inf, -torch.inf, torch.nan])
    x = torch.cat([powers, powers * 1.25, -powers * (2 - 2**-23), odd])
    assert torch.equal(exponent_of(x.to(xla)).cpu(), power_of_two(x))
    assert torch.equal(exponent_of(x[7].to(xla)).cpu(), power_of_two(x[7]))


# --- the programs that torch_xla compiles: of measured calls, of those after them, of plain ones --------------------


def step(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    import torch_xla

    optimizer.zero_grad()
    model(batch).float().square().mean().backward()
    optimizer.step()
    torch_xla.sync(wait=True)


def programs(model: nn.Module, optimizer: Any, batches: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Of each step the number of programs that were compiled, and of those that ran."""
    met = pytest.importorskip("torch_xla.debug.metrics")
    found = []
    for batch in batches:
        met.clear_all()
        step(model, optimizer, batch)
        new, old = (met.counter_value(f"{kind}Compile") or 0 for kind in ("Uncached", "Cached"))
        found.append((new, new + old))
    return found


@pytest.mark.slow
def test_after_each_kind_of_call_was_seen_a_step_is_one_program_and_none_is_compiled(xla: torch.device) -> None:
    """Measured or plain: `view(torch.int32)`, which torch_xla runs on the host, would cut a measured one in pieces."""
    rescale = 4
    layers = nn.Linear(8, 16), nn.RMSNorm(16), nn.SiLU(), nn.Linear(16, 4)
    model: nn.Module = nn.Sequential(*layers).bfloat16().to(xla)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = collage_neuron.compile(
        model, optimizer, matmul="fp8", rescale=rescale, validate="off", verbose=False
    )
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(16, 8, generator=generator).bfloat16().to(xla) for _ in range(rescale + 6)]
    found = programs(model, optimizer, batches)
    halves = forward(model).backend.graphs[0].halves
    assert [half.recalibration.history[-1] for half in halves] == [8] * 2
    assert found[5:] == [(0, 1)] * (rescale + 1), found
