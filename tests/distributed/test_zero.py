"""torch_xla's ZeroRedundancyOptimizer over a compiled class: shards of two and four ranks have the bits of one process.

torch_xla on the CPU has no collectives among processes. The ranks are objects of torch_xla's own class in this process,
and the collectives stand-ins that note what each rank hands to them. `test_neuron_libraries` runs the class as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from foreign import Lion
from models import REPRESENTATIVE, bits
from torch import nn
from torch.optim import AdamW

import collage_neuron
from collage_neuron import STRATEGIES
from collage_neuron.numerics.formats import format_named
from collage_neuron.numerics.strategies import has_blocks

pytest.importorskip("torch_xla")

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

Shapes = tuple[tuple[int, ...], ...]
ZeRO: Any = ZeroRedundancyOptimizer
SHAPES = ((6, 4), (3,))
"""Rows that are even and uneven on two and four ranks; with four, the last holds nothing but padding of the second."""
IN_ROWS = ((6, 4), (3, 2))
"""The same without a vector: shards would cut the one row that it is, and with it a block of elements."""
STEPS = 3


class Ranks:
    """ZeRO-1 on `size` ranks that see the same gradients, each with a copy of the parameters."""

    def __init__(
        self,
        size: int,
        strategy: str,
        monkeypatch: pytest.MonkeyPatch,
        nonfinite: str = "pass",
        shapes: Shapes | None = None,
    ) -> None:
        self.size, self.rank, self.nonfinite = size, 0, nonfinite
        self.again = partial(Ranks, size, strategy, monkeypatch, nonfinite, shapes)
        """Makes the same anew."""
        self.sent: list[list[torch.Tensor]] = []
        """What each rank handed to all-gather in the last step, in the order of the parameters."""
        self.reduced: list[torch.dtype] = []
        self.monkeypatch = monkeypatch
        self._enter()
        self.params = [parameters(strategy, shapes) for _ in range(size)]
        self.optimizers = [self.make(params, strategy) for params in self._each(self.params)]

    def _enter(self) -> None:
        """From now on the collectives are those of these ranks."""
        self.monkeypatch.setattr(xr, "global_device_count", lambda: self.size)
        self.monkeypatch.setattr(xr, "global_ordinal", lambda: self.rank)
        self.monkeypatch.setattr(xm, "reduce_scatter", self._reduce_scatter)
        self.monkeypatch.setattr(xm, "all_gather", self._all_gather)

    def _each(self, of_ranks: list[Any]) -> Iterator[Any]:
        for self.rank, of_rank in enumerate(of_ranks):  # xr.global_ordinal() reads it
            yield of_rank

    def make(self, params: list[nn.Parameter], strategy: str) -> Any:
        compiled = collage_neuron.compile(AdamW, strategy=strategy, nonfinite=self.nonfinite)
        return ZeRO(params, compiled, optimizer_dtype=torch.bfloat16, grad_clipping=False, lr=1e-2)

    def _reduce_scatter(self, kind: Any, t: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.reduced.append(t.dtype)
        return t.chunk(self.size)[self.rank].clone()  # the mean of equal gradients

    def _all_gather(self, t: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.sent[-1].append(t)
        return torch.cat([t] * self.size)  # for now; `step` puts in place what the others sent

    def step(self, seed: int, nan: bool = False) -> None:
        """A step, with a NaN in the last row of the first gradient or not."""
        self._enter()
        self.sent = []
        for optimizer in self._each(self.optimizers):
            self.sent.append([])
            set_gradients(self.params[self.rank], seed)
            if nan:
                self.params[self.rank][0].grad[-1] = torch.nan  # type: ignore[index]
            optimizer.step()
        for own in self.params:
            for p, *shards in zip(own, *self.sent, strict=True):
                p.data.copy_(torch.cat(shards)[: p.shape[0]])
        torch_xla.sync()

    def resumed(self) -> Ranks:
        """Others that go on from the weights and the `state_dict()` of these."""
        weights = [p.detach().cpu() for p in self.params[0]]
        saved = [copy.deepcopy(o.state_dict()) for o in self.optimizers]
        other = self.again()
        for optimizer in other._each(other.optimizers):
            for p, w in zip(other.params[other.rank], weights, strict=True):
                p.data.copy_(w.to(p.device))
            optimizer.load_state_dict(saved[other.rank])
        return other

    def gathered(self) -> dict[str, torch.Tensor]:
        """Parameters of the first rank, and all states, their shards put together and the padding cut off."""
        bases = [o.base_optimizer for o in self.optimizers]
        shards = [b.param_groups[0]["params"] for b in bases]
        found = {}
        for i, p in enumerate(self.params[0]):
            found[f"{i} param"] = bits(p)
            states = [b.state[s[i]] for b, s in zip(bases, shards, strict=True)]
            for key, value in states[0].items():
                whole = torch.cat([s[key] for s in states])[: p.shape[0]] if value.dim() > 0 else value
                found[f"{i} {key}"] = bits(whole)
        return found


def shapes(strategy: str) -> Shapes:
    return IN_ROWS if has_blocks(strategy) else SHAPES


def parameters(strategy: str, given: Shapes | None = None) -> list[nn.Parameter]:
    g, device = torch.Generator().manual_seed(0), torch_xla.device()
    return [nn.Parameter(torch.randn(s, generator=g).bfloat16().to(device)) for s in given or shapes(strategy)]


def set_gradients(params: list[nn.Parameter], seed: int) -> None:
    g = torch.Generator().manual_seed(100 + seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=g).bfloat16().to(p.device)


def unsharded(strategy: str) -> dict[str, torch.Tensor]:
    params = parameters(strategy)
    optimizer: Any = collage_neuron.compile(AdamW, strategy=strategy)
    optimizer = optimizer(params, lr=1e-2)
    for step in range(STEPS):
        set_gradients(params, step)
        optimizer.step()
        torch_xla.sync()
    return {f"{i} {k}": bits(v) for i, p in enumerate(params) for k, v in {"param": p, **optimizer.state[p]}.items()}


def different(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [k for k in expected if not torch.equal(found[k], expected[k])]


CASES = [(2, s) for s in REPRESENTATIVE if not s.startswith("stochastic")] + [(4, "full")]


def of_first(found: dict[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """The rows of the first rank."""
    return {k: v[: -(-len(v) // size)] if v.dim() else v for k, v in found.items()}


def draws(strategy: str) -> bool:
    """Returns True if it rounds stochastically.

    Nothing tells a shard of torch_xla's where it lies in its parameter: random bits count from its own first element,
    so that only the rows of the first rank are rounded as in one process.
    """
    s = STRATEGIES[strategy]
    return any(format_named(name).draw for name in (s.param, s.state, s.slow))


@pytest.mark.sampled(of=3, each=False)  # formats of words are of no concern to torch_xla's class
@pytest.mark.parametrize(("size", "strategy"), CASES)
def test_shards_end_with_the_bits_of_one_process_and_only_high_words_travel(
    size: int, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = unsharded(strategy)
    ranks = Ranks(size, strategy, monkeypatch)
    for step in range(STEPS):
        ranks.step(step)
    found, of_rank = ranks.gathered(), size if draws(strategy) else 1
    assert different(of_first(found, of_rank), of_first(expected, of_rank)) == []
    padded = [(shape[0] + -shape[0] % size, *shape[1:]) for shape in shapes(strategy)]
    for rank in range(size):
        assert [t.dtype for t in ranks.sent[rank]] == [torch.bfloat16] * len(SHAPES)
        assert [(t.shape[0] * size, *t.shape[1:]) for t in ranks.sent[rank]] == padded
    assert set(ranks.reduced) == {torch.bfloat16}


@pytest.mark.parametrize("strategy", ["full", "fp32"])
def test_so_do_those_of_a_class_that_is_traced(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "AdamW", Lion)
    test_shards_end_with_the_bits_of_one_process_and_only_high_words_travel(2, strategy, monkeypatch)


CUT = ((299,),)
"""A vector, of which two ranks have halves of 150, the second with padding: they cut a block."""


def shards_alone(strategy: str, rank: int) -> list[dict[str, torch.Tensor]]:
    """Parameter and states of each shard, trained as if it were a parameter of its own, in one process."""

    def of_rank(t: torch.Tensor) -> torch.Tensor:
        padding = torch.zeros(t.shape[0] % 2, *t.shape[1:], dtype=t.dtype, device=t.device)
        return torch.cat([t, padding]).chunk(2)[rank].clone()

    whole = parameters(strategy, CUT)
    params = [nn.Parameter(of_rank(p.detach())) for p in whole]
    compiled: Any = collage_neuron.compile(AdamW, strategy=strategy)
    optimizer = compiled(params, lr=1e-2)
    for step in range(STEPS):
        set_gradients(whole, step)
        for p, of_whole in zip(params, whole, strict=True):
            p.grad = of_rank(of_whole.grad)  # type: ignore[arg-type]
        optimizer.step()
        torch_xla.sync()
    return [{k: bits(v) for k, v in {"param": p, **optimizer.state[p]}.items()} for p in params]


@pytest.mark.sampled(of=3, each=False)
@pytest.mark.parametrize("strategy", ["split422", "split311"])
def test_ranks_that_cut_rows_have_blocks_of_their_own(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each shard has the bits of a parameter of its shape, padding included, and resumes from a checkpoint."""
    ranks = Ranks(2, strategy, monkeypatch, shapes=CUT)
    for step in range(STEPS - 1):
        ranks.step(step)
    resumed = ranks.resumed()
    resumed.step(STEPS - 1)
    for rank, optimizer in enumerate(resumed.optimizers):
        base = optimizer.base_optimizer
        for p, expected in zip(base.param_groups[0]["params"], shards_alone(strategy, rank), strict=True):
            assert different({k: bits(v) for k, v in {"param": p, **base.state[p]}.items()}, expected) == []


