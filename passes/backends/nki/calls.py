"""Calls of kernels: those of all parameters in one program, called once through a functional operator.

Trn1 takes one kernel in a graph (aws-neuron-sdk issue 1311), so a step is one kernel, whatever it has of parameters,
groups and optimizers' states. The tensors stay where they are: to collect them in one flat buffer would double the
memory, since torch-xla gives a buffer and each of its views a place of their own.
"""

from __future__ import annotations

import ast
import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from collage_neuron.errors import ClampedDivisor, UnsupportedUpdate
from collage_neuron.numerics.eft import storage_of
from collage_neuron.passes.backends.nki import custom_op
from collage_neuron.passes.backends.nki.bodies import with_bodies
from collage_neuron.passes.backends.nki.docstring import MEASURES
from collage_neuron.passes.backends.nki.emit import Work, step_text
from collage_neuron.passes.backends.nki.hardware import ADDRESSED
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.backends.nki.target import Machine, advised
from collage_neuron.passes.backends.nki.tiling import Cut
from collage_neuron.passes.backends.nki.words import seed_of
from collage_neuron.passes.backends.protocol import Launch
from collage_neuron.passes.ir.update import Update


@dataclass
class Part:
    """One parameter's part of a call."""

    launch: int
    """The index of its launch, and its own in that."""
    parameter: int
    kernel: Kernel
    tensors: list[Tensor]
    """In the order of `kernel.arguments`."""
    shape: Sequence[int]
    """That of the parameter."""
    cut: Cut | None = None
    """How its tensors are cut, if not as the kernel cuts those of a parameter."""
    stored: frozenset[str] = frozenset()
    """The keys of results that the kernel stores where the launch wants them."""

    @property
    def is_empty(self) -> bool:
        """Returns True if its tensors have no elements: no kernel runs on them."""
        return not self.tensors[0].numel()


def parts_of(index: int, launch: Launch, machine: Machine) -> Iterator[Part]:
    """The parts of a launch of one stage, which has this index among those of a call."""
    for place, reads in enumerate(launch.reads):
        named = zip(launch.update.inputs, launch.masked(reads), strict=True)
        given = {k: _in_hbm(x) for k, x in named}
        like = given[launch.update.inputs[0]]
        try:
            grad = storage_of(given["grad"].dtype).name if "grad" in given else "bf16"
            kernel = kernel_of(launch.update, machine, grad)
        except UnsupportedUpdate as error:
            raise UnsupportedUpdate(advised(str(error), like.device)) from error.__cause__
        shapes = {a.key: shape_of(launch.update, a.key, reads[0]) for a in kernel.arguments}
        if MEASURES in shapes and like.numel():
            shapes[MEASURES] = (kernel.totals(reads[0].shape, kernel.cut(reads[0].shape)),)
        for a in kernel.arguments:
            if a.key not in given:  # it is written, and was not read
                given[a.key] = like.new_empty(tuple(shapes[a.key]) or (1,), dtype=getattr(torch, a.dtype))
        part = Part(index, place, kernel, [given[a.key] for a in kernel.arguments], reads[0].shape)
        if custom_op.works_in_place(like.device):
            _give_memory(part, launch, reads)
        yield part


def _give_memory(part: Part, launch: Launch, reads: Sequence[Tensor]) -> None:
    """Gives the kernel the tensors to write to: those of the launch, or others where these must stay as they are.

    They must if the launch may be skipped, or if what is read is not what is written.
    """
    writes = launch.writes[part.parameter]
    wanted = dict(zip(launch.update.outputs, writes, strict=True)) if writes else {}
    read = dict(zip(launch.update.inputs, reads, strict=True))
    for i, argument in enumerate(part.kernel.arguments):
        key, target = argument.key, wanted.get(argument.key)
        if not argument.written:
            continue
        # A launch that may be skipped (`finite`) must leave its tensors alone until that is known.
        same = target is not None and read.get(key, target) is target and launch.finite is None
        if target is not None and same and target.is_contiguous() and target.dtype == part.tensors[i].dtype:
            part.tensors[i] = _in_hbm(target)
            part.stored |= {key}
        elif key in read:
            part.tensors[i] = part.tensors[i].clone()


def _in_hbm(x: Tensor) -> Tensor:
    """A tensor as kernels take it: its elements side by side, and with a dimension at least; no copy is made for it."""
    x = x.detach()
    return x.contiguous() if x.ndim else x.reshape(1)


