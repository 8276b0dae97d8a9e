"""Averages of the weights: of the values that the optimizer keeps, in fp32, under the names that torch gives them."""

from __future__ import annotations

import copy
import gc
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from buffer_models import images, loss_of, resnet
from models import equal_states, mlp, train
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim import swa_utils as torchs
from worlds import in_turn, run_world

import collage_neuron
from collage_neuron import AveragedModel, RoundedWeights, exact_value

STRATEGIES = ("bf16", "light", "plus", "full", "fp32", "stochastic")


def small_steps(strategy: str = "plus", device: str | torch.device = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    """Weights near 1 that move by some 2**-13 a step: far less than half an ulp of bf16."""
    torch.manual_seed(0)
    model = nn.Linear(64, 16)
    nn.init.uniform_(model.weight, 0.5, 2)
    model.to(device)
    return collage_neuron.compile(model, AdamW(model.parameters(), lr=1e-4), strategy=strategy)


def drift(model: nn.Module, step: int) -> None:
    """A gradient of mostly one sign for each element."""
    for p in model.parameters():
        sign = torch.randn(p.shape, generator=torch.Generator().manual_seed(0)).sign()
        p.grad = (sign + torch.randn(p.shape, generator=torch.Generator().manual_seed(step))).to(p.dtype)


def error(found: nn.Module, wide: list[torch.Tensor], start: list[torch.Tensor]) -> float:
    """How far an average is from that in float64, relative to how far that one came."""
    off = sum(float((p.detach().double() - w).square().sum()) for p, w in zip(found.parameters(), wide, strict=True))
    return math.sqrt(off / sum(float((w - s).square().sum()) for w, s in zip(wide, start, strict=True)))


@pytest.mark.filterwarnings("ignore::collage_neuron.RoundedAverage")
def test_an_average_of_2000_small_steps_is_one_of_fp32() -> None:
    """Each update rounds an element to 2**-24 of it, at random; what is lost is in the square root of their number.

    torch's own, over the same values in fp32, bounds it. Over the compiled model it loses most of the average.
    """
    model, optimizer = small_steps()
    given = nn.Linear(64, 16)  # an fp32 model with the exact values
    decays, wide, start = (0.999, 0.9999), dict[float, list[torch.Tensor]](), list[torch.Tensor]()
    averages = {decay: AveragedModel(model, optimizer, decay=decay) for decay in decays}
    of_fp32, of_bf16 = (
        {decay: torchs.AveragedModel(m, multi_avg_fn=torchs.get_ema_multi_avg_fn(decay)) for decay in decays}
        for m in (given, model)
    )
    for step in range(2000):
        drift(model, step)
        optimizer.step()
        values = [exact_value(optimizer, p) for p in model.parameters()]
        with torch.no_grad():
            for p, v in zip(given.parameters(), values, strict=True):
                p.copy_(v)
        start = start or [v.double() for v in values]
        for decay in decays:
            for a, m in ((averages, model), (of_fp32, given), (of_bf16, model)):
                a[decay].update_parameters(m)
            for w, v in zip(wide.setdefault(decay, [v.double() for v in values]), values, strict=True):
                w += (1 - decay) * (v.double() - w)
    for decay in decays:
        ours, theirs, lost = (error(a[decay], wide[decay], start) for a in (averages, of_fp32, of_bf16))
        assert ours < 1.5 * theirs + 2**-20
        assert ours < 2**-14
        assert lost > 2**-3


AVERAGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mean": ({}, {}),
    "decay": ({"decay": 0.9}, {"multi_avg_fn": torchs.get_ema_multi_avg_fn(0.9)}),
    "torch's EMA": ({"multi_avg_fn": torchs.get_ema_multi_avg_fn(0.9)},) * 2,
    "torch's EMA, one by one": ({"avg_fn": torchs.get_ema_avg_fn(0.9)},) * 2,
    "torch's SWA": ({"multi_avg_fn": torchs.get_swa_multi_avg_fn()},) * 2,
    "torch's SWA, one by one": ({"avg_fn": torchs.get_swa_avg_fn()},) * 2,
}
"""Arguments of ours, and those of torch's that mean the same."""


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", AVERAGES)
def test_every_way_to_average_is_torchs_over_exact_values(name: str, strategy: str) -> None:
    ours, its = AVERAGES[name]
    model, optimizer = small_steps(strategy)
    average = AveragedModel(model, optimizer, **ours)
    given = nn.Linear(64, 16)
    twin = torchs.AveragedModel(given, **its)
    for step in range(5):
        drift(model, step)
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(model.parameters(), given.parameters(), strict=True):
                q.copy_(exact_value(optimizer, p))
        average.update_parameters(model)
        twin.update_parameters(given)
    assert average.state_dict().keys() == twin.state_dict().keys()
    assert int(average.n_averaged) == 5
    for p, q in zip(average.parameters(), twin.parameters(), strict=True):
        assert p.dtype == torch.float32
        torch.testing.assert_close(p, q, rtol=2**-22, atol=2**-24)


