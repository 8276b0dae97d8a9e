"""What Neuron's training libraries do to an optimizer class leaves the strategy and the bits alone.

The libraries need a Neuron device; what each does to the class is here. `docs/integrations.md` has the lines for each.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from models import bits
from torch import nn
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron import Compiled, UnsafeEnvironment, UnsupportedUpdate

pytest.importorskip("torch_xla")

from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

ZeRO: Any = ZeroRedundancyOptimizer
"""torch_xla annotates it more narrowly than it is used, by itself too."""

Class = Callable[..., Optimizer]
"""What the libraries take for an optimizer class: a class, or a `functools.partial` of one."""


# --- neuronx_distributed ----------------------------------------------------------------------------------------------


class NxDOptimizer(Optimizer):
    """The wrapper: is an Optimizer by name alone (its constructor never runs), hands everything on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def __getstate__(self) -> dict[str, Any]:
        return self.optimizer.__getstate__()

    def step(self, closure: Any = None) -> Any:
        """In the library also: the reduction of gradients where ZeRO-1 is off, and clipping."""
        return self.optimizer.step(closure=closure)

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Marks what belongs to experts, by an attribute of every state: numbers in a state would not do."""
        saved = self.optimizer.state_dict()
        for state in saved["state"].values():
            for value in state.values():
                value.expert_model_parallel = False
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


def initialize_parallel_optimizer(
    nxd_config: dict[str, Any], optimizer_class: Class, parameters: Iterable[Any], **defaults: Any
) -> NxDOptimizer:
    """neuronx_distributed's: with ZeRO-1 the class goes to it, and `defaults` to both."""
    if not nxd_config["zero_one_enabled"]:
        return NxDOptimizer(optimizer_class(parameters, **defaults))
    own: dict[str, Any] = {"grad_clipping": False, "pin_layout": False}
    if nxd_config.get("use_fp32_grad_acc", True):
        own |= {"use_grad_acc_hook": True, "higher_cc_precision": True}
    return NxDOptimizer(ZeRO(parameters, optimizer_class, **own, **defaults))


# --- optimum-neuron ---------------------------------------------------------------------------------------------------


def mixed_precision_config(stochastic_rounding: bool = True) -> None:
    """What making optimum's MixedPrecisionConfig does to the process; the trainer's default is True."""
    os.environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] = str(int(stochastic_rounding))


def create_optimizer(model: nn.Module, optimizer_class: type[Optimizer], settings: dict[str, Any]) -> Optimizer:
    """The trainer's, with `optimizer_cls_and_kwargs`: two groups, decayed and not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return optimizer_class(groups, **settings)


def prepare_optimizer_for_zero_1(optimizer: Optimizer, master_weights: bool = False) -> Any:
    """The accelerator's: from `param_groups` and class, no keyword arguments."""
    return ZeRO(
        optimizer.param_groups,
        optimizer.__class__,
        pin_layout=False,
        grad_clipping=False,  # the accelerated optimizer around it sets this before each step
        bucket_cap_mb_all_gather=130,
        bucket_cap_mb_reduce_scatter=130,
        optimizer_dtype=torch.float32 if master_weights else torch.bfloat16,
    )


pytestmark = pytest.mark.usefixtures("rejecting")

STEPS = 3
SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99)}


class NxDTAdamW(collage_neuron.compile(AdamW, strategy="full")):  # type: ignore[misc]  # made at run time
    """As in docs/integrations.md: NxDT hands nothing but `defaults` on to ZeRO-1, the dtype of the shards included."""

    def __init__(self, params: Any, optimizer_dtype: torch.dtype = torch.bfloat16, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.defaults["optimizer_dtype"] = optimizer_dtype


def full() -> Any:
    return collage_neuron.compile(AdamW, strategy="full")


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """As optimum's trainer makes them."""
    return [{k: v for k, v in g.items() if k in ("params", "weight_decay")}
            for g in create_optimizer(model, AdamW, SETTINGS).param_groups]  # fmt: skip


def nxd(zero: bool) -> Callable[[nn.Module], Optimizer]:
    dtype = {"optimizer_dtype": torch.bfloat16} if zero else {}
    config = {"zero_one_enabled": zero}
    return lambda model: initialize_parallel_optimizer(config, full(), groups_of(model), **SETTINGS, **dtype)


def nxdt(zero: bool) -> Callable[[nn.Module], Optimizer]:
    """NeMo builds the optimizer once, and its `defaults` are all that the one that trains is built with."""

    def configured(model: nn.Module) -> Optimizer:
        defaults = NxDTAdamW(groups_of(model), **SETTINGS).defaults
        return initialize_parallel_optimizer({"zero_one_enabled": zero}, NxDTAdamW, groups_of(model), **defaults)

    return configured


def optimum_by_object(model: nn.Module) -> Any:
    optimizer = create_optimizer(model, AdamW, SETTINGS)
    return prepare_optimizer_for_zero_1(collage_neuron.compile(optimizer, strategy="full"))


ROUTES: dict[str, Callable[[nn.Module], Optimizer]] = {
    "neuronx_distributed": nxd(zero=False),
    "neuronx_distributed, ZeRO-1": nxd(zero=True),
    "NxDT": nxdt(zero=False),
    "NxDT, ZeRO-1": nxdt(zero=True),
    "optimum-neuron, optimizer_cls_and_kwargs": lambda model: prepare_optimizer_for_zero_1(
        create_optimizer(model, full(), SETTINGS)
    ),
    "optimum-neuron, optimizers=": optimum_by_object,
}


def innermost(optimizer: Any) -> Optimizer:
    """The optimizer that updates: inside NxD's wrapper, inside ZeRO-1."""
    while True:
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "base_optimizer", None)
        if inner is None:
            return optimizer  # type: ignore[no-any-return]
        optimizer = inner


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """Gradients by a backward that the hooks of gradient accumulation see; the same ones on every route."""
    import torch_xla

    for i in steps:
        optimizer.zero_grad(set_to_none=True)
        g = torch.Generator().manual_seed(i)
        weights = [torch.randn(p.shape, generator=g).bfloat16().to(p.device) for p in model.parameters()]
        loss = sum((w * p).sum() for w, p in zip(weights, model.parameters(), strict=True))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
        torch_xla.sync()


