"""What a loop does between steps: to parameters, states and copies."""

from __future__ import annotations

import collections
import copy
import pickle

import torch
from hostile import World, case

import collage_neuron
from strangers.common import Ball


@case
def frozen_and_thawed(world: World) -> None:
    """`requires_grad` goes off and on, with an old gradient left behind."""
    world.compile(Ball(world.params))
    world.step(8)
    world.params[0].requires_grad_(False)
    world.params[0].grad = None
    for _ in range(8):
        world.backward(without=(0,))
        world.optimizer.step()
        world.taken += 1
    world.params[0].requires_grad_(True)
    world.step(8)


@case
def weights_in_one_memory(world: World) -> None:
    """Two parameters are views of one tensor: what is written to the one is read from the other."""
    world.params[2].data = world.params[0].data
    world.start[2] = world.start[0]
    world.compile(Ball(world.params))
    world.step(20)


@case
def views_of_a_flat_buffer(world: World) -> None:
    """All parameters are views of a flat buffer, which the loop clamps."""
    flat = torch.cat([p.detach().flatten() for p in world.params])
    for p, part in zip(world.params, flat.split([p.numel() for p in world.params]), strict=True):
        p.data = part.view_as(p)
    world.compile(Ball(world.params))
    for _ in range(10):
        world.step(3)
        flat.clamp_(-0.5, 0.5)


@case
def data_exchanged(world: World) -> None:
    """`p.data` is exchanged for numbers that bf16 holds, and `vector_to_parameters` does so for all."""
    world.compile(torch.optim.Adam(world.params, lr=1e-2))
    world.step(10)
    world.params[0].data = torch.full_like(world.params[0], 0.375)
    world.step(10)
    vector = torch.linspace(-1, 1, sum(p.numel() for p in world.params)).mul(16).round().div(16)
    torch.nn.utils.vector_to_parameters(vector.to(world.params[0].dtype), world.params)
    world.step(20)


@case
def state_reset_from_outside(world: World) -> None:
    """Moments are zeroed in place from outside, and the counts with them: a restart."""
    world.compile(torch.optim.Adam(world.params, lr=1e-2, betas=(0.9, 0.999)))
    world.step(30)
    for state in world.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq", "step"):
            state[name].zero_()
    world.step(10)


@case
def some_elements_reset(world: World) -> None:
    """Dead neurons come back: rows of weights and of all moments are set to constants by index."""
    world.compile(torch.optim.Adam(world.params, lr=1e-2, betas=(0.9, 0.999)))
    world.step(30)
    with torch.no_grad():
        for p in world.params:
            p[1:3] = 0.25
            for name in ("exp_avg", "exp_avg_sq"):
                world.optimizer.state[p][name][1:3] = 0
    for number in range(30, 40):
        for i, p in enumerate(world.params):
            p.grad = world.gradient(i, number).to(p.dtype)
            p.grad[1:3] *= 2.0**-6
        world.optimizer.step()


@case
def state_cleared_from_outside(world: World) -> None:
    """The whole state is thrown away between steps, one parameter's first."""
    world.compile(torch.optim.Adam(world.params, lr=1e-2))
    world.step(10)
    with torch.no_grad():
        for p in world.params:
            p.fill_(0.5)
    world.optimizer.state.pop(world.params[1])
    world.step(10)
    with torch.no_grad():
        for p in world.params:
            p.fill_(0.25)
    world.optimizer.state = collections.defaultdict(dict)
    world.step(10)


@case
def scheduler_made_before(world: World) -> None:
    """Schedulers made before the line hold the object, and have wrapped its step."""
    optimizer = torch.optim.Adam(world.params, lr=1e-2, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=40)
    world.compile(optimizer)
    decay = torch.optim.lr_scheduler.LambdaLR(world.optimizer, lambda n: 0.5 if n % 2 else 1.0)
    for i in range(39):
        world.step(1)
        (scheduler if i < 30 else decay).step()


@case
def copied_before(world: World) -> None:
    """A copy of the optimizer is compiled, not the optimizer; its parameters are copies too."""
    optimizer = copy.deepcopy(Ball(world.params))
    world.params = optimizer.param_groups[0]["params"]
    world.compile(optimizer)
    world.step(20)


@case
def copied_and_pickled_midway(world: World) -> None:
    """Training goes on with a copy, then with what was unpickled from it."""
    world.compile(Ball(world.params))
    world.step(10)
    world.optimizer = copy.deepcopy(world.optimizer)
    world.params = world.optimizer.param_groups[0]["params"]
    world.step(10)
    world.optimizer = pickle.loads(pickle.dumps(world.optimizer))
    world.params = world.optimizer.param_groups[0]["params"]
    world.step(10)


@case
def compiled_again_and_again(world: World) -> None:
    """Compiled twice, and in the middle under other strategies and back."""
    world.compile(Ball(world.params))
    world.step(10)
    if world.strategy is not None:
        world.compile(world.optimizer)
        world.optimizer = collage_neuron.compile(world.optimizer, strategy="full")
    world.step(10)
    if world.strategy is not None:
        world.compile(world.optimizer)
    world.step(10)


@case
def state_of_another_moment(world: World) -> None:
    """A state from step 10 is loaded at step 20, with the weights that belong to it, and stepped on, twice."""
    world.compile(Ball(world.params))
    world.step(10)
    kept = copy.deepcopy(world.optimizer.state_dict())
    weights = [p.detach().clone() for p in world.params]
    for _ in range(2):
        world.step(10)
        with torch.no_grad():
            for p, w in zip(world.params, weights, strict=True):
                p.copy_(w)
        world.optimizer.load_state_dict(copy.deepcopy(kept))
        world.step(5)
