"""`passes`: what each pass changes, from the shell and from `explain`; what cannot be printed is said why."""

from __future__ import annotations

import re

import pytest
import torch
from torch.optim import AdamW

import collage_neuron
from collage_neuron.cli.main import main
from collage_neuron.cli.passes import OPTIMIZERS


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["passes", *arguments]) == 0
    return capsys.readouterr().out


def titles(text: str) -> list[str]:
    """First words of the paragraphs: what is captured, then each pass."""
    return [part.partition(":")[0] for part in parts(text)]


def parts(text: str) -> list[str]:
    """The paragraphs after the heading."""
    return text.split("\n\n")[1:]


def test_the_update_of_adamw_after_each_pass(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "AdamW", "--strategy", "plus")
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


def test_lines_that_a_pass_removes_are_shown_and_full_prints_all_that_are_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    dropped = parts(printed(capsys, "ASGD"))[3].splitlines()
    assert dropped[1].endswith(" lines as before")
    assert all(line.startswith("- ") for line in dropped[2:-1])
    store, left = (part.splitlines() for part in parts(printed(capsys, "ASGD", "--full"))[2:4])
    assert left[1:] == [line for line in store[1:] if f"- {line.lstrip()}" not in dropped]


def test_cut_begins_with_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "Adafactor")
    stages = " ".join(parts(text)[-1].split())
    assert "0, reduction: adds elements up to reduced0 (one for each row), reduced1 (one for each column)" in stages
    assert "; reads grad 1, numbers: computes from such sums number0 (one for each row)" in stages
    assert "2, elementwise: computes each element and stores param, param_lo; reads param, param_lo, grad" in stages


def test_explain_prints_the_passes_of_a_users_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    """And leaves it as it was; the final form of the full text is the one that `explain` shows."""
    p = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    p.grad = torch.zeros_like(p)
    optimizer = collage_neuron.compile(AdamW([p]))
    optimizer.step()
    assert collage_neuron.explain(optimizer, passes=True) == printed(capsys)
    text = collage_neuron.explain(optimizer, passes=True, graphs=True)
    assert text == printed(capsys, "--full")
    final = (
        collage_neuron.explain(optimizer, graphs=True)
        .partition("every rounding a round_to):\n")[2]
        .rpartition("\nAdamW")[0]
    )
    assert final
    assert final in re.sub("^  # .*\n", "", text, flags=re.MULTILINE)  # the lines that say what others are part of


def test_what_cannot_be_shown_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("AdamWW", "SparseAdam", "LBFGS"):
        with pytest.raises(SystemExit) as status:
            main(["passes", name])
        assert status.value.code == 2
        assert f"invalid choice: '{name.lower()}' (choose from " in capsys.readouterr().err
    assert main(["passes", "--strategy", "stochastic", "--arithmetic", "bf16"]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("passes: adamw: strategy 'stochastic' stores bf16_stochastic")


def test_what_runs_as_written_has_no_passes_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    if "muon" not in OPTIMIZERS:
        pytest.skip("this torch has no Muon")
    said = printed(capsys, "Muon")
    assert "why it is not captured: aten._to_copy.default makes a tensor of torch.bfloat16" in said
    assert "\ncaptured:" not in said


def test_how_to_read_it_is_no_part_of_what_is_piped(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes", "Adagrad", "--strategy", "full"]) == 0
    out, err = capsys.readouterr()
    assert "How to read it" in err
    assert "as (param, param_lo, sum, sum_lo)" in out
