"""Steps that ask how tensors lie in memory get the true answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_written import Written
from torch import Tensor

import collage_neuron

LAST = torch.channels_last
Look = Callable[[Tensor, Tensor], Any]
LOOKS: dict[str, Look] = {
    "contiguous": lambda p, g: p.is_contiguous(),
    "channels last": lambda p, g: p.is_contiguous(memory_format=LAST),
    "gradient": lambda p, g: g.is_contiguous(),
    "stride": lambda p, g: p.stride(0) == 72,
    "strides": lambda p, g: p.stride() == g.stride(),
    "order": lambda p, g: p.dim_order() == (0, 1, 2, 3),
    "result": lambda p, g: (p * g).is_contiguous(),
    "storage": lambda p, g: p.untyped_storage().nbytes() == 4 * p.numel(),
    "place": lambda p, g: p.storage_offset() == 0,
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=LAST),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


class Looking(Written):
    """Has another rate for some layouts."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] * (2 if group["look"](p, g) else 1))


class Flat(Written):
    """Sees tensors in the order of memory."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.as_strided((p.numel(),), (1,)).sub_(g.as_strided((g.numel(),), (1,)), alpha=group["lr"])


def run(make: Any, lay: list[Callable[[Tensor], Tensor]], of_gradients: list[Any], compiled: bool) -> list[Tensor]:
    """The parameters after a step for each layout of gradients."""
    draws = torch.Generator().manual_seed(0)
    starts = [torch.randn(16, 8, 3, 3, generator=draws).bfloat16() for _ in lay]
    params = [torch.nn.Parameter(f(x.float())) for f, x in zip(lay, starts, strict=True)]
    optimizer = make(params)
    if compiled:
        optimizer = collage_neuron.compile(optimizer, strategy="fp32", verbose=False)
    for of_gradient in of_gradients:
        for p in params:
            p.grad = of_gradient(torch.randn(p.shape, generator=draws).bfloat16().to(p.dtype))
        optimizer.step()
    return [collage_neuron.exact_value(optimizer, p) if compiled else p.detach() for p in params]


def same(make: Any, lay: list[Any], of_gradients: list[Any]) -> None:
    for x, y in zip(*(run(make, lay, of_gradients, compiled) for compiled in (True, False)), strict=True):
        torch.testing.assert_close(x, y, rtol=2**-21, atol=2**-22)


def looking(name: str) -> Callable[..., Looking]:
    return lambda params: Looking(params, look=LOOKS[name])


@pytest.mark.parametrize("name", LOOKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_that_asks_for_the_layout_gets_the_true_one(name: str, layout: str) -> None:
    lay, usual = LAYOUTS[layout], LAYOUTS["contiguous"]
    same(looking(name), [lay], [lay, lay])
    same(looking(name), [usual], [usual, lay, usual])  # a gradient may change its layout
    same(looking(name), [usual, lay], [usual, usual])  # and a group may have both


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_in_the_order_of_memory_are_those_of_the_tensors(layout: str) -> None:
    same(Flat, [LAYOUTS[layout]], [LAYOUTS[layout]] * 2)
    same(Flat, [LAYOUTS["contiguous"]], [LAYOUTS[layout]] * 2)


class Strided(Written):
    """Notes strides, before and after values are computed, and steps by the places of memory."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen: set[Any] = set()

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.seen |= {p.stride(), g.stride()}
        p.sub_(g, alpha=group["lr"])
        if self.looks:
            p.numpy()
        self.seen |= {p.stride(), g.stride()}

    looks = False


@pytest.mark.parametrize("looks", [False, True])
def test_tensors_with_gaps_keep_their_strides(looks: bool) -> None:
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        whole, of_gradients = torch.arange(48.0, dtype=dtype).view(6, 8), torch.ones(6, 8, dtype=dtype)
        p = torch.nn.Parameter(whole[1:, ::2])
        p.grad = of_gradients[1:, ::2]
        optimizer = Strided([p])
        optimizer.looks = looks
        if dtype == torch.bfloat16:
            optimizer = collage_neuron.compile(optimizer, strategy="fp32", verbose=False)
        for _ in range(3):
            optimizer.step()
        assert optimizer.seen == {(8, 2)}
        assert torch.equal(whole[:, 1::2].float(), torch.arange(48.0).view(6, 8)[:, 1::2])
        found.append(collage_neuron.exact_value(optimizer, p) if dtype == torch.bfloat16 else p.detach())
    assert torch.equal(*found)
