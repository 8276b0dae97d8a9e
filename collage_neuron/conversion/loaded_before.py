"""Handles a compiled run's checkpoint that torch loaded into an ordinary optimizer before it is compiled.

torch keeps keys that it does not know, without a warning, and casts their tensors to the dtype of the parameter.
Compiling afterwards gives the same bits as loading into the compiled optimizer, or an error that says why not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import warn_user
from collage_neuron.numerics.formats import Format
from collage_neuron.optimizer import load_checks
from collage_neuron.settings import Settings
from collage_neuron.states import external_writes
from collage_neuron.states.format_record import record_of
from collage_neuron.states.sharding import local
from collage_neuron.states.state_keys import split_params, suffixes
from collage_neuron.states.store import State, kept_format, read_exact, read_fp32

Words = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""By key: a word as it was saved, and the mask of the elements where it is valid."""


def check_not_cast(optimizer: Optimizer, group: dict[str, Any], formats: Mapping[str, Format], index: int) -> None:
    """Raises if torch cast wider states of a compiled run to bf16 as it loaded them into an ordinary optimizer."""
    if not all(key in group for key in ("collage_strategy", "collage_arithmetic")):
        return
    for p in group["params"]:
        state = optimizer.state.get(p, {})
        wide = {key: saved for name, fmt in formats.items() for key, saved in _saved_wide(name, fmt)}
        cast = [key for key in wide if key in state and state[key].dtype == p.dtype == torch.bfloat16]
        if cast:
            raise ValueError(
                f"{cast[0]!r} of a parameter of param_groups[{index}] was saved in {wide[cast[0]]}, and torch "
                f"cast it to bf16 as it was loaded into a {type(optimizer).__name__} that was not compiled yet; "
                "nothing was updated: compile first, with collage_neuron.compile(model, optimizer, ...), and load after"
                " that"
            )


def _saved_wide(name: str, fmt: Format) -> list[tuple[str, str]]:
    """The keys of a value that a checkpoint has in a wider type than bf16, and that type."""
    if fmt.is_coded:
        return [(name, "fp32")]
    return [(name + c.suffix, c.storage) for c in fmt.components if c.type.digits > 8]


def tell(optimizer: Optimizer, asked: Settings, chosen: Sequence[Settings]) -> None:
    """Warns of settings that a checkpoint brought instead of the requested ones, and of words that are out of date.

    A user's group may name a strategy; only a checkpoint names all the settings at once.
    """
    for i, (group, own) in enumerate(zip(optimizer.param_groups, chosen, strict=True)):
        if all(key in group for key in asked.as_group()):
            load_checks.warn_of_settings(i, asked, own)
    wide = [p for p in split_params(optimizer.state) if p.dtype == torch.float32 and p.numel()]
    shares = [1 - external_writes.belongs(optimizer, p).double().mean().item() for p in wide]
    if any(shares):
        warn_user(
            f"this {type(optimizer).__name__} loaded the checkpoint of a compiled run and was not compiled: torch "
            "trained on with the high words of weights and states alone (weights have changed in "
            f"{100 * max(shares):.2g} % of the elements of a parameter). Training continues from these weights; to "
            "resume from the checkpoint, compile first, and load after that"
        )


def value_and_words(optimizer: Optimizer, p: torch.Tensor, name: str, fmt: Format) -> tuple[torch.Tensor, Words]:
    """The fp32 value of an fp32 parameter or of its state, and the words of `fmt` that a checkpoint brought for it.

    A word is valid where the first word is still the one that it was saved with: torch may have trained the parameter
    since, without knowing the further words.
    """
    state, record = optimizer.state[p], record_of(optimizer, p)
    if not any(name + suffix in state for suffix in suffixes()):
        return read_exact(p, state, name, record), {}
    belongs = external_writes.belongs(optimizer, p, name)
    tensors = {
        key: local(p.detach() if key == "param" else state[key]).cpu()
        for key in fmt.keys(name)
        if key in ("param", *state)
    }
    trained = local(p.detach() if name == "param" else state[name]).cpu().float()
    value = torch.where(belongs, local(read_fp32(p, state, name, record)).cpu(), trained)
    if len(tensors) < len(fmt.components) or not fmt.reads_as(kept_format(p, state, name, record)):
        return value, {}
    words = {key: tensors[key].to(c.type.dtype) for key, c in zip(tensors, fmt.components, strict=True)}
    for key, word in words.items():
        belongs = belongs & (word.float() == tensors[key])
    return value, {key: (word, belongs) for key, word in words.items()}


@torch.no_grad()
def restore(p: torch.Tensor, state: State, words: Words) -> None:
    """Stores words as they were saved: splitting their sum again might move half an ulp from one to the other."""
    for key, (word, where) in words.items():
        target = local(p.detach() if key == "param" else state[key])
        target.copy_(torch.where(where, word, target.cpu()))
