"""The dialect `import nki` (0.6 and 0.7): modules nki, nki.isa and nki.language over one machine."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from nki_standin import enums
from nki_standin.dtypes import DTYPES, DType
from nki_standin.errors import fail, require
from nki_standin.host import run
from nki_standin.instructions import functions
from nki_standin.machine import Machine
from nki_standin.modules import module
from nki_standin.operators import OPERATORS
from nki_standin.tensors import MemoryRegion, NkiTensor


class Kernel:
    """What `nki.jit` returns."""

    def __init__(self, machine: Machine, function: Callable[..., Any], lnc: int = 1) -> None:
        self._machine, self._function, self._cores = machine, function, lnc
        self.__name__, self.__doc__, self.__wrapped__ = function.__name__, function.__doc__, function
        require(lnc in (1, machine.target.cores), f"{function.__name__}[{lnc}]: {machine.target.name} has no such LNC")

    def __getitem__(self, lnc: int) -> Kernel:
        return Kernel(self._machine, self._function, lnc)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the kernel; a device would compile it and run it there."""
        if any(isinstance(x, NkiTensor) for x in (*args, *kwargs.values())):
            fail(f"{self.__name__} is called from a kernel: only the top function is decorated with jit")
        return run(self._machine, self._function, args, kwargs, None, self._cores)


def modules(machine: Machine) -> dict[str, ModuleType]:
    """The dialect's modules by name."""
    isa, language = _isa(machine), _language(machine)

    def jit(fn: Any = None, **kwargs: Any) -> Any:
        if kwargs:
            fail(f"nki.jit: argument {next(iter(kwargs))} is not documented, or no longer")
        return Kernel(machine, fn) if fn is not None else lambda f: Kernel(machine, f)

    def simulate(kernel: Any) -> Kernel:
        return kernel if isinstance(kernel, Kernel) else Kernel(machine, kernel)

    top = module("nki", {"jit": jit, "simulate": simulate, "isa": isa, "language": language})
    return {"nki": top, "nki.isa": isa, "nki.language": language}


def _isa(machine: Machine) -> ModuleType:
    members: dict[str, Any] = functions(machine)
    for enum in (enums.engine, enums.reduce_cmd, enums.oob_mode, enums.dge_mode):
        members[enum.__name__] = enum
    return module("nki.isa", members)


def _language(machine: Machine) -> ModuleType:
    def ndarray(
        shape: Any, dtype: DType, buffer: Any = MemoryRegion.sbuf, name: str = "", address: Any = None
    ) -> NkiTensor:
        if address is not None:
            fail("nl.ndarray: addresses are not in the stand-in")
        return machine.allocate(shape, dtype, buffer, name)

    def fori_loop(lower: int, upper: int, body_fun: Callable[[Any], None], step: int = 1) -> None:
        machine.trace.nest.fori_loop(lower, upper, body_fun, step)

    members: dict[str, Any] = {**DTYPES, **OPERATORS, **{m.name: m for m in MemoryRegion}}
    members.update(
        NkiTensor=NkiTensor, ndarray=ndarray, fori_loop=fori_loop,
        program_id=lambda axis=0: machine.core, num_programs=lambda axes=0: machine.cores,
    )  # fmt: skip
    return module("nki.language", members)
