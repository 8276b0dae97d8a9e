"""The suites of others, run with each optimizer compiled: what is compiled there, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import public_suites

SUITE = """
import pytest, torch
from pytorch_optimizer import Lookahead
from torch.optim import SGD, AdamW

def test_a_model_learns():
    model, x = torch.nn.Linear(3, 1), torch.randn(8, 3)
    optimizer = Lookahead(AdamW(model.parameters(), lr=0.1), k=2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(torch.nn.MSELoss()(model(x), torch.ones(8, 1)))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1].dtype == torch.float32 and losses[-1] < losses[0]

def test_it_is_only_built():
    SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)

def test_complex_ones_stay_as_they_are():
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    SGD([p], lr=0.1).step()

def test_what_another_class_is_not():
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = SGD([p], lr=0.1)
    p.grad = torch.ones(2)
    optimizer.step()
    p.grad = torch.ones(2)
    assert type(optimizer) is SGD

def test_an_error_of_compiling_is_not_the_one_that_is_expected():
    optimizer = SGD([torch.nn.Parameter(torch.ones(2))], lr=float("nan"))
    with pytest.raises(ValueError):
        optimizer.step()
        raise ValueError

def test_sparse():
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2).to_sparse()
    SGD([p], lr=0.1).step()
"""


def test_each_optimizer_of_a_suite_is_compiled(tmp_path: Path) -> None:
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "test_file.py").write_text(SUITE)
    compiled = public_suites.run(tmp_path / "suite", ["compiles_each"])
    assert len(compiled) == 6
    plain = {name: ran._replace(outcome="", compiled=0) for name, ran in compiled.items()}  # in torch all of them pass
    assert [ran.compiled for ran in compiled.values()] == [1, 1, 0, 1, 0, 1]
    assert [bool(ran.outcome) for ran in compiled.values()] == [False, False, False, True, True, True]
    text = "\n".join(public_suites.tables(plain, compiled))
    assert "| all | 6 | 4 | 3 | 3 |" in text
    assert "| sparse gradients | 1 |" in text
    assert f"| {public_suites.OURS} | 2 |" in text
    assert "assert type(optimizer) is SGD" in text
