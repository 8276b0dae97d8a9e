"""Where memory is exchanged with torch_xla's CPU device, nothing is written that anybody can still read.

Each case is a way in which two tensors of XLA, or a tensor and a graph, come to refer to one buffer.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import collage_neuron
from collage_neuron.passes.backends.registry import choose, get
from collage_neuron.passes.backends.xla.cpu_device import Lender, address, values

torch_xla = pytest.importorskip("torch_xla")

N = 1000


def tensor(device: torch.device, shape: tuple[int, ...] = (N,)) -> Tensor:
    """A tensor of small integers, materialized."""
    t = torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(device)
    torch_xla.sync(wait=True)
    return t


def add(lender: Lender, t: Tensor, amount: int = 1) -> int:
    """Adds to a tensor as a step does; the address of the result."""
    (own,) = lender.take([t])
    own.add_(amount)
    with torch.no_grad():
        lender.give([t], [own])
    return own.data_ptr()


def test_memory_is_taken_back_where_nobody_else_refers_to_it(xla: torch.device) -> None:
    t, lender = tensor(xla), Lender()
    theirs = address(t)
    found = []
    for _ in range(4):
        found.append(add(lender, t))
        torch_xla.sync(wait=True)
        assert address(t) == found[-1]
    assert theirs not in found
    assert len(set(found)) == 1
    assert torch.equal(t.cpu(), torch.arange(float(N)) + 4)


SHARING: dict[str, Callable[[Tensor], Tensor]] = {
    "copied to another": lambda t: torch.zeros(N, device=t.device).copy_(t),
    "to(copy=True)": lambda t: t.to(t.dtype, copy=True),
    "a clone": lambda t: t.clone(),
    "a graph that is pending": lambda t: t * 1,
    "a slice that is pending": lambda t: t[:N].clone(),
}


@pytest.mark.parametrize("synced", ["no", "begun", "waited"])
@pytest.mark.parametrize("how", SHARING)
def test_who_shares_memory_keeps_the_old_values(xla: torch.device, how: str, synced: str) -> None:
    t, lender = tensor(xla), Lender()
    for first in (True, False):
        other = SHARING[how](t)
        if synced != "no":
            torch_xla.sync(wait=synced == "waited")
        before = torch.arange(float(N)) + (0 if first else 1)
        add(lender, t)
        assert torch.equal(other.cpu(), before)
        assert torch.equal(t.cpu(), before + 1)
        torch_xla.sync(wait=True)


@pytest.mark.parametrize("how", ["copied to another", "to(copy=True)"])
def test_the_buffers_of_xla_are_shared_without_a_trace(xla: torch.device, how: str) -> None:
    """The control, and the reason for all this: written in place, XLA's own buffer changes the other tensor too."""
    t = tensor(xla)
    other = SHARING[how](t)
    torch_xla.sync(wait=True)
    values(t).add_(1)
    assert other[0].item() == 1


def test_equal_constants_are_updated_apart(xla: torch.device) -> None:
    ts, lender = [torch.zeros(N, device=xla) for _ in range(3)], Lender()
    torch_xla.sync(wait=True)
    for step in range(1, 3):
        for i, t in enumerate(ts):
            add(lender, t, i)
        assert [t[-1].item() for t in ts] == [0, step, 2 * step]


def test_tensors_that_share_memory_are_updated_apart_together(xla: torch.device) -> None:
    """A tensor and its copy have one buffer, and both are written in one step."""
    t, lender = tensor(xla), Lender()
    add(lender, t)
    other = torch.empty_like(t)
    other.copy_(t)
    torch_xla.sync(wait=True)
    owns = lender.take([t, other])
    for i, own in enumerate(owns):
        own.add_(i + 1)
    lender.give([t, other], owns)
    assert torch.equal(other.cpu() - t.cpu(), torch.ones(N))
    assert torch.equal(t.cpu(), torch.arange(float(N)) + 2)


