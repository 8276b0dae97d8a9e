"""The recorder: lists the tensor operations of Python code that runs on meta tensors, with its numbers as slots.

An optimizer's `step()` works on two planes. On the scalar plane, Python floats and 0-d CPU tensors (step counts, bias
corrections, the learning rate) are computed as usual. On the tensor plane nothing has data: the parameter and its
states are meta tensors, and each operation on them is recorded. A number that enters the tensor plane becomes a
numbered slot.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from types import FrameType
from typing import Any, NamedTuple

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture.device_numbers import DeviceNumber, Node, Reading, is_device_number
from collage_neuron.passes.capture.number_table import READ, Made, Numbers
from collage_neuron.passes.capture.planes import touches_meta
from collage_neuron.passes.capture.results import result_without_data
from collage_neuron.passes.capture.source_location import Place, here
from collage_neuron.torch_privates import DispatchMode, schema, storage_id

aten = torch.ops.aten


class NumberWritten(UnsupportedUpdate):
    """The cause of a rejection: the step writes tensors of the tensor plane to `args[0]`, a number."""


def number_written(error: UnsupportedUpdate) -> str | None:
    """The name of the state that a step writes tensors to although it was passed as a number; else None."""
    cause = error.__cause__
    return getattr(cause.args[0], "state_name", None) if isinstance(cause, NumberWritten) else None


_WRITES_NUMBER = (
    "the update writes a result computed from the parameter or its gradient to a 0-d tensor, which counts as a number "
    "(as `step` does); make such a state with the parameter's shape (torch.zeros_like(p))"
)


class Slot(NamedTuple):
    """A number of the scalar plane."""

    number: int


class Ref(NamedTuple):
    """A tensor of the tensor plane, known by its storage and the window it shows of it."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Op(NamedTuple):
    """One recorded operation; its arguments are Refs, Slots, constants, and tuples of those.

    And, until `number_ops` has written their operations, `Made`: numbers that were computed from tensors.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outs: tuple[Ref | None, ...]
    place: Place | None = None
    """The line that called the operation."""


def refs_of(named: Mapping[str, torch.Tensor]) -> dict[str, Ref]:
    """How a recording names meta tensors, by their names."""
    return {name: ref_of(t) for name, t in named.items()}


def ref_of(t: torch.Tensor) -> Ref:
    """The reference by which a recording names the meta tensor `t`."""
    return Ref(storage_id(t.untyped_storage()), int(t.storage_offset()), tuple(t.shape), tuple(t.stride()))


_READS = (
    "the update reads a tensor's value back into Python (.item(), float(), or a branch on a tensor) for {}, which "
    "cannot be rewritten: clip (torch.nn.utils.clip_grad_norm_) and log outside step(), branch with "
    "torch.where, use the optimizer's elementwise options, or leave it uncompiled"
)


class Asked(NamedTuple):
    """A comparison of numbers that were read from tensors, and the answer that code got."""

    comparison: Any
    """A `Made`; in a recording with the operations of its numbers (`number_ops`) a `Ref`."""
    answer: bool


QUESTION = "question"
"""The target of an `Op` that stands where code asked for a comparison, its only argument."""


class Recorder(DispatchMode):
    """Records operations of the tensor plane, and lets those of the scalar plane run.

    A 0-d tensor that code makes on the parameter's device is a number of the scalar plane, as `step` is; with `made` it
    is one of the tensor plane, for code that writes tensors to it. `numbers` names the numbers that are read from
    tensors, and `answers` are those to the first comparisons of them (`device_numbers`); later ones are True.
    """

    def __init__(self, made: bool = False, numbers: Numbers | None = None, answers: tuple[bool, ...] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own signature
        self._made = made
        self.reading = Reading(Numbers() if numbers is None else numbers, self._refuse, self._ask)
        self._answers = answers
        self.asked: list[Asked] = []
        """The comparisons that Python's functions have asked for."""
        self.refused: UnsupportedUpdate | None = None
        """Raised when the value of a tensor was needed; code may have caught it."""
        self.reads: list[Ref] = []
        """The numbers that were read: copies of the tensors, since code may write to these."""
        self.ops: list[Op] = []
        self.slots: list[float] = []
        self._alive: list[Any] = []  # keeps storages alive: the address of a freed one would be used again
        self._scratch: list[Any] = []
        self._outside: FrameType | None = None

    def __enter__(self) -> Any:
        self._outside = sys._getframe(1)
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch's own signature

    def __exit__(self, *error: object) -> None:
        self._outside = None
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch's own signature

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first_is = bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_meta  # nearly always
        if not first_is and not touches_meta((*args, *kwargs.values())):
            return self._scalar_plane(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return self.read(args[0])
        for x in _written(func, args, kwargs):
            if isinstance(x, torch.Tensor) and x.numel() == 1 and not x.is_meta and any(map(touches_meta, args)):
                raise UnsupportedUpdate(_WRITES_NUMBER) from NumberWritten(x)  # a cause outlives `pointing_at`
        constant = is_constant_op(func)
        encoded = tuple(self.encode(x, constant) for x in args)
        named = tuple((k, self.encode(x, constant)) for k, x in kwargs.items())
        # An in-place operation keeps the shape, and a meta tensor has no data: not running it saves half the time.
        in_place = writes_first_argument(func) and isinstance(args[0], torch.Tensor) and args[0].is_meta
        out = args[0] if in_place else self._result(func, args, kwargs)
        self._write(Op(func, encoded, named, ()), out)
        return out

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.reads:
            args, kwargs = _without_numbers(args), {k: _without_numbers(x) for k, x in kwargs.items()}
        return result_without_data(func, args, kwargs)

    def read(self, x: torch.Tensor) -> Any:
        """What code gets that reads the value of a tensor of one element: a number without a value."""
        if x.dtype not in (torch.float32, torch.float64):
            self._refuse(f"a value in {x.dtype}")
        copied = torch.empty((), device="meta", dtype=torch.float32)
        self._write(Op(aten.clone.default, (self._ref(x),), (), ()), copied)
        self.reads.append(self._ref(copied))
        return DeviceNumber(Node(self.reading, self.reading.numbers.add(READ, len(self.reads) - 1)))

    def _ask(self, comparison: Made) -> bool:
        place = len(self.asked)
        self.asked.append(Asked(comparison, self._answers[place] if place < len(self._answers) else True))
        self.ops.append(Op(QUESTION, (comparison,), (), (), here(self._outside)))
        return self.asked[-1].answer

    def _refuse(self, use: str) -> Any:
        self.refused = UnsupportedUpdate(_READS.format(use))
        raise self.refused

    def _scalar_plane(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation without meta tensors: factories of parameter-shaped tensors are recorded, others just run."""
        if self.reads and _has_numbers((*args, *kwargs.values())):
            self._refuse("a tensor that is not of the parameter")
        if writes_first_argument(func) and any(map(self._is_foreign, args[0] if type(args[0]) is list else args[:1])):
            raise UnsupportedUpdate(
                "the update writes to a tensor that is neither the parameter nor one of its states; take parameters "
                "from optimizer.param_groups, and keep tensors in optimizer.state[p]"
            )
        device = kwargs.get("device")
        out = func(*args, **kwargs)
        if device is None or torch.device(device).type != "meta":
            self._scratch.append(out)
            return out
        if out.dim() == 0 and not self._made:
            return func(*args, **dict(kwargs, device="cpu"))
        constants = tuple(self.encode(x, True) for x in args)
        self._write(Op(func, constants, tuple(kwargs.items()), ()), out)
        return out

    def keep(self, memory: Sequence[Any]) -> None:
        """Keeps memory alive as long as this recording, since the address of freed memory would be used again."""
        self._alive.extend(memory)

    def _is_foreign(self, x: Any) -> bool:
        """Returns True if `x` is a tensor with data that is not a number and was not created by the recorded code."""
        if not isinstance(x, torch.Tensor) or (x.dim() == 0 and not x.requires_grad):
            return False
        made = (t for t in self._scratch if isinstance(t, torch.Tensor))
        return all(storage_id(t.untyped_storage()) != storage_id(x.untyped_storage()) for t in made)

    def encode(self, x: Any, constant: bool) -> Any:
        """How an operation names an argument; `constant`: its numbers are part of the graph, and no slots."""
        if isinstance(x, torch.Tensor):
            if x.is_meta:
                return self._ref(x)
            if x.numel() != 1:
                raise UnsupportedUpdate(
                    f"the update combines the parameter with another tensor of shape {tuple(x.shape)} that is "
                    "neither its gradient nor a state of its shape; only elementwise updates can be rewritten"
                )
            x = x.item()
        if isinstance(x, (list, tuple)):
            return tuple(self.encode(y, constant) for y in x)
        if is_device_number(x):
            return self._refuse("a constant of an operation") if constant else x.node.made
        if isinstance(x, bool) or not isinstance(x, (int, float)) or constant:
            return x
        self.slots.append(float(x))
        return Slot(len(self.slots) - 1)

    def _write(self, op: Op, out: Any) -> None:
        results = (out,) if isinstance(out, torch.Tensor) or not isinstance(out, (tuple, list)) else out
        outs = tuple(self._ref(o) if isinstance(o, torch.Tensor) and o.is_meta else None for o in results)
        self.ops.append(op._replace(outs=outs, place=here(self._outside)))

    def _ref(self, t: torch.Tensor) -> Ref:
        storage = t.untyped_storage()
        self._alive.append(storage)  # and not `t`, whose memory code may exchange
        return Ref(storage_id(storage), int(t.storage_offset()), tuple(t.shape), t.stride())

    def signature(self, roles: dict[str, Ref]) -> tuple[Any, ...]:
        """A cache key: the recording without the values of the slots and the addresses of the tensors.

        `roles` names the tensors that are the parameter, the gradient and the states.
        """
        names: dict[int, int] = {}

        def canonical(x: Any) -> Any:
            kind = type(x)
            if kind is Ref:
                return names.setdefault(x.storage, len(names)), x[1:]
            if isinstance(x, tuple) and kind is not Slot:
                return tuple(map(canonical, x))
            return kind, x

        ops = ((op.target, canonical(op.args), canonical(op.kwargs), canonical(op.outs), op.place) for op in self.ops)
        return canonical(tuple(roles.items())), tuple(ops)


_POWERS = {"aten::pow", "aten::pow_", "aten::_foreach_pow", "aten::_foreach_pow_", "aten::linalg_vector_norm"}
"""An exponent, or the order of a norm, selects the operations that they become."""


def _has_numbers(given: Sequence[Any]) -> bool:
    return any(_has_numbers(x) if isinstance(x, (list, tuple)) else is_device_number(x) for x in given)


def _without_numbers(x: Any) -> Any:
    """`x` with a number of Python's for each that was read from a tensor: of its type, since its value is not known."""
    if type(x) in (list, tuple):
        return type(x)(map(_without_numbers, x))
    return 1.0 if is_device_number(x) else x


@cache
def is_constant_op(func: Any) -> bool:
    """Returns True if the numbers of `func` are constants of the graph: exponents, sizes, memory formats, fills."""
    return schema(func).name in _POWERS or not any(
        str(a.type) in ("number", "Optional[number]", "List[number]", "Tensor", "Optional[Tensor]", "List[Tensor]")
        and a.name not in ("self", "fill_value")
        for a in schema(func).arguments
    )


@cache
def writes_first_argument(func: Any) -> bool:
    """Returns True if `func` is an in-place operation: `add_`, `copy_`, ..."""
    info = schema(func).arguments[0].alias_info if schema(func).arguments else None
    return info is not None and info.is_write and schema(func).name.endswith("_")


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
    """The arguments to which an operation writes."""
    if "out" in kwargs:
        return [kwargs["out"]]
    if not writes_first_argument(func):
        return ()
    return args[:1] if isinstance(args[0], torch.Tensor) else args[0]
