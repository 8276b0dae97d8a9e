"""Every format from and to every other, every strategy from and to every other, and what that loses, in numbers."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import differences, follow, snapshot
from sampling import part
from torch import nn
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron import STRATEGIES, StrategyChanged, exact_value
from collage_neuron.numerics.formats import FORMATS, format_named
from collage_neuron.states import word_encoding
from collage_neuron.states.store import ensure_stored, is_stored, read_exact, record_of, store

SHAPES = [(0,), (1,), (130,), (3, 130), (2, 0), (0, 7), (2, 3, 257), (5, 128)]
"""Blocks that are whole and cut short, several of a row, rows of one element, and none."""


def values(shape: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Positive and not, over several binades, with zeros; a square root of what a second moment has."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp(torch.randn(shape, generator=g))
    return torch.where(torch.rand(shape, generator=g) < 0.05, 0.0, x)


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("source", FORMATS)
def test_a_state_moves_from_every_format_to_every_other(source: str) -> None:
    """It holds what encoding the value holds; what was stored is not changed by being stored again."""
    for target in FORMATS:
        for shape in part(SHAPES, 3, source + target):
            p, state, record = torch.zeros(shape, dtype=torch.bfloat16), dict[str, Any](), dict[str, str]()
            x = values(shape).abs()  # some formats are unsigned
            store(p, state, "s", format_named(source), x, record)
            before = read_exact(p, state, "s", record).clone()
            ensure_stored(p, state, "s", format_named(target), record)
            fmt = format_named(target)
            assert is_stored(p, state, "s", fmt, record)
            assert set(state) == set(fmt.keys("s"))
            for key, component in zip(fmt.keys("s"), fmt.components, strict=True):
                assert state[key].shape == word_encoding.shape_of(component, shape)
                assert state[key].dtype == component.type.dtype
            after = read_exact(p, state, "s", record)
            assert torch.equal(after, word_encoding.decode(fmt, word_encoding.settled(fmt, "s", before)))
            store(p, state, "s", fmt, after, record)
            assert torch.equal(read_exact(p, state, "s", record), after)


# --- optimizers -----------------------------------------------------------------------------------------------------


def run_of(strategy: str) -> Optimizer:
    """Over a matrix whose rows are a block and a short one, a vector, a scalar, and one without elements."""
    g = torch.Generator().manual_seed(0)
    shapes: list[tuple[int, ...]] = [(3, 130), (200,), (), (0, 5)]
    params = [nn.Parameter(0.1 * torch.randn(shape, generator=g)) for shape in shapes]
    return collage_neuron.compile(AdamW(params, lr=1e-2, weight_decay=0.1), strategy=strategy)


def exact(optimizer: Optimizer) -> list[dict[str, torch.Tensor]]:
    """The fp32 values of parameters and states, and the step counts."""
    found = []
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state[p]
        names = [k for k in ("exp_avg", "exp_avg_sq") if k in state]
        record = record_of(optimizer, p)
        found.append({"param": exact_value(optimizer, p)} | {k: read_exact(p, state, k, record).clone() for k in names})
    return found


def changed(optimizer: Optimizer, strategy: str) -> list[str]:
    """Compiles for another strategy; returns what is said."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", collage_neuron.SmallSteps)  # of the decay, under some strategies
        warnings.filterwarnings("ignore", ".* cannot decrease")
        collage_neuron.compile(optimizer, strategy=strategy)
    assert all(w.category is StrategyChanged for w in caught)
    return [str(w.message) for w in caught]


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("source", STRATEGIES)
def test_a_run_moves_to_every_other_strategy_and_says_what_it_loses(source: str) -> None:
    """The number in the warning is that of the values, and silence means that none changed."""
    trained = follow(run_of(source), range(2))
    for target in part(STRATEGIES, 6, source):
        optimizer = copy.deepcopy(trained)
        before = exact(optimizer)
        said = " ".join(changed(optimizer, target))
        after = exact(optimizer)
        for name in ("param", "exp_avg", "exp_avg_sq"):
            pairs = [(x[name].double(), y[name].double()) for x, y in zip(before, after, strict=True)]
            error = sum(float((x - y).square().sum()) for x, y in pairs) ** 0.5
            size = sum(float(x.square().sum()) for x, _ in pairs) ** 0.5
            number = re.search(rf"[ ]{name} in [^;]*?which changes its values now by (\S+) of", said)
            told = float(number[1]) if number and f"{name} in" in number[0] else 0.0
            assert told == pytest.approx(error / size, rel=0.06)
        if target in (source, "plus", "split311"):
            follow(optimizer, range(2, 4))


