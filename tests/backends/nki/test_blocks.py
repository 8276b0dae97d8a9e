"""Words that blocks share on the stand-in: the bits of the reference, in both dialects (evidence level: stand-in)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.fx as fx
from nki_runs import differing, narrowed, run
from nki_standin import Device
from torch import Tensor

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.block_formats import BLOCK, spread
from collage_neuron.numerics.eft import Value, block_max, narrow, power_of_two, widen
from collage_neuron.numerics.formats import BUILT_IN, Component, Format
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.backends.reference import ReferenceUpdate
from collage_neuron.passes.ir.scalars import ScalarProgram
from collage_neuron.passes.ir.update import Update

pytestmark = pytest.mark.usefixtures("rejecting", "short_search")

MACHINES = [("trn1", "nki"), ("trn1", "beta1"), ("trn2", "nki")]
CODED = ("i16q4", "i8q4", "i16q8", "i8q8")
"""All as they round to nearest; what an update stores in 8 bits is drawn (test_draws.py)."""
NOTHING = torch.zeros(0)


def update_of(fmt: Format) -> Update:
    """x = the state's value + x, and the state = x: each word is read and written."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    *words, x = (fx.Proxy(graph.placeholder(name), tracer) for name in (*fmt.keys("state"), "x"))
    total = fmt.decode(words) + widen(x)
    stored = [*fmt.encode(total), narrow(total, "fp32")]
    graph.output(tuple(s.node for s in stored))
    keys = fmt.keys("state")
    return Update.elementwise(graph, (*keys, "x"), (*keys, "x"), ScalarProgram(), {"state": fmt})


def kernel_of(update: Update, target: str = "trn1", dialect: str = "nki") -> Kernel:
    return lower_to_nki(update, target, dialect, components={"x": "fp32"})


def expected(update: Update, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    results = ReferenceUpdate(update)([inputs[key] for key in update.inputs], NOTHING)
    return dict(zip(update.outputs, results, strict=True))


def words(name: str, shape: tuple[int, ...], scale: float = 0.0) -> dict[str, Tensor]:
    """Codes, powers of two (or one), and numbers to add, of magnitudes that blocks share; row 1 begins with zeros."""
    g = torch.Generator().manual_seed(math.prod(shape))
    dtype = BUILT_IN[name].components[0].type.dtype
    code = torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max + 1, shape, generator=g).to(dtype)
    blocks = (*shape[:-1], -(-shape[-1] // BLOCK))
    power = torch.full(blocks, scale) if scale else torch.randint(-67, 60, blocks, generator=g).float().exp2()
    x = torch.randn(shape, generator=g) * torch.randint(-9, 2, shape, generator=g).float().exp2()
    x *= spread(torch.randint(-72, 60, blocks, generator=g).float().exp2(), BLOCK, shape[-1])
    for zeros in (code, x):
        zeros.view(-1, shape[-1])[1:2, :BLOCK] = 0
    return {"state": code, "state_scale": power, "x": x}


def all_codes(name: str) -> dict[str, Tensor]:
    """Every code, in blocks in which a larger one stands too and in which none does."""
    dtype = BUILT_IN[name].components[0].type.dtype
    limits = torch.iinfo(dtype)
    code = torch.arange(limits.min, limits.max + 1).repeat(2 if dtype is torch.int16 else 128)
    given = words(name, (len(code) // 512, 512), scale=2.0**-3)
    given["state"] = code.to(dtype).view(-1, 512)
    return given | {"x": torch.zeros(given["x"].shape)}


@pytest.mark.parametrize(("target", "dialect"), MACHINES)
@pytest.mark.parametrize("name", CODED)
def test_every_code_is_read_and_written(name: str, target: str, dialect: str) -> None:
    update, inputs = update_of(BUILT_IN[name]), all_codes(name)
    assert not differing(run(kernel_of(update, target, dialect), inputs, NOTHING).results, expected(update, inputs))


SHAPES = [
    (1,), (5,), (127,), (128,), (129,), (384,), (3, 7), (2, 3, 200), (130, 130), (129, 300), (3, 256), (131, 128),
    (1, BLOCK * 129), (5, 1030), (2, 128 * 128 * 3 + 128), (643,), (1, 1027), (3, 128 * 5 + 1), (257, 200),
]  # fmt: skip


@pytest.mark.parametrize("dialect", ["nki", "beta1"])
@pytest.mark.parametrize("name", CODED)
def test_rows_of_every_length(name: str, dialect: str) -> None:
    """Whole blocks as flat tensors, others row by row; tiles of two or three blocks, so each path takes several."""
    update = update_of(BUILT_IN[name])
    kernel = kernel_of(update, "trn1", dialect)
    for i, shape in enumerate(SHAPES if name == "i16q4" else SHAPES[4:9]):
        inputs = words(name, shape)
        found = run(kernel, inputs, NOTHING, cut=narrowed(kernel, shape, (2 + i % 2) * BLOCK, BLOCK)).results
        assert not differing(found, expected(update, inputs)), shape


@pytest.mark.parametrize("name", CODED)
def test_with_roots_off_by_two_ulps_nothing_drifts(name: str) -> None:
    """What was decoded is encoded as the same words; of new values a code is off by one at most, no power of two."""
    update, inputs = update_of(BUILT_IN[name]), all_codes(name)
    inputs |= expected(update, inputs) | {"x": inputs["x"]}  # words that something was encoded as
    kernel, device = kernel_of(update), Device(overflow="infinity", ulps=2)
    found = run(kernel, inputs, NOTHING, device).results
    assert not differing({key: found[key] for key in ("state", "state_scale")}, inputs)
    inputs = words(name, (40, 512))
    found, right = run(kernel, inputs, NOTHING, device).results, expected(update, inputs)
    assert torch.equal(found["state_scale"], right["state_scale"])
    assert (found["state"].int() - right["state"].int()).abs().max() <= 1


def _powers(x: Value) -> list[Value]:
    return [narrow(x, "fp32"), narrow(power_of_two(block_max(x, BLOCK)), "fp32")]


def _first(found: Sequence[Value]) -> Value:
    return widen(found[0])


@pytest.mark.parametrize(
    ("encode", "decode", "layout", "message"),
    [
        (
            lambda x: [narrow(x, "fp32"), narrow(block_max(x, BLOCK), "fp32")],
            _first,
            BLOCK,
            r"largest magnitude of blocks of 128 \(node .*power of two alone",
        ),
        (
            lambda x: [narrow(x, "fp32"), narrow(power_of_two(block_max(x, 64)), "fp32")],
            _first,
            64,
            r"do not lay words out as block:64 yet; use .* whose words are block:128 or elementwise",
        ),
        (
            _powers,
            lambda found: widen(found[0]) * widen(widen(found[0]) > widen(found[1])),
            BLOCK,
            r"computes (less|greater) of words that blocks share and of elements \(node",
        ),
    ],
)
def test_what_no_kernel_does_is_rejected(encode: object, decode: object, layout: int, message: str) -> None:
    parts = (Component("", "fp32"), Component("_scale", "fp32", f"block:{layout}"))
    update = update_of(Format("own", parts, encode, decode))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedUpdate, match=message):
        kernel_of(update)
