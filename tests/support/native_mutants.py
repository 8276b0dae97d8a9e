"""Kernels with one instruction changed, and hard values on which a change of one must show."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from collage_neuron.passes.backends.native.writer import Kernel

SIBLINGS: dict[str, tuple[str, ...]] = {
    "fadd": ("fsub",), "fsub": ("fadd",), "fmul": ("fdiv",), "fdiv": ("fmul",), "fneg": ("freeze",),
    "add": ("sub",), "sub": ("add",), "and": ("or",), "or": ("and", "xor"), "xor": ("or",),
    "shl": ("lshr",), "lshr": ("ashr", "shl"), "ashr": ("lshr",),
    "olt": ("ole", "ult", "ogt"), "ole": ("olt", "ule"), "ogt": ("oge", "ugt", "olt"), "oge": ("ogt", "uge"),
    "oeq": ("ueq", "one"), "une": ("one", "oeq"), "one": ("une", "oeq"), "ord": ("uno",), "uno": ("ord", "une"),
    "slt": ("sle", "ult"), "sle": ("slt", "ule"), "sgt": ("sge", "ugt"), "sge": ("sgt", "uge"), "eq": ("ne",),
    "ne": ("eq",), "sitofp": ("uitofp",), "uitofp": ("sitofp",), "smax": ("smin",), "roundeven": ("round", "trunc"),
    "fabs": ("floor",), "sqrt": ("fabs",), "fptosi": ("fptoui",), "sext": ("zext",),
}  # fmt: skip
"""What an instruction is replaced by."""

LINE = re.compile(r"^  (%\w+ = )?(?P<what>.*)$")


def mutants(kernel: Kernel) -> Iterator[tuple[str, Kernel]]:
    """Kernels with one instruction of the loops replaced, or a constant by the next one; each kind of line once."""
    lines = [line for line in kernel.text.splitlines() if not line.startswith("declare")]
    first = next(i for i, line in enumerate(lines) if line in ("loop:", "block:"))
    last = next(i for i, line in enumerate(lines) if line.startswith("  %next"))
    seen = set()
    for i in range(first + 1, last):
        kind = re.sub(r"%\w+", "", lines[i])
        for changed in _changed(lines[i]) if kind not in seen else ():
            text = "\n".join([*lines[:i], changed, *lines[i + 1 :]])
            name = f"mutant_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
            text = "\n".join([text, *sorted(set(declarations(text)))]).replace(kernel.name, name)
            yield f"{lines[i]} -> {changed}", replace(kernel, name=name, text=text)
        seen.add(kind)


def _changed(line: str) -> Iterator[str]:
    """The line with its opcode, or its predicate, replaced by a sibling; or its operands of a choice swapped."""
    found = LINE.match(line)
    words = found["what"].split() if found and found[1] else []
    unchanged = ("phi", "getelementptr", "load", "bitcast", "shufflevector", "insertelement")
    if not words or words[0] in unchanged or " i64 " in line:  # addresses, too, which have to be those of the tensors
        return
    at = 1 if words[0] in ("fcmp", "icmp") else 0
    if words[0] == "call":
        name = line.split("@llvm.")[1].removeprefix("vector.reduce.").split(".")[0]
        yield from (line.replace(f".{name}.", f".{other}.") for other in SIBLINGS[name])
    elif words[0] == "select":
        start, mask, x, y = re.split(r"(?<=select) |, (?=<)", line)
        yield f"{start} {mask}, {y}, {x}"
    elif words[0] not in ("trunc", "zext", "fpext"):
        yield from (line.replace(f" {words[at]} ", f" {other} ", 1) for other in SIBLINGS[words[at]])
    for constant in re.findall(r"splat \(i32 (-?\d+)\)", line):
        yield line.replace(f"splat (i32 {constant})", f"splat (i32 {int(constant) + 1})", 1)


def declarations(text: str) -> Iterator[str]:
    """The declarations of the intrinsics that a text calls."""
    for returned, function, given in re.findall(r"call (<[^>]*>|\w+) (@llvm[\w.]+)\((.*)\)", text):
        types = ", ".join(re.findall(r"(?:^|, )(<[^>]*>|\w+)(?= )", given))
        yield f"declare {returned} {function}({types})"


@cache
def hard() -> tuple[Tensor, Tensor]:
    """Two fp32 vectors: special values and numbers around them, each with each; then random bits, then halves."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.exp2(
        torch.tensor([-149.0, -140, -133, -127, -126, -60, -16, -8, -1, 0, 1, 6, 7, 14, 15, 23, 24, 127])
    )
    around = [
        powers * (1 + k * 2.0**-23)
        for k in (0, 1, 2**14, 2**15 - 1, 2**15, 2**15 + 1, 2**16, 3 * 2**15, 3 * 2**15 - 1, -1)
    ]
    largest = torch.tensor([torch.finfo(torch.bfloat16).max, torch.finfo(torch.float32).max, 3.3961e38, 127.5, 32767.5])
    special = torch.tensor([0.0, float("inf"), 0.1, 3.0, 2.5, 1.5])
    values = torch.cat([*around, largest, special])
    values = torch.cat([values, -values, torch.tensor([float("nan")])]).unique()
    values = torch.cat([values, torch.tensor([-0.0, float("nan")])])
    pairs = torch.cartesian_prod(values, values).unbind(1)
    bits = [
        torch.randint(-(2**31), 2**31, (1 << 15,), generator=generator).to(torch.int32).view(torch.float32)
        for _ in "xy"
    ]
    near = torch.randn(1 << 14, generator=generator)
    halves = (torch.arange(-300, 300) / 2 * 2.0**0).repeat(2)
    ties = (torch.arange(0, 1 << 14) << 15).to(torch.int32).view(torch.float32)
    # Random bits that are added to this NaN make it a zero.
    all_ones = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    x = torch.cat([all_ones, pairs[0], bits[0], near, halves, ties, ties])
    y = torch.cat(
        [
            torch.tensor([100.0, 7.0]),
            pairs[1],
            bits[1],
            near * (1 + 2.0**-20),
            halves.flip(0),
            ties.roll(1),
            ties.roll(7),
        ]
    )
    return x, y
