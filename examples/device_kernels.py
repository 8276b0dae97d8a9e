"""The kernels of the device probe: one instruction each, written to a file in the dialect of NKI that is installed.

A kernel takes x and y, [128, n] and alike, and s, fp32 [128, 1]; their tiles are called a, b and c.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Function = Callable[..., Any]

ENGINES = {"nki": "nisa.engine.{}", "beta1": "nisa.{}_engine"}

IMPORTS = {
    "nki": "import nki\nimport nki.isa as nisa\nimport nki.language as nl",
    "beta1": "import neuronxcc.nki.isa as nisa\nimport neuronxcc.nki.language as nl\n"
    "import neuronxcc.nki.typing as nt\nfrom neuronxcc import nki",
}

NKI = '''"""{title}"""

{imports}


@nki.jit
def probe(x, y, s):
    """[128, n] from x, y [128, n] and s [128, 1]."""
    out = nl.ndarray(x.shape, dtype=nl.{dtype}, buffer=nl.shared_hbm)
    a = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    b = nl.ndarray(y.shape, dtype=y.dtype, buffer=nl.sbuf)
    c = nl.ndarray(s.shape, dtype=s.dtype, buffer=nl.sbuf)
    d = nl.ndarray(x.shape, dtype=nl.{dtype}, buffer=nl.sbuf)
    nisa.dma_copy(dst=a, src=x)
    nisa.dma_copy(dst=b, src=y)
    nisa.dma_copy(dst=c, src=s)
    nisa.{instruction}(dst=d, {arguments})
    nisa.dma_copy(dst=out, src=d)
    return out
'''

BETA1 = '''"""{title}"""

{imports}


@nki.jit
def probe(x, y, s):
    """[128, n] from x, y [128, n] and s [128, 1]."""
    out = nl.ndarray(x.shape, dtype=nl.{dtype}, buffer=nl.shared_hbm)
    a = nl.load(x)
    b = nl.load(y)
    c = nl.load(s)
    d = nl.ndarray(x.shape, dtype=nl.{dtype}, buffer=nl.sbuf)
    {assignment}nisa.{instruction}({arguments})
    nl.store(out, value=d)
    return out
'''

IN_PLACE = {
    "nki": '''"""{title}"""

{imports}


@nki.jit
def probe(x, y, s):
    """x = x + y, in place."""
    a = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    b = nl.ndarray(y.shape, dtype=y.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=a, src=x)
    nisa.dma_copy(dst=b, src=y)
    nisa.tensor_tensor(dst=a, data1=a, data2=b, op=nl.add)
    nisa.dma_copy(dst=x, src=a)
    return x
''',
    "beta1": '''"""{title}"""

{imports}


@nki.jit
def probe(x: nt.mutable_tensor, y, s):
    """x = x + y, in place."""
    a = nl.load(x)
    b = nl.load(y)
    d = nisa.tensor_tensor(data1=a, data2=b, op=nl.add, dtype=x.dtype)
    nl.store(x, value=d)
    return x
''',
}

LOOPED = '''"""Copies lines of 4 elements in a loop that the device runs, from a view of another shape."""

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def probe(x):
    """[384, 4] from x [1536, 1]: line i is elements 4 * i to 4 * i + 3."""
    out = nl.ndarray((384, 4), dtype=x.dtype, buffer=nl.shared_hbm)
    lines = x.reshape((384, 4))
    pattern = [[4, 128], [1, 4]]

    def body(line):
        a = nl.ndarray((128, 4), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=a, src=lines.ap(pattern=pattern, offset=0, scalar_offset=line, indirect_dim=0))
        nisa.dma_copy(dst=out.ap(pattern=pattern, offset=0, scalar_offset=line, indirect_dim=0), src=a)

    nl.fori_loop(0, 384, body, step=128)
    return out
'''
"""The loop of generated kernels, in `import nki`: `out` has its own shape, so only what is loaded may be misplaced."""


@dataclass(frozen=True)
class Instruction:
    """An instruction: its name, its arguments but for the destination (`@vector` is that engine), and its type."""

    name: str
    arguments: str
    dtype: str = "float32"

    def source(self, dialect: str, title: str) -> str:
        """The kernel file. The older dialect's dma_copy takes a destination, all its others return one."""
        arguments, assignment = self.arguments, ""
        for engine in ("vector", "scalar", "gpsimd"):
            arguments = arguments.replace(f"@{engine}", ENGINES[dialect].format(engine))
        if dialect == "beta1" and self.name == "dma_copy":
            arguments = f"dst=d, {arguments}"
        elif dialect == "beta1":
            assignment, arguments = "d[...] = ", f"{arguments}, dtype=nl.{self.dtype}"
        return (NKI if dialect == "nki" else BETA1).format(
            title=title, imports=IMPORTS[dialect], dtype=self.dtype, instruction=self.name, arguments=arguments,
            assignment=assignment,
        )  # fmt: skip


def in_place(dialect: str) -> str:
    """The kernel file that adds y to x where x is."""
    return IN_PLACE[dialect].format(title="Adds in place.", imports=IMPORTS[dialect])


def load(source: str, path: Path) -> Function:
    """The kernel in `source`, written to `path`: the compiler of NKI reads the file again."""
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel: Function = module.probe
    return kernel
