"""Words that blocks of elements share, in native code: rows of any length, passes over blocks, what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from exact import graph_of
from natively import Beside, check
from running import registered
from torch import Tensor

import collage_neuron
from collage_neuron.numerics.block_formats import BLOCK
from collage_neuron.numerics.eft import bits_of, block_max, narrow, power_of_two, widen
from collage_neuron.numerics.formats import FORMATS, Component, Format
from collage_neuron.numerics.reductions import count, total
from collage_neuron.passes.backends.native import backend as module
from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE
from collage_neuron.passes.backends.protocol import Launch
from collage_neuron.passes.ir.scalars import Scalar, ScalarProgram
from collage_neuron.passes.ir.update import Update

pytestmark = pytest.mark.skipif(NATIVE.missing() is not None, reason=f"no native code here: {NATIVE.missing()}")

LENGTHS = (1, 2, 31, 127, 128, 129, 255, 256, 300)


def update_with_blocks(scale: str = "fp32", measured: bool = False, unread: tuple[str, ...] = ()) -> Update:
    """Each element's share of its block's largest, in three passes; what later ones need are numbers, bits and masks.

    The largest of 1 / x is infinite where x is 0, as it is beyond the end of a row.
    """

    def body(x: Any, word: Any, *rest: Any) -> list[Any]:
        *_, index, c = rest
        x, old = widen(x), widen(word)
        small, parity = torch.abs(x) < 1.0, index & 1
        first = power_of_two(block_max(x * old, BLOCK)) * c
        second = block_max(1.0 / (x + first), BLOCK)
        share = widen((bits_of(x) ^ bits_of(second)) & 0xFFFFF)
        y = torch.where(small, share, x * 0.5 + widen(parity) * second)
        third = block_max(old, BLOCK) + c
        out = [narrow(y, "fp32"), narrow(first + third if scale == "fp32" else widen(word), scale)]
        return [*out, *([total(y), total(first), count(small), count(y > x)] if measured else [])]

    graph = graph_of(("param", "param_scale", *unread, "index", "c0"), body)
    kinds = Component("", "fp32"), Component("_scale", scale, f"block:{BLOCK}")
    fmt = Format("ours", kinds, encode=FORMATS["fp32"].encode, decode=FORMATS["fp32"].decode)
    extra: dict[str, Any] = {"sums": ("y", "first"), "counts": ("small", "grown")} if measured else {}
    program = ScalarProgram([("fp32", Scalar("*", (3, 1)))])
    return Update.elementwise(
        graph, ("param", "param_scale", *unread), ("param", "param_scale"), program, {"param": fmt}, draws=True, **extra
    )


def tensors(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    words = (*shape[:-1], -(-shape[-1] // BLOCK))
    return [torch.randn(tuple(shape), generator=generator) + 0.1, torch.rand(words, generator=generator).to(dtype)]


def launch(update: Update, *parameters: Sequence[Tensor], finite: Tensor | None = None) -> Launch:
    rows = [list(x) for x in parameters]
    return Launch(update, torch.tensor([0.3]), rows, rows, finite)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    monkeypatch.setattr(module, "ALONE", 0)
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("many", [1, 3])
def test_rows_of_every_length_in_one_launch(many: int, threads: Callable[[int], None]) -> None:
    threads(many)
    update = update_with_blocks()
    check(launch(update, *(tensors((3, n)) for n in range(1, 2 * BLOCK + 2))))
    check(*(launch(update_with_blocks(measured=True), tensors((n,)), tensors((2, 2, n))) for n in LENGTHS))


def test_an_input_that_the_update_does_not_read_is_not_loaded() -> None:
    """As the gradient of a step that only decays the weights: it was left to the reference, for want of a value."""
    update = update_with_blocks(unread=("grad",))
    (x, words), unread = tensors((3, 300)), torch.full((3, 300), torch.nan)
    check(Launch(update, torch.tensor([0.3]), [[x, words, unread]], [[x, words]], None))


def test_a_nan_is_the_largest_of_its_block_alone() -> None:
    given = tensors((4, 300))
    given[0][1, 130] = torch.nan
    given[0][2, 0] = torch.inf
    check(launch(update_with_blocks(), given))
    assert given[1].isinf().nonzero().tolist() == [[1, 1], [2, 0]]


def test_rows_that_do_not_follow_one_another_are_copied_and_put_back() -> None:
    x, words = tensors((5, 300))
    check(launch(update_with_blocks(), [x.mT.contiguous().mT, words]))


def test_words_of_blocks_that_are_not_fp32_are_left_to_the_reference() -> None:
    check(launch(update_with_blocks("bf16"), tensors((3, 200), torch.bfloat16)), left=1)


@pytest.mark.parametrize("strategy", ["split423", "split422", "split311"])
def test_a_monitored_optimizer_that_skips_a_step_beside_other_formats(strategy: str) -> None:
    """Sums and counts of blocks, and rows of several lengths, next to parameters without blocks."""
    with registered(Beside()) as backend:
        generator = torch.Generator().manual_seed(0)
        params = [
            torch.nn.Parameter(torch.randn(s, generator=generator).bfloat16()) for s in ((3, 300), (256,), (), (4, 7))
        ]
        optimizer = collage_neuron.compile(
            torch.optim.AdamW(params, lr=1e-2), strategy=strategy, backend="beside", validate="off", nonfinite="skip"
        )
        with collage_neuron.monitor(optimizer, every=1):
            for step in range(3):
                for p in params:
                    p.grad = torch.randn(p.shape, generator=generator).bfloat16()
                    p.grad.view(-1)[0] *= torch.inf if step == 1 else 1.0
                optimizer.step()
    assert backend.measured >= 2 * len(params)
