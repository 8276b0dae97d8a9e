"""What fp8 matmuls would gain on trn2, as arithmetic from documented figures: nothing here was measured.

All linear layers of one layer of a Llama-7B, forward and backward, on one chip: matmuls at the documented dense rates;
a pass of the vector engines over each operand (128 lanes of each of 8 cores, one element a cycle at 0.96 GHz) for the
cast, and another one for an amax; and what an amax reads again from memory (2.9 TB/s), since no element can be cast
before the last one was seen.
"""

from __future__ import annotations

from collections.abc import Iterator

from study.page import table

from collage_neuron.passes.backends.nki.hardware import PARTITIONS, TARGETS

WIDTH, INNER = 4096, 11008
LAYERS = 4 * [(WIDTH, WIDTH)] + 2 * [(WIDTH, INNER)] + [(INNER, WIDTH)]
"""Inner and outer dimension of q, k, v, o, gate, up and down."""
INPUTS = 3 * WIDTH + INNER
"""Elements a token that are inputs: q, k and v share one, gate and up too."""
CORES, BF16 = 8, 2
TFLOPS = (667, 1299)
"""Of a chip, dense: in bf16 and in fp8."""


def gains(tokens: int = 8192) -> str:
    """The table, in milliseconds."""
    return table(("", "work", "ms"), _rows(tokens))


def _rows(tokens: int) -> Iterator[tuple[str, str, str]]:
    weights = sum(a * b for a, b in LAYERS)
    flops = 6 * tokens * weights
    elements = weights + tokens * (INPUTS + sum(b for _, b in LAYERS))
    bf16, fp8 = (flops / rate / 1e12 for rate in TFLOPS)
    target = TARGETS["trn2"]
    one_pass = elements / (PARTITIONS * CORES * target.clock["vector"] * 1e9)
    again = elements * BF16 / (target.bandwidth * CORES * 1e9)
    yield "matmuls in bf16", f"{flops / 1e12:.2f} TFLOP at {TFLOPS[0]:g} TFLOPS", _ms(bf16)
    yield "matmuls in fp8", f"the same at {TFLOPS[1]:g}", _ms(fp8)
    yield "gain", "", _ms(bf16 - fp8)
    yield "casts of all operands", f"{elements / 1e6:.0f} M elements, once", _ms(one_pass)
    yield "amax of all operands", "the same again", _ms(one_pass)
    yield "reading them again for it", f"{elements * BF16 / 1e9:.2f} GB", _ms(again)
    yield "an amax takes of the gain", "of what is left after casts", f"{one_pass / (bf16 - fp8 - one_pass):.0%}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
