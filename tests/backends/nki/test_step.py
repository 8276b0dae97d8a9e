"""A step is one kernel for all parameters, an operator that graphs are traced through, and a file nobody else wrote.

What kernels compute is evidence of the level in pytest's header; what torch-xla makes of one is read as text, never
executed: no CPU has Trainium's custom call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nki_standin
import pytest
import torch
from nki_runs import INFINITY, bits, by_reciprocals
from planned import plan
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from worlds import run_script

import collage_neuron
from collage_neuron import errors
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.strategies import StrategyLike
from collage_neuron.passes.backends.nki import calls, custom_op, target
from collage_neuron.passes.backends.nki.backend import run_step
from collage_neuron.passes.backends.protocol import Launch
from collage_neuron.passes.backends.reference import ReferenceUpdate
from collage_neuron.passes.backends.registry import choose, get
from collage_neuron.runtime import rounding_probe
from collage_neuron.states.inner_optimizers import base_of

pytestmark = pytest.mark.usefixtures("rejecting", "own_folder")

SHAPES = [(3, 5), (300,), (0, 4), (129,), (), (2, 128)]


def groups_of(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[dict[str, Any]]:
    """Parameters in two groups with different learning rates, their gradients bf16 or fp32."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).bfloat16()) for s in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).bfloat16()
    return [{"params": params[:3]}, {"params": params[3:], "lr": 0.1}]


def launches_of(optimizer: Optimizer) -> list[Launch]:
    """What the next step would hand to a backend."""
    launches = []
    for i, group in enumerate(optimizer.param_groups):
        for job in plan(base_of(type(optimizer)), optimizer, group, i):
            vector = torch.tensor(job.update.scalars.run(job.recording.slots), dtype=torch.float32)
            tensors = [{**optimizer.state[p], "param": p.detach(), "grad": p.grad} for p in job.params]
            reads, writes = (
                [[t[k] for k in keys] for t in tensors] for keys in (job.update.inputs, job.update.outputs)
            )
            launches.append(Launch(job.update, vector, reads, writes))
    return launches


BLOCKS = ("split423", {"param": "bf16+int8", "*": "i16q4"})
"""Strategies under which blocks share words: rows of several lengths, and parameters without rows, in one kernel."""


def mixed(strategies: Sequence[StrategyLike] = ("plus", "full")) -> list[Launch]:
    """Two optimizers with two groups each: three different kernels, four scalar inputs."""
    adamw = collage_neuron.compile(AdamW(groups_of()), strategy=strategies[0])
    sgd = collage_neuron.compile(SGD(groups_of([(40,), (7,), (3, 9), (130,)]), momentum=0.9), strategy=strategies[1])
    for optimizer in (adamw, sgd):
        optimizer.step()
    return [*launches_of(adamw), *launches_of(sgd)]


@pytest.mark.parametrize("strategies", [("plus", "full"), BLOCKS], ids=["elements", "blocks"])
def test_a_step_is_what_the_reference_makes_of_parameters(strategies: Sequence[StrategyLike], kernels: str) -> None:
    launches = mixed(strategies)
    found = run_step(launches)
    for given in launches:
        reference = ReferenceUpdate(by_reciprocals(given.update))
        for components in given.reads:
            for new, wanted in zip(next(found)[0], reference(components, given.vector), strict=True):
                assert new.shape == wanted.shape
                assert torch.equal(bits(new), bits(wanted))
    assert next(found, None) is None


