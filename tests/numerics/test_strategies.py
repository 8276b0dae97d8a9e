"""Strategies are data, formats are an interface: both can be added to from outside, without touching a pass."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from agreement import compare, initial, stepped
from as_written import Written
from foreign import TransformersAdamW

import collage_neuron
from collage_neuron.numerics.eft import Value, bf16, narrow, widen
from collage_neuron.numerics.formats import FORMATS, Component, Format
from collage_neuron.numerics.strategies import STRATEGIES, Strategy


def adamw(**settings: Any) -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    p = torch.nn.Parameter(initial())
    return collage_neuron.compile(torch.optim.AdamW([p], weight_decay=0.1), **settings), p


def stored(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter) -> dict[str, torch.dtype]:
    """The tensors that the optimizer keeps for `p`, by key."""
    return {key: t.dtype for key, t in optimizer.state[p].items() if t.dim() > 0}


B, F = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ({"exp_avg_sq": "bf16x2"}, {"exp_avg": B, "exp_avg_sq": B, "exp_avg_sq_lo": B}),
        ({"param": "bf16x2", "exp_avg_sq": "fp32"}, {"param_lo": B, "exp_avg": B, "exp_avg_sq": F}),
        ({"param": "bf16+fp32", "*": "bf16"}, {"param_master": F, "exp_avg": B, "exp_avg_sq": B}),
        ({"*": "fp32", "param": "bf16x2", "exp_avg": "bf16"}, {"param_lo": B, "exp_avg": B, "exp_avg_sq": F}),
        ({}, {"exp_avg": B, "exp_avg_sq": B}),
    ],
)
def test_a_mapping_names_the_format_of_each_state_and_a_star_that_of_the_rest(
    strategy: dict[str, str], expected: dict[str, torch.dtype]
) -> None:
    optimizer, p = adamw(strategy=strategy)
    assert stored(stepped(optimizer), p) == expected


def test_a_strategy_can_be_registered_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "mine", Strategy("mine", param="bf16x2", state="bf16", slow="fp32"))
    optimizer, p = adamw(strategy="mine")
    assert stored(stepped(optimizer), p) == {"param_lo": B, "exp_avg": B, "exp_avg_sq": F}
    assert collage_neuron.bytes_per_parameter(optimizer) == 2 + 4 + 2 + 4  # gradient, parameter, and the two states
    assert collage_neuron.explain(optimizer).startswith("param_groups[0]: strategy mine, arithmetic fp32")


class NeverSeen(Written):
    """One state of each kind that a person would tell apart."""

    def update(self, p: torch.Tensor, g: torch.Tensor, s: dict[str, Any], group: dict[str, Any]) -> None:
        if not s:
            for name in ("drift", "spread", "energy", "total", "before"):
                s[name] = torch.zeros_like(p)
            s["anchor"], s["peak"] = p.clone(), torch.full_like(p, 0.5)
        s["drift"].mul_(0.9).add_(g, alpha=0.1)  # an average of gradients
        s["spread"] = 0.99 * s["spread"] + 0.01 * g * g  # an average of squares
        s["energy"].addcmul_(g, g)  # a sum of squares
        s["total"] += g  # a sum without decay
        s["peak"] = torch.maximum(0.999 * s["peak"], g.abs())  # a maximum with decay
        s["before"].copy_(g)  # the last gradient
        p.addcdiv_(s["drift"], s["spread"].sqrt().add_(s["peak"]), value=-group["lr"])
        p.sub_(s["total"] / (s["energy"] + 1.0), alpha=1e-3)
        s["anchor"].lerp_(p, 0.01)  # an average of parameters


SLOW = {"spread", "energy", "total", "anchor", "peak"}
FAST = {"drift", "before"}


def formats_explained(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The table that `explain` prints: parameter and states with their formats."""
    text = collage_neuron.explain(optimizer)
    rows = re.findall(r"^  (\w+) +(\S+) +\d+ bytes +[\d.]+ MB$", text, re.MULTILINE)
    return {name: fmt for name, fmt in rows if name != "grad"}


