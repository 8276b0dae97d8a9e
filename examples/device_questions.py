"""What the Neuron documentation leaves open, as questions that a device answers: instructions, inputs, what to see.

Each question says in one line what was found, and gives the numbers. It compares with IEEE arithmetic in NumPy's or
torch's fp32 and fp64 on the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from device_kernels import Instruction
from torch import Tensor

Answer = tuple[str, dict[str, Any]]
"""What was found, in words and in numbers."""

Ask = Callable[[Instruction, Tensor, Tensor, Tensor], Tensor]
"""Runs a kernel of one instruction on x, y and s."""

P = 128
ONES = torch.ones(P, 1)

CASTS = {
    "vector": Instruction("tensor_copy", "src=a, engine=@vector", "bfloat16"),
    "gpsimd": Instruction("tensor_copy", "src=a, engine=@gpsimd", "bfloat16"),
    "scalar": Instruction("activation", "op=nl.copy, data=a", "bfloat16"),
    "dma": Instruction("dma_copy", "src=x", "bfloat16"),
}
"""Ways from fp32 to bf16."""

LOWS = (0x0000, 0x0001, 0x4000, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF)
"""Low halves of an fp32: what a cast to bf16 rounds."""


@dataclass(frozen=True)
class Question:
    """A question by name, and how to answer it."""

    name: str
    text: str
    answer: Callable[[Ask], Answer]


def bits(x: Tensor) -> Tensor:
    """The bits of fp32 or bf16 numbers, as non-negative int64."""
    wide = x.dtype == torch.float32
    return x.contiguous().view(torch.int32 if wide else torch.int16).long() & (0xFFFFFFFF if wide else 0xFFFF)


def from_bits(x: Tensor) -> Tensor:
    """fp32 numbers from their bits."""
    return torch.from_numpy(x.numpy().astype(np.uint32).view(np.float32))


def to_cast() -> Tensor:
    """fp32 [128, 64]: random bf16 numbers as high halves, each case of rounding as low half."""
    g = torch.Generator().manual_seed(0)
    highs = torch.randint(0x3000, 0x4F00, (P, 8), generator=g) | torch.randint(0, 2, (P, 8), generator=g) << 15
    return from_bits((highs[..., None] << 16 | torch.tensor(LOWS)).flatten(1))


def rounding_of(x: Tensor, y: Tensor) -> Answer:
    """How bf16 `y` came from normal fp32 `x`."""
    down, low, got = bits(x) >> 16, bits(x) & 0xFFFF, bits(y)
    up = down + (low > 0)  # away from zero
    ways = {
        "nearest, ties to even": torch.where((low > 0x8000) | ((low == 0x8000) & (down % 2 == 1)), up, down),
        "nearest, ties away from zero": torch.where(low >= 0x8000, up, down),
        "toward zero": down,
    }
    found = [name for name, expected in ways.items() if torch.equal(got, expected)]
    numbers = {f"rounded away, low half {v:#06x}": ((got == up) & (low == v)).sum().item() for v in LOWS}
    numbers["of"] = (low == 0).sum().item()
    if found:
        return found[0], numbers
    off = ((got != down) & (got != up)).sum().item()
    return ("to either neighbour: stochastic?" if not off else f"wrong: {off} results are no neighbour"), numbers


def cast_question(engine: str) -> Question:
    """How an engine rounds fp32 to bf16."""

    def answer(ask: Ask) -> Answer:
        x = to_cast()
        return rounding_of(x, ask(CASTS[engine], x, x, ONES))

    return Question(f"rounding_{engine}", f"How does the {engine} engine round fp32 to bf16?", answer)


def kept(x: Tensor, expected: Tensor) -> str:
    """What became of subnormal numbers."""
    if torch.equal(bits(x), bits(expected)):
        return "kept"
    return "flushed to zero" if not x.any() else "neither kept nor flushed"


def subnormal_cast(engine: str) -> Question:
    """Whether a cast keeps subnormal numbers."""

    def answer(ask: Ask) -> Answer:
        x = from_bits(torch.arange(1, 0x80).expand(P, -1) << 16)  # subnormal in both formats
        return kept(ask(CASTS[engine], x, x, ONES).float(), x), {}

    return Question(f"subnormals_cast_{engine}", f"Does a cast to bf16 on the {engine} engine keep subnormals?", answer)


PRODUCTS = {
    "vector": Instruction("tensor_tensor", "data1=a, data2=b, op=nl.multiply, engine=@vector"),
    "gpsimd": Instruction("tensor_tensor", "data1=a, data2=b, op=nl.multiply, engine=@gpsimd"),
    "scalar": Instruction("activation", "op=nl.copy, data=a, scale=c"),
}


def subnormal_arithmetic(engine: str, side: str) -> Question:
    """Whether a product takes (in), or gives (out), subnormal numbers."""

    def answer(ask: Ask) -> Answer:
        small = from_bits(torch.arange(1, 0x80).expand(P, -1) << 16)
        power = torch.tensor(2.0**30)
        x, factor = (small, power) if side == "in" else (small * power, 1 / power)
        result = ask(PRODUCTS[engine], x, factor.expand_as(x).contiguous(), factor.expand(P, 1).contiguous())
        return kept(result, x * factor), {}

    text = f"Does a product on the {engine} engine {'take' if side == 'in' else 'give'} fp32 subnormals?"
    return Question(f"subnormals_{side}_{engine}", text, answer)


def overflow(engine: str) -> Question:
    """What a cast makes of numbers beyond bf16."""

    def answer(ask: Ask) -> Answer:
        x = from_bits(torch.full((P, 2), 0x7F7FFFFF))
        y = ask(CASTS[engine], x, x, ONES).float()
        largest = torch.finfo(torch.bfloat16).max
        words = "infinity" if y.isinf().all() else "the largest bf16" if (y == largest).all() else "something else"
        return words, {"largest fp32 becomes": str(y[0, 0].item())}

    return Question(f"overflow_{engine}", f"What does a cast on the {engine} engine make of fp32 beyond bf16?", answer)


ARITHMETIC: dict[str, tuple[Instruction, Callable[[Tensor, Tensor], Tensor]]] = {
    f"{op}_{engine}": (Instruction("tensor_tensor", f"data1=a, data2=b, op=nl.{op}, engine=@{engine}"), function)
    for op, function in (("add", torch.add), ("subtract", torch.sub), ("multiply", torch.mul))
    for engine in ("vector", "gpsimd")
    if (op, engine) != ("subtract", "gpsimd")
} | {
    f"{op}_scalar": (Instruction("activation", f"op=nl.{op}, data=a"), function)
    for op, function in (("square", lambda x, _: x * x), ("abs", lambda x, _: x.abs()), ("copy", lambda x, _: x))
}


def operands() -> tuple[Tensor, Tensor]:
    """fp32 [128, 1024] twice: all 24 bits in use, exponents near enough to cancel."""
    g = torch.Generator().manual_seed(1)
    return torch.randn(P, 1024, generator=g), torch.randn(P, 1024, generator=g)


def ulps(y: Tensor, exact: Tensor) -> Tensor:
    """How far fp32 `y` is from fp64 `exact`, in fp32 ulps of `exact`: 0.5 at most if correctly rounded."""
    return (y.double() - exact).abs() / torch.exp2(torch.frexp(exact)[1].double() - 24)


def off_by(y: Tensor, exact: Tensor) -> Answer:
    """How accurate a result is."""
    error = ulps(y, exact)
    worst, wrong = error.max().item(), (error > 0.5).double().mean().item()
    numbers = {"largest error in ulp": worst, "mean error in ulp": error.mean().item(), "share not nearest": wrong}
    return (
        "correctly rounded" if wrong == 0 else f"off by up to {worst:.2f} ulp, {wrong:.2%} not the nearest"
    ), numbers


def arithmetic(name: str) -> Question:
    """Whether an fp32 operation is correctly rounded."""

    def answer(ask: Ask) -> Answer:
        instruction, function = ARITHMETIC[name]
        x, y = operands()
        return off_by(ask(instruction, x, y, ONES), function(x.double(), y.double()))

    op, _, engine = name.partition("_")
    return Question(f"fp32_{name}", f"Is fp32 {op} on the {engine} engine correctly rounded?", answer)


def integer_sum(engine: str) -> Question:
    """Whether an engine adds 32-bit integers as such: through fp32 an odd number above 2**24 is lost."""

    def answer(ask: Ask) -> Answer:
        x = torch.arange(2**24 - P * 8, 2**24 + P * 8, dtype=torch.int32).reshape(P, 16)
        y = torch.full_like(x, 2**20 + 1)
        instruction = Instruction("tensor_tensor", f"data1=a, data2=b, op=nl.add, engine=@{engine}", "int32")
        return sums_of(ask(instruction, x, y, ONES), x, y)

    return Question(f"integers_{engine}", f"Does the {engine} engine add 32-bit integers exactly?", answer)


def sums_of(found: Tensor, x: Tensor, y: Tensor) -> Answer:
    """How int32 numbers were added."""
    ways = {"exactly": x + y, "in fp32": (x.float() + y.float()).int()}
    return next((word for word, sums in ways.items() if torch.equal(found, sums)), "in another way"), {}


FUSED = {
    "tensor_scalar": Instruction(
        "tensor_scalar", "data=a, op0=nl.multiply, operand0=c, op1=nl.subtract, operand1=c, engine=@vector"
    ),
    "scalar_tensor_tensor": Instruction(
        "scalar_tensor_tensor", "data=a, op0=nl.multiply, operand0=c, op1=nl.subtract, operand1=b"
    ),
    "activation": Instruction("activation", "op=nl.copy, data=a, scale=c, bias=c"),
}


def fused(name: str) -> Question:
    """Whether an instruction of two operators rounds to fp32 between them."""

    def answer(ask: Ask) -> Answer:
        x, _ = operands()
        s = torch.full((P, 1), 1.2345678)
        product, b = x * s, (x * s).float()
        other = {"tensor_scalar": -s, "scalar_tensor_tensor": -b, "activation": s}[name]
        result = ask(FUSED[name], x, b, s)
        rounded, contracted = product + other, (x.double() * s.double() + other.double()).float()
        if torch.equal(result, rounded):
            return "rounded to fp32 in between", {}
        return ("one rounding, as an FMA" if torch.equal(result, contracted) else "neither"), {}

    return Question(f"fused_{name}", f"Does {name} round to fp32 between its two operators?", answer)


BIASED: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda x: x,
    "relu": lambda x: x,
    "exp": torch.exp,
    "abs": torch.abs,
    "sign": torch.sign,
}
"""Functions of the scalar engine, which are documented to add a bias to their operand."""


def bias(name: str, scaled: bool) -> Question:
    """Whether a function adds its bias: on a trn1 copy did not (aws-neuron-sdk#1296)."""

    def answer(ask: Ask) -> Answer:
        x, large = torch.rand(P, 64, generator=torch.Generator().manual_seed(3)) - float(name == "sign"), ONES * 2
        scale = ", scale=c" if scaled else ""
        result = ask(Instruction("activation", f"op=nl.{name}, data=a{scale}, bias=c"), x, x, large)
        ways = {"added": x * (2 if scaled else 1) + large, "dropped": x * (2 if scaled else 1)}
        near = [word for word, y in ways.items() if torch.allclose(result, BIASED[name](y), rtol=1e-4)]
        return (near[0] if near else "neither added nor dropped"), {"first result": result[0, 0].item()}

    what = f"{name}{' with a scale' if scaled else ''}"
    return Question(f"bias_{name}{'_scaled' if scaled else ''}", f"Does {what} add its bias?", answer)


def scale_and_round(ask: Ask) -> Answer:
    """Whether the scalar engine's scaling and the vector engine's give the same bf16 numbers."""
    x, _ = operands()
    s = torch.full((P, 1), 0.999)
    on_scalar = ask(Instruction("activation", "op=nl.copy, data=a, scale=c", "bfloat16"), x, x, s)
    vector = Instruction("tensor_scalar", "data=a, op0=nl.multiply, operand0=c, engine=@vector", "bfloat16")
    different = (bits(on_scalar) != bits(ask(vector, x, x, s))).sum().item()
    return ("the same bits" if not different else f"{different} of {x.numel()} differ"), {"different": different}


FUNCTIONS: dict[str, tuple[Instruction, Callable[[Tensor], Tensor], tuple[int, int]]] = {
    "sqrt_scalar": (Instruction("activation", "op=nl.sqrt, data=a"), torch.sqrt, (-116, 117)),
    "rsqrt_scalar": (Instruction("activation", "op=nl.rsqrt, data=a"), torch.rsqrt, (-87, 96)),
    "reciprocal_scalar": (Instruction("activation", "op=nl.reciprocal, data=a"), torch.reciprocal, (-42, 41)),
    "reciprocal_vector": (Instruction("reciprocal", "data=a"), torch.reciprocal, (-42, 41)),
    "rsqrt_gpsimd": (
        Instruction("tensor_scalar", "data=a, op0=nl.rsqrt, operand0=0.0, engine=@gpsimd"), torch.rsqrt, (-87, 96),
    ),
    "exp_scalar": (Instruction("activation", "op=nl.exp, data=a"), torch.exp, (-20, 5)),
    "log_scalar": (Instruction("activation", "op=nl.log, data=a"), torch.log, (-64, 63)),
}  # fmt: skip
"""Approximated functions, what they approximate, and the binades of their documented range."""


def function(name: str) -> Question:
    """How accurate an approximated function is within its documented range."""

    def answer(ask: Ask) -> Answer:
        instruction, exact, (low, high) = FUNCTIONS[name]
        g = torch.Generator().manual_seed(2)
        mantissas = 1 + torch.rand(P, 2048, generator=g)
        x = torch.ldexp(mantissas, torch.randint(low, high, mantissas.shape, generator=g))
        return off_by(ask(instruction, x, x, ONES), exact(x.double()))

    what, _, engine = name.partition("_")
    return Question(f"ulp_{name}", f"How accurate is {what} on the {engine} engine?", answer)


def power(ask: Ask) -> Answer:
    """How accurate x ** y is."""
    g = torch.Generator().manual_seed(3)
    x, y = (torch.rand(P, 1024, generator=g) + 0.5 for _ in range(2))
    result = ask(Instruction("tensor_tensor", "data1=a, data2=b, op=nl.power, engine=@gpsimd"), x, y, ONES)
    return off_by(result, x.double() ** y.double())


OUTSIDE = {
    "sqrt_of_0": (Instruction("activation", "op=nl.sqrt, data=a"), 0.0),
    "rsqrt_of_0": (Instruction("activation", "op=nl.rsqrt, data=a"), 0.0),
    "reciprocal_of_0_scalar": (Instruction("activation", "op=nl.reciprocal, data=a"), 0.0),
    "reciprocal_of_0_vector": (Instruction("reciprocal", "data=a"), 0.0),
    "reciprocal_of_2**-43_scalar": (Instruction("activation", "op=nl.reciprocal, data=a"), 2.0**-43),
    "maximum_with_nan": (Instruction("tensor_tensor", "data1=a, data2=b, op=nl.maximum, engine=@vector"), float("nan")),
    "minimum_with_nan": (Instruction("tensor_tensor", "data1=a, data2=b, op=nl.minimum, engine=@vector"), float("nan")),
    "minus_0_added": (Instruction("tensor_tensor", "data1=a, data2=a, op=nl.add, engine=@vector"), -0.0),
    "nan_copied": (Instruction("activation", "op=nl.copy, data=a"), float("nan")),
}


def outside(name: str) -> Question:
    """What an instruction gives where its documentation gives nothing."""

    def answer(ask: Ask) -> Answer:
        instruction, value = OUTSIDE[name]
        result = ask(instruction, torch.full((P, 1), value), ONES, ONES)[0, 0]
        return str(result.item()), {"bits": f"{int(bits(result.reshape(1))):#010x}"}

    return Question(name, f"What is {name.replace('_', ' ')}?", answer)


QUESTIONS: dict[str, list[Question]] = {
    "rounding": [cast_question(e) for e in CASTS],
    "subnormals": [
        *(subnormal_cast(e) for e in CASTS),
        *(subnormal_arithmetic(e, side) for e in PRODUCTS for side in ("in", "out")),
    ],
    "overflow": [overflow(e) for e in CASTS],
    "arithmetic": [
        *(arithmetic(name) for name in ARITHMETIC),
        *(fused(name) for name in FUSED),
        *(bias(name, scaled) for name in BIASED for scaled in (False, True)),
        *(integer_sum(engine) for engine in ("vector", "gpsimd")),
        Question("scale_and_round", "Do scalar and vector engine scale and round to the same bf16?", scale_and_round),
    ],
    "functions": [*(function(n) for n in FUNCTIONS), Question("ulp_power", "How accurate is power?", power)],
    "outside": [outside(name) for name in OUTSIDE],
}
"""Questions of single instructions, by group."""