def test_an_error_on_the_way_leaves_the_values(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    ts, lender = [tensor(xla), tensor(xla) + 1], Lender()
    for t in ts:
        add(lender, t)
    torch_xla.sync(wait=True)
    substitute = lender._substitute

    def failing(t: Tensor) -> Tensor:
        if t is ts[1]:
            raise RuntimeError("no memory")
        return substitute(t)

    monkeypatch.setattr(lender, "_substitute", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        lender.take(ts)
    for i, t in enumerate(ts):
        assert torch.equal(t.cpu(), torch.arange(float(N)) + i + 1)


ALIASES: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "view": lambda t: t.view(10, -1).view(-1),
}


@pytest.mark.parametrize("how", ALIASES)
def test_aliases_see_the_new_values_as_after_any_write_in_place(xla: torch.device, how: str) -> None:
    t, lender = tensor(xla), Lender()
    for step in range(1, 4):
        with torch.no_grad():
            alias = ALIASES[how](t)
        add(lender, t)
        assert torch.equal(alias.cpu(), torch.arange(float(N)) + step)
        torch_xla.sync(wait=True)


def test_a_parameter_that_is_part_of_a_flat_buffer(xla: torch.device) -> None:
    flat, lender = tensor(xla, (8,)), Lender()
    p = torch.nn.Parameter(flat[2:6])
    for step in range(1, 4):
        torch_xla.sync(wait=True)
        add(lender, p)
        assert flat.tolist() == [0, 1, *(x + step for x in range(2, 6)), 6, 7]


def test_memory_that_a_graph_writes_is_not_ours_any_more(xla: torch.device) -> None:
    """XLA may reuse lent memory for what it computes (donation): the result is another buffer, read and copied."""
    t, lender = tensor(xla), Lender()
    for step in range(1, 4):
        add(lender, t)
        torch_xla.sync(wait=True)
        kept = t.to(t.dtype, copy=True)
        t.mul_(2)
        torch_xla.sync(wait=True)
        doubled = t.cpu()
        assert torch.equal(doubled, 2 * kept.cpu())
        add(lender, t)
        assert torch.equal(t.cpu(), doubled + 1)
        assert step == 1 or kept[0].item() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8, torch.int16])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 3)])
