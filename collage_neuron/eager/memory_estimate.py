"""What an optimizer whose steps run as written needs: bytes that stay, and bytes for the duration of a step."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from collage_neuron.eager.commit import formats_as_written, formats_of
from collage_neuron.eager.rollback import OURS, tensors_in
from collage_neuron.settings import Settings
from collage_neuron.states import word_encoding
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.inner_optimizers import inner_of
from collage_neuron.states.shared_memory import memory_of
from collage_neuron.states.state_keys import names_in, values_in
from collage_neuron.states.store import record_of


def bytes_by_name(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, int]:
    """Bytes of the parameters of a group, of their states and gradients, by name.

    States count once a first step has made them, and all tensors in containers with them.
    """
    found: dict[str, int] = {"param": 0}
    for p in group["params"]:  # states as they are: what a step as written makes is not known before it
        state = optimizer.state.get(p, {})
        found["param"] += word_encoding.bytes_of(formats_of(Settings.of(group), p, (), (), p.dtype)) * p.numel()
        for k, x in state.items():
            names = names_in(state)
            texts = () if k in names.own else (n for n in names.own if isinstance(n, str))
            name = max((n for n in texts if k.startswith(n + "_")), key=len, default=k)
            if k not in names.words:
                found[name] = found.get(name, 0) + sum(t.nbytes for t in tensors_in(x) if t.dim())
    found["grad"] = sum((p if p.grad is None else p.grad).nbytes for p in group["params"])
    return found


def bytes_elsewhere(optimizer: Optimizer) -> int:
    """Bytes of tensors in attributes of the optimizer, settings of its groups, and states that are of no parameter.

    Those in containers count, each tensor once; those in other objects, in closures and in globals do not. The fp32
    memory of a parameter or a state counts as long as something refers to it.
    """
    groups = optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    states = {p: optimizer.state[p] for p in params if p in optimizer.state}
    known = {id(x) for p in params for x in (p, p.grad, *tensors_in(states.get(p)))}
    own = [vars(x) for x in (optimizer, *(each.optimizer for each in inner_of(optimizer)))]
    held = [x for each in own for k, x in each.items() if k not in ("state", "param_groups") and not k.startswith(OURS)]
    held += [x for group in groups for k, x in group.items() if k != "params"]
    held += [x for p, x in optimizer.state.items() if p not in states]
    found = {id(t): t for t in tensors_in(held) if t.dim() and id(t) not in known}
    pins = bookkeeping(optimizer).pins.values()
    # A pin has its memory whether or not an attribute refers to it too: it counts once.
    of_pins = {memory_of(pin.shell): pin.shell.nbytes + pin.value.nbytes for pin in pins}
    return sum(t.nbytes for t in found.values() if memory_of(t) not in of_pins) + sum(of_pins.values())


def formats_by_name(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, str]:
    """The formats of the parameters of a group and of their states; "as made" for what is not stored in one."""
    found: dict[str, str] = {}
    for p in group["params"]:
        state = optimizer.state.get(p, {})
        formats = formats_as_written(Settings.of(group), p, state, record_of(optimizer, p), p.dtype)
        found |= {
            k: "as made" for k in names_in(state).own if k not in found and next(tensors_in(state[k]), None) is not None
        }
        found |= {k: fmt.name for k, fmt in formats.items()}
    return found


def bytes_of_values(optimizer: Optimizer) -> int:
    """Bytes of the fp32 values that exist during a step: of parameters, their gradients, and their states so far."""
    total = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            values = values_in(optimizer.state.get(p, {}), p, record_of(optimizer, p))
            total += 4 * p.numel() * (2 + len(values))
    return total
