"""What the processes of `worlds` run: steps over shards that are traced, beside plain fp32 DTensors of torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import foreign
import inner_spread
import torch
import torch.distributed as dist
from as_written import Muon, Written
from sampling import part
from sharded_runs import (
    Run,
    backward,
    different,
    full,
    load,
    model_of,
    parameters_of,
    refusal,
    save,
    shard,
    train,
    whole,
)
from staged import Lamb, Novograd, StableAdamW
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.optim import AdamW, Optimizer
from traced_cases import LAUNCHED, Stepping
from wrapped_runs import Reading

import collage_neuron
from collage_neuron.runtime import process_agreement
from collage_neuron.states.sharding import local
from collage_neuron.trace.recorded_classes import TRACE

Make = Callable[[Any], Optimizer]

SHAPES = ((7, 6), (9,), (2, 3), (1, 5))
"""The last one leaves the second process without elements, and the others are uneven."""


class Sized(Lamb):
    """Divides gradients by the number of elements of the whole: for one shape, twice that of its shard."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] / p.numel())


class OneNorm(Written):
    """Scales all gradients by one norm."""

    keeps = False
    """True if one process keeps a value, and cannot launch the step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it gives no loss
        params = [p for group in self.param_groups for p in group["params"]]
        total = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in params]))
        if self.keeps and dist.get_rank() == 1:
            self.kept = [p.grad * 2 for p in params]
        for p in params:
            p.sub_(p.grad / (total + 1e-6), alpha=0.1)


def _looks(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Asks what only a DTensor can be asked, in steps after those that `compile` records, and works on parts."""
    if t < 3 or o.is_plain:
        p.sub_(g * g.abs(), alpha=lr)
        return
    assert all(isinstance(x, DTensor) for x in (p, g, g * 2))
    new: Any = torch.zeros_like(p)
    assert p.placements == g.placements == new.placements
    assert p.device.type == g.device.type == (g * 2).device.type == p.device_mesh.device_type == "cpu"
    assert (p.dtype, g.dtype, g.to_local().dtype) == (torch.float32,) * 3
    assert g.to_local().shape == p._local_tensor.shape
    m = new.add_(g)
    m.to_local().mul_(g.to_local().abs())  # of a parameter, the newest torch makes a view
    p.sub_(m, alpha=lr)


