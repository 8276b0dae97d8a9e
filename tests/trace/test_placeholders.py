"""A value that waits is computed for who asks, and who takes its memory otherwise gets an error."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import through_torch_save
from torch import Tensor
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # the old one
from traced_cases import Stepping

import collage_neuron
from collage_neuron.trace.placeholders import placeholder

# torch.func, out=, views and the like are in `traced_cases`.
ASKING: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda t: t.numpy().tolist(),
    "array": lambda t: t.__array__().tolist(),
    "tolist": lambda t: t.tolist(),
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool((t > 0).all()),
    "index": lambda t: [float(x) for x in t],
    "repr": repr,
    "format": lambda t: f"{t[0]:.6f}",
    "deepcopy": lambda t: copy.deepcopy(t).tolist(),
    "pickle": lambda t: pickle.loads(pickle.dumps(t)).tolist(),
    "save": lambda t: through_torch_save(t, weights_only=True).tolist(),
    "address": lambda t: t.data_ptr() != 0,
    "storage": lambda t: len(t.untyped_storage()),
    "dlpack": lambda t: t.__dlpack_device__()[0].value,
    "capsule": lambda t: from_dlpack(to_dlpack(t.clone())).tolist(),
    "apply": lambda t: t.clone().apply_(lambda x: 2 * x).tolist(),
    "equal": lambda t: torch.equal(t, t.clone()),
    "contains": lambda t: 2.0 in t,
    "sorted": lambda t: t.sort().values.tolist(),
    "data": lambda t: t.data.numpy().tolist(),
}


@pytest.mark.parametrize("how", ASKING)
def test_memory_is_there_for_those_who_ask(how: str, traced: None) -> None:
    """The parameter, its gradient, a value of the step, and a view, of which some were written before."""

    def answers(dtype: torch.dtype) -> list[Any]:
        found: list[Any] = []

        def update(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
            value = p * 2
            p.add_(1)
            if t > 2:
                found.extend(ASKING[how](x.detach()) for x in (p, g, value, p.view(-1)[1:]))

        p = Parameter(torch.tensor([1.0, 2.0, 4.0], dtype=dtype))
        optimizer: Any = Stepping([p], update)
        if dtype == torch.bfloat16:
            optimizer = collage_neuron.compile(optimizer, strategy="fp32", verbose=False)
        for _ in range(4):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return found

    assert answers(torch.bfloat16) == answers(torch.float32) != []


TAKING: dict[str, Callable[[Tensor], object]] = {
    "an operation": lambda t: t + 1,
    "in place": lambda t: t.add_(1),
    "a sum": lambda t: t.sum(),
    "numpy": lambda t: t.numpy(),
    "tolist": lambda t: t.tolist(),
    "an address": lambda t: t.data_ptr(),
    "lists": lambda t: torch._foreach_add([t], 1.0),
    "a copy": lambda t: torch.zeros(3).copy_(t),
    "DLPack": lambda t: t.__dlpack__(),
    "printing": repr,
    "a random number": lambda t: t.uniform_(),
}


@pytest.mark.parametrize("how", TAKING)
def test_who_takes_the_memory_gets_an_error(how: str) -> None:
    """Outside of its step, and with torch's own methods in one."""
    t = placeholder((3,), (1,), torch.float32, torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"waits for the end|not supported for tensor subclasses|data pointer"):
        TAKING[how](t)


ARGUMENTS: tuple[tuple[Any, ...], ...] = (
    (), (2,), (2, 3), ([1.0, 2.0],), (torch.ones(2, 2),), ("cpu",), (torch.float64,), (lambda *_: None,),
)  # fmt: skip
INSIDE = {"_cdata", "_python_dispatch", "__annotations__", "__dict__", "resize_as"}
"""What is about the object; and one that torch has deprecated, and raises."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("args", ARGUMENTS, ids=range(len(ARGUMENTS)))
def test_nothing_is_answered_otherwise_than_by_a_tensor_with_a_value(args: tuple[Any, ...]) -> None:
    """All that a tensor can be asked, of a placeholder outside of its step: the answer is the same, or an error."""

    def answer(t: Tensor, name: str) -> Any:
        found = getattr(t, name)
        found = found(*args) if callable(found) else found
        return (found.shape, found.dtype, found.device) if isinstance(found, Tensor) else str(found)

    wrong = []
    for name in sorted(set(dir(torch.Tensor)) - set(dir(object)) - INSIDE):
        try:
            expected = answer(torch.ones(2, 2), name)
        except Exception:  # not a way to ask
            continue
        try:
            given = answer(placeholder((2, 2), (2, 1), torch.float32, torch.device("cpu")), name)
        except RuntimeError:
            continue
        if given != expected and "object at 0x" not in str(expected):
            wrong.append(name)
    assert wrong == []