def test_it_may_be_made_before_the_line_and_before_a_pending_optimizer_is_compiled() -> None:
    before, after = mlp(), mlp()
    optimizer, other = (SGD(m.parameters(), lr=0.1) for m in (before, after))
    average = AveragedModel(before, optimizer, decay=0.5)
    collage_neuron.compile(before, optimizer)
    collage_neuron.compile(after)
    second = AveragedModel(after, other, decay=0.5)
    for step in range(3):
        train(before, optimizer, [step])
        train(after, other, [step])
        average.update_parameters(before)
        second.update_parameters(after)
    assert equal_states(average.state_dict(), second.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))], ids=["deepcopy", "pickle"])
def test_copies_go_on_bit_for_bit_once_they_know_the_optimizer(copied: Callable[[Any], Any]) -> None:
    model, optimizer = small_steps()
    average = AveragedModel(model, optimizer, decay=0.9)
    for step in range(3):
        drift(model, step)
        optimizer.step()
        average.update_parameters(model)
    copy_of = copied(average)
    other, its = copied((model, optimizer))
    with pytest.raises(TypeError, match=r"does not know whose values to average: call update_parameters\(model, opt"):
        copy_of.update_parameters(other)
    for step in range(3, 6):
        for m, o, a, given in ((model, optimizer, average, ()), (other, its, copy_of, (its,))):
            drift(m, step)
            o.step()
            a.update_parameters(m, *given)
    assert equal_states(average.state_dict(), copy_of.state_dict())


def test_a_resumed_average_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, average: AveragedModel, steps: range) -> None:
        for step in steps:
            drift(model, step)
            optimizer.step()
            average.update_parameters(model)

    model, optimizer = small_steps()
    average = AveragedModel(model, optimizer)
    run(model, optimizer, average, range(3))
    torch.save([x.state_dict() for x in (model, optimizer, average)], tmp_path / "saved.pt")
    run(model, optimizer, average, range(3, 6))
    others = small_steps()
    resumed = *others, AveragedModel(*others)
    for x, state in zip(resumed, torch.load(tmp_path / "saved.pt"), strict=True):
        cast(Any, x).load_state_dict(state)
    run(*resumed, range(3, 6))
    assert equal_states(resumed[2].state_dict(), average.state_dict())


def test_checkpoints_of_torchs_load_into_ours_and_ours_into_torchs() -> None:
    model, optimizer = small_steps()
    ours, its = AveragedModel(model, optimizer), torchs.AveragedModel(nn.Linear(64, 16))
    drift(model, 0)
    optimizer.step()
    ours.update_parameters(model)
    its.load_state_dict(ours.state_dict())
    assert equal_states(its.state_dict(), ours.state_dict())
    its.update_parameters(nn.Linear(64, 16))
    ours.load_state_dict(its.state_dict())
    assert equal_states(its.state_dict(), ours.state_dict())


@pytest.mark.parametrize("use_buffers", [False, True])
def test_buffers_are_copied_or_averaged_and_update_bn_works(use_buffers: bool) -> None:
    model = resnet()
    model, optimizer = collage_neuron.compile(model, AdamW(model.parameters(), lr=1e-3))
    average = AveragedModel(model, optimizer, use_buffers=use_buffers)
    means = []
    for i in range(3):
        loss_of(model(images(i).bfloat16())).backward()
        optimizer.step()
        average.update_parameters(model)
        means.append(model[0][1].running_mean.clone())
    norm = cast(Any, average.module)[0][1]
    expected = torch.stack(means).mean(0) if use_buffers else means[-1]
    torch.testing.assert_close(norm.running_mean, expected, rtol=2**-20, atol=2**-22)
    assert int(norm.num_batches_tracked) == 3
    assert {t.dtype for t in average.state_dict().values()} == {torch.float32, torch.int64}
    torchs.update_bn([images(i) for i in range(4)], average)
    assert int(norm.num_batches_tracked) == 4
    assert average.eval()(images()).dtype == torch.float32
    evaluated = copy.deepcopy(model)
    with pytest.warns(RoundedWeights, match="are rounded to bf16 as they are loaded"):
        evaluated.load_state_dict(average.module.state_dict())  # the average as a bf16 model
    assert evaluated.eval()(images().bfloat16()).dtype == torch.bfloat16


def test_several_optimizers_frozen_parameters_and_ties() -> None:
    model: Any = mlp()
    model[4].weight.requires_grad_(False)
    model.register_parameter("tied", model[0].weight)
    optimizers = [SGD(model[0].parameters(), lr=1e-4), SGD(model[2].parameters(), lr=1e-4)]
    collage_neuron.compile(model)
    for step in range(2):
        train(model, optimizers[0], [step])
        optimizers[1].step()
    for given in (optimizers, optimizers[0]):
        average = AveragedModel(model, given, decay=0.5)
        average.update_parameters(model)
        averaged: Any = average.module
        for module, owner in ((0, optimizers[0]), (2, optimizers[1])):
            mine, its = averaged[module].weight, exact_value(owner, model[module].weight)
            assert torch.equal(mine, its)
            assert not torch.equal(mine, model[module].weight.float())
        assert averaged.tied is averaged[0].weight
        assert torch.equal(averaged[4].weight, model[4].weight.float())


