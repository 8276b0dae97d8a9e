"""Updates in stages on kernels: norms and means of parameters, of rows and columns, and of parameters in another shape.

Evidence level: stand-in. Where no quotient of elements is in an update, its bits are those of the reference. What is
computed of each element has the bits of the reference, given the same values of rows and with quotients as products
with reciprocals; so have sums, but for one in some thousand.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import as_written
import nki_standin
import pytest
import sampling
import torch
from as_written import assert_near, everything, parameters, run
from headed import Blocks, Flat, Fused, Mini, Vectors
from nki_runs import INFINITY, bits, by_reciprocals
from planned import plan
from pytorch_optimizer import AdamMini, Ranger
from rowed import ByNeuron, Came, Factored, Normed, Outer
from staged import Chained, Clipping, Decaying, Lamb, Lars, Novograd, StableAdamW
from torch import Tensor
from torch.nn import Parameter
from worlds import run_script

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.backends.nki import calls, ir
from collage_neuron.passes.backends.nki.backend import run_step
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki, reason_against
from collage_neuron.passes.backends.nki.stages import Before, before_of
from collage_neuron.passes.backends.protocol import Launch
from collage_neuron.passes.backends.reference import ReferenceUpdate
from collage_neuron.passes.ir.stage import NUMBERS
from collage_neuron.passes.ir.update import Update
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.inner_optimizers import base_of

pytestmark = [
    pytest.mark.usefixtures("rejecting", "short_search", "dialect"),
    pytest.mark.filterwarnings("ignore::collage_neuron.ClampedDivisor", "ignore::UserWarning:pytorch_optimizer"),
]

SHAPES = ((24, 40), (24, 40), (1, 48), (48, 1), (3, 5, 37), (17,), (0, 36), (36, 0))
LONG = ((3, 1031), (700, 2))
HEADS = ((6, 10), (8, 8), (2, 6, 10), (1, 40))
STAGED = ((24, 40), (7,), (0, 3), (131, 3))


@pytest.fixture(params=["nki"])
def dialect(request: pytest.FixtureRequest, own_folder: None) -> Iterator[str]:
    with nki_standin.install(request.param, "trn1", INFINITY):
        yield request.param


def compiled(
    make: Any, name: str = "nki", strategy: Any = "fp32", shapes: Sequence[tuple[int, ...]] = SHAPES, **settings: Any
) -> tuple[Any, list[Parameter]]:
    settings = {"validate": "off", "backend": name, **settings}
    return as_written.compiled(make, strategy, shapes, verbose=False, **settings)


def found_by(make: Any, name: str, strategy: Any = "fp32", steps: int = 2, **settings: Any) -> Any:
    optimizer, _ = compiled(make, name, strategy, **settings)
    run(optimizer, steps)
    assert not bookkeeping(optimizer).as_written
    return everything(optimizer)[:2]


@pytest.mark.parametrize(
    ("make", "dialect", "shapes"),
    [(Mini, "nki", HEADS), (Vectors, "beta1", HEADS), (Lars, "nki", STAGED)],
    indirect=["dialect"],
)
def test_without_quotients_the_bits_are_the_same(make: Any, dialect: str, shapes: Sequence[tuple[int, ...]]) -> None:
    """And the user's own step confirms them."""
    found = found_by(make, "nki", "plus", 3, shapes=shapes, validate="on")
    assert found == found_by(make, "reference", "plus", 3, shapes=shapes)


def adamini(params: Any) -> Any:
    names = ("embed.weight", "q.weight", "mlp.weight")
    model = torch.nn.Module()
    for name, p in zip(names, params, strict=True):
        part = torch.nn.Module()
        part.register_parameter("weight", p)
        model.add_module(name.split(".")[0], part)
    return AdamMini(model, lr=0.02, num_embeds=40, num_heads=4)


PUBLISHED: list[tuple[Any, str, tuple[tuple[int, ...], ...]]] = [
    (Came, "nki", (*SHAPES, *LONG)), (Ranger, "nki", ((24, 40), (3, 5, 37), (17,))),
    (torch.optim.Adafactor, "nki", ((24, 40), (3, 5, 37), (17,))), (adamini, "nki", ((40, 24), (24, 24), (40, 24))),
]  # fmt: skip
OTHERS: list[tuple[Any, str, tuple[tuple[int, ...], ...]]] = [
    (Factored, "beta1", SHAPES), (ByNeuron, "nki", SHAPES),
    (Normed, "beta1", SHAPES), (Outer, "nki", SHAPES), (Fused, "nki", HEADS), (Blocks, "beta1", HEADS[:3]),
    (Flat, "nki", HEADS), (Lamb, "nki", STAGED), (StableAdamW, "beta1", STAGED), (Novograd, "beta1", STAGED),
    (Chained, "nki", STAGED), (Clipping, "nki", STAGED),
]  # fmt: skip


