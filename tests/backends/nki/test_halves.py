"""Numbers as two halves of bits on the stand-in: the bits that the reference has, with every upper half there is."""

from __future__ import annotations

import pytest
import torch
from exact import on_reference, update_of
from integer_words import all_high_words
from nki_runs import differing, run, search_less, step_of, wild
from torch import Tensor
from torch_cases import CASES

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.eft import Value, beyond, bf16, limit_places, places, round_to
from collage_neuron.passes.backends.nki import halves
from collage_neuron.passes.backends.nki.ir import HALVES, Column
from collage_neuron.passes.backends.nki.lint import lint
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.ir.update import Update

pytestmark = pytest.mark.usefixtures("rejecting")

MACHINES = [("trn1", "nki"), ("trn1", "beta1"), ("trn2", "nki"), ("trn3", "nki")]
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "int8", torch.int16: "int16"}


@pytest.fixture(autouse=True)
def _short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    search_less(monkeypatch)


def kernel_of(update: Update, inputs: dict[str, Tensor], target: str, dialect: str) -> Kernel:
    kernel = lower_to_nki(update, target, dialect, components={k: TYPES[x.dtype] for k, x in inputs.items()})
    assert lint(kernel.source, "kernel.py", dialect) == []
    return kernel


def expected(update: Update, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(update.outputs, on_reference(update, list(inputs.values())), strict=True))


