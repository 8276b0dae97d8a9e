"""A value that waits is computed for who asks, also in another thread, and knows how it lies in memory."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from as_written import Written, compiled, equal, in_fp32, values
from as_written import run as stepped
from models import through_torch_save
from running import compiled_only
from torch import Tensor
from torch.nn import Parameter
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]  # the old one
from traced_cases import Stepping

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.trace.placeholders import placeholder

# --- A value that waits is computed for who asks, and who takes its memory otherwise gets an error --------------------

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


# --- steps that ask how tensors lie in memory get the true answer -----------------------------------------------------

LAST = torch.channels_last
Look = Callable[[Tensor, Tensor], Any]
LOOKS: dict[str, Look] = {
    "contiguous": lambda p, g: p.is_contiguous(),
    "channels last": lambda p, g: p.is_contiguous(memory_format=LAST),
    "gradient": lambda p, g: g.is_contiguous(),
    "stride": lambda p, g: p.stride(0) == 72,
    "strides": lambda p, g: p.stride() == g.stride(),
    "order": lambda p, g: p.dim_order() == (0, 1, 2, 3),
    "result": lambda p, g: (p * g).is_contiguous(),
    "storage": lambda p, g: p.untyped_storage().nbytes() == 4 * p.numel(),
    "place": lambda p, g: p.storage_offset() == 0,
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=LAST),
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
}


class Looking(Written):
    """Has another rate for some layouts."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] * (2 if group["look"](p, g) else 1))


def run(make: Any, lay: list[Callable[[Tensor], Tensor]], of_gradients: list[Any], compiled: bool) -> list[Tensor]:
    """The parameters after a step for each layout of gradients."""
    draws = torch.Generator().manual_seed(0)
    starts = [torch.randn(16, 8, 3, 3, generator=draws).bfloat16() for _ in lay]
    params = [torch.nn.Parameter(f(x.float())) for f, x in zip(lay, starts, strict=True)]
    optimizer = make(params)
    if compiled:
        optimizer = collage_neuron.compile(optimizer, strategy="fp32", verbose=False)
    for of_gradient in of_gradients:
        for p in params:
            p.grad = of_gradient(torch.randn(p.shape, generator=draws).bfloat16().to(p.dtype))
        optimizer.step()
    return [collage_neuron.exact_value(optimizer, p) if compiled else p.detach() for p in params]


def same(make: Any, lay: list[Any], of_gradients: list[Any]) -> None:
    for x, y in zip(*(run(make, lay, of_gradients, is_ours) for is_ours in (True, False)), strict=True):
        torch.testing.assert_close(x, y, rtol=2**-21, atol=2**-22)


def looking(name: str) -> Callable[..., Looking]:
    return lambda params: Looking(params, look=LOOKS[name])


@pytest.mark.parametrize("name", LOOKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_that_asks_for_the_layout_gets_the_true_one(name: str, layout: str) -> None:
    lay, usual = LAYOUTS[layout], LAYOUTS["contiguous"]
    same(looking(name), [lay], [lay, lay])
    same(looking(name), [usual], [usual, lay, usual])  # a gradient may change its layout
    same(looking(name), [usual, lay], [usual, usual])  # and a group may have both


class Strided(Written):
    """Notes strides, before and after values are computed, and steps by the places of memory."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen: set[Any] = set()

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.seen |= {p.stride(), g.stride()}
        p.sub_(g, alpha=group["lr"])
        if self.looks:
            p.numpy()
        self.seen |= {p.stride(), g.stride()}

    looks = False


@pytest.mark.parametrize("looks", [False, True])
def test_tensors_with_gaps_keep_their_strides(looks: bool) -> None:
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        whole, of_gradients = torch.arange(48.0, dtype=dtype).view(6, 8), torch.ones(6, 8, dtype=dtype)
        p = torch.nn.Parameter(whole[1:, ::2])
        p.grad = of_gradients[1:, ::2]
        optimizer = Strided([p])
        optimizer.looks = looks
        if dtype == torch.bfloat16:
            optimizer = collage_neuron.compile(optimizer, strategy="fp32", verbose=False)
        for _ in range(3):
            optimizer.step()
        assert optimizer.seen == {(8, 2)}
        assert torch.equal(whole[:, 1::2].float(), torch.arange(48.0).view(6, 8)[:, 1::2])
        found.append(collage_neuron.exact_value(optimizer, p) if dtype == torch.bfloat16 else p.detach())
    assert torch.equal(*found)


# --- what a thread that a step starts does with the step's tensors is not lost: the step is repeated as written -------


def elsewhere(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class OneState(Written):
    """A thread moves the average, which the step then subtracts: without it the recording is that of no average."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m = state.setdefault("m", torch.zeros_like(p))
        elsewhere(lambda: m.detach().lerp_(g, 0.1))
        p.sub_(m, alpha=group["lr"])


class Pool(Written):
    """A pool for the duration of a step, and a task for each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self.one, [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]))

    @staticmethod
    def one(work: tuple[Any, dict[str, Any]]) -> None:
        p, group = work
        with torch.no_grad():
            p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the first time
@pytest.mark.parametrize("make", [OneState, Pool])
@pytest.mark.parametrize("validate", ["on", "off"])
def test_what_a_thread_does_is_not_lost(make: Any, validate: str) -> None:
    optimizer, params = compiled(make, validate=validate)
    stepped(optimizer, 4)
    assert equal(values(optimizer, params), in_fp32(make, 4))


@pytest.mark.parametrize("make", [OneState, Pool])
def test_it_is_rejected_where_the_step_may_not_run_as_written(make: Any) -> None:
    with compiled_only(), pytest.raises(UnsupportedUpdate, match="starts threads"):
        compiled(make)
