"""The study's machinery: stacked runs are their runs, jobs are kept and found again, errors say what to run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
from gpt import GPT, Shape
from study import command, grid, jobs, language, page
from study.claims import CLAIMS
from study.ensemble import Ensemble, Group, schedule
from study.figures import COLOURS
from study.jobs import Job, MissingResult, Store
from study.readings import diverged, usable
from study.variants import RELEASED, TRAINED, VARIANTS, adamw
from torch import Tensor, nn
from torch.nn import functional as F

from collage_neuron.numerics.strategies import DEFAULT

TINY = Shape(batch=3, block=8, width=8, heads=2, layers=2)
GROUPS = [Group(1e-3, (0, 1)), Group(1e-2, (1, 2))]


def batch_of(runs: Ensemble) -> Tensor:
    return torch.randint(256, (len(runs.seeds), TINY.batch, TINY.block + 1), generator=torch.Generator().manual_seed(0))


def test_the_runs_of_an_ensemble_are_runs_of_the_model() -> None:
    """Same weights by seed, same losses, same gradients; the batched sums go in another order, a few ulps of fp32."""
    runs = Ensemble(TINY, GROUPS)
    batch = batch_of(runs)
    losses = runs.losses(batch)
    losses.sum().backward()
    for i, seed in enumerate(runs.seeds):
        torch.manual_seed(seed)
        model = GPT(TINY)
        loss = F.cross_entropy(model(batch[i, :, :-1]).flatten(0, 1), batch[i, :, 1:].flatten())
        loss.backward()
        torch.testing.assert_close(losses[i], loss, rtol=2**-20, atol=0)
        for name, p in model.named_parameters():
            stacked = runs.params[i // 2][name].grad
            assert stacked is not None
            assert p.grad is not None
            torch.testing.assert_close(stacked[i % 2], p.grad, rtol=2**-12, atol=2**-20)


def test_an_ensemble_in_a_short_format_is_another_function() -> None:
    tokens = batch_of(Ensemble(TINY, GROUPS))[:, :, 1:]
    exact, short = (Ensemble(TINY, GROUPS, fmt).logits(tokens) for fmt in (None, (1, "truncation")))
    assert ((exact - short).flatten(1).norm(dim=1) > 2**-3 * exact.flatten(1).norm(dim=1)).all()


def test_runs_with_a_seed_see_the_same_batches_at_every_learning_rate() -> None:
    text = torch.arange(4000, dtype=torch.int64).remainder(256).to(torch.uint8)
    batch = next(Ensemble(TINY, GROUPS).feed(text))
    assert torch.equal(batch[1], batch[2])
    assert not torch.equal(batch[0], batch[1])


def test_the_schedule_rises_and_falls_to_a_tenth() -> None:
    factors = [schedule(100)(step) for step in range(101)]
    assert factors[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert factors[100] == pytest.approx(0.1)


def trained(variant: str, steps: int) -> float:
    """The length of a step relative to that with an exact second moment, after noise alone."""
    p = nn.Parameter(torch.zeros(256))
    optimizer = adamw(variant, [{"params": [p]}], lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1)
    squares = language.ExactSquares({"p": p}, 0.99)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        p.grad = torch.randn(256, generator=generator).bfloat16()
        optimizer.step()
        squares.update()
    return squares.step_size(optimizer, steps)


def test_the_length_of_a_step_shows_the_released_second_moment() -> None:
    """It is 69 % low at this decay: 1 / sqrt(0.31) = 1.8. fp32 states differ from float64 by its roundings only."""
    assert trained("fp32", 500) == pytest.approx(1, abs=2**-16)
    assert trained(RELEASED, 500) == pytest.approx(1.8, abs=0.1)


JOB = Job("second_moment", "bf16", {"variant": "bf16", "steps": 50, "seed": 0})


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


def test_a_job_is_kept_with_what_repeats_it_and_not_run_again(
    pool: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = jobs.run_all([JOB], Store(tmp_path), pool, "python examples/study")
    record = json.loads((tmp_path / "second_moment/bf16.json").read_text())
    assert first == {"bf16": record}
    assert record["command"] == "python examples/study --only second_moment/bf16"
    assert record["settings"]["seed"] == 0
    assert record["versions"]["torch"] == torch.__version__
    assert list(tmp_path.rglob("*.tmp")) == []
    monkeypatch.setattr(jobs, "run", lambda job: pytest.fail(f"{job.name} ran again"))
    assert jobs.run_all([JOB], Store(tmp_path), pool, "") == first


def test_a_job_that_fails_is_named_and_the_rest_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def run(settings: dict[str, Any]) -> dict[str, Any]:
        begun.append(settings)
        sleep(0.05)  # so that not all have run before the first failure is seen
        return {"quotient": 1 / 0}

    monkeypatch.setattr(language, "run", run)
    many = [language.job("language", f"plus {i}", "plus", 0.99, 1.0, quick=True) for i in range(50)]
    named = pytest.raises(RuntimeError, match=r"the job language/plus 0 0\.99 failed: division")
    with ThreadPoolExecutor(1) as pool, named:
        jobs.run_all(many, Store(tmp_path), pool, "")
    assert len(begun) < 50
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("key", "value"), [("versions", {}), ("code", "older"), ("settings", {"steps": 51})])
def test_a_job_of_another_study_does_not_count(
    key: str, value: Any, pool: ThreadPoolExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / JOB.path
    jobs.write_whole(path, json.dumps({**jobs.identity(JOB), "result": 1}))
    assert Store(tmp_path).read(JOB) is not None
    jobs.write_whole(path, json.dumps({**jobs.identity(JOB), "result": 1, key: value}))
    assert Store(tmp_path).read(JOB) is None
    assert (Store(tmp_path, any_code=True).read(JOB) is None) == (key != "code")


def test_a_part_that_needs_another_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--quick", "--only", "quadratic", "--out", str(tmp_path)])
    assert "run `python examples/study --only second_moment` first" in capsys.readouterr().err
    with pytest.raises(MissingResult, match="second_moment/bf16"):
        jobs.needed({}, "second_moment", "bf16")


@pytest.mark.parametrize(("only", "words"), [("seconds", "choose one of second_moment"), ("weights/x", "the jobs of")])
def test_a_part_or_job_that_is_none_is_named_with_those_that_are(
    only: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["--quick", "--only", only, "--out", str(tmp_path)])
    assert words in capsys.readouterr().err


def test_usable_and_diverged_runs_are_counted() -> None:
    found = {"validation": [[2.0, 2.2], [2.0, 2.05], [9.0, float("nan")]], "training": [[2.0, 2.2], [2.0, 2.05]]}
    record: dict[str, Any] = {"settings": {"lrs": [1, 2, 4]}, "result": found | {"entropy": 3.0}}
    assert usable(record, 2.1) == [2]
    record["result"]["training"] = [[3.1, 2.0], [float("nan"), float("inf")]]
    assert diverged(record) == 3


OF_THE_DEFAULT = [claim for claim in CLAIMS if DEFAULT in claim.text]


def test_what_is_trained_has_the_default_and_what_it_replaced() -> None:
    assert {DEFAULT, "plus"} < set(TRAINED) & set(VARIANTS) & set(grid.STRATEGIES) & set(language.QUICK_NAMES)
    assert {DEFAULT, "plus"} < set(COLOURS)
    assert len(OF_THE_DEFAULT) == 7


@pytest.mark.parametrize("claim", OF_THE_DEFAULT, ids=lambda claim: claim.text[:40])
def test_what_is_claimed_of_the_default_fails_for_plain_bf16(claim: Any) -> None:
    """With the stored results of `bf16` in its place: the test of a claim can fail."""
    results = page.stored(command.DOCS, command.PARTS)
    for records in results.values():
        for name in [name for name in records if name.split()[0] == "bf16" and "arithmetic" not in name]:
            records[name.replace("bf16", DEFAULT)] = records[name]
    holds, _ = claim.test(results)
    assert not holds


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text[:40])
def test_a_claim_without_its_runs_is_left_open(claim: Any) -> None:
    with pytest.raises(LookupError):
        claim.test({part: {} for part in command.PARTS})