def test_a_strategy_that_is_written_into_a_group_says_what_it_loses() -> None:
    p = torch.nn.Parameter(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)))
    optimizer = collage_neuron.compile(torch.optim.AdamW([p], lr=1e-2), strategy="full")
    lost = r"Lost: param in bf16\+int8 .* changes its values now by"
    for strategy, said in {"full": "", "split311": lost, "plus": "Gained: param in bf16x2"}.items():
        optimizer.param_groups[0]["collage_strategy"] = strategy
        for i in range(3):
            p.grad = torch.full_like(p, 1e-2)
            with pytest.warns(StrategyChanged, match=said) if said and not i else nullcontext():
                optimizer.step()


def test_only_formats_of_blocks_are_saved_as_values() -> None:
    """Others as the words they are; the live state is not touched by saving it."""
    for strategy in part(STRATEGIES, 2):
        optimizer = follow(run_of(strategy), range(1))
        before = snapshot(copy.deepcopy(optimizer))
        saved, p = optimizer.state_dict()["state"][0], optimizer.param_groups[0]["params"][0]
        record = record_of(optimizer, p)
        for name in ("exp_avg", "exp_avg_sq"):
            if format_named(record[name]).is_coded:
                assert saved[name].dtype == torch.float32
                assert torch.equal(saved[name], read_exact(p, optimizer.state[p], name, record))
            else:
                assert all(saved[key] is optimizer.state[p][key] for key in format_named(record[name]).keys(name))
        assert [
            k for k in differences(snapshot(optimizer), before) if not k.endswith(("grad", "collage_formats"))
        ] == []


def test_codes_without_a_record_are_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two formats may have the same words; a state that was copied from another optimizer does not say which."""
    coded = next((fmt for fmt in FORMATS.values() if fmt.is_coded), None)
    if coded is None:
        pytest.skip("no format has blocks")
    monkeypatch.setitem(FORMATS, "twin", replace(coded, name="twin"))
    p, state = torch.zeros(3, 130, dtype=torch.bfloat16), dict[str, Any]()
    store(p, state, "s", coded, values(p.shape).abs(), {})
    assert torch.equal(read_exact(p, state, "s", {"s": coded.name}), read_exact(p, state, "s", {"s": "twin"}))
    with pytest.raises(ValueError, match=r"'s' holds .* codes, and nothing says in which format: .* or .*copy with"):
        read_exact(p, state, "s")


# --- the table of the documentation ---------------------------------------------------------------------------------


VALUES = {
    "param": values((64, 256), 1) * 0.02,
    "state": values((64, 256), 2) * 1e-3,
    "slow": values((64, 256), 3).square() * 1e-6,
}


def lost(source: str, target: str) -> float:
    """The largest relative change of parameters, averages and slow states of one strategy under another."""
    return max(lost_of(role, getattr(STRATEGIES[source], role), getattr(STRATEGIES[target], role)) for role in VALUES)


@cache
def lost_of(role: str, source: str, target: str) -> float:
    old, new, name = format_named(source), format_named(target), "param" if role == "param" else "s"
    if new.reads_as(old):
        return 0.0
    stored = word_encoding.decode(old, word_encoding.settled(old, name, VALUES[role]))
    moved = word_encoding.decode(new, word_encoding.settled(new, name, stored))
    return float((moved - stored).norm() / stored.norm())


def table() -> str:
    """Rows: from; columns: to."""
    rows = [["from \\ to", *(f"`{name}`" for name in STRATEGIES)], ["---"] * (1 + len(STRATEGIES))]
    rows += [[f"`{s}`", *(f"{e:.0e}" if (e := lost(s, t)) else "0" for t in STRATEGIES)] for s in STRATEGIES]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def cells(text: str) -> dict[tuple[str, str], float]:
    """The numbers of such a table in `text`, by source and target."""
    head, _, *rows = text[text.index("| from \\ to") :].partition("\n\n")[0].splitlines()
    names = re.findall(r"`(\w+)`", head)
    found: dict[tuple[str, str], float] = {}
    for row in rows:
        source, *numbers = [cell.strip(" `") for cell in row.strip("|").split("|")]
        found |= {(source, name): float(number) for name, number in zip(names, numbers, strict=True)}
    return found


def test_the_table_of_the_documentation_is_what_conversions_lose() -> None:
    """`python -m pytest tests/checkpoint/test_conversions.py -k table -s` prints it."""
    print(table())
    found = cells((Path(__file__).parents[2] / "docs/development/evidence.md").read_text())
    for (source, target), number in found.items():
        error = lost(source, target)
        assert (number == 0) == (error == 0)
        assert number == pytest.approx(error, rel=0.6)  # one digit, rounded