def all_bits(model: nn.Module, optimizer: Any) -> list[list[torch.Tensor]]:
    """Of the parameters, then of every state of each."""
    inner = innermost(optimizer)
    shards = [p for group in inner.param_groups for p in group["params"]]
    return [[bits(p) for p in model.parameters()],
            *([bits(v) for _, v in sorted(inner.state[p].items())] for p in shards)]  # fmt: skip


def same(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> bool:
    return all(torch.equal(x, y) for u, v in zip(a, b, strict=True) for x, y in zip(u, v, strict=True))


def bf16_model(device: torch.device, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(6, 4).bfloat16().to(device)


@pytest.fixture(scope="module")
def plain(xla: torch.device) -> list[list[torch.Tensor]]:
    """All bits after the same steps of the class without any library around it."""
    model = bf16_model(xla)
    optimizer = full()(groups_of(model), **SETTINGS)
    train(model, optimizer, range(STEPS))
    return all_bits(model, optimizer)


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_keeps_the_strategy_and_takes_the_same_steps(
    route: str, xla: torch.device, plain: list[list[torch.Tensor]]
) -> None:
    model = bf16_model(xla)
    optimizer = ROUTES[route](model)
    train(model, optimizer, range(STEPS))
    inner = innermost(optimizer)
    assert isinstance(inner, Compiled)
    assert {g["collage_strategy"] for g in inner.param_groups} == {"full"}
    assert [g["weight_decay"] for g in inner.param_groups] == [0.1, 0.0]
    assert all("param_lo" in inner.state[p] for g in inner.param_groups for p in g["params"])
    assert same(all_bits(model, optimizer), plain)


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_resumes_bit_for_bit(route: str, xla: torch.device, plain: list[list[torch.Tensor]]) -> None:
    model = bf16_model(xla)
    optimizer = ROUTES[route](model)
    train(model, optimizer, range(STEPS - 1))
    weights = {k: v.cpu() for k, v in model.state_dict().items()}
    saved = copy.deepcopy(optimizer.state_dict())
    other = bf16_model(xla, seed=1)
    other.load_state_dict(weights)
    resumed = ROUTES[route](other)
    resumed.load_state_dict(saved)
    train(other, resumed, range(STEPS - 1, STEPS))
    assert same(all_bits(other, resumed), plain)


@pytest.mark.parametrize("wrapper", ["NxDOptimizer", "ZeroRedundancyOptimizer"])
def test_compiling_the_wrapper_is_refused(wrapper: str, xla: torch.device) -> None:
    model = bf16_model(xla)
    config = {"zero_one_enabled": False}
    wrapped: dict[str, Any] = {
        "NxDOptimizer": initialize_parallel_optimizer(config, AdamW, groups_of(model), **SETTINGS),
        "ZeroRedundancyOptimizer": prepare_optimizer_for_zero_1(AdamW(model.parameters())),
    }
    with pytest.raises(
        UnsupportedUpdate, match=rf"{wrapper} makes its .* optimizer_class=collage_neuron.compile\(AdamW\)"
    ):
        collage_neuron.compile(wrapped[wrapper])


def test_stochastic_rounding_after_compile_is_refused(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """optimum's trainer does so by default, and it is made after the class."""
    monkeypatch.setenv("NEURON_RT_STOCHASTIC_ROUNDING_EN", "0")
    model, compiled = bf16_model(xla), full()
    mixed_precision_config()
    with pytest.raises(UnsafeEnvironment, match="NEURON_RT_STOCHASTIC_ROUNDING_EN"):
        create_optimizer(model, compiled, SETTINGS)
    mixed_precision_config(stochastic_rounding=False)
    create_optimizer(model, compiled, SETTINGS)