@pytest.mark.parametrize(
    ("strategy", "param", "slow", "fast"),
    [
        ("bf16", "bf16", "bf16", "bf16"),
        ("light", "bf16x2", "bf16", "bf16"),
        ("plus", "bf16x2", "bf16x2", "bf16"),
        ("full", "bf16x2", "bf16x2", "bf16x2"),
        ("fp32", "bf16+fp32", "fp32", "fp32"),
        ("fp32_states", "bf16", "fp32", "fp32"),
    ],
)
def test_what_a_strategy_means_is_read_from_the_graph(strategy: str, param: str, slow: str, fast: str) -> None:
    p = torch.nn.Parameter(initial())
    optimizer = collage_neuron.compile(NeverSeen([p]), strategy=strategy)
    expected = {"param": param} | dict.fromkeys(SLOW, slow) | dict.fromkeys(FAST, fast)
    for _ in range(2):  # the first step creates the states; what they are shows in each
        assert formats_explained(optimizer) == expected
        stepped(optimizer, 1)
    assert {key.removesuffix("_lo") for key in stored(optimizer, p) if key.endswith("_lo")} == {
        name for name, fmt in expected.items() if fmt == "bf16x2"
    }


@pytest.mark.parametrize(("arithmetic", "farthest"), [("fp32", 0.005), ("bf16", 0.1)])
def test_the_optimizer_never_seen_is_near_its_float64_run(arithmetic: str, farthest: float) -> None:
    assert compare(NeverSeen, "plus", arithmetic).error < farthest


# A format of three words, such as nobody has thought of when the passes were written.


def _three_words(x: Value) -> Sequence[Value]:
    hi = bf16(x)
    middle = bf16(x - hi)
    return [narrow(word, "bf16") for word in (hi, middle, bf16(x - hi - middle))]


def _sum_of_three(words: Sequence[Value]) -> Value:
    hi, middle, lo = map(widen, words)
    return hi + (middle + lo)


BF16X3 = Format(
    "bf16x3",
    (Component("", "bf16"), Component("_lo", "bf16"), Component("_lowest", "bf16")),
    _three_words,
    _sum_of_three,
)
"""24 significant bits: an fp32 value, in three tensors of bf16."""


@pytest.fixture
def bf16x3(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(FORMATS, BF16X3.name, BF16X3)
    monkeypatch.setitem(STRATEGIES, BF16X3.name, Strategy(BF16X3.name, *[BF16X3.name] * 3))
    return BF16X3.name


def test_a_new_format_is_an_entry_of_a_table(bf16x3: str) -> None:
    optimizer, p = adamw(strategy=bf16x3)
    keys = [name + suffix for name in ("param", "exp_avg", "exp_avg_sq") for suffix in ("", "_lo", "_lowest")]
    assert stored(stepped(optimizer), p) == dict.fromkeys(keys[1:], B)  # the first is the parameter itself
    assert collage_neuron.bytes_per_parameter(optimizer) == 2 + 3 * 6
    assert formats_explained(optimizer) == dict.fromkeys(("param", "exp_avg", "exp_avg_sq"), bf16x3)


def error(strategy: str, device: str | torch.device) -> float:
    """The parameter's error as a fraction of what it moved in twelve steps, at the median element."""
    return compare(lambda params: TransformersAdamW(params, weight_decay=0.1), strategy, "fp32", device).error


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_a_new_format_has_a_smaller_error_than_pairs(bf16x3: str, backend: str, request: pytest.FixtureRequest) -> None:
    """A pair loses 2**-17 a step, three words less than fp32 arithmetic does: as little as fp32 states and master."""
    device = "cpu" if backend == "reference" else request.getfixturevalue("xla")
    three, two, whole = error(bf16x3, device), error("full", device), error("fp32", device)
    assert three < two / 16
    assert three <= 2 * whole


def test_bf16_arithmetic_refuses_a_format_of_three_words(bf16x3: str) -> None:
    with pytest.raises(ValueError, match=r"stores bf16x3, which arithmetic='bf16' would round .*use arithmetic='fp32'"):
        adamw(strategy=bf16x3, arithmetic="bf16")
