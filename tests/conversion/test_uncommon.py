"""Uncommon parameters, memory and callers: each is made right, or rejected in words before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import follow
from torch import nn
from torch.optim import Adagrad, AdamW, Optimizer

import collage_neuron

pytestmark = pytest.mark.usefixtures("rejecting")

F32, BF16 = torch.float32, torch.bfloat16


def exact(optimizer: Optimizer) -> list[torch.Tensor]:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [collage_neuron.exact_value(optimizer, p) for p in params]


def assert_same(one: Optimizer, other: Optimizer) -> None:
    assert all(torch.equal(x, y) for x, y in zip(exact(one), exact(other), strict=True))


def assert_train_alike(one: Optimizer, other: Optimizer, steps: range) -> None:
    for optimizer in (one, other):
        follow(optimizer, steps)
    assert_same(one, other)


# --- GradScaler -------------------------------------------------------------------------------------------------------


def scaled_run(alone: bool, fused: bool, clipped: bool) -> tuple[Optimizer, nn.Linear, float]:
    """Four steps, of which the third overflows; the optimizer is compiled with its model, or when it first steps."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    if alone:
        model = collage_neuron.compile(model)
    optimizer: Optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)
    if not alone:
        model, optimizer = collage_neuron.compile(model, optimizer)
    scaler = torch.amp.grad_scaler.GradScaler("cpu", init_scale=256.0)
    for i in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3, dtype=BF16)).float().square().sum() * (torch.inf if i == 2 else 1.0)
        scaler.scale(loss).backward()
        if clipped:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return optimizer, model, scaler.get_scale()


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_grad_scaler(alone: bool, clipped: bool) -> None:
    """A fused optimizer, to which the scaler leaves the gradients' scale and the skipping, steps as an unfused one."""
    fused, model, scale = scaled_run(alone, True, clipped)
    plain, _, _ = scaled_run(alone, False, clipped)
    assert scale == 128.0
    assert fused.state[model.weight]["step"] == 3
    assert_same(fused, plain)


def test_grad_scale_of_ones_own() -> None:
    """An attribute of that name of an optimizer that knows nothing of scalers is left alone."""
    optimizer: Any = collage_neuron.compile(torch.optim.Adadelta([nn.Parameter(torch.ones(3))]))
    twin = collage_neuron.compile(torch.optim.Adadelta([nn.Parameter(torch.ones(3))]))
    optimizer.grad_scale = 4.0
    assert_train_alike(optimizer, twin, range(2))
    assert optimizer.grad_scale == 4.0


# --- the form with a class --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["plus", "full", "fp32"])
def test_unstepped_checkpoint_of_a_class(strategy: str) -> None:
    """Adagrad fills its states when it is made: in their formats, so that its checkpoint loads."""
    cls = collage_neuron.compile(Adagrad, strategy=strategy)
    first, second = (cls([nn.Parameter(torch.ones(3, dtype=BF16))], initial_accumulator_value=0.5) for _ in range(2))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert_train_alike(first, second, range(2))
    fresh = collage_neuron.compile(
        Adagrad([nn.Parameter(torch.ones(3, dtype=BF16))], initial_accumulator_value=0.5), strategy=strategy
    )
    follow(fresh, range(2))
    assert_same(first, fresh)


def test_differentiable_is_found_when_the_optimizer_is_made() -> None:
    cls: Any = collage_neuron.compile(AdamW)
    with pytest.raises(ValueError, match=r"param_groups\[0\] has differentiable=True; .*use differentiable=False"):
        cls([nn.Parameter(torch.ones(2, dtype=BF16))], differentiable=True)
    optimizer = cls([nn.Parameter(torch.ones(2, dtype=BF16))])
    more = {"params": [nn.Parameter(torch.ones(2, dtype=BF16))], "differentiable": True}
    with pytest.raises(ValueError, match=r"param_groups\[1\] has differentiable=True"):
        optimizer.add_param_group(more)
    assert len(optimizer.param_groups) == 1


def test_differentiable_set_between_steps() -> None:
    optimizer = collage_neuron.compile(AdamW([nn.Parameter(torch.ones(3))]))
    follow(optimizer, range(1))
    optimizer.param_groups[0]["differentiable"] = True
    before = exact(optimizer)
    with pytest.raises(ValueError, match=r"param_groups\[0\] has differentiable=True"):
        follow(optimizer, range(1, 2))
    assert torch.equal(exact(optimizer)[0], before[0])


class Own(nn.Parameter):
    """A class of parameters of a user's own."""


def test_parameters_of_a_class_of_their_own() -> None:
    """An optimizer of torch's own is recorded for them as for others."""
    own, usual = (collage_neuron.compile(AdamW([kind(torch.ones(3))], lr=0.1)) for kind in (Own, nn.Parameter))
    follow(own, range(3))
    follow(usual, range(3))
    assert type(own.param_groups[0]["params"][0]) is Own
    assert_same(own, usual)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_meta() -> None:
    model = nn.Linear(2, 2, device="meta")
    why = r"'weight', shape \[2, 2\], is on the meta device.*to_empty.*compile after"
    with pytest.raises(ValueError, match=why):
        collage_neuron.compile(model, AdamW(model.parameters()))
    with pytest.raises(ValueError, match=why):
        collage_neuron.compile(model)
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['params'\]\[0\], shape .* is on the meta device"):
        collage_neuron.compile(AdamW(model.parameters()))
    optimizer = collage_neuron.compile(AdamW)(nn.Linear(2, 2, device="meta", dtype=BF16).parameters())
    collage_neuron.compile(Adagrad)(nn.Linear(2, 2, device="meta", dtype=BF16).parameters())
    with pytest.raises(ValueError, match="is on the meta device"):
        train_on_meta(optimizer)


