"""Steps of native code: sizes, threads, memory, skipped steps, measurements (sums in runs of fp32), the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import graph_of
from natively import assert_same, check, copies_of, of_reference, results
from torch import Tensor
from worlds import run_script

from collage_neuron.numerics.eft import bf16, narrow, stochastic_round, widen
from collage_neuron.numerics.reductions import count, total
from collage_neuron.passes.backends.native import backend as module
from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE
from collage_neuron.passes.backends.native.kernel import RUN
from collage_neuron.passes.backends.protocol import Launch
from collage_neuron.passes.backends.reference import BACKEND as REFERENCE
from collage_neuron.passes.ir.scalars import Scalar, ScalarProgram
from collage_neuron.passes.ir.update import Update

pytestmark = pytest.mark.skipif(NATIVE.missing() is not None, reason=f"no native code here: {NATIVE.missing()}")

DTYPES = {"p": torch.bfloat16, "g": torch.bfloat16, "m": torch.float32}


def momentum(draws: bool = False, measured: bool = False) -> Update:
    """m = 0.9 m + c0 g; p = p - m, p in bf16; with a sum and a count of m if `measured`."""

    def body(p: Any, g: Any, m: Any, *rest: Any) -> list[Any]:
        *index, c = rest
        new = widen(m) * 0.9 + widen(g) * c
        q = widen(p) - new
        stored = stochastic_round(q, index[0] & 0xFFFF) if draws else bf16(q)
        measures = [total(new), total(new * new), count(new > 0.0)] if measured else []
        return [narrow(stored, "bf16"), narrow(new, "fp32"), *measures]

    extra: dict[str, Any] = {"sums": ("m", "m2"), "counts": ("positive",)} if measured else {}
    graph = graph_of(["p", "g", "m", *(["index"] if draws else []), "c0"], body)
    program = ScalarProgram([("fp32", Scalar("*", (3, 1)))])
    return Update.elementwise(graph, ("p", "g", "m"), ("p", "m"), program, {}, draws=draws, **extra)


def tensors(shape: Sequence[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=generator).to(dtype) for dtype in DTYPES.values()]


def launch(update: Update, *parameters: Sequence[Tensor], finite: Tensor | None = None, c: float = 0.3) -> Launch:
    return Launch(update, torch.tensor([c]), [list(x) for x in parameters], [[x[0], x[2]] for x in parameters], finite)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# Sizes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("many", [1, 2, 5])
def test_every_size_on_any_number_of_threads(
    many: int, draws: bool, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ALONE", 0)
    threads(many)
    update = momentum(draws, measured=not draws)
    step = 2 * NATIVE.engine.machine.target.width
    sizes = [*range(2 * step + 3), 5 * step, 8 * step + 1, 1000]
    check(launch(update, *(tensors([n], n) for n in sizes)))
    for n in (1, step, 3 * step - 1):
        check(launch(update, tensors([n])))


# Memory ------------------------------------------------------------------------------------------------------------


def test_a_word_at_any_offset() -> None:
    update = momentum()
    for first in range(1, 4):
        check(launch(update, [t[first:] for t in tensors([100])]))


def test_words_that_lie_apart_of_parameters_that_are_not_alike() -> None:
    """Each of them is a group of its own."""
    both = [tensors([40], 1), [t.mT if i == 1 else t.mT.contiguous() for i, t in enumerate(tensors((8, 5), 2))]]
    new = [[torch.zeros_like(p), torch.zeros_like(m)] for p, _, m in both]
    x = Launch(momentum(), torch.tensor([0.3]), both, new)
    wanted = [results(REFERENCE, x.update, own, x.vector) for own in both]
    NATIVE.run([x])
    assert_same(x.update, new, wanted)


@pytest.mark.parametrize("draws", [False, True])
def test_what_is_dense_in_another_order(draws: bool) -> None:
    """Taken as it lies in memory, or as copies where random bits depend on the number of an element."""
    channels_last = [t.to(memory_format=torch.channels_last) for t in tensors((2, 3, 4, 5))]
    check(launch(momentum(draws), channels_last, [t.mT for t in tensors((6, 7))]))


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("other", [0, 1, 2])
def test_what_is_written_may_lie_in_another_order_than_the_rest(draws: bool, other: int) -> None:
    words = tensors((2, 3, 4, 5))
    words[other] = words[other].to(memory_format=torch.channels_last)
    turned = tensors((7, 6), 1)
    turned = [t.mT.contiguous() if i != other else t.mT for i, t in enumerate(turned)]
    check(launch(momentum(draws), words, turned))


def test_a_gradient_in_another_order_is_copied() -> None:
    update = momentum()
    p, g, m = tensors((6, 7))
    check(launch(update, [p, tensors((7, 6))[1].mT, m], [*tensors((6, 7), 1)]))
    check(launch(update, [p, g[:1].expand(6, 7), m]))
    check(launch(update, [p, torch.randn(6, 14).bfloat16()[:, ::2], m]))


def test_what_is_written_may_have_holes_that_stay_as_they_are() -> None:
    _, g, m = tensors((6, 7))
    wide = torch.randn(6, 14).bfloat16()
    x = launch(momentum(), [wide[:, ::2], g, m], tensors([5]))
    before = wide.clone()
    check(x)
    assert torch.equal(wide[:, 1::2], before[:, 1::2])
    assert not torch.equal(wide[:, ::2], before[:, ::2])


def test_what_is_written_in_one_place_twice_is_left_to_the_reference() -> None:
    _, g, m = tensors((6, 7))
    assert len(of_reference(NATIVE, [launch(momentum(), [torch.ones(1, 7).bfloat16().expand(6, 7), g, m])])) == 1


def shared(kind: str) -> list[list[Tensor]]:
    a, b = tensors([64], 1), tensors([64], 2)
    flat = torch.randn(96).bfloat16()
    if kind == "two parameters are one tensor":
        return [a, [a[0], b[1], b[2]]]
    if kind == "two parameters overlap":
        return [[flat[:64], a[1], a[2]], [flat[32:], b[1], b[2]]]
    if kind == "a gradient is another parameter":
        return [a, [b[0], a[0], b[2]]]
    return [[flat[:64], flat[32:], a[2]]]


@pytest.mark.parametrize(
    "kind",
    ["two parameters are one tensor", "two parameters overlap", "a gradient is another parameter", "its own gradient"],
)
def test_memory_that_is_shared_and_written_is_left_to_the_reference(kind: str) -> None:
    """Which takes one parameter after the other: the order matters."""
    x, y = shared(kind), shared(kind)
    assert len(of_reference(NATIVE, [launch(momentum(), *x)])) == len(x)
    torch.manual_seed(0)
    for one, other in zip(x, y, strict=True):
        for t, u in zip(one, other, strict=True):
            u.copy_(t)
    NATIVE.run([launch(momentum(), *x)])
    REFERENCE.run([launch(momentum(), *y)])
    assert_same(momentum(), [[p, m] for p, _, m in x], [[p, m] for p, _, m in y])


def test_memory_that_is_shared_and_only_read_is_no_matter() -> None:
    a, b = tensors([64], 1), tensors([64], 2)
    check(launch(momentum(), a, [b[0], a[1], b[2]]))
    flat = torch.randn(192).bfloat16()
    check(launch(momentum(), *([flat[64 * i : 64 * i + 64], *tensors([64], i)[1:]] for i in range(3))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_any_dtype(dtype: torch.dtype) -> None:
    p, g, m = tensors([100])
    check(launch(momentum(), [p, g.to(dtype) * 1.1, m], tensors([40])), left=int(dtype == torch.float64))


def _ask(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    raise AssertionError("it was asked")


class Doubled(Tensor):
    """A tensor whose numbers are not those in its memory."""

    __torch_dispatch__ = staticmethod(_ask)  # type: ignore[assignment]  # torch's stub has no `func`


def test_a_subclass_with_operations_of_its_own_is_asked() -> None:
    p, g, m = tensors([10])
    odd = torch.Tensor._make_subclass(Doubled, g)
    assert of_reference(NATIVE, [launch(momentum(), [p, odd, m])]) == [(0, 0)]
    with pytest.raises(AssertionError, match="it was asked"):
        NATIVE.run([launch(momentum(), [p, odd, m])])


def test_a_gradient_that_is_negated_when_it_is_read() -> None:
    p, _, m = tensors([1])
    odd = torch.tensor([1 + 2j]).conj().imag
    assert odd.is_neg()
    check(launch(momentum(), [p, odd, m]), left=1)


def test_who_writes_tells_autograd() -> None:
    p, g, m = tensors([100])
    before = [t._version for t in (p, g, m)]
    NATIVE.run([launch(momentum(), [p, g, m])])
    assert [t._version - v for t, v in zip((p, g, m), before, strict=True)] == [1, 0, 1]


# Skipped steps, measurements ---------------------------------------------------------------------------------------


@cache
def summed() -> Update:
    """z = x + y + 1, which is not 0 beyond the end; sums of z and of x * z, counts of positive z, and of z but 0."""

    def body(x: Any, y: Any) -> list[Any]:
        z = widen(x) + widen(y) + 1.0
        return [narrow(z, "fp32"), total(z), total(widen(x) * z), count(z > 0.0), count(z != 0.0)]

    names: dict[str, Any] = {"sums": ("z", "x*z"), "counts": ("positive", "not 0")}
    return Update.elementwise(graph_of("xy", body), ("x", "y"), ("x",), ScalarProgram(), {}, **names)


def given(n: int) -> tuple[Tensor, Tensor]:
    """Numbers of many magnitudes; x + y is -1 for some."""
    generator = torch.Generator().manual_seed(n)
    x, y = torch.randn(2, n, generator=generator) * torch.exp2(torch.randn(2, n, generator=generator) * 4)
    y[torch.rand(n, generator=generator) < 0.2] *= 0
    return torch.where(y == 0, -1.0, x), y


LENGTHS = (0, 1, 31, 33, 32 * RUN - 1, 32 * RUN, 32 * RUN + 1, 32 * RUN + 33, 96 * RUN + 40, 100_003)


@pytest.mark.parametrize("n", LENGTHS)
def test_every_element_is_counted_once(n: int) -> None:
    """Counts are exact, and sums within 15 roundings of 2**-24 of the magnitudes."""
    x, y = given(n)
    z = x + y + 1.0
    terms = torch.stack([z, x * z]).double()
    (found,) = NATIVE.run([Launch(summed(), torch.zeros(0), [[x, y]], [[x]])])
    assert ((found.sums - terms.sum(1)).abs() <= 15 * 2.0**-24 * terms.abs().sum(1)).all()
    assert found.counts.tolist() == [int((z > 0).sum()), int((z != 0).sum())]


# The process -------------------------------------------------------------------------------------------------------


def test_subnormal_numbers_are_kept_in_any_mode() -> None:
    """And the mode is what it was, on every thread."""
    update = momentum()
    tiny = [torch.full([100], 3e-39, dtype=d) for d in DTYPES.values()]
    (p, m) = results(REFERENCE, update, tiny, torch.tensor([0.3]))
    torch.set_flush_denormal(True)
    try:
        found = [t.clone() for t in tiny]
        NATIVE.run([launch(update, found)])
        assert (torch.tensor([1e-39]) * 0.5).item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert_same(update, [[found[0], found[2]]], [[p, m]])
    assert (torch.tensor([1e-39]) * 0.5).item() != 0.0


def test_another_thread_may_step() -> None:
    x = launch(momentum(), tensors([1 << 17]))
    copies = copies_of([x])
    thread = threading.Thread(target=NATIVE.run, args=([x],))
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    REFERENCE.run(copies)
    assert_same(x.update, x.writes, copies[0].writes)


FORK = """
import os, sys, torch
import test_steps as here
from collage_neuron.passes.backends.native import machine
from collage_neuron.passes.backends.native.backend import BACKEND
torch.set_num_threads(2)
big = here.tensors([1 << 17])  # made here, since torch's own threads would be waited for in the child
step = lambda: BACKEND.run([here.launch(here.momentum(), big)])
torch.randn(1 << 20).exp().sum()  # torch's threads run now, and a fork does not copy them
for when in ("before native code is made", "after it"):
    child = os.fork()
    if child == 0:
        assert machine.was_forked()
        step()
        os._exit(7)
    assert not machine.was_forked()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    step()
