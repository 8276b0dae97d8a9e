"""Code for other CPUs: compiled for each, run where this one has their instructions; and what a machine may lack."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from natively import assert_same, copies_of
from running import registered

import collage_neuron
from collage_neuron.cli import doctor
from collage_neuron.passes.backends import registry
from collage_neuron.passes.backends.native import backend as module
from collage_neuron.passes.backends.native import machine
from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE
from collage_neuron.passes.backends.native.backend import Engine, Native
from collage_neuron.passes.backends.native.driver import write_driver
from collage_neuron.passes.backends.native.kernel import write_kernel
from collage_neuron.passes.backends.native.machine import Target, binding
from collage_neuron.passes.backends.protocol import Launch, Measure
from collage_neuron.passes.backends.reference import BACKEND as REFERENCE
from collage_neuron.passes.backends.reference import Reference

needs_code = pytest.mark.skipif(NATIVE.missing() is not None, reason=f"no native code here: {NATIVE.missing()}")
CPU = torch.device("cpu")

TARGETS = {
    "x86-64-v3": Target("x86_64-unknown-linux-gnu", "x86-64-v3", "", 8),
    "x86-64-v4": Target("x86_64-unknown-linux-gnu", "x86-64-v4", "", 16),
    "neoverse-n1": Target("aarch64-unknown-linux-gnu", "neoverse-n1", "", 4),
}
VECTORS = {"x86-64-v3": r"vaddps.*%ymm", "x86-64-v4": r"vaddps.*%zmm", "neoverse-n1": r"fadd\tv\d+\.4s"}
"""An addition of all numbers of a register."""

CONTRACTED = re.compile(r"\bv?fn?m(add|sub|la|ls)")
"""Instructions that multiply and add with one rounding."""


class Recorder(Reference):
    """Keeps the launches of the last step, as they were before it."""

    name = "recorder"

    def run(self, launches: Sequence[Launch]) -> Sequence[Measure]:
        self.launches = copies_of(launches)
        return super().run(launches)


@cache
def recorded(strategy: str) -> list[Launch]:
    """The second step of AdamW."""
    with registered(Recorder()) as backend:
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(n, generator=generator).bfloat16()) for n in (1, 50, 333)]
        optimizer = collage_neuron.compile(
            torch.optim.AdamW(params, lr=1e-2), strategy=strategy, backend="recorder", validate="off"
        )
        for _ in range(2):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            optimizer.step()
    return backend.launches


@needs_code
@pytest.mark.parametrize("strategy", ["plus", "fp32", "stochastic", "split311"])
@pytest.mark.parametrize("name", TARGETS)
def test_it_compiles_for_other_cpus_with_their_vectors_and_without_contraction(name: str, strategy: str) -> None:
    """Compiled for, not run."""
    llvm, target = binding(), TARGETS[name]
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    launch = recorded(strategy)[0]
    dtypes = [t.dtype for t in launch.reads[0]]  # it writes nothing else
    assembly = target.assembly(llvm, write_kernel(launch.update, False, dtypes, target.width).text)
    assert re.search(VECTORS[name], assembly)
    assert not CONTRACTED.search(assembly)
    assert "share" in target.assembly(llvm, write_driver(target.architecture))


@needs_code
@pytest.mark.skipif(platform.machine() != "x86_64", reason="narrower vectors of x86")
@pytest.mark.parametrize("width", [4, 8])
def test_narrower_vectors_have_the_same_bits(width: int) -> None:
    """With the instructions of AVX2 alone, run here."""
    backend = Native()
    backend._engine = Engine(Target("x86_64-unknown-linux-gnu", "x86-64-v3", "", width))
    for strategy in ("plus", "stochastic", "split311"):
        found, wanted = copies_of(recorded(strategy)), copies_of(recorded(strategy))
        backend.run(found)
        REFERENCE.run(wanted)
        for x, y in zip(found, wanted, strict=True):
            assert_same(x.update, x.writes, y.writes)


# What a machine may lack -------------------------------------------------------------------------------------------


def broken() -> Any:
    """What `import llvmlite.binding` does where its library does not fit."""
    raise OSError("libllvmlite.so: version `GLIBC_2.28' not found")


def lacking(monkeypatch: pytest.MonkeyPatch, what: str) -> Native:
    """A backend where something is missing."""
    if what == "libgomp":
        monkeypatch.setattr(module, "loaded_libgomp", lambda: None)
    elif what == "llvmlite":
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == what else find(name))
    elif what == "version":
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.44.0")
    elif what == "library":
        monkeypatch.setattr(machine, "binding", broken)
    else:
        monkeypatch.setattr(platform, what, lambda: "Plan9")
    return Native()


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("libgomp", "torch has not loaded libgomp, on whose threads the code would run"),
        ("llvmlite", r"llvmlite is not installed: pip install 'llvmlite>=0\.45'"),
        ("version", r"llvmlite 0\.44\.0 is too old, 0\.45 or newer is needed: pip install 'llvmlite>=0\.45'"),
        ("library", r"llvmlite cannot be used here \(OSError: libllvmlite.so: version `GLIBC_2.28' not found\)"),
        ("system", "code is made for Linux on x86-64 and ARM64, and this is Plan9 on "),
        ("machine", "code is made for Linux on x86-64 and ARM64, and this is Linux on Plan9"),
    ],
)
def test_what_is_missing_is_said(what: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what in ("llvmlite", "version", "library") and machine.loaded_libgomp() is None:
        pytest.skip("there is no libgomp either")
    backend = lacking(monkeypatch, what)
    assert not backend.suits(CPU)
    assert list(backend.found()) == []
    with pytest.raises(ValueError, match=rf"backend='native' cannot run here: {reason}.*; use backend='auto'"):
        backend.prepare(CPU)
    monkeypatch.setattr(module, "BACKEND", backend)  # that of this process remembers that nothing is missing
    assert registry.choose("auto", CPU).name == "reference"
    assert [row for row in doctor.backends() if row[0] == "native" and re.match(reason, row[1]) and row[2] == "-"]


def test_it_serves_the_cpu_alone() -> None:
    message = "backend='native' does not run on meta devices, but the parameters are on meta; use backend='auto'"
    with pytest.raises(ValueError, match=message):
        registry.choose("native", torch.device("meta"))
