"""`passes`: what each pass changes, from the shell and from `explain`; what cannot be printed is said why."""

from __future__ import annotations

import re
import subprocess
import sys

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
    """The paragraphs after the figures and the heading."""
    return text.split("\n\n")[2:]


def test_the_update_of_adamw_after_each_pass(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "AdamW", "--strategy", "plus")
    assert text.startswith("AdamW under plus: 8 operations become ")
    assert " in one kernel, which reads 12 bytes per parameter and writes 10. Read this" in " ".join(text.split())
    blocks = " ".join(printed(capsys, "AdamW", "--strategy", "split423").split())
    assert "reads 11 bytes per parameter and writes 9." in blocks
    assert "\n\nparam_groups[0] of AdamW: strategy plus, arithmetic fp32\n" in text
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


def test_the_legend_explains_what_occurs_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    def legend(*arguments: str) -> str:
        assert main(["passes", *arguments]) == 0
        return " ".join(capsys.readouterr().err.split())

    plain = legend("AdamW")
    assert "param_lo and the like: the second number of a stored value" in plain
    assert "dead-code in `passes ASGD`, cut in `passes Adafactor`" in plain
    assert not re.search("reduced0|wanted param|upper16|bf16x2", plain)
    assert "passes ASGD" not in legend("ASGD")
    assert "bf16x2: the sum of two" in legend("AdamW", "--strategy", "plus")
    adafactor = legend("adafactor")
    assert "row, column, number: what a sum or mean is given for" in adafactor
    assert "number0, ...: what a stage computes from such sums" in adafactor
    assert "EDQ, the share of the wanted update that arrives" in legend("SGD", "--measured")


def test_cut_begins_with_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "Adafactor")
    assert "operations become" in text
    assert " in 3 stages, which read " in " ".join(text.split())
    stages = " ".join(parts(text)[-1].split())
    assert "0, reduction: adds elements up to reduced0 (one for each row), reduced1 (one for each column)" in stages
    assert "; reads grad 1, numbers: computes from such sums number0 (one for each row)" in stages
    assert "2, elementwise: computes each element and stores param, param_lo; reads param, param_lo, grad" in stages


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "SGD", "--strategy", "light", "--arithmetic", "bf16", "--measured")
    assert "\nparam_groups[0] of SGD: strategy light, arithmetic bf16\n" in text
    assert titles(text) == ["captured", "expand", "store", "instrument", "dead-code", "cut"]
    assert "as (param[0], param[1], wanted param)" in text
    assert "count lost pair" in text


def test_explain_prints_the_passes_of_a_users_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    """And leaves it as it was; the final form of the full text is the one that `explain` shows."""
    p = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))
    p.grad = torch.zeros_like(p)
    optimizer = collage_neuron.compile(AdamW([p]))
    optimizer.step()
    assert collage_neuron.explain(optimizer, passes=True) == printed(capsys).partition("\n\n")[2]
    text = collage_neuron.explain(optimizer, passes=True, graphs=True)
    assert text == printed(capsys, "--full").partition("\n\n")[2]
    final = (
        collage_neuron.explain(optimizer, graphs=True)
        .partition("every rounding a round_to):\n")[2]
        .rpartition("\nAdamW")[0]
    )
    assert final
    assert final in re.sub("^  # .*\n", "", text, flags=re.MULTILINE)  # the lines that say what others are part of


def test_an_unknown_optimizer_is_answered_with_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        main(["passes", "AdamWW"])
    assert status.value.code == 2
    said = capsys.readouterr().err
    assert "torch.optim has no 'AdamWW' (did you mean AdamW" in said
    assert ", ".join(OPTIMIZERS) in said
    assert "your own, call collage_neuron.explain(optimizer, passes=True)" in said
    with pytest.raises(SystemExit):
        main(["passes", "xyz"])
    assert "torch.optim has no 'xyz'. There are Adadelta, " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["passes", "SparseAdam"])
    assert "SparseAdam takes sparse gradients alone, which cannot be compiled" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--strategy", "stochastic", "--arithmetic", "bf16"],
            "passes: AdamW: strategy 'stochastic' stores bf16_stochastic",
        )
    ],
)
def test_what_cannot_be_compiled_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["passes", *arguments]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(message)


def test_one_that_needs_a_closure_has_no_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes", "LBFGS"]) == 0
    assert capsys.readouterr().out.startswith("passes: LBFGS has no passes to show: its step() needs a closure")


@pytest.mark.parametrize(("name", "why"), [("Muon", "aten._to_copy.default makes a tensor of torch.bfloat16")])
def test_what_runs_as_written_has_no_passes_and_says_why(
    name: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name not in OPTIMIZERS:
        pytest.skip(f"this torch has no {name}")
    assert main(["passes", name]) == 0
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    assert line.startswith(f"passes: {name} has no passes: {why}")
    assert ", so it runs as written on fp32 values" in line
    assert "/" not in line.replace("docs/as_written.md", "")
    assert "MB" not in line + err


def test_from_the_shell() -> None:
    command = [sys.executable, "-m", "collage_neuron", "passes", "Adagrad", "--strategy", "full"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Adagrad under full: ")
    assert "How to read it" in done.stderr
    assert "as (param, param_lo, sum, sum_lo)" in done.stdout