def train_on_meta(optimizer: Optimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.empty_like(p)
    optimizer.step()


def flat(dtype: torch.dtype) -> tuple[torch.Tensor, nn.Linear]:
    """A layer whose parameters are views of a buffer."""
    model, buffer = nn.Linear(3, 2), torch.linspace(-1.0, 1.0, 8, dtype=dtype)
    model.weight.data, model.bias.data = buffer[:6].view(2, 3), buffer[6:]
    return buffer, model


def test_views_of_a_flat_buffer() -> None:
    """fp32 parameters would be trained out of sight of the buffer; bf16 ones stay where they are."""
    _, model = flat(F32)
    for compiled in (
        lambda: collage_neuron.compile(model, AdamW(model.parameters())),
        lambda: collage_neuron.compile(AdamW([model.bias])),
        lambda: collage_neuron.compile(model),
    ):
        with pytest.raises(ValueError, match=r"parameter of shape .* with a tensor of shape \[8\].*clone"):
            compiled()
    assert model.weight.dtype == F32
    buffer, narrow = flat(BF16)
    follow(collage_neuron.compile(AdamW(narrow.parameters(), lr=0.1)), range(1))
    assert torch.equal(buffer[:6].view(2, 3), narrow.weight)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_two_parameters_in_one_place(dtype: torch.dtype) -> None:
    first, second = nn.Linear(2, 2).to(dtype), nn.Linear(2, 2).to(dtype)
    model = nn.Sequential(first, second)
    second.weight = nn.Parameter(first.weight.data)
    with pytest.raises(ValueError, match=r"shares its memory with another parameter, .* one parameter object"):
        collage_neuron.compile(model, AdamW(model.parameters()))
    second.weight = first.weight
    collage_neuron.compile(model, AdamW(model.parameters()))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_in_the_groups_twice() -> None:
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"of shape \[3\] is in the groups twice, .* hand over each parameter once"):
        collage_neuron.compile(AdamW([p, p]))
    optimizer = collage_neuron.compile(AdamW([p]), verbose=False)
    p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0]["params"].append(p)
    with pytest.raises(ValueError, match="in the groups twice"):
        optimizer.step()


COMBS: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "columns": lambda t: (t[:, ::2], t[:, 1::2]),
    "halves of rows": lambda t: (t[:, :4], t[:, 4:]),
    "every third": lambda t: (t.view(-1)[::3], t.view(-1)[2::3]),
    "one between others": lambda t: (t[1, 1:2], t[:, ::2]),
    "a transpose": lambda t: (t[::2].T, t[1::2]),
    "another type": lambda t: (t.view(F32)[:, ::2], t.view(BF16).view(6, -1, 4)[:, :, 2:]),
}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", COMBS)
def test_parameters_that_interleave(name: str, dtype: torch.dtype) -> None:
    """They are views of one storage, and no element is in both."""
    cut = COMBS[name](torch.linspace(-1.0, 1.0, 48).view(6, 8).to(dtype))
    params = [nn.Parameter(t) for t in cut]
    apart = [nn.Parameter(t.detach().clone()) for t in cut]
    del cut
    one, other = collage_neuron.compile(AdamW(params, lr=0.1)), collage_neuron.compile(AdamW(apart, lr=0.1))
    assert_train_alike(one, other, range(3))


def of(made: Any) -> AdamW:
    """Over views of which nothing else is held."""
    return AdamW([nn.Parameter(t) for t in made])


def base(dtype: torch.dtype) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0, 48).view(6, 8).to(dtype)


SHARED = r"shares its memory with another parameter"
IN_ONE_PLACE = r"strides \[\d, 1\]: several of its elements lie in the same place"


def given_back(optimizer: AdamW) -> AdamW:
    for p in optimizer.param_groups[0]["params"]:
        p.untyped_storage().resize_(0)
    return optimizer


