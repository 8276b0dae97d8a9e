"""The HLO writer: its bytes by the rules of protocol buffers, its text, and what XLA reads back from it."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exact import on_xla, update_of

from collage_neuron.numerics.eft import Value, round_to, split, two_sum
from collage_neuron.passes.backends.xla.hlo import Computation, Shape, TupleShape, integer, message, packed, varint
from collage_neuron.passes.backends.xla.lower import write_hlo
from collage_neuron.passes.ir.scalars import Scalar, ScalarProgram
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.ir.verify import roundings

BF16, FP32 = torch.bfloat16, torch.float32


def read_varint(data: bytes, at: int = 0) -> tuple[int, int]:
    """The number that starts at `at`, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def read_fields(data: bytes) -> list[tuple[int, int | bytes]]:
    """The fields of a message, by the encoding guide: numbers (wire type 0) and bytes (wire type 2)."""
    fields: list[tuple[int, int | bytes]] = []
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        value, at = read_varint(data, at)
        assert key & 7 in (0, 2)
        if key & 7 == 2:
            fields.append((key >> 3, data[at : at + value]))
            at += value
        else:
            fields.append((key >> 3, value))
    assert at == len(data)
    return fields


@pytest.mark.parametrize(
    ("number", "data"),
    [(0, b"\x00"), (1, b"\x01"), (127, b"\x7f"), (128, b"\x80\x01"), (150, b"\x96\x01"), (300, b"\xac\x02")],
)
def test_varint_is_that_of_the_encoding_guide(number: int, data: bytes) -> None:
    assert varint(number) == data


