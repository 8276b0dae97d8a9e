"""Warns if a state dict with wider weights is loaded into a compiled model, which rounds them to bf16.

The model does not know the optimizer, where the low words are: torch copies the weights, and their low words start at
zero, but where a weight keeps its bits (`states/external_writes.py`), for which these are noted here. A run that is
resumed from fp32 weights in this way loses what `compile` would have kept.

`compile(optimizer)` is not given the model: modules that hold its parameters are found among all living ones.

torch calls the hooks of a model before it loads, and those of each module in it before its turn. The hook of the whole
model speaks for all modules, in whatever wrapper it is (DDP, `torch.compile`); that of a module inside speaks only if
this module alone is loaded. Hooks are functions of this file, so that models can still be copied and pickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import chain
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.conversion.buffers import is_rounded
from collage_neuron.errors import RoundedWeights
from collage_neuron.optimizer.pending_models import models
from collage_neuron.states import external_writes, low_words
from collage_neuron.states.bookkeeping import params_of
from collage_neuron.states.live_objects import outermost, smallest
from collage_neuron.states.living_optimizers import compiled_optimizers


def watch(model: torch.nn.Module) -> None:
    """Makes `load_state_dict` of `model`, and of each module in it, warn of weights that it rounds."""
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue  # it takes no hook
        if module is not model:
            torch_privates.drop_load_hook(module, _tell)  # it was watched for itself, and would speak too
            _hook(module, _tell_if_alone)
        elif not torch_privates.has_load_hook(module, _tell_if_alone):  # else a model around it speaks for it
            _hook(module, _tell)


def _hook(module: torch.nn.Module, hook: Any) -> None:
    if not torch_privates.has_load_hook(module, hook):
        module.register_load_state_dict_pre_hook(hook)


def watch_models_of(optimizer: Optimizer) -> None:
    """Watches the models that the bf16 parameters of `optimizer` belong to, as far as they are built already."""
    held = {id(p) for p in params_of(optimizer) if p.dtype == torch.bfloat16}
    known = [model for reference in _FOUND.valuerefs() if (model := reference()) is not None]
    if not held <= set(map(id, chain.from_iterable(model.parameters() for model in known))):
        known = outermost(held)
        _FOUND.update({id(model): model for model in known})
    for model in (model for model in known if not held.isdisjoint(map(id, model.parameters()))):
        watch(smallest(model, held))


# The models of parameters that an optimizer was compiled over, by identity: one with many optimizers (one for each
# parameter, in hooks of gradients) is looked for among all objects of the process once.
_FOUND: WeakValueDictionary[int, torch.nn.Module] = WeakValueDictionary()


def _tell(
    module: torch.nn.Module, state_dict: Mapping[str, Any], prefix: str, about: Mapping[str, Any], *_: Any
) -> None:
    """The hook of the whole model; with `assign=True` nothing is written, and the next step rejects the weights."""
    if about.get("assign_to_params_buffers"):
        return
    external_writes.before_load(p for name, p in module.named_parameters() if prefix + name in state_dict)
    narrow = {name: p for name, p in module.named_parameters() if p.dtype == torch.bfloat16}
    wide = {name: p for name, p in narrow.items() if is_rounded(state_dict.get(prefix + name))}
    # Other frozen ones are cast as by `model.to`, without a word.
    kept = {original.param for waiting in models.values() for original in waiting.originals.values()} if wide else set()
    kept |= {p for x in (compiled_optimizers() if wide else ()) for p in params_of(x)}
    kept |= {p for p in wide.values() if hasattr(p, low_words.LEFT)}
    found = [prefix + name for name, p in wide.items() if p.requires_grad or p in kept]
    if found:
        warnings.warn(
            f"{found[0]}{f' and {len(found) - 1} other weights' if len(found) > 1 else ''} of this state dict are "
            f"rounded to bf16 as they are loaded into this {type(module).__name__}, and their low words start at zero. "
            "To keep them, load them before collage_neuron.compile, or load model and optimizer by "
            "collage_neuron.checkpoint.set_fp32_state_dict; to load rounded ones, cast the state dict to bfloat16",
            RoundedWeights,
            stacklevel=6,  # hook, torch's wrapper of it, and its three functions that load
        )


def _tell_if_alone(
    module: torch.nn.Module, state_dict: Mapping[str, Any], prefix: str, about: Mapping[str, Any], *_: Any
) -> None:
    """The hook of the modules inside: names in the state dict have no prefix if the module is loaded alone."""
    if not prefix:
        _tell(module, state_dict, prefix, about)