@pytest.mark.parametrize(("make", "dialect", "shapes"), sampling.part(PUBLISHED + OTHERS, 8), indirect=["dialect"])
def test_it_is_as_near_to_float64_as_fp32_is(make: Any, dialect: str, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Within 2**-17 of a step, two steps long: as test_rows.py of tests/optimizers has it, for one rounding more."""
    shapes = tuple(s for s in shapes if math.prod(s))
    optimizer, params = compiled(make, shapes=shapes)
    run(optimizer, 2)
    assert not bookkeeping(optimizer).as_written
    assert optimizer.param_groups[0]["collage_backend"] == "nki"
    exact = parameters(torch.float64, shapes)
    run(plain := make(exact), 2)
    assert_near(optimizer, params, exact, parameters(torch.float64, shapes), 2, 2**-17)
    for p, q in zip(params, exact, strict=True):
        for name in bookkeeping(optimizer).small.intersection(optimizer.state[p]):
            value, wanted = optimizer.state[p][name], plain.state[q][name]
            assert ((value - wanted).abs() <= 2**-18 * wanted.abs()).all()


class Elements:
    """Compares what kernels compute of each element with the reference, given what they are given."""

    def __init__(self) -> None:
        self.checked: list[str] = []

    def check(self, launch: Launch, rows: Sequence[Tensor], found: Sequence[Sequence[Tensor]]) -> None:
        wanted = ReferenceUpdate(by_reciprocals(launch.update))
        for reads, row, of_one in zip(launch.reads, rows, found, strict=True):
            for key, x, y in zip(launch.update.outputs, wanted(list(reads), row), of_one, strict=True):
                assert torch.equal(bits(x), bits(y.reshape(x.shape))), key
                self.checked.append(key)

    def before(self, launches: Sequence[Launch]) -> list[Before]:
        """In the place of `before_of`."""
        every = before_of(launches)
        for done in (x for x in every if x.rows is not None):
            assert done.rows is not None
            results = list(run_step([done.last], [done.rows]))
            self.check(done.last, done.rows.unbind(), [components for components, _ in results])
        return every

    def call(self, launches: Sequence[Launch], parts: Any, machine: Any, rows: Sequence[Tensor]) -> Iterator[Any]:
        """In the place of `call`, for what is added up."""
        results = list(calls.call(launches, parts, machine, rows))
        for part, of_one in zip(parts, results, strict=True):
            one = launches[part.launch]._replace(reads=[launches[part.launch].reads[part.parameter]])
            self.check(one, [rows[part.launch][part.parameter]], [[of_one[key] for key in part.kernel.outputs]])
        return iter(results)


def test_what_is_computed_of_elements_has_the_bits_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given the same values of rows: what is added up, and what is stored."""
    elements = Elements()
    monkeypatch.setattr("collage_neuron.passes.backends.nki.backend.before_of", elements.before)
    monkeypatch.setattr("collage_neuron.passes.backends.nki.stages.call", elements.call)
    for make in (Came, Outer, Normed):
        optimizer, _ = compiled(make, strategy="plus", shapes=((24, 40), (3, 5, 37)))
        run(optimizer, 2)
    assert {"param", "param_lo", "m", "operand0"} <= {*elements.checked}


def test_means_are_those_of_the_reference() -> None:
    """In the first step, in which they are means of the same elements."""
    found, wanted = (compiled(Came, name, "plus", ((24, 40), (0, 36), *LONG)) for name in ("nki", "reference"))
    run(found[0], 1)
    run(wanted[0], 1)
    other = 0
    for p, q in zip(found[1], wanted[1], strict=True):
        for name in {"sq_row", "sq_col"} & {*found[0].state[p]}:
            x, y = found[0].state[p][name], wanted[0].state[q][name]
            assert torch.allclose(x, y, rtol=2**-23, atol=0, equal_nan=True)
            other += int((x.nan_to_num(7.0) != y.nan_to_num(7.0)).sum())
    assert other <= 2


WORDS = {"param": "bf16", "momentum_buffer": "i16q4"}


@pytest.mark.parametrize(
    ("make", "strategy"), [(Mini, "split433"), (Mini, "stochastic"), (Lars, WORDS), (Decaying, "plus")]
)
def test_strategies(make: Any, strategy: Any) -> None:
    """Of the stochastic one the bits that are drawn are the engine's own."""
    shapes = HEADS[:2] if make is Mini else STAGED
    found, wanted = (found_by(make, name, strategy, shapes=shapes) for name in ("nki", "reference"))
    assert (found == wanted) == (strategy != "stochastic")


@pytest.mark.parametrize(("make", "dialect"), [(Came, "nki"), (Novograd, "beta1")], indirect=["dialect"])
def test_a_skipped_step_changes_nothing(make: Any, dialect: str) -> None:
    optimizer, params = compiled(make, shapes=((24, 40), (2, 6, 10)), nonfinite="skip")
    run(optimizer, 1)
    before = everything(optimizer)[:2]
    for p in params:
        p.grad = torch.full_like(p, torch.inf)
    optimizer.step()
    assert everything(optimizer)[:2] == before
    run(optimizer, 1)
    assert everything(optimizer)[:2] != before


@pytest.mark.parametrize(("make", "dialect"), [(Mini, "nki"), (Lars, "beta1")], indirect=["dialect"])
def test_groups(make: Any, dialect: str) -> None:
    """Each group's parameters have numbers of their own, and a rate; in the last step one has no gradient."""
    found = []
    for name in ("nki", "reference"):
        params = parameters(torch.bfloat16, ((24, 40), (6, 10), (24, 40), (8, 8)))
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.5}]
        optimizer = collage_neuron.compile(make(groups), strategy="plus", backend=name, verbose=False, validate="off")
        run(optimizer, 2)
        params[1].grad = None
        optimizer.step()
        found.append(everything(optimizer)[:2])
    assert found[0] == found[1]


