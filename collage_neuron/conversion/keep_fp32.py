"""`compile(..., keep_fp32=...)`: which parameters stay fp32 because the user says so."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from fnmatch import fnmatchcase
from typing import Any

import torch

Predicate = Callable[[str, torch.nn.Parameter], bool]

Choice = str | torch.nn.Module | type[torch.nn.Module] | Predicate
"""A pattern of names, a module of the model, a class of modules, or a predicate of names and parameters."""


def chosen(model: object, keep_fp32: Choice | Iterable[Choice] | None) -> frozenset[torch.Tensor]:
    """The fp32 parameters that `keep_fp32` names, and the fp32 buffers that it names or that belong to their modules.

    Raises:
        TypeError: an entry of another kind.
        ValueError: `keep_fp32` without a model; an entry that matches no fp32 tensor, or a trained parameter that is
            bf16 already; a part of a layer of torch's, which computes in one dtype.
    """
    if keep_fp32 is None:
        return frozenset()
    if not isinstance(model, torch.nn.Module):
        raise ValueError(
            "keep_fp32 needs the model, whose names it has and whose layers have to take other activations: write "
            "compile(model, optimizer, keep_fp32=...) or compile(model, keep_fp32=...)"
        )
    found: set[torch.Tensor] = set()
    for entry in _entries(keep_fp32):
        found |= _matching(model, entry)
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if own and found.issuperset(own):
            found |= _fp32(module.named_buffers(recurse=False))
        elif type(module).__module__.startswith("torch.nn."):
            _check_whole(name, module, found)
    return frozenset(found)


def outermost(module: torch.nn.Module, stay: AbstractSet[torch.Tensor]) -> Iterator[torch.nn.Module]:
    """The modules with parameters that all are in `stay`, without those inside of one another.

    A container that is never called (ModuleList) is not among them, but the modules in it.
    """
    own = list(module.parameters())
    if own and stay >= set(own) and type(module).forward is not torch.nn.Module.forward:
        yield module
        return
    for child in module.children():
        yield from outermost(child, stay)


def _entries(keep_fp32: Any) -> Sequence[Any]:
    # Some modules are iterable (Sequential), and a string is.
    if isinstance(keep_fp32, (str, torch.nn.Module)) or callable(keep_fp32):
        return [keep_fp32]
    if not isinstance(keep_fp32, Iterable) or isinstance(keep_fp32, torch.Tensor):
        raise TypeError(f"keep_fp32 is a {type(keep_fp32).__name__}; give a list of {_KINDS}")
    return list(keep_fp32)


_KINDS = "patterns of names, modules, classes of modules, or functions of a name and a parameter"


def _matching(model: torch.nn.Module, entry: Any) -> set[torch.Tensor]:
    """The fp32 tensors of the model that one entry is about."""
    named = list(_named(model, entry))
    found = _fp32(named)
    for name, t in named:
        if t.dtype == torch.bfloat16 and t.requires_grad:
            raise ValueError(
                f"keep_fp32={_shown(entry)}: {name!r} is bfloat16 already, and its fp32 values are lost; give the fp32 "
                "model to compile, or convert what is to stay (module.float()) before. Of several optimizers over one "
                "model, give the model alone: compile(model, keep_fp32=...)"
            )
    if not found:
        raise ValueError(
            f"keep_fp32={_shown(entry)} matches no fp32 parameter of this {type(model).__name__}{_near(model, entry)}"
        )
    return found


def _named(model: torch.nn.Module, entry: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the model that one entry is about, by all their names: what is tied has several."""
    if isinstance(entry, str):
        yield from ((name, t) for name, t in _tensors(model) if _fits(name, entry))
    elif isinstance(entry, torch.nn.Module):
        if any(entry is module for module in model.modules()):
            yield from _tensors(entry)
    elif isinstance(entry, type) and issubclass(entry, torch.nn.Module):
        for module in model.modules():
            yield from _tensors(module) if isinstance(module, entry) else ()
    elif callable(entry) and not isinstance(entry, type):
        yield from ((name, p) for name, p in model.named_parameters(remove_duplicate=False) if entry(name, p))
    else:
        raise TypeError(f"keep_fp32 has {entry!r}, a {type(entry).__name__}; give {_KINDS}")


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _fits(name: str, pattern: str) -> bool:
    """Returns True if the pattern matches whole parts of a dotted name: `norm` of `layers.0.norm.weight`."""
    parts = name.split(".")
    runs = (".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
    return any(fnmatchcase(run, pattern) for run in runs)


def _fp32(named: Iterable[tuple[str, torch.Tensor]]) -> set[torch.Tensor]:
    return {t for _, t in named if t.dtype == torch.float32}


def _check_whole(name: str, module: torch.nn.Module, found: AbstractSet[torch.Tensor]) -> None:
    """Raises ValueError for a layer of torch's of which a part would stay fp32."""
    parts = {key: p in found for key, p in module.named_parameters() if p.is_floating_point()}
    if any(p in found for p in module.parameters(recurse=False)) and not all(parts.values()):
        inside = [key for key, stays in parts.items() if stays]
        raise ValueError(
            f"keep_fp32 has {inside[0]!r} of {name or 'the model'!r} ({type(module).__name__}), and not "
            f"{next(key for key, stays in parts.items() if not stays)!r}: the layer computes with both in one dtype; "
            "name the module, or leave it out"
        )


def _near(model: torch.nn.Module, entry: Any) -> str:
    """What an error adds to say which names there are."""
    if isinstance(entry, torch.nn.Module):
        return ": that module is not in the model; give one of model.modules(), or a pattern of its name"
    if not isinstance(entry, str):
        return ""
    names = dict.fromkeys(name for name, _ in _tensors(model))
    known = dict.fromkeys(part for name in names for part in (name, *name.split("."), name.rpartition(".")[0]) if part)
    near = difflib.get_close_matches(entry.strip("*."), known, n=4, cutoff=0.5) or list(names)[:4]
    return (
        f"; there are {', '.join(map(repr, near))}. A pattern matches whole parts of a dotted name, and * any text: "
        "'norm', 'layers.0', '*_norm'"
    )


def _shown(entry: Any) -> str:
    if isinstance(entry, torch.nn.Module):
        return f"<{type(entry).__name__}>"
    return repr(entry) if isinstance(entry, str) else str(getattr(entry, "__name__", entry))
