"""The machine: what this CPU is, and machine code for it, made in process by LLVM (llvmlite)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from collage_neuron.passes.backends.native.driver import MODES, write_driver
from collage_neuron.passes.backends.native.writer import Kernel

WIDTHS: Mapping[str, int] = MappingProxyType({"avx512f": 16, "avx2": 8, "neon": 4})
"""Numbers of fp32 in a vector register of a CPU with a feature; of several, the first that it has decides."""

NEEDED: Mapping[str, tuple[str, ...]] = MappingProxyType({"x86_64": ("avx2", "f16c"), "aarch64": ("neon",)})
"""Features of a CPU without which LLVM would call functions that no library here has, by architecture."""

OLDEST = (0, 45)
"""The oldest llvmlite that reads the text of the kernels: the extra `native` requires it, numba may bring another."""

INSTALL = "pip install 'llvmlite>=0.45'"

CODE_GENERATION = 2
"""LLVM's level of effort for machine code, 0 to 3. No pass over its own representation precedes it: the text is written
as it should run, and passes cost as much again and gained nothing measurable."""


@dataclass(frozen=True)
class Target:
    """A kind of CPU for which code is made."""

    triple: str
    cpu: str
    features: str
    width: int
    """Numbers of fp32 in a vector register."""

    @property
    def architecture(self) -> str:
        """The first part of the triple."""
        return self.triple.split("-")[0]

    @property
    def attributes(self) -> str:
        """Those of a kernel.

        LLVM would halve vectors of 512 bits, which some CPUs run at a lower clock, and let vectors on the stack lie
        across two lines of the cache, which makes some steps half as fast in processes whose stack begins there.
        """
        bits = 32 * self.width
        wide = f' "prefer-vector-width"="{bits}" "min-legal-vector-width"="{bits}"'
        aligned = f' "stackrealign" alignstack={bits // 8}'
        return f"attributes #0 = {{ nounwind{wide + aligned if self.architecture == 'x86_64' else ''} }}"

    def machine(self, llvm: Any) -> Any:
        """LLVM's target machine: a new one each time, since an engine owns its own."""
        target = llvm.Target.from_triple(self.triple)
        return target.create_target_machine(cpu=self.cpu, features=self.features, opt=CODE_GENERATION, jit=True)

    def module(self, llvm: Any, text: str) -> Any:
        """A verified module with the functions in `text`."""
        module = llvm.parse_assembly(f'target triple = "{self.triple}"\n{text}\n{self.attributes}\n')
        module.verify()
        return module

    def assembly(self, llvm: Any, text: str) -> str:
        """The instructions for the functions in `text`, to be read."""
        made: str = self.machine(llvm).emit_assembly(self.module(llvm, text))
        return made


def missing_here() -> str | None:
    """What this machine lacks for machine code of its own, as a sentence; None if nothing."""
    architecture = platform.machine()
    if platform.system() != "Linux" or architecture not in MODES:
        return f"code is made for Linux on x86-64 and ARM64, and this is {platform.system()} on {architecture}"
    if importlib.util.find_spec("llvmlite") is None:
        return f"llvmlite is not installed: {INSTALL}"
    try:
        return _old() or _lacking(binding().get_host_cpu_features(), NEEDED[architecture])
    except Exception as error:  # `auto` asks on every machine with an llvmlite, which may be there for something else
        return f"llvmlite cannot be used here ({type(error).__name__}: {error})"


def _old() -> str | None:
    found = importlib.metadata.version("llvmlite")
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) >= OLDEST:
        return None
    return f"llvmlite {found} is too old, {'.'.join(map(str, OLDEST))} or newer is needed: {INSTALL}"


def _lacking(features: Mapping[str, bool], needed: Sequence[str]) -> str | None:
    lacking = [name for name in needed if not features.get(name)]
    return f"this CPU has no {' and no '.join(lacking)}" if lacking else None


def binding() -> Any:
    """LLVM, ready to make code for this CPU."""
    import llvmlite.binding as llvm  # an extra: imported only where parameters are on a CPU

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def this_cpu() -> Target:
    """The CPU that runs this process."""
    llvm = binding()
    features = llvm.get_host_cpu_features()
    width = next(width for name, width in WIDTHS.items() if features.get(name))
    return Target(llvm.get_process_triple(), llvm.get_host_cpu_name(), features.flatten(), width)


class Machine:
    """Makes code, and keeps it: kernels with the same text are compiled once."""

    def __init__(self, symbols: Mapping[str, int], target: Target | None = None) -> None:
        """`symbols` are the addresses of functions that the driver calls; `target` is this CPU, or a part of it."""
        self._llvm, self.target = binding(), target or this_cpu()
        for name, address in symbols.items():
            self._llvm.add_symbol(name, address)
        self._addresses: dict[str, int] = {}
        self._lock = threading.Lock()
        self._engine = self._llvm.create_mcjit_compiler(
            self.target.module(self._llvm, write_driver(self.target.architecture)), self.target.machine(self._llvm)
        )
        self._engine.finalize_object()

    @cached_property
    def share(self) -> int:
        """The address of the driver's function for a thread whose number its caller knows."""
        address: int = self._engine.get_function_address("share")
        return address

    @cached_property
    def team(self) -> int:
        """The address of the driver's function for a thread of an OpenMP team."""
        address: int = self._engine.get_function_address("team")
        return address

    def address(self, kernel: Kernel) -> int:
        """The address of a kernel's code, which is made if it is new."""
        with self._lock:
            if kernel.name not in self._addresses:
                self._engine.add_module(self.target.module(self._llvm, kernel.text))
                self._engine.finalize_object()
                self._addresses[kernel.name] = self._engine.get_function_address(kernel.name)
            return self._addresses[kernel.name]
