"""`passes`: what each pass changes, from the shell and from `explain`; what cannot be printed is said why."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.optim import AdamW

import collage_neuron
from collage_neuron.cli.main import EXAMPLES, main
from collage_neuron.cli.passes import OPTIMIZERS
from collage_neuron.numerics import eft, matrix_sums, reductions, tensor_sums


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["passes", *arguments]) == 0
    return capsys.readouterr().out


def titles(text: str) -> list[str]:
    """First words of the paragraphs after the heading: what is captured, then each pass."""
    return [part.partition(":")[0] for part in text.split("\n\n")[1:]]


def test_the_update_of_adamw_after_each_pass(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "AdamW", "--strategy", "plus")
    assert text.startswith("param_groups[0] of AdamW: strategy plus, arithmetic fp32\n")
    assert titles(text) == ["captured", "expand", "store", "dead-code", "cut"]
    captured, expand, store, dead_code, cut = text.split("\n\n")[1:]
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
    dropped = printed(capsys, "ASGD").split("\n\n")[4].splitlines()
    assert dropped[1].endswith(" lines as before")
    assert all(line.startswith("- ") for line in dropped[2:-1])
    store, left = (part.splitlines() for part in printed(capsys, "ASGD", "--full").split("\n\n")[3:5])
    assert left[1:] == [line for line in store[1:] if f"- {line.lstrip()}" not in dropped]


def test_the_legend_comes_first_and_has_each_operation_that_is_not_torchs(capsys: pytest.CaptureFixture[str]) -> None:
    ours = set().union(*map(vars, (eft, matrix_sums, reductions, tensor_sums))) - {"fp32"}
    for given in (["AdamW"], ["SGD", "--strategy", "plus"], ["AdamW", "--strategy", "split422"], ["Adafactor"]):
        assert main(["passes", *given, "--measured"]) == 0
        out, legend = capsys.readouterr()
        explained = set(re.findall(r"^(\w+): \S", legend.split("Operations are")[1], re.MULTILINE))
        assert explained == ours.intersection(re.findall(r" = (\w+)\(", out))


def test_every_pass_has_something_to_do_in_an_example_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    examples = re.findall(r"passes (\w+)( --strategy \w+)?", EXAMPLES["passes"])
    idle = [
        set(re.findall(r"^([\w-]+): .*\n  \(nothing", printed(capsys, *" ".join(e).split()), re.M)) for e in examples
    ]
    assert len(idle) == 4
    assert not set.intersection(*idle)


def test_the_default_is_that_of_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    for arithmetic, strategy in (("fp32", "split433"), ("bf16", "plus")):
        text = printed(capsys, "SGD", "--arithmetic", arithmetic)
        assert text.startswith(f"param_groups[0] of SGD: strategy {strategy}, arithmetic {arithmetic}\n")


def test_options(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "SGD", "--strategy", "light", "--arithmetic", "bf16", "--measured")
    assert text.startswith("param_groups[0] of SGD: strategy light, arithmetic bf16\n")
    assert titles(text) == ["captured", "expand", "store", "instrument", "dead-code", "cut"]
    assert "as (param[0], param[1], wanted param)" in text
    assert "count lost pair" in text


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


def test_every_group_is_explained() -> None:
    params = [torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer: Any = collage_neuron.compile(AdamW([{"params": [p]} for p in params]))
    text = collage_neuron.explain(optimizer, passes=True)
    assert [line for line in text.splitlines() if "[" in line and " of AdamW: " in line] == [
        f"param_groups[{i}] of AdamW: strategy split433, arithmetic fp32" for i in range(2)
    ]
    assert text.count("\nstore: ") == 2


def test_an_unknown_optimizer_is_answered_with_those_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        main(["passes", "AdamWW"])
    assert status.value.code == 2
    said = capsys.readouterr().err
    assert "invalid choice: 'AdamWW'" in said
    assert all(name in said for name in OPTIMIZERS)


def test_the_optimizers_are_those_of_torch() -> None:
    assert {"AdamW", "SGD", "Rprop"} <= OPTIMIZERS.keys()
    assert "Optimizer" not in OPTIMIZERS
    assert all(inspect.isclass(cls) for cls in OPTIMIZERS.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "stochastic", "--arithmetic", "bf16"], "AdamW: strategy 'stochastic' stores bf16_stochastic"),
    ],
)
def test_what_cannot_be_compiled_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["passes", *arguments]) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(message)


def test_what_runs_as_written_has_no_passes_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes", "LBFGS"]) == 0
    out, err = capsys.readouterr()
    assert "why it is not captured: LBFGS.step() cannot be captured" in out
    assert "How to read it" not in err


def test_from_the_shell() -> None:
    command = [sys.executable, "-m", "collage_neuron", "passes", "Adagrad", "--strategy", "full"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("param_groups[0] of Adagrad: strategy full")
    assert "as (param, param_lo, sum, sum_lo)" in done.stdout
