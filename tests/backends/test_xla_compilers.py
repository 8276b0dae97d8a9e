"""XLA for a compiler without reduce-precision, variadic reductions and exact sums of integers: the same bits.

Level of evidence: XLA on the CPU, which is given the form that neuronx-cc would be given; and a device in whose place
XLA computes sums, maxima and comparisons of integers in fp32, as the vector engine of a trn1 is documented to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from running import registered
from torch import Tensor
from updates import random_inputs, whole_update

import collage_neuron
from collage_neuron.numerics.eft import STORAGE_TYPES
from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.strategies import STRATEGIES, StrategyLike, possible
from collage_neuron.passes.backends.nki import target
from collage_neuron.passes.backends.xla.backend import Xla
from collage_neuron.passes.backends.xla.compilers import ForNeuron
from collage_neuron.passes.backends.xla.hlo import Computation, Instruction, Shape, TupleShape
from collage_neuron.passes.backends.xla.lower import XlaUpdate, user_computation
from collage_neuron.passes.backends.xla.nodes import reduced
from collage_neuron.passes.ir.update import Update
from collage_neuron.runtime.rounding_probe import failures

torch_xla = pytest.importorskip("torch_xla")

Body = Callable[..., Sequence[Instruction]]


class PlainInFp32(Computation):
    """On a device that converts integers to fp32 for what its engines do not do on bits."""

    def add(
        self, opcode: str, shape: Shape | TupleShape, operands: Sequence[Instruction] = (), attributes: bytes = b""
    ) -> Instruction:
        first = operands[0].shape if operands else shape
        computes = opcode in ("add", "subtract", "maximum", "minimum", "multiply", "compare", "reduce")
        if not computes or not isinstance(first, Shape) or first.element != "s32":
            return super().add(opcode, shape, operands, attributes)
        numbers = [super(PlainInFp32, self).add("convert", Shape("f32", x.array.dims), [x]) for x in operands]
        if opcode == "compare":
            return super().add(opcode, shape, numbers, attributes)
        assert isinstance(shape, Shape)
        result = super().add(opcode, Shape("f32", shape.dims), numbers, attributes)
        return super().add("convert", shape, [result])

    def _combiner(self, opcode: str, elements: Sequence[str]) -> int:
        return super()._combiner(opcode, ["f32" for _ in elements])


class InFp32(ForNeuron, PlainInFp32):
    """The form for neuronx-cc, there."""


def run(inputs: Sequence[Tensor], device: torch.device, hlo: Computation, body: Body) -> list[Tensor]:
    """What `body` makes of fp32 and int32 tensors, on XLA."""
    elements = {torch.float32: "f32", torch.int32: "s32"}
    parameters = [hlo.parameter(Shape(elements[x.dtype], tuple(x.shape))) for x in inputs]
    results = user_computation(hlo.module(body(hlo, *parameters)))([x.to(device) for x in inputs], 0)
    torch_xla.sync()
    return [r.cpu() for r in results]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def forms() -> list[Computation]:
    return [Computation("plain"), ForNeuron("for_neuron"), InFp32("in_fp32")]


def same_in_all(inputs: Sequence[Tensor], device: torch.device, body: Body) -> bool:
    plain, *others = (run(inputs, device, form, body) for form in forms())
    return all(torch.equal(bits(x), bits(y)) for other in others for x, y in zip(plain, other, strict=True))


LOWER = torch.tensor(
    [0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFF, *range(0xFFF, 0x8000, 0x1000), *range(0x1000, 0x8000, 0x1000)]
)


def all_upper_halves() -> Tensor:
    """fp32 numbers with every upper half, and lower halves around ties: NaN, infinities and subnormals among them."""
    numbers = ((torch.arange(1 << 16) << 16)[:, None] | LOWER).flatten()
    return torch.where(numbers < 1 << 31, numbers, numbers - (1 << 32)).int().view(torch.float32)


def random_integers(*shape: int, below: int = 1 << 31, least: int = -(1 << 31)) -> Tensor:
    return torch.randint(least, below, shape, generator=torch.Generator().manual_seed(0)).int()


# Instruction by instruction ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, s in STORAGE_TYPES.items() if s.precision])
def test_every_rounding_of_every_kind_of_number(xla: torch.device, name: str) -> None:
    precision = STORAGE_TYPES[name].precision
    assert precision is not None
    assert same_in_all([all_upper_halves()], xla, lambda hlo, x: [reduced(hlo, x, *precision)])


def test_whole_numbers(xla: torch.device) -> None:
    x = torch.cat(
        [all_upper_halves(), torch.arange(-70000, 70000).float() / 2, torch.tensor([0.49999997, -0.49999997])]
    )
    assert same_in_all([x], xla, lambda hlo, x: [hlo.round_nearest_even(x)])


def test_sums_modulo_2_to_the_32(xla: torch.device) -> None:
    x, y = random_integers(2, 1 << 16)
    assert same_in_all([x, y], xla, lambda hlo, x, y: [hlo.wrapping_sum(x, y)])


def test_the_largest_of_blocks(xla: torch.device) -> None:
    x = random_integers(1000, 128, least=0)
    x[::2] &= ~0xFF00  # upper halves that are alike
    x[:500] |= 0x7F000000
    assert same_in_all([x], xla, lambda hlo, x: [hlo.largest(x)])


def test_counts_and_sums(xla: torch.device) -> None:
    """As `measured` makes them, of more than fp32 can count; the order of fp32 additions is each form's own."""
    counts, terms = random_integers(1 << 12, below=1 << 16, least=0), random_integers(1 << 12, below=9, least=0).float()
    assert counts.sum() > 1 << 24
    for form in forms():
        found = run([counts, terms], xla, form, lambda hlo, n, x: hlo.sums([n, x]))
        assert [x.item() for x in found] == [counts.sum().item(), terms.sum().item()]


