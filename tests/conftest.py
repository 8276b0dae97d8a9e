"""Set-up shared by all tests: XLA's CPU device before torch_xla is imported, and one way to write `--update-golden`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from running import compiled_only

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
os.environ["USE_TORCH_XLA"] = (
    "0"  # read when accelerate is imported, by whichever test comes first: it stays on the CPU
)

import nki_backend
import pytest
import sampling
import torch
from hypothesis import settings

from collage_neuron.trace.placeholders import STEP
from collage_neuron.validation import validate

if not sampling.WHOLE:  # a third of the time in which XLA compiles: without vectorization, and each program in one part
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
    )

gc.disable()  # until the first test: it took a fifth of the time in which tests are collected
torch.set_num_threads(1)  # the tensors are small: threads cost more than they gain, the more so on a busy machine

settings.register_profile("collage", deadline=None, derandomize=True)
settings.load_profile("collage")

GOLDEN = Path(__file__).parent / "golden"

AMPLE = 1 << 31
"""Bytes of memory from which on a process of tests gives back what it has freed."""

TESTS = itertools.count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/ anew from what the code does")


def pytest_report_header() -> str:
    return nki_backend.header()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in name for name in config.args):
        items[:], left = sampling.sampled(items)
        config.hook.pytest_deselected(items=left)


@pytest.fixture(scope="session")
def xla() -> torch.device:
    """torch_xla's device; asked for before the first backward of the process, as torch_xla 2.9 needs."""
    torch_xla = pytest.importorskip("torch_xla")
    device: torch.device = torch_xla.device()
    return device


@pytest.fixture(scope="session", autouse=True)
def _before_all() -> None:
    """torch_xla 2.9 aborts in backward if its device was first asked for after a CPU backward.

    A million objects of libraries and tests are then frozen, and `compile`, which would list them, is told of none.
    """
    with contextlib.suppress(ImportError):
        import torch_xla

        torch_xla.device()
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.get_freeze_count = lambda: 0


@pytest.fixture(autouse=True)
def _no_step_goes_on() -> Iterator[None]:
    """No traced step is left behind as the one that operations of later tests would belong to."""
    yield
    assert STEP.get() is None
    if next(TESTS) % 4 == 0:  # `compile` lists all objects that are not frozen, several times: 10**5 after 100 tests
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _validated_twice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where tests are not about validation, an update is validated when it is new, and in the first two steps.

    In steps 4, 8, ... it took a tenth of the time of all tests, which have oracles of their own.
    """
    if not sampling.WHOLE and not request.node.get_closest_marker("validated"):
        monkeypatch.setattr(validate, "is_due", lambda steps: steps <= 2)


@pytest.fixture(scope="module", autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    """After a file, what is left of it is frozen too, and memory is given back.

    glibc keeps the memory of large tensors in pieces, several GB of it by the end of all files.
    """
    yield
    gc.collect()
    gc.freeze()
    pages = Path("/proc/self/statm")
    if pages.exists() and int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > AMPLE:
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def rejecting() -> Iterator[None]:
    """What cannot be compiled is rejected, and does not run as written."""
    with compiled_only():
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)`: text equals tests/golden/<name>; with --update-golden it is written instead."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text.rstrip() + "\n")
        assert path.exists(), f"{path.name} is missing; run pytest --update-golden and read the difference"
        assert text.rstrip() == path.read_text().rstrip()

    return check
