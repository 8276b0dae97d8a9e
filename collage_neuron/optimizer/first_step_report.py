"""The line that a compiled optimizer writes after its first step: what was compiled, and what it needs.

Before it, a hint for models that were bf16 already when they were compiled: were their weights rounded from fp32?
`compile` keeps what rounding to bf16 drops, but only of weights that it rounds itself. Training from scratch in bf16
loses nothing; a model that was loaded in fp32 and cast before the line begins with rounded weights, silently.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.strategies import NO_ROLES, formats_for, param_format
from collage_neuron.passes.backends.registry import passed_over
from collage_neuron.settings import Settings
from collage_neuron.states import visible_states, word_encoding
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.state_keys import name_of, split_params
from collage_neuron.torch_privates import is_flattened

if TYPE_CHECKING:
    from collage_neuron.runtime.step_plan import Job

SAID = "first step"
"""In `Bookkeeping.told` once the line was written."""

log = logging.getLogger("collage_neuron")


def report(base: type[Optimizer], optimizer: Optimizer, jobs: Sequence[Job]) -> None:
    """Writes the line once after compiling."""
    if jobs:
        bookkeeping(optimizer).told.add(SAID)
    if jobs and says(optimizer):
        say(line_of(base, optimizer, jobs))


def says(optimizer: Optimizer) -> bool:
    """Returns False if `verbose=False` was given, and in all processes of a run but the first."""
    settings: Settings = getattr(type(optimizer), "_collage_settings")  # noqa: B009  # compiled.py imports `step`
    return settings.verbose and _is_first_process()


def say(line: str) -> None:
    """A record of level INFO in the log `collage_neuron`.

    Where a program has not configured logging, it is printed on stderr: Python prints warnings there then, and would
    drop it. Importing torch_xla configures nothing either, but leaves the handler that Python makes for a warning.
    """
    if log.hasHandlers() and not _only_as_python_does():
        log.info(line)
    elif not log.disabled and log.level <= logging.INFO:
        print(line, file=sys.stderr)


def _only_as_python_does() -> bool:
    """Returns True if all that handles logs is what `logging.warning` makes where nothing is configured."""
    made = [type(h) is logging.StreamHandler and h.stream is sys.stderr for h in logging.root.handlers]
    return made == [True] and not log.handlers and log.propagate and log.getEffectiveLevel() == logging.WARNING


def line_of(base: type[Optimizer], optimizer: Optimizer, jobs: Sequence[Job]) -> str:
    """`AdamW: 148 tensors, 124.4 M parameters, strategy plus, 12 B each, 1.49 GB instead of 1.99 GB with fp32; ...`.

    Compared with fp32 masters and fp32 states, unless these are not larger. Sharded tensors count whole.
    """
    tensors, elements = sum(len(job.params) for job in jobs), elements_of(jobs)
    size = sum(sum(sizes_of(optimizer, job).values()) for job in jobs)
    masters = sum(map(bytes_with_masters, jobs))
    saved = f" instead of {shown(masters)} with fp32" if masters > size else ""
    return (
        f"{base.__name__}: {tensors} tensor{'s' * (tensors != 1)}, {_count(elements)} parameters, "
        f"strategy {_strategies(jobs)}, {size / max(1, elements):.3g} B each, "
        f"{shown(size)}{saved}; "
        f"backend {_each(map(_backend, jobs))}"
    )


def _backend(job: Job) -> str:
    """The name, and what keeps `auto` from a faster one."""
    why = passed_over(job.backend, job.params[0].device) if job.settings.backend == "auto" else None
    return f"{job.backend.name} ({why})" if why else job.backend.name


def _strategies(jobs: Sequence[Job]) -> str:
    """The strategies, and how many tensors they do not apply to since these stay fp32."""
    left = sum(len(job.params) for job in jobs if job.params[0].dtype == torch.float32)
    strategies = [job.settings.strategy for job in jobs if job.params[0].dtype != torch.float32]
    names = _each(each if isinstance(each, str) else "formats by state" for each in strategies)
    return f"{names} ({left} of the tensors stay fp32)" if names and left else names or "fp32 as it is"


def _each(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _count(elements: int) -> str:
    """A number of elements, `124.4 M`."""
    return f"{elements / 1e6:.1f} M" if elements >= 1e6 else f"{elements:,}"


def _is_first_process() -> bool:
    """Returns True in the process of rank 0, or where there is only one."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"  # torchrun's: torch_xla's processes need no process group


