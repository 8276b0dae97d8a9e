"""A format with an integer word, added from outside: it trains, is saved and loaded, and no pass was touched."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bounds
import pytest
import torch
from agreement import SHAPE, compare, gradients, initial
from exact import update_of
from foreign import TransformersAdamW
from integer_words import BF16_INT8, ERROR
from models import differences, mlp, snapshot, train
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.formats import FORMATS
from collage_neuron.numerics.strategies import STRATEGIES, Strategy
from collage_neuron.passes.backends import registry

pytestmark = pytest.mark.usefixtures("rejecting")

NAME = BF16_INT8.name

B, I8 = torch.bfloat16, torch.int8


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, NAME, BF16_INT8)
    monkeypatch.setitem(bounds.STORED, NAME, ERROR)
    monkeypatch.setitem(STRATEGIES, NAME, Strategy(NAME, NAME, NAME, NAME))


def adamw(device: str | torch.device = "cpu", **settings: Any) -> tuple[Optimizer, nn.Parameter]:
    p = nn.Parameter(initial().to(device))
    return collage_neuron.compile(AdamW([p], lr=1e-2, weight_decay=0.1), strategy=NAME, **settings), p


def stepped(optimizer: Optimizer, steps: Sequence[torch.Tensor]) -> dict[str, Any]:
    for gradient in steps:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = gradient.to(p.device, p.dtype)
        optimizer.step()
    return snapshot(optimizer)


def stored(optimizer: Optimizer, p: nn.Parameter) -> dict[str, torch.dtype]:
    return {key: t.dtype for key, t in optimizer.state[p].items() if t.dim() > 0}


WORDS = {"param_lo": I8, "exp_avg": B, "exp_avg_lo": I8, "exp_avg_sq": B, "exp_avg_sq_lo": I8}


def test_it_is_an_entry_of_a_table() -> None:
    optimizer, p = adamw()
    stepped(optimizer, gradients(3))
    assert stored(optimizer, p) == WORDS
    assert collage_neuron.bytes_per_parameter(optimizer) == 2 + 3 * 3
    assert f"exp_avg            {NAME}" in collage_neuron.explain(optimizer)


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_it_is_within_its_bound_on_both_backends(backend: str, request: pytest.FixtureRequest) -> None:
    """And nearer to float64 than a bf16 word alone: its error a step is 2**-15 of the value and not 2**-8."""
    device = "cpu" if backend == "reference" else request.getfixturevalue("xla")
    found = [compare(lambda p: TransformersAdamW(p, weight_decay=0.1), s, "fp32", device) for s in (NAME, "bf16")]
    assert found[0].looseness < 1
    assert found[0].unbounded == 0
    assert found[0].error < found[1].error / 32


def test_both_backends_compute_the_same_bits(xla: torch.device) -> None:
    """SGD with momentum, whose update has nothing that XLA:CPU may contract or approximate: no product in a sum."""
    results = []
    for device in ("cpu", xla):
        p = nn.Parameter(initial().to(device))
        optimizer = collage_neuron.compile(torch.optim.SGD([p], lr=0.5, momentum=0.5), strategy=NAME)
        results.append(stepped(optimizer, gradients(4)))
    assert set(results[0]) == set(results[1])
    assert differences(*results) == []


def test_fp32_weights_are_split_with_it() -> None:
    weights = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    p = nn.Parameter(weights.clone())
    optimizer = collage_neuron.compile(AdamW([p]), strategy=NAME)
    assert torch.equal(p.detach(), weights.bfloat16())
    off = (collage_neuron.exact_value(optimizer, p) - weights).abs()
    assert (off <= ERROR * weights.abs()).all()
    assert off.max() > 0


def test_bf16_arithmetic_rejects_it() -> None:
    with pytest.raises(ValueError, match=r"stores bf16\+256ths, which arithmetic='bf16' would round .*use arithmetic="):
        adamw(arithmetic="bf16")


# --- it is kept -----------------------------------------------------------------------------------------------------


def test_a_run_goes_on_bit_for_bit_from_a_state_dict(tmp_path: Path) -> None:
    """Through a file; torch casts what it loads to the dtype of the parameter, integers too."""
    optimizer, p = adamw()
    stepped(optimizer, gradients(3))
    torch.save({"p": p.detach(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    other, q = adamw()
    with torch.no_grad():
        q.copy_(saved["p"])
    other.load_state_dict(saved["optimizer"])
    assert stored(other, q) == WORDS
    assert differences(stepped(other, gradients(3, seed=1)), stepped(optimizer, gradients(3, seed=1))) == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_goes_on_bit_for_bit(copied: Any) -> None:
    optimizer, p = adamw()
    stepped(optimizer, gradients(3))
    other, q = copied((optimizer, p))
    assert stored(other, q) == WORDS
    assert differences(stepped(other, gradients(3, seed=1)), stepped(optimizer, gradients(3, seed=1))) == []


def test_an_optimizer_that_is_compiled_after_it_loaded_goes_on_bit_for_bit() -> None:
    """torch has cast the words to bf16 then, which holds all 256 of them."""
    optimizer, p = adamw()
    stepped(optimizer, gradients(3))
    q = nn.Parameter(p.detach().clone())
    plain = AdamW([q], lr=1e-2, weight_decay=0.1)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other = collage_neuron.compile(plain, strategy=NAME)
    assert stored(other, q) == WORDS
    assert differences(stepped(other, gradients(3, seed=1)), stepped(optimizer, gradients(3, seed=1))) == []


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32 model", "bf16 model"])
def test_a_run_goes_on_bit_for_bit_from_a_distributed_checkpoint(
    flat: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    runs = []
    for seed in (0, 1):
        model = mlp(seed).to(dtype)
        optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        runs.append(collage_neuron.compile(model, optimizer, strategy=NAME))
    train(*runs[0], range(3))
    runs[0][1].zero_grad()
    model_state, state = get_state_dict(*runs[0], options=options)
    state_dict_saver.save({"model": model_state, "optimizer": state}, checkpoint_id=tmp_path)
    model_state, state = get_state_dict(*runs[1], options=options)
    state_dict_loader.load({"model": model_state, "optimizer": state}, checkpoint_id=tmp_path)
    set_state_dict(*runs[1], model_state_dict=model_state, optim_state_dict=state, options=options)
    for run in runs:
        train(*run, range(3, 6))
    assert differences(snapshot(runs[1][1]), snapshot(runs[0][1])) == []


@pytest.mark.filterwarnings("ignore::collage_neuron.StrategyChanged")
def test_a_state_moves_into_it_and_back() -> None:
    """Its keys are those of a pair of bf16 words: what is there is told by more than its keys."""
    optimizer, p = adamw()
    plain, q = adamw()
    collage_neuron.compile(plain, strategy="full")
    for strategy in ("full", NAME, "full"):
        collage_neuron.compile(optimizer, strategy=strategy)
        stepped(optimizer, gradients(3))
        stepped(plain, gradients(3))
    assert stored(optimizer, p) == dict.fromkeys(WORDS, B)
    difference = collage_neuron.exact_value(optimizer, p) - collage_neuron.exact_value(plain, q)
    assert difference.abs().max() <= 9 * 2 * ERROR * initial().abs().max()  # nine steps, two runs


# --- what is wrong is noticed ---------------------------------------------------------------------------------------


def test_a_checkpoint_whose_integer_word_is_missing_is_rejected() -> None:
    optimizer, _ = adamw()
    stepped(optimizer, gradients(2))
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]["exp_avg_lo"]
    other, _ = adamw()
    with pytest.raises(ValueError, match=r"has no 'exp_avg_lo', the low word of 'exp_avg' under this group's strategy"):
        other.load_state_dict(saved)


def test_an_integer_that_is_no_word_of_a_state_is_rejected() -> None:
    optimizer, _ = adamw()
    stepped(optimizer, gradients(2))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].to(torch.int8)
    other, _ = adamw()
    with pytest.raises(ValueError, match=r"\['exp_avg'\] is torch.int8; states are floating-point"):
        other.load_state_dict(saved)


def test_what_writes_a_parameter_is_followed_within_half_an_ulp() -> None:
    """An integer counts parts of whatever high word is there: unlike a bf16 word, it cannot be seen to be stale."""
    p = nn.Parameter(initial())
    optimizer = collage_neuron.compile(torch.optim.SGD([p], lr=0.3), strategy=NAME)
    stepped(optimizer, gradients(3))
    before = collage_neuron.exact_value(optimizer, p)
    with torch.no_grad():
        p[0] *= 3.0
    written = p.detach().clone()
    stepped(optimizer, [torch.zeros(SHAPE)])
    after = collage_neuron.exact_value(optimizer, p)
    assert torch.equal(after[1:], before[1:])
    assert ((after - written).abs() <= 2.0**-8 * written.abs()).all()


def test_weights_that_are_loaded_before_the_first_step_are_taken_as_they_are() -> None:
    weights = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    p = nn.Parameter(weights)
    optimizer = collage_neuron.compile(torch.optim.SGD([p], lr=0.3), strategy=NAME)
    assert optimizer.state[p]["param_lo"].any()
    with torch.no_grad():
        p.copy_(initial())
    stepped(optimizer, [torch.zeros(SHAPE)])
    assert torch.equal(collage_neuron.exact_value(optimizer, p), initial().float())


# --- layouts --------------------------------------------------------------------------------------------------------


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> str:
    """The format with a second word that 32 elements would share: it is data, and nothing can lay it out yet."""
    word, part = BF16_INT8.components
    shared = (word, replace(part, layout="a block of 32"))
    monkeypatch.setitem(FORMATS, "blocks", replace(BF16_INT8, name="blocks", components=shared))
    return "blocks"


@pytest.mark.parametrize("name", registry.names())
def test_a_backend_says_which_layouts_it_has(name: str, blocks: str) -> None:
    update = update_of(["param"], lambda x: [x])
    backend = registry.get(name)
    assert backend.supports(replace(update, formats={"param": BF16_INT8})) is None
    reason = backend.supports(replace(update, formats={"param": FORMATS[blocks]}))
    assert reason is not None
    assert re.search(r"lay words out as a block of 32 yet; use backend=", reason)


def test_a_layout_that_no_backend_has_is_rejected_before_anything_changes(blocks: str) -> None:
    p = nn.Parameter(initial())
    optimizer = AdamW([p])
    backend = registry.choose("auto", p.device).name
    with pytest.raises(UnsupportedUpdate, match=f"backend '{backend}' does not lay words out as a block of 32 yet"):
        collage_neuron.compile(optimizer, strategy={"exp_avg": blocks})
    assert type(optimizer) is AdamW
    assert not optimizer.state
