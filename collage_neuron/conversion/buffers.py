"""Decides what stays fp32 when a model is cast to bf16, and warns of buffers that lose precision.

Beside what the user names (`keep_fp32`), three kinds stay, since casting them would change the model's results by far
more than bf16 activations do:

* rotary frequencies: an angle is position times frequency, so the rounding error grows with the position;
* modules with running statistics, including their parameters: an average that moves by a tenth of a difference stands
  still in bf16, and `batch_norm` does not accept bf16 weights with fp32 statistics;
* what the model itself declares (`_keep_in_fp32_modules_strict` of Hugging Face's models), parameters and buffers.

Any other buffer may be combined with bf16 activations; in fp32 it would turn these into fp32, which the next matmul
rejects. So it becomes bf16; if that changes its values, one warning names it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from collage_neuron import torch_privates
from collage_neuron.errors import warn_user
from collage_neuron.states.sharding import local

CHOICES = ("auto", "keep", "cast")
"""`auto`: as above. `keep`: every buffer stays as it is. `cast`: all of the model becomes bf16."""


class RoundedBuffers(UserWarning):
    """`compile` cast buffers to bf16 whose values bf16 cannot hold."""


def check_choice(choice: str, target: object) -> None:
    """Raises ValueError for an unknown choice, or one without a model."""
    if choice not in CHOICES:
        raise ValueError(f"unknown buffers {choice!r}; choose one of {', '.join(CHOICES)}")
    if choice != "auto" and not isinstance(target, torch.nn.Module):
        raise ValueError(
            f"buffers={choice!r} needs the model, and without it no buffer is changed: leave it out, or write "
            "compile(model, optimizer, buffers=...)"
        )


def kept(
    model: torch.nn.Module, choice: str, named: AbstractSet[torch.Tensor] = frozenset()
) -> AbstractSet[torch.Tensor]:
    """The fp32 tensors of `model`, buffers and parameters, that stay fp32; with those that the user has `named`."""
    if choice == "cast":
        return named
    found = set(model.buffers()) if choice == "keep" else _declared(model)
    for module in model.modules():
        if _has_statistics(module):
            found |= {*module.buffers(recurse=False), *module.parameters(recurse=False)}
        elif choice == "auto":
            found |= _rotary(module)
    return named | {t for t in found if t.dtype == torch.float32}


def _has_statistics(module: torch.nn.Module) -> bool:
    """Returns True if `module` averages what it sees."""
    buffers = dict(module.named_buffers(recurse=False))
    statistics = [buffers[name] for name in ("running_mean", "running_var") if name in buffers]
    if not any(t.dtype == torch.float32 for t in statistics):
        return False
    # A frozen batch norm of buffers alone does not, and is cast.
    learns = "num_batches_tracked" in buffers or any(True for _ in module.parameters(recurse=False))
    return isinstance(module, torch_privates.NORMS) or learns


def surround(model: torch.nn.Module, named: AbstractSet[torch.Tensor] = frozenset()) -> None:
    """Adds hooks that give fp32 modules fp32 activations and return bf16, where torch does not do so.

    These are modules with fp32 statistics, and those whose parameters the user has `named`: a matrix product does not
    accept bf16 activations with fp32 weights. Inside of such a module everything is fp32. Modules that a model declares
    convert their activations themselves.
    """
    # torch's own norms accept bf16 activations with fp32 statistics. A user's norm may compute by hand and return fp32.
    norms = [m for m in model.modules() if _has_statistics(m) and not _takes_bf16(m)]
    for module in dict.fromkeys([*outermost(model, named), *norms]):
        if not torch_privates.has_pre_hook(module, _widen):
            module.register_forward_pre_hook(_widen, with_kwargs=True)
            module.register_forward_hook(_narrow)


def _takes_bf16(module: torch.nn.Module) -> bool:
    # torch_xla computes in fp32 what it then calls bf16, and XLA rejects graphs built on that.
    return isinstance(module, torch_privates.NORMS) and all(
        t.device.type != "xla" for t in module.buffers(recurse=False)
    )


def _widen(module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return _cast((args, kwargs), torch.bfloat16, torch.float32) if _is_fp32(module) else (args, kwargs)


def _narrow(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return _cast(output, torch.float32, torch.bfloat16) if _is_fp32(module) else output


def _is_fp32(module: torch.nn.Module) -> bool:
    """Returns True unless a module that has hooks was cast to bf16 since."""
    p = next(module.parameters(), None)
    return p.dtype == torch.float32 if p is not None else _has_statistics(module)


def _cast(x: Any, of: torch.dtype, to: torch.dtype) -> Any:
    """Casts tensors in tuples, lists, dictionaries and a library's own outputs."""
    return torch_privates.each_tensor(lambda t: t.to(to) if t.dtype == of else t, x)


def _rotary(module: torch.nn.Module) -> set[torch.Tensor]:
    """Rotary frequencies among the buffers of `module`; all its buffers if the module only rotates."""
    buffers = dict(module.named_buffers(recurse=False))
    found = {t for name, t in buffers.items() if "freq" in name or _are_frequencies(t)}
    # A module that only rotates keeps tables of cosines too.
    alone = next(module.parameters(), None) is None and next(module.children(), None) is None
    return {*buffers.values()} if found and alone else found