def test_shapes_and_types(xla: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    t, lender = tensor(xla, shape).to(dtype), Lender()
    torch_xla.sync(wait=True)
    for step in range(1, 3):
        add(lender, t)
        assert torch.equal(t.cpu(), (torch.arange(t.numel()).reshape(shape) + step).to(dtype))


def test_a_transposed_tensor(xla: torch.device) -> None:
    t, lender = tensor(xla, (3, 5)).t(), Lender()
    for step in range(1, 4):
        torch_xla.sync(wait=True)
        add(lender, t)
        assert torch.equal(t.cpu(), torch.arange(15.0).reshape(3, 5).t() + step)


def test_what_is_not_computed_yet_is_waited_for(xla: torch.device) -> None:
    """torch_xla's `to_dlpack` ends the process there."""
    t = tensor(xla) + 1
    assert address(t) is None
    assert torch.equal(values(t), torch.arange(float(N)) + 1)


def test_no_memory_is_kept_for_tensors_that_are_gone(xla: torch.device) -> None:
    t, lender = tensor(xla), Lender()
    add(lender, t)
    assert len(lender._lent) == 1
    del t
    gc.collect()
    torch_xla.sync(wait=True)
    assert len(lender._lent) == 0


# The backend -------------------------------------------------------------------------------------------------------


def after_steps(device: torch.device, backend: str, strategy: str = "plus") -> list[Tensor]:
    """All tensors of a parameter and its states after four steps, with a mask that lets each of them happen."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 13), torch.nn.Linear(13, 3)).to(device)
    model, optimizer = collage_neuron.compile(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), backend=backend, nonfinite="skip", strategy=strategy
    )
    g = torch.Generator().manual_seed(1)
    for _ in range(4):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=g).to(device, p.dtype)
        optimizer.step()
    states = [optimizer.state[p] for p in model.parameters()]
    return [t.detach().cpu() for s in states for t in s.values() if isinstance(t, Tensor)] + [
        p.detach().cpu() for p in model.parameters()
    ]


@pytest.mark.parametrize("on_cpu", ["reference", "native"])
@pytest.mark.parametrize("strategy", ["plus", "split433", "stochastic"])
def test_on_lent_memory_a_step_has_the_bits_of_the_reference(
    xla: torch.device, strategy: str, on_cpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not get(on_cpu).suits(torch.device("cpu")):
        pytest.skip("no native code here: python -m collage_neuron doctor says why")
    monkeypatch.setattr(get("xla_native"), "_on_cpu", on_cpu)
    expected = after_steps(torch.device("cpu"), "reference", strategy=strategy)
    monkeypatch.setattr(type(get("xla")), "run", None)  # it would fail
    found = after_steps(xla, "xla_native", strategy=strategy)
    assert all(torch.equal(x, y) for x, y in zip(expected, found, strict=True))


def test_a_step_that_fails_gives_all_memory_back(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no")

    p = torch.nn.Parameter(tensor(xla).bfloat16())
    optimizer = collage_neuron.compile(torch.optim.SGD([p], lr=1.0), backend="xla_native")
    monkeypatch.setattr(get("xla_native"), "_on_cpu", "reference")
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    before = p.detach().cpu()
    monkeypatch.setattr(type(get("reference")), "run", fail)
    with pytest.raises(RuntimeError, match="no"):
        optimizer.step()
    assert torch.equal(p.detach().cpu(), before)


def test_what_native_code_cannot_run_is_run_as_hlo(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[object] = []
    monkeypatch.setattr(get("xla_native"), "_on_cpu", "reference")
    p = torch.nn.Parameter(tensor(xla).bfloat16())
    optimizer = collage_neuron.compile(torch.optim.SGD([p], lr=1.0), backend="xla_native", validate="off")
    p.grad = torch.ones_like(p)
    optimizer.step()
    monkeypatch.setattr(type(get("reference")), "supports", lambda self, update: "no")
    monkeypatch.setattr(type(get("reference")), "run", None)
    monkeypatch.setattr(type(get("xla")), "run", lambda self, launches: steps.append(launches))
    optimizer.step()
    assert len(steps) == 1


def test_sharded_tensors_are_rejected(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under SPMD a tensor is in several buffers (tests/distributed/test_spmd.py looks at such tensors)."""
    import torch_xla.runtime as xr

    monkeypatch.setattr(xr, "is_spmd", lambda: True)
    assert not get("xla_native").suits(xla)
    with pytest.raises(ValueError, match="runs on torch_xla's CPU device only, without SPMD; use backend='auto'"):
        choose("xla_native", xla)


def test_auto_is_hlo(xla: torch.device) -> None:
    """Until `benchmarks/xla_native.py` shows that whole training steps are faster otherwise."""
    assert choose("auto", xla) is get("xla")


@pytest.mark.parametrize("what", ["itself", "a view of itself", "another", "a state", "a low word"])
def test_a_gradient_that_is_an_alias_of_what_is_written(xla: torch.device, what: str) -> None:
    """It is read as it was before the step, though the tensor has other values while its memory is taken."""

    def trained(device: torch.device, backend: str) -> list[Tensor]:
        params = [torch.nn.Parameter(torch.linspace(-1, 1, 33).add(i).to(device)) for i in range(2)]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, lr=1e-2)
        optimizer = collage_neuron.compile(optimizer, backend=backend, strategy="plus", verbose=False)
        for step in range(4):
            for p in params:
                p.grad = torch.linspace(1, 2, 33).bfloat16().to(device)
            if step:
                state = optimizer.state[params[1]]
                aliases = {"itself": params[0], "a view of itself": params[0].view(33), "another": params[1],
                           "a state": state["exp_avg"], "a low word": state["param_lo"]}  # fmt: skip
                params[0].grad = aliases[what].detach()
            optimizer.step()
            torch_xla.sync()
        return [x.detach().cpu() for p in params for x in (p, *optimizer.state[p].values()) if isinstance(x, Tensor)]

    wanted = trained(torch.device("cpu"), "reference")
    assert all(map(torch.equal, trained(xla, "xla_native"), wanted))
