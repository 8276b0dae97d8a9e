"""Updates that reach values in every way that readers found, for steps whose operations wait (`collage_neuron/trace`).

Each is the update of one parameter: `(optimizer, p, gradient, state, lr, number of the step)`. In `LAUNCHED` are those
whose steps are compiled; `COMPUTED` need a value at once, or do what cannot be compiled, and run as written.
"""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

Update = Callable[[Any, Any, Any, dict[str, Any], float, int], object]

LAUNCHED: dict[str, Update] = {}
COMPUTED: dict[str, Update] = {}


def launched(update: Update) -> Update:
    """Registers an update that is compiled."""
    return LAUNCHED.setdefault(update.__name__, update)


def computed(update: Update) -> Update:
    """Registers one that is not."""
    return COMPUTED.setdefault(update.__name__, update)


class Stepping(torch.optim.Optimizer):
    """The optimizer of an update; `kept` is what it keeps."""

    def __init__(self, params: Any, update: Update, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.update, self.t = update, 0
        self.kept: dict[Any, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.t += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(self, p, p.grad, self.state[p], group["lr"], self.t)


# --- compiled ---------------------------------------------------------------------------------------------------------


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


def _all(o: Any) -> list[Any]:
    return [q for group in o.param_groups for q in group["params"]]


@launched
def all_gradients(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g / torch.stack([q.grad.norm() for q in _all(o)]).norm(), alpha=10 * lr)


@launched
def a_sum_over_all(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    total = torch.zeros(())
    for q in _all(o):
        total += q.grad.pow(2).sum()
    more = _all(o)[0].grad.norm()
    for q in _all(o)[1:]:
        more += q.grad.norm()
    p.sub_(g * total.sqrt().clamp(max=1.0) + g / more, alpha=lr)


@launched
def weights_of_all_as_they_are_now(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Those before this one have been updated already; and the sum is read before it is written again."""
    sizes = torch.stack([q.norm() for q in _all(o)])
    total = sizes.sum()
    first = g * total
    total.add_(1)
    p.sub_(first + g * total + g * (sizes / total).max(), alpha=0.1 * lr)


@launched
def a_state_of_what_is_about_all(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    rms = torch.cat([q.grad.flatten() for q in _all(o)]).square().mean().sqrt()
    m = s.setdefault("m", torch.zeros_like(p)).lerp_(g / rms, 0.1)
    p.sub_(m.mul(rms).clamp_(max=rms.item()), alpha=5 * lr)


# --- computed at once -------------------------------------------------------------------------------------------------


@computed
def reads_memory(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(torch.from_numpy(g.numpy() * 0.5), alpha=lr)
    whole = p.data.numpy()
    whole *= 0.99
    p.mul_(1 + g.tolist()[0] * 0.01 if g.dim() == 1 else len(f"{g.sum():.3f} {g!r}") * 1e-5 + 0.98)


@computed
def reads_late(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g, alpha=lr)
    if t % 3 == 0:
        whole = p.data.numpy()
        whole *= 0.5


@launched
def keeps_a_number(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    before, o.kept[p], o.kept["last"] = o.kept.get(p, torch.tensor(0.5)), g.norm().clamp(max=2.0), g.sum()
    p.sub_(g * before, alpha=lr)


@computed
def a_number_after_each_operation(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Each depends on all before it: to compute them one by one would take ever longer."""
    x = g
    for _ in range(40):
        x = x * 0.9 + g * (1 + 0.01 * float(x.mean()))
    p.sub_(x, alpha=lr)


@computed
def elements_of_another(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g, alpha=lr)
    if p.shape == (5, 5):
        p.sub_(_all(o)[0].grad.flatten()[:25].sum() * g.mul(_all(o)[1].grad[:5]), alpha=lr)


@computed
def keeps_what_torch_returns(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(o.kept.get(p, 0.0) * g, alpha=lr).sub_(g, alpha=lr)
    o.kept[p] = torch.add(g.norm(), 1.0, out=torch.zeros(()))


@computed
def a_state_in_an_array(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if not s:
        o.kept[p] = np.zeros(1, dtype=np.float32)
        s["v"] = torch.from_numpy(o.kept[p])
    s["v"].add_(g.norm())
    p.sub_(g * float(o.kept[p][0]), alpha=lr)


@computed
def a_view_of_a_state(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if not s:
        s["v"] = torch.zeros(2)
    s["v"][0].add_(g.norm())
    p.sub_(g * float(s["v"][0]), alpha=lr)


@computed
def saves(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    u, file = g * 2, io.BytesIO()
    torch.save({"u": u}, file)
    file.seek(0)
    p.sub_(torch.load(file)["u"] + copy.deepcopy(u) + pickle.loads(pickle.dumps(u)), alpha=lr)


@computed
def keeps_a_value(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if p in o.kept:
        p.sub_(o.kept[p], alpha=lr)
    o.kept[p] = g * 0.5
    p.sub_(g, alpha=lr)


@computed
def keeps_a_value_in_a_function(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if p in o.kept:
        p.sub_(o.kept[p](), alpha=lr)
    u = g * 0.5
    o.kept[p] = lambda: u * 2
    p.sub_(u, alpha=lr)


@computed
def keeps_a_value_as_other_data(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    slow = o.kept.setdefault(p, torch.zeros(p.shape))
    p.sub_(slow, alpha=lr).sub_(g, alpha=lr)
    slow.data = p.data.clone()


@computed
def keeps_a_value_in_cpp(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    other = o.kept.setdefault(p, torch.zeros(p.shape))
    if other.grad is not None:
        p.sub_(other.grad, alpha=lr)
    other.grad = g * 0.1
    p.sub_(g, alpha=lr)


@computed
def looks_whether_a_value_is_gone(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    u = g * 0.5
    if p in o.kept and o.kept[p]() is not None:
        p.mul_(0.5)
    o.kept[p] = weakref.ref(u)
    p.sub_(u, alpha=lr)


@computed
def keeps_the_gradient(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(o.kept.setdefault(p, g), alpha=lr).sub_(g, alpha=lr)


@computed
def keeps_a_replaced_state(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if p in o.kept:
        p.sub_(o.kept[p], alpha=lr)
    o.kept[p] = s.get("m", torch.zeros_like(p))
    s["m"] = o.kept[p] * 0.9 + g


@computed
def a_state_is_the_parameter(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    s.setdefault("me", p.data).mul_(0.99)
    p.sub_(g, alpha=lr)


@computed
def two_states_share_memory(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if not s:
        s["a"] = torch.zeros_like(p)
        s["b"] = s["a"].view(p.shape)
    s["a"].mul_(0.9).add_(g)
    p.sub_(s["b"].add_(g), alpha=lr)


@computed
def a_state_is_removed(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if t % 2:
        s["a"] = g * 0.5
    else:
        p.sub_(s.pop("a"), alpha=lr)
    p.sub_(g, alpha=lr)


@computed
def a_state_overflows(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    s.setdefault("c", torch.ones_like(p, dtype=torch.int32)).mul_(65537)
    p.sub_(g * (s["c"] / 2**31), alpha=lr)


@computed
def a_state_in_double(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    s.setdefault("c", torch.zeros_like(p, dtype=torch.float64)).add_(g.double() * 1e-9 + 1.0)
    p.sub_(g * ((s["c"] - t) * 1e9).float(), alpha=lr)


@computed
def a_value_in_double(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(((g.double() + 1e8) - 1e8).float(), alpha=lr)


@computed
def a_zero_with_a_sign(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(torch.copysign(g, torch.full_like(p, 0.0 if t < 4 else -0.0)), alpha=lr)


@computed
def numbers_as_tensors(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    n = torch.stack([g.norm(), torch.tensor(1.0)]).max()
    p[0] = 0.5
    p.sub_(torch.where(torch.tensor(t % 2 == 0), g, g * 0.5) / n.item(), alpha=lr)


@computed
def parts(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.view(-1)[1:].sub_(g.reshape(-1)[1:], alpha=lr)
    p.T.mul_(0.99) if p.dim() == 2 else p.mul_(0.98)


@launched
def into_another(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    u = torch.empty_like(p)
    torch.mul(g, lr, out=u)
    torch.sub(p, u, out=p)


@computed
def noise(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g, alpha=lr).add_(torch.randn_like(p), alpha=lr)


@computed
def functions_of_functions(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    u = torch.func.vmap(lambda a, b: a * 0.9 + b.sin())(g, p)
    v = torch.func.grad(lambda a: (a * a * g).sum())(p)
    p.sub_(u + v, alpha=lr)


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


@computed
def the_gradient_is_replaced(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.grad = g.sign()
    p.sub_(p.grad, alpha=lr)


def initial(dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Parameter]:
    """The parameters of a case."""
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape).bfloat16().to(device, dtype)) for shape in ((4, 6), (6,), (5, 5))]


def set_gradients(params: list[Any], t: int) -> None:
    """Gives the parameters the gradients of a step."""
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * t + i)).bfloat16()
        p.grad = g.to(p.device, p.dtype)


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest error of a parameter, in distances that it has moved."""
    start = initial(torch.float32)
    each = zip(found, exact, start, strict=True)
    return max(float((x.double() - y.double()).norm() / (y - p).detach().double().norm()) for x, y, p in each)
