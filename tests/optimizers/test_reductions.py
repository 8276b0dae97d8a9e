"""Updates with sums: norms, numbers, rows and heads: near float64, and on two backends alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import headed
import pytest
import rowed
import staged
import torch
from as_written import SHAPES as OF_ALL
from as_written import Make, Written, assert_near, equal, on_both_backends, parameters, run, values
from as_written import but_for_backends as bits
from as_written import compiled as compiled_on
from headed import Blocks, Flat, Mini
from pytorch_optimizer import CAME
from rowed import ByNeuron, Came, Factored
from staged import Lamb, Lars, Novograd
from torch import Tensor
from torch.nn import Parameter

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.backends.reference import BACKEND as REFERENCE
from collage_neuron.states.bookkeeping import bookkeeping

BACKENDS = ("reference", "native")
NUMBERS = ((24, 40), (40, 16), (16,), (1,), (0, 3))
ROWS = ((40, 40), (130, 33), (1, 48), (48, 1), (3, 5, 37), (17,), (0, 36), (36, 0))
HEADS = ((6, 10), (8, 8), (2, 6, 10), (4, 16), (1, 40), (40, 1), (64,))
"""Of the first one, heads begin and end within rows; of the second, rows and heads are of one number."""
LONG = ((130, 260), (3, 66, 33), (32, 32), (1, 129), (65, 64))
"""Rows that machine code takes."""

pytestmark = [pytest.mark.usefixtures("rejecting"), pytest.mark.filterwarnings("ignore::UserWarning:pytorch_optimizer")]


def backends_agree(steps: int, make: Make, *args: Any) -> bool:
    """Returns True if `compiled(make, *args)` has the same bits after the same steps, captured, on both backends."""

    def run_on(**settings: Any) -> Any:
        optimizer, _ = compiled_on(make, *args, verbose=False, **settings)
        run(optimizer, steps)
        assert not bookkeeping(optimizer).as_written
        return optimizer

    reference, native = on_both_backends(run_on)
    return bool(native == reference)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: torch.empty_like(t.mT.contiguous()).mT.copy_(t),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 1],
}


def large(make: Any, shapes: Any, backend: str, layout: Callable[[Tensor], Tensor] = Tensor.contiguous) -> list[Tensor]:
    """Parameters of several tiles and threads, in another order of memory, after three steps."""
    torch.manual_seed(0)
    params = [Parameter(layout(torch.randn(shape).bfloat16())) for shape in shapes]
    optimizer = collage_neuron.compile(make(params), strategy="full", backend=backend)
    for _ in range(3):
        for p in params:
            p.grad = layout(torch.randn(p.shape).bfloat16())
        optimizer.step()
    return values(optimizer, params)


def with_threads(run_with: Callable[[], list[Tensor]], count: int) -> list[Tensor]:
    """What a run gives on so many threads."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(count)
        return run_with()
    finally:
        torch.set_num_threads(threads)


class Case(NamedTuple):
    """An optimizer, and shapes of parameters."""

    make: Any
    shapes: tuple[tuple[int, ...], ...]


CASES = [
    *(Case(make, OF_ALL) for make in staged.ALL),
    *(Case(make, NUMBERS) for make in staged.ONE_NUMBER),
    *(Case(make, ROWS) for make in (*rowed.ALL, partial(CAME, lr=0.02, weight_decay=0.01))),
    *(Case(make, tuple(s for s in HEADS if make is not Blocks or math.prod(s[:-1]) % 2 == 0)) for make in headed.ALL),
]


