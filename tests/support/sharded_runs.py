"""What the processes of `worlds` run: the same small training under each kind of sharding, returned unsharded.

Rows of 5 and 1 are uneven on two and four processes, and leave some with none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves
from worlds import traffic

import collage_neuron
from collage_neuron import set_exact_value
from collage_neuron.checkpoint.fp32 import get_fp32_state_dict, set_fp32_state_dict
from collage_neuron.numerics.formats import format_named
from collage_neuron.numerics.strategies import STRATEGIES

Whole = dict[str, torch.Tensor]
"""Every tensor of parameters and states, by name, unsharded, as integers: bits are compared."""

STEPS = 6


def model_of(seed: int, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5, bias=bias), nn.GELU(), nn.Linear(5, 1, bias=bias))


def model_for(strategy: str, seed: int) -> nn.Sequential:
    """Without vectors where blocks of elements share words: a shard cuts the one row that a vector is."""
    return model_of(seed, bias=not has_blocks(strategy))


def has_blocks(strategy: str) -> bool:
    s = STRATEGIES[strategy]
    return any(format_named(f).is_coded for f in (s.param, s.state, s.slow))


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """FSDP2, a group of parameters for each layer."""
    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


# --- kinds of sharding, and ways to compile under each ---------------------------------------------------------------

Run = tuple[nn.Module, Optimizer]
"""What is called, and its optimizer."""


def plain(model: nn.Module, strategy: str) -> Run:
    return collage_neuron.compile(model, adamw(model), strategy=strategy)


def ddp(model: nn.Module, strategy: str, **settings: Any) -> Run:
    """`init_sync=False`: all processes made the same weights, and keep the low words of the fp32 ones."""
    model, optimizer = collage_neuron.compile(model, adamw(model), strategy=strategy, **settings)
    return DistributedDataParallel(model, init_sync=False), optimizer


def ddp_model(model: nn.Module, strategy: str) -> Run:
    wrapped = DistributedDataParallel(collage_neuron.compile(model, strategy=strategy), init_sync=False)
    return wrapped, adamw(wrapped)


def fsdp(model: nn.Module, strategy: str, **settings: Any) -> Run:
    """The usual order: shard fp32 weights, build the optimizer, and then the one line."""
    shard(model)
    return collage_neuron.compile(model, adamw(model), strategy=strategy, **settings)


def fsdp_mixed(model: nn.Module, strategy: str) -> Run:
    """A script that ran with fp32 shards and bf16 computation: the policy has nothing left to cast."""
    shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return collage_neuron.compile(model, adamw(model), strategy=strategy)


def fsdp_optimizer(model: nn.Module, strategy: str) -> Run:
    shard(model)
    return model, collage_neuron.compile(adamw(model), strategy=strategy)


def fsdp_model(model: nn.Module, strategy: str) -> Run:
    shard(model)
    return model, adamw(collage_neuron.compile(model, strategy=strategy))


def fsdp_last(model: nn.Module, strategy: str) -> Run:
    collage_neuron.compile(model, strategy=strategy)
    shard(model)
    return model, adamw(model)


def hsdp(model: nn.Module, strategy: str, **settings: Any) -> Run:
    """Two replicas of shards."""
    sizes = 2, dist.get_world_size() // 2
    shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")))
    return collage_neuron.compile(model, adamw(model), strategy=strategy, **settings)


KINDS: dict[str, Callable[[nn.Module, str], Run]] = {
    k.__name__: k for k in (plain, ddp, ddp_model, fsdp, fsdp_mixed, fsdp_optimizer, fsdp_model, fsdp_last)
}


# --- training ---------------------------------------------------------------------------------------------------------


def backward(model: nn.Module, step: int, rank: int = 0) -> None:
    """Gradients of a batch that depends on the step and, where they are to differ, on the process."""
    g = torch.Generator().manual_seed(100 * rank + step)
    loss = model(torch.randn(4, 6, generator=g).bfloat16()).float().square().mean()
    loss.backward()


def train(run: Run, steps: range) -> None:
    """The same batch in every process: its gradient is the mean of theirs, to the last bit."""
    model, optimizer = run
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


def full(t: torch.Tensor) -> torch.Tensor:
    """Gathered; no backend of torch.distributed sends 16-bit integers."""
    if not isinstance(t, DTensor):
        return t
    sent: Any = t.int() if t.dtype == torch.int16 else t
    gathered: torch.Tensor = sent.full_tensor().to(t.dtype)
    return gathered


def parameters_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def whole(optimizer: Optimizer) -> Whole:
    """States whose words blocks share as their values: which words those have depends on the shards."""
    found: Whole = {}
    saved = optimizer.state_dict()["state"]
    for i, p in enumerate(parameters_of(optimizer)):
        tensors = {name: v for name, v in saved.get(i, {}).items() if isinstance(v, torch.Tensor)}
        for name, value in {"param": p, **tensors}.items():
            t = full(value).detach().contiguous()
            found[f"{i} {name}"] = t.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[t.element_size()]).clone()
    return found


def different(found: Whole, expected: Whole) -> list[str]:
    """Names under which two of these do not hold the same bits."""
    names = found.keys() | expected.keys()
    return sorted(k for k in names if k not in found or k not in expected or not torch.equal(found[k], expected[k]))


def trajectory(kind: str, strategy: str) -> Whole:
    """All bits after STEPS steps from the weights of seed 0."""
    run = KINDS[kind](model_for(strategy, 0), strategy)
    train(run, range(STEPS))
    return whole(run[1])


def trajectories(cases: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Whole]:
    return {case: trajectory(*case) for case in cases}


def trajectory_on_mesh(strategy: str) -> Whole:
    run = hsdp(model_of(0), strategy)
    train(run, range(STEPS))
    return whole(run[1])


# --- what each process sees -------------------------------------------------------------------------------------------


def placement(kind: str, strategy: str) -> dict[str, Any]:
    """Bytes handed to collectives in a step (while gradients are made; in the update), and what lies where."""
    run = KINDS[kind](model_of(0), strategy)
    train(run, range(2))
    run[1].zero_grad()
    with traffic() as gradients:
        backward(run[0], 2, dist.get_rank())
    with traffic() as update:
        run[1].step()
    params = parameters_of(run[1])
    states = [(p, k, v) for p in params for k, v in run[1].state[p].items() if v.dim() > 0]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in params]
    return {
        "gradients": gradients,
        "update": update,
        "rows": [t.shape[0] for t in local],
        "elements": sum(t.numel() for t in local),
        "sharded like the parameter": all(
            isinstance(v, DTensor) == isinstance(p, DTensor)
            and getattr(v, "placements", 0) == getattr(p, "placements", 0)
            for p, _, v in states
        ),
        "keys": {k for _, k, _ in states},
        "bytes of states": sum((v.to_local() if isinstance(v, DTensor) else v).nbytes for _, _, v in states),
    }


def replicas(seeds: Sequence[int], compile_model_alone: bool) -> Whole:
    """DDP as most scripts have it: processes that made different weights, of which those of the first are sent."""
    model: nn.Module = model_of(seeds[dist.get_rank()])
    optimizer: Optimizer
    if compile_model_alone:
        model = DistributedDataParallel(collage_neuron.compile(model, strategy="full"))
        optimizer = adamw(model)
    else:
        model, optimizer = collage_neuron.compile(model, adamw(model), strategy="full")
        model = DistributedDataParallel(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step, dist.get_rank())
        optimizer.step()
    return whole(optimizer)


PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "replicated": Replicate()}


def tensor_parallel(strategy: str) -> dict[str, list[str]]:
    """Names of what differs from an unsharded run, for each placement, with gradients that lie in parts or not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrong: dict[str, list[str]] = {}
    for name, how in PLACEMENTS.items():
        start = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
        p = nn.Parameter(distribute_tensor(start.clone(), mesh, [how]))
        q = nn.Parameter(start.clone())
        optimizers = [collage_neuron.compile(AdamW([x], lr=1e-2), strategy=strategy) for x in (p, q)]
        for step in range(3):
            g = torch.randn(3, 5, generator=torch.Generator().manual_seed(step)).bfloat16()
            q.grad = g.clone()
            part = g if dist.get_rank() == 0 else torch.zeros_like(g)
            whole_gradient = distribute_tensor(g, mesh, [how])
            p.grad = whole_gradient if step != 1 else DTensor.from_local(part, mesh, [Partial()])
            for optimizer in optimizers:
                optimizer.step()
        found, expected = map(whole, optimizers)
        wrong[name] = [k for k in expected if not torch.equal(found[k], expected[k])]
    return wrong


