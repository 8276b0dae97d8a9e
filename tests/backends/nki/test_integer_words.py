"""Integer words and powers of two on the stand-in: the bits that the reference has, in every word there is."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bounds
import nki_backend
import nki_standin
import pytest
import torch
from exact import edited, update_of, without_rounding
from integer_words import (
    BF16_INT8,
    ERROR,
    all_high_words,
    all_low_words,
    decoder,
    encoder,
    exact_value,
    exact_words,
    grid,
    is_normal,
)
from models import differences, parameters, set_gradients, snapshot
from nki_runs import INFINITY, differing, run, search_less, step_of, wild
from torch import Tensor
from torch.optim import AdamW
from torch_cases import CASES

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.eft import inverse_power_of_two, power_of_two, round_to
from collage_neuron.numerics.formats import FORMATS
from collage_neuron.numerics.storage import storage_named
from collage_neuron.passes.backends.nki import custom_op, source_cache
from collage_neuron.passes.backends.nki.hardware import TARGETS
from collage_neuron.passes.backends.nki.ir import Column, Value
from collage_neuron.passes.backends.nki.legalize import _rounded_number, program_of
from collage_neuron.passes.backends.nki.lint import lint
from collage_neuron.passes.backends.nki.lower import lower_to_nki
from collage_neuron.passes.backends.nki.select import choices
from collage_neuron.passes.ir.update import Update

pytestmark = pytest.mark.usefixtures("rejecting")

NAME = BF16_INT8.name

MACHINES = [("trn1", "nki"), ("trn1", "beta1"), ("trn2", "nki"), ("trn3", "nki")]


@pytest.fixture(autouse=True)
def _short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    search_less(monkeypatch)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, NAME, BF16_INT8)
    monkeypatch.setitem(bounds.STORED, NAME, ERROR)


def on_nki(update: Update, inputs: dict[str, Tensor], target: str = "trn1", dialect: str = "nki") -> list[Tensor]:
    """The results of a kernel that is also one that the language takes."""
    types = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "int8", torch.int16: "int16"}
    kernel = lower_to_nki(update, target, dialect, components={k: types[x.dtype] for k, x in inputs.items()})
    assert lint(kernel.source, "kernel.py", dialect) == []
    found = run(kernel, inputs, torch.zeros(0)).results
    return [found[key] for key in update.outputs]


def patterns() -> Tensor:
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    return torch.cat([upper | lower for lower in (0, 1, 0x7FFF, 0x8000, 0xFFFF)]).view(torch.float32)


@pytest.mark.parametrize(("target", "dialect"), MACHINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_powers_of_two_are_masks_on_bits(dtype: torch.dtype, target: str, dialect: str) -> None:
    x = patterns() if dtype == torch.float32 else all_high_words()
    update = update_of(["x"], lambda x: [power_of_two(x), inverse_power_of_two(x)])
    found = on_nki(update, {"x": x}, target, dialect)
    assert torch.equal(found[0].float(), power_of_two(x.float()))
    assert torch.equal(found[1].float(), inverse_power_of_two(x.float()))


def test_powers_of_two_of_what_is_no_float_tile_read_it_as_one() -> None:
    n = torch.arange(-128, 128).to(torch.int8)
    (found,) = on_nki(update_of(["n"], lambda n: [power_of_two(n)]), {"n": n})
    assert torch.equal(found, power_of_two(n.float()))


@pytest.mark.parametrize(("target", "dialect"), MACHINES)
@pytest.mark.parametrize("name", ["int8", "int16"])
def test_rounding_to_an_integer_is_the_type_of_a_tile(name: str, target: str, dialect: str) -> None:
    low, high = storage_named(name).limits
    x = torch.cat([torch.arange(2 * low - 6, 2 * high + 6) / 2.0, torch.tensor([torch.inf, -torch.inf, -0.0, 3e38])])
    update = update_of(["x"], lambda x: [round_to(x, name), round_to(x, name) * 0.5], [name, "fp32"])
    stored, half = on_nki(update, {"x": x}, target, dialect)
    expected = x.double().round().clamp(low, high)
    assert stored.dtype == storage_named(name).dtype
    assert torch.equal(stored.double(), expected)
    assert torch.equal(half.double(), expected / 2)


def test_an_integer_that_is_rounded_from_a_rounded_number_is_rounded_twice() -> None:
    """bf16(x) first: nothing may compute the sum again and round that at once."""
    x, y = torch.arange(4096) / 64.0, torch.full((4096,), 2.0**-6)
    update = update_of(["x", "y"], lambda x, y: [round_to(round_to(x + y, "bf16"), "int8")], ["int8"])
    (found,) = on_nki(update, {"x": x, "y": y})
    assert torch.equal(found.float(), round_to(round_to(x + y, "bf16"), "int8"))
    assert not torch.equal(found.float(), round_to(x + y, "int8"))
    for value, ways in choices(program_of(update, {"x": "fp32", "y": "fp32"}), TARGETS["trn1"]).items():
        if value.dtype == "int8":
            assert {x.dtype for way in ways for x in way.reads()} == {"bfloat16"}


def test_a_choice_between_a_rounded_and_an_unrounded_number_keeps_the_rounding() -> None:
    update = update_of(["x", "y"], lambda x, y: [torch.where(x > y, round_to(x + y, "bf16"), x * y)])
    for value, ways in choices(program_of(update, {"x": "fp32", "y": "fp32"}), TARGETS["trn1"]).items():
        sums = [way for way in ways if way["op"] == "add" or way["op0"] == "add"]
        assert not sums or value.dtype == "bfloat16"


# --- the format ------------------------------------------------------------------------------------------------------


def test_every_pair_of_words_is_read_exactly() -> None:
    """All 65 536 high words with all 256 low ones."""
    hi = all_high_words()
    words = {"hi": hi.repeat(256), "lo": torch.tensor(all_low_words(), dtype=torch.int8).repeat_interleave(len(hi))}
    (found,) = on_nki(decoder(), words)
    expected = exact_value(words["hi"], words["lo"]).float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize(("target", "dialect"), MACHINES)
def test_every_number_of_the_grid_becomes_the_words_of_the_definition(target: str, dialect: str) -> None:
    x = grid()
    x = x[is_normal(x)]
    hi, lo = on_nki(encoder(), {"x": x}, target, dialect)
    high, low = exact_words(x)
    assert torch.equal(hi.double().nan_to_num(), high.nan_to_num())
    assert torch.equal(lo.double(), low)
    again = on_nki(decoder(), {"hi": hi, "lo": lo}, target, dialect)[0]
    assert torch.equal(again.nan_to_num(), BF16_INT8.decode([hi, lo]).nan_to_num())


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("case", ["adamw", "sgd_momentum"])
def test_a_step_has_the_bits_of_the_reference(case: str) -> None:
    s = wild(step_of(CASES[case], {"*": NAME}, "fp32"))
    for target, dialect in MACHINES:
        kernel = lower_to_nki(s.update, target, dialect)
        assert lint(kernel.source, "kernel.py", dialect) == []
        assert not differing(run(kernel, s.components, s.vector).results, s.by_reciprocals().expected())


# --- what the comparisons would notice -------------------------------------------------------------------------------


EXCHANGES: dict[Any, Any] = {
    power_of_two: inverse_power_of_two, inverse_power_of_two: power_of_two, operator.ge: operator.gt,
    operator.le: operator.lt, torch.logical_and: torch.logical_or,
}  # fmt: skip


def _exchanged(node: Any) -> None:
    node.target = EXCHANGES[node.target]


def mutations(update: Update) -> Iterator[tuple[str, Update]]:
    yield from without_rounding(update)
    for i, node in enumerate(update.graph.graph.nodes):
        if node.target in EXCHANGES:
            yield f"{node.name} exchanged", edited(update, i, _exchanged)
        if any(isinstance(a, float) and 0 < a < 2.0**127 for a in node.args):  # a literal of a kernel is finite
            yield f"{node.name} doubled", edited(update, i, _doubled)


def _doubled(node: Any) -> None:
    node.args = tuple(2 * a if isinstance(a, float) else a for a in node.args)


def _notices(mutated: Update, inputs: dict[str, Tensor], expected: list[Tensor]) -> bool:
    try:
        found = on_nki(mutated, inputs)
    except nki_standin.StandinError:
        return True
    return any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True))


STORED = "the tile that is stored rounds it, being of that type"


def test_every_mutation_of_encoding_is_noticed() -> None:
    x = grid()
    x = x[is_normal(x)]
    expected = on_nki(encoder(), {"x": x})
    unnoticed = [name for name, m in mutations(encoder()) if not _notices(m, {"x": x}, expected)]
    assert unnoticed == ["round_to_1"], STORED


def test_every_mutation_of_decoding_is_noticed() -> None:
    hi = all_high_words().repeat(3)
    words = {"hi": hi, "lo": torch.tensor([-128, 1, 127], dtype=torch.int8).repeat_interleave(1 << 16)}
    expected = on_nki(decoder(), words)
    assert [name for name, m in mutations(decoder()) if not _notices(m, words, expected)] == []


@pytest.mark.parametrize("other", ["0x7F00", "0xFF80", "0x3F80"])
def test_a_kernel_with_another_mask_is_noticed(other: str) -> None:
    x = grid()
    x = x[is_normal(x)]
    kernel = lower_to_nki(encoder(), components={"x": "fp32"})
    expected = dict(zip(encoder().outputs, on_nki(encoder(), {"x": x}), strict=True))
    for place in ("operand0", "operand1"):
        old, new = f"{place}=0x7F80", f"{place}={other}"
        assert old in kernel.source
        try:
            found = run(kernel, {"x": x}, torch.zeros(0), source=kernel.source.replace(old, new)).results
        except nki_standin.StandinError:
            continue  # a NaN reached the integer
        assert differing(found, expected)


def test_a_number_of_the_step_is_not_rounded_to_an_integer() -> None:
    update = update_of(["x"], lambda x: [round_to(x, "int8")], ["int8"])
    assert isinstance(next(iter(program_of(update, {"x": "fp32"}).stores.values())), Value)
    assert _rounded_number(Column(entry=0), "float32", "n") == Column(entry=0)
    with pytest.raises(
        UnsupportedUpdate, match=r"rounds a number of the step to int8 \(node n\), which no kernel does"
    ):
        _rounded_number(Column(entry=0), "int8", "n")


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(source_cache.FOLDER, str(tmp_path / "kernels"))
    cached = custom_op.function
    if nki_backend.backend() == "real":
        yield
    else:
        with nki_standin.install("nki", "trn1", INFINITY):
            yield
    cached.cache_clear()  # a kernel belongs to the NKI it was loaded under


@pytest.mark.usefixtures("registered", "kernels")
def test_a_run_on_kernels_goes_on_bit_for_bit() -> None:
    """Compiled, stepped, saved, loaded and stepped."""
    runs = []
    for seed in (0, 1):
        params = parameters(seed, ((16, 8), (5,), (0, 3)))
        optimizer = collage_neuron.compile(
            AdamW(params, lr=1e-3, weight_decay=0.1), strategy={"*": NAME}, backend="nki"
        )
        runs.append((params, optimizer))
    _go_on(*runs[0], range(2))
    saved = copy.deepcopy(runs[0][1].state_dict())
    with torch.no_grad():
        for q, p in zip(runs[1][0], runs[0][0], strict=True):
            q.copy_(p)
    runs[1][1].load_state_dict(saved)
    assert runs[1][1].state[runs[1][0][0]]["exp_avg_lo"].dtype == torch.int8
    assert differences(_go_on(*runs[1], range(2, 4)), _go_on(*runs[0], range(2, 4))) == []


def _go_on(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> dict[str, Any]:
    for i in steps:
        set_gradients(params, i)
        optimizer.step()
    return snapshot(optimizer)


def test_what_a_word_costs() -> None:
    """A byte of the DMA, one mask on bits, and nothing on GpSimd, which alone adds integers."""
    kernel = lower_to_nki(decoder(), components={"hi": "bf16", "lo": "int8"})
    assert (kernel.cost.read, kernel.cost.written) == (2 + 1, 4)
    assert sum(i.bits != "" for _, i in kernel.plan.steps) == 1
    assert not any(i.engine == "gpsimd" for _, i in kernel.plan.steps)