@pytest.mark.sampled(of=3, each=False)
@pytest.mark.parametrize("strategy", ["bf16", "plus", "full", "fp32"])
def test_two_ranks_go_on_from_their_states_bit_for_bit(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = unsharded(strategy)
    ranks = Ranks(2, strategy, monkeypatch)
    for step in range(STEPS - 1):
        ranks.step(step)
    resumed = ranks.resumed()
    resumed.step(STEPS - 1)
    assert different(resumed.gathered(), expected) == []


def test_a_nan_in_the_shard_of_one_rank_makes_all_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each rank hands to the sum over the sharding groups, and that it goes by what comes back."""
    ranks = Ranks(2, "full", monkeypatch, nonfinite="skip")
    handed: list[float] = []
    total = 0.0

    def all_reduce(kind: str, tensors: list[torch.Tensor], groups: Any, pin_layout: bool) -> None:
        assert (kind, groups, pin_layout) == (xm.REDUCE_SUM, [[0, 1]], True)
        handed.append(tensors[0].item())
        tensors[0].fill_(total)

    monkeypatch.setattr(xm, "all_reduce", all_reduce)
    ranks.step(0)
    before, total = ranks.gathered(), 1.0
    ranks.step(1, nan=True)
    assert handed == [0.0, 0.0, 0.0, 1.0]
    assert [k for k in different(ranks.gathered(), before) if not k.endswith(" step")] == []
    assert [collage_neuron.skipped_steps(o.base_optimizer) for o in ranks.optimizers] == [1, 1]
    total = 0.0
    ranks.step(2)
    assert len(different(ranks.gathered(), before)) > len(SHAPES)