# --- where bf16 weights came from -------------------------------------------------------------------------------------


HINTED = "bf16 before"
"""In `Bookkeeping.told` once it was said."""


def hint_at_source(base: type[Optimizer], optimizer: Optimizer) -> None:
    """Before the first step of an optimizer object that was compiled: says it, once, as the line after the step.

    Not of a compiled class: libraries that take one need a bf16 model.
    """
    ours = bookkeeping(optimizer)
    if HINTED in ours.told or not _starts_from_high_words(optimizer):
        return
    ours.told.add(HINTED)
    if says(optimizer):
        say(
            f"the parameters of this {base.__name__} were bf16 already when it was compiled: training "
            "starts from exactly these values. If they were rounded from fp32 weights (model.to(torch.bfloat16), "
            "dtype=torch.bfloat16), compile the fp32 model instead, and what rounding drops is kept in low words"
        )


def _starts_from_high_words(optimizer: Optimizer) -> bool:
    """Returns True if every trained parameter is bf16, would be kept in further words too, and has none yet.

    It has them if `compile` or a checkpoint brought fp32 values. FSDP1's have to be bf16 before they are compiled.
    """
    trained = [(p, group) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not trained or split_params(optimizer.state) or any(is_flattened(p) for p, _ in trained):
        return False
    return all(
        p.dtype == torch.bfloat16 and len(param_format(Settings.of(group).strategy, p.dtype).components) > 1
        for p, group in trained
    )


# --- bytes ------------------------------------------------------------------------------------------------------------


def elements_of(jobs: Iterable[Job]) -> int:
    """The number of elements of the parameters of the jobs."""
    return sum(p.numel() for job in jobs for p in job.params)


def sizes_of(optimizer: Optimizer, job: Job) -> dict[str, int]:
    """Bytes of the parameters, the states and the gradients of a job, by name.

    Existing tensors count with their size, later ones with the size that their format has.
    """
    formats = job.update.formats
    sizes = {
        name: sum(_size(p, optimizer.state.get(p, {}), name, fmt) for p in job.params) for name, fmt in formats.items()
    }
    sizes |= visible_states.bytes_of(job.recording.captured, job.params)
    return sizes | _others(optimizer, job, sizes) | {"grad": _gradients(job)}


def _others(optimizer: Optimizer, job: Job, counted: Iterable[str]) -> dict[str, int]:
    """Bytes of existing states that the update neither reads nor writes, by name; no counts."""
    found: dict[str, int] = {}
    for p in job.params:
        state = optimizer.state.get(p, {})
        for key, value in state.items():
            own = name_of(key, state)
            if own not in {*counted, "param"} and isinstance(value, torch.Tensor) and value.dim():
                found[str(own)] = found.get(str(own), 0) + value.nbytes
    return found


def bytes_with_masters(job: Job) -> int:
    """Bytes that the parameters of a job would need with fp32 masters and fp32 states, their gradients included."""
    captured = job.recording.captured
    formats = formats_for("fp32", captured.states, NO_ROLES, job.params[0].dtype)
    numbers = sum(visible_states.bytes_of(captured, job.params).values())
    return _gradients(job) + numbers + sum(_size(p, {}, name, fmt) for p in job.params for name, fmt in formats.items())


def _gradients(job: Job) -> int:
    return sum((p if p.grad is None else p.grad).nbytes for p in job.params)


def _size(p: torch.Tensor, state: Mapping[str, Any], name: str, fmt: Format) -> int:
    kept = [p if key == "param" else state.get(key) for key in fmt.keys(name)]
    return sum(
        math.prod(word_encoding.shape_of(c, p.shape)) * c.bytes if t is None or c.block else t.nbytes  # of a shard too
        for c, t in zip(fmt.components, kept, strict=True)
    )


def shown(size: float) -> str:
    """Bytes in decimal units, `1.49 GB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:g} bytes"
