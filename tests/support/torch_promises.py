"""What torch promises of an optimizer, as checks of one compiled class with one input of torch's own list."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch_problems import INFOS, Options

import collage_neuron
from collage_neuron import exact_value


def compiled(name: str) -> Any:
    return collage_neuron.compile(INFOS[name].optim_cls)


class Affine:
    """torch's problem: the square of an affine map."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = Parameter(torch.randn(10, 5, generator=generator).bfloat16())
        self.bias = Parameter(torch.randn(10, generator=generator).bfloat16())
        self.input = torch.randn(5, generator=generator)

    @property
    def params(self) -> list[Parameter]:
        return [self.weight, self.bias]

    def loss(self, weight: Tensor, bias: Tensor) -> Tensor:
        return (weight.float().mv(self.input) + bias.float()).pow(2).sum()

    def train(self, optimizer: Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            self.loss(*self.params).backward()
            optimizer.step()


def exact(optimizer: Optimizer, params: list[Parameter]) -> list[Tensor]:
    return [exact_value(optimizer, p) for p in params]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def _same(a: Any, b: Any) -> bool:
    """Returns True if two states are equal in keys, order, types, dtypes and values; names of parameters aside."""
    if isinstance(a, dict):
        keys = [[k for k in x if k != "param_names"] for x in (a, b)]
        return keys[0] == keys[1] and all(_same(a[k], b[k]) for k in keys[0])
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def own(options: Options) -> Options:
    return copy.deepcopy(options)  # a scheduler or a fill writes into a learning rate that is a tensor


# --- each for one input of one optimizer ---------------------------------------------------------------------------


def groups_with_schedulers_go_the_right_direction(name: str, options: Options) -> None:
    if options:  # torch, too, asks this with default options only
        return
    for makers in INFOS[name].scheduler_inputs:
        problem = Affine()
        optimizer = compiled(name)([{"params": [problem.weight]}, {"params": [problem.bias], "lr": 0.01}])
        schedulers = [make(optimizer) for make in makers]
        before = problem.loss(*exact(optimizer, problem.params))
        for _ in range(20):
            problem.train(optimizer, 1)
            for scheduler in schedulers:
                plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(*([before] if plateau else []))
        assert problem.loss(*exact(optimizer, problem.params)) < before


def a_tiny_learning_rate_moves_nothing(name: str, options: Options) -> None:
    """The group with lr 1e-28 has gradients and keeps its exact value."""
    problem, irrelevant = Affine(), Parameter(torch.randn(2).bfloat16())
    outer: Options = {"lr": 1e-28} | ({"step_sizes": (0, 50)} if name == "Rprop" else {})
    relevant = own(options) | {"lr": float(options.get("lr") or 1e-3)}
    groups = [{"params": problem.params, **relevant}, {"params": [irrelevant]}]
    optimizer = compiled(name)(groups, **outer)
    before = irrelevant.detach().clone()
    for _ in range(5):
        irrelevant.grad = torch.rand_like(irrelevant)
        for p in problem.params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert torch.equal(irrelevant, before)


def gradients_of_zero_move_nothing(name: str, options: Options) -> None:
    if options.get("weight_decay") or (name in ("AdamW", "ASGD") and "weight_decay" not in options):
        return  # these decay by default
    if name in ("AdamW", "ASGD"):
        return
    p = Parameter(torch.randn(5, 1).bfloat16())
    before = p.detach().clone()
    optimizer = compiled(name)([p], **own(options))
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(exact_value(optimizer, p), before.float())


def loading_is_deterministic(name: str, options: Options) -> None:
    """With parameter names given or not; states stay equal while both go on."""
    problem, other = Affine(), Affine()
    named = [("weight", problem.weight), ("bias", problem.bias)]
    optimizer, fresh = compiled(name)(named, **own(options)), compiled(name)(other.params, **own(options))
    problem.train(optimizer, 4)
    with torch.no_grad():
        for mine, theirs in zip(problem.params, other.params, strict=True):
            theirs.copy_(mine)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(4):
        problem.train(optimizer, 1)
        other.train(fresh, 1)
        assert equal(exact(optimizer, problem.params), exact(fresh, other.params))
    assert _same(optimizer.state_dict(), fresh.state_dict())
    fresh.param_groups.extend(fresh.param_groups)  # repeated parameters have the same numbers
    assert _same(optimizer.state_dict()["param_groups"][-1], fresh.state_dict()["param_groups"][-1])


def a_saved_state_is_equal_when_read(name: str, options: Options) -> None:
    problem = Affine()
    optimizer = compiled(name)(problem.params, **own(options))
    problem.train(optimizer, 3)
    saved = optimizer.state_dict()
    for weights_only in (True, False):
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        assert _same(torch.load(file, weights_only=weights_only), saved)


def a_step_count_may_be_loaded_as_a_number(name: str, options: Options) -> None:
    problem, other = Affine(), Affine()
    optimizer, fresh = (compiled(name)(x.params, **own(options)) for x in (problem, other))
    problem.train(optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].item()
    with torch.no_grad():
        for mine, theirs in zip(problem.params, other.params, strict=True):
            theirs.copy_(mine)
    fresh.load_state_dict(saved)
    problem.train(optimizer, 1)
    other.train(fresh, 1)
    assert equal(exact(optimizer, problem.params), exact(fresh, other.params))


def a_state_of_another_implementation_loads(name: str, options: Options) -> None:
    """A checkpoint that was saved with `fused` or `capturable` on, as on a GPU, goes on here."""
    for impl in ("fused", "capturable"):
        problem = Affine()
        optimizer = compiled(name)(problem.params, **own(options))
        if impl not in optimizer.param_groups[0]:
            continue
        problem.train(optimizer, 2)
        saved = copy.deepcopy(optimizer.state_dict())
        for group in saved["param_groups"]:
            group[impl] = True
        twin, other = copy.deepcopy((problem, optimizer))
        other.load_state_dict(saved)
        problem.train(optimizer, 2)
        twin.train(other, 2)
        assert equal(exact(optimizer, problem.params), exact(other, twin.params)), impl


def hooks_see_and_change_what_is_saved(name: str, options: Options) -> None:
    """What a hook before adds to the state is in what is saved; what a hook after returns is what is saved."""
    optimizer = compiled(name)(Affine().params, **own(options))

    def before(optimizer: Optimizer) -> None:
        optimizer.state["test"] = 1  # type: ignore[index]  # torch's own test does it

    def after(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        return saved | {"seen": saved["state"].pop("test", None)}

    optimizer.register_state_dict_post_hook(after)
    assert optimizer.state_dict()["seen"] is None
    optimizer.register_state_dict_pre_hook(before)
    saved = optimizer.state_dict()
    assert saved["seen"] == 1
    assert "test" not in saved["state"]


def hooks_see_and_change_what_is_loaded(name: str, options: Options) -> None:
    optimizer = compiled(name)(Affine().params, **own(options))
    seen: list[float] = []

    def in_place(optimizer: Optimizer, saved: dict[str, Any]) -> None:
        saved["param_groups"][0]["lr"] = 0.002

    def anew(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        mine = copy.deepcopy(saved)
        mine["param_groups"][0]["lr"] = 0.003
        return mine

    def after(optimizer: Optimizer) -> None:
        seen.append(optimizer.param_groups[0]["lr"])

    optimizer.register_load_state_dict_post_hook(after)
    first = optimizer.register_load_state_dict_pre_hook(in_place)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(anew, prepend=True)  # runs first, and the other one overrides
    optimizer.load_state_dict(optimizer.state_dict())
    first.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [0.002, 0.002, 0.003]


def no_state_is_empty_after_a_step(name: str, options: Options) -> None:
    problem = Affine()
    optimizer = compiled(name)(problem.params, **own(options))
    problem.train(optimizer, 1)
    assert all(len(optimizer.state[p]) for p in problem.params)


def a_layer_may_be_frozen_and_thawed(name: str, options: Options) -> None:
    """Each parameter takes the steps that it would take in an optimizer of its own, with a step without gradients.

    torch's own test has a parameter without dimensions among them.
    """
    ways = []
    for together in (True, False):
        params = [Parameter(t.bfloat16()) for t in (torch.linspace(-1, 1, 6).reshape(2, 3), torch.tensor(0.3))]
        groups = [params] if together else [[p] for p in params]
        optimizers = [compiled(name)(group, **own(options)) for group in groups]
        for i in range(7):
            for j, p in enumerate(params):
                p.grad = None if i == 2 or (j == 0 and i in (3, 4)) else torch.full_like(p, 0.1 * (i + 1))
            for optimizer in optimizers:
                optimizer.step()
        ways.append([exact_value(optimizers[0 if together else j], p) for j, p in enumerate(params)])
    assert equal(*ways)


def dtypes_may_be_mixed(name: str, options: Options) -> None:
    """An fp32 parameter beside a bf16 one is updated in fp32, as torch updates it."""
    values = [torch.linspace(-1, 1, 6), torch.linspace(1, 2, 6)]
    pair = [Parameter(values[0].bfloat16()), Parameter(values[1].clone())]
    plain = [Parameter(values[1].clone())]
    with pytest.warns(UserWarning, match="float32"):
        optimizer = compiled(name)(pair, **own(options))
    of_torch = INFOS[name].optim_cls(plain, **own(options) | {"foreach": False})
    for i in range(5):
        for p in (*pair, *plain):
            p.grad = torch.full_like(p, 0.1 * (i + 1))
        optimizer.step()
        of_torch.step()
    assert pair[1].dtype == torch.float32
    torch.testing.assert_close(pair[1], plain[0], rtol=5 * 1.3e-6, atol=5e-5)  # torch's own tolerance for this


def rosenbrock_comes_nearer(name: str, options: Options) -> None:
    """Cyclic coordinate descent: one of the two gradients is zero in each step."""
    p = Parameter(torch.tensor([1.5, 1.5]).bfloat16())
    optimizer = compiled(name)([p], **own(options) | {"lr": 1e-4})
    before = _rosenbrock(exact_value(optimizer, p))
    for i in range(20):
        x = exact_value(optimizer, p).requires_grad_()
        _rosenbrock(x).backward()
        assert x.grad is not None
        p.grad = (x.grad * torch.tensor([i % 2, 1 - i % 2])).bfloat16()
        optimizer.step()
    after = _rosenbrock(exact_value(optimizer, p))
    assert after > before if options.get("maximize") else after < before


def _rosenbrock(x: Tensor) -> Tensor:
    return (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2


def the_default_dtype_changes_nothing(name: str, options: Options) -> None:
    ways = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        problem = Affine()
        torch.set_default_dtype(dtype)
        try:
            optimizer = compiled(name)(problem.params, **own(options))
            for i in range(5):
                for p in problem.params:
                    p.grad = torch.full_like(p, 0.1 * (i + 1))
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        ways.append(exact(optimizer, problem.params))
    assert all(equal(ways[0], other) for other in ways[1:])


CHECKS = (
    groups_with_schedulers_go_the_right_direction,
    a_tiny_learning_rate_moves_nothing,
    gradients_of_zero_move_nothing,
    loading_is_deterministic,
    a_saved_state_is_equal_when_read,
    a_step_count_may_be_loaded_as_a_number,
    a_state_of_another_implementation_loads,
    hooks_see_and_change_what_is_saved,
    hooks_see_and_change_what_is_loaded,
    no_state_is_empty_after_a_step,
    a_layer_may_be_frozen_and_thawed,
    dtypes_may_be_mixed,
    rosenbrock_comes_nearer,
    the_default_dtype_changes_nothing,
)