def numbers() -> Tensor:
    """fp32 numbers of every sign, exponent and upper mantissa, with lower halves next to where something changes."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    low = (0, 1, 0x7FFF, 0x8000, 0x8001, 0x80FF, 0x8100, 0x8101, 0xFFFF)
    x = torch.cat([upper | n for n in low]).view(torch.float32)
    return x[x.isfinite()]


DECODE = {
    torch.int16: update_of(["hi", "lo"], lambda hi, lo: [beyond(hi, lo)]),
    torch.int8: update_of(["hi", "lo"], lambda hi, lo: [beyond(hi, lo * 256.0)]),
}


@pytest.mark.parametrize(("target", "dialect"), MACHINES)
@pytest.mark.parametrize("dtype", DECODE, ids=str)
def test_every_upper_half_with_places_of_each_kind(dtype: torch.dtype, target: str, dialect: str) -> None:
    """All 65 536 bf16 numbers, infinities and NaNs too: nothing but halves of bits moves."""
    low = torch.iinfo(dtype).min
    lo = torch.tensor([low, low + 1, -1, 0, 1, -low - 1]).to(dtype)
    hi = all_high_words()
    inputs = {"hi": hi.repeat(len(lo)), "lo": lo.repeat_interleave(len(hi))}
    sure = (inputs["hi"] != 0) | (inputs["lo"] >= 0)  # nothing is below zero
    inputs = {k: x[sure] for k, x in inputs.items()}
    update = DECODE[dtype]
    kernel = kernel_of(update, inputs, target, dialect)
    (found,), (right,) = (r.values() for r in (run(kernel, inputs, torch.zeros(0)).results, expected(update, inputs)))
    assert torch.equal(found.view(torch.int32), right.view(torch.int32))


def test_every_int8_below_and_above_every_upper_half() -> None:
    hi, lo = all_high_words(), torch.arange(-128, 128).to(torch.int8)
    inputs = {"hi": hi.repeat(256), "lo": lo.repeat_interleave(len(hi))}
    sure = inputs["hi"] != 0
    inputs = {k: x[sure] for k, x in inputs.items()}
    update = DECODE[torch.int8]
    kernel = kernel_of(update, inputs, "trn1", "nki")
    assert not differing(run(kernel, inputs, torch.zeros(0)).results, expected(update, inputs))


def _encode(x: Value) -> list[Value]:
    y = limit_places(x, 32512)
    return [bf16(y), round_to(places(y) * 2.0**-8, "int8"), x * 2.0]


ENCODE = update_of(["x"], _encode, ["bf16", "int8", "fp32"])


@pytest.mark.parametrize(("target", "dialect"), MACHINES)
def test_both_halves_of_a_number_that_is_read_elsewhere_too(target: str, dialect: str) -> None:
    """The number itself must not be limited: its product is that of the old one."""
    x = numbers()
    inputs = {"x": x[(x.abs() < 2.0**127) & ((x == 0) | (x.abs() >= 2.0**-126))]}
    kernel = kernel_of(ENCODE, inputs, target, dialect)
    assert not differing(run(kernel, inputs, torch.zeros(0)).results, expected(ENCODE, inputs))


def test_places_that_something_else_reads_are_copied_first() -> None:
    update = update_of(["x"], lambda x: [torch.abs(places(x)), round_to(places(x), "int16")], ["fp32", "int16"])
    inputs = {"x": numbers()[::5]}
    kernel = kernel_of(update, inputs, "trn1", "nki")
    assert not differing(run(kernel, inputs, torch.zeros(0)).results, expected(update, inputs))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (".view(nl.int16)[:, 0::2]", ".view(nl.int16)[:, 1::2]"),
        ("operand0=-32512.0", "operand0=-32767.0"),
        ("op0=nl.maximum", "op0=nl.minimum"),
        ("scale=2.0**-8", "scale=2.0**-7"),
    ],
)
def test_a_kernel_that_moves_other_bits_is_noticed(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    search_less(monkeypatch, 2000)  # so that the scalar engine computes the low word
    x = numbers()
    inputs = {"x": x[(x.abs() < 2.0**126) & (x.abs() >= 2.0**-120)]}
    kernel = kernel_of(ENCODE, inputs, "trn1", "nki")
    assert old in kernel.source
    found = run(kernel, inputs, torch.zeros(0), source=kernel.source.replace(old, new)).results
    assert differing(found, expected(ENCODE, inputs))


@pytest.mark.parametrize(("old", "new"), [("op0=nl.less,", "op0=nl.less_equal,"), ("operand0=0.0", "operand0=1.0")])
def test_a_kernel_with_another_upper_half_is_noticed(old: str, new: str) -> None:
    inputs = {"hi": all_high_words()[1:30000:7], "lo": torch.arange(4286).remainder(256).sub(128).to(torch.int8)}
    kernel = kernel_of(DECODE[torch.int8], inputs, "trn1", "nki")
    assert old in kernel.source
    found = run(kernel, inputs, torch.zeros(0), source=kernel.source.replace(old, new)).results
    assert differing(found, expected(DECODE[torch.int8], inputs))


def test_what_the_halves_cost() -> None:
    """One instruction of VectorE each way: two cycles to read, one to write."""
    read = lower_to_nki(DECODE[torch.int8], components={"hi": "bf16", "lo": "int8"})
    upper = [i for v, i in read.plan.steps if v.op == "upper"]
    assert [(i.kind, i.engine) for i in upper] == [("scalar_tensor_tensor", "vector")]
    written = lower_to_nki(ENCODE, components={"x": "fp32"})
    limits = [i for v, i in written.plan.steps if v.op == "limit_places"]
    assert [(i.kind, i.engine) for i in limits] == [("tensor_scalar", "vector")]
    assert not {v for v, _ in written.plan.steps if v.op in HALVES} & written.plan.in_psum


def test_the_bits_of_a_number_of_the_step_are_not_taken_apart() -> None:
    with pytest.raises(UnsupportedUpdate, match=r"takes the bits of a number of the step apart \(node n\), which no"):
        halves.OPERATIONS[places](lambda *_: None, [Column(entry=0)], "n")  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["split444", "split433"])
@pytest.mark.parametrize("case", ["adamw", "sgd_momentum"])
def test_a_step_has_the_bits_of_the_reference(case: str, strategy: str) -> None:
    """Also where a high word is 0 and the low one is not: a weight that something else has set to 0."""
    s = wild(step_of(CASES[case], strategy, "fp32"), n=1300)
    for key, x in s.components.items():
        if key + "_lo" in s.components:
            x[:4] = torch.tensor([0.0, -0.0, 0.0, -0.0])
            s.components[key + "_lo"][:4] = torch.tensor([-100, -100, 100, 100])
    for target, dialect in MACHINES:
        kernel = lower_to_nki(s.update, target, dialect)
        assert lint(kernel.source, "kernel.py", dialect) == []
        assert not differing(run(kernel, s.components, s.vector).results, s.by_reciprocals().expected())
