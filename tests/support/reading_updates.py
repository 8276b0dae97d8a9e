"""Updates that read numbers of values that wait, in all ways that make it hard to compute them ahead."""

from __future__ import annotations

from typing import Any

import torch
from traced_updates import place

READ: list[float] = []


def read(x: torch.Tensor) -> float:
    READ.append(x.item())
    return READ[-1]


def adam(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> torch.Tensor:
    """Adam's direction: two numbers of it are others in each step, and the same for all parameters."""
    m, v = s.setdefault("m", torch.zeros_like(p)), s.setdefault("v", torch.zeros_like(p))
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.99).addcmul_(g, g, value=0.01)
    found: torch.Tensor = (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
    return found


def that_is_written_later(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    m = s.setdefault("m", torch.zeros_like(p))
    first, total = read(m.norm()), m.sum()
    before = read(total)
    m.mul_(0.9).add_(g)
    total.add_(m.sum())
    p.sub_(m, alpha=lr / (1 + first + abs(before) + abs(read(total)) + read(m.norm()) + read(p.norm())))


def in_some_steps(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """A step that asks for others than the last one."""
    u = adam(o, p, g, s, lr, t)
    if (place(o, p) + t // 3) % 3:
        u = u / (1 + read(u.norm()))
    p.sub_(u, alpha=lr / (1 + read(g.norm())))


def by_numbers_that_are_alike_at_first(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Guesses go by the wrong one of two, and by signs of zeros."""
    rate = 0.5 if t < 4 else 0.5 / t
    u = g * 0.5 + p * rate
    u = u.mul_(0.0 if t % 2 or place(o, p) % 2 else -0.0).add_(g)
    p.sub_(u, alpha=lr / (1 + read(u.norm())) * (1 + read((u * 0.0 * (-1) ** t).sum().neg().reciprocal().sign())))


def of_a_sum_that_goes_on(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """What is large is let go between two values, and computed again from what the step began with."""
    q = s.setdefault("q", torch.zeros_like(p)).add_(g)
    p.sub_(q, alpha=lr * min(1.0, read(q.norm())))
    p.mul_(1 / (1 + lr * read(p.norm())))


def of_what_is_known_after_all(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """A number of all is wrong at first: then values are computed ahead once more, and others were not ahead."""
    params = o.param_groups[0]["params"]
    n = s.setdefault("n", torch.zeros((), dtype=torch.float32))
    n.mul_(0.9).add_(g.norm())
    if place(o, p) < len(params) - 1:
        return
    total = sum(read(o.state[q]["n"]) for q in params)
    for q in params:
        q.sub_(q.grad, alpha=lr / (1 + 0.1 * total))
        o.kept["size"] = read(q.norm())
    for q in params:
        q.mul_(1 - 0.01 * min(1.0, lr * read(o.state[q]["n"]) / (1 + o.kept["size"])))


def of_two_numbers(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    u = (g.add(0.7, alpha=-0.3) * 3).maximum(-g).lerp(p, g.abs().clamp(max=1.0)).lerp(p, 1.0 / t)
    p.sub_(g, alpha=lr / (1 + read(u.sum()) ** 2 + read(u.abs().min()) + read(u.max())))


def of_signs_of_zeros(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    zero, other = p - p, (g - g).neg()
    signs = (zero.lerp(other, weight).reciprocal().sign().sum() for weight in (1.0, 1))
    p.sub_(g, alpha=lr / (99 + sum(map(read, signs))))


def of_views(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    m = s.setdefault("m", torch.zeros_like(p))
    flat = m.view(-1) if m.dim() else m
    flat.mul_(0.9)
    m.add_(g)
    flat.clamp_(-1.0, 1.0 + t)
    p.sub_(m, alpha=lr / (1 + read(flat.abs().sum()) + read(m.t().norm() if m.dim() == 2 else m.norm())))


def of_rows(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """With states that are in no words."""
    sizes = read(g.norm())
    if g.dim() == 2:
        r, c = s.setdefault("r", torch.zeros(len(g), 1)), s.setdefault("c", torch.zeros(1, g.shape[1]))
        r.lerp_(torch.norm(g, dim=-1, keepdim=True).square(), 0.1)
        c.lerp_(g.square().mean(dim=0, keepdim=True), 0.1)
        u = g / ((r * c).sqrt() + 1e-6)
        sizes += read(u.norm(p=1)) + read(r.sum()) + abs(read(u.mean(dim=1).sum()))
    p.sub_(g, alpha=lr / (1 + sizes))


def of_a_sum_of_all(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """It begins with a number of the host."""
    before = o.kept.pop("total") if place(o, p) else torch.zeros((), dtype=torch.float32)
    o.kept["total"] = before + g.norm()
    p.sub_(g / (1 + o.kept["total"]), alpha=lr / (1 + read(o.kept["total"])))


def in_inference_mode_at_times(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    m = s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g)
    with torch.inference_mode() if t % 2 else torch.no_grad():
        size = read(m.norm())
    p.sub_(m, alpha=lr / (1 + size))


def and_ends_earlier(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Than the step before: what that one has known is not known of this one."""
    p.sub_(g, alpha=lr / (1 + read(g.norm())))
    if t % 3 and place(o, p) == 9:
        p.mul_(1 - 0.1 * lr / (1 + read(p.sum().abs())))
        if t % 2:
            p.sub_(g, alpha=lr * read(p.mean()))


def of_the_second_as_it_was(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Its norm is needed at the end of the step, when a later value was asked for."""
    second = o.param_groups[0]["params"][1]
    p.sub_(g / (1 + second.norm()), alpha=lr)
    second.mul_(0.9)
    p.sub_(g, alpha=lr / (1 + read(second.norm())))


def that_asks_first(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """What it reads is true or false."""
    size = g.norm()
    m = s.setdefault("m", torch.zeros_like(p)).lerp_(g / size if size > 5 else g, 0.1)
    READ.append(bool(torch.isfinite(m).all()))
    p.sub_(m, alpha=lr if READ[-1] else 0.0)


def of_what_it_was_in_some_steps(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """A norm that is read after others is of what was written since."""
    m = s.setdefault("m", torch.zeros_like(p)).add_(g)
    before, last = m.norm(), place(o, p) == len(o.param_groups[0]["params"]) - 1
    o.kept.setdefault("before", before)
    m.mul_(0.5)
    p.sub_(m, alpha=lr / (1 + read(m.norm())))
    if last and t % 3 == 0:
        p.mul_(1 - 0.1 * lr / (1 + read(before) + read(o.kept["before"])))
    if last:
        o.kept.clear()


def of_parts_and_stacks(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """What is stacked is not computed ahead."""
    m = s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g)
    first = read((m.unbind(0) if m.dim() else [m])[0].norm())
    both = read(torch.stack([m, g]).norm()) + read(m.norm())
    p.sub_(m, alpha=lr * first / (1 + both + read(torch.stack([m, -g]).norm())))


UPDATES = (
    of_parts_and_stacks,
    that_asks_first,
    of_what_it_was_in_some_steps,
    and_ends_earlier,
    of_the_second_as_it_was,
    in_inference_mode_at_times,
    of_rows,
    of_a_sum_of_all,
    that_is_written_later,
    in_some_steps,
    by_numbers_that_are_alike_at_first,
    of_a_sum_that_goes_on,
    of_what_is_known_after_all,
    of_two_numbers,
    of_signs_of_zeros,
    of_views,
)
