"""`explain(optimizer, passes=True)`: what each pass changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import ASGD, Adafactor, AdamW, Optimizer

import collage_neuron


def explained(cls: Callable[[Any], Optimizer] = AdamW, strategy: str | None = None, full: bool = False) -> str:
    """The second step, when all states exist and nothing is special to the first one."""
    p = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    p.grad = torch.zeros_like(p)
    optimizer: Any = collage_neuron.compile(cls([p]), strategy=strategy, backend="reference", verbose=False)
    optimizer.step()
    return collage_neuron.explain(optimizer, passes=True, graphs=full)


def titles(text: str) -> list[str]:
    """First words of the paragraphs: what is captured, then each pass."""
    return [part.partition(":")[0] for part in parts(text)]


def parts(text: str) -> list[str]:
    """The paragraphs after the heading."""
    return text.split("\n\n")[1:]


def test_the_update_of_adamw_after_each_pass() -> None:
    text = explained(AdamW, "plus")
    assert text.startswith("param_groups[0] of AdamW: strategy plus, arithmetic fp32\n")
    assert titles(text) == ["captured", "expand", "store", "dead-code", "cut"]
    captured, expand, store, dead_code, cut = parts(text)
    assert "addcdiv_default = aten.addcdiv.default(mul_tensor, lerp_scalar, add_tensor, value=s6)" in captured
    assert "round_to" not in expand  # nothing is rounded for storage yet
    assert re.findall("^  # (.*):$", expand, re.MULTILINE) == [
        "numbers of the step", *(f"read {x}" for x in ("param", "grad", "exp_avg", "exp_avg_sq")),
        *re.findall(r"^  (\w+) = aten", captured, re.MULTILINE), "new param",
    ]  # fmt: skip
    assert expand.endswith("\n  return (add_6, add_2, add_3) as (param, exp_avg, exp_avg_sq)")
    _, same, gone, *new = store.splitlines()
    assert same == f"  ... {len(expand.splitlines()) - 2} lines as before"
    assert gone == "- return (add_6, add_2, add_3) as (param, exp_avg, exp_avg_sq)"
    assert all(line.startswith("+ ") for line in new)
    assert "+ round_to_4 = round_to(sub_2, bf16)" in new
    assert new[-1].endswith(" as (param, param_lo, exp_avg, exp_avg_sq, exp_avg_sq_lo)")
    assert (
        dead_code == "dead-code: Drops operations whose result nobody reads.\n  (nothing to do: every result is read)"
    )
    assert cut.startswith("cut: Makes stages of an update with reductions.\n  (nothing to do: no sum or norm")


def test_lines_that_a_pass_removes_are_shown_and_full_prints_all_that_are_left() -> None:
    dropped = parts(explained(ASGD))[3].splitlines()
    assert dropped[1].endswith(" lines as before")
    assert all(line.startswith("- ") for line in dropped[2:-1])
    store, left = (part.splitlines() for part in parts(explained(ASGD, full=True))[2:4])
    assert left[1:] == [line for line in store[1:] if f"- {line.lstrip()}" not in dropped]


def test_cut_begins_with_its_stages() -> None:
    text = explained(Adafactor)
    stages = " ".join(parts(text)[-1].split())
    assert "0, reduction: adds elements up to reduced0 (one for each row), reduced1 (one for each column)" in stages
    assert "; reads grad 1, numbers: computes from such sums number0 (one for each row)" in stages
    assert "2, elementwise: computes each element and stores param, param_lo; reads param, param_lo, grad" in stages


@pytest.mark.filterwarnings("ignore::collage_neuron.RunsAsWritten")
def test_what_runs_as_written_has_no_passes_and_says_why() -> None:
    said = explained(torch.optim.Muon)
    assert "why it is not captured: aten._to_copy.default makes a tensor of torch.bfloat16" in said
    assert "\ncaptured:" not in said
