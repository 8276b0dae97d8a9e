"""The memory of large copies: used again by the next step, unless something still refers to it."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from as_written import Written
from torch.nn import Parameter

import collage_neuron
from collage_neuron.eager import memory
from collage_neuron.eager.memory import IS_KNOWN, LARGE, Pool, pool

pytestmark = pytest.mark.skipif(not IS_KNOWN, reason="the system cannot take memory back that is marked as free")

SHAPE = (1024, 1031)
"""Of a tensor that ends within a large page."""


class Seen(Written):
    """Momentum over its norm; says what it sees."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m = state.setdefault("m", torch.zeros_like(p)).lerp_(g, 0.1)
        p.add_(m, alpha=-group["lr"] / float(m.norm() + 1))
        SEEN.append(group["see"](p, g, m))


SEEN: list[Any] = []


@pytest.fixture(autouse=True)
def _forgetting() -> Iterator[None]:
    SEEN.clear()
    yield
    SEEN.clear()


def compiled(see: Any, shape: tuple[int, ...] = SHAPE) -> tuple[Parameter, Any]:
    p = Parameter(torch.linspace(-1, 1, SHAPE[0] * SHAPE[1]).reshape(shape).bfloat16())
    optimizer = collage_neuron.compile(Seen([p], see=see), strategy="fp32")
    p.grad = torch.ones_like(p)
    return p, optimizer


def test_each_step_has_the_memory_of_the_one_before() -> None:
    _, optimizer = compiled(lambda *values: tuple(hex(x.data_ptr()) for x in values))  # numbers would be translated
    for _ in range(4):
        optimizer.step()
    second, third, last = map(sorted, SEEN[1:])
    assert second == third == last  # the momentum of the first step is of the optimizer's own making
    assert all(int(address, 16) % LARGE == 0 for address in last)
    assert len(pool(optimizer)._free) == 1


def test_the_memory_of_a_tensor_that_is_kept_is_not_used_again() -> None:
    lending, like = Pool(), torch.empty(SHAPE)
    kept = lending.empty(like).fill_(1.0)
    lending.end()
    others = [lending.empty(like).fill_(2.0).data_ptr() for _ in range(2)]  # two tensors in one step
    assert len({kept.data_ptr(), *others}) == 3
    lending.end()
    assert {lending.empty(like).data_ptr() for _ in range(2)} == {*others}
    assert bool((kept == 1.0).all())


def test_where_the_system_knows_no_such_memory_none_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    lending, like = Pool(), torch.empty(SHAPE)
    for advice in ("MADV_HUGEPAGE", "MADV_FREE"):
        monkeypatch.setattr(mmap, advice, 9999)
        assert bool((lending.empty(like).fill_(1.0) == 1.0).all())
        lending.end()
        assert bool(lending._free) == (advice == "MADV_HUGEPAGE")


def test_bits_and_strides_are_those_of_memory_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for known in (True, False):
        monkeypatch.setattr(memory, "IS_KNOWN", known)
        SEEN.clear()
        p = Parameter(torch.linspace(-1, 1, SHAPE[0] * SHAPE[1]).reshape(SHAPE).bfloat16().t())
        optimizer = collage_neuron.compile(Seen([p], see=lambda p, g, m: (p.stride(), g.stride(), m.stride())))
        for k in range(3):
            p.grad = torch.full_like(p, 0.5 + k)
            optimizer.step()
        found.append(([*SEEN], [x.clone() for x in (p.detach(), *optimizer.state[p].values())]))
    assert found[0][0] == found[1][0] == [((1, SHAPE[1]),) * 3] * 3
    assert all(map(torch.equal, found[0][1], found[1][1]))
