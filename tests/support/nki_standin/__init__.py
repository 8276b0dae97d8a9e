"""A stand-in for NKI: enough of `nki` to run this project's kernels where the vendor's package cannot be installed.

Written from the public documentation only. It belongs to the tests: the package never imports it, and a user never
gets it. It computes in fp32 and rounds once where an instruction writes its destination, checks what the documentation
demands (some of which the vendor's simulator does not), counts what each engine and the DMA do, and refuses
whatever the documentation does not define. tests/backends/nki/test_standin.py keeps it honest.

    with install("nki", "trn1") as machine:
        kernel = load(path).scaled_add
        out = kernel(a, b)
        machine.trace.records
"""

from __future__ import annotations

import importlib.util
import linecache
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from nki_standin import dialect_beta1, dialect_nki
from nki_standin.device import TARGETS, Device, target
from nki_standin.errors import StandinError
from nki_standin.machine import Machine
from nki_standin.modules import VERSION, registered

__all__ = ["DIALECTS", "TARGETS", "VERSION", "Device", "Machine", "StandinError", "install", "load"]

DIALECTS: dict[str, Callable[[Machine], dict[str, ModuleType]]] = {
    "nki": dialect_nki.modules,
    "beta1": dialect_beta1.modules,
}
"""Name of a dialect -> the modules it consists of."""


@contextmanager
def install(dialect: str = "nki", on: str = "trn1", device: Device | None = None) -> Iterator[Machine]:
    """Inside, `import nki` (`import neuronxcc.nki` of the dialect beta1) gives the stand-in of a fresh machine.

    Kernels loaded inside belong to that machine. ValueError for an unknown target, RuntimeError inside another
    stand-in; a real package that is already imported comes back afterwards.
    """
    machine = Machine(target(on), device or Device())
    with registered(DIALECTS[dialect](machine)):
        yield machine


def load(path: str | Path) -> ModuleType:
    """Executes a kernel file and returns its module, which is registered nowhere."""
    linecache.checkcache(str(path))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