# Updates -------------------------------------------------------------------------------------------------------------

CODED: list[StrategyLike] = [{"param": "bf16+int16", "*": name} for name in ("i16q4", "u16q8")]
"""Those with formats that no named strategy has."""
WHOLE: list[tuple[str, StrategyLike, str]] = [("adamw", s, "fp32") for s in [*STRATEGIES, *CODED]]
WHOLE += [("adamw", s, "bf16") for s in STRATEGIES if possible(s, "bf16")]
WHOLE += [(name, s, "fp32") for name in ("amsgrad", "sgd", "nesterov") for s in ("full", "split433")]


def special(inputs: list[Tensor]) -> list[Tensor]:
    """Among the numbers of each component also zeros, infinities, NaN, the largest, and subnormal ones."""
    rare = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.3e38, -3.4e38, 1e-39, -1e-40, 1e-45, 2.0**-126])
    found = [x.clone() for x in inputs]
    for i, x in enumerate(found):
        if x.is_floating_point():
            x[i::97] = rare.to(x.dtype).repeat(len(x))[: len(x[i::97])]
    return found


def results(update: Update, inputs: list[Tensor], scalars: Tensor, form: type[Computation]) -> list[Tensor]:
    device = torch_xla.device()
    found = XlaUpdate(update, form)([x.to(device) for x in inputs], scalars.to(device))
    torch_xla.sync()
    return [x.cpu() for x in found]


def differing(name: str, strategy: StrategyLike, arithmetic: str, form: type[Computation] = ForNeuron) -> list[str]:
    """The components with other bits than the plain form has."""
    update, scalars = whole_update(name, strategy, arithmetic)
    inputs = special(random_inputs(update))
    wanted = results(update, inputs, scalars, Computation)
    found = results(update, inputs, scalars, form)
    return [k for k, x, y in zip(update.outputs, found, wanted, strict=True) if not torch.equal(bits(x), bits(y))]


@pytest.mark.sampled(of=6, each=False)  # roundings are compared one by one above, operators are listed below
@pytest.mark.parametrize(("name", "strategy", "arithmetic"), WHOLE)
def test_whole_updates_of_every_strategy(xla: torch.device, name: str, strategy: StrategyLike, arithmetic: str) -> None:
    assert differing(name, strategy, arithmetic) == []


@pytest.mark.sampled(of=2, each=False)  # the same words as above, in another form of the same sums
@pytest.mark.parametrize("strategy", ["split433", "split311", "stochastic_states", *CODED[1:3]])
def test_whole_updates_on_a_device_that_adds_integers_in_fp32(xla: torch.device, strategy: StrategyLike) -> None:
    assert differing("adamw", strategy, "fp32", InFp32) == []


def test_the_probe_finds_a_device_that_adds_integers_in_fp32_and_not_in_halves(xla: torch.device) -> None:
    assert failures(Xla(InFp32), xla) == []
    assert failures(Xla(PlainInFp32), xla) == ["words of integers"]


# What is in them -----------------------------------------------------------------------------------------------------

LISTED = {
    "abs", "add", "bitcast-convert", "broadcast", "clamp", "compare", "concatenate", "constant", "convert", "divide",
    "floor", "get-tuple-element", "iota", "and", "maximum", "minimum", "multiply", "negate", "not", "pad", "parameter",
    "reduce", "reshape", "select", "shift-right-logical", "sign", "slice", "sqrt", "subtract", "tuple",
}  # fmt: skip
"""neuronx-cc's "Supported Operators" (release notes of the compiler, SDK 2.32), as opcodes of HLO."""

