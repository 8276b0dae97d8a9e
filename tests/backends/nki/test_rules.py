"""Every operation that a rule can write has instructions; what has none is refused by name."""

from __future__ import annotations

import operator

import pytest
import torch
from exact import update_of
from nki_runs import Step, differing, run
from one_operation import ONE_OP, SLOT, expanded
from sampling import part

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.eft import OPERATIONS
from collage_neuron.numerics.formats import format_named
from collage_neuron.passes.backends.nki.lower import lower_to_nki
from collage_neuron.passes.backends.nki.tiling import OutOfMemory
from collage_neuron.passes.ir.update import Update

pytestmark = pytest.mark.usefixtures("rejecting", "short_search")

POSITIVE = frozenset({"sqrt", "rsqrt", "log"})
"""Operations that are compared on positive numbers."""

APPROXIMATE = frozenset({"exp", "log", "sigmoid", "softplus"})
"""Operations that the reference and the device approximate each in their own way."""


REJECTED = {"atan2": "bits_of"}  # reads the sign of a zero
"""Rules of operations that no kernel has, and the first of these that the error names."""


def step_of_rule(name: str, arithmetic: str, state: str) -> Step:
    update = expanded(name, arithmetic, state)
    g = torch.Generator().manual_seed(0)
    components: dict[str, torch.Tensor] = {}
    for key, fmt in (("param", "bf16"), ("grad", "bf16"), ("state", state)):
        x = torch.randn(500, generator=g)
        x = x.abs() + 2**-6 if name in POSITIVE else x
        components |= dict(zip(format_named(fmt).keys(key), format_named(fmt).encode(x), strict=True))
    return Step(update, components, torch.tensor(update.scalars.run([SLOT]), dtype=torch.float32))


SETTINGS = (("fp32", "bf16x2", "trn1"), ("bf16", "bf16x2", "trn2"), ("bf16", "bf16", "trn3"))


@pytest.mark.parametrize("name", [n for n in ONE_OP if n != "clone" and n not in REJECTED])
def test_every_rule(name: str) -> None:
    for arithmetic, state, target in part(SETTINGS, 3, name):
        s = step_of_rule(name, arithmetic, state)
        found = run(lower_to_nki(s.update, target), s.components, s.vector).results
        if name in APPROXIMATE:
            wanted = s.by_reciprocals().expected()
            for key in (k for k in found if not k.endswith("_lo")):  # a low word belongs to another high one
                torch.testing.assert_close(found[key], wanted[key], rtol=2**-7, atol=2**-20)
        else:
            assert not differing(found, s.by_reciprocals().expected())


@pytest.mark.parametrize("name", REJECTED)
def test_what_no_kernel_has_is_rejected_by_name(name: str) -> None:
    for arithmetic in ("fp32", "bf16"):
        with pytest.raises(UnsupportedUpdate, match=rf"uses {REJECTED[name]} .* no NKI instruction is known; use back"):
            lower_to_nki(step_of_rule(name, arithmetic, "bf16x2").update)


def test_a_state_that_stays_as_it_is_leaves_nothing_to_do() -> None:
    with pytest.raises(UnsupportedUpdate, match="stores nothing but what it loaded: there is no kernel"):
        lower_to_nki(step_of_rule("clone", "bf16", "bf16x2").update)


def test_every_operation_of_the_form_is_known() -> None:
    """What explicit-rounding form may contain, each on two tiles or one."""
    unary = {operator.neg, torch.logical_not, torch.abs, torch.sign, torch.exp, torch.log}
    for f in OPERATIONS:
        if f in unary:
            lower_to_nki(update_of(["x"], lambda x, f=f: [f(x) + 1.0]), components={"x": "fp32"})
        elif getattr(f, "__module__", "") in ("_operator", "torch") and f is not torch.where:
            two = update_of(["x", "y"], lambda x, y, f=f: [f(x, y) + 1.0])
            lower_to_nki(two, components={"x": "fp32", "y": "fp32"})


def with_operation(target: object) -> Update:
    update = update_of(["x"], lambda x: [torch.exp(x)])
    for node in update.graph.graph.nodes:
        if node.target is torch.exp:
            node.target = target
    return update.with_body(update.graph.graph)


def test_an_operation_without_an_instruction_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedUpdate, match=r"uses erf \(node exp\), for which no NKI instruction is known; use"):
        lower_to_nki(with_operation(torch.erf), components={"x": "fp32"})


def test_an_update_that_does_not_fit_is_refused() -> None:
    names = [f"x{i}" for i in range(40)]
    wide = update_of(names, lambda *xs: [x * 2.0 for x in xs])
    with pytest.raises(OutOfMemory, match=r"40 instructions does not fit into 192 KiB a partition of trn1; use"):
        lower_to_nki(wide, components=dict.fromkeys(names, "fp32"))


@pytest.mark.parametrize(
    ("target", "dialect", "message"),
    [
        ("trn9", "nki", "unknown target 'trn9'; choose one of trn1, trn2, trn3"),
        ("trn1", "triton", "unknown dialect 'triton'; choose one of nki, beta1"),
        ("trn2", "beta1", "dialect 'beta1' is for trn1"),
    ],
)
def test_there_is_no_such_target_or_dialect(target: str, dialect: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lower_to_nki(update_of(["x"], lambda x: [x * 2.0]), target, dialect, components={"x": "fp32"})