REFUSED: dict[str, tuple[type[Exception], str, Callable[[torch.dtype], Any]]] = {
    "expanded": (ValueError, IN_ONE_PLACE, lambda d: of([torch.ones(4, 3, dtype=d)[:1].expand(4, 3)])),
    "as_strided": (ValueError, IN_ONE_PLACE, lambda d: of([torch.ones(4, 3, dtype=d).as_strided((3, 3), (1, 1))])),
    "columns": (ValueError, SHARED, lambda d: of([(t := base(d))[:, ::2], t[:, ::4]])),
    "one element": (ValueError, SHARED, lambda d: of([(t := base(d))[:, :5], t[5:, 4:]])),
    "one between others": (ValueError, SHARED, lambda d: of([(t := base(d))[1, 2:3], t[:, ::2]])),
    "another type": (
        ValueError, SHARED, lambda d: of([(t := base(d))[:, ::2], t.view(BF16 if d == F32 else F32)[:, 1::2]]),
    ),
    "a sparse parameter": (
        TypeError,
        r"is sparse \(torch.sparse_coo\); only dense parameters .*to_dense",
        lambda d: of([torch.eye(3, dtype=d).to_sparse()]),
    ),
    "a parameter whose memory was given back": (
        ValueError,
        r"has no memory: it was given back .*compile where",
        lambda d: given_back(of([torch.ones(4, dtype=d)])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.whole
def test_what_cannot_be_compiled_is_rejected(name: str, dtype: torch.dtype) -> None:
    error, message, make = REFUSED[name]
    with pytest.raises(error, match=message):
        collage_neuron.compile(make(dtype))


def test_a_buffer_that_is_held_sees_parameters_that_interleave() -> None:
    held = base(F32)
    with pytest.raises(ValueError, match=r"shares its memory with a tensor of shape .*, of which it is a view"):
        collage_neuron.compile(of([held[:, ::2], held[:, 1::2]]))


@pytest.mark.parametrize(
    "view", [lambda t: torch.from_numpy(t.numpy()[:2]), lambda t: torch.utils.dlpack.from_dlpack(t[:2])]
)
def test_a_buffer_that_is_held_sees_parameters_of_other_storages(view: Any) -> None:
    held = base(F32)
    with pytest.raises(ValueError, match=r"shares its memory with a tensor of shape"):
        collage_neuron.compile(of([view(held)]))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.transpose(0, 2),
    "permuted": lambda t: t.permute(3, 0, 1, 2),
    "channels_last": lambda t: t.to(memory_format=torch.channels_last),
    "rows of a larger one": lambda t: torch.cat([t, t], 1).data[:, :3].data,
}


@pytest.mark.parametrize("strategy", ["plus", "fp32", "stochastic"])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, dtype: torch.dtype, strategy: str) -> None:
    """Where elements lie in memory changes no bit of them, nor after a checkpoint."""
    laid = LAYOUTS[layout](torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype))
    values = (laid, laid.contiguous().clone(), laid.clone())
    optimizers = [collage_neuron.compile(AdamW([nn.Parameter(t)], lr=0.01), strategy=strategy) for t in values]
    for optimizer in optimizers[:2]:
        follow(optimizer, range(3))
    first, _, loaded = optimizers
    loaded.load_state_dict(copy.deepcopy(first.state_dict()))
    loaded.param_groups[0]["params"][0].data.copy_(first.param_groups[0]["params"][0])
    for optimizer in optimizers:
        follow(optimizer, range(3, 5))
    assert_same(first, optimizers[1])
    assert_same(loaded, optimizers[1])


# --- inference mode ---------------------------------------------------------------------------------------------------


def test_compile_in_inference_mode() -> None:
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters())
    for compiled in (
        lambda: collage_neuron.compile(model, optimizer),
        lambda: collage_neuron.compile(optimizer),
        lambda: collage_neuron.compile(model),
    ):
        with torch.inference_mode(), pytest.raises(RuntimeError, match=r"under torch.inference_mode.* outside of it"):
            compiled()
    assert type(optimizer) is AdamW
    assert model.weight.dtype == F32


def test_parameters_of_inference_mode() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"'weight', .* was made under torch.inference_mode"):
        collage_neuron.compile(model, AdamW(model.parameters()))


def test_step_in_inference_mode() -> None:
    """The states that a step makes there can be written to afterwards."""
    one, other = (collage_neuron.compile(AdamW([nn.Parameter(torch.ones(3))])) for _ in range(2))
    with torch.inference_mode():
        follow(one, range(1))
    follow(other, range(1))
    for optimizer in (one, other):
        follow(optimizer, range(1, 3))
    assert_same(one, other)


# --- states that are empty --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["bf16", "plus", "fp32"])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_empty_state_that_was_there(dtype: torch.dtype, strategy: str) -> None:
    """`optimizer.state[p]` that code has looked at, and so made, is one that never stepped."""
    one, other = (torch.optim.SGD([nn.Parameter(torch.ones(3, dtype=dtype))], lr=0.1) for _ in range(2))
    assert one.state[one.param_groups[0]["params"][0]] == {}
    for optimizer in (one, other):
        collage_neuron.compile(optimizer, strategy=strategy)
        follow(optimizer, range(2))
        optimizer.param_groups[0]["momentum"] = 0.9
        follow(optimizer, range(2, 4))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        follow(optimizer, range(4, 6))
    assert_same(one, other)
    plain = torch.optim.SGD([nn.Parameter(torch.ones(3))]).state_dict()
    fresh = collage_neuron.compile(torch.optim.SGD([nn.Parameter(torch.full((3,), 1.2345678))]), strategy=strategy)
    before = exact(fresh)[0]
    fresh.load_state_dict({"state": {0: {}}, "param_groups": plain["param_groups"]})
    assert torch.equal(exact(fresh)[0], before)