def after_a_forward() -> str:
    """The refusal of a model whose buffers FSDP2 has laid out in fp32, and that nothing was changed."""
    model = shard(model_of(0))
    optimizer = adamw(model)
    model(torch.randn(4, 6))
    said = refusal(lambda: collage_neuron.compile(model, optimizer))
    assert type(optimizer) is AdamW
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return said


def unsharded_values() -> list[str]:
    """The refusals of fp32 values that are not sharded as the parameters are, and that nothing was changed."""
    model, optimizer = fsdp(model_of(0), "plus")
    train((model, optimizer), range(1))
    weights, states = get_fp32_state_dict(model, optimizer)
    weights = {name: full(w) for name, w in weights.items()}
    other = fsdp(model_of(1), "plus")
    before = whole(other[1])
    p = parameters_of(other[1])[0]
    messages = [
        refusal(lambda: set_fp32_state_dict(*other, model_state_dict=weights, optim_state_dict=states)),
        refusal(lambda: set_exact_value(other[1], p, weights["0.weight"])),
    ]
    return messages if different(whole(other[1]), before) == [] else ["something was changed"]


def refusal(call: Callable[[], object], kind: type[Exception] = ValueError, otherwise: str = "no refusal") -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return otherwise


def written(strategy: str) -> list[str]:
    """What is off after weights were written by other code, and by another optimizer over the same shards."""
    model, first = fsdp(model_of(0), strategy)  # shards of 5 rows are uneven
    second = collage_neuron.compile(adamw(model), strategy=strategy, verbose=False)
    params, wrong = parameters_of(first), list[str]()
    for p in params:
        p.grad = torch.zeros_like(p)
    first.step()
    second.step()
    others = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    model.load_state_dict(others)
    for p, x in zip(params, others.values(), strict=True):
        if not torch.equal(full(collage_neuron.exact_value(first, p)), full(x).float()):
            wrong.append(f"loaded: {list(p.shape)}")
    for p in params:
        value = torch.full_like(p, 1.2345, dtype=torch.float32)
        set_exact_value(second, p, value)
        if ((full(collage_neuron.exact_value(first, p)) - full(value)).abs() > 2**-16).any():
            wrong.append(f"set: {list(p.shape)}")
    return wrong


