"""The machine: what this CPU is, code for it, made in process by LLVM (llvmlite), and the threads that run it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

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
        """Those of a kernel."""
        bits = 32 * self.width
        # Without it LLVM halves vectors of 512 bits, which some CPUs run at a lower clock.
        wide = f' "prefer-vector-width"="{bits}" "min-legal-vector-width"="{bits}"'
        # Without it vectors on the stack may lie across two lines of the cache, and some steps are half as fast then.
        aligned = f' "stackrealign" alignstack={bits // 8}'
        return f"attributes #0 = {{ nounwind{wide + aligned if self.architecture == 'x86_64' else ''} }}"

    def machine(self, llvm: Any) -> Any:
        """LLVM's target machine."""
        # A new one each time, since an engine owns the one that it is given.
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
        # The driver's functions, for a thread whose number its caller knows and for one of an OpenMP team.
        self.share, self.team = (int(self._engine.get_function_address(name)) for name in ("share", "team"))

    def address(self, kernel: Kernel) -> int:
        """The address of a kernel's code, which is made if it is new."""
        with self._lock:
            if kernel.name not in self._addresses:
                self._engine.add_module(self.target.module(self._llvm, kernel.text))
                self._engine.finalize_object()
                self._addresses[kernel.name] = self._engine.get_function_address(kernel.name)
            return self._addresses[kernel.name]


_FORKED = 0x40
"""PF_FORKNOEXEC in Linux's flags of a process: it was forked, and has not called exec."""


def loaded_libgomp() -> str | None:
    """The path of the libgomp that this process has loaded; of several, the one that is torch's."""
    lines = Path("/proc/self/maps").read_text().splitlines() if Path("/proc/self/maps").exists() else []
    paths = sorted({line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line})
    folder = str(Path(torch.__file__).parent)
    return next((path for path in paths if path.startswith(folder)), paths[0] if paths else None)


def was_forked() -> bool:
    """Returns True if this process is a copy of another one."""
    stat = Path("/proc/self/stat").read_text()
    return bool(int(stat.rpartition(")")[2].split()[6]) & _FORKED)


class Team:
    """Runs functions on torch's own OpenMP threads.

    Threads of another pool would compete with those, which spin for a while after each operation of torch: with a pool
    of our own, a step took half as long again. libgomp's entry point for `#pragma omp parallel` is a plain C function.
    """

    def __init__(self, path: str) -> None:
        """`path` is that of a libgomp."""
        self._library = ctypes.CDLL(path)
        self._parallel = self._library.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None
        # This process may itself be a fork of one whose libgomp had threads: then `threads` always says one.
        self._process = 0 if was_forked() else os.getpid()
        self._is_watched = False

    def symbols(self) -> Mapping[str, int]:
        """Addresses of the functions by which a thread learns its number, and how many there are."""
        number, count = self._library.omp_get_thread_num, self._library.omp_get_num_threads
        found = {"collage_thread": number, "collage_threads": count}
        return {name: ctypes.cast(function, ctypes.c_void_p).value or 0 for name, function in found.items()}

    def threads(self) -> int:
        """How many threads to use: torch's number, and one in a forked process."""
        # A fork copies no threads, but libgomp's list of them: to wait for them would take forever.
        return torch.get_num_threads() if os.getpid() == self._process else 1

    def run(self, function: int, context: int, threads: int) -> None:
        """Runs `function(context)` on that many threads, or fewer; returns when all have finished."""
        if not self._is_watched:
            # From now on torch's operations would wait forever in a fork too, those of validation among them.
            os.register_at_fork(after_in_child=_alone)
            self._is_watched = True
        self._parallel(function, context, threads, 0)


def _alone() -> None:
    """Makes torch use one thread, as it does itself in the processes of a data loader."""
    torch.set_num_threads(1)
