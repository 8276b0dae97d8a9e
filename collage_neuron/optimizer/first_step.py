"""The line that a compiled optimizer writes after its first step: what was compiled, and what it needs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from collage_neuron.passes.backends.registry import passed_over
from collage_neuron.runtime import memory
from collage_neuron.states.bookkeeping import bookkeeping

if TYPE_CHECKING:
    from collage_neuron.runtime.plan import Job
    from collage_neuron.settings import Settings

SAID = "first step"
"""In `Bookkeeping.told` once the line was written."""

log = logging.getLogger("collage_neuron")


def tell(base: type[Optimizer], optimizer: Optimizer, jobs: Sequence[Job]) -> None:
    """Writes the line once after compiling."""
    told = bookkeeping(optimizer).told
    if SAID in told or not jobs:
        return
    told.add(SAID)
    if says(optimizer):
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
    tensors, elements = sum(len(job.params) for job in jobs), memory.elements_of(jobs)
    size = sum(sum(memory.sizes_of(optimizer, job).values()) for job in jobs)
    masters = sum(map(memory.bytes_with_masters, jobs))
    saved = f" instead of {memory.shown(masters)} with fp32" if masters > size else ""
    return (
        f"{base.__name__}: {tensors} tensor{'s' * (tensors != 1)}, {_count(elements)} parameters, "
        f"strategy {_strategies(jobs)}, {size / max(1, elements):.3g} B each, "
        f"{memory.shown(size)}{saved}; "
        f"backend {_each(map(_backend, jobs))}"
    )


def _backend(job: Job) -> str:
    """The name, and what keeps `auto` from a faster one."""
    why = passed_over(job.backend, job.params[0].device) if job.settings.backend == "auto" else None
    return f"{job.backend.name} ({why})" if why else job.backend.name


def _strategies(jobs: Sequence[Job]) -> str:
    """The strategies, and how many tensors they do not apply to since these stay fp32."""
    left = sum(len(job.params) for job in jobs if job.params[0].dtype == torch.float32)
    names = _each(_strategy(job) for job in jobs if job.params[0].dtype != torch.float32)
    return f"{names} ({left} of the tensors stay fp32)" if names and left else names or "fp32 as it is"


def _strategy(job: Job) -> str:
    return job.settings.strategy if isinstance(job.settings.strategy, str) else "formats by state"


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
