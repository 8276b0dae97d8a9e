"""The probe passes on sound backends, and each of its checks fails, alone, on one that loses that kind of rounding."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.fx as fx
from exact import edited
from running import registered
from worlds import run_script

import collage_neuron
from collage_neuron.errors import UnsafeEnvironment
from collage_neuron.numerics.eft import beyond, capped, narrow, round_to
from collage_neuron.passes.backends.protocol import Backend, ByParameter, EveryDevice, Lowered
from collage_neuron.passes.backends.reference import ReferenceUpdate
from collage_neuron.passes.backends.registry import get
from collage_neuron.passes.backends.xla.hlo import Computation
from collage_neuron.passes.backends.xla.lower import XlaUpdate
from collage_neuron.passes.ir.update import Update
from collage_neuron.runtime.rounding_probe import CHECKS, failures, integer_update, probe_update, require_sound

CPU = torch.device("cpu")

Lost = Callable[[fx.Node], list[fx.Node]]
"""Those users of a `round_to` node for which a compiler takes the value before rounding."""


def users(node: fx.Node, target: Any) -> list[fx.Node]:
    return [user for user in node.users if user.target is target]


def is_sum(node: fx.Node) -> bool:
    value = node.args[0]
    return isinstance(value, fx.Node) and value.target is operator.add


def where_an_fp32_value_is_split(node: fx.Node) -> list[fx.Node]:
    """`x - x.bfloat16().float()` becomes `x - x`."""
    value = node.args[0]
    stored = isinstance(value, fx.Node) and value.op == "call_function" and not value.all_input_nodes[0].args
    return users(node, operator.sub) if stored else []


def where_a_product_is_split(node: fx.Node) -> list[fx.Node]:
    """The error of a product, taken from the product itself, is 0."""
    value = node.args[0]
    return users(node, capped) if isinstance(value, fx.Node) and value.target is operator.mul else []


LOST: dict[str, Lost] = {
    # The error of a sum, taken from the sum itself, is 0.
    "two_sum": lambda node: users(node, operator.sub) if is_sum(node) else [],
    # What XLA does to `(a + b) * c` in bf16: the sum stays fp32 on its way into the product, which is rounded.
    "sum meets product": lambda node: [m for m in users(node, operator.mul) if is_sum(node) and users(m, round_to)],
    # `(a + b).float() * c`: down to bf16 and up again is taken for nothing.
    "sum is widened": lambda node: [m for m in users(node, operator.mul) if is_sum(node) and not users(m, round_to)],
    "split of an fp32 value": where_an_fp32_value_is_split,
    "two_prod": where_a_product_is_split,
}
"""A way to lose roundings for each check of the probe."""


class Another(ByParameter):
    """A backend that lowers updates otherwise; `auto` does not take it."""

    devices = EveryDevice()
    draws = True

    def __init__(self, name: str, lower: Callable[[Update], Lowered]) -> None:
        super().__init__()
        self.name = name
        self._lower = lower

    def lower(self, update: Update) -> Lowered:
        return self._lower(update)

    def suits(self, device: torch.device) -> bool:
        return False


def losing(lost: Lost) -> Callable[[Update], ReferenceUpdate]:
    """The reference backend with a compiler in front that loses those roundings."""

    def lower(update: Update) -> ReferenceUpdate:
        for i, node in enumerate(update.graph.graph.nodes):
            if node.target is round_to:
                update = edited(update, i, forget)
        return ReferenceUpdate(update)

    def forget(node: fx.Node) -> None:
        (unrounded, _) = node.args
        assert isinstance(unrounded, fx.Node)
        for user in lost(node):
            user.replace_input_with(node, unrounded)

    return lower


def without_numbers(update: Update) -> ReferenceUpdate:
    """The reference backend on a device that adds no numbers of the step."""

    def drop(node: fx.Node) -> None:
        node.replace_all_uses_with(node.all_input_nodes[0])

    for i, node in enumerate(update.graph.graph.nodes):
        if node.target is operator.add and str(node.args[1]) == "c1":
            update = edited(update, i, drop)
    return ReferenceUpdate(update)


def beyond_in_fp32(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """What `eft.beyond` becomes where the sum of two integers of 32 bits is computed in fp32, as on a trn1."""
    return (x.view(torch.int32).float() + n).to(torch.int32).view(torch.float32)


def with_sums_in_fp32(update: Update) -> ReferenceUpdate:
    """The reference backend on a device that adds integers as fp32 numbers."""
    for i, node in enumerate(update.graph.graph.nodes):
        if node.target is beyond:
            update = edited(update, i, lambda copy: setattr(copy, "target", beyond_in_fp32))
    return ReferenceUpdate(update)


WRONG: dict[str, Callable[[Update], ReferenceUpdate]] = {
    **{check: losing(lost) for check, lost in LOST.items()},
    "a number is added": without_numbers,
    "words of integers": with_sums_in_fp32,
}  # fmt: skip
"""A backend that fails each check."""


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a new backend that fails a check."""
    with registered(Another(f"losing {request.param}", WRONG[request.param])) as backend:
        yield backend.name


