"""States that other code writes between steps: training goes on from what was written, or the write is rejected."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from models import MODES, parameters, set_gradients, through_torch_save
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

import collage_neuron
from collage_neuron import exact_value
from collage_neuron.checkpoint import fp32
from collage_neuron.numerics.strategies import STRATEGIES, has_blocks
from collage_neuron.states import external_writes, state_writes
from collage_neuron.states.state_keys import names_in
from collage_neuron.states.store import read_exact

# --- states that other code writes between steps: training goes on from what was written, and no old low word stays ---

TWO_WORDS: list[Any] = ["plus", "full", {"*": "bf16x2"}, {"*": "bf16+fp32"}]
NAMES = ("exp_avg", "exp_avg_sq")
SHAPE = (64, 8)


def adam(p: nn.Parameter) -> Optimizer:
    return Adam([p], lr=1e-3, betas=(0.9, 0.999))


def trained(strategy: Any = "plus", arithmetic: str = "fp32", steps: int = 20) -> tuple[nn.Parameter, Optimizer]:
    (p,) = parameters(0, (SHAPE,))
    optimizer = collage_neuron.compile(adam(p), strategy=strategy, arithmetic=arithmetic)
    train(p, optimizer, range(steps))
    return p, optimizer


def train(p: nn.Parameter, optimizer: Optimizer, steps: range, factor: float = 1.0) -> None:
    for i in steps:
        set_gradients([p], i)
        assert p.grad is not None
        p.grad.mul_(factor)
        optimizer.step()


def in_fp32(p: nn.Parameter, optimizer: Optimizer) -> tuple[nn.Parameter, Optimizer]:
    """The same run in torch's own optimizer, from the exact values of now."""
    q = nn.Parameter(exact_value(optimizer, p))
    other, state = adam(q), optimizer.state[p]
    other.state[q] = {"step": state["step"].clone()} | {name: read_exact(p, state, name).clone() for name in NAMES}
    return q, other


def restart(state: dict[str, Any]) -> None:
    for name in (*NAMES, "step"):
        state[name].zero_()


def scale(state: dict[str, Any], factor: float = 2.0**-6) -> None:
    state["exp_avg"].mul_(factor)
    state["exp_avg_sq"].mul_(factor**2)


def rows(state: dict[str, Any]) -> None:
    for name in NAMES:
        state[name][1:3] = 0


def exchange(state: dict[str, Any], value: float = 2.0**-14, dtype: torch.dtype | None = None) -> None:
    for name in NAMES:
        state[name] = torch.full_like(state[name], value, dtype=dtype)


def clamp(state: dict[str, Any]) -> None:
    state["exp_avg_sq"].clamp_(max=2.0**-10)


WRITES: list[Callable[[dict[str, Any]], None]] = [
    restart, scale, partial(scale, factor=2.0**6), rows, exchange,
    partial(exchange, value=2.0**-14 / 3, dtype=torch.float32), clamp,
]  # fmt: skip


