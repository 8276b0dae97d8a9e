"""Updates that need a value at once, or do what cannot be compiled: they run as written (`collage_neuron/trace`)."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from typing import Any

import numpy as np
import torch
from traced_updates import all_of, computed


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
        p.sub_(all_of(o)[0].grad.flatten()[:25].sum() * g.mul(all_of(o)[1].grad[:5]), alpha=lr)


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


@computed
def noise(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g, alpha=lr).add_(torch.randn_like(p), alpha=lr)


@computed
def functions_of_functions(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    u = torch.func.vmap(lambda a, b: a * 0.9 + b.sin())(g, p)
    v = torch.func.grad(lambda a: (a * a * g).sum())(p)
    p.sub_(u + v, alpha=lr)


@computed
def the_gradient_is_replaced(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.grad = g.sign()
    p.sub_(p.grad, alpha=lr)