def test_all_groups_are_one_kernel_and_so_is_the_next_step(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    run = custom_op.function

    def counted(key: str) -> Callable[..., Any]:
        called.append(key)
        return run(key)

    monkeypatch.setattr(custom_op, "function", counted)
    optimizer = collage_neuron.compile(AdamW(groups_of()), strategy="plus")
    optimizer.step()
    for lr in (0.1, 0.0, 1.0):
        optimizer.param_groups[0]["lr"] = lr
        list(run_step(launches_of(optimizer)))
    assert len(called) == 3
    assert len(set(called)) == 1
    assert len(list(custom_op.folder().iterdir())) == 1


def program(names: int = 2) -> tuple[list[Tensor], list[Tensor], str]:
    """The arguments of the operator for a step of so many parameters."""
    optimizer = collage_neuron.compile(AdamW(groups_of([(5,)] * names + [(300,)])), strategy="plus")
    optimizer.step()
    taken: list[Any] = []

    def take(*arguments: Any) -> list[Tensor]:
        taken.append(arguments)
        return list(arguments[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("collage_neuron.passes.backends.nki.custom_op.update_tensors", take)
        next(run_step(launches_of(optimizer)))
    (arguments,) = taken
    tensors, scalars, key = arguments
    return tensors, scalars, key


@pytest.mark.parametrize("name", ["product_1", "param_in", "total", "range", "body", "PARTITIONS"])
def test_a_state_that_is_called_as_something_in_the_kernel_is_named(name: str) -> None:
    """The first two would be other numbers without an error."""

    class Sgd(Optimizer):
        def step(self, closure: None = None) -> None:  # type: ignore[override]  # takes none
            for p in self.param_groups[0]["params"]:
                momentum = self.state[p].setdefault(name, torch.zeros_like(p))
                p.data.add_(momentum.mul_(0.5).add_(p.grad), alpha=-0.125)

    (group, _) = groups_of()
    with nki_standin.install("nki", "trn2"):
        optimizer = collage_neuron.compile(Sgd(group["params"], {}), strategy="plus", backend="nki")
        with pytest.raises(UnsupportedUpdate, match=rf"{name} has two meanings in .*called so, rename it"):
            optimizer.step()


def test_graphs_are_traced_through_the_operator(kernels: str) -> None:
    tensors, scalars, key = program()

    def doubled(tensors: list[Tensor], scalars: list[Tensor]) -> list[Tensor]:
        return [2 * t for t in torch.ops.collage_neuron.update_tensors(tensors, scalars, key)]

    traced = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(traced(tensors, scalars), doubled(tensors, scalars), strict=True):
        assert torch.equal(found, wanted)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(custom_op.update_tensors, (tensors, scalars, key), test_utils=checks)


def test_on_xla_a_step_is_one_custom_call_over_its_buffers(golden: Callable[[str, str], None], tmp_path: Path) -> None:
    """In a process of its own: no CPU has an implementation of the call, and torch-xla does not forget the failure."""
    pytest.importorskip("torch_xla")
    out = run_script(tmp_path, (Path(__file__).parents[2] / "support" / "nki_on_xla.py").read_text())
    golden("nki_step_hlo.txt", out)
    assert out.count("custom-call(") == 1
    assert "4 buffers given to the results" in out  # param and param_lo of two parameters


def test_on_xla_a_flat_buffer_and_its_views_would_be_two_buffers(xla: torch.device) -> None:
    """Why parameters are not collected in one: it would double their memory."""
    import torch_xla
    from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # private

    flat = torch.zeros(300, device=xla)
    view = flat[:100].view(10, 10)
    torch_xla.sync(wait=True)
    flat.add_(1)
    assert "->(f32[300]{0}, f32[10,10]{1,0})" in xlac._get_xla_tensors_hlo([flat, view])


# As a user has it


def trained(backend: str, steps: int = 5) -> list[Tensor]:
    """Parameters and states after some steps of SGD, which divides by nothing, with a learning rate that changes."""
    optimizer = collage_neuron.compile(SGD(groups_of(), momentum=0.9), strategy="full", backend=backend)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [t for p in params for t in (p.detach(), *optimizer.state[p].values()) if isinstance(t, Tensor)]


def test_training_with_kernels_is_training_with_the_reference_backend_bit_for_bit(kernels: str) -> None:
    found, wanted = trained("nki"), trained("reference")
    assert all(torch.equal(bits(x), bits(y)) for x, y in zip(found, wanted, strict=True) if x.dim())


def test_explain_names_the_backend_and_the_probe_runs_on_it(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding_probe, "_failures_once", rounding_probe.failures)
    optimizer = collage_neuron.compile(AdamW(groups_of()), backend="nki")
    assert "backend nki" in collage_neuron.explain(optimizer)
    assert rounding_probe.failures(get("nki"), torch.device("cpu")) == []


def test_the_probe_refuses_a_device_that_keeps_fp32_in_bf16_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    with nki_standin.install("nki", "trn1", nki_standin.Device(precise=False)):
        assert "two_sum" in rounding_probe.failures(get("nki"), torch.device("cpu"))


def test_kernels_are_chosen_only_where_there_is_a_trainium(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose("auto", torch.device("cpu")).name in ("native", "reference")
    monkeypatch.setattr(target, "_kind", lambda device: "NC_v2")
    assert choose("auto", torch.device("xla:0")).name == "nki"
    monkeypatch.setattr(target, "_kind", lambda device: "CPU")
    assert choose("auto", torch.device("xla:0")).name == "xla"


@pytest.mark.parametrize("plug_in", [True, False])
def test_the_doctor_probes_kernels_where_nki_is(plug_in: bool, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if plug_in else None)
    assert bool(list(get("nki").found())) is plug_in
    monkeypatch.setattr(target, "DIALECTS", {})
    assert not list(get("nki").found())


# Tensors that offsets do not reach


@pytest.mark.parametrize("limit", [20_000, 19_999])
def test_a_tensor_beyond_its_offsets_is_rejected_untouched(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 bf16 elements, with a limit in place of 4 GiB, here and on the stand-in."""
    monkeypatch.setattr(calls, "ADDRESSED", limit)
    p = torch.nn.Parameter(torch.ones(10_000).bfloat16())
    p.grad = torch.ones_like(p)
    said = r"\[10000\] has 20,000 bytes, .* address 19,999 .*shard the parameter"
    with nki_standin.install("nki", "trn1", replace(INFINITY, addressed=limit)):
        optimizer = collage_neuron.compile(SGD([p], lr=0.5), strategy="light", backend="nki")
        if limit == 20_000:
            optimizer.step()
            assert (p == 0.5).all()
            return
        with pytest.raises(UnsupportedUpdate, match=said):
            optimizer.step()
        assert (p == 1.0).all()
        monkeypatch.setattr(calls, "ADDRESSED", 1 << 32)
        with pytest.raises(nki_standin.StandinError, match="reaches byte 20000"):
            optimizer.step()


# Which machine


def test_without_nki_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "DIALECTS", {"nki": lambda: None, "beta1": lambda: None})
    with pytest.raises(errors.NoMachine, match=r"needs the package nki, .*or neuronx-cc .*use backend='auto'"):
        target.machine_of(torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "generation"), [("trn1", "trn1"), ("inf2", "trn1"), ("gen3", "trn2"), ("trn3", "trn3")]
)
def test_the_target_follows_the_variable_that_nki_reads(
    name: str, generation: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(target.TARGET, name)
    assert target.machine_of(torch.device("cpu"))[:2] == (generation, kernels)


def test_an_unknown_generation_is_named(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(target.TARGET, "trn9")
    with pytest.raises(errors.NoMachine, match=r"cpu is a trn9; kernels exist for trn1, .*; set NEURON_PLATFORM"):
        target.machine_of(torch.device("cpu"))


# The folder of kernels


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_to_is_refused(mode: int) -> None:
    custom_op.folder().chmod(mode)
    with pytest.raises(errors.UnsafeFolder, match=r"can be written by other users: chmod 700 it, or name"):
        custom_op.load("kernel", "answer = 42\n")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners are a matter of POSIX")
def test_a_folder_of_somebody_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    custom_op.folder()
    monkeypatch.setattr(os, "getuid", lambda: -1)
    with pytest.raises(errors.UnsafeFolder):
        custom_op.folder()


def test_a_file_is_whole_or_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        custom_op.load("kernel", "answer = 42\n")
    assert list(custom_op.folder().iterdir()) == []