@pytest.mark.parametrize("strategy", TWO_WORDS, ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_states_written_between_steps_are_those_of_fp32_within_the_format(
    write: Callable[[dict[str, Any]], None], strategy: Any
) -> None:
    p, optimizer = trained(strategy)
    q, plain = in_fp32(p, optimizer)
    write(optimizer.state[p])
    write(plain.state[q])
    start = exact_value(optimizer, p)
    train(p, optimizer, range(20, 25), 2.0**-6)
    train(q, plain, range(20, 25), 2.0**-6)
    moved = (q.detach() - start).abs()
    torch.testing.assert_close(exact_value(optimizer, p), q.detach(), rtol=2**-15, atol=2**-5 * float(moved.max()))
    for name in NAMES:
        state, its = read_exact(p, optimizer.state[p], name), plain.state[q][name]
        torch.testing.assert_close(state, its, rtol=2**-6, atol=2**-6 * float(its.abs().max()))
    assert (read_exact(p, optimizer.state[p], "exp_avg_sq") >= 0).all()


@pytest.mark.parametrize("strategy", TWO_WORDS, ids=str)
def test_what_is_written_is_what_is_read_within_half_an_ulp(strategy: Any) -> None:
    p, optimizer = trained(strategy)
    for write in WRITES:
        write(optimizer.state[p])
        high = optimizer.state[p]["exp_avg_sq"].clone()
        external_writes.drop_stale(optimizer)
        value = read_exact(p, optimizer.state[p], "exp_avg_sq")
        assert torch.equal(value.bfloat16(), high.bfloat16())
        train(p, optimizer, range(2))


def test_rows_that_were_not_written_keep_their_low_words() -> None:
    p, optimizer = trained()
    before = read_exact(p, optimizer.state[p], "exp_avg_sq").clone()
    optimizer.state[p]["exp_avg_sq"][1:3] = 0
    external_writes.drop_stale(optimizer)
    after = read_exact(p, optimizer.state[p], "exp_avg_sq")
    assert (after[1:3] == 0).all()
    assert torch.equal(after[3:], before[3:])
    assert torch.equal(after[:1], before[:1])
    assert not torch.equal(after, after.bfloat16().float())


@pytest.mark.sampled(of=3, each=False)  # of 17 modes, in which words are of few formats
@pytest.mark.parametrize(("strategy", "arithmetic"), MODES)
def test_low_words_of_states_are_never_taken_for_strangers(strategy: str, arithmetic: str) -> None:
    """Not of sums that cancel, or whose gradients are of all sizes."""
    (p,) = parameters(0, (SHAPE,))
    optimizer = collage_neuron.compile(Adam([p], betas=(0.5, 0.9)), strategy=strategy, arithmetic=arithmetic)
    g = torch.Generator().manual_seed(0)
    for _ in range(30):
        size = 2.0 ** torch.randint(-70, 60, p.shape, generator=g)
        p.grad = (size * torch.randn(p.shape, generator=g)).bfloat16()
        optimizer.step()
        for name in names_in(optimizer.state[p]).split:
            assert state_writes.belongs(optimizer, p, name).all()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_of_another_shape_is_rejected_by_its_name(steps: int) -> None:
    """In a list it stays what it is."""
    p, optimizer = trained("split433", steps=steps)
    optimizer.state[p]["row"] = torch.ones(3)
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"has a state 'row' of another shape, \[3\], .*: other code has set it"):
        train(p, optimizer, range(1))
    assert torch.equal(p, before)
    optimizer.state[p]["row"] = [optimizer.state[p]["row"]]
    train(p, optimizer, range(steps and 1))  # torch's own Adam takes a state that is there for its own


def test_exports_have_what_was_written() -> None:
    model = nn.Linear(8, 8)
    model, optimizer = collage_neuron.compile(model, Adam(model.parameters()))
    for i in range(20):
        set_gradients(list(model.parameters()), i)
        optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg_sq"].zero_()
    _, states = fp32.get_fp32_state_dict(model, optimizer)
    assert all((state["exp_avg_sq"] == 0).all() for state in states["state"].values())


# --- codes of block formats that other code writes between steps: values are encoded, and everything else is rejected -

BLOCKS = [name for name in STRATEGIES if has_blocks(name)]
REJECTED = r"was written between steps, and it holds codes .* assign a floating-point tensor of values"


def stepped(strategy: str, steps: int = 2, **settings: Any) -> tuple[nn.Parameter, Optimizer]:
    p = nn.Parameter(torch.zeros(4, 256))
    optimizer = collage_neuron.compile(AdamW([p], lr=1e-3, weight_decay=0.0), strategy=strategy, **settings)
    step(p, optimizer, steps)
    return p, optimizer


