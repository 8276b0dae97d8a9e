"""States: where they are, how long they live, what they share; and what a step leaves in gradients."""

from __future__ import annotations

from typing import Any

import torch
from traced_updates import computed, launched, place

# --- where they are ---------------------------------------------------------------------------------------------------


@launched
def momentum(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g)
    p.add_(s["m"], alpha=-lr)


@computed
def states_with_odd_names(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    for name in ("exp.avg", "lambda", "", ("m", 1), 7):
        p.sub_(s.setdefault(name, torch.zeros_like(p)).mul_(0.5).add_(g), alpha=lr)


@computed
def states_that_are_called_as_the_inputs_of_an_update(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    for name in ("s0", "s1", "c0", "self"):
        p.sub_(s.setdefault(name, torch.zeros_like(p)).mul_(0.5).add_(g), alpha=lr)


@launched
def states_by_their_order(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """They are unpacked in the order in which they were put there, and counted."""
    if not s:
        s["m"], s["step"], s["v"], s["q"] = torch.zeros_like(p), 0, torch.zeros_like(p), 3
    m, step, v, *more = s.values()
    s["step"] = step + len(more)
    p.sub_(m.mul_(0.9).add_(g) / (v.lerp_(g * g, 0.1).sqrt() + len(s)), alpha=lr)
    if t == 4:
        s["late"] = s.pop("step")
        s["step"] = s.pop("late")
        s["m"], s["v"], s["q"] = s.pop("m"), s.pop("v"), s.pop("q")
        s["step"] = s.pop("step")
    if t >= 4:
        s.update({name: s.pop(name) for name in ("m", "step", "v", "q")})


# --- how long they live -----------------------------------------------------------------------------------------------


@launched
def states_trade_places(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if not s:
        s["a"], s["b"], s["c"] = torch.zeros_like(p), torch.ones_like(p), p.clone()
    s["a"], s["b"], s["c"] = s["b"], s["c"], s["a"] * 0.9 + g
    p.sub_(s["a"] - s["b"] * 0.3 + s["c"], alpha=lr)


@launched
def a_state_is_one_of_two_results(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Steps that make the same calls, and differ in what they leave."""
    m = s.setdefault("m", torch.zeros_like(p))
    p.sub_(m, alpha=lr)
    s["m"] = (m * 0.5 + g, g * 2.0 - m)[t % 3 == 0]


@launched
def a_state_comes_late(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if t == 5:
        s["z"], s["y"], s["x"] = p.clone(), torch.full_like(p, 2.0), torch.empty_like(p).copy_(g)
    p.sub_(g, alpha=lr)
    if t > 5:
        p.sub_(s["z"] * s["y"] + s["x"], alpha=lr)


@launched
def numbers_are_made_narrow(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    for name, x in {
        "b": torch.tensor(254.0, dtype=torch.bfloat16),
        "h": torch.tensor(1.0, dtype=torch.float16),
    }.items():
        p.sub_(g, alpha=lr * float(s.setdefault(name, x).add_(0.75)))
        assert s[name].dtype == x.dtype


@computed
def states_are_made_in_bf16(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """On purpose, in the parameter's shape and in others: they round what they get, in each step."""
    for name, x in {"m": g, "row": g.mean(-1, keepdim=True), "all": g.mean()}.items():
        p.sub_(s.setdefault(name, torch.zeros(x.shape, dtype=torch.bfloat16)).mul_(0.9).add_(x, alpha=0.1), alpha=lr)


@computed
def states_are_new_ones(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """In each step another tensor, and another dictionary."""
    o.state[p] = {"n": t, "m": 0.5 * (torch.zeros_like(p) if t % 3 == 1 else s["m"]) + g}
    p.sub_(o.state[p]["m"], alpha=lr)


@computed
def a_state_is_renamed_and_removed(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if t == 3:
        s["late"] = s.pop("m")
    if t == 5:
        s.pop("late")
    m = s.get("late") if t > 2 else s.setdefault("m", torch.zeros_like(p))
    p.sub_(g if m is None else m.mul_(0.9).add_(g), alpha=lr)


# --- what they are made of --------------------------------------------------------------------------------------------


@launched
def sums_without_errors_of_its_own(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Kahan's summation and a master copy: the compiler's own means, in the way of it."""
    if not s:
        s["lost"], s["master"] = torch.zeros_like(p), p.detach().clone().float()
    y = -lr * g - s["lost"]
    total = s["master"] + y
    s["lost"].copy_((total - s["master"]) - y)
    s["master"].copy_(total)
    p.data.copy_(s["master"] - lr * torch.finfo(p.dtype).eps)


@launched
def a_number_of_each_as_torch_returns_it(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    v = s.setdefault("v", torch.zeros(())).mul_(0.9)
    assert torch.zeros(()).add_(g.norm()).mul_(v) is not v
    s["v"] = torch.add(v, g.norm(), out=v)
    p.sub_(g / s["v"], alpha=20 * lr)


def with_counts_in(dtype: torch.dtype) -> None:
    """Registers an update that counts the positive gradients of each element, where that is no float."""

    def update(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
        n = s.setdefault("n", torch.full_like(p, 500 if dtype == torch.int64 else 1, dtype=dtype))
        n.add_((g > 0).to(dtype))
        p.sub_(g / (n + 1), alpha=lr * 100)

    update.__name__ = f"counts_in_{str(dtype)[6:]}"
    computed(update)


for _dtype in (torch.int64, torch.bool):
    with_counts_in(_dtype)


# --- what they share --------------------------------------------------------------------------------------------------


@computed
def two_states_are_one_while_they_are_read(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if not s:
        s["m"] = s["fixed"] = torch.zeros_like(p)
        s["m"].add_(g.sum().item())
    if t % 3 == 2:
        s["fixed"] = s["fixed"] * 0.5
    s["m"].mul_(0.9).add_(g)
    p.sub_(s["m"] + s["fixed"], alpha=lr)


@computed
def keeps_the_first_gradient(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """What stands for it in the step stands for those of later steps too."""
    p.sub_(o.kept.setdefault(p, g), alpha=lr).sub_(g, alpha=lr)


# --- gradients --------------------------------------------------------------------------------------------------------


@launched
def the_gradient_is_written(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Clipped by its own history, doubled, and left as something else."""
    v = s.setdefault("v", torch.ones_like(p))
    g.copy_(torch.minimum(torch.maximum(g, -2 * v.sqrt()), 2 * v.sqrt()))
    p.grad.mul_(2)
    p.sub_(p.grad, alpha=lr)
    v.lerp_(g * g, 0.1)
    g.mul_(0.0).add_(0.25)


@computed
def the_gradient_is_replaced(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.grad = g.sign()
    p.sub_(p.grad, alpha=lr)


@computed
def groups_are_added_and_removed(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g, alpha=lr)
    if t == 3 and place(o, p) == 0:
        o.add_param_group({"params": [o.param_groups[0]["params"].pop()]})
    if t == 5 and place(o, p) == 2:
        o.param_groups[0]["params"] += o.param_groups.pop()["params"]


@computed
def the_parameter_is_frozen(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g, alpha=lr)
    p.requires_grad_(t < 6)


# --- what a step makes in each step -----------------------------------------------------------------------------------


@launched
def states_by_default(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """What is made is a state in the first step, nothing in most others, and the state again in the fifth."""
    if t == 5:
        del s["m"], s["v"]
    m, v = s.setdefault("m", torch.zeros_like(p)), s.setdefault("v", torch.ones(p.shape))
    last = s.setdefault("last", p.new_zeros(list(p.shape)))
    p.sub_(m.mul_(0.9).add_(g) / v.mul_(0.9).addcmul_(g, g).sqrt() + 0.1 * last, alpha=lr)
    last.copy_(g)


@computed  # no number of a step is -0.0, if it belongs to an operation
def made_of_another_zero_in_one_step(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    zero = torch.full_like(p, -0.0 if t == 5 else 0.0)
    p.sub_(g + (1 / zero).clamp(-1.0, 1.0), alpha=lr)


@launched
def made_in_another_shape_in_one_step(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    size = list(p.shape)
    z = p.new_ones(size)
    size[0] = 1 if t == 5 else size[0]
    p.sub_((g + z) / p.new_ones(size).numel(), alpha=lr)


@computed
def a_buffer_in_a_list_that_some_parameters_refresh(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    if not s:
        s["m"], s["l"] = torch.zeros_like(p), [torch.ones_like(p)]
    (v,) = s["l"]
    if t % 3 == 0 and place(o, p):
        v.add_(p, alpha=0.1)
    p.sub_(s["m"].mul_(0.7).add_(v, alpha=0.2).add_(g), alpha=lr)


@launched
def an_out_that_alone_waits(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    x = g.sum()
    torch.mul(torch.tensor(0.9), 2.0, out=x)
    p.sub_(s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g) * x, alpha=lr)