def test_varint_reads_back_at_every_length() -> None:
    for bits in range(64):
        for n in {(1 << bits) - 1, 1 << bits}:
            assert read_varint(varint(n)) == (n, len(varint(n)))
            assert len(varint(n)) == max(1, -(-n.bit_length() // 7))


def test_fields_read_back() -> None:
    data = integer(35, 300) + message(1, "add.2") + packed(36, [2, 300]) + packed(36, []) + message(7, b"")
    assert read_fields(data) == [(35, 300), (1, b"add.2"), (36, varint(2) + varint(300)), (7, b"")]


def test_shapes_name_element_type_dimensions_and_row_major_layout() -> None:
    fields = dict(read_fields(Shape("bf16", (3, 300)).encode()))
    assert fields[2] == 16
    assert fields[3] == varint(3) + varint(300)
    assert read_fields(bytes(fields[5])) == [(1, b"\x01\x00")]  # the last dimension is the minor one
    assert str(Shape("bf16", (3, 300))) == "bf16[3,300]"
    assert str(TupleShape((Shape("f32"), Shape("bf16", (2,))))) == "(f32[], bf16[2])"


def test_a_constant_is_its_four_bytes() -> None:
    hlo = Computation("c")
    module = hlo.module([hlo.constant(0.1)])
    assert struct.pack("<f", 0.1) in module
    assert struct.pack("<f", 0.5) not in module


def test_ids_differ_among_the_computation_and_its_instructions() -> None:
    _, module = write_hlo(TINY, (4,), [BF16, FP32])
    (computation,) = (bytes(v) for k, v in read_fields(module) if k == 3 and isinstance(v, bytes))
    fields = read_fields(computation)
    ids = [dict(read_fields(bytes(v)))[35] for k, v in fields if k == 2 and isinstance(v, bytes)]
    assert len({*ids, dict(fields)[5]}) == len(ids) + 1
    assert dict(fields)[6] == ids[-1]  # the root is the tuple


# A tiny update ------------------------------------------------------------------------------------------------------


def _tiny() -> Update:
    """A bf16 component and an fp32 one, one scalar, a constant, a comparison; outputs of both dtypes."""

    def body(a: Value, x: Value, c: Value) -> list[Value]:
        hi, lo = split(x)
        larger = torch.where(a > hi, round_to(a * c, "bf16"), lo)
        return [larger, x + 0.5]

    update = update_of(("a", "x", "c0"), body, ("bf16", "fp32"))
    program = ScalarProgram([("fp32", Scalar("*", (3, 1)))])
    return Update.elementwise(update.graph.graph, ("a", "x"), update.outputs, program, {})


TINY = _tiny()


@pytest.mark.parametrize("dims", [(), (2, 3)])
def test_golden_text_of_a_tiny_update(dims: tuple[int, ...], golden: Callable[[str, str], None]) -> None:
    hlo, _ = write_hlo(TINY, dims, [BF16, FP32])
    golden(f"hlo_tiny_{len(dims)}d.txt", "\n".join(hlo.text))


def read_by_xla(update: Update, dims: tuple[int, ...], dtypes: list[torch.dtype]) -> str:
    xb = pytest.importorskip("torch_xla.core.xla_builder")
    _, module = write_hlo(update, dims, dtypes)
    text: str = xb.get_computation_hlo(xb.computation_from_module_proto("collage_update", module))
    return text


def opcodes(text: str) -> Counter[str]:
    """How often each opcode occurs in HLO text, ours or XLA's."""
    return Counter(re.findall(r"^ *(?:ROOT )?%\S+ = .*? ([a-z-]+)\(", text, re.MULTILINE))


@pytest.mark.parametrize("dims", [(), (1,), (2, 3)])
def test_xla_reads_back_what_was_written(dims: tuple[int, ...]) -> None:
    text = read_by_xla(TINY, dims, [BF16, FP32])
    hlo, _ = write_hlo(TINY, dims, [BF16, FP32])
    assert opcodes(text) == opcodes("\n".join(hlo.text))
    assert (
        text.count("exponent_bits=8, mantissa_bits=7")
        == opcodes(text)["reduce-precision"]
        == roundings(TINY.graph.graph)
    )
    assert "direction=GT" in text
    assert "slice={[0:1]}" in text
    assert "constant(0.5)" in text


def test_xla_reads_the_signature() -> None:
    """Parameters are the components in order, then the scalar vector; the result is the tuple of outputs."""
    text = read_by_xla(TINY, (2, 3), [BF16, FP32])
    layout = "(bf16[2,3]{1,0}, f32[2,3]{1,0}, f32[1]{0})->(bf16[2,3]{1,0}, f32[2,3]{1,0})"
    assert f"entry_computation_layout={{{layout}}}" in text
    for number, shape in enumerate(("bf16[2,3]", "f32[2,3]", "f32[1]")):
        assert re.search(rf"= {re.escape(shape)}\S* parameter\({number}\)", text)


@pytest.mark.parametrize("dims", [(), (1,), (2, 3)])
def test_an_operand_order_that_matters_is_kept(xla: torch.device, dims: tuple[int, ...]) -> None:
    """Subtraction, division, comparison and choice, each of two different operands."""
    a, x = torch.full(dims, 3.0, dtype=BF16), torch.full(dims, 1.0 + 2**-12)
    update = update_of(("a", "x"), lambda a, x: [a - x, a / x, torch.where(a > x, a, x), torch.where(x > a, a, x)])
    expected = [a - x, a / x, a.float(), x]
    assert all(map(torch.equal, on_xla(update, [a, x]), expected))


def test_scalars_are_taken_by_their_place_in_the_vector(xla: torch.device) -> None:
    update = update_of(("a", "c0", "c1", "c2"), lambda a, *c: [a * x for x in c])
    program = ScalarProgram([("fp32", Scalar("*", (i, 1))) for i in range(3)])
    update = Update.elementwise(update.graph.graph, ("a",), update.outputs, program, {})
    results = on_xla(update, [torch.ones(4)], torch.tensor([2.0, 3.0, 5.0]))
    assert [r.tolist() for r in results] == [[2.0] * 4, [3.0] * 4, [5.0] * 4]


# After XLA's optimiser ----------------------------------------------------------------------------------------------


def run_two_sum() -> None:
    on_xla(update_of(("a", "b"), two_sum), [torch.ones(5, dtype=BF16), torch.ones(5, dtype=BF16)])


def test_xla_optimises_a_two_sum_and_still_rounds_every_sum(tmp_path: Path) -> None:
    """A process of its own, since XLA reads where to write its modules when it starts."""
    pytest.importorskip("torch_xla")
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path), "PJRT_DEVICE": "CPU"}
    subprocess.run([sys.executable, __file__], env=environment, check=True)
    (optimised,) = tmp_path.glob("*cpu_after_optimizations.txt")
    instructions = re.findall(r"^ *(?:ROOT )?(%\S+) = .*? ([a-z-]+)\((.*)", optimised.read_text(), re.MULTILINE)
    sums = [name for name, opcode, _ in instructions if opcode in ("add", "subtract")]
    users = [opcode for name in sums for _, opcode, rest in instructions if re.search(rf"{re.escape(name)}\b", rest)]
    assert len(sums) >= 6  # a fusion may compute one again
    assert set(users) == {"reduce-precision"}


if __name__ == "__main__":
    run_two_sum()