@pytest.mark.sampled(of=3)  # of each optimizer one of the tests of this file that are sampled has an example
@pytest.mark.parametrize(("make", "shapes"), CASES)
def test_it_is_as_near_to_float64_as_fp32_is(make: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Within 2**-18 of a step, six steps long: some thirty roundings of 2**-24, of which few add up."""
    shapes = tuple(s for s in shapes if math.prod(s))
    optimizer, params = compiled_on(make, "fp32", shapes, verbose=False, validate="off")
    run(optimizer, 6)
    assert not bookkeeping(optimizer).as_written
    exact = parameters(torch.float64, shapes)
    plain = make(exact)
    run(plain, 6)
    assert_near(optimizer, params, exact, parameters(torch.float64, shapes), 6)
    for p, q in zip(params, exact, strict=True):
        for name, wanted in plain.state[q].items():
            found = optimizer.state[p][name]
            if not isinstance(wanted, Tensor):
                assert found == wanted
                continue
            assert found.shape == wanted.shape
            assert torch.allclose(found.double(), wanted.double(), rtol=2**-17, atol=2**-24)
            if name in bookkeeping(optimizer).small:
                assert found.dtype == torch.float32
                assert ((found - wanted).abs() <= 2**-19 * wanted.abs()).all()


OTHERS = [
    (Lamb, "split311", OF_ALL), (Lars, "stochastic", OF_ALL),
    *((Novograd, s, NUMBERS) for s in ("plus", "split311", "stochastic")),
    (Factored, "plus", ROWS), (Came, "split433", ROWS), (Factored, "stochastic", ROWS),
    *((Mini, s, HEADS) for s in ("plus", "stochastic")), (Flat, "stochastic", HEADS),
]  # fmt: skip


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize(("make", "strategy", "shapes"), [*((c.make, "full", c.shapes) for c in CASES), *OTHERS])
def test_backends_give_the_same_bits(make: Any, strategy: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Of every second shape, and of heads of another size."""
    assert backends_agree(3, make, strategy, (*shapes[::2], (64, 40)))


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("make", [c.make for c in CASES if c.shapes is not OF_ALL and c.shapes is not NUMBERS])
def test_machine_code_runs_all_of_it(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = ((64, 40),) if make in headed.ALL else LONG
    wanted, _ = compiled_on(make, "full", shapes, verbose=False, backend="reference", validate="off")
    run(wanted, 3)
    optimizer, _ = compiled_on(make, "full", shapes, verbose=False, backend="native", validate="off")

    def never(*args: Any) -> Any:
        raise AssertionError("left to the reference")

    monkeypatch.setattr(REFERENCE, "run_one", never)
    monkeypatch.setattr("collage_neuron.passes.backends.reference.RowSums.__call__", never)
    run(optimizer, 3)
    assert bits(optimizer) == bits(wanted)


LARGE: dict[Any, tuple[tuple[int, ...], ...]] = {Came: ((150, 300), (3, 70, 40)), Lamb: ((300, 517), (3, 20, 9, 7))}


@cache
def in_order(make: Any) -> list[Tensor]:
    return large(make, LARGE[make], "reference")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", LARGE)
def test_memory_order_does_not_matter(make: Any, backend: str, layout: str) -> None:
    assert equal(large(make, LARGE[make], backend, LAYOUTS[layout]), in_order(make))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", LARGE)
def test_threads_and_pieces_do_not_matter(make: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, three = in_order(make), with_threads(partial(large, make, LARGE[make], backend), 3)
    monkeypatch.setattr("collage_neuron.passes.backends.reference.CHUNK", 1 << 10)
    monkeypatch.setattr(REFERENCE, "_lowered", {})
    assert equal(one, three)
    assert equal(one, large(make, LARGE[make], backend))


UPDATES: dict[str, tuple[tuple[int, ...], Callable[[Any, Tensor, dict[str, Any]], object]]] = {
    "rows of the transpose": ((6, 6), lambda p, g, s: p.sub_(g.mT.contiguous().mean(dim=-1))),
    "a mean over another dimension than the last two": (
        (3, 4, 5),
        lambda p, g, s: p.sub_(g - g.mean(dim=0, keepdim=True)),
    ),
    "means of rows, beside columns: broadcasting takes one for the other": (
        (6, 6),
        lambda p, g, s: p.sub_(g - g.mean(dim=-1)),
    ),
    "a state that is of rows in one place, and of columns in another": (
        (6, 6),
        lambda p, g, s: p.sub_(g - s.setdefault("v", torch.zeros(6, device=p.device)).lerp_(g.mean(dim=-1), 0.1)),
    ),
    "means over the rows of each half, beside means of whole rows": (
        (6, 4),
        lambda p, g, s: p.sub_(g - g.view(2, -1, 4).mean(dim=1).mean() * g.mean(dim=1, keepdim=True)),
    ),
    "norms of order 4": ((6, 4), lambda p, g, s: p.sub_(g / (g.norm(p=4, dim=-1, keepdim=True) + 1e-6))),
    "heads of the transpose": ((8, 8), lambda p, g, s: p.sub_((g.mT.reshape(4, -1) / g.norm()).reshape(p.shape))),
    "half of the heads": ((8, 8), lambda p, g, s: p.view(4, -1)[:2].sub_(g.view(4, -1)[:2])),
    "means of heads beside means of rows": (
        (8, 8),
        lambda p, g, s: p.sub_((g.view(4, -1) / g.view(4, -1).norm(dim=1, keepdim=True)).view_as(p) - g.mean(1, True)),
    ),
    "a product of square matrices, of which one is a view": ((8, 8), lambda p, g, s: p.sub_(g.view(-1).view(8, 8) @ p)),
    "one head's mean to another head's elements": (
        (4, 16),
        lambda p, g, s: p.sub_((g.view(8, 8) - g.view(8, 8).mean(dim=1)).view(p.shape)),
    ),
}


@pytest.mark.parametrize("name", UPDATES)
def test_what_is_not_understood_is_rejected(name: str) -> None:
    shape, update = UPDATES[name]

    class Stepping(Written):
        def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            update(p, g, state)

    with pytest.raises(UnsupportedUpdate, match=r"not elementwise|of shape|has no rule"):
        compiled_on(Stepping, "split433", (shape,), verbose=False)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize(
    ("make", "strategy", "said"),
    [(ByNeuron, "split311", "beside sums of rows or columns"),
     (Flat, "split312", "of parameters seen in another shape yet: choose another strategy, or leave")],
)  # fmt: skip
def test_words_of_blocks_are_rejected(make: Any, strategy: str, said: str, backend: str) -> None:
    with pytest.raises(UnsupportedUpdate, match=f"words of blocks {said}"):
        compiled_on(make, strategy, ((8, 80),), verbose=False, backend=backend)
