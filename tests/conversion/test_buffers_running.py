"""Running statistics of a compiled model move as in fp32."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from buffer_models import compiled, images, loss_of, resnet
from torch import nn
from torch.optim import SGD

import collage_neuron
from collage_neuron import RoundedBuffers
from collage_neuron.numerics.strategies import STRATEGIES


@pytest.mark.parametrize("form", ["pair", "model"])
def test_running_statistics_move_as_in_fp32(form: str) -> None:
    """In bf16 the mean stands still as soon as a tenth of the difference is less than half an ulp of it."""
    model, optimizer = compiled(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)), form)
    twin = nn.BatchNorm1d(3)
    for seed in range(200):
        x = (torch.randn(64, 3, generator=torch.Generator().manual_seed(seed)) * 0.1 + 4.75).bfloat16()
        optimizer.zero_grad()
        loss_of(model(x)).backward()
        optimizer.step()
        twin(x.float())
    torch.testing.assert_close(model[0].running_mean, twin.running_mean, rtol=2**-20, atol=0)
    torch.testing.assert_close(model[0].running_var, twin.running_var, rtol=2**-8, atol=0)


class ByHand(nn.Module):
    """A norm of the user's: its arithmetic widens what it gets to the dtype of its statistics."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.running_mean: torch.Tensor
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("running_mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.running_mean.lerp_(x.detach().mean(0), 0.1)
        return (x - self.running_mean) * self.weight


@pytest.mark.parametrize("form", ["pair", "model"])
def test_a_norm_of_the_users_gets_fp32_and_gives_bf16(form: str) -> None:
    model, optimizer = compiled(nn.Sequential(nn.Linear(2, 2), ByHand(2), nn.Linear(2, 1)), form)
    model, optimizer = copy.deepcopy((model, optimizer)) if form == "pair" else (model, optimizer)
    model = pickle.loads(pickle.dumps(model)) if form == "pair" else model
    x = torch.ones(3, 2).bfloat16()
    loss_of(model(x)).backward()
    optimizer.step()
    assert model(x).dtype == torch.bfloat16
    assert (model[1].running_mean.dtype, model[1].weight.dtype) == (torch.float32, torch.float32)
    compiled(model, buffers="cast")
    assert model(x).dtype == torch.bfloat16
    assert model[1].running_mean.dtype == torch.bfloat16


def test_a_resnet_trains_on_xla(xla: torch.device) -> None:
    """torch_xla gives the convolution behind a batch norm fp32 numbers that it calls bf16, and XLA rejects them."""
    torch_xla = pytest.importorskip("torch_xla")
    model, optimizer = compiled(resnet(blocks=1).to(xla))
    twin, its = compiled(resnet(blocks=1))
    norm, other = model[0][1], twin[0][1]
    for i in range(2):
        for m, o, x in ((model, optimizer, images(i).to(xla)), (twin, its, images(i))):
            o.zero_grad()
            loss_of(m(x.bfloat16())).backward()
            o.step()
        torch_xla.sync()
        if i == 0:
            torch.testing.assert_close(norm.running_mean.cpu(), other.running_mean, rtol=2**-8, atol=2**-8)
    assert (norm.weight.dtype, norm.running_mean.dtype) == (torch.float32, torch.float32)
    with torch.no_grad():
        assert model.eval()(images().bfloat16().to(xla)).cpu().dtype == torch.bfloat16


class Frozen(nn.Module):
    """The batch norm of detection models: all of it buffers, by hand, so that fp32 would widen what it gets."""

    def __init__(self, width: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.full((width,), 1.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias, mean, var = self.buffers()
        scale = weight * (var + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


def test_a_frozen_batch_norm_becomes_bf16_and_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), Frozen(2), nn.Linear(2, 2))
    with pytest.warns(RoundedBuffers, match=r"cannot hold their values: .*1\.running_mean"):
        compiled(model)
    loss_of(model(torch.ones(3, 2).bfloat16())).backward()


@pytest.mark.sampled(of=3, each=False)  # what is fp32 is stored as under each strategy
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fp32_norms_among_bf16_layers_step_are_saved_copied_measured_and_explained(strategy: str) -> None:
    def run(steps: range, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for i in steps:
            optimizer.zero_grad()
            loss_of(model(images(i).bfloat16())).backward()
            optimizer.step()

    model, optimizer = compiled(resnet(), strategy=strategy)
    norm = model[0][1].weight
    with collage_neuron.monitor(optimizer, model) as monitor:
        run(range(3), model, optimizer)
    assert {v.dtype for k, v in optimizer.state[norm].items() if k != "step"} == {torch.float32}
    assert "param_lo" not in optimizer.state[norm]
    assert monitor.latest().modules["0.1"].pair.lost == 0  # type: ignore[union-attr]
    assert "6 parameters that stay fp32" not in collage_neuron.explain(optimizer)
    assert "10 parameters that stay fp32" in collage_neuron.explain(optimizer)
    own = sum(p.numel() for p in model.parameters())
    wide = sum(p.numel() for p in model.parameters() if p.dtype == torch.float32)
    small = {"bf16": 8, "light": 10, "plus": 12, "full": 14, "fp32": 16, "fp32_states": 12}.get(strategy, 8)
    if strategy.startswith("split"):
        small = 2 + sum(map(int, strategy.removeprefix("split")))
    shared = sum(v.nbytes for state in optimizer.state.values() for k, v in state.items() if k.endswith("_scale"))
    expected = (wide * 16 + (own - wide) * small + shared) / own
    assert collage_neuron.bytes_per_parameter(optimizer) == pytest.approx(expected)
    other, resumed = compiled(resnet(1), strategy=strategy)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied, its = copy.deepcopy((model, optimizer))
    for m, o in ((model, optimizer), (other, resumed), (copied, its)):
        run(range(3, 6), m, o)
    for m in (other, copied):
        assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), m.state_dict().values(), strict=True))
        assert {k: v.dtype for k, v in m.state_dict().items()} == {k: v.dtype for k, v in model.state_dict().items()}


@pytest.mark.parametrize("buffers", ["auto", "keep"])
def test_bf16_weights_beside_fp32_statistics_are_rejected(buffers: str) -> None:
    model = resnet()
    first, second = SGD(model[0].parameters()), SGD(model[1].parameters())
    collage_neuron.compile(first)  # does not know the model
    with pytest.raises(ValueError, match=r"'0\.1' \(BatchNorm2d\) has bfloat16 weights beside float32 running stat"):
        collage_neuron.compile(model, second, buffers=buffers)
    assert model[1].first.weight.dtype == torch.float32
    collage_neuron.compile(model, second, buffers="cast")
    loss_of(model(images().bfloat16())).backward()


def test_what_stays_fp32_stays_so_when_the_optimizer_is_compiled_again() -> None:
    model, optimizer = compiled(resnet(), strategy="light")
    collage_neuron.compile(model, optimizer, strategy="light")
    collage_neuron.compile(optimizer, strategy="light")
    model, optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    collage_neuron.compile(optimizer, strategy="light")
    loss_of(model(images().bfloat16())).backward()
    optimizer.step()
    assert model[0][1].weight.dtype == torch.float32
    collage_neuron.compile(model, optimizer, strategy="light", buffers="cast")
    loss_of(model(images().bfloat16())).backward()
    optimizer.step()
    assert model[0][1].weight.dtype == torch.bfloat16