def moved(strategy: str) -> list[str]:
    """What is off if torch counts writes to shards anew, and as far as before, since a module was moved."""
    model, first = fsdp(model_of(0), strategy)
    second = collage_neuron.compile(adamw(model), strategy=strategy, verbose=False)
    params = parameters_of(first)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        first.step()
        model.to("cpu")
    values = ([full(collage_neuron.exact_value(x, p)) for x in (first, second)] for p in params)
    return [f"moved: {list(one.shape)}" for one, other in values if not torch.equal(one, other)]


class Product(Optimizer):
    """Its steps run as written."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad @ (p.grad.T @ p.grad), alpha=0.01)


def placed(strategy: str) -> list[str]:
    """What is off if values and states have other placements, and if a step as written has stored shards."""
    _, first = fsdp(model_of(0, bias=False), strategy)
    params: list[Any] = parameters_of(first)
    second = collage_neuron.compile(Product(params, {}), strategy=strategy, verbose=False)
    for optimizer in (first, second):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    p, wrong = params[0], list[str]()
    one, other = (full(collage_neuron.exact_value(x, p)) for x in (first, second))
    if not torch.equal(one, other):
        wrong.append("as written")
    value = torch.linspace(1, 2, p.numel()).view(p.shape)
    set_exact_value(first, p, distribute_tensor(value, p.device_mesh, [Replicate()]))
    if (full(collage_neuron.exact_value(first, p)) - value).abs().max() > 2**-16:
        wrong.append("set")
    first.state[p]["exp_avg"] = first.state[p]["exp_avg"].redistribute(p.device_mesh, [Replicate()])
    return wrong if "has the placements" in refusal(first.step) else [*wrong, "a state of another placement"]


# --- torch.distributed.checkpoint -------------------------------------------------------------------------------------


def save(run: Run, folder: Path, flat: bool = False) -> None:
    model, optimizer = get_state_dict(*run, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    state_dict_saver.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)


def load(run: Run, folder: Path, flat: bool = False) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(*run, options=options)
    state_dict_loader.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    set_state_dict(*run, model_state_dict=model, optim_state_dict=optimizer, options=options)


def consolidated(strategy: str) -> tuple[Whole, Whole]:
    """All bits of a sharded run, and of another that was given the first one's unsharded state."""
    options = StateDictOptions(full_state_dict=True)
    run, other = fsdp(model_of(0), strategy), fsdp(model_of(1), strategy)
    train(run, range(2))
    model, optimizer = get_state_dict(*run, options=options)
    assert not any(isinstance(v, DTensor) for v in tree_leaves(optimizer))
    set_state_dict(*other, model_state_dict=model, optim_state_dict=optimizer, options=options)
    for one in (run, other):
        train(one, range(2, 4))
    return whole(run[1]), whole(other[1])


