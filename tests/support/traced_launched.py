"""Updates that are compiled though they reach values in every way that readers found (`collage_neuron/trace`)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Parameter
from traced_updates import all_of, launched


@launched
def what_an_operation_in_place_returns(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """With a tensor that is made in the step, and has a value."""
    fixed = torch.full(p.shape, 0.5)
    m = s.setdefault("m", torch.zeros_like(p)) if t % 2 else g.clone()
    one = torch.ones(p.shape)
    assert one.mul_(g) is one
    assert m.add_(fixed) is m
    assert p.mul_(0.9).add_(m, alpha=-lr) is p
    assert torch.add(p, fixed, alpha=-lr, out=p) is p
    s["m"] = m.mul_(0.5)
    o.kept[id(p)] = m


@launched
def tensors_made_where_it_is(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g.new(p.shape).fill_(2.0) * g, alpha=lr).add_(g.new_tensor([0.5]) * g, alpha=lr)


@launched
def a_number_first(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    d = (g * g + 1.0).sqrt()
    p.sub_(torch.where(g > 0, torch.div(torch.tensor(lr), d, out=torch.empty_like(d)), torch.tensor(lr) * g))


@launched
def momentum(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g)
    p.add_(s["m"], alpha=-lr)


@launched
def parameter_as_a_state(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if not s:
        s["m"] = Parameter(torch.zeros_like(p), requires_grad=False)
    p.sub_(s["m"].mul_(0.9).add_(g), alpha=lr)


@launched
def states_trade_places(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if not s:
        s["a"], s["b"], s["c"] = torch.zeros_like(p), torch.ones_like(p), p.clone()
    s["a"], s["b"], s["c"] = s["b"], s["c"], s["a"] * 0.9 + g
    p.sub_(s["a"] - s["b"] * 0.3 + s["c"], alpha=lr)


@launched
def a_state_is_a_copy_of_the_gradient(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if "before" in s:
        p.sub_((g - s["before"]).sign(), alpha=lr)
    s["before"] = g.clone()
    p.sub_(g, alpha=lr)


@launched
def a_state_comes_late(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if t == 5:
        s["z"], s["y"], s["x"] = p.clone(), torch.full_like(p, 2.0), torch.empty_like(p).copy_(g)
    p.sub_(g, alpha=lr)
    if t > 5:
        p.sub_(s["z"] * s["y"] + s["x"], alpha=lr)


@launched
def a_number_is_a_norm_later(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    n = g.norm()
    p.sub_(g * (torch.tensor(1.0) if t < 4 else n), alpha=lr)


@launched
def a_whole_number_becomes_another(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g * (t if t < 4 else t * 1.0), alpha=lr)
    p.mul_(1 if t % 2 else 0.99)


@launched
def an_exponent_changes(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g.abs().pow(1 + 0.1 * t) * g.sign(), alpha=lr)


@launched
def a_count_of_the_host(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if not s:
        s["m"], s["step"] = torch.zeros_like(p), torch.zeros(())
    s["step"] += 1
    p.sub_(s["m"].mul_(0.9).add_(g) / (1 - 0.9 ** s["step"]), alpha=lr)


@launched
def masks(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    there = (g > 0) & (p > 0) | (g < -1)
    p.sub_(torch.where(there ^ (g > 0.5), g, g * 0.1), alpha=lr)


@launched
def the_gradient_is_written(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    g.clamp_(-1, 1)
    p.grad.mul_(2)
    p.sub_(p.grad, alpha=lr)


@launched
def every_second_step_is_another(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g)
    p.sub_(s["m"] if t % 2 else s["m"].sign() * 0.5, alpha=lr)


@launched
def lists(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    torch._foreach_mul_([g], [torch.tensor(0.5 + t)])
    torch._foreach_add_([p], [g], alpha=-lr)


@launched
def lists_with_tensors_of_the_host(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    torch._foreach_addcmul_([p], [g], [torch.tensor(-lr * t)])
    torch._foreach_addcdiv_([p], [g], [torch.tensor(2.0 + t)], value=-lr)


@launched
def a_number_of_each(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if not s:
        s["v"], s["w"] = torch.zeros(()), torch.zeros(())
    returned = s["v"].mul_(0.9).add_(g.pow(2).sum(), alpha=0.1)
    s["w"].add_(g.abs().mean())
    p.sub_(g / returned.sqrt() + g / (returned * 2 + s["w"]), alpha=lr)


@launched
def a_number_of_each_as_torch_returns_it(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    v = s.setdefault("v", torch.zeros(())).mul_(0.9)
    assert torch.zeros(()).add_(g.norm()).mul_(v) is not v
    s["v"] = torch.add(v, g.norm(), out=v)
    p.sub_(g / s["v"], alpha=20 * lr)


@launched
def rows_and_columns(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if g.dim() < 2:
        p.sub_(g, alpha=lr)
        return
    if not s:
        s["r"], s["c"] = torch.zeros(g.shape[:-1]), g.new_zeros(g.shape[-1:])
    r = s["r"].mul_(0.9).add_((g * g).mean(-1), alpha=0.1)
    c = s["c"].lerp_((g * g).mean(-2), 0.1)
    p.sub_(g / ((r / r.mean()).unsqueeze(-1) * c).sqrt(), alpha=lr)


@launched
def a_state_in_another_shape(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if not s:
        s["m"] = torch.zeros(p.numel())
    p.sub_(s["m"].mul_(0.9).add_(g.reshape(-1)).view_as(p), alpha=lr)


@launched
def a_state_made_of_nothing_that_waits(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if not s:
        s["m"] = torch.zeros(p.shape)
    p.sub_(s["m"].mul_(0.9).add_(g), alpha=lr)


@launched
def branches(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g if t % 2 and (bool((g > 0).all()) or g.flatten()[0] > -9) else 2 * g, alpha=lr)


@launched
def numbers_that_are_read(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    m = s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g)
    n = m.norm().item()
    m.mul_(0.5)
    flat = m.view(-1)
    p.sub_(m, alpha=lr * n * float(m.abs().max()) / (1 + float(flat.sum()) ** 2))
    if not torch.equal(p, m) and p.sum() > 1e9:
        p.zero_()


@launched
def numbers_that_are_read_of_what_is_written_later(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    old, u = p.detach(), g.clone()
    before = u.view(-1)[:3]
    n = float(before.sum())
    u.add_(old).div_(3)
    m = float(before.sum()) + float(s["w"]) if s else 0.5
    s.setdefault("w", torch.zeros(())).add_(u.norm())
    g.clamp_(-1, 1)
    p.sub_(g * (n + m + float(g.norm()) + float(s["w"])), alpha=0.1 * lr)


@launched
def a_branch_of_a_number_that_is_read(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g / g.norm().clamp(min=1.0) if g.abs().max() > 1.5 else g, alpha=lr)


@launched
def all_gradients(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g / torch.stack([q.grad.norm() for q in all_of(o)]).norm(), alpha=10 * lr)


@launched
def a_sum_over_all(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    total = torch.zeros(())
    for q in all_of(o):
        total += q.grad.pow(2).sum()
    more = all_of(o)[0].grad.norm()
    for q in all_of(o)[1:]:
        more += q.grad.norm()
    p.sub_(g * total.sqrt().clamp(max=1.0) + g / more, alpha=lr)


@launched
def weights_of_all_as_they_are_now(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Those before this one have been updated already; and the sum is read before it is written again."""
    sizes = torch.stack([q.norm() for q in all_of(o)])
    total = sizes.sum()
    first = g * total
    total.add_(1)
    p.sub_(first + g * total + g * (sizes / total).max(), alpha=0.1 * lr)


@launched
def a_state_of_what_is_about_all(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    rms = torch.cat([q.grad.flatten() for q in all_of(o)]).square().mean().sqrt()
    m = s.setdefault("m", torch.zeros_like(p)).lerp_(g / rms, 0.1)
    p.sub_(m.mul(rms).clamp_(max=rms.item()), alpha=5 * lr)


@launched
def keeps_a_number(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    before, o.kept[p], o.kept["last"] = o.kept.get(p, torch.tensor(0.5)), g.norm().clamp(max=2.0), g.sum()
    p.sub_(g * before, alpha=lr)


@launched
def into_another(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    u = torch.empty_like(p)
    torch.mul(g, lr, out=u)
    torch.sub(p, u, out=p)


@launched
def data_is_another_tensor(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    new = p - lr * g
    difference = new - p
    p.data = new
    p.add_(difference)


@launched
def the_old_data_is_written(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    old = p.detach()
    p.data = p - lr * g
    p.add_(old - p, alpha=0.25)


@launched
def data_and_its_other_name(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    x = p * 1.0
    p.data = x
    x.sub_(g, alpha=lr)
