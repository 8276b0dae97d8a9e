"""On an XLA device what a step makes, writes, keeps and returns aliases as in plain torch, waiting or not.

There views alias by a key of torch's dispatcher (`Functionalize`), which sees an operation before placeholders do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import xla_runs
from torch import Tensor
from torch.nn import Parameter
from traced_updates import Stepping

import collage_neuron


def once(o: Any, p: Any, name: str, make: Any) -> Tensor:
    """A tensor that the optimizer makes in its first step, of the parameter, and keeps."""
    if (name, id(p)) not in o.kept:
        o.kept[name, id(p)] = make()
    found: Tensor = o.kept[name, id(p)]
    return found


def rows(p: Tensor) -> Tensor:
    return torch.arange(16.0, device=p.device).view(4, 4) + 1


def written_with_a_tensor(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    p[0].sub_(once(o, p, "c", lambda: rows(p))[1], alpha=0.1)


def indexed_on_the_host(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    v = p[torch.tensor([0, 2, 1])]
    v[0].mul_(0.5)
    p.sub_(v.sum(0), alpha=0.1)


def made_on_the_host(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    c = once(o, p, "c", lambda: torch.zeros(4).to(p.device))
    c[0].add_(1.0)
    p.mul_(1 - 0.1 * c.sum().item())


def made_and_flipped(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    c = once(o, p, "c", lambda: torch.arange(16.0).view(4, 4).to(p.device))
    p.mul_(1 - 0.01 * c.flip(0)[0].sum().item())


def written_twice(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    r = p[0]
    r.bernoulli_(1.0)
    r.mul_(0.5)


def seen_otherwise(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    x = s.setdefault("m", torch.zeros_like(p)).add_(g)[0]
    x.unsqueeze_(0)
    x.mul_(0.5)
    p.sub_(s["m"], alpha=0.1)


def in_a_list(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    c = once(o, p, "c", lambda: rows(p))
    torch._foreach_mul_([p, c], 0.5)
    p.sub_(c, alpha=0.1)


def drawn_in_a_list(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    v = [torch.empty_like(p).normal_(0.0, 0.0), torch.empty_like(p).normal_(0.0, 0.0)]
    torch._foreach_add_(v, [g, p])
    p.sub_(v[0] + v[1], alpha=0.1)


def in_a_list_by_its_overload(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    c = once(o, p, "c", lambda: rows(p))
    torch.ops.aten._foreach_mul_.Scalar([p, c], 0.5)
    p.sub_(c, alpha=0.1)


def into_a_tensor_of_its_own(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    c = once(o, p, "c", lambda: rows(p))
    torch.mul(p, g, out=c)
    p.sub_(c, alpha=0.1)


def with_two_results(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    m = s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g)
    torch.sort(g[0], out=(m[0], torch.empty(4, dtype=torch.long, device=p.device)))
    p.sub_(m, alpha=0.1)


def with_a_view_of_a_state(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    m = s.setdefault("m", torch.zeros_like(p)).add_(g)
    p.view(-1)[:3].sub_(o.kept.get(id(p), m.view(-1)[:3]), alpha=0.1)
    o.kept[id(p)] = m.view(-1)[:3]
    p.sub_(m.mul_(0.5), alpha=0.1)


UPDATES = (
    written_with_a_tensor, indexed_on_the_host, made_on_the_host, made_and_flipped, written_twice, seen_otherwise,
    in_a_list, in_a_list_by_its_overload, drawn_in_a_list, into_a_tensor_of_its_own, with_two_results,
    with_a_view_of_a_state,
)  # fmt: skip


def stepped(update: Any, device: torch.device | str, strategy: str, steps: int = 4) -> list[Tensor]:
    draws = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(4, 4, generator=draws).bfloat16().float().to(device)) for _ in range(2)]
    optimizer: Any = Stepping(params, update)
    if strategy:
        collage_neuron.compile(optimizer, strategy=strategy, verbose=False, validate="off")
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(4, 4, generator=draws).bfloat16().to(device, p.dtype)
        optimizer.step()
        if strategy:
            xla_runs.torch_xla.sync()
    return [(collage_neuron.exact_value(optimizer, p) if strategy else p.detach()).cpu() for p in params]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("update", UPDATES)
def test_a_step_aliases_as_in_plain_torch(update: Any, xla: torch.device) -> None:
    for x, plain in zip(stepped(update, xla, "fp32"), stepped(update, "cpu", ""), strict=True):
        torch.testing.assert_close(x, plain, rtol=1e-5, atol=1e-5)


def _in_place(module: Any) -> None:
    module.count.add_(1.0)


def _by_its_overload(module: Any) -> None:
    torch.ops.aten.add_.Tensor(module.count, 1.0)


def _in_part(module: Any) -> None:
    for row in module.count:
        row.add_(1.0)


def _by_another(module: Any) -> None:
    module.count = module.count + 1


def _by_its_data(module: Any) -> None:
    module.count.data = module.count + 1


def _by_its_name(module: Any) -> None:
    torch.ops.aten.add_.Tensor(self=module.count, other=1.0)


def _by_what_torch_wrote(module: Any) -> None:
    torch.nn.init.constant_(module.count, float(module.count.max()) + 1)


def _as_a_gradient(module: Any) -> None:
    module.weight.grad.add_(1.0)


WRITES = [
    _in_place, _by_its_overload, _in_part, _by_another, _by_its_data, _by_its_name, _by_what_torch_wrote,
    _as_a_gradient,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("write", WRITES)
def test_nothing_is_written_that_is_only_tried(device: str, write: Any, xla: torch.device) -> None:
    """`compile` and the first step try the code on copies; what a closure has, here a module, has none."""
    module: Any = torch.nn.Module()
    module.register_buffer("count", torch.zeros(3, 3).to(device))
    module.weight = Parameter(torch.zeros(3, 3).to(device))
    module.weight.grad = module.count

    def update(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
        write(module)
        p.sub_(g, alpha=0.1)

    stepped(update, xla if device == "xla" else "cpu", "fp32", 3)
    assert module.count.cpu().eq(3 * 2).all()


def _momentum(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    p.sub_(s.setdefault("m", torch.zeros_like(p)).add_(g @ torch.eye(4, device=g.device)), alpha=0.5)


def _stateless(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    p.sub_(g @ torch.eye(4, device=g.device), alpha=2**-12)  # bf16 would round it back


@pytest.mark.parametrize(
    ("update", "strategy", "end"),
    [(None, "fp32", -0.5), (_momentum, "split422", -2.0), (_stateless, "split433", 1 - 3 * 2**-12)],
)
def test_a_full_graph_reads_no_value(update: Any, strategy: str, end: float, xla: torch.device) -> None:
    """torch_xla raises where a program would run; one parameter gets no gradient."""
    params = [Parameter(torch.ones(4, 4).bfloat16().to(xla)) for _ in range(3)]
    plain = torch.optim.SGD(params, lr=0.5) if update is None else Stepping(params, update)
    optimizer = collage_neuron.compile(plain, verbose=False, validate="on", strategy=strategy)

    def step() -> None:
        for p in params[:2]:
            p.grad = torch.ones_like(p)
        optimizer.step()

    full = xla_runs.torch_xla.compile(step, full_graph=True)
    for _ in range(3):
        full()
    assert torch.equal(collage_neuron.exact_value(optimizer, params[0]).cpu(), torch.full((4, 4), end))