def step(p: nn.Parameter, optimizer: Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        p.grad = torch.full_like(p, 1e-2)
        optimizer.step()


def value(optimizer: Optimizer, name: str) -> torch.Tensor:
    found: torch.Tensor = optimizer.state_dict()["state"][0][name].float()
    return found


@pytest.mark.parametrize("strategy", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_tensor_of_values_is_encoded(strategy: str, dtype: torch.dtype) -> None:
    """In the next step, which moves by lr * 1e-2 / sqrt(v), and in checkpoints before it."""
    p, optimizer = stepped(strategy)
    for name in NAMES:
        optimizer.state[p][name] = torch.full((4, 256), 1e-2, dtype=dtype)
    assert all(torch.equal(value(optimizer, name), torch.full((4, 256), 1e-2).to(dtype).float()) for name in NAMES)
    before = exact_value(optimizer, p)
    step(p, optimizer)
    torch.testing.assert_close(value(optimizer, "exp_avg_sq"), torch.full((4, 256), 9.99e-3), rtol=2**-3, atol=0.0)
    torch.testing.assert_close(value(optimizer, "exp_avg"), torch.full((4, 256), 1e-2), rtol=2**-4, atol=0.0)
    moved, root = (before - exact_value(optimizer, p)).mean(), (9.99e-3 / (1 - 0.999**3)) ** 0.5
    torch.testing.assert_close(float(moved), 1e-3 * 1e-2 / (1 - 0.9**3) / root, rtol=2**-4, atol=0.0)


COMPUTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "half": lambda m: m * 0.5,
    "in fp32": lambda m: m.float(),
    "masked": lambda m: torch.where(torch.arange(256) % 2 == 0, m, 0.0),
    "without its mean": lambda m: m - m.float().mean(),
    "with more rows": lambda m: torch.cat([m, torch.zeros(2, 256)]),
    "with fewer rows": lambda m: m[1:].to(torch.bfloat16),
}


@pytest.mark.filterwarnings("ignore:a new parameter of shape")
@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
@pytest.mark.parametrize("strategy", BLOCKS)
def test_what_is_computed_of_codes_is_rejected(strategy: str, compute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Code numbers in place of values would be moments up to 32767, whose steps nobody could take back."""
    p, optimizer = stepped(strategy)
    p.grad = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)).to(p.dtype)
    optimizer.step()
    state = optimizer.state[p]
    name = "exp_avg" if state["exp_avg"].dtype in (torch.int8, torch.int16, torch.uint8) else "exp_avg_sq"
    new = compute(state[name])
    if len(new) != len(p):
        state.update({other: compute(state[other]) for other in NAMES})
        optimizer.state[q := nn.Parameter(torch.zeros(len(new), 256, dtype=p.dtype))] = optimizer.state.pop(p)
        optimizer.param_groups[0]["params"] = [q]
        state, p = optimizer.state[q], q
    state[name], p.grad = new, torch.zeros_like(p)
    with pytest.raises(ValueError, match=rf"'{name}' .*was computed from its codes .*Nothing was updated"):
        optimizer.step()


def exchanged(state: dict[str, Any], codes: Callable[[torch.Tensor], torch.Tensor]) -> None:
    state["exp_avg"] = codes(state["exp_avg"])


CODE_WRITES: dict[str, Callable[[dict[str, Any]], object]] = {
    "fill": lambda s: s["exp_avg"].fill_(1e-4),
    "zero": lambda s: s["exp_avg"].zero_(),
    "copy": lambda s: s["exp_avg"].copy_(torch.full((4, 256), 1e-2)),
    "mul": lambda s: s["exp_avg"].mul_(2),
    "add": lambda s: s["exp_avg"].add_(1),
    "clamp": lambda s: s["exp_avg"].clamp_(max=3),
    "rows": lambda s: s["exp_avg"][1:3].fill_(1),
    "other codes": lambda s: exchanged(s, lambda codes: torch.full_like(codes, 1e-4)),
    "written, then copied": lambda s: exchanged(s, lambda codes: codes.mul_(2).clone()),
}


@pytest.mark.parametrize("write", CODE_WRITES)
@pytest.mark.parametrize("strategy", ["split422", "split311"])
def test_other_writes_are_rejected_wherever_codes_would_be_read(strategy: str, write: str) -> None:
    p, optimizer = stepped(strategy)
    before = exact_value(optimizer, p)
    CODE_WRITES[write](optimizer.state[p])
    reads: list[Callable[[], object]] = [
        lambda: step(p, optimizer), optimizer.state_dict, lambda: copy.deepcopy(optimizer),
        lambda: pickle.dumps(optimizer), lambda: collage_neuron.compile(optimizer, strategy="plus"),
    ]  # fmt: skip
    for read in reads:
        with pytest.raises(ValueError, match=REJECTED):
            read()
    assert torch.equal(exact_value(optimizer, p), before)
    optimizer.state[p]["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
    step(p, optimizer)
    assert not torch.equal(exact_value(optimizer, p), before)


@pytest.mark.parametrize("by_address", [False, True])
@pytest.mark.parametrize("strategy", ["split422", "split311"])
def test_codes_written_through_data_are_read_as_codes_with_a_warning(strategy: str, by_address: bool) -> None:
    """No version counter moves, as where another process has sent them; what they stand for is read."""
    p, optimizer = stepped(strategy)
    before, codes = value(optimizer, "exp_avg").clone(), optimizer.state[p]["exp_avg"]
    if by_address:
        codes.data = codes.neg()
    else:
        codes.data.neg_()
    assert torch.equal(value(optimizer, "exp_avg"), -before)
    weights = exact_value(optimizer, p)
    p.grad = torch.zeros_like(p)
    with pytest.warns(UserWarning, match=r"'exp_avg' .* holds codes .*: assign a floating-point tensor"):
        optimizer.step()
    assert bool((exact_value(optimizer, p) > weights).all())  # against the direction of all steps before
    codes.data.neg_()
    optimizer.step()  # it is said once


def test_integers_that_are_no_codes_are_rejected() -> None:
    p, optimizer = stepped("split422")
    optimizer.state[p]["exp_avg"] = torch.ones(4, 256, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"'exp_avg' is torch\.int32, and the format i16q8 keeps it as codes"):
        step(p, optimizer)


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("nonfinite", ["pass", "skip"])
def test_what_belongs_to_a_run_is_not_rejected(backend: str, nonfinite: str) -> None:
    """Steps, skipped ones too, moved codes, copies, checkpoints of its own and of others, and other strategies."""
    p, optimizer = stepped("split422", backend=backend, nonfinite=nonfinite)
    if nonfinite == "skip":
        p.grad = torch.full_like(p, torch.inf)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    step(p, optimizer)
    for name, word in list(optimizer.state[p].items()):
        optimizer.state[p][name] = word.clone()  # as where states are moved to another device and back
    step(p, optimizer)
    optimizer.load_state_dict(saved)
    step(p, optimizer)
    for duplicate in (copy.deepcopy, copy.copy, through_torch_save):
        q, other = duplicate((p, optimizer))
        step(q, other, 2)
    step(p, optimizer)
    with pytest.warns(collage_neuron.StrategyChanged):
        collage_neuron.compile(optimizer, strategy="split311")
    step(p, optimizer, 2)
    optimizer.state.clear()
    step(p, optimizer, 2)


def test_on_xla_steps_are_ours_and_writes_are_rejected(xla: torch.device) -> None:
    import torch_xla

    p = nn.Parameter(torch.zeros(4, 256, device=xla))
    optimizer = collage_neuron.compile(AdamW([p], lr=1e-3), strategy="split422")
    for _ in range(3):
        step(p, optimizer)
        torch_xla.sync()
    optimizer.state[p]["exp_avg"].mul_(2)
    with pytest.raises(ValueError, match=REJECTED):
        step(p, optimizer)
    optimizer.state[p]["exp_avg"] = torch.full((4, 256), 1e-2, device=xla)
    step(p, optimizer)
    torch_xla.sync()
    torch.testing.assert_close(value(optimizer, "exp_avg").cpu(), torch.full((4, 256), 1e-2), rtol=2**-4, atol=0.0)