def test_words_of_blocks_are_rejected() -> None:
    with pytest.raises(UnsupportedUpdate, match="words of blocks beside sums of rows or columns"):
        compiled(ByNeuron, strategy="split311", shapes=((40, 24),))
    with pytest.raises(UnsupportedUpdate, match="words of blocks of parameters seen in another shape"):
        compiled(Flat, strategy="split312", shapes=((8, 80),))


@pytest.mark.parametrize(("make", "loaded", "graphs"), [(Mini, 12, 3), (Factored, 16, 5), (Came, 24, 7)])
def test_what_it_costs(make: Any, loaded: int, graphs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/kernels.md: bytes that the last kernel loads, and calls of kernels, each of which is a graph on trn1."""
    called: list[Kernel] = []

    def noted(launches: Any, parts: Any, *others: Any) -> Any:
        called.append(parts[0].kernel)
        return calls.call(launches, parts, *others)

    for module in ("backend", "stages", "chunk_totals"):
        monkeypatch.setattr(f"collage_neuron.passes.backends.nki.{module}.call", noted)
    optimizer, _ = compiled(make, strategy="plus", shapes=((24, 40), (8, 8)))
    called.clear()
    run(optimizer, 1)
    assert (called[-1].cost.read, len(called)) == (loaded, graphs)
    assert all(kernel.plan.program.sums for kernel in called if kernel.outputs == ("measures",))


def update_of(make: Any) -> Update:
    """That of a matrix, in its second step, made for the reference."""
    p = Parameter(torch.ones(40, 40))
    optimizer = collage_neuron.compile(make([p]), strategy="plus", backend="reference", verbose=False)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        optimizer.step()
    (job,) = plan(base_of(type(optimizer)), optimizer, optimizer.param_groups[0], 0)
    return job.update


def test_what_has_no_instruction_is_known_before_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that such a step runs on copies, and no error comes when it has begun."""
    update = update_of(Lars)
    assert reason_against(update) is None
    monkeypatch.setattr(ir, "BINARY", {})
    assert "for which no NKI instruction is known" in str(reason_against(update))


def test_the_kernels_of_lamb(golden: Callable[[str, str], None]) -> None:
    """The docstring of the reduction: tensors, arithmetic and costs."""
    parts = [part for part in update_of(Lamb).parts if part.stages[0].kind != NUMBERS]
    reduction, last = (lower_to_nki(part, "trn1", "nki") for part in parts)
    golden("nki_lamb_plus.txt", reduction.source.split('"""')[1])
    assert sum(reduction.cost.instructions.values()) <= 80
    assert last.finds


@pytest.mark.slow
def test_on_a_trn1_that_is_played(dialect: str, tmp_path: Path) -> None:
    """On a device that records graphs, each kernel in one of its own; XLA's CPU is the core.

    Numbers are computed by XLA, which contracts products and sums: values of rows differ by an ulp.
    """
    pytest.importorskip("torch_xla")
    support = Path(__file__).parents[2] / "support"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{support / "played_trn1.py"}" "$@"\n')
    python.chmod(0o755)
    own = {
        "PLAYED_PYTHON": str(python), "PLAYED_DIALECT": dialect, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1",
        "COLLAGE_NEURON_CACHE": str(tmp_path / "kernels"), "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join([str(support), str(support.parents[1])]),
    }  # fmt: skip
    script = "import runpy, sys, warnings\nwarnings.simplefilter('ignore')\nsys.argv.pop(0)\n"
    script += "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    printed = run_script(tmp_path, script, support / "played_trn1.py", support / "rows_on_trn1.py", environ=own)
    assert printed.startswith("Came: 14 tensors agree\n")
