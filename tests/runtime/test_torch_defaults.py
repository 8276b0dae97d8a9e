"""What a process may have set, or what may happen to it, while a step runs: the step does the same, or says so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

import collage_neuron
from collage_neuron.errors import StepInterrupted
from collage_neuron.passes.backends.native.backend import BACKEND, Engine
from collage_neuron.runtime.step_call import plain_defaults

BACKENDS = ["reference", pytest.param("native", marks=pytest.mark.skipif(bool(BACKEND.missing()), reason="no code"))]


def made(backend: str, kind: Any = SGD, shape: tuple[int, ...] = (40,), **options: Any) -> tuple[Any, Optimizer]:
    p = torch.nn.Parameter(torch.linspace(-1, 1, 40).bfloat16().view(shape))
    return p, collage_neuron.compile(kind([p], **options), backend=backend)


def train(p: Any, optimizer: Optimizer, count: int, size: float = 1.0) -> None:
    for i in range(count):
        p.grad = torch.full(p.shape, (0.5 + i) * size, dtype=p.dtype, device="cpu")
        optimizer.step()


def words_of(p: Any, optimizer: Optimizer) -> list[torch.Tensor]:
    return [t.detach().clone() for t in (p, *optimizer.state[p].values())]


def in_meta() -> None:
    torch.set_default_device("meta")


def in_flush() -> None:
    torch.set_flush_denormal(True)


def in_bf16() -> None:
    torch.set_default_dtype(torch.bfloat16)


def in_float64() -> None:
    torch.set_default_dtype(torch.float64)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    torch.set_default_device(None)
    del torch._GLOBAL_DEVICE_CONTEXT.device_context  # None, which torch.get_default_device fails at
    torch.set_flush_denormal(False)
    torch.set_default_dtype(torch.float32)


@pytest.mark.validated
@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("setting", [in_meta, in_flush, in_bf16, in_float64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_takes_no_notice(backend: str, setting: Callable[[], None], first: int) -> None:
    """Neither its first ones, nor steady and validated ones; the numbers are subnormal in part."""
    options: Any = {"lr": 1e-3, "eps": 1e-40}
    (p, optimizer), (q, wanted) = (made(backend, AdamW, **options) for _ in range(2))
    train(p, optimizer, first, 1e-30)
    setting()
    train(p, optimizer, 5 - first, 1e-30)
    torch.set_default_device(None)
    assert (torch.tensor([1e-39]) * 0.5 == 0).item() == (setting is in_flush)  # as it was
    torch.set_flush_denormal(False)
    torch.set_default_dtype(torch.float32)
    train(q, wanted, first, 1e-30)
    train(q, wanted, 5 - first, 1e-30)
    assert all(map(torch.equal, words_of(p, optimizer), words_of(q, wanted)))


RUNS = Path(__file__).parents[1] / "support" / "surrounded_runs.py"


@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_a_setting_that_comes_first_in_a_process_changes_no_bit(device: str) -> None:
    """Of steps, checkpoints, averages and exact values."""
    if device == "xla":
        pytest.importorskip("torch_xla")
    commands = [[sys.executable, "-W", "ignore", str(RUNS), dtype, device] for dtype in ("float32", "bfloat16")]
    usual, other = (subprocess.run(c, capture_output=True, text=True, check=True).stdout for c in commands)
    assert usual.count("\n") == (7 if device == "cpu" else 2)
    assert other == usual


def test_the_default_dtype_is_restored_after_the_last_of_two_steps_at_once() -> None:
    torch.set_default_dtype(torch.bfloat16)
    with ExitStack() as other_thread:
        with plain_defaults():
            other_thread.enter_context(plain_defaults())
        assert torch.get_default_dtype() is torch.float32
    assert torch.get_default_dtype() is torch.bfloat16


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_without_memory_is_zero(backend: str) -> None:
    zero: Any = torch
    p, optimizer = made(backend, lr=0.5)
    train(p, optimizer, 3)
    before = words_of(p, optimizer)
    p.grad = zero._efficientzerotensor((40,), dtype=p.dtype)
    optimizer.step()
    assert all(map(torch.equal, words_of(p, optimizer), before))


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_of_another_shape_is_rejected(backend: str, count: int) -> None:
    p, optimizer = made(backend, shape=(4, 10), lr=0.5)
    optimizer.state.clear()
    train(p, optimizer, count)
    p.grad = torch.ones_like(p)
    p.data = p.data.view(10, 4).clone()
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"the gradient of .* has another shape|another shape than its state"):
        optimizer.step()
    assert torch.equal(p, before)


@pytest.mark.skipif(bool(BACKEND.missing()), reason="no code")
def test_an_interrupt_right_after_the_machine_code_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    p, optimizer = made("native", lr=0.5)
    train(p, optimizer, 4)  # the next one is not validated
    run = Engine.run

    def interrupted(*given: Any) -> Any:
        run(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(p, optimizer, 1)
    monkeypatch.undo()
    with pytest.raises(StepInterrupted, match=r"interrupted by an error \(KeyboardInterrupt: \)"):
        train(p, optimizer, 1)