NOT_LISTED = {
    "or": "bits of integers, and of masks: NKI's bitwise_or on the vector engine",
    "xor": "bits of integers: NKI's bitwise_xor",
    "shift-left": "bits of integers: NKI's left_shift",
    "call": "what torch_xla makes of every user computation",
}
"""Which the list does not have, and no page says are not supported."""

INSTRUCTION = re.compile(r"^ *(?:ROOT )?%?\S+ = (\([^()]*\)|\S+) ([a-z-]+)\(", re.MULTILINE)


@pytest.fixture
def for_neuron() -> Iterator[str]:
    """The name of a backend that writes for neuronx-cc."""
    with registered(Xla(ForNeuron, "xla for neuronx-cc")) as backend:
        yield backend.name


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
}


def step_text(
    backend: str, device: torch.device, name: str, monitored: bool = False, **settings: Any
) -> list[tuple[str, str]]:
    """Shapes and opcodes of the HLO of one step, which is traced and not run."""
    p = torch.nn.Parameter(torch.randn(3, 130).bfloat16().to(device))
    optimizer = collage_neuron.compile(OPTIMIZERS[name]([p]), backend=backend, validate="off", **settings)
    p.grad = torch.zeros_like(p)
    if monitored:
        collage_neuron.monitor(optimizer, every=1)
    optimizer.step()
    tensors = [x for x in (p, *optimizer.state[p].values()) if x.device.type == "xla"]
    text: str = torch_xla._XLAC._get_xla_tensors_hlo(tensors)
    return INSTRUCTION.findall(text)


STEPS: list[tuple[str, dict[str, Any]]] = [("AdamW", {"strategy": s}) for s in STRATEGIES]
STEPS += [("AdamW", {"strategy": s}) for s in CODED]
STEPS += [(name, {"strategy": "plus"}) for name in OPTIMIZERS if name != "AdamW"]
STEPS += [("AdamW", {"strategy": "full", "arithmetic": "bf16"}), ("AdamW", {"monitored": True})]


@pytest.mark.sampled(of=2, each=False)  # strategies differ in formats, which the tests above have
@pytest.mark.filterwarnings("ignore::collage_neuron.ImpreciseState")
@pytest.mark.parametrize(("name", "settings"), STEPS)
def test_a_step_has_listed_operators(xla: torch.device, for_neuron: str, name: str, settings: dict[str, Any]) -> None:
    found = step_text(for_neuron, xla, name, **settings)
    opcodes = {opcode for _, opcode in found}
    assert opcodes <= LISTED | NOT_LISTED.keys()
    assert "bitcast-convert" in opcodes
    assert [shape for shape, opcode in found if opcode == "reduce" and shape.startswith("(")] == []
    assert [shape for shape, _ in found if re.search(r"[suf]64\[", shape)] == []


# Which form is taken -------------------------------------------------------------------------------------------------


def test_the_kind_of_the_devices_chooses(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Xla().form is Computation
    monkeypatch.setattr("torch_xla.runtime.device_type", lambda: "NEURON")
    assert Xla().form is ForNeuron
    assert Xla(Computation).form is Computation


def test_advice_to_take_xla_says_that_it_is_unproven(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "no kernel does that; use backend='xla'"
    assert target.advised(text, xla) == text
    monkeypatch.setattr(target, "generation", lambda device: "gen2")
    assert "use backend='xla' (rounds by bits for neuronx-cc, unproven on a device" in target.advised(text, xla)


# Outside of steps ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["split433", "split311", "fp32"])
def test_exact_values_are_decoded_on_the_host(
    xla: torch.device, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operations of torch_xla for it are sums of integers, or comparisons with a rounding, on the device."""
    p = torch.nn.Parameter(torch.randn(3, 130).to(xla))
    wanted = p.detach().cpu()
    model = torch.nn.ParameterList([p])
    _, optimizer = collage_neuron.compile(model, torch.optim.AdamW([p]), strategy=strategy)
    devices = set[str]()
    decoder = Format.decoder

    def spied(fmt: Format, name: str) -> Callable[[Sequence[Any]], Any]:
        def decode(words: Sequence[Any]) -> Any:
            devices.update(word.device.type for word in words)
            return decoder(fmt, name)(words)

        return decode

    monkeypatch.setattr(Format, "decoder", spied)
    found = collage_neuron.exact_value(optimizer, p)
    assert devices == {"cpu"}
    assert found.device.type == "xla"
    assert (found.cpu() - wanted).abs().max() <= wanted.abs().max() * 2.0 ** (-15 if strategy == "split311" else -22)