# --- what is rejected -------------------------------------------------------------------------------------------------


def test_two_ways_to_average_a_wrong_decay_and_other_models_are_rejected() -> None:
    model, optimizer = small_steps()
    with pytest.raises(ValueError, match="avg_fn, multi_avg_fn and decay each say how to average; give one of them"):
        AveragedModel(model, optimizer, avg_fn=torchs.get_swa_avg_fn(), decay=0.9)
    with pytest.raises(ValueError, match=r"decay is 1\.5; give a number from 0 to 1"):
        AveragedModel(model, optimizer, decay=1.5)
    with pytest.raises(ValueError, match="averaged module has 6 parameters and the Linear 2"):
        AveragedModel(model, optimizer, module=mlp())
    average = AveragedModel(model, optimizer)
    with pytest.raises(ValueError, match="holds no parameter of this Linear"):
        average.update_parameters(nn.Linear(64, 16))


def test_an_optimizer_that_is_not_compiled_or_gone_is_rejected() -> None:
    model = nn.Linear(2, 2)
    plain = SGD(model.parameters())
    with pytest.raises(TypeError, match="the optimizer is a NoneType; give the compiled one, or several in a list"):
        AveragedModel(model, None)  # type: ignore[arg-type]
    average = AveragedModel(model, plain)
    with pytest.raises(TypeError, match="SGD is not compiled"):
        average.update_parameters(model)
    del plain
    gc.collect()
    with pytest.raises(TypeError, match="or outlived its optimizer"):
        average.update_parameters(model)


def test_torchs_own_made_before_the_line_says_so_itself() -> None:
    """What `docs/checkpoints.md` says of it: an error, while one that is made after the line is silently wrong."""
    model = nn.Linear(2, 2)
    average = torchs.AveragedModel(model, multi_avg_fn=torchs.get_ema_multi_avg_fn(0.9))
    collage_neuron.compile(model, SGD(model.parameters()))
    average.update_parameters(model)
    with pytest.raises(RuntimeError, match="dtype"):
        average.update_parameters(model)


# --- devices and processes --------------------------------------------------------------------------------------------


def test_on_xla_nothing_is_fetched_and_a_mean_compiles_once(xla: torch.device) -> None:
    torch_xla = pytest.importorskip("torch_xla")
    met = pytest.importorskip("torch_xla.debug.metrics")
    for strategy in ("plus", "fp32"):
        model, optimizer = small_steps(strategy, xla)
        twin, its = small_steps(strategy)
        average, other = AveragedModel(model, optimizer).to(xla), AveragedModel(twin, its)
        compiles = []
        for step in range(6):
            for m, o, a in ((model, optimizer, average), (twin, its, other)):
                for p in m.parameters():
                    sign = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(torch.bfloat16)
                    p.grad = sign.to(p.device)
                o.step()
                if m is model:
                    torch_xla.sync(wait=True)
                    met.clear_all()
                a.update_parameters(m)
                if m is model:
                    assert met.metric_data("TransferFromDeviceTime") is None
                    torch_xla.sync(wait=True)
                    compiles.append(met.counter_value("UncachedCompile") or 0)
        assert sum(compiles[3:]) == 0
        assert average.n_averaged.device.type == "cpu"
        for p, q in zip(average.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p.cpu(), q, rtol=2**-16, atol=2**-18)


def _sharded(wrap: str) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def built() -> Any:
        model: Any = mlp()
        if wrap == "fsdp2":
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=mesh)
        return model

    model = built()
    if wrap == "fsdp2":
        optimizer = AdamW(model.parameters(), lr=1e-3)
        model, optimizer = collage_neuron.compile(model, optimizer)
        with pytest.raises(TypeError, match=r"cannot be copied .*AveragedModel\(model, optimizer, module=second\)"):
            AveragedModel(model, optimizer)
        average = AveragedModel(model, optimizer, decay=0.5, module=built())
    else:
        model, optimizer = collage_neuron.compile(model, AdamW(model.parameters(), lr=1e-3))
        average = AveragedModel(model, optimizer, decay=0.5)
        model = DistributedDataParallel(model, init_sync=False) if wrap == "ddp" else model
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        optimizer.zero_grad()
        model(x.bfloat16()).float().square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model(x.bfloat16())  # leaves what FSDP2 gathers
        average.update_parameters(model)
        with torch.no_grad():
            average(x)
    average.update_parameters(model)
    return [cast(Any, p.detach()).full_tensor() if wrap == "fsdp2" else p.detach() for p in average.parameters()]


def test_shards_and_replicas_end_with_the_average_of_one_process(tmp_path: Path) -> None:
    expected = _sharded("none")
    for found in run_world(2, tmp_path, in_turn, {wrap: (_sharded, wrap) for wrap in ("ddp", "fsdp2")}):
        for averages in found.values():
            assert all(torch.equal(a, b) for a, b in zip(averages, expected, strict=True))
