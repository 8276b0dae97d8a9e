"""How an update reaches values: operations, views, `p.data`, what it reads and looks at, and what it keeps."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.autograd import forward_ad
from traced_updates import all_of, computed, launched

# --- in one line ------------------------------------------------------------------------------------------------------

IN_ONE_LINE: dict[str, Any] = {
    "numpy_writes_the_weights": lambda o, p, g, s, lr, t: p.sub_(g, alpha=lr).data.numpy().__imul__(0.99),
    "a_length_of_text": lambda o, p, g, s, lr, t: p.sub_(g, alpha=lr * len(f"{g.sum():.3f} {g!r}") * 1e-2),
    "a_value_in_double": lambda o, p, g, s, lr, t: p.sub_(((g.double() + 1e8) - 1e8).float(), alpha=lr),
    "a_slice": lambda o, p, g, s, lr, t: p.view(-1)[1:].sub_(g.reshape(-1)[1:], alpha=lr),
    "an_element": lambda o, p, g, s, lr, t: p.sub_(g, alpha=lr).__setitem__(0, 0.5),
    "a_neighbour": lambda o, p, g, s, lr, t: p.sub_(g - 0.5 * g.roll(1, 0), alpha=lr),
    "by_position": lambda o, p, g, s, lr, t: p.sub_(g * torch.linspace(0, 1, p.numel()).view_as(p), alpha=lr),
    "a_mask_of_before": lambda o, p, g, s, lr, t: p.sub_(g * o.kept[id(p)], alpha=lr),
    "memory_is_set": lambda o, p, g, s, lr, t: p.set_(p.detach() - lr * g),
    "noise": lambda o, p, g, s, lr, t: p.sub_(g, alpha=lr).add_(torch.randn_like(p), alpha=lr),
}


def _before(params: list[Any]) -> dict[Any, Any]:
    return {id(p): (p.detach() > 0).float() for p in params}


for _name, _update in IN_ONE_LINE.items():
    _update.__name__, _update.kept = _name, _before
    computed(_update)

# --- operations and numbers -------------------------------------------------------------------------------------------


@launched
def what_an_operation_in_place_returns(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """With a tensor that is made in the step, and has a value; and numbers before tensors, as torch once had them."""
    fixed = torch.full(p.shape, 0.5)
    m = s.setdefault("m", torch.zeros_like(p)) if t % 2 else g.clone()
    one = torch.ones(p.shape)
    assert one.mul_(g) is one
    assert m.add_(fixed) is m
    assert p.mul_(0.9).add_(-lr, m) is p
    assert torch.add(p, fixed, alpha=-lr, out=p) is p
    s["m"] = m.mul_(0.5)


@launched
def an_exponent_changes(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g.abs().pow(1 + 0.1 * t) * g.sign(), alpha=lr)


@launched
def masks(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    there = (g > 0) & (p > 0) | (g < -1)
    mask = (g * p > 0).to(g.dtype)
    mask /= 0.5
    p.sub_(torch.where(there != (g > 0.5), g, g * 0.1) * mask.div_(mask.mean().clamp_(min=1e-3)), alpha=lr)


# --- views and data ---------------------------------------------------------------------------------------------------


@launched
def into_another(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    u = torch.empty_like(p)
    torch.mul(g, lr, out=u)
    torch.sub(p, u, out=p)
    p.view(-1).sub_(g.reshape(-1), alpha=lr)


@computed
def with_tangents(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(p.detach(), g.detach())
        rate = forward_ad.unpack_dual((dual * dual).sum()).tangent
    p.sub_(g, alpha=lr * (0.0 if rate is None else float(rate)))


@launched
def read_under_autocast(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Products of before are in fp32, whenever they are computed."""
    product = g.view(len(g), -1) @ g.view(len(g), -1).t()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        p.sub_(g, alpha=lr * float(product.mean()))