def test_the_probe_passes_on_the_reference_backend() -> None:
    assert failures(get("reference"), CPU) == []


def test_the_probe_passes_on_xla(xla: torch.device) -> None:
    assert failures(get("xla"), xla) == []
    require_sound(get("xla"), xla, "split433")


def test_there_is_a_way_to_fail_every_check() -> None:
    assert WRONG.keys() == CHECKS.keys()
    assert sorted(name for names in CHECKS.values() for name in names) == sorted(
        (*probe_update().outputs, *integer_update().outputs)
    )


@pytest.mark.parametrize("backend", WRONG, indirect=True)
def test_a_check_fails_where_its_kind_of_rounding_is_lost_and_the_others_do_not(backend: str) -> None:
    assert failures(get(backend), CPU) == [backend.removeprefix("losing ")]


@pytest.mark.parametrize("backend", WRONG, indirect=True)
def test_a_backend_that_loses_roundings_is_refused_by_name_and_nothing_is_updated(backend: str) -> None:
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    lost = backend.removeprefix("losing ")
    with pytest.raises(UnsafeEnvironment, match=rf"'{backend}' on cpu loses .* added numbers \({lost}\).*doctor"):
        collage_neuron.compile(torch.optim.AdamW([p]), backend=backend).step()
    assert torch.equal(p, torch.ones_like(p))


class ReadsBack(torch.optim.SGD):
    """Runs as written."""

    def step(self, closure: Any = None) -> Any:
        self.seen = [p.grad.abs().max().item() for p in self.param_groups[0]["params"]]
        return super().step(closure)


class ConvertsElsewhere(Another):
    """A sound backend, in whose place another one converts words where a step runs as written (as for kernels)."""

    def converter(self, device: torch.device) -> Backend:
        return get(self.name.partition(" beside ")[2])


@pytest.mark.parametrize("backend", ["two_sum"], indirect=True)
def test_the_backend_that_converts_for_steps_as_written_is_probed_too(backend: str) -> None:
    name = f"sound beside {backend}"
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    with registered(ConvertsElsewhere(name, ReferenceUpdate)):
        collage_neuron.compile(torch.optim.SGD([p], lr=0.1), backend=name, strategy="plus").step()
        with pytest.raises(UnsafeEnvironment, match=f"backend '{backend}' on cpu loses roundings"):
            collage_neuron.compile(ReadsBack([p], lr=0.1), backend=name, strategy="plus").step()


def test_the_doctor_says_of_a_device_that_cannot_be_opened_why_and_goes_on(xla: torch.device, tmp_path: Path) -> None:
    """In a process of its own, since torch_xla opens its device once."""
    script = "from collage_neuron.cli.main import main\nprint(main(['doctor']))\n"
    *said, status = run_script(tmp_path, script, environ={"PJRT_DEVICE": "NOSUCH"}).splitlines()
    (row,) = (line for line in said if line.split()[:2] == ["probes", "xla"])
    assert (status, row.split()[2]) == ("1", "none")
    assert "cannot run: No PjRtPlugin registered for: NOSUCH" in row
    assert "; not: xla, because cannot run: No PjRtPlugin registered for: NOSUCH" in said[-1]


def test_xla_without_reduce_precision_loses_every_rounding(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Computation, "reduce_precision", lambda self, x, exponent_bits, mantissa_bits: x)
    without = Another("xla without roundings", XlaUpdate)
    assert failures(without, xla) == list(LOST)
    with pytest.raises(
        UnsafeEnvironment, match=r"on xla:0 loses roundings or added numbers \(two_sum, sum meets product, .*two_prod\)"
    ):
        require_sound(without, xla, "plus")


def test_the_probe_is_an_update_like_any_other() -> None:
    """Each output is stored, and every stored bf16 word is a rounding: what is probed is the arithmetic."""
    for update in (probe_update(), integer_update()):
        nodes = [n for n in update.graph.graph.nodes if n.target is narrow]
        assert len(nodes) == len(update.outputs)
        assert all(n.args[0].target is round_to for n in nodes if n.args[1] in ("bf16", "int8", "int16"))
