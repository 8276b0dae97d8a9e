"""The constructs of NKI in generated kernels, by dialect, and where AWS's documentation has each.

A source is a file and line of `aws-neuron/aws-neuron-sdk`, at commit 81ce03ae (SDK 2.32, `import nki` 0.6) or 49ee15c5
(SDK 2.26, `neuronxcc.nki`). `tests/backends/nki/test_constructs.py` checks that the tables are complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Source(NamedTuple):
    """Where a construct is documented."""

    path: str
    line: int
    doubt: str = ""
    """What the documentation does not say about it, if anything."""


_ISA, _LANGUAGE = "nki/api/nki/isa/__init__.py", "nki/api/nki/language/__init__.py"
_OLD = "general/nki/api/nki"

SQUARE = "listed among the functions that are evaluated piecewise (copy, abs and sign too): only where `squares` is set"
ASSIGNED = "how to write to PSUM is said of tensor_copy; of tensor_tensor (1781) and activation (162) that they may"
BIAS = "each function is said to add it; on a trn1 copy did not (issue 1296): kernels for it use relu, or VectorE"
SEEDED = "that lanes draw differently, and in which order instructions draw; the algorithm (before v4 a shift register)"
TILE_SEED = "'a 32-bit scalar value'; AWS's attention samples pass an element of a tile"
UNIFORM = "the grid of the numbers, and whether 0 and 1 are among them; kernels are right for any of 2**-16 to 2**-24"
EACH_CORE = "numbers of a kernel may differ between cores (lnc.rst, 120), but not the turns of its loops"
SHARED = "the reshaped tensor is an input that is stored into; the samples only load from one"

NKI: Mapping[str, Source] = {
    "nki.jit": Source("nki/api/nki/__init__.py", 6),
    "nisa.dma_copy": Source(_ISA, 246),
    "nisa.tensor_copy": Source(_ISA, 384),
    "nisa.memset": Source(_ISA, 431),
    "nisa.tensor_copy_predicated": Source(_ISA, 446),
    "nisa.tensor_tensor": Source(_ISA, 1019),
    "nisa.tensor_scalar": Source(_ISA, 1081),
    "nisa.tensor_reduce": Source(_ISA, 1161),
    "nisa.rng": Source(_ISA, 2087, SEEDED),
    "nisa.set_rng_seed": Source(_ISA, 2153, SEEDED),
    "nisa.activation": Source(_ISA, 1336),
    "nisa.activation with a bias": Source(_ISA, 1336, BIAS),
    "nisa.activation of square": Source("nki/api/nki.api.shared.rst", 156, SQUARE),
    "nisa.reciprocal": Source(_ISA, 2388),
    "nisa.scalar_tensor_tensor": Source(_ISA, 2457),
    "nl.ndarray": Source(_LANGUAGE, 2545),
    "nl.fori_loop": Source(_LANGUAGE, 2431),
    "the body of a compiled loop": Source(_LANGUAGE, 2475),
    "nl.program_id": Source(_LANGUAGE, 2595, EACH_CORE),
    "nl.num_programs": Source(_LANGUAGE, 2602),
    "range": Source("nki/get-started/nki-language-guide.rst", 458),
    "assert": Source("nki/deep-dives/nki-aps.rst", 96),
    "tensor.ap": Source(_LANGUAGE, 486),
    "tensor.ap with scalar_offset": Source("nki/deep-dives/nki-dynamic-loops.rst", 225),
    "tensor.reshape": Source(_LANGUAGE, 347, SHARED),
    "tensor.view": Source(_LANGUAGE, 516),
    "tensor[slices]": Source(_LANGUAGE, 197),
}
"""`import nki`."""

BETA1: Mapping[str, Source] = {
    "nki.jit": Source(f"{_OLD}/__init__.py", 368),
    "nisa.activation": Source(f"{_OLD}/isa/__init__.py", 107),
    "nisa.activation with a bias": Source(f"{_OLD}/isa/__init__.py", 107, BIAS),
    "nisa.activation of square": Source("general/nki/api/nki.api.shared.rst", 142, SQUARE),
    "nisa.memset": Source(f"{_OLD}/isa/__init__.py", 691),
    "nisa.reciprocal": Source(f"{_OLD}/isa/__init__.py", 1183),
    "nisa.scalar_tensor_tensor": Source(f"{_OLD}/isa/__init__.py", 1206),
    "nisa.tensor_copy": Source(f"{_OLD}/isa/__init__.py", 1375),
    "nisa.tensor_copy_predicated": Source(f"{_OLD}/isa/__init__.py", 1493),
    "nisa.tensor_reduce": Source(f"{_OLD}/isa/__init__.py", 1565),
    "nisa.tensor_scalar": Source(f"{_OLD}/isa/__init__.py", 1637),
    "nisa.tensor_tensor": Source(f"{_OLD}/isa/__init__.py", 1760),
    "nl.affine_range": Source(f"{_OLD}/language/__init__.py", 222),
    "nl.arange": Source(f"{_OLD}/language/__init__.py", 316),
    "nl.load": Source(f"{_OLD}/language/__init__.py", 861),
    "nl.ndarray": Source(f"{_OLD}/language/__init__.py", 1192),
    "nl.par_dim": Source("general/nki/programming_model.rst", 206),
    "nl.rand": Source(f"{_OLD}/language/__init__.py", 1305, UNIFORM),
    "nl.random_seed": Source(f"{_OLD}/language/__init__.py", 1316, TILE_SEED),
    "nl.store": Source(f"{_OLD}/language/__init__.py", 1637),
    "nt.mutable_tensor": Source(f"{_OLD}.errors.rst", 203),
    "assert": Source("general/nki/examples/layernorm/layernorm_nki_kernel.py", 28),
    "tensor.reshape": Source("general/nki/tutorials/rmsnorm.rst", 67, SHARED),
    "tensor.view": Source(f"{_OLD}/__init__.py", 208),
    "tensor[indices]": Source("general/nki/examples/layout-loop.py", 23),
    "tensor[slices]": Source("general/nki/programming_model.rst", 523),
    "tile[...] = instruction": Source(f"{_OLD}/isa/__init__.py", 1394, ASSIGNED),
    "tile[indices] = instruction": Source("general/nki/examples/layernorm/layernorm_nki_kernel.py", 112),
    "tile[slices] = instruction": Source("general/nki/examples/index-case-3.py", 44),
}
"""`neuronxcc.nki`."""

CONSTRUCTS = {"nki": NKI, "beta1": BETA1}
"""By dialect."""