@computed
def under_autocast(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    product = g.view(len(g), -1) @ g.view(len(g), -1).t()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        after = product @ product
    assert (product.dtype, after.dtype) == (torch.float32, torch.bfloat16)
    p.sub_(g, alpha=lr * float(after.float().mean()))


@computed
def into_several(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """What is returned is what was given, and is kept as that."""
    g.mul_(0.5)
    s["sorted"], _ = torch.sort(g * 2, out=(g, torch.zeros(g.shape, dtype=torch.int64)))
    assert s["sorted"] is g
    p.sub_(g, alpha=lr)


@launched
def data_is_another_tensor(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    new = p - lr * g
    difference = new - p
    old = p.detach()
    p.data = new
    p.add_(difference).add_(old - p, alpha=0.25)


@computed
def temporaries_are_swapped_and_read(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    a, b = g * 1.0, p * 0.1
    torch.utils.swap_tensors(a, b)
    p.sub_(a * (1 + (float(a.sum()) if t % 2 else 0.0) * 1e-3), alpha=lr)


@computed
def an_expanded_tensor_is_written(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    m = (g * 0).sum().expand(g.shape)
    try:
        m.add_(g)
    except RuntimeError:
        m = m.clone()
    p.sub_(g + m, alpha=lr)


# --- what is read -----------------------------------------------------------------------------------------------------


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
def branches(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """By the number of the step, by elements, by a size, and by what is the same in two tensors."""
    p.sub_(g if t % 2 and (bool((g > 0).all()) or g.flatten()[0] > -9) else 2 * g, alpha=lr)
    p.sub_(g / g.norm().clamp(min=1.0) if g.abs().max() > 1.5 else g, alpha=lr)
    last = s.setdefault("last", torch.zeros_like(p))
    if torch.any(g) and not torch.equal(last, g):
        p.mul_(0.99)
    last.copy_(g)


# --- all parameters ---------------------------------------------------------------------------------------------------


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


@computed
def elements_of_another(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g, alpha=lr)
    if p.shape == (5, 5):
        p.sub_(all_of(o)[0].grad.flatten()[:25].sum() * g.mul(all_of(o)[1].grad[:5]), alpha=lr)


# --- what is kept, and what refers to it ------------------------------------------------------------------------------


@launched
def keeps_a_number(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    before, o.kept[p], o.kept["last"] = o.kept.get(p, torch.tensor(0.5)), g.norm().clamp(max=2.0), g.sum()
    p.sub_(g * before, alpha=lr)


@computed
def keeps_what_torch_returns(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(o.kept.get(p, 0.0) * g, alpha=lr).sub_(g, alpha=lr)
    o.kept[p] = torch.add(g.norm(), 1.0, out=torch.zeros(()))


@computed
def keeps_a_value_as_other_data(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    slow = o.kept.setdefault(p, torch.zeros(p.shape))
    p.sub_(slow, alpha=lr).sub_(g, alpha=lr)
    slow.data = p.data.clone()


@computed
def a_view_of_one_element_is_kept(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    kept = vars(o).setdefault("elements", {})
    if id(p) in kept:
        kept[id(p)].mul_(0.5)
    p.sub_(g, alpha=lr)
    kept[id(p)] = p.view(-1)[0]


@launched
def marks_on_values(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    u = g * 0.5
    if hasattr(u, "seen") or hasattr(g, "seen") or u.requires_grad:
        p.mul_(0.5)
    u.seen = g.seen = True
    u.requires_grad_()
    p.sub_(u.detach(), alpha=lr)


# --- errors that are caught -------------------------------------------------------------------------------------------


@launched
def whatever_is_raised_is_caught(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    rate = scale = 1.0
    with contextlib.suppress(Exception):
        rate = float(g.abs().max()) / 2
    try:
        scale = 1 / g.norm().item()
    except Exception:
        scale = 7.0
    finally:
        p.sub_(g, alpha=lr * rate * scale)


# --- other threads ----------------------------------------------------------------------------------------------------

POOL = ThreadPoolExecutor(1)


@torch.no_grad()
def _descend(p: Any, g: Any, lr: float) -> None:
    p.sub_(g, alpha=lr)


@computed
def a_thread_that_was_there(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Nobody looks at the error that a value that waits would raise there."""
    p.mul_(0.9)
    POOL.submit(_descend, p, g, lr).exception()


# --- gradients of its own ---------------------------------------------------------------------------------------------


@computed
def backward_into_a_parameter_and_a_temporary(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    u = (g * 2).requires_grad_()
    p.grad = None
    with torch.enable_grad():
        ((p - 1) ** 2).sum().backward()
        (u * u).sum().backward()
    p.sub_(p.grad + u.grad, alpha=lr)
