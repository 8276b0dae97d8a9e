"""Writes a pickle of training runs with the code that is imported.

`PYTHONPATH=<checkout> python make.py <file>`; with a second file, what its runs become in two further steps.

The files beside this one were written by commits with other modules, `tests/checkpoint/test_old_pickles.py` loads them
with today's: `flat.pt` by 731d98e, the last commit with all files side by side; `before_bookkeeping.pt` by 2ba3019^,
before one object had what an optimizer remembers. `before_bookkeeping_later.pt`, what its runs become, is 731d98e's
too: between the two the arithmetic was changed, so that a parameter is rounded once a step. `old_default.pt` is by
0fb0481, the last commit whose default was `plus`, from `python make.py old_default.pt default`.
"""

import copy
import pickle
import sys
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

import collage_neuron


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """One step with gradients that depend on the seed alone."""
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
    optimizer.step()


def words(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Everything that a run has in memory: parameters and states."""
    found: list[torch.Tensor] = []
    for p in model.parameters():
        state = optimizer.state[p]
        found += [p.detach().clone(), *(state[k].clone() for k in sorted(state) if isinstance(state[k], torch.Tensor))]
    return found


def run(**named: Any) -> dict[str, Any]:
    """A run after three steps, its class, settings and state dicts, and what two further steps make of it."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    collage_neuron.compile(model, optimizer, **named)
    cls: Any = type(optimizer)
    for seed in range(3):
        step(model, optimizer, seed)
    saved: dict[str, Any] = {"class": pickle.dumps(cls), "settings": pickle.dumps(cls._collage_settings)}
    saved |= {"whole": (model, optimizer), "copied": copy.deepcopy((model, optimizer)), "now": words(model, optimizer)}
    saved["checkpoint"] = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    twin, other = copy.deepcopy((model, optimizer))
    for seed in (3, 4):
        step(twin, other, seed)
    return saved | {"later": words(twin, other)}


def later(file: str) -> dict[str, list[torch.Tensor]]:
    """What two further steps make of the runs in a file."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, saved in torch.load(file, weights_only=False).items():
        model, optimizer = saved["whole"]
        for seed in (3, 4):
            step(model, optimizer, seed)
        found[name] = words(model, optimizer)
    return found


if __name__ == "__main__":
    pairs = [("plus", "fp32"), ("plus", "bf16"), ("fp32", "fp32")]
    runs: dict[str, Any] = {f"{s} in {a}": run(strategy=s, arithmetic=a) for s, a in pairs}
    if sys.argv[2:]:
        runs = {"plus in fp32": run()} if sys.argv[2] == "default" else dict(later(sys.argv[2]))
    torch.save(runs, sys.argv[1])