def _are_frequencies(t: torch.Tensor) -> bool:
    """Returns True for base ** (-2i / n), whatever its name (`theta`, `inv_timescales`): 1 first, then equal ratios."""
    if t.dtype != torch.float32 or t.dim() != 1 or t.numel() < 4 or t.is_meta:
        return False
    values = local(t.detach()).cpu().double()
    if not (values.numel() == t.numel() and values[0] == 1 and (values[1:] < values[:-1]).all() and values[-1] > 0):
        return False
    # Equal up to the fp32 rounding of the entries: the terms are some roundings of a ratio and of an entry.
    steps = values.log().diff()
    return bool((steps - steps.mean()).abs().max() <= 2**-20 * steps.abs().mean() + 2**-22)


def _declared(model: torch.nn.Module) -> set[torch.Tensor]:
    """Tensors under names that a module says must stay fp32 in a bf16 model."""
    found: set[torch.Tensor] = set()
    for module in model.modules():
        names = getattr(module, "_keep_in_fp32_modules_strict", None)
        for pattern in names if isinstance(names, (list, tuple, set)) else ():
            asked = re.compile(rf"(^|\.){pattern}($|\.)")  # as transformers matches them
            named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers())
            found |= {t for name, t in named if asked.search(name)}
    return found


def check_buffers(model: torch.nn.Module, choice: str, named: AbstractSet[torch.Tensor] = frozenset()) -> None:
    """Gives one warning that names the buffers that `auto` casts although bf16 cannot hold them.

    It comes before anything is changed: if a filter turns the warning into an error, the model stays as it was.

    Raises:
        ValueError: running statistics would stay fp32 while the weights of their module are bf16 already.
    """
    if choice != "cast":
        _check_statistics(model)
    if choice != "auto":
        return
    stay = kept(model, choice, named)
    cast = {name: t for name, t in model.named_buffers() if t.dtype == torch.float32 and t not in stay}
    if lost := [name for name, t in cast.items() if not is_lazy(t) and is_rounded(t)]:
        others = f" and {len(lost) - 4} others" if lost[4:] else ""
        warn_user(
            f"compile casts buffers to bfloat16, which cannot hold their values: {', '.join(lost[:4])}{others}. Pass "
            "buffers='keep' to leave every buffer in fp32 (it then must not widen bf16 activations), or "
            "buffers='cast' to cast without this warning",
            RoundedBuffers,
        )


def _check_statistics(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if _has_statistics(module) and any(p.dtype == torch.bfloat16 for p in module.parameters(recurse=False)):
            raise ValueError(
                f"{name!r} ({type(module).__name__}) has bfloat16 weights beside float32 running statistics, and "
                "cannot run: leave its weights in float32 (of several optimizers over one model, compile the model "
                "alone, and all of them are compiled when they first step), or pass buffers='cast'"
            )


# --- keep_fp32 --------------------------------------------------------------------------------------------------------


Predicate = Callable[[str, torch.nn.Parameter], bool]

Choice = str | torch.nn.Module | type[torch.nn.Module] | Predicate
"""A pattern of names, a module of the model, a class of modules, or a predicate of names and parameters."""


def chosen(model: object, keep_fp32: Choice | Iterable[Choice] | None) -> frozenset[torch.Tensor]:
    """The fp32 parameters that `buffers` names, and the fp32 buffers that it names or that belong to their modules.

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
        if own and _runs_torchs_code(module):
            _complete(name, module, found)
        if own and found.issuperset(own):
            found |= _fp32(module.named_buffers(recurse=False))
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


def _runs_torchs_code(module: torch.nn.Module) -> bool:
    """Returns True for a layer of torch's, or one derived from it, that computes as torch wrote it."""
    forward = getattr(type(module), "forward", None)  # the class of a scripted module has none
    return forward is not torch.nn.Module.forward and str(getattr(forward, "__module__", "")).startswith("torch.nn.")


def _complete(name: str, module: torch.nn.Module, found: set[torch.Tensor]) -> None:
    """Adds all of a layer of torch's to `found` if a module in it stays, since it computes in one dtype.

    nn.MultiheadAttention does not call its `out_proj`, but reads its weights.

    Raises:
        ValueError: some of its parameters were named, and no module in it.
    """
    inside = [set(child.parameters()) for child in module.children()]
    if any(parameters and parameters <= found for parameters in inside):
        found |= _fp32(module.named_parameters())
    parts = {key: p in found for key, p in module.named_parameters() if p.is_floating_point()}
    if any(parts.values()) and not all(parts.values()):
        raise ValueError(
            f"keep_fp32 has {next(key for key, stays in parts.items() if stays)!r} of {name or 'the model'!r} "
            f"({type(module).__name__}), and not {next(key for key, stays in parts.items() if not stays)!r}: the layer "
            "computes with both in one dtype; name the module, or leave it out"
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


def is_rounded(t: object) -> bool:
    """Returns True if `t` is a tensor, and bf16 cannot hold a value of this process's part of it."""
    if not isinstance(t, torch.Tensor) or t.is_meta or not t.is_floating_point():
        return False
    if t.dtype == torch.bfloat16 or t.dtype.itemsize < 2:  # bf16 holds all of them
        return False
    values = local(t.detach())
    rounded = values.to(torch.bfloat16).to(values.dtype)
    return bool(((rounded != values) & ~values.isnan()).any())