def shape_of(update: Update, key: str, like: Tensor) -> Sequence[int]:
    """The shape of a component of a parameter with a component `like`, which has a word for each element."""
    block = update.blocks.get(key)
    return like.shape if block is None else (*like.shape[:-1], -(-like.shape[-1] // block))


@cache
def kernel_of(update: Update, machine: Machine, grad: str) -> Kernel:
    """The kernel of an update of one stage, for gradients of a storage type."""
    return lower_to_nki(update, machine.target, machine.dialect, grad=grad)


def call(
    launches: Sequence[Launch], parts: Sequence[Part], machine: Machine, rows: Sequence[Tensor | None] = ()
) -> Iterator[dict[str, Tensor]]:
    """The tensors of each part, by key, after one call of all kernels; those of an empty parameter as they are.

    `rows` are, for each launch, None or what earlier stages have found for its parameters (`Kernel.scalar_input`).
    """
    present = [part for part in parts if not part.is_empty]
    results = iter(_results(launches, present, machine, rows) if present else ())
    for part in parts:
        known = dict(zip((a.key for a in part.kernel.arguments), part.tensors, strict=True))
        yield known | {key: next(results) for key in part.kernel.outputs if not part.is_empty}


def _results(
    launches: Sequence[Launch], parts: Sequence[Part], machine: Machine, rows: Sequence[Tensor | None]
) -> list[Tensor]:
    """What the kernels of all parts write, in order."""
    rows = rows or [None] * len(launches)
    for part in parts:
        _require_addressable(part)
    device = parts[0].tensors[0].device
    inputs = {place: k for k, place in enumerate(dict.fromkeys(map(_place_of_numbers, parts)))}
    pieces = (
        (part.kernel, inputs[_place_of_numbers(part)], math.prod(part.shape), part.cut or part.kernel.cut(part.shape))
        for part in parts
    )
    key = program_of(machine, tuple(pieces))
    made: dict[tuple[int, Kernel], Tensor] = {}
    for i, kernel in dict.fromkeys((i, kernel) for i, kernel, _ in inputs):
        if kernel.may_clamp(launches[i].vector):
            _warn_of_clamped(kernel, device)
        if kernel.plan.columns:
            made[i, kernel] = kernel.scalar_input(launches[i].vector, rows[i] if kernel.finds else None).to(device)
    scalars = [
        made[i, kernel][j] if kernel.finds else made[i, kernel] for i, kernel, j in inputs if kernel.plan.columns
    ]
    drawing = [(launches[part.launch].update, launches[part.launch].vector) for part in parts if part.kernel.plan.draws]
    scalars += [seed_of(drawing, machine.cores).to(device)] if drawing else []
    update = custom_op.update_in_place if custom_op.works_in_place(device) else custom_op.update_tensors
    return update([t for part in parts for t in part.tensors], scalars, key)


def _require_addressable(part: Part) -> None:
    """Raises UnsupportedUpdate, before anything is updated, if a tensor is larger than its offsets reach."""
    for argument, x in zip(part.kernel.arguments, part.tensors, strict=True):
        if (size := x.numel() * x.element_size()) > ADDRESSED:
            raise UnsupportedUpdate(
                f"{argument.key!r} of a parameter of shape {list(part.shape)} has {size:,} bytes, and kernels for NKI "
                f"address {ADDRESSED:,} of a tensor: shard the parameter (fully_shard, ZeRO), or use backend='xla'"
            )


def _place_of_numbers(part: Part) -> tuple[int, Kernel, int]:
    """Whose scalar input it is: a launch's, or one parameter's if earlier stages have found numbers of it."""
    return part.launch, part.kernel, part.parameter if part.kernel.finds else 0


def end_graph(device: torch.device) -> None:
    """Ends a graph of XLA, so that the next kernel is in another one; waits for nothing."""
    if device.type == "xla":
        import torch_xla  # an extra: imported only where parameters are on an XLA device

        torch_xla.sync()


@cache
def _warn_of_clamped(kernel: Kernel, device: torch.device) -> None:
    """Warns once of a kernel that may clamp a divisor: whether it does depends on the gradients."""
    text = (
        "the update divides by what may be smaller than 2**-42 (2.3e-13), such as a root without an eps of that size, "
        "and kernels for Trainium clamp a divisor to that: steps of elements with such small gradients are too short. "
        "Use a larger eps, or backend='xla'; if no gradient is that small, filter this warning "
        "(collage_neuron.ClampedDivisor)"
    )
    warnings.warn(advised(text, device), ClampedDivisor, stacklevel=2)


def _ambiguous(text: str) -> Iterator[str]:
    """Parameters of a kernel's functions that mean something else too."""
    # States are called as their optimizer likes: `total`, say, would be another number, without an error.
    tree = ast.parse(text)
    names = [a.asname or a.name for x in tree.body if isinstance(x, (ast.Import, ast.ImportFrom)) for a in x.names]
    names += [ast.unparse(t) for x in tree.body if isinstance(x, ast.Assign) for t in x.targets]
    functions = [x for x in tree.body if isinstance(x, ast.FunctionDef)]
    for function in functions:
        given = Counter(a.arg for a in function.args.args)
        own = {"range", *names, *(f.name for f in functions)}
        for x in (x for statement in function.body for x in ast.walk(statement)):
            if isinstance(x, ast.FunctionDef):
                own |= {x.name, *(a.arg for a in x.args.args)}
            elif isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store):
                own.add(x.id)
        yield from (f"{name} has two meanings in {function.name}" for name, n in given.items() if n > 1 or name in own)


def program_of(machine: Machine, pieces: tuple[tuple[Kernel, int, int, Cut], ...]) -> str:
    """The key of the registered program that runs these kernels: each with its scalar input, by number, and its cut."""
    key, program = _program(machine, pieces)
    custom_op.register(key, program)
    return key


@lru_cache(custom_op.KEPT)
def _program(machine: Machine, pieces: tuple[tuple[Kernel, int, int, Cut], ...]) -> tuple[str, custom_op.Program]:
    works = with_bodies([Work(kernel, total, cut) for kernel, _, total, cut in pieces])
    name = "collage_step"
    text = step_text(name, [work._replace(scalars=n) for work, (_, n, *_) in zip(works, pieces, strict=True)])
    if ambiguous := next(_ambiguous(text), None):  # before a compiler says so
        raise UnsupportedUpdate(
            f"the generated kernel is not one that NKI takes: {ambiguous}: if a state of the optimizer is called so, "
            "rename it; or use backend='xla'"
        )
    arguments = [a for kernel, *_ in pieces for a in kernel.arguments]
    # The same text is another program on two cores.
    key = f"{hashlib.sha256(text.encode()).hexdigest()[:16]}[{machine.cores}]"
    return key, custom_op.Program(name, text, [i for i, a in enumerate(arguments) if a.written], machine.cores)