def refusals(strategy: str) -> list[str]:
    """What loading says to an unsharded state of a sharded optimizer, and the other way round; nothing may change."""
    sharded, alone = fsdp(model_of(0), strategy), plain(model_of(0), strategy)
    said = []
    for run in (sharded, alone):
        train(run, range(1))
    for into, source in ((sharded, alone), (alone, sharded)):
        before = whole(into[1])
        said.append(refusal(partial(into[1].load_state_dict, source[1].state_dict())))
        assert different(whole(into[1]), before) == []
    return said


def leg(kind: str, strategies: Sequence[str], steps: range, folder: Path, flat: bool = False) -> dict[str, Any]:
    """Part of a run, by strategy: loads what the leg before it saved, trains, saves; all bits (as loaded, at the end).

    A leg that loads starts from other weights.
    """
    found = {}
    for strategy in strategies:
        run = KINDS[kind](model_for(strategy, 0 if steps.start == 0 else 1), strategy)
        if steps.start > 0:
            load(run, folder / f"{strategy} {steps.start}", flat)
        loaded = whole(run[1]) if steps.start > 0 else {}
        train(run, steps)
        run[1].zero_grad()
        save(run, folder / f"{strategy} {steps.stop}", flat)
        found[strategy] = (loaded, whole(run[1]))
    return found


# --- blocks that shards cut, and ZeRO-1 of torch ----------------------------------------------------------------------


def _vectors(strategy: str, seed: int, sharded: bool) -> Run:
    """A model of one vector, which is one row of several blocks: shards cut it."""
    model = nn.Module()
    model.vector = nn.Parameter(torch.randn(600, generator=torch.Generator().manual_seed(seed)))
    if sharded:
        fully_shard(model)
    return collage_neuron.compile(model, adamw(model), strategy=strategy)


def _vector_steps(run: Run, steps: range) -> Run:
    for step in steps:
        for p in parameters_of(run[1]):
            g = torch.randn(600, generator=torch.Generator().manual_seed(step)).bfloat16()
            p.grad = distribute_tensor(g, p.device_mesh, p.placements) if isinstance(p, DTensor) else g
        run[1].step()
    for p in parameters_of(run[1]):
        p.grad = None
    return run


def cut(strategies: Sequence[str], folder: Path, sharded: bool) -> dict[str, dict[str, torch.Tensor]]:
    """The values of the states after two steps that are saved, or as another process reads them; a step goes on."""
    found = {}
    for strategy in strategies:
        if sharded:
            run = _vector_steps(_vectors(strategy, 0, sharded), range(2))
            save(run, folder / strategy)
        else:
            run = _vectors(strategy, 1, sharded)
            load(run, folder / strategy)
        saved = run[1].state_dict()["state"][0]
        found[strategy] = {k: full(v).clone() for k, v in saved.items() if k in ("exp_avg", "exp_avg_sq")}
        _vector_steps(run, range(2, 3))
    return found


def zero(strategies: Sequence[str]) -> dict[str, list[str]]:
    """Names of what differs after torch's ZeRO-1 resumed from its own consolidated state, by strategy."""
    return {strategy: _zero(strategy) for strategy in strategies}


def _zero(strategy: str) -> list[str]:
    def start(seed: int) -> tuple[nn.Module, Any]:
        model = model_of(seed).bfloat16()
        made: Any = collage_neuron.compile(AdamW, strategy=strategy)
        return model, ZeroRedundancyOptimizer(model.parameters(), made, lr=1e-2, weight_decay=0.1)

    run, other = start(0), start(1)
    train(run, range(2))
    run[1].consolidate_state_dict(to=0)
    saved = [run[1].state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(saved)
    other[0].load_state_dict(run[0].state_dict())
    other[1].load_state_dict(copy.deepcopy(saved[0]))  # of the first process it holds the live tensors
    for one in (run, other):
        train(one, range(2, 4))
    return different(whole(other[1].optim), whole(run[1].optim))