def _later(update: Any) -> Any:
    """The same: until then, plain steps."""

    def both(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
        update(o, p, g, s, lr, t) if t > 2 else p.sub_(g, alpha=lr)

    return both


@_later
def _adds_up_parts(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    g.to_local().div_(1.0 + g.to_local().norm())
    p.sub_(g, alpha=lr)


@_later
def _draws(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.add_(torch.randn_like(p), alpha=lr).sub_(g, alpha=lr)


@_later
def _writes_what_it_holds(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """In another order than that of the calls."""
    p.sub_(g, alpha=lr)
    o.held[id(p)].mul_(0.5)


@_later
def _states_of_parts(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    s["m"] = torch.zeros_like(p.to_local())
    p.sub_(g, alpha=lr)


class Holding(Stepping):
    """Holds the parts of the gradients that it is about to be given."""

    held: dict[int, Any]


TRACED: dict[str, Make] = {
    "sized": Sized,
    "adamw_foreach": partial(AdamW, lr=1e-2, foreach=True),
    "schedule_free": foreign.ScheduleFreeAdamW,
}
SUMMED: dict[str, Make] = {
    "lamb": Lamb,
    "stable_adamw": StableAdamW,
    "adds_up_parts": partial(Stepping, update=_adds_up_parts),
    "one_norm": OneNorm,
}
"""Those that add up elements, of parts, of parameters, or of all of them."""
AS_WRITTEN: dict[str, Make] = {
    "novograd": Novograd,
    "muon": Muon,
    "reads": Reading,
    "states_of_parts": partial(Stepping, update=_states_of_parts),
    "draws": partial(Stepping, update=_draws),
    "holds_gradients": partial(Holding, update=_writes_what_it_holds),
}
"""Those whose steps cannot be launched."""


class Ended(NamedTuple):
    """How some steps have ended."""

    different: list[str]
    misses: int
    kinds: int
    why: str


class Runs:
    """The same optimizer over parameters in shards, or over whole ones; compiled, or plain fp32."""

    def __init__(
        self,
        make: Make,
        how: Sequence[Any] | None,
        chosen: dict[str, Any] | None,
        mesh: DeviceMesh | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.mesh = mesh or init_device_mesh("cpu", (2,))
        self.how, self.is_compiled, self.dtype = how, chosen is not None, dtype
        starts = [torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(SHAPES)]
        self.params: list[Any] = [nn.Parameter(self._spread(x.to(dtype))) for x in starts]
        self.optimizer: Any = make(self.params)
        if chosen is not None:
            self.optimizer = collage_neuron.compile(self.optimizer, verbose=False, **chosen)

    def _spread(self, x: Tensor) -> Tensor:
        if self.how is None:
            return x
        how = [Shard(0) if x.dim() == 1 and each == Shard(1) else each for each in self.how]
        return distribute_tensor(x, self.mesh, how)

    def give(self, t: int, is_partial: bool = False) -> None:
        for i, p in enumerate(self.params):
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * t + i)).bfloat16()
            g = g if self.is_compiled else g.to(self.dtype)
            p.grad = self._spread(g)
            if is_partial and self.is_compiled:
                p.grad = DTensor.from_local(g if dist.get_rank() == 0 else 0 * g, self.mesh, [Partial()])

    def step(self, steps: range, is_partial: bool = False) -> Runs:
        torch.manual_seed(dist.get_rank() if self.how is not None else 0)
        for t in steps:
            self.give(t, is_partial)
            if isinstance(self.optimizer, Holding):
                self.optimizer.held = {id(p): p.grad._local_tensor for p in self.params}
            self.optimizer.step()
        return self

    def values(self) -> dict[str, Tensor]:
        """The values of parameters, and of gradients, rounded."""
        found: dict[str, Tensor] = {}
        for i, p in enumerate(self.params):
            value = collage_neuron.exact_value(self.optimizer, p) if self.is_compiled else p.detach()
            found |= {f"{i} param": full(value).float(), f"{i} grad": full(p.grad).bfloat16().float()}
        return found

    def ended(self, different: list[str]) -> Ended:
        traces = self.optimizer._collage_bookkeeping.traces
        return Ended(different, *((0, 0, "") if traces is None else (traces.misses, len(traces.kinds), traces.why)))


def far(found: Runs, expected: Runs, within: float = 0.0) -> list[str]:
    """The names of values that differ by more than a part of the largest; NaN is NaN."""
    pairs = zip(found.values().items(), expected.values().values(), strict=True)
    return [name for (name, x), y in pairs if not torch.allclose(x, y, 0.0, within * _largest(y), equal_nan=True)]


def _largest(x: Tensor) -> float:
    return float(x.nan_to_num().abs().max())


def as_written(
    make: Make, how: Sequence[Any] = (Shard(0),), is_partial: bool = False, mesh: DeviceMesh | None = None
) -> Ended:
    """What differs from plain torch over fp32 DTensors: a bit, or where launched steps come before, their roundings."""
    plain, ours = (Runs(make, how, chosen, mesh) for chosen in (None, {"strategy": "fp32", "backend": "reference"}))
    try:
        plain.step(range(5), is_partial)
    except RuntimeError as error:  # the newest torch rejects operations in place that change placements (Muon)
        said = refusal(lambda: ours.step(range(5), is_partial), RuntimeError)
        return Ended([] if said == str(error) else [said, str(error)], 1, 0, said)
    ours.step(range(5), is_partial)
    found = ours.ended([])
    return found._replace(different=far(ours, plain, 2**-20 if found.kinds else 0.0))


def summed(make: Make, how: Sequence[Any] = (Shard(0),), keeps: bool = False) -> Ended:
    """What differs by more than roundings from plain torch over the same DTensors in float64."""
    ours, exact = Runs(make, how, {"strategy": "fp32"}), Runs(make, how, None, dtype=torch.float64)
    ours.optimizer.keeps = keeps
    return ours.step(range(5)).ended(far(ours, exact.step(range(5)), 2**-20))


def launched(make: Make, how: Sequence[Any] = (Shard(0),), **chosen: Any) -> Ended:
    """What differs from whole parameters, and, within some roundings of the format, from plain torch."""
    os.environ[TRACE] = "on"
    ours, alone = (Runs(make, each, chosen).step(range(4)) for each in (how, None))
    del os.environ[TRACE]
    return ours.ended(different(whole(ours.optimizer), whole(alone.optimizer)))


class Looking(Stepping):
    """Steps as the update `_looks` does; or as if it did not look."""

    def __init__(self, params: Any, is_plain: bool = False) -> None:
        super().__init__(params, _looks)
        self.is_plain = is_plain


def looked() -> Ended:
    """Steps that ask what they are given, beside those that do not."""
    ours = Runs(Looking, (Shard(0),), {"strategy": "plus"}).step(range(4))
    plain = Runs(partial(Looking, is_plain=True), None, {"strategy": "plus"}).step(range(4))
    return ours.ended(different(whole(ours.optimizer), whole(plain.optimizer)))


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def fsdp(make: Callable[[Any], Optimizer], seed: int, strategy: str, **options: Any) -> Run:
    model = model_of(seed)
    shard(model, **options)
    return collage_neuron.compile(model, make(model.parameters()), strategy=strategy, verbose=False)


def trained(make: Callable[[Any], Optimizer], strategy: str, within: float = 0.0, **options: Any) -> list[str]:
    """What differs from plain fp32 DTensors that take the same gradients by more than that."""
    model, optimizer = fsdp(make, 0, strategy, **options)
    params = parameters_of(optimizer)
    values = [nn.Parameter(collage_neuron.exact_value(optimizer, p)) for p in params]
    training = inner_spread.Training(model, params, optimizer, values, make(values))
    return [*inner_spread.different(training, within, inner_spread.once), *unlike(optimizer)]


def unlike(optimizer: Optimizer) -> list[str]:
    """States that are called otherwise, or of another type, in another process."""
    own = [sorted((k, str(x.dtype)) for k, x in s.items() if isinstance(x, Tensor)) for s in optimizer.state.values()]
    all_of_them: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_of_them, own)
    return [f"{a} and {b}" for found in all_of_them for a, b in zip(found, own, strict=True) if a != b]


def resumed(make: Callable[[Any], Optimizer], strategy: str, folder: Path, flat: bool) -> list[str]:
    """What differs after a checkpoint was loaded by another run, which then takes the same steps."""
    run, other = fsdp(make, 0, strategy), fsdp(make, 1, strategy)
    train(run, range(3))
    run[1].zero_grad()
    save(run, folder, flat)
    load(other, folder, flat)
    loaded = different(whole(other[1]), whole(run[1]))
    for each in (run, other):
        train(each, range(3, 5))
    return [*(f"{name} as loaded" for name in loaded), *different(whole(other[1]), whole(run[1]))]


def of_fsdp(folder: Path) -> dict[str, list[str]]:
    """What is wrong of each claim; nothing has to be."""
    found = {"Novograd trained": trained(Novograd, "fp32")}
    found["sums"] = trained(Lamb, "fp32", 2**-20)
    found["launched"] = trained(foreign.Lion, "fp32", 2**-20)
    found["in words: lr, weight decay and two betas"] = trained(foreign.Lamb, "split433", 2**-14)
    found |= {"measured": measured(Lamb), "skipped": skipped(Lamb)}
    for make, strategy, flat in RESUMED:
        name = f"{make.__name__} resumed, {strategy}"
        found[name] = resumed(make, strategy, folder / name, flat)
    return found


RESUMED: Sequence[tuple[Any, str, bool]] = (
    (Lamb, "split433", True), (foreign.ScheduleFreeAdamW, "plus", False),
)  # fmt: skip
"""Optimizers, strategies, and whether the state is flattened; torch itself saves no partial DTensors (Novograd)."""


def measured(make: Callable[[Any], Optimizer]) -> list[str]:
    """What is wrong of what a monitor says of the own shards: under `fp32`, all of the update arrives."""
    model, optimizer = fsdp(make, 0, "fp32")
    monitor = collage_neuron.monitor(optimizer, model)
    train((model, optimizer), range(3))
    record: Any = monitor.latest()
    return [] if abs(record.total.pair.ratio - 1) < 2**-8 and record.step == 3 else [str(record)]


def skipped(make: Callable[[Any], Optimizer]) -> list[str]:
    """What is changed by a step in which one process has a NaN."""
    model = model_of(0)
    shard(model)
    optimizer: Any = make(model.parameters())
    run: Run = collage_neuron.compile(model, optimizer, nonfinite="skip", verbose=False)
    train(run, range(2))
    before = whole(run[1])
    run[1].zero_grad()
    backward(run[0], 2)
    for p in parameters_of(run[1])[:1] if dist.get_rank() == 1 else ():
        local(p.grad).fill_(torch.nan)  # type: ignore[arg-type]  # it has one
    run[1].step()
    return different(whole(run[1]), before)


MESHES = ((Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(0)), (Shard(0), Replicate()))


def of_meshes() -> dict[str, list[str]]:
    """The same in four processes, for replicas of shards, and shards in two dimensions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    meshes = part(MESHES, 2)
    found = {f"Lamb, {how}": as_written(Lamb, how, mesh=mesh).different for how in meshes}
    found["FSDP2"] = trained(Lamb, "fp32", 2**-20, mesh=mesh)
    found["a process without a gradient"] = [*(lacking(mesh, how) for how in meshes), lacking_in_part(mesh)]
    return found


def lacking(mesh: DeviceMesh, how: Sequence[Any]) -> str:
    """What a process says, one of which lacks a gradient; nothing if it has changed something."""
    run = Runs(Lamb, how, {}, mesh)
    run.give(0)
    before = whole(run.optimizer)
    if dist.get_rank() == 3:
        run.params[0].grad = None
    said = refusal(run.optimizer.step)
    return said if not different(whole(run.optimizer), before) else ""


def lacking_in_part(mesh: DeviceMesh) -> str:
    """The same, of a second group, whose mesh has two of the four processes: the others have to learn of it."""
    run, part = (Runs(Lamb, [Shard(0)] * m.ndim, {}, m) for m in (mesh, mesh["shard"]))
    run.optimizer.add_param_group({"params": part.params})
    run.give(0)
    part.give(0)
    if dist.get_rank() == 3:
        part.params[0].grad = None
    return refusal(run.optimizer.step)


# --- one decision -----------------------------------------------------------------------------------------------------


def _fails(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Raises in one process, before it needs the others."""
    if t == 3 and dist.get_rank() == 1 and not o.kept:
        o.kept.append(1)
        raise KeyError("one process")
    p.sub_(g / (1.0 + g.norm()), alpha=lr)


def _keeps_in_one(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Cannot be launched in one process, and needs no other one; it has states whose formats follow from the values."""
    if not s:
        s.update(m=torch.zeros_like(p), n=torch.zeros_like(p))
    s["m"].mul_(0.9).add_(g, alpha=0.1)
    s["n"].add_(1.0)
    if dist.get_rank() == 1:
        o.kept[id(p)] = g * 2
    p.sub_(s["m"] / s["n"], alpha=lr)


def steps_without(lacking: Callable[[list[Any]], Sequence[Any]], make: Make) -> list[str]:
    """What a step says if one process lacks gradients, what that changes, and whether a later one is right."""
    ours, plain = (Runs(make, (Shard(0),), chosen).step(range(2)) for chosen in ({"strategy": "fp32"}, None))
    before = whole(ours.optimizer)
    ours.give(2)
    for p in lacking(ours.params) if dist.get_rank() == 1 else ():
        p.grad = None
    said = refusal(ours.optimizer.step)
    changed = different(whole(ours.optimizer), before)
    return [said, *changed, *far(ours.step(range(3, 4)), plain.step(range(3, 4)), 2**-20)]


def failed() -> list[str]:
    """What a step says of which one process raises an error, what that changes, and whether a later one is right."""
    ours = Runs(partial(Stepping, update=_fails), (Shard(0),), {"strategy": "fp32"})
    ours.optimizer.kept = []
    ours.step(range(2))
    before = whole(ours.optimizer)
    ours.give(2)
    said = refusal(ours.optimizer.step, Exception)
    return [said, *different(whole(ours.optimizer), before)]


def of_what_is_sent() -> list[object]:
    """What processes do that would launch the same sums, others, or the same for gradients of other parameters."""
    params, rank = Runs(Lamb, (Shard(0),), None).params, dist.get_rank()
    ask = partial(process_agreement.agreed, params[:2])
    return [
        ask([True, True], process_agreement.LAUNCHES, "one sum"),
        ask([True, True], process_agreement.LAUNCHES, rank),
        ask([True, True], process_agreement.READS, "one number"),
        ask([True, True], process_agreement.READS if rank else process_agreement.LAUNCHES),
        ask([rank == 0, True], process_agreement.LAUNCHES),
        refusal(lambda: ask([rank == 0, True], process_agreement.LAUNCHES, "one sum"), ValueError),
    ]


def one_decision() -> dict[str, Any]:
    """What came of steps of which one process cannot take what the others can."""
    kept = Runs(partial(Stepping, update=_keeps_in_one), (Shard(0),), {"strategy": "split433"}).step(range(5))
    return {
        "sent": of_what_is_sent(),
        "kept and read": summed(OneNorm, keeps=True),
        "without": [steps_without(part, Lamb) for part in (lambda params: params[1:2], lambda params: params)],
        "launched without": steps_without(lambda params: params[1:2], foreign.Lion),
        "failed": failed(),
        "unlike": unlike(kept.optimizer),
        "misses": kept.ended([]).misses,
    }


def all_launched() -> dict[str, Ended]:
    """All of it, in one world."""
    found = {name: launched(make, strategy="split433") for name, make in TRACED.items()}
    found["columns"] = launched(TRACED["adamw_foreach"], [Shard(1)], strategy="plus")
    found["replicas"] = launched(foreign.Lion, [Replicate()], strategy="fp32")
    found["random bits"] = launched(partial(Stepping, update=LAUNCHED["momentum"]), strategy="stochastic")
    return found | {"looks": looked()}


def all_as_written() -> dict[str, Ended]:
    """The same of steps that cannot be launched, and of sums."""
    found = {name: as_written(make) for name, make in AS_WRITTEN.items()}
    found |= {name: summed(make) for name, make in SUMMED.items()} | {"lamb of columns": summed(Lamb, [Shard(1)])}
    found["muon of replicas"] = as_written(Muon, [Replicate()])
    return found | {"novograd, partial gradients": as_written(Novograd, is_partial=True)}
