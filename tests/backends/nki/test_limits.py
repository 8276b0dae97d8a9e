"""Every check of the stand-in has a kernel that violates it, and the message it gives names the kernel's line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nki_standin
import pytest
import torch
from nki_standin import Device, StandinError
from nki_standin.tensors import MemoryRegion
from standin_limits import BETA1_LIMITS, ENDS, LIMITS, MUTABLE, Limit, beta1_source, ending, mutable, source

A = torch.ones(128, 64, dtype=torch.bfloat16)


def run(path: Path, text: str, limit: Limit, dialect: str = "nki", *args: Any) -> Any:
    path.write_text(text)
    with nki_standin.install(dialect, limit.on, Device(**limit.device)):  # type: ignore[arg-type]
        kernel = nki_standin.load(path).kernel
        return (kernel[limit.cores] if limit.cores > 1 else kernel)(*(args or (A.clone(),)))


NO = Limit("", "")
INPUTS: dict[str, tuple[Any, str]] = {
    "on a device": (torch.ones(2, device="meta"), "input a is on meta; the stand-in takes CPU tensors"),
    "a list": ([1, 2], "argument a is a list; a kernel takes tensors"),
    "complex": (torch.ones(2, dtype=torch.complex64), "input a is of type complex64"),
    "empty": (torch.ones(0), "input a has no elements"),
}
CASES: dict[str, tuple[str, str, Limit, str, tuple[Any, ...]]] = {
    **{name: (limit.message, source(limit), limit, "nki", ()) for name, limit in LIMITS.items()},
    **{f"beta1, {name}": (x.message, beta1_source(x), x, "beta1", ()) for name, x in BETA1_LIMITS.items()},
    **{f"ends, {name}": (message, ending(body), NO, "nki", ()) for name, (body, message) in ENDS.items()},
    **{f"input {name}": (message, source(Limit("pass", "")), NO, "nki", (x,)) for name, (x, message) in INPUTS.items()},
    **{f"mutable, {name}": (message, mutable(body), NO, "beta1", ()) for name, (body, message) in MUTABLE.items()},
}


@pytest.mark.parametrize("name", CASES)
def test_limit(name: str, tmp_path: Path) -> None:
    message, text, limit, dialect, inputs = CASES[name]
    with pytest.raises(StandinError, match=message):
        run(tmp_path / "kernel_file.py", text, limit, dialect, *inputs)


@pytest.mark.parametrize("on", ["trn1", "trn2", "trn3"])
def test_the_kernel_without_a_violation_runs(on: str, tmp_path: Path) -> None:
    assert torch.equal(run(tmp_path / "kernel_file.py", source(Limit("pass", "")), Limit("", "", on)), A)
    if on != "trn3":
        limit = Limit("pass", "", on)
        assert torch.equal(run(tmp_path / "kernel_file.py", beta1_source(limit), limit, "beta1"), A)


def test_a_message_names_the_line_of_the_kernel(tmp_path: Path) -> None:
    limit = LIMITS["arity"]
    line = next(i for i, text in enumerate(source(limit).splitlines(), 1) if limit.body in text)
    with pytest.raises(StandinError, match=f"^kernel_file.py:{line}: "):
        run(tmp_path / "kernel_file.py", source(limit), limit)


FEATURES = {
    "abs as an ALU operator": ("nisa.tensor_scalar(new, x, nl.abs, None)", 2),
    "tensor_copy on gpsimd": ("nisa.tensor_copy(new, x, engine=nisa.engine.gpsimd)", 2),
    "200 KiB of SBUF": ("t = nl.ndarray((128, 102400), dtype=nl.bfloat16)", 3),
    "250 KiB of SBUF": ("t = nl.ndarray((128, 128000), dtype=nl.bfloat16)", 4),
}


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("on", "generation"), [("trn1", 2), ("trn2", 3), ("trn3", 4)])
def test_a_feature_is_there_from_its_generation_on(feature: str, on: str, generation: int, tmp_path: Path) -> None:
    body, since = FEATURES[feature]
    limit = Limit(body, "", on)
    if generation >= since:
        run(tmp_path / "kernel_file.py", source(limit), limit)
        return
    with pytest.raises(StandinError, match=r"NeuronCore-v|exceeds the"):
        run(tmp_path / "kernel_file.py", source(limit), limit)


def test_what_a_kernel_stores_into_an_input_reaches_the_caller(tmp_path: Path) -> None:
    a = torch.ones(128, 64, dtype=torch.bfloat16)
    body = "nl.store(a, value=nisa.memset((128, 64), 3.0, nl.bfloat16))\nreturn a"
    out = run(tmp_path / "kernel_file.py", mutable(body), Limit("", ""), "beta1", a)
    assert torch.equal(a, torch.full_like(a, 3))
    assert torch.equal(out, a)


def test_an_assigned_result_is_the_destination_of_its_instruction(tmp_path: Path) -> None:
    body = "p = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.psum)\np[:, 0:32] = nisa.tensor_copy(f[:, 0:32])"
    (tmp_path / "kernel_file.py").write_text(beta1_source(Limit(body, "")))
    with nki_standin.install("beta1", "trn1") as machine:
        nki_standin.load(tmp_path / "kernel_file.py").kernel(A)
    copies = [r.buffers for r in machine.trace.records if r.instruction == "tensor_copy"]
    assert copies == [("psum", "sbuf")]
    assert machine.trace.live_bytes(MemoryRegion.psum) == 256


def test_the_older_dialect_ends_with_trn2() -> None:
    with pytest.raises(ValueError, match=r"neuronxcc.nki has no target trn3"), nki_standin.install("beta1", "trn3"):
        pass
