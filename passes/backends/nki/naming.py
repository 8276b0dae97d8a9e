"""Readable names and formulas for the values of a kernel."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from collage_neuron.passes.backends.nki.ir import HALVES, MASK, Column, Instruction, Spread, Value, View
from collage_neuron.passes.backends.nki.operations import MASKS
from collage_neuron.passes.backends.nki.schedule import Plan
from collage_neuron.passes.backends.nki.tiling import tile_of

NOUNS = {
    "add": "sum", "subtract": "difference", "multiply": "product", "maximum": "larger", "minimum": "smaller",
    "clamp": "clamped", "copy": "copy", "own_copy": "copy", "fill": "constant", "sqrt": "root",
    "reciprocal": "reciprocal", "exact_reciprocal": "reciprocal", "exp": "exponential", "log": "logarithm",
    "power": "power", "sign": "sign", "abs": "magnitude", **dict.fromkeys(MASKS, "mask"),
    "power_of_two": "unit", "inverse_power_of_two": "inverse", "lower": "value", "masked": "places",
    "block_max": "largest", "total": "measure", "peak": "peak", "draw": "random",
    "carried": "rounded",
}  # fmt: skip

ROUNDED = {"bfloat16": "bf16"}
"""The name of a rounding to a dtype, if it differs from the name of the dtype."""

PARTS = {None: "bits", 0: "lower", 1: "upper"}
"""The names of views as int16, by half."""

INFIX = {
    "add": "+", "subtract": "-", "multiply": "*", "less": "<", "less_equal": "<=", "greater": ">",
    "greater_equal": ">=", "equal": "==", "not_equal": "!=", "logical_or": "or", "logical_and": "and",
}  # fmt: skip


def names_of(plan: Plan) -> dict[Value, str]:
    """A Python name for the tile of each value: `<key>_in` and `<key>_out` for loads and stores."""
    names = {v: f"{v.name}_in" for v in plan.program.loads}
    for key, value in plan.program.stores.items():
        names.setdefault(tile_of(value), f"{key}_out")
    for value, _ in plan.steps:
        if _is_pair(value):
            names.setdefault(value, f"old_{value.args[0].name}")  # type: ignore[union-attr]
    for key, value in plan.program.stores.items():
        if value.op == "copy" and isinstance(value.args[0], Value):
            names.setdefault(tile_of(value.args[0]), f"new_{key}")
    names |= {value: f"measure_{k}" for k, value in enumerate(plan.program.measures)}
    count: Counter[str] = Counter()
    for value, _ in plan.steps:
        tile = tile_of(value)
        if tile not in names:
            noun = NOUNS[tile.op] if value.op != "select" else "chosen"
            count[noun] += 1
            names[tile] = f"{noun}_{count[noun]}"
        names[value] = names[tile]
    return names


def _is_pair(value: Value) -> bool:
    """Returns True if a value is the sum of the two words of a component."""
    words = list(value.tiles())
    return (
        value.op == "add"
        and [w.op for w in words] == ["load", "load"]
        and words[1].name.startswith(words[0].name + "_")
    )


def number(x: float) -> str:
    """A number as a literal; powers of two as `2.0**n` unless their decimal is short, bits in hexadecimal."""
    if isinstance(x, int):
        return f"0x{x:X}"
    mantissa, exponent = math.frexp(x)
    return f"2.0**{exponent - 1}" if mantissa == 0.5 and len(repr(x)) > 6 else repr(float(x)).replace("e+", "e")


def formula(value: Value, instruction: Instruction, names: Mapping[Value, str], columns: Mapping[Column, str]) -> str:
    """The instruction as an equation; `bf16(...)` is its rounding, every other operation is fp32."""

    def text(x: Any) -> str:
        if isinstance(x, View):
            return (
                f"{PARTS[x.half]}({names[x.tile]})"
                if x.dtype == "int16"
                else f"uint16({PARTS[x.half]}({names[x.tile]}))"
            )
        if isinstance(x, Spread):
            return f"{names[x.tile]}{'[block]' if x.tile.block else ''}"
        if isinstance(x, Value):
            return names[x]
        return columns[x] if isinstance(x, Column) else number(x)

    body = _body(instruction, text)
    if value.op in HALVES:
        return f"{PARTS[HALVES[value.op]]}({names[value]}) = int16({body})"
    mask = value.op in MASKS and value.dtype == MASK
    exact = value.dtype == "float32" or mask or instruction.bits or instruction.kind == "rng"
    return f"{names[value]} = {body if exact else f'{ROUNDED.get(value.dtype, value.dtype)}({body})'}"


def _body(i: Instruction, text: Any) -> str:
    if i.kind == "tensor_tensor":
        return _applied(i["op"], text(i["data1"]), text(i["data2"]))
    if i.kind in ("tensor_scalar", "scalar_tensor_tensor"):
        first = _operation(i, 0, text(i["data"]), text)
        return first if i["op1"] is None else _operation(i, 1, f"({first})" if i["op0"] in INFIX else first, text)
    if i.kind == "activation":
        return _activation(i, text)
    if i.kind == "tensor_reduce":
        return f"{'sum' if i['op'] == 'add' else 'max' if i.whole else 'block_max'}({text(i['data'])})"
    if i.kind == "rng":
        return "16 random bits"
    if i.kind == "reciprocal":
        return f"1 / {text(i['data'])}"
    if i.kind == "tensor_copy_predicated":
        return f"{text(i['src'])} where {text(i['predicate'])}"
    return text(i["src"]) if i.kind == "tensor_copy" else number(i["value"])


def _operation(i: Instruction, number: int, x: str, text: Any) -> str:
    op, y = i[f"op{number}"], i[f"operand{number}"]
    if op == "abs":
        return f"abs({x})"
    return _applied(op, text(y), x) if i[f"reverse{number}"] else _applied(op, x, text(y))


def _applied(op: str, x: str, y: str) -> str:
    return f"{x} {INFIX[op]} {y}" if op in INFIX else f"{op}({x}, {y})"


def _activation(i: Instruction, text: Any) -> str:
    x = text(i["data"])
    x = x if i["scale"] is None else f"{x} * {text(i['scale'])}"
    x = x if i["bias"] is None else f"{x} + {text(i['bias'])}"
    return x if i["op"] == "copy" else f"{i['op']}({x})"
