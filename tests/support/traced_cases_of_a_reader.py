"""More updates that a reader wrote to make traced steps wrong; see `traced_cases`."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # the old one
from torch.utils.weak import WeakIdKeyDictionary
from traced_updates import computed, launched


class Doubles(TorchDispatchMode):
    """Doubles products."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.mul.Tensor else out


@launched
def a_sign_of_zero_of_each_parameter(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(torch.copysign(g, 0.0 if p.dim() == 2 else -0.0), alpha=lr)


@launched
def zero_times_a_sign(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    s["m"] = torch.full_like(p, 1.0).mul_(0.0 if p.dim() == 2 else -0.0)
    p.sub_(torch.where(torch.signbit(s["m"]), g, g * 2), alpha=lr)


@computed
def temporaries_are_swapped(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    a, b = g * 1.0, p * 0.1
    torch.utils.swap_tensors(a, b)
    p.sub_(a, alpha=lr)


@computed
def temporaries_are_swapped_and_read(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    a, b = g * 1.0, p * 0.1
    torch.utils.swap_tensors(a, b)
    p.sub_(a * (1 + float(a.sum()) * 1e-3), alpha=lr)


@launched
def data_twice_and_read(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.data = p - lr * g
    p.data = p - 2 * lr * g
    p.mul_(1 + float(p.sum()) * 1e-3)


@launched
def data_there_and_back_and_read(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    old = p.data
    p.data = p - lr * g
    x = p * g
    p.data = old
    p.sub_(x * float(x.sum()) * 0.1, alpha=lr)


@computed
def an_error_inside_of_fill_is_caught(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    with contextlib.suppress(RuntimeError):
        p.add_(g.expand(2, *g.shape))
    p.sub_(g, alpha=lr)
    try:
        n = float(g.sum())
    except RuntimeError:
        n = 0.0
    p.mul_(1 + 1e-3 * n)


@launched
def attribute_of_a_temporary(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    u = g * 0.5
    if hasattr(u, "seen"):
        p.mul_(0.5)
    u.seen = True
    p.sub_(u, alpha=lr)


@launched
def requires_grad_of_a_temporary(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    u = g * 0.5
    if u.requires_grad:
        p.mul_(0.5)
    u.requires_grad_()
    p.sub_(u.detach(), alpha=lr)


@launched
def attribute_of_a_gradient(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if hasattr(g, "seen"):
        p.mul_(0.5)
    g.seen = True
    p.sub_(g, alpha=lr)


@launched
def weak_reference_to_a_gradient(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if p in o.kept and o.kept[p]() is not None:
        p.mul_(0.5)
    o.kept[p] = weakref.ref(g)
    p.sub_(g, alpha=lr)


@launched
def weak_dictionary_of_gradients(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    d = o.kept.setdefault("d", WeakIdKeyDictionary())
    d[g] = d.get(g, 0) + 1
    p.sub_(g, alpha=lr * d[g])


@launched
def finalizer_of_a_gradient(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    n = o.kept.setdefault("n", [])
    p.sub_(g, alpha=lr * (1 + len(n)))
    weakref.finalize(g, n.append, 1)


@computed
def int_instead_of_float_with_a_mask(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    x = (g > 0) * (2.0 if t < 4 else 2)
    if x.dtype == torch.int64:
        p.mul_(0.5)
    p.sub_(x, alpha=lr)


@computed
def int_instead_of_float_overflows(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    x = (g > 0) * (2.0**62 if t < 4 else 2**62)
    p.sub_(x * 4 / 2.0**64 + g, alpha=lr)


@computed
def a_dispatch_mode_is_on_when_values_are_computed(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    with Doubles():  # type: ignore[no-untyped-call]  # torch's own signature
        u = g * 1.0
        u.tolist()
    p.sub_(u, alpha=lr)


@computed
def a_capsule(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    u = g * 2
    p.sub_(from_dlpack(to_dlpack(u)), alpha=lr)


@computed
def an_error_of_shapes_is_caught(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    try:
        p.add_(g.reshape(-1)[:5])
    except RuntimeError:
        p.sub_(g, alpha=lr)


@computed
def an_expanded_tensor_is_written(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    m = (g * 0).sum().expand(g.shape)
    try:
        m.add_(g)
    except RuntimeError:
        m = m.clone()
    p.sub_(g + m, alpha=lr)


@computed
def differentiates_a_parameter(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    with torch.enable_grad():
        (d,) = torch.autograd.grad((p**2).sum(), [p])
    p.sub_(d + g, alpha=lr)


@computed
def backward_into_a_parameter(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.grad = None
    with torch.enable_grad():
        ((p - 1) ** 2).sum().backward()
    p.sub_(p.grad, alpha=lr)


@computed
def backward_into_a_temporary(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    u = (g * 2).requires_grad_()
    with torch.enable_grad():
        (u * u).sum().backward()
    p.sub_(u.grad, alpha=lr)


@launched
def read_in_inference_mode(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    u = g * 2
    with torch.inference_mode():
        n = float(g.max())
    u.add_(n)
    p.sub_(u, alpha=lr)


@computed
def a_view_of_one_element_is_kept(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    kept = vars(o).setdefault("kept", {})
    if id(p) in kept:
        kept[id(p)].mul_(0.5)
    p.sub_(g, alpha=lr)
    kept[id(p)] = p.view(-1)[0]


@computed
def two_states_were_one(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if not s:
        s["m"], s["n"] = torch.zeros_like(p), torch.zeros_like(p)
    if t == 3:
        s["n"] = s["m"]
    if t == 5:
        s["n"] = s["m"].clone()
    s["m"].mul_(0.9).add_(g)
    s["n"].mul_(0.5).add_(g)
    p.sub_(s["n"], alpha=lr)