"""


def test_a_forked_process_steps_alone() -> None:
    """Whether native code was made before the fork or after it."""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", FORK], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "7\n7\n", done.stderr


STEPPING = """
import threading
import torch
import collage_neuron

def train(k, strategy):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (1, 130, 70000)]
    optimizer = collage_neuron.compile(torch.optim.AdamW(params, lr=1e-2), strategy=strategy, verbose=False)
    start.wait()
    for step in range(4):
        for p in params:
            p.grad = torch.linspace(1, 2, p.numel()).bfloat16() / (step + 1)
        optimizer.step()
    found[k] = torch.cat([p.detach() for p in params])

for torchs, strategy in ((1, "split433"), (2, "plus")):  # another strategy has code of its own, to be made
    torch.set_num_threads(torchs)
    start, found = threading.Barrier(3), {}
    threads = [threading.Thread(target=train, args=(k, strategy)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3, "a thread raised"
    assert all(torch.equal(found[0], found[k]) for k in (1, 2)), "threads differ"
"""


def test_optimizers_in_threads_that_make_their_code_at_once() -> None:
    """Steps have addresses of kernels only: those of a thread must not be freed for those of another."""
    done = subprocess.run([sys.executable, "-c", STEPPING], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


GUARDED = """
import ctypes, mmap, torch, collage_neuron

def guarded(x):
    "The numbers of a tensor at the end of a page, with one after it that nobody may read."
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(first + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    made = torch.frombuffer(memory, dtype=x.dtype, offset=mmap.PAGESIZE - x.nbytes, count=x.numel())
    return made.copy_(x)

def trained(n, place):
    generator = torch.Generator().manual_seed(n)
    p = torch.nn.Parameter(place(torch.randn(n, generator=generator).bfloat16()))
    optimizer = collage_neuron.compile(torch.optim.AdamW([p]), strategy="plus", backend="native", verbose=False)
    for _ in range(3):
        p.grad = place(torch.randn(n, generator=generator).bfloat16())
        optimizer.step()
        for name, word in optimizer.state[p].items():
            if word.shape == p.shape:
                optimizer.state[p][name] = place(word)
    return p.detach()

for n in (16, 32, 48, 64, 65, 96, 100, 256, 1000):
    assert torch.equal(trained(n, guarded), trained(n, torch.clone)), n
print("nothing beyond was read")
"""


def test_nothing_is_read_beyond_a_tensor(tmp_path: Path) -> None:
    """A step ahead of the last one would be: the process ends with a signal then."""
    assert run_script(tmp_path, GUARDED) == "nothing beyond was read\n"
